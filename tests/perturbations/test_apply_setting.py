"""The effect of a setting in owned passes, against `nni.perturbed` and models by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from models import batch, rngs

import nnx_inspector as nni
from nnx_inspector._compat import jit
from nnx_inspector.hooks.sites import Selection
from nnx_inspector.inspector.passes.call import Call
from nnx_inspector.inspector.passes.owned_passes import OwnedPasses
from nnx_inspector.perturbations.apply_setting import PerturbableSites, parameter_keys
from nnx_inspector.perturbations.base import Kind, PartBase
from nnx_inspector.perturbations.perturbed import chosen_layer, perturbed
from nnx_inspector.perturbations.places import Setting, place_of

X = batch(4, 3)
UNITS = jnp.array([1.0, 0.0, 0.5, 1.0])
IN = jnp.array([1.0, 0.0, 0.5])

KINDS = {
    "zero": nni.Zero(),
    "scale": nni.Scale(0.5),
    "zero input": nni.Zero(at="input"),
    "scale input": nni.Scale(2.0, at="input"),
    "shift": nni.Shift(UNITS, 2.0),
    "shift input": nni.Shift(IN, 2.0, at="input"),
    "noise": nni.Noise(0.1, seed=3),
    "clamp": nni.Clamp(-0.1, 0.2),
    "mask": nni.Mask(UNITS),
    "boolean mask": nni.Mask(UNITS > 0),
    "mean": nni.Mean(),
    "patch": nni.Patch(UNITS),
    "cast": nni.Cast(jnp.bfloat16),
    "apply": nni.Apply(jnp.multiply, (UNITS,)),
    "scale gradient": nni.ScaleGradient(0.5),
    "reverse gradient": nni.ReverseGradient(2.0),
    "stop gradient": nni.StopGradient(),
    "clip gradient": nni.ClipGradient(0.1),
    "parameter noise": nni.ParameterNoise(0.1),
    "prune mask": nni.PruneMask(UNITS > 0),
}


def setting_of(*pairs, on=True):
    """A setting with one place for each (perturbation, sites, rows)."""
    places = tuple(place_of(*pair) for pair in pairs)
    data = zip(places, pairs, strict=True)
    return Setting({}, places, tuple(place.data(one, on=on) for place, (one, *_) in data))


def passes(keys=()):
    return OwnedPasses(tuple(keys), Selection(None))


def loss_fn(model, x):
    return (model(x) ** 2).sum()


QUICK = ("scale input", "noise", "boolean mask", "apply", "stop gradient", "prune mask")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in KINDS]
)
def test_values_and_gradients_are_those_of_perturbed(name):
    one, model, owned = KINDS[name], models.MLP(rngs()), passes()
    before = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]
    on, off = setting_of((one, ["up"])), setting_of((one, ["up"]), on=False)
    call = Call(model, (X,), {})
    np.testing.assert_allclose(
        owned.run(call, on).value, perturbed(model)({"up": one}, X), rtol=1e-5, atol=1e-6
    )
    plain, events = model(X), []
    undo = jit.compilation_events(lambda *event: events.append(event))
    found = owned.run(call, off).value
    undo()
    assert events == [], "switched off it is the same program"
    np.testing.assert_allclose(found, plain, rtol=1e-6, atol=1e-6)
    step = Call(model, (X,), {}, loss_fn)
    for setting, rules in ((on, {"up": one}), (off, {})):
        wanted = perturbed(loss_fn)(rules, model, X)
        np.testing.assert_allclose(owned.run(step, setting).value, wanted, rtol=1e-5)
    # what is kept: only memory shows it otherwise
    assert sum(len(form.programs) for form in owned._cache.by_structure.values()) == 2
    after = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_neutral_perturbation_leaves_the_output_as_it_is():
    model, owned = models.MLP(rngs()), passes(["down"])
    for one in (
        nni.Scale(1.0),
        nni.Shift(0.0),
        nni.Mask(jnp.ones(4)),
        nni.Noise(0.0),
        nni.Clamp(-1e9, 1e9),
    ):
        setting = dataclasses.replace(setting_of((one, ["up"])), rows={"down": (2.0, 1.0)})
        found = owned.run(Call(model, (X,), {}), setting).value
        np.testing.assert_allclose(found, model(X), rtol=1e-6, atol=1e-6)


class Two(nnx.Module):
    """Two sites in sequence, with a gradient known by hand."""

    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.second = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize(
    ("one", "change"),
    [
        (nni.ScaleGradient(0.5), lambda ct: 0.5 * ct),
        (nni.ReverseGradient(2.0), lambda ct: -2.0 * ct),
        (nni.StopGradient(), lambda ct: 0.0 * ct),
        (nni.ClipGradient(0.1), lambda ct: ct * 0.1 / np.linalg.norm(ct)),
        (nni.Mask(UNITS), lambda ct: ct),
    ],
)
def test_the_gradient_that_is_recorded_in_front_is_changed(one, change):
    model, owned = Two(rngs()), passes()
    result = owned.run(Call(model, (X,), {}, loss_fn), setting_of((one, ["second"])))
    y = np.asarray(perturbed(model)({"second": one}, X), np.float64)
    inner = change(2 * y) if not isinstance(one, nni.Mask) else 2 * y * np.asarray(UNITS)
    wanted = inner @ np.asarray(model.second.kernel[...], np.float64).T
    found = result.record["first"].gradient
    np.testing.assert_allclose(found.norm, np.linalg.norm(wanted), rtol=1e-4, atol=1e-6)


def test_on_one_site_rows_act_first_then_places_in_their_order():
    model, owned = models.MLP(rngs()), passes(["up"])
    y = np.asarray(model.up(X))

    def out(*pairs, rows=None):
        setting = setting_of(*pairs)
        setting = dataclasses.replace(setting, rows=rows or {})
        return np.asarray(owned.run(Call(model, (X,), {}), setting).record["up"].output.mean)

    scale, shift = (nni.Scale(3.0), ["up"]), (nni.Shift(1.0), ["up"])
    np.testing.assert_allclose(out(scale, shift), (3 * y + 1).mean(), rtol=1e-5)
    np.testing.assert_allclose(out(shift, scale), (3 * (y + 1)).mean(), rtol=1e-5)
    np.testing.assert_allclose(out(shift, rows={"up": (2.0, 3.0)}), (3 * y + 1).mean(), rtol=1e-5)


@pytest.mark.parametrize("layer", [0, 2, -1])
@pytest.mark.parametrize("one", [nni.Zero(), nni.Mask(UNITS), nni.Noise(0.5), nni.PruneMask(UNITS)])
def test_one_layer_of_a_stack(layer, one):
    model, owned, x = models.ScannedLinears(rngs()), passes(), batch(2, 4)
    setting = setting_of((one, ["layers"], (layer,)))
    found = owned.run(Call(model, (x,), {}), setting).value
    np.testing.assert_allclose(
        found, perturbed(model)({f"layers[{layer}]": one}, x), rtol=1e-5, atol=1e-6
    )
    assert not np.allclose(found, model(x))


def test_each_example_of_a_vmap_is_perturbed_on_its_own():
    class Mapped(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(3, 4, rngs=rngs)

        def __call__(self, x):
            return jax.vmap(self.inner)(x)

    model, x = Mapped(rngs()), batch(5, 2, 3)
    for one in (
        nni.Mean(),
        nni.Mask(UNITS),
        nni.Noise(0.3),
        nni.Mask(jnp.array([1.0, 0.0]), axis=0),
    ):
        found = passes().run(Call(model, (x,), {}), setting_of((one, ["inner"]))).value
        wanted = perturbed(model)({"inner": one}, x)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_inputs_are_measured_only_where_a_place_acts_on_them():
    model, owned = models.MLP(rngs()), passes()
    setting = setting_of((nni.Zero(at="input"), ["up"]))
    record = owned.run(Call(model, (X,), {}), setting).record
    assert record["up"].input.zeros == X.size
    assert record["down"].input is None


# -------------------------------------------------------------------- checks


def reach(model, *args, loss_fn=None):
    return passes().read(Call(model, args, {}, loss_fn), PerturbableSites)


@pytest.mark.parametrize(
    ("one", "sites", "rows", "error", "text"),
    [
        (nni.Mask(UNITS), ["down"], (), ValueError, "down"),
        (nni.Shift(np.ones(7)), ["up"], (), ValueError, r"'up', float32\[4,4\]"),
        (nni.Zero(), ["up"], (0,), ValueError, "is not a stacked module"),
        (nni.Zero(), ["nowhere"], (), ValueError, "the call does not reach it"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(one, sites, rows, error, text):
    with pytest.raises(error, match=text):
        reach(models.MLP(rngs()), X).check(one, sites, rows)


def test_a_layer_that_is_not_there_names_how_many_there_are():
    reached = reach(models.ScannedLinears(rngs()), batch(2, 4))
    with pytest.raises(ValueError, match=r"'layers' has 3 layers; there is no layer 3"):
        reached.check(nni.Zero(), ["layers"], (3,))
    with pytest.raises(ValueError, match="within 1 scans"):
        reached.check(nni.Zero(), ["layers"], (0, 0))
    reached.check(nni.Zero(), ["layers"], (-3,))


def test_parameters_are_checked_from_shapes_alone():
    reached = reach(models.MLP(rngs()), X)
    reached.check_parameters(nni.PruneMask(UNITS), ["up"], ())
    with pytest.raises(ValueError, match="matches no site"):
        reached.check_parameters(nni.PruneMask(UNITS), ["nowhere"], ())
    with pytest.raises(ValueError, match=r"PruneMask at 'up/\w+', float32"):
        reached.check_parameters(nni.PruneMask(np.ones(7)), ["up"], ())


def test_a_mismatch_with_what_is_run_is_told_by_site():
    model = models.MLP(rngs())
    with pytest.raises(ValueError, match=r"Patch at 'up', float32\[2,4\]"):
        passes().run(Call(model, (X[:2],), {}), setting_of((nni.Patch(jnp.ones((4, 4))), ["up"])))


def test_selections_with_layers():
    assert chosen_layer("layers[3]") == ("layers", (3,))
    assert chosen_layer("layers[-1]/attn") == ("layers/attn", (-1,))
    assert chosen_layer(nnx.Linear) == (nnx.Linear, ())
    assert chosen_layer(["a[1]", "b[1]"]) == (["a", "b"], (1,))
    assert chosen_layer(None) == (None, ())
    with pytest.raises(ValueError, match="different layers"):
        chosen_layer(["a[1]", "b"])
    assert parameter_keys(models.MLP(rngs()), ["**/kernel", nnx.Linear]) == [
        "**/kernel",
        "up",
        "down",
    ]


def test_every_kind_is_tested():
    def below(cls):
        return {cls, *(c for sub in cls.__subclasses__() for c in below(sub))}

    kinds = {
        cls
        for cls in below(Kind)
        if cls.__module__.startswith("nnx_inspector.")
        and not cls.__subclasses__()
        and not cls.__name__.startswith("_")
        and not issubclass(cls, PartBase)  # a kind, kept to a part: see test_only.py
    }
    assert kinds == {type(one) for one in KINDS.values()}
