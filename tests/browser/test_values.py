"""The panel "Values" in a real JupyterLab, by keyboard alone, shows Python's values."""

from __future__ import annotations

import pytest
from browser.lab import Sheet
from browser.view import View
from playwright.sync_api import Locator, expect

pytestmark = pytest.mark.browser

MODEL = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
import nnx_inspector as nni

class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 6, (3, 3), rngs=rngs)
        self.wide = nnx.Linear(6, 3000, rngs=rngs)

    def __call__(self, x):
        return self.wide(nnx.relu(self.conv(x)))

model = Net(nnx.Rngs(0))
x = jax.random.normal(jax.random.key(1), (4, 20, 16, 1))
insp = nni.Inspector(model, x)
insp.selected = "conv"

def change(off):
    made = model.conv(x)
    clean, left = (model.wide(nnx.relu(y)) for y in (made, made.at[off].set(0)))
    return float(jnp.linalg.norm(left - clean) / jnp.linalg.norm(clean))
"""


def at(view: View) -> dict[str, int]:
    """The element under the crosshair, by the names of the axes."""
    text = view.part("nni-value-exact").get_attribute("data-place") or ""
    words = [part.rsplit(" ", 1) for part in text.split(", ") if part]
    return {name: int(number) for name, number in words}


def pixels(picture: Locator) -> str:
    """What the canvas shows."""
    return picture.locator("canvas").evaluate("canvas => canvas.toDataURL()")


def test_a_convolution_by_the_keyboard(sheet: Sheet):
    with sheet([MODEL]) as notebook:
        notebook.run(0, seconds=120)
        view = View(notebook.cell(0))
        view.wait_selected("conv")
        tab = view.part("nni-tab-overview")
        tab.focus()
        notebook.page.keyboard.press("ArrowRight")
        expect(view.part("nni-values-view")).to_have_attribute("data-value", "images")
        expect(view.part("nni-values-left-out")).to_contain_text("1.92 k of 7.68 k values")
        picture = view.part("nni-picture")
        picture.focus()
        for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "PageDown", "PageDown"):
            notebook.page.keyboard.press(key)
        exact = view.part("nni-value-exact")
        expect(exact).to_have_attribute("data-place", "batch 0, height 1, width 2, channel 2")
        shown = view.number("nni-value-exact")
        assert shown == notebook.ask("float(insp.values('conv')[0, 1, 2, 2])")

        # another picture of the batch, by its slider: the same place, another value
        view.open("nni-more")
        view.part("nni-values-index-batch").fill("3")
        expect(exact).to_have_attribute("data-place", "batch 3, height 1, width 2, channel 2")
        wanted = notebook.ask("float(insp.values('conv')[3, 1, 2, 2])")
        view.wait("nni-value-exact", "value === arg", wanted)

        # another by a look at the batch: all panels follow, and the map lies over the picture
        expect(view.part("nni-examples")).to_have_attribute("data-value", "3")
        view.part("nni-example-2").click()
        view.open("nni-more")
        expect(view.part("nni-values-index-batch")).to_have_value("2")
        notebook.page.keyboard.press("Escape")
        wanted = notebook.ask("float(insp.values('conv')[2, 1, 2, 2])")
        view.wait("nni-value-exact", "value === arg", wanted)
        view.part("nni-values-thumbnail").wait_for()
        over = view.root.locator(".nni-large-map figure").last
        before = pixels(over)
        view.part("nni-values-share").fill("0.5")
        expect(view.part("nni-values-share")).to_have_value("0.5")
        assert pixels(over) != before

        # an array of which only blocks are shown: the value under the crosshair is exact
        view.row("wide").click()
        expect(view.part("nni-values-left-out")).to_contain_text("3.84 M values")
        view.part("nni-values-view").select_option("heatmap")
        expect(view.part("nni-values-left-out")).to_contain_text("the mean of")
        picture.focus()
        for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
            notebook.page.keyboard.press(key)
        expect(view.part("nni-value-block")).to_contain_text("block of")
        expect(exact).not_to_have_attribute("data-value", "")
        place = at(view)
        wanted = notebook.ask(f"float(insp.values('wide')[{', '.join(map(str, place.values()))}])")
        assert len(place) == 4
        view.wait("nni-value-exact", "value === arg", wanted)

        # a perturbation, from Python: the screen shows the perturbed values
        notebook.ask("insp.perturb('wide', nni.Scale(0.5)).id")
        view.wait("nni-value-exact", "value === arg", wanted / 2)
        view.open("nni-more")
        expect(view.part("nni-values-clean")).to_have_attribute("data-value", "perturbed")
        view.part("nni-values-clean").get_by_role("button", name="clean").click()
        view.wait("nni-value-exact", "value === arg", wanted)
        said = view.value("nni-values-expression")
        assert said == 'insp.values("wide", clean=True)[2]'
        assert notebook.ask(f"list({said}.shape)") == [20, 16, 3000]

        # a rectangle drawn on the picture, then one channel clicked: the change of the output is
        # that of plain flax
        view.part("nni-remove").click()
        view.row("conv").click()
        view.part("nni-values-view").select_option("images")
        view.open("nni-more")
        view.part("nni-edit-mask").click()
        notebook.page.keyboard.press("Escape")
        box = picture.locator("canvas").bounding_box()
        assert box is not None
        corners = []
        for press, share in ((notebook.page.mouse.down, 0.02), (notebook.page.mouse.up, 0.1)):
            notebook.page.mouse.move(box["x"] + share * box["width"], box["y"] + 2 * share * 260)
            place = at(view)
            corners.append((place["height"], place["width"]))
            press()
        (top, left), (bottom, right) = corners
        assert top < bottom
        assert left < right
        drawn = f"np.s_[:, {top}:{bottom + 1}, {left}:{right + 1}]"
        close = "Math.abs(value - arg) <= 1e-4 * arg"
        view.wait("nni-output-change", close, notebook.ask(f"change({drawn})"))
        view.tab("units")
        view.part("nni-remove").click()
        view.switch_unit(4)
        view.wait("nni-output-change", close, notebook.ask("change(np.s_[..., 4])"))
