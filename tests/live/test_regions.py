"""Watched regions: passes counted inside the program, steps by `tick`, and without a screen."""

import gc
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from flax import nnx
from inside import inside
from models import TwoLayers
from record_checks import assert_summary
from reused_model import ReusedModel
from training import (
    Call,
    by,
    descended,
    figures,
    gradient_of,
    loss_of,
    numbers_of,
    update,
)

import nnx_inspector as nni
from nnx_inspector.live.inbox import Inbox

pytestmark = pytest.mark.usefixtures("leaves_nothing")
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


step = nnx.jit(update)


def made():
    model = TwoLayers(nnx.Rngs(0))
    return model, by(model)


def batches(count):
    return [X * (i + 1) for i in range(count)]


def by_hand(count):
    """For each step of plain gradient descent in float64: (site, quantity) -> array."""
    weights, found = numbers_of(made()[0]), []
    for x in batches(count):
        call = Call(weights, x)
        found.append(figures(call))
        weights = descended(weights, gradient_of(call))
    return found


def check_passes(recording, expected, every):
    watched = [p for p in recording.passes if p.kind == "watch"]
    assert [p.step for p in watched] == list(range(0, len(expected), every))
    for one in watched:
        for (site, quantity), array in expected[one.step].items():
            assert_summary(one.summary(site, quantity), array, rtol=1e-3)


@pytest.fixture(scope="module")
def reused():
    one = ReusedModel(made()[0], X)
    yield one
    one.close()


@pytest.fixture
def insp(reused):
    inspector = nni.Inspector(reused.reset(), X, display=False)
    inside(inspector).rerun.wait_for_first()
    yield inspector
    inspector.close()


def test_without_a_screen_every_nth_pass_has_the_figures_of_a_hand_written_one():
    model, optimizer = made()
    expected, losses = by_hand(7), []
    with nni.watch(model, every=3) as recording:
        for x in batches(7):
            losses.append(float(step(model, optimizer, x)))
    np.testing.assert_allclose(losses, [(e["", "output"] ** 2).mean() for e in expected], rtol=1e-4)
    check_passes(recording, expected, 3)


def test_a_region_of_an_inspector_shows_the_passes_while_they_run(insp):
    optimizer = by(insp.model)
    shown = []
    with insp.watch(every=2):
        for x in batches(9):
            step(insp.model, optimizer, x)
            shown.append(inside(insp).session.inbox.count)
    assert shown == list(range(1, 10))
    check_passes(insp.recording, by_hand(9), 2)


def test_metrics_between_passes_belong_to_their_own_steps(insp):
    optimizer = by(insp.model)
    for first in (0, 7):  # a region may follow another
        with insp.watch(every=3):
            for x in batches(7):
                insp.metrics(loss=step(insp.model, optimizer, x))
        steps = insp.recording.curves()["loss"][:, 0].tolist()
        assert steps == list(range(first + 7))


def test_metrics_of_a_device_that_is_behind_have_steps_of_their_own(insp):
    def watched():
        with insp.watch(every=3):
            for loss in (3.0, 2.0, 1.0):  # no pass has begun by then
                insp.metrics(loss=loss)

    with pytest.warns(nni.InspectorWarning, match="called"):
        watched()
    assert insp.recording.curves()["loss"].tolist() == [[0, 3.0], [1, 2.0], [2, 1.0]]


def test_ticks_make_steps_of_a_region_and_the_others_run_the_plain_program(insp):
    optimizer = by(insp.model)
    hooked = []
    with insp.watch(every=3):
        for x in batches(7):
            insp.tick()
            hooked.append(inside(insp).loops._region._steps._sampled)  # which program runs
            step(insp.model, optimizer, x)
            insp.metrics(loss=1.0)
    assert hooked == [i % 3 == 0 for i in range(7)]
    check_passes(insp.recording, by_hand(7), 3)
    assert insp.recording.curves()["loss"][:, 0].tolist() == list(range(7))


