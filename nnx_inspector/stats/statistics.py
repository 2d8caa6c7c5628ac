"""The figures of a summary by name, and the quantiles and bins that a history keeps of it.

Recordings, frames and messages all count in this order.
"""

from __future__ import annotations

from typing import Final

STATISTICS: Final = (
    "size", "mean", "std", "min", "max", "norm", "zeros", "nan", "posinf", "neginf"
)  # fmt: skip
"""The figures of one summary; the third axis of `Frame`'s table. All NaN: not measured."""

HISTORY_QUANTILES: Final = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""The quantiles of each pass that a history keeps."""

HISTORY_BINS: Final = 48
"""The bins of each pass that a history keeps."""
