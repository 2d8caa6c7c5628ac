"""Training loops whose update is not the gradient of one call; see `training`."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from training import (
    RATE,
    Call,
    Loop,
    Net,
    by,
    descended,
    figures,
    gradient_of,
    loss_of,
    numbers_of,
    with_members,
)

RADIUS = 0.2


@nnx.jit
def sharp_step(model, optimizer, x):
    kept = nnx.state(model, nnx.Param)
    grads = nnx.grad(loss_of)(model, x)
    norm = optax.tree.norm(grads)
    nnx.update(model, jax.tree.map(lambda p, g: p + RADIUS * g / norm, kept, grads))
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    nnx.update(model, kept)
    optimizer.update(model, grads)
    return loss


def sharpness_aware(factor: float) -> Loop:
    """The gradient is that a little way up the slope."""
    model = Net(factor=factor)
    optimizer = by(model)

    def calls(x):
        here = Call(numbers_of(model), x)
        grads = gradient_of(here, model.factor)
        norm = np.sqrt(sum(np.square(g).sum() for g in grads.values()))
        return [here, Call(descended(here.weights, grads, -RADIUS / norm), x)]

    state = lambda: nnx.state((model, optimizer))  # noqa: E731
    return Loop(model, lambda x: sharp_step(model, optimizer, x), calls, state, factor)


@nnx.jit
def evolved(model, noise, x):
    graphdef, params = nnx.split(model, nnx.Param)

    def one(noise):
        return loss_of(nnx.merge(graphdef, jax.tree.map(jnp.add, params, noise)), x)

    losses = jax.vmap(one)(noise)
    better = RATE * (losses.mean() - losses) / (losses.std() + 1e-6)
    moved = jax.tree.map(lambda p, n: p + jnp.tensordot(better, n, 1), params, noise)
    nnx.update(model, moved)
    return losses.mean()


def evolution(factor: float) -> Loop:
    """A population of noisy weights under vmap, and no gradient."""
    model, size, rng = Net(factor=factor), 3, np.random.default_rng(2)
    noise = jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=(size, *p.shape)) * 0.1, p.dtype),
        nnx.state(model, nnx.Param),
    )
    flat = {"/".join(map(str, path)): np.array(n[...]) for path, n in nnx.to_flat_state(noise)}

    def of_all(call, factor):
        each = [
            figures(
                Call({n: v + flat[n][i] for n, v in call.weights.items()}, call.x, None), factor
            )
            for i in range(size)
        ]
        return with_members(each)

    return Loop(
        model,
        lambda x: evolved(model, noise, x),
        lambda x: [Call(numbers_of(model), x, None)],
        lambda: nnx.state(model),
        factor,
        figures=of_all,
    )


@nnx.jit
def pulled_back(model, optimizer, x):
    y, back = nnx.vjp(lambda model, x: model(x), model, x, graph_updates=False)
    grads, _ = back(2 * y / y.size)
    optimizer.update(model, grads)
    return (y**2).mean()


def gradient_by_hand(factor: float) -> Loop:
    """The loss's gradient is written down and pulled back by `nnx.vjp`."""
    model = Net(factor=factor)
    optimizer = by(model)
    return Loop(
        model,
        lambda x: pulled_back(model, optimizer, x),
        lambda x: [Call(numbers_of(model), x)],
        lambda: nnx.state((model, optimizer)),
        factor,
    )


LOOPS = (sharpness_aware, evolution, gradient_by_hand)
