"""How much evidence a rule needs, so that a healthy model does not show the same by chance.

A model that was just initialised has random weights. By chance, a unit may be off for every
example, a signal may shrink or grow through narrow layers, and a batch of one may give a gradient
of 0. Each function here computes how likely that is from the number of units, values or layers;
rules report nothing that is likely. Zeros that a site receives are an effect: they are followed
back to what made them. Invariant: an unknown figure is not evidence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from nnx_inspector.findings.finding import site_text
from nnx_inspector.findings.rule_context import FEW_PASSES, RuleContext
from nnx_inspector.recordings.facts import PassStats, Role
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.recordings.tree_rows import layer_of
from nnx_inspector.stats.samples.unit_stats import OFF_AT

CHANCE: Final = 5e-3
"""A rule reports only what happens in fewer than one healthy layer in 200."""

MANY: Final = 32
"""A unit that fires for 10 % of the examples is off for all of 32 examples once in 30 times."""
SOME: Final = 16
LEAST: Final = 8
"""Units with fewer values are not context."""
DEAD: Final = 0.4
"""Karpathy, CS231n, "Commonly used activation functions": "as much as 40 % of your network can be
dead" with a learning rate that is too high; healthy networks stay well below."""
DEAD_IN_SOME: Final = 0.6
ALMOST_ALL: Final = 0.9
BY_BIAS: Final = 1e-4
"""The output of a layer that only its bias makes has the size of the bias, but for rounding."""
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
HALVING: Final = ("relu", "gelu", "silu")
"""Functions that keep about half of the squared norm of a signal."""


def binomial_tail(count: int, of: int, chance: float) -> float:
    """The probability that at least `count` of `of` events happen, each with this chance.

    Example:
        >>> binomial_tail(8, 8, 0.5)
        0.00390625
    """
    each = (math.comb(of, k) * chance**k * (1 - chance) ** (of - k) for k in range(count, of + 1))
    return math.fsum(each)


MOST_CHANCE: Final = 600.0
"""exp(600) is more than any ratio of norms, and its inverse is not 0; exp(710) is no float."""


def gain_by_chance(widths: Sequence[float]) -> float:
    """The factor by which random layers of these widths change a signal in one case of a thousand.

    Hanin and Nica 2020, "Products of many large random matrices and gradients in deep neural
    networks": the logarithm of the squared norm is normal, with a variance of 5 times the sum of
    1 / width for ReLU (less for others), and a mean of minus half of it.

    Example:
        >>> [round(gain_by_chance([w] * 5), 1) for w in (1, 8, 512)]
        [1202604.3, 33.8, 1.4]
    """
    spread = 5 * math.fsum(1 / width for width in widths) / 4
    return math.exp(min(spread + BEYOND * math.sqrt(spread), MOST_CHANCE))


def part_left_by_chance(
    context: RuleContext, figures: PassStats, sites: Sequence[str], *, fault: float
) -> float:
    """The least part of a signal that random layers leave, except in one network of a thousand.

    LeCun's initialisation, the default of `nnx.Linear`, does not make up for the activation
    function: the squared norm halves at each ReLU. Narrow layers, and layers in which few units
    pass anything on, take more by chance. A network so deep that the halving alone leaves less than
    `fault` is not excused.
    """
    left = 0.5 ** (sum(context.site(site).activation in HALVING for site in sites) / 2)
    widths = [_passing_units(context, figures, site) for site in sites if site in figures.sites]
    return (left if left > fault else 1.0) / gain_by_chance(widths)


def _passing_units(context: RuleContext, figures: PassStats, site: str) -> float:
    relu = context.site(site).activation == "relu"
    off = context.masked_part(figures, site, "below") if relu else 0.0
    return max(1.0, figures.figure(site, "units") * (1 - off))


@dataclasses.dataclass(frozen=True)
class OffUnits:
    """The units of a site that are off for all examined values, in each of the last passes.

    Attributes:
        part: their fraction of all units.
        samples: the number of values of each unit.
        biased: whether the layer's bias turns them off.
        mask: the mask of `unit_stats` that marks them.
    """

    part: float
    samples: int
    biased: bool
    mask: str


def find_off_units(context: RuleContext, site: str) -> OffUnits | None:
    """The units that are off, if they are more than chance explains or a healthy layer has."""
    facts, (_, figures) = context.site(site), context.with_stats(site)[-1]
    samples = context.sample_count(site)
    below = facts.activation == "relu" or _is_far_below(context, site)
    mask = "below" if below else "dead"
    each = context.mask_in_all(site, mask)
    off, on = int(each.sum()), int(context.mask_in_all(site, "above").sum())
    part = off / max(1, len(each))
    limit = ALMOST_ALL if samples < SOME else DEAD_IN_SOME if samples < MANY else DEAD
    if samples < LEAST or part < limit:
        return None
    biased = _is_biased(context, site, figures)
    # similar examples keep each unit on one side of 0, which by chance is either one
    if binomial_tail(off, off + on, 0.5) > CHANCE and not (biased and off >= FEW_UNITS):
        return None
    return OffUnits(part, samples, biased, mask)


