"""A trace of jax's profiler: made, read into the operations of each run of a step, and its time
divided among them.

The events of operations have the statistics `hlo_op` and `hlo_module`: on a CPU those of XLA's
threads, on a GPU the kernels of each stream. Invariant: the trace ends and its folder is deleted,
whatever is raised; each moment counts once, and where several operations overlap, each has an equal
part of it. Attributes nothing to a module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import jax

from nnx_inspector.errors import InspectorError
from nnx_inspector.profiling.owners import WAITING_OPCODES

RUN_EVENT: Final = "nnx_inspector run"
"""The name of the event around each run."""
_END: Final = "end: "
"""Begins the name of the event when a CPU's operation ends that other threads have gone on with.
Its statistic `_c` is the `_p` of the operation's own event."""
_SUMMARY_LINES: Final = ("Steps", "XLA Modules", "XLA TraceMe", "Framework")
"""The beginnings of the names of lines that only sum up others."""


class ProgramKey(NamedTuple):
    """A program as the events of its operations name it: by its name, and by XLA's number for it
    where the trace has one.
    """

    name: str
    number: int | None


Operation = tuple[ProgramKey, str]
"""A program, and the name of an operation in it."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One run of an operation, in nanoseconds.

    Attributes:
        waits: whether it only waits for others, as a loop waits for its body. Then it counts where
            nothing else runs.
    """

    start: float
    end: float
    key: Operation
    waits: bool = False


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a step, in nanoseconds, and its operations."""

    start: float
    end: float
    events: tuple[Event, ...]


def record_trace(run: Callable[[], None], *, times: int, folder: str | None) -> Any:
    """Run something so many times under jax's profiler; returns jax's `ProfileData`.

    Args:
        folder: where the trace stays for XProf and Perfetto; None deletes it.

    Raises:
        InspectorError: a trace is running already, or jax has written none.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it slows down Python, of which nothing is read
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nnx-inspector-"))
        before = set(_files(folder))
        with _tracing(folder, options):
            for _ in range(times):
                run()
        new = [path for path in _files(folder) if path not in before]
        if not new:
            raise InspectorError(f"jax's profiler has written no trace to {folder!r}.")
        return jax.profiler.ProfileData.from_file(str(new[-1]))


def _files(folder: str) -> list[pathlib.Path]:
    return sorted(pathlib.Path(folder).rglob("*.xplane.pb"))


@contextlib.contextmanager
def _tracing(folder: str, options: Any) -> Iterator[None]:
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as error:
        raise InspectorError(
            f"The step cannot be traced: {error} End the other trace (jax.profiler.stop_trace(), "
            f"or its with block) and profile again."
        ) from error
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def runs_in(data: Any) -> list[Run]:
    """The runs in a trace, in the order of time.

    Args:
        data: jax's `ProfileData`.

    Raises:
        InspectorError: it has no runs, or none has an operation of a compiled program.
    """
    spans: list[tuple[float, float]] = []
    found: dict[bool, list[tuple[float, float, Operation, Any]]] = {True: [], False: []}
    ends: dict[Any, float] = {}
    for plane in data.planes:
        is_device = plane.name.startswith("/device:")
        for line in plane.lines:
            if is_device and line.name.startswith(_SUMMARY_LINES):
                continue
            for event in line.events:
                start, end = event.start_ns, event.start_ns + event.duration_ns
                if event.name == RUN_EVENT:
                    spans.append((start, end))
                    continue
                of = _stats_of(event)
                if "hlo_op" in of and "hlo_module" in of:
                    program = ProgramKey(
                        str(of["hlo_module"]).partition("(")[0], of.get("program_id")
                    )
                    found[is_device].append(
                        (start, end, (program, str(of["hlo_op"])), of.get("_p"))
                    )
                elif event.name.startswith(_END):
                    ends[of.get("_c")] = end
    ends.pop(None, None)
    those = found[True] or found[False]  # beside a device's own the host has what it starts there
    events = [
        Event(start, max(end, ends.get(number, end)), key, waits=_opcode(key[1]) in WAITING_OPCODES)
        for start, end, key, number in those
    ]
    runs = [
        Run(start, end, tuple(one for one in events if one.start < end and one.end > start))
        for start, end in sorted(spans)
    ]
    if not any(run.events for run in runs):
        raise InspectorError(
            f"The trace has no events of operations ({len(runs)} runs, {len(events)} events), so "
            f"nothing is known of the time within a step. The step may start no program of jax, or "
            f"jax's profiler does not see those of this device ({jax.default_backend()})."
        )
    return runs


def _opcode(operation: str) -> str:
    return re.sub(r"[.\d]+$", "", operation)


def _stats_of(event: Any) -> dict[str, Any]:
    # jaxlib makes the class of these pairs when it is used first, and Python 3.13 warns that it has
    # no `__module__`. Where warnings are errors (-W error), the process would be aborted, because
    # the class cannot be made. It can go when jaxlib's class has one.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return dict(event.stats)


# ---------------------------------------------------------- whose the time was


def time_shares(
    events: Iterable[Event], start: float, end: float
) -> tuple[dict[Operation, float], float]:
    """By operation, its share of the time from `start` to `end`, and how long nothing ran."""
    changes: list[tuple[float, int, Event]] = []
    for event in events:
        a, b = max(event.start, start), min(event.end, end)
        if a < b:
            changes += [(a, 1, event), (b, -1, event)]
    changes.sort(key=lambda change: change[:2])
    running: dict[tuple[bool, Operation], int] = {}
    found: dict[Operation, float] = {}
    idle, at = 0.0, start
    for moment, step, event in changes:
        if moment > at:
            idle += _divide(running, moment - at, found)
            at = moment
        kind = (event.waits, event.key)
        running[kind] = running.get(kind, 0) + step
        if not running[kind]:
            del running[kind]
    return found, idle + (end - at)


def _divide(
    running: dict[tuple[bool, Operation], int], time: float, found: dict[Operation, float]
) -> float:
    """Give a moment to what runs in it; returns the part that nobody has."""
    working = {key: n for (waits, key), n in running.items() if not waits}
    working = working or {key: n for (_, key), n in running.items()}
    total = sum(working.values())
    for key, n in working.items():
        found[key] = found.get(key, 0.0) + time * n / total
    return 0.0 if working else time
