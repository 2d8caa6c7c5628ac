"""Kept values besides summaries: arrays and reductions, through every transform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from models import batch, rngs

from nnx_inspector.errors import InspectorError
from nnx_inspector.records.capture import capture, value_and_grad


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Stack(nnx.Module):
    """Three blocks, called in a scan."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(rngs)

        self.blocks = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block, x):
            return block(x)

        return run(self.blocks, x)


def by_hand(model, x):
    """The output of each block of a stack."""
    found = []
    kernel, bias = model.blocks.linear.kernel[...], model.blocks.linear.bias[...]
    for layer in range(3):
        x = np.tanh(np.asarray(x, np.float64) @ np.asarray(kernel[layer]) + bias[layer])
        found.append(x)
    return np.stack(found)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_the_arrays_themselves_are_kept(jitted):
    model, x = models.MLP(rngs()), batch(4, 3)
    call = capture(model, values=True)
    y, record = (nnx.jit(call) if jitted else call)(x)
    np.testing.assert_allclose(record[""].values, y)
    np.testing.assert_array_equal(record[""].input_values, x)
    np.testing.assert_allclose(record["up"].values, model.up(x), rtol=1e-6)
    np.testing.assert_allclose(record["down"].input_values, jnp.tanh(model.up(x)), rtol=1e-6)


def test_a_reduction_of_each_array_is_kept():
    model, x = models.MLP(rngs()), batch(4, 3)
    _, record = capture(model, values=lambda a: {"first": a[0], "norm": jnp.linalg.norm(a)})(x)
    expected = model.up(x)
    kept = record["up"].values
    np.testing.assert_allclose(kept["first"], expected[0], rtol=1e-6)
    np.testing.assert_allclose(kept["norm"], np.linalg.norm(expected), rtol=1e-6)


def test_every_layer_of_a_scan_has_a_row():
    model, x = Stack(rngs()), batch(4, 3)
    _, record = capture(model, values=True)(x)
    expected = by_hand(model, x)
    np.testing.assert_allclose(record["blocks"].values, expected, rtol=1e-5, atol=1e-6)
    for layer in range(3):
        np.testing.assert_allclose(record[f"blocks[{layer}]"].values, expected[layer], 1e-5, 1e-6)


@pytest.mark.parametrize("out_axes", [0, 1])
@pytest.mark.parametrize("in_axes", [0, 1, 2])
def test_under_vmap_the_mapped_axes_come_first(in_axes, out_axes):
    """Units belong to the axis that the module's code sees, wherever vmap puts its axis."""
    model, x = models.MLP(rngs()), batch(2, 4, 3)

    def run(model, x):
        outer = jax.vmap(jax.vmap(model, out_axes=0), in_axes=0, out_axes=out_axes)
        return outer(x)

    moved = jnp.moveaxis(x, 0, in_axes)
    mapped = lambda model, x: jax.vmap(  # noqa: E731
        jax.vmap(model), in_axes=in_axes, out_axes=out_axes
    )(x)
    _, record = capture(mapped, values=True)(model, moved)
    _, plain = capture(run, values=True)(model, x)
    np.testing.assert_allclose(record["up"].values, model.up(x), rtol=1e-6)
    np.testing.assert_allclose(record["up"].input_values, x, rtol=1e-6)
    np.testing.assert_allclose(plain["up"].values, model.up(x), rtol=1e-6)


@pytest.mark.parametrize("axis", ["x", True, 1.0])
def test_units_are_of_the_number_of_an_axis(axis):
    with pytest.raises(TypeError, match=r"units= takes the number of an axis, .* got"):
        capture(lambda x: x, units=axis)


def test_values_are_not_the_name_of_a_site():
    with pytest.raises(TypeError, match=r"function of one array, got 'head'; only= chooses"):
        capture(lambda x: x, values="head")


