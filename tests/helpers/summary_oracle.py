"""Arrays of every dtype and class of values, and their figures by NumPy in float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nnx_inspector.stats.bins import QUANTILE_ERROR, SUBNORMAL_ERROR
from nnx_inspector.stats.summary import Summary
from nnx_inspector.stats.units import Units

FLOATS = [
    np.float16,
    ml_dtypes.bfloat16,
    np.float32,
    np.float64,
    ml_dtypes.float8_e3m4,
    ml_dtypes.float8_e4m3,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3b11fnuz,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e5m2fnuz,
    ml_dtypes.float8_e8m0fnu,
    ml_dtypes.float4_e2m1fn,
]
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
NARROW_INTEGERS = [ml_dtypes.int2, ml_dtypes.uint2, ml_dtypes.int4, ml_dtypes.uint4]
NARROW = [*NARROW_INTEGERS, np.bool_]
COMPLEX = [np.complex64, np.complex128]
ALL = FLOATS + INTEGERS + NARROW + COMPLEX
CLASSES = ("normal", "specials", "zeros", "subnormal", "huge", "constant", "narrow", "spread")
TINY = 2.0**-126  # XLA on a CPU treats smaller values as 0


def values(seed: int, kind: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """An array of one class of values, made from a seed, so that a failure prints a short text."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind in "iu" or dtype in NARROW_INTEGERS:
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
    info = ml_dtypes.finfo(dtype)
    largest, tiny = float(info.max), float(info.smallest_normal)
    x = rng.normal(size=shape)
    if kind == "specials":
        x = np.where(rng.random(shape) < 0.5, rng.choice([np.nan, np.inf, -np.inf, 0.0], shape), x)
    elif kind == "zeros":
        x = rng.choice([0.0, -0.0], shape)
    elif kind == "subnormal":
        x = np.copysign(rng.random(shape) * tiny, x)
    elif kind == "huge":
        x = np.copysign(largest, x) * rng.choice([1.0, 0.75], shape)
    elif kind == "constant":
        x = np.full(shape, x.flat[0] if x.size else 0.0)
    elif kind == "narrow":
        x = min(1e8, largest / 4) * (1 + float(info.eps) * rng.integers(0, 8, shape))
    elif kind == "spread":
        with np.errstate(all="ignore"):
            powers = rng.uniform(np.log2(tiny), np.log2(largest), shape)
            x = np.copysign(np.exp2(powers), x)
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def magnitudes(x: np.ndarray) -> np.ndarray:
    """The summarised values in float64 (longdouble for 64-bit integers)."""
    if x.dtype.kind == "c":
        real, imag = np.float64(x.real), np.float64(x.imag)
        with np.errstate(over="ignore"):
            size = np.minimum(np.hypot(real, imag), np.finfo(x.real.dtype).max)
        size = np.where(np.isinf(real) | np.isinf(imag), np.inf, size)
        return np.where(np.isnan(real) | np.isnan(imag), np.nan, size).ravel()
    return x.astype(np.float64).ravel()


