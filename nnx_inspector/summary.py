"""Fixed-size statistics of an array, read on the host: counts, moments, a log-binned histogram.

Invariant: `finite + nan + posinf + neginf == size` (opaque dtypes apart, see `finite`), and a
figure that is not known is NaN or an error, never a guess. Summaries add up (`merge`). Imports no
jax: `nnx_inspector.summarize` makes summaries, this module only reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

BINS: Final = 4096
"""Bins of the histogram: one for each value of a float32's upper 12 bits."""

# No finite float32 has these bins; in a summary's field they hold what is counted apart.
POSINF_BIN, ZERO_BIN, OPAQUE_BIN, NAN_BIN = 0x7F8, 0x7F9, 0x7FA, 0x7FF
_SIGN: Final = 0x800
NEGINF_BIN, MINUS_ZERO_BIN = _SIGN | POSINF_BIN, _SIGN | ZERO_BIN
FINITE_BINS: Final = np.arange(BINS) & POSINF_BIN != POSINF_BIN
"""Which bins hold finite values, bool[4096]: the others but those of the zeros do not."""
FINITE_BINS[[ZERO_BIN, MINUS_ZERO_BIN]] = True

MINIMUM, MAXIMUM, SHIFT = range(3)
SCALE, SUM1, SUM2 = range(3)

_Array = npt.NDArray[Any]
_Floats = npt.NDArray[np.float64]
_UNREADABLE: Final = (
    "a summary inside jit cannot be read: return it from the function and read it outside"
)
_VALUE_ORDER = np.concatenate([np.arange(BINS - 1, _SIGN - 1, -1), np.arange(_SIGN)])


@functools.cache
def bin_edges() -> _Floats:
    """Lower and upper edge of every bin, float64[4096, 2], in the values' own unit.

    Rows of the 16 bins of NaN and Inf, which are never used, are NaN. The largest finite bin ends
    at 2**128; values of wider dtypes beyond it are counted there too. Read-only.

    Example:
        >>> bin_edges()[0x3F8].tolist()  # 0x3F80_0000 is 1.0
        [1.0, 1.125]
    """
    index = np.arange(_SIGN)
    exponent, mantissa = index >> 3, index & 7
    normal = np.ldexp(1.0 + mantissa / 8, exponent - 127)
    start = np.where(exponent == 0, np.ldexp(mantissa / 8.0, -126), normal)
    width = np.ldexp(0.125, np.maximum(exponent, 1) - 127)
    positive = np.stack([start, start + width], axis=1)
    positive[0x7F8:] = np.nan
    edges = np.concatenate([positive, -positive[:, ::-1]])
    edges.setflags(write=False)
    return edges


def empty(rows: tuple[int, ...] = ()) -> Summary:
    """The summary of nothing: the neutral element of `merge`.

    Example:
        >>> empty().size, empty().mean
        (0, nan)
    """
    moments = np.zeros((*rows, 3), np.float64)
    return Summary(bins=np.zeros((*rows, BINS), np.uint64), points=moments, sums=moments)


def merge(summaries: Sequence[Summary]) -> Summary:
    """The summary of all the values of `summaries` (and of all their rows) together.

    Counts add in uint64, moments in float64 about one shift (Chan, Golub and LeVeque 1983,
    "Algorithms for computing the sample variance"). Integer extremes stay integers where all parts
    have the same dtype.

    Args:
        summaries: Summaries of concrete arrays; may be empty.

    Returns:
        A Summary without row axes, on the host.

    Raises:
        TypeError: A summary holds tracers.

    Example:
        >>> merge([empty(), empty()]).size
        0
    """
    hosts = [s._host for s in summaries]  # pyright: ignore[reportPrivateUsage]
    if not hosts:
        return empty()
    bins = np.concatenate([s.bins.reshape(-1, BINS).astype(np.uint64) for s in hosts])
    sums = np.concatenate([s.sums.reshape(-1, 3).astype(np.float64) for s in hosts])
    dtypes = {s.points.dtype for s in hosts}
    exact = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float64)
    exact = np.dtype(np.float64) if exact.kind == "f" else exact
    points = np.concatenate([s.points.reshape(-1, 3).astype(exact) for s in hosts])

    total = bins.sum(axis=0)
    for s in hosts:
        if s.saturated:  # and stays so
            stopped = s.bins.reshape(-1, BINS) == np.iinfo(s.bins.dtype).max
            total[stopped.any(axis=0)] = np.iinfo(np.uint64).max
    finite = bins[:, FINITE_BINS].sum(axis=1).astype(np.float64)
    used = finite > 0
    merged_points, merged_sums = _merged_moments(points[used], sums[used], finite[used])
    return Summary(bins=total, points=merged_points, sums=merged_sums)


