"""Which finding explains which: a consequence is listed under its cause, not separately.

An early fault causes later ones: forward, backward, in the update, in the next steps. Whether one
finding explains another depends on their rules, their order in the pass and in time, and their
figures, so two independent faults stay two findings. Invariant: no finding is lost; each one is in
the list or among the effects of one that is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final

from nnx_inspector.findings.evidence import ALMOST_ALL
from nnx_inspector.findings.finding import (
    CAUSES_FIRST,
    GOING_FORWARD,
    SEVERITIES,
    Finding,
    and_others,
)
from nnx_inspector.findings.judged import Judged

LOST: Final = 5e-3
"""A gradient below this fraction of the last layers' gradient is explained by a vanishing one."""

Explains = Callable[[Judged, Finding, Finding], bool]


def by_cause(judged: Judged, found: Sequence[Finding]) -> list[Finding]:
    """The findings that no other one explains, with those that they explain as their effects."""
    causes = {
        i: j
        for i, effect in enumerate(found)
        if (j := _cause(judged, found, i)) is not None and found[j] is not effect
    }
    effects: dict[int, list[Finding]] = {}
    for i in causes:
        effects.setdefault(_root(causes, i), []).append(found[i])
    roots = [
        _with_effects(one, _together(effects.get(i, [])))
        for i, one in enumerate(found)
        if i not in causes
    ]
    return _together(roots)


def _cause(judged: Judged, found: Sequence[Finding], i: int) -> int | None:
    """The first finding, in the order of causes, that explains a finding."""
    effect = found[i]
    able = [
        j
        for j, one in enumerate(found)
        if j != i and explains(judged, one, effect) and not explains(judged, effect, one)
    ]
    return min(able, key=lambda j: (_rank(found[j]), judged.at(found[j].site)), default=None)


def _root(causes: dict[int, int], i: int) -> int:
    seen = {i}
    while i in causes and causes[i] not in seen:
        i = causes[i]
        seen.add(i)
    return i


def _rank(finding: Finding) -> int:
    return CAUSES_FIRST.index(finding.rule)


def _with_effects(cause: Finding, effects: list[Finding]) -> Finding:
    """A cause as severe as its most severe effect, unless it is harmless ("info") itself."""
    if not effects:
        return cause
    grave = [one.severity for one in (cause, *effects)]
    severity = "info" if cause.severity == "info" else min(grave, key=SEVERITIES.index)
    return dataclasses.replace(cause, severity=severity, effects=tuple(effects))