def check(s: Summary, x: np.ndarray, tolerance: float = 1e-5) -> None:
    """Check every figure of `s` against the values of `x`."""
    v = magnitudes(x)
    finite = v[np.isfinite(v)]
    assert s.size == v.size
    assert s.nan == np.isnan(v).sum()
    assert s.posinf == (v == np.inf).sum()
    assert s.neginf == (v == -np.inf).sum()
    assert s.zeros == (x == 0).sum()
    assert s.finite == finite.size == s.size - s.nan - s.posinf - s.neginf
    assert s.nonzero_bins()[:, 1].sum() == pytest.approx(s.finite, rel=1e-9)
    assert repr(s).startswith("Summary(")
    edges, counts = s.histogram(13)
    assert counts.sum() == pytest.approx(finite.size)
    assert (edges[1:] > edges[:-1]).all()
    spark = s.sparkline(32)
    assert spark.max() == (255 if finite.size else 0)
    if not finite.size:
        figures = (s.mean, s.std, s.min, s.max, s.norm, s.quantile(0.5))
        assert np.isnan(figures).all()
        return

    low, high = float(finite.min()), float(finite.max())
    single = x.dtype == np.complex64  # XLA's own magnitude rounds
    rounds = 1e-6 if x.dtype.kind == "c" else 0
    faint = float(np.finfo(x.real.dtype).tiny) if x.dtype.kind == "c" else 0
    assert s.min == pytest.approx(low, rel=rounds, abs=faint)
    assert s.max == pytest.approx(high, rel=rounds, abs=faint)
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
    # DDSketch's guarantee for every quantile, against the order statistic
    last = max(finite.size - 1, 1)
    ranks = np.arange(0, finite.size, max(finite.size // 300, 1))
    q = np.concatenate([np.linspace(0, 1, 41), ranks / last])
    found = s.quantile(q)
    off = np.where((q == 0) | (q == 1), 0.0, s.rank_error)  # of a sample
    around = [np.clip(q - off, 0, 1), np.clip(q + off, 0, 1)]
    low, high = (np.quantile(finite, one, method="lower") for one in around)
    exact = np.clip(found, low, high)
    exact = np.where(np.isnan(found), high, exact)
    # Values beyond float32 share the outermost bin with others, which are then unknown.
    wide = np.abs(finite).max() > np.finfo(np.float32).max
    assert (np.isnan(found) <= (wide & (np.abs(exact) >= 1.875 * 2.0**127))).all()
    known = ~np.isnan(found)
    bound = np.maximum(QUANTILE_ERROR * np.abs(exact), SUBNORMAL_ERROR)
    assert (np.abs(found / 2 - exact / 2)[known] <= bound[known] / 2).all()
    rising = found[:41][known[:41]]
    assert (rising[1:] >= rising[:-1]).all()


def check_units(u: Units, x: np.ndarray, axis: int = -1, tolerance: float = 1e-5) -> None:
    """Check every figure of every unit against the values at its index of the axis."""
    v = magnitudes(x).reshape(x.shape)
    shape = (x.shape[axis], x.size // max(x.shape[axis], 1))
    v, exact = (np.moveaxis(a, axis, 0).reshape(shape) for a in (v, x))
    assert len(u) == len(v)
    finite = np.isfinite(v)
    zeros = (exact == 0).sum(axis=1)
    names_something = x.dtype == bool or (x.dtype.kind in "iu" and x.dtype.itemsize >= 4)
    for found, expected in (
        (u.size, np.full(len(v), v.shape[1])),
        (u.finite, finite.sum(axis=1)),
        (u.zeros, zeros),
        (u.nan, np.isnan(v).sum(axis=1)),
        (u.posinf, (v == np.inf).sum(axis=1)),
        (u.neginf, (v == -np.inf).sum(axis=1)),
        (u.dead, (zeros == v.shape[1]) & (v.shape[1] > 0) & (not names_something)),
    ):
        np.testing.assert_array_equal(found, expected)
    if v.shape[1]:
        np.testing.assert_allclose(u.zero_fraction, zeros / v.shape[1])
    complex_ = x.dtype.kind == "c"
    rounds = 1e-6 if complex_ else 0
    faint = float(np.finfo(x.real.dtype).tiny) if complex_ else 0
    single = x.dtype == np.complex64  # XLA's own magnitude rounds
    for i, here in enumerate(finite):
        numbers = v[i][here]
        figures = np.array([u.min[i], u.max[i], u.mean[i], u.std[i], u.norm[i]])
        if not numbers.size:
            assert np.isnan(figures).all()
            continue
        low, high = float(numbers.min()), float(numbers.max())
        scale = max(abs(low), abs(high)) or 1.0
        unit = numbers / scale
        mean, std = float(unit.mean()) * scale, float(unit.std()) * scale
        if x.dtype.kind in "iu":  # float64 does not hold 64 bits
            whole = exact[i].astype(np.uint64)
            std = float((whole - exact[i].min().astype(np.uint64)).astype(float).std())
        norm = float(np.sqrt((unit * unit).sum())) * scale
        floor = 4 * TINY + 1e-7 * scale * single
        assert figures[:2] == pytest.approx([low, high], rel=rounds, abs=faint)
        assert u.mean[i] == pytest.approx(mean, rel=1e-6, abs=tolerance * std + floor)
        assert u.std[i] == pytest.approx(std, rel=tolerance, abs=floor + 1e-13 * scale)
        assert u.norm[i] == pytest.approx(norm, rel=tolerance, abs=floor * np.sqrt(numbers.size))


def device(x: np.ndarray) -> Any:
    """A jax array if jax has the dtype without 64 bits, else the array itself."""
    return x if x.dtype.itemsize >= 8 and x.dtype != np.complex64 else jnp.asarray(x)
