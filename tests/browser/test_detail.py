"""Units, a mask, a sweep and a line of Python from the page, while a loop trains in the notebook.

The oracle of the mask is in the losses: with every unit of the last layer off, the output is zeros
and the cross-entropy among three classes is log(3), whatever the parameters are.
"""

from __future__ import annotations

import math
import re

import pytest
from browser.lab import Sheet
from browser.view import View
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

ZEROED = math.log(3)
"""The loss with every unit of the last layer off."""

MODEL = """
import pathlib, threading, time
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import nnx_inspector as nni

class Net(nnx.Module):
    '''Told of here.'''

    def __init__(self, *, rngs):
        self.first = nnx.Linear(4, 24, rngs=rngs)
        self.second = nnx.Linear(24, 3, rngs=rngs)

    def __call__(self, x):
        h = nnx.relu(self.first(x))
        return self.second(h)

rng = np.random.default_rng(0)
x, y = rng.normal(size=(16, 4)).astype("f"), rng.integers(3, size=16)

def loss_fn(model, batch):
    logits = model(batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss

def batches():
    end = time.monotonic() + 240
    while not pathlib.Path("stop-detail").exists() and time.monotonic() < end:
        time.sleep(0.01)  # a step takes as long as a step does
        yield x, y

losses = []

def train():
    for batch in insp.watch(batches(), every=5):
        losses.append(float(train_step(model, optimizer, batch)))
        insp.metrics(loss=losses[-1])

model = Net(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)
insp = nni.Inspector(model, x)
insp.step(loss_fn, (x, y))
"""


def test_units_masks_and_a_sweep_in_a_running_notebook(sheet: Sheet):
    stop = sheet.root / "stop-detail"
    with sheet([MODEL, "train()"]) as notebook:
        notebook.run(0, seconds=240)
        view = View(notebook.cell(0))
        expect(view.part("nni-python")).to_have_count(0)
        notebook.start(1)
        view.wait("nni-step", "value > 20")

        # the strip of units, and a mask over all of them: the loss says that it acts
        view.select("second")
        expect(view.part("nni-figures")).to_be_visible()
        view.tab("units")
        view.wait("nni-strip", "value === 3")
        view.part("nni-edit-mask").click()
        strip = view.part("nni-strip")
        box = strip.bounding_box()
        assert box is not None
        mouse = notebook.page.mouse
        mouse.move(box["x"] + 5, box["y"] + 10)
        mouse.down()
        mouse.move(box["x"] + 70, box["y"] + 10, steps=5)
        mouse.up()
        view.wait("nni-units-off", "value === 3")
        expect(view.part("nni-python")).to_have_attribute(
            "data-value", 'insp.perturb("second", nni.Mask.without([0, 1, 2], units=3))'
        )
        expect(view.part("nni-units")).to_have_text("mask: 3 of 3 off")
        view.wait("nni-metric-loss", "Math.abs(value - arg) < 1e-4", ZEROED)

        # by the keyboard: one unit on again, which compiles nothing
        expect(view.part("nni-row-compiling")).to_have_count(0)
        expect(view.part("nni-kl")).to_be_visible()  # which needs a program too, the last one
        compiled = view.compilations()
        strip.focus()
        strip.press("Home")
        changes = (2, 3, 2, 3, 2)
        for off in changes:
            strip.press("Space")
            view.wait("nni-units-off", "value === arg", off)
            sign = ">" if off == 2 else "<"
            view.wait("nni-metric-loss", f"Math.abs(value - arg) {sign} 1e-3", ZEROED)
        # up to three may have been under way: of the loop, of insp.step and of the looks
        assert view.compilations() < compiled + len(changes)

        # a sweep beside the training
        view.tab("sweep")
        view.part("nni-study-start").click()
        expect(view.part("nni-sweep")).to_have_attribute("data-state", re.compile("done|stopped"))
        rows = view.root.get_by_test_id("nni-sweep-row")
        # by the mean, of which the whole model is a row; of a sweep of zeros it is none
        assert {row.get_attribute("data-site") for row in rows.all()} == {"", "first", "second"}
        view.part("nni-study-start").click()
        view.part("nni-study-stop").click()
        expect(view.part("nni-sweep")).to_have_attribute("data-state", re.compile("done|stopped"))
        view.wait("nni-step", "value > arg", view.number("nni-step"))  # it still trains

        stop.touch()
        notebook.finish(1)
        assert notebook.ask("insp.perturbations[0].perturbation.mask.tolist()") == [
            True, False, False,
        ]  # fmt: skip
        assert notebook.errors == []

        # what is copied does the same in a cell
        notebook.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        view.open("nni-effect-more")
        view.part("nni-switch-all").click()
        expect(view.part("nni-python")).to_have_attribute("data-value", "insp.switch_all(False)")
        view.root.locator(".nni-footer").get_by_test_id("nni-copy-python").click()
        copied = notebook.page.evaluate("navigator.clipboard.readText()")
        assert copied == "insp.switch_all(False)"
        notebook.run(notebook.append(copied.replace("False", "True")))
        expect(view.part("nni-switch")).to_have_attribute("aria-checked", "true")

        # and what is done in a cell is on screen
        notebook.run(notebook.append('insp.selected = ""'))
        expect(view.part("nni-selected")).to_have_attribute("data-value", "")
        view.tab("code")
        expect(view.part("nni-documentation")).to_have_text("Told of here.")
        view.row("first").click()
        view.wait_selected("first")
        expect(view.part("nni-excerpt").locator("[aria-current]")).to_contain_text(
            "h = nnx.relu(self.first(x))"
        )
