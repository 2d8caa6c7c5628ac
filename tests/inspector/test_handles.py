"""Handles: their order on one site, and the places that they take, keep and return."""

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_inspector.errors import InspectorError
from nnx_inspector.inspector.handles import Handles
from nnx_inspector.perturbations.activations import Clamp, Mask, Noise, Patch, Scale, Shift, Zero
from nnx_inspector.perturbations.parameters import ParameterNoise

UNITS = np.array([1.0, 0.0], np.float32)


@pytest.fixture
def handles():
    return Handles()


def kinds(setting):
    """The kinds of the places in order; those that are off are in brackets."""
    pairs = zip(setting.places, setting.data, strict=True)
    named = [(type(p.treedef.unflatten(d[1:])).__name__, bool(d[0])) for p, d in pairs]
    return [name if on else f"({name})" for name, on in named]


def test_zero_and_scale_on_outputs_are_rows(handles):
    handles.add("a", ["a", "b"], Scale(0.5))
    handles.add("b", ["b"], Scale(3.0))
    handles.add("c", ["c"], Zero())
    setting = handles.setting()
    assert setting.rows == {"a": (2.0, 0.5), "b": (2.0, 1.5), "c": (1.0, 0.0)}
    assert setting.places == ()
    assert not any(h.compiling for h in handles.all())


@pytest.mark.parametrize(
    "one", [Zero(at="input"), Scale(0.5, at="input"), Scale(jnp.ones(2)), Noise(0.1)]
)
def test_what_is_no_row_gets_a_place(handles, one):
    handle = handles.add("a", ["a"], one)
    setting = handles.setting()
    assert setting.rows == {}
    assert setting.places == (handle.place,)
    assert handle.compiling
    handles.arm(setting)
    assert not handle.compiling


def test_one_layer_is_no_row(handles):
    handle = handles.add("a[1]", ["a"], Zero(), (1,))
    assert handles.setting().places[0].rows == handle.rows == (1,)


def test_behind_an_older_place_a_scale_has_a_place_too(handles):
    handles.add("a", ["a"], Scale(2.0))
    noise = handles.add("a", ["a"], Noise(0.1))
    scale = handles.add("a", ["a"], Scale(3.0))
    elsewhere = handles.add("b", ["b"], Scale(4.0))
    setting = handles.setting()
    assert setting.rows == {"a": (2.0, 2.0), "b": (2.0, 4.0)}
    assert kinds(setting) == ["Noise", "Scale"]
    noise.remove()
    assert kinds(handles.setting()) == ["(Noise)", "Scale"], "it keeps its place"
    assert (scale.enabled, elsewhere.compiling) == (True, False)


def test_an_inputs_place_does_not_come_before_a_row_of_the_output(handles):
    handles.add("a", ["a"], Shift(1.0, at="input"))
    handles.add("a", ["a"], Scale(3.0))
    assert handles.setting().rows == {"a": (2.0, 3.0)}


def test_a_free_place_is_taken_again(handles):
    first = handles.add("a", ["a"], Noise(0.1))
    handles.arm(handles.setting())
    code = handles.setting().places
    first.remove()
    setting = handles.setting()
    assert (setting.places, setting.active) == (code, False)
    again = handles.add("a", ["a"], Noise(0.7))
    setting = handles.setting()
    assert setting.places == code
    assert not again.compiling
    np.testing.assert_array_equal(setting.data[0][1], np.float32(0.7))


def test_a_free_place_is_not_taken_where_the_order_would_be_another(handles):
    first = handles.add("a", ["a"], Noise(0.1))
    handles.add("a", ["a"], Mask(UNITS))
    first.remove()
    handles.add("a", ["a"], Noise(0.2))
    assert kinds(handles.setting()) == ["Mask", "Noise"]
    other = handles.add("b", ["b"], Noise(0.1))
    handles.add("c", ["c"], Mask(UNITS))
    other.remove()
    handles.add("b", ["b"], Noise(0.3))
    assert kinds(handles.setting()) == ["Mask", "Noise", "Noise", "Mask"], "they do not meet"


def test_free_places_go_when_something_is_armed_anyway(handles):
    handles.add("a", ["a"], Noise(0.1)).remove()
    assert kinds(handles.setting()) == ["(Noise)"]
    handles.add("a", ["a"], Clamp(0.0, 1.0))
    assert kinds(handles.setting()) == ["Clamp"]


def test_a_handle_that_is_taken_back_leaves_the_places_as_they_were(handles):
    first = handles.add("b", ["b"], Noise(0.1))
    handles.add("a", ["a"], Clamp(0.0, 1.0))
    first.remove()
    handles.add("b", ["b"], Noise(0.2))  # younger than the clamp, in the place before it
    room = handles.setting().places
    for one in (Noise(0.2), Scale(2.0), Mask(UNITS)):
        before = handles.layout
        handle = handles.add("a", ["a"], one)
        assert kinds(handles.setting()) == ["Clamp", "Noise", type(one).__name__]
        handles.undo_add(handle, before)
        assert handles.setting().places == room
        assert kinds(handles.setting()) == ["Noise", "Clamp"]
        assert handle.removed


