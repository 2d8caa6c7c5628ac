"""Faults in how a model is assembled: constants, dtypes, modes, unused parts, collapse."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from subjects import (
    GPT,
    LOOPS,
    POINTS,
    Autoencoder,
    ConvNet,
    Net,
    ResNet,
    Subject,
    classes,
    fault,
    gauss,
    images,
    mse,
    next_token,
    of,
    tokens,
)

# -------------------------------------------------------------------- constant


class Overwritten(nnx.Module):
    def __init__(self, broken):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(8, 16, rngs=rngs)
        self.b = nnx.Linear(16, 16, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)
        self.broken = broken

    def __call__(self, x):
        x = nnx.relu(self.a(x))
        return self.head(nnx.relu(self.b(self.broken(x))))


@fault("constant")
def an_input_that_is_overwritten_by_ones():
    return of(Overwritten(jnp.ones_like), POINTS())


@fault("constant")
def a_mean_over_the_batch_that_is_broadcast():
    return of(Overwritten(lambda x: jnp.broadcast_to(x.mean(0), x.shape)), POINTS())


class Timed(nnx.Module):
    """Sines and cosines of a time, and a network that knows nothing else."""

    def __init__(self):
        self.time, self.net = Waves(), Net([128, 32, 4])

    def __call__(self, t):
        return self.net(self.time(t))


class Waves(nnx.Module):
    def __call__(self, t):
        angles = t[:, None] * jnp.exp(-jnp.log(10000.0) * jnp.arange(64) / 63)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


@fault("constant")
def a_time_from_0_to_1_where_1000_is_meant():
    return of(Timed(), (jnp.linspace(0, 1, 48), classes(48, 4)))


class OneClass(nnx.Module):
    def __init__(self):
        self.net = Net([8, 16, 1])

    def __call__(self, x):
        return nnx.softmax(self.net(x))


@fault("constant")
def a_softmax_over_one_class():
    x, y = POINTS()
    return of(OneClass(), (x, (y[:, None] > 1).astype(jnp.float32)), mse)


@fault("constant")
def a_layer_norm_of_one_unit():
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.a = nnx.Linear(8, 1, rngs=rngs)
            self.norm = nnx.LayerNorm(1, rngs=rngs)
            self.b = nnx.Linear(1, 4, rngs=rngs)

        def __call__(self, x):
            return self.b(self.norm(self.a(x)))

    return of(Model(), POINTS())


class Clamped(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(40, 16, rngs=rngs)
        self.body = nnx.Linear(16, 16, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids // 100).mean(1)
        return self.head(nnx.relu(self.body(x)))


@fault("constant")
def all_tokens_are_one():
    return of(Clamped(), (tokens(32, 6), classes(32, 4)))


class Doubly(nnx.Module):
    """A scale of 0 on a matrix of 0: neither has a gradient, so neither changes."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(8, 16, rngs=rngs)
        self.b = nnx.Linear(16, 4, rngs=rngs, kernel_init=nnx.initializers.zeros, use_bias=False)
        self.scale = nnx.Param(jnp.zeros(4))

    def __call__(self, x):
        return self.scale[...] * self.b(nnx.relu(self.a(x)))


@fault("constant", "no-gradient")
def a_scale_of_0_on_a_matrix_of_0():
    return of(Doubly(), POINTS())


@fault("constant", "no-gradient", "collapse", "dead-units")
def all_kernels_are_0():
    return of(Net([8, 16, 16, 4], kernel_init=nnx.initializers.zeros), POINTS())


# ----------------------------------------------------------------------- dtype


@fault("dtype")
def one_layer_of_a_bfloat16_gpt_without_dtype():
    bf16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    model = GPT(**bf16)
    model.layers[0].up = nnx.Linear(16, 64, rngs=nnx.Rngs(3))
    return of(model, (tokens(8, 12),), lambda m, b: next_token(m, b[0]))


class Halved(nnx.Module):
    def __call__(self, x):
        return x * np.float32(0.5)


@fault("dtype")
def a_numpy_constant_that_promotes():
    bf16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(8, 16, rngs=rngs, **bf16), nnx.relu, Halved(),
        nnx.Linear(16, 4, rngs=rngs, **bf16),
    )  # fmt: skip
    return of(model, (gauss(32, 8, dtype=jnp.bfloat16), classes(32, 4)))


