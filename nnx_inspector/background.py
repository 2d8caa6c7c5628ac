"""One thread that does jobs, one after the other, for as long as there are any.

Invariant: a job raises nothing into anybody, and the interpreter does not go away under a thread
that is inside XLA: at its end no new job begins and the one under way is waited for. Knows no
model.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

Job = Callable[[], object]


class Worker:
    """Does jobs in a thread of its own.

    Args:
        name: of the thread.
        failed: called in that thread with what a job raised.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None]):
        self._name = name
        self._failed = failed
        self._lock = threading.Condition()
        self._jobs: list[Job] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def do(self, job: Job) -> bool:
        """Do this after the jobs before it; False where it is closed."""
        with self._lock:
            if self._closed:
                return False
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                _running.add(self)
                self._thread.start()
            return True

    def wait(self) -> None:
        """Return when all jobs are done; at once in the thread that does them."""
        with self._lock:
            if self._thread is not threading.current_thread():
                self._lock.wait_for(lambda: self._thread is None)

    def close(self) -> None:
        """Begin nothing more."""
        with self._lock:
            self._closed, self._jobs = True, []

    def join(self) -> None:
        """Close, and wait for what is under way."""
        self.close()
        self.wait()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - there is no caller: it is shown
                self._failed(error)
            del job  # it may hold a model

    def _next(self) -> Job | None:
        with self._lock:
            if self._jobs:
                return self._jobs.pop(0)
            self._thread = None
            _running.discard(self)
            self._lock.notify_all()
            return None


_running: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    for worker in list(_running):
        worker.join()
