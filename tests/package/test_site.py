"""The site is built without warnings and network, complete, and loads nothing from elsewhere.

`tests/run.py` builds it once, with all notebooks as they were executed, and names it in
NNX_INSPECTOR_SITE; otherwise it is built here, with one of them.
"""

from __future__ import annotations

import os
import pathlib
import re
import runpy
import subprocess
import sys

import nbformat
import pytest

import nnx_inspector as nni

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
NOWHERE = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "all_proxy")}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with one executed notebook: each code cell has printed its number."""
    folder = tmp_path_factory.mktemp("executed")
    notebook = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            said = nbformat.v4.new_output("stream", text=f"printed by cell {number}\n")
            cell.update(execution_count=number, outputs=[said])
    live = {"application/vnd.jupyter.widget-view+json": {"model_id": "0"}, "text/plain": "<Widget>"}
    figure = {"application/vnd.plotly.v1+json": {"data": [{"y": [1, 2]}], "layout": {}}}
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    for data in (live, figure):
        last.outputs.append(nbformat.v4.new_output("display_data", data))
    nbformat.write(notebook, folder / "quickstart.ipynb")
    return folder


@pytest.fixture(scope="module")
def site(executed: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    if built := os.environ.get("NNX_INSPECTOR_SITE"):
        return pathlib.Path(built)
    folder = tmp_path_factory.mktemp("built") / "site"
    options = ["-W", "--keep-going", "--quiet", "-d", str(folder.with_name("doctrees"))]
    pages = ["-c", "notebooks/docs", "notebooks", str(folder)]
    env = {**os.environ, **NOWHERE, **{name.upper(): to for name, to in NOWHERE.items()}}
    env |= {"NNX_INSPECTOR_EXECUTED": str(executed), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "sphinx", *options, *pages]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_in_the_site(site: pathlib.Path):
    sources = [p for p in (ROOT / "notebooks").rglob("*") if p.suffix in (".md", ".ipynb")]
    pages = [p for p in sources if ".ipynb_checkpoints" not in p.parts]
    assert len(pages) >= 20
    for page in pages:
        there = (site / page.relative_to(ROOT / "notebooks")).with_suffix(".html")
        assert there.is_file(), page


def test_every_public_name_has_an_anchor(site: pathlib.Path):
    text = "".join(page.read_text() for page in (site / "docs" / "reference").glob("*.html"))
    anchors = set(re.findall(r'id="nnx_inspector\.(\w+)"', text))
    assert anchors == {*nni.__all__, "open"}  # `import *` leaves Python's own
    for method in ("watch", "step", "perturb", "save", "to_html"):
        assert f'id="nnx_inspector.Inspector.{method}"' in text


def test_outputs_of_an_executed_notebook_are_shown(site: pathlib.Path):
    quickstart = (site / "quickstart.html").read_text()
    assert "cell_output" in quickstart
    assert "Widget&gt;" not in quickstart  # the live one, which needs a kernel
    assert 'src="_static/plotly.min.js"' in quickstart
    assert (site / "_static" / "plotly.min.js").stat().st_size > 1_000_000
    for name in NOTEBOOKS:
        assert "cell_input" in (site / f"{name}.html").read_text()


def test_it_loads_nothing_from_elsewhere(site: pathlib.Path):
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text())
        away = [tag for tag in tags if re.search(r"""(?:src|href)=["'](?:https?:)?//""", tag)]
        assert away == [], page


def test_an_executed_notebook_is_taken_unless_it_changed_since_it_ran(
    executed: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """Sphinx ends with what the reader of a source raises; that it reads so shows above."""
    others = {name: (ROOT / "notebooks" / f"{name}.ipynb").read_text() for name in NOTEBOOKS}
    stale = nbformat.read(executed / "quickstart.ipynb", as_version=4)
    stale.cells[-1].source = "of yesterday"
    nbformat.write(stale, tmp_path / "quickstart.ipynb")
    source = [(ROOT / "notebooks" / "quickstart.ipynb").read_text()]
    with_outputs = runpy.run_path(str(ROOT / "notebooks" / "docs" / "conf.py"))["with_outputs"]
    monkeypatch.setenv("NNX_INSPECTOR_EXECUTED", str(executed))
    for name, text in others.items():
        read = [text]
        with_outputs(None, name, read)
        assert ("printed by cell 1\\n" in read[0]) == (name == "quickstart")
        assert name == "quickstart" or read == [text]
    monkeypatch.setenv("NNX_INSPECTOR_EXECUTED", str(tmp_path))
    with pytest.raises(ValueError, match=r"Run it again\."):
        with_outputs(None, "quickstart", source)
