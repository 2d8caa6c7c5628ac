"""Makes the Summary of an array on the device: moments, extremes and a log-binned histogram.

Works eagerly and inside jit, vmap, scan and grad, for every dtype, without raising and without
being differentiated. Invariant: a value that cannot be measured is NaN or counted separately, never
guessed. `nnx_inspector.stats.summary` reads the figures.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import AbstractToken, Token

from nnx_inspector._compat.configuration import ours
from nnx_inspector._compat.jit import is_tracer
from nnx_inspector._compat.sharding import left_to_the_compiler, with_even_axes
from nnx_inspector.stats.arithmetic import (
    bit_pattern,
    infinity_pattern,
    is_floating,
    moved_shift,
    ordered_key,
    points_dtype,
    real_values,
    scale_for,
    scaled_difference,
    sum_dtype,
)
from nnx_inspector.stats.bins import (
    BINS,
    FINITE_BINS,
    LOW_BITS,
    MINUS_ZERO_BIN,
    NAN_BIN,
    NEGINF_BIN,
    OPAQUE_BIN,
    POSINF_BIN,
    SIGN,
    ZERO_BIN,
)
from nnx_inspector.stats.summary import Summary

jax.tree_util.register_dataclass(
    Summary, data_fields=("bins", "points", "sums"), meta_fields=("opaque",)
)

_LARGEST: Final = 2**32 - 1
_BY_NAME_ONLY: Final = frozenset(["int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"])
"""Dtypes that jax names but XLA does not compile."""
_STEP: Final = 8
"""The shift is the mean of every eighth slice."""


@ours()
def summarize(x: Any, *, batch_rank: int = 0, sample: int = 1) -> Summary:
    """Measure the counts, moments and histogram of an array.

    The shift is the mean of an eighth of the values, so that the variance does not cancel (Chan,
    Golub and LeVeque 1983); d is scaled by a power of two, so that nothing overflows. Sums are
    float32 (float64 for 64-bit dtypes), added in XLA's own tree. XLA's CPU arithmetic treats
    subnormals as 0 in the moments; counts, min, max and bins see them.

    Args:
        x: an array of any dtype, a tracer, a NumPy array or a Python number. NumPy arrays of 64-bit
            dtypes are summarised in 64 bits whatever `jax_enable_x64` is. Complex values are
            summarised by magnitude (below the smallest normal number, by the larger part). PRNG
            keys, float0 and tokens have only `size` and `opaque`, which names dtype and shape.
        batch_rank: the number of leading axes that become rows; the others are reduced.
        sample: k > 1 takes the histogram, mean and standard deviation from every k-th slice along
            one axis before the last (tokens, rows of an image), in a third of the time; size,
            zeros, NaN, Inf, min and max stay exact. The mean is off by at most sqrt(k - 1)
            standard deviations. If slices are exchangeable, the rank of a quantile of m of them is
            off by e with a probability of at most 2 exp(-2 m e**2) (Hoeffding 1963). An array
            without an axis of 8 k slices is measured whole.

    Returns:
        A Summary whose rows are the first `batch_rank` axes, with uint32 counts that saturate at
        2**32 - 1.

    Raises:
        TypeError: `x` is not an array of numbers (but of strings or Python objects, for example).
        ValueError: `x` has fewer than `batch_rank` axes, or `sample` is less than 1.

    Example:
        >>> summarize(jnp.array([1.0, 3.0, jnp.nan])).mean
        2.0
    """
    if is_token(x):
        return _uncounted((), 0, np.dtype(np.float32), "token")
    x = as_array(x)
    if not 0 <= batch_rank <= x.ndim:
        raise ValueError(f"batch_rank={batch_rank} does not fit an array of shape {x.shape}.")
    if sample < 1:
        raise ValueError(
            f"sample must be at least 1, got {sample}: 1 measures all values, 8 an eighth of them."
        )
    rows, n = x.shape[:batch_rank], math.prod(x.shape[batch_rank:])
    dtype = x.dtype
    if is_opaque(dtype):
        said = in_words(dtype, x.shape[batch_rank:])
        return _uncounted(rows, n, np.dtype(np.float32), said)
    if not is_number(dtype):
        raise TypeError(
            f"Cannot summarise an array of dtype {dtype} and shape {x.shape}: jax has no such "
            "dtype of numbers. Convert it first."
        )
    if n == 0 or math.prod(rows) == 0:
        return _uncounted(rows, 0, points_dtype(dtype))
    if x.ndim == batch_rank:
        x = x.reshape(*x.shape, 1)
    if isinstance(x, np.ndarray) and dtype.itemsize >= 8 and dtype != np.complex64:
        with jax.enable_x64(True):  # or jax would cut it to 32 bits
            return _summarize(x, batch_rank=batch_rank, sample=sample)
    return _summarize(lax.stop_gradient(x), batch_rank=batch_rank, sample=sample)


@ours()
def merge_in_trace(a: Summary, b: Summary) -> Summary:
    """The summary of the values of both, row by row, for loops under jit.

    Counts stop at 2**32 - 1 instead of wrapping, which makes the result unreadable
    (`Summary.saturated`); `nnx_inspector.stats.summary.merge` has no such limit.

    Args:
        a: A summary.
        b: Another with the same rows and dtypes.

    Returns:
        A Summary of the same structure: fit for a loop's carry.

    Raises:
        ValueError: Rows or dtypes differ.

    Example:
        >>> merge_in_trace(summarize(jnp.ones(3)), summarize(jnp.zeros(1))).mean
        0.75
    """
    if a.opaque != b.opaque:
        raise ValueError(
            f"summaries of {a.opaque or 'numbers'} and {b.opaque or 'numbers'} cannot be merged "
            "inside jit; use nnx_inspector.stats.summary.merge outside it"
        )
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(
                f"summaries of unlike rows or dtypes cannot be merged inside jit: {x.dtype}"
                f"{x.shape} and {y.dtype}{y.shape}; outside jit use "
                f"nnx_inspector.stats.summary.merge"
            )
    return merge_rows(jax.tree.map(lambda *both: jnp.stack(both), a, b))


@ours()
def merge_rows(s: Summary, *, axis: int = 0) -> Summary:
    """A summary whose rows along one axis are merged into one, inside jit.

    Rows may lie on different devices, which exchange only counts and six numbers for each row.
    Counts stop at 2**32 - 1, as in `merge_in_trace`.

    Args:
        s: a summary with at least one row axis.
        axis: the row axis to merge.

    Example:
        >>> merge_rows(summarize(jnp.arange(6.0).reshape(3, 2), batch_rank=1)).mean
        2.5
    """
    return _merge_rows(s, axis=axis)


def as_array(x: Any) -> Any:
    """A jax or NumPy array of the same values, if possible in a dtype that XLA compiles."""
    if not isinstance(x, jax.Array | np.ndarray):
        x = np.asarray(x)
    if x.dtype.name in _BY_NAME_ONLY and not is_tracer(x):
        return np.asarray(x).astype(np.float32)
    if isinstance(x, np.ndarray) and not x.dtype.isnative:
        return x.astype(x.dtype.newbyteorder("="))
    return x


def is_number(dtype: Any) -> bool:
    """Whether XLA computes with this dtype: bool and the int, float and complex dtypes.

    Example:
        >>> is_number(jnp.dtype(jnp.float8_e4m3fn)), is_number(np.dtype("U3"))
        (True, False)
    """
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype.name in _BY_NAME_ONLY:
        return False
    if dtype in (np.longdouble, np.clongdouble):
        return dtype in (np.float64, np.complex128)  # as on some systems
    return dtype == jnp.bool_ or (jnp.issubdtype(dtype, jnp.number) and dtype.isnative)


def is_opaque(dtype: Any) -> bool:
    """Whether arrays of this dtype have a size but no figures: PRNG keys, float0 and the like."""
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    return extended or dtype == jax.dtypes.float0 or dtype.name in _BY_NAME_ONLY


def in_words(dtype: Any, shape: tuple[int, ...]) -> str:
    """Dtype and shape as text, `"float32[8,10]"`."""
    name = "float0" if dtype == jax.dtypes.float0 else dtype
    return f"{name}[{','.join(map(str, shape))}]"


def is_token(x: Any) -> bool:
    """Whether this is a token, which orders effects and has neither shape nor dtype."""
    return isinstance(x, Token) or (is_tracer(x) and isinstance(x.aval, AbstractToken))


def _uncounted(rows: tuple[int, ...], size: int, exact: np.dtype[Any], opaque: str = "") -> Summary:
    """The summary of `size` opaque values in each row."""
    with jax.enable_x64(exact.itemsize == 8 or jax.config.read("jax_enable_x64")):
        points, sums = jnp.zeros((*rows, 3), exact), jnp.zeros((*rows, 3), sum_dtype(exact))
    bins = jnp.zeros((*rows, BINS), jnp.uint32).at[..., OPAQUE_BIN].set(min(size, _LARGEST))
    return Summary(bins=bins, points=points, sums=sums, opaque=opaque)


@functools.partial(jax.jit, static_argnames=("batch_rank", "sample"))
def _summarize(x: jax.Array, *, batch_rank: int, sample: int) -> Summary:
    measure = functools.partial(_measured, batch_rank=batch_rank, sample=sample)
    return left_to_the_compiler(measure, x)


def _measured(x: jax.Array, *, batch_rank: int, sample: int) -> Summary:
    """Summarise `x`, of any numeric dtype, with an axis after its `batch_rank` rows, none empty.

    `x` keeps its shape, because a sharded array could not be flattened in place. All operations are
    elementwise, or reductions or scatters over all axes, which the compiler splits by device.
    """
    # Otherwise XLA would recompute x in each pass over it, and compile each of those kernels.
    x = lax.optimization_barrier(x)
    axes = tuple(range(batch_rank, x.ndim))
    value = real_values(x)
    part = _part(value, axes, sample)
    if part is not value:
        return _sampled(value, part, axes)
    n = math.prod(x.shape[batch_rank:])
    real = sum_dtype(value.dtype)
    finite, index = _classes(value)
    bins = _scatter(index, batch_rank)
    others = bins[..., NAN_BIN] + bins[..., POSINF_BIN] + bins[..., NEGINF_BIN]
    many = jnp.asarray(n, real) - others.astype(real)
    low, high = _extremes(value, finite, axes)
    low = jnp.where(many > 0, low, jnp.zeros_like(low))
    high = jnp.where(many > 0, high, jnp.zeros_like(high))
    points, sums, _ = _moments(value, _part(value, axes, _STEP), axes, low, high)
    return Summary(bins=bins, points=points, sums=sums)


def _moments(
    value: jax.Array, part: jax.Array, axes: tuple[int, ...], low: jax.Array, high: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Points and sums of the values about the mean of `part`, and how many are finite in `part`."""
    shift, many = _near_mean(part, axes, low, high)
    scale, factor = scale_for(
        scaled_difference(high, shift, 0.5), scaled_difference(low, shift, 0.5)
    )
    about, unit = _broadcastable(shift, axes), _broadcastable(factor, axes)
    d = jnp.where(_classes(value)[0], scaled_difference(value, about, unit), 0)
    sums = jnp.stack([scale, d.sum(axis=axes), (d * d).sum(axis=axes)], axis=-1)
    return jnp.stack([low, high, shift], axis=-1), sums, many


