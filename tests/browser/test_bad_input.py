"""The screen with names, sizes and models that nobody would choose, and as its viewers may set it.

One JupyterLab for all: its views are given the size of a docked one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser.axe import violations
from browser.lab import Lab
from browser.notebook import Notebook
from browser.test_screen import look
from browser.view import View
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

MODELS = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
import nnx_inspector as nni

LONG, RTL = "n" * 10_000, "\\u05e9\\u05dc\\u05d5\\u05dd\\u202e"
MARKUP = "<img src=x onerror=alert(1)>"

class Odd(nnx.Module):
    def __init__(self, rngs):
        layers = {name: nnx.Linear(4, 4, rngs=rngs) for name in (LONG, RTL, MARKUP)}
        self.layers = nnx.Dict(layers)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers.values():
            x = nnx.relu(layer(x))
        return self.head(x)

class Many(nnx.Module):
    def __init__(self):
        for i in range(300):
            setattr(self, f"w{i}", nnx.Param(jnp.full((2,), 1.0 + i)))

    def __call__(self, x):
        return x * self.w0[...] + self.w299[...]
"""
ODD = """
insp = nni.Inspector(Odd(nnx.Rngs(0)), jnp.ones((5, 4)))
insp.perturb("layers/" + LONG, nni.Zero()); insp.run(jnp.ones((5, 4)))
insp.selected = "layers/" + LONG
"""
MANY = "alone = nni.Inspector(Many(), jnp.ones((5, 2)))"

SIZE = """
(root, [width, height]) => {
  root.style.width = `${width}px`;
  root.querySelector('.nni-view').style.height = `${height}px`;
  return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
}
"""


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Notebook]:
    with lab.notebook("bad.ipynb", [MODELS, ODD, MANY], width=1500) as notebook:
        notebook.evaluate("app.shell.collapseLeft()")
        for index in range(3):
            notebook.run(index, seconds=240)
        yield notebook
        assert notebook.errors == []
        assert notebook.foreign == []


def test_odd_names_stay_in_their_places_and_are_no_markup(notebook: Notebook):
    view = View(notebook.cell(1))
    view.part("nni-effect").wait_for()
    for width in (300, 420, 1000):
        view.root.evaluate(SIZE, [width, 850])
        for panel in view.every_panel():
            found = look(view)
            where = f"{panel}, {width} px"
            assert found["wide"] == [], where
            # ◆ Perturb does what the button in a row does
            small = [one for one in found["small"] if "nni-add-here" not in one]
            assert small == [], where
            assert found["rows"] >= (3 if width == 300 else 5), where
    assert notebook.page.locator("img[src=x]").count() == 0


def test_a_model_without_modules_and_with_300_parameters(notebook: Notebook):
    view = View(notebook.cell(2))
    view.root.evaluate(SIZE, [420, 850])
    assert view.rows() == [""]
    view.select("")
    view.tab("overview")
    expect(view.root.get_by_test_id("nni-parameter")).not_to_have_count(0)
    for panel in view.every_panel():
        assert look(view)["wide"] == [], panel


def test_colours_of_the_system_leave_everything_to_be_seen(notebook: Notebook):
    """Forced colours, and a page at 200 %: what is on stays different from what is off."""
    view = View(notebook.cell(1))
    view.root.evaluate(SIZE, [420, 850])
    notebook.page.emulate_media(forced_colors="active")
    for panel in view.every_panel():
        assert violations(notebook.page, view.root) == [], panel
    view.tab("overview")
    drawn = """
        root => {
          const look = getComputedStyle(root.querySelector('.nni-switch'));
          return [look.color, look.backgroundColor, look.borderColor].join(' ');
        }
    """
    on = view.root.evaluate(drawn)
    view.part("nni-switch").click()
    expect(view.part("nni-switch")).to_have_attribute("aria-checked", "false")
    assert view.root.evaluate(drawn) != on
    view.part("nni-switch").click()
    notebook.page.emulate_media(forced_colors="none")
    notebook.page.evaluate("document.body.style.zoom = '2'")
    for panel in view.every_panel():
        assert look(view)["wide"] == [], panel
    notebook.page.evaluate("document.body.style.zoom = '1'")
