"""summarize against a float64 NumPy oracle: every dtype and every class of value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import CLASSES, COMPLEX, FLOATS, INTEGERS, NARROW, check, device, values

from nnx_inspector.summarize import summarize
from nnx_inspector.summary import Summary, merge


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Arrays of every dtype and class of values, empty and 0-d among them."""
    dtype = draw(st.sampled_from(FLOATS + INTEGERS + NARROW + COMPLEX))
    shape = draw(st.sampled_from([(), (0,), (3, 0), (257,)]))
    x = values(draw(st.integers(0, 2**32)), draw(st.sampled_from(CLASSES)), dtype, shape)
    if x.size > 1 and dtype in FLOATS:  # few values in a known shape: each shape is a compilation
        keep = draw(st.integers(0, x.size))
        x = np.where(np.arange(x.size) < keep, x, dtype(np.nan)).astype(dtype)
    return x


def against_oracle(x: np.ndarray) -> None:
    check(summarize(device(x)), x)


@settings(max_examples=150, deadline=None)
@given(arrays())
def test_every_figure_is_the_oracles(x: np.ndarray) -> None:
    against_oracle(x)


@pytest.mark.long
@settings(max_examples=20_000, deadline=None)
@given(arrays())
def test_every_figure_is_the_oracles_many(x: np.ndarray) -> None:
    against_oracle(x)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + NARROW + COMPLEX)
@pytest.mark.parametrize("kind", CLASSES)
def test_every_dtype_and_class(dtype: Any, kind: str) -> None:
    against_oracle(values(7, kind, dtype, (257,)))


MILLION = 1 << 20


@pytest.mark.parametrize(
    "make",
    [
        lambda z: 1e4 + 1e-2 * z,
        lambda z: 1e8 + 20 * z,
        lambda z: np.full_like(z, 0.1),
        lambda z: 1e30 * z,
        lambda z: 1e-30 * z,
        lambda z: np.clip(3.3e38 * (1 + 0.01 * z), -3.4e38, 3.4e38),
        lambda z: np.sign(z) * 3.4e38,
        lambda z: np.where(np.arange(z.size) == 5, 0.0, 1e4 + 1e-2 * z),
        lambda z: np.where(np.arange(z.size) == 5, -1e30, z),
        lambda z: np.exp(4 * z),
        lambda z: np.where(z > 0, 1e4, 1e4 + 2.0**-10),
        lambda z: np.where(np.arange(z.size) % 2 == 0, np.nan, 1e4 + 1e-2 * z),
        lambda z: (np.abs(z) + 3)[:-12345],
        lambda z: np.maximum(z, 0).reshape(1024, 1024).T,
    ],
)
def test_a_million_adversarial_floats(make: Any) -> None:
    x = make(np.random.default_rng(1).normal(size=MILLION)).astype(np.float32)
    check(summarize(jnp.asarray(x)), x, tolerance=1e-6)


def test_rows_of_a_million() -> None:
    x = np.random.default_rng(2).normal(size=(3, MILLION)).astype(np.float32) + 100
    s = summarize(jnp.asarray(x), batch_rank=1)
    for i in range(3):
        check(s.row(i), x[i], tolerance=1e-6)


def test_wide_integers_keep_their_extremes() -> None:
    x = np.array([2**53 + 1, 2**62 + 1, -(2**63)], np.int64)
    assert summarize(x).points.dtype == np.int64
    assert np.asarray(summarize(x).points)[:2].tolist() == [-(2**63), 2**62 + 1]
    x = np.array([10**18, 10**18 + 2], np.int64)
    assert summarize(x).std == 1.0
    assert merge([summarize(x), summarize(x + 4)]).std == pytest.approx(np.sqrt(5))
    assert summarize(jnp.array([16777217, 16777219], jnp.int32)).std == 1.0


def test_64_bits_in_64_bits_whatever_x64_says() -> None:
    x = np.array([1e300, -1e300, 3e-320, 1 + 1e-12, np.nan])
    for context in (jax.enable_x64(True), jax.enable_x64(False)):
        with context:
            s = summarize(x)
            inside = jax.jit(lambda: summarize(x))()
        assert (s.min, s.max, s.nan, s.posinf, s.zeros) == (-1e300, 1e300, 1, 0, 0)
        assert (inside.min, inside.max, inside.nan, inside.zeros) == (-1e300, 1e300, 1, 0)
        assert s.nonzero_bins()[[0, -1], 0].tolist() == [0xFF7, 0x7F7]
    with jax.enable_x64(True):
        assert jax.jit(summarize)(jnp.array([1.0, 1 + 1e-12])).std == pytest.approx(5e-13, rel=1e-3)
    assert summarize(2**40).mean == 2.0**40
    assert summarize(0.1).mean == 0.1
    assert summarize(True).mean == 1.0


def test_opaque_dtypes_are_only_counted() -> None:
    keys = jax.random.split(jax.random.key(0), (2, 3))
    for x in (keys, np.zeros((2, 3), jax.dtypes.float0)):
        s = summarize(x)
        assert (s.size, s.finite, s.nan, s.zeros) == (6, 0, 0, 0)
        assert np.isnan([s.mean, s.std, s.min, s.max, s.norm, s.quantile(0.5)]).all()
        assert summarize(x, batch_rank=1).rows == (2,)
        assert summarize(x, batch_rank=1).row(0).size == 3
    assert jax.jit(summarize)(keys).size == 6


def test_what_is_no_array_of_numbers_is_an_error() -> None:
    with pytest.raises(TypeError, match="dtype"):
        summarize(np.array(["a"]))
    with pytest.raises(TypeError, match="dtype"):
        summarize(np.array([object()]))
    with pytest.raises(ValueError, match="batch_rank=2"):
        summarize(jnp.ones(3), batch_rank=2)


def test_one_trace_for_many_sites() -> None:
    compilations = 0

    @jax.jit
    def f(x: jax.Array) -> Summary:
        nonlocal compilations
        compilations += 1
        return summarize(x)

    f(jnp.ones(3))
    f(jnp.zeros(3))
    assert compilations == 1
