"""Which finding explains which: a consequence is listed under its cause, not separately.

An early fault causes later ones: forward, backward, in the update, in the next steps. One finding
explains another only if data flows from the one to the other, in the direction in which such a
fault spreads:

- forward: what the first site returns enters what the second returns;
- backward: what the second site returns, or its module's parameters, enter the first, because the
  gradient comes back the same way;
- in an update: parameters that the fault spoils, or that moved too far, enter the second.

Their rules, the passes and the figures must fit too, so two independent faults stay two findings.
Where the flow is unknown (an eager model, an older file, a site that only the loop calls), only
what is at the same site is explained. Invariant: no finding is lost; each one is in the list or
among the effects of one that is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final

from nnx_inspector.findings.evidence import ALMOST_ALL, receives_only_zeros
from nnx_inspector.findings.finding import (
    FORWARD_RULES,
    RULES,
    SEVERITIES,
    Finding,
    others_text,
)
from nnx_inspector.findings.rule_context import RuleContext, is_within
from nnx_inspector.recordings.facts import PassStats

LOST: Final = 5e-3
"""A gradient below this fraction of the last layers' gradient is explained by a vanishing one."""

LEFT: Final = 1e-3
"""Clipping to less than this part of a gradient is as good as a learning rate of 0."""

Explains = Callable[[RuleContext, Finding, Finding], bool]


def group_by_cause(context: RuleContext, found: Sequence[Finding]) -> list[Finding]:
    """The findings that no other one explains, with those that they explain as their effects."""
    causes = {
        i: j
        for i, effect in enumerate(found)
        if (j := _cause(context, found, i)) is not None and found[j] is not effect
    }
    effects: dict[int, list[Finding]] = {}
    for i in causes:
        effects.setdefault(_root(causes, i), []).append(found[i])
    roots = [
        _with_effects(one, _merge_alike(effects.get(i, [])))
        for i, one in enumerate(found)
        if i not in causes
    ]
    return _merge_alike(roots)


def _cause(context: RuleContext, found: Sequence[Finding], i: int) -> int | None:
    """The first finding, in the order of causes, that explains a finding."""
    effect = found[i]
    able = [
        j
        for j, one in enumerate(found)
        if j != i and explains(context, one, effect) and not explains(context, effect, one)
    ]
    return min(able, key=lambda j: (_rank(found[j]), context.order_of(found[j].site)), default=None)


def _root(causes: dict[int, int], i: int) -> int:
    seen = {i}
    while i in causes and causes[i] not in seen:
        i = causes[i]
        seen.add(i)
    return i


def _rank(finding: Finding) -> int:
    return RULES.index(finding.rule)


def _with_effects(cause: Finding, effects: list[Finding]) -> Finding:
    """A cause as severe as its most severe effect, unless it is harmless ("info") itself."""
    if not effects:
        return cause
    grave = [one.severity for one in (cause, *effects)]
    severity = "info" if cause.severity == "info" else min(grave, key=SEVERITIES.index)
    return dataclasses.replace(cause, severity=severity, effects=tuple(effects))


