"""The watched loops of one inspector: between two steps changes are taken over, measured steps
are recorded and shown.

Invariant: one loop at a time; what goes wrong with the screen never reaches the training. Does not
decide which steps are sampled (`loop`), nor what is measured (`watching`).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from flax import nnx

from nnx_inspector.background import weakly
from nnx_inspector.errors import InspectorError, warn
from nnx_inspector.hooks.sites import Only, Selection
from nnx_inspector.inspector.handles import Handle, Handles
from nnx_inspector.inspector.metrics import Meter, Metrics
from nnx_inspector.live.attendance import Attendance, Expected
from nnx_inspector.live.inbox import Taken
from nnx_inspector.live.losses import losses_of
from nnx_inspector.live.session import Session
from nnx_inspector.live.steps import Region, check_every, watched
from nnx_inspector.perturbations.apply import Reach
from nnx_inspector.perturbations.gradients import GradientPerturbation
from nnx_inspector.perturbations.slots import Setting
from nnx_inspector.recordings.layers import NOT_TOLD_APART, Stack, layer_key
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.screen.presenter import Presenter
from nnx_inspector.screen.timeline import Settings

T = TypeVar("T")
MODEL = -1
"""In place of the number of a handle: the model itself."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a loop shares with the rest of its inspector.

    Attributes:
        refresh: measure the effect of what is perturbed anew, after a step.
        reach: what of a pass can be perturbed: how often sites are called in scans.
        unseen: told of sites that a running program cannot show, with the reasons.
        stacks: the sites whose layers are to be told apart, and how they run.
        settings: numbers for what is perturbed.
    """

    lock: Any
    recording: Recording
    metrics: Metrics
    meter: Meter
    view: Presenter
    handles: Handles
    refresh: Callable[[int], Any]
    reach: Callable[[], Reach]
    unseen: Callable[[dict[str, str]], Any]
    stacks: Callable[[], dict[str, Stack]]
    settings: Settings


class Loops:
    """At most one loop at a time, by iterator or as a region.

    Attributes:
        running: whether a loop is watched now.
        step: its current step; otherwise the last one shown.
        pending: whether something was changed that the loop has not taken over yet.
    """

    def __init__(self, parts: Parts):
        self._parts = parts
        self._sessions: dict[Any, Session] = {}
        self._session: Session | None = None
        self._region: Region | None = None
        self._first = False
        self._unseen: dict[str, str] = {}
        self._every = 1
        self._attendance: Attendance | None = None
        self._taken: tuple[Handle, ...] = ()
        self._warned: set[int] = set()
        self.running = False
        self.perturbed = False
        self.pending = False
        self.step = self._start = 0
        self._some = False  # whether any step was done
        self.closed = False

    def watch(
        self,
        model: nnx.Module,
        batches: Iterable[T] | None,
        *,
        every: int,
        selected: Only,
        only: Only,
        gradients: bool,
        besides: tuple[str, ...],
    ) -> Generator[T, Any, None] | Region:
        """See `Inspector.watch`."""
        check_every(every)
        if batches is not None and not isinstance(batches, Iterable):
            raise TypeError(
                f"watch takes an iterable of batches, got {type(batches).__name__}: for batch in "
                f"insp.watch(batches, every=10); or with insp.watch(every=10): around a loop."
            )
        self._require_idle()
        self._every = every
        session = self._session_for(model, selected, only, gradients)
        session.besides = besides
        session.stacks = self._parts.stacks()
        if batches is None:
            self._region = Region(self, session, every)
            return self._region
        self._region = None
        return watched(self, session, batches, every)

    def _session_for(
        self, model: nnx.Module, selected: Only, only: Only, gradients: bool
    ) -> Session:
        key = (gradients, None if only is None else Selection(only))
        if key not in self._sessions:
            session = Session(model, only=selected, measured=only, gradients=gradients)
            session.on_armed = weakly(self._armed)
            self._sessions[key] = session
        return self._sessions[key]  # the same again: its programs are compiled

    def tick(self) -> None:
        """See `Inspector.tick`."""
        if self._region is None or not self.running:
            raise InspectorError(
                "insp.tick() tells where a step begins inside a watched region: with "
                "insp.watch(every=10): for batch in batches: insp.tick(); train_step(batch)."
            )
        self._region.tick()

    def _require_idle(self) -> None:
        if self.running:
            raise InspectorError("This inspector watches a loop already; finish that one first.")

    # ------------------------------------------------------------------ changes

    def changed(self) -> None:
        """Something was switched, tuned, added or removed."""
        with self._parts.lock:
            self.pending = True
            if self._between_passes and self._session is not None:
                self._take_over(self._session)  # no step comes by to do it

    @property
    def _between_passes(self) -> bool:
        return self.running and self._region is not None and not self._region.ticks

    def is_compiling(self, handle: Handle) -> bool | None:
        """Whether a handle waits for a program of the running loop that is being compiled; None
        where no loop runs.
        """
        session = self._session
        if session is None:
            return None
        return session.compiling and handle.place not in session.places

    def _take_over(self, session: Session) -> None:
        parts = self._parts
        setting = parts.handles.setting().without_parameters()
        if any(place.rows for place in setting.places):
            reach = parts.reach()
            sites = {site for place in setting.places for site in place.sites if place.rows}
            session.turns = {site: reach.turns(site) for site in sites}
        session.perturb(setting)
        if self._first:
            session.make_room()
        elif self._between_passes:
            if session.lacks_room:
                text = (
                    "The programs that run in this region have no place for a perturbation that "
                    "was added: it acts when insp.watch is entered again, or the next time "
                    "insp.tick() is called."
                )
                parts.view.notice(protocol.Notice(level="info", text=text, site=None))
        else:
            session.arm()
        # what still compiles does not act in this step: `_armed` has it taken over in a later one
        taken = [one for one in parts.handles.all() if one.enabled and not one.compiling]
        self._taken = tuple(taken)
        self.pending = session.lacks_room
        self.perturbed = setting.active
        parts.view.training_perturbed = self.perturbed
        parts.view.state_changed()

    def _armed(self) -> None:
        """A program is there: the next step runs it."""
        with self._parts.lock:
            self.pending = True
        self._parts.view.state_changed()

    # ------------------------------------------------------- called by the loop

    def loop_begins(self, total: int | None) -> int:
        """The first step's number."""
        parts = self._parts
        self._require_idle()
        with parts.lock:
            self.running, self.pending, self._first = True, True, True
            parts.view.loop_thread = threading.get_ident()
            start = self.step + 1 if parts.recording.curves() or self._some else 0
            self.step = self._start = start
            parts.meter.loop_begins()
            self._progress(start, None if total is None else start + total)
        return start

    def step_begins(self, session: Session) -> bool:
        """Take over what was changed; whether anything is perturbed."""
        with self._parts.lock:
            self._session = session
            if self._first:
                in_region = self._region is not None
                before = 0 if in_region else session.inbox.count
                self._attendance = Attendance(
                    session, self._every, self.step, before=before, in_region=in_region
                )
                self._warned = set()
            if self.pending:
                self._take_over(session)
            self._first = False
            self._parts.meter.step_begins()
            return self.perturbed

    def step_ends(
        self, session: Session, step: int, *, sampled: bool, perturbed: bool, seconds: float
    ) -> None:
        """Record a step if it was measured, and show it."""
        began, parts = time.perf_counter(), self._parts
        with parts.lock:
            if self.closed:
                return
            certain: list[str] = []
            if sampled:
                passes = session.take_passes()
                certain = self._attended(session, step, passes, over=False)
                self._record(session, step, passes, session.setting, perturbed)
            parts.metrics.settle(wait=sampled)
            self.step = step + 1
            seconds += time.perf_counter() - began
            parts.meter.step_ends(seconds, measured=sampled, perturbed=perturbed)
            self._progress(step + 1, parts.view.progress.total)
        self._shown(step, sampled)
        for text in certain:
            warn(text)

    def step_left(self, session: Session, step: int, *, sampled: bool) -> None:
        """The loop was left within a step, which counts where it is known to have done something:
        where a pass was measured, which is recorded, or where it has a metric.
        """
        parts = self._parts
        with parts.lock:
            if self.closed:
                return
            passes = session.take_passes() if sampled else []
            measured = any(one.arrived for one in passes)
            if measured:
                self._record(session, step, passes, session.setting, self.perturbed)
            if measured or parts.metrics.step == step:
                self.step = step + 1

    def take_up(self) -> None:
        """Record what is known of the step under way where it has a NaN: with `jax_debug_nans` it
        has ended in an error, and the loop may never be left while that error is looked at.
        """
        session = self._session
        if session is None or self._between_passes or not session.inbox.holds_nan():
            return
        with self._parts.lock:
            passes = session.take_passes()
            self._record(session, self.step, passes, session.setting, self.perturbed)
        self._shown(self.step, True)

    def pass_ends(self, session: Session, step: int, one: Taken) -> None:
        """Record a pass of a region and show it; called in a thread of the region's."""
        parts = self._parts
        with parts.lock:
            if self.closed:
                return
            self._attended(session, step, [one], over=False)
            self._record(session, step, [one], one.setting, one.perturbed, held=one.number)
            parts.metrics.settle()
            self.step = step + 1
            self._progress(step + 1, None)
        self._shown(step, True)

    def pass_held(self, session: Session, step: int, one: Taken) -> None:
        """A pass of a region may not be complete, but a killed process would lose it.

        Called within the user's step: without our lock, whose holder may wait for that step.
        """
        if self._parts.recording.attached and one.arrived:
            found, _ = session.summaries_in([one])
            number = self._parts.settings.latest if one.perturbed else 0
            self._parts.recording.hold(
                one.number, step, found, kind="watch", perturbed=one.perturbed, setting=number
            )

    def loop_ends(self, session: Session, *, failed: bool = False) -> None:
        """The loop was left, by whatever way."""
        parts, certain = self._parts, list[str]()
        with parts.lock:
            if self._between_passes:  # those after the last measured one count too
                self.step = max(self.step, self._start + session.inbox.count)
            self._some |= self.step > self._start
            self.running = self.perturbed = False
            self._session = self._region = None
            parts.view.loop_thread = None
            parts.view.training_perturbed = False
            self._progress(self.step, parts.view.progress.total)
            self.step = max(0, self.step - 1)
            if self.closed:
                return
            passes = session.take_passes()
            if self._attendance is not None:
                certain = self._attended(session, self.step, passes, over=True)
            self._attendance = None
            self._tell_losses(session)
            parts.metrics.settle(wait=True)
        parts.view.present(force=True)
        for text in certain * (not failed):
            warn(text)

    def _attended(
        self, session: Session, step: int, passes: list[Taken], *, over: bool
    ) -> list[str]:
        """Look whether a measured step has called the model, and where it was perturbed; what is
        to be told of it, once in a loop.
        """
        attendance, parts = self._attendance, self._parts
        if attendance is None:
            return []
        attendance.note()
        if not over:
            attendance.step(step)
        texts = dict[int, str]()
        uncalled = attendance.uncalled(over=over)
        if uncalled is not None or attendance.called:
            parts.recording.miss(uncalled)
        if uncalled is not None:
            texts[MODEL] = f"{uncalled.what}: {uncalled.advice}."
        expected = [
            Expected(
                number=one.id,
                place=one.place,
                in_use=parts.handles.place_in_use(one),
                sites=tuple(one.sites),
                of_gradient=isinstance(one.perturbation, GradientPerturbation),
            )
            for one in self._taken
            if one.enabled and not one.compiling
        ]
        idle = attendance.idle(expected, session.reached(), passes)
        parts.handles.tell_idle(idle)
        on = {handle.id: handle for handle in self._taken}
        for number, why in attendance.certainly_idle(idle, step, over=over).items():
            if number in on:
                kind = type(on[number].perturbation).__name__
                texts[number] = f"{kind} on {on[number].site!r} is not acting: {why}."
        new = {number: text for number, text in texts.items() if number not in self._warned}
        self._warned |= set(new)
        for number, text in new.items():
            site = on[number].site if number in on else None
            parts.view.notice(protocol.Notice(level="warning", text=text, site=site))
        return list(new.values())

    def _record(
        self,
        session: Session,
        step: int,
        passes: list[Taken],
        setting: Setting,
        perturbed: bool,
        *,
        held: int | None = None,
    ) -> None:
        found = session.measured_in(passes)
        if found:  # a step that did not call the model has no pass
            self._parts.recording.append(
                step,
                found,
                kind="watch",
                perturbed=perturbed,
                setting=self._parts.settings.number_of(setting),
                figures=session.figures_in(passes),
                held=held,
            )
        self._tell_losses(session)

    def _tell_losses(self, session: Session) -> None:
        for text in losses_of(session):
            self._parts.view.notice(protocol.Notice(level="warning", text=text, site=None))
        unseen = dict(session.unseen)
        for site in session.blurred:
            count = session.stacks[site].layers
            unseen.update({layer_key(site, i): NOT_TOLD_APART for i in range(count)})
        if unseen != self._unseen:
            self._unseen = unseen
            self._parts.unseen(unseen)

    def _shown(self, step: int, sampled: bool) -> None:
        view = self._parts.view
        if not sampled:
            view.tick()
            return
        if self._parts.handles.setting().active:
            self._parts.refresh(step)
        view.present()

    def _progress(self, step: int, total: int | None) -> None:
        self._parts.view.progress = protocol.Progress(
            kind="watch",
            running=self.running,
            step=step,
            total=total,
            rate=self._parts.meter.rate,
        )

    def forget(self) -> None:
        """Another object is watched from the next loop on."""
        self._require_idle()
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def close(self) -> None:
        """Forget the sessions; a loop that runs goes on, unwatched."""
        self.closed = True
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
