"""Metrics and updates over the steps as the browser gets them; gaps are kept and counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2
from summaries import summary_of

from nnx_inspector.errors import InspectorError
from nnx_inspector.recordings.facts import PassStats
from nnx_inspector.recordings.passes import QUANTITIES
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.screen.frames import MOST_MOVED, casts_message, curves_of, histories_of
from nnx_inspector.stats.choices.rows import CHOICE_STATS
from nnx_inspector.stats.samples.parameter_stats import PARAMETER_STATS

NAN, INF = float("nan"), float("inf")


def sent(**metrics: list[float]) -> tuple[Any, dict[str, np.ndarray]]:
    """The message for these values, and the points of each metric."""
    recording = Recording()
    for name, values in metrics.items():
        for step, value in enumerate(values):
            recording.add_metrics(step, {name: value})
    message, buffer = curves_of(recording, points=600)
    ends = np.cumsum(message.points)[:-1]
    rows = np.frombuffer(buffer, "<f8").reshape(-1, 2)
    return message, dict(zip(message.names, np.split(rows, ends), strict=True))


def test_what_is_not_finite_is_counted() -> None:
    message, points = sent(loss=[1.0, NAN, INF, -INF, 2.0], accuracy=[0.5, 0.25])
    assert (message.recorded, message.not_finite) == ((5, 2), (3, 0))
    np.testing.assert_array_equal(points["loss"][:, 1], [1.0, NAN, NAN, NAN, 2.0])
    np.testing.assert_array_equal(points["accuracy"], [[0, 0.5], [1, 0.25]])


@pytest.mark.parametrize("one", [0, 1, 4321, 8998, 8999])
@pytest.mark.parametrize("most", [NAN, 1.0])
def test_one_value_unlike_the_others_of_a_long_curve_is_kept(one: int, most: float) -> None:
    values = [most] * 9000
    values[one] = 2.0 if np.isnan(most) else INF
    message, points = sent(loss=values)
    assert message.not_finite == (8999 if np.isnan(most) else 1,)
    steps, shown = points["loss"].T
    assert np.isfinite(shown[steps == one]).tolist() == [np.isnan(most)]
    assert steps[0] == 0
    assert steps[-1] == 8999
    assert (np.diff(steps) > 0).all()


def test_a_long_curve_is_bounded_and_evenly_spaced() -> None:
    finite = [float(step) for step in range(9000)]
    _, points = sent(loss=finite, mixed=[NAN if step % 2 else 1.0 for step in range(9000)])
    np.testing.assert_array_equal(points["loss"][:, 0], [*range(0, 9000, 15), 8999])
    np.testing.assert_array_equal(*points["loss"].T)
    assert len(points["mixed"]) <= 2 * 600 + 1


def moved(**ratios: list[float]) -> Recording:
    """A pass for each step, in which these parameters moved by these ratios."""
    recording, value = Recording(), {"parameter": summary_of(np.ones(4))}
    for step in range(len(next(iter(ratios.values())))):
        rows = np.full((len(ratios), len(PARAMETER_STATS)), np.nan, np.float32)
        rows[:, PARAMETER_STATS.index("update")] = [one[step] for one in ratios.values()]
        rows[:, PARAMETER_STATS.index("lost")] = rows[:, PARAMETER_STATS.index("update")] / 2
        figures = PassStats(parameters=tuple(ratios), parameter_rows=rows)
        recording.append(step, dict.fromkeys(ratios, value), figures=figures)
    return recording


def updates_of(recording: Recording, site: str) -> tuple[Any, np.ndarray] | None:
    """The message with the updates, and its ratios, [parameters, steps]."""
    keys = ("", "a", "a/b", "ab")
    for message, buffer in histories_of(recording, keys=keys, selected=site, layout=1):
        if isinstance(message, protocol.Updates):
            ratios, lost = np.frombuffer(buffer)[message.steps :].reshape(2, -1, message.steps)
            np.testing.assert_array_equal(lost[~np.isnan(ratios)], ratios[~np.isnan(ratios)] / 2)
            return message, ratios
    return None


def test_a_module_without_parameters_shows_those_inside_that_moved_most() -> None:
    ratios = {f"a/b/p{i}": [0.5, i / 64, NAN] for i in range(7)}
    ratios |= {"a/b/new": [INF, INF, NAN], "ab/c": [0.25, 0.25, NAN]}
    for site, most in {"": ["ab/c", "a/b/p6"], "a": ["a/b/p6", "a/b/p5"]}.items():
        found = updates_of(moved(**ratios), site)
        assert found is not None
        message, rows = found
        assert message.inside
        assert len(message.parameters) == MOST_MOVED
        assert list(message.parameters[:2]) == most
        for path, row in zip(message.parameters, rows, strict=True):
            np.testing.assert_array_equal(
                row, np.where(np.isinf(ratios[path]), NAN, ratios[path])[:2]
            )


def test_a_module_with_parameters_shows_its_own() -> None:
    found = updates_of(moved(**{"a/b/p": [0.5], "a/own": [0.25]}), "a")
    assert found is not None
    assert found[0].parameters == ("a/own",)
    assert not found[0].inside


def test_a_pass_without_updates_is_no_step() -> None:
    """Such as one that was made again under a perturbation, of the step that stays on screen."""
    found = updates_of(moved(**{"a/p": [0.5, NAN, 0.0, INF], "a/q": [NAN, NAN, 0.25, NAN]}), "a")
    assert found is not None
    np.testing.assert_array_equal(found[1], [[0.5, 0.0, NAN], [NAN, 0.25, NAN]])
    assert found[0].steps == 3


def test_where_no_update_was_seen_none_is_shown() -> None:
    assert updates_of(moved(**{"a/b/p": [NAN] * 3}), "") is None


# ------------------------------------------------------------------ heads and experts


def test_heads_and_experts_of_a_site_are_those_of_the_frames() -> None:
    """Those of the selected site's own calls; the newest passes have 70 heads, the first had 3."""
    recording, random = Recording(), np.random.default_rng(0)
    for step in range(6):
        heads = 70 if step else 3
        sites = ("a@attention",) * heads + ("a@experts",) * 2 + ("a/b@attention",)
        rows = random.random((len(sites), len(CHOICE_STATS))).astype(np.float32)
        rows[:, CHOICE_STATS.index("dropped")] = NAN
        rows[heads - 1 : heads + 1, CHOICE_STATS.index("logit")] = INF, NAN
        rows[:heads, CHOICE_STATS.index("distance")] = NAN if step == 2 else 0.5
        recording.append(step, {}, figures=PassStats(choices=sites, choice_rows=rows))
    found = {
        message.key: (message, np.frombuffer(buffer, "<f8"))
        for message, buffer in histories_of(
            recording, keys=("", "a", "a/b"), selected="a", layout=1
        )
        if isinstance(message, protocol.Choices)
    }
    assert list(found) == ["a@attention", "a@experts"]
    message, numbers = found["a@attention"]
    assert message.figures == ("evenness", "distance", "first", "logit")
    assert (message.site, message.rows, message.steps, message.more) == (1, 64, 5, 6)
    of = recording.heads_frame().query("site == 'a@attention' and step > 0 and head < 64")
    np.testing.assert_array_equal(numbers[:5], range(1, 6))
    for name, own in zip(message.figures, numbers[5:].reshape(4, 64, 5), strict=True):
        np.testing.assert_array_equal(own, of.pivot(index="head", columns="step", values=name))
    message, numbers = found["a@experts"]
    assert (message.experts, message.figures) == (True, ("load", "router_entropy"))
    of = recording.experts_frame().pivot(index="expert", columns="step")
    np.testing.assert_array_equal(numbers[6:].reshape(2, 2, 6), [of["load"], of["evenness"]])


