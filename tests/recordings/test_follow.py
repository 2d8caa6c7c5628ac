"""A recording that is followed while another process, or this one, writes its file."""

from __future__ import annotations

import errno
import os
import pathlib
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from crafted_files import file_of, fill, parts_of
from summaries import contents, deflate_summary, normal_values, summary_of

from nnx_inspector.errors import InspectorError
from nnx_inspector.files import HEARTBEAT_SECONDS, Heartbeat, touch
from nnx_inspector.recordings import follow
from nnx_inspector.recordings import load as loading
from nnx_inspector.recordings.follow import Follower
from nnx_inspector.recordings.load import load
from nnx_inspector.recordings.recording import Recording

OLD_FILES = pathlib.Path(__file__).parent / "old_files"
"""Files that earlier versions wrote."""
SUMMARY = summary_of(normal_values(0))


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


_made = list[Follower]()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "run.nni"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def begun(path: pathlib.Path, steps: range = range(3)) -> Recording:
    recording = Recording()
    recording.attach(path, print)
    for step in steps:
        add(recording, step)
    return recording


def add(recording: Recording, step: int) -> None:
    recording.append(step, {"a": {"output": SUMMARY}}, metrics={"loss": step})


def followed(path: pathlib.Path, clock: Clock, *, read: bool = True) -> Follower:
    follower = Follower(path, clock=clock)
    _made.append(follower)
    assert not read or follower.poll()
    return follower


def shown(recording: Recording) -> dict[str, Any]:
    """What a follower and `load` have in common: incomplete passes bound nothing yet."""
    found = contents(recording)
    return {key: found[key] for key in ("bounds", "passes", "curves", "order", "facts", "figures")}


