"""Healthy models of many kinds."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from subjects import (
    GPT,
    LOOPS,
    POINTS,
    VAE,
    Autoencoder,
    ConvNet,
    Dense,
    Layer,
    Net,
    Recurrent,
    ResNet,
    Scanned,
    Subject,
    ViT,
    bce,
    ce,
    classes,
    clusters,
    elbo,
    enter,
    gauss,
    images,
    mse,
    next_token,
    of,
    tokens,
)

WAYS = ("stepped", *LOOPS, "trained")
healthy = enter(WAYS)
frozen = enter(WAYS[:-1], informs=True)


def of_tokens(model, **more):
    return of(model, (tokens(8, 12),), lambda m, b: next_token(m, b[0]), **more)


@healthy
def an_mlp_with_sgd_and_momentum():
    return of(Net([8, 32, 32, 4]), POINTS(), tx=optax.sgd(0.05, momentum=0.9))


@healthy
def one_linear_layer():
    x, _ = POINTS()
    return of(nnx.Linear(8, 1, rngs=nnx.Rngs(0)), (x, x[:, :1]), mse, tx=optax.sgd(0.05))


@healthy
def a_tanh_mlp():
    return of(Net([8, 32, 32, 32, 4], act=nnx.tanh), POINTS())


@healthy
def a_convnet_with_batch_norm():
    return of(ConvNet(), images())


@healthy
def a_resnet():
    return of(ResNet(3), images())


@healthy
def a_resnet_whose_last_scales_begin_at_0():
    return of(ResNet(3, scale=0.0), images())


@healthy
def a_vit():
    return of(ViT(), images())


@healthy
def a_gpt_with_dropout():
    model = GPT(3, rate=0.1)
    model.train()
    return of_tokens(model)


@healthy
def a_gpt_in_bfloat16():
    return of_tokens(GPT(dtype=jnp.bfloat16))


def a_gpt_of_bfloat16_parameters():
    """Adam moves each scale by at most 1e-3; below 1, bfloat16's numbers are 0.004 apart."""
    return of_tokens(GPT(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16))


@healthy
def float16_with_a_scaled_loss():
    def loss(model, batch):
        return 128.0 * ce(model, batch)

    tx = optax.chain(optax.scale(1 / 128), optax.adam(1e-3))
    return of(Net([8, 32, 32, 4], dtype=jnp.float16), POINTS(), loss, tx=tx)


@healthy
def a_gru():
    return of(Recurrent(nnx.GRUCell), (gauss(32, 10, 6), classes(32, 4)))


@healthy
def an_lstm():
    return of(Recurrent(nnx.OptimizedLSTMCell), (gauss(32, 10, 6), classes(32, 4)))


@healthy
def a_vanilla_rnn():
    return of(Recurrent(nnx.SimpleCell), (gauss(32, 10, 6), classes(32, 4)))


class Mixture(nnx.Module):
    def __init__(self, top: int):
        rngs = nnx.Rngs(0)
        self.router = nnx.Linear(8, 4, rngs=rngs)
        self.experts = nnx.List([Net([8, 16, 8], seed=i) for i in range(4)])
        self.head = nnx.Linear(8, 4, rngs=rngs)
        self.top = top

    def __call__(self, x):
        p = nnx.softmax(self.router(x))
        least = jnp.sort(p)[:, -self.top][:, None]
        p = jnp.where(p >= least, p, 0)
        y = sum(p[:, i : i + 1] * e(x) for i, e in enumerate(self.experts))
        return self.head(x + y)


@healthy
def a_mixture_of_experts_top_1():
    return of(Mixture(1), POINTS())


@healthy
def a_mixture_of_experts_top_2():
    return of(Mixture(2), POINTS())


@healthy
def an_autoencoder():
    x, _ = clusters(64, 12, 5)
    return of(Autoencoder(), (x, x), mse)


@healthy
def a_vae():
    x, y = clusters(64, 12, 5)
    return of(VAE(), (x, y), elbo)