class Positioned(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(40, 16, param_dtype=jnp.bfloat16, rngs=rngs)
        self.table = np.sin(np.arange(32)[:, None] / 10 ** (np.arange(16) / 4)).astype(np.float32)
        self.a = nnx.Linear(16, 16, param_dtype=jnp.bfloat16, rngs=rngs)
        self.b = nnx.Linear(16, 40, param_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids) + self.table[: ids.shape[1]]
        return self.b(nnx.gelu(self.a(x)))


@fault("dtype")
def a_float32_table_of_positions_in_bfloat16():
    return of(Positioned(), (tokens(8, 12),), lambda m, b: next_token(m, b[0]))


@fault("dtype")
def one_float16_layer_among_float32():
    model = Net([8, 16, 16, 16, 4])
    model.layers[2] = nnx.Linear(16, 16, rngs=nnx.Rngs(5), dtype=jnp.float16)
    return of(model, POINTS())


@fault("dtype")
def a_float32_norm_in_a_bfloat16_convnet():
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            bf16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
            self.a = nnx.Conv(3, 8, (3, 3), rngs=rngs, **bf16)
            self.scale = Scale(8)
            self.b = nnx.Conv(8, 8, (3, 3), rngs=rngs, **bf16)
            self.head = nnx.Linear(8, 4, rngs=rngs, **bf16)

        def __call__(self, x):
            x = nnx.relu(self.scale(self.a(x)))
            return self.head(nnx.relu(self.b(x)).mean(axis=(1, 2)))

    x, y = images()
    return of(Model(), (x.astype(jnp.bfloat16), y))


class Scale(nnx.Module):
    def __init__(self, width):
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x):
        return x * self.scale[...]


# ------------------------------------------------------------------------ mode


@fault("mode")
def trained_after_eval():
    model = ConvNet()
    model.eval()
    x, y = images()
    return of(model, (5 + 3 * x, y))


@fault("mode")
def running_statistics_by_the_constructor():
    x, y = images()
    return of(ConvNet(use_running_average=True), (2 * x + 4, y))


@fault("mode")
def a_batch_norm_over_one_example():
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.a = nnx.Linear(8, 16, rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.b = nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x):
            return self.b(nnx.relu(self.norm(self.a(x))))

    return of(Model(), (gauss(1, 8), classes(1, 4)))


# ---------------------------------------------------------------------- unused


class Spare(nnx.Module):
    def __init__(self, how):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(8, 16, rngs=rngs)
        self.spare = nnx.Linear(16, 16, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)
        self.how = how

    def __call__(self, x):
        x = nnx.relu(self.a(x))
        if self.how == "overwritten":
            y = self.spare(x)
            y = x
            return self.head(y)
        return self.head(x)


@fault("unused")
def a_layer_that_is_never_called():
    return of(Spare("never"), POINTS())


@fault("unused")
def a_layer_whose_result_is_overwritten():
    return of(Spare("overwritten"), POINTS())


@fault("unused")
def the_last_of_a_list_of_blocks_is_skipped():
    class Model(ResNet):
        def __call__(self, x):
            x = self.stem(x)
            for i in range(len(self.blocks) - 1):
                x = self.blocks[i](x)
            return self.head(x.mean(axis=(1, 2)))

    return of(Model(3), images())


@fault("unused")
def a_projection_declared_and_forgotten_in_a_gpt():
    model = GPT()
    model.lm_head = nnx.Linear(16, 40, rngs=nnx.Rngs(5))
    return of(model, (tokens(8, 12),), lambda m, b: next_token(m, b[0]))


@fault("unused", "no-gradient", "constant")
def an_encoder_whose_code_is_multiplied_by_0():
    class Model(Autoencoder):
        def __call__(self, x):
            return self.decoder(0.0 * self.encoder(x))

    x = gauss(64, 12)
    return of(Model(), (x, x), mse)


# -------------------------------------------------------------------- collapse


@fault("collapse")
def all_units_are_copies():
    init = nnx.initializers.constant(0.1)
    x = gauss(64, 8) + 0.5
    return of(Net([8, 32, 32, 4], act=nnx.tanh, kernel_init=init), (x, classes(64, 4)))


@fault("collapse")
def a_kernel_of_rank_one():
    model = Net([16, 32, 32, 4])
    a, b = gauss(32, 1, seed=5), gauss(1, 32, seed=6)
    model.layers[1].kernel[...] = a @ b / 6
    return of(model, (gauss(64, 16), classes(64, 4)))


@fault("collapse")
def weights_of_1e_4():
    model = Net([8, 32, 32, 32, 4], act=nnx.tanh)
    model.layers[1].kernel[...] = model.layers[1].kernel[...] * 1e-4
    return of(model, POINTS())


class AttentionOnly(nnx.Module):
    """Without residual connections tokens become alike (Dong et al. 2021)."""

    def __init__(self, depth=12, width=16):
        rngs = nnx.Rngs(0)
        self.inlet = nnx.Linear(8, width, rngs=rngs)
        self.layers = nnx.List(
            [nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs) for _ in range(depth)]
        )
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@fault("collapse")
def attention_without_residual():
    return of(AttentionOnly(), (gauss(16, 8, 8), classes(16, 4)))


def alike(model, batch):
    a, b = batch
    return jnp.square(model(a) - model(b)).mean()


@fault("collapse", "constant", "vanishing-gradient", ways=LOOPS)
def a_siamese_net_without_negatives():
    a = gauss(64, 8)
    net = Net([8, 32, 32, 16])
    return Subject(net, a, (a, a + 0.3 * gauss(64, 8, seed=1)), alike, tx=optax.adam(3e-2))


@fault("weight-decay", ways=LOOPS)
def weight_decay_that_shrinks_all():
    tx = optax.adamw(1e-2, weight_decay=10.0)
    return of(Net([8, 32, 32, 4], act=nnx.tanh), POINTS(), tx=tx)
