"""Looks for what is wrong while a run goes on, in a thread, and tells the screen what it found.

Invariant: whoever records a pass never waits for the rules; of passes that come meanwhile the last
is looked at too; the screen is told of changes alone. Has no rules of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from nnx_inspector.background import Worker
from nnx_inspector.findings.findings import Finding
from nnx_inspector.screen import protocol

RESTS = 4
"""After looking it rests for this many times as long: rules must not cost a training loop much."""


class Diagnosing:
    """Applies rules again and again.

    Args:
        diagnose: what is wrong now; None where there is nobody any more who could say.
        tell: the screen.
        failed: told what a rule raised.
    """

    def __init__(
        self,
        diagnose: Callable[[], Sequence[Finding] | None],
        tell: Callable[[Any], object],
        failed: Callable[[Exception], None],
    ):
        self._diagnose, self._tell = diagnose, tell
        self._lock = threading.Lock()
        self._waiting = False
        self._rests_until = 0.0
        self._told = message_of(())
        self._worker = Worker("nnx_inspector.findings.findings", failed)
        self.close = self._worker.close
        self.wait = self._worker.wait

    def look(self, *, now: bool = True) -> None:
        """Look, in the thread; unless `now`, not while it rests."""
        with self._lock:
            if self._waiting or not (now or time.monotonic() >= self._rests_until):
                return
            self._waiting = self._worker.do(self._find)

    def _find(self) -> None:
        with self._lock:
            self._waiting = False  # what comes from here on is looked at again
        began = time.monotonic()
        found = self._diagnose()
        took = time.monotonic() - began
        self._rests_until = began + (1 + RESTS) * took
        if found is None:
            return
        message = message_of(found)
        if message != self._told:
            self._told = message
            self._tell(message)


def message_of(found: Sequence[Finding]) -> protocol.Findings:
    """Findings as the screen shows them."""
    rows = tuple(
        protocol.FindingRow(
            rule=one.rule, site=one.site, step=one.step, severity=one.severity, message=one.message
        )
        for one in found[: protocol.MOST_FINDINGS]
    )
    return protocol.Findings(
        version=protocol.VERSION, findings=rows, more=max(0, len(found) - len(rows))
    )
