"""The rows of the tree: every module of a model with what a trace says about it.

Invariant: a module that was not called, or cannot be seen, has a row that says so. Makes protocol
messages only; draws nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from flax import nnx

from nnx_inspector import protocol
from nnx_inspector.sites import CALL, ModuleSite, methods, site_key
from nnx_inspector.tracing import Trace, TracedCall, parameter_count


def layout_of(
    model: nnx.Module,
    trace: Trace,
    *,
    number: int,
    unseen: Mapping[str, str],
) -> protocol.Layout:
    """The layout message of a model.

    Args:
        model: the model, for its name.
        trace: of the model's example.
        number: the layout's number; frames name it.
        unseen: sites that a running program cannot show, with the reason.
    """
    calls: dict[str, list[TracedCall]] = {}
    for call in trace.calls:
        calls.setdefault(call.site, []).append(call)
    modules = in_call_order(trace)
    paths = {site.path: i for i, site in enumerate(modules)}
    rows = [
        _row(site, calls.get(site.key, []), paths, {**trace.unseen, **unseen}) for site in modules
    ]
    return protocol.Layout(
        version=protocol.VERSION, layout=number, model=type(model).__name__, sites=tuple(rows)
    )


def in_call_order(trace: Trace) -> list[ModuleSite]:
    """The modules, parents before children, siblings in the order in which they are called.

    Their order as attributes says nothing: an NNX transform sorts what it updates by name.
    """
    first: dict[str, int] = {}
    for number, call in enumerate(trace.calls):
        first.setdefault(call.site, number)
    never = len(trace.calls)
    reached: dict[tuple[str | int, ...], int] = {}
    for site in trace.modules:
        number = first.get(site.key, never)
        for end in range(len(site.path) + 1):
            above = site.path[:end]
            reached[above] = min(reached.get(above, never), number)
    position = {site.path: i for i, site in enumerate(trace.modules)}

    def rank(site: ModuleSite) -> list[tuple[int, int]]:
        above = [site.path[:end] for end in range(len(site.path) + 1)]
        return [(reached[path], position.get(path, 0)) for path in above]

    return sorted(trace.modules, key=rank)


def _row(
    site: ModuleSite,
    calls: Sequence[TracedCall],
    paths: Mapping[tuple[str | int, ...], int],
    unseen: Mapping[str, str],
) -> protocol.Site:
    parent, start = _parent(site.path, paths)
    first = calls[0] if calls else None
    reason = unseen.get(site.key, "")
    if not reason and first is None and CALL in methods(type(site.module)):
        reason = "it is not called by the example"
    flops = [c.flops for c in calls]
    return protocol.Site(
        key=site.key,
        name="/".join(str(p) for p in site.path[start:]) or type(site.module).__name__,
        kind=type(site.module).__name__,
        parent=parent,
        depth=0 if parent < 0 else sum(1 for n in range(len(site.path)) if site.path[:n] in paths),
        inputs=first.inputs if first else "",
        output=first.output if first else "",
        parameters=parameter_count(site.module),
        flops=None if not calls or None in flops else float(sum(f for f in flops if f is not None)),
        calls=len(calls),
        stacked=first.stacked if first else 0,
        aliases=tuple(site_key(alias) for alias in site.aliases),
        source=_short(first.source) if first else "",
        perturbable=first is not None and "[" in first.output,
        unseen=reason,
    )


def _parent(
    path: tuple[str | int, ...], paths: Mapping[tuple[str | int, ...], int]
) -> tuple[int, int]:
    """(row of the nearest module above, length of its path); (-1, 0) for the root."""
    for end in range(len(path) - 1, -1, -1):
        if path[:end] in paths:
            return paths[path[:end]], end
    return -1, 0


def _short(source: str) -> str:
    # a notebook's cell has a generated file name; a path is told by its last two parts
    file, _, line = source.rpartition(":")
    parts = file.split(os.sep)
    if parts[-1].startswith(("<", "ipykernel_")) or (len(parts) > 1 and "ipykernel_" in parts[-2]):
        return f"notebook cell, line {line}"
    return f"{'/'.join(parts[-2:])}:{line}" if file else ""
