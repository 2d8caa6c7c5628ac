"""The messages in a page, unpacked by hand and compared with those of the kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved_pages import PROGRESS, Unpacked, content_for
from summaries import VALUES, counts_in, normal_values, summary_of

from nnx_inspector.recordings.facts import PassStats
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.screen.export.replay import COLUMNS, pack_replay, round_shades, thin_passes
from nnx_inspector.screen.frames import (
    curves_of,
    frame_of,
    histories_of,
    metrics_at,
    passes_message,
)
from nnx_inspector.stats.samples.parameter_stats import PARAMETER_STATS
from nnx_inspector.stats.summary import SATURATED


def saturated():
    one = summary_of(normal_values(1))
    bins = one.bins.copy()
    bins[np.flatnonzero(bins)[0]] = SATURATED
    return dataclasses.replace(one, bins=bins)


def recorded() -> Recording:
    recording = Recording()
    names = list(VALUES)
    for step, name in enumerate([*names, *names[:4]]):
        sites = {"a": {"output": summary_of(VALUES[name])}}
        if step % 3:
            sites["b/c"] = {
                "output": summary_of(normal_values(step, 5000)),
                "gradient": saturated()
                if step == 4
                else summary_of(normal_values(step, scale=1e-4)),
            }
            sites["b/c/kernel"] = {"parameter": summary_of(normal_values(step, 300))}
        if step % 4 == 1:
            sites["b/c/kernel"] = {
                "parameter": summary_of(normal_values(step, 300)),
                "parameter_gradient": summary_of(normal_values(step, 300)),
            }
            sites["b/c/<b>"] = {"parameter": summary_of(VALUES["zeros"])}
        metrics = {"loss": np.nan if step == 2 else 1 / (step + 1)}
        rows = np.full((1, len(PARAMETER_STATS)), np.nan, np.float32)
        rows[0, PARAMETER_STATS.index("update")] = [0.25, np.nan, 0.0, np.inf][step % 4]
        figures = PassStats(parameters=("b/c/kernel",), parameter_rows=rows)
        more = {"perturbed": step > 8, "setting": int(step > 8), "figures": figures}
        recording.append(step, sites, metrics=metrics, **more)
    return recording


def test_every_message_is_the_kernels_own():
    recording, keys = recorded(), ("a", "b/c", "never")
    page = content_for(keys)
    unpacked = Unpacked(pack_replay(recording, recording.passes, page))
    index = unpacked.index
    for at, one in enumerate(recording.passes):
        shown = index["frames"][at]
        for row, selected in enumerate(keys):
            message, buffer = frame_of(
                one, keys=keys, selected=selected, metrics=metrics_at(recording, one.step),
                seq=1, layout=1, progress=PROGRESS, held=False,
            )  # fmt: skip
            table, sparks = unpacked.frame(at, len(keys))
            found = [unpacked.histogram(2 * row + q, at) for q in range(2)]
            counts = [one for one in found if one is not None]
            held = unpacked.parameters(row, at)
            figures = [of for _, of, _ in held]
            counts += [one for *_, those in held for one in those if one is not None]
            parts = table, unpacked.rows(at, len(keys)), *figures, sparks
            assert protocol.buffer_of(*parts, *counts) == buffer
            assert protocol.to_header(message)["parameters"] == [one for one, *_ in held]
            told_of = [(h.site, h.quantity, h.bytes) for h in message.histograms]
            assert told_of == [(row, q, len(one)) for q, one in enumerate(found) if one is not None]
            header = protocol.to_header(message)
            assert {name: header[name] for name in shown} == shown
    for name, (message, buffer) in {
        "curves": curves_of(recording),
        "passes": passes_message(recording.passes, recording.thinned),
    }.items():
        assert index[name]["header"] == protocol.to_header(message)
        assert unpacked.buffer(index[name]) == buffer
    assert protocol.from_header(index["layout"]) == page.layout
    assert protocol.from_header(index["state"]) == page.state


def test_histories_are_whole_and_their_shades_within_a_five_hundredth():
    recording = recorded()
    unpacked = Unpacked(pack_replay(recording, recording.passes[:2], content_for(("a", "b/c"))))
    exact = [
        one
        for site in ("a", "b/c")
        for one in histories_of(
            recording, keys=("a", "b/c"), selected=site, layout=1, columns=COLUMNS
        )
    ]
    assert len(exact) == len(unpacked.index["histories"]) == 7
    for (message, buffer), packed in zip(exact, unpacked.index["histories"], strict=True):
        assert packed["header"] == protocol.to_header(message)
        found, wanted = np.frombuffer(unpacked.buffer(packed)), np.frombuffer(buffer)
        if isinstance(message, protocol.Updates):
            assert unpacked.buffer(packed) == buffer
            continue
        shades = message.steps * protocol.HISTORY_BINS
        assert found[:-shades].tobytes() == wanted[:-shades].tobytes()
        np.testing.assert_allclose(found[-shades:], wanted[-shades:], rtol=1 / 500)
        assert ((found[-shades:] == 0) == (wanted[-shades:] == 0)).all()


@given(st.floats(1e-30, 1.0))
def test_a_shade_is_within_a_five_hundredth(fraction: float):
    assert round_shades(np.array([fraction]))[0] == pytest.approx(fraction, rel=1 / 500)


def passes(news: Sequence[bool]) -> list[Pass]:
    recording = Recording()
    for step in range(len(news)):
        recording.append(step, {})
    return [
        dataclasses.replace(one, news=new) for one, new in zip(recording.passes, news, strict=True)
    ]


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 70))
def test_thinning_keeps_the_ends_and_what_is_new(news: list[bool], most: int):
    all_ = passes(news)
    chosen = thin_passes(all_, most)
    numbers = [one.number for one in chosen]
    assert len(chosen) == min(len(all_), max(most, 2))
    assert numbers == sorted(set(numbers))
    assert {numbers[0], numbers[-1]} == {0, len(all_) - 1}
    wanted = {one.number for one in all_[1:-1] if one.news}
    assert len(wanted & set(numbers)) == min(len(wanted), len(chosen) - len({0, len(all_) - 1}))


def test_what_is_left_out_is_counted_and_said():
    recording = recorded()
    chosen = thin_passes(recording.passes, 4)
    page = content_for(("a",), note="With {passes}.")
    index = Unpacked(pack_replay(recording, chosen, page, left_out=len(recording) - 4)).index
    assert index["passes"]["header"]["passes"] == 4
    assert index["passes"]["header"]["thinned"] == len(recording) - 4
    assert index["note"] == f"With 4 of {len(recording)} passes, spaced evenly."
    whole = Unpacked(pack_replay(recording, recording.passes, page)).index
    assert whole["note"] == f"With all {len(recording)} passes."


def test_only_the_sites_asked_for_have_histograms_and_all_have_figures():
    recording = recorded()
    unpacked = Unpacked(
        pack_replay(recording, recording.passes, content_for(("a", "b/c"), detailed=["b/c"]))
    )
    assert unpacked.index["detailed"] == [1]
    assert {one["header"]["site"] for one in unpacked.index["histories"]} == {1}
    table, _ = unpacked.frame(1, 2)
    assert table[0, 0, 0] == VALUES["scaled"].size


def test_counts_beyond_32_bits_stay_exact():
    one = summary_of(np.ones(3, np.float32))
    recording = Recording()
    recording.append(0, {"a": {"output": dataclasses.replace(one, bins=one.bins * (2**33 + 1))}})
    unpacked = Unpacked(pack_replay(recording, recording.passes, content_for(("a",))))
    counts = unpacked.histogram(0, 0)
    assert counts is not None
    assert counts_in(counts) == {0x3F8: 3 * (2**33 + 1)}


def test_answers_are_kept_under_any_name():
    keys = ("__proto__", "constructor", "</script><!--", "\u2028", "\ud800"[:0] + "ok")
    code = {
        key: (
            protocol.Code(
                version=protocol.VERSION, id=0, site=key, kind=key, documentation=key,
                excerpts=(), sown=(), why="",
            ),
            None,
        )
        for key in keys
    }  # fmt: skip
    answers = {"code": {**code, "broken": "It <b>failed</b>."}}
    index = Unpacked(pack_replay(Recording(), (), content_for(keys, answers=answers))).index
    found = {site: one for site, one in index["answers"]["code"]}
    assert found.pop("broken") == {"error": "It <b>failed</b>."}
    assert {site: protocol.from_header(one["header"]) for site, one in found.items()} == {
        key: message for key, (message, _) in code.items()
    }


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 176 + 15])
def test_a_buffer_of_any_length_is_kept_bit_by_bit(size: int):
    buffer = np.random.default_rng(0).bytes(size)
    look = protocol.UnitStats(id=0, site="a", each=0, source="", units=0, more=0, why="")
    page = content_for(("a",))
    page = dataclasses.replace(page, answers={"units": {"a": (look, buffer)}})
    recording = recorded()
    unpacked = Unpacked(pack_replay(recording, recording.passes[:1], page))
    ((_, packed),) = unpacked.index["answers"]["units"]
    assert unpacked.buffer(packed) == buffer
