"""The oldest versions that pyproject.toml allows can be installed together, and work together.

Only on the oldest Python: the oldest numpy has no wheels for newer ones.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tomllib
import venv

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OLDEST = tuple(int(part) for part in PROJECT["requires-python"].removeprefix(">=").split("."))

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != OLDEST, reason="the oldest numpy has wheels for the oldest Python only"
)

USE = """
import jax.numpy as jnp
from flax import nnx

import nnx_inspector as nni

model, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2))
insp = nni.Inspector(model, x)
insp.step(lambda model, x: (model(x) ** 2).mean(), x)
insp.perturb("", nni.Zero())
insp.run(x)
assert insp.recording.summary("").zeros == 12
insp.recording.save("run.nni")
frame = nni.load("run.nni").to_frame()
assert frame[frame["quantity"] == "output"]["zeros"].tolist()[-1] == 12, frame
assert len(insp.figure("").data) > 0
assert insp.to_html("page.html") > 10_000
"""


COLAB = (
    *("ipykernel==6.17.1", "ipython==7.34.0", "ipywidgets==7.7.1", "anywidget==0.9.21"),
    *("traitlets==5.7.1", "plotly==5.24.1", "pandas==2.2.2", "numpy==2.0.2"),
)
"""What Colab has; its jax and flax have to be as new as ours, or are replaced."""


def oldest(requirements: list[str]) -> list[str]:
    """Each package at its lower bound; the highest of them, if it is required twice."""
    pins: dict[str, str] = {}
    for requirement in requirements:
        found = re.fullmatch(r"([\w.-]+)>=([\d.]+)(?:,(?:<|!=)[\d.*]+)*", requirement)
        assert found is not None, f"{requirement} has no lower bound"
        pins[found[1]] = max(pins.get(found[1], "0"), found[2], key=parts)
    return [f"{name}=={version}" for name, version in pins.items()]


def parts(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def pip(python: str, *arguments: str) -> None:
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def test_the_oldest_dependencies_work_together(tmp_path: pathlib.Path) -> None:
    venv.create(tmp_path / "oldest", with_pip=True, symlinks=True)
    python = str(tmp_path / "oldest" / "bin" / "python")
    pip(python, "--quiet", "--no-compile", *oldest(PROJECT["dependencies"]))
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{USE}"
    command = [python, "-I", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


def test_the_oldest_of_all_extras_can_be_installed_together() -> None:
    extras = [one for extra in ("notebook", "docs", "test") for one in EXTRAS[extra]]
    others = [one for one in extras if not one.startswith("nnx-inspector[")]
    pins = oldest([*PROJECT["dependencies"], *others])
    pip(sys.executable, "--dry-run", "--ignore-installed", *pins)


def test_what_colab_has_meets_every_requirement() -> None:
    """So pip replaces none of it. `test_wheel` installs all that, and the wheel beside it."""
    needed = PROJECT["dependencies"]
    pip(sys.executable, "--dry-run", "--ignore-installed", *needed, *COLAB)
