"""Compiles a running step for places that it has no room for, while the old program goes on.

Each jitted call that is traced while it is watched is noted, without its arrays. To arm is to
trace and compile these once more in a thread, under other layers; jax keeps the programs and the
next step finds them. Invariant: what goes wrong there is kept as text and never reaches the
user's loop, which then compiles in its own thread as it would without us.
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
class _Noted:
    call: _private.JitCall
    layers: tuple[Layer, ...]


class Arming:
    """The calls of one watched loop, and the thread that compiles them anew."""

    def __init__(self) -> None:
        self._noted: list[_Noted] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.errors: list[str] = []

    def note(self) -> None:
        """The jitted call that is being traced in this thread, if any, is one to compile again."""
        call = _private.outermost_jit_call()
        if call is None:
            return
        with self._lock:
            kept = [one for one in self._noted if not one.call.same(call)]
            self._noted = [*kept, _Noted(call, open_layers())][-CALLS:]

    @property
    def running(self) -> bool:
        """Whether something is being compiled now."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def start(self, instead: Callable[[Layer], Layer], done: Callable[[], None]) -> bool:
        """Compile every call under other layers; False where there is none.

        Args:
            instead: for a layer that was open the one that shall be.
            done: called in the thread when all is compiled (or failed, see `errors`).
        """
        with self._lock:
            noted = list(self._noted)
        if not noted:
            return False

        def work() -> None:
            try:
                with installed():
                    for one in noted:
                        with opened(tuple(map(instead, one.layers))):
                            one.call.compile()
            except Exception as error:  # noqa: BLE001 - the step will say it better
                self.errors.append(f"{type(error).__name__}: {error}")
            done()

        self._thread = threading.Thread(target=work, name="nnx_inspector.arming", daemon=True)
        self._thread.start()
        return True

    def wait(self) -> None:
        """Until nothing is being compiled."""
        thread = self._thread
        if thread is not None:
            thread.join()
