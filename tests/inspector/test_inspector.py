"""The public Inspector: figures, effects, loops, commands of a browser, and bad input."""

import gc
import threading
import weakref

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_browser import FakeBrowser
from flax import nnx
from inside import inside, receive
from reused_model import ReusedModel

import nnx_inspector as nni
from nnx_inspector.screen import protocol
from nnx_inspector.screen.comm import InspectorWidget
from nnx_inspector.screen.presenter import Presenter


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.b = nnx.Linear(4, 2, rngs=rngs)

    def encode(self, x):
        return self.drop(jnp.tanh(self.norm(self.a(x))))

    def __call__(self, x):
        return self.b(self.encode(x))


X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
ADAM = optax.adam(1e-2)


def loss_fn(model, x):
    y = model(x)
    return (y**2).mean(), {"largest": y.max(), "shape": y}


@pytest.fixture
def browser(monkeypatch):
    return FakeBrowser(monkeypatch)


@pytest.fixture(scope="module")
def reused():
    one = ReusedModel(Net(nnx.Rngs(0)), X)
    yield one
    one.close()


@pytest.fixture
def model(reused):
    return reused.reset()


@pytest.fixture
def insp(model, browser):
    inspector = nni.Inspector(model, X)
    assert len(inspector.recording) == 1  # it waits for the first pass
    yield inspector
    inspector.close()


def arrays(model):
    leaves = jax.tree.leaves(nnx.state(model))
    key = lambda a: jnp.issubdtype(a.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(a) if key(a) else a) for a in leaves]


def table(browser, insp):
    header, buffer = browser.messages("frame")[-1]
    shape = len(inside(insp).view.keys), len(protocol.QUANTITIES), len(protocol.STATISTICS)
    flat = np.frombuffer(buffer, "<f8", int(np.prod(shape)))
    return header, dict(zip(inside(insp).view.keys, flat.reshape(shape), strict=True))


# ------------------------------------------------------------------- passes


def test_making_one_records_the_example_and_changes_nothing(model, browser):
    before, graphdef = arrays(model), nnx.graphdef(model)
    insp = nni.Inspector(model, X)
    expected = np.asarray(nnx.clone(model).a(X), np.float64)
    got = insp.recording.summary("a")
    np.testing.assert_allclose([got.mean, got.std], [expected.mean(), expected.std()], rtol=1e-5)
    assert all(np.array_equal(a, b) for a, b in zip(before, arrays(model), strict=True))
    assert nnx.graphdef(model) == graphdef
    insp.close()


def test_run_returns_what_the_model_returns(insp, model):
    np.testing.assert_allclose(insp.run(X), nnx.clone(model)(X), rtol=1e-5)


def test_step_returns_what_the_loss_returns_and_measures_gradients(insp, model):
    before = arrays(model)
    loss, aux = insp.step(loss_fn, X)
    expected, expected_aux = loss_fn(nnx.clone(model), X)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(aux["shape"], expected_aux["shape"], rtol=1e-5)
    dy = 2 * np.asarray(expected_aux["shape"], np.float64) / expected_aux["shape"].size
    got = insp.recording.summary("b", "gradient")
    np.testing.assert_allclose(got.norm, np.linalg.norm(dy), rtol=1e-5)
    assert all(np.array_equal(a, b) for a, b in zip(before, arrays(model), strict=True))


def test_the_effect_is_the_clean_pass_beside_the_perturbed_one(insp, model):
    insp.step(loss_fn, X)
    clean = insp.effect.clean
    handle = insp.perturb("b", nni.Zero())
    assert insp.effect.clean == clean
    compiled = inside(insp).core.meter.compilations.count
    assert insp.effect.perturbed == {"loss": 0.0, "largest": 0.0}
    handle.enabled = False
    assert insp.effect.perturbed == clean, "the old figures are back, exactly"
    assert inside(insp).core.meter.compilations.count == compiled, "no toggle compiles anything"


def test_the_effect_on_the_example_is_the_change_of_the_output(insp):
    with insp.perturb("b", nni.Scale(0.25)):
        assert insp.effect.output_change == pytest.approx(0.75, rel=1e-5)
        assert insp.effect.source == "the example"
    assert insp.effect is None


