"""Compact summaries: encoded and decoded bit for bit, and small."""

# jax and pandas are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import random
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from summaries import VALUES, all_summaries, normal_values, summary_bytes, summary_of

from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.bins import BINS, FINITE_BINS
from nnx_inspector.stats.encoding import (
    Packed,
    decode,
    decode_checked,
    decode_ranges,
    encode,
)
from nnx_inspector.stats.summarize import summarize
from nnx_inspector.stats.summary import Summary


@pytest.mark.parametrize("name", VALUES)
def test_a_stored_summary_comes_back_bit_for_bit(name: str) -> None:
    summary, recording = summary_of(VALUES[name]), Recording()
    recording.append(3, {"a": {"output": summary}})
    back = recording.summary("a")
    assert back is not None
    assert summary_bytes(back) == summary_bytes(summary)


def test_ranges_are_those_of_the_values() -> None:
    x, nothing, counted = normal_values(0), np.zeros(0, np.float32), all_summaries()[-3]
    assert np.isnan(counted.points).all()
    found = encode([summary_of(v) for v in (x, nothing)])
    np.testing.assert_array_equal(decode_ranges(found), [[x.min(), np.nan], [x.max(), np.nan]])
    found = encode([summary_of(x), counted])
    np.testing.assert_array_equal(decode_ranges(found), decode(found)[-2:])
    assert decode_ranges(Packed.of([]))[0].shape == (0,)
    assert len(encode([summary_of(normal_values(1, 100_000))]).data) < 500


def plainly(one: Summary) -> bytes:
    """The bytes of a merged summary, number by number."""
    kind = ["<f8", "<i4", "<u4", "<i8", "<u8"].index(one.points.dtype.newbyteorder("<").str)
    moments = struct.pack(f"<3{'dqQqQ'[kind]}3d", *one.points.tolist(), *one.sums)
    return written(kind, moments, {i: n for i, n in enumerate(one.bins.tolist()) if n})


def written(kind: int, moments: bytes, counts: dict[int, int]) -> bytes:
    head = bytes([8 + kind + 16 * (not FINITE_BINS[np.array(list(counts), int)].any())]) + moments
    numbers, after = [], 0
    for i, count in counts.items():
        numbers += [0, i - after, count] if i > after else [count]
        after = i + 1
    body = bytearray()
    for number in numbers:
        while number > 127:
            body.append(number & 127 | 128)
            number >>= 7
        body.append(number)
    return head + bytes(body)


def test_many_are_encoded_as_each_one_merged() -> None:
    """As they leave a program, and merged."""
    raw = [jax.tree.map(np.asarray, summarize(jnp.asarray(x))) for x in VALUES.values()]
    every = [*raw, *all_summaries(), *reversed(raw)]
    assert len({s.bins.dtype for s in every}) == 2
    packed = encode([s.without_rows() for s in every])
    assert [packed.piece(i) for i in range(len(every))] == [plainly(s.merged()) for s in every]
    assert Packed.of([plainly(s.merged()) for s in every]) == packed
    assert encode([]) == Packed(b"", b"")


def test_all_are_decoded_as_each_one() -> None:
    every = [s.merged() for s in all_summaries()]
    (found,) = decode_checked(encode(every))
    assert [summary_bytes(found.summary(i)) for i in range(len(every))] == [
        summary_bytes(s) for s in every
    ]
    assert found.saturated.tolist() == [s.saturated for s in every]


def counts_of(pairs: dict[int, int]) -> Summary:
    bins = np.zeros(BINS, np.uint64)
    bins[list(pairs)] = list(pairs.values())
    return Summary(bins=bins, points=np.full(3, np.nan), sums=np.full(3, np.nan))


@given(st.lists(st.dictionaries(st.integers(0, BINS - 1), st.integers(1, 2**64 - 2), max_size=9)))
def test_any_counts_come_back(every: list[dict[int, int]]) -> None:
    found = decode(encode([counts_of(pairs) for pairs in every]))
    for i, pairs in enumerate(every):
        bins = found.summary(i).bins
        assert (
            dict(zip(np.flatnonzero(bins).tolist(), bins[bins > 0].tolist(), strict=True)) == pairs
        )


BLOB = plainly(summary_of(normal_values(0, 50)))
LIES = {
    "a tiny summary": BLOB[:48],
    "a very long one": BLOB + b"\1" * 50_000,
    "half a number at the end": BLOB + b"\x80",
    "a number with a zero on top": BLOB[:-1] + bytes([BLOB[-1] | 128, 0]),
    "bins left out at the end": BLOB + b"\0",
    "no bins left out": BLOB + b"\0\0\1",
    "bins beyond the last": BLOB + b"\1" * 3000,
    "far beyond the last": BLOB + b"\0" + b"\xff" * 9 + b"\1\1",
    "a number of 70 bits": BLOB + b"\xff" * 9 + b"\x7f",
    "a number of 700 bits": BLOB + b"\xff" * 100 + b"\1",
    "no such dtype": bytes([13]) + BLOB[1:],
    "no such flag": bytes([40]) + BLOB[1:],
    "nothing finite, it says": bytes([24]) + BLOB[1:],
    "something finite, it says": bytes([8]) + plainly(summary_of(np.zeros(0, np.float32)))[1:],
    "an infinite extreme": BLOB[:1] + struct.pack("<d", -np.inf) + BLOB[9:],
    "extremes the wrong way round": BLOB[:1] + BLOB[9:17] + BLOB[1:9] + BLOB[17:],
    "a negative scale": BLOB[:25] + struct.pack("<d", -1.0) + BLOB[33:],
    "more values than there can be": BLOB[:-1] + b"\xff" * 8 + b"\x7f",
    "an integer beyond its dtype": struct.pack("<B3q3d", 9, 0, 2**40, 0, 0, 0, 0) + BLOB[49:],
}


@pytest.mark.parametrize("name", LIES)
def test_bytes_that_are_no_summary_are_refused(name: str) -> None:
    assert [len(found.kinds) for found in decode_checked(Packed.of([BLOB, BLOB]))] == [2]
    for pieces in ([LIES[name]], [BLOB, LIES[name], BLOB]):
        with pytest.raises(ValueError, match=r"summary"):
            list(decode_checked(Packed.of(pieces)))


def written_again(packed: Packed) -> Packed:
    found, pieces = decode(packed), list[bytes]()
    for i, kind in enumerate(found.kinds.tolist()):
        mine = found.rows == i
        counts = dict(zip(found.bins[mine].tolist(), found.counts[mine].tolist(), strict=True))
        pieces.append(written(kind, packed.piece(i)[1:49], counts))
    return Packed.of(pieces)


def test_bytes_are_accepted_if_they_would_be_written_again() -> None:
    source, blobs = random.Random(0), [encode([one]).data for one in all_summaries()]
    accepted = 0
    for _ in range(4000):
        body = bytearray(source.choice(blobs))
        for _ in range(source.randrange(3)):
            at = source.choice(
                [0, len(body) - 1, source.randrange(min(49, len(body) - 1), len(body))]
            )
            byte = source.choice([0, 1, 127, 128, 255, source.randrange(256)])
            if source.random() < 0.5 or at == 0:
                body[at] = byte
            else:
                body.insert(at, byte)
        packed = Packed.of([source.choice(blobs), bytes(body), source.choice(blobs)])
        try:
            again = written_again(packed) == packed
        except IndexError:
            again = False
        try:
            strict = len(decode(packed, strict=True).kinds) == 3
        except (IndexError, ValueError):
            strict = False
        assert strict == again, bytes(body[:1] + body[49:])
        accepted += strict
    assert 1000 < accepted < 3000