def _sampled(value: jax.Array, part: jax.Array, axes: tuple[int, ...]) -> Summary:
    """The summary of the values, with histogram and moments scaled up from a part of them."""
    low, high, known = _census(value, axes)
    n = jnp.uint32(min(math.prod(value.shape[axis] for axis in axes), _LARGEST))
    others = known[NAN_BIN] + known[POSINF_BIN] + known[NEGINF_BIN]
    points, sums, many = _moments(part, part, axes, low, high)
    weight = (n - others).astype(sums.dtype) / many  # NaN or Inf if the part has no finite value
    weight = jnp.where(n > others, jnp.where(many > 0, weight, jnp.nan), 0)[..., None]
    sums = jnp.concatenate([sums[..., :1], sums[..., 1:] * weight], axis=-1)

    number = np.arange(BINS)
    counted = FINITE_BINS & ~np.isin(number, (ZERO_BIN, MINUS_ZERO_BIN))
    bins = jnp.where(counted, _scatter(_classes(part)[1], axes[0]), jnp.uint32(0))
    values = n - others - known[ZERO_BIN] - known[MINUS_ZERO_BIN]
    taken = jnp.maximum(bins.sum(axis=-1, dtype=jnp.uint32), 1)
    # Rounded down; the rest goes to the fullest bin, or to the bin of an extreme.
    grown = bins.astype(jnp.float32) * (values.astype(jnp.float32) / taken)[..., None]
    scaled = jnp.floor(grown + 1e-3).astype(jnp.uint32)
    extreme = _classes(jnp.where(high == 0, low, high))[1]
    fullest = jnp.where(bins.any(axis=-1), bins.argmax(axis=-1).astype(jnp.uint32), extreme)
    rest = values - scaled.sum(axis=-1, dtype=jnp.uint32)
    bins = scaled + jnp.where(number == fullest[..., None], rest[..., None], jnp.uint32(0))
    for bin_number, count in known.items():
        bins = jnp.where(number == bin_number, count[..., None], bins)
    return Summary(bins=bins, points=points, sums=sums)


