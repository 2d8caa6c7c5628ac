"""`Finding`: one thing that is wrong, and how findings are ordered.

Invariant: a finding never changes. Knows no rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

Severity = Literal["error", "warning", "info"]
"""How bad it is, worst first."""

SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "info")

CAUSES_FIRST: Final = (
    "uncalled", "nonfinite", "overflow", "unused", "mode", "dtype", "dead-units",
    "saturated-units", "constant", "collapse", "exploding-gradient", "vanishing-gradient",
    "no-gradient", "update-ratio",
)  # fmt: skip
"""The rules, what may be the cause of another before that: what is wrong in the model, then what
is wrong going forward, going backward, and in the update."""

GOING_FORWARD: Final = ("dead-units", "saturated-units", "constant", "collapse")
"""Of these what comes first in the pass is the cause of what comes after."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, or may be.

    Attributes:
        rule: the rule that found it, one of `CAUSES_FIRST`.
        site: key of the site concerned, of a parameter that of its module.
        step: the step at which it was first seen.
        severity: "error", "warning" or "info".
        evidence: the figures it rests on, by name; counts are numbers of values.
        what: what was seen, a clause without a full stop.
        advice: what it usually means and what mends it, likewise.
        effects: other findings that this one explains, which are not listed beside it.
    """

    rule: str
    site: str
    step: int
    severity: Severity
    evidence: Mapping[str, float]
    what: str
    advice: str
    effects: tuple[Finding, ...] = ()

    @property
    def message(self) -> str:
        """What was seen, what it usually means, and what follows from it."""
        own = f"{self.what}: {self.advice}."
        if not self.effects:
            return own
        return f"{own} Because of this: {'; '.join(_inside(one.what) for one in self.effects)}."


def _inside(clause: str) -> str:
    """A clause within a sentence; a name at its beginning stays as it is."""
    lower = clause[:2].istitle() and clause[:3] not in ("Inf", "NaN")
    return clause[0].lower() + clause[1:] if lower else clause


def named(site: str) -> str:
    """A site in a message."""
    return repr(site) if site else "the model"


def and_others(count: int, what: str = "site") -> str:
    """`" (and 2 more sites)"`, nothing for none."""
    return f" (and {count} more {what}{'s' * (count > 1)})" if count else ""
