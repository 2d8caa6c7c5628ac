"""The screen with names, sizes and models that nobody would choose, and as its viewers may set it.

Its views are given the size of a docked one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from browser.axe import violations
from browser.lab import Sheet
from browser.notebook import Notebook
from browser.test_screen import measure_layout
from browser.view import MENUS, SIZE, View
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
        for i in range(3_000):
            setattr(self, f"w{i}", nnx.Param(jnp.full((2,), 1.0 + i)))

    def __call__(self, x):
        return x * self.w0[...] + self.w2999[...]

class Three(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.arange(1.0, 4.0))

    def __call__(self, x):
        return x * self.w[...]
"""
ODD = """
insp = nni.Inspector(Odd(nnx.Rngs(0)), jnp.ones((5, 4)))
insp.perturb("layers/" + LONG, nni.Zero()); insp.run(jnp.ones((5, 4)))
insp.selected = "layers/" + LONG
"""
MANY = """
from nnx_inspector.records.record import Parameter, Record

def loss(model, x):
    return (model(x) ** 2).mean()

(_, measured), _ = nni.value_and_grad(loss, parameters=True)(Three(), jnp.ones((5, 3)))
w = measured.parameters["w"]
held = {f"w{i}": Parameter(w.value, None if i == 1 else w.gradient) for i in range(3_000)}
alone = nni.Inspector(Many(), jnp.ones((5, 2)))
alone.push(Record(measured._calls, {}, held, eager="made by hand"))
"""
OWN = """
model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

@nnx.jit
def descend(model, x):
    grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * jnp.sign(g), params, grads))

x = jnp.linspace(-1, 2, 20).reshape(5, 4)
own = nni.Inspector(model, x)
for _ in own.watch(range(3), every=1):
    before = np.float64(model.kernel[...]), np.float64(model.bias[...])
    descend(model, x)
after = np.float64(model.kernel[...]), np.float64(model.bias[...])
ratios = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(after, before)]
own.perturb("", nni.Scale(0.5)); own.perturb("", nni.Noise(0.5))
own.metrics(loss=1.0); own.metrics(loss=0.5)
"""


CONTROL = re.compile(
    r"^\s*- '?(button|checkbox|combobox|textbox|searchbox|slider|spinbutton|switch|tab|separator"
    r"|treegrid|img|link|progressbar)\b(?: \"((?:[^\"\\]|\\.)*)\")?"
)
"""A line of Playwright's picture of what a screen reader is given: the role, and the name."""


def unnamed_controls(view: View) -> list[str]:
    """The controls and pictures without a name that can be read out."""
    lines = view.root.aria_snapshot().splitlines()
    found = [(line, CONTROL.match(line)) for line in lines]
    controls = [(line, one[2] or "") for line, one in found if one]
    assert len(controls) > 20
    return [line for line, name in controls if not re.search(r"\w", name)]


@pytest.fixture(scope="module")
def notebook(sheet: Sheet) -> Iterator[Notebook]:
    with sheet([MODELS, ODD, MANY, OWN], width=1500) as notebook:
        notebook.evaluate("app.shell.collapseLeft()")
        for index in range(4):
            notebook.run(index, seconds=240)
        yield notebook


def test_odd_names_stay_in_their_places_and_are_no_markup(notebook: Notebook):
    view = View(notebook.cell(1))
    view.part("nni-effect").wait_for()
    for width in (300, 420, 1000):
        view.root.evaluate(SIZE, [width, 850])
        for panel in view.every_panel():
            found = measure_layout(view)
            where = f"{panel}, {width} px"
            assert found["wide"] == [], where
            # ◆ Perturb does what the button in a row does
            small = [one for one in found["small"] if "nni-add-here" not in one]
            assert small == [], where
            assert found["rows"] >= (3 if width == 300 else 5), where
    assert notebook.page.locator("img[src=x]").count() == 0


def test_a_model_without_modules_and_with_3000_parameters(notebook: Notebook):
    """One of them has no gradient."""
    view = View(notebook.cell(2))
    view.root.evaluate(SIZE, [420, 850])
    assert view.rows() == [""]
    view.select("")
    view.tab("overview")
    expect(view.root.get_by_test_id("nni-parameter")).to_have_count(16)
    expect(view.root.locator(".nni-notes")).to_contain_text(
        "2\u202f984 more parameters of this module are left out."
    )
    view.part("nni-hist-weight-gradient").wait_for()
    view.part("nni-parameter-choice").select_option("w1")
    expect(view.root.get_by_test_id("nni-hist-weight-gradient")).to_have_count(0)
    view.part("nni-hist-weight").wait_for()
    for panel in view.every_panel():
        assert measure_layout(view)["wide"] == [], panel


def test_an_optimizer_of_ones_own(notebook: Notebook):
    """The screen shows how far it moved the parameters, and gives every control a name."""
    view = View(notebook.cell(3))
    for width in (420, 1000):
        view.root.evaluate(SIZE, [width, 850])
        view.tab("overview")
        shown = view.root.locator(".nni-ratio .nni-key span").all_inner_texts()
        told = dict(one.split() for one in shown)
        ratios = dict(zip(("kernel", "bias"), notebook.ask("ratios"), strict=True))
        assert told.keys() == ratios.keys()
        for name, ratio in ratios.items():
            assert float(told[name]) == pytest.approx(ratio, rel=5e-3)
        for panel in view.every_panel():
            assert unnamed_controls(view) == [], panel
        for menu in MENUS:
            view.open(menu)
            assert unnamed_controls(view) == [], menu
            notebook.page.keyboard.press("Escape")


@pytest.mark.parametrize("family", ["monospace", "serif"])
def test_another_font_of_the_host(notebook: Notebook, family: str):
    view = View(notebook.cell(1))
    root, names = "document.documentElement.style", ("ui", "code", "content")
    try:
        for name in names:
            notebook.page.evaluate(f"{root}.setProperty('--jp-{name}-font-family', '{family}')")
        font = "root => getComputedStyle(root.querySelector('.nni-row')).fontFamily"
        assert view.root.evaluate(font) == family
        for width in (420, 1000):
            view.root.evaluate(SIZE, [width, 850])
            for panel in view.every_panel():
                found = measure_layout(view)
                where = f"{panel}, {width} px"
                assert (found["wide"], found["cut"]) == ([], []), where
    finally:
        for name in names:
            notebook.page.evaluate(f"{root}.removeProperty('--jp-{name}-font-family')")


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
        assert measure_layout(view)["wide"] == [], panel
    notebook.page.evaluate("document.body.style.zoom = '1'")
