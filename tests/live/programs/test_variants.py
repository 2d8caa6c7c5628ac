"""A region runs the user's own program where nothing is measured, and counts its passes."""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside
from jax._src import callback

import nnx_inspector as nni
from nnx_inspector.inspector.script.watch import _Recorder  # what a loop without an inspector has
from nnx_inspector.live.inbox import Inbox
from nnx_inspector.live.session import Session
from nnx_inspector.live.steps import Region
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.summary import Summary


@pytest.fixture(name="asks")
def _asks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each pass that was begun, and not passed over."""
    asked: list[int] = []
    begin = Inbox.begin

    def noted(self: Any, *about: Any, **how: Any) -> Any:
        asked.append(self.count)
        return begin(self, *about, **how)

    monkeypatch.setattr(Inbox, "begin", noted)
    return asked


class Net(nnx.Module):
    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.float32(2.0))
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * self.scale


def once(model: Net, x: jax.Array) -> jax.Array:
    return model(x)


def twice(model: Net, x: jax.Array) -> jax.Array:
    return model(x) + model(x + 0.5)


def learnt(model: Net, x: jax.Array) -> jax.Array:
    def loss_of(model: Net) -> jax.Array:
        return jax.jit(lambda x: x.sum())(model(x))

    loss, grads = nnx.value_and_grad(loss_of)(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.01 * g, nnx.state(model, nnx.Param), grads))
    return loss


def split_again(model: Net, x: jax.Array) -> jax.Array:
    graphdef, state = nnx.split(model)
    return jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)


def batch(step: int, rows: int = 2) -> jax.Array:
    return jnp.full((rows, 3), float(step))


def mean_of(model: Net, x: jax.Array) -> float:
    kernel, bias = (
        np.asarray(v[...], np.float64) for v in (model.linear.kernel, model.linear.bias)
    )
    return float(((np.asarray(x, np.float64) @ kernel + bias) * float(model.scale[...])).mean())


def at(recording: Recording, step: int) -> Summary:
    """The summary of the model's output in a step."""
    (one,) = [p for p in recording.passes if p.step == step]
    return one.summary("", "output")


def watched(
    model: Net,
    step: Callable[..., Any],
    batches: list[jax.Array],
    every: int,
    *,
    wait_after: int = 2,
) -> tuple[Recording, list[float], Session]:
    """A region around a loop; the means of the model's output before each step, by NumPy."""
    session, recording, means = Session(model), Recording(), list[float]()
    with Region(_Recorder(recording), session, every):
        for number, x in enumerate(batches):
            means.append(mean_of(model, x))
            jax.block_until_ready(step(model, x))
            if number == wait_after:
                session.variants.wait()
    assert not session.errors
    return recording, means, session


@pytest.mark.parametrize("every", [3, 4])
@pytest.mark.parametrize("step", [once, learnt])
def test_passes_between_those_measured_ask_nothing_and_are_counted(
    step: Callable[..., Any], every: int, asks: list[int]
):
    recording, means, session = watched(Net(), nnx.jit(step), list(map(batch, range(12))), every)
    measured = list(range(0, 12, every))
    assert [one.step for one in recording.passes] == measured
    for one in measured:
        found = at(recording, one)
        assert found.mean == pytest.approx(means[one], rel=1e-5), one
    assert session.inbox.count == 12
    assert len(asks) == len({0, 1, 2, *measured}), "0 to 2 are before the bare program is there"


def test_a_program_of_two_passes_runs_bare_if_neither_is_measured(asks: list[int]):
    recording, means, session = watched(Net(), nnx.jit(twice), list(map(batch, range(9))), 5)
    assert [one.step for one in recording.passes] == [0, 5, 10, 15]
    assert session.inbox.count == 18
    assert at(recording, 10).mean == pytest.approx(means[5], rel=1e-5)
    model = Net()  # as before any step: nothing is trained
    assert at(recording, 15).mean == pytest.approx(mean_of(model, batch(7) + 0.5), rel=1e-5)
    assert len(asks) == 2 * len({0, 1, 2, 5, 7})


def test_other_shapes_and_other_functions_take_turns(asks: list[int]):
    model, first, second = Net(), nnx.jit(once), nnx.jit(learnt)
    steps = [first, second] * 8
    shapes = [2, 2, 5, 5] * 4

    def step(model: Net, x: jax.Array, *, count: list[int] = [0]) -> Any:  # noqa: B006
        count[0] += 1
        return steps[count[0] - 1](model, x)

    batches = [batch(n, rows) for n, rows in enumerate(shapes)]
    recording, means, _ = watched(model, step, batches, 3, wait_after=7)
    assert [one.step for one in recording.passes] == [0, 3, 6, 9, 12, 15]
    for one in recording.passes:
        found = at(recording, one.step)
        assert found.size == 3 * shapes[one.step]
        assert found.mean == pytest.approx(means[one.step], rel=1e-5)
    assert len(asks) <= 8 + len([9, 12, 15]), "a program may be compiled before step 7"


