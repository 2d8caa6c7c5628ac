"""How much must be seen before a healthy model would not show it by luck.

A model that was just initialised has weights whose signs and sizes are drawn by lot. So a unit may
be off for every example, a signal may shrink or grow through narrow layers, a batch of one may give
a gradient of 0. Each function here says how likely that is, from how many units, values or layers
there are; rules say nothing below it. Invariant: what is not known counts as no evidence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from nnx_inspector.findings.judged import Judged
from nnx_inspector.recordings.facts import Figures

LUCK: Final = 5e-3
"""A rule speaks only of what happens in fewer than one healthy layer in 200."""

MANY: Final = 32
"""Values of a unit from which on it is not off by chance: one that fires for 10 % of all examples
is off for 32 of them once in 30 times."""
SOME: Final = 16
LEAST: Final = 8
"""Of fewer values nothing is said."""
DEAD: Final = 0.4
"""Karpathy, CS231n, "Commonly used activation functions": "as much as 40 % of your network can be
dead" where the learning rate is too high; healthy ones stay well below."""
DEAD_IN_SOME: Final = 0.6
ALMOST_ALL: Final = 0.9
BIASED: Final = 0.8
"""A bias of this part of the output's size is what decides the sign of the output."""
FEW_UNITS: Final = 4
"""Units that a bias must have turned off before it is said of the layer."""
NARROW: Final = 8
"""A layer of fewer units is off as a whole more often than LUCK: 2**-8 is below it."""

BEYOND: Final = 3.1
"""Deviations of a normal distribution, beyond which lies one in a thousand."""


def tail(count: int, of: int, chance: float) -> float:
    """How likely at least `count` of some units are so, each with this chance.

    Example:
        >>> tail(8, 8, 0.5)
        0.00390625
    """
    each = (math.comb(of, k) * chance**k * (1 - chance) ** (of - k) for k in range(count, of + 1))
    return math.fsum(each)


def gain_by_luck(widths: Sequence[float]) -> float:
    """By what factor random layers of these widths change a signal once in a thousand times.

    Hanin and Nica 2020, "Products of many large random matrices and gradients in deep neural
    networks": the logarithm of the squared norm is normal, with a variance of 5 times the sum of
    1 / width for ReLU (less for others), and a mean of minus half of it.

    Example:
        >>> [round(gain_by_luck([w] * 5), 1) for w in (1, 8, 512)]
        [1202604.3, 33.8, 1.4]
    """
    spread = 5 * math.fsum(1 / width for width in widths) / 4
    return math.exp(spread + BEYOND * math.sqrt(spread))


@dataclasses.dataclass(frozen=True)
class Off:
    """The units of a site that are off for all values looked at, in each of the last passes.

    Attributes:
        part: of all units.
        samples: values of each unit.
        biased: whether the bias of the layer does it.
        mask: which of the masks of `gauges` says so.
    """

    part: float
    samples: int
    biased: bool
    mask: str


def off_units(judged: Judged, site: str) -> Off | None:
    """The units that are off, where they are more than luck and more than a healthy layer has."""
    facts, (_, figures) = judged.site(site), judged.with_figures(site)[-1]
    samples = judged.samples(site)
    mask = "below" if facts.activation == "relu" else "dead"
    each = judged.masked(site, mask)
    off, on = int(each.sum()), int(judged.masked(site, "above").sum())
    part = off / max(1, len(each))
    limit = ALMOST_ALL if samples < SOME else DEAD_IN_SOME if samples < MANY else DEAD
    if samples < LEAST or part < limit:
        return None
    biased = _is_biased(judged, site, figures)
    # examples that are alike keep each unit on one side of 0: by luck as often above as below
    if tail(off, off + on, 0.5) > LUCK and not (biased and off >= FEW_UNITS):
        return None
    return Off(part, samples, biased, mask)


def _is_biased(judged: Judged, site: str, figures: Figures) -> bool:
    held = judged.parameters_of(site)
    most = max((p.axes for p in held), default=0)
    of_biases = [p.path for p in held if p.axes < most or p.path.endswith("bias")]
    size = figures.figure(site, "rms")
    return any(figures.parameter(path, "norm") >= BIASED * size for path in of_biases)


def all_off(judged: Judged, figures: Figures, site: str) -> bool:
    """Whether a ReLU lets nothing of a site pass, in one pass."""
    facts = judged.site(site)
    if facts.activation == "relu":
        return judged.part_of(figures, site, "below") == 1
    return facts.made_by == "relu" and judged.part_of(figures, site, "dead") == 1


def off_by_luck(judged: Judged, figures: Figures, *, last: str) -> bool:
    """Whether a ReLU up to this site lets nothing pass in one pass, and may do so by luck."""
    end = judged.at(last)
    return any(
        judged.at(site) <= end and all_off(judged, figures, site) and not off_units(judged, site)
        for site in figures.sites
    )


def may_be_off(judged: Judged, figures: Figures, *, around: str) -> bool:
    """Whether a narrow ReLU may take all of a site's gradient by luck: from this site on example by
    example, before it where it lets nothing reach the site.
    """
    here = judged.at(around)
    return any(
        "relu" in (judged.site(site).activation, judged.site(site).made_by)
        and figures.figure(site, "units") < NARROW
        and (judged.at(site) >= here or all_off(judged, figures, site))
        and off_units(judged, site) is None
        for site in figures.sites
    )
