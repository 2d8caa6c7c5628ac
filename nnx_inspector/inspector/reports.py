"""What a watched loop reports of itself, besides figures: that it does not call the model, that a
perturbation does not act, that a site is not seen; and its figures, to a tracker of the user's.

Invariant: each report is shown once in a loop, and warned of once, in the loop's own thread. The
recorder's thread may gather them. What is certain is decided by `live.diagnostics`.
"""

from __future__ import annotations

import jax

from nnx_inspector.background import weak_method
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.handles import Handle
from nnx_inspector.live.diagnostics import Diagnostics, dropped_warnings, failure_warnings
from nnx_inspector.live.inbox import WatchedPass
from nnx_inspector.live.session import Session
from nnx_inspector.recordings.tree_rows import LAYERS_UNKNOWN, layer_key
from nnx_inspector.trackers.tracker import Tracker
from nnx_inspector.trackers.writer import TrackerWriter

MODEL = -1
"""Stands for a handle's number: the model itself."""


class Reports:
    """The reports of one loop after the other. The caller holds the core's lock.

    Attributes:
        to: the tracker that the next loop writes to.
    """

    def __init__(self, core: Core):
        self._core = core
        self._diagnostics: Diagnostics | None = None
        self._reported: set[int] = set()
        self._warnings: list[str] = []
        self._unseen: dict[str, str] = {}
        self.tracker: Tracker | None = None
        self._writing: TrackerWriter | None = None

    def begin(self, diagnostics: Diagnostics) -> None:
        self._diagnostics, self._reported, self._warnings = diagnostics, set(), []
        core, self._writing = self._core, None
        if self.tracker is not None and not (jax.process_index() and core.in_all_processes):
            how = core.current_findings, weak_method(self._not_written)
            self._writing = TrackerWriter(self.tracker, core.recording, *how)
            core.meter.tracker = self._writing.cost
            if self.tracker.lacks:
                core.notice("info", self.tracker.lacks)

    def end_writing(self) -> None:
        """Write to the tracker what is not written yet, without a lock: it may take long."""
        if self._writing is not None:
            self._writing.end()

    def _not_written(self, text: str) -> None:
        with self._core.lock:
            self._core.metrics.errors += 1
            self._core.notice("error", text)
            self._warnings.append(text)

    def end(
        self, session: Session, passes: list[WatchedPass], count: int, taken: tuple[Handle, ...]
    ) -> None:
        """Report what is certain now that the loop has ended."""
        self._diagnose(session, passes, count, taken, step=None)
        self._diagnostics = None
        self._report_dropped(session)

    def add(
        self,
        session: Session,
        passes: list[WatchedPass],
        count: int,
        taken: tuple[Handle, ...],
        *,
        step: int,
    ) -> None:
        """Report what a measured step has called and perturbed.

        Args:
            passes: those of the step.
            count: how many passes had begun by its end.
            taken: the perturbations that were on.
        """
        self._diagnose(session, passes, count, taken, step=step)
        self._report_dropped(session)

    def warnings(self) -> list[str]:
        """The new warnings, for the loop's own thread to give."""
        found, self._warnings = self._warnings, []
        return found + self._core.warnings()

    def _diagnose(
        self,
        session: Session,
        passes: list[WatchedPass],
        count: int,
        taken: tuple[Handle, ...],
        *,
        step: int | None,
    ) -> None:
        diagnostics, core = self._diagnostics, self._core
        if diagnostics is None:
            return
        over = step is None
        diagnostics.note(count)
        if step is None:
            step = core.step
        else:
            diagnostics.step(step)
        texts = dict[int, str]()
        uncalled = diagnostics.uncalled(over=over)
        if uncalled is not None or diagnostics.called:
            core.recording.miss(uncalled)
        if uncalled is not None:
            texts[MODEL] = f"{uncalled.what}: {uncalled.advice}."
        idle = diagnostics.idle(core.handles.expected(taken), session.reached(), passes)
        core.handles.set_idle(idle)
        on = {handle.id: handle for handle in taken}
        for number, why in diagnostics.certainly_idle(idle, step, over=over).items():
            if number in on:
                kind = on[number].perturbation.kind_name
                texts[number] = f"{kind} on {on[number].site!r} is not acting: {why}."
        for number, why in diagnostics.misfits.items():
            texts[number] = f"{why}, so it changes nothing in such a call."
        for number, text in texts.items():
            if number not in self._reported:
                self._reported.add(number)
                core.notice("warning", text, on[number].site if number in on else None)
                self._warnings.append(text)

    def _report_dropped(self, session: Session) -> None:
        dropped = list(dropped_warnings(session, over=self._diagnostics is None))
        for text in (*dropped, *failure_warnings(session)):
            self._core.notice("warning", text)
        if MODEL not in self._reported:  # otherwise that says it
            self._warnings += dropped
        unseen = dict(session.unseen)
        for site in session.merged_stacks:
            count = session.stacks[site].layers
            unseen.update({layer_key(site, i): LAYERS_UNKNOWN for i in range(count)})
        if unseen != self._unseen:
            self._unseen = unseen
            self._core.show_layout(unseen)
