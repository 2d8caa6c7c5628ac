"""Samples of parameters: every statistic against NumPy, and what a comparison of two shows."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnx_inspector.stats.samples import parameter_stats
from nnx_inspector.stats.samples import sample_parameters as module
from nnx_inspector.stats.samples.parameter_stats import STATE_LENGTH
from nnx_inspector.stats.samples.sample_parameters import examples_vary, sample_parameter
from nnx_inspector.stats.samples.strides import as_c_dtype, split_limit, strides_within


def values(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def stats_of(state, before=None):
    """The statistics of one parameter by name."""
    unknown = np.full(STATE_LENGTH, np.nan)
    (row,) = parameter_stats.parameter_stats(
        state[None], (unknown if before is None else before)[None]
    )
    return dict(zip(parameter_stats.PARAMETER_STATS, row, strict=True))


def test_a_change_is_relative_to_what_was():
    x = values((6, 5))
    one, two = (np.asarray(sample_parameter(jnp.asarray(a))) for a in (x, x * 1.1))
    first = stats_of(one)
    assert first["norm"] == pytest.approx(np.sqrt(np.mean(x.astype(np.float64)[:4] ** 2)), rel=0.5)
    assert np.isnan(first["change"])
    assert np.isnan(first["same"])
    then = stats_of(two, one)
    assert then["change"] == pytest.approx(0.1, rel=1e-4)
    assert (then["same"], then["decay"]) == (0, 0)
    assert stats_of(np.asarray(sample_parameter(jnp.asarray(x * 0.99))), one)["decay"] == 1
    assert stats_of(one, one)["same"] == 1


DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 511), (1025,), (2, 3, 700), (256, 256)])
def test_every_element_is_asked_whether_it_is_finite(shape, dtype):
    random = np.random.default_rng(len(shape))
    x = random.normal(size=shape)
    kind = random.integers(0, 40, size=shape)
    x = np.where(kind == 0, np.nan, np.where(kind == 1, np.inf, np.where(kind == 2, -np.inf, x)))
    if dtype == "float64":
        x = np.where(kind == 3, 1e300, x)  # not infinite, though a float32 would be
    with jax.enable_x64(dtype == "float64"):
        y = jnp.asarray(x, dtype)
        wide = np.asarray(y).astype(np.float64)
        expected = [np.isnan(wide).sum(), np.isinf(wide).sum()]
        for state in (sample_parameter(y), jax.vmap(sample_parameter)(y[None])[0], in_jax(y)):
            found = stats_of(np.asarray(state))
            assert [found["nan"], found["infinite"]] == expected


def in_jax(x):
    """The program for other devices than one CPU."""
    # XLA's way, step by step, beside the native one
    x = as_c_dtype(x) if x.dtype.itemsize < 8 else x
    nan, infinite = module._count_nonfinite(x.reshape(-1))[1:]
    names = {"nan": nan, "infinite": infinite}
    return np.array(
        [*(names.get(n, np.nan) for n in parameter_stats.STATE_HEAD), *[0] * parameter_stats.SAMPLE]
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_program_in_c_and_the_one_in_jax_agree(dtype):
    x = jnp.asarray(values((100, 70)), dtype).at[7, 7].set(jnp.nan).at[8].set(jnp.inf)
    steps = strides_within(x.shape, [*split_limit(x.shape[:-1], 4), 64])
    alike = jax.jit(lambda x: module._sample_all(x, steps=steps)[0])(x)
    np.testing.assert_array_equal(np.asarray(sample_parameter(x)), np.asarray(alike))


def test_older_recordings_lack_the_counts():
    state = np.asarray(sample_parameter(jnp.ones(3)))[None]
    rows = parameter_stats.parameter_stats(state, np.full_like(state, np.nan))
    for missing in (
        2,
        2 + len(parameter_stats.ID_STATS),
        2 + len(parameter_stats.ID_STATS + parameter_stats.LOOP_STATS),
    ):
        again = parameter_stats.padded_parameter_stats(rows[:, :-missing])
        np.testing.assert_array_equal(again[:, :-missing], rows[:, :-missing])
        assert np.isnan(again[:, -missing:]).all()


@given(seed=st.integers(0, 2**16), at=st.integers(0, 999))
def test_no_bit_changes_unnoticed(seed, at):
    x = values((1000,), seed)
    y = x.copy()
    y[at] = np.nextafter(y[at], np.float32(np.inf))
    one, two = (np.asarray(sample_parameter(jnp.asarray(a.reshape(50, 20)))) for a in (x, y))
    assert stats_of(two, one)["same"] == 0


def test_scalars_and_narrow_dtypes_are_sampled_too():
    for x in (jnp.float32(3.0), jnp.ones((2, 3), jnp.bfloat16), jnp.ones(1000)):
        assert stats_of(np.asarray(sample_parameter(x)))["norm"] == pytest.approx(
            float(np.asarray(x, np.float64).flat[0])
        )


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (np.ones((4, 3)), 0),
        (np.arange(4), 1),
        ((np.ones((4, 3)), np.eye(4)), 1),
        ([np.ones((1, 3)), 2.0, None], 0),
    ],
)
def test_whether_examples_differ(tree, expected):
    tree = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree)
    assert float(examples_vary(tree)[len(parameter_stats.STATE_HEAD)]) == expected
