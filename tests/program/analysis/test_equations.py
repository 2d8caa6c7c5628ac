"""The table of equations with bodies, against jax's evaluation of generated functions.

`run` evaluates a jaxpr by that table alone, whatever primitives it holds; `stands_for` checks
`identity` against the values. Every generated function takes and returns pairs of vectors.
"""

from __future__ import annotations

import collections
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis_examples import examples
from jax.experimental.custom_partitioning import custom_partitioning

from nnx_inspector._compat import jaxprs
from nnx_inspector.program.analysis.equations import ROW, Body, bodies_of, is_call, kind_of
from nnx_inspector.program.analysis.identity import Values

Pair = tuple[jax.Array, jax.Array]
SIZE = 3
X, Y = jnp.arange(1.0, SIZE + 1), jnp.arange(-1.0, SIZE - 1)

# ------------------------------------------------------ evaluating by the table


def run(jaxpr: Any, args: list[Any], ran: collections.Counter[str]) -> list[Any]:
    """The results of a jaxpr; counts in `ran` how often each primitive ran."""
    bare, consts = jaxprs.open_jaxpr(jaxpr)
    env = dict(zip((*bare.constvars, *bare.invars), (*consts, *args), strict=True))
    for equation in bare.eqns:
        values = [v.val if jaxprs.is_literal(v) else env[v] for v in equation.invars]
        ran[equation.primitive.name] += 1
        bodies = bodies_of(equation)
        known = bool(bodies) and all(body.results for body in bodies)
        out = through(equation, bodies, values, ran) if known else jaxprs.bind(equation, values)
        env.update(zip(equation.outvars, out, strict=True))
    return [v.val if jaxprs.is_literal(v) else env[v] for v in bare.outvars]


def through(
    equation: Any, bodies: tuple[Body, ...], values: list[Any], ran: collections.Counter[str]
) -> list[Any]:
    """The results of an equation, computed by its bodies in the table."""
    results: list[Any] = [None] * len(equation.outvars)
    tests = [body for body in bodies if body.tests]
    (body,) = [body for body in bodies if not body.tests][chosen(bodies, values)]
    assert body.operands is not None
    assert body.results is not None
    given = [values[i] for i in body.operands]
    turns, carried = [], given[body.consts : body.consts + body.carry]
    times = range(body.times) if body.times is not None else iter(int, 1)
    for turn in reversed(times) if body.backwards else times:
        if not all(goes_on(test, values, carried, ran) for test in tests):
            break
        entering = [x[turn] if t == ROW else x for x, t in zip(given, body.taken, strict=True)]
        entering[body.consts : body.consts + body.carry] = carried
        out = run(body.jaxpr, entering, ran)
        carried = out[: body.carry]
        turns.append(out)
    for number, (result, part) in enumerate(zip(body.results, body.given, strict=True)):
        if result is None:
            continue
        if part == ROW:
            rows = [out[number] for out in turns]
            whole = jnp.stack(rows[::-1] if body.backwards else rows)
        else:
            whole = carried[number] if number < body.carry else turns[-1][number]
        results[result] = whole
    return results


def chosen(bodies: tuple[Body, ...], values: list[Any]) -> slice:
    number = int(values[0]) if bodies[0].conditional else 0
    return slice(number, number + 1)


def goes_on(
    test: Body, values: list[Any], carried: list[Any], ran: collections.Counter[str]
) -> bool:
    given = [values[i] for i in test.operands or ()]
    given[test.consts :] = carried
    return bool(run(test.jaxpr, given, ran)[0])


# ----------------------------------------------------------- generated functions


def simple(name: str) -> Any:
    return {
        "swap": lambda x, y: (y, x),
        "keep": lambda x, y: (x, y),
        "add": lambda x, y: (x, jnp.sin(x) + y),
        "twice": lambda x, y: (x, x),
    }[name]


def scanned(f: Any, *, reverse: bool) -> Any:
    def g(x: Any, y: Any) -> Pair:
        def body(carry: Any, row: Any) -> Any:
            a, b = f(carry[0], carry[1] + y)
            return (a, b), (row, a.sum())

        (a, b), (rows, sums) = jax.lax.scan(body, (x, y), y, reverse=reverse)
        return a + b, rows + sums

    return g


def carried_along(f: Any) -> Any:
    def g(x: Any, y: Any) -> Pair:
        return jax.lax.scan(lambda c, _: (f(*c), None), (x, y), None, length=2)[0]

    return g


def looped(f: Any) -> Any:
    def g(x: Any, y: Any) -> Pair:
        def proceed(state: Any) -> Any:
            return state[0] < jnp.where(x.sum() > 0, 3, 2)

        def step(state: Any) -> Any:
            n, a, b = state
            a, b = f(a, b)
            return n + 1, a, b + 0 * y

        return jax.lax.while_loop(proceed, step, (0, x, y))[1:]

    return g


def branched(f: Any, g: Any) -> Any:
    return lambda x, y: jax.lax.cond(x.sum() > y.sum(), f, g, x, y)


def with_jvp(f: Any) -> Any:
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (g(*primals), tangents))
    return g


def with_vjp(f: Any) -> Any:
    g = jax.custom_vjp(f)
    g.defvjp(lambda x, y: (g(x, y), None), lambda _, cotangents: cotangents)
    return g


def with_vmap(f: Any) -> Any:
    g = jax.custom_batching.custom_vmap(f)
    g.def_vmap(lambda size, batched, x, y: (jax.vmap(f)(x, y), (True, True)))
    return g


def partitioned(f: Any) -> Any:
    g = custom_partitioning(f)
    g.def_partition(
        partition=lambda *args: None,
        infer_sharding_from_operands=lambda *args: None,
        sharding_rule="i, i -> i, i",
    )
    return g


