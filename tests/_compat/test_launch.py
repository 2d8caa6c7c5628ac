"""What jax launches in a thread can be taken there, changed, and given back as it was."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import marked
import numpy as np
import pytest
from devices import on_four_devices
from interrupting import Interrupt
from jax._src import ad_checkpoint, dispatch, pjit
from jax._src.interpreters import batching
from jax._src.lax.control_flow import conditionals, loops
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from marked import Watch, knob, mark

from nnx_inspector._compat import configuration, jaxprs
from nnx_inspector._compat.launching import jitted
from nnx_inspector._compat.launching.launch import Taking
from nnx_inspector.opening import close_all, held

X = jnp.arange(1.0, 5.0)
SUM = 10.0


@pytest.fixture(autouse=True)
def nothing_eager() -> None:
    marked.eager.clear()


@contextlib.contextmanager
def taken(watch: Watch) -> Iterator[Watch]:
    """As a session does: under a key of its own in jit's caches."""
    with configuration.hooks(object()), held(Taking(watch)):
        yield watch


def swapped() -> list[Any]:
    """What the package may replace in jax."""
    rules = batching.fancy_primitive_batchers
    return [
        pjit._infer_params,
        pjit._run_python_pjit,
        pjit.jit_p.impl,
        ad_checkpoint.remat_p.impl,
        rules[conditionals.cond_p],
        rules[loops.while_p],
        jax.stages.Compiled.__call__.__code__,
        jax.stages.Compiled.__init__.__code__,
    ]


BARE = swapped()


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


def run(f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[str, Any]]:
    """What is seen in two calls, each with the results of one that is not taken."""
    with taken(Watch()) as watch:
        results, seen = [], []
        for _ in range(2):
            results.append(f(*args, **kwargs))
            seen.append(watch.sums())
        assert not watch.errors
    for result in results:
        same(result, f(*args, **kwargs))
    assert swapped() == BARE
    close(seen[1], *seen[0])
    return seen[0]


def close(seen: list[tuple[str, Any]], *expected: tuple[str, Any]) -> None:
    assert [name for name, _ in seen] == [name for name, _ in expected]
    for (name, ours), (_, theirs) in zip(seen, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, err_msg=name)


def twice(x: Any) -> Any:
    return mark("out", 2 * mark("in", x) * knob("k"))


# --------------------------------------------------------------- jitted calls


def test_a_jitted_call():
    close(run(jax.jit(twice), X), ("in", SUM), ("out", 2 * SUM))


def test_an_input_of_the_program_takes_another_value_each_time():
    f = jax.jit(twice)
    with taken(Watch()) as watch:
        for k in (1, 5, 0):
            watch.knobs["k"] = k
            same(f(X), 2 * k * X)
    same(f(X), 2 * X)


def test_it_is_compiled_once_and_its_own_program_takes_the_fast_path_of_jax():
    f = jax.jit(twice)
    f(X)
    with taken(Watch()) as watch:
        f(X)
        other = X + 1
        with compiling() as found:
            f(X)
            f(other)
        assert found == []
    assert len(watch.sums()) == 6
    misses = []
    undo = jitted.swap_jit_misses(lambda *_: misses.append(1))
    f(X)
    undo()
    assert not misses


@contextlib.contextmanager
def compiling() -> Iterator[list[str]]:
    from nnx_inspector._compat.jit import compilation_events

    found: list[str] = []
    undo = compilation_events(lambda kind, _: found.append(kind))
    try:
        yield found
    finally:
        undo()


def test_a_program_without_marks_runs_as_it_would_have_run():
    f = jax.jit(lambda x: 3 * x)
    f(X)
    with held(Taking(watch := Watch())), compiling() as found:
        misses = []
        undo = jitted.swap_jit_misses(lambda *_: misses.append(1))
        f(X)
        undo()
        assert not misses
        assert not found
    assert watch.launched == 0


def test_who_chooses_nothing_leaves_the_fast_path_to_jax():
    f = jax.jit(twice)
    with taken(Watch()) as watch:
        watch.on = False
        f(X)
        misses = []
        undo = jitted.swap_jit_misses(lambda *_: misses.append(1))
        f(X)
        undo()
        assert not misses
    assert watch.sums() == []


def test_a_jit_within_a_jit():
    inner = jax.jit(twice)
    seen = run(jax.jit(lambda x: mark("last", inner(x) + inner(x + 1))), X)
    close(seen, ("in", 10), ("out", 20), ("in", 14), ("out", 28), ("last", 48))