def test_static_arguments_stay_static(browser):
    class Switched(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x, *, twice=False, mode="plain"):
            x = self.inner(x)
            return self.inner(x) if twice and mode == "plain" else x

    model = Switched(nnx.Rngs(0))
    insp = nni.Inspector(model, X, twice=True)
    assert insp.recording.summary("inner").size == 2 * X.size
    np.testing.assert_allclose(insp.run(X), model(X), rtol=1e-6)
    insp.close()


# -------------------------------------------------------------------- loops


def train(insp, model, n=12, every=5, toggle=None):
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    traces = []

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(1)
        (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x)
        optimizer.update(model, grads)
        return loss

    losses = []
    for i, batch in enumerate(insp.watch([X] * n, every=every)):
        loss = step(model, optimizer, batch)
        insp.metrics(loss=loss)
        losses.append(float(loss))
        if toggle:
            toggle(i)
    return losses, len(traces)


def test_a_watched_loop_trains_as_without_us(insp, model):
    twin = nnx.clone(model)
    losses, traces = train(insp, model)
    optimizer = nnx.Optimizer(twin, ADAM, wrt=nnx.Param)
    bare = []
    for _ in range(12):
        (loss, _), grads = nnx.jit(nnx.value_and_grad(loss_fn, has_aux=True))(twin, X)
        optimizer.update(twin, grads)
        bare.append(float(loss))
    np.testing.assert_allclose(losses, bare, rtol=1e-4)
    assert traces == 2
    assert insp.recording.steps[1:] == [0, 5, 10]
    curve = insp.recording.curves()["loss"]
    np.testing.assert_array_equal(curve[:, 0], range(12))
    np.testing.assert_array_equal(curve[:, 1], np.float32(losses))
    assert nnx.graphdef(model) == nnx.graphdef(twin)
    for part in ("kernel", "bias"):
        a, b = (np.asarray(getattr(m.b, part)[...]) for m in (model, twin))
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    assert model.drop.rngs.count[...] == twin.drop.rngs.count[...]


def test_a_second_loop_goes_on_counting_and_compiles_nothing(insp, model):
    train(insp, model)
    assert insp.recording.steps[-1] == 10
    # that a second loop reuses the first one's programs shows in time only
    (session,) = inside(insp).loops._sessions.values()
    train(insp, model)
    assert insp.recording.steps[1:] == [0, 5, 10, 15, 20]
    assert list(inside(insp).loops._sessions.values()) == [session]


@pytest.mark.parametrize("way", ["iterated", "left early", "region", "ticked"])
def test_the_count_of_steps_on_screen_never_runs_backwards(insp, model, monkeypatch, way):
    # called for each step: the moment between two steps
    seen, own = [], inside(insp).loops._progress

    def note(step, total):
        own(step, total)
        seen.append(inside(insp).view.progress.step)

    monkeypatch.setattr(inside(insp).loops, "_progress", note)
    forward = nnx.jit(lambda model, x: model(x))
    if way in ("iterated", "left early"):
        for i, x in enumerate(insp.watch([X] * 8, every=3)):
            forward(model, x)
            if way == "left early" and i == 6:
                break
    else:
        with insp.watch(every=3):
            for _ in range(8):
                if way == "ticked":
                    insp.tick()
                forward(model, X)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 7 if way == "left early" else 8)


def test_a_perturbation_acts_from_the_next_step_and_is_flagged(insp, model):
    handle = insp.perturb("b", nni.Zero())
    handle.enabled = False
    seen = []

    def toggle(i):
        seen.append(inside(insp).view.training_perturbed)
        handle.enabled = 3 <= i < 6

    losses, traces = train(insp, model, n=10, every=1, toggle=toggle)
    assert [loss == 0.0 for loss in losses] == [4 <= i <= 6 for i in range(10)]
    assert seen == [4 <= i <= 6 for i in range(10)]
    assert traces == 1, "every step is measured: one program, perturbed or not"
    watched = [p.perturbed for p in insp.recording.passes if p.kind == "watch"]
    assert watched == [4 <= i <= 6 for i in range(10)]
    assert not inside(insp).view.training_perturbed


