"""Rules for attention: logits that are too large, and heads that look at one key only.

Invariant: a few sharp heads are healthy, as those that look at the token before; a rule needs most
heads of the model, or a number beyond what the dtype holds. Heads whose queries have few keys (a
short sequence, one token) are not context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nnx_inspector.findings.finding import Finding, others_text, site_text
from nnx_inspector.findings.rule_context import FEW_PASSES, LAST_PASSES, RuleContext
from nnx_inspector.stats.choices.rows import choice_stat, is_expert

SHARP: Final = 0.05
"""Zhai et al. 2023, "Stabilizing transformer training by preventing attention entropy collapse"
(arXiv 2303.06296): attention whose entropy falls to nearly 0 goes with a loss that oscillates or
diverges. A share of the most that the entropy can be."""
MOST: Final = 0.75
"""Of all heads."""
HELD: Final = 50.0
"""A head that is sharp because of what it has learnt has logits of 10 to 30: exp(-30) is 1e-13."""
LARGE: Final = 1000.0
"""Dehghani et al. 2023, "Scaling vision transformers to 22 billion parameters" (arXiv 2302.05442),
section 3.1: training diverged with logits that grew until the softmax was nearly one-hot."""
LARGE_IF_LOW: Final = 128.0
"""From here on neighbouring numbers of bfloat16 differ by 1, which changes a probability by a
factor of 2.7; and by 1/8 in float16."""
SINK: Final = 0.6
"""Xiao et al. 2023, "Efficient streaming language models with attention sinks" (arXiv 2309.17453):
most layers of large language models give more than half of their attention to the first token."""
KEYS: Final = 8
"""Queries with fewer keys on average are not context."""

Rows = npt.NDArray[Any]


def attention_logits(context: RuleContext) -> Iterator[Finding]:
    """Logits so large that the softmax is one-hot, or that their dtype cannot tell apart."""
    found: list[tuple[float, str, int, float]] = []
    for site, passes in _attentions(context).items():
        dtype = context.site(_call_of(site)).leaving
        most = LARGE_IF_LOW if dtype in ("bfloat16", "float16") else LARGE
        largest = [np.nanmax(choice_stat(rows, "logit"), initial=-np.inf) for _, rows in passes]
        if min(largest) >= most:
            head = int(np.nanargmax(choice_stat(passes[-1][1], "logit")))
            found.append((float(largest[-1]), site, head, most))
    if not found:
        return
    logit, site, head, most = max(found)
    passes = _attentions(context)[site]
    yield Finding(
        rule="attention",
        site=_call_of(site),
        step=first_step(context, site, lambda r: np.nanmax(choice_stat(r, "logit")) >= most),
        severity="warning",
        evidence={"logit": logit, "head": head, "passes": len(passes), "others": len(found) - 1},
        what=(
            f"the logits of {site_text(_call_of(site))} reach {logit:.4g} (head {head}), in each "
            f"of the last {len(passes)} passes"
            + others_text([site_text(_call_of(one[1])) for one in found if one[1] != site])
        ),
        advice=(
            "the softmax is then one-hot and its gradient 0, and bfloat16 rounds such logits to "
            "whole numbers; usually queries and keys that grow without bound; normalise them (QK "
            "norm), or lower the learning rate"
        ),
    )


def attention_collapse(context: RuleContext) -> Iterator[Finding]:
    """Nearly all heads look at one key each, with large logits."""
    every, sharp, step, worst = 0, 0, 0, ("", np.inf, -np.inf)
    seen = 0
    for site, passes in _attentions(context).items():
        each = [_is_sharp(rows) for _, rows in passes]
        always = np.logical_and.reduce(each)
        every, sharp = every + len(always), sharp + int(always.sum())
        if always.any():
            step = max(step, first_step(context, site, lambda r: bool(_is_sharp(r).any())))
            last = passes[-1][1]
            mean = float(choice_stat(last, "evenness")[always].mean())
            largest = float(choice_stat(last, "logit")[always].max())
            worst, seen = min(worst, (site, mean, largest), key=lambda x: x[1]), len(passes)
    if every < 2 or sharp < MOST * every:
        return
    site, mean, logit = worst
    yield Finding(
        rule="attention",
        site=_call_of(site),
        step=step,
        severity="warning",
        evidence={"heads": every, "sharp": sharp, "evenness": mean, "logit": logit, "passes": seen},
        what=(
            f"{sharp} of the {every} heads look at one key each: at {site_text(_call_of(site))} "
            "the "
            f"entropy is {mean:.2%} of the most that it can be, with logits up to {logit:.4g}, in "
            f"each of the last {seen} passes"
        ),
        advice=(
            "usually the entropy collapse of a training that becomes unstable; lower the learning "
            "rate or warm it up longer, or normalise queries and keys (QK norm)"
        ),
    )


def attention_sink(context: RuleContext) -> Iterator[Finding]:
    """Most heads look at the first token; in a trained language model this is usual."""
    every, sinks, share, first, seen, step = 0, 0, 0.0, "", 0, 0
    for site, passes in _attentions(context).items():
        each = [choice_stat(rows, "first") for _, rows in passes]
        always = np.logical_and.reduce([(x >= SINK) for x in each])
        even = np.logical_and.reduce([~_is_sharp(rows) for _, rows in passes])
        every, sinks = every + len(always), sinks + int((always & even).sum())
        if always.any():
            mean = float(each[-1][always].mean())
            step = max(step, first_step(context, site, _has_sink))
            if mean > share:
                share, first, seen = mean, site, len(passes)
    if every < 2 or sinks < MOST * every:
        return
    yield Finding(
        rule="attention",
        site=_call_of(first),
        step=step,
        severity="info",
        evidence={"heads": every, "sinks": sinks, "first": share, "passes": seen},
        what=(
            f"{sinks} of the {every} heads give most of their attention to the first token: at "
            f"{site_text(_call_of(first))} {share:.0%} of it, in each of the last {seen} passes"
        ),
        advice=(
            "usual in a trained language model, whose heads rest there when they have nothing to "
            "add; early in training it usually means that the first token is a constant with a "
            "large key"
        ),
    )


def _call_of(site: str) -> str:
    """The site whose call computes an attention."""
    return site.rpartition("@")[0]


def _has_sink(rows: Rows) -> bool:
    return bool((choice_stat(rows, "first") >= SINK).any())


def _is_sharp(rows: Rows) -> npt.NDArray[np.bool_]:
    logits = choice_stat(rows, "logit")
    return (choice_stat(rows, "evenness") <= SHARP) & (logits >= HELD)


def _attentions(context: RuleContext) -> dict[str, list[tuple[int, Rows]]]:
    """Site of an attention -> the step and the rows of each of the last passes, if there are
    enough and queries have enough keys; of a stack, its layers.
    """
    return {
        site: passes
        for site, passes in last_rows(context).items()
        if not is_expert(site)
        and len(passes) >= FEW_PASSES
        and all(np.nanmax(choice_stat(r, "keys"), initial=0) >= KEYS for _, r in passes)
    }


def last_rows(context: RuleContext) -> dict[str, list[tuple[int, Rows]]]:
    """Site of a softmax that chooses -> the step and the rows of each of the last clean passes."""
    out: dict[str, list[tuple[int, Rows]]] = {}
    for one in context.clean:
        for site, rows in (one.figures.of_choices if one.figures else {}).items():
            out.setdefault(site, []).append((one.step, rows))
    layers = {f"{site.partition('[')[0]}@{site.rpartition('@')[2]}" for site in out if "[" in site}
    return {site: passes[-LAST_PASSES:] for site, passes in out.items() if site not in layers}


def first_step(context: RuleContext, site: str, holds: Any) -> int:
    """The first step from which on something holds in every pass."""
    step = -1
    for one in reversed(context.clean):
        rows = one.figures.of_choices.get(site) if one.figures else None
        if rows is None:
            continue
        if step >= 0 and not holds(rows):
            break
        step = one.step
    return step
