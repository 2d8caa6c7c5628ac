"""Networks whose attributes, arguments and results have unusual forms, and speech models."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from network import Network, gauss, squares

WIDTH = 4


# ------------------------------------------------------------------------------ attributes


class Registry(nnx.Module):
    """Modules in a dict of lists, marked as data, and functions and numbers."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.banks = nnx.data({
            "early": [nnx.Linear(3, WIDTH, rngs=rngs), nnx.tanh],
            "late": [nnx.Linear(WIDTH, 2, rngs=rngs), functools.partial(jnp.multiply, 2.0)],
        })  # fmt: skip
        self.order = nnx.static(("early", "late"))

    def __call__(self, x: Any) -> Any:
        for name in self.order:
            for part in self.banks[name]:
                x = part(x)
        return x


def modules_in_a_dict_of_lists() -> Network:
    return Network(Registry(rngs=nnx.Rngs(0)), (gauss(2, 3),))


class Statistics(nnx.Pytree):
    """Holds Variables but is not a module."""

    def __init__(self, size: int):
        self.mean, self.gain = nnx.BatchStat(jnp.zeros(size)), nnx.Param(jnp.ones(size))

    def follow(self, x: Any) -> Any:
        self.mean[...] = 0.9 * self.mean + 0.1 * x.mean(0)
        return (x - self.mean[...]) * self.gain


class Holding(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.statistics = Statistics(3)
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.table = gauss(2, 2, seed=4)  # an array without a Variable
        self.fixed = np.eye(2, dtype=np.float32)
        self.pair = nnx.Variable({"a": jnp.ones(2), "b": (jnp.zeros(2), None)})

    def __call__(self, x: Any) -> Any:
        y = self.linear(self.statistics.follow(x)) @ self.table @ self.fixed
        old = self.pair.get_value()
        self.pair.set_value({"a": old["a"] + y.mean(0), "b": old["b"]})
        return y + old["a"]


def attributes_that_are_not_modules() -> Network:
    return Network(Holding(rngs=nnx.Rngs(0)), (gauss(3, 3),))


@nnx.dataclass
class Dataclass(nnx.Module):
    layer: nnx.Linear
    scale: float = nnx.static(default=2.0)
    shift: Any = nnx.data(default=None)

    def __call__(self, x: Any) -> Any:
        y = self.scale * self.layer(x)
        return y if self.shift is None else y + self.shift


def module_that_is_a_dataclass() -> Network:
    model = Dataclass(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), shift=nnx.Param(jnp.ones(2)))
    return Network(model, (gauss(2, 3),))


class Decorated(nnx.Module):
    """The example of Flax's documentation: the constructor under vmap, the call under scan."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0, 0))
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.bn = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def __call__(self, x: Any) -> Any:
        return nnx.relu(self.drop(self.bn(self.linear(x))))


def constructor_under_vmap_and_call_under_scan() -> Network:
    return Network(Decorated(nnx.Rngs(0)), (gauss(2, 3),))


class Bridged(nnx.Module):
    """A Linen module among NNX modules."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(3, WIDTH, rngs=rngs)
        inner = linen.Sequential([linen.Dense(3), linen.tanh])
        self.linen = nnx.bridge.ToNNX(inner, rngs=rngs).lazy_init(jnp.ones((1, WIDTH)))

    def __call__(self, x: Any) -> Any:
        return self.linen(self.first(x))


def linen_among_nnx() -> Network:
    return Network(Bridged(rngs=nnx.Rngs(0)), (gauss(2, 3),))


# ---------------------------------------------------------------------- arguments, results


class Mode(enum.Enum):
    PLAIN = "plain"
    DOUBLED = "doubled"