def _census(
    value: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, dict[int, jax.Array]]:
    """The smallest and largest finite value, and the counts of zeros and non-finite values by bin.

    One pass suffices: a reduction of integers alone, which XLA vectorises.
    """
    finite, index = _classes(value)
    key = ordered_key(value) if is_floating(value) else value
    info = np.iinfo(key.dtype)
    first, last = (np.array(limit, key.dtype) for limit in (info.min, info.max))
    apart = (ZERO_BIN, MINUS_ZERO_BIN, NAN_BIN, POSINF_BIN, NEGINF_BIN)
    counts = [(index == number).astype(jnp.uint32) for number in apart]
    low, high, *found = lax.reduce(
        (jnp.where(finite, key, last), jnp.where(finite, key, first), *counts),
        (last, first, *[np.uint32(0)] * len(apart)),
        lambda a, b: (
            jnp.minimum(a[0], b[0]),
            jnp.maximum(a[1], b[1]),
            *(x + y for x, y in zip(a[2:], b[2:], strict=True)),
        ),
        axes,
    )
    if is_floating(value):
        back = functools.partial(lax.bitcast_convert_type, new_dtype=value.dtype)
        some = low <= high
        low, high = (
            jnp.where(some, back(ordered_key(v)), 0).astype(value.dtype) for v in (low, high)
        )
    return low, high, dict(zip(apart, found, strict=True))


