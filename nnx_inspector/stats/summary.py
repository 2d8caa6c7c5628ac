"""Fixed-size statistics of an array, read on the host: counts, moments, a log-binned histogram.

Invariant: `finite + nan + posinf + neginf == size` (except for opaque dtypes, see `finite`), and
an unknown figure is NaN or an error, never a guess. Summaries can be merged (`merge`). Imports no
jax: `nnx_inspector.stats.summarize` makes summaries, and this module only reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nnx_inspector.stats.bins import (
    BINS,
    FINITE_BINS,
    MINUS_ZERO_BIN,
    NAN_BIN,
    NEGINF_BIN,
    OPAQUE_BIN,
    POSINF_BIN,
    UNSEEN_BIN,
    VALUE_ORDER,
    ZERO_BIN,
    Binned,
    Scale,
    bin_edges,
    histogram_edges,
    pool,
    quantiles,
    ragged,
    rebin_whole,
    spread_unseen,
    tabulate,
)
from nnx_inspector.stats.moments import (
    MAXIMUM,
    MINIMUM,
    SCALE,
    SHIFT,
    SUM1,
    SUM2,
    canonical_moments,
    merge_moments,
)

STATISTICS: Final = (
    "size", "mean", "std", "min", "max", "norm", "zeros", "nan", "posinf", "neginf", "seen",
)  # fmt: skip
"""The figures of one summary by name. Recordings, frames and messages keep this order."""

_Floats = npt.NDArray[np.float64]
_MERGED: Final = [tuple(map(np.dtype, ("u8", "f8", p))) for p in ("f8", "i4", "u4", "i8", "u8")]
SATURATED: Final = np.iinfo(np.uint64).max
"""The merged value of a count that stopped at its maximum: the true count is unknown."""
_NOT_FINITE: Final = np.flatnonzero(~FINITE_BINS)
_UNREADABLE = "a summary inside jit cannot be read: return it from the function and read it outside"


class Histogram(NamedTuple):
    """Intervals and the number of values in each: see `Summary.histogram`."""

    edges: _Floats
    counts: npt.NDArray[np.int64]


def empty(rows: tuple[int, ...] = ()) -> Summary:
    """The summary of nothing: the neutral element of `merge`.

    Example:
        >>> empty().size, empty().mean
        (0, nan)
    """
    moments = np.zeros((*rows, 3), np.float64)
    return Summary(bins=np.zeros((*rows, BINS), np.uint64), points=moments, sums=moments)


def opaque(said: str, size: int) -> Summary:
    """The summary of `size` values of which only the dtype and shape are known.

    Example:
        >>> opaque("key<fry>[3]", 3)
        Summary(key<fry>[3], no figures)
    """
    nothing = empty()
    nothing.bins[OPAQUE_BIN] = size
    return dataclasses.replace(nothing, opaque=said)


def merge(summaries: Sequence[Summary]) -> Summary:
    """The summary of all the values of `summaries`, and of all their rows, together.

    Counts add in uint64, moments in float64. Integer extremes of one dtype stay integers.

    Args:
        summaries: Summaries of concrete arrays; may be empty.

    Returns:
        A Summary without row axes, on the host.

    Raises:
        TypeError: a summary holds tracers.

    Example:
        >>> merge([empty(), empty()]).size
        0
    """
    hosts = [s._host for s in summaries]  # pyright: ignore[reportPrivateUsage]
    if not hosts:
        return empty()
    if len(hosts) == 1 and not hosts[0].rows:
        return _merge_one(hosts[0])
    bins = np.concatenate([s.bins.reshape(-1, BINS).astype(np.uint64) for s in hosts])
    sums = np.concatenate([s.sums.reshape(-1, 3).astype(np.float64) for s in hosts])
    dtypes = {s.points.dtype for s in hosts}
    exact = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float64)
    exact = np.dtype(np.float64) if exact.kind == "f" else exact
    points = np.concatenate([s.points.reshape(-1, 3).astype(exact) for s in hosts])

    total = pool(bins)
    for s in hosts:
        if s.saturated:  # and stays so
            stopped = s.bins.reshape(-1, BINS) == np.iinfo(s.bins.dtype).max
            total[stopped.any(axis=0)] = SATURATED
    finite = (bins.sum(axis=1) - bins[:, _NOT_FINITE].sum(axis=1)).astype(np.float64)
    used = finite > 0
    merged_points, merged_sums = merge_moments(points[used], sums[used], finite[used])
    alike = {s.opaque for s in hosts}
    opaque = alike.pop() if len(alike) == 1 else ""
    return Summary(bins=total, points=merged_points, sums=merged_sums, opaque=opaque)


def row_index(index: int | tuple[int, ...], rows: tuple[int, ...], of: str) -> tuple[int, ...]:
    """The index of one row, or of several, as a tuple; `of` is what has the rows.

    Raises:
        IndexError: there is no such row.
    """
    indices = index if isinstance(index, tuple) else (index,)
    if len(indices) > len(rows) or any(
        not -n <= i < n for i, n in zip(indices, rows, strict=False)
    ):
        raise IndexError(f"There is no row {index} in {of} with rows {rows}.")
    return indices


def _merge_one(one: Summary) -> Summary:
    """What `merge` returns for a single summary without rows, in a fifth of the time."""
    bins = one.bins.astype(np.uint64)
    some = np.array([float(bins.sum()) > float(bins[_NOT_FINITE].sum())])
    if one.saturated:
        bins[one.bins == np.iinfo(one.bins.dtype).max] = SATURATED
    moments = canonical_moments(one.points[None], one.sums[None], some)
    return Summary(bins=bins, points=moments[0][0], sums=moments[1][0], opaque=one.opaque)


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Summary:
    """Statistics of one array, or a row of them for each index of its leading axes.

    The fields are NumPy arrays, jax arrays or tracers. Figures are read on the host: they raise
    TypeError for tracers, and describe the `merged()` summary if there are rows. Complex arrays
    are summarised by magnitude. NaN and Inf are counted and enter no other figure.

    Attributes:
        bins: uint32 or uint64, rows + (4096,): how many values have these upper 12 bits (sign, 8
            of exponent, 3 of mantissa) in float32. Zeros, NaN, +-Inf and opaque values are counted
            in bins that no finite value has (`ZERO_BIN` and the like), and so are the nonzero
            values that are not in the sample (`UNSEEN_BIN`); see `nonzero_bins`.
        points: rows + (3,): the smallest and largest finite value, and the shift, in a dtype that
            holds the values exactly (float32, float64, or an integer of 32 or 64 bits). 0 if no
            value is finite, NaN if only counts are known.
        sums: float32 or float64, rows + (3,): the scale (a power of two, 0 if all values are
            equal), and the sums of d and d*d over the finite values, d = (x - shift) / scale.
        opaque: dtype and shape of an array without figures, such as `"key<fry>[3]"`; "" for
            numbers. A static part of the pytree.

    Example:
        >>> Summary(bins=np.bincount([NAN_BIN], minlength=BINS), points=np.zeros(3),
        ...         sums=np.zeros(3)).nan
        1
    """

    bins: Any
    points: Any
    sums: Any
    opaque: str = ""

    @functools.cached_property
    def _is_host(self) -> bool:
        fields = (self.bins, self.points, self.sums)
        return all(isinstance(field, np.ndarray) and field.dtype != object for field in fields)

    @functools.cached_property
    def _is_merged(self) -> bool:
        """Whether this is what `merge` returns."""
        kinds = (self.bins.dtype, self.sums.dtype, self.points.dtype) if self._is_host else ()
        return not self.rows and kinds in _MERGED

    @functools.cached_property
    def _fetched(self) -> Summary:
        fields: dict[str, Any] = {}
        for name in ("bins", "points", "sums"):
            try:
                fields[name] = np.asarray(getattr(self, name))
            except TypeError as error:  # jax's TracerArrayConversionError is one
                raise TypeError(_UNREADABLE) from error
            if fields[name].dtype == object:
                raise TypeError(_UNREADABLE)
        return Summary(**fields, opaque=self.opaque)

    @functools.cached_property
    def _merged(self) -> Summary:
        return merge([self])

    # Neither caches the summary itself, which would be a reference cycle.
    @property
    def _host(self) -> Summary:
        """The summary with NumPy fields: the one place that waits for the device."""
        return self if self._is_host else self._fetched

    @property
    def _one(self) -> Summary:
        return self if self._is_merged else self._merged

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of the row axes, () for a single summary. Also known under jit."""
        return tuple(self.bins.shape[:-1])

    def row(self, index: int | tuple[int, ...]) -> Summary:
        """One row; or several rows, given fewer indices than row axes.

        Raises:
            IndexError: there is no such row.
        """
        index = row_index(index, self.rows, "a summary")
        fields = (self.bins, self.points, self.sums)
        if self._is_host:
            bins, points, sums = (field[index] for field in fields)
        else:
            from nnx_inspector._compat.sharding import take_index  # a recording needs no jax

            bins, points, sums = (take_index(field, index) for field in fields)
        return Summary(bins=bins, points=points, sums=sums, opaque=self.opaque)

    def merged(self) -> Summary:
        """All rows merged into one, on the host: uint64 counts, float64 moments."""
        return self._one

    def without_rows(self) -> Summary:
        """On the host; merged only if there are rows."""
        return self._one if self.rows else self._host

    @functools.cached_property
    def saturated(self) -> bool:
        """Whether a count stopped at its maximum, 2**32 - 1, inside jit."""
        bins = self._host.bins
        return bool(bins.size) and bool(bins.max() == np.iinfo(bins.dtype).max)

    def _check(self) -> None:
        if self.saturated:
            raise OverflowError(
                "A count of this summary reached its maximum of 2**32 - 1 inside jit, so its "
                "figures are unknown. Return summaries of fewer values and merge them outside jit."
            )

    def _count(self, number: int) -> int:
        self._check()
        return int(self._one.bins[number])

    @functools.cached_property
    def size(self) -> int:
        """Number of values of every kind."""
        self._check()
        return int(self._one.bins.sum())

    @functools.cached_property
    def finite(self) -> int:
        """Number of finite values: size - nan - posinf - neginf; 0 for opaque dtypes (keys)."""
        return self.size - int(self._one.bins[_NOT_FINITE].sum())

    @property
    def zeros(self) -> int:
        """Number of values that are +0 or -0; subnormals do not count."""
        return self._count(ZERO_BIN) + self._count(MINUS_ZERO_BIN)

    @property
    def nan(self) -> int:
        """Number of NaNs."""
        return self._count(NAN_BIN)

    @property
    def posinf(self) -> int:
        """Number of +Infs."""
        return self._count(POSINF_BIN)

    @property
    def neginf(self) -> int:
        """Number of -Infs."""
        return self._count(NEGINF_BIN)

    @functools.cached_property
    def min(self) -> float:
        """The smallest finite value, NaN if there is none. Integers beyond 2**53 are rounded."""
        return float(self._one.points[MINIMUM]) if self._some else math.nan

    @functools.cached_property
    def max(self) -> float:
        """The largest finite value, NaN if there is none. Integers beyond 2**53 are rounded."""
        return float(self._one.points[MAXIMUM]) if self._some else math.nan

    @functools.cached_property
    def mean(self) -> float:
        """The mean of the finite values, NaN if there are none."""
        n, one = self.finite, self._one
        if not n:
            return math.nan
        mean = float(one.points[SHIFT]) + float(one.sums[SCALE]) * (float(one.sums[SUM1]) / n)
        # Only rounding can put the mean outside.
        return mean if math.isnan(mean) else min(max(mean, self.min), self.max)

    @functools.cached_property
    def std(self) -> float:
        """The standard deviation of the finite values (divided by n), NaN if there are none."""
        n, sums = self.finite, self._one.sums
        if not n:
            return math.nan
        first = float(sums[SUM1]) / n
        variance = float(sums[SUM2]) / n - first * first
        return float(sums[SCALE]) * math.sqrt(variance) if not variance <= 0 else 0.0

    @property
    def var(self) -> float:
        """The variance of the finite values (divided by n): std squared."""
        return self.std * self.std

    @property
    def norm(self) -> float:
        """The L2 norm of the finite values, sqrt(sum of x * x), NaN if there are none."""
        return math.hypot(self.mean, self.std) * math.sqrt(self.finite)

    @functools.cached_property
    def _some(self) -> bool:
        return bool(self._one.bins[FINITE_BINS].any())

    @functools.cached_property
    def seen(self) -> int:
        """Number of nonzero finite values that the histogram counts: a sample of a large array."""
        self._check()
        return int(self._one.bins[VALUE_ORDER].sum())

    @functools.cached_property
    def rank_error(self) -> float:
        """How far the rank of a quantile may be off because of the sample, as a fraction of all
        finite values: 0.011 for a sample of 65,536 of very many values, 0 if all were counted.

        The error is larger with a probability of 1e-6 (Hoeffding 1963), provided that the sample is
        like the rest: see `sample` of `nnx_inspector.stats.summarize.summarize`.
        """
        unseen = self._count(UNSEEN_BIN)
        if not unseen:
            return 0.0
        of_sample = math.sqrt(math.log(2 / 1e-6) / (2 * max(self.seen, 1)))
        return min(of_sample, 1.0) * (unseen + self.seen) / self.finite

    @functools.cached_property
    def _binned(self) -> Binned:
        """The finite values by bin. If moments are unknown, the outermost bins bound the values."""
        self._check()
        low, high = self.min, self.max
        every = self.whole_bins()
        used = np.flatnonzero(every)
        bins, counts = tabulate(np.zeros(len(used), np.intp), used, every[used], 1)
        if math.isnan(low) and len(bins):
            low, high = bin_edges()[bins[0], 0], bin_edges()[bins[-1], 1]
        return Binned(bins, counts, np.array([low]), np.array([high]))

    def whole_bins(self) -> _Floats:
        """How many values each bin has, float64[4096]; those of a sample are scaled up to all."""
        used = np.flatnonzero(self._one.bins)
        ends = np.array([self.min]), np.array([self.max])
        rows = np.zeros(len(used), np.intp)
        _, bins, counts = spread_unseen(rows, used, self._one.bins[used], *ends)
        whole: _Floats = np.bincount(bins, counts, BINS).astype(np.float64)
        return whole

    def nonzero_bins(self) -> _Floats:
        """The bins in use as float64[k, 2], (bin, count), the most negative values first.

        The counts of a sample are scaled up to all finite values, and need not be whole.
        """
        index, counts, _, _ = self._binned
        pairs = np.empty((len(index), 2))
        pairs[:, 0], pairs[:, 1] = index, counts[0]
        return pairs

    def quantile(self, q: npt.ArrayLike) -> Any:
        """The order statistic number floor(q * (finite - 1)), estimated from the histogram.

        The relative error is at most `QUANTILE_ERROR` (6.25 %) for a normal float32 number, also
        after merging (Masson, Rim and Lee 2019, "DDSketch"); below the normal range the absolute
        error is at most `SUBNORMAL_ERROR`. Of a sample, the rank is off by at most `rank_error`.
        The first and the last are exact. The result is NaN if it may be a value of a wider dtype
        beyond float32's range: these share the outermost bin.

        Args:
            q: one or many fractions from 0 to 1.

        Returns:
            A float for a scalar `q`, else float64 of its shape; NaN if no value is finite.

        Raises:
            ValueError: a fraction is not between 0 and 1.
        """
        fractions = np.asarray(q, np.float64)
        if not ((fractions >= 0) & (fractions <= 1)).all():
            raise ValueError(f"quantile takes fractions from 0 to 1, got {q!r}.")
        values = quantiles(self._binned, fractions.ravel()).reshape(fractions.shape)
        return float(values) if values.ndim == 0 else values

    def histogram(self, bins: int = 64, *, scale: Scale = "linear") -> Histogram:
        """The finite values in `bins` intervals from min to max.

        Each of the 4080 log bins is spread evenly over its part within [min, max]. The number of
        values below each edge is then rounded to a whole number. The counts therefore add up to
        `finite` exactly, and the error of the number below an edge is less than the count of the
        log bin that the edge cuts.

        Args:
            bins: number of intervals, at least 1.
            scale: "linear" or "symlog". "symlog" is even in asinh(value / threshold): linear below
                the magnitude that 70 % of the nonzero values lie below, logarithmic above it.

        Returns:
            A named tuple of `edges`, float64[bins + 1], ascending, and `counts`, int64[bins]. As in
            NumPy, an interval includes its lower edge, and the last one both. If all values are
            equal the edges lie around that value; if none is finite they go from 0 to 1.

        Raises:
            ValueError: `bins` is less than 1, or `scale` is neither of the two.

        Example:
            >>> empty().histogram(2, scale="symlog").counts.tolist()
            [0, 0]
        """
        if bins < 1 or scale not in ("linear", "symlog"):
            raise ValueError(
                f"histogram takes bins >= 1 and scale 'linear' or 'symlog', got bins={bins!r} and "
                f"scale={scale!r}."
            )
        if not self.finite:
            return Histogram(np.linspace(0.0, 1.0, bins + 1), np.zeros(bins, np.int64))
        values = ragged(self._binned)
        edges = histogram_edges(values, bins, scale)
        return Histogram(edges[0], rebin_whole(values, edges)[0])

    def sparkline(self, n: int = 32) -> npt.NDArray[np.uint8]:
        """Heights of the "symlog" histogram, uint8[n]: the highest is 255, 0 means no values."""
        _, counts = self.histogram(n, scale="symlog")
        highest = float(counts.max())
        if highest == 0:
            return np.zeros(n, np.uint8)
        return np.minimum(np.ceil(counts * (255 / highest)), 255).astype(np.uint8)

    def __repr__(self) -> str:
        """One line; under jit only the shape of the rows is known."""
        rows = f"rows={self.rows}, " if getattr(self.bins, "ndim", 1) > 1 else ""
        if self.opaque:
            return f"Summary({rows}{self.opaque}, no figures)"
        try:
            if self.saturated:
                return f"Summary({rows}saturated, min={self.min:.6g}, max={self.max:.6g})"
            names = ("size", "mean", "std", "min", "max", "zeros", "nan", "posinf", "neginf")
            values = ", ".join(f"{name}={getattr(self, name):.6g}" for name in names)
        except TypeError:
            values = "traced"
        return f"Summary({rows}{values})"
