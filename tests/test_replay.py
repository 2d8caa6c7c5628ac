"""What a page replays: unpacked here by hand, and compared with the messages of the kernel."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import VALUES, normal, summary_of

from nnx_inspector import protocol
from nnx_inspector.passes import Pass
from nnx_inspector.presenting import curves_of, frame_of, histories_of
from nnx_inspector.recording import Recording
from nnx_inspector.replay import COLUMNS, NO_HISTOGRAM, Told, evenly, replayed, shade
from nnx_inspector.summary import SATURATED
from nnx_inspector.timeline import metrics_at, passes_of

PROGRESS = protocol.Progress(kind="watch", running=False, step=3, total=None, rate=None)
COST = protocol.Cost(
    plain_seconds=None, inspected_seconds=None, compilations=0, bytes_sent=0, frames_dropped=0,
    errors=0,
)  # fmt: skip


def told(keys: Sequence[str], **more: Any) -> Told:
    sites = tuple(
        protocol.Site(
            key=key, name=key, kind="Linear", parent=-1, depth=0, inputs="", output="",
            parameters=0, flops=None, calls=1, stacked=1, aliases=(), source="",
            perturbable=True, unseen="",
        )
        for key in keys
    )  # fmt: skip
    state = protocol.State(
        version=protocol.VERSION, seq=1, selected=keys[0], perturbations=(),
        training_perturbed=False, listening="after", compiling=0, effect=None, no_effect="",
        progress=PROGRESS, cost=COST, notices=(), python="", closed=False,
    )  # fmt: skip
    layout = protocol.Layout(version=protocol.VERSION, layout=1, model="Net", sites=sites)
    return Told(layout=layout, state=state, detailed=tuple(more.pop("detailed", keys)), **more)


class Unpacked:
    """A second reading of the format, of the test's own."""

    def __init__(self, data: bytes):
        (length,) = struct.unpack_from("<I", data)
        self.index = json.loads(data[4 : 4 + length])
        self._data = data[4 + length :]

    def numbers(self, place: Mapping[str, Any]) -> np.ndarray:
        dtype = np.dtype(f"<{place['type']}")
        size = place["count"] * dtype.itemsize
        part = np.frombuffer(self._data, "u1", size, place["at"])
        planes = part.reshape(dtype.itemsize, place["count"])
        return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)

    def buffer(self, packed: Mapping[str, Any]) -> bytes:
        return b"".join(self.numbers(p).astype("<f8").tobytes() for p in packed["buffer"])

    def frame(self, at: int, sites: int) -> tuple[np.ndarray, np.ndarray]:
        count = len(self.index["frames"])
        table = self.numbers(self.index["table"]).reshape(sites, 2, -1, count)[..., at]
        sparks = self.numbers(self.index["sparklines"]).reshape(sites, 2, count, -1)[:, :, at]
        return table, sparks

    def histogram(self, pair: int, at: int) -> np.ndarray | None:
        lengths = self.numbers(self.index["lengths"]).astype(int)
        i = pair * len(self.index["frames"]) + at
        if lengths[i] == NO_HISTOGRAM:
            return None
        start = lengths[:i][lengths[:i] != NO_HISTOGRAM].sum()
        here = slice(start, start + lengths[i])
        bins = np.cumsum(self.numbers(self.index["bins"])[here].astype(int)) & 0xFFFF
        return np.stack([bins, self.numbers(self.index["counts"])[here]], axis=1).astype(float)


def saturated():
    one = summary_of(normal(1))
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
                "output": summary_of(normal(step, 5000)),
                "gradient": saturated() if step == 4 else summary_of(normal(step, scale=1e-4)),
            }
        metrics = {"loss": np.nan if step == 2 else 1 / (step + 1)}
        recording.append(step, sites, metrics=metrics, perturbed=step > 8, setting=int(step > 8))
    return recording


def test_every_message_is_the_kernels_own():
    recording, keys = recorded(), ("a", "b/c", "never")
    page = told(keys)
    unpacked = Unpacked(replayed(recording, recording.passes, page))
    index = unpacked.index
    for at, one in enumerate(recording.passes):
        shown = index["frames"][at]
        for row, selected in enumerate(keys):
            message, buffer = frame_of(
                keys=keys, parts=one.parts(), selected=selected, seq=1, layout=1, step=one.step,
                perturbed=one.perturbed, metrics=metrics_at(recording, one.step),
                progress=PROGRESS, number=one.number,
            )  # fmt: skip
            table, sparks = unpacked.frame(at, len(keys))
            found = [unpacked.histogram(2 * row + q, at) for q in range(2)]
            bodies = [pairs for pairs in found if pairs is not None]
            assert protocol.frame_buffer(table, bodies, sparks) == buffer
            told_of = [(h.site, h.quantity, h.bins) for h in message.histograms]
            assert told_of == [
                (row, q, len(pairs)) for q, pairs in enumerate(found) if pairs is not None
            ]
            header = protocol.to_header(message)
            assert {name: header[name] for name in shown} == shown
    for name, (message, buffer) in {
        "curves": curves_of(recording),
        "passes": passes_of(recording),
    }.items():
        assert index[name]["header"] == protocol.to_header(message)
        assert unpacked.buffer(index[name]) == buffer
    assert protocol.from_header(index["layout"]) == page.layout
    assert protocol.from_header(index["state"]) == page.state


