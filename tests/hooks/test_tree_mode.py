"""Modules that travel as plain pytrees: tree mode (`graph=False`) and `jax` transforms of modules.

They carry in treedefs what NNX's graph mode carries in graphdefs. Attribution must hold in both,
and code that handles trees of a hooked model must work as without hooks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from interceptors import CallLog, sites_seen, warns_of_doubtful_calls
from leftovers import arrays_of, nothing_is_left_behind  # noqa: F401
from models import batch, rngs

from nnx_inspector.hooks.intercept import intercept_methods
from nnx_inspector.records.capture import capture, value_and_grad

SITES = ["", "up", "down"]


def loss_of(model, x):
    return (model(x) ** 2).sum()


TRANSFORMS = {
    "nnx.jit": lambda: nnx.jit(lambda m, x: m(x), graph=False),
    "jax.jit": lambda: jax.jit(lambda m, x: m(x)),
    "nnx.grad": lambda: nnx.grad(loss_of, graph=False),
    "jax.grad": lambda: jax.grad(loss_of, allow_int=True),
    "nnx.value_and_grad": lambda: nnx.value_and_grad(loss_of, graph=False),
    "jax.vjp": lambda: lambda m, x: jax.vjp(loss_of, m, x)[0],
    "jax.jvp": lambda: lambda m, x: jax.jvp(lambda x: m(x), (x,), (x,)),
    "nnx.vmap": lambda: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0), graph=False),
    "jax.vmap": lambda: jax.vmap(lambda m, x: m(x), in_axes=(None, 0)),
    "nnx.remat": lambda: nnx.remat(lambda m, x: m(x), graph=False),
    "jax.checkpoint": lambda: jax.checkpoint(lambda m, x: m(x)),
    "jax.eval_shape": lambda: lambda m, x: jax.eval_shape(lambda m, x: m(x), m, x),
    "jit of grad": lambda: jax.jit(jax.value_and_grad(loss_of, allow_int=True)),
    "jit in jit": lambda: nnx.jit(
        lambda m, x: nnx.jit(lambda m, x: m(x), graph=False)(m, x), graph=False
    ),
}


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_calls_are_attributed(name, when):
    model, x = models.MLP(rngs()), batch(4, 3)
    f = TRANSFORMS[name]()
    if when == "before":
        f(model, x)
    assert sites_seen(model, lambda: f(model, x)) == SITES


@pytest.mark.parametrize("name", ["nnx.jit", "jax.jit", "jit of grad", "jax.vmap", "jit in jit"])
def test_results_under_hooks_are_those_without(name):
    model, x = models.MLP(rngs()), batch(4, 3)
    f = TRANSFORMS[name]()
    plain = jax.tree.leaves(f(model, x))
    log = CallLog()
    with intercept_methods(log, model=model):
        hooked = jax.tree.leaves(f(model, x))
    for a, b in zip(plain, hooked, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_twin_is_never_taken_for_the_model_in_either_order():
    model, twin, x = models.MLP(rngs()), models.MLP(rngs(1)), batch(4, 3)
    for first, second in ((model, twin), (twin, model)):
        f = jax.jit(lambda m, x: m(x))
        log = CallLog()
        with intercept_methods(log, model=model):
            f(first, x)
            f(second, x)
        assert log.sites == SITES


def test_teacher_and_student_in_one_jit_are_told_apart():
    student, teacher, x = models.MLP(rngs()), models.MLP(rngs(1)), batch(4, 3)
    assert (
        sites_seen(student, lambda: jax.jit(lambda s, t: (t(x), s(x)))(student, teacher)) == SITES
    )
    assert (
        sites_seen(teacher, lambda: jax.jit(lambda s, t: (t(x), s(x)))(student, teacher)) == SITES
    )


def test_two_layers_of_one_model_never_share_a_program():
    model, x = models.Nested(rngs()), batch(4, 3)
    f = jax.jit(lambda block, x: block(x))
    log = CallLog()
    with intercept_methods(log, model=model):
        f(model.blocks[0], x)
        f(model.blocks[1], x)
    assert log.sites == ["blocks/0", "blocks/0/linear", "blocks/1", "blocks/1/linear"]


def test_a_scan_whose_carry_is_an_updated_module_runs():
    model, x = models.MLP(rngs()), batch(4, 3)

    def step(model, _):
        return jax.tree.map(lambda p: p * 0.9, model), model(x).sum()

    plain = jax.lax.scan(step, model, None, length=3)[1]
    log = CallLog()
    with intercept_methods(log, model=model):
        hooked = jax.lax.scan(step, model, None, length=3)[1]
    np.testing.assert_allclose(plain, hooked, rtol=1e-6)
    assert log.sites[:3] == SITES


def test_branches_that_return_a_module_and_an_update_of_it_run():
    model, x = models.MLP(rngs()), batch(4, 3)

    def run(model):
        return jax.lax.cond(True, lambda m: m, lambda m: jax.tree.map(lambda p: p + 1, m), model)(x)

    plain = run(model)
    with warns_of_doubtful_calls(), intercept_methods(CallLog(), model=model):
        np.testing.assert_array_equal(run(model), plain)


def test_what_a_jitted_function_returns_is_another_model():
    model, x = models.MLP(rngs()), batch(4, 3)
    noisy = jax.jit(lambda m: jax.tree.map(lambda p: p + 1, m))
    same = jax.jit(lambda m: m)

    for f in (noisy, same):
        with warns_of_doubtful_calls():
            assert sites_seen(model, lambda f=f: f(model)(x)) == []


def test_trees_of_a_hooked_model_compare_and_map_as_without_hooks():
    model, x = models.MLP(rngs()), batch(4, 3)
    before = nnx.clone(model)
    stored = jax.tree.structure(model)
    with intercept_methods(CallLog(), model=model):
        during = nnx.clone(model)
        assert jax.tree.structure(model) == stored == jax.tree.structure(during)
        for other in (before, during):
            for pair in ((model, other), (other, model)):
                jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, *pair)
                stored.flatten_up_to(pair[0])
        jax.tree.transpose(jax.tree.structure((0, 0)), stored, (model, before))
    jax.tree.map(jnp.add, model, during)
    assert jax.tree.structure(during) == stored
    model(x)


def test_an_executable_compiled_before_still_takes_the_hooked_model():
    model, x = models.MLP(rngs()), batch(4, 3)
    compiled = jax.jit(lambda m, x: m(x)).lower(model, x).compile()
    plain = compiled(model, x)
    with pytest.warns(match="compiled ahead of time"), intercept_methods(CallLog(), model=model):
        np.testing.assert_array_equal(compiled(model, x), plain)


def test_a_treedef_taken_apart_inside_is_put_together_as_the_model_inside_jit():
    model, x = models.MLP(rngs()), batch(4, 3)

    def run():
        leaves, treedef = jax.tree.flatten(model)
        jax.jit(lambda leaves, x: jax.tree.unflatten(treedef, leaves)(x))(leaves, x)

    assert sites_seen(model, run) == SITES


def test_an_older_treedef_is_doubted():
    model, x = models.MLP(rngs()), batch(4, 3)
    leaves, treedef = jax.tree.flatten(model)
    with warns_of_doubtful_calls():
        run = jax.jit(lambda leaves, x: jax.tree.unflatten(treedef, leaves)(x))
        assert sites_seen(model, lambda: run(leaves, x)) == []


def test_capture_and_gradients_through_tree_mode_transforms():
    model, x = models.MLP(rngs()), batch(4, 3)

    def forward(model, x):
        return nnx.jit(lambda m, x: m(x), graph=False)(model, x)

    _, record = capture(forward)(model, x)
    _, plain = capture(lambda model, x: model(x))(model, x)
    assert set(record) == set(plain) == set(SITES)
    for site in plain:
        np.testing.assert_allclose(record[site].output.mean, plain[site].output.mean, rtol=1e-6)

    def loss_fn(model, x):
        return jax.jit(loss_of)(model, x)

    (_, record), grads = value_and_grad(loss_fn)(model, x)
    (_, plain), expected = value_and_grad(loss_of)(model, x)
    for site in plain:
        np.testing.assert_allclose(record[site].gradient.norm, plain[site].gradient.norm, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_statistics_and_random_streams_are_updated_in_tree_mode_as_without_hooks():
    case = models.ZOO["cnn"]()
    other = models.ZOO["cnn"]()
    f = nnx.jit(lambda m, x: m(x), graph=False)
    plain = [f(case.model, *case.args) for _ in range(2)]
    log = CallLog()
    with intercept_methods(log, model=other.model):
        hooked = [f(other.model, *other.args) for _ in range(2)]
    for a, b in zip(plain, hooked, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    for a, b in zip(arrays_of(case.model), arrays_of(other.model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert "norm" in log.sites
