"""The user's modules in generated models: one for each way of writing a module.

Each holds other modules and keeps the shape of its input. Invariant: nothing here uses
nnx_inspector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import models
from flax import nnx

WIDTH = 4
DEPTH = 2
"""The number of layers of a stack, members of an ensemble, and turns of a loop."""


class ForwardError(Exception):
    """The exception that `Fails` raises."""


class Holds(nnx.Module):
    """Holds one module; the subclasses differ in how they call it."""

    def __init__(self, inner: nnx.Module):
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)


class Residual(Holds):
    def __call__(self, x):
        return x + 0.5 * self.inner(x)


class Inherits(Holds):
    """Inherits its parent's `__call__`."""


class Supers(Residual):
    def __call__(self, x):
        return 0.5 * super().__call__(x)


class SupersTwice(Supers):
    def __call__(self, x):
        return 0.1 + super().__call__(x)


class RematSupers(Residual):
    @nnx.remat
    def __call__(self, x):
        return 0.5 * super().__call__(x)


class JitCall(Holds):
    @nnx.jit
    def __call__(self, x):
        return jnp.tanh(self.inner(x))


class RematMethod(Holds):
    @nnx.remat
    def again(self, x):
        return jnp.tanh(self.inner(x))

    def __call__(self, x):
        return self.again(x)


class Private(Holds):
    """Calls through code that is not a site: private, static and class methods, a property."""

    @staticmethod
    def half(x):
        return 0.5 * x

    @classmethod
    def one_more(cls, x):
        return cls.half(x) + 1.0

    @property
    def factor(self):
        return 0.5

    def _run(self, x):
        return self.inner(x)

    def __call__(self, x):
        return self.factor * self._run(self.one_more(x))


class Recursive(Holds):
    def __call__(self, x, turns=1):
        x = jnp.tanh(self.inner(x))
        return self(x, turns=turns - 1) if turns else x


class InnerJit(Holds):
    """Calls a jitted function of this file that all models share."""

    def __call__(self, x):
        return models.module_level_jit(self.inner, x)


class Functional(Holds):
    """Split and merged by hand around a transform of jax."""

    transform: Callable[..., Any] = staticmethod(jax.jit)

    def __call__(self, x):
        graphdef, state = nnx.split(self.inner)

        def pure(state, x):
            module = nnx.merge(graphdef, state)
            y = module(x)
            return y, nnx.state(module)

        y, state = type(self).transform(pure)(state, x)
        nnx.update(self.inner, state)
        return y


class Checkpoint(Functional):
    transform = staticmethod(jax.checkpoint)


class Loop(Holds):
    def __call__(self, x):
        def body(carry):
            module, x, i = carry
            return module, jnp.tanh(module(x)), i + 1

        return nnx.while_loop(lambda carry: carry[2] < DEPTH, body, (self.inner, x, 0))[1]


class Stacked(Holds):
    """`inner` holds `DEPTH` layers on a leading axis, run one after the other."""

    def __call__(self, x):
        scan = nnx.scan(
            lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return scan(x, self.inner)


class Ensemble(Holds):
    """`inner` holds `DEPTH` members on a leading axis, run side by side."""

    def __call__(self, x):
        return nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(self.inner, x).mean(axis=0)


class Sows(Holds):
    def __call__(self, x):
        y = self.inner(x)
        self.sow(nnx.Intermediate, "features", y)
        return y


class Perturbs(Holds):
    def __call__(self, x):
        return jnp.tanh(self.perturb("hidden", self.inner(x)))


class Closure(Holds):
    """Calls a function that closes over the module."""

    def __init__(self, inner: nnx.Module):
        super().__init__(inner)
        self.function = lambda x: inner(x)

    def __call__(self, x):
        return self.function(x)


class BoundMethod(Holds):
    """Calls a bound method that it keeps."""

    def __init__(self, inner: nnx.Module):
        super().__init__(inner)
        self.function = inner.__call__

    def __call__(self, x):
        return self.function(x)


class Makes(Holds):
    """Makes a module in the forward pass and drops it."""

    def __call__(self, x):
        return nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))(self.inner(x))


