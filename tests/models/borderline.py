"""Healthy models that resemble faulty ones, and faults that are easily missed; see `faulty`."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from faulty import MLP, ConvNet, Subject, labels, mlp, normal, squared
from flax import nnx


class Siamese(nnx.Module):
    """Two inputs go through one encoder; the result is a distance."""

    def __init__(self):
        self.encoder = MLP((8, 24, 12))

    def __call__(self, pair):
        a, b = self.encoder(pair[:, 0]), self.encoder(pair[:, 1])
        return jnp.square(a - b).sum(axis=-1, keepdims=True)


class Variational(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.encode = nnx.Linear(20, 16, rngs=rngs)
        self.mean = nnx.Linear(16, 2, rngs=rngs)
        self.spread = nnx.Linear(16, 2, rngs=rngs)
        self.decode = MLP((2, 16, 20))
        self.rngs = rngs

    def __call__(self, x):
        h = nnx.relu(self.encode(x))
        mean, spread = self.mean(h), jnp.exp(0.5 * self.spread(h))
        return self.decode(mean + spread * jax.random.normal(self.rngs.noise(), mean.shape))


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


class Distilled(nnx.Module):
    def __init__(self):
        self.student, self.teacher = MLP((10, 24, 4)), MLP((10, 48, 4), seed=5)

    def __call__(self, x):
        return self.student(x)


def distilled(model: Any, batch: Any) -> Any:
    target = jax.lax.stop_gradient(model.teacher(batch[0]))
    return jnp.square(model.student(batch[0]) - target).mean()


class Dropped(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.one = nnx.Linear(10, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.two = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        return self.two(self.dropout(nnx.silu(self.one(x))))


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


class Sine(nnx.Module):
    """A field over one coordinate: the first layer has one input."""

    def __init__(self):
        self.net = MLP((1, 32, 32, 1), act=jnp.sin)

    def __call__(self, x):
        return self.net(x)


class Tied(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(20, 12, rngs=nnx.Rngs(0))
        self.mix = nnx.Linear(12, 12, rngs=nnx.Rngs(1))

    def __call__(self, tokens):
        return self.embed.attend(nnx.tanh(self.mix(self.embed(tokens))))


def pixels() -> Subject:
    x = jnp.asarray(normal(32, 10) * 40 + 120)
    model = MLP((10, 32, 4))
    return Subject(Normalised(model), x, labels(32, 4))


class Normalised(nnx.Module):
    def __init__(self, net):
        self.norm = nnx.BatchNorm(10, rngs=nnx.Rngs(0))
        self.net = net

    def __call__(self, x):
        return self.net(self.norm(x))


HEALTHY: dict[str, Callable[[], Subject]] = {
    "siamese": lambda: Subject(Siamese(), normal(16, 2, 8), normal(16, 1), squared),
    "variational": lambda: Subject(Variational(), normal(32, 20), normal(32, 20), squared),
    "gated": lambda: Subject(Gated(), normal(32, 10), labels(32, 4)),
    "dropout and silu": lambda: Subject(Dropped(), normal(32, 10), labels(32, 4)),
    "masked": lambda: Subject(Masked(), normal(16, 6, 8), labels(16, 4)),
    "layer scale": lambda: Subject(Scaled(), normal(32, 10), labels(32, 4)),
    "one coordinate": lambda: Subject(Sine(), normal(32, 1), normal(32, 1), squared),
    "tied embedding": lambda: Subject(
        Tied(), labels(40, 20).reshape(5, 8), labels(40, 20).reshape(5, 8)
    ),
    "unnormalised input": pixels,
    "constant input": lambda: Subject(MLP((10, 32, 4)), jnp.ones((8, 10)), labels(8, 4)),
    "one example": lambda: Subject(MLP((10, 32, 4)), normal(1, 10), labels(1, 4)),
    "one-hot input": lambda: Subject(
        MLP((10, 32, 4)), jax.nn.one_hot(labels(32, 10), 10), labels(32, 4)
    ),
    "tiny": lambda: Subject(MLP((3, 2, 1), act=nnx.tanh), normal(16, 3), normal(16, 1), squared),
    "sgd": lambda: Subject(MLP((10, 32, 4)), normal(32, 10), labels(32, 4), lr=0.1, sgd=True),
    "deep tanh": lambda: mlp((10, *[24] * 8, 4), act=nnx.tanh),
    "deep relu, He": lambda: mlp((10, *[32] * 12, 4), init=nnx.initializers.he_normal()),
}


class Root(MLP):
    """The gradient of a root at 0."""

    def __call__(self, x):
        h = jnp.maximum(self.layers[0](x), 0.0)
        return self.layers[2](nnx.relu(self.layers[1](jnp.sqrt(h))))


class Divided(MLP):
    def __call__(self, x):
        h = self.layers[0](x)
        h = h / jnp.maximum(h.sum(axis=-1, keepdims=True) - 1e9, 0.0)
        return self.layers[2](nnx.relu(self.layers[1](h)))


class WrongAxis(MLP):
    """A softmax over an axis of length one."""

    def __call__(self, x):
        h = nnx.relu(self.layers[0](x))
        gate = nnx.softmax(self.layers[1](h)[..., None], axis=-1)[..., 0]
        return self.layers[2](gate)


class Rounded(MLP):
    def __call__(self, x):
        h = nnx.relu(self.layers[0](x))
        return self.layers[2](nnx.relu(self.layers[1](jnp.round(4 * h))))


class Overwritten(MLP):
    """A branch whose result is not used."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.skip = nnx.Linear(10, 4, rngs=nnx.Rngs(4))

    def __call__(self, x):
        y = self.skip(x)
        y = super().__call__(x)
        return y


