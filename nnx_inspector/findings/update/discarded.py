"""New parameters that a loop computes and does not keep: each step begins with the old ones.

Invariant: the passes of one program that updates once (over microbatches, say) share their
parameters and their update, so they are one step here; as many updates as `STILL` must differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from nnx_inspector.findings.evidence import STILL
from nnx_inspector.findings.finding import Finding
from nnx_inspector.findings.rule_context import RuleContext

SEEN: Final = 1e-6
"""An update of this part of a parameter's size is not lost to the rounding of float32, 6e-8."""


def discarded_updates(context: RuleContext) -> Iterator[Finding]:
    """Steps that compute other parameters than they are given, and are all given the same."""
    passes = [p for p in context.passes if p.kind == "watch"]
    each = [(p, p.figures) for p in passes if p.figures is not None]
    if any(p.perturbed for p in passes):
        return
    paths = [p.path for p in context.weights]
    if any(f.parameter(path, "same") == 0 for _, f in each for path in paths):
        return
    moved = [(p, {path: f.parameter(path, "update") for path in paths}) for p, f in each]
    moved = [(p, of) for p, of in moved if any(SEEN <= x < math.inf for x in of.values())]
    if len({tuple(of.values()) for _, of in moved}) < STILL:
        return
    if not all(any(f.parameter(path, "same") == 1 for path in paths) for _, f in each[1:]):
        return  # or it is not known
    sizes = [(x, path) for _, of in moved for path, x in of.items() if math.isfinite(x)]
    largest, path = max(sizes)
    first, last = moved[0][0], moved[-1][0]
    yield Finding(
        rule="update-ratio",
        site="",
        step=first.step,
        severity="warning",
        evidence={"moved": largest, "passes": len(moved)},
        what=(
            f"From step {first.step} to step {last.step}, each of {len(moved)} measured steps "
            f"computed other parameters than it was given ({path!r} differs by up to "
            f"{largest:.2g} times its size), and all of them were given the same"
        ),
        advice=(
            "usually the result of the step is not kept (state = step(state, batch), or "
            "nnx.update(model, state) after it), so nothing is learnt; fine if each step is meant "
            "to begin anew, as one that adapts to a task"
        ),
    )
