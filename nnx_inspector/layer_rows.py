"""The rows of single layers below those of stacked modules.

A layer's row is below that of its stack, and holds the same layer of what is inside of the stack.
Invariant: a layer has a row only where one scan runs over all layers and nothing is called beside
it; how many were left out is said. Makes protocol messages only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from nnx_inspector import protocol
from nnx_inspector.stacks import MOST_LAYERS, MOST_ROWS, layer_key
from nnx_inspector.tracing import Trace
from nnx_inspector.walk import TracedCall

VMAPPED = "its members run side by side in one vmapped call, which is measured as a whole"


def stacks_of(trace: Trace) -> dict[str, int]:
    """Site -> how many layers it has, for every site that one scan calls once a layer.

    A module without parameters counts as well, where the module around it is stacked.
    """
    found: dict[str, set[int]] = {}
    for call in trace.calls:
        found.setdefault(call.site, set()).add(_layers(trace.calls, call))
    return {site: n for site, (n, *others) in found.items() if n > 1 and not others}


def _layers(calls: Sequence[TracedCall], call: TracedCall) -> int:
    """Of the outermost stacked call around a call, or of itself; 0: there is none."""
    found = 0
    at: TracedCall | None = call
    while at is not None:
        if at.stacked > 1:
            found = at.stacked if at.times == at.stacked else 0
        at = None if at.parent is None else calls[at.parent]
    return found


def shown_of(stacks: Mapping[str, int]) -> dict[str, int]:
    """Site -> how many of its layers have rows: the first of each, within the bound of all."""
    most = MOST_LAYERS
    while most > 1 and sum(min(n, most) for n in stacks.values()) > MOST_ROWS:
        most //= 2
    return {site: min(n, most) for site, n in stacks.items()} if len(stacks) <= MOST_ROWS else {}


def with_layers(
    sites: Sequence[protocol.Site], stacks: Mapping[str, int], unseen: Mapping[str, str]
) -> tuple[protocol.Site, ...]:
    """The rows of a layout, and after them those of single layers.

    Args:
        sites: the rows of whole sites, parents first.
        stacks: site -> how many layers; see `stacks_of`.
        unseen: why a layer cannot be seen, by its key.
    """
    shown = shown_of(stacks)
    rows = [dataclasses.replace(s, note=_note(s, stacks, shown)) for s in sites]
    first: dict[int, int] = {}  # the row of a stacked site -> that of its first layer
    for index, site in enumerate(sites):
        count = shown.get(site.key, 0)
        if not count:
            continue
        above = _stack_around(sites, index, stacks)
        first[index] = len(rows)
        for layer in range(count):
            parent = index if above is None else first[above] + layer
            rows.append(
                dataclasses.replace(
                    site,
                    key=layer_key(site.key, layer),
                    name=f"[{layer}]" if above is None else _name(sites, index, above),
                    parent=parent,
                    depth=rows[parent].depth + 1,
                    parameters=site.parameters // stacks[site.key],
                    flops=None if site.flops is None else site.flops / stacks[site.key],
                    stacked=0,
                    aliases=tuple(layer_key(alias, layer) for alias in site.aliases),
                    unseen=unseen.get(layer_key(site.key, layer), site.unseen),
                    layer=layer,
                )
            )
    return tuple(rows)


def _note(site: protocol.Site, stacks: Mapping[str, int], shown: Mapping[str, int]) -> str:
    count, most = stacks.get(site.key, 0), shown.get(site.key, 0)
    if count > most:
        if most:
            return f"Only the first {most} of {count} layers have rows of their own."
        return f"None of its {count} layers has a row of its own: too many modules are stacked."
    return f"It is stacked: {VMAPPED}." if site.stacked > 1 and not count else ""


def _stack_around(
    sites: Sequence[protocol.Site], index: int, stacks: Mapping[str, int]
) -> int | None:
    """The row of the nearest module around one that has the same layers."""
    count, at = stacks[sites[index].key], sites[index].parent
    while at >= 0 and stacks.get(sites[at].key) != count:
        at = sites[at].parent
    return at if at >= 0 else None


def _name(sites: Sequence[protocol.Site], index: int, above: int) -> str:
    names: list[str] = []
    while index != above:
        names.append(sites[index].name)
        index = sites[index].parent
    return "/".join(reversed(names))


def layers_unseen(sites: Iterable[str], stacks: Mapping[str, int], why: str) -> dict[str, str]:
    """The reason for every layer of some stacked sites that has a row, by key."""
    shown = shown_of(stacks)
    return {layer_key(s, i): why for s in sites for i in range(shown.get(s, 0))}
