"""A few figures of an array and of a parameter, made on the device beside the summary.

They examine a bounded number of values, evenly spaced, so the cost does not grow with the array.
Only whether a parameter has changed, and whether it is finite, is asked of all its elements, in one
pass over them. Invariant: nothing is differentiated, and the head says so if an array has no units
or no finite numbers. `gauges` explains the figures.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.lowering.partition import Part, partitioned, put_into_rows
from nnx_inspector._compat.native import ShapeDtype, native_primitive
from nnx_inspector._compat.sharding import auto_sharded, to_one_device
from nnx_inspector.arrays import is_array
from nnx_inspector.stats.apart import Apart
from nnx_inspector.stats.arithmetic import (
    added,
    in_real_parts,
    in_rows,
    one_each,
    pair_of_parts,
    power_of_two,
)
from nnx_inspector.stats.gauges import (
    EXAMPLES,
    HEAD,
    LENGTH,
    PARTS,
    POSITIONS,
    SAMPLE,
    SIGMOID_FLAT,
    STATE_HEAD,
    STATE_LENGTH,
    TANH_FLAT,
    UNITS,
)
from nnx_inspector.stats.summarize import is_number
from nnx_inspector.typing import AnyArray, Array, Bool, Float, Int, PyTree


def is_gauged(x: AnyArray) -> bool:
    """Whether an array has units and a batch: real floats with at least two axes."""
    return x.ndim >= 2 and x.size > 0 and jnp.issubdtype(x.dtype, jnp.floating)


@internal_config()
def gauge(
    x: Float[Array, "examples *places units"], where: Bool[Array, "..."] | None = None
) -> Float[Array, " figures"]:
    """The gauge of an array, float32[LENGTH]: its last axis has the units, its first the examples.

    All zeros ("not measured") unless `is_gauged(x)`. Move the axis of a vmap over examples to the
    front first. Only the positions count that `where` has, bool, with an axis for each of the
    array's; if it has one of the units, nothing is measured.
    """
    if not is_gauged(x) or (where is not None and where.shape[-1] > 1):
        return jnp.zeros(LENGTH, jnp.float32)
    if where is not None:
        look = functools.partial(_gauge_where, steps=_examined_steps(x.shape))
        return auto_sharded(look, jax.lax.stop_gradient(x), where)
    how = {"limit": math.log2(float(jnp.finfo(x.dtype).max)), "steps": _examined_steps(x.shape)}
    return _at_once(_gauged, _readable(x), **how)


def _examined_steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    limits = [EXAMPLES, *_shares(shape[1:-1], POSITIONS), UNITS]
    first, *between, last = _steps(shape, limits)
    # A layer that doubles the resolution treats even and odd positions differently, and both count.
    return first, *(step | 1 for step in between), last


@internal_config()
def gauge_apart(x: jax.Array, where: jax.Array | None = None) -> jax.Array | Apart:
    """As `gauge` within a program, but what several devices have found may be apart still."""
    if not is_gauged(x) or where is not None:
        return gauge(x, where)
    steps, limit = _examined_steps(x.shape), math.log2(float(jnp.finfo(x.dtype).max))
    look = lambda x: _examined(x, apart=True, steps=steps)[0]  # noqa: E731
    words = auto_sharded(look, jax.lax.stop_gradient(_readable(x)))
    return Apart(words, _Finish(x.shape[0], x.shape[-1], x.ndim, limit))


@dataclasses.dataclass(frozen=True)
class _Finish:
    examples: int
    units: int
    rank: int
    limit: float

    def __call__(self, words: jax.Array) -> jax.Array:
        y, rows = jax.lax.bitcast_convert_type(words, jnp.float32), words.ndim - self.rank
        (found,) = _gauged(y, rows=rows, limit=self.limit, steps=(1,) * self.rank)
        return _of_whole(found, self.examples, self.units)


def _of_whole(found: jax.Array, examples: int, units: int) -> jax.Array:
    """The gauge of a sample as that of the array that it is from."""
    place = jax.lax.broadcasted_iota(jnp.int32, found.shape, found.ndim - 1)
    for name, number in (("examples", examples), ("units", units)):
        found = jnp.where(place == HEAD.index(name), jnp.float32(number), found)
    return found


def _at_once(f: Callable[..., Sequence[jax.Array]], *arrays: jax.Array, **how: object) -> jax.Array:
    """`f`, differentiating nothing, on arrays that XLA places."""
    measure = lambda arrays: f(*arrays, rows=0, **how)[0]  # noqa: E731
    return auto_sharded(measure, jax.lax.stop_gradient(arrays))


def _readable(x: jax.Array) -> jax.Array:
    """The array in a dtype that the functions in C read."""
    return x if x.dtype.name in ("float32", "float16", "bfloat16") else x.astype(jnp.float32)


def _steps(shape: tuple[int, ...], limits: list[int]) -> tuple[int, ...]:
    """The steps that leave at most this many indices along each axis, including the first."""
    return tuple(-(-n // limit) for n, limit in zip(shape, limits, strict=True))


def _thinned(x: jax.Array, steps: tuple[int, ...]) -> jax.Array:
    if all(step == 1 for step in steps):
        return x
    return jax.lax.slice(x, (0,) * x.ndim, x.shape, steps)


def _shares(lengths: tuple[int, ...], most: int) -> list[int]:
    """How many indices of each axis to examine, with a product of at most `most`."""
    out = [1] * len(lengths)
    while True:
        grown = [
            (count / length, i)
            for i, (count, length) in enumerate(zip(out, lengths, strict=True))
            if count < length and np.prod(out) // count * min(2 * count, length) <= most
        ]
        if not grown:
            return out
        i = min(grown)[1]
        out[i] = min(2 * out[i], lengths[i])


def _gauge_of(x: jax.Array, *, limit: float, steps: tuple[int, ...]) -> list[jax.Array]:
    """See `gauge`. Each reduction is a kernel, so there are few, with several results each."""
    units, examples = x.shape[-1], x.shape[0]
    y = _thinned(x, steps).astype(jnp.float32)
    looked, positions = y.shape[-1], int(np.prod(y.shape[1:-1]))
    # in this order, so that each reduction is one of rows: XLA fuses only few results of columns
    y = y.reshape(-1, positions, looked).transpose(2, 1, 0)
    rows = y.shape[2] * positions
    y = jax.lax.optimization_barrier(y.reshape(-1)).reshape(looked * positions, -1)
    operands, initial = _extremes_and_counts(y)
    parts, none = one_each(y)
    found = jax.lax.reduce((*operands, *parts), (*initial, *none), _pair_of_positions, (1,))
    found = [x.reshape(looked, positions) for x in found]
    # over the positions, once more as if they had the same mean: their own squares are added
    *_, n, at, e, off, square = found
    alike = [n, jnp.zeros_like(at), e, jnp.zeros_like(off), square]
    found = jax.lax.reduce((*found, *alike), (*initial, *none, *none), _pair_of_units, (1,))
    low, high, size, flat, ends, _, at, e, off, square, *_, e_within, _, within = found
    mean = at + 2 * (off * power_of_two(e, np.float32))
    # Covariances are measured in units of the largest distance, so that no square overflows.
    zero = np.uint32(0), np.int32(1)
    largest, top = jax.lax.reduce((size, e), zero, _larger, (0,))
    measured = jnp.isfinite(jax.lax.bitcast_convert_type(largest, jnp.float32))
    unit = power_of_two(254 - jnp.minimum(top, 253), np.float32)
    centred = (y.reshape(looked, rows) * 0.5 - mean[:, None] * 0.5) * unit
    covariance = jnp.matmul(centred, centred.T, precision=jax.lax.Precision.HIGHEST)
    diagonal = jnp.where(np.eye(looked, dtype=bool), covariance, 0.0)
    square_of_all, trace = _sums(jnp.square(covariance), diagonal, (0, 1))
    positive = square_of_all > 0
    rank = jnp.where(positive, trace * trace / jnp.where(positive, square_of_all, 1.0), jnp.nan)
    figures = {
        "low": low,
        "high": high,
        "mean": mean,
        "std": jnp.sqrt(square / rows) * 2 * power_of_two(e, np.float32),
        "spread": jnp.sqrt(within / rows) * 2 * power_of_two(e_within, np.float32),
        "tanh": _part(flat & 0xFFFF, rows),
        "sigmoid": _part(flat >> 16, rows),
        "ends": _part(ends & 0xFFFF, rows),
        "top": _part(ends >> 16, rows),
    }
    heads = {
        "measured": measured.astype(jnp.float32),
        "examples": examples,
        "units": units,
        "looked": looked,
        "rank": rank if min(looked, rows) > 1 else jnp.nan,
        "positions": positions,
        "limit": limit,
        "reserved": 0.0,
    }
    head = in_rows([jnp.asarray(heads[name], jnp.float32) for name in HEAD])
    rest = in_rows([figures[name] for name in PARTS])
    rest = jnp.pad(rest, ((0, 0), (0, UNITS - looked)), constant_values=jnp.nan)
    return [jnp.concatenate([head, rest.reshape(-1)])]


def _gauge_where(x: jax.Array, where: jax.Array, *, steps: tuple[int, ...]) -> jax.Array:
    """See `gauge`. Deviations are from the first value that counts, so that they are exact."""
    counts = _thinned(jnp.broadcast_to(where, (*x.shape[:-1], 1)), (*steps[:-1], 1))
    y, looked = _thinned(x, steps).astype(jnp.float32), -(-x.shape[-1] // steps[-1])
    counts = counts.reshape(y.shape[0], -1, 1)
    y = jnp.where(counts, y.reshape(*counts.shape[:-1], looked), 0)
    size = jnp.where(jnp.isfinite(y), jnp.abs(y), 0)
    many, examples = counts.sum(), counts.any((1, 2)).sum()
    top = jax.lax.bitcast_convert_type(size.max(), jnp.int32) >> 23
    unit = power_of_two(254 - jnp.clip(top, 1, 253), np.float32)  # so that no square overflows
    z = y * unit

    def deviations(z: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The mean along the first axis, and the distances from it."""
        first = jnp.take_along_axis(z, jnp.argmax(counts, axis=0, keepdims=True), axis=0)
        d = jnp.where(counts, z - first, 0)
        off = d.sum(0, keepdims=True) / jnp.maximum(counts.sum(0, keepdims=True), 1)
        return (first + off)[0], jnp.where(counts, d - off, 0)

    rows = z.reshape(-1, looked)
    mean, around = deviations(rows, counts.reshape(-1, 1))
    _, within = deviations(z, counts)
    near_zero, near_one = size <= 0.01, jnp.abs(size - 1) <= 0.01
    part = lambda found: jnp.where(counts, found, False).sum((0, 1)) / many  # noqa: E731
    figures = {
        "low": jnp.where(counts, y, jnp.inf).min((0, 1)),
        "high": jnp.where(counts, y, -jnp.inf).max((0, 1)),
        "mean": mean / unit,
        "std": jnp.sqrt(jnp.square(around).sum(0) / many) / unit,
        "spread": jnp.sqrt(jnp.square(within).sum((0, 1)) / many) / unit,
        "tanh": part(size > TANH_FLAT),
        "sigmoid": part(size > SIGMOID_FLAT),
        "ends": part(near_zero | near_one),
        "top": part(near_one),
    }
    covariance = jnp.matmul(around.T, around, precision=jax.lax.Precision.HIGHEST)
    square = jnp.square(covariance).sum()
    rank = jnp.square(jnp.trace(covariance)) / jnp.where(square > 0, square, jnp.nan)
    heads = {
        "measured": jnp.isfinite(y).all() & (many > 0),
        "examples": examples,
        "units": x.shape[-1],
        "looked": looked,
        "rank": jnp.where((many > 1) & (looked > 1), rank, jnp.nan),
        "positions": many / jnp.maximum(examples, 1),
        "limit": math.log2(float(jnp.finfo(x.dtype).max)),
        "reserved": 0.0,
    }
    head = jnp.stack([jnp.asarray(heads[name], jnp.float32) for name in HEAD])
    rest = jnp.stack([figures[name] for name in PARTS])
    rest = jnp.pad(rest, ((0, 0), (0, UNITS - looked)), constant_values=jnp.nan)
    return jnp.concatenate([head, rest.reshape(-1)])