# ----------------------------------------------------------------- in other dtypes

LOOK = protocol.Look(id=3, what="casts", site="")
DTYPES = (bfloat16, np.float16, float8_e4m3fn, float8_e5m2)


def test_what_other_dtypes_would_make_of_a_pass_is_what_numpy_rounds() -> None:
    """The worst come first, and a parameter stands at the module that holds it."""
    random = np.random.default_rng(0)
    values = {
        ("a", "output"): random.normal(size=400),
        ("a", "gradient"): random.normal(size=400) * 1e-8,
        ("a/kernel", "parameter"): random.normal(size=400) * 1e-3,
        ("a/kernel", "parameter_gradient"): random.normal(size=400) * 1e5,
        ("optimizer/nu/a/kernel", "state"): random.normal(size=400) ** 2 * 1e-12,
    }
    assert {quantity for _, quantity in values} | {"input"} == set(QUANTITIES)
    values = {key: x.astype(np.float32) for key, x in values.items()}
    recording, summaries = Recording(), dict[str, dict[str, Any]]()
    for (site, quantity), x in values.items():
        summaries.setdefault(site, {})[quantity] = summary_of(x)
    recording.append(4, summaries)
    message, buffer = casts_message(recording, ["", "a", "optimizer/nu/a/kernel"], LOOK)
    assert (message.id, message.site, message.step, message.total) == (3, "", 4, 5)
    names = ("activations", "gradient", "kernel", "kernel gradient", "state")
    assert {(one.site, one.name) for one in message.rows} == {
        *(("a", name) for name in names[:-1]),
        ("optimizer/nu/a/kernel", "state"),
    }
    keys = dict(zip(names, values, strict=True))
    shape = len(values), len(protocol.CASTS), len(protocol.CAST_STATS)
    shares = np.frombuffer(buffer, "<f8").reshape(shape)
    lost = (shares[:, :, 0] + shares[:, :, 2]).max(axis=1)
    assert (np.diff(lost) <= 0).all()
    for row, of in zip(message.rows, shares, strict=True):
        x = values[keys[row.name]]
        for dtype, found in zip(DTYPES, of, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                cast = x.astype(dtype).astype(np.float64)
            beyond = ~np.isfinite(cast)
            np.testing.assert_allclose(found[0], (cast == 0).mean())
            np.testing.assert_allclose(found[2], beyond.mean(), atol=0.02)  # within one bin


def test_without_a_pass_there_is_nothing_to_cast() -> None:
    with pytest.raises(InspectorError, match="no pass was measured yet"):
        casts_message(Recording(), [""], LOOK)
