"""Clicks in a running cell with ipykernel 6, which has no subshells and no thread that reads them.

The oracle is that of `test_live`, and so are the loops.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from browser.lab import Lab, Sheet
from browser.test_live import (
    IN_A_CELL,
    assert_perturbed_as_toggled,
    opened,
    some_steps,
    toggle,
    training,
)
from kernels import installed
from playwright.sync_api import Browser, expect

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def sheet(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Sheet]:
    """A JupyterLab whose kernels are of ipykernel 6."""
    paths = installed("6.30", tmp_path_factory.mktemp("packages"))
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    with Lab(tmp_path_factory.mktemp("live"), browser=browser, env=env) as lab:
        with lab.notebook("six.ipynb", [""]) as notebook:
            yield Sheet(lab, notebook)


WITHOUT_A_LOOP = """
end = time.monotonic() + 240
while not pathlib.Path("stop").exists() and time.monotonic() < end:
    time.sleep(0.01)
"""


def test_with_ipykernel_6_a_cell_that_trains_is_switched_at_its_steps(sheet: Sheet):
    with opened(sheet) as (notebook, view):
        assert notebook.ask("__import__('ipykernel').__version__").startswith("6.")
        view.open("nni-menu")
        expect(view.part("nni-listening")).to_have_attribute("data-value", "steps")
        with training(sheet, notebook, view, IN_A_CELL) as cell:
            view.perturb("Zero")
            expect(view.part("nni-training-perturbed")).to_be_visible()
            some_steps(view)
            toggle(view, 3)
            view.select("first")
            expect(view.root.locator(".nni-card canvas").first).to_be_visible()
            assert not notebook.finished(cell)
        assert_perturbed_as_toggled(notebook, 4)


def test_with_ipykernel_6_a_click_in_another_cell_says_that_it_waits(sheet: Sheet):
    stop = sheet.root / "stop"
    with opened(sheet) as (notebook, view):
        view.perturb("Zero")
        view.part("nni-output-change").wait_for()
        stop.unlink(missing_ok=True)
        cell = notebook.append(WITHOUT_A_LOOP)
        notebook.start(cell)
        try:
            view.part("nni-switch").click()
            expect(view.part("nni-waits")).to_have_text("acts when the cell ends")
            expect(view.root).not_to_contain_text("Nothing is perturbed")
        finally:
            stop.touch()
            notebook.finish(cell)
        expect(view.root.get_by_test_id("nni-waits")).to_have_count(0)
        assert notebook.ask("[one.enabled for one in insp.perturbations]") == [False]
