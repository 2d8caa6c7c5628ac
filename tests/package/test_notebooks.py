"""Every notebook runs from top to bottom, without an error, a warning or a network.

If NNX_INSPECTOR_EXECUTED names a folder, the executed notebooks are kept there for
notebooks/docs/conf.py, which puts them into the site.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXECUTED = os.environ.get("NNX_INSPECTOR_EXECUTED", "")

QUOTED = r"<!-- printed by notebooks/{} -->\n```text\n([^`]+)```"
"""What the README quotes from a notebook; it may end in the middle."""

OFFLINE = """
import socket as _socket

def _refuse(self, address, _connect=_socket.socket.connect):
    if self.family != getattr(_socket, "AF_UNIX", None) and address[0] not in ("127.0.0.1", "::1"):
        raise OSError(f"This notebook asked for the network: {address}")
    return _connect(self, address)

_socket.socket.connect = _refuse
"""


FINDINGS = """{
    name: [f"{one.rule} {one.site}" for one in found if one.severity != "info"]
    for name, of in dict(globals()).items()
    if not name.startswith("_") and isinstance(of, (nni.Inspector, nni.Recording))
    for found in [of.findings if isinstance(of, nni.Inspector) else nni.diagnose(of)]
}"""
SAYS = f"import json\nimport nnx_inspector as nni\nprint('FINDINGS', json.dumps({FINDINGS}))"
FOUND: dict[str, dict[str, list[str]]] = {
    "debugging": {
        "first": ["nonfinite normalise", "dead-units up"],
        "second": ["dead-units layers/1"],  # layers/2 is constant because of it
        "third": ["vanishing-gradient layers/2"],
        "fourth": ["mode norm"],
    },
    "quickstart": {"recording": ["update-ratio block1/conv"]},
}
"""The findings that a notebook shows on purpose: notebook -> variable -> rules and sites."""


def test_there_are_notebooks():
    assert NOTEBOOKS, f"no notebooks in {ROOT / 'notebooks'}"


OTHERS = [path for path in NOTEBOOKS if path.stem != "quickstart"]
"""browser/test_quickstart.py runs the quickstart, and checks and keeps what it showed as well."""


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_runs(path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    _give_this_python_a_kernel(tmp_path, monkeypatch)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens on this port
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(OFFLINE))
    notebook.cells.append(nbformat.v4.new_code_cell(SAYS))
    client = NotebookClient(
        notebook,
        timeout=120,
        kernel_name="this_python",
        resources={"metadata": {"path": str(tmp_path)}},
        store_widget_state=False,  # the site shows the last state, which needs no script
    )
    client.execute()  # raises with the cell's traceback
    said = notebook.cells[-1].outputs[-1].text.removeprefix("FINDINGS ")
    notebook.cells = notebook.cells[1:-1]  # those of the notebook itself
    check_and_keep(path, notebook, json.loads(said))


def check_and_keep(path: pathlib.Path, notebook: Any, found: dict[str, list[str]]) -> None:
    """What a notebook showed is as it should be, and is kept for the site."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            assert output.get("name") != "stderr", f"{cell.source}\nwarned:\n{output.text}"
    alarms = {name: rows for name, rows in found.items() if rows}
    assert alarms == FOUND.get(path.stem, {}), "an alarm that the notebook does not mean to raise"
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    for text in re.findall(QUOTED.format(path.name), (ROOT / "README.md").read_text()):
        assert " ".join(text.split()) in " ".join(printed.split())
    if EXECUTED:
        pathlib.Path(EXECUTED).mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, pathlib.Path(EXECUTED) / path.name)


def _give_this_python_a_kernel(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel specification for the interpreter that runs the tests."""
    from jupyter_client.kernelspec import KernelSpec

    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = KernelSpec(argv=command, display_name="this Python", language="python")
    place = folder / "jupyter" / "kernels" / "this_python"
    place.mkdir(parents=True)
    (place / "kernel.json").write_text(spec.to_json())
    monkeypatch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
