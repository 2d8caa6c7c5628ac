"""Tiny healthy models, as found in many repositories.

Few units, few examples, values that begin at 0 and parameters that a mode does not use look like a
fault to a rule that ignores how little it has seen.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from subjects import Net, Subject, ce, classes, enter, gauss, mse, of

ZEROS = nnx.initializers.zeros
small = enter(["stepped"], informs=True)
small_looped = enter(["watched 24"], informs=True)


def regression(n: int, d: int, out: int = 1) -> tuple[jax.Array, jax.Array]:
    x = gauss(n, d)
    return x, jnp.sin(x @ gauss(d, out, seed=1))


# ----------------------------------------------------- few units, few examples


@small
def three_units_for_three_classes():
    return of(Net([4, 3, 3, 3], seed=2), (gauss(18, 4), classes(18, 3)))


@small
def one_weight():
    return of(Net([1, 1]), regression(16, 1), mse, tx=optax.sgd(0.1))


@small_looped
def a_regression_with_two_weights_and_a_large_step():
    return of(Net([2, 1]), regression(8, 2), mse, tx=optax.sgd(0.3))


@small
def six_narrow_layers():
    return of(Net([4, 4, 4, 4, 4, 4, 2], nnx.leaky_relu), (gauss(8, 4), classes(8, 2)))


@small
def six_narrow_relu_layers():
    return of(Net([4, 6, 6, 6, 6, 6, 2], seed=1), (gauss(8, 4), classes(8, 2)))


@small
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


@small
def an_actor_and_a_critic_with_one_observation():
    data = gauss(1, 4), classes(1, 2)
    return Subject(ActorCritic(), data[0], data, advantage)


@small
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


@small
def a_graph_of_four_nodes():
    data = graph(4), classes(4, 3)
    return Subject(GCN(), data[0], data, lambda m, b: ce(m, b))


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


@small
def a_masked_autoencoder_without_a_mask():
    x = gauss(6, 5, 4)
    return Subject(MaskedAutoencoder(), x, (x, x), mse)


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


@small
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


@small
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


@small
def a_diffusion_transformer_that_begins_at_zero():
    x = gauss(8, 4), jnp.linspace(0, 1, 8)
    return Subject(DiT(), x, (x, gauss(8, 4, seed=5)), mse)


@small_looped
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


@small
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


@small_looped
def low_rank_adapters():
    return of(LoRA(), (gauss(8, 6), classes(8, 3)), wrt=nnx.LoRAParam)


@small_looped
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


@small
def a_gate_of_one_unit_that_begins_shut():
    return of(ScalarGate(), (gauss(12, 4), classes(12, 3)))


# --------------------------------------------------- what resembles a fault


class Mixer(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(6, 12, rngs=rngs)
        self.norm = nnx.LayerNorm(12, rngs=rngs)
        self.tokens = nnx.Linear(8, 8, rngs=rngs)
        self.channels = nnx.Linear(12, 12, rngs=rngs)
        self.head = nnx.Linear(12, 4, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        x = x + jnp.swapaxes(nnx.gelu(self.tokens(jnp.swapaxes(self.norm(x), 1, 2))), 1, 2)
        x = x + nnx.gelu(self.channels(x))
        return self.head(x.mean(axis=1))


@small
def a_mixer_of_tokens_and_channels():
    return of(Mixer(), (gauss(16, 8, 6), classes(16, 4)))


class Gated(nnx.Module):
    """A gated linear unit, group norm, and a head that begins at zero."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.value = nnx.Linear(10, 24, rngs=rngs)
        self.gate = nnx.Linear(10, 24, rngs=rngs)
        self.norm = nnx.GroupNorm(24, num_groups=4, rngs=rngs)
        self.head = nnx.Linear(24, 4, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.value(x) * nnx.sigmoid(self.gate(x))))


@small
def a_gated_unit_before_a_head_of_zeros():
    return of(Gated(), (gauss(32, 10), classes(32, 4)))


class Masked(nnx.Module):
    """Scores with -Inf at masked positions, returned by a separate module."""

    class Scores(nnx.Module):
        def __init__(self, rngs):
            self.query = nnx.Linear(8, 8, rngs=rngs)
            self.key = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            scores = self.query(x) @ jnp.swapaxes(self.key(x), 1, 2) / 8**0.5
            return jnp.where(jnp.tril(jnp.ones((6, 6), bool)), scores, -1e30)

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.scores = self.Scores(rngs)
        self.value = nnx.Linear(8, 8, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head((nnx.softmax(self.scores(x)) @ self.value(x)).mean(axis=1))


@small
def scores_that_a_module_masks():
    return of(Masked(), (gauss(16, 6, 8), classes(16, 4)))


class Scaled(nnx.Module):
    """Residual branches that begin at 1e-4 of their usual size (LayerScale)."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Linear(10, 16, rngs=rngs)
        self.branches = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(4)])
        self.scales = nnx.List([nnx.Param(jnp.full(16, 1e-4)) for _ in range(4)])
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for branch, scale in zip(self.branches, self.scales, strict=True):
            x = x + scale[...] * nnx.gelu(branch(x))
        return self.head(x)


@small
def residual_branches_that_begin_small():
    return of(Scaled(), (gauss(32, 10), classes(32, 4)))


class Normalised(nnx.Module):
    def __init__(self, net):
        self.norm = nnx.BatchNorm(10, rngs=nnx.Rngs(0))
        self.net = net

    def __call__(self, x):
        return self.net(self.norm(x))


@small
def pixels_into_a_batch_norm():
    return of(Normalised(Net([10, 32, 4])), (gauss(32, 10) * 40 + 120, classes(32, 4)))


@small
def a_field_over_one_coordinate():
    return of(Net([1, 32, 32, 1], jnp.sin), (gauss(32, 1), gauss(32, 1)), mse)


@small
def an_input_that_is_constant():
    return of(Net([10, 32, 4]), (jnp.ones((8, 10)), classes(8, 4)))


@small
def one_example():
    return of(Net([10, 32, 4]), (gauss(1, 10), classes(1, 4)))


@small
def an_input_of_one_hot_vectors():
    return of(Net([10, 32, 4]), (jax.nn.one_hot(classes(32, 10), 10), classes(32, 4)))


# ------------------------------------------------------------------ optimizers


@small_looped
def a_learning_rate_that_warms_up_from_zero():
    tx = optax.adam(optax.linear_schedule(0.0, 1e-3, 100_000))
    return of(Net([4, 8, 3], nnx.tanh), (gauss(8, 4), classes(8, 3)), tx=tx)


@small_looped
def gradients_that_are_added_up_over_eight_steps():
    tx = optax.MultiSteps(optax.adam(1e-3), 8)
    return of(Net([4, 8, 3], nnx.tanh), (gauss(8, 4), classes(8, 3)), tx=tx)


@small_looped
def a_network_of_which_only_the_head_is_trained():
    head = nnx.All(nnx.Param, nnx.PathContains(1))
    return of(Net([4, 8, 3], nnx.tanh), (gauss(8, 4), classes(8, 3)), wrt=head)
