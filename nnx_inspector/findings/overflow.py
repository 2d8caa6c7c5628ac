"""The rule `overflow`: a value near the largest of its dtype.

It makes one finding, at the first site in the order of the pass. Invariant: a mask, whose large
values are negative and far from the rest, is no overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from nnx_inspector.findings.finding import Finding, and_others, named
from nnx_inspector.findings.judged import Judged
from nnx_inspector.recordings.facts import Figures
from nnx_inspector.stats.bins import bin_edges
from nnx_inspector.stats.summary import Summary

NEAR_LIMIT: Final = 8.0
"""float16: a value within this factor of 65504 is one layer's gain away from Inf. Loss scaling
halves at each overflow (Micikevicius et al. 2018, "Mixed precision training"); three halvings."""
SMALL_DTYPE: Final = 1e6
"""The largest numbers of float16 and float8 are below this."""
GAP: Final = 16.0
"""An overflow approaches the limit gradually; a mask leaves a gap of at least this factor."""
SQUARE_LIMIT: Final = 0.5
"""Wider dtypes: a value beyond limit ** 0.5 (1.8e19) has no finite square, norm or variance."""


def overflow(judged: Judged) -> Iterator[Finding]:
    """A value near the largest of its dtype."""
    found: list[tuple[str, int, float, float]] = []
    for one in judged.clean:
        if one.figures is None:
            continue
        tops = one.sizes("output")
        limits = {site: _limit_of(one.figures, site) for site in one.figures.sites if site in tops}
        at = [site for site, limit in limits.items() if limit and tops[site] >= limit]
        for site in judged.in_order(at):
            summary, limit = one.summary(site), limits[site]
            if summary is None or not summary.finite:
                continue
            top = max(abs(summary.min), abs(summary.max))
            if top >= limit and not _is_mask(summary, limit):
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
            what=(
                f"At step {step} the output of {named(site)} reached {top:.3g}, near the largest "
                f"number of its dtype, {largest:.3g}"
                + and_others([named(one[0]) for one in found[1:]])
            ),
            advice=_why_large(largest),
        )


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


def _largest(figures: Figures, site: str) -> float:
    power = figures.figure(site, "limit")
    return math.inf if not power < 1024 else 2.0**power


def _limit_of(figures: Figures, site: str) -> float:
    power = figures.figure(site, "limit")
    if not 0 < power < 1025:  # of no dtype; NaN if it is unknown
        return 0.0
    # float16 ends at 2**16, float8 before that; bfloat16 and float32 at 2**128
    return 2.0**power / NEAR_LIMIT if power < 64 else 2.0 ** (power * SQUARE_LIMIT)


def _is_mask(summary: Summary, limit: float) -> bool:
    """Whether all large values are negative and far from the rest, as an added mask makes them."""
    if summary.max >= limit / 2:
        return False
    sizes = np.abs(bin_edges()[summary.nonzero_bins()[:, 0].astype(int)]).min(axis=1)
    rest = sizes[sizes < limit / 2]
    return bool(len(rest) and rest.max() < limit / GAP)
