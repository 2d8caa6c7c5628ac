"""The positions that count: every figure is that of NumPy on the values chosen by the mask."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from summary_oracle import ALL, CLASSES, check, check_units, device, values

from nnx_inspector.stats.samples import unit_stats
from nnx_inspector.stats.samples.sample_units import sample_units
from nnx_inspector.stats.samples.unit_stats import UNITS, UnitSamples, head_stat, unit_stat
from nnx_inspector.stats.summarize import mask_shape, summarize
from nnx_inspector.stats.units import measure_units

SHAPE = (5, 7, 3)


@st.composite
def masked(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """An array of any dtype and class of values, and a mask of its first two axes."""
    seed = draw(st.integers(0, 2**32))
    x = values(seed, draw(st.sampled_from(CLASSES)), draw(st.sampled_from(ALL)), SHAPE)
    part = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    return x, np.random.default_rng(seed).random(SHAPE[:2]) < part


@settings(max_examples=150, deadline=None)
@given(masked())
def test_a_summary_is_that_of_the_chosen_values(both: tuple[np.ndarray, np.ndarray]) -> None:
    x, w = both
    check(summarize(device(x), where=w[..., None]), x[w])


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, np.float64, np.int64])
def test_rows_have_masks_of_their_own(dtype: Any) -> None:
    x, w = values(1, "normal", dtype, (4, 6, 9)), np.tril(np.ones((4, 6), bool), 1)
    found = summarize(x, batch_rank=1, where=w[..., None])
    for i in range(len(x)):
        check(found.row(i), x[i][w[i]])


def test_no_position_counts() -> None:
    found = summarize(jnp.ones((3, 4)), where=np.zeros((3, 1), bool))
    assert (found.size, found.nan, found.zeros) == (0, 0, 0)
    assert np.isnan(found.mean)


def test_what_does_not_count_may_be_anything() -> None:
    """A NaN, an infinity and a huge number at padding are seen in no figure."""
    x = np.ones((2, 4, 3), np.float32)
    x[0, 2], x[0, 3], x[1, 3] = np.nan, np.inf, 3e38
    w = np.array([[1, 1, 0, 0], [1, 1, 1, 0]], bool)[..., None]
    found = summarize(x, where=w)
    assert (found.size, found.nan, found.posinf, found.max, found.std) == (15, 0, 0, 1, 0)
    assert measure_units(jnp.asarray(x), where=w).max.tolist() == [1, 1, 1]
    assert head_stat(np.asarray(sample_units(jnp.asarray(x), jnp.asarray(w))), "measured") == 1


def test_a_histogram_of_a_sample_has_only_what_counts() -> None:
    x = values(3, "normal", np.float32, (64, 64, 64))
    w = np.arange(64)[None, :] < np.arange(64)[:, None]
    found = summarize(x, where=w[..., None])
    chosen = x[w].astype(np.float64)
    assert found.size == chosen.size
    assert found.mean == pytest.approx(chosen.mean(), abs=1e-6)
    assert found.quantile(0.5) == pytest.approx(np.median(chosen), abs=0.05)


@settings(max_examples=60, deadline=None)
@given(masked())
def test_units_are_those_of_the_chosen_values(both: tuple[np.ndarray, np.ndarray]) -> None:
    x, w = both
    check_units(measure_units(device(x), where=w[..., None]), x[w])


@pytest.mark.parametrize("part", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(6, 3), (9, 5, 4), (3, 4, 5, 6)])
def test_a_sample_is_that_of_the_chosen_values(shape: tuple[int, ...], part: float) -> None:
    rng = np.random.default_rng(len(shape))
    x = (rng.normal(size=shape) * 3 + 1).astype(np.float32)
    w = rng.random(shape[:-1]) < part
    w[0, ...] |= not w.any()
    found = np.asarray(sample_units(jnp.asarray(x), jnp.asarray(w[..., None])), np.float64)
    rows, k = x[w].astype(np.float64), shape[-1]
    assert head_stat(found, "measured") == 1
    examples = w.reshape(len(w), -1).any(1).sum()
    assert head_stat(found, "examples") == examples
    assert head_stat(found, "positions") == pytest.approx(len(rows) / examples)
    y, at = x.astype(np.float64).reshape(shape[0], -1, k), w.reshape(shape[0], -1)
    each = [y[at[:, p], p] for p in range(at.shape[1]) if at[:, p].any()]
    within = np.concatenate([one - one.mean(0) for one in each])
    for name, expected in {
        "low": rows.min(0),
        "high": rows.max(0),
        "mean": rows.mean(0),
        "std": rows.std(0),
        "spread": np.sqrt((within**2).mean(0)),
        "tanh": (np.abs(rows) > unit_stats.TANH_FLAT).mean(0),
        "sigmoid": (np.abs(rows) > unit_stats.SIGMOID_FLAT).mean(0),
        "ends": (np.minimum(np.abs(rows), np.abs(np.abs(rows) - 1)) <= 0.01).mean(0),
        "top": (np.abs(np.abs(rows) - 1) <= 0.01).mean(0),
    }.items():
        np.testing.assert_allclose(unit_stat(found, name)[:k], expected, atol=2e-5, err_msg=name)
        assert np.isnan(unit_stat(found, name)[k:UNITS]).all()
    covariance = np.cov(rows.T, bias=True)
    rank = np.trace(covariance) ** 2 / (covariance**2).sum() if len(rows) > 1 else np.nan
    assert head_stat(found, "rank") == pytest.approx(rank, rel=1e-4, nan_ok=True)


def test_a_sample_with_all_positions_is_the_plain_one() -> None:
    x = jnp.asarray(values(0, "normal", np.float32, (8, 6, 5)))
    all_of_them = jnp.ones((8, 1, 1), bool)
    np.testing.assert_allclose(sample_units(x, all_of_them), sample_units(x), rtol=1e-5, atol=1e-6)


def test_a_unit_that_is_dead_only_at_padding_is_not_dead() -> None:
    x = np.zeros((4, 6, 3), np.float32)
    x[:, :2] = np.random.default_rng(0).normal(size=(4, 2, 3))
    x[:, :, 1] = 0
    w = np.arange(6)[None] < np.full((4, 1), 2)
    vector = np.asarray(sample_units(jnp.asarray(x), jnp.asarray(w[..., None])))
    _, _, masks = unit_stats.site_stats([UnitSamples([vector])])
    assert unit_stats.unpack_mask(masks, "dead")[0, :3].tolist() == [False, True, False]
    w = ~w
    vector = np.asarray(sample_units(jnp.asarray(x), jnp.asarray(w[..., None])))
    _, _, masks = unit_stats.site_stats([UnitSamples([vector])])
    assert unit_stats.unpack_mask(masks, "dead")[0, :3].all()


@pytest.mark.parametrize(
    ("mask", "shape", "expected"),
    [
        ((4, 6), (4, 6, 8), (4, 6, 1)),
        ((4, 6), (4, 6, 2, 8), (4, 6, 1, 1)),
        ((4,), (4, 6, 8), (4, 1, 1)),
        ((1, 6), (4, 6, 8), (1, 6, 1)),
        ((4, 1), (4, 6, 8), (4, 1, 1)),
        ((), (4, 8), (1, 1)),
        ((4, 6), (4, 2, 6, 6), (4, 1, 6, 1)),
        ((4, 6), (4, 6, 6, 6), (4, 1, 6, 1)),
        ((4, 6), (6, 4, 8), None),
        ((4, 6), (4, 8), None),
        ((4, 6), (4, 6), None),
        ((4, 6), (), None),
        ((4, 6), (4, 2, 7, 6), None),
        ((5, 6), (4, 2, 6, 6), None),
    ],
)
def test_which_axes_a_mask_has(mask: Any, shape: Any, expected: Any) -> None:
    assert mask_shape(mask, jax.ShapeDtypeStruct(shape, np.float32)) == expected


def test_a_mask_has_all_axes_of_integers() -> None:
    assert mask_shape((4, 6), jax.ShapeDtypeStruct((4, 6), np.int32)) == (4, 6)
