"""An inspector's sweep: equal to `nni.sweep`, one at a time, shown, stoppable, on a copy."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx
from inside import inside

import nnx_inspector as nni
from nnx_inspector.screen import protocol


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(3)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.relu(block(x))
        return self.drop(self.norm(x))


X = jax.random.normal(jax.random.key(3), (6, 4))


def loss_fn(model, x):
    return (model(x) ** 2).mean()


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def numbers(model):
    """All arrays of a model, as NumPy arrays."""
    leaves = jax.tree.leaves(nnx.state(model))
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    pairs = zip(leaves, keys, strict=True)
    return [np.array(jax.random.key_data(x) if key else x) for x, key in pairs]


@pytest.fixture
def insp(inspect, monkeypatch, request):
    model = getattr(request, "param", Plain)(nnx.Rngs(0))
    made = inspect(model, X)
    made.said = []
    send = inside(made).view.screen.send
    monkeypatch.setattr(
        inside(made).view.screen,
        "send",
        lambda m, b=None: (made.said.append(m) if m.type == "sweep" else None, send(m, b)),
    )
    return made


def test_without_a_choice_on_screen_the_kind_tells_sites_apart(insp):
    request = protocol.StartSweep(id=1, sites="blocks/*", kind="", strength=None, at="output")
    inside(insp).commands.answer(request)
    inside(insp).sweeps.wait()
    assert [m.perturbation for m in insp.said[:1] + insp.said[-1:]] == ["the default", "nni.Mean()"]
    assert inside(insp).view.python == 'insp.sweep("blocks/*")'
    frame = insp.sweep("blocks/*", progress=False)
    assert [row.output_change for row in insp.said[-1].rows] == frame["output_change"].tolist()


@pytest.mark.parametrize("insp", [Net], indirect=True)
def test_it_is_the_sweep_of_the_last_step_and_changes_nothing(insp):
    insp.step(loss_fn, X)
    insp.perturb("norm", nni.Zero())  # the sweep's clean pass is without it
    state = numbers(insp.model)
    frame = insp.sweep("blocks/*", nni.Scale(0.5), progress=False)
    twin = Net(nnx.Rngs(0))
    expected = nni.sweep(
        twin, loss_fn, X, sites="blocks/*", perturbation=nni.Scale(0.5), progress=False
    )
    pd.testing.assert_frame_equal(frame, expected, rtol=1e-5)
    for a, b in zip(state, numbers(insp.model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_a_loss_the_outputs_change_is_ranked(insp):
    frame = insp.sweep("blocks/*", progress=False)
    assert not {"loss", "loss_change"} & set(frame)
    assert frame["output_change"].is_monotonic_decreasing
    twin = Plain(nnx.Rngs(0))
    expected = nni.sweep(twin, loss_fn, X, sites="blocks/*", progress=False).set_index("site")
    found = frame.set_index("site")
    for site in expected.index:
        np.testing.assert_allclose(
            found.loc[site, "output_change"], expected.loc[site, "output_change"], rtol=1e-5
        )
    last = insp.said[-1]
    assert last.measures[0] == "output_change"
    assert last.loss is None


@pytest.mark.long
@pytest.mark.parametrize("insp", [Net], indirect=True)
def test_its_modes_are_those_of_the_inspector(insp):
    insp.modes.eval()
    insp.step(loss_fn, X)
    frame = insp.sweep("norm", progress=False)
    twin = Net(nnx.Rngs(0))
    twin.eval()
    np.testing.assert_allclose(frame.attrs["clean"]["loss"], float(loss_fn(twin, X)), rtol=1e-5)
    assert frame.attrs["clean"]["loss"] != pytest.approx(float(loss_fn(Net(nnx.Rngs(0)), X)))


def test_what_is_shown_is_the_frame(insp):
    insp.step(loss_fn, X)
    frame = insp.sweep(progress=False)
    first, *_, last = insp.said
    assert (first.running, first.done, first.total) == (True, 0, 0)
    assert (last.running, last.stopped, last.error) == (False, False, "")
    assert (last.done, last.total, last.measured) == (len(frame),) * 3
    assert [row.site for row in last.rows] == list(frame["site"])
    assert [row.loss_change for row in last.rows] == list(frame["loss_change"])
    assert [row.output_change for row in last.rows] == list(frame["output_change"])
    assert last.loss == frame.attrs["clean"]["loss"]
    assert (last.sites, last.perturbation) == ("**", "nni.Mean()"), "of a chain"
    assert last.source == "the last step, at step 0"
    assert protocol.from_header(protocol.to_header(last)) == last
    insp.said.clear()
    inside(insp).view.welcome()
    assert insp.said == [last], "a view that comes later is shown it"


def test_of_units_the_screen_shows_the_one_of_each_site_that_matters_most(insp):
    insp.step(loss_fn, X)
    frame = insp.sweep("blocks/*", units=-1, progress=False)
    best = frame.drop_duplicates("site")
    last = insp.said[-1]
    assert len(frame) > len(best) == last.measured == last.done == last.total
    assert [row.site for row in last.rows] == list(best["site"])
    assert [row.loss_change for row in last.rows] == list(best["loss_change"])


class Inf(nnx.Module):
    """If its child is perturbed, its result is not finite."""

    def __init__(self, rngs):
        self.child = nnx.Linear(4, 4, rngs=rngs)
        self.words = Words()

    def __call__(self, x):
        self.words(x)
        return 1.0 / self.child(x)


class Words(nnx.Module):
    def __call__(self, x):
        return "nothing"


def test_no_change_is_relative_to_an_output_of_zeros(inspect):
    net = nnx.Sequential(nnx.Linear(X.shape[-1], 2, rngs=nnx.Rngs(0)), lambda x: 0 * x)
    insp = inspect(net, X)
    insp.sweep(progress=False)
    message = inside(insp).view.last_message("sweep")
    assert message.measures == ("output_change",)
    assert {row.output_change for row in message.rows} == {None}
    assert all("output is all zeros" in row.why_not for row in message.rows)


@pytest.mark.long
def test_what_is_not_finite_is_none_first_and_what_cannot_be_measured_says_why(inspect):
    insp = inspect(Inf(nnx.Rngs(0)), X)
    insp.step(lambda m, x: m(x).sum(), X)
    frame = insp.sweep(progress=False)
    message = inside(insp).view.last_message("sweep")
    assert message.rows[0].site == "child"
    assert (message.rows[0].loss_change, message.rows[0].why_not) == (None, "")
    assert not np.isfinite(frame["loss_change"][0])
    assert message.rows[-1].site == "words"
    assert message.rows[-1].why_not != ""


def test_in_a_thread_it_is_one_at_a_time_and_stops_between_two_chunks(insp, monkeypatch):
    began, go = threading.Event(), threading.Event()
    show = inside(insp).sweeps._show  # called where a row is shown: the moment between two rows

    def held(message):
        show(message)
        if message.running and message.total:
            began.set()
            go.wait()

    monkeypatch.setattr(inside(insp).sweeps, "_show", held)
    insp.start_sweep()
    assert began.wait(60)
    with pytest.raises(nni.InspectorError, match="Another study of the model is running"):
        insp.sweep(progress=False)
    insp.stop_sweep()
    go.set()
    inside(insp).sweeps.wait()
    last = insp.said[-1]
    assert not last.running
    assert last.stopped or last.done == last.total  # all fit one chunk
    assert len(insp.sweep("blocks/0", progress=False)) == 1, "and another may follow"


def test_stopped_after_the_first_chunk_it_shows_what_there_is(insp):
    asked = inside(insp).sweeps.request("**", nni.Zero(), True, None, 1)
    inside(insp).sweeps.run(asked, lambda done, total: done >= 2)
    last = insp.said[-1]
    assert (last.stopped, last.measured, last.done) == (True, 2, 2)
    assert last.total == len([c for c in insp.trace.calls])


def test_what_goes_wrong_is_shown_and_raised_where_somebody_waits(insp):
    with pytest.raises(ValueError, match="'nowhere'"):
        insp.sweep("nowhere")
    with pytest.raises(TypeError, match="leaves every value as it is"):
        insp.sweep("blocks/0", nni.StopGradient(), progress=False)
    assert insp.said[-1].error.startswith("TypeError: StopGradient leaves every value")
    insp.start_sweep("blocks/0", nni.Mask(np.ones(3, bool)))
    inside(insp).sweeps.wait()
    assert "does not fit" in insp.said[-1].error
    assert not insp.said[-1].running


@pytest.mark.long
@pytest.mark.parametrize("insp", [Net], indirect=True)
def test_a_training_that_goes_on_does_not_reach_it_and_it_not_the_training(insp):
    """Steps that donate the model, one after the other, while the sweep runs in its thread."""
    insp.step(loss_fn, X)
    expected = insp.sweep("blocks/*", progress=False)
    model, graphdef = insp.model, nnx.graphdef(insp.model)

    def update(state, x):
        copy = nnx.merge(graphdef, state)
        grads = nnx.grad(loss_fn)(copy, x)
        params = nnx.state(copy, nnx.Param)
        nnx.update(
            copy, jax.tree.map(lambda p, g: p - 0.1 * g, params, nnx.state(grads, nnx.Param))
        )
        return nnx.state(copy)

    donating, plain = jax.jit(update, donate_argnums=0), jax.jit(update)
    start = jax.tree.map(jnp.copy, nnx.state(model))
    state = start
    for _ in range(20):
        state = plain(state, X)
    read = threading.Event()
    show = inside(insp).sweeps._show  # called where a row is shown: the moment between two rows
    inside(insp).sweeps._show = lambda m: (show(m), read.set() if m.total else None)
    insp.start_sweep("blocks/*")
    assert read.wait(60)  # it has its copy
    for _ in range(20):
        nnx.update(model, donating(nnx.state(model), X))
    inside(insp).sweeps.wait()
    for a, b in zip(numbers(model), numbers(nnx.merge(graphdef, state)), strict=True):
        np.testing.assert_array_equal(a, b)
    rows = {row.site: row.loss_change for row in insp.said[-1].rows}
    assert insp.said[-1].error == ""
    assert rows == dict(zip(expected["site"], expected["loss_change"], strict=True))


def test_closing_stops_it_and_starts_none(insp):
    insp.close()
    with pytest.raises(nni.InspectorError, match="closed"):
        insp.sweep(progress=False)
