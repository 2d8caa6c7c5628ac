"""Updates that a dtype of 16 bits rounds to nothing: the stored value stays what it was.

Invariant: where the step showed what it added, each share is that of all elements to which it added
something other than 0, so that frozen parameters, unused rows of an embedding and steps that only
accumulate gradients do not count. Otherwise it is that of the sampled elements that no pass has
seen changed, and the sentence says so.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Final

from nnx_inspector.findings.evidence import STILL
from nnx_inspector.findings.finding import Finding, others_text
from nnx_inspector.findings.rule_context import FEW_PASSES, RuleContext
from nnx_inspector.recordings.facts import ParameterFacts
from nnx_inspector.recordings.passes import Pass

NARROW: Final = ("bfloat16", "float16")
MOST: Final = 0.5
"""Where most of an update is lost, the rest of it points elsewhere than the optimizer meant."""
LARGER: Final = 0.75
"""Sampled elements that are not updated because their gradient is 0 (rows of an embedding, say) are
as large as the others; those whose updates are rounded off are larger, in nearly all pairs."""
GROWS: Final = 1.5
"""A copy of weights in float32, from which these are made anew, moves more elements with each step;
rounding alone stops the same ones for good."""


@dataclasses.dataclass(frozen=True)
class LostUpdates:
    """Parameters of 16 bits of whose updates most is lost.

    Attributes:
        passes: the measured steps in which it was.
        parts: of each parameter the share that is lost, in the median over these steps, or of the
            sampled elements over all of them; the clearest parameters come first.
        whole: the share of the elements of all parameters of 16 bits.
        seen: whether the steps showed what they added.
    """

    passes: tuple[Pass, ...]
    parts: tuple[tuple[ParameterFacts, float], ...]
    whole: float
    seen: bool


def lost_updates(context: RuleContext) -> LostUpdates | None:
    passes = [p for p in context.gradient_passes if p.kind == "watch" and p.figures is not None]
    held = [p for p in context.weights if p.dtype in NARROW]
    held.sort(key=lambda p: context.order_of(p.site))
    return _lost_in_steps(passes, held) or _lost_in_samples(passes, held)


def _lost_in_steps(passes: list[Pass], held: list[ParameterFacts]) -> LostUpdates | None:
    each = {p.path: [(one, one.update_lost(p.path)) for one in passes] for p in held}
    known = {path: [x for x in of if not math.isnan(x[1])] for path, of in each.items()}
    parts = {path: [part for _, part in of] for path, of in known.items()}

    def is_lost(p: ParameterFacts) -> bool:
        """In most steps and in the newest: one that warms up, or slows down at last, is healthy."""
        of = parts[p.path]
        return len(of) >= FEW_PASSES and min(map(statistics.median, (of, of[-FEW_PASSES:]))) >= MOST

    found = [p for p in held if is_lost(p)]
    if not found:
        return None
    lost = sum(p.size * statistics.median(parts[p.path]) for p in found)
    return LostUpdates(
        tuple(one for one, _ in known[found[0].path]),
        tuple((p, statistics.median(parts[p.path])) for p in found),
        lost / sum(p.size for p in held),
        seen=True,
    )


def _lost_in_samples(passes: list[Pass], held: list[ParameterFacts]) -> LostUpdates | None:
    def figure(one: Pass, path: str, name: str) -> float:
        return one.figures.parameter(path, name) if one.figures else math.nan

    held = [p for p in held if passes and figure(passes[-1], p.path, "differentiated") == 1]
    held = [p for p in held if all(math.isnan(figure(one, p.path, "lost")) for one in passes)]
    followed = [
        all(math.isnan(figure(one, p.path, "stuck")) for p in held) for one in passes
    ]  # whether each pass begins a loop
    passes = passes[max((i for i, begins in enumerate(followed) if begins), default=0) :]
    if len(passes) <= STILL:
        return None
    parts = {p.path: figure(passes[-1], p.path, "stuck") for p in held}
    middle = passes[len(passes) // 2]

    def is_rounded(p: ParameterFacts) -> bool:
        part, before = parts[p.path], figure(middle, p.path, "stuck")
        stopped = part >= MOST and 1 - part <= GROWS * (1 - before)
        return stopped and figure(passes[-1], p.path, "larger") >= LARGER

    if not any(map(is_rounded, held)):
        return None
    found = [*filter(is_rounded, held), *(p for p in held if parts[p.path] == 1)]
    whole = sum(p.size * parts[p.path] for p in found) / sum(p.size for p in held)
    return LostUpdates(tuple(passes), tuple((p, parts[p.path]) for p in found), whole, seen=False)


def rounding_finding(found: LostUpdates) -> Finding:
    """Of the rule `update-ratio`: updates that a dtype of 16 bits rounds to nothing."""
    (one, part), *others = found.parts
    first, last = found.passes[0], found.passes[-1]
    ratio = last.update_ratio(one.path)
    steps = f"From step {first.step} to step {last.step}"
    what = (
        f"{steps}, in the median over {len(found.passes)} measured steps, {part:.0%} of the "
        f"elements of {one.path!r} ({one.dtype}) to which something was added stayed what they were"
        if found.seen
        else f"{steps}, {part:.0%} of the sampled elements of {one.path!r} ({one.dtype}) did not "
        f"change"
    )
    why = "updates are too small for the dtype" if found.seen else (
        "they are larger than those that did, so updates are usually too small for the dtype"
    )  # fmt: skip
    return Finding(
        rule="update-ratio",
        site=one.site,
        step=first.step,
        severity="warning" if found.seen or found.whole >= MOST else "info",
        evidence={
            "ratio": 0.0 if math.isnan(ratio) else ratio,
            "limit": 1.0,
            "late": 0.0,
            "lost": part,
            "lost_of_all": found.whole,
            "parameters": len(found.parts),
        },
        what=what + others_text([f"{part:.0%} of {p.path!r}" for p, part in others], "parameter"),
        advice=(
            f"{why} {one.dtype} and round to nothing; keep the parameters in float32 "
            f"(param_dtype=jnp.float32) and compute in {one.dtype} (dtype=jnp.{one.dtype}), let "
            f"the optimizer keep a copy in float32, or round stochastically"
        ),
    )
