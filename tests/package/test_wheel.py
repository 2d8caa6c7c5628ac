"""The package as users get it: built, installed into an empty environment, and on screen."""

from __future__ import annotations

import email
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile

import pytest
from browser.lab import Lab
from browser.view import View
from package.test_lower_bounds import COLAB

ROOT = pathlib.Path(__file__).parents[2]
BUILT = ("widget.js", "widget.css", "stream.js", "layout.js", "page.js", "saved.js", "licenses.txt")
LIBRARIES = (
    "native-x86_64-linux.so",
    "native-aarch64-linux.so",
    "native-aarch64-macos.dylib",
    "native-x86_64-windows.dll",
)
STATIC = tuple(f"nnx_inspector/static/{name}" for name in (*BUILT, *LIBRARIES))

CELL = """
import jax, jax.numpy as jnp
from flax import nnx
import nnx_inspector as nni

model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
insp = nni.Inspector(model, jnp.ones((4, 2)))
"""


def _run(*command: str, cwd: pathlib.Path, seconds: float = 900) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{said[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy of the files that are in git or not ignored by it; no build outputs."""
    copy = tmp_path_factory.mktemp("checkout")
    listed = _run("git", "ls-files", "-z", "-co", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and name not in STATIC:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def built(checkout: pathlib.Path) -> pathlib.Path:
    """The folder with the sdist, and the wheel that was built from it."""
    _run(sys.executable, "-m", "build", "--no-isolation", cwd=checkout)
    return checkout / "dist"


@pytest.fixture(scope="module")
def wheel(built: pathlib.Path) -> pathlib.Path:
    (path,) = built.glob("*.whl")
    return path


def test_the_front_end_is_in_wheel_and_sdist(built: pathlib.Path, wheel: pathlib.Path):
    with zipfile.ZipFile(wheel) as packed:
        inside = set(packed.namelist())
        assert {*STATIC, "nnx_inspector/__init__.py"} <= inside
        assert all(len(packed.read(name)) > 300 for name in STATIC)
    extra = [name for name in inside if name.startswith(("tests/", "js/", "notebooks/"))]
    assert extra == []
    with zipfile.ZipFile(wheel) as packed:
        for name in STATIC[len(BUILT) :]:
            assert b"nnx_inspector_array_stats" in packed.read(name)
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as packed_source:
        names = {name.partition("/")[2] for name in packed_source.getnames()}
    wanted = {
        "pyproject.toml",
        "LICENSE",
        "nnx_inspector/stats/native/array_stats.c",
        "js/src/widget.ts",
        "js/build.mjs",
        "README.md",
    }
    assert {*STATIC, *wanted, "notebooks/docs/conf.py", "notebooks/quickstart.ipynb"} <= names
    assert [name for name in names if "node_modules" in name] == []


def test_an_index_would_take_both_files(built: pathlib.Path):
    files = [str(path) for path in built.iterdir()]
    assert sorted(pathlib.Path(file).suffix for file in files) == [".gz", ".whl"]
    said = _run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=built)
    assert said.count("PASSED") == 2


def test_an_index_shows_the_readme_without_links_into_the_checkout(wheel: pathlib.Path):
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [n for n in packed.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(packed.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    shown = metadata.get_payload()
    assert shown.startswith("# nnx_inspector\n")
    assert "nni.value_and_grad(" in shown
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert [link for link in links if not link.startswith("https://")] == []
    assert "<!--" not in shown


def test_the_wheel_comes_without_a_trace_of_the_machine(
    checkout: pathlib.Path, wheel: pathlib.Path
):
    places = (checkout, ROOT, pathlib.Path.home(), pathlib.Path(tempfile.gettempdir()))
    wanted = [f"{place}/" for place in places if place != pathlib.Path("/")]
    wanted += [sys.prefix, "node_modules", "nnx-inspector-build-"]
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            content = packed.read(name).decode("utf-8", "replace")
            assert [place for place in wanted if place in content] == [], name
        scripts = "".join(packed.read(name).decode() for name in STATIC if name.endswith(".js"))
        addresses = re.findall(r"(?:https?|wss?):?//[^\s\"'`)]+", scripts)
    # names of XML namespaces are not addresses
    assert [a for a in addresses if not a.startswith("http://www.w3.org/")] == []


def test_the_lock_file_names_no_registry():
    lock = json.loads((ROOT / "js" / "package-lock.json").read_text())
    packages = {name: entry for name, entry in lock["packages"].items() if name}
    assert packages
    assert [name for name, entry in packages.items() if "resolved" in entry] == []
    assert [name for name, entry in packages.items() if "integrity" not in entry] == []
    assert "registry." not in json.dumps(lock)


@pytest.fixture(scope="module")
def python(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an empty environment with the wheel and JupyterLab in it."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=True, symlinks=True)
    python = str(folder / "bin" / "python")
    _run(python, "-m", "pip", "install", "-q", "--no-compile", f"{wheel}[notebook]", cwd=folder)
    _run(python, "-m", "pip", "check", cwd=folder)
    return python


LISTED = ("list", "--format", "json")


@pytest.mark.long
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Colab's numpy has no wheel for it")
def test_installing_where_colabs_packages_are_replaces_none(
    wheel: pathlib.Path, tmp_path: pathlib.Path
):
    venv.create(tmp_path / "colab", with_pip=True, symlinks=True)
    python = str(tmp_path / "colab" / "bin" / "python")
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    required = re.findall(r'"((?:flax|jax|jaxlib)>=[\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert len(required) == 3
    pins = [one.replace(">=", "==") for one in required]
    _run(*pip, "install", "-q", "--no-compile", *COLAB, *pins, cwd=tmp_path)
    there = {one["name"].lower() for one in json.loads(_run(*pip, *LISTED, cwd=tmp_path))}
    assert {pin.partition("==")[0] for pin in (*COLAB, *pins)} <= there
    report = tmp_path / "report.json"
    _run(*pip, "install", "--dry-run", "--report", str(report), str(wheel), cwd=tmp_path)
    new = [one["metadata"]["name"].lower() for one in json.loads(report.read_text())["install"]]
    assert "nnx-inspector" in new
    assert sorted(there & set(new)) == []


def test_it_is_imported_elsewhere(python: str, tmp_path: pathlib.Path):
    code = "import sys, nnx_inspector; print(nnx_inspector.__file__, 'jax' in sys.modules)"
    place, with_jax = _run(python, "-W", "error", "-I", "-c", code, cwd=tmp_path).split()
    assert pathlib.Path(place).is_relative_to(pathlib.Path(python).parents[1])
    assert with_jax == "False"
    _run(python, "-I", "-c", "import nnx_inspector; nnx_inspector.Inspector", cwd=tmp_path)
    code = "from nnx_inspector._compat.native import has_functions; print(has_functions())"
    assert _run(python, "-I", "-c", code, cwd=tmp_path).strip() == "True"


@pytest.mark.browser
def test_its_widget_renders_with_the_network_off(python: str, tmp_path: pathlib.Path):
    with _lab(tmp_path, python) as lab, lab.notebook("wheel.ipynb", [CELL]) as notebook:
        notebook.run(0, seconds=180)
        view = View(notebook.cell(0))
        assert view.wait("nni-stat-output-size", "value > 0") == 12
        kernel = notebook.ask("insp.recording.summary('').mean")
        assert view.number("nni-stat-output-mean") == kernel
        view.perturb("Zero")
        view.part("nni-effect").wait_for()
        assert notebook.ask("nni.__file__").startswith(str(pathlib.Path(python).parents[1]))
        assert notebook.errors == []
        assert notebook.foreign == []


def _lab(root: pathlib.Path, python: str) -> Lab:
    nowhere = {name: "http://127.0.0.1:9" for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")}
    without = {"PYTHONPATH": None, "NO_PROXY": "127.0.0.1,localhost", "VIRTUAL_ENV": None}
    return Lab(root, python=python, env={**nowhere, **without})
