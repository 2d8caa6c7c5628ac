"""The seconds that steps take, counted from the end of one step on the device to that of another.

jax returns before a step has run. What passes between the user's lines is therefore no step's time:
a loop that never waits starts its steps in no time, until one waits for all before it. Invariant: a
time that is not known is not counted. Does not know what is measured.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable

from nnx_inspector.background import Worker

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
        self._worker.do(functools.partial(self._count, edge))

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
