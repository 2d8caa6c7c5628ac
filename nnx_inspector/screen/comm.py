"""The two comms to the browser: control for commands and their replies, stream for everything else.

Only replies go over control, and a training thread sends on stream alone. Invariant: the newest
frame wins, a slow browser never holds up a sender, and dropped frames are counted. Knows no model
and no jax.
"""

from __future__ import annotations

import functools
import json
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Final, Literal

import anywidget
import traitlets

from nnx_inspector._compat.ipykernel import allow_thread_to_send, disable_reply_subshell
from nnx_inspector.errors import InspectorError
from nnx_inspector.screen import protocol
from nnx_inspector.screen.export.assets import asset, packed_module
from nnx_inspector.screen.listener.listener import listener

CREDITS = 8
"""The most frames that are sent but not yet drawn; the browser acknowledges every second one. At 30
a second an answer may take 0.2 seconds."""
MIN_INTERVAL = 1 / 40
"""The shortest mean interval between frames, in seconds."""
LONGEST_REPLY = 4000
"""The most characters of an error in a reply."""
UNACKNOWLEDGED_INTERVAL = 1 / 4
"""Seconds between two frames while the browser does not answer."""


class InspectorWidget(anywidget.AnyWidget):
    """One of the two comms; `role` is "control" (displayed) or "stream"."""

    role = traitlets.Unicode().tag(sync=True)
    inspector = traitlets.Unicode().tag(sync=True)
    version = traitlets.Int(protocol.VERSION).tag(sync=True)

    def __init__(self, role: str, inspector: str):
        super().__init__(role=role, inspector=inspector)
        disable_reply_subshell(self.comm)

    def send(self, content: object, buffers: object = None) -> None:
        """Send a custom message, from any thread."""
        allow_thread_to_send()
        super().send(content, buffers)

    def __repr__(self) -> str:
        # printed by hosts that do not show widgets
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
    """The other comm. Its front end hands its messages to that of the control comm."""

    _esm = asset("stream.js")


def _other_version(content: object) -> int | None:
    """The version in the hello of a page that is older or newer, whatever else it has."""
    if not isinstance(content, dict) or content.get("type") != protocol.Hello.type:
        return None
    version = content.get("version")
    return version if type(version) is int and version != protocol.VERSION else None


_side_panes: dict[str, Any] = {}
"""Title -> the pane beside a notebook, of the package sidecar, where the inspectors of that title
are shown. It stays where the user has put it."""

DOCKING_STEPS: Final = (
    "Two steps dock this view: right-click it and choose Create New View for Output, then drag the "
    "new tab to the right edge. With the package sidecar (pip install sidecar, and JupyterLab "
    "loaded again) this button does both."
)


def open_beside(widget: InspectorWidget, title: str) -> None:
    """Show a widget in a new pane at the right of the notebook, in place of that of its title.

    Raises:
        InspectorError: the package sidecar is missing; the text has the steps to do without.
    """
    try:
        from sidecar import Sidecar
    except ImportError as error:
        raise InspectorError(DOCKING_STEPS) from error
    if (before := _side_panes.pop(title, None)) is not None:
        before.close()  # nothing tells whether its tab is still there
    pane: Any = Sidecar(title=title, anchor="split-right")
    _side_panes[title] = pane
    _fill_pane(pane, widget)


def refresh_side_pane(widget: InspectorWidget, title: str) -> None:
    """Show a widget in the pane of its title, if there is one: its cell ran again."""
    if title in _side_panes:
        _fill_pane(_side_panes[title], widget)


def _fill_pane(pane: Any, widget: InspectorWidget) -> None:
    bundle: Any = widget._repr_mimebundle_()
    data, metadata = bundle
    pane.outputs = ({"output_type": "display_data", "data": data, "metadata": metadata},)


