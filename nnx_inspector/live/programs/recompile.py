"""The jitted calls of a watched step, so that they can be recompiled before they are made again.

A call is noted, without its arrays, when jax has no program for it under a session's hook, or in a
step that runs bare because the measured program is still missing. Compiling it again under other
hooks, with the jax settings that it was made with, fills the caches that the user's next call
uses. Invariant: no array is kept alive, and only calls of the session's steps are noted. A bare
primitive outside jit is not covered: jax recompiles it in the caller's thread.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Hashable

from nnx_inspector._compat.configuration import Configuration, hooks_key
from nnx_inspector._compat.launching import jit_calls, programs
from nnx_inspector.hooks.dispatch import installation
from nnx_inspector.hooks.hook import (
    Hook,
    any_closed_elsewhere,
    drop_closed_hooks,
    open_hooks,
    replace_hooks,
)
from nnx_inspector.resources import open_all

MOST_CALLS = 64
"""How many different calls are kept; the oldest are dropped."""


@dataclasses.dataclass(frozen=True)
class LoggedCall:
    """A jitted call, and what was open around it."""

    call: jit_calls.JitCall
    hooks: tuple[Hook, ...]
    configuration: Configuration

    def same(self, other: LoggedCall) -> bool:
        """Whether another call would be compiled to the same program."""
        return self.call.compiles_alike(other.call) and self.configuration == other.configuration

    def compile(
        self,
        instead: Callable[[Hook], Hook] = lambda x: x,
        *,
        inside: tuple[Hook, ...] = (),
        change: jit_calls.Change = lambda _: None,
    ) -> None:
        """Compile it inside more hooks; `instead` maps hooks to their replacements, and `change`
        the program to what is compiled; see `jit_calls.JitCall.compile`.
        """
        hooks = (*inside, *map(instead, self.hooks))
        installs = [installation()] if hooks else []
        with self.configuration.applied(), open_all(*installs), replace_hooks(hooks):
            self.call.compile(change)


class CallLog:
    """The different calls made under one session's hook. Any thread may use it.

    Args:
        mine: whether a hook is the session's. None notes what the listening thread calls.
    """

    def __init__(self, mine: Callable[[Hook], bool] | None):
        self._is_mine = mine
        self._thread: int | None = None
        self._logged: list[LoggedCall] = []
        self._known: weakref.WeakKeyDictionary[object, set[Hashable]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def use_this_thread(self) -> None:
        """Note the calls of this thread."""
        self._thread = threading.get_ident()

    def log(
        self, program: object, variant: Hashable, made: Callable[[], jit_calls.JitCall]
    ) -> None:
        """Note a call, if it is made under the session's hook; see `jit_calls.JitListener`."""
        hooks, mine = open_hooks(), self._is_mine
        under = bool(mine) and hooks_key.value is not None and any(map(mine, hooks))
        if not (under if mine else self._thread == threading.get_ident()):
            return  # under no hook: a program of our own
        with self._lock:
            if variant in self._known.get(program, ()):
                return  # a step repeats the same call, which must cost next to nothing
        new = LoggedCall(made(), hooks, Configuration.current())
        with self._lock:
            kept = [one for one in self._logged if not one.same(new)]
            if len(kept) >= MOST_CALLS:
                self._known.clear()  # a dropped call may be made again
            self._logged = [*kept, new][-MOST_CALLS:]
            self._known.setdefault(program, set()).add(variant)

    def logged(self) -> list[LoggedCall]:
        """The noted calls, oldest first."""
        with self._lock:
            return list(self._logged)


class CallLogging:
    """While it is open, the calls that are made are noted."""

    def __init__(self, calls: CallLog):
        self.calls = calls

    def open(self) -> None:
        global _logging
        self.calls.use_this_thread()
        with _lock:
            _logging = (*_logging, self)
            # jit does not say what it compiles, so jax's functions for a call that has no program
            # yet are exchanged while a log is open, in the whole process: a thread may not
            # have them while another has not. They stay until every thread knows that its hooks are
            # closed; see `_restore_jax`. Without this, the user's step would wait while the program
            # that measures it is compiled.
            if not _undo:
                jit_calls.patch_jit_misses(_log, prepare=_prepare, add_undo=_undo.append)

    def close(self) -> None:
        global _logging
        with _lock:
            _logging = tuple(one for one in _logging if one is not self)
        _restore_jax()


_logging: tuple[CallLogging, ...] = ()
_undo: list[Callable[[], None]] = []
_lock = threading.RLock()


def _restore_jax() -> None:
    """Give jax its own functions back, unless somebody listens, or a thread must be told that
    another one has closed its hooks: it is, before it runs a program that it has not run under
    them.
    """
    with _lock:
        while _undo and not _logging and not any_closed_elsewhere():
            _undo[-1]()
            _undo.pop()


def _log(program: object, variant: Hashable, made: Callable[[], jit_calls.JitCall], /) -> None:
    for one in _logging:
        one.calls.log(program, variant, made)


def _prepare() -> None:
    programs.raise_kept_error()
    drop_closed_hooks()
    if not _logging:
        _restore_jax()
