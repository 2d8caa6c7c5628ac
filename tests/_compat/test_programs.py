"""The program that a thread has started last is known, and can be waited for."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import pytest
from blocking import Blocking
from leftovers import patched_in_jax

from nnx_inspector._compat.launching import programs
from nnx_inspector.resources import open_all as opened


@contextlib.contextmanager
def following():
    """Within it, the results of the latest program of this thread are known."""
    one = programs.ProgramListener(latest=True)
    with opened(one):
        yield one.latest


def test_a_function_that_jax_has_started_itself_is_told():
    double, x, heard = jax.jit(lambda x: 2 * x), jnp.ones(3), []
    with following():
        double(x)
        programs.call_after_fast_path(heard.append)
        double(x)
        programs.call_after_fast_path(None)
        double(x)
    assert heard == [double.__wrapped__]


def test_it_listens_on_after_jax_has_set_its_checks():
    """`core.jaxpr_as_fun` does, which is called where a `custom_vmap` is traced."""
    double, x = jax.jit(lambda x: 2 * x), jnp.ones(3)
    with following() as latest:
        double(x)
        with jax.debug_nans(False):
            pass
        assert double(x) is latest.out


@pytest.mark.parametrize("inside", [False, True])
def test_nan_checks_of_the_user_go_on(inside):
    double = jax.jit(lambda x: 2 * x)

    def run():
        with following() as latest, jax.debug_nans(True) if inside else contextlib.nullcontext():
            for _ in range(3):
                out = double(jnp.ones(2))
            assert latest.out is out
            with pytest.raises(FloatingPointError):
                [double(jnp.array([jnp.inf]) * x) for x in (1.0, 0.0)]

    with contextlib.nullcontext() if inside else jax.debug_nans(True):
        run()


def test_jax_is_as_before_afterwards():
    before = patched_in_jax()
    with following(), following():
        jax.jit(lambda x: 2 * x)(jnp.ones(2))
        assert patched_in_jax() != before
    assert patched_in_jax() == before


@pytest.mark.parametrize("donated", [False, True])
def test_the_latest_program_is_waited_for_even_if_its_result_is_donated(donated):
    held, many = Blocking(), jnp.ones(Blocking.MANY)
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    x = double(held(many))
    with following() as latest:
        assert latest.waiter() is None, "no program was started"
        double(x).block_until_ready()
        assert latest.waiter() is None
        held.may_end.clear()
        out = held(many)
        ended = latest.waiter()
    if donated:
        double(out)
    waited = threading.Thread(target=ended)
    waited.start()
    assert waited.is_alive()
    held.may_end.set()
    waited.join()


def test_the_latest_program_may_return_a_random_key_and_no_array():
    with following() as latest:
        jax.jit(lambda key: jax.random.split(key, 3))(jax.random.key(0))
        ended = latest.waiter()
        jax.jit(lambda: ())()
        assert latest.waiter() is None
    if ended is not None:
        ended()


def test_the_latest_program_is_none_that_is_called_within_a_trace():
    double, x = jax.jit(lambda x: 2 * x), jnp.ones(3)
    with jax.checking_leaks(), following() as latest:
        outer = jax.jit(lambda x: double(x) + 1)(x)  # jax would find a tracer that is kept
        (kept,) = jax.tree.leaves(latest.out)
        assert kept is outer
        jax.grad(lambda x: double(x).sum())(x)
        assert not any(isinstance(one, jax.core.Tracer) for one in jax.tree.leaves(latest.out))


def test_the_latest_program_of_two_loops_whose_steps_overlap_is_known_to_both():
    double, x = jax.jit(lambda x: 2 * x), jnp.ones(3)
    a, b = following(), following()
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
