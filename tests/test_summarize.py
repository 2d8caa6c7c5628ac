"""summarize against a float64 NumPy oracle: every dtype, every class of value, every transform."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_inspector.summarize import (
    empty_in_trace,
    merge_in_trace,
    pack,
    packed_size,
    summarize,
    unpack,
)
from nnx_inspector.summary import Summary, merge

FLOATS = [
    np.float16,
    ml_dtypes.bfloat16,
    np.float32,
    np.float64,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3b11fnuz,
    ml_dtypes.float8_e8m0fnu,
    ml_dtypes.float4_e2m1fn,
]
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
NARROW = [ml_dtypes.int4, ml_dtypes.uint4, np.bool_]
COMPLEX = [np.complex64, np.complex128]
CLASSES = ("normal", "specials", "zeros", "subnormal", "huge", "constant", "narrow", "spread")
TINY = 2.0**-126  # XLA's CPU arithmetic takes what is smaller for 0


def values(seed: int, kind: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """An array of one class of values, in its dtype; from a seed, so that a failure is short."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind in "iu" or dtype in (ml_dtypes.int4, ml_dtypes.uint4):
        info = ml_dtypes.iinfo(dtype)
        low, high = int(info.min), int(info.max)
        if kind in ("zeros", "constant"):
            low = high = 0 if kind == "zeros" else high
        elif kind == "narrow":
            low = max(low, high - 100)
        elif kind == "spread":
            return rng.choice(np.array([low, high, 0, 1], object), shape).astype(dtype)
        wide = np.uint64 if low >= 0 else np.int64
        return rng.integers(low, high, shape, wide, endpoint=True).astype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind == "c":
        real = np.float32 if dtype == np.complex64 else np.float64
        parts = values(seed, kind, real, (2, *shape))
        with np.errstate(all="ignore"):
            return (parts[0] + 1j * parts[1]).astype(dtype)
    x = rng.normal(size=shape)
    if kind == "specials":
        x = np.where(rng.random(shape) < 0.5, rng.choice([np.nan, np.inf, -np.inf, 0.0], shape), x)
    elif kind == "zeros":
        x = rng.choice([0.0, -0.0], shape)
    elif kind == "subnormal":
        x = x * 2.0**-135
    elif kind == "huge":
        x = np.copysign(float(ml_dtypes.finfo(dtype).max), x) * rng.choice([1.0, 0.75], shape)
    elif kind == "constant":
        x = np.full(shape, x.flat[0] if x.size else 0.0)
    elif kind == "narrow":
        x = 1e8 + 20 * x
    elif kind == "spread":
        x = x * 10.0 ** rng.uniform(-30, 30, shape)
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def magnitudes(x: np.ndarray) -> np.ndarray:
    """What is summarised, in float64 (longdouble for 64-bit integers)."""
    if x.dtype.kind == "c":
        real, imag = np.float64(x.real), np.float64(x.imag)
        with np.errstate(over="ignore"):
            size = np.minimum(np.hypot(real, imag), np.finfo(x.real.dtype).max)
        size = np.where(np.isinf(real) | np.isinf(imag), np.inf, size)
        return np.where(np.isnan(real) | np.isnan(imag), np.nan, size).ravel()
    return x.astype(np.float64).ravel()


