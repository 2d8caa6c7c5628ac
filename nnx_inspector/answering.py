"""Answers what the screen asks, in a thread: neither the loop nor who hears the browser waits.

Invariant: one request after another, each with its message, if any, and then exactly one reply.
Knows no model: whoever asks for one of these says how an answer is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nnx_inspector.errors import reply_text
from nnx_inspector.worker import Worker

Answer = tuple[Any, bytes | None]
"""A message and its buffer."""


class Answering:
    """Answers requests in their order.

    Args:
        name: of the thread.
        make: makes the answer to a request; None where there is none to send.
        send: one message over the stream.
        reply: to a request, with the text of what is wrong.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Any], Answer | None],
        send: Callable[[Any, bytes | None], None],
        reply: Callable[[int, str], None],
    ):
        self._make, self._send, self._reply = make, send, reply
        self._worker = Worker(name, lambda error: None)
        self.close = self._worker.close
        self.wait = self._worker.wait

    def ask(self, request: Any) -> None:
        """Answer a request later, and reply."""
        if not self._worker.do(lambda: self._answer(request)):
            self._reply(request.id, "This inspector was closed.")

    def _answer(self, request: Any) -> None:
        try:
            found = self._make(request)
            if found is not None:
                self._send(*found)
        except Exception as error:  # noqa: BLE001 - it is the reply
            self._reply(request.id, reply_text(error))
            return
        self._reply(request.id, "")
