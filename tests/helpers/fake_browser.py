"""The messages that a browser would receive, without a browser."""

from inside import inside, receive

from nnx_inspector.screen.comm import InspectorWidget
from nnx_inspector.screen.presenter import Presenter


class FakeBrowser:
    """Collects the messages for the browser, in order, and sends requests."""

    def __init__(self, monkeypatch):
        self.sent: list[tuple[str, dict, bytes | None]] = []  # of control or stream

        def send(widget, content, buffers=None):
            self.sent.append((widget.role, content, bytes(buffers[0]) if buffers else None))

        monkeypatch.setattr(InspectorWidget, "send", send)
        monkeypatch.setattr(Presenter, "display_requested", True)

    def ask(self, insp, message):
        return self.ask_screen(inside(insp).view.screen, inside(insp).commands, message)

    def ask_screen(self, screen, requests, message):
        self.sent.clear()
        receive(screen, message)
        requests.wait()  # a thread answers some requests
        return [one[1:] for one in self.sent]

    def messages(self, kind):
        return [(header, buffer) for _, header, buffer in self.sent if header["type"] == kind]

    def replies_to(self, insp, message):
        """Send a message (a dataclass or a raw header); returns the replies that came at once."""
        before = len(self.messages("reply"))
        receive(inside(insp).view.screen, message)
        return [header for header, _ in self.messages("reply")[before:]]
