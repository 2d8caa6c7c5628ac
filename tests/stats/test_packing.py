"""Summaries as vectors: packed and unpacked bit for bit, also as cotangents."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracle import CLASSES, check, values

from nnx_inspector.stats.packing import pack, packed_size, unpack
from nnx_inspector.stats.summarize import merge_in_trace, summarize
from nnx_inspector.stats.summary import Summary, merge

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
    random = np.random.default_rng(0)
    halves = random.integers(0, 2**16, (6, packed_size(np.float32)))
    halves *= random.integers(0, 2, halves.shape) * random.integers(1, 5, halves.shape)
    halves[:, 0] = np.arange(6) % 3
    on_host, added = unpack(halves.astype(np.float32)), unpack(jnp.asarray(halves, jnp.float32))
    assert (on_host.bins == 2**32 - 1).any()
    for name in ("bins", "points", "sums"):
        assert getattr(on_host, name).tobytes() == np.asarray(getattr(added, name)).tobytes()
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
