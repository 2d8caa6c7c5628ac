"""A zoo of small models, one for each construct that a user of NNX may write.

`ZOO` maps a name to a function that builds `Case(model, args, kwargs)` from scratch; `EAGER_ONLY`
names those whose results cannot leave a `jax.jit`. Invariant: nothing here uses nnx_inspector.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@dataclasses.dataclass
class Case:
    """A model and one way to call it."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=lambda: dict[str, Any]())

    def run(self) -> Any:
        return self.model(*self.args, **self.kwargs)


def rngs(seed: int = 0) -> nnx.Rngs:
    return nnx.Rngs(seed)


def batch(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# ------------------------------------------------------------------- plain


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = 4):
        self.up = nnx.Linear(3, width, rngs=rngs)
        self.down = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class TwoLayers(nnx.Module):
    """The smallest model with a layer inside; several oracles repeat it in `jnp`."""

    def __init__(self, rngs: nnx.Rngs):
        self.a, self.b = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


class CNN(nnx.Module):
    """Convolution, BatchNorm in training mode and Dropout: state and randomness."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 2, kernel_size=(2, 2), rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(2, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(self.dropout(x.mean(axis=(1, 2))))


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Nested(nnx.Module):
    """nnx.List, nnx.Dict and nnx.Sequential in one tree."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(3, rngs) for _ in range(2)])
        self.heads = nnx.Dict(a=nnx.Linear(3, 2, rngs=rngs), b=nnx.Linear(3, 2, rngs=rngs))
        self.tail = nnx.Sequential(nnx.Linear(2, 2, rngs=rngs), nnx.relu)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.tail(self.heads["a"](x) + self.heads["b"](x))


class Shared(nnx.Module):
    """One Linear under two names, called twice."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.second = self.first

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


# -------------------------------------------------------------- transforms


class Stacked(nnx.Module):
    """`depth` blocks in one stacked module, run by nnx.scan."""

    def __init__(self, rngs: nnx.Rngs, depth: int = 3, remat: bool = False):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(3, rngs)

        self.blocks = make(rngs)
        self.depth = depth
        self.remat = remat

    def __call__(self, x):
        def body(x, block):
            return block(x)

        if self.remat:
            body = nnx.remat(body)
        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


class ScannedLinears(nnx.Module):
    """Linear layers and tanh in a scan over their parameters; `inside` transforms its body."""

    def __init__(self, rngs, *, size=4, depth=3, inside=lambda f: f):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return nnx.Linear(size, size, rngs=rngs)

        self.layers, self.inside = make(rngs), inside

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @self.inside
        def run(layer, x):
            return jnp.tanh(layer(x))

        return run(self.layers, x)


class Ensemble(nnx.Module):
    """`size` members of one Linear, run by nnx.vmap."""

    def __init__(self, rngs: nnx.Rngs, size: int = 2):
        @nnx.split_rngs(splits=size)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return nnx.Linear(3, 2, rngs=rngs)

        self.members = make(rngs)

    def __call__(self, x):
        return nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(self.members, x).mean(axis=0)


class Recurrent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.rnn = nnx.RNN(nnx.SimpleCell(3, 2, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.rnn(x)


class While(nnx.Module):
    """A Linear inside nnx.while_loop, called three times."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        def body(carry):
            module, x, i = carry
            return module, jnp.tanh(module(x)), i + 1

        return nnx.while_loop(lambda c: c[2] < 3, body, (self.linear, x, 0))[1]


class Cond(nnx.Module):
    """Two branches; the sign of the input's sum chooses one."""

    def __init__(self, rngs: nnx.Rngs):
        self.positive = nnx.Linear(3, 2, rngs=rngs)
        self.negative = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return nnx.cond(
            x.sum() > 0,
            lambda p, n, x: p(x),
            lambda p, n, x: n(x),
            self.positive,
            self.negative,
            x,
        )


