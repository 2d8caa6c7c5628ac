"""Makes the Summary of an array on the device, and merges summaries there.

Works eagerly and inside jit, vmap, scan and grad, for every dtype, without raising and without
being differentiated. Invariant: a value that cannot be measured is NaN or counted separately, never
guessed. `array_stats` reads the array, and `summary` the figures.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import AbstractToken, Token

from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.jit import is_tracer
from nnx_inspector._compat.sharding import auto_sharded
from nnx_inspector.stats.arithmetic import (
    is_floating,
    merge_about_mean,
    move_shift,
    points_dtype,
    real_values,
    scale_for,
    scaled_difference,
    sum_dtype,
)
from nnx_inspector.stats.array_stats import Sample, array_stats, array_stats_unreduced, from_parts
from nnx_inspector.stats.bins import BINS, FINITE_BINS, NAN_BIN, OPAQUE_BIN
from nnx_inspector.stats.summary import Summary
from nnx_inspector.stats.unreduced import Unreduced
from nnx_inspector.typing import PyTree, Value

jax.tree_util.register_dataclass(
    Summary, data_fields=("bins", "points", "sums"), meta_fields=("opaque",)
)

_LARGEST: Final = 2**32 - 1
_BY_NAME_ONLY: Final = frozenset(["int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"])
"""Dtypes that jax names but XLA does not compile."""


@internal_config()
def summarize(
    x: Value, *, batch_rank: int = 0, sample: Sample = "auto", where: Value = None
) -> Summary:
    """Measure the counts, moments and histogram of an array.

    Counts, extremes, mean and standard deviation cover all values; the histogram covers a sample of
    a large array. Moments are sums about the sample's mean, so that the variance does not cancel
    (Chan, Golub and LeVeque 1983), in units of a power of two, so that nothing overflows. Sums are
    float32 (float64 for 64-bit dtypes), added in XLA's own tree. XLA's CPU arithmetic treats
    subnormals as 0 in the moments; counts, min, max and bins include them.

    Args:
        x: an array of any dtype, a tracer, a NumPy array or a Python number. NumPy arrays of 64-bit
            dtypes are summarised in 64 bits whatever `jax_enable_x64` is. Complex values are
            summarised by magnitude (below the smallest normal number, by the larger part). PRNG
            keys, float0 and tokens have only `size` and `opaque`, which names dtype and shape.
        batch_rank: the number of leading axes that become rows; the others are reduced.
        sample: which values the histogram counts. "auto" counts up to 65,536 values in full, and at
            least that many of a larger array: evenly spaced slices along every axis that is long
            enough. 1 counts all; k > 1 counts every k-th slice along one axis before the last, if
            it has 8 k indices or more. The slices do not depend on the values, so the histogram may
            miss a pattern that repeats at their distance, or a few unusual tokens or units.
            `Summary.rank_error` bounds the error of a quantile's rank if slices are exchangeable.
        where: True for the values that count, bool, of as many axes as `x`, each as long or of
            length 1. None for all. Of the others nothing is counted, not even their number.

    Returns:
        A Summary whose rows are the first `batch_rank` axes, with uint32 counts that saturate at
        2**32 - 1.

    Raises:
        TypeError: `x` is not an array of numbers (but of strings or Python objects, for example).
        ValueError: `x` has fewer than `batch_rank` axes, or `sample` is neither "auto" nor a whole
            number from 1.

    Example:
        >>> summarize(jnp.array([1.0, 3.0, jnp.nan])).mean
        2.0
    """
    if where is None or is_token(x) or is_opaque((x := as_array(x)).dtype):
        return _measure_with(x, batch_rank, sample, _summarize)
    if x.ndim == batch_rank:
        where = jnp.expand_dims(where, -1)
    return _measure_with(x, batch_rank, sample, functools.partial(_summarize_where, where))


@internal_config()
def summarize_unreduced(
    x: object, *, batch_rank: int = 0, sample: Sample = "auto"
) -> Summary | Unreduced:
    """As `summarize` within a program, but what several devices have found may be apart still."""
    return _measure_with(x, batch_rank, sample, _summarize_unreduced)


def _measure_with(
    x: Value, batch_rank: int, sample: Sample, measure: Callable[..., PyTree]
) -> PyTree:
    if is_token(x):
        return _opaque_summary((), 0, np.dtype(np.float32), "token")
    x = as_array(x)
    if not 0 <= batch_rank <= x.ndim:
        raise ValueError(f"batch_rank={batch_rank} does not fit an array of shape {x.shape}.")
    if sample != "auto" and not (isinstance(sample, int) and sample >= 1):
        raise ValueError(
            f'sample must be "auto" or a whole number from 1, got {sample!r}: the histogram counts '
            'at least 65,536 values with "auto", all with 1, about an eighth of them with 8.'
        )
    rows, n = x.shape[:batch_rank], math.prod(x.shape[batch_rank:])
    dtype = x.dtype
    if is_opaque(dtype):
        said = type_text(dtype, x.shape[batch_rank:])
        return _opaque_summary(rows, n, np.dtype(np.float32), said)
    if not is_number(dtype):
        raise TypeError(
            f"Cannot summarise an array of dtype {dtype} and shape {x.shape}: jax has no such "
            "dtype of numbers. Convert it first."
        )
    if n == 0 or math.prod(rows) == 0:
        return _opaque_summary(rows, 0, points_dtype(dtype))
    if x.ndim == batch_rank:
        x = x.reshape(*x.shape, 1)
    if isinstance(x, np.ndarray) and dtype.itemsize >= 8 and dtype != np.complex64:
        with jax.enable_x64(True):  # or jax would cut it to 32 bits
            return measure(x, batch_rank=batch_rank, sample=sample)
    return measure(lax.stop_gradient(x), batch_rank=batch_rank, sample=sample)


def mask_shape(mask: tuple[int, ...], x: Value) -> tuple[int, ...] | None:
    """The shape that a mask of positions takes beside an array; None if it does not fit.

    Its axes are the first of the array's, each as long or of length 1. Of floats the last axis is
    that of the units, which no mask has. Beside the pattern of an attention, [batch, heads,
    queries, keys], the axes of a mask [batch, positions] are those of the examples and queries.

    Example:
        >>> mask_shape((8, 16), jnp.ones((8, 16, 32)))
        (8, 16, 1)
        >>> mask_shape((8, 16), jnp.ones((8, 4, 16, 16)))
        (8, 1, 16, 1)
        >>> mask_shape((8, 16), jnp.ones((8, 16))) is None
        True
    """
    shape, rank = x.shape, len(x.shape) - jnp.issubdtype(x.dtype, jnp.inexact)

    def fits(lengths: tuple[int, ...]) -> bool:
        return all(n in (1, m) for n, m in zip(mask, lengths, strict=True))

    if len(mask) == 2 and len(shape) == 4 and mask[1] == shape[-2] == shape[-1]:
        return (mask[0], 1, mask[1], 1) if fits((shape[0], shape[2])) else None
    if mask and (len(mask) > rank or not fits(shape[: len(mask)])):
        return None
    return (*mask, *[1] * (len(shape) - len(mask)))


@internal_config()
def merge_in_trace(a: Summary, b: Summary) -> Summary:
    """The summary of the values of both, row by row, for loops under jit; fit for a loop's carry.

    Counts stop at 2**32 - 1 instead of wrapping, which makes the result unreadable
    (`Summary.saturated`); `nnx_inspector.stats.summary.merge` has no such limit.

    Raises:
        ValueError: rows or dtypes differ.

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
    return _merge_both(a, b)


