"""The recording against NumPy on the values themselves, and its bounds against real memory."""

# jax and pandas are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import subprocess
import sys
import threading
import time
import tracemalloc
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from nnx_inspector.protocol import HISTORY_BINS, HISTORY_QUANTILES, STATISTICS, history_buffer
from nnx_inspector.recording import Pass, Recording
from nnx_inspector.summarize import summarize
from nnx_inspector.summary import BINS, Summary, empty, merge

Values = npt.NDArray[Any]


def summary_of(x: Values) -> Summary:
    return summarize(jnp.asarray(x)).merged()


def normal(seed: int, n: int = 1000, scale: float = 1.0) -> Values:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def fields(s: Summary) -> list[bytes]:
    return [np.asarray(a).tobytes() + str(a.dtype).encode() for a in (s.bins, s.points, s.sums)]


def filled(passes: int, **bounds: int) -> Recording:
    recording, pool = Recording(**bounds), [summary_of(normal(i)) for i in range(8)]
    for i in range(passes):
        recording.append(i, {"a": {"output": pool[i % 8]}, "b": {"output": pool[-i % 8]}})
    return recording


VALUES = {
    "normal": normal(0),
    "scaled": normal(1, scale=1e-20),
    "zeros": np.zeros(7, np.float32),
    "signed zeros": np.array([0.0, -0.0, 1.0], np.float32),
    "one": np.array([-3.5], np.float32),
    "nothing": np.zeros(0, np.float32),
    "nan": np.full(5, np.nan, np.float32),
    "mixed": np.array([np.nan, 1, np.inf, -np.inf, -2, 0], np.float32),
    "subnormal": np.array([1e-40, -1e-40, 0.0, 1.0], np.float32),
    "extreme": np.array([-3.4e38, 3.4e38, 1e-38], np.float32),
    "integers": np.array([-(2**31), 2**31 - 1, 0], np.int32),
    "unsigned": np.array([2**32 - 1, 3], np.uint32),
    "bool": np.array([True, False, True]),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_stored_summary_comes_back_bit_for_bit(name: str) -> None:
    summary, recording = summary_of(VALUES[name]), Recording()
    recording.append(3, {"a": {"output": summary}})
    back = recording.summary("a")
    assert back is not None
    assert fields(back) == fields(summary)


def test_rows_are_merged_and_unknown_moments_stay_unknown() -> None:
    rows = summarize(jnp.asarray(np.stack([normal(0), normal(1)])), batch_rank=1)
    bins = summary_of(normal(2)).bins
    counted = Summary(bins=bins, points=np.full(3, np.nan), sums=np.full(3, np.nan))
    recording = Recording()
    recording.append(0, {"a": {"output": rows, "input": counted}})
    both, unknown = recording.summary("a"), recording.summary("a", "input")
    assert both is not None
    assert unknown is not None
    x = np.concatenate([normal(0), normal(1)]).astype(np.float64)
    assert both.size == 2000
    np.testing.assert_allclose([both.mean, both.std], [x.mean(), x.std()], rtol=1e-5)
    assert np.isnan(unknown.mean)
    assert np.isnan(unknown.min)
    history = recording.history("a", "input")
    assert history.quantiles[0].tolist() == unknown.quantile(HISTORY_QUANTILES).tolist()
    np.testing.assert_allclose(history.fractions.sum(), 1)


def test_passes_keep_their_order_and_what_was_not_measured_is_none() -> None:
    a, b, recording = summary_of(normal(0)), summary_of(normal(1)), Recording()
    recording.append(5, {"x": {"output": a, "gradient": b}, "y": {"output": b}}, kind="step")
    recording.append(5, {"x": {"output": b, "gradient": None}}, perturbed=True)
    recording.append(np.int64(6).item(), {"z": {"output": a}})
    assert recording.steps == [5, 5, 6]
    assert recording.perturbed == [False, True, False]
    assert recording.sites == ("x", "y", "z")
    assert recording.summary("x") is None
    assert [p.number for p in recording.passes] == [0, 1, 2]
    assert recording.passes[0].keys == (("x", "output"), ("x", "gradient"), ("y", "output"))
    steps, summaries = recording.series("x")
    assert (steps, [fields(s) for s in summaries]) == ([5, 5], [fields(a), fields(b)])
    assert recording.series("x", "gradient")[0] == [5]
    assert recording.series("y", "gradient") == ([], [])
    assert len(recording) == 3


def test_errors_teach_and_leave_nothing_behind() -> None:
    recording = filled(1)
    with pytest.raises(KeyError, match="'a'"):
        recording.summary("aa")
    with pytest.raises(KeyError, match="append a pass first"):
        Recording().series("a")
    with pytest.raises(ValueError, match="'gradient'"):
        recording.series("a", "gradients")  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="1 passes"):
        recording.summary("a", index=1)
    with pytest.raises(ValueError, match="at least 2 columns"):
        recording.history("a", columns=1)
    with pytest.raises(ValueError, match="at least 2 passes"):
        Recording(max_steps=1)
    good: Any = {"c": {"output": empty()}}
    before = (recording.sites, recording.nbytes, len(recording))
    bad: list[tuple[type[Exception], str, Any, Any, Any]] = [
        (ValueError, "'grad'", 1, {"c": {"output": empty(), "grad": empty()}}, {}),
        (TypeError, "'c' must be a Summary", 1, {"c": {"output": [empty()]}}, {}),
        (TypeError, "'loss' must be one number", 1, good, {"loss": np.zeros(2)}),
        (TypeError, "'loss' must be one number", 1, good, {"loss": None}),
        (TypeError, "'loss' must be one number", 1, good, {"acc": 1.0, "loss": "1"}),
        (TypeError, "integer", 1.5, good, {}),
        (ValueError, "2\\*\\*53", 2**60, good, {}),
    ]
    for error, match, step, summaries, metrics in bad:
        with pytest.raises(error, match=match):
            recording.append(step, summaries, metrics=metrics)
    assert before == (recording.sites, recording.nbytes, len(recording))
    assert recording.curves() == {}


