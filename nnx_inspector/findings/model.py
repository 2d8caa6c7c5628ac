"""Rules for the model itself: dtypes, modes, modules that nothing uses, sinusoids, loops that do
not call it, metrics that are not finite.

Invariant: a rule makes no finding from a fact that is unknown.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

from nnx_inspector.findings.finding import Finding, Severity, lower_first, others_text, site_text
from nnx_inspector.findings.rule_context import RuleContext, examined_count, is_within, units_text
from nnx_inspector.recordings.curves import Tally
from nnx_inspector.recordings.facts import UNKNOWN, PassStats, Role, SiteFacts
from nnx_inspector.stats.samples.unit_stats import STILL_SHARE

WIDTHS: Final = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}
SHIFTED: Final = 0.5
SCALED: Final = 2.0
"""Ioffe and Szegedy 2015: a normalised unit has mean 0 and deviation 1. Running statistics that fit
the data differ by the noise of a batch; half a deviation or a factor of 2 means other data."""
NOISE: Final = 3.0
"""The mean of n values has a deviation of 1 / sqrt(n): up to three of these are noise."""
MOSTLY_STILL: Final = 0.55
"""With frequencies from 1 to 1/10,000 (Vaswani et al. 2017), 68 % of the units are still for times
from 0 to 1, 52 % for 0 to 10 and 6 % for 0 to 1,000."""
MANY: Final = 16
"""Fewer examples or units show too little."""
METRICS: Final = 3
"""How many metrics a sentence names."""
MOST: Final = 0.6
FEW: Final = 3

Why = tuple[str, str]
"""What was seen at a site, and what it usually means."""


# ------------------------------------------------------------------------ dtype


def dtype(context: RuleContext) -> Iterator[Finding]:
    """A module that computes in another dtype than that of its input, or of all other modules."""
    called = sorted((s for s in context.facts.sites if s.order != UNKNOWN), key=lambda s: s.order)
    leaves = [s for s in called if context.parameters_of(s.site) and s.leaving in WIDTHS]
    found = [(s, why) for s in leaves if (why := _promotes(context, s))]
    found += [(s, why) for s in called if (why := _casts(context, s, called))]
    odd = _odd_ones(leaves)
    narrowed = {id(s) for s in leaves if WIDTHS[s.leaving] < WIDTHS.get(s.entering, 0)}
    asked = [one for one in odd if id(one[0]) in narrowed]
    found = sorted([*found, *asked], key=lambda one: one[0].order) or odd
    if found:
        first, why = found[0]
        others = others_text([site_text(one.site) for one, _ in found[1:]])
        step = context.first_step
        yield Finding(
            rule="dtype",
            site=first.site,
            step=step,
            severity="warning",
            evidence={"bits": WIDTHS[first.leaving], "others": len(found) - 1},
            what=f"From step {step} on, {site_text(first.site)} ({first.type}) {why[0]}{others}",
            advice=why[1],
        )


def _casts(context: RuleContext, one: SiteFacts, called: list[SiteFacts]) -> Why | None:
    """For a module without parameters that widens the input of a later one; None otherwise.

    If no module with parameters receives the output, it is a result, often cast on purpose.
    """
    if WIDTHS.get(one.leaving, 0) <= WIDTHS.get(one.entering, 64):
        return None
    has_calls = any(other is not one and is_within(other.site, one.site) for other in called)
    if has_calls or context.parameters_in(one.site) or one.declared or "Norm" in one.type:
        return None
    after = (s for s in called if s.order > one.order and context.parameters_of(s.site))
    receiver = next((s for s in after if s.entering), None)
    if receiver is None or receiver.entering != one.leaving:
        return None
    return (
        f"receives {one.entering} and returns {one.leaving}, which {site_text(receiver.site)} then "
        f"receives",
        f"usually it uses an array or a NumPy number of {one.leaving}, which promotes its result; "
        f"cast that to {one.entering} unless the precision is wanted here",
    )


def _promotes(context: RuleContext, one: SiteFacts) -> Why | None:
    """For a module whose output is wider than its input or parameters; None otherwise."""
    own = {p.dtype for p in context.parameters_of(one.site)} & set(WIDTHS)
    leaving = WIDTHS[one.leaving]
    if one.declared:
        return None
    names = " and ".join(sorted(own))
    if one.entering in WIDTHS and leaving > WIDTHS[one.entering]:
        return (
            f"receives {one.entering} and returns {one.leaving}",
            f"its parameters are {names} and it declares no dtype, so the promotion is usually an "
            f"accident; pass dtype={one.entering} if the class takes one, otherwise cast its "
            f"parameters in its call",
        )
    if own and leaving > max(WIDTHS[name] for name in own):
        return (
            f"has {names} parameters and returns {one.leaving}",
            f"its input was {one.entering or one.leaving}, usually because a cast is missing; cast "
            f"the input unless {one.leaving} is wanted",
        )
    return None


def _odd_ones(leaves: list[SiteFacts]) -> list[tuple[SiteFacts, Why]]:
    """The few sites that return another dtype than most."""
    if len(leaves) < FEW:
        return []
    usual, count = Counter(s.leaving for s in leaves).most_common(1)[0]
    if count < MOST * len(leaves):
        return []
    out: list[tuple[SiteFacts, Why]] = []
    for number, one in enumerate(leaves):
        if one.leaving == usual:
            continue
        wider = WIDTHS[one.leaving] > WIDTHS[usual]
        by_design = "Norm" in one.type or number in (0, len(leaves) - 1)
        if not (wider and by_design):  # norms and the last layer are often kept in float32
            lost = "speed" if wider else "precision"
            what = f"returns {one.leaving} while {count} of {len(leaves)} layers return {usual}"
            advice = f"usually a dtype= that was forgotten or left over, which costs {lost} here"
            out.append((one, (what, advice)))
    return out


# ------------------------------------------------------------------------- mode


def mode(context: RuleContext) -> Iterator[Finding]:
    """A BatchNorm that uses the wrong statistics."""
    found: list[tuple[tuple[int, int, int], Finding]] = []
    for one in context.facts.sites:
        if one.running == UNKNOWN or one.order == UNKNOWN:
            continue
        finding = (
            _stale(context, one)
            or _single_value(context, one)
            or _updated_in_evaluation(context, one)
        )
        if finding is not None:
            found.append((context.order_of(one.site), finding))
    if found:
        yield min(found, key=lambda pair: pair[0])[1]


def _uses_running_statistics(context: RuleContext, one: SiteFacts) -> bool:
    """Whether a BatchNorm uses its running statistics in the passes with gradients."""
    passes = [p for p in context.gradient_passes if p.figures is not None][-5:]
    if not passes:
        return False
    path = f"{one.site}/mean" if one.site else "mean"
    same = [p.figures.parameter(path, "same") for p in passes if p.figures is not None]
    watched = [x for x in same if not math.isnan(x)]
    if len(watched) >= 2:
        return min(watched) == 1
    return passes[-1].kind != "watch" and one.running == 1


def _stale(context: RuleContext, one: SiteFacts) -> Finding | None:
    if not _uses_running_statistics(context, one):
        return None
    passes = [
        p for p in context.gradient_passes if p.figures is not None and one.site in p.figures.sites
    ]
    if not passes or passes[-1].figures is None:
        return None
    figures = passes[-1].figures
    n = figures.figure(one.site, "examples")  # not positions, which are alike in one image
    shifted, scaled = figures.figure(one.site, "shifted"), figures.figure(one.site, "scaled")
    if math.isnan(shifted) or n < 4:
        return None
    off = shifted > max(SHIFTED, NOISE / math.sqrt(n))
    wide = not 1 / SCALED <= scaled <= SCALED
    if not (off or wide):
        return None
    seen = (
        f"and at step {passes[-1].step} they did not fit the data (in the median over "
        f"{units_text(figures, one.site)}, the mean of the "
        f"{context.values_text(one.site, [figures])} "
        f"was off by {shifted:.2g} deviations, their deviation by a factor of {scaled:.2g})"
    )
    first = f"From step {passes[0].step} on, {site_text(one.site)} (BatchNorm) uses its running"
    found = one, passes[0].step, {"shifted": shifted, "scaled": scaled}
    if context.is_trained:
        return _mode_finding(
            *found,
            f"{first} statistics while the model is trained, {seen}",
            "they are never updated in this mode; usually model.train() is missing before "
            "training, or use_running_average=True was passed",
        )
    return _mode_finding(
        *found,
        f"{first} statistics, {seen}",
        "fine in an evaluation once the statistics are learnt; call model.train() before training",
        "info",
    )


def _single_value(context: RuleContext, one: SiteFacts) -> Finding | None:
    if one.running != 0 or one.examples != 1:
        return None
    return _mode_finding(
        one,
        context.first_step,
        {"examples": 1},
        f"From step {context.first_step} on, {site_text(one.site)} (BatchNorm) takes the mean and "
        f"variance of a single value, so it returns its bias for every input",
        "train it on a larger batch, or use a LayerNorm or GroupNorm; call model.eval() for an "
        "evaluation",
        "warning" if context.gradient_passes else "info",
    )


def _updated_in_evaluation(context: RuleContext, one: SiteFacts) -> Finding | None:
    """For statistics that change in passes without gradients, between those of a training loop."""
    path = f"{one.site}/mean" if one.site else "mean"
    graded = {p.number for p in context.gradient_passes}
    watched = [p for p in context.clean if p.kind == "watch" and p.figures is not None]
    if not any(p.number in graded for p in watched):
        return None
    moved: list[int] = []  # steps
    for before, now in itertools.pairwise(watched):
        if {before.number, now.number} & graded or now.figures is None:
            continue
        still = [now.figures.parameter(p.path, "same") for p in context.weights]
        if now.figures.parameter(path, "same") == 0 and still and min(still) == 1:
            moved.append(before.step)
    if len(moved) < 2:
        return None
    return _mode_finding(
        one,
        moved[0],
        {"passes": len(moved)},
        f"From step {moved[0]} to step {moved[-1]}, {site_text(one.site)} (BatchNorm) updated its "
        f"running statistics in passes without gradients, between those with gradients",
        "usually model.eval() is missing before the evaluation (or model.train() after it)",
    )


def _mode_finding(
    one: SiteFacts,
    step: int,
    evidence: dict[str, float],
    what: str,
    advice: str,
    severity: Severity = "warning",
) -> Finding:
    return Finding(
        rule="mode",
        site=one.site,
        step=step,
        severity=severity,
        evidence=evidence,
        what=what,
        advice=advice,
    )


# ----------------------------------------------------------------------- unused


def unused(context: RuleContext) -> Iterator[Finding]:
    """Modules with parameters that no result depends on."""
    if context.is_empty:
        return
    recorded = {s.partition(":")[0] for p in context.passes for s, _ in p.keys}
    in_loops = {
        s.partition(":")[0] for p in context.gradient_passes if p.kind == "watch" for s, _ in p.keys
    }
    found: list[tuple[str, bool]] = []
    for one in context.facts.sites:
        parameters = context.parameters_in(one.site)
        if not parameters or any(is_within(one.site, other) for other, _ in found):
            continue
        if any(p.needed != 0 for p in parameters):
            continue
        if any(_moved(context, p.path) for p in parameters):
            continue
        called = one.order != UNKNOWN or any(is_within(site, one.site) for site in recorded)
        if called and context.gradient_passes and _has_gradient(context, one.site):
            continue  # a watched loss uses values that the traced call does not return
        if one.order == UNKNOWN and any(is_within(site, one.site) for site in in_loops):
            continue  # only the loop calls it: the traced call says nothing about it
        found.append((one.site, called))
    if found:
        site, called = found[0]
        size = sum(p.size for p in context.parameters_in(site))
        others = others_text([site_text(one) for one, _ in found[1:]], "module")
        how = "is called, but no result depends on it" if called else "is never called"
        trained = context.gradient_passes and not (context.is_evaluated and not context.is_trained)
        yield Finding(
            rule="unused",
            site=site,
            step=context.first_step,
            severity="warning" if trained else "info",
            evidence={"elements": size, "others": len(found) - 1},
            what=(
                f"From step {context.first_step} on, {site_text(site)} {how}{others}; the {size} "
                f"parameters of {site_text(site)} do nothing here"
            ),
            advice=(
                "usually a call was forgotten, or a result is overwritten; fine if only another "
                "mode or method uses it"
                if trained
                else "fine if only another mode or method uses it (training, a decoder); otherwise "
                "a call was forgotten, or a result is overwritten"
            ),
        )


def _has_gradient(context: RuleContext, path: str) -> bool:
    """Whether a gradient ever came back to a module or to anything in it."""
    return any(
        quantity == "gradient" and is_within(site.partition(":")[0], path)
        for one in context.gradient_passes
        for site, quantity in one.layout.whole
    )


def _moved(context: RuleContext, path: str) -> bool:
    for one in context.passes:
        if one.figures is None:
            continue
        if one.figures.parameter(path, "graded") > 0:
            return True
        if one.figures.parameter(path, "same") == 0 and not one.figures.parameter(path, "decay"):
            return True
    return False


def sinusoids(context: RuleContext) -> Iterator[Finding]:
    """Sinusoidal embeddings of the model's input of which most units hardly vary."""
    for window in context.windows([p for p in context.clean if p.figures is not None]):
        each = [p.figures for p in window if p.figures is not None]
        parts = {
            site: context.masked_part(each[0], site, "still")
            for site in context.sort(each[0].sites)
            if _is_fixed_sinusoid(context, site, each[0])
            and all(_is_still(context, site, f) for f in each)
        }
        if not parts:
            continue
        (site, part), *more = parts.items()
        others = others_text([f"{other:.0%} of {site_text(s)}" for s, other in more])
        examples = examined_count(each[0].figure(site, "examples"))
        yield Finding(
            rule="constant",
            site=site,
            step=window[0].step,
            severity="info",
            evidence={"fraction": part, "examples": examples, "others": len(more)},
            what=(
                f"{context.part_text(site, part)} hardly vary over the {examples} examples "
                f"that were examined, each by a deviation below {STILL_SHARE:.0%} of the largest "
                f"one{others}"
            ),
            advice=(
                "usually what it receives varies too little for its frequencies (a time from 0 to "
                "1 where 0 to 1000 is meant), so check the range of its input, and multiply it or "
                "raise the frequencies; the other units may well be enough"
            ),
        )
        return


