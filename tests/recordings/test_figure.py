"""Every number in a figure is one of the Summary or of the history."""

# jax and pandas are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_inspector.recordings.figure import figure
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen.protocol import HISTORY_QUANTILES
from nnx_inspector.stats.bins import Scale
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
            at = (np.asarray(x_axis.tickvals) + 0.5).astype(int)
            edges = summary.histogram(64, scale="symlog").edges
            assert list(x_axis.ticktext) == [f"{e:.3g}" for e in edges[at]]


def test_the_heatmap_and_the_bands_are_the_history() -> None:
    recording = filled()
    found, history = traces(figure(recording, "blocks/0")), recording.history("blocks/0")
    (heat,) = found["heatmap"]
    np.testing.assert_array_equal(heat.z, history.fractions.T)
    np.testing.assert_array_equal(np.asarray(heat.customdata)[0, :, 0], history.steps)
    np.testing.assert_array_equal(np.asarray(heat.customdata)[:, 0, 1], history.edges[:-1])
    *bands, median = found["scatter"]
    np.testing.assert_array_equal(median.y, history.quantiles[:, 3])
    np.testing.assert_array_equal(np.asarray(median.customdata)[:, 1:], history.quantiles)
    for row, summary in enumerate(recording.series("blocks/0")[1]):
        np.testing.assert_array_equal(
            np.asarray(median.customdata)[row, 1:], summary.quantile(HISTORY_QUANTILES)
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
    assert list(drawn.layout.xaxis3.ticktext) == ["0", "10", "20", "30", "40", "50"]
    assert all(t.hovertemplate or t.hoverinfo == "skip" for t in drawn.data)
    assert drawn.to_json()


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
