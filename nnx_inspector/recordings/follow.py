"""`Follower`: a recording that grows while another process writes its file.

A look reads only what was appended since the one before. It takes no lock, maps no memory and
writes nothing, so that any number of followers leave the writer alone. A file that the
writer has rewritten (see `Journal`), or that another run has put in its place, is read again.

Invariant: the recording only ever holds what `load` would read of the same file, and no clock of
another machine is trusted: what counts is when this process saw the file change. Imports no jax.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from nnx_inspector.errors import InspectorError
from nnx_inspector.recordings.format import Reader, open_recording
from nnx_inspector.recordings.load import SectionReader, read_sections
from nnx_inspector.recordings.passes import Mark
from nnx_inspector.recordings.recording import Recording

_BYTES_PER_POLL: Final = 16 * 2**20
"""How many bytes a look reads, about: half a second's work."""
_LONG_AGO: Final = 600.0
"""Seconds since its last change after which a file counts as left by its process at first sight.
Clocks of two machines may differ, so it is many."""
_STALLED: Final = 60.0
"""Seconds without a step after which a living run counts as stalled, or `_SLOW` pauses."""
_GONE_AFTER: Final = 20.0
"""Seconds without a sign of life after which a run counts as gone; a writer gives one every two."""
_SLOW: Final = 5.0
"""How many times the longest pause between two steps so far a pause may last."""


class RunState(NamedTuple):
    """How a run is.

    Attributes:
        name: "running", "ended", "stalled" (its process lives, but no step was recorded for long)
            or "gone" (no sign of its process, or the file cannot be read any further).
        text: a sentence that says so.
    """

    name: Literal["running", "ended", "stalled", "gone"]
    text: str


