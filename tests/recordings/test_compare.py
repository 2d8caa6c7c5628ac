"""Two runs compared: figures against NumPy on the values themselves."""

# jax and pandas are only partly typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from models import TwoLayers
from summaries import VALUES, normal_values, summary_of

from nnx_inspector.recordings.compare import compare
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.records.capture import capture
from nnx_inspector.stats.bins import BINS
from nnx_inspector.stats.summarize import summarize
from nnx_inspector.stats.summary import Summary


def recorded(**values: Any) -> Recording:
    recording = Recording()
    recording.append(0, {site: {"output": summary_of(x)} for site, x in values.items()})
    return recording


def wasserstein(x: Any, y: Any) -> float:
    """The integral of |F - G| for the samples themselves, in float64."""
    x, y = np.sort(x.astype(np.float64)), np.sort(y.astype(np.float64))
    grid = np.sort(np.concatenate([x, y]))
    f = np.searchsorted(x, grid[:-1], side="right") / len(x)
    g = np.searchsorted(y, grid[:-1], side="right") / len(y)
    return float((np.abs(f - g) * np.diff(grid)).sum())


def total_variation(x: Any, y: Any) -> float:
    """Over the upper 12 bits of a float32, zeros as one, by hand."""
    counts = []
    for one in (x, y):
        one = np.where(one == 0, np.float32(0), one).astype(np.float32)
        keys = one.view(np.uint32) >> 20
        keys = np.where(one == 0, BINS, np.where(np.isnan(one), BINS + 1, keys))
        counts.append(np.bincount(keys, minlength=BINS + 2) / len(one))
    return float(0.5 * np.abs(counts[0] - counts[1]).sum())


shapes = st.tuples(
    st.sampled_from([1, 2, 50, 400]), st.floats(-3, 3), st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    st.integers(0, 10_000),
)  # fmt: skip


@given(shapes, shapes)
@settings(max_examples=40)
def test_figures_are_those_of_the_values(a: Any, b: Any) -> None:
    x, y = (
        (m + s * np.random.default_rng(seed).standard_normal(n)).astype(np.float32)
        for n, m, s, seed in (a, b)
    )
    row = compare(recorded(site=x), recorded(site=y)).iloc[0]
    assert row["total_variation"] == pytest.approx(total_variation(x, y), abs=1e-12)
    unit = math.sqrt((x.astype(np.float64).var() + y.astype(np.float64).var()) / 2)
    exact = wasserstein(x, y)
    slack = (np.abs(x).mean(dtype=np.float64) + np.abs(y).mean(dtype=np.float64)) / 8 + 1e-30
    if unit > 1e-6:
        assert abs(row["quantile_distance"] * unit - exact) <= slack * 1.001 + 1e-6
    wide = (x.astype(np.float64), y.astype(np.float64))
    rms = [math.sqrt((v**2).mean()) for v in wide]
    scale = 1e-4 * max(1.0, float(np.abs(np.concatenate(wide)).max()))
    assert row["mean_difference"] == pytest.approx(wide[1].mean() - wide[0].mean(), abs=scale)
    assert row["std_difference"] == pytest.approx(wide[1].std() - wide[0].std(), abs=scale)
    assert row["rms_difference"] == pytest.approx(rms[1] - rms[0], abs=scale)


def test_a_shift_of_many_values_is_its_size_in_deviations() -> None:
    x = normal_values(0, 200_000)
    row = compare(recorded(a=x), recorded(a=x + np.float32(1.5))).iloc[0]
    assert row["quantile_distance"] == pytest.approx(1.5 / x.std(), rel=0.02)
    assert row["mean_difference"] == pytest.approx(1.5, rel=1e-4)
    other = compare(recorded(a=x), recorded(a=normal_values(1, 200_000))).iloc[0]
    assert other["quantile_distance"] < 0.02


@pytest.mark.parametrize("name", VALUES)
def test_the_same_is_no_difference(name: str) -> None:
    row = compare(recorded(a=VALUES[name]), recorded(a=VALUES[name])).iloc[0]
    assert row["total_variation"] == row["quantile_distance"] == 0.0
    finite = np.isfinite(VALUES[name].astype(np.float64)).any()
    assert (row["mean_difference"] == 0.0) == finite


