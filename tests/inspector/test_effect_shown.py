"""The effect on screen is that of the current perturbations, or empty with the reason."""

import gc

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_browser import FakeBrowser
from flax import nnx
from inside import inside
from reused_model import ReusedModel

import nnx_inspector as nni
from nnx_inspector.inspector.passes.rerun import (
    EFFECT_FAILED,
    MEASURE_AGAIN,
    NEW_PROGRAM,
    NEXT_STEP,
    NOT_PERTURBED,
)
from nnx_inspector.screen import protocol
from nnx_inspector.screen.presenter import NOT_MEASURED

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(3, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs, deterministic=True)
        self.b = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.b(self.drop(nnx.tanh(self.a(x))))


def loss_fn(model, x):
    return (model(x) ** 2).mean()


@nnx.jit
def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return loss


@pytest.fixture(scope="module")
def reused():
    one = ReusedModel(Net(nnx.Rngs(0)), X)
    yield one
    one.close()


@pytest.fixture
def model(reused):
    return reused.reset()


@pytest.fixture
def insp(inspect, model):
    inspector = inspect(model, X)
    inside(inspector).rerun.wait_for_first()
    yield inspector
    inside(inspector).arming.join()


@pytest.fixture
def train(model):
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return lambda: train_step(model, optimizer, X)


def said(insp):
    """The effect on the page and in Python, and the text in its place."""
    state = inside(insp).state
    assert state.effect == inside(insp).rerun.effect()[0]
    assert (state.effect is None) == (state.no_effect != "")
    return state.effect, state.no_effect


def losses(model, scale):
    """The loss with `a` multiplied by a number, in NumPy."""
    kernel = [np.asarray(getattr(model, name).kernel[...], np.float64) for name in "ab"]
    bias = [np.asarray(getattr(model, name).bias[...], np.float64) for name in "ab"]
    hidden = np.tanh(scale * (np.asarray(X, np.float64) @ kernel[0] + bias[0]))
    return float(((hidden @ kernel[1] + bias[1]) ** 2).mean())


def test_what_is_switched_off_in_a_loop_has_no_effect_any_more(insp, model, train):
    insp.step(loss_fn, X)
    handle, seen = None, []
    for i in insp.watch(range(9), every=2):
        seen.append(said(insp))
        if i == 1:
            handle = insp.perturb("a", nni.Zero())
            assert said(insp) == (None, NEXT_STEP)
        if i == 5:
            handle.enabled = False
            assert said(insp) == (None, NOT_PERTURBED)
        train()
    assert [effect is not None for effect, _ in seen] == [False] * 3 + [True] * 3 + [False] * 3
    assert {why for _, why in seen[:2] + seen[6:]} == {NOT_PERTURBED}
    assert insp.effect is None


def test_in_a_loop_the_figures_are_of_what_is_named(insp, model, train):
    """Zero, then Scale in its place: Zero's figures are never shown as Scale's."""
    insp.step(loss_fn, X)
    zero = insp.perturb("a", nni.Zero())
    for i in insp.watch(range(5), every=2):
        if i == 1:
            assert said(insp)[0].perturbed["loss"] == pytest.approx(losses(model, 0), rel=1e-5)
            zero.remove()
            assert said(insp) == (None, NOT_PERTURBED)
            scale = insp.perturb("a", nni.Scale(2.0))
            assert said(insp) == (None, NEXT_STEP)
        if i == 3:
            effect = said(insp)[0]
            assert effect.perturbed["loss"] == pytest.approx(losses(model, 2), rel=1e-5)
            assert effect.clean["loss"] == pytest.approx(losses(model, 1), rel=1e-5)
            assert effect.source == "the batch of the last insp.step, at step 2"
            scale.strength = 3.0
            assert said(insp) == (None, NEXT_STEP)
            scale.strength = 2.0
            assert said(insp)[0] == effect  # the effect is that one's again
            second = insp.perturb("b", nni.Zero())
            assert said(insp) == (None, NEXT_STEP)
            second.remove()
            assert said(insp)[0] == effect
            insp.modes.eval()
            assert said(insp) == (None, NEXT_STEP)
        if i != 3:
            train()  # the figures are of the model after the measured step
    assert insp.effect.perturbed["loss"] == pytest.approx(losses(model, 2), rel=1e-5)


