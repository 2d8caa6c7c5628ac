"""A layer that is added, replaced or moved within a watched loop has its own figures at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside
from models import TwoLayers

import nnx_inspector as nni
from nnx_inspector.hooks.sites import site_key
from nnx_inspector.live.session import Session

pytestmark = pytest.mark.usefixtures("leaves_nothing")
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


def adapt(model):
    size = model.b.out_features
    model.b = nnx.LoRA(size, 2, size, base_module=model.b, rngs=nnx.Rngs(1))
    model.b.lora_b[...] = jnp.ones((2, size))


def replace(model):
    model.a = nnx.Linear(3, model.a.out_features, rngs=nnx.Rngs(7))


def lengthen(model):
    model.b = nnx.Sequential(model.b, nnx.relu, nnx.Linear(2, 2, rngs=nnx.Rngs(9)))


def swap(model):
    layers = model.b.layers
    model.b.layers = nnx.List([layers[2], layers[1], layers[0]])


def shorten(model):
    model.b = model.b.layers[0]


def shorten_adapted(model):
    model.b = model.b.base_module


CHANGES = {2: adapt, 3: replace, 5: lengthen, 6: swap, 8: shorten}
STEPS = 9


def square(width=2):
    """Layers between which the ones of `CHANGES` fit."""
    model = TwoLayers(nnx.Rngs(0))
    model.a = nnx.Linear(3, width, rngs=nnx.Rngs(3))
    model.b = nnx.Linear(width, width, rngs=nnx.Rngs(4))
    return model


def outputs(model, x):
    """Site -> output of a call, from the layers that the model has now, without our hooks."""
    found = {}

    def call(layer, x, *path):
        if isinstance(layer, nnx.Sequential):
            y = x
            for number, one in enumerate(layer.layers):
                named = isinstance(one, nnx.Module)
                y = call(one, y, *path, "layers", number) if named else one(y)
        elif isinstance(layer, nnx.LoRA):
            base = call(layer.base_module, x, *path, "base_module")
            y = base + x @ np.asarray(layer.lora_a) @ np.asarray(layer.lora_b)
        else:
            y = x @ np.asarray(layer.kernel) + np.asarray(layer.bias)
        found[site_key(path)] = np.asarray(y, np.float64)
        return y

    found[""] = call(model.b, np.tanh(call(model.a, np.asarray(x, np.float64), "a")), "b")
    return found


def iterated(model, every, step):
    insp = nni.Inspector(model, X, display=False)
    for number in insp.watch(range(STEPS), every=every):
        step(number)
    insp.close()
    return insp.recording


def ticked(model, every, step):
    insp = nni.Inspector(model, X, display=False)
    with insp.watch(every=every):
        for number in range(STEPS):
            insp.tick()
            step(number)
    insp.close()
    return insp.recording


def shown(model, every, step):
    insp = nni.Inspector(model, X, display=False)
    with insp.watch(every=every):
        for number in range(STEPS):
            step(number)
    insp.close()
    return insp.recording


def recorded(model, every, step):
    with nni.watch(model, every=every) as recording:
        for number in range(STEPS):
            step(number)
    return recording


@pytest.mark.parametrize("loop", [iterated, ticked, shown, recorded])
@pytest.mark.parametrize("every", [1, 3])
def test_each_measured_step_has_the_figures_of_the_layers_it_ran(loop, every):
    model, traced, expected = square(), [], {}

    @nnx.jit
    def loss_of(model, x):
        traced.append(len(expected))
        return nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)[0]

    def step(number):
        CHANGES.get(number, lambda _: None)(model)
        loss_of(model, X)
        expected[number] = outputs(model, X)

    recording = loop(model, every, step)
    passes = [one for one in recording.passes if one.kind == "watch"]
    assert [one.step for one in passes] == list(range(0, STEPS, every))
    for one in passes:
        assert {site for site, q in one.keys if not q.startswith("parameter")} == expected[
            one.step
        ].keys()
        for site, values in expected[one.step].items():
            found = one.summary(site)
            assert found.size == values.size
            np.testing.assert_allclose(found.norm, np.linalg.norm(values), rtol=1e-4)
            np.testing.assert_allclose(found.mean, values.mean(), rtol=1e-3, atol=1e-6)
    if every == 1 and loop in (shown, recorded):  # as the bare loop, which traces a new structure
        assert traced == [0, 2, 5, 6]
    elif every == 1:  # a new site needs a program with room for its perturbation
        assert traced == [0, 2, 3, 5, 6, 7, 8]


def test_a_setting_acts_on_the_layer_that_took_the_place_of_its_own():
    model = square()
    insp = nni.Inspector(model, X, display=False)
    insp.perturb("b", nni.Scale(0.0))
    run = nnx.jit(lambda model, x: model(x))
    for number in insp.watch(range(4), every=2):
        if number == 2:
            adapt(model)
        assert float(jnp.abs(run(model, X)).max()) == 0.0
    insp.close()
    inner = insp.recording.passes[-1].summary("b/base_module")
    assert inner.norm > 0.0


def test_the_tree_has_the_rows_of_the_new_layers_from_the_next_measured_step_on():
    model = square()
    insp = nni.Inspector(model, X, display=False)
    run, rows = nnx.jit(lambda model, x: model(x)), []
    for number in insp.watch(range(6), every=1):
        rows.append([site.key for site in insp.trace.modules])
        if number in (1, 4):
            (adapt if number == 1 else shorten_adapted)(model)
        run(model, X)
    before, adapted = ["", "a", "b"], ["", "a", "b", "b/base_module"]
    assert rows == [before, before, adapted, adapted, adapted, before]
    adapt(model)
    insp.run(X)
    assert [site.key for site in insp.trace.modules] == adapted
    insp.close()


def test_layers_through_which_the_example_cannot_be_run_are_told_and_the_loop_goes_on():
    model = square()
    insp = nni.Inspector(model, X, display=False)
    run = nnx.jit(lambda model, x: model(x))
    for number in insp.watch(range(3), every=1):
        if number == 1:
            model.a = nnx.Linear(4, 2, rngs=nnx.Rngs(7))
        run(model, X if number == 0 else jnp.ones((5, 4)))
    (text,) = [one for one in inside(insp).notices if "new layers" in one]
    assert text.startswith("The example cannot be run with the model's new layers")
    assert [one.step for one in insp.recording.passes if one.kind == "watch"] == [0, 1, 2]
    insp.close()


@pytest.mark.parametrize("jitted", [True, False])
def test_regions_outside_a_loop_follow_a_replaced_layer_too(jitted):
    model = square()
    run = nnx.jit(lambda model, x: model(x)) if jitted else lambda model, x: model(x)
    sites = []

    def note(next_fun, args, kwargs, context):
        sites.append(context.site)
        return next_fun(*args, **kwargs)

    with nni.intercept_methods(note, model=model), nni.perturb("b", nni.Scale(0.0), model=model):
        run(model, X)
        adapt(model)
        sites.clear()
        assert float(jnp.abs(run(model, X)).max()) == 0.0
    assert sites == ["", "a", "b", "b/base_module"]


def test_a_layer_that_is_called_by_itself_never_has_the_path_of_another():
    model = square()
    run = nnx.jit(lambda layer, x: layer(x))
    session = Session(model, parameters=False)
    with session.open():
        run(model.b, X[:, :2])
        assert set(session.take()) == {"b"}
        adapt(model)
        run(model.b, X[:, :2])
        assert "b" not in session.take()
        jax.block_until_ready(run(model.b, X[:, :2]))
        assert set(session.take()) == {"b", "b/base_module"}
    session.close()
