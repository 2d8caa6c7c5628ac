"""The bins in which a summary counts values, and the figures of values known only by bin.

A bin's number is the upper 12 bits of a float32. Only this file decides which bins are shown: of a
summary, of a quantity over the steps, of all sparklines of a frame. Invariant: a figure lies within
the range that the values are known to have. Imports NumPy only.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

MANTISSA: Final = 3
"""Bits of a float32's mantissa in the number of its bin, after the sign and the exponent."""
LOW_BITS: Final = 23 - MANTISSA
"""Bits of a float32 that its bin leaves out."""
BINS: Final = 1 << 32 - LOW_BITS
"""The number of bins: one for each value of a float32's upper 12 bits."""

QUANTILE_ERROR: Final = 0.0625
"""The largest relative error of a quantile of values that are normal float32 numbers.

A bin's edges are at most a factor of 1.125 apart, so their harmonic mean is within 1/17 of every
value between them (Masson, Rim and Lee 2019, "DDSketch: A fast and fully-mergeable quantile sketch
with relative-error guarantees", VLDB 12(12), lemma 2). The difference to 1/16 leaves room for
rounding wider dtypes to the float32 that selects their bin.
"""
WITHIN: Final = f"{100 * QUANTILE_ERROR:g} %"
"""The same, as it is shown."""
SUBNORMAL_ERROR: Final = 2.0**-126
"""The largest absolute error of a quantile below this, the smallest normal float32."""

SIGN: Final = BINS // 2
"""The bit of a bin's number that is set for negative values."""
# No finite float32 has these bins; a summary uses them for values that are counted separately.
POSINF_BIN: Final = 0xFF << MANTISSA
ZERO_BIN, OPAQUE_BIN, NAN_BIN = POSINF_BIN + 1, POSINF_BIN + 2, SIGN - 1
UNSEEN_BIN: Final = POSINF_BIN + 3
"""Counts the nonzero finite values that are not in the sample, and hence in no other bin."""
NEGINF_BIN, MINUS_ZERO_BIN = SIGN | POSINF_BIN, SIGN | ZERO_BIN
FINITE_BINS: Final = np.arange(BINS) & POSINF_BIN != POSINF_BIN
"""Which bins count finite values, zeros and those unseen included, bool[4096]."""
FINITE_BINS[[ZERO_BIN, MINUS_ZERO_BIN, UNSEEN_BIN]] = True
VALUE_ORDER: Final = np.concatenate(
    [np.arange(NEGINF_BIN - 1, SIGN - 1, -1), np.arange(POSINF_BIN)]
)
"""The 4080 bins of nonzero finite values, the most negative first."""
RANK_OF_BIN: Final = np.full(BINS, -1)
"""The index of each bin in `VALUE_ORDER`, int[4096]; that of the subnormals for zeros, else -1."""
RANK_OF_BIN[VALUE_ORDER] = np.arange(len(VALUE_ORDER))
RANK_OF_BIN[[MINUS_ZERO_BIN, ZERO_BIN]] = RANK_OF_BIN[[SIGN, 0]]
NONZERO: Final = np.isin(np.arange(BINS), VALUE_ORDER)
"""Which bins hold nonzero finite values, bool[4096]."""

Scale = Literal["linear", "symlog"]

FAINT: Final = 2.0**-200
"""Below this, slopes of counts over values would overflow."""
SMALLEST_NORMAL: Final = 2.0**-126
"""The smallest normal float32."""
_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.intp]
_Int64s = npt.NDArray[np.int64]


class Binned(NamedTuple):
    """The finite values of one or more rows, by bin.

    Attributes:
        bins: int[k], the bins in use in any row, in value order; zeros are with the subnormals.
        counts: float64[rows, k].
        low: float64[rows], the smallest value of each row, or a lower bound.
        high: float64[rows], the largest value of each row, or an upper bound.
    """

    bins: _Ints
    counts: _Floats
    low: _Floats
    high: _Floats


class Ragged(NamedTuple):
    """The finite values of several rows by bin, in value order; each row has its own bins.

    Attributes:
        at: int[k], the row of each bin in use, ascending.
        start: int[rows + 1], where each row's bins begin.
        counts: float64[k].
        below: float64[k], how many values of the row are in this bin or in lower ones.
        lower: float64[k], the lower edge of each bin, clipped to the range of its row.
        upper: float64[k], the upper edge of each bin, clipped to the range of its row.
        low: float64[rows], the smallest value of each row, or a lower bound.
        high: float64[rows], the largest value of each row, or an upper bound.
    """

    at: _Int64s
    start: _Int64s
    counts: _Floats
    below: _Floats
    lower: _Floats
    upper: _Floats
    low: _Floats
    high: _Floats


