"""The widget in nbclassic (Notebook 6's page) with ipykernel 6, by hand (`--long`), because both
are installed for it.

The oracle is that of `test_live`.
"""

from __future__ import annotations

import pathlib

import pytest
from browser.test_live import INSPECT, MODEL
from browser.test_voila import TRAIN, installed_in, served, switched_while_it_trains
from browser.view import View
from kernels import PACKAGES
from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.long]

NEEDS = ("nbclassic<2", *PACKAGES["6.30"])
OPTIONS = ("--allow-root", "--IdentityProvider.token=")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return installed_in(tmp_path_factory.mktemp("packages"), NEEDS)


def test_a_click_acts_while_a_cell_of_nbclassic_trains(
    packages: pathlib.Path, tmp_path: pathlib.Path, browser: Browser
):
    cells = [MODEL, INSPECT, TRAIN]
    with served(tmp_path, packages, cells, "nbclassic", *OPTIONS) as url:
        page = browser.new_page(viewport={"width": 1400, "height": 1400})
        page.goto(f"{url}/nbclassic/notebooks/a.ipynb", timeout=300_000)
        page.locator("#kernel_indicator_icon.kernel_idle_icon").wait_for(timeout=300_000)
        page.evaluate("Jupyter.notebook.execute_cell_range(0, 2)")
        page.get_by_test_id("nni-root").wait_for(timeout=300_000)
        View(page.locator("body")).select("second")
        page.evaluate("Jupyter.notebook.execute_cell_range(2, 3)")
        switched_while_it_trains(page, tmp_path)
