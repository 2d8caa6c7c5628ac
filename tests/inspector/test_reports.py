"""Watched loops that write to a tracker: all of it, in order, whatever the tracker does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from fake_trackers import SummaryWriter
from flax import nnx
from inside import inside
from real_trackers import Net, X, train_step

import nnx_inspector as nni
from nnx_inspector import background
from nnx_inspector.trackers.scalars import PassReader

IN_TIME = 120.0
STEPS = 7


class Run:
    """One way to watch a loop of STEPS steps, every second of which is measured."""

    def __init__(self, way: str):
        self.way, self.model = way, Net()
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.05), wrt=nnx.Param)
        self.insp: nni.Inspector | None = None
        self.losses: list[float] = []

    def recorded(
        self, to: Any, within: Callable[[int], object] = lambda step: None
    ) -> nni.Recording:
        if self.way == "nni.watch":
            with nni.watch(self.model, every=2, to=to) as recording:
                for step in range(STEPS):
                    self._step()
                    recording.add_metrics(step, {"loss": self.losses[-1]})
                    within(step)
            return recording
        self.insp = insp = nni.Inspector(self.model, X, display=False)
        if self.way == "batches":
            for step, _ in enumerate(insp.watch([X] * STEPS, every=2, to=to)):
                self._step()
                insp.metrics(loss=self.losses[-1])
                within(step)
        else:
            with insp.watch(every=2, to=to):
                for step in range(STEPS):
                    if self.way == "ticks":
                        insp.tick()
                    self._step()
                    insp.metrics(loss=self.losses[-1])
                    within(step)
        return insp.recording

    def _step(self) -> None:
        self.losses.append(float(train_step(self.model, self.optimizer, X)))


WAYS = "nni.watch", "batches", "region", "ticks"


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    run = Run(request.param)
    yield run
    if run.insp is not None:
        run.insp.close()


every_way = pytest.mark.parametrize("run", WAYS, indirect=True)
both = pytest.mark.parametrize("run", ["nni.watch", "batches"], indirect=True)
"""With an inspector and without one."""


@every_way
def test_all_that_is_recorded_is_written_in_order_when_the_loop_has_ended(run: Run) -> None:
    to, threads = SummaryWriter(), set(threading.enumerate())
    recording = run.recorded(to)
    expected: dict[str, list[tuple[int, float]]] = {}
    reader, passes = PassReader(), [one for one in recording.passes if one.kind == "watch"]
    assert [one.step for one in passes] == [0, 2, 4, 6]
    for one in passes:
        for group, site, statistic, value in reader.scalars(one):
            name = f"{group}/{site}/{statistic}".replace("(root)", "_root_")
            expected.setdefault(name, []).append((one.step, value))
    expected["metrics/loss"] = [*enumerate(run.losses)]
    cost = to.scalars.pop("nni/tracker/cpu_seconds")
    assert to.scalars == expected
    assert {"outputs/encoder/std", "gradients/head/norm", "parameters/head/kernel/update_ratio"} < {
        *to.scalars
    }
    assert [step for step, _ in cost] == [2, 4, 6]
    assert all(value > 0 for _, value in cost)
    assert [step for step, _ in to.histograms["outputs/encoder/histogram"]] == [0, 2, 4, 6]
    assert to.flushed == 1
    assert {thread for thread in threading.enumerate() if "subscriber" in thread.name} <= threads
    if run.insp is not None:
        assert inside(run.insp).core.meter.cost["tracker_seconds"] > 0


@both
def test_a_function_gets_each_pass(run: Run) -> None:
    had: list[Any] = []
    recording = run.recorded(had.append)
    assert had == [one for one in recording.passes if one.kind == "watch"]


@both
def test_a_finding_is_written_once_with_its_step(run: Run) -> None:
    run.model.head.kernel[...] = jnp.full((8, 1), 1e30, jnp.float32)  # its square is infinite
    to = SummaryWriter()
    recording = run.recorded(to)
    (found,) = [one for one in nni.diagnose(recording) if one.rule == "metrics"]
    assert (found.step, found.site) == (0, "")
    at = [(title, step) for title, _, step in to.texts]
    assert at.count(("findings/metrics/_root_", 0)) == 1
    assert len({*at}) == len(at)
    wanted = {
        (f"findings/{one.rule}/{one.site or '_root_'}", one.step) for one in nni.diagnose(recording)
    }
    assert wanted <= {*at}


def test_a_finding_on_a_metric_does_not_wait_for_the_next_pass() -> None:
    run, to, had = Run("nni.watch"), SummaryWriter(), threading.Event()
    tell = to.add_text

    def add_text(*args: Any) -> None:
        tell(*args)
        had.set()

    to.add_text = add_text  # type: ignore[method-assign]
    with nni.watch(run.model, every=100, to=to) as recording:
        run._step()
        recording.add_metrics(7, {"loss": float("nan")})
        assert had.wait(IN_TIME), "no pass comes any more"
    assert [(title, step) for title, _, step in to.texts] == [("findings/metrics/_root_", 7)]


class Broken(SummaryWriter):
    """Raises from some step on."""

    def __init__(self, since: int, error: Exception):
        super().__init__()
        self._since, self._error = since, error

    def add_scalar(self, *args: Any) -> None:
        if args[2] >= self._since:
            raise self._error
        super().add_scalar(*args)


@pytest.mark.parametrize(("run", "since"), [("nni.watch", 0), ("batches", 3)], indirect=["run"])
def test_a_writer_that_raises_is_warned_of_once_and_the_recording_keeps_all(
    run: Run, since: int
) -> None:
    to = Broken(since, ValueError("I/O operation on closed file"))
    alone = Run("nni.watch")
    alone.recorded(None)
    with pytest.warns(nni.InspectorWarning) as caught:
        recording = run.recorded(to)
    (said,) = [str(one.message) for one in caught]
    assert said == (
        f"The Broken of {Broken.__module__} raised ValueError: I/O operation on closed file when "
        f"it was given step {since}. What raises is left out there; the recording has all of it, "
        f"and the loop goes on."
    )
    assert run.losses == alone.losses
    assert [one.step for one in recording.passes if one.kind == "watch"] == [0, 2, 4, 6]
    assert [*recording.curves()["loss"][:, 0]] == [*range(STEPS)]
    before = [(step, loss) for step, loss in enumerate(run.losses) if step < since]
    assert to.scalars.get("metrics/loss", []) == before


@both
def test_a_writer_that_blocks_holds_up_no_step_and_is_not_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "SILENT_SECONDS", 0.05)
    gate, threads = threading.Event(), []

    def blocks(one: Any) -> None:
        threads.append(threading.current_thread())
        assert gate.wait(IN_TIME)

    with pytest.warns(nni.InspectorWarning, match="blocks has not returned from step 0 for 0.05"):
        recording = run.recorded(blocks)
    assert len(run.losses) == STEPS
    assert [one.step for one in recording.passes if one.kind == "watch"] == [0, 2, 4, 6]
    gate.set()
    threads[0].join()
    assert len(threads) == 1


@every_way
def test_a_loop_that_an_error_leaves_has_written_what_it_recorded(run: Run) -> None:
    to = SummaryWriter()

    def fails(step: int) -> None:
        if step == 5:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run.recorded(to, fails)
    if run.way == "batches":  # a for loop closes its generator when that is collected
        assert run.insp is not None
        run.insp.close()
    else:
        assert [step for step, _ in to.scalars["outputs/encoder/mean"]] == [0, 2, 4]
        assert [step for step, _ in to.scalars["metrics/loss"]] == [*range(6)]
        assert to.flushed == 1


def test_an_inspector_that_is_closed_in_its_loop_writes_what_there_was() -> None:
    run, to = Run("batches"), SummaryWriter()
    run.recorded(to, lambda step: run.insp.close() if step == 3 and run.insp else None)
    assert [step for step, _ in to.scalars["outputs/encoder/mean"]] == [0, 2]
    assert len(run.losses) == STEPS


def test_the_next_loop_writes_to_its_own_tracker_or_to_none() -> None:
    run, one, two = Run("batches"), SummaryWriter(), SummaryWriter()
    run.recorded(one)
    insp = run.insp
    assert insp is not None
    for to in (None, two):
        for _ in insp.watch([X] * 3, every=2, to=to):
            run._step()
    assert [step for step, _ in one.scalars["outputs/encoder/mean"]] == [0, 2, 4, 6]
    steps = [p.step for p in insp.recording.passes if p.kind == "watch"]
    assert steps == [0, 2, 4, 6, 8, 10, 12]
    assert [step for step, _ in two.scalars["outputs/encoder/mean"]] == [
        s for s in steps if s >= 10
    ]
    insp.close()


def test_what_is_no_tracker_is_refused_before_anything_begins(inspect) -> None:
    model = Net()
    insp = inspect(model, X)
    with pytest.raises(TypeError, match="to takes a SummaryWriter"):
        insp.watch([X], to=3)
    with pytest.raises(TypeError, match="to takes a SummaryWriter"), nni.watch(model, to="runs"):
        raise AssertionError


def test_what_a_tracker_does_not_take_is_said_on_screen() -> None:
    class Scalars:
        def add_scalar(self, *args: Any) -> None: ...

    run = Run("batches")
    run.recorded(Scalars())
    assert run.insp is not None
    notices = inside(run.insp).notices
    assert any("takes no histograms (add_histogram_raw)" in text for text in notices)
    run.insp.close()


@pytest.mark.parametrize("alone", [True, False])
def test_in_a_job_process_0_writes(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    had: list[Any] = []
    monkeypatch.setattr(jax, "process_index", lambda *_: 1)
    run = Run("nni.watch" if alone else "batches")
    warns = pytest.warns(nni.InspectorWarning, match="and nothing to a tracker, because process 0")
    with warns if alone else nullcontext():
        recording = run.recorded(had.append)
    watched = [one for one in recording.passes if one.kind == "watch"]
    # an inspector whose model lies in this process alone is as if there were no others
    assert had == ([] if alone else watched)
    if run.insp is not None:
        run.insp.close()
