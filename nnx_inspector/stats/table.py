"""The figures and sparklines of many recorded summaries at once, for a frame of the screen.

Invariant: each figure is the one that `Summary` gives, for counts that add up to less than 2**53.
If a count has stopped at its largest value, only the extremes are known, and all else is NaN.
Computes over one flat array of all `Sparse` summaries: one by one would take twenty times as long.
Imports NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nnx_inspector.stats.bins import (
    FINITE_BINS,
    MINUS_ZERO_BIN,
    NAN_BIN,
    NEGINF_BIN,
    NONZERO,
    POSINF_BIN,
    RANKS,
    VALUE_ORDER,
    ZERO_BIN,
    Ragged,
    apportioned,
    axes,
    bounds,
    running,
    spread,
)
from nnx_inspector.stats.encoding import Sparse, entries
from nnx_inspector.stats.moments import MAXIMUM, MINIMUM, SCALE, SHIFT, SUM1, SUM2
from nnx_inspector.stats.summary import SATURATED, STATISTICS

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


def figures_of(parts: Sequence[Sparse]) -> _Floats:
    """The figures of each summary, float64[parts, STATISTICS].

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
        "seen": total(NONZERO[bins]),
    }
    table = np.stack([np.asarray(by_name[name], np.float64) for name in STATISTICS], axis=1)
    unknown = np.array([name not in ("min", "max") for name in STATISTICS])
    stopped = np.zeros(many, bool)
    stopped[row[counts == SATURATED]] = True
    table[stopped[:, None] & unknown] = np.nan
    return table


def sparklines_of(parts: Sequence[Sparse], heights: int) -> npt.NDArray[np.uint8]:
    """The `Summary.sparkline` of each summary, uint8[parts, heights]; zeros if nothing is known.

    Example:
        >>> from nnx_inspector.stats.encoding import decoded, encoded
        >>> from nnx_inspector.stats.summary import empty
        >>> sparklines_of([decoded(encoded(empty()))], 3).tolist()
        [[0, 0, 0]]
    """
    found = np.zeros((len(parts), heights), np.uint8)
    lines, values = _ragged(parts)
    if not len(lines):
        return found
    counts = apportioned(values, axes(values, heights, "symlog"))
    highest = counts.max(axis=1, keepdims=True).astype(np.float64)
    scaled = np.ceil(counts * (255 / np.maximum(highest, 1.0)))
    found[lines] = np.minimum(scaled, 255).astype(np.uint8)
    return found


def _ragged(parts: Sequence[Sparse]) -> tuple[_Ints, Ragged]:
    """Which of the parts have finite values and known counts, and these values."""
    row, bins, counts = entries(parts)
    unknown = np.zeros(len(parts), bool)
    unknown[row[counts == SATURATED]] = True
    low = np.array([p.low for p in parts], np.float64)
    high = np.array([p.high for p in parts], np.float64)
    row, bins, counts = spread(row, bins, counts, low, high)
    ranks = RANKS[bins]
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
    low, high = low[lines], high[lines]
    lower, upper = bounds(VALUE_ORDER[place % len(VALUE_ORDER)], low[at], high[at])
    start = np.searchsorted(at, np.arange(len(lines) + 1))
    return lines, Ragged(at, start, count, running(count, start, at), lower, upper, low, high)
