"""A step is measured and perturbed as it was when it began, however far the device is behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocking import Blocking
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.live.steps import check_every

WIDTH = 256


class Chain(nnx.Module):
    """Enough work that a step returns before it has run."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jnp.tanh(x @ x)
        return self.inner(x)


@nnx.jit
def forward(model: Chain, x: jax.Array, scale: Any) -> jax.Array:
    return model(x) * scale


def batches(count: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32) for _ in range(count)]


def test_switching_between_steps_acts_on_later_steps_alone() -> None:
    model, xs = Chain(nnx.Rngs(0)), batches(12)
    clean = [forward(model, x, 1.0) for x in xs]
    insp = nni.Inspector(model, xs[0], display=False)
    off = insp.perturb("inner", nni.Zero())
    off.enabled = False
    found, perturbed = [], []
    for i, x in enumerate(insp.watch(xs, every=5)):
        perturbed.append(off.enabled)
        found.append(forward(model, x, 1.0))
        off.enabled = i % 3 == 0  # from the next step on
    for y, expected, zero in zip(found, clean, perturbed, strict=True):
        np.testing.assert_allclose(y, expected * (not zero), rtol=1e-5, atol=1e-6)


def test_only_the_steps_that_are_due_are_recorded() -> None:
    """Between them, perturbed steps run that have not begun when the next is due."""
    model, xs = Chain(nnx.Rngs(0)), batches(11)
    expected = [float(np.mean(0.5 * np.asarray(forward(model, x, 1.0)))) for x in xs]
    insp = nni.Inspector(model, xs[0], display=False)
    insp.perturb("inner", nni.Scale(0.5))
    for x in insp.watch(xs, every=5):
        forward(model, x, 1.0)
    passes = [one for one in insp.recording.passes if one.kind == "watch"]
    assert [one.step for one in passes] == [0, 5, 10]
    for one in passes:
        output = one.summary("inner").mean
        np.testing.assert_allclose(output, expected[one.step], rtol=1e-4, atol=1e-6)


def test_switching_in_a_region_acts_on_later_passes_alone() -> None:
    model, xs = Chain(nnx.Rngs(0)), batches(8)
    clean = [forward(model, x, 1.0) for x in xs]
    insp = nni.Inspector(model, xs[0], display=False)
    off = insp.perturb("inner", nni.Zero())
    found = []
    with insp.watch(every=3):
        for i, x in enumerate(xs):
            off.enabled = i % 2 == 0
            found.append(forward(model, x, 1.0))
    for i, (y, expected) in enumerate(zip(found, clean, strict=True)):
        np.testing.assert_allclose(y, expected * (i % 2), rtol=1e-5, atol=1e-6)


@nnx.jit
def asking(model: Chain, x: jax.Array, scale: Any) -> jax.Array:
    """A program that waits for the host."""
    y = model(x)
    zero = jax.pure_callback(lambda _: np.float32(0), jax.ShapeDtypeStruct((), jnp.float32), y)
    return y * scale + zero


@pytest.mark.parametrize(("every", "step"), [(1, forward), (1, asking), (3, forward)])
def test_a_step_is_started_while_the_measured_one_before_runs(every: int, step: Any) -> None:
    held = Blocking()
    held.may_end.clear()
    model, xs = Chain(nnx.Rngs(0)), batches(6)
    insp = nni.Inspector(model, xs[0], display=False)
    found: list[jax.Array] = []
    with ThreadPoolExecutor(1) as another:  # its programs do not hold up those of this thread
        for i, x in enumerate(insp.watch(xs, every=every)):
            given = another.submit(held, x).result() if i == 3 else x
            found.append(step(model, given, 1.0))
            if i == 4:
                assert not found[3].is_ready()
                held.may_end.set()
    passes = [one for one in insp.recording.passes if one.kind == "watch"]
    assert [one.step for one in passes] == list(range(0, 6, every))
    for one in passes:
        summary: Any = one.summary("")
        np.testing.assert_allclose(summary.mean, found[one.step].mean(), rtol=1e-4)


def test_a_metric_that_takes_long_holds_up_no_step() -> None:
    held = Blocking()
    model, xs = Chain(nnx.Rngs(0)), batches(11)
    total = jax.jit(jnp.sum)
    total(held(xs[0])).block_until_ready()
    held.may_end.clear()
    insp = nni.Inspector(model, xs[0], display=False)
    late: list[jax.Array] = []
    with ThreadPoolExecutor(1) as another:
        for i, x in enumerate(insp.watch(xs, every=5)):
            forward(model, x, 1.0).block_until_ready()
            if i == 5:
                late.append(another.submit(lambda x: total(held(x)), x).result())
                insp.metrics(late=late[0])
            if i == 9:
                assert not late[0].is_ready()
                held.may_end.set()
    np.testing.assert_allclose(insp.recording.curves()["late"], [[5, late[0]]], rtol=1e-6)


