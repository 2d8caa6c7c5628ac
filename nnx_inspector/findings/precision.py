"""Rules for what a dtype cannot hold: values near its largest, and updates that it rounds off.

Each makes one finding, at the first site in the order of the pass. Invariant: a mask, whose large
values are negative and far from the rest, is no overflow, and neither is an array of float8, whose
scale is chosen so that it fills the range: only one that mostly lies at the end of it is noted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from nnx_inspector.findings.evidence import STILL
from nnx_inspector.findings.finding import Finding, and_others, named
from nnx_inspector.findings.judged import Judged
from nnx_inspector.recordings.facts import Figures, ParameterFacts
from nnx_inspector.recordings.passes import Pass
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
MOST: Final = 0.5
LARGER: Final = 0.75
"""Elements that are not updated because their gradient is 0 (rows of an embedding, say) are as
large as the others; those whose updates are rounded off are larger, in nearly all pairs."""
GROWS: Final = 1.5
"""A copy of weights in float32, from which these are made anew, moves more elements with each step;
rounding alone stops the same ones for good."""

SATURATED: Final = 0.5
"""A float8 array whose values mostly lie at the end of the range has lost what tells them apart."""


def overflow(judged: Judged) -> Iterator[Finding]:
    """A value near the largest of its dtype."""
    for one in judged.clean:
        found = _near_limit(judged, one)
        if found:
            yield _overflowed(judged, one, found)
            return
    yield from _saturated(judged)


def _near_limit(judged: Judged, one: Pass) -> list[tuple[str, float]]:
    """The sites whose output reaches the limit in a pass, in order, with their largest sizes."""
    figures = one.figures
    if figures is None:
        return []
    tops = one.sizes("output")
    limits = {site: _limit_of(figures, site) for site in figures.sites if site in tops}
    at = judged.in_order(site for site, limit in limits.items() if limit and tops[site] >= limit)
    found = [(site, _reached(one, site, limits[site])) for site in at]
    return [(site, top) for site, top in found if top]


def _reached(one: Pass, site: str, limit: float) -> float:
    """The largest size of a site's output if that reaches the limit and is no mask; else 0."""
    summary = one.summary(site)
    if summary is None or not summary.finite:
        return 0.0
    top = max(abs(summary.min), abs(summary.max))
    return top if top >= limit and not _is_mask(summary, limit) else 0.0


def _overflowed(judged: Judged, one: Pass, found: list[tuple[str, float]]) -> Finding:
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
            f"At step {one.step} the output of {named(site)} reached {top:.3g}, near the largest "
            f"number of its dtype, {largest:.3g}"
            + and_others([named(other) for other, _ in others])
            + _since(judged, one, site)
        ),
        advice=_why_large(largest),
    )


def _since(judged: Judged, one: Pass, site: str) -> str:
    """What the newest pass says, if it no longer reaches the limit."""
    passes = (p for p in reversed(judged.clean) if p.figures and site in p.figures.sites)
    last = next(passes, one)
    summary = last.summary(site)
    if last.figures is None or summary is None or not summary.finite:
        return ""
    if _reached(last, site, _limit_of(last.figures, site)):
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


def _saturated(judged: Judged) -> Iterator[Finding]:
    """A float8 array most of whose values lie at the end of its range, in the newest passes."""
    for site in judged.measured:
        passes = [(p, f, p.summary(site)) for p, f in judged.with_figures(site)]
        each = [(_end_part(f, site, s) if s else 0.0) for _, f, s in passes]
        one, figures, summary = passes[-1]
        if min(each) <= SATURATED or summary is None:
            continue
        part, zero = each[-1], summary.zeros / summary.size
        leaving, largest = judged.site(site).leaving, _largest(figures, site)
        yield Finding(
            rule="overflow",
            site=site,
            step=passes[0][0].step,
            severity="info",
            evidence={"fraction": part, "zeros": zero, "limit": largest},
            what=(
                f"At step {one.step} {part:.0%} of the values of the output of {named(site)} lie "
                f"at the end of the range of {leaving or 'its float8 dtype'}, {largest:.3g}, and "
                f"{zero:.0%} are 0"
            ),
            advice=(
                "usually the scale by which values are multiplied before the cast is too large; "
                "choose it so that the largest value is near the end of the range"
            ),
        )
        return


def _end_part(figures: Figures, site: str, summary: Summary) -> float:
    """The share of the finite values that are a float8 dtype's largest or smallest number."""
    if not _is_float8(figures, site) or not summary.finite:
        return 0.0
    largest = round(2 * _largest(figures, site)) / 2  # from a logarithm
    if not (math.frexp(largest)[0] * 2 ** (MANTISSA + 1)).is_integer():
        return 0.0  # float8_e3m4: the bin holds the number before the largest too
    ends = bin_of(np.array([largest, -largest]))
    return float(summary.whole_bins()[ends].sum() / summary.finite)


