"""A long piece of work of an inspector, a sweep or a study: one of all at a time, in the caller's
thread or its own.

Invariant: a stop takes effect when the work reports its progress, and the work keeps what it has
found by then. Knows nothing of the work and shows nothing itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from nnx_inspector.background import Worker
from nnx_inspector.errors import InspectorError
from nnx_inspector.inspector.core import Core
from nnx_inspector.progress import TICK, Report


class Job:
    """Runs pieces of work of one kind, while no work of another kind runs.

    Args:
        core: the core, which holds the one place for all, and ends the work when it closes.
        name: the name of the thread.
    """

    def __init__(self, core: Core, name: str):
        self._core, self._place, self._stop = core, core.studying, threading.Event()
        self._shown_at = 0.0
        # an error is already on screen by then
        self._worker = Worker(name, lambda error: None)
        self.wait = self._worker.wait
        core.closing.callback(self._worker.close)
        core.closing.callback(self._stop.set)

    def begin(self) -> None:
        """Reserve the one place for work; `held` frees it again.

        Raises:
            InspectorError: the place is taken, or the arrays are spread over several processes.
        """
        self._core.require_here("The model and its example")
        if not self._place.acquire(blocking=False):
            raise InspectorError(
                "Another study of the model is running. Wait for it, or stop it in its panel."
            )
        self._stop.clear()

    def queue(self, work: Callable[[], object], dropped: Callable[[], object]) -> None:
        """Do the work in a thread, without `begin`, once no other work runs; it enters `held`
        itself. If it is stopped before that, `dropped` is called instead.

        Raises:
            InspectorError: the arrays are spread over several processes.
        """
        self._core.require_here("The model and its example")
        self._stop.clear()

        def in_turn() -> None:
            taken = False
            while not (taken or self._stop.is_set()):
                taken = self._place.acquire(timeout=TICK)
            if not self._stop.is_set():  # it may be stopped at the moment when the place is free
                work()
                return
            if taken:
                self._place.release()
            dropped()

        self._worker.do(in_turn)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A context for the work after `begin`, which frees the place."""
        try:
            yield
        finally:
            self._place.release()

    def start(self, work: Callable[[], object]) -> None:
        """Do the work in a thread, after `begin`; it enters `held` itself."""
        if not self._worker.do(work):
            self._place.release()

    def stop(self) -> None:
        """End the work at its next report."""
        self._stop.set()

    def reporting(self, show: Callable[[int, int], object], bar: Report) -> Report:
        """A function that reports to a bar, shows the progress now and then, and returns whether to
        stop.
        """

        def report(done: int, total: int) -> bool:
            self._core.view.screen.poll()
            now = time.monotonic()
            if done in (0, total) or now - self._shown_at >= TICK:
                self._shown_at = now
                show(done, total)
            return bar(done, total) or self._stop.is_set()

        return report
