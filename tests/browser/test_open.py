"""A run in another process, on screen: it follows, a click steers it, and its end is told."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from browser.lab import Lab, source_path
from browser.view import View
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

SCRIPT = """
import os, sys, time
import jax.numpy as jnp
from flax import nnx
import nnx_inspector as nni

class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.first(x)))

model = Net(nnx.Rngs(0))
loss_of = nnx.jit(lambda model, x: nnx.value_and_grad(lambda m: ((m(x) - 2) ** 2).mean())(model)[0])
x = jnp.ones((16, 4))
with nni.watch(model, every=2, save=sys.argv[1], control=True) as recording:
    for step in range(1_000_000):
        recording.add_metrics(step, {"loss": float(loss_of(model, x))})
        if step == 10:
            print("goes on", flush=True)
        time.sleep(0.02)  # a step as long as a real one: the file is to follow, not to be raced
"""
LAST = "float(run.recording.curves()['loss'][-1, 1])"


@pytest.fixture
def script(lab: Lab) -> Iterator[subprocess.Popen[str]]:
    """A script that trains in the folder of the notebooks, a few steps on."""
    import os

    env = {**os.environ, **source_path(), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SCRIPT, str(lab.root / "run.nni")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "goes on\n"
        yield process
        process.kill()


def test_a_run_is_followed_steered_and_seen_to_end(lab: Lab, script: subprocess.Popen[str]):
    cells = [
        "import sys, nnx_inspector as nni",
        "run = nni.open('run.nni')",
        "'jax' in sys.modules",
    ]
    with lab.notebook("open.ipynb", cells) as notebook:
        for cell in range(3):
            notebook.run(cell)
        view = View(notebook.cell(1))
        view.root.wait_for()
        assert view.rows() == ["", "first", "head"]
        view.wait("nni-step", "value > 20")  # it follows
        expect(view.part("nni-banner")).to_contain_text("run.nni")
        expect(view.part("nni-progress")).to_have_attribute("data-state", "running")

        view.select("head")
        view.tab("values")  # the run sends them
        expect(view.part("nni-values-source")).to_contain_text("of the run.", timeout=60_000)
        assert view.value("nni-values-expression") == 'run.values("head").value'
        view.part("nni-values-left-out").get_by_text("48 of 48 values").wait_for()
        assert notebook.ask("run.values('head').value.shape == (16, 3)") is True
        view.open("nni-perturb")
        view.part("nni-perturb-Zero").click()
        view.part("nni-switch").wait_for()
        notebook.ask_until(f"abs({LAST} - 4) < 1e-6", True)  # the mean of (0 - 2)^2
        expect(view.part("nni-training-perturbed")).to_be_visible()
        assert notebook.ask("run.perturbations[0].enabled") is True

        view.part("nni-switch").click()
        notebook.ask_until(f"abs({LAST} - 4) > 1e-3", True)
        assert notebook.ask("run.perturbations[0].enabled") is False

        script.send_signal(signal.SIGKILL)
        script.wait()
        state = view.part("nni-progress")
        expect(state).to_have_attribute("data-state", "stopped", timeout=60_000)
        expect(view.part("nni-switch")).to_be_disabled()
        assert notebook.ask("'jax' in sys.modules") is False
        assert notebook.errors == []
        assert notebook.foreign == []
