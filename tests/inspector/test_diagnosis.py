"""Findings reach the screen: from a thread, once for many passes, and only if they change."""

import contextlib
import threading
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from inside import inside
from models import TwoLayers

from nnx_inspector.findings.findings import Finding
from nnx_inspector.inspector.diagnosis import Diagnosis
from nnx_inspector.screen import protocol
from nnx_inspector.screen.frames import findings_message


def finding(site="a", rule="nonfinite", severity="error"):
    return Finding(
        rule=rule,
        site=site,
        step=1,
        severity=severity,
        evidence={},
        what=f"{site} is wrong",
        advice="mend it",
    )


def diagnosing(monkeypatch, diagnose, publish=lambda message: None, notice=print):
    """A `Diagnosing` that calls `diagnose` in place of the rules."""
    monkeypatch.setattr("nnx_inspector.inspector.diagnosis.diagnose", lambda recording: diagnose())
    view = types.SimpleNamespace(publish=publish)
    closing = contextlib.ExitStack()
    meter = types.SimpleNamespace(compilations=types.SimpleNamespace(all=list))
    core = types.SimpleNamespace(
        view=view,
        notice=notice,
        recording=None,
        closing=closing,
        meter=meter,
        metrics=types.SimpleNamespace(),
        step=0,
        looping=False,
    )
    return Diagnosis(core, types.SimpleNamespace(record_arrived=lambda: None))


def test_whoever_asks_never_waits_and_what_comes_meanwhile_is_looked_at_once_more(monkeypatch):
    go, begun, threads = threading.Event(), threading.Event(), []

    def diagnose():
        threads.append(threading.current_thread())
        begun.set()
        go.wait(60)
        return []

    one = diagnosing(monkeypatch, diagnose)
    one.start()
    assert begun.wait(60)  # later requests are not part of it
    for _ in range(100):
        one.start()
    go.set()
    one.wait()
    assert len(threads) == 2
    assert threading.current_thread() not in threads


def test_the_screen_is_told_of_changes_alone(monkeypatch):
    told, found = [], []
    one = diagnosing(monkeypatch, lambda: list(found), told.append)

    def look():
        one.start()
        one.wait()
        return [[row.site for row in message.findings] for message in told]

    assert look() == []  # it reports an empty list by itself
    found.append(finding("a"))
    assert look() == [["a"]]
    assert look() == [["a"]]
    found.insert(0, finding("b"))
    assert look() == [["a"], ["b", "a"]]
    found.clear()
    assert look() == [["a"], ["b", "a"], []]


def test_it_rests_after_it_has_looked_unless_it_is_asked_to_look_now(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("nnx_inspector.inspector.diagnosis.time.monotonic", lambda: clock[0])
    looked = []

    def diagnose():
        looked.append(clock[0])
        clock[0] += takes
        return []

    one = diagnosing(monkeypatch, diagnose)
    takes = 0.1
    for at, now in [(0.0, False), (1.9, False), (1.95, True), (3.9, False), (3.96, False)]:
        clock[0] = at
        one.start(now=now)
        one.wait()
    assert looked == [0.0, 1.95, 3.96]
    takes = 2.0  # a long search is not followed by the longest pause
    for at, now in [(10.0, True), (16.9, False), (17.1, False)]:
        clock[0] = at
        one.start(now=now)
        one.wait()
    assert looked[3:] == [10.0, 17.1]


def test_what_a_rule_raises_is_told_and_the_next_time_it_looks_again(monkeypatch):
    failures, looked = [], []

    def diagnose():
        looked.append(1)
        if len(looked) == 1:
            raise ValueError("a rule is wrong")
        return [finding()]

    told = []
    one = diagnosing(monkeypatch, diagnose, told.append, lambda *said: failures.append(said))
    for _ in range(2):
        one.start()
        one.wait()
    text = "The diagnosis failed: ValueError: a rule is wrong"
    assert failures == [("warning", text)]
    assert len(told) == 1


def test_more_than_the_screen_shows_are_counted():
    message = findings_message([finding(str(i)) for i in range(protocol.MOST_FINDINGS + 3)])
    assert (len(message.findings), message.more) == (protocol.MOST_FINDINGS, 3)
    assert message.findings[0] == protocol.FindingRow(
        rule="nonfinite", site="0", step=1, severity="error", what="0 is wrong", advice="mend it"
    )


@pytest.fixture
def insp(inspect):
    one = inspect(TwoLayers(nnx.Rngs(0)), jnp.ones((4, 3)))
    inside(one).view.display_requested = True
    return one


def test_an_inspector_tells_what_it_finds_in_its_own_passes(insp):
    insp.run(jnp.ones((4, 3)).at[0, 0].set(jnp.nan))
    inside(insp).diagnosis.wait()
    message = inside(insp).view.last_message("findings")
    assert (message.findings[0].rule, message.findings[0].site) == ("nonfinite", "a")
    assert [row.what for row in message.findings] == [one.what for one in insp.findings]


def test_and_in_a_watched_loop(insp):
    step = nnx.jit(lambda model, x: model(x).sum())
    for x in insp.watch([jnp.ones((4, 3)), jnp.full((4, 3), jnp.nan)], every=1):
        step(insp.model, x)
    inside(insp).diagnosis.wait()
    assert inside(insp).view.last_message("findings").findings[0].rule == "nonfinite"


def test_a_metric_that_is_not_finite_is_told_before_the_next_measured_step(insp):
    step, told = nnx.jit(lambda model, x: model(x).sum()), []
    inside(insp).view.tick = lambda: None  # an unmeasured step sends nothing else
    for i, x in enumerate(insp.watch([jnp.ones((4, 3))] * 4, every=100)):
        step(insp.model, x)
        insp.metrics(loss=float("nan") if i == 2 else 1.0)
        if i == 3:  # the metrics of a step are taken when it ends
            inside(insp).diagnosis.wait()
            told += inside(insp).view.last_message("findings").findings
    (row,) = [row for row in told if row.rule == "metrics"]
    assert row.step == 2
    assert "'loss' was NaN in 1 of 3 values, first at step 2" in row.what


def test_another_thread_takes_no_pass_out_of_a_step_that_may_still_run(inspect):
    """It would take half of the pass: the gradients are still to come."""
    model, nans = TwoLayers(nnx.Rngs(0)), jnp.full((5, 3), jnp.nan)
    insp = inspect(model, jnp.ones((5, 3)))
    step = nnx.jit(nnx.value_and_grad(lambda model, x: model(x).sum()))
    for x in insp.watch([nans]):
        jax.block_until_ready(step(model, x))
        other = threading.Thread(target=inside(insp).loops.record_arrived)
        other.start()
        other.join()
        assert len(insp.recording) == 0
    assert insp.recording.summary("a", "gradient").nan
