"""`Finding`: one thing that is wrong; `Findings`: all of them, and their order.

Invariant: a finding never changes. Does not know the rules.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from nnx_inspector.errors import printable
from nnx_inspector.recordings.facts import ParameterFacts
from nnx_inspector.recordings.tree_rows import leaf_of

Severity = Literal["error", "warning", "info"]
"""How bad a finding is, worst first."""

SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "info")

RULES: Final = (
    "uncalled", "nonfinite", "metrics", "overflow", "unused", "mode", "dtype", "dead-experts",
    "uneven-experts", "attention", "dead-units", "saturated-units", "constant", "collapse",
    "exploding-gradient", "vanishing-gradient", "underflow", "no-gradient", "skipped-steps",
    "update-ratio", "weight-decay", "clipping", "padding", "recompilation",
)  # fmt: skip
"""The rules, each before those that it may cause: the model, forward, backward, the update."""

FORWARD_RULES: Final = ("dead-units", "saturated-units", "constant", "collapse")
"""Of findings by these rules, the one earliest in the pass causes the later ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, or may be.

    Attributes:
        rule: the rule that found it, one of `RULES`.
        site: the key of the site; for a parameter, the key of its module.
        step: the step at which it was first seen.
        severity: "error", "warning" or "info".
        evidence: the figures it rests on, by name; counts are numbers of values.
        what: what was seen, as a clause without a full stop.
        advice: what it usually means and what fixes it, as a clause without a full stop.
        effects: other findings that this one explains and that are not listed separately.
        gone: the first of at least five measured steps, up to the newest one, in which neither the
            rule nor those of the effects find anything; None while they do, or if it is not known.
    """

    rule: str
    site: str
    step: int
    severity: Severity
    evidence: Mapping[str, float]
    what: str
    advice: str
    effects: tuple[Finding, ...] = ()
    gone: int | None = None

    def __str__(self) -> str:
        text = f"{self.severity}: {self.rule} at {self.site or 'the model'}\n    {self.message}"
        return printable(text)

    @property
    def message(self) -> str:
        """What was seen, what it usually means, what follows from it, and whether it is over."""
        follows = "; ".join(lower_first(one.what) for one in self.effects)
        because = f" Because of this: {follows}." if follows else ""
        over = "" if self.gone is None else f" It is gone since step {self.gone}."
        return f"{self.what}: {self.advice}.{because}{over}"


MOST_FINDINGS: Final = 20
LONGEST_CELL: Final = 60
LONGEST_MESSAGE: Final = 900


class Findings(list[Finding]):
    """Findings, worst first."""

    def to_markdown(self) -> str:
        """The findings with their evidence, for an issue or a program that reads.

        Of more than 20 findings it counts the rest, and it cuts what is longer than 900 characters.

        Example:
            >>> Findings().to_markdown()
            'No rule finds anything wrong.'
        """
        if not self:
            return "No rule finds anything wrong."
        parts = [_in_markdown(number, one) for number, one in enumerate(self[:MOST_FINDINGS], 1)]
        if (more := len(self) - MOST_FINDINGS) > 0:
            parts.append(f"{more} more finding{'s' * (more > 1)}.")
        return "\n\n".join(parts)


def _in_markdown(number: int, one: Finding) -> str:
    evidence = [f"{name.replace('_', ' ')} {value:.6g}" for name, value in one.evidence.items()]
    lines = [
        f"**{one.severity}: {one.rule} at {markdown_cell(one.site) or 'the model'}**",
        markdown_cell(one.message, LONGEST_MESSAGE),
    ]
    if evidence:
        lines.append(markdown_cell(f"Evidence: {', '.join(evidence)}.", LONGEST_MESSAGE))
    return f"{number}. " + "\n\n   ".join(lines)


def markdown_list(lines: Iterable[str]) -> str:
    """A list in Markdown."""
    return "\n".join(f"- {line}" for line in lines)


def markdown_cell(text: str, longest: int = LONGEST_CELL) -> str:
    """Text in one line of Markdown, with its middle left out where it is longer than that."""
    text = "".join(x if x.isprintable() else " " for x in printable(text))
    if len(text) > longest:
        half = (longest - 3) // 2
        text = f"{text[:half]}...{text[-half:]}"
    return re.sub(r"([\\`*_|<>\[\]#])", r"\\\1", text)


def lower_first(clause: str) -> str:
    """A clause in the middle of a sentence: lower case, unless it begins with a name."""
    lower = clause[:2].istitle() and clause[:3] not in ("Inf", "NaN")
    return clause[0].lower() + clause[1:] if lower else clause


def site_text(site: str) -> str:
    site, array = leaf_of(site)
    return f"array {array!r} of " * bool(array) + (repr(site) if site else "the model")


def quantity_text(site: str, quantity: str) -> str:
    """`"the output of 'head'"`; of one of several arrays, `"the output '1' of 'head'"`."""
    site, array = leaf_of(site)
    return f"the {quantity}" + f" {array!r}" * bool(array) + f" of {site_text(site)}"


def others_text(others: Sequence[str], what: str = "site", *, said: int = 2) -> str:
    """`" (also 'a', 'b' and 3 more sites)"`, or `""` if there are no others.

    Args:
        others: each in words.
        what: what they are, one of them.
        said: how many of them are named.
    """
    more = f" {what}{'s' * (len(others) - said > 1)}"
    return f" ({'also' if said else 'and'} {_join(others, said, more)})" if others else ""


def _join(every: Sequence[str], said: int, more: str = "") -> str:
    """`"a, b and 3 more"`, with what these are at the end."""
    rest = [f"{len(every) - said} more{more}"] if len(every) > said else []
    *first, last = [*every[:said], *rest]
    return " and ".join(filter(None, [", ".join(first), last]))


MOST_EXACT: Final = 2**24
"""Counts of elements from here on were rounded to float32."""
MOST_NAMED: Final = 3
"""How many parameters a sentence names."""


def was_or_were(found: Sequence[ParameterFacts]) -> str:
    return "were" if len(found) > 1 else "was"


def counts_text(found: Sequence[ParameterFacts]) -> str:
    """`"the parameter 'a/kernel' (2 NaN among 12 elements)"`, or several of them."""
    said = [f"{one.path!r} ({_element_counts(one)})" for one in found]
    kind = "the parameter" if all(one.type != "BatchStat" for one in found) else "the statistic"
    return f"{kind}{'s' * (len(said) > 1)} {_join(said, MOST_NAMED)}"


def _element_counts(one: ParameterFacts) -> str:
    counts = [(one.nan, "NaN"), (one.infinite, "Inf")]
    least = f"at least {MOST_EXACT}"
    said = [f"{n if n < MOST_EXACT else least} {what}" for n, what in counts if n > 0]
    return " and ".join(said) + (f" among {one.size} elements" if one.size else "")
