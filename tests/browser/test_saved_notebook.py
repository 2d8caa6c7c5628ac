"""A saved notebook without a kernel: the screen where it is trusted, elsewhere plain HTML."""

from __future__ import annotations

import json
import pathlib

import nbformat
import pytest
from browser.lab import Lab, Server, source_path
from browser.notebook import Notebook
from browser.view import View
from playwright.sync_api import Browser, Locator, expect

from nnx_inspector.screen.export.last_state import MOST_BYTES
from nnx_inspector.screen.export.snapshot import MOST_BYTES as MOST_PLAIN

pytestmark = pytest.mark.browser

MODEL = """
import jax, jax.numpy as jnp
from flax import nnx
import nnx_inspector as nni

class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)
        setattr(self, EVIL, nnx.Linear(2, 2, rngs=rngs))
    def __call__(self, x):
        return getattr(self, EVIL)(self.second(nnx.relu(self.first(x))))

EVIL = "</script><img src=x onerror='window.hacked=1'>"
model = Net(nnx.Rngs(0))
x = jax.random.normal(jax.random.key(1), (16, 3))
"""
INSPECT = "insp = nni.Inspector(model, x)\nassert len(insp.recording) == 1"
TRAIN = """
@nnx.jit
def train_step(model, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1.0) ** 2))(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
    return loss

for step in insp.watch(range(12), every=1):
    insp.metrics(loss=train_step(model, x))
"""
STEP = "insp.step(lambda m, x: jnp.mean(m(x) ** 2), x * 2)"
THREE = "several = [nni.Inspector(model, x) for _ in range(3)]"
MOST_METADATA = 200_000
SETTINGS = {"@jupyter-widgets/jupyterlab-manager/plugin": {"saveState": True}}
"""JupyterLab saves the state of widgets in notebooks."""


def outputs(node: nbformat.NotebookNode, index: int) -> list[str]:
    """The HTML among a cell's outputs."""
    found = node.cells[index].outputs
    return [o.data["text/html"] for o in found if "text/html" in o.get("data", {})]


def without_kernel(root: pathlib.Path, name: str, copy: str) -> None:
    """A copy whose kernel is not there: JupyterLab asks for another, and is told to take none."""
    node = nbformat.read(root / name, as_version=4)
    node.metadata["kernelspec"] = {"name": "gone", "display_name": "Gone", "language": "gone"}
    node.metadata["language_info"] = {"name": "gone"}  # it takes another of the same language
    nbformat.write(node, root / copy)


def wait_saved(notebook: Notebook, index: int, text: str) -> None:
    """Wait until a cell's output holds the screen and, in plain HTML, a text."""
    notebook.wait(
        "notebook.widgets[arg[0]].model.outputs.toJSON().some(one => {"
        "  const html = String(one.data?.['text/html'] ?? '');"
        "  return html.includes('nni-saved-recording') && html.includes(arg[1]) })",
        [index, text],
    )


def trust(notebook: Notebook) -> None:
    """Trust the notebook, as the command does."""
    notebook.evaluate(
        "app.shell.activateById(panel.id); void app.commands.execute('notebook:trust')"
    )
    notebook.page.locator(".jp-Dialog").get_by_role("button", name="Trust").click()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def means(root: pathlib.Path, server: Server, browser: Browser) -> dict[str, str]:
    """Saves a notebook with a training in it, and one that was loaded anew; its kernel ends.

    Returns:
        What the kernel said of the first: the mean of "second" in the newest pass, and before.
    """
    with Lab(root, server, browser=browser, settings=SETTINGS) as lab:
        with lab.notebook("one.ipynb", [MODEL, INSPECT, TRAIN, STEP]) as notebook:
            for index in range(3):
                notebook.run(index, seconds=240)
            view = View(notebook.cell(1))
            view.wait("nni-stat-output-size", "value > 0")
            expect(plain(notebook.cell(1))).to_have_count(1)
            expect(plain(notebook.cell(1))).to_be_hidden()  # while there is a live view of it
            view.select("second")
            view.perturb("Scale", 0.25)
            view.part("nni-effect").wait_for()
            of = "insp.recording.summary('second', index={}).mean"
            means = {at: notebook.ask(f"repr({of.format(at)})") for at in ("-1", "5")}
            wait_saved(notebook, 1, "nni.Scale(factor=0.25)")
            notebook.evaluate("await panel.context.save()")
            assert notebook.errors == []
            metadata = nbformat.read(root / "one.ipynb", as_version=4).metadata
            assert "widgets" in metadata

            # loaded anew: the page knows nothing of that output, and the next cell gets another
            notebook.save_and_reload()
            View(notebook.cell(1)).wait("nni-stat-output-size", "value > 0")
            notebook.run(3, seconds=240)
            wait_saved(notebook, 3, "Selected: <b>second</b>")
            expect(plain(notebook.cell(3))).to_be_hidden()
            View(notebook.cell(1)).select("first")
            wait_saved(notebook, 3, "Selected: <b>first</b>")
            three = notebook.append(THREE)
            notebook.run(three, seconds=240)
            View(notebook.cell(three)).wait("nni-stat-output-size", "value > 0")
            expect(notebook.cell(three).get_by_test_id("nni-root")).to_have_count(3)
            notebook.evaluate("await panel.context.save()")
            assert notebook.errors == []
            nbformat.write(nbformat.read(root / "one.ipynb", as_version=4), root / "many.ipynb")
    without_kernel(root, "one.ipynb", "copy.ipynb")
    return means


