"""`open`: a recorded run on screen, while it happens elsewhere or after its end.

The screen is that of an inspector, without the model: the rows are those that the file has, and
what needs the model is left out. A thread reads what the file has gained, at most once in half a
second, and only while the run is on screen. Invariant: the run is only read, and an error of the
screen never reaches the caller. Imports no jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from nnx_inspector.background import weak_method
from nnx_inspector.errors import InspectorError, error_text
from nnx_inspector.findings.finding import Findings
from nnx_inspector.findings.findings import diagnose
from nnx_inspector.recordings.follow import Follower
from nnx_inspector.recordings.load import load
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.recordings.tree_rows import (
    MODULES,
    Site,
    rows_of_columns,
    with_recorded,
    with_states,
)
from nnx_inspector.screen import protocol
from nnx_inspector.screen.comparison import StepPair
from nnx_inspector.screen.control.folder import read_values, send_request
from nnx_inspector.screen.control.run_requests import RunRequests
from nnx_inspector.screen.control.state import CONTROL, ControlState
from nnx_inspector.screen.control.steered import Steered
from nnx_inspector.screen.control.values import SiteValues
from nnx_inspector.screen.export.replay import PageContent, detailed_sites
from nnx_inspector.screen.frames import casts_message, findings_message, metrics_at
from nnx_inspector.screen.presenter import Presenter
from nnx_inspector.screen.python_text import perturbation_of_click
from nnx_inspector.screen.recording_view import RecordingView

if TYPE_CHECKING:
    import pandas as pd

    from nnx_inspector.perturbations.base import Kind

Path = str | bytes | os.PathLike[str]
LOOK_INTERVAL: Final = 0.5
"""Seconds between two looks at the file."""
STALL_TIMEOUT: Final = 10.0
"""Seconds for which a run that seems to stall may still answer a request for values."""
MOST_READS: Final = 64
"""How many looks read any file whole; one reads about 16 MB."""
TABLE_ERRORS: Final = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""What reading a table raises that another program has written."""
PAUSE_FACTOR, LONGEST_PAUSE = 9, 5.0
"""The pause after a diagnosis, in multiples of its time, and its most seconds."""
MODEL_PANELS: Final = (
    "values", "words", "units", "examples", "lens", "attribution", "flow", "code", "nnx", "sweep",
)  # fmt: skip
"""The panels that need the model; a run that takes requests has the first one."""
STEERABLE_KINDS: Final = ("Zero", "Scale")
"""The kinds for which every program of a run has room."""
NO_CONTROL: Final = (
    "this run takes no requests. Start it with nni.watch(model, save=path, control=True)."
)
NO_EFFECT: Final = "What the run's perturbations do shows in its metrics."


def open(path: Path | Sequence[Path], *, display: bool = True) -> Run:
    """Open a recorded run on screen, and follow it while it goes on elsewhere.

    The file needs neither the model nor jax. In a notebook the run displays itself, and gets each
    new pass at most a second after it is written. In a script the same object has no screen.

    Args:
        path: a file that `nni.watch(save=)`, `insp.save` or `recording.save` has written, or is
            still writing. Of a pair of files the second is compared with the first, which is on
            screen.
        display: whether to show the run at once when running in a notebook.

    Raises:
        InspectorError: a file is not a recording, or only a newer version can read it; the second
            of a pair is damaged. Of the first, `state` says so.
        ValueError: there are no files, or more than two.
        TypeError: `path` is neither a path nor a list of paths.
        OSError: a file cannot be opened.

    Example:
        >>> import pathlib, tempfile
        >>> import nnx_inspector as nni
        >>> from nnx_inspector.stats.summary import empty
        >>> recording = nni.Recording()
        >>> recording.append(7, {"encoder": {"output": empty()}}, metrics={"loss": 0.5})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     recording.save(pathlib.Path(folder, "run.nni"))
        ...     run = nni.open(pathlib.Path(folder, "run.nni"))
        >>> run.recording.steps
        [7]
        >>> run.close()
    """
    if not isinstance(path, (str, bytes, os.PathLike, Sequence)):
        raise TypeError(
            f'nni.open("run.nni") takes the path of a recording, or a list of two, got '
            f"{type(path).__name__}."
        )
    paths = [path] if isinstance(path, (str, bytes, os.PathLike)) else list(path)
    if not 1 <= len(paths) <= 2:
        raise ValueError(
            f"nni.open shows one run, or a pair of runs side by side, got {len(paths)} paths. "
            f"For the figures of more: nni.compare(nni.load(a), nni.load(b))."
        )
    run = Run(paths[0])
    try:
        if len(paths) == 2:
            run.compare(load(paths[1]))
        if display:
            run.display()
    except BaseException:
        run.close()
        raise
    return run


