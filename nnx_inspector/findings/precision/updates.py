"""The rule for updates that are too large or too small for the weights.

It makes one finding. Invariant: the size of an update is that of the whole parameter where the step
showed it; otherwise the sentence says that it is that of samples.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Final

from nnx_inspector.findings.evidence import STILL
from nnx_inspector.findings.finding import Finding, Severity
from nnx_inspector.findings.precision.rounding import lost_updates, rounding_finding
from nnx_inspector.findings.rule_context import RuleContext
from nnx_inspector.findings.update.discarded import discarded_updates
from nnx_inspector.findings.update.rate import zero_rate
from nnx_inspector.recordings.facts import ParameterFacts, PassStats
from nnx_inspector.recordings.passes import Pass

TOO_LARGE: Final = 0.3
"""Karpathy, CS231n, "Ratio of weights:updates": about 1e-3 is right. At 0.3 per step, most of what
a layer has learnt is gone after three steps."""
TOO_SMALL: Final = 5e-6
"""The same source: "if it is lower than this then the learning rate might be too low"; at 5e-6 a
weight moves by 1 % at most in 2000 steps."""
LEAST_INTERVALS: Final = 3
LASTS: Final = 2
"""The intervals above TOO_LARGE that make a finding: a single first step may be large."""
FAR_TOO_LARGE: Final = 1.0
"""A single interval above TOO_LARGE makes a finding if its steps together change this much."""
FEW_ELEMENTS: Final = 64
"""A model with fewer weights may at first move by as much as its size."""
BEGAN_SMALL: Final = 0.05
"""A weight that begins at 0 (often in the last layer of a branch), or below this fraction of the
other weights' size, is left out: its change relative to its own size says nothing."""


def update_ratio(context: RuleContext) -> Iterator[Finding]:
    """Updates that are far too large for the weights, or far too small."""
    intervals = _intervals(context)
    if not intervals or next(discarded_updates(context), None) is not None:
        return
    # one update after several gradients: the steps between say nothing of its size
    intervals = [one for one in intervals if one.ratio > 0] or intervals
    ratios = [one.ratio for one in intervals]
    largest = max(ratios)
    if _is_too_large(context, intervals):
        worst = max(intervals, key=lambda one: one.ratio)
        first = next(one for one in intervals if one.ratio >= TOO_LARGE)
        since = f"From step {first.before.step} on"
        if intervals[-1].ratio < TOO_LARGE:
            end = next(one for one in reversed(intervals) if one.ratio >= TOO_LARGE)
            since = f"From step {first.before.step} to step {end.last_step}"
        yield _update(
            context,
            dataclasses.replace(first, path=worst.path),
            {"ratio": largest, "limit": TOO_LARGE, "late": min(one.late for one in intervals)},
            "error" if largest >= FAR_TOO_LARGE else "warning",
            f"{since}, a step changed the weights by up to {largest:.2g} times their size ("
            f"{_median(intervals)}, that of {worst.path!r} {'in' if worst.exact else 'after'} step "
            f"{worst.before.step}); about 1e-3 is usual",
            "the learning rate is usually too high; lower it by a factor of 10 or more, or clip "
            "the gradient if its size jumps",
        )
    elif (lost := lost_updates(context)) and not _rises(ratios):
        yield rounding_finding(lost)
    elif len(intervals) >= LEAST_INTERVALS and 0 < largest <= TOO_SMALL and not _rises(ratios):
        yield _update(
            context,
            intervals[0],
            {"ratio": largest, "limit": TOO_SMALL, "late": max(one.late for one in intervals)},
            "warning",
            f"From step {intervals[0].before.step} on, a step changed the weights by at most "
            f"{largest:.2g} times their size ({_median(intervals)}); about 1e-3 is usual",
            "the learning rate is usually too low (or training has converged, if the loss no "
            "longer falls)",
        )
    elif len(intervals) >= STILL and largest == 0:
        part, passes = _moved_part(context), len(intervals) + (not intervals[-1].exact)
        evidence = {"ratio": part, "limit": TOO_SMALL, "late": 0.0}
        if 0 < part <= TOO_SMALL:
            yield _update(
                context,
                intervals[0],
                evidence,
                "warning",
                f"From step {intervals[0].before.step} on, no weight changed in {passes} passes "
                f"with gradients, and other parameters moved by {part:.2g} times the weights' size",
                "updates are too small for the weights' dtype; usually the learning rate is far "
                "too low, or weights in bfloat16 need a copy in float32",
            )
        elif not context.any_changed and next(zero_rate(context), None) is None:
            yield _update(
                context,
                intervals[0],
                evidence,
                "info",
                f"From step {intervals[0].before.step} on, no parameter changed in {passes} "
                f"passes with gradients",
                "fine if nothing is to be trained, or gradients are accumulated over more passes; "
                "otherwise the optimizer does not update this model, or the learning rate is 0",
            )


