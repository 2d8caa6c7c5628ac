"""Room on Python's stack for the calls that the hooks add, so that a model keeps what it has.

Python limits how many calls may be open at once. Hooks open several calls for each call of a
module, so a model that fits under the limit by itself would not fit with hooks. Whoever adds
calls borrows as many as it adds: the limit is raised by them, and lowered when they are returned.
Invariant: the limit is the user's own plus what all threads have borrowed, but is not raised above
what the C stack holds; when everything is returned it is the user's own. A limit that the user
sets in between is theirs and stays. A recursion without end uses up the user's share of the limit,
and raises as it does without hooks. Does not know what a call is.
"""

from __future__ import annotations

import sys
import threading

_STACK = 2**21 if sys.platform == "win32" else 2**23
_SPARE = 2**21  # of the C stack, for what compiles a program at the innermost call
_BYTES = 800  # of the C stack, for one call: more than Python 3.11 takes

_lock = threading.Lock()
_borrowed = 0  # by all threads
_own = 0  # the user's limit
_raised = 0  # what the limit was last set to here


def borrow(calls: int) -> None:
    """Let Python's stack hold so many more calls; a negative number returns them.

    Python has one limit for all threads, so each thread has the room that all have borrowed.
    """
    global _borrowed, _own, _raised
    with _lock:
        limit = sys.getrecursionlimit()
        own = _own if _borrowed and limit == _raised else limit
        borrowed = _borrowed + calls
        raised = max(own, min(own + borrowed, _most()))
        if raised != limit:
            sys.setrecursionlimit(raised)  # where the stack ends, this raises: nothing is borrowed
        _own, _borrowed, _raised = own, borrowed, raised


def _most() -> int:
    """No limit is raised above this one: Python's limit keeps the C stack from overflowing."""
    asked = threading.stack_size()
    if asked:
        threading.stack_size(asked)  # to ask for it sets it to the default
    return (min(asked or _STACK, _STACK) - _SPARE) // _BYTES