@internal_config()
def merge_rows(s: Summary) -> Summary:
    """A summary whose rows along the first axis are merged into one, inside jit.

    Rows may lie on different devices, which exchange only counts and six numbers for each row.
    Counts stop at 2**32 - 1, as in `merge_in_trace`.

    Example:
        >>> merge_rows(summarize(jnp.arange(6.0).reshape(3, 2), batch_rank=1)).mean
        2.5
    """
    return _merge_rows(s)


def as_array(x: object) -> Value:
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


def type_text(dtype: object, shape: tuple[int, ...]) -> str:
    """Dtype and shape as text, `"float32[8,10]"`."""
    name = "float0" if dtype == jax.dtypes.float0 else dtype
    return f"{name}[{','.join(map(str, shape))}]"


def is_token(x: Value) -> bool:
    """Whether this is a token, which orders effects and has neither shape nor dtype."""
    return isinstance(x, Token) or (is_tracer(x) and isinstance(x.aval, AbstractToken))


def _opaque_summary(
    rows: tuple[int, ...], size: int, exact: np.dtype[Any], opaque: str = ""
) -> Summary:
    """The summary of `size` opaque values in each row."""
    with jax.enable_x64(exact.itemsize == 8 or jax.config.read("jax_enable_x64")):
        points, sums = jnp.zeros((*rows, 3), exact), jnp.zeros((*rows, 3), sum_dtype(exact))
    bins = jnp.zeros((*rows, BINS), jnp.uint32).at[..., OPAQUE_BIN].set(min(size, _LARGEST))
    return Summary(bins=bins, points=points, sums=sums, opaque=opaque)


@functools.partial(jax.jit, static_argnames=("batch_rank", "sample"))
def _summarize(x: jax.Array, *, batch_rank: int, sample: Sample) -> Summary:
    measure = functools.partial(array_stats, batch_rank=batch_rank, sample=sample)
    bins, points, sums = auto_sharded(measure, x)
    return Summary(bins=bins, points=points, sums=sums)


