"""The arrays that were opened last, kept on the device for as long as there is room.

Invariant: at most MOST_SETS sets and MOST_BYTES together, but for the newest set, which is kept
whatever its size; what is taken away is named by an error, never mistaken for another. Makes no
pass and reads no model.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnx_inspector.errors import InspectorError
from nnx_inspector.inspector.values.blocks import norms

MOST_BYTES = 1 << 30
"""Bytes of all sets but the newest, together with it."""
MOST_SETS = 6


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """One array.

    Attributes:
        number: by which it is asked for; never used again.
        call: which call of the site it is of; 0 for a parameter.
        name: what tells it from the others of its call, "" where it is alone.
        value: the array.
        axes: their names.
    """

    number: int
    call: int
    name: str
    value: jax.Array
    axes: tuple[str, ...]


class Moment:
    """What some arrays were computed from, without keeping it alive.

    Args:
        what: hashable or compared by identity: the trial, the modes, the place.
        arrays: the leaves of the model and of the arguments.
    """

    def __init__(self, what: tuple[Any, ...], arrays: Sequence[Any]):
        self._what = what
        self._references = [_reference(x) for x in arrays]

    def is_like(self, what: tuple[Any, ...], arrays: Sequence[Any]) -> bool:
        """Whether the same would come of it now: the very same arrays, none written to since."""
        if len(arrays) != len(self._references) or len(what) != len(self._what):
            return False
        if any(a is not b and a != b for a, b in zip(what, self._what, strict=True)):
            return False
        return all(
            reference is not None and reference() is x
            for reference, x in zip(self._references, arrays, strict=True)
        )


def _reference(x: Any) -> Any:
    # what a reference of jax's or an array of NumPy's holds can change under it
    return weakref.ref(x) if isinstance(x, jax.Array) and not isinstance(x, jax.Ref) else None


@dataclasses.dataclass(frozen=True, eq=False)
class Opened:
    """The arrays of one part of one site.

    Attributes:
        tree: for each call what the module returned (received); of parameters one mapping.
        notes: what a person should know of them, in words.
    """

    moment: Moment
    arrays: tuple[Held, ...]
    tree: tuple[Any, ...]
    notes: tuple[str, ...] = ()
    norms: dict[tuple[int, int], jax.Array] = dataclasses.field(default_factory=dict)

    @property
    def bytes(self) -> int:
        derived = sum(x.nbytes for x in self.norms.values())
        return derived + sum(held.value.nbytes for held in self.arrays)


class Shelf:
    """Used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sets: list[Opened] = []  # the newest last
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        """A number for one more array."""
        return next(self._numbers)

    def put(self, opened: Opened) -> None:
        """Keep a set as the newest, and of the others what there is room for."""
        with self._lock:
            self._sets = [one for one in self._sets if one is not opened] + [opened]
            while len(self._sets) > 1 and (
                len(self._sets) > MOST_SETS or sum(s.bytes for s in self._sets) > MOST_BYTES
            ):
                self._sets.pop(0)

    def find(self, what: tuple[Any, ...], arrays: Sequence[Any]) -> Opened | None:
        """The set that was made of this very moment, if it is still here."""
        with self._lock:
            for one in self._sets:
                if one.moment.is_like(what, arrays):
                    return one
            return None

    def get(self, number: int, norm_over: int = -1) -> jax.Array:
        """An array, or its norms over an axis.

        Raises:
            InspectorError: it is no longer here, or was donated since.
            ValueError: it has no such axis, or its values have no norm.
        """
        opened, held = self._held(number)
        if held.value.is_deleted():
            raise InspectorError(
                f"{held.name or 'This array'} was donated to a training step since it was read. "
                f"Read it again."
            )
        if norm_over == -1:
            return held.value
        if not 0 <= norm_over < held.value.ndim:
            raise ValueError(f"An array of shape {held.value.shape} has no axis {norm_over}.")
        key = (number, norm_over)
        if key not in opened.norms:
            opened.norms[key] = norms(held.value, norm_over)
            self.put(opened)
        return opened.norms[key]

    def _held(self, number: int) -> tuple[Opened, Held]:
        with self._lock:
            for one in self._sets:
                for held in one.arrays:
                    if held.number == number:
                        return one, held
        raise InspectorError(
            "These values are no longer kept: others were opened since. Read them again."
        )

    def clear(self) -> None:
        """Free everything."""
        with self._lock:
            self._sets = []


def is_shown(x: Any) -> bool:
    """Whether an array is one of numbers."""
    return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jnp.bool_
