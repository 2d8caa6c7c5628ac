"""Compact summaries: encoded and decoded bit for bit, and small."""

# jax and pandas are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import numpy as np
import pytest
from recorded import VALUES, fields, normal, summary_of

from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.encoding import decoded, encoded, ranges


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
