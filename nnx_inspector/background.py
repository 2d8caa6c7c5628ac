"""Work in other threads: a thread that runs jobs, one for a loop of the user's, one that hands on
what is recorded, and callbacks that do not keep their owner alive.

Invariant: no exception of a job reaches other code. Closing a worker and leaving the interpreter
wait at most for the stage under way, and the interpreter never finalizes while a thread is inside
XLA, which would end the process with "FATAL: exception not rethrown": if that does not end, an
interrupt ends the process.
Knows no model.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from nnx_inspector.errors import error_text, warn

Job = Callable[[], object]
PATIENCE_SECONDS = 5.0
"""The seconds after which leaving the interpreter says what it waits for."""
STILL_BUSY = (
    "nnx_inspector: Python waits for a pass, a loop or a compilation in the background to end. "
    "Press Ctrl-C to leave without it."
)


MOST_WAITING: Final = 256
"""How many calls of a subscriber wait at most. What comes then is left out for it, and counted."""
SILENT_SECONDS = 10.0
"""The seconds without a return after which a subscription that ends leaves out the rest."""


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method for as long as the method's object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: object) -> Any:
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
        # not a Condition, whose own lines an interrupt may leave with the lock
        self._lock = threading.RLock()
        self._waiting: list[threading.Lock] = []  # each is released when no job is left
        self._jobs: list[Job] = []
        self._thread: threading.Thread | None = None
        self._superseded = False  # whether to hide a failure of the job under way
        self.closed = False

    @property
    def busy(self) -> bool:
        return self._thread is not None or bool(self._jobs)

    def submit(self, job: Job) -> bool:
        """Queue a job; returns False if the worker is closed."""
        with self._lock:
            if self.closed:
                return False
            self._jobs.append(job)
            self._start()
            return True

    def _start(self) -> None:
        """Start a thread if it is missing, as after an interrupt that came before it had started.

        The thread itself notes that it runs, so one that never ran is waited for by nobody.
        """
        if self._thread is None and self._jobs:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            _running.add(self)
            with _starting:
                thread.start()
            self._thread = self._thread or thread

    def submit_instead(self, job: Job) -> bool:
        """Queue a job instead of all queued ones. A failure of a job under way goes unreported."""
        with self._lock:
            # a job that calls this itself is not superseded
            self._jobs, self._superseded = [], self._thread is not threading.current_thread()
            return self.submit(job)

    def wait(self, seconds: float | None = None) -> bool:
        """Return when all jobs are done, or after some seconds, and whether they are done. In the
        worker's own thread, return at once.
        """
        done = threading.Lock()
        with self._lock:
            self._start()
            if self._thread is None or self._thread is threading.current_thread():
                return True
            done.acquire()
            self._waiting.append(done)
        return done.acquire(timeout=-1 if seconds is None else seconds)

    def close(self) -> None:
        """Start no more jobs, and do not report how the job under way ends."""
        with self._lock:
            self.closed, self._jobs = True, []

    def join(self) -> None:
        thread = self._thread
        self.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def abandon(self) -> int:
        """Close it, and let the interpreter end whether or not the job under way does.

        Returns:
            How many jobs were not begun.
        """
        with self._lock:
            left, _ = len(self._jobs), _running.discard(self)
            self.close()
        return left

    @property
    def pending(self) -> int:
        """How many jobs have not begun."""
        return len(self._jobs)

    def _work(self) -> None:
        with self._lock:
            if self._thread not in (None, threading.current_thread()):
                return  # an interrupt came between two starts
            self._thread = threading.current_thread()
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
        with self._lock:
            if self._jobs:
                self._superseded = False
                return self._jobs.pop(0)
            self._thread = None
            _running.discard(self)
            while self._waiting:
                self._waiting.pop().release()
            return None


def run_loop(
    name: str, loop: Callable[[], object], failed: Callable[[Exception], object]
) -> threading.Thread:
    """Run a loop of the user's in a thread. When Python ends, SystemExit leaves it where it is.

    Args:
        name: the thread's name.
        loop: what runs in the thread.
        failed: called in the thread with its exception, unless Python ends.
    """

    def work() -> None:
        try:
            loop()
        except Exception as error:  # noqa: BLE001 - no caller to raise to: reported
            # at its end Python 3.12 refuses new threads, some moments before `_stop_loops`
            refused = isinstance(error, RuntimeError) and not threading.main_thread().is_alive()
            if not refused and not _leaving.is_set():
                failed(error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    _loops.add(thread)
    atexit.unregister(_stop_loops)
    atexit.register(_stop_loops)  # the last is called first: before jax and `live` let go
    with _starting:
        thread.start()
    return thread


class Subscription:
    """Hands to a function what is recorded, one after the other, in a thread; a call of it ends it.

    The function may be slow, block or raise: whoever records goes on. At most `MOST_WAITING` of its
    calls wait; what comes then is left out.

    Args:
        name: the function, as a sentence begins with it.
        failed: called with a message at the first call that raises, in the thread, and if calls
            were left out, when it ends. None makes both warnings when it ends.

    Attributes:
        left_out: how many calls were not made.
        raised: how many calls have raised.
        ended: called when it ends.
        last: called in the thread behind all that waits when it ends.
    """

    def __init__(self, name: str, failed: Callable[[str], object] | None):
        self.left_out = self.raised = 0
        self.ended: Callable[[], object] = lambda: None
        self.last: Callable[[], object] | None = None
        self._name, self._texts = name, list[str]()
        self._failed = self._texts.append if failed is None else failed
        self._step, self._begun, self._over = 0, 0, False
        self._worker = Worker("nnx_inspector.subscriber", self._raised)

    def submit(self, step: int, f: Callable[..., object], *args: object) -> None:
        """Call a function with what belongs to a step, after all that was given before."""
        if self._worker.pending < MOST_WAITING:
            self._worker.submit(lambda: self._call(step, f, *args))
        else:
            self.left_out += 1

    def _call(self, step: int, f: Callable[..., object], *args: object) -> None:
        self._step, self._begun = step, self._begun + 1
        f(*args)

    def _raised(self, error: Exception) -> None:
        self.raised += 1
        if self.raised == 1:
            self._failed(
                f"{self._name} raised {error_text(error)} when it was given step {self._step}. "
                f"What raises is left out there; the recording has all of it, and the loop goes on."
            )

    def __call__(self) -> None:
        """Hand on what waits, and end.

        If the function does not return for `SILENT_SECONDS`, the rest is left out and the function
        is not waited for.
        """
        self.ended()
        last, self.last = self.last, None
        if last is not None:
            self._worker.submit(lambda: self._call(self._step, last))
        begun, done = self._begun, self._worker.wait(SILENT_SECONDS)
        while not done and begun != self._begun:
            begun, done = self._begun, self._worker.wait(SILENT_SECONDS)
        why = "was slower than the loop"
        if done:
            self._worker.close()
        else:
            self.left_out += self._worker.abandon()
            why = f"has not returned from step {self._step} for {SILENT_SECONDS:g} seconds"
        if (self.left_out or not done) and not self._over:
            self._failed(
                f"{self._name} {why}, so {self.left_out} of what was recorded was left out there. "
                f"The recording has all of it."
            )
        self._over, texts = True, [*self._texts]
        self._texts.clear()
        for text in texts:
            warn(text)


_running: weakref.WeakSet[Worker] = weakref.WeakSet()
_loops: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_leaving = threading.Event()
_starting = threading.Lock()
"""Held while a thread of ours starts: what is raised in the thread that starts it would reach the
new one, which then never tells that it has started (Python 3.11)."""


def _stop_loops() -> None:
    _leaving.set()
    loops = [thread for thread in list(_loops) if thread.is_alive()]
    with _starting:
        for thread in loops:
            _raise_in(thread, SystemExit)
    for thread in loops:
        _wait_for(thread)


@atexit.register
def _stop_workers() -> None:
    for worker in list(_running):
        thread = worker._thread
        worker.close()
        if thread is not None:
            _wait_for(thread)


def _wait_for(thread: threading.Thread) -> None:
    try:
        thread.join(PATIENCE_SECONDS)
        if thread.is_alive():
            print(STILL_BUSY, file=sys.stderr, flush=True)
            thread.join()
    except KeyboardInterrupt:
        os._exit(130)  # the thread may never come out of XLA, and Python cannot end around it


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an exception between two lines of another thread, as a signal does in the main one."""
    # `threading` has no way to end a thread; this is the one that CPython's C API has. A thread
    # that is inside C code gets the error when it comes back to Python.
    identity = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(error))
