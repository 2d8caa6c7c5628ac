"""The watched loops of one inspector.

Between two steps they adopt changes, and record and show the measurements. If the screen is seen
and the loop can spare the first measured steps, the program that measures a step compiles in a
thread while the loop goes on with the bare one; otherwise before the first step.

Invariant: one loop at a time; an error of the screen never reaches the training. Does not decide
which steps are sampled (`live.steps`) or what is measured (`live.session`).
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Generator, Hashable, Iterable, Mapping
from typing import TypeVar

import jax
from flax import nnx

from nnx_inspector._compat.launching.programs import wait_for
from nnx_inspector.background import weak_method
from nnx_inspector.errors import InspectorError, error_text, is_from_signal_handler, warn
from nnx_inspector.hooks.hook import open_hooks
from nnx_inspector.hooks.sites import Only, Selection
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.handles import Handle
from nnx_inspector.inspector.passes.rerun import Reruns
from nnx_inspector.inspector.passes.shared_perturbations import SharedPerturbations
from nnx_inspector.inspector.reports import Reports
from nnx_inspector.live.diagnostics import Diagnostics
from nnx_inspector.live.inbox import WatchedPass
from nnx_inspector.live.optimizer import measure_states
from nnx_inspector.live.parameter_samples import nonfinite_parameters
from nnx_inspector.live.session import Session, StepEnd
from nnx_inspector.live.steps import (
    LoopCallbacks,
    Region,
    Step,
    batches_of,
    check_every,
    check_replica,
    check_start,
    iterate,
)
from nnx_inspector.perturbations.places import Setting
from nnx_inspector.program.analysis.stacks import layers_with_rows, stacks_of
from nnx_inspector.recordings.tree_rows import Stack
from nnx_inspector.screen import protocol
from nnx_inspector.trackers.detection import tracker_of

T = TypeVar("T")
LONGEST_WAIT = 0.2
"""How long a loop waits for the recording before it says so, in seconds."""
NO_ROOM = "The programs of this region have no place for the new perturbation."
NO_STEPS = "The processes of a job change perturbations between steps, which this region has not."
LATER = "It acts once insp.watch is entered again, or from the next insp.tick() on."
BARE_SHARE = 10
"""At most one in this many measured steps runs bare while the measured program compiles."""


class Loops(LoopCallbacks):
    """At most one loop at a time, by iterator or as a region."""

    def __init__(self, core: Core, rerun: Reruns):
        self._core, self._rerun = core, rerun
        self._sessions: dict[Hashable, Session] = {}
        self._session: Session | None = None
        self._compiled: Session | None = None  # whose program is compiled
        self._compiled_ahead: Session | None = None  # whose program was compiled ahead, or is being
        self._region: Region | None = None
        self._loop: object = None
        self._reports = Reports(core)
        self._every, self._start = 1, 0
        self._bare_left = 0  # measured steps that may still run bare
        self._acting: tuple[Handle, ...] = ()
        self._first = self._perturbed = False
        self._had_steps = False  # whether any step has ended
        self._first_step: int | None = None  # the number of the first step, if the user chose it
        self._last_end: StepEnd | None = None  # of a step that is recorded behind the loop
        warns = functools.partial(core.notice, "warning")
        take_over = weak_method(self._take_over)
        self.shares = SharedPerturbations(core.handles, take_over, lock=core.lock, warns=warns)
        core.handles.on_change = self._handles_changed
        core.handles.compiles_in_loop = self._is_compiling
        core.closing.callback(weak_method(self._close_sessions))

    def watch(
        self,
        batches: Iterable[T] | None,
        *,
        every: int,
        only: Only,
        gradients: bool,
        tree: int | None,
        start: int | None,
        to: object,
        optimizer: object,
    ) -> Generator[T, None, None] | Region:
        """See `Inspector.watch`."""
        self._core.require_open()
        first, tracker = None if start is None else check_start(start), tracker_of(to)
        every, replica, given = check_every(every), check_replica(tree), batches
        batches = batches_of(given)
        if batches is None and given is not None:
            raise TypeError(
                f"watch takes an iterable of batches, got {type(given).__name__}: for batch in "
                f"insp.watch(batches, every=10). Or put with insp.watch(every=10): around the loop."
            )
        self._require_idle()
        self._every, self._first_step, self._reports.tracker = every, first, tracker
        self._rerun.refresh_modules()
        session = self._session_for(only, gradients, replica)
        modules = {site.key for site in self._core.trace.modules}
        session.extra_sites = tuple(c.site for c in self._core.trace.calls if c.site not in modules)
        session.stacks = self._stacks()
        self._core.show_states(measure_states(session, optimizer))
        if batches is None:
            self._region = Region(self, session, every)
            return self._region
        self._region = None
        return iterate(self, session, batches, every)

    def _session_for(self, only: Only, gradients: bool, replica: int | None) -> Session:
        core = self._core
        key = (core.selection, gradients, None if only is None else Selection(only), replica)
        if key not in self._sessions:
            session = self._sessions[key] = Session(
                core.watched_model,
                only=core.selection.terms,
                gradients=gradients,
                measured=only,
                parameters=core.parameters,
                replica=replica,
                where=core.entry.where,
            )
            session.on_compiled = weak_method(self._armed)
        return self._sessions[key]  # reused, because its programs are compiled

    def _stacks(self) -> dict[str, Stack]:
        """The sites whose layers are measured separately, and how they run."""
        stacks, perturbable = stacks_of(self._core.trace), self._rerun.perturbable_sites()
        return {
            site: Stack(count, stacks[site])
            for site, count in layers_with_rows(stacks).items()
            if tuple(map(abs, perturbable.scan_lengths(site)[:1])) == (stacks[site],)
        }

    @property
    def _goes_on_unwatched(self) -> bool:
        """Whether a loop goes on whose inspector was closed; raise an error if no loop does."""
        unwatched = self._core.closed and self._core.looping
        if not unwatched:
            self._core.require_open()
        return unwatched

    def tick(self) -> None:
        if self._goes_on_unwatched:
            return
        looping = self._core.looping
        if looping and self._region is None:
            raise InspectorError(
                "The loop `for batch in insp.watch(batches)` counts its steps itself. Leave "
                "insp.tick() out of it."
            )
        if not looping or self._region is None:
            raise InspectorError(
                "insp.tick() marks the start of a step inside a watched region: with "
                "insp.watch(every=10): for batch in batches: insp.tick(); train_step(batch)."
            )
        self._region.tick()

    def add_metrics(self, values: Mapping[str, object]) -> None:
        if self._goes_on_unwatched:
            return
        core = self._core
        with core.lock:
            passed = None
            if self._between_passes:  # a device may be behind: no pass may have begun yet
                begun = self._session.inbox.count if self._session else 0
                passed = self._start + max(begun - 1, 0)
            core.add_metrics(values, passed)

    def _require_idle(self) -> None:
        if self._core.looping:
            raise InspectorError("This inspector already watches a loop; finish that one first.")

    # ------------------------------------------------------------------ changes

    def _handles_changed(self) -> None:
        """A perturbation was switched, tuned, added or removed."""
        core = self._core
        with core.lock:
            core.pending, looping, session = True, core.looping, self._session
            if self._between_passes and session is not None:  # no step begins that would do it
                self._take_over(session, core.handles.setting())
        if not looping:
            self._rerun.refresh()
        core.view.state_changed()

    @property
    def _between_passes(self) -> bool:
        return self._core.looping and self._region is not None and not self._region.ticks

    def _is_compiling(self, handle: Handle) -> bool | None:
        """Whether the running loop waits for a handle's program; None if no loop runs."""
        session = self._session
        if session is None:
            return None
        return session.compiling and handle.place not in session.places

    def _take_over(self, session: Session, setting: Setting) -> None:
        core, alone = self._core, session.group is None
        if self._first or alone or not self._between_passes:
            session.perturb(setting)
        if self._first:
            session.take_places()
        elif not self._between_passes:
            session.arm()
        elif session.needs_places or not alone:
            core.notice("info", f"{NO_ROOM if alone else NO_STEPS} {LATER}")
        # a handle whose program still compiles acts in a later step, once `_armed` was called
        on = [one for one in core.handles.all() if one.enabled and not one.compiling]
        self._acting = tuple(one for one in on if one.id not in self.shares.unsent)
        core.pending = session.needs_places
        self._perturbed = setting.active
        core.view.training_perturbed = self._perturbed
        core.view.state_changed()

    def _armed(self) -> None:
        """Let the next step run a program that has been compiled."""
        core = self._core
        with core.lock:
            core.pending = True
        core.view.state_changed()

    # ------------------------------------------------------- called by the loop

    def poll(self) -> None:
        self._core.view.screen.poll()

    def loop_begins(self, loop: object, total: int | None) -> int:
        core = self._core
        self._require_idle()
        try:
            core.record_facts()
        except Exception as error:  # shown: the training goes on without
            if is_from_signal_handler(error):
                raise
            text = f"The model could not be traced for findings: {error_text(error)}"
            core.notice("warning", text)
        with core.lock:
            self._loop, core.looping, core.pending, self._first = loop, True, True, True
            self._rerun.drop_first()
            core.view.loop_thread = threading.get_ident()
            goes_on = core.step + 1 if core.recording.curves() or self._had_steps else 0
            start = goes_on if self._first_step is None else self._first_step
            core.step = self._start = start
            core.meter.loop_begins()
            every = self._every
            spares = total and every > 1 and core.view.is_visible and not core.recording.attached
            spares = spares and jax.process_count() == 1  # all run the same program at each step
            self._bare_left = total // every // BARE_SHARE if total and spares else 0
            self._progress(start, None if total is None else start + total)
        return start

    def first_step_is(self, step: int) -> int:
        self._core.step = self._start = step
        return step

    def step_begins(self, session: Session) -> bool:
        core = self._core
        with core.lock:
            self._session = session
            if self._first:
                in_region = self._region is not None
                before = 0 if in_region else session.inbox.count
                self._reports.begin(
                    Diagnostics(session, self._every, core.step, before=before, in_region=in_region)
                )
            if core.pending and session.group is None:
                self._take_over(session, core.handles.setting())
            measured = self._between_passes or core.step % self._every == 0
            if measured:
                self._rerun.refresh_modules()
            missing, alone = session is not self._compiled, session.group is None
            may = core.closed or (measured and self._may_run_bare(session))
            session.runs_bare = missing and may and alone
            if measured and missing:
                beside = ", while the loop goes on" * session.runs_bare
                core.show_waiting("loop", f"compiling the measured step{beside}")
            self._first = False
        if (measured or self._perturbed) and missing and not session.runs_bare:
            session.wait()
        core.meter.step_begins()
        return self._perturbed

    def _may_run_bare(self, session: Session) -> bool:
        """Whether the loop goes on while the program that measures a step is compiled."""
        compiled = self._compiled_ahead is session and not session.arming
        if compiled or self._perturbed or not self._bare_left or open_hooks():
            return False
        self._bare_left -= 1
        return True

    def step_ends(self, session: Session, ended: Step) -> None:
        """Record a measured step and show it, in a thread that is at most one behind."""
        began, core, step, sampled = time.perf_counter(), self._core, ended.number, ended.sampled
        # the loop goes on while the measured step runs, once it has its program
        end = session.step_ends() if sampled and session is self._compiled else None
        if session.runs_bare and self._compiled_ahead is not session:
            begun = session.compile_ahead()
            self._compiled_ahead = session if begun else None
            self._bare_left *= begun
        if sampled:
            self._wait_for_last(end)
        here = sampled and end is None
        passes = session.take_passes() if here else []
        with core.lock:
            if core.closed:
                return
            if here:
                self._program_is_compiled(session)
                self._reports.add(session, passes, session.inbox.count, self._acting, step=step)
            core.metrics.settle(wait_until=step if here else -math.inf)
            core.step = step + 1
            seconds = ended.seconds + time.perf_counter() - began
            core.meter.step_ends(seconds, measured=sampled, perturbed=ended.perturbed)
            if ended.latest is not None:
                core.meter.pass_edge(ended.latest.waiter())
            elif sampled:
                core.meter.pass_edge(None if end is None else end.ended())
            self._progress(step + 1, core.view.progress.total)
            certain = self._reports.warnings()
        if sampled:
            record = functools.partial(self._record, session, step, passes)
            if end is not None:
                record = functools.partial(self._record_behind, session, step, end, self._acting)
            core.recorder.submit(record)
            if core.handles.setting().active:
                self._rerun.refresh(step)
            core.recorder.submit(core.view.present)
        else:
            core.view.tick()
        for text in certain:
            warn(text)

    def _wait_for_last(self, end: StepEnd | None) -> None:
        """Wait until the measured step before the one with this end is recorded."""
        core = self._core
        before, self._last_end = self._last_end, end
        if before is not None:
            before.wait()  # for the device, before the patience with the recorder begins
        if not core.recorder.wait(LONGEST_WAIT):
            core.show_waiting("recorder", "recording the last measured step")
            core.recorder.wait()
            core.show_waiting("recorder")

    def _record_behind(
        self, session: Session, step: int, end: StepEnd, taken: tuple[Handle, ...]
    ) -> None:
        passes = session.inbox.take(before=end.count)
        for one in passes:
            _ = one.sent  # read before anybody takes a lock for it
        with self._core.lock:
            metrics = self._core.metrics.unsettled(step)
        for metric in metrics:  # without the lock, which every step needs: they may take long
            wait_for(metric)
        with self._core.lock:
            if self._core.closed:
                return
            self._program_is_compiled(session)
            self._reports.add(session, passes, end.count, taken, step=step)
            self._core.metrics.settle(wait_until=step)
        self._record(session, step, passes)

    def _program_is_compiled(self, session: Session) -> None:
        self._compiled = session
        self._core.show_waiting("loop")

    def step_left(self, session: Session, step: int, *, sampled: bool) -> None:
        """End a loop left within a step, which counts if it has a pass or a metric."""
        core = self._core
        core.recorder.wait()
        with core.lock:
            if core.closed:
                return
            passes = session.take_passes() if sampled else []
            measured = any(one.sent.arrived for one in passes)
            if measured:
                self._record(session, step, passes)
            if measured or core.metrics.step == step:
                core.step = step + 1

    def record_arrived(self) -> None:
        """Record what has arrived of the present step if it has a NaN.

        With `jax_debug_nans` the step ended in an error, and the loop may never be left while the
        user examines it. Only the loop's thread does this: for others the step may still be
        running.
        """
        session, core = self._session, self._core
        if session is None or core.view.loop_thread != threading.get_ident():
            return
        if self._between_passes or not session.inbox.holds_nan():
            return
        core.recorder.wait()
        with core.lock:
            self._record(session, core.step, session.take_passes())
        self._show(core.step)

    def pass_ends(self, session: Session, step: int, one: WatchedPass, *, newest: bool) -> None:
        """Record a pass of a region, and show the newest; called in the region's thread."""
        core = self._core
        with core.lock:
            if core.closed:
                return
            self._program_is_compiled(session)
            self._record(session, step, [one], held=one.number)
            # not how many have begun: this thread may be some passes behind
            self._reports.add(session, [one], one.number + 1, self._acting, step=step)
            core.metrics.settle()
            core.step = step + 1
            self._progress(step + 1, None)
        if newest:  # this runs the model once more, if it is perturbed
            self._show(step)

    def pass_held(self, session: Session, step: int, one: WatchedPass) -> None:
        """Save a pass of a region that may be incomplete, so that a killed process keeps it.

        Called within the user's step, so without our lock, whose holder may wait for that step.
        """
        core = self._core
        if core.recording.attached and one.sent.arrived:
            found = session.summaries_of([one], ended=False)
            number = core.setting_number if one.perturbed else 0
            core.recording.hold(
                one.number, step, found, kind="watch", perturbed=one.perturbed, setting=number
            )

    def loop_ends(self, loop: object, session: Session) -> None:
        core = self._core
        if self._loop is not loop:  # ended already, or never begun
            return
        core.recorder.wait()
        with core.lock:
            if core.looping:
                # in a region, passes after the last measured one count too
                passed = self._start + session.inbox.count if self._between_passes else 0
                step = max(core.step, passed)
                some, last = self._had_steps or step > self._start, max(0, step - 1)
                core.step, self._had_steps, core.looping = last, some, False  # once, if interrupted
                self._progress(step, core.view.progress.total)
            self._perturbed, self._session, self._region, self._last_end = False, None, None, None
            core.view.loop_thread, core.view.training_perturbed = None, False
            if core.closed:
                self._close_sessions()
        try:
            self._show_end(session)
        finally:
            self._reports.end_writing()
            core.recording.catch_up()
            self._loop = None

    def loop_ended(self) -> None:
        for text in self._reports.warnings():
            warn(text)

    def _show_end(self, session: Session) -> None:
        """Show what there is of a loop that has ended."""
        with (core := self._core).lock:
            if core.closed:
                return
            core.show_waiting("loop")
            self._reports.end(session, session.take_passes(), session.inbox.count, self._acting)
            core.metrics.settle(wait_until=math.inf)
        if core.step >= self._start and session.inbox.count:
            known, model = core.recording.facts_so_far, core.watched_model
            core.recording.learn(nonfinite_parameters(model, known, core.step))
        self._rerun.refresh_modules()
        core.view.present(force=True)

    def _record(
        self, session: Session, step: int, passes: list[WatchedPass], *, held: int | None = None
    ) -> None:
        found = session.summaries_of(passes)
        if found:  # a step without a call of the model has no pass
            setting, figures = passes[-1].setting, session.stats_of(passes, found)
            self._core.record_pass(
                step, found, kind="watch", setting=setting, figures=figures, held=held
            )

    def _show(self, step: int) -> None:
        if self._core.handles.setting().active:
            self._rerun.refresh(step)
        self._core.view.present()

    def _progress(self, step: int, total: int | None) -> None:
        running, rate = self._core.looping, self._core.meter.rate
        self._core.view.progress = protocol.Progress(
            kind="watch", running=running, step=step, total=total, rate=rate
        )

    def update(self, model: nnx.Module) -> None:
        """Watch another object from the next loop on."""
        self._require_idle()
        self._core.watched_model = model
        self._close_sessions()

    def settle(self) -> None:
        """Record what a running loop has measured so far, before its inspector is closed.

        In another thread than the loop's this does not wait for long, and leaves the step or the
        region under way: a callback of its program may be what closes the inspector.
        """
        core, session = self._core, self._session
        if session is None:
            return
        here = core.view.loop_thread == threading.get_ident()
        core.recorder.wait(None if here else LONGEST_WAIT)
        if not here:
            return
        if self._between_passes and self._region is not None:
            self._region.deliver()
        else:
            self.step_left(session, core.step, sampled=True)

    def _close_sessions(self) -> None:
        """Close the sessions. A running loop goes on unwatched, in a job once all know of it."""
        for key, session in list(self._sessions.items()):
            if session.group is not None and session is self._session:
                session.group.leaves = True
            else:
                self._sessions.pop(key).close()
        self._compiled = None
