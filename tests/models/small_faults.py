"""Small models with one typical fault each."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from subjects import Net, Subject, classes, enter, gauss, mse, of, tokens


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


@enter(["stepped"], "nonfinite")
def a_deviation_of_one_example_without_its_mean():
    return of(Around(lambda x: x / x.std(0, ddof=1)), points(1))


@enter(["stepped"], "nonfinite")
def a_normalisation_without_an_epsilon():
    def normalised(x):
        x = nnx.relu(x - 8)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    return of(Around(normalised), points())


@enter(["stepped"], "nonfinite")
def a_where_that_does_not_guard_the_derivative():
    return of(Around(lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0)), points())


@enter(["stepped"], "nonfinite", "overflow")
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


@enter(["stepped"], "nonfinite")
def a_mean_over_a_sequence_of_padding():
    x = tokens(8, 5, vocabulary=9).at[3].set(0)
    return of(MaskedMean(), (x, classes(8, 3)))


@enter(["stepped"], "overflow", "nonfinite")
def activations_that_explode_until_they_are_inf():
    model = Net(
        [6] + [16] * 6 + [3], lambda x: jnp.square(x), kernel_init=nnx.initializers.normal(20)
    )
    return of(model, points())


@enter(["stepped"], "nonfinite")
def a_log_of_a_negative_number():
    return of(Around(lambda x: jnp.log(nnx.relu(x) - 1.0)), points())


@enter(["stepped"], "overflow")
def values_whose_squares_overflow():
    class Huge(Net):
        def __call__(self, x):
            h = nnx.relu(self.layers[0](x)) * 1e20
            return self.layers[2](nnx.tanh(self.layers[1](h) * 1e-20))

    return of(Huge([10, 32, 32, 4]), points(32, 10, 4))


# ------------------------------------------------------------------ dead units


class Code(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        bias = nnx.initializers.constant(-6.0)
        self.encode = nnx.Linear(6, 10, bias_init=bias, rngs=rngs)
        self.decode = nnx.Linear(10, 6, rngs=rngs)

    def __call__(self, x):
        return self.decode(nnx.relu(self.encode(x)))


@enter(["stepped"], "dead-units")
def a_sparse_code_that_is_empty():
    x = gauss(32, 6)
    return Subject(Code(), x, (x, x), mse)


@enter(["stepped"], "dead-units")
def a_layer_of_five_whose_bias_is_minus_seven():
    model = Net([6, 5, 3])
    model.layers[0].bias[...] = model.layers[0].bias[...] - 7
    return of(model, points())


# ------------------------------------------------------------------ saturation


class Gates(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        wide = nnx.initializers.normal(30.0)
        self.value = nnx.Linear(6, 8, rngs=rngs)
        self.gate = nnx.Linear(6, 8, kernel_init=wide, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.value(x) * nnx.sigmoid(self.gate(x)))


@enter(["stepped"], "saturated-units")
def gates_with_weights_of_thirty():
    return of(Gates(), points())


# ---------------------------------------------------------------- no gradient


class Frozen(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(6, 8, rngs=rngs)
        self.b = nnx.Linear(6, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.gelu(self.a(x)) + jax.lax.stop_gradient(nnx.gelu(self.b(x))))


@enter(["stepped"], "no-gradient")
def a_branch_times_a_weight_of_zero():
    class Weighed(Frozen):
        def __call__(self, x):
            return self.head(nnx.gelu(self.a(x)) + 0.0 * nnx.gelu(self.b(x)))

    return of(Weighed(), points())


# -------------------------------------------------------------------- training


@enter(["watched 24"], "update-ratio", "nonfinite")
def sgd_with_a_learning_rate_of_a_thousand():
    return of(Net([6, 16, 3], nnx.tanh), points(), tx=optax.sgd(1000.0))


# ----------------------------------------------------------------------- dtype


@enter(["stepped"], "dtype")
def float32_into_parameters_of_bfloat16():
    return of(Net([10, 32, 32, 4], param_dtype=jnp.bfloat16), points(32, 10, 4))
