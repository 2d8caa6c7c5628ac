"""Rules over what flows forward: overflow, dead, saturated and constant units, collapse.

Each says something only where it holds in all of the last passes, and nothing where a figure that
it needs was not measured. Invariant: one finding a rule, at the first site in the order of the
pass; how many others there are is evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from nnx_inspector.finding import Finding, Severity, and_others, named
from nnx_inspector.judged import Judged
from nnx_inspector.observed import Figures
from nnx_inspector.passes import Pass

NEAR_LIMIT: Final = 8.0
"""float16: a value within this factor of 65504 is one layer's gain away from Inf. Loss scaling
halves at each overflow (Micikevicius et al. 2018, "Mixed precision training"); three halvings."""
SQUARE_LIMIT: Final = 0.5
"""Wider dtypes: a value beyond limit ** 0.5 (1.8e19) has no square, so a norm or variance of it
is Inf."""

DEAD: Final = 0.4
"""Karpathy, CS231n, "Commonly used activation functions": "as much as 40 % of your network can be
dead" where the learning rate is too high; healthy ones stay well below."""
DEAD_IN_FEW: Final = 0.6
"""Of few examples a unit may be off for all by chance: then more must be."""
MANY: Final = 32
"""Values of a unit from which on chance is no explanation."""
LEAST: Final = 8
"""Of fewer nothing is said."""
ALMOST_ALL: Final = 0.9

SATURATED: Final = 0.5
"""Glorot and Bengio 2010, section 3: sigmoid networks whose top layer saturates stop learning;
their healthy ones keep the bulk of each layer off the flat parts."""

RANK_ONE: Final = 1.01
"""Participation ratio 1 + 2 (s2 / s1)**2 of a layer whose second direction has less than 7 % of
the first one's size (Daneshmand et al. 2020, "Batch normalization provably avoids rank collapse",
measures the same collapse by a lower bound of the rank)."""
RANK_BEFORE: Final = 2.0
WIDE: Final = 8
"""Fewer units than this are a bottleneck by design."""
DROP: Final = 1e-2
"""From one layer to the next the deviation stays within a factor of a few under every common
initialisation (He et al. 2015, "Delving deep into rectifiers", keeps it at 1)."""
SMALL: Final = 3e-3
"""A deviation above it is an ordinary scale, whatever it was before (a normalised input, say)."""
FADED: Final = 3e-4
"""As much over all layers, a little each, is what He et al. 2015 show to keep 30 layers from
learning."""


def overflow(judged: Judged) -> Iterator[Finding]:
    """A value near the largest of its dtype."""
    found: list[tuple[str, int, float, float]] = []
    for one in judged.clean:
        if one.figures is None:
            continue
        at = [site for site in one.figures.sites if _limit_of(one.figures, site)]
        for site in judged.in_order(at):
            summary, limit = one.summary(site), _limit_of(one.figures, site)
            if summary is None or not summary.finite or not limit:
                continue
            top = max(abs(summary.min), abs(summary.max))
            if top >= limit and not _is_mask(summary):
                found.append((site, one.step, top, _largest(one.figures, site)))
        if found:
            break
    if found:
        site, step, top, largest = found[0]
        yield Finding(
            rule="overflow",
            site=site,
            step=step,
            severity="error",
            evidence={"largest": top, "limit": largest, "others": len(found) - 1},
            message=(
                f"At step {step} the output of {named(site)} reached {top:.3g}, near the largest "
                f"number of its dtype, {largest:.3g}{and_others(len(found) - 1)}: usually weights "
                f"or inputs that are too large, or float16 without scaling; Inf and NaN come next."
            ),
        )


def _largest(figures: Figures, site: str) -> float:
    power = figures.figure(site, "limit")
    return math.inf if not power < 1024 else 2.0**power


def _limit_of(figures: Figures, site: str) -> float:
    power = figures.figure(site, "limit")
    if math.isnan(power):
        return 0.0
    # float16 ends at 2**16, float8 before that; bfloat16 and float32 at 2**128
    return 2.0**power / NEAR_LIMIT if power < 64 else 2.0 ** (power * SQUARE_LIMIT)


def _is_mask(summary: object) -> bool:
    """Whether everything large is one negative number, as a mask adds to scores."""
    bins = summary.nonzero_bins()  # type: ignore[attr-defined]
    low, high = summary.min, summary.max  # type: ignore[attr-defined]
    return bool(len(bins) > 1 and low < 0 and abs(high) < abs(low) * 1e-6)


