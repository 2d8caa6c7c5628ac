"""`diagnose`: runs all rules over a recording; worst findings first, consequences with their cause.

Invariant: no false alarms. A finding states what the recording holds, with the figures as
evidence, and calls a cause usual, not certain. Changes nothing, draws nothing, imports no jax.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from nnx_inspector.findings.backward import (
    exploding_gradient,
    no_gradient,
    vanishing_gradient,
)
from nnx_inspector.findings.causes import group_by_cause
from nnx_inspector.findings.choices.experts import dead_experts, uneven_experts
from nnx_inspector.findings.choices.heads import (
    attention_collapse,
    attention_logits,
    attention_sink,
)
from nnx_inspector.findings.finding import (
    FORWARD_RULES,
    RULES,
    SEVERITIES,
    Finding,
    Findings,
    Severity,
    lower_first,
)
from nnx_inspector.findings.forward import collapse, constant, dead_units, saturated_units
from nnx_inspector.findings.model import dtype, metrics, mode, sinusoids, uncalled, unused
from nnx_inspector.findings.nonfinite import nonfinite
from nnx_inspector.findings.padding import padding
from nnx_inspector.findings.precision.ranges import overflow, underflow
from nnx_inspector.findings.precision.updates import update_ratio
from nnx_inspector.findings.rule_context import LAST_PASSES, RuleContext
from nnx_inspector.findings.update.clipping import clipping
from nnx_inspector.findings.update.decay import weight_decay
from nnx_inspector.findings.update.discarded import discarded_updates
from nnx_inspector.findings.update.rate import zero_rate
from nnx_inspector.findings.update.state import skipped_steps
from nnx_inspector.recordings.recording import Recording

__all__ = ["Finding", "Findings", "Severity", "diagnose"]

_RULES: Final[tuple[Callable[[RuleContext], Iterator[Finding]], ...]] = (
    uncalled,
    nonfinite,
    metrics,
    overflow,
    unused,
    mode,
    dtype,
    dead_experts,
    uneven_experts,
    attention_logits,
    attention_collapse,
    attention_sink,
    dead_units,
    saturated_units,
    constant,
    collapse,
    exploding_gradient,
    vanishing_gradient,
    underflow,
    no_gradient,
    skipped_steps,
    zero_rate,
    discarded_updates,
    update_ratio,
    weight_decay,
    clipping,
    padding,
    sinusoids,
)

_STEP_RULES: Final = {
    "nonfinite": nonfinite,
    "overflow": overflow,
    "underflow": underflow,
    "constant": constant,
    "collapse": collapse,
    "exploding-gradient": exploding_gradient,
    "vanishing-gradient": vanishing_gradient,
    "padding": padding,
}
"""The rules that report what one step or a few showed, at any time. All others report what the last
passes show, or say themselves until when it lasted.
"""


def diagnose(recording: Recording) -> Findings:
    """List what the rules find wrong in a recording.

    Args:
        recording: the recording. It may be empty, and it may grow meanwhile: all rules see one
            snapshot.

    Returns:
        The findings, worst first, and among those of equal severity the earliest first; those that
        are `gone` come last. A finding that another one explains is listed in its `effects` and
        message instead. The list is empty if the rules find nothing wrong. `to_markdown()` writes
        it for an issue or a program that reads.

    Example:
        >>> from nnx_inspector.stats.summary import empty
        >>> recording = Recording()
        >>> recording.append(0, {"encoder": {"output": empty()}})
        >>> diagnose(recording)
        []
    """
    if not isinstance(recording, Recording):
        raise TypeError(
            f"diagnose takes a Recording, such as insp.recording or what nni.watch gives, got "
            f"{type(recording).__name__}."
        )
    context = RuleContext(recording.passes, recording.facts, recording.tallies())
    found = [_name_step(finding) for rule in _RULES for finding in rule(context)]
    aged = [_mark_gone(context, finding) for finding in group_by_cause(context, found)]
    return Findings(sorted(aged, key=lambda finding: _rank(context, finding)))


def _mark_gone(context: RuleContext, finding: Finding) -> Finding:
    """A finding that is over, with all that follows from it, as such."""
    ends = [_gone_since(context, one) for one in (finding, *finding.effects)]
    over = [end for end in ends if end is not None]
    return dataclasses.replace(finding, gone=max(over)) if len(over) == len(ends) else finding


def _gone_since(context: RuleContext, finding: Finding) -> int | None:
    """The first step of the passes, up to the newest, in which a finding's rule finds nothing.

    Only passes count that measured as much of the site as the one that showed it. There must be
    as many as a rule needs to find it again.
    """
    shown = next((one for one in context.clean if one.step == finding.step), None)
    rule = _STEP_RULES.get(finding.rule)
    if rule is None or shown is None:
        return None
    measured = {key for key in shown.keys if key[0] == finding.site}
    alike = [i for i, one in enumerate(context.clean) if measured <= set(one.keys)]

    def lasts(first: int) -> bool:
        rest = map(context.with_parameters, context.clean[alike[first] :])
        again = RuleContext(tuple(rest), context.facts, context.metrics)
        return next(rule(again), None) is not None

    first, end = 0, len(alike) - LAST_PASSES
    if end <= first or lasts(end):
        return None
    while end - first > 1:  # it lasts in the passes from `first` on, and not in those from `end` on
        middle = (first + end) // 2
        first, end = (middle, end) if lasts(middle) else (first, middle)
    return context.clean[alike[end]].step


def _name_step(finding: Finding) -> Finding:
    """A finding whose sentence names a step: the one at which it was first seen."""
    if re.search(r"\bstep -?\d", finding.what):
        return finding
    lasts = finding.rule not in ("constant", "collapse")  # these are judged in a few passes each
    when = f"From step {finding.step} on" if lasts else f"At step {finding.step}"
    return dataclasses.replace(finding, what=f"{when}, {lower_first(finding.what)}")


def _rank(context: RuleContext, finding: Finding) -> tuple[Any, ...]:
    severity = SEVERITIES.index(finding.severity)
    invalid = "nonfinite" in (finding.rule, *(one.rule for one in finding.effects))
    number = RULES.index(finding.rule)
    along = context.order_of(finding.site) if finding.rule in FORWARD_RULES else ()
    group = RULES.index(FORWARD_RULES[0]) if along else number
    return finding.gone is not None, severity, not invalid, finding.step, group, along, number
