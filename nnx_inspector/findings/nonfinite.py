"""The rule `nonfinite`: NaN and Inf in the values of passes and in parameters.

Of the values of a pass the first in its order is reported. Parameters are counted when a pass
begins, so what is not finite then was made by the update before. Invariant: an Inf never hides the
first NaN, clean and perturbed passes are judged separately, and a cause is named only if everything
before it that was measured was finite.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from nnx_inspector.findings.finding import (
    Finding,
    Severity,
    counts_text,
    quantity_text,
    was_or_were,
)
from nnx_inspector.findings.precision.ranges import beyond_float8
from nnx_inspector.findings.rule_context import RuleContext
from nnx_inspector.findings.update.state import state_text
from nnx_inspector.recordings.facts import UNKNOWN, ParameterFacts
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.recordings.tree_rows import layer_key, layer_of, leaf_of
from nnx_inspector.stats.bins import NAN_BIN, NEGINF_BIN, POSINF_BIN
from nnx_inspector.stats.samples.parameter_stats import NONFINITE_STATS, parameter_stat
from nnx_inspector.stats.summary import Summary

_KINDS: Final = {
    "nan": ("NaN", NAN_BIN),
    "posinf": ("+Inf", POSINF_BIN),
    "neginf": ("-Inf", NEGINF_BIN),
}

USUALLY: Final = "usually "
"""How the advice begins if what made the NaN is not known."""
BUT: Final = ". But "
"""What follows says that the NaN reached nothing."""
LEFT_OUT: Final = (
    "so it was left out on the way, as by a jnp.where, a mask or an index, which is harmless while "
    "the gradients stay finite"
)


def nonfinite(context: RuleContext) -> Iterator[Finding]:
    """What is not finite in the values and parameters of a run.

    The first NaN, and an Inf before it, or the first pass that began with parameters that are not
    finite; clean and perturbed passes are judged separately. An Inf may be intended (a mask is
    often -Inf), so it never hides the first NaN, and neither does a NaN that reaches nothing.
    """
    some = False
    for perturbed in (False, True):
        same = [item for item in context.passes if item.perturbed == perturbed]
        broken = _first_nonfinite_parameters(context, same)
        reaching, discarded = _first_nan(context, same)
        if discarded is not None:
            yield _finding(context, discarded, *_origin(context, discarded, "nan"), discarded=True)
        end = math.inf if reaching is None else reaching.number
        if broken is not None and broken[0].number <= end:
            some, end = True, broken[0].number
            yield from _parameter_findings(context, *broken, reaching)
        elif reaching is not None:
            some = True
            yield _finding(context, reaching, *_origin(context, reaching, "nan"))
        graded = _first_graded(context, same)
        if graded is not None and graded.number < end:
            some = True
            yield _gradients_finding(context, graded)
        given: set[tuple[int, str, str]] = set()
        for kind in ("posinf", "neginf"):
            first = next((p for p in same if p.number < end and kind in p.nonfinite), None)
            if first is not None:
                site, quantity, summary = _origin(context, first, kind)
                if (first.number, site, quantity) not in given:
                    given.add((first.number, site, quantity))
                    yield _finding(context, first, site, quantity, summary)
    if not some:
        yield from _after_last_pass(context)


# -------------------------------------------------------------------- values


def _first_nan(context: RuleContext, same: Sequence[Pass]) -> tuple[Pass | None, Pass | None]:
    """The first pass with a NaN that reaches its outputs or gradients, and the first in which one
    reaches neither.
    """
    discarded: Pass | None = None
    for item in same:
        if "nan" in item.nonfinite:
            if not _is_discarded(item):
                return item, discarded
            discarded = discarded or item
    return None, discarded


def _is_discarded(item: Pass) -> bool:
    """Whether the outputs of the outermost calls of a pass have no NaN, nor has any gradient."""
    outputs = [s for s, q in item.keys if q == "output" and layer_of(s) is None]
    if any(leaf_of(s)[0] == "" for s in outputs):
        outermost = [s for s in outputs if s.startswith(":") or not leaf_of(s)[0]]
    else:
        outermost = [s for s in outputs if not any(_within(s, other) for other in outputs)]
    at = [(site, "output") for site in outermost]
    if item.news:  # the first pass with a NaN in a gradient is one of these
        at += [key for key in item.keys if key[1] == "gradient"]
    found = (item.summary(site, quantity) for site, quantity in at)  # type: ignore[arg-type]
    if not outermost or any(one is not None and one.bins[NAN_BIN] for one in found):
        return False
    if item.figures is None:
        return True
    rows = item.figures.parameter_rows
    graded, norms = parameter_stat(rows, "graded"), parameter_stat(rows, "gradient")
    return not (np.isnan(norms) & ~np.isnan(graded)).any()


def _origin(context: RuleContext, item: Pass, kind: str) -> tuple[str, str, Summary]:
    """The site, quantity and summary where a kind of value arose in a pass that has it.

    Values arise in forward order: sites in their order, a site's input before its output, and a
    module's output after those of the modules in it. Gradients follow, in reverse order.
    """
    bad = [
        (s, q, summary)
        for s, q, summary in sorted(item.items(), key=lambda one: context.order_of(one[0]))
        if layer_of(s) is None and summary.bins[_KINDS[kind][1]]
    ]
    forward = [b for b in bad if b[1] != "gradient"]
    if not forward:
        outermost = [b for b in bad if not any(_within(b[0], other) for other, _, _ in bad)]
        return outermost[-1]
    site, quantity, summary = forward[0]
    called, _ = leaf_of(site)
    for other in forward:  # any of the arrays that it receives
        if other[1] == "input" and leaf_of(other[0])[0] == called:
            return other
    while inner := [b for b in forward if _within(b[0], site)]:
        site, quantity, summary = inner[0]
    return site, quantity, summary


def finite_sites(item: Pass) -> frozenset[str]:
    """The sites whose outputs were finite in a pass: all arrays, in all calls."""
    outputs = [(leaf_of(s)[0], summary) for s, q, summary in item.items() if q == "output"]
    bad = [number for _, number in _KINDS.values()]
    others = {site for site, summary in outputs if summary.bins[bad].any()}
    return frozenset(site for site, _ in outputs if site not in others)


def _within(site: str, other: str) -> bool:
    """Whether a site's module lies inside another site's module."""
    path, outer = (re.split(r"(?<!\\):", leaf_of(key)[0])[0] for key in (site, other))
    return path != outer and (not outer or path.startswith((f"{outer}/", f"{outer}@")))


def _finding(
    context: RuleContext,
    item: Pass,
    site: str,
    quantity: str,
    summary: Summary,
    *,
    discarded: bool = False,
) -> Finding:
    counts, size, seen = _counts(summary)
    severity, meaning = _severity_and_advice(context, item, site, quantity, counts)
    if discarded:
        graded = any(q == "gradient" for _, q in item.keys)
        ends = "and all gradients were free of NaN"
        ends = ends if graded else "was free of NaN (no gradient was measured)"
        severity, meaning = "info", f"{meaning}{BUT}what the model returned {ends}, {LEFT_OUT}"
    ids, where = _ids_out_of_range(context, item, site, quantity), _place_text(item, site, quantity)
    during = ", while a perturbation was on" if item.perturbed else ""
    before = "" if quantity == "gradient" or ids else _input_text(context, item, site, quantity)
    return Finding(
        rule="nonfinite",
        site=site,
        step=item.step,
        severity=severity,
        evidence={
            "pass": item.number,
            **({"size": size} if size else {}),
            **counts,
            **({"perturbed": 1} if item.perturbed else {}),
            **({"backward": 1} if quantity == "gradient" else {}),
            **(ids or {}),
        },
        what=f"At step {item.step}{during}, {where} first held {seen}{before}",
        advice=meaning,
    )


def _counts(summary: Summary) -> tuple[dict[str, int], int, str]:
    """The counts by kind, the number of values (0 if unknown), and both in words."""
    counts = {kind: int(summary.bins[number]) for kind, (_, number) in _KINDS.items()}
    each = [f"{counts[kind]} {name}" for kind, (name, _) in _KINDS.items() if counts[kind]]
    seen = " and ".join(each)
    size = 0 if summary.saturated else summary.size
    if summary.saturated:  # counts that stopped in jit are not evidence; that there are any is
        counts = {kind: min(count, 2**32 - 1) for kind, count in counts.items()}
        seen = " and ".join(name for kind, (name, _) in _KINDS.items() if counts[kind])
    among = f" among {size} values" if size else " among more values than can be counted"
    return counts, size, seen + among


def _place_text(item: Pass, site: str, quantity: str) -> str:
    return quantity_text(site, quantity) + _layers_text(item, site, quantity)


def _input_text(context: RuleContext, item: Pass, site: str, quantity: str) -> str:
    """The input, or the last output before it in the order of the pass, in words: the range if it
    was finite, or how much of it was infinite.
    """
    summary = item.summary(leaf_of(site)[0], "input") if quantity == "output" else None
    what = "its input"
    if summary is None:
        order = context.order_of(site)
        earlier = [
            s
            for s, q in item.keys
            if q == "output" and layer_of(s) is None and context.order_of(s) < order
            and not _within(s, site) and not _within(site, s)
        ]  # fmt: skip
        last = max(earlier, key=context.order_of, default=None)
        summary = None if last is None else item.summary(last, "output")
        what = f"{quantity_text(last or '', 'output')} before it"
    if summary is None or summary.saturated or not summary.size or summary.nan:
        return ""
    if summary.finite != summary.size:
        return f" ({what} held {_counts(summary)[2]})"
    exact = summary.points.dtype.kind in "iu"  # ids, for example
    low, high = (str(int(x)) if exact else f"{x:.4g}" for x in (summary.min, summary.max))
    return f" ({what} was finite, from {low} to {high})"


def _layers_text(item: Pass, site: str, quantity: str) -> str:
    """The layers of a stack that have such values, if they were measured separately."""
    found = [layer_of(s) for s, q in item.keys if q == quantity]
    layers = [at[1] for at in found if at is not None and at[0] == site]
    bad = [
        layer
        for layer in layers
        if (s := item.summary(layer_key(site, layer), quantity)) is not None  # type: ignore[arg-type]
        and any(s.bins[number] for _, number in _KINDS.values())
    ]
    named = ", ".join(map(str, bad[:4])) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
    return f" (in {len(bad)} of {len(layers)} layers: {named})" if bad else ""


def _severity_and_advice(
    context: RuleContext, item: Pass, site: str, quantity: str, counts: Mapping[str, int]
) -> tuple[Severity, str]:
    cast = beyond_float8(context.site(site).leaving, counts) if quantity == "output" else ""
    if cast:
        return "error" if counts["nan"] else "warning", cast
    if counts["nan"] and quantity == "gradient":
        return "error", (
            "all forward values were free of NaN, so usually a derivative after this site is "
            "infinite (sqrt or norm at 0, log of 0), or the loss overflows; a jnp.where around the "
            "function does not help: the argument of the function must be safe too"
        )
    if counts["nan"]:
        return "error", _why_nan(context, item, site, quantity)
    if counts["posinf"] or quantity == "gradient":
        return "warning", (
            "usually an overflow (exp, a division by 0, float16), and NaN comes next unless it is "
            "masked"
        )
    return "info", "usually a mask, which is harmless, but log of 0 gives the same value"


def _why_nan(context: RuleContext, item: Pass, site: str, quantity: str) -> str:
    ids = _ids_out_of_range(context, item, site, quantity)
    if ids is not None:
        count = ids["embeddings"]
        range_of = f"for the ids 0 to {count - 1} (-{count} to -1 count from the end)"
        had = "and received another one"
        if "lowest" in ids:
            had = f"and received ids from {ids['lowest']} to {ids['highest']}"
        return (
            f"it has {count} embeddings, {range_of}, {had}, and jnp.take gives NaN for an id out "
            f"of range; correct the ids, or give it more embeddings"
        )
    made = "0/0, Inf - Inf, or the log or root of a negative number"
    weights = "" if context.all_finite(item) else ", or weights that are not finite"
    if context.order_of(site) == min((context.order_of(s) for s, _ in item.keys), default=()):
        return f"{USUALLY}NaN in the data, {made}{weights}"
    return f"{USUALLY}{made}{weights}"


def _ids_out_of_range(
    context: RuleContext, item: Pass, site: str, quantity: str
) -> dict[str, int] | None:
    """The ids that an embedding received, if one out of range is what made its NaN."""
    count = context.site(site).embeddings
    if count == UNKNOWN or quantity != "output" or item.figures is None:
        return None
    held = [p.path for p in context.parameters_of(site)]
    if not held or any(item.figures.parameter(path, "nan") != 0 for path in held):
        return None  # the table itself has a NaN, or it is not known
    received = item.summary(site, "input")
    if received is None:
        return {"embeddings": count}
    low, high = int(received.min), int(received.max)
    if -count <= low and high < count:
        return None
    return {"embeddings": count, "lowest": low, "highest": high}


# ---------------------------------------------------------------- parameters


def _first_graded(context: RuleContext, same: Sequence[Pass]) -> Pass | None:
    """The first pass in which only gradients of parameters are not finite."""
    every = (context.with_parameters(item) for item in same if not item.nonfinite)
    return next((one for one in every if any(q != "parameter" for q, _ in one.found)), None)


def _gradients_finding(context: RuleContext, item: Pass) -> Finding:
    found: list[ParameterFacts] = []
    for path, quantity, one in item.items():
        if quantity == "parameter_gradient" and one.finite < one.size and not layer_of(path):
            counts = {"nan": one.nan, "infinite": one.posinf + one.neginf, "size": one.size}
            found.append(dataclasses.replace(context.parameter(path), **counts))
    found.sort(key=lambda one: context.order_of(one.site))
    some = any(one.nan for one in found)
    during = ", while a perturbation was on" if item.perturbed else ""
    return Finding(
        rule="nonfinite",
        site=found[0].site,
        step=item.step,
        severity="error" if some else "warning",
        evidence={
            "pass": item.number,
            "parameters": len(found),
            "backward": 1,
            **({"perturbed": 1} if item.perturbed else {}),
        },
        what=(
            f"At step {item.step}{during}, the gradient of {counts_text(found)} was not finite, "
            "while all that was measured at sites was"
        ),
        advice=(
            "usually a derivative by the parameter itself is infinite (sqrt or norm at 0, log of "
            "0); a jnp.where around the function does not help: its argument must be safe too"
            if some
            else "usually its sum over the examples overflows (float16), and NaN comes next unless "
            "the step is left out, as loss scaling does"
        ),
    )


def _first_nonfinite_parameters(
    context: RuleContext, same: Sequence[Pass]
) -> tuple[Pass, list[ParameterFacts]] | None:
    """The first pass that began with a NaN in a parameter, or with an Inf that an update has made,
    and the facts of such parameters, with how many of their elements are NaN and infinite.
    """
    masks: set[str] = set()
    first = True
    for item in same:
        figures = item.figures
        if figures is None or not figures.parameters:
            continue
        nan, infinite = (parameter_stat(figures.parameter_rows, x) for x in NONFINITE_STATS)
        found: list[ParameterFacts] = []
        for i in np.flatnonzero((nan > 0) | (infinite > 0)).tolist():
            path = figures.parameters[i]
            masks |= {path} if first and infinite[i] else set()
            if nan[i] > 0 or path not in masks:
                counts = {"nan": int(nan[i]), "infinite": int(infinite[i])}
                found.append(dataclasses.replace(context.parameter(path), **counts))
        if found:
            return item, found
        first = False
    return None


def _before(
    context: RuleContext, found: Sequence[ParameterFacts], item: Pass | None
) -> Pass | None:
    """The last pass (before one) that began with these parameters, all of them without NaN."""
    for one in reversed(context.passes):
        if one.figures is None or (item is not None and one.number >= item.number):
            continue
        if all(one.figures.parameter(p.path, "nan") == 0 for p in found):
            return context.with_parameters(one)
    return None


def _parameter_findings(
    context: RuleContext, item: Pass, found: Sequence[ParameterFacts], reaching: Pass | None
) -> Iterator[Finding]:
    """The finding on parameters that are not finite, and on a NaN of the same pass elsewhere."""
    site, shown = found[0].site, ""
    if reaching is item:
        at, quantity, summary = _origin(context, item, "nan")
        read = {p.path for p in context.arrays_read_in(at)}
        if quantity == "input" or read.isdisjoint(p.path for p in found):
            yield _finding(context, item, at, quantity, summary)
        else:
            site = at
            shown = f", and {_place_text(item, at, quantity)} held {_counts(summary)[2]}"
    during = ", while a perturbation was on" if item.perturbed else ""
    before = _before(context, found, item)
    yield Finding(
        rule="nonfinite",
        site=site,
        step=item.step,
        severity="error" if shown or before is not None else "warning",
        evidence={
            "pass": item.number,
            "parameters": len(found),
            **({"perturbed": 1} if item.perturbed else {}),
        },
        what=(
            f"{'At the beginning' if item.kind == 'watch' else 'In a pass'} of step {item.step}"
            f"{during}, {counts_text(found)} {was_or_were(found)} not finite{shown}"
        ),
        advice=_made(found, before, context.with_parameters(item)),
    )


def _made(found: Sequence[ParameterFacts], before: Pass | None, item: Pass | None) -> str:
    """What made parameters that are not finite. `item`: None after the last step."""
    if before is None or before.figures is None:
        return (
            "no earlier pass had other values, so it was initialised, loaded or updated so before; "
            "jnp.isfinite of each parameter where the model is made shows which"
        )
    first = before.step
    last = max(one.ended for one in found) if item is None else item.step - 1
    whole = all(before.figures.parameter(p.path, "infinite") == 0 for p in found)
    began = "at the beginning" if before.kind == "watch" else "in a pass"
    began += f" of step {first} {'they' if len(found) > 1 else 'it'} {was_or_were(found)} "
    began += "finite" if whole else "free of NaN"
    if before.perturbed:
        began += " (a perturbation was on)"
    if before.kind != "watch" or (item is not None and item.kind != "watch"):
        return f"{began}, and what has changed the model since was not measured"
    if last > first:
        return (
            f"{began}, and one of the steps {first} to {last} made it, but no step between was "
            f"measured; with every=1 a run shows which one, and whether an activation or a "
            f"gradient had a NaN before the parameters"
        )
    spoiled = {kind for quantity, kind in before.found if quantity != "parameter"}
    if spoiled & {"nan", "posinf"}:
        return f"{began}, but values within that step were not, and its update passed them on"
    graded = any(quantity == "gradient" for _, quantity in before.keys)
    free = "free of NaN and +Inf" if spoiled else "finite"
    clean = f"{began}, and every activation {'and gradient ' * graded}measured in it was {free}"
    if any(one.type == "BatchStat" for one in found):
        return f"{clean}, so the statistic itself overflowed, or was divided by 0"
    if not graded:
        return f"{clean}, so its gradients (none was measured) or its update made it"
    made = f"{clean}, so the update of step {first} made it"
    if item is not None and (state := state_text(item.states, found)):
        return made + state
    return (
        f"{made}: usually the optimizer (a division by 0, as with eps=0; an overflow of its state, "
        f"as of squares in float16; a schedule that returns NaN; watch(..., optimizer=) shows it), "
        f"or a term of the loss that reads the parameters themselves, such as their norm at 0; if "
        f"the gradients that optimizer.update received were finite, the optimizer did"
    )


def _after_last_pass(context: RuleContext) -> Iterator[Finding]:
    """Parameters that the last update of a loop has left not finite: no pass began with them."""
    last = next((p for p in reversed(context.passes) if p.figures is not None), None)
    figures = None if last is None else last.figures
    found = [
        one
        for one in context.facts.parameters
        if one.nan > 0
        or (one.infinite > 0 and figures and figures.parameter(one.path, "infinite") == 0)
    ]
    step = max((one.ended for one in found), default=UNKNOWN)
    found = [one for one in found if one.ended == step]
    if found:
        yield Finding(
            rule="nonfinite",
            site=found[0].site,
            step=step,
            severity="error",
            evidence={"pass": last.number if last else -1, "parameters": len(found), "ended": 1},
            what=(
                f"After step {step}, the last of its loop, {counts_text(found)} "
                f"{was_or_were(found)} not finite"
            ),
            advice=_made(found, _before(context, found, None), None),
        )
