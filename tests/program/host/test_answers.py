"""Programs that ask the host get the answers as inputs, and can be silenced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import eval_jaxpr

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.native import computed_once
from nnx_inspector.program.host.answers import answered, silenced
from nnx_inspector.program.host.primitives import EFFECT, ask, tell, tied

FLOAT, WHOLE = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)


def host(*values: Any) -> Any:
    return lambda: tuple(map(np.asarray, values))


FIRST = host(np.float32(2), np.array([3, 4], np.int32))
SECOND = host(np.float32(5))


def run(program: Any, *values: Any) -> list[np.ndarray]:
    jaxpr, consts = jaxprs.open_jaxpr(program)
    return [np.asarray(x) for x in jax.jit(lambda *xs: eval_jaxpr(jaxpr, consts, *xs))(*values)]


def asked_twice(x: jax.Array) -> jax.Array:
    scale, _ = ask(FIRST, [FLOAT, WHOLE], [x])  # the second answer has no name in the program
    x = jax.jit(lambda x: ask(SECOND, [FLOAT], [x])[0] + x)(scale * x)
    return x + np.arange(3.0, dtype=np.float32)


def answers_of(found: Any) -> list[Any]:
    return [answer for host in found.hosts for answer in host()]


def test_the_answers_become_inputs_in_the_order_of_the_questions():
    x = jnp.arange(3.0)
    program = jax.make_jaxpr(asked_twice)(x)
    found = answered(program)
    assert found is not None
    assert found.hosts == (FIRST, SECOND)
    assert [(t.shape, t.dtype) for t in found.types] == [
        ((), np.float32), ((2,), np.int32), ((), np.float32),
    ]  # fmt: skip
    assert EFFECT not in found.program.effects
    np.testing.assert_array_equal(run(found.program, *answers_of(found), x)[0], 2 * x + 5 + x)
    np.testing.assert_array_equal(run(program, x)[0], 2 * x + 5 + x)  # which asks as before


def test_a_program_that_asks_nothing_has_no_hosts():
    program = jax.make_jaxpr(jax.jit(lambda x: tied(x, tell(print, True, x))))(1.0)
    found = answered(program)
    assert found is not None
    assert found.hosts == found.types == ()


def scanned(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, x: (c, ask(SECOND, [FLOAT], [x])[0] + x), 0.0, x)[1]


def branched(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x.sum() > 0, lambda x: x + ask(SECOND, [FLOAT], [x])[0], lambda x: x, x)


def rematerialised(x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda x: x + ask(SECOND, [FLOAT], [x])[0])(x)


def told_in_a_scan(x: jax.Array) -> jax.Array:
    (scale,) = ask(SECOND, [FLOAT], [x])
    return scale * jax.lax.scan(lambda c, x: (c, tied(x, tell(print, True, x))), 0.0, x)[1]


@pytest.mark.parametrize("function", [scanned, branched, rematerialised, told_in_a_scan])
def test_where_the_number_of_questions_is_not_known_they_stay(function: Any):
    assert answered(jax.make_jaxpr(function)(jnp.arange(3.0))) is None
    assert answered(jax.make_jaxpr(jax.jit(function))(jnp.arange(3.0))) is None


def test_a_program_with_a_reference_is_left_alone():
    def with_reference(ref: Any, x: jax.Array) -> jax.Array:
        ref[...] = x
        return x + ask(SECOND, [FLOAT], [x])[0]

    program = jax.make_jaxpr(with_reference)(jax.new_ref(jnp.zeros(3)), jnp.ones(3))
    assert answered(program) is None


def test_a_silenced_program_computes_the_same_results_and_nothing_for_the_host():
    told: list[Any] = []

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def inner(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            zero = tell(told.append, True, jnp.sin(x))
            return tied(2 * x, zero), zero

        y, zero = jax.jit(inner)(x)
        return tied(y, tell(told.append, True, jnp.cos(y))), zero

    x = jnp.arange(3.0)
    program = jax.make_jaxpr(step)(x)
    quiet = silenced(program)
    assert not quiet.effects
    assert "sin" not in str(quiet)
    assert "cos" not in str(quiet)
    assert len(jaxprs.open_jaxpr(quiet)[0].invars) == 1
    y, zero = run(quiet, x)
    np.testing.assert_array_equal(y, 2 * x)
    assert zero == 0
    jax.effects_barrier()
    assert not told
    run(program, x)
    jax.effects_barrier()
    assert len(told) == 2


def test_what_kept_measured_values_apart_is_gone():
    def step(x: jax.Array) -> jax.Array:
        return computed_once(computed_once(2 * x) + 1)

    for dtype, kept in ((jnp.float32, 0), (jnp.bfloat16, 2)):
        x = jnp.arange(3, dtype=dtype)
        quiet = silenced(jax.make_jaxpr(step)(x))
        assert str(quiet).count("nnx_inspector_once") == kept
        np.testing.assert_array_equal(run(quiet, x)[0], 2 * x + 1)


def test_gradients_are_those_of_the_program():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        (scale,) = ask(SECOND, [FLOAT], [x])
        y = tied(scale * w * x, tell(print, True, x))
        return (y**2).sum()

    w, x = jnp.float32(2.0), jnp.arange(3.0)
    found = answered(jax.make_jaxpr(jax.value_and_grad(loss))(w, x))
    assert found is not None
    value, grad = run(silenced(found.program), *answers_of(found), w, x)
    squares = float((np.arange(3.0) ** 2).sum())
    assert value == pytest.approx((5 * 2) ** 2 * squares)
    assert grad == pytest.approx(2 * 5**2 * 2 * squares)
