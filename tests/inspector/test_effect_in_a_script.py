"""`insp.effect` in a script's loop: the effect of what acts, against the model written out."""

from __future__ import annotations

import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_inspector as nni

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


def loss_fn(model: Any, x: Any) -> Any:
    return ((model(x) - 1) ** 2).mean()


@nnx.jit
def train_step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return loss


@pytest.fixture
def training(inspect: Any) -> tuple[Any, Any, Any]:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(4, 5, rngs=rngs), jnp.tanh, nnx.Linear(5, 2, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return model, optimizer, inspect(model, X)


def by_hand(model: Any, one: Any) -> float:
    """Without a call of the model, which the loop would perturb."""
    first, last = model.layers[0], model.layers[2]
    hidden = X @ first.kernel[...] + first.bias[...]
    clean, moved = (
        jnp.tanh(x) @ last.kernel[...] + last.bias[...]
        for x in (hidden, one.apply_at(hidden, "layers/0/0/0"))
    )
    return float(np.linalg.norm(moved - clean) / np.linalg.norm(clean))


@pytest.mark.parametrize(
    "one", [nni.Scale(0.5), nni.Noise(0.5, seed=3), nni.Zero().only([1]), nni.Shift(1.0, 0.5)]
)
@pytest.mark.parametrize("when", [0, 2])
def test_it_is_that_of_the_model_as_it_is(training: Any, one: Any, when: int):
    model, optimizer, insp = training
    for step, batch in enumerate(insp.watch([X] * 5, every=1)):
        if step == when:
            handle = insp.perturb("layers/0", one)
        if step < when:
            assert insp.effect is None
        else:
            effect: Any = insp.effect
            np.testing.assert_allclose(effect.output_change, by_hand(model, one), rtol=1e-4)
            assert effect.source == f"the example, at step {max(step - 1, 0)}"
        train_step(model, optimizer, batch)
    np.testing.assert_allclose(insp.effect.output_change, by_hand(model, one), rtol=1e-4)  # type: ignore[union-attr]
    handle.enabled = False
    assert insp.effect is None


def test_after_a_loop_in_which_nobody_asked(training: Any):
    model, optimizer, insp = training
    insp.perturb("layers/0", nni.Scale(0.5))
    for batch in insp.watch([X] * 3, every=1):
        train_step(model, optimizer, batch)
    passes = len(insp.recording)
    change = insp.effect.output_change  # type: ignore[union-attr]
    np.testing.assert_allclose(change, by_hand(model, nni.Scale(0.5)), rtol=1e-4)
    assert len(insp.recording) == passes, "reading it records nothing"


def test_another_handle_of_the_same_kind_has_its_own(training: Any):
    model, optimizer, insp = training
    handle = insp.perturb("layers/0", nni.Scale(0.5))
    for factor, batch in zip((0.5, 0.1, 2.0), insp.watch([X] * 3, every=1), strict=True):
        handle.perturbation = nni.Scale(factor)
        change = insp.effect.output_change  # type: ignore[union-attr]
        np.testing.assert_allclose(change, by_hand(model, nni.Scale(factor)), rtol=1e-4)
        train_step(model, optimizer, batch)


def test_from_another_thread_it_waits_for_the_loop(training: Any):
    model, optimizer, insp = training
    insp.perturb("layers/0", nni.Noise(0.5))
    found: list[Any] = []
    for batch in insp.watch([X], every=1):
        reader = threading.Thread(target=lambda: found.append(insp.effect))
        reader.start()
        reader.join()
        train_step(model, optimizer, batch)
    assert found == [None]
