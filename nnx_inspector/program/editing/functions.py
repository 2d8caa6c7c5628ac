"""The functions of arrays that are put into a program where it is edited.

Equal functions share what is traced: each is a frozen dataclass. Knows no jaxpr.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat.native import Type, by_rows, computed_once
from nnx_inspector._compat.sharding import (
    auto_sharded,
    counted_once,
    on_this_mesh,
    varying_along,
    zeros_of,
)
from nnx_inspector.program.changes import difference
from nnx_inspector.program.editing.slots import Always, Output, is_slot
from nnx_inspector.program.marks import mapped_first, seeded
from nnx_inspector.program.plan import merge_seen
from nnx_inspector.stats.apart import Apart, all_finished, finished
from nnx_inspector.stats.arithmetic import in_real_parts
from nnx_inspector.stats.array_stats import Sample
from nnx_inspector.stats.measure_gauges import samples_of
from nnx_inspector.stats.summarize import merge_rows, summarize, summarize_apart
from nnx_inspector.stats.summary import Summary


@dataclasses.dataclass(frozen=True)
class Summarise:
    """Reduces an array to its summary, or to one for each entry of the members' axis."""

    sample: Sample
    axis: int | None = None
    apart: bool = False

    def __call__(self, x: jax.Array) -> Summary | Apart:
        x = x if self.axis is None else jnp.moveaxis(x, self.axis, 0)
        measure = summarize_apart if self.apart else summarize
        return measure(x, batch_rank=int(self.axis is not None), sample=self.sample)


@dataclasses.dataclass(frozen=True)
class Gated:
    """What a function finds if a gate is open, and zeros otherwise."""

    measure: Callable[..., Any]

    def __call__(self, gate: jax.Array, *xs: jax.Array) -> Any:
        return jax.lax.cond(gate, self.measure, self._nothing, *xs)

    def _nothing(self, *xs: jax.Array) -> Any:
        return jax.tree.map(zeros_of, jax.eval_shape(self.measure, *xs))


@dataclasses.dataclass(frozen=True)
class Whole:
    """What a function finds, added up over the devices at once."""

    measure: Callable[..., Any]

    def __call__(self, *xs: jax.Array) -> Any:
        return all_finished(self.measure(*xs))


@dataclasses.dataclass(frozen=True)
class Finished:
    """Finishes what is apart, by its words."""

    finish: tuple[Callable[[Any], Any], ...]

    def __call__(self, *words: jax.Array) -> list[Any]:
        return finished([Apart(x, one) for x, one in zip(words, self.finish, strict=True)])


@dataclasses.dataclass(frozen=True)
class Change:
    """Reduces a Variable's change to its summary."""

    sample: Sample
    axis: int | None = None

    def __call__(self, old: jax.Array, new: jax.Array) -> Summary | Apart:
        return Summarise(self.sample, self.axis)(difference(old, new))


@dataclasses.dataclass(frozen=True)
class Beginning:
    """Samples the parameters of a call that begins, and says whether its arguments vary.

    Attributes:
        held: how many of the operands are parameters; they come first.
        mapped: the axes of vmaps in each operand.
    """

    held: int
    mapped: tuple[tuple[int, ...], ...]

    def __call__(self, *xs: jax.Array) -> jax.Array:
        every = [mapped_first(x, axes) for x, axes in zip(xs, self.mapped, strict=True)]
        ranks = list(map(len, self.mapped))
        held = [x[(0,) * n] if n else x for x, n in zip(every[: self.held], ranks, strict=False)]
        given = [
            x.reshape(-1, *x.shape[n + 1 :]) if n and x.ndim > n else x
            for x, n in zip(every[self.held :], ranks[self.held :], strict=True)
        ]
        return samples_of(held, given)


