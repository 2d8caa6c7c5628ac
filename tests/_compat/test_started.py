"""Programs that speak with the host take jax's fast path, and can be waited for."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import pytest
from held import Held
from jax._src import api, pjit

from nnx_inspector._compat import started
from nnx_inspector._compat.launching import jitted
from nnx_inspector.program.host.primitives import EFFECT, tell


@pytest.fixture
def told():
    return []


@pytest.fixture
def program(told):
    """A program that sends its result to the host."""
    return jax.jit(lambda x: (2 * x, tell(lambda y: told.append(float(y.sum())), True, x)))


def in_python(run):
    """How many jitted calls jax handles in Python while something runs."""
    calls = []
    undo = jitted.swap_jit_misses(lambda *_: calls.append(1))
    try:
        run()
    finally:
        undo()
    return len(calls)


def test_a_program_with_our_effect_takes_the_fast_path(program, told):
    x = jnp.ones(3)
    with started.fast_path(EFFECT):
        assert in_python(lambda: program(x)) == 1
        assert in_python(lambda: [program(x) for _ in range(5)]) == 0
        started.wait()
    assert told == [3.0] * 6


def test_outside_it_is_called_in_python_each_time(program):
    x = jnp.ones(3)
    assert in_python(lambda: [program(x) for _ in range(3)]) == 3


def test_a_program_with_another_effect_is_left_alone():
    program = jax.jit(lambda x: jax.debug.callback(lambda y: None, x))
    with started.fast_path(EFFECT):
        assert in_python(lambda: [program(jnp.ones(3)) for _ in range(3)]) == 3


def test_a_function_that_jax_has_started_itself_is_told():
    double, x, heard = jax.jit(lambda x: 2 * x), jnp.ones(3), []
    with started.fast_path(EFFECT):
        double(x)
        started.call_after(heard.append)
        double(x)
        started.call_after(None)
        double(x)
    assert heard == [double.__wrapped__]


def test_all_that_was_started_has_ended_after_a_wait(program, told):
    x = jnp.ones((300, 300))
    with started.fast_path(EFFECT):
        for n in range(1, 40):
            x = program(x / 2)[0]
            started.wait()
            assert len(told) == n


def test_it_listens_on_after_jax_has_set_its_checks(program, told):
    """`core.jaxpr_as_fun` does, which is called where a `custom_vmap` is traced."""
    x = jnp.ones((300, 300))
    with started.fast_path(EFFECT):
        program(x)
        with jax.debug_nans(False):
            pass
        for n in range(2, 20):
            x = program(x / 2)[0]
            started.wait()
            assert len(told) == n


def test_a_program_that_returns_a_random_key_is_waited_for(told):
    program = jax.jit(lambda key: (jax.random.split(key)[0], tell(told.append, True, 1.0)))
    with started.fast_path(EFFECT):
        key = jax.random.key(0)
        for _ in range(5):
            key = program(key)[0]
        started.wait()
    assert len(told) == 5


def test_results_that_are_donated_or_dropped_do_no_harm(program, told):
    donated = jax.jit(lambda x: program(x)[0], donate_argnums=0)
    with started.fast_path(EFFECT):
        x = jnp.ones(4)
        for _ in range(50):
            x = donated(x)
            program(jnp.ones(2))
        started.wait()
    assert len(told) == 100


@pytest.mark.parametrize("inside", [False, True])
def test_nan_checks_of_the_user_go_on(program, told, inside):
    def run():
        with (
            started.fast_path(EFFECT),
            jax.debug_nans(True) if inside else contextlib.nullcontext(),
        ):
            for _ in range(3):
                program(jnp.ones(2))
            with pytest.raises(FloatingPointError):
                [program(jnp.array([jnp.inf]) * x) for x in (1.0, 0.0)]
        with started.fast_path(EFFECT):
            program(jnp.ones(2))
            started.wait()

    with contextlib.nullcontext() if inside else jax.debug_nans(True):
        run()
    assert told.count(2.0) == 4


def test_jax_is_as_before_afterwards(program):
    before = pjit._get_fastpath_data, api._post_hook_state.get_local()
    with started.fast_path(EFFECT), started.fast_path(EFFECT):
        program(jnp.ones(2))
        assert pjit._get_fastpath_data is not before[0]
    assert (pjit._get_fastpath_data, api._post_hook_state.get_local()) == before


@pytest.mark.parametrize("donated", [False, True])
def test_the_latest_program_is_waited_for_even_if_its_result_is_donated(donated):
    held, many = Held(), jnp.ones(Held.MANY)
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    x = double(held(many))
    with started.following(EFFECT) as latest:
        assert latest.ended() is None, "no program was started"
        double(x).block_until_ready()
        assert latest.ended() is None
        held.may_end.clear()
        out = held(many)
        ended = latest.ended()
    if donated:
        double(out)
    waited = threading.Thread(target=ended)
    waited.start()
    assert waited.is_alive()
    held.may_end.set()
    waited.join()


def test_the_latest_program_may_return_a_random_key_and_no_array():
    with started.following(EFFECT) as latest:
        jax.jit(lambda key: jax.random.split(key, 3))(jax.random.key(0))
        ended = latest.ended()
        jax.jit(lambda: ())()
        assert latest.ended() is None
    if ended is not None:
        ended()


def test_the_latest_program_is_none_that_is_called_within_a_trace():
    double, x = jax.jit(lambda x: 2 * x), jnp.ones(3)
    with jax.checking_leaks(), started.following(EFFECT) as latest:
        outer = jax.jit(lambda x: double(x) + 1)(x)  # jax would find a tracer that is kept
        (kept,) = jax.tree.leaves(latest.out)
        assert kept is outer
        jax.grad(lambda x: double(x).sum())(x)
        assert not any(isinstance(one, jax.core.Tracer) for one in jax.tree.leaves(latest.out))


def test_the_latest_program_of_two_loops_whose_steps_overlap_is_known_to_both():
    double, x = jax.jit(lambda x: 2 * x), jnp.ones(3)
    a, b = started.following(EFFECT), started.following(EFFECT)
    one, two = a.__enter__(), b.__enter__()
    double(x)
    both = double(x)
    assert one.out is both
    assert two.out is both
    a.__exit__(None, None, None)
    last = double(x)
    b.__exit__(None, None, None)
    double(x)
    assert one.out is both
    assert two.out is last
