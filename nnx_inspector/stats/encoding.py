"""A merged summary in about 500 bytes, so that a recording can keep thousands of them.

Invariant: decoding returns what was encoded, bit for bit; bytes from a file are validated by
`checked` first. Imports no jax.
"""

from __future__ import annotations

import functools
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nnx_inspector.stats.bins import (
    BINS,
    FINITE_BINS,
    RANKS,
    VALUE_ORDER,
    Binned,
    bin_edges,
    spread,
    tabulated,
)
from nnx_inspector.stats.moments import MAXIMUM, MINIMUM, SCALE, alone
from nnx_inspector.stats.summary import SATURATED, Summary

_POINTS: Final[tuple[str, ...]] = ("<f8", "<i4", "<u4", "<i8", "<u8")
_HEADER: Final = struct.Struct("<BBHdd")
"""Dtype of the points, bytes for each count, number of bins, lowest and highest value."""


class Sparse(NamedTuple):
    """A merged summary with only the bins in use.

    Attributes:
        points: see `Summary.points`.
        sums: see `Summary.sums`.
        used: int64[k], the bins in use, ascending.
        counts: uint64[k].
        low: the smallest finite value, or a bound if that is unknown; NaN if no value is finite.
        high: the largest finite value, or a bound if that is unknown; NaN if no value is finite.
    """

    points: npt.NDArray[Any]
    sums: npt.NDArray[np.float64]
    used: npt.NDArray[np.int64]
    counts: npt.NDArray[np.uint64]
    low: float
    high: float

    @property
    def saturated(self) -> bool:
        return bool((self.counts == SATURATED).any())

    def summary(self) -> Summary:
        bins = np.zeros(BINS, np.uint64)
        bins[self.used] = self.counts
        return Summary(bins=bins, points=self.points, sums=self.sums)


def encoded(summary: Summary) -> bytes:
    """The bytes of a host summary without rows: sparse bins, counts in byte planes, deflated.

    Example:
        >>> from nnx_inspector.stats.summary import empty
        >>> decoded(encoded(empty())).summary()
        Summary(size=0, mean=nan, std=nan, min=nan, max=nan, zeros=0, nan=0, posinf=0, neginf=0)
    """
    return encoded_all([summary])[0]


def encoded_all(summaries: Sequence[Summary]) -> list[bytes]:
    """`encoded` of each, at once for all of the same dtypes: those that `merge` would return."""
    out = [b""] * len(summaries)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, s in enumerate(summaries):
        alike.setdefault((s.bins.dtype, s.points.dtype, s.sums.dtype), []).append(i)
    for chosen in alike.values():
        for i, blob in zip(chosen, _encoded([summaries[i] for i in chosen]), strict=True):
            out[i] = blob
    return out


def _encoded(alike: Sequence[Summary]) -> Iterator[bytes]:
    every, largest = np.stack([s.bins for s in alike]), np.iinfo(alike[0].bins.dtype).max
    place = np.flatnonzero(every != 0)
    row, index = np.divmod(place, BINS)
    count = every.reshape(-1)[place].astype("<u8")
    count[count == largest] = SATURATED
    ends = np.searchsorted(row, np.arange(1, len(alike) + 1))
    some = np.zeros(len(alike), bool)
    some[row[FINITE_BINS[index]]] = True
    points, sums = alone(
        np.stack([s.points for s in alike]), np.stack([s.sums for s in alike]), some
    )
    # Neighbouring bins differ by one and hold similar counts, so storing bytes of equal
    # significance together deflates three times better than storing number after number.
    apart = np.diff(index, prepend=0)
    start = np.concatenate([[0], ends[:-1]])
    first = start[start < ends]
    apart[first] = index[first]
    widths = np.zeros(len(alike), int)
    widths[start < ends] = _bytes_of(np.maximum.reduceat(count, first)) if len(first) else 0
    steps = apart.astype("<u2").view(np.uint8).reshape(-1, 2)
    planes = count.view(np.uint8).reshape(-1, 8)[:, : widths.max(initial=0)]
    body = np.concatenate([steps, planes], axis=1).T.copy()
    low, high = np.where(some, points[:, [MINIMUM, MAXIMUM]].T.astype(np.float64), np.nan)
    for i in np.flatnonzero(some & np.isnan(low)):
        low[i], high[i] = _range(index[start[i] : ends[i]], points[i])
    kind = points.dtype.newbyteorder("<")
    exact = points.astype(kind), sums.astype("<f8")
    columns = [x.tolist() for x in (start, ends, widths, low, high)]
    for i, (here, end, width, *bounds) in enumerate(zip(*columns, strict=True)):
        header = _HEADER.pack(_POINTS.index(kind.str), width, end - here, *bounds)
        moments = exact[0][i].tobytes() + exact[1][i].tobytes()
        yield header + moments + zlib.compress(body[: 2 + width, here:end].tobytes(), 1)


