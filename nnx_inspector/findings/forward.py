"""Rules for the forward pass: dead, saturated and constant units, collapse.

A rule reports only what holds in all of the last passes, and nothing if a figure that it needs was
not measured. Invariant: each rule makes one finding, at the first site in the order of the pass;
the number of other sites is part of the evidence.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from nnx_inspector.findings.evidence import (
    ALMOST_ALL,
    CHANCE,
    LEAST,
    NARROW,
    SOME,
    STILL,
    OffUnits,
    Zeros,
    binomial_tail,
    find_off_units,
    find_zeros,
    has_zero_factor,
    is_off_by_chance,
    part_left_by_chance,
    receives_only_zeros,
)
from nnx_inspector.findings.finding import Finding, others_text, site_text
from nnx_inspector.findings.rule_context import RuleContext, examined_count, is_within
from nnx_inspector.recordings.facts import PassStats, Role
from nnx_inspector.recordings.passes import Pass

SATURATED: Final = 0.5
"""Glorot and Bengio 2010, section 3: sigmoid networks whose top layer saturates stop learning;
their healthy ones keep the bulk of each layer off the flat parts."""
BY_CHANCE: Final = 0.05
"""Under Glorot's initialisation the input of a function has a deviation of 1: at most one unit in
20 lies beyond 2.65, whatever the number of examples."""

RANK_ONE: Final = 1.01
"""Participation ratio 1 + 2 (s2 / s1)**2 of a layer whose second direction has less than 7 % of
the first one's size (Daneshmand et al. 2020, "Batch normalization provably avoids rank collapse",
measures the same collapse by a lower bound of the rank)."""
RANK_BEFORE: Final = 2.0
WIDE: Final = 8
"""Fewer units than this are a bottleneck by design."""
USUAL: Final = 0.1
"""Weight size times the square root of the number of inputs; usual initialisations: 0.5 to 2."""
WHY_COLLAPSED: Final = {
    "rank": "usually a weight matrix of rank one or units that are copies of each other (a "
    "constant initialisation); initialise the weights at random",
    "deviation": "usually weights that are initialised or scaled far too small; initialise them in "
    "proportion to 1 / sqrt(inputs), or normalise after the layer",
}
DROP: Final = 1e-2
"""From one layer to the next the deviation stays within a factor of a few under every common
initialisation (He et al. 2015, "Delving deep into rectifiers", keeps it at 1)."""
SMALL: Final = 3e-3
"""A deviation above this is ordinary, whatever it was before (that of a normalised input, say)."""
FADED: Final = 3e-4
"""He et al. 2015: shrinking by this factor, a little per layer, keeps 30 layers from learning."""


def dead_units(context: RuleContext) -> Iterator[Finding]:
    """Units that a ReLU turns off for every example, and sites that receive or return only zeros.

    One finding of units that are off, and one for each origin of zeros.
    """
    off: list[tuple[str, OffUnits]] = []
    zeros: dict[tuple[str, str], list[tuple[str, Zeros]]] = {}
    for site in context.measured_sites:
        last = context.with_stats(site)[-1][1]
        if not context.parameters_in(site) or context.has_zero_weights(site, last, of=any):
            continue  # no parameters: it passes on its input; zeros (LoRA) have not learnt yet
        if not site and len(context.measured_sites) > 1:
            continue  # the model repeats the output of its last layer
        if context.sample_count(site) < LEAST:
            continue
        made = find_zeros(context, site)
        if made is not None:
            zeros.setdefault((made.why, made.source), []).append((site, made))
        elif (
            not _passes_on_input(context, site)
            and (one := find_off_units(context, site)) is not None
        ):
            off.append((site, one))
    if off:
        yield _off_finding(context, sorted(off, key=lambda one: one[1].part < ALMOST_ALL))
    for found in zeros.values():
        yield _zeros_finding(context, found)


def _passes_on_input(context: RuleContext, site: str) -> bool:
    """Whether a site's output is what it is because of its input: the same for all, or zeros."""
    facts, passes = context.site(site), context.with_stats(site)
    figures = passes[-1][1]
    if facts.activation == "relu" and figures.varied == 1 and figures.figure(site, "flat") == 1:
        return True
    if facts.activation != "relu" and "Norm" in facts.type:
        return True  # a norm turns nothing off: a constant input becomes its bias
    if not all(context.masked_part(f, site, "dead") == 1 for _, f in passes):
        return False
    if facts.affine == 1:
        return True  # of the zeros that it receives, another site is the origin, or the input
    inner = (s for s in context.measured_sites if s != site and is_within(s, site))
    return any(
        context.masked_part(figures, s, "dead") == 1 for s in inner if s in figures.sites
    ) or any(receives_only_zeros(context, one, site) for one, _ in passes)


