"""What can be done while the first pass is made: the pass waits for an event of the test."""

from __future__ import annotations

import pytest
from browser.lab import Sheet
from browser.view import View
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

MODEL = """
import threading
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
import nnx_inspector as nni

let_go = threading.Event()

def hold(x):
    let_go.wait()
    return np.asarray(x)

class Two(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.second = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        if len(x) == 7:  # the example waits, a batch of the training does not
            x = jax.pure_callback(hold, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return self.second(nnx.relu(self.first(x)))

@nnx.jit
def step(model, x):
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.01 * g, nnx.state(model, nnx.Param), grads))
    return loss

model = Two(rngs=nnx.Rngs(0))
example = jnp.ones((7, 4))
before = float(jnp.linalg.norm(nnx.clone(model).second(nnx.relu(model.first(example)))))
"""
INSPECT = "insp = nni.Inspector(model, example)"
TRAIN = "losses = [float(step(model, jnp.ones((16, 4)))) for _ in range(5)]"
WATCH = "for x in insp.watch([jnp.ones((16, 4))] * 3, every=1): step(model, x)"


def test_the_tree_is_there_and_training_runs_while_the_first_pass_is_made(sheet: Sheet):
    with sheet([MODEL, INSPECT, TRAIN, "let_go.set()"]) as notebook:
        notebook.run(0, seconds=240)
        notebook.run(1, seconds=240)  # it ends, though the pass waits
        view = View(notebook.cell(1))
        view.row("second").wait_for()
        expect(view.part("nni-waiting")).to_have_attribute("data-value", "running the first pass")
        expect(view.part("nni-waiting")).to_contain_text(" s")
        view.row("second").click()
        expect(view.part("nni-selected")).to_have_attribute("data-value", "second")
        expect(view.part("nni-hist-output")).to_contain_text("No pass yet: running the first pass")
        view.tab("code")
        view.part("nni-excerpt").wait_for()
        view.tab("nnx")
        view.part("nni-nnx-node").wait_for()
        notebook.run(2, seconds=240)  # the training changes the model meanwhile
        assert view.root.get_by_test_id("nni-waiting").count()
        notebook.run(3, seconds=240)
        view.tab("overview")
        view.row("").click()
        view.wait_selected("")
        expect(view.root.get_by_test_id("nni-waiting")).to_have_count(0)
        norm = notebook.ask("insp.recording.summary('').norm")
        assert norm == pytest.approx(notebook.ask("before"), rel=1e-5), "the values at the start"
        assert notebook.ask("len(insp.recording)") == 1


def test_a_loop_takes_the_place_of_the_first_pass(sheet: Sheet):
    with sheet([MODEL, INSPECT, WATCH, "let_go.set()"]) as notebook:
        notebook.run(0, seconds=240)
        notebook.run(1, seconds=240)
        view = View(notebook.cell(1))
        view.part("nni-waiting").wait_for()
        notebook.run(2, seconds=240)
        view.row("first").click()
        view.wait_selected("first")
        assert notebook.ask("[p.kind for p in insp.recording.passes]") == ["watch"] * 3
        notebook.run(3, seconds=240)
        assert notebook.ask("insp._rerun.wait()") is None
        assert notebook.ask("[p.kind for p in insp.recording.passes]") == ["watch"] * 3
        expect(view.root.get_by_test_id("nni-waiting")).to_have_count(0)
