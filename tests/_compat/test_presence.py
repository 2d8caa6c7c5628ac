"""Marks in a condition or a loop that a vmap maps count for the examples that are there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import marked
import pytest
from launches import BATCH, HALVES, SUM, X, branches, close, halved, halvings, in_thread, run, taken
from marked import Watch, mark

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.launching.launch import LaunchInterception
from nnx_inspector.resources import open_all


@pytest.fixture(autouse=True)
def nothing_eager() -> None:
    marked.eager.clear()


# ------------------------------------------------------- examples of their own


def test_the_marks_of_a_branch_count_for_the_examples_that_take_it():
    expected = [("down", 10.0), ("up", 12.0)]
    for f in (jax.jit(jax.vmap(branches)), jax.vmap(jax.jit(branches))):
        close(run(f, BATCH), *expected)
    with taken(Watch()):
        jax.vmap(branches)(BATCH)
    close(sorted(marked.eager), *expected)  # value by value


def test_the_gradients_of_a_branch_count_for_the_examples_that_take_it():
    f = jax.grad(lambda x: jax.vmap(branches)(x).sum())
    expected = [("d down", 2.0), ("d up", 2.0), ("down", 10.0), ("up", 12.0)]
    close(sorted(run(jax.jit(f), BATCH)), *expected)
    close(sorted(run(jax.grad(jax.jit(lambda x: jax.vmap(branches)(x).sum())), BATCH)), *expected)


def test_a_derivative_of_ones_own_in_a_branch_is_kept():
    @jax.custom_vjp
    def five(x: Any) -> Any:
        return mark("inside", x)

    five.defvjp(lambda x: (five(x), None), lambda _, ct: (5 * ct,))

    def f(x: Any) -> Any:
        return jax.lax.cond(x > 0, lambda x: mark("up", five(x)), lambda x: mark("down", -x), x)

    gradient = jax.jit(jax.grad(lambda x: jax.vmap(f)(x).sum()))
    seen = dict(run(gradient, BATCH))  # which compares the gradients
    assert (seen["up"], seen["d up"], seen["down"], seen["d down"]) == (6, 2, 4, 2)


def test_one_of_many_branches_and_two_vmaps():
    table = [lambda x, n=n: mark(f"b{n}", x + n) for n in range(3)]
    f = lambda i, x: jax.lax.switch(i, table, x)  # noqa: E731
    i, x = jnp.array([[0, 1], [2, 0]]), jnp.array([[1.0, 2.0], [3.0, 4.0]])
    close(run(jax.jit(jax.vmap(jax.vmap(f))), i, x), ("b0", 5), ("b1", 3), ("b2", 5))


def test_a_branch_within_a_branch():
    def f(x: Any) -> Any:
        return jax.lax.cond(x > 0, lambda x: branches(x - 2), lambda x: mark("low", x), x)

    seen = run(jax.jit(jax.vmap(f)), BATCH)
    close(sorted(seen), ("down", 1), ("low", -4), ("up", 6))


def test_a_branch_that_all_examples_take_together():
    f = lambda i, x: jax.lax.cond(i > 0, lambda x: mark("up", x), lambda x: -x, x)  # noqa: E731
    close(run(jax.jit(jax.vmap(f, in_axes=(None, 0))), 1, X), ("up", SUM))


def test_the_branches_of_platforms_are_no_choice_of_an_example():
    def f(x: Any) -> Any:
        return jax.lax.platform_dependent(
            x, cpu=lambda x: mark("cpu", 2 * x), default=lambda x: mark("other", x)
        )

    (cond,) = (e for e in jax.make_jaxpr(f)(1.0).eqns if e.primitive.name == "cond")
    mapped = jax.vmap(lambda number, x: jaxprs.bind(cond, [number, x])[0])
    with open_all(LaunchInterception(Watch())):
        program = jax.make_jaxpr(mapped)(jnp.array([0, 1]), jnp.ones(2))
    assert "masked=True" not in str(program)


def test_the_marks_of_a_loop_count_for_the_examples_that_are_still_in_it():
    x = HALVES
    expected = ("x", sum(map(halvings, x.tolist())))
    for f in (jax.jit(jax.vmap(halved)), jax.vmap(jax.jit(halved)), jax.vmap(halved)):
        close(run(f, x), expected)
    close(run(jax.jit(jax.vmap(jax.vmap(halved))), x.reshape(2, 2)), expected)


def test_a_loop_whose_condition_has_constants_and_another_carry():
    def f(n: Any, x: Any) -> Any:
        step = lambda c: (c[0] + 1, mark("x", c[1] * 2))  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] < n, step, (0, x))

    n, x = jnp.array([0, 3, 1]), jnp.array([1.0, 1.0, 1.0])
    close(run(jax.jit(jax.vmap(f)), n, x), ("x", (2 + 4 + 8) + 2))
    # all examples do the same number of steps
    close(run(jax.jit(jax.vmap(f, in_axes=(None, 0))), 2, x), ("x", 3 * (2 + 4)))
    with open_all(LaunchInterception(Watch())):
        together = jax.vmap(f, in_axes=(None, 0))
        assert "masked=True" not in str(jax.make_jaxpr(together)(2, x))
        assert "masked=True" in str(jax.make_jaxpr(jax.vmap(f))(n, x))


def test_a_loop_that_ends_apart_only_by_what_it_computes():
    def f(x: Any) -> Any:  # the first carry is mapped by the second after one step
        def step(c: Any) -> Any:
            return c[1], mark("y", c[1] - 1)

        return jax.lax.while_loop(lambda c: c[0] > 0, step, (1.0, x))

    def expected(x: float) -> float:
        a, b, total = 1.0, x, 0.0
        while a > 0:
            a, b = b, b - 1
            total += b
        return total

    x = jnp.array([0.0, 3.0, 1.0])
    close(run(jax.jit(jax.vmap(f)), x), ("y", sum(map(expected, x.tolist()))))


def test_a_condition_in_a_loop_that_ends_apart():
    def f(x: Any) -> Any:
        return jax.lax.while_loop(lambda x: jnp.abs(x) > 1, lambda x: branches(x) / 4, x)

    def expected(x: float) -> tuple[float, float]:
        up = down = 0.0
        while abs(x) > 1:
            if x > 0:
                up, x = up + 2 * x, x / 2
            else:
                down, x = down + x * x, x * x / 4
        return up, down

    every = [expected(x) for x in BATCH.tolist()]
    up, down = (sum(x) for x in zip(*every, strict=True))
    close(run(jax.jit(jax.vmap(f)), BATCH), ("down", down), ("up", up))


def test_a_loop_that_carries_a_random_key():
    def f(key: Any, x: Any) -> Any:
        def step(c: Any) -> Any:
            key, x = c
            key, other = jax.random.split(key)
            return key, mark("x", x - 1 - 0 * jax.random.normal(other))

        return jax.lax.while_loop(lambda c: c[1] > 0, step, (key, x))[1]

    keys, x = jax.random.split(jax.random.key(0), 3), jnp.array([2.0, 0.0, 3.0])
    close(run(jax.jit(jax.vmap(f)), keys, x), ("x", (1 + 0) + (2 + 1 + 0)))


def test_conditions_and_loops_of_other_threads_are_mapped_as_ever():
    with open_all(LaunchInterception(Watch())):
        program = in_thread(lambda: str(jax.make_jaxpr(jax.vmap(branches))(BATCH)))
    assert "masked=True" not in program
    assert program == str(jax.make_jaxpr(jax.vmap(branches))(BATCH))
