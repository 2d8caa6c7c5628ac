"""Arming in the background: the old program goes on, and toggling never compiles."""

import gc
import subprocess
import sys
import threading
import weakref
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from inside import inside
from leftovers import nothing_left
from models import TwoLayers

import nnx_inspector as nni
from nnx_inspector._compat import jit
from nnx_inspector.background import STILL_BUSY
from nnx_inspector.screen.comm import InspectorWidget

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
UNITS = np.array([1.0, 0.0, 0.5, 1.0], np.float32)
IN_TIME = 120.0


@pytest.fixture(autouse=True)
def no_browser(monkeypatch):
    monkeypatch.setattr(InspectorWidget, "send", lambda *_, **__: None)


def loss_fn(model, x):
    return (model(x) ** 2).mean()


@pytest.fixture
def counted():
    """Counts traces and compilations."""
    events: Counter[str] = Counter()
    undo = jit.compilation_events(lambda kind, *_: events.update([kind]))
    yield events
    undo()


@pytest.fixture
def let_go(monkeypatch):
    """The event that releases compilations in the background."""
    released, compile_now = threading.Event(), jax.stages.Lowered.compile

    def compile_later(self, *args, **kwargs):
        if threading.current_thread().name == "nnx_inspector.arming":
            assert released.wait(IN_TIME)
        return compile_now(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_later)
    yield released
    released.set()


@pytest.fixture
def held(let_go):
    """A model, its inspector, and the event that releases its background thread."""
    model = TwoLayers(nnx.Rngs(0))
    insp = nni.Inspector(model, X, display=False)
    let_go.set()
    inside(insp).rerun.wait_for_first()
    let_go.clear()
    yield model, insp, let_go
    let_go.set()
    insp.close()
    inside(insp).arming.join()


@pytest.fixture
def insp(inspect):
    inspector = inspect(TwoLayers(nnx.Rngs(0)), X)
    yield inspector
    inspector.close()
    inside(inspector).arming.join()


# ---------------------------------------------------------------- an inspector


def test_the_old_program_goes_on_until_the_new_one_is_there(held):
    model, insp, let_go = held
    row = insp.perturb("b", nni.Scale(2.0))
    passes = len(insp.recording)
    handle = insp.perturb("a", nni.Mask(UNITS))
    assert handle.compiling
    assert not row.compiling
    assert len(insp.recording) == passes, "nothing that the old program can do has changed"
    row.perturbation = nni.Scale(3.0)
    np.testing.assert_allclose(
        insp.recording.summary("b").mean, 3 * np.mean(model(X)), rtol=1e-4, atol=1e-6
    )
    assert handle.compiling
    let_go.set()
    inside(insp).arming.wait()
    assert not handle.compiling
    y = np.asarray(model.b(jnp.tanh(model.a(X) * UNITS)))
    np.testing.assert_allclose(insp.recording.summary("b").mean, 3 * y.mean(), rtol=1e-4, atol=1e-6)
    assert insp.effect.output_change > 0
    handle.enabled = False
    np.testing.assert_allclose(
        insp.recording.summary("b").mean, 3 * np.mean(model(X)), rtol=1e-4, atol=1e-6
    )


def test_a_pass_that_is_asked_for_waits_for_its_program(held):
    model, insp, let_go = held
    handle = insp.perturb("a", nni.Mask(UNITS))
    threading.Thread(target=let_go.set).start()
    wanted = model.b(jnp.tanh(model.a(X) * UNITS))
    np.testing.assert_allclose(insp.run(X), wanted, rtol=1e-5)
    assert not handle.compiling
    np.testing.assert_allclose(insp.step(loss_fn, X), np.mean(wanted**2), rtol=1e-5)


def test_adding_again_and_tuning_uses_the_place_there_is(insp, counted):
    handle = insp.perturb("a", nni.Noise(0.1))
    assert insp.effect.output_change > 0
    handle.remove()
    assert insp.effect is None
    counted.clear()
    handle = insp.perturb("a", nni.Noise(0.5, seed=3))
    assert not handle.compiling
    assert insp.effect.sites
    handle.perturbation = nni.Noise(0.2)
    insp.run(X)
    assert not counted


def test_another_shape_or_kind_of_number_arms_again(insp):
    handle = insp.perturb("a", nni.Shift(1.0))
    insp.run(X)
    handle.perturbation = nni.Shift(UNITS)
    inside(insp).arming.wait()
    assert not handle.compiling
    np.testing.assert_allclose(
        insp.recording.summary("a").mean, (insp.model.a(X) + UNITS).mean(), rtol=1e-4, atol=1e-6
    )
    with pytest.raises(ValueError, match="'a'"):
        handle.perturbation = nni.Shift(np.ones(7))
    np.testing.assert_array_equal(handle.perturbation.offset, UNITS)


