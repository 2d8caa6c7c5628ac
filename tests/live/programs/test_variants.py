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
from watched_region import Net, WatchedRegion, batch, mean_of, once, twice

import nnx_inspector as nni
from nnx_inspector.live.inbox import Inbox


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


def learnt(model: Net, x: jax.Array) -> jax.Array:
    def loss_of(model: Net) -> jax.Array:
        return jax.jit(lambda x: x.sum())(model(x))

    loss, grads = nnx.value_and_grad(loss_of)(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.01 * g, nnx.state(model, nnx.Param), grads))
    return loss


def split_again(model: Net, x: jax.Array) -> jax.Array:
    graphdef, state = nnx.split(model)
    return jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)


def watched(
    model: Net,
    step: Callable[..., Any],
    batches: list[jax.Array],
    every: int,
    *,
    wait_after: int = 1,
) -> tuple[WatchedRegion, list[float]]:
    """A region around a loop; the means of the model's output before each step, by NumPy."""
    means = list[float]()
    with WatchedRegion(model, every) as region:
        for number, x in enumerate(batches):
            means.append(mean_of(model, x))
            region.run(step, model, x, wait=number == wait_after)
    assert not region.session.errors
    return region, means


@pytest.mark.parametrize("every", [3, 4])
@pytest.mark.parametrize("step", [once, learnt])
def test_passes_between_those_measured_ask_nothing_and_are_counted(
    step: Callable[..., Any], every: int, asks: list[int]
):
    region, means = watched(Net(), nnx.jit(step), list(map(batch, range(12))), every)
    measured = list(range(0, 12, every))
    region.check({one: means[one] for one in measured})
    assert region.session.inbox.count == 12
    assert len(asks) == len({0, 1, *measured}), "0 and 1 are before the bare program is there"


def test_a_program_of_two_passes_runs_bare_if_neither_is_measured(asks: list[int]):
    region, _ = watched(Net(), nnx.jit(twice), list(map(batch, range(9))), 5)
    model = Net()  # as before any step: nothing is trained
    inputs = {0: batch(0), 5: batch(2) + 0.5, 10: batch(5), 15: batch(7) + 0.5}
    region.check({number: mean_of(model, x) for number, x in inputs.items()})
    assert region.session.inbox.count == 18
    assert len(asks) == 2 * len({0, 1, 2, 5, 7})


def test_other_shapes_and_other_functions_take_turns(asks: list[int]):
    model, first, second = Net(), nnx.jit(once), nnx.jit(learnt)
    steps = [first, second] * 8
    shapes = [2, 2, 5, 5] * 4

    def step(model: Net, x: jax.Array, *, count: list[int] = [0]) -> Any:  # noqa: B006
        count[0] += 1
        return steps[count[0] - 1](model, x)

    batches = [batch(n, rows) for n, rows in enumerate(shapes)]
    region, means = watched(model, step, batches, 3, wait_after=7)
    region.check({number: means[number] for number in range(0, 16, 3)})
    for one in region.recording.passes:
        found = one.summary("")
        assert found is not None
        assert found.size == 3 * shapes[one.step]
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

    with WatchedRegion(model, 4) as region:
        for number in range(8):
            fails[0] = number == 2
            with pytest.raises(Exception, match="no such batch") if fails[0] else nullcontext():
                region.run(step, model, batch(number))
            region.session.variants.wait()
    assert region.session.inbox.count == 16
    found = region.means()
    for number in (0, 4, 6):
        assert found[2 * number] == pytest.approx(mean_of(model, batch(number)), rel=1e-5)


def test_each_iteration_of_a_scan_is_a_pass():
    model = Net()

    @nnx.jit
    def steps(model: Net, xs: jax.Array) -> jax.Array:
        return nnx.scan(lambda model, x: model(x), in_axes=(None, 0), out_axes=0)(model, xs)

    one = nnx.jit(once)
    with WatchedRegion(model, 4) as region:
        for number in range(3):
            region.run(one, model, batch(number))
            region.run(steps, model, jnp.stack([batch(number)] * 3), wait=False)
    assert region.session.inbox.count == 12
    assert region.steps == [0, 4, 8]