@functools.cache
def bin_edges() -> _Floats:
    """The lower and upper edge of every bin, float64[4096, 2], in the values' unit. Read-only.

    The 16 bins that no finite float32 has, including those of the zeros, have NaN. The largest
    finite bin ends at 2**128, but also counts the values of wider dtypes beyond.

    Example:
        >>> bin_edges()[0x3F8].tolist()  # 0x3F80_0000 is 1.0
        [1.0, 1.125]
    """
    index = np.arange(SIGN)
    steps = 1 << MANTISSA
    exponent, mantissa = index >> MANTISSA, index & (steps - 1)
    normal = np.ldexp(1.0 + mantissa / steps, exponent - 127)
    start = np.where(exponent == 0, np.ldexp(mantissa / steps, -126), normal)
    width = np.ldexp(1.0 / steps, np.maximum(exponent, 1) - 127)
    positive = np.stack([start, start + width], axis=1)
    positive[POSINF_BIN:] = np.nan
    edges = np.concatenate([positive, -positive[:, ::-1]])
    edges.setflags(write=False)
    return edges


def spread_unseen(
    rows: _Ints, bins: _Ints, counts: npt.ArrayLike, low: _Floats, high: _Floats
) -> tuple[_Ints, _Ints, _Floats]:
    """(row, bin, count) with the values that only `UNSEEN_BIN` counts added to the other bins.

    They are spread in proportion to the row's sampled nonzero values; without any, over the bins of
    `low` and `high`, the row's smallest and largest value, float64[rows].

    Example:
        >>> row, entries = np.zeros(3, int), np.array([5, 6, UNSEEN_BIN])
        >>> spread_unseen(row, entries, [1, 3, 8], np.zeros(1), np.ones(1))[2].tolist()
        [3.0, 9.0]
    """
    counts = np.asarray(counts, np.float64)
    missing = bins == UNSEEN_BIN
    if not missing.any():
        return rows, bins, counts
    many = len(low)
    unseen = np.bincount(rows[missing], counts[missing], many)
    sampled = NONZERO[bins]
    seen = np.bincount(rows[sampled], counts[sampled], many)
    factor = 1.0 + unseen / np.where(seen > 0, seen, np.inf)
    counts = np.where(sampled, counts * factor[rows], counts)
    nowhere = np.flatnonzero((unseen > 0) & (seen == 0) & ~np.isnan(low))
    ends = np.concatenate([bin_of(low[nowhere]), bin_of(high[nowhere])])
    keep = ~missing
    return (
        np.concatenate([rows[keep], nowhere, nowhere]),
        np.concatenate([bins[keep], ends]),
        np.concatenate([counts[keep], *[unseen[nowhere] / 2] * 2]),
    )


def bin_of(values: _Floats) -> _Ints:
    """The bins of finite values.

    Example:
        >>> bin_of(np.array([1.0, -1.0])).tolist()
        [1016, 3064]
    """
    top = np.finfo(np.float32).max
    single = np.clip(values, -top, top).astype(np.float32)
    return (single.view(np.uint32) >> LOW_BITS).astype(np.intp)


