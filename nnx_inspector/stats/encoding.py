"""Merged summaries side by side, and in some 250 bytes each: the one form in which a pass is kept.

A recording keeps these bytes, a file stores them, and a frame has those of the selected site, which
the browser decodes (js/src/kernel/decode.ts). They are in notebooks/recording-format.md.
Invariant: decoding returns what was encoded, bit for bit; bytes from a file are validated by
`decode_checked` first. All summaries are computed over one flat array. Imports no jax.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nnx_inspector.errors import InspectorError
from nnx_inspector.stats.bins import BINS, FINITE_BINS, RANK_OF_BIN, VALUE_ORDER, bin_edges
from nnx_inspector.stats.moments import MAXIMUM, MINIMUM, SCALE, canonical_moments
from nnx_inspector.stats.summary import SATURATED, Summary

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_POINTS: Final = ("<f8", "<i4", "<u4", "<i8", "<u8")
"""Dtypes of the points. In bytes they have eight each, as a float, or an integer of their sign."""
_WIDE: Final = ("<f8", "<i8", "<u8", "<i8", "<u8")
_FIRST: Final = 8
"""The number of the first of them in bytes; lower numbers are those of deflated summaries."""
_NOTHING: Final = 16
"""Added to the number if no value is finite."""
_HEAD: Final = np.dtype([("kind", "u1"), ("points", "<u8", 3), ("sums", "<f8", 3)])
_RANGE: Final = np.dtype([("kind", "u1"), ("points", "<u8", 2)])
HEAD_BYTES: Final = _HEAD.itemsize
"""The bytes of a summary before its counts."""
_LONGEST: Final = HEAD_BYTES + 10 * BINS
"""The most bytes of a summary."""
_MOST: Final = 2**32
_ZERO, _NOT = np.zeros(1, int), np.zeros(1, bool)
_BATCH_BYTES: Final = 2**13
"""How many bytes are validated together, in some megabytes; of deflated ones an eighth."""
_DEFLATED_HEAD: Final = struct.Struct("<BBHdd")
"""Of a deflated summary: dtype of the points, bytes for each count, number of bins, two more."""


class Packed(NamedTuple):
    """Summaries as bytes, one after the other.

    Attributes:
        data: their bytes.
        ends: where each of them ends, uint32.
    """

    data: bytes
    ends: bytes

    @staticmethod
    def of(pieces: Sequence[bytes]) -> Packed:
        """Summaries that were pieces of others."""
        ends = np.cumsum([len(piece) for piece in pieces], dtype="<u4")
        return Packed(b"".join(pieces), ends.tobytes())

    @property
    def deflated(self) -> bool:
        """Whether they are as earlier versions wrote them; see `reencode`."""
        return self.data[:1] < bytes([_FIRST]) and len(self.data) > 0

    def first(self, count: int) -> Packed:
        """The first of them."""
        end = struct.unpack_from("<I", self.ends, 4 * count - 4)[0] if count else 0
        return Packed(self.data[:end], self.ends[: 4 * count])

    def piece(self, at: int) -> bytes:
        """One summary."""
        start = struct.unpack_from("<I", self.ends, 4 * at - 4)[0] if at else 0
        return self.data[start : struct.unpack_from("<I", self.ends, 4 * at)[0]]


class Sparse(NamedTuple):
    """Merged summaries, one in each row, with only the bins in use.

    Attributes:
        kinds: uint8[rows], the dtype of each row's points.
        points: uint64[rows, 3], the bits of `Summary.points`, in 64 bits each.
        sums: float64[rows, 3], see `Summary.sums`.
        rows: int64[k], the row of each bin in use, ascending.
        bins: int64[k], ascending within a row.
        counts: uint64[k].
        low: float64[rows], the smallest finite value, or a bound if that is unknown; NaN if no
            value is finite.
        high: float64[rows], the largest, in the same way.
    """

    kinds: _Bytes
    points: _Words
    sums: _Floats
    rows: _Ints
    bins: _Ints
    counts: _Words
    low: _Floats
    high: _Floats

    @property
    def saturated(self) -> npt.NDArray[np.bool_]:
        """Of which rows a count has stopped at its largest value."""
        stopped = self.rows[self.counts == SATURATED]
        return np.bincount(stopped, minlength=len(self.kinds)) > 0

    def summary(self, row: int) -> Summary:
        bins, of_row = np.zeros(BINS, np.uint64), slice(*np.searchsorted(self.rows, [row, row + 1]))
        bins[self.bins[of_row]] = self.counts[of_row]
        points = self.points[row].view(_WIDE[self.kinds[row]]).astype(_POINTS[self.kinds[row]])
        return Summary(bins=bins, points=points, sums=self.sums[row])


def _ends(
    kinds: _Bytes, bits: _Words, some: npt.NDArray[np.bool_], rows: _Ints, bins: _Ints
) -> tuple[_Floats, _Floats]:
    """`low` and `high`. If moments are unknown, the outermost bins bound the values."""
    low, high = np.where(some, as_floats(kinds, bits)[:, [MINIMUM, MAXIMUM]].T, np.nan)
    unknown = some & np.isnan(low)
    for row in unknown.nonzero()[0] if unknown.any() else ():
        ranks = RANK_OF_BIN[bins[rows == row]]
        ranks = ranks[ranks >= 0]
        if len(ranks):
            ends = bin_edges()[VALUE_ORDER[[ranks.min(), ranks.max()]]]
            low[row], high[row] = ends[0, 0], ends[1, 1]
    return low, high


def as_floats(kinds: _Bytes, bits: _Words) -> _Floats:
    """Points as numbers, float64."""
    found = bits.view(np.float64)
    for kind in set(kinds[kinds > 0].tolist()):
        at = kinds == kind
        found = np.where(at[:, None], bits.view(_WIDE[kind]).astype(np.float64), found)
    return found


def encode(summaries: Sequence[Summary]) -> Packed:
    """Host summaries without rows as bytes, as `merge` would return them.

    Each has its points and sums, then numbers of 7 bits in a byte, the lowest first, with the
    highest bit set in all but the last byte of a number. Each number is the count of the next bin;
    after a 0 follows how many bins are left out. Used bins are mostly adjacent and most counts are
    small, so deflating these bytes would hardly make them fewer.

    Example:
        >>> from nnx_inspector.stats.summary import empty
        >>> decode(encode([empty()])).summary(0)
        Summary(size=0, mean=nan, std=nan, min=nan, max=nan, zeros=0, nan=0, posinf=0, neginf=0)
    """
    used = [(s.bins != 0).nonzero()[0] for s in summaries]
    many, found = len(used), [s.bins[u] for s, u in zip(summaries, used, strict=True)]
    rows = np.repeat(np.arange(many), [len(u) for u in used])
    bins = np.concatenate([np.zeros(0, int), *used])
    counts = np.concatenate([np.zeros(0, np.uint64), *found], dtype=np.uint64)
    narrow = np.array([s.bins.dtype.itemsize < 8 for s in summaries], bool)[rows]
    counts[narrow & (counts == np.iinfo(np.uint32).max)] = SATURATED
    some = np.bincount(rows[FINITE_BINS[bins]], minlength=many) > 0
    heads = np.zeros(many, _HEAD)
    for dtype in {s.points.dtype for s in summaries}:
        at = [i for i, s in enumerate(summaries) if s.points.dtype == dtype]
        points = np.stack([summaries[i].points for i in at])
        points, heads["sums"][at] = canonical_moments(
            points, np.stack([summaries[i].sums for i in at]), some[at]
        )
        heads["kind"][at] = kind = _POINTS.index(points.dtype.newbyteorder("<").str)
        heads["points"][at] = points.astype(_WIDE[kind]).view(np.uint64)
    heads["kind"] += (_FIRST + _NOTHING * ~some).astype(np.uint8)
    apart = np.diff(bins, prepend=-1) - 1
    first = np.flatnonzero(np.diff(rows, prepend=-1))
    apart[first] = bins[first]
    each = 1 + 2 * (apart > 0)
    end = np.cumsum(each)
    numbers = np.zeros(each.sum(), np.uint64)
    numbers[end - 1] = counts
    numbers[end[apart > 0] - 2] = apart[apart > 0]
    length, most = np.ones(len(numbers), int), int(numbers.max(initial=0)).bit_length()
    for bit in range(7, most, 7):
        length += numbers >> np.uint64(bit) > 0
    start = np.cumsum(length) - length
    body = np.empty(length.sum(), np.uint8)
    for place in range(length.max(initial=0)):
        on = length > place
        part = (numbers[on] >> np.uint64(7 * place)).astype(np.uint8) & 127
        body[start[on] + place] = part | (length[on] > place + 1).astype(np.uint8) << 7
    sizes = np.bincount(np.repeat(rows, each), length, many).astype(int) + HEAD_BYTES
    ends = np.cumsum(sizes)
    data = np.empty(sizes.sum(), np.uint8)
    heads_at, behind = _head_places(ends), np.ones(len(data), bool)
    behind[heads_at] = False
    data[heads_at], data[behind] = heads.view(np.uint8).reshape(heads_at.shape), body
    if len(data) >= _MOST:
        raise InspectorError(
            f"A pass of {len(data)} bytes cannot be kept, the limit is 2**32. Record fewer sites "
            "with only=."
        )
    return Packed(data.tobytes(), ends.astype("<u4").tobytes())


def _head_places(ends: _Ints) -> _Ints:
    """The place of each byte of each head, [rows, bytes]."""
    return np.concatenate([_ZERO, ends[:-1]])[: len(ends), None] + np.arange(HEAD_BYTES)


def decode(packed: Packed, *, strict: bool = False) -> Sparse:
    """Decode what `encode` has made.

    Args:
        strict: whether to make sure that `encode` would write the same bytes.

    Raises:
        ValueError: it would not.
    """
    data, ends = np.frombuffer(packed.data, np.uint8), np.frombuffer(packed.ends, "<u4").astype(int)
    heads_at, behind = _head_places(ends), np.ones(len(data), bool)
    behind[heads_at] = False
    head, body = data[heads_at].view(_HEAD)[:, 0], data[behind]
    stop = (body < 128).nonzero()[0] + 1
    start = np.concatenate([_ZERO, stop[:-1]])[: len(stop)]
    numbers, more = (body[start] & 127).astype(np.uint64), stop - start
    longer = (more > 1).nonzero()[0]
    for place in range(1, more.max(initial=0)):
        part = (body[start[longer] + place] & 127).astype(np.uint64)
        numbers[longer] |= part << np.uint64(7 * place)
        longer = longer[more[longer] > place + 1]
    # a number behind a 0 says how many bins are left out
    skips = numbers == 0
    apart = np.concatenate([_NOT, skips[:-1]])[: len(skips)]
    steps = (~(skips | apart)).astype(int)
    counted = steps.nonzero()[0]
    steps[apart] = numbers[apart]
    reached = np.concatenate([_ZERO, np.cumsum(steps)])
    ends = ends - HEAD_BYTES * np.arange(1, len(ends) + 1)
    of_row = np.searchsorted(stop, ends, "right")
    first = np.concatenate([_ZERO, of_row[:-1]])[: len(ends)]
    rows = np.repeat(np.arange(len(ends)), of_row - first)[counted]
    bins = reached[1:][counted] - 1 - reached[first][rows]
    kinds, bits = head["kind"] % _FIRST, np.array(head["points"])
    if strict:
        some = np.bincount(rows[FINITE_BINS[bins]], minlength=len(ends)) > 0
        number_ends, left_out = np.concatenate([_ZERO, stop]), skips | apart
        longest, last = more == 10, body[stop - 1]
        alike = (head["kind"] == _FIRST + kinds + _NOTHING * ~some).all()
        alike &= (number_ends[of_row] == ends).all()  # no number crosses the end of a summary
        alike &= not ((more > 1) & (last == 0) | (more > 10) | longest & (last > 1)).any()
        alike &= not (numbers[apart] >= BINS).any()
        alike &= not (skips[1:] & left_out[:-1]).any()  # bins are left out once at a time
        alike &= not left_out[of_row[of_row > first] - 1].any()  # and never the last ones
        if not alike:
            raise ValueError("the bins of a summary are not written as this package writes them")
    low, high = _ends(kinds, bits, head["kind"] < _FIRST + _NOTHING, rows, bins)
    return Sparse(kinds, bits, np.array(head["sums"]), rows, bins, numbers[counted], low, high)


def decode_ranges(packed: Packed) -> tuple[_Floats, _Floats]:
    """`low` and `high` of each summary, without decoding the rest if possible."""
    data, ends = np.frombuffer(packed.data, np.uint8), np.frombuffer(packed.ends, "<u4").astype(int)
    head = data[_head_places(ends)[:, : _RANGE.itemsize]].view(_RANGE)[:, 0]
    some = head["kind"] < _FIRST + _NOTHING
    found = as_floats(head["kind"] % _FIRST, np.array(head["points"]))
    if np.isnan(found[some]).any():
        everything = decode(packed)
        return everything.low, everything.high
    low, high = np.where(some, found.T, np.nan)
    return low, high


def decode_checked(packed: Packed) -> Iterator[Sparse]:
    """Decode bytes that anybody may have written, some at a time, in a few megabytes.

    Raises:
        ValueError: these are not the bytes of summaries.

    Example:
        >>> from nnx_inspector.stats.summary import empty
        >>> [len(found.bins) for found in decode_checked(encode([empty(), empty()]))]
        [0]
    """
    for rows in _batches(packed, _BATCH_BYTES):
        some = Packed.of([packed.piece(row) for row in rows])
        sizes = np.diff(np.frombuffer(some.ends, "<u4").astype(int), prepend=0)
        if ((sizes < HEAD_BYTES) | (sizes > _LONGEST)).any():
            raise ValueError("a summary is too short or too long")
        try:
            found = decode(some, strict=True)
        except IndexError as error:
            raise ValueError("a summary has a bin or a dtype that does not exist") from error
        total = np.bincount(found.rows, found.counts, len(sizes))
        if (total[~found.saturated] >= 2.0**63).any():
            raise ValueError("a summary counts more than 2**63 values")
        for kind in set(found.kinds.tolist()):
            points = found.points[found.kinds == kind].view(_WIDE[kind])
            exact = (points.astype(_POINTS[kind]) == points) | np.isnan(points)
            if (points[:, MINIMUM] > points[:, MAXIMUM]).any() or np.isinf(points).any():
                raise ValueError("a summary's smallest value is above its largest, or infinite")
            if not exact.all():
                raise ValueError("a summary has an integer beyond its dtype")
        scale = found.sums[:, SCALE]
        if (scale < 0).any() or np.isinf(scale).any():
            raise ValueError("a summary's scale is negative or infinite")
        yield found


def reencode(packed: Packed, most: int) -> Packed:
    """Deflated summaries as they are written today, in at most so many bytes.

    Raises:
        ValueError: these are not their bytes, or they would take more.
    """
    kept, taken = list[bytes](), 0
    for rows in _batches(packed, _BATCH_BYTES // 8):
        some = encode([_inflate(packed.piece(row)) for row in rows])
        kept += [some.piece(at) for at in range(len(rows))]
        taken += len(some.data) + 64 * len(rows)
        if taken > most:
            raise ValueError("its summaries would take many times their bytes")
    return Packed.of(kept)


def _batches(packed: Packed, together: int) -> Iterator[range]:
    ends = np.frombuffer(packed.ends, "<u4").astype(int)
    start = before = 0
    while start < len(ends):
        stop = max(start + 1, int(np.searchsorted(ends, before + together, "right")))
        yield range(start, stop)
        start, before = stop, ends[stop - 1]


def _inflate(blob: bytes) -> Summary:
    """A summary with deflated bins, as earlier versions wrote it, in about 40 kB at most.

    Raises:
        ValueError: these are not its bytes.
    """
    if len(blob) < _DEFLATED_HEAD.size:
        raise ValueError("a summary is too short")
    kind, width, used, _, _ = _DEFLATED_HEAD.unpack_from(blob)
    if kind >= len(_POINTS) or width > 8 or used > BINS or (width == 0) != (used == 0):
        raise ValueError("a summary's header is invalid")
    start = _DEFLATED_HEAD.size + 3 * np.dtype(_POINTS[kind]).itemsize
    stream = zlib.decompressobj()
    try:
        body = stream.decompress(memoryview(blob)[start + 24 :], used * (2 + width) + 1)
    except zlib.error as error:
        raise ValueError(f"the bins of a summary cannot be inflated ({error})") from error
    if len(body) != used * (2 + width) or not stream.eof or stream.unused_data:
        raise ValueError("the number of a summary's bins is not the one in its header")
    planes = np.frombuffer(body, np.uint8).reshape(2 + width, used).astype(np.uint64)
    weights = np.uint64(8) * np.arange(width, dtype=np.uint64)
    index = np.cumsum(planes[0] + (planes[1] << np.uint64(8)), dtype=int)
    if (np.diff(index) == 0).any() or index.max(initial=0) >= BINS:
        raise ValueError("the bins of a summary are not ascending")
    bins = np.zeros(BINS, np.uint64)
    bins[index] = (planes[2:] << weights[:, None]).sum(axis=0)
    points = np.frombuffer(blob, _POINTS[kind], 3, _DEFLATED_HEAD.size)  # pyright: ignore
    return Summary(bins=bins, points=points, sums=np.frombuffer(blob, "<f8", 3, start))