def test_after_a_loop_it_says_at_which_step_it_was_measured(insp, train):
    insp.step(loss_fn, X)
    handle = insp.perturb("a", nni.Zero())
    assert insp.effect.source == "the last step"
    for _ in insp.watch(range(4), every=2):
        train()
    assert insp.effect.source == "the batch of the last insp.step, at step 2"
    for i in insp.watch(range(3), every=4):  # 4, 5, 6
        if i == 2:
            handle.enabled = False
            handle.enabled = True
            effect = insp.effect
            assert effect.source == "the batch of the last insp.step, at step 4"
        train()
    handle.remove()
    insp.run()
    assert insp.effect is None


def test_what_was_changed_at_the_end_of_a_loop_waits_to_be_measured(insp, train):
    insp.step(loss_fn, X)
    for i in insp.watch(range(3), every=4):
        if i == 2:
            insp.perturb("a", nni.Zero())
        train()
    assert said(insp) == (None, MEASURE_AGAIN)
    assert inside(insp).view.state_at_rest().no_effect == NOT_MEASURED
    assert insp.effect.source == "the last step"  # measured for whoever reads it
    insp.run()
    assert insp.effect.source == "the example"


def test_while_a_program_is_compiled_there_are_no_figures_of_the_old_one(insp, monkeypatch):
    insp.perturb("a", nni.Zero())
    assert insp.effect is not None
    wanted = []
    monkeypatch.setattr(inside(insp).arming, "submit_instead", wanted.append)
    second = insp.perturb("b", nni.Shift(1.0))
    assert second.compiling
    assert said(insp) == (None, NEW_PROGRAM)
    second.remove()
    assert said(insp)[0].output_change > 0
    assert inside(insp).view.state_at_rest().no_effect == ""


