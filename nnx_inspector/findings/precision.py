"""Rules for sizes: values that a dtype cannot hold, and updates that are too large or too small for
the weights, or for their dtype, which rounds them off.

Each makes one finding, at the first site in the order of the pass. Invariant: a mask, whose large
values are negative and far from the rest, is no overflow, and neither is an array of float8, whose
scale is chosen so that it fills the range: only one that mostly lies at the end of it is noted. The
size of an update is that of the whole parameter where the step showed it; otherwise the sentence
says that it is that of samples.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from nnx_inspector.findings.evidence import STILL
from nnx_inspector.findings.finding import Finding, Severity, and_others, named
from nnx_inspector.findings.judged import Judged
from nnx_inspector.findings.update.rate import halted
from nnx_inspector.recordings.facts import Figures, ParameterFacts
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.stats.bins import MANTISSA, bin_edges, bin_of
from nnx_inspector.stats.summary import Summary

NEAR_LIMIT: Final = 8.0
"""float16: a value within this factor of 65504 is one layer's gain away from Inf. Loss scaling
halves at each overflow (Micikevicius et al. 2018, "Mixed precision training"); three halvings."""
SMALL_DTYPE: Final = 1e6
"""The largest number of float16 is below this."""
FLOAT16: Final = 15.9
"""Below log2 of float16's largest number, 65504, and above that of every float8 dtype."""
GAP: Final = 16.0
"""An overflow approaches the limit gradually; a mask leaves a gap of at least this factor."""
SQUARE_LIMIT: Final = 0.5
"""Wider dtypes: a value beyond limit ** 0.5 (1.8e19) has no finite square, norm or variance."""
MOST: Final = 0.5
LARGER: Final = 0.75
"""Elements that are not updated because their gradient is 0 (rows of an embedding, say) are as
large as the others; those whose updates are rounded off are larger, in nearly all pairs."""
GROWS: Final = 1.5
"""A copy of weights in float32, from which these are made anew, moves more elements with each step;
rounding alone stops the same ones for good."""

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
SATURATED: Final = 0.5
"""A float8 array whose values mostly lie at the end of the range has lost what tells them apart."""


def overflow(judged: Judged) -> Iterator[Finding]:
    """A value near the largest of its dtype."""
    for one in judged.clean:
        found = _near_limit(judged, one)
        if found:
            yield _overflowed(judged, one, found)
            return
    yield from _saturated(judged)


def _near_limit(judged: Judged, one: Pass) -> list[tuple[str, float]]:
    """The sites whose output reaches the limit in a pass, in order, with their largest sizes."""
    figures = one.figures
    if figures is None:
        return []
    tops = one.sizes("output")
    limits = {site: _limit_of(figures, site) for site in figures.sites if site in tops}
    at = judged.in_order(site for site, limit in limits.items() if limit and tops[site] >= limit)
    found = [(site, _reached(one, site, limits[site])) for site in at]
    return [(site, top) for site, top in found if top]


def _reached(one: Pass, site: str, limit: float) -> float:
    """The largest size of a site's output if that reaches the limit and is no mask; else 0."""
    summary = one.summary(site)
    if summary is None or not summary.finite:
        return 0.0
    top = max(abs(summary.min), abs(summary.max))
    return top if top >= limit and not _is_mask(summary, limit) else 0.0


def _overflowed(judged: Judged, one: Pass, found: list[tuple[str, float]]) -> Finding:
    (site, top), *others = found
    assert one.figures is not None
    largest = _largest(one.figures, site)
    return Finding(
        rule="overflow",
        site=site,
        step=one.step,
        severity="error",
        evidence={"largest": top, "limit": largest, "others": len(others)},
        what=(
            f"At step {one.step} the output of {named(site)} reached {top:.3g}, near the largest "
            f"number of its dtype, {largest:.3g}"
            + and_others([named(other) for other, _ in others])
            + _since(judged, one, site)
        ),
        advice=_why_large(largest),
    )


def _since(judged: Judged, one: Pass, site: str) -> str:
    """What the newest pass says, if it no longer reaches the limit."""
    passes = (p for p in reversed(judged.clean) if p.figures and site in p.figures.sites)
    last = next(passes, one)
    summary = last.summary(site)
    if last.figures is None or summary is None or not summary.finite:
        return ""
    if _reached(last, site, _limit_of(last.figures, site)):
        return ""
    top = max(abs(summary.min), abs(summary.max))
    return f"; at step {last.step} it reached {top:.3g} only"