def _off_finding(context: RuleContext, found: list[tuple[str, OffUnits]]) -> Finding:
    site, off = found[0]  # one that lets nothing pass, if there is any
    passes = context.with_stats(site)
    step = context.first_step_masked(site, off.mask, off.part)
    return Finding(
        rule="dead-units",
        site=site,
        step=step,
        severity="error" if off.part >= ALMOST_ALL else "warning",
        evidence={
            "fraction": off.part,
            "units": int(passes[-1][1].figure(site, "units")),
            "values": off.samples,
            "passes": len(passes),
            "others": len(found) - 1,
        },
        what=(
            f"{context.part_text(site, off.part)} are off for all {context.values_text(site)}"
            + _passes_text(len(passes))
            + others_text([f"{other.part:.0%} of {site_text(s)}" for s, other in found[1:]])
        ),
        advice=_how_units_died(context, off, step, context.site(site).activation),
    )


def _passes_text(passes: int) -> str:
    return f", in each of the last {passes} passes" if passes > 1 else ""


def _zeros_finding(context: RuleContext, found: list[tuple[str, Zeros]]) -> Finding:
    site, zeros = found[0]
    received = "receives" if context.site(site).affine == 1 else "returns"
    seen = (
        f"{site_text(site)} {received} only zeros"
        if zeros.zero
        else f"{site_text(site)} returns the same for all {context.values_text(site)}"
    )
    others = others_text([site_text(s) for s, _ in found[1:]])
    return Finding(
        rule="dead-units",
        site=site,
        step=zeros.step,
        severity="warning" if zeros.why == "gate" else "error",
        evidence={
            "fraction": 1.0,
            "units": int(context.with_stats(site)[-1][1].figure(site, "units")),
            "values": context.sample_count(site),
            "passes": zeros.passes,
            "others": len(found) - 1,
        },
        what=f"{seen}{_passes_text(zeros.passes)}{others}",
        advice=zeros.usual_cause(site),
    )


def _how_units_died(context: RuleContext, off: OffUnits, step: int, kind: str) -> str:
    if context.clean and step > context.clean[0].step:
        return (
            f"they were alive before step {step}, so usually a learning rate that is too high "
            f"moved their weights or biases too far; a unit that is off gets no gradient, so a "
            f"lower rate keeps others alive but does not revive these"
        )
    if off.biased:
        return (
            "the bias is as large as the output, so usually it was initialised or moved far below "
            "0; a unit that is off gets no gradient, so reset the bias"
        )
    if kind == "relu":
        return (
            "usually all inputs have one sign and the weights the other, or an earlier step moved "
            "the weights too far; a unit that is off gets no gradient; normalise the input, "
            "reinitialise the layer, or use a function with a slope below 0 (leaky_relu)"
        )
    return (
        "usually a ReLU in it that lets nothing pass, or a factor or mask that is 0; no gradient "
        "flows through these units"
    )