def test_a_perturbation_acts_in_the_next_call_and_leaves_nothing(asks: list[int]):
    model, step = Net(), nnx.jit(once)
    clean = np.asarray(step(model, batch(1)))
    insp = nni.Inspector(model, batch(1), display=False)
    out: list[np.ndarray] = []
    with insp.watch(every=100):
        for number in range(12):
            if number == 5:
                handle = insp.perturb("linear", nni.Zero())
            if number == 8:
                handle.remove()
            out.append(np.asarray(step(model, batch(1))))
            if number == 2:
                inside(insp).session.variants.wait()
    assert [bool(np.all(x == 0)) for x in out] == [5 <= n < 8 for n in range(12)]
    for n in (*range(5), *range(8, 12)):
        np.testing.assert_array_equal(out[n], clean)
    assert len(asks) < 9, "the steps 3, 4 and 8 to 11 ran bare"
    insp.close()


def test_a_step_that_fails_between_its_passes_shifts_no_number():
    model, fails = Net(), [False]

    def check(x: np.ndarray) -> np.ndarray:
        if fails[0]:
            raise ValueError("no such batch")
        return x

    @nnx.jit
    def step(model: Net, x: jax.Array) -> jax.Array:
        y = jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), model(x))
        return model(y)

    session, recording = Session(model), Recording()
    with Region(_Recorder(recording), session, 4):
        for number in range(8):
            fails[0] = number == 2
            with pytest.raises(Exception, match="no such batch") if fails[0] else nullcontext():
                jax.block_until_ready(step(model, batch(number)))
            session.variants.wait()
    assert session.inbox.count == 16
    for number in (0, 4, 6):
        found = at(recording, 2 * number)
        assert found.mean == pytest.approx(mean_of(model, batch(number)), rel=1e-5)


def test_each_iteration_of_a_scan_is_a_pass():
    model = Net()

    @nnx.jit
    def steps(model: Net, xs: jax.Array) -> jax.Array:
        return nnx.scan(lambda model, x: model(x), in_axes=(None, 0), out_axes=0)(model, xs)

    one, session, recording = nnx.jit(once), Session(model), Recording()
    with Region(_Recorder(recording), session, 4):
        for number in range(3):
            jax.block_until_ready(one(model, batch(number)))
            session.variants.wait()
            jax.block_until_ready(steps(model, jnp.stack([batch(number)] * 3)))
    assert session.inbox.count == 12
    assert [p.step for p in recording.passes] == [0, 4, 8]


def test_a_call_that_is_only_lowered_is_no_pass():
    model, step = Net(), nnx.jit(once)
    session, recording = Session(model), Recording()
    with Region(_Recorder(recording), session, 2):
        for number in range(6):
            step.lower(model, batch(number))
            jax.eval_shape(lambda x: x + 1, batch(number))
            jax.block_until_ready(step(model, batch(number)))
            session.variants.wait()
    assert session.inbox.count == 6
    assert [p.step for p in recording.passes] == [0, 2, 4]


def test_a_step_of_jax_jit_that_donates_its_state(asks: list[int]):
    model = Net()
    graphdef, state = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: jax.Array) -> Any:
        model = nnx.merge(graphdef, state)
        return nnx.state(model), model(x)

    recording, outputs = Recording(), list[float]()
    session = Session(model)
    with Region(_Recorder(recording), session, 3):
        for number in range(9):
            state, out = step(state, batch(number))
            outputs.append(float(out.mean()))
            if number == 1:
                session.variants.wait()
    assert [p.step for p in recording.passes] == [0, 3, 6]
    for p in recording.passes:
        assert at(recording, p.step).mean == pytest.approx(outputs[p.step], rel=1e-5)
    assert len(asks) == len({0, 1, 3, 6})


@nnx.jit
def moved(model: Net, ema: Net, x: jax.Array) -> jax.Array:
    for tree in (model, ema):
        nnx.update(tree, jax.tree.map(lambda v: v + 0.01, nnx.state(tree)))
    return model(x)


def test_a_twin_that_leaves_a_bare_step_stays_a_twin(asks: list[int]):
    model, ema, outputs = Net(), Net(), list[float]()
    ema.scale[...] = jnp.float32(9.0)
    session, recording, predict = Session(model), Recording(), nnx.jit(once)
    with Region(_Recorder(recording), session, 3):
        for number in range(9):
            outputs.append(float(moved(model, ema, batch(number)).mean()))
            predict(ema, batch(number))
            session.variants.wait()
    assert session.inbox.count == 9, "the twin is not watched"
    assert [p.step for p in recording.passes] == [0, 3, 6]
    for p in recording.passes:
        assert at(recording, p.step).mean == pytest.approx(outputs[p.step], rel=1e-5)
    assert len(asks) == len({0, 1, 3, 6}), "2, 4, 5, 7 and 8 ran bare"