@pytest.mark.parametrize("leave", ["break", "raise"])
def test_leaving_a_loop_early_leaves_no_hook(insp, model, leave):
    methods, graphdef = dict(vars(nnx.Linear)), nnx.graphdef(model)

    def loop():
        for _ in insp.watch([X] * 5, every=1):
            model(X)
            if leave == "break":
                break
            raise ZeroDivisionError("mine")

    if leave == "raise":
        with pytest.raises(ZeroDivisionError, match="mine"):
            loop()
    else:
        loop()
    gc.collect()
    assert dict(vars(nnx.Linear)) == methods
    assert nnx.graphdef(model) == graphdef
    assert not inside(insp).view.progress.running
    assert len(list(insp.watch([X, X]))) == 2


def test_a_nan_loss_is_kept_and_sent_as_not_a_number(insp, browser):
    insp.metrics(loss=float("nan"))
    assert np.isnan(insp.recording.curves()["loss"][0, 1])
    assert browser.messages("frame")[-1][0]["metrics"] == {"loss": None}


def test_closing_the_widget_does_not_stop_the_loop(insp, model):
    done = 0
    for i, _ in enumerate(insp.watch([X] * 6, every=1)):
        model(X)
        done += 1
        if i == 2:
            insp.close()
    assert done == 6


def test_a_broken_comm_is_counted_and_does_not_stop_the_loop(insp, model, monkeypatch):
    def broken(*_, **__):
        raise OSError("the browser is gone")

    monkeypatch.setattr(InspectorWidget, "send", broken)
    _, traces = train(insp, model, n=6, every=1)
    assert traces == 1
    assert inside(insp).view.screen.failures > 0


def test_a_background_loop_reports_what_it_raises(insp, monkeypatch):
    def loop():
        raise ZeroDivisionError("mine")

    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    insp.background(loop).join()
    assert "ZeroDivisionError: mine" in inside(insp).notices[-1]
    assert [one.exc_type for one in printed] == [ZeroDivisionError], "it is not on screen"


def test_run_without_arguments_runs_what_was_run_last_and_at_first_the_example(insp, model):
    plain = nnx.clone(model)
    np.testing.assert_allclose(insp.run(), plain(X), rtol=1e-5)
    insp.run(X[:2])
    assert insp.run().shape == (2, 2)
    insp.step(loss_fn, X)  # a loss's arguments are not the model's
    assert insp.run().shape == (2, 2)


def test_a_pushed_record_stays_the_newest_while_the_first_pass_is_made(model, browser):
    _, record = nni.capture(model)(X)
    inspector = nni.Inspector(model, X)
    inside(inspector).rerun.start_first()  # as a notebook's cell does that shows it
    inspector.push(record)
    inside(inspector).rerun.wait()
    kinds = [one.kind for one in inspector.recording.passes]
    inspector.close()
    assert kinds[-1] == "push"


def test_push_shows_a_record_of_the_users_own(insp, model, browser):
    (_, _, record), _ = nnx.jit(nni.value_and_grad(loss_fn, has_aux=True))(model, X)
    insp.push(record, step=7, loss=1.5)
    header, rows = table(browser, insp)
    assert (header["step"], header["metrics"]) == (7, {"loss": 1.5})
    assert rows["a"][1, protocol.STATISTICS.index("norm")] == record["a"].gradient.norm


# ---------------------------------------------------------------- the screen


def test_what_is_on_screen_is_what_the_summaries_say(insp, browser):
    insp.step(loss_fn, X)
    _, rows = table(browser, insp)
    for site in ("", "a", "norm", "drop", "b"):
        for j, quantity in enumerate(protocol.QUANTITIES):
            summary = insp.recording.summary(site, quantity)
            expected = [getattr(summary, name) for name in protocol.STATISTICS]
            np.testing.assert_array_equal(rows[site][j], expected)