def test_donated_arguments_are_donated_once():
    f = jax.jit(lambda x, y: (twice(x) + y, y), donate_argnums=0)
    with taken(Watch()) as watch:
        x = X + 0
        out, _ = f(x, X)
        assert x.is_deleted()
        assert not X.is_deleted()
        assert not watch.errors
        with pytest.raises(RuntimeError, match=r"deleted|donated"):
            f(x, X)
        assert not watch.errors
        close(watch.sums(), ("in", SUM), ("out", 2 * SUM))
    same(out, 3 * X)


def test_static_and_keyword_arguments_and_results_in_a_tree():
    def f(x: Any, how: str, *, scale: Any, n: int = 2) -> Any:
        return {how: (mark("a", x * scale), [None, n * x]), "n": n}

    jitted = jax.jit(f, static_argnums=1, static_argnames="n")
    close(run(lambda: jitted(X, "up", scale=3.0, n=4)), ("a", 3 * SUM))
    close(run(lambda: jitted(X, "down", scale=jnp.float32(2))), ("a", 2 * SUM))


def test_shardings_and_layouts_of_a_jit_are_kept():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Auto,))
    where = NamedSharding(mesh, P("a"))
    f = jax.jit(twice, in_shardings=where, out_shardings=where)
    with taken(Watch()) as watch:
        out = f(np.asarray(X))
        assert out.sharding.is_equivalent_to(where, 1)
        assert out.committed
        close(watch.sums(), ("in", SUM), ("out", 2 * SUM))


def test_random_keys_go_in_and_out():
    f = jax.jit(lambda key, x: (jax.random.split(key), mark("a", x)))
    with taken(Watch()) as watch:
        keys, _ = f(jax.random.key(1), X)
        close(watch.sums(), ("a", SUM))
    same(jax.random.key_data(keys), jax.random.key_data(jax.random.split(jax.random.key(1))))


# ------------------------------------------------------------------ gradients


def loss(x: Any) -> Any:
    return (mark("b", jnp.sin(mark("a", x))) ** 2).sum()


COS, SIN = np.cos(X), np.sin(X)
LOSS = [
    ("a", X.sum()),
    ("b", SIN.sum()),
    ("d b", (2 * SIN).sum()),
    ("d a", (2 * SIN * COS).sum()),
]


def test_a_jitted_gradient():
    close(run(jax.jit(jax.grad(loss)), X), *LOSS)
    close(run(jax.jit(jax.value_and_grad(loss)), X), *LOSS)


def test_the_gradient_of_a_jitted_function():
    close(run(jax.grad(jax.jit(loss)), X), *LOSS)
    close(run(jax.value_and_grad(jax.jit(loss)), X), *LOSS)


def test_the_gradient_of_a_jitted_function_that_donates():
    f = jax.jit(loss, donate_argnums=0)
    with taken(Watch()) as watch:
        same(jax.grad(f)(X + 0), jax.grad(loss)(X))
        close(watch.sums(), *LOSS)


def test_a_gradient_without_any_jit_is_marked_value_by_value():
    with taken(Watch()) as watch:
        jax.grad(loss)(X)
        assert watch.sums() == []
    close(marked.eager[:4], *LOSS)


def test_vmap_of_a_jitted_function():
    close(run(jax.vmap(jax.jit(twice)), jnp.stack([X, X])), ("in", 2 * SUM), ("out", 4 * SUM))


@jax.custom_vjp
def with_vjp(x: Any) -> Any:
    return 3 * mark("inside", x)


with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, ct: (mark("rule", 5 * ct),))


@jax.custom_jvp
def with_jvp(x: Any) -> Any:
    return 3 * mark("inside", x)


with_jvp.defjvp(lambda xs, ts: (with_jvp(xs[0]), 5 * ts[0]))


def test_a_derivative_of_ones_own():
    close(run(jax.jit(with_vjp), X), ("inside", SUM))
    close(run(jax.jit(with_jvp), X), ("inside", SUM))
    total = lambda f: lambda x: mark("out", f(x)).sum()  # noqa: E731
    seen = [("inside", SUM), ("out", 3 * SUM), ("d out", 4)]
    close(run(jax.jit(jax.grad(total(with_vjp))), X), *seen, ("rule", 20))
    close(run(jax.grad(jax.jit(total(with_vjp))), X), *seen, ("rule", 20))
    close(run(jax.jit(jax.grad(total(with_jvp))), X), *seen)
    close(run(jax.grad(jax.jit(total(with_jvp))), X), *seen)