def test_tuning_keeps_the_place_and_another_shape_needs_another(handles):
    handle = handles.add("a", ["a"], Shift(UNITS, 1.0))
    handles.arm(handles.setting())
    code = handles.setting().places
    handle.perturbation = Shift(2 * UNITS, 3.0)
    assert handles.setting().places == code
    handle.enabled = False
    assert (handles.setting().places, handles.setting().active) == (code, False)
    handle.enabled = True
    handle.perturbation = Shift(1.0)
    assert handle.compiling
    assert handles.setting().places != code
    assert handles.setting(armed=True).places == code
    assert not handles.setting(armed=True).active
    handles.give_up("XlaError: no")
    assert not handle.compiling
    assert handle.not_acting == "the program with a place for it cannot be compiled: XlaError: no"


def test_while_something_is_compiled_the_rest_goes_on(handles):
    old = handles.add("a", ["a"], Mask(UNITS))
    handles.arm(handles.setting())
    new = handles.add("b", ["b"], Noise(0.1))
    old.perturbation = Mask(1 - UNITS)
    setting = handles.setting(armed=True)
    np.testing.assert_array_equal(setting.data[0][1], 1 - UNITS)
    assert kinds(setting) == ["Mask"]
    assert kinds(handles.setting()) == ["Mask", "Noise"]
    assert (old.compiling, new.compiling) == (False, True)
    old.remove()
    assert kinds(handles.setting(armed=True)) == ["(Mask)"]


def test_parameters_come_last(handles):
    handles.add("a", ["a"], ParameterNoise(0.1))
    handles.add("a", ["a"], Noise(0.1))
    setting = handles.setting()
    assert [place.at for place in setting.places] == ["output", "parameter"]
    assert setting.active
    assert not setting.clean().active


def test_what_the_user_gave_may_be_written_to_later(handles):
    mask = UNITS.copy()
    handles.add("a", ["a"], Mask(mask))
    mask[:] = 7
    np.testing.assert_array_equal(handles.setting().data[0][1], UNITS)


def test_another_kind_a_wrong_type_and_use_after_removal_are_refused(handles):
    handle = handles.add("a", ["a"], Patch(UNITS))
    with pytest.raises(TypeError, match="This handle is a Patch on 'a'"):
        handle.perturbation = Mask(UNITS)
    with pytest.raises(TypeError, match="got int"):
        handle.perturbation = 3
    with pytest.raises(TypeError, match="enabled must be True or False"):
        handle.enabled = 1
    handle.remove()
    handle.remove()
    with pytest.raises(InspectorError, match="was removed"):
        handle.enabled = True


def test_a_click_that_tunes_and_switches_is_one_change():
    changes = []
    handles = Handles()
    handle = handles.add("a", ["a"], Scale(2.0))
    handles.on_change = lambda: changes.append((handle.enabled, handle.strength))
    handles.change(handle, enabled=False, perturbation=Scale(3.0))
    handles.change(handle, enabled=False, perturbation=Scale(3.0))
    assert changes == [(False, 3.0)]
    with pytest.raises(TypeError, match="is a Scale on 'a'; it cannot become a Zero"):
        handles.change(handle, enabled=True, perturbation=Zero())
    assert not handle.enabled


def test_all_are_switched_by_one_change():
    changes = []
    handles = Handles()
    handles.on_change = lambda: changes.append(1)
    several = [handles.add(site, [site], Scale(2.0)) for site in "abc"]
    several[1].enabled = False
    changes.clear()
    handles.switch_all(False)
    assert ([h.enabled for h in several], len(changes)) == ([False] * 3, 1)
    assert not handles.setting().active
    handles.switch_all(False)
    assert len(changes) == 1, "nothing is switched that is off"
    several[0].remove()
    changes.clear()
    handles.switch_all(True)
    assert ([h.enabled for h in several], len(changes)) == ([False, True, True], 1)
    assert set(handles.setting().rows) == {"b", "c"}


def test_the_strength_is_the_number_that_a_slider_sets():
    handles = Handles()
    scale = handles.add("a", ["a"], Scale(2.0))
    scale.strength = 0.25
    assert (scale.perturbation.factor, scale.strength) == (0.25, 0.25)
    clamp = handles.add("a", ["a"], Clamp(-1.0, 1.0))
    clamp.strength = 3.0
    assert (clamp.perturbation.low, clamp.perturbation.high) == (-3.0, 3.0)
    zero = handles.add("a", ["a"], Zero())
    assert zero.strength is None
    with pytest.raises(ValueError, match="no strength that is one number"):
        zero.strength = 1.0


def test_a_mask_without_some_units():
    assert Mask.without([0, 2], units=4).mask.tolist() == [False, True, False, True]
    assert Mask.without([], units=2, axis=1, at="input").at == "input"
    assert Mask.without([0, 5], units=(2, 3)).mask.tolist() == [
        [False, True, True],
        [True, True, False],
    ]
    for off, text in (
        ([3], "[3]"),
        ([0, 1, 2, 5], "[0, 1, 2, 5]"),
        ([0, *range(2, 6)], "[0, *range(2, 6)]"),
    ):
        one = Mask.without(off, units=(2, 4), axis=-3)
        assert one.python() == f"nni.Mask.without({text}, units=(2, 4), axis=-3)"
    for wrong in (4, -1):
        with pytest.raises(IndexError, match=f"no unit {wrong} among 4"):
            Mask.without([wrong], units=4)
