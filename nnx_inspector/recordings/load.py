"""`load`: reads a recording from a file, which may come from anybody.

Invariant: the result is a recording that `Recording.append` could have made, or an InspectorError;
never a crash, and never more memory than twice the file plus some megabytes; five times the file,
if it is of an earlier version, whose summaries are deflated. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from nnx_inspector.errors import InspectorError, warn
from nnx_inspector.recordings import save as saving
from nnx_inspector.recordings.curves import Tally
from nnx_inspector.recordings.facts import Facts, PassStats, invalid_reason, stats_of
from nnx_inspector.recordings.format import (
    Columns,
    DamagedError,
    Reader,
    column,
    ends_in,
    open_recording,
    texts_in,
)
from nnx_inspector.recordings.passes import (
    EVENTS,
    NONFINITE,
    QUANTITIES,
    Event,
    Mark,
    Pass,
    layout_of,
    make_mark,
    nonfinite_in,
    step_number,
)
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.encoding import Packed, decode_checked, reencode

_SPARE: Final = 8 * 2**20
"""Bytes of memory that loading may take beyond twice the file's size: enough for tiny summaries."""
_NAME_BYTES: Final = 160
"""Bytes of memory that a name takes besides its letters."""
_SUMMARY_BYTES: Final = 320
"""Bytes of memory that a summary, its key and its place take besides its packed bytes."""
_INFLATED: Final = 3
"""How many times the bytes of an older file's summaries they may take besides, inflated."""
_TEXT_BYTES: Final = 80
"""Bytes of memory that a text of a table or a fact takes besides its letters."""
_COLUMN_BYTES: Final = 400
"""Bytes of memory that a column of a table takes besides its values."""
_TEXT: Final = re.compile(rb'\s*+("(?:[^"\\]++|\\.)*+")\s*+([,\]])', re.DOTALL)
"""A text of a JSON list, and what follows it."""
_BATCH: Final = 2**14
_FLAGS: Final = saving.PERTURBED | saving.NEWS
_MOST_FIRSTS: Final = 2 * len(QUANTITIES) * len(NONFINITE)


