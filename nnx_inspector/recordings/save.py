"""Writes a recording as the sections of a file: all at once, or bit by bit during a run.

Invariant: a file is replaced in one piece or not at all, and appended data has reached the
operating system when the call returns, so that a process that is killed loses at most what it was
writing. Reads nothing, and imports no jax. The format is in notebooks/recording-format.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from nnx_inspector.errors import InspectorError
from nnx_inspector.files import Heartbeat, is_gone, real_path, replace_file, touch, write_all
from nnx_inspector.recordings.curves import Tally
from nnx_inspector.recordings.facts import Facts, PassStats
from nnx_inspector.recordings.format import MAGIC, Columns, Writer, text_columns
from nnx_inspector.recordings.passes import EVENTS, NONFINITE, QUANTITIES, Mark, Pass, make_mark

HEAD, NAMES, PASS, HELD, POINTS = b"head", b"name", b"pass", b"held", b"metr"
FACTS, FIGURES, TABLE, MARK = b"fact", b"figs", b"tabl", b"mark"
PERTURBED, NEWS = 1, 2
"""Bits of a pass's flags."""
MOST_NAME: Final = 2**16
"""The longest name of a site, a metric or a kind of pass, in bytes."""

_POINTS_A_SECTION: Final = 2**14
_SPARE: Final = 4 * 2**20
"""How many bytes larger than twice its recording a file may be before it is rewritten."""


@dataclasses.dataclass(frozen=True)
class State:
    """Everything that makes up a recording.

    Attributes:
        appended: how many passes were appended, dropped ones included.
        thinned_points: how many points of metrics were dropped.
        dropped: metric -> what was counted of those.
        sites: all sites that it ever had, in order.
        firsts: (perturbed, quantity, kind of value) of the NaN and Inf it has seen.
        held: ticket -> a pass that may still be incomplete; see `Recording.hold`.
        curves: metric -> float64[n, 2], step and value.
        tables: title -> the columns of a table; see `Recording.keep_table`.
        marks: the events of the run, oldest first.
    """

    max_steps: int
    max_bytes: int
    appended: int
    thinned_points: int
    sites: tuple[str, ...]
    firsts: frozenset[tuple[bool, str, str]]
    passes: tuple[Pass, ...]
    held: Mapping[int, Pass]
    curves: Mapping[str, npt.NDArray[np.float64]]
    dropped: Mapping[str, Tally] = dataclasses.field(default_factory=lambda: {})
    facts: Facts | None = None
    tables: Mapping[str, Columns] = dataclasses.field(default_factory=lambda: {})
    marks: tuple[Mark, ...] = ()


