"""Every number in a figure is one of the Summary or of the history."""

# jax and pandas are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_inspector.recordings.facts import PassStats
from nnx_inspector.recordings.figure import _value_ticks, figure  # ticks of extreme ranges
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen.protocol import HISTORY_QUANTILES
from nnx_inspector.stats.bins import Scale
from nnx_inspector.stats.choices.rows import CHOICE_STATS
from nnx_inspector.stats.summarize import summarize
from nnx_inspector.stats.summary import Summary


def normal(seed: int, scale: float = 1.0) -> Summary:
    x = np.random.default_rng(seed).standard_normal(2000) * scale
    return summarize(jnp.asarray(x, jnp.float32)).merged()


def nan() -> Summary:
    return summarize(jnp.full(5, jnp.nan)).merged()


def filled(gradients: bool = True) -> Recording:
    recording = Recording()
    for i in range(6):
        gradient = normal(i, 1e-3) if gradients and i < 5 else None
        output = nan() if i == 2 else normal(i, 1 + i)
        recording.append(10 * i, {"blocks/0": {"output": output, "gradient": gradient}})
    return recording


def traces(drawn: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for trace in drawn.data:
        found.setdefault(trace.type, []).append(trace)
    return found


def are_round(axis: Any, edges: Any) -> None:
    """Several ticks, none of more than two digits, each where its value is."""
    values = [float(text) for text in axis.ticktext]
    assert 3 <= len(values) <= 10
    assert all(float(f"{value:.2g}") == value for value in values)
    np.testing.assert_allclose(
        axis.tickvals, np.interp(values, edges, np.arange(len(edges)) - 0.5), atol=1e-9
    )


def test_the_lines_of_heads_and_experts_are_their_figures() -> None:
    recording, random = Recording(), np.random.default_rng(0)
    sites = ("attn@attention",) * 3 + ("moe@experts",) * 2
    for step in range(4):
        rows = random.random((5, len(CHOICE_STATS))).astype(np.float32)
        rows[3:, CHOICE_STATS.index("dropped")] = np.nan
        recording.append(step, {}, figures=PassStats(choices=sites, choice_rows=rows))
    heads, experts = recording.heads_frame(), recording.experts_frame()
    lines = figure(recording, "attn@attention").data
    assert len(lines) == 4 * 3
    for number, name in enumerate(("evenness", "distance", "first", "logit")):
        for line in lines[3 * number : 3 * number + 3]:
            own = heads[heads["head"] == int(line.name.removeprefix("head "))]
            np.testing.assert_array_equal(line.x, own["step"])
            np.testing.assert_array_equal(line.y, own[name])
    lines = figure(recording, "moe@experts").data
    assert [line.name for line in lines] == ["expert 0", "expert 1", "router"]
    for number, line in enumerate(lines[:2]):
        np.testing.assert_array_equal(line.y, experts[experts["expert"] == number]["load"])
    np.testing.assert_array_equal(lines[2].y, experts[experts["expert"] == 0]["evenness"])
    text = "no pass kept has experts of 'attn@attention'. Those that have are 'moe@experts'."
    with pytest.raises(ValueError, match=re.escape(text)):
        figure(recording, "attn@attention", quantity="experts")


@pytest.mark.parametrize("scale", ["linear", "symlog"])
def test_the_bars_are_the_histogram_of_the_newest_pass(scale: Scale) -> None:
    recording = filled()
    drawn: Any = figure(recording, "blocks/0", scale=scale)
    bars = traces(drawn)["bar"]
    newest = [recording.series("blocks/0", q)[1][-1] for q in ("output", "gradient")]
    assert len(bars) == 2
    for bar, summary in zip(bars, newest, strict=True):
        edges, counts = summary.histogram(64, scale=scale)
        places = edges if scale == "linear" else np.arange(65) - 0.5
        np.testing.assert_array_equal(bar.y, counts)
        half = np.asarray(bar.width) / 2
        np.testing.assert_allclose(np.asarray(bar.x) - half, places[:-1], atol=1e-12)
        np.testing.assert_allclose(np.asarray(bar.x) + half, places[1:], atol=1e-12)
        np.testing.assert_array_equal(
            np.asarray(bar.customdata)[:, :2], np.stack([edges[:-1], edges[1:]], 1)
        )
        assert np.sum(bar.y) == summary.finite
    for x_axis, summary in zip((drawn.layout.xaxis, drawn.layout.xaxis2), newest, strict=True):
        if scale == "linear":
            assert (x_axis.title.text, x_axis.tickvals) == ("value", None)
        else:
            assert x_axis.title.text == "value (symmetric log)"
            edges = summary.histogram(64, scale="symlog").edges
            are_round(x_axis, edges)


def test_the_heatmap_and_the_bands_are_the_history() -> None:
    recording = filled()
    found, history = traces(figure(recording, "blocks/0")), recording.history("blocks/0")
    (heat,) = found["heatmap"]
    np.testing.assert_array_equal(heat.z, history.fractions.T)
    np.testing.assert_array_equal(heat.x, history.steps)
    np.testing.assert_array_equal(np.asarray(heat.customdata)[:, 0, 0], history.edges[:-1])
    *bands, median = found["scatter"]
    np.testing.assert_array_equal(median.y, history.quantiles[:, 3])
    np.testing.assert_array_equal(median.customdata, history.quantiles)
    np.testing.assert_array_equal(median.x, history.steps)
    for row, summary in enumerate(recording.series("blocks/0")[1]):
        np.testing.assert_array_equal(
            np.asarray(median.customdata)[row], summary.quantile(HISTORY_QUANTILES)
        )
    for band, (low, high) in zip(bands, ((0, 6), (1, 5), (2, 4)), strict=True):
        q = history.quantiles
        expected = np.concatenate(  # columns 0 and 1, the gap at 2, columns 3 to 5
            [q[:2, low], q[1::-1, high], [np.nan], q[3:, low], q[:2:-1, high], [np.nan]]
        )
        np.testing.assert_array_equal(band.y, expected)


def test_titles_and_axes_say_what_and_in_which_unit() -> None:
    recording = filled()
    drawn: Any = figure(recording, "blocks/0")
    texts = [a.text for a in drawn.layout.annotations]
    assert texts[0] == "output at step 50: 2,000 finite elements"
    assert texts[1] == "gradient at step 40: 2,000 finite elements"
    assert drawn.layout.title.text == "blocks/0: output"
    assert drawn.layout.xaxis.title.text == "value (symmetric log)"
    assert drawn.layout.yaxis.title.text == "elements"
    assert drawn.layout.xaxis3.title.text == drawn.layout.xaxis4.title.text == "step"
    are_round(drawn.layout.yaxis3, recording.history("blocks/0").edges)
    assert all(t.hovertemplate or t.hoverinfo == "skip" for t in drawn.data)
    assert drawn.to_json()


def test_a_perturbed_pass_washes_no_scale_out() -> None:
    recording = filled()
    recording.append(50, {"blocks/0": {"output": normal(9, 1e4)}}, perturbed=True)
    recording.append(60, {"blocks/0": {"output": normal(9, 1e4)}}, perturbed=True)
    zero = summarize(jnp.zeros(2000)).merged()
    recording.append(70, {"blocks/0": {"output": zero}}, perturbed=True)
    drawn: Any = figure(recording, "blocks/0")
    heat, before = traces(drawn)["heatmap"][0], traces(figure(filled(), "blocks/0"))["heatmap"][0]
    assert list(heat.x) == [0, 10, 20, 30, 40, 50, 60, 70]
    np.testing.assert_array_equal(np.asarray(heat.z)[:, :6], before.z)
    np.testing.assert_array_equal(heat.customdata[:, 0], before.customdata[:, 0])
    assert heat.zmax == before.zmax == np.nanmax(before.z) < np.nanmax(heat.z)
    marked, *_, median = traces(drawn)["scatter"]
    assert (marked.name, list(marked.x)) == ("perturbed", [60, 70])
    low, high = drawn.layout.yaxis4.range
    finite = recording.history("blocks/0").quantiles[[0, 1, 3, 4, 5]]
    assert low < finite.min() < finite.max() < high < 2 * finite.max()
    assert np.nanmax(median.y) > high, "cut, and not left out"
    assert drawn.layout.annotations[0].text.startswith("output at step 70, perturbed:")


def test_passes_of_nothing_but_perturbations_are_drawn() -> None:
    recording = Recording()
    for step in (3, 3, 4):
        recording.append(step, {"a": {"output": normal(step)}}, perturbed=True)
    drawn: Any = figure(recording, "a")
    assert list(traces(drawn)["heatmap"][0].x) == [3, 4]


def test_a_step_has_one_column_of_its_newest_clean_pass() -> None:
    recording = Recording()
    for seed, perturbed in ((0, False), (1, False), (2, True)):
        recording.append(5, {"a": {"output": normal(seed)}}, perturbed=perturbed)
    recording.append(4, {"a": {"output": normal(3)}})  # a second loop that starts again
    median = traces(figure(recording, "a"))["scatter"][-1]
    assert list(median.x) == [4, 5]
    assert list(median.y) == [normal(seed).quantile(0.5) for seed in (3, 1)]


@pytest.mark.parametrize(
    "edges",
    [
        np.linspace(1.0003, 1.0007, 49),
        np.sinh(np.linspace(-20, 12, 49)) * 1e-8,
        np.linspace(-3e-30, 2e-30, 49),
        np.geomspace(2.1, 8.4, 49),
    ],
)
def test_ticks_are_round(edges: Any) -> None:
    ticks = _value_ticks(edges)
    values = [float(text) for text in ticks["ticktext"]]
    assert len(values) >= 2
    assert all(edges[0] <= value <= edges[-1] for value in values)
    assert np.all(np.diff(ticks["tickvals"]) >= 49 / 9 - 1e-9)
    assert all(len(text) <= 8 for text in ticks["ticktext"])


def test_a_figure_has_no_background_of_its_own() -> None:
    layout: Any = figure(filled(), "blocks/0").layout
    assert layout.paper_bgcolor == layout.plot_bgcolor == "rgba(0, 0, 0, 0)"
    for background in ((255, 255, 255), (17, 17, 17)):  # of JupyterLab's two themes
        ink = tuple(int(layout.font.color[i : i + 2], 16) for i in (1, 3, 5))
        light, dark = sorted((luminance(ink), luminance(background)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4  # WCAG asks for 3 in large text, 4.5 in small


def luminance(colour: tuple[int, ...]) -> float:
    """The relative luminance of WCAG."""
    parts = [c / 255 for c in colour]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_without_a_gradient_and_for_other_quantities() -> None:
    assert len(traces(figure(filled(gradients=False), "blocks/0"))["bar"]) == 1
    drawn: Any = figure(filled(), "blocks/0", quantity="gradient")
    assert len(traces(drawn)["bar"]) == 1
    assert drawn.layout.title.text == "blocks/0: gradient"


def test_a_pass_of_nothing_but_nan_is_drawn_as_such() -> None:
    recording = Recording()
    recording.append(7, {"a": {"output": nan()}})
    drawn: Any = figure(recording, "a")
    assert drawn.layout.annotations[0].text == (
        "output at step 7: nothing finite among 5 elements, 5 NaN"
    )
    assert len(drawn.data[0].y) == 0
    assert np.isnan(np.asarray(drawn.data[1].z)).all()


def test_the_thinned_past_is_said() -> None:
    recording = Recording(max_steps=4)
    for i in range(9):
        recording.append(i, {"": {"output": normal(i)}})
    drawn: Any = figure(recording, "")
    assert drawn.layout.title.text.startswith("the model: output (")
    assert "thinned out" in drawn.layout.title.text


def test_nothing_to_draw_teaches() -> None:
    with pytest.raises(ValueError, match="Run a pass first"):
        figure(Recording(), "a")
    with pytest.raises(ValueError, match="closest sites are 'blocks/0'"):
        figure(filled(), "blocks/1")
    with pytest.raises(ValueError, match="not measure the input of 'blocks/0', but 'output'"):
        figure(filled(), "blocks/0", quantity="input")
    with pytest.raises(ValueError, match="no quantity 'outputs'"):
        figure(filled(), "blocks/0", quantity="outputs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 'log'"):
        figure(filled(), "blocks/0", scale="log")  # type: ignore[arg-type]
