"""What a recorded state of an optimizer says: what spoiled parameters, and which steps it skipped.

Invariant: a clause about a state is about that of the pass that shows the fault. Without a recorded
state nothing is said.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from nnx_inspector.findings.finding import Finding
from nnx_inspector.findings.rule_context import RuleContext
from nnx_inspector.recordings.facts import ParameterFacts
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.recordings.tree_rows import STATE
from nnx_inspector.stats.summary import Summary

ROOTED: Final = ("nu", "v", "v_row", "v_col", "nu_max", "sum_of_squares")
"""The states of optax that an update divides by the square root of."""
SOME: Final = 0.1
"""Dynamic loss scaling skips a step in a few hundred or thousand (Micikevicius et al. 2018, "Mixed
precision training"); where a tenth is skipped, its scale does not settle."""


def states_in(context: RuleContext, name: str) -> Iterator[tuple[str, list[tuple[Pass, Summary]]]]:
    """The states with this name, each with the passes that have it, oldest first."""
    found: dict[str, list[tuple[Pass, Summary]]] = {}
    known: dict[int, list[str]] = {}  # by the layouts, which passes share
    for one in map(context.with_parameters, context.passes):
        if id(one.layout) not in known:
            keys = [key for key, quantity in one.keys if quantity == STATE]
            known[id(one.layout)] = [key for key in keys if key.rpartition("/")[2] == name]
        for key in known[id(one.layout)]:
            summary = one.summary(key, STATE)
            if summary is not None:
                found.setdefault(key, []).append((one, summary))
    yield from found.items()


def state_text(states: Mapping[str, Summary], found: Sequence[ParameterFacts]) -> str:
    """What the state holds that may have spoiled these parameters, as a clause, or ""."""
    bad = {key: one for key, one in states.items() if one.finite < one.size}
    if bad:
        key, one = next(iter(bad.items()))
        kinds = (("NaN", one.nan), ("Inf", one.posinf + one.neginf))
        counts = " and ".join(f"{count} {kind}" for kind, count in kinds if count)
        more = f" and {len(bad) - 1} more of its arrays" * (len(bad) > 1)
        are = "were" if more else "was"
        return f"; {key!r} ({counts} among {one.size} elements){more} {are} not finite either"
    for key, one in states.items():
        of = next((p for p in found if key.endswith(f"/{p.path}")), None)
        if of is None or not _is_rooted(key.removesuffix(f"/{of.path}")) or not one.size:
            continue
        if one.min < 0:
            return f"; {key!r} was as low as {one.min:.3g}, and the root of that is NaN"
        if one.zeros:
            return (
                f"; {key!r} was 0 in {one.zeros} of {one.size} elements, and the update divides by "
                f"its root: give the optimizer an eps that is not 0 in {of.dtype or 'its dtype'}"
            )
    return ""


def _is_rooted(name: str) -> bool:
    return name.rpartition("/")[2] in ROOTED


def skipped_steps(context: RuleContext) -> Iterator[Finding]:
    """Steps whose update `optax.apply_if_finite` left out."""
    for key, each in states_in(context, "total_notfinite"):
        (first, before), (last, now) = each[0], each[-1]
        skipped, steps = int(now.max - before.max), last.step - first.step
        if skipped <= 0 or steps <= 0:
            continue
        grew = [(a[0], b[0]) for a, b in itertools.pairwise(each) if b[1].max > a[1].max]
        row = last.states.get(f"{key.rpartition('/')[0]}/notfinite_count")
        running = 0 if row is None else int(row.max)
        over = "" if grew[-1][1] is last else f", none of them since step {grew[-1][1].step}"
        ending = f"; the last {running} in a row" if running > 1 else over
        yield Finding(
            rule="skipped-steps",
            site="",
            step=grew[0][0].step,
            severity="warning" if skipped >= SOME * steps or running > 1 else "info",
            evidence={"skipped": skipped, "steps": steps, "in_a_row": running},
            what=(
                f"From step {first.step} to step {last.step - 1}, the optimizer skipped {skipped} "
                f"of {steps} steps, because their gradients were not finite ({key!r})"
                f"{ending}"
            ),
            advice=(
                "usually gradients overflow, as in float16 with a loss scale that is too high; "
                "lower it, and measure with every=1 to see where the first Inf arises; after "
                "max_consecutive_errors skipped steps in a row apply_if_finite lets the NaN through"
            ),
        )
