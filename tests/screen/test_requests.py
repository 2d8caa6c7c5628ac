"""Each request gets one reply: of the thread that it came in, or of one that answers slow ones."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import pytest

from nnx_inspector.errors import add_note
from nnx_inspector.screen import protocol
from nnx_inspector.screen.presenter import Presenter
from nnx_inspector.screen.requests import Answer, RequestHandler


class View:
    """Notes in order what is sent, replied and shown."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.python = ""
        self.screen = types.SimpleNamespace(
            asked=None,
            send=lambda message, buffer: self.said.append((message.type, buffer)),
            reply=lambda number, error="": self.said.append((number, error)),
        )

    def welcome(self) -> None:
        self.said.append("welcome")

    def state_changed(self) -> None:
        self.said.append(self.python)


def _fails(_: RequestHandler, message: protocol.Select, __: object) -> Answer | None:
    error = KeyError(f"No site {message.site!r}.")
    add_note(error, "choose another.")
    raise error


def _answers_nothing(_: RequestHandler, __: protocol.SwitchAll, ___: object) -> Answer | None:
    return None


def _answers(_: RequestHandler, message: protocol.Remove, __: object) -> Answer | None:
    other = protocol.Other(name="a", step=None, number=message.perturbation)
    return other, threading.current_thread().name.encode()


class FakeHandler(RequestHandler):
    table: ClassVar[Mapping[type, Callable[[Any, Any, Any], Answer | None]]] = {
        protocol.Select: _fails,
        protocol.Remove: _answers,
        protocol.SwitchAll: _answers_nothing,
    }
    threads: ClassVar[Mapping[type, str]] = {protocol.Remove: "slow"}
    refusal: ClassVar[str] = "A recorded run has no model."

    def interpret(self, message: object) -> tuple[None, str]:
        return None, "insp.off()" if isinstance(message, protocol.SwitchAll) else ""


@pytest.fixture
def view() -> View:
    return View()


@pytest.fixture
def answers(view: View) -> FakeHandler:
    return FakeHandler(cast(Presenter, view))


def test_a_hello_is_welcomed_and_not_replied_to(view: View, answers: FakeHandler):
    answers.answer(protocol.Hello(version=1, streams=True, page="p", said=1))
    assert view.said == ["welcome"]


def test_an_error_becomes_the_one_reply_with_its_notes(view: View, answers: FakeHandler):
    answers.answer(protocol.Select(id=3, site="b"))
    assert view.said == [(3, "No site 'b'.\nChoose another.")]


def test_what_is_not_in_the_table_is_refused(view: View, answers: FakeHandler):
    answers.answer(protocol.SetEvery(id=4, every=2))
    assert view.said == [(4, "A recorded run has no model.")]


def test_the_python_of_a_request_is_shown_before_its_reply(view: View, answers: FakeHandler):
    answers.answer(protocol.SwitchAll(id=5, enabled=False))
    assert view.said == ["insp.off()", (5, "")]


def test_slow_requests_are_answered_in_order_in_a_thread_and_refused_once_it_is_closed(
    view: View, answers: FakeHandler
):
    for number in range(20):
        answers.answer(protocol.Remove(id=number, perturbation=7))
    answers.wait()
    sent = ("other", b"nnx_inspector.slow")
    assert view.said == [one for number in range(20) for one in (sent, (number, ""))]
    (worker,) = answers.workers
    worker.close()
    answers.answer(protocol.Remove(id=20, perturbation=7))
    assert view.said[-1] == (20, "This inspector was closed.")


def test_a_message_after_the_requests_are_gone_reaches_nobody(view: View):
    asked = FakeHandler(cast(Presenter, view))
    assert view.screen.handler() is not None
    del asked
    assert view.screen.handler() is None