def _is_still(context: RuleContext, site: str, figures: PassStats) -> bool:
    """Whether most units of one vector per example hardly vary, in a pass whose examples differ."""
    if site not in figures.row_of or figures.varied != 1 or figures.figure(site, "positions") != 1:
        return False
    many = (
        min(figures.figure(site, "units"), examined_count(figures.figure(site, "examples"))) >= MANY
    )
    varies = figures.figure(site, "flat") < 1
    return many and varies and context.masked_part(figures, site, "still") >= MOSTLY_STILL


def _is_fixed_sinusoid(context: RuleContext, site: str, figures: PassStats) -> bool:
    """Whether a site returns sines of what the model received, which no parameter enters, and which
    are all that a layer multiplies: what is added to tokens, say, may well vary little.
    """
    paths, units = context.paths, figures.figure(site, "units")
    if context.site(site).made_by != "sinusoid" or context.parameters_in(site):
        return False
    if any(paths.reaches(s, site, parameters=True) for s in context.parameters_by_site):
        return False
    before = [s for s in context.order if paths.reaches(s, site)]
    return any(one.role == Role.INPUT for s in before for one in paths.feeds(s)) and any(
        context.site(s).affine == 1
        and [one.site for one in paths.feeds(s) if one.role != Role.PARAMETERS] == [site]
        and any(p.axes == 2 and p.size == units * figures.figure(s, "units") for p in held)
        for s, held in context.parameters_by_site.items()
    )  # the sizes show that nothing stands beside it


