"""The parameters of watched steps: values, gradients and updates, against NumPy in float64."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from linear_stack import LinearStack
from parameter_oracle import Net, X, assert_measured, flat, loss_fn, ratio, step_of, watched

import nnx_inspector as nni

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    name: lambda name=name: getattr(optax, name)(1e-2)
    for name in (
        "adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw",
        "amsgrad", "fromage", "lamb", "lars", "lion", "nadamw", "novograd", "rmsprop", "sgd",
        "sign_sgd", "sm3", "yogi",
    )
} | {
    "decayed": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1e-2, momentum=0.9)),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "scheduled": lambda: optax.sgd(optax.linear_schedule(0.1, 0.01, 5), momentum=0.9),
    "not negative": lambda: optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
}  # fmt: skip


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_optimizer(name: str) -> None:
    model = Net()
    watched(model, step_of(model, OPTIMIZERS[name]()))


def test_steps_without_an_update_have_ratio_zero() -> None:
    model = Net()
    recording = watched(model, step_of(model, optax.MultiSteps(optax.adam(1e-2), 2)), steps=4)
    ratios = [one.update_ratio("up/kernel") for one in recording.passes]
    assert ratios[0] == ratios[2] == 0
    assert min(ratios[1], ratios[3]) > 0


@pytest.mark.parametrize("kind", ["tied", "bfloat16", "subset"])
def test_a_model(kind: str) -> None:
    model = Net(tied=kind == "tied", dtype=jnp.bfloat16 if kind == "bfloat16" else jnp.float32)
    wrt = (lambda path, x: "up" in path) if kind == "subset" else nnx.Param
    recording = watched(model, step_of(model, optax.sgd(0.1), wrt))
    if kind == "subset":
        assert recording.passes[0].update_ratio("down/kernel") == 0


@nnx.jit
def descend(model: Any, x: jax.Array) -> Any:
    grads = nnx.grad(loss_fn)(model, x)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
    return grads


@nnx.jit
def shrink_and_clip(model: Any, x: jax.Array, rate: Any = 0.1) -> Any:
    grads = nnx.grad(loss_fn)(model, x)
    params = nnx.state(model, nnx.Param)
    move = lambda p, g: jnp.clip(p * (1 - rate * 0.01) - rate * g, -0.5, 0.5)  # noqa: E731
    nnx.update(model, jax.tree.map(move, params, grads))
    return grads


@pytest.mark.parametrize("step", [descend, shrink_and_clip])
def test_a_step_of_ones_own(step: Any) -> None:
    model = Net()
    watched(model, lambda: step(model, X))


def test_gradients_and_updates_in_separate_programs_are_not_guessed() -> None:
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    graded, update = nnx.jit(nnx.grad(loss_fn)), nnx.jit(lambda o, m, g: o.update(m, g))

    def step() -> Any:
        grads = graded(model, X)
        update(optimizer, model, grads)
        return grads

    watched(model, step, seen=False)


def test_a_step_that_no_jit_holds() -> None:
    model = Net()

    def step() -> Any:
        grads = nnx.grad(loss_fn)(model, X)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
        return grads

    watched(model, step, seen=False)


@contextlib.contextmanager
def functional(tx: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """A model's graphdef and state, a state of the optimizer, and what to watch."""
    model = Net()
    graphdef, state = nnx.split(model)
    yield model, graphdef, state, tx.init(state)


def test_a_donated_state() -> None:
    tx = optax.adamw(1e-2)
    with functional(tx) as (model, graphdef, state, moments):

        def step(state: Any, moments: Any, x: jax.Array) -> Any:
            grads = jax.grad(lambda s: loss_fn(nnx.merge(graphdef, s), x))(state)
            updates, moments = tx.update(grads, moments, state)
            return optax.apply_updates(state, updates), moments, grads

        step = jax.jit(step, donate_argnums=(0, 1))
        wanted = list[Any]()
        with nni.watch(model, every=1) as recording:
            for _ in range(3):
                before = flat(state)
                state, moments, grads = step(state, moments, X)
                wanted.append((before, flat(state), flat(grads)))
        for one, each in zip(recording.passes, wanted, strict=True):
            assert_measured(one, *each)


