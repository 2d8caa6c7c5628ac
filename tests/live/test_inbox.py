"""Passes are distinguished, sampled and delivered whole; late figures are counted."""

import dataclasses
import threading

import numpy as np
import pytest
from flax import nnx

from nnx_inspector.live.inbox import MOST_AWAITING, CurrentPass, Inbox, Message
from nnx_inspector.live.pass_boundaries import MODEL_CALL
from nnx_inspector.live.session import Session
from nnx_inspector.stats.summary import Summary, empty


@dataclasses.dataclass(frozen=True)
class Setting:
    active: bool = False


SAME = Setting()


def some(count: int) -> Summary:
    """A summary of n zeros."""
    nothing = empty()
    bins = np.array(nothing.bins)
    bins[0] = count
    return dataclasses.replace(nothing, bins=bins)


def saying(site: str, quantity: str, count: int):
    """A message with one such summary."""
    return Message(lambda sent: sent.arrived[site, quantity].append(some(count)))


def test_every_nth_pass_is_sampled_and_the_others_keep_nothing():
    inbox = Inbox()
    inbox.every = 3
    begun = [inbox.begin(Setting()) for _ in range(7)]
    assert [b.number for b in begun] == list(range(7))
    assert [b.sampled for b in begun] == [i % 3 == 0 for i in range(7)]
    for one in begun:
        inbox.receive(one.number, saying("a", "output", one.number + 1))
    taken = inbox.take()
    assert [one.number for one in taken] == [0, 3, 6]
    assert inbox.late == 4
    assert inbox.take() == []


def test_every_changes_behind_passes_that_are_sampled():
    """As when the next pass is to be measured too, or another number counts behind it."""
    inbox = Inbox()
    inbox.sample(3)
    found = [inbox.begin(Setting()).sampled for _ in range(3)]
    inbox.sample(3, 1, 6)  # pass 3, the one behind it, and then every sixth
    found += [inbox.begin(Setting()).sampled for _ in range(6)]
    assert [i for i, one in enumerate(found) if one] == [0, 3, 4, 6]


def test_none_is_sampled_where_every_is_zero():
    inbox = Inbox()
    inbox.every = 0
    assert not inbox.begin(Setting()).sampled
    assert inbox.take() == []


def test_a_pass_has_its_own_setting_to_its_end():
    inbox = Inbox()
    inbox.begin(Setting(active=True))
    assert inbox.begin(Setting()).number == 1
    inbox.receive(0, saying("a", "output", 1))
    assert [one.perturbed for one in inbox.take()] == [True, False]


def test_the_newest_may_be_left_for_later():
    inbox = Inbox()
    for _ in range(5):
        inbox.begin(Setting())
    assert [one.number for one in inbox.take(leave=2)] == [0, 1, 2]
    assert [one.number for one in inbox.take(leave=2)] == []
    inbox.receive(3, saying("a", "gradient", 1))
    assert [one.number for one in inbox.take()] == [3, 4]


def test_a_pass_is_kept_until_its_messages_arrive():
    inbox = Inbox()
    inbox.begin(Setting())
    inbox.begin(Setting(), awaits=["output", "gradient"])
    for _ in range(4):
        inbox.begin(Setting())
    assert [one.number for one in inbox.take(leave=2)] == [0]
    inbox.receive(1, saying("a", "gradient", 1), "gradient")
    assert inbox.take(leave=2) == []
    inbox.receive(1, saying("a", "output", 1))
    assert [one.number for one in inbox.take(leave=2)] == [1, 2, 3]
    assert inbox.late == 0


def test_messages_that_never_arrive_hold_up_a_bounded_number_of_passes():
    inbox = Inbox()
    inbox.begin(Setting(), awaits=["gradient"])
    for _ in range(MOST_AWAITING - 1):
        inbox.begin(Setting())
    assert inbox.take(leave=2) == []
    inbox.begin(Setting())
    assert len(inbox.take(leave=2)) == MOST_AWAITING - 1


def test_restarting_counts_from_zero_and_forgets():
    inbox = Inbox()
    inbox.begin(Setting())
    inbox.restart(2)
    assert inbox.take() == []
    assert [inbox.begin(Setting()).sampled for _ in range(3)] == [True, False, True]


@pytest.mark.parametrize("over", [False, True])
def test_those_who_wait_are_woken(over):
    inbox, found = Inbox(), []
    ends = threading.Event()
    thread = threading.Thread(target=lambda: found.append(inbox.wait_for_more_than(1, ends.is_set)))
    thread.start()
    if over:
        ends.set()
        inbox.wake()
    else:
        inbox.begin(Setting())
        inbox.begin(Setting())
    thread.join(30)
    assert found == [not over]


def test_calls_of_a_site_are_merged_and_known_sites_come_first():
    session = Session(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    session.keys, inbox = ["a", "never"], session.inbox
    for count in (1, 2):
        number = inbox.begin(Setting()).number
        inbox.receive(number, saying("sown", "output", count))
        inbox.receive(number, saying("a", "gradient", 10 * count))
        inbox.receive(number, saying("a", "output", 100 * count))
    found = session.summaries_of(inbox.take())
    session.close()
    assert list(found) == ["a", "sown"]
    sizes = {(k, q): int(np.sum(s.bins)) for k, of in found.items() for q, s in of.items()}
    assert sizes == {("a", "output"): 300, ("a", "gradient"): 30, ("sown", "output"): 3}


def test_a_pass_is_complete_once_and_stays_until_it_is_taken():
    inbox = Inbox()
    first = inbox.begin(Setting(), awaits=["output", "gradient"]).number
    second = inbox.begin(Setting(), awaits=["output"]).number
    inbox.receive(first, saying("a", "output", 1))
    assert inbox.completed() == []
    inbox.receive(second, saying("a", "output", 2))
    assert [one.number for one in inbox.completed()] == [second]
    inbox.receive(first, saying("a", "gradient", 1), "gradient")
    assert [one.number for one in inbox.completed()] == [first]
    assert inbox.completed() == []
    assert [one.number for one in inbox.take()] == [first, second]


def test_passes_that_are_passed_over_are_counted():
    inbox = Inbox()
    inbox.restart(3)
    assert inbox.is_due([MODEL_CALL], SAME)
    assert inbox.begin(Setting()).sampled
    assert not inbox.is_due([MODEL_CALL] * 2, SAME)
    assert inbox.is_due([MODEL_CALL] * 3, SAME)
    inbox.pass_over([MODEL_CALL] * 2, SAME)
    assert inbox.count == 3
    assert inbox.begin(Setting()) == CurrentPass(3, True, Setting())
    inbox.every = 0
    assert not inbox.is_due([MODEL_CALL] * 9, SAME)
