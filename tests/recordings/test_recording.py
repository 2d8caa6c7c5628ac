"""The recording against NumPy on the values themselves, and its bounds against real memory."""

# jax and pandas are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import tracemalloc
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from summaries import VALUES, normal_values, summary_bytes, summary_of

from nnx_inspector.recordings.facts import PassStats
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen.protocol import HISTORY_QUANTILES, STATISTICS
from nnx_inspector.stats.samples.parameter_stats import PARAMETER_STATS
from nnx_inspector.stats.summarize import summarize
from nnx_inspector.stats.summary import Summary, empty


def filled(passes: int, **bounds: int) -> Recording:
    recording, pool = Recording(**bounds), [summary_of(normal_values(i)) for i in range(8)]
    for i in range(passes):
        recording.append(i, {"a": {"output": pool[i % 8]}, "b": {"output": pool[-i % 8]}})
    return recording


def test_rows_are_merged_and_unknown_moments_stay_unknown() -> None:
    rows = summarize(jnp.asarray(np.stack([normal_values(0), normal_values(1)])), batch_rank=1)
    bins = summary_of(normal_values(2)).bins
    counted = Summary(bins=bins, points=np.full(3, np.nan), sums=np.full(3, np.nan))
    recording = Recording()
    recording.append(0, {"a": {"output": rows, "input": counted}})
    both, unknown = recording.summary("a"), recording.summary("a", "input")
    assert both is not None
    assert unknown is not None
    x = np.concatenate([normal_values(0), normal_values(1)]).astype(np.float64)
    assert both.size == 2000
    np.testing.assert_allclose([both.mean, both.std], [x.mean(), x.std()], rtol=1e-5)
    assert np.isnan(unknown.mean)
    assert np.isnan(unknown.min)
    history = recording.history("a", "input")
    assert history.quantiles[0].tolist() == unknown.quantile(HISTORY_QUANTILES).tolist()
    np.testing.assert_allclose(history.fractions.sum(), 1)


def test_passes_keep_their_order_and_what_was_not_measured_is_none() -> None:
    a, b, recording = summary_of(normal_values(0)), summary_of(normal_values(1)), Recording()
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
    assert (steps, [summary_bytes(s) for s in summaries]) == (
        [5, 5],
        [summary_bytes(a), summary_bytes(b)],
    )
    assert recording.series("x", "gradient")[0] == [5]
    assert recording.series("y", "gradient") == ([], [])
    assert len(recording) == 3


def test_sizes_and_norms_of_a_pass_are_those_of_its_values() -> None:
    arrays = {"a": normal_values(0), "b": np.array([-3.0, np.nan, 2.0, np.inf], np.float32)}
    recording = Recording()
    counted = Summary(
        bins=summary_of(normal_values(2)).bins, points=np.full(3, np.nan), sums=np.zeros(3)
    )
    measured = {site: {"output": summary_of(x)} for site, x in arrays.items()}
    measured["c"] = {"output": counted, "gradient": empty()}
    (one,) = (recording.append(0, measured), recording.passes)[1]
    sizes, norms = one.sizes("output"), one.norms("output")
    for site, x in arrays.items():
        finite = x[np.isfinite(x)].astype(np.float64)
        assert sizes[site] == np.abs(finite).max()
        np.testing.assert_allclose(norms[site], np.linalg.norm(finite), rtol=1e-6)
    assert sizes["c"] >= np.abs(normal_values(2)).max()  # the outermost bin bounds it
    assert np.isnan([one.sizes("gradient")["c"], one.norms("gradient")["c"]]).all()
    assert list(one.sizes("gradient")) == ["c"]
    assert one.sizes("input") == one.norms("input") == {}


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


def test_an_empty_recording_reads_as_nothing() -> None:
    recording = Recording()
    assert (len(recording), recording.steps, recording.sites) == (0, [], ())
    assert list(recording.to_frame().columns)[:6] == (
        ["step", "pass", "kind", "perturbed", "site", "quantity"]
    )
    assert len(recording.to_frame()) == len(recording.metrics_frame()) == 0
    assert repr(recording) == "Recording(0 passes, 0 sites, 0.0 MiB)"