def test_metrics_keep_what_is_not_finite_and_are_bounded() -> None:
    recording = Recording(max_steps=20)
    recording.append(0, {}, metrics={"loss": 1.5})
    recording.add_metrics(1, {"loss": float("nan"), "val/acc": jnp.float32(0.5)})  # type: ignore[dict-item]
    recording.add_metrics(1, {"loss": float("-inf")})
    curves = recording.curves()
    np.testing.assert_array_equal(curves["loss"], [[0, 1.5], [1, np.nan], [1, -np.inf]])
    np.testing.assert_array_equal(curves["val/acc"], [[1, 0.5]])
    frame = recording.metrics_frame()
    assert list(frame.columns) == ["step", "name", "value"]
    assert frame["step"].tolist() == [0, 1, 1, 1]
    np.testing.assert_array_equal(frame["value"], [1.5, np.nan, -np.inf, 0.5])
    for i in range(2, 3000):
        recording.add_metrics(i, {"loss": i if i < 1000 else np.nan})
    loss = recording.curves()["loss"]
    assert len(loss) <= 200
    assert len(loss) + 1 + recording.thinned_points == 3 + 1 + 2998
    np.testing.assert_array_equal(loss[[0, 1, -1]], [[0, 1.5], [1, np.nan], [2999, np.nan]])
    assert 1000 in loss[:, 0]  # where the curve left the finite numbers
    assert "metric points thinned out" in repr(recording)


def test_an_empty_recording_reads_as_nothing() -> None:
    recording = Recording()
    assert (len(recording), recording.steps, recording.sites) == (0, [], ())
    assert list(recording.to_frame().columns)[:6] == (
        ["step", "pass", "kind", "perturbed", "site", "quantity"]
    )
    assert len(recording.to_frame()) == len(recording.metrics_frame()) == 0
    assert repr(recording) == "Recording(0 passes, 0 sites, 0.0 MiB)"


