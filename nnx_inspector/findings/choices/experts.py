"""The rule for experts that a router never chooses.

Invariant: a small batch, or a pass or two, is no evidence: by chance an expert may get nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from nnx_inspector.findings.choices.heads import last_rows
from nnx_inspector.findings.finding import Finding, named
from nnx_inspector.findings.judged import FEW, Judged
from nnx_inspector.stats.choices.rows import choice_figure, is_expert

TOKENS: Final = 32
"""How many tokens an expert would get in a pass if all got as many. One with a sixth of that gets
none once in 200 times."""


def dead_experts(judged: Judged) -> Iterator[Finding]:
    """Experts that no token of the last passes was sent to; one finding for each router."""
    for site, passes in last_rows(judged).items():
        if not is_expert(site) or len(passes) < FEW:
            continue
        loads = np.array([choice_figure(rows, "load") for _, rows in passes])
        tokens = np.array([choice_figure(rows, "keys").max() for _, rows in passes])
        count = loads.shape[1]
        if not (tokens * loads.sum(axis=1) / count >= TOKENS).all():
            continue
        dead = np.flatnonzero((loads == 0).all(axis=0))
        if not len(dead):
            continue
        step = passes[-1][0]
        for each in reversed(judged.clean):
            rows = each.figures.of_choices.get(site) if each.figures else None
            if rows is not None and (choice_figure(rows, "load")[dead] > 0).any():
                break
            step = step if rows is None else each.step
        most = int(loads[-1].argmax())
        module = site.rpartition("@")[0]
        share, one = loads[-1].max(), len(dead) == 1
        which = f"expert{'s' * (not one)} {', '.join(map(str, dead[:8]))}"
        yield Finding(
            rule="dead-experts",
            site=module,
            step=step,
            severity="warning",
            evidence={
                "dead": len(dead),
                "experts": count,
                "largest": float(share),
                "tokens": float(tokens[-1]),
                "passes": len(passes),
            },
            what=(
                f"nothing reaches {which} of the {count} of {named(module)}, because the gate "
                f"never chooses {'it' if one else 'them'}: none of the {tokens[-1]:.0f} tokens in "
                f"each of the last {len(passes)} passes; expert {most} gets {share:.0%}"
            ),
            advice=(
                "they get no gradient and learn nothing; usually a loss that balances the load is "
                "missing or too weak, or the gate began with large weights; add one, or noise"
            ),
        )
