"""Gradients of activations against `jax.grad` of models written out by hand.

These models take zeros as arguments and add them to the activations; the zeros' gradients are the
activations' cotangents. Each figure of a record's summary equals that of float64 NumPy on the exact
array. The transforms around and within the calls are those of training code.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from models import batch, rngs

from nnx_inspector.records.capture import capture, value_and_grad

X = batch(8, 3)


def assert_summary(summary, values, rtol=1e-5, atol=1e-8):
    """Each figure is that of the values in float64; the sign of a mean is that of rounding."""
    v = np.asarray(values, np.float64)
    assert (summary.size, summary.finite) == (v.size, np.isfinite(v).sum())
    size = np.sqrt((v**2).mean())
    for figure, expected in {
        "mean": v.mean(), "std": v.std(), "min": v.min(), "max": v.max(),
        "norm": np.sqrt((v**2).sum()),
    }.items():  # fmt: skip
        tolerance = {"rtol": rtol, "atol": rtol * size + atol}
        np.testing.assert_allclose(getattr(summary, figure), expected, **tolerance, err_msg=figure)
    rank = np.floor(0.9 * (v.size - 1)).astype(int)
    quantile = np.sort(v.ravel())[rank]
    np.testing.assert_allclose(summary.quantile(0.9), quantile, rtol=0.0626, atol=rtol * size)


def assert_gradients(record, cotangents, rtol=1e-5):
    """`cotangents`: site -> array; of a site called more than once a list, of one in a scan with
    the iterations first, of an ensemble with the members first (`Rows`).
    """
    assert set(record) == set(cotangents)
    for site, expected in cotangents.items():
        calls = expected if isinstance(expected, list) else [expected]
        assert len(record[site].calls) == len(calls), site
        for call, values in zip(record[site].calls, calls, strict=True):
            if values is None:
                assert call.gradient is None, site
            elif isinstance(values, Rows):
                assert call.gradient.rows == (len(values.rows),)
                for i, row in enumerate(values.rows):
                    assert_summary(call.gradient.row(i), row, rtol)
            else:
                assert call.gradient.rows == ()
                assert_summary(call.gradient, values, rtol)


class Rows:
    """Cotangents with a separate array for each iteration of a scan, or for each member."""

    def __init__(self, rows):
        self.rows = np.asarray(rows)


# ------------------------------------------------------------- models by hand


def affine(linear, x, number=None):
    kernel, bias = linear.kernel[...], linear.bias[...]
    return x @ kernel + bias if number is None else x @ kernel[number] + bias[number]


def mlp(model, d, x):
    h = affine(model.up, x) + d["up"]
    return affine(model.down, jnp.tanh(h)) + d["down"] + d[""]


def shared(model, d, x):
    h = affine(model.first, x) + d["first"][0]
    return affine(model.first, jnp.tanh(h)) + d["first"][1] + d[""]


def stacked(model, d, x):
    for i in range(3):
        h = affine(model.blocks.linear, x, i) + d["blocks/linear"][i]
        x = x + jnp.tanh(h) + d["blocks"][i]
    return x + d[""]


def ensemble(model, d, x):
    members = [affine(model.members, x, i) + d["members"][i] for i in range(2)]
    return sum(members) / 2 + d[""]


def zeros(model, hand, n=8):
    """The zeros that `hand` adds, by site."""
    f = lambda *shape: jnp.zeros((n, *shape))  # noqa: E731
    return {
        mlp: {"up": f(4), "down": f(2), "": f(2)},
        shared: {"first": [f(3), f(3)], "": f(3)},
        stacked: {"blocks": [f(3)] * 3, "blocks/linear": [f(3)] * 3, "": f(3)},
        ensemble: {"members": [f(2), f(2)], "": f(2)},
    }[hand]


def squares(y):
    return (y**2).mean()


def by_hand(model, hand, x=X, loss=squares):
    """The cotangents: the gradients with respect to the zeros."""
    d = zeros(model, hand, len(x))
    return jax.jit(jax.grad(lambda d: loss(hand(model, d, x))))(d)


def expected_of(model, hand, x=X, loss=squares):
    """What `assert_gradients` takes."""
    d = by_hand(model, hand, x, loss)
    if hand is stacked:
        return {**d, "blocks": Rows(d["blocks"]), "blocks/linear": Rows(d["blocks/linear"])}
    if hand is ensemble:
        return {**d, "members": Rows(d["members"])}
    return d


BY_HAND = {
    mlp: lambda: models.MLP(rngs()),
    shared: lambda: models.Shared(rngs()),
    stacked: lambda: models.Stacked(rngs()),
    ensemble: lambda: models.Ensemble(rngs()),
}

# --------------------------------------------------------- around and within


def loss_of(model, x):
    return squares(model(x))


def eagerly(model, x):
    return value_and_grad(loss_of)(model, x)


def nnx_jit(model, x):
    return nnx.jit(value_and_grad(loss_of))(model, x)


def jax_jit(model, x):
    graphdef, state = nnx.split(model)
    run = lambda state, x: value_and_grad(loss_of)(nnx.merge(graphdef, state), x)  # noqa: E731
    return jax.jit(run)(state, x)


def inner_nnx_jit(model, x):
    inner = nnx.jit(lambda m, x: m(x))
    return nnx.jit(value_and_grad(lambda m, x: squares(inner(m, x))))(model, x)


def inner_remat(model, x):
    inner = nnx.remat(lambda m, x: m(x))
    return nnx.jit(value_and_grad(lambda m, x: squares(inner(m, x))))(model, x)


def remat_with_a_policy(model, x):
    policy = jax.checkpoint_policies.dots_saveable
    inner = nnx.remat(lambda m, x: m(x), policy=policy)
    return nnx.jit(value_and_grad(lambda m, x: squares(inner(m, x))))(model, x)


def vmap_over_examples(model, x):
    inner = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))
    return nnx.jit(value_and_grad(lambda m, x: squares(inner(m, x))))(model, x)


AROUND = [
    eagerly, nnx_jit, jax_jit, inner_nnx_jit, inner_remat, remat_with_a_policy,
    vmap_over_examples,
]  # fmt: skip
QUICK = {
    (mlp, eagerly), (mlp, jax_jit), (mlp, vmap_over_examples), (shared, inner_remat),
    (stacked, inner_nnx_jit), (stacked, vmap_over_examples), (ensemble, remat_with_a_policy),
}  # fmt: skip


@pytest.mark.parametrize(
    ("hand", "around"),
    [
        pytest.param(h, a, marks=() if (h, a) in QUICK else pytest.mark.long)
        for h in BY_HAND
        for a in AROUND
    ],
    ids=lambda f: f.__name__,
)
def test_gradients_are_those_of_the_model_by_hand(hand, around):
    model = BY_HAND[hand]()
    (loss, record), grads = around(model, X)
    zero = zeros(model, hand)
    np.testing.assert_allclose(loss, squares(hand(model, zero, X)), rtol=1e-6)
    assert_gradients(record, expected_of(model, hand))
    expected = nnx.grad(lambda m: squares(hand(m, zero, X)))(model)
    for ours, plain in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_of_a_cond_the_taken_branch_has_the_gradient_and_the_other_none(sign):
    model, x = models.Cond(rngs()), sign * jnp.abs(X)
    taken, other = ("positive", "negative") if sign > 0 else ("negative", "positive")
    hand = lambda d: squares(affine(getattr(model, taken), x) + d[taken] + d[""])  # noqa: E731
    d = jax.grad(hand)({taken: jnp.zeros((8, 2)), "": jnp.zeros((8, 2))})
    (_, record), _ = nnx.jit(value_and_grad(loss_of))(model, x)
    assert_gradients(record, {**d, other: None})


@pytest.mark.parametrize("around", [eagerly, nnx_jit], ids=lambda f: f.__name__)
def test_of_a_scan_that_is_rematerialised_each_layer_has_its_own(around):
    (_, record), _ = around(models.Stacked(rngs(), remat=True), X)
    assert_gradients(record, expected_of(BY_HAND[stacked](), stacked))


# --------------------------------------------------------------- microbatches


def test_microbatches_within_the_loss_have_a_row_each():
    """The loss adds up over a scan: one backward pass, a cotangent for each microbatch."""
    model, parts = BY_HAND[stacked](), X.reshape(4, 2, 3)

    def loss(model, parts):
        graphdef, state = nnx.split(model)

        def add(carry, x):
            total, state = carry
            return (total + loss_of(nnx.merge(graphdef, state), x), state), None

        return jax.lax.scan(add, (0.0, state), parts)[0][0] / 4

    (_, record), _ = nnx.jit(value_and_grad(loss))(model, parts)
    apart = [by_hand(model, stacked, x, lambda y: squares(y) / 4) for x in parts]
    for site in ("blocks", "blocks/linear"):
        gradient = record[site].calls[0].gradient
        assert gradient.rows == (4, 3)
        for i, d in enumerate(apart):
            for j in range(3):
                assert_summary(gradient.row((i, j)), d[site][j])
    assert_summary(record[""].gradient, np.concatenate([d[""] for d in apart]))


def test_accumulated_microbatches_have_a_record_each():
    """One backward pass per microbatch; the carry of a scan adds the gradients."""
    model, parts = BY_HAND[mlp](), X.reshape(4, 2, 3)
    graphdef, state = nnx.split(model)

    @jax.jit
    def accumulate(state, parts):
        def step(total, x):
            (_, record), grads = value_and_grad(loss_of)(nnx.merge(graphdef, state), x)
            return jax.tree.map(jnp.add, total, grads), record

        zero = jax.tree.map(jnp.zeros_like, nnx.state(nnx.merge(graphdef, state), nnx.Param))
        return jax.lax.scan(step, zero, parts)

    total, record = accumulate(state, parts)
    for i, x in enumerate(parts):
        assert_gradients(record.row(i), by_hand(model, mlp, x))
    expected = nnx.grad(lambda m: sum(loss_of(m, x) for x in parts))(model)
    for ours, plain in zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------ mixed precision


class Mixed(nnx.Module):
    """Parameters in float32, arithmetic in bfloat16."""

    def __init__(self, r):
        linear = functools.partial(nnx.Linear, dtype=jnp.bfloat16, rngs=r)
        self.up, self.down = linear(3, 4), linear(4, 2)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def mixed(model, d, x):
    low = lambda a: a.astype(jnp.bfloat16)  # noqa: E731

    def affine(linear, x):
        return low(x) @ low(linear.kernel[...]) + low(linear.bias[...])

    h = affine(model.up, x) + d["up"]
    return affine(model.down, nnx.relu(h)) + d["down"] + d[""]


@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_mixed_precision_with_a_scaled_loss(scale):
    """Cotangents are bfloat16 and scaled like the loss; they are summed in float32."""
    model = Mixed(rngs())
    loss = lambda y: scale * squares(y.astype(jnp.float32))  # noqa: E731
    d = {k: jnp.zeros((8, n), jnp.bfloat16) for k, n in (("up", 4), ("down", 2), ("", 2))}
    cotangents = jax.grad(lambda d: loss(mixed(model, d, X)))(d)
    assert cotangents["up"].dtype == jnp.bfloat16
    (_, record), grads = value_and_grad(lambda m, x: loss(m(x)))(model, X)
    # bit for bit the same arrays, as both run one operation at a time: only sums are rounded
    assert_gradients(record, cotangents, rtol=1e-6)
    expected = nnx.grad(lambda m: loss(m(X)))(model)
    for ours, plain in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_a_scale_that_is_too_large_is_seen_where_it_overflows():
    """What loss scaling looks for: the first site whose gradient is not finite."""

    class Halves(models.MLP):
        def __call__(self, x):
            low = lambda a: a.astype(jnp.float16)  # noqa: E731
            return low(self.down(low(jnp.tanh(self.up(x)))))

    model = Halves(rngs())
    loss = lambda m, x: 1e5 * (m(x).astype(jnp.float32) ** 2).sum()  # noqa: E731
    (_, record), _ = nnx.jit(value_and_grad(loss))(model, X)
    gradient = record[""].gradient
    assert gradient.size == 16
    assert gradient.posinf + gradient.neginf > 0
    with np.errstate(over="ignore"):
        y = np.asarray(model(X)).astype(np.float32)
        expected = np.float16(2e5 * y)
    assert (gradient.posinf, gradient.neginf) == (
        np.isposinf(expected).sum(),
        np.isneginf(expected).sum(),
    )


# --------------------------------------------------------- derivatives of ours


def plain_grad(model, x):
    return jax.grad(lambda x: loss_of(_here(model), x))(x)


def _here(model):
    """The same model with Variables of the current trace: nnx.scan takes no others."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf, state))


