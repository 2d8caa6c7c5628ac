"""Owned passes: one program per structure and set of modes, and never another call's result."""

import gc
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compilations import Compilations
from flax import nnx
from inside import inside
from models import Table, TwoLayers

import nnx_inspector as nni
from nnx_inspector.hooks.sites import Selection
from nnx_inspector.inspector.nnx.switches import Switches
from nnx_inspector.inspector.passes import owned_passes
from nnx_inspector.inspector.passes.call import NO_SWITCHES, Call
from nnx_inspector.inspector.passes.owned_passes import OwnedPasses
from nnx_inspector.perturbations.places import CLEAN, Setting


class Told(nnx.Module):
    """Returns values that a pass might confuse: static arguments and Python values."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.scale = 1

    def __call__(self, x, by=1):
        return x * by, x.shape[0], type(by).__name__

    def set_view(self, scale: int | None = None):
        if scale is not None:
            self.scale = scale


class Scaled(Told):
    def __call__(self, x):
        return self.linear(x) * self.scale, type(self.scale).__name__


def passes(*keys):
    return OwnedPasses(keys, Selection(None))


def programs_of(owned):
    # what is kept: only memory shows it otherwise
    return [one for form in owned._cache.by_structure.values() for one in form.programs.values()]


def forward(owned, model, args, rows=None, switches=NO_SWITCHES):
    call = Call(model, args, {}, switches=switches)
    return owned.run(call, Setting(rows) if rows else CLEAN)


def backward(owned, loss_fn, model, args, switches=NO_SWITCHES):
    return owned.run(Call(model, args, {}, loss_fn, switches))


def switch(value):
    return Switches((((), (("scale", value),)),))


X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)


@pytest.mark.parametrize("values", [(1, 1.0, True), (0.0, -0.0, 0), (2, 2 + 0j)])
def test_equal_static_arguments_of_other_types_are_other_programs(values):
    owned, model = passes(""), Told(nnx.Rngs(0))
    numbers = jnp.arange(1, 4)
    for value in (*values, *values):
        y, _, name = forward(owned, model, (numbers, value)).value
        assert name == type(value).__name__
        assert y.dtype == (numbers * value).dtype
        np.testing.assert_array_equal(1 / y, 1 / (numbers * value))
    assert len(programs_of(owned)) == len(values)


def test_a_python_value_that_depends_on_the_shape_is_that_of_the_call():
    owned, model = passes(""), Told(nnx.Rngs(0))
    for rows in (6, 2, 6, 2):
        y, count, _ = forward(owned, model, (X[:rows],)).value
        assert (count, y.shape) == (rows, (rows, 3))


def test_a_python_value_that_depends_on_jaxs_settings_is_that_of_the_call():
    class Precise(nnx.Module):
        def __call__(self, x):
            return x, str(jax.config.jax_default_matmul_precision)

    owned, model = passes(""), Precise()
    for wanted in ("highest", "None", "highest"):
        with jax.default_matmul_precision(None if wanted == "None" else wanted):
            assert forward(owned, model, (X,)).value[1] == wanted


@pytest.mark.parametrize("values", [(2, 3), (1, True, 1.0)])
def test_switches_are_programs_of_their_own_and_kept(values):
    owned, model = passes(""), Scaled(nnx.Rngs(0))
    plain = np.asarray(model.linear(X))
    for value in (*values, *values):
        y, name = forward(owned, model, (X,), None, switch(value)).value
        np.testing.assert_allclose(y, plain * value, rtol=1e-6)
        assert name == type(value).__name__
    assert len(programs_of(owned)) == len(values)
    assert model.scale == 1
    np.testing.assert_allclose(forward(owned, model, (X,)).value[0], plain, rtol=1e-6)


def test_a_backward_pass_is_switched_too():
    owned, model = passes("", "linear"), Scaled(nnx.Rngs(0))

    def loss_fn(model, x):
        return model(x)[0].sum()

    result = backward(owned, loss_fn, model, (X,), switch(3.0))
    np.testing.assert_allclose(result.value, 3.0 * loss_fn(model, X), rtol=1e-5)
    gradient = result.record["linear"].gradient
    np.testing.assert_allclose(gradient.mean, 3.0, rtol=1e-6)


def test_switching_and_perturbing_go_together():
    owned, model = passes("linear"), Scaled(nnx.Rngs(0))
    plain = np.asarray(model.linear(X))
    row = {"linear": (1.0, 0.5)}
    wanted = forward(owned, model, (X,), row).value[0]
    assert not np.allclose(wanted, plain)
    np.testing.assert_allclose(
        forward(owned, model, (X,), row, switch(2)).value[0], 2 * np.asarray(wanted), rtol=1e-6
    )


def test_a_site_that_gets_a_row_later_can_be_perturbed():
    owned, model = passes(""), Scaled(nnx.Rngs(0))
    row = {"linear": (1.0, 0.5)}
    plain = forward(owned, model, (X,), row).value[0]
    owned.add_keys(["linear", ""])
    owned.add_keys(["linear"])
    assert not np.allclose(forward(owned, model, (X,), row).value[0], plain)
    forward(owned, model, (X,))
    assert len(programs_of(owned)) == 2


def test_a_failing_pass_names_the_modes_and_leaves_the_others():
    owned, model = passes(""), Scaled(nnx.Rngs(0))
    with pytest.raises(TypeError) as caught:
        forward(owned, model, (X,), None, switch("a word"))
    assert "with the modes scale='a word' on '(root)'" in " ".join(caught.value.__notes__)
    with pytest.raises(TypeError) as caught:
        forward(owned, model, (X[:, :2],))
    assert "modes" not in " ".join(getattr(caught.value, "__notes__", ()))
    assert forward(owned, model, (X,), None, switch(2)).value[1] == "int"


def test_the_model_and_its_arrays_are_not_kept():
    owned, model = passes(""), Scaled(nnx.Rngs(0))
    forward(owned, model, (X,), None, switch(2))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


class Shared(nnx.Module):
    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.second = self.first

    def __call__(self, x):
        return self.drop(self.second(self.first(x)))


@pytest.mark.parametrize("mode", [nnx.set_graph_mode, nnx.set_graph_updates])
def test_without_graph_mode_or_its_updates_a_pass_is_the_same(mode):
    model = Shared(nnx.Rngs(0))
    evaluate = Switches(((("drop",), (("deterministic", True),)),))
    owned, wanted = passes("first"), np.asarray(model.first(model.first(X)))
    with mode(False):
        for _ in range(2):
            result = forward(owned, model, (X,), None, evaluate)
            np.testing.assert_allclose(result.value, wanted, rtol=1e-5, atol=1e-6)
            assert result.record["first"].output.size == 2 * X.size
            loss = backward(owned, lambda m, x: m(x).sum(), model, (X,), evaluate).value
            np.testing.assert_allclose(loss, wanted.sum(), rtol=1e-5)
    assert len(programs_of(owned)) == 3, "the loss is another function each time"


def test_what_a_model_returns_as_numpy_stays_numpy():
    owned, model = passes(""), Table()
    for _ in range(2):  # from the trace, and from the cached program
        found = forward(owned, model, ()).value
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, model())


# ------------------------------------------------------------- staged once


class Counted(nnx.Module):
    """Counts how often its Python runs."""

    times = 0

    def __init__(self, rngs):
        self.up = nnx.Linear(3, 3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        Counted.times += 1
        return self.drop(nnx.relu(self.up(x)))


@pytest.fixture
def staged():
    """How often the model has been staged since."""
    Counted.times = 0
    return lambda: Counted.times


def test_an_inspector_stages_a_call_once_for_all_that_needs_it(inspect, staged):
    insp = inspect(Counted(nnx.Rngs(0)), X)
    assert insp.findings is not None
    assert insp.trace.edges
    for perturbation in (nni.Zero(), nni.Zero(at="input")):
        handle = insp.perturb("up", perturbation)
        insp.run()
        assert insp.effect.sites
        handle.remove()
    insp.values("up"), insp.units("up")
    assert staged() == 1
    loss_fn = lambda model, x: (model(x) ** 2).mean()  # noqa: E731
    insp.step(loss_fn, X)
    with insp.perturb("up", nni.ScaleGradient(0.5)):
        insp.step(loss_fn, X)
        assert insp.effect is not None
    insp.values("up", part="gradient")
    assert staged() == 2
    insp.modes.set(deterministic=True)
    insp.run()
    assert staged() == 4, "of the loss and of the example, in other modes"
    insp.run(X[:2])
    assert staged() == 5, "of another shape"


def test_a_call_is_staged_again_under_other_layers_and_settings(inspect, staged):
    model = Counted(nnx.Rngs(0))
    model.eval()
    insp = inspect(model, X)
    plain = insp.run()
    with nni.perturb("up", nni.Zero()):
        assert not np.any(insp.run())
    with jax.numpy_dtype_promotion("strict"):
        insp.run()
    np.testing.assert_array_equal(insp.run(), plain)
    assert staged() == 3


def test_a_second_inspector_of_a_model_compiles_nothing():
    model, x = TwoLayers(nnx.Rngs(0)), jnp.ones((4, 3))

    def loss_fn(model, x):
        return (model(x) ** 2).mean()

    step = nnx.jit(nnx.value_and_grad(loss_fn))

    def all_of_one() -> tuple[list[str], nni.Inspector]:
        with Compilations() as compiled:
            insp = nni.Inspector(model, x, display=False)
            insp.run(x)
            insp.step(loss_fn, x)
            for _ in insp.watch(range(3), every=1):
                step(model, x)
            insp.findings  # noqa: B018
            inside(insp).rerun.wait()
            inside(insp).diagnosis.wait()
        assert [one.kind for one in insp.recording.passes] == ["run", "step", *["watch"] * 3]
        return compiled.kinds, insp

    kinds, first = all_of_one()
    assert kinds.count("compile") >= 2
    again, second = all_of_one()
    assert again == []
    assert second.recording.summary("a").mean == first.recording.summary("a").mean
    first.close()
    second.close()
    del first, second
    gc.collect()
    assert "compile" in all_of_one()[0], "nothing is kept for a model that nobody inspects"


MOST_STRUCTURES = 3


@pytest.fixture
def few_are_kept(monkeypatch):
    monkeypatch.setattr(owned_passes, "MOST_STRUCTURES", MOST_STRUCTURES)


@pytest.mark.usefixtures("few_are_kept")
def test_only_the_newest_loss_functions_are_kept():
    insp = nni.Inspector(TwoLayers(nnx.Rngs(0)), X, display=False)
    alive, batches = [], []
    for i in range(MOST_STRUCTURES + 4):
        batch = X + i
        loss_fn = lambda model, batch=batch: model(batch).sum()  # noqa: E731
        alive.append(weakref.ref(loss_fn))
        batches.append(weakref.ref(batch))
        insp.step(loss_fn)
        del batch, loss_fn
    gc.collect()
    assert sum(one() is not None for one in alive) <= MOST_STRUCTURES
    assert sum(one() is not None for one in batches) <= MOST_STRUCTURES
    assert alive[-1]() is not None
    insp.close()
    del insp
    gc.collect()
    assert [one() for one in alive + batches] == [None] * (2 * MOST_STRUCTURES + 8)


@pytest.mark.usefixtures("few_are_kept")
def test_a_loss_function_that_is_used_again_is_kept(inspect):
    def loss_fn(model, x):
        return model(x).sum()

    insp = inspect(TwoLayers(nnx.Rngs(0)), X)
    expected = float(insp.step(loss_fn, X))
    for i in range(MOST_STRUCTURES + 1):
        insp.step(lambda model, by=i: model(X + by).sum())
        with Compilations() as compiled:
            found = float(insp.step(loss_fn, X))
        assert "compile" not in compiled.kinds
        assert found == expected


@pytest.mark.usefixtures("few_are_kept")
def test_a_loss_function_that_was_dropped_is_compiled_again(inspect):
    insp = inspect(TwoLayers(nnx.Rngs(0)), X)
    losses = [lambda model, by=i: model(X + by).sum() for i in range(MOST_STRUCTURES + 2)]
    first = [float(insp.step(one)) for one in losses]
    assert [float(insp.step(one)) for one in losses] == first
    assert [float(insp.step(one)) for one in reversed(losses)] == first[::-1]


@pytest.mark.usefixtures("few_are_kept")
def test_runs_with_other_values_do_not_pile_up():
    """A Python number among the arguments is part of the program."""
    model = Told(nnx.Rngs(0))
    owned = passes("", "linear")
    for by in range(MOST_STRUCTURES + 4):
        assert forward(owned, model, (X, by)).value[2] == "int"
    assert len(owned._cache.by_structure) == MOST_STRUCTURES  # only memory shows it otherwise


@pytest.mark.parametrize("held", ["a text", np.ones((2, 2), ml_dtypes.float6_e2m3fn)])
def test_what_xla_does_not_take_stays_with_the_model(inspect, held):
    class Quantised(nnx.Module):
        def __init__(self):
            self.stored = nnx.Param(held)
            self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

        def __call__(self, x):
            stored = self.stored.get_raw_value()
            factor = 3.0 if isinstance(stored, str) else stored.astype(np.float32).mean()
            return self.linear(x) * factor

    model, x = Quantised(), jnp.ones((4, 2))
    insp = inspect(model, x)
    assert jnp.array_equal(insp.run(x), model(x))
    assert insp.recording.passes[-1].summary("").mean == pytest.approx(float(model(x).mean()))
