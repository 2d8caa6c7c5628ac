"""summarize and merge_in_trace under every transform, against the same oracle."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from summary_oracle import CLASSES, check, values

from nnx_inspector.stats.summarize import merge_in_trace, summarize
from nnx_inspector.stats.summary import Summary, merge


def same(a: Summary, b: Summary) -> None:
    """Check equality bit for bit (moments: up to the difference of two compilations)."""
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


@pytest.mark.xfail(
    jax.default_backend() == "gpu",
    reason="XLA for a GPU compiles no matrix product of which a callback reads a sum (jax 0.11.2)",
)
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

    return jax.lax.fori_loop(1, len(parts), body, summarize(parts[0]))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int32, np.uint8])
@pytest.mark.parametrize("kind", CLASSES)
def test_merging_in_a_loop(dtype: Any, kind: str) -> None:
    x = values(3, kind, dtype, (4, 97))
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

    s = jax.lax.scan(body, summarize(jnp.asarray(x[0])), jnp.asarray(x[1:]))[0]
    check(s, x, tolerance=3e-5)


def test_merging_in_trace_wants_like_summaries() -> None:
    with pytest.raises(ValueError, match="unlike"):
        merge_in_trace(summarize(jnp.ones(257)), summarize(jnp.ones(257, jnp.int32)))


def test_counts_stop_instead_of_wrapping() -> None:
    s = summarize(jnp.ones(4))
    big = Summary(bins=s.bins * np.uint32(2**30 - 1), points=s.points, sums=s.sums)
    assert big.size == 4 * (2**30 - 1)
    two = Summary(bins=s.bins // np.uint32(2), points=s.points, sums=s.sums)
    most = merge_in_trace(big, two)
    assert most.size == 2**32 - 2
    full = merge_in_trace(most, s)
    for stopped in (full, merge_in_trace(full, s), merge([full, s])):
        assert stopped.saturated
        assert "saturated" in repr(stopped)
        assert stopped.min == 1.0
        for name in ("size", "mean", "std", "norm", "nan", "finite"):
            with pytest.raises(OverflowError, match="merge them outside jit"):
                getattr(stopped, name)
    assert merge([big, big, big]).size == 12 * (2**30 - 1)
