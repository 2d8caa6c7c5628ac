"""The two comms to the browser: control for commands and their replies, stream for all the rest.

ipykernel routes what the browser says to the thread that last sent on that comm, so only replies
go over control; a training thread sends on stream alone. Invariant: the newest frame wins and a
slow browser never holds a sender up; what is dropped is counted. Knows no model and no jax.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Literal

import anywidget
import traitlets

from nnx_inspector.screen import protocol
from nnx_inspector.screen.assets import asset, packed_module

CREDITS = 4
"""Frames that may be under way without having been drawn; two are acknowledged together."""
SHORTEST = 1 / 40
"""Seconds between two frames, of many in the mean at least."""
LONGEST_REPLY = 4000
"""Characters of an error in a reply."""
UNACKNOWLEDGED = 1 / 4
"""Seconds between two frames while the browser does not answer."""


class InspectorWidget(anywidget.AnyWidget):
    """One of the two comms; `role` is "control" (displayed) or "stream"."""

    role = traitlets.Unicode().tag(sync=True)
    inspector = traitlets.Unicode().tag(sync=True)
    version = traitlets.Int(protocol.VERSION).tag(sync=True)

    def __init__(self, role: str, inspector: str):
        super().__init__(role=role, inspector=inspector)

    def answer_where_asked(self) -> None:
        """Let commands be handled where the browser sends them: beside a running cell.

        ipykernel 7.4 routes what arrives on a comm to the shell that last sent on it, at first the
        one that opened it, which a running cell keeps busy. Where it has forgotten who sent last,
        it goes by the message itself, which JupyterLab addresses to a subshell.
        """
        comm: Any = self.comm
        if comm is not None and hasattr(comm, "_reply_subshell_id"):
            del comm._reply_subshell_id

    def __repr__(self) -> str:
        # hosts print it where they show no widgets
        return f"<the view of an inspector: {self.role}>"

    def close(self) -> None:
        """Close the comm and the layout, which ipywidgets leaves behind."""
        layout = self.layout
        super().close()
        layout.close()


class ControlWidget(InspectorWidget):
    """The comm that is displayed."""

    # text, not a path: a path keeps the widget and its model alive after close()
    _esm = packed_module("widget.js")
    _css = asset("widget.css")


class StreamWidget(InspectorWidget):
    """The comm beside it: its front end hands over to that of the control comm."""

    _esm = asset("stream.js")


class Screen:
    """Sends messages to the views of one inspector and hands on what they ask.

    Args:
        handle: called with each message from the browser (on any thread); it must not raise.
    """

    def __init__(self, handle: Callable[[Any], None]):
        self.id = uuid.uuid4().hex
        self._handle = handle
        self._lock = threading.RLock()
        self.control = ControlWidget("control", self.id)
        self.stream = StreamWidget("stream", self.id)
        self.control.on_msg(self._received)
        self.control.answer_where_asked()
        self.greeted = False
        self.page = ""  # of the view that said hello last
        self._said = 0
        self.heard_elsewhere: Callable[[], object] = lambda: None  # called when `listening` changes
        self._streams = True
        self._cells = threading.get_ident()
        self._heard: int | None = None
        self._seq = 0
        self._acknowledged = 0
        self._sent_at = 0.0
        self._due = 0.0
        self.bytes_sent = 0
        self.dropped = 0
        self.closed = False

    def listening(self, loop: int | None) -> Literal["during", "thread", "after"]:
        """How what the browser says reaches a loop that runs: see `protocol.State`.

        A kernel that hears the browser on another thread than the one of the cells hears it while
        a cell runs; ipykernel 7 does, where the front end asks it to (kernel subshells).

        Args:
            loop: the thread in which a loop runs, or None.
        """
        if loop not in (None, self._cells):
            return "thread"
        return "after" if self._heard in (None, self._cells) else "during"

    def _received(self, _widget: Any, content: Any, _buffers: Any) -> None:
        try:
            message = protocol.from_header(content)
            if not isinstance(message, protocol.TO_KERNEL):
                raise protocol.ProtocolError(f"{message.type!r} is not for the kernel.")
        except protocol.ProtocolError as error:
            number = content.get("id") if isinstance(content, dict) else None
            if isinstance(number, int) and not isinstance(number, bool):
                self.reply(number, str(error))
            return
        if isinstance(message, protocol.Hello) and not self._is_news(message):
            return
        before, self._heard = self.listening(None), threading.get_ident()
        if self.listening(None) != before and not isinstance(message, protocol.Hello):
            self.heard_elsewhere()
        if isinstance(message, protocol.Ack):
            with self._lock:
                self._acknowledged = max(self._acknowledged, min(message.seq, self._seq))
            return
        if isinstance(message, protocol.Hello):
            self.greeted, self.page, self._said = True, message.page, message.said
            self._streams = message.streams
            self.reply(0)  # the browser learns on which comm it is heard
        self._handle(message)

    def _is_news(self, hello: protocol.Hello) -> bool:
        """Whether no later hello of the same page was heard: one may wait for its turn behind
        cells, and an answer to it would take the way back to where it waited.
        """
        return hello.page != self.page or hello.said > self._said

    def reply(self, number: int, error: str = "") -> None:
        """Answer a request: with success, or with the text of what is wrong."""
        message = protocol.Reply(id=number, ok=not error, error=error[:LONGEST_REPLY])
        if not self.closed:
            self.control.send(protocol.to_header(message))
            self.control.answer_where_asked()

    def send(self, message: Any, buffer: bytes | None = None) -> None:
        """Send one message over the stream, whatever the browser has drawn.

        Over control, where the page that said hello last has no stream.
        """
        with self._lock:
            if self.closed:
                return
            header = protocol.to_header(message)
            self.bytes_sent += len(buffer or b"") + len(json.dumps(header, ensure_ascii=False))
            widget = self.stream if self._streams else self.control
            widget.send(header, [buffer] if buffer is not None else None)

    def ready_for_frame(self) -> bool:
        """Whether a frame would be sent now; counts it as dropped if not."""
        with self._lock:
            now = time.monotonic()
            busy = self._seq - self._acknowledged >= CREDITS
            due = self._sent_at + UNACKNOWLEDGED if busy else self._due
            ready = now >= due and not self.closed
            self.dropped += not ready
            return ready

    def next_seq(self) -> int:
        """The number of the frame that is about to be sent."""
        with self._lock:
            self._seq += 1
            self._sent_at = time.monotonic()
            # from when it was due, not from when it came: else steps of 15 ms would give 33 Hz
            self._due = max(self._due + SHORTEST, self._sent_at)
            return self._seq

    def close(self) -> None:
        """Close both comms; nothing is sent afterwards."""
        with self._lock:
            if not self.closed:
                self.closed = True
                self.control.on_msg(self._received, remove=True)
                self.control.close()
                self.stream.close()
