"""What is on an inspector's screen, and when it is sent.

Invariant: sending never waits for the browser and never raises into the caller's thread; a
message that could not be sent is counted. Knows no model and no jax.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from nnx_inspector import protocol
from nnx_inspector.offers import Showing
from nnx_inspector.presenting import curves_of, frame_of, histories_of
from nnx_inspector.screen import Screen
from nnx_inspector.summary import Summary

NOTICES = 20
"""Notices kept; older ones go."""
SLOW = 0.5
"""Seconds between two histories (or curves) at least, while a loop runs."""
TICK = 0.25
"""Seconds between two progress messages at least."""

NO_EFFECT_YET = "Nothing is perturbed."


class Presenter:
    """Keeps the screen up to date.

    Args:
        handle: called with each command of the browser.
        snapshot: a bound method that gives the recording, handles, metrics and meter at this
            moment; its owner is held weakly.
    """

    def __init__(self, handle: Callable[[Any], None], snapshot: Callable[[], dict[str, Any]]):
        self.screen = Screen(handle)
        self._owner = weakref.WeakMethod(snapshot)
        self._lock = threading.RLock()
        self.selected = ""
        self.keys: tuple[str, ...] = ()
        self.layouts = 0
        self._layout: protocol.Layout | None = None
        self._notices: list[protocol.Notice] = []
        self.standing: tuple[protocol.Notice, ...] = ()  # for as long as they hold; first
        self._showing = Showing()
        self._state_seq = 0
        self._slow_at = 0.0
        self._tick_at = 0.0
        self.effect: protocol.Effect | None = None
        self.training_perturbed = False
        self.loop_thread: int | None = None  # where a watched loop runs, while one does
        self.progress = protocol.Progress(kind="", running=False, step=0, total=None, rate=None)
        self.failures = 0
        self._shown_in: int | None = None

    def _snapshot(self) -> dict[str, Any] | None:
        method = self._owner()
        return None if method is None else method()

    # --------------------------------------------------------------- content

    def set_layout(self, layout: protocol.Layout) -> None:
        """Show other rows from now on."""
        with self._lock:
            self._layout = layout
            self.layouts = layout.layout
            self.keys = tuple(site.key for site in layout.sites)
        self._send(layout)

    def notice(self, notice: protocol.Notice) -> None:
        """Add a notice; one that is there already moves to the end."""
        with self._lock:
            kept = [n for n in self._notices if n != notice]
            self._notices = [*kept, notice][-NOTICES:]

    def select(self, site: str) -> None:
        """Show one site's histogram and history."""
        self.selected = site
        self.state_changed()
        self.present(force=True)

    # --------------------------------------------------------------- sending

    def welcome(self) -> None:
        """A view has said hello: send everything."""
        if self._layout is not None:
            self._send(self._layout)
        self.state_changed()
        self.present(force=True)

    def state_changed(self) -> None:
        """Send the small state, whole."""
        state = self._state()
        if state is not None:
            self._send(state)

    def tick(self) -> None:
        """Between measured steps: progress, a few times a second."""
        now = time.monotonic()
        if now - self._tick_at >= TICK:
            self._tick_at = now
            self.state_changed()
            self._slow(force=False)

    def present(self, *, force: bool = False) -> None:
        """Send the newest pass, if the browser keeps up (or in any case, with `force`)."""
        if not (self.screen.ready_for_frame() or force) or self.screen.closed:
            return
        snapshot = self._snapshot()
        if snapshot is None or not len(snapshot["recording"]):
            return
        if not self.screen.greeted and self._layout is not None:
            self._send(self._layout)  # a view that is still loading has missed it
        newest = snapshot["recording"].passes[-1]
        summaries: dict[str, dict[str, Summary]] = {}
        for site, quantity, summary in newest.items():
            summaries.setdefault(site, {})[quantity] = summary
        with self._lock:
            frame, buffer = frame_of(
                keys=self.keys,
                summaries=summaries,
                selected=self.selected,
                seq=self.screen.next_seq(),
                layout=self.layouts,
                step=newest.step,
                perturbed=newest.perturbed,
                metrics=snapshot["metrics"],
                progress=self.progress,
            )
            self._send(frame, buffer)
        self._slow(force=force)
        self.state_changed()

    def _slow(self, *, force: bool) -> None:
        now = time.monotonic()
        snapshot = self._snapshot()
        if snapshot is None or (now - self._slow_at < SLOW and not force):
            return
        self._slow_at = now
        recording = snapshot["recording"]
        for message, buffer in histories_of(
            recording, keys=self.keys, selected=self.selected, layout=self.layouts
        ):
            self._send(message, buffer)
        self._send(*curves_of(recording))

    def _send(self, message: Any, buffer: bytes | None = None) -> None:
        try:
            self.screen.send(message, buffer)
        except Exception:  # noqa: BLE001 - a broken comm must not stop a training loop
            self.failures += 1

    def _state(self) -> protocol.State | None:
        snapshot = self._snapshot()
        if snapshot is None:
            return None
        with self._lock:
            self._state_seq += 1
            meter = snapshot["meter"]
            perturbations = self._showing.of(snapshot["handles"], pending=snapshot["pending"])
            return protocol.State(
                version=protocol.VERSION,
                seq=self._state_seq,
                selected=self.selected,
                perturbations=perturbations,
                training_perturbed=self.training_perturbed,
                listening=self.screen.listening(self.loop_thread),
                compiling=sum(p.compiling for p in perturbations),
                effect=self.effect,
                no_effect="" if self.effect is not None else _why_none(snapshot["handles"]),
                progress=self.progress,
                cost=protocol.Cost(
                    plain_seconds=meter.plain_seconds,
                    inspected_seconds=meter.inspected_seconds,
                    compilations=meter.compilations,
                    bytes_sent=self.screen.bytes_sent,
                    frames_dropped=self.screen.dropped,
                    errors=self.failures + snapshot["errors"],
                ),
                notices=(*self.standing, *self._notices),
                closed=self.screen.closed,
            )

    # --------------------------------------------------------------- display

    def display_in_notebook(self) -> None:
        """Show the widget, where this runs in a notebook's kernel."""
        count = _execution_count()
        if count is not None:
            from IPython.display import display

            display(self.screen.control)
            self._shown_in = count

    def mimebundle(self, text: str, **kwargs: Any) -> Any:
        """What a notebook shows for the inspector: the widget, but not twice in one cell."""
        count = _execution_count()
        if self.screen.closed or (count is not None and count == self._shown_in):
            return {"text/plain": text}
        return self.screen.control._repr_mimebundle_(**kwargs)

    def close(self) -> None:
        """Tell the views and close the comms."""
        with self._lock:
            if self.screen.closed:
                return
            snapshot = self._snapshot()
            if snapshot is not None:
                state = self._state()
                if state is not None:
                    self._send(dataclasses.replace(state, closed=True))
            self.screen.close()


def _why_none(handles: list[Any]) -> str:
    if not any(h.enabled for h in handles):
        return NO_EFFECT_YET
    return "The effect has not been measured yet."


def _execution_count() -> int | None:
    """The number of the cell that runs, in a notebook's kernel; None elsewhere."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    shell: Mapping[str, Any] | Any = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return int(shell.execution_count)
