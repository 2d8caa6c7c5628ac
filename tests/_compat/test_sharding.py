"""The handling of arrays on several devices, as far as one device shows it; see test_sharded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import summary_oracle
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_inspector._compat import sharding
from nnx_inspector.stats.summarize import merge_rows, summarize
from nnx_inspector.stats.summary import merge

FIGURES = ("size", "mean", "std", "min", "max", "norm", "zeros", "nan", "posinf", "neginf")


def assert_same(ours, expected, rtol=1e-5):
    np.testing.assert_array_equal(ours.merged().bins, expected.merged().bins)
    scale = max(abs(expected.min), abs(expected.max)) if expected.finite else 0.0
    for figure in FIGURES:
        np.testing.assert_allclose(
            getattr(ours, figure), getattr(expected, figure), rtol=rtol, atol=rtol * scale
        )


@pytest.mark.parametrize("kind", summary_oracle.CLASSES)
@pytest.mark.parametrize("dtype", [np.float32, np.int32], ids=str)
def test_rows_are_merged_inside_jit_as_on_the_host(kind, dtype):
    x = summary_oracle.values(3, kind, dtype, (5, 4, 61))
    if dtype is np.float32:
        x[1] = np.nan  # rows of nothing finite
    rows = summarize(jnp.asarray(x), batch_rank=2)
    for axis in (0, 1):
        ours = jax.jit(merge_rows)(jax.tree.map(lambda f, a=axis: jnp.moveaxis(f, a, 0), rows))
        assert ours.rows == (x.shape[1 - axis],)
        for i in range(ours.rows[0]):
            part = rows.row(i) if axis == 1 else jax.tree.map(lambda f, i=i: f[:, i], rows)
            assert_same(ours.row(i), merge([part]))


def test_counts_of_many_rows_stop_at_the_largest():
    one = summarize(jnp.zeros(4))
    large = jax.tree.map(lambda f: jnp.stack([f] * 5), one)
    bins = jnp.where(large.bins > 0, jnp.uint32(2**30), large.bins)
    four = type(large)(bins=bins[:3], points=large.points[:3], sums=large.sums[:3])
    assert merge_rows(four).size == 3 * 2**30
    all_five = type(large)(bins=bins, points=large.points, sums=large.sums)
    assert merge_rows(all_five).saturated


def test_axes_are_made_even_by_less_than_an_eighth(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    even = lambda *shape: sharding.pad_axes_evenly(jnp.zeros(shape), jnp.float32(7)).shape  # noqa: E731
    assert even(127, 64, 65, 3) == (128, 64, 72, 3)
    assert even(16, 64) == (16, 64)
    x = jnp.zeros((16, 64))
    assert sharding.pad_axes_evenly(x, jnp.float32(7)) is x


def test_what_makes_axes_even_is_not_counted(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    x = np.random.default_rng(0).normal(size=(3, 67, 131)).astype(np.float32)
    assert_same(summarize(jnp.asarray(x)), merge([summarize(x.reshape(-1))]))
    rows = summarize(jnp.asarray(x), batch_rank=1)
    for i in range(3):
        assert_same(rows.row(i), merge([summarize(x[i].reshape(-1))]))


def test_without_a_mesh_nothing_is_moved():
    x = {"a": jnp.ones(2), "b": None}
    assert sharding.to_current_mesh(x) is x
    assert sharding.constrain_shardings([x["a"]], [None]) == [x["a"]]


def test_with_explicit_axes_a_row_lies_on_each_device():
    mesh = jax.make_mesh((1, 1), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(6.0).reshape(2, 3), NamedSharding(mesh, P("d")))
        assert jax.typeof(x).sharding.spec == P("d", None)
        assert summarize(x).mean == 2.5
        rows = summarize(x, batch_rank=1)
        assert (rows.row(0).mean, rows.row(1).mean) == (1.0, 4.0)
