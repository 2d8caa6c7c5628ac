"""Rules over what comes back: gradients along depth, parameters without any, sizes of updates.

Invariant: a gradient that was not measured is no gradient of 0; passes without any gradient are
not judged. One finding a rule, at the worst or first site.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Final

from nnx_inspector.finding import Finding, and_others, named
from nnx_inspector.judged import Judged
from nnx_inspector.observed import ParameterFacts
from nnx_inspector.passes import Pass

VANISHED: Final = 1e-4
"""Glorot and Bengio 2010, figure 7: under their initialisation gradients of all layers stay within
one order of magnitude, under the older one they fall by less than one a layer."""
EXPLODED: Final = 1e4
"""The same, upwards; Pascanu et al. 2013 clip where norms grow by orders of magnitude."""
STEADY_VANISHED, STEADY_EXPLODED = 5e-3, 300.0
"""Less is enough where it goes steadily, by PER_LAYER at least from each layer to the next."""
PER_LAYER: Final = 0.6
DEEP: Final = 4
"""Fewer sites have no depth to speak of."""

TOO_LARGE: Final = 0.3
"""Karpathy, CS231n, "Ratio of weights:updates": about 1e-3 is right. At 0.3 a step most of what a
layer knew is gone after three."""
TOO_SMALL: Final = 5e-6
"""There too: "if it is lower than this then the learning rate might be too low"; at 5e-6 nothing
moves by 1 % in 2000 steps."""
LEAST_INTERVALS: Final = 3
DETACHED: Final = (
    "usually jax.lax.stop_gradient, a rounding or argmax after it, or a value that the loss does "
    "not use; harmless where it is frozen on purpose"
)
NOT_UPDATED: Final = "harmless where it is frozen on purpose, else the optimizer does not have it"
STILL: Final = 5

ON_PURPOSE: Final = re.compile(r"teacher|target|ema|momentum|frozen|reference|codebook", re.I)
"""Names of what is usually not trained by gradients."""


# ------------------------------------------------------------------- along depth


def vanishing_gradient(judged: Judged) -> Iterator[Finding]:
    """Gradients that are lost on the way back."""
    yield from _along_depth(judged, vanishing=True)


def exploding_gradient(judged: Judged) -> Iterator[Finding]:
    """Gradients that grow on the way back."""
    yield from _along_depth(judged, vanishing=False)


def _along_depth(judged: Judged, *, vanishing: bool) -> Iterator[Finding]:
    for window in judged.windows(judged.graded):
        found = [one for p in window if (one := _ratio(judged, p)) is not None]
        if len(found) == len(window) and all(_is_bad(r, n, vanishing) for r, n, *_ in found):
            yield _depth_finding(window[0].step, *found[0], vanishing=vanishing)
            return


def _depth_finding(
    step: int, ratio: float, layers: int, site: str, early: float, late: float, *, vanishing: bool
) -> Finding:
    how = "falls" if vanishing else "grows"
    meaning = (
        "usually saturating activations, weights that are too small, or a deep network without "
        "normalisation or skip connections; the first layers do not learn"
        if vanishing
        else "usually weights that are too large, or a deep network without normalisation; updates "
        "overshoot unless they are clipped"
    )
    return Finding(
        rule="vanishing-gradient" if vanishing else "exploding-gradient",
        site=site,
        step=step,
        severity="warning",
        evidence={"ratio": ratio, "first": early, "last": late, "sites": layers},
        message=(
            f"The norm of the gradient {how} from {late:.2g} at the last layers to {early:.2g} at "
            f"{named(site)} among the first ({ratio:.1g} times it, over {layers} sites): {meaning}."
        ),
    )


def _ratio(judged: Judged, one: Pass) -> tuple[float, int, str, float, float] | None:
    """Gradient norm at the first sites over that at the last, among how many, where, and both."""
    norms = judged.gradients(one)
    sites = [s for s in norms if judged.parameters_of(s)] if judged.held else list(norms)
    if len(sites) < DEEP:
        sites = [s for s in norms if s]
    if len(sites) < DEEP:
        return None
    third = max(1, len(sites) // 3)
    first = max(sites[:third], key=norms.__getitem__)
    late = max(norms[s] for s in sites[-third:])
    return norms[first] / late, len(sites), first, norms[first], late


def _is_bad(ratio: float, layers: int, vanishing: bool) -> bool:
    if not vanishing:
        ratio = 1 / ratio
    limit, steady = (
        (VANISHED, STEADY_VANISHED) if vanishing else (1 / EXPLODED, 1 / STEADY_EXPLODED)
    )
    return ratio <= limit or (
        layers >= DEEP + 1 and ratio <= min(steady, PER_LAYER ** (layers - 1))
    )


# -------------------------------------------------------------- without gradient


def no_gradient(judged: Judged) -> Iterator[Finding]:
    """Parameters that take part and do not learn."""
    found = _without(judged)
    if not found:
        return
    trained = [one for one in found if not ON_PURPOSE.search(one[0].path)]
    first, why, usually, step, frozen = min(
        trained or found, key=lambda one: judged.at(one[0].site)
    )
    on_purpose = not trained or frozen
    yield Finding(
        rule="no-gradient",
        site=first.site,
        step=step,
        severity="info" if on_purpose else "warning",
        evidence={"parameters": len(found), "elements": sum(one[0].size for one in found)},
        message=(
            f"The parameter {first.path!r} {why}{and_others(len(found) - 1, 'parameter')}: "
            f"{usually}."
        ),
    )


def _without(judged: Judged) -> list[tuple[ParameterFacts, str, str, int, bool]]:
    """(parameter, why in words, what it usually means, step, whether it may as well be frozen)."""
    graded = judged.graded
    if not graded:
        return []
    out: list[tuple[ParameterFacts, str, str, int, bool]] = []
    waiting, moving = _waits_for_zeros(judged), _others_move(judged)
    for site, parameters in judged.held.items():
        reached = {"gradient": 0, "output": 0}
        for one in graded:
            for quantity in reached:
                reached[quantity] += (site, quantity) in one.layout.at
        for parameter in parameters:
            # what another term cancels, as a norm or a difference does a bias, has none by design
            bias = parameter.axes < max(p.axes for p in parameters)
            told = _told(graded, parameter.path, "graded")
            same = _told(graded, parameter.path, "same")
            if told:
                if max(told) > 0 or (parameter.needed == 0 and _is_unused(judged, site)):
                    continue
                cut = reached["output"] > 0 and reached["gradient"] == 0
                if cut or parameter.needed == 0 or not (waiting or bias):
                    why = "has no gradient at all"
                    out.append((parameter, why, DETACHED, graded[0].step, False))
            elif reached["output"] > 1 and reached["gradient"] == 0 and _is_float(judged, site):
                if not _is_unused(judged, site):
                    why = "has no gradient: none ever reaches the output of its module"
                    # of what nobody wants a gradient of jax computes none either
                    still = len(same) >= 2 and min(same) == 1
                    out.append((parameter, why, DETACHED, graded[0].step, still))
            elif moving and reached["gradient"] and len(same) >= 2 and min(same) == 1 and not bias:
                why = f"did not change in {len(same) + 1} passes, others did"
                out.append((parameter, why, NOT_UPDATED, graded[0].step, True))
    return out


def _told(passes: Sequence[Pass], path: str, name: str) -> list[float]:
    values = [p.figures.parameter(path, name) for p in passes if p.figures is not None]
    return [x for x in values if not math.isnan(x)]


def _is_float(judged: Judged, site: str) -> bool:
    return bool(judged.site(site).leaving)


def _is_unused(judged: Judged, site: str) -> bool:
    return all(p.needed == 0 for p in judged.parameters_in(site))


def _waits_for_zeros(judged: Judged) -> bool:
    """Whether a weight is all zeros as yet: what is behind it gets a gradient once it moves."""
    last = next((p.figures for p in reversed(judged.graded) if p.figures is not None), None)
    if last is None:
        return False
    weights = [p for ps in judged.held.values() for p in ps if p.axes == max(q.axes for q in ps)]
    return any(
        last.parameter(p.path, "norm") == 0 and last.parameter(p.path, "graded") > 0
        for p in weights
    )


def _others_move(judged: Judged) -> bool:
    return any(0 in _told(judged.graded, p.path, "same") for ps in judged.held.values() for p in ps)


# ----------------------------------------------------------------------- updates


def update_ratio(judged: Judged) -> Iterator[Finding]:
    """Steps that are far too large for the weights, or far too small."""
    intervals = _intervals(judged)
    if not intervals:
        return
    largest = max(ratio for _, _, ratio in intervals)
    limit = TOO_LARGE if largest >= TOO_LARGE else 0.0
    before, path, _ = next(one for one in intervals if one[2] >= limit)
    site = next((p.site for ps in judged.held.values() for p in ps if p.path == path), "")
    if largest >= TOO_LARGE:
        yield Finding(
            rule="update-ratio",
            site=site,
            step=before.step,
            severity="error" if largest >= 1 else "warning",
            evidence={"ratio": largest, "limit": TOO_LARGE},
            message=(
                f"From step {before.step} on, one step changes the weights by up to {largest:.2g} "
                f"times their size (the median over parameters, {path!r} for instance); about 1e-3 "
                f"is usual: the learning rate is usually too high."
            ),
        )
    elif len(intervals) >= LEAST_INTERVALS and 0 < largest <= TOO_SMALL:
        yield Finding(
            rule="update-ratio",
            site=site,
            step=before.step,
            severity="warning",
            evidence={"ratio": largest, "limit": TOO_SMALL},
            message=(
                f"One step changes the weights by {largest:.2g} of their size at most (the median "
                f"over parameters); about 1e-3 is usual: the learning rate is usually too low."
            ),
        )
    elif (
        len(intervals) >= STILL and largest == 0 and 0 < (part := _moved_part(judged)) <= TOO_SMALL
    ):
        yield Finding(
            rule="update-ratio",
            site=site,
            step=before.step,
            severity="warning",
            evidence={"ratio": part, "limit": TOO_SMALL},
            message=(
                f"No weight changed in {len(intervals) + 1} passes with gradients, and what did "
                f"change moved by {part:.2g} of the weights' size: steps are too small for "
                f"their dtype, so the learning rate is usually far too low."
            ),
        )
    elif len(intervals) >= STILL and largest == 0 and not _others_move(judged):
        yield Finding(
            rule="update-ratio",
            site=site,
            step=before.step,
            severity="info",
            evidence={"ratio": 0.0, "limit": TOO_SMALL},
            message=(
                f"No parameter changed in {len(intervals) + 1} passes with gradients: usually the "
                f"optimizer does not update this model, or the learning rate is 0."
            ),
        )


def _moved_part(judged: Judged) -> float:
    """How far parameters moved at the last, as a part of the size of the largest; 0 for none."""
    last = next((p.figures for p in reversed(judged.graded) if p.figures is not None), None)
    if last is None:
        return 0.0
    paths = [p.path for ps in judged.held.values() for p in ps]
    norms = {path: last.parameter(path, "norm") for path in paths}
    moved = [norms[path] * last.parameter(path, "change") for path in paths]
    sizes = [norm for norm in norms.values() if norm > 0]
    return max((x for x in moved if x > 0), default=0.0) / max(sizes, default=1.0)


def _intervals(judged: Judged) -> list[tuple[Pass, str, float]]:
    """For each pass with gradients after another the pass before, the parameter in the middle and
    by what part of its size a step changed it.
    """
    weights = [p for ps in judged.held.values() for p in ps if p.axes >= 2]
    weights = weights or [p for ps in judged.held.values() for p in ps]
    passes = [p for p in judged.passes if p.figures is not None and p.kind == "watch"]
    out: list[tuple[Pass, str, float]] = []
    graded = {p.number for p in judged.graded}
    for before, now in itertools.pairwise(passes):
        if now.number != before.number + 1 or not {now.number, before.number} <= graded:
            continue
        steps = max(1, now.step - before.step)
        found = [
            (change / steps, p.path)
            for p in weights
            if now.figures is not None
            and not math.isnan(change := now.figures.parameter(p.path, "change"))
        ]
        if found:
            moved = [one for one in found if one[0] > 0]  # what stays is told by no-gradient
            ratio, path = statistics.median_low(moved or found)
            out.append((before, path, ratio))
    return out
