"""Dtypes of 16 and 8 bits: updates that they round to nothing, and ranges that they fill by design.

Silent: a learning rate that they can follow, elements whose gradient is 0, parameters that are not
to be trained, a copy in float32 from which they are made anew, and a scaled float8 array.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from parameter_oracle import flat

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


class Pictures(nnx.Module):
    def __init__(self, dtype):
        k = {"dtype": dtype, "param_dtype": dtype}
        self.conv = nnx.Conv(2, 16, (3, 3), rngs=nnx.Rngs(0), **k)
        self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(1), **k)
        self.head = nnx.Linear(16, 4, rngs=nnx.Rngs(2), **k)

    def __call__(self, x):
        x = x.reshape(-1, 4, 4, 2)
        return self.head(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


class Attends(nnx.Module):
    def __init__(self, dtype):
        k = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, **k)
        self.norm = nnx.RMSNorm(8, **k)

    def __call__(self, x):
        x = x.reshape(-1, 4, 8)
        return self.norm(x + self.attention(x))


def in_loop(model, tx, batches, *, every=1, wrt=nnx.Param):
    """The findings of a loop, its recording, and the share of each parameter's update that each
    step lost, by NumPy.
    """

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(squares, argnums=nnx.DiffState(0, wrt))(model, x)
        params = nnx.state(model, wrt)
        added = tx.update(*map(nnx.as_pure, (grads, optimizer.opt_state, params)))[0]
        optimizer.update(model, grads)
        return added

    optimizer = nnx.Optimizer(model, tx, wrt=wrt)
    lost: dict[str, list[float]] = {}
    with nni.watch(model, every=every) as recording:
        for x in batches:
            before = flat(nnx.state(model, wrt))
            added = flat(step(model, optimizer, x))
            for path, after in flat(nnx.state(model, wrt)).items():
                meant = added[path] != 0
                part = (before[path] == after)[meant].mean() if meant.any() else np.nan
                lost.setdefault(path, []).append(part)
    return nni.diagnose(recording), recording, lost


def batches(dtype, n=12):
    return [jax.random.normal(jax.random.key(i), (32, 32), dtype) for i in range(n)]


def tokens(n=12, most=256):
    return [jax.random.randint(jax.random.key(i), (8, 4), 0, most) for i in range(n)]


def of_dtype(findings):
    return [f for f in findings if f.rule == "update-ratio" and "dtype" in f.message]


LOST = {
    "adam in bfloat16": (Net, BF16, optax.adam(1e-4), {}),
    "a lower rate": (Net, BF16, optax.adam(1e-5), {}),
    "sgd in bfloat16": (Net, BF16, optax.sgd(1e-4), {}),
    "momentum": (Net, BF16, optax.sgd(1e-5, momentum=0.9), {}),
    "weight decay": (Net, BF16, optax.adamw(1e-4, weight_decay=0.1), {}),
    "signs": (Net, BF16, optax.lion(2e-5), {}),
    "adam in float16": (Net, F16, optax.adam(2e-6, eps=1e-4), {}),
    "every third step": (Net, BF16, optax.adam(1e-4), {"every": 3}),
    "a convolution": (Pictures, BF16, optax.adam(1e-4), {}),
    "an attention": (Attends, BF16, optax.sgd(1e-4), {}),
    "an embedding": (OfTokens, BF16, optax.adam(1e-4), {}),
    "accumulated": (Net, BF16, optax.MultiSteps(optax.adam(1e-4), 2).gradient_transformation(), {}),
}


@pytest.mark.parametrize("name", LOST)
def test_updates_that_16_bits_round_off_are_a_warning_with_their_share(name):
    kind, dtype, tx, how = LOST[name]
    found, _, lost = in_loop(
        kind(dtype), tx, tokens() if kind is OfTokens else batches(dtype), **how
    )
    (one,) = of_dtype(found)
    assert one.severity == "warning"
    steps = {path: [(i, x) for i, x in enumerate(of) if x == x] for path, of in lost.items()}
    medians = {
        path: np.median([x for i, x in of if i % how.get("every", 1) == 0])
        for path, of in steps.items()
    }
    path = one.what.split("'")[1]
    assert one.evidence["lost"] == pytest.approx(medians[path], abs=1e-6)
    assert one.evidence["parameters"] == sum(x >= 0.5 for x in medians.values())
    assert f"{medians[path]:.0%} of the elements of {path!r} ({jnp.dtype(dtype).name})" in one.what
    assert f"param_dtype=jnp.float32) and compute in {jnp.dtype(dtype).name}" in one.advice


def test_where_the_update_is_another_program_samples_say_so():
    model = Net(BF16)
    optimizer = nnx.Optimizer(model, optax.adam(1e-4), wrt=nnx.Param)
    graded, update = nnx.jit(nnx.grad(squares)), nnx.jit(lambda o, m, g: o.update(m, g))
    before = np.asarray(model.a.kernel[...], np.float64)
    with nni.watch(model, every=1) as recording:
        for x in batches(BF16, 24):
            update(optimizer, model, graded(model, x))
    (one,) = of_dtype(nni.diagnose(recording))
    stuck = (before == np.asarray(model.a.kernel[...], np.float64)).mean()
    assert one.site == "a"
    assert one.evidence["lost"] == pytest.approx(stuck, abs=0.12)  # of a sample of 256
    assert "sampled elements" in one.what


class Adapted(nnx.Module):
    def __init__(self, dtype):
        k = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
        self.base = nnx.Linear(32, 4, **k)
        self.lora = nnx.LoRA(32, 2, 4, base_module=self.base, **k)

    def __call__(self, x):
        return self.lora(x)


class Off(Net):
    """Half of its units are off, and the others learn."""

    def __call__(self, x):
        off = jnp.where(jnp.arange(64) < 32, -100, 0).astype(x.dtype)
        return self.b(nnx.relu(self.a(self.norm(x)) + off))


COSINE = optax.cosine_decay_schedule(1e-2, 12)
WARM_UP = optax.linear_schedule(1e-5, 2e-2, 12)
ONLY_UP = nnx.All(nnx.Param, lambda path, _: "a" in path)
HEALTHY = {
    "a rate that it can follow": lambda: in_loop(Net(BF16), optax.adam(1e-2), batches(BF16)),
    "float32": lambda: in_loop(Net(jnp.float32), optax.adam(1e-6), batches(jnp.float32)),
    "a rate that ends at 0": lambda: in_loop(Net(BF16), optax.adam(COSINE), batches(BF16)),
    "a warm-up": lambda: in_loop(Net(BF16), optax.adam(WARM_UP), batches(BF16)),
    "accumulated": lambda: in_loop(
        Net(BF16), optax.MultiSteps(optax.adam(1e-2), 3).gradient_transformation(), batches(BF16)
    ),
    "frozen": lambda: in_loop(Net(BF16), optax.adam(1e-2), batches(BF16), wrt=ONLY_UP),
    "an adapter": lambda: in_loop(
        Adapted(BF16), optax.adam(1e-2), batches(BF16), wrt=nnx.LoRAParam
    ),
    "rows that no batch uses": lambda: in_loop(
        OfTokens(BF16), optax.adam(1e-2), tokens(24, most=16)
    ),
    "units that are off": lambda: in_loop(Off(BF16), optax.adam(1e-2), batches(BF16)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_loop_that_loses_little_is_silent(name):
    found, recording, _ = HEALTHY[name]()
    assert of_dtype(found) == []
    if name == "rows that no batch uses":  # what a sample of the values would suggest
        assert recording.passes[-1].figures.parameter("embed/embedding", "stuck") > 0.5


@pytest.mark.parametrize("how", ["a copy in float32", "rounded at random"])
def test_a_step_that_keeps_what_it_rounds_off_is_silent(how):
    """Small updates add up, in a copy or on average."""
    model = Net(BF16)
    tx = optax.adam(3e-4)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(model, nnx.Param))
    held = tx.init(wide)

    def rounded(x, key):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        bits += jax.random.bits(key, x.shape, jnp.uint32) >> 16
        bits &= jnp.uint32(0xFFFF0000)
        return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(BF16)

    @nnx.jit
    def step(model, wide, held, x, key):
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), nnx.grad(squares)(model, x))
        if how == "rounded at random":
            wide = jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(model, nnx.Param))
        updates, held = tx.update(grads, held, wide)
        wide = optax.apply_updates(wide, updates)
        narrow = (
            (lambda x: rounded(x, key)) if how == "rounded at random" else lambda x: x.astype(BF16)
        )
        nnx.update(model, jax.tree.map(narrow, wide))
        return wide, held

    with nni.watch(model, every=1) as recording:
        for i, x in enumerate(batches(BF16)):
            wide, held = step(model, wide, held, x, jax.random.key(i))
    assert of_dtype(nni.diagnose(recording)) == []


@pytest.mark.parametrize("rate", [1e-4, 1e-5])
def test_a_net_that_hardly_moves_in_bfloat16(rate):
    """The case of `shared/cases/05_bf16_update_lost.py`."""
    model = Net(BF16)
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)
    step = nnx.jit(lambda m, o, x: o.update(m, nnx.grad(squares)(m, x)))
    before = np.asarray(model.a.kernel[...], np.float64)
    insp = nni.Inspector(model, batches(BF16, 1)[0], display=False)
    for x in insp.watch(batches(BF16, 40), every=1):
        step(model, optimizer, x)
    with contextlib.closing(insp):
        assert (before == np.asarray(model.a.kernel[...], np.float64)).mean() > 0.8
        assert [f.severity for f in of_dtype(insp.findings)] == ["warning"]


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


def recorded(quant):
    """What a program that reads gets, without a search for the operation of a NaN."""
    insp = nni.Inspector(Quantised(quant), X, display=False)
    with contextlib.closing(insp):
        insp.run(X)
        return insp.recording


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
    has_inf = dtype is jnp.float8_e5m2
    if has_inf:
        assert found[0].evidence["posinf"] == (values == np.inf).sum()
    else:
        assert found[0].evidence["nan"] == np.isnan(values).sum()
    (one,) = nni.diagnose(recorded(Cast(dtype, factor=1e6)))
    gives = "gives Inf" if has_inf else "has no Inf and gives NaN"
    assert f"usually a value that is too large for {dtype.__name__}, which {gives}" in one.advice
    assert "float16" not in one.message


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
