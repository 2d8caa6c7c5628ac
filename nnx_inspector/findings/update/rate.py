"""Updates that have become 0, or always were, although gradients are not: a learning rate of 0.

Invariant: what is frozen, not updated in each step, or too small for its dtype is no rate of 0. So
the parameters must have moved before, or the optimizer's state must show that it had gradients of
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from nnx_inspector.findings.evidence import STILL
from nnx_inspector.findings.finding import Finding
from nnx_inspector.findings.rule_context import RuleContext
from nnx_inspector.findings.update.state import states_in
from nnx_inspector.recordings.facts import ParameterFacts, PassStats
from nnx_inspector.recordings.passes import Pass

NOTHING: Final = 1e-7
"""Below this part of a parameter's size an update is the rounding of one that is 0: XLA may compute
the end of a schedule, a difference, to 1e-9 of its beginning."""
SEEN: Final = 1e-6
"""An update of this part of a parameter's size is not lost to the rounding of float32, 6e-8."""
USUAL: Final = 1e-3
"""The gradient, relative to the parameter, from which an update at a usual rate (1e-3) is seen."""
RATES: Final = ("learning_rate", "step_size")
"""What `optax.inject_hyperparams` calls a learning rate in its state."""


def zero_rate(context: RuleContext) -> Iterator[Finding]:
    """From some step on, no parameter moves although its gradient is not 0.

    What moves by less than rounding does not move.
    """
    passes = [p for p in context.passes if p.kind == "watch" and not p.perturbed]
    each = [(p, moved) for p in passes if (moved := _moved(context, p)) is not None]
    at = next((i for i in range(len(each), 0, -1) if each[i - 1][1] > NOTHING), 0)
    still = [p for p, _ in each[at:]]
    if len(still) < STILL or not all(_is_unchanged(context, p) for p in still[1:]):
        return
    longest, run = 0, 0
    for _, moved in each[:at]:
        run = 0 if moved > NOTHING else run + 1
        longest = max(longest, run)
    rate = _rate(context, still)
    if rate is not None:
        known = f"; {rate[0]!r} was {'at most ' * (rate[1] > 0)}{rate[1]:.2g} then"
    elif at and len(still) > 2 * longest and _would_move(context, [p for p, _ in each[:at]], still):
        known = ""
    elif not at and (key := _state_with_gradients(context, still)):
        known = f"; the optimizer had their gradients, as {key!r} shows"
    else:
        return
    count = len(_with_gradient(context, still[-1]))
    what = f"the {count} parameters" if count > 1 else "the parameter"
    most = max(moved for _, moved in each[at:])
    moves = f"moved by at most {most:.2g} times their size" if most else "did not move"
    began = "From step {} on" if at else "From step {}, the first measured, on"
    yield Finding(
        rule="update-ratio",
        site="",
        step=still[0].step,
        severity="warning",
        evidence={"ratio": most, "limit": NOTHING, "passes": len(still), "parameters": count},
        what=(
            f"{began.format(still[0].step)}, {what} with a gradient {moves} in each of "
            f"{len(still)} measured steps{known}"
        ),
        advice=(
            "the learning rate is 0"
            if rate is not None
            else "the learning rate is usually 0, as at the end of a schedule"
        )
        + "; check the schedule and the number of steps that it was made for (it counts the "
        "optimizer's updates), or end the training here",
    )


def _with_gradient(context: RuleContext, one: Pass) -> list[ParameterFacts]:
    figures = one.figures
    if figures is None:
        return []
    found = context.differentiated_parameters(figures)
    return [p for p in found if p.dtype == "float32" and figures.parameter(p.path, "gradient") > 0]


def _moved(context: RuleContext, one: Pass) -> float | None:
    """How far a step moves the parameter that it moves most, relative to its size; None if no
    update or no gradient was seen.
    """
    held = _with_gradient(context, one)
    if one.figures is None or not held:
        return None
    every = one.figures.of_parameters("update")
    known = [every[p.path] for p in held if not math.isnan(every.get(p.path, math.nan))]
    most = max((x for x in every.values() if not math.isnan(x)), default=0.0)
    return most if len(known) == len(held) else None


def _is_unchanged(context: RuleContext, one: Pass) -> bool:
    """Whether no parameter has changed since the pass before, but for rounding."""
    figures = one.figures
    return figures is not None and all(
        figures.parameter(p.path, "same") == 1 or figures.parameter(p.path, "change") <= SEEN
        for p in _with_gradient(context, one)
    )


def _rate(context: RuleContext, still: Sequence[Pass]) -> tuple[str, float] | None:
    """The state that says that the rate is 0, but for rounding, in all of these passes but the
    first, which began before its own step set it; and the largest rate in them.
    """
    numbers = {p.number for p in still[1:]}
    for name in RATES:
        for key, each in states_in(context, name):
            values = [abs(one.max) for p, one in each if p.number in numbers]
            most = max((abs(one.max) for _, one in each), default=0.0)
            if len(values) == len(numbers) and max(values) <= NOTHING * most:
                return key, max(values)
    return None


def _size(figures: PassStats, one: ParameterFacts) -> float:
    return figures.parameter(one.path, "norm") * math.sqrt(one.size)


def _would_move(context: RuleContext, before: Sequence[Pass], still: Sequence[Pass]) -> bool:
    """Whether the gradients would move a parameter as far as they did before, not too little to be
    seen.
    """
    least: dict[str, float] = {}
    for one in before:
        for p in _with_gradient(context, one):
            assert one.figures is not None
            moved = one.figures.parameter(p.path, "update") * _size(one.figures, p)
            by = moved / one.figures.parameter(p.path, "gradient")
            if by > 0 and math.isfinite(by):
                least[p.path] = min(by, least.get(p.path, math.inf))
    return all(
        any(
            least.get(p.path, 0.0) * figures.parameter(p.path, "gradient")
            >= SEEN * _size(figures, p)
            > 0
            for p in _with_gradient(context, one)
        )
        for one in still
        if (figures := one.figures) is not None
    )


def _state_with_gradients(context: RuleContext, still: Sequence[Pass]) -> str | None:
    """A state that holds something of the gradients of parameters, after an update was made."""
    for _, each in states_in(context, "mini_step"):  # of MultiSteps
        made = each[-1][0].states
        steps = [one.max for key, one in made.items() if key.endswith("/gradient_step")]
        if not any(steps):
            return None
    last, figures = context.with_parameters(still[-1]).states, still[-1].figures
    if figures is None:
        return None
    for p in _with_gradient(context, still[-1]):
        large = figures.parameter(p.path, "gradient") >= USUAL * _size(figures, p) > 0
        for key, one in last.items():
            if large and key.endswith(f"/{p.path}") and "/acc_grads/" not in key and one.norm > 0:
                return key
    return None
