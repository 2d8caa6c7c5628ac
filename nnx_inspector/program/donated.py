"""Reading a model that a training step may take away meanwhile, by donating its arrays.

Between the call of such a step and its return the Variables refer to arrays that are deleted.
Invariant: what is read is whole, of one moment or another, or an error says why it cannot be.
The marks of a model tell one moment of it from another, and keep no array alive.
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
    """What `read` returns; it is called again where an array was deleted under it.

    Args:
        read: reads the model anew each time, and computes.
        what: that cannot be had, for the text of the error: "The parameters".

    Raises:
        InspectorError: the arrays were deleted each time.
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
    """Says that something cannot be had, since a step has taken the model's arrays; and what to do.

    Args:
        what: in the plural or not, at the beginning of a sentence: "The parameters".
    """
    return (
        f"{what} cannot be read now: a training step has taken the model's arrays (it donates "
        f"them). If the step still runs, ask again when it has ended; if it returned a new state, "
        f"pass that: insp.update(state), or write it back: nnx.update(model, state)."
    )


def require_there(arrays: Iterable[Any]) -> None:
    """Raise what jax would where an array is deleted, before a program is run on it."""
    for x in arrays:
        if isinstance(x, jax.Array) and not jit.is_tracer(x) and x.is_deleted():
            raise RuntimeError(f"Array has been deleted with shape={x.dtype}{list(x.shape)}.")


def require_whole(arrays: Iterable[Any], what: str) -> None:
    """Raise where an array is deleted, before it is read; for `what` see `taken`.

    Raises:
        InspectorError: an array was deleted.
    """
    arrays = list(arrays)
    undisturbed(lambda: require_there(arrays), what)


def _is_deleted(error: Exception) -> bool:
    return "deleted" in str(error) or "donated" in str(error)


Marks = tuple[weakref.ref[Any], ...]
"""The arrays of a model at one moment."""


def marks_of(leaves: Iterable[Any]) -> Marks:
    """The arrays among the leaves of a model."""
    return tuple(weakref.ref(leaf) for leaf in leaves if isinstance(leaf, jax.Array))


def are_there(marks: Marks) -> bool:
    """Whether all of these arrays are alive: a model that was updated has let go of some.

    It is True too of a model that was updated while somebody else holds the old arrays.
    """
    arrays = [mark() for mark in marks]
    return all(array is not None and not array.is_deleted() for array in arrays)


def are_these(marks: Marks, leaves: Iterable[Any]) -> bool:
    """Whether a model has the same arrays as it had then."""
    now = marks_of(leaves)
    same = len(marks) == len(now)
    return same and all(a() is b() is not None for a, b in zip(marks, now, strict=True))