def test_neither_an_average_nor_a_target_is_taken_for_the_update() -> None:
    tx = optax.sgd(0.1, momentum=0.9)
    with functional(tx) as (model, graphdef, state, moments):
        average = target = jax.tree.map(jnp.copy, state)

        @jax.jit
        def step(state: Any, average: Any, target: Any, moments: Any, t: Any) -> Any:
            def loss(s: Any) -> Any:
                penalty = 0.5 * sum(jnp.sum(x**2) for x in jax.tree.leaves(s))
                return loss_fn(nnx.merge(graphdef, s), X) + penalty

            grads = jax.grad(loss)(state)
            updates, moments = tx.update(grads, moments, state)
            new = optax.apply_updates(state, updates)
            average = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, average, new)
            target = jax.tree.map(lambda a, b: jnp.where(t % 2 == 0, b, a), target, new)
            return grads, target, average, new, moments

        with nni.watch(model, every=1) as recording:
            wanted = list[float]()
            for t in range(3):
                before = flat(state)["up/kernel"]
                _, target, average, state, moments = step(state, average, target, moments, t)
                wanted.append(ratio(before, flat(state)["up/kernel"]))
        found = [one.update_ratio("up/kernel") for one in recording.passes]
        np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_the_gradient_of_a_penalty_is_no_update() -> None:
    model = Net()

    @nnx.jit
    def graded(model: Any) -> Any:
        def loss(model: Any) -> Any:
            params = jax.tree.leaves(nnx.state(model, nnx.Param))
            return loss_fn(model, X) + 0.5 * sum(jnp.sum(p**2) for p in params)

        return nnx.grad(loss)(model)

    with nni.watch(model, every=1) as recording:
        graded(model)
    assert np.isnan(recording.passes[0].update_ratio("up/kernel"))


def test_steps_in_a_scan_have_their_own_updates() -> None:
    tx = optax.adamw(1e-2)
    with functional(tx) as (model, graphdef, state, moments):

        @jax.jit
        def steps(state: Any, moments: Any, xs: Any) -> Any:
            def body(carried: Any, x: Any) -> Any:
                state, moments = carried
                grads = jax.grad(lambda s: loss_fn(nnx.merge(graphdef, s), x))(state)
                updates, moments = tx.update(grads, moments, state)
                new = optax.apply_updates(state, updates)
                return (new, moments), (state, new, grads)

            return jax.lax.scan(body, (state, moments), xs)[1]

        with nni.watch(model, every=1) as recording:
            seen = steps(state, moments, jnp.stack([X, X + 1, X - 1]))
        for i, one in enumerate(recording.passes):
            row = [jax.tree.map(operator.itemgetter(i), tree) for tree in seen]
            assert_measured(one, *map(flat, row))


def test_each_layer_of_a_stack_has_its_own_figures() -> None:
    model = LinearStack(nnx.Rngs(0), width=4)
    step = step_of(model, optax.adamw(1e-2))
    insp = nni.Inspector(model, X)
    for _ in insp.watch(range(1), every=1):
        before = flat(nnx.state(model, nnx.Param))
        grads = flat(step())
        after = flat(nnx.state(model, nnx.Param))
    one = insp.recording.passes[-1]
    for path in before:
        np.testing.assert_allclose(one.update_ratio(path), ratio(before[path], after[path]), 1e-4)
        for i in range(3):
            key = f"{path}[{i}]"
            value, gradient = (one.summary(key, q) for q in ("parameter", "parameter_gradient"))
            assert value is not None
            assert gradient is not None
            np.testing.assert_allclose(value.norm, np.linalg.norm(before[path][i]), rtol=1e-5)
            np.testing.assert_allclose(gradient.norm, np.linalg.norm(grads[path][i]), rtol=1e-4)
            wanted = ratio(before[path][i], after[path][i])
            np.testing.assert_allclose(one.update_ratio(key), wanted, rtol=1e-4)
    insp.close()


def test_without_parameters_the_pass_has_none() -> None:
    model = Net()
    step = step_of(model, optax.sgd(0.1))
    with nni.watch(model, every=1, parameters=False) as recording:
        step()
    insp = nni.Inspector(model, X, parameters=False)
    for _ in insp.watch(range(1), every=1):
        step()
    insp.step(loss_fn, X)
    for one in (*recording.passes, *insp.recording.passes):
        assert {quantity for _, quantity in one.keys} <= {"output", "gradient", "input"}
        assert np.isnan(one.update_ratio("up/kernel"))
    insp.close()


def test_a_step_of_the_inspector_has_values_and_gradients() -> None:
    model = Net()
    insp = nni.Inspector(model, X)
    insp.step(loss_fn, X)
    grads = flat(nnx.grad(loss_fn)(model, X))
    before = flat(nnx.state(model, nnx.Param))
    assert_measured(insp.recording.passes[-1], before, None, grads)
    insp.close()


