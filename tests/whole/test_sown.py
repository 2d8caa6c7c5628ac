"""The user's own `sow` and `perturb` are separate sites, and the hooks do not change them."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from interceptors import CallLog
from leftovers import nothing_is_left_behind  # noqa: F401
from models import batch, rngs

from nnx_inspector.hooks.dispatch import add_hooks
from nnx_inspector.hooks.hook import TAP_OUTPUT, Hook
from nnx_inspector.hooks.intercept import intercept_methods
from nnx_inspector.hooks.scope import scope_of
from nnx_inspector.live.session import Session
from nnx_inspector.perturbations.activations import Zero
from nnx_inspector.perturbations.perturb import perturb
from nnx_inspector.program.analysis.trace import trace
from nnx_inspector.records.capture import capture, value_and_grad

pytestmark = pytest.mark.filterwarnings(r"ignore:\s*Using 'Module:DeprecationWarning")


class Deep(nnx.Module):
    """A module that sows and perturbs below the root, twice, and once under a child's name."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([models.Sows(rngs), models.Perturbs(rngs)])
        self.child = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        for _ in range(2):
            self.sow(nnx.Intermediate, "seen", {"x": x})
        return self.child(x)


class SowsText(nnx.Module):
    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", (x, "text"))
        return 2 * x


def test_a_sown_value_is_a_site_under_the_path_of_its_variable():
    model, x = Deep(rngs()), batch(4, 3)
    _, record = capture(model)(x)
    linear = model.blocks[0].linear
    hidden = linear(x)
    one = record["blocks/0/features"].output
    np.testing.assert_allclose(one.mean, np.mean(hidden), rtol=1e-5)
    np.testing.assert_allclose(one.max, np.max(hidden), rtol=1e-6)
    assert len(record["seen"].calls) == 2
    assert record["seen"].output["x"].size == 2 * 12


def test_a_sown_text_stays_what_it_is():
    plain, model, x = SowsText(), SowsText(), batch(4, 3)
    plain(x)
    _, record = capture(model)(x)
    assert record["seen"].output[0].size == 12
    assert record["seen"].output[1] is None
    for other in (plain, model):
        ((value, text),) = other.seen.get_value()
        assert text == "text"
        np.testing.assert_array_equal(value, x)
    _, record = capture(model)(x)  # the text is also part of the state that goes in
    assert len(model.seen.get_value()) == 2


