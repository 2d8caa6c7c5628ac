"""The messages that a browser would receive, without a browser."""

from nnx_inspector.screen import protocol
from nnx_inspector.screen.comm import InspectorWidget
from nnx_inspector.screen.presenter import Presenter


class Browser:
    """Collects the messages for the browser, in order, and sends requests."""

    def __init__(self, monkeypatch):
        self.sent: list[tuple[dict, bytes | None]] = []

        def send(widget, content, buffers=None):
            self.sent.append((content, bytes(buffers[0]) if buffers else None))

        monkeypatch.setattr(InspectorWidget, "send", send)
        monkeypatch.setattr(Presenter, "shown", True)

    def ask(self, insp, message):
        self.sent.clear()
        insp._core.view.screen._received(None, protocol.to_header(message), None)
        insp._commands.wait()  # a thread answers some requests
        return list(self.sent)

    def of(self, kind):
        return [(header, buffer) for header, buffer in self.sent if header["type"] == kind]
