"""Which finding explains which: effects are listed with their cause, two faults stay two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_recordings import SITES, Model, along, dead, healthy, of

from nnx_inspector.findings.findings import Finding, diagnose
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.summary import Summary


def told(found: list[Finding]) -> list[Any]:
    """Each rule, and the rules of its effects."""
    return [(one.rule, [e.rule for e in one.effects]) for one in found]


def vanishing(kind: str = "watch") -> Model:
    model = along(0.05)
    model.kind = kind
    return model


def test_a_vanishing_gradient_explains_what_does_not_move() -> None:
    model = vanishing()
    model.parameter_stats = {s: {"same": 0, "change": 1e-9} for s in SITES}
    model.parameter_stats["a"] = {"same": 1, "change": 0.0}  # too little to change a float32
    model.parameter_stats["f"] = {"same": 0, "change": 1e-3}
    (finding,) = diagnose(model.recording(passes=6))
    assert told([finding]) == [("vanishing-gradient", ["no-gradient", "update-ratio"])]
    for false in ("optimizer does not update it", "learning rate is usually too low"):
        assert false not in finding.message
    effect = "Because of this: from step 0 on, the parameter 'a/kernel' did not change"
    assert effect in finding.message


def test_a_learning_rate_that_is_too_low_everywhere_is_not_explained_by_it() -> None:
    model = vanishing()
    model.parameter_stats = {s: {"same": 0, "change": 1e-9} for s in SITES}
    found = diagnose(model.recording(passes=6))
    assert told(found) == [("vanishing-gradient", []), ("update-ratio", [])]


def test_what_the_optimizer_does_not_have_is_not_explained_by_it() -> None:
    model = vanishing()
    model.parameter_stats["f"] = {"same": 1, "change": 0.0}  # the last layer has a gradient
    found = diagnose(model.recording(passes=6))
    assert told(found) == [("vanishing-gradient", []), ("no-gradient", [])]


def test_saturation_explains_a_vanishing_gradient_and_what_that_explains() -> None:
    model = vanishing()
    model.facts["c"] = {"activation": "tanh"}
    model.masks[("c", "tanh")] = 1.0
    model.parameter_stats["a"] = {"same": 1, "change": 0.0}
    found = diagnose(model.recording(passes=6))
    assert told(found) == [("saturated-units", ["vanishing-gradient", "no-gradient"])]


@pytest.mark.parametrize(("late", "apart"), [(1e-3, False), (0.5, True)])
def test_exploding_gradients_explain_steps_that_are_too_large_only_before(
    late: float, apart: bool
) -> None:
    model = along(20.0)
    model.kind = "watch"
    model.parameter_stats = {s: {"change": 0.9, "same": 0} for s in SITES}
    model.parameter_stats["e"] = model.parameter_stats["f"] = {"change": late, "same": 0}
    found = told(diagnose(model.recording()))
    explained = [("exploding-gradient", ["update-ratio"])]
    assert (sorted(found) == [("exploding-gradient", []), ("update-ratio", [])]) == apart
    assert (found == explained) != apart


def test_parameters_behind_a_dead_layer_are_told_with_it_and_others_apart() -> None:
    model = dead(1.0, "b")
    for site in "ae":
        model.parameter_stats[site] = {"graded": 0.0, "gradient": 0.0}
    model.gradients["e"] = None  # cut off, independently of the dead layer
    found = diagnose(model.recording())
    assert told(found) == [("dead-units", ["no-gradient"]), ("no-gradient", [])]
    assert "'a/kernel'" in found[0].message
    assert (found[1].site, found[1].severity) == ("e", "warning")
    assert "stop_gradient" in found[1].advice


def test_parameters_that_stand_still_beside_a_dead_layer_are_told_with_it() -> None:
    model = dead(1.0, "c")
    model.kind = "watch"
    model.parameter_stats = {s: {"same": 0, "change": 1e-2} for s in SITES}
    for site in "be":  # b has no gradient, e lies behind c and has one: it is frozen
        model.parameter_stats[site] = {"same": 1, "change": 0.0}
    model.gradients["b"] = of(0.0)
    found = diagnose(model.recording())
    assert told(found) == [("dead-units", ["no-gradient"]), ("no-gradient", [])]
    assert (found[0].effects[0].site, found[1].site) == ("b", "e")


def test_a_layer_that_is_dead_from_when_steps_became_too_large_is_their_effect() -> None:
    model, recording = Model(kind="watch"), Recording()
    model.facts["c"] = {"activation": "relu"}
    recording.learn(model.known())
    for step in range(12):
        model.parameter_stats = {s: {"change": 2.0 if step > 1 else 1e-3, "same": 0} for s in SITES}
        model.masks = {("c", "below"): 1.0} if step >= 6 else {}
        summaries = {s: {"output": of(), "gradient": of(0.01)} for s in SITES}
        recording.append(step, summaries, kind="watch", figures=model.figures())
    found = diagnose(recording)
    assert told(found) == [("update-ratio", ["dead-units"])]
    assert found[0].severity == "error"
    assert "alive before step 6" in found[0].effects[0].advice


def test_a_nan_explains_what_does_not_change_from_then_on() -> None:
    recording, model = Recording(), Model(kind="watch")
    model.parameter_stats = {s: {"same": 0, "change": 1e-3} for s in SITES} | {
        "b": {"same": 1, "change": 0.0}
    }
    recording.learn(model.known())
    nan = Summary(bins=_nonfinite(np.nan), points=np.zeros(3), sums=np.zeros(3))
    for step in range(4):
        summaries = {s: {"output": nan if s == "d" else of(), "gradient": of()} for s in SITES}
        recording.append(step, summaries, kind="watch", figures=model.figures())
    assert told(diagnose(recording)) == [("nonfinite", ["no-gradient"])]


def test_what_overflows_explains_the_inf_and_the_inf_the_nan() -> None:
    recording, model = Recording(), Model()
    recording.learn(model.known())
    for step, value in enumerate((1e30, np.inf, np.nan)):
        bins = np.zeros(4096, np.uint64)
        bins[np.array([value], np.float32).view(np.uint32)[0] >> 20] = 64
        large = of(value) if np.isfinite(value) else Summary(
            bins=_nonfinite(value), points=np.zeros(3), sums=np.zeros(3)
        )  # fmt: skip
        summaries = {s: {"output": large if s == "d" else of()} for s in SITES}
        recording.append(step, summaries, figures=model.figures())
    assert told(diagnose(recording)) == [("overflow", ["nonfinite", "nonfinite"])]


def _nonfinite(value: float) -> Any:
    from nnx_inspector.stats.bins import NAN_BIN, POSINF_BIN

    bins = np.zeros(4096, np.uint64)
    bins[NAN_BIN if np.isnan(value) else POSINF_BIN] = 64
    return bins


@pytest.mark.parametrize("facts", [{"needed": 0}, {"needed": 1, "in_loss": 0}])
def test_a_parameter_that_takes_no_part_is_information(facts: dict[str, int]) -> None:
    model = Model()
    model.parameters["b"] = facts
    model.parameter_stats["b"] = {"graded": 0.0, "gradient": 0.0}
    if facts["needed"] == 0:  # the module has another parameter, which takes part
        model.parameters["c"] = {"site": "b", "path": "c/kernel"}
    else:
        model.gradients["b"] = None
    (finding,) = diagnose(model.recording())
    assert (finding.rule, finding.severity) == ("no-gradient", "info")
    assert "takes no part in this pass" in finding.message


def test_a_module_that_only_another_mode_calls_is_information() -> None:
    model = Model(gradients=dict.fromkeys(SITES), kind="run")
    model.facts["c"] = {"order": -1}
    model.parameters["c"] = {"needed": 0}
    model.parameter_stats = {s: {"graded": np.nan} for s in SITES}
    assert model.found() == [("unused", "c", "info")]
    model = Model()
    model.facts = {**model.facts, "c": {"order": -1}, "d": {"deterministic": 1, "rate": 0.5}}
    model.parameters["c"] = {"needed": 0}
    model.parameter_stats["c"], model.gradients["c"] = {"graded": 0.0}, None
    assert model.found() == [("unused", "c", "info")]
    model.facts["d"] = {"deterministic": 0, "rate": 0.5}
    assert model.found() == [("unused", "c", "warning")]


def test_a_gradient_of_zero_of_few_examples_is_no_evidence() -> None:
    model = Model()
    model.parameter_stats["a"] = {"graded": 0.0, "gradient": 0.0}
    assert model.found() == [("no-gradient", "a", "warning")]
    for site in SITES:
        model.sites[site] = healthy(examples=1)
    assert model.found(passes=1) == []


def test_what_begins_at_zero_is_neither_constant_nor_moving_too_fast() -> None:
    model = Model(kind="watch")
    model.sites["f"] |= {"flat": 1, "spread": 0}
    model.parameter_stats["f"] = {"norm": 0.0, "same": 0}
    assert model.found(passes=1) == []
    model = Model(kind="watch")
    for site in "abcd":
        model.parameter_stats[site] = {"norm": 1e-3, "change": 0.9, "same": 0}
    for site in "ef":
        model.parameter_stats[site] = {"norm": 1.0, "change": 1e-3, "same": 0}
    assert [rule for rule, *_ in model.found()] == ["update-ratio"]  # most are small: undecided
    for site in "cd":
        model.parameter_stats[site] = {"norm": 1.0, "change": 1e-3, "same": 0}
    assert model.found() == []


def test_steps_that_grow_from_nothing_are_a_warm_up() -> None:
    model, recording = Model(kind="watch"), Recording()
    recording.learn(model.known())
    for step in range(8):
        model.parameter_stats = {s: {"change": 1e-7 * step, "same": 0} for s in SITES}
        summaries = {s: {"output": of(), "gradient": of(0.01)} for s in SITES}
        recording.append(step, summaries, kind="watch", figures=model.figures())
    assert diagnose(recording) == []


# ------------------------------------------------------------------- only along the flow


HEADS = ("ab", "bc", "bd", "de")
"""A trunk of a and b, a head c, and a head of d and e; f is another model's."""


