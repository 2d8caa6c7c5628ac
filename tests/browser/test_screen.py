"""The screen at four widths, in both themes: what must be in sight, and what must not move.

One saved page for each state of a training: plain, perturbed, with NaN.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from browser.notebook import WAIT
from browser.view import View
from flax import nnx
from playwright.sync_api import Browser, Page, expect

import nnx_inspector as nni

pytestmark = pytest.mark.browser

SIZES = {420: 850, 640: 850, 1000: 760, 1400: 860}
STATES = ("plain", "perturbed", "nan")
STEPS = 20


class Block(nnx.Module):
    def __init__(self, size: int, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(size, size, (3, 3), rngs=rngs)
        self.norm = nnx.LayerNorm(size, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nnx.relu(self.norm(self.conv(x)))


class Digits(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.stem = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.blocks = nnx.List([Block(8, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """A saved page for each state."""
    folder = tmp_path_factory.mktemp("screen")
    rng = np.random.default_rng(0)
    batch = (rng.normal(size=(16, 8, 8, 1)).astype("f"), rng.integers(10, size=16))
    model = Digits(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def loss_fn(model: Digits, batch: Any) -> jax.Array:
        logits = model(batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    @nnx.jit
    def step(model: Digits, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    insp = nni.Inspector(model, batch[0], display=False)

    def train() -> None:
        for _ in insp.watch(range(STEPS), every=2):
            loss = step(model, optimizer, batch)
            rate = {"learning rate": 1e-3, "a metric with quite a long name": 3.0}
            insp.metrics(loss=loss, accuracy=0.5, **rate)

    train()
    insp.selected = "blocks/1/conv"
    found = {state: folder / f"{state}.html" for state in STATES}
    insp.to_html(found["plain"])
    insp.perturb("blocks/1/conv", nni.Zero())
    insp.perturb("head", nni.Scale(0.5)).enabled = False
    train()
    insp.step(loss_fn, batch)
    insp.to_html(found["perturbed"])
    for handle in insp.perturbations:
        handle.remove()
    kernel = model.blocks[1].conv.kernel
    kernel[...] = kernel[...].at[0].set(jnp.nan)
    train()
    insp.selected = "blocks/1/norm"
    insp.to_html(found["nan"])
    insp.close()
    return found


@dataclasses.dataclass
class OpenPage:
    page: Page
    view: View
    width: int
    state: str


@pytest.fixture(params=["light", "dark"])
def context(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Page]:
    context = browser.new_context(color_scheme=request.param, offline=True)
    page = context.new_page()
    page.set_default_timeout(WAIT * 1000)
    yield page
    context.close()


MEASURE_LAYOUT = """
root => {
  const $ = selector => [...root.querySelectorAll(selector)];
  const id = name => root.querySelector(`[data-testid='${name}']`);
  const box = e => e.getBoundingClientRect();
  const seen = e => box(e).width > 0 && box(e).height > 0 && e.checkVisibility()
    && getComputedStyle(e).clipPath === 'none' && !e.closest('[aria-hidden=true], .nni-hidden');
  const within = (e, place) => {
    const [a, b] = [box(e), box(place)];
    return a.height > 0 && a.top >= b.top - 0.5 && a.bottom <= b.bottom + 0.5;
  };
  const rows = root.querySelector('.nni-rows');
  const panel = root.querySelector('[role=tabpanel]');
  const hasText = e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  const texts = $('*').filter(e => seen(e) && hasText(e) && !e.closest('svg, .nni-flow'));
  const clips = ['auto', 'scroll', 'hidden', 'clip'];
  const scrolls = at => at && at !== root
    && (clips.includes(getComputedStyle(at).overflowX) || scrolls(at.parentElement));
  const whole = '.nni-header *, .nni-perturb *, .nni-tabs *, .nni-site-line button';
  return {
    rows: $('[data-testid=nni-row]').filter(row => within(row, rows)).length,
    selected: within(root.querySelector('.nni-row-selected'), rows),
    tree: within(id('nni-tree'), root),
    page: document.documentElement.scrollHeight > innerHeight + 1,
    head: box(root.querySelector('.nni-header')).height,
    bar: id('nni-perturb-bar') ? box(id('nni-perturb-bar')).height : 0,
    histograms: ['output', 'gradient'].map(name => id(`nni-hist-${name}`))
      .map(found => found !== null && within(found, panel)),
    sizes: [...new Set(texts.map(e => getComputedStyle(e).fontSize))],
    odd: texts.filter(e => !['11px', '12px', '14px'].includes(getComputedStyle(e).fontSize))
      .map(e => e.outerHTML.slice(0, 80)),
    wide: $('*').filter(e => seen(e) && box(e).right > box(root).right + 1)
      .filter(e => !scrolls(e.parentElement)).map(e => e.outerHTML.slice(0, 80)),
    cut: $(whole).filter(e => seen(e) && e.scrollWidth > e.clientWidth + 1)
      .filter(e => getComputedStyle(e).overflowX === 'hidden' && !e.closest('[title]'))
      .map(e => e.outerHTML.slice(0, 80)),
    small: $('button').filter(e => seen(e) && !e.closest('svg'))
      .filter(e => box(e).height < 14 || (!e.matches('.nni-link, .nni-head')
        && Math.min(box(e).width, box(e).height) < 22)).map(e => e.outerHTML.slice(0, 80)),
  };
}
"""
"""What is in sight, and what is too wide, cut off, too small to press or of another text size."""
LONG = """
root => {
  root.querySelector('.nni-model').textContent = 'Transformer'.repeat(9);
  const status = root.querySelector('.nni-status');
  status.textContent = 'finished';
  root.style.width = '370px';
  return status.scrollWidth <= status.clientWidth + 1;
}
"""
"""Whether a long name leaves room for how the run is, in a narrow place."""


def measure_layout(view: View) -> dict[str, Any]:
    return view.root.evaluate(MEASURE_LAYOUT)


def open_at(page: Page, path: pathlib.Path, width: int) -> View:
    page.set_viewport_size({"width": width, "height": SIZES[width]})
    page.goto(path.as_uri())
    view = View(page.locator("body"))
    view.row("head").wait_for()
    view.part("nni-hist-output").wait_for()
    return view


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("width", SIZES)
def test_what_must_be_in_sight(
    context: Page, pages: dict[str, pathlib.Path], width: int, state: str
):
    view = open_at(context, pages[state], width)
    expect(view.root.locator("[aria-busy=true]")).to_have_count(0)
    found = measure_layout(view)
    assert found["rows"] >= 6
    assert found["selected"]
    assert found["tree"]
    assert not found["page"]
    assert found["head"] <= 40
    if state == "perturbed":
        assert 0 < found["bar"] <= (72 if width < 800 else 37)
    else:
        assert found["bar"] == 0
    if state != "nan":
        assert found["histograms"] == [True, True]
    assert found["odd"] == []
    assert set(found["sizes"]) == {"11px", "12px", "14px"}
    assert found["wide"] == []
    assert found["cut"] == []
    assert found["small"] == []
    assert view.root.evaluate(LONG)


@pytest.mark.parametrize("width", SIZES)
def test_the_tree_stays_whatever_is_shown(
    context: Page, pages: dict[str, pathlib.Path], width: int
):
    view = open_at(context, pages["perturbed"], width)
    before = view.part("nni-tree").bounding_box()
    for panel in view.every_panel():
        found = measure_layout(view)
        assert found["rows"] >= 6, panel
        assert found["selected"], panel
        assert found["wide"] == [], panel
    assert view.part("nni-tree").bounding_box() == before


@pytest.mark.parametrize("width", SIZES)
def test_a_finding_pushes_the_page(context: Page, pages: dict[str, pathlib.Path], width: int):
    view = open_at(context, pages["nan"], width)
    tree = view.part("nni-tree").bounding_box()
    view.part("nni-findings").click()
    band = view.root.get_by_role("region", name="Findings").bounding_box()
    moved = view.part("nni-tree").bounding_box()
    assert band is not None
    assert tree is not None
    assert moved is not None
    assert band["y"] + band["height"] <= SIZES[width]
    assert band["height"] <= 0.4 * SIZES[width] + 1
    assert moved["y"] >= tree["y"] + band["height"] - 1 or width >= 800
    assert measure_layout(view)["wide"] == []
    finding = view.part("nni-finding")
    expect(finding).to_have_attribute("data-rule", "nonfinite")
    finding.get_by_role("button", name="Go to step").click()
    expect(view.part("nni-time")).to_have_attribute("data-state", "held")


@pytest.mark.parametrize("width", SIZES)
def test_the_bars_between_the_parts(context: Page, pages: dict[str, pathlib.Path], width: int):
    view = open_at(context, pages["plain"], width)
    side = "width" if width >= 800 else "height"

    def size() -> float:
        box = view.part("nni-tree").bounding_box()
        assert box is not None
        return box[side]

    bar = view.part("nni-split")
    before = size()
    bar.press("ArrowRight" if width >= 800 else "ArrowDown")
    assert size() == pytest.approx(before + 24, abs=1)
    bar.dblclick()
    assert size() == pytest.approx(before, abs=1)
    place = bar.bounding_box()
    assert place is not None
    x, y = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
    context.mouse.move(x, y)
    context.mouse.down()
    context.mouse.move(0, 0, steps=3)
    context.mouse.up()
    least = 280 if width >= 800 else 3 * 24
    assert size() == pytest.approx(least, abs=1)
    context.mouse.move(*((least + 4, y) if width >= 800 else (x, y - before + least)))
    detail = view.part("nni-detail").bounding_box()
    assert detail is not None
    assert detail["height"] >= 240
    bar.dblclick()
    assert size() == pytest.approx(before, abs=1)


def test_a_sorted_tree_begins_with_what_is_first(context: Page, pages: dict[str, pathlib.Path]):
    """Also if the selected row is the last one, because it has no such figure."""
    view = open_at(context, pages["plain"], 420)
    view.select("")
    view.part("nni-sort-update").click()
    head = view.root.locator(".nni-columns [aria-sort=descending]")
    expect(head).to_have_count(1)
    assert view.part("nni-tree").evaluate("rows => rows.scrollTop") == 0
    ratios = view.root.get_by_test_id("nni-cell-update").evaluate_all(
        "cells => cells.map(c => Number(c.dataset.value))"
    )
    known = [ratio for ratio in ratios if ratio == ratio]
    assert ratios[: len(known)] == sorted(known, reverse=True)
    assert known[0] > known[-1] > 0


def test_at_300_pixels_all_can_be_reached(context: Page, pages: dict[str, pathlib.Path]):
    context.set_viewport_size({"width": 300, "height": 700})
    context.goto(pages["perturbed"].as_uri())
    view = View(context.locator("body"))
    view.row("head").wait_for()
    found = measure_layout(view)
    assert found["wide"] == []
    assert found["rows"] >= 3
    for testid in ("nni-menu", "nni-tree-menu", "nni-time-menu", "nni-site-menu"):
        view.open(testid)
        assert measure_layout(view)["wide"] == [], testid
        context.keyboard.press("Escape")
