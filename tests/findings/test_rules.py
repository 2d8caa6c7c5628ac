"""Each rule on recordings made by hand: with the fault, close to it, and with facts missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_recordings import SITES, Model, along, dead, healthy, of

from nnx_inspector.findings.findings import diagnose
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.summary import Summary


@pytest.mark.parametrize("kind", ["step", "watch", "run"])
def test_a_healthy_chain_has_no_findings(kind: str) -> None:
    assert Model(kind=kind).found() == []
    assert Model(kind=kind).found(facts=False) == []
    assert Model(kind=kind).found(figures=False) == []


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (dead(0.5), [("dead-units", "c", "warning")]),
        (dead(1.0), [("dead-units", "c", "error")]),
        (dead(0.5, kind=""), [("dead-units", "c", "warning")]),
        (dead(0.3), []),
        (dead(0.5, examples=16), []),
        (dead(0.7, examples=16), [("dead-units", "c", "warning")]),
        (dead(1.0, examples=4), []),
    ],
)
def test_dead_units(model: Model, expected: list[Any]) -> None:
    assert model.found() == expected


def test_half_of_all_values_may_be_zero() -> None:
    model = Model()
    model.facts["c"] = {"activation": "relu"}
    assert model.found() == []


@pytest.mark.parametrize(
    ("kind", "top", "is_dead"), [("gelu", -6, 1), ("gelu", -1, 0), ("", -6, 0)]
)
def test_a_layer_far_below_where_its_function_is_flat_is_dead(
    kind: str, top: float, is_dead: bool
) -> None:
    model = Model(masks={("c", "below"): 1.0})
    model.facts["c"] = {"activation": kind}
    bins, sums = np.zeros(4096, np.uint64), np.array([8.0, 0.0, 64.0])
    bins[np.array([top], np.float32).view(np.uint32)[0] >> 20] = 64
    model.outputs["c"] = Summary(bins=bins, points=np.array([top - 1.0, top, 0.0]), sums=sums)
    assert model.found() == [("dead-units", "c", "error")] * is_dead


def test_the_layer_that_lets_nothing_pass_is_named_first() -> None:
    model = dead(0.5, "b")
    model.masks["d", "below"] = 1.0
    model.facts["d"] = {"activation": "relu"}
    (finding,) = diagnose(model.recording())
    assert (finding.site, finding.severity) == ("d", "error")
    assert finding.what.endswith("(also 50% of 'b')")


def test_a_layer_that_begins_at_zero_is_not_dead() -> None:
    model = dead(1.0, kind="")
    model.parameter_stats["c"] = {"norm": 0.0}
    assert model.found() == []


@pytest.mark.parametrize(
    ("activation", "mask", "part", "expected"),
    [
        ("tanh", "tanh", 0.6, ["saturated-units"]),
        ("sigmoid", "sigmoid", 1.0, ["saturated-units"]),
        ("tanh", "tanh", 0.3, []),
        ("", "tanh", 1.0, []),
        ("relu", "sigmoid", 1.0, []),
    ],
)
def test_saturated_units(activation: str, mask: str, part: float, expected: list[str]) -> None:
    model = Model(masks={("b", mask): part})
    model.facts["b"] = {"activation": activation}
    assert [rule for rule, _, _ in model.found()] == expected


def test_a_head_that_is_sure_is_not_saturated() -> None:
    model = Model(masks={("f", "sigmoid"): 1.0})
    model.facts["f"] = {"activation": "sigmoid"}
    assert model.found() == []


def constant_from(first: str, varied: int = 1) -> Model:
    model = Model(varied=varied)
    for site in SITES[SITES.index(first) :]:
        model.sites[site] |= {"flat": 1, "spread": 0, "rank": np.nan}
    return model


def test_constant_over_the_batch() -> None:
    assert constant_from("c").found() == [("constant", "c", "error")]
    assert constant_from("c", varied=0).found() == []
    assert constant_from("c", varied=-1).found() == []
    branch = constant_from("c")
    branch.sites["f"] = healthy()
    assert branch.found() == []  # other paths bypass it


def test_a_zero_weight_that_never_moves_makes_the_rest_constant() -> None:
    model = constant_from("c")
    model.kind = "watch"
    model.parameter_stats["c"] = {"norm": 0.0, "same": 1.0}
    assert ("constant", "c", "error") in model.found(passes=6)
    assert ("constant", "c", "error") not in model.found(passes=4)  # too few to be sure
    model.parameter_stats["c"]["same"] = 0.0
    assert "constant" not in {rule for rule, *_ in model.found(passes=6)}


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"rank": 1.0}, [("collapse", "c", "warning")]),
        ({"rank": 1.0, "flat": 1, "spread": 0}, []),  # constant: its rank is rounding
        ({"rank": 1.2}, []),
        ({"rank": 1.0, "units": 4}, []),
    ],
)
def test_collapse_of_rank(figures: dict[str, float], expected: list[Any]) -> None:
    model = Model()
    model.sites["c"] |= figures
    assert model.found() == expected


def test_collapse_of_variance() -> None:
    model = Model()
    for site in "cdef":
        model.sites[site] |= {"spread": 1e-4, "rms": 1e-4}
    assert model.found() == [("collapse", "c", "warning")]
    branch = Model()
    branch.sites["c"] |= {"spread": 1e-5, "rms": 1e-5}
    assert branch.found() == []  # a branch that is small beside its trunk


@pytest.mark.parametrize(
    ("top", "limit", "expected"),
    [
        (6e4, 16, True),
        (5e3, 16, False),
        (1e20, 128, True),
        (1e9, 128, False),
        (1e20, np.nan, False),
        (1e20, 1e6, False),  # of a file that was made up
        (1e20, -1e6, False),
    ],
)
def test_overflow(top: float, limit: float, expected: bool) -> None:
    model = Model()
    model.outputs["c"] = of(top)
    model.sites["c"]["limit"] = limit
    assert model.found() == ([("overflow", "c", "error")] if expected else [])


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (0.05, ["vanishing-gradient"]),
        (0.25, ["vanishing-gradient"]),
        (0.6, []),
        (1.5, []),
        (5.0, ["exploding-gradient"]),
        (20.0, ["exploding-gradient"]),
    ],
)
def test_gradients_along_depth(factor: float, expected: list[str]) -> None:
    assert [rule for rule, _, _ in along(factor).found()] == expected


def test_no_gradient() -> None:
    model = Model()
    model.parameter_stats["a"] = {"gradient": 0.0, "graded": 0.0}
    model.gradients["a"] = None
    assert model.found() == [("no-gradient", "a", "warning")]
    model.parameters["a"] = {"path": "teacher/kernel"}
    assert {severity for _, _, severity in model.found()} <= {"info"}


def test_a_watched_parameter_that_stays_while_others_move_is_information() -> None:
    model = Model(kind="watch")
    model.parameter_stats["b"] = {"same": 1.0, "change": 0.0}
    assert model.found() == [("no-gradient", "b", "info")]


def test_where_most_stay_it_is_not_said_that_none_moves() -> None:
    model = Model(kind="watch")
    for site in SITES[1:]:
        model.parameter_stats[site] = {"same": 1.0, "change": 0.0}
    assert "update-ratio" not in {rule for rule, _, _ in model.found(passes=8)}


def test_a_watched_module_whose_output_gets_no_gradient() -> None:
    model = Model(kind="watch")
    model.gradients["b"], model.parameter_stats["b"] = None, {"decay": 1.0}  # weight decay moves it
    assert model.found() == [("no-gradient", "b", "warning")]
    model.parameter_stats["b"] = {"decay": 0.0}  # the loop sets it, as an average of others
    assert model.found() == []


def test_a_branch_that_no_pass_has_chosen_does_not_lack_a_gradient() -> None:
    """An expert that no step was routed to."""
    model = Model(kind="watch")
    model.gradients["b"], model.outputs["b"] = None, of(n=0)
    assert ("no-gradient", "b", "warning") not in model.found()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (0.5, [("update-ratio", "a", "warning")]),
        (4.0, [("update-ratio", "a", "error")]),
        (0.05, []),
        (1e-4, []),
        (1e-7, [("update-ratio", "a", "warning")]),
    ],
)
def test_update_ratio(change: float, expected: list[Any]) -> None:
    model = Model(kind="watch")
    for site in SITES:
        model.parameter_stats[site] = {"change": change}
    found = model.found()
    assert [(rule, severity) for rule, _, severity in found] == [(r, s) for r, _, s in expected]


def test_the_update_ratio_leaves_out_what_gets_no_gradient() -> None:
    """Experts that no token chose move by their weight decay alone."""
    model = Model(kind="watch")
    for site in SITES:
        model.parameter_stats[site] = {"update": 1e-6, "gradient": 0.0}
    model.parameter_stats[SITES[0]] = {"update": 1e-3, "gradient": 1.0}
    assert "update-ratio" not in [rule for rule, *_ in model.found()]
    for site in SITES:
        model.parameter_stats[site]["gradient"] = 1.0
    assert "update-ratio" in [rule for rule, *_ in model.found()]


@pytest.mark.parametrize(("every", "expected"), [(1, []), (10, ["update-ratio"])])
def test_one_interval_of_many_large_steps_is_too_large(every: int, expected: list[str]) -> None:
    """A single large step may be the first of a healthy run; ten of them are not."""
    model, recording = Model(kind="watch"), Recording()
    recording.learn(model.known())
    outputs = {s: {"output": model.outputs[s], "gradient": model.gradients[s]} for s in SITES}
    for number in range(4):
        change = 0.5 * every if number == 1 else 1e-3
        model.parameter_stats = {s: {"change": change} for s in SITES}
        recording.append(number * every, outputs, kind="watch", figures=model.figures())
    assert [one.rule for one in diagnose(recording)] == expected


@pytest.mark.parametrize(
    ("facts", "dtype", "expected"),
    [
        ({"leaving": "float16", "declared": "float16"}, "float32", True),
        ({"entering": "bfloat16"}, "float32", True),
        ({"entering": "bfloat16", "declared": "float32", "type": "LayerNorm"}, "float32", False),
        ({"entering": "float32"}, "bfloat16", True),
        ({}, "float32", False),
    ],
)
def test_dtype(facts: dict[str, str], dtype: str, expected: bool) -> None:
    model = Model()
    model.facts["c"] = facts
    model.parameters["c"] = {"dtype": dtype}
    assert model.found() == ([("dtype", "c", "warning")] if expected else [])


@pytest.mark.parametrize(
    ("running", "shifted", "scaled", "expected"),
    [(1, 3.0, 1.0, True), (1, 0.0, 5.0, True), (1, 0.1, 1.1, False), (0, 3.0, 5.0, False)],
)
def test_batch_norm_mode(running: int, shifted: float, scaled: float, expected: bool) -> None:
    model = Model(parameter_stats={s: {"same": 0.0} for s in SITES})  # an optimizer moves them
    model.facts["c"] = {"running": running, "type": "BatchNorm"}
    model.sites["c"] |= {"shifted": shifted, "scaled": scaled}
    assert model.found() == ([("mode", "c", "warning")] if expected else [])
    model.parameter_stats = {s: {} for s in SITES}  # a gradient that trains nothing
    assert model.found() == ([("mode", "c", "info")] if expected else [])
    assert Model(kind="run", facts=model.facts, gradients=dict.fromkeys(SITES)).found() == []


def test_batch_norm_of_a_single_value() -> None:
    model = Model()
    model.facts["c"] = {"running": 0, "examples": 1}
    assert model.found() == [("mode", "c", "warning")]


def test_unused_modules() -> None:
    model = Model()
    model.facts["c"] = {"order": -1}
    model.parameters["c"] = {"needed": 0}
    model.parameter_stats["c"] = {"graded": 0.0}
    model.gradients["c"] = None
    assert model.found()[:1] == [("unused", "c", "warning")]
    model.parameters["c"] = {"needed": -1}
    assert "unused" not in [rule for rule, _, _ in model.found()]


def test_what_only_a_loop_calls_is_not_unused() -> None:
    model = Model(kind="watch")
    model.facts["c"] = {"order": -1}  # the example does not call it
    model.parameters["c"] = {"needed": 0, "path": "target/kernel"}
    model.gradients["c"] = None
    assert {severity for *_, severity in model.found()} <= {"info"}


def test_a_cause_comes_before_its_consequences() -> None:
    model = dead(1.0, "b")
    for site in "cdef":
        model.sites[site] |= {"flat": 1, "spread": 0, "rank": np.nan}
    for site in "ab":
        model.parameter_stats[site] = {"graded": 0.0, "gradient": 0.0}
    found = model.found()
    assert found == [("dead-units", "b", "error")]
    (cause,) = diagnose(model.recording())
    assert [one.rule for one in cause.effects] == ["constant", "no-gradient"]
    assert cause.effects[1].evidence["parameters"] == 2
    assert "Because of this: at step 0, the output of 'c' is the same" in cause.message
    assert "the parameter 'a/kernel' has a gradient of exactly 0 (and 1 more" in cause.message
    assert "stop_gradient" not in cause.message


def test_perturbed_passes_are_no_evidence() -> None:
    recording, model = Recording(), dead(1.0)
    recording.learn(model.known())
    summaries = {s: {"output": model.outputs[s]} for s in SITES}
    recording.append(0, summaries, figures=model.figures(), perturbed=True)
    assert diagnose(recording) == []


@pytest.mark.parametrize(("norm", "rules"), [(1e-9, ["update-ratio"]), (0.01, [])])
def test_weights_that_a_step_is_too_small_to_move(norm: float, rules: list[str]) -> None:
    """Only parameters that began at 0 move, and stay far below the weights."""
    model = Model(kind="watch")
    model.parameter_stats = {s: {"same": 1, "change": 0.0} for s in SITES}
    model.parameters["b"] = {"axes": 1}
    model.parameter_stats["b"] = {"same": 0, "change": 0.2, "norm": norm}
    found = [r for r, _, severity in model.found(passes=8) if severity != "info"]
    assert found == rules


def test_a_module_without_parameters_that_widens_what_others_receive() -> None:
    model = Model()
    for site in SITES:
        model.facts[site] = {"entering": "bfloat16", "leaving": "bfloat16"}
        model.parameters[site] = {"dtype": "bfloat16"}
    model.parameters["c"] = {"site": "a", "path": "a/more"}
    model.facts["c"] = {"entering": "bfloat16", "leaving": "float32", "type": "Half"}
    assert model.found() == []  # nothing receives it
    model.facts["d"] = {"entering": "float32", "leaving": "bfloat16", "declared": "bfloat16"}
    assert model.found() == [("dtype", "c", "warning")]
    model.facts["c"]["type"] = "RMSNorm"
    assert [one for one in model.found() if one[1] == "c"] == []


def test_what_a_norm_makes_of_nothing_is_not_dead() -> None:
    model = Model()
    model.masks[("c", "dead")] = 1.0
    assert ("dead-units", "c", "error") in model.found()
    model.facts["c"] = {"type": "LayerNorm"}
    assert "dead-units" not in {rule for rule, *_ in model.found()}