def test_a_pass_that_cannot_be_made_leaves_no_figures(insp, monkeypatch):
    insp.step(loss_fn, X)
    handle = insp.perturb("a", nni.Scale(2.0))
    assert insp.effect is not None

    def fails(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(inside(insp).core.programs, "run", fails)
        handle.strength = 3.0
    assert said(insp) == (None, EFFECT_FAILED)
    handle.strength = 4.0
    assert insp.effect is not None


def test_in_modes_in_which_the_example_cannot_run_there_are_no_figures(inspect, model):
    def call(self, x):
        assert self.drop.deterministic, "not in these modes"
        return self.b(self.a(x))

    cls = type("Choosy", (Net,), {"__call__": call})
    insp = inspect(cls(nnx.Rngs(0)), X)
    insp.perturb("a", nni.Zero())
    assert insp.effect is not None
    insp.modes.set(deterministic=False)
    assert said(insp) == (None, MEASURE_AGAIN)


def test_it_tells_that_the_model_was_updated_since(insp, train):
    insp.step(loss_fn, X)
    insp.perturb("a", nni.Zero())
    assert insp.effect.source == "the last step"
    train()
    gc.collect()
    assert insp.effect.source == "the last step, before the model was updated"
    insp.push(nni.capture(insp.model)(X)[1], step=7)
    assert insp.effect.source == "the last step, at step 0"
    insp.step(loss_fn, X)
    assert insp.effect.source == "the last step"


def test_what_is_compiled_late_is_not_of_another_state_of_the_model(inspect, monkeypatch):
    """The change of the output is measured when its program is compiled; the model may have changed
    by then.
    """
    model = Net(nnx.Rngs(0))  # no other test has compiled it
    insp = inspect(model, X)
    inside(insp).rerun.wait_for_first()
    arming, jobs = inside(insp).arming, []
    monkeypatch.setattr(arming, "submit_instead", jobs.append)
    insp.perturb("a", nni.Scale(2.0))
    before = insp.effect.output_change
    model.b.bias[...] += 100.0
    for job in jobs:
        job()
    inside(insp).rerun._compilation_ended()  # as its thread says when it is done
    assert not insp.effect.sites
    assert insp.effect.output_change == before


def test_the_browser_never_gets_an_effect_of_something_else(insp, train, monkeypatch):
    browser = FakeBrowser(monkeypatch)
    monkeypatch.setattr("nnx_inspector.screen.presenter.STATE_INTERVAL", 0.0)
    monkeypatch.setattr(inside(insp).view.screen, "ready_for_frame", lambda: True)
    insp.step(loss_fn, X)
    handle = insp.perturb("a", nni.Scale(2.0))
    for i in insp.watch(range(6), every=2):
        inside(insp).core.recorder.wait()  # a step is shown while the loop goes on
        if i in (1, 3):
            handle.strength = 2.0 + i
        if i == 5:
            handle.enabled = False
        train()
    insp.run()
    of = {}
    for header, _ in browser.messages("state"):
        state = protocol.from_header(header)
        on = tuple(p.strength for p in state.perturbations if p.enabled)
        if state.effect is not None and state.effect.perturbed:
            of.setdefault(state.effect.perturbed["loss"], set()).add(on)
    assert all(len(named) == 1 for named in of.values())
    assert {strength for named in of.values() for strength in named} == {
        (), (2.0,), (3.0,), (5.0,)
    }  # fmt: skip


def relative(new, old):
    return float(np.linalg.norm(new - old) / np.linalg.norm(old))


def test_how_far_each_site_moved_is_known_of_all_sites(insp, model):
    """By NumPy; the perturbed site too, and 0 of a site before it."""
    insp.step(loss_fn, X)
    insp.perturb("drop", nni.Scale(0.5))
    kernel = [np.asarray(getattr(model, name).kernel[...], np.float64) for name in "ab"]
    hidden = np.tanh(np.asarray(X, np.float64) @ kernel[0])  # the biases are 0
    moved = insp.effect.moved
    assert moved["a"] == 0
    assert moved["drop"] == pytest.approx(0.5, rel=1e-5)
    out = relative(0.5 * hidden @ kernel[1], hidden @ kernel[1])
    assert moved["b"] == pytest.approx(out, rel=1e-5)
    insp.perturb("b", nni.Shift(float("inf")))
    assert insp.effect.moved["b"] is None


def test_behind_a_perturbed_pass_comes_the_same_without_it(insp, train, monkeypatch):
    def frames():
        return [header for header, _ in browser.messages("frame")]

    browser = FakeBrowser(monkeypatch)
    insp.step(loss_fn, X)
    clean = browser.messages("frame")[-1][1]
    assert [header["held"] for header in frames()] == [False]
    browser.sent.clear()
    handle = insp.perturb("a", nni.Zero())
    (behind, buffer), (shown, perturbed) = browser.messages("frame")[:2]
    assert behind["number"] == protocol.CLEAN - shown["number"]
    assert (behind["held"], behind["perturbed"], shown["perturbed"]) == (True, False, True)
    assert behind["step"] == shown["step"]
    assert buffer == clean != perturbed
    browser.sent.clear()
    insp.selected = "b"  # the histograms of another site, of both
    assert {header["number"] for header in frames()} == {behind["number"], shown["number"]}
    browser.sent.clear()
    handle.enabled = False
    assert {header["held"] for header in frames()} == {False}
    handle.enabled = True
    for _ in insp.watch(range(2), every=1):
        browser.sent.clear()
        train()
    assert {header["held"] for header in frames()} == {False}  # a loop makes no such pass
