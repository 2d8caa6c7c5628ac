"""Reading, merging and storing summaries on the host: no jax here."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_inspector.stats.bins import (
    BINS,
    NAN_BIN,
    NEGINF_BIN,
    POSINF_BIN,
    QUANTILE_ERROR,
    SUBNORMAL_ERROR,
    ZERO_BIN,
)
from nnx_inspector.stats.summary import Summary, empty, merge


def made(x: np.ndarray) -> Summary:
    """A summary of float32 values by NumPy alone: an independent second maker."""
    x = np.asarray(x, np.float32).ravel()
    index = x.view(np.uint32) >> 20
    index[x == 0] = ZERO_BIN | (index[x == 0] & 0x800)
    index[np.isnan(x)] = NAN_BIN
    finite = x[np.isfinite(x)].astype(np.float64)
    points, sums = np.zeros(3, np.float32), np.zeros(3)
    if finite.size:
        points[:] = finite.min(), finite.max(), finite.mean()
        spread = np.abs(finite - points[2]).max()
        scale = 2.0 ** np.ceil(np.log2(spread)) if spread else 0.0
        d = (finite - points[2]) / (scale or 1.0)
        sums[:] = scale, d.sum(), (d * d).sum()
    bins = np.bincount(index, minlength=BINS).astype(np.uint32)
    return Summary(bins=bins, points=points, sums=sums)


def stack(summaries: list[Summary]) -> Summary:
    fields = {n: np.stack([getattr(s, n) for s in summaries]) for n in ("bins", "points", "sums")}
    return Summary(**fields)


floats = st.lists(
    st.one_of(
        st.floats(width=32),
        st.sampled_from([0.0, -0.0, 1e-42, 3.4e38, -3.4e38, 1e30, 1e-30, 1e8, 1e8 + 8]),
    ),
    max_size=60,
).map(lambda v: np.array(v, np.float32))


def check(s: Summary, x: np.ndarray) -> None:
    x = x.astype(np.float64)
    finite = x[np.isfinite(x)]
    assert (s.size, s.finite, s.zeros) == (x.size, finite.size, (x == 0).sum())
    assert (s.nan, s.posinf, s.neginf) == (
        np.isnan(x).sum(),
        (x == np.inf).sum(),
        (x == -np.inf).sum(),
    )
    assert s.nonzero_bins()[:, 1].sum() == s.finite
    if finite.size:
        spread = max(finite.std(), 1e-300)
        assert (s.min, s.max) == (finite.min(), finite.max())
        assert s.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-7 * spread)
        assert s.std == pytest.approx(finite.std(), rel=1e-6, abs=1e-12 * np.abs(finite).max())
        assert s.var == s.std * s.std
        assert s.norm == pytest.approx(np.sqrt((finite**2).sum()), rel=1e-6)
    else:
        assert np.isnan([s.min, s.max, s.mean, s.std, s.var, s.norm, s.quantile(0.1)]).all()


@settings(max_examples=300, deadline=None)
@given(st.lists(floats, max_size=6))
def test_merged_parts_are_the_whole(parts: list[np.ndarray]) -> None:
    whole = np.concatenate([np.zeros(0, np.float32), *parts])
    merged = merge([made(p) for p in parts])
    check(merged, whole)
    if parts:
        np.testing.assert_array_equal(merged.bins, made(whole).bins)
        rows = stack([made(p) for p in parts])
        check(rows, whole)
        check(rows.merged(), whole)
        for i, part in enumerate(parts):
            check(rows.row(i), part)
    check(merge([merged, empty(), merged]), np.concatenate([whole, whole]))


POINTS = [None, np.full(3, np.nan, np.float32), np.array([1, 5, 2], np.int32)]


@settings(max_examples=200, deadline=None)
@given(floats, st.sampled_from(POINTS), st.booleans())
def test_one_merged_is_it_merged_with_nothing(
    x: np.ndarray, points: np.ndarray | None, stopped: bool
) -> None:
    one = made(x) if points is None else dataclasses.replace(made(x), points=points)
    if stopped:
        one.bins[5] = np.iinfo(np.uint32).max
    fields = {name: np.zeros_like(getattr(one, name)) for name in ("bins", "points", "sums")}
    alone, together = merge([one]), merge([one, Summary(**fields)])
    for name in fields:
        found, expected = getattr(alone, name), getattr(together, name)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=200, deadline=None)
@given(floats, st.floats(0, 1))
def test_quantiles_are_within_their_bound(x: np.ndarray, q: float) -> None:
    finite = np.sort(x[np.isfinite(x)].astype(np.float64))
    found = made(x).quantile(q)
    assert isinstance(found, float)
    if finite.size:
        exact = finite[int(np.floor(q * (finite.size - 1)))]
        assert abs(found - exact) <= max(QUANTILE_ERROR * abs(exact), SUBNORMAL_ERROR)
        assert finite[0] <= found <= finite[-1]


LARGEST = np.finfo(np.float32).max


def within_a_bin(x: np.ndarray, edges: np.ndarray, counts: np.ndarray) -> None:
    """The count of values below an edge is off by at most the count of the log bin that it cuts."""
    below = np.concatenate([[0], np.cumsum(counts)])[1:-1]
    exact = np.array([(x < e).sum() for e in edges[1:-1]], int)
    signed = x.astype(np.float32)
    log_bin = lambda v: np.float32(v).view(np.uint32) >> 20  # noqa: E731
    bins = log_bin(np.where(signed == 0, np.float32(0), signed))
    for i, edge in enumerate(edges[1:-1]):
        single = np.float32(np.clip(edge, -LARGEST, LARGEST))
        around = [single, *(np.nextafter(single, s * LARGEST) for s in (-1, 1))]
        cut = {int(log_bin(e)) for e in around}
        if np.abs(edge) < 2.0**-129:  # zeros count among the smallest subnormals
            cut |= {0, 0x800}
        assert abs(below[i] - exact[i]) <= np.isin(bins, list(cut)).sum()


@settings(max_examples=200, deadline=None)
@given(floats, st.integers(1, 70), st.sampled_from(["linear", "symlog"]))
def test_histograms_keep_every_finite_value(x: np.ndarray, bins: int, scale: Any) -> None:
    s = made(x)
    edges, counts = s.histogram(bins, scale=scale)
    assert edges.shape == (bins + 1,)
    assert counts.shape == (bins,)
    assert (np.diff(edges) > 0).all()
    assert counts.dtype == np.int64
    assert (counts >= 0).all()
    assert counts.sum() == s.finite
    finite = x[np.isfinite(x)].astype(np.float64)
    if finite.size:
        within_a_bin(finite, edges, counts)
    if len(np.unique(finite)) > 1 and edges[0] == finite.min():  # or too narrow for so many
        assert counts[0] >= (finite == edges[0]).any()
        assert counts[-1] >= (finite == edges[-1]).any()
    spark = s.sparkline(bins)
    assert spark.dtype == np.uint8
    assert spark.max() == (255 if s.finite else 0)
    _, shown = s.histogram(bins, scale="symlog")
    assert ((spark > 0) == (shown > 0)).all()


def test_quantile_of_many_and_of_nonsense() -> None:
    s = made(np.arange(1.0, 101.0))
    found = s.quantile([[0.0, 0.25], [0.5, 1.0]])
    assert found.shape == (2, 2)
    np.testing.assert_allclose(found, [[1, 25], [50, 100]], rtol=0.0625)
    for q in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="from 0 to 1"):
            s.quantile(q)
    with pytest.raises(ValueError, match="histogram takes"):
        s.histogram(0)
    with pytest.raises(ValueError, match="histogram takes"):
        s.histogram(5, scale="log")  # pyright: ignore[reportArgumentType]


def test_a_histogram_is_numpys_up_to_the_width_of_a_bin() -> None:
    x = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    found = made(x).histogram(20)
    edges, counts = found.edges, found.counts
    np.testing.assert_allclose(edges, np.histogram_bin_edges(x.astype(np.float64), 20))
    assert np.abs(counts - np.histogram(x, edges)[0]).max() < 0.01 * x.size
    within_a_bin(x.astype(np.float64), edges, counts)
    edges, counts = made(x).histogram(20, scale="symlog")
    within_a_bin(x.astype(np.float64), edges, counts)
    spark = made(x).sparkline(32).astype(int)
    top = int(spark.argmax())
    assert (np.diff(spark[:top]) >= 0).all()  # one hill, as a normal distribution should look
    assert (np.diff(spark[top + 1 :]) <= 0).all()


def test_bins_come_in_the_order_of_values() -> None:
    x = np.array([3.0, -3.0, 0.0, -0.0, 1e-42, -1e30, 5.0, np.nan, np.inf], np.float32)
    pairs = made(x).nonzero_bins()
    bits = np.array([-1e30, -3.0, -0.0, 0.0, 3.0, 5.0], np.float32).view(np.uint32) >> 20
    np.testing.assert_array_equal(pairs, np.stack([bits, [1, 1, 1, 2, 1, 1]], axis=1))


def test_counts_beyond_32_bits_on_the_host() -> None:
    s = made(np.ones(3))
    many = Summary(bins=s.bins * np.uint32(2**30), points=s.points, sums=s.sums)
    total = merge([many] * 10)
    assert total.size == 30 * 2**30
    assert (total.mean, total.std, total.saturated) == (1.0, 0.0, False)


def test_wide_integers() -> None:
    def whole(low: int, high: int) -> Summary:
        bins = made(np.array([low, high])).bins
        return Summary(bins=bins, points=np.array([low, high, low]), sums=np.array([0.0, 0, 0]))

    merged = merge([whole(-(2**63), -(2**63)), whole(2**63 - 1, 2**63 - 1)])
    assert merged.points.tolist()[:2] == [-(2**63), 2**63 - 1]
    assert merged.std == 2.0**63
    assert merged.mean == pytest.approx(0, abs=4096)
    mixed = merge([whole(7, 7), made(np.array([1.0, 1.0]))])
    assert (mixed.min, mixed.max, mixed.mean) == (1.0, 7.0, 4.0)
    assert mixed.points.dtype == np.float64


def test_rows() -> None:
    s = stack([stack([made(np.full(2, i + j)) for j in range(3)]) for i in range(2)])
    assert s.rows == (2, 3)
    assert s.row(1).rows == (3,)
    assert s.row((1, 2)).mean == s.row(1).row(-1).mean == 3.0
    assert s.merged().rows == ()
    assert s.size == 12
    for index in (2, -3, (0, 3), (0, 0, 0)):
        with pytest.raises(IndexError, match="rows"):
            s.row(index)
    assert empty((0,)).size == 0
    assert np.isnan(empty((0,)).mean)


def test_repr_is_one_readable_line() -> None:
    s = made(np.array([1.0, np.nan, np.inf, 0.0]))
    assert repr(s) == (
        "Summary(size=4, mean=0.5, std=0.5, min=0, max=1, zeros=1, nan=1, posinf=1, neginf=0)"
    )
    assert repr(stack([s, s])).startswith("Summary(rows=(2,), size=8, ")
    assert "nan" in repr(empty())
    opaque: Any = object()
    assert repr(Summary(bins=opaque, points=opaque, sums=opaque)) == "Summary(traced)"


def test_a_tracer_cannot_be_read() -> None:
    class Tracer:
        shape = (BINS,)

        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            raise TypeError("what jax.errors.TracerArrayConversionError is")

    tracer: Any = Tracer()
    s = Summary(bins=tracer, points=tracer, sums=tracer)
    for name in ("mean", "size", "min", "norm"):
        with pytest.raises(TypeError, match="return it from the function and read it outside"):
            getattr(s, name)
    with pytest.raises(TypeError, match="inside jit"):
        merge([s])
    assert s.rows == ()


def test_inf_bins_are_no_values() -> None:
    bins = np.zeros(BINS, np.uint32)
    bins[[NAN_BIN, POSINF_BIN, NEGINF_BIN]] = 1, 2, 3
    s = Summary(bins=bins, points=np.zeros(3), sums=np.zeros(3))
    assert (s.size, s.finite, s.nan, s.posinf, s.neginf) == (6, 0, 1, 2, 3)
    assert s.nonzero_bins().shape == (0, 2)
    assert not s.sparkline().any()


def test_reading_needs_no_jax() -> None:
    code = (
        "import sys, nnx_inspector.stats.summary as s; s.empty().mean\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