def test_progress_counts_every_pass_and_never_runs_backwards(insp, monkeypatch):
    # called for each step, before anything is sent
    told, tell = [], inside(insp).loops._progress
    monkeypatch.setattr(
        inside(insp).loops, "_progress", lambda step, total: (told.append(step), tell(step, total))
    )
    for _ in insp.watch(range(3), every=1):
        break
    assert told == [0, 0], "a step that was not finished is not done"
    told.clear()
    with insp.watch(every=3):
        for _ in range(5):
            insp.model(X)
    assert (told[0], told[-1], sorted(told)) == (0, 5, told)
    told.clear()
    with insp.watch(every=3):
        for _ in range(4):
            insp.model(X)
        for _ in range(2):  # steps after passes
            insp.tick()
            insp.model(X)
    assert (told[0], told[-1], sorted(told)) == (5, 11, told)
    steps = [one.step for one in insp.recording.passes if one.kind == "watch"]
    assert steps == sorted(set(steps))


def test_a_tick_outside_of_a_region_says_where_it_belongs(insp):
    with pytest.raises(nni.InspectorError, match="inside a watched region"):
        insp.tick()
    for _ in insp.watch([1]):
        with pytest.raises(nni.InspectorError, match="counts its steps itself"):
            insp.tick()


def test_a_step_may_begin_within_another_region_and_end_outside(insp):
    with insp.watch(every=1):
        insp.tick()
        with nni.perturb("a", nni.Zero(), model=insp.model):
            insp.model(X)
            insp.tick()
            insp.model(X)
        insp.model(X)  # of the second step too
        insp.tick()
        insp.model(X)
    norms = [one.summary("a").norm for one in insp.recording.passes if one.kind == "watch"]
    clean = float(jnp.linalg.norm(insp.model.a(X)))
    np.testing.assert_allclose(norms, [0.0, clean, clean], rtol=1e-5)


def test_a_region_cannot_be_iterated_over(insp):
    with pytest.raises(TypeError, match=r"insp\.watch\(batches, every=10\)"):
        list(insp.watch(every=10))


def test_a_region_is_entered_once(insp):
    """A second loop within it had no perturbations, and left a thread behind."""
    region = insp.watch(every=1)
    with region:
        step(insp.model, by(insp.model), X)
    with pytest.raises(nni.InspectorError, match="entered before"), region:
        pass


def test_a_model_that_is_being_updated_is_read_at_the_next_pass(insp, monkeypatch):
    """flax empties an object before it fills it; the effect is measured in another thread."""
    model, forward, refreshed = insp.model, nnx.jit(lambda m, x: m(x)), threading.Event()
    insp.perturb("a", nni.Scale(2.0))
    refresh = inside(insp).rerun.refresh

    def noted(step=None):
        refresh(step)
        if threading.current_thread().name == "nnx_inspector.receiver":
            refreshed.set()

    monkeypatch.setattr(inside(insp).rerun, "refresh", noted)
    with insp.watch(every=1):
        with inside(insp).core.lock:  # which the receiver needs to record a pass
            for _ in range(6):
                forward(model, X)
            whole = dict(vars(model.a))
            vars(model.a).clear()
        assert refreshed.wait(60)
        vars(model.a).update(whole)
        assert not inside(insp).rerun.failed


def test_of_passes_that_wait_the_newest_alone_is_run_again_for_its_effect(insp, monkeypatch):
    forward, again = nnx.jit(lambda m, x: m(x)), []
    insp.perturb("a", nni.Scale(2.0))
    refresh = inside(insp).rerun.refresh
    monkeypatch.setattr(
        inside(insp).rerun, "refresh", lambda step: (again.append(step), refresh(step))
    )
    with insp.watch(every=1):
        with inside(insp).core.lock:  # which the receiver needs to record a pass
            for _ in range(6):
                forward(insp.model, X)
    watched = [one.step for one in insp.recording.passes if one.kind == "watch"]
    assert watched == list(range(6))
    assert again[-1] == watched[-1]
    assert len(again) <= 3  # those that waited before the lock was taken, in it, and at the end


