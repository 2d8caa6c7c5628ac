"""Renews the pictures of README and guide, and takes each panel: both themes, 1400 and 600 pixels.

    python -m tests.browser.pictures [folder]

The quickstart's network after its training, with two perturbations, in a real JupyterLab. Without a
folder only those in `notebooks/images` are written. Asserts nothing: they are for looking at.
"""

from __future__ import annotations

import pathlib
import shutil
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

from browser.lab import Lab  # noqa: E402 - of the tests, which are no package
from browser.notebook import Notebook  # noqa: E402
from browser.view import View  # noqa: E402
from playwright.sync_api import FloatRect, expect  # noqa: E402

NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
IMAGES = ROOT / "notebooks" / "images"
TABS = ("overview", "values", "units", "flow", "code", "nnx", "sweep", "compare")
INSPECTOR, STEP = 3, 8
"""Numbers of cells of the notebook: what comes after the second number is not run."""
PERTURB = """
insp.perturb("block1/norm", nni.Scale(0.25)); insp.perturb("head", nni.Noise(0.5))
insp.selected = "block2/conv"; insp.effect.alone
"""
COMPARE = """
_, untrained = nni.capture(Digits(rngs=nnx.Rngs(1)))(images[:64])
insp.compare(untrained, name="untrained").shape
"""


def run_quickstart(notebook: Notebook) -> View:
    """The view, with all that it can show."""
    notebook.evaluate("app.shell.collapseLeft()")
    for index in range(STEP + 1):
        notebook.run(index, seconds=240)
    notebook.run(notebook.append(PERTURB), seconds=240)
    view = View(notebook.cell(INSPECTOR))
    view.wait_selected("block2/conv")
    view.open("nni-effect-more")
    expect(view.root.get_by_test_id("nni-alone")).to_have_count(2)
    view.part("nni-effect-more").click()
    view.part("nni-kl").wait_for()
    view.tab("sweep")
    view.part("nni-study-start").click()
    expect(view.part("nni-sweep")).to_have_attribute("data-state", "done", timeout=120_000)
    return view


def show(view: View, tab: str) -> None:
    """One panel, with what it asks the kernel for."""
    if tab != "compare" and view.value("nni-pinned"):
        view.part("nni-pin").click()
    elif tab == "compare" and not view.value("nni-pinned"):
        view.tab("compare")
        view.part("nni-compare-other").click()
    view.tab(tab)
    if tab in ("flow", "nnx"):
        view.row("block2").click()
    else:
        view.row("block2/conv").click()
    waits = {"values": "nni-picture", "units": "nni-strip", "flow": "nni-flow-node"}
    waits |= {"code": "nni-excerpt", "nnx": "nni-nnx-mode", "sweep": "nni-sweep-row"}
    waits |= {"overview": "nni-figures", "compare": "nni-compare-row"}
    view.root.get_by_test_id(waits[tab]).first.wait_for()
    view.root.page.mouse.move(0, 0)  # away from the rows, whose figures the foot shows
    expect(view.root.get_by_test_id("nni-tip")).to_have_count(0)
    expect(view.root.locator("[aria-busy=true]")).to_have_count(0)


def detail_box(view: View) -> FloatRect:
    """Where the detail is, without the room below its panel."""
    view.root.scroll_into_view_if_needed()
    box = view.part("nni-detail").bounding_box()
    panel = view.root.get_by_role("tabpanel").bounding_box()
    assert box is not None
    assert panel is not None
    height = min(box["height"], panel["y"] + panel["height"] - box["y"] + 12)
    return {"x": box["x"], "y": box["y"], "width": box["width"], "height": height}


def main() -> None:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as root:
        shutil.copyfile(NOTEBOOK, pathlib.Path(root) / NOTEBOOK.name)
        with Lab(pathlib.Path(root)) as lab, lab.notebook(NOTEBOOK.name, width=1400) as notebook:
            view = run_quickstart(notebook)
            notebook.page.set_viewport_size({"width": 1400, "height": 1120})
            show(view, "overview")
            view.root.screenshot(path=IMAGES / "widget.png")
            notebook.run(notebook.append(COMPARE), seconds=240)
            view.part("nni-compare-row").wait_for()
            for tab in TABS[1:]:
                show(view, tab)
                notebook.page.screenshot(path=IMAGES / f"{tab}.png", clip=detail_box(view))
            for width in (1400, 600) if folder else ():
                notebook.page.set_viewport_size({"width": width, "height": 1120})
                for dark in (False, True):
                    notebook.theme(dark=dark)
                    for tab in TABS:
                        show(view, tab)
                        name = f"{width}-{'dark' if dark else 'light'}-{tab}.png"
                        view.root.screenshot(path=folder / name)


if __name__ == "__main__":
    main()