@pytest.mark.parametrize("seed", range(4))
def test_a_follower_has_what_load_reads_after_every_change(
    path: pathlib.Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("nnx_inspector.recordings.save._SPARE", 2000)  # it is rewritten
    source, recording = random.Random(seed), Recording(max_steps=12)
    recording.attach(path, print)
    follower = followed(path, clock)
    at, first, inodes = 0, follower.recording, set[int]()
    while at < 60:
        some = source.randrange(4)
        fill(recording, range(at % 7, min(7, at % 7 + some)), hold=source.random() < 0.5)
        recording.hold(99, at, {"ab"[at % 2]: {"output": SUMMARY}})
        recording.keep_table(f"t{at % 2}", {"n": np.arange(at)})
        at += 1 + some
        follower.poll()
        read = load(path)
        if len(follower.recording) <= 12:
            assert shown(follower.recording) == shown(read)
        else:  # `load` counts the incomplete pass, and has made room for it
            assert set(shown(read)["passes"]) < set(shown(follower.recording)["passes"])
        assert list(follower.recording.tables) == list(read.tables)
        inodes.add(path.stat().st_ino)
    assert follower.recording is first
    assert len(inodes) > 1
    assert follower.replaced == 0
    recording.append(0, {}, held=99)
    recording.detach()
    assert follower.poll()
    assert contents(follower.recording) == contents(load(path)) == contents(recording)
    assert not follower.poll()


def test_only_what_was_appended_is_read(
    path: pathlib.Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = begun(path, range(50))
    follower, read = followed(path, clock), list[int]()
    real = loading.Reader.sections

    def counted(self: Any, known: Any) -> Any:
        for section in real(self, known):
            read.append(section.at)
            yield section

    monkeypatch.setattr(loading.Reader, "sections", counted)
    assert not follower.poll()
    assert read == []
    size = path.stat().st_size
    add(recording, 50)
    assert follower.poll()
    assert len(read) == 2  # its point and its pass
    assert min(read) == size
    recording.detach()


@pytest.mark.parametrize("hold", [False, True])
def test_a_record_that_is_half_written_is_awaited(
    path: pathlib.Path, clock: Clock, tmp_path: pathlib.Path, hold: bool
) -> None:
    recording = Recording()
    recording.attach(tmp_path / "whole.nni", print)
    fill(recording, range(3), hold=hold)
    begin = len((tmp_path / "whole.nni").read_bytes())
    fill(recording, range(3, 5), hold=hold)
    recording.detach()
    data = (tmp_path / "whole.nni").read_bytes()
    path.write_bytes(data[:begin])
    follower = followed(path, clock)
    assert len(follower.recording) == 3
    ends = {begin} | {len(file_of(parts_of(data)[:n])) for n in range(len(parts_of(data)))}
    for end in range(begin, len(data), 41):
        with path.open("ab") as file:
            file.write(data[path.stat().st_size : end])
        follower.poll()
        whole = max(one for one in ends if one <= end)
        (tmp_path / "cut.nni").write_bytes(data[:whole])
        assert shown(follower.recording) == shown(load(tmp_path / "cut.nni"))
        assert follower.state.name == "running"
    with path.open("ab") as file:
        file.write(data[path.stat().st_size :])
    follower.poll()
    assert follower.state.name == "ended"
    assert contents(follower.recording) == contents(load(tmp_path / "whole.nni"))


def test_how_a_run_is_can_be_told(path: pathlib.Path, clock: Clock) -> None:
    recording = begun(path)
    follower = followed(path, clock)
    assert follower.state == ("running", "The run goes on. Its last step is 2.")
    os.utime(path, ns=(1, 1))  # a sign, whatever time it is by the writer's clock
    clock.now += 50
    follower.poll()
    os.utime(path, ns=(2, 2))
    clock.now += 50
    assert follower.poll()
    assert follower.state.name == "stalled"
    sign = "its last sign of life came less than 20 s ago"
    assert follower.state.text == f"The run records no step, but {sign}. Its last step is 2."
    assert not follower.poll()
    add(recording, 3)
    assert follower.poll()
    assert follower.state.name == "running"
    clock.now += 19
    follower.poll()
    assert follower.state.name == "running"
    clock.now += 1
    assert follower.poll()
    assert follower.state.name == "gone"
    assert "The run's process gives no sign" in follower.state.text
    add(recording, 4)
    assert follower.poll()
    assert follower.state.name == "running"
    assert follower.recording.steps == [0, 1, 2, 3, 4]
    recording.detach()
    follower.poll()
    assert follower.state == ("ended", "The run has ended. Its last step is 4.")
    clock.now += 10_000
    assert not follower.poll()


def test_slow_steps_do_not_count_as_stalled(path: pathlib.Path, clock: Clock) -> None:
    recording = begun(path)
    follower = followed(path, clock)
    for step in range(20):  # a step takes 50 s
        for second in range(5):
            clock.now += 10
            os.utime(path, ns=(step, second))
            follower.poll()
            assert follower.state.name == "running"
        add(recording, step)
        follower.poll()
    for second in range(30):
        clock.now += 10
        os.utime(path, ns=(99, second))
        follower.poll()
    assert follower.state.name == "stalled"
    recording.detach()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, "The run has ended."),
        (GeneratorExit(), "The run has ended."),
        (SystemExit(0), "The run has ended."),
        (SystemExit(3), "The run ended with a SystemExit."),
        (KeyboardInterrupt(), "The run was interrupted."),
        (ValueError("secret"), "The run ended with a ValueError."),
    ],
    ids=repr,
)
def test_an_end_has_its_reason(
    path: pathlib.Path, clock: Clock, error: BaseException | None, text: str
) -> None:
    recording = begun(path)
    follower = followed(path, clock)
    recording.detach(error)
    assert follower.poll()
    assert follower.state == ("ended", f"{text} Its last step is 2.")
    recording.save(path)
    assert load(path).marks[:2] == recording.marks
    follower.poll()
    assert "a copy that was saved whole" in follower.state.text


def test_a_run_of_long_ago_is_gone_at_first_sight(path: pathlib.Path, clock: Clock) -> None:
    recording = begun(path)
    os.utime(path, (1e9, 1e9))
    assert followed(path, clock).state.name == "gone"
    os.utime(path, (9e9, 9e9))  # by a clock that is ahead
    follower = followed(path, clock)
    assert follower.state.name == "running"
    clock.now += 20
    assert follower.poll()
    assert follower.state.name == "gone"
    recording.detach()


