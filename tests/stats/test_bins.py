"""Bins and figures of values known by bin, against the values themselves."""

from __future__ import annotations

import numpy as np
import pytest

from nnx_inspector.stats.bins import (
    BINS,
    FINITE_BINS,
    MINUS_ZERO_BIN,
    NAN_BIN,
    QUANTILE_ERROR,
    RANK_OF_BIN,
    UNSEEN_BIN,
    VALUE_ORDER,
    ZERO_BIN,
    Binned,
    Scale,
    bin_edges,
    histogram_edges,
    quantiles,
    ragged,
    rebin,
    rebin_whole,
    tabulate,
)


def binned(*rows: np.ndarray) -> Binned:
    """Rows of float32 values that are not zero."""
    bins = np.concatenate([x.astype(np.float32).view(np.uint32) >> 20 for x in rows])
    row = np.repeat(np.arange(len(rows)), [len(x) for x in rows])
    table = tabulate(row, bins.astype(int), np.ones(len(bins)), len(rows))
    low, high = ([float(f(x)) if len(x) else np.nan for x in rows] for f in (np.min, np.max))
    return Binned(*table, np.array(low), np.array(high))


def test_bin_edges_are_those_of_the_bits() -> None:
    edges = bin_edges()
    bits = np.arange(BINS, dtype=np.uint32) << 20
    with np.errstate(invalid="ignore"):
        low = bits.view(np.float32).astype(np.float64)
        high = (bits | 0xFFFFF).view(np.float32).astype(np.float64)
    finite = np.isfinite(low)
    assert np.isnan(edges[~finite]).all()
    assert finite.sum() == BINS - 16
    inner = np.sort(np.stack([low, high], axis=1)[finite], axis=1)
    assert (edges[finite, 0] <= inner[:, 0]).all()
    assert (edges[finite, 1] >= inner[:, 1]).all()
    order = np.argsort(edges[finite, 0], kind="stable")
    chain = edges[finite][order]
    np.testing.assert_array_equal(chain[1:, 0], chain[:-1, 1])
    assert not edges.flags.writeable


def test_value_order_rises_and_ranks_invert_it() -> None:
    assert (np.diff(bin_edges()[VALUE_ORDER, 0]) > 0).all()
    np.testing.assert_array_equal(RANK_OF_BIN[VALUE_ORDER], np.arange(len(VALUE_ORDER)))
    np.testing.assert_array_equal((RANK_OF_BIN >= 0) | (np.arange(BINS) == UNSEEN_BIN), FINITE_BINS)


def test_tabulated_adds_up_and_puts_zeros_among_the_subnormals() -> None:
    rows = np.array([0, 0, 1, 1, 1, 1])
    bins = np.array([0x3F8, 0, ZERO_BIN, MINUS_ZERO_BIN, NAN_BIN, 0])
    used, counts = tabulate(rows, bins, np.arange(1, 7), 3)
    assert used.tolist() == [0x800, 0, 0x3F8]
    assert counts.tolist() == [[0, 2, 1], [4, 9, 0], [0, 0, 0]]


def test_many_rows_read_as_each_alone() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=500) * 10.0**i for i in range(-3, 4)] + [np.zeros(0), np.full(3, -2.5)]
    together, q = binned(*rows), np.linspace(0, 1, 23)
    edges = histogram_edges(ragged(binned(np.concatenate(rows))), 48, "symlog")[0]
    values, counts = quantiles(together, q), rebin(ragged(together), edges)
    for i, x in enumerate(rows):
        np.testing.assert_array_equal(values[i], quantiles(binned(x), q)[0])
        np.testing.assert_allclose(counts[i], rebin(ragged(binned(x)), edges)[0], atol=1e-9)
        assert counts[i].sum() == pytest.approx(len(x))
        if len(x):
            exact = np.sort(x)[np.floor(q * (len(x) - 1)).astype(int)]
            np.testing.assert_allclose(values[i], exact, rtol=0.0625)
    assert np.isnan(values[7]).all()


def test_a_value_on_an_edge_belongs_to_the_interval_above_it() -> None:
    one = binned(np.full(4, 1.0))
    assert rebin(ragged(one), np.array([0.0, 1.0, 2.0])).tolist() == [[0, 4]]
    assert rebin(ragged(one), np.array([-2.0, 0.0, 1.5])).tolist() == [[0, 4]]


def test_whole_counts_are_the_fractions_rounded() -> None:
    rng = np.random.default_rng(1)
    rows = [rng.normal(size=n) * 10.0**i for i, n in enumerate((1, 2, 30, 500, 3000))]
    together = binned(*rows)
    edges = histogram_edges(ragged(binned(np.concatenate(rows))), 48, "symlog")[0]
    fractions, counts = rebin(ragged(together), edges), rebin_whole(ragged(together), edges)
    assert counts.dtype == np.int64
    assert (counts >= 0).all()
    assert counts.sum(axis=1).tolist() == [len(x) for x in rows]
    assert np.abs(np.cumsum(fractions, axis=1) - np.cumsum(counts, axis=1)).max() <= 0.5 + 1e-9


@pytest.mark.parametrize("scale", ["linear", "symlog"])
def test_the_outermost_values_are_in_the_outermost_intervals(scale: Scale) -> None:
    x = np.concatenate([[-7.3], np.random.default_rng(2).normal(size=999), [6.1]])
    one = binned(x)
    counts = rebin_whole(ragged(one), histogram_edges(ragged(one), 64, scale)[0])[0]
    assert counts[0] >= 1
    assert counts[-1] >= 1
    assert counts.sum() == 1001


def test_nothing_has_no_figures() -> None:
    nothing = Binned(np.zeros(0, int), np.zeros((2, 0)), np.full(2, np.nan), np.full(2, np.nan))
    assert np.isnan(quantiles(nothing, np.array([0.5]))).all()
    assert rebin(ragged(nothing), np.arange(4.0)).tolist() == [[0, 0, 0]] * 2
    assert rebin_whole(ragged(nothing), np.arange(4.0)).tolist() == [[0, 0, 0]] * 2


def test_the_stated_error_is_that_of_the_edges() -> None:
    low, high = bin_edges()[8:0x7F8].T  # the normal numbers
    worst = ((high - low) / (high + low)).max()  # of the harmonic middle
    assert worst == pytest.approx(1 / 17)
    assert worst < QUANTILE_ERROR
    rounded = (high * (1 + 2.0**-24) - low) / (high + low)
    assert (rounded < QUANTILE_ERROR).all()


@pytest.mark.parametrize("faint", [1e-310, 1e-200])
def test_ranges_too_small_for_slopes_are_spread_too(faint: float) -> None:
    counts = np.array([[4.0]])
    zeros = Binned(np.array([0]), counts, np.array([0.0]), np.array([faint]))
    assert rebin(ragged(zeros), np.linspace(0, faint, 5))[0] == pytest.approx([1] * 4)
    step = Binned(np.array([0, 0x3F8]), np.array([[4.0, 2.0]]), np.zeros(1), np.array([1.0]))
    assert rebin(ragged(step), np.array([0.0, 0.5, 1.0])).tolist() == [[4, 2]]
    below = Binned(np.array([0xBF8, 0]), np.array([[2.0, 4.0]]), -np.ones(1), np.array([faint]))
    assert rebin(ragged(below), np.array([-1.0, -0.5, faint])).sum() == 6
