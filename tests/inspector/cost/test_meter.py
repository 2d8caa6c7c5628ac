"""The figures of the cost corner against a count by hand."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from blocking import Blocking
from flax import nnx
from inside import acknowledge, inside

import nnx_inspector as nni
from nnx_inspector.inspector.cost.meter import Meter
from nnx_inspector.inspector.loops import LONGEST_WAIT
from nnx_inspector.live.session import Session, StepEnd
from nnx_inspector.screen import protocol
from nnx_inspector.screen.comm import CREDITS, MIN_INTERVAL, InspectorWidget
from nnx_inspector.screen.presenter import STATE_INTERVAL, Presenter


@pytest.fixture
def sent(monkeypatch):
    sent = []

    def send(self, content, buffers=None, *_):
        sent.append((self.role, content, b"".join(buffers or [])))

    monkeypatch.setattr(InspectorWidget, "send", send)
    monkeypatch.setattr(Presenter, "display_requested", True)
    return sent


def streamed(sent):
    """The bytes of all messages on the stream, JSON and buffers."""
    return sum(
        len(json.dumps(content, ensure_ascii=False, sort_keys=True)) + len(buffer)
        for role, content, buffer in sent
        if role == "stream"
    )


def state_of(insp, sent):
    inside(insp).view.state_changed()
    return protocol.from_header(sent[-1][1])


def test_bytes_compilations_and_drops_are_what_was_counted(inspect, sent):
    insp = inspect(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
    before = state_of(insp, sent)
    assert before.cost.bytes_sent == streamed(sent[:-1])
    for size in (5, 6, 7):
        jax.jit(lambda x: x * 2 + 1).lower(jax.ShapeDtypeStruct((size,), "float32")).compile()
    drops = 0
    for _ in range(CREDITS):  # under way: not acknowledged
        inside(insp).view.screen.next_seq()
    for _ in range(10):
        drops += not inside(insp).view.screen.ready_for_frame()
    assert drops >= 1
    after = state_of(insp, sent)
    assert after.cost.compilations == before.cost.compilations + 3
    assert after.cost.frames_dropped == before.cost.frames_dropped + drops
    assert after.cost.bytes_sent == streamed(sent[:-1])
    assert (after.cost.plain_seconds, after.cost.inspected_seconds) == (None, None)


def test_a_switch_compiles_nothing(inspect, sent):
    insp = inspect(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
    handle = insp.perturb("", nni.Scale(0.5))
    assert insp.effect is not None
    before = state_of(insp, sent).cost.compilations
    for enabled in (False, True, False, True):
        handle.enabled = enabled
    handle.perturbation = nni.Scale(0.25)
    assert state_of(insp, sent).cost.compilations == before


def test_states_are_fewer_than_frames_unless_something_is_done(inspect, sent, monkeypatch):
    insp = inspect(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2)))
    insp.run()
    now = [time.monotonic() + 1.0]
    monkeypatch.setattr("nnx_inspector.screen.presenter.time.monotonic", lambda: now[0])

    def sent_now(**how):
        before = len(sent)
        acknowledge(inside(insp).view.screen)
        inside(insp).view.present(**how)
        types = [content["type"] for _, content, _ in sent[before:]]
        return types.count("frame"), types.count("state")

    assert sent_now() == (1, 1)
    for _ in range(3):
        now[0] += 1.01 * MIN_INTERVAL
        assert sent_now() == (1, 0)
    assert sent_now(force=True) == (1, 1)
    now[0] += 1.01 * STATE_INTERVAL
    assert sent_now() == (1, 1)


@pytest.fixture
def meter():
    meter = Meter(lambda: None)
    meter.loop_begins()
    yield meter
    meter.close()


@pytest.fixture
def steps(meter, monkeypatch):
    """Steps that take so many seconds each, compile so many programs, and are followed by an edge,
    as the loop's measured steps and the steps before them are.
    """
    now = [0.0]
    monkeypatch.setattr("nnx_inspector.inspector.cost.meter.time.perf_counter", lambda: now[0])

    def run(*, seconds, compiles=0, **of):
        for one in seconds:
            now[0] += one
            meter.step_begins()
            meter.compilations.count += compiles
            meter.step_ends(one, **of)
            if of["measured"]:
                meter.pass_edge(None)
        if not of["measured"]:
            meter.pass_edge(None)
        meter.clock.wait()

    meter.pass_edge(None)
    return run


def test_a_measured_step_is_compared_with_steps_like_it(meter, steps):
    """Perturbed steps take 9 s unmeasured and 10 s measured, the others 1 s and 2 s."""
    steps(seconds=[9.0] * 30, measured=False, perturbed=True)
    assert meter.median_seconds == (None, None), "no step was measured"
    steps(seconds=[2.0] * 3, measured=True, perturbed=False)
    assert meter.median_seconds == (None, None), "9 s against 2 s would be 0.22 times"
    steps(seconds=[10.0] * 3, measured=True, perturbed=True)
    assert meter.median_seconds == (9.0, 10.0)
    steps(seconds=[1.0] * 5, measured=False, perturbed=False)
    assert meter.median_seconds == (1.0, 2.0)


def test_steps_of_another_loop_and_steps_that_compile_are_left_out(meter, steps):
    steps(seconds=[50.0], measured=True, perturbed=False, compiles=3)
    assert (meter.median_seconds, meter.rate) == ((None, None), None)
    steps(seconds=[3.0, 1.0, 2.0], measured=True, perturbed=False)
    assert meter.median_seconds == (None, 2.0), "each step is measured"
    steps(seconds=[40.0], measured=False, perturbed=False, compiles=1)
    assert meter.median_seconds == (None, 2.0)
    meter.compilations.count += 5  # between two steps: a pass for the screen, in the time of these
    steps(seconds=[1.0], measured=False, perturbed=False)
    assert (meter.median_seconds, meter.rate) == ((None, 2.0), 4 / 7)
    steps(seconds=[1.0], measured=False, perturbed=False)
    assert (meter.median_seconds, meter.rate) == ((1.0, 2.0), 5 / 8)
    meter.loop_begins()
    assert (meter.median_seconds, meter.rate) == ((None, None), None)


def test_the_rate_is_that_of_the_loop_with_the_fetching_of_its_batches(meter, monkeypatch):
    """Steps of 2 ms, and 23 ms for each batch: 40 steps a second, not 500."""
    now = [0.0]
    monkeypatch.setattr("nnx_inspector.inspector.cost.meter.time.perf_counter", lambda: now[0])
    for number in range(5):
        now[0] += 0.023
        meter.step_begins()
        now[0] += 0.002
        meter.step_ends(0.002, measured=False, perturbed=False)
        assert meter.rate == (None if number == 0 else pytest.approx(40.0))


def test_a_plain_step_takes_its_share_of_the_time_between_two_measured_ones(meter, steps):
    steps(seconds=[2.0], measured=True, perturbed=False)
    steps(seconds=[0.5, 1.0, 1.5], measured=False, perturbed=False)
    assert meter.median_seconds == (1.0, 2.0)


def test_steps_among_which_a_perturbation_was_switched_are_left_out(meter, steps):
    steps(seconds=[2.0], measured=True, perturbed=False)
    for perturbed in (True, False):
        meter.step_begins()
        meter.step_ends(1.0, measured=False, perturbed=perturbed)
    steps(seconds=[1.0], measured=False, perturbed=False)
    assert meter.median_seconds == (None, 2.0)
    steps(seconds=[1.0], measured=False, perturbed=False)
    assert meter.median_seconds == (1.0, 2.0)


@pytest.mark.parametrize("every", [1, 3])
def test_a_loop_that_does_not_wait_is_timed_by_the_device(every):
    """The device is held in a measured step, whose time is counted when it is let go."""
    held = Blocking()
    model, y = nnx.Linear(*Blocking.MANY, rngs=nnx.Rngs(0)), jnp.ones(Blocking.MANY)
    insp = nni.Inspector(model, y, display=False)
    step = nnx.jit(lambda model, x: jnp.tanh(model(x)))
    held(y).block_until_ready()  # a step with a compilation is not counted
    held.may_end.clear()
    with ThreadPoolExecutor(1) as another:  # its programs do not hold up those of this thread
        for i, _ in enumerate(insp.watch(range(2 * every + 2), every=every)):
            clock = inside(insp).core.meter.clock
            if i == 2 * every:
                clock.wait()
                counted = len(clock.seconds.get((True, False), ()))  # those that compiled nothing
                y = another.submit(held, y).result()
                began = time.perf_counter()
            if i == 2 * every + 1:
                assert len(clock.seconds.get((True, False), ())) == counted
                seconds = time.perf_counter() - began
                held.may_end.set()
            y = step(model, y)
    clock.wait()
    insp.close()
    assert clock.seconds[True, False][counted] >= seconds


def test_a_loop_says_which_of_its_steps_are_alike(inspect, monkeypatch):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    insp = inspect(model, jnp.ones((4, 2)))
    told = []
    monkeypatch.setattr(inside(insp).core.meter, "step_ends", lambda seconds, **of: told.append(of))
    handle = insp.perturb("", nni.Scale(0.5))
    for i in insp.watch(range(4), every=2):
        if i == 1:
            handle.enabled = False
        model(jnp.ones((4, 2)))
    measured, perturbed = ([of[name] for of in told] for name in ("measured", "perturbed"))
    assert (measured, perturbed) == ([True, False] * 2, [True, True, False, False])


def test_the_patience_with_the_recorder_begins_when_the_device_has_ended_the_step(monkeypatch):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    insp = nni.Inspector(model, jnp.ones((4, 2)), display=False)
    step = nnx.jit(lambda model, x: model(x).sum())
    happened, loop = [], threading.get_ident()
    ends, waits, wait_of = Session.step_ends, StepEnd.wait, inside(insp).core.recorder.wait

    def noted(what, function):
        def call(*args):
            out = function(*args)
            if threading.get_ident() == loop:  # the clock waits for a slow device, in its thread
                happened.append((what, out if what == "end" else args[-1]))
            return out

        return call

    for x in insp.watch([jnp.ones((4, 2))] * 2, every=1):
        step(model, x)
    monkeypatch.setattr(Session, "step_ends", noted("end", ends))
    monkeypatch.setattr(StepEnd, "wait", noted("device", waits))
    monkeypatch.setattr(
        inside(insp).core.recorder,
        "wait",
        lambda *s: noted("recorder", wait_of)(*s) if s else wait_of(),
    )
    for x in insp.watch([jnp.ones((4, 2))] * 3, every=1):
        step(model, x)
    (_, a), (_, b), (_, c) = (one for one in happened if one[0] == "end")
    patience = ("recorder", LONGEST_WAIT)
    last = happened[happened.index(("end", a)) :]
    assert last == [
        *(("end", a), patience),
        *(("end", b), ("device", a), patience),
        *(("end", c), ("device", b), patience),
    ]
