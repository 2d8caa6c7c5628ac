"""The curves of scalar metrics over the steps, bounded in points; dropped points are counted.

Invariant: how many values were not finite, and from which step on, is exact however many points
were dropped, and an interrupt at any line leaves no half of a point. Not thread-safe: the recording
that owns the curves has the lock. Imports no jax.
"""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nnx_inspector.arrays import shape_of
from nnx_inspector.typing import Float


def entries_to_drop(at: Sequence[float], keep: Sequence[bool]) -> set[int]:
    """The entries to drop: about every second of the older half, never the first or the last.

    The rest of the older half is spaced evenly over `at` (ascending), however often it was thinned
    before; halving by position would in time leave nothing of a long run's beginning. Entries to
    `keep` are dropped only if nothing else is left. Dropping many at a time bounds the work per
    added entry.

    Example:
        >>> entries_to_drop([0, 1, 2, 3, 4, 5], [False] * 6)
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


_POINT_BYTES: Final = 16


class Tally(NamedTuple):
    """What was counted of one metric.

    Attributes:
        points: how many values it had.
        nan, infinite: how many of them were NaN and infinite.
        first: the step of the first of those; 0 if there is none.
    """

    points: int = 0
    nan: int = 0
    infinite: int = 0
    first: int = 0

    def plus(self, rows: Float[np.ndarray, "point 2"]) -> Tally:
        """With further points, step and value, in the order of arrival."""
        bad = ~np.isfinite(rows[:, 1])
        nan = int(np.isnan(rows[:, 1]).sum())
        infinite = int(bad.sum()) - nan
        first = self.first if self.nan or self.infinite or not bad.any() else int(rows[bad][0, 0])
        return Tally(self.points + len(rows), self.nan + nan, self.infinite + infinite, first)

    def without(self, rows: Float[np.ndarray, "point 2"]) -> Tally:
        """Without some of the points; the first step stays."""
        points, nan, infinite, _ = Tally().plus(rows)
        return Tally(self.points - points, self.nan - nan, self.infinite - infinite, self.first)


def scalar(name: str, value: Any) -> float:
    """A metric's value as a float.

    Raises:
        TypeError: the value is not a single number, or too large for a float.

    Example:
        >>> scalar("loss", np.float32(0.5))
        0.5
    """
    try:
        if not isinstance(value, (str, bytes)) and shape_of(value) in ((), None):
            return float(value)
    except (TypeError, ValueError):
        pass
    except OverflowError:
        raise TypeError(
            f"Metric {name!r} is too large for a float (1.8e308). Pass its logarithm instead."
        ) from None
    raise TypeError(
        f"Metric {name!r} must be one number, got {type(value).__name__} of shape "
        f"{list(shape_of(value) or ())}. Reduce it first, for example with .mean()."
    )


class _Curve(NamedTuple):
    """One metric: its points (step, value, step, value ...), and what was counted of others."""

    points: array.array[float]
    dropped: Tally

    def table(self) -> Float[np.ndarray, "point 2"]:
        return np.array(self.points, np.float64).reshape(-1, 2)

    def tally(self) -> Tally:
        return self.dropped.plus(self.table())


class Curves:
    """Points (step, value) by metric.

    Args:
        max_points: the most points to keep of each metric.
        max_bytes: the most memory to use for all points; two of each metric are always kept.

    Attributes:
        thinned: how many points were dropped to stay within the bounds.

    Example:
        >>> curves = Curves(100, 2**20)
        >>> curves.add(3, {"loss": 0.5})
        >>> curves.arrays()["loss"].tolist()
        [[3.0, 0.5]]
    """

    def __init__(self, max_points: int, max_bytes: int):
        self.thinned = 0
        self._max_points = max_points
        self._max_bytes = max_bytes
        self._curves: dict[str, _Curve] = {}
        self._begun: dict[str, Tally] = {}
        self._points = 0
        self._longest = 0  # an upper bound
        self._limit = max_points

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to the curve of each metric. NaN and Inf are kept as they are."""
        for name, value in values.items():
            begun = _Curve(array.array("d"), self._begun.get(name, Tally()))
            points, _ = self._curves.setdefault(name, begun)
            self._longest = max(self._longest, len(points) // 2 + 1)
            points.extend((step, value))  # in one piece: an interrupt may come at any line
        self._points += len(values)
        share = self._max_bytes // (_POINT_BYTES * max(len(self._curves), 1))
        limit = max(2, min(self._max_points, share))
        lower = limit < self._limit and self._longest > limit  # a new metric takes a share
        for name in self._curves if lower else values:
            self._bound(name, limit)
        if lower:
            self._longest = limit
        self._limit = limit

    def _bound(self, name: str, limit: int) -> None:
        while len(self._curves[name].points) // 2 > limit:
            points, tally = self._curves[name].table(), self._curves[name].tally()
            # users look for the point where a curve becomes NaN or Inf
            finite = np.isfinite(points[:, 1])
            leaves = finite[:-1] & ~finite[1:]
            keep = np.append(leaves, False) | np.append(False, leaves)  # and the point before
            gone = entries_to_drop(np.maximum.accumulate(points[:, 0]).tolist(), keep.tolist())
            left = np.delete(points, list(gone), axis=0)
            self._curves[name] = _Curve(array.array("d", left.tobytes()), tally.without(left))
            self.thinned += len(gone)
            self._points = sum(len(curve.points) for curve in self._curves.values()) // 2

    def tallies(self) -> dict[str, Tally]:
        """What was counted of each metric, dropped points included."""
        counted = {name: curve.tally() for name, curve in self._curves.items()}
        return {**self._begun, **{name: tally for name, tally in counted.items() if tally.points}}

    def begin(self, thinned: int, dropped: Mapping[str, Tally]) -> None:
        """Set how many points were dropped, and what was counted of those of each metric."""
        self.thinned, self._begun = thinned, dict(dropped)

    def dropped(self) -> dict[str, Tally]:
        """What was counted of the dropped points of each metric that has any."""
        dropped = {name: curve.dropped for name, curve in self._curves.items()}
        return {name: tally for name, tally in (self._begun | dropped).items() if tally.points}

    @property
    def nbytes(self) -> int:
        """The memory that the points take, in bytes."""
        return _POINT_BYTES * self._points

    def arrays(self) -> dict[str, Float[np.ndarray, "point 2"]]:
        """The curves by name: step and value, in the order of arrival."""
        return {name: curve.table() for name, curve in self._curves.items() if curve.points}