def test_a_switch_acts_from_the_next_pass_and_whole_passes_only(insp):
    forward = nnx.jit(lambda m, x: m(x))
    handle = insp.perturb("b", nni.Zero())
    handle.enabled = False
    assert insp.effect is None  # it waits for the perturbation's program
    zero, compiled = [], Compilations()
    with compiled, insp.watch(every=1):
        for i in range(8):
            handle.enabled = i % 3 == 1
            zero.append(not np.asarray(forward(insp.model, X)).any())
            if i == 0:
                compiled.kinds.clear()
    assert zero == [i % 3 == 1 for i in range(8)]
    watched = [p for p in insp.recording.passes if p.kind == "watch"]
    assert [p.perturbed for p in watched] == zero
    assert [p.summary("b").norm == 0 for p in watched] == zero
    assert compiled.kinds == []


def test_flips_from_another_thread_during_500_donated_steps_act_on_whole_passes(insp):
    """Every recorded step is entirely before or after a flip; nothing is compiled."""
    model = insp.model

    def donated_step(state, x):
        return state, nnx.merge(graphdef, state)(x)

    donated = jax.jit(donated_step, donate_argnums=0)
    handle, stop, compiled = insp.perturb("a", nni.Scale(3.0)), threading.Event(), Compilations()
    clean, scaled = (np.asarray(v) for v in _both(model))

    def flip():
        on = False
        while not stop.is_set():
            handle.enabled = on = not on

    thread = threading.Thread(target=flip)
    outs = []
    with insp.watch(every=1, gradients=False):
        graphdef, state = nnx.split(model)
        state, _ = donated(jax.tree.map(jnp.copy, state), X)
        thread.start()
        try:
            with compiled:
                for _ in range(500):
                    state, y = donated(state, X)
                    outs.append(y)
        finally:
            stop.set()
            thread.join()
    assert compiled.kinds == []
    found = [int(np.allclose(y, scaled, rtol=1e-5)) for y in outs]
    assert all(
        np.allclose(y, (clean, scaled)[k], rtol=1e-5) for y, k in zip(outs, found, strict=True)
    )
    assert set(found) == {0, 1}
    watched = [p for p in insp.recording.passes if p.kind == "watch"]
    for one in watched:
        expected = scaled if one.perturbed else clean
        np.testing.assert_allclose(one.summary("").norm, np.linalg.norm(expected), rtol=1e-4)
    assert not inside(insp).core.looping


def _both(model):
    yield model(X)
    with nni.perturb("a", nni.Scale(3.0), model=model):
        yield model(X)


def test_only_some_sites_are_measured_and_the_others_still_perturbed(insp):
    forward = nnx.jit(lambda m, x: m(x))
    insp.perturb("a", nni.Zero())
    for _ in insp.watch([1], only="b"):
        y = forward(insp.model, X)
    (one,) = (p for p in insp.recording.passes if p.kind == "watch")
    assert {site for site, q in one.keys if not q.startswith("parameter")} == {"b"}
    np.testing.assert_allclose(y, np.broadcast_to(insp.model.b.bias[...], y.shape), atol=1e-6)


def test_a_selection_without_the_model_itself_does_not_change_what_a_pass_is():
    """Both layers are measured in the same passes, and not each in every second one."""
    model, optimizer = made()
    with nni.watch(model, every=2, only=["a", "b"]) as recording:
        for x in batches(4):
            step(model, optimizer, x)
    assert [one.step for one in recording.passes] == [0, 2]
    for one, expected in zip(recording.passes, by_hand(4)[::2], strict=True):
        mine = {key for key in one.keys if not key[1].startswith("parameter")}
        assert mine == {(site, q) for site in "ab" for q in ("output", "gradient")}
        for site, quantity in mine:
            mean = expected[site, quantity].mean()
            found = one.summary(site, quantity).mean
            np.testing.assert_allclose(found, mean, rtol=1e-3, atol=1e-6)