def test_a_pass_is_saved_when_the_next_step_runs_bare(tmp_path: pathlib.Path):
    model, step, file = Net(), nnx.jit(once), tmp_path / "run.nni"
    step(model, batch(0))
    with nni.watch(model, every=4, save=file):
        for number in range(6):
            jax.block_until_ready(step(model, batch(number)))
        limit = time.monotonic() + 60
        while [p.step for p in nni.load(file).passes] != [0, 4]:
            assert time.monotonic() < limit


def test_a_program_that_does_not_compile_alone_goes_on_asking(
    asks: list[int], monkeypatch: pytest.MonkeyPatch
):
    from nnx_inspector.live.programs import variants

    def broken(self: Any, *_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(variants.Noted, "compile", broken)
    model, step, session = Net(), nnx.jit(once), None
    recording = Recording()
    session = Session(model)
    with Region(_Recorder(recording), session, 3):
        for number in range(6):
            jax.block_until_ready(step(model, batch(number)))
            session.variants.wait()
    assert [p.step for p in recording.passes] == [0, 3]
    assert session.errors == ["compiling ahead: RuntimeError: no room"]
    assert len(asks) == 6


def test_a_failure_to_choose_reaches_no_step(monkeypatch: pytest.MonkeyPatch):
    from nnx_inspector.live.programs import variants

    def broken(*_: Any) -> None:
        raise RuntimeError("no such jaxpr")

    monkeypatch.setattr(variants, "Finished", broken)
    model, step, recording = Net(), nnx.jit(once), Recording()
    session = Session(model)
    with Region(_Recorder(recording), session, 2):
        for number in range(5):
            out = step(model, batch(number))
            np.testing.assert_allclose(np.mean(out), mean_of(model, batch(number)), rtol=1e-5)
    assert not recording.passes
    assert session.errors == ["choosing a program: RuntimeError: no such jaxpr"]
    session.close()


def test_a_perturbed_step_that_is_not_measured_tells_the_host_nothing(asks: list[int]):
    model, step = Net(), nnx.jit(learnt)
    insp = nni.Inspector(model, batch(1), display=False)
    insp.perturb("linear", nni.Scale(0.5))
    told: list[int] = []
    with insp.watch(every=4):
        session = inside(insp).session
        assert session is not None
        receive = session.inbox.receive
        monitored = lambda number, *of: (told.append(number), receive(number, *of))  # noqa: E731
        session.inbox.receive = monitored  # pyright: ignore[reportAttributeAccessIssue]
        losses: list[float] = []
        wanted: list[float] = []
        for number in range(10):
            wanted.append(
                1.5 * mean_of(model, batch(number))
            )  # three outputs a row, two rows, halved
            losses.append(float(step(model, batch(number))) / 2)
            session.variants.wait()
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert set(told) == {0, 4, 8}
    assert [p.step for p in insp.recording.passes if p.kind == "watch"] == [0, 4, 8]
    insp.close()


def test_no_program_calls_the_host_while_it_runs(monkeypatch: pytest.MonkeyPatch):
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a program with a call of the host is made")

    monkeypatch.setattr(callback, "emit_python_callback", never)
    model, step, recording = Net(), nnx.jit(learnt), Recording()
    session = Session(model)
    with Region(_Recorder(recording), session, 2):
        wanted = []
        for number in range(5):
            wanted.append(mean_of(model, batch(number)))
            step(model, batch(number))
    session.close()
    measured = [one for one in recording.passes if one.step % 2 == 0]
    assert [one.step for one in measured] == [0, 2, 4]
    means = [recording.summary("", index=i).mean for i in range(3)]
    np.testing.assert_allclose(means, wanted[::2], rtol=1e-5)
    assert recording.summary("", "gradient").mean == pytest.approx(1.0)
    assert not session.errors


def test_a_program_that_fails_loses_its_own_pass_alone():
    model, recording = Net(), Recording()

    def check(x: np.ndarray) -> np.ndarray:
        if x.max() == 2:
            raise ValueError("two is too much")
        return x

    @jax.jit
    def step(x: jax.Array) -> jax.Array:  # it writes no result of the failure to the model
        return model(jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x))

    session = Session(model)
    with Region(_Recorder(recording), session, 1):
        for number in range(4):
            fails = pytest.raises((ValueError, RuntimeError), match="two is too much")
            with fails if number == 2 else nullcontext():
                jax.block_until_ready(step(batch(number)))
    session.close()
    assert [one.step for one in recording.passes] == [0, 1, 3]
    assert not session.errors
