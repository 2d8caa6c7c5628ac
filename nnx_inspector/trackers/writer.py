"""Writes what a recording gains to a tracker, in a thread, until it is ended.

Invariant: the loop never waits for a tracker, except at its end for what is not written yet; a
tracker that raises, blocks or is closed loses its own part, and the recording nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Final

from nnx_inspector.findings.finding import Finding
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.trackers.tracker import Tracker

REST_FACTOR: Final = 49
"""How many times as long as the rules took they rest: they take a fiftieth of the time."""


class TrackerWriter:
    """One tracker that gets the passes, metrics and findings of one loop.

    Args:
        find: the present findings, worst first.
        failed: called with a message at the first failure, in the thread, and if anything was left
            out, at the end.
    """

    def __init__(
        self,
        tracker: Tracker,
        recording: Recording,
        find: Callable[[], Iterable[Finding] | None],
        failed: Callable[[str], object],
    ):
        self._tracker, self._find = tracker, find
        self._written: set[tuple[str, str]] = set()
        self._seconds, self._passes, self._rests_until = 0.0, 0, 0.0
        self._subscription = recording.subscribe(
            self._of_pass, metrics=self._of_metrics, failed=failed, name=tracker.name
        )
        self._subscription.last = self._last

    def cost(self) -> float | None:
        """The CPU seconds that a pass took, with metrics and findings; None without a pass."""
        return self._seconds / self._passes if self._passes else None

    def end(self) -> None:
        """Write what waits, and the last findings."""
        self._subscription()

    def _of_pass(self, item: Pass) -> None:
        began = time.thread_time()
        self._passes, cost = self._passes + 1, self.cost()
        self._tracker.write_pass(item, cost)
        if time.monotonic() >= self._rests_until:
            self._write_findings()
        self._seconds += time.thread_time() - began

    def _of_metrics(self, step: int, values: dict[str, float]) -> None:
        began = time.thread_time()
        self._tracker.write_metrics(step, values)
        flawed = not all(map(math.isfinite, values.values()))
        if flawed and time.monotonic() >= self._rests_until:  # no pass may come for long
            self._write_findings()
        self._seconds += time.thread_time() - began

    def _write_findings(self) -> None:
        """Write the findings that are new, each once."""
        if not self._tracker.takes_findings:
            return
        began = time.monotonic()
        found = self._find() or ()
        self._rests_until = time.monotonic() + REST_FACTOR * (time.monotonic() - began)
        for one in found:
            if (one.rule, one.site) not in self._written:
                self._tracker.write_finding(one)
                self._written.add((one.rule, one.site))

    def _last(self) -> None:
        self._write_findings()
        self._tracker.flush()