@functools.partial(jax.jit, static_argnames=("batch_rank", "sample"))
def _summarize_where(where: object, x: jax.Array, *, batch_rank: int, sample: Sample) -> Summary:
    """The others become NaN, which no figure counts but the number of NaN."""

    def measure(x: jax.Array, where: jax.Array) -> tuple[jax.Array, ...]:
        value, where = real_values(x), jnp.broadcast_to(where, x.shape)
        axes = tuple(range(batch_rank, x.ndim))
        real = value if is_floating(value) else value.astype(np.float32)  # of the same bins
        counted = jnp.where(where, real, jnp.nan)
        bins, points, sums = array_stats(counted, batch_rank=batch_rank, sample=sample)
        others = jnp.sum(~where, axes, dtype=jnp.uint32)
        bins = bins.at[..., NAN_BIN].add(-others)
        if not is_floating(value):
            points, sums = _moments_of_integers(value, where, axes)
        return bins, points, sums

    bins, points, sums = auto_sharded(measure, x, where)
    return Summary(bins=bins, points=points, sums=sums)


def _moments_of_integers(
    value: jax.Array, where: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """The points and sums of the integers that count; float32 could not hold them."""
    along, real = functools.partial(jnp.expand_dims, axis=axes), sum_dtype(value.dtype)
    info = np.iinfo(value.dtype)
    least, most = np.array([info.min, info.max], value.dtype)
    some, none = where.any(axes), np.zeros((), value.dtype)
    low = jnp.where(some, jnp.where(where, value, most).min(axes), none)
    high = jnp.where(some, jnp.where(where, value, least).max(axes), none)
    many = jnp.maximum(where.sum(axes, dtype=real), 1)
    off = jnp.where(where, scaled_difference(value, along(low), 1), 0)
    shift = move_shift(low, (off / along(many)).sum(axes), low, high)
    halves = [scaled_difference(end, shift, 0.5) for end in (high, low)]
    scale, factor = scale_for(*halves)
    d = jnp.where(where, scaled_difference(value, along(shift), along(factor)), 0)
    points = jnp.stack([low, high, shift], axis=-1)
    return points, jnp.stack([scale, d.sum(axes), (d * d).sum(axes)], axis=-1)


@functools.partial(jax.jit, static_argnames=("batch_rank", "sample"))
def _summarize_unreduced(x: jax.Array, *, batch_rank: int, sample: Sample) -> Unreduced:
    measure = functools.partial(array_stats_unreduced, batch_rank=batch_rank, sample=sample)
    return Unreduced(auto_sharded(measure, x), _Finish(points_dtype(x.dtype)))


@dataclasses.dataclass(frozen=True)
class _Finish:
    exact: np.dtype[Any]

    def __call__(self, words: jax.Array) -> Summary:
        bins, points, sums = from_parts(words, self.exact)
        return Summary(bins=bins, points=points, sums=sums)


_MOST_ADDED: Final = 2**16
"""The most halves of counts whose sum is below 2**32."""


@jax.jit
def _merge_rows(s: Summary) -> Summary:
    return auto_sharded(_merge_first_axis, s)


@jax.jit
def _merge_both(a: Summary, b: Summary) -> Summary:
    def merged(a: Summary, b: Summary) -> Summary:
        return _merge_first_axis(jax.tree.map(lambda *both: jnp.stack(both), a, b))

    return auto_sharded(merged, a, b)


def _merge_first_axis(s: Summary) -> Summary:
    bins = sum_saturating(s.bins)
    points, sums = (jnp.moveaxis(jnp.moveaxis(x, 0, -2), -1, 0) for x in (s.points, s.sums))
    finite = jnp.where(FINITE_BINS, s.bins, 0).astype(s.sums.dtype).sum(axis=-1)
    finite = jnp.moveaxis(finite, 0, -1)
    merged = [jnp.stack(x, axis=-1) for x in merge_about_mean(points, sums, finite, axis=-1)]
    return Summary(bins=bins, points=merged[0], sums=merged[1], opaque=s.opaque)


def sum_saturating(counts: jax.Array) -> jax.Array:
    """The sum of counts along the first axis, uint32; 2**32 - 1 if it is larger.

    Of plain sums, because between devices XLA reduces by nothing else.
    """
    if len(counts) > _MOST_ADDED:
        parts = jnp.array_split(counts, -(-len(counts) // _MOST_ADDED))
        counts = jnp.stack(list(map(sum_saturating, parts)))
    add = functools.partial(jnp.sum, axis=0, dtype=jnp.uint32)
    upper, lower = add(counts >> 16), add(counts & 0xFFFF)
    upper = upper + (lower >> 16)
    return jnp.where(upper > 0xFFFF, jnp.uint32(_LARGEST), (upper << 16) | (lower & 0xFFFF))