def saturated_units(context: RuleContext) -> Iterator[Finding]:
    """Units on the flat parts of tanh or sigmoid."""
    found: list[tuple[str, str, float]] = []
    for site in context.measured_sites:
        facts = context.site(site)
        mask = {"tanh": "tanh", "sigmoid": "sigmoid"}.get(facts.activation)
        mask = mask or {"tanh": "top", "sigmoid": "ends"}.get(facts.made_by)
        if mask is None or site in (context.last_with_parameters, ""):
            continue  # training wants a last layer to be sure of its answer
        if context.sample_count(site) < LEAST:
            continue
        each = context.mask_in_all(site, mask)
        part = float(each.mean())
        if part >= SATURATED and binomial_tail(int(each.sum()), len(each), BY_CHANCE) <= CHANCE:
            found.append((site, mask, part))
    if found:
        site, mask, part = found[0]
        function = "tanh" if mask in ("tanh", "top") else "the sigmoid"
        passes = context.with_stats(site)
        yield Finding(
            rule="saturated-units",
            site=site,
            step=context.first_step_masked(site, mask, part),
            severity="error" if max(one[2] for one in found) >= ALMOST_ALL else "warning",
            evidence={
                "fraction": part,
                "units": int(passes[-1][1].figure(site, "units")),
                "passes": len(passes),
                "others": len(found) - 1,
            },
            what=(
                f"{context.part_text(site, part)} lie on the flat parts of {function} for at "
                f"least two thirds of the {context.values_text(site)}"
                + _passes_text(len(passes))
                + others_text([f"{other:.0%} of {site_text(s)}" for s, _, other in found[1:]])
            ),
            advice=(
                "usually weights, biases or inputs that are too large; normalise the input, or "
                "initialise smaller weights; hardly any gradient flows through these units, so "
                "training alone rarely helps (a gate that is open or shut on purpose is fine)"
            ),
        )


def constant(context: RuleContext) -> Iterator[Finding]:
    """An output that is the same for every example, from some site on."""
    return _first_in_windows(context, _constant)


def _first_in_windows(
    context: RuleContext, look: Callable[[RuleContext, list[Pass]], Finding | None]
) -> Iterator[Finding]:
    """The finding in the first window that has one."""
    for window in context.windows([p for p in context.clean if p.figures is not None]):
        finding = look(context, window)
        if finding is not None:
            yield finding
            return


def _constant(context: RuleContext, window: list[Pass]) -> Finding | None:
    each = [p.figures for p in window if p.figures is not None]
    if any(figures.varied != 1 for figures in each):
        return None
    sites = context.sort(s for figures in each for s in figures.sites)
    tested = [s for s in sites if all(f.figure(s, "examples") > 1 for f in each)]
    flat: list[str] = []
    for site in reversed(tested):  # from the end: a branch that joins others is not judged
        if min(f.figure(site, "flat") for f in each) < 1:
            break
        flat.append(site)
    flat.reverse()
    # a layer that begins at 0 (often the last) makes all after it constant until it has learnt
    begins = (
        i
        for i, s in enumerate(flat)
        if (context.has_zero_weights(s, each[0]) and not _stays_zero(context, s))
        or has_zero_factor(context, each[0], s)
    )
    flat = flat[: next(begins, len(flat))]
    if not flat or _fades(context, each[-1], tested[: tested.index(flat[0])]):
        return None
    site = flat[0]
    if any(is_off_by_chance(context, figures, last=site) for figures in each):
        return None
    examples = examined_count(each[0].figure(site, "examples"))
    advice = (
        "usually the input is overwritten, multiplied by 0, or reduced over the batch axis before "
        "this site (right only if the first axis is not a batch, such as the nodes of one graph)"
    )
    if context.has_zero_weights(site, each[0]):
        advice = (
            "its weights are all 0 and get no gradient, so they stay 0; usually what it returns is "
            "multiplied by zeros again, by another layer that begins at 0: initialise one of the "
            "two with other values"
        )
    return Finding(
        rule="constant",
        site=site,
        step=window[0].step,
        severity="error",
        evidence={"examples": examples, "passes": len(window), "others": len(flat) - 1},
        what=(
            f"The output of {site_text(site)} is the same for all {examples} examples that were "
            f"examined, although the model's input is not"
            + others_text([site_text(s) for s in flat[1:]])
        ),
        advice=advice,
    )


