"""Steps are timed from the end of one on the device to that of another."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest

from nnx_inspector.inspector.cost.meter import RECENT, Clock, Edge

PLAIN, MEASURED = (False, False), (True, False)


class Device:
    """A device whose clock is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        clock = "nnx_inspector.inspector.cost.meter.time.perf_counter"
        monkeypatch.setattr(clock, lambda: self.now)

    def reach(self, at: float) -> None:
        self.now = at

    def later(self, at: float) -> Any:
        """What returns when the device has ended a step at this time."""
        return functools.partial(self.reach, at)


def times(*edges: Edge) -> dict[tuple[bool, bool], list[float]]:
    failed: list[Exception] = []
    clock = Clock(failed.append)
    for edge in edges:
        clock.pass_edge(edge)
    clock.wait()
    clock.close()
    assert not failed
    return {kind: list(seconds) for kind, seconds in clock.seconds.items()}


def test_a_loop_that_waits_for_each_step_is_timed_by_its_own_thread() -> None:
    """Plain steps of 1 s, a measured one of 3 s."""
    found = times(
        Edge(10.0, None, 1, MEASURED), Edge(14.0, None, 4, PLAIN), Edge(17.0, None, 1, MEASURED)
    )
    assert found == {PLAIN: [1.0], MEASURED: [3.0]}


def test_a_loop_that_never_waits_is_timed_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread starts the same steps within 10 ms."""
    after = Device(monkeypatch).later
    found = times(
        Edge(0.001, after(10.0), 1, MEASURED),
        Edge(0.005, after(14.0), 4, PLAIN),
        Edge(0.006, after(17.0), 1, MEASURED),
        Edge(0.010, after(21.0), 4, PLAIN),
    )
    assert found == {PLAIN: [1.0, 1.0], MEASURED: [3.0]}


def test_a_step_that_ends_behind_an_end_of_unknown_time_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    after = Device(monkeypatch).later
    found = times(
        Edge(0.001, after(10.0), 1, MEASURED),
        Edge(0.005, None, 4, PLAIN),  # nothing of the device is known here, and it is behind
        Edge(0.006, after(17.0), 1, MEASURED),
        Edge(0.010, after(21.0), 4, PLAIN),
    )
    assert found == {PLAIN: [1.0]}


def test_steps_that_differ_are_not_counted_but_end_where_the_next_begin() -> None:
    found = times(
        Edge(10.0, None, 1, MEASURED), Edge(50.0, None, 9, None), Edge(53.0, None, 1, MEASURED)
    )
    assert found == {MEASURED: [3.0]}


def test_the_newest_times_are_kept() -> None:
    edges = [Edge(float(n * n), None, 1, MEASURED) for n in range(RECENT + 3)]
    (found,) = times(*edges).values()
    assert found == [2.0 * n + 1 for n in range(2, RECENT + 2)]


def test_the_loop_is_not_held_up() -> None:
    may_end, clock = threading.Event(), Clock(pytest.fail)
    clock.pass_edge(Edge(0.0, may_end.wait, 1, MEASURED))
    clock.pass_edge(Edge(0.0, may_end.wait, 1, MEASURED))
    assert not clock.seconds
    may_end.set()
    clock.wait()
    assert list(clock.seconds) == [MEASURED]
    clock.close()


def test_a_failure_is_told() -> None:
    def fail() -> None:
        raise OSError("no such device")

    failed: list[Exception] = []
    clock = Clock(failed.append)
    clock.pass_edge(Edge(0.0, fail, 1, MEASURED))
    clock.wait()
    assert [str(error) for error in failed] == ["no such device"]
