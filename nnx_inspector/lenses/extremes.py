"""The extreme values of each unit over a stream of examples: a few figures that are merged.

Each example counts once for a unit, by its largest (smallest) value over the places of the array.
Of a batch only these are compared with what is kept, one rank at a time, until no unit has a better
one: after the first batches that is once or twice, and nothing is sorted. Invariant: what is kept
is what a full, stable sort of all examples would put first: of equal values the first example's and
the first place's. NaN is not a value, and is counted. Runs under jit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

NOBODY = -1
"""The number that stands for no example."""


MOST, LEAST, RANDOM = range(3)
"""What is kept of each unit: its largest values, its smallest, and those of examples at random."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """The examples kept of each unit, the best first. The first axis is `MOST`, `LEAST`, `RANDOM`.

    Attributes:
        score: what they are ranked by, [3, k, units].
        value: the values; NaN in an empty place.
        example: the numbers of their examples, or `NOBODY`.
        place: where in the example the value is: an array for each axis of places.
    """

    score: Any
    value: Any
    example: Any
    place: tuple[Any, ...]

    def worse_than(self, score: Any) -> Any:
        """Whether each score, [3, batch, units], belongs among these."""
        return (score > self.score[:, -1:]) | (self.example[:, -1:] == NOBODY)

    def with_one(self, new: Kept, found: Any) -> Kept:
        """With one more of each unit, [3, units], where it is `found`; after its equals."""
        k = self.score.shape[1]
        before = ((self.score >= new.score[:, None]) & (self.example != NOBODY)).sum(1)
        at = jnp.where(found, before, k)[:, None]
        ranks = jnp.arange(k)[:, None]

        def put(old: Any, new: Any) -> Any:
            later = jnp.roll(old, 1, 1)
            return jnp.where(ranks < at, old, jnp.where(ranks == at, new[:, None], later))

        return jax.tree.map(put, self, new)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extremes:
    """What is kept of the examples so far.

    Attributes:
        nan: how many examples have a NaN, for each unit.
    """

    kept: Kept
    nan: Any

    @staticmethod
    def empty(k: int, units: int, axes: int, dtype: Any) -> Extremes:
        """For `k` examples of each unit, at places with so many axes."""
        nobody = np.full((3, k, units), NOBODY, np.int32)
        score, value = (np.full(nobody.shape, x, dtype) for x in (-np.inf, np.nan))
        kept = Kept(score, value, nobody, (nobody,) * axes)
        return Extremes(kept, np.zeros(units, np.int32))

    def merged(self, x: Any, start: Any, count: Any, lots: Any) -> Extremes:
        """With the examples of a batch.

        Args:
            x: their values, [batch, *places, units].
            start: the number of the first example.
            count: how many of the batch are examples; the rest is padding.
            lots: a number for each, [batch]: those with the largest are drawn at random.
        """
        size, *places, units = x.shape
        x = x.reshape(size, math.prod(places), units).astype(self.kept.value.dtype)
        rows = jnp.arange(size, dtype=jnp.int32)[:, None]
        largest, smallest, nan = _largest_and_smallest(x)
        there = (largest >= smallest) & (rows < count)
        lot = jnp.broadcast_to(lots[:, None].astype(x.dtype), there.shape)
        score = jnp.stack([largest, -smallest, lot])

        def better(state: tuple[Kept, Any]) -> Any:
            kept, left = state
            return (left & kept.worse_than(score)).any()

        def insert(state: tuple[Kept, Any]) -> tuple[Kept, Any]:
            kept, left = state
            best = jnp.where(left, score, -jnp.inf).max(1)
            row = jnp.where(left & (score == best[:, None]), rows, size).min(1)
            drawn = jnp.take_along_axis(largest, row[RANDOM:], 0, mode="clip")[0]
            value = jnp.stack([best[MOST], -best[LEAST], drawn])
            place = _place(x.at[row, :, np.arange(units)].get(mode="clip"), value, places)
            new = Kept(best, value, start + row, place)
            return kept.with_one(new, row < size), left & (rows != row[:, None])

        start_of = self.kept, jnp.broadcast_to(there, score.shape)
        kept, _ = lax.while_loop(better, insert, start_of)
        return Extremes(kept, self.nan + (nan & (rows < count)).sum(0, dtype=jnp.int32))


def _largest_and_smallest(x: Any) -> tuple[Any, Any, Any]:
    """The extremes of each example without NaN, [batch, units], and whether there is one. Without
    any but NaN, the smallest is above the largest.
    """
    largest, smallest = x.max(1), x.min(1)  # NaN, if there is one
    nan = jnp.isnan(largest)

    def without() -> tuple[Any, Any]:
        number = ~jnp.isnan(x)
        return x.max(1, initial=-jnp.inf, where=number), x.min(1, initial=jnp.inf, where=number)

    return *lax.cond(nan.any(), without, lambda: (largest, smallest)), nan


def _place(x: Any, value: Any, lengths: Sequence[int]) -> tuple[Any, ...]:
    """The first place, along the last axis, with a value: XLA has no fast argmax on a CPU."""
    numbers = jnp.arange(x.shape[-1], dtype=jnp.int32)
    place = jnp.where(x == value[..., None], numbers, x.shape[-1] - 1).min(-1)
    found: list[Any] = []
    for length in map(np.int32, reversed(lengths)):  # as jnp.unravel_index, in a tenth of the code
        found.append(lax.rem(place, length))
        place = lax.div(place, length)
    return tuple(reversed(found))


def lots(start: int, size: int, seed: int) -> npt.NDArray[np.float32]:
    """Numbers of the examples from `start` on, [size], which look drawn at random (MurmurHash3's
    mixing), and do not depend on how the data is divided.
    """
    x = np.arange(start, start + size).astype(np.uint32) * np.uint32(0x9E3779B9)
    x = x ^ np.uint32(seed * 0x27D4EB2F % 2**32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * np.uint32(factor)
    return ((x ^ (x >> 16)) >> 8).astype(np.float32)