def test_two_calls_of_the_model_in_one_loss_are_two_passes_with_gradients_of_their_own():
    model, _ = made()

    @nnx.jit
    def grads(model, x):
        loss = lambda m: (m(x) ** 2).sum() + 100 * (m(2 * x) ** 2).sum()  # noqa: E731
        return nnx.grad(loss)(model)

    with nni.watch(model, every=1) as recording:
        grads(model, X)
    first, second = recording.passes
    for one, x, factor in ((first, X, 2.0), (second, 2 * X, 200.0)):
        y = np.asarray(model(x), np.float64)
        np.testing.assert_allclose(one.summary("").norm, np.linalg.norm(y), rtol=1e-4)
        np.testing.assert_allclose(
            one.summary("", "gradient").norm, factor * np.linalg.norm(y), rtol=1e-4
        )


class Blocks(nnx.Module):
    """Each of its blocks is jitted separately."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return block(self.b, block(self.a, x))


@nnx.jit
def block(module, x):
    return jnp.tanh(module(x))


@pytest.mark.parametrize("direct_first", [True, False])
@pytest.mark.parametrize("whole", [nnx.jit(lambda m, x: m(x)), lambda m, x: m(x)])
def test_a_jitted_block_that_is_also_called_directly_joins_the_pass(whole, direct_first):
    """The block has two programs, one within the model's call and one for the call beside it."""
    model = Blocks(nnx.Rngs(0))
    calls = [lambda: whole(model, X), lambda: block(model.b, 2 * X)]
    calls = calls[::-1] if direct_first else calls
    with nni.watch(model, every=1) as recording:
        for _ in range(2):
            for call in calls:
                call()
    inner = np.tanh(np.asarray(model.a(X)))
    of_whole = {"a": model.a(X), "b": model.b(inner), "": whole(model, X)}
    of_whole["b"] = np.concatenate([of_whole["b"], model.b(2 * X)])
    assert [one.step for one in recording.passes] == [0, 1]
    for one in recording.passes:
        assert {site for site, q in one.keys if not q.startswith("parameter")} == {"", "a", "b"}
        for site, y in of_whole.items():
            np.testing.assert_allclose(one.summary(site).norm, np.linalg.norm(y), rtol=1e-4)


def test_a_scan_over_steps_has_a_pass_for_each():
    model, optimizer = made()

    @nnx.jit
    def epoch(model, optimizer, xs):
        def body(carry, x):
            model, optimizer = carry
            loss, grads = nnx.value_and_grad(loss_of)(model, x)
            optimizer.update(model, grads)
            return (model, optimizer), loss

        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(
            (model, optimizer), xs
        )[1]

    with nni.watch(model, every=2) as recording:
        epoch(model, optimizer, jnp.stack(batches(6)))
    check_passes(recording, by_hand(6), 2)


def test_a_pass_leaves_its_program_in_one_array(monkeypatch):
    model, optimizer = made()
    sent, receive = [], Inbox.receive

    def counted(self, number, message, what):
        sent.append((number, len(message.arrays), what))
        return receive(self, number, message, what)

    monkeypatch.setattr(Inbox, "receive", counted)
    with nni.watch(model, every=1):
        for x in batches(3):
            step(model, optimizer, x)
    assert sent == [(number, 1, "output") for number in range(3)]


def test_a_second_recording_of_a_model_runs_the_programs_of_the_first():
    model, optimizer = made()
    with nni.watch(model, every=1) as first:
        step(model, optimizer, X)
    with Compilations() as compiled, nni.watch(model, every=1) as second:
        step(model, optimizer, X)
    assert compiled.kinds == []
    assert first.passes[0].summary("").norm != second.passes[0].summary("").norm
    assert len(first.passes) == len(second.passes) == 1


def test_two_recordings_at_once_tell_nobody_of_the_others():
    model, optimizer = made()
    with nni.watch(model, every=1):
        step(model, optimizer, X)
    with nni.watch(model, every=1) as outer, nni.watch(model, every=2) as inner:
        for x in batches(4):
            step(model, optimizer, x)
    assert [p.step for p in outer.passes] == [0, 1, 2, 3]
    assert [p.step for p in inner.passes] == [0, 2]
    with pytest.raises(KeyError), nni.watch(model):
        raise KeyError("mine")
    with nni.watch(model, every=1) as after:
        step(model, optimizer, X)
    assert len(after.passes) == 1


