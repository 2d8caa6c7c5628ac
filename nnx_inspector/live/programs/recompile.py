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
from nnx_inspector._compat.launching import jitted, started
from nnx_inspector.hooks.dispatch import installation
from nnx_inspector.hooks.hook import (
    Hook,
    any_closed_elsewhere,
    drop_closed_hooks,
    open_hooks,
    replace_hooks,
)
from nnx_inspector.opening import held

CALLS = 64
"""How many different calls are kept; the oldest are dropped."""


@dataclasses.dataclass(frozen=True)
class Noted:
    """A jitted call, and what was open around it."""

    call: jitted.JitCall
    hooks: tuple[Hook, ...]
    configuration: Configuration

    def same(self, other: Noted) -> bool:
        """Whether another call would be compiled to the same program."""
        return self.call.same(other.call) and self.configuration == other.configuration

    def compile(
        self,
        instead: Callable[[Hook], Hook] = lambda x: x,
        *,
        inside: tuple[Hook, ...] = (),
        change: jitted.Change = lambda _: None,
    ) -> None:
        """Compile it inside more hooks; `instead` maps hooks to their replacements, and `change`
        the program to what is compiled; see `jitted.JitCall.compile`.
        """
        hooks = (*inside, *map(instead, self.hooks))
        installs = [installation()] if hooks else []
        with self.configuration.held(), held(*installs), replace_hooks(hooks):
            self.call.compile(change)


class JitCalls:
    """The different calls made under one session's hook. Any thread may use it.

    Args:
        mine: whether a hook is the session's. None notes what the listening thread calls.
    """

    def __init__(self, mine: Callable[[Hook], bool] | None):
        self._mine = mine
        self._thread: int | None = None
        self._noted: list[Noted] = []
        self._known: weakref.WeakKeyDictionary[object, set[Hashable]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def here(self) -> None:
        """Note the calls of this thread."""
        self._thread = threading.get_ident()

    def hear(self, program: object, variant: Hashable, made: Callable[[], jitted.JitCall]) -> None:
        """Note a call, if it is made under the session's hook; see `jitted.JitListener`."""
        hooks, mine = open_hooks(), self._mine
        under = bool(mine) and hooks_key.value is not None and any(map(mine, hooks))
        if not (under if mine else self._thread == threading.get_ident()):
            return  # under no hook: a program of our own
        with self._lock:
            if variant in self._known.get(program, ()):
                return  # a step repeats the same call, which must cost next to nothing
        new = Noted(made(), hooks, Configuration.here())
        with self._lock:
            kept = [one for one in self._noted if not one.same(new)]
            if len(kept) >= CALLS:
                self._known.clear()  # a dropped call may be made again
            self._noted = [*kept, new][-CALLS:]
            self._known.setdefault(program, set()).add(variant)

    def all(self) -> list[Noted]:
        """The noted calls, oldest first."""
        with self._lock:
            return list(self._noted)


class Listening:
    """While it is open, the calls that are made are noted."""

    def __init__(self, calls: JitCalls):
        self.calls = calls

    def open(self) -> None:
        global _listening
        self.calls.here()
        with _lock:
            _listening = (*_listening, self)
            if not _undo:
                jitted.swap_jit_misses(_hear, prepare=_prepare, undone=_undo.append)

    def close(self) -> None:
        global _listening
        with _lock:
            _listening = tuple(one for one in _listening if one is not self)
        _let_go()


_listening: tuple[Listening, ...] = ()
_undo: list[Callable[[], None]] = []
_lock = threading.RLock()


def _let_go() -> None:
    """Give jax its own functions back, unless somebody listens, or a thread must be told that
    another one has closed its hooks: it is, before it runs a program that it has not run under
    them.
    """
    with _lock:
        while _undo and not _listening and not any_closed_elsewhere():
            _undo[-1]()
            _undo.pop()


def _hear(program: object, variant: Hashable, made: Callable[[], jitted.JitCall], /) -> None:
    for one in _listening:
        one.calls.hear(program, variant, made)


def _prepare() -> None:
    started.raise_kept()
    drop_closed_hooks()
    if not _listening:
        _let_go()
