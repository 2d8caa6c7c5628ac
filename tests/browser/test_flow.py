"""The flow of the quickstart's model in a real JupyterLab: laid out, gone into, come out of."""

from __future__ import annotations

import pathlib
import shutil

import pytest
from browser.lab import Lab
from browser.notebook import Notebook
from browser.view import View
from playwright.sync_api import Locator, expect

pytestmark = pytest.mark.browser

NOTEBOOK = pathlib.Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"
MODEL, INSPECTOR = 1, 3
"""Numbers of cells of the notebook."""


def node(view: View, site: str) -> Locator:
    return view.root.locator(
        f"[data-testid='nni-flow-node'][data-role='module'][data-site='{site}']"
    )


def named(view: View) -> list[str]:
    """What a screen reader says of the nodes, top to bottom."""
    return view.root.get_by_test_id("nni-flow-node").evaluate_all(
        "nodes => nodes.sort((a, b) => a.offsetTop - b.offsetTop).map(n => n.ariaLabel)"
    )


def wait_shown(view: View, site: str, inside: str) -> None:
    expect(view.part("nni-flow")).to_have_attribute("data-value", site)
    node(view, inside).wait_for()


def test_in_by_a_double_click_and_out_by_the_breadcrumb(lab: Lab):
    shutil.copyfile(NOTEBOOK, lab.root / NOTEBOOK.name)
    with lab.notebook(NOTEBOOK.name) as notebook:
        notebook.run(MODEL, seconds=300)
        notebook.run(INSPECTOR, seconds=300)
        follow(notebook, View(notebook.cell(INSPECTOR)))
        assert notebook.errors == []
        assert notebook.foreign == []


def follow(notebook: Notebook, view: View) -> None:
    view.row("").click()
    view.tab("flow")
    wait_shown(view, "", "conv1")
    assert named(view) == [
        "input, f32[64,8,8,1], feeds conv1",
        "conv1, Conv, f32[64,8,8,24], feeds block1",
        "block1, Block, f32[64,8,8,24], feeds block2",
        "block2, Block, f32[64,4,4,24], feeds block3",
        "block3, Block, f32[64,4,4,24], feeds head",
        "head, Linear, f32[64,10], feeds output",
        "output, f32[64,10]",
    ]
    tops = [node(view, site).bounding_box() for site in ("conv1", "block1", "block2")]
    assert [box["y"] for box in tops if box] == sorted(box["y"] for box in tops if box)

    view.part("nni-flow-figure").select_option("activation norm")
    norm = "float(insp.recording.summary('block1', 'output').norm)"
    expect(node(view, "block1")).to_have_attribute("data-value", repr(notebook.ask(norm)))

    node(view, "block1").click()
    expect(view.part("nni-selected")).to_have_attribute("data-value", "block1")
    wait_shown(view, "", "conv1")
    node(view, "block1").dblclick()
    wait_shown(view, "block1", "block1/norm")
    assert [text.partition(",")[0] for text in named(view)] == [
        "input", "block1/conv", "block1/norm", "output"
    ]  # fmt: skip
    node(view, "block1/conv").press("ArrowDown")
    expect(view.part("nni-selected")).to_have_attribute("data-value", "block1/norm")

    view.root.locator("[data-testid='nni-flow-crumb'][data-site='']").click()
    wait_shown(view, "", "block2")
    expect(node(view, "block1")).to_have_attribute("aria-pressed", "true")
    assert notebook.ask("insp.selected") == "block1"
