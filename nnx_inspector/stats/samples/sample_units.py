"""Statistics of a sample of an array's units, taken on the device beside the summary.

At most 64 units are examined, of at most 128 examples at 64 positions each. Invariant: nothing is
differentiated, and the head says so if an array has no units or no finite numbers. `unit_stats`
explains the numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.lowering.partition import partitioned
from nnx_inspector._compat.native import native_primitive
from nnx_inspector._compat.sharding import auto_sharded
from nnx_inspector.stats.arithmetic import add, fused_stack, merge_parts, power_of_two, single_parts
from nnx_inspector.stats.samples.strides import (
    as_c_dtype,
    float_vector,
    split_limit,
    strided,
    strided_bits,
    strides_within,
    without_gradient,
)
from nnx_inspector.stats.samples.unit_stats import (
    EXAMPLES,
    HEAD,
    LENGTH,
    PER_UNIT,
    POSITIONS,
    SIGMOID_FLAT,
    TANH_FLAT,
    UNITS,
)
from nnx_inspector.stats.unreduced import Unreduced
from nnx_inspector.typing import AnyArray, Array, Bool, Float

_Number = bool | float | jax.Array


def has_units(x: AnyArray) -> bool:
    """Whether an array has units and a batch: real floats with at least two axes."""
    return x.ndim >= 2 and x.size > 0 and jnp.issubdtype(x.dtype, jnp.floating)


@internal_config()
def sample_units(
    x: Float[Array, "examples *places units"], where: Bool[Array, "..."] | None = None
) -> Float[Array, " stats"]:
    """Statistics of a sample of units, float32[LENGTH]: the last axis has the units, the first the
    examples.

    All zeros ("not measured") unless `has_units(x)`. Move the axis of a vmap over examples to the
    front first. Only the positions count that `where` has, bool, with an axis for each of the
    array's; if it has one of the units, nothing is measured.
    """
    if not has_units(x) or (where is not None and where.shape[-1] > 1):
        return jnp.zeros(LENGTH, jnp.float32)
    if where is not None:
        measure = functools.partial(_sample_where, steps=_strides(x.shape))
        return auto_sharded(measure, jax.lax.stop_gradient(x), where)
    how = {"limit": math.log2(float(jnp.finfo(x.dtype).max)), "steps": _strides(x.shape)}
    return without_gradient(_sample, as_c_dtype(x), **how)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    limits = [EXAMPLES, *split_limit(shape[1:-1], POSITIONS), UNITS]
    first, *between, last = strides_within(shape, limits)
    # A layer that doubles the resolution treats even and odd positions differently, and both count.
    return first, *(step | 1 for step in between), last


@internal_config()
def sample_units_unreduced(x: jax.Array, where: jax.Array | None = None) -> jax.Array | Unreduced:
    """As `sample_units` within a program, before the devices' parts are added up."""
    if not has_units(x) or where is not None:
        return sample_units(x, where)
    steps, limit = _strides(x.shape), math.log2(float(jnp.finfo(x.dtype).max))
    sample = lambda x: _sampled_bits(x, apart=True, steps=steps)[0]  # noqa: E731
    words = auto_sharded(sample, jax.lax.stop_gradient(as_c_dtype(x)))
    return Unreduced(words, _Finish(x.shape[0], x.shape[-1], x.ndim, limit))


@dataclasses.dataclass(frozen=True)
class _Finish:
    """Computes the statistics from the whole sample, once it has been put together."""

    examples: int
    units: int
    rank: int
    limit: float

    def __call__(self, words: jax.Array) -> jax.Array:
        y, rows = jax.lax.bitcast_convert_type(words, jnp.float32), words.ndim - self.rank
        (found,) = _sample(y, rows=rows, limit=self.limit, steps=(1,) * self.rank)
        return _with_lengths(found, self.examples, self.units)


def _with_lengths(found: jax.Array, examples: int, units: int) -> jax.Array:
    """Statistics of a sample, with the lengths of the array that it is from."""
    place = jax.lax.broadcasted_iota(jnp.int32, found.shape, found.ndim - 1)
    for name, number in (("examples", examples), ("units", units)):
        found = jnp.where(place == HEAD.index(name), jnp.float32(number), found)
    return found


