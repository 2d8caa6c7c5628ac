"""Histograms of a sample: what stays exact, what is scaled up, and by how much it may be off."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from summary_oracle import check

import nnx_inspector as nni
from nnx_inspector.stats.array_stats import SAMPLE, strides
from nnx_inspector.stats.bins import QUANTILE_ERROR, UNSEEN_BIN, bin_edges
from nnx_inspector.stats.encoding import decode_checked, encode
from nnx_inspector.stats.summarize import merge_in_trace, merge_rows, summarize
from nnx_inspector.stats.summary import Summary, merge
from nnx_inspector.stats.table import sparklines_of, stats_of

SHAPE = (4, 64, 32)
FRACTIONS = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


def special(seed: int, dtype: Any = np.float32, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Normal values with zeros of both signs, NaN and both infinities among them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    for value in (0.0, -0.0, np.nan, np.inf, -np.inf):
        x[rng.random(shape) < 0.01] = value
    return x.astype(dtype)


def off(s: Summary, x: np.ndarray) -> float:
    """By how much the rank of a quantile is off at most, beside the error of its value."""
    finite = np.sort(x[np.isfinite(x)].astype(np.float64).ravel())
    found = np.asarray(s.quantile(FRACTIONS))
    reach = QUANTILE_ERROR * np.abs(found)
    below = np.searchsorted(finite, found - reach, "left") / finite.size
    above = np.searchsorted(finite, found + reach, "right") / finite.size
    fractions = np.array(FRACTIONS)
    return float(np.maximum(below - fractions, fractions - above).max())


@pytest.mark.parametrize(
    "shape",
    [
        (1,), (65_536,), (65_537,), (1_000_003,), (4096, 4096), (2, 3, 1_000_000), (999_983, 3),
        (16, 512, 1024), (64, 224, 224, 3), (1, 1, 2**22), (7, 1, 1, 99_999), (65_536, 2),
        (3,) * 12,
    ],
)  # fmt: skip
def test_a_sample_has_at_least_65_536_values_within_the_array(shape: tuple[int, ...]) -> None:
    steps = strides(shape, "auto")
    taken = [len(range(step // 2, n, step)) for n, step in zip(shape, steps, strict=True)]
    assert all(taken)
    assert math.prod(taken) >= min(math.prod(shape), SAMPLE)
    assert math.prod(taken) < 4 * SAMPLE or math.prod(shape) == math.prod(taken)
    assert math.prod(shape) > SAMPLE or set(steps) == {1}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=5).map(tuple))
def test_a_sample_of_any_shape(shape: tuple[int, ...]) -> None:
    test_a_sample_has_at_least_65_536_values_within_the_array(shape)


LARGE = (8, 130, 515)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, jnp.bfloat16, np.complex64])
def test_every_figure_of_a_large_array_but_its_histogram_is_exact(dtype: Any) -> None:
    x = special(3, dtype, LARGE)
    s = summarize(x)
    assert 60_000 < s.seen < s.finite - s.zeros  # the sample has zeros and NaN, too
    check(s, x, tolerance=1e-5)


def test_integers_keep_their_figures() -> None:
    x = np.arange(2 * 300 * 300, dtype=np.int32).reshape(2, 300, 300) + 2**30
    s = summarize(jnp.asarray(x))
    assert (s.min, s.max, s.size, s.zeros) == (2**30, 2**30 + x.size - 1, x.size, 0)
    assert s.mean == pytest.approx(x.mean(), abs=1e-6 * x.std())
    assert s.std == pytest.approx(x.std(), rel=1e-6)
    assert s.seen < x.size


def test_one_measures_all_and_k_every_kth_slice() -> None:
    x = special(4, shape=LARGE)
    nonzero = np.isfinite(x) & (x != 0)
    assert summarize(x, sample=1).seen == nonzero.sum()
    assert summarize(x, sample=1).rank_error == 0
    assert summarize(x, sample=8).seen == nonzero[:, 4::8].sum()
    few = summarize(x[:, :63], sample=8)  # too few slices along any axis
    assert few.seen == nonzero[:, :63].sum()


def test_the_stated_error_of_ranks_holds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        scale = np.exp(rng.normal(size=(1, 1, LARGE[2])))  # units unlike each other
        x = (rng.normal(size=LARGE) * scale + rng.normal()).astype(np.float32)
        x = np.maximum(x, 0) if rng.random() < 0.3 else x
        s = summarize(x)
        assert 0 < s.rank_error <= 0.011
        assert off(s, x) <= s.rank_error


@pytest.mark.long
def test_the_stated_error_of_ranks_holds_for_10_000_arrays() -> None:
    rng = np.random.default_rng(1)
    bins_of = jax.jit(summarize)
    worst = 0.0
    for _ in range(10_000):
        x = rng.standard_normal((4, 200, 300), np.float32)
        x = x * np.exp(rng.normal(size=(1, 1, 300))).astype(np.float32) + np.float32(rng.normal())
        s = bins_of(x)
        worst = max(worst, off(s, x) / s.rank_error)
    assert worst <= 1


def test_what_a_sample_can_miss() -> None:
    """One token that stands out: extremes and moments have it, the histogram may not."""
    x = np.random.default_rng(2).normal(size=(16, 256, 512)).astype(np.float32)
    steps = strides(x.shape, "auto")
    assert steps[1] > 1
    assert steps[2] > 1
    x[:, 0] = 1000  # not in the sample, which begins half a step later
    s = summarize(x)
    assert (s.max, s.mean, s.std) == (
        1000,
        *map(pytest.approx, (x.mean(dtype=float), x.std(dtype=float))),
    )
    assert s.quantile(0.999) < 10
    assert s.quantile(1) == 1000
    assert off(s, x) < 1 / 256 + s.rank_error


@pytest.mark.parametrize("value", [1.0, 0.0, np.nan])
def test_a_sample_without_a_nonzero_finite_value(value: float) -> None:
    x = np.full(LARGE, value, np.float32)
    x[0, 0, :3] = [-2, 5, 5]
    s = summarize(x)
    check(s, x)
    if value != 1:
        assert s.seen == 0
        assert s.rank_error == pytest.approx(3 / s.finite)
        assert (s.quantile(0), s.quantile(1)) == (-2, 5)
        assert s.nonzero_bins()[:, 1].sum() == s.finite


def test_nothing_finite_at_all() -> None:
    s = summarize(jnp.full(LARGE, jnp.nan))
    assert (s.finite, s.nan, s.seen, s.rank_error) == (0, s.size, 0, 0)
    assert np.isnan([s.mean, s.std, s.quantile(0.5)]).all()


def test_rows_and_vmap_and_encoding() -> None:
    x = np.stack([special(6, shape=LARGE), special(7, shape=LARGE)])
    rows = summarize(x, batch_rank=1)
    mapped = jax.vmap(summarize)(x)
    for i in range(2):
        one = summarize(x[i])
        for other in (rows, mapped):
            np.testing.assert_array_equal(other.row(i).bins, one.bins)
            np.testing.assert_array_equal(other.row(i).points[..., :2], one.points[..., :2])
            assert other.row(i).std == pytest.approx(one.std, rel=1e-6)
        (found,) = decode_checked(encode([one.merged()]))
        assert repr(found.summary(0)) == repr(one)
        assert stats_of(found)[0, 0] == one.size
        np.testing.assert_array_equal(sparklines_of(found, 32)[0], one.sparkline(32))


def test_merged_samples_stand_for_all_their_values() -> None:
    rng = np.random.default_rng(3)
    many = rng.normal(size=LARGE).astype(np.float32)
    few = (rng.normal(size=(300, 300)) + 5).astype(np.float32)
    s = merge([summarize(many), summarize(few, sample=1)])
    both = np.concatenate([many.ravel(), few.ravel()])
    check(s, both, tolerance=1e-5)
    assert off(s, both) <= s.rank_error < 0.02
    assert s.seen < summarize(many).seen + few.size  # it is as good as a sample of so many
    alike = merge([summarize(many), summarize(many)])
    assert alike.seen == pytest.approx(2 * summarize(many).seen, abs=1)
    assert merge([alike]).bins.tolist() == alike.bins.tolist()


def test_samples_add_up_inside_jit() -> None:
    x = np.stack([special(8, shape=LARGE), special(9, shape=LARGE)])
    one = jax.jit(lambda x: merge_in_trace(summarize(x[0]), summarize(x[1])))(x)
    other = jax.jit(lambda x: merge_rows(summarize(x, batch_rank=1)))(x)
    for s in (one, other):
        check(s, x, tolerance=1e-5)
        assert off(s, x) <= s.rank_error <= 0.011


def test_activations_and_gradients_of_a_model() -> None:
    model = nnx.Linear(32, 300, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (8, 64, 32))
    weight = jax.random.normal(jax.random.key(1), (8, 64, 300))

    def loss_fn(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return (model(x) * weight).sum()

    for sample in ("auto", 1, 8):
        (_, record), _ = nnx.jit(nni.value_and_grad(loss_fn, sample=sample))(model, x)
        _, forward = nnx.jit(nni.capture(model, sample=sample))(x)
        for found, value in (
            (record[""].output, model(x)),
            (forward[""].output, model(x)),
            (record[""].input, x),
            (record[""].gradient, weight),
        ):
            expected = summarize(value, sample=sample)
            assert (found.size, found.seen) == (value.size, expected.seen)
            assert found.mean == pytest.approx(expected.mean, abs=1e-6)
            assert found.std == pytest.approx(np.asarray(value, float).std(), rel=1e-5)


def test_unseen_values_have_no_bin_of_their_own() -> None:
    assert np.isnan(bin_edges()[UNSEEN_BIN]).all()
    assert UNSEEN_BIN not in summarize(special(1, shape=LARGE)).nonzero_bins()[:, 0]


@pytest.mark.parametrize("sample", [0, -3, 1.5, "all", None])
def test_no_sample(sample: Any) -> None:
    with pytest.raises(ValueError, match='sample must be "auto" or a whole number from 1, got'):
        summarize(jnp.ones(3), sample=sample)
