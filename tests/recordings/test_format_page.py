"""A reader written from notebooks/recording-format.md alone, without this package."""

from __future__ import annotations

import itertools
import json
import pathlib
import struct
import zlib
from typing import Any

import numpy as np
import safetensors.numpy
from summaries import VALUES, all_summaries, deflate_summary, summary_of

from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.summary import Summary

PAGE = pathlib.Path(__file__).parents[2] / "notebooks" / "recording-format.md"


def sections(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    assert data[:26] == b"nnx_inspector recording 1\n"
    at, before, found = 26, zlib.crc32(data[:26]), list[tuple[str, dict[str, Any]]]()
    while at < len(data):
        kind, _, length, body_check, check = struct.unpack_from("<4sIQII", data, at)
        before = zlib.crc32(data[at : at + 20], before)
        body = data[at + 24 : at + 24 + length]
        assert (check, body_check) == (before, zlib.crc32(body))
        found.append((kind.decode(), safetensors.numpy.load(body)))
        at += 24 + length
    return found


def pieces(columns: dict[str, Any], name: str) -> list[bytes]:
    ends = [0, *columns["ends"].tolist()]
    raw = columns[name].tobytes()
    return [raw[a:b] for a, b in itertools.pairwise(ends)]


def summary(data: bytes) -> dict[str, Any]:
    if data[0] < 8:
        return old_summary(data)
    kind, nothing = data[0] % 16 - 8, data[0] >= 16
    points = struct.unpack_from(["<3d", "<3q", "<3Q", "<3q", "<3Q"][kind], data, 1)
    numbers, number, shift = list[int](), 0, 0
    for byte in data[49:]:
        number, shift = number | (byte & 127) << shift, shift + 7
        if byte < 128:
            numbers.append(number)
            number = shift = 0
    assert shift == 0
    bins, at, rest = dict[int, int](), 0, iter(numbers)
    for count in rest:
        if count == 0:
            at += next(rest)
        else:
            bins[at], at = count, at + 1
    sums = struct.unpack_from("<3d", data, 25)
    return {"bins": bins, "points": points, "sums": sums, "nothing": nothing}


def old_summary(data: bytes) -> dict[str, Any]:
    kind, width, used, low, high = struct.unpack_from("<BBHdd", data)
    dtype = np.dtype(["<f8", "<i4", "<u4", "<i8", "<u8"][kind])
    end = 20 + 3 * dtype.itemsize
    raw = zlib.decompress(data[end + 24 :])
    assert len(raw) == used * (2 + width)
    bins, at = dict[int, int](), 0
    for i in range(used):
        at += raw[i] + 256 * raw[used + i]
        bins[at] = sum(raw[(2 + w) * used + i] << (8 * w) for w in range(width))
    points = np.frombuffer(data[20:end], dtype).tolist()
    sums = struct.unpack_from("<3d", data, end)
    return {"bins": bins, "points": points, "sums": sums, "nothing": np.isnan([low, high]).all()}


def same(found: dict[str, Any], expected: Summary) -> None:
    one = expected.merged()
    used = np.flatnonzero(one.bins)
    assert found["bins"] == dict(zip(used.tolist(), one.bins[used].tolist(), strict=True))
    np.testing.assert_array_equal(found["points"], one.points)
    np.testing.assert_array_equal(found["sums"], one.sums)


def test_a_file_is_as_the_page_says(tmp_path: pathlib.Path) -> None:
    summaries, recording = all_summaries(), Recording(max_steps=50, max_bytes=123_456)
    for i, one in enumerate(summaries):
        of = {"a": {"output": one, "gradient": summaries[-i]}, "ö": {"input": one}}
        recording.append(i, of, kind="step", perturbed=i % 2 == 1, setting=7 * i)
    recording.add_metrics(4, {"loss": 0.5, "acc": float("nan")})
    recording.attach(tmp_path / "run.nni", print)
    for ticket in (3, 4, 5):
        recording.hold(ticket, 100 + ticket, {"a": {"output": summaries[ticket]}})
    recording.append(103, {"a": {"output": summaries[3]}}, held=3)
    recording.append(104, {"a": {"output": summaries[0]}}, held=4)
    found = sections((tmp_path / "run.nni").read_bytes())
    recording.detach()

    names: list[str] = []
    for kind, columns in found:
        if kind == "name":
            names += [text.decode() for text in pieces(columns, "text")]
    assert sorted(names) == sorted(set(names))
    (head,) = (columns for kind, columns in found if kind == "head")
    assert head["bounds"].tolist() == [50, 123_456]
    assert head["counts"].tolist() == [len(summaries), 0]
    assert head["held"].tolist() == [len(summaries), 2]
    assert [names[i] for i in head["sites"]] == ["a", "ö"]
    firsts = {(p, q, k) for p, q, k in head["firsts"].tolist()}
    assert {(0, 0, 0), (0, 2, 0)} <= firsts
    passes = [columns for kind, columns in found if kind == "pass"]
    for i, one in enumerate(summaries):
        columns = passes[i]
        number, step, setting, kind, flags, ticket = columns["pass"].tolist()
        assert (number, step, setting, names[kind], ticket) == (i, i, 7 * i, "step", -1)
        assert flags & 1 == i % 2
        keys = [(names[s], q) for s, q in zip(columns["site"], columns["quantity"], strict=True)]
        assert keys == [("a", 0), ("a", 1), ("ö", 2)]
        for blob, expected in zip(
            pieces(columns, "summary"), (one, summaries[-i], one), strict=True
        ):
            same(summary(blob), expected)
    points = np.concatenate([columns["points"] for kind, columns in found if kind == "metr"])
    by_name = {names[int(row[0])]: row[1:] for row in points}
    np.testing.assert_array_equal(by_name["loss"], [4, 0.5])
    np.testing.assert_array_equal(by_name["acc"], [4, np.nan])

    held = {c["pass"][5].item(): c for kind, c in found if kind == "held"}
    assert list(held) == [3, 4, 5]
    as_held, anew = passes[-2:]
    assert list(as_held) == ["pass"]
    assert (as_held["pass"][1].item(), as_held["pass"][5].item()) == (103, 3)
    same(summary(pieces(held[3], "summary")[0]), summaries[3])
    same(summary(pieces(anew, "summary")[0]), summaries[0])


def test_a_summary_says_whether_a_value_is_finite(tmp_path: pathlib.Path) -> None:
    recording = Recording()
    recording.append(0, {name: {"output": summary_of(x)} for name, x in VALUES.items()})
    recording.save(tmp_path / "run.nni")
    found = dict(sections((tmp_path / "run.nni").read_bytes()))
    for blob, x in zip(pieces(found["pass"], "summary"), VALUES.values(), strict=True):
        one = summary(blob)
        finite = x[np.isfinite(x.astype(np.float64))].astype(np.float64)
        assert one["nothing"] == (not len(finite))
        if len(finite):
            np.testing.assert_array_equal(one["points"][:2], (finite.min(), finite.max()))


def test_older_summaries_are_as_the_page_says() -> None:
    for one in all_summaries():
        same(summary(deflate_summary(one.merged())), one)


def test_the_page_names_every_kind_of_section() -> None:
    from nnx_inspector.recordings import save as saving

    text = PAGE.read_text()
    headings = " ".join(line for line in text.splitlines() if line.startswith("## "))
    whole = (saving.HEAD, saving.NAMES, saving.PASS, saving.HELD, saving.POINTS)
    for kind in (*whole, saving.MARK, saving.FACTS, saving.FIGURES, saving.TABLE):
        assert f"`{kind.decode()}`" in headings


def test_a_table_is_as_the_page_says(tmp_path: pathlib.Path) -> None:
    recording = Recording()
    which = np.array(["most", "least", "most"], object)
    table = {"unit": np.arange(3), "which": which, "value": np.array([0.5, np.nan, 2])}
    recording.keep_table("examples of a", table)
    recording.save(tmp_path / "run.nni")
    (found,) = (c for k, c in sections((tmp_path / "run.nni").read_bytes()) if k == "tabl")
    title, *names = json.loads(found[":names"].tobytes())
    assert (title, names) == ("examples of a", list(table))
    assert found["unit"].tolist() == [0, 1, 2]
    texts = json.loads(found["which:texts"].tobytes())
    assert [texts[i] for i in found["which"]] == which.tolist()
    np.testing.assert_array_equal(found["value"], table["value"])


def test_marks_are_as_the_page_says(tmp_path: pathlib.Path) -> None:
    recording = Recording()
    recording.append(0, {})
    recording.attach(tmp_path / "run.nni", print)
    recording.append(1, {})
    recording.detach(ZeroDivisionError())
    marks = [c for k, c in sections((tmp_path / "run.nni").read_bytes()) if k == "mark"]
    assert [one["mark"].tolist() for one in marks] == [[0, 1], [4, 2]]
    assert marks[0]["time"][0] <= marks[1]["time"][0]
    assert [one["text"].tobytes() for one in marks] == [b"", b"ZeroDivisionError"]
