"""Clipping that acts in most steps, so that a limit decides how much they count, not the gradient.

What it takes is measured where the step clips: all of a gradient by one number, or elements or
units of it. Invariant: clipping that takes next to nothing is no finding, such as that of an
optimizer which makes all updates of one size anyway. It is no warning where the steps are long
enough: an optimizer that follows it, such as Adam, may make up for what it takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from nnx_inspector.findings.evidence import STILL
from nnx_inspector.findings.finding import Finding, others_text
from nnx_inspector.findings.rule_context import RuleContext
from nnx_inspector.findings.update.decay import Seen, lasting, seen_in
from nnx_inspector.recordings.facts import ParameterFacts

TAKES: Final = 0.1
"""Less than a tenth of the norm is within what a learning rate is tuned to."""
MOST: Final = 0.5
ALMOST_ALL: Final = 0.9
"""Beyond it a gradient has a tenth of its norm, or less."""
SHORT: Final = 1e-4
"""A tenth of the usual size of an update, relative to its parameter."""


def clipping(context: RuleContext) -> Iterator[Finding]:
    """Gradients that most measured steps clip."""
    seen = {path: of for path, of in seen_in(context, "clipped").items() if len(of) >= STILL}
    held = {p.path: p for p in context.weights}
    found = [
        (held[path], statistics.median(taken for _, taken in of))
        for path, of in seen.items()
        if path in held and lasting(of) >= TAKES and _acted(of) > MOST * len(of)
    ]
    if not found:
        return
    found.sort(key=lambda one: (-one[1], context.order_of(one[0].site)))
    (one, taken), *others = found
    of = seen[one.path]
    first, last = of[0][0].step, of[-1][0].step
    yield Finding(
        rule="clipping",
        site=one.site,
        step=first,
        severity="warning" if taken >= ALMOST_ALL and _moved(seen, found) <= SHORT else "info",
        evidence={
            "taken": taken,
            "acted": _acted(of),
            "passes": len(of),
            "parameters": len(found),
        },
        what=(
            f"From step {first} to step {last}, clipping shortened the gradient of {one.path!r} "
            f"(or what the optimizer had made of it) in {_acted(of)} of {len(of)} measured steps, "
            f"in the median over all of them by {taken:.0%} of its norm"
            + others_text([f"{p.path!r} by {x:.0%}" for p, x in others], "parameter")
        ),
        advice=(
            "the limit, and not the gradient, then says how much a step counts; raise the limit "
            "above the norms that are usual here, or keep it if all steps are meant to count alike"
        ),
    )


def _moved(seen: Mapping[str, Seen], found: Sequence[tuple[ParameterFacts, float]]) -> float:
    """How far a step moves the parameters that are clipped most, relative to their sizes."""
    return statistics.median(
        statistics.median(step.update_ratio(one.path) for step, _ in seen[one.path])
        for one, taken in found
        if taken >= ALMOST_ALL
    )


def _acted(of: Seen) -> int:
    return sum(taken > 0 for _, taken in of)
