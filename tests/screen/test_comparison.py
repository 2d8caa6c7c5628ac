"""Another run beside the one on screen: every figure is that of `nni.compare`."""

from __future__ import annotations

import json
import math

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx
from inside import inside
from models import Stacked, TwoLayers
from summaries import normal_values, summary_of

import nnx_inspector as nni
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.screen.comparison import comparison_message, other_pass

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


@pytest.fixture
def insp():
    made = nni.Inspector(TwoLayers(nnx.Rngs(0)), X, display=False)
    inside(made).rerun.wait_for_first()
    yield made
    made.close()


@pytest.fixture(scope="module")
def other():
    made = nni.Inspector(TwoLayers(nnx.Rngs(7)), X, display=False)
    inside(made).rerun.wait_for_first()
    made.close()
    return made.recording


STATISTICS = ("mean", "std", "rms")


def ask(number: int, pinned: int = protocol.OTHER) -> protocol.Compare:
    return protocol.Compare(id=3, number=number, pinned=pinned)


def figures(frame):
    """The rows of a frame in the form of a message."""
    names = (*("total_variation", "quantile_distance"), *(f"{f}_difference" for f in STATISTICS))
    return [
        {
            **{name: row[name] for name in ("site", "quantity")},
            "where": {"both": "both", "a": "pinned", "b": "here"}[row["in"]],
            "constant": math.isinf(row["quantile_distance"]),
            **{name: row[name] if math.isfinite(row[name]) else None for name in names},
            "nan": None if pd.isna(row["nan_b"]) else row["nan_b"],
            "nan_pinned": None if pd.isna(row["nan_a"]) else row["nan_a"],
        }
        for _, row in frame.iterrows()
    ]


def without_shapes(header):
    return [{name: row[name] for name in row if name != "shapes"} for row in header["rows"]]


def test_the_frame_is_returned_and_the_other_pass_can_be_asked_for(browser, insp, other, tmp_path):
    other.save(tmp_path / "before.nni")
    browser.sent.clear()
    frame = insp.compare(nni.load(tmp_path / "before.nni"))
    assert frame.equals(nni.compare(other, insp.recording))
    ((header, _),) = browser.messages("other")
    assert (header["name"], header["step"]) == ("before.nni", 0)
    shown = browser.ask(insp, protocol.ShowPass(id=7, number=protocol.OTHER, site="b"))
    assert [h["type"] for h, _ in shown] == ["frame", "reply"]
    frame, buffer = shown[0]
    assert (frame["number"], frame["held"], frame["metrics"]) == (protocol.OTHER, True, {})
    shape = (len(inside(insp).view.keys), len(protocol.QUANTITIES), len(protocol.STATISTICS))
    table = np.frombuffer(buffer[: 8 * math.prod(shape)], "<f8").reshape(shape)
    at = inside(insp).view.keys.index("b"), 0, protocol.STATISTICS.index("norm")
    assert table[at] == other.summary("b").norm != insp.recording.summary("b").norm


def test_a_comparison_on_screen_has_the_frames_figures(browser, insp, other):
    frame = insp.compare(other)
    insp.run(2 * X)
    sent = browser.ask(insp, ask(0))
    assert [header["type"] for header, _ in sent] == ["compared", "reply"]
    header = sent[0][0]
    assert (header["id"], header["number"], header["pinned"]) == (3, 0, protocol.OTHER)
    assert without_shapes(header) == figures(frame)
    assert header["total"] == len(frame)
    newest = browser.ask(insp, ask(1))[0][0]
    assert without_shapes(newest) == figures(nni.compare(other, insp.recording))
    assert newest["rows"] != header["rows"]


