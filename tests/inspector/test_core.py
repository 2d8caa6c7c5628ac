"""The core, which the parts of an inspector share."""

import pathlib
import types

import jax.numpy as jnp
import optax
from flax import nnx
from inside import inside
from models import TwoLayers

import nnx_inspector as nni

ROOM = pathlib.Path(nni.__file__).parent / "inspector"
X = jnp.ones((4, 3))


def test_passes_reach_the_recording_through_one_door(inspect, monkeypatch):
    doors = {"core.py", "watch.py"}  # of an inspector, and of a script
    assert {x.name for x in ROOM.rglob("*.py") if "recording.append(" in x.read_text()} == doors
    insp = inspect(TwoLayers(nnx.Rngs(0)), X)
    assert len(insp.recording) == 1  # it waits for the first pass
    record, through = inside(insp).core.record_pass, []

    def told(step, summaries, **about):
        through.append((step, about["kind"], about["setting"].active))
        record(step, summaries, **about)

    monkeypatch.setattr(inside(insp).core, "record_pass", told)
    insp.run()
    insp.step(lambda model, x: model(x).sum(), X)
    insp.push(nni.capture(insp.model)(X)[1])
    insp.perturb("a", nni.Zero())
    step = nnx.jit(lambda model, x: model(x).sum())
    for x in insp.watch([X, X], every=1):
        step(insp.model, x)
    with insp.watch(every=2):
        step(insp.model, X)
    kinds = [(0, "run", False), (0, "step", False), (1, "push", False), (1, "step", True)]
    assert through[:4] == kinds
    assert [kind for _, kind, _ in through[4:]] == ["watch"] * 3
    assert [(p.step, p.kind, p.perturbed) for p in insp.recording.passes[1:]] == through


class Setting(types.SimpleNamespace):
    def is_equivalent(self, other):
        return self.what == other.what


def test_settings_have_equal_numbers_while_they_are_alike(inspect):
    insp = inspect(TwoLayers(nnx.Rngs(0)), X)
    before = len(insp.recording)
    for what in ("", "a", "a", "b", "", "b", "b"):
        setting = Setting(active=bool(what), what=what)
        inside(insp).core.record_pass(0, {}, kind="run", setting=setting)
    assert [p.setting for p in insp.recording.passes[before:]] == [0, 1, 1, 2, 0, 3, 3]
    assert inside(insp).core.setting_number == 3


def test_whoever_holds_a_handle_or_a_loop_holds_the_inspector():
    model = TwoLayers(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: model(x).sum())(model)
        optimizer.update(model, grads)

    handle = nni.Inspector(model, X, display=False).perturb("a", nni.Zero())
    # what a handle keeps alive while its inspector is gone
    loops = handle._owner.on_change.__self__
    core = loops._core
    loops._rerun.wait_for_first()
    assert len(core.recording) == 1
    handle.enabled = False
    assert len(core.recording) == 2
    for x in nni.Inspector(model, X, display=False).watch([X] * 3, every=1):
        step(model, optimizer, x)
