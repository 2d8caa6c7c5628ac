"""The output that holds the last state: when it is replaced, and that it raises into nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from nnx_inspector import saved
from nnx_inspector.saved import SavedOutput


class Shell:
    """What a kernel's shell offers: the end of a cell."""

    def __init__(self) -> None:
        self.events = self
        self.heard: list[Callable[..., Any]] = []

    def register(self, name: str, callback: Callable[..., Any]) -> None:
        assert name == "post_run_cell"
        self.heard.append(callback)

    def unregister(self, name: str, callback: Callable[..., Any]) -> None:
        self.heard.remove(callback)

    def end_cell(self) -> None:
        for callback in list(self.heard):
            callback(object())


class Owner:
    """Makes what is shown; `weakly` keeps no owner alive."""

    html: str | None = "first"

    def __init__(self) -> None:
        self.failed: list[Exception] = []
        self.output = SavedOutput(lambda: self.html, self.failed.append)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch):
    """What was displayed: (whether it replaces, HTML); and an event set by each."""
    found: list[tuple[bool, str, str]] = []
    told = threading.Event()

    def note(replaces: bool):
        def display(data: dict[str, str], *, raw: bool, display_id: str) -> None:
            assert raw
            found.append((replaces, data["text/html"], display_id))
            told.set()

        return display

    monkeypatch.setattr("IPython.display.display", note(False))
    monkeypatch.setattr("IPython.display.update_display", note(True))
    found_and_told = (found, told)
    return found_and_told


def test_it_is_replaced_at_the_end_of_a_cell_where_something_moved(sent):
    found, _ = sent
    shell, owner = Shell(), Owner()
    owner.output.moved()  # before there is one
    owner.output.show(shell)
    owner.output.show(shell)
    shell.end_cell()
    assert [one[:2] for one in found] == [(False, "first")]
    owner.html = "second"
    owner.output.moved()
    owner.output.moved()
    shell.end_cell()
    shell.end_cell()
    assert [one[:2] for one in found] == [(False, "first"), (True, "second")]
    assert len({display_id for *_, display_id in found}) == 1


def test_it_is_replaced_some_moments_after_the_last_change(sent, monkeypatch):
    found, told = sent
    monkeypatch.setattr(saved, "RESTS", 0.01)
    owner = Owner()
    owner.output.show(Shell())
    told.clear()
    owner.html = "second"
    owner.output.moved()
    assert told.wait(30)
    assert found[-1][:2] == (True, "second")


def test_what_has_not_changed_or_is_not_known_is_not_sent(sent):
    found, _ = sent
    shell, owner = Shell(), Owner()
    owner.output.show(shell)
    for html in ("first", None):
        owner.html = html
        owner.output.moved()
        shell.end_cell()
    assert len(found) == 1


def test_the_last_word_is_sent_on_closing_and_none_after_it(sent):
    found, _ = sent
    shell, owner = Shell(), Owner()
    owner.output.show(shell)
    owner.html = "last"
    owner.output.moved()
    owner.output.close()
    owner.html = "later"
    owner.output.moved()
    shell.end_cell()
    assert [one[1] for one in found] == ["first", "last"]
    assert shell.heard == []


def test_what_goes_wrong_is_told_and_raises_into_nobody(sent):
    owner = Owner()

    def broken() -> str:
        raise RuntimeError("no")

    output = SavedOutput(broken, owner.failed.append)
    output.show(Shell())
    assert [str(error) for error in owner.failed] == ["no"]
