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


class Limited(nnx.Module):
    """A mixture whose experts have room for `room` choices each. `way`: how it says so."""

    def __init__(
        self, way: str, *, k: int = 1, room: int = 5, bias: Any = (0.0,) * E, seed: int = 0
    ):
        rngs = nnx.Rngs(seed)
        self.way, self.k, self.room = way, k, room
        self.router = nnx.Linear(D, E, rngs=rngs)
        self.router.bias[...] = jnp.array(bias)
        self.experts = stacked_experts(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        weights, index = jax.lax.top_k(jax.nn.softmax(self.router(x)), self.k)
        sent = getattr(self, self.way)(index)  # [token, k, expert, slot]
        given = jnp.einsum("nkec,nd->ecd", sent, x)
        outs = nnx.vmap(lambda expert, x: expert(x))(self.experts, given)
        return jnp.einsum("nkec,nk,ecd->nd", sent, weights, outs)

    def slots(self, index: jax.Array) -> jax.Array:
        """The place of each choice, the first choices of all tokens first, as a one-hot vector."""
        mask = jax.nn.one_hot(index.T.reshape(-1), E)
        place = (jnp.cumsum(mask, axis=0) * mask).max(-1) - 1
        place = jax.nn.one_hot(place.astype(int), self.room)
        sent = mask[:, :, None] * place[:, None, :]
        return sent.reshape(self.k, len(index), E, self.room).swapaxes(0, 1)

    def less(self, index: jax.Array) -> jax.Array:
        """A mask of what is below the capacity, token after token."""
        mask = jax.nn.one_hot(index, E, dtype=jnp.int32)
        place = jnp.cumsum(mask.reshape(-1, E), axis=0).reshape(mask.shape)
        mask = mask * jnp.less_equal(place, self.room)
        return mask[..., None] * jax.nn.one_hot(place - 1, self.room)

    def where(self, index: jax.Array) -> jax.Array:
        """One place for each choice, compared with the capacity."""
        mask = jax.nn.one_hot(index, E)
        flat = mask.transpose(1, 0, 2).reshape(-1, E)
        before = jnp.cumsum(flat, axis=0) - flat
        place = jnp.where(flat > 0, before, 0).sum(-1).reshape(index.T.shape).T
        kept = place < self.room
        at = jax.nn.one_hot(jnp.where(kept, place, 0).astype(int), self.room) * kept[..., None]
        return mask[..., None] * at[..., None, :]

    def grouped(self, index: jax.Array) -> jax.Array:
        """In two groups, each of which has its own room."""
        mask = jax.nn.one_hot(index.reshape(2, -1, self.k), E)
        place = (jnp.cumsum(mask, axis=1) - mask) * mask
        full = place >= self.room
        sent = (mask * ~full)[..., None] * jax.nn.one_hot(place.astype(int), self.room)
        return sent.reshape(len(index), self.k, E, self.room)

    def dropped(self, x: Any) -> np.ndarray:
        """The share of each expert's choices that find no room, by NumPy, choice by choice."""
        kernel, bias = (
            np.asarray(p[...], np.float64) for p in (self.router.kernel, self.router.bias)
        )
        logits = np.asarray(x, np.float64) @ kernel + bias
        index = np.argsort(-logits, axis=-1)[:, : self.k]
        count, lost, chosen = {}, np.zeros(E), np.zeros(E)
        order = [(n, rank) for n in range(len(index)) for rank in range(self.k)]
        if self.way in ("slots", "where"):
            order.sort(key=lambda one: one[1])
        for n, rank in order:
            expert = index[n, rank]
            shared = (expert, n * 2 // len(index), rank) if self.way == "grouped" else expert
            lost[expert] += count.get(shared, 0) >= self.room
            count[shared] = count.get(shared, 0) + 1
            chosen[expert] += 1
        return lost / np.where(chosen > 0, chosen, np.nan)
