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
from nnx_inspector.inspector.passes.alike import agree_on
from nnx_inspector.inspector.passes.batch import show_inputs
from nnx_inspector.inspector.passes.call import Call
from nnx_inspector.inspector.passes.pass_request import PassRequest, Shown, each_alone, made
from nnx_inspector.perturbations.apply_setting import PerturbableSites
from nnx_inspector.perturbations.places import PARAMETER, Setting
from nnx_inspector.records import donated
from nnx_inspector.records.donated import are_same_arrays, weak_arrays
from nnx_inspector.records.nan_site import nan_site_text
from nnx_inspector.screen import protocol
from nnx_inspector.typing import PyTree

NOTHING = "Nothing is perturbed."
NEW_PROGRAM = "The effect is measured once its program is compiled."
NEXT_STEP = "The effect is measured at the next measured step of the loop."
MEASURE_AGAIN = "The effect has not been measured: insp.run() or insp.step(...) measures it."
FAILED = "The effect could not be measured: see the messages."

HALF, MOST_HALVES = (KeyError, AttributeError, RuntimeError), 3
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
        self._not_whole = ""  # why a measured pass of a loop has no effect
        self._halves = 0  # how often in a row the model was perhaps being updated
        self._first: tuple[PassRequest, Call] | None = None  # the first pass, while it is wanted
        self._asked = False  # whether anything has waited for it
        self._began: float | None = None  # when a pass was first wanted
        self._measured: Shown | None = None  # the pass with the newest effect
        self._reach: tuple[PassRequest, Switches, PerturbableSites] | None = None
        self._arming = Worker(
            "nnx_inspector.arming", weak_method(self._not_armed), weak_method(self._armed)
        )
        self._apart = Worker("nnx_inspector.apart", weak_method(self._not_apart))
        core.effect, core.modes.on_change = self.effect, self._modes_changed
        for close in (self._arming.close, self._apart.close, weak_method(self._forget)):
            core.closing.callback(close)

    def _call_of(self, shown: Shown) -> Call:
        return shown.request.call(self._core.model, shown.switches)

    def begin(self, *, wait: bool = False) -> None:
        """Make the first pass, of the present values, in a thread; here with `wait`."""
        core = self._core
        if not self._lacks_first:
            return
        if wait or forbids_nan() or core.programs.tracing(core.call()) is None:
            self.run(core.example)
        else:
            self.refresh()

    def first(self, *, needed: bool = True) -> None:
        """Return when there is a pass to read. If none was made or begun, run the example here.

        Raises:
            InspectorError: it is `needed`, and must run in all processes of a job.
        """
        self._asked = True
        self._core.recorder.wait()
        if self._lacks_first:
            self._arming.wait()
        if self._lacks_first:
            self.run(self._core.example)
        elif not self._core.looping:
            if needed and not len(self._core.recording):
                self._core.require_here("The example")
            self._core.learn()

    def drop_first(self) -> None:
        """Stop wanting the first pass: a loop replaces it, and nothing waits for it."""
        self._first = self._began = None

    @property
    def _lacks_first(self) -> bool:
        core = self._core
        return not (len(core.recording) or core.looping or core.closed or core.spread)

    def run(self, request: PassRequest) -> PyTree:
        """Make a requested pass, waiting for its program; returns what the function returns."""
        begun, self._first = self._first, None  # nothing waits for the first pass any more
        self._began = self._began or time.monotonic()
        try:
            return self._run(request)
        finally:
            if begun is not None and self._lacks_first:
                self.refresh()

    def _run(self, request: PassRequest) -> PyTree:
        agree_on(self._core, request)
        setting, switches = self._core.handles.setting(), self._core.modes.switches()

        def make() -> tuple[Shown, Call]:
            call = request.call(self._core.model, switches)
            donated.raise_if_deleted(call.parts.leaves)
            return self._make(request, call, setting), call

        shown, call = donated.retry_if_donated(make, "The model", self._core.model)
        with (core := self._core).lock:
            core.keep(request)
        self._took_place(shown, call)
        if forbids_nan() and (found := nan_site_text(shown.outcome.perturbed.record)):
            call.raise_theirs(found)
        return shown.outcome.perturbed.value

    def choose(self, which: str) -> None:
        """Make the last forward pass again ("run"), or the last step: all panels look at it."""
        if (request := self._core.made(which)) is not self._core.request:
            self._run(request)

    def reached(self) -> PerturbableSites:
        """The parts of the pass on screen that can be perturbed; traced once."""
        request, switches = self._core.request, self._core.modes.switches()
        if self._reach is None or self._reach[:2] != (request, switches):
            reach = self._core.programs.read(
                request.call(self._core.model, switches), PerturbableSites
            )
            self._reach = (request, switches, reach)
        return self._reach[2]

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
        self._not_whole = donated.several_processes_text("The effect") if self._core.spread else ""
        if self._not_whole:
            return
        try:
            setting = handles.setting()
            old = handles.setting(armed=True)
            call = request.call(self._core.model, switches)
            if first is not None and first[0] is request and first[1].of_same(call):
                call = first[1]  # with the model's values of the moment when it was wanted
            request.require_there()
            donated.require_not_deleted(call.parts.leaves, "The model", call.model)
            missing = passes.missing("pass", call, setting)
            # in other modes or for another call, equal places have no old program
            later = missing is not None and (setting.places != old.places or before is None)
            if later:
                if before is None and not self._core.looping:
                    self._first = request, call  # its parts are taken
                    self._began = self._began or time.monotonic()
                self._compile(missing)
                setting = old
            if self._core.looping:
                if not later:
                    handles.arm(setting)
                    if setting.active:  # the screen shows the loop, and the effect beside it
                        self._measured = shown = self._make(request, call, setting, step=step)
                        if shown.outcome.differences is None:
                            self._want_comparison(call, setting)
            elif not later or not (before is None or self._is_shown(request, switches, setting)):
                count = len(self._core.recording)
                make = functools.partial(self._make, request, call, setting)
                shown = donated.retry_if_donated(make, "The model", call.model)
                self._took_place(shown, call, instead_of=(before, count))
            self._halves = 0
        except Exception as error:  # noqa: BLE001 - shown instead
            if self._core.looping and not looping:
                return  # the loop that began meanwhile is shown instead, and donated the arrays
            if step is not None and isinstance(error, InspectorError):
                self._not_whole = str(error)  # the next measured pass may find the arrays there
                return
            besides = step is not None and self._core.view.loop_thread != threading.get_ident()
            if besides and isinstance(error, HALF) and self._halves < MOST_HALVES:
                self._halves, self._not_whole = self._halves + 1, NEXT_STEP
                return
            again = "" if before is None else " again"
            self._fail(f"{request.name} could not be run{again}", error)

    def effect(self) -> tuple[protocol.Effect | None, str]:
        """The effect of the present perturbations, or None and the reason why there is none.

        A step has an effect without a perturbation too.
        """
        handles, measured, looping = self._core.handles, self._measured, self._core.looping
        wanted = handles.setting()
        if not wanted.active and looping:
            return None, NOTHING
        if (
            measured is not None
            and measured.request is self._core.request
            and measured.switches == self._core.modes.switches()
            and measured.setting.has_same_effect(wanted)
        ):
            source = measured.source(self._core.step, looping=looping)
            effect = measured.outcome.effect(source)
            return effect, "" if effect is not None else NOTHING
        if not wanted.active:
            return None, NOTHING
        if self.failed or self._not_whole:
            return None, self._not_whole or FAILED
        if self._arming.busy or any(one.enabled and one.compiling for one in handles.all()):
            return None, NEW_PROGRAM
        return None, NEXT_STEP if looping else MEASURE_AGAIN

    def follow(self) -> None:
        """Show the model's modules as they are: one may have been added, removed or replaced."""
        if self._core.has_changed():
            self._reach = None
            self._trace_again("with the model's new layers")

    def _trace_again(self, where: str) -> bool:
        """Trace the example and show its sites; returns whether it can be run."""
        core = self._core
        try:
            core.take_trace(core.trace_example())
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

    def show(self, selection: Selection) -> None:
        """Show the sites of another selection."""
        core, before = self._core, self._core.selection
        if selection == before:
            return
        core.choose(selection)
        try:
            found = core.trace_example()
        except Exception:
            core.choose(before)
            raise
        core.take_trace(found)
        self._reach = None
        core.view.present(force=True)  # what was measured before stays on screen meanwhile
        if self._first is not None or not self._lacks_first:
            self.refresh()

    def wait(self) -> None:
        """Wait until nothing is being compiled or measured for the effect any more."""
        self._arming.wait()
        self._apart.wait()

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
        measured = self._measured
        part = found is not None and measured is not None and measured.outcome.differences is None
        later = why in (NEW_PROGRAM, NEXT_STEP, MEASURE_AGAIN) or (core.looping and part)
        if later and core.handles.setting().active and not core.spread:
            self._measure()
            core.view.state_changed()
        return self.effect()[0]

    def _measure(self) -> None:
        """Measure the effect of the present perturbations here, and compile what it needs."""
        core, setting = self._core, self._core.handles.setting()
        request, switches = core.request, core.modes.switches()
        request.require_there()

        def make() -> Shown:
            call = request.call(core.model, switches)
            donated.raise_if_deleted(call.parts.leaves)
            compile_it = core.programs.missing("compare", call, setting)
            if compile_it is not None:
                compile_it(lambda: False)
            return self._make(request, call, setting, step=max(core.step - core.looping, 0))

        self._measured = donated.retry_if_donated(make, "The model", core.model)

    def _forget(self) -> None:
        self._first = self._reach = self._measured = None

    def _make(
        self, request: PassRequest, call: Call, setting: Setting, *, step: int | None = None
    ) -> Shown:
        self._core.show_modes(call.switches)
        looping = self._core.looping
        at, arrays = (
            self._core.step if step is None else step,
            weak_arrays(call.parts.leaves),
        )
        outcome = made(self._core.programs, call, setting)
        return Shown(request, call.switches, setting, outcome, at, looping, arrays)

    def _took_place(
        self, shown: Shown, call: Call, *, instead_of: tuple[Shown | None, int] | None = None
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
            if self._began is not None:
                core.meter.waited.setdefault("pass_seconds", time.monotonic() - self._began)
            core.shown = self._measured = shown
            core.handles.arm(shown.setting)
            if not core.looping:
                core.handles.tell_idle(self._idle_in(shown))
        self.follow()
        self._show(shown, call)
        show_inputs(core, shown.outcome.perturbed.value)
        if shown.setting.active and shown.outcome.differences is None:
            self._want_comparison(call, shown.setting)
        self._want_each_alone(shown)

    def _show(self, shown: Shown, call: Call) -> None:
        # the loss of this evaluation does not belong to the curves, which show the training
        core, found = self._core, shown.outcome.perturbed
        core.eager = found.record.eager
        core.show_modes(shown.switches)
        core.recording.learn(core.programs.facts(call))
        kind, clean = shown.request.kind, shown.outcome.clean
        clean, how = clean and clean.record, {"kind": kind, "setting": shown.setting}
        core.show_record(found.record, states=found.states, clean=clean, **how)

    def _idle_in(self, shown: Shown) -> dict[int, str]:
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

    def _want_comparison(self, call: Call, setting: Setting) -> None:
        self._compile(self._core.programs.missing("compare", call, setting))

    def _compile(self, missing: Callable[[Callable[[], bool]], None] | None) -> None:
        """Compile a missing program instead of any other that still waits."""
        arming, first, unwanted = self._arming, self._first is not None, weak_method(self._unwanted)
        if missing is not None:
            what = "the first pass" if first else "the program with the perturbations"
            self._core.wait_for("program", f"compiling {what}")
            arming.submit_instead(lambda: missing(lambda: arming.closed or (first and unwanted())))

    def _unwanted(self) -> bool:
        """Whether nothing waits for the first pass any more."""
        return self._first is None

    def _is_shown(self, request: PassRequest, switches: Switches, setting: Setting) -> bool:
        now, asked = self._core.shown, (request, switches)
        if now is None or (now.request, now.switches) != asked:
            return False
        return now.setting.is_equivalent(setting)

    # ------------------------------------------------------ results that come later

    def _armed(self) -> None:
        """Use a program that has just been compiled; called in the thread that compiles."""
        first = self._first
        self._core.wait_for("program")
        self._core.wait_for("pass", "running the first pass" if first else "")
        self._arm_shown()
        self._first = self._first if self._first is not first else None
        self._core.wait_for("pass")
        self._core.view.state_changed()

    def _arm_shown(self) -> None:
        if self._core.closed or (self._core.shown is self._first is None):
            return
        if self._core.looping:  # the loop measures the effect at its next measured step
            return self._core.view.state_changed()
        shown, switches, passes = self._core.shown, self._core.modes.switches(), self._core.programs
        if shown is None or not self._is_shown(
            self._core.request, switches, self._core.handles.setting()
        ):
            self.refresh()
        elif shown.outcome.differences is None and shown.setting.active:
            call = self._call_of(shown)
            if are_same_arrays(shown.arrays, call.parts.leaves):  # otherwise the model has changed
                self._supplement(shown, differences=passes.compare(call, shown.setting))
            self._want_each_alone(shown)
        self._core.view.state_changed()

    def _not_armed(self, error: Exception) -> None:
        self._core.handles.give_up(error_text(error))
        first, self._first = self._first, None
        self._core.wait_for("program")
        self._core.wait_for("pass")
        what = "The first pass" if first else "A program for the perturbations"
        self._fail(f"{what} could not be compiled", error)
        self._core.view.state_changed()

    def _fail(self, what: str, error: Exception) -> None:
        """Report a failure of a pass that was not requested; a failed first pass also warns."""
        self.failed, text = True, f"{what}: {error_text(error)}"
        self._core.notice("error", text)
        if self._core.shown is None and not self._asked:
            with contextlib.suppress(InspectorWarning):  # a filter may make it an error
                warn(text)

    def _want_each_alone(self, shown: Shown) -> None:
        """If there are several perturbations, measure the effect of each by itself."""
        if len([h for h in self._core.handles.all() if h.enabled]) > 1 and not self._core.spread:
            measure = weak_method(self._measure_each)
            self._apart.submit(lambda: measure(shown))

    def _measure_each(self, shown: Shown) -> None:
        setting, apart = self._core.handles.each_alone()
        passes, clean = self._core.programs, shown.outcome.clean
        # else again later
        ready = passes.missing("compare", self._call_of(shown), setting) is None
        if ready and clean is not None and setting.is_equivalent(shown.setting) and len(apart) > 1:
            measure = functools.partial(
                each_alone, passes, settings=apart, clean=clean, wanted=lambda: self._still(shown)
            )
            found = donated.retry_if_donated(
                lambda: measure(self._call_of(shown)), "The model", self._core.model
            )
            if found is not None:
                self._supplement(shown, alone=found)
                self._core.view.state_changed()

    def _not_apart(self, error: Exception) -> None:
        if not isinstance(error, InspectorError):  # else a step was given the model's arrays
            what = "The effect of each perturbation alone could not be measured"
            self._core.notice("warning", f"{what}: {error_text(error)}")

    def _still(self, shown: Shown) -> bool:
        """Whether a pass is still on screen, perhaps with more of its effect measured."""
        now = self._core.shown
        same = now is not None and now.outcome.perturbed is shown.outcome.perturbed
        return same and not self._core.closed and not self._core.looping

    def _supplement(self, shown: Shown, **found: object) -> None:
        with self._core.lock:
            if self._core.shown is not None and self._still(shown):
                before = self._core.shown
                outcome = dataclasses.replace(before.outcome, **found)
                self._core.shown = dataclasses.replace(before, outcome=outcome)
                if self._measured is before:
                    self._measured = self._core.shown
