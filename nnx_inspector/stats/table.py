"""The figures and sparklines of many recorded summaries at once, for a frame of the screen.

Invariant: each figure is the one that `Summary` gives, for counts that add up to less than 2**53.
If a count has stopped at its largest value, only the extremes are known, and all else is NaN.
Computes over all summaries at once: one by one would take twenty times as long.
Imports NumPy only.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

import numpy as np
import numpy.typing as npt

from nnx_inspector.stats.bins import (
    FINITE_BINS,
    MINUS_ZERO_BIN,
    NAN_BIN,
    NEGINF_BIN,
    NONZERO,
    POSINF_BIN,
    RANK_OF_BIN,
    VALUE_ORDER,
    ZERO_BIN,
    Ragged,
    clipped_edges,
    histogram_edges,
    rebin,
    rebin_whole,
    running_sums,
    spread_unseen,
)
from nnx_inspector.stats.encoding import Sparse, as_floats
from nnx_inspector.stats.moments import MAXIMUM, MINIMUM, SCALE, SHIFT, SUM1, SUM2
from nnx_inspector.stats.summary import STATISTICS

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
_COUNTED: Final = np.where(NONZERO, 6, 5 * ~FINITE_BINS)
"""Where the count of each bin is added."""
_COUNTED[[ZERO_BIN, MINUS_ZERO_BIN, NAN_BIN, POSINF_BIN, NEGINF_BIN]] = 1, 1, 2, 3, 4


def stats_of(found: Sparse) -> _Floats:
    """The figures of each summary, float64[rows, STATISTICS].

    Example:
        >>> from nnx_inspector.stats.encoding import decode, encode
        >>> from nnx_inspector.stats.summary import empty
        >>> stats_of(decode(encode([empty()])))[0, :2].tolist()
        [0.0, nan]
    """
    points, sums = as_floats(found.kinds, found.points), found.sums
    totals = np.zeros((len(points), 7), np.uint64)  # whole numbers: exact
    np.add.at(totals.reshape(-1), found.rows * 7 + _COUNTED[found.bins], found.counts)
    size, (zeros, nan, posinf, neginf, opaque, seen) = totals.sum(axis=1), totals.T[1:]
    finite = (size - nan - posinf - neginf - opaque).astype(np.float64)
    some = finite > 0
    low = np.where(some, points[:, MINIMUM], np.nan)
    high = np.where(some, points[:, MAXIMUM], np.nan)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        first = sums[:, SUM1] / finite
        mean = points[:, SHIFT] + sums[:, SCALE] * first
        mean = np.where(np.isnan(mean), mean, np.fmin(np.fmax(mean, low), high))
        variance = sums[:, SUM2] / finite - first * first
        std = np.where(variance <= 0, 0.0, sums[:, SCALE] * np.sqrt(np.maximum(variance, 0.0)))
    mean, std = np.where(some, mean, np.nan), np.where(some, std, np.nan)
    # math's and NumPy's differ in the last bit
    root = np.array([math.hypot(m, s) for m, s in zip(mean.tolist(), std.tolist(), strict=True)])
    by_name = {
        "size": size,
        "mean": mean,
        "std": std,
        "min": low,
        "max": high,
        "norm": root * np.sqrt(finite),
        "zeros": zeros,
        "nan": nan,
        "posinf": posinf,
        "neginf": neginf,
        "seen": seen,
    }
    table = np.stack([np.asarray(by_name[name], np.float64) for name in STATISTICS], axis=1)
    unknown = np.array([name not in ("min", "max") for name in STATISTICS])
    table[found.saturated[:, None] & unknown] = np.nan
    return table


def sparklines_of(found: Sparse, heights: int) -> npt.NDArray[np.uint8]:
    """The `Summary.sparkline` of each summary, uint8[rows, heights]; zeros if nothing is known.

    Example:
        >>> from nnx_inspector.stats.encoding import decode, encode
        >>> from nnx_inspector.stats.summary import empty
        >>> sparklines_of(decode(encode([empty()])), 3).tolist()
        [[0, 0, 0]]
    """
    lines = np.zeros((len(found.kinds), heights), np.uint8)
    known, values = values_of(found)
    if not len(known):
        return lines
    counts = rebin_whole(values, histogram_edges(values, heights, "symlog"))
    highest = counts.max(axis=1, keepdims=True).astype(np.float64)
    scaled = np.ceil(counts * (255 / np.maximum(highest, 1.0)))
    lines[known] = np.minimum(scaled, 255).astype(np.uint8)
    return lines


def histograms_of(found: Sparse, bins: int) -> tuple[_Ints, _Floats, _Ints]:
    """The `Summary.histogram` of each summary that has one.

    Returns:
        The rows with any finite value and known counts, int64[n]; float64[n, bins + 1], their
        edges; and int64[n, bins], their counts.

    Example:
        >>> from nnx_inspector.stats.encoding import decode, encode
        >>> from nnx_inspector.stats.summary import empty
        >>> [len(part) for part in histograms_of(decode(encode([empty()])), 3)]
        [0, 0, 0]
    """
    known, values = values_of(found)
    if not len(known):
        return known, np.zeros((0, bins + 1)), np.zeros((0, bins), np.int64)
    edges = histogram_edges(values, bins, "linear")
    return known, edges, rebin_whole(values, edges)


@dataclasses.dataclass(frozen=True)
class Cast:
    """A dtype that values may be rounded to, to the nearest, as jax rounds.

    Attributes:
        zero: half its smallest number: smaller values become 0.
        normal: its smallest normal number: below it, each halving loses a bit.
        beyond: its largest number and half a step: values from there on become Inf, or NaN.
        largest: its largest number.
    """

    zero: float
    normal: float
    beyond: float
    largest: float


_FAINTEST: Final = 2.0**-129
_ROUNDING: Final = 1e-12
"""A share below this is what counts that were divided and added again are off by."""
CASTS: Final = {
    "bfloat16": Cast(2.0**-134, 2.0**-126, (2 - 2.0**-8) * 2.0**127, (2 - 2.0**-7) * 2.0**127),
    "float16": Cast(2.0**-25, 2.0**-14, 65520.0, 65504.0),
    "float8_e4m3fn": Cast(2.0**-10, 2.0**-6, 464.0, 448.0),
    "float8_e5m2": Cast(2.0**-17, 2.0**-14, 61440.0, 57344.0),
}


def casts_of(found: Sparse, cast: Cast, *, scaled: bool = False) -> _Floats:
    """What would become of the finite values of each summary in another dtype, float64[rows, 3].

    Args:
        scaled: whether all values of an array are multiplied first by one number that makes the
            largest of them the largest of the dtype.

    Returns:
        The shares of the finite values that would be rounded to 0 though they are not, that would
        be subnormal, and that would overflow. All are NaN for a row without finite values or with
        unknown counts. A limit that cuts a bin of the histogram, an eighth of a power of two,
        divides it evenly. Values below 2**-129, which the histogram has in one bin with the zeros,
        count as rounded to 0.

    Example:
        >>> from nnx_inspector.stats.encoding import decode, encode
        >>> from nnx_inspector.stats.summarize import summarize
        >>> found = decode(encode([summarize(np.array([0.0, 1e-9, 1e-6, 1.0, 7e4]))]))
        >>> casts_of(found, CASTS["float16"]).tolist()
        [[0.2, 0.2, 0.2]]
    """
    out = np.full((len(found.kinds), 3), np.nan)
    known, values = values_of(found)
    if not len(known):
        return out
    with np.errstate(over="ignore", invalid="ignore"):
        most = np.maximum(np.abs(values.low), np.abs(values.high))
        factor = np.where(most > 0, most / cast.largest, 1.0) if scaled else np.ones(len(most))
        limits = np.array([cast.zero, cast.normal, cast.beyond])[None, :] * factor[:, None]
    limits = np.maximum(limits, _FAINTEST)
    ends = 2 * np.maximum(limits[:, 2:], most[:, None])
    mirrored = np.nextafter(-limits[:, ::-1], 0.0)  # a value at a limit is on its outer side
    edges = np.concatenate([-ends, mirrored, limits, ends], axis=1)
    counts = rebin(values, edges)  # of seven intervals, the middle one around 0
    zeros = stats_of(found)[known, STATISTICS.index("zeros")]
    parts = counts[:, 3] - zeros, counts[:, 2] + counts[:, 4], counts[:, 0] + counts[:, 6]
    shares, total = np.stack(parts, axis=1), values.below[values.start[1:] - 1]
    shares /= total[:, None]
    out[known] = np.where(shares < _ROUNDING, 0.0, shares)
    return out


def values_of(found: Sparse) -> tuple[_Ints, Ragged]:
    """The rows with any finite value and known counts, int64[n], and their finite values by bin."""
    low, high, unknown = found.low, found.high, found.saturated
    row, bins, counts = spread_unseen(found.rows, found.bins, found.counts, low, high)
    ranks = RANK_OF_BIN[bins]
    used = (ranks >= 0) & ~unknown[row]
    place = row[used] * len(VALUE_ORDER) + ranks[used]
    order = np.argsort(place, kind="stable")
    place = place[order]
    first = np.flatnonzero(np.diff(place, prepend=-1))
    count = np.add.reduceat(counts[used][order], first) if len(first) else np.zeros(0)
    place = place[first]
    known, at = np.unique(place // len(VALUE_ORDER), return_inverse=True)
    low, high = low[known], high[known]
    lower, upper = clipped_edges(VALUE_ORDER[place % len(VALUE_ORDER)], low[at], high[at])
    start = np.searchsorted(at, np.arange(len(known) + 1))
    below = running_sums(count.astype(np.float64), start, at)
    return known, Ragged(at, start, count.astype(np.float64), below, lower, upper, low, high)
