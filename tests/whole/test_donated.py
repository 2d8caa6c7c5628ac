"""What reads a model whose arrays a step has taken says so in one sentence, with the way out."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_inspector as nni

X = jnp.ones((8, 4))


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.a, self.b = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.b(jnp.tanh(self.a(x)))


def loss_fn(model: Any, x: Any) -> Any:
    return ((model(x) - 1) ** 2).mean()


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return loss


def trained() -> tuple[nnx.Module, nnx.Module, nnx.Module]:
    """A model after one step, a copy that shared its arrays, and one with arrays of its own."""
    model = Net(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    shared, own = nnx.clone(model), nnx.clone(model, arrays=True)
    step(model, optimizer, X)
    return model, shared, own


def inspected(model: Any) -> Any:
    insp = nni.Inspector(Net(rngs=nnx.Rngs(0)), X, display=False)
    insp.run(X)
    nnx.update(insp.model, nnx.state(model))
    return insp


READERS: dict[str, Callable[[Any, Any], Any]] = {
    "compare_weights": lambda model, other: nni.compare_weights(model, other),
    "sweep": lambda model, _: nni.sweep(model, loss_fn, X, progress=False),
    "attribute": lambda model, _: nni.attribute(model, X),
    "top_examples": lambda model, _: nni.top_examples(model, [X], "a", progress=False),
    "perturbed": lambda model, _: nni.perturbed(loss_fn)({"a": nni.Zero()}, model, X),
    "perturbed parameters": lambda model, _: nni.perturbed(model)(
        {"a": nni.ParameterNoise(0.1)}, X
    ),
    "capture": lambda model, _: nni.capture(model)(X),
    "value_and_grad": lambda model, _: nni.value_and_grad(loss_fn)(model, X),
    "first_nan": lambda model, _: nni.first_nan(model)(X),
    "Inspector": lambda model, _: nni.Inspector(model, X, display=False).close(),
    "update": lambda model, _: inspected(Net(rngs=nnx.Rngs(1))).update(nnx.state(model)),
    "insp.run": lambda model, _: inspected(model).run(X),
    "insp.step": lambda model, _: inspected(model).step(loss_fn, X),
    "insp.units": lambda model, _: inspected(model).units("a"),
    "insp.parameters": lambda model, _: inspected(model).parameters("a"),
    "insp.attribute": lambda model, _: inspected(model).attribute(),
    "insp.sweep": lambda model, _: inspected(model).sweep(progress=False),
}


@pytest.mark.parametrize("reader", READERS)
def test_one_sentence_names_the_arrays_the_step_and_the_copy(reader: str):
    model, shared, own = trained()
    words = r"cannot be read now: a training step has taken the model's arrays \('(a/|)bias' and "
    way_out = re.escape("nnx.clone(model, arrays=True).")
    with pytest.raises(nni.InspectorError, match=f"{words}.*{way_out}$"):
        READERS[reader](shared, model)
    READERS[reader](own, model)  # and one with arrays of its own is read


def test_a_donated_argument_is_not_taken_for_the_model():
    model, x = Net(rngs=nnx.Rngs(0)), jnp.ones((8, 4))
    jax.jit(lambda x: x * 2, donate_argnums=0)(x)
    for read in (
        lambda: nni.attribute(model, x),
        lambda: nni.capture(model)(x),
        lambda: nni.sweep(model, loss_fn, x, progress=False),
    ):
        with pytest.raises(nni.InspectorError, match=r"^Array 1 of the arguments, float32\[8,4\]"):
            read()


def test_the_copy_of_the_guide_stays():
    model, _, own = trained()
    frame = nni.compare_weights(own, model)
    assert len(frame) == 4
    assert np.isfinite(frame["distance"]).all()
    assert (frame["distance"] > 0).all()
