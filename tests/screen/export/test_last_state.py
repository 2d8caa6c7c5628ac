"""The content of a saved notebook: bounded for any model, and no text is ever markup."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from saved_pages import ELEMENTS, HOSTILE, Html, Unpacked, content_for, read_page
from summaries import normal_values, summary_of

from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.screen.export import last_state
from nnx_inspector.screen.export.last_state import (
    FEW_PASSES,
    MOST_BYTES,
    MOST_PASSES,
    MOST_RECORDED,
    LastState,
    fit_recording,
)
from nnx_inspector.screen.export.replay import PageContent
from nnx_inspector.stats.summary import Summary


def code(key: str) -> Any:
    return protocol.Code(
        version=protocol.VERSION, id=0, site=key, kind=key, documentation=key, excerpts=(),
        sown=(), why="",
    )  # fmt: skip


def recorded(keys: Sequence[str], passes: int, summaries: Sequence[Summary]) -> Recording:
    made = Recording()
    for step in range(passes):
        sites = {
            key: {"output": summaries[(step + i) % len(summaries)]} for i, key in enumerate(keys)
        }
        made.append(step, sites, metrics={"loss": 1 / (step + 1)})
    return made


def saved(recording: Recording, keys: Sequence[str], **state: Any) -> LastState:
    page = content_for(keys)

    def tell(layout: protocol.Layout, state: protocol.State, kept: tuple[Any, ...]) -> PageContent:
        answers = {"code": {key: (code(key), None) for key in page.detailed}}
        return dataclasses.replace(page, state=state, kept=kept, answers=answers)

    return LastState(
        inspector="0123",
        layout=page.layout,
        state=dataclasses.replace(page.state, **state),
        kept=(),
        recording=recording,
        content_of=tell,
    )


def replayed(html: str) -> Unpacked:
    return read_page(html, attribute='class="nni-saved-recording"', most=MOST_RECORDED)


NORMAL = [summary_of(normal_values(seed, 4000)) for seed in range(7)]


def test_the_screen_and_the_plain_html_are_of_the_same_state():
    made = recorded(("a", "b/c"), 9, NORMAL)
    html = saved(made, ("a", "b/c"), selected="b/c").html()
    assert html is not None
    index = replayed(html).index
    assert [one["step"] for one in index["frames"]] == made.steps
    assert index["state"]["selected"] == "b/c"
    assert index["missing"] == ["units", "nnx", "values", "compare"]
    said = re.search(r"The state at ([\d: -]+)\.", html)
    assert said
    assert index["note"].startswith(f"Saved {said[1]}, with all 9 passes.")
    table, _ = replayed(html).frame(8, 2)
    statistic = protocol.STATISTICS.index("mean")
    assert table[1, 0, statistic] == made.summary("b/c", index=-1).mean  # type: ignore[union-attr]


SCRIPTS = [("script", "nni-saved-page"), ("script", "nni-saved-recording"), ("script", "")]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_is_markup(text: str):
    if text == "\ud800":
        text = (
            "\N{REPLACEMENT CHARACTER}"  # what cannot be encoded is refused before: a key is UTF-8
        )
    html = saved(recorded((text,), 2, NORMAL), (text,)).html()
    assert html is not None
    elements = [(tag, more.get("class") or "") for tag, more in Html(html).elements]
    assert [one for one in elements if one[0] == "script"] == SCRIPTS
    assert elements[0] == ("div", "nni-saved nni-of-0123")
    assert {tag for tag, _ in elements} <= ELEMENTS | {"script"}
    found = dict(replayed(html).index["answers"]["code"])[text]["header"]
    assert found["documentation"] == text


@pytest.mark.parametrize(("rows", "passes"), [(1, 300), (24, 200), (300, 40), (1400, 3)])
def test_it_is_bounded_whatever_the_model(rows: int, passes: int):
    keys = [f"blocks/{i}/{'long' * 10}" for i in range(rows)]
    html = saved(recorded(keys, passes, NORMAL), keys, selected=keys[-1]).html()
    assert html is not None
    assert len(html.encode()) <= MOST_BYTES
    index = replayed(html).index
    steps = [one["step"] for one in index["frames"]]
    assert (steps[0], steps[-1]) == (0, passes - 1)
    assert len(steps) <= MOST_PASSES
    if rows <= 24:
        assert len(steps) >= FEW_PASSES
        assert len(index["detailed"]) == rows
    else:
        assert f" of {rows} modules are kept" in index["note"]
    if len(steps) < passes:
        assert f"{len(steps)} of {passes} passes" in index["note"]


def test_of_a_model_that_is_too_large_there_is_the_plain_html():
    keys = [f"{i}" for i in range(last_state.MOST_CELLS)]
    html = saved(recorded(keys[:5], 2, NORMAL), keys).html()
    assert html is not None
    assert "<script" not in html
    assert "more are left out" in html


def test_what_does_not_fit_at_all_is_none():
    recording = recorded(("a",), 4, NORMAL)
    assert fit_recording(recording, content_for(("a",)), max_bytes=100) is None


def test_before_the_first_pass_there_is_the_plain_html():
    html = saved(Recording(), ("a",)).html()
    assert html is not None
    assert "<script" not in html


def test_it_stops_when_it_is_told_to():
    recording = recorded(("a",), 4, NORMAL)
    assert saved(recording, ("a",)).html(lambda: True) is None
    assert fit_recording(recording, content_for(("a",)), stop=lambda: True) is None


def test_its_key_changes_with_what_is_shown_alone():
    recording = recorded(("a",), 2, NORMAL)
    first = saved(recording, ("a",))
    key = first.key()
    assert key == saved(recording, ("a",), seq=99).key()
    assert key != saved(recording, ("a",), selected="b").key()
    recording.append(2, {"a": {"output": summary_of(np.ones(3, np.float32))}})
    assert key != first.key()