def load(path: str | bytes | os.PathLike[str], *, damaged: bool = False) -> Recording:
    """Load a recording from a file, on the host alone: no accelerator is touched.

    The file may still be growing, or its process may have been killed. An incomplete section at
    its end is left out.

    Args:
        path: a file written by `Recording.save`, `Inspector.save` or `nni.watch(save=)`.
        damaged: whether to read a damaged file up to the damage. An InspectorWarning then says
            where it is, and the recording is marked as `cut_short`.

    Returns:
        A Recording equal to the one that was saved. It may be appended to and saved again.

    Raises:
        InspectorError: the file is not a recording (the message says what it looks like), or it
            is damaged (the message says where) before its first pass or without `damaged=True`.
        TypeError: `path` is not a path.
        OSError: the file cannot be opened.

    Example:
        >>> import pathlib, tempfile
        >>> from nnx_inspector.stats.summary import empty
        >>> recording = Recording()
        >>> recording.append(7, {"encoder": {"output": empty()}}, metrics={"loss": 0.5})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     recording.save(pathlib.Path(folder, "run.nni"))
        ...     load(pathlib.Path(folder, "run.nni")).steps
        [7]
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(
            f'nni.load("run.nni") takes the path of a recording, got {type(path).__name__}.'
        )
    with open_recording(path) as file:
        reader = Reader(file)
        opened = SectionReader(reader.size)
        damage = read_sections(reader, opened)
        if damage is not None and not (damaged and opened.begun):
            way_out = "nni.load(path, damaged=True) reads what was recorded before that byte"
            raise InspectorError(
                f"{os.fspath(path)!r} is a recording that cannot be read: {damage}."
                + f" {way_out}." * opened.begun
            ) from damage
    opened.settle()
    recording = opened.recording
    recording.take_incomplete()  # nothing completes them any more
    recording.cut_short = reader.torn > 0 or damage is not None or opened.lacks
    recording.name = os.path.basename(os.fsdecode(path))
    if damage is not None:
        warn(
            f"{os.fspath(path)!r} is damaged: {damage}. The {len(recording)} passes kept were "
            "recorded before that byte; nothing after it was read."
        )
    return recording


def load_or_create(path: str | bytes | os.PathLike[str], facts: Facts) -> Recording:
    """The recording in a file, for a restarted run to go on in; a new one if there is no file.

    It ends with the mark of a seam. Attach it to the file again: what follows is added to it.

    Args:
        path: the file of the run that ended or was killed.
        facts: what is known of the model that goes on.

    Raises:
        InspectorError: the file cannot be read, or is of another model.
        OSError: the file cannot be opened.
    """
    if not os.path.exists(path):
        return Recording()
    recording = load(path)
    known, here = (_sizes(one) for one in (recording.facts or Facts(), facts))
    if known != here and (known or len(recording)):
        name = next(name for name in (*here, *known) if known.get(name) != here.get(name))
        there, given = (f"{of[name]} values" if name in of else "no place" for of in (known, here))
        raise InspectorError(
            f"This run cannot go on in {os.fspath(path)!r}, which is of another model: parameter "
            f"{name!r} has {there} there, and {given} in this model. Save to another file, or move "
            "that one away."
        )
    recording.miss(None)
    recording.note(make_mark("resumed", recording.state().appended))
    return recording


def _sizes(facts: Facts) -> dict[str, int]:
    return {one.path: one.size for one in facts.parameters}


def read_sections(
    reader: Reader, opened: SectionReader, most: int | None = None
) -> DamagedError | None:
    """Read on to the end, or about `most` bytes, or the first damage; returns that."""
    end = reader.size if most is None else reader.at + most
    try:
        for section in reader.sections(opened.kinds):
            try:
                opened.kinds[section.kind](section.columns)
            except ValueError as error:
                where = f"the section {section.kind!r} at byte {section.at}"
                raise DamagedError(f"{where}: {error}") from error
            if reader.at >= end:
                break
        _ = opened.recording  # its head must be there
    except DamagedError as error:
        return error
    return None


class SectionReader:
    """The recording that the sections of a file are read into, and what else was read so far.

    Attributes:
        kinds: the handler for the columns of each kind of section. A kind that other readers may
            skip is written by `Sections.section(..., optional=True)` and needs an entry here.
    """

    def __init__(self, size: int):
        self.kinds: dict[bytes, Callable[[Columns], None]] = {
            saving.HEAD: self._head,
            saving.NAMES: self._take_names,
            saving.PASS: self._pass,
            saving.HELD: self._hold,
            saving.POINTS: self._points,
            saving.FACTS: self._facts,
            saving.FIGURES: self._take_figures,
            saving.TABLE: self._table,
            saving.MARK: self._mark,
        }
        self._inflated = 0  # bytes of deflated summaries
        self.allow(size)
        self._names: list[str] = []
        self._name_bytes = 0
        self._found: Recording | None = None
        self._held = [0, 0]
        self._firsts = 0
        self._last = -1
        self._waiting: dict[int, Pass] = {}
        self._waiting_bytes = 0
        self._keys: tuple[bytes, tuple[tuple[str, str], ...]] = (b"", ())
        self._figures: PassStats | None = None  # of the pass that follows
        self._known: Facts | None = None
        self._kept: dict[str, int] = {}  # title of a table, or "" for the facts -> their bytes
        self._kept_bytes = 0

    @property
    def begun(self) -> bool:
        """Whether the head section was read."""
        return self._found is not None

    def allow(self, size: int) -> None:
        """Allow for the memory that a file of this size may take."""
        self._most = 2 * size + _SPARE + _INFLATED * self._inflated

    @property
    def recording(self) -> Recording:
        """What was read.

        Raises:
            DamagedError: the head section was not read.
        """
        if self._found is None:
            raise DamagedError("the head section, which says what is in the file, is missing")
        return self._found

    @recording.setter
    def recording(self, found: Recording) -> None:
        self._found = found

    @property
    def lacks(self) -> bool:
        """Whether passes or points are missing that the file had when it was begun."""
        return any(left > 0 for left in self._held)

    def settle(self) -> None:
        """Let the recording have the facts that were read last, and show what may be incomplete."""
        known, self._known = self._known, None
        if known is not None:
            self.recording.know(known)
        self.recording.show_incomplete(self._waiting.values())

    def _head(self, columns: Columns) -> None:
        if self._found is not None:
            raise ValueError("there is a second head section")
        max_steps, max_bytes = column(columns, "bounds", "int64", (2,)).tolist()
        appended, thinned_points = column(columns, "counts", "int64", (2,)).tolist()
        self._held = column(columns, "held", "int64", (2,)).tolist()
        if not (0 <= self._held[0] <= appended <= 2**53 and 0 <= thinned_points <= 2**53):
            raise ValueError(f"{appended} passes and {thinned_points} points are out of range")
        firsts = column(columns, "firsts", "uint8", (None, 3))
        if len(firsts) > _MOST_FIRSTS or (firsts >= [2, len(QUANTITIES), len(NONFINITE)]).any():
            raise ValueError("column 'firsts' has too many rows or an unknown number")
        sites = self._names_of(column(columns, "sites", "uint32"))
        self._found = Recording(max_steps=max_steps, max_bytes=max_bytes)
        known = {(bool(p), QUANTITIES[q], list(NONFINITE)[kind]) for p, q, kind in firsts.tolist()}
        self._found.begin(appended, thinned_points, sites, known, self._dropped(columns))

    def _dropped(self, columns: Columns) -> dict[str, Tally]:
        """What was counted of the points that were thinned out; older files do not say."""
        if "dropped" not in columns:
            return {}
        names = self._names_of(column(columns, "dropped", "uint32"))
        rows = column(columns, "tallies", "int64", (len(names), 4))
        counts, steps = rows[:, :3], rows[:, 3]
        whole = (counts >= 0).all() and (counts <= 2**53).all() and (np.abs(steps) <= 2**53).all()
        if not whole or (counts[:, 1] + counts[:, 2] > counts[:, 0]).any():
            raise ValueError("the counts of a metric are out of range")
        return {name: Tally(*row) for name, row in zip(names, rows.tolist(), strict=True)}

    def _take_names(self, columns: Columns) -> None:
        text = column(columns, "text", "uint8")
        ends = ends_in(columns, "ends", np.uint32, len(text))
        self._name_bytes += _NAME_BYTES * len(ends) + 4 * len(text)
        self._require_room(0)
        if (np.diff(ends, prepend=0) > saving.MOST_NAME).any():
            raise ValueError(f"a name has more than {saving.MOST_NAME} bytes")
        self._names.extend(texts_in(columns, "text", "ends", np.uint32))

    def _pass(self, columns: Columns) -> None:
        ticket, marks = self._marks(columns)
        before = self._waiting.pop(ticket, None)
        if before is not None:
            self._waiting_bytes -= _SUMMARY_BYTES * len(before.keys) + len(before.packed.data)
        if before is None or "site" in columns:
            item = self._measured(columns, marks)
        else:
            item = dataclasses.replace(before, **marks)
        if not self._last < marks["number"] < 2**53:
            raise ValueError(f"pass {marks['number']} does not follow the one before")
        self._firsts += marks["news"]
        if self._firsts > _MOST_FIRSTS:
            raise ValueError("more passes have the first value of a kind than there are kinds")
        figures, self._figures = self._figures, None
        self.recording.take(dataclasses.replace(item, figures=figures))
        self._last = marks["number"]
        self._held[0] -= 1

    def _hold(self, columns: Columns) -> None:
        ticket, marks = self._marks(columns)
        if ticket < 0 or ticket in self._waiting:
            raise ValueError(f"ticket {ticket} is negative or in use")
        item = self._waiting[ticket] = self._measured(columns, marks)
        self._waiting_bytes += _SUMMARY_BYTES * len(item.keys) + len(item.packed.data)
        self._require_room(0)

    def _marks(self, columns: Columns) -> tuple[int, dict[str, Any]]:
        """The ticket of a pass, and its properties besides its summaries."""
        numbers = column(columns, "pass", "int64", (6,)).tolist()
        number, step, setting, kind, flags, ticket = numbers
        if not (0 <= flags <= _FLAGS and 0 <= setting < 2**53 and ticket >= -1):
            raise ValueError(f"flags {flags}, setting {setting} or ticket {ticket} is out of range")
        marks = {"number": number, "step": step_number(step), "setting": setting}
        marks |= {"perturbed": bool(flags & saving.PERTURBED), "news": bool(flags & saving.NEWS)}
        return ticket, {**marks, "kind": self._names_of([kind])[0]}

    def _measured(self, columns: Columns, marks: Mapping[str, Any]) -> Pass:
        sites, quantities = column(columns, "site", "uint32"), column(columns, "quantity", "uint8")
        data = column(columns, "summary", "uint8")
        ends = ends_in(columns, "ends", np.uint32, len(data))
        if not len(sites) == len(quantities) == len(ends):
            raise ValueError("its columns have different lengths")
        self._require_room(len(data) + _SUMMARY_BYTES * len(ends))
        keys = self._keys_of(sites, quantities)
        packed = Packed(data.tobytes(), columns["ends"].tobytes())
        if packed.deflated:
            self._inflated += len(data)
            self._most += _INFLATED * len(data)
            packed = reencode(packed, self._most - self._bytes_taken - _SUMMARY_BYTES * len(ends))
        nonfinite, start = set[tuple[str, str]](), 0
        for found in decode_checked(packed):
            nonfinite |= nonfinite_in(keys[start:], found)
            start += len(found.kinds)
        return Pass(layout=layout_of(keys), packed=packed, found=frozenset(nonfinite), **marks)

    def _table(self, columns: Columns) -> None:
        here = sum(column.nbytes for column in columns.values())
        (title, *names), taken = self._texts(columns.get(":names"), here)
        table = dict[str, npt.NDArray[Any]]()
        for name in names:
            values = columns.get(name)
            if values is None or values.ndim != 1:
                raise ValueError(f"column {name!r} of a table is missing, or has several axes")
            taken += _COLUMN_BYTES
            if values.dtype == np.uint32:
                texts, more = self._texts(columns.get(f"{name}:texts"), here + taken)
                taken += more
                if len(values) and values.max() >= len(texts):
                    raise ValueError(f"column {name!r} has a number without a text")
                self._require_room(here + taken + 8 * len(values))
                values = np.array(texts, object)[values]
            table[name] = values
        if len({len(values) for values in table.values()}) > 1:
            raise ValueError("the columns of a table have different lengths")
        self._count_bytes(f"table {title}", taken)
        self.recording.keep_table(title, table)

    def _texts(self, data: np.ndarray | None, before: int) -> tuple[list[str], int]:
        """The texts in a column, a JSON list, and the bytes of memory that they take.

        They are decoded one by one: as a whole, JSON may take many times its size.
        """
        texts, taken, at, end = list[str](), 0, 1, b","
        held = self._bytes_taken  # it stays what it is meanwhile, and takes long to add up
        if data is not None and data.dtype == np.uint8 and data.ndim == 1 and data[:1] == b"["[0]:
            if data.size == 2 and data[1] == b"]"[0]:
                return texts, taken
            while end == b"," and (found := _TEXT.match(data.data, at)):
                at, end = found.end(), found[2]
                # in UTF-8, as a str, and once more without the escapes
                self._require_room(before + taken + _TEXT_BYTES + 9 * len(found[1]), held)
                texts.append(json.loads(found[1].decode()))
                taken += _TEXT_BYTES + sys.getsizeof(texts[-1])
        if data is None or end != b"]" or at != data.size:
            raise ValueError("a column of texts must be a list of texts")
        return texts, taken

    def _mark(self, columns: Columns) -> None:
        event, number = column(columns, "mark", "int64", (2,)).tolist()
        [time] = column(columns, "time", "float64", (1,)).tolist()
        if not 0 <= event < len(EVENTS) or not 0 <= number <= 2**53 or not math.isfinite(time):
            raise ValueError(f"event {event} of pass {number} at {time} is out of range")
        text = column(columns, "text", "uint8").tobytes().decode("utf-8", "surrogatepass")
        self._count_bytes(f"mark {len(self.recording.marks)}", 400 + 4 * len(text))
        self.recording.note(Mark(cast(Event, EVENTS[event]), number, time, text))

    def _facts(self, columns: Columns) -> None:
        taken = _bytes_of_facts(columns)
        self._require_room(sum(column.nbytes for column in columns.values()) + taken)
        try:
            self._known = Facts.from_columns(columns)  # each section has all facts
        except InspectorError as error:
            raise ValueError(str(error)) from error
        self._count_bytes("facts", taken)

    def _count_bytes(self, what: str, taken: int) -> None:
        """Count what replaces an earlier one of its kind."""
        self._kept_bytes += taken - self._kept.get(what, 0)
        self._kept[what] = taken
        self._require_room(0)

    def _take_figures(self, columns: Columns) -> None:
        self._figures = figures = stats_of(columns, self._names_of)
        if flaw := invalid_reason(figures):
            raise ValueError(flaw)
        names = len(figures.sites) + len(figures.parameters) + len(figures.choices)
        self._require_room(figures.nbytes + 8 * names)

    def _points(self, columns: Columns) -> None:
        recording = self.recording
        points = column(columns, "points", "float64", (None, 3))
        for start in range(0, len(points), _BATCH):
            self._add(recording, points[start : start + _BATCH])
        self._held[1] -= len(points)

    def _add(self, recording: Recording, points: npt.NDArray[np.float64]) -> None:
        whole = np.trunc(points[:, :2]) == points[:, :2]  # NaN is not
        if not whole.all() or (np.abs(points[:, :2]) > 2.0**53).any():
            raise ValueError("a metric's name number, or a step, is not a whole number")
        names = self._names_of(points[:, 0].astype(np.int64))
        for name, (step, value) in zip(names, points[:, 1:].tolist(), strict=True):
            recording.add_metrics(int(step), {name: value})
        self._require_room(0)

    def _keys_of(
        self, sites: npt.NDArray[np.uint32], quantities: npt.NDArray[np.uint8]
    ) -> tuple[tuple[str, str], ...]:
        raw = sites.tobytes() + quantities.tobytes()
        if self._keys[0] != raw or not raw:  # most passes have the keys of the one before
            if (quantities >= len(QUANTITIES)).any():
                raise ValueError(f"quantity {quantities.max()} does not exist")
            names = self._names_of(sites)
            keys = tuple(
                (s, QUANTITIES[q]) for s, q in zip(names, quantities.tolist(), strict=True)
            )
            if len(set(keys)) != len(keys):
                raise ValueError("a pass has two summaries of one site and quantity")
            self._keys = raw, keys
        return self._keys[1]

    def _names_of(self, numbers: object) -> list[str]:
        found = np.asarray(numbers, np.int64)
        if len(found) and not 0 <= found.min() <= found.max() < len(self._names):
            raise ValueError("the number of a name does not exist")
        return [self._names[number] for number in found.tolist()]

    @property
    def _bytes_taken(self) -> int:
        recorded = 0 if self._found is None else self._found.nbytes
        return self._name_bytes + self._waiting_bytes + self._kept_bytes + recorded

    def _require_room(self, more: int, held: int | None = None) -> None:
        if (self._bytes_taken if held is None else held) + more > self._most:
            raise ValueError("its content would take more memory than twice the file's size")


def _bytes_of_facts(columns: Columns) -> int:
    """An upper bound of the memory that facts in these columns take as objects."""
    taken = 0
    for name, values in columns.items():
        if values.dtype == np.uint8:
            taken += 4 * values.size
            continue
        taken += 24 * values.size
        if name.endswith("_ends"):
            taken += _TEXT_BYTES * int(np.count_nonzero(np.diff(values, axis=0))) + _TEXT_BYTES
        else:
            taken += 32 * int(np.count_nonzero((values < -5) | (values > 256)))
    return taken
