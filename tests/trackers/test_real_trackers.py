"""Each kind of tracker with its real package, whose own reader reads back what it was given.

The packages are large, and one of them needs an older sqlalchemy: they are installed in an
environment of their own.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sysconfig
import venv

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = "wandb", "tensorboardX", "tensorboard", "mlflow", "aim"
LOOP = ROOT / "tests" / "helpers" / "real_trackers.py"

pytestmark = pytest.mark.long


def done(*command: str, cwd: pathlib.Path) -> str:
    paths = os.pathsep.join([str(ROOT), str(LOOP.parent)])
    of = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    out = subprocess.run(command, cwd=cwd, env=of, capture_output=True, text=True, check=False)
    assert out.returncode == 0, (out.stdout + out.stderr)[-6000:]
    return out.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment with the trackers, and with all that this one has."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True, symlinks=True)
    at = str(folder / "bin" / "python")
    paths = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    there = done(at, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    (pathlib.Path(there.strip()) / "behind.pth").write_text("\n".join(dict.fromkeys(paths)))
    done(at, "-m", "pip", "install", "--quiet", "--no-compile", *PACKAGES, cwd=folder)
    return at


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "aim", "mlflow"])
def test_it_reads_back_what_it_was_given(kind: str, python: str, tmp_path: pathlib.Path) -> None:
    said = done(python, str(LOOP), kind, str(tmp_path), cwd=tmp_path).splitlines()[-1].split()
    assert said[0] == kind
    assert [int(count) for count in said[1:]] == [57, 0 if kind == "mlflow" else 14, 1]