def _why_large(largest: float) -> str:
    if largest < SMALL_DTYPE:
        return (
            "usually weights or inputs that are too large for float16; use bfloat16 or float32 "
            "here (loss scaling helps gradients only), or Inf and NaN come next"
        )
    return (
        "usually weights or inputs that are too large, or an exp of a large value; normalise or "
        "clip the input (a wider dtype only delays the overflow); the square of this value is Inf "
        "already, and Inf and NaN come next"
    )


def _saturated(judged: Judged) -> Iterator[Finding]:
    """A float8 array most of whose values lie at the end of its range, in the newest passes."""
    for site in judged.measured:
        passes = [(p, f, p.summary(site)) for p, f in judged.with_figures(site)]
        each = [(_end_part(f, site, s) if s else 0.0) for _, f, s in passes]
        one, figures, summary = passes[-1]
        if min(each) <= SATURATED or summary is None:
            continue
        part, zero = each[-1], summary.zeros / summary.size
        leaving, largest = judged.site(site).leaving, _largest(figures, site)
        yield Finding(
            rule="overflow",
            site=site,
            step=passes[0][0].step,
            severity="info",
            evidence={"fraction": part, "zeros": zero, "limit": largest},
            what=(
                f"At step {one.step} {part:.0%} of the values of the output of {named(site)} lie "
                f"at the end of the range of {leaving or 'its float8 dtype'}, {largest:.3g}, and "
                f"{zero:.0%} are 0"
            ),
            advice=(
                "usually the scale by which values are multiplied before the cast is too large; "
                "choose it so that the largest value is near the end of the range"
            ),
        )
        return


def _end_part(figures: Figures, site: str, summary: Summary) -> float:
    """The share of the finite values that are a float8 dtype's largest or smallest number."""
    if not _is_float8(figures, site) or not summary.finite:
        return 0.0
    largest = round(2 * _largest(figures, site)) / 2  # from a logarithm
    if not (math.frexp(largest)[0] * 2 ** (MANTISSA + 1)).is_integer():
        return 0.0  # float8_e3m4: the bin holds the number before the largest too
    ends = bin_of(np.array([largest, -largest]))
    return float(summary.whole_bins()[ends].sum() / summary.finite)


def _is_float8(figures: Figures, site: str) -> bool:
    return figures.figure(site, "limit") < FLOAT16


def _largest(figures: Figures, site: str) -> float:
    power = figures.figure(site, "limit")
    return math.inf if not power < 1024 else 2.0**power


def _limit_of(figures: Figures, site: str) -> float:
    power = figures.figure(site, "limit")
    if not FLOAT16 <= power < 1025:  # of float8 or no dtype; NaN if it is unknown
        return 0.0
    # float16 ends at 2**16; bfloat16 and float32 at 2**128
    return 2.0**power / NEAR_LIMIT if power < 64 else 2.0 ** (power * SQUARE_LIMIT)


@dataclasses.dataclass(frozen=True)
class Stuck:
    """Parameters of 16 bits that updates do not change, as they round to nothing.

    Attributes:
        first, last: the passes between which they did not.
        parts: of each parameter the share of its elements that did not change; those come first of
            which the others did.
        whole: the share of the elements of all parameters of 16 bits.
    """

    first: Pass
    last: Pass
    parts: tuple[tuple[ParameterFacts, float], ...]
    whole: float


