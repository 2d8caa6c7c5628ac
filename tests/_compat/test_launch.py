"""What jax launches in a thread can be taken there, changed, and given back as it was."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import marked
import numpy as np
import pytest
from compilations import Compilations
from flax import nnx
from jax._src import ad_checkpoint, compiler, dispatch, pjit
from jax._src.interpreters import batching
from jax._src.lax.control_flow import conditionals, loops
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from launches import (
    LOSS,
    SUM,
    X,
    close,
    loss,
    no_misses,
    run,
    same,
    taken,
    twice,
)
from marked import Watch, mark

from nnx_inspector._compat.launching import executables, jit_calls
from nnx_inspector._compat.launching.launch import LaunchInterception
from nnx_inspector.resources import open_all


@pytest.fixture(autouse=True)
def nothing_eager() -> None:
    marked.eager.clear()


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
        with Compilations() as found:
            f(X)
            f(other)
        assert found.kinds == []
    assert len(watch.sums()) == 6
    with no_misses():
        f(X)


def test_a_program_without_marks_runs_as_it_would_have_run():
    f = jax.jit(lambda x: 3 * x)
    f(X)
    with open_all(LaunchInterception(watch := Watch())), Compilations() as found, no_misses():
        f(X)
    assert not found.kinds
    assert watch.launched == 0


def test_who_chooses_nothing_leaves_the_fast_path_to_jax():
    f = jax.jit(twice)
    with taken(Watch()) as watch:
        watch.on = False
        f(X)
        with no_misses():
            f(X)
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


def test_layouts_of_a_jit_are_kept():
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    turned = Format(Layout(major_to_minor=(1, 0)), where)
    x = jnp.arange(6.0).reshape(2, 3)
    f = jax.jit(lambda x: 2 * mark("a", x), in_shardings=turned, out_shardings=turned)
    with taken(Watch()) as watch:
        out = f(jax.device_put(x, turned))
        assert out.format.layout.major_to_minor == (1, 0)
        assert not watch.errors
        close(watch.sums(), ("a", 15))
    same(out, 2 * x)


def test_shardings_of_a_jit_are_kept():
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
            with Compilations() as found:
                f(X)
                jax.lax.scan(body, 0.0, X)
                jax.lax.cond(True, up, up, X)
        assert "compile" not in found.kinds


# ------------------------------------------------------------------- and so on


@jax.custom_batching.custom_vmap
def with_vmap(x: Any) -> Any:
    return 2 * mark("own", x)


@with_vmap.def_vmap
def _(size: int, batched: Any, x: Any) -> Any:
    return 2 * mark("rule", x), True


def with_a_ref(x: Any) -> Any:
    ref = jax.new_ref(x)

    def step(c: Any, _: Any) -> Any:
        ref[...] = ref[...] + mark("c", c)
        return c + 1, None

    jax.lax.scan(step, 0.0, None, length=3)
    return mark("ref", ref[...])


def of_arrays_around() -> Callable[[Any], Any]:
    around = jnp.arange(2000.0)
    return lambda x: mark("a", x * around)


@pytest.mark.parametrize(
    ("f", "x", "expected"),
    [
        (jax.jit(with_vmap), X, [("own", SUM)]),
        (jax.jit(jax.vmap(with_vmap)), X, [("rule", SUM)]),
        (jax.jit(with_a_ref), X, [("c", [0, 1, 2]), ("ref", SUM + 12)]),
        (jax.jit(of_arrays_around()), 2.0, [("a", 3998000)]),
        (jax.jit(lambda x: mark("a", x)), jnp.zeros((0, 3)), [("a", 0)]),
        (jax.jit(lambda x: mark("a", x)), jnp.arange(3), [("a", 3)]),
        (lambda x: jax.lax.map(lambda x: mark("a", x), x), X, [("a", [1, 2, 3, 4])]),
        (lambda x: jax.vjp(jax.jit(loss), x)[1](1.0), X, LOSS),
        (lambda x: jax.linearize(jax.jit(loss), x)[1](x), X, LOSS[:2]),
    ],
    ids=["custom_vmap", "its rule", "ref", "constants", "empty", "int", "map", "vjp", "linearize"],
)
def test_other_programs(f: Any, x: Any, expected: Any):
    close(run(f, x), *expected)


def test_a_variable_that_is_one_value_for_jax():
    with nnx.var_defaults(hijax=True):
        variable = nnx.Variable(X)
    f = jax.jit(lambda v, x: mark("a", v[...] * x))
    with taken(Watch()) as watch:
        same(f(variable, 2.0), 2 * X)
        assert not watch.errors
        close(watch.sums(), ("a", 2 * SUM))


# ---------------------------------------------------------- the parts of jax


def test_the_parts_of_jax_that_are_replaced_are_where_they_were():
    """Each message says what to look for in a version of jax in which it has moved."""
    call = "jax._src.pjit: `cache_miss` in `_cpp_pjit` finds a program and runs it"
    # these are the private parts that the package relies on
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


def test_a_program_that_ran_has_the_number_of_its_module():
    functions = jax.jit(lambda x: jnp.sin(x) + 1), jax.jit(lambda x: jnp.cos(x) + 1)
    with executables.record_executables():
        for function in functions:
            function(X)
    numbers = [one.number for one in list(executables.executables.values())[-2:]]
    assert all(isinstance(n, int) for n in numbers)
    assert numbers[0] != numbers[1]


def test_what_is_numbered_is_not_read_from_the_cache_on_disk():
    read = compiler._cache_read
    parameters = list(inspect.signature(read).parameters)
    assert parameters[:2] == ["module_name", "cache_key"], "what reads jax's cache on disk"
    with executables.without_disk_cache():
        assert compiler._cache_read("jit_f", "key", None, None, None) == (None, None)
    assert compiler._cache_read is read


def test_a_compiled_executable_has_the_name_of_its_function():
    def a_step(x: Any) -> Any:
        return x

    assert jit_calls.executable_name(jax.jit(a_step).lower(X).compile()) == "a_step"
