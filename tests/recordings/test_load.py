"""Broken or forged files give an InspectorError or valid data, quickly and in little memory."""

from __future__ import annotations

import functools
import io
import json
import os
import pathlib
import random
import re
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import crafted_files
import numpy as np
import pytest
import safetensors.numpy
from crafted_files import MAGIC, blob_of, file_of, parts_of, small_file
from summaries import (
    all_summaries,
    assert_readable,
    assert_same,
    contents,
    deflate_summary,
    normal_values,
    summary_of,
)

from nnx_inspector.errors import InspectorError, InspectorWarning
from nnx_inspector.recordings.facts import Facts, ParameterFacts, SiteFacts
from nnx_inspector.recordings.format import DamagedError, Reader
from nnx_inspector.recordings.load import load
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.bins import FINITE_BINS
from nnx_inspector.stats.encoding import encode
from nnx_inspector.stats.summary import Summary

SPARE = 9 * 2**20
"""The bytes of memory that a file may take in addition to twice its size."""


def tried(path: pathlib.Path, data: bytes) -> Recording | None:
    """The recording in a file with these bytes, or None if an InspectorError is raised."""
    path.write_bytes(data)
    try:
        return load(path)
    except InspectorError as error:
        said = str(error)
    assert re.search(
        r"at byte \d+|is not a recording|in version .* of the format|the head section",
        said,
    )
    assert len(said) < 2000
    return None


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "run.nni"


def test_the_small_file_is_whole(path: pathlib.Path) -> None:
    found = tried(path, small_file())
    assert found is not None
    expected = Recording(max_steps=3)
    crafted_files.fill(expected, range(7))
    assert_same(found, expected)
    assert found.thinned == 7 - len(found) >= 4
    assert not found.cut_short
    assert file_of(parts_of(small_file())) == small_file()


@pytest.mark.parametrize("apart", [7, pytest.param(1, marks=pytest.mark.long)])
def test_every_truncation_is_refused_or_gives_the_passes_before(
    path: pathlib.Path, apart: int
) -> None:
    every = Recording()
    crafted_files.fill(every, range(7))
    exact = {p[1]: (p[1:5], p[6:]) for p in contents(every)["passes"]}  # news apart
    starts, newest = [len(MAGIC)], -1
    for _, _, body in parts_of(small_file()):
        starts.append(starts[-1] + 24 + len(body))
    for length in range(0, len(small_file()), apart):
        found = tried(path, small_file()[:length])
        if found is None:
            assert length < starts[2]  # names, head
            continue
        assert found.cut_short or length in starts
        kept = contents(found)["passes"]
        assert all((p[1:5], p[6:]) == exact[p[1]] for p in kept if p[6] or p[1] != 5)
        assert max([-1, *found.steps]) >= newest
        newest = max([-1, *found.steps])
        assert_readable(found) if length % 50 == 0 else None
    assert newest == 6


PARTS = 9  # no power of two, so that each part has bytes of every place in a number


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, PARTS))]
)
def test_every_changed_byte_is_refused(path: pathlib.Path, part: int) -> None:
    data = small_file()
    for at in range(part, len(data), PARTS):
        changed = bytes([data[at] ^ (1 + at % 255)])
        assert tried(path, data[:at] + changed + data[at + 1 :]) is None, at


def packed(texts: list[bytes]) -> dict[str, Any]:
    ends = np.cumsum([len(t) for t in texts]).astype(np.uint32)
    return {"text": np.frombuffer(b"".join(texts), np.uint8), "ends": ends}


def part(kind: bytes, **columns: Any) -> crafted_files.Part:
    return kind, 0, safetensors.numpy.save(columns)


def head(**other: Any) -> crafted_files.Part:
    columns: dict[str, Any] = {
        "bounds": np.array([100, 2**20]),
        "counts": np.array([0, 0]),
        "held": np.array([0, 0]),
        "sites": np.zeros(0, np.uint32),
        "firsts": np.zeros((0, 3), np.uint8),
    }
    return part(b"head", **columns | other)


def one_pass(blobs: list[bytes], **other: Any) -> crafted_files.Part:
    columns: dict[str, Any] = {
        "pass": np.array([0, 7, 0, 0, 0, -1]),
        "site": np.arange(len(blobs), dtype=np.uint32),
        "quantity": np.zeros(len(blobs), np.uint8),
        "summary": np.frombuffer(b"".join(blobs), np.uint8),
        "ends": np.cumsum([len(b) for b in blobs]).astype(np.uint32),
    }
    return part(b"pass", **columns | other)


