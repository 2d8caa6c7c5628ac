"""The import order of the rooms; opening a recording starts no accelerator."""

import ast
import functools
import pathlib
import shutil
import subprocess
import sys

import pytest

import nnx_inspector

PACKAGE = pathlib.Path(nnx_inspector.__file__).parent

ROOMS = (
    "",
    "_compat",
    "stats",
    "recordings",
    "hooks",
    "program",
    "findings",
    "trackers",
    "records",
    "perturbations",
    "lenses",
    "profiling",
    "live",
    "screen",
    "inspector",
)
"""A file imports only from its own room and earlier rooms; the first is the files at the top."""

WITHOUT_JAX = {
    "": {"background", "errors", "files", "progress"},
    "stats": {
        "bins",
        "encoding",
        "moments",
        "parameter_stats",
        "rows",
        "summary",
        "table",
        "unit_stats",
    },
    "recordings": None,
    "findings": {
        "backward",
        "causes",
        "evidence",
        "experts",
        "finding",
        "findings",
        "forward",
        "heads",
        "rule_context",
        "model",
        "nonfinite",
        "paths",
        "rounding",
        "ranges",
        "updates",
        "rate",
        "state",
    },
    "trackers": None,
    "screen": None,
}
"""The files that open, judge and show a recording; None stands for a whole room."""

MOST_FILES = 12
MOST_LINES = 500
MOST_OF_A_CLASS = 800
"""The most lines of a file that is mostly one class: a class is not cut in two to fit."""


@functools.cache
def files() -> dict[str, pathlib.Path]:
    """Dotted name without the package -> file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts)] = path
    return found


def room_of(name: str) -> str:
    head = name.split(".")[0]
    return head if head in ROOMS else ""


def imported(path: pathlib.Path) -> set[str]:
    """The files and rooms of this package that a file imports, anywhere in its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nnx_inspector"):
            inner = (node.module or "").partition(".")[2]
            found |= {f"{inner}.{alias.name}".strip(".") for alias in node.names}
    return found


NAMES = [name for name in files() if not name.endswith("__init__")]


def test_every_folder_is_a_room():
    assert {room_of(name) for name in NAMES} == set(ROOMS)
    inside = {name.split(".")[0] for name in NAMES if "." in name}
    assert inside == set(ROOMS) - {""}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_rooms_before_it(room: str):
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    for name, path in files().items():
        if room_of(name) == room and name != "__init__":
            wrong = {one for one in imported(path) if room_of(one) not in allowed}
            assert not wrong, name


def test_no_room_has_a_cycle_of_files():
    graph = {
        name: {
            other for one in imported(files()[name]) if (other := file_of(one)) and other != name
        }
        for name in NAMES
    }
    while leaves := [name for name, needs in graph.items() if not needs & set(graph)]:
        for name in leaves:
            del graph[name]
    assert not graph


def file_of(imported_name: str) -> str | None:
    known = files()
    head = imported_name.rpartition(".")[0]
    for name in (imported_name, head, f"{imported_name}.__init__", f"{head}.__init__"):
        if name in known:
            return name
    return None


def _is_mostly_a_class(text: str) -> bool:
    classes = [one for one in ast.parse(text).body if isinstance(one, ast.ClassDef)]
    longest = max(((one.end_lineno or 0) - one.lineno for one in classes), default=0)
    return longest > 0.6 * len(text.splitlines())


def test_a_folder_has_at_most_a_dozen_files_of_at_most_500_lines():
    folders: dict[pathlib.Path, int] = {}
    for path in files().values():
        if path.name != "__init__.py":
            folders[path.parent] = folders.get(path.parent, 0) + 1
            text = path.read_text()
            lines = len(text.splitlines())
            assert lines <= (MOST_OF_A_CLASS if _is_mostly_a_class(text) else MOST_LINES), path
    assert {folder.name: n for folder, n in folders.items() if n > MOST_FILES} == {}


def test_a_room_says_what_it_is_for_and_does_nothing_else():
    for name, path in files().items():
        if name.endswith("__init__") and name not in ("__init__", "screen.protocol.__init__"):
            (only,) = ast.parse(path.read_text()).body
            assert isinstance(only, ast.Expr), name


def without_jax() -> list[str]:
    found = []
    for room, chosen in WITHOUT_JAX.items():
        here = [name for name in NAMES if room_of(name) == room]
        found += [n for n in here if chosen is None or n.rpartition(".")[2] in chosen]
    return found


def test_opening_a_recording_imports_neither_jax_nor_flax():
    code = (
        "import importlib, sys\n"
        f"for name in {without_jax()}:\n"
        "    importlib.import_module(f'nnx_inspector.{name}')\n"
        "    assert not {'jax', 'flax', 'jaxlib', 'pandas', 'plotly'} & set(sys.modules), name"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, nnx_inspector\nassert not {'jax', 'flax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_the_package_may_lie_in_a_zip_archive(tmp_path: pathlib.Path):
    path = shutil.make_archive(str(tmp_path / "package"), "zip", PACKAGE.parent, PACKAGE.name)
    code = (
        f"import sys; sys.path.insert(0, {path!r})\n"
        "import nnx_inspector as nni\n"
        "assert nni.InspectorError in nni.InspectorError.__mro__ and '.zip' in nni.__file__"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_private_parts_of_flax_and_jax_are_touched_in_one_room_only():
    for name, path in files().items():
        if room_of(name) != "_compat":
            text = path.read_text()
            assert "jax._src" not in text, name
            assert "graphlib" not in text, name


def test_every_public_name_resolves():
    for name in nnx_inspector.__all__:
        assert getattr(nnx_inspector, name).__doc__


def test_no_public_name_is_that_of_a_room_or_file_at_the_top():
    # importing a file binds its name in the package, over a function of the same name
    top = {name.split(".")[0] for name in NAMES}
    assert not set(nnx_inspector.__all__) & top


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'caputre'"):
        nnx_inspector.caputre  # noqa: B018
