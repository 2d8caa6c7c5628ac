"""The functions of arrays that are put into a program where it is edited.

A function's static arguments come first, and `Partial` holds them: equal ones share what is traced.
Knows no jaxpr.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat.native import ShapeDtype, native_primitive
from nnx_inspector._compat.sharding import (
    auto_sharded,
    pcast_varying,
    zero_on_copies,
    zeros_like_aval,
)
from nnx_inspector.program.changes import difference
from nnx_inspector.program.editing.slots import AlwaysRuns, Output, is_slot
from nnx_inspector.program.marks import move_vmap_axes_first, seeded
from nnx_inspector.program.plan import merge_observations
from nnx_inspector.stats.arithmetic import as_real_pairs
from nnx_inspector.stats.array_stats import Sample
from nnx_inspector.stats.samples.sample_parameters import sample_parameters
from nnx_inspector.stats.summarize import merge_rows, summarize, summarize_unreduced
from nnx_inspector.stats.summary import Summary
from nnx_inspector.stats.unreduced import Unreduced, reduce_all, reduce_tree
from nnx_inspector.typing import Aval, Function, PyTree, Value


@dataclasses.dataclass(frozen=True)
class Partial:
    """A `functools.partial` that equals another one of the same function and arguments."""

    function: Function
    static: tuple[Hashable, ...]

    def __init__(self, function: Function, *static: Hashable):
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "static", static)

    def __call__(self, *arrays: Value) -> PyTree:
        return self.function(*self.static, *arrays)


def summary_of(sample: Sample, axis: int | None, apart: bool, x: jax.Array) -> Summary | Unreduced:
    """The summary of an array, or one for each entry of the members' axis."""
    x = x if axis is None else jnp.moveaxis(x, axis, 0)
    measure = summarize_unreduced if apart else summarize
    return measure(x, batch_rank=int(axis is not None), sample=sample)


def measure_if(measure: Callable[..., PyTree], gate: jax.Array, *xs: jax.Array) -> PyTree:
    """What a function finds if a gate is open, and zeros otherwise, added up over the devices."""

    def whole(*xs: jax.Array) -> PyTree:
        return reduce_tree(measure(*xs))

    def nothing(*xs: jax.Array) -> PyTree:
        return jax.tree.map(zeros_like_aval, jax.eval_shape(whole, *xs))

    return jax.lax.cond(gate, whole, nothing, *xs)


def finish_all(finish: tuple[Callable[[Any], Any], ...], *words: jax.Array) -> list[PyTree]:
    """What is apart, finished by its words."""
    return reduce_all([Unreduced(x, one) for x, one in zip(words, finish, strict=True)])


def summary_of_change(
    sample: Sample, axis: int | None, old: jax.Array, new: jax.Array
) -> Summary | Unreduced:
    return summary_of(sample, axis, False, difference(old, new))


def samples_at_beginning(
    held: int, mapped: tuple[tuple[int, ...], ...], *xs: jax.Array
) -> jax.Array:
    """Samples of the parameters of a call that begins, and whether its arguments vary.

    Args:
        held: how many of the operands are parameters; they come first.
        mapped: the axes of vmaps in each operand.
    """
    every = [move_vmap_axes_first(x, axes) for x, axes in zip(xs, mapped, strict=True)]
    ranks = list(map(len, mapped))
    parameters = [x[(0,) * n] if n else x for x, n in zip(every[:held], ranks, strict=False)]
    given = [
        x.reshape(-1, *x.shape[n + 1 :]) if n and x.ndim > n else x
        for x, n in zip(every[held:], ranks[held:], strict=True)
    ]
    return sample_parameters(parameters, given)


def update_squares(
    rows: int, before: jax.Array, after: jax.Array, added: jax.Array | None = None
) -> jax.Array:
    """How far a parameter is moved: the sums of squares of the change, in units of `UNIT`, and of
    the value before; how many elements something other than 0 is added to; and how many of those
    stay what they were. Of the whole or of each entry of the first axes, float32[..., 4]. The
    counts are NaN where it is not known what is added.

    Args:
        rows: how many leading axes have an entry each.
    """
    xs = [_exact_parts(x) for x in (before, after, added) if x is not None]
    return auto_sharded(lambda *xs: _update_squares(*xs, rows=rows)[0], *xs)


Divides = tuple[bool, ...]
"""For each number of a product, whether it divides."""


def _product(divides: Divides, xs: list[jax.Array]) -> jax.Array:
    """The product of the first numbers, which are taken from the list; without any, 1."""
    found = jnp.ones((), jnp.float32)
    for one in divides:
        found = found / xs.pop(0) if one else found * xs.pop(0)
    return found.astype(jnp.float32)