def _sample_all(x: jax.Array, *, limit: float, steps: tuple[int, ...]) -> list[jax.Array]:
    """See `sample_units`."""
    # On a GPU each reduction is a kernel of its own, and a kernel costs more here than what it
    # reads. So there are three reductions, and each makes all that one pass over its operands can:
    # over the examples at each position, over the positions of each unit, over the units.
    y = strided(x, steps).astype(jnp.float32)
    looked, positions = y.shape[-1], int(np.prod(y.shape[1:-1]))
    # The reduced axis comes last: XLA fuses many results of a reduction of rows into one kernel,
    # and only few of columns. The barrier is on a flat copy in this order, or XLA would undo the
    # transposition by reducing columns.
    y = y.reshape(-1, positions, looked).transpose(2, 1, 0)
    rows = y.shape[2] * positions
    y = jax.lax.optimization_barrier(y.reshape(-1)).reshape(looked * positions, -1)
    operands, initial = _extremes_and_counts(y)
    parts, none = single_parts(y)
    found = jax.lax.reduce((*operands, *parts), (*initial, *none), _merge_positions, (1,))
    found = [x.reshape(looked, positions) for x in found]
    # Merging the positions of a unit gives its deviation over everything. Its deviation over the
    # examples at one position is the merge of the same parts with all means set to 0: the distances
    # between the positions then add nothing, and the squares within each are summed in a common
    # scale.
    *_, n, at, e, off, square = found
    aligned = [n, jnp.zeros_like(at), e, jnp.zeros_like(off), square]
    found = jax.lax.reduce((*found, *aligned), (*initial, *none, *none), _merge_both, (1,))
    low, high, size, flat, ends, _, at, e, off, square, *_, e_within, _, within = found
    mean = at + 2 * (off * power_of_two(e, np.float32))
    # Distances from the mean are divided by a power of two that is at least the largest of them, so
    # that neither they nor their products overflow; the rank is a ratio and does not change. Biased
    # exponents of a number and its inverse add up to 254. Halves are subtracted, because the
    # difference of two numbers near the largest float is beyond it.
    zero = np.uint32(0), np.int32(1)
    largest, top = jax.lax.reduce((size, e), zero, _maximum, (0,))
    measured = jnp.isfinite(jax.lax.bitcast_convert_type(largest, jnp.float32))
    unit = power_of_two(254 - jnp.minimum(top, 253), np.float32)
    centred = (y.reshape(looked, rows) * 0.5 - mean[:, None] * 0.5) * unit
    covariance = jnp.matmul(centred, centred.T, precision=jax.lax.Precision.HIGHEST)
    diagonal = jnp.where(np.eye(looked, dtype=bool), covariance, 0.0)
    square_of_all, trace = _sums(jnp.square(covariance), diagonal, (0, 1))
    positive = square_of_all > 0
    rank = jnp.where(positive, trace * trace / jnp.where(positive, square_of_all, 1.0), jnp.nan)
    per_unit = {
        "low": low,
        "high": high,
        "mean": mean,
        "std": jnp.sqrt(square / rows) * 2 * power_of_two(e, np.float32),
        "spread": jnp.sqrt(within / rows) * 2 * power_of_two(e_within, np.float32),
        "tanh": _share(flat & 0xFFFF, rows),
        "sigmoid": _share(flat >> 16, rows),
        "ends": _share(ends & 0xFFFF, rows),
        "top": _share(ends >> 16, rows),
    }
    heads = {
        "measured": measured,
        "examples": x.shape[0],
        "units": x.shape[-1],
        "looked": looked,
        "rank": rank if min(looked, rows) > 1 else jnp.nan,
        "positions": positions,
        "limit": limit,
        "reserved": 0.0,
    }
    return [_vector(heads, per_unit)]


