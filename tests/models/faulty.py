"""Models with one built-in fault, and healthy ones, for the rules; nothing here uses the rules.

`FAULTY` maps a name to `(rule, build)`, `HEALTHY` a name to `build`; `build()` gives a `Subject`:
a model, its input, a loss and a batch, and an optimizer for a training loop.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def labels(n: int, classes: int, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, classes, n))


def classified(model: Any, batch: Any) -> jax.Array:
    x, y = batch
    logits = model(x).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def squared(model: Any, batch: Any) -> jax.Array:
    x, y = batch
    return ((model(x).astype(jnp.float32) - y) ** 2).mean()


@dataclasses.dataclass
class Subject:
    model: Any
    x: Any
    y: Any
    loss: Callable[..., Any] = classified
    lr: float = 1e-3
    sgd: bool = False
    wrt: Any = nnx.Param

    @property
    def batch(self) -> Any:
        return self.x, self.y

    def optimizer(self) -> Any:
        tx = optax.sgd(self.lr) if self.sgd else optax.adam(self.lr)
        return nnx.Optimizer(self.model, tx, wrt=self.wrt)


class MLP(nnx.Module):
    def __init__(self, sizes, act=nnx.relu, *, seed=0, init=None, dtype=None, **more):
        rngs = nnx.Rngs(seed)
        if init is not None:
            more["kernel_init"] = init
        pairs = itertools.pairwise(sizes)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs, dtype=dtype, **more) for a, b in pairs])
        self.act = act

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = self.act(layer(x))
        return self.layers[-1](x)


class ConvNet(nnx.Module):
    def __init__(self, *, seed=0):
        rngs = nnx.Rngs(seed)
        self.conv1 = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean(axis=(1, 2)))


class Attention(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, width, rngs, dtype=None):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs, dtype=dtype)
        self.attn = nnx.MultiHeadAttention(
            2, width, decode=False, rngs=rngs, dtype=dtype, deterministic=True
        )
        self.norm2 = nnx.LayerNorm(width, rngs=rngs, dtype=dtype)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs, dtype=dtype)
        self.down = nnx.Linear(4 * width, width, rngs=rngs, dtype=dtype)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, *, vocab=32, width=16, depth=2, seed=0, dtype=None):
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(vocab, width, rngs=rngs, dtype=dtype)
        self.position = nnx.Param(0.02 * normal(12, width))
        self.blocks = nnx.List([Attention(width, rngs, dtype) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs, dtype=dtype)
        self.head = nnx.Linear(width, vocab, rngs=rngs, dtype=dtype)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.position[...][: tokens.shape[1]].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nnx.Module):
    def __init__(self, cell=nnx.GRUCell, *, seed=0):
        rngs = nnx.Rngs(seed)
        self.rnn = nnx.RNN(cell(6, 16, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x)[:, -1])


class Autoencoder(nnx.Module):
    def __init__(self, *, seed=0):
        rngs = nnx.Rngs(seed)
        self.encoder = nnx.Sequential(
            nnx.Linear(20, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 3, rngs=rngs)
        )
        self.decoder = nnx.Sequential(
            nnx.Linear(3, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 20, rngs=rngs)
        )

    def __call__(self, x):
        return nnx.sigmoid(self.decoder(self.encoder(x)))


class Residual(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.one = nnx.Linear(width, width, rngs=rngs)
        self.two = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.two(nnx.relu(self.one(nnx.relu(self.norm(x)))))


class ResNet(nnx.Module):
    def __init__(self, *, depth=4, seed=0):
        rngs = nnx.Rngs(seed)
        self.stem = nnx.Linear(12, 24, rngs=rngs)
        self.blocks = nnx.List([Residual(24, rngs) for _ in range(depth)])
        self.head = nnx.Linear(24, 5, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(nnx.relu(x))


class Stacked(nnx.Module):
    def __init__(self, *, depth=4, seed=0, gain=1.0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(6, 12, rngs=rngs)

        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return nnx.Linear(12, 12, rngs=rngs)

        self.blocks = make(rngs)
        self.blocks.kernel[...] = self.blocks.kernel[...] * gain
        self.head = nnx.Linear(12, 4, rngs=rngs)

    def __call__(self, x):
        def body(x, block):
            return nnx.tanh(block(x))

        x = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(self.first(x), self.blocks)
        return self.head(x)


class Mixer(nnx.Module):
    def __init__(self, *, seed=0):
        rngs = nnx.Rngs(seed)
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


class Graph(nnx.Module):
    """Two rounds of messages over a fixed graph; the first axis is the nodes."""

    def __init__(self, *, seed=0):
        rngs = nnx.Rngs(seed)
        adjacency = np.random.default_rng(3).random((20, 20)) < 0.2
        adjacency = adjacency + np.eye(20)
        self.edges = jnp.asarray(adjacency / adjacency.sum(axis=1, keepdims=True), jnp.float32)
        self.one = nnx.Linear(6, 16, rngs=rngs)
        self.two = nnx.Linear(16, 16, rngs=rngs)
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        edges = jax.lax.stop_gradient(self.edges)
        x = nnx.relu(self.one(edges @ x))
        return self.head(nnx.relu(self.two(edges @ x)))


# ------------------------------------------------------------------- healthy


def mlp(sizes=(10, 32, 32, 4), **options: Any) -> Subject:
    return Subject(MLP(sizes, **options), normal(32, sizes[0]), labels(32, sizes[-1]))


def conv() -> Subject:
    return Subject(ConvNet(), normal(16, 8, 8, 1), labels(16, 10))


def tokens(**options: Any) -> Subject:
    x = labels(8 * 10, 32).reshape(8, 10)
    return Subject(Transformer(**options), x, x)


def recurrent(cell: Any = nnx.GRUCell) -> Subject:
    return Subject(Recurrent(cell), normal(16, 7, 6), labels(16, 4))


def autoencoder() -> Subject:
    x = nnx.sigmoid(normal(32, 20))
    return Subject(Autoencoder(), x, x, squared)


def resnet() -> Subject:
    return Subject(ResNet(), normal(32, 12), labels(32, 5))


def stacked(**options: Any) -> Subject:
    return Subject(Stacked(**options), normal(32, 6), labels(32, 4))


def mixer() -> Subject:
    return Subject(Mixer(), normal(16, 8, 6), labels(16, 4))


def graph() -> Subject:
    return Subject(Graph(), normal(20, 6), labels(20, 3))


def half() -> Subject:
    return Subject(
        MLP((10, 32, 32, 4), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16),
        normal(32, 10, dtype=jnp.bfloat16),
        labels(32, 4),
    )


HEALTHY: dict[str, Callable[[], Subject]] = {
    "mlp": mlp,
    "tanh mlp": functools.partial(mlp, act=nnx.tanh),
    "conv": conv,
    "transformer": tokens,
    "transformer in bfloat16": functools.partial(tokens, dtype=jnp.bfloat16),
    "gru": recurrent,
    "lstm": functools.partial(recurrent, nnx.OptimizedLSTMCell),
    "autoencoder": autoencoder,
    "resnet": resnet,
    "scanned stack": stacked,
    "mixer": mixer,
    "graph": graph,
    "mlp in bfloat16": half,
}

# -------------------------------------------------------------------- faulty


class Logarithm(MLP):
    def __call__(self, x):
        h = nnx.relu(self.layers[0](x))
        h = self.layers[1](jnp.log(h - 1.0))  # the log of a value that may be negative
        return self.layers[2](h)


class Overflowing(MLP):
    def __call__(self, x):
        h = nnx.relu(self.layers[0](x)) * 8e3
        return self.layers[2](nnx.tanh(self.layers[1](h) * 1e-4))


class Cut(MLP):
    def __call__(self, x):
        h = jax.lax.stop_gradient(nnx.relu(self.layers[0](x)))
        return self.layers[2](nnx.relu(self.layers[1](h)))


class Blind(MLP):
    def __call__(self, x):
        h = nnx.relu(self.layers[0](x))
        return self.layers[2](nnx.relu(self.layers[1](h - h)))


class Forgotten(MLP):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.extra = nnx.Linear(32, 32, rngs=nnx.Rngs(9))


def with_dead(part: int = 32) -> Subject:
    one = mlp()
    one.model.layers[1].bias[...] = one.model.layers[1].bias[...].at[:part].set(-100.0)
    return one


def with_saturated() -> Subject:
    one = mlp(act=nnx.tanh)
    one.model.layers[1].kernel[...] = one.model.layers[1].kernel[...] * 100
    return one


def with_half_precision() -> Subject:
    model = Overflowing((10, 32, 32, 4), dtype=jnp.float16)
    model.layers[1].kernel[...] = model.layers[1].kernel[...] * 2
    return Subject(model, normal(32, 10, dtype=jnp.float16), labels(32, 4))


def with_wide_layer() -> Subject:
    one = half()
    one.model.layers[1] = nnx.Linear(32, 32, rngs=nnx.Rngs(3))
    return one


def with_frozen_norm() -> Subject:
    one = conv()
    one.model.eval()
    one.x = one.x * 3 + 2
    return one


def with_rank_one() -> Subject:
    one = mlp((10, 32, 32, 32, 4))
    kernel = one.model.layers[1].kernel
    kernel[...] = normal(32, 1, seed=5) @ normal(1, 32, seed=6) / 6
    return one


def with_large_steps() -> Subject:
    one = mlp()
    one.lr = 1.0
    return one


FAULTY: dict[str, tuple[str, Callable[[], Subject]]] = {
    "log of a negative number": (
        "nonfinite",
        lambda: Subject(Logarithm((10, 32, 32, 4)), normal(32, 10), labels(32, 4)),
    ),
    "float16 near its end": ("overflow", with_half_precision),
    "dead layer": ("dead-units", with_dead),
    "half of the units dead": ("dead-units", lambda: with_dead(18)),
    "saturated tanh": ("saturated-units", with_saturated),
    "deep sigmoid network": (
        "vanishing-gradient",
        lambda: mlp((10, *[24] * 12, 4), act=nnx.sigmoid),
    ),
    "deep network with large weights": (
        "exploding-gradient",
        lambda: mlp(
            (10, *[24] * 12, 4), init=nnx.initializers.variance_scaling(20.0, "fan_in", "normal")
        ),
    ),
    "stop_gradient": (
        "no-gradient",
        lambda: Subject(Cut((10, 32, 32, 4)), normal(32, 10), labels(32, 4)),
    ),
    "input overwritten": (
        "constant",
        lambda: Subject(Blind((10, 32, 32, 4)), normal(32, 10), labels(32, 4)),
    ),
    "one layer in float32": ("dtype", with_wide_layer),
    "batch norm in eval mode": ("mode", with_frozen_norm),
    "a module never called": (
        "unused",
        lambda: Subject(Forgotten((10, 32, 32, 4)), normal(32, 10), labels(32, 4)),
    ),
    "kernel of rank one": ("collapse", with_rank_one),
    "tiny weights": (
        "collapse",
        lambda: mlp((10, 32, 32, 32, 4), init=nnx.initializers.normal(1e-4)),
    ),
}
"""Faults that a single pass shows."""

ONLY_TRAINING: dict[str, tuple[str, Callable[[], Subject]]] = {
    "learning rate of 1": ("update-ratio", with_large_steps),
}
"""Faults that only a training loop shows."""