class Given(nnx.Module):
    """Takes a Variable, which it writes to, a State, an enum, a slice and further arguments."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)

    def __call__(
        self, x: Any, memory: Any, mode: Mode, *rest: Any, where: slice, **more: Any
    ) -> Any:
        y = self.linear(x)[where] * (2 if mode is Mode.DOUBLED else 1)
        memory[...] = 0.5 * memory + y.mean(0)
        for extra in rest:
            y = y + extra
        return {"y": y, "mode": mode, "names": sorted(more)}


def variables_and_enums_as_arguments() -> Network:
    args = (gauss(3, 3), nnx.Cache(jnp.zeros(2)), Mode.DOUBLED, 1.5, gauss(2))
    loss = lambda m, *args, **kwargs: squares(m(*args, **kwargs)["y"])  # noqa: E731
    model = Given(rngs=nnx.Rngs(0))
    return Network(model, args, {"where": slice(1, None), "name": "x", "none": None}, loss)


class Handing(nnx.Module):
    """Returns one of its own modules, a State, and a Variable."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.heads = nnx.List([nnx.Linear(3, 2, rngs=rngs) for _ in range(2)])

    def __call__(self, x: Any, which: int) -> tuple[Any, Any, Any]:
        head = self.heads[which]
        return head(x), head, head.kernel


def module_among_the_results() -> Network:
    loss = lambda m, x, which: squares(m(x, which)[0])  # noqa: E731
    return Network(Handing(rngs=nnx.Rngs(0)), (gauss(2, 3), 1), loss=loss)


class Stateful(nnx.Module):
    """Returns a State of its own parameters beside the result."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.calls = nnx.Variable(0)

    def __call__(self, x: Any) -> tuple[Any, Any]:
        self.calls.set_value(self.calls.get_value() + 1)
        return self.linear(x), nnx.to_pure_dict(nnx.state(self.linear, nnx.Param))


def state_among_the_results() -> Network:
    return Network(Stateful(rngs=nnx.Rngs(0)), (gauss(2, 3),))


class Adaptive(nnx.Module):
    """A number chooses a head; a block may be skipped."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.heads = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(3)])
        self.block = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x: Any, which: Any) -> Any:
        branches = [functools.partial(lambda i, heads, x: heads[i](x), i) for i in range(3)]
        x = nnx.switch(which, branches, self.heads, x)
        return nnx.cond(x.sum() > 1e9, lambda m, x: m(x), lambda m, x: x, self.block, x)


def heads_by_switch_and_cond() -> Network:
    return Network(Adaptive(rngs=nnx.Rngs(0)), (gauss(2, 3), jnp.array(1)))


# ---------------------------------------------------------------------------- own functions


@jax.custom_vjp
def spike(x: Any) -> Any:
    return (x > 0).astype(x.dtype)


spike.defvjp(lambda x: (spike(x), x), lambda x, g: (g / (1 + jnp.abs(x)) ** 2,))


class Spiking(nnx.Module):
    """Integrates and fires over time: nnx.scan over a module that is not stacked."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.inward = nnx.Linear(2, 3, rngs=rngs)
        self.leak = nnx.Param(jnp.full((3,), 0.8))
        self.activation = spike

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, None, 0), out_axes=(nnx.Carry, 0))
        def step(v: Any, model: Spiking, x: Any) -> Any:
            v = model.leak[...] * v + model.inward(x)
            fired = model.activation(v - 0.5)
            return v * (1 - fired), fired

        return step(jnp.zeros((x.shape[1], 3)), self, x)[1]


def spikes_with_a_gradient_of_their_own() -> Network:
    return Network(Spiking(rngs=nnx.Rngs(0)), (gauss(3, 2, 2),))


class Quantised(nnx.Variable):
    """Weights in int8."""


class Int8(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.weights = Quantised(jnp.asarray(np.arange(-6, 6).reshape(4, 3) * 10, jnp.int8))
        self.scale = nnx.Param(jnp.full((3,), 0.01))

    def __call__(self, x: Any) -> Any:
        steps = jnp.abs(x).max() / 127
        q = jnp.round(x / steps).astype(jnp.int8)
        y = jax.lax.dot(q, self.weights[...], preferred_element_type=jnp.int32)
        return y * steps * self.scale


class Straight(nnx.Module):
    """Rounds with a straight-through gradient, then multiplies in int8."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.linear, self.int8 = nnx.Linear(3, 4, rngs=rngs), Int8(rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y = self.linear(x)
        return self.int8(y + jax.lax.stop_gradient(jnp.round(y) - y)), y


