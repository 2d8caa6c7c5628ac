"""A recorded run on screen: the rows, passes and comparisons of the inspector that recorded it."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import clicks_of, inside, shown_of
from models import Stacked, TwoLayers
from summaries import normal_values, summary_of

import nnx_inspector as nni
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.recordings.tree_rows import (
    MODULES,
    Site,
    columns_of_rows,
    rows_of_columns,
    with_recorded,
)
from nnx_inspector.screen import protocol
from nnx_inspector.screen.comm import InspectorWidget
from nnx_inspector.screen.control.run_requests import NEEDS_MODEL
from nnx_inspector.screen.run import MODEL_PANELS

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


class Shared(nnx.Module):
    """A layer with two paths, one that is never called, and a call that returns two arrays."""

    def __init__(self, rngs):
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.again = self.first
        self.idle = nnx.Linear(3, 4, rngs=rngs)
        self.cell = nnx.SimpleCell(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.cell(jnp.zeros_like(x), self.again(self.first(x)))


MODELS = {
    "two layers": lambda: TwoLayers(nnx.Rngs(0)),
    "stacked": lambda: Stacked(nnx.Rngs(0)),
    "shared": lambda: Shared(nnx.Rngs(0)),
}


def ask(browser, run, message):
    """The replies of a run to a request."""
    return browser.ask_screen(shown_of(run).screen, clicks_of(run), message)


@pytest.fixture(params=MODELS, scope="module")
def recorded(request, tmp_path_factory):
    """An inspector of a model, and the file that it saves two passes to."""
    insp = nni.Inspector(MODELS[request.param](), X, display=False)
    path = tmp_path_factory.mktemp("recorded") / "run.nni"
    insp.save(path)
    insp.run(2 * X)
    yield insp, path
    insp.close()


@pytest.fixture
def run(recorded):
    with_file = nni.open(recorded[1], display=False)
    yield with_file
    with_file.close()


def test_the_rows_are_those_of_the_inspector(recorded, run):
    insp, _ = recorded
    rows = inside(insp).view.layout.sites
    assert shown_of(run).layout.sites == rows
    assert rows_of_columns(columns_of_rows(rows)) == rows
    assert shown_of(run).layout.model == inside(insp).view.layout.model
    assert run.recording.tables[MODULES].key.tolist() == [s.key for s in shown_of(run).layout.sites]


def test_every_pass_has_the_figures_of_the_inspector(recorded, run, browser):
    insp, _ = recorded
    for one, site in itertools.product(insp.recording.passes, insp.recording.sites):
        request = protocol.ShowPass(id=1, number=one.number, site=site)
        header, figures = next(
            sent for sent in browser.ask(insp, request) if sent[0]["type"] == "frame"
        )
        again, same = next(
            sent for sent in ask(browser, run, request) if sent[0]["type"] == "frame"
        )
        assert figures == same
        of_the_pass = ("step", "number", "histograms", "metrics", "perturbed")
        assert {k: header[k] for k in of_the_pass} == {k: again[k] for k in of_the_pass}


def test_requests_that_need_the_model_are_refused(run, browser):
    for message in (
        protocol.StartSweep(id=4, sites="**", kind="", strength=None, at="output"),
        protocol.Look(id=4, what="units", site=""),
        protocol.ShowFlow(id=4, site=""),
    ):
        (reply,) = [header for header, _ in ask(browser, run, message)]
        assert (reply["ok"], reply["error"]) == (False, NEEDS_MODEL)


def test_a_site_is_selected(run, browser):
    site = run.recording.sites[0]
    sent = ask(browser, run, protocol.Select(id=1, site=site))
    assert sent[-1][0]["ok"]
    assert run.selected == site
    with pytest.raises(ValueError, match="no site 'nowhere'"):
        run.selected = "nowhere"


def test_the_screen_says_that_the_model_is_not_here(run, browser):
    ask(browser, run, protocol.Hello(version=protocol.VERSION, streams=True, page="a", said=1))
    state = browser.messages("state")[-1][0]
    assert state["recorded"]["missing"] == list(MODEL_PANELS)
    assert "run.nni" in state["recorded"]["text"]
    assert state["cost"] is None
    assert browser.messages("layout")
    assert browser.messages("frame")


def test_figures_and_findings_are_those_of_the_recording(recorded, run):
    insp, path = recorded
    assert run.findings == nni.diagnose(nni.load(path))
    # as text: with plotly 5 a figure with NaN in it equals no figure
    assert run.figure("").to_json() == insp.figure("").to_json()


def test_a_page_is_written_without_the_model(run, tmp_path):
    size = run.to_html(tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    assert len(text.encode()) == size
    assert "run.nni - nnx_inspector" in text


def test_another_run_stands_beside_it(recorded, tmp_path, browser):
    insp, path = recorded
    insp.recording.save(tmp_path / "other.nni")
    frame = nni.compare(nni.load(tmp_path / "other.nni"), nni.load(path))
    run = nni.open([path, tmp_path / "other.nni"], display=False)
    number = run.recording.passes[-1].number
    asked = protocol.Compare(id=1, number=number, pinned=protocol.OTHER)
    sent = ask(browser, run, asked)
    compared = next(header for header, _ in sent if header["type"] == "compared")
    shown = frame[frame.quantity.isin(protocol.QUANTITIES)]
    assert [row["site"] for row in compared["rows"]] == shown.site.tolist()
    assert run.compare(tmp_path / "other.nni").equals(run.compare(nni.load(path)))
    assert run.compare(None) is None
    run.close()


@pytest.mark.parametrize("paths", [[], ["a", "b", "c"]])
def test_one_or_two_runs(paths):
    with pytest.raises(ValueError, match=f"got {len(paths)} paths"):
        nni.open(paths)


@pytest.mark.parametrize("path", [None, 3, {"a": "b"}, nni.Recording()])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(TypeError, match=f"got {type(path).__name__}"):
        nni.open(path)


# ------------------------------------------------------------------ its rows


def test_rows_of_a_file_without_the_newest_columns_are_read():
    rows = with_recorded((), ["a"], {})
    table = columns_of_rows([dataclasses.replace(row, step_ms=1.5, kept_bytes=8.0) for row in rows])
    assert [row.step_ms for row in rows_of_columns(table)] == [1.5, 1.5]
    for name in ("step_ms", "kept_bytes", "of_possible"):
        del table[name]
    assert rows_of_columns(table) == rows


KEYS = [
    *("a/b", "a/b/c", "a", "", "blocks", "blocks[1]", "blocks/attn", "blocks/attn[1]", "cell(0.1)"),
    *("cell", "enc:encode", "enc:encode@softmax", "enc", r"odd\/name"),
]


@pytest.mark.parametrize("seed", range(5))
def test_a_file_without_a_table_has_a_row_for_each_site(seed):
    keys = np.random.default_rng(seed).permutation(KEYS).tolist()
    rows = with_recorded((), keys, {"": "Net", "blocks": "Block"})
    above = {row.key: rows[row.parent].key if row.parent >= 0 else None for row in rows}
    assert above == {
        "": None, "a": "", "a/b": "a", "a/b/c": "a/b", "blocks": "", "blocks/attn": "blocks",
        "blocks[1]": "blocks", "blocks/attn[1]": "blocks[1]", "cell": "", "cell(0.1)": "cell",
        "enc": "", "enc:encode": "enc", "enc:encode@softmax": "enc:encode", r"odd\/name": "",
    }  # fmt: skip
    assert rows_of_columns(columns_of_rows(rows)) == rows
    assert {row.key: row.name for row in rows}[r"odd\/name"] == "odd/name"
    assert [row.kind for row in rows if row.key == ""] == ["Net"]


def file_of(tmp_path, table):
    recording = Recording()
    recording.append(0, {"a": {"output": summary_of(normal_values(0))}})
    recording.keep_table(MODULES, table)
    recording.save(tmp_path / "odd.nni")
    return tmp_path / "odd.nni"


def changed(**columns):
    (row,) = with_recorded((), [], {})
    return {**columns_of_rows([row]), **columns}


@pytest.mark.parametrize(
    "table",
    [
        {"key": np.array(["a"], object)},
        changed(parent=np.array([0])),
        changed(depth=np.array([3])),
        changed(parent=np.array(["up"], object)),
        changed(aliases=np.array(["{"], object)),
        changed(aliases=np.array(["[" * 100_000], object)),
        changed(calls=np.array([np.inf])),
        changed(flops=np.array(["many"], object)),
    ],
)
def test_a_table_that_is_no_tree_is_left_aside(tmp_path, table, browser):
    run = nni.open(file_of(tmp_path, table), display=False)
    assert [row.key for row in shown_of(run).layout.sites] == ["", "a"]
    ask(browser, run, protocol.Hello(version=protocol.VERSION, streams=True, page="a", said=1))
    (notice,) = browser.messages("state")[-1][0]["notices"]
    assert "cannot be shown" in notice["text"]
    run.close()


def test_a_site_that_is_not_in_the_table_has_a_row(tmp_path):
    run = nni.open(file_of(tmp_path, changed()), display=False)
    assert [(row.key, row.parent) for row in shown_of(run).layout.sites] == [("", -1), ("a", 0)]
    assert isinstance(shown_of(run).layout.sites[1], Site)
    run.close()


# ---------------------------------------------------------------- following


def test_new_passes_come_to_the_screen_by_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr("nnx_inspector.screen.run.LOOK_INTERVAL", 0.01)
    recording, came = Recording(), threading.Event()
    recording.attach(tmp_path / "run.nni", print)
    recording.append(0, {"a": {"output": summary_of(normal_values(0))}})

    def send(widget, content, buffers=None):
        if content["type"] == "frame" and content["step"] == 7:
            came.set()

    monkeypatch.setattr(InspectorWidget, "send", send)
    run = nni.open(tmp_path / "run.nni", display=False)
    run._repr_mimebundle_()
    recording.append(7, {"b": {"output": summary_of(normal_values(1))}}, metrics={"loss": 1.0})
    assert came.wait(60)
    assert [row.key for row in shown_of(run).layout.sites] == ["", "a", "b"]
    assert run.state == "running"
    recording.detach()
    assert run.state == "ended"
    run.close()
    assert "closed" in repr(run)


@pytest.mark.parametrize("recorded", ["stacked"], indirect=True)
def test_it_needs_no_jax(recorded):
    _, path = recorded
    code = f"""
import sys
import nnx_inspector as nni
run = nni.open({str(path)!r})
run.findings, run.state
run.to_html({str(path.with_suffix(".html"))!r})
assert not {{"jax", "flax"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
