"""The view docks beside the notebook in one click, and stays there when its cell runs again."""

from __future__ import annotations

import pytest
from browser.lab import Lab
from browser.view import View
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

MODEL = """
import jax.numpy as jnp
from flax import nnx
import nnx_inspector as nni

class Two(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.second = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))
"""
INSPECT = "insp = nni.Inspector(Two(rngs=nnx.Rngs(0)), jnp.ones((7, 4)))"


def test_a_view_docks_and_its_cell_says_so(lab: Lab):
    with lab.notebook("beside.ipynb", [MODEL, INSPECT]) as notebook:
        notebook.run(0, seconds=240)
        notebook.run(1, seconds=240)
        view = View(notebook.cell(1))
        view.row("second").wait_for()
        view.part("nni-open-beside").click()
        beside = View(notebook.page.locator(".jupyterlab-sidecar"))
        beside.row("second").click()
        expect(beside.part("nni-open-beside")).to_be_hidden()
        expect(view.part("nni-away")).to_contain_text("Two is shown beside the notebook.")

        first = notebook.ask("insp._core.view.screen.id")
        notebook.run(1, seconds=240)
        assert notebook.ask("insp._core.view.screen.id") != first
        expect(beside.part("nni-selected")).to_have_attribute("data-value", "")  # the new one
        view.part("nni-away").get_by_role("button").click()
        view.row("second").wait_for()

        tab = notebook.page.locator(".lm-TabBar-tab", has_text="Two")
        tab.locator(".lm-TabBar-tabCloseIcon").click()
        expect(beside.root).to_have_count(0)
        notebook.run(1, seconds=240)
        view.row("second").wait_for()
        assert not notebook.errors
