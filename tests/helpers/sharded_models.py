"""Models over a mesh ("data", "model") with exact arithmetic, so that every order of addition gives
the same values: weights are -1, 0 and 1, and inputs are small integers. The docstrings name the
models that are not exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, HIDDEN = 64, 128
COLUMNS, ROWS = (None, "model"), ("model", None)


def signs(key: jax.Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> Any:
    """An initializer: one weight in eight is -1, one is 1, the rest are 0."""
    kinds = jax.random.randint(key, shape, 0, 8)
    return (jnp.where(kinds == 0, -1.0, 0.0) + jnp.where(kinds == 1, 1.0, 0.0)).astype(dtype)


def linear(inputs: int, outputs: int, rngs: nnx.Rngs, spec: Any = None, **options: Any) -> Any:
    init = signs if spec is None else nnx.with_partitioning(signs, spec)
    return nnx.Linear(inputs, outputs, rngs=rngs, use_bias=False, kernel_init=init, **options)


def loss(model: Any, x: Any) -> Any:
    """Half the squares: the output's gradient is the output times a power of two."""
    return (model(x).astype(jnp.float32) ** 2).sum() * 2.0**-11


class MLP(nnx.Module):
    """Two layers; each device holds a part of the hidden units."""

    def __init__(self, rngs: nnx.Rngs, out: Any = None):
        self.up = linear(WIDTH, HIDDEN, rngs, COLUMNS)
        self.down = linear(HIDDEN, WIDTH, rngs, ROWS)
        self.out = out  # explicit mode needs the sharding of a sum over devices

    def __call__(self, x):
        h = nnx.relu(self.up(x))
        return self.down(h) if self.out is None else self.down(h, out_sharding=self.out)


class Constrained(MLP):
    """Constrains the sharding of its activations."""

    def __call__(self, x):
        h = jax.lax.with_sharding_constraint(self.up(x), P("data", "model", None))
        return jax.lax.with_sharding_constraint(self.down(nnx.relu(h)), P(None, "data", "model"))


class Uneven(MLP):
    """An activation whose length is not divisible by any number of devices."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.odd = linear(HIDDEN, HIDDEN, rngs, COLUMNS)
        self.cut = Cut()

    def __call__(self, x):
        h = self.cut(self.odd(nnx.relu(self.up(x))))
        return self.down(jnp.pad(h, [(0, 0), (0, 0), (0, 1)]))


class Cut(nnx.Module):
    def __call__(self, x):
        return x[..., :-1]


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, out: Any = None):
        self.inner = MLP(rngs, out)

    def __call__(self, x):
        return jnp.clip(x + self.inner(x), -4.0, 4.0)


class Deep(nnx.Module):
    """Layers in one stacked module, run by nnx.scan, with a part of each on each device."""

    def __init__(self, rngs: nnx.Rngs, depth: int = 3, remat: bool = False):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def make(rngs):
            return Layer(rngs)

        self.layers = make(rngs)
        self.remat = remat

    def __call__(self, x):
        body = lambda x, layer: layer(x)  # noqa: E731
        body = nnx.remat(body) if self.remat else body
        scan = functools.partial(nnx.scan, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(body, transform_metadata={nnx.PARTITION_NAME: None})(x, self.layers)


class Ensemble(nnx.Module):
    """Members that lie on different devices, run by nnx.vmap."""

    def __init__(self, rngs: nnx.Rngs, size: int = 2):
        @nnx.split_rngs(splits=size)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "model"})
        def make(rngs):
            return linear(WIDTH, HIDDEN, rngs, (None, None))

        self.members = make(rngs)

    def __call__(self, x):
        metadata = {nnx.PARTITION_NAME: "model"}
        run = nnx.vmap(lambda m, x: m(x), in_axes=(0, None), transform_metadata=metadata)
        return run(self.members, x)


class Jitted(MLP):
    """A part under an inner jit with shardings for its operands and results."""

    def __init__(self, rngs: nnx.Rngs, mesh: Any = None):
        super().__init__(rngs)
        self.mesh = mesh

    def __call__(self, x):
        graphdef, state = nnx.split(self.up)
        run = lambda state, x: nnx.merge(graphdef, state)(x)  # noqa: E731
        if self.mesh is None:
            h = jax.jit(run)(state, x)
        else:
            at = functools.partial(NamedSharding, self.mesh)
            operands = (None, at(P("data", "model")))
            h = jax.jit(run, in_shardings=operands, out_shardings=at(P(None, "data")))(state, x)
        return self.down(nnx.relu(h))


class Image(nnx.Module):
    """Convolution and BatchNorm, which changes its statistics; not exact."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(2, 32, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.conv(x)))


