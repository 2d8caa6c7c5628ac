"""The functions in C are called where they can be, and nothing fails where they cannot."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from nnx_inspector._compat import native
from nnx_inspector._compat.native import can_call_everywhere, has_functions
from nnx_inspector.perturbations.places import SCALE, apply_row
from nnx_inspector.program.editing.functions import UNIT, update_squares
from nnx_inspector.program.editing.packed import PackedArray, pack, unpack
from nnx_inspector.stats.samples.sample_parameters import sample_parameter
from nnx_inspector.stats.samples.sample_units import sample_units
from nnx_inspector.stats.summarize import summarize


def test_xla_takes_the_library_of_this_machine() -> None:
    """Fails where a new jaxlib has another interface, or where the library was not built."""
    assert native.library_path().is_file()
    assert has_functions()
    assert can_call_everywhere() == (jax.device_count() == 1)


def test_a_program_for_one_of_several_devices_calls_the_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    assert "nnx_inspector_array_stats" in jax.jit(summarize).lower(x).as_text()
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    spread = x.update(sharding=NamedSharding(mesh, PartitionSpec("data")))
    program = jax.jit(summarize).trace(spread).lower(lowering_platforms=("cpu",)).as_text()
    assert "nnx_inspector_array_stats" not in program


@pytest.mark.parametrize("content", [None, b"not a library"])
def test_without_a_library_the_programs_are_jax(
    content: bytes | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 700)).astype(np.float32))
    expected = summarize(x)
    _, (words,) = pack(expected)
    if content is not None:
        (tmp_path / "library").write_bytes(content)
    monkeypatch.setattr(native, "library_path", lambda: tmp_path / "library")
    has_functions.cache_clear()
    jax.clear_caches()
    try:
        assert not has_functions()
        assert "custom_call" not in jax.jit(summarize).lower(x).as_text()
        found = summarize(x)
        np.testing.assert_array_equal(found.bins, expected.bins)
        np.testing.assert_array_equal(found.points[:2], expected.points[:2])
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-5)
        np.testing.assert_allclose(found.std, expected.std, rtol=1e-6)
        np.testing.assert_array_equal(pack(expected)[1][0], words)
    finally:
        has_functions.cache_clear()
        jax.clear_caches()


def test_a_library_without_one_of_the_functions_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "FUNCTIONS", (*native.FUNCTIONS, "of_a_later_version"))
    has_functions.cache_clear()
    try:
        assert not has_functions()
    finally:
        has_functions.cache_clear()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64, jnp.int8, jnp.bool_])
def test_what_is_computed_once_is_the_value_itself(dtype: Any) -> None:
    x = jnp.asarray([[0.0, -0.0, 1.5], [2.0, 3.0, jnp.nan]]).astype(dtype)
    same = jax.jit(lambda x: (native.fusion_barrier(x), x))  # XLA must not write over the argument
    for one in (*same(x), jax.jit(jax.vmap(native.fusion_barrier))(x), native.fusion_barrier(x)):
        assert one.dtype == x.dtype
        assert np.asarray(one).tobytes() == np.asarray(x).tobytes()


def test_what_is_computed_once_is_differentiated_as_the_identity() -> None:
    def f(x: jax.Array) -> jax.Array:
        return (native.fusion_barrier(x**3) ** 2).sum()  # x**6

    x = jnp.array([0.5, 2.0])
    np.testing.assert_allclose(jax.jit(jax.grad(f))(x), 6 * x**5, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.hessian(f))(x), jnp.diag(30 * x**4), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(f))(x), 6 * x**5, rtol=1e-6)


@pytest.mark.skipif(not can_call_everywhere(), reason="the functions in C are for one CPU")
def test_what_is_changed_in_place_after_it_was_measured_is_not_copied() -> None:
    def step(x: jax.Array, rows: jax.Array) -> list[jax.Array]:
        x = jnp.tanh(x)
        mean = sample_units(x)
        return [apply_row(native.fusion_barrier(x, mean), rows, 0), mean]

    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32))
    program = jax.jit(step).lower(x, jnp.array([[SCALE, 2.0]])).compile()
    text = program.as_text()
    assert "nnx_inspector_apply" in text
    assert " copy(" not in text
    scaled, mean = program(x, jnp.array([[SCALE, 2.0]]))
    np.testing.assert_allclose(scaled, 2 * np.tanh(x), rtol=1e-6)
    np.testing.assert_array_equal(mean, sample_units(jnp.tanh(x)))


@pytest.mark.parametrize("wide", [False, True])
def test_it_joins_rows_as_jax_does_bit_for_bit(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.enable_x64(wide):
        real = np.random.default_rng(0).normal(size=(2, 3, 5, 2))
        real[0, 1, 2] = np.nan, -0.0
        x = jnp.asarray(real, np.float64 if wide else np.float32)
        several = x, jnp.arange(6, dtype=np.int64 if wide else np.int32).reshape(2, 3)

        def words(*xs: jax.Array) -> jax.Array:
            return pack([PackedArray(x) for x in xs])[1][0]

        in_c = jax.vmap(jax.vmap(words))(*several)
        each = [[words(*(x[i, j] for x in several)) for j in range(3)] for i in range(2)]
        np.testing.assert_array_equal(in_c, each)
        monkeypatch.setattr(native, "can_call_on", lambda _: False)
        program = jax.jit(lambda *xs: jax.vmap(jax.vmap(words))(*xs)).lower(*several)
        assert "nnx_inspector_join" not in program.as_text()
        np.testing.assert_array_equal(program.compile()(*several), in_c)
        layout, _ = pack([PackedArray(x[0, 0]) for x in several])
        for one, other in zip(unpack(layout, [np.asarray(in_c)]), several, strict=True):
            assert one.dtype == other.dtype
            assert one.tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("shape", [(), (3,), (300, 7), (1031,), (0, 3)])
@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float64", "complex64", "float8_e4m3fn"]
)
def test_how_far_a_parameter_is_moved_is_what_numpy_finds(
    dtype: str, shape: tuple[int, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    shape = (4, *shape) if rows else shape

    def drawn(size: float) -> Any:
        parts = rng.normal(size=(2, *shape)) * size
        return parts[0] + 1j * parts[1] if dtype == "complex64" else parts[0]

    with jax.enable_x64(dtype == "float64"):
        before = jnp.asarray(drawn(1.0), dtype)
        after = jnp.asarray(np.asarray(before) + drawn(1e-2), dtype)
        found = jax.jit(functools.partial(update_squares, rows))(before, after)
        wide = np.complex128 if dtype == "complex64" else np.float64
        a, b = np.asarray(before).astype(wide), np.asarray(after).astype(wide)
        over = tuple(range(rows, a.ndim))
        squares = [(np.abs(x) ** 2).sum(over) for x in ((b - a) / UNIT, a)]
        np.testing.assert_allclose(found[..., :2], np.stack(squares, axis=-1), rtol=1e-6)
        monkeypatch.setattr(native, "can_call_on", lambda _: False)
        program = jax.jit(functools.partial(update_squares, rows)).lower(before, after)
        assert "nnx_inspector_update" not in program.as_text()
        np.testing.assert_allclose(program.compile()(before, after), found, rtol=3e-6)


def test_what_is_exported_calls_no_function_of_ours() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32))

    def measured(x: jax.Array) -> list[jax.Array]:
        x = apply_row(native.fusion_barrier(x), jnp.array([[SCALE, 2.0]]), 0)
        return [x, summarize(x).bins, sample_units(x)]

    exported = jax.export.export(jax.jit(measured))(x)
    assert "@nnx_inspector_" not in exported.mlir_module()
    for one, other in zip(exported.call(x), jax.jit(measured)(x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wide", [False, True])
def test_the_shapes_and_dtypes_of_results_are_those_of_the_program(wide: bool):
    with jax.enable_x64(wide):
        x = np.ones((2, 5, 3), np.float64 if wide else np.float32)
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (jax.vmap(sample_units), (x,)),
            (jax.vmap(sample_parameter), (x,)),
            (lambda x: pack(list(map(PackedArray, (x, x[0, 0], jnp.zeros((0,))))))[1], (x,)),
        ]  # fmt: skip
        for call, args in calls:
            jax.export.export(jax.jit(call), platforms=["cpu", "cuda"])(*args)  # fails if not
