"""Operations within calls: values, gradients and perturbations equal those written out by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni
from tests.models.explicit import MODELS, D

X = jax.random.normal(jax.random.key(0), (3, D))
EVERY = ["**", "**@*"]


def apart(site: str) -> tuple[str, int | None]:
    """A name of `explicit`: the site, and the iteration of a scan."""
    head, slash, row = site.rpartition("/")
    return (head, int(row)) if slash and row.isdigit() and "@" in head else (site, None)


def row_of(value: Any, row: int | None) -> Any:
    return np.asarray(value if row is None else value[row])


def written_out(model: Any, x: jax.Array, f: Callable[..., Any] = lambda s, v: v) -> Any:
    """The loss, and the value and the gradient of each site."""
    values: dict[str, jax.Array] = {}

    def at(site: str, value: jax.Array) -> jax.Array:
        values[site] = value = f(site, value)
        return value

    out = model.explicit(x, at)

    def loss(zeros: dict[str, jax.Array]) -> jax.Array:
        add = lambda site, v: f(site, v) + zeros[site]  # noqa: E731
        return (model.explicit(x, add) ** 2).sum()

    grads = jax.grad(loss)({site: jnp.zeros_like(v) for site, v in values.items()})
    return out, values, grads


def loss_of(model: Any, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).sum()


def captured(model: Any, x: jax.Array, wrap: str) -> nni.Record:
    grad = nni.value_and_grad(loss_of, only=EVERY, values=True)
    if wrap == "remat":
        again = lambda model, x: (nnx.remat(lambda m, x: m(x))(model, x) ** 2).sum()  # noqa: E731
        grad = nni.value_and_grad(again, only=EVERY, values=True)
    run = lambda model, x: grad(model, x)[0][1]  # noqa: E731
    if wrap == "jit":
        run = nnx.jit(run)
    return run(model, x)


@pytest.mark.parametrize("make", MODELS, ids=lambda m: m.__name__)
@pytest.mark.parametrize(
    "wrap", ["traced", *(pytest.param(w, marks=pytest.mark.long) for w in ("jit", "remat"))]
)
def test_values_and_gradients_are_those_written_out(make: Any, wrap: str) -> None:
    model = make(nnx.Rngs(1))
    _, values, grads = written_out(model, X)
    record = captured(model, X, wrap)
    for site, value in values.items():
        key, row = apart(site)
        found = row_of(record[key].values, row)
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=1e-6, err_msg=site)
        entry = record[key] if row is None else record[key].row(row)
        norm = float(jnp.linalg.norm(grads[site]))
        np.testing.assert_allclose(entry.gradient.norm, norm, rtol=1e-4, atol=1e-6, err_msg=site)


@pytest.mark.long
@pytest.mark.parametrize("make", MODELS, ids=lambda m: m.__name__)
def test_under_vmap_each_example_has_its_values(make: Any) -> None:
    model, batch = make(nnx.Rngs(1)), jnp.stack([X, X[::-1] * 2])
    keep = lambda m, x: nni.capture(m, only=EVERY, values=True)(x)[1]  # noqa: E731
    record = nnx.vmap(keep, in_axes=(None, 0))(model, batch)
    many = jax.vmap(lambda x: written_out(model, x)[1])(batch)
    for site, value in many.items():
        key, row = apart(site)
        found = np.asarray(record[key].values)
        found = found if row is None else found[:, row]
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=1e-6, err_msg=site)


@pytest.mark.long
@pytest.mark.parametrize("make", MODELS, ids=lambda m: m.__name__)
def test_a_call_that_reads_values_runs_eagerly_with_the_same_sites(make: Any) -> None:
    model = make(nnx.Rngs(1))
    _, values, _ = written_out(model, X)

    def reads(model: Any, x: jax.Array) -> jax.Array:
        return model(x) if float(x.sum()) < 1e9 else x

    _, record = nni.capture(reads, only=EVERY, values=True)(model, X)
    assert record.eager
    for site, value in values.items():
        key, row = apart(site)
        found = row_of(record[key].values, row)
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=1e-6, err_msg=site)


KINDS = [nni.Zero(), nni.Scale(0.5), nni.Shift(0.25), nni.Clamp(0.0, 0.3)]


@pytest.mark.long
@pytest.mark.parametrize("make", MODELS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("one", KINDS, ids=lambda k: type(k).__name__)
def test_every_site_is_perturbed_as_written_out(make: Any, one: Any) -> None:
    model = make(nnx.Rngs(1))
    _, values, _ = written_out(model, X)
    for key in {apart(site)[0] for site in values}:
        change = lambda s, v, key=key: one.apply_at(v, "") if apart(s)[0] == key else v  # noqa: E731
        wanted, *_ = written_out(model, X, change)
        found = nni.perturbed(model)({key: one}, X)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6, err_msg=key)
        with nni.perturb(key, one):
            found = nnx.jit(lambda m, x: m(x))(model, X)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6, err_msg=key)


def test_one_of_each_is_perturbed() -> None:
    for make, key in [(MODELS[0], "@softmax"), (MODELS[4], "@tanh"), (MODELS[8], "layers@sin")]:
        model, one = make(nnx.Rngs(1)), nni.Scale(0.5)
        halved = functools.partial(lambda k, s, v: v / 2 if apart(s)[0] == k else v, key)
        wanted, *_ = written_out(model, X, halved)
        np.testing.assert_allclose(nni.perturbed(model)({key: one}, X), wanted, rtol=2e-5)
        with nni.perturb(key, one):
            np.testing.assert_allclose(model(X), wanted, rtol=2e-5)
