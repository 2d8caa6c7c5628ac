"""What the panels must have in sight, unscrolled, at four sizes: checks 5 and 6 of the screen.

Live in JupyterLab, with a small language model and a small network of pictures. Each view is given
its size as a docked one has it.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from browser.lab import Sheet
from browser.view import View
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

SIZES = {420: 850, 640: 850, 1000: 760, 1400: 860}
MATRIX = {420: 250, 640: 340, 1000: 340, 1400: 480}
"""The least side of the attention's matrix."""

MODEL = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import nnx_inspector as nni

class Attention(nnx.Module):
    def __init__(self, *, rngs):
        self.qkv = nnx.Linear(32, 96, rngs=rngs)

    def __call__(self, x):
        q, k, v = (a.reshape(*a.shape[:2], 4, 8) for a in jnp.split(self.qkv(x), 3, -1))
        w = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        w = jnp.where(jnp.tril(jnp.ones(w.shape[-2:], bool)), w, -1e9)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(w, -1), v).reshape(x.shape)

class Experts(nnx.Module):
    def __init__(self, *, rngs):
        self.router = nnx.Linear(32, 4, rngs=rngs)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (4, 32, 32)))

    def __call__(self, x):
        weight, chosen = jax.lax.top_k(jax.nn.softmax(self.router(x)), 1)
        share = (jax.nn.one_hot(chosen, 4) * weight[..., None]).sum(-2)
        return jnp.einsum("bte,edf,btd->btf", share, self.kernel[...], x)

class Words(nnx.Module):
    def __init__(self, *, rngs):
        self.embed, self.attn = nnx.Embed(24, 32, rngs=rngs), Attention(rngs=rngs)
        self.head = nnx.Linear(32, 24, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.attn(self.embed(tokens)))

class Pictures(nnx.Module):
    def __init__(self, *, rngs):
        self.conv = nnx.Conv(1, 24, (3, 3), rngs=rngs)
        self.blocks = nnx.List([nnx.Conv(24, 24, (3, 3), rngs=rngs) for _ in range(8)])
        self.head = nnx.Linear(24, 10, rngs=rngs)

    def __call__(self, x):
        x = self.conv(x)
        for block in self.blocks:
            x = x + nnx.relu(block(x))
        return self.head(x.mean((1, 2)))

