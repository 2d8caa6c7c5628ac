"""Older passes on screen: their list, their figures, and where the perturbations changed; live
frames continue meanwhile.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from inside import inside
from models import TwoLayers
from summaries import normal_values, summary_of

import nnx_inspector as nni
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.screen.frames import metrics_at, pass_of, passes_message

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)


def table(insp, frame, buffer):
    sites = len(inside(insp).view.keys)
    shape = (sites, len(protocol.QUANTITIES), len(protocol.STATISTICS))
    return np.frombuffer(buffer[: 8 * np.prod(shape)], "<f8").reshape(shape)


def show(number, site="a", request=7):
    return protocol.ShowPass(id=request, number=number, site=site)


def test_a_pass_comes_whole_before_the_reply_and_beside_the_live_frames(browser):
    insp = nni.Inspector(TwoLayers(nnx.Rngs(0)), X, display=False)
    inside(insp).rerun.wait_for_first()
    for scale in (2.0, 3.0):
        insp.run(scale * X)
    sent = browser.ask(insp, show(1, site="b"))
    kinds = [header["type"] for header, _ in sent]
    assert kinds == ["frame", "reply"]
    assert sent[1][0] == {"type": "reply", "id": 7, "ok": True, "error": ""}
    frame, buffer = sent[0]
    assert (frame["number"], frame["held"]) == (1, True)
    index = inside(insp).view.keys.index("b")
    assert {h["site"] for h in frame["histograms"]} == {index}
    norm = table(insp, frame, buffer)[index, 0, protocol.STATISTICS.index("norm")]
    assert norm == insp.recording.passes[1].summary("b").norm
    assert norm != insp.recording.passes[2].summary("b").norm
    assert insp.selected == "", "another page may look at something else"
    ((reply, _),) = browser.ask(insp, show(40))
    assert not reply["ok"]
    assert reply["error"].startswith("Pass 40 is not in the recording")
    # live frames are of the newest pass, and go on beside the one that is held
    browser.sent.clear()
    insp.run(X)
    frames = [header for header, _ in browser.messages("frame")]
    assert [(f["number"], f["held"]) for f in frames] == [(3, False)]
    insp.close()


def test_a_pass_that_is_looked_at_stays_when_the_recording_thins_it_out(browser):
    insp = nni.Inspector(TwoLayers(nnx.Rngs(0)), X, display=False)
    inside(insp).rerun.wait_for_first()
    insp.recording.max_steps = 4
    insp.run(X)
    browser.ask(insp, show(1))
    while 1 in [p.number for p in insp.recording.passes]:
        insp.run(X)
    (frame, _), (reply, _) = browser.ask(insp, show(1))
    assert (frame["number"], reply["ok"]) == (1, True)
    insp.close()


def test_the_passes_are_told_when_there_are_new_ones(browser):
    insp = nni.Inspector(TwoLayers(nnx.Rngs(0)), X, display=False)
    inside(insp).rerun.wait_for_first()
    handle = insp.perturb("a", nni.Scale(0.5))
    assert insp.effect  # waits: what ends compiling during a change makes the pass once more
    handle.perturbation = nni.Scale(0.25)
    assert insp.effect
    handle.enabled = False
    header, buffer = browser.messages("passes")[-1]
    rows = np.frombuffer(buffer, "<f8").reshape(header["passes"], 5)
    assert header["kinds"] == ["run"]
    assert rows[:, 0].tolist() == [0, 1, 2, 3]
    assert rows[:, 2].tolist() == [0, 1, 1, 0]
    assert rows[:, 4].tolist() == [0, 1, 2, 0], "each change of what is perturbed has its mark"
    insp.close()


def test_a_loop_marks_the_step_at_which_a_change_acts(browser):
    model = TwoLayers(nnx.Rngs(0))
    insp = nni.Inspector(model, X, display=False)
    forward = nnx.jit(lambda m, x: m(x))
    handle = insp.perturb("a", nni.Scale(0.5))
    handle.enabled = False
    first = insp.recording.passes[-1].number
    for i in insp.watch(range(6), every=1):
        forward(model, X)
        if i == 1:
            handle.enabled = True
        if i == 3:
            handle.enabled = False
    found = [(p.perturbed, p.setting > 0) for p in insp.recording.passes if p.number > first]
    watched = [f for f, p in zip(found, insp.recording.passes[first + 1 :], strict=True)
               if p.kind == "watch"]  # fmt: skip
    assert watched == [(False, False)] * 2 + [(True, True)] * 2 + [(False, False)] * 2
    insp.close()


def test_a_recording_knows_its_passes_and_the_metrics_of_a_step():
    recording = Recording(max_steps=3)
    for step in range(5):
        found = {"a": {"output": summary_of(normal_values(step))}}
        recording.append(step, found, metrics={"loss": step / 4}, setting=step // 3)
    message, buffer = passes_message(recording.passes, recording.thinned)
    numbers = [p.number for p in recording.passes]
    assert message.passes == len(numbers) == 3
    assert message.thinned == recording.thinned == 2
    assert np.frombuffer(buffer, "<f8").reshape(-1, 5)[:, 0].tolist() == numbers
    assert pass_of(recording, numbers[1]).step == numbers[1]
    with pytest.raises(KeyError, match="thinned out"):
        pass_of(recording, next(n for n in range(5) if n not in numbers))
    assert metrics_at(recording, 2) == {"loss": 0.5}
    assert metrics_at(recording, 77) == {}
