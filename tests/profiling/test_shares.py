"""Whose time it is, on constructed traces: each expected share is worked out by hand."""

import random

import pytest

from nnx_inspector.profiling.traces import Event, shares


def test_gaps_are_idle_and_all_adds_up_to_the_whole():
    found, idle = shares([Event(10, 30, "a"), Event(50, 60, "b")], 0, 100)
    assert found == {"a": 20, "b": 10}
    assert idle == 70


def test_operations_on_two_threads_share_the_time_in_which_both_run():
    found, idle = shares([Event(0, 10, "a"), Event(5, 15, "b")], 0, 20)
    assert found == {"a": 7.5, "b": 7.5}
    assert idle == 5


def test_three_threads_of_one_operation_are_wall_time_and_not_its_threefold():
    found, _ = shares([Event(0, 10, "dot")] * 3, 0, 10)
    assert found == {"dot": 10}


def test_a_loop_that_waits_for_its_body_on_another_thread_has_only_what_remains():
    events = [Event(0, 100, "while", waits=True), Event(10, 90, "dot")]
    found, idle = shares(events, 0, 100)
    assert found == {"while": 20, "dot": 80}
    assert idle == 0


def test_what_begins_before_or_ends_after_counts_within_only():
    found, idle = shares([Event(-5, 5, "a"), Event(95, 200, "b")], 0, 100)
    assert found == {"a": 5, "b": 5}
    assert idle == 90


def test_nothing_is_idle_time():
    assert shares([], 3, 8) == ({}, 5)


@pytest.mark.parametrize("seed", range(20))
def test_shares_equal_those_counted_moment_by_moment(seed: int):
    draw = random.Random(seed)
    events: list[Event] = []
    for _ in range(draw.randint(0, 12)):
        start, waits = draw.randint(0, 40), draw.random() < 0.3
        key = draw.choice("abcd") + "w" * waits
        events.append(Event(start, start + draw.randint(1, 20), key, waits=waits))
    found, idle = shares(events, 0, 50)
    expected, expected_idle = moment_by_moment(events, 50)
    assert found == pytest.approx(expected)
    assert idle == pytest.approx(expected_idle)
    assert sum(found.values()) + idle == pytest.approx(50)


def moment_by_moment(events: list[Event], end: int) -> tuple[dict[str, float], float]:
    """The same with a loop over whole moments."""
    found: dict[str, float] = {}
    idle = 0.0
    for moment in range(end):
        now = [event for event in events if event.start <= moment < event.end]
        now = [event for event in now if not event.waits] or now
        for event in now:
            found[str(event.key)] = found.get(str(event.key), 0.0) + 1 / len(now)
        idle += not now
    return found, idle
