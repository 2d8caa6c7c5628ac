"""The widget in marimo, by hand (`--long`), because the newest marimo is installed for it."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from browser.lab import source_path
from browser.view import View
from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.long]

NOTEBOOK = """
import marimo

app = marimo.App()


@app.cell
def _():
    import jax.numpy as jnp
    import marimo as mo
    from flax import nnx
    import nnx_inspector as nni
    return jnp, mo, nni, nnx


@app.cell
def _(jnp, mo, nni, nnx):
    model, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2))
    insp = nni.Inspector(model, x)
    view = mo.ui.anywidget(insp)
    view
    return insp, model, view, x


@app.cell
def _(model, nnx, view, x):
    def train():
        step = nnx.jit(lambda model, x: (model(x) ** 2).sum())
        for _ in view.watch(range(10**9), every=5):
            step(model, x)

    view.background(train)
    "started"
    return


if __name__ == "__main__":
    app.run()
"""


@pytest.fixture
def page(tmp_path: pathlib.Path, browser: Browser) -> Iterator[Page]:
    """A page of marimo's editor with the notebook, whose cells have run."""
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    target = tmp_path / "marimo"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target), "marimo"]
    subprocess.run(pip, check=True, capture_output=True, timeout=900)
    path = os.pathsep.join([source_path()["PYTHONPATH"], str(target)])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"-q edit --headless --no-token --skip-update-check -p {port} notebook.py"
    server = subprocess.Popen(
        [sys.executable, "-m", "marimo", *options.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        page = browser.new_page(viewport={"width": 1400, "height": 1400})
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator(".marimo-cell").first.wait_for()
        page.keyboard.press("Control+Shift+r")
        yield page
    finally:
        server.terminate()
        server.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def test_a_click_acts_in_a_loop_in_the_background(page: Page):
    page.get_by_test_id("nni-root").wait_for(timeout=300_000)
    view = View(page.locator("body"))
    first = view.wait("nni-step", "value > 0")
    view.wait("nni-step", "value > arg", first)
    view.perturb("Zero")
    view.wait("nni-stat-output-zeros", "value === 12")
    view.part("nni-switch").click()
    view.wait("nni-stat-output-zeros", "value === 0")
