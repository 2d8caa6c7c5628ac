"""The answers in an inspector's page equal those that its screen gets."""

from __future__ import annotations

import base64
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside
from models import TwoLayers
from saved_pages import read_page

import nnx_inspector as nni
from nnx_inspector.inspector.export import content_of
from nnx_inspector.inspector.nnx.modes import Modes
from nnx_inspector.inspector.nnx.page import Pages
from nnx_inspector.inspector.panels import answer_look
from nnx_inspector.screen import protocol
from nnx_inspector.screen.export import replay

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


@pytest.fixture(scope="module")
def insp():
    made = nni.Inspector(TwoLayers(nnx.Rngs(0)), X, display=False)
    made.perturb("a", nni.Scale(0.5))
    made.selected = "b"
    yield made
    made.close()


@pytest.fixture(scope="module")
def unpacked(insp, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "run.html"
    assert insp.to_html(path) == path.stat().st_size
    return read_page(path.read_text())


def answers(unpacked, what):
    return dict(unpacked.index["answers"][what])


def test_every_header_is_a_valid_message(unpacked):
    index = unpacked.index
    for header in (index["layout"], index["state"], *index["kept"]):
        protocol.from_header(header)
    for packed in (index["curves"], index["passes"], *index["histories"]):
        protocol.from_header(packed["header"])
    for by_site in index["answers"].values():
        for _, one in by_site:
            if "header" in one:
                protocol.from_header(one["header"])


def test_its_state_is_the_screens_at_rest(insp, unpacked):
    state = protocol.from_header(unpacked.index["state"])
    assert state.selected == "b"
    assert [p.expression for p in state.perturbations] == ["nni.Scale(factor=0.5)"]
    assert not state.progress.running
    assert not state.closed
    assert state.effect == insp.effect


@pytest.mark.parametrize("what", ["code", "units"])
@pytest.mark.parametrize("site", ["", "a", "b"])
def test_an_answer_is_the_one_that_the_screen_gets(insp, unpacked, what, site):
    message, buffer = answer_look(inside(insp).core, protocol.Look(id=0, what=what, site=site))
    kept = answers(unpacked, what)[site]
    assert protocol.from_header(kept["header"]) == message
    assert unpacked.buffer(kept) == (buffer or b"")


def test_flow_and_state_of_every_module_are_there(unpacked):
    keys = [site["key"] for site in unpacked.index["layout"]["sites"]]
    flows, pages = answers(unpacked, "flow"), answers(unpacked, "nnx")
    assert list(flows) == ["b", *(key for key in keys if key != "b")]
    assert set(pages) == set(keys)
    flow = protocol.from_header(flows[""]["header"])
    assert {node.site for node in flow.nodes if node.role == "module"} == {"a", "b"}
    variables = protocol.from_header(pages["a"]["header"]).variables
    assert {one.path for one in variables} == {"a/bias", "a/kernel"}


def test_it_changes_neither_the_model_nor_what_the_screen_remembers(insp, tmp_path):
    before = [np.asarray(x) for x in jax.tree.leaves(nnx.state(insp.model))]
    remembered, selected = inside(insp).pages._snapshots, insp.selected  # what an export must leave
    passes = len(insp.recording)
    insp.to_html(tmp_path / "again.html")
    after = [np.asarray(x) for x in jax.tree.leaves(nnx.state(insp.model))]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert (inside(insp).pages._snapshots, insp.selected, len(insp.recording)) == (
        remembered,
        selected,
        passes,
    )


def test_of_large_models_the_selected_and_the_topmost_are_detailed(
    insp, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replay, "MOST_DETAILED", 2)
    insp.to_html(tmp_path / "run.html")
    index = read_page((tmp_path / "run.html").read_text()).index
    keys = [site["key"] for site in index["layout"]["sites"]]
    assert [keys[row] for row in index["detailed"]] == ["b", ""]
    assert "The details of 2 of 3 modules are kept." in index["note"]


def test_what_cannot_be_told_is_told_in_words(inspect, tmp_path: pathlib.Path):
    model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), lambda x: x.sum())
    insp = inspect(model, X)
    insp.to_html(tmp_path / "run.html")
    units = dict(read_page((tmp_path / "run.html").read_text()).index["answers"]["units"])
    assert "no array of numbers with an axis" in units[""]["error"]
    assert units["layers/0"]["header"]["units"] == 2


def test_a_closed_inspector_still_has_its_page(tmp_path: pathlib.Path):
    insp = nni.Inspector(TwoLayers(nnx.Rngs(0)), X, display=False)
    insp.run()
    insp.close()
    insp.to_html(tmp_path / "run.html")
    index = read_page((tmp_path / "run.html").read_text()).index
    assert len(index["frames"]) == 1
    assert not index["state"]["closed"]


def test_the_pictures_of_the_batch_are_on_the_page(inspect, tmp_path):
    images = jax.random.uniform(jax.random.key(0), (3, 9, 8, 1))
    conv = nnx.Conv(1, 2, (3, 3), rngs=nnx.Rngs(0))
    insp = inspect(conv, images)
    insp.to_html(tmp_path / "run.html")
    index = read_page((tmp_path / "run.html").read_text()).index
    (kept,) = (one for one in index["kept"] if one["type"] == "inputs")
    pictures = protocol.from_header(kept).pictures
    pixels = np.frombuffer(base64.b64decode(pictures.pixels), np.uint8).reshape(3, 9, 8, 1)
    np.testing.assert_array_equal(pixels, np.rint(np.asarray(images) * 255))


def test_the_model_is_read_once_for_the_pages_of_all_modules(insp, monkeypatch):
    core, read = inside(insp).core, []
    table = Modes.table
    monkeypatch.setattr(Modes, "table", lambda self: read.append(self) or table(self))
    content = content_of(core, ())
    assert len(content.answers["nnx"]) == len(core.trace.modules) > 1
    assert len(read) == 1
    for site, (page, _) in content.answers["nnx"].items():
        assert page == Pages(core).page(site, 0)  # as it is when read for this page alone