def _merged_moments(points: _Array, sums: _Floats, n: _Floats) -> tuple[_Array, _Floats]:
    """Points [parts, 3] and sums [parts, 3] of parts of n > 0 finite values, as one of each."""
    if not len(n):
        return np.zeros(3, points.dtype), np.zeros(3)
    if np.isnan(points).any():  # a part without known moments makes the whole unknown
        return np.full(3, np.nan), np.full(3, np.nan)
    # About the largest part's shift, the mean is never much further from the shift than the merged
    # standard deviation, so that sum2/n - (sum1/n)**2 does not cancel.
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


def _difference(a: _Array, b: Any, factor: float) -> _Floats:
    """(a - b) * factor in float64, without overflow, and exact in the difference for integers."""
    if a.dtype.kind == "f":
        return a * factor - b * factor
    # Two int64 can be 2**64 apart: subtract modulo 2**64 in the direction that is positive.
    wide_a, wide_b = a.astype(np.uint64), np.asarray(b).astype(np.uint64)
    with np.errstate(over="ignore"):
        up, down = wide_a - wide_b, wide_b - wide_a
    return np.where(a >= b, up.astype(np.float64), -down.astype(np.float64)) * factor


def _shares(edges: _Floats, lower: _Floats, upper: _Floats, counts: _Floats) -> _Floats:
    """Counts of the intervals between `edges`: each bin spreads evenly over [lower, upper]."""
    width = upper - lower
    point = ~(width > 0)
    with np.errstate(over="ignore"):
        inside = (edges[:, None] - lower) / np.where(point, 1.0, width)
    below = np.where(point, edges[:, None] > lower, np.clip(inside, 0.0, 1.0))
    below[0], below[-1] = 0.0, 1.0
    return np.diff(below, axis=0) @ counts


def _threshold(lower: _Floats, upper: _Floats, counts: _Floats, scale: str) -> float | None:
    """Where a symlog axis turns linear: above seven tenths of the magnitudes that are not zero."""
    if scale == "linear":
        return None
    magnitude = np.maximum(np.abs(lower), np.abs(upper))
    order = np.argsort(magnitude)
    nonzero = order[magnitude[order] >= 2.0**-126]
    if not len(nonzero):
        return None
    below = np.cumsum(counts[nonzero])
    tenths = float(magnitude[nonzero][np.searchsorted(below, 0.7 * below[-1])])
    return max(tenths, float(magnitude.max()) * 1e-30)  # so that asinh does not overflow


