"""summarize(sample=k): some figures stay exact, the others are those of the slices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.stats.packing import pack, unpack
from nnx_inspector.stats.summarize import summarize

SHAPE = (4, 64, 32)


def special(seed: int, dtype: Any = np.float32) -> np.ndarray:
    """Normal values with zeros of both signs, NaN and both infinities among them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=SHAPE)
    for value in (0.0, -0.0, np.nan, np.inf, -np.inf):
        x[rng.random(SHAPE) < 0.01] = value
    return x.astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, jnp.bfloat16, np.complex64])
def test_counts_and_extremes_are_those_of_all_values(dtype: Any) -> None:
    x = special(3, dtype)
    s, whole = summarize(x, sample=8), summarize(x)
    apart = ("size", "finite", "zeros", "nan", "posinf", "neginf", "min", "max")
    assert [getattr(s, name) for name in apart] == [getattr(whole, name) for name in apart]
    assert s.finite + s.nan + s.posinf + s.neginf == s.size == x.size
    assert np.asarray(s.bins).sum() == x.size


def test_moments_are_those_of_every_eighth_slice() -> None:
    x = special(4)
    part = x[:, 4::8].astype(np.float64)
    part = part[np.isfinite(part)]
    s = summarize(jnp.asarray(x), sample=8)
    assert s.mean == pytest.approx(part.mean(), abs=1e-6)
    assert s.std == pytest.approx(part.std(), rel=1e-5)
    assert s.norm == pytest.approx(np.sqrt((part**2).mean() * s.finite), rel=1e-5)
    whole = x[np.isfinite(x)].astype(np.float64)
    assert abs(s.mean - whole.mean()) <= np.sqrt(7) * whole.std()
    assert s.mean != pytest.approx(whole.mean(), abs=1e-6)  # or nothing was left out


@pytest.mark.parametrize("seed", range(5))
def test_ranks_of_quantiles_are_within_the_stated_error(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.exp(rng.normal(size=(16, 512, 8)) + rng.normal(size=(16, 512, 1))).astype(np.float32)
    s = summarize(jnp.asarray(x), sample=8)
    slices = x.size // 8 // 8
    error = np.sqrt(np.log(2 / 1e-6) / (2 * slices))  # exceeded once in a million
    for fraction in (0.01, 0.25, 0.5, 0.75, 0.99):
        found = float(s.quantile(fraction))
        rank = [(x <= found * (1 + sign * 0.0625)).mean() for sign in (-1, 1)]
        assert rank[0] - error <= fraction <= rank[1] + error


def test_integers_keep_their_extremes() -> None:
    x = np.arange(64 * 64, dtype=np.int32).reshape(1, 64, 64) + 2**30
    s = summarize(jnp.asarray(x), sample=8)
    assert (s.min, s.max, s.size, s.zeros) == (2**30, 2**30 + 4095, 4096, 0)
    assert s.mean == pytest.approx(x[:, 4::8].mean(), rel=1e-9)


def test_what_has_few_slices_is_measured_whole() -> None:
    x = special(5)[:, :63]
    for a, b in zip(
        jax.tree.leaves(summarize(x, sample=8)), jax.tree.leaves(summarize(x)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_slices_without_a_finite_value_leave_the_moments_unknown() -> None:
    x = np.ones(SHAPE, np.float32)
    x[0] = 2
    x[:, 4::8] = np.nan
    s = summarize(jnp.asarray(x), sample=8)
    assert (s.nan, s.finite, s.min, s.max) == (x.size // 8, 7 * x.size // 8, 1.0, 2.0)
    assert np.isnan(s.mean)
    assert np.isnan(s.std)
    constant = summarize(jnp.asarray(np.minimum(x, 1)), sample=8)
    assert (constant.mean, constant.std) == (1.0, 0.0)  # the extremes say so


def test_nothing_finite_at_all() -> None:
    s = summarize(jnp.full(SHAPE, jnp.nan), sample=8)
    assert (s.finite, s.nan) == (0, np.prod(SHAPE))
    assert np.isnan(s.mean)
    zeros = summarize(jnp.zeros(SHAPE), sample=8)
    assert (zeros.zeros, zeros.mean, zeros.std) == (zeros.size, 0.0, 0.0)


def test_rows_and_vmap_and_packing() -> None:
    x = jnp.asarray(np.stack([special(6), special(7)]))
    rows = summarize(x, batch_rank=1, sample=8)
    mapped = jax.vmap(lambda v: summarize(v, sample=8))(x)
    for i in range(2):
        one = summarize(x[i], sample=8)
        for other in (rows, mapped, unpack(pack(rows))):
            np.testing.assert_array_equal(other.row(i).bins, one.bins)
            np.testing.assert_array_equal(other.row(i).points[..., :2], one.points[..., :2])
            assert other.row(i).std == pytest.approx(one.std, rel=1e-5)


def test_activations_and_gradients_of_a_model() -> None:
    model = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), SHAPE)
    weight = jax.random.normal(jax.random.key(1), (4, 64, 16))

    def loss_fn(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return (model(x) * weight).sum()

    (_, record), _ = nnx.jit(nni.value_and_grad(loss_fn, sample=8))(model, x)
    _, forward = nnx.jit(nni.capture(model, sample=8))(x)
    for found, value in (
        (record[""].output, model(x)),
        (forward[""].output, model(x)),
        (record[""].input, x),
        (record[""].gradient, weight),
    ):
        expected = summarize(value, sample=8)
        assert found.mean == pytest.approx(expected.mean, abs=1e-6)
        assert found.size == value.size
        assert found.mean != pytest.approx(summarize(value).mean, abs=1e-6)


@pytest.mark.parametrize("sample", [0, -3])
def test_no_slices(sample: int) -> None:
    with pytest.raises(ValueError, match=f"sample must be at least 1, got {sample}"):
        summarize(jnp.ones(3), sample=sample)
