"""Gauges: every figure against plain NumPy in float64, and their reading on the host."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnx_inspector.stats import gauges, measure_gauges
from nnx_inspector.stats.gauges import STATE_LENGTH, Calls, bits_of, head, units
from nnx_inspector.stats.measure_gauges import gauge, sampled, varied


def values(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def looked_at(x):
    """By hand: at most so many of each axis, evenly spaced (a middle axis here is short)."""
    steps = [
        -(-x.shape[0] // gauges.EXAMPLES),
        *[1] * (x.ndim - 2),
        -(-x.shape[-1] // gauges.UNITS),
    ]
    return np.asarray(x, np.float64)[tuple(slice(None, None, s) for s in steps)]


@pytest.mark.parametrize("shape", [(5, 3), (300, 7), (4, 6, 200), (2, 3, 4, 5)])
def test_every_figure_is_that_of_numpy(shape):
    x = values(shape) * 3 + 1
    found = np.asarray(gauge(jnp.asarray(x)), np.float64)
    y = looked_at(x)
    rows = y.reshape(-1, y.shape[-1])
    k = y.shape[-1]
    assert head(found, "measured") == 1
    assert head(found, "examples") == shape[0]
    assert (head(found, "units"), head(found, "looked")) == (shape[-1], k)
    for name, expected in {
        "low": rows.min(axis=0),
        "high": rows.max(axis=0),
        "mean": rows.mean(axis=0),
        "std": rows.std(axis=0),
        "spread": np.sqrt(y.var(axis=0).reshape(-1, k).mean(axis=0)),
        "tanh": (np.abs(rows) > gauges.TANH_FLAT).mean(axis=0),
        "sigmoid": (np.abs(rows) > gauges.SIGMOID_FLAT).mean(axis=0),
    }.items():
        np.testing.assert_allclose(units(found, name)[:k], expected, rtol=2e-5, atol=1e-6)
        assert np.isnan(units(found, name)[k:]).all()
    covariance = np.cov(rows.T, bias=True)
    rank = np.trace(covariance) ** 2 / (covariance**2).sum()
    np.testing.assert_allclose(head(found, "rank"), rank, rtol=1e-4)


def test_what_is_not_finite_or_has_no_units_is_not_measured():
    x = values((4, 3))
    x[0, 0] = np.nan
    assert head(np.asarray(gauge(jnp.asarray(x))), "measured") == 0
    for other in (jnp.ones(3), jnp.ones((3, 2), jnp.int32), jnp.ones((0, 2)), jnp.ones(())):
        assert not np.asarray(gauge(other)).any()


def test_squares_that_would_overflow_do_not():
    x = values((8, 4)).astype(np.float64) * 1e30
    found = np.asarray(gauge(jnp.asarray(x, jnp.float32)), np.float64)
    np.testing.assert_allclose(units(found, "std")[:4], x.std(axis=0), rtol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_dtypes_are_measured_in_float32(dtype):
    x = jnp.asarray(values((16, 4)), dtype)
    found = np.asarray(gauge(x), np.float64)
    expected = np.asarray(x, np.float64).mean(axis=0)
    np.testing.assert_allclose(units(found, "mean")[:4], expected, rtol=1e-5, atol=1e-7)
    assert head(found, "limit") == pytest.approx(np.log2(float(jnp.finfo(dtype).max)))


def test_it_is_not_differentiated_and_works_in_jit():
    x = jnp.asarray(values((4, 3)))
    grad = jax.jit(jax.grad(lambda x: gauge(x).sum() + x.sum()))(x)
    np.testing.assert_array_equal(grad, np.ones((4, 3)))


def read(vectors, **affine):
    """The figures of one site, None if it was not measured."""
    numbers, rows, masks = gauges.read([Calls(vectors, **affine)])
    return (rows[0], masks[0]) if numbers else None


def compared(state, before):
    unknown = np.full(STATE_LENGTH, np.nan)
    (row,) = gauges.compared(state[None], (unknown if before is None else before)[None])
    return row


def figures_of(x, **affine):
    row, masks = read([np.asarray(gauge(jnp.asarray(x, jnp.float32)))], **affine)
    return dict(zip(gauges.SITE_FIGURES, row, strict=True)), masks


def test_dead_and_saturated_units_are_told_apart():
    x = np.stack(
        [np.zeros(6), -1 - np.arange(6) / 2, np.linspace(3, 4, 6), np.linspace(-1, 1, 6)], -1
    )
    figures, masks = figures_of(x)
    assert figures["units"] == 4
    wanted = {
        "dead": [1, 0, 0, 0], "below": [1, 1, 0, 0], "tanh": [0, 0, 1, 0], "sigmoid": [0, 0, 0, 0],
    }  # fmt: skip
    for name, expected in wanted.items():
        assert bits_of(masks, name)[:4].astype(int).tolist() == expected, name
        assert not bits_of(masks, name)[4:].any()


def test_units_that_hardly_vary_beside_another_are_still():
    """At each position by itself; with C and with XLA, and in all calls."""
    sizes = np.array([1, 0, 0.001, 0.019, 0.021, 0.5])
    x = (values((50, 4, 6), 2).round() * sizes + values((1, 4, 6), 3)).astype(np.float32)
    deviations = np.sqrt(np.asarray(x, np.float64).var(axis=0).mean(axis=0))
    expected = deviations < 0.02 * deviations.max()
    assert 2 <= expected.sum() <= 4
    # XLA's way, where a public call takes the native one
    by_xla = jnp.stack(measure_gauges._gauge_of(jnp.asarray(x), limit=128.0, steps=(1, 1, 1)))
    for vector in (gauge(jnp.asarray(x)), by_xla):
        found = bits_of(read([np.asarray(vector)])[1], "still")
        np.testing.assert_array_equal(found[:6], expected)
        assert not found[6:].any()
    swapped = gauge(jnp.asarray(x[..., ::-1]))
    in_both = bits_of(read([np.stack([gauge(jnp.asarray(x)), swapped])])[1], "still")
    np.testing.assert_array_equal(in_both[:6], expected & expected[::-1])
    assert not bits_of(figures_of(np.ones((4, 3)))[1], "still").any()


def test_a_unit_that_wakes_in_another_call_is_not_dead():
    dead, alive = np.zeros((4, 2), np.float32), np.ones((4, 2), np.float32)
    vectors = [np.asarray(gauge(jnp.asarray(x))) for x in (dead, alive)]
    assert bits_of(read([vectors[0]])[1], "dead")[:2].all()
    assert not bits_of(read(vectors)[1], "dead").any()
    assert not bits_of(read([np.stack(vectors)])[1], "dead").any()
    assert read([]) is None
    assert read([np.zeros(gauges.LENGTH)]) is None


def test_sites_are_read_together_as_they_are_alone():
    sites = [
        Calls([np.asarray(gauge(jnp.asarray(values((5, 3)))))]),
        Calls([]),
        Calls([np.asarray(gauge(jnp.asarray(values((4, n), n)))) for n in (70, 2)]),
        Calls([np.stack([np.asarray(gauge(jnp.asarray(values((6, 9), n)))) for n in (1, 2)])]),
        Calls([np.zeros(gauges.LENGTH)]),
        Calls([np.asarray(gauge(jnp.asarray(values((50, 3)))))], np.ones(3), np.zeros(3)),
    ]
    numbers, rows, masks = gauges.read(sites)
    assert numbers == [0, 2, 3, 5]
    for number, row, mask in zip(numbers, rows, masks, strict=True):
        one = sites[number]
        alone = read(one.vectors, scale=one.scale, bias=one.bias)
        np.testing.assert_array_equal(row, alone[0])
        np.testing.assert_array_equal(mask, alone[1])
    last = read(sites[2].vectors[-1:])
    np.testing.assert_array_equal(rows[1], last[0], "of unlike shapes the last stands for all")
    assert np.isfinite(rows[3]).all()
    assert np.isnan(rows[0]).any(), "it has no scale and bias"


def test_constant_over_the_batch_is_exact_at_each_position():
    one = values((1, 5, 3)) * 1e4
    constant = np.repeat(one, 4, axis=0)
    assert figures_of(constant)[0]["flat"] == 1
    assert figures_of(constant)[0]["spread"] == 0
    constant[1, 2, 0] += 1
    assert figures_of(constant)[0]["flat"] == pytest.approx(2 / 3)
    assert np.isnan(figures_of(one)[0]["flat"])  # one example is not judged


def test_batch_norm_is_held_against_its_scale_and_bias():
    x = values((500, 3)) * [1, 2, 3] + [0, 1, 2]
    fits, _ = figures_of(x, scale=np.array([1, 2, 3]), bias=np.array([0, 1, 2]))
    assert fits["shifted"] == pytest.approx(0, abs=0.1)
    assert fits["scaled"] == pytest.approx(1, abs=0.1)
    other, _ = figures_of(10 * x + 5, scale=np.array([1, 2, 3]), bias=np.array([0, 1, 2]))
    assert other["shifted"] > 1
    assert other["scaled"] == pytest.approx(10, rel=0.1)


# ------------------------------------------------------------------- parameters


def told(state):
    return dict(zip(gauges.PARAMETER_FIGURES, state, strict=True))


def test_a_change_is_relative_to_what_was():
    x = values((6, 5))
    one, two = (np.asarray(sampled(jnp.asarray(a))) for a in (x, x * 1.1))
    first = told(compared(one, None))
    assert first["norm"] == pytest.approx(np.sqrt(np.mean(x.astype(np.float64)[:4] ** 2)), rel=0.5)
    assert np.isnan(first["change"])
    assert np.isnan(first["same"])
    then = told(compared(two, one))
    assert then["change"] == pytest.approx(0.1, rel=1e-4)
    assert (then["same"], then["decay"]) == (0, 0)
    assert told(compared(np.asarray(sampled(jnp.asarray(x * 0.99))), one))["decay"] == 1
    assert told(compared(one, one))["same"] == 1


DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 511), (1025,), (2, 3, 700), (256, 256)])
def test_every_element_is_asked_whether_it_is_finite(shape, dtype):
    random = np.random.default_rng(len(shape))
    x = random.normal(size=shape)
    kind = random.integers(0, 40, size=shape)
    x = np.where(kind == 0, np.nan, np.where(kind == 1, np.inf, np.where(kind == 2, -np.inf, x)))
    if dtype == "float64":
        x = np.where(kind == 3, 1e300, x)  # not infinite, though a float32 would be
    with jax.enable_x64(dtype == "float64"):
        y = jnp.asarray(x, dtype)
        wide = np.asarray(y).astype(np.float64)
        expected = [np.isnan(wide).sum(), np.isinf(wide).sum()]
        for state in (sampled(y), jax.vmap(sampled)(y[None])[0], in_jax(y)):
            found = told(compared(np.asarray(state), None))
            assert [found["nan"], found["infinite"]] == expected


def in_jax(x):
    """The program for other devices than one CPU."""
    # XLA's way, step by step, beside the native one
    x = measure_gauges._readable(x) if x.dtype.itemsize < 8 else x
    nan, infinite = measure_gauges._counted_of(x.reshape(-1))[1:]
    names = {"nan": nan, "infinite": infinite}
    return np.array([*(names.get(n, np.nan) for n in gauges.STATE_HEAD), *[0] * gauges.SAMPLE])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_program_in_c_and_the_one_in_jax_agree(dtype):
    x = jnp.asarray(values((100, 70)), dtype).at[7, 7].set(jnp.nan).at[8].set(jnp.inf)
    steps = measure_gauges._steps(x.shape, [*measure_gauges._shares(x.shape[:-1], 4), 64])
    alike = jax.jit(lambda x: measure_gauges._sample_of(x, steps=steps)[0])(x)
    np.testing.assert_array_equal(np.asarray(sampled(x)), np.asarray(alike))


def test_older_recordings_lack_the_counts():
    rows = compared(np.asarray(sampled(jnp.ones(3))), None)[None]
    for missing in (2, 2 + len(gauges.OF_IDS), 2 + len(gauges.OF_IDS) + len(gauges.OF_LOOP)):
        again = gauges.all_parameter_figures(rows[:, :-missing])
        np.testing.assert_array_equal(again[:, :-missing], rows[:, :-missing])
        assert np.isnan(again[:, -missing:]).all()


@given(seed=st.integers(0, 2**16), at=st.integers(0, 999))
def test_no_bit_changes_unnoticed(seed, at):
    x = values((1000,), seed)
    y = x.copy()
    y[at] = np.nextafter(y[at], np.float32(np.inf))
    one, two = (np.asarray(sampled(jnp.asarray(a.reshape(50, 20)))) for a in (x, y))
    assert told(compared(two, one))["same"] == 0


def test_scalars_and_narrow_dtypes_are_sampled_too():
    for x in (jnp.float32(3.0), jnp.ones((2, 3), jnp.bfloat16), jnp.ones(1000)):
        assert told(compared(np.asarray(sampled(x)), None))["norm"] == pytest.approx(
            float(np.asarray(x, np.float64).flat[0])
        )


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (np.ones((4, 3)), 0),
        (np.arange(4), 1),
        ((np.ones((4, 3)), np.eye(4)), 1),
        ([np.ones((1, 3)), 2.0, None], 0),
    ],
)
def test_whether_examples_differ(tree, expected):
    tree = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree)
    assert float(varied(tree)[len(gauges.STATE_HEAD)]) == expected


@pytest.mark.parametrize("shape", [(4, 16, 16, 3), (4, 130, 3), (4, 32, 12, 3), (2, 8, 8, 8, 3)])
def test_positions_are_examined_alike_whether_even_or_odd(shape):
    """As a layer that doubles the resolution makes them: even ones 0, odd ones 1, on each axis."""
    grid = np.indices(shape)[1:-1] % 2
    for along in grid:
        found = np.asarray(gauge(jnp.asarray(along, jnp.float32)), np.float64)
        assert head(found, "positions") <= gauges.POSITIONS
        np.testing.assert_allclose(units(found, "mean")[: shape[-1]], 0.5, atol=0.17)
