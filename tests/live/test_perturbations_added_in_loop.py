"""Perturbations added while a watched loop runs: compiled once, in a thread, while the old program
runs on; one layer of a stack; interrupts.
"""

import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import Compilations
from flax import nnx
from inside import inside
from leftovers import nothing_left
from linear_stack import LinearStack
from models import TwoLayers
from training import loss_of

import nnx_inspector as nni

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)
SGD = optax.sgd(0.0)


def make_step():
    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, grads)
        return loss

    return step


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    with nothing_left():
        yield
        for thread in threading.enumerate():
            if thread.name == "nnx_inspector.arming":  # compiles under wrappers of its own
                thread.join(120)
                assert not thread.is_alive()


def test_what_is_added_during_a_loop_is_compiled_beside_it_and_then_acts():
    model = TwoLayers(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, SGD, wrt=nnx.Param)
    insp = nni.Inspector(model, X, display=False)
    step, losses, states = make_step(), [], []
    clean = float(loss_of(model, X))
    shifted = float(nni.perturbed(loss_of)({"a": nni.Shift(2.0)}, model, X))
    handle, compiled = None, Compilations()
    with compiled:
        for i, _ in enumerate(insp.watch(iter(lambda: 0, 1), every=2)):
            losses.append(float(step(model, optimizer, X)))
            if i == 3:
                handle = insp.perturb("a", nni.Shift(2.0))
                compiled.threads.clear()  # a trace checked whether the perturbation fits the site
            if handle is not None:
                states.append(handle.compiling)
                if not handle.compiling:
                    handle.enabled = False
                    handle.perturbation = nni.Shift(5.0)
                    handle.enabled, handle.perturbation = True, nni.Shift(2.0)
            if sum(loss != pytest.approx(clean) for loss in losses) == 4:
                break
    kinds = [loss == pytest.approx(shifted, rel=1e-5) for loss in losses]
    assert kinds == sorted(kinds), "first the old program, then the new one"
    assert kinds.count(False) >= 5
    for loss, new in zip(losses, kinds, strict=True):
        assert loss == pytest.approx(shifted if new else clean, rel=1e-5)
    assert states[-1] is False
    assert "MainThread" not in compiled.threads
    assert "nnx_inspector.arming" in compiled.threads
    insp.close()


def test_a_perturbation_that_was_there_before_the_loop_acts_from_its_first_step():
    model = TwoLayers(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, SGD, wrt=nnx.Param)
    insp = nni.Inspector(model, X, display=False)
    step = make_step()
    for _ in insp.watch([1, 2]):
        step(model, optimizer, X)
    insp.perturb("b", nni.Shift(1.0))
    expected = float(nni.perturbed(loss_of)({"b": nni.Shift(1.0)}, model, X))
    losses = [float(step(model, optimizer, X)) for _ in insp.watch(range(3))]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    insp.close()


def test_a_step_that_cannot_be_compiled_ahead_goes_on():
    """The function fails by then: the loop raises the error in its own thread. The step under way
    ran the old program and reports nothing about the new perturbation.
    """
    model = TwoLayers(nnx.Rngs(0))
    insp = nni.Inspector(model, X, display=False)
    broken, begun, handles = False, threading.Event(), []

    @nnx.jit
    def forward(model, x):
        if broken:
            begun.wait(120)
            raise ZeroDivisionError("mine")
        return model(x)

    def loop():
        nonlocal broken
        for i, _ in enumerate(insp.watch(iter(lambda: 0, 1), every=1)):
            forward(model, X)
            if i == 1:
                broken = True
                handles.append(insp.perturb("a", nni.Shift(2.0)))
            if i == 2:  # with the old program, while the new one is being compiled
                begun.set()
                for thread in threading.enumerate():
                    if thread.name == "nnx_inspector.arming":
                        thread.join(120)

    with pytest.raises(ZeroDivisionError, match="mine"):
        loop()
    assert handles[0].not_acting == ""
    insp.close()


