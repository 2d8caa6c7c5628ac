"""The content of an inspector's screen, and when it is sent.

Invariant: sending never waits for the browser and never raises into the caller's thread; a
message that could not be sent is counted. Knows no model and no jax.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nnx_inspector.background import weak_method
from nnx_inspector.recordings.compare import compare
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.screen.comm import Screen, open_beside, refresh_side_pane
from nnx_inspector.screen.comparison import (
    A_RECORD,
    StepPair,
    clean_pass,
    comparison_message,
    other_pass,
)
from nnx_inspector.screen.export.last_state import LastState
from nnx_inspector.screen.export.notebook import SavedOutput
from nnx_inspector.screen.export.replay import PageContent
from nnx_inspector.screen.export.text import WHY_NO_VIEW, tree_text
from nnx_inspector.screen.frames import (
    curves_of,
    frame_of,
    histories_of,
    metrics_at,
    pass_of,
    passes_message,
)
from nnx_inspector.screen.python_text import PerturbationMessages
from nnx_inspector.stats.summary import Summary

if TYPE_CHECKING:
    import pandas as pd

MOST_NOTICES = 20
"""How many notices are kept, the newest ones."""
HISTORY_INTERVAL = 0.5
"""The shortest time between two histories (or curves) while a loop runs, in seconds."""
LONG_FRAME = 0.05
"""Seconds of a processor that making a frame may take before a pause follows it."""
PAUSE_FACTOR = 3
"""The length of that pause, in multiples of the time that the frame took."""
MOST_HELD = 4
"""How many passes chosen in a view are kept, though the recording may thin them out."""
STATE_INTERVAL = 0.1
"""The shortest time between states that accompany frames, in seconds; no frame needs them."""
TICK_INTERVAL = 0.25
"""The shortest time between two progress messages, in seconds."""
NOT_MEASURED = "The effect was not measured."


class Presenter:
    """Keeps the screen up to date.

    Args:
        snapshot: a bound method that returns the present recording, handles, effect, metrics and
            cost, and of a recorded run what the screen lacks; its owner is held weakly.

    Attributes:
        display_requested: whether a host has asked for the view. Before that nothing is drawn or
            diagnosed: the first view that says hello receives everything.
    """

    display_requested = False

    def __init__(self, snapshot: Callable[[], dict[str, Any]]):
        self.screen = Screen()
        self.screen.on_listening_changed = weak_method(self.state_changed)
        self._owner = weakref.WeakMethod(snapshot)
        self._lock = threading.RLock()
        self.selected = ""
        self.keys: tuple[str, ...] = ()
        self.layouts = 0
        self._layout: protocol.Layout | None = None
        self._notices: list[protocol.Notice] = []
        self.lasting_notices: tuple[protocol.Notice, ...] = ()  # shown first, as long as they hold
        self._messages = PerturbationMessages()
        self._state_seq = 0
        self._histories_sent_at = 0.0
        self._tick_at = 0.0
        self._state_sent_at = 0.0
        self.training_perturbed = False
        self.loop_thread: int | None = None  # the thread of the watched loop that runs, if any
        self.progress = protocol.Progress(kind="", running=False, step=0, total=None, rate=None)
        self.python = ""  # the Python equivalent of the last request from the screen
        self._kept: dict[str, protocol.Message] = {}
        self.on_presented: Callable[[bool], object] = lambda forced: None  # called after each pass
        self._displayed_in: int | None = None
        self._held: dict[int, Pass] = {}
        self._other: Pass | None = None
        self._clean: Callable[[], Pass] | None = None
        self._clean_number = -1
        self._other_number = 0
        self._newest_listed = -1
        self._paused_until = 0.0
        # for a saved notebook
        self.page_content: Callable[..., PageContent | None] = lambda *shown: None
        self._saved = SavedOutput(
            weak_method(self._last_state),
            weak_method(self._count_failure),
            weak_method(self._has_view),
        )

    def _snapshot(self) -> dict[str, Any] | None:
        method = self._owner()
        return None if method is None else method()

    # --------------------------------------------------------------- content

    @property
    def layout(self) -> protocol.Layout | None:
        return self._layout

    def set_layout(self, layout: protocol.Layout) -> None:
        with self._lock:
            self._layout = layout
            self.layouts = layout.layout
            self.keys = tuple(site.key for site in layout.sites)
        self.screen.send(layout)

    def notice(self, notice: protocol.Notice) -> None:
        """Add a notice, or move it to the end if it is there already."""
        with self._lock:
            kept = [n for n in self._notices if n != notice]
            self._notices = [*kept, notice][-MOST_NOTICES:]

    def select(self, site: str) -> None:
        self.selected = site
        self.state_changed()
        self.present(force=True)

    def state_at_rest(self) -> protocol.State | None:
        """The small state as if nothing ran, for a page without a kernel."""
        state = self._state()
        if state is None:
            return None
        resting = tuple(
            dataclasses.replace(p, pending=False, compiling=False) for p in state.perturbations
        )
        waits = state.effect is None and any(one.enabled for one in resting)
        return dataclasses.replace(
            state,
            no_effect=NOT_MEASURED if waits else state.no_effect,
            perturbations=resting,
            progress=dataclasses.replace(state.progress, running=False, rate=None),
            training_perturbed=False,
            compiling=0,
            closed=False,
            waiting=(),
            recorded=None,
        )

    def last_message(self, type_: str) -> Any:
        """The last message of this type that was passed to `publish`, or None."""
        return self._kept.get(type_)

    # --------------------------------------------------------------- sending

    def welcome(self) -> None:
        """A view has said hello: send everything."""
        self._saved.view_opened(self.screen.page)
        if self._layout is not None:
            self.screen.send(self._layout)
        for message in list(self._kept.values()):
            self.screen.send(message)
        self.state_changed()
        self.present(force=True)

    def publish(self, message: protocol.Message) -> None:
        """Send a message now and to each later view, until the next message of its type."""
        self._kept[message.type] = message
        self.screen.send(message)

    def set_first_example(self, example: int) -> None:
        """Let later views begin with an example; those on screen have chosen it."""
        if "inputs" in self._kept:
            self._kept["inputs"] = dataclasses.replace(self._kept["inputs"], example=example)

    def state_changed(self) -> None:
        with self._lock:  # if two threads send a state, the older one must not arrive last
            state = self._state()
            if state is not None:
                self.screen.send(state)
        if state is not None:
            self._saved.changed()

    def tick(self) -> None:
        """Send the progress between measured steps, a few times a second."""
        now = time.monotonic()
        if self._may_be_visible and now - self._tick_at >= TICK_INTERVAL:
            self._tick_at = now
            self.state_changed()
            snapshot = self._snapshot()
            if snapshot is not None:
                self._send_histories(snapshot["recording"], force=False)

    def present(self, *, force: bool = False) -> None:
        """Send the newest pass if the browser keeps up, or always with `force`."""
        if not self._may_be_visible or not (self.screen.ready_for_frame() or force):
            return
        if not force and time.monotonic() < self._paused_until:
            self.screen.dropped += 1
            return
        snapshot = self._snapshot()
        if snapshot is None:
            return
        recording = snapshot["recording"]
        passes = recording.passes
        if not passes:
            self._send_histories(recording, force=force)  # metrics may come before the first pass
            return
        if not self.screen.has_view and self._layout is not None:
            self.screen.send(self._layout)  # again: a view that is still loading has missed it
        began = time.thread_time()  # not by the clock: on a busy machine a thread waits its turn
        if self._clean is not None and self._clean_number == passes[-1].number:
            self._send_pass(self._clean(), self.selected, {}, held=True)
        self._send_pass(passes[-1], self.selected, snapshot["metrics"], held=False)
        now, took = time.monotonic(), time.thread_time() - began
        if took > LONG_FRAME:  # thousands of rows: let the loop, which waits for this, go on
            self._paused_until = now + PAUSE_FACTOR * took
        self._send_histories(recording, force=force)
        if force or now - self._state_sent_at >= STATE_INTERVAL:
            self.state_changed()
        self.on_presented(force)

    def show_pass(self, number: int, site: str) -> None:
        """Send an older pass, with the histograms of a site.

        Raises:
            KeyError: the recording does not have this pass, or no longer has it.
        """
        snapshot = self._snapshot()
        if snapshot is None:
            return
        recording = snapshot["recording"]
        one = self._pass(recording, number)
        metrics = {} if number == protocol.OTHER else metrics_at(recording, one.step)
        self._send_pass(one, site, metrics, held=True)

    def _pass(self, recording: Recording, number: int) -> Pass:
        if number == protocol.OTHER:
            if self._other is None:
                raise KeyError("There is no other run to compare with.")
            return self._other
        one = self._held.get(number) or pass_of(recording, number)
        # the pass on screen and the pinned pass stay when the recording thins them out
        self._held = {**{n: p for n, p in self._held.items() if n != number}, number: one}
        for gone in list(self._held)[:-MOST_HELD]:
            del self._held[gone]
        return one

    def set_other_pass(self, other: Pass | None, name: str, *, step: int | None) -> None:
        """Offer the pass of another run for comparison, or withdraw it."""
        self._other = other
        self._other_number += 1
        message = protocol.Other(
            name=name if other is not None else "", step=step, number=self._other_number
        )
        self.publish(message)

    def set_clean_pass(
        self, summaries: Callable[[], Mapping[str, Mapping[str, Summary | None]]] | None, one: Pass
    ) -> None:
        """Behind a pass show what it is without its perturbations, as long as it is the newest.

        The summaries are only asked for once the pass is sent; None if nothing is perturbed.
        """
        self._clean = (
            None if summaries is None else functools.cache(lambda: clean_pass(one, summaries()))
        )
        self._clean_number = one.number

    def compare_with(
        self, recording: Recording, other: Recording, *, at: StepPair = None, name: str = ""
    ) -> pd.DataFrame:
        """Compare a recording with another one, and offer a pass of the other for comparison.

        Returns:
            The frame of `nni.compare(other, recording)`.

        Raises:
            TypeError, ValueError: as in `nni.compare`.
        """
        theirs, ours = at if isinstance(at, tuple) else (at, at)
        frame = compare(other, recording, at=(theirs, ours))
        shown = other_pass(other, theirs, sites=recording.sites)
        step = None if other.name == A_RECORD else shown.step
        self.set_other_pass(shown, name or other.name or "another run", step=step)
        return frame

    def compared(self, request: protocol.Compare) -> protocol.Compared | None:
        """Compare two passes site by site.

        Raises:
            KeyError: one of them is missing, or no longer kept.
        """
        snapshot = self._snapshot()
        if snapshot is None:
            return None
        recording = snapshot["recording"]
        return comparison_message(
            request, self._pass(recording, request.number), self._pass(recording, request.pinned)
        )

    def _send_pass(
        self, one: Pass, selected: str, metrics: Mapping[str, float], *, held: bool
    ) -> None:
        with self._lock:
            frame, buffer = frame_of(
                one,
                keys=self.keys,
                selected=selected,
                seq=self.screen.next_seq(),
                layout=self.layouts,
                metrics=metrics,
                progress=self.progress,
                held=held,
            )
            self.screen.send(frame, buffer)

    def _send_histories(self, recording: Recording, *, force: bool) -> None:
        now = time.monotonic()
        if now - self._histories_sent_at < HISTORY_INTERVAL and not force:
            return
        self._histories_sent_at = now
        for message, buffer in histories_of(
            recording, keys=self.keys, selected=self.selected, layout=self.layouts
        ):
            self.screen.send(message, buffer)
        self.screen.send(*curves_of(recording))
        newest = recording.passes[-1].number if len(recording) else -1
        if force or newest != self._newest_listed:
            self._newest_listed = newest
            self.screen.send(*passes_message(recording.passes, recording.thinned))

    def _state(self) -> protocol.State | None:
        snapshot = self._snapshot()
        if snapshot is None:
            return None
        effect, no_effect = snapshot["effect"]()
        with self._lock:
            self._state_seq += 1
            self._state_sent_at = time.monotonic()
            cost: dict[str, Any] | None = snapshot["cost"]
            perturbations = snapshot.get("perturbations")
            if perturbations is None:
                perturbations = self._messages.of(snapshot["handles"], pending=snapshot["pending"])
            return protocol.State(
                seq=self._state_seq,
                selected=self.selected,
                perturbations=perturbations,
                training_perturbed=self.training_perturbed,
                listening=self.screen.listening(self.loop_thread),
                compiling=sum(p.compiling for p in perturbations),
                effect=effect,
                no_effect=no_effect,
                progress=self.progress,
                cost=None
                if cost is None
                else protocol.Cost(
                    bytes_sent=self.screen.bytes_sent,
                    frames_dropped=self.screen.dropped,
                    errors=self.screen.failures + snapshot["errors"],
                    **cost,
                ),
                waiting=snapshot["waiting"],
                notices=(*self.lasting_notices, *self._notices),
                python=self.python,
                closed=self.screen.closed,
                recorded=snapshot.get("recorded"),
            )

    # --------------------------------------------------------------- display

    def display_in_notebook(self, text: str) -> bool:
        """Show the widget if this runs in a notebook's kernel, and return whether it does.

        `text` is the first line of what stands there in place of the widget; see `mimebundle`.
        """
        count = _execution_count()
        if count is not None:
            from IPython.display import display

            data, metadata = self._mimebundle(text, WHY_NO_VIEW)
            display(data, metadata=metadata, raw=True)
            refresh_side_pane(self.screen.control, self._title)
            self._displayed_in = count
            self._save_last_state()
        return count is not None

    def open_beside(self) -> None:
        """Show the widget beside the notebook; see `comm.open_beside`."""
        open_beside(self.screen.control, self._title)

    @property
    def _title(self) -> str:
        return self._layout.model if self._layout is not None else ""

    @property
    def _may_be_visible(self) -> bool:
        seen = self.display_requested or self._displayed_in is not None or self.screen.has_view
        return seen and not self.screen.closed

    @property
    def is_visible(self) -> bool:
        """Whether the widget is already visible while a cell runs."""
        return self._displayed_in is not None and not is_unattended()

    def _save_last_state(self) -> None:
        """Put the last state beside the widget, so that a saved notebook shows it."""
        from IPython.core.getipython import get_ipython

        self._saved.show(get_ipython())

    def _last_state(self) -> LastState | None:
        """The state that a saved notebook keeps; None while a loop runs or nothing is shown yet."""
        snapshot, layout = self._snapshot(), self._layout
        state = self.state_at_rest()
        if snapshot is None or layout is None or state is None or self.progress.running:
            return None
        return LastState(
            inspector=self.screen.id,
            layout=layout,
            state=state,
            kept=tuple(x for x in map(self.last_message, ("findings", "sweep")) if x is not None),
            recording=snapshot["recording"],
            content_of=self.page_content,
        )

    def _has_view(self) -> bool:
        return self.screen.has_view

    def _count_failure(self, error: Exception) -> None:
        self.screen.failures += 1

    def mimebundle(self, text: str, **kwargs: object) -> Any:
        """The inspector's display in a notebook: the widget, but not twice in one cell.

        Where no widget can be shown, a line of text and the tree stand in its place.
        """
        count = _execution_count()
        if self.screen.closed or (count is not None and count == self._displayed_in):
            return {"text/plain": text}
        self.display_requested = True
        if count is not None:
            self._save_last_state()
        return self._mimebundle(text, *[WHY_NO_VIEW] * (count is not None), **kwargs)

    def _mimebundle(self, text: str, *below: str, **kwargs: Any) -> Any:
        bundle: Any = self.screen.control._repr_mimebundle_(**kwargs)
        data, metadata = bundle
        rows = () if self._layout is None else self._layout.sites
        return {**data, "text/plain": "\n".join([tree_text(text, rows), *below])}, metadata

    def close(self) -> None:
        """Tell the views and close the comms."""
        with self._lock:
            if self.screen.closed:
                return
            self._saved.close()
            if self._snapshot() is not None:
                state = self._state()
                if state is not None:
                    self.screen.send(dataclasses.replace(state, closed=True))
            self.screen.close()


def is_unattended() -> bool:
    """Whether a program such as nbconvert runs the notebook, so nobody can click."""
    from IPython.core.getipython import get_ipython

    parent: Any = getattr(get_ipython(), "parent_header", None) or {}
    return parent.get("content", {}).get("allow_stdin", True) is False


def _execution_count() -> int | None:
    """The number of the running cell in a notebook's kernel; None elsewhere."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    shell: Mapping[str, Any] | Any = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return int(shell.execution_count)
