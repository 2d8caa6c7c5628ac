"""Parameters and units of a site on demand, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from flax import nnx
from inside import inside
from models import Shared, Stacked, TreeOutput
from reused_model import ReusedModel

import nnx_inspector as nni
from nnx_inspector.inspector.panels import answer_look
from nnx_inspector.screen import protocol
from nnx_inspector.stats.units import Units

# a user may sow outside nnx.capture
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Net(nnx.Module):
    """Two layers, with a sown value between them."""

    def __init__(self, rngs):
        self.up = nnx.Linear(4, 7, rngs=rngs)
        self.norm = nnx.BatchNorm(7, rngs=rngs)
        self.down = nnx.Linear(7, 3, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.count[...] += 1
        h = nnx.relu(self.up(x))
        self.sow(nnx.Intermediate, "hidden", h)
        return self.down(self.norm(h))


X = jax.random.normal(jax.random.key(1), (9, 4))


@pytest.fixture(scope="module")
def reused():
    model = Net(nnx.Rngs(0))
    model.up.bias[...] = model.up.bias[...].at[2].set(-50.0).at[5].set(jnp.nan)
    one = ReusedModel(model, X)
    yield one
    one.close()


@pytest.fixture
def insp(inspect, reused):
    return inspect(reused.reset(), X)


def arrays(model):
    return [np.asarray(x).copy() for x in jax.tree.leaves(nnx.state(model))]


def seen(insp, what, site):
    return answer_look(inside(insp).core, protocol.Look(id=4, what=what, site=site))


# ------------------------------------------------------------------- parameters


def test_the_figures_of_parameters_are_those_of_numpy(insp):
    insp.model.up.kernel[...] = insp.model.up.kernel[...].at[0, 0].set(0.0).at[1, 1].set(jnp.inf)
    found = insp.parameters("up")
    assert list(found) == ["up/bias", "up/kernel"]
    for name, array in (("kernel", insp.model.up.kernel), ("bias", insp.model.up.bias)):
        x, s = np.asarray(array[...], np.float64), found[f"up/{name}"]
        finite = x[np.isfinite(x)]
        assert (s.size, s.zeros) == (x.size, (x == 0).sum())
        assert (s.nan, s.posinf) == (np.isnan(x).sum(), np.isposinf(x).sum())
        figures = (s.mean, s.std, s.norm, s.min, s.max)
        expected = (finite.mean(), finite.std(), np.linalg.norm(finite), finite.min(), finite.max())
        np.testing.assert_allclose(figures, expected, rtol=1e-5)


def test_the_parameters_of_a_module_come_before_those_of_its_children(inspect, insp):
    assert list(insp.parameters("")) == [
        "down/bias", "down/kernel", "norm/bias", "norm/scale", "up/bias", "up/kernel"
    ]  # fmt: skip
    assert insp.parameters("hidden") == {}
    model = Net(nnx.Rngs(0))
    model.own = nnx.Param(jnp.ones(2))
    other = inspect(model, X)
    assert next(iter(other.parameters(""))) == "own"


def test_a_shared_parameter_is_there_once():
    model = Shared(nnx.Rngs(0))
    insp = nni.Inspector(model, X[:, :3], display=False)
    paths = list(insp.parameters(""))
    insp.close()
    variables = {id(v) for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Param)}
    assert len(paths) == len(set(paths)) == len(variables)


def test_parameters_that_a_step_has_taken_are_told(insp):
    kernel = insp.model.up.kernel.get_raw_value()
    kernel.delete()
    with pytest.raises(nni.InspectorError, match="The parameters cannot be read now: a training"):
        insp.parameters("up")
    assert set(insp.parameters("down")) == {"down/bias", "down/kernel"}, "others can be"
    with pytest.raises(nni.InspectorError, match="The units cannot be read now"):
        insp.units("down")
    with pytest.raises(nni.InspectorError, match="The model cannot be read now"):
        insp.sweep(progress=False)


# ------------------------------------------------------------------------ units


def test_the_figures_of_units_are_those_of_numpy_and_nothing_changes(insp):
    before = arrays(insp.model)
    units = insp.units("hidden")
    kernel, bias = (
        np.asarray(v[...], np.float64) for v in (insp.model.up.kernel, insp.model.up.bias)
    )
    h = np.asarray(X, np.float64) @ kernel + bias
    h = np.where(np.isnan(h), h, np.maximum(h, 0))
    for unit in range(7):
        if unit == 5:
            assert units.nan[unit] == 9
            assert np.isnan(units.mean[unit])
            continue
        column = h[:, unit]
        np.testing.assert_allclose(units.mean[unit], column.mean(), rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(units.std[unit], column.std(), rtol=2e-5, atol=1e-6)
        assert units.zeros[unit] == (column == 0).sum()
    assert units.dead[2]
    for a, b in zip(before, arrays(insp.model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_message_of_units_has_their_figures(insp):
    message, buffer = seen(insp, "units", "up")
    assert (message.units, message.more, message.source) == (7, 0, "the example")
    assert message.each == 9
    figures = np.frombuffer(buffer, "<f8").reshape(len(protocol.UNIT_STATS), 7)
    units = insp.units("up")
    for row, name in zip(figures, protocol.UNIT_STATS, strict=True):
        expected = units.nan if name == "nonfinite" else getattr(units, name)
        np.testing.assert_array_equal(row, expected, err_msg=name)


def test_the_message_of_units_counts_the_values_of_its_own_pass(insp):
    insp.step(lambda model, x: model(x).sum(), jnp.ones((5, 4)))  # the example has another number
    message, _ = seen(insp, "units", "up")
    assert (message.each, message.source) == (5, "the last step")


def test_units_behind_a_relu_are_dead_if_it_turns_them_off(insp):
    at_up, after = insp.units("up"), insp.units("hidden")
    assert at_up.behind == "relu"
    assert at_up.dead.tolist() == after.dead.tolist()
    assert at_up.dead[2]
    assert not at_up.zeros[2]
    assert not at_up.dead[5]  # NaN is not off
    message, _ = seen(insp, "units", "up")
    assert message.behind == "relu"
    assert insp.units("down").behind == ""


class Convolutional(nnx.Module):
    """Channels before each kind of activation; the last ones go to a ReLU and past it."""

    def __init__(self, act, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.head = nnx.Conv(16, 2, (1, 1), rngs=rngs)
        self.act = act

    def __call__(self, x):
        return self.head(self.act(self.conv(x)))


def past(x):
    return nnx.relu(x) + x


@pytest.mark.parametrize(
    ("act", "below"),
    [
        *((nnx.relu, 0.0), (nnx.relu6, 0.0), (nnx.gelu, -5.0), (nnx.silu, -12.0)),
        *((past, None), (nnx.leaky_relu, None), (nnx.tanh, None)),
    ],
)
def test_dead_channels_are_those_that_the_activation_turns_off(inspect, act, below):
    model = Convolutional(act, nnx.Rngs(0))
    model.conv.bias[...] = jnp.linspace(-20, 4, 16)
    model.conv.kernel[...] = model.conv.kernel[..., :].at[..., 15].set(0)
    model.conv.bias[...] = model.conv.bias[...].at[15].set(0)  # exactly 0 wherever it goes
    x = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))
    insp = inspect(model, jnp.ones((2, 8, 8, 1)))
    insp.run(x)
    units = insp.units("conv")
    values = np.asarray(jax.lax.conv_general_dilated(
        np.asarray(x, np.float64), np.asarray(model.conv.kernel[...], np.float64), (1, 1), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"))) + np.asarray(model.conv.bias[...])  # fmt: skip
    largest = values.reshape(-1, 16).max(0)
    expected = (largest <= below) if below is not None else np.zeros(16, bool)
    expected[15] = True
    np.testing.assert_array_equal(units.dead, expected)
    assert units.to_frame()["dead"].tolist() == expected.tolist()
    message, _ = seen(insp, "units", "conv")
    assert (message.axes[0], message.each) == ("batch (4)", 4 * 8 * 8)  # not the example's batch


def test_units_are_compiled_once_a_site_and_a_mask_that_changes_compiles_nothing(insp):
    handle = insp.perturb("up", nni.Mask.without([0], units=7))
    assert insp.units("up").dead.tolist() == [True, False, True, *[False] * 4]  # 2 is off
    inside(insp).arming.wait()  # the perturbed program, compiled for the next run
    with Compilations() as compiled:
        handle.perturbation = nni.Mask.without([1, 3], units=7)
        assert insp.units("up").dead.tolist() == [False, True, True, True, False, False, False]
        handle.enabled = False
        assert insp.units("up").dead.tolist() == [False, False, True, *[False] * 4]
    # the diagnosis goes on beside it: it searches each new pass for the operation of its NaN
    events = zip(compiled.threads, compiled.kinds, strict=True)
    assert [event for event in events if event[0] != "nnx_inspector.diagnosis"] == []


def test_units_of_one_layer_of_a_stack_and_of_all(inspect):
    insp = inspect(Stacked(nnx.Rngs(0)), jnp.ones((2, 3)))
    site = next(c.site for c in insp.trace.calls if c.stacked)
    whole, first = insp.units(site), insp.units(f"{site}[0]")
    assert len(whole) == len(first)
    assert whole.size[0] > first.size[0] > 0
    message, _ = seen(insp, "units", f"{site}[0]")
    assert message.site == f"{site}[0]"


def test_heads_are_units_along_their_axis_and_a_click_switches_one_off(inspect):
    attention = nnx.MultiHeadAttention(
        num_heads=2, in_features=6, decode=False, deterministic=True, rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(0), (3, 4, 6))
    insp = inspect(attention, x)
    values = np.asarray(insp.values("value"), np.float64)
    figures = insp.units("value", axis=-2)
    np.testing.assert_allclose(figures.mean, values.mean((0, 1, 3)), rtol=1e-5)
    message, buffer = answer_look(
        inside(insp).core, protocol.Look(id=1, what="units", site="value", axis=-2)
    )
    assert (message.units, message.axis, message.each) == (2, -2, 36)
    assert message.axes == ("batch (3)", "position (4)", "head (2)", "feature (3)")
    shown = np.frombuffer(buffer).reshape(len(protocol.UNIT_STATS), 2)
    np.testing.assert_array_equal(shown[0], figures.mean)
    click = protocol.SetMask(id=2, perturbation=None, site="value", units=2, mask="80", axis=-2)
    inside(insp).commands.answer(click)
    handle = insp.perturbations[0]
    assert inside(insp).view.python == (
        'insp.perturb("value", nni.Mask.without([1], units=2, axis=-2))'
    )
    by_hand = nni.perturbed(attention)({"value": nni.Zero().only([1], axis=-2)}, x)
    np.testing.assert_allclose(insp.run(x), by_hand, rtol=1e-5, atol=1e-6)
    (row,) = inside(insp).state.perturbations
    assert (row.axis, row.units_off, row.mask) == (-2, 1, "80")
    inside(insp).commands.answer(
        protocol.SetMask(id=3, perturbation=handle.id, site="value", units=2, mask="40")
    )
    assert handle.perturbation.python() == "nni.Mask.without([0], units=2, axis=-2)"
    with pytest.raises(nni.InspectorError, match="no array of numbers with an axis -5"):
        insp.units("value", axis=-5)


def test_a_mask_drawn_on_a_picture_switches_its_places_off_in_every_channel(inspect):
    model = nnx.Conv(1, 3, (3, 3), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 4, 5, 1))
    insp = inspect(model, x)
    off = np.zeros((4, 5), np.bool_)
    off[1:3, 2:] = True
    bits = np.packbits(~off).tobytes().hex()
    inside(insp).commands.answer(
        protocol.SetMask(id=2, perturbation=None, site="", units=20, mask=bits, axis=-3, columns=5)
    )
    text = "nni.Mask.without([7, 8, 9, 12, 13, 14], units=(4, 5), axis=-3)"
    assert inside(insp).view.python == f'insp.perturb("", {text})'
    by_hand = np.where(off[None, :, :, None], 0.0, model(x))
    np.testing.assert_allclose(insp.run(x), by_hand, rtol=1e-5, atol=1e-6)
    (row,) = inside(insp).state.perturbations
    assert (row.units, row.units_off, row.mask, row.columns) == (20, 6, bits, 5)


def test_units_of_a_pytree_are_a_pytree_and_the_screen_shows_the_first(inspect):
    insp = inspect(TreeOutput(nnx.Rngs(0)), jnp.ones((2, 3)))
    leaves = jax.tree.leaves(insp.units(""), is_leaf=lambda x: isinstance(x, Units))
    assert len(leaves) > 1
    assert seen(insp, "units", "")[0].units == len(leaves[0])


class Scalar(nnx.Module):
    def __call__(self, x):
        return x.sum()


def test_what_has_no_units_and_what_is_not_there_is_told(inspect, insp):
    with pytest.raises(ValueError, match="'nowhere'"):
        insp.units("nowhere")
    with pytest.raises(ValueError, match="'nowhere'"):
        answer_look(inside(insp).core, protocol.Look(id=1, what="code", site="nowhere"))
    scalar = inspect(Scalar(), jnp.ones(3))
    with pytest.raises(nni.InspectorError, match=r"float32\[\]: no array of numbers with an axis"):
        scalar.units("")


# ------------------------------------------------------------------------- code


def test_the_code_of_a_site(insp):
    message, buffer = seen(insp, "code", "")
    assert buffer is None
    assert (message.kind, message.documentation) == (
        "Net", "Two layers, with a sown value between them.",
    )  # fmt: skip
    assert message.sown == ("hidden",)
    message, _ = seen(insp, "code", "up")
    (one,) = message.excerpts
    assert one.text.split("\n")[one.line - one.first].strip() == "h = nnx.relu(self.up(x))"
    assert one.function == "Net.__call__"
    assert message.sown == ()
    assert seen(insp, "code", "hidden")[0].kind == "Intermediate"
