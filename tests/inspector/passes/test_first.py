"""The first pass: made in a thread once it is wanted, or not at all if something else came first.

A job that waits for an event holds the thread, so that each test decides what happens before it.
"""

import gc
import json
import os
import signal
import subprocess
import sys
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

import nnx_inspector as nni
from nnx_inspector.inspector.passes import rerun
from nnx_inspector.screen import presenter

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)


class Begun:
    """An inspector whose first pass is wanted, and waits for `let_go`."""

    def __init__(self, model):
        self.gate, held = threading.Event(), threading.Event()
        self.model, self.insp = model, nni.Inspector(model, X, display=False)
        inside(self.insp).arming.submit(lambda: (held.set(), self.gate.wait()))
        held.wait()
        inside(self.insp).rerun.start_first()

    def let_go(self):
        self.gate.set()
        inside(self.insp).rerun.wait()

    @property
    def kinds(self):
        return [one.kind for one in inside(self.insp).core.recording.passes]

    @property
    def waiting(self):
        return inside(self.insp).waiting


@pytest.fixture
def begun():
    one = Begun(TwoLayers(nnx.Rngs(0)))
    yield one
    one.let_go()
    one.insp.close()


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def test_an_example_of_shapes_has_none_and_says_what_to_pass():
    model = TwoLayers(nnx.Rngs(0))
    insp = nni.Inspector(model, jax.ShapeDtypeStruct(X.shape, X.dtype), display=False)
    inside(insp).rerun.start_first()
    assert inside(insp).waiting == []
    with pytest.raises(nni.InspectorError, match=r"such as float32\[4,3\].* insp\.run\(x\)"):
        _ = insp.findings
    np.testing.assert_allclose(insp.run(X), model(X), rtol=1e-6)
    assert insp.findings == []
    insp.close()


def test_it_is_not_made_before_a_figure_is_read():
    model = TwoLayers(nnx.Rngs(0))
    with Compilations() as compiled:
        insp = nni.Inspector(model, X, display=False)
        assert "compile" not in compiled.kinds
        assert len(insp.trace.calls) == 3
    assert not inside(insp).arming.busy
    assert insp.recording.summary("a").size
    assert len(insp.recording) == 1
    insp.close()


@pytest.mark.parametrize(
    "read",
    [
        lambda insp, _: insp.findings,
        lambda insp, path: insp.save(path / "run.nni"),
        lambda insp, path: insp.to_html(path / "run.html"),
        lambda insp, _: insp.compare(nni.capture(insp.model)(X)[1]),
    ],
    ids=["findings", "save", "to_html", "compare"],
)
def test_what_reads_a_figure_makes_it(inspect, read, tmp_path):
    insp = inspect(TwoLayers(nnx.Rngs(0)), X)
    read(insp, tmp_path)
    assert len(inside(insp).core.recording) == 1


def test_it_is_compiled_and_run_in_the_thread_and_says_what_it_waits_for(begun):
    assert begun.waiting == ["compiling the first pass"]
    with Compilations() as compiled:
        begun.let_go()
    assert "compile" in compiled.kinds
    assert set(compiled.threads) == {"nnx_inspector.arming"}
    assert begun.kinds == ["run"]
    assert begun.waiting == []
    assert set(inside(begun.insp).core.meter.waited) == {"tree_seconds", "pass_seconds"}


def test_a_model_that_changes_meanwhile_is_shown_as_it_was(begun):
    norm = jnp.linalg.norm(begun.model(X))
    begun.model.b.bias[...] += 100.0
    begun.let_go()
    assert begun.insp.recording.summary("b").norm == pytest.approx(float(norm), rel=1e-5)


def test_a_new_model_is_the_one_that_is_shown(begun):
    new = TwoLayers(nnx.Rngs(1))
    begun.insp.update(new)
    begun.let_go()
    norm = jnp.linalg.norm(new(X))
    assert begun.insp.recording.summary("b").norm == pytest.approx(float(norm), rel=1e-5)