def test_histories_are_whole_and_their_shades_within_a_five_hundredth():
    recording = recorded()
    unpacked = Unpacked(replayed(recording, recording.passes[:2], told(("a", "b/c"))))
    exact = [
        one
        for site in ("a", "b/c")
        for one in histories_of(
            recording, keys=("a", "b/c"), selected=site, layout=1, columns=COLUMNS
        )
    ]
    assert len(exact) == len(unpacked.index["histories"]) == 3
    for (message, buffer), packed in zip(exact, unpacked.index["histories"], strict=True):
        assert packed["header"] == protocol.to_header(message)
        found, wanted = np.frombuffer(unpacked.buffer(packed)), np.frombuffer(buffer)
        shades = message.steps * protocol.HISTORY_BINS
        assert found[:-shades].tobytes() == wanted[:-shades].tobytes()
        np.testing.assert_allclose(found[-shades:], wanted[-shades:], rtol=1 / 500)
        assert ((found[-shades:] == 0) == (wanted[-shades:] == 0)).all()


@given(st.floats(1e-30, 1.0))
def test_a_shade_is_within_a_five_hundredth(fraction: float):
    assert shade(np.array([fraction]))[0] == pytest.approx(fraction, rel=1 / 500)


def passes(news: Sequence[bool]) -> list[Pass]:
    recording = Recording()
    for step in range(len(news)):
        recording.append(step, {})
    return [
        dataclasses.replace(one, news=new) for one, new in zip(recording.passes, news, strict=True)
    ]


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 70))
def test_evenly_keeps_the_ends_and_what_is_new(news: list[bool], most: int):
    all_ = passes(news)
    chosen = evenly(all_, most)
    numbers = [one.number for one in chosen]
    assert len(chosen) == min(len(all_), max(most, 2))
    assert numbers == sorted(set(numbers))
    assert {numbers[0], numbers[-1]} == {0, len(all_) - 1}
    wanted = {one.number for one in all_[1:-1] if one.news}
    assert len(wanted & set(numbers)) == min(len(wanted), len(chosen) - len({0, len(all_) - 1}))


def test_what_is_left_out_is_counted_and_said():
    recording = recorded()
    chosen = evenly(recording.passes, 4)
    page = told(("a",), note="With {passes}.")
    index = Unpacked(replayed(recording, chosen, page, left_out=len(recording) - 4)).index
    assert index["passes"]["header"]["passes"] == 4
    assert index["passes"]["header"]["thinned"] == len(recording) - 4
    assert index["note"] == f"With 4 of {len(recording)} passes, spaced evenly."
    whole = Unpacked(replayed(recording, recording.passes, page)).index
    assert whole["note"] == f"With all {len(recording)} passes."


def test_only_the_sites_asked_for_have_histograms_and_all_have_figures():
    recording = recorded()
    unpacked = Unpacked(replayed(recording, recording.passes, told(("a", "b/c"), detailed=["b/c"])))
    assert unpacked.index["detailed"] == [1]
    assert {one["header"]["site"] for one in unpacked.index["histories"]} == {1}
    table, _ = unpacked.frame(1, 2)
    assert table[0, 0, 0] == VALUES["scaled"].size


def test_counts_beyond_32_bits_stay_exact():
    one = summary_of(np.ones(3, np.float32))
    recording = Recording()
    recording.append(0, {"a": {"output": dataclasses.replace(one, bins=one.bins * (2**33 + 1))}})
    unpacked = Unpacked(replayed(recording, recording.passes, told(("a",))))
    pairs = unpacked.histogram(0, 0)
    assert pairs is not None
    assert pairs[0, 1] == 3 * (2**33 + 1)


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
    index = Unpacked(replayed(Recording(), (), told(keys, answers=answers))).index
    found = {site: one for site, one in index["answers"]["code"]}
    assert found.pop("broken") == {"error": "It <b>failed</b>."}
    assert {site: protocol.from_header(one["header"]) for site, one in found.items()} == {
        key: message for key, (message, _) in code.items()
    }
