"""Work in other threads: a thread that runs jobs, and callbacks that do not keep their owner alive.

Invariant: no exception of a job reaches other code. Closing a worker and leaving the interpreter
wait at most for the stage under way, and the interpreter never finalizes while a thread is inside
XLA: if that does not end, an interrupt ends the process.
Knows no model.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

Job = Callable[[], object]
PATIENCE = 5.0
"""The seconds after which leaving the interpreter says what it waits for."""
STILL_BUSY = (
    "nnx_inspector: Python waits for a pass or a compilation in the background to end. "
    "Press Ctrl-C to leave without it."
)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method for as long as the method's object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call


class Worker:
    """Runs jobs one after the other, in a thread that lives as long as there are jobs.

    Args:
        name: the thread's name.
        failed: called in that thread with the exception of a job, unless the worker is closed.
        done: called in that thread when no job is left, unless closed. It may add more jobs.

    Attributes:
        closed: whether no more work is wanted; a long job checks it between its stages.
    """

    def __init__(
        self,
        name: str,
        failed: Callable[[Exception], object],
        done: Callable[[], object] = lambda: None,
    ):
        self._name = name
        self._failed, self._done = failed, done
        self._condition = threading.Condition()
        self._jobs: list[Job] = []
        self._thread: threading.Thread | None = None
        self._superseded = False  # whether to hide a failure of the job under way
        self.closed = False

    @property
    def busy(self) -> bool:
        return self._thread is not None

    def do(self, job: Job) -> bool:
        """Queue a job; returns False if the worker is closed."""
        with self._condition:
            if self.closed:
                return False
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                _running.add(self)
                self._thread.start()
            return True

    def do_instead(self, job: Job) -> bool:
        """Queue a job instead of all queued ones. A failure of a job under way goes unreported."""
        with self._condition:
            # a job that calls this itself is not superseded
            self._jobs, self._superseded = [], self._thread is not threading.current_thread()
            return self.do(job)

    def wait(self, seconds: float | None = None) -> bool:
        """Return when all jobs are done, or after some seconds, and whether they are done. In the
        worker's own thread, return at once.
        """
        with self._condition:
            if self._thread is threading.current_thread():
                return True
            return self._condition.wait_for(lambda: self._thread is None, seconds)

    def close(self) -> None:
        """Start no more jobs, and do not report how the job under way ends."""
        with self._condition:
            self.closed, self._jobs = True, []

    def join(self) -> None:
        thread = self._thread
        self.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
                if not self._jobs and not self.closed:
                    self._done()
            except Exception as error:  # noqa: BLE001 - no caller to raise to: reported
                if not self._superseded and not self.closed:
                    self._failed(error)
            del job  # it may hold a model

    def _next(self) -> Job | None:
        with self._condition:
            if self._jobs:
                self._superseded = False
                return self._jobs.pop(0)
            self._thread = None
            _running.discard(self)
            self._condition.notify_all()
            return None


_running: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    for worker in list(_running):
        worker.close()
        if worker.wait(PATIENCE):
            continue
        try:
            print(STILL_BUSY, file=sys.stderr, flush=True)
            worker.join()
        except KeyboardInterrupt:
            os._exit(130)  # the thread may never come out of XLA, and Python cannot end around it
