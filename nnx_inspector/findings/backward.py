"""Rules for the backward pass: gradients along depth, and parameters without one.

Invariant: a gradient that was not measured does not count as 0, and passes without any gradient are
not context. A parameter that takes no part in a pass is not confused with one whose gradient is 0.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Final

from nnx_inspector.findings.evidence import (
    any_weight_is_zero,
    gain_by_chance,
    multiplies_harmless_zeros,
    part_left_by_chance,
    reach_of_chance,
)
from nnx_inspector.findings.finding import Finding, site_text
from nnx_inspector.findings.precision.rounding import lost_updates
from nnx_inspector.findings.rule_context import RuleContext
from nnx_inspector.recordings.facts import ParameterFacts
from nnx_inspector.recordings.passes import Pass

VANISHED: Final = 1e-4
"""Glorot and Bengio 2010, figure 7: with their initialisation the gradients of all layers stay
within one order of magnitude; with the older one they fall by less than one per layer."""
EXPLODED: Final = 1e4
"""The same for growth; Pascanu et al. 2013 clip norms that grow by orders of magnitude."""
STEADY_VANISHED, STEADY_EXPLODED = 5e-3, 300.0
"""The limits for a steady change, by a factor of PER_LAYER or more per layer on average."""
PER_LAYER: Final = 0.6
DEEP: Final = 4
"""A model with fewer sites is too shallow for these rules."""

LEAST_ROWS: Final = 8
"""With fewer examples a gradient of 0 proves nothing: all may satisfy a margin, say."""

_CUT: Final = (
    "has no gradient: nothing comes back to it from the loss",
    "usually a jax.lax.stop_gradient, round, sign or argmax between it and the loss, or a result "
    "that the loss does not use; fine if it is frozen on purpose",
)
WHY: Final = {
    "cut": _CUT,
    "stopped": _CUT,  # in a loop that is differentiated by it, and moves others only
    "zero": (
        "has a gradient of exactly 0",
        "it takes part in the pass, so usually a factor between it and the loss is 0 (a mask, a "
        "gate, the weight of a term), or the gradient underflows (float16 without loss scaling)",
    ),
    "still": (
        "did not change although others did",
        "fine if it is frozen on purpose; otherwise the optimizer does not update it (check its "
        "wrt=), or its updates are too small for its dtype",
    ),
    "absent": (
        "takes no part in this pass, so it has no gradient",
        "fine if only another mode, method or term of the loss uses it; otherwise its use was "
        "forgotten",
    ),
}
"""For each way in which a parameter does not learn: what is seen, and what it usually means."""

UNTRAINED_NAMES: Final = re.compile(r"teacher|target|ema|momentum|frozen|reference|codebook", re.I)
"""Names of parameters that are usually not trained by gradients."""


# ------------------------------------------------------------------- along depth


def vanishing_gradient(context: RuleContext) -> Iterator[Finding]:
    yield from _along_depth(context, vanishing=True)


def exploding_gradient(context: RuleContext) -> Iterator[Finding]:
    yield from _along_depth(context, vanishing=False)


def _along_depth(context: RuleContext, *, vanishing: bool) -> Iterator[Finding]:
    newest = context.gradient_passes[-1:]
    for window in context.windows(context.gradient_passes):
        found = [one for p in window if (one := _ratio(context, p)) is not None]
        luck = max((_chance_factor(context, p, vanishing=vanishing) for p in window), default=1.0)
        if len(found) == len(window) and all(_is_bad(r, luck, vanishing) for r in found):
            last = _ratio(context, newest[0])
            over = last is not None and not _is_bad(last, luck, vanishing)
            since = f"; at step {newest[0].step} it was {last.value:.2g}" if last and over else ""
            yield _depth_finding(window[0].step, found[0], since, vanishing=vanishing)
            return


def _depth_finding(step: int, ratio: _Ratio, since: str, *, vanishing: bool) -> Finding:
    how = "fell" if vanishing else "grew"
    advice = (
        "usually functions that saturate, weights that are too small, or a deep network without "
        "normalisation or skip connections, either of which helps in all three cases; until then "
        "the first layers hardly learn, and a higher learning rate alone moves only the last ones"
        if vanishing
        else "usually weights that are too large, or a deep network without normalisation; "
        "initialise smaller weights or normalise; clipping the gradient keeps steps from "
        "overshooting, but the later layers then hardly learn"
    )
    return Finding(
        rule="vanishing-gradient" if vanishing else "exploding-gradient",
        site=ratio.first,
        step=step,
        severity="warning",
        evidence={
            "ratio": ratio.value,
            "first": ratio.early,
            "last": ratio.late,
            "sites": ratio.sites,
        },
        what=(
            f"At step {step} the norm of the gradient {how} from {ratio.late:.2g} at "
            f"{site_text(ratio.last)}, one of the last of {ratio.sites} sites, to "
            f"{ratio.early:.2g} at "
            f"{site_text(ratio.first)}, one of the first, a ratio of {ratio.value:.2g}{since}"
        ),
        advice=advice,
    )


def _sites_with_gradients(context: RuleContext, norms: dict[str, float]) -> list[str]:
    sites = (
        [s for s in norms if context.parameters_of(s)]
        if context.parameters_by_site
        else list(norms)
    )
    return sites if len(sites) >= DEEP else [s for s in norms if s]


@dataclasses.dataclass(frozen=True)
class _Ratio:
    """The norm of the gradient in the first third of the sites relative to the last third.

    Attributes:
        sites: how many sites there are.
        first, last: the site with the largest norm in each of these thirds.
        early, late: these norms.
    """

    sites: int
    first: str
    last: str
    early: float
    late: float

    @property
    def value(self) -> float:
        return self.early / self.late


def _ratio(context: RuleContext, one: Pass) -> _Ratio | None:
    norms = context.gradient_norms(one)
    sites = _sites_with_gradients(context, norms)
    if len(sites) < DEEP:
        return None
    third = max(1, len(sites) // 3)
    first, last = (max(some, key=norms.__getitem__) for some in (sites[:third], sites[-third:]))
    return _Ratio(len(sites), first, last, norms[first], norms[last])


def _chance_factor(context: RuleContext, one: Pass, *, vanishing: bool) -> float:
    """The factor by which random layers of these widths may change a gradient by chance."""
    if one.figures is None:
        return 1.0
    sites = _sites_with_gradients(context, context.gradient_norms(one))
    if vanishing:
        return 1 / part_left_by_chance(context, one.figures, sites, fault=VANISHED)
    widths = [one.figures.figure(s, "units") for s in sites]
    return gain_by_chance([width for width in widths if width > 0])


def _is_bad(one: _Ratio, luck: float, vanishing: bool) -> bool:
    ratio, layers = one.value if vanishing else 1 / one.value, one.sites
    limit, steady = (
        (VANISHED, STEADY_VANISHED) if vanishing else (1 / EXPLODED, 1 / STEADY_EXPLODED)
    )
    if ratio * luck > 1:
        return False
    return ratio <= limit or (
        layers >= DEEP + 1 and ratio <= min(steady, PER_LAYER ** (layers - 1))
    )


# -------------------------------------------------------------- without gradient


def no_gradient(context: RuleContext) -> Iterator[Finding]:
    """Parameters that do not learn: one finding for each, which `causes` merges."""
    if (whole := _no_gradient_at_all(context)) is not None:
        yield whole
        return
    lost = lost_updates(context)
    rounded = {p.path for p, _ in lost.parts} if lost else set[str]()
    for one, why, step in _parameters_without_gradient(context):
        if why in ("zero", "still", "stopped") and multiplies_harmless_zeros(context, one.site):
            continue
        if why == "still" and one.path in rounded:
            continue
        what, advice = WHY[why]
        benign = why in ("still", "stopped", "absent") or UNTRAINED_NAMES.search(one.path)
        yield Finding(
            rule="no-gradient",
            site=one.site,
            step=step,
            severity="info" if benign else "warning",
            evidence={"parameters": 1, "elements": one.size},
            what=f"From step {step} on, the parameter {one.path!r} {what}",
            advice=advice,
        )


def _no_gradient_at_all(context: RuleContext) -> Finding | None:
    """The finding if the passes are differentiated with respect to parameters of the model, and no
    gradient ever comes back to any of them.

    In a loop, parameters that move by other means (a gradient in forward mode, a loss of the
    parameters alone) prove that there is one.
    """
    passes = [(p, f) for p in context.clean if (f := p.figures) is not None]
    passes = [(p, f, of) for p, f in passes if (of := context.differentiated_parameters(f))]
    in_loop = [p for p, *_ in passes if p.kind == "watch"]
    if context.gradient_passes or not passes or len(in_loop) == 1 == len(passes):
        return None
    if any(f.parameter(p.path, "graded") > 0 for _, f, of in passes for p in of):
        return None
    if any(context.learns(p.path) for p in context.weights):
        return None
    first, _, of = passes[0]
    count, elements = len(of), sum(p.size for p in of)
    return Finding(
        rule="no-gradient",
        site="",
        step=first.step,
        severity="error",
        evidence={"parameters": count, "elements": elements, "passes": len(passes)},
        what=(
            f"From step {first.step} on, a loss is differentiated with respect to {count} "
            f"parameter{'s' * (count > 1)} of the model, and no gradient comes back to "
            f"{'any of them' if count > 1 else 'it'}"
        ),
        advice=(
            "usually a jax.lax.stop_gradient, argmax, round or cast to integers stands between the "
            "model's output and the loss, or the loss uses another array instead of that output; "
            "nothing is learnt until that is changed"
        ),
    )


def _parameters_without_gradient(context: RuleContext) -> Iterator[tuple[ParameterFacts, str, int]]:
    """(parameter, one of WHY, step) for each parameter that does not learn."""
    graded, moving = context.gradient_passes, context.any_changed
    evident = [p for p in graded if not any_weight_is_zero(context, p)]
    chances: _Chances | None = None
    for site, parameters in context.parameters_by_site.items():
        reached = {"gradient": 0, "output": 0}
        for one in graded:
            for quantity in reached:
                reached[quantity] += (site, quantity) in one.layout.whole
        for parameter in parameters:
            # a bias that a norm or a difference cancels has a gradient of 0 by design
            bias = parameter.axes < max(p.axes for p in parameters)
            known = _known_values(graded, parameter.path, "graded")
            seen_at = evident if known and _known_values(evident, parameter.path, "graded") else []
            same = _known_values(graded, parameter.path, "same")
            absent = 0 in (parameter.needed, parameter.in_loss)
            step = graded[0].step if graded else 0
            if max(known, default=0) > 0 or context.learns(parameter.path):
                continue  # such as an average of other weights, whatever its name
            if parameter.needed == 0 and all(p.needed == 0 for p in context.parameters_in(site)):
                continue
            may_not_run = context.site(site).conditional == 1
            if (reached["output"] or may_not_run) and not context.any_values(graded, site):
                continue
            if known:
                cut = reached["output"] > 0 and reached["gradient"] == 0
                if absent:
                    yield parameter, "absent", step
                elif cut:
                    yield parameter, "cut", step
                elif seen_at and not bias:
                    chances = _chances(context) if chances is None else chances
                    if _is_evident(context, parameter, chances):
                        yield parameter, "zero", seen_at[0].step
            elif reached["output"] > 1 and reached["gradient"] == 0 and context.site(site).leaving:
                # jax computes no gradient that nothing asks for
                stays = len(same) >= 2 and min(same) == 1 and moving
                asked = set(_known_values(graded, parameter.path, "differentiated")) == {1}
                still = "stopped" if asked else "still"
                yield parameter, "absent" if absent else still if stays else "cut", step
            elif moving and reached["gradient"] and len(same) >= 2 and min(same) == 1 and not bias:
                yield parameter, "absent" if absent else "still", step


_Chances = Sequence[tuple[float, tuple[float, ...]]]
"""The examples of each pass with figures, and the place that chance reaches."""


def _chances(context: RuleContext) -> _Chances:
    return [
        (max(f.figure(s, "examples") for s in f.sites), reach_of_chance(context, f))
        for one in context.gradient_passes
        if (f := one.figures) is not None and f.sites
    ]


def _is_evident(context: RuleContext, parameter: ParameterFacts, chances: _Chances) -> bool:
    """Whether a gradient of 0 is more than chance with few examples or narrow layers."""
    rows, here = math.fsum(examples for examples, _ in chances), context.order_of(parameter.site)
    return (rows == 0 or rows >= LEAST_ROWS) and all(reach < here for _, reach in chances)


def _known_values(passes: Sequence[Pass], path: str, name: str) -> list[float]:
    values = [p.figures.parameter(path, name) for p in passes if p.figures is not None]
    return [x for x in values if not math.isnan(x)]
