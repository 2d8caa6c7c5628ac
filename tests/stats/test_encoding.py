"""Compact summaries: encoded and decoded bit for bit, and small."""

# jax and pandas are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import struct
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded import VALUES, fields, normal, pool, summary_of

from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.bins import FINITE_BINS, RANKS, bin_edges
from nnx_inspector.stats.encoding import decoded, encoded, encoded_all, ranges
from nnx_inspector.stats.summarize import summarize
from nnx_inspector.stats.summary import Summary


@pytest.mark.parametrize("name", VALUES)
def test_a_stored_summary_comes_back_bit_for_bit(name: str) -> None:
    summary, recording = summary_of(VALUES[name]), Recording()
    recording.append(3, {"a": {"output": summary}})
    back = recording.summary("a")
    assert back is not None
    assert fields(back) == fields(summary)


def test_the_range_is_read_without_the_rest() -> None:
    x, nothing = normal(0), np.zeros(0, np.float32)
    found = ranges([encoded(summary_of(v)) for v in (x, nothing)])
    np.testing.assert_array_equal(found, [[x.min(), x.max()], [np.nan, np.nan]])
    assert ranges([]).shape == (0, 2)
    blob = encoded(summary_of(normal(1, 100_000)))
    assert len(blob) < 600
    assert not decoded(blob).counts.flags.writeable


def plainly(one: Summary) -> bytes:
    """The bytes of a merged summary, number by number."""
    used = [i for i, count in enumerate(one.bins.tolist()) if count]
    counts = [int(one.bins[i]) for i in used]
    low = high = np.nan
    if any(FINITE_BINS[i] for i in used):
        low, high = map(float, one.points[:2])
    ordered = [i for i in used if RANKS[i] >= 0]
    if np.isnan(low) and ordered:
        low = min(bin_edges()[i, 0] for i in ordered)
        high = max(bin_edges()[i, 1] for i in ordered)
    kind = one.points.dtype.newbyteorder("<")
    width = next(k for k in range(9) if max(counts, default=0) < 256**k)
    number = ["<f8", "<i4", "<u4", "<i8", "<u8"].index(kind.str)
    header = struct.pack("<BBHdd", number, width, len(used), low, high)
    apart = [b - a for a, b in zip([0, *used], used, strict=False)]
    planes = [x >> 8 * k & 255 for k in range(2) for x in apart]
    planes += [x >> 8 * k & 255 for k in range(width) for x in counts]
    moments = one.points.astype(kind).tobytes() + one.sums.astype("<f8").tobytes()
    return header + moments + zlib.compress(bytes(planes), 1)


def test_many_are_encoded_as_each_one_merged() -> None:
    """As they leave a program, and merged."""
    raw = [jax.tree.map(np.asarray, summarize(jnp.asarray(x))) for x in VALUES.values()]
    every = [*raw, *pool(), *reversed(raw)]
    assert len({s.bins.dtype for s in every}) == 2
    assert encoded_all(every) == [plainly(s.merged()) for s in every]
    assert encoded_all([]) == []
