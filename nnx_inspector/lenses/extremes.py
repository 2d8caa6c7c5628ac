"""The extreme values of each unit over a stream of examples: a few figures that are merged.

Each example counts once for a unit, by its largest (smallest) value over the places of the array.
Only the extremes of new examples are compared with those kept, one rank at a time, until no unit
has a better one; after the first batches this takes a few rounds, and nothing is sorted. Invariant:
the result is what a full, stable sort of all examples would put first: among equal values, the
first example's and the first place's. NaN is not a value, and is counted. Runs under jit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnx_inspector.typing import DTypeLike, PyTree, Value

NO_EXAMPLE = -1
"""The number that means no example."""


MOST, LEAST, RANDOM = range(3)
"""What is kept of each unit: its largest values, its smallest, and those of examples at random."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopK:
    """The examples kept of each unit, the best first. The first axis is `MOST`, `LEAST`, `RANDOM`.

    Attributes:
        score: integers in the order of what they are ranked by, [3, k, units].
        value: the values; NaN in an empty place.
        example: the numbers of their examples, or `NO_EXAMPLE`.
        place: where in the example the value is: an array for each axis of places.
    """

    score: Value
    value: Value
    example: Value
    place: tuple[Any, ...]

    def insert(self, new: TopK) -> TopK:
        """With one more for each unit, [3, units], if there is one, placed after its equals."""
        k = self.score.shape[1]
        at = (self.score >= new.score[:, None]).sum(1)[:, None]
        ranks = jnp.arange(k)[:, None]

        def put(old: Value, new: Value) -> PyTree:
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

    kept: TopK
    nan: Value

    @staticmethod
    def empty(k: int, units: int, axes: int, dtype: DTypeLike) -> Extremes:
        """For `k` examples of each unit, at places with this many axes."""
        empty = np.full((3, k, units), NO_EXAMPLE, np.int32)
        value = np.full(empty.shape, np.nan, dtype)
        score = np.full(empty.shape, *_lowest_score(dtype))
        kept = TopK(score, value, empty, (empty,) * axes)
        return Extremes(kept, np.zeros(units, np.int32))

    def merged(self, x: Value, numbers: Value, salt: Value, where: Value = None) -> Extremes:
        """With more examples.

        Args:
            x: their values, [examples, *places, units].
            numbers: their numbers, [examples], ascending; `NO_EXAMPLE` for padding.
            salt: an unsigned number that determines the random ones.
            where: which of the values count, in the shape of `x`; None for all. An example without
                any is left out.
        """
        size, *places, units = x.shape
        x = x.reshape(size, math.prod(places), units).astype(self.kept.value.dtype)
        known = (numbers != NO_EXAMPLE)[:, None]
        if where is None:
            largest, smallest, nan = _largest_and_smallest(x)
        else:
            where = where.reshape(x.shape)
            nan = (jnp.isnan(x) & where).any(1)
            x = jnp.where(where, x, jnp.nan)  # which is no value, and so at no place
            largest, smallest, _ = _largest_and_smallest(x)
        lowest, integer = _lowest_score(x.dtype)
        lot = jnp.broadcast_to(_random_keys(numbers, salt).astype(integer)[:, None], largest.shape)
        score = jnp.stack([_sort_keys(largest), ~_sort_keys(smallest), lot])
        score = jnp.where(known & (largest >= smallest), score, lowest)
        # the best of each block is kept, so that a rank costs the reading of one block
        block = math.isqrt(size - 1) + 1
        blocks = -(-size // block)
        padding = ((0, 0), (0, blocks * block - size), (0, 0))
        score = jnp.pad(score, padding, constant_values=lowest)
        score = score.reshape(3, blocks, block, units)
        numbered = np.arange(size, dtype=np.int32)[:, None]

        def better(state: tuple[TopK, Any, Any]) -> PyTree:
            kept, best, _ = state
            return (best.max(1) > kept.score[:, -1]).any()

        def insert_best(state: tuple[TopK, Any, Any]) -> tuple[TopK, Any, Any]:
            kept, best, last = state
            most = best.max(1)
            at = jnp.where(best == most[:, None], numbered[:blocks], blocks).min(1)
            inside = jnp.take_along_axis(score, at[:, None, None], 1)[:, 0]
            rows = at[:, None] * block + numbered[:block]
            taken = jnp.where(most == last[0], last[1], -1)  # the last of its equals
            equal = inside == most[:, None]
            row = jnp.where(equal & (rows > taken[:, None]), rows, size).min(1)
            rest = (inside < most[:, None]) | (equal & (rows > row[:, None]))
            rest = jnp.where(rest, inside, lowest).max(1)
            best = jnp.where(numbered[:blocks] == at[:, None], rest[:, None], best)
            of = zip((largest, smallest, largest), row, strict=True)
            value = jnp.stack([jnp.take_along_axis(x, r[None], 0, mode="clip")[0] for x, r in of])
            place = _first_place(x.at[row, :, np.arange(units)].get(mode="clip"), value, places)
            new = TopK(most, value, numbers.at[row].get(mode="clip"), place)
            return kept.insert(new), best, (most, row)

        none_yet = jnp.full((3, units), np.iinfo(integer).max), jnp.full((3, units), -1, jnp.int32)
        kept, *_ = lax.while_loop(better, insert_best, (self.kept, score.max(2), none_yet))
        return Extremes(kept, self.nan + (nan & known).sum(0, dtype=jnp.int32))


def _lowest_score(dtype: DTypeLike) -> tuple[int, Any]:
    """The score that is below all others of such values, and its type."""
    integer = np.dtype(f"int{8 * jnp.dtype(dtype).itemsize}")
    return np.iinfo(integer).min, integer


def _sort_keys(x: Value) -> PyTree:
    """Integers in the order of floats, without NaN; those of both zeros are equal."""
    # read as integers, positive floats are in the same order, and negative floats in reverse order
    lowest, integer = _lowest_score(x.dtype)
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0, x), integer)
    return jnp.where(bits < 0, bits ^ ~integer.type(lowest), bits)


def _largest_and_smallest(x: Value) -> tuple[Value, Value, Value]:
    """The extremes of each example without NaN, [batch, units], and whether there is one."""
    largest, smallest = x.max(1), x.min(1)  # NaN, if there is one
    nan = jnp.isnan(largest)

    def without() -> tuple[Value, Value]:
        number = ~jnp.isnan(x)
        return x.max(1, initial=-jnp.inf, where=number), x.min(1, initial=jnp.inf, where=number)

    return *lax.cond(nan.any(), without, lambda: (largest, smallest)), nan


def _first_place(x: Value, value: Value, lengths: Sequence[int]) -> tuple[Value, ...]:
    """The first place, along the last axis, with a value: XLA has no fast argmax on a CPU."""
    numbers = jnp.arange(x.shape[-1], dtype=jnp.int32)
    place = jnp.where(x == value[..., None], numbers, x.shape[-1] - 1).min(-1)
    found: list[Value] = []
    for length in map(np.int32, reversed(lengths)):  # as jnp.unravel_index, in a tenth of the code
        found.append(lax.rem(place, length))
        place = lax.div(place, length)
    return tuple(reversed(found))


def _random_keys(numbers: Value, salt: object) -> PyTree:
    """Numbers that draw examples (MurmurHash3's mixing), however the data is divided."""
    x = numbers.astype(jnp.uint32) * np.uint32(0x9E3779B9) ^ salt
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return ((x ^ (x >> np.uint32(16))) >> np.uint32(8)).astype(jnp.float32)
