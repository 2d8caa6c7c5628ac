"""Arrays under a name, which running programs read: a program can be changed without compiling it.

Invariant: a program that outlives its board reads zeros.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat import jit, started
from nnx_inspector._compat.configuration import ours
from nnx_inspector.program.host.primitives import ask

_boards: dict[Hashable, tuple[np.ndarray, ...]] = {}
_lock = threading.Lock()


def publish(token: Hashable, arrays: Sequence[np.ndarray]) -> None:
    """Set the arrays that programs read from the board `token`."""
    new = tuple(np.array(a) for a in arrays)
    with _lock:
        _boards[token] = new


def retire(token: Hashable) -> None:
    """Remove a board, after waiting for the programs that read it."""
    started.wait()
    with _lock:
        _boards.pop(token, None)


def published(token: Hashable) -> tuple[np.ndarray, ...] | None:
    """The board's arrays, on the host; None without a board."""
    with _lock:
        return _boards.get(token)


def read(
    token: Hashable, avals: tuple[jax.ShapeDtypeStruct, ...], *, keep: object = None
) -> list[jax.Array]:
    """The board's arrays: read now, or within a trace when the program runs.

    `token`, the board's name, is part of the program. A program that outlives its board reads
    zeros. The program keeps `keep` alive.
    """
    current = functools.partial(_current, token, avals, keep)
    if not jit.is_tracing():
        with ours():
            return [jnp.asarray(x) for x in current()]
    return ask(current, avals, once=not jit.inside_while_loop())


def _current(
    token: Hashable, avals: tuple[jax.ShapeDtypeStruct, ...], _: object
) -> tuple[np.ndarray, ...]:
    found = published(token) or ()
    if [(a.shape, a.dtype) for a in found] != [(a.shape, a.dtype) for a in avals]:
        return tuple(np.zeros(a.shape, a.dtype) for a in avals)
    return tuple(a.copy() for a in found)
