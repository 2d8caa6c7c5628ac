"""Saving and loading give the same recording, bit for bit, whatever its content."""

# pandas is only partly typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import errno
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from summaries import (
    VALUES,
    all_summaries,
    assert_same,
    contents,
    normal_values,
    some_facts,
    some_statistics,
    summary_of,
)

from nnx_inspector.errors import InspectorError
from nnx_inspector.recordings.load import load
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.summary import Summary, empty

POOL = functools.cache(all_summaries)
names = st.sampled_from(["", "a", "blocks/0", "blocks[3]/attn", "größe:häß", "\ud800", "😀" * 9])
steps = st.integers(-(2**53), 2**53) | st.integers(0, 50)


@st.composite
def operations(draw: Any) -> list[Any]:
    """The operations of a run on its recording."""
    found: list[Any] = []
    for _ in range(draw(st.integers(0, 25))):
        if draw(st.booleans()):
            found.append(("metrics", draw(steps), draw(metrics)))
        else:
            sites = draw(st.lists(names, max_size=4, unique=True))
            measured = {site: draw(quantities) for site in sites}
            found.append(("pass", draw(steps), measured, draw(metrics), *draw(marks)))
    return found


metrics = st.dictionaries(names | st.just("loss"), st.floats(), max_size=3)
quantities = st.dictionaries(
    st.sampled_from(["output", "gradient", "input"]),
    st.integers(0, len(all_summaries()) - 1),
    max_size=3,
)
marks = st.tuples(
    st.sampled_from(["watch", "step", "größe"]), st.booleans(), st.integers(0, 2**53 - 1)
)


def do(recording: Recording, operation: Any) -> None:
    if operation[0] == "metrics":
        recording.add_metrics(operation[1], operation[2])
        return
    _, step, measured, values, kind, perturbed, setting = operation
    summaries = {s: {q: POOL()[i] for q, i in of.items()} for s, of in measured.items()}
    figures = some_statistics(setting % 7) if setting % 2 else None
    marks: Any = {"kind": kind, "perturbed": perturbed, "setting": setting, "figures": figures}
    recording.append(step, summaries, metrics=values, **marks)
    if setting % 3 == 0:
        recording.learn(some_facts(setting % 5))


runs = given(
    operations(), operations(), operations(), st.sampled_from([2, 5, 1000]),
    st.sampled_from([4096, 20_000, 2**28]),
)  # fmt: skip


@runs
@settings(max_examples=25)
def test_what_is_loaded_is_what_was_saved_and_goes_on_alike(
    before: Any, attached: Any, after: Any, max_steps: int, max_bytes: int
) -> None:
    check_run(before, attached, after, max_steps, max_bytes)


@pytest.mark.long
@runs
@settings(max_examples=1500)
def test_the_same_of_many_runs(
    before: Any, attached: Any, after: Any, max_steps: int, max_bytes: int
) -> None:
    check_run(before, attached, after, max_steps, max_bytes)


def check_run(before: Any, attached: Any, after: Any, max_steps: int, max_bytes: int) -> None:
    """A file saved whole and one appended to hold the same recording; both can be appended to."""
    recording = Recording(max_steps=max_steps, max_bytes=max_bytes)
    for operation in before:
        do(recording, operation)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)  # one for each example
        patch.setattr("nnx_inspector.recordings.save._SPARE", 2000)  # it is rewritten now and then
        recording.attach(folder / "grows", _never)
        for operation in attached:
            do(recording, operation)
            assert contents(load(folder / "grows")) == contents(recording)
        recording.save(folder / "whole")
        loaded = load(folder / "whole")
        assert_same(loaded, recording)
        recording.detach()
        for operation in after:
            do(recording, operation)
            do(loaded, operation)
        assert contents(loaded) == contents(recording)
        loaded.save(folder / "whole")
        assert_same(load(folder / "whole"), recording)
        assert sorted(os.listdir(folder)) == ["grows", "whole"]


def _never(text: str) -> None:
    raise AssertionError(text)


def test_a_recording_of_every_kind_of_value(tmp_path: pathlib.Path) -> None:
    recording = Recording()
    for i, summary in enumerate(all_summaries()):
        recording.append(i, {"a/b": {"output": summary, "input": empty()}}, setting=i)
    recording.save(tmp_path / "run.nni")
    loaded = load(tmp_path / "run.nni")
    assert_same(loaded, recording)
    assert not loaded.cut_short
    for name, x in VALUES.items():
        index = list(VALUES).index(name)
        found = loaded.summary("a/b", index=index)
        assert found is not None
        assert found.size == x.size
        assert found.nan == np.isnan(x.astype(np.float64)).sum()


def test_an_empty_recording(tmp_path: pathlib.Path) -> None:
    Recording(max_steps=7, max_bytes=5000).save(tmp_path / "run.nni")
    loaded = load(str(tmp_path / "run.nni"))
    assert (loaded.max_steps, loaded.max_bytes, len(loaded), loaded.sites) == (7, 5000, 0, ())