def stuck_parameters(judged: Judged) -> Stuck | None:
    passes = [p for p in judged.graded if p.kind == "watch" and p.figures is not None]
    held = [p for ps in judged.held.values() for p in ps if p.dtype in ("bfloat16", "float16")]
    held.sort(key=lambda p: judged.at(p.site))

    def told(one: Pass, path: str, name: str) -> float:
        return one.figures.parameter(path, name) if one.figures else math.nan

    held = [p for p in held if passes and told(passes[-1], p.path, "differentiated") == 1]
    followed = [
        all(math.isnan(told(one, p.path, "stuck")) for p in held) for one in passes
    ]  # whether each pass begins a loop
    passes = passes[max((i for i, begins in enumerate(followed) if begins), default=0) :]
    if len(passes) <= STILL:
        return None
    parts = {p.path: told(passes[-1], p.path, "stuck") for p in held}
    middle = passes[len(passes) // 2]

    def is_rounded(p: ParameterFacts) -> bool:
        part, before = parts[p.path], told(middle, p.path, "stuck")
        stopped = part >= MOST and 1 - part <= GROWS * (1 - before)
        return stopped and told(passes[-1], p.path, "larger") >= LARGER

    if not any(map(is_rounded, held)):
        return None
    found = [*filter(is_rounded, held), *(p for p in held if parts[p.path] == 1)]
    whole = sum(p.size * parts[p.path] for p in found) / sum(p.size for p in held)
    return Stuck(passes[0], passes[-1], tuple((p, parts[p.path]) for p in found), whole)


def rounded_off(found: Stuck) -> Finding:
    """Of the rule `update-ratio`: updates that a dtype of 16 bits rounds to nothing."""
    (first, part), *others = found.parts
    last = found.last.figures
    assert last is not None
    change = last.parameter(first.path, "change")
    return Finding(
        rule="update-ratio",
        site=first.site,
        step=found.first.step,
        severity="warning" if found.whole >= MOST else "info",
        evidence={
            "ratio": 0.0 if math.isnan(change) else change,
            "limit": 1.0,
            "late": 0.0,
            "stuck": part,
            "stuck_of_all": found.whole,
            "parameters": len(found.parts),
        },
        what=(
            f"From step {found.first.step} to step {found.last.step}, {part:.0%} of the sampled "
            f"elements of {first.path!r} ({first.dtype}) did not change"
            + and_others([f"{part:.0%} of {p.path!r}" for p, part in others], "parameter")
        ),
        advice=(
            f"they are larger than those that did, so updates are usually too small for the dtype "
            f"{first.dtype} and round to nothing; keep the parameters in float32 "
            f"(param_dtype=jnp.float32) and compute in {first.dtype} (dtype=jnp.{first.dtype}), or "
            f"let the optimizer keep a copy in float32"
        ),
    )


def _is_mask(summary: Summary, limit: float) -> bool:
    """Whether all large values are negative and far from the rest, as an added mask makes them."""
    if summary.max >= limit / 2:
        return False
    sizes = np.abs(bin_edges()[summary.nonzero_bins()[:, 0].astype(int)]).min(axis=1)
    rest = sizes[sizes < limit / 2]
    return bool(len(rest) and rest.max() < limit / GAP)


# ----------------------------------------------------------------------- updates


def update_ratio(judged: Judged) -> Iterator[Finding]:
    """Updates that are far too large for the weights, or far too small."""
    intervals = _intervals(judged)
    if not intervals:
        return
    # one update after several gradients: the steps between say nothing of its size
    intervals = [one for one in intervals if one.ratio > 0] or intervals
    ratios = [one.ratio for one in intervals]
    largest = max(ratios)
    if _is_too_large(judged, intervals):
        worst = max(intervals, key=lambda one: one.ratio)
        first = next(one for one in intervals if one.ratio >= TOO_LARGE)
        since = f"From step {first.before.step} on"
        if intervals[-1].ratio < TOO_LARGE:
            end = next(one for one in reversed(intervals) if one.ratio >= TOO_LARGE)
            since = f"From step {first.before.step} to step {end.last_step}"
        yield _update(
            judged,
            dataclasses.replace(first, path=worst.path),
            {"ratio": largest, "limit": TOO_LARGE, "late": min(one.late for one in intervals)},
            "error" if largest >= FAR_TOO_LARGE else "warning",
            f"{since}, a step changed the weights by up to {largest:.2g} times their size ("
            f"{_median(intervals)}, that of {worst.path!r} {'in' if worst.exact else 'after'} step "
            f"{worst.before.step}); about 1e-3 is usual",
            "the learning rate is usually too high; lower it by a factor of 10 or more, or clip "
            "the gradient if its size jumps",
        )
    elif (stuck := stuck_parameters(judged)) and not _rises(ratios):
        yield rounded_off(stuck)
    elif len(intervals) >= LEAST_INTERVALS and 0 < largest <= TOO_SMALL and not _rises(ratios):
        yield _update(
            judged,
            intervals[0],
            {"ratio": largest, "limit": TOO_SMALL, "late": max(one.late for one in intervals)},
            "warning",
            f"From step {intervals[0].before.step} on, a step changed the weights by at most "
            f"{largest:.2g} times their size ({_median(intervals)}); about 1e-3 is usual",
            "the learning rate is usually too low (or training has converged, if the loss no "
            "longer falls)",
        )
    elif len(intervals) >= STILL and largest == 0:
        part, passes = _moved_part(judged), len(intervals) + (not intervals[-1].exact)
        evidence = {"ratio": part, "limit": TOO_SMALL, "late": 0.0}
        if 0 < part <= TOO_SMALL:
            yield _update(
                judged,
                intervals[0],
                evidence,
                "warning",
                f"From step {intervals[0].before.step} on, no weight changed in {passes} passes "
                f"with gradients, and other parameters moved by {part:.2g} times the weights' size",
                "updates are too small for the weights' dtype; usually the learning rate is far "
                "too low, or weights in bfloat16 need a copy in float32",
            )
        elif not judged.any_moved and next(halted(judged), None) is None:
            yield _update(
                judged,
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
    judged: Judged,
    one: _Interval,
    evidence: dict[str, float],
    severity: Severity,
    what: str,
    advice: str,
) -> Finding:
    site = next((p.site for ps in judged.held.values() for p in ps if p.path == one.path), "")
    return Finding(
        rule="update-ratio",
        site=site,
        step=one.before.step,
        severity=severity,
        evidence=evidence,
        what=what,
        advice=advice,
    )


def _is_too_large(judged: Judged, intervals: list[_Interval]) -> bool:
    over = [one.ratio >= TOO_LARGE for one in intervals]
    if sum(p.size for ps in judged.held.values() for p in ps) < FEW_ELEMENTS:
        return len(over) >= LEAST_INTERVALS and all(over[-LEAST_INTERVALS:])
    whole = (one.ratio * one.steps for one in intervals if one.ratio >= TOO_LARGE)
    return sum(over) >= LASTS or max(whole, default=0.0) >= FAR_TOO_LARGE


def _rises(ratios: list[float]) -> bool:
    """Whether each step is larger than the one before: a schedule that warms up."""
    return all(a < b for a, b in itertools.pairwise(ratios)) and ratios[-1] > 1.5 * ratios[0]


def _moved_part(judged: Judged) -> float:
    """The largest change of a parameter at last, as a fraction of the largest parameter's norm."""
    last = next((p.figures for p in reversed(judged.graded) if p.figures is not None), None)
    if last is None:
        return 0.0
    paths = [p.path for ps in judged.held.values() for p in ps]
    norms = {path: last.parameter(path, "norm") for path in paths}
    moved = [norms[path] * _part_changed(last, path) for path in paths]
    sizes = [norm for norm in norms.values() if norm > 0]
    return max((x for x in moved if x > 0), default=0.0) / max(sizes, default=1.0)


def _part_changed(figures: Figures, path: str) -> float:
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


def _intervals(judged: Judged) -> list[_Interval]:
    """The updates of the passes with gradients, in order."""
    weights = [p for ps in judged.held.values() for p in ps if p.axes >= 2]
    weights = weights or [p for ps in judged.held.values() for p in ps]
    weights = sorted(_with_size(judged, weights), key=lambda p: judged.at(p.site))
    passes = [p for p in judged.passes if p.kind == "watch"]
    out: list[_Interval] = []
    graded = {p.number for p in judged.graded}
    for one, after in itertools.zip_longest(passes, passes[1:]):
        if one.number not in graded or one.figures is None:
            continue
        found = [(one.figures.parameter(p.path, "update"), p.path) for p in weights]
        found, steps = [x for x in found if math.isfinite(x[0])], 1
        exact = bool(found)
        if not exact and after and after.figures and after.number == one.number + 1:
            steps = max(1, after.step - one.step)
            each = ((after.figures.parameter(p.path, "change"), p.path) for p in weights)
            found = [(x / steps, path) for x, path in each if not math.isnan(x)]
            found = found if after.number in graded else []
        if found:
            late = max(ratio for ratio, _ in found[-max(1, len(found) // 3) :])
            moved = [x for x in found if x[0] > 0]  # the rule no-gradient has the others
            ratio, path = statistics.median_low(moved or found)
            out.append(_Interval(one, steps, path, ratio, late, exact))
    return out


def _with_size(judged: Judged, weights: list[ParameterFacts]) -> list[ParameterFacts]:
    """The weights that did not begin at or near 0 compared with the others."""
    began: dict[str, float] = {}
    for one in judged.clean:
        for p in weights if one.figures is not None else ():
            norm = one.figures.parameter(p.path, "norm") if one.figures else math.nan
            if not math.isnan(norm):
                began.setdefault(p.path, norm)
    usual = statistics.median(began.values()) if began else 0.0
    return [p for p in weights if began.get(p.path, usual) >= BEGAN_SMALL * usual > 0] or weights