def _sample_where(x: jax.Array, where: jax.Array, *, steps: tuple[int, ...]) -> jax.Array:
    """See `sample_units`. Deviations are from the first value that counts, so they are exact."""
    counts = strided(jnp.broadcast_to(where, (*x.shape[:-1], 1)), (*steps[:-1], 1))
    y, looked = strided(x, steps).astype(jnp.float32), -(-x.shape[-1] // steps[-1])
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
    share = lambda found: jnp.where(counts, found, False).sum((0, 1)) / many  # noqa: E731
    per_unit = {
        "low": jnp.where(counts, y, jnp.inf).min((0, 1)),
        "high": jnp.where(counts, y, -jnp.inf).max((0, 1)),
        "mean": mean / unit,
        "std": jnp.sqrt(jnp.square(around).sum(0) / many) / unit,
        "spread": jnp.sqrt(jnp.square(within).sum((0, 1)) / many) / unit,
        "tanh": share(size > TANH_FLAT),
        "sigmoid": share(size > SIGMOID_FLAT),
        "ends": share(_is_near(size, 0) | _is_near(size, 1)),
        "top": share(_is_near(size, 1)),
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
    return _vector(heads, per_unit)


def _vector(heads: Mapping[str, _Number], per_unit: Mapping[str, jax.Array]) -> jax.Array:
    """The head, then the statistics of each unit: NaN where there are fewer than `UNITS`."""
    head = fused_stack([jnp.asarray(heads[name], jnp.float32) for name in HEAD])
    rest = fused_stack([per_unit[name] for name in PER_UNIT])
    rest = jnp.pad(rest, ((0, 0), (0, UNITS - rest.shape[1])), constant_values=jnp.nan)
    return jnp.concatenate([head, rest.reshape(-1)])


def _is_near(size: jax.Array, end: int) -> jax.Array:
    return jnp.abs(size - end) <= 0.01


def _merge_positions(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
    low, high, size = jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]), jnp.maximum(a[2], b[2])
    return low, high, size, *add(a[3:5], b[3:5]), *merge_parts(a[5:], b[5:])


def _merge_both(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
    return *_merge_positions(a[:10], b[:10]), *merge_parts(a[10:], b[10:])


def _maximum(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(map(jnp.maximum, a, b))


def _extremes_and_counts(y: jax.Array) -> tuple[tuple[Array, ...], tuple[np.generic, ...]]:
    """What the smallest, largest, largest size, and two packed counts of y are found from.

    The size is an integer that orders NaN above Inf above all numbers. The counts are the values
    beyond TANH_FLAT and (upper 16 bits) SIGMOID_FLAT, and those near 0 or 1 and (upper) near 1.
    """
    size = jnp.abs(y)
    flat = _packed(size > TANH_FLAT, size > SIGMOID_FLAT)
    ends = _packed(_is_near(size, 0) | _is_near(size, 1), _is_near(size, 1))
    zero, infinity = np.uint32(0), np.float32(np.inf)
    operands = (y, y, jax.lax.bitcast_convert_type(size, jnp.uint32), flat, ends)
    return operands, (infinity, -infinity, zero, zero, zero)


def _packed(lower: jax.Array, upper: jax.Array) -> jax.Array:
    # Two counts in one word: sums of such words are the sums of both halves, since a sample has at
    # most 128 * 64 values of a unit, and a half holds 65,535. A reduction has fewer operands so.
    return lower.astype(jnp.uint32) | (upper.astype(jnp.uint32) << 16)


def _share(count: jax.Array, of: int) -> jax.Array:
    return count.astype(jnp.float32) / of


def _sums(a: jax.Array, b: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Both summed over some axes, in one kernel."""
    zero = np.float32(0)
    first, second = jax.lax.reduce((a, b), (zero, zero), add, axes)
    return first, second


_WORK: Final = UNITS * (6 + 2 * 3 + 2 * POSITIONS + 2 * 32 + UNITS)
"""The words of memory that the function in C works in: `Sums` in samples.c."""

_sampled_bits = partitioned(strided_bits)


def _sample_in_parts(
    whole: Callable[..., tuple[Array, ...]],
    x: jax.Array,
    *,
    rows: int,
    steps: tuple[int, ...],
    limit: float,
    devices: int,
) -> list[jax.Array]:
    """The samples of all arrays are put together in one exchange, and measured on each device."""
    del devices
    (y,) = _sampled_bits(x, rows=rows, steps=steps)
    y = jax.lax.bitcast_convert_type(y, jnp.float32)
    (found,) = whole(y, rows=rows, limit=limit, steps=(1,) * len(steps))
    return [_with_lengths(found, x.shape[rows], x.shape[-1])]


_sample = native_primitive(
    "nnx_inspector_sample_units",
    _sample_all,
    float_vector(LENGTH),
    attributes=("limit", "steps"),
    work=_WORK,
    in_parts=_sample_in_parts,
)
