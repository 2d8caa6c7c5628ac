"""A saved notebook, opened without a kernel: the last state is there, and its metadata is small."""

from __future__ import annotations

import json

import nbformat
import pytest
from browser.lab import Lab
from browser.notebook import Notebook
from browser.view import View
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

MODEL = """
import jax, jax.numpy as jnp
from flax import nnx
import nnx_inspector as nni

class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)
    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))

model = Net(nnx.Rngs(0))
x = jax.random.normal(jax.random.key(1), (16, 3))
"""
INSPECT = "insp = nni.Inspector(model, x)"
MOST_METADATA = 200_000


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory):
    """JupyterLab that saves the state of widgets in notebooks."""
    saves = {"@jupyter-widgets/jupyterlab-manager/plugin": {"saveState": True}}
    root = tmp_path_factory.mktemp("saved")
    with Lab(root, settings=saves) as lab:
        yield lab


def saved(lab: Lab, name: str) -> nbformat.NotebookNode:
    return nbformat.read(lab.root / name, as_version=4)


def without_kernel(lab: Lab, name: str, copy: str) -> None:
    """A copy whose kernel is not there: JupyterLab asks for another, and is told to take none."""
    node = saved(lab, name)
    node.metadata["kernelspec"] = {"name": "gone", "display_name": "Gone", "language": "gone"}
    node.metadata["language_info"] = {"name": "gone"}  # it takes another of the same language
    nbformat.write(node, lab.root / copy)


def last_state(notebook: Notebook, index: int):
    return notebook.cell(index).locator(".nni-snapshot")


def test_it_shows_the_last_state_without_a_kernel_and_stays_small(lab: Lab):
    with lab.notebook("one.ipynb", [MODEL, INSPECT, "insp.run(x * 2)"]) as notebook:
        notebook.run(0, seconds=240)
        notebook.run(1, seconds=240)
        view = View(notebook.cell(1))
        view.wait("nni-stat-output-size", "value > 0")
        state = last_state(notebook, 1)
        expect(state).to_have_count(1)
        expect(state).to_be_hidden()  # while there is a live view of it
        notebook.run(2, seconds=240)
        view.select("second")
        view.perturb("Scale", 0.25)
        view.part("nni-effect").wait_for()
        mean = notebook.ask("f\"{insp.recording.summary('second').mean:.4g}\"")
        expect(state).to_contain_text("nni.Scale(factor=0.25)")
        notebook.evaluate("await panel.context.save()")
        node = saved(lab, "one.ipynb")
        assert len(json.dumps(node.metadata)) < MOST_METADATA
        widgets = node.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
        assert any(one["model_name"] == "AnyModel" for one in widgets.values())
        assert notebook.errors == []
    html = [o.data["text/html"] for o in node.cells[1].outputs if "text/html" in o.get("data", {})]
    assert len(html) == 1
    assert len(html[0].encode()) <= 100_000
    without_kernel(lab, "one.ipynb", "copy.ipynb")
    with lab.notebook("copy.ipynb", kernel=False) as reopened:
        state = last_state(reopened, 1)
        expect(state).to_be_visible()
        expect(state).to_contain_text("second")
        expect(state).to_contain_text("nni.Scale(factor=0.25)")
        expect(state.locator("table").first.locator("tr")).to_have_count(4)
        detail = state.locator("table").last
        expect(detail).to_contain_text(mean)
        for dark in (False, True):
            reopened.theme(dark=dark)
            expect(state).to_be_visible()
        assert reopened.foreign == []