@pytest.mark.parametrize("f", [with_vjp, with_jvp])
def test_a_derivative_of_ones_own_outside_every_jit_is_marked_value_by_value(f: Any):
    with taken(Watch()) as watch:
        f(X)
        assert watch.sums() == []
    assert marked.eager == [("inside", SUM)]


# --------------------------------------------- loops and conditions without jit


def scanned(x: Any) -> Any:
    return jax.lax.scan(lambda c, y: (mark("c", c + y), mark("y", 2 * y)), 0.0, x)


def looped(x: Any) -> Any:
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, mark("c", 2 * c[1])), (0, x))


def either(x: Any) -> Any:
    up, down = (lambda x: mark("up", 2 * x)), (lambda x: mark("down", -x))
    return jax.lax.cond(x.sum() > 0, up, down, x)


SCANNED = [("c", [1, 3, 6, 10]), ("y", [2, 4, 6, 8])]
LOOPED = [("c", SUM * (2 + 4 + 8))]
EITHER = [("down", 0), ("up", 2 * SUM)]


@pytest.mark.parametrize(
    ("f", "expected"), [(scanned, SCANNED), (looped, LOOPED), (either, EITHER)]
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["bare", "jit"])
def test_loops_and_conditions(f: Any, expected: Any, transform: Any):
    close(run(transform(f), X), *expected)


def test_the_gradient_of_a_scan():
    f = lambda x: jax.lax.scan(lambda c, y: (mark("c", c * y), None), 1.0, x)[0]  # noqa: E731
    expected = [("c", [1, 2, 6, 24]), ("d c", [24, 12, 4, 1])]
    for one in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.jit(f))):
        close(run(one, X), *expected)


def remat(x: Any) -> Any:
    return jax.checkpoint(loss)(x)


@pytest.mark.parametrize("f", [jax.checkpoint(twice), jax.jit(jax.checkpoint(twice))])
def test_a_remat(f: Any):
    close(run(f, X), ("in", SUM), ("out", 2 * SUM))
    assert not marked.eager or not hasattr(f, "lower")


def test_what_a_remat_computes_anew_in_its_second_pass_counts_once():
    for f in (jax.jit(jax.grad(remat)), jax.grad(jax.jit(remat))):
        close(sorted(run(f, X)), *sorted(LOSS))
    with taken(Watch()) as watch:  # jax runs the first pass value by value
        jax.grad(remat)(X)
        close([*marked.eager, *watch.sums()], LOSS[0], LOSS[1], LOSS[2], LOSS[3])


def test_a_remat_that_nobody_changes_is_run_equation_by_equation():
    with taken(Watch()) as watch:
        watch.on = False
        jax.checkpoint(lambda x: mark("a", x))(X)
    assert marked.eager == [("a", SUM)]


def test_nothing_is_compiled_again_for_a_loop_outside_jit():
    f = jax.checkpoint(lambda x: mark("a", x))
    body, up = (lambda c, x: (mark("c", c + x), x)), (lambda x: mark("up", x))
    with taken(Watch()):
        for _ in range(2):
            with compiling() as found:
                f(X)
                jax.lax.scan(body, 0.0, X)
                jax.lax.cond(True, up, up, X)
        assert "compile" not in found


# ------------------------------------------------------- examples of their own


BATCH = jnp.array([-3.0, 1.0, -1.0, 5.0])


def branches(x: Any) -> Any:
    return jax.lax.cond(x > 0, lambda x: mark("up", 2 * x), lambda x: mark("down", x * x), x)


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


def halved(x: Any) -> Any:
    return jax.lax.while_loop(lambda x: x > 1, lambda x: mark("x", x / 2), x)


def halvings(x: float) -> float:
    total = 0.0
    while x > 1:
        x /= 2
        total += x
    return total


def test_the_marks_of_a_loop_count_for_the_examples_that_are_still_in_it():
    x = jnp.array([9.0, 0.5, 2.0, 4.0])
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


def test_conditions_and_loops_of_other_threads_are_mapped_as_ever():
    with held(Taking(Watch())):
        program = in_thread(lambda: str(jax.make_jaxpr(jax.vmap(branches))(BATCH)))
    assert "masked=True" not in program
    assert program == str(jax.make_jaxpr(jax.vmap(branches))(BATCH))