def check(s: Summary, x: np.ndarray, tolerance: float = 1e-5) -> None:
    """Every figure of s is that of x."""
    v = magnitudes(x)
    finite = v[np.isfinite(v)]
    assert s.size == v.size
    assert s.nan == np.isnan(v).sum()
    assert s.posinf == (v == np.inf).sum()
    assert s.neginf == (v == -np.inf).sum()
    assert s.zeros == (x == 0).sum()
    assert s.finite == finite.size == s.size - s.nan - s.posinf - s.neginf
    assert s.nonzero_bins()[:, 1].sum() == s.finite
    assert repr(s).startswith("Summary(")
    edges, counts = s.histogram(13)
    assert counts.sum() == pytest.approx(finite.size)
    assert (np.diff(edges) > 0).all()
    spark = s.sparkline(32)
    assert spark.max() == (255 if finite.size else 0)
    if not finite.size:
        figures = (s.mean, s.std, s.min, s.max, s.norm, s.quantile(0.5))
        assert np.isnan(figures).all()
        return

    low, high = float(finite.min()), float(finite.max())
    single = x.dtype == np.complex64  # XLA's own magnitude rounds
    assert s.min == pytest.approx(low, rel=1e-6 if x.dtype.kind == "c" else 0, abs=TINY * single)
    assert s.max == pytest.approx(high, rel=1e-6 if x.dtype.kind == "c" else 0, abs=TINY * single)
    scale = max(abs(low), abs(high)) or 1.0
    unit = finite / scale
    mean, std = float(unit.mean()) * scale, float(unit.std()) * scale
    if x.dtype.kind in "iu":  # float64 does not hold 64 bits
        std = float((x.ravel().astype(np.uint64) - x.min().astype(np.uint64)).astype(float).std())
    norm = float(np.sqrt((unit * unit).sum())) * scale
    floor = 4 * TINY + 1e-7 * scale * single
    assert s.mean == pytest.approx(mean, rel=1e-6, abs=tolerance * std + floor)
    assert s.std == pytest.approx(std, rel=tolerance, abs=floor + 1e-13 * scale)
    if x.dtype.kind != "c" and (s.points[0] == s.points[1]).all():
        assert s.std == 0
    assert s.norm == pytest.approx(norm, rel=tolerance, abs=floor * np.sqrt(finite.size))
    ordered = np.sort(finite)
    q = np.array([0.0, 0.01, 0.3, 0.5, 0.77, 0.99, 1.0])
    exact = ordered[np.floor(q * (finite.size - 1)).astype(int)]
    found = s.quantile(q)
    beyond = np.abs(exact) > np.finfo(np.float32).max  # only ever unknown or exact there
    assert (np.isnan(found) <= beyond).all()
    known = ~np.isnan(found)
    bound = np.where(beyond, 0, 0.0625 + 1e-6) * np.abs(exact) + 2 * TINY
    assert (np.abs(found - exact)[known] <= bound[known]).all()


def device(x: np.ndarray) -> Any:
    """As a jax array where jax has the dtype without 64 bits, else as it is."""
    return x if x.dtype.itemsize >= 8 and x.dtype != np.complex64 else jnp.asarray(x)


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


def same(a: Summary, b: Summary) -> None:
    """Equal, bit for bit (moments: as near as two compilations are)."""
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x.dtype, y.dtype), a, b)
    np.testing.assert_array_equal(a.bins, b.bins)
    np.testing.assert_array_equal(np.asarray(a.points)[..., :2], np.asarray(b.points)[..., :2])
    np.testing.assert_allclose(a.mean, b.mean, rtol=1e-6, atol=1e-6 * a.std)
    np.testing.assert_allclose(a.std, b.std, rtol=1e-5)


@pytest.fixture
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (4, 6, 50)).at[1, 2, 3].set(jnp.nan)


def test_jit_is_eager(x: jax.Array) -> None:
    same(jax.jit(summarize)(x), summarize(x))


def test_rows_are_those_of_vmap_and_scan(x: jax.Array) -> None:
    rows = summarize(x, batch_rank=1)
    scanned = jax.lax.scan(lambda c, row: (c, summarize(row)), 0, x)[1]
    for other in (jax.vmap(summarize)(x), jax.jit(jax.vmap(summarize))(x), scanned):
        assert other.rows == rows.rows == (4,)
        for i in range(4):
            same(other.row(i), rows.row(i))
            check(other.row(i), np.asarray(x[i]))
    nested = jax.vmap(jax.vmap(summarize))(x)
    assert nested.rows == (4, 6)
    check(nested, np.asarray(x))
    check(nested.row((1, 2)), np.asarray(x[1, 2]))
    check(nested.row(1), np.asarray(x[1]))
    check(jax.vmap(lambda v: summarize(v, batch_rank=1), in_axes=1)(x), np.asarray(x))