def test_a_watched_step_computes_what_it_computed() -> None:
    bare, model = Net(tied=True), Net(tied=True)
    one, other = step_of(bare, optax.adamw(1e-2)), step_of(model, optax.adamw(1e-2))
    for _ in range(2):
        one()
    with nni.watch(model, every=1):
        for _ in range(2):
            other()
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (bare, model)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_several_calls_in_one_step_have_one_value_of_each_parameter() -> None:
    """Two views of a batch, and a layer that an auxiliary loss calls by itself."""
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def loss(model: Any, x: Any) -> Any:
        target = jax.lax.stop_gradient(model(2 * x))
        return ((model(x) - target) ** 2).mean() + 0.1 * (model.up(x) ** 2).mean()

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(loss)(model, X))

    insp = nni.Inspector(model, X)
    before = flat(nnx.state(model, nnx.Param))
    for _ in insp.watch(range(1), every=1):
        step(model, optimizer)
    one, after = insp.recording.passes[-1], flat(nnx.state(model, nnx.Param))
    insp.close()
    for path, value in before.items():
        found = one.summary(path, "parameter")
        assert found is not None
        assert found.size == value.size
        np.testing.assert_allclose(found.norm, np.linalg.norm(value), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(one.update_ratio(path), ratio(value, after[path]), rtol=1e-4)


class Spectral(nnx.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (3, 4), jnp.complex64))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.fft.irfft(jnp.fft.rfft(x, axis=1)[:, :3] @ self.weight[...], axis=1)


@pytest.mark.parametrize("rate", [0.1, 0.1 + 0j], ids=["real rate", "complex rate"])
def test_complex_parameters(rate: complex) -> None:
    model, x = Spectral(nnx.Rngs(0)), jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)))
    values, grads = [np.asarray(model.weight[...], np.complex128)], []

    @nnx.jit
    def step(model: Spectral, x: jax.Array) -> Any:
        grads = nnx.grad(lambda model: (model(x) ** 2).sum())(model)
        model.weight[...] -= rate * jnp.conj(grads.weight[...])
        return grads.weight[...]

    with nni.watch(model, every=1) as recording:
        for _ in range(3):
            grads.append(np.asarray(step(model, x)))
            values.append(np.asarray(model.weight[...], np.complex128))
    assert len(recording.passes) == 3
    steps = zip(recording.passes, itertools.pairwise(values), grads, strict=True)
    for one, (old, new), grad in steps:
        found = one.summary("weight", "parameter")
        np.testing.assert_allclose(found.norm, np.linalg.norm(old), rtol=1e-5)
        np.testing.assert_allclose(found.mean, np.abs(old).mean(), rtol=1e-5)
        found = one.summary("weight", "parameter_gradient")
        np.testing.assert_allclose(found.norm, np.linalg.norm(grad), rtol=1e-5)
        moved = np.linalg.norm(new - old) / np.linalg.norm(old)
        np.testing.assert_allclose(one.update_ratio("weight"), moved, rtol=1e-5)
    assert "could not be read" not in str(nni.diagnose(recording))


def test_the_ratio_of_a_large_parameter_is_as_exact_as_that_of_a_small_one() -> None:
    """Adding a million squares one after the other in float32 would be off by 2e-4."""
    model = nnx.Linear(1024, 1024, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (2, 1024))

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(loss_fn)(model, x))

    with nni.watch(model, every=1) as recording:
        before = flat(nnx.state(model, nnx.Param))["kernel"]
        step(model, optimizer)
        after = flat(nnx.state(model, nnx.Param))["kernel"]
    found = recording.passes[0].update_ratio("kernel")
    np.testing.assert_allclose(found, ratio(before, after), rtol=2e-6)


def test_norms_and_ratios_beyond_float32_are_counted_without_a_warning_of_numpy() -> None:
    model = nnx.Linear(2, 8, kernel_init=nnx.initializers.constant(1e-32), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-30), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> None:
        grads = nnx.grad(lambda model: (2e38 * model(x)).sum())(model)
        optimizer.update(model, grads)

    with nni.watch(model, every=1) as recording:
        step(model, optimizer, jnp.ones((1, 2)))
    assert recording.passes[0].update_ratio("kernel") == np.inf  # 2e40
    found = recording.summary("kernel", "parameter_gradient")
    np.testing.assert_allclose(found.norm, 8e38, rtol=1e-5)
    assert "nonfinite" not in {one.rule for one in nni.diagnose(recording)}
