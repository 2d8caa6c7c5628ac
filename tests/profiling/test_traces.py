"""Traces: those of a CPU made here, and constructed ones with the fields of a GPU's.

No GPU is here. The constructed ones have the planes, lines and statistics that XLA's profiler
documents for one: a plane for each device, a line for each stream, `hlo_op` and `hlo_module`.
"""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import nnx_inspector as nni
from nnx_inspector.profiling.traces import RUN, Started, record, runs_in, shares


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


STEP = Started("jit_step", None)
HOST = plane("/host:CPU", python=[event(RUN, 100, 100), event("other", 0, 500)])


def test_kernels_of_two_streams_are_read_and_what_the_host_starts_is_not():
    started = plane("/host:CPU", python=[kernel("dot.1", 101, 2), event(RUN, 100, 100)])
    device = plane(
        "/device:GPU:0",
        Stream_7=[kernel("dot.1", 110, 40), kernel("add.2", 150, 10)],
        Stream_9=[kernel("copy.3", 140, 20)],
    )
    (run,) = runs_in(data(started, device))
    found, idle = shares(run.events, run.start, run.end)
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
    host = plane("/host:CPU", python=[event(RUN, 0, 10), event(RUN, 20, 10)])
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
        with jax.profiler.TraceAnnotation(RUN):
            f(x).block_until_ready()

    runs = runs_in(record(run, times=3, folder=None))
    assert len(runs) == 3
    for one in runs:
        assert {program.name for program, _ in (e.key for e in one.events)} == {"jit__lambda"}  # type: ignore[misc]
        found, idle = shares(one.events, one.start, one.end)
        assert sum(found.values()) + idle == pytest.approx(one.end - one.start)


def test_a_trace_that_runs_already_is_named_and_goes_on(tmp_path: pathlib.Path):
    with jax.profiler.trace(str(tmp_path)):
        with pytest.raises(nni.InspectorError, match="End the other trace"):
            record(lambda: None, times=1, folder=None)
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_an_error_within_ends_the_trace_and_deletes_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record(fail, times=1, folder=None)
    assert list(tmp_path.iterdir()) == []
    record(lambda: None, times=1, folder=None)  # another one can begin
    assert list(tmp_path.iterdir()) == []


def test_a_folder_keeps_the_trace_for_other_tools(tmp_path: pathlib.Path):
    record(lambda: None, times=1, folder=str(tmp_path))
    assert list(tmp_path.rglob("*.xplane.pb"))
