"""Subjects of the rules: what they are made of, and the zoo of them.

A `Subject` is a model, its arguments, a loss over a batch, and its training. `ZOO` has one entry
for each model that the rules judge, which the files of faults and of healthy models add. Most were
made without knowledge of the rules; nothing here uses them.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


@dataclasses.dataclass
class Subject:
    model: Any
    x: Any
    batch: Any
    loss: Callable[..., Any]
    tx: Any = dataclasses.field(default_factory=lambda: optax.adam(1e-3))
    wrt: Any = nnx.Param

    def optimizer(self) -> Any:
        return nnx.Optimizer(self.model, self.tx, wrt=self.wrt)


Build = Callable[[], Subject]
LOOPS = ("watched", "looped", "watched 200")
"""The ways of judging that train the model; `test_models` has all ways."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        build: makes it anew.
        ways: in which ways it is judged.
        rules: of a fault, those of which one must come first; empty for a healthy model.
        informs: whether a finding of severity "info" is right: parts are left untrained on purpose,
            or there is little to see.
    """

    build: Build
    ways: tuple[str, ...]
    rules: tuple[str, ...] = ()
    informs: bool = False


ZOO: dict[str, Entry] = {}


def enter(ways: Sequence[str], *rules: str, informs: bool = False) -> Callable[[Build], Build]:
    """Adds what is decorated to the zoo, by its name."""

    def add(build: Build) -> Build:
        name = build.__name__.replace("_", " ")
        assert name not in ZOO
        ZOO[name] = Entry(build, tuple(ways), rules, informs)
        return build

    return add


def fault(*rules: str, ways: Sequence[str] = ("stepped", *LOOPS)) -> Callable[[Build], Build]:
    """Adds a model with a built-in fault."""
    return enter(ways, *rules)


def gauss(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def classes(n: int, k: int, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, k, n))


def tokens(*shape: int, vocabulary: int = 40, seed: int = 2) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocabulary, shape))


def clusters(n: int, d: int, k: int, seed: int = 3) -> tuple[jax.Array, jax.Array]:
    """Points around k centres, and the centre of each: data that a classifier can learn."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, k, n)
    x = rng.normal(size=(k, d))[y] + 0.5 * rng.normal(size=(n, d))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y)


POINTS = functools.partial(clusters, 64, 8, 4)


def images(n: int = 16, size: int = 12, k: int = 4, seed: int = 4) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, k, n)
    x = rng.normal(size=(k, size, size, 3))[y] + rng.normal(size=(n, size, size, 3))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y)