# ------------------------------------------------------------ threads, nesting


def in_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            found.append(work())
        except BaseException as error:  # raised again below
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


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
    assert swapped() == BARE


def test_two_takings_share_a_launch():
    first, second = Watch(lambda name: name == "in"), Watch(lambda name: name != "in", k=3)
    f = jax.jit(twice)
    with configuration.hooks(object()), held(Taking(first), Taking(second)):
        same(f(X), 6 * X)
        close(second.sums(), ("out", 6 * SUM))
        close(first.sums(), ("in", SUM))


def test_takings_open_and_close_in_any_order():
    f = jax.jit(twice)
    one, two = Watch(lambda name: name == "in"), Watch(lambda name: name == "out")
    a, b = Taking(one), Taking(two)
    with configuration.hooks(object()):
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
    assert swapped() == BARE


def test_it_opens_and_closes_among_those_who_hear_jitted_calls():
    f, heard = jax.jit(twice), []
    taking = Taking(watch := Watch())
    with configuration.hooks(object()):
        taking.open()
        undo = jitted.swap_jit_misses(lambda *_: heard.append(1))
        f(X)
        taking.close()
        f(X)
        undo()
    assert swapped() == BARE
    assert heard
    assert len(watch.sums()) == 2


def test_an_interrupt_at_any_line_leaves_jax_as_it_was():
    f = jax.jit(twice)

    def steps() -> None:
        with configuration.hooks(object()), held(Taking(Watch()), Taking(Watch())):
            f(X)

    with Interrupt() as whole:
        steps()
    assert swapped() == BARE
    assert whole.lines > 50
    for at in range(whole.lines):
        with contextlib.suppress(KeyboardInterrupt), Interrupt(at):
            steps()
        assert swapped() == BARE, at
    close(run(f, X), ("in", SUM), ("out", 2 * SUM))


def test_it_may_be_closed_before_it_was_opened_and_twice():
    taking = Taking(Watch())
    taking.close()
    taking.open()
    close_all((taking,))
    taking.close()
    assert swapped() == BARE


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
        f.lower(X)  # is not run
        jax.grad(lambda x: f(x).sum())(X)
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


def test_arrays_on_devices_that_do_not_fit_raise_what_jax_raises():
    if jax.device_count() < 4:
        on_four_devices(__file__, "do_not_fit")
        return
    x, y = (jax.device_put(X, d) for d in jax.devices()[:2])
    f = jax.jit(lambda x, y: mark("a", x) + y)
    with taken(Watch()) as watch:
        with pytest.raises(ValueError, match="Received incompatible devices for jitted") as ours:
            f(x, y)
        assert not watch.errors
    with pytest.raises(ValueError, match="incompatible devices") as theirs:
        f(x, y)
    assert str(ours.value) == str(theirs.value)


def test_a_program_that_cannot_be_started_is_told_and_the_users_own_runs():
    class Broken(Watch):
        def choose(self, program: Any, /) -> Any:
            found = super().choose(program)
            if found is not None and program is not self.last:
                self.last = program
                bare, _ = jaxprs.open_jaxpr(found.edited.program)
                broken = jaxprs.edited(
                    found.edited.program,
                    equations=[],
                    outputs=[jaxprs.variable(v.aval) for v in bare.outvars],
                )
                made = marked.Edited(broken, found.edited.knobs, found.edited.names)
                self.edits[program] = made
                return marked.Launched(made, self)
            return found

        last: Any = None

    f, g = jax.jit(twice), jax.grad(jax.jit(loss))
    with taken(Broken()) as watch:
        same(f(X), 2 * X)
        assert len(watch.errors) == 1
        same(g(X), jax.grad(loss)(X))
        assert len(watch.errors) == 3
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


# -------------------------------------------------------------- several devices


