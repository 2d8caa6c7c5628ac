"""Blocks of an array against NumPy in float64: every figure, of any shape, dtype and window."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from hypothesis_examples import examples
from summary_oracle import TINY, values

from nnx_inspector.inspector.values import device_tiles
from nnx_inspector.inspector.values.device_tiles import DEVICE_TILES, norms
from nnx_inspector.screen.values import blocks
from nnx_inspector.screen.values.blocks import NUMPY_TILES, Window, exact_values, reduce_blocks

DTYPES = [
    np.float16, ml_dtypes.bfloat16, np.float32, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
    np.int8, np.int32, np.uint32, np.bool_, np.complex64,
]  # fmt: skip
WIDE = [np.float64, np.int64, np.uint64, np.complex128]


def reals(x: np.ndarray, component: str) -> np.ndarray:
    if np.issubdtype(x.dtype, np.complexfloating):
        if component in ("real", "imag"):
            return getattr(x, component).astype(np.float64)
        size = np.hypot(x.real.astype(np.float64), x.imag.astype(np.float64))
        # a magnitude beyond the dtype does not count as Inf, as in summaries
        finite = np.isfinite(x.real) & np.isfinite(x.imag)
        return np.where(finite, np.minimum(size, np.finfo(x.dtype).max), size)
    return x.astype(np.float64)


def whole(shape, axes) -> Window:
    """Shows some axes whole, at the first index of the others."""
    spans = tuple((0, 1) if a is None else (0, shape[a]) for a in axes)
    return Window(axes=axes, spans=spans, index=(0,) * len(shape))


def shown(x: np.ndarray, window: Window) -> np.ndarray:
    """The whole of the shown axes, `[tiles, rows, columns]`."""
    axes = [a for a in window.axes if a is not None]
    part = x[tuple(slice(None) if a in axes else window.index[a] for a in range(x.ndim))]
    part = part.transpose([sorted(axes).index(a) for a in axes])
    return part.reshape([1 if a is None else x.shape[a] for a in window.axes])


def check(x: np.ndarray, window: Window, most, component="value") -> blocks.Blocks:
    """The blocks of an array on the device, and of the same array of NumPy's, are right."""
    if x.dtype.kind in "biufc":
        checked(reduce_blocks(x, window, most, component, NUMPY_TILES), x, window, most, component)
    found = reduce_blocks(jnp.asarray(x), window, most, component, DEVICE_TILES)
    return checked(found, x, window, most, component)


