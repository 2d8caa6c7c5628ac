"""Activation functions are recognised by their values, however they are written."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Literal

from nnx_inspector.program.analysis import activations
from nnx_inspector.program.analysis.activations import (
    POINTS,
    TOLERANCE,
    activation_after,
    activation_before,
)

RELU = {
    "nnx": nnx.relu,
    "relu6": jax.nn.relu6,
    "maximum": lambda x: jnp.maximum(x, 0),
    "maximum, turned": lambda x: jnp.maximum(0.0, x),
    "where": lambda x: jnp.where(x > 0, x, 0.0),
    "where, turned": lambda x: jnp.where(x <= 0, 0, x),
    "select": lambda x: jax.lax.select(x > 0, x, jnp.zeros_like(x)),
    "clip": lambda x: jnp.clip(x, 0.0, None),
    "clamp": lambda x: jnp.clip(x, 0, 20.0),
    "product": lambda x: x * (x > 0),
    "absolute": lambda x: (x + jnp.abs(x)) / 2,
    "squared": lambda x: jnp.square(nnx.relu(x)),
    "float32 inside": lambda x: nnx.relu(x.astype(jnp.float32)).astype(x.dtype),
    "jit": jax.jit(lambda x: nnx.relu(x)),
    "times two": lambda x: 2 * nnx.relu(x),
}
OTHER = {
    "tanh": {
        "jnp": jnp.tanh,
        "exponentials": lambda x: (jnp.exp(x) - jnp.exp(-x)) / (jnp.exp(x) + jnp.exp(-x)),
        "sigmoid": lambda x: 2 * nnx.sigmoid(2 * x) - 1,
    },
    "sigmoid": {
        "nnx": nnx.sigmoid,
        "by hand": lambda x: 1 / (1 + jnp.exp(-x)),
        "by tanh": lambda x: 0.5 * (jnp.tanh(0.5 * x) + 1),
        "and more": lambda x: 3 * nnx.sigmoid(x) + 1,
    },
    "silu": {"nnx": nnx.silu, "by hand": lambda x: x * nnx.sigmoid(x)},
    "gelu": {
        "nnx": nnx.gelu,
        "exact": lambda x: nnx.gelu(x, approximate=False),
        "by hand": lambda x: 0.5 * x * (1 + jax.scipy.special.erf(x / jnp.sqrt(2.0))),
    },
}
NONE = {
    "identity": lambda x: x,
    "leaky": nnx.leaky_relu,
    "elu": nnx.elu,
    "softplus": nnx.softplus,
    "scaled": lambda x: 3 * x,
    "negative": lambda x: nnx.relu(-x),
    "integers": lambda x: nnx.relu(x.astype(jnp.int32)).astype(jnp.float32),
    "sum": lambda x: nnx.relu(x.sum(-1, keepdims=True) * x),
    "with another": lambda x: nnx.relu(x * jnp.arange(3.0)),
    "sine": jnp.sin,
    "complex": lambda x: jnp.abs(x * (1 + 2j)) + jnp.real(x + 1j),
}
CASES = [
    *[("relu", name, f) for name, f in RELU.items()],
    *[(kind, name, f) for kind, of in OTHER.items() for name, f in of.items()],
    *[("", name, f) for name, f in NONE.items()],
]


def program(f, dtype=jnp.float32):
    """A jaxpr of matmul, function, matmul; and where each variable is made and used."""
    w, v = jnp.ones((3, 3), dtype), jnp.ones((3, 3), dtype)
    jaxpr = jax.make_jaxpr(lambda x, w, v: f(x @ w) @ v)(jnp.ones((2, 3), dtype), w, v).jaxpr
    made = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
    uses: dict = {}
    for equation in jaxpr.eqns:
        for atom in equation.invars:
            if not isinstance(atom, Literal):
                uses.setdefault(atom, []).append(equation)
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    return products[0].outvars[0], products[-1].invars[0], uses, made, set(jaxpr.outvars)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_function_is_told_however_it_is_written(dtype):
    for kind, name, f in CASES:
        into, _, uses, made, leaving = program(f, dtype)
        assert activation_after(into, uses, made, leaving) == kind, name


def test_a_value_is_told_where_it_comes_from():
    for kind, name, f in CASES:
        _, out, _, made, _ = program(f)
        if name == "and more":  # the output is another one then
            kind = ""
        elif name in ("negative", "sum", "with another"):  # the input is another one
            kind = "relu"
        elif name == "sine":
            kind = "sinusoid"
        assert activation_before(out, made) == kind, name


SINUSOIDS = {
    "after each other": lambda x: jnp.concatenate([jnp.sin(x), jnp.cos(x)], -1)[:, :0:-2],
    "in turn": lambda x: jnp.zeros((2, 6)).at[:, 0::2].set(jnp.sin(x)).at[:, 1::2].set(jnp.cos(x)),
    "chosen": lambda x: jnp.where(jnp.arange(3) % 2 == 0, jnp.sin(x), jnp.cos(x)),
    "scaled": lambda x: jnp.sqrt(2.0) * jnp.cos(x).astype(jnp.bfloat16),
    "eighteen": lambda x: jnp.concatenate(
        [f(x / 2**i) for i in range(9) for f in (jnp.sin, jnp.cos)]
    ),
    "jit": jax.jit(lambda x: jnp.stack([jnp.sin(x), jnp.cos(x)], -1).reshape(2, 6)),
}
NO_SINUSOIDS = {
    "beside it": lambda x: jnp.concatenate([x, jnp.sin(x)], -1),
    "times it": lambda x: x * jnp.sin(x),
    "a sum": lambda x: x + jnp.sin(x),
    "a tangent": lambda x: jnp.sin(x) / jnp.cos(x),
    "a number": lambda x: jnp.ones_like(x),
    "too many": lambda x: jnp.concatenate([jnp.sin(x), *[x + i for i in range(50)]]),
}


@pytest.mark.parametrize("name", [*SINUSOIDS, *NO_SINUSOIDS])
def test_sines_and_cosines_are_a_sinusoid_in_any_order(name):
    f = {**SINUSOIDS, **NO_SINUSOIDS}[name]
    jaxpr = jax.make_jaxpr(f)(jnp.ones((2, 3))).jaxpr
    made = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
    assert activation_before(jaxpr.outvars[0], made) == ("sinusoid" if name in SINUSOIDS else "")


def test_what_goes_elsewhere_too_goes_into_no_function():
    for f in (
        lambda x: nnx.relu(x) + x.sum(-1, keepdims=True),
        lambda x: nnx.relu(x) + jnp.tanh(x),
        lambda x: nnx.relu(x) + x,
    ):
        into, _, uses, made, leaving = program(f)
        assert activation_after(into, uses, made, leaving) == ""
    into, _, uses, made, _ = program(nnx.relu)
    assert activation_after(into, uses, made, {into}) == ""


def test_the_functions_are_those_of_jax_and_far_apart():
    x = jnp.asarray(POINTS, jnp.float32)
    values = {f.__name__: np.asarray(f(x)) for f in (nnx.tanh, nnx.sigmoid, nnx.silu, nnx.gelu)}
    for a, of_a in values.items():
        for b, of_b in values.items():
            assert a == b or np.abs(of_a - of_b).max() > 10 * TOLERANCE


def test_a_sum_over_a_thousand_modules_is_no_constant():
    """It is looked through without a recursion into each summand."""

    def total(x):
        for _ in range(1500):
            x = x + 1.0
        return x

    jaxpr = jax.make_jaxpr(total)(1.0).jaxpr
    made = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
    # a literal inside has no public name
    assert activations._constant(jaxpr.outvars[0], made) is None
