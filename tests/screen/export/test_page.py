"""The file of a saved page: bounded, written whole, and no text is ever markup."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re

import pytest
from saved_pages import Html, content_for, read_page
from summaries import normal_values, summary_of

from nnx_inspector.errors import InspectorError
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen.export import page
from nnx_inspector.screen.export.page import page_of
from nnx_inspector.screen.export.replay import pack_replay

HOSTILE = (
    "</title><script>window.hacked=1</script>", "<!--", "--><b>", "\u2028\u2029", "a\x00\x1b[31mb",
    "\ud800", "{title}{0}", "\ufffdrecording\ufffd", "&lt;img src=x onerror=alert(1)&gt;",
    "x" * 5000,
)  # fmt: skip


ELEMENTS = [
    "html", "head", "meta", "meta", "meta", "meta", "title", "style", "body", "main", "noscript",
    "script", "script",
]  # fmt: skip


def recording(steps: int = 40) -> Recording:
    made = Recording()
    for step in range(steps):
        made.append(step, {"a": {"output": summary_of(normal_values(step, 4000))}})
    return made


@pytest.mark.parametrize("title", HOSTILE)
def test_a_title_is_text(title: str):
    text = page_of(recording(2), content_for(("a", *HOSTILE[:2])), title=title)
    read = Html(text)
    assert [tag for tag, _ in read.elements] == ELEMENTS
    assert text.count('id="nni-recording"') == 1
    assert len(read.texts.get("title", [""])[0]) <= 200  # one of blanks is none to the reader
    text.encode()


def test_its_policy_allows_its_own_script_and_style_alone():
    read = Html(page_of(recording(2), content_for(("a",)), title="Net"))
    policy = next(a["content"] for _, a in read.elements if a.get("http-equiv"))
    rules = dict(rule.strip().split(" ", 1) for rule in (policy or "").split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for name, text in (
        ("script-src", read.texts["script"][-1]),
        ("style-src", read.texts["style"][0]),
    ):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[name].split()[0] == f"'sha256-{digest}'"
        assert "unsafe" not in rules[name]
    assert set(rules) == {
        "default-src", "script-src", "worker-src", "style-src", "img-src", "base-uri", "form-action"
    }  # fmt: skip
    assert not any(re.search("https?:", rule) for rule in rules.values())


def test_it_names_no_address():
    text = page_of(recording(2), content_for(("a",)), title="Net")
    found = set(re.findall(r"(?:https?|wss?)://[^\s\"'`)]+", text))
    assert {one for one in found if not one.startswith("http://www.w3.org/")} == set()


def test_the_whole_recording_is_kept_where_it_fits():
    made = recording()
    index = read_page(page_of(made, content_for(("a",), note="{passes}"), title="Net")).index
    assert [one["step"] for one in index["frames"]] == made.steps
    assert index["note"] == "all 40 passes"


def test_passes_are_left_out_evenly_where_it_does_not():
    made = recording(120)
    whole = len(page_of(made, content_for(("a",)), title="Net"))
    least = len(page_of(recording(2), content_for(("a",)), title="Net"))
    limit = (whole + least) // 2
    text = page_of(made, content_for(("a",), note="{passes}"), title="Net", max_bytes=limit)
    assert len(text.encode()) <= limit
    index = read_page(text).index
    steps = [one["step"] for one in index["frames"]]
    assert 20 < len(steps) < 120
    assert (steps[0], steps[-1]) == (0, 119)
    gaps = {b - a for a, b in itertools.pairwise(steps[1:-1])}
    assert max(gaps) - min(gaps) <= 1
    assert index["note"] == f"{len(steps)} of 120 passes, spaced evenly"


def test_it_says_how_much_it_needs_at_least():
    with pytest.raises(InspectorError, match=r"even with 2 of its passes, and max_bytes is 1,000"):
        page_of(recording(), content_for(("a",)), title="Net", max_bytes=1000)
    with pytest.raises(ValueError, match="positive"):
        page_of(recording(), content_for(("a",)), title="Net", max_bytes=0)


def test_what_the_browser_holds_is_bounded_too(monkeypatch: pytest.MonkeyPatch):
    made = recording()
    whole = len(pack_replay(made, made.passes, content_for(("a",))))
    monkeypatch.setattr(page, "MOST_UNPACKED", whole * 4 // 5)
    index = read_page(page_of(made, content_for(("a",)), title="Net")).index
    assert 2 < len(index["frames"]) < 40


def test_a_recording_without_a_pass_has_a_page():
    assert read_page(page_of(Recording(), content_for(("a",)), title="Net")).index["frames"] == []
