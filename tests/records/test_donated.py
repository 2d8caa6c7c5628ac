"""A model whose arrays a training step has donated: every request gives the same error text."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import nnx_inspector as nni

X = jnp.ones((2, 3))


def loss_fn(model, x):
    return (model(x) ** 2).mean()


@pytest.fixture
def taken():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    jax.tree.map(lambda array: array.delete(), nnx.state(model))
    return model


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: nni.capture(model)(X),
        lambda model: nni.capture(loss_fn)(model, X),
        lambda model: nni.value_and_grad(loss_fn)(model, X),
        lambda model: nni.value_and_grad(loss_fn, optimizer=None, parameters=True)(model, X),
    ],
    ids=["capture", "capture of a function", "value_and_grad", "with parameters"],
)
def test_a_donated_model_is_told_with_the_way_out(ask, taken):
    with pytest.raises(nni.InspectorError, match=r"The model cannot be read.*insp\.update"):
        ask(taken)


def test_a_donated_argument_is_not_said_to_be_the_model():
    x = jnp.ones((2, 3))
    x.delete()
    with pytest.raises(nni.InspectorError, match=r"the arguments.*x\.copy\(\)") as told:
        nni.capture(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))(x)
    assert "The model" not in str(told.value)
