"""The host's answers become inputs and the messages to it outputs; a program can be silenced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import eval_jaxpr

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.native import computed_once
from nnx_inspector.program.host.answers import Answered, answered, silenced
from nnx_inspector.program.host.primitives import EFFECT, ask, tell, tied

NUMBER = jax.ShapeDtypeStruct((), jnp.int32)
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


def changed(program: Any) -> Answered:
    found = answered(program)
    assert found is not None
    return found


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


def told_by(found: Any, *values: Any) -> tuple[list[np.ndarray], list[Any]]:
    """The results of a program that was started with the host's answers, and what it told."""
    answers = answers_of(found)
    every = run(found.program, *answers, *values)
    count = len(every) - found.told
    found.tell(answers, every[count:])
    return every[:count], every[count:]


@pytest.mark.parametrize("is_known", [False, True])
def test_messages_become_outputs_and_what_the_host_knows_is_not_returned(is_known: bool):
    heard: list[Any] = []

    def note(*arrays: Any) -> None:
        heard.append([np.asarray(x) for x in arrays])

    def inner(number: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tied(2 * x, tell(note, True, number, jnp.sin(x))), number

    def step(x: jax.Array) -> jax.Array:
        _, number = ask(FIRST, [FLOAT, WHOLE], [x])
        y, same = jax.jit(inner)(number, x)
        gate = True if is_known else same[0] > 0
        return tied(y, tell(note, gate, same, x, y))

    x = jnp.arange(3.0)
    found = answered(jax.make_jaxpr(step)(x))
    if not is_known:
        assert found is None, "whether it tells is computed"
        return
    assert found is not None
    assert not found.program.effects
    results, told = told_by(found, x)
    np.testing.assert_array_equal(results, [2 * x])
    assert len(told) == 3, "the sine, x and y"
    (number, sine), (same, first, double) = heard
    np.testing.assert_array_equal([number, same], [[3, 4], [3, 4]])
    np.testing.assert_allclose(sine, np.sin(np.arange(3.0)), rtol=1e-6)
    np.testing.assert_array_equal(first, x)
    np.testing.assert_array_equal(double, 2 * x)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_message_is_told_if_the_answer_says_so(is_open: bool):
    heard: list[Any] = []

    def step(x: jax.Array) -> jax.Array:
        (gate,) = ask(host(np.bool_(is_open)), [jax.ShapeDtypeStruct((), jnp.bool_)], [x])
        return tied(x, tell(heard.append, gate, x.sum()))

    found = answered(jax.make_jaxpr(step)(jnp.arange(3.0)))
    told_by(found, jnp.arange(3.0))
    assert heard == [3.0] * is_open


def test_the_examples_of_a_vmap_share_the_number_of_their_pass():
    heard: list[Any] = []

    def one(w: jax.Array, x: jax.Array) -> jax.Array:
        (number,) = ask(host(np.int32(2)), [NUMBER], [x])
        return tied(w * x, tell(lambda *xs: heard.append(xs), True, number, w * x)).sum()

    w, x = jnp.float32(3), jnp.arange(6.0).reshape(2, 3)
    found = answered(jax.make_jaxpr(jax.vmap(jax.value_and_grad(one), (None, 0)))(w, x))
    assert found is not None
    (values, _), told = told_by(found, w, x)
    np.testing.assert_array_equal(values, 3 * x.sum(1))
    ((number, products),) = heard
    assert len(told) == 1
    assert number == 2
    np.testing.assert_array_equal(products, 3 * x)


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
    quiet = silenced(changed(program))
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
        quiet = silenced(changed(jax.make_jaxpr(step)(x)))
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
    value, grad = run(silenced(found), *answers_of(found), w, x)
    squares = float((np.arange(3.0) ** 2).sum())
    assert value == pytest.approx((5 * 2) ** 2 * squares)
    assert grad == pytest.approx(2 * 5**2 * 2 * squares)
