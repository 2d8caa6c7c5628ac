"""`nni.perturb` of one layer of a stack: what `nni.perturbed` gives, in every kind of call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni

N, D = 3, 6


@nnx.split_rngs(splits=N)
@nnx.vmap(axis_size=N)
def stack(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(D, D, rngs=rngs)


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs, remat: bool = False):
        self.layers, self.remat = stack(rngs), remat

    def __call__(self, x: Any) -> Any:
        def body(x: Any, layer: Any) -> Any:
            return x + jnp.tanh(layer(x))

        body = nnx.remat(body) if self.remat else body
        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class Listed(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(N)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(x)
        return x


X = jnp.linspace(-1.0, 1.0, 4 * D).reshape(4, D)


def called(model: Any, x: Any) -> Any:
    return model(x)


def loss(model: Any, x: Any) -> Any:
    return (model(x) ** 2).sum()


WAYS = {
    "eager": (called, called),
    "jit": (nnx.jit(called), called),
    "vmap": (nnx.jit(nnx.vmap(called, in_axes=(None, 0))), called),
    "loss": (nnx.jit(loss), loss),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("key", "one"),
    [
        ("layers[2]", nni.Zero()),
        ("layers[-3]", nni.Scale(2.0)),
        ("layers[1]", nni.Zero(at="input")),
        ("layers[1]", nni.Zero().only([0, 3])),
        ("layers[0]@dot_general", nni.Zero()),
    ],
)
def test_it_acts_as_perturbed_does(way: str, remat: bool, given: bool, key: str, one: Any):
    model = Net(rngs=nnx.Rngs(0), remat=remat)
    f, plain = WAYS[way]
    clean = f(model, X)  # compiled long before
    with nni.perturb(key, one, model=model if given else None):
        found = f(model, X)
    wanted = nni.perturbed(plain)({key: one}, model, X)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(found) - np.asarray(clean)).max() > 1e-3
    np.testing.assert_array_equal(f(model, X), clean)


def test_gradients_and_other_numbers_and_nested_regions():
    model, traced = Net(rngs=nnx.Rngs(0)), []
    grad = nnx.jit(nnx.grad(lambda m, x: (traced.append(1), loss(m, x))[1]))
    for factor in (0.5, 2.0):
        with nni.perturb("layers[1]", nni.Scale(factor)):
            found = grad(model, X)
        wanted = nnx.grad(
            lambda m, x, k=factor: nni.perturbed(loss)({"layers[1]": nni.Scale(k)}, m, x)
        )(model, X)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, wanted)
    assert len(traced) == 1
    with nni.perturb("layers[0]", nni.Zero()), nni.perturb("layers[2]", nni.Scale(3.0)):
        found = nnx.jit(called)(model, X)
    both = {"layers[0]": nni.Zero(), "layers[2]": nni.Scale(3.0)}
    np.testing.assert_allclose(found, nni.perturbed(model)(both, X), rtol=1e-5)


def test_members_of_an_ensemble():
    ensemble = stack(nnx.Rngs(1))

    def forward(model: Any, x: Any) -> Any:
        return nnx.vmap(called, in_axes=(0, None))(model, x)

    clean = np.asarray(forward(ensemble, X))
    for f in (forward, nnx.jit(forward)):
        with nni.perturb("[1]", nni.Zero(), model=ensemble):
            found = np.asarray(f(ensemble, X))
        np.testing.assert_allclose(found[[0, 2]], clean[[0, 2]], rtol=1e-6)
        assert not found[1].any()


def test_a_record_shows_it():
    model = Net(rngs=nnx.Rngs(0))
    with nni.perturb("layers[2]", nni.Zero()):
        _, record = nni.capture(model)(X)
    assert record["layers"].row(2).output.zeros == X.size
    assert record["layers"].row(1).output.zeros == 0


def test_a_layer_or_unit_that_does_not_exist_raises():
    model, f = Net(rngs=nnx.Rngs(0)), nnx.jit(called)
    with nni.perturb("layers[2]", nni.Zero().only([1])):
        f(model, X)
    for key, one, words in (
        ("layers[3]", nni.Zero(), "has 3 layers; there is no layer 3"),
        ("layers[1][0]", nni.Zero(), "within 1 scans"),
        ("layers[2]", nni.Zero().only([6]), "it has 6 units along axis -1, so there is no unit 6"),
        ("layer[2]", nni.Zero(), "closest"),
    ):
        with pytest.raises(ValueError, match=words), nni.perturb(key, one):
            f(model, X)


def test_what_has_no_loop_over_layers_in_its_call_is_told_the_way():
    listed, model = Listed(rngs=nnx.Rngs(0)), Net(rngs=nnx.Rngs(0))
    with (
        pytest.raises(ValueError, match=r"is a list of modules\. Name one of them by its path"),
        nni.perturb("layers[2]", nni.Zero()),
    ):
        listed(X)

    def outside(model: Any, x: Any) -> Any:
        body = lambda x, layer: x + layer(x)  # noqa: E731
        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model.layers)

    with (
        pytest.raises(nni.InspectorError, match=r"nni\.perturbed"),
        nni.perturb("layers[2]", nni.Zero(), model=model),
    ):
        outside(model, X)
    nni.perturbed(outside)({"layers[2]": nni.Zero()}, model, X)  # which can


def test_in_a_watched_loop():
    model, f = Net(rngs=nnx.Rngs(0)), nnx.jit(called)
    wanted = nni.perturbed(model)({"layers[2]": nni.Zero()}, X)
    insp = nni.Inspector(model, X, display=False)
    found = []
    with nni.perturb("layers[2]", nni.Zero()):
        found += [f(model, x) for x in insp.watch([X, X])]
    for x in insp.watch([X, X]):
        with nni.perturb("layers[2]", nni.Zero()):
            found.append(f(model, x))
    for one in found:
        np.testing.assert_allclose(one, wanted, rtol=1e-5)
    insp.close()
