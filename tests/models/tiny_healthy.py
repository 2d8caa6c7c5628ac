"""Tiny healthy models, as found in many repositories.

Few units, few examples, values that begin at 0 and parameters that a mode does not use look like a
fault to a rule that ignores how little it has seen. `HEALTHY` maps a name to a function that builds
a `Stranger`. Nothing here uses the rules.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from strange import Net, Stranger, ce, classes, gauss, mse, of

Build = Callable[[], Stranger]
HEALTHY: dict[str, Build] = {}
ZEROS = nnx.initializers.zeros


def healthy(build: Build) -> Build:
    HEALTHY[build.__name__.replace("_", " ")] = build
    return build


def regression(n: int, d: int, out: int = 1) -> tuple[jax.Array, jax.Array]:
    x = gauss(n, d)
    return x, jnp.sin(x @ gauss(d, out, seed=1))


# ----------------------------------------------------- few units, few examples


@healthy
def three_units_for_three_classes():
    return of(Net([4, 3, 3, 3], seed=2), (gauss(18, 4), classes(18, 3)))


@healthy
def one_weight():
    return of(Net([1, 1]), regression(16, 1), mse, tx=optax.sgd(0.1))


@healthy
def a_regression_with_two_weights_and_a_large_step():
    return of(Net([2, 1]), regression(8, 2), mse, tx=optax.sgd(0.3))


@healthy
def six_narrow_layers():
    return of(Net([4, 4, 4, 4, 4, 4, 2], nnx.leaky_relu), (gauss(8, 4), classes(8, 2)))


@healthy
def six_narrow_relu_layers():
    return of(Net([4, 6, 6, 6, 6, 6, 2], seed=1), (gauss(8, 4), classes(8, 2)))


@healthy
def a_value_head_of_one_relu_unit():
    return of(Net([4, 8, 1, 1], seed=3), regression(2, 4), mse)


class ActorCritic(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        init = nnx.initializers.orthogonal
        self.torso = nnx.Linear(4, 8, kernel_init=init(2**0.5), rngs=rngs)
        self.policy = nnx.Linear(8, 2, kernel_init=init(0.01), rngs=rngs)
        self.value = nnx.Linear(8, 1, kernel_init=init(1.0), rngs=rngs)

    def __call__(self, x):
        x = nnx.tanh(self.torso(x))
        return self.policy(x), self.value(x)[:, 0]


def advantage(model, batch):
    x, action = batch
    logits, value = model(x)
    gain = jax.lax.stop_gradient(1.0 - value)
    chosen = jnp.take_along_axis(nnx.log_softmax(logits), action[:, None], 1)[:, 0]
    return (-chosen * gain + jnp.square(value - 1.0)).mean()


@healthy
def an_actor_and_a_critic_with_one_observation():
    data = gauss(1, 4), classes(1, 2)
    return Stranger(ActorCritic(), data[0], data, advantage)


@healthy
def a_q_network_with_one_observation():
    return of(Net([4, 2, 2, 2], seed=1), (gauss(1, 4), gauss(1, 2)), mse)


# ------------------------------------------------------------------- graphs


class GCN(nnx.Module):
    def __init__(self, width=6):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, width, rngs=rngs)
        self.second = nnx.Linear(width, 3, rngs=rngs)

    def __call__(self, graph):
        x, adjacency = graph["nodes"], graph["adjacency"]
        return self.second(adjacency @ nnx.relu(adjacency @ self.first(x)))


def graph(n: int) -> dict[str, jax.Array]:
    edges = np.eye(n) + np.eye(n, k=1) + np.eye(n, k=-1)
    adjacency = edges / edges.sum(1, keepdims=True)
    return {"nodes": gauss(n, 3), "adjacency": jnp.asarray(adjacency, jnp.float32)}


@healthy
def a_graph_of_four_nodes():
    data = graph(4), classes(4, 3)
    return Stranger(GCN(), data[0], data, lambda m, b: ce(m, b))


# ------------------------------------------------- what this mode does not use


class MaskedAutoencoder(nnx.Module):
    """Replaces masked patches by a mask token, which an evaluation without a mask never uses."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(4, 8, rngs=rngs)
        self.mask_token = nnx.Param(0.02 * gauss(8))
        self.mix = nnx.Linear(8, 8, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x, mask=None):
        x = self.embed(x)
        if mask is not None:
            x = jnp.where(mask[..., None], self.mask_token[...], x)
        return self.head(nnx.gelu(self.mix(x)))


@healthy
def a_masked_autoencoder_without_a_mask():
    x = gauss(6, 5, 4)
    return Stranger(MaskedAutoencoder(), x, (x, x), mse)


