"""Networks of agents: states and sampled actions, twin critics, a world model."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from network import Network, gauss, squares

WIDTH = 3


class Count(nnx.Variable):
    """Counts its inputs; the count begins as a Python number."""


class Normaliser(nnx.Module):
    def __init__(self, size: int):
        self.seen, self.mean = Count(1.0), nnx.BatchStat(jnp.zeros(size))
        self.square = nnx.BatchStat(jnp.ones(size))

    def __call__(self, x: Any) -> Any:
        self.seen.set_value(self.seen.get_value() + 1.0)
        rate = 1 / self.seen.get_value()
        self.mean[...] = (1 - rate) * self.mean + rate * x.mean(0)
        self.square[...] = (1 - rate) * self.square + rate * jnp.square(x).mean(0)
        return (x - self.mean[...]) / jnp.sqrt(self.square[...] + 1e-3)


class Acted(NamedTuple):
    state: Any
    action: Any
    log_prob: Any
    value: Any
    metrics: dict[str, Any]
    extra: Any = None


class ActorCritic(nnx.Module):
    """Takes observations in a dict and a state; returns the state and a sampled or given action."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.normaliser = Normaliser(5)
        self.cell = nnx.GRUCell(5, WIDTH, rngs=rngs)
        self.actor, self.critic = nnx.Linear(WIDTH, 4, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)
        self.noise = rngs.action.fork()
        self.deterministic = False

    def __call__(self, state: dict[str, Any], obs: dict[str, Any], replayed: Any = None) -> Acted:
        x = self.normaliser(jnp.concatenate(jax.tree.leaves(obs), -1))
        h, _ = self.cell(state["hidden"], x)
        mean, log_std = jnp.split(self.actor(h), 2, -1)
        raw = mean
        if not self.deterministic:
            raw = mean + jnp.exp(log_std) * jax.random.normal(self.noise(), mean.shape)
        raw = raw if replayed is None else replayed
        log_prob = -0.5 * jnp.square((raw - mean) / jnp.exp(log_std)) - log_std
        state["hidden"] = h  # writes to the caller's dict, as some code does
        metrics = {"std": jnp.exp(log_std).mean(), "policy": "tanh"}
        return Acted(dict(state), jnp.tanh(raw), log_prob.sum(-1), self.critic(h)[:, 0], metrics)


def agent_with_a_state_and_dicts() -> Network:
    obs = {"arm": gauss(2, 2), "body": {"pose": gauss(2, 3, seed=1)}}
    state = {"hidden": jnp.zeros((2, WIDTH)), "step": 3}
    return Network(ActorCritic(rngs=nnx.Rngs(0, action=1)), (state, obs))


class Twins(nnx.Module):
    """Two critics under vmap, their targets and a temperature; takes a key as an argument."""

    def __init__(self, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def made(rngs: nnx.Rngs) -> Any:
            return nnx.Sequential(
                nnx.Linear(4, WIDTH, rngs=rngs), nnx.relu, nnx.Linear(WIDTH, 1, rngs=rngs)
            )

        self.critics = made(rngs)
        self.targets = nnx.clone(self.critics)
        self.actor = nnx.Linear(2, 4, rngs=rngs)
        self.log_alpha = nnx.Param(jnp.zeros(()))

    def q(self, critics: Any, obs: Any, action: Any) -> Any:
        both = jnp.concatenate([obs, action], -1)
        return nnx.vmap(lambda m, x: m(x)[:, 0], in_axes=(0, None))(critics, both)

    def __call__(self, obs: Any, key: Any) -> dict[str, Any]:
        mean, log_std = jnp.split(self.actor(obs), 2, -1)
        action = jnp.tanh(mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape))
        target = jax.lax.stop_gradient(self.q(self.targets, obs, action).min(0))
        q = self.q(self.critics, obs, action)
        return {
            "td": jnp.square(q - target).mean(),
            "actor": (jnp.exp(self.log_alpha[...]) - q.min(0)).mean(),
        }