class Pair(nnx.Module):
    """A generator and a discriminator; each step trains both, the discriminator on a copy."""

    def __init__(self):
        self.generator = Net([4, 16, 8], seed=1)
        self.discriminator = Net([8, 16, 1], act=nnx.leaky_relu, seed=2)

    def __call__(self, z):
        return self.discriminator(self.generator(z))


@healthy
def a_gan():
    def loss(model, batch):
        z, real = batch
        fake = model.generator(z)
        d_real = model.discriminator(real)
        d_fake = model.discriminator(jax.lax.stop_gradient(fake))
        return (nnx.softplus(-d_real) + nnx.softplus(d_fake)).mean() + nnx.softplus(
            -model.discriminator(fake)
        ).mean()

    z = gauss(64, 4)
    return Subject(Pair(), z, (z, 1 + gauss(64, 8, seed=1)), loss)


@healthy
def a_siamese_net_with_negatives():
    def loss(model, batch):
        a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in map(model, batch))
        logits = a @ b.T / 0.2
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(a))).mean()

    a = gauss(32, 8)
    return Subject(Net([8, 32, 16]), a, (a, a + 0.2 * gauss(32, 8, seed=1)), loss)


class UNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.down = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.middle = nnx.Conv(8, 16, (3, 3), strides=(2, 2), rngs=rngs)
        self.up = nnx.ConvTranspose(16, 8, (2, 2), strides=(2, 2), rngs=rngs)
        self.out = nnx.Conv(16, 3, (3, 3), rngs=rngs)

    def __call__(self, x):
        a = nnx.relu(self.down(x))
        b = nnx.relu(self.up(nnx.relu(self.middle(a))))
        return self.out(jnp.concatenate([a, b], -1))


@healthy
def a_unet():
    x, _ = images()
    return of(UNet(), (x, jnp.roll(x, 1, 1)), mse)


class Heads(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.trunk = Net([8, 32, 16])
        self.kind = nnx.Linear(16, 4, rngs=rngs)
        self.box = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.trunk(x))
        return {"kind": self.kind(x), "box": self.box(x)}


@healthy
def two_heads():
    def loss(model, batch):
        x, _ = batch
        out = model(x)
        return ce(lambda _: out["kind"], batch) + jnp.square(out["box"] - x[:, :2]).mean()

    return of(Heads(), POINTS(), loss)


@healthy
def a_scanned_stack():
    return of(Scanned(lambda r: Dense(16, nnx.relu, r, skip=True), 6, 16), POINTS())


@healthy
def a_scanned_transformer_under_remat():
    class Model(Scanned):
        def __call__(self, x):
            return super().__call__(x).mean(1)

    s = Model(lambda r: Layer(16, r), 3, 16, remat=True)
    return of(s, (gauss(16, 6, 8), classes(16, 4)))


class Ensemble(nnx.Module):
    def __init__(self, n: int = 3):
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Sequential(
                nnx.Linear(8, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 4, rngs=rngs)
            )

        self.members = make(nnx.Rngs(0).split(n))

    def __call__(self, x):
        return nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(self.members, x).mean(0)


@healthy
def a_vmapped_ensemble():
    return of(Ensemble(), POINTS())


