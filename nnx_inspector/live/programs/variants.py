"""Which variant of a watched program runs: the user's own, a perturbed one or one that measures.

A program is read once it has been traced, and edited where it is launched: what it measures leaves
it beside its own results, and the numbers of perturbations enter it. If none of its passes is
sampled, the user's own program runs in its place, or one that is perturbed and measures nothing, as
soon as a thread has compiled it. Invariant: passes are numbered in the order in which their
programs are started.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import cast

import jax

from nnx_inspector._compat.configuration import Configuration, hooks_key
from nnx_inspector._compat.launching import jit_calls, launch
from nnx_inspector.background import Worker, weak_method
from nnx_inspector.hooks.hook import open_hooks, replace_hooks, without_hooks
from nnx_inspector.live.hook import WatchHook
from nnx_inspector.live.pass_boundaries import TopLevelCall
from nnx_inspector.live.pass_start import open_sessions
from nnx_inspector.live.programs.fast_path import FastPath, KnownCalls, key_of
from nnx_inspector.live.programs.launches import (
    CHOOSING,
    Launch,
    StartedPasses,
    WatchedSession,
    log_errors,
    on_device,
)
from nnx_inspector.live.programs.ownership import FOREIGN, ForeignCalls
from nnx_inspector.live.programs.recompile import LoggedCall
from nnx_inspector.live.programs.traced_program import EditedProgram, TracedProgram
from nnx_inspector.live.programs.value_request import ValueRequest
from nnx_inspector.perturbations.places import CLEAN, Setting
from nnx_inspector.program.instrument import mark_presence
from nnx_inspector.program.survey import holds_marks
from nnx_inspector.typing import Function, Jaxpr, Params, PyTree, Value

_traced_programs: weakref.WeakKeyDictionary[object, dict[Hashable, TracedProgram]] = (
    weakref.WeakKeyDictionary()
)


class Variants:
    """Chooses what a session's programs run; see `launch.Chooser`."""

    def __init__(self, session: WatchedSession):
        self._session = weakref.ref(session)
        self._bare: weakref.WeakKeyDictionary[Jaxpr, Value] = weakref.WeakKeyDictionary()
        self._perturbing: weakref.WeakKeyDictionary[Jaxpr, Value] = weakref.WeakKeyDictionary()
        self._worker = Worker("nnx_inspector.variants", weak_method(self._not_compiled))
        self._fast_path = FastPath(weak_method(session.is_mine), weak_method(self._passed_over))
        self._setting, self._key = CLEAN, 0  # of the passes that jax starts itself
        self._passes = StartedPasses()

    # ------------------------------------------------ passes that jax starts itself

    def leave_fast_path(self) -> None:
        """Choose the program of each call again, from this thread's next one on."""
        self._fast_path.stop()

    def prepare(self) -> None:
        self._fast_path.prepare()

    def _passed_over(self, known: KnownCalls) -> bool:
        session = self._session()
        if session is None:
            return False
        calls, reached = known
        if session.setting.active:
            session.ran[id(reached)] = reached
        session.inbox.pass_over(calls, session.setting)
        return session.setting is self._setting and self._none_is_due(session)

    def _none_is_due(self, session: WatchedSession) -> bool:
        if session.value_request is not None and session.value_request.is_searching:
            return False
        return not any(session.inbox.is_due(x, session.setting) for x in self._fast_path.known)

    def _start_fast(self, session: WatchedSession, key: int) -> None:
        """Let jax start the next programs itself, if none of them is measured."""
        if any(self._fast_path.known) and not self._worker.busy and self._none_is_due(session):
            self._setting, self._key = session.setting, key
            self._fast_path.start(key)

    def _launch(
        self,
        session: WatchedSession,
        found: TracedProgram,
        edited: EditedProgram,
        setting: Setting,
        alone: Params | None = None,
        *,
        is_doubted: bool = False,
        request: ValueRequest | None = None,
    ) -> Launch:
        given = self._passes, session, found, edited, setting, self._start_fast
        return Launch(*given, alone, is_doubted, request)

    def resume(self) -> None:
        """Let jax start the next programs as before, if nothing has changed since."""
        session = self._session()
        if session is not None and session.setting is self._setting:
            self._fast_path.number = session.number
            self._start_fast(session, self._key)

    # -------------------------------------------------------------------- choosing

    holds = staticmethod(holds_marks)
    with_presence = staticmethod(mark_presence)

    def escaped(self, name: str, /) -> None:
        """Count a program that was compiled ahead, even under our hooks: nothing edits it."""
        session = self._session()
        if session is not None and hooks_key.value is not None:  # not one of our own
            session.executables += 1

    def failed(self, error: Exception, /) -> None:
        session = self._session()
        if session is not None:
            session.errors.append(f"starting a program: {type(error).__name__}: {error}")

    def choose(
        self,
        program: Value,
        arrays: Sequence[object],
        /,
        *,
        alone: Params | None = None,
        call: jit_calls.PendingJitCall | None = None,
    ) -> Launch | launch.Replacement | None:
        if alone is None and hooks_key.value is None:
            return None  # a program of our own
        session = self._session()
        if session is None:
            return None
        with log_errors(session, CHOOSING):
            if not session.takes_part(arrays):
                return None
            if session.value_request is not None:
                session.value_request.count_program(session.inbox.count)
            read = self._read(program, arrays, session, alone)
            if read is not None and not self._meets(session, read[0], alone):
                return None
            instead = None if call is None else self._unmeasured(call, session, read)
            if instead is not None or read is None:
                return instead
            return self._measured(program, session, *read, alone)
        return None

    def _meets(self, session: WatchedSession, found: TracedProgram, alone: Params | None) -> bool:
        """Wait for the other processes of a job before a pass is measured, if they steer it.

        Returns:
            Whether it may be measured.
        """
        if not session.is_steered or session.group is None or not found.begins:
            return True
        return not self._passes.are_due(found, session, alone) or session.steers()

    def _read(
        self,
        program: Jaxpr,
        arrays: Sequence[object] | None,
        session: WatchedSession,
        alone: Params | None = None,
    ) -> tuple[TracedProgram, ForeignCalls] | None:
        """What a program says of the session's model, if anything, and whose calls it makes on
        these arrays, None if they are not known.
        """
        hook = next(filter(session.is_mine, open_hooks()), None)
        unmeasured = () if hook is None else cast(WatchHook, hook.wrap).unmeasured
        known, key = _traced_programs.setdefault(program, {}), (session.number, unmeasured)
        if key not in known:
            known[key] = TracedProgram(program, WatchHook.owner_of(session.number), unmeasured)
        found = known[key]
        session.unseen.update(found.unseen)
        if found.is_empty:
            return None
        calls = session.ownership.of(found.trees, arrays)
        self._report_foreign(session, found, calls, alone)
        if calls.why:
            without = (*key, frozenset(calls.why))
            if without not in known:
                known[without] = found.without(program, calls.why.keys())
            found = known[without]
        return found, calls

    def _measured(
        self,
        program: Jaxpr,
        session: WatchedSession,
        found: TracedProgram,
        calls: ForeignCalls,
        alone: Params | None,
    ) -> Launch | None:
        if alone is not None and calls.why:
            self._passes.enter_foreign_call()
        request = (
            session.value_request if self._keeps_values(None, session, found, program) else None
        )
        measures = self._passes.are_due(found, session, alone)
        if alone and not (measures or request or found.begins or found.takes):
            return None
        if alone is None and found.has_variant(True) and not self._perturbing.get(program):
            measures = True  # it is compiled already
        edited = None if request is None else self._keeping_program(found, program, request)
        kept = edited and request
        edited = edited or found.edited(program, measures=measures)
        setting = self._passes.setting_of(found, session, alone)
        doubted = calls.is_doubted
        return self._launch(
            session, found, edited, setting, alone, is_doubted=doubted, request=kept
        )

    def _report_foreign(
        self,
        session: WatchedSession,
        found: TracedProgram,
        calls: ForeignCalls,
        alone: Params | None,
    ) -> None:
        """Say which calls are not the model's, and let go of passes that were taken for it."""
        for i, why in calls.why.items():
            if why != FOREIGN:
                session.unseen[""] = why
            elif session.ownership.is_new_call(found.trees, i):
                begun = found.begins[i].mark.begun if alone is None else alone["begun"]
                session.count_other(begun.type_name)
        for number in session.ownership.pop_foreign_passes():
            if session.inbox.drop(number):
                session.count_other(type(session.model).__name__)

    def _unmeasured(
        self,
        call: jit_calls.PendingJitCall,
        session: WatchedSession,
        read: tuple[TracedProgram, ForeignCalls] | None,
    ) -> launch.Replacement | None:
        """What runs in place of a jitted call of which nothing is measured."""
        self._fast_path.number = session.number
        if read is None:
            if any(map(session.is_mine, open_hooks())):  # else it is the user's own
                self._fast_path.learn(call.function, ())
            return None
        found, whose = read
        if self._keeps_values(call, session, found, call.program):
            return None
        if not (found.begins or whose.why) or not found.is_known:
            return None
        calls = tuple(found.known_calls)
        self._fast_path.learn(call.function, calls, found.reached)
        if session.inbox.is_due(calls, session.setting):
            self._fast_path.is_for(0)
            return None
        if session.setting.active:
            return self._perturbed(call, session, found)
        bare = self._users_program(call, session)
        if bare is None:
            self._fast_path.is_for(0)
            return None
        return lambda: self._run_bare(bare, call, session, calls)

    def _keeping_program(
        self, found: TracedProgram, program: Jaxpr, request: ValueRequest
    ) -> EditedProgram | None:
        """The program that keeps what was asked, None if there is none."""
        try:
            return found.edited(program, measures=True, request=request)
        except Exception as error:  # noqa: BLE001 - it is the answer; the step goes on
            request.fail(error)
            return None

    def _keeps_values(
        self,
        call: jit_calls.PendingJitCall | None,
        session: WatchedSession,
        found: TracedProgram,
        program: Jaxpr,
    ) -> bool:
        """Whether a program is to keep what was asked for. The first that can is compiled in a
        thread before.
        """
        request = session.value_request
        if request is None or request.problem or not found.has_site(request.site):
            return False
        if not request.claim():
            return request.keeps(bool(found.begins), session.inbox.count)
        edited = self._keeping_program(found, program, request)
        if edited is None:
            return False
        if call is None or found.is_single:
            request.set_ready()
            return False
        compile_it, hooks, configuration = call.compiler(), open_hooks(), Configuration.current()

        def work() -> None:
            try:
                with configuration.applied(), replace_hooks(hooks):
                    one = self._launch(session, found, edited, session.setting)
                    compile_it(edited.program, on_device(one.numbers()), edited.outputs)
            except Exception as error:  # noqa: BLE001 - it is the answer
                request.fail(error)
            else:
                request.set_ready()

        self._worker.submit(work)
        return False

    def _perturbed(
        self, call: jit_calls.PendingJitCall, session: WatchedSession, found: TracedProgram
    ) -> launch.Replacement | None:
        if not self._has_perturbing(call, session, found):
            self._fast_path.is_for(0)
            return None
        edited, setting = found.edited(call.program, measures=False), session.setting
        one = self._launch(session, found, edited, setting)

        def run() -> PyTree:
            if self._fast_path.is_for(one.key):
                out = call.run_for_fast_path(edited.program, one.inputs())
            else:
                out, _ = call.run(edited.program, one.inputs())
            one.take([])
            return out

        return run

    def ahead(self, program: Jaxpr) -> tuple[Jaxpr, list[jax.Array], int] | None:
        """What is compiled ahead for a program: it, values for its additional inputs, and how many
        additional outputs it has; or None.
        """
        session = self._session()
        read = None if session is None else self._read(program, None, session)
        if read is None or session is None:
            return None
        found, _ = read
        edited = found.edited(program, measures=True)
        one = self._launch(session, found, edited, session.setting)
        return edited.program, on_device(one.numbers()), edited.outputs

    def wait(self) -> None:
        """Return when all variants that are wanted are compiled."""
        self._worker.wait()

    def close(self) -> None:
        self._worker.close()
        self._bare.clear()
        self._perturbing.clear()

    def _run_bare(
        self,
        bare: Function,
        call: jit_calls.PendingJitCall,
        session: WatchedSession,
        calls: Sequence[TopLevelCall],
    ) -> PyTree:
        with without_hooks(session.is_mine):
            if self._fast_path.is_for(key_of()):
                out = call.run_own()
            else:
                out = call.with_own_graphdefs(bare(*call.args, **call.kwargs))
        session.inbox.pass_over(calls, session.setting)
        if not session.setting.active:
            self._start_fast(session, key_of())
        return out

    def _users_program(
        self, call: jit_calls.PendingJitCall, session: WatchedSession
    ) -> Function | None:
        """The user's own function, once a thread has compiled it."""
        if call.program not in self._bare:
            hooks = tuple(hook for hook in open_hooks() if not session.is_mine(hook))
            noted = LoggedCall(call.made(), hooks, Configuration.current())

            def compiled() -> Function:
                noted.compile()
                return noted.call.jitted()

            self._compile_ahead(self._bare, call.program, compiled, session)
        return self._bare[call.program]

    def _has_perturbing(
        self, call: jit_calls.PendingJitCall, session: WatchedSession, found: TracedProgram
    ) -> bool:
        """Whether a thread has compiled the program that is perturbed and measures nothing."""
        if call.program not in self._perturbing:
            compile_it, program = call.compiler(), call.program
            hooks, configuration = open_hooks(), Configuration.current()

            def compiled() -> bool:
                with configuration.applied(), replace_hooks(hooks):
                    edited = found.edited(program, measures=False)
                    one = self._launch(session, found, edited, session.setting)
                    compile_it(edited.program, on_device(one.numbers()))
                return True

            self._compile_ahead(self._perturbing, call.program, compiled, session)
        return bool(self._perturbing[call.program])

    def _compile_ahead(
        self,
        those: weakref.WeakKeyDictionary[Jaxpr, Value],
        program: Jaxpr,
        compiled: Callable[[], object],
        session: WatchedSession,
    ) -> None:
        those[program] = None

        def work() -> None:
            if session.number in open_sessions:
                those[program] = compiled()
            else:  # the loop has ended; the next one may want it
                those.pop(program, None)

        if session.group is not None:  # all processes run the same program at each step
            work()
        else:
            self._worker.submit(work)

    def _not_compiled(self, error: Exception) -> None:
        session = self._session()
        if session is not None:  # the variant that measures goes on
            session.errors.append(f"compiling ahead: {type(error).__name__}: {error}")


class VariantChooser(launch.LaunchInterception):
    """While it is open, a session chooses the variants of this thread's programs."""

    def __init__(self, variants: Variants):
        super().__init__(variants)
        self._variants = variants

    def open(self) -> None:
        super().open()
        self._variants.resume()