def test_nothing_is_drawn_or_diagnosed_until_a_view_may_be_there(browser, model, monkeypatch):
    monkeypatch.setattr(Presenter, "display_requested", False)
    insp = nni.Inspector(model, X, display=False)
    train = nnx.jit(lambda model, x: loss_fn(model, x)[0])
    for x in insp.watch([X] * 3, every=1):
        train(model, x)
    inside(insp).diagnosis.wait()
    assert not browser.messages("frame")
    assert inside(insp).view.last_message("findings") is None
    browser.replies_to(
        insp, protocol.Hello(version=protocol.VERSION, streams=True, page="a", said=1)
    )
    ((frame, _),) = browser.messages("frame")
    assert frame["step"] == 2
    insp._repr_mimebundle_()
    insp.run(X)
    assert len(browser.messages("frame")) == 2


def test_hello_is_answered_with_everything(insp, browser):
    insp.metrics(loss=1.0)
    browser.sent.clear()
    browser.replies_to(
        insp, protocol.Hello(version=protocol.VERSION, streams=True, page="a", said=1)
    )
    kinds = [(role, header["type"]) for role, header, _ in browser.sent]
    assert kinds[:2] == [("control", "reply"), ("stream", "layout")]
    assert {kind for role, kind in kinds if role == "stream"} == {
        "layout", "state", "frame", "history", "curves", "passes"
    }  # fmt: skip
    assert [kind for role, kind in kinds if role == "control"] == ["reply"]


def test_a_page_without_the_stream_is_told_everything_over_control(insp, browser):
    browser.sent.clear()
    browser.replies_to(
        insp, protocol.Hello(version=protocol.VERSION, streams=False, page="a", said=2)
    )
    insp.run()
    assert {role for role, _, _ in browser.sent} == {"control"}
    assert {"reply", "layout", "state", "frame"} <= {
        header["type"] for _, header, _ in browser.sent
    }
    browser.replies_to(
        insp, protocol.Hello(version=protocol.VERSION, streams=True, page="a", said=3)
    )
    browser.sent.clear()
    insp.run()
    assert {role for role, _, _ in browser.sent} == {"stream"}


def test_every_header_fits_its_type(insp, browser):
    insp.step(loss_fn, X)
    insp.perturb("a", nni.Scale(0.5))
    for _, header, _ in browser.sent:
        assert protocol.to_header(protocol.from_header(header)) == header


def test_a_click_selects_and_sends_that_sites_histogram(insp, browser):
    assert browser.replies_to(insp, protocol.Select(id=1, site="a")) == [
        {"type": "reply", "id": 1, "ok": True, "error": ""}
    ]
    assert insp.selected == "a"
    header, _ = browser.messages("frame")[-1]
    index = inside(insp).view.keys.index("a")
    assert [(h["site"], h["quantity"]) for h in header["histograms"]] == [(index, 0)]


def test_the_switch_in_the_browser_is_the_handle_in_python(insp, browser):
    insp.step(loss_fn, X)
    browser.replies_to(
        insp, protocol.Perturb(id=1, site="b", kind="Zero", strength=None, at="output")
    )
    handle = insp.perturbations[0]
    assert (handle.site, handle.enabled) == ("b", True)
    state = browser.messages("state")[-1][0]
    assert state["effect"]["perturbed"]["loss"] == 0.0
    adjust = protocol.Adjust(id=2, perturbation=handle.id, enabled=False, strength=None)
    assert browser.replies_to(insp, adjust)[0]["ok"]
    assert not handle.enabled
    assert browser.replies_to(insp, protocol.Remove(id=3, perturbation=handle.id))[0]["ok"]
    assert insp.perturbations == []


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (protocol.Select(id=9, site="c"), "'c' matches no site"),
        (
            protocol.Perturb(id=9, site="c", kind="Zero", strength=None, at="output"),
            "'c' matches no site",
        ),
        (
            protocol.Perturb(id=9, site="a", kind="Melt", strength=None, at="output"),
            "no perturbation 'Melt'",
        ),
        (
            protocol.Adjust(id=9, perturbation=4, enabled=True, strength=None),
            "number 4",
        ),
        ({"type": "select", "id": 9}, "lacks ['site']"),
        ({"type": "select", "id": 9, "site": 3}, "select.site must be str, got int"),
        ({"type": "melt", "id": 9}, "Unknown message type 'melt'"),
        ({"type": ["select"], "id": 9}, "Unknown message type ['select']"),
        ({"type": "frame", "id": 9}, "lacks"),
    ],
)
def test_a_bad_command_gets_one_readable_reply_and_changes_nothing(insp, browser, message, text):
    before = insp.selected, insp.perturbations
    replies = browser.replies_to(insp, message)
    assert len(replies) == 1
    assert replies[0]["id"] == 9
    assert not replies[0]["ok"]
    assert text in replies[0]["error"]
    assert (insp.selected, insp.perturbations) == before


