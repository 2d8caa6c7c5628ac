"""Small models that are trained by any optimizer, with its state measured or not."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nnx_inspector as nni


class Net(nnx.Module):
    """Two layers, and a head that gets a gradient of exactly 0."""

    def __init__(self, *, rngs=None, dtype=jnp.float32):
        rngs = rngs or nnx.Rngs(0)
        how = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.body, self.used, self.unused = (nnx.Linear(4, n, **how) for n in (4, 2, 2))

    def __call__(self, x):
        h = jnp.tanh(self.body(x))
        return self.used(h) + 0 * self.unused(h)


class Plain(nnx.Module):
    """Two layers."""

    def __init__(self, *, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.body, self.used = nnx.Linear(4, 16, rngs=rngs), nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        return self.used(jnp.tanh(self.body(x)))


def loss_of(model, x):
    return ((model(x).astype(jnp.float32) - 0.5) ** 2).mean()


def batches(steps, *, bad=()):
    """Batches of 8 examples; those with these numbers have an Inf."""
    found = np.random.default_rng(0).normal(size=(steps, 8, 4)).astype(np.float32)
    found[list(bad), 0, 0] = np.inf
    return list(found)


def trained(model, tx, data, *, every=1, states=True, wrt=nnx.Param, save=None):
    """The recording of a loop with nnx.Optimizer."""
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, wrt))(model, x)
        optimizer.update(model, grads)
        return loss

    how = {"optimizer": optimizer} if states else {}
    with nni.watch(model, every=every, save=save, **how) as recording:
        for x in data:
            step(model, optimizer, x)
    return recording


def carried(model, init, update, data, *, every=1, states=True):
    """The recording of a loop that carries the optimizer's state itself.

    `update(grads, state, params)` returns the new parameters and the new state.
    """
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    state = init(params)

    @jax.jit
    def step(params, state, x):
        def loss(params):
            return loss_of(nnx.merge(graphdef, params, rest), x)

        return update(jax.grad(loss)(params), state, params)

    how = {"optimizer": lambda: state} if states else {}
    with nni.watch(model, every=every, **how) as recording:
        for x in data:
            params, state = step(params, state, x)
    return recording
