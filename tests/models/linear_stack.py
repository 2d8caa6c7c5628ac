"""A stack of linear layers, of which the oracles of several tests compute each layer by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


class LinearStack(nnx.Module):
    """Layers with tanh in one stacked module, which `nnx.scan` runs."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        *,
        layers: int = 3,
        width: int = 3,
        dtype: DTypeLike = jnp.float32,
        reverse: bool = False,
        remat: bool = False,
    ):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(width, width, dtype=dtype, param_dtype=dtype, rngs=rngs)

        self.layers, self.reverse, self.remat = make(rngs), reverse, remat

    def __call__(self, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return jnp.tanh(layer(x))

        body = nnx.remat(body) if self.remat else body
        scan = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, reverse=self.reverse)
        return scan(x, self.layers)
