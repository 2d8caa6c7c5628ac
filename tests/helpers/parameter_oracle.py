"""Watched steps beside NumPy in float64: the values, gradients and updates of their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.recordings.passes import Pass

X = jax.random.normal(jax.random.key(0), (16, 4))
Flat = dict[str, np.ndarray]


class Net(nnx.Module):
    def __init__(self, *, dtype: Any = jnp.float32, tied: bool = False):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(4, 8, rngs=rngs, param_dtype=dtype)
        self.down = nnx.Linear(8, 4, rngs=rngs)
        self.again = self.up if tied else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.down(jax.nn.tanh(self.up(x)))
        return y if self.again is None else self.again(y)


def loss_fn(model: Any, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def flat(state: Any) -> Flat:
    """Path -> array, on the host in float64."""
    leaves = nnx.to_flat_state(state)
    return {
        "/".join(map(str, path)): np.asarray(
            leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf, np.float64
        )
        for path, leaf in leaves
    }


def ratio(before: np.ndarray, after: np.ndarray) -> float:
    change, norm = np.linalg.norm(after - before), np.linalg.norm(before)
    return change / norm if norm else np.inf if change else 0.0


def assert_measured(one: Pass, before: Flat, after: Flat | None, grads: Flat) -> None:
    """`after` is None if the update cannot be seen."""
    paths = {key for key, quantity in one.keys if quantity == "parameter"}
    assert paths == set(before)
    for path, value in before.items():
        found, gradient = one.summary(path, "parameter"), one.summary(path, "parameter_gradient")
        assert found is not None
        assert found.size == value.size
        np.testing.assert_allclose(found.norm, np.linalg.norm(value), rtol=1e-5)
        np.testing.assert_allclose(found.max, value.max(), rtol=1e-6)
        assert (gradient is None) == (path not in grads), path
        if gradient is not None:
            np.testing.assert_allclose(gradient.norm, np.linalg.norm(grads[path]), rtol=1e-4)
        if after is None:
            assert np.isnan(one.update_ratio(path))
        else:
            wanted = ratio(value, after[path])
            np.testing.assert_allclose(one.update_ratio(path), wanted, rtol=1e-4, err_msg=path)


def watched(model: nnx.Module, step: Callable[[], Any], *, steps: int = 2, seen: bool = True):
    """Watch some steps, each of which returns its gradients, and compare all figures."""
    wanted = list[tuple[Flat, Flat, Flat]]()
    with nni.watch(model, every=1) as recording:
        for _ in range(steps):
            before = flat(nnx.state(model, nnx.Param))
            grads = flat(step())
            wanted.append((before, flat(nnx.state(model, nnx.Param)), grads))
    assert len(recording.passes) == steps
    for one, (before, after, grads) in zip(recording.passes, wanted, strict=True):
        assert_measured(one, before, after if seen else None, grads)
    return recording


def step_of(model: Any, tx: Any, wrt: Any = nnx.Param) -> Callable[[], Any]:
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> Any:
        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, x)
        optimizer.update(model, grads)
        return grads

    return lambda: step(model, optimizer, X)
