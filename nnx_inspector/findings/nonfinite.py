"""The rule `nonfinite`: the first NaN or Inf in the order of the pass, and what led to it.

Invariant: an Inf never hides the first NaN, and clean and perturbed passes are judged separately.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

from nnx_inspector.findings.finding import Finding, Severity, quantity_of
from nnx_inspector.findings.judged import Judged
from nnx_inspector.recordings.layers import layer_key, layer_of, leaf_of
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.stats.bins import NAN_BIN, NEGINF_BIN, POSINF_BIN
from nnx_inspector.stats.summary import Summary

_KINDS: Final = {
    "nan": ("NaN", NAN_BIN),
    "posinf": ("+Inf", POSINF_BIN),
    "neginf": ("-Inf", NEGINF_BIN),
}

OF_PARAMETER: Final = "its parameter"
"""How the advice begins if the NaN was there before the pass."""


def nonfinite(judged: Judged) -> Iterator[Finding]:
    """The first NaN, and an Inf before it; clean and perturbed passes are judged separately.

    An Inf may be intended (a mask is often -Inf), so it never hides the first NaN.
    """
    passes = judged.passes
    found: dict[tuple[int, str, str], Finding] = {}
    for perturbed in (False, True):
        same = [item for item in passes if item.perturbed == perturbed]
        end = len(passes) and passes[-1].number + 1
        for kind in _KINDS:  # NaN first: an Inf in the same pass or later adds nothing
            first = next((p for p in same if p.number < end and kind in p.nonfinite), None)
            if first is not None:
                site, quantity, summary = _origin(judged, first, kind)
                finding = _finding(judged, first, site, quantity, summary)
                found.setdefault((first.number, site, quantity), finding)
                end = first.number if kind == "nan" else end
    yield from found.values()


def _origin(judged: Judged, item: Pass, kind: str) -> tuple[str, str, Summary]:
    """The site, quantity and summary where a kind of value arose in a pass that has it.

    Values arise in forward order: sites in their order, a site's input before its output, and a
    module's output after those of the modules in it. Gradients follow, in reverse order.
    """
    bad = [
        (s, q, summary)
        for s, q, summary in sorted(item.items(), key=lambda one: judged.at(one[0]))
        if layer_of(s) is None and summary.bins[_KINDS[kind][1]]
    ]
    inputs = {site for site, quantity, _ in bad if quantity == "input"}
    forward = [b for b in bad if b[1] != "gradient"]
    if not forward:
        outermost = [b for b in bad if not any(_within(b[0], other) for other, _, _ in bad)]
        return outermost[-1]
    site, quantity, summary = forward[0]
    if site in inputs:
        return next(b for b in forward if b[:2] == (site, "input"))
    while inner := [b for b in forward if _within(b[0], site)]:
        site, quantity, summary = inner[0]
    return site, quantity, summary


def _within(site: str, other: str) -> bool:
    """Whether a site's module lies inside another site's module."""
    path, outer = (re.split(r"(?<!\\):", leaf_of(key)[0])[0] for key in (site, other))
    return path != outer and (not outer or path.startswith(f"{outer}/"))


def _finding(judged: Judged, item: Pass, site: str, quantity: str, summary: Summary) -> Finding:
    counts = {kind: int(summary.bins[number]) for kind, (_, number) in _KINDS.items()}
    seen = " and ".join(
        f"{counts[kind]} {name}" for kind, (name, _) in _KINDS.items() if counts[kind]
    )
    size = 0 if summary.saturated else summary.size
    if summary.saturated:  # counts that stopped in jit are not evidence; that there are any is
        counts = {kind: min(count, 2**32 - 1) for kind, count in counts.items()}
        seen = " and ".join(name for kind, (name, _) in _KINDS.items() if counts[kind])
    severity, meaning = _meaning(judged, item, site, quantity, counts)
    where = quantity_of(site, quantity)
    where += _in_layers(item, site, quantity)
    among = f" among {size} values" if size else " among more values than can be counted"
    before = "" if quantity == "gradient" else _before(judged, item, site, quantity)
    during = ", while a perturbation was on" if item.perturbed else ""
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
        },
        what=f"At step {item.step}{during}, {where} first held {seen}{among}{before}",
        advice=meaning,
    )


def _before(judged: Judged, item: Pass, site: str, quantity: str) -> str:
    """The finite input, or the last finite output before it in the order of the pass, in words."""
    summary = item.summary(site, "input") if quantity == "output" else None
    what = "its input"
    if summary is None:
        order = judged.at(site)
        earlier = [
            s
            for s, q in item.keys
            if q == "output" and layer_of(s) is None and judged.at(s) < order
            and not _within(s, site) and not _within(site, s)
        ]  # fmt: skip
        last = max(earlier, key=judged.at, default=None)
        summary = None if last is None else item.summary(last, "output")
        what = f"{quantity_of(last or '', 'output')} before it"
    if summary is None or summary.saturated or summary.finite != summary.size or not summary.size:
        return ""
    return f" ({what} was finite, from {summary.min:.4g} to {summary.max:.4g})"


def _in_layers(item: Pass, site: str, quantity: str) -> str:
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


def _meaning(
    judged: Judged, item: Pass, site: str, quantity: str, counts: Mapping[str, int]
) -> tuple[Severity, str]:
    if counts["nan"] and quantity == "gradient":
        return "error", (
            "all forward values were free of NaN, so usually a derivative after this site is "
            "infinite (sqrt or norm at 0, log of 0), or the loss overflows; a jnp.where around the "
            "function does not help: the argument of the function must be safe too"
        )
    if counts["nan"]:
        return "error", _why_nan(judged, item, site, quantity)
    if counts["posinf"] or quantity == "gradient":
        return "warning", (
            "usually an overflow (exp, a division by 0, float16), and NaN comes next unless it is "
            "masked"
        )
    return "info", "usually a mask, which is harmless, but log of 0 gives the same value"


def _why_nan(judged: Judged, item: Pass, site: str, quantity: str) -> str:
    broken = [
        p.path
        for p in judged.parameters_in(site)
        if item.figures is not None
        and p.path in item.figures.parameters
        and math.isnan(item.figures.parameter(p.path, "norm"))
    ]
    if broken and quantity == "output":
        return (
            f"{OF_PARAMETER} {broken[0]!r} is not finite, usually since an earlier update (or "
            f"since it was loaded); with the model as it was before, "
            f"nni.first_nan(loss_fn, gradients=True)(model, batch) names the operation"
        )
    made = "0/0, Inf - Inf, or the log or root of a negative number"
    if judged.at(site) == min((judged.at(s) for s, _ in item.keys), default=()):
        return f"usually NaN in the data, {made}, or weights that are not finite"
    return f"usually {made}, or weights that an earlier step made invalid"