def weights_in_int8() -> Network:
    return Network(Straight(rngs=nnx.Rngs(0)), (gauss(2, 3),))


# ---------------------------------------------------------------------------------- speech


class Conformer(nnx.Module):
    """Half a feed-forward, attention, a gated convolution with BatchNorm, and another half."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first, self.last = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.attn = nnx.MultiHeadAttention(2, WIDTH, decode=False, dropout_rate=0.2, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.depth = nnx.Conv(WIDTH, WIDTH, (3,), feature_group_count=WIDTH, rngs=rngs)
        self.bn, self.norm = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x: Any, lengths: Any, deterministic: bool | None = None) -> tuple[Any, Any]:
        valid = jnp.arange(x.shape[1])[None] < lengths[:, None]
        x = x + 0.5 * nnx.silu(self.first(x))
        x = x + self.attn(x, mask=valid[:, None, None], deterministic=deterministic)
        y = self.bn(self.depth(nnx.glu(self.gate(x))), mask=valid[..., None])
        x = x + nnx.silu(y)
        return self.norm(x + 0.5 * self.last(x)), valid


def conformer_with_lengths() -> Network:
    args = (gauss(2, 4, WIDTH), jnp.array([4, 2]))
    # what is normalised has a mean square of one, whatever the parameters: its gradient is rounding
    far = gauss(2, 4, WIDTH, seed=2)
    loss = lambda m, *args, **kwargs: jnp.square(m(*args, **kwargs)[0] - far).mean()  # noqa: E731
    return Network(Conformer(rngs=nnx.Rngs(0)), args, {"deterministic": False}, loss)


class Whisper(nnx.Module):
    """Encodes sound and decodes tokens; keys and values are passed in a dict and returned."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(2, WIDTH, (3,), strides=2, rngs=rngs)
        self.tokens = nnx.Embed(5, WIDTH, rngs=rngs)
        linear = functools.partial(nnx.Linear, WIDTH, WIDTH, rngs=rngs)
        self.q, self.k, self.v = linear(), linear(), linear()

    def encode(self, sound: Any) -> Any:
        return nnx.gelu(self.conv(sound))

    def decode(self, tokens: Any, sound: Any = None, cache: Any = None) -> tuple[Any, Any]:
        if cache is None:
            cache = {"k": self.k(sound), "v": self.v(sound)}
        p = nnx.softmax(self.q(self.tokens(tokens)) @ cache["k"].swapaxes(1, 2))
        return self.tokens.attend(p @ cache["v"]), cache

    def __call__(self, sound: Any, tokens: Any) -> Any:
        logits, cache = self.decode(tokens, self.encode(sound))
        for _ in range(2):
            best = logits[:, -1:].argmax(-1)
            logits, cache = self.decode(best, cache=cache)
        return {"logits": logits, "cache": cache}


def whisper_that_decodes_greedily() -> Network:
    return Network(Whisper(rngs=nnx.Rngs(0)), (gauss(2, 4, 2), jnp.array([[0, 1], [2, 3]])))


@dataclasses.dataclass
class Sample:
    """Not a pytree: jax treats it as one leaf, but it holds arrays."""

    x: Any


class Takes(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, sample: Sample) -> Sample:
        return Sample(self.linear(sample.x))


def dataclass_that_is_no_pytree() -> Network:
    loss = lambda m, sample: squares(m(sample).x)  # noqa: E731
    return Network(Takes(rngs=nnx.Rngs(0)), (Sample(gauss(2, 3)),), loss=loss)


FORMS: list[Callable[[], Network]] = [
    modules_in_a_dict_of_lists,
    attributes_that_are_not_modules,
    module_that_is_a_dataclass,
    constructor_under_vmap_and_call_under_scan,
    linen_among_nnx,
    variables_and_enums_as_arguments,
    module_among_the_results,
    state_among_the_results,
    heads_by_switch_and_cond,
    spikes_with_a_gradient_of_their_own,
    weights_in_int8,
    conformer_with_lengths,
    whisper_that_decodes_greedily,
    dataclass_that_is_no_pytree,
]
