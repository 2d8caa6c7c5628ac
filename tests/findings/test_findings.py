"""Findings: the first pass and site with NaN or Inf, and none if nothing is wrong."""

# jax and pandas are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_inspector.findings.findings import diagnose
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.bins import NAN_BIN
from nnx_inspector.stats.summarize import summarize
from nnx_inspector.stats.summary import Summary, empty

NAN, INF = float("nan"), float("inf")


def of(*values: float) -> Summary:
    return summarize(jnp.asarray(np.array(values, np.float32))).merged()


def outputs(**values: Summary) -> dict[str, dict[str, Summary]]:
    return {site.replace("__", "/"): {"output": s} for site, s in values.items()}


def recorded(*passes: Mapping[str, Mapping[str, Summary]], **options: bool) -> Recording:
    recording = Recording()
    for step, summaries in enumerate(passes):
        recording.append(10 * step, summaries, **options)  # type: ignore[arg-type]
    return recording


def test_no_false_alarms() -> None:
    fine = of(1e38, -1e38, 0.0, 1e-45)
    assert diagnose(Recording()) == []
    assert diagnose(recorded(outputs(a=fine, b=empty()), outputs(a=of(0.0)))) == []


def test_the_first_site_of_the_first_bad_pass() -> None:
    bad = of(1.0, NAN, NAN, INF)
    recording = recorded(
        outputs(a=of(1), b=of(1), c=of(1)),
        outputs(a=of(1), b=bad, c=of(NAN)),
        outputs(a=of(NAN), b=of(NAN), c=of(NAN)),
    )
    (finding,) = diagnose(recording)
    assert (finding.rule, finding.site, finding.step) == ("nonfinite", "b", 10)
    assert finding.severity == "error"
    assert dict(finding.evidence) == {"pass": 1, "size": 4, "nan": 2, "posinf": 1, "neginf": 0}
    assert "2 NaN and 1 +Inf among 4 values" in finding.message
    assert finding.message.count(". ") == 0
    assert str(finding) == f"error: nonfinite at b\n    {finding.message}"


def test_an_inf_before_the_nan_is_told_as_well() -> None:
    recording = recorded(
        outputs(mask=of(-INF, 0), a=of(1)),
        outputs(mask=of(-INF, 0), a=of(INF)),
        outputs(mask=of(-INF, 0), a=of(NAN)),
        outputs(mask=of(NAN, 0), a=of(NAN)),
    )
    found = diagnose(recording)
    assert [(f.severity, f.site, f.step) for f in found] == [
        ("error", "a", 10),
        ("info", "mask", 0),
    ]
    (nan,) = found[0].effects
    assert (nan.severity, nan.site, nan.step) == ("error", "a", 20)
    assert "Because of this: at step 20, the output of 'a' first held 1 NaN" in found[0].message
    assert "mask" in found[1].message


def gone(*bad: int, of_all: int) -> list[tuple[str, int | None]]:
    """The findings of so many passes, of which these (by number) hold a NaN."""
    one, recording = of(1.0), Recording()
    for number in range(of_all):
        held = of(1.0, NAN) if number in bad else one
        recording.append(10 * number, outputs(a=one, b=held))
    return [(finding.rule, finding.gone) for finding in diagnose(recording)]


@pytest.mark.parametrize(
    ("bad", "passes", "since"),
    [
        ((2,), 4, None),  # too few passes since
        ((2,), 7, None),
        ((2,), 8, 30),
        ((2,), 200, 30),
        ((2, 3, 4), 100, 50),
        ((2, 3, 77), 100, 780),
        ((2, 99), 100, None),
        ((0,), 100, 10),
        (tuple(range(2, 100)), 100, None),
    ],
)
def test_a_finding_ages(bad: tuple[int, ...], passes: int, since: int | None) -> None:
    assert gone(*bad, of_all=passes) == [("nonfinite", since)]


def test_passes_that_do_not_measure_the_site_do_not_make_a_finding_old() -> None:
    recording = recorded(outputs(a=of(1), b=of(NAN)), *[outputs(a=of(1))] * 20)
    (finding,) = diagnose(recording)
    assert finding.gone is None


def test_perturbed_passes_do_not_make_a_finding_old() -> None:
    recording = recorded(outputs(a=of(1), b=of(NAN)))
    for step in range(20):
        recording.append(100 + step, outputs(a=of(1), b=of(1)), perturbed=True)
    (finding,) = diagnose(recording)
    assert finding.gone is None


