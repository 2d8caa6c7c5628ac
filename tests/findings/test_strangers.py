"""Models made without knowledge of the rules, judged in every way.

Each built-in fault is named first, and healthy models raise no alarm: in one pass, in a watched
loop, from a file, and after training. Every run judges one of each; the long tests judge all.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools

import pytest
import strange_miswired  # noqa: F401 - it adds to the tables of faults
from flax import nnx
from judging import looped, stepped, watched
from strange_faults import FAULTS, ONLY_AFTER_TRAINING
from strange_healthy import FROZEN, HEALTHY, a_gpt_of_bfloat16_parameters

trained = functools.partial(stepped, steps=50)
watched_long = functools.partial(watched, steps=200, every=10)


GAPS = {
    "all units are copies": "the input of the first layer is not known",
    "attention without residual": "the examples stay apart, only the tokens of each grow alike",
    "a siamese net without negatives": "half of its units die first, which is reported",
}
"""Faults that are not found, or not named first, with the reason; some in one way only."""


def said(findings):
    return [f"{one.severity} {one.rule}: {one.message}" for one in findings]


def cases(names, ways, always=()):
    return [
        pytest.param(name, way, id=f"{name}, {label}",
                     marks=[
                         *([] if (name, label) in always else [pytest.mark.long]),
                         *(pytest.mark.xfail(reason=GAPS[gap])
                           for gap in (name, f"{name}, {label}") if gap in GAPS),
                     ])
        for name in names for label, way in ways.items()
    ]  # fmt: skip


LOOPS = {
    "watched": functools.partial(watched, steps=50),
    "looped": functools.partial(looped, steps=50),
    "watched 200": watched_long,
}
FAULTY = cases(
    FAULTS, {"stepped": stepped, **LOOPS}, [("most units of a sequential dead", "stepped")]
)
SOUND = cases(
    HEALTHY, {"stepped": stepped, **LOOPS, "trained": trained}, [("a tanh mlp", "stepped")]
)


@pytest.mark.parametrize(("name", "way"), FAULTY)
def test_a_fault_is_named_first(name, way, tmp_path):
    rules, build = FAULTS[name]
    found = way(build(), tmp_path / "run.nni")
    assert [one.rule for one in found[:1]] in [[rule] for rule in rules], said(found)


@pytest.mark.parametrize(("name", "way"), cases(ONLY_AFTER_TRAINING, LOOPS))
def test_a_fault_of_training_is_named_first(name, way, tmp_path):
    rules, build = ONLY_AFTER_TRAINING[name]
    found = way(build(), tmp_path / "run.nni")
    assert [one.rule for one in found[:1]] in [[rule] for rule in rules], said(found)


@pytest.mark.parametrize(("name", "way"), SOUND)
def test_what_is_healthy_raises_no_alarm(name, way, tmp_path):
    assert said(way(HEALTHY[name](), tmp_path / "run.nni")) == []


@pytest.mark.parametrize(("name", "way"), cases(FROZEN, {"stepped": stepped, **LOOPS}))
def test_what_is_frozen_on_purpose_is_information_at_most(name, way, tmp_path):
    found = way(FROZEN[name](), tmp_path / "run.nni")
    assert {one.severity for one in found} <= {"info"}, said(found)


@pytest.mark.long
@pytest.mark.parametrize("way", LOOPS)
def test_updates_that_bfloat16_rounds_off_are_information(way, tmp_path):
    """Only a loop can show that the scales of the norms stay at 1 for good."""
    subject = a_gpt_of_bfloat16_parameters()
    assert said(stepped(subject)) == []
    (one,) = LOOPS[way](subject, tmp_path / "run.nni")
    assert (one.severity, one.rule, one.evidence["parameters"]) == ("info", "no-gradient", 5)
    assert "layers/0/ln1/scale" in one.what
    assert "too small for its dtype" in one.advice
    scales = [x for path, x in nnx.to_flat_state(nnx.state(subject.model)) if "scale" in path]
    assert len(scales) == 5
    assert all((scale[...] == 1).all() for scale in scales)


def test_two_layers_that_both_begin_at_0_are_told_that_neither_learns():
    _, build = FAULTS["all kernels are 0"]
    (one,) = [one for one in looped(build()) if one.rule == "constant"]
    assert "its weights are all 0 and get no gradient" in one.advice