def loss_fn(model, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()
"""
WORDS = """
insp = nni.Inspector(Words(rngs=nnx.Rngs(0)), np.arange(24)[None], decode=lambda i: f" word{i}")
insp.selected = "attn"
insp
"""
WATCHED = """
model = nnx.Sequential(Attention(rngs=nnx.Rngs(0)), Experts(rngs=nnx.Rngs(1)))
call = nnx.jit(lambda model, x: model(x))
x = np.random.default_rng(0).normal(size=(3, 2, 16, 32)).astype("f")
insp = nni.Inspector(model, x[0])
for batch in insp.watch(x, every=1):
    call(model, batch)
"""
OVER_STEPS = {
    "layers/0": ("attention", "heads_frame()", ["evenness", "distance", "first", "logit"]),
    "layers/1": ("experts", "experts_frame()", ["load", "evenness"]),
}
"""Site -> the panel that shows its choices over the steps, their frame and its columns."""
PICTURES = """
rng = np.random.default_rng(0)
images = rng.random((16, 8, 8, 1)).astype("f")
insp = nni.Inspector(Pictures(rngs=nnx.Rngs(0)), images)
insp.step(loss_fn, images, rng.integers(10, size=16))
insp.selected = "conv"
insp
"""
WHOLE = """
(root, wanted) => {
  const panel = root.querySelector('[role=tabpanel]').getBoundingClientRect();
  return wanted.map(selector => [...root.querySelectorAll(selector)].map(e => {
    const box = e.getBoundingClientRect();
    const inside = box.top >= panel.top - 0.5 && box.bottom <= panel.bottom + 0.5
      && box.left >= panel.left - 0.5 && box.right <= panel.right + 0.5;
    return [inside && box.height > 0, box.width, box.height];
  }));
}
"""
"""For each selector its elements: whether they are whole within the panel, their width, height."""

NUMBERS = """root => [...root.querySelectorAll("[data-testid=nni-head-stat]")].map(row =>
  [...row.querySelectorAll("td")].map(cell => Number(cell.dataset.value)))"""
"""The figures of each head or expert on screen."""


def resize(view: View, width: int) -> None:
    """Give a view the size of a docked one, and wait until its pictures are drawn for it."""
    view.root.evaluate(
        "(root, [w, h]) => { root.style.width = `${w}px`; const view = root.querySelector("
        "'.nni-view'); view.style.height = `${h}px`; view.style.maxHeight = 'none';"
        " return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))) }",
        [width, SIZES[width]],
    )


def boxes_in_panel(view: View, *selectors: str) -> list[Any]:
    return view.root.evaluate(WHOLE, list(selectors))


def test_the_matrix_the_text_and_three_keys_are_in_sight(sheet: Sheet):
    with sheet([MODEL + WORDS], width=1700) as notebook:
        notebook.run(0, seconds=240)
        notebook.evaluate("app.shell.collapseLeft()")
        view = View(notebook.cell(0))
        view.wait_selected("attn")
        view.tab("attention")
        expect(view.root.get_by_test_id("nni-attention-key")).to_have_count(6)
        for width, least in MATRIX.items():
            resize(view, width)
            expect(view.part("nni-attention-head-3")).to_be_visible()
            (matrix,), (text,), keys = boxes_in_panel(
                view, ".nni-matrix canvas", ".nni-weighted-text", ".nni-key-word"
            )
            words = 78  # at the left of the matrix
            assert matrix[1] - words >= least, width
            assert matrix[0], width
            assert text[0], width
            assert all(key[0] for key in keys[:3]), width
        # a head, by a click: the text and the keys are its own
        view.part("nni-attention-head-2").click()
        expect(view.part("nni-attention-keys")).to_contain_text("head 2")
        keys = notebook.ask("np.argsort(-insp.values('attn@attention')[0, 2, 23])[:6].tolist()")
        shown = view.root.get_by_test_id("nni-attention-key")
        for key, one in zip(keys, shown.all(), strict=True):
            expect(one).to_have_attribute("data-value", str(key))
        view.part("nni-zero-head").click()
        chip = view.root.locator("[data-testid=nni-perturbation][data-site='attn@attention']")
        expect(chip).to_contain_text("head 2")
        made = 'insp.perturb("attn@attention", nni.Zero().only(units=[2], axis=-3))'
        expect(view.part("nni-python")).to_have_attribute("data-value", made)
        expect(view.part("nni-zero-head")).to_be_disabled()


def test_heads_and_experts_over_the_steps_are_those_of_the_frames(sheet: Sheet):
    with sheet([MODEL + WATCHED], width=1700) as notebook:
        notebook.run(0, seconds=240)
        notebook.evaluate("app.shell.collapseLeft()")
        view = View(notebook.cell(0))
        for site, (panel, frame, columns) in OVER_STEPS.items():
            view.select(site)
            view.tab(panel)
            caption = view.root.locator(".nni-head-stats caption")
            expect(caption).to_have_text(re.compile(f"^{site}@.*, step 2$"))
            of = f"insp.recording.{frame}.query('step == 2')[{columns}]"
            figures = notebook.ask(f"{of}.to_numpy().tolist()")
            assert len(figures) == 4
            assert view.root.evaluate(NUMBERS) == figures
        for width in SIZES:
            resize(view, width)
            (rows,) = boxes_in_panel(view, "[data-testid=nni-head-stat]")
            assert all(row[0] for row in rows), width


def test_the_picture_all_maps_and_all_bars_are_in_sight(sheet: Sheet):
    with sheet([MODEL + PICTURES], width=1700) as notebook:
        notebook.run(0, seconds=240)
        notebook.evaluate("app.shell.collapseLeft()")
        view = View(notebook.cell(0))
        view.wait_selected("conv")
        view.tab("values")
        view.part("nni-values-thumbnail").wait_for()
        for width in SIZES:
            resize(view, width)
            (maps,), (picture,) = boxes_in_panel(
                view, ".nni-values > .nni-picture", "[data-testid=nni-values-thumbnail]"
            )
            assert maps[0], width
            assert picture[0], width

        # no lens of a model that reads no sequence, no attention where there is none
        for name in ("nni-tab-lens", "nni-tab-attention"):
            expect(view.root.get_by_test_id(name)).to_have_count(0)
        expect(view.part("nni-batch")).to_have_attribute("data-value", "step")

        view.tab("sweep")
        view.part("nni-study-start").click()
        expect(view.part("nni-sweep")).to_have_attribute("data-state", "done", timeout=120_000)
        rows = view.root.get_by_test_id("nni-sweep-row")
        expect(rows).to_have_count(10)  # without the whole model
        for width in SIZES:
            resize(view, width)
            (bars,) = boxes_in_panel(view, "[data-testid=nni-sweep-row]")
            assert all(bar[0] for bar in bars), width