class Run(RecordingView):
    """A recorded run; see `nni.open`. In a notebook it displays itself."""

    def __init__(self, path: Path):
        self._path = os.path.abspath(os.fsdecode(path))
        self._following = following = Follower(self._path)
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._shown_rows: tuple[object, int, int] = (None, -1, -1)
        self._state_text = ""
        self._control_table: object = None
        self._control = ControlState(run="", every=0)
        self._unsent = self._undiagnosed = False
        self._paused_until = 0.0
        self._view = view = Presenter(self._snapshot)
        view.page_content = weak_method(self._content)
        self._requests = RunRequests(self, view)
        self._closing = contextlib.ExitStack()
        self._closing.callback(view.close)
        self._closing.callback(_close_file, following, self._lock)
        for worker in self._requests.workers:
            self._closing.callback(worker.close)
        self._closing.callback(self._closed.set)
        weakref.finalize(self, self._closing.close).atexit = False
        self._read(MOST_READS)
        self._show_rows()
        self._show_control()

    # --------------------------------------------------------------- reading

    @property
    def recording(self) -> Recording:
        """Everything that the file holds by now."""
        self._read(MOST_READS)
        return self._following.recording

    @property
    def findings(self) -> Findings:
        """The problems found in this run by now, worst first."""
        return diagnose(self.recording)

    @property
    def state(self) -> str:
        """How the run is: "running", "stalled", "ended" or "gone" (its process died)."""
        self._read(MOST_READS)
        return self._following.state.name

    def _select(self, site: str) -> None:
        keys = self._view.keys
        if site not in keys:
            near = difflib.get_close_matches(site, keys, n=5, cutoff=0) or keys[:5]
            raise ValueError(f"This run has no site {site!r}. Near: {', '.join(map(repr, near))}.")
        self._view.select(site)

    def compare(
        self, other: Path | Recording | None, *, at: StepPair = None, name: str = ""
    ) -> pd.DataFrame | None:
        """Compare this run with another one, and show both on screen; None ends the comparison.

        The arguments and the result are those of `Inspector.compare`; `other` may be a file too.
        """
        if other is None:
            self._view.set_other_pass(None, "", step=None)
            return None
        if not isinstance(other, Recording):
            other = load(other)
        return self._view.compare_with(self.recording, other, at=at, name=name)

    # -------------------------------------------------------------- steering

    @property
    def perturbations(self) -> list[Steered]:
        """The perturbations of a run that takes requests, in the order in which they were made."""
        self._read(MOST_READS)
        run = self._control.run

        def now(number: int) -> protocol.Perturbation | None:
            another = self._control.run not in (run, "")  # which has numbers of its own
            return None if another else self._current_perturbation(number)

        return [Steered(one, now, self.ask) for one in self._control.perturbations]

    def perturb(self, site: str, perturbation: Kind) -> Steered:
        """Add a perturbation to the run, switched on: a `Zero` or a `Scale` of outputs.

        Raises:
            InspectorError: the run takes no requests (`nni.watch(control=True)`), is over, or
                refuses this one; the text says why.
        """
        kind, strength = type(perturbation).__name__, getattr(perturbation, "tuned_to", None)
        if kind not in STEERABLE_KINDS or perturbation != perturbation_of_click(
            kind, strength, "output"
        ):
            raise InspectorError(
                f"{perturbation!r} cannot be sent to a run: only {' and '.join(STEERABLE_KINDS)} "
                f"on outputs can. Declare it in the script: nni.watch(model, save=path, "
                f"control={{{site!r}: perturbation}})."
            )
        self.ask(protocol.Perturb(id=0, site=site, kind=kind, strength=strength, at="output"))
        return self.perturbations[-1]

    @property
    def every(self) -> int:
        """Every so many steps are measured; can be set. 0 if the run takes no requests."""
        self._read(MOST_READS)
        return self._control.every

    @every.setter
    def every(self, every: int) -> None:
        self.ask(protocol.SetEvery(id=0, every=every))

    def measure_next(self) -> None:
        """Let the run measure its next step too."""
        self.ask(protocol.MeasureNext(id=0))

    def values(self, site: str, *, example: int | None = None) -> SiteValues:
        """What a site returns in the next step of the run, for which it compiles a program first.

        Args:
            site: its key, `"layers[3]"` for one layer of a stack.
            example: the number of one example, an entry of the first axis. A run sends at most
                16 MiB.

        Returns:
            The values, with the step that they belong to: `found.value`, `found.step`.

        Raises:
            InspectorError: as in `ask`; there is no such site, it is not called, or its values are
                too large.
        """
        number = self.ask(protocol.ReadSite(id=0, site=site, example=example))
        return read_values(self._path, self._control.run, number)

    def ask(self, request: protocol.Request) -> int:
        """Ask the run for something, and return the number of the request when it is done.

        Raises:
            InspectorError: the run takes no requests, is over or stalled, or refuses this one.
        """
        self._read(MOST_READS)
        number, run = secrets.randbits(48), self._control.run
        if not run and self._control_table is not None:
            text = self._following.state.text
            raise InspectorError(f"the run takes no requests any more. {text}")
        if not run:
            raise InspectorError(NO_CONTROL)
        send_request(self._path, run, dataclasses.replace(request, id=number))
        asked = time.monotonic()
        while number not in self._control.answers:
            life = self._following.state
            if self._control.run != run or life.name in ("ended", "gone"):
                raise InspectorError(f"the run has not answered. {life.text}")
            needs_step = isinstance(request, protocol.ReadSite) and life.name == "stalled"
            if needs_step and time.monotonic() - asked >= STALL_TIMEOUT:
                raise InspectorError(f"the run has made no step since it was asked. {life.text}")
            if self._closed.wait(LOOK_INTERVAL / 2):
                raise InspectorError("it was closed here before the run has answered.")
            self._read()
        if why := self._control.answers[number]:
            raise InspectorError(why)
        return number

    def _page(self) -> tuple[str, PageContent]:
        layout, state = self._view.layout, self._view.state_at_rest()
        assert layout is not None  # both exist from the beginning
        assert state is not None
        found = findings_message(diagnose(self._following.recording))
        return self._following.recording.name, self._content(layout, state, [found])

    def _report_fields(self) -> dict[str, Any]:
        return {"title": f"Report of {os.path.basename(self._path)}"}

    def close(self) -> None:
        """Stop following, and free the widget. The recording stays readable."""
        self._closing.close()

    def display(self) -> None:
        """Show the run now, if this is a notebook."""
        if self._view.display_in_notebook(repr(self)):
            self._start_following()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        self._start_following()
        return self._view.mimebundle(repr(self), **kwargs)

    def __repr__(self) -> str:
        closed = ", closed" if self._closed.is_set() else ""
        return f"Run({self._following.recording!r}, {self._following.state.name}{closed})"

    # ------------------------------------------------------------- following

    def _read(self, looks: int = 1) -> bool:
        """Read what the file has gained, in some looks, and return whether there was anything."""
        some = False
        with self._lock:
            while looks and not self._closed.is_set() and self._following.poll():
                some, looks = True, looks - 1
            if some:
                self._unsent = self._undiagnosed = True
                self._show_rows()
                self._show_control()
        return some

    def _start_following(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(
                    target=_follow_run, args=(weakref.ref(self), self._closed), daemon=True,
                    name="nnx_inspector.following",
                )  # fmt: skip
                self._thread.start()

    def _update(self) -> None:
        """Show what is new. What a busy browser leaves out is sent once the file rests."""
        changed = self._read()
        if self._unsent:
            self._view.present(force=not changed)
            self._unsent = changed
        if (said := self._following.state.text) != self._state_text:
            self._state_text = said
            self._view.state_changed()
        if self._undiagnosed and time.monotonic() >= self._paused_until:
            self._undiagnosed = False
            began = time.monotonic()
            found = findings_message(diagnose(self._following.recording))
            took = time.monotonic() - began
            self._paused_until = began + took + min(PAUSE_FACTOR * took, LONGEST_PAUSE)
            if found != self._view.last_message(found.type):
                self._view.publish(found)

    def _show_error(self, error: Exception) -> None:
        self._view.notice(protocol.Notice(level="error", text=error_text(error), site=None))
        self._view.state_changed()

    # --------------------------------------------------------------- content

    def _show_rows(self) -> None:
        """Show the rows of the file, if there are others than before."""
        recording = self._following.recording
        table, sites, facts = recording.table(MODULES), recording.sites, recording.facts
        states = dict.fromkeys(recording.states, "")
        now = table, len(sites) + len(states), self._following.replaced
        if now[0] is self._shown_rows[0] and now[1:] == self._shown_rows[1:]:
            return
        self._shown_rows = now
        known: tuple[Site, ...] = ()
        if table is not None:
            try:
                known = rows_of_columns(table)
            except TABLE_ERRORS as error:  # the file is another's, or was changed
                text = f"The modules of the file cannot be shown: {error}"
                self._view.notice(protocol.Notice(level="warning", text=text, site=None))
        types = {} if facts is None else {one.site: one.type for one in facts.sites}
        rows = with_states(with_recorded(known, sites, types), states)
        number = self._view.layouts + 1
        self._view.set_layout(
            protocol.Layout(layout=number, model=rows[0].kind, sites=rows, where=recording.where)
        )

    @property
    def steers(self) -> bool:
        """Whether the run takes requests now."""
        return self._control.run != "" and self._is_alive

    @property
    def _is_alive(self) -> bool:
        return self._following.state.name in ("running", "stalled")

    def _current_perturbation(self, number: int) -> protocol.Perturbation | None:
        """A perturbation of the run as it is now, None if it was removed."""
        return next((one for one in self._control.perturbations if one.id == number), None)

    def _show_control(self) -> None:
        """Show what a steered run says of its perturbations, if it is another than before."""
        table = self._following.recording.table(CONTROL)
        if table is self._control_table:
            return
        self._control_table = table
        with contextlib.suppress(*TABLE_ERRORS):  # of another form: not steered
            self._control = ControlState.from_columns(table or {})
        on = any(one.enabled for one in self._control.perturbations)
        self._view.training_perturbed = on and self._is_alive
        self._view.state_changed()

    def _snapshot(self) -> dict[str, Any]:
        following = self._following
        recording = following.recording
        newest = recording.passes[-1].step if len(recording) else 0
        self._view.progress = protocol.Progress(
            kind="recorded",
            running=self._is_alive,
            step=newest,
            total=None,
            rate=None,
        )
        return {
            "recording": recording,
            "perturbations": self._control.perturbations,
            "metrics": metrics_at(recording, newest),
            "cost": None,
            "effect": lambda: (None, NO_EFFECT),
            "errors": 0,
            "waiting": (),
            "recorded": protocol.Recorded(
                run=following.state.name,
                text=f"{recording.name}: {following.state.text}",
                missing=MODEL_PANELS[self.steers :],
                steers=self.steers,
                every=self._control.every,
            ),
        }

    def _content(
        self, layout: protocol.Layout, state: protocol.State, kept: Sequence[protocol.Message]
    ) -> PageContent:
        saved, recording = time.strftime("%Y-%m-%d %H:%M"), self._following.recording
        casts = protocol.Look(id=0, what="casts", site="")
        return PageContent(
            layout=layout,
            state=state,
            kept=tuple(kept),
            answers={"casts": {"": casts_message(recording, self._view.keys, casts)}},
            detailed=detailed_sites(layout, state.selected),
            missing=(*MODEL_PANELS, "compare"),
            note=f"{recording.name}, saved {saved}, with {{passes}}.",
        )


def _close_file(following: Follower, lock: threading.RLock) -> None:
    """Close a file when no thread reads it."""
    with lock:
        following.close()


def _follow_run(reference: weakref.ref[Run], closed: threading.Event) -> None:
    """Follow a run as long as it is there."""
    while not closed.wait(LOOK_INTERVAL):
        run = reference()
        if run is None:
            return
        try:
            run._update()
        except Exception as error:  # noqa: BLE001 - shown, and the file is looked at again
            run._show_error(error)
        del run
