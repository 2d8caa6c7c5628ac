"""Parameters of watched steps in models and with optimizers of many kinds, against NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parameter_oracle import Net, X, flat, loss_fn, ratio, step_of, watched

import nnx_inspector as nni


class Adapted(nnx.Module):
    """Two ways to adapt a layer, one of them around a frozen layer."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.LoRALinear(4, 8, lora_rank=2, rngs=rngs)
        self.around = nnx.LoRA(8, 2, 8, base_module=nnx.Linear(8, 8, rngs=rngs), rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.around(jnp.tanh(self.up(x))))


class Recomputed(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.remat(lambda layer, x: jnp.tanh(layer(x)))(self.up, x)
        return nnx.remat(lambda layer, x: layer(x))(self.down, y)


@jax.custom_vjp
def clipped(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def _forward(w: jax.Array, x: jax.Array) -> Any:
    y = clipped(w, x)
    return y, (w, x, y)


def _backward(kept: Any, g: jax.Array) -> Any:
    """Another derivative than that of tanh, so that the oracle must use it as well."""
    w, x, y = kept
    g = jnp.clip(g, -0.01, 0.01) * (1 - y)
    return x.T @ g, g @ w.T


clipped.defvjp(_forward, _backward)


class Custom(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.w = nnx.Param(jax.random.normal(rngs.params(), (4, 8)))
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(clipped(self.w[...], x))


@nnx.vmap
def members(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(4, 4, rngs=rngs)


class Ensemble(nnx.Module):
    def __init__(self) -> None:
        self.members = members(nnx.Rngs(0).split(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.vmap(lambda member, x: jnp.tanh(member(x)), in_axes=(0, None))
        return run(self.members, x).mean(0)


class Cast(nnx.Module):
    """Computes in bfloat16 with parameters in float32."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(4, 8, rngs=rngs, dtype=jnp.bfloat16)
        self.down = nnx.Linear(8, 4, rngs=rngs, dtype=jnp.bfloat16)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x))).astype(jnp.float32)


MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "LoRA": (Adapted, nnx.LoRAParam),
    "LoRA and its base": (Adapted, nnx.Param),
    "remat": (Recomputed, nnx.Param),
    "custom_vjp": (Custom, nnx.Param),
    "ensemble": (Ensemble, nnx.Param),
    "an ensemble that the step maps": (lambda: members(nnx.Rngs(0).split(3)), nnx.Param),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model(name: str) -> None:
    make, wrt = MODELS[name]
    model = make()
    if "maps" not in name:
        watched(model, step_of(model, optax.adamw(1e-2), wrt))
        return
    optimizer = nnx.vmap(lambda model: nnx.Optimizer(model, optax.adamw(1e-2), wrt=wrt))(model)

    @nnx.jit
    @functools.partial(nnx.vmap, in_axes=(0, 0, None))
    def step(model: Any, optimizer: Any, x: jax.Array) -> Any:
        grads = nnx.grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return grads

    watched(model, lambda: step(model, optimizer, X))


def kernels(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def labels(params: Any) -> Any:
    return jax.tree.map(lambda x: "kernel" if x.ndim > 1 else "bias", params)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "flattened": lambda: optax.flatten(optax.adam(1e-2)),
    "flattened momentum": lambda: optax.flatten(optax.sgd(1e-2, momentum=0.9)),
    "masked": lambda: optax.masked(optax.adam(1e-2), kernels),
    "a mask that freezes": lambda: optax.chain(
        optax.adam(1e-2), optax.masked(optax.set_to_zero(), kernels)
    ),
    "two optimizers": lambda: optax.multi_transform(
        {"kernel": optax.adam(1e-2), "bias": optax.sgd(0.1)}, labels
    ),
    "one optimizer that freezes": lambda: optax.multi_transform(
        {"kernel": optax.adam(1e-2), "bias": optax.set_to_zero()}, labels
    ),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_optimizer(name: str) -> None:
    model = Net()
    recording = watched(model, step_of(model, OPTIMIZERS[name]()), steps=3)
    still = {"a mask that freezes": "up/kernel", "one optimizer that freezes": "up/bias"}
    if name in still:
        assert [one.update_ratio(still[name]) for one in recording.passes] == [0, 0, 0]


def test_several_gradients_before_one_update_of_a_clipped_optimizer() -> None:
    model = Net(tied=True)
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    recording = watched(model, step_of(model, optax.MultiSteps(inner, 3)), steps=6)
    zero = [one.update_ratio("down/kernel") == 0 for one in recording.passes]
    assert zero == [True, True, False] * 2


@pytest.mark.parametrize("casts", ["the layers", "the step"])
def test_parameters_in_bfloat16_with_a_copy_in_float32(casts: str) -> None:
    if casts == "the layers":
        model = Cast()
        watched(model, step_of(model, optax.adamw(1e-2)))
        return
    model = Net()
    copy = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    low = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)  # noqa: E731
    nnx.update(model, low(copy))
    tx = optax.adamw(1e-2)
    held = {"copy": copy, "moments": tx.init(copy)}

    @nnx.jit
    def step(model: Any, copy: Any, moments: Any, x: jax.Array) -> Any:
        grads = nnx.grad(loss_fn)(model, x)
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        updates, moments = tx.update(wide, moments, copy)
        copy = optax.apply_updates(copy, updates)
        nnx.update(model, low(copy))
        return grads, copy, moments

    def once() -> Any:
        grads, held["copy"], held["moments"] = step(model, held["copy"], held["moments"], X)
        return grads

    watched(model, once, steps=3)


def test_gradients_that_are_returned_are_not_taken_for_the_update() -> None:
    """In a step without an update, also with a copy of the parameters beside them."""
    model = Net()

    @nnx.jit
    def graded(model: Any, x: jax.Array) -> Any:
        copy = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model, nnx.Param))
        return nnx.grad(loss_fn)(model, x), copy

    watched(model, lambda: graded(model, X)[0], seen=False)


def test_each_micro_batch_of_one_step_has_the_update_of_that_step() -> None:
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, xs: jax.Array) -> None:
        graphdef, state = nnx.split(model)

        def add(total: Any, x: jax.Array) -> Any:
            grads = jax.grad(lambda s: loss_fn(nnx.merge(graphdef, s), x))(state)
            return jax.tree.map(jnp.add, total, grads), None

        grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, state), xs)
        optimizer.update(model, grads)

    with nni.watch(model, every=1) as recording:
        before = flat(nnx.state(model, nnx.Param))
        step(model, optimizer, jnp.stack([X, X + 1]))
        after = flat(nnx.state(model, nnx.Param))
    assert len(recording.passes) == 2
    for one in recording.passes:
        for path, value in before.items():
            np.testing.assert_allclose(one.update_ratio(path), ratio(value, after[path]), rtol=1e-4)


# --------------------------------------------------------------- several devices


class Divided(Net):
    """Multiplies in a shard_map, each device with some of the hidden units."""

    def __call__(self, x: jax.Array) -> jax.Array:
        part = lambda x, a, b, c: jax.lax.psum(jnp.tanh(x @ a + b) @ c, "d")  # noqa: E731
        specs = P(), P(None, "d"), P("d"), P("d", None)
        run = jax.shard_map(part, in_specs=specs, out_specs=P())
        y = run(x, self.up.kernel[...], self.up.bias[...], self.down.kernel[...])
        return y + self.down.bias[...]


@pytest.mark.skipif(jax.device_count() < 4, reason="run again with four devices")
@pytest.mark.parametrize(
    ("layout", "axis"),
    [
        ("tensor", AxisType.Auto),
        ("data", AxisType.Explicit),
        ("shard_map", AxisType.Auto),
    ],
)
def test_parameters_on_four_devices_are_measured_as_a_whole(layout: str, axis: Any) -> None:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(axis,))
    model: Any = Divided() if layout == "shard_map" else Net()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    for one in (model, optimizer):
        nnx.update(one, jax.device_put(nnx.state(one), NamedSharding(mesh, P())))
    if layout != "data":
        up, down = model.up, model.down
        divided = (up.kernel, P(None, "d")), (up.bias, P("d")), (down.kernel, P("d", None))
        for variable, spec in divided:
            variable.set_value(jax.device_put(variable[...], NamedSharding(mesh, spec)))
        moments = nnx.state(nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param))
        nnx.update(optimizer, moments)
    x = jax.device_put(X, NamedSharding(mesh, P("d") if layout == "data" else P()))

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> Any:
        grads = nnx.grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return grads

    with jax.set_mesh(mesh):
        watched(model, lambda: step(model, optimizer, x))
