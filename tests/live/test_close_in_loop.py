"""An inspector that is closed within its watched loop keeps what it has measured until then."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import TwoLayers

import nnx_inspector as nni
from nnx_inspector.recordings.tree_rows import PARAMETER_QUANTITIES

pytestmark = pytest.mark.usefixtures("leaves_nothing")
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
STEPS = 7


@nnx.jit
def step(model, x):
    grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))


def numbers(insp, way, every):
    """The numbers of the steps of a watched loop."""
    if way == "batches":
        yield from insp.watch(range(STEPS), every=every)
        return
    with insp.watch(every=every):
        for number in range(STEPS):
            if way == "ticks":
                insp.tick()
            yield number


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("way", ["batches", "ticks", "passes"])
@pytest.mark.parametrize("after", [False, True], ids=["before_the_call", "after_the_call"])
def test_every_measured_step_before_the_end_is_recorded(way, every, after):
    bare, norms = TwoLayers(nnx.Rngs(0)), []
    for _ in range(STEPS):
        norms.append(float(jnp.linalg.norm(bare(X))))
        step(bare, X)
    model = TwoLayers(nnx.Rngs(0))
    insp = nni.Inspector(model, X, display=False)
    for number in numbers(insp, way, every):
        if number == 4 and not after:
            insp.close()
        step(model, X)
        insp.metrics(step=number)
        if number == 4 and after:
            insp.close()
    wanted = list(range(0, 4 + after, every))
    assert [one.step for one in insp.recording.passes] == wanted
    with pytest.raises(nni.InspectorError, match="was closed"):  # the loop is over
        insp.metrics(step=STEPS)
    for one in insp.recording.passes:
        assert {q for _, q in one.keys} == {"output", "gradient", *PARAMETER_QUANTITIES}
        np.testing.assert_allclose(one.summary("").norm, norms[one.step], rtol=1e-4)
    for found, expected in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(bare)), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_closing_from_a_callback_of_the_program_ends():
    model = TwoLayers(nnx.Rngs(0))
    insp = nni.Inspector(model, X, display=False)
    closed = threading.Event()

    def close(_):
        insp.close()
        closed.set()

    @nnx.jit
    def closing(model, x, number):
        jax.lax.cond(number == 2, lambda: jax.debug.callback(close, number), lambda: None)
        return model(x)

    for number in insp.watch(range(4), every=1):
        closing(model, X, jnp.int32(number))
    jax.effects_barrier()
    assert closed.is_set()
    assert insp.recording.steps[:1] == [0]
