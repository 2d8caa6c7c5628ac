"""The stacked sites of a trace: sites that a scan calls once per layer, or a vmap once per member.

Invariant: a scan or vmap over time, examples, or anything but the layers of the parameters makes no
stack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nnx_inspector.program.analysis.calls import TracedCall
from nnx_inspector.program.analysis.trace import Trace
from nnx_inspector.recordings.tree_rows import MOST_LAYER_ROWS, MOST_LAYERS


def stacks_of(trace: Trace) -> dict[str, int]:
    """Site -> the number of its layers, for every site that one scan calls once per layer, or its
    members.

    A module without parameters counts too if the module around it is stacked.
    """
    found: dict[str, set[int]] = {}
    for call in trace.calls:
        found.setdefault(call.site, set()).add(_layers(trace.calls, call))
    return {site: n for site, (n, *others) in found.items() if n > 1 and not others}


def _layers(calls: Sequence[TracedCall], call: TracedCall) -> int:
    """The layers of the outermost stacked call around a call, or of the call itself; 0 if none."""
    found = 0
    at: TracedCall | None = call
    while at is not None:
        if at.stacked > 1:
            found = at.stacked if at.times == at.stacked else 0
        at = None if at.parent is None else calls[at.parent]
    return found or call.members


def layers_with_rows(stacks: Mapping[str, int]) -> dict[str, int]:
    """Site -> how many of its layers have rows: the first ones, within the bound on all rows."""
    most = MOST_LAYERS
    while most > 1 and sum(min(n, most) for n in stacks.values()) > MOST_LAYER_ROWS:
        most //= 2
    return (
        {site: min(n, most) for site, n in stacks.items()} if len(stacks) <= MOST_LAYER_ROWS else {}
    )
