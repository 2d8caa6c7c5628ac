"""The jitted calls of a watched step, so that they can be compiled anew before they are made.

A call is noted when it is traced under a session's hook, without its arrays. To compile it once
more under other layers fills the caches that the user's own next call looks into. Invariant: no
array is kept alive. Chooses neither layers nor threads.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from nnx_inspector import _private
from nnx_inspector.dispatch import installed
from nnx_inspector.layers import Layer, open_layers, opened

CALLS = 16
"""How many different calls are kept; the oldest go."""


@dataclasses.dataclass(frozen=True)
class Noted:
    """A jitted call, and what was open around it."""

    call: _private.JitCall
    layers: tuple[Layer, ...]

    def compile(self, instead: Callable[[Layer], Layer]) -> None:
        """Compile it with other layers: `instead` gives for one that was open the one to be."""
        with installed(), opened(tuple(map(instead, self.layers))):
            self.call.compile()


class JitCalls:
    """The different calls that were noted; used by any thread."""

    def __init__(self) -> None:
        self._noted: list[Noted] = []
        self._lock = threading.Lock()

    def note(self) -> None:
        """The jitted call that is being traced in this thread, if any, is one to compile again."""
        call = _private.outermost_jit_call()
        if call is not None:
            with self._lock:
                kept = [one for one in self._noted if not one.call.same(call)]
                self._noted = [*kept, Noted(call, open_layers())][-CALLS:]

    def all(self) -> list[Noted]:
        """Those there are, oldest first."""
        with self._lock:
            return list(self._noted)
