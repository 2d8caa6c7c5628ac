"""How often frames are sent, measured by the test's own clock."""

import sys

import jax.numpy as jnp
import pytest
from flax import nnx
from inside import inside, receive

import nnx_inspector as nni
import nnx_inspector.screen.comm as screens
from nnx_inspector.errors import InspectorError
from nnx_inspector.screen.comm import (
    CREDITS,
    MIN_INTERVAL,
    UNACKNOWLEDGED_INTERVAL,
    InspectorWidget,
    Screen,
)
from nnx_inspector.screen.protocol import VERSION


class FakePage:
    """A screen whose page has drawn what it was sent at the time, or nothing at all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, draws: bool):
        self.now, self.draws = 100.0, draws
        monkeypatch.setattr(screens.time, "monotonic", lambda: self.now)
        self.screen = Screen()

    def sent_at(self, every: float, seconds: float) -> list[float]:
        """The times at which frames are sent, if a pass arrives at a fixed interval."""
        sent, passes = [], round(seconds / every)
        for i in range(passes):
            self.now = 100.0 + i * every
            if self.screen.ready_for_frame():
                sent.append(self.now)
                number = self.screen.next_seq()
                if self.draws:
                    receive(self.screen, {"type": "ack", "seq": number})
        assert len(sent) + self.screen.dropped == passes
        return sent


@pytest.mark.parametrize("every", [0.001, 0.0083, 0.015, 0.024])
def test_fast_passes_come_at_one_rate_whatever_their_own(monkeypatch, every):
    sent = FakePage(monkeypatch, draws=True).sent_at(every, 5.0)
    assert len(sent) == pytest.approx(5.0 / MIN_INTERVAL, rel=0.02)


@pytest.mark.parametrize("every", [0.026, 0.1, 1.0])
def test_slow_passes_are_all_sent(monkeypatch, every):
    page = FakePage(monkeypatch, draws=True)
    assert len(page.sent_at(every, 10.0)) == round(10.0 / every)
    assert page.screen.dropped == 0


def test_at_30_a_second_an_answer_may_take_a_fifth_of_a_second(monkeypatch):
    page, answers = FakePage(monkeypatch, draws=False), list[tuple[float, int]]()
    for i in range(300):
        page.now = 100.0 + i / 30
        while answers and answers[0][0] <= page.now:
            receive(page.screen, {"type": "ack", "seq": answers.pop(0)[1]})
        assert page.screen.ready_for_frame()
        if (number := page.screen.next_seq()) % 2 == 0:  # every second one is acknowledged
            answers.append((page.now + 0.2, number))
    assert page.screen.dropped == 0


def test_after_a_pause_no_more_come_than_before(monkeypatch):
    page = FakePage(monkeypatch, draws=True)
    page.screen.next_seq()
    receive(page.screen, {"type": "ack", "seq": 1})
    page.now += 60.0
    burst = 0
    for _ in range(10):  # at one moment
        if page.screen.ready_for_frame():
            receive(page.screen, {"type": "ack", "seq": page.screen.next_seq()})
            burst += 1
    assert burst <= 2


def test_a_page_that_draws_nothing_gets_few(monkeypatch):
    sent = FakePage(monkeypatch, draws=False).sent_at(0.005, 5.0)
    assert len(sent) == pytest.approx(CREDITS + 5.0 / UNACKNOWLEDGED_INTERVAL, abs=2)


@pytest.fixture
def panes(monkeypatch):
    monkeypatch.setattr(screens, "_side_panes", {})  # kept for the whole process
    return screens._side_panes


def shown_in(pane):
    (output,) = pane.outputs
    return output["data"]["application/vnd.jupyter.widget-view+json"]["model_id"]


def test_a_view_opens_beside_and_a_cell_that_runs_again_shows_the_new_one_there(panes):
    first, second, other = Screen(), Screen(), Screen()
    screens.refresh_side_pane(first.control, "Net")
    assert panes == {}  # nothing opens by itself
    screens.open_beside(first.control, "Net")
    pane = panes["Net"]
    assert (pane.title, pane.anchor, shown_in(pane)) == (
        "Net",
        "split-right",
        first.control.model_id,
    )
    screens.refresh_side_pane(other.control, "Other")
    assert list(panes) == ["Net"]
    screens.refresh_side_pane(second.control, "Net")
    assert panes["Net"] is pane  # where the user has put it
    assert shown_in(pane) == second.control.model_id
    screens.open_beside(second.control, "Net")
    assert panes["Net"] is not pane
    assert pane.comm is None  # closed: its tab may be gone
    for screen in (first, second, other):
        screen.close()


def test_without_the_package_the_two_steps_are_said(panes, monkeypatch):
    monkeypatch.setitem(sys.modules, "sidecar", None)
    screen = Screen()
    with pytest.raises(InspectorError, match="Create New View for Output, then drag"):
        screens.open_beside(screen.control, "Net")
    assert panes == {}
    screen.close()


@pytest.mark.parametrize("more", [{}, {"once": "there was a field"}])
@pytest.mark.parametrize("apart", [-1, 1])
def test_a_page_of_another_version_is_sent_what_names_this_one(apart, more, monkeypatch):
    insp = nni.Inspector(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)), display=False)
    screen, sent = inside(insp).view.screen, []
    monkeypatch.setattr(InspectorWidget, "send", lambda self, content, *_: sent.append(content))
    now = {"type": "hello", "version": VERSION, "streams": True, "page": "this", "said": 3}
    receive(screen, now)
    as_ever = {one["type"] for one in sent}
    sent.clear()
    receive(screen, {"type": "hello", "version": VERSION + apart, **more})
    assert {one["type"] for one in sent} == as_ever - {"reply"}
    assert {one["version"] for one in sent if "version" in one} == {VERSION}
    # which greeting counts has no sign of its own
    assert (screen.page, screen._hello_number, screen.has_view) == ("this", 3, True)
    insp.close()
