"""Which variant of a watched program runs: the user's own, a perturbed one or one that measures.

A program that begins a known number of passes gets their numbers and perturbations when it is
started, and returns what it has measured beside its results. If none of them is sampled, the user's
own program runs in its place, or one that is perturbed and measures nothing, as soon as a thread
has compiled it. Invariant: passes are numbered in the order in which their programs are started. A
program whose passes are known only when it runs asks then, and so do all others from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import jax
import numpy as np

from nnx_inspector._compat.configuration import Configuration, forbids_nan, ours
from nnx_inspector._compat.launching import jitted
from nnx_inspector.background import Worker, weakly
from nnx_inspector.errors import comes_from_a_handler
from nnx_inspector.hooks.layers import Layer, open_layers, opened, without
from nnx_inspector.live.calls import Call
from nnx_inspector.live.inbox import Inbox
from nnx_inspector.live.messages import Asked, Reached, listeners
from nnx_inspector.live.programs.passing import Known, Passing, key_of
from nnx_inspector.live.programs.recompile import Choosing, Noted
from nnx_inspector.perturbations.slots import CLEAN, Setting
from nnx_inspector.program.host.answers import Answered, answered, silenced
from nnx_inspector.program.host.primitives import EFFECT

_programs: weakref.WeakKeyDictionary[Any, Answered | None] = weakref.WeakKeyDictionary()
_silenced: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_asking: set[int] = set()
"""The numbers of the sessions whose programs ask: sessions of one number share their programs."""


class Watched(Protocol):
    """What a session is to the choice of its programs."""

    number: int
    inbox: Inbox
    setting: Setting
    errors: list[str]
    ran: dict[int, Reached]

    def is_mine(self, layer: Layer) -> bool: ...


class Variants:
    """Chooses the variant of each jitted call of a session; see `jitted.JitChooser`."""

    def __init__(self, session: Watched):
        self._session = weakref.ref(session)
        self._bare: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._silent: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._worker = Worker("nnx_inspector.variants", weakly(self._not_compiled))
        self._passing = Passing(weakly(session.is_mine), weakly(self._passed))
        self._setting, self._key = CLEAN, 0  # of the passes that jax starts itself

    @property
    def ask(self) -> bool:
        """Whether the programs ask for their passes when they run."""
        session = self._session()
        if session is None or session.number in _asking:
            return True
        # jax drops the results in which it finds a NaN: what was measured must be told before
        return forbids_nan()

    def must_ask(self) -> None:
        """Let all programs ask, from now on."""
        session = self._session()
        if session is not None:
            _asking.add(session.number)
            self.stop_passing()

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
        if self.ask:
            return False
        return not any(session.inbox.is_due(x, session.setting) for x in self._passing.known)

    def _pass(self, session: Watched, key: int) -> None:
        """Let jax start the next programs itself, if none of them is measured."""
        if any(self._passing.known) and not self._worker.busy and self._may_pass(session):
            self._setting, self._key = session.setting, key
            self._passing.start(key)

    def resume(self) -> None:
        """Let jax start the next programs as before, if nothing has changed since."""
        session = self._session()
        if session is not None and session.setting is self._setting:
            self._passing.number = session.number
            self._pass(session, self._key)

    def __call__(self, call: jitted.JitStart, /) -> Callable[[], Any] | None:
        session = self._session()
        if session is None or self.ask:
            return None
        self._passing.number = session.number
        if EFFECT not in call.program.effects:
            if any(map(session.is_mine, open_layers())):  # else it is the user's own
                self._passing.learn(call.function, ())
            return None
        try:
            return self._chosen(call, session)
        except Exception as error:  # within the user's step: counted and shown
            if comes_from_a_handler(error):
                raise
            session.errors.append(f"choosing a program: {type(error).__name__}: {error}")
            self.must_ask()
            return None

    def _chosen(self, call: jitted.JitStart, session: Watched) -> Callable[[], Any] | None:
        found = self._answered(call.program, session)
        if found is None:
            self.must_ask()
        if found is None or not found.hosts:
            return None
        active = session.setting.active
        hosts = cast("Sequence[Asked]", found.hosts)
        calls = tuple(host.call(starts=i == 0) for i, host in enumerate(hosts))
        reached = frozenset(x for host in hosts for x in host.reached)
        self._passing.learn(call.function, calls, reached)
        program: Any = found.program
        if not session.inbox.is_due(calls, session.setting):
            if not active:
                bare = self._own(call, session)
                if bare is not None:
                    return lambda: self._run_bare(bare, call, session, calls)
            else:
                program = self._quiet(call, session, found) or program

        def run() -> Any:
            setting = session.setting
            each = [host(call=one) for host, one in zip(hosts, calls, strict=True)]
            answers = [answer for one in each for answer in one]
            key = key_of()
            if setting.active:  # the first two of each are of the pass
                key = key_of([x for one in each for x in one[2:]])
            quiet = setting.active and program is not found.program
            if self._passing.fits(key if quiet else 0):
                out = call.directly(program, _put(answers))
            else:
                count = found.told if program is found.program else 0
                out, told = call.run(program, _put(answers), count)
                if count:
                    found.tell(answers, told)
            if setting is session.setting:
                self._pass(session, key)
            return out

        return run

    def ahead(self, program: Any) -> tuple[Any, list[jax.Array], int] | None:
        """What is compiled ahead for a program: it, values for its additional inputs, and how many
        additional outputs it has; or None.
        """
        session = self._session()
        found = None if session is None or self.ask else self._answered(program, session)
        if found is None or not found.hosts:
            return None
        return found.program, _like(found), found.told

    def wait(self) -> None:
        """Return when all variants that are wanted are compiled."""
        self._worker.wait()

    def close(self) -> None:
        self._worker.close()
        self._bare.clear()
        self._silent.clear()

    def _answered(self, program: Any, session: Watched) -> Answered | None:
        """The program with its answers as inputs; None if it must ask."""
        if program not in _programs:
            _programs[program] = answered(program)
        found = _programs[program]
        if found is None:
            return None
        sure = all(
            isinstance(host, Asked) and host.session == session.number and host.certain
            for host in found.hosts
        )
        return found if sure else None

    def _run_bare(
        self,
        bare: Callable[..., Any],
        call: jitted.JitStart,
        session: Watched,
        calls: Sequence[Call],
    ) -> Any:
        with without(session.is_mine):
            if self._passing.fits(key_of()):
                out = call.own()
            else:
                out = call.like_mine(bare(*call.args, **call.kwargs))
        session.inbox.pass_over(calls, session.setting)
        if not session.setting.active:
            self._pass(session, key_of())
        return out

    def _own(self, call: jitted.JitStart, session: Watched) -> Callable[..., Any] | None:
        """The user's own function, once a thread has compiled it."""
        if call.program not in self._bare:
            layers = tuple(layer for layer in open_layers() if not session.is_mine(layer))
            noted = Noted(call.made(), layers, Configuration.here())

            def compiled() -> Callable[..., Any]:
                noted.compile()
                return noted.call.jitted()

            self._compile_in_thread(self._bare, call.program, compiled, session)
        return self._bare[call.program]

    def _quiet(self, call: jitted.JitStart, session: Watched, found: Answered) -> Any:
        """The program that is perturbed and measures nothing, once a thread has compiled it."""
        if call.program not in self._silent:
            compile_it = call.compiler(_like(found))
            layers, configuration = open_layers(), Configuration.here()

            def compiled() -> Any:
                if found.program not in _silenced:
                    _silenced[found.program] = silenced(found)
                with configuration.held(), opened(layers):
                    compile_it(_silenced[found.program])
                return _silenced[found.program]

            self._compile_in_thread(self._silent, call.program, compiled, session)
        return self._silent[call.program]

    def _compile_in_thread(
        self,
        those: weakref.WeakKeyDictionary[Any, Any],
        program: Any,
        compiled: Callable[[], Any],
        session: Watched,
    ) -> None:
        those[program] = None

        def work() -> None:
            if session.number in listeners:
                those[program] = compiled()
            else:  # the loop has ended; the next one may want it
                those.pop(program, None)

        self._worker.do(work)

    def _not_compiled(self, error: Exception) -> None:
        session = self._session()
        if session is not None:  # the variant that measures goes on
            session.errors.append(f"compiling ahead: {type(error).__name__}: {error}")


@ours()
def _put(answers: list[Any]) -> list[jax.Array]:
    """The answers on the device; the user may forbid that jit puts them there."""
    return jax.device_put(answers)


def _like(found: Answered) -> list[jax.Array]:
    return _put([np.zeros(t.shape, t.dtype) for t in found.types])


class Chosen(Choosing):
    """While it is open, a session chooses the variants of this thread's jitted calls."""

    def __init__(self, variants: Variants):
        super().__init__(variants)
        self._variants = variants

    def open(self) -> None:
        super().open()
        for one in (*self.others, self._variants) if self.others else ():
            if isinstance(one, Variants):  # a program of two sessions: each numbers its passes
                one.must_ask()
        self._variants.resume()