def _merge_alike(found: list[Finding]) -> list[Finding]:
    """Merge the findings on parameters that do not learn for the same reason."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for number, one in enumerate(found):
        alone = () if one.rule == "no-gradient" else (str(number),)
        groups.setdefault((one.rule, one.severity, one.advice, *alone), []).append(one)
    return [_merge_group(group) if len(group) > 1 else group[0] for group in groups.values()]


def _merge_group(group: list[Finding]) -> Finding:
    first = group[0]
    counts = {name: sum(one.evidence[name] for one in group) for name in first.evidence}
    effects = _merge_alike([one for each in group for one in each.effects])
    return dataclasses.replace(
        first,
        step=min(one.step for one in group),
        evidence=counts,
        what=first.what + others_text([one.site for one in group[1:]], "parameter", said=0),
        effects=tuple(effects),
    )


# -------------------------------------------------------------------- what explains what


def explains(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    of = _EXPLAINS.get(cause.rule)
    apart = cause.evidence.get("perturbed") != effect.evidence.get("perturbed")
    if of is None or (apart and "nonfinite" in (cause.rule, effect.rule)):
        return False
    return of(context, cause, effect)


def _enters(context: RuleContext, cause: Finding, effect: Finding, *, values: bool = False) -> bool:
    """Whether what the cause's site returns enters what the effect's site returns."""
    return context.paths.reaches(cause.site, effect.site, values=values)


def _precedes(context: RuleContext, effect: Finding, cause: Finding) -> bool:
    """Whether the gradient of the effect's site, or of its parameters, comes back through the
    cause's site.
    """
    held = effect.rule in _PARAMETER_RULES
    return context.paths.reaches(effect.site, cause.site, parameters=held)


def _along(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    """Whether a gradient that comes back through one of the two sites comes from the other, or the
    values of one enter it.
    """
    return _precedes(context, effect, cause) or _enters(context, cause, effect)


def _nonfinite_explains(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    """Inf becomes NaN in the values that it enters, in all gradients that these values enter, and
    by an update in the parameters; an optimizer that leaves such gradients out changes nothing.
    """
    if cause.severity == "info":  # a mask
        return False
    if effect.rule == "nonfinite":
        if effect.severity == "info":
            return False
        first, then = (_position(context, one) for one in (cause, effect))
        return first < then and _spreads(context, cause, effect)
    if cause.step > effect.step:
        return False
    still = effect.rule == "no-gradient" and "did not change" in effect.what
    if still or _is_too_small(effect):
        return context.paths.meet(effect.site, cause.site, parameters=True)
    return _is_before(context, cause, effect)


def _position(context: RuleContext, one: Finding) -> tuple[float, float, tuple[int, int, int]]:
    return one.evidence["pass"], one.evidence.get("backward", 0), context.order_of(one.site)


def _spreads(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    """Whether a value that is not finite reaches one that a later finding names."""
    if "backward" in effect.evidence:
        if "backward" in cause.evidence:
            return context.paths.reaches(effect.site, cause.site)
        return context.paths.meet(effect.site, cause.site)  # of a product, each has the other's
    if "backward" not in cause.evidence and _enters(context, cause, effect, values=True):
        inner = is_within(cause.site, effect.site) and cause.site != effect.site
        return not (inner and _is_received(context, effect))
    return cause.step < effect.step and _spreads_by_update(context, cause, effect)


def _is_received(context: RuleContext, effect: Finding) -> bool:
    """Whether the values that a finding names were in the site's input already."""
    one = next((p for p in context.passes if p.number == effect.evidence["pass"]), None)
    summary = None if one is None else one.summary(effect.site, "input")
    return summary is not None and summary.finite < summary.size


