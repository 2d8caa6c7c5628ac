"""Parameters in a record: their values, gradients and updates, against NumPy and optax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from models import batch, rngs

from nnx_inspector.records.capture import capture, value_and_grad


def loss(model, x):
    return (model(x) ** 2).sum()


def test_parameters_are_by_path_with_their_figures():
    model = models.MLP(rngs())
    _, record = capture(model, parameters=True)(batch(4, 3))
    assert list(record.parameters) == ["down/bias", "down/kernel", "up/bias", "up/kernel"]
    kernel = np.asarray(model.up.kernel[...], np.float64)
    found = record.parameters["up/kernel"]
    np.testing.assert_allclose(found.value.mean, kernel.mean(), rtol=1e-5)
    np.testing.assert_allclose(found.value.norm, np.linalg.norm(kernel), rtol=1e-6)
    assert found.value.size == kernel.size
    assert found.gradient is None
    assert found.update is None
    assert found.update_ratio is None


def test_without_being_asked_there_are_none():
    model, x = models.MLP(rngs()), batch(4, 3)
    assert capture(model)(x)[1].parameters == {}
    assert value_and_grad(loss)(model, x)[0][1].parameters == {}


def test_gradients_are_those_of_nnx_value_and_grad():
    model, x = models.MLP(rngs()), batch(4, 3)
    (_, record), grads = value_and_grad(loss, parameters=True)(model, x)
    for layer in ("up", "down"):
        for name in ("kernel", "bias"):
            gradient = np.asarray(grads[layer][name][...], np.float64)
            found = record.parameters[f"{layer}/{name}"].gradient
            np.testing.assert_allclose(found.norm, np.linalg.norm(gradient), rtol=1e-6)
            np.testing.assert_allclose(found.max, gradient.max(), rtol=1e-6)


TRANSFORMS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(1e-2),
    "adamw with a schedule": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10))
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_updates_are_those_that_the_optimizer_makes(name):
    model, x = models.MLP(rngs()), batch(4, 3)
    optimizer = nnx.Optimizer(model, TRANSFORMS[name], wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        (_, record), grads = value_and_grad(loss, optimizer=optimizer)(model, x)
        optimizer.update(model, grads)
        return record

    for steps in (1, 2):
        before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        record = step(model, optimizer, x)
        after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        assert int(optimizer.step[...]) == steps, "looking made no step"
        for layer in ("up", "down"):
            old, new = (np.asarray(p[layer]["kernel"], np.float64) for p in (before, after))
            found = record.parameters[f"{layer}/kernel"]
            np.testing.assert_allclose(found.value.norm, np.linalg.norm(old), rtol=1e-6)
            np.testing.assert_allclose(found.update.norm, np.linalg.norm(new - old), rtol=1e-4)
            ratio = np.linalg.norm(new - old) / np.linalg.norm(old)
            np.testing.assert_allclose(found.update_ratio, ratio, rtol=1e-4)


def test_only_what_the_optimizer_updates_has_updates():
    model, x = models.MLP(rngs()), batch(4, 3)
    wrt = nnx.All(nnx.Param, nnx.PathContains("up"))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=wrt)
    graded = value_and_grad(loss, argnums=nnx.DiffState(0, wrt), optimizer=optimizer)
    (_, record), _ = graded(model, x)
    assert record.parameters["up/kernel"].update_ratio > 0
    assert record.parameters["down/kernel"].update is None
    assert record.parameters["down/kernel"].gradient is None
    assert record.parameters["down/kernel"].value.size == 4 * 2


def test_a_parameter_of_zeros_has_no_ratio_and_a_shared_one_is_there_once():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(3, 3, rngs=rngs)
            self.b = self.a

        def __call__(self, x):
            return self.b(self.a(x))

    model, x = Tied(rngs()), batch(4, 3)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    (_, record), _ = value_and_grad(loss, optimizer=optimizer)(model, x)
    assert list(record.parameters) == ["a/bias", "a/kernel"]
    assert record.parameters["a/bias"].value.norm == 0
    assert record.parameters["a/bias"].update_ratio is None
    assert record.parameters["a/bias"].update.norm > 0


def test_several_modules_begin_with_their_arguments_names_and_the_optimizer_has_one():
    a, b, x = models.MLP(rngs()), models.MLP(rngs()), batch(4, 3)
    optimizer = nnx.Optimizer(a, optax.sgd(0.1), wrt=nnx.Param)

    def both(student, teacher, x):
        return ((student(x) - teacher(x)) ** 2).mean()

    (_, record), _ = value_and_grad(both, optimizer=optimizer)(a, b, x)
    assert record.parameters["student/up/kernel"].update_ratio is not None
    assert record.parameters["teacher/up/kernel"].gradient is None
    with pytest.raises(ValueError, match=r"one differentiated argument that is a module, got 2"):
        value_and_grad(both, argnums=(0, 1), optimizer=optimizer)(a, b, x)


def test_a_stacked_module_and_a_reference_are_measured():
    class Scaled(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.full((3,), 2.0), ref=True)

        def __call__(self, x):
            return x * self.scale[...]

    (_, record), _ = value_and_grad(loss, parameters=True)(Scaled(), batch(4, 3))
    assert record.parameters["scale"].value.mean == 2.0
    assert record.parameters["scale"].gradient.size == 3


def test_the_frame_holds_parameters_after_the_sites():
    model, x = models.MLP(rngs()), batch(4, 3)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    (_, record), _ = value_and_grad(loss, optimizer=optimizer)(model, x)
    frame = record.to_frame()
    kernel = frame[(frame.site == "up") & (frame.array == "kernel")].set_index("quantity")
    assert list(kernel.index) == ["parameter", "parameter gradient", "update"]
    np.testing.assert_allclose(
        kernel.norm["update"], 0.1 * kernel.norm["parameter gradient"], rtol=1e-5
    )
