"""Which entries of a bounded history go: the past becomes coarser, the recent past stays whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def surplus(at: Sequence[float], keep: Sequence[bool]) -> set[int]:
    """Which of the entries go: about every second of the older half, never the first or the last.

    What stays of the older half is spaced evenly over `at` (rising), however often it was thinned
    before: halving by position would in the end leave nothing of a long run's beginning. Entries
    to `keep` go only when there is nothing else left to take. Not too few go at a time, so that
    the work for each entry added is bounded.

    Example:
        >>> surplus([0, 1, 2, 3, 4, 5], [False] * 6)
        {1, 2}
    """
    for share, kept in ((2, keep), (1, keep), (1, [False] * len(at))):
        older: npt.NDArray[np.float64] = np.array(
            at[: min(max(2, len(at) // share), len(at) - 1)], np.float64
        )
        if len(older) < 2:
            break
        grid = np.linspace(float(older[0]), float(older[-1]), max(1, len(older) // 2))
        stay = {0, *np.searchsorted(older, grid).tolist()}
        gone = {i for i in range(1, len(older)) if i not in stay and not kept[i]}
        if len(gone) > len(at) // 64:
            return gone
    return set()