def _spreads_by_update(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    """Whether parameters of which the gradient held the cause are not finite, and enter the effect.

    The parameters in question are those of the effect's pass.
    """
    figures = next((p.figures for p in context.passes if p.number == effect.evidence["pass"]), None)
    broken = [
        site
        for site, held in context.parameters_by_site.items()
        if figures and any(_is_nonfinite(figures, p.path) for p in held)
    ]
    return any(
        context.paths.reaches(site, effect.site, parameters=True)
        and context.paths.meet(site, cause.site, parameters=True)
        for site in broken
    )


def _is_nonfinite(figures: PassStats, path: str) -> bool:
    """Whether a parameter that was measured is not finite."""
    if any(figures.parameter(path, name) > 0 for name in ("nan", "infinite")):
        return True
    return path in figures.row_of_parameter and math.isnan(figures.parameter(path, "norm"))


def _overflow_explains(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    """A large value is squared to Inf, saturates functions, becomes 0 in a norm that divides by
    Inf, and makes the gradients explode, or vanish, that it enters.
    """
    if cause.step > effect.step or cause.severity == "info":  # info: float8 that is cut off
        return False
    if effect.rule == "nonfinite":
        if "backward" in effect.evidence:
            return context.paths.meet(effect.site, cause.site)
        later = cause.step < effect.step and _spreads_by_update(context, cause, effect)
        return later or _enters(context, cause, effect, values=True)
    if effect.rule in ("dead-units", "saturated-units", "constant"):
        return _enters(context, cause, effect)
    if effect.rule == "exploding-gradient":
        return context.paths.meet(effect.site, cause.site)
    return _is_before(context, cause, effect) or _has_stopped(context, cause, effect)


def _mode_explains(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    """A norm over one value returns the same for all: nothing passes it, forward or backward."""
    if cause.evidence.get("examples") != 1:
        return False
    if effect.rule in FORWARD_RULES:
        return _enters(context, cause, effect)
    if effect.rule == "vanishing-gradient":
        return _precedes(context, effect, cause)
    return _is_before(context, cause, effect)


def _dtype_explains(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    """A layer that is in float16 by mistake explains its own overflow."""
    in_float16 = context.site(cause.site).leaving == "float16"
    own = effect.rule == "overflow" and effect.evidence["limit"] < 1e6
    return in_float16 and own and cause.site == effect.site


def _forward_explains(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    """Dead units make all examples alike after them, and leave no gradient before them."""
    if cause.severity == "info":  # most units of an embedding hardly vary, the others do
        return False
    if cause.step > effect.step and effect.rule != "no-gradient":
        return False
    if effect.rule in FORWARD_RULES:
        in_order = FORWARD_RULES.index(cause.rule) < FORWARD_RULES.index(effect.rule)
        return in_order and effect.rule != "saturated-units" and _enters(context, cause, effect)
    if effect.rule == "vanishing-gradient" or _is_small_early_only(effect):
        return _precedes(context, effect, cause)
    if cause.rule == "dead-units" and cause.evidence["fraction"] < ALMOST_ALL:
        return False
    return _is_before(context, cause, effect) or _has_stopped(context, cause, effect)


def _is_before(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    """Whether a parameter lies before a site that passes no gradient, or behind one whose output is
    all that enters it, and is 0 or the same for all examples.
    """
    if effect.rule != "no-gradient" or "takes no part" in effect.what:
        return False
    last = context.gradient_passes[-1:]
    if _precedes(context, effect, cause):
        gradients = (one.summary(effect.site, "gradient") for one in last)
        unreached = any(one is not None and one.norm == 0 for one in gradients)
        if unreached or (effect.severity == "warning" and "exactly 0" in effect.what):
            return True
    return _enters(context, cause, effect) and any(
        receives_only_zeros(context, one, effect.site)
        or (one.figures is not None and one.figures.figure(effect.site, "flat") == 1)
        for one in last
    )


def _has_stopped(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    """Whether no weight changes, and all of them lie before or behind a site that passes on nothing
    but zeros.
    """
    if not _is_too_small(effect) or effect.evidence["late"] > 0:
        return False
    return all(
        context.paths.reaches(site, cause.site, parameters=True)
        or context.paths.reaches(cause.site, site)
        for site, held in context.parameters_by_site.items()
        if any(p.axes >= 2 for p in held)
    )


def _vanishing_explains(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    """A parameter with hardly any gradient does not change, or changes too little for its dtype.

    Its gradient comes back through a site where hardly anything was left of it.
    """
    if not context.gradient_passes or "takes no part" in effect.what:
        return False
    if effect.rule != "no-gradient":
        return _is_small_early_only(effect) and _along(context, cause, effect)
    norms, small = (
        context.gradient_norms(context.gradient_passes[-1]),
        LOST * cause.evidence["last"],
    )
    early = norms.get(effect.site, 0.0 if "exactly 0" in effect.what else math.inf)
    shared = (site for site in {cause.site, *norms} if norms.get(site, 0.0) <= small)
    return early <= small and any(
        context.paths.reaches(cause.site, site)
        and context.paths.reaches(effect.site, site, parameters=True)
        for site in shared
    )


def _exploding_explains(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    """Exploding gradients overflow, or make some layers' updates too large."""
    if cause.step > effect.step:
        return False
    if effect.rule == "nonfinite" and "backward" in effect.evidence:
        return _along(context, cause, effect)
    if effect.rule == "nonfinite":
        return cause.step < effect.step and _spreads_by_update(context, cause, effect)
    too_large = _is_too_large(effect) and effect.evidence["late"] < effect.evidence["limit"]
    return too_large and _along(context, cause, effect)


def _update_explains(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    """Updates that are too large break what was sound before them, where the weights that moved
    enter it, or enter a value that its gradient comes back through.
    """
    wrecked = (*FORWARD_RULES, "overflow", "nonfinite", "exploding-gradient", "vanishing-gradient")
    if not (_is_too_large(cause) and effect.rule in wrecked and cause.step < effect.step):
        return False
    backward = "gradient" in effect.rule or "backward" in effect.evidence
    joined = context.paths.meet if backward else context.paths.reaches
    return any(
        joined(site, effect.site, parameters=True)
        for site in _moved_modules(context, cause, effect)
    )


def _moved_modules(context: RuleContext, cause: Finding, effect: Finding) -> list[str]:
    """The modules whose weights moved too far between two findings."""
    passes = [(p.step, p.figures) for p in context.passes if p.figures is not None]
    limit = cause.evidence["limit"]
    between = [(f, "change") for step, f in passes if cause.step < step <= effect.step]
    between += [(f, "update") for step, f in passes if cause.step <= step < effect.step]
    return [
        site
        for site, held in context.parameters_by_site.items()
        if any(f.parameter(p.path, name) >= limit for f, name in between for p in held)
    ]


def _judges_size(finding: Finding) -> bool:
    """Whether a finding judges the size of updates. The others by this rule (a rate that has become
    0, say) are about parameters that have a gradient, so nothing in the model explains them.
    """
    return finding.rule == "update-ratio" and "late" in finding.evidence


def _is_too_large(finding: Finding) -> bool:
    return _judges_size(finding) and finding.evidence["ratio"] >= finding.evidence["limit"]


def _is_too_small(finding: Finding) -> bool:
    return _judges_size(finding) and not _is_too_large(finding)


def _is_small_early_only(finding: Finding) -> bool:
    """Whether updates are small only because gradients are: the last layers change as usual."""
    return _is_too_small(finding) and finding.evidence["late"] > finding.evidence["limit"]


_PARAMETER_RULES: Final = ("no-gradient", "update-ratio")
"""The rules whose site is a module that holds parameters."""


def _experts_explain(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    """What an expert receives that is never chosen are zeros."""
    whole = cause.site.rpartition("/")[0]
    return "left it out" in effect.advice and (
        is_within(effect.site, cause.site) or is_within(effect.site, whole)
    )


def _clipping_explains(context: RuleContext, cause: Finding, effect: Finding) -> bool:
    """A limit that leaves next to nothing of a gradient leaves nothing to move by."""
    return cause.evidence["taken"] >= 1 - LEFT and _is_too_small(effect)


_EXPLAINS: Final[dict[str, Explains]] = {
    "nonfinite": _nonfinite_explains,
    "overflow": _overflow_explains,
    "mode": _mode_explains,
    "dtype": _dtype_explains,
    "dead-experts": _experts_explain,
    **dict.fromkeys(FORWARD_RULES, _forward_explains),
    "vanishing-gradient": _vanishing_explains,
    "exploding-gradient": _exploding_explains,
    "update-ratio": _update_explains,
    "clipping": _clipping_explains,
}