def test_a_perturbation_that_comes_meanwhile_acts_in_it(begun):
    begun.insp.perturb("b", nni.Scale(2.0))
    norm = 2 * jnp.linalg.norm(begun.model(X))
    begun.let_go()
    assert begun.insp.recording.summary("b").norm == pytest.approx(float(norm), rel=1e-5)
    assert begun.kinds == ["run"]


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (lambda insp: insp.run(), "run"),
        (lambda insp: insp.step(loss_fn, X), "step"),
        (lambda insp: [loss_fn(insp.model, x) for x in insp.watch([X], every=1)], "watch"),
    ],
    ids=["run", "step", "watch"],
)
def test_what_comes_first_takes_its_place(begun, first, kind):
    first(begun.insp)
    begun.let_go()
    assert begun.kinds == [kind]
    assert begun.waiting == []


def test_nobody_waited_for_a_first_pass_whose_place_a_loop_took(begun, monkeypatch):
    assert [loss_fn(begun.insp.model, x) for x in begun.insp.watch([X], every=1)]
    begun.let_go()
    monkeypatch.setattr(rerun.time, "monotonic", lambda: 1e9)  # long after the inspector was made
    begun.insp.run()
    assert inside(begun.insp).core.meter.waited["pass_seconds"] == 0


def test_a_run_that_fails_does_not_take_its_place(begun):
    with pytest.raises(TypeError):
        begun.insp.run(jnp.ones((4, 7)))
    begun.let_go()
    assert begun.kinds == ["run"]


def test_a_loop_that_came_first_leaves_the_facts_that_findings_need(inspect):
    insp = inspect(TwoLayers(nnx.Rngs(0)), X)
    for x in insp.watch([X], every=1):
        loss_fn(insp.model, x)
    assert insp.recording.facts == nni_facts(insp)


def test_what_findings_need_is_read_of_the_model_as_the_loop_began_with_it():
    model, same = TwoLayers(nnx.Rngs(0)), TwoLayers(nnx.Rngs(0))
    late, soon = (nni.Inspector(m, X, display=False) for m in (model, same))
    for insp in (late, soon):
        for x in insp.watch([X], every=1):
            loss_fn(insp.model, x)
        if insp is late:
            assert all(one.order < 0 for one in insp.recording.facts_so_far.sites)
            model.dropped = nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(1))
    assert late.recording.facts == soon.recording.facts
    assert all(one.order >= 0 for one in late.recording.facts.sites)
    late.close()
    soon.close()


def nni_facts(insp):
    return inside(insp).core.programs.facts(inside(insp).core.call())


def test_a_closed_inspector_compiles_nothing(begun):
    begun.insp.close()
    with Compilations() as compiled:
        begun.let_go()
    assert compiled.kinds == []
    assert begun.kinds == []


def test_the_thread_does_not_keep_an_inspector_that_nobody_holds():
    begun = Begun(TwoLayers(nnx.Rngs(0)))
    core, arming = weakref.ref(inside(begun.insp).core), inside(begun.insp).arming
    del begun.insp
    gc.collect()
    assert core() is None
    with Compilations() as compiled:
        begun.gate.set()
        arming.wait()
    assert compiled.kinds == []
    assert not arming.busy


