"""The values of one site of a steered run: those of the step that is named with them."""

from __future__ import annotations

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_browser import FakeBrowser
from flax import nnx
from inside import clicks_of, shown_of, snapshot_of
from models import Cond, Ensemble, Stacked, TwoLayers, While
from training_thread import TrainingThread, X, forward

import nnx_inspector as nni
from nnx_inspector.errors import InspectorError
from nnx_inspector.findings import facts
from nnx_inspector.inspector.script import values as requests
from nnx_inspector.inspector.script import watch as script
from nnx_inspector.live.programs import traced_program
from nnx_inspector.recordings import follow
from nnx_inspector.screen import protocol
from nnx_inspector.screen import run as runs
from nnx_inspector.screen.control import folder

SELDOM = 1_000_000
"""So that no step is measured but those that somebody asks for, and the first."""


class Asked:
    """A script, and its run as another process sees it."""

    def __init__(self, path, model=None, step=None, **how):
        model = model or TwoLayers(nnx.Rngs(0))
        self.model = nnx.clone(model)  # nnx takes the attributes of the other out meanwhile
        self.script = TrainingThread(path, model, step, **{"every": SELDOM, **how})
        self.run = nni.open(path, display=False)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        assert self.script.end() == []
        self.run.close()


def double(x):
    return np.asarray(x, np.float64)


def linear(module, x, row=()):
    return x @ double(module.kernel[...][row]) + double(module.bias[...][row])


def each_step(number):
    """Another input in each step, so that values of one are no other's."""
    return jnp.sin(X + number)


train = nnx.jit(lambda model, x: nnx.value_and_grad(lambda model: (model(x) ** 2).sum())(model)[0])


@pytest.mark.parametrize("program", [forward, train], ids=["forward", "with gradients"])
def test_values_are_those_of_their_step(tmp_path, program):
    step = lambda model, number: program(model, each_step(number))  # noqa: E731
    with Asked(tmp_path / "run.nni", step=step) as asked:
        model = asked.model
        for site in ("a", "b", ""):
            found = asked.run.values(site)
            first = linear(model.a, double(each_step(found.step)))
            wanted = first if site == "a" else linear(model.b, np.tanh(first))
            np.testing.assert_allclose(found.value, wanted, atol=2e-6)
            assert found.value.dtype == np.float32
            assert found.shown.source == f"Step {found.step} of the run."
        # the page shows these one after another
        done = [text for _, text in asked.run._control.done]
        assert done == ["run.values('a')", "run.values('b')", "run.values('')"]
        assert asked.run.recording.steps == [0]  # what is measured stays as it was


def test_a_model_that_is_not_jitted(tmp_path):
    with Asked(tmp_path / "run.nni", step=lambda model, number: model(each_step(number))) as asked:
        found = asked.run.values("a")
        wanted = linear(asked.model.a, double(each_step(found.step)))
        np.testing.assert_allclose(np.asarray(found), wanted, atol=2e-6)