def plain(cell: Locator) -> Locator:
    return cell.locator(".nni-snapshot")


def test_it_stays_small(root: pathlib.Path, means: dict[str, str]):
    node = nbformat.read(root / "many.ipynb", as_version=4)
    states = node.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    assert len([one for one in states.values() if one["model_name"] == "AnyModel"]) == 8
    assert len(json.dumps(node.metadata)) < MOST_METADATA / 10
    for index in (1, 3):
        (html,) = outputs(node, index)
        assert len(html.encode()) <= MOST_BYTES
        assert len(html[: html.index("<script")].encode()) <= MOST_PLAIN


def test_it_shows_the_screen_without_a_kernel(
    root: pathlib.Path, server: Server, browser: Browser, means: dict[str, str]
):
    lab = Lab(root, server, browser=browser)
    with lab, lab.notebook("copy.ipynb", kernel=False) as notebook:
        cell = notebook.cell(1)
        frame = cell.get_by_test_id("nni-saved-frame")

        # not trusted yet: plain HTML, and nothing of it runs
        expect(plain(cell)).to_be_visible()
        expect(plain(cell)).to_contain_text("nni.Scale(factor=0.25)")
        expect(plain(cell).locator("table").first.locator("tr")).to_have_count(5)
        expect(plain(cell).locator("table").last).to_contain_text(f"{float(means['-1']):.4g}")
        expect(frame).to_have_count(0)
        trust(notebook)
        expect(plain(cell)).to_be_hidden()
        assert "allow-same-origin" not in (frame.get_attribute("sandbox") or "")
        expect(cell.get_by_text("Loading widget")).to_be_hidden()

        view = View(cell.frame_locator("[data-testid='nni-saved-frame']").locator("body"))
        view.wait_selected("second")
        expect(view.part("nni-banner")).to_contain_text("Saved 20")
        expect(view.part("nni-perturbation")).to_have_attribute("data-site", "second")
        expect(view.part("nni-switch")).to_be_disabled()
        assert view.figures()["output"]["mean"] == means["-1"]

        # time: an older pass
        view.part("nni-scrub").fill("5")
        expect(view.part("nni-step")).to_have_attribute("data-value", "4")
        assert view.figures()["output"]["mean"] == means["5"]
        view.pause()
        view.row("first").click()
        view.wait_selected("first")
        # what costs a pass to know is not offered
        for absent in ("nni-group-Units", "nni-tab-values", "nni-perturb"):
            expect(view.root.get_by_test_id(absent)).to_have_count(0)
        view.row("").click()
        view.tab("flow")
        node = "[data-testid='nni-flow-node'][data-role='module']"
        expect(view.root.locator(node)).to_have_count(3)
        view.tab("code")
        expect(view.root).to_contain_text("insp = nni.Inspector(model, x)")
        expect(view.root.get_by_test_id("nni-notice")).to_have_count(0)

        expect(view.root).to_have_class("nni-root")
        # one switch: JupyterLab's splash fails (in its own code) on a second one soon after
        notebook.theme(dark=True)
        expect(view.root).to_have_class("nni-root nni-dark")
        # the kernel's later state, in the cell that was run after the page was loaded anew
        later = notebook.cell(3)
        later.scroll_into_view_if_needed()  # what is out of sight is left alone
        expect(later.get_by_test_id("nni-saved-frame")).to_have_count(1)
        expect(plain(later)).to_be_hidden()
        for page in notebook.page.frames:
            assert page.evaluate("window.hacked ?? null") is None
        assert [one for one in notebook.errors if "widget" not in one] == []
        assert notebook.foreign == []


@pytest.mark.parametrize("without", ["anywidget", "@jupyter-widgets/jupyterlab-manager"])
def test_a_kernel_whose_page_lacks_the_script_says_how_to_get_it(
    without: str, tmp_path: pathlib.Path, browser: Browser
):
    folder = tmp_path / "settings" / "labconfig"
    folder.mkdir(parents=True)
    (folder / "page_config.json").write_text(f'{{"disabledExtensions": {{"{without}": true}}}}')
    env = {**source_path(), "JUPYTER_CONFIG_PATH": str(folder.parent)}
    lab = Lab(tmp_path, browser=browser, env=env)
    with lab, lab.notebook("a.ipynb", [MODEL, INSPECT, TRAIN]) as shown:
        for index in range(3):
            shown.run(index, seconds=240)
        cell = shown.cell(1)
        if without == "anywidget":
            said = cell.get_by_test_id("nni-not-loaded")
        else:
            said = cell.locator("pre", has_text="Inspector(Net, ")
        expect(said).to_contain_text("pip install anywidget")
        expect(cell.get_by_test_id("nni-saved-frame")).to_have_count(1)
