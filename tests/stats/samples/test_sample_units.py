"""Samples of units: every statistic against NumPy in float64, and their reading on the host."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_inspector.stats.samples import sample_units as module
from nnx_inspector.stats.samples import unit_stats
from nnx_inspector.stats.samples.sample_units import sample_units
from nnx_inspector.stats.samples.unit_stats import UnitSamples, head_stat, unit_stat, unpack_mask


def values(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def looked_at(x):
    """By hand: at most so many of each axis, evenly spaced (a middle axis here is short)."""
    steps = [
        -(-x.shape[0] // unit_stats.EXAMPLES),
        *[1] * (x.ndim - 2),
        -(-x.shape[-1] // unit_stats.UNITS),
    ]
    return np.asarray(x, np.float64)[tuple(slice(None, None, s) for s in steps)]


@pytest.mark.parametrize("shape", [(5, 3), (300, 7), (4, 6, 200), (2, 3, 4, 5)])
def test_every_statistic_is_that_of_numpy(shape):
    x = values(shape) * 3 + 1
    found = np.asarray(sample_units(jnp.asarray(x)), np.float64)
    y = looked_at(x)
    rows = y.reshape(-1, y.shape[-1])
    k = y.shape[-1]
    assert head_stat(found, "measured") == 1
    assert head_stat(found, "examples") == shape[0]
    assert (head_stat(found, "units"), head_stat(found, "looked")) == (shape[-1], k)
    for name, expected in {
        "low": rows.min(axis=0),
        "high": rows.max(axis=0),
        "mean": rows.mean(axis=0),
        "std": rows.std(axis=0),
        "spread": np.sqrt(y.var(axis=0).reshape(-1, k).mean(axis=0)),
        "tanh": (np.abs(rows) > unit_stats.TANH_FLAT).mean(axis=0),
        "sigmoid": (np.abs(rows) > unit_stats.SIGMOID_FLAT).mean(axis=0),
    }.items():
        np.testing.assert_allclose(unit_stat(found, name)[:k], expected, rtol=2e-5, atol=1e-6)
        assert np.isnan(unit_stat(found, name)[k:]).all()
    covariance = np.cov(rows.T, bias=True)
    rank = np.trace(covariance) ** 2 / (covariance**2).sum()
    np.testing.assert_allclose(head_stat(found, "rank"), rank, rtol=1e-4)


def test_what_is_not_finite_or_has_no_units_is_not_measured():
    x = values((4, 3))
    x[0, 0] = np.nan
    assert head_stat(np.asarray(sample_units(jnp.asarray(x))), "measured") == 0
    for other in (jnp.ones(3), jnp.ones((3, 2), jnp.int32), jnp.ones((0, 2)), jnp.ones(())):
        assert not np.asarray(sample_units(other)).any()


def test_squares_that_would_overflow_do_not():
    x = values((8, 4)).astype(np.float64) * 1e30
    found = np.asarray(sample_units(jnp.asarray(x, jnp.float32)), np.float64)
    np.testing.assert_allclose(unit_stat(found, "std")[:4], x.std(axis=0), rtol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_dtypes_are_measured_in_float32(dtype):
    x = jnp.asarray(values((16, 4)), dtype)
    found = np.asarray(sample_units(x), np.float64)
    expected = np.asarray(x, np.float64).mean(axis=0)
    np.testing.assert_allclose(unit_stat(found, "mean")[:4], expected, rtol=1e-5, atol=1e-7)
    assert head_stat(found, "limit") == pytest.approx(np.log2(float(jnp.finfo(dtype).max)))


def test_it_is_not_differentiated_and_works_in_jit():
    x = jnp.asarray(values((4, 3)))
    grad = jax.jit(jax.grad(lambda x: sample_units(x).sum() + x.sum()))(x)
    np.testing.assert_array_equal(grad, np.ones((4, 3)))


def read(vectors, **affine):
    """The figures of one site, None if it was not measured."""
    numbers, rows, masks = unit_stats.site_stats([UnitSamples(vectors, **affine)])
    return (rows[0], masks[0]) if numbers else None


def stats_of(x, **affine):
    row, masks = read([np.asarray(sample_units(jnp.asarray(x, jnp.float32)))], **affine)
    return dict(zip(unit_stats.SITE_STATS, row, strict=True)), masks


def test_dead_and_saturated_units_are_told_apart():
    x = np.stack(
        [np.zeros(6), -1 - np.arange(6) / 2, np.linspace(3, 4, 6), np.linspace(-1, 1, 6)], -1
    )
    figures, masks = stats_of(x)
    assert figures["units"] == 4
    wanted = {
        "dead": [1, 0, 0, 0], "below": [1, 1, 0, 0], "tanh": [0, 0, 1, 0], "sigmoid": [0, 0, 0, 0],
    }  # fmt: skip
    for name, expected in wanted.items():
        assert unpack_mask(masks, name)[:4].astype(int).tolist() == expected, name
        assert not unpack_mask(masks, name)[4:].any()


def test_units_that_hardly_vary_beside_another_are_still():
    """At each position by itself; with C and with XLA, and in all calls."""
    sizes = np.array([1, 0, 0.001, 0.019, 0.021, 0.5])
    x = (values((50, 4, 6), 2).round() * sizes + values((1, 4, 6), 3)).astype(np.float32)
    deviations = np.sqrt(np.asarray(x, np.float64).var(axis=0).mean(axis=0))
    expected = deviations < 0.02 * deviations.max()
    assert 2 <= expected.sum() <= 4
    # XLA's way, where a public call takes the native one
    by_xla = jnp.stack(module._sample_all(jnp.asarray(x), limit=128.0, steps=(1, 1, 1)))
    for vector in (sample_units(jnp.asarray(x)), by_xla):
        found = unpack_mask(read([np.asarray(vector)])[1], "still")
        np.testing.assert_array_equal(found[:6], expected)
        assert not found[6:].any()
    swapped = sample_units(jnp.asarray(x[..., ::-1]))
    in_both = unpack_mask(read([np.stack([sample_units(jnp.asarray(x)), swapped])])[1], "still")
    np.testing.assert_array_equal(in_both[:6], expected & expected[::-1])
    assert not unpack_mask(stats_of(np.ones((4, 3)))[1], "still").any()


def test_a_unit_that_wakes_in_another_call_is_not_dead():
    dead, alive = np.zeros((4, 2), np.float32), np.ones((4, 2), np.float32)
    vectors = [np.asarray(sample_units(jnp.asarray(x))) for x in (dead, alive)]
    assert unpack_mask(read([vectors[0]])[1], "dead")[:2].all()
    assert not unpack_mask(read(vectors)[1], "dead").any()
    assert not unpack_mask(read([np.stack(vectors)])[1], "dead").any()
    assert read([]) is None
    assert read([np.zeros(unit_stats.LENGTH)]) is None


def test_sites_are_read_together_as_they_are_alone():
    sites = [
        UnitSamples([np.asarray(sample_units(jnp.asarray(values((5, 3)))))]),
        UnitSamples([]),
        UnitSamples([np.asarray(sample_units(jnp.asarray(values((4, n), n)))) for n in (70, 2)]),
        UnitSamples(
            [np.stack([np.asarray(sample_units(jnp.asarray(values((6, 9), n)))) for n in (1, 2)])]
        ),
        UnitSamples([np.zeros(unit_stats.LENGTH)]),
        UnitSamples(
            [np.asarray(sample_units(jnp.asarray(values((50, 3)))))], np.ones(3), np.zeros(3)
        ),
    ]
    numbers, rows, masks = unit_stats.site_stats(sites)
    assert numbers == [0, 2, 3, 5]
    for number, row, mask in zip(numbers, rows, masks, strict=True):
        one = sites[number]
        alone = read(one.vectors, scale=one.scale, bias=one.bias)
        np.testing.assert_array_equal(row, alone[0])
        np.testing.assert_array_equal(mask, alone[1])
    last = read(sites[2].vectors[-1:])
    np.testing.assert_array_equal(rows[1], last[0], "of unlike shapes the last stands for all")
    assert np.isfinite(rows[3]).all()
    assert np.isnan(rows[0]).any(), "it has no scale and bias"


def test_constant_over_the_batch_is_exact_at_each_position():
    one = values((1, 5, 3)) * 1e4
    constant = np.repeat(one, 4, axis=0)
    assert stats_of(constant)[0]["flat"] == 1
    assert stats_of(constant)[0]["spread"] == 0
    constant[1, 2, 0] += 1
    assert stats_of(constant)[0]["flat"] == pytest.approx(2 / 3)
    assert np.isnan(stats_of(one)[0]["flat"])  # one example is not judged


def test_batch_norm_is_held_against_its_scale_and_bias():
    x = values((500, 3)) * [1, 2, 3] + [0, 1, 2]
    fits, _ = stats_of(x, scale=np.array([1, 2, 3]), bias=np.array([0, 1, 2]))
    assert fits["shifted"] == pytest.approx(0, abs=0.1)
    assert fits["scaled"] == pytest.approx(1, abs=0.1)
    other, _ = stats_of(10 * x + 5, scale=np.array([1, 2, 3]), bias=np.array([0, 1, 2]))
    assert other["shifted"] > 1
    assert other["scaled"] == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize("shape", [(4, 16, 16, 3), (4, 130, 3), (4, 32, 12, 3), (2, 8, 8, 8, 3)])
def test_positions_are_examined_alike_whether_even_or_odd(shape):
    """As a layer that doubles the resolution makes them: even ones 0, odd ones 1, on each axis."""
    grid = np.indices(shape)[1:-1] % 2
    for along in grid:
        found = np.asarray(sample_units(jnp.asarray(along, jnp.float32)), np.float64)
        assert head_stat(found, "positions") <= unit_stats.POSITIONS
        np.testing.assert_allclose(unit_stat(found, "mean")[: shape[-1]], 0.5, atol=0.17)
