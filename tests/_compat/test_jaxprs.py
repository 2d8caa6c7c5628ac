"""Equations that hold jaxprs can be given more operands and results; checked by jax's own types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import on_four_devices
from jax._src import core
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_inspector._compat import eqn_params, jaxprs

X = jnp.arange(1.0, 4.0)


def traced(run: Callable[..., Any], like: Any, avals: Sequence[Any]) -> Any:
    """A jaxpr of the kind of `like`."""
    made = jax.make_jaxpr(run)(*map(jaxprs.aval_argument, avals))
    return made if type(made) is type(like) else jaxprs.open_jaxpr(made)[0]


def runs(jaxpr: Any) -> Callable[..., list[Any]]:
    return jaxprs.jaxpr_as_fun(*jaxprs.open_jaxpr(jaxpr))


def types(jaxpr: Any) -> list[Any]:
    return [v.aval for v in jaxprs.open_jaxpr(jaxpr)[0].invars]


def only(program: Any, *names: str) -> Any:
    (found,) = [e for e in program.eqns if e.primitive.name in names]
    return found


def with_equation(
    program: Any, old: Any, params: Any, *, operands: Any, results: Any, inputs: Any, **how: Any
) -> Callable[..., list[Any]]:
    """A program with another equation in place of one; the results that it has in addition, which
    are those that are new, follow the others. Also compiled.
    """
    new = old.replace(invars=operands, outvars=results, params=params, **how)
    bare, consts = jaxprs.open_jaxpr(program)
    more = [v for v in results if v not in old.outvars]
    made = jaxprs.edit_jaxpr(
        program,
        inputs=inputs,
        equations=[new if e is old else e for e in bare.eqns],
        outputs=[*bare.outvars, *more],
    )
    bare, _ = jaxprs.open_jaxpr(made)
    core.check_jaxpr(bare)
    return jax.jit(jaxprs.jaxpr_as_fun(bare, consts))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_with_more_constants_carry_and_outputs(reverse: bool):
    def f(k: Any, c: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda c, x: (c * k + x, c - x), c, xs, reverse=reverse)

    program = jax.make_jaxpr(f)(2.0, 1.0, X)
    scan = only(program, "scan")
    body = scan.params["jaxpr"]

    def run(factor: Any, k: Any, c: Any, total: Any, x: Any) -> Any:
        c, y = runs(body)(k, c, x)
        return c, total + factor * y, y, factor * y

    k, c, x = types(body)
    factor, total = jaxprs.new_var(k), jaxprs.new_var(c)
    new = traced(run, body, [k, k, c, c, x])
    params = eqn_params.scan_with(scan.params, new, consts=1, carry=1, outputs=1)
    ys = [
        jaxprs.new_var(jaxprs.stacked_aval(v.aval, 3))
        for v in jaxprs.open_jaxpr(new)[0].outvars[3:]
    ]
    consts, carry, rows = eqn_params.scan_parts(scan.params, scan.invars)
    one = with_equation(
        program,
        scan,
        params,
        inputs=[factor, total],
        operands=[factor, *consts, *carry, total, *rows],
        results=[scan.outvars[0], jaxprs.new_var(c), scan.outvars[1], *ys],
    )
    last, y, summed, scaled = one(10.0, 5.0, 2.0, 1.0, X)
    expected = f(2.0, 1.0, X)
    np.testing.assert_allclose([last, *y], [expected[0], *expected[1]])
    np.testing.assert_allclose(scaled, 10 * y)
    np.testing.assert_allclose(summed, 5 + 10 * y.sum())


def test_a_scan_that_is_the_transposed_one_of_another_with_more_outputs():
    def loss(k: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda c, x: (jnp.sin(c * k + x), c), k, xs)[0]

    program = jax.make_jaxpr(jax.grad(loss))(2.0, X)
    *_, scan = [e for e in program.eqns if e.primitive.name == "scan"]
    body = scan.params["jaxpr"]

    def run(*values: Any) -> Any:
        results = runs(body)(*values)
        return (*results, results[0] * 2)

    new = traced(run, body, types(body))
    extra = jaxprs.open_jaxpr(new)[0].outvars[-1].aval
    one = with_equation(
        program,
        scan,
        eqn_params.scan_with(scan.params, new, outputs=1),
        inputs=[],
        operands=scan.invars,
        results=[*scan.outvars, jaxprs.new_var(jaxprs.stacked_aval(extra, 3))],
    )
    gradient, rows = one(2.0, X)
    np.testing.assert_allclose(gradient, jax.grad(loss)(2.0, X), rtol=1e-6)
    assert rows.shape == (3,)


def test_a_while_loop_with_more_constants_and_carry():
    def f(k: Any, n: Any, x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * k), (0, x))

    program = jax.make_jaxpr(f)(2.0, 3, 1.0)
    loop = only(program, "while")
    body = loop.params["body_jaxpr"]
    k, i, x = types(body)

    def run(factor: Any, k: Any, i: Any, x: Any, total: Any) -> Any:
        i, x = runs(body)(k, i, x)
        return i, x, total + factor * x

    n, own, *carry = loop.invars
    factor, total = jaxprs.new_var(k), jaxprs.new_var(x)
    new = traced(run, body, [k, k, i, x, x])
    one = with_equation(
        program,
        loop,
        eqn_params.while_with(loop.params, new, consts=1, carry=1),
        inputs=[factor, total],
        operands=[n, factor, own, *carry, total],
        results=[*loop.outvars, jaxprs.new_var(x)],
    )
    assert [float(x) for x in one(10.0, 5.0, 2.0, 3, 1.0)] == [3, 8, 5 + 10 * (2 + 4 + 8)]


@pytest.mark.parametrize("prevent_cse", [True, False, (True, False)])
@pytest.mark.parametrize("differentiated", [False, True])
def test_a_remat_with_more_inputs_and_outputs(prevent_cse: Any, differentiated: bool):
    @lambda f: jax.checkpoint(f, prevent_cse=prevent_cse)
    def f(x: Any, y: Any) -> Any:
        return jnp.sin(x) * y

    called = jax.grad(f) if differentiated else f
    program = jax.make_jaxpr(called)(2.0, 3.0)
    remat = only(program, *jaxprs.REMAT)
    body = remat.params["jaxpr"]

    def run(factor: Any, *values: Any) -> Any:
        results = runs(body)(*values)
        return (*results, factor * results[0])

    new = traced(run, body, [types(body)[0], *types(body)])
    factor, extra = jaxprs.new_var(types(body)[0]), jaxprs.open_jaxpr(new)[0].outvars[-1].aval
    one = with_equation(
        program,
        remat,
        eqn_params.remat_with(remat.params, new, inputs=1),
        inputs=[factor],
        operands=[factor, *remat.invars],
        results=[*remat.outvars, jaxprs.new_var(extra)],
    )
    out, more = one(10.0, 2.0, 3.0)
    np.testing.assert_allclose(out, called(2.0, 3.0), rtol=1e-6)
    np.testing.assert_allclose(more, 10 * out, rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("is_checked", [False, True])
def test_a_shard_map_with_more_inputs_and_a_row_of_each_device(kind: Any, is_checked: bool):
    devices = jax.devices()[: 4 if jax.device_count() >= 4 else 1]
    mesh = jax.make_mesh((len(devices), 1), ("a", "b"), axis_types=(kind,) * 2, devices=devices)

    @jax.shard_map(mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=is_checked)
    def f(x: Any) -> Any:
        return 2 * x

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("a")))
        program = jax.make_jaxpr(f)(x)
        one = only(program, "shard_map")
        body = one.params["jaxpr"]
        (inner,) = types(body)

        def run(factor: Any, x: Any) -> Any:
            (out,) = runs(body)(x)
            row = (factor * out).sum()[None]
            if is_checked:  # of no other device, as jax must be told
                row = jax.lax.pcast(row, ("b",), to="varying")
            return out, row

        with eqn_params.inside_shard_map(one.params):
            (factor,) = jax.make_jaxpr(lambda: jnp.zeros((), jnp.float32))().out_avals
            new = traced(run, body, [factor, inner])
        with jaxprs.context_of(one):
            params, after = eqn_params.shard_map_with(
                one.params, new, inputs=1, outputs=1, axes=("a", "b")
            )
        more = [jaxprs.new_var(jax.typeof(jnp.float32(10)))]
        changed = with_equation(
            program,
            one,
            params,
            inputs=more,
            operands=[*more, *one.invars],
            results=[*one.outvars, *map(jaxprs.new_var, after)],
        )
        out, rows = changed(jnp.float32(10), x)
    np.testing.assert_array_equal(out, 2 * np.arange(4))
    each = np.arange(4.0).reshape(len(devices), -1).sum(1)
    np.testing.assert_array_equal(rows, 20 * each)
    assert rows.dtype == np.float32


def test_a_shard_map_on_four_devices():
    on_four_devices(__file__, "row_of_each_device")


@jax.custom_jvp
def with_jvp(x: Any) -> Any:
    return 2 * x


with_jvp.defjvp(lambda xs, ts: (2 * xs[0], 2 * ts[0]))


@jax.custom_vjp
def with_vjp(x: Any) -> Any:
    return 2 * x


with_vjp.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))


@pytest.mark.parametrize("f", [with_jvp, with_vjp])
def test_a_closed_call_stands_for_a_call_with_a_derivative_of_its_own(f: Any):
    program = jax.make_jaxpr(lambda x: f(x) + 1)(X)
    call = only(program, "custom_jvp_call", "custom_vjp_call")
    (body,) = jaxprs.sub_jaxprs(call)

    def run(factor: Any, x: Any) -> Any:
        (out,) = runs(body)(x)
        return out, factor * out

    new = traced(run, body, types(body) * 2)
    primitive, params = jaxprs.closed_call(new)
    factor = jaxprs.new_var(types(body)[0])
    one = with_equation(
        program,
        call,
        params,
        primitive=primitive,
        inputs=[factor],
        operands=[factor, *call.invars],
        results=[*call.outvars, jaxprs.new_var(types(body)[0])],
    )
    out, more = one(10 * X, X)
    np.testing.assert_allclose(out, 2 * X + 1)
    np.testing.assert_allclose(more, 20 * X * X)


def test_a_closed_call_takes_a_jaxpr_of_either_kind():
    program = jax.make_jaxpr(with_jvp)(X)
    for one in (program, jaxprs.open_jaxpr(program)[0]):
        primitive, params = jaxprs.closed_call(one)
        call = only(program, "custom_jvp_call")
        call = call.replace(primitive=primitive, params=params)
        np.testing.assert_array_equal(jaxprs.bind(call, [X])[0], 2 * X)


@pytest.mark.parametrize(
    "x", [jnp.float32(1), jnp.asarray(1.0), 1.0, jnp.arange(3), jax.random.key(0)], ids=repr
)
def test_what_is_traced_for_a_type_has_that_type(x: Any):
    aval = jax.typeof(x)
    again = jax.make_jaxpr(lambda x: x)(jaxprs.aval_argument(aval))
    assert again.in_avals[0] == aval
    assert again.in_avals[0].weak_type == aval.weak_type
    assert jaxprs.new_var(aval).aval is aval