def several() -> Any:
    return jax.devices()[: 4 if jax.device_count() >= 4 else 1]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_what_is_returned_in_addition_is_whole_on_every_device(kind: Any):
    devices = several()
    mesh = jax.make_mesh((len(devices),), ("a",), axis_types=(kind,), devices=devices)
    where = NamedSharding(mesh, P("a"))
    with jax.set_mesh(mesh), taken(Watch()) as watch:
        x = jax.device_put(X, where)
        for f in (jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
            same(f(x), jax.grad(loss)(X))
            assert not watch.errors
            for _, value in watch.seen:
                assert value.sharding.is_fully_replicated
                assert value.sharding.device_set == set(devices)
            close(watch.sums(), *LOSS)


def programs_on_several(mesh: Any, where: Any) -> dict[str, Callable[[], Any]]:
    """Each runs on all devices for another reason."""

    @jax.jit
    def constrained(x: Any) -> Any:
        return twice(jax.lax.with_sharding_constraint(x, where))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    def mapped(x: Any) -> Any:
        return twice(x)

    return {
        "arguments": lambda: jax.jit(twice)(jax.device_put(X, where)),
        "in_shardings": lambda: jax.jit(twice, in_shardings=where)(np.asarray(X)),
        "out_shardings": lambda: jax.jit(twice, out_shardings=where)(np.asarray(X)),
        "constraint": lambda: constrained(np.asarray(X)),
        "shard_map": lambda: mapped(np.asarray(X)),
    }


def test_wherever_a_program_gets_its_devices_from():
    devices = several()
    mesh = jax.make_mesh((len(devices),), ("a",), axis_types=(AxisType.Auto,), devices=devices)
    for name, f in programs_on_several(mesh, NamedSharding(mesh, P("a"))).items():
        with taken(Watch()) as watch:
            same(f(), 2 * X)
            assert not watch.errors
            for _, value in watch.seen:
                assert value.sharding.device_set == set(devices), name
                assert value.sharding.is_fully_replicated, name
            close(watch.sums(), ("in", SUM), ("out", 2 * SUM))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("is_checked", [False, True])
def test_shard_map(kind: Any, is_checked: bool):
    devices = several()
    mesh = jax.make_mesh((len(devices),), ("a",), axis_types=(kind,), devices=devices)
    how = {"mesh": mesh, "in_specs": P("a"), "out_specs": P("a"), "check_vma": is_checked}
    f = jax.shard_map(twice, **how)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("a")))
        close(run(jax.jit(f), x), ("in", SUM), ("out", 2 * SUM))
        total = lambda x: (f(x) ** 2).sum()  # noqa: E731
        expected = [("in", SUM), ("out", 2 * SUM), ("d out", 4 * SUM), ("d in", 8 * SUM)]
        close(run(jax.jit(jax.grad(total)), x), *expected)
        close(run(jax.grad(jax.jit(total)), x), *expected)


def test_a_shard_map_outside_every_jit():
    devices = several()
    mesh = jax.make_mesh((len(devices),), ("a",), axis_types=(AxisType.Auto,), devices=devices)
    f = jax.shard_map(twice, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    close(run(f, jax.device_put(X, NamedSharding(mesh, P("a")))), ("in", SUM), ("out", 2 * SUM))


def test_on_four_devices():
    if jax.device_count() < 4:
        names = "every_device", "its_devices", "test_shard_map", "a_shard_map"
        on_four_devices(__file__, *names)


# ---------------------------------------------------------- the parts of jax


def test_the_parts_of_jax_that_are_replaced_are_where_they_were():
    """Each message says what to look for in a version of jax in which it has moved."""
    call = "jax._src.pjit: `cache_miss` in `_cpp_pjit` finds a program and runs it"
    assert callable(pjit._infer_params), call
    assert callable(pjit._run_python_pjit), call
    names = pjit._cpp_pjit.__code__.co_consts
    inner = next(c for c in names if getattr(c, "co_name", "") == "cache_miss")
    assert {"_infer_params", "_run_python_pjit"} <= set(inner.co_names), call
    assert pjit.jit_p.impl is pjit._pjit_call_impl, "jit's impl, for grad(jit(f))"
    assert callable(ad_checkpoint.remat_p.impl), "remat's impl, for a remat outside jit"
    rules = batching.fancy_primitive_batchers
    for primitive in (conditionals.cond_p, loops.while_p):
        assert callable(rules[primitive]), "the batching rules of cond and while"
    assert callable(dispatch.xla_primitive_callable), "the jitted function of a primitive"
    assert callable(dispatch.get_intermediate_shardings), "the shardings in a program"
    assert callable(dispatch.check_special), "jax's check for NaN"


def test_a_compiled_executable_has_the_name_of_its_function():
    def a_step(x: Any) -> Any:
        return x

    assert jitted.name_of(jax.jit(a_step).lower(X).compile()) == "a_step"