def test_bfloat16_comes_as_the_numbers_that_it_is(tmp_path):
    model = TwoLayers(nnx.Rngs(0))
    model.b = nnx.Linear(4, 2, dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
    with Asked(tmp_path / "run.nni", model) as asked:
        found = asked.run.values("b")
    assert found.shown.arrays[0].dtype == "bfloat16"
    assert found.value.dtype == np.float32
    np.testing.assert_array_equal(found.value, np.asarray(forward(model, X)).astype(np.float32))


class Both(nnx.Module):
    def __call__(self, x):
        return {"plus": x + 1, "minus": x - 1}


class Twice(nnx.Module):
    def __init__(self, rngs):
        self.a, self.both = nnx.Linear(3, 3, rngs=rngs), Both()

    def __call__(self, x):
        return self.a(self.both(self.a(x))["plus"])


def test_each_call_and_each_array_has_its_own(tmp_path):
    with Asked(tmp_path / "run.nni", Twice(nnx.Rngs(0))) as asked:
        found, both = asked.run.values("a"), asked.run.values("both")
        module = asked.model.a
    first = linear(module, double(X))
    (one, other), (named,) = found.calls, both.calls
    np.testing.assert_allclose(one[""], first, atol=2e-6)
    np.testing.assert_allclose(other[""], linear(module, first + 1), atol=2e-6)
    np.testing.assert_allclose(named["plus"], first + 1, atol=2e-6)
    np.testing.assert_allclose(named["minus"], first - 1, atol=2e-6)
    with pytest.raises(InspectorError, match=r"returned 2 arrays in step .*: call 0, call 1"):
        _ = found.value


@pytest.mark.parametrize("remat", [False, True])
def test_layers_of_a_scan_are_rows(tmp_path, remat):
    model = Stacked(nnx.Rngs(0), remat=remat)
    insp = nni.Inspector(model, X, display=False)
    wanted = np.asarray(insp.values("blocks"))
    insp.close()
    with Asked(tmp_path / "run.nni", model) as asked:
        found, layer = asked.run.values("blocks"), asked.run.values("blocks[1]")
        with pytest.raises(InspectorError, match=r"is not a layer: the site has \[3\]"):
            asked.run.values("blocks[3]")
    assert found.shown.arrays[0].axes == ("layer", "batch", "feature")
    assert layer.shown.arrays[0].axes == ("batch", "feature")
    np.testing.assert_allclose(found.value, wanted, atol=1e-6)
    np.testing.assert_allclose(layer.value, wanted[1], atol=1e-6)


@pytest.mark.parametrize("apart", ["without an attribute", "not read"])
def test_layers_are_rows_while_nnx_has_the_model_apart(tmp_path, monkeypatch, apart):
    model, asked_for = Stacked(nnx.Rngs(0)), []
    torn = nnx.clone(model)
    del torn.blocks

    def shapes_of(one):
        asked_for.append(one)
        if len(asked_for) > 1 and apart == "not read":
            raise ValueError
        return facts.shapes_of(one if len(asked_for) == 1 else torn)

    monkeypatch.setattr(script, "shapes_of", shapes_of)
    with Asked(tmp_path / "run.nni", model) as asked:
        found = asked.run.values("blocks")
    assert found.shown.arrays[0].axes == ("layer", "batch", "feature")
    assert len(asked_for) > 1


def test_members_and_vmaps_are_axes(tmp_path):
    with Asked(tmp_path / "run.nni", Ensemble(nnx.Rngs(0))) as asked:
        found = asked.run.values("members")
        members = asked.model.members
    wanted = np.stack([linear(members, double(X), row) for row in range(2)])
    np.testing.assert_allclose(found.value, wanted, atol=2e-6)


def test_one_example_of_a_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(requests, "MOST_BYTES", 40)
    with Asked(tmp_path / "run.nni") as asked:
        with pytest.raises(InspectorError) as told:
            asked.run.values("a")
        assert "'a' returns float32[5,4]" in str(told.value)
        assert "run.values('a', example=0)" in str(told.value)
        found = asked.run.values("a", example=3)
        wanted = linear(asked.model.a, double(X[3:4]))
        np.testing.assert_allclose(found.value, wanted, atol=2e-6)
        with pytest.raises(InspectorError, match=r"float32\[5,4\], which has no example 5"):
            asked.run.values("a", example=5)
        np.testing.assert_array_equal(asked.run.values("b").value.shape, (5, 2))


def test_what_has_no_values_says_why(tmp_path):
    with Asked(tmp_path / "while.nni", While(nnx.Rngs(0))) as asked:
        with pytest.raises(InspectorError, match="cannot leave the loop"):
            asked.run.values("linear")
        with pytest.raises(InspectorError, match=r"no site 'linaer'.*The closest are 'linear'"):
            asked.run.values("linaer")
        with pytest.raises(InspectorError, match="0 or more, got -1"):
            asked.run.values("linear", example=-1)
    positive = np.asarray(X).sum() > 0
    with Asked(tmp_path / "cond.nni", Cond(nnx.Rngs(0))) as asked:
        with pytest.raises(InspectorError, match=r"in a branch that step .* did not take"):
            asked.run.values("negative" if positive else "positive")
        found = asked.run.values("positive" if positive else "negative")
    taken = asked.model.positive if positive else asked.model.negative
    np.testing.assert_allclose(found.value, linear(taken, double(X)), atol=2e-6)


@pytest.mark.parametrize("count", [7, 200], ids=["all kept", "some kept"])
def test_passes_that_one_program_makes(tmp_path, count):
    """Of more passes than it keeps a program has the values of some."""

    @nnx.jit
    def several(model, first):
        return nnx.scan(lambda model, n: model(each_step(n)), in_axes=(None, 0), out_axes=0)(
            model, first + jnp.arange(count)
        )

    def step(model, number):
        return several(model, count * number)[0]

    with Asked(tmp_path / "run.nni", step=step) as asked:
        for _ in range(2):
            found = asked.run.values("a")
            wanted = linear(asked.model.a, double(each_step(found.step)))
            np.testing.assert_allclose(found.value, wanted, atol=2e-6)


class OddLayers(nnx.Module):
    """Layers of a scan of which every second one takes place."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=0)
        def make(rngs):
            return nnx.Linear(3, 3, rngs=rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        def one(layer, x, number):
            return nnx.cond(number % 2 == 1, lambda m, x: m(x), lambda m, x: x, layer, x)

        scan = nnx.scan(one, in_axes=(0, nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(self.layers, x, jnp.arange(4))


def test_a_layer_that_did_not_take_place_has_no_values(tmp_path):
    with Asked(tmp_path / "run.nni", OddLayers(nnx.Rngs(0))) as asked:
        layers = asked.model.layers
        x = linear(layers, double(X), 1)
        np.testing.assert_allclose(asked.run.values("layers[1]").value, x, atol=2e-6)
        with pytest.raises(InspectorError, match=r"in a branch that step .* did not take"):
            asked.run.values("layers[2]")
        found = asked.run.values("layers")
    wanted = np.stack([0 * x, x, 0 * x, linear(layers, x, 3)])
    np.testing.assert_allclose(found.value, wanted, atol=2e-6)
    assert found.shown.notes == ("Call 0 did not take place in some iterations, which show zeros.",)


class Idle(TwoLayers):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.idle = nnx.Linear(3, 3, rngs=rngs)


def test_a_site_that_is_not_called(tmp_path):
    with Asked(tmp_path / "run.nni", Idle(nnx.Rngs(0))) as asked:
        with pytest.raises(InspectorError, match=r"'idle' was not called in steps \d+ to \d+"):
            asked.run.values("idle")
        assert asked.run.values("a").value.shape == (5, 4)


def test_several_requests_at_once_are_answered_one_by_one(tmp_path):
    found = {}
    with Asked(tmp_path / "run.nni") as asked:
        sites = ["a", "b", "a", ""]
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: read(asked, sites[i])}))
            for i in range(len(sites))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    shapes = [found[i].value.shape for i in range(len(sites))]
    assert shapes == [(5, 4), (5, 2), (5, 4), (5, 2)]
    assert len({one.step for one in found.values()}) == len(sites)


def read(asked, site):
    """The values, by a reader of its own."""
    run = nni.open(asked.script.path, display=False)
    try:
        return run.values(site)
    finally:
        run.close()


def test_more_requests_than_wait_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(requests, "MOST_WAITING", 0)
    with (
        Asked(tmp_path / "run.nni") as asked,
        pytest.raises(InspectorError, match="requests for values wait"),
    ):
        asked.run.values("a")


class Gate:
    """Steps that wait until they are let through."""

    def __init__(self):
        self.free = threading.Event()
        self.free.set()
        self.waits = threading.Event()

    def step(self, model, number):
        if not self.free.is_set():
            self.waits.set()
            assert self.free.wait(60)
        return forward(model, X)


def test_a_run_that_makes_no_step_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "STALL_TIMEOUT", 0.0)
    monkeypatch.setattr(follow, "_STALLED", 0.0)  # no wait for the real limit
    gate = Gate()
    with Asked(tmp_path / "run.nni", step=gate.step) as asked:
        gate.free.clear()
        assert gate.waits.wait(60)
        with pytest.raises(InspectorError, match="has made no step since it was asked"):
            asked.run.values("a")
        gate.free.set()


def test_a_run_that_ends_meanwhile_says_so(tmp_path):
    gate, failed = Gate(), []
    with Asked(tmp_path / "run.nni", step=gate.step) as asked:
        gate.free.clear()
        assert gate.waits.wait(60)

        def ask():
            try:
                asked.run.values("a")
            except InspectorError as error:
                failed.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        asked.script._over = True  # as if its thread had ended just then
        gate.free.set()
        thread.join()
        with pytest.raises(InspectorError, match="takes no requests"):
            asked.run.values("a")
    assert failed == [] or "has not answered" in failed[0] or "takes no requests" in failed[0]


def test_a_perturbation_that_is_on_is_in_the_values(tmp_path):
    with Asked(tmp_path / "run.nni") as asked:
        asked.run.perturb("a", nni.Scale(2.0))
        model = asked.model
        wanted = 2 * linear(model.a, double(X))
        asked.script.wait_for(linear(model.b, np.tanh(wanted)))
        found = asked.run.values("a")
        assert found.shown.perturbed
        np.testing.assert_allclose(found.value, wanted, atol=4e-6)


def test_programs_are_the_same_as_without_control(tmp_path, monkeypatch):
    """Nothing is kept, and no program is another, as long as nobody asks."""
    texts, edit = [], traced_program.instrument

    def noted(*args, **how):
        new = edit(*args, **how)
        text = re.sub(r"\('watch', \d+\)", "session", str(new.jaxpr))
        texts[-1].append(re.sub(r"'of', \(\(\d+,", "'of', ((pass,", text))
        return new

    monkeypatch.setattr(traced_program, "instrument", noted)
    step = nnx.jit(lambda model, x: nnx.value_and_grad(lambda m: (m(x) ** 2).sum())(model)[0])
    for control in (False, True):
        texts.append([])
        model = TwoLayers(nnx.Rngs(0))
        with nni.watch(model, every=2, save=tmp_path / f"{control}.nni", control=control):
            for _ in range(4):
                jax.block_until_ready(step(model, X))
    assert texts[0]
    assert texts[0] == texts[1]


# ------------------------------------------------------------------ on screen


def test_the_panel_shows_them(tmp_path, monkeypatch):
    browser = FakeBrowser(monkeypatch)
    with Asked(tmp_path / "run.nni") as asked:
        run = asked.run
        assert "values" not in snapshot_of(run)["recorded"].missing

        def ask(message):
            return browser.ask_screen(shown_of(run).screen, clicks_of(run), message)

        ask(protocol.ShowValues(id=1, site="a", part="output", clean=False))
        ((shown, _),) = browser.messages("arrays")
        (held,) = shown["arrays"]
        wanted = linear(asked.model.a, double(X))
        window = {"index": (0, 0), "axes": (-1, 0, 1), "starts": (0, 0, 0), "ends": (1, 5, 4)}
        how = {"most": (1, 8, 8), "norm_over": -1, "component": "value", "exact": False}
        request = protocol.ReadValues(id=2, array=held["number"], **window, **how)
        ask(request)
        ((values, buffer),) = browser.messages("values")
        found = np.frombuffer(buffer, "<f4", 20).reshape(values["counts"])
        np.testing.assert_allclose(found[0], wanted, atol=2e-6)
        for refused, why in (
            (protocol.ShowValues(id=3, site="a", part="input", clean=False), "only the output"),
            (protocol.ShowValues(id=4, site="a", part="output", clean=True), "only the output"),
            (protocol.ReadValues(id=5, array=99, **window, **how), "no longer here"),
        ):
            assert why in ask(refused)[-1][0]["error"]


def test_a_run_without_control_needs_the_model(tmp_path):
    with Asked(tmp_path / "run.nni", control=False) as asked:
        assert "values" in snapshot_of(asked.run)["recorded"].missing
        with pytest.raises(InspectorError, match="takes no requests"):
            asked.run.values("a")


# ------------------------------------------------------------------- the file


def test_files_that_nobody_reads_do_not_pile_up(tmp_path):
    made = folder.create_folder(tmp_path / "run.nni")
    for number in range(20):
        folder.write_values(made, number, b"x")
    assert len(list((tmp_path / "run.nni.control").iterdir())) == folder.MOST_VALUES
