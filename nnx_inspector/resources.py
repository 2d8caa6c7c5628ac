"""What is opened for a while, and closed whatever interrupts it.

A signal may raise at any line, also while something is being opened or closed. Invariant: one error
at any line of `open` or `close` leaves nothing open, because a `close` undoes whatever part of
`open` was done, has no effect the second time, and is called twice. It may be called in another
thread: there a generator may be finalised. Does not know what is opened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Resource(Protocol):
    """Something that is opened once, and closed once or more often."""

    def open(self) -> None: ...

    def close(self) -> None:
        """Undo what `open` has done so far; nothing, if that is nothing or undone already."""


@contextlib.contextmanager
def open_all(*those: Resource) -> Iterator[None]:
    """Inside, these are open; the last one closes first."""
    try:
        try:
            for one in those:
                one.open()
            yield
        finally:
            close_all(those)
    finally:
        close_all(those)


def close_all(those: tuple[Resource, ...]) -> None:
    """Close these, from the last to the first, even if one of them raises."""
    if those:
        try:
            those[-1].close()
        finally:
            close_all(those[:-1])