@dataclasses.dataclass(frozen=True)
class Zeros:
    """Zeros that a site receives, or makes, although nothing that enters it is 0.

    Attributes:
        why: "gate" (a choice leaves the site out), "overflow" (what enters it has a square beyond
            its dtype, which a norm divides by), "factor" (something between is 0) or "inside" (the
            same within the site).
        source: the site that chooses, or whose output is made 0.
        largest, limit: the largest size of the source's values, and the largest number of its
            dtype.
        zero: whether the output is 0; otherwise it is the same for all examples.
        passes: the number of passes in which this was seen.
        step: the step from which on it was seen in each of them, and in those before.
    """

    why: str
    source: str
    largest: float
    limit: float
    zero: bool
    passes: int
    step: int

    def usual_cause(self, site: str) -> str:
        """What usually makes such zeros at a site, and what helps, as a clause."""
        source, top = site_text(self.source), f"{self.largest:.3g}"
        return {
            "gate": (
                f"what {source} returns decides what reaches it, and left it out each time; it "
                f"learns nothing meanwhile; usually a loss that balances the load is missing"
            ),
            "overflow": (
                f"{source} returned values up to {top}, so a sum of their squares exceeds the "
                f"largest number of its dtype, {self.limit:.3g}, and a norm that divides by Inf "
                f"returns 0; square in float32, or divide by the largest value first"
            ),
            "factor": (
                f"what {source} returns is not 0, so the model makes zeros of it in between, "
                f"usually by a factor or mask that is 0"
            ),
            "inside": (
                f"what {source} returns is not 0, so the zeros arise within {site_text(site)}, "
                "usually by a scale that is 0, or an overflow"
            ),
        }[self.why]


def find_zeros(context: RuleContext, site: str) -> Zeros | None:
    """What makes the zeros that a site receives or returns; None if it is not known, or harmless.

    Harmless are zeros that the model was given, parameters that begin at 0 and are yet to learn,
    and zeros of an earlier site, of which that site is the origin.
    """
    passes = context.with_stats(site)
    is_product = context.site(site).affine == 1
    zero = all(_is_zero(one, site) or returns_only_bias(context, one, site) for one, _ in passes)
    still = is_product and len(passes) >= FEW_PASSES
    still &= all(f.varied == 1 and f.figure(site, "flat") == 1 for _, f in passes)
    if not zero and not still:
        return None
    feeds = [one for one in context.paths.feeds(site) if one.site != site]
    sites = [one.site for one in feeds if one.role == Role.OUTPUT and not one.chosen]
    gates = [one.site for one in feeds if one.role == Role.OUTPUT and one.chosen]
    gates += [one for one in sites if context.paths.decides(one)]
    gates = [one for one in gates if context.parameters_in(one)]
    if any(not _returns_nonzero(context, one, source) for one, _ in passes for source in sites):
        return None  # or not known to
    if any(has_zero_factor(context, figures, site) for _, figures in passes):
        return None
    step = passes[-1][0].step
    for one in reversed([p for p in context.clean if p.figures and site in p.figures.row_of]):
        if zero and not (_is_zero(one, site) or returns_only_bias(context, one, site)):
            break
        if not zero and one.figures and one.figures.figure(site, "flat") != 1:
            break
        step = one.step
    found = Zeros("gate", gates[0] if gates else "", 0.0, 0.0, zero, len(passes), step)
    if is_product and gates:
        return found
    if not zero or not sites or any(one.role == Role.INPUT for one in feeds):
        return None
    source, (last, figures) = sites[0], passes[-1]
    summary, power = last.summary(source), figures.figure(source, "limit")
    if summary is None:
        return None
    limit = 2.0**power if power < 1024 else math.inf
    largest = max(abs(summary.min), abs(summary.max))
    square = summary.norm**2 / summary.size * figures.figure(source, "units")
    found = dataclasses.replace(found, source=source, largest=largest, limit=limit)
    if max(largest**2, square) >= limit:
        return dataclasses.replace(found, why="overflow")
    if is_product:
        return dataclasses.replace(found, why="factor")
    is_norm = "Norm" in context.site(site).type  # another module may well have a ReLU of its own
    return dataclasses.replace(found, why="inside") if is_norm else None


def returns_only_bias(context: RuleContext, one: Pass, site: str) -> bool:
    """Whether a layer that multiplies what it receives returns its bias, and nothing else.

    A single layer of a stack is not known to, unless its output is 0: its bias is not known.
    """
    figures = one.figures
    if figures is None or context.site(site).affine != 1 or site not in figures.row_of:
        return False
    held = context.parameters_of(site)
    most = max((p.axes for p in held), default=0)
    weights = [figures.parameter(p.path, "norm") for p in held if p.axes == most]
    if not weights or not min(weights) > 0:
        return False  # weights of 0, or unknown
    if _is_zero(one, site):
        return True
    biases = [figures.parameter(p.path, "norm") for p in held if p.axes < most]
    size, same = figures.figure(site, "rms"), figures.figure(site, "flat") == 1
    of_bias = len(biases) == 1 and abs(size - biases[0]) <= BY_BIAS * size
    return layer_of(site) is None and same and of_bias