@pytest.mark.parametrize("limit", [2, 3, 5, 16, 100])
def test_thinning_keeps_the_first_and_the_newest_and_counts(limit: int) -> None:
    recording = filled(0, max_steps=limit)
    summary, steps = summary_of(normal(0)), list[int]()
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
    recording, fine = Recording(max_steps=30), summary_of(normal(0))
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


def test_the_byte_bound_holds_and_the_estimate_is_real() -> None:
    pool = [summary_of(normal(i, 100_000, 10.0 ** (i % 5))) for i in range(20)]

    def record(passes: int, **bounds: int) -> Recording:
        recording = Recording(**bounds)
        for i in range(passes):
            sites: dict[str, dict[str, Summary | None]] = {
                f"s{j}": {"output": pool[(i + j) % 20]} for j in range(20)
            }
            recording.append(i, sites, metrics={"loss": float(i)})
        return recording

    record(2)
    tracemalloc.start()
    try:
        recording = record(150)
        actual = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.5 < recording.nbytes / actual < 2, (recording.nbytes, actual)
    assert recording.nbytes / (150 * 20) < 600
    bound = recording.nbytes // 3
    small = record(150, max_bytes=bound)
    assert small.nbytes <= bound
    assert small.thinned > 0
    assert (small.steps[0], small.steps[-1]) == (0, 149)
    tiny = record(10, max_bytes=4096)  # two passes are kept, whatever they take
    assert tiny.steps == [0, 9]


def test_layouts_of_passes_that_went_are_not_kept() -> None:
    recording = Recording(max_steps=10)
    for i in range(500):
        recording.append(i, {f"s{i % 50}": {"output": empty()}, f"t{i % 49}": {"output": empty()}})
    assert recording.nbytes < 20_000
    assert len(recording.sites) == 99