def test_what_is_over_comes_last_and_says_since_when() -> None:
    healthy = outputs(a=of(1), b=of(1))
    recording = recorded(outputs(a=of(1), b=of(NAN)), *[healthy] * 20)
    for step in range(2):
        recording.append(400 + step, outputs(a=of(65504.0, INF), b=of(1)))
    found = diagnose(recording)
    assert [(one.site, one.gone) for one in found] == [("b", None)]  # its rule finds a too
    for step in range(6):
        recording.append(500 + step, healthy)
    (finding,) = diagnose(recording)
    assert finding.gone == 500
    assert finding.message.endswith(". It is gone since step 500.")


@pytest.mark.parametrize("order", [("", "b", "b/c"), ("b/c", "b", "")])
def test_the_innermost_module_whether_it_is_listed_first_or_last(order: tuple[str, ...]) -> None:
    summaries = {site: {"output": of(NAN)} for site in order}
    (finding,) = diagnose(recorded({"a": {"output": of(1)}, **summaries}))
    assert finding.site == "b/c"


def test_what_goes_in_comes_before_what_comes_out() -> None:
    (finding,) = diagnose(recorded({"a": {"output": of(NAN), "input": of(NAN, 1)}}))
    assert "the input of 'a'" in finding.message
    assert finding.evidence["size"] == 2


@pytest.mark.parametrize("order", [("a", "b", "b/c"), ("a", "b/c", "b")])
def test_gradients_arise_backwards(order: tuple[str, ...]) -> None:
    passed = {site: {"output": of(1), "gradient": of(NAN)} for site in order}
    (finding,) = diagnose(recorded(passed))
    assert finding.site == "b"
    assert "gradient of 'b'" in finding.message
    passed["a"]["output"] = of(NAN)
    (finding,) = diagnose(recorded(passed))
    assert "output of 'a'" in finding.message


def test_perturbed_passes_are_told_apart() -> None:
    recording = Recording()
    recording.append(0, outputs(a=of(NAN)), perturbed=True)  # type: ignore[arg-type]
    recording.append(1, outputs(b=of(1)))  # type: ignore[arg-type]
    recording.append(2, outputs(b=of(NAN)))  # type: ignore[arg-type]
    found = diagnose(recording)
    assert [(f.site, f.step) for f in found] == [("a", 0), ("b", 2)]
    assert ["perturbation was on" in f.message for f in found] == [True, False]


def test_the_first_nan_is_still_told_after_thinning() -> None:
    recording = Recording(max_steps=40)
    for i in range(1000):
        recording.append(i, {"a": {"output": of(NAN) if i >= 333 else of(1.0)}})
    assert recording.thinned
    (finding,) = diagnose(recording)
    assert (finding.step, finding.evidence["pass"]) == (333, 333)


def test_saturated_counts_are_no_evidence_but_a_nan_still_is() -> None:
    bins = np.asarray(of(1.0).bins).astype(np.uint32)
    bins[NAN_BIN], bins[0x3F8] = 3, np.iinfo(np.uint32).max
    stopped = Summary(bins=bins, points=np.ones(3), sums=np.zeros(3))
    (finding,) = diagnose(recorded(outputs(a=stopped)))
    assert finding.evidence["nan"] == 3
    assert "size" not in finding.evidence
    assert "NaN among more values than can be counted" in finding.message


@pytest.mark.parametrize("other", [None, [Recording()]])
def test_only_a_recording_is_diagnosed(other: object) -> None:
    with pytest.raises(TypeError, match=r"takes a Recording, such as insp\.recording .* got "):
        diagnose(other)  # type: ignore[arg-type]


@pytest.mark.parametrize("parameter", ["a", "z"], ids=["before", "after"])
def test_a_pass_of_sites_leaves_out_parameters_wherever_they_stand(parameter: str) -> None:
    held = {parameter: {"parameter": of(NAN)}}
    sites = outputs(b=of(1, 2), c=of(3))
    both = {**held, **sites} if parameter == "a" else {**sites, **held}
    (one,) = recorded(both).passes
    found = one.of_sites
    assert found.keys == (("b", "output"), ("c", "output"))
    assert [found.piece(*key) for key in found.keys] == [one.piece(*key) for key in found.keys]
    assert [summary.mean for _, _, summary in found.items()] == [1.5, 3.0]
    assert (one.nonfinite, found.nonfinite) == ({"nan"}, frozenset())
