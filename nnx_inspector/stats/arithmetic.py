"""Arithmetic of summaries on the device that never overflows: bits, differences and scales.

It serves floats and integers alike. Invariant: comparisons by bits are exact, also for subnormals
and signed zeros. Measures nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnx_inspector.stats.bins import MINUS_ZERO_BIN, NAN_BIN, NEGINF_BIN, POSINF_BIN, ZERO_BIN
from nnx_inspector.typing import Array, Bool, Int, Num, UInt32, Value

EXACT_BINS: Final = (ZERO_BIN, MINUS_ZERO_BIN, NAN_BIN, POSINF_BIN, NEGINF_BIN)
"""The bins whose counts are exact, in the order in which they are counted."""


def points_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype of `Summary.points` for arrays of `dtype`: the first of six that holds all values.

    Example:
        >>> points_dtype(jnp.dtype(jnp.bfloat16))
        dtype('float32')
    """
    if jnp.issubdtype(dtype, jnp.integer):
        wide = dtype.itemsize >= 4
        return np.dtype(dtype) if wide else np.dtype(np.float32)
    wide = dtype in (np.float64, np.complex128)
    return np.dtype(np.float64) if wide else np.dtype(np.float32)


def sum_dtype(exact: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64) if exact.itemsize == 8 else np.dtype(np.float32)


