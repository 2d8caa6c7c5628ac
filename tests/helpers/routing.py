"""Mixtures of experts as people write them, and what their routers choose."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

D, E = 8, 4


class Expert(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(D, 16, rngs=rngs), nnx.Linear(16, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(x)))


@nnx.split_rngs(splits=E)
@nnx.vmap(axis_size=E)
def stacked_experts(rngs: Any) -> Expert:
    return Expert(rngs=rngs)


class Mixture(nnx.Module):
    """`way`: how tokens reach their experts. `bias`: what the router adds to each expert."""

    def __init__(self, way: str, *, k: int = 1, bias: Any = (0.0,) * E, rngs: nnx.Rngs):
        self.way, self.k = way, k
        self.router = nnx.Linear(D, E, rngs=rngs)
        self.router.bias[...] = jnp.array(bias)
        if way in ("list", "sigmoid"):
            self.experts = nnx.List([Expert(rngs=rngs) for _ in range(E)])
        elif way == "gather":
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), (E, D, D)) / D)
        else:
            self.experts = stacked_experts(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        logits = self.router(x)
        gate = jax.nn.sigmoid(logits) if self.way == "sigmoid" else jax.nn.softmax(logits)
        if self.way == "argmax":
            chosen = jax.nn.one_hot(gate.argmax(-1), E)
            return self.by_all(x, chosen, gate)
        if self.way == "logits":
            best, index = jax.lax.top_k(logits, self.k)
            weights = jax.nn.softmax(best)
        else:
            weights, index = jax.lax.top_k(gate, self.k)
        if self.way == "gather":
            return jnp.einsum("nk,nkde,nd->ne", weights, self.kernel[...][index], x)
        if self.way in ("list", "sigmoid"):
            out = jnp.zeros_like(x)
            for number, expert in enumerate(self.experts):
                share = jnp.where(index == number, weights, 0).sum(-1, keepdims=True)
                out += share * expert(x)
            return out
        chosen = jax.nn.one_hot(index, E)
        gate = (chosen * weights[..., None]).sum(axis=1)
        return self.by_all(x, chosen.sum(axis=1), gate)

    def by_all(self, x: jax.Array, chosen: jax.Array, gate: jax.Array) -> jax.Array:
        given = jnp.einsum("ne,nd->end", chosen, x)
        outs = nnx.vmap(lambda expert, x: expert(x))(self.experts, given)
        return jnp.einsum("ne,end->nd", chosen * gate, outs)

    def expected(self, x: Any) -> dict[str, np.ndarray]:
        """By NumPy in float64."""
        kernel, bias = (
            np.asarray(p[...], np.float64) for p in (self.router.kernel, self.router.bias)
        )
        logits = np.asarray(x, np.float64) @ kernel + bias
        best = np.argsort(-logits, axis=-1)[:, : self.k]
        share = np.exp(logits - logits.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(-1).mean()
        load = np.array([(best == e).any(-1).mean() for e in range(E)])
        if self.way == "sigmoid":
            entropy = np.nan
        return {
            "load": load,
            "entropy": np.full(E, entropy),
            "evenness": np.full(E, entropy / np.log(E)),
        }