def _stays_zero(context: RuleContext, site: str) -> bool:
    """Whether weights that are all zeros also get no gradient, so that they never learn."""
    held = context.parameters_of(site)
    paths = [p.path for p in held if p.axes == max(q.axes for q in held)]
    passes = [p.figures for p in context.gradient_passes if p.figures]

    def known(name: str) -> list[float]:
        each = [f.parameter(path, name) for f in passes for path in paths]
        return [x for x in each if not math.isnan(x)]

    graded, same = known("graded"), known("same")
    return max(graded) == 0 if graded else len(same) >= STILL * len(paths) and min(same) == 1


def _fades(context: RuleContext, figures: PassStats, before: list[str]) -> bool:
    """Whether the examples became alike gradually, as gradients vanish on the way back."""
    if not before or not context.gradient_passes:
        return False
    relative = figures.figure(before[-1], "spread") / max(figures.figure(before[-1], "rms"), 1e-30)
    return relative < FADED


def collapse(context: RuleContext) -> Iterator[Finding]:
    """Rank or variance that is lost from one layer to the next, or gradually."""
    return _first_in_windows(context, _collapse)


def _collapse(context: RuleContext, window: list[Pass]) -> Finding | None:
    found = [_drops(context, p.figures) for p in window if p.figures is not None]
    sites = [{one.site for one in each} for each in found]
    lasting = context.sort(set[str].intersection(*sites))
    if not lasting:
        return None
    one = next(one for one in found[0] if one.site == lasting[0])  # of the step that is named
    return Finding(
        rule="collapse",
        site=one.site,
        step=window[0].step,
        severity="warning",
        evidence={"before": one.before, "after": one.after, "others": len(lasting) - 1},
        what=_collapse_text(context, one) + others_text([site_text(s) for s in lasting[1:]]),
        advice=WHY_COLLAPSED[one.what],
    )


@dataclasses.dataclass(frozen=True)
class _Drop:
    """A figure that is much smaller at a site than at one before it.

    Attributes:
        site, source: the two sites.
        what: "rank", or "deviation" (over the examples).
        before, after: the figure at the source and at the site.
    """

    site: str
    source: str
    what: str
    before: float
    after: float


def _collapse_text(context: RuleContext, one: _Drop) -> str:
    feeds = any(feed.site == one.source for feed in context.paths.feeds(one.site))
    enters = context.paths.reaches(one.source, one.site)
    how = "which feeds it" if feeds else "which it is computed from" if enters else "before it"
    if one.what == "rank":
        return (
            f"The output of {site_text(one.site)} varies along one direction only (an effective "
            f"rank of {one.after:.3f} among the values examined; that of {site_text(one.source)}, "
            f"{how}, has {one.before:.1f})"
        )
    return (
        f"Among the values examined, the examples differ by a deviation of {one.after:.2g} in the "
        f"output of {site_text(one.site)}, and of {one.before:.2g} in that of "
        f"{site_text(one.source)}, {how}"
    )


def _source(
    context: RuleContext, figures: PassStats, sites: Sequence[str], i: int, least: int
) -> str:
    """The site that feeds another, if it has so many units; of several that of which the examples
    differ least. Where the flow is unknown, the site that returned before. "" for none.
    """
    site = sites[i]
    if context.paths.knows(site):
        feeds = context.paths.feeds(site)
        found = [
            f.site for f in feeds if f.role == Role.OUTPUT and not f.chosen and f.site in sites
        ]
    else:
        before = (s for s in reversed(sites[:i]) if figures.figure(s, "units") >= least)
        found = [*itertools.islice(before, 1)]
    found = [s for s in found if figures.figure(s, "units") >= least]
    return min(found, key=lambda s: figures.figure(s, "spread"), default="")


