"""Many summaries of one quantity side by side, as the screen and the plots draw them over time.

Invariant: every number equals the one that the Summary itself gives. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nnx_inspector.stats.bins import (
    Binned,
    axes,
    quantiles,
    ragged,
    rebinned,
    spread,
    tabulated,
)
from nnx_inspector.stats.encoding import Packed, Sparse, decoded, ranges
from nnx_inspector.stats.summary import STATISTICS, Summary

HISTORY_QUANTILES: Final = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""The quantiles of each pass that a history keeps."""

HISTORY_BINS: Final = 48
"""The bins of each pass that a history keeps."""

_Floats = npt.NDArray[np.float64]
_BATCH: Final = 256  # summaries unpacked at a time: some megabytes


class HistoryArrays(NamedTuple):
    """One site's quantity over the steps; the arguments of `protocol.history_buffer`, in order.

    Attributes:
        steps: float64[T], the step of each column, in the order of the passes.
        quantiles: float64[T, 7], at `HISTORY_QUANTILES`, in the values' unit.
        edges: float64[49], ascending, even on a symmetric-log axis, in the values' unit.
        fractions: float64[T, 48]; each row adds up to 1. A row is NaN, here and in `quantiles`, if
            nothing finite was measured or the counts are unknown (saturated).
    """

    steps: _Floats
    quantiles: _Floats
    edges: _Floats
    fractions: _Floats


def history_of(
    steps: Sequence[int], blobs: Sequence[bytes], spanned: Sequence[bytes]
) -> HistoryArrays:
    """The history of encoded summaries, on an axis that spans the finite values of `spanned`.

    Values outside the axis are counted in its outermost intervals.
    """
    rows, kept = _binned(decoded(Packed.of(blobs))), set(spanned)
    lows, highs = rows[2:] if spanned is blobs else ranges(Packed.of(spanned))
    some = np.isfinite(lows) & np.isfinite(highs)
    low, high = (lows[some].min(), highs[some].max()) if some.any() else (0.0, 0.0)
    counts = rows.counts[[blob in kept for blob in blobs]].sum(axis=0, keepdims=True)
    together = Binned(rows.bins, counts, np.array([low]), np.array([high]))
    anything = len(rows.bins) > 0
    edges = axes(ragged(together), HISTORY_BINS, "symlog")[0] if anything else _no_axis()
    total = rows.counts.sum(axis=1, keepdims=True)
    return HistoryArrays(
        steps=np.array(steps, np.float64),
        quantiles=quantiles(rows, np.array(HISTORY_QUANTILES)),
        edges=edges,
        fractions=rebinned(ragged(rows), edges) / np.where(total > 0, total, np.nan),
    )


def _no_axis() -> _Floats:
    """An arbitrary axis, for a history without any finite value."""
    return np.linspace(0.0, 1.0, HISTORY_BINS + 1)


def _binned(found: Sparse) -> Binned:
    """The finite values of all summaries, one in each row. Saturated (unknown) rows are zeros."""
    low, high, many = found.low, found.high, len(found.kinds)
    table = tabulated(*spread(found.rows, found.bins, found.counts, low, high), many)
    table[1][found.saturated] = 0.0
    return Binned(*table, low, high)


def figures_of(blobs: Sequence[bytes]) -> list[list[int | float | None]]:
    """`STATISTICS` and the quantiles of each encoded summary; None for an unknown."""
    rows: list[list[int | float | None]] = []
    for start in range(0, len(blobs), _BATCH):
        found = decoded(Packed.of(blobs[start : start + _BATCH]))
        of_each = quantiles(_binned(found), np.array(HISTORY_QUANTILES)).tolist()
        rows += [_statistics(found.summary(i)) + q for i, q in enumerate(of_each)]
    return rows


def _statistics(summary: Summary) -> list[int | float | None]:
    if summary.saturated:  # its extremes are still right
        known = {"min": summary.min, "max": summary.max}
        return [known.get(name) for name in STATISTICS]
    return [getattr(summary, name) for name in STATISTICS]
