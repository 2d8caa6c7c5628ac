"""Answering the browser: each request gets exactly one reply.

Invariant: no message from a browser raises into the thread that received it; an error becomes the
reply. Slow requests are answered by threads in their order. What a request does is up to the
subclass: an inspector of a model, or a recorded run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from nnx_inspector.background import Worker
from nnx_inspector.errors import InspectorError, reply_text
from nnx_inspector.screen import protocol
from nnx_inspector.screen.presenter import Presenter

if TYPE_CHECKING:
    from nnx_inspector.perturbations.base import Kind

Answer = tuple[protocol.Message, bytes | None]
"""A message and its buffer."""


class RequestHandler:
    """Carries out the browser's requests, on any thread, and replies.

    Attributes:
        table: request -> what carries it out, `(self, message, perturbation)`, and returns a
            message to send before the reply, or None.
        threads: slow request -> the thread that answers it.
        refusal: the reply to a request that is not in the table.
    """

    table: ClassVar[Mapping[type, Callable[[Any, Any, Any], Answer | None]]] = {}
    threads: ClassVar[Mapping[type, str]] = {}
    refusal: ClassVar[str] = ""

    def __init__(self, view: Presenter):
        self._view = view
        names = dict.fromkeys(self.threads.values())
        self._workers = {n: Worker(f"nnx_inspector.{n}", lambda error: None) for n in names}
        view.screen.handler = weakref.WeakMethod(self.answer)

    def interpret(self, message: object) -> tuple[Kind | None, str]:
        """The perturbation that a request adds or sets, if any, and the Python that does the same
        as the request, if any.
        """
        return None, ""

    def answer(self, message: Any, *, now: bool = False) -> None:
        """Carry out a request and reply: slow ones in a thread, unless `now`."""
        view = self._view
        if isinstance(message, protocol.Hello):
            view.welcome()
            return
        if type(message) in self.threads and not now:
            worker = self._workers[self.threads[type(message)]]
            if not worker.submit(lambda: self.answer(message, now=True)):
                view.screen.reply(message.id, "This inspector was closed.")
            return
        try:
            if isinstance(message, protocol.OpenBeside):
                view.open_beside()
                view.screen.reply(message.id)
                return
            if type(message) not in self.table:
                raise InspectorError(self.refusal)
            one, text = self.interpret(message)
            found = self.table[type(message)](self, message, one)
            if found is not None:
                view.screen.send(*found)
            if text:
                view.python = text
                view.state_changed()
        except Exception as error:  # noqa: BLE001 - it is the reply
            view.screen.reply(message.id, reply_text(error))
            return
        view.screen.reply(message.id)

    def compare(self, message: protocol.Compare, _: object) -> Answer | None:
        """What a comparison of two passes shows, if anything."""
        found = self._view.compared(message)
        return None if found is None else (found, None)

    def wait(self) -> None:
        """Return when the slow requests are answered."""
        for worker in self._workers.values():
            worker.wait()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The threads, to be closed when the screen is."""
        return tuple(self._workers.values())
