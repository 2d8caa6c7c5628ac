"""Training loops that split the model themselves, before watching or in each step.

Each function builds a loop; see `training`. A model that was split before watching cannot be
attributed: then nothing is recorded or perturbed, and both facts are reported.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state
from training import (
    SGD,
    Call,
    Loop,
    Net,
    Weights,
    batches,
    by,
    descended,
    gradient_of,
    loss_of,
    numbers_of,
    update,
)


def _split(model: Net, step: Any, state: Any, weights: Any = None) -> Loop:
    """A loop whose program merges what was split before; `weights()` are those of the next step."""
    weights = weights or (lambda: numbers_of(model))
    return Loop(model, step, lambda x: [Call(weights(), x)], state, model.factor)


def numbers_in(state: Any, *prefix: Any) -> Weights:
    """Copies of the parameters of a split Net, by path."""
    flat = dict(nnx.to_flat_state(state))
    names = [(part, leaf) for part in ("a", "b") for leaf in ("kernel", "bias")]
    return {f"{p}/{n}": np.array(flat[*prefix, p, n][...], np.float64) for p, n in names}


def closed_over(factor: float) -> Loop:
    """A `jax.jit` closes over the graphdef and donates the state."""
    model = Net(factor=factor)
    graphdef, state = nnx.split((model, by(model)))
    now = [jax.tree.map(jnp.copy, state)]

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        loss = update(model, optimizer, x)
        return nnx.state((model, optimizer)), loss

    def step(x):
        now[0], loss = train_step(now[0], x)
        return loss

    return _split(model, step, lambda: now[0], lambda: numbers_in(now[0], 0))


@functools.partial(jax.jit, static_argnums=0)
def static_step(graphdef, state, x):
    model, optimizer = nnx.merge(graphdef, state)
    loss = update(model, optimizer, x)
    return nnx.state((model, optimizer)), loss


def static_before(factor: float) -> Loop:
    """The graphdef is a static argument; it was split before the loop."""
    model = Net(factor=factor)
    graphdef, state = nnx.split((model, by(model)))
    now = [state]

    def step(x):
        now[0], loss = static_step(graphdef, now[0], x)
        return loss

    return _split(model, step, lambda: now[0], lambda: numbers_in(now[0], 0))


def static_each_step(factor: float) -> Loop:
    """Each step splits the model and updates it afterwards."""
    model = Net(factor=factor)
    optimizer = by(model)

    def step(x):
        graphdef, state = nnx.split((model, optimizer))
        state, loss = static_step(graphdef, state, x)
        nnx.update((model, optimizer), state)
        return loss

    return Loop(
        model,
        step,
        lambda x: [Call(numbers_of(model), x)],
        lambda: nnx.state((model, optimizer)),
        factor,
    )


@nnx.jit
def to_be_cached(model, optimizer, x):
    return update(model, optimizer, x)


def cached(factor: float) -> Loop:
    model = Net(factor=factor)
    optimizer = by(model)
    step = nnx.cached_partial(to_be_cached, model, optimizer)
    return _split(model, step, lambda: nnx.state((model, optimizer)))


def cached_in_the_loop(factor: float) -> Loop:
    """Makes the step on the first batch, as some trainers do."""
    model = Net(factor=factor)
    optimizer, made = by(model), []

    def step(x):
        if not made:
            made.append(nnx.cached_partial(to_be_cached, model, optimizer))
        return made[0](x)

    return Loop(
        model,
        step,
        lambda x: [Call(numbers_of(model), x)],
        lambda: nnx.state((model, optimizer)),
        factor,
    )


def partial(factor: float) -> Loop:
    model = Net(factor=factor)
    optimizer = by(model)
    step = nnx.jit_partial(update, model, optimizer, graph=False, graph_updates=False)
    return _split(model, step, lambda: nnx.state((model, optimizer)))


class TrainState(train_state.TrainState):
    other: Any = None


def state_of_training(factor: float) -> Loop:
    """The graphdef is in `apply_fn`, parameters and the rest are in a TrainState."""
    model = Net(factor=factor)
    graphdef, params, other = nnx.split(model, nnx.Param, ...)
    now = [TrainState.create(apply_fn=graphdef.apply, params=params, tx=SGD, other=other)]

    @jax.jit
    def train_step(state, x):
        def loss_fn(params):
            y, (_, after) = state.apply_fn(params, state.other)(x)
            return (y**2).mean(), after

        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), loss

    def step(x):
        now[0], loss = train_step(now[0], x)
        return loss

    state_of = lambda: (now[0].params, now[0].opt_state)  # noqa: E731
    return _split(model, step, state_of, lambda: numbers_in(now[0].params))


class Everything(nnx.Module):
    """A training state that is itself a module and is updated in place."""

    def __init__(self, model):
        self.model, self.optimizer = model, by(model)
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))

    @nnx.jit
    def train_step(self, x):
        loss = update(self.model, self.optimizer, x)
        self.steps[...] += 1
        return loss


def module_of_all(factor: float) -> Loop:
    """The step is a jitted method of a module that holds the model."""
    whole = Everything(Net(factor=factor))
    return Loop(
        whole.model,
        whole.train_step,
        lambda x: [Call(numbers_of(whole.model), x)],
        lambda: nnx.state(whole),
        factor,
    )


@jax.jit
def steps_of_state(state, xs):
    def one(state, x):
        model, optimizer = nnx.merge(state[0], state[1])
        loss = update(model, optimizer, x)
        return (state[0], nnx.state((model, optimizer))), loss

    return jax.lax.scan(one, state, xs)


def scan_of_states(factor: float) -> Loop:
    """Several steps in one `lax.scan` of split states; each chunk is split anew."""
    model = Net(factor=factor)
    optimizer = by(model)

    def step(xs):
        state, losses = steps_of_state(tuple(nnx.split((model, optimizer))), xs)
        nnx.update((model, optimizer), state[1])
        return losses[-1]

    def calls(xs):
        weights = numbers_of(model)
        for x in xs:
            call = Call(weights, x)
            yield call
            weights = descended(weights, gradient_of(call, factor))

    return Loop(
        model,
        step,
        calls,
        lambda: nnx.state((model, optimizer)),
        factor,
        batches=[jnp.stack(batches(3))] * 3,
    )


jitted = nnx.jit(update)


def restored(factor: float) -> Loop:
    """After two steps a checkpoint is restored, which makes new objects."""
    model = Net(factor=factor)
    now: list[Any] = [model, by(model), 0]

    def step(x):
        if now[2] == 2:
            graphdef, state = nnx.split((now[0], now[1]))
            now[:2] = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))
        now[2] += 1
        return jitted(now[0], now[1], x)

    def calls(x):
        return [Call(numbers_of(model), x)] if now[2] < 2 else []

    return Loop(model, step, calls, lambda: nnx.state((now[0], now[1])), factor, told=True)


LINE_SEARCH = optax.chain(
    optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=3)
)


@nnx.jit
def searched(model, optimizer, x):
    graphdef = nnx.graphdef(model)
    value_fn = lambda params: loss_of(nnx.merge(graphdef, params), x)  # noqa: E731
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads, grad=grads, value=loss, value_fn=value_fn)
    return loss


def line_search(factor: float) -> Loop:
    """The optimizer calls a merged model in a while loop, which accepts its first trial."""
    model = Net(factor=factor)
    optimizer = nnx.Optimizer(model, LINE_SEARCH, wrt=nnx.Param)

    def calls(x):
        first = Call(numbers_of(model), x)
        trial = descended(first.weights, gradient_of(first, factor), 1.0)
        return [first, Call(trial, x, back=None)]

    return Loop(
        model,
        lambda x: searched(model, optimizer, x),
        calls,
        lambda: nnx.state((model, optimizer)),
        factor,
    )


LOOPS = (
    closed_over, static_before, static_each_step, cached, cached_in_the_loop, partial,
    state_of_training, module_of_all, scan_of_states, restored, line_search,
)  # fmt: skip
