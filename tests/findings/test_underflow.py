"""Gradients and activations of which float16 keeps one or two bits, or nothing.

Silent: a loss that is multiplied by a scale, the same model in bfloat16 or float32, gradients that
are small here and there, and a softmax that is next to 0 for most classes.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_inspector as nni

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
FAINT = 2.0**-22
X = jax.random.normal(jax.random.key(0), (32, 16))
TOKENS = jax.random.randint(jax.random.key(1), (32, 4), 0, 64)


class Mlp(nnx.Module):
    """Adds `more` to what its first layer returns: the gradient of the one is that of the other."""

    def __init__(self, dtype=F16, *, held=F32, size=1.0):
        k = {"dtype": dtype, "param_dtype": held, "rngs": nnx.Rngs(0)}
        self.first, self.b, self.c = (
            nnx.Linear(16, 32, **k),
            nnx.Linear(32, 8, **k),
            nnx.Linear(8, 4, **k),
        )
        self.first.kernel[...] *= size

    def __call__(self, x, more=0):
        return self.c(nnx.gelu(self.b(nnx.gelu(self.first(x) + more))))


class Convolves(nnx.Module):
    def __init__(self, dtype=F16):
        k = {"dtype": dtype, "rngs": nnx.Rngs(0)}
        self.first, self.head = nnx.Conv(1, 8, (3, 3), **k), nnx.Linear(8, 4, **k)

    def __call__(self, x, more=0):
        return self.head(nnx.gelu(self.first(x.reshape(-1, 4, 4, 1)) + more).mean((1, 2)))


class Words(nnx.Module):
    def __init__(self, dtype=F16):
        k = {"dtype": dtype, "rngs": nnx.Rngs(0)}
        self.first, self.norm = nnx.Embed(64, 16, **k), nnx.LayerNorm(16, **k)
        self.head = nnx.Linear(16, 4, **k)

    def __call__(self, x, more=0):
        return self.head(self.norm(self.first(x) + more))


class Chooses(nnx.Module):
    """A softmax over many classes, most of which are next to 0."""

    def __init__(self):
        self.first = nnx.Linear(16, 512, dtype=F16, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(512, 4, dtype=F16, rngs=nnx.Rngs(1))

    def __call__(self, x, more=0):
        return self.head(jax.nn.softmax(12 * self.first(x) + more))


def loss_of(weight):
    def loss(model, x, more=0):
        return (weight * (model(x, more).astype(F32) - 1) ** 2).mean()

    return loss


def found_in(model, x, weight, tx=None):
    loss = loss_of(weight)
    optimizer = nnx.Optimizer(model, tx or optax.sgd(0.0), wrt=nnx.Param)
    step = nnx.jit(lambda m, o, x: o.update(m, nnx.grad(loss)(m, x)))
    insp = nni.Inspector(model, x, display=False)
    for _ in insp.watch(range(6), every=1):
        step(model, optimizer, x)
    with contextlib.closing(insp):
        return [f for f in insp.findings if f.rule == "underflow"]


def faint(values):
    values = np.asarray(values, np.float64)
    return (np.abs(values[values != 0]) < FAINT).mean(), (values == 0).mean()


PLANTED = {
    "no loss scale": lambda: (Mlp(), X, 1e-4),
    "parameters in float16 too": lambda: (Mlp(held=F16), X, 1e-4),
    "a convolution": lambda: (Convolves(), X, 1e-4),
    "an embedding": lambda: (Words(), TOKENS, 1e-5),
    "a small weight of a term": lambda: (Mlp(), X, 3e-5),
    "many examples": lambda: (Mlp(), jnp.tile(X, (64, 1)), 3e-3),
    "adam": lambda: (Mlp(), X, 1e-4, optax.adam(1e-4, eps=1e-12)),
    "momentum": lambda: (Words(), TOKENS, 1e-5, optax.sgd(1e-2, momentum=0.9)),
    "an attenuated input": lambda: (Convolves(), 0.1 * X, 1e-4),
    "a long way back": lambda: (Mlp(), 1e-2 * X, 1e-4),
}


@pytest.mark.parametrize("name", PLANTED)
def test_gradients_that_float16_hardly_holds_are_a_warning_with_their_share(name):
    model, x, weight, *tx = PLANTED[name]()
    (one,) = found_in(model, x, weight, *tx)
    assert (one.severity, one.site) == ("warning", "first")
    if not tx:  # the parameters are those of each step
        shape = jax.eval_shape(model.first, x if isinstance(model, Mlp) else _entering(model, x))
        more = jnp.zeros(shape.shape, F16)
        part, zeros = faint(jax.jit(jax.grad(lambda m: loss_of(weight)(model, x, m)))(more))
        assert one.evidence["fraction"] == pytest.approx(part, abs=0.02)  # XLA fuses differently
        assert one.evidence["zeros"] == pytest.approx(zeros, abs=0.02)
        assert part > 0.5
    assert "of the gradient of 'first' are below 2.38e-07, next to the smallest number" in one.what
    assert "multiply the loss by a scale" in one.advice


def _entering(model, x):
    return x.reshape(-1, 4, 4, 1) if isinstance(model, Convolves) else x


def test_activations_that_float16_hardly_holds_are_named():
    model = Mlp(size=1e-7)
    (one,) = found_in(model, X, 1e4)
    part, zeros = faint(model.first(X))
    assert part > 0.5
    assert (one.severity, one.site) == ("warning", "first")
    assert one.evidence["fraction"] == pytest.approx(part, abs=1e-3)
    assert one.evidence["zeros"] == pytest.approx(zeros, abs=1e-3)
    assert "of the output of 'first' are below" in one.what


HEALTHY = {
    "a loss scale": lambda: (Mlp(), X, 1e-4 * 2**12),
    "an ordinary loss": lambda: (Mlp(), X, 1.0),
    "bfloat16": lambda: (Mlp(BF16), X, 1e-4),
    "float32": lambda: (Mlp(F32), X, 1e-4),
    "a softmax": lambda: (Chooses(), X, 1e3),
    "an embedding of which most rows are not used": lambda: (Words(), TOKENS % 4, 1.0),
    "training": lambda: (Mlp(), X, 1.0, optax.adam(1e-2)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_gradients_that_the_dtype_holds_are_silent(name):
    assert found_in(*HEALTHY[name]()) == []
