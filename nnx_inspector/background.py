"""Work in other threads: one thread that does jobs, and callbacks that keep their owner alive no
longer than it lives.

Invariant: a job raises nothing into anybody, and neither closing nor leaving the interpreter waits
for more than the stage that is under way; the interpreter does not go away under a thread that is
inside XLA. Knows no model.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any

Job = Callable[[], object]


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method for as long as the method's object lives, and does
    nothing afterwards: for registries and threads that outlive the object.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call


class Worker:
    """Does jobs one after the other, in a thread that lives for as long as there are any.

    Args:
        name: of the thread.
        failed: called in that thread with what a job raised; not once the worker is closed.
        done: called in that thread when no job is left; likewise. It may ask for more.

    Attributes:
        closed: whether nothing more is wanted; a long job asks between its stages.
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
        self._superseded = False  # the job under way: what it raises concerns nobody
        self.closed = False

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return self._thread is not None

    def do(self, job: Job) -> bool:
        """Do a job after the jobs before it; False where the worker is closed."""
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
        """Do a job in place of all that were asked for before. One that is under way goes on, but
        nobody is told if it fails.
        """
        with self._condition:
            # its own thread still wants what it does
            self._jobs, self._superseded = [], self._thread is not threading.current_thread()
            return self.do(job)

    def wait(self) -> None:
        """Return when all jobs are done; in the worker's own thread, return at once."""
        with self._condition:
            if self._thread is not threading.current_thread():
                self._condition.wait_for(lambda: self._thread is None)

    def close(self) -> None:
        """Begin nothing more, and tell nobody how the job under way ends."""
        with self._condition:
            self.closed, self._jobs = True, []

    def join(self) -> None:
        """Close, and wait for the job under way."""
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
            except Exception as error:  # noqa: BLE001 - there is no caller: it is shown
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
        worker.join()