@dataclasses.dataclass(frozen=True)
class Moved:
    """How far a parameter is moved: the sums of squares of the change, in units of `UNIT`, and of
    the value before; how many elements something other than 0 is added to; and how many of those
    stay what they were. Of the whole or of each entry of the first axes, float32[..., 4]. The
    counts are NaN where it is not known what is added.

    Attributes:
        rows: how many leading axes have an entry each.
    """

    rows: int = 0

    def __call__(
        self, before: jax.Array, after: jax.Array, added: jax.Array | None = None
    ) -> jax.Array:
        xs = [_real(before), _real(after)]
        if added is not None:
            xs.append(_real(added))
        find = lambda *xs: _moved(*xs, rows=self.rows)[0]  # noqa: E731
        return auto_sharded(find, *xs)


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of numbers; without any, 1.

    Attributes:
        divides: of each, whether it divides.
    """

    divides: tuple[bool, ...]

    def __call__(self, *xs: jax.Array) -> jax.Array:
        found = jnp.ones((), jnp.float32)
        for x, divides in zip(xs, self.divides, strict=True):
            found = found / x if divides else found * x
        return found.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Update:
    """What `Moved` finds, and behind it two pairs of sums of squares: of weight decay and of what
    it is added to; of what clipping takes from an array, in units of `UNIT`, and of the array.
    NaN where there is none: float32[..., 8].

    Attributes:
        rows: how many leading axes have an entry each.
        added: whether it is known what is added; it is the third operand.
        decay: the factor of weight decay, and whether it is 1 without; the next operands are what
            the decay is added to, and the factor's numbers.
        clipped: the factor of clipping, whether a comparison chooses it, and whether by being True;
            the next operands are the factor's numbers and the comparison. Without a factor, they
            are an array before clipping and after.
    """

    rows: int = 0
    added: bool = False
    decay: tuple[Product, bool] | None = None
    clipped: tuple[Product | None, bool, bool] | None = None

    def __call__(self, before: jax.Array, after: jax.Array, *others: jax.Array) -> jax.Array:
        xs, moved = list(others), Moved(self.rows)
        found = moved(before, after, *([xs.pop(0)] if self.added else []))
        pairs = [jnp.full_like(found[..., :2], jnp.nan)] * 2
        if self.decay is not None:
            rest, (product, keeps) = xs.pop(0), self.decay
            factor = product(*(xs.pop(0) for _ in product.divides)) - keeps
            sizes = jnp.square(factor) * found[..., 1], moved(rest, rest)[..., 1]
            pairs[0] = jnp.stack(sizes, axis=-1)
        if self.clipped is not None:
            product, chosen, on = self.clipped
            if product is None:
                pairs[1] = moved(*xs)[..., :2]
            else:
                factor = product(*(xs.pop(0) for _ in product.divides))
                if chosen:
                    factor = jnp.where(xs.pop(0) == on, factor, 1)
                taken = jnp.stack([jnp.square((1 - factor) / UNIT), jnp.ones_like(factor)])
                pairs[1] = jnp.broadcast_to(taken, pairs[1].shape)
        return jnp.concatenate([found, *pairs], axis=-1)


UNIT: Final = 2.0**-30
"""The squares of a small change are not too small for float32 in this unit."""
NARROW: Final = ("float16", "bfloat16")
"""Only of these is it counted what is lost: for that an update becomes an array that is written and
read once more, and float32 rounds next to nothing off."""
_EXACT: Final = ("float64", "float32", "float16", "bfloat16")
_COUNTED: Final = 2**24
"""Up to here, adding ones in float32 counts."""


def _real(x: jax.Array) -> jax.Array:
    """The same in a dtype of which the function in C reads differences and squares exactly."""
    x = in_real_parts(x)
    return x if x.dtype.name in _EXACT else x.astype(jnp.float32)


def _squares(before: jax.Array, after: jax.Array, *added: jax.Array) -> list[jax.Array]:
    wide, of = jnp.promote_types(before.dtype, jnp.float32), jnp.finfo(after.dtype)
    if of.bits < 32:  # else XLA takes the value that it has not rounded yet
        after = jax.lax.reduce_precision(after, of.nexp, of.nmant)
    change = after.astype(wide) - before.astype(wide)
    squares = [
        jnp.square(change.astype(jnp.float32) / UNIT),
        jnp.square(before.astype(jnp.float32)),
    ]
    parts = [x != 0 for x in added]
    parts += [x & (after == before) & jnp.isfinite(after) for x in parts]
    ones = jnp.float32 if before.size < _COUNTED else jnp.uint32
    if jax.device_count() > 1 and ones == jnp.float32:  # one exchange for all of them
        every = jnp.stack([*squares, *(x.astype(ones) for x in parts)])
        sums = every.sum(tuple(range(1, every.ndim)))
    else:  # a reduction with several results adds one value after the other on a CPU
        counts = [x.sum(dtype=ones).astype(jnp.float32) for x in parts]
        sums = jnp.stack([*(x.sum() for x in squares), *counts])
    return [jnp.pad(sums, (0, 4 - len(sums)), constant_values=jnp.nan)]


_moved = by_rows("nnx_inspector_update", _squares, lambda *_: [Type((4,), np.dtype(np.float32))])


@dataclasses.dataclass(frozen=True)
class InLayer:
    """Whether a value that is on acts in this iteration of the scans around."""

    wanted: tuple[int, ...]
    lengths: tuple[int, ...]

    def __call__(self, on: jax.Array, *rows: jax.Array) -> jax.Array:
        for row, index, length in zip(rows, self.wanted, self.lengths, strict=True):
            on = on & (row == index % length)
        return on


@dataclasses.dataclass(frozen=True)
class OfDevice:
    """What a function finds on one device of a shard_map: a row, which counts each value once."""

    measure: Callable[..., Any]
    axes: tuple[str, ...]
    checked: bool

    def __call__(self, *xs: jax.Array) -> Any:
        found = self.measure(*xs)
        if self.checked:  # otherwise it is not known what is a copy
            if xs:
                once = functools.partial(counted_once, like=xs[0], axes=self.axes)
                found = jax.tree.map(once, found)
            found = jax.tree.map(functools.partial(varying_along, axes=self.axes), found)
        return jax.tree.map(lambda x: x[None], found)


@dataclasses.dataclass(frozen=True)
class Once:
    def __call__(self, x: jax.Array, *after: jax.Array) -> jax.Array:
        return computed_once(x, after=after)


@dataclasses.dataclass(frozen=True)
class OnThisMesh:
    def __call__(self, *xs: jax.Array) -> list[jax.Array]:
        return on_this_mesh(list(xs))


@dataclasses.dataclass(frozen=True)
class Seeded:
    how: tuple[tuple[str, Any], ...]

    def __call__(self, x: jax.Array, seed: jax.Array, *mask: jax.Array) -> jax.Array:
        return seeded(x, seed, *mask, **dict(self.how))


@dataclasses.dataclass(frozen=True)
class Ones:
    shape: tuple[int, ...]

    def __call__(self) -> jax.Array:
        return jnp.ones(self.shape, jnp.uint32)


@dataclasses.dataclass(frozen=True)
class Zero:
    dtype: np.dtype[Any]

    def __call__(self) -> jax.Array:
        return jnp.zeros((), self.dtype)


@dataclasses.dataclass(frozen=True)
class Zeros:
    avals: tuple[Any, ...]

    def __call__(self) -> list[jax.Array]:
        return list(map(zeros_of, self.avals))


@dataclasses.dataclass(frozen=True)
class Ring:
    """Puts what an iteration found in its row of the last `length` ones."""

    length: int
    count: int

    def __call__(self, number: jax.Array, *both: object) -> list[Any]:
        rows, found = both[: self.count], both[self.count :]
        at = number % self.length
        put = jax.lax.dynamic_update_index_in_dim
        return [put(x, new, at, 0) for x, new in zip(rows, found, strict=True)]


class Merged:
    """Adds up what two iterations of a loop saw: the fields of one, then those of the other."""

    def __init__(self, seen: list[Any], count: int):
        self._seen, self._count = seen, count

    def __call__(self, *fields: object) -> list[Any]:
        slots, tree = jax.tree.flatten(self._seen, is_leaf=is_slot)
        numbers = [slot.number for slot in slots]
        halves = fields[: self._count], fields[self._count :]
        a, b = (jax.tree.unflatten(tree, [half[i] for i in numbers]) for half in halves)
        found = dict(zip(numbers, jax.tree.leaves(merge_seen(a, b)), strict=True))
        return [found[i] for i in range(self._count)]


class MergedRows:
    """Merges the rows of the devices of a shard_map."""

    def __init__(self, seen: list[Any], count: int):
        self._seen, self._count = seen, count

    def __call__(self, *fields: Any) -> list[Any]:
        is_summary = lambda x: isinstance(x, (Summary, Output, Always))  # noqa: E731
        found: dict[int, Any] = {}
        for one in jax.tree.leaves(self._seen, is_leaf=is_summary):
            if isinstance(one, Output):
                found[one.number] = fields[one.number].max(axis=0)
            elif isinstance(one, Summary):
                slots = jax.tree.leaves(one, is_leaf=is_slot)
                whole = jax.tree.map(lambda x: fields[x.number], one, is_leaf=is_slot)
                pairs = zip(slots, jax.tree.leaves(merge_rows(whole)), strict=True)
                found.update({slot.number: x for slot, x in pairs})
        return [found[i] for i in range(self._count)]


@dataclasses.dataclass(frozen=True)
class Row:
    """The row of a scan's iteration, by how many went before."""

    backwards: bool
    length: int

    def __call__(self, number: jax.Array) -> jax.Array:
        return self.length - 1 - number if self.backwards else number


@dataclasses.dataclass(frozen=True)
class Next:
    def __call__(self, number: jax.Array) -> jax.Array:
        return number + 1


@dataclasses.dataclass(frozen=True)
class IsMultiple:
    of: int

    def __call__(self, number: jax.Array) -> jax.Array:
        return number % self.of == 0


@dataclasses.dataclass(frozen=True)
class PutRows:
    """Puts what an iteration found in its row, if it is one that is measured."""

    every: int
    count: int

    def __call__(self, gate: jax.Array, row: jax.Array, *both: Any) -> list[Any]:
        rows, found = both[: self.count], both[self.count :]
        at = row // self.every

        def put(rows: jax.Array, new: jax.Array) -> jax.Array:
            old = jax.lax.dynamic_index_in_dim(rows, at, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(rows, jnp.where(gate, new, old), at, 0)

        return list(map(put, rows, found))
