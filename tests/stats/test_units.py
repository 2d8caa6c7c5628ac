"""Statistics of each unit against float64 NumPy: every dtype and class of value, and merging."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from summary_oracle import ALL, CLASSES, device, values
from summary_oracle import check_units as check

from nnx_inspector.stats.units import MAX_UNITS, Units, measure_units, merge_units, no_units

SHAPES = [((300, 6), -1), ((6, 37), 0), ((2, 5, 9), 1), ((4,), 0), ((0, 3), 1), ((3, 0), 1)]
FEW = [jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_, jnp.complex64]


@st.composite
def arrays(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    shape, axis = draw(st.sampled_from(SHAPES))
    dtype, kind = draw(st.sampled_from(ALL)), draw(st.sampled_from(CLASSES))
    return values(draw(st.integers(0, 2**32)), kind, dtype, shape), axis


def against_oracle(made: tuple[np.ndarray, int]) -> None:
    x, axis = made
    check(measure_units(device(x), axis=axis), x, axis)


@settings(max_examples=40, deadline=None)
@given(arrays())
def test_every_figure_is_the_oracles(made: tuple[np.ndarray, int]) -> None:
    against_oracle(made)


@pytest.mark.long
@settings(max_examples=5_000, deadline=None)
@given(arrays())
def test_every_figure_is_the_oracles_many(made: tuple[np.ndarray, int]) -> None:
    against_oracle(made)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.float64])
@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_of_values(dtype: Any, kind: str) -> None:
    x = values(7, kind, dtype, (300, 6))
    check(measure_units(device(x)), x)


@pytest.mark.parametrize(
    "make",
    [
        lambda z: 1e6 + z,
        lambda z: 1e8 + 20 * z,
        lambda z: 1e30 * z,
        lambda z: 1e-30 * z,
        lambda z: np.clip(3.3e38 * (1 + 0.01 * z), -3.4e38, 3.4e38),
        lambda z: np.maximum(z, 0) * np.array([1, 0, 1e-3]),
        lambda z: z * np.array([1e-30, 1.0, 1e30]) + np.array([1, 1e4, 0]),
        lambda z: np.where(z > 2, np.nan, np.exp(4 * z)),
        lambda z: np.where(np.arange(len(z))[:, None] == 5, -1e30, z),
    ],
)
def test_many_adversarial_floats(make: Any) -> None:
    x = make(np.random.default_rng(1).normal(size=(1 << 17, 3))).astype(np.float32)
    check(measure_units(jnp.asarray(x)), x, tolerance=1e-6)


def test_more_values_than_float32_counts() -> None:
    n = 2**24 + 12_345  # a float32 that counts up stops at 2**24
    x = np.random.default_rng(2).normal(size=(n, 1)).astype(np.float16) + np.float16(100)
    check(measure_units(jnp.asarray(x)), x, tolerance=1e-6)
    ones = measure_units(jnp.ones((1, n), jnp.int8), axis=0)
    assert (ones.size[0], ones.mean[0], ones.std[0]) == (n, 1, 0)


def test_wide_integers() -> None:
    x = np.array([[10**18, -(2**63)], [10**18 + 2, 2**63 - 1]], np.int64)
    u = measure_units(x)
    assert u.std.tolist() == [1, 2.0**63]
    assert np.asarray(u.points)[:2].tolist() == [[10**18, -(2**63)], [10**18 + 2, 2**63 - 1]]
    assert merge_units([u, u]).std.tolist() == [1, 2.0**63]
    assert measure_units(np.array([[0], [2**64 - 1]], np.uint64)).max.tolist() == [2.0**64]


# ------------------------------------------------------------------ rows


@pytest.mark.parametrize("dtype", FEW)
def test_rows_are_those_of_vmap_and_scan(dtype: Any) -> None:
    x = values(3, "specials", np.dtype(dtype), (4, 6, 5))
    y = jnp.asarray(x)
    scanned = jax.jit(lambda y: jax.lax.scan(lambda c, r: (c, measure_units(r)), 0, y)[1])(y)
    for rows in (jax.vmap(measure_units)(y), scanned):
        assert (rows.rows, len(rows)) == ((4,), 5)
        check(rows, x)
        check(rows.merged(), x)
        check(jax.jit(Units.merged)(rows), x)
        for i in range(4):
            check(rows.row(i), x[i])
    nested = jax.vmap(jax.vmap(lambda r: measure_units(r[None])))(y)
    assert nested.rows == (4, 6)
    check(nested, x)
    check(nested.row(1), x[1])


def test_rows_that_do_not_exist() -> None:
    u = measure_units(jnp.ones((2, 3)))
    with pytest.raises(IndexError, match="no row 0 in units with rows"):
        u.row(0)
    with pytest.raises(IndexError, match="row 2"):
        jax.vmap(measure_units)(jnp.ones((2, 3, 4))).row(2)
    assert jax.vmap(measure_units)(jnp.ones((0, 3, 4))).size.tolist() == [0] * 4


# --------------------------------------------------------------- merging


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(CLASSES), min_size=3, max_size=3),
    st.sampled_from([np.float32, np.int32, np.float64]),
    st.integers(0, 2**32),
)
def test_merged_parts_are_the_whole(kinds: list[str], dtype: Any, seed: int) -> None:
    parts = [values(seed + i, kind, dtype, (10, 6)) for i, kind in enumerate(kinds)]
    each = [measure_units(device(p)) for p in parts]
    whole = np.concatenate(parts)
    check(merge_units(each), whole)
    one_by_one = no_units(6, dtype=dtype)
    for u in each:
        one_by_one = merge_units([one_by_one, u])
    check(one_by_one, whole)
    leaves, like = jax.tree.leaves(one_by_one), jax.tree.leaves(each[0])
    assert [(a.shape, a.dtype) for a in leaves] == [(a.shape, a.dtype) for a in like]


def test_merging_many_drifting_parts_in_loops() -> None:
    z = np.random.default_rng(5).normal(size=(2000, 16, 4))
    x = (z + 10 * np.arange(2000)[:, None, None]).astype(np.float32)
    y = jnp.asarray(x)

    def more(i: Any, u: Units) -> Units:
        return merge_units([u, measure_units(y[i])])

    looped = jax.jit(lambda: jax.lax.fori_loop(0, len(y), more, no_units(4)))()
    check(looped, x, tolerance=3e-5)
    check(jax.vmap(measure_units)(y), x)
    shapes = jax.eval_shape(measure_units, y[0])
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)  # as harvest makes them
    check(merge_units([looped, zeros]), x, tolerance=3e-5)


def test_units_that_do_not_add_up() -> None:
    u = measure_units(jnp.ones((2, 3)))
    for other in (
        no_units(4),
        no_units(3, dtype=jnp.int32),
        jax.vmap(measure_units)(jnp.ones((1, 2, 3))),
    ):
        with pytest.raises(ValueError, match="do not add up"):
            merge_units([u, other])
    with pytest.raises(ValueError, match="at least one part"):
        merge_units([])


def test_counts_stop_instead_of_wrapping() -> None:
    u = measure_units(jnp.ones((4, 2)))
    big = Units(counts=u.counts * np.uint32(2**30 - 1), points=u.points, sums=u.sums)
    assert big.size.tolist() == [4 * (2**30 - 1)] * 2
    full = merge_units([big, big])
    with pytest.raises(OverflowError, match="Measure fewer values"):
        _ = full.mean
    assert repr(full) == "Units(2)"


# ----------------------------------------------------------- around them


def test_nothing_was_seen() -> None:
    u = no_units(3)
    assert u.size.tolist() == [0, 0, 0]
    assert not u.dead.any()
    assert np.isnan([u.mean, u.std, u.norm, u.min, u.max, u.zero_fraction]).all()


def test_dead_units() -> None:
    x = jnp.array([[0.0, 0.0, 0.0, 1.0, 1e-42], [-0.0, jnp.nan, 0.0, 0.0, 0.0]])
    u = measure_units(x)
    assert u.dead.tolist() == [True, False, True, False, False]
    assert u.zero_fraction.tolist() == [1, 0.5, 1, 0.5, 0.5]
    assert repr(u) == "Units(5, dead=2, nonfinite=1)"


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32, jnp.uint32, jnp.int8, jnp.float8_e5m2])
def test_only_a_signal_has_dead_units(dtype: Any) -> None:
    """A position that is always masked, or an id of 0, is not dead; an int8 activation may be."""
    x = jnp.array([[0, 1, 0], [0, 0, 0]]).astype(dtype)
    is_signal = jnp.dtype(dtype).itemsize == 1 and dtype != jnp.bool_
    wanted = [True, False, True] if is_signal else [False] * 3
    rows = jax.lax.map(measure_units, jnp.stack([x, x]))
    for u in (measure_units(x), rows, rows.merged(), merge_units([measure_units(x), rows.row(0)])):
        assert u.dead.tolist() == wanted
        assert u.zeros.tolist() == [u.size[0], u.size[0] // 2, u.size[0]]


def test_a_frame_has_a_row_a_unit() -> None:
    x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    frame = measure_units(jnp.asarray(x)).to_frame()
    assert frame.index.name == "unit"
    assert frame["mean"].to_numpy() == pytest.approx(x.astype(np.float64).mean(axis=0), abs=1e-6)
    assert frame["size"].tolist() == [50] * 4
    assert frame["dead"].dtype == bool
    assert len(measure_units(jnp.ones((2, 0))).to_frame()) == 0


def test_gradients_pass_it_by() -> None:
    x = jnp.arange(6.0).reshape(2, 3)
    f = lambda x: ((x**2).sum(), measure_units(2 * x))  # noqa: E731
    g, u = jax.jit(jax.grad(f, has_aux=True))(x)
    np.testing.assert_array_equal(g, 2 * x)
    check(u, 2 * np.asarray(x))
    check(jax.jvp(f, (x,), (x,), has_aux=False)[0][1], 2 * np.asarray(x))
    check(jax.checkpoint(lambda x: f(x)[1])(x), 2 * np.asarray(x))


def test_as_many_units_as_are_allowed() -> None:
    x = np.random.default_rng(0).normal(size=(3, MAX_UNITS)).astype(np.float32)
    u = measure_units(jnp.asarray(x))
    np.testing.assert_allclose(u.mean, x.astype(np.float64).mean(axis=0), atol=1e-6)
    with pytest.raises(ValueError, match=r"Axis 1 of an array of shape \(2, 65537\) has 65537"):
        measure_units(jnp.ones((2, MAX_UNITS + 1)))
    assert len(measure_units(jnp.ones((2, MAX_UNITS + 1)), axis=0)) == 2


def test_what_has_no_units_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"units of key<fry>\[3\]: it holds no numbers"):
        measure_units(jax.random.split(jax.random.key(0), 3))
    with pytest.raises(TypeError, match=r"float0\[2\]"):
        measure_units(np.zeros(2, jax.dtypes.float0))
    with pytest.raises(TypeError, match="A token has no units"):
        measure_units(jax.lax.create_token())
    with pytest.raises(TypeError, match="holds no numbers"):
        measure_units(np.array(["a"]))
    for x, axis in ((jnp.ones((2, 3)), 2), (jnp.ones((2, 3)), -3), (jnp.ones(()), -1)):
        with pytest.raises(ValueError, match=f"no axis {axis}"):
            measure_units(x, axis=axis)


def test_units_inside_jit_say_where_to_read_them() -> None:
    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        u = measure_units(x)
        assert repr(u) == "Units(3)"
        assert (len(u), u.rows) == (3, ())
        with pytest.raises(TypeError, match="read them outside"):
            _ = u.mean
        return x

    f(jnp.ones((2, 3)))


def test_no_copy_of_the_array_is_stored() -> None:
    for shape, axis in (((4096, 512), -1), ((512, 4096), 0), ((16, 256, 64), -1)):
        x = jnp.ones(shape)
        compiled = jax.jit(lambda x, a=axis: measure_units(x, axis=a)).lower(x).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < x.nbytes / 2
