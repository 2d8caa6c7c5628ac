"""Dtypes of 16 and 8 bits: updates that they round to nothing, and ranges that they fill by design.

Silent: a learning rate that they can follow, elements whose gradient is 0, a copy in float32 from
which the parameters are made anew, and a scaled float8 array.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_inspector as nni

BF16, F16 = jnp.bfloat16, jnp.float16


class Net(nnx.Module):
    def __init__(self, dtype, width=64):
        k = {"dtype": dtype, "param_dtype": dtype}
        self.norm = nnx.LayerNorm(32, rngs=nnx.Rngs(0), **k)
        self.a = nnx.Linear(32, width, rngs=nnx.Rngs(1), **k)
        self.b = nnx.Linear(width, 4, rngs=nnx.Rngs(2), **k)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(self.norm(x))))


class OfTokens(nnx.Module):
    """An embedding of which a batch uses only a few rows."""

    def __init__(self, dtype):
        k = {"dtype": dtype, "param_dtype": dtype}
        self.embed = nnx.Embed(256, 32, rngs=nnx.Rngs(0), **k)
        self.head = nnx.Linear(32, 4, rngs=nnx.Rngs(1), **k)

    def __call__(self, x):
        return self.head(self.embed(x))


def squares(model, x):
    return ((model(x).astype(jnp.float32) - 1) ** 2).mean()


def in_loop(model, tx, batches):
    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(squares)(model, x))

    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with nni.watch(model, every=1) as recording:
        for x in batches:
            step(model, optimizer, x)
    return nni.diagnose(recording), recording


def batches(dtype, n=24):
    return [jax.random.normal(jax.random.key(i), (32, 32), dtype) for i in range(n)]


def of_dtype(findings):
    return [f for f in findings if f.rule == "update-ratio" and "dtype" in f.message]


LOST = {
    "adam in bfloat16": (BF16, optax.adam(1e-4)),
    "a lower rate": (BF16, optax.adam(1e-5)),
    "sgd in bfloat16": (BF16, optax.sgd(1e-4)),
    "adam in float16": (F16, optax.adam(2e-6, eps=1e-4)),
}


@pytest.mark.parametrize("name", LOST)
def test_updates_that_16_bits_round_off_are_a_warning_with_their_share(name):
    dtype, tx = LOST[name]
    model = Net(dtype)
    before = {n: np.asarray(getattr(model, n).kernel[...], np.float64) for n in "ab"}
    found, _ = in_loop(model, tx, batches(dtype))
    (one,) = of_dtype(found)
    assert one.severity == "warning"
    layer = one.site
    after = np.asarray(getattr(model, layer).kernel[...], np.float64)
    stuck = (before[layer] == after).mean()
    assert stuck > 0.5
    assert one.evidence["stuck"] == pytest.approx(stuck, abs=0.12)  # of a sample of 256
    assert jnp.dtype(dtype).name in one.message
    assert "at step" not in one.what
    assert one.what.startswith("From step 0 to step 23, ")


def test_a_rate_that_bfloat16_can_follow_is_silent():
    found, _ = in_loop(Net(BF16), optax.adam(1e-2), batches(BF16))
    assert of_dtype(found) == []


def test_float32_is_silent():
    found, _ = in_loop(Net(jnp.float32), optax.adam(1e-6), batches(jnp.float32))
    assert of_dtype(found) == []


def test_rows_that_no_batch_uses_are_silent():
    tokens = [jax.random.randint(jax.random.key(i), (8, 4), 0, 16) for i in range(24)]
    found, recording = in_loop(OfTokens(BF16), optax.adam(1e-2), tokens)
    last = recording.passes[-1].figures
    assert last is not None
    assert last.parameter("embed/embedding", "stuck") > 0.5
    assert of_dtype(found) == []


def test_a_copy_in_float32_is_silent():
    """Each step rounds the float32 weights anew, so that small updates add up."""
    model = Net(BF16)
    tx = optax.adam(3e-4)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(model, nnx.Param))
    held = tx.init(wide)

    @nnx.jit
    def step(model, wide, held, x):
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), nnx.grad(squares)(model, x))
        updates, held = tx.update(grads, held, wide)
        wide = optax.apply_updates(wide, updates)
        nnx.update(model, jax.tree.map(lambda x: x.astype(BF16), wide))
        return wide, held

    with nni.watch(model, every=1) as recording:
        for x in batches(BF16, 12):
            wide, held = step(model, wide, held, x)
    assert of_dtype(nni.diagnose(recording)) == []


# --------------------------------------------------------------------- float8


class Cast(nnx.Module):
    """Casts to float8: scaled to its range, or by a factor, clipped or not."""

    def __init__(self, dtype, *, factor=0.0, clip=False):
        self.dtype, self.factor, self.clip = dtype, factor, clip

    def __call__(self, x):
        top = float(jnp.finfo(self.dtype).max)
        x = x * (self.factor or top / jnp.abs(x).max())
        return (jnp.clip(x, -top, top) if self.clip else x).astype(self.dtype)


class Quantised(nnx.Module):
    def __init__(self, quant):
        self.linear, self.quant = nnx.Linear(16, 16, rngs=nnx.Rngs(0)), quant

    def __call__(self, x):
        return self.quant(self.linear(x)).astype(jnp.float32)


FLOAT8 = [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3b11fnuz, jnp.float8_e5m2fnuz]
X = jax.random.normal(jax.random.key(0), (32, 16))


def found_in(quant):
    model = Quantised(quant)
    insp = nni.Inspector(model, X, display=False)
    found = insp.findings
    insp.close()
    return found, np.asarray(model.quant(model.linear(X)).astype(jnp.float32), np.float64)


@pytest.mark.parametrize("dtype", FLOAT8, ids=lambda x: x.__name__)
def test_float8_that_is_scaled_to_its_range_is_silent(dtype):
    found, _ = found_in(Cast(dtype))
    assert found == []


@pytest.mark.parametrize("dtype", FLOAT8, ids=lambda x: x.__name__)
def test_float8_that_is_mostly_cut_off_is_a_note_with_its_share(dtype):
    found, values = found_in(Cast(dtype, factor=100 * float(jnp.finfo(dtype).max), clip=True))
    (one,) = found
    assert (one.severity, one.rule, one.site) == ("info", "overflow", "quant")
    ends = (np.abs(values) == float(jnp.finfo(dtype).max)).mean()
    assert one.evidence["fraction"] == pytest.approx(ends)
    assert one.evidence["zeros"] == pytest.approx((values == 0).mean())
    assert dtype.__name__ in one.message
    assert "float16" not in one.message


@pytest.mark.parametrize("dtype", FLOAT8, ids=lambda x: x.__name__)
def test_float8_that_is_not_finite_is_named(dtype):
    found, values = found_in(Cast(dtype, factor=1e6))
    assert not np.isfinite(values).all()
    assert [f.rule for f in found] == ["nonfinite"]
    if dtype is jnp.float8_e5m2:
        assert found[0].evidence["posinf"] == (values == np.inf).sum()
    else:
        assert found[0].evidence["nan"] == np.isnan(values).sum()


def test_int8_is_silent():
    class ToInt8(nnx.Module):
        def __call__(self, x):
            return jnp.round(x * (127 / jnp.abs(x).max())).astype(jnp.int8)

    assert found_in(ToInt8())[0] == []


def test_float16_is_still_reported():
    found, values = found_in(Cast(F16))
    (one,) = found
    assert (one.severity, one.rule) == ("error", "overflow")
    assert one.evidence["largest"] == np.abs(values).max()
    assert "float16" in one.message