class Follower:
    """Follows the file of a run that may still be going on.

    It has no thread and never waits: call `poll` again and again, from one thread, at most about
    once a second. A pass that may be incomplete, because gradients could still arrive, is shown as
    the newest; when it is complete, a pass of its number takes its place.

    Args:
        path: the file of `nni.watch(save=)` or `insp.save`.
        clock: a clock that never goes back, in seconds.

    Attributes:
        recording: what was read so far. It stays the same object; the first `poll` fills it.
        replaced: how often a file of another run was put in place of the one followed.

    Raises:
        InspectorError: the file is not a recording, or one that only a newer version can read.
        OSError: the file cannot be opened.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = Recording()
        ...     run.attach(pathlib.Path(folder, "run.nni"), print)
        ...     follower = Follower(pathlib.Path(folder, "run.nni"))
        ...     run.append(7, {})
        ...     follower.poll(), follower.recording.steps, follower.state.name
        ...     run.detach()
        ...     follower.poll(), follower.state.name
        ...     follower.close()
        (True, [7], 'running')
        (True, 'ended')
    """

    def __init__(
        self, path: str | bytes | os.PathLike[str], *, clock: Callable[[], float] = time.monotonic
    ):
        self._path, self._clock = os.fspath(path), clock
        self.recording = Recording()
        self.recording.name = os.path.basename(os.fsdecode(path))
        self.replaced = 0
        self.state = RunState("running", "The file was not read yet.")
        self._file = open_recording(path)  # kept open: its inode is given to no other file
        self._status = os.fstat(self._file.fileno())
        self._sign: tuple[int, int, int] | None = None  # inode, size and time, as seen last
        self._alive = self._stepped = clock()
        self._pause = 0.0  # between steps, as a running mean
        self._trouble, self._damage = "", ""
        self._damaged, self._damaged_at = 0.0, 0  # since when, and behind which byte
        self._shown = self._again = False
        self._begin()

    def poll(self) -> bool:
        """Read what was added; returns whether the recording or the state is another than before.

        Reads about 16 MB at most: a follower that comes late, and is `behind`, catches up in
        several calls.
        """
        before, self._changed = self.state, False
        try:
            self._read_on()
            self._trouble = ""
        except FileNotFoundError:
            self._trouble = f"{self._path!r} was deleted or moved."
        except InspectorError as error:
            self._trouble = str(error)
        except OSError as error:
            self._trouble = f"{self._path!r} cannot be read: {error}."
        self.state = self._state_now()
        return self._changed or self.state != before

    @property
    def behind(self) -> bool:
        """Whether the file had more to read when it was looked at."""
        return self._reader.at + self._reader.torn < self._reader.size

    def close(self) -> None:
        """Let the file go. The recording stays as it is; `poll` must not be called again."""
        self._file.close()

    def _begin(self) -> None:
        """Read the file from its first byte on."""
        self._reader = Reader(self._file)
        self._opened = SectionReader(self._reader.size)

    def _read_on(self) -> None:
        """Open the file again, which asks a network file system how it is now, and read on."""
        file, now = open_recording(self._path), self._clock()
        status = os.fstat(file.fileno())
        same = os.path.samestat(status, self._status)  # NFS may not know the old file any more
        self._file.close()
        self._file, self._status = file, status
        sign = status.st_ino, status.st_size, status.st_mtime_ns
        if self._sign is None and time.time() - status.st_mtime > _LONG_AGO:
            self._alive = now - _GONE_AFTER
        elif sign != self._sign:
            self._alive = now
        self._sign = sign
        if not same or status.st_size < self._reader.at:
            same, self._damage = False, ""
        if not same or self._again:
            self._again = same = False
            self._begin()
        else:
            self._reader.go_on(file)
        self._read(now, paused=same)

    def _read(self, now: float, *, paused: bool) -> None:
        reader, opened = self._reader, self._opened
        opened.allow(reader.size)
        at, damage = reader.at, read_sections(reader, opened, _BYTES_PER_POLL)
        if reader.at > at:
            self._changed = True
            if paused:
                self._pause += (now - self._stepped - self._pause) / 8
            self._stepped = now
        if damage is None:
            if not self.behind or reader.at > self._damaged_at:
                self._damage = ""
        elif not self._damage:  # the file may be another one that was written in its place
            self._damage, self._damaged, self._again = str(damage), now, True
            self._damaged_at = reader.at
        if opened.begun and not (self.behind if damage is None else self._shown):
            self._show()

    def _show(self) -> None:
        opened = self._opened
        if opened.recording is not self.recording:
            other = self._shown and opened.recording.marks[:1] != self.recording.marks[:1]
            self.replaced += other
            self.recording.become(opened.recording)
            opened.recording, self._shown, self._changed = self.recording, True, True
        opened.settle()

    def _state_now(self) -> RunState:
        now, reader = self._clock(), self._reader
        if self._trouble:
            return RunState("gone", self._trouble)
        if self._damage and now - min(self._damaged, self._alive) >= _GONE_AFTER:
            return RunState(
                "gone", f"The file is damaged: {self._damage}. What precedes it is shown."
            )
        if self._damage:
            why = f"the file cannot be read to its end: {self._damage}"
            return RunState("running", f"So far {why}. It is read again.")
        if not self._shown or self.behind:
            read, size = reader.at / 2**20, reader.size / 2**20
            return RunState("running", f"{read:.0f} of {size:.0f} MiB were read so far.")
        marks, passes = self.recording.marks, self.recording.passes
        last = f"Its last step is {passes[-1].step}." if passes else "It recorded no step."
        if marks and not marks[-1].open:
            return RunState("ended", f"{_end_text(marks[-1])} {last}")
        if now - self._alive >= _GONE_AFTER:
            return RunState("gone", f"{_GONE if marks else _UNKNOWN} {last}")
        if now - self._stepped >= max(_STALLED, _SLOW * self._pause):
            sign = f"its last sign of life came less than {_GONE_AFTER:g} s ago"
            return RunState("stalled", f"The run records no step, but {sign}. {last}")
        return RunState("running", f"The run goes on. {last}")


_GONE: Final = (
    "The run's process gives no sign, and its file does not say that it ended: perhaps it was "
    "killed, or its machine cannot be reached."
)
_UNKNOWN: Final = (
    "Nothing is added to the file. An older nnx_inspector wrote it, which does not say whether the "
    "run has ended."
)


def _end_text(mark: Mark) -> str:
    if mark.event == "raised":
        return f"The run ended with a {mark.text}."
    return {
        "ended": "The run has ended.",
        "interrupted": "The run was interrupted.",
    }.get(mark.event, "The file is a copy that was saved whole; nothing is added to it.")