def test_what_cannot_be_compiled_is_shown_and_the_old_program_stays(insp):
    def fails_when_run(x):
        if threading.current_thread().name == "nnx_inspector.arming":
            raise ZeroDivisionError("mine")
        return x

    handle = insp.perturb("a", nni.Apply(fails_when_run))
    inside(insp).arming.wait()
    assert any("ZeroDivisionError: mine" in n for n in inside(insp).notices)
    assert not handle.compiling
    handle.remove()
    np.testing.assert_allclose(insp.run(X), insp.model(X), rtol=1e-6)


@pytest.mark.long
def test_no_pass_changes_the_model(inspect):
    class Full(nnx.Module):
        def __init__(self, rngs):
            self.a, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.norm(self.a(x)))

    def contents(model):
        return [
            np.asarray(
                jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            )
            for x in jax.tree.leaves(nnx.state(model))
        ]

    model = Full(nnx.Rngs(0))
    before, graphdef = contents(model), nnx.graphdef(model)
    insp = inspect(model, X)
    for one in (nni.Mask(UNITS), nni.Shift(1.0, at="input"), nni.ParameterNoise(0.1)):
        insp.perturb("a", one)
    insp.run(X)
    insp.step(loss_fn, X)
    assert insp.effect.perturbed["loss"] != insp.effect.clean["loss"]
    assert all(np.array_equal(a, b) for a, b in zip(before, contents(model), strict=True))
    assert nnx.graphdef(model) == graphdef


def test_errors_name_what_is_there(insp):
    with pytest.raises(ValueError, match="'a' is not a stacked module"):
        insp.perturb("a[1]", nni.Zero())
    with pytest.raises(TypeError, match=r"Pass an instance: nni.Mask"):
        insp.perturb("a", nni.Mask)
    with pytest.raises(ValueError, match="Mask at 'b'"):
        insp.perturb("b", nni.Mask(UNITS))
    with pytest.raises(ValueError, match="matches no site"):
        insp.perturb("c", nni.PruneMask(UNITS))
    assert insp.perturbations == []


# ------------------------------------------------------------------ its effect


def test_the_effect_of_logits_and_of_the_sites_downstream(insp):
    def cross_entropy(model, x):
        return -jax.nn.log_softmax(model(x))[:, 1].mean()

    model = insp.model
    insp.perturb("a", nni.Mask(UNITS))
    clean = np.asarray(model(X), np.float64)
    moved = np.asarray(model.b(jnp.tanh(model.a(X) * UNITS)), np.float64)
    change = np.linalg.norm(moved - clean) / np.linalg.norm(clean)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (clean, moved))

    def downstream(effect):
        assert effect.output_change == pytest.approx(change, rel=1e-4)
        (b,) = effect.sites
        assert b.site == "b", "'a' is what is perturbed, the whole is the output"
        np.testing.assert_allclose(b.change, change, rtol=1e-4)
        return effect.kl, effect.top1_changed

    assert downstream(insp.effect) == (None, None)  # nothing tells that the output is logits
    insp.step(loss_fn, X)
    assert insp.effect.clean == pytest.approx({"loss": np.mean(clean**2)}, rel=1e-4)
    assert insp.effect.perturbed == pytest.approx({"loss": np.mean(moved**2)}, rel=1e-4)
    assert downstream(insp.effect) == (None, None)
    insp.step(cross_entropy, X)
    kl, top1 = downstream(insp.effect)
    np.testing.assert_allclose(kl, (p * np.log(p / q)).sum(-1).mean(), rtol=1e-3)
    assert top1 == pytest.approx(np.mean(clean.argmax(-1) != moved.argmax(-1)))
    assert insp.effect.perturbed == pytest.approx({"loss": -np.log(q[:, 1]).mean()}, rel=1e-4)


# --------------------------------------------------------------- no retracing