def _median(intervals: Sequence[_Interval]) -> str:
    of = "the parameters" if all(one.exact for one in intervals) else "samples of the parameters"
    return f"a median over {of}"


def _update(
    context: RuleContext,
    one: _Interval,
    evidence: dict[str, float],
    severity: Severity,
    what: str,
    advice: str,
) -> Finding:
    site = next((p.site for p in context.weights if p.path == one.path), "")
    return Finding(
        rule="update-ratio",
        site=site,
        step=one.before.step,
        severity=severity,
        evidence=evidence,
        what=what,
        advice=advice,
    )


def _is_too_large(context: RuleContext, intervals: list[_Interval]) -> bool:
    over = [one.ratio >= TOO_LARGE for one in intervals]
    if sum(p.size for p in context.weights) < FEW_ELEMENTS:
        return len(over) >= LEAST_INTERVALS and all(over[-LEAST_INTERVALS:])
    whole = (one.ratio * one.steps for one in intervals if one.ratio >= TOO_LARGE)
    return sum(over) >= LASTS or max(whole, default=0.0) >= FAR_TOO_LARGE


def _rises(ratios: list[float]) -> bool:
    """Whether each step is larger than the one before: a schedule that warms up."""
    return all(a < b for a, b in itertools.pairwise(ratios)) and ratios[-1] > 1.5 * ratios[0]


def _moved_part(context: RuleContext) -> float:
    """The largest change of a parameter at last, as a fraction of the largest parameter's norm."""
    last = next(
        (p.figures for p in reversed(context.gradient_passes) if p.figures is not None), None
    )
    if last is None:
        return 0.0
    norms = {p.path: last.parameter(p.path, "norm") for p in context.weights}
    moved = [norm * _part_changed(last, path) for path, norm in norms.items()]
    sizes = [norm for norm in norms.values() if norm > 0]
    return max((x for x in moved if x > 0), default=0.0) / max(sizes, default=1.0)


def _part_changed(figures: PassStats, path: str) -> float:
    """The change by the step, relative to the value, or else in the sample since the last pass."""
    update = figures.parameter(path, "update")
    return figures.parameter(path, "change") if math.isnan(update) else update


@dataclasses.dataclass(frozen=True)
class _Interval:
    """The change of the weights by one step, relative to their size.

    Attributes:
        before: the pass of the step, or the first of two passes, of which it is a mean.
        steps: how many steps are between these.
        path: the parameter with the median ratio.
        ratio: the median ratio.
        late: the largest ratio in the last third of the weights, in the order of the pass.
        exact: whether it is the change of whole parameters, as the step made it; otherwise that of
            samples, from one pass to the next.
    """

    before: Pass
    steps: int
    path: str
    ratio: float
    late: float
    exact: bool

    @property
    def last_step(self) -> int:
        return self.before.step if self.exact else self.before.step + self.steps


def _intervals(context: RuleContext) -> list[_Interval]:
    """The updates of the passes with gradients, in order."""
    weights = [p for p in context.weights if p.axes >= 2] or context.weights
    weights = sorted(_with_size(context, weights), key=lambda p: context.order_of(p.site))
    passes = [p for p in context.passes if p.kind == "watch"]
    out: list[_Interval] = []
    graded = {p.number for p in context.gradient_passes}
    for one, after in itertools.zip_longest(passes, passes[1:]):
        if one.number not in graded or one.figures is None:
            continue
        of = one.figures
        # the loss moves no others: an expert that is not chosen moves by its weight decay alone
        here = [p for p in weights if of.parameter(p.path, "gradient") > 0] or weights
        found = [(of.parameter(p.path, "update"), p.path) for p in here]
        found, steps = [x for x in found if math.isfinite(x[0])], 1
        exact = bool(found)
        if not exact and after and after.figures and after.number == one.number + 1:
            steps = max(1, after.step - one.step)
            each = ((after.figures.parameter(p.path, "change"), p.path) for p in here)
            found = [(x / steps, path) for x, path in each if not math.isnan(x)]
            found = found if after.number in graded else []
        if found:
            late = max(ratio for ratio, _ in found[-max(1, len(found) // 3) :])
            moved = [x for x in found if x[0] > 0]  # the rule no-gradient has the others
            ratio, path = statistics.median_low(moved or found)
            out.append(_Interval(one, steps, path, ratio, late, exact))
    return out


def _with_size(context: RuleContext, weights: list[ParameterFacts]) -> list[ParameterFacts]:
    """The weights that did not begin at or near 0 compared with the others."""
    began: dict[str, float] = {}
    for one in context.clean:
        for p in weights if one.figures is not None else ():
            norm = one.figures.parameter(p.path, "norm") if one.figures else math.nan
            if not math.isnan(norm):
                began.setdefault(p.path, norm)
    usual = statistics.median(began.values()) if began else 0.0
    return [p for p in weights if began.get(p.path, usual) >= BEGAN_SMALL * usual > 0] or weights