def test_a_file_of_an_older_version_does_not_say_how_its_run_is(clock: Clock) -> None:
    for name, steps in (("inspected", [0, 0, 0, 1, 2, 3]), ("killed", [0, 1, 2, 3])):
        follower = followed(OLD_FILES / f"{name}.nni", clock)
        assert follower.recording.steps == steps
        clock.now += 20
        follower.poll()
        assert follower.state.name == "gone"
        assert "does not say whether the run has ended" in follower.state.text


@pytest.mark.parametrize("how", ["renamed", "in place, shorter", "in place, longer"])
def test_a_file_that_another_run_replaces_is_read_anew(
    path: pathlib.Path, clock: Clock, tmp_path: pathlib.Path, how: str
) -> None:
    old = begun(path, range(6))
    follower = followed(path, clock)
    seen, number = follower.recording, range(30) if how.endswith("longer") else range(2)
    new = begun(tmp_path / "new.nni", number)
    if how == "renamed":
        os.replace(tmp_path / "new.nni", path)
    else:
        path.write_bytes((tmp_path / "new.nni").read_bytes())
    follower.poll()
    follower.poll()
    assert follower.recording is seen
    assert follower.recording.steps == list(number)
    assert follower.replaced == 1
    assert follower.state.name == "running"
    old.detach()
    new.detach()


