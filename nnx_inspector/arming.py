"""Compiles in the background, while the old program goes on.

Invariant: the newest wish wins, nothing raises into a caller, and neither closing nor leaving the
interpreter waits for more than the stage (tracing, compiling) that is under way. Knows no model.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence

Job = Callable[[Callable[[], bool]], None]
"""Compiles something; between its stages it asks whether to give up."""


class Arming:
    """One thread, for as long as there is something to compile.

    Args:
        done: called in that thread when all that was wanted is compiled. It may want more.
        failed: called in that thread with what a job raised; the others are given up.
    """

    def __init__(self, done: Callable[[], None], failed: Callable[[Exception], None]):
        self._done = done
        self._failed = failed
        self._condition = threading.Condition()
        self._jobs: list[Job] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def want(self, jobs: Sequence[Job]) -> None:
        """Compile these, instead of what was wanted before and has not begun."""
        with self._condition:
            self._jobs = [] if self._closed else list(jobs)
            if self._jobs and self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="nnx_inspector.arming", daemon=True
                )
                _running.add(self)
                self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether something is being compiled."""
        return self._thread is not None

    def wait(self) -> None:
        """Return when nothing is being compiled any more; at once in the thread that does it."""
        with self._condition:
            if self._thread is not threading.current_thread():
                self._condition.wait_for(lambda: self._thread is None)

    def close(self) -> None:
        """Begin nothing more, and tell nobody what comes of what has begun."""
        with self._condition:
            self._closed, self._jobs = True, []

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job(self._is_over)
                if not self._jobs and not self._closed:
                    self._done()
            except Exception as error:  # noqa: BLE001 - there is no caller: it is shown
                self._jobs = []
                if not self._closed:
                    self._failed(error)

    def _next(self) -> Job | None:
        with self._condition:
            if self._jobs:
                return self._jobs.pop(0)
            self._thread = None
            _running.discard(self)
            self._condition.notify_all()
            return None

    def _is_over(self) -> bool:
        return self._closed

    def join(self) -> None:
        """Close, and wait for what is under way."""
        thread = self._thread
        self.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join()


_running: weakref.WeakSet[Arming] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    # the interpreter must not go away under a thread that is inside XLA
    for arming in list(_running):
        arming.join()
