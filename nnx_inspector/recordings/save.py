"""A recording as the sections of a file: written whole, and written on to while a run goes on.

Invariant: a file is replaced in one piece or not at all, and what is written on to it is with the
operating system before the writing returns, so that a process that is killed loses what it was
writing and no more. Reads nothing, and imports no jax. The format is in
notebooks/recording-format.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nnx_inspector.errors import InspectorError
from nnx_inspector.recordings.facts import Facts, Figures
from nnx_inspector.recordings.format import MAGIC, Columns, Writer
from nnx_inspector.recordings.passes import QUANTITIES, Pass

HEAD, NAMES, PASS, HELD, POINTS = b"head", b"name", b"pass", b"held", b"metr"
FACTS, FIGURES = b"fact", b"figs"
PERTURBED, NEWS = 1, 2
"""Bits of a pass's flags."""
NONFINITE: Final = ("nan", "posinf", "neginf")
"""Kinds of value that are no number, in the order of their numbers in a file."""
MOST_NAME: Final = 2**16
"""Longest name of a site, a metric or a kind of pass, in bytes."""

_POINTS_A_SECTION: Final = 2**14
_SPARE: Final = 4 * 2**20
"""Bytes that a file may have beyond twice its recording's before it is written anew."""


@dataclasses.dataclass(frozen=True)
class State:
    """All that there is to a recording.

    Attributes:
        max_steps: its bound in passes.
        max_bytes: its bound in bytes.
        appended: passes that there were, those that went included.
        thinned_points: points of metrics that went.
        sites: all that it ever had, in order.
        firsts: (perturbed, quantity, kind of value) of the NaN and Inf it has seen.
        passes: those kept.
        held: by ticket, those that may not be complete yet; see `Recording.hold`.
        curves: metric -> float64[n, 2], step and value.
        facts: what is known of the model, None where nothing is.
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
    facts: Facts | None = None


class Sections:
    """Makes the sections of one recording's file; names are written when they are first used."""

    def __init__(self) -> None:
        self._writer = Writer()
        self._names: dict[str, int] = {}

    def of_state(self, state: State) -> Iterator[bytes]:
        """A file with all that there is, from its first byte on."""
        points = sum(len(curve) for curve in state.curves.values())
        yield MAGIC + self._named(state.sites)
        yield self.section(
            HEAD,
            {
                "bounds": np.array([state.max_steps, state.max_bytes], np.int64),
                "counts": np.array([state.appended, state.thinned_points], np.int64),
                "held": np.array([len(state.passes), points], np.int64),
                "sites": self._numbers(state.sites),
                "firsts": _firsts(state.firsts),
            },
        )
        if state.facts is not None:
            yield self.of_facts(state.facts)
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
            item: the pass.
            kind: PASS, or HELD of one that may not be complete.
            ticket: under which it is, or was, held; -1 of one that never was.
            like: what was written under this ticket; the same summaries are not written again.
        """
        sites = [site for site, _ in item.keys]
        first = b"" if item.figures is None or kind != PASS else self._of_figures(item.figures)
        names = first + self._named((*dict.fromkeys(sites), item.kind))
        flags = PERTURBED * item.perturbed | NEWS * item.news
        numbers = [item.number, item.step, item.setting, self._names[item.kind], flags, ticket]
        columns: Columns = {"pass": np.array(numbers, np.int64)}
        if like is not None and (like.keys, like.packed) == (item.keys, item.packed):
            return names + self.section(kind, columns)
        columns = {
            **columns,
            "site": self._numbers(sites),
            "quantity": np.array([QUANTITIES.index(q) for _, q in item.keys], np.uint8),
            **_packed("summary", item.packed),
        }
        return names + self.section(kind, columns)

    def of_facts(self, facts: Facts) -> bytes:
        """All that is known of the model now, in place of what was known before."""
        return self.section(FACTS, facts.to_columns(), optional=True)

    def _of_figures(self, figures: Figures) -> bytes:
        """What rules need besides of the pass that follows."""
        names = self._named(dict.fromkeys((*figures.sites, *figures.parameters)))
        columns: Columns = {
            "site": self._numbers(figures.sites),
            "rows": np.ascontiguousarray(figures.rows),
            "masks": np.ascontiguousarray(figures.masks),
            "parameter": self._numbers(figures.parameters),
            "states": np.ascontiguousarray(figures.parameter_rows),
            "varied": np.array([figures.varied], np.int64),
        }
        return names + self.section(FIGURES, columns, optional=True)

    def of_points(self, step: int, values: Mapping[str, float]) -> bytes:
        """A point of each of these metrics."""
        rows = np.array([[step, value] for value in values.values()], np.float64).reshape(-1, 2)
        return self._of_points(list(values), rows)

    def _of_points(self, names: Sequence[str], rows: npt.NDArray[np.float64]) -> bytes:
        written = self._named(dict.fromkeys(names))
        numbers = np.array([self._names[name] for name in names], np.float64)
        points = np.column_stack([numbers, rows])
        return written + self.section(POINTS, {"points": np.ascontiguousarray(points)})

    def section(self, kind: bytes, columns: Columns, *, optional: bool = False) -> bytes:
        """A section of any kind; an older reader skips it where it is `optional`."""
        return self._writer.section(kind, columns, optional=optional)

    def _named(self, names: Iterable[str]) -> bytes:
        """A section with those of the names that were not written yet; nothing without any."""
        new = [name for name in names if name not in self._names]
        if not new:
            return b""
        # half a surrogate pair, which a str may have, is no UTF-8, but comes back
        texts = [name.encode("utf-8", "surrogatepass") for name in new]
        longest = max(texts, key=len)
        if len(longest) > MOST_NAME:
            raise InspectorError(
                f"A recording with a name of {len(longest)} bytes cannot be saved: "
                f"{longest[:40]!r}... Names of sites and metrics may have {MOST_NAME} bytes."
            )
        for name in new:
            self._names[name] = len(self._names)
        return self.section(NAMES, _packed("text", texts))

    def _numbers(self, names: Iterable[str]) -> npt.NDArray[np.uint32]:
        return np.array([self._names[name] for name in names], np.uint32)


def _packed(name: str, parts: Sequence[bytes]) -> dict[str, npt.NDArray[Any]]:
    """Pieces one after the other, and where each ends."""
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    if len(ends) and ends[-1] >= 2**32:
        raise InspectorError(
            f"A pass of {ends[-1]} bytes cannot be saved, 2**32 is the most: record fewer sites "
            "with only=."
        )
    joined = np.frombuffer(b"".join(parts), np.uint8)
    return {name: joined, "ends": ends.astype(np.uint32)}


def _firsts(firsts: Iterable[tuple[bool, str, str]]) -> npt.NDArray[np.uint8]:
    rows = sorted((int(p), QUANTITIES.index(q), NONFINITE.index(kind)) for p, q, kind in firsts)
    return np.array(rows, np.uint8).reshape(-1, 3)


def save(path: str | os.PathLike[str], state: State) -> None:
    """Put a file with all of a recording in the place of `path`.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
        InspectorError: a name is too long, or a pass too large.
    """
    file, _, _ = _replaced(os.path.realpath(path), dataclasses.replace(state, held={}))
    os.close(file)


def _replaced(path: str, state: State) -> tuple[int, Sections, int]:
    """A new file with all of a recording, open to be written on to, and its size."""
    folder, name = os.path.split(path)
    new = os.path.join(folder, f".{name[:200]}.{secrets.token_hex(4)}.new")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        sections, size = Sections(), 0
        for part in sections.of_state(state):
            _write(file, part)
            size += len(part)
        os.fsync(file)  # a name that outlives a power failure must not outlive what it names
        os.replace(new, path)
    except BaseException:
        os.close(file)
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    return file, sections, size


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


class Journal:
    """The file that a recording is written on to; its owner calls it under its own lock.

    When the file has grown to more than twice what is kept, it is written anew. Where writing
    fails, that is told once, what is there stays, and with the next passes (ever fewer of them) it
    is tried to write all anew.

    Args:
        path: where.
        state: all that there is now, whenever it is called.
        failed: told in words of the first failure.

    Attributes:
        path: without symbolic links.
        errors: how many passes and points could not be written when they came.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        state: Callable[[], State],
        failed: Callable[[str], object],
    ):
        self.path = os.path.realpath(path)
        self.errors = 0
        self._state, self._failed = state, failed
        self._process = os.getpid()
        self._told = False
        self._said = ""
        self._file: int | None = None
        self._size = 0
        self._open()

    def _open(self) -> None:
        file, self._sections, self._size = _replaced(self.path, self._state())
        if self._file is not None:
            os.close(self._file)
        self._file = file

    def write(self, make: Callable[[Sections], bytes], kept: int) -> None:
        """Write on what `make` makes; a recording takes `kept` bytes now. Never raises.

        What is to be written is part of the state already: a file that is written anew has it.
        """
        if os.getpid() != self._process:  # a fork: the file is the parent's
            return
        try:
            if self._file is not None and os.fstat(self._file).st_nlink == 0:
                self._give_up("another file was put in its place, or it was deleted")
            elif self._file is None:
                self.errors += 1
                if self.errors & (self.errors - 1) == 0:  # 2, 4, 8 ...
                    self._open()
            elif self._size > 2 * kept + _SPARE:
                self._open()
            else:
                data = make(self._sections)
                _write(self._file, data)
                self._size += len(data)
        except (OSError, InspectorError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._file is not None:  # what was written of a section is cut off, or read as torn
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            os.close(self._file)
            self._file, self.errors = None, self.errors + 1
        if not self._told:
            self._tell(f"{error}. The run goes on; saving is tried again, less and less often.")

    def _give_up(self, why: str) -> None:
        self._process = -1
        self.close()
        self._tell(f"{why}. The run goes on; save again to write on to a file.")

    def _tell(self, text: str) -> None:
        self._told = True
        self._said = f"The recording could not be saved to {self.path!r}: {text}"

    def tell(self) -> None:
        """Tell of a failure; its owner calls it without any lock."""
        text, self._said = self._said, ""
        if text:
            self._failed(text)

    def anew(self) -> None:
        """Write all that there is anew.

        Raises:
            OSError: it cannot be written; what was there before is as it was.
            InspectorError: a name is too long, or a pass too large.
        """
        self._open()

    def close(self, *, retry: bool = True) -> None:
        """Nothing is written on any more; where the last could not be, it is tried once more."""
        if retry and self._file is None and self._process == os.getpid():
            with contextlib.suppress(OSError, InspectorError):
                self._open()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._process = -1