class Sections(Writer):
    """Makes the sections of one recording's file. A name is written when it is first used.

    Attributes:
        passes: how many passes have been made.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[str, int] = {}
        self.passes = 0

    def of_state(self, state: State) -> Iterator[bytes]:
        """A whole file, from its first byte on."""
        points = sum(len(curve) for curve in state.curves.values())
        yield MAGIC + self._new_names(dict.fromkeys((*state.sites, *state.dropped)))
        yield self.section(
            HEAD,
            {
                "bounds": np.array([state.max_steps, state.max_bytes], np.int64),
                "counts": np.array([state.appended, state.thinned_points], np.int64),
                "held": np.array([len(state.passes), points], np.int64),
                "sites": self._numbers(state.sites),
                "firsts": _firsts(state.firsts),
                "dropped": self._numbers(state.dropped),
                "tallies": np.array([*state.dropped.values()], np.int64).reshape(-1, 4),
            },
        )
        for mark in state.marks:
            yield self.of_mark(mark)
        if state.facts is not None:
            yield self.of_facts(state.facts)
        for title, table in state.tables.items():
            yield self.of_table(title, table)
        for item in state.passes:
            yield self.of_pass(item)
        for name, curve in state.curves.items():
            for start in range(0, len(curve), _POINTS_A_SECTION):
                part = curve[start : start + _POINTS_A_SECTION]
                yield self._of_points([name] * len(part), part)
        for ticket, item in state.held.items():
            yield self.of_pass(item, kind=HELD, ticket=ticket)

    def of_pass(
        self, item: Pass, *, kind: bytes = PASS, ticket: int = -1, like: Pass | None = None
    ) -> bytes:
        """One pass.

        Args:
            kind: PASS, or HELD for a pass that may be incomplete.
            ticket: the ticket under which it is or was held; -1 if it never was.
            like: what was written under this ticket before; equal summaries are not repeated.
        """
        self.passes += kind == PASS
        sites = [site for site, _ in item.keys]
        first = b"" if item.figures is None or kind != PASS else self._of_figures(item.figures)
        names = first + self._new_names((*dict.fromkeys(sites), item.kind))
        flags = PERTURBED * item.perturbed | NEWS * item.news
        numbers = [item.number, item.step, item.setting, self._names[item.kind], flags, ticket]
        columns: Columns = {"pass": np.array(numbers, np.int64)}
        if like is not None and (like.keys, like.packed) == (item.keys, item.packed):
            return names + self.section(kind, columns)
        columns = {
            **columns,
            "site": self._numbers(sites),
            "quantity": np.array([QUANTITIES.index(q) for _, q in item.keys], np.uint8),
            "summary": np.frombuffer(item.packed.data, "u1"),
            "ends": np.frombuffer(item.packed.ends, "<u4"),
        }
        return names + self.section(kind, columns)

    def of_mark(self, mark: Mark) -> bytes:
        """An event of the run."""
        numbers = [EVENTS.index(mark.event), mark.number]
        columns: Columns = {
            "mark": np.array(numbers, np.int64),
            "time": np.array([mark.time], np.float64),
            "text": np.frombuffer(mark.text.encode("utf-8", "surrogatepass"), np.uint8),
        }
        return self.section(MARK, columns, optional=True)

    def of_facts(self, facts: Facts) -> bytes:
        """All facts known about the model; they replace those of earlier sections."""
        return self.section(FACTS, facts.to_columns(), optional=True)

    def of_table(self, title: str, table: Columns) -> bytes:
        """A table, which replaces one of its title. Text is a column of numbers, and the texts."""
        columns: dict[str, np.ndarray] = {":names": _text([title, *table])}
        for name, column in table.items():
            if column.dtype.kind in "iuf":
                dtype = np.float64 if column.dtype.kind == "f" else np.int64
                columns[name] = np.ascontiguousarray(column, dtype)
            else:
                texts, codes = np.unique(column.astype(str), return_inverse=True)
                columns[name] = codes.astype(np.uint32)
                columns[f"{name}:texts"] = _text(texts.tolist())
        return self.section(TABLE, columns, optional=True)

    def _of_figures(self, figures: PassStats) -> bytes:
        """The figures that the rules need of the pass that follows."""
        names = self._new_names(
            dict.fromkeys((*figures.sites, *figures.parameters, *figures.choices))
        )
        columns: Columns = {
            "site": self._numbers(figures.sites),
            "rows": np.ascontiguousarray(figures.rows),
            "masks": np.ascontiguousarray(figures.masks),
            "parameter": self._numbers(figures.parameters),
            "states": np.ascontiguousarray(figures.parameter_rows),
            "varied": np.array([figures.varied], np.int64),
        }
        if (rows := figures.choice_rows).size:
            columns |= {"choice": self._numbers(figures.choices), "choices": rows}
        return names + self.section(FIGURES, columns, optional=True)

    def of_points(self, step: int, values: Mapping[str, float]) -> bytes:
        rows = np.array([[step, value] for value in values.values()], np.float64).reshape(-1, 2)
        return self._of_points(list(values), rows)

    def _of_points(self, names: Sequence[str], rows: npt.NDArray[np.float64]) -> bytes:
        written = self._new_names(dict.fromkeys(names))
        numbers = np.array([self._names[name] for name in names], np.float64)
        points = np.column_stack([numbers, rows])
        return written + self.section(POINTS, {"points": np.ascontiguousarray(points)})

    def _new_names(self, names: Iterable[str]) -> bytes:
        """A section with the names that were not written yet; `b""` if there are none."""
        new = [name for name in names if name not in self._names]
        if not new:
            return b""
        columns = text_columns("text", new, ends="ends", dtype=np.uint32)
        most = int(np.diff(columns["ends"].astype(int), prepend=0).max())
        if most > MOST_NAME:
            raise InspectorError(
                f"A recording with a name of {most} bytes cannot be saved: "
                f"{max(new, key=len)[:40]!r}... Shorten it: a site or metric name may have "
                f"{MOST_NAME} bytes."
            )
        self._names |= {name: number for number, name in enumerate(new, len(self._names))}
        return self.section(NAMES, columns)

    def _numbers(self, names: Iterable[str]) -> npt.NDArray[np.uint32]:
        return np.array([self._names[name] for name in names], np.uint32)


def _text(texts: Sequence[str]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(json.dumps(list(texts)).encode(), np.uint8)


def _firsts(firsts: Iterable[tuple[bool, str, str]]) -> npt.NDArray[np.uint8]:
    rows = sorted(
        (int(p), QUANTITIES.index(q), list(NONFINITE).index(kind)) for p, q, kind in firsts
    )
    return np.array(rows, np.uint8).reshape(-1, 3)


def save(path: str | bytes | os.PathLike[str], state: State) -> None:
    """Write a whole recording to `path`, replacing the file there.

    Raises:
        OSError: the file cannot be written; an existing file is left as it was.
        InspectorError: a name is too long, or a pass too large.
    """
    marks = (*state.marks, make_mark("saved", state.appended))
    alone = dataclasses.replace(state, held={}, marks=marks)
    file, _ = replace_file(path, Sections().of_state(alone))
    os.close(file)


class Journal:
    """A file that a recording is appended to. Its owner calls it under the owner's lock.

    A file that has grown to more than twice the size of the recording is rewritten. If writing
    fails, the failure is reported once and the file stays as it is; later passes, at growing
    intervals, try to rewrite it. A change that was announced and never written, because an
    interrupt came between, is written by rewriting the file too: what its sections said of
    themselves (their names, their chain) may not have reached it.

    Args:
        state: returns the current state of the recording.
        failed: called with a message at the first failure.

    Attributes:
        path: the path without symbolic links.
        errors: how many passes and points could not be written when they arrived.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(
        self,
        path: str | bytes | os.PathLike[str],
        state: Callable[[], State],
        failed: Callable[[str], object],
    ):
        self.path = real_path(path)
        self.errors = 0
        self._state, self._failed = state, failed
        self._process = os.getpid()
        self._reported = False
        self._failure = ""
        self._file: int | None = None
        self._size = 0
        self._unwritten = 0  # how many changes of the state may be missing in the file
        self._identity = (0, 0)
        self.rewrite()
        self._heartbeat = Heartbeat(self.beat)

    def rewrite(self) -> None:
        """Write the whole file; one that cannot be written leaves the existing one as it was."""
        sections, before = Sections(), self._file
        self._unwritten += (
            2  # until all is noted of the new file, which takes the place of the old one
        )
        file, size = replace_file(self.path, sections.of_state(self._state()))
        self._file, self._size, self._sections, self._unwritten = file, size, sections, 0
        status = os.fstat(file)
        self._identity = status.st_dev, status.st_ino
        self._passes, self._reported = sections.passes, False
        if before is not None:
            os.close(before)

    def beat(self) -> None:
        """Set the file's time; called without the owner's lock."""
        touch(self.path, self._identity)

    def announce(self) -> None:
        """Say that the state is about to change, and `write_all` will be called with the change."""
        self._unwritten += 1

    def write(self, make: Callable[[Sections], bytes], kept: int) -> None:
        """Append what `make` returns, as `announce` has said; the recording now takes `kept` bytes.

        No failure is raised. The data is part of the state already, so a rewritten file has it too.
        """
        if os.getpid() != self._process:  # a fork: the file is the parent's
            return
        try:
            if self._file is None:
                self.errors += 1
                if self.errors & (self.errors - 1) == 0:  # 2, 4, 8 ...
                    self.rewrite()
            elif self._unwritten > 1:
                self.rewrite()
            elif is_gone(self._file):
                self._give_up()
            elif self._size > 2 * kept + _SPARE:
                self.rewrite()
            else:
                self._size += write_all(self._file, make(self._sections))
                self._passes, self._unwritten = self._sections.passes, 0
        except (OSError, InspectorError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        file = self._file
        if file is not None:
            self._file, self._unwritten, self.errors = None, 0, self.errors + 1
            with contextlib.suppress(OSError):  # else the incomplete section is read as torn
                os.ftruncate(file, self._size)
            os.close(file)
        if not self._reported:
            self._note_failure(
                f"{error}. It has {self._passes} passes of the run, which goes on; saving is "
                "retried at growing intervals."
            )

    def _give_up(self) -> None:
        self.close(retry=False)
        self._note_failure(
            "another file was put in its place, or it was deleted. It had "
            f"{self._passes} passes of the run, which goes on; call save again to keep saving."
        )

    def _note_failure(self, text: str) -> None:
        self._reported = True
        self._failure = f"The recording could not be saved to {self.path!r}: {text}"

    def tell(self) -> None:
        """Report a failure, if there is one. The owner calls this without any lock."""
        text, self._failure = self._failure, ""
        if text:
            self._failed(text)

    def end(self, mark: Mark) -> None:
        """Append a last mark that the owner does not keep, if the file is in order."""
        with contextlib.suppress(OSError):
            if self._file is not None and not self._unwritten and not is_gone(self._file):
                write_all(self._file, self._sections.of_mark(mark))

    def close(self, *, retry: bool = True) -> None:
        """Stop appending; if the last write failed or never came, rewrite the file once more."""
        self._heartbeat.stop()
        # with more due, a new file of ours may have taken its place
        file = self._file if retry and self._unwritten < 2 else None
        if file is not None and is_gone(file):
            self._give_up()
        if retry and self._file is None:
            self._unwritten += 1
        if retry:
            self.catch_up()
        file, self._file, self._process = self._file, None, -1
        if file is not None:
            os.close(file)

    def catch_up(self) -> None:
        """Write what an interrupt or a failure has left out, by rewriting the file."""
        if self._unwritten and self._process == os.getpid():
            with contextlib.suppress(OSError, InspectorError):
                self.rewrite()
