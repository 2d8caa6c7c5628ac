"""Numbers that a running program reads from the host: what is on, and how strong.

A board is a few arrays. Inside a trace it is read by a callback at run time, so a
change recompiles nothing. Invariant: all reads within one execution return the same numbers,
because `publish` first waits until no program that reads boards is in flight. Never raises in a
callback: that would rise in the user's training step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector import _private

_boards: dict[Hashable, tuple[np.ndarray, ...]] = {}
_lock = threading.Lock()


def publish(token: Hashable, numbers: Any) -> None:
    """Set what programs that read `token` will see from their next execution on: float32 numbers.

    Blocks until programs that are running have finished.
    """
    publish_arrays(token, [np.array(numbers, np.float32)])


def publish_arrays(token: Hashable, arrays: Sequence[np.ndarray]) -> None:
    """As `publish`, of several arrays of any dtype."""
    new = tuple(np.array(a) for a in arrays)
    with _lock:
        old = _boards.get(token)
    if old is not None and _same(old, new):
        return
    jax.effects_barrier()
    with _lock:
        _boards[token] = new


def _same(old: Sequence[np.ndarray], new: Sequence[np.ndarray]) -> bool:
    return len(old) == len(new) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(old, new, strict=True)
    )


def retire(token: Hashable) -> None:
    """Forget a board, once the programs that read it have finished."""
    jax.effects_barrier()
    forget(token)


def forget(token: Hashable) -> None:
    """Forget a board at once: nobody is left to whom its numbers matter."""
    with _lock:
        _boards.pop(token, None)


def read(token: Hashable, shape: tuple[int, ...], reads: dict[Any, Any] | None = None) -> Any:
    """The board's numbers, float32 of `shape`; see `read_arrays`."""
    return read_arrays(token, (jax.ShapeDtypeStruct(shape, jnp.float32),), reads)[0]


def read_arrays(
    token: Hashable,
    avals: tuple[jax.ShapeDtypeStruct, ...],
    reads: dict[Any, Any] | None = None,
) -> tuple[Any, ...]:
    """The board's arrays: at once where nothing is traced, else by a callback when the program
    runs.

    Args:
        token: which board; part of the compiled program.
        avals: of the arrays. A program that outlives its board reads zeros.
        reads: where given, one read is shared by all that is traced at the same level.
    """
    level = _private.trace_state()
    if reads is not None:
        for known, value in reads.get(token, ()):
            if known == level:
                return value
    if not _private.is_tracing():
        value: Any = tuple(map(jnp.asarray, _current(token, avals)))
    else:
        value = jax.pure_callback(functools.partial(_current, token, avals), avals)
        if not _private.inside_while_loop():
            # an effect makes jax.effects_barrier wait for the program that reads
            jax.debug.callback(_nothing)
    if reads is not None:
        reads.setdefault(token, []).append((level, value))
    return value


def _current(token: Hashable, avals: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[np.ndarray, ...]:
    with _lock:
        found = _boards.get(token, ())
    if [(a.shape, a.dtype) for a in found] != [(a.shape, a.dtype) for a in avals]:
        return tuple(np.zeros(a.shape, a.dtype) for a in avals)
    return tuple(a.copy() for a in found)


def _nothing() -> None:
    """The host side of the effect."""