def test_the_gradient_of_a_perturbed_value_is_that_of_nnx():
    model, x = models.Perturbs(rngs()), batch(4, 3)

    def loss_fn(model, x):
        return (model(x) ** 2).sum()

    (_, record), _ = value_and_grad(loss_fn)(model, x)
    _, perturbations = nnx.capture(models.Perturbs(rngs()), nnx.Perturbation)(x)
    other = models.Perturbs(rngs())

    def loss_of(model, perturbations):
        y, _ = nnx.capture(model, nnx.Intermediate, init=perturbations)(x)
        return (y**2).sum()

    grads = nnx.grad(loss_of, argnums=1)(other, perturbations)
    expected = np.asarray(jax.tree.leaves(grads)[0])
    gradient = record["hidden"].gradient
    np.testing.assert_allclose(gradient.mean, expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(gradient.norm, np.linalg.norm(expected), rtol=1e-5)
    np.testing.assert_allclose(gradient.min, expected.min(), rtol=1e-6)


def test_inside_nnx_capture_the_sites_are_the_same_and_what_is_sown_is_as_without_us():
    x = batch(4, 3)
    plain, sown = nnx.capture(Deep(rngs()), nnx.Intermediate)(x)

    def forward(model, x):
        return nnx.capture(model, nnx.Intermediate)(x)

    model = Deep(rngs())
    (y, under_us), record = capture(forward)(model, x)
    np.testing.assert_array_equal(y, plain)
    for a, b in zip(jax.tree.leaves(sown), jax.tree.leaves(under_us), strict=True):
        np.testing.assert_array_equal(a, b)
    assert {"blocks/0/features", "blocks/1/hidden", "seen"} <= set(record)


def test_the_four_steps_of_nnx_give_what_they_give_without_us():
    x = batch(4, 3)

    def four_steps(model):
        forward = nnx.capture(model, nnx.Perturbation)
        _, perturbations = forward(x)

        def loss(model, perturbations, x):
            y, sown = nnx.capture(model, nnx.Intermediate, init=perturbations)(x)
            return (y**2).sum(), sown

        grads, sown = nnx.grad(loss, argnums=(0, 1), has_aux=True)(model, perturbations, x)
        return jax.tree.leaves((grads, sown))

    plain = four_steps(models.Perturbs(rngs()))
    log = CallLog()
    with intercept_methods(log), perturb("**", Zero(), model=models.MLP(rngs())):
        hooked_ones = four_steps(models.Perturbs(rngs()))
    for a, b in zip(plain, hooked_ones, strict=True):
        np.testing.assert_array_equal(a, b)
    assert log.sites.count("linear") == 2


def test_methods_that_nnx_capture_sows_are_no_sites_besides():
    model, x = models.MLP(rngs()), batch(4, 3)

    def forward(model, x):
        return nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(x)

    _, record = capture(forward)(model, x)
    assert set(record) == {"", "up", "down"}


def test_a_name_that_a_module_has_is_told_apart():
    class Same(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            y = self.linear(x)
            self.sow(nnx.Intermediate, "linear", -y)
            return y

    def forward(model, x):
        return nnx.capture(model, nnx.Intermediate)(x)

    model = Same(rngs())
    _, record = capture(forward)(model, batch(4, 3))
    assert set(record) == {"", "linear", "linear:sow"}
    np.testing.assert_allclose(
        record["linear:sow"].output.mean, -record["linear"].output.mean, rtol=1e-6
    )


@pytest.mark.parametrize("only", ["blocks/*/*", nnx.Intermediate, ["**/features", nnx.Linear]])
def test_sown_values_can_be_selected_by_path_and_by_type(only):
    _, record = capture(Deep(rngs()), only=only)(batch(4, 3))
    assert "blocks/0/features" in record
    assert "" not in record


def test_a_selection_that_no_call_reveals_is_an_error():
    for only in ("blocks/0/feature", nnx.Cache):
        with pytest.raises(ValueError, match="matches no site of this model"):
            capture(Deep(rngs()), only=only)(batch(4, 3))


def test_no_predicate_is_asked_about_a_sown_value():
    asked = []

    def has_kernel(path, module):
        asked.append(module)
        return hasattr(module, "kernel")

    _, record = capture(Deep(rngs()), only=has_kernel)(batch(4, 3))
    assert all(isinstance(module, nnx.Module) for module in asked)
    assert set(record) == {"blocks/0/linear", "blocks/1/linear", "child"}


def test_the_trace_shows_them_with_the_type_of_the_variable():
    found = {call.site: call for call in trace(Deep(rngs()), batch(4, 3)).calls}
    assert found["blocks/0/features"].type == "Intermediate"
    assert found["blocks/0/features"].output == "float32[4,3]"
    assert found["blocks/1/hidden"].type == "Perturbation"
    assert found["blocks/1/hidden"].parent is not None


def test_interceptors_do_not_see_them_and_other_layers_do():
    model, log, seen = Deep(rngs()), CallLog(), []

    def note(next_fun, args, kwargs, context):
        seen.append((context.site, context.kind))
        return next_fun(*args, **kwargs)

    layer = Hook(note, TAP_OUTPUT, None, scope_of(model))
    with add_hooks(layer), intercept_methods(log, model=model):
        model(batch(4, 3))
    assert "blocks/0/features" not in log.sites
    assert ("blocks/0/features", "sow") in seen
    assert ("blocks/1/hidden", "perturb") in seen


def test_a_watched_step_sees_them():
    model, x = Deep(rngs()), batch(4, 3)

    @nnx.jit
    def step(model, x):
        return nnx.grad(lambda model, x: (model(x) ** 2).sum(), argnums=1)(model, x)

    session = Session(model)
    with session.open():
        step(model, x)
    taken = session.take()
    assert session.errors == []
    assert taken["blocks/0/features"]["output"].size == 12
    assert taken["blocks/1/hidden"]["gradient"].size == 12


def test_a_site_that_only_a_call_reveals_can_be_perturbed_in_a_watched_step():
    from nnx_inspector.perturbations.activations import Scale
    from nnx_inspector.perturbations.places import row_of

    model, x = models.Perturbs(rngs()), batch(4, 3)
    step = nnx.jit(lambda m, x: m(x))
    session = Session(model)
    session.extra_sites = ("hidden",)
    session.refresh()
    session.perturb({"hidden": row_of(Scale(0.0))})
    with session.open():
        np.testing.assert_array_equal(step(model, x), jnp.zeros((4, 3)))


@pytest.mark.parametrize("relative", [True, False])
def test_what_perturb_returns_can_be_perturbed(relative):
    model, x = Deep(rngs()), batch(4, 3)
    with perturb("blocks/*/hidden", Zero(), model=model if relative else None):
        y = model(x)
    np.testing.assert_allclose(y, jnp.broadcast_to(model.child.bias, (4, 3)))
    with (
        pytest.raises(ValueError, match="'hiden' matches no site"),
        perturb("hiden", Zero(), model=model if relative else None),
    ):
        model(x)


@pytest.mark.parametrize("name", ["sows", "perturbs"])
def test_what_the_model_stores_is_what_it_stores_without_us(name):
    plain, other = models.ZOO[name](), models.ZOO[name]()
    plain.run()
    with intercept_methods(CallLog()):
        other.run()
    assert nnx.graphdef(plain.model) == nnx.graphdef(other.model)
    for a, b in zip(
        jax.tree.leaves(nnx.state(plain.model)),
        jax.tree.leaves(nnx.state(other.model)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_the_warning_of_flax_still_comes():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with intercept_methods(CallLog()):
            models.ZOO["sows"]().run()
    assert [w for w in caught if issubclass(w.category, DeprecationWarning)]