def test_units_under_vmap_are_those_of_the_axis_that_the_module_sees():
    model, x = models.MLP(rngs()), batch(3, 4)  # the examples lie along the last axis
    mapped = lambda model, x: jax.vmap(model, in_axes=1, out_axes=1)(x)  # noqa: E731
    _, record = capture(mapped, units=0)(model, x)
    _, same = capture(mapped, units=-1)(model, x)
    expected = np.mean(model.up(x.T), axis=0)
    np.testing.assert_allclose(record["up"].units.mean, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(same["up"].units.mean, expected, rtol=1e-5, atol=1e-7)


def test_several_calls_are_kept_apart_and_units_merge():
    model, x = models.MLP(rngs()), batch(4, 3)

    def twice(model, x):
        return model(x) + model(2 * x)

    _, record = capture(twice, values=True, units=-1)(model, x)
    for call, factor in zip(record["up"].calls, (1, 2), strict=True):
        np.testing.assert_allclose(call.values, model.up(factor * x), rtol=1e-6)
    both = np.concatenate([model.up(x), model.up(2 * x)])
    np.testing.assert_allclose(record["up"].units.mean, both.mean(0), rtol=1e-5)
    with pytest.raises(InspectorError, match=r"'up' was called 2 times.*calls\[0\].values"):
        _ = record["up"].values


def test_within_a_while_loop_units_add_up_and_no_values_are_kept():
    model, x = Block(rngs()), batch(4, 3)

    def run(model, x):
        return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, model(s[1])), (0, x))[1]

    _, record = capture(run, values=True, units=-1)(model, x)
    values = []
    for _ in range(3):
        x = model(x)
        values.append(x)
    np.testing.assert_allclose(record[""].units.mean, np.concatenate(values).mean(0), rtol=1e-5)
    with pytest.raises(InspectorError, match=r"No values of .. were kept.*while loop"):
        _ = record[""].values


def test_of_an_untaken_branch_nothing_is_kept():
    class Branches(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = Block(rngs), Block(rngs)

        def __call__(self, x):
            return nnx.cond(x.sum() > 0, lambda m, x: m.a(x), lambda m, x: m.b(x), self, x)

    model, x = Branches(rngs()), jnp.ones((4, 3))
    _, record = capture(model, values=True, units=-1)(x)
    np.testing.assert_allclose(record["a"].values, model.a(x), rtol=1e-6)
    assert record["b"].units is None
    with pytest.raises(InspectorError, match="No values of 'b'"):
        _ = record["b"].values


@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit])
def test_values_come_out_of_remat_and_inner_jit_beside_gradients(transform):
    class Holds(nnx.Module):
        def __init__(self, rngs):
            self.block = Block(rngs)

        def __call__(self, x):
            return transform(lambda block, x: block(x))(self.block, x)

    model, x = Holds(rngs()), batch(4, 3)
    (_, record), _ = value_and_grad(lambda m, x: (m(x) ** 2).sum(), values=True)(model, x)
    np.testing.assert_allclose(record["block"].values, model.block(x), rtol=1e-6)
    np.testing.assert_allclose(
        record["block"].gradient.mean, np.mean(2 * model.block(x)), rtol=1e-5
    )


def test_pytree_outputs_are_kept_in_their_structure():
    class Pair(nnx.Module):
        def __call__(self, x):
            return {"twice": 2 * x, "name": "pair", "sum": x.sum()}

    x = batch(4, 3)
    _, record = capture(Pair(), values=True, units=-1)(x)
    values, units = record[""].values, record[""].units
    np.testing.assert_array_equal(values["twice"], 2 * x)
    np.testing.assert_allclose(values["sum"], x.sum())
    assert values["name"] is None
    np.testing.assert_allclose(units["twice"].mean, np.mean(2 * x, 0), rtol=1e-5)
    assert units["sum"] is None, "0-d: it has no axis"


def test_what_is_kept_may_be_differentiated():
    model, x = models.MLP(rngs()), batch(4, 3)

    def penalty(model):
        _, record = capture(model, values=True)(x)
        return (record["up"].calls[0].values ** 2).sum()

    def plain(model):
        return (model.up(x) ** 2).sum()

    found, expected = nnx.grad(penalty)(model), nnx.grad(plain)(model)
    np.testing.assert_allclose(found["up"]["kernel"][...], expected["up"]["kernel"][...], rtol=1e-5)


def test_a_reduction_that_fails_says_where():
    model, x = models.MLP(rngs()), batch(4, 3)
    with pytest.raises(TypeError) as caught:
        capture(model, values=lambda a: a.reshape(7))(x)
    assert "values= at site '', of float32[4,3]" in "".join(caught.value.__notes__)
    np.testing.assert_array_equal(model(x), models.MLP(rngs())(x))


def test_without_being_asked_nothing_is_kept():
    _, record = capture(models.MLP(rngs()))(batch(4, 3))
    assert record["up"].units is None
    assert sum(leaf.size for leaf in jax.tree.leaves(record["up"].calls[0].kept)) == 0
    with pytest.raises(InspectorError, match="values=True"):
        _ = record["up"].values