class Dropped(nnx.Module):
    def __init__(self, rate: float):
        rngs = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(8, 64, rngs=rngs), nnx.Linear(64, 4, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.b(self.drop(nnx.relu(self.a(x))))


@healthy
def half_of_the_units_dropped():
    return of(Dropped(0.5), POINTS(), tx=optax.adamw(1e-3, weight_decay=1e-2))


class Vectors(nnx.Module):
    """Words and contexts: only embeddings."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.words, self.contexts = (nnx.Embed(200, 8, rngs=rngs) for _ in range(2))

    def __call__(self, pairs):
        return (self.words(pairs[:, 0]) * self.contexts(pairs[:, 1])).sum(-1)


@healthy
def embeddings_only():
    def loss(model, batch):
        pairs, y = batch
        return optax.sigmoid_binary_cross_entropy(model(pairs), y).mean()

    pairs = tokens(64, 2, vocabulary=200)
    y = (pairs.sum(1) % 2).astype(jnp.float32)
    return of(Vectors(), (pairs, y), loss, tx=optax.adam(1e-2))


class Policy(nnx.Module):
    def __init__(self):
        self.body = Net([8, 32, 32], seed=1)
        self.mean = nnx.Linear(32, 2, rngs=nnx.Rngs(2))
        self.logstd = nnx.Param(jnp.zeros(2))

    def __call__(self, x):
        return nnx.tanh(self.mean(nnx.relu(self.body(x)))), self.logstd[...]


@healthy
def a_gaussian_policy():
    def loss(model, batch):
        x, action = batch
        mean, logstd = model(x)
        return (jnp.square((action - mean) * jnp.exp(-logstd)) / 2 + logstd).sum(-1).mean()

    x = gauss(64, 8)
    return of(Policy(), (x, jnp.tanh(x[:, :2])), loss)


class Likely(nnx.Module):
    def __init__(self):
        self.net = Net([8, 16, 1])

    def __call__(self, x):
        return nnx.sigmoid(self.net(x))


@healthy
def a_probability():
    x, y = POINTS()
    return of(Likely(), (x, (y > 1).astype(jnp.float32)), bce)


@healthy
def eight_layers_without_normalisation():
    init = nnx.initializers.he_normal()
    return of(Net([8, *[32] * 8, 4], kernel_init=init), POINTS())


@healthy
def a_deep_post_norm_transformer():
    class Post(nnx.Module):
        def __init__(self, rngs):
            self.ln = nnx.LayerNorm(16, rngs=rngs)
            self.dense = nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            return self.ln(x + nnx.silu(self.dense(x)))

    return of(Scanned(Post, 12, 16), POINTS())


@healthy
def group_norm_and_one_example():
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.a = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
            self.head = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.relu(self.norm(self.a(x))).mean(axis=(1, 2)))

    return of(Model(), images(1))


@healthy
def a_batch_of_4():
    return of(Net([8, 64, 64, 4]), clusters(4, 8, 4))


@healthy
def gates_of_a_highway():
    class Highway(nnx.Module):
        def __init__(self, rngs):
            init = nnx.initializers.constant(-2.0)
            self.gate = nnx.Linear(16, 16, rngs=rngs, bias_init=init)
            self.value = nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            g = nnx.sigmoid(self.gate(x))
            return g * nnx.relu(self.value(x)) + (1 - g) * x

    return of(Scanned(Highway, 6, 16), POINTS())


@healthy
def a_masked_language_model_with_padding():
    class Model(GPT):
        def __call__(self, ids):
            x = self.embed(ids) + self.pos[: ids.shape[1]]
            mask = nnx.make_attention_mask(ids > 0, ids > 0)
            for layer in self.layers:
                x = layer(x, mask)
            return self.embed.attend(self.ln(x))

    ids = tokens(8, 12).at[:, 9:].set(0)
    return of(Model(), (ids,), lambda m, b: next_token(m, b[0]))


@healthy
def a_learned_temperature_and_unequal_scales():
    class Model(nnx.Module):
        def __init__(self):
            self.net = Net([8, 32, 16])
            self.temperature = nnx.Param(jnp.float32(0.0))
            self.head = nnx.Linear(16, 4, rngs=nnx.Rngs(1), use_bias=False)

        def __call__(self, x):
            return self.head(self.net(x)) * jnp.exp(self.temperature[...])

    x, y = POINTS()
    return of(Model(), (x * 10.0 ** jnp.arange(-2, 2).repeat(2), y))


# --------------------------------------------------------- frozen on purpose


class Student(nnx.Module):
    def __init__(self):
        self.online, self.target = Net([8, 32, 4], seed=1), Net([8, 32, 4], seed=2)

    def __call__(self, x):
        return self.online(x)


@frozen
def a_target_network():
    def loss(model, batch):
        x, _ = batch
        return jnp.square(model.online(x) - jax.lax.stop_gradient(model.target(x))).mean()

    return of(Student(), POINTS(), loss)
