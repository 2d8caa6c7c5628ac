"""Traces: those of a CPU made here, and constructed ones with the fields of a GPU's.

No GPU is here. The constructed ones have the planes, lines and statistics that XLA's profiler
documents for one: a plane for each device, a line for each stream, `hlo_op` and `hlo_module`.
"""

from __future__ import annotations

import pathlib
import random
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import nnx_inspector as nni
from nnx_inspector.profiling.traces import (
    RUN_EVENT,
    Event,
    ProgramKey,
    record_trace,
    runs_in,
    time_shares,
)


def event(name: str, start: float, duration: float, **stats: Any) -> Any:
    return SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=stats.items())


def kernel(op: str, start: float, duration: float, module: str = "jit_step") -> Any:
    return event(f"kernel of {op}", start, duration, hlo_op=op, hlo_module=module, device_id=0)


def plane(name: str, **lines: list[Any]) -> Any:
    lines = {name.replace("_", " "): events for name, events in lines.items()}
    return SimpleNamespace(
        name=name, lines=[SimpleNamespace(name=n, events=e) for n, e in lines.items()]
    )


def data(*planes: Any) -> Any:
    return SimpleNamespace(planes=planes)


STEP = ProgramKey("jit_step", None)
HOST = plane("/host:CPU", python=[event(RUN_EVENT, 100, 100), event("other", 0, 500)])


def test_kernels_of_two_streams_are_read_and_what_the_host_starts_is_not():
    started = plane("/host:CPU", python=[kernel("dot.1", 101, 2), event(RUN_EVENT, 100, 100)])
    device = plane(
        "/device:GPU:0",
        Stream_7=[kernel("dot.1", 110, 40), kernel("add.2", 150, 10)],
        Stream_9=[kernel("copy.3", 140, 20)],
    )
    (run,) = runs_in(data(started, device))
    found, idle = time_shares(run.events, run.start, run.end)
    assert found == {
        (STEP, "dot.1"): 35,
        (STEP, "add.2"): 5,
        (STEP, "copy.3"): 10,
    }
    assert idle == 50


def test_lines_that_sum_up_others_do_not_count_twice():
    device = plane(
        "/device:TPU:0",
        XLA_Modules=[kernel("dot.1", 100, 100)],
        XLA_Ops=[kernel("dot.1", 110, 40)],
        Steps=[kernel("dot.1", 100, 100)],
    )
    (run,) = runs_in(data(HOST, device))
    assert [(e.start, e.end) for e in run.events] == [(110, 150)]


def test_each_run_has_the_operations_within_it():
    host = plane("/host:CPU", python=[event(RUN_EVENT, 0, 10), event(RUN_EVENT, 20, 10)])
    pool = plane("/host:CPU", pool=[kernel("a", 1, 2), kernel("b", 21, 2), kernel("c", 12, 2)])
    first, second = runs_in(data(host, pool))
    assert [e.key for e in first.events] == [(STEP, "a")]
    assert [e.key for e in second.events] == [(STEP, "b")]


def test_a_program_with_its_number_is_known_by_its_name():
    pool = plane("/host:CPU", pool=[kernel("a", 101, 2, module="jit_step(12345)")])
    (run,) = runs_in(data(HOST, pool))
    assert [e.key for e in run.events] == [(STEP, "a")]


def test_loops_and_calls_may_wait():
    pool = plane("/host:CPU", pool=[kernel(op, 101, 2) for op in ("while.3", "call", "while_dot")])
    (run,) = runs_in(data(HOST, pool))
    assert [e.waits for e in run.events] == [True, True, False]


@pytest.mark.parametrize("planes", [(), (HOST,)])
def test_a_trace_without_operations_says_so(planes: tuple[Any, ...]):
    with pytest.raises(nni.InspectorError, match="no events of operations"):
        runs_in(data(*planes))


def test_a_trace_made_here_has_the_operations_of_each_run():
    f = jax.jit(lambda x: jnp.tanh(x @ x).sum())
    x = jnp.ones((64, 64))
    f(x).block_until_ready()

    def run() -> None:
        with jax.profiler.TraceAnnotation(RUN_EVENT):
            f(x).block_until_ready()

    runs = runs_in(record_trace(run, times=3, folder=None))
    assert len(runs) == 3
    for one in runs:
        assert {program.name for program, _ in (e.key for e in one.events)} == {"jit__lambda"}  # type: ignore[misc]
        found, idle = time_shares(one.events, one.start, one.end)
        assert sum(found.values()) + idle == pytest.approx(one.end - one.start)


def test_a_trace_that_runs_already_is_named_and_goes_on(tmp_path: pathlib.Path):
    with jax.profiler.trace(str(tmp_path)):
        with pytest.raises(nni.InspectorError, match="End the other trace"):
            record_trace(lambda: None, times=1, folder=None)
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_an_error_within_ends_the_trace_and_deletes_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record_trace(fail, times=1, folder=None)
    assert list(tmp_path.iterdir()) == []
    record_trace(lambda: None, times=1, folder=None)  # another one can begin
    assert list(tmp_path.iterdir()) == []


def test_a_folder_keeps_the_trace_for_other_tools(tmp_path: pathlib.Path):
    record_trace(lambda: None, times=1, folder=str(tmp_path))
    assert list(tmp_path.rglob("*.xplane.pb"))


# ----------------------------------------------------- shares of the time, worked out by hand


def test_gaps_are_idle_and_all_adds_up_to_the_whole():
    found, idle = time_shares([Event(10, 30, "a"), Event(50, 60, "b")], 0, 100)
    assert found == {"a": 20, "b": 10}
    assert idle == 70


def test_operations_on_two_threads_share_the_time_in_which_both_run():
    found, idle = time_shares([Event(0, 10, "a"), Event(5, 15, "b")], 0, 20)
    assert found == {"a": 7.5, "b": 7.5}
    assert idle == 5


def test_three_threads_of_one_operation_are_wall_time_and_not_its_threefold():
    found, _ = time_shares([Event(0, 10, "dot")] * 3, 0, 10)
    assert found == {"dot": 10}


def test_a_loop_that_waits_for_its_body_on_another_thread_has_only_what_remains():
    events = [Event(0, 100, "while", waits=True), Event(10, 90, "dot")]
    found, idle = time_shares(events, 0, 100)
    assert found == {"while": 20, "dot": 80}
    assert idle == 0


def test_what_begins_before_or_ends_after_counts_within_only():
    found, idle = time_shares([Event(-5, 5, "a"), Event(95, 200, "b")], 0, 100)
    assert found == {"a": 5, "b": 5}
    assert idle == 90


def test_nothing_is_idle_time():
    assert time_shares([], 3, 8) == ({}, 5)


@pytest.mark.parametrize("seed", range(20))
def test_shares_equal_those_counted_moment_by_moment(seed: int):
    draw = random.Random(seed)
    events: list[Event] = []
    for _ in range(draw.randint(0, 12)):
        start, waits = draw.randint(0, 40), draw.random() < 0.3
        key = draw.choice("abcd") + "w" * waits
        events.append(Event(start, start + draw.randint(1, 20), key, waits=waits))
    found, idle = time_shares(events, 0, 50)
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