def test_two_passes_of_one_run_are_compared(browser, insp):
    insp.run(2 * X)
    (header, _), (reply, _) = browser.ask(insp, ask(1, pinned=0))
    assert reply["ok"]
    passes = insp.recording.passes
    rows = {(row["site"], row["quantity"]): row for row in header["rows"]}
    for site, quantity, summary in passes[1].of_sites.items():
        wanted = summary.mean - passes[0].summary(site, quantity).mean
        assert rows[site, quantity]["mean_difference"] == wanted
    same = browser.ask(insp, ask(1, pinned=1))[0][0]
    assert {row["total_variation"] for row in same["rows"]} == {0.0}


@pytest.mark.parametrize(
    ("number", "pinned", "text"),
    [(99, 0, "Pass 99 is not in the recording"), (0, -1, "There is no other run")],
)
def test_what_is_not_there_is_the_reply(browser, insp, number, pinned, text):
    ((reply, _),) = browser.ask(insp, ask(number, pinned))
    assert not reply["ok"]
    assert text in reply["error"]


def test_a_new_view_is_told_again_and_none_takes_it_away(browser, insp, other):
    insp.compare(other, name="seed 7")

    def hello(said):
        return protocol.Hello(version=protocol.VERSION, streams=True, page="a", said=said)

    browser.ask(insp, hello(1))
    ((told, _),) = browser.messages("other")
    assert told["name"] == "seed 7"
    assert insp.compare(None) is None
    browser.ask(insp, hello(2))
    ((gone, _),) = browser.messages("other")
    assert gone["name"] == ""
    assert gone["number"] > told["number"]
    assert not browser.ask(insp, ask(0))[0][0]["ok"]


def test_a_record_of_another_model_with_layers(browser):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    insp = nni.Inspector(Stacked(nnx.Rngs(0)), x, display=False)
    _, record = nni.capture(Stacked(nnx.Rngs(1)))(x)
    frame = insp.compare(record)
    assert set(frame[frame["in"] == "a"]["quantity"]) == {"input"}, "nothing else is missing here"
    ((header, _),) = browser.messages("other")[-1:]
    assert (header["name"], header["step"]) == ("a record", None)
    sent = browser.ask(insp, ask(0))[0][0]
    assert without_shapes(sent) == figures(frame[frame["quantity"] != "input"])
    of_one = {row["site"]: row for row in sent["rows"]}["blocks/linear[1]"]
    ours = insp.recording.summary("blocks/linear[1]").mean
    assert of_one["mean_difference"] == pytest.approx(
        ours - record["blocks/linear"].row(1).output.mean
    )
    insp.close()


def test_an_argument_that_is_neither_changes_nothing(browser, insp, other):
    insp.compare(other)
    with pytest.raises(TypeError, match=r"takes two Recordings or Records, got str for a"):
        insp.compare("run.nni")
    with pytest.raises(ValueError, match=r"has no pass at step 12"):
        insp.compare(other, at=12)
    assert browser.ask(insp, ask(0))[0][0]["type"] == "compared"


def shapes_of(a, b):
    """The heights of `b`, on screen, and of the pinned `a`, on the axis that they share."""
    one, other = Recording(), Recording()
    one.append(0, {"c": {"output": summary_of(np.asarray(a, np.float32))}})
    other.append(0, {"c": {"output": summary_of(np.asarray(b, np.float32))}})
    (row,) = comparison_message(ask(0), other.passes[0], other_pass(one, None, sites=("c",))).rows
    if not row.shapes:
        return None
    heights = np.frombuffer(bytes.fromhex(row.shapes), np.uint8).astype(int)
    return heights.reshape(2, protocol.SPARK)


def test_both_histograms_of_a_row_are_on_one_axis():
    x = np.linspace(0, 1, 4000)
    here, pinned = shapes_of(x, 10 * x)
    assert (here > 0).all()  # 0 to 10 fills the axis
    assert (pinned[4:] == 0).all()
    assert (pinned[:3] > 0).all()
    assert abs(here.sum() / pinned.sum() - 1) < 0.15  # equal areas, whatever the heights
    here, pinned = shapes_of(np.repeat(x, 8), x)
    assert abs(here - pinned).max() <= 2  # as many values or more: the same shape