class Huge(MLP):
    def __call__(self, x):
        h = nnx.relu(self.layers[0](x)) * 1e20
        return self.layers[2](nnx.tanh(self.layers[1](h) * 1e-20))


def deep(act: Any, gain: float, depth: int = 10) -> Subject:
    init = nnx.initializers.variance_scaling(gain, "fan_in", "normal")
    return mlp((10, *[24] * depth, 4), act=act, init=init)


def conv_dead() -> Subject:
    model = ConvNet()
    model.norm1.bias[...] = jnp.full(8, -50.0)
    return Subject(model, normal(16, 8, 8, 1), labels(16, 10))


def gated_shut() -> Subject:
    one = mlp((10, 32, 32, 4), act=nnx.sigmoid)
    one.model.layers[0].kernel[...] = one.model.layers[0].kernel[...] * 200
    return one


def small_dtype() -> Subject:
    model = MLP((10, 32, 32, 32, 4))
    model.layers[1].dtype = jnp.dtype(jnp.float16)
    return Subject(model, normal(32, 10), labels(32, 4))


def lone_norm() -> Subject:
    return Subject(Normalised(MLP((10, 32, 4))), normal(1, 10), labels(1, 4))


def copies() -> Subject:
    one = mlp((10, 32, 32, 32, 4))
    kernel = one.model.layers[1].kernel
    kernel[...] = jnp.repeat(kernel[...][:, :1], 32, axis=1)
    return one


FAULTY: dict[str, tuple[str, Callable[[], Subject]]] = {
    "root at zero": (
        "nonfinite",
        lambda: Subject(Root((10, 32, 32, 4)), normal(32, 10), labels(32, 4)),
    ),
    "division by zero": (
        "nonfinite",
        lambda: Subject(Divided((10, 32, 32, 4)), normal(32, 10), labels(32, 4)),
    ),
    "squares overflow": (
        "overflow",
        lambda: Subject(Huge((10, 32, 32, 4)), normal(32, 10), labels(32, 4)),
    ),
    "dead convolution": ("dead-units", conv_dead),
    "saturated sigmoid": ("saturated-units", gated_shut),
    "deep small tanh": ("vanishing-gradient", lambda: deep(nnx.tanh, 0.15)),
    "deep large linear": ("exploding-gradient", lambda: deep(lambda x: x, 16.0)),
    "rounded": (
        "no-gradient",
        lambda: Subject(Rounded((10, 32, 32, 4)), normal(32, 10), labels(32, 4)),
    ),
    "softmax over one": (
        "constant",
        lambda: Subject(WrongAxis((10, 32, 32, 4)), normal(32, 10), labels(32, 4)),
    ),
    "one layer in float16": ("dtype", small_dtype),
    "float32 fed to a bfloat16 model": (
        "dtype",
        lambda: Subject(
            MLP((10, 32, 32, 4), param_dtype=jnp.bfloat16), normal(32, 10), labels(32, 4)
        ),
    ),
    "batch norm of one": ("mode", lone_norm),
    "result thrown away": (
        "unused",
        lambda: Subject(Overwritten((10, 32, 4)), normal(32, 10), labels(32, 4)),
    ),
    "units are copies": ("collapse", copies),
}

ONLY_TRAINING: dict[str, tuple[str, Callable[[], Subject]]] = {
    "learning rate of 1e-9": (
        "update-ratio",
        lambda: Subject(MLP((10, 32, 32, 4)), normal(32, 10), labels(32, 4), lr=1e-8),
    ),
    "sgd that overshoots": (
        "update-ratio",
        lambda: Subject(MLP((10, 32, 4)), normal(32, 10), labels(32, 4), lr=30.0, sgd=True),
    ),
}

ON_PURPOSE = {"distilled": lambda: Subject(Distilled(), normal(32, 10), None, distilled)}
"""A teacher that is not trained on purpose; a finding of severity "info" is fine."""
