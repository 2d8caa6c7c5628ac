"""Which program a jitted call runs can be chosen, each time that jax makes the call from Python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from leftovers import patched_in_jax

from nnx_inspector._compat import jit
from nnx_inspector._compat.launching import jit_calls


@contextmanager
def chosen(choose: jit_calls.JitChooser) -> Iterator[None]:
    undo = jit_calls.patch_jit_misses(lambda *_: None, choose)
    try:
        yield
    finally:
        undo()


def test_what_is_chosen_runs_each_time_in_place_of_the_call():
    asked: list[jit_calls.PendingJitCall] = []

    def choose(call: jit_calls.PendingJitCall) -> Callable[[], Any]:
        asked.append(call)
        return lambda: jax.device_put(-2 * np.asarray(call.args[0]))

    double, x = jax.jit(lambda x: 2 * x), jnp.arange(3.0)
    with chosen(choose):
        found = [double(x) for _ in range(3)]
    assert len(asked) == 3
    for one in found:
        np.testing.assert_array_equal(one, -2 * x)
    np.testing.assert_array_equal(double(x), 2 * x)


def test_only_calls_that_run_are_chosen():
    asked: list[jit_calls.PendingJitCall] = []
    double, x = jax.jit(lambda x: 2 * x), jnp.ones(3)
    here = threading.get_ident()  # a thread of an earlier test may still run a pass

    def note(call: jit_calls.PendingJitCall) -> None:
        if threading.get_ident() == here:
            asked.append(call)

    with chosen(note):
        double.lower(x)
        jax.eval_shape(double, x)
        jax.make_jaxpr(double)(x)
        jax.jit(lambda x: double(x) + 1).trace(x)
        assert not asked
        np.testing.assert_array_equal(double(x), 2 * x)
    assert len(asked) == 1


def test_a_jitted_function_made_of_a_call_shares_its_programs():
    traced: list[int] = []

    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        traced.append(1)
        return 2 * x

    found: list[jit_calls.PendingJitCall] = []
    with chosen(lambda call: found.append(call)):
        double(jnp.ones(3))
    np.testing.assert_array_equal(found[0].made().jitted()(jnp.ones(3)), 2 * np.ones(3))
    assert len(traced) == 1


def multiplied(x: jax.Array) -> Any:
    return jax.make_jaxpr(lambda factor, x: (factor * x, x.sum()))(jnp.float32(0), x)


@pytest.mark.parametrize("donate", [(), (0,)])
def test_another_program_runs_with_more_inputs_and_outputs(donate: Any):
    x, sums = jnp.arange(3.0), list[Any]()
    made = multiplied(x)

    def run(call: jit_calls.PendingJitCall) -> Any:
        out, more = call.run(made, [np.float32(3)], 1)
        sums.extend(more)
        return out

    def choose(call: jit_calls.PendingJitCall) -> Callable[[], Any]:
        return lambda: run(call)

    double = jax.jit(lambda x: {"twice": 2 * x}, donate_argnums=donate)
    with Compilations() as compilations, chosen(choose):
        for _ in range(3):
            given = jnp.arange(3.0)
            np.testing.assert_array_equal(double(given)["twice"], 3 * np.arange(3.0))
            assert given.is_deleted() == bool(donate)
    np.testing.assert_array_equal(sums, [3.0] * 3)
    assert compilations.kinds.count("compile") <= 2, "jnp.arange and the program"


@pytest.mark.parametrize("at_once", [False, True])
def test_another_program_is_compiled_beforehand(at_once: bool):
    x, calls = jnp.arange(3.0), list[jit_calls.PendingJitCall]()
    made = jax.make_jaxpr(lambda factor, x: factor * x)(jnp.float32(0), x)
    double = jax.jit(lambda x: 2 * x)
    with chosen(lambda call: lambda: calls.append(call)):
        double(x)
    if at_once:
        calls[0].compiler()(made, [np.float32(0)])
    else:
        calls[0].made().compile(lambda _: (made, [np.float32(0)], 0))
    other = lambda call: lambda: call.run(made, [np.float32(3)])[0]  # noqa: E731
    with Compilations() as compilations, chosen(other):
        np.testing.assert_array_equal(double(x), 3 * x)
    assert "compile" not in compilations.kinds


@pytest.mark.parametrize("kept", [False, True])
def test_what_runs_directly_is_in_the_fast_path_the_next_time(kept: bool):
    """The call itself, or another program that always gets the same input."""
    x, calls = jnp.arange(3.0), list[jit_calls.PendingJitCall]()
    made = jax.make_jaxpr(lambda factor, x: factor * x)(jnp.float32(0), x)
    double = jax.jit(lambda x: 2 * x)

    def choose(call: jit_calls.PendingJitCall) -> Callable[[], Any]:
        calls.append(call)
        return lambda: call.run_for_fast_path(made, [jnp.float32(3)]) if kept else call.run_own()

    with chosen(choose):
        for number in range(4):
            found = double(x + number)
            np.testing.assert_array_equal(found, (3 if kept else 2) * (np.arange(3.0) + number))
    assert len([call for call in calls if call.function is double.__wrapped__]) == 1


def test_jax_is_as_before_afterwards():
    before = patched_in_jax()
    with chosen(lambda *_: None):
        assert patched_in_jax() != before
    assert patched_in_jax() == before


def test_jax_says_which_argument_differs_from_the_calls_before():
    """A new version of jax that logs another text, or compares in another place, fails here."""
    found: list[jit.CacheMiss] = []
    undo = jit.cache_misses(found.append)
    try:

        @jax.jit
        def doubled(x):
            return 2 * x

        doubled(jnp.ones(3))
        doubled(jnp.ones(4))
        with jax.default_matmul_precision("float32"):
            doubled(jnp.ones(4))
            doubled(jnp.ones(5))
    finally:
        undo()
    assert [(one.function, one.kind) for one in found] == [
        ("doubled", "new"),
        ("doubled", "types"),
        ("doubled", "context"),
        ("doubled", "types"),  # although the call without the setting differs less for jax
    ]
    assert found[1].changes == ("at x, now f32[4] and before f32[3]",)
    assert found[1].defined.startswith(__file__)
    assert found[1].called.startswith(__file__)