def _bytes_of(counts: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """How many bytes each count needs, at least 1."""
    return 1 + (counts[:, None] >> np.arange(8, 64, 8, dtype=np.uint64) > 0).sum(axis=1)


def _range(index: npt.NDArray[Any], points: npt.NDArray[Any]) -> tuple[float, float]:
    """`low` and `high` of a summary with these bins in use."""
    if not FINITE_BINS[index].any():
        return np.nan, np.nan
    low, high = float(points[MINIMUM]), float(points[MAXIMUM])
    if math.isnan(low):  # moments unknown: the outermost bins bound the values
        ranks = RANKS[index]
        ranks = ranks[ranks >= 0]
        if len(ranks):
            ends = bin_edges()[VALUE_ORDER[[ranks.min(), ranks.max()]]]
            low, high = float(ends[0, 0]), float(ends[1, 1])
    return low, high


def checked(blob: bytes) -> Sparse:
    """Decode bytes that anybody may have written, in about 40 kB of memory at most.

    Raises:
        ValueError: these are not the bytes of a summary.

    Example:
        >>> from nnx_inspector.stats.summary import empty
        >>> len(checked(encoded(empty())).used)
        0
    """
    if len(blob) < _HEADER.size:
        raise ValueError("a summary is too short")
    kind, width, used, low, high = _HEADER.unpack_from(blob)
    if kind >= len(_POINTS) or width > 8 or used > BINS or (width == 0) != (used == 0):
        raise ValueError("a summary's header is invalid")
    start = _HEADER.size + 3 * np.dtype(_POINTS[kind]).itemsize + 24
    inflated = zlib.decompressobj()
    try:
        size = len(inflated.decompress(memoryview(blob)[start:], used * (2 + width) + 1))
    except zlib.error as error:
        raise ValueError(f"the bins of a summary cannot be inflated ({error})") from error
    if size != used * (2 + width) or not inflated.eof or inflated.unused_data:
        raise ValueError("the number of a summary's bins is not the one in its header")
    found = decoded.__wrapped__(blob)
    _check_figures(found)
    if np.array([low, high]).tobytes() != np.array(_range(found.used, found.points)).tobytes():
        raise ValueError("a summary's range does not fit its values")
    return found


def _check_figures(found: Sparse) -> None:
    rises = len(found.used) == 0 or (
        found.used[-1] < BINS and bool((np.diff(found.used) > 0).all())
    )
    if not rises or not found.counts.all():
        raise ValueError("the bins of a summary are not ascending, or one of them is empty")
    if not found.saturated and found.counts.sum(dtype=np.float64) >= 2.0**63:
        raise ValueError("a summary counts more than 2**63 values")
    points, scale = found.points, found.sums[SCALE]
    if np.isinf(points).any() or points[MINIMUM] > points[MAXIMUM]:
        raise ValueError("a summary's smallest value is above its largest, or infinite")
    if scale < 0 or np.isinf(scale):
        raise ValueError("a summary's scale is negative or infinite")


@functools.lru_cache(maxsize=600)  # the columns of two histories, which are redrawn all the time
def decoded(blob: bytes) -> Sparse:
    """Decode the bytes of `encoded`. The arrays are read-only."""
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
    return Sparse(points, sums, index, counts, low, high)


def ranges(blobs: Sequence[bytes]) -> npt.NDArray[np.float64]:
    """`low` and `high` of each summary, float64[blobs, 2], without decoding the rest."""
    return np.array([_HEADER.unpack_from(blob)[3:] for blob in blobs], np.float64).reshape(-1, 2)


class Entries(NamedTuple):
    """The bins in use of several summaries: the row, the bin and the count of each."""

    rows: npt.NDArray[np.int64]
    bins: npt.NDArray[np.int64]
    counts: npt.NDArray[np.uint64]


def entries(parts: Sequence[Sparse]) -> Entries:
    """The bins in use of all summaries, one summary after the other."""
    rows = np.repeat(np.arange(len(parts)), np.array([len(p.used) for p in parts], int))
    bins = np.concatenate([np.zeros(0, np.int64), *(p.used for p in parts)])
    counts = np.concatenate([np.zeros(0, np.uint64), *(p.counts for p in parts)])
    return Entries(rows, bins, counts)


def binned(parts: Sequence[Sparse]) -> Binned:
    """The finite values of all summaries, one in each row. Saturated (unknown) rows are zeros."""
    rows, bins, counts = entries(parts)
    low, high = np.array([[p.low, p.high] for p in parts]).reshape(-1, 2).T
    table = tabulated(*spread(rows, bins, counts, low, high), len(parts))
    table[1][np.unique(rows[counts == SATURATED])] = 0.0
    return Binned(*table, low, high)