def update_stats(
    rows: int,
    added: bool,
    decay: tuple[Divides, bool] | None,
    clipped: tuple[Divides | None, bool, bool] | None,
    before: jax.Array,
    after: jax.Array,
    *others: jax.Array,
) -> jax.Array:
    """`update_squares`, and behind it two pairs of sums of squares: of weight decay and of what it
    is added to; of what clipping takes from an array, in units of `UNIT`, and of the array. NaN
    where there is none: float32[..., 8].

    Args:
        rows: how many leading axes have an entry each.
        added: whether it is known what is added; it is the third operand.
        decay: the factor of weight decay, and whether it is 1 without; the next operands are what
            the decay is added to, and the factor's numbers.
        clipped: the factor of clipping, whether a comparison chooses it, and whether by being True;
            the next operands are the factor's numbers and the comparison. Without a factor, they
            are an array before clipping and after.
    """
    xs = list(others)
    found = update_squares(rows, before, after, *([xs.pop(0)] if added else []))
    pairs = [jnp.full_like(found[..., :2], jnp.nan)] * 2
    if decay is not None:
        rest, (divides, keeps) = xs.pop(0), decay
        factor = _product(divides, xs) - keeps
        sizes = jnp.square(factor) * found[..., 1], update_squares(rows, rest, rest)[..., 1]
        pairs[0] = jnp.stack(sizes, axis=-1)
    if clipped is not None:
        divides, chosen, on = clipped
        if divides is None:
            pairs[1] = update_squares(rows, *xs)[..., :2]
        else:
            factor = _product(divides, xs)
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


def _exact_parts(x: jax.Array) -> jax.Array:
    """The same in a dtype of which the function in C reads differences and squares exactly."""
    x = as_real_pairs(x)
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


_update_squares = native_primitive(
    "nnx_inspector_update", _squares, lambda *_: [ShapeDtype((4,), np.dtype(np.float32))]
)


def is_stack_row(
    wanted: tuple[int, ...], lengths: tuple[int, ...], on: jax.Array, *rows: jax.Array
) -> jax.Array:
    """Whether a value that is on acts in this iteration of the scans around."""
    for row, index, length in zip(rows, wanted, lengths, strict=True):
        on = on & (row == index % length)
    return on


def row_of_device(
    measure: Callable[..., PyTree], axes: tuple[str, ...], checked: bool, *xs: jax.Array
) -> PyTree:
    """What a function finds on one device of a shard_map: a row, which counts each value once."""
    found = measure(*xs)
    if checked:  # otherwise it is not known what is a copy
        if xs:
            once = functools.partial(zero_on_copies, like=xs[0], axes=axes)
            found = jax.tree.map(once, found)
        found = jax.tree.map(functools.partial(pcast_varying, axes=axes), found)
    return jax.tree.map(lambda x: x[None], found)


def seed_with(how: tuple[tuple[str, Any], ...], *xs: jax.Array) -> jax.Array:
    return seeded(*xs, **dict(how))


def zeros(avals: tuple[Aval, ...]) -> list[jax.Array]:
    return list(map(zeros_like_aval, avals))


def put_in_ring(length: int, count: int, number: jax.Array, *both: jax.Array) -> list[jax.Array]:
    """Put what an iteration found in its row of the last `length` ones."""
    rows, found = both[:count], both[count:]
    put = jax.lax.dynamic_update_index_in_dim
    return [put(x, new, number % length, 0) for x, new in zip(rows, found, strict=True)]


def merge_fields(seen: PyTree, count: int, *fields: jax.Array) -> list[jax.Array]:
    """Add up what two iterations of a loop saw: the fields of one, then those of the other."""
    slots, tree = jax.tree.flatten(seen, is_leaf=is_slot)
    numbers = [slot.number for slot in slots]
    halves = fields[:count], fields[count:]
    a, b = (jax.tree.unflatten(tree, [half[i] for i in numbers]) for half in halves)
    found = dict(zip(numbers, jax.tree.leaves(merge_observations(a, b)), strict=True))
    return [found[i] for i in range(count)]


def merge_device_rows(seen: PyTree, count: int, *fields: jax.Array) -> list[jax.Array]:
    """Merge the rows of the devices of a shard_map."""
    is_summary = lambda x: isinstance(x, (Summary, Output, AlwaysRuns))  # noqa: E731
    found: dict[int, jax.Array] = {}
    for one in jax.tree.leaves(seen, is_leaf=is_summary):
        if isinstance(one, Output):
            found[one.number] = fields[one.number].max(axis=0)
        elif isinstance(one, Summary):
            slots = jax.tree.leaves(one, is_leaf=is_slot)
            whole = jax.tree.map(lambda x: fields[x.number], one, is_leaf=is_slot)
            pairs = zip(slots, jax.tree.leaves(merge_rows(whole)), strict=True)
            found.update({slot.number: x for slot, x in pairs})
    return [found[i] for i in range(count)]


def row_number(backwards: bool, length: int, number: jax.Array) -> jax.Array:
    """The row of a scan's iteration, by how many went before."""
    return length - 1 - number if backwards else number


def next_number(number: jax.Array) -> jax.Array:
    return number + 1


def is_multiple(of: int, number: jax.Array) -> jax.Array:
    return number % of == 0


def put_in_rows(
    every: int, count: int, gate: jax.Array, row: jax.Array, *both: jax.Array
) -> list[jax.Array]:
    """Put what an iteration found in its row, if it is one that is measured."""
    at = row // every

    def put(rows: jax.Array, new: jax.Array) -> jax.Array:
        old = jax.lax.dynamic_index_in_dim(rows, at, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(rows, jnp.where(gate, new, old), at, 0)

    return list(map(put, both[:count], both[count:]))
