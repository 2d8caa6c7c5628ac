"""The same widget in Notebook 7, which is built of JupyterLab's parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser.lab import Lab
from browser.notebook import Notebook
from browser.test_robustness import INSPECT, MODEL
from browser.view import View
from playwright.sync_api import Browser, expect

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Notebook]:
    with Lab(tmp_path_factory.mktemp("notebook7"), browser=browser, app="notebook") as lab:
        with lab.notebook("a.ipynb", [MODEL, INSPECT]) as notebook:
            notebook.run(0, seconds=240)
            notebook.run(1, seconds=240)
            yield notebook
            # Notebook 7.6 itself looks up settings of a plugin that it does not have
            theirs = "Cannot read properties of undefined (reading 'schema')"
            assert [e for e in notebook.errors if theirs not in e] == []
            assert notebook.foreign == []


def test_it_shows_follows_and_commands(notebook: Notebook):
    view = View(notebook.cell(1))
    view.select("first")
    mean = notebook.ask("insp.recording.summary('first').mean")
    view.wait("nni-stat-output-mean", "value === arg", mean)
    view.perturb("Zero")
    view.part("nni-effect").wait_for()
    assert notebook.ask("[h.site for h in insp.perturbations]") == ["first"]
    loop = notebook.append(
        "for x in insp.watch([batch(i) for i in range(30)], every=3):\n    step(model, x)"
    )
    notebook.run(loop, seconds=120)
    view.wait("nni-progress", "value === 30")


def test_keys_stay_in_the_view(notebook: Notebook):
    view = View(notebook.cell(1))
    view.select("second")
    cells = notebook.count()
    for key in "abmyrx":
        view.part("nni-tree").focus()
        notebook.page.keyboard.press(key)
    assert notebook.count() == cells


def test_it_takes_the_dark_theme(notebook: Notebook):
    view = View(notebook.cell(1))
    for dark in (True, False):
        notebook.theme(dark=dark)
        pattern = "nni-root nni-dark" if dark else "nni-root"
        expect(view.root).to_have_class(pattern)