def real_values(x: jax.Array) -> jax.Array:
    """The values in the dtype of `points`; magnitudes for complex values."""
    exact = points_dtype(x.dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts, infinity = jnp.stack([x.real, x.imag]), infinity_pattern(exact)
        bits = (bit_pattern(parts) & np.iinfo(bit_pattern(parts).dtype).max).max(axis=0)
        larger = lax.bitcast_convert_type(bits, exact)  # Inf or NaN where a part is
        # A magnitude beyond the dtype is not an Inf, and one that arithmetic loses is not a 0.
        size = jnp.minimum(jnp.abs(x), jnp.finfo(exact).max)
        known = (bits < infinity) & (size >= jnp.finfo(exact).tiny)
        return jnp.where(known, size, larger)
    if x.dtype == jnp.bfloat16:  # by its bits: arithmetic would lose the subnormals
        upper = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
        return lax.bitcast_convert_type(upper, jnp.float32)
    return x.astype(exact)


def as_real_pairs(x: jax.Array) -> jax.Array:
    """Complex numbers as pairs of reals, along an axis behind the others; other arrays as they are.

    Sums of squares, shares of equal values and counts of values that are not finite are then those
    of both parts.
    """
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return jnp.stack([x.real, x.imag], axis=-1) if is_complex else x


# Whether a value is 0, finite or the larger of two is read from its bits. XLA on a CPU sets the
# processor to take subnormals for 0, in comparisons too, so `x == 0` is true of 1e-40 and the
# minimum of 1e-40 and 0 is either; other platforms do as the standard says. Bits are compared as
# integers, the same everywhere. XLA may also reorder integers, unlike floats, and so vectorise a
# reduction of them.


def bit_pattern(value: jax.Array) -> jax.Array:
    """The pattern of floats as signed integers of their width."""
    return lax.bitcast_convert_type(value, np.dtype(f"int{value.dtype.itemsize * 8}"))


def infinity_pattern(dtype: object) -> int:
    """The pattern of +Inf; those of NaN are greater."""
    return 0x7FF0_0000_0000_0000 if dtype == np.float64 else 0x7F80_0000


def is_floating(value: jax.Array) -> bool:
    return value.dtype.kind == "f"


def ordered_keys(value: Num[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Floats as integers of the same order (also subnormals, signed zeros); integers unchanged."""
    return _folded(bit_pattern(value)) if is_floating(value) else value


def from_keys(keys: jax.Array, dtype: Any) -> jax.Array:
    """The values of this dtype that have these `ordered_keys`."""
    if jnp.issubdtype(dtype, jnp.integer):
        return keys
    return lax.bitcast_convert_type(_folded(keys), dtype)


def _folded(bits: jax.Array) -> jax.Array:
    """Bit patterns of floats as keys, and keys as bit patterns."""
    # A float's bits are its sign and then its size, which ascends with the integer. Of a negative
    # one all bits but the sign are flipped, so that a larger size becomes a smaller integer. The
    # shift copies the sign into every bit: the mask is all ones for negative numbers, else 0.
    width = bits.dtype.itemsize * 8
    return bits ^ ((bits >> (width - 1)) & np.iinfo(bits.dtype).max)


def extremes_of(
    low: jax.Array, high: jax.Array, used: jax.Array, *, axis: int
) -> tuple[jax.Array, jax.Array]:
    """The extremes of several parts, from those of each; arbitrary if no part is used."""
    lower, upper = ordered_keys(low), ordered_keys(high)
    kind = lower.dtype.type  # jax takes a Python int for an int32, which cannot hold 2**32 - 1
    first, last = (kind(end) for end in (np.iinfo(kind).min, np.iinfo(kind).max))
    least = jnp.where(used, lower, last).min(axis=axis)
    most = jnp.where(used, upper, first).max(axis=axis)
    return from_keys(least, low.dtype), from_keys(most, low.dtype)


def scaled_difference(a: jax.Array, b: jax.Array, factor: Value) -> jax.Array:
    """(a - b) * factor in the dtype of the sums, without overflow; exact for integers."""
    if is_floating(a):
        # `a - b` may be beyond the dtype when neither is, so both are scaled first. The factor is a
        # power of two, which changes the exponents only: the result is the rounded difference.
        return a * factor - b * factor
    # Two integers may be 2**bits apart. The smaller one is subtracted from the larger modulo
    # 2**bits, which is their distance as an unsigned integer.
    unsigned, real = np.dtype(f"uint{a.dtype.itemsize * 8}"), sum_dtype(a.dtype)
    up, down = (c.astype(unsigned).astype(real) for c in (a - b, b - a))
    return jnp.where(a >= b, up, -down) * factor


def move_shift(shift: jax.Array, step: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """A shift moved by step, within [low, high]; step is rounded for integers."""
    if is_floating(shift):
        return jnp.clip(shift + step, low, high)
    unsigned = np.dtype(f"uint{shift.dtype.itemsize * 8}")
    top = float(np.iinfo(unsigned).max) * (1 - 2.0**-22)  # rounds to a value below its limit
    stride = jnp.clip(jnp.round(jnp.abs(step)), 0, top).astype(unsigned).astype(shift.dtype)
    moved = jnp.where(step < 0, shift - stride, shift + stride)
    moved = jnp.where(step >= scaled_difference(high, shift, 1), high, moved)
    return jnp.where(step <= scaled_difference(low, shift, 1), low, moved)


def scale_for(*halves: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A power of two, 2 to 4 times the largest |half|, and 1 / it; both 0 where all are 0."""
    # The biased exponent is moved by two in the bits, and clipped so that neither the scale nor its
    # inverse is subnormal or Inf; biased exponents of the two add up to `largest + 1`. Deviations
    # divided by such a scale are at most 1, so no square overflows, and dividing is exact.
    half = functools.reduce(jnp.maximum, [jnp.abs(h) for h in halves])
    mantissa = 52 if half.dtype == np.float64 else 23
    biased = bit_pattern(half) >> mantissa
    largest = (infinity_pattern(half.dtype) >> mantissa) - 2
    exponent = jnp.clip(biased + 2, 1, largest)
    as_float = functools.partial(lax.bitcast_convert_type, new_dtype=half.dtype)
    spread = biased > 0  # a subnormal spread counts as none
    scale = as_float(exponent << mantissa)
    inverse = as_float((largest + 1 - exponent) << mantissa)
    return jnp.where(spread, scale, 0), jnp.where(spread, inverse, 0)


def merge_about_mean(
    points: jax.Array, sums: jax.Array, n: jax.Array, *, axis: int
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Parts of n finite values merged along an axis, as the `points` and `sums` of a Summary.

    First about the largest part's shift, then about the mean (Chan, Golub and LeVeque 1983). All
    figures are 0 where no part has a value.
    """
    # Sums about a shift far from the mean cancel: sum2 / n - (sum1 / n)**2 is then the difference
    # of two large numbers. About the shift of the part with the most values they cancel little, and
    # give a mean that is good enough to be the shift of the result.
    (low, high, shifts), (scales, _, _) = points, sums
    used, total = n > 0, n.sum(axis=axis)
    low, high = extremes_of(low, high, used, axis=axis)
    largest = n.argmax(axis=axis, keepdims=True)
    origin = jnp.take_along_axis(shifts, largest, axis=axis)
    apart = jnp.where(used, scaled_difference(shifts, origin, 0.5), 0)
    # A quarter of a scale gives that scale again, so the scale does not grow with each merge.
    spread = jnp.where(used, scales * 0.25, 0)
    scale, factor = scale_for(jnp.abs(apart).max(axis=axis), spread.max(axis=axis))
    unit = jnp.expand_dims(factor, axis)
    delta = scaled_difference(shifts, origin, unit)
    sum1 = jnp.where(used, _sums_about(sums, n, delta, unit)[0], 0).sum(axis=axis)
    origin = origin.squeeze(axis)
    shift = move_shift(origin, sum1 / jnp.maximum(total, 1) * scale, low, high)
    delta = delta + jnp.expand_dims(scaled_difference(origin, shift, factor), axis)
    moments = [jnp.where(used, x, 0).sum(axis=axis) for x in _sums_about(sums, n, delta, unit)]
    ends = [jnp.where(total > 0, x, jnp.zeros_like(x)) for x in (low, high, shift)]
    return ends, [scale, *moments]


def _sums_about(
    sums: jax.Array, n: jax.Array, delta: Value, factor: jax.Array
) -> tuple[Array, Array]:
    """sum1 and sum2 of n values, in the unit 1 / factor, about a shift that is lower by delta."""
    scale, sum1, sum2 = sums
    ratio = scale * factor
    sum1, sum2 = sum1 * ratio, sum2 * ratio * ratio
    return sum1 + n * delta, sum2 + 2 * delta * sum1 + n * delta * delta


def fused_stack(figures: list[jax.Array], *, axis: int = 0) -> jax.Array:
    """As `stack`, but XLA fuses this loop; a concatenation is a kernel of its own."""
    shape = list(figures[0].shape)
    shape.insert(axis % (len(shape) + 1), len(figures))
    row = lax.broadcasted_iota(np.int32, shape, axis % len(shape))
    out = jnp.broadcast_to(jnp.expand_dims(figures[0], axis), shape)
    for i, figure in enumerate(figures[1:], 1):
        out = jnp.where(row == i, jnp.expand_dims(figure, axis), out)
    return out


def words_of(x: Num[Array, "*shape"]) -> list[UInt32[Array, "*shape"]]:
    """The 32-bit words of each number, uint32: one array, or two of a wide dtype."""
    words = lax.bitcast_convert_type(x, jnp.uint32)
    return [words] if words.ndim == x.ndim else [words[..., i] for i in range(words.shape[-1])]


def from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """The numbers of this dtype whose words, uint32, lie side by side along the last axis."""
    if dtype.itemsize == 8:
        words = words.reshape(*words.shape[:-1], -1, 2)
    return lax.bitcast_convert_type(words, dtype)


def is_finite(value: Num[Array, "*shape"]) -> Bool[Array, "*shape"]:
    if not is_floating(value):
        return jnp.ones(value.shape, bool)
    bits = bit_pattern(value)
    return bits & np.iinfo(bits.dtype).max < infinity_pattern(value.dtype)


# Reducers are functions of a module: jax keeps a jaxpr for each function that it reduces by.


def add(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(one + other for one, other in zip(a, b, strict=True))


def merge_counters(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
    return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]), *add(a[2:], b[2:])


def counters(value: jax.Array) -> tuple[list[jax.Array], list[Value]]:
    """Operands and initial values of `merge_counters`: extremes and the counts of `EXACT_BINS`."""
    finite = is_finite(value)
    key = ordered_keys(value)
    first, last = _limits(key.dtype)
    if is_floating(value):
        bits, infinity = bit_pattern(value), infinity_pattern(value.dtype)
        magnitude = bits & np.iinfo(bits.dtype).max
        zero, infinite = magnitude == 0, magnitude == infinity
        kinds = [bits == 0, zero & (bits != 0), magnitude > infinity]
        kinds += [infinite & (bits > 0), infinite & (bits < 0)]
    else:
        kinds = [value == 0]
    operands = [jnp.where(finite, key, last), jnp.where(finite, key, first)]
    operands += [kind.astype(jnp.uint32) for kind in kinds]
    initial = [last, first, *[np.uint32(0)] * len(kinds)]
    return operands, initial


def _limits(dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last integer of a dtype."""
    info = np.iinfo(dtype)
    return np.array(info.min, dtype), np.array(info.max, dtype)


def from_counters(
    value: jax.Array, found: Sequence[Array]
) -> tuple[jax.Array, jax.Array, dict[int, jax.Array]]:
    """The extremes (0 if no value is finite), and the counts by bin."""
    low, high, *counts = found
    some = low <= high
    ends = [from_keys(end, value.dtype) for end in (low, high)]
    low, high = (jnp.where(some, x, jnp.zeros_like(x)) for x in ends)
    return low, high, dict(zip(EXACT_BINS, counts, strict=False))


def single_parts(value: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[np.ndarray, ...]]:
    """Each value as a part for `merge_parts`, and the part of no values.

    A part is the number of its finite values, one of them, an exponent, half the distance of the
    mean from that value, and the sum of squares of half the distances from the mean, the last two
    in units of 2 to that exponent (biased; 0 if there is no distance).
    """
    nothing = jnp.zeros(value.shape, sum_dtype(value.dtype))
    parts = (is_finite(value).astype(nothing.dtype), value, bit_pattern(nothing), nothing, nothing)
    return parts, tuple(np.array(0, x.dtype) for x in parts)


def merge_parts(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
    """Two parts as one (Chan, Golub and LeVeque 1983), so that no mean must be known beforehand.

    Each carries its own scale (Anderson 2017, "Algorithm 978: Safe scaling in the level 1 BLAS").
    """
    # One reduction must find the sums and what scales them, so the scale cannot be known first.
    # Each part has its own exponent e, and its mean is kept as the distance from one of its values:
    # that is small where the values are alike, so nothing cancels. Two parts are brought to the
    # larger exponent by the powers of two f1 and f2 (0 if the other is too small to matter). The
    # distance of the two values is split into fraction and exponent in the same way, by its bits; a
    # subnormal distance has no exponent of its own and is multiplied into the normal range instead.
    (n1, at1, e1, mean1, square1), (n2, at2, e2, mean2, square2) = a, b
    real = mean1.dtype
    width, bias = _float_layout(real)
    n, both = n1 + n2, (n1 > 0) & (n2 > 0)
    half = jnp.where(both, scaled_difference(at2, at1, 0.5), np.array(0, real))
    bits = bit_pattern(half)
    exponent = (bits & np.iinfo(bits.dtype).max) >> width
    normal, exponent = exponent > 0, jnp.maximum(exponent, (half != 0).astype(bits.dtype))
    e = jnp.maximum(jnp.maximum(e1, e2), exponent)
    f1, f2, f = (power_of_two(jnp.maximum(bias - (e - x), 0), real) for x in (e1, e2, exponent))
    fraction = lax.bitcast_convert_type((bits & ~infinity_pattern(real)) | (bias << width), real)
    step = jnp.where(normal, fraction, half * np.array(2.0 ** (bias - 1), real)) * f
    mean1, mean2 = mean1 * f1, mean2 * f2
    share = n2 / jnp.maximum(n, np.array(1, real))
    apart = mean2 + step - mean1
    square = square1 * (f1 * f1) + square2 * (f2 * f2) + apart * apart * (n1 * share)
    mean = mean1 + apart * share
    second = (n1 == 0) | (jnp.abs(mean - step) < jnp.abs(mean))  # the value nearer to the mean
    return n, jnp.where(second, at2, at1), e, jnp.where(second, mean - step, mean), square


def sums_of_part(part: Sequence[Array]) -> list[jax.Array]:
    """The shift of a part, and its sums about that, as in a Summary."""
    n, at, e, mean, square = part
    shift = jnp.where(n > 0, at, jnp.zeros_like(at))
    scale = jnp.where(e > 0, power_of_two(e, mean.dtype), 0)
    # means are halves of the differences, whose scale is twice as large
    return [shift, scale, 2 * (n * mean), 4 * (square + n * (mean * mean))]


def as_words(n: jax.Array, points: jax.Array, sums: jax.Array) -> jax.Array:
    """The points and sums of n finite values (uint32) as a part that `merge_words` reads."""
    # The parts of several devices are added up as integers, so each device writes to places of its
    # own and leaves 0 elsewhere. Sums about a shift become the mean and the squares about it, which
    # `merge_parts` takes; the scale is a power of two, of which the exponent is enough.
    low, high, shift = (points[..., i] for i in range(3))
    scale, sum1, sum2 = (sums[..., i] for i in range(3))
    many = n.astype(sums.dtype)
    mean = sum1 / (2 * jnp.maximum(many, 1))
    square = jnp.maximum(sum2 / 4 - many * (mean * mean), 0)
    exponent = bit_pattern(scale) >> _float_layout(scale.dtype)[0]
    figures = [ordered_keys(low), ordered_keys(high), shift, mean, square]
    return fused_stack(
        [n, exponent.astype(jnp.uint32), *(w for x in figures for w in words_of(x))], axis=-1
    )


def width_of_words(exact: np.dtype[Any]) -> int:
    return 2 + 5 * exact.itemsize // 4


def merge_words(words: jax.Array, exact: np.dtype[Any]) -> tuple[list[jax.Array], list[jax.Array]]:
    """The points and sums of parts, merged along the axis before the last."""
    real = sum_dtype(exact)
    key = exact if exact.kind in "iu" else np.dtype(f"int{exact.itemsize * 8}")
    width = exact.itemsize // 4
    wholes = zip(range(2, 2 + 5 * width, width), (key, key, exact, real, real), strict=True)
    figures = [from_words(words[..., at : at + width], kind)[..., 0] for at, kind in wholes]
    low, high, shift, mean, square = figures
    exponent = words[..., 1].astype(bit_pattern(mean).dtype)
    parts = (words[..., 0].astype(real), shift, exponent, mean, square)
    first, last = _limits(key)
    low, high = (jnp.where(parts[0] > 0, x, x0) for x, x0 in ((low, last), (high, first)))
    none = (last, first, *(np.array(0, x.dtype) for x in parts))
    axis = words.ndim - 2
    low, high, *part = lax.reduce((low, high, *parts), none, _merge_extremes_and_parts, (axis,))
    some = low <= high
    ends = [jnp.where(some, from_keys(x, exact), jnp.zeros((), exact)) for x in (low, high)]
    shift, *sums = sums_of_part(part)
    return [*ends, shift], sums


def _merge_extremes_and_parts(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
    low, high = jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])
    return low, high, *merge_parts(a[2:], b[2:])


def power_of_two(biased: jax.Array, real: Any) -> jax.Array:
    """2 to an exponent, which is biased as in a float of this dtype; 0 for 0."""
    return lax.bitcast_convert_type(biased << _float_layout(real)[0], real)


def _float_layout(real: object) -> tuple[int, int]:
    """The bits of a float's fraction, and the bias of its exponent."""
    return (52, 1023) if real == np.float64 else (23, 127)