def one_bad(where: str, value: float, edges: Any, *, first: str, top: float) -> list[Finding]:
    """A large value at one site, then a value that is not finite at another, in one pass."""
    model, recording = Model(edges=edges), Recording()
    recording.learn(model.known())
    bad = Summary(bins=_nonfinite(value), points=np.zeros(3), sums=np.zeros(3))
    known = {first: of(top), where: bad}
    summaries = {s: {"output": known.get(s, of())} for s in SITES}
    recording.append(0, summaries, figures=model.figures())
    return diagnose(recording)


@pytest.mark.parametrize(
    ("first", "where", "edges", "joined"),
    [
        ("c", "e", HEADS, False),  # parallel heads
        ("c", "d", ("ac", "bd", "ce", "de"), False),  # 1e30 in a branch, log of 0 in the one beside
        ("a", "e", HEADS, True),
        ("a", "d", ("ab", "ac", "bc", "cd"), True),  # around b, by a skip connection
        ("a", "f", HEADS, False),
        ("a", "e", (), False),  # nothing is known of the flow
    ],
)
def test_a_large_value_explains_an_nan_only_where_it_enters(
    first: str, where: str, edges: Any, joined: bool
) -> None:
    found = one_bad(where, np.nan, edges, first=first, top=1e30)
    assert ("nonfinite" in [e.rule for one in found for e in one.effects]) == joined
    assert {one.rule for one in found} == ({"overflow"} if joined else {"overflow", "nonfinite"})


