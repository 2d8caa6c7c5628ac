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
from nnx_inspector._compat.launching import jitted, launch
from nnx_inspector.background import Worker, weakly
from nnx_inspector.hooks.hook import open_hooks, replace_hooks, without_hooks
from nnx_inspector.live.calls import Call
from nnx_inspector.live.hook import Watch
from nnx_inspector.live.messages import listeners
from nnx_inspector.live.programs.asked import Asked
from nnx_inspector.live.programs.fast_path import FastPath, Known, key_of
from nnx_inspector.live.programs.finished import Edited, Finished
from nnx_inspector.live.programs.launches import Launch, Passes, Watched, noting, put
from nnx_inspector.live.programs.recompile import Noted
from nnx_inspector.live.programs.whose import OTHER, Calls
from nnx_inspector.perturbations.places import CLEAN, Setting
from nnx_inspector.program.rewrite import with_presence
from nnx_inspector.program.survey import holds_marks
from nnx_inspector.typing import Function, Jaxpr, Params, PyTree, Value

_finished: weakref.WeakKeyDictionary[object, dict[Hashable, Finished]] = weakref.WeakKeyDictionary()


class Variants:
    """Chooses what a session's programs run; see `launch.Chooser`."""

    def __init__(self, session: Watched):
        self._session = weakref.ref(session)
        self._bare: weakref.WeakKeyDictionary[Jaxpr, Value] = weakref.WeakKeyDictionary()
        self._quiet: weakref.WeakKeyDictionary[Jaxpr, Value] = weakref.WeakKeyDictionary()
        self._worker = Worker("nnx_inspector.variants", weakly(self._not_compiled))
        self._passing = FastPath(weakly(session.is_mine), weakly(self._passed))
        self._setting, self._key = CLEAN, 0  # of the passes that jax starts itself
        self._passes = Passes()

    # ------------------------------------------------ passes that jax starts itself

    def stop_passing(self) -> None:
        """Choose the program of each call again, from this thread's next one on."""
        self._passing.stop()

    def prepare(self) -> None:
        self._passing.prepare()

    def _passed(self, known: Known) -> bool:
        session = self._session()
        if session is None:
            return False
        calls, reached = known
        if session.setting.active:
            session.ran[id(reached)] = reached
        session.inbox.pass_over(calls, session.setting)
        return session.setting is self._setting and self._may_pass(session)

    def _may_pass(self, session: Watched) -> bool:
        if session.asked is not None and session.asked.looks:
            return False
        return not any(session.inbox.is_due(x, session.setting) for x in self._passing.known)

    def _pass(self, session: Watched, key: int) -> None:
        """Let jax start the next programs itself, if none of them is measured."""
        if any(self._passing.known) and not self._worker.busy and self._may_pass(session):
            self._setting, self._key = session.setting, key
            self._passing.start(key)

    def _launch(
        self,
        session: Watched,
        found: Finished,
        edited: Edited,
        setting: Setting,
        alone: Params | None = None,
        *,
        is_doubted: bool = False,
        asked: Asked | None = None,
    ) -> Launch:
        given = self._passes, session, found, edited, setting, self._pass
        return Launch(*given, alone, is_doubted, asked)

    def resume(self) -> None:
        """Let jax start the next programs as before, if nothing has changed since."""
        session = self._session()
        if session is not None and session.setting is self._setting:
            self._passing.number = session.number
            self._pass(session, self._key)

    # -------------------------------------------------------------------- choosing

    holds = staticmethod(holds_marks)
    with_presence = staticmethod(with_presence)

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
        call: jitted.JitStart | None = None,
    ) -> Launch | launch.Instead | None:
        if alone is None and hooks_key.value is None:
            return None  # a program of our own
        session = self._session()
        if session is None:
            return None
        with noting(session, "choosing a program: "):
            if not session.takes_part(arrays):
                return None
            if session.asked is not None:
                session.asked.look(session.inbox.count)
            read = self._read(program, arrays, session, alone)
            if read is not None and not self._meets(session, read[0], alone):
                return None
            instead = None if call is None else self._unmeasured(call, session, read)
            if instead is not None or read is None:
                return instead
            return self._measured(program, session, *read, alone)
        return None

    def _meets(self, session: Watched, found: Finished, alone: Params | None) -> bool:
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
        session: Watched,
        alone: Params | None = None,
    ) -> tuple[Finished, Calls] | None:
        """What a program says of the session's model, if anything, and whose calls it makes on
        these arrays, None if they are not known.
        """
        hook = next(filter(session.is_mine, open_hooks()), None)
        unmeasured = () if hook is None else cast(Watch, hook.wrap).unmeasured
        known, key = _finished.setdefault(program, {}), (session.number, unmeasured)
        if key not in known:
            known[key] = Finished(program, Watch.owner_of(session.number), unmeasured)
        found = known[key]
        session.unseen.update(found.unseen)
        if found.is_empty:
            return None
        calls = session.whose.of(found.trees, arrays)
        self._note(session, found, calls, alone)
        if calls.why:
            without = (*key, frozenset(calls.why))
            if without not in known:
                known[without] = found.without(program, calls.why.keys())
            found = known[without]
        return found, calls

    def _measured(
        self,
        program: Jaxpr,
        session: Watched,
        found: Finished,
        calls: Calls,
        alone: Params | None,
    ) -> Launch | None:
        if alone is not None and calls.why:
            self._passes.is_others()
        asked = session.asked if self._is_asked(None, session, found, program) else None
        measures = self._passes.are_due(found, session, alone)
        if alone and not (measures or asked or found.begins or found.takes):
            return None
        if alone is None and found.knows(True) and not self._quiet.get(program):
            measures = True  # it is compiled already
        edited = None if asked is None else self._keeping(found, program, asked)
        kept = edited and asked
        edited = edited or found.edited(program, measures=measures)
        setting = self._passes.setting_of(found, session, alone)
        doubted = calls.is_doubted
        return self._launch(session, found, edited, setting, alone, is_doubted=doubted, asked=kept)

    def _note(self, session: Watched, found: Finished, calls: Calls, alone: Params | None) -> None:
        """Say which calls are not the model's, and let go of passes that were taken for it."""
        for i, why in calls.why.items():
            if why != OTHER:
                session.unseen[""] = why
            elif session.whose.is_first(found.trees, i):
                begun = found.begins[i].mark.begun if alone is None else alone["begun"]
                session.count_other(begun.type_name)
        for number in session.whose.disowned():
            if session.inbox.drop(number):
                session.count_other(type(session.model).__name__)

    def _unmeasured(
        self, call: jitted.JitStart, session: Watched, read: tuple[Finished, Calls] | None
    ) -> launch.Instead | None:
        """What runs in place of a jitted call of which nothing is measured."""
        self._passing.number = session.number
        if read is None:
            if any(map(session.is_mine, open_hooks())):  # else it is the user's own
                self._passing.learn(call.function, ())
            return None
        found, whose = read
        if self._is_asked(call, session, found, call.program):
            return None
        if not (found.begins or whose.why) or not found.is_known:
            return None
        calls = tuple(found.known_calls)
        self._passing.learn(call.function, calls, found.reached)
        if session.inbox.is_due(calls, session.setting):
            self._passing.fits(0)
            return None
        if session.setting.active:
            return self._perturbed(call, session, found)
        bare = self._own(call, session)
        if bare is None:
            self._passing.fits(0)
            return None
        return lambda: self._run_bare(bare, call, session, calls)

    def _keeping(self, found: Finished, program: Jaxpr, asked: Asked) -> Edited | None:
        """The program that keeps what was asked, None if there is none."""
        try:
            return found.edited(program, measures=True, asked=asked)
        except Exception as error:  # noqa: BLE001 - it is the answer; the step goes on
            asked.fail(error)
            return None

    def _is_asked(
        self,
        call: jitted.JitStart | None,
        session: Watched,
        found: Finished,
        program: Jaxpr,
    ) -> bool:
        """Whether a program is to keep what was asked for. The first that can is compiled in a
        thread before.
        """
        asked = session.asked
        if asked is None or asked.problem or not found.has_site(asked.site):
            return False
        if not asked.take_up():
            return asked.keeps(bool(found.begins), session.inbox.count)
        edited = self._keeping(found, program, asked)
        if edited is None:
            return False
        if call is None or found.is_single:
            asked.be_ready()
            return False
        compile_it, hooks, configuration = call.compiler(), open_hooks(), Configuration.here()

        def work() -> None:
            try:
                with configuration.held(), replace_hooks(hooks):
                    one = self._launch(session, found, edited, session.setting)
                    compile_it(edited.program, put(one.numbers()), edited.outputs)
            except Exception as error:  # noqa: BLE001 - it is the answer
                asked.fail(error)
            else:
                asked.be_ready()

        self._worker.do(work)
        return False

    def _perturbed(
        self, call: jitted.JitStart, session: Watched, found: Finished
    ) -> launch.Instead | None:
        if not self._compiled_quiet(call, session, found):
            self._passing.fits(0)
            return None
        edited, setting = found.edited(call.program, measures=False), session.setting
        one = self._launch(session, found, edited, setting)

        def run() -> PyTree:
            if self._passing.fits(one.key):
                out = call.directly(edited.program, one.inputs())
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
        return edited.program, put(one.numbers()), edited.outputs

    def wait(self) -> None:
        """Return when all variants that are wanted are compiled."""
        self._worker.wait()

    def close(self) -> None:
        self._worker.close()
        self._bare.clear()
        self._quiet.clear()

    def _run_bare(
        self,
        bare: Function,
        call: jitted.JitStart,
        session: Watched,
        calls: Sequence[Call],
    ) -> PyTree:
        with without_hooks(session.is_mine):
            if self._passing.fits(key_of()):
                out = call.own()
            else:
                out = call.like_mine(bare(*call.args, **call.kwargs))
        session.inbox.pass_over(calls, session.setting)
        if not session.setting.active:
            self._pass(session, key_of())
        return out

    def _own(self, call: jitted.JitStart, session: Watched) -> Function | None:
        """The user's own function, once a thread has compiled it."""
        if call.program not in self._bare:
            hooks = tuple(hook for hook in open_hooks() if not session.is_mine(hook))
            noted = Noted(call.made(), hooks, Configuration.here())

            def compiled() -> Function:
                noted.compile()
                return noted.call.jitted()

            self._compile_ahead(self._bare, call.program, compiled, session)
        return self._bare[call.program]

    def _compiled_quiet(self, call: jitted.JitStart, session: Watched, found: Finished) -> bool:
        """Whether a thread has compiled the program that is perturbed and measures nothing."""
        if call.program not in self._quiet:
            compile_it, program = call.compiler(), call.program
            hooks, configuration = open_hooks(), Configuration.here()

            def compiled() -> bool:
                with configuration.held(), replace_hooks(hooks):
                    edited = found.edited(program, measures=False)
                    one = self._launch(session, found, edited, session.setting)
                    compile_it(edited.program, put(one.numbers()))
                return True

            self._compile_ahead(self._quiet, call.program, compiled, session)
        return bool(self._quiet[call.program])

    def _compile_ahead(
        self,
        those: weakref.WeakKeyDictionary[Jaxpr, Value],
        program: Jaxpr,
        compiled: Callable[[], object],
        session: Watched,
    ) -> None:
        those[program] = None

        def work() -> None:
            if session.number in listeners:
                those[program] = compiled()
            else:  # the loop has ended; the next one may want it
                those.pop(program, None)

        if session.group is not None:  # all processes run the same program at each step
            work()
        else:
            self._worker.do(work)

    def _not_compiled(self, error: Exception) -> None:
        session = self._session()
        if session is not None:  # the variant that measures goes on
            session.errors.append(f"compiling ahead: {type(error).__name__}: {error}")


class Chosen(launch.Taking):
    """While it is open, a session chooses the variants of this thread's programs."""

    def __init__(self, variants: Variants):
        super().__init__(variants)
        self._variants = variants

    def open(self) -> None:
        super().open()
        self._variants.resume()