def _pair_of_positions(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
    low, high, size = jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]), jnp.maximum(a[2], b[2])
    return low, high, size, *added(a[3:5], b[3:5]), *pair_of_parts(a[5:], b[5:])


def _pair_of_units(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
    return *_pair_of_positions(a[:10], b[:10]), *pair_of_parts(a[10:], b[10:])


def _larger(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(map(jnp.maximum, a, b))


def _extremes_and_counts(y: jax.Array) -> tuple[tuple[Array, ...], tuple[np.generic, ...]]:
    """What the smallest, largest, largest size, and two packed counts of y are found from.

    The size is an integer that orders NaN above Inf above all numbers. The counts are the values
    beyond TANH_FLAT and (upper 16 bits) SIGMOID_FLAT, and those near 0 or 1 and (upper) near 1.
    """
    size = jnp.abs(y)
    near_zero, near_one = size <= 0.01, jnp.abs(size - 1) <= 0.01
    flat = _counted(size > TANH_FLAT, size > SIGMOID_FLAT)
    ends = _counted(near_zero | near_one, near_one)
    zero, infinity = np.uint32(0), np.float32(np.inf)
    operands = (y, y, jax.lax.bitcast_convert_type(size, jnp.uint32), flat, ends)
    return operands, (infinity, -infinity, zero, zero, zero)


def _counted(lower: jax.Array, upper: jax.Array) -> jax.Array:
    return lower.astype(jnp.uint32) | (upper.astype(jnp.uint32) << 16)


def _part(count: jax.Array, of: int) -> jax.Array:
    return count.astype(jnp.float32) / of


def _sums(a: jax.Array, b: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Both summed over some axes, in one kernel."""
    zero = np.float32(0)
    first, second = jax.lax.reduce((a, b), (zero, zero), added, axes)
    return first, second


def is_sampled(x: AnyArray) -> bool:
    """Whether a parameter's array is examined: floats or complex numbers, and not empty."""
    return x.size > 0 and jnp.issubdtype(x.dtype, jnp.inexact)


@internal_config()
def sampled(x: jax.Array) -> jax.Array:
    """What is sent of a parameter (a floating-point or complex array) besides its summary.

    Returns:
        float32[STATE_LENGTH].
    """
    given = jnp.atleast_1d(in_real_parts(jnp.asarray(x)))
    x = _readable(given)
    steps = _steps(x.shape, [*_shares(x.shape[:-1], SAMPLE // UNITS), UNITS])
    state = _at_once(_sampled, x, steps=steps)
    if given.dtype.itemsize > x.dtype.itemsize:  # what float32 cannot hold is not infinite
        state = state.at[_COUNTS].set(_at_once(_wide, given))
    return state


_COUNTS: Final = slice(STATE_HEAD.index("nan"), STATE_HEAD.index("infinite") + 1)


def _counted_of(x: jax.Array, bits: jax.Array | None = None) -> list[jax.Array]:
    """The sum of some bits, and how many values are NaN and infinite (as floats), in one kernel."""
    found = [x != x, jnp.abs(x) == jnp.inf]
    parts = [jnp.zeros(x.shape, jnp.uint32) if bits is None else bits.astype(jnp.uint32)]
    parts += [part.astype(jnp.uint32) for part in found]
    total, *counts = jax.lax.reduce(parts, [np.uint32(0)] * 3, added, tuple(range(x.ndim)))
    return [total, *(count.astype(jnp.float32) for count in counts)]


def _wide(x: jax.Array, *, rows: int) -> list[jax.Array]:
    return [jnp.stack(_counted_of(x)[1:])]


def _sample_of(x: jax.Array, *, steps: tuple[int, ...]) -> list[jax.Array]:
    word = {4: jnp.uint32, 2: jnp.uint16}[x.dtype.itemsize]
    bits, nan, infinite = _counted_of(x, jax.lax.bitcast_convert_type(x, word))
    y = _thinned(x, steps).astype(jnp.float32).reshape(-1)
    return [_state_of(bits, nan, infinite, y)]


def _state_of(bits: jax.Array, nan: jax.Array, infinite: jax.Array, sample: jax.Array) -> jax.Array:
    heads = {
        "sum_low": bits & 0xFFFF,
        "sum_high": bits >> 16,
        "elements": jnp.full_like(nan, sample.shape[-1]),
        "nan": nan,
        "infinite": infinite,
    }
    unknown = jnp.full(nan.shape, jnp.nan, jnp.float32)
    first = [heads[name].astype(jnp.float32) if name in heads else unknown for name in STATE_HEAD]
    rest = STATE_LENGTH - len(STATE_HEAD) - sample.shape[-1]
    sample = jnp.pad(sample, [*[(0, 0)] * nan.ndim, (0, rest)])
    return jnp.concatenate([in_rows(first, axis=-1), sample], axis=-1)


_WORK: Final = UNITS * (6 + 2 * 3 + 2 * POSITIONS + 2 * 32 + UNITS)
"""The words of memory that the function in C works in: `Sums` in gauges.c."""


def _floats(length: int) -> Callable[..., list[ShapeDtype]]:
    return lambda *_: [ShapeDtype((length,), np.dtype(np.float32))]


def _looked_at(x: jax.Array, part: Part, *, rows: int, steps: tuple[int, ...]) -> list[jax.Array]:
    """The bits of the values that are examined; zero where a value lies in another part."""
    for axis, step in enumerate((*(1,) * rows, *steps)):
        if axis in part.divided:
            index = np.arange(0, part.shape[axis], step, dtype=np.int32) - part.starts[axis]
            inside = (index >= 0) & (index < x.shape[axis])
            x = jnp.take(x, index, axis=axis, mode="clip")
            x = jnp.where(jnp.expand_dims(inside, (*range(axis), *range(axis + 1, x.ndim))), x, 0)
        elif step > 1:
            x = jax.lax.slice_in_dim(x, 0, x.shape[axis], step, axis)
    return [jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)]


_examined = partitioned(_looked_at)


def _gauged_in_parts(
    whole: Callable[..., tuple[Array, ...]],
    x: jax.Array,
    *,
    rows: int,
    steps: tuple[int, ...],
    limit: float,
    devices: int,
) -> list[jax.Array]:
    """Of each array, the values that are examined are exchanged at once with all others."""
    del devices
    (y,) = _examined(x, rows=rows, steps=steps)
    y = jax.lax.bitcast_convert_type(y, jnp.float32)
    (found,) = whole(y, rows=rows, limit=limit, steps=(1,) * len(steps))
    return [_of_whole(found, x.shape[rows], x.shape[-1])]


_gauged = native_primitive(
    "nnx_inspector_gauge",
    _gauge_of,
    _floats(LENGTH),
    attributes=("limit", "steps"),
    work=_WORK,
    in_parts=_gauged_in_parts,
)


def _counted_part(
    x: jax.Array, part: Part, *, rows: int, steps: tuple[int, ...]
) -> list[jax.Array]:
    (state,) = _sampled(x, rows=rows, steps=x.shape[rows:])
    low, high, nan, infinite = (
        state[..., STATE_HEAD.index(name)].astype(jnp.uint32)
        for name in ("sum_low", "sum_high", "nan", "infinite")
    )
    counts = in_rows([low + (high << 16), nan, infinite], axis=-1)
    sample = _looked_at(x, part, rows=rows, steps=steps)
    return [put_into_rows(counts, part, rows), *sample]


_counted_in_parts = partitioned(_counted_part)


def _sampled_in_parts(
    _: object, x: jax.Array, *, rows: int, steps: tuple[int, ...], devices: int
) -> list[jax.Array]:
    del devices
    counts, sample = _counted_in_parts(x, rows=rows, steps=steps)
    sample = jax.lax.bitcast_convert_type(sample, jnp.float32).reshape(*x.shape[:rows], -1)
    bits, nan, infinite = (counts[..., i] for i in range(3))
    return [_state_of(bits, nan, infinite, sample)]


_sampled = native_primitive(
    "nnx_inspector_state",
    _sample_of,
    _floats(STATE_LENGTH),
    attributes=("steps",),
    in_parts=_sampled_in_parts,
)


@internal_config()
def commonest(ids: Int[Array, "..."]) -> Int[Array, " figures"]:
    """`OF_IDS` of an array of integers that is not empty, float32[4]; an id below 0 as it is."""
    return auto_sharded(_commonest, ids)


@jax.jit
def _commonest(ids: jax.Array) -> jax.Array:
    found = jnp.sort(ids.reshape(-1))
    begins = jnp.concatenate([jnp.ones(1, bool), found[1:] != found[:-1]])
    index = jnp.arange(found.size)
    length = index - jax.lax.cummax(jnp.where(begins, index, 0)) + 1
    last = jnp.argmax(length)
    figures = length[last] / found.size, found[last], begins.sum(), found.size
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in figures])


@internal_config()
def varied(tree: PyTree, *, each: bool = False) -> jax.Array:
    """Whether any array of a pytree (or each) differs along its first axis, as a `sampled` state.

    Arrays with fewer than two examples do not count.
    """
    leaves = [x for x in jax.tree.leaves(tree) if is_array(x)]
    leaves = [x for x in leaves if x.ndim and x.shape[0] > 1 and x.size and is_number(x.dtype)]
    found = [_differs(jax.lax.stop_gradient(jnp.asarray(x))) for x in leaves]
    of = jnp.all if each else jnp.any
    differ = of(jnp.stack(found)) if found else jnp.zeros((), bool)
    state = jnp.zeros(STATE_LENGTH, jnp.float32)
    state = state.at[STATE_HEAD.index("elements")].set(1.0)
    return state.at[len(STATE_HEAD)].set(differ.astype(jnp.float32))


@jax.jit
def _differs(x: jax.Array) -> jax.Array:
    if jax.device_count() == 1:
        return auto_sharded(lambda x: jnp.any(x != x[:1]), x)

    def differs(x: jax.Array) -> jax.Array:
        """By a sum, whose exchange XLA joins with the others."""
        each = jnp.any(x != x[:1], axis=tuple(range(1, x.ndim)))
        return each.sum(dtype=jnp.uint32) > 0

    return auto_sharded(differs, x)


@internal_config()
def samples_of(held: Any, arguments: object) -> jax.Array:
    """A sample of each parameter, and whether the arguments vary; float32[..., STATE_LENGTH]."""
    return jnp.stack(to_one_device([*map(sampled, held), varied(arguments)]))
