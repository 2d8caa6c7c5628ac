"""The pass that an inspector makes for the screen, and the effect that is shown later."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from inside import inside
from models import TwoLayers
from reused_model import ReusedModel

import nnx_inspector as nni


@pytest.fixture(scope="module")
def reused():
    one = ReusedModel(TwoLayers(nnx.Rngs(0)), jnp.ones((4, 3)))
    yield one
    one.close()


@pytest.fixture
def insp(inspect, reused):
    return inspect(reused.reset(), jnp.ones((4, 3)))


def loss_fn(model, x):
    return -jax.nn.log_softmax(model(x))[:, 0].mean()


def batch():
    return jax.random.normal(jax.random.key(1), (4, 3))


def by_itself(site, kind):
    """The effect in another inspector in which nothing else is perturbed."""
    one = nni.Inspector(TwoLayers(nnx.Rngs(0)), batch(), display=False)
    one.step(loss_fn, batch())
    one.perturb(site, kind)
    effect = one.effect
    one.close()
    return effect


KINDS = [
    ("a", nni.Scale(0.5)),
    ("b", nni.Scale(1.25)),
]


def test_each_of_several_is_measured_alone(insp):
    insp.step(loss_fn, batch())
    handles = [insp.perturb(*kind) for kind in KINDS]
    off = insp.perturb("b", nni.Zero())
    off.enabled = False
    found = {one.perturbation: one for one in insp.effect.alone}
    assert list(found) == [h.id for h in handles]
    for handle, kind in zip(handles, KINDS, strict=True):
        wanted, one = by_itself(*kind), found[handle.id]
        change = wanted.perturbed["loss"] - wanted.clean["loss"]
        assert one.loss_change == pytest.approx(change, abs=1e-6)
        assert one.output_change == pytest.approx(wanted.output_change, rel=1e-5)
        assert one.kl == pytest.approx(wanted.kl, rel=1e-3, abs=1e-7)
        assert one.top1_changed == wanted.top1_changed
    together = insp.effect.perturbed["loss"] - insp.effect.clean["loss"]
    assert abs(together - sum(one.loss_change for one in found.values())) > 1e-4


def test_without_a_loss_there_is_no_change_of_it(insp):
    insp.perturb("a", nni.Zero())
    insp.perturb("b", nni.Scale(2.0))
    first, second = insp.effect.alone
    assert (first.loss_change, second.loss_change) == (None, None)
    assert second.output_change == pytest.approx(1.0)


def test_what_is_told_of_each_is_never_of_another_moment(insp):
    insp.step(loss_fn, batch())
    first = insp.perturb("a", nni.Scale(0.5))
    second = insp.perturb("b", nni.Scale(0.5))
    before = {one.perturbation: one.loss_change for one in insp.effect.alone}
    assert set(before) == {first.id, second.id}
    second.strength = 0.9
    after = {one.perturbation: one.loss_change for one in insp.effect.alone}
    assert after[first.id] == pytest.approx(before[first.id])
    assert abs(after[second.id]) < abs(before[second.id])
    second.enabled = False
    assert insp.effect.alone == ()  # with one perturbation, the effect is its own
    first.remove()
    assert insp.effect.clean == insp.effect.perturbed


def test_measuring_each_alone_compiles_nothing_more(insp):
    insp.step(loss_fn, batch())
    first = insp.perturb("a", nni.Scale(0.5))
    insp.perturb("b", nni.Shift(0.5))
    assert len(insp.effect.alone) == 2
    before = inside(insp).core.meter.compilations.count
    first.strength = 0.25
    assert len(insp.effect.alone) == 2
    assert inside(insp).core.meter.compilations.count == before


def with_two_on(insp):
    """The screen after a step with two perturbations, including their single effects."""
    insp.step(loss_fn, batch())
    insp.perturb("a", nni.Scale(0.5))
    insp.perturb("b", nni.Scale(0.5))
    assert len(insp.effect.alone) == 2
    return inside(insp).core.shown


def test_of_another_state_of_the_model_nothing_is_told_beside_the_effect(insp):
    shown = with_two_on(insp)
    without = dataclasses.replace(shown, outcome=dataclasses.replace(shown.outcome, alone=()))
    inside(insp).core.shown = without
    insp.model.b.kernel[...] *= 2.0  # another thread trains it meanwhile
    # what the thread does next, while the test holds it up
    inside(insp).rerun._measure_effects_alone(without)
    assert inside(insp).core.shown.outcome.alone == ()
    insp.model.b.kernel[...] *= 0.5
    # what the thread does next, while the test holds it up
    inside(insp).rerun._measure_effects_alone(without)
    assert len(inside(insp).core.shown.outcome.alone) == 2


def test_a_model_whose_arrays_are_gone_is_no_fault_of_the_screen(insp):
    shown = with_two_on(insp)
    for leaf in jax.tree.leaves(nnx.state(insp.model)):
        leaf.delete()
    inside(insp).rerun._queue_effects_alone(shown)  # as a late click asks for it
    inside(insp).rerun.wait()
    assert "could not be measured" not in " ".join(n for n in inside(insp).notices)


def test_a_step_that_holds_the_arrays_leaves_the_effect_for_a_later_pass(inspect):
    # no other test has compiled what measures the effect
    insp = inspect(TwoLayers(nnx.Rngs(0)), jnp.ones((4, 3)))
    graphdef, state = nnx.split(insp.model)

    def forward(state, x):
        loss = loss_fn(nnx.merge(graphdef, state), x)
        return state, loss

    step = jax.jit(forward, donate_argnums=0)
    insp.perturb("a", nni.Scale(0.5))
    with insp.watch(every=1, gradients=False):
        for _ in range(3):
            state, _ = step(state, batch())
    inside(insp).core.recorder.wait()
    assert [one.perturbed for one in insp.recording.passes if one.kind == "watch"] == [True] * 3
    assert "could not be run" not in " ".join(n for n in inside(insp).notices)
    effect, why = inside(insp).core.effect()
    assert effect is None
    assert "a training step has taken the model's arrays" in why
    nnx.update(insp.model, state)
    insp.run(batch())
    assert insp.effect is not None


def test_a_loop_that_takes_the_arrays_when_it_begins_is_no_failure(insp, monkeypatch):
    from nnx_inspector.inspector.passes import rerun

    run_pass, region, refresh = rerun.run_pass, insp.watch(every=2), inside(insp).rerun.refresh

    def taken(*of):
        monkeypatch.setattr(rerun, "run_pass", run_pass)
        region.__enter__()
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        return run_pass(*of)

    state = nnx.state(insp.model)
    kept = jax.tree.map(jnp.copy, state)
    insp.run(batch())
    monkeypatch.setattr(rerun, "run_pass", taken)
    refresh()
    nnx.update(insp.model, kept)
    insp.model(batch())
    region.__exit__(None, None, None)
    assert [n for n in inside(insp).notices if "could not be run" in n] == []
