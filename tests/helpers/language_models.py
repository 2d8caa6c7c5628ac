"""Small language models of every form: a list or a scan of blocks, a head of their own or tied."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

VOCABULARY, D, LENGTH, LAYERS = 11, 8, 5, 3
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH))


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.RMSNorm(D, rngs=rngs), nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, D, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(D, 12, rngs=rngs), nnx.relu, nnx.Linear(12, D, rngs=rngs)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.mlp(self.norm2(x))


class Language(nnx.Module):
    """A causal transformer; `last` names what it does after its blocks."""

    def __init__(self, *, scan: bool = False, tied: bool = False, last: str = "", seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.token = nnx.Embed(VOCABULARY, D, rngs=rngs)
        self.place = nnx.Embed(LENGTH, D, rngs=rngs)
        self.scan, self.tied, self.last = scan, tied, last
        if scan:
            make = nnx.vmap(lambda rngs: Block(rngs=rngs), in_axes=(0,), out_axes=0)
            self.blocks = nnx.split_rngs(splits=LAYERS)(make)(rngs)
        else:
            self.blocks = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.final_norm = nnx.LayerNorm(D, rngs=rngs)
        if not tied:
            self.head = nnx.Linear(D, VOCABULARY, rngs=rngs)
        for name in ("scale", "bias"):  # not the ones and zeros they begin with
            getattr(self.final_norm, name)[...] = jax.random.normal(rngs(), (D,))

    def stream(self, tokens: jax.Array) -> jax.Array:
        x = self.token(tokens) + self.place(jnp.arange(tokens.shape[1]))
        if self.scan:
            return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.blocks
            )
        for block in self.blocks:
            x = block(x)
        return x

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.final_norm(self.stream(tokens))
        if self.last == "position":
            x = x[:, -1]
        if self.last == "product":
            return x @ self.token.embedding[...].T
        if self.last == "norm":
            return x
        return self.token.attend(x) if self.tied else self.head(x)

    def block(self, number: int) -> Block:
        """One block, of a stack too."""
        if not self.scan:
            return self.blocks[number]
        graphdef, state = nnx.split(self.blocks)
        return nnx.merge(graphdef, jax.tree.map(lambda x: x[number], state))

    def matrix(self) -> jax.Array:
        return self.token.embedding[...].T if self.tied else self.head.kernel[...]


language = functools.cache(Language)
"""A model of a form for tests that only read it: the same one each time."""


def gap_of(found: Any) -> float:
    """How far the logits of a lens are from the model's own, which must be known."""
    assert found.gap is not None
    return found.gap
