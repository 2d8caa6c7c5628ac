"""In a watched program an example of a vmap counts in the branches and iterations it takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from record_checks import assert_summary

import nnx_inspector as nni

pytestmark = pytest.mark.usefixtures("leaves_nothing")
X = np.random.default_rng(0).normal(size=(8, 3)).astype("f")


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
        assert_summary(one.summary(site, quantity), values, rtol=1e-4)


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


@pytest.mark.parametrize("power", [1, 2])
def test_a_model_called_in_a_branch_counts_the_examples_that_take_it(power):
    """Not those of the other branch, although XLA computes both."""
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def loss(x):
        return jax.lax.cond(x[0] > 0, lambda x: (model(x) ** power).sum(), jnp.sum, x)

    with nni.watch(model) as recording:
        nnx.jit(lambda model: jax.vmap(jax.grad(loss))(X))(model)
    y = linear(model, X.astype(np.float64))[X[:, 0] > 0]
    back = 2 * y if power == 2 else np.ones_like(y)
    check(recording, {("", "output"): y, ("", "gradient"): back})


def ensemble_of(model):
    """An ensemble of multiples of a model, and its members."""
    graphdef, state = nnx.split(model)
    factors = jnp.array([1.0, -1.0, 0.5, -2.0])
    states = [jax.tree.map(lambda x, by=by: by * x, state) for by in factors]
    members = [nnx.merge(graphdef, one) for one in states]
    return nnx.merge(graphdef, jax.tree.map(lambda *xs: jnp.stack(xs), *states)), members


def member_gradient(model, x):
    return nnx.grad(lambda model: half_square(model(x)))(model)


OF_MEMBERS = {
    "gradient of a vmap": lambda model, x: nnx.grad(
        lambda model: half_square(nnx.vmap(lambda model, x: model(x))(model, x))
    )(model),
    "vmap of a gradient": lambda model, x: nnx.vmap(member_gradient)(model, x),
}


@pytest.mark.parametrize("way", OF_MEMBERS)
def test_a_member_counts_in_the_branch_it_takes(way):
    ensemble, members = ensemble_of(Choosing())
    x = X[: len(members)]
    with nni.watch(ensemble) as recording:
        nnx.jit(OF_MEMBERS[way])(ensemble, x)
    (one,) = recording.passes
    every = {}
    for number, member in enumerate(members):
        found, _ = choices(member, x[number][None].astype(np.float64))
        for site, both in found.items():
            for quantity, values in zip(("output", "gradient"), both, strict=True):
                row = site if site in ("up", "down") else f"{site}[{number}]"
                every.setdefault((row, quantity), []).append(values)
    for (row, quantity), each in every.items():
        values, summary = np.concatenate(each), one.summary(row, quantity)
        assert summary.size == summary.finite == values.size > 0, (row, quantity)
        figures = summary.mean, summary.std, summary.min, summary.max
        exact = values.mean(), values.std(), values.min(), values.max()
        np.testing.assert_allclose(figures, exact, rtol=1e-4, atol=1e-6, err_msg=row)


def test_a_member_counts_in_the_iterations_it_makes():
    ensemble, members = ensemble_of(Looping())
    x = X[: len(members)]
    with nni.watch(ensemble) as recording:
        nnx.jit(lambda model, x: nnx.vmap(lambda model, x: model(x))(model, x))(ensemble, x)
    (one,) = recording.passes
    made = []
    for number, member in enumerate(members):
        now = x[number].astype(np.float64)
        for _ in range(int(3 * abs(x[number, 0]))):
            now = linear(member.layer, now)
            made.append(now)
    found = one.summary("layer")
    assert found.size == 3 * len(made)
    np.testing.assert_allclose(found.mean, np.mean(made), rtol=1e-4)
    np.testing.assert_allclose(found.norm, np.linalg.norm(made), rtol=1e-4)


@pytest.mark.parametrize("way", OF_MEMBERS)
def test_members_are_counted_once_within_a_scan(way):
    ensemble, members = ensemble_of(Steps())
    x = X[: len(members)]
    singles = []
    for member, one_x in zip(members, x, strict=True):
        with nni.watch(member) as recording:
            nnx.jit(member_gradient)(member, one_x)
        singles += recording.passes
    with nni.watch(ensemble) as recording:
        nnx.jit(OF_MEMBERS[way])(ensemble, x)
    (one,) = recording.passes
    for site in ("choose", "choose/a", "choose/up", "choose/down"):
        for quantity in ("output", "gradient"):
            parts = [s.summary(site, quantity) for s in singles if (site, quantity) in s.keys]
            found = one.summary(site, quantity)
            assert found.size == sum(part.size for part in parts), (site, quantity)
            norm = np.linalg.norm([part.norm for part in parts if part.size])
            np.testing.assert_allclose(found.norm, norm, rtol=1e-4, err_msg=site)