def test_a_file_system_that_forgets_a_replaced_file(
    path: pathlib.Path, clock: Clock, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS the handle of a file that was replaced is stale: whatever asks for it fails."""
    old = begun(path, range(6))
    follower = followed(path, clock)
    stale, fstat = follower._file, os.fstat  # the file that another replaces

    def of_nfs(file: int) -> os.stat_result:
        if not stale.closed and file == stale.fileno():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fstat(file)

    begun(tmp_path / "new.nni", range(2)).detach()
    os.replace(tmp_path / "new.nni", path)
    monkeypatch.setattr(os, "fstat", of_nfs)
    follower.poll()
    follower.poll()
    assert follower.recording.steps == [0, 1]
    assert follower.state.name == "ended"
    monkeypatch.undo()
    old.detach()


def test_an_inode_that_is_used_again_is_another_file(path: pathlib.Path, clock: Clock) -> None:
    """The file that is followed is held open, so that its inode stays its own."""
    recording = begun(path, range(3))
    follower = followed(path, clock)
    recording.detach()
    for _ in range(5):
        before = path.stat().st_ino
        path.unlink()
        begun(path, range(9)).detach()
        assert path.stat().st_ino != before
        follower.poll()
        assert follower.recording.steps == list(range(9))


def test_a_file_that_is_gone_says_so_and_may_come_back(path: pathlib.Path, clock: Clock) -> None:
    recording = begun(path)
    follower = followed(path, clock)
    path.rename(path.with_name("moved"))
    assert follower.poll()
    assert follower.state == ("gone", f"{str(path)!r} was deleted or moved.")
    assert follower.recording.steps == [0, 1, 2]
    assert not follower.poll()
    path.with_name("moved").rename(path)
    assert follower.poll()
    assert follower.state.name == "running"
    path.unlink()
    path.mkdir()
    follower.poll()
    assert follower.state.name == "gone"
    assert "is a folder" in follower.state.text
    recording.detach()


def test_a_newer_version_in_its_place_says_what_to_do(path: pathlib.Path, clock: Clock) -> None:
    begun(path).detach()
    follower, data = followed(path, clock), path.read_bytes()
    newer = data.replace(b"recording 1\n", b"recording 2\n", 1)
    path.write_bytes(newer)
    assert follower.poll()
    assert follower.state.name == "gone"
    assert "pip install --upgrade nnx_inspector" in follower.state.text
    with pytest.raises(InspectorError, match="version 2 of the format"):
        Follower(path)
    path.write_bytes(file_of([*parts_of(data), (b"newr", 0, b"")]))
    for _ in range(3):
        clock.now += 20
        follower.poll()
    assert follower.state.name == "gone"
    assert "only a newer nnx_inspector can read" in follower.state.text
    assert follower.recording.steps == [0, 1, 2]
    for wrong, error in ((path.parent, InspectorError), (path.parent / "no", FileNotFoundError)):
        with pytest.raises(error):
            Follower(wrong)


@pytest.mark.parametrize("look", [200, 2**20])
def test_damage_keeps_what_precedes_it(
    path: pathlib.Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    monkeypatch.setattr(follow, "_BYTES_PER_POLL", look)  # a small bound in place of megabytes
    recording = begun(path, range(5))
    data = path.read_bytes()
    recording.detach()
    hole = len(data) - 300
    path.write_bytes(data[:hole] + bytes(300))  # a network file system may show a hole for a while
    follower = followed(path, clock)
    for _ in range(30):
        follower.poll()
    before = follower.recording.steps
    assert 0 < len(before) < 5
    for _ in range(3):
        clock.now += 5
        follower.poll()
        assert follower.state.name == "running"
        assert "cannot be read to its end: the section" in follower.state.text
    os.utime(path, (1e9, 1e9))
    late = followed(path, clock)
    for _ in range(30):
        late.poll()
    assert late.state.text.startswith("The file is damaged")  # nobody has written it for long
    os.utime(path)
    clock.now += 10
    assert follower.poll()
    assert follower.state.name == "gone"
    assert "The file is damaged: the section" in follower.state.text
    assert follower.recording.steps == before
    assert not follower.poll()  # it does not begin again and again, however small its looks
    with path.open("r+b") as file:  # and then it is filled
        file.seek(hole)
        file.write(data[hole:])
    assert follower.poll()
    assert follower.state.name == "running"
    assert follower.recording.steps == list(range(5))


def test_a_follower_that_comes_late_catches_up(
    path: pathlib.Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_BYTES_PER_POLL", 5000)  # a small bound in place of megabytes
    recording = Recording(max_steps=40)
    recording.attach(path, print)
    for step in range(200):
        add(recording, step)
    follower, looks = followed(path, clock, read=False), 0
    assert follower.behind
    while follower.behind:
        looks += 1
        assert follower.poll()
        assert follower.state.name == "running"
        assert not len(follower.recording) or not follower.behind
    assert looks > 5
    assert not follower.poll()
    assert contents(follower.recording) == contents(recording)
    assert len(follower.recording) <= 40
    recording.detach()


def test_a_full_disk_is_no_end(
    path: pathlib.Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    recording = Recording()
    recording.attach(path, said.append)
    add(recording, 0)
    follower = followed(path, clock)

    def refused(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refused)
        for step in range(1, 4):
            add(recording, step)
        assert len(said) == 1
        journal = recording._journal  # written to while a look is under way
        assert journal is not None
        os.utime(path, ns=(1, 1))
        journal.beat()
        assert path.stat().st_mtime_ns != 1, "the process lives, and says so"
        follower.poll()
        assert follower.recording.steps == [0]
        assert follower.state.name == "running"
    recording.detach()
    follower.poll()
    assert follower.recording.steps == [0, 1, 2, 3]
    assert follower.state.name == "ended"


def test_a_heartbeat_sets_the_time_of_its_own_file_alone(path: pathlib.Path) -> None:
    path.write_bytes(b"")
    found = path.stat()
    os.utime(path, ns=(1, 1))
    touch(str(path), (found.st_dev, found.st_ino))
    assert path.stat().st_mtime_ns != 1
    os.utime(path, ns=(1, 1))
    touch(str(path), (found.st_dev, found.st_ino + 1))
    assert path.stat().st_mtime_ns == 1


def test_a_heartbeat_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnx_inspector.files.HEARTBEAT_SECONDS", 0.001)

    class Owner:
        def __init__(self) -> None:
            self.beats = 0

        def beat(self) -> None:
            self.beats += 1
            raise OSError

    owner = Owner()
    one, other = Heartbeat(owner.beat), Heartbeat(owner.beat)
    while owner.beats < 5:
        one._thread.join(0.01)  # a follower ends by itself, and says so to nobody
    other.stop()
    other._thread.join(60)
    assert not other._thread.is_alive()
    del owner
    one._thread.join(60)
    assert not one._thread.is_alive()
    assert HEARTBEAT_SECONDS < 5


WRITER = """
import sys
from nnx_inspector.recordings.load import load
from nnx_inspector.recordings.recording import Recording

summaries = {site: {q: summary} for site, q, summary in load(sys.argv[1]).passes[0].items()}
recording = Recording()
recording.attach(sys.argv[2], print)
for number, line in enumerate(sys.stdin):
    recording.hold(number, number, summaries)
    if number:
        recording.append(number - 1, summaries, held=number - 1)
    print(number, flush=True)
"""


def test_ten_followers_of_a_process_that_is_killed(path: pathlib.Path, clock: Clock) -> None:
    command = [sys.executable, "-c", WRITER, str(OLD_FILES / "killed.nni"), str(path)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, bufsize=1, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        followers = list[Follower]()
        for step in range(20):
            process.stdin.write("\n")
            assert process.stdout.readline() == f"{step}\n"
            followers = followers or [followed(path, clock, read=False) for _ in range(10)]
            for one in followers:
                assert one.poll()
                assert one.state.name == "running"
                assert one.recording.steps == list(range(step + 1))
        os.kill(process.pid, signal.SIGKILL)
    clock.now += 19
    for one in followers:
        assert not one.poll()
        assert one.state.name == "running"
        assert shown(one.recording) == shown(load(path))
    clock.now += 1
    for one in followers:
        assert one.poll()
        assert one.state.name == "gone"
        assert one.recording.steps == list(range(20))


@pytest.mark.parametrize(
    "code", ["", "raise SystemExit(3)", "del recording; import gc; gc.collect()"]
)
def test_a_process_that_leaves_without_closing_its_file(
    path: pathlib.Path, clock: Clock, code: str
) -> None:
    script = WRITER.partition("for number")[0] + code
    subprocess.run(
        [sys.executable, "-c", script, str(OLD_FILES / "killed.nni"), str(path)], check=False
    )
    follower = followed(path, clock)
    clock.now += 20
    follower.poll()
    expected = "gone" if code.startswith("del") else "ended"
    assert follower.state.name == expected
    assert ("does not say that it ended" in follower.state.text) == (expected == "gone")


def test_deflated_summaries_may_take_the_same_memory_in_several_looks(
    path: pathlib.Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording()
    recording.append(0, {"a": {"output": SUMMARY}}, kind="b")
    recording.save(path)
    *before, (kind, flags, body) = (part for part in parts_of(path.read_bytes())[:5])
    assert [part[0] for part in before] == [b"name", b"head", b"mark", b"name"]
    blob, columns = (
        deflate_summary(summary_of(normal_values(0, 100_000))),
        safetensors.numpy.load(body),
    )
    columns |= {"summary": np.frombuffer(blob, "u1"), "ends": np.array([len(blob)], np.uint32)}
    for number in range(40):
        columns["pass"][:2] = number
        before.append((kind, flags, safetensors.numpy.save(columns)))
    path.write_bytes(file_of(before))

    def reads(spare: int) -> bool:
        monkeypatch.setattr(loading, "_SPARE", spare)  # a small bound in place of megabytes
        try:
            return len(load(path)) == 40
        except InspectorError:
            return False

    assert next(spare for spare in range(-(10**6), 10**6, 1000) if reads(spare))
    monkeypatch.setattr(follow, "_BYTES_PER_POLL", 3000)  # a small bound in place of megabytes
    follower = followed(path, clock)
    for _ in range(200):
        follower.poll()
    assert follower.recording.steps == list(range(40))
