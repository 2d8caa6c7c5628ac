"""Models over a mesh ("data", "model") with one, all or no axis explicit; see `meshes`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_models import COLUMNS, ROWS, linear

WIDTH, HIDDEN, CLASSES, VOCABULARY = 16, 32, 8, 16


def is_explicit(mesh: Any) -> bool:
    return mesh is not None and bool(mesh.explicit_axes)


def images() -> np.ndarray:
    return np.random.default_rng(0).integers(-2, 3, (16, WIDTH)).astype(np.float32)


def loss_of(labels: Any, model: Any, x: Any) -> Any:
    logits = model(x)
    logits = logits[:, -1] if logits.ndim == 3 else logits
    top = logits.max(axis=-1, keepdims=True)
    log = logits - top - jnp.log(jnp.exp(logits - top).sum(-1, keepdims=True))
    wanted = labels[:, None] == jnp.arange(logits.shape[-1])
    return -jnp.where(wanted, log, 0.0).sum() / logits.shape[0]


class MLP(nnx.Module):
    """Two layers, whose hidden units lie on different devices, and a head."""

    def __init__(self, mesh: Any):
        rngs = nnx.Rngs(0)
        self.up = linear(WIDTH, HIDDEN, rngs, COLUMNS)
        self.down = linear(HIDDEN, WIDTH, rngs, ROWS)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)
        self.out = NamedSharding(mesh, P("data")) if is_explicit(mesh) else None

    def __call__(self, x):
        h = nnx.relu(self.up(x))
        h = self.down(h) if self.out is None else self.down(h, out_sharding=self.out)
        return self.head(jnp.tanh(h / 4))


class Mapped(MLP):
    """The same, with its two layers written out device by device in a `jax.shard_map`."""

    def __init__(self, mesh: Any):
        super().__init__(mesh)
        self.mesh = mesh

    def __call__(self, x):
        if self.mesh is None:
            return self.head(jnp.tanh(self.down(nnx.relu(self.up(x))) / 4))
        graphdefs, states = zip(*map(nnx.split, (self.up, self.down)), strict=True)
        specs = tuple(
            jax.tree.map(lambda _, s=s: s, state)
            for s, state in zip((P(*COLUMNS), P(*ROWS)), states, strict=True)
        )

        def body(states, x):
            up, down = map(nnx.merge, graphdefs, states)
            return jax.lax.psum(down(nnx.relu(up(x))), "model")

        h = jax.shard_map(
            body, mesh=self.mesh, in_specs=(specs, P("data")), out_specs=P("data")
        )(states, x)  # fmt: skip
        return self.head(jnp.tanh(h / 4))


class Block(nnx.Module):
    """Attention with heads on different devices, and an MLP as above."""

    def __init__(self, rngs: nnx.Rngs, out: Any):
        init = nnx.initializers.lecun_normal()
        heads = nnx.with_partitioning(init, (None, "model", None))
        of_heads = nnx.with_partitioning(init, ("model", None, None))
        more: Any = {"use_bias": False, "rngs": rngs}
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.query = nnx.LinearGeneral(WIDTH, (8, 4), kernel_init=heads, **more)
        self.key = nnx.LinearGeneral(WIDTH, (8, 4), kernel_init=heads, **more)
        self.value = nnx.LinearGeneral(WIDTH, (8, 4), kernel_init=heads, **more)
        self.out = nnx.LinearGeneral((8, 4), WIDTH, axis=(-2, -1), kernel_init=of_heads, **more)
        columns, rows = (nnx.with_partitioning(init, spec) for spec in (COLUMNS, ROWS))
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=columns, **more)
        self.down = nnx.Linear(HIDDEN, WIDTH, kernel_init=rows, **more)
        self.how = {} if out is None else {"out_sharding": out}

    def __call__(self, x):
        h = self.norm(x)
        q, k, v = self.query(h), self.key(h), self.value(h)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.0
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        pattern = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        x = x + self.out(jnp.einsum("bhqk,bkhd->bqhd", pattern, v), **self.how)
        return x + self.down(nnx.relu(self.up(x)), **self.how)


class Text(nnx.Module):
    """A language model."""

    def __init__(self, mesh: Any):
        rngs = nnx.Rngs(0)
        out = P("data") if is_explicit(mesh) else None
        self.token = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, out) for _ in range(2)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)
        self.how = {} if out is None else {"out_sharding": out}

    def __call__(self, ids):
        x = self.token(ids, **self.how)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
