"""The models of `nets` in Linen: the same layers, widths and batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from tests.benchmarks.nets import CLASSES


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        size = width // self.heads
        qkv = nn.Dense(3 * width, name="qkv")(x).reshape(batch, length, self.heads, 3 * size)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return nn.Dense(width, name="out")(mixed.reshape(batch, length, width))


class FeedForward(nn.Module):
    """Two linear layers with a gelu between them."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        return nn.Dense(width, name="down")(nn.gelu(nn.Dense(4 * width, name="up")(x)))


class Block(nn.Module):
    """Attention and a feed-forward network, each normed before and added."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + Attention(self.heads, name="attention")(nn.LayerNorm(name="norm1")(x))
        return x + FeedForward(name="mlp")(nn.LayerNorm(name="norm2")(x))


class Transformer(nn.Module):
    """Tokens to class scores."""

    width: int
    layers: int
    vocabulary: int
    stacked: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        heads = max(self.width // 64, 1)
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        if self.stacked:
            scan = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0, "intermediates": 0},
                split_rngs={"params": True},
                length=self.layers,
            )
            x, _ = scan(Block(heads, name="blocks"), x, None)
        else:
            for i in range(self.layers):
                x = Block(heads, name=f"block{i}")(x)
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


class Residual(nn.Module):
    """Two normed convolutions added to what came in."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = nn.Conv(width, (3, 3), use_bias=False, name="conv1")(x)
        y = nn.relu(nn.BatchNorm(use_running_average=False, name="norm1")(y))
        y = nn.Conv(width, (3, 3), use_bias=False, name="conv2")(y)
        return nn.relu(x + nn.BatchNorm(use_running_average=False, name="norm2")(y))


class ResNet(nn.Module):
    """Stages of residual blocks, each at half the resolution and twice the width."""

    width: int
    stages: int
    blocks: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (3, 3))(x)
        for stage in range(self.stages):
            for _ in range(self.blocks):
                x = Residual()(x)
            if stage < self.stages - 1:
                x = nn.Conv(self.width << (stage + 1), (3, 3), strides=2)(x)
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


class MLP(nn.Module):
    """Linear layers with a relu after each but the last."""

    width: int
    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers - 1):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(CLASSES)(x)