NAMES = part(b"name", **packed([b"a", b"b"]))
BLOB = encode([summary_of(normal_values(0))]).data
OLD = deflate_summary(summary_of(normal_values(0)))
PASSES = [np.array([i, i, 0, 0, 0, -1]) for i in range(3)]


def test_a_file_by_hand(path: pathlib.Path) -> None:
    points = part(b"metr", points=np.array([[1, 5, 0.25], [1, 6, np.nan]]))
    found = tried(path, file_of([NAMES, head(), one_pass([BLOB, BLOB]), points]))
    assert found is not None
    expected = Recording(max_steps=100, max_bytes=2**20)
    summary = summary_of(normal_values(0))
    expected.append(7, {"a": {"output": summary}, "b": {"output": summary}}, kind="a")
    expected.add_metrics(5, {"b": 0.25})
    expected.add_metrics(6, {"b": float("nan")})
    assert_same(found, expected)


def test_a_file_of_an_earlier_version_is_read_as_what_it_recorded(path: pathlib.Path) -> None:
    """Its summaries are deflated; what is read of it is saved as files are today."""
    every, expected = all_summaries(), Recording(max_steps=100, max_bytes=2**20)
    parts = [NAMES, head()]
    for i, one in enumerate(every):
        number = {"pass": np.array([i, i, 0, 0, 0, -1])}
        parts.append(
            one_pass([deflate_summary(one.merged()), deflate_summary(every[-i].merged())], **number)
        )
        expected.append(i, {"a": {"output": one}, "b": {"output": every[-i]}}, kind="a")
    parts.append((b"held", *one_pass([OLD], **{"pass": np.array([0, 99, 0, 0, 0, 3])})[1:]))
    expected.append(99, {"a": {"output": summary_of(normal_values(0))}}, kind="a")
    found = tried(path, file_of(parts))
    assert found is not None
    for mine, theirs in zip(found.passes, expected.passes, strict=True):
        assert (mine.keys, mine.packed) == (theirs.keys, theirs.packed)
        assert (mine.step, mine.nonfinite) == (theirs.step, theirs.nonfinite)
    found.save(path)
    assert_same(load(path), found)


def test_an_old_file_whose_summaries_would_be_much_larger_is_refused_cheaply(
    path: pathlib.Path,
) -> None:
    bins = np.where(FINITE_BINS, 7, 0).astype(np.uint64)  # forty times as many bytes as deflated
    blob = deflate_summary(Summary(bins=bins, points=np.array([-1.0, 1, 0]), sums=np.ones(3)))
    many = 10_000
    names = part(b"name", **packed([b"%d" % i for i in range(many)]))
    data = file_of([names, head(), one_pass([blob] * many)])
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(InspectorError, match="many times their bytes"):
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(data) + SPARE < 30 * len(blob) * many
    finally:
        tracemalloc.stop()
    assert tried(path, file_of([NAMES, head(), one_pass([blob])])) is not None


def test_kinds_of_sections_that_may_be_skipped_are(path: pathlib.Path) -> None:
    more = b"xtra", 1, random.Random(0).randbytes(3 * 2**20)
    found = tried(path, file_of([more, NAMES, more, head(), one_pass([BLOB]), more]))
    assert found is not None
    assert found.steps == [7]
    data = file_of([NAMES, head(), more])
    assert tried(path, data[:-1] + bytes([data[-1] ^ 1])) is None
    assert tried(path, file_of([NAMES, head(), (b"xtra", 0, b"")])) is None
    with pytest.raises(InspectorError, match="newer nnx_inspector"):
        load(path)


@functools.cache
def bombs() -> dict[str, list[crafted_files.Part]]:
    """Well-formed files with false content."""
    kind, width, used, low, high = struct.unpack("<BBHdd", OLD[:20])
    inner = zlib.decompress(OLD[20 + 48 :])

    def blob(body: bytes = inner, **of: Any) -> bytes:
        values = {"kind": kind, "width": width, "used": used, "low": low, "high": high} | of
        figures = OLD[20 : 20 + 48]
        return struct.pack("<BBHdd", *values.values()) + figures + zlib.compress(body, 9)

    def passed(*blobs: bytes, **other: Any) -> list[crafted_files.Part]:
        return [NAMES, head(), one_pass(list(blobs), **other)]

    deep = b'{"a":' * 800 + b"1" + b"}" * 800
    giant = json.dumps({f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
                        for i in range(100_000)}).encode()  # fmt: skip

    def shape(*of: int) -> bytes:
        return blob_of({"text": {"dtype": "U8", "shape": of, "data_offsets": [0, 4]}}, b"abcd")

    many = [b"%d" % i for i in range(100_000)]
    u32, i64 = (lambda *x: np.array(x, np.uint32)), (lambda *x: np.array(x, np.int64))
    return {
        "a bomb of zeros": passed(blob(bytes(2**26))),
        "a bomb that says so": passed(blob(bytes(2**26), used=65_535, width=255)),
        "inflates to less": passed(blob(inner[:-1])),
        "unknown type of points": passed(blob(kind=9)),
        "no bins and a width": passed(blob(used=0)),
        "bins that do not rise": passed(blob(bytes(len(inner)))),
        "bins beyond the last": passed(blob(b"\xff" * len(inner))),
        "bins beyond the last, among others": passed(OLD, blob(b"\xff" * len(inner))),
        "rest behind an old summary": passed(OLD + b"x"),
        "half an old summary": passed(OLD[:-3]),
        "an old summary and one of today": passed(OLD, BLOB),
        "one of today and an old summary": passed(BLOB, OLD),
        "rest behind a summary": passed(BLOB + b"\0"),
        "half a summary": passed(BLOB[:40]),
        "bins without end": passed(BLOB + b"\1" * 2**20),
        "one bin many times": passed(BLOB + b"\0" * 2**20),
        "a number without end": passed(BLOB + b"\xff" * 2**20),
        "a tiny summary": passed(b"x"),
        "deep JSON": [(b"name", 0, blob_of(deep, b""))],
        "giant JSON": [(b"name", 0, blob_of(giant, b""))],
        "a JSON longer than the body": [(b"name", 0, struct.pack("<Q", 4000) + b"{}")],
        "a JSON of 2**63": [(b"name", 0, struct.pack("<Q", 2**63) + b"{}")],
        "no JSON": [(b"name", 0, b"")],
        "a negative shape": [(b"name", 0, shape(-4))],
        "a huge shape": [(b"name", 0, shape(2**64 - 1, 2**64 - 1))],
        "overlapping offsets": [(b"name", 0, blob_of(
            {n: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for n in ("text", "ends")},
            b"abcd"))],
        "offsets beyond the end": [(b"name", 0, blob_of(
            {"text": {"dtype": "U8", "shape": [400], "data_offsets": [0, 400]}}, b"abcd"))],
        "another type": [part(b"name", text=np.zeros(4), ends=u32(4))],
        "a type that NumPy has not": [(b"name", 0, blob_of(
            {"text": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}, b"abcd"))],
        "ends that fall": [part(b"name", text=np.zeros(4, np.uint8), ends=u32(3, 1, 4))],
        "ends beyond": [part(b"name", text=np.zeros(4, np.uint8), ends=u32(2**32 - 1))],
        "no UTF-8": [part(b"name", **packed([b"\xff\xfe"]))],
        "a name too long": [part(b"name", **packed([b"x" * 70_000]))],
        "very many names": [part(b"name", **packed(many))],
        "no head": [NAMES, one_pass([BLOB])],
        "nothing": [],
        "two heads": [NAMES, head(), head()],
        "a bound of 1 pass": [NAMES, head(bounds=i64(1, 2**20))],
        "a negative bound": [NAMES, head(bounds=i64(100, -1))],
        "more passes held than made": [NAMES, head(held=i64(5, 0))],
        "negative thinning": [NAMES, head(counts=i64(0, -1))],
        "sites without names": [NAMES, head(sites=u32(7))],
        "a first of no kind": [NAMES, head(firsts=np.array([[0, 0, 9]], np.uint8))],
        "too many firsts": [NAMES, head(firsts=np.zeros((900, 3), np.uint8))],
        "a site without a name": passed(BLOB, site=u32(2)),
        "a site twice": passed(BLOB, BLOB, site=u32(0, 0)),
        "no such quantity": passed(BLOB, quantity=np.array([6], np.uint8)),
        "fewer sites than summaries": passed(BLOB, BLOB, site=u32(0)),
        "a step beyond 2**53": passed(BLOB, **{"pass": i64(0, 2**60, 0, 0, 0, -1)}),
        "a negative number": passed(BLOB, **{"pass": i64(-1, 0, 0, 0, 0, -1)}),
        "a kind without a name": passed(BLOB, **{"pass": i64(0, 0, 0, 9, 0, -1)}),
        "a negative kind": passed(BLOB, **{"pass": i64(0, 0, 0, -1, 0, -1)}),
        "flags that are none": passed(BLOB, **{"pass": i64(0, 0, 0, 0, 64, -1)}),
        "the same pass twice": [*passed(BLOB), one_pass([BLOB])],
        "a ticket that cannot be": passed(BLOB, **{"pass": i64(0, 0, 0, 0, 0, -2)}),
        "a held pass that is not there": [
            NAMES, head(), part(b"pass", **{"pass": i64(0, 0, 0, 0, 0, 5)})],
        "a held pass without a ticket": [NAMES, head(), (b"held", *one_pass([BLOB])[1:])],
        "first NaNs without end": [NAMES, head(), *(
            one_pass([], **{"pass": i64(i, i, 0, 0, 2, -1)}) for i in range(50))],
        "a point without a name": [NAMES, head(), part(b"metr", points=np.array([[9.0, 0, 0]]))],
        "a point at half a step": [NAMES, head(), part(b"metr", points=np.array([[0, 0.5, 0]]))],
        "a point at NaN": [NAMES, head(), part(b"metr", points=np.array([[0, np.nan, 0]]))],
        "a point at infinity": [NAMES, head(), part(b"metr", points=np.array([[0, -np.inf, 0]]))],
        "points of another shape": [NAMES, head(), part(b"metr", points=np.zeros((3, 2)))],
    }  # fmt: skip


