"""While nothing is measured, jax starts the user's own programs itself, and their passes count."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside
from jax._src import pjit
from watched_region import Net, WatchedRegion, batch, mean_of, once, twice

import nnx_inspector as nni
from nnx_inspector.hooks.hook import open_hooks
from nnx_inspector.live.programs import fast_path

STEP = "JitFn"


@pytest.fixture(name="misses")
def _misses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each step that jax has looked for in Python, in this thread."""
    # jax asks it whenever a step is looked for in Python; there is no public sign
    found, before, here = list[str](), pjit._infer_params, threading.get_ident()

    def noted(fun: Any, *rest: Any) -> Any:
        name = type(fun).__name__  # the operations of jnp are functions
        if threading.get_ident() == here and name == STEP:
            found.append(name)
        return before(fun, *rest)

    monkeypatch.setattr(pjit, "_infer_params", noted)
    return found


def is_aside() -> bool:
    return any(getattr(layer.wrap, "salt", 0) for layer in open_hooks())


def test_a_pass_that_is_not_measured_is_started_by_jax_itself(misses: list[str]):
    model, step = Net(), nnx.jit(once)
    with WatchedRegion(model, 6) as watched:
        wanted = {}
        for number in range(26):
            x = batch(number)
            if number % 6 == 0:
                wanted[number] = mean_of(model, x)
            misses.clear()
            out = watched.run(step, model, x)
            np.testing.assert_allclose(np.mean(out), mean_of(model, x), rtol=1e-5)
            if number > 12:  # once all are known, one call is missed: the measured one
                assert misses == [STEP] * (number % 6 == 0), number
                assert is_aside() == (number % 6 != 5), number
    watched.check(wanted)
    assert watched.session.inbox.count == 26
    assert not open_hooks()


def test_functions_of_several_passes_and_helpers_of_none():
    model, one, two = Net(), nnx.jit(once), nnx.jit(twice)
    split = jax.jit(lambda x: x + 1)
    with WatchedRegion(model, 7) as watched:
        begun, wanted = 0, {}
        for number in range(24):
            x, (step, passes) = batch(number), [(one, 1), (two, 2)][number % 2]
            for i in range(passes):
                if (begun + i) % 7 == 0:
                    wanted[begun + i] = mean_of(model, x + 0.5 * i)
            begun += passes
            watched.run(step, model, x)
            split(x)
            assert watched.session.inbox.count == begun
    watched.check(wanted)


def test_a_function_whose_programs_begin_different_numbers_of_passes():
    model = Net()

    @nnx.jit(static_argnames="deep")
    def step(model: Net, x: jax.Array, deep: int) -> jax.Array:
        for _ in range(deep):
            x = model(x)
        return x

    with WatchedRegion(model, 5) as watched:
        begun = 0
        for number in range(24):
            deep = [1, 1, 1, 2, 0][number % 5] if number > 8 else 1
            watched.run(lambda x, deep=deep: step(model, x, deep=deep), batch(number))
            begun += deep
            assert watched.session.inbox.count == begun, number
    assert list(watched.means()) == list(range(0, begun, 5))
    assert watched.session.number in fast_path._irregular  # shows in time only


def test_other_shapes_and_calls_without_jit_between():
    model, step = Net(), nnx.jit(once)
    with WatchedRegion(model, 4) as watched:
        wanted = {}
        for number in range(21):
            x = batch(number, rows=3 if number % 5 == 2 else 2)
            if number % 4 == 0:
                wanted[number] = mean_of(model, x)
            watched.run(*([model] if number % 7 == 6 else [step, model]), x)
            assert watched.session.inbox.count == number + 1
    watched.check(wanted)


def test_layers_that_are_opened_inside_close_as_they_were():
    model, step, seen = Net(), nnx.jit(once), list[str]()

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        seen.append(context.path)
        return next_fun(*args, **kwargs)

    with WatchedRegion(model, 4) as watched:
        wanted = {}
        for number in range(22):
            x = batch(number)
            if number % 4 == 0:
                wanted[number] = mean_of(model, x)
            if number % 3 == 1:
                with nni.intercept_methods(note):
                    watched.run(step, model, x)
            else:
                watched.run(step, model, x)
            assert watched.session.inbox.count == number + 1
            assert len(open_hooks()) == 1
    watched.check(wanted)
    assert seen


