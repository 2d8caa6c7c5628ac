"""The figures and the sparklines of many recorded summaries at once, for a frame of the screen.

Invariant: each is what `Summary` itself gives, for counts that add up to less than 2**53; where a
count has stopped at its largest value only the extremes are known, and all else is NaN. Works on
what a recording keeps (`Sparse`), one flat array over all of them: a Summary at a time takes
twenty times as long. Imports NumPy only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nnx_inspector.stats.bins import (
    FAINT,
    FINITE_BINS,
    MINUS_ZERO_BIN,
    NAN_BIN,
    NEGINF_BIN,
    POSINF_BIN,
    RANKS,
    SMALLEST_NORMAL,
    VALUE_ORDER,
    ZERO_BIN,
    bounds,
    evenly,
)
from nnx_inspector.stats.encoding import Sparse, entries
from nnx_inspector.stats.moments import MAXIMUM, MINIMUM, SCALE, SHIFT, SUM1, SUM2
from nnx_inspector.stats.summary import SATURATED, STATISTICS

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


def figures_of(parts: Sequence[Sparse]) -> _Floats:
    """float64[parts, STATISTICS]: the figures of each by their names, in their order.

    Example:
        >>> from nnx_inspector.stats.encoding import decoded, encoded
        >>> from nnx_inspector.stats.summary import empty
        >>> figures_of([decoded(encoded(empty()))])[0, :2].tolist()
        [0.0, nan]
    """
    many = len(parts)
    row, bins, counts = entries(parts)
    points = np.array([p.points.astype(np.float64) for p in parts]).reshape(many, 3)
    sums = np.array([p.sums for p in parts], np.float64).reshape(many, 3)

    def total(chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64]:
        """How many values are in the chosen bins, exactly."""
        found = np.zeros(many, np.uint64)
        np.add.at(found, row[chosen], counts[chosen])
        return found

    size, apart = total(bins >= 0), total(~FINITE_BINS[bins])
    finite = (size - apart).astype(np.float64)
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
        "zeros": total((bins == ZERO_BIN) | (bins == MINUS_ZERO_BIN)),
        "nan": total(bins == NAN_BIN),
        "posinf": total(bins == POSINF_BIN),
        "neginf": total(bins == NEGINF_BIN),
    }
    table = np.stack([np.asarray(by_name[name], np.float64) for name in STATISTICS], axis=1)
    unknown = np.array([name not in ("min", "max") for name in STATISTICS])
    stopped = np.zeros(many, bool)
    stopped[row[counts == SATURATED]] = True
    table[stopped[:, None] & unknown] = np.nan
    return table


def sparklines_of(parts: Sequence[Sparse], heights: int) -> npt.NDArray[np.uint8]:
    """uint8[parts, heights]: the `Summary.sparkline` of each; zeros where nothing is known.

    Example:
        >>> from nnx_inspector.stats.encoding import decoded, encoded
        >>> from nnx_inspector.stats.summary import empty
        >>> sparklines_of([decoded(encoded(empty()))], 3).tolist()
        [[0, 0, 0]]
    """
    found = np.zeros((len(parts), heights), np.uint8)
    lines, ragged = _ragged(parts)
    if not len(lines):
        return found
    counts = _apportioned(ragged, _axes(ragged, heights))
    highest = counts.max(axis=1, keepdims=True).astype(np.float64)
    scaled = np.ceil(counts * (255 / np.maximum(highest, 1.0)))
    found[lines] = np.minimum(scaled, 255).astype(np.uint8)
    return found


class _Ragged(NamedTuple):
    """The finite values of some rows by bin, in value order, zeros with the subnormals.

    Attributes:
        at: int[k], which row each bin in use belongs to, rising.
        start: int[rows + 1], where each row's bins begin.
        counts: float64[k].
        below: float64[k], how many values of the row are in this bin or in lower ones.
        lower: float64[k], the lower edge of each, within the range of its row.
        upper: float64[k], the upper edge, likewise.
        low: float64[rows], the smallest value, or a bound of it.
        high: float64[rows], the largest, likewise.
    """

    at: _Ints
    start: _Ints
    counts: _Floats
    below: _Floats
    lower: _Floats
    upper: _Floats
    low: _Floats
    high: _Floats


def _ragged(parts: Sequence[Sparse]) -> tuple[_Ints, _Ragged]:
    """Which of the parts have finite values and known counts, and these values."""
    row, bins, counts = entries(parts)
    ranks = RANKS[bins]
    unknown = np.zeros(len(parts), bool)
    unknown[row[counts == SATURATED]] = True
    used = (ranks >= 0) & ~unknown[row]
    place = row[used] * len(VALUE_ORDER) + ranks[used]
    order = np.argsort(place, kind="stable")
    place = place[order]
    first = np.flatnonzero(np.diff(place, prepend=-1))
    count = np.zeros(0)
    if len(first):
        count = np.add.reduceat(counts[used][order], first).astype(np.float64)
    place = place[first]
    lines, at = np.unique(place // len(VALUE_ORDER), return_inverse=True)
    low = np.array([parts[i].low for i in lines], np.float64)
    high = np.array([parts[i].high for i in lines], np.float64)
    lower, upper = bounds(VALUE_ORDER[place % len(VALUE_ORDER)], low[at], high[at])
    start = np.searchsorted(at, np.arange(len(lines) + 1))
    return lines, _Ragged(at, start, count, _running(count, start, at), lower, upper, low, high)


def _running(values: _Floats, start: _Ints, at: _Ints) -> _Floats:
    """The cumulative sums of each row's values."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return sums[1:] - sums[start[:-1]][at]


