"""Reports on whether a watched loop calls the model and where it is perturbed: text and time."""

import copy
import re
import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside
from models import TwoLayers
from reused_model import ReusedModel
from training import loss_of

import nnx_inspector as nni

X = jnp.ones((2, 3))


forward = nnx.jit(loss_of)
backward = nnx.jit(lambda model, x: nnx.value_and_grad(loss_of)(model, x)[0])
only_a = nnx.jit(lambda model, x: model.a(x).mean())


@pytest.fixture(scope="module")
def model():
    reused = ReusedModel(TwoLayers(nnx.Rngs(0)), X)
    yield reused.model
    reused.close()


@pytest.fixture
def insp(model):
    inspector = nni.Inspector(model, X, display=False)
    yield inspector
    inspector.close()


def told(run):
    """The InspectorWarnings of a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert all(one.category is nni.InspectorWarning for one in caught), caught
    assert all(one.filename == __file__ for one in caught), [one.filename for one in caught]
    return [str(one.message) for one in caught]


def loop(insp, step, count=4, every=1):
    def run():
        for i in insp.watch(range(count), every=every):
            step(i)

    return told(run)


def watched(recording):
    return [one.step for one in recording.passes if one.kind == "watch"]


def uncalled(findings):
    return [one for one in findings if one.rule == "uncalled"]


# ------------------------------------------------------------ the wrong object


def two_splits(model):
    """Of two trees that were split before, nothing says which is the model."""
    graphdef, state = nnx.split(model)
    state, twin = (jax.tree.map(jnp.copy, state) for _ in range(2))

    @jax.jit
    def both(state, twin, x):
        return nnx.merge(graphdef, state)(x) + nnx.merge(graphdef, twin)(x)

    return lambda _: both(state, twin, X)


def ahead_of_time(model):
    compiled = forward.lower(model, X).compile()
    return lambda _: compiled(model, X)


def ahead_of_time_within(model):
    return lambda _: forward.lower(model, X).compile()(model, X)


def exported(model):
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    pure = lambda leaves, x: nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))(x)  # noqa: E731
    function = jax.export.export(jax.jit(pure))(leaves, X)
    return lambda _: function.call(leaves, X)


def of_a_clone(model):
    clone = nnx.clone(model)
    return lambda _: forward(clone, X)


INSTEAD = {
    "a clone": (of_a_clone, "3 calls of modules of another TwoLayers were seen", "insp.update"),
    "two splits": (two_splits, "two trees of its structure", "split the model inside"),
    "an executable": (ahead_of_time, "compiled ahead of time", "call the jitted function"),
    "an executable of the loop": (ahead_of_time_within, "compiled ahead of time", "itself"),
    "an exported function": (exported, "was exported", "call the jitted function"),
    "nothing": (lambda model: lambda _: None, "no call of any module", "own thread"),
}


@pytest.mark.parametrize(("make", "what", "advice"), INSTEAD.values(), ids=INSTEAD)
def test_the_wrong_object_is_told_once_and_nothing_empty_is_recorded(
    insp, model, make, what, advice, tmp_path
):
    before = len(insp.recording)
    insp.save(tmp_path / "run.nni")
    (text,) = loop(insp, make(model))
    assert re.match(r"None of the \d measured steps( so far)? called the TwoLayers that", text)
    assert what in text
    assert advice in text
    assert len(insp.recording) == before
    (finding,) = uncalled(insp.findings)
    assert (finding.severity, finding.site, finding.step) == ("error", "", 0)
    assert what in finding.message
    assert insp.findings[0] == finding
    assert uncalled(nni.diagnose(nni.load(tmp_path / "run.nni"))) == [finding]
    assert loop(insp, lambda _: forward(model, X)) == []
    assert uncalled(insp.findings) == []
    assert uncalled(nni.diagnose(nni.load(tmp_path / "run.nni"))) == []
    assert len(watched(insp.recording)) == 4


def another(model):
    return TwoLayers(nnx.Rngs(1))


WAYS = {
    "jax.jit": lambda copied: jax.jit(lambda model, x: model(x))(copied, X),
    "eager": lambda copied: copied(X),
    "nnx.jit": lambda copied: forward(copied, X),
    "split": lambda copied: jax.jit(lambda s, x: nnx.merge(nnx.graphdef(copied), s)(x))(
        nnx.state(copied), X
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("copied", [copy.deepcopy, nnx.clone, another])
def test_a_copy_made_within_a_loop_is_not_the_model(insp, model, copied, way):
    """Within a `jax.jit` a deep copy was taken for the model: its graphdef had lost the tag."""
    plain = way(copied(model))
    insp.perturb("", nni.Scale(2.0))
    outputs = []
    texts = loop(insp, lambda _: outputs.append(way(copied(model))))
    assert any("another TwoLayers" in text or "of a TwoLayers" in text for text in texts)
    assert watched(insp.recording) == []
    for output in outputs:
        np.testing.assert_array_equal(output, plain)


def test_a_receiver_that_is_some_passes_behind_misses_no_call(insp, model):
    """It was said that the loop does not call the model, when a perturbation was switched on."""
    handle = insp.perturb("a", nni.Scale(2.0))
    handle.enabled = False

    def run():
        with insp.watch(every=1):
            with inside(insp).core.lock:  # which the receiver needs to record a pass
                for _ in range(30):
                    forward(model, X)
                handle.enabled = True

    assert told(run) == []
    assert watched(insp.recording) == list(range(30))


def test_a_long_loop_is_told_while_it_runs(insp, model):
    step, heard = of_a_clone(model), []

    def noted(i):
        step(i)
        heard.append(len(uncalled(insp.findings)))

    assert len(loop(insp, noted, count=60, every=10)) == 1
    assert heard.index(1) == 21  # after step 20, the third measured step


@pytest.mark.parametrize("every", [1, 3])
def test_a_model_that_is_called_now_and_then_is_not_missed(insp, model, every):
    clone = nnx.clone(model)

    def step(i):
        forward(clone, X)
        if i % 9 == 6:
            forward(model, X)

    assert loop(insp, step, count=25, every=every) == []
    assert watched(insp.recording) == [6, 15, 24]
    assert uncalled(insp.findings) == []


def test_a_model_that_is_replaced_in_a_loop_is_told(insp, model):
    clone = of_a_clone(model)
    (text,) = loop(insp, lambda i: forward(model, X) if i < 3 else clone(i), count=26)
    assert text.startswith("None of the 21 measured steps since step 2 called the TwoLayers")
    assert watched(insp.recording) == [0, 1, 2]
    assert len(uncalled(insp.findings)) == 1


@pytest.mark.parametrize("tick", [False, True])
def test_a_region_tells_it_when_it_is_left(insp, model, tick):
    step, before = of_a_clone(model), len(insp.recording)

    def run():
        with insp.watch(every=1):
            for i in range(3):
                if tick:
                    insp.tick()
                step(i)

    (text,) = told(run)
    assert "another TwoLayers" in text
    assert len(insp.recording) == before
    assert len(uncalled(insp.findings)) == 1


def test_a_program_that_cannot_be_read_is_no_model_that_is_not_called(insp, model, monkeypatch):
    def planted(*_):
        raise ValueError("planted")

    monkeypatch.setattr("nnx_inspector.program.instrument.measure_updates", planted)
    step = nnx.jit(lambda model, x: nnx.value_and_grad(loss_of)(model, x)[0] + 0)  # traced anew
    losses = []
    text = " ".join(loop(insp, lambda _: losses.append(float(step(model, X)))))
    assert "None of the 3 measured steps so far could be measured; the program could" in text
    assert "ValueError: planted" in text
    assert "called the TwoLayers" not in text
    assert losses == [float(loss_of(model, X))] * 4
    assert watched(insp.recording) == []


def test_a_region_without_a_screen_tells_it(model, tmp_path):
    step = of_a_clone(model)
    found = []

    def run():
        with nni.watch(model, every=1, save=tmp_path / "run.nni") as recording:
            found.append(recording)
            step(0)

    (text,) = told(run)
    assert "another TwoLayers" in text
    assert "nni.watch(model=that)" in text
    assert len(found[0]) == 0
    assert len(uncalled(nni.diagnose(found[0]))) == 1
    assert len(uncalled(nni.diagnose(nni.load(tmp_path / "run.nni")))) == 1


def test_a_loop_that_fails_says_only_what_it_raises(insp, model):
    def run():
        with pytest.raises(ValueError, match="mine"), insp.watch(every=1):
            raise ValueError("mine")

    assert told(run) == []


# ----------------------------------------------------------- perturbations


def shown(insp):
    return [one.not_acting for one in inside(insp).state.perturbations]


@pytest.mark.parametrize("name", ["a clone", "two splits", "an executable"])
def test_a_perturbation_of_another_object_is_not_acting_until_the_model_is_called(
    insp, model, name
):
    make, what, _ = INSTEAD[name]
    step, handle = make(model), insp.perturb("a", nni.Zero())
    assert handle.not_acting == ""
    texts = loop(insp, step)
    assert [text.startswith("Zero on 'a' is not acting") for text in texts] == [False, True]
    assert what in handle.not_acting
    assert what in texts[1]
    assert shown(insp) == [handle.not_acting]
    assert "not acting here" in repr(handle)
    assert loop(insp, lambda _: forward(model, X)) == []
    assert handle.not_acting == ""
    assert shown(insp) == [""]
    assert "on)" in repr(handle)


CASES = {
    "a site that is not called": ("b", nni.Zero(), only_a, "no call of its site was seen"),
    "a place that is not called": (
        "b",
        nni.Clamp(-1.0, 1.0),
        only_a,
        "no call of its site was seen",
    ),
    "parameters": ("a", nni.ParameterNoise(0.1), forward, ""),
    "no gradients": ("a", nni.StopGradient(), forward, "computes no gradients"),
    "a row": ("a", nni.Zero(), forward, ""),
    "a place": ("a", nni.Clamp(-1.0, 1.0), forward, ""),
    "gradients": ("a", nni.StopGradient(), backward, ""),
    "one of several": ("**", nni.Scale(0.5), only_a, ""),
}


@pytest.mark.parametrize(("site", "kind", "step", "why"), CASES.values(), ids=CASES)
def test_each_way_of_not_acting_is_told_on_the_handle_and_once_as_a_warning(
    insp, model, site, kind, step, why
):
    handle = insp.perturb(site, kind)
    texts = loop(insp, lambda _: step(model, X))
    assert bool(handle.not_acting) == bool(why)
    assert why in handle.not_acting
    assert len(texts) == bool(why)
    assert all(why in text for text in texts)
    handle.enabled = False
    assert handle.not_acting == ""
    assert loop(insp, lambda _: step(model, X)) == []


def test_a_pass_of_ones_own_tells_what_does_not_act_in_it(insp):
    gradient, zero = insp.perturb("a", nni.StopGradient()), insp.perturb("b", nni.Zero())
    insp.run(X)
    assert "insp.step(loss_fn, batch)" in gradient.not_acting
    assert zero.not_acting == ""
    insp.step(lambda model, x: model.a(x).sum(), X)
    assert gradient.not_acting == ""
    assert zero.not_acting == "the last step does not call it"


def test_a_dropped_gradient_is_told(insp, model):
    @nnx.jit
    def step(model, x):
        def loss_of(model, x):
            return (model.b(jax.lax.stop_gradient(model.a(x))) ** 2).mean()

        return nnx.value_and_grad(loss_of)(model, x)[0]

    stopped = insp.perturb("a", nni.ScaleGradient(2.0))
    passed = insp.perturb("b", nni.ScaleGradient(2.0))
    loop(insp, lambda _: step(model, X))
    assert "no gradient reaches" in stopped.not_acting
    assert passed.not_acting == ""


def test_a_site_in_a_while_loop_is_perturbed_though_it_is_not_seen(insp, model):
    @nnx.jit
    def step(model, x):
        return jax.lax.fori_loop(0, jnp.int32(x.sum()), lambda _, y: y + model.a(x).sum(), 0.0)

    results = []
    insp.perturb("a", nni.Zero())
    loop(insp, lambda _: results.append(float(step(model, X))))
    assert results == [0.0] * 4
    assert shown(insp) == [""]


def test_a_switch_that_acts_again_says_so_within_one_loop(insp, model):
    split, handle, seen = two_splits(model), insp.perturb("a", nni.Zero()), []

    def step(i):
        seen.append(bool(handle.not_acting))
        if i < 5:
            split(i)
        else:
            forward(model, X)

    loop(insp, step, count=9)
    assert seen[:6] == [False, *[True] * 5]
    assert seen[7:] == [False] * 2  # what step 5 did is known before step 7 begins
