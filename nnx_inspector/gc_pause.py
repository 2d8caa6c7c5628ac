"""Python's garbage collector, paused while one of our own passes over a model is traced.

A trace makes many objects and drops few, so the collector searches the whole process again and
again and finds nothing, which takes a third of the time until a wide model's tree appears.
Invariant: the collector is as the user left it once everything that paused it has ended, in
whatever order and thread. Frees nothing.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_pauses = 0  # of all threads
_was_on = False


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    global _pauses, _was_on
    with _lock:
        if not _pauses:
            _was_on = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _was_on:
                gc.enable()
