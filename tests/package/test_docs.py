"""The README and the pages of the site: their code runs, their links and names exist.

A page's Python blocks run in their order and share one namespace, as if a reader typed them. Only a
block after `<!-- not run: why -->` is skipped.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import itertools
import pathlib
import re
import tomllib
from typing import Any, NamedTuple

import pytest

import nnx_inspector as nni

ROOT = pathlib.Path(__file__).parents[2]
SITE = ROOT / "notebooks"
PAGES = [ROOT / "README.md", *sorted(SITE.glob("*.md")), *sorted((SITE / "docs").rglob("*.md"))]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "nnx_inspector").rglob("*.py")
    if ">>> " in path.read_text()
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONTINUES = "<!-- continues guide.md -->"
"""In a page whose code uses the model of the guide."""
RUN, SHOWN = {"python"}, {"text"}
"""Languages of blocks that run, and of blocks that are not code (output, diagrams)."""


class Block(NamedTuple):
    """One fenced block: language, first line number, text, why it is not run, what printed it."""

    language: str
    line: int
    text: str
    reason: str
    printed: str


def blocks(path: pathlib.Path) -> list[Block]:
    """The fenced blocks of a page in order, without Sphinx directives."""
    found, lines, at = [], path.read_text(encoding="utf-8").splitlines(), 0
    while at < len(lines):
        if not lines[at].startswith("```"):
            assert "```" not in lines[at], f"{path.name}:{at + 1}: a fence begins its line"
            at += 1
            continue
        end = lines.index("```", at + 1)
        above = next((line for line in reversed(lines[:at]) if line), "")
        reason = re.fullmatch(r"<!-- not run: (.{12,}) -->", above)
        printed = re.fullmatch(r"<!-- printed by (.+) -->", above)
        text = "\n".join(lines[at + 1 : end]) + "\n"
        if not lines[at].startswith("```{"):
            why, by = (match[1] if match else "" for match in (reason, printed))
            found.append(Block(lines[at][3:], at + 2, text, why, by))
        at = end + 1
    return found


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", [p for p in PAGES if blocks(p)], ids=name_of)
def test_the_code_of_a_page_runs(
    path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # keep files that a page writes out of the checkout
    namespace: dict[str, Any] = {"__name__": "page"}
    said = io.StringIO()
    before = [path.with_name("guide.md")] if CONTINUES in path.read_text() else []
    for block in itertools.chain(*map(blocks, [*before, path])):
        if block.language in RUN and not block.reason:
            code = "\n" * (block.line - 1) + block.text  # so that a traceback shows the page's line
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(code, str(path), "exec"), namespace)
        elif block.printed == "the block above":
            assert words(block.text) == words(said.getvalue())


def words(text: str) -> list[Any]:
    """The words of a text; numbers up to rounding, which differs between versions of jax."""
    number = re.compile(r"([-+]?\d+\.\d+(?:e[-+]?\d+)?)")
    parts = [part for word in text.split() for part in number.split(word) if part]
    return [pytest.approx(float(p), rel=1e-3, abs=1e-6) if number.match(p) else p for p in parts]


def test_ten_lines_are_ten():
    code = next(b.text for b in blocks(ROOT / "README.md") if b.language == "python")
    assert len([line for line in code.splitlines() if line]) == 10


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_what_is_not_run_says_why(path: pathlib.Path):
    for block in blocks(path):
        where = f"{name_of(path)}:{block.line}"
        assert block.language, f"{where} has no language"
        runs = block.language in RUN and not block.reason
        assert runs or block.reason or block.language in SHOWN, f"{where} is not run, and not why"
        if block.language in RUN and block.reason:
            compile(block.text, where, "exec")  # still Python


def test_most_code_runs():
    every = [b for path in PAGES for b in blocks(path) if b.language in RUN]
    assert len([b for b in every if not b.reason]) >= 30
    assert len([b for b in every if b.reason]) <= len(every) / 3


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_what_a_page_links_to_exists(path: pathlib.Path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("https://", "mailto:")):
            file, _, heading = target.partition("#")
            there = (path.parent / file).resolve() if file else path
            assert there.exists(), f"{name_of(path)} links to {target}"
            assert not heading or heading in headings(there), f"{name_of(path)}: {target}"


def headings(path: pathlib.Path) -> set[str]:
    """The anchors of a page, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_what_a_page_names_exists(path: pathlib.Path):
    text = path.read_text()
    for name in re.findall(r"\bnni\.(\w+)", text):
        assert hasattr(nni, name), f"{name_of(path)} names nni.{name}"
    for name in re.findall(r"\binsp\.(\w+)", text):
        assert hasattr(nni.Inspector, name), f"{name_of(path)} names insp.{name}"
    for name in re.findall(r"`((?:nnx_inspector|tests|notebooks|js)/[\w./-]+\w)`", text):
        assert (ROOT / name).exists(), f"{name_of(path)} names {name}"
    for name in re.findall(r"python3? (\S+\.py)\b", text):
        assert (ROOT / name).exists(), f"{name_of(path)} runs {name}"


def test_the_words_of_the_guide_are_on_screen():
    page = (
        (SITE / "docs" / "screen.md").read_text().partition("| words | meaning |\n|---|---|\n")[2]
    )
    words = re.findall(r"^\| ([^|]+) \|", page.partition("\n\n")[0], flags=re.MULTILINE)
    screen = "".join(path.read_text() for path in (ROOT / "js" / "src").rglob("*.tsx"))
    assert len(words) >= 8
    assert [word for row in words for word in row.split(", ") if word not in screen] == []


@pytest.mark.parametrize("name", ["design", "contributing"])
def test_the_files_that_a_page_names_exist(name: str):
    text = (SITE / "docs" / f"{name}.md").read_text()
    files = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", text)) | set(
        re.findall(r"`(\w+\.py)`", text)
    )
    places = (ROOT, ROOT / "nnx_inspector", *(ROOT / "nnx_inspector").glob("*/"))
    missing = {file for file in files if not any((place / file).exists() for place in places)}
    assert len(files) > 10
    assert not missing


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_docstrings_run(name: str):
    module = importlib.import_module(name)
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS, report=True)
    assert found.attempted, f"{name} has an example that doctest does not find"
    assert not found.failed


def test_every_public_name_is_in_the_reference():
    text = "".join(path.read_text() for path in (SITE / "docs" / "reference").glob("*.md"))
    described = set(re.findall(r"^\.\. auto\w+:: (\w+)$", text, flags=re.MULTILINE))
    assert described == set(nni.__all__)


def test_every_public_name_has_a_docstring():
    for name in nni.__all__:
        doc = getattr(nni, name).__doc__
        assert doc, name
        assert not doc.startswith(f"{name}("), f"{name} has no docstring of its own"


# ------------------------------------------------------------ version and citation


def test_the_changelog_is_of_this_version_and_no_other_file_names_one():
    log = (SITE / "docs" / "changelog.md").read_text()
    first = re.search(r"^## (\S+)", log, flags=re.MULTILINE)
    assert first
    assert first[1] in (PROJECT["version"], "Unreleased")
    cited = (SITE / "docs" / "CITATION.cff").read_text()
    assert not re.search(r"^version:", cited, flags=re.MULTILINE)  # the version has one place
    assert f"\nlicense: {PROJECT['license']}\n" in cited
