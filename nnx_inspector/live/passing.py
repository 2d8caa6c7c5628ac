"""Passes that nothing measures, in jax's own fast path.

Whether a pass is measured is decided in Python when its program is started. jax then looks for the
program in Python too, argument by argument: 2 ms for a model of 300 arrays, in each pass. While
none of the next passes is measured, a session's layer is put `aside`: it has another key for jit's
caches, and under that key they hold the user's own programs, which start from C++. After each of
them its passes are counted. Invariant: whoever opens or closes a layer finds those that were open
before; a program under that key is the user's own, or has no pass.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any

from nnx_inspector._compat import started
from nnx_inspector.hooks.layers import Layer, open_layers, replace_opened

_passes: dict[int, weakref.WeakKeyDictionary[Any, int]] = {}
"""Session number -> jitted function -> how many passes each of its programs begins. Sessions of one
number share their programs."""
_irregular: set[int] = set()
"""The numbers of the sessions that have a function whose programs differ in that."""


class Passing:
    """The passes of one session in one thread that jax starts without asking.

    Args:
        is_mine: whether a layer is the session's.
        passed: called with the number of passes that a function has begun; returns whether the
            next ones may be passed over too.
    """

    def __init__(self, is_mine: Callable[[Layer], bool], passed: Callable[[int], bool]):
        self._is_mine, self._passed = is_mine, passed
        self._thread: int | None = None
        self.missed = False
        self.number = 0

    @property
    def most(self) -> int:
        """The most passes that a known function begins."""
        return max(_passes.get(self.number, {}).values(), default=0)

    def learn(self, function: Any, passes: int) -> None:
        """Note how many passes a program of a function begins."""
        known = _passes.setdefault(self.number, weakref.WeakKeyDictionary())
        try:
            if known.setdefault(function, passes) != passes:
                _irregular.add(self.number)
        except TypeError:  # it has no hash, or no weak references
            _irregular.add(self.number)

    def start(self) -> None:
        """Let jax start the next programs of this thread, if it can."""
        layers = open_layers()
        if self.number in _irregular or not layers or not all(map(self._is_mine, layers)):
            return
        self._thread = threading.get_ident()
        replace_opened(lambda layer: _put_aside(layer, True), restore=self.stop)
        started.call_after(self._after)

    def stop(self) -> Callable[[Layer], Layer]:
        """Let each program be chosen again. Returns what puts a layer back."""
        if self._thread == threading.get_ident():  # else that thread will stop after its program
            self._thread = None
            started.call_after(None)
            replace_opened(self._put_back)
        return self._put_back

    def _put_back(self, layer: Layer) -> Layer:
        return _put_aside(layer, False) if self._is_mine(layer) else layer

    def prepare(self) -> None:
        """Note whether jax has missed a program while it might start them, and stop."""
        self.missed = self._thread == threading.get_ident()
        self.stop()

    def _after(self, function: Any) -> None:
        try:
            passes = _passes[self.number].get(function, 0)
        except TypeError:
            return
        if passes and not self._passed(passes):
            self.stop()


def _put_aside(layer: Layer, aside: bool) -> Layer:
    wrap: Any = layer.wrap
    return dataclasses.replace(layer, wrap=dataclasses.replace(wrap, aside=aside))