def _near_mean(
    value: jax.Array, axes: tuple[int, ...], low: jax.Array, high: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The mean of the finite values of each row, within [low, high], and their number."""
    real, n = sum_dtype(value.dtype), math.prod(value.shape[axis] for axis in axes)
    finite, _ = _classes(value)
    # Each value is first divided by at least n, because the sum of the values could overflow.
    share = math.ldexp(1.0, -max(n - 1, 1).bit_length())
    origin = jnp.zeros_like(low) if is_floating(value) else low
    shares = scaled_difference(value, _broadcastable(origin, axes), jnp.asarray(share, real))
    total = jnp.where(finite, shares, 0).sum(axis=axes)
    many = finite.sum(axis=axes, dtype=real)
    step = total * (1 / (share * jnp.maximum(many, 1)))
    return moved_shift(origin, step, low, high), many


def _part(value: jax.Array, axes: tuple[int, ...], step: int) -> jax.Array:
    """Every `step`-th slice along one axis; all values if no axis has enough slices.

    The mean of m of n values is at most sqrt(n / m - 1) standard deviations from the mean of all;
    for an eighth of them that is sqrt(7), so sums about it lose at most 3 bits of the variance.
    """
    # Slices along an axis before the last are contiguous in memory. Along a long axis between the
    # first and the last, devices need no data of each other with the usual shardings.
    long = [axis for axis in axes[:-1] if value.shape[axis] >= 8 * step]
    if not long or step == 1:
        return value
    return lax.slice_in_dim(value, step // 2, None, step, long[-1])


def _broadcastable(figure: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """A figure of each row, with axes of length 1 in place of the reduced ones."""
    return lax.expand_dims(figure, axes)


def _classes(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether each value is finite, and the bin of each (uint32), in the values' shape."""
    wide = value.dtype == np.float64
    top = np.finfo(np.float32).max
    single = (jnp.clip(value, -top, top) if wide else value).astype(jnp.float32)
    index = lax.bitcast_convert_type(single, jnp.uint32) >> LOW_BITS
    if not is_floating(value):
        index = jnp.where(value == 0, jnp.uint32(ZERO_BIN), index)
        return jnp.ones(value.shape, bool), index
    bits, infinity = bit_pattern(value), infinity_pattern(value.dtype)
    magnitude = bits & np.iinfo(bits.dtype).max
    index = jnp.where(magnitude == 0, (index & SIGN) | ZERO_BIN, index)
    if wide:
        index = jnp.where(magnitude == infinity, (index & SIGN) | POSINF_BIN, index)
    return magnitude < infinity, jnp.where(magnitude > infinity, jnp.uint32(NAN_BIN), index)


def _scatter(index: jax.Array, batch_rank: int) -> jax.Array:
    """How often each of the 4096 bins occurs: uint32, rows + (4096,)."""
    rows = index.shape[:batch_rank]
    many = math.prod(rows)
    if many > 1:  # one scatter into all rows' bins is faster than a batched one
        row = jnp.arange(many, dtype=jnp.uint32).reshape(*rows, *[1] * (index.ndim - batch_rank))
        index = index + row * BINS
    even = with_even_axes(index, jnp.uint32(many * BINS))
    zeros = jnp.zeros(many * BINS + (even is not index), jnp.uint32)
    counts = zeros.at[even].add(jnp.uint32(1), mode="promise_in_bounds")
    return counts[: many * BINS].reshape(*rows, BINS)


def _extremes(
    value: jax.Array, finite: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """The smallest and largest finite value of each row; arbitrary if there is none."""
    key = ordered_key(value) if is_floating(value) else value
    info = np.iinfo(key.dtype)
    first, last = (np.array(limit, key.dtype) for limit in (info.min, info.max))
    # One reduction for both. XLA may reorder integers, unlike floats, and hence vectorise them.
    low, high = lax.reduce(
        (jnp.where(finite, key, last), jnp.where(finite, key, first)),
        (last, first),
        lambda a, b: (jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])),
        axes,
    )
    if not is_floating(value):
        return low, high
    back = functools.partial(lax.bitcast_convert_type, new_dtype=value.dtype)
    return back(ordered_key(low)), back(ordered_key(high))