class Fails(Holds):
    def __call__(self, x):
        self.inner(x)
        raise ForwardError("the user's own")


class TreeOutput(Holds):
    """Passes a pytree with leaves that are not arrays, by keyword."""

    def __call__(self, x, *, mode, scale=1.0):
        y = self.inner(x) * scale
        return {"y": y, "parts": (y[:1], [y.mean()]), "none": None, "text": mode}


class TreeCaller(Holds):
    def __call__(self, x):
        out = self.inner(x, mode="train", scale=0.5)
        return out["y"] + out["parts"][1][0]


class Methods(nnx.Module):
    def __init__(self, encoder: nnx.Module, decoder: nnx.Module):
        self.encoder = encoder
        self.decoder = decoder

    def encode(self, x):
        return jnp.tanh(self.encoder(x))

    def decode(self, z, *, scale):
        return scale * self.decoder(z)

    def __call__(self, x):
        return self.decode(self.encode(x), scale=0.5)


class Cond(nnx.Module):
    def __init__(self, positive: nnx.Module, negative: nnx.Module):
        self.positive = positive
        self.negative = negative

    def __call__(self, x):
        modules = (self.positive, self.negative)
        return nnx.cond(x.sum() > 0, lambda p, n, x: p(x), lambda p, n, x: n(x), *modules, x)


class Twice(nnx.Module):
    """One module under two names; the name that NNX uses is called last."""

    def __init__(self, inner: nnx.Module):
        self.z = inner
        self.a = inner

    def __call__(self, x):
        return self.a(jnp.tanh(self.z(x)))


class Between(nnx.Module):
    """One module within two others."""

    def __init__(self, inner: nnx.Module):
        self.left = Residual(inner)
        self.right = Residual(inner)

    def __call__(self, x):
        return self.right(x) + self.left(x)


class Chain(nnx.Module):
    def __init__(self, *inner: nnx.Module):
        self.blocks = nnx.List(inner)

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x


class Heads(nnx.Module):
    def __init__(self, *inner: nnx.Module):
        self.heads = nnx.Dict({f"h{i}": module for i, module in enumerate(inner)})

    def __call__(self, x):
        return sum(head(x) for _, head in self.heads.items()) / len(self.heads)


class Grid(nnx.Module):
    """Lists of lists."""

    def __init__(self, *inner: nnx.Module):
        self.rows = nnx.List([nnx.List(inner[:1]), nnx.List(inner[1:])])

    def __call__(self, x):
        for row in self.rows:
            for cell in row:
                x = jnp.tanh(cell(x))
        return x


class PlainGrid(nnx.Module):
    """Plain lists in a plain dict, marked as data for NNX."""

    def __init__(self, *inner: nnx.Module):
        self.rows = nnx.data({"first": [*inner[:1]], "rest": [*inner[1:]]})

    def __call__(self, x):
        for row in self.rows.values():
            for cell in row:
                x = jnp.tanh(cell(x))
        return x


@dataclasses.dataclass(frozen=True)
class Frozen(nnx.Module):
    inner: nnx.Module
    factor: float = 0.5

    def __call__(self, x):
        return self.factor * self.inner(x)


class Sealed(nnx.Module, metaclass=models.Sealed):
    def __init__(self, inner: nnx.Module):
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)


class Slots(nnx.Module):
    __slots__ = ()

    def __init__(self, inner: nnx.Module):
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)


class Embedded(nnx.Module):
    """Calls both methods of `nnx.Embed`."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        ids = jnp.clip(jnp.abs(x[..., 0]), 0, WIDTH - 1).astype(int)
        return self.table.attend(x + self.table(ids))


class Noise(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.rngs = rngs.noise.fork()

    def __call__(self, x):
        return x + 0.1 * jax.random.normal(self.rngs(), x.shape)


class Counts(nnx.Module):
    def __init__(self):
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return x / (1.0 + self.calls[...])