def dead_units(judged: Judged) -> Iterator[Finding]:
    """Units that a ReLU turns off for every example."""
    found: list[tuple[str, str, float, int]] = []
    for site in judged.measured:
        kind, (_, last) = judged.site(site).activation, judged.with_figures(site)[-1]
        if not judged.parameters_in(site) or judged.is_all_zero(site, last, of=any):
            continue  # without parameters it passes on what it gets; zeros (LoRA) are yet to learn
        samples = judged.samples(site)
        if samples < LEAST or site in _surrounding(judged):
            continue
        if kind == "relu" and last.varied == 1 and last.figure(site, "flat") == 1:
            continue  # what it gets is the same for all: that comes first
        if kind != "relu" and "Norm" in judged.site(site).type:
            continue  # it turns nothing off: of what is the same for all it makes its bias
        mask = "below" if kind == "relu" else "dead"
        part = float(judged.masked(site, mask).mean())
        if part >= (DEAD if samples >= MANY else DEAD_IN_FEW):
            found.append((site, mask, part, samples))
    if found:
        site, mask, part, samples = found[0]
        passes = judged.with_figures(site)
        units = int(passes[-1][1].figure(site, "units"))
        severity: Severity = "error" if max(one[2] for one in found) >= ALMOST_ALL else "warning"
        yield Finding(
            rule="dead-units",
            site=site,
            step=judged.since(site, mask, part),
            severity=severity,
            evidence={
                "fraction": part,
                "units": units,
                "values": samples,
                "passes": len(passes),
                "others": len(found) - 1,
            },
            message=(
                f"{part:.0%} of the {units} units of {named(site)} are off for all {samples} "
                f"values looked at, in each of {len(passes)} passes{and_others(len(found) - 1)}: "
                f"usually a bias that was pushed far below 0 or a learning rate that is too high; "
                f"no gradient flows through a dead unit."
            ),
        )


def _surrounding(judged: Judged) -> set[str]:
    """Sites of which another returns the same: what is around a last layer repeats it."""
    return {""} if len(judged.measured) > 1 else set()


def saturated_units(judged: Judged) -> Iterator[Finding]:
    """Units on the flat parts of tanh or sigmoid."""
    found: list[tuple[str, str, float]] = []
    for site in judged.measured:
        facts = judged.site(site)
        mask = {"tanh": "tanh", "sigmoid": "sigmoid"}.get(facts.activation)
        mask = mask or {"tanh": "top", "sigmoid": "ends"}.get(facts.made_by)
        if mask is None or site in (judged.last_with_parameters, ""):
            continue  # a last layer that is sure of its answer is what training wants
        if judged.samples(site) < LEAST:
            continue
        part = float(judged.masked(site, mask).mean())
        if part >= SATURATED:
            found.append((site, mask, part))
    if found:
        site, mask, part = found[0]
        function = "tanh" if mask in ("tanh", "top") else "the sigmoid"
        passes = judged.with_figures(site)
        units = int(passes[-1][1].figure(site, "units"))
        yield Finding(
            rule="saturated-units",
            site=site,
            step=judged.since(site, mask, part),
            severity="error" if max(one[2] for one in found) >= ALMOST_ALL else "warning",
            evidence={
                "fraction": part,
                "units": units,
                "passes": len(passes),
                "others": len(found) - 1,
            },
            message=(
                f"{part:.0%} of the {units} units of {named(site)} lie on the flat parts of "
                f"{function} for nearly all examples{and_others(len(found) - 1)}: usually weights "
                f"or inputs that are too large; hardly any gradient flows through them."
            ),
        )


def constant(judged: Judged) -> Iterator[Finding]:
    """An output that is the same for every example, from some site on."""
    return _in_a_window(judged, _constant)


def _in_a_window(
    judged: Judged, look: Callable[[Judged, list[Pass]], Finding | None]
) -> Iterator[Finding]:
    """What is found in the first of the windows in which anything is."""
    for window in judged.windows([p for p in judged.clean if p.figures is not None]):
        finding = look(judged, window)
        if finding is not None:
            yield finding
            return


def _constant(judged: Judged, window: list[Pass]) -> Finding | None:
    each = [p.figures for p in window if p.figures is not None]
    if any(figures.varied != 1 for figures in each):
        return None
    sites = judged.in_order(s for figures in each for s in figures.sites)
    tested = [s for s in sites if all(f.figure(s, "examples") > 1 for f in each)]
    flat: list[str] = []
    for site in reversed(tested):  # from the end: of a branch that joins others nothing is said
        if min(f.figure(site, "flat") for f in each) < 1 or judged.is_all_zero(site, each[0]):
            break
        flat.append(site)
    if not flat or _fades(judged, each[-1], tested[: len(tested) - len(flat)]):
        return None
    site = flat[-1]
    examples = int(each[-1].figure(site, "examples"))
    return Finding(
        rule="constant",
        site=site,
        step=window[0].step,
        severity="error",
        evidence={"examples": examples, "passes": len(window), "others": len(flat) - 1},
        message=(
            f"The output of {named(site)} is the same for all {examples} examples of the batch "
            f"although the model's input is not{and_others(len(flat) - 1)}: usually the input "
            f"does not reach it (it is overwritten, multiplied by 0 or reduced over the wrong "
            f"axis), or every unit before it is dead or saturated."
        ),
    )


