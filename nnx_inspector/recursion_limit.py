"""Room on Python's stack for the calls that the hooks add, so that a model keeps its share.

Python limits how many calls may be open at once. Hooks add several calls to each call of a module,
so a deep model that stays below the limit by itself would exceed it with hooks. Code that adds
calls therefore borrows that many: `borrow` raises the limit, and returning them lowers it again.
Invariant: the limit is the user's own plus what all threads have borrowed, but is not raised above
what the C stack holds; when everything is returned, the limit is the user's own. A limit that the
user sets meanwhile becomes the user's own. An endless recursion uses up the user's share of the
limit and raises, as it does without hooks. Does not know what the calls do.
"""

from __future__ import annotations

import sys
import threading

_STACK = 2**21 if sys.platform == "win32" else 2**23
_SPARE = 2**21  # bytes of the C stack left for compiling a program in the innermost call
_BYTES = 800  # bytes of the C stack for one call: more than Python 3.11 uses

_lock = threading.Lock()
_borrowed = 0  # by all threads
_users_limit = 0  # the user's limit
_limit_set = 0  # the limit that was last set here


def borrow(calls: int) -> None:
    """Let Python's stack hold this many more calls; a negative number returns them.

    Python has one limit for all threads, so each thread has all the room that was borrowed.
    """
    global _borrowed, _users_limit, _limit_set
    with _lock:
        limit = sys.getrecursionlimit()
        own = _users_limit if _borrowed and limit == _limit_set else limit
        borrowed = _borrowed + calls
        raised = max(own, min(own + borrowed, _highest_limit()))
        if raised != limit:
            sys.setrecursionlimit(raised)  # raises if the stack is full: then nothing is borrowed
        _users_limit, _borrowed, _limit_set = own, borrowed, raised


def _highest_limit() -> int:
    """The highest limit to set: Python's limit keeps the C stack from overflowing."""
    asked = threading.stack_size()
    if asked:
        threading.stack_size(asked)  # reading the size resets it to the default
    return (min(asked or _STACK, _STACK) - _SPARE) // _BYTES
