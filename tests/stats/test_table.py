"""Figures and sparklines of many summaries at once, against those of each Summary."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_inspector.screen.protocol import SPARK, STATISTICS
from nnx_inspector.stats.bins import (
    BINS,
    MINUS_ZERO_BIN,
    NAN_BIN,
    NEGINF_BIN,
    OPAQUE_BIN,
    POSINF_BIN,
    ZERO_BIN,
)
from nnx_inspector.stats.encoding import decode, encode
from nnx_inspector.stats.summary import Summary, empty, opaque
from nnx_inspector.stats.table import CASTS, casts_of, sparklines_of, stats_of

APART = [ZERO_BIN, MINUS_ZERO_BIN, NAN_BIN, POSINF_BIN, NEGINF_BIN, OPAQUE_BIN]
EXTREMES = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 2.0**-126, 3e38, -3e38, np.nan, np.inf, -np.inf]


def summarized(values, shift=0.0, scale=1.0):
    """A merged Summary of float32 values, counted and summed here in NumPy."""
    values = np.asarray(values, np.float32)
    bins = values.view(np.uint32) >> 20
    bins = np.where(values == 0, np.where(np.signbit(values), MINUS_ZERO_BIN, ZERO_BIN), bins)
    bins = np.where(np.isnan(values), NAN_BIN, bins)
    finite = values[np.isfinite(values)].astype(np.float64)
    points = np.zeros(3)
    if len(finite):
        points = np.array([finite.min(), finite.max(), shift])
    d = (finite - shift) / scale
    sums = np.array([scale, d.sum(), (d * d).sum()])
    return Summary(
        bins=np.bincount(bins, minlength=BINS).astype(np.uint64), points=points, sums=sums
    )


def check(summaries):
    """Check each row against the Summary's figures."""
    parts = decode(encode(summaries))
    table, sparks = stats_of(parts), sparklines_of(parts, SPARK)
    assert table.shape == (len(summaries), len(STATISTICS))
    for row, spark, summary in zip(table, sparks, summaries, strict=True):
        expected = [float(getattr(summary, name)) for name in STATISTICS]
        np.testing.assert_array_equal(row, expected, repr(summary))
        np.testing.assert_array_equal(spark, summary.sparkline(SPARK), repr(summary))


floats = st.one_of(st.sampled_from(EXTREMES), st.floats(width=32), st.floats(-10, 10, width=32))
arrays = st.builds(
    summarized,
    st.lists(floats, max_size=60),
    shift=st.sampled_from([0.0, 1.5, -3.0]),
    scale=st.sampled_from([1.0, 0.25, 1024.0]),
)
counts = st.dictionaries(
    st.sampled_from(APART) | st.integers(0, BINS - 1), st.integers(1, 2**40), max_size=20
)


@st.composite
def counted(draw):
    """A Summary with known counts only, or also with the extremes of some dtype."""
    bins = np.zeros(BINS, np.uint64)
    for number, count in draw(counts).items():
        if (number & 0x7F8) != 0x7F8 or number in APART:
            bins[number] = count
    if draw(st.booleans()):
        return Summary(bins=bins, points=np.full(3, np.nan), sums=np.full(3, np.nan))
    ends = sorted(draw(st.lists(st.integers(-(2**62), 2**62), min_size=2, max_size=2)))
    return Summary(bins=bins, points=np.array([*ends, 0]), sums=np.array([2.0**40, 1.5, 7.25]))


@given(st.lists(arrays | counted(), max_size=7))
@settings(max_examples=150, deadline=None)
def test_each_row_is_what_the_summary_gives(summaries):
    check(summaries)


def test_many_normal_arrays_of_all_magnitudes():
    rng = np.random.default_rng(0)
    scales = 10.0 ** rng.uniform(-30, 30, 200)
    means = rng.choice([0.0, 1.0, -7.0], 200) * scales
    check([summarized(rng.normal(m, s, 500)) for m, s in zip(means, scales, strict=True)])


def test_nothing_constants_and_what_has_no_figures():
    check([])
    check([empty(), summarized([5.0] * 9), summarized([0.0] * 3), summarized([np.nan]), empty()])
    (row,) = stats_of(decode(encode([opaque("key<fry>[3]", 3)])))
    assert row[STATISTICS.index("size")] == 3


