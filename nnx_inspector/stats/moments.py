"""The moments of a summary, extremes and scaled sums about a shift, merged without cancellation.

`points` are the smallest value, the largest value and the shift. `sums` are the scale, and the
sums of d and d*d, where d = (x - shift) / scale. Imports NumPy only.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

MINIMUM, MAXIMUM, SHIFT = range(3)
SCALE, SUM1, SUM2 = range(3)

_Array = npt.NDArray[Any]
_Floats = npt.NDArray[np.float64]


def merge_moments(points: _Array, sums: _Floats, n: _Floats) -> tuple[_Array, _Floats]:
    """Merge the points [parts, 3] and sums [parts, 3] of parts with n > 0 finite values each.

    Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance". Integer extremes
    stay integers; sums are about the largest part's shift. NaN if those of a part are unknown.

    Example:
        >>> points, sums = np.array([[1.0] * 3, [3.0] * 3]), np.zeros((2, 3))  # a one and a three
        >>> merge_moments(points, sums, np.ones(2))[0].tolist()
        [1.0, 3.0, 1.0]
    """
    if not len(n):
        return np.zeros(3, points.dtype), np.zeros(3)
    if np.isnan(points).any():  # a part with unknown moments makes the whole unknown
        return np.full(3, np.nan), np.full(3, np.nan)
    if len(n) == 1:
        points, sums = canonical_moments(points, sums, n > 0)
        return points[0], sums[0]
    # The mean is never much further from the largest part's shift than the merged standard
    # deviation, so that sum2/n - (sum1/n)**2 does not cancel.
    shift = points[int(np.argmax(n)), SHIFT]
    apart = float(np.max(np.abs(_difference(points[:, SHIFT], shift, 0.5))))
    reach = float(np.ldexp(1.0, min(max(math.frexp(apart)[1] + 1, -1000), 1000))) if apart else 0.0
    scale = max(reach, float(np.max(sums[:, SCALE])))
    merged = np.array([points[:, MINIMUM].min(), points[:, MAXIMUM].max(), shift], points.dtype)
    if scale == 0.0:  # every value is the same
        return merged, np.zeros(3)
    ratio = sums[:, SCALE] / scale
    delta = _difference(points[:, SHIFT], shift, 1.0 / scale)
    sum1 = sums[:, SUM1] * ratio
    sum2 = sums[:, SUM2] * ratio**2 + 2.0 * delta * sum1 + n * delta**2
    return merged, np.array([scale, math.fsum(sum1 + n * delta), math.fsum(sum2)])


def canonical_moments(
    points: _Array, sums: _Array, some: npt.NDArray[np.bool_]
) -> tuple[_Array, _Floats]:
    """What `merge_moments` returns for each part by itself; `some`: which have finite values.

    Floats become float64.
    """
    if points.dtype.kind == "f":
        points = points.astype(np.float64)
    unknown = some & np.isnan(points).any(axis=1)
    points = np.where(some[:, None], points, np.zeros((), points.dtype))
    sums = np.where((some & (sums[:, SCALE] != 0))[:, None], sums, 0.0).astype(np.float64)
    if unknown.any():
        points[unknown], sums[unknown] = np.nan, np.nan
    return points, sums


def _difference(a: _Array, b: Any, factor: float) -> _Floats:
    """(a - b) * factor in float64, without overflow; the difference of integers is exact."""
    if a.dtype.kind == "f":
        return a * factor - b * factor
    # Two int64 can be 2**64 apart: subtract the smaller from the larger, modulo 2**64.
    wide_a, wide_b = a.astype(np.uint64), np.asarray(b).astype(np.uint64)
    with np.errstate(over="ignore"):
        up, down = wide_a - wide_b, wide_b - wide_a
    return np.where(a >= b, up.astype(np.float64), -down.astype(np.float64)) * factor
