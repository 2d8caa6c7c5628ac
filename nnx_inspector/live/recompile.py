"""The jitted calls of a watched step, so that they can be compiled anew before they are made.

A call is noted when jax has no program for it under a session's layer, without its arrays. To
compile it once more under other layers, and under the settings of jax that it was made with, fills
the caches that the user's own next call looks into. Invariant: no array is kept alive, and nothing
is noted of what other layers (or none) see. A bare primitive outside of jit is jax's own affair: it
compiles anew, in its caller's thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import Configuration
from nnx_inspector.hooks.dispatch import installed
from nnx_inspector.hooks.layers import Layer, open_layers, opened

CALLS = 64
"""How many different calls are kept; the oldest go."""


@dataclasses.dataclass(frozen=True)
class Noted:
    """A jitted call, and what was open around it."""

    call: jit.JitCall
    layers: tuple[Layer, ...]
    configuration: Configuration

    def same(self, other: Noted) -> bool:
        """Whether another would be compiled to the same program."""
        return self.call.same(other.call) and self.configuration == other.configuration

    def compile(self, instead: Callable[[Layer], Layer]) -> None:
        """Compile it with other layers: `instead` gives for one that was open the one to be."""
        layers = tuple(map(instead, self.layers))
        with self.configuration.held(), installed(), opened(layers):
            self.call.compile()


class JitCalls:
    """The different calls that are made under one session's layer; used by any thread.

    Args:
        mine: whether a layer is the session's.
    """

    def __init__(self, mine: Callable[[Layer], bool]):
        self._mine = mine
        self._noted: list[Noted] = []
        self._known: weakref.WeakKeyDictionary[Any, set[Hashable]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note the calls that are made meanwhile."""
        _listen(self)
        try:
            yield
        finally:
            _forget(self)

    def hear(self, program: Any, variant: Hashable, made: Callable[[], jit.JitCall]) -> None:
        """Note a call, if it is made under the session's layer; see `jit.JitListener`."""
        layers = open_layers()
        if not any(map(self._mine, layers)):
            return
        with self._lock:
            if variant in self._known.get(program, ()):
                return  # a step makes the same call again and again: it must cost next to nothing
        new = Noted(made(), layers, Configuration.here())
        with self._lock:
            kept = [one for one in self._noted if not one.same(new)]
            if len(kept) >= CALLS:
                self._known.clear()  # whichever goes may be made again
            self._noted = [*kept, new][-CALLS:]
            self._known.setdefault(program, set()).add(variant)

    def all(self) -> list[Noted]:
        """Those there are, oldest first."""
        with self._lock:
            return list(self._noted)


_listening: list[JitCalls] = []
_undo: list[Callable[[], None]] = []
_lock = threading.Lock()


def _listen(calls: JitCalls) -> None:
    with _lock:
        if not _listening:
            _undo.append(jit.swap_jit_misses(_hear))
        _listening.append(calls)


def _forget(calls: JitCalls) -> None:
    with _lock:
        _listening.remove(calls)
        if not _listening:
            _undo.pop()()


def _hear(program: Any, variant: Hashable, made: Callable[[], jit.JitCall], /) -> None:
    for calls in list(_listening):
        calls.hear(program, variant, made)