def _together(found: list[Finding]) -> list[Finding]:
    """Merge the findings on parameters that do not learn for the same reason."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for number, one in enumerate(found):
        alone = () if one.rule == "no-gradient" else (str(number),)
        groups.setdefault((one.rule, one.severity, one.advice, *alone), []).append(one)
    return [_merged(group) if len(group) > 1 else group[0] for group in groups.values()]


def _merged(group: list[Finding]) -> Finding:
    first = group[0]
    counts = {name: sum(one.evidence[name] for one in group) for name in first.evidence}
    effects = _together([one for each in group for one in each.effects])
    return dataclasses.replace(
        first,
        step=min(one.step for one in group),
        evidence=counts,
        what=first.what + and_others([one.site for one in group[1:]], "parameter", said=0),
        effects=tuple(effects),
    )


# -------------------------------------------------------------------- what explains what


def explains(judged: Judged, cause: Finding, effect: Finding) -> bool:
    of = _EXPLAINS.get(cause.rule)
    apart = cause.evidence.get("perturbed") != effect.evidence.get("perturbed")
    if of is None or (apart and "nonfinite" in (cause.rule, effect.rule)):
        return False
    return of(judged, cause, effect)


def _not_after(judged: Judged, one: Finding, other: Finding) -> bool:
    return judged.at(one.site) <= judged.at(other.site)


def _of_nonfinite(judged: Judged, cause: Finding, effect: Finding) -> bool:
    """An Inf explains a later NaN; either explains that nothing changes, and gradients of 0."""
    if cause.severity == "info":  # a mask
        return False
    if effect.rule == "nonfinite":
        first = cause.evidence["pass"], cause.evidence.get("backward", 0), judged.at(cause.site)
        then = effect.evidence["pass"], effect.evidence.get("backward", 0), judged.at(effect.site)
        return first < then and effect.severity != "info"
    still = effect.rule == "no-gradient" and "did not change" in effect.what
    lost = still or _is_too_small(effect) or _is_before(judged, cause, effect)
    return lost and cause.step <= effect.step


def _of_overflow(judged: Judged, cause: Finding, effect: Finding) -> bool:
    """A large value is squared to Inf, saturates functions, and makes gradients explode."""
    if cause.step > effect.step or cause.severity == "info":  # info: float8 that is cut off
        return False
    if effect.rule == "nonfinite":
        return cause.step < effect.step or "backward" in effect.evidence or _not_after(
            judged, cause, effect
        )  # fmt: skip
    if effect.rule in ("saturated-units", "constant"):
        return _not_after(judged, cause, effect)
    return effect.rule == "exploding-gradient"


def _of_mode(judged: Judged, cause: Finding, effect: Finding) -> bool:
    """A norm over one value returns the same for all: nothing passes it, forward or backward."""
    if cause.evidence.get("examples") != 1:
        return False
    if effect.rule in GOING_FORWARD:
        return _not_after(judged, cause, effect)
    return effect.rule == "vanishing-gradient" or _is_before(judged, cause, effect)


def _of_dtype(judged: Judged, cause: Finding, effect: Finding) -> bool:
    """A layer that is in float16 by mistake explains its own overflow."""
    in_float16 = judged.site(cause.site).leaving == "float16"
    own = effect.rule == "overflow" and effect.evidence["limit"] < 1e6
    return in_float16 and own and cause.site == effect.site


def _of_forward(judged: Judged, cause: Finding, effect: Finding) -> bool:
    """Dead units make all examples alike after them, and leave no gradient before them."""
    if cause.step > effect.step and effect.rule != "no-gradient":
        return False
    if effect.rule in GOING_FORWARD:
        in_order = GOING_FORWARD.index(cause.rule) < GOING_FORWARD.index(effect.rule)
        return in_order and effect.rule != "saturated-units" and _not_after(judged, cause, effect)
    if effect.rule == "vanishing-gradient":
        return True
    whole = cause.rule != "dead-units" or cause.evidence["fraction"] >= ALMOST_ALL
    return _is_late_alright(effect) or (whole and _is_before(judged, cause, effect))


def _is_before(judged: Judged, cause: Finding, effect: Finding) -> bool:
    """Whether a parameter lies before a site that passes no gradient, or only meets its zeros."""
    if effect.rule != "no-gradient" or "takes no part" in effect.what:
        return False
    of_zeros, unreached = (
        any((one := p.summary(effect.site, which)) and one.norm == 0 for p in judged.graded[-1:])
        for which in ("input", "gradient")
    )
    if not _not_after(judged, effect, cause):
        return of_zeros
    return unreached or (effect.severity == "warning" and "exactly 0" in effect.what)


def _of_vanishing(judged: Judged, cause: Finding, effect: Finding) -> bool:
    """A parameter with hardly any gradient does not change, or changes too little for its dtype."""
    if effect.rule != "no-gradient":
        return _is_late_alright(effect)
    if "takes no part" in effect.what or not judged.graded:
        return False
    norms = judged.gradients(judged.graded[-1])
    early = norms.get(effect.site, 0.0 if "exactly 0" in effect.what else math.inf)
    return early <= LOST * cause.evidence["last"]


def _of_exploding(judged: Judged, cause: Finding, effect: Finding) -> bool:
    """Exploding gradients overflow, or make some layers' updates too large."""
    if cause.step > effect.step:
        return False
    if effect.rule == "nonfinite":
        return "backward" in effect.evidence or cause.step < effect.step
    return _is_too_large(effect) and effect.evidence["late"] < effect.evidence["limit"]


def _of_update(judged: Judged, cause: Finding, effect: Finding) -> bool:
    """Updates that are too large break what was sound before them."""
    wrecked = (*GOING_FORWARD, "overflow", "nonfinite", "exploding-gradient", "vanishing-gradient")
    return _is_too_large(cause) and effect.rule in wrecked and cause.step < effect.step


def _is_too_large(finding: Finding) -> bool:
    return (
        finding.rule == "update-ratio" and finding.evidence["ratio"] >= finding.evidence["limit"]
    )  # fmt: skip


def _is_too_small(finding: Finding) -> bool:
    return finding.rule == "update-ratio" and not _is_too_large(finding)


def _is_late_alright(finding: Finding) -> bool:
    """Whether updates are small only because gradients are: the last layers change as usual."""
    return _is_too_small(finding) and finding.evidence["late"] > finding.evidence["limit"]


_EXPLAINS: Final[dict[str, Explains]] = {
    "nonfinite": _of_nonfinite,
    "overflow": _of_overflow,
    "mode": _of_mode,
    "dtype": _of_dtype,
    **dict.fromkeys(GOING_FORWARD, _of_forward),
    "vanishing-gradient": _of_vanishing,
    "exploding-gradient": _of_exploding,
    "update-ratio": _of_update,
}
