"""Layers that see the same input and are trained each in its own way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Rows(nnx.Module):
    """So many layers, all of which see the same input."""

    def __init__(self, count: int) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(6, 4, rngs=rngs, use_bias=False) for _ in range(count)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.stack([layer(x) for layer in self.layers])