def checked(found, x, window, most, component):
    window = window.within(x.shape)
    box = reals(shown(x, window), component)
    assert found.mean.ndim == 3
    for span, start, end, count, size in zip(
        window.spans[1:], found.starts[1:], found.ends[1:], most[1:], found.block[1:], strict=True
    ):
        assert start % size == 0
        assert start <= span[0] or span[0] == span[1]
        assert end >= span[1]
        assert -(-(end - start) // size) <= count
        assert size & (size - 1) == 0
    assert found.starts[0] == window.spans[0][0]
    assert found.mean.shape == tuple(
        -(-(b - a) // s) for a, b, s in zip(found.starts, found.ends, found.block, strict=True)
    )
    for place in itertools.product(*map(range, found.mean.shape)):
        at = tuple(
            slice(a + i * s, min(a + (i + 1) * s, end))
            for a, i, s, end in zip(found.starts, place, found.block, found.ends, strict=True)
        )
        of = box[at].reshape(-1)
        finite = of[np.isfinite(of)]
        if found.exact:
            assert of.size == 1
            np.testing.assert_allclose(found.mean[place], of[0], rtol=4e-7, atol=2 * TINY)
            continue
        for name, count in (
            ("nan", np.isnan(of)), ("posinf", of == np.inf), ("neginf", of == -np.inf)
        ):  # fmt: skip
            counts = getattr(found, name)
            assert (0 if counts is None else counts[place]) == count.sum(), name
        if not finite.size:
            assert np.isnan([found.mean[place], found.low[place], found.high[place]]).all()
            continue
        scale = np.abs(finite).max()
        mean = (finite / finite.size).sum()
        assert abs(found.mean[place] - mean) <= 4e-6 * scale + TINY
        np.testing.assert_allclose(found.low[place], finite.min(), rtol=4e-7, atol=2 * TINY)
        np.testing.assert_allclose(found.high[place], finite.max(), rtol=4e-7, atol=2 * TINY)
    return found


@st.composite
def cases(draw, dtypes):
    shape = tuple(draw(st.lists(st.integers(1, 24), min_size=1, max_size=4)))
    rank = len(shape)
    axes = draw(st.permutations([*range(rank), None, None, None]))[:3]
    index = tuple(draw(st.integers(0, n - 1)) for n in shape)

    def span(axis):
        ends = st.integers(0, 1 if axis is None else shape[axis])
        return tuple(sorted((draw(ends), draw(ends))))

    window = Window(axes=tuple(axes), spans=tuple(span(a) for a in axes), index=index)
    most = tuple(draw(st.integers(1, 20)) for _ in range(3))
    kind = draw(st.sampled_from(["normal", "specials", "huge", "spread", "constant"]))
    return (
        values(draw(st.integers(0, 99)), kind, draw(st.sampled_from(dtypes)), shape),
        window,
        most,
    )


LOOSE = examples(12, of=1000, suppress_health_check=list(HealthCheck))


@LOOSE
@given(cases(DTYPES), st.sampled_from(["value", "real", "imag", "abs"]))
def test_blocks_are_those_of_numpy(case, component):
    check(*case, component)


@LOOSE
@given(cases(WIDE))
def test_blocks_of_wide_dtypes_are_those_of_numpy(case):
    with jax.enable_x64(True):
        check(*case)


@pytest.mark.parametrize("most", [(1, 3, 5), (4, 16, 16), (2, 64, 7)])
@pytest.mark.parametrize("tile", [64, 1 << 9, 1 << 20])
def test_however_an_array_is_cut_into_tiles_the_blocks_are_the_same(monkeypatch, tile, most):
    monkeypatch.setattr(blocks, "TILE", tile)
    monkeypatch.setattr(blocks, "FINE", 16)
    x = values(3, "specials", np.float32, (3, 70, 90))
    found = check(x, whole(x.shape, (0, 1, 2)), most)
    assert found.nan is not None
    check(x, whole(x.shape, (1, 2, 0)), most)
    check(x.reshape(-1), whole((x.size,), (None, None, 0)), most)


def test_the_grid_of_blocks_does_not_move_with_the_window():
    x = values(1, "normal", np.float32, (300, 300))
    near = Window(axes=(None, 0, 1), spans=((0, 1), (37, 137), (51, 151)), index=(0, 0))
    found = check(x, near, (1, 16, 16))
    every = reduce_blocks(x, whole(x.shape, (None, 0, 1)), (1, 64, 64))
    assert found.block == every.block == (1, 8, 8)
    row, column = (s // 8 for s in found.starts[1:])
    rows, columns = found.mean.shape[1:]
    part = every.mean[:, row : row + rows, column : column + columns]
    np.testing.assert_allclose(found.mean, part, atol=1e-6)


def test_a_sum_that_overflows_is_a_mean_that_does_not():
    x = np.full((64, 64), 3e38, np.float32)
    x[0, 0] = np.inf
    found = check(x, whole(x.shape, (None, 0, 1)), (1, 2, 2))
    np.testing.assert_allclose(found.mean, 3e38, rtol=1e-6)
    assert found.posinf.sum() == 1


def test_nothing_of_an_empty_array():
    for x, tiles in ((jnp.zeros((4, 0)), DEVICE_TILES), (np.zeros((4, 0)), NUMPY_TILES)):
        found = reduce_blocks(x, whole(x.shape, (None, 0, 1)), (1, 8, 8), tiles=tiles)
        assert found.mean.shape == (1, 4, 0)
        assert exact_values(x, whole(x.shape, (None, 0, 1)), tiles).shape == (1, 4, 0)


def test_a_scalar_is_one_block():
    for x, tiles in ((jnp.float32(3), DEVICE_TILES), (np.float32(3), NUMPY_TILES)):
        found = reduce_blocks(x, whole((), (None, None, None)), (1, 1, 1), tiles=tiles)
        assert found.mean.tolist() == [[[3.0]]]
        assert found.exact


@pytest.mark.parametrize("dtype", [*DTYPES, *WIDE, ml_dtypes.int4])
def test_exact_values_are_exact(dtype):
    with jax.enable_x64(dtype in WIDE):
        x = values(5, "specials", dtype, (3, 5, 7))
        if np.issubdtype(dtype, np.integer) and dtype in WIDE:
            x[0, 0, 0] = np.iinfo(dtype).max
        window = Window(axes=(None, 2, 0), spans=((0, 1), (1, 6), (0, 3)), index=(0, 3, 0))
        found = exact_values(jnp.asarray(x), window, DEVICE_TILES)
        if x.dtype.kind in "biufc":
            np.testing.assert_array_equal(exact_values(x, window), found)
    wanted = x[0:3, 3, 1:6].T[None]
    if dtype in (np.int64, np.uint64):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, wanted)
    elif np.issubdtype(dtype, np.complexfloating):
        for part in ("real", "imag"):
            np.testing.assert_array_equal(getattr(found, part), getattr(wanted, part))
    else:
        np.testing.assert_array_equal(found.astype(np.float64), wanted.astype(np.float64))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("tile", [8, 1 << 20])
@pytest.mark.parametrize("kind", ["normal", "huge"])
def test_norms_are_those_of_numpy(monkeypatch, axis, tile, kind):
    monkeypatch.setattr(device_tiles, "TILE", tile)
    x = values(2, kind, np.float32, (4, 6, 5))
    x = np.where(np.isfinite(x), x, 0).astype(np.float32) / 8
    found = norms(jnp.asarray(x), axis)
    wanted = np.linalg.norm(x.astype(np.float64), axis=axis)
    np.testing.assert_allclose(found, wanted, rtol=2e-6)
    np.testing.assert_allclose(blocks.norms(x, axis), wanted, rtol=1e-12)


def test_norms_tell_what_is_not_finite():
    x = np.array([[1.0, np.nan], [np.inf, 1.0], [3.0, 4.0]], np.float32)
    for found in (norms(jnp.asarray(x), 1), blocks.norms(x, 1)):
        assert np.isnan(found[0])
        assert not np.isfinite(found[1])
        assert found[2] == 5


@pytest.mark.parametrize(
    ("window", "text"),
    [
        (Window(axes=(None, 0, 0), spans=((0, 1),) * 3, index=(0, 0)), "distinct axes"),
        (Window(axes=(None, 0, 2), spans=((0, 1),) * 3, index=(0, 0)), "has no axis 2"),
        (Window(axes=(None, 0, None), spans=((0, 1),) * 3, index=(0, 9)), "Index 9 is out of"),
        (Window(axes=(None, 0, 1), spans=((0, 1),) * 3, index=(0,)), "one index per axis"),
    ],
)
def test_a_window_that_does_not_fit_is_refused(window, text):
    with pytest.raises(ValueError, match=text):
        reduce_blocks(jnp.ones((3, 4)), window, (1, 8, 8))


def test_a_large_array_is_never_fetched():
    x = jnp.ones((4096, 4096))
    found = reduce_blocks(x, whole(x.shape, (None, 0, 1)), (1, 128, 128), tiles=DEVICE_TILES)
    assert found.block == (1, 32, 32)
    assert found.fetched == 128 * 128 * 12  # three float32 a block
    with pytest.raises(ValueError, match="At most 4096"):
        exact_values(x, whole(x.shape, (None, 0, 1)), DEVICE_TILES)
