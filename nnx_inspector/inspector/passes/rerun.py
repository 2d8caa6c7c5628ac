"""Runs the example or the last step for the screen, and runs it again after each change.

The first pass is made in a thread, once the model is on screen or something reads a figure.
Invariant: pass, clean pass and effect on screen have the same arguments, modes and perturbations;
a rerun that the user did not request raises nothing: its failure is reported. Draws nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable

from flax import nnx

from nnx_inspector._compat.configuration import forbids_nan
from nnx_inspector.background import Worker, weak_method
from nnx_inspector.errors import InspectorError, InspectorWarning, error_text, warn
from nnx_inspector.hooks.sites import Selection
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.nnx.switches import Switches
from nnx_inspector.inspector.passes.batch import show_inputs
from nnx_inspector.inspector.passes.call import Call
from nnx_inspector.inspector.passes.pass_request import (
    PassRequest,
    ShownPass,
    effects_alone,
    run_pass,
)
from nnx_inspector.inspector.passes.shared_perturbations import agree_on
from nnx_inspector.perturbations.apply_setting import PerturbableSites
from nnx_inspector.perturbations.places import PARAMETER, Setting
from nnx_inspector.records import donated
from nnx_inspector.records.donated import are_same_arrays, weak_arrays
from nnx_inspector.records.nan_site import nan_site_text
from nnx_inspector.screen import protocol
from nnx_inspector.typing import PyTree

NOT_PERTURBED = "Nothing is perturbed."
NEW_PROGRAM = "The effect is measured once its program is compiled."
NEXT_STEP = "The effect is measured at the next measured step of the loop."
MEASURE_AGAIN = "The effect has not been measured: insp.run() or insp.step(...) measures it."
EFFECT_FAILED = "The effect could not be measured: see the messages."

TORN_READ_ERRORS, MOST_TORN = (KeyError, AttributeError, RuntimeError), 3
"""What reading a model may raise while flax updates it in another thread, the loop's; after so many
such errors in a row the next is shown."""


class Reruns:
    """The passes of one model that are made for the screen.

    Attributes:
        failed: whether the last automatic rerun failed.
    """

    def __init__(self, core: Core):
        self._core = core
        self.failed = False
        self._why_no_effect = ""  # why a measured pass of a loop has no effect
        self._torn_reads = 0  # how often in a row the model was perhaps being updated
        self._first: tuple[PassRequest, Call] | None = None  # the first pass, while it is wanted
        self._first_awaited = False  # whether anything has waited for it
        self._began_at: float | None = None  # when a pass was first wanted
        self._with_effect: ShownPass | None = None  # the pass with the newest effect
        self._perturbable: tuple[PassRequest, Switches, PerturbableSites] | None = None
        failed, ended = map(weak_method, (self._compilation_failed, self._compilation_ended))
        self._compiler = Worker("nnx_inspector.arming", failed, ended)
        self._effects_worker = Worker("nnx_inspector.apart", weak_method(self._effects_failed))
        core.effect, core.modes.on_change = self.effect, self._modes_changed
        for close in (self._compiler.close, self._effects_worker.close, weak_method(self._forget)):
            core.closing.callback(close)

    def _call_of(self, shown: ShownPass) -> Call:
        return shown.request.call(self._core.model, shown.switches)

    def start_first(self, *, wait: bool = False) -> None:
        """Make the first pass, of the present values, in a thread; here with `wait`."""
        core = self._core
        if not self._lacks_first or core.example.shape is not None:
            return
        if wait or forbids_nan() or core.programs.tracing(core.call()) is None:
            self.run(core.example)
        else:
            self.refresh()

    def wait_for_first(self, *, needed: bool = True) -> None:
        """Return when there is a pass to read. If none was made or begun, run the example here.

        Raises:
            InspectorError: it is `needed`, and must run in all processes of a job.
        """
        self._first_awaited = True
        self._core.recorder.wait()
        if self._lacks_first:
            self._compiler.wait()
        if self._lacks_first:
            self.run(self._core.example)
        elif not self._core.looping:
            if needed and not len(self._core.recording):
                self._core.require_one_process("The example")
            self._core.record_facts()

    def drop_first(self) -> None:
        """Stop wanting the first pass: a loop replaces it, and nothing waits for it."""
        self._first = self._began_at = None

    @property
    def _lacks_first(self) -> bool:
        core = self._core
        return not (len(core.recording) or core.looping or core.closed or core.in_all_processes)

    def run(self, request: PassRequest) -> PyTree:
        """Make a requested pass, waiting for its program; returns what the function returns."""
        begun, self._first = self._first, None  # nothing waits for the first pass any more
        self._began_at = self._began_at or time.monotonic()
        try:
            return self._run(request)
        finally:
            if begun is not None and self._lacks_first:
                self.refresh()

    def _run(self, request: PassRequest) -> PyTree:
        request.require_arrays()
        agree_on(self._core, request)
        setting, switches = self._core.handles.setting(), self._core.modes.switches()

        def make() -> tuple[ShownPass, Call]:
            call = request.call(self._core.model, switches)
            donated.raise_if_deleted(call.parts.leaves)
            return self._make(request, call, setting), call

        shown, call = donated.retry_if_donated(make, "The model", self._core.model)
        with (core := self._core).lock:
            core.set_request(request)
        self._show_pass(shown, call)
        if forbids_nan() and (found := nan_site_text(shown.outcome.perturbed.record)):
            call.raise_jax_error(found)
        return shown.outcome.perturbed.value

    def rerun_last(self, which: str) -> None:
        """Make the last forward pass again ("run"), or the last step: all panels look at it."""
        if (request := self._core.last_request(which)) is not self._core.request:
            self._run(request)

    def perturbable_sites(self) -> PerturbableSites:
        """The parts of the pass on screen that can be perturbed; traced once."""
        request, switches = self._core.request, self._core.modes.switches()
        if self._perturbable is None or self._perturbable[:2] != (request, switches):
            sites = self._core.programs.read(
                request.call(self._core.model, switches), PerturbableSites
            )
            self._perturbable = (request, switches, sites)
        return self._perturbable[2]

    def refresh(self, step: int | None = None) -> None:
        """Run the last pass again with the present perturbations. If that needs a new program, the
        old one runs with those that it has places for, until the new one is compiled.

        Args:
            step: the step of a watched loop that has just been measured.
        """
        request, before = self._core.request, self._core.shown
        switches = self._core.modes.switches()
        handles, passes, first = self._core.handles, self._core.programs, self._first
        looping, self.failed = self._core.looping, False
        self._why_no_effect = ""
        if self._core.in_all_processes:
            self._why_no_effect = donated.several_processes_text("The effect")
            return
        try:
            setting = handles.setting()
            old = handles.setting(armed=True)
            call = request.call(self._core.model, switches)
            if first is not None and first[0] is request and first[1].has_model_of(call):
                call = first[1]  # with the model's values of the moment when it was wanted
            request.require_there()
            donated.require_not_deleted(call.parts.leaves, "The model", call.model)
            missing = passes.missing_program("pass", call, setting)
            # in other modes or for another call, equal places have no old program
            later = missing is not None and (setting.places != old.places or before is None)
            if later:
                if before is None and not self._core.looping:
                    self._first = request, call  # its parts are taken
                    self._began_at = self._began_at or time.monotonic()
                self._compile(missing)
                setting = old
            if self._core.looping:
                if not later:
                    handles.arm(setting)
                    if setting.active:  # the screen shows the loop, and the effect beside it
                        self._with_effect = shown = self._make(request, call, setting, step=step)
                        if shown.outcome.differences is None:
                            self._compile_comparison(call, setting)
            elif not later or not (before is None or self._is_shown(request, switches, setting)):
                count = len(self._core.recording)
                make = functools.partial(self._make, request, call, setting)
                shown = donated.retry_if_donated(make, "The model", call.model)
                self._show_pass(shown, call, instead_of=(before, count))
            self._torn_reads = 0
        except Exception as error:  # noqa: BLE001 - shown instead
            if self._core.looping and not looping:
                return  # the loop that began meanwhile is shown instead, and donated the arrays
            if step is not None and isinstance(error, InspectorError):
                self._why_no_effect = str(error)  # the next measured pass may find the arrays there
                return
            besides = step is not None and self._core.view.loop_thread != threading.get_ident()
            may_be_torn = isinstance(error, TORN_READ_ERRORS)
            if besides and may_be_torn and self._torn_reads < MOST_TORN:
                self._torn_reads, self._why_no_effect = self._torn_reads + 1, NEXT_STEP
                return
            again = "" if before is None else " again"
            self._fail(f"{request.name} could not be run{again}", error)

    def effect(self) -> tuple[protocol.Effect | None, str]:
        """The effect of the present perturbations, or None and the reason why there is none.

        A step has an effect without a perturbation too.
        """
        handles, measured, looping = self._core.handles, self._with_effect, self._core.looping
        wanted = handles.setting()
        if not wanted.active and looping:
            return None, NOT_PERTURBED
        if (
            measured is not None
            and measured.request is self._core.request
            and measured.switches == self._core.modes.switches()
            and measured.setting.has_same_effect(wanted)
        ):
            source = measured.source(self._core.step, looping=looping)
            effect = measured.outcome.effect(source)
            return effect, "" if effect is not None else NOT_PERTURBED
        if not wanted.active:
            return None, NOT_PERTURBED
        if self.failed or self._why_no_effect:
            return None, self._why_no_effect or EFFECT_FAILED
        if self._compiler.busy or any(one.enabled and one.compiling for one in handles.all()):
            return None, NEW_PROGRAM
        return None, NEXT_STEP if looping else MEASURE_AGAIN

    def refresh_modules(self) -> None:
        """Show the model's modules as they are: one may have been added, removed or replaced."""
        if self._core.modules_have_changed():
            self._perturbable = None
            self._trace_again("with the model's new layers")

    def _trace_again(self, where: str) -> bool:
        """Trace the example and show its sites; returns whether it can be run."""
        core = self._core
        try:
            core.show_trace(core.trace_example())
        except Exception as error:  # noqa: BLE001 - shown: another example may well run
            core.notice("warning", f"The example cannot be run {where}: {error_text(error)}")
            return False
        return True

    def _modes_changed(self, _: nnx.Module) -> None:
        """Trace the example in the new modes, and run the last pass again."""
        core = self._core
        core.require_open()
        runs = self._trace_again("in these modes") or core.request is not core.example
        if runs and not core.looping:
            self.refresh()
        core.show_modes(core.modes.switches())
        core.view.state_changed()

    def show_sites(self, selection: Selection) -> None:
        """Show the sites of another selection."""
        core, before = self._core, self._core.selection
        if selection == before:
            return
        core.select_sites(selection)
        try:
            found = core.trace_example()
        except Exception:
            core.select_sites(before)
            raise
        core.show_trace(found)
        self._perturbable = None
        core.view.present(force=True)  # what was measured before stays on screen meanwhile
        if self._first is not None or not self._lacks_first:
            self.refresh()

    def wait(self) -> None:
        """Wait until nothing is being compiled or measured for the effect any more."""
        self._compiler.wait()
        self._effects_worker.wait()

    def wait_unless_looping(self) -> None:
        """Like `wait`, unless a loop runs: it measures the effect at each measured step."""
        if not self._core.looping:
            self.wait()

    def read_effect(self) -> protocol.Effect | None:
        """`effect` for whoever asks in Python: it is measured now if it was not, unless a loop runs
        in another thread, which measures it at its next measured step.

        Raises:
            InspectorError: the model's arrays or the arguments were donated to a step.
            Exception: any exception of the pass.
        """
        core = self._core
        if core.looping and core.view.loop_thread != threading.get_ident():
            return self.effect()[0]
        self.wait()
        found, why = self.effect()
        measured = self._with_effect
        part = found is not None and measured is not None and measured.outcome.differences is None
        later = why in (NEW_PROGRAM, NEXT_STEP, MEASURE_AGAIN) or (core.looping and part)
        if later and core.handles.setting().active and not core.in_all_processes:
            self._measure()
            core.view.state_changed()
        return self.effect()[0]

    def _measure(self) -> None:
        """Measure the effect of the present perturbations here, and compile what it needs."""
        core, setting = self._core, self._core.handles.setting()
        request, switches = core.request, core.modes.switches()
        request.require_there()

        def make() -> ShownPass:
            call = request.call(core.model, switches)
            donated.raise_if_deleted(call.parts.leaves)
            compile_it = core.programs.missing_program("compare", call, setting)
            if compile_it is not None:
                compile_it(lambda: False)
            return self._make(request, call, setting, step=max(core.step - core.looping, 0))

        self._with_effect = donated.retry_if_donated(make, "The model", core.model)

    def _forget(self) -> None:
        self._first = self._perturbable = self._with_effect = None

    def _make(
        self, request: PassRequest, call: Call, setting: Setting, *, step: int | None = None
    ) -> ShownPass:
        self._core.show_modes(call.switches)
        looping = self._core.looping
        at = self._core.step if step is None else step
        arrays = weak_arrays(call.parts.leaves)
        outcome = run_pass(self._core.programs, call, setting)
        return ShownPass(request, call.switches, setting, outcome, at, looping, arrays)

    def _show_pass(
        self,
        shown: ShownPass,
        call: Call,
        *,
        instead_of: tuple[ShownPass | None, int] | None = None,
    ) -> None:
        """Show a pass, unless another one was requested meanwhile.

        Args:
            instead_of: for a pass that was not requested, the pass on screen when it began, and the
                number of recorded ones: it is dropped if others came meanwhile.
        """
        core = self._core
        with core.lock:
            if core.request is not shown.request or core.closed:
                return
            now = core.shown, len(core.recording)
            if instead_of is not None and (now != instead_of or core.looping):
                return
            self._first = None
            if self._began_at is not None:
                core.meter.waited.setdefault("pass_seconds", time.monotonic() - self._began_at)
            core.shown = self._with_effect = shown
            core.handles.arm(shown.setting)
            if not core.looping:
                core.handles.set_idle(self._idle_in(shown))
        self.refresh_modules()
        self._record_shown(shown, call)
        show_inputs(core, shown.outcome.perturbed.value)
        if shown.setting.active and shown.outcome.differences is None:
            self._compile_comparison(call, shown.setting)
        self._queue_effects_alone(shown)

    def _record_shown(self, shown: ShownPass, call: Call) -> None:
        # the loss of this evaluation does not belong to the curves, which show the training
        core, found = self._core, shown.outcome.perturbed
        core.why_eager = found.record.eager
        core.show_modes(shown.switches)
        core.recording.learn(core.programs.facts(call))
        kind, clean = shown.request.kind, shown.outcome.clean
        clean, how = clean and clean.record, {"kind": kind, "setting": shown.setting}
        core.show_record(found.record, states=found.states, clean=clean, **how)

    def _idle_in(self, shown: ShownPass) -> dict[int, str]:
        """Number of a perturbation -> why it does nothing in a pass, "" if it acts."""
        record, found = shown.outcome.perturbed.record, dict[int, str]()
        called = {site for site in record if any(call.took_place for call in record[site].calls)}
        for handle in self._core.handles.all():
            of_parameters = handle.place.at == PARAMETER
            if not handle.enabled or handle.compiling:
                continue
            if not of_parameters and called.isdisjoint(handle.sites):
                found[handle.id] = f"{shown.request.name.lower()} does not call it"
            elif handle.perturbation.acts_on == "gradient" and shown.request.loss_fn is None:
                found[handle.id] = (
                    "a forward pass computes no gradients; insp.step(loss_fn, batch) does"
                )
            else:
                found[handle.id] = ""
        return found

    def _compile_comparison(self, call: Call, setting: Setting) -> None:
        self._compile(self._core.programs.missing_program("compare", call, setting))

    def _compile(self, missing: Callable[[Callable[[], bool]], None] | None) -> None:
        """Compile a missing program instead of any other that still waits."""
        compiler, first = self._compiler, self._first is not None
        unwanted = weak_method(self._unwanted)
        if missing is not None:
            what = "the first pass" if first else "the program with the perturbations"
            self._core.show_waiting("program", f"compiling {what}")
            compiler.submit_instead(
                lambda: missing(lambda: compiler.closed or (first and unwanted()))
            )

    def _unwanted(self) -> bool:
        """Whether nothing waits for the first pass any more."""
        return self._first is None

    def _is_shown(self, request: PassRequest, switches: Switches, setting: Setting) -> bool:
        now, asked = self._core.shown, (request, switches)
        if now is None or (now.request, now.switches) != asked:
            return False
        return now.setting.is_equivalent(setting)

    # ------------------------------------------------------ results that come later

    def _compilation_ended(self) -> None:
        """Use a program that has just been compiled; called in the thread that compiles."""
        first = self._first
        self._core.show_waiting("program")
        self._core.show_waiting("pass", "running the first pass" if first else "")
        self._use_program()
        self._first = self._first if self._first is not first else None
        self._core.show_waiting("pass")
        self._core.view.state_changed()

    def _use_program(self) -> None:
        if self._core.closed or (self._core.shown is self._first is None):
            return
        if self._core.looping:  # the loop measures the effect at its next measured step
            return self._core.view.state_changed()
        shown, request, passes = self._core.shown, self._core.request, self._core.programs
        now = self._core.modes.switches(), self._core.handles.setting()
        if shown is None or not self._is_shown(request, *now):
            self.refresh()
        elif shown.outcome.differences is None and shown.setting.active:
            call = self._call_of(shown)
            if are_same_arrays(shown.arrays, call.parts.leaves):  # otherwise the model has changed
                self._add_results(shown, differences=passes.compare(call, shown.setting))
            self._queue_effects_alone(shown)
        self._core.view.state_changed()

    def _compilation_failed(self, error: Exception) -> None:
        self._core.handles.give_up(error_text(error))
        first, self._first = self._first, None
        self._core.show_waiting("program")
        self._core.show_waiting("pass")
        what = "The first pass" if first else "A program for the perturbations"
        self._fail(f"{what} could not be compiled", error)
        self._core.view.state_changed()

    def _fail(self, what: str, error: Exception) -> None:
        """Report a failure of a pass that was not requested; a failed first pass also warns."""
        self.failed, text = True, f"{what}: {error_text(error)}"
        self._core.notice("error", text)
        if self._core.shown is None and not self._first_awaited:
            with contextlib.suppress(InspectorWarning):  # a filter may make it an error
                warn(text)

    def _queue_effects_alone(self, shown: ShownPass) -> None:
        """If there are several perturbations, measure the effect of each by itself."""
        several = sum(handle.enabled for handle in self._core.handles.all()) > 1
        if several and not self._core.in_all_processes:
            measure = weak_method(self._measure_effects_alone)
            self._effects_worker.submit(lambda: measure(shown))

    def _measure_effects_alone(self, shown: ShownPass) -> None:
        setting, apart = self._core.handles.settings_alone()
        passes, clean = self._core.programs, shown.outcome.clean
        # else again later
        ready = passes.missing_program("compare", self._call_of(shown), setting) is None
        if ready and clean is not None and setting.is_equivalent(shown.setting) and len(apart) > 1:
            measure = functools.partial(
                effects_alone,
                passes,
                settings=apart,
                clean=clean,
                wanted=lambda: self._is_on_screen(shown),
            )
            found = donated.retry_if_donated(
                lambda: measure(self._call_of(shown)), "The model", self._core.model
            )
            if found is not None:
                self._add_results(shown, alone=found)
                self._core.view.state_changed()

    def _effects_failed(self, error: Exception) -> None:
        if not isinstance(error, InspectorError):  # else a step was given the model's arrays
            what = "The effect of each perturbation alone could not be measured"
            self._core.notice("warning", f"{what}: {error_text(error)}")

    def _is_on_screen(self, shown: ShownPass) -> bool:
        """Whether a pass is still on screen, perhaps with more of its effect measured."""
        now = self._core.shown
        same = now is not None and now.outcome.perturbed is shown.outcome.perturbed
        return same and not self._core.closed and not self._core.looping

    def _add_results(self, shown: ShownPass, **found: object) -> None:
        with self._core.lock:
            if self._core.shown is not None and self._is_on_screen(shown):
                before = self._core.shown
                outcome = dataclasses.replace(before.outcome, **found)
                self._core.shown = dataclasses.replace(before, outcome=outcome)
                if self._with_effect is before:
                    self._with_effect = self._core.shown
