"""Who may import whom (DESIGN.md): data flows one way, and opening a file starts no accelerator."""

import ast
import pathlib
import subprocess
import sys

import pytest

import nnx_inspector

PACKAGE = pathlib.Path(nnx_inspector.__file__).parent

LAYERS = [
    {
        "errors",
        "arrays",
        "assets",
        "protocol",
        "binning",
        "moments",
        "thinning",
        "weak",
        "saved",
        "arming",
        "redirection",
        "trees",
        "_private",
        "sharding",
        "progress",
        "memory",
        "worker",
        "content",
        "excerpts",
        "expressions",
        "donated",
        "configuration",
        "answering",
        "sections",
        "statistics",
        "headroom",
    },
    {"summary", "gauges"},
    {"compact", "curves", "observed", "finding"},
    {"history", "passes", "kind", "stacks", "tabulating"},
    {"frames", "saving", "measured"},
    {"sites", "recording", "timeline", "loading", "kinds", "arithmetic", "effects", "axes"},
    {"judged"},
    {"evidence", "causes"},
    {"rules_nonfinite", "rules_forward", "rules_backward", "rules_model", "rules_calls"},
    {"summarize", "blocks"},
    {"gauging"},
    {"gradient_kinds", "parameter_kinds"},
    {"packing", "units", "variables", "forwarding", "flops", "places", "offers"},
    {"linen", "scope", "wrapping", "taps", "findings", "figures", "presenting", "screen"},
    {"layers", "hostcalls", "inbox", "replay", "snapshot", "activations"},
    {"dispatch", "wording", "changes", "watched_call"},
    {"keeping", "inside"},
    {"call"},
    {"interception", "jitcalls"},
    {"survey", "record", "runs", "runs_on_screen"},
    {"page", "last_state", "layerwise", "board", "collecting", "presenter", "looks"},
    {"nonfinite"},
    {"harvest"},
    {"eager"},
    {"staging", "perturbation"},
    {"parameters", "backward", "substituting", "mark_layers", "entry"},
    {"capturing", "observing"},
    {"watching"},
    {"facts"},
    {"perturbing"},
    {"acting", "gates", "comparing"},
    {
        "tracing",
        "renewal",
        "walk",
        "dataflow",
        "marking",
        "modes",
        "switching",
        "owned",
        "loop",
        "handles",
    },
    {"losses", "flow", "layer_rows", "shelf", "valued", "weights", "teaching"},
    {"opening", "looking"},
    {"reading"},
    {"layout", "measures", "commands", "telling", "attendance"},
    {"sweeping", "recorder", "loops"},
    {"trials", "sweeps"},
    {"evaluating", "diagnosing"},
    {"inspector"},
]
"""A file may import from earlier layers (and within its own, without a cycle)."""

HOST_ONLY = {
    "arrays", "errors", "protocol", "binning", "moments", "thinning", "summary", "compact",
    "curves",
    "history", "passes", "recording", "tabulating", "findings", "figures", "presenting", "screen",
    "gauges", "observed", "finding", "judged", "evidence", "causes", "rules_nonfinite",
    "rules_forward", "rules_calls",
    "rules_backward", "rules_model", "presenter", "offers", "flow", "excerpts", "expressions",
    "worker", "sections", "saving", "frames", "measured", "loading", "runs", "runs_on_screen",
    "replay", "page", "assets", "snapshot", "saved", "last_state", "statistics",
}  # fmt: skip


def imported(name: str) -> set[str]:
    """The modules of this package that a file imports anywhere in it."""
    found: set[str] = set()
    nodes = (node for text in texts_of(name) for node in ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nnx_inspector"):
            inner = (node.module or "").split(".")[1:2]
            found |= set(inner or [alias.name for alias in node.names])
    return found - {name}  # the files of a folder know each other


def texts_of(name: str) -> list[str]:
    """That of a file, or of all files of a folder."""
    file = PACKAGE / f"{name}.py"
    paths = [file] if file.exists() else sorted((PACKAGE / name).glob("*.py"))
    return [path.read_text() for path in paths]


def files() -> list[str]:
    folders = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    return sorted([*folders, *(p.stem for p in PACKAGE.glob("*.py") if p.stem != "__init__")])


def test_every_file_has_a_place_in_the_layers():
    assert sorted(set().union(*LAYERS)) == files()


@pytest.mark.parametrize("name", files())
def test_a_file_imports_only_from_its_own_layer_or_earlier_ones(name: str):
    level = next(i for i, layer in enumerate(LAYERS) if name in layer)
    allowed = set().union(*LAYERS[: level + 1]) - {name}
    assert imported(name) <= allowed


def test_interception_knows_only_sites():
    below = {"sites", "errors", "arrays", "_private", "redirection", "linen", "scope", "wrapping"}
    below |= {"headroom", "layers", "dispatch"}
    for name in ("interception", "dispatch", "layers", "wrapping", "scope"):
        assert imported(name) <= below


def test_sites_and_summaries_know_nothing_of_the_others():
    assert imported("sites") <= {"errors", "arrays"}
    assert imported("summary") <= {"binning", "moments"}


def test_nothing_imports_the_inspector():
    assert not [name for name in files() if "inspector" in imported(name)]


@pytest.mark.parametrize("name", sorted(HOST_ONLY))
def test_reading_a_recording_imports_neither_jax_nor_flax(name: str):
    code = (
        f"import sys, nnx_inspector.{name}\n"
        "assert not {'jax', 'flax', 'jaxlib', 'pandas', 'plotly'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, nnx_inspector\nassert not {'jax', 'flax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_private_parts_of_flax_and_jax_are_touched_in_one_file_only():
    for name in files():
        text = "\n".join(texts_of(name))
        if name != "_private":
            assert "jax._src" not in text, name
            assert "graphlib" not in text, name


def test_every_public_name_resolves():
    assert set(nnx_inspector.__all__) == set(nnx_inspector._WHERE)
    for name in nnx_inspector.__all__:
        assert getattr(nnx_inspector, name).__doc__


def test_no_public_name_is_a_files_name():
    # importing a file binds its name in the package, over a function of the same name
    assert not set(nnx_inspector.__all__) & set(files())


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'caputre'"):
        nnx_inspector.caputre  # noqa: B018
