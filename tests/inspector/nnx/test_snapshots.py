"""How far Variables moved, against NumPy in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector.inspector.nnx import snapshots
from nnx_inspector.inspector.nnx.snapshots import change_between, norm_of, snapshot_of


@pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, np.int32, np.uint32, np.bool_, np.complex64]
)
def test_a_move_is_measured_in_float64(dtype):
    rng = np.random.default_rng(0)
    old, new = (
        jnp.asarray(rng.normal(0, 5, (7, 5)).round().clip(0).astype(dtype)) for _ in range(2)
    )
    wide = np.complex128 if dtype == np.complex64 else np.float64
    a, b = (np.asarray(x).astype(wide) for x in (old, new))
    change = change_between(old, new)
    assert change.distance == pytest.approx(np.sqrt((np.abs(b - a) ** 2).sum()), rel=1e-12)
    assert change.relative == pytest.approx(
        np.sqrt((np.abs(b - a) ** 2).sum() / (np.abs(a) ** 2).sum()), rel=1e-12
    )
    assert not change.same
    assert (change.before, change.after) == ("", "")


def test_the_same_bits_are_the_same_also_when_not_a_number():
    x = jnp.array([1.0, jnp.nan, -0.0])
    assert change_between(x, x + 0).same is False, "-0.0 + 0 is another number, bitwise"
    assert change_between(x, jnp.array([1.0, jnp.nan, -0.0])).same


def test_what_norms_cannot_tell_is_none():
    zero, one = jnp.zeros(3), jnp.ones(3)
    change = change_between(zero, one)
    assert (change.distance, change.relative) == (pytest.approx(3**0.5), None)
    bad = change_between(one, one * jnp.inf)
    assert (bad.same, bad.distance, bad.relative) == (False, None, None)
    other = change_between(one, jnp.ones(4))
    assert (other.same, other.distance) == (False, None)
    assert change_between(None, one) is None
    key = jax.random.key(0)
    assert change_between(key, jax.random.key(0)).same
    assert change_between(key, jax.random.key(1)).same is False


def test_a_scalar_is_told_as_it_was_and_is():
    change = change_between(jnp.uint32(3), jnp.uint32(5))
    assert (change.before, change.after, change.distance) == ("3", "5", 2.0)


def test_copies_are_our_own_bounded_and_compile_nothing(monkeypatch):
    variables = [nnx.Param(jnp.full((10,), float(i))) for i in range(4)]
    compiled = []
    undo = jit.compilation_events(lambda kind, *_: compiled.append(kind))
    monkeypatch.setattr(snapshots, "MOST_BYTES", 100)
    look = snapshot_of([(v, v.get_raw_value()) for v in variables], 7)
    undo()
    assert compiled == []
    assert (len(look.copies), look.left_out, look.step) == (2, 2, 7)
    jax.jit(lambda x: x + 1, donate_argnums=0)(variables[0].get_raw_value())
    assert variables[0].get_raw_value().is_deleted()
    np.testing.assert_array_equal(look.copy_of(variables[0]), np.zeros(10))
    assert snapshot_of([(variables[0], variables[0].get_raw_value())], 8).copies == {}
    assert np.isnan(norm_of(variables[0].get_raw_value()))
