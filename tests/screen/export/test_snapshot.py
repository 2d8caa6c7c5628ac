"""The last state as plain HTML: its figures, its bounds, and that no text is ever markup."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved_pages import ELEMENTS, HOSTILE, Html, content_for
from summaries import normal_values, summary_of

from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.screen.export.snapshot import MOST_BYTES, bars, snapshot


def made(recording: Recording, keys, *, findings=(), **state) -> str:
    page = content_for(keys)
    return snapshot(
        saved="today",
        layout=page.layout,
        state=dataclasses.replace(page.state, **state),
        recording=recording,
        findings=findings,
    )


def test_the_figures_are_the_summaries():
    recording = Recording()
    recording.append(3, {"a": {"output": summary_of(normal_values(0))}}, metrics={"loss": 9.0})
    forward, back = (
        summary_of(normal_values(1, scale=3.0)),
        summary_of(normal_values(2, scale=1e-3)),
    )
    recording.append(4, {"a": {"output": forward, "gradient": back}}, metrics={"loss": 0.125})
    read = Html(made(recording, ("a", "never")))
    tree, detail = read.tables
    x = normal_values(1, scale=3.0).astype(np.float64)
    row = dict(zip(tree[0], tree[1], strict=True))
    assert float(row["mean"]) == pytest.approx(x.mean(), rel=1e-3, abs=1e-6)
    assert float(row["std"]) == pytest.approx(x.std(), rel=1e-3)
    assert float(row["max"]) == pytest.approx(x.max(), rel=1e-3)
    norm = np.linalg.norm(normal_values(2, scale=1e-3).astype(np.float64))
    assert float(row["‖gradient‖"]) == pytest.approx(norm, rel=1e-3)
    assert row["NaN, Inf"] == "0"
    assert set(tree[2][4:]) == {"–"}
    for line, wanted in zip(detail[1:], (forward, back), strict=True):
        figures = dict(zip(detail[0], line, strict=False))
        assert int(figures["size"]) == wanted.size
        assert float(figures["q50"]) == pytest.approx(wanted.quantile(0.5), rel=1e-3)
        assert float(figures["norm"]) == pytest.approx(wanted.norm, rel=1e-3)
    assert "step 4, 2 passes recorded" in read.text
    assert "loss 0.125" in read.text


def test_what_is_not_finite_is_counted():
    recording = Recording()
    bad = summary_of(np.array([np.nan, np.nan, np.inf, 1.0], np.float32))
    recording.append(0, {"a": {"output": bad}})
    tree, _ = Html(made(recording, ("a",))).tables
    assert tree[1][-1] == "3"


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_is_markup(text: str):
    recording = Recording()
    recording.append(0, {text: {"output": summary_of(normal_values(0))}}, metrics={text: 1.0})
    perturbation = protocol.Perturbation(
        id=1, site=text, sites=(text,), reach=1, kind=text, at="output", acts_on="value",
        expression=text, strength=None, strength_name=text, low=0.0, high=0.0, units=0,
        units_off=0, mask="", python=text, enabled=True, pending=False, compiling=False,
        not_acting=text,
    )  # fmt: skip
    effect = protocol.Effect(
        source=text, clean={text: 1.0}, perturbed={text: 2.0}, output_change=0.5, kl=None,
        top1_changed=None, sites=(), alone=(), moved={},
    )  # fmt: skip
    finding = protocol.FindingRow(
        rule=text, site=text, step=0, severity="error", what=text, advice=text
    )  # fmt: skip
    found = made(
        recording, (text,), findings=(finding,), perturbations=(perturbation,), effect=effect
    )
    read = Html(found)
    assert {tag for tag, _ in read.elements} <= ELEMENTS
    assert {one for _, more in read.elements for one in more.items()} == {
        ("class", "nni-snapshot"),
        ("style", "text-align: left"),
    }
    found.encode()
    if text.isprintable() and len(text) < 80:
        assert text in read.text


def test_it_stays_small_whatever_the_model():
    keys = [f"blocks/{i}/{'long' * 30}" for i in range(3000)]
    recording = Recording()
    recording.append(0, {key: {"output": summary_of(normal_values(0))} for key in keys[:50]})
    found = made(recording, keys, selected=keys[2500])
    assert len(found.encode()) <= MOST_BYTES
    read = Html(found)
    shown = len(read.tables[0]) - 1
    assert 20 < shown <= 120
    assert f"{3000 - shown} more are left out" in read.text
    assert keys[2500] in read.text


def test_before_the_first_pass_it_shows_the_modules():
    read = Html(made(Recording(), ("a", "b")))
    assert [row[0].strip() for row in read.tables[0][1:]] == ["a", "b"]


@given(st.lists(st.integers(0, 255), min_size=32, max_size=32))
def test_bars_rise_with_what_they_stand_for(heights: list[int]):
    found = bars(np.array(heights, np.uint8))
    if not any(heights):
        assert found == ""
        return
    pairs = [max(heights[i : i + 2]) for i in range(0, 32, 2)]
    assert len(found) == 16
    ranked = sorted(zip(pairs, found, strict=True))
    assert [bar for _, bar in ranked] == sorted(found)
