"""In a watched program an example of a vmap counts in the branches and iterations it takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from leftovers import nothing_left

import nnx_inspector as nni

X = np.random.default_rng(0).normal(size=(8, 3)).astype("f")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    with nothing_left():
        yield


class Choosing(nnx.Module):
    """A layer, and one of two others: which, depends on the example."""

    def __init__(self):
        self.a, self.up, self.down = (nnx.Linear(3, 3, rngs=nnx.Rngs(n)) for n in range(3))

    def __call__(self, x):
        h = self.a(x)
        return jax.lax.cond(h.sum() > 0, lambda h: self.up(h), lambda h: self.down(h), h)


class Steps(nnx.Module):
    """Chooses in each of two time steps."""

    def __init__(self):
        self.choose = Choosing()

    def __call__(self, x):
        return jax.lax.scan(lambda x, _: (self.choose(x), None), x, length=2)[0]


class Looping(nnx.Module):
    """Applies a layer as often as an example wants."""

    def __init__(self):
        self.layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        wanted = jnp.int32(3 * jnp.abs(x[0]))
        state = x, jnp.int32(0)
        return jax.lax.while_loop(
            lambda state: state[1] < wanted,
            lambda state: (self.layer(state[0]), state[1] + 1),
            state,
        )[0]


def linear(layer, x):
    return x @ np.asarray(layer.kernel, np.float64) + np.asarray(layer.bias, np.float64)


def choices(model, x):
    """Site -> its output and gradient; and the result `y`. The loss is `half_square(y)`."""
    h = linear(model.a, x)
    up = h.sum(1) > 0
    y = np.where(up[:, None], linear(model.up, h), linear(model.down, h))
    kernels = (np.asarray(one.kernel, np.float64).T for one in (model.up, model.down))
    back = np.where(up[:, None], *(y @ kernel for kernel in kernels))
    found = {"": (y, y), "a": (h, back), "up": (y[up], y[up]), "down": (y[~up], y[~up])}
    return found, y


def check(recording, expected):
    (one,) = (one for one in recording.passes if one.kind == "watch")
    for (site, quantity), values in expected.items():
        found = one.summary(site, quantity)
        assert found.size == values.size, (site, quantity)
        figures = found.mean, found.std, found.norm, found.min, found.max
        exact = values.mean(), values.std(), np.linalg.norm(values), values.min(), values.max()
        np.testing.assert_allclose(figures, exact, rtol=1e-4, atol=1e-6, err_msg=site)
        assert found.finite == values.size


def half_square(y):
    return (y**2).sum() / 2


WAYS = {
    "gradient of a vmap": lambda model, x: nnx.grad(
        lambda model: half_square(jax.vmap(lambda x: model(x))(x))
    )(model),
    "vmap of a gradient": lambda model, x: jax.vmap(
        lambda x: jax.grad(lambda x: half_square(model(x)))(x)
    )(x),
    "two vmaps": lambda model, x: nnx.grad(
        lambda model: half_square(
            jax.vmap(jax.vmap(lambda x: model(x)))(x.reshape(2, 4, 3)).reshape(8, 3)
        )
    )(model),
    "vmap of what is jitted": lambda model, x: nnx.grad(
        lambda model: half_square(jax.vmap(jax.jit(lambda x: model(x)))(x))
    )(model),
}


def test_an_example_counts_in_the_branch_it_takes():
    model = Choosing()
    found, _ = choices(model, X.astype(np.float64))
    expected = {
        (site, quantity): values
        for site, both in found.items()
        for quantity, values in zip(("output", "gradient"), both, strict=True)
    }
    for way in WAYS.values():
        with nni.watch(model) as recording:
            nnx.jit(way)(model, X)
        check(recording, expected)


def test_branches_within_a_scan():
    model, x = Steps(), X.astype(np.float64)
    expected, rows = {}, {}
    for _ in range(2):
        found, x = choices(model.choose, x)
        for site, (values, _) in found.items():
            rows.setdefault(f"choose/{site}".rstrip("/"), []).append(values)
    for site, values in rows.items():
        expected[site, "output"] = np.concatenate(values)
    with nni.watch(model) as recording:
        nnx.jit(lambda model, x: jax.vmap(lambda x: model(x))(x))(model, X)
    check(recording, expected)


def test_an_example_counts_in_the_iterations_it_makes():
    model = Looping()
    made = []
    for x in X:
        wanted, x = int(3 * abs(x[0])), x.astype(np.float64)
        for _ in range(wanted):
            x = linear(model.layer, x)
            made.append(x)
    with nni.watch(model) as recording:
        nnx.jit(lambda model, x: jax.vmap(lambda x: model(x))(x))(model, X)
    check(recording, {("layer", "output"): np.array(made)})


def test_a_model_may_be_called_in_a_loop_that_ends_earlier_for_some_examples():
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def iterated(x):
        wanted = jnp.int32(3 * jnp.abs(x[0]))
        state = x, jnp.int32(0)
        return jax.lax.while_loop(
            lambda state: state[1] < wanted, lambda s: (model(s[0]), s[1] + 1), state
        )[0]

    run = nnx.jit(lambda model, x: jax.vmap(iterated)(x))
    plain = run(model, X)
    with nni.watch(model, every=1) as recording:
        watched = run(model, X)
    np.testing.assert_array_equal(watched, plain)
    assert len(recording.passes) == int(3 * np.abs(X[:, 0]).max())  # one for all examples