def test_the_byte_bound_holds_and_the_estimate_is_real() -> None:
    pool = [summary_of(normal_values(i, 100_000, 10.0 ** (i % 5))) for i in range(20)]

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


def test_parameters_are_no_sites_and_have_a_ratio() -> None:
    recording, weights = Recording(), summary_of(normal_values(1, 64))
    for step, ratio in enumerate([1e-3, 0.0, np.nan]):
        rows = np.full((1, len(PARAMETER_STATS)), np.nan, np.float32)
        rows[0, PARAMETER_STATS.index("update")] = ratio
        for name, times in (("lost", 2), ("decayed", 4), ("clipped", 8)):
            rows[0, PARAMETER_STATS.index(name)] = ratio / times
        figures = PassStats(parameters=("up/kernel",), parameter_rows=rows)
        of_up = {"parameter": weights, "parameter_gradient": weights if step else None}
        recording.append(step, {"up": {"output": weights}, "up/kernel": of_up}, figures=figures)
    assert (recording.sites, recording.parameters) == (("up",), ("up/kernel",))
    assert recording.history("up/kernel", "parameter_gradient").steps.tolist() == [1.0, 2.0]
    assert recording.summary("up/kernel", "parameter_gradient", index=0) is None
    assert recording.summary("up", "parameter") is None
    frame = recording.to_frame().set_index(["site", "quantity"])
    for name, times in (("ratio", 1), ("lost", 2), ("decayed", 4), ("clipped", 8)):
        first, name = 1e-3 / times, f"update_{name}"
        found = frame.loc[("up/kernel", "parameter"), name].to_numpy()
        np.testing.assert_array_equal(found, np.array([first, 0.0, np.nan], np.float32))
        assert frame.drop(index=[("up/kernel", "parameter")])[name].isna().all()


def test_frame_values_equal_the_summaries() -> None:
    recording = Recording()
    for i in range(3):
        sites = {
            n: {"output": summary_of(x), "gradient": summary_of(normal_values(i))}
            for n, x in VALUES.items()
        }
        recording.append(10 * i, sites, kind="step", perturbed=i == 1)
    frame = recording.to_frame()
    quantiles = ["q01", "q05", "q25", "q50", "q75", "q95", "q99"]
    heads = ["step", "pass", "kind", "perturbed", "site", "quantity"]
    assert list(frame.columns)[:-4] == [*heads, *STATISTICS, *quantiles]
    assert all(name.startswith("update_") for name in frame.columns[-4:])
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
        x = (
            VALUES[row["site"]] if row["quantity"] == "output" else normal_values(row["pass"])
        ).astype(np.float64)
        finite = x[np.isfinite(x)]
        assert (row["size"], row["nan"]) == (x.size, np.isnan(x).sum())
        if finite.size and np.abs(finite).max() < 1e30:
            np.testing.assert_allclose(
                row["mean"], finite.mean(), rtol=1e-4, atol=1e-6 * np.abs(finite).max()
            )
            assert (row["min"], row["max"]) == (finite.min(), finite.max())


def test_lower_precision_has_a_row_for_each_dtype_with_and_without_a_scale() -> None:
    recording = Recording()
    assert recording.casts_frame().empty
    small = np.array([0.0, 1e-9, 1e-6, 1.0, 7e4])
    for step, factor in ((0, 1.0), (5, 1e3)):
        values = {"output": summarize(small * factor), "gradient": summarize(small)}
        recording.append(step, {"head": values})
    found = recording.casts_frame(step=0)
    assert len(found) == 2 * 4 * 2
    half = found[(found["dtype"] == "float16") & (found["quantity"] == "output")]
    plain, scaled = half.to_dict("records")
    shares = "to_zero", "subnormal", "overflow"
    assert [plain[name] for name in shares] == [0.2, 0.2, 0.2]
    assert (plain["site"], plain["scaled"], scaled["scaled"]) == ("head", False, True)
    assert [scaled[name] for name in shares] == [0.2, 0.2, 0.0]
    newest = recording.casts_frame()
    assert newest[(newest["dtype"] == "float16") & ~newest["scaled"]]["overflow"].tolist() == [
        0.2,
        0.2,
    ]
    with pytest.raises(KeyError, match=r"No pass of step 3 .* 2 passes, of the steps 0 to 5"):
        recording.casts_frame(step=3)