def test_saving_replaces_in_one_piece_or_not_at_all(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.nni"
    recording = Recording()
    recording.append(1, {"a": {"output": summary_of(normal_values(0))}})
    recording.save(path)
    before = path.read_bytes()
    recording.append(2, {"a": {"output": summary_of(normal_values(1))}})
    monkeypatch.setattr(os, "write", _full_disk_after(3))
    with pytest.raises(OSError, match="No space"):
        recording.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["run.nni"]
    path.unlink()
    umask = os.umask(0o027)
    try:
        recording.save(path)
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o640
    assert_same(load(path), recording)


def test_a_file_that_its_file_system_forgot_is_left_to_whoever_replaced_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS a file that another machine has replaced is a stale handle."""
    path, said = tmp_path / "run.nni", list[str]()
    recording = Recording()
    recording.attach(path, said.append)
    recording.append(1, {"a": {"output": summary_of(normal_values(0))}})
    (tmp_path / "other").write_bytes(b"of another")
    os.replace(tmp_path / "other", path)

    def stale(file: int) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "fstat", stale)
    for step in range(2, 9):
        recording.append(step, {"a": {"output": summary_of(normal_values(0))}})
    recording.detach()
    monkeypatch.undo()
    assert path.read_bytes() == b"of another"
    (text,) = said
    assert "another file was put in its place" in text


def _full_disk_after(writes: int) -> Any:
    write, done = os.write, [0]

    def broken(file: int, data: Any) -> int:
        done[0] += 1
        if done[0] == writes:
            return write(file, data[: len(data) // 2])
        if done[0] > writes:
            raise OSError(28, "No space left on device")
        return write(file, data)

    return broken


def test_through_a_symbolic_link(tmp_path: pathlib.Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link.nni").symlink_to(tmp_path / "disk" / "run.nni")
    Recording().save(tmp_path / "link.nni")
    assert (tmp_path / "link.nni").is_symlink()
    assert len(load(tmp_path / "disk" / "run.nni")) == 0


def test_bad_places_are_the_systems_errors(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        Recording().save(tmp_path / "nowhere" / "run.nni")
    with pytest.raises(IsADirectoryError):
        Recording().save(tmp_path)
    with pytest.raises(FileNotFoundError):
        Recording().attach(tmp_path / "nowhere" / "run.nni", _never)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.nni")
    with pytest.raises(IsADirectoryError):
        load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="device or a pipe"):
        Recording().attach(tmp_path / "pipe", _never)
    with pytest.raises(InspectorError, match="not a regular file"):
        load(tmp_path / "pipe")
    assert sorted(os.listdir(tmp_path)) == ["pipe"]


def test_a_name_that_is_too_long_is_told(tmp_path: pathlib.Path) -> None:
    recording = Recording()
    recording.append(0, {"x" * 70_000: {"output": empty()}})
    with pytest.raises(InspectorError, match="70000 bytes"):
        recording.save(tmp_path / "run.nni")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_told_once_and_made_good(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = tmp_path / "run.nni", list[str]()
    recording, summary = Recording(), summary_of(normal_values(0))
    recording.attach(path, told.append)
    for i in range(3):
        recording.append(i, {"a": {"output": summary}})
    monkeypatch.setattr(os, "write", _full_disk_after(1))
    for i in range(3, 20):
        recording.append(i, {"a": {"output": summary}}, metrics={"loss": 1.0})
    assert len(told) == 1
    assert "No space left" in told[0]
    assert str(path) in told[0]
    assert load(path).steps == [0, 1, 2]
    assert os.listdir(tmp_path) == ["run.nni"]
    monkeypatch.undo()
    for i in range(20, 60):
        recording.append(i, {"a": {"output": summary}})
    assert_same(load(path), recording)
    assert len(told) == 1


def test_a_file_that_was_taken_away_is_told(tmp_path: pathlib.Path) -> None:
    told, recording = list[str](), Recording()
    recording.attach(tmp_path / "run.nni", told.append)
    other = Recording()
    other.append(5, {"b": {"output": empty()}})
    other.save(tmp_path / "run.nni")
    for i in range(3):
        recording.append(i, {"a": {"output": empty()}})
    recording.detach()
    assert len(told) == 1
    assert "put in its place" in told[0]
    assert load(tmp_path / "run.nni").steps == [5]


def test_saving_to_the_file_that_is_written_on_to_keeps_it_so(tmp_path: pathlib.Path) -> None:
    recording = Recording()
    recording.attach(tmp_path / "run.nni", _never)
    recording.append(0, {"a": {"output": empty()}})
    recording.save(tmp_path / "run.nni")
    recording.append(1, {"a": {"output": empty()}})
    assert load(tmp_path / "run.nni").steps == [0, 1]
    recording.attach(tmp_path / "other.nni", _never)
    recording.append(2, {"a": {"output": empty()}})
    assert load(tmp_path / "run.nni").steps == [0, 1]
    assert load(tmp_path / "other.nni").steps == [0, 1, 2]
    recording.detach()
    recording.append(3, {})
    assert load(tmp_path / "other.nni").steps == [0, 1, 2]


def test_a_forked_process_does_not_write(tmp_path: pathlib.Path) -> None:
    code = (
        "import os, sys\n"
        "from nnx_inspector.recordings.recording import Recording\n"
        "recording = Recording()\n"
        "recording.attach(sys.argv[1], print)\n"
        "recording.append(0, {})\n"
        "child = os.fork()\n"
        "recording.append(1, {})\n"
        "if child: os.waitpid(child, 0); recording.append(2, {})\n"
        "else: recording.append(9, {})\n"
        "recording.detach()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run.nni")], check=True)
    assert load(tmp_path / "run.nni").steps == [0, 1, 2]


def test_the_file_stays_within_twice_the_recording(tmp_path: pathlib.Path) -> None:
    path, recording = tmp_path / "run.nni", Recording(max_steps=20)
    summaries = [summary_of(normal_values(i, 3000)) for i in range(8)]
    recording.attach(path, _never)
    largest = 0
    for i in range(1200):
        sites = {f"s{j}": {"output": summaries[(i + j) % 8]} for j in range(20)}
        recording.append(i, sites)
        largest = max(largest, path.stat().st_size)
    assert 4 * 2**20 < largest < 2 * recording.nbytes + 4 * 2**20 + 20_000
    assert_same(load(path), recording)


def test_eight_threads_append_while_others_read_the_recording_and_its_file(
    tmp_path: pathlib.Path,
) -> None:
    path, recording = tmp_path / "run.nni", Recording(max_steps=50)
    recording.attach(path, _never)
    summaries, done = [summary_of(normal_values(i)) for i in range(4)], threading.Event()

    def write(thread: int) -> None:
        for i in range(60):
            of_site = {f"s{thread}": {"output": summaries[i % 4]}}
            recording.append(i, of_site, metrics={f"m{thread}": i})

    def read() -> None:
        while not done.is_set():
            for site in recording.sites:
                history = recording.history(site)
                assert (np.abs(history.fractions.sum(axis=1) - 1) < 1e-9).all()
            assert len(recording.to_frame()) <= 50
            assert all(curve.shape[1] == 2 for curve in recording.curves().values())

    def read_passes(passes: Callable[[], tuple[Pass, ...]]) -> None:
        while not done.is_set():
            numbers = [one.number for one in passes()]
            assert numbers == sorted(set(numbers))
            assert len(numbers) <= 50

    with ThreadPoolExecutor(11) as threads:
        readers = [threads.submit(read), threads.submit(read_passes, lambda: recording.passes)]
        readers += [threads.submit(read_passes, lambda: load(path).passes)]
        try:
            for one in [threads.submit(write, i) for i in range(8)]:
                one.result()
        finally:
            done.set()
        for one in readers:
            one.result()
    assert len(recording) + recording.thinned == 480
    assert all((c[:, 1] == np.arange(60)).all() for c in recording.curves().values())
    assert len(recording.curves()) == 8
    assert_same(load(path), recording)


def test_loading_touches_no_accelerator(tmp_path: pathlib.Path) -> None:
    recording = Recording()
    recording.append(0, {"a": {"output": summary_of(normal_values(0))}})
    recording.save(tmp_path / "run.nni")
    code = (
        "import sys, nnx_inspector as nni\n"
        "recording = nni.load(sys.argv[1])\n"
        "recording.history('a'), nni.diagnose(recording)\n"
        "recording.save(sys.argv[1])\n"
        "print([m for m in ('jax', 'jaxlib', 'flax', 'pandas') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run.nni")]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_summaries_by_hand_survive() -> None:
    """Check that the pool has passes of every kind that a recording keeps."""
    kinds = {s.merged().points.dtype.str for s in all_summaries()}
    assert {"<f8", "<i4", "<u4", "<i8"} <= kinds
    assert any(s.merged().saturated for s in all_summaries())
    assert all(isinstance(s, Summary) for s in all_summaries())


def test_a_path_of_bytes_is_saved_to_and_loaded(tmp_path: pathlib.Path) -> None:
    path, recording = os.fsencode(tmp_path / "run.nni"), Recording()
    recording.attach(path, _never)
    recording.append(0, {"a": {"output": empty()}})
    recording.save(path)  # the file that is written to
    recording.append(1, {"a": {"output": empty()}})
    assert load(path).steps == load(tmp_path / "run.nni").steps == [0, 1]
    assert load(path).name == "run.nni"