@pytest.mark.parametrize(("site", "joined"), [("c", False), ("a", True), ("b", True)])
def test_a_dead_layer_explains_a_gradient_of_0_only_before_it(site: str, joined: bool) -> None:
    """b feeds the two heads c and d; the first layer of the second head, d, lets nothing pass."""
    model = dead(1.0, "d")
    model.edges = HEADS
    model.parameter_stats[site] = {"graded": 0.0, "gradient": 0.0}
    found = diagnose(model.recording())
    by_itself = [] if joined else [("no-gradient", [])]
    assert told(found) == [("dead-units", ["no-gradient"] if joined else []), *by_itself]


def test_two_encoders_fail_apart() -> None:
    """a feeds b, c feeds d, and both feed e: units of a are off, c's output collapses."""
    model = dead(0.5, "a")
    model.edges = ("ab", "cd", "be", "de", "ef")
    model.sites["d"] |= {"rank": 1.0}
    found = told(diagnose(model.recording()))
    assert sorted(found) == [("collapse", []), ("dead-units", [])]
    model.edges = ("ac", "cd", "de", "ef")
    assert told(diagnose(model.recording())) == [("dead-units", ["collapse"])]


def test_a_late_fault_does_not_explain_an_early_one() -> None:
    model = dead(0.5, "e")
    model.sites["b"] |= {"rank": 1.0}
    assert sorted(told(diagnose(model.recording()))) == [("collapse", []), ("dead-units", [])]


def test_a_nan_that_an_update_spreads_is_told_with_its_cause() -> None:
    """c is NaN in one step; in the next, the trunk's parameters are, and so is the other head."""
    for broken in ("a", "f"):
        model, recording = Model(kind="watch", edges=HEADS), Recording()
        recording.learn(model.known())
        inf, nan = (
            Summary(bins=_nonfinite(value), points=np.zeros(3), sums=np.zeros(3))
            for value in (np.inf, np.nan)
        )
        for step, bad in enumerate(({"c": inf}, {"e": nan})):
            if step:
                model.parameter_stats[broken] = {"norm": np.nan}
            summaries = {s: {"output": bad.get(s, of()), "gradient": of()} for s in SITES}
            recording.append(step, summaries, kind="watch", figures=model.figures())
        found = [(one.site, [e.site for e in one.effects]) for one in diagnose(recording)]
        assert (("c", ["e"]) in found) == (broken == "a"), found