class Decorated(nnx.Module):
    """Methods that a transform wraps in the class body."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    @nnx.jit
    def jitted(self, x):
        return self.linear(x)

    @nnx.remat
    def again(self, x):
        return jnp.tanh(self.linear(x))

    @functools.partial(nnx.vmap, in_axes=(None, 0), out_axes=0)
    def mapped(self, x):
        return self.linear(x)

    @nnx.jit
    def __call__(self, x):
        return self.mapped(self.again(self.jitted(x)))


@nnx.jit
def module_level_jit(module, x):
    """All traces that call it share it and its cache."""
    return jnp.tanh(module(x))


class InnerJit(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return module_level_jit(self.linear, x)


class TeacherStudent(nnx.Module):
    """Two modules of equal structure; the teacher is behind a stop_gradient."""

    def __init__(self, rngs: nnx.Rngs):
        self.student = MLP(rngs)
        self.teacher = MLP(rngs)

    def __call__(self, x):
        target = jax.lax.stop_gradient(self.teacher(x))
        return ((self.student(x) - target) ** 2).mean()


# ----------------------------------------------------------------- classes


class Base(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Inherits(Base):
    pass


class Supers(Base):
    def __call__(self, x):
        return 2.0 * super().__call__(x)


class SupersTwice(Supers):
    def __call__(self, x):
        return 1.0 + super().__call__(x)


class RematSuper(Base):
    @nnx.remat
    def __call__(self, x):
        return 2.0 * super().__call__(x)


class SuperFamily(nnx.Module):
    """A base class in the tree beside its subclasses."""

    def __init__(self, rngs: nnx.Rngs):
        self.base = Base(rngs)
        self.inherits = Inherits(rngs)
        self.supers = Supers(rngs)
        self.twice = SupersTwice(rngs)

    def __call__(self, x):
        return self.twice(self.supers(self.inherits(self.base(x))))


class Methods(nnx.Module):
    """Several public methods, and all kinds of attributes that are not sites."""

    def __init__(self, rngs: nnx.Rngs):
        self.encoder = nnx.Linear(3, 2, rngs=rngs)
        self.decoder = nnx.Linear(2, 3, rngs=rngs)

    def encode(self, x):
        return jnp.tanh(self.encoder(x))

    def decode(self, z):
        return self.decoder(z)

    def update(self, x):
        """A method named like one of nnx.Dict, in a class that is not an nnx.Dict."""
        return self._private(x)

    def _private(self, x):
        return x * self.factor

    @property
    def factor(self):
        return 2.0

    @staticmethod
    def halve(x):
        return x / 2

    @classmethod
    def build(cls, rngs):
        return cls(rngs)

    def __call__(self, x):
        return self.update(self.halve(self.decode(self.encode(x))))


@dataclasses.dataclass(frozen=True)
class Frozen(nnx.Module):
    factor: float = 3.0

    def __call__(self, x):
        return self.factor * x


class Sealed(type(nnx.Module)):
    def __setattr__(cls, name, value):
        if name == "__call__" or not name.startswith("_"):
            raise AttributeError(f"{cls.__name__} is sealed")
        super().__setattr__(name, value)


class SealedModule(nnx.Module, metaclass=Sealed):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Abstract(nnx.Module, abc.ABC):
    @abc.abstractmethod
    def __call__(self, x): ...


class Concrete(Abstract):
    def __init__(self, rngs: nnx.Rngs):
        self.frozen = nnx.data(Frozen())
        self.sealed = SealedModule(rngs)

    def __call__(self, x):
        return self.sealed(self.frozen(x))


# ------------------------------------------------------ values of other kinds


class TreeOutput(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x, *, scale=1.0, mask=None):
        y = self.linear(x) * scale
        if mask is not None:
            y = jnp.where(mask, y, 0.0)
        return {"y": y, "parts": (y[:1], [y.sum(axis=0)]), "none": None}


class StringArgument(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x, mode):
        y = self.linear(x)
        return y if mode == "linear" else jnp.tanh(y)


class ReturnsNone(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.last = nnx.Variable(jnp.zeros((4, 3)))

    def __call__(self, x):
        self.last[...] = self.linear(x)


class Words(nnx.Module):
    """Returns a string, a function and a number in addition to the array."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return "logits", jnp.tanh, 3, self.linear(x)