def test_nan_and_inf_count_and_constants_that_differ_are_infinitely_far() -> None:
    x = np.array([1, 1, 1, 1], np.float32)
    bad = np.array([1, 1, np.nan, np.inf], np.float32)
    row = compare(recorded(a=x), recorded(a=bad)).iloc[0]
    assert row["total_variation"] == 0.5
    assert row["quantile_distance"] == 0.0
    assert (row["nan_a"], row["nan_b"]) == (0, 1)
    assert compare(recorded(a=x), recorded(a=2 * x))["quantile_distance"][0] == math.inf
    zeros = np.array([0.0, -0.0], np.float32)
    assert compare(recorded(a=zeros), recorded(a=-zeros))["total_variation"][0] == 0.0
    nothing = compare(recorded(a=x), recorded(a=np.full(3, np.nan, np.float32))).iloc[0]
    assert nothing["total_variation"] == 1.0
    assert math.isnan(nothing["quantile_distance"])


def test_what_is_not_known_is_missing() -> None:
    bins = summary_of(normal_values(0)).bins.astype(np.uint32)
    bins[0x3F8] = np.iinfo(np.uint32).max
    stopped = Summary(bins=bins, points=np.array([-4.0, 4.0, 0.0]), sums=np.ones(3))
    unknown = Summary(
        bins=summary_of(normal_values(0)).bins, points=np.full(3, np.nan), sums=np.ones(3)
    )
    a, b = Recording(), Recording()
    a.append(0, {"stopped": {"output": stopped}, "counted": {"gradient": unknown}})
    b.append(0, {"stopped": {"output": stopped}, "counted": {"gradient": unknown}})
    frame = compare(a, b).set_index("site")
    assert frame.loc["stopped", "total_variation":"nan_b"].isna().all()
    assert frame.loc["counted", "total_variation"] == 0.0
    assert frame.loc["counted", "quantile_distance"] == 0.0
    assert frame.index.tolist() == ["counted", "stopped"]


def test_the_worst_is_first_and_what_only_one_has_last() -> None:
    x = normal_values(0)
    a = recorded(same=x, moved=x, far=x, gone=x)
    b = recorded(new=x, far=x + np.float32(1e4), moved=x + np.float32(0.1), same=x)
    frame = compare(a, b)
    assert frame["site"].tolist() == ["far", "moved", "same", "gone", "new"]
    assert frame["in"].tolist() == ["both", "both", "both", "a", "b"]
    assert frame["total_variation"].isna().tolist() == [False, False, False, True, True]
    assert frame["nan_a"].isna().tolist() == [False, False, False, False, True]


def test_the_newest_clean_pass_or_that_of_a_step() -> None:
    recording = Recording()
    for i in range(4):
        of = {"a": {"output": summary_of(np.full(3, i, np.float32))}}
        recording.append(i, of, perturbed=i == 3)
    recording.append(1, {"a": {"output": summary_of(np.full(3, 9, np.float32))}}, perturbed=True)

    def difference(at: Any) -> float:
        return float(compare(recording, recording, at=at)["mean_difference"][0])

    assert difference((0, None)) == 2
    assert difference((None, 1)) == 1 - 2
    assert difference((2, 3)) == 1
    assert difference(1) == 0
    with pytest.raises(ValueError, match=r"b has no pass at step 8, .*closest steps are 1, 2, 3"):
        compare(recording, recording, at=(1, 8))
    only = Recording()
    only.append(5, {}, perturbed=True)
    with pytest.raises(ValueError, match=r"Choose one of its .steps with at=: 5"):
        compare(only, recording)
    with pytest.raises(ValueError, match="nothing was recorded"):
        compare(recording, Recording())
    with pytest.raises(TypeError, match=r"nni\.load"):
        compare("run.nni", recording)  # type: ignore[arg-type]


