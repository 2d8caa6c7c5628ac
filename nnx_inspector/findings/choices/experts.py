"""Rules for experts that a router never chooses, and for loads that stay uneven.

Invariant: a small batch, or a pass or two, is no evidence: by chance an expert may get nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from nnx_inspector.findings.choices.heads import Rows, first_step, last_rows
from nnx_inspector.findings.finding import Finding, site_text
from nnx_inspector.findings.rule_context import FEW_PASSES, RuleContext
from nnx_inspector.stats.choices.rows import choice_stat, is_expert

TOKENS: Final = 32
"""How many tokens an expert would get in a pass if all got as many. One with a sixth of that gets
none once in 200 times."""
OVER: Final = 3.0
"""Fedus et al. 2021, "Switch transformers" (arXiv 2101.03961), section 2.2: experts have room for 1
to 2 times an even share, and drop the tokens beyond it."""
UNDER: Final = 0.1
"""Of an even share. An expert that gets TOKENS on average gets a tenth of them by chance in fewer
than one case of a thousand million."""


class _Router(NamedTuple):
    """A router in the last passes: float64[passes, experts], and float64[passes]."""

    site: str
    last: Rows
    loads: Rows
    tokens: Rows


def _routers(context: RuleContext) -> Iterator[_Router]:
    """The routers with enough passes and tokens."""
    for site, passes in last_rows(context).items():
        if not is_expert(site) or len(passes) < FEW_PASSES:
            continue
        loads = np.array([choice_stat(rows, "load") for _, rows in passes], np.float64)
        tokens = np.array([choice_stat(rows, "keys").max() for _, rows in passes])
        if (tokens * loads.mean(axis=1) >= TOKENS).all():
            yield _Router(site, passes[-1][1], loads, tokens)


def dead_experts(context: RuleContext) -> Iterator[Finding]:
    """Experts that no token of the last passes was sent to; one finding for each router."""
    for site, _, loads, tokens in _routers(context):
        dead = np.flatnonzero((loads == 0).all(axis=0))
        if not len(dead):
            continue
        most, (passes, count) = int(loads[-1].argmax()), loads.shape
        module = site.rpartition("@")[0]
        share, one = loads[-1].max(), len(dead) == 1
        which = f"expert{'s' * (not one)} {', '.join(map(str, dead[:8]))}"
        yield Finding(
            rule="dead-experts",
            site=module,
            step=first_step(context, site, lambda r, d=dead: not choice_stat(r, "load")[d].any()),
            severity="warning",
            evidence={
                "dead": len(dead),
                "experts": count,
                "largest": float(share),
                "tokens": float(tokens[-1]),
                "passes": passes,
            },
            what=(
                f"nothing reaches {which} of the {count} of {site_text(module)}, because the gate "
                f"never chooses {'it' if one else 'them'}: none of the {tokens[-1]:.0f} tokens in "
                f"each of the last {passes} passes; expert {most} gets {share:.0%}"
            ),
            advice=(
                "they get no gradient and learn nothing; usually a loss that balances the load is "
                "missing or too weak, or the gate began with large weights; add one, or noise"
            ),
        )


def uneven_experts(context: RuleContext) -> Iterator[Finding]:
    """Experts that get far more or fewer tokens than an even share in each of the last passes; one
    finding for each router all of whose experts get some.
    """
    for site, last, loads, tokens in _routers(context):
        if (loads == 0).all(axis=0).any():
            continue
        shares = _shares(loads)
        least, largest = shares.min(axis=0), shares.max(axis=0)  # of each expert
        over, under = np.flatnonzero(least >= OVER), np.flatnonzero(largest <= UNDER)
        if not len(over) + len(under):
            continue
        module, (passes, count) = site.rpartition("@")[0], loads.shape
        said: list[str] = []
        evidence = {"experts": count, "tokens": float(tokens[-1]), "passes": passes}
        if len(over):
            most = int(least.argmax())
            said.append(f"expert {most} gets at least {least[most]:.2g} times an even share")
            evidence |= {"over": len(over), "largest": float(least[most])}
            dropped = float(choice_stat(last, "dropped")[most])
            evidence |= {} if np.isnan(dropped) else {"dropped": dropped}
        if len(under):
            fewest = int(largest.argmin())
            said.append(f"expert {fewest} gets at most {largest[fewest]:.2g} of an even share")
            evidence |= {"under": len(under), "least": float(largest[fewest])}
        yield Finding(
            rule="uneven-experts",
            site=module,
            step=first_step(context, site, lambda r, o=over, u=under: _is_uneven(r, o, u)),
            severity="warning",
            evidence=evidence,
            what=(
                f"the gate of {site_text(module)} sends tokens unevenly to its {count} experts: "
                f"{' and '.join(said)}, in each of the last {passes} passes"
            ),
            advice=(
                "an expert with too many tokens drops those beyond its capacity or makes the "
                "others wait, and one with few learns little; usually a loss that balances the "
                "load is missing or too weak; add one, or give it more weight"
            ),
        )


def _shares(loads: Rows) -> Rows:
    """The load of each expert, divided by the mean load."""
    return loads / loads.mean(axis=-1, keepdims=True)


def _is_uneven(rows: Rows, over: Rows, under: Rows) -> bool:
    shares = _shares(choice_stat(rows, "load"))
    return bool((shares[over] >= OVER).all() and (shares[under] <= UNDER).all())
