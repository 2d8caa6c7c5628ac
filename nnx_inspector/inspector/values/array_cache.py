"""The arrays that were read last, kept on the device as long as there is room.

Invariant: there are at most MOST_SETS sets with MOST_BYTES together, except that the newest set is
kept whatever its size; asking for a dropped array is an error, never another array. Makes no pass
and reads no model.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp

from nnx_inspector.errors import InspectorError
from nnx_inspector.inspector.values.device_tiles import norms
from nnx_inspector.typing import PyTree, Value

MOST_BYTES = 1 << 30
"""The most bytes of all sets together, if there is more than one."""
MOST_SETS = 6


@dataclasses.dataclass(frozen=True, eq=False)
class SiteArray:
    """One array.

    Attributes:
        number: its number in requests, which is never used again.
        call: the number of its call of the site; 0 for a parameter.
        name: its name among the arrays of its call, "" for a single array.
    """

    number: int
    call: int
    name: str
    value: jax.Array
    axes: tuple[str, ...]


class Sources:
    """The sources that some arrays were computed from, without keeping them alive.

    Args:
        what: sources that are hashable or compared by identity: the request, the modes, the place.
        arrays: the leaves of the model and of the arguments.
    """

    def __init__(self, what: tuple[Hashable, ...], arrays: Sequence[Value]):
        self._what = what
        self._references = [_reference(x) for x in arrays]

    def match(self, what: tuple[object, ...], arrays: Sequence[object]) -> bool:
        """Whether the sources are the same: the identical arrays, none written to since."""
        if len(arrays) != len(self._references) or len(what) != len(self._what):
            return False
        if any(a is not b and a != b for a, b in zip(what, self._what, strict=True)):
            return False
        return all(
            reference is not None and reference() is x
            for reference, x in zip(self._references, arrays, strict=True)
        )


def _reference(x: object) -> weakref.ref[jax.Array] | None:
    # the content of a jax reference or a NumPy array can change
    return weakref.ref(x) if isinstance(x, jax.Array) and not isinstance(x, jax.Ref) else None


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySet:
    """The arrays of one part of one site.

    Attributes:
        tree: the output (or input) of each call; for parameters, one mapping.
        notes: notes about them for the user.
    """

    sources: Sources
    arrays: tuple[SiteArray, ...]
    tree: tuple[PyTree, ...]
    notes: tuple[str, ...] = ()
    norms: dict[tuple[int, int], jax.Array] = dataclasses.field(default_factory=dict)

    @property
    def bytes(self) -> int:
        derived = sum(x.nbytes for x in self.norms.values())
        return derived + sum(array.value.nbytes for array in self.arrays)


class ArrayCache:
    """The sets of arrays. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sets: list[ArraySet] = []  # the newest last
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        return next(self._numbers)

    def put(self, arrays: ArraySet) -> None:
        """Keep a set as the newest one, and the older ones that there is room for."""
        with self._lock:
            self._sets = [one for one in self._sets if one is not arrays] + [arrays]
            while len(self._sets) > 1 and (
                len(self._sets) > MOST_SETS or sum(s.bytes for s in self._sets) > MOST_BYTES
            ):
                self._sets.pop(0)

    def find(self, what: tuple[object, ...], arrays: Sequence[object]) -> ArraySet | None:
        """The set that was computed from these sources, if it is still kept."""
        with self._lock:
            for one in self._sets:
                if one.sources.match(what, arrays):
                    return one
            return None

    def get(self, number: int, norm_over: int = -1) -> jax.Array:
        """An array, or its norms over an axis.

        Raises:
            InspectorError: it is no longer kept, or was donated since.
            ValueError: the array has no such axis, or its values have no norm.
        """
        found, array = self._find(number)
        if array.value.is_deleted():
            raise InspectorError(
                f"{array.name or 'This array'} was donated to a training step since it was read. "
                f"Read it again."
            )
        if norm_over == -1:
            return array.value
        if not 0 <= norm_over < array.value.ndim:
            raise ValueError(f"An array of shape {array.value.shape} has no axis {norm_over}.")
        key = (number, norm_over)
        if key not in found.norms:
            found.norms[key] = norms(array.value, norm_over)
            self.put(found)
        return found.norms[key]

    def _find(self, number: int) -> tuple[ArraySet, SiteArray]:
        with self._lock:
            for one in self._sets:
                for array in one.arrays:
                    if array.number == number:
                        return one, array
        raise InspectorError(
            "These values are no longer kept: others were opened since. Read them again."
        )

    def clear(self) -> None:
        with self._lock:
            self._sets = []


def is_shown(x: Value) -> bool:
    return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jnp.bool_