def test_histograms_of_constants_and_of_what_is_not_finite():
    here, pinned = shapes_of(np.zeros(9), np.linspace(-1, 1, 900))
    assert pinned.argmax() in (protocol.SPARK // 2 - 1, protocol.SPARK // 2)
    assert (here > 0).all()
    assert here.max() < pinned.max()
    assert shapes_of([np.nan] * 3, [np.nan] * 3) is None
    found = shapes_of([np.nan] * 3, [1.0, 2.0, 3.0])
    assert found is None or (found[0].max() == 255 and not found[1].any())


def test_what_has_no_figure_travels_as_json():
    x = np.array([1, 1], np.float32)
    a, b = Recording(), Recording()
    a.append(0, {"c": {"output": summary_of(x)}, "only": {"output": summary_of(x)}})
    b.append(
        0, {"c": {"output": summary_of(2 * x)}, "new": {"gradient": summary_of(normal_values(0))}}
    )
    message = comparison_message(ask(0), b.passes[0], other_pass(a, None, sites=b.sites))
    assert protocol.from_header(json.loads(protocol.to_json(message))) == message
    rows = {row.site: row for row in message.rows}
    assert (rows["c"].constant, rows["c"].quantile_distance, rows["c"].total_variation) == (
        True,
        None,
        1.0,
    )
    assert (rows["only"].where, rows["only"].nan, rows["only"].nan_pinned) == ("pinned", None, 0)
    assert (rows["new"].where, rows["new"].nan, rows["new"].nan_pinned) == ("here", 0, None)


def test_the_farthest_travel_of_many():
    a, b = Recording(), Recording()
    many = protocol.MOST_RANKED + 5
    summary = summary_of(normal_values(0))
    a.append(0, {f"s{i}": {"output": summary} for i in range(many)})
    far = {"output": summary_of(normal_values(0) + 9)}
    b.append(0, {f"s{i}": far if i == many - 1 else {"output": summary} for i in range(many)})
    message = comparison_message(ask(0), b.passes[0], other_pass(a, None, sites=b.sites))
    assert (len(message.rows), message.total) == (protocol.MOST_RANKED, many)
    assert message.rows[0].site == f"s{many - 1}"


def test_layers_of_another_run_are_called_as_here():
    unrolled, stacked = Recording(), Recording()
    parts = {i: {"output": summary_of(normal_values(i))} for i in range(2)}
    unrolled.append(0, {f"blocks/{i}/up": parts[i] for i in range(2)})
    stacked.append(0, {f"blocks/up[{i}]": parts[i] for i in range(2)})
    for here, there in ((unrolled, stacked), (stacked, unrolled)):
        other = other_pass(there, None, sites=here.sites)
        assert set(other.keys) == set(here.passes[0].keys)
        rows = comparison_message(ask(0), here.passes[0], other).rows
        assert {(row.where, row.total_variation) for row in rows} == {("both", 0.0)}


def test_weights_are_compared_on_screen(browser):
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    before = nnx.clone(model)
    insp = nni.Inspector(model, jnp.ones((2, 4)), display=False)
    model.kernel[...] *= 1.5
    frame = insp.compare(before, name="before")
    assert frame is not None
    assert frame.equals(nni.compare_weights(before, model))
    message = inside(insp).view.last_message("weights")
    assert (message.name, message.total) == ("before", 2)
    moved, still = message.rows
    assert (moved.parameter, still.parameter) == ("kernel", "bias")
    assert abs(moved.relative_change - 0.5) < 1e-6
    assert (moved.distance, still.distance) == (frame.distance[0], 0.0)
    assert len(bytes.fromhex(moved.change)) == protocol.SPARK
    assert insp.compare(None) is None
    assert inside(insp).view.last_message("weights").name == ""
    insp.close()
