"""The scalars and histograms of a pass, computed again by NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nnx_inspector as nni
from nnx_inspector.recordings.facts import PARAMETER_STATS, PassStats
from nnx_inspector.stats.choices.rows import CHOICE_STATS
from nnx_inspector.stats.summarize import summarize
from nnx_inspector.trackers.aim_run import AimRun
from nnx_inspector.trackers.scalars import BINS, Entry, PassReader

RNG = np.random.default_rng(0)
VALUES: dict[str, np.ndarray[Any, Any]] = {
    "normal": RNG.normal(3, 2, 1000).astype(np.float32),
    "relu": np.maximum(RNG.normal(size=1000), 0).astype(np.float32),
    "one": np.full(7, 0.25, np.float32),
    "zeros": np.zeros((3, 4), np.float32),
    "flawed": np.array([np.nan, 1, -2, np.inf, -np.inf, np.nan, 0, 8], np.float32),
    "nothing": np.full(5, np.nan, np.float32),
    "ids": RNG.integers(0, 9, 500),
    "empty": np.zeros((0, 3), np.float32),
}


def oracle(x: np.ndarray[Any, Any], quantity: str) -> dict[str, float]:
    x = x.astype(np.float64).ravel()
    fine = x[np.isfinite(x)]
    found: dict[str, float] = {}
    if len(fine):
        found = {"std": fine.std(), "max_abs": np.abs(fine).max()}
        if "gradient" in quantity:
            found["norm"] = np.sqrt((fine**2).sum())
        else:
            found["mean"] = fine.mean()
    if len(x) and quantity != "parameter":
        found["zeros"] = (x == 0).mean()
    if len(fine) < len(x):
        found |= {"nan": np.isnan(x).sum(), "inf": np.isinf(x).sum()}
    return found


@pytest.fixture(scope="module")
def item() -> Any:
    recording = nni.Recording()
    summaries = {
        name: {q: summarize(x) for q in ("output", "gradient")} for name, x in VALUES.items()
    }
    summaries[""] = {"output": summarize(VALUES["normal"])}
    summaries["relu/kernel"] = {
        q: summarize(VALUES["relu"]) for q in ("parameter", "parameter_gradient")
    }
    rows = np.full((1, len(PARAMETER_STATS)), np.nan, np.float32)
    rows[0, PARAMETER_STATS.index("update")] = 1e-3
    rows[0, PARAMETER_STATS.index("lost")] = 0.25
    rows[0, PARAMETER_STATS.index("clipped")] = 0.5
    figures = PassStats(parameters=("relu/kernel",), parameter_rows=rows)
    recording.append(3, summaries, figures=figures)
    return recording.passes[0]


GROUPS = {"output": "outputs", "gradient": "gradients", "parameter": "parameters"}
GROUPS["parameter_gradient"] = "parameter_gradients"


def test_every_scalar_is_that_of_numpy(item: Any) -> None:
    found: dict[tuple[str, str], dict[str, float]] = {}
    for one in PassReader().scalars(item):
        found.setdefault((one.group, one.site), {})[one.statistic] = one.value
    for site, quantity in item.keys:
        x = VALUES["relu" if site == "relu/kernel" else site or "normal"]
        expected = oracle(x, quantity)
        if quantity == "parameter":
            expected |= {"update_ratio": 1e-3, "update_lost": 0.25, "update_clipped": 0.5}
        got = found.pop((GROUPS[quantity], site or "(root)"), {})
        assert got == pytest.approx(expected, rel=2e-6, abs=1e-12), (site, quantity)
    assert found == {}


def test_every_histogram_is_that_of_its_summary_and_counts_every_value(item: Any) -> None:
    found = {(one.group, one.site): one for one in PassReader().histograms(item)}
    for site, quantity in item.keys:
        one = found.pop((GROUPS[quantity], site or "(root)"), None)
        x = VALUES["relu" if site == "relu/kernel" else site or "normal"].astype(np.float64).ravel()
        fine = x[np.isfinite(x)]
        if not len(fine):
            assert one is None, site
            continue
        edges, counts = item.summary(site, quantity).histogram(BINS)
        assert one is not None
        np.testing.assert_array_equal(one.edges, edges)
        np.testing.assert_array_equal(one.counts, counts)
        assert one.counts.sum() == len(fine)
        assert (one.low, one.high) == (fine.min(), fine.max())
        assert one.total == pytest.approx(fine.sum(), rel=1e-6, abs=1e-9)
        assert one.squares == pytest.approx((fine**2).sum(), rel=1e-6)
        below = np.array([(fine < edge).sum() for edge in one.edges[1:-1]])
        reached = np.cumsum(one.counts)[:-1]
        of_bins = np.array(
            [np.isclose(fine, e, rtol=0.13, atol=0.1).sum() for e in one.edges[1:-1]]
        )
        assert (np.abs(reached - below) <= of_bins + 1).all(), site  # an edge cuts one log bin
    assert found == {}


def test_heads_and_experts_are_those_of_the_frames() -> None:
    rows = np.random.default_rng(0).random((5, len(CHOICE_STATS))).astype(np.float32)
    rows[2, CHOICE_STATS.index("distance")] = np.nan
    rows[3:, CHOICE_STATS.index("evenness")] = 0.75
    sites = ("b/0/attn@attention",) * 3 + ("moe@experts",) * 2
    recording = nni.Recording()
    recording.append(3, {}, figures=PassStats(choices=sites, choice_rows=rows))
    found = {one[:3]: one.value for one in PassReader().scalars(recording.passes[0])}
    expected: dict[tuple[str, ...], float] = {("experts", "moe@experts", "router_entropy"): 0.75}
    for head, row in recording.heads_frame().iterrows():
        for name in ("evenness", "distance", "first", "logit"):
            expected["heads", f"b/0/attn@attention/{head}", name] = row[name]
    for expert, row in recording.experts_frame().iterrows():
        for name in ("load", "dropped"):
            expected["experts", f"moe@experts/{expert}", name] = row[name]
    del expected["heads", "b/0/attn@attention/2", "distance"]
    assert found == expected
    numbers = [one[0] for one in _aim(recording.passes[0]) if one[1] == {"site": "moe@experts"}]
    assert numbers == ["experts/router_entropy"]


def _aim(item: Any) -> list[tuple[str, dict[str, str]]]:
    """The name and the context of each number that an Aim run gets."""
    found: list[tuple[str, dict[str, str]]] = []

    class Run:
        hash = "a"

        def track(self, value: Any, *, name: str, step: int, context: dict[str, str]) -> None:
            found.append((name, context))

    AimRun(Run()).log(Entry(item.step, PassReader().scalars(item)))
    assert ("heads/first", {"site": "b/0/attn@attention", "head": "2"}) in found
    return found


def test_counts_of_nan_go_on_once_there_was_one() -> None:
    recording, reader = nni.Recording(), PassReader()
    for step, value in enumerate([1.0, np.nan, 1.0]):
        x = np.array([value, 2.0], np.float32)
        recording.append(step, {"a": {"output": summarize(x)}, "b": {"output": summarize(x * 0)}})
    counts = [
        [(s.site, s.value) for s in reader.scalars(one) if s.statistic == "nan"]
        for one in recording.passes
    ]
    assert counts == [[], [("a", 1.0), ("b", 1.0)], [("a", 0.0), ("b", 0.0)]]