class Screen:
    """Sends messages to the views of one inspector and hands on their requests.

    Attributes:
        handler: returns what is called with each message from the browser (on any thread), which
            must not raise; or None once that is gone.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.handler: Callable[[], Callable[[protocol.ToKernel], object] | None] = lambda: None
        self._lock = threading.RLock()
        self.control = ControlWidget("control", self.id)
        self.stream = StreamWidget("stream", self.id)
        self.control.on_msg(self._on_message)
        self._listener, self._comm = listener(), self.control.model_id or ""
        self._listener.listen(self._comm, functools.partial(self._on_message, None))
        self.has_view = False
        self.page = ""  # the page of the view that said hello last
        self._hello_number = 0
        self.on_listening_changed: Callable[[], object] = lambda: None
        self._page_has_stream = True
        self._cell_thread = threading.get_ident()
        self._message_thread: int | None = None
        self._seq = 0
        self._acknowledged = 0
        self._sent_at = 0.0
        self._due_at = 0.0
        self.bytes_sent = 0
        self.dropped = self.failures = 0
        self.closed = False

    def listening(self, loop: int | None) -> Literal["during", "steps", "thread", "after"]:
        """How the browser's messages reach a running loop (in the thread `loop`): see
        `protocol.State`.

        A kernel that receives them on another thread than the cells' receives them while a cell
        runs. ipykernel 7 does so if the front end asks for it (kernel subshells). Otherwise see
        `listener`.
        """
        if loop not in (None, self._cell_thread):
            return "thread"
        elsewhere = self._message_thread not in (None, self._cell_thread)
        return (
            "during" if self._listener.listens == "after" and elsewhere else self._listener.listens
        )

    def poll(self) -> None:
        """Look for messages from the browser, where a kernel does not do so while a cell runs."""
        self._listener.poll()

    def _on_message(self, _widget: object, content: object, _buffers: object) -> None:
        if (version := _other_version(content)) is not None:
            self._answer_another_version(version)
            return
        try:
            message = protocol.from_header(content)
            if not isinstance(message, protocol.TO_KERNEL):
                raise protocol.ProtocolError(f"{message.type!r} is not for the kernel.")
        except protocol.ProtocolError as error:
            number = content.get("id") if isinstance(content, dict) else None
            if type(number) is int and abs(number) <= protocol.LARGEST_INTEGER:
                self.reply(number, str(error))
            return
        if isinstance(message, protocol.Hello) and not self._is_newest_hello(message):
            return
        before, self._message_thread = self.listening(None), threading.get_ident()
        if self.listening(None) != before and not isinstance(message, protocol.Hello):
            self.on_listening_changed()
        if isinstance(message, protocol.Ack):
            with self._lock:
                self._acknowledged = max(self._acknowledged, min(message.seq, self._seq))
            return
        if isinstance(message, protocol.Hello):
            self.has_view, self.page, self._hello_number = True, message.page, message.said
            self._page_has_stream = message.streams
            self.reply(0)  # tells the browser which comm works
        if (answer := self.handler()) is not None:
            answer(message)

    def _answer_another_version(self, version: int) -> None:
        """Send everything once, by which the view learns of this version and says what to do.

        A page that was loaded before an upgrade asks so. For the views of this version it changes
        nothing.
        """
        streams, page, said = self._page_has_stream, self.page, self._hello_number
        if (answer := self.handler()) is not None:
            answer(protocol.Hello(version=version, streams=streams, page=page, said=said))

    def _is_newest_hello(self, hello: protocol.Hello) -> bool:
        """Whether no later hello of the same page has arrived.

        A hello may have waited behind cells. Answering it would route later messages to the shell
        where it waited.
        """
        return hello.page != self.page or hello.said > self._hello_number

    def reply(self, number: int, error: str = "") -> None:
        """Answer a request: with success, or with the text of an error."""
        message = protocol.Reply(id=number, ok=not error, error=error[:LONGEST_REPLY])
        if not self.closed:
            self.control.send(protocol.to_header(message))

    def send(self, message: protocol.Message, buffer: bytes | None = None) -> None:
        """Send one message over the stream, however many frames the browser has yet to draw. One
        that could not be sent is counted.

        The message goes over control if the page that said hello last has no stream.
        """
        with self._lock:
            if self.closed:
                return
            try:
                header = protocol.to_header(message)
                self.bytes_sent += len(buffer or b"") + len(json.dumps(header, ensure_ascii=False))
                widget = self.stream if self._page_has_stream else self.control
                widget.send(header, [buffer] if buffer is not None else None)
            except Exception:  # noqa: BLE001 - a broken comm must not stop a training loop
                self.failures += 1

    def ready_for_frame(self) -> bool:
        """Whether a frame can be sent now. If not, it is counted as dropped."""
        with self._lock:
            now = time.monotonic()
            busy = self._seq - self._acknowledged >= CREDITS
            due = self._sent_at + UNACKNOWLEDGED_INTERVAL if busy else self._due_at
            ready = now >= due and not self.closed
            self.dropped += not ready
            return ready

    def next_seq(self) -> int:
        """The number of the frame that is about to be sent."""
        with self._lock:
            self._seq += 1
            self._sent_at = time.monotonic()
            # counted from when it was due, not sent: otherwise steps of 15 ms would give 33 Hz
            self._due_at = max(self._due_at + MIN_INTERVAL, self._sent_at)
            return self._seq

    def close(self) -> None:
        """Close both comms; nothing is sent afterwards."""
        with self._lock:
            if not self.closed:
                self.closed = True
                self._listener.forget(self._comm)
                self.control.on_msg(self._on_message, remove=True)
                self.control.close()
                self.stream.close()
