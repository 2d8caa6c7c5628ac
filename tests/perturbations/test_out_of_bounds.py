"""A head, unit or example that does not exist raises wherever the perturbation acts."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni

H, G, D = 4, 2, 3


class Attention(nnx.Module):
    """Four heads of queries share two of keys and values."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.q = nnx.LinearGeneral(8, (H, D), rngs=rngs)
        self.k, self.v = (nnx.LinearGeneral(8, (G, D), rngs=rngs) for _ in range(2))
        self.out = nnx.LinearGeneral((H, D), 8, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(jax.nn.dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Net(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.a, self.b = nnx.Linear(3, width, rngs=rngs), nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.b(jnp.tanh(self.a(x)))


def called(model: Any, x: Any) -> Any:
    return model(x)


def summed(model: Any, x: Any) -> Any:
    return (model(x) ** 2).sum()


WAYS = {
    "eager": called,
    "jit": nnx.jit(called),
    "jit in jit": nnx.jit(lambda m, x: nnx.jit(called)(m, x)),
    "gradient": nnx.jit(nnx.grad(summed)),
    "scan": nnx.jit(lambda m, x: jax.lax.scan(lambda c, _: (c + summed(m, x), None), 0.0, x)[0]),
    "remat": nnx.jit(nnx.grad(lambda m, x: nnx.remat(summed)(m, x))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("site", "good", "bad"),
    [
        ("v", nni.Zero().only([1], axis=-2), nni.Zero().only([2], axis=-2)),
        ("v", nni.Zero().only([-2], axis=-2), nni.Zero().only([-3], axis=-2)),
        ("v", nni.Zero(at="input").only([7]), nni.Zero(at="input").only([8])),
        ("@attention", nni.Zero().only([3], axis=-3), nni.Zero().only([4], axis=-3)),
        ("v", nni.Zero().only(example=1), nni.Zero().only(example=2)),
        ("v", nni.StopGradient().only(example=0), nni.StopGradient().only(example=5)),
        (
            "v",
            nni.Zero().only([1], axis=-2).only(example=0),
            nni.Zero().only([2], axis=-2).only(example=0),
        ),
    ],
)
def test_one_that_does_not_exist_raises_also_after_one_that_does(
    way: str, site: str, good: Any, bad: Any
):
    model, x = Attention(rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (2, 5, 8))
    call = WAYS[way]
    for _ in range(2):  # also when both programs are compiled
        with nni.perturb(site, good):
            call(model, x)
        with (
            pytest.raises(ValueError, match=r"so there is no (unit|example)"),
            nni.perturb(site, bad),
        ):
            call(model, x)


def test_each_head_that_exists_compiles_nothing_and_is_the_one_written_by_hand():
    model, x, traced = Net(4, rngs=nnx.Rngs(0)), jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), []
    forward = nnx.jit(lambda m, x: (traced.append(1), m(x))[1])
    for unit in (0, 3, -1, 1):
        with nni.perturb("a", nni.Zero().only([unit])):
            found = forward(model, x)
        hidden = np.array(model.a(x))
        hidden[:, unit] = 0
        np.testing.assert_allclose(found, model.b(jnp.tanh(hidden)), rtol=1e-5)
    assert len(traced) == 1


def test_a_wider_model_has_units_that_the_narrower_one_lacks():
    x, traced = jnp.ones((2, 3)), []
    forward = nnx.jit(lambda m, x: (traced.append(1), m(x))[1])
    narrow, wide = Net(2, rngs=nnx.Rngs(0)), Net(6, rngs=nnx.Rngs(1))
    for model, units in ((narrow, (0, 1)), (wide, (1, 5, 4, 2)), (narrow, (1,)), (wide, (5,))):
        for unit in units:
            with nni.perturb("a", nni.Zero().only([unit])):
                found = forward(model, x)
            hidden = np.array(model.a(x))
            hidden[:, unit] = 0
            np.testing.assert_allclose(found, model.b(jnp.tanh(hidden)), rtol=1e-5)
    assert len(traced) == 3  # the wide one once more, for the units that only it has
    with (
        pytest.raises(ValueError, match=r"float32\[2,2\]: it has 2 units along axis -1"),
        nni.perturb("a", nni.Zero().only([5])),
    ):
        forward(narrow, x)
    with (
        pytest.raises(ValueError, match=r"float32\[2,6\]: it has 6 units along axis -1"),
        nni.perturb("a", nni.Zero().only([6])),
    ):
        forward(wide, x)


def test_a_smaller_batch_has_fewer_examples():
    model = Net(4, rngs=nnx.Rngs(0))
    forward, one = nnx.jit(called), nni.Scale(2.0).only(example=3)
    with nni.perturb("a", one):
        forward(model, jnp.ones((4, 3)))
    with pytest.raises(ValueError, match="there is no example 3"), nni.perturb("a", one):
        forward(model, jnp.ones((2, 3)))


def test_under_vmap_an_example_is_what_the_module_sees():
    model, x = Net(4, rngs=nnx.Rngs(0)), jnp.ones((6, 3))
    forward = nnx.jit(nnx.vmap(called, in_axes=(None, 0)))
    with nni.perturb("a", nni.Zero().only([3])):
        forward(model, x)
    for bad in (nni.Zero().only([4]), nni.Zero().only(example=4), nni.Zero().only([0], axis=1)):
        with pytest.raises(ValueError, match=r"float32\[4\]"), nni.perturb("a", bad):
            forward(model, x)


def test_a_region_within_a_trace():
    model, x = Net(4, rngs=nnx.Rngs(0)), jnp.ones((2, 3))

    def inside(unit: int) -> Any:
        def f(model: Any, x: Any) -> Any:
            with nni.perturb("a", nni.Zero().only([unit])):
                return model(x)

        return nnx.jit(f)

    inside(3)(model, x)
    with pytest.raises(ValueError, match="there is no unit 4"):
        inside(4)(model, x)


def test_a_traced_index_raises_where_it_is_known_and_is_nan_where_it_is_not():
    model, x = Net(4, rngs=nnx.Rngs(0)), jnp.ones((2, 3))

    def without(unit: Any) -> Any:
        return nni.perturbed(model)({"a": nni.Zero().only(unit)}, x)

    assert np.isfinite(jax.vmap(without)(jnp.arange(-4, 4))).all()
    with pytest.raises(ValueError, match="it has 4 units along axis -1, so there is no unit 4"):
        jax.vmap(without)(jnp.arange(5))
    found = np.asarray(jax.jit(jax.vmap(without))(jnp.array([0, 3, 4, -5, -4])))
    assert np.isnan(found).any((1, 2)).tolist() == [False, False, True, True, False]

    def pruned(column: Any) -> Any:
        return nni.perturbed(model)({"a/kernel": nni.PruneMask(False).only(column)}, x)

    found = np.asarray(jax.jit(jax.vmap(pruned))(jnp.array([3, 4])))
    assert np.isnan(found).any((1, 2)).tolist() == [False, True]
    with pytest.raises(ValueError, match="there is no unit 4"):
        jax.vmap(pruned)(jnp.array([3, 4]))


def test_an_inspector_refuses_another_unit_and_a_batch_that_lacks_the_example():
    model = Net(4, rngs=nnx.Rngs(0))
    insp = nni.Inspector(model, jnp.ones((4, 3)), display=False)
    handle = insp.perturb("a", nni.Zero().only([1], example=3))
    assert handle.perturbation.units.tolist() == [1]
    for bad in (nni.Zero().only([4], example=3), nni.Zero().only([1], example=4)):
        with pytest.raises(ValueError, match=r"float32\[4,4\]: it has 4 (unit|example)s"):
            handle.perturbation = bad
    insp.run(jnp.ones((5, 3)))
    with pytest.raises(ValueError, match="it has 2 examples along axis 0, so there is no example"):
        insp.run(jnp.ones((2, 3)))
    handle.enabled = False
    np.testing.assert_allclose(insp.run(jnp.ones((2, 3))), model(jnp.ones((2, 3))), rtol=1e-6)
    pruned = insp.perturb("a/kernel", nni.PruneMask(False).only([3]))
    with pytest.raises(ValueError, match="there is no unit 4"):
        pruned.perturbation = nni.PruneMask(False).only([4])
    insp.close()


@pytest.mark.parametrize("jit", [True, False])
def test_a_loop_goes_on_and_its_handle_says_what_is_not_there(jit: bool):
    model, f = Net(4, rngs=nnx.Rngs(0)), nnx.jit(called) if jit else called
    insp = nni.Inspector(model, jnp.ones((4, 3)), display=False)
    handle = insp.perturb("a", nni.Zero().only([1], example=3))
    no_such = "it has 2 examples along axis 0, so there is no example 3"
    for size, why in ((4, ""), (2, no_such)):
        x = jnp.linspace(-1.0, 1.0, 3 * size).reshape(size, 3)
        warns = pytest.warns(nni.InspectorWarning, match=no_such)
        with warns if why else contextlib.nullcontext():
            for batch in insp.watch([x] * 3, every=1):
                found = f(model, batch)
        assert why in handle.not_acting
        assert bool(handle.not_acting) == bool(why)
        hidden = np.array(model.a(x))
        if not why:
            hidden[3, 1] = 0
        np.testing.assert_allclose(found, model.b(jnp.tanh(hidden)), rtol=1e-5)
    with pytest.raises(ValueError, match="there is no unit 9"):
        handle.perturbation = nni.Zero().only([9], example=3)
    insp.close()
