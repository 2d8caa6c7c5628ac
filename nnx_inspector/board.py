"""Numbers that a running program reads from the host: what is on, and how strong.

A board is one small float32 array. Inside a trace it is read by a callback at run time, so a
change recompiles nothing. Invariant: all reads within one execution return the same numbers,
because `publish` first waits until no program that reads boards is in flight. Never raises in a
callback: that would rise in the user's training step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector import _private

_boards: dict[Hashable, np.ndarray] = {}
_lock = threading.Lock()


def publish(token: Hashable, numbers: Any) -> None:
    """Set what programs that read `token` will see from their next execution on.

    Blocks until programs that are running have finished.
    """
    new = np.array(numbers, np.float32)
    with _lock:
        old = _boards.get(token)
    if old is not None and np.array_equal(old, new):
        return
    jax.effects_barrier()
    with _lock:
        _boards[token] = new


def retire(token: Hashable) -> None:
    """Forget a board, once the programs that read it have finished."""
    jax.effects_barrier()
    forget(token)


def forget(token: Hashable) -> None:
    """Forget a board at once: nobody is left to whom its numbers matter."""
    with _lock:
        _boards.pop(token, None)


def read(token: Hashable, shape: tuple[int, ...], reads: dict[Any, Any] | None = None) -> Any:
    """The board's numbers, float32 of `shape`: at once where nothing is traced, else by a callback
    when the program runs.

    Args:
        token: which board; part of the compiled program.
        shape: of the board. A program that outlives its board reads zeros.
        reads: where given, one read is shared by all that is traced at the same level.
    """
    level = _private.trace_state()
    if reads is not None:
        for known, value in reads.get(token, ()):
            if known == level:
                return value
    if not _private.is_tracing():
        value: Any = jnp.asarray(_current(token, shape))
    else:
        value = jax.pure_callback(
            functools.partial(_current, token, shape), jax.ShapeDtypeStruct(shape, jnp.float32)
        )
        if not _private.inside_while_loop():
            # an effect makes jax.effects_barrier wait for the program that reads
            jax.debug.callback(_nothing)
    if reads is not None:
        reads.setdefault(token, []).append((level, value))
    return value


def _current(token: Hashable, shape: tuple[int, ...]) -> np.ndarray:
    with _lock:
        found = _boards.get(token)
    return np.zeros(shape, np.float32) if found is None or found.shape != shape else found.copy()


def _nothing() -> None:
    """The host side of the effect."""