def test_a_second_loop_counts_what_the_first_has_compiled(misses: list[str]):
    model, step = Net(), nnx.jit(once)
    for _ in range(2):
        with WatchedRegion(model, 4) as watched:
            wanted = {}
            for number in range(11):
                if number % 4 == 0:
                    wanted[number] = mean_of(model, batch(number))
                watched.run(step, model, batch(number))
        watched.check(wanted)
        assert watched.session.inbox.count == 11
    misses.clear()
    for number in range(3):
        step(model, batch(number))
    assert len(misses) <= 1, "the user's own call has a key of its own"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_perturbation_acts_from_the_next_pass_on(elsewhere: bool):
    """From another thread it may act from the one after: jax has it in its fast path already."""
    model, step = Net(), nnx.jit(once)
    insp = nni.Inspector(model, batch(1), display=False)
    half = insp.perturb("linear", nni.Scale(0.5))
    half.enabled = False

    def switch(on: bool) -> None:
        half.enabled = on

    factors = []
    with insp.watch(every=50):
        session = inside(insp).session
        assert session is not None
        for number in range(18):
            if number == 8:
                assert is_aside()
            if number in (8, 13):
                thread = threading.Thread(target=switch, args=[number == 8])
                thread.start() if elsewhere else switch(number == 8)
                if elsewhere:
                    thread.join()
            x = batch(number + 1)
            factors.append(float(jnp.mean(step(model, x))) / mean_of(model, x))
            session.variants.wait()
        assert session.inbox.count == 18
    first = 8 + elsewhere
    wanted = [0.5 if first <= i < 13 else 1.0 for i in range(18)]
    np.testing.assert_allclose(factors, wanted, rtol=1e-5)
    insp.close()


def test_a_perturbation_that_stays_is_started_by_jax_itself(misses: list[str]):
    model, step, scales = Net(), nnx.jit(once), [0.5, 3.0, 0.25]
    insp = nni.Inspector(model, batch(1), display=False)
    half = insp.perturb("linear", nni.Scale(0.5))
    factors, wanted, missed = list[float](), list[float](), list[int]()
    with insp.watch(every=16):
        session = inside(insp).session
        assert session is not None
        for number in range(120):
            scale = scales[number // 8 % 3]
            if number % 8 == 0:  # comes back to each of them
                half.perturbation = nni.Scale(scale)
                half.enabled = number // 8 % 4 != 3
            misses.clear()
            x = batch(number + 1)
            factors.append(float(jnp.mean(step(model, x))) / mean_of(model, x))
            wanted.append(scale if half.enabled else 1.0)
            session.variants.wait()
            missed.append(len(misses))
            assert session.inbox.count == number + 1
    np.testing.assert_allclose(factors, wanted, rtol=1e-5)
    assert not any(missed[number] for number in range(72, 120) if number % 8 > 2)
    watched = [one.step for one in insp.recording.passes if one.kind == "watch"]
    assert watched == list(range(0, 120, 16))
    insp.close()


def test_many_values_of_a_slider_are_not_kept():
    assert fast_path.key_of([np.zeros(2**14, np.uint8)])
    assert fast_path.key_of([np.zeros(2**14 + 1, np.uint8)]) == 0
    first = fast_path.key_of([np.array(1.0)])
    assert first == fast_path.key_of([np.array(1.0)]) != fast_path.key_of([np.array(2.0)])
    assert first not in (0, fast_path.key_of())


def test_an_error_in_a_step_and_the_end_of_a_loop_leave_nothing_open(misses: list[str]):
    model, step = Net(), nnx.jit(once)

    def fail() -> None:
        with WatchedRegion(model, 10) as watched:
            for number in range(6):
                watched.run(step, model, batch(number))
            assert is_aside()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not open_hooks()
    step(model, batch(0))
    misses.clear()
    step(model, batch(1))
    assert not misses
