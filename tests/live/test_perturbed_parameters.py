"""Parameters perturbed in the user's own program, against `nni.perturbed` and the bare loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import Stacked
from training import loss_of

import nnx_inspector as nni

X = jax.random.normal(jax.random.key(3), (6, 3))
PRUNED = nni.PruneMask(np.array([1.0, 0.0, 1.0, 0.0], np.float32))


class Net(nnx.Module):
    """A block that is jitted by itself, one that is recomputed, and statistics."""

    def __init__(self, rngs):
        self.a = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.b = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        h = nnx.jit(lambda layer, x: layer(x))(self.a, x)
        return nnx.remat(lambda layer, x: layer(x))(self.b, self.norm(h))


def perturbed_loss(model, x, what):
    return (nni.perturbed(model)(what, x) ** 2).mean()


def numbers(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def assert_alike(a, b):
    for x, y in zip(numbers(a), numbers(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("one", [PRUNED, nni.ParameterNoise(0.3, seed=7)], ids=["mask", "noise"])
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_a_watched_step_with_perturbed_parameters_is_the_hand_written_one(one, jit):
    model, twin = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    step = nnx.value_and_grad(loss_of)
    step = nnx.jit(step) if jit else step
    insp = nni.Inspector(model, X, display=False)
    before = numbers(nnx.state(model, nnx.Param))
    handle = insp.perturb("a", one)
    for _ in insp.watch(range(2), every=1):
        found = step(model, X)
        expected = nnx.value_and_grad(perturbed_loss)(twin, X, {"a": one})
        assert_alike(found, expected)
    assert handle.not_acting == ""
    for a, b in zip(numbers(nnx.state(model, nnx.Param)), before, strict=True):
        np.testing.assert_array_equal(a, b, err_msg="the model keeps its own")
    assert_alike(nnx.state(model, nnx.BatchStat), nnx.state(twin, nnx.BatchStat))
    passes = [one for one in insp.recording.passes if one.kind == "watch"]
    assert [one.perturbed for one in passes] == [True, True]
    insp.close()


WITHIN = {
    "vmap": lambda m, x: jax.vmap(lambda p: m(p))(x),
    "grad": lambda m, x: jax.grad(lambda x: (m(x) ** 2).sum())(x),
    "jvp": lambda m, x: jax.jvp(m, (x,), (x,))[1],
    "linearize": lambda m, x: jax.linearize(m, x)[1](x),
    "checkpoint": lambda m, x: jax.checkpoint(lambda x: m(x))(x),
    "map": lambda m, x: jax.lax.map(lambda p: m(p), x),
    "scan": lambda m, x: jax.lax.scan(lambda c, p: (c, m(p)), 0, x)[1],
    "jit": lambda m, x: jax.jit(lambda x: m(x))(x),
}
"""A model that a function takes from around it, which flax lets nobody change in there."""


@pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
@pytest.mark.parametrize("removed", [False, True], ids=["perturbed", "removed"])
def test_a_model_from_around_a_transform_is_perturbed_there(within, removed):
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    step = nnx.jit(nnx.value_and_grad(lambda m, x: (within(m, x) ** 2).mean()))
    insp = nni.Inspector(model, X, display=False)
    expected = step(model, X) if removed else None
    handle = insp.perturb("kernel", PRUNED)
    if removed:
        handle.remove()
    for _ in insp.watch(range(2), every=2):
        found = step(model, X)
    assert handle.not_acting == ""
    insp.close()
    if not removed:
        model.kernel[...] = model.kernel[...] * PRUNED.mask
        expected = step(model, X)
        kernel = expected[1]["kernel"]  # of the pruned model: its gradient passes the mask too
        kernel[...] = kernel[...] * PRUNED.mask
    assert_alike(found, expected)


def test_switching_and_tuning_compile_nothing_and_return_exactly():
    model, traces = Net(nnx.Rngs(0)), []

    @nnx.jit
    def step(model, x):
        traces.append(1)
        return loss_of(model, x)

    insp = nni.Inspector(model, X, display=False)
    handle = insp.perturb("**", nni.ParameterNoise(0.5))
    losses = []
    for i in insp.watch(range(4), every=1):
        losses.append(float(step(model, X)))
        handle.strength = [0.1, 0.0, 0.5, 0.5][i]
        handle.enabled = i != 2
    assert len(traces) == 1
    assert losses[0] != losses[1] != losses[2]
    assert losses[2] == losses[3], "a deviation of 0 is no perturbation"
    insp.close()


def test_one_layer_of_a_stack():
    model = Stacked(nnx.Rngs(0))
    x = jnp.ones((2, 3))
    insp = nni.Inspector(model, x, display=False)
    site = next(c.site for c in insp.trace.calls if c.stacked)
    what = {f"{site}[1]": nni.ParameterNoise(1.0)}
    handle = insp.perturb(f"{site}[1]", nni.ParameterNoise(1.0))
    expected = nni.perturbed(model)(what, x)
    for _ in insp.watch(range(1), every=1):
        found = nnx.jit(lambda m, x: m(x))(model, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert not np.allclose(found, model(x))
    assert handle.not_acting == ""
    insp.close()


def test_an_error_in_the_call_leaves_the_model_its_parameters():
    class Fragile(Net):
        broken = False

        def __call__(self, x):
            y = super().__call__(x)
            if type(self).broken:
                raise ZeroDivisionError("mine")
            return y

    model = Fragile(nnx.Rngs(0))
    kernel = model.a.kernel.get_raw_value()
    insp = nni.Inspector(model, X, display=False)
    insp.perturb("a", PRUNED)
    Fragile.broken = True

    def train():
        for _ in insp.watch(range(1), every=1):
            model(X)

    with pytest.raises(ZeroDivisionError, match="mine"):
        train()
    assert model.a.kernel.get_raw_value() is kernel
    insp.close()
