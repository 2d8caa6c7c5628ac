"""What was compiled, and why: known reasons, and nothing of ours in the log."""

import functools
import gc
import logging

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from inside import inside

import nnx_inspector as nni
from nnx_inspector.inspector.cost.compilations import OFTEN, RECENT, differences_in_words


@pytest.fixture(autouse=True)
def no_inspectors_of_other_tests():
    """Those that were dropped listen until they are collected."""
    gc.collect()


@pytest.fixture
def insp(inspect):
    return inspect(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3)))


def why(insp, function):
    return [one.why for one in insp.compilations if one.function == function]


def test_the_argument_that_differs_is_named(insp):
    @jax.jit
    def scaled(x, factor):
        return x * factor

    scaled(jnp.ones((2, 3)), 2.0)
    scaled(jnp.ones((5, 3)), 2.0)
    scaled(jnp.ones((5, 3), jnp.int32), 2.0)
    scaled(jnp.ones((5, 3), jnp.int32), 2.0)
    scaled(jnp.ones((5, 3)), factor=2.0)
    reasons = why(insp, "scaled")
    assert reasons[:2] == ["first call", "x is f32[5,3], before f32[2,3]"]
    assert reasons[2].startswith("x is i32[5,3], before f32[")  # either call is as similar
    assert "positional arguments" in reasons[3]
    assert len(reasons) == 4
    one = next(c for c in insp.compilations if c.function == "scaled")
    assert one.defined.rpartition(":")[0] == one.called.rpartition(":")[0] == __file__
    assert (one.step, one.inspector) == (None, False)
    assert 0 < one.seconds < 600


def test_a_static_value_and_a_structure(insp):
    @functools.partial(jax.jit, static_argnames="n")
    def times(x, n):
        return x * n

    times(jnp.ones(3), n=2)
    times(jnp.ones(3), n=3)
    first, then = why(insp, "times")
    assert first == "first call"
    assert then in ("n is 3, before 2", "a static value, or something else that jax does not name, "
                    "differs from all calls before")  # fmt: skip

    step = nnx.jit(lambda model: model.kernel.sum())
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    step(model)
    model.more = nnx.Param(jnp.ones(2))
    step(model)
    reasons = why(insp, "<lambda>")
    assert reasons[0] == "first call"
    assert "argument 0" in reasons[1]
    assert len(reasons[1]) < 600


def test_a_function_that_is_defined_in_the_loop(insp):
    kept = [jax.jit(lambda x: x + 1) for _ in range(3)]
    for one in kept:
        one(jnp.ones(3))
    assert [r.partition(":")[0] for r in why(insp, "<lambda>")] == [
        "first call",
        *["another function of this line was called before"] * 2,
    ]


def test_functions_that_are_called_on_one_line_are_not_one_function(insp):
    @jax.jit
    def inner(x):
        return x + 11

    @jax.jit
    def outer(x):
        return x * 13

    outer(inner(jnp.ones(3)))
    assert why(insp, "inner") == why(insp, "outer") == ["first call"]


def test_a_program_that_was_dropped_is_not_explained_by_its_arguments(insp):
    @jax.jit
    def halved(x):
        return x / 2

    halved(jnp.ones(3))
    jax.clear_caches()
    halved(jnp.ones(3))
    first, then = why(insp, "halved")
    assert first == "first call"
    assert then.startswith("it was compiled before: its program was dropped, or ")


def test_operations_and_the_inspectors_own_programs(insp):
    jnp.arange(1237) * 3
    insp.run(jnp.ones((7, 3)))
    found = insp.compilations
    assert any(one.why.startswith("an operation of jax") for one in found)
    assert any(one.inspector and one.why == "for the inspector" for one in found)
    assert len(found) == inside(insp).core.meter.compilations.count


def trained(insp, sizes, *, every=5):
    model = insp.model
    optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)

    for size in insp.watch(sizes, every=every):
        step(model, optimizer, jnp.ones((size, 3)))
    return [one for one in insp.findings if one.rule == "recompilation"]


