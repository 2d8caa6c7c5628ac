"""The time that inspection takes: of measured steps and plain ones, and of each first thing.

jax returns before a step has run, so steps are timed from the end of one step on the device to that
of another. What passes between the user's lines is no step's time: a loop that never waits starts
its steps in no time, until one waits for all before it. Invariant: an unknown figure is None, and a
time that is not known is not counted. Does not know the widget.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections import deque
from collections.abc import Callable

from nnx_inspector.background import Worker, weak_method
from nnx_inspector.inspector.cost.compilations import Compilations

RECENT = 64
"""The most times of one kind that are kept."""


@dataclasses.dataclass(frozen=True)
class Edge:
    """The end of a step, from which or up to which steps are timed.

    Attributes:
        at: when the user's thread ended it, in seconds of `time.perf_counter`.
        ended: returns when the device has ended it; None if it had by then.
        steps: how many steps there were since the edge before.
        kind: whether these were measured, and whether perturbed; None if they are not alike.
    """

    at: float
    ended: Callable[[], object] | None
    steps: int
    kind: tuple[bool, bool] | None


class Clock:
    """The times of one loop's steps.

    Args:
        failed: called in a thread with the exception if a time could not be taken.

    Attributes:
        seconds: kind of step -> the newest times of a step, in seconds.
    """

    def __init__(self, failed: Callable[[Exception], object]):
        self.seconds: dict[tuple[bool, bool], deque[float]] = {}
        self._last: float | None = None
        self._worker = Worker("nnx_inspector.clock", failed)

    def pass_edge(self, edge: Edge) -> None:
        """Count the steps up to this edge once the device has ended them."""
        self._worker.submit(functools.partial(self._count, edge))

    def _count(self, edge: Edge) -> None:
        at = edge.at
        if edge.ended is not None:
            edge.ended()
            at = time.perf_counter()
        last = self._last
        if last is not None and at < last:
            self._last = None  # the device is behind by an unknown time
            return
        if last is not None and edge.kind is not None:
            of_its_kind = self.seconds.setdefault(edge.kind, deque(maxlen=RECENT))
            of_its_kind.append((at - last) / edge.steps)
        self._last = at

    def wait(self) -> None:
        """Return when the device has passed all edges."""
        self._worker.wait()

    def close(self) -> None:
        self._worker.close()


class Meter:
    """The cost of inspection: compilations, and the recent seconds of measured and unmeasured
    steps.

    A step with a compilation is not typical and is not counted. Unperturbed steps of a loop are
    compared with unperturbed ones, and perturbed steps with perturbed ones.

    Args:
        step: gives the step of the loop that runs now; None if none does.

    Attributes:
        compilations: each of them, and why.
        waited: how long the user waited for each first thing; see `protocol.Cost`.
        tracker: gives the CPU seconds that a pass takes to write to the user's tracker.
        errors: the number of steps whose time could not be taken.
    """

    def __init__(self, step: Callable[[], int | None]) -> None:
        self.errors = 0
        self.clock = Clock(weak_method(self._timing_failed))
        self._kinds: set[tuple[bool, bool]] = set()
        self._steps = self._compiled_by_edge = 0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._compiled_before = 0
        self._ended_at: float | None = None  # the last step of the loop
        self.compilations = Compilations(step)
        self.waited: dict[str, float] = {}
        self.tracker: Callable[[], float | None] = lambda: None

    def loop_begins(self) -> None:
        """Begin a loop, whose steps may differ from those of the loop before."""
        self.clock = Clock(weak_method(self._timing_failed))
        self._begin_span()
        self._recent.clear()
        self._ended_at = None

    def step_begins(self) -> None:
        self._compiled_before = self.compilations.count

    def step_ends(self, seconds: float, *, measured: bool, perturbed: bool) -> None:
        """End a step that took the user's thread so many seconds."""
        if measured:
            self.waited.setdefault("step_seconds", seconds)
        before, self._ended_at = self._ended_at, time.perf_counter()
        if before is not None and self.compilations.count == self._compiled_before:
            self._recent.append(self._ended_at - before)
        self._steps += 1
        self._kinds.add((measured, perturbed))

    def pass_edge(self, ended: Callable[[], object] | None) -> None:
        """Time the steps since the last edge, by the end of this one on the device; see `Edge`."""
        typical = len(self._kinds) == 1 and self.compilations.count == self._compiled_by_edge
        kind = next(iter(self._kinds)) if typical else None
        self.clock.pass_edge(Edge(time.perf_counter(), ended, self._steps, kind))
        self._begin_span()

    def _begin_span(self) -> None:
        self._kinds, self._steps = set(), 0
        self._compiled_by_edge = self.compilations.count

    def _timing_failed(self, _: Exception) -> None:
        self.errors += 1

    @property
    def cost(self) -> dict[str, float | None]:
        """The fields of `protocol.Cost` that are measured here."""
        plain, measured = self.median_seconds
        return {
            "plain_seconds": plain,
            "inspected_seconds": measured,
            "compilations": self.compilations.count,
            "tracker_seconds": self.tracker(),
            **self.waited,
        }

    @property
    def median_seconds(self) -> tuple[float | None, float | None]:
        """Median seconds of recent unmeasured steps, and of measured ones like them."""
        for perturbed in (False, True):
            plain, measured = (self._median(kind, perturbed) for kind in (False, True))
            if plain is not None and measured is not None:
                return plain, measured
        measured = [self._median(True, perturbed) for perturbed in (False, True)]
        if any(not kind for kind, _ in list(self.clock.seconds)):
            return None, None  # there are plain steps, but none like a measured one
        return None, next((seconds for seconds in measured if seconds is not None), None)

    def _median(self, measured: bool, perturbed: bool) -> float | None:
        seconds = self.clock.seconds.get((measured, perturbed))
        return statistics.median(seconds) if seconds else None

    @property
    def rate(self) -> float | None:
        """Steps a second of the loop as it is lived, with the fetching of its batches."""
        return 1 / max(1e-9, statistics.fmean(self._recent)) if self._recent else None

    def close(self) -> None:
        self.clock.close()
        self.compilations.close()
