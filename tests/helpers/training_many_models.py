"""Training loops of several models of equal structure, of which one is watched.

Each function builds a loop; see `training`. One model's figures must never be another's.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from training import (
    RATE,
    Call,
    Loop,
    Net,
    back_of_loss,
    by,
    descended,
    figures,
    forward,
    gradient_of,
    loss_of,
    numbers_of,
    with_members,
)


def _loop(model: Net, step: Any, calls: Any, state: Any, **more: Any) -> Loop:
    return Loop(model, step, calls, lambda: nnx.state(state), model.factor, **more)


def distance(model, x, target):
    return ((model(x) - target) ** 2).mean()


def back_to(target: Any) -> Any:
    """The cotangent in `distance`."""
    return lambda y: 2 * (y - target) / y.size


def fit(model, optimizer, x, target):
    loss, grads = nnx.value_and_grad(distance)(model, x, target)
    optimizer.update(model, grads)
    return loss


jitted_fit = nnx.jit(fit)


@nnx.jit
def critic_step(critic, optimizer, generator, x):
    def loss_fn(critic):
        return (critic(generator(x)) ** 2).mean() - critic(x).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(critic)
    optimizer.update(critic, grads)
    return loss


@nnx.jit
def generator_step(generator, optimizer, critic, x):
    loss, grads = nnx.value_and_grad(lambda g: -critic(g(x)).mean())(generator)
    optimizer.update(generator, grads)
    return loss


def _gan(factor: float) -> tuple[Net, Net, Any, list[Any]]:
    generator, critic = Net(0, factor=factor, outs=3), Net(1, outs=3)
    optimizers = by(critic), by(generator)

    def step(x):
        critic_step(critic, optimizers[0], generator, x)
        return generator_step(generator, optimizers[1], critic, x)

    return generator, critic, step, [generator, critic, *optimizers]


def gan_generator(factor: float) -> Loop:
    """Each program has both models; the generator is watched."""
    generator, critic, step, state = _gan(factor)

    def calls(x):
        weights = numbers_of(generator)
        yield Call(weights, x, None)
        y, judge = forward(weights, x, factor)[1], numbers_of(critic)
        judged = forward(judge, y)[1]
        fake = gradient_of(Call(judge, y))
        real = gradient_of(Call(judge, x, lambda y: -np.ones_like(y) / y.size))
        judge = descended(judge, {n: fake[n] + real[n] for n in fake})
        a = forward(judge, y)[0]
        da = (-np.ones_like(judged) / judged.size @ judge["b/kernel"].T) * (1 - np.tanh(a) ** 2)
        yield Call(weights, x, lambda _: da @ judge["a/kernel"].T)

    return _loop(generator, step, calls, state, told=True)


@nnx.jit
def averaged_step(model, ema, optimizer, x):
    _, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    mixed = jax.tree.map(lambda e, m: 0.5 * e + 0.5 * m, nnx.state(ema), nnx.state(model))
    nnx.update(ema, mixed)
    return loss_of(ema, x)


def average(factor: float) -> Loop:
    """A second model holds a moving average of the parameters and is evaluated."""
    model = Net(factor=factor)
    ema, optimizer = Net(), by(model)
    return _loop(
        model,
        lambda x: averaged_step(model, ema, optimizer, x),
        lambda x: [Call(numbers_of(model), x)],
        [model, ema, optimizer],
        told=True,
    )


@nnx.jit
def diffusion_step(model, ema, optimizer, x, level, noise):
    mixed = jnp.sqrt(1 - level) * x + jnp.sqrt(level) * noise
    loss = fit(model, optimizer, mixed, noise)
    nnx.update(ema, jax.tree.map(lambda e, m: 0.9 * e + 0.1 * m, nnx.state(ema), nnx.state(model)))
    return loss


def diffusion(factor: float) -> Loop:
    """The model predicts noise; after every second step the average model samples."""
    model = Net(factor=factor, outs=3)
    ema, optimizer, draws = Net(outs=3), by(model), nnx.Rngs(5)
    sampled: list[Any] = []
    noises: dict[int, Any] = {}

    def noise_of(x):
        if id(x) not in noises:
            level = jax.random.uniform(draws.level(), (len(x), 1), minval=0.1, maxval=0.9)
            noises[id(x)] = level, jax.random.normal(draws.noise(), x.shape)
        return noises[id(x)]

    sample = nnx.jit(lambda model, z: z - model(z))

    def step(x):
        loss = diffusion_step(model, ema, optimizer, x, *noise_of(x))
        sampled.append(sample(ema, x))
        return loss

    def calls(x):
        level, noise = (np.asarray(v, np.float64) for v in noise_of(x))
        mixed = np.sqrt(1 - level) * np.asarray(x, np.float64) + np.sqrt(level) * noise
        return [Call(numbers_of(model), mixed, back_to(noise))]

    return _loop(model, step, calls, [model, ema, optimizer], told=True)


@nnx.jit
def contrastive_step(towers, optimizers, x, z):
    def loss_fn(one, two):
        return -(one(x) * two(z)).sum(-1).mean()

    loss, grads = nnx.value_and_grad(loss_fn, argnums=(0, 1))(*towers)
    for tower, optimizer, grad in zip(towers, optimizers, grads, strict=True):
        optimizer.update(tower, grad)
    return loss


def two_towers(factor: float) -> Loop:
    towers = Net(0, factor=factor), Net(1)
    optimizers = by(towers[0]), by(towers[1])

    def calls(x):
        other = forward(numbers_of(towers[1]), -x)[1]
        yield Call(numbers_of(towers[0]), x, lambda y: -other / len(y))

    step = lambda x: contrastive_step(towers, optimizers, x, -x)  # noqa: E731
    return _loop(towers[0], step, calls, [*towers, *optimizers], told=True)


best_action = nnx.jit(lambda model, x: model(x).argmax(-1))


@nnx.jit
def learn_q(online, target, optimizer, x, reward):
    goal = reward + 0.9 * target(-x).max(-1, keepdims=True)
    return fit(online, optimizer, x, goal)


def deep_q(factor: float) -> Loop:
    """A target network, a replay on the host, and acting with a single observation."""
    online, target = Net(0, factor=factor), Net(0)
    optimizer, replay, seen = by(online), [], [0]

    def step(x):
        action = best_action(online, x[:1])
        replay.append((x, jnp.float32(action.shape[0])))
        x, reward = replay[len(replay) // 2]
        loss = learn_q(online, target, optimizer, x, reward)
        seen[0] += 1
        if seen[0] % 2 == 0:
            nnx.update(target, jax.tree.map(jnp.copy, nnx.state(online)))
        return loss

    def calls(x):
        weights = numbers_of(online)
        yield Call(weights, x[:1], None)
        x = [*(x for x, _ in replay), x][(len(replay) + 1) // 2]
        goal = 1 + 0.9 * forward(numbers_of(target), -x)[1].max(-1, keepdims=True)
        yield Call(weights, x, back_to(goal))

    return _loop(online, step, calls, [online, target, optimizer], told=True)


HORIZON = 3


@nnx.jit
def rollout(policy, start):
    graphdef, state = nnx.split(policy)

    def act(position, _):
        move = jax.vmap(lambda p: nnx.merge(graphdef, state)(p))(position)
        return position + 0.1 * move, position

    return jax.lax.scan(act, start, length=HORIZON)[1]


def on_policy(factor: float) -> Loop:
    """A rollout by scan in vmapped environments, then two epochs over its data."""
    policy = Net(factor=factor, outs=3)
    optimizer = by(policy)

    def step(x):
        seen = rollout(policy, x).reshape(-1, 3)
        for _ in range(2):
            loss = jitted_fit(policy, optimizer, seen, -seen)
        return loss

    def calls(x):
        weights, seen = numbers_of(policy), [np.asarray(x, np.float64)]
        for _ in range(HORIZON):
            yield Call(weights, seen[-1], None)
            seen.append(seen[-1] + 0.1 * forward(weights, seen[-1], factor)[1])
        every = np.concatenate(seen[:-1])
        for _ in range(2):
            call = Call(weights, every, back_to(-every))
            yield call
            weights = descended(weights, gradient_of(call, factor))

    return _loop(policy, step, calls, [policy, optimizer])


@nnx.jit
def preference_step(policy, reference, optimizer, better, worse):
    def loss_fn(policy):
        margin = (policy(better) - reference(better)).sum() - (
            policy(worse) - reference(worse)
        ).sum()
        return -jax.nn.log_sigmoid(0.1 * margin)

    loss, grads = nnx.value_and_grad(loss_fn)(policy)
    optimizer.update(policy, grads)
    return loss


def preference(factor: float) -> Loop:
    """DPO: two calls of the policy and two of the reference in one loss."""
    policy, reference = Net(0, factor=factor), Net(0)
    optimizer = by(policy)

    def calls(x):
        mine, other = numbers_of(policy), numbers_of(reference)
        total = lambda w, x, f=1.0: forward(w, x, f)[1].sum()  # noqa: E731
        margin = total(mine, x, factor) - total(other, x)
        margin -= total(mine, -x, factor) - total(other, -x)
        pull = -0.1 / (1 + np.exp(0.1 * margin))
        yield Call(mine, x, lambda y: pull * np.ones_like(y))
        yield Call(mine, -x, lambda y: -pull * np.ones_like(y))

    step = lambda x: preference_step(policy, reference, optimizer, x, -x)  # noqa: E731
    return _loop(policy, step, calls, [policy, reference, optimizer], told=True)


@nnx.jit
def group_step(policy, optimizer, x, old, advantage):
    def loss_fn(policy):
        ratio = jnp.exp(policy(x) - old)
        return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(policy)
    optimizer.update(policy, grads)
    return loss


scores = nnx.jit(lambda model, x: model(x))


def group_relative(factor: float) -> Loop:
    """GRPO: scores of the old policy, advantages within a group, then one step."""
    policy = Net(factor=factor)
    optimizer = by(policy)

    def advantage_of(old):
        return (old - old.mean(0)) / (old.std(0) + 1e-4)

    def step(x):
        old = scores(policy, x)
        return group_step(policy, optimizer, x, old, advantage_of(old))

    def calls(x):
        weights = numbers_of(policy)
        yield Call(weights, x, None)
        old = forward(weights, x, factor)[1]
        yield Call(weights, x, lambda y: -advantage_of(old) / y.size)  # the ratio is 1

    return _loop(policy, step, calls, [policy, optimizer])


@nnx.jit
def distilled(student, teacher, optimizer, x):
    return fit(student, optimizer, x, jax.lax.stop_gradient(teacher(x)))


def _distillation(factor: float, watched: int) -> Loop:
    pair = [Net(seed, factor=factor if seed == watched else 1.0) for seed in range(2)]
    optimizer = by(pair[0])
    step = lambda x: distilled(*pair, optimizer, x)  # noqa: E731

    def calls(x):
        taught = forward(numbers_of(pair[1]), x, pair[1].factor)[1]
        back = back_to(taught) if watched == 0 else None
        yield Call(numbers_of(pair[watched]), x, back)

    return _loop(pair[watched], step, calls, [*pair, optimizer], told=True)


def student(factor: float) -> Loop:
    return _distillation(factor, 0)


def teacher(factor: float) -> Loop:
    """The teacher is watched: its outputs have no gradient."""
    return _distillation(factor, 1)


@nnx.jit
def meta_step(model, optimizer, x, z):
    def outer(model):
        graphdef, params = nnx.split(model)
        inner = jax.grad(lambda p: loss_of(nnx.merge(graphdef, p), x))(params)
        adapted = jax.tree.map(lambda p, g: p - RATE * g, params, inner)
        return loss_of(nnx.merge(graphdef, adapted), z)

    loss, grads = nnx.value_and_grad(outer)(model)
    optimizer.update(model, grads)
    return loss


def meta(factor: float) -> Loop:
    """MAML: the loss is that of the model after one step of gradient descent."""
    model = Net(factor=factor)
    optimizer = by(model)

    def net(weights, x, at_a, at_b):
        a = x @ weights["a/kernel"] + weights["a/bias"] + at_a
        return jnp.tanh(a) @ weights["b/kernel"] + weights["b/bias"] + at_b

    def twice(call, factor):
        """The call is differentiated for the inner step, and once more through that step."""
        x, found = jnp.asarray(call.x), figures(call, factor)
        weights = {name: jnp.float32(value) for name, value in call.weights.items()}

        def outer(*at):
            loss = lambda w: (net(w, x, *at) ** 2).mean()  # noqa: E731
            adapted = jax.tree.map(lambda w, g: w - RATE * g, weights, jax.grad(loss)(weights))
            return (net(adapted, -x, 0.0, 0.0) ** 2).mean()

        zeros = [jnp.zeros(found[site, "output"].shape) for site in "ab"]
        for site, more in zip("ab", jax.grad(outer, argnums=(0, 1))(*zeros), strict=True):
            found[site, "gradient"] = np.stack([found[site, "gradient"], np.asarray(more)])
        return found | {("", "gradient"): found["b", "gradient"]}

    return _loop(
        model,
        lambda x: meta_step(model, optimizer, x, -x),
        lambda x: [Call(numbers_of(model), x)],
        [model, optimizer],
        figures=twice,
        told=True,
    )


def _members(count: int, factor: float) -> Net:
    return nnx.vmap(lambda key: Net(key, factor=factor))(jax.random.split(jax.random.key(0), count))


@nnx.jit
def ensemble_step(model, optimizer, x):
    def loss_fn(model):
        return nnx.vmap(loss_of, in_axes=(0, None))(model, x).sum()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def ensemble(factor: float) -> Loop:
    """The members are stacked; each is measured, and all of them as one model."""
    model = _members(3, factor)
    optimizer = by(model)

    def of_all(call, factor):
        each = [
            figures(Call({n: v[i] for n, v in call.weights.items()}, call.x, back_of_loss), factor)
            for i in range(3)
        ]
        return with_members(each)

    return _loop(
        model,
        lambda x: ensemble_step(model, optimizer, x),
        lambda x: [Call(numbers_of(model), x)],
        [model, optimizer],
        figures=of_all,
        inspected=False,
    )


LOOPS = (
    gan_generator, average, diffusion, two_towers, deep_q, on_policy, preference, group_relative,
    student, teacher, meta, ensemble,
)  # fmt: skip