@pytest.mark.parametrize(
    ("reverse", "remat"), [pytest.param(False, False, marks=pytest.mark.long), (True, True)]
)
def test_one_layer_of_a_stack_is_perturbed_in_the_users_own_step(reverse, remat):
    model = LinearStack(nnx.Rngs(0), layers=4, reverse=reverse, remat=remat)
    insp = nni.Inspector(model, X, display=False)
    grad = nnx.jit(nnx.value_and_grad(loss_of))
    for layer in (1, -1):
        handle = insp.perturb(f"layers[{layer}]", nni.Scale(0.5))
        kernel, bias = model.layers.kernel[...], model.layers.bias[...]
        half = lambda v: v.at[layer].multiply(0.5)  # noqa: B023, E731 - used in this turn only
        by_hand = LinearStack(nnx.Rngs(0), layers=4, reverse=reverse)
        by_hand.layers.kernel[...], by_hand.layers.bias[...] = half(kernel), half(bias)
        expected = float(loss_of(by_hand, X))
        for _ in insp.watch(range(2), every=1):
            loss, grads = grad(model, X)
            np.testing.assert_allclose(loss, expected, rtol=1e-5)
        _, grads_by_hand = grad(by_hand, X)
        np.testing.assert_allclose(
            grads["layers"]["kernel"][...],
            half(grads_by_hand["layers"]["kernel"][...]),
            rtol=1e-4,
            atol=1e-6,
        )
        handle.remove()
    insp.close()


def test_an_interrupt_while_a_summary_is_received_reaches_the_loop(monkeypatch):
    """It is raised by the step whose summary it is, or at its end, and no hook remains."""
    model = TwoLayers(nnx.Rngs(0))
    insp = nni.Inspector(model, X, display=False)
    forward, done = nnx.jit(lambda m, x: m(x)), []
    plain = np.asarray(forward(model, X))

    def interrupted(*_):
        raise KeyboardInterrupt

    def loop():
        for i in insp.watch(range(5), every=1):
            if i == 2:
                monkeypatch.setattr(inside(insp).session.inbox, "receive", interrupted)
            np.testing.assert_allclose(forward(model, X), plain, rtol=1e-6)
            done.append(i)

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert done in ([0, 1], [0, 1, 2])
    assert not inside(insp).core.looping
    insp.close()


def test_closing_while_something_is_compiled_is_quiet():
    model = TwoLayers(nnx.Rngs(0))
    insp = nni.Inspector(model, X, display=False)
    forward = nnx.jit(lambda m, x: m(x))
    for i, _ in enumerate(insp.watch(range(4), every=1)):
        forward(model, X)
        if i == 2:
            insp.perturb("a", nni.Noise(0.1))
    insp.close()


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("mode", ["batches", "ticks", "region"])
def test_what_does_not_fit_a_smaller_batch_changes_nothing_there_and_is_told(mode, every):
    model = TwoLayers(nnx.Rngs(0))
    insp = nni.Inspector(model, X, display=False)
    offset = jnp.arange(5.0)[:, None]
    handle = insp.perturb("a", nni.Shift(offset))
    call, batches = nnx.jit(lambda model, x: model(x)), [X, X, X, X[:2]]

    def loop():
        if mode == "batches":
            return [call(model, x) for x in insp.watch(batches, every=every)]
        found = []
        with insp.watch(every=every):
            for x in batches:
                if mode == "ticks":
                    insp.tick()
                found.append(call(model, x))
        return found

    with pytest.warns(nni.InspectorWarning, match=r"Shift at 'a', float32\[2,4\].*changes nothing"):
        found = loop()
    shifted = nni.perturbed(model)({"a": nni.Shift(offset)}, X)
    for y in found[:3]:
        np.testing.assert_allclose(y, shifted, rtol=1e-5)
    np.testing.assert_array_equal(found[3], call(model, X[:2]))
    if mode != "region":  # there the report covers several passes, and it acts in some
        assert "does not broadcast" in handle.not_acting
    insp.close()


def test_what_does_not_fit_a_parameter_of_a_replaced_layer_leaves_it_alone():
    model = TwoLayers(nnx.Rngs(0))
    insp = nni.Inspector(model, X, display=False)
    insp.perturb("a/kernel", nni.PruneMask(jnp.zeros(model.a.kernel.shape)))
    found = []

    def loop():
        for step in insp.watch(range(4), every=1):
            if step == 2:
                model.a = nnx.Linear(3, 6, rngs=nnx.Rngs(1))
                model.b = nnx.Linear(6, 2, rngs=nnx.Rngs(2))
            found.append(model(X))

    with pytest.warns(nni.InspectorWarning, match=r"PruneMask at 'a/kernel', float32\[3,6\]"):
        loop()
    assert not np.any(found[0] - found[0][:1]), "without its kernel, it ignores its input"
    np.testing.assert_array_equal(found[3], model(X))
    insp.close()
