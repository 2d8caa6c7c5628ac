"""From which inputs of a program the operands of a mark come."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_inspector.program.editing.input_sources import input_sources
from nnx_inspector.program.marks import OUTPUT, mark
from nnx_inspector.program.survey import survey

W, V, X = jnp.ones((3, 3)), jnp.zeros((3, 3)), jnp.ones((5, 3))


def call(w: jax.Array, x: jax.Array) -> jax.Array:
    """Mark `w`, and use it."""
    (w,) = mark.bind(w, owner="o", site="s", part=OUTPUT, structure=None)
    return x @ w


def sources(f: Any, *args: Any) -> list[set[int]]:
    """The sources of each marked value of a program; a negative one is -1."""
    found = survey(jax.make_jaxpr(f)(*args), "o", finished=True)
    return [{max(n, -1) for n in these} for _, (these,) in input_sources(found, OUTPUT)]


def in_scan(w: jax.Array, v: jax.Array, x: jax.Array) -> Any:
    def body(carry: Any, row: jax.Array) -> Any:
        w, v = carry
        return (w - 0.1 * v, v), call(w, row[None])

    return jax.lax.scan(body, (w, v), x)


def in_while(w: jax.Array, v: jax.Array, x: jax.Array) -> Any:
    test = lambda carry: jnp.sum(carry[1]) < 3  # noqa: E731
    return jax.lax.while_loop(test, lambda c: (c[0], c[1] + call(c[0], x)), (w, x))


def returned_by_jit(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
    swapped = jax.jit(lambda w, v: (2 * v, w))(w, v)
    return call(swapped[1], x)


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda w, v, x: call(v, x), [{1}]),
        (lambda w, v, x: call(w.T.astype(jnp.bfloat16), x), [{0}]),
        (lambda w, v, x: call(w - 0.1 * v, x), [{0, 1}]),
        (lambda w, v, x: jax.vmap(lambda s: call(w - s * v, x))(x[:, 0]), [{0, 1}]),
        (lambda w, v, x: jax.vmap(lambda s: call(s * (x.T @ x), x))(x[:, 0]), [{-1}]),
        (lambda w, v, x: call(x.T @ x, x), [{-1}]),
        (lambda w, v, x: call(w - 0.1 * (x.T @ x), x), [{0}]),
        (lambda w, v, x: call(v[:2, :2], x[:, :2]), [{-1}]),
        (lambda w, v, x: jax.jit(call)(w, x) + jax.jit(call)(v, x), [{0}, {1}]),
        (lambda w, v, x: jax.grad(lambda v: jax.checkpoint(call)(v, x).sum())(v), [{1}]),
        (lambda w, v, x: jax.lax.cond(x[0, 0] > 0, call, lambda v, x: call(-v, x), v, x),
         [{1}, {1}]),
        (lambda w, v, x: jax.vmap(call, (None, 0))(v, x[:, None]), [{1}]),
        (lambda w, v, x: call(W, x), [{3}]),
        (in_scan, [{0}]),
        (in_while, [{0}]),
        (returned_by_jit, [{0}]),
    ],
)  # fmt: skip
def test_the_inputs_that_a_marked_value_comes_from(f: Any, expected: list[set[int]]) -> None:
    assert sources(f, W, V, X) == expected


def test_values_that_are_made_apart_have_no_source_in_common():
    def f(x: jax.Array) -> jax.Array:
        return call(x[:3].T @ x[:3], x) + call(x[1:4].T @ x[1:4], x)

    found = survey(jax.make_jaxpr(f)(X), "o", finished=True)
    (_, (a,)), (_, (b,)) = input_sources(found, OUTPUT)
    assert a
    assert b
    assert not a & b


def test_a_program_of_many_equations_is_read_in_one_walk_for_each_value():
    """Healthy: no recursion over a long chain of updates."""

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(3000):
            w = w * np.float32(0.99)
        return call(w, x)

    assert sources(f, W, X) == [{0}]
