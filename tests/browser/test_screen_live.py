"""In JupyterLab, a switch and new steps move nothing on the screen."""

from __future__ import annotations

import pytest
from browser.lab import Lab
from browser.view import View
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

LIVE = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import nnx_inspector as nni

class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.second = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))

x = np.random.default_rng(0).normal(size=(16, 4)).astype("f")
y = np.zeros(16, int)
model = Net(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)

def loss_fn(model, batch):
    logits = model(batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

@nnx.jit
def step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss

def train(n):
    for _ in insp.watch(range(n), every=2):
        insp.metrics(loss=step(model, optimizer, (x, y)))

insp = nni.Inspector(model, x)
insp.step(loss_fn, (x, y))
train(8)
"""

BOXES = """
root => [...root.querySelectorAll('.nni-view *')]
  .filter(e => !e.closest('[role=tabpanel], .nni-effect-items, .nni-time-plot, .nni-row'))
  .filter(e => !e.closest('.nni-progress, .nni-chip-status, .nni-footer, .nni-compiling'))
  .map(e => [e, e.getBoundingClientRect()])
  .filter(([, box]) => box.width > 0)
  .map(([e, box]) => [e.className, box.x, box.y, box.width, box.height].join(' '))
"""
"""Where each box of the frame is. Texts within boxes may change their length."""


@pytest.mark.parametrize("width", [900, pytest.param(1400, marks=pytest.mark.long)])
def test_a_switch_and_a_new_step_move_nothing(lab: Lab, width: int):
    with lab.notebook("live.ipynb", [LIVE], width=width) as notebook:
        notebook.evaluate("app.shell.collapseLeft()")
        notebook.run(0, seconds=240)
        view = View(notebook.cell(0))
        view.select("first")
        view.perturb("Zero")
        view.part("nni-effect").wait_for()
        view.row("second").hover()
        notebook.page.mouse.move(0, 0)
        expect(view.part("nni-compiling")).to_have_attribute("data-value", "0")
        expect(view.root.get_by_test_id("nni-training-perturbed")).to_have_count(0)
        before = view.root.evaluate(BOXES)
        clean = view.number("nni-effect-loss-clean")
        view.part("nni-switch").click()
        view.wait("nni-effect-loss-perturbed", "value === arg", clean)
        assert view.root.evaluate(BOXES) == before
        view.part("nni-switch").click()
        view.wait("nni-effect-loss-perturbed", "value !== arg", clean)
        assert view.root.evaluate(BOXES) == before
        step = view.number("nni-step")
        notebook.run(notebook.append("insp.step(loss_fn, (x, y)); train(6)"), seconds=120)
        view.wait("nni-step", "value > arg", step)
        expect(view.root.get_by_test_id("nni-training-perturbed")).to_have_count(0)
        after = view.root.evaluate(BOXES)
        assert [box for box in after if box not in before] == []
        assert notebook.errors == []