def ce(model: Any, batch: Any) -> jax.Array:
    x, y = batch
    logits = model(x).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def mse(model: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.square(model(x).astype(jnp.float32) - y).mean()


def next_token(model: Any, batch: Any) -> jax.Array:
    logits = model(batch)[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def bce(model: Any, batch: Any) -> jax.Array:
    x, y = batch
    p = model(x)[:, 0]
    return -(y * jnp.log(p) + (1 - y) * jnp.log(1 - p)).mean()


def of(model: Any, data: Any, loss: Any = ce, **more: Any) -> Subject:
    return Subject(model, data[0], data, loss, **more)


# ------------------------------------------------------------------- networks


class Net(nnx.Module):
    """Linear layers with a function between them."""

    def __init__(self, sizes: Any, act: Any = nnx.relu, seed: int = 0, **more: Any):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List(
            [nnx.Linear(a, b, rngs=rngs, **more) for a, b in itertools.pairwise(sizes)]
        )
        self.act = act

    def __call__(self, x: Any) -> Any:
        for layer in self.layers[:-1]:
            x = self.act(layer(x))
        return self.layers[-1](x)


class ConvBlock(nnx.Module):
    def __init__(self, a: int, b: int, rngs: nnx.Rngs, **norm: Any):
        self.conv = nnx.Conv(a, b, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(b, rngs=rngs, **norm)

    def __call__(self, x: Any) -> Any:
        return nnx.relu(self.norm(self.conv(x)))


class ConvNet(nnx.Module):
    def __init__(self, seed: int = 0, width: int = 8, k: int = 4, **norm: Any):
        rngs = nnx.Rngs(seed)
        self.stem = ConvBlock(3, width, rngs, **norm)
        self.body = ConvBlock(width, 2 * width, rngs, **norm)
        self.head = nnx.Linear(2 * width, k, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(self.stem(x), (2, 2), strides=(2, 2))
        return self.head(self.body(x).mean(axis=(1, 2)))


class Residual(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs, scale: Any = None):
        self.conv1 = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.bn1 = nnx.BatchNorm(width, rngs=rngs)
        self.conv2 = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        more = {} if scale is None else {"scale_init": nnx.initializers.constant(scale)}
        self.bn2 = nnx.BatchNorm(width, rngs=rngs, **more)

    def __call__(self, x: Any) -> Any:
        y = nnx.relu(self.bn1(self.conv1(x)))
        return nnx.relu(x + self.bn2(self.conv2(y)))


class ResNet(nnx.Module):
    def __init__(self, depth: int = 2, width: int = 8, k: int = 4, scale: Any = None):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.blocks = nnx.List([Residual(width, rngs, scale) for _ in range(depth)])
        self.head = nnx.Linear(width, k, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


class Layer(nnx.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, rngs: nnx.Rngs, *, heads: int = 2, rate: float = 0.0, **more):
        self.ln1 = nnx.LayerNorm(width, rngs=rngs, **more)
        self.attn = nnx.MultiHeadAttention(
            heads, width, dropout_rate=rate, decode=False, rngs=rngs, **more
        )
        self.ln2 = nnx.LayerNorm(width, rngs=rngs, **more)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs, **more)
        self.down = nnx.Linear(4 * width, width, rngs=rngs, **more)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: Any, mask: Any = None) -> Any:
        x = x + self.drop(self.attn(self.ln1(x), mask=mask))
        return x + self.drop(self.down(nnx.gelu(self.up(self.ln2(x)))))


class GPT(nnx.Module):
    """Causal, with tied embeddings."""

    def __init__(self, depth: int = 2, width: int = 16, rate: float = 0.0, **more: Any):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(40, width, rngs=rngs, **more)
        self.pos = nnx.Param(0.02 * jax.random.normal(jax.random.key(1), (32, width)))
        self.layers = nnx.List([Layer(width, rngs, rate=rate, **more) for _ in range(depth)])
        self.ln = nnx.LayerNorm(width, rngs=rngs, **more)

    def __call__(self, ids: Any) -> Any:
        x = self.embed(ids)
        x = x + self.pos[: ids.shape[1]].astype(x.dtype)
        mask = nnx.make_causal_mask(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.embed.attend(self.ln(x))


class ViT(nnx.Module):
    def __init__(self, depth: int = 2, width: int = 16, k: int = 4):
        rngs = nnx.Rngs(0)
        self.patch = nnx.Conv(3, width, (4, 4), strides=(4, 4), rngs=rngs)
        self.cls = nnx.Param(jnp.zeros((1, 1, width)))
        self.pos = nnx.Param(0.02 * jax.random.normal(jax.random.key(1), (1, 10, width)))
        self.layers = nnx.List([Layer(width, rngs) for _ in range(depth)])
        self.ln = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, k, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.patch(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = jnp.concatenate([jnp.tile(self.cls[...], (len(x), 1, 1)), x], axis=1) + self.pos[...]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x)[:, 0])


class Scanned(nnx.Module):
    """A stack of equal layers under nnx.scan, with or without remat."""

    def __init__(self, make: Callable[[nnx.Rngs], Any], depth: int, width: int, k: int = 4, *,
                 remat: bool = False):  # fmt: skip
        self.inlet = nnx.Linear(8, width, rngs=nnx.Rngs(7))
        self.stack = nnx.vmap(make, in_axes=0)(nnx.Rngs(0).split(depth))
        self.head = nnx.Linear(width, k, rngs=nnx.Rngs(9))
        self.remat = remat

    def __call__(self, x: Any) -> Any:
        def one(layer: Any, x: Any) -> Any:
            return layer(x)

        step = nnx.remat(one) if self.remat else one
        x = nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.stack, self.inlet(x))
        return self.head(x)


class Dense(nnx.Module):
    """One layer of a stack: a matrix and a function."""

    def __init__(self, width: int, act: Any, rngs: nnx.Rngs, *, skip: bool = False, **more: Any):
        self.dense = nnx.Linear(width, width, rngs=rngs, **more)
        self.act, self.skip = act, skip

    def __call__(self, x: Any) -> Any:
        y = self.act(self.dense(x))
        return x + y if self.skip else y


class Recurrent(nnx.Module):
    def __init__(self, cell: Any, hidden: int = 12, k: int = 4, **more: Any):
        rngs = nnx.Rngs(0)
        self.rnn = nnx.RNN(cell(6, hidden, rngs=rngs, **more))
        self.head = nnx.Linear(hidden, k, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.rnn(x)[:, -1])


class Autoencoder(nnx.Module):
    def __init__(self, d: int = 12, z: int = 3):
        rngs = nnx.Rngs(0)
        self.encoder = nnx.Sequential(
            nnx.Linear(d, 16, rngs=rngs), nnx.relu, nnx.Linear(16, z, rngs=rngs)
        )
        self.decoder = nnx.Sequential(
            nnx.Linear(z, 16, rngs=rngs), nnx.relu, nnx.Linear(16, d, rngs=rngs)
        )

    def __call__(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))


class VAE(nnx.Module):
    def __init__(self, d: int = 12, z: int = 4):
        rngs = nnx.Rngs(0)
        self.body = nnx.Linear(d, 16, rngs=rngs)
        self.mean = nnx.Linear(16, z, rngs=rngs)
        self.logvar = nnx.Linear(16, z, rngs=rngs)
        self.decoder = Net([z, 16, d])
        self.rngs = nnx.Rngs(noise=3)

    def __call__(self, x: Any) -> Any:
        h = nnx.relu(self.body(x))
        mean, logvar = self.mean(h), self.logvar(h)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(self.rngs.noise(), mean.shape)
        return self.decoder(z), mean, logvar


def elbo(model: Any, batch: Any) -> jax.Array:
    x, _ = batch
    y, mean, logvar = model(x)
    kl = -0.5 * (1 + logvar - mean**2 - jnp.exp(logvar)).sum(-1).mean()
    return jnp.square(y - x).sum(-1).mean() + kl
