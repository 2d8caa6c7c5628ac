"""Modules within a function that has a derivative of its own, in a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni

X = jax.random.normal(jax.random.key(0), (8, 3))
WHY = "'f': it is called inside a custom_vjp_call equation"
IGNORED = "ignore:.*could not be attributed:nnx_inspector.errors.InspectorWarning"
ACTS = "Scale on 'f' is not acting: it is called inside a custom_vjp_call equation"


class Recomputing(nnx.Module):
    """A reversible or memory-saving layer: its backward pass calls `f` again."""

    def __init__(self, rngs):
        self.i, self.f = (nnx.Linear(3, 3, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        graphdef, params = nnx.split(self.f)

        def forward(params, x):
            return jnp.tanh(nnx.merge(graphdef, params)(x))

        @jax.custom_vjp
        def layer(params, x):
            return forward(params, x)

        def backward(kept, slope):
            return jax.vjp(forward, *kept)[1](slope)

        layer.defvjp(lambda params, x: (forward(params, x), (params, x)), backward)
        return layer(params, self.i(x))


def gradient(model, x):
    return nnx.value_and_grad(lambda model: (model(x) ** 2).sum())(model)


def batches(insp, step):
    return [step(insp.model, X) for _ in insp.watch(range(4), every=2)]


def region(insp, step):
    with insp.watch(every=2):
        return [step(insp.model, X) for _ in range(4)]


def ticked(insp, step):
    found = []
    with insp.watch(every=2):
        for _ in range(4):
            insp.tick()
            found.append(step(insp.model, X))
    return found


@pytest.mark.filterwarnings(IGNORED)  # `f` is a clone in the forward pass
@pytest.mark.parametrize("loop", [batches, region, ticked])
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_a_second_run_for_the_gradient_is_neither_perturbed_nor_measured(loop, jit):
    """The forward pass cannot be: the gradient was that of neither model."""
    model, step = Recomputing(nnx.Rngs(0)), nnx.jit(gradient) if jit else gradient
    expected = step(model, X)
    insp = nni.Inspector(model, X, display=False)
    handle = insp.perturb("f", nni.Scale(0.5))
    with pytest.warns(nni.InspectorWarning, match=WHY), pytest.warns(match=ACTS):
        found = loop(insp, step)
    for one in found:
        for a, b in zip(*map(jax.tree.leaves, (one, expected)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    assert "custom_vjp" in handle.not_acting
    passes = [one for one in insp.recording.passes if one.kind == "watch"]
    assert [one.step for one in passes] == [0, 2]
    for one in passes:
        assert one.summary("f") is None
        assert one.summary("i").size == X.size
        norm = np.linalg.norm(np.asarray(model.i(X), np.float64))
        np.testing.assert_allclose(one.summary("i").norm, norm, rtol=1e-5)
    insp.close()