def are_harmless_zeros(context: RuleContext, site: str) -> bool:
    """Whether only zeros enter a site in all passes, and no fault makes them: the model was given
    them (an empty condition, a first state), or parameters are yet to learn.
    """
    if not context.paths.knows(site) or not _always_returns_only_bias(context, site):
        return False
    before = [s for s in context.measured_sites if context.paths.reaches(s, site)]
    return not any(
        find_zeros(context, s)
        or (not _always_returns_only_bias(context, s) and find_off_units(context, s))
        for s in before
        if context.parameters_in(s)
    )


def multiplies_harmless_zeros(context: RuleContext, site: str) -> bool:
    """Whether a weight has nothing to learn from, because it multiplies harmless zeros, or a state
    of zeros that a module beside it receives too: the forget gate of an LSTM in its first step.
    """
    cell = site.rpartition("/")[0]
    beside = [s for s in context.entrances if cell and s.rpartition("/")[0] == cell]
    return are_harmless_zeros(context, site) or any(are_harmless_zeros(context, s) for s in beside)


def _always_returns_only_bias(context: RuleContext, site: str) -> bool:
    passes = context.with_stats(site)
    return bool(passes) and all(returns_only_bias(context, one, site) for one, _ in passes)


def has_zero_factor(context: RuleContext, figures: PassStats, site: str) -> bool:
    """Whether parameters of another module, such as one around it, enter a site and are all zeros:
    a factor that begins at 0 and learns.
    """
    return any(
        one.role == Role.PARAMETERS
        and one.site != site
        and context.has_zero_weights(one.site, figures, of=any, own=False)
        for one in context.paths.feeds(site)
    )


def any_weight_is_zero(context: RuleContext, one: Pass) -> bool:
    """Whether a weight is still all zeros: layers before it get a gradient once it moves."""
    figures = one.figures
    if figures is None:
        return False
    weights = [
        p
        for ps in context.parameters_by_site.values()
        for p in ps
        if p.axes == max(q.axes for q in ps)
    ]
    return any(
        figures.parameter(p.path, "norm") == 0 and figures.parameter(p.path, "graded") > 0
        for p in weights
    )


def _is_zero(one: Pass, site: str) -> bool:
    summary = one.summary(site)
    return summary is not None and not summary.saturated and 0 < summary.size == summary.zeros


def _returns_nonzero(context: RuleContext, one: Pass, site: str) -> bool:
    """Whether a site returns any value in a pass that a ReLU would not make 0, too."""
    summary = one.summary(site)
    return summary is not None and summary.size > 0 and (
        summary.max > 0 or (summary.min < 0 and context.site(site).activation != "relu")
    )  # fmt: skip


def receives_only_zeros(context: RuleContext, one: Pass, site: str) -> bool:
    """Whether all that enters a site in a pass is 0."""
    sites = [f.site for f in context.paths.feeds(site) if f.role == Role.OUTPUT and not f.chosen]
    known = all((source, "output") in one.layout.at for source in sites)
    return bool(sites) and known and not any(_returns_nonzero(context, one, s) for s in sites)


def _is_far_below(context: RuleContext, site: str) -> bool:
    limit = OFF_AT.get(context.site(site).activation, -math.inf)
    found = [one.summary(site) for one, _ in context.with_stats(site)]
    return all(one is not None and one.max <= limit for one in found)


def _is_biased(context: RuleContext, site: str, figures: PassStats) -> bool:
    held = context.parameters_of(site)
    most = max((p.axes for p in held), default=0)
    of_biases = [p.path for p in held if p.axes < most or p.path.endswith("bias")]
    size = figures.figure(site, "rms")
    return any(figures.parameter(path, "norm") >= BIASED * size > 0 for path in of_biases)


def is_all_off(context: RuleContext, figures: PassStats, site: str) -> bool:
    """Whether a ReLU turns all of a site's output to 0 in one pass."""
    facts = context.site(site)
    if facts.activation == "relu":
        return context.masked_part(figures, site, "below") == 1
    return facts.made_by == "relu" and context.masked_part(figures, site, "dead") == 1


def is_off_by_chance(context: RuleContext, figures: PassStats, *, last: str) -> bool:
    """Whether a ReLU at or before a site turns everything to 0 in one pass, perhaps by chance."""
    return any(
        context.comes_before(site, last)
        and is_all_off(context, figures, site)
        and not find_off_units(context, site)
        for site in figures.sites
    )


def reach_of_chance(context: RuleContext, figures: PassStats) -> tuple[float, ...]:
    """The last place, in the order of returning, of a site whose whole gradient a narrow ReLU may
    remove by chance.

    A ReLU does so for each example separately at the sites up to its own, and at all sites if it
    turns everything that reaches it to 0.
    """
    relus = [
        site
        for site in figures.sites
        if "relu" in (context.site(site).activation, context.site(site).made_by)
        and figures.figure(site, "units") < NARROW
        and find_off_units(context, site) is None
    ]
    if any(is_all_off(context, figures, site) for site in relus):
        return (math.inf,)
    return max(map(context.order_of, relus), default=(-math.inf,))
