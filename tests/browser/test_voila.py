"""The widget in Voila with ipykernel 6, by hand (`--long`), because both are installed for it.

The oracle is that of `test_live`.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import nbformat
import pytest
from browser.lab import source_path
from browser.test_live import INSPECT, MODEL
from browser.view import View
from kernels import PACKAGES
from playwright.sync_api import Browser, Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.long]

TOGGLED = """
perturbed = [abs(loss - zeroed) < 1e-5 * zeroed for loss in losses]
print('switched', sum(a != b for a, b in zip(perturbed, perturbed[1:])), 'times')
"""
TRAIN = "train()" + TOGGLED
BUTTON = f"""
import ipywidgets
button, out = ipywidgets.Button(description="Train"), ipywidgets.Output()

def clicked(_):
    with out:
        exec({TRAIN!r}, globals())

button.on_click(clicked)
ipywidgets.VBox([button, out])
"""
NEEDS = ("voila<1", *PACKAGES["6.30"])


def installed_in(target: pathlib.Path, needs: Sequence[str]) -> pathlib.Path:
    """Install packages into a folder, beside those of this environment; returns the folder."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target), *needs]
    subprocess.run(pip, check=True, capture_output=True, timeout=900)
    return target


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return installed_in(tmp_path_factory.mktemp("packages"), NEEDS)


@contextlib.contextmanager
def served(
    root: pathlib.Path, packages: pathlib.Path, cells: list[str], *app: str
) -> Iterator[str]:
    """The address of a server of the notebook `a.ipynb`, until the block ends."""
    new = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    new.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(new, root / "a.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(packages), source_path()["PYTHONPATH"]])
    env = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    env["JUPYTER_PATH"] = str(packages / "share" / "jupyter")
    env["JUPYTER_CONFIG_DIR"] = str(root / "config")
    server = subprocess.Popen(
        [sys.executable, "-m", *app, f"--port={port}", "--no-browser"],
        cwd=root,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while not listens(port):
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        return True
    except OSError:
        return False


def switched_while_it_trains(page: Page, root: pathlib.Path) -> None:
    view = View(page.locator("body"))
    view.wait("nni-progress", "found.dataset.state === 'running' && value > 5")
    view.perturb("Zero")
    marked = view.root.get_by_test_id("nni-training-perturbed")
    for on in (True, False, True):
        expect(marked).to_have_count(int(on), timeout=60_000)
        here = view.number("nni-progress")
        view.wait("nni-progress", "value > arg + 6", here)
        view.part("nni-switch").click()
    expect(marked).to_have_count(0)
    (root / "stop").touch()
    page.get_by_text("switched 4 times").wait_for()


def test_a_click_acts_while_a_button_of_voila_trains(
    packages: pathlib.Path, tmp_path: pathlib.Path, browser: Browser
):
    cells = [MODEL, INSPECT, BUTTON]
    with served(tmp_path, packages, cells, "voila", "a.ipynb") as url:
        page = browser.new_page(viewport={"width": 1400, "height": 1400})
        page.goto(url, timeout=300_000)
        page.get_by_test_id("nni-root").wait_for(timeout=300_000)
        View(page.locator("body")).select("second")
        page.get_by_role("button", name="Train").click()
        switched_while_it_trains(page, tmp_path)