# ---------------------------------------------------------------------- uncalled


def uncalled(context: RuleContext) -> Iterator[Finding]:
    """A loop, the one watched last, that calls something else instead of the watched model."""
    found = context.facts.uncalled
    if found is not None:
        yield Finding(
            rule="uncalled",
            site="",
            step=found.step,
            severity="error",
            evidence={"steps": found.steps, "calls": found.calls},
            what=f"From step {found.step} on, {lower_first(found.what)}",
            advice=found.advice,
        )


# ----------------------------------------------------------------------- metrics


def metrics(context: RuleContext) -> Iterator[Finding]:
    """Metrics with values that are not finite, in measured steps or between them."""
    found = {name: one for name, one in context.metrics.items() if one.nan or one.infinite}
    if not found:
        return
    first = min(one.first for one in found.values())
    said = [
        f"{name!r} was {_kinds_text(one)} in {one.nan + one.infinite} of {one.points} values, "
        f"first at step {one.first}"
        for name, one in sorted(found.items(), key=lambda item: item[1].first)
    ]
    more = f"; and {len(said) - METRICS} more" if len(said) > METRICS else ""
    yield Finding(
        rule="metrics",
        site="",
        step=first,
        severity="warning",
        evidence={
            "metrics": len(found),
            "nan": sum(one.nan for one in found.values()),
            "infinite": sum(one.infinite for one in found.values()),
        },
        what=f"{'Metrics were' if len(found) > 1 else 'A metric was'} not finite: "
        f"{'; '.join(said[:METRICS])}{more}",
        advice=_why_a_metric(context, first),
    )


def _kinds_text(one: Tally) -> str:
    return " or ".join(["NaN"] * bool(one.nan) + ["infinite"] * bool(one.infinite))


def _why_a_metric(context: RuleContext, step: int) -> str:
    made = "a mean over nothing (an empty batch, all of it masked), the log of 0, or an overflow"
    then = "a NaN in the loss makes every parameter NaN with the next update"
    here = [one for one in context.passes if one.step == step]
    if any(one.perturbed for one in here):
        return f"a perturbation was on in step {step}, which may have made it; {then}"
    if any("nan" in one.nonfinite for one in here):
        return f"values of the model held NaN in step {step} too, and the finding on them says more"
    if here:
        return (
            f"every value of the model that was measured in step {step} was free of NaN, so what "
            f"follows the model made it: usually {made}; {then}"
        )
    return f"usually {made}, or parameters that were no longer finite; {then}"