def test_a_model_that_was_recorded_is_let_go():
    model, optimizer = made()
    with nni.watch(model):
        step(model, optimizer, X)
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert alive() is None


def test_an_error_in_the_region_is_the_users_own(insp):
    def broken():
        with insp.watch(every=1):
            insp.model(X)
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        broken()
    with insp.watch(every=1):
        insp.model(X)


def test_a_later_region_warns_again_of_what_cannot_be_seen_and_compiles_nothing():
    class Custom(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.head = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            f = jax.custom_jvp(lambda x: self.inner(x))
            f.defjvp(lambda xs, ts: (f(*xs), *ts))
            return self.head(f(x))

    model, forward = Custom(nnx.Rngs(0)), nnx.jit(lambda m, x: m(x))
    for _ in range(2):
        with (
            pytest.warns(nni.InspectorWarning, match="^'inner': it is called inside a custom_jvp"),
            nni.watch(model, every=1, gradients=False),
            Compilations() as compiled,
        ):
            forward(model, X)
    assert not compiled.kinds
    direct = nnx.jit(lambda m, x: m.head(m.inner(x)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with nni.watch(model, every=1, gradients=False):
            direct(model, X)


def test_a_later_region_says_again_what_was_called_instead_of_the_model():
    model, _ = made()
    clone, forward = nnx.clone(model), nnx.jit(lambda m, x: m(x))
    for _ in range(2):
        with pytest.warns(nni.InspectorWarning, match="seen, which is a clone"), nni.watch(model):
            forward(clone, X)


@pytest.mark.parametrize("apart", [False, True])
def test_each_region_tells_of_a_twin_that_is_called_beside_the_model(apart):
    (model, _), (twin, _) = made(), made()
    both = nnx.jit(lambda model, twin, x: (model(x) - twin(x)) ** 2)
    alone = nnx.jit(lambda model, x: model(x))
    for calls_twin in (True, True, False, True, False):
        with warnings.catch_warnings(record=True) as told, nni.watch(model, every=1) as recording:
            warnings.simplefilter("always")
            if calls_twin and not apart:
                both(model, twin, X)
            else:
                alone(model, X)
            if calls_twin and apart:
                alone(twin, X)
        assert len(recording.passes) == 1
        assert len(told) == 2 * calls_twin  # one for each type of its modules
        assert all("could not be attributed" in str(one.message) for one in told)
    with Compilations() as compiled, nni.watch(model, every=1):
        alone(model, X)
    assert not compiled.kinds


def test_wrong_arguments_are_told_before_anything_is_hooked(insp):
    def enter(*args, **options):
        with nni.watch(*args, **options):
            raise AssertionError("not to be reached")

    with pytest.raises(ValueError, match="every must be a number of steps"):
        enter(insp.model, every=0)
    with pytest.raises(TypeError):
        enter(3)
    with pytest.raises(ValueError, match="matches"):
        enter(insp.model, only="nowhere")
    with pytest.raises(ValueError, match="matches"):
        insp.watch([1], only="nowhere")


RUNS = []


class Counted(TwoLayers):
    """Counts in Python how often it is called, so how often it is traced."""

    def __call__(self, x):
        RUNS.append(1)
        return super().__call__(x)


def test_a_region_traces_the_model_for_findings_only_when_somebody_asks_and_as_it_was():
    RUNS.clear()
    model = Counted(nnx.Rngs(0))
    optimizer = by(model)
    with nni.watch(model, every=1) as recording:
        for x in batches(3):
            step(model, optimizer, x)
    assert len(RUNS) == 1
    model.b = nnx.Linear(2, 7, rngs=nnx.Rngs(1))
    (flow,) = recording.facts.flows
    assert len(RUNS) == 2
    assert set(flow.sites) >= {"a", "b"}
    assert {one.size for one in recording.facts.parameters if one.path == "b/kernel"} == {8}
    assert len(RUNS) == 2
