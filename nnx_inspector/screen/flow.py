"""The flow of one module: the modules that it calls, and the values that pass between them.

The flow is read from a trace's calls and arrivals. Each of these names the calls around it, so a
shared module is drawn in each place with the edges of that place. Invariant: every edge stands for
a value that the program passes there; the values of several calls of one module are merged.
Imports no jax: it turns a trace into one message.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from nnx_inspector.screen import protocol

if TYPE_CHECKING:
    from nnx_inspector.program.analysis.calls import TracedCall
    from nnx_inspector.program.analysis.dataflow import Arrival, Origin
    from nnx_inspector.program.analysis.trace import Trace

_Stack = tuple[str, ...]

_ARRAY = re.compile(r"\w+\[[^\[\]]*\]")


@dataclasses.dataclass(frozen=True)
class _NodeKey:
    """The identity of a node.

    For a join, `text` is its shape, `value` its number and `parts` the nodes that it joins; for a
    node outside, `text` is the prefix of its name.
    """

    role: Literal["module", "input", "output", "join", "outside"]
    site: str = ""
    text: str = ""
    value: int = -1
    parts: tuple[_NodeKey, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Level:
    """The calls at which a flow is drawn.

    Attributes:
        site: the site of the flow.
        frames: the calls around the flow, as stacks of site keys.
        members: the sites in the flow; None, if the site itself is called, for all that it calls.
    """

    site: str
    frames: tuple[_Stack, ...]
    members: frozenset[str] | None

    def origin(self, frame: _Stack, origin: Origin) -> _NodeKey:
        if origin.stack == frame:
            return self._border_node("input" if origin.received else "outside", frame)
        return self._called_node(frame, origin.stack)

    def arrival(self, frame: _Stack, arrival: Arrival) -> _NodeKey:
        if arrival.stack == frame:
            return self._border_node("outside" if arrival.received else "output", frame)
        return self._called_node(frame, arrival.stack)

    def _border_node(self, role: Literal["input", "output", "outside"], frame: _Stack) -> _NodeKey:
        # for the modules of a list, the call around them is outside
        if self.members is None:
            return _NodeKey(role, frame[-1])
        return _NodeKey("outside", frame[-1], f"{role} of " * (role != "outside"))

    def _called_node(self, frame: _Stack, stack: _Stack) -> _NodeKey:
        if stack[: len(frame)] != frame:
            return _NodeKey("outside", stack[-1])
        site = stack[len(frame)]
        inside = self.members is None or site in self.members
        return _NodeKey("module" if inside else "outside", site)


class _Graph:
    """The nodes and edges found so far, in order."""

    def __init__(self) -> None:
        self.edges: dict[tuple[_NodeKey, _NodeKey, bool], dict[str, None]] = {}
        self.nodes: dict[_NodeKey, None] = {}

    def add(
        self, producer: _NodeKey, consumer: _NodeKey, shape: str, *, loop: bool = False
    ) -> None:
        shapes = self.edges.setdefault((producer, consumer, loop), {})
        if shape:
            shapes[shape] = None
        self.nodes |= {producer: None, consumer: None}


def flow_of(trace: Trace, layout: protocol.Layout, site: str, *, number: int) -> protocol.Flow:
    """The flow between the modules that a site calls, or between the modules of a list.

    Raises:
        ValueError: there is no such site.
    """
    rows = {row.key: row for row in layout.sites}
    if site not in rows:
        raise ValueError(f"There is no site {site!r} in this model.")
    stacks = _stacks(trace.calls)
    level = _level(site, layout, stacks)
    called = _call_counts(trace.calls, stacks, level)
    graph = _Graph()
    for key in called:
        graph.nodes[_NodeKey("module", key)] = None
    outputs = {call.site: call.output for call in trace.calls}
    own = next((call for call in trace.calls if call.site == site), None)
    if own is not None:
        graph.nodes |= {_NodeKey("input", site): None, _NodeKey("output", site): None}
    inputs = "" if own is None else own.inputs
    for arrival in trace.arrivals:
        for frame in level.frames:
            _add_edges(graph, level, frame, arrival, outputs, inputs)
    keys = sorted(graph.nodes, key=lambda key: _ORDER[key.role])  # stable
    places = {key: i for i, key in enumerate(keys)}
    return protocol.Flow(
        layout=layout.layout,
        site=site,
        id=number,
        nodes=tuple(_node(key, site, rows, called, own, outputs) for key in keys),
        edges=tuple(
            protocol.FlowEdge(
                producer=places[producer],
                consumer=places[consumer],
                shapes=tuple(shapes),
                loop=loop,
            )
            for (producer, consumer, loop), shapes in graph.edges.items()
        ),
        absent=tuple(_absent(site, layout, called, trace.calls)),
    )


_ORDER = {"input": 0, "module": 1, "join": 2, "outside": 3, "output": 4}


def _stacks(calls: Sequence[TracedCall]) -> list[_Stack]:
    stacks: list[_Stack] = []
    for call in calls:
        above = () if call.parent is None else stacks[call.parent]
        stacks.append((*above, call.site))
    return stacks


def _level(site: str, layout: protocol.Layout, stacks: Sequence[_Stack]) -> _Level:
    own = dict.fromkeys(stack for stack in stacks if stack[-1] == site)
    if own:
        return _Level(site, tuple(own), None)
    below = _keys_below(site, layout)
    outermost = [s for s in stacks if s[-1] in below and not below.intersection(s[:-1])]
    frames = dict.fromkeys(stack[:-1] for stack in outermost)
    return _Level(site, tuple(frames), frozenset(stack[-1] for stack in outermost))


def _keys_below(site: str, layout: protocol.Layout) -> frozenset[str]:
    """The keys of a row and of all rows below it."""
    inside = {i for i, row in enumerate(layout.sites) if row.key == site}
    for i, row in enumerate(layout.sites):  # parents come first
        if row.parent in inside:
            inside.add(i)
    return frozenset(layout.sites[i].key for i in inside)


@dataclasses.dataclass(frozen=True)
class _CallCount:
    """How often one call of the site calls a module: calls in the code, and times with loops."""

    calls: int
    times: int | None
    conditional: bool


def _call_counts(
    calls: Sequence[TracedCall], stacks: Sequence[_Stack], level: _Level
) -> dict[str, _CallCount]:
    """The modules called at a level, in order. If calls of the site differ, the most counts."""
    frames = set(level.frames)
    groups: dict[str, dict[int | None, list[TracedCall]]] = {}
    for call, stack in zip(calls, stacks, strict=True):
        if stack[:-1] in frames and (level.members is None or call.site in level.members):
            groups.setdefault(call.site, {}).setdefault(call.parent, []).append(call)
    found: dict[str, _CallCount] = {}
    for site, by_parent in groups.items():
        totals = [
            _total([_times(call, None if parent is None else calls[parent]) for call in group])
            for parent, group in by_parent.items()
        ]
        known = [total for total in totals if total is not None]
        found[site] = _CallCount(
            calls=max(len(group) for group in by_parent.values()),
            times=max(known) if len(known) == len(totals) else None,
            conditional=all(c.conditional for group in by_parent.values() for c in group),
        )
    return found


def _times(call: TracedCall, parent: TracedCall | None) -> int | None:
    """How often a call takes place in one call of its parent; None if unknown."""
    around = 1 if parent is None else parent.times
    return None if call.times is None or not around else call.times // around


def _total(times: Sequence[int | None]) -> int | None:
    known = [n for n in times if n is not None]
    return sum(known) if len(known) == len(times) else None


def _add_edges(
    graph: _Graph,
    level: _Level,
    frame: _Stack,
    arrival: Arrival,
    outputs: dict[str, str],
    inputs: str,
) -> None:
    """Draw the edges of an arriving value that concern a level."""
    consumer = level.arrival(frame, arrival)
    now: dict[_NodeKey, None] = {}
    later: dict[_NodeKey, None] = {}
    for origin in arrival.origins:
        producer = level.origin(frame, origin)
        if _is_drawn(producer, consumer) and not _stays_in_call(frame, origin, producer, consumer):
            (later if origin.loop else now)[producer] = None
    if len(now) > 1:
        join = _NodeKey("join", "", arrival.shape, arrival.value, tuple(now))
        for producer in now:
            text = inputs if producer.role == "input" else outputs.get(producer.site, "")
            shape = text if producer.role != "outside" and _ARRAY.fullmatch(text) else ""
            graph.add(producer, join, shape)
        now = {join: None}
    for producer in now:
        graph.add(producer, consumer, arrival.shape)
    for producer in later:
        graph.add(producer, consumer, arrival.shape, loop=True)


def _is_drawn(producer: _NodeKey, consumer: _NodeKey) -> bool:
    roles = {producer.role, consumer.role}
    return "module" in roles or roles == {"input", "output"} or roles == {"outside", "output"}


def _stays_in_call(frame: _Stack, origin: Origin, producer: _NodeKey, consumer: _NodeKey) -> bool:
    """Whether a value stays within one call of a level and is therefore not drawn."""
    returned = not origin.received and len(origin.stack) == len(frame) + 1
    return producer == consumer and not returned


def _node(
    key: _NodeKey,
    site: str,
    rows: dict[str, protocol.Site],
    called: dict[str, _CallCount],
    own: TracedCall | None,
    outputs: dict[str, str],
) -> protocol.FlowNode:
    calls = called[key.site] if key.role == "module" else _CallCount(1, 1, False)
    if key.role == "join":
        name, kind, output = "", f"made of {len(key.parts)} values", key.text
    elif key.role in ("input", "output"):
        name, kind = key.role, ""
        output = "" if own is None else own.inputs if key.role == "input" else own.output
    else:
        row = rows.get(key.site)
        name = (
            _name(key.site, site) if key.role == "module" else f"{key.text}{key.site or '(model)'}"
        )
        kind, output = ("", "") if row is None else (row.kind, outputs.get(key.site, ""))
    return protocol.FlowNode(
        role=key.role,
        site=key.site,
        name=name,
        kind=kind,
        output=output,
        calls=calls.calls,
        times=calls.times,
        conditional=calls.conditional,
    )


def _name(key: str, site: str) -> str:
    for sign in ("/", ":"):
        if key.startswith(f"{site}{sign}") and site:
            return key[len(site) + (sign == "/") :]
    return key


def _absent(
    site: str, layout: protocol.Layout, called: dict[str, _CallCount], calls: Sequence[TracedCall]
) -> Iterable[protocol.FlowAbsent]:
    """The modules right below a site that are not called in it, with the reason."""
    sites = layout.sites
    open_rows = {i for i, row in enumerate(sites) if row.key == site}
    for i, row in enumerate(sites):
        if row.parent not in open_rows or row.key in called or row.single:
            continue
        if row.calls:
            callers = {
                calls[c.parent].site for c in calls if c.site == row.key and c.parent is not None
            }
            where = ", ".join(sorted(key or "(model)" for key in callers))
            yield protocol.FlowAbsent(
                site=row.key, why=f"called by {where}" if where else "called by itself"
            )
        elif row.unseen:
            yield protocol.FlowAbsent(site=row.key, why=row.unseen)
        else:
            open_rows.add(i)  # a list of modules is never called