class NumpyOutput(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.table = Table()

    def __call__(self, x):
        return self.linear(x) + self.table()


class Table(nnx.Module):
    def __call__(self):
        return np.arange(3, dtype=np.float32)


class MakesModule(nnx.Module):
    """A module that is made in the forward pass and is not part of the model."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return nnx.LayerNorm(3, rngs=nnx.Rngs(0))(self.linear(x))


class Recursive(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x, depth=2):
        if depth == 0:
            return x
        return self(jnp.tanh(self.linear(x)), depth - 1)


class Argmax(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.pick = Pick()

    def __call__(self, x):
        logits = self.linear(x)
        return jnp.take_along_axis(logits, self.pick(logits)[:, None], axis=1).mean()


class Pick(nnx.Module):
    def __call__(self, logits):
        return jnp.argmax(logits, axis=-1)


class Half(nnx.Module):
    """bfloat16 throughout."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return self.linear(x.astype(jnp.bfloat16))


class Keys(nnx.Module):
    """Returns a new-style PRNG key."""

    def __init__(self, rngs: nnx.Rngs):
        self.rngs = rngs
        self.source = KeySource(rngs)

    def __call__(self, x):
        return x + jax.random.normal(self.source(), x.shape)


class KeySource(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.rngs = rngs

    def __call__(self):
        return self.rngs.noise()


class Sows(nnx.Module):
    """The user's own sow."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        self.sow(nnx.Intermediate, "features", y)
        return jnp.tanh(y)


class Perturbs(nnx.Module):
    """The user's own perturb."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        y = self.perturb("hidden", self.linear(x))
        return jnp.tanh(y)


class Fails(nnx.Module):
    """Changes state, then raises the user's own exception."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        self.norm(self.linear(x))
        raise ForwardError("the user's own")


class ForwardError(Exception):
    pass


ZOO: dict[str, Callable[[], Case]] = {
    "mlp": lambda: Case(MLP(rngs()), (batch(4, 3),)),
    "cnn": lambda: Case(CNN(rngs()), (batch(4, 3, 3, 1),)),
    "nested": lambda: Case(Nested(rngs()), (batch(4, 3),)),
    "shared": lambda: Case(Shared(rngs()), (batch(4, 3),)),
    "scan": lambda: Case(Stacked(rngs()), (batch(4, 3),)),
    "scan_remat": lambda: Case(Stacked(rngs(), remat=True), (batch(4, 3),)),
    "ensemble": lambda: Case(Ensemble(rngs()), (batch(4, 3),)),
    "rnn": lambda: Case(Recurrent(rngs()), (batch(2, 4, 3),)),
    "while": lambda: Case(While(rngs()), (batch(4, 3),)),
    "cond": lambda: Case(Cond(rngs()), (batch(4, 3),)),
    "decorated": lambda: Case(Decorated(rngs()), (batch(4, 3),)),
    "inner_jit": lambda: Case(InnerJit(rngs()), (batch(4, 3),)),
    "teacher": lambda: Case(TeacherStudent(rngs()), (batch(4, 3),)),
    "super": lambda: Case(SuperFamily(rngs()), (batch(4, 3),)),
    "remat_super": lambda: Case(RematSuper(rngs()), (batch(4, 3),)),
    "methods": lambda: Case(Methods(rngs()), (batch(4, 3),)),
    "frozen_sealed": lambda: Case(Concrete(rngs()), (batch(4, 3),)),
    "tree": lambda: Case(TreeOutput(rngs()), (batch(4, 3),)),
    "tree_kwargs": lambda: Case(
        TreeOutput(rngs()), (batch(4, 3),), {"scale": 2.0, "mask": jnp.ones((4, 2), bool)}
    ),
    "string": lambda: Case(StringArgument(rngs()), (batch(4, 3), "tanh")),
    "none": lambda: Case(ReturnsNone(rngs()), (batch(4, 3),)),
    "words": lambda: Case(Words(rngs()), (batch(4, 3),)),
    "numpy": lambda: Case(NumpyOutput(rngs()), (batch(4, 3),)),
    "makes_module": lambda: Case(MakesModule(rngs()), (batch(4, 3),)),
    "recursive": lambda: Case(Recursive(rngs()), (batch(4, 3),)),
    "integer": lambda: Case(Argmax(rngs()), (batch(4, 3),)),
    "bf16": lambda: Case(Half(rngs()), (batch(4, 3),)),
    "keys": lambda: Case(Keys(rngs()), (batch(4, 3),)),
    "sows": lambda: Case(Sows(rngs()), (batch(4, 3),)),
    "perturbs": lambda: Case(Perturbs(rngs()), (batch(4, 3),)),
    "linear": lambda: Case(nnx.Linear(3, 3, rngs=rngs()), (batch(4, 3),)),
    "attention": lambda: Case(
        nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs()), (batch(2, 3, 4),)
    ),
}

EAGER_ONLY = {"words", "string"}
"""Cases with arguments or results that jax.jit itself rejects."""

TRANSFORMED = {
    "scan", "scan_remat", "ensemble", "rnn", "while", "cond", "decorated", "inner_jit",
    "remat_super",
}  # fmt: skip
"""Cases whose submodules are called within a transform, where Python sees tracers."""


class Split(nnx.Module):
    """Returns two values of different shapes in a mapping."""

    def __call__(self, x):
        return {"left": x[:, :2], "right": x[:, 2]}


class Join(nnx.Module):
    """Takes both values, one of them by keyword."""

    def __call__(self, left, *, right):
        return left + right[:, None]


class SplitAndJoin(nnx.Module):
    """Several values pass from one module to another."""

    def __init__(self):
        self.split, self.join = Split(), Join()

    def __call__(self, x):
        parts = self.split(x)
        return self.join(parts["left"], right=parts["right"])