def test_gradients_pass_it_by(x: jax.Array) -> None:
    def loss(v: jax.Array) -> tuple[jax.Array, Summary]:
        return (v**2).sum(), summarize(v * 2)

    v = jnp.nan_to_num(x)
    (_, s), g = jax.jit(jax.value_and_grad(loss, has_aux=True))(v)
    check(s, 2 * np.asarray(v))
    np.testing.assert_array_equal(g, 2 * v)
    _, _, s = jax.jvp(loss, (v,), (v,), has_aux=True)
    check(s, 2 * np.asarray(v))
    check(jax.jit(jax.checkpoint(lambda v: loss(v)[1]))(v), 2 * np.asarray(v))
    for tangent in jax.tree.leaves(jax.jvp(summarize, (v,), (v,))[1]):
        assert tangent.dtype == jax.dtypes.float0 or not np.any(tangent)


def test_a_callback_may_consume_it(x: jax.Array) -> None:
    seen: list[Summary] = []

    @jax.jit
    def f(a: jax.Array) -> jax.Array:
        y = a @ a.T
        jax.debug.callback(lambda s: seen.append(s), summarize(y))
        return y

    a = jnp.nan_to_num(x[0])
    y = f(a)
    jax.effects_barrier()
    check(seen[0], np.asarray(y))


@jax.jit
def together(parts: jax.Array) -> Summary:
    """The rows of `parts`, merged one by one."""

    def body(i: Any, s: Summary) -> Summary:
        return merge_in_trace(s, summarize(parts[i]))

    return jax.lax.fori_loop(0, len(parts), body, empty_in_trace(parts[0]))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int32, np.uint8])
@pytest.mark.parametrize("kind", CLASSES)
def test_merging_in_a_loop(dtype: Any, kind: str) -> None:
    x = values(3, kind, dtype, (12, 97))
    parts = jnp.asarray(x)
    s = together(parts)
    check(s, x)
    whole = summarize(parts)
    np.testing.assert_array_equal(s.bins, whole.bins)
    np.testing.assert_array_equal(s.points[:2], whole.points[:2])
    check(merge([summarize(p) for p in parts]), x)
    check(summarize(parts, batch_rank=1).merged(), x)


def test_merging_many_drifting_parts_in_trace() -> None:
    x = np.random.default_rng(5).normal(size=(2000, 64)) + np.arange(2000)[:, None] * 10
    x = x.astype(np.float32)

    def body(s: Summary, row: jax.Array) -> tuple[Summary, None]:
        return merge_in_trace(s, summarize(row)), None

    s = jax.lax.scan(body, empty_in_trace(jnp.zeros(64)), jnp.asarray(x))[0]
    check(s, x, tolerance=3e-5)


def test_empty_in_trace_has_the_structure_of_summarize() -> None:
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, jnp.complex64, jnp.bool_):
        x = jnp.ones((2, 3), dtype)
        for batch_rank in (0, 1):
            s = summarize(x, batch_rank=batch_rank)
            nothing = empty_in_trace(jax.ShapeDtypeStruct((2, 3), dtype), batch_rank=batch_rank)
            assert jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), s, nothing)
            same(merge_in_trace(s, nothing), s)
            same(merge_in_trace(empty_in_trace(s), s), s)
            assert nothing.size == 0


def test_merging_in_trace_wants_like_summaries() -> None:
    with pytest.raises(ValueError, match="unlike"):
        merge_in_trace(summarize(jnp.ones(3)), summarize(jnp.ones(3, jnp.int32)))