@pytest.mark.parametrize("name", bombs())
def test_a_lie_is_refused(path: pathlib.Path, name: str) -> None:
    data = file_of(bombs()[name])
    assert_cheap(path, data)
    assert tried(path, data) is None


def assert_cheap(path: pathlib.Path, data: bytes) -> Recording | None:
    """Check that a file is loaded or refused within seconds and twice its size."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        return measured(path, len(data))
    finally:
        tracemalloc.stop()


def measured(path: pathlib.Path, size: int) -> Recording | None:
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    began = time.process_time()
    found = tried_again(path)
    assert tracemalloc.get_traced_memory()[1] - before <= 2 * size + SPARE
    assert time.process_time() - began < 60 + size / 10_000
    return found


def tried_again(path: pathlib.Path) -> Recording | None:
    try:
        return load(path)
    except InspectorError:
        return None


def test_a_length_that_lies_is_a_torn_write_or_refused(path: pathlib.Path) -> None:
    """With a correct check, it is an incomplete last section."""
    data = file_of([NAMES, head(), one_pass([BLOB])])
    check = zlib.crc32(MAGIC)
    for _, _, body in parts_of(data):
        at = data.index(body) - 24
        check = zlib.crc32(data[at : at + 20], check)
    for length in (2**64 - 1, 2**63, 2**40):
        lie = struct.pack("<4sIQI", b"pass", 0, length, 0)
        found = tried(path, data + lie + struct.pack("<I", zlib.crc32(lie, check)))
        assert found is not None
        assert found.steps == [7]
        assert found.cut_short
        assert tried(path, data + lie + b"????") is None


def test_what_is_no_file_is_refused_at_once(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening it would wait for a writer
    for name in (tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(InspectorError, match="not a regular file"):
            load(name)
    for name in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OSError, match=str(name)):
            load(name)
    assert tried(path, b"") is None
    path.write_bytes(small_file())
    (tmp_path / "link").symlink_to(path)
    assert_same(load(tmp_path / "link"), load(path))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "link")


@pytest.mark.parametrize("change", ["grows", "shrinks", "is emptied", "is overwritten"])
def test_a_file_that_changes_while_it_is_read(path: pathlib.Path, change: str) -> None:
    """The reader gives the content at the time of opening, or the file is torn or damaged."""
    data = file_of([NAMES, head(), *(one_pass([BLOB], **{"pass": p}) for p in PASSES)])
    path.write_bytes(data)
    kinds = [kind for kind, _, _ in parts_of(data)]
    with open(path, "rb", buffering=0) as file:  # unbuffered: nothing is read ahead
        reader = Reader(file)
        found = [next(sections := reader.sections(set(kinds))).kind]
        with open(path, "r+b") as writer:
            if change == "grows":
                writer.seek(0, 2)
                writer.write(b"x" * 5000)
            elif change == "is overwritten":
                writer.write(b"\0" * len(data))
            else:
                writer.truncate(0 if change == "is emptied" else len(data) - 7)
        try:
            for section in sections:
                found.append(section.kind)
        except DamagedError:
            assert change != "grows"
    assert found == (kinds if change == "grows" else kinds[: len(found)])
    assert len(found) >= {"grows": 5, "shrinks": 4}.get(change, 1)


@pytest.mark.parametrize("seed", range(2))
def test_mutated_files(path: pathlib.Path, seed: int) -> None:
    check_mutated(path, random.Random(seed), 80)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_mutated_files(path: pathlib.Path, seed: int) -> None:
    check_mutated(path, random.Random(1000 + seed), 1000)


def check_mutated(path: pathlib.Path, source: random.Random, count: int) -> None:
    loaded = 0
    tracemalloc.start()
    try:
        for _ in range(count):
            path.write_bytes(crafted_files.mutated(source))
            found = measured(path, path.stat().st_size)
            if found is None:
                assert tried(path, path.read_bytes()) is None
                continue
            loaded += 1
            assert_readable(found)
            found.save(path)
            assert contents(load(path)) == contents(found)
    finally:
        tracemalloc.stop()
    assert 0 < loaded < count


def large(passes: int, sites: int, size: int) -> bytes:
    """A recording as runs make them."""
    summaries = [summary_of(normal_values(i, size)) for i in range(8)]
    recording = Recording(max_steps=max(2, passes))
    for i in range(passes):
        recording.append(
            i,
            {f"blocks/{j}/attn": {"output": summaries[(i + j) % 8]} for j in range(sites)},
            metrics={"loss": float(i)},
        )
    file = io.BytesIO()
    from nnx_inspector.recordings.save import Sections

    file.writelines(Sections().of_state(recording.state()))
    return file.getvalue()


@pytest.mark.parametrize(
    ("passes", "sites", "size"), [(300, 40, 5000), (2000, 2, 4), (1, 4000, 300), (1000, 0, 1)]
)
def test_memory_stays_below_twice_the_file(
    path: pathlib.Path, passes: int, sites: int, size: int
) -> None:
    data = large(passes, sites, size)
    found = assert_cheap(path, data)
    assert found is not None
    assert len(found) == passes


def table(title: str, **texts: bytes) -> crafted_files.Part:
    names = json.dumps([title, *texts]).encode()
    columns = {":names": np.frombuffer(names, np.uint8)}
    for name, data in texts.items():
        columns[name] = np.zeros(1, np.uint32)
        columns[f"{name}:texts"] = np.frombuffer(data, np.uint8)
    return b"tabl", 1, safetensors.numpy.save(columns)


MB = 10**6
HOSTILE = {
    "nested lists": [table("t", a=b"[" + b"[]," * (2 * MB) + b"[]]")],
    "objects": [table("t", a=b"[" + b'{"":{}},' * MB + b"{}]")],
    "numbers": [table("t", a=b"[" + b"1e5," * (2 * MB) + b"0]")],
    "short texts": [table("t", a=b"[" + b'"abc",' * MB + b'"a"]')],
    "no text": [table("t", a=b"[" + b'"",' * (2 * MB) + b'""]')],
    "letters of four bytes": [table("t", a=b'["\\ud83d\\ude00' + b"a" * (8 * MB) + b'"]')],
    "escapes": [table("t", a=b'["' + b"\\n" * (4 * MB) + b'"]')],
    "a text without an end": [table("t", a=b'["' + b"a" * (8 * MB))],
    "no list": [table("t", a=b'"' + b"a" * (8 * MB) + b'"')],
    "something after the list": [table("t", a=b'["a"]' + b" " * (8 * MB) + b"x")],
    "many tables": [table(f"t{i}", a=b'["",' + b'"",' * 500 + b'""]') for i in range(4000)],
    "names without columns": [table("t" * MB, **{"a" * i: b"[]" for i in range(1, 40)})] * 8,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_table_takes_no_more_than_twice_the_file(path: pathlib.Path, what: str) -> None:
    found = assert_cheap(path, file_of([NAMES, head(), *HOSTILE[what]]))
    assert found is None or what == "names without columns"


@pytest.mark.parametrize("columns", ["site", "parameter"])
def test_hostile_facts_take_no_more_than_twice_the_file(path: pathlib.Path, columns: str) -> None:
    fact = SiteFacts(site="ab", type="cd", entering="ef") if columns == "site" else None
    other = ParameterFacts(path="ab", site="cd", type="ef", dtype="gh", size=10**6)
    facts = Facts(sites=(fact,) * 60_000) if fact else Facts(parameters=(other,) * 60_000)
    section = b"fact", 1, safetensors.numpy.save(facts.to_columns())
    assert_cheap(path, file_of([NAMES, head(), section, section]))


def test_the_texts_of_a_table_are_read_as_they_were_saved(path: pathlib.Path) -> None:
    texts = [
        "",
        "a",
        '"',
        "\\",
        '\\"',
        '",',
        "]",
        "\n\t",
        "é",
        "\U0001f600",
        "\ud800",
        '["a"]',
        "a\0b",
    ]
    texts += [f"word {i}" for i in range(5000)]
    recording = Recording()
    recording.keep_table('a, "b"', {"text": np.array(texts, object), "n": np.arange(len(texts))})
    recording.keep_table("empty", {"text": np.zeros(0, object)})
    recording.keep_table("", {})
    recording.save(path)
    found = load(path).tables
    assert list(found) == ['a, "b"', "empty", ""]
    assert found['a, "b"']["text"].tolist() == texts
    assert found['a, "b"']["n"].tolist() == list(range(len(texts)))
    assert len(found["empty"]) == len(found[""]) == 0


def test_held_passes_are_added_without_copying_the_others(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [(b"held", *one_pass([BLOB], **{"pass": np.array([0, i, 0, 0, 0, i])})[1:])
            for i in range(200)]  # fmt: skip
    states = []
    real = Recording.state
    monkeypatch.setattr(Recording, "state", lambda self: states.append(self) or real(self))
    found = tried(path, file_of([NAMES, head(bounds=np.array([1000, 2**20])), *held]))
    assert found is not None
    assert found.steps == list(range(200))
    assert [p.number for p in found.passes] == list(range(200))
    assert len(states) <= 1


def test_many_sections_of_facts_are_not_joined_one_by_one(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def section(*sites: str) -> crafted_files.Part:
        facts = Facts(sites=tuple(SiteFacts(site=site) for site in sites))
        return b"fact", 1, safetensors.numpy.save(facts.to_columns())

    joined = []
    monkeypatch.setattr(Facts, "joined", lambda *both: joined.append(both) or both[1])
    found = tried(path, file_of([NAMES, head(), section("a"), *[section("a", "b")] * 50]))
    assert found is not None
    assert found.facts is not None
    assert [one.site for one in found.facts.sites] == ["a", "b"]
    assert not joined


@pytest.mark.parametrize("change", ["a byte", "a section is left out", "a section of a lie"])
def test_what_precedes_the_damage_is_offered_and_read(path: pathlib.Path, change: str) -> None:
    every = Recording()
    for step in range(6):
        every.append(
            step, {"a": {"output": summary_of(normal_values(step))}}, metrics={"loss": step}
        )
    every.save(path)
    parts = parts_of(path.read_bytes())
    (at,) = [i for i, part in enumerate(parts) if part[0] == b"pass"][3:4]
    data, before = file_of(parts), len(file_of(parts[:at]))
    if change == "a byte":
        data = data[: before + 40] + bytes([data[before + 40] ^ 1]) + data[before + 41 :]
    elif change == "a section is left out":
        data = data[:before] + data[len(file_of(parts[: at + 1])) :]
    else:
        data = file_of([*parts[:at], one_pass([b"x"]), *parts[at:]])
    path.write_bytes(data)
    offer = rf"at byte {before}\b.*nni.load\(path, damaged=True\) reads what was recorded before"
    with pytest.raises(InspectorError, match=offer):
        load(path)
    said = rf"run.nni' is damaged: .*at byte {before}\b.*The 3 passes kept were recorded before"
    with pytest.warns(InspectorWarning, match=said):
        found = load(path, damaged=True)
    assert found.steps == [0, 1, 2]
    assert found.cut_short
    for mine, theirs in zip(found.passes, every.passes[:3], strict=True):
        assert mine.packed == theirs.packed
    found.append(9, {"a": {"output": summary_of(normal_values(9))}})
    found.save(path)
    assert load(path).steps == [0, 1, 2, 9]


@pytest.mark.parametrize("data", [MAGIC, b"text", small_file()[:40], MAGIC + b"\0" * 100])
def test_a_file_without_a_pass_is_refused_with_damaged_too(path: pathlib.Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(InspectorError) as error:
        load(path, damaged=True)
    assert "damaged=True" not in str(error.value)


def test_a_whole_file_is_read_in_silence_with_damaged_too(path: pathlib.Path) -> None:
    path.write_bytes(small_file())
    found = load(path, damaged=True)
    assert_same(found, load(path))
    assert not found.cut_short


def test_metrics_without_end_are_thinned_in_time(path: pathlib.Path) -> None:
    """Thousands of names, and points that thinning prefers to keep, do not hang the reader."""
    names = part(b"name", **packed([b"%d" % i for i in range(300)]))
    rows = np.zeros((6000, 3))
    rows[:, 0] = np.arange(6000) % 300
    rows[:, 1] = np.arange(6000) ** 2
    rows[::2, 2] = np.nan
    one = np.zeros((8000, 3))
    one[:, 1] = np.repeat(np.arange(2), 4000) * 1e9
    one[:4000:2, 2] = np.nan
    points = [part(b"metr", points=rows), part(b"metr", points=one)]
    for bounds in ([2, 4096], [2000, 2**18], [2**40, 2**60]):
        data = file_of([names, head(bounds=np.array(bounds)), *points])
        assert_cheap(path, data)


def _zip(path: pathlib.Path) -> None:
    with path.open("wb") as file:
        np.savez(file, a=np.ones(2))


def _checkpoint(path: pathlib.Path) -> None:
    path.mkdir()
    (path / "_CHECKPOINT_METADATA").write_text("{}")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text("epoch 1 loss 2\n"), "it is a text"),
        (lambda path: path.write_text('{"cells": []}'), "JSON; if it is a notebook"),
        (lambda path: path.write_text("<!doctype html><p>"), "a web page.*browser"),
        (lambda path: path.write_bytes(b""), "it is empty"),
        (_zip, "a zip archive"),
        (lambda path: path.write_bytes(safetensors.numpy.save({"a": np.ones(2)})), "safetensors"),
        (lambda path: path.write_bytes(b"\x80\x04\x95"), "a pickle"),
        (lambda path: path.write_bytes(b"\x00\x01\x02\x03"), "unknown bytes"),
        (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n"), "unknown bytes"),
        (lambda path: path.write_bytes(MAGIC[:9]), "cut off before the first pass"),
        (_checkpoint, "a folder.*restore it with the library"),
    ],
)
def test_a_file_that_is_no_recording_is_told_what_it_is(
    tmp_path: pathlib.Path, make: Callable[[pathlib.Path], object], words: str
) -> None:
    make(tmp_path / "run.nni")
    with pytest.raises(InspectorError, match=rf"run\.nni' is .*{words}.*insp\.save\(path\)"):
        load(tmp_path / "run.nni")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (b"recording 1\n", b"recording 2\n", r"version 2 of the format.*pip install --upgrade"),
        (b"\n", b"\r\n", r"line ends were changed.*binary"),
    ],
    ids=["a newer version", "copied as text"],
)
def test_a_recording_that_cannot_be_read_says_what_to_do(
    tmp_path: pathlib.Path, before: bytes, after: bytes, words: str
) -> None:
    path = tmp_path / "run.nni"
    Recording().save(path)
    path.write_bytes(path.read_bytes().replace(before, after))
    with pytest.raises(InspectorError, match=words):
        load(path)


def test_what_is_no_path_is_a_type_error() -> None:
    for value in (None, 3, Recording()):
        with pytest.raises(TypeError, match=f"path of a recording.*got {type(value).__name__}"):
            load(value)  # type: ignore[arg-type]
