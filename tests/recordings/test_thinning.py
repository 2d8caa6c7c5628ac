"""Thinning: the passes that stay, the count of dropped ones, and an evenly spaced past."""

# jax and pandas are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import numpy as np
import pytest
from summaries import normal_values, summary_of

from nnx_inspector.recordings.curves import entries_to_drop
from nnx_inspector.recordings.recording import Recording


@pytest.mark.parametrize("limit", [2, 3, 5, 16, 100])
def test_thinning_keeps_the_first_and_the_newest_and_counts(limit: int) -> None:
    recording = Recording(max_steps=limit)
    summary, steps = summary_of(normal_values(0)), list[int]()
    for i in range(1000):
        recording.append(i, {"a": {"output": summary}})
        steps = recording.steps
        assert len(steps) <= limit
        assert (steps[0], steps[-1]) == (0, i)
        assert steps == sorted(set(steps))
        assert len(steps) + recording.thinned == i + 1
    assert f"{recording.thinned} older passes thinned out" in repr(recording)
    if limit == 100:  # the recent half is whole, the past is coarser the older it is
        assert np.diff(steps)[-40:].tolist() == [1] * 40
        assert 1 < np.diff(steps).max() < 3 * 1000 / 17  # 17 of them span the past


def test_thinning_keeps_the_first_nan_and_inf() -> None:
    recording, fine = Recording(max_steps=30), summary_of(normal_values(0))
    news = {137: [1.0, np.nan], 141: [np.inf], 143: [-np.inf]}
    for i in range(2000):
        bad = summary_of(np.array(news[i], np.float32)) if i in news else None
        late = summary_of(np.array([np.nan], np.float32)) if i > 200 else fine
        recording.append(i, {"a": {"output": bad or late, "gradient": fine}})
    assert len(recording) <= 30
    assert set(news) <= set(recording.steps)
    assert [sorted(p.nonfinite) for p in recording.passes if p.step in news] == (
        [["nan"], ["posinf"], ["neginf"]]
    )


def test_what_is_to_be_kept_goes_last() -> None:
    everything = [i % 9 > 0 for i in range(40)]
    gone = entries_to_drop(list(range(40)), everything)
    assert gone
    assert not any(everything[i] for i in gone)
    assert 1 <= len(entries_to_drop([0, 1, 2], [True] * 3)) < 3
    assert entries_to_drop([0, 1], [False] * 2) == set()
