"""The extreme values of each unit over a stream of examples: a few figures that are merged.

Each example counts once for a unit, by its largest (smallest) value over the places of the array.
Invariant: what is kept is what a full, stable sort of all examples would put first: of equal values
the first example's and the first place's. NaN is no value, and is counted. Runs under jit.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

NOBODY = -1
"""The number that stands for no example."""


MOST, LEAST, RANDOM = range(3)
"""What is kept of each unit: its largest values, its smallest, and those of examples at random."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """The values kept of each unit, the best first. The first axis is `MOST`, `LEAST`, `RANDOM`.

    Attributes:
        score: what they are ranked by, [3, k, units]; -inf for an empty place.
        value: the values, [3, k, units].
        example: the numbers of their examples, or `NOBODY`.
        place: their places, [3, k, units, axes].
    """

    score: Any
    value: Any
    example: Any
    place: Any

    def merged(self, other: Kept) -> Kept:
        """The best of both; of equals those of `self` first."""
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), self, other)
        _, order = jax.lax.top_k(both.score.swapaxes(1, 2), self.score.shape[1])
        order = order.swapaxes(1, 2)

        def ordered(x: Any) -> Any:
            return jnp.take_along_axis(x, jnp.expand_dims(order, [*range(3, x.ndim)]), 1)

        return jax.tree.map(ordered, both)


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
        """For `k` values of each unit, at places with so many axes."""
        shape = (3, k, units)
        kept = Kept(
            jnp.full(shape, -jnp.inf, dtype),
            jnp.full(shape, jnp.nan, dtype),
            jnp.full(shape, NOBODY, jnp.int32),
            jnp.full((*shape, axes), NOBODY, jnp.int32),
        )
        return Extremes(kept, jnp.zeros(units, jnp.int32))

    def merged(self, x: Any, start: Any, count: Any, seed: int) -> Extremes:
        """With the examples of a batch.

        Args:
            x: their values, [batch, *places, units].
            start: the number of the first example.
            count: how many of the batch are examples; the rest is padding.
            seed: decides, with an example's number, whether it is drawn.
        """
        places, dtype = x.shape[1:-1], self.kept.value.dtype
        x = x.reshape(len(x), math.prod(places), x.shape[-1]).astype(dtype)
        numbers = jnp.arange(len(x), dtype=jnp.int32)
        real, example = (numbers < count)[:, None], (start + numbers)[:, None]
        nan = jnp.isnan(x)
        there = real & ~nan.all(1)
        best = jnp.stack([jnp.where(nan, -jnp.inf, y).max(1) for y in (x, -x)])
        place = jnp.stack([_place(x, best[0]), _place(x, -best[1])])
        draw = jnp.broadcast_to(_hashed(example, seed).astype(dtype), best[:1].shape)
        # so that zero equals minus zero, as in a sort, and an empty place comes last
        score = jnp.maximum(jnp.where(best == 0, 0.0, best), jnp.finfo(dtype).min)
        score = jnp.where(there, jnp.concatenate([score, draw]), -jnp.inf)
        value = jnp.stack([best[0], -best[1], best[0]])
        at = jnp.stack(jnp.unravel_index(place, places), -1) if places else None
        at = jnp.zeros((*place.shape, 0), jnp.int32) if at is None else at
        new = Kept(
            score,
            jnp.where(there, value, jnp.nan),
            jnp.broadcast_to(jnp.where(there, example, NOBODY), value.shape),
            jnp.where(there[..., None], jnp.concatenate([at, at[:1]]), NOBODY),
        )
        return Extremes(
            self.kept.merged(new), self.nan + (nan.any(1) & real).sum(0, dtype=jnp.int32)
        )


def _place(x: Any, best: Any) -> Any:
    """The first place with this value: XLA has no fast argmax on a CPU."""
    places = jnp.arange(x.shape[1], dtype=jnp.int32)[:, None]
    found = jnp.where(x == best[:, None], places, x.shape[1]).min(1)
    return jnp.minimum(found, x.shape[1] - 1)


def _hashed(numbers: Any, seed: int) -> Any:
    """A number for each example, which looks drawn at random (MurmurHash3's mixing);
    XLA compiles it faster than `jax.random`.
    """
    salt = jnp.uint32(seed * 0x27D4EB2F % 2**32)
    x = (numbers.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)) ^ salt
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return (x ^ (x >> 16)) >> 8