def our_grad(model, x):
    return value_and_grad(loss_of, argnums=1)(model, x)[1]


@pytest.mark.parametrize("hand", [mlp, stacked], ids=lambda f: f.__name__)
def test_jvp_gives_record_and_tangents_and_the_record_has_none(hand):
    model, t = BY_HAND[hand](), jnp.ones_like(X)
    run = lambda x: value_and_grad(loss_of, argnums=1)(model, x)  # noqa: E731
    ((_, record), grads), tangents = jax.jit(lambda x: jax.jvp(run, (x,), (t,)))(X)
    (loss_t, record_t), grads_t = tangents
    assert_gradients(record, expected_of(model, hand))
    expected = jax.jit(lambda x: jax.jvp(lambda x: plain_grad(model, x), (x,), (t,)))(X)
    np.testing.assert_allclose(grads, expected[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(grads_t, expected[1], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss_t, (expected[0] * t).sum(), rtol=1e-4)
    for leaf in jax.tree.leaves(record_t):
        assert leaf.dtype == jax.dtypes.float0 or not np.asarray(leaf).any()


@pytest.mark.parametrize("order", [jax.jacfwd, jax.jacrev], ids=["forward", "reverse"])
def test_the_hessian_over_reverse(order):
    model, x = BY_HAND[mlp](), X[:2]
    ours = jax.jit(order(lambda x: our_grad(model, x)))(x)
    expected = jax.jit(jax.jacfwd(lambda x: plain_grad(model, x)))(x)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("function", ["capture", "value_and_grad"])
def test_the_hessian_of_a_loss_that_is_recorded(function):
    model, x = BY_HAND[mlp](), X[:2]
    recorded = {
        "capture": lambda x: squares(capture(model)(x)[0]),
        "value_and_grad": lambda x: value_and_grad(loss_of)(model, x)[0][0],
    }[function]
    ours = jax.jit(jax.hessian(recorded))(x)
    expected = jax.jit(jax.hessian(lambda x: loss_of(model, x)))(x)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)


def test_a_penalty_on_gradients_can_be_trained():
    """Reverse over reverse, by the parameters, with the record of the inner pass beside it."""
    model = BY_HAND[mlp]()

    def penalty(grad):
        return lambda model, x: (grad(model, x) ** 2).sum()

    ours = nnx.jit(nnx.grad(penalty(our_grad)))(model, X)
    expected = nnx.jit(nnx.grad(penalty(plain_grad)))(model, X)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_record_of_a_pass_with_a_gradient_inside():
    """`capture` of a function that differentiates, and `value_and_grad` of one with a penalty."""
    model = BY_HAND[mlp]()
    grads, record = nnx.jit(capture(lambda m, x: nnx.grad(loss_of)(m, x)))(model, X)
    h = affine(model.up, X)
    np.testing.assert_allclose(record["up"].output.mean, np.mean(h), rtol=1e-5)
    assert record["up"].gradient is None
    expected = nnx.grad(loss_of)(model, X)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
