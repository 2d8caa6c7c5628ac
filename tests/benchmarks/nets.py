"""The models of the cost table in plain NNX: transformer, scanned transformer, CNN, MLP.

`nets_linen` and `nets_torch` hold the same layers, widths and batches for the other frameworks.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

CLASSES = 10


class Attention(nnx.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.heads = heads

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        size = width // self.heads
        q, k, v = jnp.split(self.qkv(x).reshape(batch, length, self.heads, 3 * size), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return self.out(mixed.reshape(batch, length, width))


class FeedForward(nnx.Module):
    """Two linear layers with a gelu between them."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """Attention and a feed-forward network, each normed before and added."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = Attention(width, heads, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = FeedForward(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def _call(block: Block, x: jax.Array) -> jax.Array:
    return block(x)


class Transformer(nnx.Module):
    """Tokens to class scores; the blocks in a list, or stacked and scanned over."""

    def __init__(
        self, width: int, layers: int, vocabulary: int, *, stacked: bool = False, rngs: nnx.Rngs
    ):
        heads = max(width // 64, 1)
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        if stacked:
            make = nnx.vmap(lambda rngs: Block(width, heads, rngs=rngs))
            self.blocks: Any = nnx.split_rngs(splits=layers)(make)(rngs)
        else:
            self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        if isinstance(self.blocks, Block):
            x = nnx.scan(_call, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


class Residual(nnx.Module):
    """Two normed convolutions added to what came in."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(width, rngs=rngs)
        self.conv2 = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(x + self.norm2(self.conv2(y)))


class ResNet(nnx.Module):
    """Stages of residual blocks, each at half the resolution and twice the width."""

    def __init__(self, width: int, stages: int, blocks: int, *, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.stages = nnx.List([
            nnx.List([Residual(width << i, rngs=rngs) for _ in range(blocks)])
            for i in range(stages)
        ])  # fmt: skip
        self.widen = nnx.List([
            nnx.Conv(width << i, width << (i + 1), (3, 3), strides=2, rngs=rngs)
            for i in range(stages - 1)
        ])  # fmt: skip
        self.head = nnx.Linear(width << (stages - 1), CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for i, stage in enumerate(self.stages):
            for block in stage:
                x = block(x)
            if i < len(self.widen):
                x = self.widen[i](x)
        return self.head(x.mean(axis=(1, 2)))


class MLP(nnx.Module):
    """Linear layers with a relu after each but the last."""

    def __init__(self, width: int, layers: int, *, rngs: nnx.Rngs):
        sizes = [width] * layers + [CLASSES]
        self.layers = nnx.List([
            nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)
        ])  # fmt: skip

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


def cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean negative log probability of the labels."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), labels[..., None], axis=-1)
    return -chosen.mean()


@nnx.jit
def train_step(model: nnx.Module, optimizer: nnx.Optimizer[Any], x: Any, labels: Any) -> jax.Array:
    """A user's step: the loss, and an update of the model."""
    loss_fn = lambda model: cross_entropy(model(x), labels)  # noqa: E731
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss
