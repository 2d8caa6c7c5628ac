"""The rules for values that a dtype cannot hold: too large for it, or too small.

Each makes one finding, at the first site in the order of the pass. Invariant: a mask, whose large
values are negative and far from the rest, is no overflow, and neither is an array of float8, whose
scale is chosen so that it fills the range: only one that mostly lies at the end of it is noted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from nnx_inspector.findings.finding import Finding, others_text, quantity_text, site_text
from nnx_inspector.findings.rule_context import FEW_PASSES, RuleContext
from nnx_inspector.recordings.facts import PassStats
from nnx_inspector.recordings.passes import Pass, Quantity
from nnx_inspector.stats.bins import MANTISSA, bin_edges, bin_of
from nnx_inspector.stats.summary import Summary

NEAR_LIMIT: Final = 8.0
"""float16: a value within this factor of 65504 is one layer's gain away from Inf. Loss scaling
halves at each overflow (Micikevicius et al. 2018, "Mixed precision training"); three halvings."""
SMALL_DTYPE: Final = 1e6
"""The largest number of float16 is below this."""
FLOAT16: Final = 15.9
"""Below log2 of float16's largest number, 65504, and above that of every float8 dtype."""
GAP: Final = 16.0
"""An overflow approaches the limit gradually; a mask leaves a gap of at least this factor."""
SQUARE_LIMIT: Final = 0.5
"""Wider dtypes: a value beyond limit ** 0.5 (1.8e19) has no finite square, norm or variance."""
SATURATED: Final = 0.5
"""A float8 array whose values mostly lie at the end of the range has lost what tells them apart."""

FAINT: Final = 2.0**-22
"""Below it float16 has three numbers, of one or two bits, and what is below half the least of them
has become 0."""
MOST: Final = 0.5


def overflow(context: RuleContext) -> Iterator[Finding]:
    """A value near the largest of its dtype."""
    for one in context.clean:
        found = _near_limit(context, one)
        if found:
            yield _overflow_finding(context, one, found)
            return
    yield from _saturated_float8(context)


def _near_limit(context: RuleContext, one: Pass) -> list[tuple[str, float]]:
    """The sites whose output reaches the limit in a pass, in order, with their largest sizes."""
    figures = one.figures
    if figures is None:
        return []
    tops = one.sizes("output")
    limits = {site: _limit_of(figures, site) for site in figures.sites if site in tops}
    at = context.sort(site for site, limit in limits.items() if limit and tops[site] >= limit)
    found = [(site, _largest_at_limit(one, site, limits[site])) for site in at]
    return [(site, top) for site, top in found if top]


def _largest_at_limit(one: Pass, site: str, limit: float) -> float:
    """The largest size of a site's output if that reaches the limit and is no mask; else 0."""
    summary = one.summary(site)
    if summary is None or not summary.finite:
        return 0.0
    top = max(abs(summary.min), abs(summary.max))
    return top if top >= limit and not _is_mask(summary, limit) else 0.0


def _overflow_finding(context: RuleContext, one: Pass, found: list[tuple[str, float]]) -> Finding:
    (site, top), *others = found
    assert one.figures is not None
    largest = _largest(one.figures, site)
    return Finding(
        rule="overflow",
        site=site,
        step=one.step,
        severity="error",
        evidence={"largest": top, "limit": largest, "others": len(others)},
        what=(
            f"At step {one.step} the output of {site_text(site)} reached {top:.3g}, near the "
            f"largest number of its dtype, {largest:.3g}"
            + others_text([site_text(other) for other, _ in others])
            + _newest_text(context, one, site)
        ),
        advice=_why_large(largest),
    )


def _newest_text(context: RuleContext, one: Pass, site: str) -> str:
    """What the newest pass says, if it no longer reaches the limit."""
    passes = (p for p in reversed(context.clean) if p.figures and site in p.figures.sites)
    last = next(passes, one)
    summary = last.summary(site)
    if last.figures is None or summary is None or not summary.finite:
        return ""
    if _largest_at_limit(last, site, _limit_of(last.figures, site)):
        return ""
    top = max(abs(summary.min), abs(summary.max))
    return f"; at step {last.step} it reached {top:.3g} only"


def _why_large(largest: float) -> str:
    if largest < SMALL_DTYPE:
        return (
            "usually weights or inputs that are too large for float16; use bfloat16 or float32 "
            "here (loss scaling helps gradients only), or Inf and NaN come next"
        )
    return (
        "usually weights or inputs that are too large, or an exp of a large value; normalise or "
        "clip the input (a wider dtype only delays the overflow); the square of this value is Inf "
        "already, and Inf and NaN come next"
    )


def _saturated_float8(context: RuleContext) -> Iterator[Finding]:
    """A float8 array most of whose values lie at the end of its range, in the newest passes."""
    for site in context.measured_sites:
        passes = [(p, f, p.summary(site)) for p, f in context.with_stats(site)]
        each = [(_end_part(f, site, s) if s else 0.0) for _, f, s in passes]
        one, figures, summary = passes[-1]
        if min(each) <= SATURATED or summary is None:
            continue
        part, zero = each[-1], summary.zeros / summary.size
        leaving, largest = context.site(site).leaving, _largest(figures, site)
        yield Finding(
            rule="overflow",
            site=site,
            step=passes[0][0].step,
            severity="info",
            evidence={"fraction": part, "zeros": zero, "limit": largest},
            what=(
                f"At step {one.step} {part:.0%} of the values of the output of {site_text(site)} "
                "lie "
                f"at the end of the range of {leaving or 'its float8 dtype'}, {largest:.3g}, and "
                f"{zero:.0%} are 0"
            ),
            advice=(
                "usually the scale by which values are multiplied before the cast is too large; "
                "choose it so that the largest value is near the end of the range"
            ),
        )
        return


