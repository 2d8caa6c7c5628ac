"""Weight decay that moves a parameter farther than its gradient does.

Both parts are read from the step's own sum. Once training has settled they have one size, so decay
is noted only where it is clearly larger: in all steps, or in the first ones until most of the
parameter is gone. It must also move the parameter. Invariant: nothing is said of an update whose
parts were not seen.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Final

from nnx_inspector.findings.finding import Finding, others_text
from nnx_inspector.findings.precision.updates import TOO_SMALL
from nnx_inspector.findings.rule_context import FEW_PASSES, RuleContext
from nnx_inspector.recordings.facts import ParameterFacts
from nnx_inspector.recordings.passes import Pass

BALANCED: Final = 1.0
"""The two parts hold a parameter where it is, which is what weight decay is for."""
FARTHER: Final = 2.0
"""Not even the noise of the gradients is as large as the decay."""
HALF: Final = 0.5
"""A decay that is too strong shrinks a parameter until the two parts are of one size again. One
that took half of the parameter by then has taken what it began with."""
Seen = Sequence[tuple[Pass, float]]
"""The measured steps in which a figure of a parameter is known, with it."""


def seen_in(context: RuleContext, name: str) -> dict[str, Seen]:
    """One of `UPDATE_STATS` of each parameter, in the passes that have it and no perturbation."""
    passes = [p for p in context.clean if p.kind == "watch"]
    found: dict[str, list[tuple[Pass, float]]] = {}
    for one in passes:
        for path, figure in one.updates(name).items():
            if not math.isnan(figure):
                found.setdefault(path, []).append((one, figure))
    return {path: of for path, of in found.items() if len(of) >= FEW_PASSES}


def lasting(of: Seen) -> float:
    """The median over all steps, or over the newest ones if that is less."""
    figures = [figure for _, figure in of]
    return min(map(statistics.median, (figures, figures[-FEW_PASSES:])))


def _strong(path: str, of: Seen) -> Seen:
    """The steps in which the decay of a parameter is too strong: all, or the first ones, in which
    the decay was larger, if they left less than half of it.
    """
    if lasting(of) >= FARTHER:
        return of
    those = list(itertools.takewhile(lambda one: one[1] > BALANCED, of))
    if len(those) < FEW_PASSES:
        return ()
    sizes = [one.figures.parameter(path, "norm") for one, _ in those if one.figures]
    return those if sizes[-1] <= HALF * sizes[0] else ()


def weight_decay(context: RuleContext) -> Iterator[Finding]:
    """Weight decay that moves parameters farther than their gradients do."""
    held = {p.path: p for p in context.weights}
    each = {p: _strong(p, of) for p, of in seen_in(context, "decayed").items()}

    def moves(path: str) -> float:
        return statistics.median(one.update_ratio(path) for one, _ in each[path])

    found: list[tuple[ParameterFacts, float]] = [
        (held[path], statistics.median(figure for _, figure in of))
        for path, of in each.items()
        if path in held and of and moves(path) >= TOO_SMALL
    ]
    if not found:
        return
    found.sort(key=lambda one: (-one[1], context.order_of(one[0].site)))
    (one, ratio), *others = found
    steps = [p for p, _ in each[one.path]]
    how = f"moves {one.path!r} {_far(ratio)}, in the median over {len(steps)} measured steps"
    yield Finding(
        rule="weight-decay",
        site=one.site,
        step=steps[0].step,
        severity="warning",
        evidence={
            "ratio": ratio,
            "limit": BALANCED,
            "update": moves(one.path),
            "passes": len(steps),
            "parameters": len(found),
        },
        what=(
            f"From step {steps[0].step} to step {steps[-1].step}, weight decay {how} (norms of "
            f"the two parts of its update); a step changes it by {moves(one.path):.2g} times its "
            f"size" + others_text([_other(p.path, x) for p, x in others], "parameter")
        ),
        advice=(
            "the parameter shrinks whatever its gradient says; lower the weight decay by a factor "
            "of 10 or more (some optimizers do not multiply it by the learning rate), or leave the "
            "parameter out with mask="
        ),
    )


def _far(ratio: float) -> str:
    if math.isinf(ratio):
        return "and its gradient does not"
    return f"{ratio:.2g} times as far as its gradient does"


def _other(path: str, ratio: float) -> str:
    return f"{path!r}, alone" if math.isinf(ratio) else f"{path!r}, {ratio:.2g} times"