@pytest.mark.parametrize("every", [1, 2])
def test_each_measured_step_has_its_own_passes(every: int) -> None:
    """Steps call the model twice, not at all, or once, and the device is behind."""
    model, xs = Chain(nnx.Rngs(0)), batches(10)
    insp = nni.Inspector(model, xs[0], display=False)
    expected: dict[int, list[Any]] = {}
    for i, x in enumerate(insp.watch(xs, every=every)):
        calls = [forward(model, x, 1.0 + j) / (1.0 + j) for j in range((2 - i) % 3)]
        insp.metrics(calls=len(calls), last=calls[-1].sum() if calls else 0)
        expected |= {i: calls} if calls and i % every == 0 else {}
    passes = [one for one in insp.recording.passes if one.kind == "watch"]
    assert [one.step for one in passes] == list(expected)
    for one in passes:
        outputs = np.asarray(expected[one.step], np.float64)
        summary: Any = one.summary("")
        assert summary.size == outputs.size
        np.testing.assert_allclose(summary.mean, outputs.mean(), rtol=1e-4)
    curves = insp.recording.curves()
    assert [step for step, _ in curves["last"]] == list(range(10))
    for step, calls in expected.items():
        np.testing.assert_allclose(curves["last"][step][1], np.sum(calls[-1]), rtol=1e-4)


@pytest.mark.parametrize("every", [2, np.int64(2), np.uint8(2), np.array(2)])
def test_every_is_any_whole_number(every: Any) -> None:
    assert check_every(every) == 2
    assert type(check_every(every)) is int


@pytest.mark.parametrize("every", [0, -1, np.int64(0), True, np.bool_(True), 2.0, "2", None])
def test_every_is_nothing_else(every: Any) -> None:
    with pytest.raises(ValueError, match="every must be a number of steps, 1 or more, got"):
        check_every(every)


@pytest.mark.parametrize("ticks", [None, False, True])
def test_a_loop_begins_with_the_step_that_is_given(ticks: bool | None) -> None:
    """An iterator, and a region with and without `tick`; the next loop goes on from there."""
    model, xs = Chain(nnx.Rngs(0)), batches(5)
    insp = nni.Inspector(model, xs[0], display=False)

    def loop(**how: Any) -> None:
        if ticks is None:
            for i, x in enumerate(insp.watch(xs, every=2, **how)):
                forward(model, x, 1.0)
                insp.metrics(loss=i)
            return
        with insp.watch(every=2, **how):
            for x in xs:
                if ticks:
                    insp.tick()
                forward(model, x, 1.0)

    loop(start=80)
    assert [one.step for one in insp.recording.passes if one.kind == "watch"] == [80, 82, 84]
    for one in insp.recording.passes[-3:]:
        y: Any = one.summary("")
        expected = np.asarray(forward(model, xs[one.step - 80], 1.0)).mean()
        np.testing.assert_allclose(y.mean, expected, rtol=1e-4, atol=1e-6)
    if ticks is None:
        assert [step for step, _ in insp.recording.curves()["loss"]] == list(range(80, 85))
    loop()
    newest = [one.step for one in insp.recording.passes if one.kind == "watch"][3:]
    assert newest == ([85, 87, 89] if ticks is False else [86, 88])
    loop(start=0)
    assert [one.step for one in insp.recording.passes if one.kind == "watch"][-3:] == [0, 2, 4]
    insp.close()


@pytest.mark.parametrize("start", [-1, 1.5, True, "3"])
def test_a_start_is_the_number_of_a_step(start: Any) -> None:
    insp = nni.Inspector(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 2)), display=False)
    with pytest.raises(ValueError, match="start must be the number of a step"):
        insp.watch([1], start=start)
    insp.close()


class Numbered:
    """A data set as torch has them: no iterator, and more items than its length says."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> jax.Array:
        return jnp.full((2, 3), float(i))


class Ending:
    """A sequence without a length."""

    def __getitem__(self, i: int) -> jax.Array:
        if i == 3:
            raise IndexError(i)
        return jnp.full((2, 3), float(i))


@pytest.mark.parametrize(
    "data", [Numbered(3), Ending(), [jnp.full((2, 3), float(i)) for i in range(3)]]
)
def test_a_data_set_without_an_iterator_is_watched(data: Any) -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    insp = nni.Inspector(model, jnp.ones((2, 3)), display=False)
    seen = []
    for x in insp.watch(data, every=np.int64(2)):
        seen.append(float(x[0, 0]))
        model(x)
    assert seen == [0.0, 1.0, 2.0]
    assert [one.step for one in insp.recording.passes if one.kind == "watch"] == [0, 2]
    insp.close()


@pytest.mark.parametrize("data", [3, object(), Numbered])
def test_what_has_no_items_is_refused(data: Any) -> None:
    insp = nni.Inspector(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.ones((2, 3)), display=False)
    with pytest.raises(TypeError, match="watch takes an iterable of batches, got"):
        insp.watch(data)
    insp.close()
