"""Listens to the browser while a cell runs, without kernel subshells.

Messages on comms of ours go to a thread of ours; all others stay where they are, in their order.
Where a thread of the kernel reads its shell socket (ipykernel 7.1), ours are taken out there.
Where the thread of the cells reads it (ipykernel 6), a loop of ours looks at it now and then; a
cell without one keeps messages waiting. Invariant: it never runs a cell, and never raises into
a loop; a message is handled once. Knows no message of ours.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal

from nnx_inspector._compat import ipykernel
from nnx_inspector._compat.ipykernel import CommMessage, QueuedMessage
from nnx_inspector.background import Worker

LOOK_INTERVAL: Final = 0.1
"""The shortest time between two looks at the socket, in seconds."""
LONGEST_LOOK: Final = 0.005
"""The most seconds of a look. What it has not seen, the next one sees, at the next step."""

MessageHandler = Callable[[Any, list[Any]], object]
"""Called with the content and the buffers of a custom message of a widget."""


class Listener:
    """Hears nothing: there is no kernel, or one that cannot be listened to.

    Attributes:
        listens: when messages are heard that no subshell handles: "during" any cell, at the "steps"
            of our loops, or "after" the cell.
    """

    listens: ClassVar[Literal["during", "steps", "after"]] = "after"

    def listen(self, comm: str, handle: MessageHandler) -> None:
        """Hand the custom messages on a comm to `handle`, in a thread, while a cell runs."""

    def forget(self, comm: str) -> None:
        """Leave the messages on a comm to the kernel again."""

    def poll(self) -> None:
        """Look whether messages have arrived. To be called between two steps, in any thread."""


class _KernelListener(Listener):
    def __init__(self, kernel: Any):
        self._kernel, self._pid = kernel, os.getpid()
        self._handles: dict[str, MessageHandler] = {}
        self._worker = Worker("nnx_inspector.listener", self._failed)

    def listen(self, comm: str, handle: MessageHandler) -> None:
        self._handles[comm] = handle

    def forget(self, comm: str) -> None:
        self._handles.pop(comm, None)

    def _own_message(self, frames: object) -> CommMessage | None:
        """The message, if a handler of ours wants it and no subshell is to handle it."""
        one = ipykernel.comm_message(self._kernel, frames)
        if one is None or one.subshell is not None or one.comm not in self._handles:
            return None
        custom = isinstance(one.data, dict) and one.data.get("method") == "custom"
        return one if custom else None

    def _handle(self, one: CommMessage) -> None:
        handle = self._handles.get(one.comm)
        if handle is None:
            return
        ipykernel.send_status(self._kernel, "busy", one.header)
        try:
            handle(one.data.get("content"), one.buffers)
        finally:
            ipykernel.send_status(self._kernel, "idle", one.header)

    def _failed(self, error: Exception) -> None:
        self._kernel.log.error("nnx_inspector could not handle a message", exc_info=error)


class ThreadListener(_KernelListener):
    """Takes messages out in the thread that reads the kernel's shell socket."""

    listens = "during"

    def __init__(self, kernel: Any):
        super().__init__(kernel)
        ipykernel.intercept_shell(kernel, self._take)

    def _take(self, frames: object) -> bool:
        one = self._own_message(frames)
        return one is not None and self._worker.submit(functools.partial(self._handle, one))


class QueueListener(_KernelListener):
    """Looks at the kernel's shell socket and queue, in the thread that runs the cells."""

    listens = "steps"

    def __init__(self, kernel: Any):
        super().__init__(kernel)
        self._thread = threading.main_thread().ident
        self._due = 0.0
        self._seen = -1  # the number of the last message that was looked at
        self._said_idle = False

    def poll(self) -> None:
        now = time.monotonic()
        if now < self._due or threading.get_ident() != self._thread:
            return
        if os.getpid() != self._pid:  # a fork: the socket is its parent's
            return
        self._due = now + LOOK_INTERVAL
        if self._said_idle and ipykernel.is_in_cell():
            self._said_idle = False
            ipykernel.send_status(self._kernel, "busy", ipykernel.cell_request(self._kernel))
        ipykernel.flush_shell_to_queue(self._kernel)
        for queued in ipykernel.messages_after(self._kernel, self._seen):
            self._look_at(queued)
            if time.monotonic() - now > LONGEST_LOOK:
                self._due = 0.0
                return

    def _look_at(self, queued: QueuedMessage) -> None:
        self._seen = queued.number
        one = None if queued.frames is None else self._own_message(queued.frames)
        if one is not None:
            self._worker.submit(functools.partial(self._take, queued, one))

    def _take(self, queued: QueuedMessage, one: CommMessage) -> None:
        if ipykernel.remove_from_queue(self._kernel, queued):
            self._handle(one)
            self._said_idle = True


_listeners: dict[int, tuple[Any, Listener]] = {}
"""The listener of this process's kernel, by its `id`."""
_lock = threading.Lock()


def listener() -> Listener:
    """The one listener of the kernel of this process."""
    kernel = ipykernel.current_kernel()
    with _lock:
        if id(kernel) not in _listeners:
            way = "other" if kernel is None else ipykernel.shell_reader(kernel)
            made = {"thread": ThreadListener, "queue": QueueListener}.get(way)
            _listeners[id(kernel)] = kernel, Listener() if made is None else made(kernel)
        return _listeners[id(kernel)][1]