def test_two_models_by_their_records() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(50, 3)), jnp.float32)
    one, other = TwoLayers(nnx.Rngs(0)), TwoLayers(nnx.Rngs(0))
    other.b.bias[...] += 3.0
    records = [capture(model)(x)[1] for model in (one, other)]
    frame = compare(records[0], records[1])
    rows = frame[frame["quantity"] == "output"].set_index("site")
    assert rows.loc["a", "total_variation"] == 0.0
    y = [np.asarray(model(x), np.float64) for model in (one, other)]
    unit = math.sqrt((y[0].var() + y[1].var()) / 2)
    assert rows.loc["b", "mean_difference"] == pytest.approx(3.0, rel=1e-5)
    assert rows.loc["b", "quantile_distance"] == pytest.approx(3.0 / unit, rel=0.1)
    assert frame["site"].tolist()[-1] in ("a", "b", "")
    assert set(frame["site"][:2]) == {"", "b"}


def test_a_stack_and_the_same_layers_unrolled_are_aligned() -> None:
    x = [normal_values(i, scale=1.0 + i) for i in range(3)]
    stacked = {f"blocks/attn:call[{i}]": x[i] for i in range(3)} | {"blocks[1]": x[0]}
    unrolled = {f"blocks/{i}/attn:call": x[i] for i in (2, 1, 0)} | {"blocks/1": x[2]}
    for a, b in ((stacked, unrolled), (unrolled, stacked)):
        frame = compare(recorded(**a, head=x[0]), recorded(**b, tail=x[1])).set_index("site")
        assert set(frame.index) == {*a, "head", "tail"}
        same = frame.loc[[site for site in a if "attn" in site]]
        assert same["in"].tolist() == ["both"] * 3
        assert same["total_variation"].tolist() == same["quantile_distance"].tolist() == [0.0] * 3
        [other] = [site for site in a if "attn" not in site]
        assert frame.loc[other, "total_variation"] == pytest.approx(total_variation(x[0], x[2]))
        assert frame["in"]["head"] == "a"
        assert frame["in"]["tail"] == "b"


def test_layers_that_could_be_several_are_not_aligned() -> None:
    stacked = recorded(
        **{"a/b[1]": normal_values(0), "c[1]": normal_values(1), "d[0]": normal_values(2)}
    )
    both = recorded(
        **{"a/1/b": normal_values(0), "a/b/1": normal_values(0), "c/1/d": normal_values(1)}
    )
    assert set(compare(stacked, both)["in"]) == {"a", "b"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "bool"])
def test_runs_of_unlike_dtypes_are_compared_by_their_values(dtype: str) -> None:
    x = np.abs(normal_values(0)) * 4
    narrow = np.asarray(jnp.asarray(x).astype(dtype).astype(jnp.float32))
    recording = Recording()
    recording.append(0, {"a": {"output": summarize(jnp.asarray(x).astype(dtype)).merged()}})
    [row] = compare(recorded(a=x), recording).to_dict("records")
    unit = math.sqrt((x.astype(np.float64).var() + narrow.astype(np.float64).var()) / 2)
    assert row["mean_difference"] == pytest.approx(
        float(narrow.mean(dtype=np.float64) - x.mean(dtype=np.float64)), abs=1e-4
    )
    assert row["total_variation"] == pytest.approx(total_variation(x, narrow), abs=0.02)
    assert row["quantile_distance"] == pytest.approx(wasserstein(x, narrow) / unit, abs=0.13)


def test_renamed_and_missing_blocks_and_nan_in_one() -> None:
    x, y = normal_values(0), normal_values(1)
    bad = np.where(np.arange(len(y)) < 10, np.float32(np.nan), y)
    frame = compare(recorded(one=x, old=x, gone=y), recorded(one=bad, new=x)).set_index("site")
    assert frame.index[0] == "one"
    assert frame["in"].to_dict() == {"one": "both", "old": "a", "gone": "a", "new": "b"}
    assert (frame["nan_a"]["one"], frame["nan_b"]["one"]) == (0, 10)
    assert frame["total_variation"]["one"] == pytest.approx(total_variation(x, bad))
    finite = y[10:].astype(np.float64)
    unit = math.sqrt((x.astype(np.float64).var() + finite.var()) / 2)
    assert frame["quantile_distance"]["one"] == pytest.approx(
        wasserstein(x, y[10:]) / unit, abs=0.07
    )
