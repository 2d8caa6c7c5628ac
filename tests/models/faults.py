"""Models with one built-in fault in their values, gradients or training."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from subjects import (
    GPT,
    LOOPS,
    POINTS,
    VAE,
    ConvNet,
    Dense,
    Net,
    Recurrent,
    Scanned,
    Subject,
    ViT,
    bce,
    ce,
    classes,
    elbo,
    fault,
    gauss,
    images,
    mse,
    next_token,
    of,
    tokens,
)

# ------------------------------------------------------------------- nonfinite


class LogOfSoftmax(nnx.Module):
    def __init__(self):
        self.net = Net([8, 16, 4])

    def __call__(self, x):
        return jnp.log(nnx.softmax(200 * self.net(x)))


@fault("nonfinite")
def log_of_a_softmax_that_is_0():
    def loss(model, batch):
        x, y = batch
        return -(jax.nn.one_hot(y, 4) * model(x)).sum(-1).mean()

    return of(LogOfSoftmax(), POINTS(), loss)


class Normalised(nnx.Module):
    def __init__(self):
        self.net = Net([8, 16, 6], use_bias=False)

    def __call__(self, x):
        y = self.net(x)
        return y / jnp.sqrt((y * y).sum(-1, keepdims=True))


@fault("nonfinite")
def an_embedding_of_norm_0_is_normalised():
    x = gauss(16, 8).at[3].set(0)
    return of(Normalised(), (x, gauss(16, 6, seed=1)), mse)


@fault("nonfinite")
def a_root_of_0_has_no_derivative():
    def loss(model, batch):
        a, b = batch
        d = jnp.sqrt(jnp.square(model(a) - model(b)).sum(-1))
        return jnp.square(d - 1).mean()

    a = gauss(16, 8)
    return Subject(Net([8, 16, 4]), a, (a, gauss(16, 8, seed=1).at[0].set(a[0])), loss)


class Masked(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.q, self.k, self.v = (nnx.Linear(8, 8, rngs=rngs) for _ in range(3))
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        scores = self.q(x) @ self.k(x).swapaxes(1, 2)
        there = (x != 0).any(-1)
        scores = jnp.where(there[:, None, :], scores, -jnp.inf)
        return self.out((nnx.softmax(scores) @ self.v(x)).mean(1))


@fault("nonfinite")
def a_sequence_that_is_masked_whole():
    x = gauss(8, 5, 8).at[2].set(0)
    return of(Masked(), (x, classes(8, 4)))


@fault("nonfinite")
def one_nan_in_the_batch():
    x, y = images()
    return of(ConvNet(), (x.at[3, 2, 2, 1].set(jnp.nan), y))


@fault("nonfinite")
def one_nan_in_a_scanned_parameter():
    s = Scanned(lambda r: Dense(8, nnx.relu, r), 4, 8)
    s.stack.dense.kernel[...] = s.stack.dense.kernel[...].at[2, 1, 1].set(jnp.nan)
    return of(s, POINTS())


@fault("nonfinite")
def an_exponential_of_a_log_variance_of_200():
    model = VAE()
    model.logvar.bias[...] = jnp.full(4, 200.0)
    return of(model, (gauss(32, 12), None), elbo)


class Probability(nnx.Module):
    def __init__(self):
        self.net = Net([8, 16, 1])

    def __call__(self, x):
        return nnx.sigmoid(100 * self.net(x))


@fault("nonfinite")
def a_cross_entropy_of_a_probability_of_1():
    x, y = POINTS()
    return of(Probability(), (x, (y > 1).astype(jnp.float32)), bce)


@fault("nonfinite", "update-ratio", ways=LOOPS)
def a_regression_that_diverges():
    x, _ = POINTS()
    return of(Net([8, 16, 1]), (x, 5 + x[:, :1]), mse, tx=optax.sgd(8.0))


# -------------------------------------------------------------------- overflow


@fault("overflow")
def float16_that_comes_near_its_end():
    model = Net([8, 32, 32, 4], dtype=jnp.float16)
    model.layers[1].kernel[...] = model.layers[1].kernel[...] * 3000
    return of(model, POINTS())


class Exp(nnx.Module):
    def __call__(self, x):
        return jnp.exp(5 * jnp.abs(x))


class Exponential(nnx.Module):
    def __init__(self, dtype):
        self.body = Net([8, 16, 8], dtype=dtype)
        self.exp = Exp()
        self.head = nnx.Linear(8, 4, rngs=nnx.Rngs(0), dtype=dtype)

    def __call__(self, x):
        return jnp.log1p(jnp.abs(self.head(self.exp(self.body(x)))))


@fault("overflow")
def bfloat16_exponentials():
    return of(Exponential(jnp.bfloat16), (4 * POINTS()[0], POINTS()[1]))


class Scores(nnx.Module):
    def __call__(self, q, k):
        return q @ k.swapaxes(-1, -2)  # not divided by the square root of the width


class Unscaled(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.q, self.k, self.v = (
            nnx.Linear(16, 64, rngs=rngs, dtype=jnp.float16) for _ in range(3)
        )
        self.scores = Scores()
        self.head = nnx.Linear(64, 4, rngs=rngs, dtype=jnp.float16)

    def __call__(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.head((nnx.softmax(self.scores(q, k)) @ v).mean(1))


@fault("overflow")
def float16_attention_scores_that_are_not_scaled():
    return of(Unscaled(), (30 * gauss(8, 6, 16), classes(8, 4)))


# ------------------------------------------------------------------ dead units


@fault("dead-units")
def a_convolution_with_a_bias_of_minus_10():
    class Plain(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.a = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.b = nnx.Conv(8, 8, (3, 3), rngs=rngs, bias_init=nnx.initializers.constant(-10.0))
            self.head = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.b(nnx.relu(self.a(x))))
            return self.head(x.mean(axis=(1, 2)))

    return of(Plain(), images())


@fault("dead-units")
def a_batch_norm_that_shifts_all_below_0():
    model = ConvNet()
    model.body.norm.bias[...] = jnp.full(16, -8.0)
    return of(model, images())


@fault("dead-units")
def positive_inputs_and_negative_weights():
    x = jnp.abs(gauss(64, 8)) + 0.1
    model = Net([8, 32, 16, 4])
    model.layers[0].kernel[...] = -jnp.abs(model.layers[0].kernel[...])
    return of(model, (x, classes(64, 4)))


@fault("dead-units")
def most_units_of_a_sequential_dead():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(8, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 32, rngs=rngs), nnx.relu,
        nnx.Linear(32, 4, rngs=rngs),
    )  # fmt: skip
    model.layers[2].bias[...] = jnp.where(jnp.arange(32) % 4 > 0, -20.0, 0.0)
    return of(model, POINTS())


@fault("dead-units")
def a_relu_written_as_where():
    model = Net([8, 32, 32, 4], act=lambda x: jnp.where(x > 0, x, 0.0))
    model.layers[1].bias[...] = jnp.full(32, -15.0)
    return of(model, POINTS())


@fault("dead-units")
def a_relu_written_as_clip():
    model = Net([8, 32, 32, 4], act=lambda x: jnp.clip(x, 0.0, None))
    model.layers[1].bias[...] = jnp.where(jnp.arange(32) < 24, -15.0, 0.0)
    return of(model, POINTS())


@fault("dead-units")
def a_relu_written_as_a_product():
    model = Net([8, 32, 32, 4], act=lambda x: x * (x > 0))
    model.layers[0].bias[...] = jnp.where(jnp.arange(32) < 24, -15.0, 0.0)
    return of(model, POINTS())


class MyRelu(nnx.Module):
    def __call__(self, x):
        return jnp.maximum(0, x)


@fault("dead-units")
def a_relu_that_is_a_module():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(8, 32, rngs=rngs), MyRelu(), nnx.Linear(32, 32, rngs=rngs), MyRelu(),
        nnx.Linear(32, 4, rngs=rngs),
    )  # fmt: skip
    model.layers[2].bias[...] = jnp.where(jnp.arange(32) < 20, -20.0, 0.0)
    return of(model, POINTS())


@fault("dead-units")
def a_gelu_pushed_far_below_0():
    model = GPT()
    model.layers[1].up.bias[...] = jnp.full(64, -30.0)
    return of(model, (tokens(8, 12),), lambda m, b: next_token(m, b[0]))


@fault("dead-units")
def dead_layers_in_a_scan():
    s = Scanned(lambda r: Dense(16, nnx.relu, r, skip=True), 4, 16)
    s.stack.dense.bias[...] = s.stack.dense.bias[...].at[2].set(-40.0)
    return of(s, POINTS())


@fault("nonfinite", "dead-units", "update-ratio", ways=LOOPS)
def units_that_one_large_step_kills():
    x, y = POINTS()
    return of(Net([8, 64, 64, 4]), (10 * x + 10, y), tx=optax.sgd(1.0))


# ------------------------------------------------------------- saturated units


@fault("saturated-units")
def tanh_with_weights_50_times_too_large():
    model = Net([8, 32, 32, 4], act=nnx.tanh)
    for layer in model.layers:
        layer.kernel[...] = layer.kernel[...] * 50
    return of(model, POINTS())


@fault("saturated-units")
def pixels_up_to_255_into_tanh():
    x = jnp.asarray(np.random.default_rng(0).integers(0, 256, (64, 8)), jnp.float32)
    return of(Net([8, 32, 4], act=jnp.tanh), (x, classes(64, 4)))


class Gated(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inlet = nnx.Linear(8, 16, rngs=rngs)
        self.gate = nnx.Linear(16, 16, rngs=rngs, bias_init=nnx.initializers.constant(20.0))
        self.value = nnx.Linear(16, 16, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = self.inlet(x)
        return self.head(nnx.sigmoid(self.gate(x)) * self.value(x))


@fault("saturated-units")
def a_sigmoid_gate_that_never_closes():
    return of(Gated(), POINTS())


@fault("saturated-units")
def a_vanilla_rnn_with_large_weights():
    model = Recurrent(nnx.SimpleCell)
    model.rnn.cell.dense_i.kernel[...] = model.rnn.cell.dense_i.kernel[...] * 60
    return of(model, (gauss(32, 10, 6), classes(32, 4)))


@fault("saturated-units")
def a_sigmoid_written_by_hand():
    model = Net([8, 32, 32, 4], act=lambda x: 1 / (1 + jnp.exp(-x)))
    model.layers[1].kernel[...] = model.layers[1].kernel[...] * 30
    return of(model, POINTS())


# ------------------------------------------------------- gradients along depth


@fault("vanishing-gradient")
def twelve_sigmoid_layers():
    return of(Net([8, *[32] * 12, 4], act=nnx.sigmoid), POINTS())


@fault("vanishing-gradient")
def ten_scanned_sigmoid_layers():
    return of(Scanned(lambda r: Dense(16, nnx.sigmoid, r), 10, 16), POINTS())


@fault("vanishing-gradient")
def ten_scanned_sigmoid_layers_under_remat():
    return of(Scanned(lambda r: Dense(16, nnx.sigmoid, r), 10, 16, remat=True), POINTS())


@fault("vanishing-gradient", "collapse")
def sixteen_tanh_layers_initialised_too_small():
    init = nnx.initializers.normal(0.05)
    return of(Net([8, *[32] * 16, 4], act=nnx.tanh, kernel_init=init), POINTS())


@fault("exploding-gradient")
def twelve_relu_layers_initialised_too_large():
    init = nnx.initializers.variance_scaling(40.0, "fan_in", "normal")
    return of(Net([8, *[32] * 12, 4], kernel_init=init), POINTS())


@fault("exploding-gradient")
def ten_scanned_linear_layers_that_gain_5_each():
    init = nnx.initializers.variance_scaling(25.0, "fan_in", "normal")
    return of(Scanned(lambda r: Dense(16, lambda x: x, r, kernel_init=init), 10, 16), POINTS())


# ---------------------------------------------------------------- no gradient


class Detached(nnx.Module):
    def __init__(self, cut):
        rngs = nnx.Rngs(0)
        self.encoder = nnx.Linear(8, 16, rngs=rngs)
        self.decoder = nnx.Linear(16, 4, rngs=rngs)
        self.cut = cut

    def __call__(self, x):
        return self.decoder(self.cut(nnx.relu(self.encoder(x))))


@fault("no-gradient")
def stop_gradient_after_the_encoder():
    return of(Detached(jax.lax.stop_gradient), POINTS())


@fault("no-gradient")
def rounded_after_the_encoder():
    return of(Detached(lambda x: jnp.round(4 * x) / 4), POINTS())


@fault("no-gradient")
def cast_to_integers_after_the_encoder():
    return of(Detached(lambda x: (8 * x).astype(jnp.int32).astype(jnp.float32)), POINTS())


@fault("no-gradient")
def sign_after_the_encoder():
    return of(Detached(lambda x: jnp.sign(x - 0.5)), POINTS())


class Quantised(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.encoder = nnx.Linear(8, 6, rngs=rngs)
        self.codes = nnx.Embed(12, 6, rngs=rngs)
        self.decoder = nnx.Linear(6, 8, rngs=rngs)

    def __call__(self, x):
        z = self.encoder(x)
        d = jnp.square(z[:, None] - self.codes.embedding[...]).sum(-1)
        return self.decoder(self.codes(jnp.argmin(d, axis=-1)))


@fault("no-gradient")
def codes_without_a_straight_through_estimator():
    x = gauss(64, 8)
    return of(Quantised(), (x, x), mse)


class TwoHeads(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.trunk = nnx.Linear(8, 16, rngs=rngs)
        self.kind = nnx.Linear(16, 4, rngs=rngs)
        self.box = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.trunk(x))
        return self.kind(x), self.box(x)


@fault("no-gradient", "unused")
def a_head_that_the_loss_forgot():
    return of(TwoHeads(), POINTS(), lambda m, b: ce(lambda x: m(x)[0], b))


@fault("no-gradient", "unused")
def a_head_whose_loss_has_weight_0():
    def loss(m, b):
        kind, box = m(b[0])
        return ce(lambda x: kind, b) + 0.0 * jnp.square(box).mean()

    return of(TwoHeads(), POINTS(), loss)


@fault("no-gradient", ways=LOOPS)
def a_head_that_the_optimizer_does_not_have():
    wrt = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("head")))
    return of(ConvNet(), images(), wrt=wrt)


# --------------------------------------------------------------- update ratio


@fault("update-ratio", ways=LOOPS)
def adam_at_a_learning_rate_of_a_half():
    return of(ViT(), images(), tx=optax.adam(0.5))


@fault("update-ratio", ways=LOOPS)
def sgd_at_a_learning_rate_of_1e_9():
    return of(ConvNet(), images(), tx=optax.sgd(1e-9))


@fault("update-ratio", ways=LOOPS)
def adam_at_a_learning_rate_of_1e_8():
    return of(GPT(), (tokens(8, 12),), lambda m, b: next_token(m, b[0]), tx=optax.adam(1e-8))


@fault("update-ratio", ways=LOOPS)
def a_learning_rate_of_0():
    return of(Net([8, 16, 4]), POINTS(), tx=optax.sgd(0.0))
