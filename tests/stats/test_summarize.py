"""summarize against a float64 NumPy oracle: every dtype and every class of value."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from summary_oracle import ALL, CLASSES, FLOATS, check, device, values

from nnx_inspector.stats.summarize import merge_in_trace, summarize
from nnx_inspector.stats.summary import Summary, merge

SHAPES = [(257,), (257,), (257,), (257,), (), (0,), (3, 0)]
"""Few shapes, because each is a compilation; most arrays have values."""


@st.composite
def arrays(draw: st.DrawFn, shapes: Any = SHAPES) -> np.ndarray:
    """Arrays of every dtype and class of values, also empty and 0-d ones."""
    dtype, kind = draw(st.sampled_from(ALL)), draw(st.sampled_from(CLASSES))
    x = values(draw(st.integers(0, 2**32)), kind, dtype, draw(st.sampled_from(shapes)))
    if x.size > 1 and dtype in FLOATS:  # few values in a known shape
        keep = draw(st.integers(0, x.size))
        x = np.where(np.arange(x.size) < keep, x.ravel(), dtype(np.nan)).astype(dtype)
    return x


def against_oracle(x: np.ndarray) -> None:
    check(summarize(device(x)), x)


@settings(max_examples=80, deadline=None)
@given(arrays())
def test_every_figure_is_the_oracles(x: np.ndarray) -> None:
    against_oracle(x)


@pytest.mark.long
def test_every_figure_of_20_000_arrays_is_the_oracles() -> None:
    tried: collections.Counter[Any] = collections.Counter()

    @settings(max_examples=20_000, deadline=None, database=None)
    @given(arrays(shapes=[*SHAPES, (1000, 3)]))
    def each(x: np.ndarray) -> None:
        tried[x.dtype] += 1
        against_oracle(x)

    each()
    assert sum(tried.values()) >= 20_000
    assert set(tried) == {np.dtype(d) for d in ALL}


@pytest.mark.parametrize("dtype", ALL)
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
    for x, name in ((keys, "key<fry>"), (np.zeros((2, 3), jax.dtypes.float0), "float0")):
        s = summarize(x)
        assert s.opaque == f"{name}[2,3]"
        assert repr(s) == f"Summary({name}[2,3], no figures)"
        assert merge([s, s]).opaque == s.opaque
        assert merge([s, summarize(jnp.ones(3))]).opaque == ""
        assert summarize(x, batch_rank=1).row(0).opaque == f"{name}[3]"
        assert (s.size, s.finite, s.nan, s.zeros) == (6, 0, 0, 0)
        assert np.isnan([s.mean, s.std, s.min, s.max, s.norm, s.quantile(0.5)]).all()
        assert summarize(x, batch_rank=1).rows == (2,)
        assert summarize(x, batch_rank=1).row(0).size == 3
    assert jax.jit(summarize)(keys).size == 6
    assert jax.vmap(summarize)(keys).opaque == "key<fry>[3]"
    assert jax.jit(summarize)(keys[0, 0]).opaque == "key<fry>[]"


def test_opaque_summaries_add_up_inside_jit() -> None:
    keys = jax.random.split(jax.random.key(0), 3)

    @jax.jit
    def added(n: int) -> Summary:
        more = lambda i, s: merge_in_trace(s, summarize(keys))  # noqa: E731
        return jax.lax.fori_loop(1, n, more, summarize(keys))

    assert (added(4).size, added(4).opaque) == (12, "key<fry>[3]")
    with pytest.raises(ValueError, match="summaries of key<fry>"):
        merge_in_trace(summarize(keys), summarize(jnp.ones(3)))


def test_tokens_have_no_figures() -> None:
    assert summarize(jax.lax.create_token()).opaque == "token"
    assert summarize(jax.lax.create_token()).size == 0

    @jax.jit
    def inside(x: jax.Array) -> Summary:
        return summarize(jax.lax.create_token(x))

    assert repr(inside(jnp.ones(3))) == "Summary(token, no figures)"


def test_dtypes_that_xla_does_not_compile() -> None:
    for dtype in (ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn):
        check(summarize(np.array([0, 1, -2, 0.5]).astype(dtype)), np.array([0, 1, -2, 0.5]))
    assert summarize(np.array([0, 1, 1]).astype(ml_dtypes.uint1)).mean == pytest.approx(2 / 3)
    assert summarize(np.array([0, 1, 1]).astype(ml_dtypes.int1)).min == -1
    check(summarize(np.array([1.5, np.nan, 3.0], ">f4")), np.array([1.5, np.nan, 3.0]))
    check(summarize(np.array([1, 2**40], ">i8")), np.array([1, 2**40]))


def test_what_is_no_array_of_numbers_is_an_error() -> None:
    with pytest.raises(TypeError, match="dtype"):
        summarize(np.array(["a"]))
    with pytest.raises(TypeError, match="dtype"):
        summarize(np.array([object()]))
    for dtype in (np.longdouble, [("a", "f4")], "M8[s]"):
        with pytest.raises(TypeError, match="Convert it first"):
            summarize(np.zeros(3, dtype))
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
