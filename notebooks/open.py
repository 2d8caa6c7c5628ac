"""Sets up an environment beside this checkout and opens the quickstart in JupyterLab.

Needs Python 3.11 or newer and nothing else: `python3 notebooks/open.py`. Arguments go to
JupyterLab, for example `--no-browser`. Knows nothing of the package but its name.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parents[1]


def environment(extra: str) -> pathlib.Path:
    """The Python of `.venv`, made where it is missing, with the package and an extra installed."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this runs before pip could refuse
        sys.exit(f"nnx_inspector needs Python 3.11 or newer, this is {sys.version.split()[0]}.")
    folder = ROOT / ".venv"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        print(f"Making an environment in {folder.name}", flush=True)
        venv.create(folder, with_pip=True)
    print(f"Installing nnx_inspector[{extra}]: minutes the first time, then seconds", flush=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    # not to the terminal itself: pip's bars would leave a hundred packages' lines between them
    pip += ["--progress-bar", "off", "--editable", f"{ROOT}[{extra}]"]
    with subprocess.Popen(pip, stdout=subprocess.PIPE, text=True, errors="replace") as installing:
        assert installing.stdout is not None
        for line in installing.stdout:
            if not line.startswith("Requirement already satisfied"):
                print(line, end="", flush=True)
    if installing.returncode:
        sys.exit(
            "Installing failed; pip says why above. It needs the package index, and npm's registry "
            "to build the front end: see notebooks/docs/limits.md, 'Installing fails'."
        )
    return python


def main() -> None:
    python = environment("notebook")
    root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    notebook = str(ROOT / "notebooks" / "quickstart.ipynb")
    command = [str(python), "-m", "jupyter", "lab", notebook, *root, *sys.argv[1:]]
    print("Starting JupyterLab with the quickstart; Ctrl-C twice stops it", flush=True)
    with contextlib.suppress(KeyboardInterrupt):  # JupyterLab's own way to stop
        sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
