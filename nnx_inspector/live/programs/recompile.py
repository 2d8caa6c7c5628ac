"""The jitted calls of a watched step, so that they can be recompiled before they are made again.

A call is noted, without its arrays, when jax has no program for it under a session's layer, or in a
step that runs bare because the measured program is still missing. Compiling it again under other
layers, with the jax settings that it was made with, fills the caches that the user's next call
uses. Invariant: no array is kept alive, and only calls of the session's steps are noted. A bare
primitive outside jit is not covered: jax recompiles it in the caller's thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import Configuration
from nnx_inspector.hooks.dispatch import installed
from nnx_inspector.hooks.layers import Layer, open_layers, opened

CALLS = 64
"""How many different calls are kept; the oldest are dropped."""


@dataclasses.dataclass(frozen=True)
class Noted:
    """A jitted call, and what was open around it."""

    call: jit.JitCall
    layers: tuple[Layer, ...]
    configuration: Configuration

    def same(self, other: Noted) -> bool:
        """Whether another call would be compiled to the same program."""
        return self.call.same(other.call) and self.configuration == other.configuration

    def compile(
        self,
        instead: Callable[[Layer], Layer] = lambda x: x,
        *,
        inside: tuple[Layer, ...] = (),
        change: jit.Change = lambda _: None,
    ) -> None:
        """Compile it inside more layers; `instead` maps layers to their replacements, and `change`
        the program to what is compiled; see `jit.JitCall.compile`.
        """
        layers = (*inside, *map(instead, self.layers))
        hooks = installed() if layers else contextlib.nullcontext()
        with self.configuration.held(), hooks, opened(layers):
            self.call.compile(change)


class JitCalls:
    """The different calls made under one session's layer. Any thread may use it.

    Args:
        mine: whether a layer is the session's. None notes what the listening thread calls.
    """

    def __init__(self, mine: Callable[[Layer], bool] | None):
        self._mine = mine
        self._thread: int | None = None
        self._noted: list[Noted] = []
        self._known: weakref.WeakKeyDictionary[Any, set[Hashable]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note the calls made inside the context."""
        self._thread = threading.get_ident()
        _listen(self)
        try:
            yield
        finally:
            _forget(self)

    def hear(self, program: Any, variant: Hashable, made: Callable[[], jit.JitCall]) -> None:
        """Note a call, if it is made under the session's layer; see `jit.JitListener`."""
        layers, mine = open_layers(), self._mine
        if not (any(map(mine, layers)) if mine else self._thread == threading.get_ident()):
            return
        with self._lock:
            if variant in self._known.get(program, ()):
                return  # a step repeats the same call, which must cost next to nothing
        new = Noted(made(), layers, Configuration.here())
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


_listening: list[JitCalls] = []
_undo: list[Callable[[], None]] = []
_lock = threading.Lock()


def _listen(calls: JitCalls) -> None:
    with _lock:
        if not _listening:
            _undo.append(jit.swap_jit_misses(_hear, _choose, _prepare))
        _listening.append(calls)


def _forget(calls: JitCalls) -> None:
    with _lock:
        _listening.remove(calls)
        if not _listening:
            _undo.pop()()


def _hear(program: Any, variant: Hashable, made: Callable[[], jit.JitCall], /) -> None:
    for calls in list(_listening):
        calls.hear(program, variant, made)


# -------------------------------------------------------------------- choosing


class Chooser(jit.JitChooser, Protocol):
    def prepare(self) -> None:
        """Called before a call is traced that jax does not handle in its fast path."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.choosers: tuple[Chooser, ...] = ()


_thread = _Thread()


@contextlib.contextmanager
def choosing(choose: Chooser) -> Iterator[tuple[Chooser, ...]]:
    """Inside, let `choose` choose what this thread's jitted calls run; yields the earlier choosers.

    Of several the newest chooses. It works while `JitCalls` are listening.
    """
    before = _thread.choosers
    _thread.choosers = (*before, choose)
    try:
        yield before
    finally:  # others may have come or gone, for the steps of two loops may overlap
        _thread.choosers = tuple(one for one in _thread.choosers if one is not choose)


def _choose(call: jit.JitStart, /) -> Callable[[], Any] | None:
    return _thread.choosers[-1](call) if _thread.choosers else None


def _prepare() -> None:
    if _thread.choosers:
        _thread.choosers[-1].prepare()
