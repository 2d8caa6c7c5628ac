"""`Scope` distinguishes the model's modules, views of them, and other modules."""

from __future__ import annotations

import warnings

import jax
import models
import numpy as np
import pytest
from flax import nnx
from interceptors import sites_seen, warns_of_doubtful_calls
from leftovers import nothing_is_left_behind  # noqa: F401
from models import batch, rngs

from nnx_inspector.hooks.scope import Scope, scope_of
from nnx_inspector.live.session import Session
from nnx_inspector.records.capture import capture, value_and_grad

CNN_SITES = ["", "conv", "norm", "dropout", "head"]


def cnn():
    return models.CNN(rngs()), batch(4, 3, 3, 1)


def test_a_view_made_before_the_hooks_is_the_model_in_another_mode():
    model, x = cnn()
    view = nnx.view(model, deterministic=True, use_running_average=True)
    assert sites_seen(model, lambda: view(x)) == CNN_SITES
    assert sites_seen(model, lambda: nnx.jit(lambda m, x: m(x))(view, x)) == CNN_SITES
    assert sites_seen(model, lambda: view.norm(np.ones((4, 3, 3, 2)))) == ["norm"]


def test_a_view_made_inside_the_hooks_and_inside_a_loss_is_attributed():
    model, x = cnn()

    def loss_fn(model, x):
        return nnx.view(model, deterministic=True, use_running_average=True)(x).sum()

    assert sites_seen(model, lambda: loss_fn(model, x)) == CNN_SITES
    assert sites_seen(model, lambda: nnx.jit(nnx.grad(loss_fn))(model, x)) == CNN_SITES
    (_, record), _ = value_and_grad(loss_fn)(model, x)
    assert set(record) == set(CNN_SITES)
    assert record.unseen == {}
    session = Session(model, parameters=False)
    with session.open():
        nnx.jit(nnx.grad(loss_fn))(model, x)
    assert set(session.take()) == set(CNN_SITES)


def test_a_view_of_a_stack_inside_its_scan_is_attributed():
    case = models.ZOO["scan"]()
    _, record = capture(lambda m, x: nnx.view(m, raise_if_not_found=False)(x))(
        case.model, *case.args
    )
    _, plain = capture(case.model)(*case.args)
    assert set(record) == set(plain)


def test_a_clone_with_its_own_variables_is_no_view():
    model, x = cnn()
    with warns_of_doubtful_calls("1 of CNN"):
        assert sites_seen(model, lambda: nnx.clone(model)(x)) == []
    twin = nnx.clone(model)
    assert sites_seen(model, lambda: twin(x)) == []


def test_a_module_that_shares_some_variables_is_no_view():
    model, x = models.MLP(rngs()), batch(4, 3)
    other = models.MLP(rngs(1))
    other.up = model.up
    assert sites_seen(model, lambda: other(x)) == ["up"]
    other.up = models.MLP(rngs(2)).up
    other.up.kernel = model.up.kernel
    assert sites_seen(model, lambda: other(x)) == []


def test_a_module_that_is_changed_to_share_no_more_is_no_view():
    model, x = models.MLP(rngs()), batch(4, 3)
    view = nnx.view(model, raise_if_not_found=False)
    view.up = models.MLP(rngs(1)).up
    assert sites_seen(model, lambda: view(x)) == ["down"]


def test_a_view_without_variables_cannot_be_told_and_is_not_guessed():
    model = nnx.Sequential(nnx.Dropout(0.5), nnx.Linear(3, 3, rngs=rngs()))
    scope = scope_of(model)
    view = nnx.view(model, deterministic=True)
    assert scope.path_of(view.layers[0]) is None
    assert scope_of(model).path_of(view) == ()


def test_what_was_adopted_with_a_view_is_known_without_variables_of_its_own():
    model = nnx.Sequential(nnx.Dropout(0.5), nnx.Linear(3, 3, rngs=rngs()))
    view, scope = nnx.view(model, deterministic=True), scope_of(model)
    assert scope.path_of(view) == ()
    assert scope.path_of(view.layers[0]) == ("layers", 0)


def test_an_eager_merge_of_the_models_own_state_is_the_model():
    model, x = models.MLP(rngs()), batch(4, 3)
    graphdef, state = nnx.split(model)
    assert sites_seen(model, lambda: nnx.merge(graphdef, state)(x)) == ["", "up", "down"]
    changed = jax.tree.map(lambda p: p + 1, state)
    with warns_of_doubtful_calls():
        assert sites_seen(model, lambda: nnx.merge(graphdef, changed)(x)) == []


def test_several_roots_have_their_prefixes_and_their_views():
    a, b = models.MLP(rngs()), models.MLP(rngs(1))
    scope = Scope({("a",): a, ("b",): b}, "token")
    assert scope.path_of(b.up) == ("b", "up")
    assert scope.path_of(nnx.view(b, raise_if_not_found=False).down) == ("b", "down")
    assert scope.path_of(models.MLP(rngs(2))) is None


@pytest.mark.parametrize("mode", ["graph", "tree"])
def test_views_travel_through_jit_in_both_modes(mode):
    model, x = cnn()
    view = nnx.view(model, deterministic=True, use_running_average=True)
    run = nnx.jit(lambda m, x: m(x), graph=mode == "graph")
    plain = run(view, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sites_seen(model, lambda: run(view, x)) == CNN_SITES
    np.testing.assert_array_equal(run(view, x), plain)