def _drops(context: RuleContext, figures: PassStats) -> list[_Drop]:
    """Each collapse in one pass."""
    sites = [
        s
        for s in context.sort(figures.sites)
        if figures.figure(s, "examples") > 1 and not context.has_zero_weights(s, figures)
    ]
    began = [s for s in sites if _began_at_zero(context, s)]
    head = context.last_with_parameters
    found: list[_Drop] = []
    spread = [figures.figure(s, "spread") for s in sites]
    within = [0.0 if s in (head, "") else x for s, x in zip(sites, spread, strict=True)]
    later = [*itertools.accumulate(reversed(within), max)][::-1]
    highest = 0.0
    for i, site in enumerate(sites):
        if site == head or site == "":
            break
        held = [p for p in context.parameters_of(site) if p.axes >= 2]
        wide = figures.figure(site, "units") >= WIDE and figures.figure(site, "examples") >= WIDE
        wide &= figures.figure(site, "flat") < 1  # the rank of what is constant is rounding
        fan = min((p.size / figures.figure(site, "units") for p in held), default=0)
        rank = figures.figure(site, "rank")
        if wide and fan >= WIDE and rank <= RANK_ONE:
            source = _source(context, figures, sites, i, WIDE)
            before = figures.figure(source, "rank") if source else 0.0
            if before >= RANK_BEFORE:
                found.append(_Drop(site, source, "rank", before, rank))
        source = _source(context, figures, sites, i, 1)
        if source and held and spread[i] > 0 and site not in began:
            before = figures.figure(source, "spread")
            fell = spread[i] <= DROP * before and spread[i] <= SMALL
            lasts = later[i] <= max(DROP * highest, spread[i] * 10)
            if fell and lasts and not _shrinks_by_chance(context, figures, source, site):
                found.append(_Drop(site, source, "deviation", before, spread[i]))
        highest = max(highest, spread[i])
    found = found or _gradual_drops(context, figures, [s for s in sites if s not in (head, "")])
    between = context.comes_before
    return [
        one
        for one in found
        if not any(between(one.source, s) and between(s, one.site) for s in began)
    ]


def _began_at_zero(context: RuleContext, site: str) -> bool:
    """Whether a site's weights, or a factor of another module, were zeros in the first pass."""
    first = next((f for p in context.clean if (f := p.figures) is not None), None)
    return first is not None and (
        context.has_zero_weights(site, first) or has_zero_factor(context, first, site)
    )


def _shrinks_by_chance(context: RuleContext, figures: PassStats, before: str, site: str) -> bool:
    """Whether so few units pass a value on that ordinary weights may cancel it by chance."""
    units = figures.figure(site, "units")
    sizes = [
        figures.parameter(p.path, "norm") * math.sqrt(p.size / units)
        for p in context.parameters_of(site)
        if p.axes >= 2 and p.size >= SOME
    ]
    if any(size < USUAL for size in sizes):
        return False
    off = context.masked_part(figures, before, "below")
    passing = figures.figure(before, "units") * (1 - off)
    return units < 2 or (context.site(before).activation == "relu" and passing < NARROW)


def _gradual_drops(context: RuleContext, figures: PassStats, sites: list[str]) -> list[_Drop]:
    """Activations that shrink a little in each layer, and with them what tells examples apart.

    The examples of a deep network of sigmoids grow alike too, around a half: its weights are not
    small, its gradient vanishes, and that is what has to be said of it.
    """
    sites = [s for s in sites if context.parameters_in(s)]
    third = max(1, len(sites) // 3)
    limit = min(FADED, part_left_by_chance(context, figures, sites, fault=FADED))
    for what in ("rms", "spread"):
        size = np.array([figures.figure(s, what) for s in sites])
        if len(sites) < 4 or not np.isfinite(size).all() or not (size > 0).all():
            return []
        first, late = int(size[:third].argmax()), float(size[-third:].max())
        if late > limit * size[first] or late > SMALL:
            return []
    early = float(size[first])
    after = [s for s in sites[first + 1 :] if context.comes_before(sites[first], s)]
    where = next((s for s in after if figures.figure(s, "spread") <= FADED * early), None)
    if where is None:
        return []
    return [_Drop(where, sites[first], "deviation", early, figures.figure(where, "spread"))]
