"""The output with the last state: when it is replaced, and that it raises no error."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest

from nnx_inspector.screen.export import notebook as saved
from nnx_inspector.screen.export.notebook import SavedOutput


class Shell:
    """The part of a kernel's shell that is used: the event at the end of a cell."""

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


@dataclasses.dataclass
class Last:
    """A last state whose HTML is its key."""

    text: str

    def key(self) -> object:
        return self.text

    def html(self, stop: Callable[[], bool]) -> str | None:
        return None if stop() else self.text


class Owner:
    """Makes the shown state; `weakly` keeps no owner alive."""

    html: str | None = "first"
    seen = False

    def __init__(self) -> None:
        self.failed: list[Exception] = []
        self.output = SavedOutput(self.last, self.failed.append, lambda: self.seen)

    def last(self) -> Last | None:
        return None if self.html is None else Last(self.html)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch):
    """Collects what is displayed: (whether it replaces, HTML); each sets an event."""
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
    owner.output.changed()  # before there is one
    owner.output.show(shell)
    owner.output.show(shell)
    shell.end_cell()
    assert [one[:2] for one in found] == [(False, "first")]
    owner.html = "second"
    owner.output.changed()
    owner.output.changed()
    shell.end_cell()
    shell.end_cell()
    assert [one[:2] for one in found] == [(False, "first"), (True, "second")]
    assert len({display_id for *_, display_id in found}) == 1


def test_it_is_replaced_some_moments_after_the_last_change(sent, monkeypatch):
    found, told = sent
    monkeypatch.setattr(saved, "REST_SECONDS", 0.01)
    owner = Owner()
    owner.output.show(Shell())
    told.clear()
    owner.html = "second"
    owner.output.changed()
    assert told.wait(30)
    assert found[-1][:2] == (True, "second")


def test_what_has_not_changed_or_is_not_known_is_not_sent(sent):
    found, _ = sent
    shell, owner = Shell(), Owner()
    owner.output.show(shell)
    for html in ("first", None):
        owner.html = html
        owner.output.changed()
        shell.end_cell()
    assert len(found) == 1


def test_the_last_word_is_sent_on_closing_and_none_after_it(sent):
    found, _ = sent
    shell, owner = Shell(), Owner()
    owner.output.show(shell)
    owner.html = "last"
    owner.output.changed()
    owner.output.close()
    owner.html = "later"
    owner.output.changed()
    shell.end_cell()
    assert [one[1] for one in found] == ["first", "last"]
    assert shell.heard == []


def test_what_goes_wrong_is_told_and_raises_into_nobody(sent):
    owner = Owner()

    def broken() -> None:
        raise RuntimeError("no")

    output = SavedOutput(broken, owner.failed.append, lambda: True)
    output.show(Shell())
    assert [str(error) for error in owner.failed] == ["no"]


def test_where_there_is_a_browser_a_cell_does_not_wait_for_it(sent, monkeypatch):
    found, told = sent
    shell, owner = Shell(), Owner()
    owner.seen = True
    owner.output.show(shell)
    asked, go = threading.get_ident(), threading.Event()
    made_in: list[int] = []

    class Slow(Last):
        def html(self, stop: Callable[[], bool]) -> str | None:
            assert go.wait(30)
            made_in.append(threading.get_ident())
            return super().html(stop)

    # a state that takes long to make
    monkeypatch.setattr(owner.output, "_last", lambda: Slow("second"))
    told.clear()
    owner.output.changed()
    shell.end_cell()
    assert len(found) == 1
    go.set()
    assert told.wait(30)
    assert found[-1][:2] == (True, "second")
    assert made_in != [asked]


def test_a_page_that_was_loaded_anew_gets_another_output_at_the_end_of_a_cell(sent):
    found, _ = sent
    shell, owner = Shell(), Owner()
    owner.seen = True
    owner.output.show(shell)
    for page in ("one", "one"):
        owner.output.view_opened(page)
    owner.html = "second"
    owner.output.changed()
    owner.output.view_opened("two")
    owner.output._on_timer()  # no cell runs: the output has no place
    assert len(found) == 1
    shell.end_cell()
    owner.html = "third"
    owner.output.changed()
    owner.output.close()
    assert [one[:2] for one in found] == [(False, "first"), (False, "second"), (True, "third")]
    assert len({display_id for *_, display_id in found}) == 1


def test_what_cost_much_is_made_seldom(sent, monkeypatch):
    waits: list[float] = []

    class Timer(threading.Timer):
        def __init__(self, seconds: float, function: Callable[[], object]):
            waits.append(seconds)
            super().__init__(3600, function)

    monkeypatch.setattr("threading.Timer", Timer)
    owner = Owner()
    owner.output.show(Shell())
    owner.output._took = 0.5  # as if it had taken that long
    owner.output.changed()
    assert waits == [0.5 * saved.SHARE]
    owner.output.close()


def test_what_begins_meanwhile_stops_it(sent):
    found, _ = sent
    shell, owner = Shell(), Owner()
    owner.output.show(shell)

    class Begun(Last):
        def html(self, stop: Callable[[], bool]) -> str | None:
            owner.html = None  # a loop begins
            return super().html(stop)

    states = [Begun("second")]
    # the states one after another
    owner.output._last = lambda: states.pop() if states else owner.last()
    owner.output.changed()
    shell.end_cell()
    assert len(found) == 1
    owner.html = "third"
    owner.output.changed()
    shell.end_cell()
    assert found[-1][:2] == (True, "third")
