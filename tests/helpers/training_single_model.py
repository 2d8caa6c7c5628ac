"""Training loops of one model, as users write them: how the step is compiled and what it returns.

Each function builds a loop; see `training`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from training import (
    ADAM,
    SGD,
    Call,
    Loop,
    Net,
    batches,
    by,
    descended,
    figures,
    gradient_of,
    loss_of,
    numbers_of,
    update,
)


def _one(model: Net, optimizer: Any, step: Any, **more: Any) -> Loop:
    """A loop whose step makes one call, of the loss in `training`."""
    return Loop(
        model,
        step,
        lambda x: [Call(numbers_of(model), x)],
        lambda: nnx.state((model, optimizer)),
        model.factor,
        **more,
    )


jitted = nnx.jit(update)


def plain(factor: float) -> Loop:
    model = Net(factor=factor)
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    return _one(model, optimizer, lambda x: jitted(model, optimizer, x))


donated = nnx.jit(update, donate_argnums=(0, 1))


def donating(factor: float) -> Loop:
    model = Net(factor=factor)
    optimizer = by(model)
    # the effect of a perturbation is measured beside the loop, which may delete the arrays
    return _one(model, optimizer, lambda x: donated(model, optimizer, x), told=None)


def eager(factor: float) -> Loop:
    model = Net(factor=factor)
    optimizer = by(model)
    return _one(model, optimizer, lambda x: update(model, optimizer, x))


differentiated = nnx.jit(nnx.value_and_grad(loss_of))


def update_outside(factor: float) -> Loop:
    model = Net(factor=factor)
    optimizer = by(model)

    def step(x):
        loss, grads = differentiated(model, x)
        optimizer.update(model, grads)
        return loss

    return _one(model, optimizer, step)


class Running(nnx.MultiMetric):
    def __init__(self):
        super().__init__(loss=nnx.metrics.Average("loss"), size=nnx.metrics.Average("size"))


@nnx.jit
def with_aux_step(model, optimizer, metrics, x):
    def loss_fn(model):
        y = model(x)
        return (y**2).mean(), {"size": jnp.abs(y).mean()}

    (loss, aux), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss, **aux)
    optimizer.update(model, grads)
    return loss


def metrics_and_aux(factor: float) -> Loop:
    """The loss is a closure over the batch and also returns other values."""
    model, metrics = Net(factor=factor), Running()
    optimizer = by(model)
    loop = _one(model, optimizer, lambda x: with_aux_step(model, optimizer, metrics, x))
    loop.state = lambda: nnx.state((model, optimizer, metrics))
    return loop


OF_THE_HEAD = nnx.All(nnx.Param, nnx.PathContains("b"))


@nnx.jit
def filtered_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, OF_THE_HEAD))(model, x)
    optimizer.update(model, grads)
    return loss


def frozen(factor: float) -> Loop:
    """Only the head learns, so no gradient reaches `a`."""

    def seen(call, factor):
        found = figures(call, factor)
        del found["a", "gradient"]
        return found

    model = Net(factor=factor)
    optimizer = nnx.Optimizer(model, SGD, wrt=OF_THE_HEAD)
    return _one(model, optimizer, lambda x: filtered_step(model, optimizer, x), figures=seen)


@nnx.jit
def remat_step(model, optimizer, x):
    def loss_fn(model, x):
        return (nnx.remat(lambda model, x: model(x))(model, x) ** 2).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return loss


def remat(factor: float) -> Loop:
    model = Net(factor=factor)
    optimizer = by(model)
    return _one(model, optimizer, lambda x: remat_step(model, optimizer, x))


@nnx.jit
def checkpoint_step(model, optimizer, x):
    graphdef, params = nnx.split(model)

    @jax.checkpoint
    def loss_fn(params, x):
        return loss_of(nnx.merge(graphdef, params), x)

    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    optimizer.update(model, grads)
    return loss


def checkpoint_in_the_loss(factor: float) -> Loop:
    """The step splits the model, and the loss merges it."""
    model = Net(factor=factor)
    optimizer = by(model)
    return _one(model, optimizer, lambda x: checkpoint_step(model, optimizer, x))


SCHEDULED = optax.inject_hyperparams(optax.sgd)(
    learning_rate=optax.warmup_cosine_decay_schedule(0.0, 0.2, 2, 5)
)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), SCHEDULED)


def schedule_and_clipping(factor: float) -> Loop:
    model = Net(factor=factor)
    optimizer = nnx.Optimizer(model, CLIPPED, wrt=nnx.Param)
    return _one(model, optimizer, lambda x: jitted(model, optimizer, x))


@nnx.jit
def in_one_step(both, x):
    loss, grads = nnx.value_and_grad(loss_of)(both.model, x)
    both.update(grads)
    return loss


def model_and_optimizer(factor: float) -> Loop:
    both = nnx.ModelAndOptimizer(Net(factor=factor), SGD)
    return _one(both.model, both, lambda x: in_one_step(both, x))


class Trainer:
    """A trainer with callbacks, which keeps its step for as long as it lives."""

    def __init__(self, model, optimizer, callbacks):
        self.model, self.optimizer, self.callbacks = model, optimizer, callbacks
        self.step_number = 0
        self.compiled = nnx.jit(self.loss_and_update)

    def loss_and_update(self, model, optimizer, x):
        return update(model, optimizer, x)

    def train_step(self, x):
        loss = self.compiled(self.model, self.optimizer, x)
        self.step_number += 1
        for callback in self.callbacks:
            callback(self.step_number, float(loss))
        return loss


def trainer(factor: float) -> Loop:
    model, seen = Net(factor=factor), []
    optimizer = by(model)
    it = Trainer(model, optimizer, [lambda step, loss: seen.append((step, loss))])
    return _one(model, optimizer, it.train_step)


# ------------------------------------------------------------- several batches a step


MULTI = optax.MultiSteps(SGD, every_k_schedule=2)


def multi_steps(factor: float) -> Loop:
    model = Net(factor=factor)
    optimizer = nnx.Optimizer(model, MULTI, wrt=nnx.Param)
    return _one(model, optimizer, lambda x: jitted(model, optimizer, x))


def halves(x):
    return x.reshape(2, -1, x.shape[-1])


def _two_calls(model):
    return lambda x: [Call(numbers_of(model), part) for part in halves(x)]


@nnx.jit
def accumulated(model, optimizer, x):
    total = None
    for part in halves(x):
        loss, grads = nnx.value_and_grad(loss_of)(model, part)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    optimizer.update(model, jax.tree.map(lambda g: g / 2, total))
    return loss


def accumulation(factor: float) -> Loop:
    model = Net(factor=factor)
    optimizer = by(model)
    step = lambda x: accumulated(model, optimizer, x)  # noqa: E731
    loop = _one(model, optimizer, step, unordered=True)
    loop.calls = _two_calls(model)
    return loop


@nnx.jit
def scanned(model, optimizer, x):
    graphdef, params = nnx.split(model)

    def one(total, part):
        loss, grads = jax.value_and_grad(lambda p: loss_of(nnx.merge(graphdef, p), part))(params)
        return jax.tree.map(jnp.add, total, grads), loss

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, losses = jax.lax.scan(one, zeros, halves(x))
    optimizer.update(model, jax.tree.map(lambda g: g / 2, total))
    return losses.mean()


def accumulation_by_scan(factor: float) -> Loop:
    """Micro-batches go through `lax.scan`."""
    model = Net(factor=factor)
    optimizer = by(model)
    loop = _one(model, optimizer, lambda x: scanned(model, optimizer, x))
    loop.calls = _two_calls(model)
    return loop


def _descent(model):
    """The calls of several steps of gradient descent in one program."""

    def calls(xs):
        weights = numbers_of(model)
        for x in xs:
            call = Call(weights, x)
            yield call
            weights = descended(weights, gradient_of(call, model.factor))

    return calls


@nnx.jit
def steps_by_scan(model, optimizer, xs):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def one(both, x):
        return both, update(*both, x)

    _, losses = one((model, optimizer), xs)
    return losses[-1]


def scan_over_steps(factor: float) -> Loop:
    model = Net(factor=factor)
    optimizer = by(model)
    loop = _one(model, optimizer, lambda xs: steps_by_scan(model, optimizer, xs))
    loop.calls, loop.batches = _descent(model), [jnp.stack(batches(3))] * 3
    return loop


# ------------------------------------------------------------- figures of another kind


SCALE = 64.0


@nnx.jit
def scaled_step(model, optimizer, scale, x):
    def loss_fn(model):
        return loss_of(model, x).astype(jnp.float32) * scale[...]

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    grads = jax.tree.map(lambda g: g / scale[...], grads)
    finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
    before = nnx.state((model, optimizer))
    optimizer.update(model, grads)
    after = nnx.state((model, optimizer))
    nnx.update(
        (model, optimizer), jax.tree.map(lambda a, b: jnp.where(finite, a, b), after, before)
    )
    scale[...] = jnp.where(finite, scale[...], scale[...] / 2)
    return loss / scale[...]


def loss_scaling(factor: float) -> Loop:
    """Mixed precision: the scaled cotangents are seen, because these are computed."""
    model = Net(factor=factor)
    for layer in (model.a, model.b):
        layer.dtype = jnp.bfloat16
    optimizer, scale = by(model), nnx.Variable(jnp.array(SCALE))
    loop = _one(model, optimizer, lambda x: scaled_step(model, optimizer, scale, x), tolerance=3e-2)
    loop.calls = lambda x: [Call(numbers_of(model), x, lambda y: SCALE * 2 * y / y.size)]
    return loop


@nnx.jit
def private_step(model, optimizer, x):
    def one(model, x):
        return nnx.grad(loss_of)(model, x[None])

    grads = nnx.vmap(one, in_axes=(None, 0))(model, x)

    def clipped(g):
        norm = jnp.sqrt((g.reshape(len(g), -1) ** 2).sum(-1))
        return (g * jnp.minimum(1, 1 / (norm + 1e-6)).reshape(-1, *[1] * (g.ndim - 1))).mean(0)

    optimizer.update(model, jax.tree.map(clipped, grads))
    return loss_of(model, x)


def per_example_gradients(factor: float) -> Loop:
    """As for differential privacy; the loss is evaluated after the update."""
    model = Net(factor=factor)
    optimizer = by(model)
    loop = _one(model, optimizer, lambda x: private_step(model, optimizer, x))

    def calls(x):
        before = numbers_of(model)
        of_each = lambda y: 2 * y / y.shape[-1]  # noqa: E731
        yield Call(before, x, of_each)
        grads = [gradient_of(Call(before, row[None]), factor) for row in np.asarray(x)]
        norm = lambda g: min(1, 1 / (np.linalg.norm(g) + 1e-6))  # noqa: E731
        mean = {n: np.mean([g[n] * norm(g[n]) for g in grads], axis=0) for n in before}
        yield Call(descended(before, mean), x, None)

    loop.calls = calls
    return loop


class Adapted(Net):
    """Its first layer is a Linear with a LoRA."""

    def __init__(self, factor):
        super().__init__(factor=factor)
        self.a = nnx.LoRA(
            3, 1, 4, base_module=self.a, rngs=nnx.Rngs(3), b_initializer=nnx.initializers.ones
        )


@nnx.jit
def lora_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)
    optimizer.update(model, grads)
    return loss


def lora(factor: float) -> Loop:
    def seen(call, factor):
        weights = dict(call.weights)
        base = {n: weights.pop(f"a/base_module/{n}") for n in ("kernel", "bias")}
        beside = weights.pop("a/lora_a") @ weights.pop("a/lora_b")
        weights |= {"a/kernel": base["kernel"] + beside, "a/bias": base["bias"]}
        found = figures(Call(weights, call.x, call.back), factor)
        found["a/base_module", "output"] = (
            np.asarray(call.x, np.float64) @ base["kernel"] + base["bias"]
        )
        return found

    model = Adapted(factor)
    optimizer = nnx.Optimizer(model, SGD, wrt=nnx.LoRAParam)
    return _one(model, optimizer, lambda x: lora_step(model, optimizer, x), figures=seen)


@nnx.jit
def evaluated(model, x):
    return loss_of(model, x)


def train_and_eval(factor: float) -> Loop:
    """The model changes its mode at each step, and is evaluated on a smaller batch."""
    model = Net(factor=factor)
    model.drop = nnx.Dropout(0.0, rngs=nnx.Rngs(0))
    model.eval()
    optimizer = by(model)

    def step(x):
        model.train()
        jitted(model, optimizer, x)
        model.eval()
        return evaluated(model, x[:3])

    def calls(x):
        first = Call(numbers_of(model), x)
        yield first
        yield Call(descended(first.weights, gradient_of(first, factor)), x[:3], None)

    return _with(model, optimizer, step, calls, evaluates=True)


def _with(model, optimizer, step, calls, **more):
    loop = _one(model, optimizer, step, **more)
    loop.calls = calls
    return loop


def train_and_view(factor: float) -> Loop:
    """The evaluation calls a view of the model."""
    model = Net(factor=factor)
    model.drop = nnx.Dropout(0.0, rngs=nnx.Rngs(0))
    optimizer = by(model)
    training, evaluating = nnx.view(model, deterministic=False), nnx.view(model, deterministic=True)

    def step(x):
        jitted(training, optimizer, x)
        return evaluated(evaluating, x[:3])

    def calls(x):
        first = Call(numbers_of(model), x)
        yield first
        yield Call(descended(first.weights, gradient_of(first, factor)), x[:3], None)

    return _with(model, optimizer, step, calls, evaluates=True)


def early_stopping(factor: float) -> Loop:
    """If the loss does not improve, the best weights are restored."""
    model = Net(factor=factor)
    optimizer = by(model)
    best: list[Any] = []

    def step(x):
        kept = jax.tree.map(jnp.copy, nnx.state((model, optimizer)))
        loss = jitted(model, optimizer, x)
        if best and float(loss) >= best[0][0]:
            nnx.update((model, optimizer), jax.tree.map(jnp.copy, best[0][1]))
        else:
            best[:] = [(float(loss), kept)]
        return loss

    return _one(model, optimizer, step)


LOOPS = (
    plain, donating, eager, update_outside, metrics_and_aux, frozen, remat, checkpoint_in_the_loss,
    schedule_and_clipping, model_and_optimizer, trainer, multi_steps, accumulation,
    accumulation_by_scan, scan_over_steps, loss_scaling, per_example_gradients, lora,
    train_and_eval, train_and_view, early_stopping,
)  # fmt: skip