@pytest.mark.parametrize("junk", [None, 3, "text", [], {}, {"type": None}, {"id": "x"}])
def test_junk_is_ignored(insp, browser, junk):
    receive(inside(insp).view.screen, junk)


def test_a_browser_that_does_not_draw_gets_few_frames_and_the_rest_is_counted(insp, model, browser):
    frames = len(browser.messages("frame"))
    train(insp, model, n=40, every=1)
    sent = len(browser.messages("frame")) - frames
    assert inside(insp).view.screen.dropped > 0
    assert sent + inside(insp).view.screen.dropped >= 40


# ------------------------------------------------------------------ bad input


def test_what_is_no_module_is_refused(browser):
    with pytest.raises(TypeError, match=r"model must be an nnx.Module, got dict"):
        nni.Inspector({}, X)


def test_texts_under_the_name_of_an_argument_are_said_to_go_to_the_model(browser):
    class Reads(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(5, 2, rngs=rngs)

        def __call__(self, tokens):
            return self.embed(tokens)

    with pytest.raises(TypeError, match="multiple values for argument 'tokens'") as raised:
        nni.Inspector(Reads(nnx.Rngs(0)), jnp.zeros((2, 3), int), tokens=list("abcde"))
    assert raised.value.__notes__ == [
        "nnx_inspector: tokens= takes the position, name or path of the argument that holds the "
        "ids, and needs decode=; it is list ['a', 'b', 'c', 'd', 'e']. So it went to the model. "
        "If it is not meant for the model, pass decode=tokenizer.decode too, and tokens=0 for the "
        "first argument."
    ]


def test_an_example_of_the_wrong_shape_names_the_site_and_leaves_the_model(model, browser):
    before = dict(vars(Net)), nnx.graphdef(model)
    with pytest.raises(TypeError) as caught:
        nni.Inspector(model, jnp.ones((2, 9)))
    assert "'a' (Linear) with inputs float32[2,9]" in caught.value.__notes__[0]
    assert (dict(vars(Net)), nnx.graphdef(model)) == before


def test_a_pass_that_raises_keeps_what_was_recorded(insp, model):
    recorded = len(insp.recording)
    before = dict(vars(Net)), nnx.graphdef(model)
    with pytest.raises(TypeError):
        insp.run(jnp.ones((2, 9)))
    with pytest.raises(ZeroDivisionError):
        insp.step(lambda m, x: 1 / 0, X)
    assert len(insp.recording) == recorded
    assert (dict(vars(Net)), nnx.graphdef(model)) == before
    insp.run(X)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda m, x: m(x), "must return a scalar"),
        (lambda m, x: None, "no array"),
        (lambda m, x: m(x).argmax(), "floating-point scalar, got int32"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(insp, loss, text):
    with pytest.raises(TypeError, match=text):
        insp.step(loss, X)


def test_a_site_that_is_not_there_names_the_closest(insp):
    with pytest.raises(ValueError, match=r"'nrom' matches no site.*'norm'"):
        insp.perturb("nrom", nni.Zero())
    with pytest.raises(ValueError, match=r"'nrom' matches no site.*'norm'"):
        insp.selected = "nrom"
    with pytest.raises(ValueError, match="closest sites are 'norm'"):
        insp.figure("nrom")


def test_a_method_that_only_leaves_out_is_named(insp):
    with pytest.raises(ValueError, match=r"with only=\['\*\*', ':encode'\]\.$"):
        insp.perturb(":encode", nni.Zero())
    with pytest.raises(ValueError, match=r"':decode' matches no site.*'b'\.$"):
        insp.perturb(":decode", nni.Zero())


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "10"])
def test_every_must_be_a_number_of_steps(insp, every):
    with pytest.raises(ValueError, match="every must be a number of steps"):
        insp.watch([X], every=every)


