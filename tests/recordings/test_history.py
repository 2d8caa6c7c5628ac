"""The history of a recording against its summaries, and against NumPy on the values."""

# jax and pandas are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import numpy as np
import pytest
from call_counts import count_calls
from summaries import VALUES, normal_values, summary_of

from nnx_inspector.recordings.history import decoded_stats
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen.protocol import (
    HISTORY_BINS,
    HISTORY_QUANTILES,
    STATISTICS,
    buffer_of,
)
from nnx_inspector.stats.bins import BINS
from nnx_inspector.stats.encoding import encode
from nnx_inspector.stats.summary import Summary, merge


def test_history_equals_the_summaries() -> None:
    recording = Recording()
    kept: list[Summary] = []
    values = [*VALUES.values(), *(normal_values(i, 3000, 10.0 ** (i - 3)) for i in range(6))]
    for i, x in enumerate(values):
        summary = summary_of(x)
        kept.append(summary)
        recording.append(2 * i, {"a": {"output": summary}}, perturbed=i % 2 == 1)
    history = recording.history("a")
    total = merge([s for s in kept if s.finite])
    edges, _ = total.histogram(HISTORY_BINS, scale="symlog")
    np.testing.assert_allclose(history.edges, edges, rtol=1e-12)
    assert history.steps.tolist() == [2 * i for i in range(len(values))]
    for row, summary in enumerate(kept):
        if not summary.finite:
            assert np.isnan(history.quantiles[row]).all()
            assert np.isnan(history.fractions[row]).all()
            continue
        assert history.quantiles[row].tolist() == summary.quantile(HISTORY_QUANTILES).tolist()
        assert history.fractions[row].sum() == pytest.approx(1, abs=1e-12)
        assert (history.fractions[row] >= -1e-15).all()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_history_fractions_against_numpy(scale: float) -> None:
    recording, values = (
        Recording(),
        [normal_values(i, 20_000, scale * (1 + i / 10)) for i in range(20)],
    )
    for i, x in enumerate(values):
        recording.append(i, {"a": {"output": summary_of(x)}})
    history = recording.history("a")
    inner = history.edges.copy()
    inner[[0, -1]] = -np.inf, np.inf
    for row, x in enumerate(values):
        ranked = np.sort(x.astype(np.float64))
        exact = np.histogram(ranked, inner)[0] / len(x)
        # The cumulated fraction at an edge is off by at most the fraction in its log bin.
        slack = 0.13 * np.abs(history.edges) + 1e-30
        low, high = (np.searchsorted(ranked, history.edges + d) for d in (-slack, slack))
        cumulated = np.concatenate([[0], np.cumsum(history.fractions[row])])
        assert (cumulated >= low / len(x) - 1e-9).all()
        assert (cumulated <= high / len(x) + 1e-9).all()
        assert np.abs(history.fractions[row] - exact).sum() < 0.1
        order = ranked[np.floor(np.array(HISTORY_QUANTILES) * (len(x) - 1)).astype(int)]
        np.testing.assert_allclose(history.quantiles[row], order, rtol=0.0625)


def test_history_of_nothing_finite_and_of_saturated_counts() -> None:
    nan = summary_of(np.full(4, np.nan, np.float32))
    bins = summary_of(normal_values(0)).bins.astype(np.uint32)
    bins[0x3F8] = np.iinfo(np.uint32).max
    stopped = Summary(bins=bins, points=np.array([-4.0, 4.0, 0.0]), sums=np.ones(3))
    recording = Recording()
    recording.append(0, {"a": {"output": nan, "gradient": nan}})
    assert np.isnan(recording.history("a").quantiles).all()
    recording.append(1, {"a": {"output": stopped}})
    recording.append(2, {"a": {"output": summary_of(normal_values(1))}})
    history = recording.history("a")
    assert np.isnan(history.fractions).all(axis=1).tolist() == [True, True, False]
    assert np.isnan(history.quantiles).all(axis=1).tolist() == [True, True, False]
    only = recording.history("a", "gradient")
    assert only.edges[0] < only.edges[-1]
    assert len(buffer_of(*history)) == 8 * (3 + 3 * 7 + HISTORY_BINS + 1 + 3 * HISTORY_BINS)
    frame = recording.to_frame()
    assert frame["size"].isna().tolist() == [False, False, True, False]
    assert frame["mean"].isna().tolist() == [True, True, True, False]
    assert frame["max"].tolist()[2] == 4.0
    never = Recording()
    never.append(0, {"a": {"output": nan}})
    assert never.history("a", "gradient").fractions.shape == (0, HISTORY_BINS)


def test_history_is_downsampled_evenly_and_spans_all_passes() -> None:
    recording = Recording()
    for i in range(101):
        recording.append(
            i, {"a": {"output": summary_of(normal_values(i, 50, 100.0 if i == 7 else 1.0))}}
        )
    history = recording.history("a", columns=11)
    assert history.steps.tolist() == list(range(0, 101, 10))
    assert history.edges[-1] == max(
        float(normal_values(i, 50, 100.0 if i == 7 else 1.0).max()) for i in range(101)
    )
    assert recording.history("a", columns=300).steps.tolist() == list(range(101))
    assert recording.history("a", columns=2).steps.tolist() == [0, 100]
    assert len(set(recording.history("a", columns=100).steps.tolist())) == 100


def test_history_of_values_beyond_float32() -> None:
    x = np.array([-1e300, -1.0, 1.0 - 1e-12, 1e300, 1e60])  # by hand: jax would need x64
    numbers = x.clip(-3.4028234e38, 3.4028234e38).astype(np.float32)
    bins = np.bincount(numbers.view(np.uint32) >> 20, minlength=BINS)
    summary = Summary(
        bins=bins.astype(np.uint64), points=np.array([-1e300, 1e300, 0.0]), sums=np.ones(3)
    )
    recording = Recording()
    recording.append(0, {"a": {"output": summary}})
    history = recording.history("a")
    assert (history.edges[0], history.edges[-1]) == (-1e300, 1e300)
    np.testing.assert_array_equal(history.quantiles[0], summary.quantile(HISTORY_QUANTILES))
    edges, counts = summary.histogram(HISTORY_BINS, scale="symlog")
    np.testing.assert_array_equal(history.edges, edges)
    below = np.cumsum(5 * history.fractions[0])
    assert np.abs(below - np.cumsum(counts)).max() <= 1  # those are whole numbers


def test_history_is_worked_out_for_many_columns_at_once() -> None:
    recording, pool = Recording(), [summary_of(normal_values(i, 1000)) for i in range(20)]
    for i in range(600):
        recording.append(i, {"a": {"output": pool[i % 20]}})
    calls = count_calls(lambda: recording.history("a"))  # of 300 columns
    assert calls < 300 * 20  # a summary that is read by itself takes some 200


def test_figures_are_those_of_each_summary() -> None:
    summaries = [summary_of(x) for x in VALUES.values()] * 25  # more than one batch
    blobs = [encode([s]).data for s in summaries]
    for row, s in zip(decoded_stats(blobs), summaries, strict=True):
        expected = [getattr(s, name) for name in STATISTICS]
        np.testing.assert_array_equal(row, expected + s.quantile(HISTORY_QUANTILES).tolist())