def _is_float8(figures: Figures, site: str) -> bool:
    return figures.figure(site, "limit") < FLOAT16


def _largest(figures: Figures, site: str) -> float:
    power = figures.figure(site, "limit")
    return math.inf if not power < 1024 else 2.0**power


def _limit_of(figures: Figures, site: str) -> float:
    power = figures.figure(site, "limit")
    if not FLOAT16 <= power < 1025:  # of float8 or no dtype; NaN if it is unknown
        return 0.0
    # float16 ends at 2**16; bfloat16 and float32 at 2**128
    return 2.0**power / NEAR_LIMIT if power < 64 else 2.0 ** (power * SQUARE_LIMIT)


@dataclasses.dataclass(frozen=True)
class Stuck:
    """Parameters of 16 bits that updates do not change, as they round to nothing.

    Attributes:
        first, last: the passes between which they did not.
        parts: of each parameter the share of its elements that did not change; those come first of
            which the others did.
        whole: the share of the elements of all parameters of 16 bits.
    """

    first: Pass
    last: Pass
    parts: tuple[tuple[ParameterFacts, float], ...]
    whole: float


def stuck_parameters(judged: Judged) -> Stuck | None:
    passes = [p for p in judged.graded if p.kind == "watch" and p.figures is not None]
    held = [p for ps in judged.held.values() for p in ps if p.dtype in ("bfloat16", "float16")]
    held.sort(key=lambda p: judged.at(p.site))

    def told(one: Pass, path: str, name: str) -> float:
        return one.figures.parameter(path, name) if one.figures else math.nan

    held = [p for p in held if passes and told(passes[-1], p.path, "differentiated") == 1]
    followed = [
        all(math.isnan(told(one, p.path, "stuck")) for p in held) for one in passes
    ]  # whether each pass begins a loop
    passes = passes[max((i for i, begins in enumerate(followed) if begins), default=0) :]
    if len(passes) <= STILL:
        return None
    parts = {p.path: told(passes[-1], p.path, "stuck") for p in held}
    middle = passes[len(passes) // 2]

    def is_rounded(p: ParameterFacts) -> bool:
        part, before = parts[p.path], told(middle, p.path, "stuck")
        stopped = part >= MOST and 1 - part <= GROWS * (1 - before)
        return stopped and told(passes[-1], p.path, "larger") >= LARGER

    if not any(map(is_rounded, held)):
        return None
    found = [*filter(is_rounded, held), *(p for p in held if parts[p.path] == 1)]
    whole = sum(p.size * parts[p.path] for p in found) / sum(p.size for p in held)
    return Stuck(passes[0], passes[-1], tuple((p, parts[p.path]) for p in found), whole)


def rounded_off(found: Stuck) -> Finding:
    """Of the rule `update-ratio`: updates that a dtype of 16 bits rounds to nothing."""
    (first, part), *others = found.parts
    last = found.last.figures
    assert last is not None
    change = last.parameter(first.path, "change")
    return Finding(
        rule="update-ratio",
        site=first.site,
        step=found.first.step,
        severity="warning" if found.whole >= MOST else "info",
        evidence={
            "ratio": 0.0 if math.isnan(change) else change,
            "limit": 1.0,
            "late": 0.0,
            "stuck": part,
            "stuck_of_all": found.whole,
            "parameters": len(found.parts),
        },
        what=(
            f"From step {found.first.step} to step {found.last.step}, {part:.0%} of the sampled "
            f"elements of {first.path!r} ({first.dtype}) did not change"
            + and_others([f"{part:.0%} of {p.path!r}" for p, part in others], "parameter")
        ),
        advice=(
            f"they are larger than those that did, so updates are usually too small for the dtype "
            f"{first.dtype} and round to nothing; keep the parameters in float32 "
            f"(param_dtype=jnp.float32) and compute in {first.dtype} (dtype=jnp.{first.dtype}), or "
            f"let the optimizer keep a copy in float32"
        ),
    )


def _is_mask(summary: Summary, limit: float) -> bool:
    """Whether all large values are negative and far from the rest, as an added mask makes them."""
    if summary.max >= limit / 2:
        return False
    sizes = np.abs(bin_edges()[summary.nonzero_bins()[:, 0].astype(int)]).min(axis=1)
    rest = sizes[sizes < limit / 2]
    return bool(len(rest) and rest.max() < limit / GAP)