def test_history_equals_the_summaries() -> None:
    recording = Recording()
    kept: list[Summary] = []
    values = [*VALUES.values(), *(normal(i, 3000, 10.0 ** (i - 3)) for i in range(6))]
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
    recording, values = Recording(), [normal(i, 20_000, scale * (1 + i / 10)) for i in range(20)]
    for i, x in enumerate(values):
        recording.append(i, {"a": {"output": summary_of(x)}})
    history = recording.history("a")
    inner = history.edges.copy()
    inner[[0, -1]] = -np.inf, np.inf
    for row, x in enumerate(values):
        ranked = np.sort(x.astype(np.float64))
        exact = np.histogram(ranked, inner)[0] / len(x)
        # The cumulated fraction at an edge is off by at most what the log bin around it holds.
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
    bins = summary_of(normal(0)).bins.astype(np.uint32)
    bins[0x3F8] = np.iinfo(np.uint32).max
    stopped = Summary(bins=bins, points=np.array([-4.0, 4.0, 0.0]), sums=np.ones(3))
    recording = Recording()
    recording.append(0, {"a": {"output": nan, "gradient": nan}})
    assert np.isnan(recording.history("a").quantiles).all()
    recording.append(1, {"a": {"output": stopped}})
    recording.append(2, {"a": {"output": summary_of(normal(1))}})
    history = recording.history("a")
    assert np.isnan(history.fractions).all(axis=1).tolist() == [True, True, False]
    assert np.isnan(history.quantiles).all(axis=1).tolist() == [True, True, False]
    only = recording.history("a", "gradient")
    assert only.edges[0] < only.edges[-1]
    assert len(history_buffer(*history)) == 8 * (3 + 3 * 7 + HISTORY_BINS + 1 + 3 * HISTORY_BINS)
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
        recording.append(i, {"a": {"output": summary_of(normal(i, 50, 100.0 if i == 7 else 1.0))}})
    history = recording.history("a", columns=11)
    assert history.steps.tolist() == list(range(0, 101, 10))
    assert history.edges[-1] == max(
        float(normal(i, 50, 100.0 if i == 7 else 1.0).max()) for i in range(101)
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
    _, counts = summary.histogram(HISTORY_BINS, scale="symlog")
    np.testing.assert_allclose(history.fractions[0], counts / 5, atol=1e-12)


def test_history_is_quick() -> None:
    recording, pool = Recording(), [summary_of(normal(i, 100_000)) for i in range(20)]
    for i in range(600):
        recording.append(i, {"a": {"output": pool[i % 20]}})
    seconds: list[float] = []
    for _ in range(8):
        start = time.perf_counter()
        recording.history("a")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05  # 4 ms on an idle core; the rest is for busy ones


def test_frame_values_equal_the_summaries() -> None:
    recording = Recording()
    for i in range(3):
        sites = {
            n: {"output": summary_of(x), "gradient": summary_of(normal(i))}
            for n, x in VALUES.items()
        }
        recording.append(10 * i, sites, kind="step", perturbed=i == 1)
    frame = recording.to_frame()
    quantiles = ["q01", "q05", "q25", "q50", "q75", "q95", "q99"]
    assert list(frame.columns) == (
        ["step", "pass", "kind", "perturbed", "site", "quantity", *STATISTICS, *quantiles]
    )
    assert len(frame) == 3 * 2 * len(VALUES)
    for row in frame.to_dict("records"):
        summary = recording.summary(row["site"], row["quantity"], index=row["pass"])
        assert summary is not None
        assert (row["step"], row["kind"], row["perturbed"]) == (
            10 * row["pass"],
            "step",
            row["pass"] == 1,
        )
        expected = [getattr(summary, name) for name in STATISTICS]
        np.testing.assert_array_equal([float(row[n]) for n in STATISTICS], expected)
        np.testing.assert_array_equal(
            [row[n] for n in quantiles], summary.quantile(HISTORY_QUANTILES)
        )
        x = (VALUES[row["site"]] if row["quantity"] == "output" else normal(row["pass"])).astype(
            np.float64
        )
        finite = x[np.isfinite(x)]
        assert (row["size"], row["nan"]) == (x.size, np.isnan(x).sum())
        if finite.size and np.abs(finite).max() < 1e30:
            np.testing.assert_allclose(
                row["mean"], finite.mean(), rtol=1e-4, atol=1e-6 * np.abs(finite).max()
            )
            assert (row["min"], row["max"]) == (finite.min(), finite.max())


def test_eight_threads_append_while_others_read() -> None:
    recording, pool = Recording(max_steps=50), [summary_of(normal(i)) for i in range(4)]
    errors: list[BaseException] = []
    done = threading.Event()

    def guarded(work: Any, *args: Any) -> None:
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001 - reported below
            errors.append(error)

    def write(thread: int) -> None:
        for i in range(100):
            recording.append(i, {f"s{thread}": {"output": pool[i % 4]}}, metrics={f"m{thread}": i})

    def read() -> None:
        while not done.is_set():
            for site in recording.sites:
                history = recording.history(site)
                assert (np.abs(history.fractions.sum(axis=1) - 1) < 1e-9).all()
            passes: tuple[Pass, ...] = recording.passes
            numbers = [p.number for p in passes]
            assert numbers == sorted(set(numbers))
            assert len(passes) <= 50
            assert len(recording.to_frame()) <= 50
            assert all(curve.shape[1] == 2 for curve in recording.curves().values())

    readers = [threading.Thread(target=guarded, args=(read,)) for _ in range(2)]
    writers = [threading.Thread(target=guarded, args=(write, i)) for i in range(8)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert errors == []
    assert len(recording) + recording.thinned == 800
    assert sum(len(curve) for curve in recording.curves().values()) == 800
    assert all((c[:, 1] == np.arange(100)).all() for c in recording.curves().values())


@pytest.mark.parametrize("module", ["recording", "findings", "figures"])
def test_imports_neither_jax_nor_pandas_nor_plotly(module: str) -> None:
    code = (
        f"import sys, nnx_inspector.{module}; "
        "print([m for m in ('jax', 'flax', 'pandas', 'plotly') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
