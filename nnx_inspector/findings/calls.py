"""The rule `uncalled`: a watched loop calls something else instead of the watched model.

Invariant: it judges the loop that was watched last, and finds nothing from its first pass on.
"""

from __future__ import annotations

from collections.abc import Iterator

from nnx_inspector.findings.finding import Finding
from nnx_inspector.findings.judged import Judged


def uncalled(judged: Judged) -> Iterator[Finding]:
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