class Convolutional(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attn = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(x)
        return x + nnx.relu(self.mlp(x))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs), Block(rngs)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Stack(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return nnx.Linear(4, 4, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return jnp.tanh(layer(x))

        return run(self.layers, x)


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


MODELS = {
    "mlp": (TwoLayers, X, "a", "b"),
    "convolutional": (Convolutional, numbers(2, 5, 5, 1), "norm", "head"),
    "transformer": (Transformer, numbers(2, 3, 4), "blocks/0/mlp", "blocks/*"),
    "stack": (Stack, numbers(2, 4), "layers[1]", "layers"),
}


TOGGLES = [("mlp", 100), *((n, 100) for n in MODELS if n != "mlp"), *((n, 1000) for n in MODELS)]


@pytest.mark.parametrize(
    ("name", "toggles"),
    [pytest.param(*one, marks=[pytest.mark.long] * (i > 0)) for i, one in enumerate(TOGGLES)],
)
def test_toggles_strengths_and_masks_trace_and_compile_nothing(inspect, name, toggles, counted):
    cls, x, here, there = MODELS[name]
    model = cls(nnx.Rngs(0))
    insp = inspect(model, x)
    insp.step(loss_fn, x)
    handles = [
        insp.perturb(there, nni.Scale(0.5)),
        insp.perturb(here, nni.Mask(UNITS)),
        insp.perturb(here, nni.Noise(0.1)),
        insp.perturb(there, nni.Shift(0.1, at="input")),
        insp.perturb(there, nni.ScaleGradient(0.5)),
        insp.perturb(there.replace("*", "1"), nni.ParameterNoise(0.1)),
    ]
    insp.step(loss_fn, x)
    assert insp.effect.sites is not None
    rng = np.random.default_rng(0)

    def others():
        return [
            nni.Scale(float(rng.normal())),
            nni.Mask(rng.integers(0, 2, 4).astype(np.float32)),
            nni.Noise(float(rng.uniform()), seed=int(rng.integers(9))),
            nni.Shift(float(rng.normal()), at="input"),
            nni.ScaleGradient(float(rng.normal())),
            nni.ParameterNoise(float(rng.uniform())),
        ]

    counted.clear()
    shown = []
    for _ in range(toggles):
        which = int(rng.integers(len(handles)))
        if rng.integers(2):
            handles[which].enabled = not handles[which].enabled
        else:
            handles[which].perturbation = others()[which]
        shown.append(inside(insp).core.shown)
    assert len(set(map(id, shown))) == toggles, "each is a pass of its own"
    assert not counted, "0 retraces, 0 compilations"


# ---------------------------------------------------------------- its end


def test_an_interrupted_step_leaves_nothing(insp):
    model = insp.model
    methods, graphdef = dict(vars(nnx.Linear)), nnx.graphdef(model)

    def interrupted(model, x):
        model(x)
        raise KeyboardInterrupt

    insp.perturb("a", nni.Mask(UNITS))
    insp.run(X)
    inside(insp).arming.wait()  # the hooks are on the classes while a thread traces
    with nothing_left(), pytest.raises(KeyboardInterrupt):
        insp.step(interrupted, X)
    assert dict(vars(nnx.Linear)) == methods
    assert nnx.graphdef(model) == graphdef
    wanted = model.b(jnp.tanh(model.a(X) * UNITS))
    np.testing.assert_allclose(insp.run(X), wanted, rtol=1e-5)


def test_closing_while_something_is_compiled_is_clean(held):
    _, insp, let_go = held
    with nothing_left():
        insp.perturb("a", nni.Mask(UNITS))
        assert inside(insp).arming.busy
        recorded = len(insp.recording)
        insp.close()
        let_go.set()
        inside(insp).arming.join()
        assert len(insp.recording) == recorded
    assert inside(insp).notices == []


def test_a_dropped_inspector_is_freed_while_something_is_compiled(let_go):
    insp = nni.Inspector(TwoLayers(nnx.Rngs(0)), X, display=False)
    insp.perturb("a", nni.Mask(UNITS))
    arming, alive = inside(insp).arming, weakref.ref(inside(insp).core)
    inside(insp).diagnosis.wait()  # a thread that reads it keeps it alive meanwhile
    del insp
    gc.collect()
    assert alive() is None
    let_go.set()
    arming.join()


def test_leaving_the_interpreter_while_something_is_compiled_is_clean():
    code = """
import jax.numpy as jnp
from flax import nnx
import nnx_inspector as nni
insp = nni.Inspector(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3)), display=False)
insp.perturb("", nni.Noise(0.1))
assert insp._rerun._compiler.busy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stderr.strip() in ("", STILL_BUSY)  # on a slow machine it says what it waits for


def test_a_model_is_traced_in_the_background_while_its_own_loop_runs(inspect):
    model = TwoLayers(nnx.Rngs(0))
    twin = nnx.clone(model)
    insp = inspect(model, X)

    def trained(model, during):
        optimizer, losses = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), []
        for i in range(12):
            during(i)
            loss, grads = nnx.value_and_grad(loss_fn)(model, X)  # eager: traces in this thread
            optimizer.update(model, grads)
            losses.append(float(loss))
        return losses

    def perturbs(i):
        if i % 3 == 0:
            insp.perturb("a", nni.Shift(0.1, at="input"))

    found = trained(model, perturbs)
    np.testing.assert_allclose(found, trained(twin, lambda i: None), rtol=1e-5)
    inside(insp).arming.wait()
    assert not any(h.compiling for h in insp.perturbations)