def _thresholds(ragged: _Ragged) -> _Floats:
    """Where a symlog axis turns linear; NaN where a row has but zeros and subnormals."""
    at, start = ragged.at, ragged.start
    magnitude = np.maximum(-ragged.lower, ragged.upper)
    order = np.lexsort((magnitude, at))
    rising = magnitude[order]
    normal = rising >= SMALLEST_NORMAL
    below = _running(np.where(normal, ragged.counts[order], 0.0), start, at)
    before = ~normal | (below < 0.7 * below[start[1:] - 1][at])
    many = len(ragged.low)
    tenths = start[:-1] + np.bincount(at, before, minlength=many).astype(np.int64)
    faint = np.bincount(at, normal, minlength=many) == 0
    largest = rising[start[1:] - 1]
    # so that asinh does not overflow
    found = np.maximum(rising[np.where(faint, start[:-1], tenths)], largest * 1e-30)
    return np.where(faint, np.nan, found)


def _axes(ragged: _Ragged, bins: int) -> _Floats:
    """`binning.axis` of each row with scale "symlog", float64[rows, bins + 1]."""
    low, high = ragged.low, ragged.high
    edges = 2.0 * evenly(low / 2, high / 2, bins)
    thresholds = _thresholds(ragged)
    bent = np.flatnonzero(~np.isnan(thresholds))
    ends = zip(low[bent].tolist(), high[bent].tolist(), thresholds[bent].tolist(), strict=True)
    even = np.array([(math.asinh(a / t), math.asinh(b / t)) for a, b, t in ends]).reshape(-1, 2)
    with np.errstate(over="ignore"):
        edges[bent] = np.sinh(evenly(even[:, 0], even[:, 1], bins)) * thresholds[bent, None]
    edges[:, 0], edges[:, -1] = low, high
    edges = np.minimum(np.maximum(edges, low[:, None]), high[:, None])
    narrow = np.flatnonzero(~(edges[:, 1:] > edges[:, :-1]).all(axis=1))
    low, high = low[narrow], high[narrow]
    margin = np.maximum(np.abs(low), np.abs(high)) / 16
    margin = np.where(margin == 0, 0.5, margin)
    largest = sys.float_info.max
    low, high = np.maximum(low - margin, -largest), np.minimum(high + margin, largest)
    edges[narrow] = 2.0 * evenly(low / 2, high / 2, bins)
    return edges


def _apportioned(ragged: _Ragged, edges: _Floats) -> npt.NDArray[np.int64]:
    """`binning.apportioned` of each row in the intervals of its own edges."""
    inner = np.nextafter(edges[:, 1:-1], -np.inf)
    faint = np.maximum(-edges[:, 0], edges[:, -1]) < FAINT
    scale = np.where(faint, 2.0**900, 1.0)
    inner = inner * scale[:, None]
    value, below = np.empty(2 * len(ragged.at)), np.empty(2 * len(ragged.at))
    value[0::2], value[1::2] = ragged.lower * scale[ragged.at], ragged.upper * scale[ragged.at]
    steep = value[1::2] - value[0::2] < FAINT**4
    value[1::2] = np.where(steep, value[0::2], value[1::2])
    below[0::2], below[1::2] = ragged.below - ragged.counts, ragged.below
    reached = np.zeros_like(edges)
    for row, x, begin, end in zip(
        reached, inner, ragged.start[:-1].tolist(), ragged.start[1:].tolist(), strict=True
    ):
        row[1:-1] = np.interp(x, value[2 * begin : 2 * end], below[2 * begin : 2 * end])
    total = ragged.below[ragged.start[1:] - 1]
    reached[:, -1] = total
    reached = np.rint(reached)
    ends = (edges[:, 0] == ragged.low) & (edges[:, -1] == ragged.high) & (total > 1)
    reached[ends, 1:-1] = np.clip(reached[ends, 1:-1], 1.0, total[ends, None] - 1.0)
    return np.diff(np.maximum.accumulate(reached, axis=1).astype(np.int64), axis=1)
