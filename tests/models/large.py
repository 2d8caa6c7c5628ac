"""A language model as large as the largest open models, built without its weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

WIDTH, HEADS, GROUPS, INNER, WORDS, LAYERS = 8192, 64, 8, 28672, 128256, 80
"""Llama 3 70B: 70,553,706,496 parameters."""


def parameters(layers: int = LAYERS) -> int:
    attention = 2 * WIDTH * WIDTH + 2 * WIDTH * (WIDTH // GROUPS)
    block = attention + 3 * WIDTH * INNER + 2 * WIDTH
    return layers * block + 2 * WORDS * WIDTH + WIDTH


def products(tokens: int, layers: int = LAYERS) -> int:
    """The operations of the matrix products in one pass over a sequence."""
    attention = 2 * WIDTH * WIDTH + 2 * WIDTH * (WIDTH // GROUPS)
    scores = 2 * tokens * WIDTH  # both products of each pair of tokens
    block = 2 * tokens * (attention + 3 * WIDTH * INNER + scores)
    return layers * block + 2 * tokens * WIDTH * WORDS


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    bf16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs, **bf16)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.before, self.between = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.query, self.out = (linear(WIDTH, WIDTH, rngs) for _ in range(2))
        self.key, self.value = (linear(WIDTH, WIDTH // GROUPS, rngs) for _ in range(2))
        self.gate, self.up = (linear(WIDTH, INNER, rngs) for _ in range(2))
        self.down = linear(INNER, WIDTH, rngs)

    def __call__(self, x):
        y = self.before(x)
        heads = [self.query(y), self.key(y), self.value(y)]
        q, k, v = (h.reshape(*h.shape[:2], -1, WIDTH // HEADS) for h in heads)
        x += self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        y = self.between(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class LanguageModel(nnx.Module):
    """Its blocks are in a list, or stacked and scanned over."""

    def __init__(self, layers: int, stacked: bool, rngs: nnx.Rngs):
        bf16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs, **bf16)
        if stacked:
            self.blocks = nnx.split_rngs(splits=layers)(nnx.vmap(Block))(rngs)
        else:
            self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = linear(WIDTH, WORDS, rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        if isinstance(self.blocks, Block):
            scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            x = scan(nnx.remat(lambda block, x: block(x)))(self.blocks, x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


def language_model(layers: int = LAYERS, *, stacked: bool) -> LanguageModel:
    return nnx.eval_shape(lambda: LanguageModel(layers, stacked, nnx.Rngs(0)))
