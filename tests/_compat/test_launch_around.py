"""Threads, interrupts, errors and what else goes on around a launch that is taken."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import marked
import numpy as np
import pytest
from interrupts import Interrupt
from launches import (
    BARE,
    LOSS,
    SUM,
    X,
    close,
    in_thread,
    loss,
    patched,
    run,
    same,
    taken,
    twice,
)
from marked import Watch, mark

from nnx_inspector._compat import configuration, jaxprs
from nnx_inspector._compat.launching import jit_calls
from nnx_inspector._compat.launching.launch import LaunchInterception
from nnx_inspector.resources import close_all, open_all


@pytest.fixture(autouse=True)
def nothing_eager() -> None:
    marked.eager.clear()


# ------------------------------------------------------------ threads, nesting


def test_programs_of_other_threads_are_untouched():
    f, g = jax.jit(twice), jax.grad(jax.jit(loss))
    with taken(Watch()) as watch:
        f(X)
        in_thread(lambda: (f(X), g(X), jax.checkpoint(twice)(X)))
        close(watch.sums(), ("in", SUM), ("out", 2 * SUM))
        assert watch.threads == {threading.get_ident()}


def test_two_threads_take_their_own_programs_at_the_same_time():
    f, both = jax.jit(lambda x: jax.grad(jax.jit(loss))(twice(x))), threading.Barrier(2)

    def work(scale: float) -> list[tuple[str, Any]]:
        with taken(Watch()) as watch:
            for _ in range(5):
                both.wait()
                f(scale * X)
                both.wait()
                assert all(x[1] == scale * SUM for x in watch.seen if x[0] == "in")
            assert watch.threads == {threading.get_ident()}
            return watch.sums()

    found: dict[float, Any] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.__setitem__(n, work(n))) for n in (1.0, 2.0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for scale in (1.0, 2.0):
        ins = [x for name, x in found[scale] if name == "in"]
        assert ins == [scale * SUM] * 5
    assert patched() == BARE


def test_two_takings_share_a_launch():
    first, second = Watch(lambda name: name == "in"), Watch(lambda name: name != "in", k=3)
    f = jax.jit(twice)
    with (
        configuration.hooks_key(object()),
        open_all(LaunchInterception(first), LaunchInterception(second)),
    ):
        same(f(X), 6 * X)
        close(second.sums(), ("out", 6 * SUM))
        close(first.sums(), ("in", SUM))


def test_takings_open_and_close_in_any_order():
    f = jax.jit(twice)
    one, two = Watch(lambda name: name == "in"), Watch(lambda name: name == "out")
    a, b = LaunchInterception(one), LaunchInterception(two)
    with configuration.hooks_key(object()):
        a.open()
        b.open()
        f(X)
        a.close()
        f(X)
        in_thread(b.close)
        f(X)
    close(one.sums(), ("in", SUM))
    close(two.sums(), ("out", 2 * SUM), ("out", 2 * SUM))
    a.close()
    b.close()
    assert patched() == BARE


def test_it_opens_and_closes_among_those_who_hear_jitted_calls():
    f, heard = jax.jit(twice), []
    taking = LaunchInterception(watch := Watch())
    with configuration.hooks_key(object()):
        taking.open()
        undo = jit_calls.patch_jit_misses(lambda *_: heard.append(1))
        f(X)
        taking.close()
        f(X)
        undo()
    assert patched() == BARE
    assert heard
    assert len(watch.sums()) == 2


def test_an_interrupt_at_any_line_leaves_jax_as_it_was():
    f = jax.jit(twice)

    def steps() -> None:
        with (
            configuration.hooks_key(object()),
            open_all(LaunchInterception(Watch()), LaunchInterception(Watch())),
        ):
            f(X)

    with Interrupt() as whole:
        steps()
    assert patched() == BARE
    assert whole.lines > 50
    for at in range(whole.lines):
        with contextlib.suppress(KeyboardInterrupt), Interrupt(at):
            steps()
        assert patched() == BARE, at
    close(run(f, X), ("in", SUM), ("out", 2 * SUM))


def test_it_may_be_closed_before_it_was_opened_and_twice():
    taking = LaunchInterception(Watch())
    taking.close()
    taking.open()
    close_all((taking,))
    taking.close()
    assert patched() == BARE


# ------------------------------------------------------------------ and so on


def test_after_jax_has_cleared_its_caches_programs_are_taken_as_before():
    f, g = jax.jit(twice), jax.grad(jax.jit(loss))
    with taken(Watch()) as watch:
        f(X)
        g(X)
        watch.sums()
        jax.clear_caches()
        for _ in range(2):
            f(X)
            close(watch.sums(), ("in", SUM), ("out", 2 * SUM))
            g(X)
            close(watch.sums(), *LOSS)


def test_no_program_is_kept():
    class Model:
        def __call__(self, x: Any) -> Any:
            return jax.checkpoint(twice)(x)

    def steps(watch: Watch) -> list[weakref.ref[Any]]:
        model = Model()
        f = jax.jit(model.__call__)
        f(X)
        jax.grad(lambda x: f(x).sum())(X)
        f.lower(X)  # is not run
        return [weakref.ref(model), *map(weakref.ref, watch.edits)]

    with taken(Watch()) as watch:
        gone = steps(watch)
        assert len(gone) > 3
    jax.clear_caches()
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
    assert not watch.edits


@pytest.mark.parametrize("kind", ["nans", "infs"])
def test_the_users_check_for_nan_is_that_of_jax(kind: str):
    bad = {"nans": jnp.log, "infs": lambda x: 1 / x}[kind]
    wrong = {"nans": -X, "infs": 0 * X}[kind]
    f = jax.jit(lambda x: mark("out", bad(mark("in", x))))
    with getattr(jax, f"debug_{kind}")(True), taken(Watch()) as watch:
        f(X)
        watch.sums()
        with pytest.raises(FloatingPointError, match=r"log|div|integer_pow"):
            f(wrong)
        assert not watch.errors
        # what was measured is told before jax raises
        assert [name for name, _ in watch.sums()] == ["in", "out"]
        g = jax.grad(jax.jit(lambda x: mark("loss", bad(x).sum())))
        g(X)
        with pytest.raises(FloatingPointError):
            g(wrong)
        assert not watch.errors


def test_nan_in_what_is_measured_is_none_of_the_users():
    f = jax.jit(lambda x: (mark("nan", jnp.log(-x)), 2 * x)[1])
    with jax.debug_nans(True), taken(Watch()) as watch:
        same(f(X), 2 * X)
        ((name, value),) = watch.sums()
        assert name == "nan"
        assert np.isnan(value)
        assert jax.config.jax_debug_nans


def test_the_users_own_error_passes_unchanged():
    def error(x: Any) -> None:
        raise RuntimeError("of the user")

    calls = []

    def count(x: Any) -> np.ndarray:
        calls.append(1)
        raise RuntimeError("of the user")

    traced = jax.jit(lambda x: error(mark("a", x)))
    run_it = jax.jit(
        lambda x: jax.pure_callback(count, jax.ShapeDtypeStruct((), np.float32), mark("a", x))
    )
    with taken(Watch()) as watch:
        with pytest.raises(RuntimeError, match="of the user"):
            traced(X)
        with pytest.raises(jax.errors.JaxRuntimeError, match="of the user"):
            run_it(X).block_until_ready()
        assert calls == [1]  # it was not run once more
        with pytest.raises(TypeError, match=r"not a valid JAX type|as an abstract array"):
            jax.jit(twice)("no array")
        assert not watch.errors


def test_a_program_that_cannot_be_started_is_told_and_the_users_own_runs():
    class Broken(Watch):
        def prepare(self) -> None: ...

        def choose(
            self, program: Any, arrays: Any, /, *, alone: Any = None, call: Any = None
        ) -> Any:
            found = super().choose(program, arrays)
            if found is not None and program is not self.last:
                self.last = program
                bare, _ = jaxprs.open_jaxpr(found.edited.program)
                broken = jaxprs.edit_jaxpr(
                    found.edited.program,
                    equations=[],
                    outputs=[jaxprs.new_var(v.aval) for v in bare.outvars],
                )
                made = marked.Edited(broken, found.edited.knobs, found.edited.names)
                self.edits[program] = made
                return marked.Launched(made, self)
            return found

        last: Any = None

    f, g = jax.jit(twice), jax.grad(jax.jit(loss))
    with taken(Broken()) as watch:
        for number in (1, 2):  # the fast path of jax is not taken, so that it is told each time
            same(f(X), 2 * X)
            assert len(watch.errors) == number
        same(g(X), jax.grad(loss)(X))
        assert len(watch.errors) == 4
        assert watch.sums() == []


def test_programs_that_were_compiled_ahead_of_time_are_counted_by_name():
    def a_step(x: Any) -> Any:
        return twice(x)

    compiled = jax.jit(a_step).lower(X).compile()
    with taken(Watch()) as watch:
        same(compiled(X), 2 * X)
        inside = jax.jit(a_step).lower(X).compile()
        inside(X)
        inside(X)
        in_thread(lambda: compiled(X))
        assert watch.names == ["a_step"] * 3
        assert watch.sums() == []
    compiled(X)
    assert len(watch.names) == 3


def test_programs_that_were_exported_are_told_by_name():
    from jax import export

    def a_step(x: Any) -> Any:
        return 2 * x

    step = export.export(jax.jit(a_step))(X)
    f = jax.jit(lambda x: mark("out", step.call(x)))
    with taken(Watch()) as watch:
        same(step.call(X), 2 * X)
        assert watch.names == ["a_step"]
        f(X)
        assert watch.names == ["a_step"] * 2
        close(watch.sums(), ("out", 2 * SUM))


def test_jax_may_look_for_keys_that_are_used_twice():
    with jax.debug_key_reuse(True):
        f = jax.jit(lambda key, x: mark("a", x) + jax.random.normal(key, x.shape))
        with taken(Watch()) as watch:
            f(jax.random.key(0), X)
            jax.grad(lambda x: f(jax.random.key(1), x).sum())(X)
            assert [name for name, _ in watch.sums()] == ["a", "a", "d a"]
            assert not watch.errors


def test_without_jit_nothing_is_launched():
    with jax.disable_jit(), taken(Watch()) as watch:
        same(jax.jit(twice)(X), 2 * X)
        assert watch.sums() == []
        assert [name for name, _ in marked.eager] == ["in", "out"]
        # except what jax would run twice
        same(jax.checkpoint(twice)(X), 2 * X)
        close(watch.sums(), ("in", SUM), ("out", 2 * SUM))