def test_of_counts_that_stopped_only_the_extremes_are_known():
    stopped = summarized([1.0, 2.0])
    stopped.bins[ZERO_BIN] = np.iinfo(np.uint64).max
    with pytest.raises(OverflowError):
        _ = stopped.size
    parts = decode(encode([summarized([3.0, 4.0]), stopped]))
    table = dict(zip(STATISTICS, stats_of(parts).T, strict=True))
    assert (table["min"][1], table["max"][1]) == (1.0, 2.0)
    assert all(np.isnan(table[name][1]) for name in STATISTICS if name not in ("min", "max"))
    assert table["mean"][0] == 3.5
    assert not sparklines_of(parts, 8)[1].any()
    assert sparklines_of(parts, 8)[0].any()


FAINTEST = 2.0**-129


def shares_by_casting(values, name, scaled):
    """What NumPy finds, and how many values are in the bins that a limit cuts."""
    cast, dtype = CASTS[name], np.dtype(getattr(ml_dtypes, name, name))
    x = np.asarray(values, np.float32).astype(np.float64)
    x = x[np.isfinite(x)]
    factor = np.abs(x).max() / cast.largest if scaled and x.any() else 1.0
    limits = np.maximum(np.array([cast.zero, cast.normal, cast.beyond]) * factor, FAINTEST)
    size = np.abs(x)
    found = [
        ((size < limits[0]) & (size > 0)).sum(),
        ((size >= limits[0]) & (size < limits[1])).sum(),
        (size >= limits[2]).sum(),
    ]
    if not scaled:  # the limits are those of the dtype
        with np.errstate(over="ignore"):
            done = x.astype(np.float32).astype(dtype).astype(np.float64)
        ties = (size == cast.zero) | (size == cast.beyond)
        assert ((done == 0) & ~ties)[size >= FAINTEST].sum() == (
            (size < limits[0]) & (size >= FAINTEST)
        ).sum()
        assert (~np.isfinite(done) & ~ties).sum() == ((size >= limits[2]) & ~ties).sum()
    of = size[size > 0]
    eighths = np.floor(np.log2(of)) * 8 + np.floor(of / 2 ** np.floor(np.log2(of)) * 8)
    cut = [
        0 if np.log2(limit) % 1 == 0 else (eighths == np.floor(np.log2(limit)) * 8
        + np.floor(limit / 2 ** np.floor(np.log2(limit)) * 8)).sum()
        for limit in limits
    ]  # fmt: skip
    return np.array(found), np.array([cut[0], cut[0] + cut[1], cut[2]]), len(x)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", CASTS)
def test_what_another_dtype_would_make_of_values(name, scaled):
    info, cast = ml_dtypes.finfo(getattr(ml_dtypes, name, name)), CASTS[name]
    assert (float(info.max), float(info.smallest_normal)) == (cast.largest, cast.normal)
    assert float(info.smallest_subnormal) / 2 == cast.zero
    rng = np.random.default_rng(0)
    limits = np.array([cast.zero, cast.normal, min(cast.beyond, 3.3e38)])
    arrays = [
        rng.normal(size=4000) * np.exp(8 * rng.normal(size=4000)),
        np.concatenate([np.zeros(50), rng.normal(size=1000) * 1e-7]),
        rng.normal(size=100) * 1e5,
        np.concatenate([limits, -limits, limits / 1.5, -limits / 1.5, [np.nan, np.inf, 0, -0.0]]),
        rng.uniform(0.5, 2.0, 500) * cast.normal * rng.choice([-1, 1], 500),
        [0.0, -0.0],
        [3.0],
    ]
    table = casts_of(decode(encode([summarized(x) for x in arrays])), cast, scaled=scaled)
    assert not np.isnan(table).any()
    for x, shares in zip(arrays, table, strict=True):
        found, cut, many = shares_by_casting(x, name, scaled)
        assert (np.abs(shares * many - found) <= cut + 1e-6 * many).all(), (shares * many, found)


def test_what_has_no_finite_values_has_no_shares():
    rows = [empty(), summarized([np.nan, np.inf]), opaque("key<fry>[3]", 3), summarized([1.0])]
    table = casts_of(decode(encode(rows)), CASTS["float16"])
    assert np.isnan(table[:3]).all()
    assert table[3].tolist() == [0, 0, 0]
    assert casts_of(decode(encode([])), CASTS["float16"]).shape == (0, 3)
