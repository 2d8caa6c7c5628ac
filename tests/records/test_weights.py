"""`compare_weights` against NumPy, on models, states and dictionaries."""

# pandas is only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_inspector as nni
from nnx_inspector.stats.summarize import summarize


class Net(nnx.Module):
    def __init__(self, out: int = 3, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs, param_dtype=dtype) for _ in range(2)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.head = nnx.Linear(4, out, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.scale = jnp.ones(2)


def of(frame: Any, path: str) -> Any:
    return frame.set_index("parameter").loc[path]


def test_distances_are_those_of_numpy():
    a, b = Net(rngs=nnx.Rngs(0)), Net(rngs=nnx.Rngs(1))
    frame = nni.compare_weights(a, b)
    assert set(frame["in"]) == {"both"}
    assert set(frame.type) == {"Param", "BatchStat", "array"}, "no keys and no counts"
    for i in range(2):
        row = of(frame, f"layers/{i}/kernel")
        one, other = (np.asarray(m.layers[i].kernel[...], np.float64) for m in (a, b))
        np.testing.assert_allclose(row.distance, np.linalg.norm(other - one), rtol=1e-5)
        relative = np.linalg.norm(other - one) / np.linalg.norm(one)
        np.testing.assert_allclose(row.relative_change, relative, rtol=1e-5)
        np.testing.assert_allclose(row.mean_difference, other.mean() - one.mean(), atol=1e-6)
        np.testing.assert_allclose(row.std_difference, other.std() - one.std(), atol=1e-6)
        assert row.array == "float32[4,4]"
        assert 0 < row.total_variation <= 1
    changes = frame.relative_change.tolist()
    assert changes == sorted(changes, reverse=True)


def test_what_is_equal_has_no_distance_and_what_was_zero_is_infinitely_far():
    a = Net(rngs=nnx.Rngs(0))
    b = nnx.clone(a)
    b.head.bias[...] = jnp.ones(3)
    b.layers[0].bias[...] = jnp.full(4, 0.1)
    frame = nni.compare_weights(a, b)
    assert list(frame.parameter[:2]) == ["head/bias", "layers/0/bias"]  # the farther one first
    assert (frame.relative_change[:2] == np.inf).all()
    assert (frame.distance[2:] == 0).all()
    assert (frame.relative_change[2:] == 0).all()
    assert (frame.total_variation[2:] == 0).all()


def test_a_bias_that_began_at_zero_comes_after_a_matrix_that_changed_more_and_before_equals():
    a = Net(rngs=nnx.Rngs(0))
    b = nnx.clone(a)
    b.head.kernel[...] *= 1.5
    b.layers[0].bias[...] = jnp.full(4, 0.01)
    frame = nni.compare_weights(a, b)
    assert list(frame.parameter[:2]) == ["head/kernel", "layers/0/bias"]
    assert (frame.distance[2:] == 0).all()


def test_states_dictionaries_and_models_give_the_same():
    a, b = Net(rngs=nnx.Rngs(0)), Net(rngs=nnx.Rngs(1))
    frame = nni.compare_weights(a, b)
    states = nni.compare_weights(nnx.state(a), nnx.state(b))
    pure = [nnx.to_pure_dict(nnx.state(m, (nnx.Param, nnx.BatchStat))) for m in (a, b)]
    plain = nni.compare_weights(*pure)
    assert frame.equals(states)
    rows = frame[frame.type == "Param"]
    np.testing.assert_array_equal(
        plain.set_index("parameter").loc[rows.parameter].distance, rows.distance
    )
    numpy = jax.tree.map(np.asarray, pure[0])
    np.testing.assert_array_equal(nni.compare_weights(numpy, numpy).distance, 0)


def test_another_shape_another_dtype_and_one_side_only():
    a, b = Net(rngs=nnx.Rngs(0)), Net(5, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    b.extra = nnx.Param(jnp.ones(2))
    frame = nni.compare_weights(a, b)
    row = of(frame, "head/kernel")
    assert row.array == "float32[4,3] and float32[4,5]"
    assert np.isnan([row.distance, row.relative_change]).all()
    assert 0 < row.total_variation <= 1, "histograms of other shapes can be compared"
    one, other = (np.asarray(m.layers[0].kernel[...], np.float64) for m in (a, b))
    row = of(frame, "layers/0/kernel")
    np.testing.assert_allclose(row.distance, np.linalg.norm(other - one), rtol=1e-5)
    last = frame.iloc[-1]
    assert (last.parameter, last["in"]) == ("extra", "b")
    assert np.isnan(last.distance)


def test_a_shared_weight_is_one_row_and_a_stack_is_one_array():
    class Shared(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.a = self.b = nnx.Param(rngs.params.normal((6, 2, 2)))

    frame = nni.compare_weights(Shared(nnx.Rngs(0)), Shared(nnx.Rngs(1)))
    assert frame.parameter.tolist() == ["a"]
    assert frame.array.tolist() == ["float32[6,2,2]"]


def test_large_and_tiny_weights_neither_overflow_nor_vanish():
    for scale in (1e30, 1e-30):
        a = {"w": np.full(8, scale, np.float32)}
        b = {"w": np.full(8, 3 * scale, np.float32)}
        frame = nni.compare_weights(a, b)
        np.testing.assert_allclose(frame.relative_change[0], 2.0, rtol=1e-5)
        assert frame.distance[0] == summarize(b["w"] - a["w"]).merged().norm


def test_neither_model_changes_and_errors_teach():
    model = Net(rngs=nnx.Rngs(0))
    before = nnx.graphdef(model)
    nni.compare_weights(model, model)
    assert nnx.graphdef(model) == before
    with pytest.raises(TypeError, match="two modules, states or dictionaries of arrays, got list"):
        nni.compare_weights(model, [])
    model.head.kernel[...].delete()
    with pytest.raises(nni.InspectorError, match="The weights cannot be read now"):
        nni.compare_weights(model, model)


@pytest.mark.parametrize("name", ["int8", "uint8", "int4", "int16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("in_numpy", [True, False])
def test_quantised_weights_are_compared(name: str, in_numpy: bool):
    a, b = np.array([0, 1, 2, 3, 4, 5], np.float64), np.array([1, 1, 6, 0, 4, 2], np.float64)
    to = (lambda x: x.astype(jnp.dtype(name))) if in_numpy else (lambda x: jnp.asarray(x, name))
    (row,) = nni.compare_weights({"w": to(a)}, {"w": to(b)}).to_dict("records")
    np.testing.assert_allclose(row["distance"], np.linalg.norm(b - a), rtol=1e-6)
    np.testing.assert_allclose(row["mean_difference"], b.mean() - a.mean(), atol=1e-6)
    assert row["array"] == f"{name}[6]"


def test_a_quantised_model_beside_the_one_it_was_made_from():
    class Quantised(nnx.Module):
        def __init__(self, model: Any):
            kernel = model.head.kernel[...]
            self.scale = nnx.Param(jnp.abs(kernel).max() / 127)
            self.kernel = nnx.Param(jnp.round(kernel / self.scale[...]).astype(jnp.int8))
            self.rngs = nnx.Rngs(0)  # keys and counts are no weights
            self.step = nnx.Variable(jnp.zeros((), jnp.int32))

    one, other = (Quantised(Net(rngs=nnx.Rngs(seed))) for seed in (0, 1))
    frame = nni.compare_weights(one, other)
    assert sorted(frame.parameter) == ["kernel", "scale"]
    apart = np.asarray(other.kernel[...], np.float64) - np.asarray(one.kernel[...], np.float64)
    np.testing.assert_allclose(of(frame, "kernel").distance, np.linalg.norm(apart), rtol=1e-6)
    (row,) = nni.compare_weights({"kernel": one.kernel[...]}, {"kernel": np.ones((4, 3))}).array
    assert row == "int8[4,3] and float64[4,3]"


def test_floats_of_8_bits_beside_wider_ones():
    a, b = jnp.array([1.0, 2.0, 4.0]), jnp.array([1.0, 3.0, 2.0])
    for one, other in (
        (a.astype(jnp.float8_e4m3fn), b),
        (a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e5m2)),
        (a.astype(jnp.bfloat16), b.astype(jnp.int8)),
    ):
        (distance,) = nni.compare_weights({"w": one}, {"w": other}).distance
        np.testing.assert_allclose(distance, np.sqrt(5), rtol=1e-6)
