"""Small models with one typical fault each; nothing here uses the rules.

`FAULTS` maps a name to `(rules, build)`; one of these rules must come first. `TRAINED` has those
that only a loop can show.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from strange import Net, Stranger, classes, gauss, mse, of, tokens

Build = Callable[[], Stranger]
FAULTS: dict[str, tuple[tuple[str, ...], Build]] = {}
TRAINED: dict[str, tuple[tuple[str, ...], Build]] = {}


def fault(*rules: str, trained: bool = False) -> Callable[[Build], Build]:
    def keep(build: Build) -> Build:
        table = TRAINED if trained else FAULTS
        table[build.__name__.replace("_", " ")] = rules, build
        return build

    return keep


def points(n: int = 32, d: int = 6, k: int = 3) -> tuple[jax.Array, jax.Array]:
    return gauss(n, d), classes(n, k)


class Around(nnx.Module):
    """Two layers with a function between them."""

    def __init__(self, between, width=16, d=6, k=3, **more):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(d, width, rngs=rngs, **more)
        self.b = nnx.Linear(width, k, rngs=rngs, **more)
        self.between = between

    def __call__(self, x):
        return self.b(self.between(self.a(x)))


# ----------------------------------------------------------------- NaN and Inf


@fault("nonfinite")
def a_deviation_of_one_example_without_its_mean():
    return of(Around(lambda x: x / x.std(0, ddof=1)), points(1))


@fault("nonfinite")
def a_normalisation_without_an_epsilon():
    def normalised(x):
        x = nnx.relu(x - 8)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    return of(Around(normalised), points())


@fault("nonfinite")
def a_where_that_does_not_guard_the_derivative():
    return of(Around(lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0)), points())


@fault("nonfinite", "overflow")
def a_softplus_written_by_hand():
    return of(Around(lambda x: jnp.log(1 + jnp.exp(100 * x)) - jnp.log(jnp.exp(100 * x))), points())


class MaskedMean(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(9, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        keep = (x > 0)[..., None]
        return self.head((self.embed(x) * keep).sum(1) / keep.sum(1))


@fault("nonfinite")
def a_mean_over_a_sequence_of_padding():
    x = tokens(8, 5, vocabulary=9).at[3].set(0)
    return of(MaskedMean(), (x, classes(8, 3)))


@fault("overflow", "nonfinite")
def activations_that_explode_until_they_are_inf():
    model = Net(
        [6] + [16] * 6 + [3], lambda x: jnp.square(x), kernel_init=nnx.initializers.normal(20)
    )
    return of(model, points())


# ------------------------------------------------------------------ dead units


class Code(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        bias = nnx.initializers.constant(-6.0)
        self.encode = nnx.Linear(6, 10, bias_init=bias, rngs=rngs)
        self.decode = nnx.Linear(10, 6, rngs=rngs)

    def __call__(self, x):
        return self.decode(nnx.relu(self.encode(x)))


@fault("dead-units")
def a_sparse_code_that_is_empty():
    x = gauss(32, 6)
    return Stranger(Code(), x, (x, x), mse)


@fault("dead-units")
def a_layer_of_five_whose_bias_is_minus_seven():
    model = Net([6, 5, 3])
    model.layers[0].bias[...] = model.layers[0].bias[...] - 7
    return of(model, points())


@fault("dead-units")
def bright_pixels_before_negative_weights():
    model = Net([6, 12, 3])
    model.layers[0].kernel[...] = -jnp.abs(model.layers[0].kernel[...])
    return of(model, (jnp.abs(gauss(32, 6)) + 1, classes(32, 3)))


# ------------------------------------------------------------------ saturation


@fault("saturated-units")
def years_into_a_tanh():
    return of(Around(nnx.tanh, width=8, d=2), (gauss(32, 2) + 2000.0, classes(32, 3)))


class Gates(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        wide = nnx.initializers.normal(30.0)
        self.value = nnx.Linear(6, 8, rngs=rngs)
        self.gate = nnx.Linear(6, 8, kernel_init=wide, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.value(x) * nnx.sigmoid(self.gate(x)))


@fault("saturated-units")
def gates_with_weights_of_thirty():
    return of(Gates(), points())


# -------------------------------------------------------- constant and collapse


# ------------------------------------------------------------ gradients in depth


# ---------------------------------------------------------------- no gradient


@fault("no-gradient")
def a_comparison_as_a_gate():
    return of(Around(lambda x: (x > 0).astype(jnp.float32)), points())


class Frozen(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(6, 8, rngs=rngs)
        self.b = nnx.Linear(6, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.gelu(self.a(x)) + jax.lax.stop_gradient(nnx.gelu(self.b(x))))


@fault("no-gradient")
def a_branch_times_a_weight_of_zero():
    class Weighed(Frozen):
        def __call__(self, x):
            return self.head(nnx.gelu(self.a(x)) + 0.0 * nnx.gelu(self.b(x)))

    return of(Weighed(), points())


# ------------------------------------------------------------- the model itself


@fault("mode")
def a_batch_norm_over_one_vector():
    class Normed(Around):
        def __init__(self):
            super().__init__(nnx.gelu)
            self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.b(nnx.gelu(self.norm(self.a(x))))

    return of(Normed(), points(1))


# -------------------------------------------------------------------- training


@fault("update-ratio", "nonfinite", trained=True)
def sgd_with_a_learning_rate_of_a_thousand():
    return of(Net([6, 16, 3], nnx.tanh), points(), tx=optax.sgd(1000.0))


@fault("update-ratio", trained=True)
def adamw_at_a_billionth():
    return of(Net([6, 16, 3], nnx.tanh), points(), tx=optax.adamw(1e-9, weight_decay=0.0))


@fault("no-gradient", trained=True)
def an_encoder_that_the_optimizer_was_not_given():
    wrt = nnx.All(nnx.Param, nnx.Not(nnx.PathContains(0)))
    return of(Net([6, 16, 16, 3], nnx.tanh), points(), wrt=wrt)


@fault("mode", trained=True)
def a_training_in_the_mode_of_evaluation():
    class Normed(Around):
        def __init__(self):
            super().__init__(nnx.gelu)
            self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.b(nnx.gelu(self.norm(5 + 4 * self.a(x))))

    model = Normed()
    model.eval()
    return of(model, points())


@fault("vanishing-gradient", "saturated-units", "collapse", trained=True)
def ten_sigmoid_layers_with_plain_sgd():
    return of(Net([6] + [12] * 10 + [3], nnx.sigmoid), points(), tx=optax.sgd(1e-2))


@fault("exploding-gradient", "update-ratio", "overflow", "nonfinite", trained=True)
def ten_layers_that_gain_four_with_plain_sgd():
    init = nnx.initializers.variance_scaling(16.0, "fan_in", "normal")
    model = Net([6] + [12] * 10 + [3], nnx.leaky_relu, kernel_init=init)
    return of(model, points(), tx=optax.sgd(1e-3))