class Raising(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return jax.pure_callback(out_of_range, jax.typeof(x), self.linear(x))


def out_of_range(x):
    raise ValueError("a token is out of range")


def test_its_error_is_on_screen_warned_of_once_and_raised_where_a_figure_is_read():
    begun = Begun(Raising(nnx.Rngs(0)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        begun.let_go()
    ours = [str(one.message) for one in told if one.category is nni.InspectorWarning]
    assert len(ours) == 1
    assert ours == ["The example could not be run: ValueError: a token is out of range"]
    assert inside(begun.insp).notices == ours
    assert begun.waiting == []
    for _ in range(2):
        with pytest.raises(Exception, match="a token is out of range"):
            _ = begun.insp.recording
    begun.insp.close()


def test_a_model_that_is_donated_meanwhile_is_told(begun):
    step = jax.jit(lambda state: jax.tree.map(lambda p: 2 * p, state), donate_argnums=0)
    state = step(nnx.state(begun.model))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        begun.let_go()
    (text,) = [str(one.message) for one in told if one.category is nni.InspectorWarning]
    assert "a training step has taken the model's arrays" in text
    with pytest.raises(nni.InspectorError, match="has taken the model's arrays"):
        _ = begun.insp.recording
    begun.insp.update(state)
    assert len(begun.insp.recording) == 1


class Blocking(nnx.Module):
    """Its pass does not end before the test says so."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.entered, self.let_go = threading.Event(), threading.Event()

    def __call__(self, x):
        return jax.pure_callback(self.hold, jax.typeof(x), self.linear(x))

    def hold(self, x):
        self.entered.set()
        self.let_go.wait()
        return np.asarray(x)


@pytest.fixture
def blocked():
    one = Begun(Blocking(nnx.Rngs(0)))
    one.gate.set()
    one.model.entered.wait()
    yield one
    one.model.let_go.set()
    inside(one.insp).rerun.wait()
    assert not inside(one.insp).arming.busy


def test_who_waits_for_a_pass_that_does_not_end_can_be_interrupted(blocked):
    assert blocked.waiting == ["running the first pass"]
    main = threading.main_thread().ident

    def read():
        threading.Thread(target=signal.pthread_kill, args=(main, signal.SIGINT)).start()
        return blocked.insp.recording

    with pytest.raises(KeyboardInterrupt):
        read()
    assert blocked.kinds == []
    blocked.model.let_go.set()
    assert len(blocked.insp.recording) == 1
    blocked.insp.close()


def test_a_pass_that_does_not_end_is_left_by_closing_and_the_model_goes_on(blocked):
    blocked.insp.close()
    assert blocked.waiting == []
    assert float(jnp.abs(blocked.model.linear(X)).sum()) > 0
    blocked.model.let_go.set()
    inside(blocked.insp).rerun.wait()
    assert blocked.kinds == []


class Reading(nnx.Module):
    """Its code reads a value, so it cannot be traced."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.linear(x) * (1 if float(x.sum()) > -1e9 else 2)


def test_what_cannot_be_compiled_ahead_runs_at_once(inspect):
    insp = inspect(Reading(nnx.Rngs(0)), X)
    assert len(inside(insp).core.recording) == 1


@pytest.mark.parametrize("answers", [True, False])
def test_a_notebook_that_a_program_runs_has_it_in_the_cell(answers, monkeypatch):
    """Such a program keeps what was sent before the cell has ended."""
    shell = type("Shell", (), {"parent_header": {"content": {"allow_stdin": answers}}})
    monkeypatch.setattr("IPython.core.getipython.get_ipython", shell)
    assert presenter.is_unattended() is not answers


def test_it_waits_where_nobody_will_see_it_later(inspect):
    insp = inspect(TwoLayers(nnx.Rngs(0)), X)
    inside(insp).rerun.start_first(wait=True)
    assert len(inside(insp).core.recording) == 1


RESTARTED = """
import collections, json, sys
import jax
import jax.numpy as jnp
import nnx_inspector as nni
from flax import nnx
from models import TwoLayers

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
model, x = TwoLayers(nnx.Rngs(0)), jnp.ones((4, 3))
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.split("/")[-1]]))
insp = nni.Inspector(model, x, display=False)
insp._rerun.start_first()
assert len(insp.recording) == 1
step = nnx.jit(lambda model, x: model(x).sum())
for i in insp.watch(range(2), every=1):
    step(model, x)
insp.perturb("a", nni.Zero())
assert insp.effect is not None
insp.step(lambda model, x: (model(x) ** 2).mean(), x)
counted = [events["cache_hits"], events["cache_misses"]]
for one in [one for one in insp.recording.passes if one.kind == "watch"]:
    assert abs(one.summary("a").mean - model.a(x).mean()) < 1e-6
print(json.dumps(counted))
"""


@pytest.mark.long
def test_with_the_cache_on_disk_a_restarted_kernel_compiles_nothing(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", RESTARTED, str(tmp_path / "cache")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (hits, misses), again = found
    assert hits == 0
    assert misses > 2, "each program is written"
    assert again == [misses, 0]