class Inception(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Linear(6, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.auxiliary = nnx.Linear(8, 3, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.gelu(self.stem(x))
        if not self.dropout.deterministic:
            self.auxiliary(x)
        return self.head(self.dropout(x))


@healthy
def an_auxiliary_head_in_evaluation():
    model = Inception()
    model.eval()
    return of(model, (gauss(8, 6), classes(8, 3)))


class Distilled(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.body = nnx.Linear(6, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)
        self.auxiliary = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.gelu(self.body(x))
        return self.head(x), self.auxiliary(x)


@healthy
def an_auxiliary_head_that_this_loss_leaves_out():
    return of(Distilled(), (gauss(8, 6), classes(8, 3)), lambda m, b: ce(lambda x: m(x)[0], b))


# ---------------------------------------------------------- what begins at zero


class DiT(nnx.Module):
    """adaLN-zero: scales, gates and the last layer begin at 0."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(4, 8, rngs=rngs)
        self.time = nnx.Linear(1, 8, rngs=rngs)
        self.modulate = nnx.List(
            [nnx.Linear(8, 24, kernel_init=ZEROS, rngs=rngs) for _ in range(2)]
        )
        self.mlps = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(8, use_bias=False, use_scale=False, rngs=rngs)
        self.last = nnx.Linear(8, 4, kernel_init=ZEROS, rngs=rngs)

    def __call__(self, inputs):
        x, t = inputs
        x, c = self.embed(x), nnx.silu(self.time(t[:, None]))
        for modulate, mlp in zip(self.modulate, self.mlps, strict=True):
            scale, shift, gate = jnp.split(modulate(c), 3, -1)
            x = x + gate * mlp(nnx.silu(self.norm(x) * (1 + scale) + shift))
        return self.last(self.norm(x))


@healthy
def a_diffusion_transformer_that_begins_at_zero():
    x = gauss(8, 4), jnp.linspace(0, 1, 8)
    return Stranger(DiT(), x, (x, gauss(8, 4, seed=5)), mse)


@healthy
def a_last_layer_of_zeros():
    model = Net([4, 8, 8, 2], nnx.tanh)
    model.layers[2] = nnx.Linear(8, 2, kernel_init=ZEROS, rngs=nnx.Rngs(1))
    return of(model, regression(8, 4, 2), mse)


class TwoOutputs(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.body = nnx.Linear(4, 8, rngs=rngs)
        self.mean = nnx.Linear(8, 2, kernel_init=ZEROS, rngs=rngs)
        self.scale = nnx.Linear(8, 2, kernel_init=ZEROS, rngs=rngs)

    def __call__(self, x):
        x = nnx.silu(self.body(x))
        return jnp.concatenate([self.mean(x), self.scale(x)], -1)


def likelihood(model, batch):
    x, y = batch
    mean, log = jnp.split(model(x), 2, -1)
    return (jnp.square(mean - y) * jnp.exp(-2 * log) + 2 * log).mean()


@healthy
def a_mean_and_a_scale_that_begin_at_zero():
    return of(TwoOutputs(), regression(8, 4, 2), likelihood)


class LoRA(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        base = nnx.Linear(6, 8, rngs=rngs)
        self.adapted = nnx.LoRALinear(6, 8, lora_rank=2, rngs=rngs)
        self.adapted.kernel[...] = base.kernel[...]
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.gelu(self.adapted(x)))


@healthy
def low_rank_adapters():
    return of(LoRA(), (gauss(8, 6), classes(8, 3)), wrt=nnx.LoRAParam)


@healthy
def low_rank_adapters_and_a_head():
    return of(LoRA(), (gauss(8, 6), classes(8, 3)), wrt=nnx.Any(nnx.LoRAParam, nnx.Param))


# ------------------------------------------------------ gates, masks, discrete


class ScalarGate(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.body = nnx.Linear(4, 4, rngs=rngs)
        self.gate = nnx.Linear(4, 1, bias_init=nnx.initializers.constant(-5.0), rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(x + nnx.sigmoid(self.gate(x)) * nnx.tanh(self.body(x)))


@healthy
def a_gate_of_one_unit_that_begins_shut():
    return of(ScalarGate(), (gauss(12, 4), classes(12, 3)))


# ------------------------------------------------------------------ optimizers


@healthy
def a_learning_rate_that_warms_up_from_zero():
    tx = optax.adam(optax.linear_schedule(0.0, 1e-3, 100_000))
    return of(Net([4, 8, 3], nnx.tanh), (gauss(8, 4), classes(8, 3)), tx=tx)


@healthy
def gradients_that_are_added_up_over_eight_steps():
    tx = optax.MultiSteps(optax.adam(1e-3), 8)
    return of(Net([4, 8, 3], nnx.tanh), (gauss(8, 4), classes(8, 3)), tx=tx)


@healthy
def a_network_of_which_only_the_head_is_trained():
    head = nnx.All(nnx.Param, nnx.PathContains(1))
    return of(Net([4, 8, 3], nnx.tanh), (gauss(8, 4), classes(8, 3)), wrt=head)
