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
from nnx_inspector.errors import InspectorError, reply_text
from nnx_inspector.inspector.core import Core
from nnx_inspector.progress import MIN_INTERVAL, Report

Show = Callable[..., object]
"""Shows the message of a piece of work in its panel, with these fields of it."""


class Job:
    """Runs pieces of work of one kind, while no work of another kind runs.

    Args:
        core: the core, which holds the one place for all, and ends the work when it closes.
        name: the name of the thread.
    """

    def __init__(self, core: Core, name: str):
        self._core, self._place, self._stop = core, core.study_lock, threading.Event()
        self._shown_at = 0.0
        # an error is already on screen by then
        self._worker = Worker(name, lambda error: None)
        self.wait = self._worker.wait
        core.closing.callback(self._worker.close)
        core.closing.callback(self._stop.set)

    def reserve(self) -> None:
        """Reserve the one place for work; `running` frees it again.

        Raises:
            InspectorError: the place is taken, or the arrays are spread over several processes.
        """
        self._core.require_one_process("The model and its example")
        if not self._place.acquire(blocking=False):
            raise InspectorError(
                "Another study of the model is running. Wait for it, or stop it in its panel."
            )
        self._stop.clear()

    def queue(self, work: Callable[[], object], show: Show) -> None:
        """Do the work in a thread, without `reserve`, once no other work runs; it enters `running`
        itself. If it is stopped before that, the panel shows so.

        Raises:
            InspectorError: the arrays are spread over several processes.
        """
        self._core.require_one_process("The model and its example")
        self._stop.clear()

        def in_turn() -> None:
            taken = False
            while not (taken or self._stop.is_set()):
                taken = self._place.acquire(timeout=MIN_INTERVAL)
            if not self._stop.is_set():  # it may be stopped at the moment when the place is free
                work()
                return
            if taken:
                self._place.release()
            show(error="Stopped before it began.")

        show(running=True)
        self._worker.submit(in_turn)

    @contextlib.contextmanager
    def running(
        self, show: Show, in_words: Callable[[BaseException], str] = reply_text
    ) -> Iterator[None]:
        """A context for the work after `reserve`: the panel shows that it runs, and its error, if
        any; then the place is free.
        """
        try:
            show(running=True)
            yield
        except BaseException as error:
            show(error=in_words(error))
            raise
        finally:
            self._place.release()

    def start(self, work: Callable[[], object], show: Show) -> None:
        """Do the work in a thread, after `reserve`; it enters `running` itself."""
        try:
            show(running=True)
        finally:
            if not self._worker.submit(work):
                self._place.release()

    def stop(self) -> None:
        """End the work at its next report."""
        self._stop.set()

    def report_to(self, show: Show, bar: Report) -> Report:
        """A function that reports to a bar, shows the progress now and then, and returns whether to
        stop.
        """

        def report(done: int, total: int) -> bool:
            self._core.view.screen.poll()
            now = time.monotonic()
            if done in (0, total) or now - self._shown_at >= MIN_INTERVAL:
                self._shown_at = now
                show(running=True, done=done, total=total)
            return bar(done, total) or self._stop.is_set()

        return report