def _fades(judged: Judged, figures: Figures, before: list[str]) -> bool:
    """Whether the examples grew alike bit by bit, as their gradients vanish on the way back."""
    if not before or not judged.graded:
        return False
    relative = figures.figure(before[-1], "spread") / max(figures.figure(before[-1], "rms"), 1e-30)
    return relative < FADED


def collapse(judged: Judged) -> Iterator[Finding]:
    """Rank or variance that is lost from one layer to the next, or bit by bit."""
    return _in_a_window(judged, _collapse)


def _collapse(judged: Judged, window: list[Pass]) -> Finding | None:
    found = [f for p in window if p.figures is not None for f in _collapsed(judged, p.figures)]
    sites: dict[str, list[tuple[str, float, float]]] = {}
    for site, what, before, after in found:
        sites.setdefault(site, []).append((what, before, after))
    lasting = [s for s in judged.in_order(sites) if len(sites[s]) >= len(window)]
    if not lasting:
        return None
    site = lasting[0]
    what, before, after = sites[site][-1]
    return Finding(
        rule="collapse",
        site=site,
        step=window[0].step,
        severity="warning",
        evidence={"before": before, "after": after, "others": len(lasting) - 1},
        message=_collapse_message(site, what, before, after, len(lasting) - 1),
    )


def _collapse_message(site: str, what: str, before: float, after: float, others: int) -> str:
    if what == "rank":
        return (
            f"The output of {named(site)} varies along one direction only (effective rank "
            f"{after:.3f}, before it {before:.1f}){and_others(others)}: usually a weight matrix "
            f"of rank one, units that are copies of each other, or a bottleneck."
        )
    return (
        f"What tells the examples apart has a deviation of {after:.2g} in the output of "
        f"{named(site)}, and of {before:.2g} before it{and_others(others)}: usually weights that "
        f"are initialised or scaled far too small."
    )


def _collapsed(judged: Judged, figures: Figures) -> list[tuple[str, str, float, float]]:
    """(site, what, before, after) of each collapse in one pass."""
    sites = [
        s
        for s in judged.in_order(figures.sites)
        if figures.figure(s, "examples") > 1 and not judged.is_all_zero(s, figures)
    ]
    head = judged.last_with_parameters
    found: list[tuple[str, str, float, float]] = []
    spread = [figures.figure(s, "spread") for s in sites]
    highest = 0.0
    for i, site in enumerate(sites):
        if site == head or site == "":
            break
        held = [p for p in judged.parameters_of(site) if p.axes >= 2]
        later = [x for s, x in zip(sites[i:], spread[i:], strict=True) if s not in (head, "")]
        rank, before = figures.figure(site, "rank"), [
            figures.figure(s, "rank") for s in sites[:i] if figures.figure(s, "units") >= WIDE
        ]  # fmt: skip
        wide = figures.figure(site, "units") >= WIDE and figures.figure(site, "examples") >= WIDE
        fan = min((p.size / figures.figure(site, "units") for p in held), default=0)
        if wide and fan >= WIDE and rank <= RANK_ONE and before and before[-1] >= RANK_BEFORE:
            found.append((site, "rank", before[-1], rank))
        if i and held and spread[i - 1] > 0 and len(later) and spread[i] > 0:
            fell = spread[i] <= DROP * spread[i - 1] and spread[i] <= SMALL
            if fell and max(later) <= max(DROP * highest, spread[i] * 10):
                found.append((site, "deviation", spread[i - 1], spread[i]))
        highest = max(highest, spread[i])
    if not found:
        found = _faded(judged, figures, [s for s in sites if s not in (head, "")])
    return found


def _faded(
    judged: Judged, figures: Figures, sites: list[str]
) -> list[tuple[str, str, float, float]]:
    """Activations that shrink a little in each layer until nothing is left."""
    sites = [s for s in sites if judged.parameters_in(s)]
    rms = np.array([figures.figure(s, "rms") for s in sites])
    if len(sites) < 4 or not np.isfinite(rms).all() or not (rms > 0).all():
        return []
    third = max(1, len(sites) // 3)
    early, late = float(rms[:third].max()), float(rms[-third:].max())
    if late <= FADED * early and late <= SMALL:
        where = int(np.flatnonzero(rms <= FADED * early)[0])
        return [(sites[where], "deviation", early, float(rms[where]))]
    return []