def test_one_loop_at_a_time(insp):
    first = insp.watch([X, X])
    next(first)
    with pytest.raises(nni.InspectorError, match="already watches a loop"):
        insp.watch([X])
    first.close()
    assert len(list(insp.watch([X]))) == 1


# ----------------------------------------------------------------- its life


def test_a_closed_inspector_says_so_and_keeps_its_recording(insp):
    insp.close()
    insp.close()
    assert insp.recording.summary("a").size == 24
    with pytest.raises(nni.InspectorError, match="was closed"):
        insp.run(X)


def held_by_ipywidgets() -> set[str]:
    """The ids of the widgets that ipywidgets keeps alive; its version 7 has another place."""
    from ipywidgets.widgets import widget

    # ipywidgets has no public list
    found = widget._instances if hasattr(widget, "_instances") else widget.Widget.widgets
    return set(found)


def test_close_frees_both_widgets_and_a_dropped_inspector_is_freed(model, browser):
    gc.collect()  # the inspectors of other tests
    before = held_by_ipywidgets()
    insp = nni.Inspector(model, X)
    assert len(held_by_ipywidgets() - before) == 4
    insp.close()
    assert held_by_ipywidgets() == before
    dropped = nni.Inspector(model, X)
    inside(dropped).diagnosis.wait()  # a thread that reads it keeps it alive meanwhile
    alive = weakref.ref(inside(dropped).core)
    del dropped
    gc.collect()
    assert alive() is None
    assert held_by_ipywidgets() == before


def test_an_inspector_that_is_dropped_while_it_perturbs_and_records_is_freed(model, tmp_path):
    dropped = nni.Inspector(model, X, display=False)
    dropped.save(tmp_path / "run.nni")
    dropped.perturb("", nni.Scale(0.5))
    dropped.run(X)
    for thread in threading.enumerate():  # one that works for it keeps it alive meanwhile
        if thread.name.startswith("nnx_inspector."):
            thread.join(60)
    alive = weakref.ref(inside(dropped).core)
    del dropped
    gc.collect()
    assert alive() is None


def test_two_inspectors_on_one_model(model, browser):
    first, second = nni.Inspector(model, X), nni.Inspector(model, X)
    handle = first.perturb("b", nni.Zero())
    assert not np.any(first.run(X))
    assert np.any(second.run(X))
    handle.remove()
    first.close()
    assert np.any(second.run(X))
    second.close()


def test_commands_may_arrive_on_any_thread_while_a_loop_runs(insp, model, browser):
    stop = threading.Event()

    def click():
        i = 0
        while not stop.is_set():
            if insp.perturbations:
                for handle in insp.perturbations:
                    browser.replies_to(insp, protocol.Remove(id=i, perturbation=handle.id))
            else:
                message = protocol.Perturb(id=i, site="a", kind="Scale", strength=0.5, at="output")
                browser.replies_to(insp, message)
            browser.replies_to(insp, protocol.Select(id=i, site="b"))
            i += 1

    thread = threading.Thread(target=click)
    thread.start()
    try:
        losses, traces = train(insp, model, n=60, every=3)
    finally:
        stop.set()
        thread.join()
    assert np.isfinite(losses).all()
    assert traces == 2
    assert all(header["ok"] for header, _ in browser.messages("reply"))


# -------------------------------------------------------------------- modes


def dropped(insp):
    """The number of values that Dropout set to zero, in each pass of the watched loop."""
    passes = [p for p in insp.recording.passes if p.kind == "watch"]
    found = [s for p in passes for site, q, s in p.items() if (site, q) == ("drop", "output")]
    assert len(found) == len(passes)
    assert all(s.size == 24 for s in found), "each pass is measured once"
    return [s.zeros for s in found]