def _edges(low: float, high: float, bins: int, threshold: float | None) -> _Floats:
    """Rising edges from low to high: even in value, or in asinh(value / threshold)."""
    if threshold is None:  # of the halves, because the range may overflow
        edges = 2.0 * np.linspace(low / 2, high / 2, bins + 1)
    else:
        ends = [math.asinh(low / threshold), math.asinh(high / threshold)]
        with np.errstate(over="ignore"):
            edges = np.sinh(np.linspace(ends[0], ends[1], bins + 1)) * threshold
    edges[0], edges[-1] = low, high
    edges = np.clip(edges, low, high)
    if (np.diff(edges) > 0).all():
        return edges
    # One value, or a range too narrow for so many edges: an axis around it.
    margin, largest = max(abs(low), abs(high)) / 16 or 0.5, sys.float_info.max
    low, high = max(low - margin, -largest), min(high + margin, largest)
    return 2.0 * np.linspace(low / 2, high / 2, bins + 1)


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Summary:
    """Statistics of one array, or one row of them for each index of the leading axes.

    The fields are NumPy arrays, jax arrays or tracers; everything else reads them on the host and
    raises TypeError for tracers. A summary with rows reads as its `merged()`. For complex arrays
    the magnitude is summarised; NaN and Inf are counted and take part in no other figure.

    Attributes:
        bins: uint32 or uint64, rows + (4096,): how many values have these upper 12 bits (sign, 8
            of exponent, 3 of mantissa) in float32. Zeros, NaN, +-Inf and opaque values are counted
            in bins that no finite value has (`ZERO_BIN` and the like); see `nonzero_bins`.
        points: rows + (3,): smallest and largest finite value, and the shift, in a dtype that holds
            the values exactly (float32, float64 or a 32- or 64-bit integer). 0 where there are
            none, NaN where only counts are known.
        sums: float32 or float64, rows + (3,): scale (a power of two, 0 where all values are equal)
            and the sums of d and d*d over the finite values, where d = (x - shift) / scale.

    Example:
        >>> Summary(bins=np.bincount([NAN_BIN], minlength=BINS), points=np.zeros(3),
        ...         sums=np.zeros(3)).nan
        1
    """

    bins: Any
    points: Any
    sums: Any

    @functools.cached_property
    def _host(self) -> Summary:
        """The same with NumPy fields: the one place that waits for the device."""
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            try:
                fields[field.name] = np.asarray(value)
            except TypeError as error:  # jax's TracerArrayConversionError is one
                raise TypeError(_UNREADABLE) from error
            if fields[field.name].dtype == object:
                raise TypeError(_UNREADABLE)
        return Summary(**fields)

    @functools.cached_property
    def _one(self) -> Summary:
        return merge([self])

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of the row axes, () for one summary; known under jit as well."""
        return tuple(self.bins.shape[:-1])

    def row(self, index: int | tuple[int, ...]) -> Summary:
        """One row, or with fewer indices than row axes the rows under it.

        Raises:
            IndexError: There is no such row.
        """
        indices = index if isinstance(index, tuple) else (index,)
        rows = self.rows
        if len(indices) > len(rows) or any(
            not -n <= i < n for i, n in zip(indices, rows, strict=False)
        ):
            raise IndexError(f"row {index} of a summary with rows {rows}")
        return Summary(bins=self.bins[index], points=self.points[index], sums=self.sums[index])

    def merged(self) -> Summary:
        """All rows as one, on the host: uint64 counts, float64 moments."""
        return self._one

    @property
    def saturated(self) -> bool:
        """Whether a count stopped at its largest value while merging inside jit (2**32 - 1)."""
        bins = self._host.bins
        return bool((bins == np.iinfo(bins.dtype).max).any())

    def _counts(self, which: Any = slice(None)) -> _Array:
        if self.saturated:
            raise OverflowError(
                "a count of this summary reached 2**32 - 1 inside jit and stopped there, so its "
                "figures are unknown; return summaries of fewer values and merge them outside jit"
            )
        return self._one.bins[which]

    @property
    def size(self) -> int:
        """Number of values, whatever they are."""
        return int(self._counts().sum())

    @property
    def finite(self) -> int:
        """Number of finite values: size - nan - posinf - neginf; 0 for opaque dtypes (keys)."""
        return int(self._counts(FINITE_BINS).sum())

    @property
    def zeros(self) -> int:
        """Number of values that are +0 or -0; subnormals are not."""
        return int(self._counts([ZERO_BIN, MINUS_ZERO_BIN]).sum())

    @property
    def nan(self) -> int:
        """Number of NaNs."""
        return int(self._counts(NAN_BIN))

    @property
    def posinf(self) -> int:
        """Number of +Infs."""
        return int(self._counts(POSINF_BIN))

    @property
    def neginf(self) -> int:
        """Number of -Infs."""
        return int(self._counts(NEGINF_BIN))

    def _point(self, which: int) -> float:
        one = self._one
        return float(one.points[which]) if one.bins[FINITE_BINS].any() else math.nan

    @property
    def min(self) -> float:
        """The smallest finite value; NaN where there is none. Integers beyond 2**53 round."""
        return self._point(MINIMUM)

    @property
    def max(self) -> float:
        """The largest finite value; NaN where there is none. Integers beyond 2**53 round."""
        return self._point(MAXIMUM)

    @property
    def mean(self) -> float:
        """The mean of the finite values; NaN where there is none."""
        n, one = self.finite, self._one
        if not n:
            return math.nan
        mean = float(one.points[SHIFT]) + float(one.sums[SCALE]) * (float(one.sums[SUM1]) / n)
        # Rounding only: no mean lies outside. (np.clip passes an unknown, NaN mean on.)
        return float(np.clip(mean, self.min, self.max))

    @property
    def std(self) -> float:
        """The standard deviation of the finite values (divided by n); NaN where there is none."""
        n, sums = self.finite, self._one.sums
        if not n:
            return math.nan
        variance = float(sums[SUM2]) / n - (float(sums[SUM1]) / n) ** 2
        return float(sums[SCALE]) * math.sqrt(variance) if not variance <= 0 else 0.0

    @property
    def var(self) -> float:
        """The variance of the finite values (divided by n): std squared."""
        return self.std * self.std

    @property
    def norm(self) -> float:
        """The L2 norm of the finite values, sqrt(sum of x * x); NaN where there is none."""
        n = self.finite
        return math.hypot(self.mean, self.std) * math.sqrt(n) if n else math.nan

    def _range(self) -> tuple[float, float]:
        """Smallest and largest finite value; where unknown, the outermost bins' edges."""
        low, high = self.min, self.max
        if math.isnan(low):
            edges = bin_edges()[self.nonzero_bins()[:, 0].astype(np.int64)]
            low, high = float(edges.min()), float(edges.max())
        return low, high

    def _occupied(self) -> tuple[_Floats, _Floats, _Floats]:
        """Lower edge, upper edge and count of the bins in use, in value order, within the range."""
        pairs = self.nonzero_bins()
        index = pairs[:, 0].astype(np.int64)
        edges, (low, high) = bin_edges()[index], self._range()
        # The outermost bins also hold what wider dtypes have beyond float32's range.
        lower = np.clip(np.where(index == 0xFF7, low, edges[:, 0]), low, high)
        upper = np.clip(np.where(index == 0x7F7, high, edges[:, 1]), low, high)
        return lower, upper, pairs[:, 1]

    def nonzero_bins(self) -> _Floats:
        """The bins in use as float64[k, 2], (bin, count), the most negative values first."""
        counts = np.where(FINITE_BINS, self._counts(), np.uint64(0))
        for zero, bin_of_zero in ((ZERO_BIN, 0), (MINUS_ZERO_BIN, _SIGN)):
            counts[bin_of_zero] += counts[zero]
            counts[zero] = 0
        used = _VALUE_ORDER[counts[_VALUE_ORDER] > 0]
        return np.stack([used, counts[used]], axis=1).astype(np.float64)

    def quantile(self, q: npt.ArrayLike) -> Any:
        """The order statistic number floor(q * (finite - 1)), from the histogram.

        Within 6.25 % of it, relatively, for values that are normal float32 numbers (Masson, Rim and
        Lee 2019, "DDSketch"), and exact for the first and the last. Subnormals read as 0, values of
        wider dtypes beyond float32's range as NaN.

        Args:
            q: One or many fractions from 0 to 1.

        Returns:
            A float for a scalar `q`, else float64 of its shape; NaN where nothing is finite.

        Raises:
            ValueError: A fraction is not within 0 and 1.
        """
        fractions = np.asarray(q, np.float64)
        if not ((fractions >= 0) & (fractions <= 1)).all():
            raise ValueError(f"quantile takes fractions from 0 to 1, got {q!r}")
        n = self.finite
        if not n:
            values = np.full(fractions.shape, np.nan)
        else:
            lower, upper, counts = self._occupied()
            low, high = self._range()
            # The harmonic middle of [a, b] is equally far, relatively, from both of its ends.
            half = lower / 2 + upper / 2
            with np.errstate(all="ignore"):
                middle = np.where(lower == upper, lower, lower / half * upper)
            crossing = (lower <= 0) & (upper >= 0)  # zeros and subnormals
            middle = np.where(crossing, np.clip(0.0, low, high), middle)
            # What wider dtypes have beyond float32 is in one bin: known to no relative precision.
            middle[(lower < -(2.0**128)) | (upper > 2.0**128)] = np.nan
            rank = np.floor(fractions * (n - 1))
            at = np.searchsorted(np.cumsum(counts), rank, side="right")
            values = middle[np.minimum(at, len(middle) - 1)]
            values = np.where(rank == 0, low, np.where(rank == n - 1, high, values))
        return float(values) if values.ndim == 0 else values

    def histogram(
        self, bins: int = 64, *, scale: Literal["linear", "symlog"] = "linear"
    ) -> tuple[_Floats, _Floats]:
        """The finite values in `bins` intervals from min to max.

        Each of the 4080 log bins is spread evenly over the part of it that lies within [min, max],
        so counts are fractional, and add up to `finite`.

        Args:
            bins: Number of intervals, at least 1.
            scale: "linear", or "symlog": even in asinh(value / threshold), linear below the
                magnitude that seven tenths of the nonzero values stay below, logarithmic above it.

        Returns:
            Edges float64[bins + 1], rising, and counts float64[bins]. Where all values are equal
            the edges lie around that value; where nothing is finite they are 0 to 1.

        Raises:
            ValueError: `bins` or `scale` is none of the above.
        """
        if bins < 1 or scale not in ("linear", "symlog"):
            raise ValueError(f"histogram takes bins >= 1 and scale linear or symlog, not {scale!r}")
        if not self.finite:
            return np.linspace(0.0, 1.0, bins + 1), np.zeros(bins)
        low, high = self._range()
        lower, upper, counts = self._occupied()
        edges = _edges(low, high, bins, _threshold(lower, upper, counts, scale))
        return edges, _shares(edges, lower, upper, counts)

    def sparkline(self, n: int = 32) -> npt.NDArray[np.uint8]:
        """Heights uint8[n] of the "symlog" histogram: the highest is 255, one in use never 0."""
        _, counts = self.histogram(n, scale="symlog")
        highest = float(counts.max())
        if highest == 0:
            return np.zeros(n, np.uint8)
        return np.ceil(counts * (255 / highest)).clip(0, 255).astype(np.uint8)

    def to_arrays(self) -> dict[str, _Array]:
        """The fields as few small arrays, the histogram sparse; `from_arrays` restores them."""
        host = self._host
        flat = host.bins.reshape(-1, BINS)
        row, index = np.nonzero(flat)
        return {
            "points": host.points,
            "sums": host.sums,
            "bin_index": index.astype(np.uint16),
            "bin_count": flat[row, index],
            "bins_used": np.count_nonzero(flat, axis=1).astype(np.uint16),
        }

    @staticmethod
    def from_arrays(arrays: Mapping[str, _Array]) -> Summary:
        """The summary that `to_arrays` was called on, dtypes and rows included.

        Raises:
            KeyError: An array is missing.
            ValueError: The arrays do not belong together.
        """
        used = np.asarray(arrays["bins_used"])
        index, count = np.asarray(arrays["bin_index"]), np.asarray(arrays["bin_count"])
        points, sums = np.asarray(arrays["points"]), np.asarray(arrays["sums"])
        rows = points.shape[:-1]
        if (
            not (points.shape == sums.shape == (*rows, 3))
            or used.shape != (math.prod(rows),)
            or not (index.shape == count.shape == (int(used.sum()),))
            or (index.size > 0 and int(index.max()) >= BINS)
        ):
            raise ValueError("these arrays are not those of one summary: their shapes disagree")
        flat = np.zeros((math.prod(rows), BINS), count.dtype)
        flat[np.repeat(np.arange(len(used)), used), index] = count
        return Summary(bins=flat.reshape(*rows, BINS), points=points, sums=sums)

    def __repr__(self) -> str:
        """One line; under jit only the shape of the rows is known."""
        rows = f"rows={self.rows}, " if getattr(self.bins, "ndim", 1) > 1 else ""
        try:
            if self.saturated:
                return f"Summary({rows}saturated, min={self.min:.6g}, max={self.max:.6g})"
            names = ("size", "mean", "std", "min", "max", "zeros", "nan", "posinf", "neginf")
            values = ", ".join(f"{name}={getattr(self, name):.6g}" for name in names)
        except TypeError:
            values = "traced"
        return f"Summary({rows}{values})"
