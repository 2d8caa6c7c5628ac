"""Attentions, and what each of their heads does, by NumPy in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

FIGURES = ("entropy", "evenness", "distance", "first", "logit", "keys")


def heads_in_numpy(logits: Any, allowed: Any = True) -> dict[str, np.ndarray]:
    """Each figure of each head, of logits `[batch, head, query, key]` and the keys of each query
    that no mask excludes.
    """
    logits = np.asarray(logits, np.float64)
    allowed = np.broadcast_to(np.asarray(allowed), logits.shape)
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    _, heads, queries, keys = logits.shape
    for head in range(heads):
        rows: dict[str, list[float]] = {name: [] for name in FIGURES}
        for example in range(len(logits)):
            for query in range(queries):
                chosen = np.flatnonzero(allowed[example, head, query])
                own = logits[example, head, query, chosen]
                rows["logit"] += own.tolist()
                if len(chosen) < 2:
                    continue
                share = np.exp(own - own.max()) / np.exp(own - own.max()).sum()
                entropy = -(share * np.log(np.where(share > 0, share, 1))).sum()
                rows["entropy"].append(entropy)
                rows["evenness"].append(entropy / np.log(len(chosen)))
                rows["distance"].append((share * np.abs(chosen - query)).sum())
                rows["first"].append(share[chosen == 0].sum())
                rows["keys"].append(len(chosen))
        for name, values in rows.items():
            mean = np.mean(values) if values else np.nan
            found[name].append(max(rows["logit"]) if name == "logit" else mean)
    if queries != keys:
        found["distance"] = [np.nan] * heads
    return {name: np.array(values) for name, values in found.items()}


class Attention(nnx.Module):
    """Grouped-query attention, written out or by jax's function."""

    def __init__(
        self,
        width: int = 12,
        heads: int = 4,
        groups: int = 2,
        size: int = 3,
        *,
        way: str = "jax",
        scale: float = 1.0,
        rngs: nnx.Rngs,
    ):
        self.heads, self.groups, self.size, self.way = heads, groups, size, way
        self.q = nnx.LinearGeneral(width, (heads, size), rngs=rngs)
        self.k, self.v = (nnx.LinearGeneral(width, (groups, size), rngs=rngs) for _ in range(2))
        self.q.kernel[...] *= scale
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.LinearGeneral((heads, size), width, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: jax.Array, context: Any = None, mask: Any = None) -> jax.Array:
        context = x if context is None else context
        q, k, v = self.q(x), self.k(context), self.v(context)
        if self.way == "jax":
            return self.out(jax.nn.dot_product_attention(q, k, v, mask=mask))
        k, v = (jnp.repeat(one, self.heads // self.groups, axis=2) for one in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(self.size).astype(q.dtype)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", self.pattern(scores, mask), v))

    def pattern(self, scores: jax.Array, mask: Any) -> jax.Array:
        if self.way == "where":
            return jax.nn.softmax(scores, where=mask)
        if self.way == "added":
            scores = scores + jnp.where(mask, 0, -1e9).astype(scores.dtype)
        elif mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        if self.way == "log":
            return jnp.exp(jax.nn.log_softmax(scores))
        if self.way == "two":
            scores = scores / np.log(2)
            powers = jnp.exp2(scores - scores.max(axis=-1, keepdims=True))
            return powers / powers.sum(axis=-1, keepdims=True)
        if self.way == "bare":
            return jnp.exp(scores) / jnp.exp(scores).sum(axis=-1, keepdims=True)
        if self.way == "dropped":
            return self.drop(jax.nn.softmax(scores))
        return jax.nn.softmax(scores)

    def logits(self, x: Any, context: Any = None) -> np.ndarray:
        """In NumPy, with the rounding of this module's own queries and keys."""
        context = x if context is None else context
        q, k = (np.asarray(f(y), np.float64) for f, y in ((self.q, x), (self.k, context)))
        k = np.repeat(k, self.heads // self.groups, axis=2)
        return np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(self.size)


def causal(length: int) -> np.ndarray:
    return np.tril(np.ones((length, length), bool))[None, None]


def padded(lengths: Any, length: int) -> np.ndarray:
    """Keys up to each example's length."""
    return (np.arange(length) < np.asarray(lengths)[:, None])[:, None, None]
