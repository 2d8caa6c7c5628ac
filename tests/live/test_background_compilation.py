"""The first measured step: its program compiles in a thread while the loop goes on with the bare
one, if the loop is on screen and long enough.

A job that waits for an event holds the thread, so that each test decides how long it compiles.
"""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import Compilations
from flax import nnx
from inside import inside
from models import TwoLayers
from training import loss_of

import nnx_inspector as nni

pytestmark = pytest.mark.usefixtures("leaves_nothing")
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


def of_nnx(model, optimizer):
    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, grads)
        return loss

    return lambda: step(model, optimizer, X)


def of_jax(model, optimizer):
    """Split and merged by hand in each step."""

    @functools.partial(jax.jit, static_argnums=0)
    def step(graphdef, state, x):
        model = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(loss_of)(model, x)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, nnx.state(grads))
        return new, loss

    def run():
        graphdef, state = nnx.split(model)
        state, loss = step(graphdef, state, X)
        nnx.update(model, state)
        return loss

    return run


def unjitted(model, optimizer):
    return lambda: loss_of(model, X)


class Loop:
    """An inspector on screen, with a step."""

    def __init__(self, make=of_nnx):
        self.model = TwoLayers(nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)
        self.insp = nni.Inspector(self.model, X, display=False)
        inside(self.insp).view._displayed_in = 1  # as a cell of a notebook that displayed it
        self.step = make(self.model, self.optimizer)
        self.gate, self.texts, self.compiled = threading.Event(), [], []

    def run(self, batches=range(40), *, every=2, until=None):
        """Watch a loop; the thread compiles from step `until` on, or when the loop waits for it."""
        losses = []
        for i, _ in enumerate(self.insp.watch(batches, every=every)):
            session = inside(self.insp).session
            if i == 0 and session.runs_bare:
                session._arming.submit(self.gate.wait)  # keeps the compiling thread busy
                session.wait = functools.partial(self._let_go, session.wait)
            if i == until:
                session.wait()
            self.texts.append(self.waiting)
            with Compilations() as compiled:
                losses.append(float(self.step()))
            self.compiled.append([t for t in compiled.threads if t == "MainThread"])
        return losses

    def _let_go(self, wait):
        self.gate.set()
        wait()

    @property
    def steps(self):
        inside(self.insp).core.recorder.wait()
        return [one.step for one in inside(self.insp).core.recording.passes]

    @property
    def waiting(self):
        return inside(self.insp).waiting


@pytest.mark.parametrize("make", [of_nnx, of_jax])
def test_the_loop_goes_on_and_the_measured_step_compiles_nothing(make):
    plain, one = Loop(make), Loop(make)
    expected = [float(plain.step()) for _ in range(40)]
    np.testing.assert_allclose(one.run(until=1), expected, rtol=1e-5)
    assert one.texts[:4] == [["compiling the measured step, while the loop goes on"]] * 2 + [
        ["compiling the measured step"],
        [],
    ]
    assert one.steps == list(range(2, 40, 2))
    assert one.compiled[0]
    assert not any(one.compiled[1:]), "the bare program is the one that runs without us"
    one.insp.close()
    plain.insp.close()


def test_it_waits_when_the_loop_can_spare_no_more_steps():
    one = Loop()
    one.run()
    assert one.steps == list(range(4, 40, 2))
    assert not any(one.compiled[1:])
    one.run()
    assert one.steps[-20:] == list(range(40, 80, 2)), "the next loop has its program"
    one.insp.close()


def test_a_step_without_a_jitted_call_is_measured_from_the_next_on():
    one = Loop(unjitted)
    one.step()
    one.run()
    assert one.steps == list(range(2, 40, 2))
    one.insp.close()


@pytest.mark.parametrize(
    ("batches", "every"),
    [(range(40), 1), (range(18), 2), (iter(range(40)), 2)],
    ids=["every step", "a short loop", "a loop of unknown length"],
)
def test_who_can_spare_no_step_has_the_first_one(batches, every):
    one = Loop()
    one.run(batches, every=every)
    assert one.texts[0] == ["compiling the measured step"]
    assert one.steps[0] == 0
    one.insp.close()


@pytest.mark.parametrize("what", ["off screen", "saved", "perturbed"])
def test_it_compiles_before_the_loop(what, tmp_path):
    one = Loop()
    if what == "off screen":
        inside(one.insp).view._displayed_in = None  # not displayed
    elif what == "saved":
        one.insp.save(tmp_path / "run.nni")
    else:
        one.insp.perturb("a", nni.Zero())
    one.run(range(20))
    assert 0 in one.steps[-10:]
    one.insp.close()


def test_what_cannot_be_compiled_beside_raises_in_the_loop():
    one, traced = Loop(), []

    @nnx.jit
    def forward(model, x):
        traced.append(threading.current_thread().name)
        if len(traced) > 1:
            raise ZeroDivisionError("mine")
        return model(x).sum()

    one.step = lambda: forward(one.model, X)
    with pytest.raises(ZeroDivisionError, match="mine"):
        one.run(until=1)
    assert traced == ["MainThread", "nnx_inspector.arming", "MainThread"]
    one.insp.close()


def test_a_loop_that_is_left_while_it_compiles_leaves_nothing():
    one = Loop()
    for i in one.insp.watch(range(40), every=2):
        one.step()
        if i == 1:
            session = inside(one.insp).session
            break
    assert one.steps == []
    assert one.waiting == []
    one.insp.close()
    session.wait()
    assert not session.arming


def test_a_loop_goes_on_bare_when_its_inspector_is_closed_meanwhile():
    one, compiled = Loop(), Compilations()
    for i in one.insp.watch(range(40), every=2):
        session = inside(one.insp).session
        if i == 0:
            session._arming.submit(one.gate.wait)  # keeps the compiling thread busy
        if i == 1:
            one.insp.close()
            compiled.__enter__()
        one.step()
    compiled.__exit__()
    assert not compiled.kinds
    one.gate.set()
    session.wait()
    assert one.steps == []


def test_a_perturbation_that_comes_meanwhile_waits_for_the_program_and_acts():
    one, losses = Loop(), []
    for i in one.insp.watch(range(40), every=4):
        session = inside(one.insp).session
        if i == 0:
            session._arming.submit(one.gate.wait)  # keeps the compiling thread busy
            session.wait = functools.partial(one._let_go, session.wait)
        losses.append(float(one.step()))
        if i == 1:
            one.insp.perturb("b", nni.Zero())
        if i == 4:
            break
    assert losses[0] != 0.0
    assert losses[1] != 0.0
    assert losses[2:] == [0.0, 0.0, 0.0]
    assert one.steps == [4]
    one.insp.close()


def test_an_interrupt_while_the_loop_waits_leaves_nothing():
    one = Loop()

    def interrupted(wait):
        one.gate.set()
        wait()
        raise KeyboardInterrupt

    one._let_go = interrupted
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert not inside(one.insp).core.looping
    assert one.waiting == []
    one.insp.close()