def pool(bins: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The bins of several parts together, uint64[4096], from uint64[parts, 4096].

    A part whose sample is a smaller share of its values counts for more, so the pooled histogram
    does not favour the parts that were sampled more. Its size reflects its precision.

    Example:
        >>> parts = np.zeros((2, BINS), np.uint64)
        >>> parts[0, 5], parts[1, 6], parts[1, UNSEEN_BIN] = 10, 10, 90
        >>> pool(parts)[[5, 6, UNSEEN_BIN]].tolist()
        [1, 11, 98]
    """
    total = bins.sum(axis=0, dtype=np.uint64)
    if not total[UNSEEN_BIN]:
        return total
    sampled = bins[:, VALUE_ORDER].astype(np.float64)
    seen = sampled.sum(axis=1)
    some = seen > 0
    seen, sampled = seen[some], sampled[some]
    all_of = seen + bins[some, UNSEEN_BIN].astype(np.float64)
    size = all_of.sum() ** 2 / (all_of**2 / seen).sum() if some.any() else 0.0
    reached = np.cumsum((sampled * (all_of / seen)[:, None]).sum(axis=0))
    reached = np.rint(reached * (size / max(all_of.sum(), 1.0))).astype(np.uint64)
    nonzero = total[VALUE_ORDER].sum() + total[UNSEEN_BIN]
    total[VALUE_ORDER] = np.diff(reached, prepend=np.uint64(0))
    total[UNSEEN_BIN] = nonzero - reached[-1]
    return total


def tabulate(rows: _Ints, bins: _Ints, counts: npt.ArrayLike, many: int) -> tuple[_Ints, _Floats]:
    """`bins` and `counts` of a `Binned` of `many` rows from (row, bin, count), in any order.

    Example:
        >>> used, counts = tabulate(np.array([1, 1]), np.array([ZERO_BIN, NAN_BIN]), [5, 7], 2)
        >>> used.tolist(), counts.tolist()
        ([0], [[0.0], [5.0]])
    """
    ranks = RANK_OF_BIN[bins]
    finite = ranks >= 0
    ranks = ranks[finite]
    used = np.zeros(len(VALUE_ORDER), bool)
    used[ranks] = True
    width = int(used.sum())
    at = rows[finite] * width + (np.cumsum(used) - 1)[ranks]
    weights = np.asarray(counts, np.float64)[finite]
    flat: _Floats = np.bincount(at, weights, minlength=many * width).astype(np.float64)
    return VALUE_ORDER[used], flat.reshape(many, width)


def quantiles(binned: Binned, fractions: _Floats) -> _Floats:
    """The order statistics number floor(fraction * (count - 1)) of each row, [rows, fractions].

    For the precision see `Summary.quantile`. NaN for a row without values.
    """
    bins, counts, low, high = binned
    if not len(bins):
        return np.full((len(counts), len(fractions)), np.nan)
    lowest, highest = low[:, None], high[:, None]
    below = np.cumsum(counts, axis=1)
    total = np.rint(below[:, -1:])  # counts scaled up from a sample are not whole
    rank = np.floor(fractions * (total - 1))
    at = np.stack([np.searchsorted(b, r, side="right") for b, r in zip(below, rank, strict=True)])
    at = np.minimum(at, len(bins) - 1)
    lower, upper = clipped_edges(bins[at], lowest, highest)
    # The harmonic mean of a and b has the same relative distance from both.
    with np.errstate(all="ignore"):
        middle = np.where(lower == upper, lower, lower / (lower / 2 + upper / 2) * upper)
    crossing = (lower <= 0) & (upper >= 0)  # zeros and subnormals
    middle = np.where(crossing, np.clip(0.0, lowest, highest), middle)
    # Values of wider dtypes beyond float32 share a bin, which gives them no relative precision.
    middle[(lower < -(2.0**128)) | (upper > 2.0**128)] = np.nan
    found = np.where(rank == 0, lowest, np.where(rank == total - 1, highest, middle))
    return np.where(total > 0, found, np.nan)


def ragged(binned: Binned) -> Ragged:
    """The same values as `Ragged`, in which each row has all the bins."""
    bins, counts, low, high = binned
    many, width = counts.shape
    lower, upper = clipped_edges(bins, low[:, None], high[:, None])
    at, start = np.repeat(np.arange(many), width), np.arange(many + 1) * width
    below = np.cumsum(counts, axis=1)
    return Ragged(at, start, counts.ravel(), below.ravel(), lower.ravel(), upper.ravel(), low, high)


def rebin(ragged: Ragged, edges: _Floats) -> _Floats:
    """The counts of each row between ascending `edges`, [rows, intervals].

    Each bin is spread evenly over its part within the row's range. Values outside the edges are
    counted in the outermost intervals. Edges are the same for all rows, or one set for each row.
    """
    return np.maximum(np.diff(_counts_below(ragged, edges), axis=1), 0.0)  # rounding only


def rebin_whole(ragged: Ragged, edges: _Floats) -> _Int64s:
    """Like `rebin`, in whole numbers that add up to the row's count, [rows, intervals].

    The number of values below an edge is rounded, so bins that the edge does not cut are counted
    exactly. If the edges span the row's range, the first interval has the smallest value and the
    last one the largest.
    """
    reached = np.rint(_counts_below(ragged, edges))
    total = reached[:, -1:]
    at_ends = (edges[..., 0] == ragged.low) & (edges[..., -1] == ragged.high) & (total[:, 0] > 1)
    inner = reached[at_ends, 1:-1]
    reached[at_ends, 1:-1] = np.clip(inner, 1.0, total[at_ends] - 1.0)
    return np.diff(np.maximum.accumulate(reached, axis=1).astype(np.int64), axis=1)


def _counts_below(ragged: Ragged, edges: _Floats) -> _Floats:
    """The number of values of each row below each edge, [rows, edges]."""
    edges = np.broadcast_to(edges, (len(ragged.low), edges.shape[-1]))
    reached = np.zeros(edges.shape)
    if not len(ragged.at):
        return reached
    # a value on an edge belongs to the interval above it; slopes of faint values would overflow
    faint = np.maximum(-edges[:, 0], edges[:, -1]) < FAINT
    scale = np.where(faint, 2.0**900, 1.0)
    inner = np.nextafter(edges[:, 1:-1], -np.inf) * scale[:, None]
    value, below = np.empty((2, 2 * len(ragged.at)))  # at both edges of every bin
    value[0::2], value[1::2] = ragged.lower * scale[ragged.at], ragged.upper * scale[ragged.at]
    steep = value[1::2] - value[0::2] < FAINT**4
    value[1::2] = np.where(steep, value[0::2], value[1::2])
    below[0::2], below[1::2] = ragged.below - ragged.counts, ragged.below
    ends = (2 * ragged.start).tolist()
    for row, x, begin, end in zip(reached, inner, ends[:-1], ends[1:], strict=True):
        row[1:-1] = np.interp(x, value[begin:end], below[begin:end])
    reached[:, -1] = ragged.below[ragged.start[1:] - 1]
    return reached


def histogram_edges(ragged: Ragged, bins: int, scale: Scale) -> _Floats:
    """Rising edges from the smallest value of each row to its largest, float64[rows, bins + 1].

    "symlog" is even in asinh(value / threshold), with 70 % of the nonzero values below the
    threshold. If there is only one value, the edges lie around it.
    """
    low, high = ragged.low, ragged.high
    edges = 2.0 * even_edges(low / 2, high / 2, bins)  # of the halves: the range may overflow
    thresholds = _thresholds(ragged) if scale == "symlog" else np.full(len(low), np.nan)
    bent = np.flatnonzero(~np.isnan(thresholds))
    ends = zip(low[bent].tolist(), high[bent].tolist(), thresholds[bent].tolist(), strict=True)
    even = np.array([(math.asinh(a / t), math.asinh(b / t)) for a, b, t in ends]).reshape(-1, 2)
    with np.errstate(over="ignore"):
        edges[bent] = np.sinh(even_edges(even[:, 0], even[:, 1], bins)) * thresholds[bent, None]
    edges[:, 0], edges[:, -1] = low, high
    edges = np.minimum(np.maximum(edges, low[:, None]), high[:, None])
    # one value, or a range too narrow for so many edges: an axis around it
    narrow = np.flatnonzero(~(edges[:, 1:] > edges[:, :-1]).all(axis=1))
    low, high = low[narrow], high[narrow]
    margin = np.maximum(np.abs(low), np.abs(high)) / 16
    margin = np.where(margin == 0, 0.5, margin)
    largest = sys.float_info.max
    with np.errstate(over="ignore"):
        low, high = np.maximum(low - margin, -largest), np.minimum(high + margin, largest)
    edges[narrow] = 2.0 * even_edges(low / 2, high / 2, bins)
    return edges


def even_edges(low: npt.ArrayLike, high: npt.ArrayLike, bins: int) -> _Floats:
    """Like np.linspace along a new last axis, in a third of the time."""
    start, stop = np.asarray(low)[..., None], np.asarray(high)[..., None]
    return np.arange(bins + 1, dtype=np.float64) * ((stop - start) / bins) + start


@functools.cache
def _unbounded_edges() -> tuple[_Floats, _Floats]:
    """The lower and upper edges of every bin; infinite for wider dtypes in the outermost ones."""
    lower, upper = bin_edges().T.copy()
    lower[0xFF7], upper[0x7F7] = -np.inf, np.inf
    return lower, upper


def clipped_edges(bins: _Ints, low: _Floats, high: _Floats) -> tuple[_Floats, _Floats]:
    """The lower and upper edges of bins, clipped to the range of their row."""
    lower, upper = (np.minimum(np.maximum(reach[bins], low), high) for reach in _unbounded_edges())
    return lower, upper


def running_sums(values: _Floats, start: _Ints, at: _Ints) -> _Floats:
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return sums[1:] - sums[start[:-1]][at]


def _thresholds(ragged: Ragged) -> _Floats:
    """Where a symlog axis turns linear; NaN for a row of zeros and subnormals only."""
    at, start = ragged.at, ragged.start
    magnitude = np.maximum(-ragged.lower, ragged.upper)
    order = np.lexsort((magnitude, at))
    rising = magnitude[order]
    normal = rising >= SMALLEST_NORMAL
    below = running_sums(np.where(normal, ragged.counts[order], 0.0), start, at)
    before = ~normal | (below < 0.7 * below[start[1:] - 1][at])
    many = len(ragged.low)
    tenths = start[:-1] + np.bincount(at, before, minlength=many).astype(np.int64)
    faint = np.bincount(at, normal, minlength=many) == 0
    largest = rising[start[1:] - 1]
    # so that asinh does not overflow
    found = np.maximum(rising[np.where(faint, start[:-1], tenths)], largest * 1e-30)
    return np.where(faint, np.nan, found)