def _end_part(figures: PassStats, site: str, summary: Summary) -> float:
    """The share of the finite values that are a float8 dtype's largest or smallest number."""
    if not _is_float8(figures, site) or not summary.finite:
        return 0.0
    largest = round(2 * _largest(figures, site)) / 2  # from a logarithm
    if not (math.frexp(largest)[0] * 2 ** (MANTISSA + 1)).is_integer():
        return 0.0  # float8_e3m4: the bin holds the number before the largest too
    ends = bin_of(np.array([largest, -largest]))
    return float(summary.whole_bins()[ends].sum() / summary.finite)


def beyond_float8(dtype: str, counts: Mapping[str, int]) -> str:
    """What makes values of a float8 dtype that are not finite, as a clause; "" for another dtype,
    and for NaN where what is too large is Inf. Names with an f for "finite" have no Inf.
    """
    has_inf = dtype.rpartition("_")[2].rstrip("uz")[-2:] != "fn"
    if not dtype.startswith("float8") or (counts["nan"] and has_inf):
        return ""
    gives = "gives Inf for it" if has_inf else "has no Inf and gives NaN for it"
    return (
        f"usually a value that is too large for {dtype}, which {gives}; scale values so that the "
        f"largest is near the end of the range, or clip them before the cast"
    )


def _is_float8(figures: PassStats, site: str) -> bool:
    return figures.figure(site, "limit") < FLOAT16


def _largest(figures: PassStats, site: str) -> float:
    power = figures.figure(site, "limit")
    return math.inf if not power < 1024 else 2.0**power


def _limit_of(figures: PassStats, site: str) -> float:
    power = figures.figure(site, "limit")
    if not FLOAT16 <= power < 1025:  # of float8 or no dtype; NaN if it is unknown
        return 0.0
    # float16 ends at 2**16; bfloat16 and float32 at 2**128
    return 2.0**power / NEAR_LIMIT if power < 64 else 2.0 ** (power * SQUARE_LIMIT)


def _is_mask(summary: Summary, limit: float) -> bool:
    """Whether all large values are negative and far from the rest, as an added mask makes them."""
    if summary.max >= limit / 2:
        return False
    sizes = np.abs(bin_edges()[summary.nonzero_bins()[:, 0].astype(int)]).min(axis=1)
    rest = sizes[sizes < limit / 2]
    return bool(len(rest) and rest.max() < limit / GAP)


# --------------------------------------------------------------------- underflow


def underflow(context: RuleContext) -> Iterator[Finding]:
    """Values of float16 of which most are so small that they have lost nearly all of their bits."""
    yield from _underflow_findings(
        context, context.gradient_passes, "gradient"
    ) or _underflow_findings(context, context.clean, "output")


def _underflow_findings(
    context: RuleContext, passes: Sequence[Pass], quantity: Quantity
) -> list[Finding]:
    halves = [site for site in context.order if context.site(site).leaving == "float16"]
    if quantity == "output":  # those of a softmax, a gate or a mask may well be next to 0
        halves = [site for site in halves if context.parameters_of(site)]
    each = {site: [(p, s) for p in passes if (s := p.summary(site, quantity))] for site in halves}
    found: list[tuple[str, float]] = []
    for site in context.sort(each):
        parts = [_faint_part(summary) for _, summary in each[site]]
        if parts and min(map(statistics.median, (parts, parts[-FEW_PASSES:], parts[-1:]))) >= MOST:
            found.append((site, parts[-1]))
    if not found:
        return []
    (site, part), *others = found
    one, summary = each[site][-1]
    zeros = summary.zeros / summary.size
    return [
        Finding(
            rule="underflow",
            site=site,
            step=one.step,
            severity="warning",
            evidence={"fraction": part, "zeros": zeros, "others": len(others)},
            what=(
                f"At step {one.step} {part:.0%} of the nonzero values of "
                f"{quantity_text(site, quantity)} are below {FAINT:.3g}, next to the smallest "
                f"number of its dtype, float16, and {zeros:.0%} are 0"
                + others_text([site_text(other) for other, _ in others])
            ),
            advice=_WHY_SMALL[quantity],
        )
    ]


_WHY_SMALL: Final = {
    "gradient": (
        "smaller values have become 0; multiply the loss by a scale (1024, say) and divide the "
        "gradients of the parameters by it, or compute in bfloat16"
    ),
    "output": (
        "smaller values have become 0, usually because weights or inputs are too small; normalise "
        "what comes in, or compute in bfloat16 or float32"
    ),
}


def _faint_part(summary: Summary) -> float:
    """The share of the nonzero finite values that are below FAINT."""
    if summary.saturated:
        return 0.0
    bins, counts = summary.nonzero_bins().T
    sizes, zeros = np.abs(bin_edges()[bins.astype(int)]).max(axis=1), summary.zeros
    nonzero = float(counts.sum()) - zeros
    return float(counts[sizes <= FAINT].sum() - zeros) / nonzero if nonzero > 0 else 0.0