def twin_critics_under_vmap() -> Network:
    def loss(model: Twins, obs: Any, key: Any) -> Any:
        return sum(model(obs, key).values())

    return Network(Twins(rngs=nnx.Rngs(0)), (gauss(3, 2), jax.random.key(1)), loss=loss)


class Noisy(nnx.Module):
    """A layer that adds new noise to its weights in each call."""

    def __init__(self, inward: int, out: int, *, rngs: nnx.Rngs):
        self.mean = nnx.Param(gauss(inward, out, seed=4))
        self.spread = nnx.Param(jnp.full((inward, out), 0.1))
        self.rngs = rngs

    def __call__(self, x: Any) -> Any:
        noise = jax.random.normal(self.rngs.noise(), self.mean.shape)
        return x @ (self.mean + self.spread[...] * noise)


class Dueling(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.body = nnx.Linear(3, WIDTH, rngs=rngs)
        self.value, self.advantage = Noisy(WIDTH, 1, rngs=rngs), Noisy(WIDTH, 2, rngs=rngs)

    def q_values(self, x: Any) -> Any:
        h = nnx.relu(self.body(x))
        a = self.advantage(h)
        return self.value(h) + a - a.mean(-1, keepdims=True)

    def __call__(self, x: Any, *, mode: str = "greedy", epsilon: float = 0.0) -> Any:
        q = self.q_values(x)
        return q.argmax(-1) if mode == "greedy" else {"q": q, "epsilon": epsilon, "mode": mode}


def dueling_network_with_noise() -> Network:
    loss = lambda m, x, mode, epsilon: squares(m.q_values(x))  # noqa: E731
    kwargs = {"mode": "greedy", "epsilon": 0.1}
    return Network(Dueling(rngs=nnx.Rngs(0, noise=1)), (gauss(3, 3),), kwargs, loss)


def dueling_network_that_tells_all() -> Network:
    kwargs = {"mode": "all", "epsilon": 0.1}
    return Network(Dueling(rngs=nnx.Rngs(0, noise=1)), (gauss(3, 3),), kwargs)


class Belief(NamedTuple):
    deterministic: Any
    stochastic: Any


class World(nnx.Module):
    """A recurrent world model: one step is a method, run over time by nnx.scan."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.cell = nnx.GRUCell(4, WIDTH, rngs=rngs)
        self.prior, self.posterior = (
            nnx.Linear(WIDTH, 4, rngs=rngs),
            nnx.Linear(WIDTH + 2, 4, rngs=rngs),
        )
        self.rngs = rngs.fork()

    def drawn(self, stats: Any) -> Any:
        mean, std = jnp.split(stats, 2, -1)
        return mean + nnx.softplus(std) * jax.random.normal(self.rngs.latent(), mean.shape)

    def observe(self, belief: Belief, inputs: tuple[Any, Any]) -> Any:
        seen, action = inputs
        h, _ = self.cell(belief.deterministic, jnp.concatenate([belief.stochastic, action], -1))
        posterior = self.posterior(jnp.concatenate([h, seen], -1))
        return Belief(h, self.drawn(posterior)), (self.prior(h), posterior)

    def __call__(self, seen: Any, actions: Any) -> Any:
        def step(model: World, belief: Belief, inputs: Any) -> Any:
            return model.observe(belief, inputs)

        start = Belief(jnp.zeros((seen.shape[1], WIDTH)), jnp.zeros((seen.shape[1], 2)))
        axes = nnx.StateAxes({nnx.RngCount: nnx.Carry, ...: None})
        return nnx.scan(step, in_axes=(axes, nnx.Carry, 0), out_axes=(nnx.Carry, 0))(
            self, start, (seen, actions)
        )


def world_model_under_scan() -> Network:
    return Network(World(rngs=nnx.Rngs(0, latent=1)), (gauss(3, 2, 2), gauss(3, 2, 2, seed=1)))


AGENTS: list[Callable[[], Network]] = [
    agent_with_a_state_and_dicts,
    twin_critics_under_vmap,
    dueling_network_with_noise,
    dueling_network_that_tells_all,
    world_model_under_scan,
]