@functools.partial(jax.jit, static_argnames="axis")
def _merge_rows(s: Summary, *, axis: int) -> Summary:
    return left_to_the_compiler(functools.partial(_merged, axis=axis), s)


def _merged(s: Summary, *, axis: int) -> Summary:
    """Merge one row axis of a summary, first about the largest row's shift, then about the mean."""
    bins = _sum_saturating(s.bins, axis)
    points, sums = (jnp.moveaxis(field, axis, -2) for field in (s.points, s.sums))
    real = sums.dtype
    many = jnp.moveaxis(jnp.where(FINITE_BINS, s.bins, 0).astype(real).sum(axis=-1), axis, -1)
    used, total = many > 0, many.sum(axis=-1)
    low, high = _extremes(points[..., :2], used[..., None], (points.ndim - 2,))
    low, high = low[..., 0], high[..., 1]
    largest = many.argmax(axis=-1, keepdims=True)
    origin = jnp.take_along_axis(points[..., 2], largest, axis=-1)
    apart = jnp.where(used, scaled_difference(points[..., 2], origin, 0.5), 0)
    # A quarter of a scale gives that scale again, so the scale does not grow with each merge.
    spread = jnp.where(used, sums[..., 0] * 0.25, 0)
    scale, factor = scale_for(jnp.abs(apart).max(axis=-1), spread.max(axis=-1))
    unit = factor[..., None]
    delta = scaled_difference(points[..., 2], origin, unit)
    sum1 = jnp.where(used, _about(sums, many, delta, unit)[0], 0).sum(axis=-1)
    origin = origin[..., 0]
    shift = moved_shift(origin, sum1 / jnp.maximum(total, 1) * scale, low, high)
    delta = delta + scaled_difference(origin, shift, factor)[..., None]
    moments = [jnp.where(used, x, 0).sum(axis=-1) for x in _about(sums, many, delta, unit)]
    merged = jnp.stack([low, high, shift], axis=-1)
    merged = jnp.where((total > 0)[..., None], merged, jnp.zeros_like(merged))
    sums = jnp.stack([scale, *moments], axis=-1)
    if is_floating(points):
        unknown = (jnp.isnan(points).any(axis=-1) & used).any(axis=-1)[..., None]
        merged, sums = jnp.where(unknown, jnp.nan, merged), jnp.where(unknown, jnp.nan, sums)
    return Summary(bins=bins, points=merged, sums=sums, opaque=s.opaque)


def _sum_saturating(counts: jax.Array, axis: int) -> jax.Array:
    """The sum of at most 65,536 counts, uint32; 2**32 - 1 if it is larger."""
    add = functools.partial(jnp.sum, axis=axis, dtype=jnp.uint32)
    upper, lower = add(counts >> 16), add(counts & 0xFFFF)
    upper = upper + (lower >> 16)
    return jnp.where(upper > 0xFFFF, jnp.uint32(_LARGEST), (upper << 16) | (lower & 0xFFFF))


def _about(sums: jax.Array, n: jax.Array, delta: Any, factor: jax.Array) -> tuple[Any, Any]:
    """sum1 and sum2 of n values, in the unit 1 / factor, about a shift that is lower by delta."""
    ratio = sums[..., 0] * factor
    sum1, sum2 = sums[..., 1] * ratio, sums[..., 2] * ratio * ratio
    return sum1 + n * delta, sum2 + 2 * delta * sum1 + n * delta * delta
