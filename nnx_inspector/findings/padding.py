"""The rule for padding: an id that fills most positions of what an embedding receives.

Invariant: the share is exact. A loop tells that of id 0 only, whose values are counted by
themselves. Makes no finding where `where=` was given, which says what padding is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from nnx_inspector.findings.finding import Finding, site_text
from nnx_inspector.findings.rule_context import RuleContext
from nnx_inspector.recordings.facts import ParameterFacts
from nnx_inspector.stats.bins import FINITE_BINS
from nnx_inspector.stats.samples.parameter_stats import ID_STATS

PADDED: Final = 0.5
SEGMENTS: Final = 4
"""Fewer ids than this tell segments or classes apart, of which one may well be the commonest."""


@dataclasses.dataclass(frozen=True)
class _Ids:
    """What an embedding received in a step.

    Attributes:
        part: the share of the commonest id.
        number: this id; NaN below 0.
        distinct: how many ids there were at least.
    """

    step: int
    part: float
    number: float
    distinct: float
    positions: float


def padding(context: RuleContext) -> Iterator[Finding]:
    """An id that fills most positions of what an embedding receives."""
    for one in context.weights:
        ids = _of_a_pass(context, one) or _of_a_loop(context, one)
        if ids is None or not (ids.part > PADDED and ids.distinct >= SEGMENTS):
            continue
        which, token = f"id {ids.number:.0f}", f"!= {ids.number:.0f}"
        which, token = ("one negative id", ">= 0") if math.isnan(ids.number) else (which, token)
        yield Finding(
            rule="padding",
            site=one.site,
            step=ids.step,
            severity="info",
            evidence={"fraction": ids.part, "positions": ids.positions},
            what=(
                f"At step {ids.step} {which} filled {ids.part:.0%} of the {ids.positions:.0f} "
                f"positions that {site_text(one.site)} received"
            ),
            advice=(
                "usually padding, which most figures then describe; leave it out of them: pass "
                f"where=lambda tokens, *_: tokens {token} to nni.Inspector or nni.watch"
            ),
        )
        return


def _of_a_pass(context: RuleContext, one: ParameterFacts) -> _Ids | None:
    """From the figures of the newest pass of our own."""
    passes = [(p, f) for p in context.clean if (f := p.figures) is not None]
    found = [(p, f) for p, f in passes if f.parameter(one.path, "filled") >= 0]
    if not found:
        return None
    item, figures = found[-1]
    return _Ids(item.step, *(figures.parameter(one.path, name) for name in ID_STATS))


def _of_a_loop(context: RuleContext, one: ParameterFacts) -> _Ids | None:
    """From the ids that a watched loop counted, if the call receives them as they are."""
    if context.facts.where or context.site(one.site).given != 1:
        return None
    for item in reversed(context.clean):
        received = item.summary(one.site, "input")
        if received is not None and received.size:
            distinct = float(np.count_nonzero(received.bins[FINITE_BINS]))
            part = received.zeros / received.size
            return _Ids(item.step, part, 0.0, distinct, received.size)
    return None
