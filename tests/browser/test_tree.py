"""The tree and the time strip in a real JupyterLab: a stack opened to its layers, one of them
switched off by a key, older passes, a pinned one, and following again.

The oracle is the recording in the kernel, asked for the same pass and the same layer.
"""

from __future__ import annotations

import json

import pytest
from browser.lab import Sheet
from browser.view import View
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

MODEL = """
import jax, jax.numpy as jnp
from flax import nnx
import nnx_inspector as nni

class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))

class Deep(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(Block, in_axes=0, out_axes=0)
        self.blocks = nnx.split_rngs(splits=4)(make)(rngs)

    def __call__(self, x):
        scan = nnx.scan(lambda x, b: b(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(x, self.blocks)

x = jax.random.normal(jax.random.key(0), (8, 4))
insp = nni.Inspector(Deep(nnx.Rngs(0)), x)
insp.recording  # the first pass
look = nnx.jit(lambda model, x: nni.capture(model)(x)[1])
for i in range(1, 6):
    insp.push(look(insp.model, i * x), step=10 * i)
"""


def at_step(step: int, site: str, figure: str) -> str:
    return (
        f"next(p for p in insp.recording.passes if p.step == {step})"
        f".summary({json.dumps(site)}).{figure}"
    )


def test_a_stack_opens_a_layer_is_switched_and_time_goes_back(sheet: Sheet) -> None:
    with sheet([MODEL]) as notebook:
        notebook.run(0, seconds=240)
        view = View(notebook.cell(0))
        page = notebook.page

        # by keys alone: close the stack, open it, go to its second layer, whose numbers are told
        tree = view.part("nni-tree")
        tree.focus()
        for key in ("Home", "ArrowDown", "ArrowLeft"):
            page.keyboard.press(key)
        expect(view.row("blocks")).to_have_attribute("aria-expanded", "false")
        page.keyboard.press("ArrowRight")
        assert view.rows() == ["", "blocks", "blocks/linear", *(f"blocks[{i}]" for i in range(4))]
        for _ in range(3):
            page.keyboard.press("ArrowDown")
        view.wait_selected("blocks[1]")
        view.row("blocks[2]").hover()
        expect(view.part("nni-tip")).to_have_attribute("data-site", "blocks[2]")
        view.wait(
            "nni-stat-output-norm", "value === arg", notebook.ask(at_step(50, "blocks[1]", "norm"))
        )

        # back in time, as far as the first pass that was pushed, and compared with the third
        view.part("nni-step-back").click()
        view.part("nni-step-back").click()
        view.wait("nni-step", "value === 30")
        view.part("nni-pin").click()
        expect(view.part("nni-pinned")).to_have_attribute("data-value", "30")
        view.part("nni-scrub").fill("1")
        view.wait("nni-step", "value === 10")
        now, pinned = (notebook.ask(at_step(step, "blocks[1]", "std")) for step in (10, 30))
        view.wait("nni-stat-output-std", "value === arg", now)
        view.wait("nni-stat-pinned-output-std", "value === arg", pinned)
        view.part("nni-behind-output").wait_for(state="attached")
        view.open("nni-tree-menu")
        view.part("nni-column-std").check()
        page.keyboard.press("Escape")
        ratio = float(
            view.row("blocks[1]").get_by_test_id("nni-cell-std").get_attribute("data-value")
            or "nan"
        )
        assert ratio == pytest.approx(now / pinned, rel=1e-12)

        # another layer of the held pass has the held pass's histogram
        view.select("blocks[2]")
        size = notebook.ask(at_step(10, "blocks[2]", "size"))
        view.wait(
            "nni-stat-output-std", "value === arg", notebook.ask(at_step(10, "blocks[2]", "std"))
        )
        assert view.number("nni-hist-count-output") == size

        # a list by a figure, and back to the tree
        view.part("nni-sort-std").click()
        ratios = view.root.get_by_test_id("nni-cell-std").evaluate_all(
            "cells => cells.map(c => Number(c.dataset.value))"
        )
        assert len(ratios) == 3 + 2 * 4
        head = view.root.locator(".nni-columns").get_by_role("columnheader", name="std")
        expect(head).to_have_attribute("aria-sort", "descending")
        view.part("nni-clear").click()
        view.part("nni-pin").click()

        # followed again, a layer is switched off by a key, and only that one
        view.pause()
        view.wait("nni-step", "value === 50")
        tree.focus()
        page.keyboard.press("Space")
        view.row("blocks[2]").get_by_test_id("nni-badge-perturbed").wait_for()
        view.wait("nni-stat-output-norm", "value === 0")
        assert notebook.ask("[h.site for h in insp.perturbations]") == ["blocks[2]"]
        norms = notebook.ask("[insp.recording.summary(f'blocks[{i}]').norm for i in range(4)]")
        assert [norm == 0 for norm in norms[:3]] == [False, False, True]

        # what happens within a block's own call, as rows below it
        view.select("blocks")
        view.open("nni-site-menu")
        view.part("nni-operations").click()
        for site in ("blocks@tanh", "blocks@add"):
            expect(view.row(site)).to_be_visible()
        view.open("nni-site-menu")
        expect(view.part("nni-operations")).to_have_text("Hide operations")
        view.part("nni-operations").click()
        expect(view.row("blocks@tanh")).to_have_count(0)

        # the findings of a pass with NaN lie within the view, whatever its width; JupyterLab lays
        # out after the window has changed, so both places are read at one moment until they fit
        notebook.run(notebook.append("insp.push(look(insp.model, jnp.nan * x), step=60)"))
        for width in (620, 700, 1000, 1400):
            page.set_viewport_size({"width": width, "height": 1000})
            view.part("nni-findings").click()
            listed = view.root.get_by_role("list", name="Findings, worst first")
            page.wait_for_function(
                """list => {
                  const view = list.closest(".nni-view");
                  const [box, around] = [list, view].map(e => e.getBoundingClientRect());
                  return around.x <= box.x && box.right <= around.right
                    && view.scrollWidth === view.clientWidth }""",
                arg=listed.element_handle(),
            )
            view.part("nni-findings").click()
            expect(listed).to_have_count(0)