def test_counts_stop_instead_of_wrapping() -> None:
    s = summarize(jnp.ones(4))
    big = Summary(bins=s.bins * np.uint32(2**30 - 1), points=s.points, sums=s.sums)
    assert big.size == 4 * (2**30 - 1)
    most = merge_in_trace(big, summarize(jnp.ones(2)))
    assert most.size == 2**32 - 2
    full = merge_in_trace(most, summarize(jnp.ones(7)))
    for stopped in (full, merge_in_trace(full, s), merge([full, s]), unpack(pack(full))):
        assert stopped.saturated
        assert "saturated" in repr(stopped)
        assert stopped.min == 1.0
        for name in ("size", "mean", "std", "norm", "nan", "finite"):
            with pytest.raises(OverflowError, match="merge them outside jit"):
                getattr(stopped, name)
    assert merge([big, big, big]).size == 12 * (2**30 - 1)


unpack_in_jit = jax.jit(unpack)


@jax.jit
def packed_and_added(s: Summary) -> jax.Array:
    """As a cotangent travels: zeros + payload."""
    return pack(s) + jnp.zeros(())


@pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.complex64, np.int8]
)
@pytest.mark.parametrize("kind", CLASSES)
def test_pack_round_trip(dtype: Any, kind: str) -> None:
    s = summarize(jnp.asarray(values(3, kind, dtype, (4, 97))), batch_rank=1)
    vector = packed_and_added(s)
    assert vector.dtype == np.float32
    assert vector.shape == (4, packed_size(dtype))
    assert np.isfinite(vector).all()
    for back in (unpack(vector), unpack(np.asarray(vector)), unpack_in_jit(vector)):
        for name in ("bins", "points", "sums"):
            a, b = np.asarray(getattr(s, name)), np.asarray(getattr(back, name))
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()


def test_pack_in_64_bits() -> None:
    x = np.array([1e300, -2.0, 5e-324])
    with jax.enable_x64(True):
        s = summarize(jnp.asarray(x))
        vector = pack(s)
        assert vector.shape == (packed_size(np.float64),)
        assert vector.dtype == np.float64
        back = unpack(vector)
    for again in (back, unpack(np.asarray(vector))):
        assert np.asarray(s.points).tobytes() == np.asarray(again.points).tobytes()
        check(again, x)


def test_a_packed_nothing_is_zeros_and_sums_are_noticed() -> None:
    assert not pack(empty_in_trace(jnp.ones(3))).any()
    assert unpack(np.zeros(packed_size(np.float32), np.float32)).size == 0
    a, b = jnp.array([1.0, jnp.nan]), jnp.full(70_000, -3.0)
    both = unpack(pack(summarize(a)) + pack(summarize(b)))
    assert (both.size, both.nan, both.finite) == (70_002, 1, 70_001)
    assert np.isnan([both.mean, both.std, both.min, both.max, both.norm]).all()
    assert both.quantile(0.5) == pytest.approx(-3.0, rel=0.0625)
    assert both.histogram(5)[1].sum() == pytest.approx(70_001)
    for more in (merge([both, summarize(a)]), merge_in_trace(both, summarize(a))):
        assert more.size == 70_004
        assert np.isnan([more.mean, more.std, more.min, more.max]).all()
    with pytest.raises(ValueError, match="elements"):
        unpack(np.zeros(7, np.float32))
    with pytest.raises(TypeError, match="int32"):
        pack(summarize(jnp.ones(3, jnp.int32)))


def test_it_travels_as_a_cotangent() -> None:
    @functools.partial(jax.custom_vjp)
    def tap(x: jax.Array, sink: jax.Array) -> jax.Array:
        return x

    tap.defvjp(lambda x, sink: (x, None), lambda _, g: (g, pack(summarize(g))))
    x = jax.random.normal(jax.random.key(3), (5, 33))
    sink = jnp.zeros(packed_size(jnp.float32))
    packed = jax.jit(jax.grad(lambda sink, x: (tap(x, sink) ** 3).sum()))(sink, x)
    check(unpack(packed), np.asarray(3 * x * x))


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