def test_a_call_that_is_only_lowered_is_no_pass():
    model, step = Net(), nnx.jit(once)
    with WatchedRegion(model, 2) as region:
        for number in range(6):
            step.lower(model, batch(number))
            jax.eval_shape(lambda x: x + 1, batch(number))
            region.run(step, model, batch(number))
    assert region.session.inbox.count == 6
    assert region.steps == [0, 2, 4]


def test_a_step_of_jax_jit_that_donates_its_state(asks: list[int]):
    model = Net()
    graphdef, state = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: jax.Array) -> Any:
        model = nnx.merge(graphdef, state)
        return nnx.state(model), model(x)

    outputs = list[float]()
    with WatchedRegion(model, 3) as region:
        for number in range(9):
            state, out = region.run(step, state, batch(number), wait=number == 1)
            outputs.append(float(out.mean()))
    region.check({number: outputs[number] for number in (0, 3, 6)})
    assert len(asks) == len({0, 1, 3, 6})


@nnx.jit
def moved(model: Net, ema: Net, x: jax.Array) -> jax.Array:
    for tree in (model, ema):
        nnx.update(tree, jax.tree.map(lambda v: v + 0.01, nnx.state(tree)))
    return model(x)


def test_a_twin_that_leaves_a_bare_step_stays_a_twin(asks: list[int]):
    model, ema, outputs = Net(), Net(), list[float]()
    ema.scale[...] = jnp.float32(9.0)
    predict = nnx.jit(once)
    with WatchedRegion(model, 3) as region:
        for number in range(9):
            outputs.append(float(moved(model, ema, batch(number)).mean()))
            region.run(predict, ema, batch(number))
    assert region.session.inbox.count == 9, "the twin is not watched"
    region.check({number: outputs[number] for number in (0, 3, 6)})
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

    monkeypatch.setattr(variants.LoggedCall, "compile", broken)
    model, step = Net(), nnx.jit(once)
    with WatchedRegion(model, 3) as region:
        for number in range(6):
            region.run(step, model, batch(number))
    assert region.steps == [0, 3]
    assert region.session.errors == ["compiling ahead: RuntimeError: no room"]
    assert len(asks) == 6


def test_a_failure_to_choose_reaches_no_step(monkeypatch: pytest.MonkeyPatch):
    from nnx_inspector.live.programs import variants

    def broken(*_: Any) -> None:
        raise RuntimeError("no such jaxpr")

    monkeypatch.setattr(variants, "TracedProgram", broken)
    model, step = Net(), nnx.jit(once)
    with WatchedRegion(model, 2) as region:
        for number in range(5):
            out = region.run(step, model, batch(number), wait=False)
            np.testing.assert_allclose(np.mean(out), mean_of(model, batch(number)), rtol=1e-5)
    assert not region.recording.passes
    assert region.session.errors == ["choosing a program: RuntimeError: no such jaxpr"]


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
    batches = list(map(batch, range(5)))
    region, means = watched(Net(), nnx.jit(learnt), batches, 2, wait_after=-1)
    region.check({number: means[number] for number in (0, 2, 4)})
    gradient = region.recording.summary("", "gradient")
    assert gradient is not None
    assert gradient.mean == pytest.approx(1.0)


def test_a_program_that_fails_loses_its_own_pass_alone():
    model = Net()

    def check(x: np.ndarray) -> np.ndarray:
        if x.max() == 2:
            raise ValueError("two is too much")
        return x

    @jax.jit
    def step(x: jax.Array) -> jax.Array:  # it writes no result of the failure to the model
        return model(jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x))

    with WatchedRegion(model, 1) as region:
        for number in range(4):
            fails = pytest.raises((ValueError, RuntimeError), match="two is too much")
            with fails if number == 2 else nullcontext():
                region.run(step, batch(number), wait=False)
    region.check({number: mean_of(model, batch(number)) for number in (0, 1, 3)})
