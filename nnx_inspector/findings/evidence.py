"""How much evidence a rule needs, so that a healthy model does not show the same by chance.

A model that was just initialised has random weights. By chance, a unit may be off for every
example, a signal may shrink or grow through narrow layers, and a batch of one may give a gradient
of 0. Each function here computes how likely that is from the number of units, values or layers;
rules report nothing that is likely. Invariant: an unknown figure is not evidence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from nnx_inspector.findings.judged import Judged
from nnx_inspector.recordings.facts import Figures

LUCK: Final = 5e-3
"""A rule reports only what happens in fewer than one healthy layer in 200."""

MANY: Final = 32
"""A unit that fires for 10 % of the examples is off for all of 32 examples once in 30 times."""
SOME: Final = 16
LEAST: Final = 8
"""Units with fewer values are not judged."""
DEAD: Final = 0.4
"""Karpathy, CS231n, "Commonly used activation functions": "as much as 40 % of your network can be
dead" with a learning rate that is too high; healthy networks stay well below."""
DEAD_IN_SOME: Final = 0.6
ALMOST_ALL: Final = 0.9
BIASED: Final = 0.8
"""A bias of at least this fraction of the output's size decides the sign of the output."""
FEW_UNITS: Final = 4
"""The number of units that a bias must turn off before the layer is reported."""
NARROW: Final = 8
"""A layer with fewer units is off as a whole more often than LUCK; 2**-8 is below LUCK."""

STILL: Final = 5
"""What does not change from one measured step to the next this many times does not learn."""

BEYOND: Final = 3.1
"""One value in a thousand of a normal distribution lies above this many deviations."""
FLAT_BELOW: Final = {"gelu": -5.0, "silu": -12.0}
"""Below this, the value and the slope of the function are less than 1e-4."""
HALVING: Final = ("relu", "gelu", "silu")
"""Functions that keep about half of the squared norm of a signal."""


def tail(count: int, of: int, chance: float) -> float:
    """The probability that at least `count` of `of` events happen, each with this chance.

    Example:
        >>> tail(8, 8, 0.5)
        0.00390625
    """
    each = (math.comb(of, k) * chance**k * (1 - chance) ** (of - k) for k in range(count, of + 1))
    return math.fsum(each)


def gain_by_luck(widths: Sequence[float]) -> float:
    """The factor by which random layers of these widths change a signal in one case of a thousand.

    Hanin and Nica 2020, "Products of many large random matrices and gradients in deep neural
    networks": the logarithm of the squared norm is normal, with a variance of 5 times the sum of
    1 / width for ReLU (less for others), and a mean of minus half of it.

    Example:
        >>> [round(gain_by_luck([w] * 5), 1) for w in (1, 8, 512)]
        [1202604.3, 33.8, 1.4]
    """
    spread = 5 * math.fsum(1 / width for width in widths) / 4
    return math.exp(spread + BEYOND * math.sqrt(spread))


def left_by_luck(judged: Judged, figures: Figures, sites: Sequence[str], *, fault: float) -> float:
    """The least part of a signal that random layers leave, except in one network of a thousand.

    LeCun's initialisation, the default of `nnx.Linear`, does not make up for the activation
    function: the squared norm halves at each ReLU. Narrow layers, and layers in which few units
    pass anything on, take more by chance. A network so deep that the halving alone leaves less than
    `fault` is not excused.
    """
    left = 0.5 ** (sum(judged.site(site).activation in HALVING for site in sites) / 2)
    widths = [_passing(judged, figures, site) for site in sites if site in figures.sites]
    return (left if left > fault else 1.0) / gain_by_luck(widths)


def _passing(judged: Judged, figures: Figures, site: str) -> float:
    relu = judged.site(site).activation == "relu"
    off = judged.part_of(figures, site, "below") if relu else 0.0
    return max(1.0, figures.figure(site, "units") * (1 - off))


@dataclasses.dataclass(frozen=True)
class Off:
    """The units of a site that are off for all examined values, in each of the last passes.

    Attributes:
        part: their fraction of all units.
        samples: the number of values of each unit.
        biased: whether the layer's bias turns them off.
        mask: the mask of `gauges` that marks them.
    """

    part: float
    samples: int
    biased: bool
    mask: str


def off_units(judged: Judged, site: str) -> Off | None:
    """The units that are off, if they are more than chance explains or a healthy layer has."""
    facts, (_, figures) = judged.site(site), judged.with_figures(site)[-1]
    samples = judged.samples(site)
    below = facts.activation == "relu" or _is_far_below(judged, site)
    mask = "below" if below else "dead"
    each = judged.masked(site, mask)
    off, on = int(each.sum()), int(judged.masked(site, "above").sum())
    part = off / max(1, len(each))
    limit = ALMOST_ALL if samples < SOME else DEAD_IN_SOME if samples < MANY else DEAD
    if samples < LEAST or part < limit:
        return None
    biased = _is_biased(judged, site, figures)
    # similar examples keep each unit on one side of 0, which by chance is either one
    if tail(off, off + on, 0.5) > LUCK and not (biased and off >= FEW_UNITS):
        return None
    return Off(part, samples, biased, mask)


def _is_far_below(judged: Judged, site: str) -> bool:
    limit = FLAT_BELOW.get(judged.site(site).activation, -math.inf)
    told = [one.summary(site) for one, _ in judged.with_figures(site)]
    return all(one is not None and one.max <= limit for one in told)


def _is_biased(judged: Judged, site: str, figures: Figures) -> bool:
    held = judged.parameters_of(site)
    most = max((p.axes for p in held), default=0)
    of_biases = [p.path for p in held if p.axes < most or p.path.endswith("bias")]
    size = figures.figure(site, "rms")
    return any(figures.parameter(path, "norm") >= BIASED * size for path in of_biases)


def all_off(judged: Judged, figures: Figures, site: str) -> bool:
    """Whether a ReLU turns all of a site's output to 0 in one pass."""
    facts = judged.site(site)
    if facts.activation == "relu":
        return judged.part_of(figures, site, "below") == 1
    return facts.made_by == "relu" and judged.part_of(figures, site, "dead") == 1


def off_by_luck(judged: Judged, figures: Figures, *, last: str) -> bool:
    """Whether a ReLU at or before a site turns everything to 0 in one pass, perhaps by chance."""
    end = judged.at(last)
    return any(
        judged.at(site) <= end and all_off(judged, figures, site) and not off_units(judged, site)
        for site in figures.sites
    )


def may_be_off(judged: Judged, figures: Figures, *, around: str) -> bool:
    """Whether a narrow ReLU may remove a site's whole gradient by chance.

    A ReLU at or after the site does so for each example separately, one before the site by turning
    everything that reaches the site to 0.
    """
    here = judged.at(around)
    return any(
        "relu" in (judged.site(site).activation, judged.site(site).made_by)
        and figures.figure(site, "units") < NARROW
        and (judged.at(site) >= here or all_off(judged, figures, site))
        and off_units(judged, site) is None
        for site in figures.sites
    )
