"""Reads a model whose arrays a training step may donate, and so delete, at the same time.

Between the call of such a step and its return, the Variables refer to deleted arrays. Invariant: a
read returns the complete state of one moment, or an error says why it cannot. Weak references to
a model's arrays distinguish its states, and keep no array alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

from nnx_inspector._compat import jit
from nnx_inspector.errors import InspectorError

T = TypeVar("T")
TRIES = 5


def undisturbed(read: Callable[[], T], what: str) -> T:
    """The result of `read`, which is called again if an array of the model is deleted during the
    call.

    `what` names what is being read in the error: "The parameters".

    Raises:
        InspectorError: an array was deleted in each of `TRIES` calls.
    """
    last: Exception | None = None
    for _ in range(TRIES):
        try:
            return read()
        except (RuntimeError, ValueError) as error:
            if not _is_deleted(error):
                raise
            last = error
    raise InspectorError(taken(what)) from last


def taken(what: str) -> str:
    """The error text for arrays that a training step has donated; `what` begins it: "The
    parameters".
    """
    return (
        f"{what} cannot be read now: a training step has taken the model's arrays (it donates "
        f"them). If the step still runs, ask again when it has ended; if it returned a new state, "
        f"pass that: insp.update(state), or write it back: nnx.update(model, state)."
    )


def require_there(arrays: Iterable[Any]) -> None:
    """Raise as jax would if an array is deleted, before a program is run on it."""
    for x in arrays:
        if isinstance(x, jax.Array) and not jit.is_tracer(x) and x.is_deleted():
            raise RuntimeError(f"Array has been deleted with shape={x.dtype}{list(x.shape)}.")


def require_whole(arrays: Iterable[Any], what: str) -> None:
    """Raise if an array is deleted, before it is read; for `what` see `taken`.

    Raises:
        InspectorError: an array was deleted.
    """
    arrays = list(arrays)
    undisturbed(lambda: require_there(arrays), what)


def _is_deleted(error: Exception) -> bool:
    return any(words in str(error) for words in ("been deleted", "deleted or donated"))


WeakArrays = tuple[weakref.ref[Any], ...]
"""Weak references to the arrays of a model at one moment."""


def weak_arrays(leaves: Iterable[Any]) -> WeakArrays:
    return tuple(weakref.ref(leaf) for leaf in leaves if isinstance(leaf, jax.Array))


def are_there(held: WeakArrays) -> bool:
    """Whether all of these arrays are alive; a model that was updated has released some.

    It is also True for an updated model if other code still holds the old arrays.
    """
    arrays = [reference() for reference in held]
    return all(array is not None and not array.is_deleted() for array in arrays)


def are_these(held: WeakArrays, leaves: Iterable[Any]) -> bool:
    """Whether a model with these leaves has these arrays and no others."""
    now = weak_arrays(leaves)
    same = len(held) == len(now)
    return same and all(a() is b() is not None for a, b in zip(held, now, strict=True))