def test_the_users_own_modes_may_change_while_a_loop_is_watched(insp, model):
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    traces = []

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(1)
        (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x)
        optimizer.update(model, grads)
        return loss

    for i, batch in enumerate(insp.watch([X] * 8, every=1)):
        (model.eval if i % 2 else model.train)()
        step(model, optimizer, batch)
    assert [count == 0 for count in dropped(insp)] == [i % 2 == 1 for i in range(8)]
    assert len(traces) == 2, "one program in each mode"


def test_modes_are_for_inspected_passes_not_for_the_watched_loop(insp, model):
    insp.modes.eval()
    twin, steps = nnx.clone(model), []
    for i, batch in enumerate(insp.watch([X] * 4, every=2)):
        if i == 2:
            insp.modes.set(nnx.Dropout, deterministic=False)
        steps.append(np.asarray(nnx.jit(lambda m, x: m(x))(model, batch)))
        calls = inside(insp).core.trace.calls
    bare = [np.asarray(nnx.jit(lambda m, x: m(x))(twin, X)) for _ in range(4)]
    np.testing.assert_allclose(steps, bare, rtol=1e-5, atol=1e-6)
    assert [c.site for c in calls] == ["", "a", "norm", "drop", "b"]
    assert len(dropped(insp)) == 2
    assert all(dropped(insp))


def test_switching_a_mode_shows_the_pass_again(insp, model):
    assert insp.recording.summary("drop").zeros > 0
    insp.modes.eval()
    assert insp.recording.summary("drop").zeros == 0
    insp.step(loss_fn, X)
    insp.modes.reset()
    assert insp.recording.passes[-1].kind == "step"
    assert insp.recording.summary("drop").zeros > 0
    assert repr(insp.modes).count("False") == 4


def test_a_loss_that_sets_modes_itself_has_the_last_word(insp, model):
    def setting(model, x):
        model.set_attributes(deterministic=True)
        return (model(x) ** 2).mean()

    copy = nnx.clone(model)
    wanted = float(setting(copy, X))
    insp.modes.train()
    np.testing.assert_allclose(insp.step(setting, X), wanted, rtol=1e-5)
    assert insp.recording.summary("drop").zeros == 0
    assert not model.drop.deterministic


# ------------------------------------------- passes of our own inside a loop


def test_a_pass_made_inside_a_watched_loop_is_not_counted_as_the_loops(insp, model):
    model.eval()
    insp.perturb("b", nni.Scale(0.5))
    forward = nnx.jit(lambda m, x: m(x))
    with nni.perturb("b", nni.Scale(0.5)):
        halved = np.asarray(forward(nnx.clone(model), X))
    for i, batch in enumerate(insp.watch([X] * 3, every=1)):
        forward(model, batch)
        if i == 1:
            np.testing.assert_allclose(insp.run(X), halved, rtol=1e-5, atol=1e-6)
            insp.step(loss_fn, X)
            insp.modes.train()
    assert dropped(insp) == [0, 0, 0], "each with the values of one call"
    watched = [p for p in insp.recording.passes if p.kind == "watch"]
    assert [{q for _, q, _ in p.of_sites.items()} for p in watched] == [{"output"}] * 3


def test_a_step_that_was_compiled_ahead_of_time_is_told(insp, model):
    compiled = nnx.jit(lambda m, x: m(x)).lower(model, X).compile()

    def loop():
        for batch in insp.watch([X] * 2, every=1):
            compiled(model, batch)

    with pytest.warns(nni.InspectorWarning, match="compiled ahead of time"):
        loop()
    texts = inside(insp).notices
    assert sum("The loop calls a program that was compiled ahead" in text for text in texts) == 1


def test_equal_models_one_after_the_other_leave_no_programs_of_our_arithmetic_behind():
    def kept() -> int:
        gc.collect()
        return sum(type(one) is jax.extend.core.Jaxpr for one in gc.get_objects())

    def look() -> None:
        model = Net(nnx.Rngs(0))
        model.eval()
        insp = nni.Inspector(model, X, display=False)
        insp.step(loss_fn, X)
        insp.close()

    counts = []
    for _ in range(4):
        look()
        counts.append(kept())
    # jax caches the traces of each model's own code (such as tanh and mean)
    assert max(counts[3] - counts[2], counts[2] - counts[1]) <= 60, counts