def sharded(f: Any) -> Any:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    return jax.shard_map(f, mesh=mesh, in_specs=spec(), out_specs=(spec(), spec()), check_vma=False)


def linear(f: Any) -> Any:
    call = jax.custom_derivatives.linear_call
    return lambda x, y: call(lambda x, y: f(x, y), lambda x, back: back[0], x, y)


CALLS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "custom_vmap": with_vmap,
    "custom_partitioning": partitioned,
    "composite": lambda f: jax.lax.composite(f, name="nnx.inspector"),
    "linear_call": linear,
    "shard_map": sharded,
}
WRAPPERS = {
    **CALLS,
    "scan": lambda f: scanned(f, reverse=False),
    "scan backwards": lambda f: scanned(f, reverse=True),
    "carried": carried_along,
    "while": looped,
    "sequence": lambda f: lambda x, y: f(*f(x, y)),
}
DEEPEST = 3
LEAVES = st.sampled_from(["swap", "keep", "add", "twice"])
SPECS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(sorted(WRAPPERS)), inner),
        st.tuples(st.just("cond"), inner, inner),
    ),
    max_leaves=DEEPEST,
)


def build(spec: Any) -> Any:
    if isinstance(spec, str):
        return simple(spec)
    name, *inner = spec
    functions = [build(one) for one in inner]
    return branched(*functions) if name == "cond" else WRAPPERS[name](*functions)


def check(spec: Any) -> None:
    f = build(spec)
    closed = jax.make_jaxpr(f)(X, Y)
    for args in ([X, Y], [Y, X], [jnp.full(SIZE, 0.25), X]):
        expected = jax.jit(f)(*args)
        found = run(closed, list(args), collections.Counter())
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        stands_for(closed.jaxpr, args, found)


def stands_for(jaxpr: Any, args: list[Any], found: list[Any]) -> None:
    """Values that `identity` reports as the same are equal bit for bit."""
    values = Values(jaxpr)
    for atom, value in zip(jaxpr.outvars, found, strict=True):
        for var, given in zip(jaxpr.invars, args, strict=True):
            if values.same(atom, var):
                np.testing.assert_array_equal(value, given)


@hypothesis.given(spec=SPECS)
@examples(8, of=100)
def test_the_table_evaluates_what_jax_evaluates(spec):
    check(spec)


@pytest.mark.parametrize("leaf", ["swap", "keep", "add"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_each_construct_alone(name, leaf):
    check((name, leaf))


@pytest.mark.parametrize("pair", [("swap", "keep"), ("keep", "keep"), ("add", "twice")])
def test_branches(pair):
    check(("cond", *pair))


@pytest.mark.parametrize("name", CALLS)
def test_what_a_call_hands_on_is_the_same(name):
    jaxpr = jax.make_jaxpr(CALLS[name](simple("add")))(X, Y).jaxpr
    same = Values(jaxpr).same
    assert [same(jaxpr.invars[0], out) for out in jaxpr.outvars] == [True, False]


# ------------------------------------------------------------------- how often


def count(equation: Any) -> collections.Counter[str]:
    """How often each primitive runs in an equation, according to the table."""
    found = collections.Counter({equation.primitive.name: 1})
    for body in bodies_of(equation):
        assert body.times is not None
        for inner in jaxprs.open_jaxpr(body.jaxpr)[0].eqns:
            for name, often in count(inner).items():
                found[name] += body.times * often
    return found


@hypothesis.given(spec=SPECS)
@examples(8, of=100)
def test_what_is_said_to_run_so_often_does(spec):
    text = repr(spec)
    hypothesis.assume("while" not in text and "cond" not in text)
    closed = jax.make_jaxpr(build(spec))(X, Y)
    ran: collections.Counter[str] = collections.Counter()
    run(closed, [X, Y], ran)
    said = sum(map(count, closed.jaxpr.eqns), collections.Counter())
    assert ran == said


def only(f: Any, name: str) -> Any:
    (found,) = [e for e in jax.make_jaxpr(f)(X, Y).jaxpr.eqns if e.primitive.name == name]
    return found


def test_how_often_a_while_loop_runs_is_not_known():
    test, body = bodies_of(only(looped(simple("swap")), "while"))
    assert (test.tests, body.tests) == (True, False)
    assert (test.times, body.times) == (None, None)
    assert (test.consts, test.carry, test.results) == (1, 3, (None,))
    assert (body.consts, body.carry) == (1, 3)
    assert test.operands == (0, 2, 3, 4)
    assert body.operands == (1, 2, 3, 4)


def test_of_branches_one_runs_and_the_index_goes_into_none():
    bodies = bodies_of(only(branched(simple("swap"), simple("keep")), "cond"))
    assert [body.conditional for body in bodies] == [True, True]
    assert [body.operands for body in bodies] == [(1, 2), (1, 2)]


def test_of_a_primitive_that_is_not_in_the_table_only_the_jaxprs_are_known():
    def solved(x: Any, y: Any) -> Any:
        solve = lambda product, b: b / 2  # noqa: E731
        return jax.lax.custom_linear_solve(lambda v: 2 * v, x, solve, symmetric=True)

    found = only(solved, "custom_linear_solve")
    bodies = bodies_of(found)
    assert bodies
    assert {(b.operands, b.results, b.times) for b in bodies} == {(None, None, None)}
    assert (kind_of(found), is_call(found)) == ("", False)


def test_an_operation_without_a_body_has_none():
    add = only(lambda x, y: x + y, "add")
    assert (bodies_of(add), kind_of(add), is_call(add)) == ((), "", False)