def test_recompiling_in_every_step_is_a_finding(insp):
    (found,) = trained(insp, range(2, 2 + RECENT + 3))
    these = [one for one in insp.compilations if one.function == "step" and not one.inspector]
    recent = [one for one in these if one.step >= 3]
    assert found.evidence["steps"] == len({one.step for one in recent}) >= OFTEN
    assert found.evidence["seconds"] == pytest.approx(sum(one.seconds for one in recent))
    assert f"x is f32[{RECENT + 4},3], before f32[" in found.what
    assert found.step == 3
    assert found.what.startswith(f"In {RECENT} of the {RECENT} steps up to step 14, 'step' was ")


@pytest.mark.parametrize("sizes", [[8] * 30, [8, 8, 8, 5] * 6, [*range(2, 10), *[8] * 12]])
def test_no_finding_where_few_steps_are_compiled(insp, sizes):
    assert trained(insp, sizes) == []


def test_nothing_of_ours_reaches_the_users_log(caplog):
    caplog.set_level(logging.WARNING)
    assert not jax.config.jax_explain_cache_misses
    one, two = (nni.Inspector(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3)), display=False)
                for _ in range(2))  # fmt: skip
    jax.jit(lambda x: x + 2)(jnp.ones(3))
    one.close()
    jax.jit(lambda x: x + 3)(jnp.ones(3))
    assert [c.why for c in two.compilations if c.function == "<lambda>"][-1] == "first call"
    two.close()
    assert [r for r in caplog.records if "CACHE MISS" in r.getMessage()] == []
    assert not jax.config.jax_explain_cache_misses
    assert logging.getLogger("jax._src.interpreters.partial_eval").filters == []


def test_a_user_who_reads_these_messages_still_gets_them(caplog):
    caplog.set_level(logging.WARNING)
    jax.config.update("jax_explain_cache_misses", True)
    try:
        insp = nni.Inspector(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3)), display=False)
        jax.jit(lambda x: x + 4)(jnp.ones(3))
        insp.close()
        assert jax.config.jax_explain_cache_misses
    finally:
        jax.config.update("jax_explain_cache_misses", False)
    assert any("TRACING CACHE MISS" in r.getMessage() for r in caplog.records)


def test_an_inspector_that_is_dropped_listens_no_more():
    insp = nni.Inspector(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3)), display=False)
    compilations = inside(insp).core.meter.compilations
    del insp
    gc.collect()
    before = compilations.count
    jax.jit(lambda x: x + 5)(jnp.ones(3))
    assert compilations.count == before


TYPES = "x is f32[5,3], before f32[2,3]"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["at x, now f32[5,3] and before f32[2,3]"], TYPES),
        (["at input path [0][2], now 3 and before 4, so no"], "argument 2 (from 0) is 3, before 4"),
        (
            [
                "at input path [0][1], now <class 'dict'> with 2 children and before "
                "<class 'dict'> with 1 child, so number of children differs"
            ],
            "argument 1 (from 0) is a dict of 2, before a dict of 1",
        ),
        (["strange\n  words"], "strange words"),
        (["at x, now f32[5,3] and before f32[2,3]"] * 5, f"{TYPES}; {TYPES}; {TYPES}; 2 more"),
    ],
)
def test_differences_in_words(changes, said):
    assert differences_in_words(changes) == said


def test_a_long_structure_is_cut_to_where_it_differs():
    form = "GraphDef(" + "Linear " * 50 + "features={} " + "Dropout " * 40
    now, before = form.format(3), form.format(4)
    said = differences_in_words([f"at input path [0][0]._graphdef, now {now} and before {before}"])
    assert said.startswith("argument 0 (from 0) is \N{HORIZONTAL ELLIPSIS}features=3 Dropout")
    assert "before \N{HORIZONTAL ELLIPSIS}features=4" in said
