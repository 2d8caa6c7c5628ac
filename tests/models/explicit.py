"""Ten models, each written twice: as a user writes it, and with every intermediate handed to `at`.

`at(site, value)` returns the value to go on with. The second way of writing computes with the
parameters of the first and knows nothing of nnx_inspector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

At = Callable[[str, jax.Array], jax.Array]
D = 4


def linear(layer: Any, x: jax.Array) -> jax.Array:
    return x @ layer.kernel[...] + layer.bias[...]


class Attention(nnx.Module):
    """An attention by hand, with a softmax of jax's."""

    def __init__(self, rngs: nnx.Rngs):
        self.q, self.k = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = jnp.einsum("qd,kd->qk", self.q(x), self.k(x)) / 2.0
        return jnp.einsum("qk,kd->qd", jax.nn.softmax(scores), x)

    def explicit(self, x: jax.Array, at: At) -> jax.Array:
        scores = at("@dot_general", linear(self.q, x) @ linear(self.k, x).T)
        pattern = at("@softmax", jax.nn.softmax(at("@div", scores / 2.0)))
        return at("@dot_general[1]", pattern @ x)


class Gelu(nnx.Module):
    """Blocks in a list, each with a gelu."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Gated(rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = x + block(jax.nn.gelu(x))
        return x

    def explicit(self, x: jax.Array, at: At) -> jax.Array:
        for i, block in enumerate(self.blocks):
            number = f"[{i}]" if i else ""
            h = at(f"@gelu{number}", jax.nn.gelu(x))
            inner = block.explicit(h, lambda name, v, i=i: at(f"blocks/{i}{name}", v))
            x = at(f"@add{number}", x + inner)
        return x


class Gated(nnx.Module):
    """A gate."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.gate = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.silu(self.gate(x)) * self.up(x)

    def explicit(self, x: jax.Array, at: At) -> jax.Array:
        gate = at("@silu", jax.nn.silu(linear(self.gate, x)))
        return at("@mul", gate * linear(self.up, x))


class Named(nnx.Module):
    """Names of the user's own."""

    def __init__(self, rngs: nnx.Rngs):
        self.a = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("mix"):
            h = jnp.sin(self.a(x)) * x
        h = checkpoint_name(h, "hidden")
        return jax.nn.relu(h)

    def explicit(self, x: jax.Array, at: At) -> jax.Array:
        h = at("@mix.sin", jnp.sin(linear(self.a, x)))
        h = at("@hidden", at("@mix.mul", h * x))
        return at("@relu", jnp.where(h > 0, h, 0.0))


class Scanned(nnx.Module):
    """A scan of its own over steps of time."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (D, D)) / 2)

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(h: jax.Array, row: jax.Array) -> Any:
            h = jnp.tanh(h @ self.w[...] + row)
            return h, jax.nn.softmax(h)

        return jax.lax.scan(step, jnp.zeros(D), x)[1]

    def explicit(self, x: jax.Array, at: At) -> jax.Array:
        h, out = jnp.zeros(D), []
        for i, row in enumerate(x):
            h = at(f"@dot_general/{i}", h @ self.w[...])
            h = at(f"@tanh/{i}", jnp.tanh(at(f"@add/{i}", h + row)))
            out.append(at(f"@softmax/{i}", jax.nn.softmax(h)))
        return jnp.stack(out)


class Rematerialised(nnx.Module):
    """An inner function that is computed again in the backward pass."""

    def __init__(self, rngs: nnx.Rngs):
        self.a = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        inner = jax.checkpoint(lambda x: jax.nn.softmax(jnp.cos(x)))
        return inner(self.a(x)) * x

    def explicit(self, x: jax.Array, at: At) -> jax.Array:
        h = at("@cos", jnp.cos(linear(self.a, x)))
        return at("@mul", at("@softmax", jax.nn.softmax(h)) * x)


@jax.jit
def attend(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.exp(-jnp.abs(q)) * k


class Jitted(nnx.Module):
    """A jitted function of the user's, called twice."""

    def __init__(self, rngs: nnx.Rngs):
        self.a = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return attend(attend(self.a(x), x), x)

    def explicit(self, x: jax.Array, at: At) -> jax.Array:
        h = linear(self.a, x)
        for number in ("", "[1]"):
            e = at(f"@attend.neg{number}", -at(f"@attend.abs{number}", jnp.abs(h)))
            h = at(f"@attend{number}", at(f"@attend.exp{number}", jnp.exp(e)) * x)
        return h


class Conditional(nnx.Module):
    """A branch."""

    def __init__(self, rngs: nnx.Rngs):
        self.a = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.a(x)
        return jax.lax.cond(x.sum() > -1e9, lambda h: jnp.sin(h) * 2, lambda h: h - 1, h)

    def explicit(self, x: jax.Array, at: At) -> jax.Array:
        return at("@mul", at("@sin", jnp.sin(linear(self.a, x))) * 2)


class Stacked(nnx.Module):
    """Layers under `nnx.scan`, with a method that is decorated by `nnx.remat`."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0)
        def make(rngs: nnx.Rngs) -> Layer:
            return Layer(rngs)

        self.layers = make(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )

    def explicit(self, x: jax.Array, at: At) -> jax.Array:
        a: Any = self.layers.a
        for i in range(2):
            h = x @ a.kernel[...][i] + a.bias[...][i]
            x = at(f"layers@softmax/{i}", jax.nn.softmax(at(f"layers@sin/{i}", jnp.sin(h))))
        return x


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.a = nnx.Linear(D, D, rngs=rngs)

    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.sin(self.a(x)))


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return x * 2


doubled.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))


class Mapped(nnx.Module):
    """A vmap of its own over a child, and a function with its own derivative."""

    def __init__(self, rngs: nnx.Rngs):
        self.gated = Gated(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return doubled(jax.vmap(self.gated)(x))

    def explicit(self, x: jax.Array, at: At) -> jax.Array:
        inner = self.gated.explicit(x, lambda name, v: at(f"gated{name}", v))
        return at("@doubled", inner * 2)


MODELS: list[Any] = [
    Attention,
    Gelu,
    Gated,
    Named,
    Scanned,
    Rematerialised,
    Jitted,
    Conditional,
    Stacked,
    Mapped,
]