class Attention(nnx.Module):
    """Heads on different devices; not exact."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(
            4, WIDTH, rngs=rngs, decode=False,
            kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model")),
        )  # fmt: skip

    def __call__(self, x):
        return x + self.attend(self.norm(x))


class Stepped(nnx.Module):
    """Sites in a while loop, a branch and with an integer output."""

    def __init__(self, rngs: nnx.Rngs):
        self.mlp = Layer(rngs)
        self.pick = Pick()

    def __call__(self, x):
        def body(carry):
            return carry[0] + 1, carry[1], carry[1](carry[2])

        x = nnx.while_loop(lambda c: c[0] < 2, body, (0, self.mlp, x))[2]
        self.pick(x)
        return nnx.cond(x.sum() > -1e9, lambda m, x: m(x), lambda m, x: x, self.mlp, x)


class Explicit(nnx.Module):
    """A layer within one of NNX's transforms, or a site within `jax.sharding.auto_axes`."""

    def __init__(self, rngs: nnx.Rngs, kind: str, mesh: Any = None):
        self.layer = Layer(rngs, None if mesh is None else P("data"))
        self.same = Same()
        self.kind = kind
        self.mesh = mesh

    def __call__(self, x):
        run = lambda layer, x: layer(x)  # noqa: E731
        if self.kind == "scan":
            scan = nnx.scan(run, in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=2)
            return scan(self.layer, x)
        if self.kind == "remat":
            return nnx.remat(run)(self.layer, x)
        if self.kind == "cond":
            return nnx.cond(True, run, lambda layer, x: x, self.layer, x)
        if self.kind == "vmap":
            return nnx.vmap(run, in_axes=(None, 1), out_axes=1)(self.layer, x)
        if self.mesh is None:
            return self._twice(self.layer(x))
        return jax.sharding.auto_axes(self._twice, out_sharding=P("data"))(self.layer(x))

    def _twice(self, x):
        return jax.lax.scan(lambda c, _: (self.same(c), None), x, None, length=2)[0]


class Pick(nnx.Module):
    def __call__(self, x):
        return x.astype(jnp.int32)


class Mapped(nnx.Module):
    """The MLP written out device by device in a jax.shard_map.

    With `loops` its first layer runs in a scan, a branch or a while loop within.
    """

    def __init__(self, rngs: nnx.Rngs, mesh: Any = None, checked: bool = True, loops: str = ""):
        self.up = linear(WIDTH, HIDDEN, rngs, COLUMNS)
        self.down = linear(HIDDEN, WIDTH, rngs, ROWS)
        self.same = Same()
        self.mesh, self.checked, self.loops = mesh, checked, loops

    def __call__(self, x):
        if self.mesh is None:
            return self.same(self.down(nnx.relu(self._first(self.up, x))))
        graphdefs, states = zip(*map(nnx.split, (self.up, self.down, self.same)), strict=True)
        specs = tuple(
            jax.tree.map(lambda _, s=s: s, state)
            for s, state in zip((P(*COLUMNS), P(*ROWS), P()), states, strict=True)
        )

        def body(states, x):
            up, down, same = map(nnx.merge, graphdefs, states)
            return same(jax.lax.psum(down(nnx.relu(self._first(up, x))), "model"))

        return jax.shard_map(
            body, mesh=self.mesh, in_specs=(specs, P("data")), out_specs=P("data"),
            check_vma=self.checked,
        )(states, x)  # fmt: skip

    def _first(self, up: Any, x: Any) -> Any:
        if self.loops == "scan":
            return jax.lax.scan(lambda c, x: (c, up(x)), 0, x.swapaxes(0, 1))[1].swapaxes(0, 1)
        if self.loops == "cond":
            return jax.lax.cond(x.max() > -9.0, up, lambda x: jnp.zeros_like(up(x)), x)
        if self.loops == "while":
            body = lambda c: (c[0] + 1, up(x))  # noqa: E731
            start = (0, jnp.zeros_like(up(x)))
            return jax.lax.stop_gradient(jax.lax.while_loop(lambda c: c[0] < 2, body, start)[1])
        return up(x)


class Same(nnx.Module):
    def __call__(self, x):
        return x * 1.0


def place(model: nnx.Module, mesh: Any) -> None:
    """Place a model's Variables as their metadata says, read by `nnx.get_partition_spec`."""
    state = nnx.state(model)
    specs = nnx.get_partition_spec(state)
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
        jax.tree.leaves(state),
        [s if isinstance(s, P) else P() for s in jax.tree.leaves(specs, is_leaf=_is_spec)],
    )
    nnx.update(model, jax.tree.unflatten(jax.tree.structure(state), placed))


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def integers(*shape: int) -> np.ndarray:
    """Small integers as float32."""
    return np.random.default_rng(0).integers(-2, 3, shape).astype(np.float32)


Build = Callable[[nnx.Rngs], nnx.Module]
