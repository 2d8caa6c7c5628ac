"""Whole models: each built-in fault is named first, and healthy models raise no alarm.

Every run judges a few; the long tests judge all, in one pass, after training and in a watched
loop.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import optax
import pytest
from borderline import FAULTY as BORDERLINE_FAULTY
from borderline import HEALTHY as BORDERLINE_HEALTHY
from borderline import ON_PURPOSE
from borderline import ONLY_TRAINING as BORDERLINE_ONLY_TRAINING
from faulty import FAULTY, HEALTHY, ONLY_TRAINING
from flax import nnx
from judging import looped, stepped, watched

import nnx_inspector as nni

ALL_FAULTY = {**FAULTY, **BORDERLINE_FAULTY}
ALL_HEALTHY = {**HEALTHY, **BORDERLINE_HEALTHY}
ALL_ONLY_TRAINING = {**ONLY_TRAINING, **BORDERLINE_ONLY_TRAINING}


def rules(findings):
    return [one.rule for one in findings]


@pytest.mark.parametrize("name", ["dead layer", "stop_gradient"])
def test_a_fault_is_named_first(name):
    rule, build = FAULTY[name]
    found = stepped(build())
    assert rules(found)[:1] == [rule], [one.message for one in found]
    assert found[0].message
    assert found[0].evidence


def test_a_healthy_model_raises_no_alarm():
    assert [one.message for one in stepped(HEALTHY["mlp"]())] == []


def test_a_learning_rate_that_is_too_high_is_seen_in_a_loop():
    rule, build = ONLY_TRAINING["learning rate of 1"]
    assert rules(watched(build(), steps=12))[:1] == [rule]


def test_what_is_perturbed_on_purpose_is_not_found_as_a_fault():
    subject = HEALTHY["mlp"]()
    insp = nni.Inspector(subject.model, subject.x, display=False)
    with insp.perturb("layers/1", nni.Zero()):
        insp.step(subject.loss, subject.batch)
        assert insp.findings == []
    insp.close()


@pytest.mark.long
@pytest.mark.parametrize("name", ALL_FAULTY)
@pytest.mark.parametrize("how", [stepped, watched, looped])
def test_each_fault_is_named_first(name, how):
    rule, build = ALL_FAULTY[name]
    found = how(build())
    assert rules(found)[:1] == [rule], [one.message for one in found]


@pytest.mark.long
@pytest.mark.parametrize("name", ALL_ONLY_TRAINING)
@pytest.mark.parametrize("how", [watched, looped])
def test_each_fault_of_training_is_named_first(name, how):
    rule, build = ALL_ONLY_TRAINING[name]
    found = how(build())
    assert rules(found)[:1] == [rule], [one.message for one in found]


@pytest.mark.long
@pytest.mark.parametrize("name", ALL_HEALTHY)
@pytest.mark.parametrize("how", [stepped, watched, looped])
def test_no_false_alarm(name, how):
    assert [one.message for one in how(ALL_HEALTHY[name]())] == []


@pytest.mark.long
@pytest.mark.parametrize("name", ALL_HEALTHY)
def test_no_false_alarm_after_training(name):
    assert [one.message for one in stepped(ALL_HEALTHY[name](), steps=50)] == []


@pytest.mark.long
@pytest.mark.parametrize("name", ON_PURPOSE)
def test_what_is_frozen_on_purpose_is_information_at_most(name):
    assert {one.severity for one in stepped(ON_PURPOSE[name]())} <= {"info"}


def test_a_frozen_layer_is_information_at_most():
    subject = HEALTHY["mlp"]()
    of_head = nnx.All(nnx.Param, nnx.PathContains(2))
    optimizer = nnx.Optimizer(subject.model, optax.adam(1e-3), wrt=of_head)

    @nnx.jit
    def train(model, optimizer, batch):
        grad = nnx.grad(subject.loss, argnums=nnx.DiffState(0, of_head))
        optimizer.update(model, grad(model, batch))

    with nni.watch(subject.model, every=1) as recording:
        for _ in range(5):
            train(subject.model, optimizer, subject.batch)
    assert {one.severity for one in nni.diagnose(recording)} <= {"info"}


def test_a_frozen_recording_is_judged_alike_when_its_columns_come_back():
    subject = FAULTY["half of the units dead"][1]()
    insp = nni.Inspector(subject.model, subject.x, display=False)
    insp.run()
    insp.close()
    facts = insp.recording.facts
    again = nni.Recording()
    again.learn(type(facts).from_columns(facts.to_columns()))
    for one in insp.recording.passes:
        summaries: dict = {}
        for site, quantity, summary in one.items():
            summaries.setdefault(site, {})[quantity] = summary
        again.append(one.step, summaries, kind=one.kind, figures=one.figures)
    assert rules(nni.diagnose(again)) == rules(insp.findings) == ["dead-units"]
