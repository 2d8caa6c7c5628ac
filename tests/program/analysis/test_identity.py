"""The equal values of a jaxpr, found in the program; `test_equations` has every kind of call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from nnx_inspector.program.analysis.identity import Values


def same(f, *args) -> list[bool]:
    """For each result of `f(p, ...)`, whether it equals `f`'s first argument."""
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    values = Values(jaxpr)
    return [values.same(jaxpr.invars[0], out) for out in jaxpr.outvars]


P = jnp.arange(6.0).reshape(2, 3)


def pair(p):
    return p, p + 1


def scanned(p, reverse=False):
    def body(carry, x):
        return (carry[0], carry[1] + 1), (x, x + 1, carry[0])

    init = (P + 1, jnp.float32(0))
    return jax.lax.scan(body, init, p, reverse=reverse)[1][:2]


def carried(p):
    out, _ = jax.lax.scan(lambda c, _: ((c[0], c[1] + 1), None), (p, p), None, length=3)
    return out


def swapped(p):
    out, _ = jax.lax.scan(lambda c, _: ((c[1], c[0]), None), (p, p + 1), None, length=2)
    return out[0], out[1]


def whiled(p):
    return jax.lax.while_loop(lambda c: c[1].sum() < 9, lambda c: (c[0], c[1] + 1), (p, p))


def branched(p):
    return jax.lax.cond(p.sum() > 0, lambda p: (p, p), lambda p: (p, p + 1), p)


def sharded(p, given, returned):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        pair, mesh=mesh, in_specs=given, out_specs=(returned, given), check_vma=False
    )(p)


SPEC = jax.sharding.PartitionSpec


@pytest.mark.parametrize(
    "f",
    [
        pair,
        lambda p: jax.jit(jax.checkpoint(jax.jit(pair)))(p),
        scanned,
        lambda p: scanned(p, reverse=True),
        carried,
        whiled,
        branched,
        jax.vmap(pair),
        lambda p: jax.vmap(jax.jit(pair), in_axes=1, out_axes=1)(p),
        lambda p: sharded(p, SPEC("d"), SPEC("d")),
        lambda p: (p.T.T, p.T),
        lambda p: (jnp.moveaxis(jax.jit(lambda x: jnp.moveaxis(x, 0, 1))(p), 1, 0), p * 1),
        lambda p: (jax.lax.optimization_barrier(p), jax.lax.stop_gradient(p) + 0),
        lambda p: (p.astype(jnp.float32).reshape(2, 3), p.reshape(3, 2)),
    ],
)
def test_what_passes_through_is_the_same_and_what_is_computed_is_not(f):
    assert same(f, P) == [True, False]


def test_a_loop_that_swaps_its_carry_returns_neither_as_it_was():
    assert same(swapped, P) == [False, False]


def test_a_branch_that_returns_another_value_decides():
    other = lambda p, q: jax.lax.cond(p.sum() > 0, lambda p, q: p, lambda p, q: q, p, q)  # noqa: E731
    assert same(other, P, P) == [False]
    assert same(lambda p: jax.lax.cond(p.sum() > 0, lambda p, q: p, lambda p, q: q, p, p), P) == [
        False  # in fact it is; values that the program does not show as equal count as different
    ]


def test_a_constant_of_a_scan_is_not_what_its_rows_hold():
    rows = lambda p: jax.lax.scan(lambda c, _: (c, p), 0.0, None, length=2)[1]  # noqa: E731
    assert same(rows, P) == [False]


def test_a_value_that_is_placed_otherwise_by_a_shard_map_is_another():
    assert same(lambda p: sharded(p, SPEC("d"), SPEC()), P) == [False, False]


def test_the_scalars_inside_a_reduction_say_nothing_of_its_operands():
    last = lambda p: jax.lax.reduce(p, 0.0, lambda a, b: b, (0, 1))  # noqa: E731
    assert same(last, P) == [False]


def test_equal_literals_are_the_same_and_unlike_ones_are_not():
    jaxpr = jax.make_jaxpr(lambda x: (x * 2.0, x + 2.0, x + 3.0, x + 2))(1.0).jaxpr
    twos = [e.invars[1] for e in jaxpr.eqns]
    values = Values(jaxpr)
    assert values.same(twos[0], twos[1])
    assert not values.same(twos[1], twos[2])
