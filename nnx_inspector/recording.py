"""The bounded history of a run: the summaries of every pass, and metrics, over the steps.

Invariants: a recording never grows beyond its bounds, what was thinned out is counted and said, and
the first pass, the newest, and those with the first NaN and Inf stay. What was not measured is
None or absent, never a zero. Safe to append to and read from any thread. Does not measure, does
not draw, writes no files, imports no jax.
"""

from __future__ import annotations

import array
import dataclasses
import difflib
import functools
import operator
import struct
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from nnx_inspector.protocol import HISTORY_BINS, HISTORY_QUANTILES, STATISTICS
from nnx_inspector.summary import (
    BINS,
    FINITE_BINS,
    MAXIMUM,
    MINIMUM,
    MINUS_ZERO_BIN,
    NAN_BIN,
    NEGINF_BIN,
    POSINF_BIN,
    ZERO_BIN,
    Summary,
    bin_edges,
)

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

Quantity = Literal["output", "gradient", "input"]
"""What was measured at a site: its output, the gradient of its output, or its input."""

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

_QUANTITIES: Final[tuple[str, ...]] = get_args(Quantity)
_POINTS: Final[tuple[str, ...]] = ("<f8", "<i4", "<u4", "<i8", "<u8")
_HEADER: Final = struct.Struct(
    "<BBHdd"
)  # dtype of the points, bytes a count, bins; lowest, highest
_SATURATED: Final = np.iinfo(np.uint64).max
_NONFINITE: Final = {"nan": NAN_BIN, "posinf": POSINF_BIN, "neginf": NEGINF_BIN}
_COUNTED: Final = ("size", "zeros", "nan", "posinf", "neginf")
_POINTS_PER_PASS: Final = 10
_POINT_BYTES: Final = 16
_RANK_TO_BIN: Final = np.concatenate([np.arange(BINS - 1, BINS // 2 - 1, -1), np.arange(BINS // 2)])
_BIN_TO_RANK: Final = np.argsort(_RANK_TO_BIN)
_BIN_TO_RANK[[ZERO_BIN, MINUS_ZERO_BIN]] = BINS // 2, BINS // 2 - 1  # where +0 and -0 belong


def _packed(summary: Summary) -> bytes:
    """A merged host summary in about 500 bytes: sparse bins, counts in byte planes, deflated."""
    index = np.flatnonzero(summary.bins)
    count = summary.bins[index].astype("<u8")
    width = (int(count.max()).bit_length() + 7) // 8 if len(count) else 0
    # Neighbouring bins differ by one and hold similar counts: bytes of equal weight side by side
    # deflate three times better than the numbers one after the other.
    planes = count.view(np.uint8).reshape(-1, 8)[:, :width].T
    apart = np.diff(index, prepend=0).astype("<u2").view(np.uint8).reshape(-1, 2).T
    finite = index[FINITE_BINS[index]]
    low, high = np.nan, np.nan
    if len(finite):
        low, high = float(summary.points[MINIMUM]), float(summary.points[MAXIMUM])
        if np.isnan(low):  # moments unknown: the outermost bins bound the values
            edges = bin_edges()[_RANK_TO_BIN[_BIN_TO_RANK[finite]]]
            low, high = float(edges.min()), float(edges.max())
    kind = summary.points.dtype.newbyteorder("<").str
    header = _HEADER.pack(_POINTS.index(kind), width, len(index), low, high)
    exact = summary.points.astype(kind).tobytes() + summary.sums.astype("<f8").tobytes()
    return header + exact + zlib.compress(apart.tobytes() + planes.tobytes(), 1)


class _Packed(NamedTuple):
    """What `_packed` wrote: points and sums of the summary, its used bins, and its range."""

    points: npt.NDArray[Any]
    sums: _Floats
    used: _Ints
    counts: npt.NDArray[np.uint64]
    low: float
    high: float


@functools.lru_cache(maxsize=600)  # the columns of two histories: they are redrawn all the time
def _read(blob: bytes) -> _Packed:
    kind, width, used, low, high = _HEADER.unpack_from(blob)
    points = np.frombuffer(blob, _POINTS[kind], 3, _HEADER.size)  # pyright: ignore
    sums = np.frombuffer(blob, "<f8", 3, _HEADER.size + points.nbytes)
    start = _HEADER.size + points.nbytes + sums.nbytes
    body = np.frombuffer(zlib.decompress(memoryview(blob)[start:]), np.uint8)
    apart = np.ascontiguousarray(body[: 2 * used].reshape(2, used).T).view("<u2")[:, 0]
    planes = np.zeros((used, 8), np.uint8)
    planes[:, :width] = body[2 * used :].reshape(width, used).T
    counts = planes.view("<u8")[:, 0]
    index = np.cumsum(apart, dtype=np.int64)
    index.setflags(write=False)
    counts.setflags(write=False)
    return _Packed(points, sums, index, counts, low, high)


def _unpacked(blob: bytes) -> Summary:
    packed = _read(blob)
    bins = np.zeros(BINS, np.uint64)
    bins[packed.used] = packed.counts
    return Summary(bins=bins, points=packed.points, sums=packed.sums)


def _table(parts: Sequence[_Packed]) -> tuple[_Ints, _Floats]:
    """Bins that hold finite values anywhere, in value order, and counts[parts, those bins]."""
    rows = np.repeat(np.arange(len(parts)), np.array([len(p.used) for p in parts], int))
    bins = np.concatenate([np.zeros(0, int), *(p.used for p in parts)])
    counts = np.concatenate([np.zeros(0), *(p.counts for p in parts)])
    finite = FINITE_BINS[bins]
    rows, bins, counts = rows[finite], bins[finite], counts[finite]
    ranks = _BIN_TO_RANK[bins]
    used = np.zeros(BINS, bool)
    used[ranks] = True
    column = (np.cumsum(used) - 1)[ranks]
    table = np.zeros((len(parts), int(used.sum())))
    zero = (bins == ZERO_BIN) | (bins == MINUS_ZERO_BIN)
    table[rows[~zero], column[~zero]] = counts[~zero]
    table[rows[zero], column[zero]] += counts[zero]  # zeros and subnormals share their bins
    return _RANK_TO_BIN[used], table


def _columns(
    steps: Sequence[int], blobs: Sequence[bytes], low: float, high: float
) -> HistoryArrays:
    """The history of packed summaries whose finite values all lie within low and high.

    The figures of `Summary.quantile` and `Summary.histogram`, of all columns at once over the bins
    in value order: column by column, 300 of them would take ten times as long.
    """
    parts = [_read(blob) for blob in blobs]
    number, count = _table(parts)
    if not len(number):  # nothing finite anywhere
        nothing = np.full((len(parts), len(HISTORY_QUANTILES) + HISTORY_BINS), np.nan)
        quantiles, fractions = np.split(nothing, [len(HISTORY_QUANTILES)], axis=1)
        edges = np.linspace(0.0, 1.0, HISTORY_BINS + 1)
        return HistoryArrays(np.array(steps, np.float64), quantiles, edges, fractions)
    below = np.cumsum(count, axis=1)
    stopped = np.array([(p.counts == _SATURATED).any() for p in parts], bool)
    known = (below[:, -1] > 0) & ~stopped
    total = np.where(known, below[:, -1], np.nan)[:, None]
    lowest = np.array([p.low for p in parts])[:, None]
    highest = np.array([p.high for p in parts])[:, None]

    def ends(at: npt.NDArray[np.intp]) -> tuple[_Floats, _Floats]:
        """Edges of the bins `at`, cut to each column's own range."""
        index = number[at]
        edges = bin_edges()[index]
        lower = np.where(index == 0xFF7, lowest, edges[..., 0])  # wider dtypes reach beyond it
        upper = np.where(index == 0x7F7, highest, edges[..., 1])
        return np.clip(lower, lowest, highest), np.clip(upper, lowest, highest)

    with np.errstate(all="ignore"):
        rank = np.floor(np.array(HISTORY_QUANTILES) * (total - 1))
        at = np.zeros(rank.shape, np.intp)
        for row in np.flatnonzero(known):
            at[row] = np.searchsorted(below[row], rank[row], side="right")
        lower, upper = ends(np.minimum(at, len(number) - 1))
        middle = np.where(lower == upper, lower, lower / (lower / 2 + upper / 2) * upper)
        crossing = (lower <= 0) & (upper >= 0)
        middle = np.where(crossing, np.clip(0.0, lowest, highest), middle)
        middle[(lower < -(2.0**128)) | (upper > 2.0**128)] = np.nan
        quantiles = np.where(rank == 0, lowest, np.where(rank == total - 1, highest, middle))

        edges = _common_edges(number, count[known].sum(axis=0), low, high)
        at = np.searchsorted(bin_edges()[number, 1], edges)
        share = np.where(at > 1, below[:, np.maximum(at - 2, 0)], 0.0)  # of the bins before at - 1
        for near in (at - 1, at, at + 1):  # values of wider dtypes may round into the next bin
            inside = (near >= 0) & (near < len(number))
            near = np.clip(near, 0, len(number) - 1)
            lower, upper = ends(near)
            point = ~(upper > lower)
            part = np.where(point, edges > lower, np.clip((edges - lower) / (upper - lower), 0, 1))
            share += np.where(inside, part * count[:, near], 0.0)
        share[:, :1], share[:, -1:] = 0.0, total
        fractions = np.diff(share, axis=1) / total
    quantiles[~known], fractions[~known] = np.nan, np.nan
    return HistoryArrays(np.array(steps, np.float64), quantiles, edges, fractions)


def _common_edges(number: _Ints, count: _Floats, low: float, high: float) -> _Floats:
    """Edges of the symmetric-log axis of all values together, as a Summary's own."""
    bins = np.zeros(BINS, np.uint64)
    bins[number] = count.astype(np.uint64)
    everything = Summary(bins=bins, points=np.array([low, high, low]), sums=np.zeros(3))
    return everything.histogram(HISTORY_BINS, scale="symlog")[0]


def _scalar(name: str, value: Any) -> float:
    try:
        if value is not None and not isinstance(value, (str, bytes)) and np.shape(value) == ():
            return float(value)
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f"Metric {name!r} must be one number, got {type(value).__name__} of shape "
        f"{getattr(value, 'shape', '()')}. Reduce it first, for instance with .mean()."
    )


def _on_host(site: str, quantity: str, summary: object) -> Summary:
    """The summary merged, in NumPy; waits for the device."""
    _check_quantity(quantity, site)
    if not isinstance(summary, Summary):
        raise TypeError(
            f"The {quantity} of site {site!r} must be a Summary, got {type(summary).__name__}. "
            "Merge the summaries of a pytree into one first, with nnx_inspector.summary.merge."
        )
    fields = (summary.bins, summary.points, summary.sums)
    if (
        all(isinstance(field, np.ndarray) for field in fields)
        and not summary.rows
        and (summary.bins.dtype, summary.sums.dtype) == (np.uint64, np.float64)
        and summary.points.dtype.str in _POINTS
    ):
        return summary  # merged already: merging once more takes longer than packing
    try:
        return summary.merged()
    except TypeError as error:
        raise TypeError(f"The {quantity} of site {site!r}: {error}.") from error


def _step(step: Any) -> int:
    number = operator.index(step)
    if not -(2**53) <= number <= 2**53:
        raise ValueError(f"A step must lie within 2**53 of 0, got {number}. Count from 0.")
    return number


def _thin(at: Sequence[float], keep: Sequence[bool]) -> set[int]:
    """Which of the entries go: about every second of the older half, never the first or the last.

    What stays of the older half is spaced evenly over `at` (rising), however often it was thinned
    before: halving by position would in the end leave nothing of a long run's beginning. Entries
    to `keep` go only when there is nothing else left to take.
    """
    for share, kept in ((2, keep), (1, keep), (1, [False] * len(at))):
        older: _Floats = np.array(at[: min(max(2, len(at) // share), len(at) - 1)], np.float64)
        if len(older) < 2:
            break
        grid = np.linspace(float(older[0]), float(older[-1]), max(1, len(older) // 2))
        stay = {0, *np.searchsorted(older, grid).tolist()}
        gone = {i for i in range(1, len(older)) if i not in stay and not kept[i]}
        if gone:
            return gone
    return set()


def _check_quantity(quantity: str, site: str) -> None:
    if quantity not in _QUANTITIES:
        names = ", ".join(map(repr, _QUANTITIES))
        raise ValueError(f"There is no quantity {quantity!r} at site {site!r}; use one of {names}.")


def _figures(summary: Summary) -> list[int | float | None]:
    """The statistics and quantiles of a row of the frame; None where they are not known."""
    if summary.saturated:  # its extremes are still right
        known = {"min": summary.min, "max": summary.max}
        return [known.get(n) for n in STATISTICS] + [None] * len(HISTORY_QUANTILES)
    return [getattr(summary, n) for n in STATISTICS] + summary.quantile(HISTORY_QUANTILES).tolist()


class HistoryArrays(NamedTuple):
    """One site's quantity over the steps; the arguments of `protocol.history_buffer`, in order.

    Attributes:
        steps: float64[T], the step of each column, in the order of the passes.
        quantiles: float64[T, 7], at `protocol.HISTORY_QUANTILES`, in the values' unit.
        edges: float64[49], rising, even on a symmetric-log axis, in the values' unit.
        fractions: float64[T, 48], each row adds up to 1. A row is NaN, here and in `quantiles`,
            where nothing finite was measured or the counts are unknown (saturated).
    """

    steps: _Floats
    quantiles: _Floats
    edges: _Floats
    fractions: _Floats


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """Which summaries a pass has; shared by all passes that have the same."""

    keys: tuple[tuple[str, str], ...]
    at: Mapping[tuple[str, str], int]

    @property
    def nbytes(self) -> int:
        return 256 + 184 * len(self.keys)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Pass:
    """One recorded pass; never changes.

    Attributes:
        number: running index among all passes that were appended, thinned ones included.
        step: the step it belongs to; several passes may share one.
        kind: where it came from, for instance "watch".
        perturbed: whether a perturbation was on.
        nonfinite: which of "nan", "posinf" and "neginf" any of its summaries counts.
        news: whether it has the recording's first NaN, +Inf or -Inf of a quantity, and so stays.
        layout: which summaries it has; shared with other passes.
        packed: its summaries, compressed, in the order of `keys`.
    """

    number: int
    step: int
    kind: str
    perturbed: bool
    nonfinite: frozenset[str]
    news: bool
    layout: _Layout
    packed: tuple[bytes, ...]

    @property
    def keys(self) -> tuple[tuple[str, str], ...]:
        """(site, quantity) of every summary, in the order in which they were recorded."""
        return self.layout.keys

    def summary(self, site: str, quantity: Quantity = "output") -> Summary | None:
        """The summary of a site's quantity, None where it was not measured in this pass."""
        at = self.layout.at.get((site, quantity))
        return None if at is None else _unpacked(self.packed[at])

    def items(self) -> Iterator[tuple[str, str, Summary]]:
        """Site, quantity and summary of everything measured, in recorded order."""
        for (site, quantity), blob in zip(self.keys, self.packed, strict=True):
            yield site, quantity, _unpacked(blob)

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes, apart from what it shares with other passes."""
        return 460 + 8 * len(self.packed) + sum(sys.getsizeof(b) + 8 for b in self.packed)


class Recording:
    """Summaries and metrics of a run, bounded in passes and in bytes.

    When a bound is passed, about every second pass of the older half goes, so that the rest is
    spaced evenly: the past becomes coarser, the recent past stays whole. The first pass, the
    newest, and those with the first NaN, +Inf and -Inf of each quantity stay. `thinned` counts
    what went.

    Args:
        max_steps: most passes kept, at least 2.
        max_bytes: most memory taken, in bytes; at least the first and the newest pass are kept,
            whatever they take. Metrics take up to a quarter of it.

    Raises:
        ValueError: a bound is too small.

    Example:
        >>> from nnx_inspector.summary import empty
        >>> recording = Recording(max_steps=100)
        >>> recording.append(0, {"blocks/0": {"output": empty()}}, metrics={"loss": 2.5})
        >>> recording.steps, recording.sites, recording.curves()["loss"].tolist()
        ([0], ('blocks/0',), [[0.0, 2.5]])
    """

    def __init__(self, *, max_steps: int = 2000, max_bytes: int = 256 * 2**20):
        if max_steps < 2 or max_bytes < 4096:
            raise ValueError(
                f"A recording keeps at least 2 passes and 4096 bytes, got max_steps={max_steps} "
                f"and max_bytes={max_bytes}. Leave them out for 2000 passes and 256 MiB."
            )
        self.max_steps = max_steps
        self.max_bytes = max_bytes
        self._lock = threading.RLock()
        self._passes: list[Pass] = []
        self._bytes = 0
        self._appended = 0
        self._sites: dict[str, None] = {}
        self._layouts: dict[tuple[tuple[str, str], ...], _Layout] = {}
        self._firsts: set[tuple[bool, str, str]] = set()
        self._curves: dict[str, tuple[array.array[float], array.array[float]]] = {}
        self._thinned = 0
        self._thinned_points = 0

    def append(
        self,
        step: int,
        summaries: Mapping[str, Mapping[str, Summary | None]],
        *,
        metrics: Mapping[str, float] | None = None,
        kind: str = "watch",
        perturbed: bool = False,
    ) -> None:
        """Adds one pass. Nothing is added when an argument is refused.

        Args:
            step: any integer; passes of the same step are kept apart, in order.
            summaries: site key -> "output", "gradient" or "input" -> Summary, in the order of
                execution. Summaries with rows are merged; None is what was not measured.
            metrics: scalars of this step; see `add_metrics`.
            kind: where the pass came from, shown in the frame.
            perturbed: whether a perturbation was on.

        Raises:
            ValueError: a quantity is none of the three.
            TypeError: a summary holds tracers, a metric is no number, the step no integer.
        """
        at = _step(step)
        merged: dict[tuple[str, str], Summary] = {}
        for site, quantities in summaries.items():
            for quantity, summary in quantities.items():
                if summary is not None:  # before the lock: it waits for the device
                    merged[site, quantity] = _on_host(site, quantity, summary)
        found = {
            (perturbed, quantity, kind_of_value)
            for (_, quantity), summary in merged.items()
            for kind_of_value, number in _NONFINITE.items()
            if summary.bins[number]
        }
        nonfinite = frozenset(kind_of_value for _, _, kind_of_value in found)
        keys, blobs = tuple(merged), tuple(_packed(s) for s in merged.values())
        values = {name: _scalar(name, value) for name, value in (metrics or {}).items()}
        with self._lock:
            layout = self._layouts.get(keys)
            if layout is None:
                layout = _Layout(keys, {key: i for i, key in enumerate(keys)})
                self._layouts[keys] = layout
                self._bytes += layout.nbytes
                self._sites.update(dict.fromkeys(site for site, _ in keys))
            new = not found <= self._firsts
            self._firsts |= found
            item = Pass(self._appended, at, kind, perturbed, nonfinite, new, layout, blobs)
            self._passes.append(item)
            self._bytes += item.nbytes
            self._appended += 1
            self.add_metrics(at, values)
            self._bound()

    def add_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point to the curve of each metric; NaN and Inf are kept as they are.

        Args:
            step: the step the values belong to.
            values: name -> number (a Python, NumPy or jax scalar).

        Raises:
            TypeError: a value is no single number; then none is added.
        """
        at = _step(step)
        numbers = {name: _scalar(name, value) for name, value in values.items()}
        with self._lock:
            for name, value in numbers.items():
                steps, curve = self._curves.setdefault(name, (array.array("d"), array.array("d")))
                steps.append(at)
                curve.append(value)
            share = self.max_bytes // 4 // (_POINT_BYTES * max(len(self._curves), 1))
            limit = max(2, min(_POINTS_PER_PASS * self.max_steps, share))
            for name in self._curves:
                self._bound_curve(name, limit)

    def _bound_curve(self, name: str, limit: int) -> None:
        steps, curve = self._curves[name]
        while len(curve) > limit:
            # where a curve leaves the finite numbers is the point one looks for later
            finite = np.isfinite(curve)
            leaves = finite[:-1] & ~finite[1:]
            keep = np.append(leaves, False) | np.append(False, leaves)  # the last before it, too
            gone = _thin(np.maximum.accumulate(steps).tolist(), keep.tolist())
            left = [i for i in range(len(curve)) if i not in gone]
            steps = array.array("d", [steps[i] for i in left])
            curve = array.array("d", [curve[i] for i in left])
            self._curves[name] = (steps, curve)
            self._thinned_points += len(gone)

    def _bound(self) -> None:
        while len(self._passes) > self.max_steps or self.nbytes > self.max_bytes:
            gone = _thin([p.number for p in self._passes], [p.news for p in self._passes])
            if not gone:
                return
            self._passes = [p for i, p in enumerate(self._passes) if i not in gone]
            self._layouts = {p.keys: p.layout for p in self._passes}
            self._bytes = sum(p.nbytes for p in self._passes)
            self._bytes += sum(layout.nbytes for layout in self._layouts.values())
            self._thinned += len(gone)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the passes and the metrics take.

        Apart from it at most 600 summaries of all recordings are cached unpacked, some 5 kB each.
        """
        with self._lock:
            points = sum(len(curve) for _, curve in self._curves.values())
            return self._bytes + _POINT_BYTES * points

    @property
    def thinned(self) -> int:
        """How many passes went to stay within the bounds."""
        return self._thinned

    @property
    def thinned_points(self) -> int:
        """How many points of metrics went to stay within the bounds."""
        return self._thinned_points

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes kept, oldest first: a snapshot that later appends do not change."""
        with self._lock:
            return tuple(self._passes)

    @property
    def steps(self) -> list[int]:
        """The step of each pass, in order; a step with several passes occurs several times."""
        return [p.step for p in self.passes]

    @property
    def perturbed(self) -> list[bool]:
        """For each pass whether a perturbation was on."""
        return [p.perturbed for p in self.passes]

    @property
    def sites(self) -> tuple[str, ...]:
        """The keys of all sites ever appended, in the order in which they were first seen."""
        with self._lock:
            return tuple(self._sites)

    def __len__(self) -> int:
        """How many passes are kept."""
        return len(self._passes)

    def __repr__(self) -> str:
        passes = self.passes
        steps = f", steps {passes[0].step} to {passes[-1].step}" if passes else ""
        gone = f", {self._thinned} older passes thinned out" if self._thinned else ""
        points = f", {self._thinned_points} metric points thinned out" * bool(self._thinned_points)
        return (
            f"Recording({len(passes)} passes{steps}, {len(self.sites)} sites, "
            f"{self.nbytes / 2**20:.1f} MiB{gone}{points})"
        )

    def summary(
        self, site: str, quantity: Quantity = "output", *, index: int = -1
    ) -> Summary | None:
        """The summary of one pass, the newest by default.

        Args:
            site: a site key.
            quantity: "output", "gradient" or "input".
            index: which of the passes kept, as in `steps`.

        Returns:
            None where that pass did not measure it.

        Raises:
            KeyError: no pass ever had this site.
            IndexError: there is no such pass.
        """
        self._check(site, quantity)
        passes = self.passes
        if not -len(passes) <= index < len(passes):
            raise IndexError(f"pass {index} of a recording with {len(passes)} passes")
        return passes[index].summary(site, quantity)

    def series(self, site: str, quantity: Quantity = "output") -> tuple[list[int], list[Summary]]:
        """Steps and summaries of all passes which measured this, oldest first.

        Raises:
            KeyError: no pass ever had this site.
        """
        steps, blobs = self._series(site, quantity)
        return steps, [_unpacked(blob) for blob in blobs]

    def history(
        self, site: str, quantity: Quantity = "output", *, columns: int = 300
    ) -> HistoryArrays:
        """A site's quantity over the steps, as the screen draws it.

        The axis spans the finite values of all passes kept; passes that did not measure this have
        no column.

        Args:
            site: a site key.
            quantity: "output", "gradient" or "input".
            columns: most columns, at least 2. Where there are more passes, as many are picked,
                evenly, the first and the newest among them.

        Raises:
            KeyError: no pass ever had this site.
            ValueError: `columns` is below 2.
        """
        if columns < 2:
            raise ValueError(f"history takes at least 2 columns, got {columns}")
        steps, blobs = self._series(site, quantity)
        ranges = np.array([_HEADER.unpack_from(b)[3:] for b in blobs]).reshape(-1, 2)
        ranges = ranges[np.isfinite(ranges).all(axis=1)]
        low, high = (ranges[:, 0].min(), ranges[:, 1].max()) if len(ranges) else (0.0, 0.0)
        if len(steps) > columns:
            picked = [round(i * (len(steps) - 1) / (columns - 1)) for i in range(columns)]
            steps, blobs = [steps[i] for i in picked], [blobs[i] for i in picked]
        return _columns(steps, blobs, float(low), float(high))

    def _series(self, site: str, quantity: str) -> tuple[list[int], list[bytes]]:
        self._check(site, quantity)
        key = (site, quantity)
        found = [(p.step, p.packed[p.layout.at[key]]) for p in self.passes if key in p.layout.at]
        return [step for step, _ in found], [blob for _, blob in found]

    def _check(self, site: str, quantity: str) -> None:
        _check_quantity(quantity, site)
        sites = self.sites
        if site not in sites:
            close = difflib.get_close_matches(site, sites, n=3, cutoff=0.4) or sites[:3]
            near = ", ".join(map(repr, close)) or "none yet: append a pass first"
            raise KeyError(f"{site!r} is not in this recording. The closest sites are {near}.")

    def curves(self) -> dict[str, _Floats]:
        """The metrics, each as float64[n, 2]: step and value, in the order of arrival."""
        with self._lock:
            return {
                name: np.array([steps, curve], np.float64).T
                for name, (steps, curve) in self._curves.items()
            }

    def to_frame(self) -> pd.DataFrame:
        """A tidy pandas frame, one row a pass, site and quantity.

        Columns: `step, pass, kind, perturbed, site, quantity`, the protocol's statistics (counts
        as Int64), and the quantiles `q01, q05, q25, q50, q75, q95, q99`. A figure that is not
        known is missing.
        """
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        rows = [
            (p.step, p.number, p.kind, p.perturbed, site, quantity, *_figures(summary))
            for p in self.passes
            for site, quantity, summary in p.items()
        ]
        quantiles = [f"q{round(100 * q):02d}" for q in HISTORY_QUANTILES]
        names = ("step", "pass", "kind", "perturbed", "site", "quantity", *STATISTICS, *quantiles)
        types = dict.fromkeys(("step", "pass"), "int64") | {"perturbed": "bool"}
        types |= dict.fromkeys(_COUNTED, "Int64")
        types |= {n: "float64" for n in (*STATISTICS, *quantiles) if n not in _COUNTED}
        frame: Any = pd.DataFrame(rows, columns=list(names))
        return frame.astype(types)

    def metrics_frame(self) -> pd.DataFrame:
        """The metrics as a tidy pandas frame: columns `step, name, value`, name by name."""
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        points = [(step, name, value) for name, c in self.curves().items() for step, value in c]
        frame: Any = pd.DataFrame(points, columns=["step", "name", "value"])
        return frame.astype({"step": "int64", "value": "float64"})
