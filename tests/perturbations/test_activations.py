"""Kinds alone: every dtype, empty arrays, unusual strengths, second derivatives, errors."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from models import batch, rngs

import nnx_inspector as nni

EVERY = [
    nni.Zero(), nni.Scale(0.5), nni.Shift(0.25), nni.Shift(np.ones(3)), nni.Noise(0.1),
    nni.Clamp(-1, 1), nni.Clamp(-0.5, 0.5), nni.Mask(np.ones(3)), nni.Mask(np.ones(3, bool)),
    nni.Mean(), nni.Mean(2), nni.Patch(3), nni.Patch(0.5, True), nni.Apply(jnp.square),
    nni.Cast(jnp.float16), nni.Cast(jnp.complex64), nni.ScaleGradient(0.1), nni.ReverseGradient(),
    nni.StopGradient(), nni.ClipGradient(1.0),
]  # fmt: skip
OF_PARAMETERS = [
    nni.ParameterNoise(0.1),
    nni.PruneMask(np.ones(3)),
    nni.PruneMask(np.ones(3, bool)),
]
FLOATING = [
    "float32", "float16", "bfloat16", "complex64", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip
OTHER = ["int32", "int8", "uint8", "uint32", "bool"]


class Gives(nnx.Module):
    """Returns what it receives."""

    def __call__(self, x):
        return x


def named(one):
    """The same in every process: without addresses."""
    return re.sub(r"<.*?>+", "fn", repr(one))


def apply(one, x):
    return nni.perturbed(Gives())({"": one}, x)


@pytest.mark.parametrize("dtype", FLOATING + OTHER)
@pytest.mark.parametrize("one", EVERY, ids=named)
@pytest.mark.parametrize("rows", [2, 0])
def test_shape_and_dtype_stay_or_the_kind_is_refused(one, dtype, rows):
    x = jnp.ones((rows, 3), dtype)
    why = one.why_not(jax.ShapeDtypeStruct(x.shape, x.dtype))
    if why is not None:
        assert isinstance(why, (TypeError, ValueError))
        assert dtype in OTHER or "complex" in str(why) or "imaginary" in str(why)
        return
    y = one.apply_at(x, "site/0/0")
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert np.all(np.isfinite(np.asarray(y).astype(np.complex64)))


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("one", OF_PARAMETERS, ids=named)
def test_a_parameters_shape_and_dtype_stay(one, dtype):
    x = jnp.ones((2, 3), dtype)
    y = one.apply(x, "kernel")
    assert (y.shape, y.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("one", EVERY, ids=named)
def test_the_gradient_through_an_empty_array_is_empty(one):
    x = jnp.zeros((0, 3))
    if one.why_not(jax.ShapeDtypeStruct(x.shape, x.dtype)) is None:
        assert jax.grad(lambda x: apply(one, x).sum())(x).shape == (0, 3)


def test_float64_keeps_its_precision():
    with jax.enable_x64(True):
        x = jnp.linspace(0.0, 1.0, 6, dtype=jnp.float64).reshape(2, 3)
        np.testing.assert_array_equal(apply(nni.Scale(0.1), x), 0.1 * np.asarray(x))
        np.testing.assert_array_equal(apply(nni.Mean(), x), np.broadcast_to(x.mean(0), x.shape))
        gradient = jax.grad(lambda x: apply(nni.ScaleGradient(0.1), x).sum())(x)
        np.testing.assert_array_equal(gradient, np.full((2, 3), 0.1))
        clip = jax.grad(lambda x: apply(nni.ClipGradient(0.1), x).sum())(x)
        np.testing.assert_allclose(clip, np.full((2, 3), 0.1 / np.sqrt(6.0)), rtol=1e-14)
        noise = apply(nni.Noise(1.0), x) - x
        assert not np.array_equal(noise, noise.astype(np.float32))


# --------------------------------------------------------------- strengths


def test_a_clamp_whose_low_is_above_its_high_is_refused():
    with pytest.raises(ValueError, match="Clamp needs low= to be at most high="):
        nni.Clamp(1.0, -1.0)
    for bounds in (("a",), (0, float("nan"))):
        with pytest.raises((TypeError, ValueError), match="Clamp takes a"):
            nni.Clamp(*bounds)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32", "int32"])
def test_a_clamp_of_integers_is_exact_and_its_bounds_may_lie_outside_the_dtype(dtype):
    x = jnp.asarray([0, 1, 100, 127], dtype)
    for low, high in ((-3, 3), (1, 1000), (-(2**31), 2**31 - 1)):
        np.testing.assert_array_equal(
            apply(nni.Clamp(low, high), x), np.clip(x.astype(int), low, high)
        )
    with pytest.raises(TypeError, match=rf"Clamp at .*{dtype}\[4\]: low= of float32 cannot"):
        apply(nni.Clamp(0.5), x)
    big = jnp.asarray([2**24 + 1], jnp.int32)
    np.testing.assert_array_equal(apply(nni.Clamp(high=2**24 + 1), big), big)


def test_scale_by_an_infinite_array_is_the_product_and_by_an_infinite_number_refused():
    x = jnp.array([[1.0, -2.0, 0.0]])
    np.testing.assert_array_equal(apply(nni.Scale(jnp.inf * jnp.ones(())), x), x * np.inf)
    with pytest.raises(ValueError, match="finite"):
        nni.Scale(float("inf"))


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (nni.Scale(np.ones(2)), r"factor= of shape \(2,\) does not broadcast"),
        (nni.Scale(np.ones((4, 1, 3))), r"factor= of shape \(4, 1, 3\) does not broadcast"),
        (nni.Shift(1.0, np.ones(2)), r"strength= of shape \(2,\)"),
        (nni.Noise(np.ones(2)), r"std= of shape \(2,\)"),
        (nni.Clamp(high=np.ones(2)), r"high= of shape \(2,\)"),
        (nni.Patch(1.0, np.ones(2, bool)), r"where= of shape \(2,\)"),
        (nni.Mean(axis=(0, -2)), "names one axis twice"),
        (nni.ScaleGradient(np.ones(3)), r"factor is one number, or vmapped over; .* \(3,\)"),
        (nni.ClipGradient(np.ones(3)), r"norm is one number"),
    ],
)
def test_a_strength_that_would_change_the_shape_is_refused(one, text):
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(lambda x: apply(one, x), jnp.ones((4, 3)))


@pytest.mark.parametrize(
    "one", [nni.Scale(1j * np.ones(3)), nni.Shift(1j), nni.Mean(1j), nni.Patch(1j)]
)
def test_a_complex_strength_of_real_values_is_refused(one):
    with pytest.raises(TypeError, match="of complex64 cannot be cast to float32"):
        apply(one, jnp.ones((4, 3)))


@pytest.mark.parametrize("one", [*EVERY, *OF_PARAMETERS], ids=named)
@pytest.mark.parametrize("put", [lambda x: None, lambda x: "label", lambda x: True, jnp.shape])
def test_anything_may_stand_in_place_of_its_numbers(one, put):
    leaves, treedef = jax.tree.flatten(one)
    changed = jax.tree.map(put, one)
    assert type(changed) is type(one)
    assert treedef.flatten_up_to(changed) == [put(x) for x in leaves]
    back = jax.tree.unflatten(treedef, leaves)
    assert all(a is b for a, b in zip(jax.tree.leaves(back), leaves, strict=True))
    assert jax.tree.structure(back) == treedef
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(one)]
    assert all(name.startswith(".") for name in names)


@pytest.mark.parametrize("one", [*EVERY, *OF_PARAMETERS], ids=named)
def test_it_is_an_argument_of_nnx_jit(one):
    numbers = nnx.jit(lambda one: jax.tree.leaves(one))(one)
    for found, value in zip(numbers, jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(found, jnp.asarray(value))


def test_nothing_is_no_number():
    with pytest.raises(TypeError, match="Scale takes a number, got None"):
        nni.Scale(None)


def test_lists_are_arrays():
    x = batch(4, 3)
    np.testing.assert_allclose(apply(nni.Mask([1, 0, 1]), x), x * np.array([1, 0, 1]))
    np.testing.assert_allclose(apply(nni.Shift([1.0, 2.0, 3.0]), x), x + np.array([1, 2, 3]))
    np.testing.assert_allclose(
        apply(nni.Mean([1.0, 2.0, 3.0]), x), np.tile([1.0, 2.0, 3.0], (4, 1))
    )
    np.testing.assert_allclose(
        apply(nni.Mean(axis=[0, 1]), x), np.full((4, 3), x.mean()), rtol=1e-5
    )
    assert len(jax.tree.leaves(nni.Mask([1, 0, 1]))) == 1
    for axis in (None, 1.0, "x"):
        with pytest.raises(TypeError, match="Mean takes one axis or several"):
            nni.Mean(axis=axis)


def test_the_mean_over_several_axes_and_in_a_narrow_dtype():
    x = 100.0 + batch(2, 3, 4, 5)
    expected = np.broadcast_to(np.mean(x, (1, 3), keepdims=True), x.shape)
    np.testing.assert_allclose(apply(nni.Mean(axis=(1, -1)), x), expected, rtol=1e-6)
    many = jnp.full((4096, 1), 0.01, jnp.bfloat16)
    np.testing.assert_array_equal(apply(nni.Mean(), many), many)  # in bfloat16 the sum stops at 4


def test_a_seed_may_be_vmapped_over():
    x = batch(4, 3)
    several = jax.jit(jax.vmap(lambda seed: apply(nni.Noise(0.1, seed), x)))(jnp.arange(3))
    for seed, one in enumerate(several):
        np.testing.assert_allclose(one, apply(nni.Noise(0.1, seed), x), rtol=1e-5, atol=1e-6)


def test_masks_and_patches_under_vmap_act_on_each_example_or_on_one_each():
    x, masks = batch(4, 2, 3), np.eye(4, 2) > 0
    run = jax.vmap(lambda x, mask: apply(nni.Mask(mask, axis=0), x))
    np.testing.assert_array_equal(run(x, masks), np.where(masks[..., None], x, 0.0))
    wheres = jnp.eye(2, dtype=bool)[:, :, None]
    found = jax.vmap(lambda where: apply(nni.Patch(7.0, where), x[0]))(wheres)
    np.testing.assert_array_equal(found, np.where(wheres, 7.0, x[0]))


# ---------------------------------------------------------- sites and calls


def test_each_call_of_a_shared_module_is_perturbed_and_has_noise_of_its_own():
    model, x = models.Shared(rngs()), batch(4, 3)
    one = model.first
    found = nni.perturbed(model)({"first": nni.Scale(0.5)}, x)
    np.testing.assert_allclose(found, 0.5 * one(jnp.tanh(0.5 * one(x))), rtol=1e-6)
    capture = []
    recorded = nni.perturbed(model)({"first": nni.Apply(lambda a: capture.append(a) or a)}, x)
    assert recorded.shape == (4, 3)
    assert len(capture) >= 2
    noise = nni.Noise(1.0)
    first = noise.apply_at(jnp.zeros((4, 3)), "first/0/0")
    second = noise.apply_at(jnp.zeros((4, 3)), "first/1/0")
    expected = one(jnp.tanh(one(x) + first)) + second
    np.testing.assert_allclose(nni.perturbed(model)({"first": noise}, x), expected, rtol=1e-5)


def test_a_nan_in_the_gradient_of_the_other_layers_does_not_come_through():
    class Stack(nnx.Module):
        def __init__(self):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def make(rngs):
                return nnx.Linear(3, 3, rngs=rngs)

            self.layers = make(rngs())

        def __call__(self, x):
            run = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return run(self.layers, x)

    model, x = Stack(), jnp.zeros((2, 3))  # all zeros, where the root has no derivative

    def loss(x, key):
        safe = nni.Apply(lambda a: jnp.sqrt(a * a))
        return nni.perturbed(model)({key: [nni.Shift(1.0), safe]}, x).sum()

    found = jax.grad(loss)(x, "layers[1]")
    kernel = model.layers.kernel[...]
    by_hand = lambda x: jnp.abs(x @ kernel[0] @ kernel[1] + 1.0) @ kernel[2]  # noqa: E731
    np.testing.assert_allclose(found, jax.grad(lambda x: by_hand(x).sum())(x), rtol=1e-5)


# -------------------------------------------------------- second derivatives


def test_what_scales_a_gradient_is_itself_learned_through_the_gradient():
    x = jnp.array([0.3, -0.7])

    def gradient_norm(factor, kind):
        return (jax.grad(lambda x: (apply(kind(factor), x) ** 2).sum())(x) ** 2).sum()

    square = float((4 * x * x).sum())  # of the plain gradient
    for kind in (nni.ScaleGradient, nni.ReverseGradient):
        found = jax.grad(gradient_norm)(3.0, kind)
        np.testing.assert_allclose(found, 2 * 3.0 * square, rtol=1e-5)
    found = jax.jit(jax.grad(gradient_norm), static_argnums=1)(0.1, nni.ClipGradient)
    np.testing.assert_allclose(found, 2 * 0.1, rtol=1e-5)
    assert jax.grad(lambda f: apply(nni.ScaleGradient(f), x).sum())(3.0) == 0.0


def test_second_derivatives_through_a_clipped_gradient_that_is_zero_are_finite():
    def penalty(x):
        gradient = jax.grad(lambda x: (nnx.relu(apply(nni.ClipGradient(1.0), x)) ** 2).sum())(x)
        return (gradient**2).sum()

    np.testing.assert_array_equal(jax.grad(penalty)(-jnp.ones(3)), jnp.zeros(3))
    x = 0.05 * jnp.ones(3)  # below the norm
    np.testing.assert_allclose(jax.grad(penalty)(x), 8.0 * x, rtol=1e-5)


def test_gradients_that_are_nan_or_infinite_are_not_made_numbers_of_but_by_stop():
    def gradient(one, ct):
        return jax.vjp(lambda x: apply(one, x), jnp.ones(2))[1](ct)[0]

    bad = jnp.array([jnp.nan, jnp.inf])
    np.testing.assert_array_equal(gradient(nni.StopGradient(), bad), [0.0, 0.0])
    assert np.isnan(gradient(nni.ScaleGradient(0.0), bad)).all()
    assert not np.isfinite(gradient(nni.ClipGradient(1.0), bad)).any()
    for size in (3e38, 1e-37):
        clipped = gradient(nni.ClipGradient(1e-37), jnp.array([size, size]))
        np.testing.assert_allclose(clipped, np.full(2, 1e-37 * 0.5**0.5), rtol=1e-5)
