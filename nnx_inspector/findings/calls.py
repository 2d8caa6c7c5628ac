"""The rule over what a loop calls: the model that is watched, or something else.

Invariant: it speaks of the loop that was watched last, and is silent from its first pass on.
"""

from __future__ import annotations

from collections.abc import Iterator

from nnx_inspector.findings.finding import Finding
from nnx_inspector.findings.judged import Judged


def uncalled(judged: Judged) -> Iterator[Finding]:
    """A watched loop that never called the model."""
    found = judged.facts.uncalled
    if found is not None:
        yield Finding(
            rule="uncalled",
            site="",
            step=found.step,
            severity="error",
            evidence={"steps": found.steps, "calls": found.calls},
            what=found.what,
            advice=found.advice,
        )
