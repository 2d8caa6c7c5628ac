"""Which site's values reach which other site, by the flow of the traced programs.

Invariant: only what was traced is a path. A site that no traced program has called (one of an eager
model, one that only a loop calls) reaches nothing but itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

from nnx_inspector.recordings.facts import BACKWARDS, CARRIED, CHOICE, FIRST, Flow, Role
from nnx_inspector.recordings.tree_rows import layer_key, layer_of

Node = tuple[int, int]
"""A value: the number of a flow, and its own in it."""

_SAME_ROW, _LATER, _EARLIER = 1, 2, 4
"""How a path passes the outermost loop: within an iteration, to a later row, to an earlier one."""


@dataclasses.dataclass(frozen=True)
class Feed:
    """Something that a site's output is computed from, with no other call in between.

    Attributes:
        site: the key of the site that returned it, or of the module whose parameters it is.
        role: which of these; `INPUT` for what the model received.
        chosen: whether it only decides (an argmax, a comparison, a branch).
    """

    site: str
    role: Role
    chosen: bool


class Paths:
    """Answers from the flows of a model, of which some sites have rows of their own."""

    def __init__(self, flows: Sequence[Flow], stacks: Collection[str]):
        self._sites, self._stacks = [flow.sites for flow in flows], stacks
        rows = [flow.rows() for flow in flows]
        self._values = [values for values, _ in rows]
        self._nodes: dict[tuple[str, int], list[Node]] = {}
        self._after: dict[Node, list[tuple[Node, int]]] = {}
        self._before: dict[Node, list[tuple[Node, int]]] = {}
        for number, (values, edges) in enumerate(rows):
            for i, (site, role, _) in enumerate(values):
                self._nodes.setdefault((flows[number].sites[site], role), []).append((number, i))
            for a, b, how in edges:
                self._after.setdefault((number, a), []).append(((number, b), how))
                self._before.setdefault((number, b), []).append(((number, a), how))
        self._from = functools.cache(self._reachable)

    def knows(self, site: str) -> bool:
        """Whether a traced program calls a site."""
        return (_site_and_row(site)[0], Role.OUTPUT) in self._nodes

    def reaches(
        self, one: str, other: str, *, values: bool = False, parameters: bool = False
    ) -> bool:
        """Whether what a site returns enters what another returns, or the two are one site.

        Args:
            one: the key of the first site.
            other: the key of the second.
            values: only where values enter: a choice that depends on a value does not carry it.
            parameters: whether it is the parameters of the first site's module that enter.
        """
        (base, row), (end, last) = _site_and_row(one), _site_and_row(other)
        if base == end and row == last:
            return True
        starts = self._nodes_of(base, Role.PARAMETERS) if parameters else []
        starts = starts or self._nodes_of(base, Role.OUTPUT)
        found = self._from(tuple(starts), values)
        ends = self._nodes_of(end, Role.OUTPUT)
        if base == end and None in (row, last):  # a stack and one of its layers
            return bool(starts)
        return any(
            self._reaches_row(start, at, found[start, at], row, last)
            for start in starts
            for at in ends
            if (start, at) in found
        )

    def meet(self, one: str, other: str, *, parameters: bool = False) -> bool:
        """Whether what two sites return enters a value that both enter, or one enters the other.

        `parameters` is as for `reaches`.
        """
        starts = self._nodes_of(_site_and_row(one)[0], Role.PARAMETERS) if parameters else []
        starts = starts or self._nodes_of(_site_and_row(one)[0], Role.OUTPUT)
        others = self._nodes_of(_site_and_row(other)[0], Role.OUTPUT)
        if one == other:
            return True
        first, second = (
            {end for _, end in self._from(tuple(nodes), True)} | set(nodes)
            for nodes in (starts, others)
        )
        return not first.isdisjoint(second)

    def feeds(self, site: str) -> list[Feed]:
        """What the output of a site is computed from, itself left out."""
        base, row = _site_and_row(site)
        out: dict[Feed, None] = {}
        for node in self._nodes_of(base, Role.OUTPUT):
            for before, how in self._before.get(node, ()):
                at = self._row_before(node, before, how, row)
                key, role = self._site(before), self._role(before)
                if at is _NEVER or (key == base and role == Role.OUTPUT and at == row):
                    continue
                layered = role == Role.OUTPUT and isinstance(at, int)
                key = layer_key(key, at) if layered else key  # type: ignore[arg-type]
                out[Feed(key, role, bool(how & CHOICE))] = None
        return list(out)

    def decides(self, site: str) -> bool:
        """Whether all that a site returns are decisions (an argmax, a mask)."""
        nodes = self._nodes_of(_site_and_row(site)[0], Role.OUTPUT)
        into = [how for node in nodes for _, how in self._before.get(node, ())]
        return bool(into) and all(how & CHOICE for how in into)

    def calls(self, site: str) -> int:
        """How many arrays a site returns in a traced program at most, twice as many in a loop."""
        nodes = self._nodes_of(_site_and_row(site)[0], Role.OUTPUT)
        each = [[n for n in nodes if n[0] == i] for i in range(len(self._sites))]
        return max(
            (len(found) * (1 + any(self._loop(n) >= 0 for n in found)) for found in each), default=0
        )

    # ------------------------------------------------------------------- the graph

    def _nodes_of(self, site: str, role: Role) -> list[Node]:
        """The values of a site; of a module that is only called by its methods, of them all."""
        found = self._nodes.get((site, role), [])
        if found or role != Role.OUTPUT:
            return found
        return [
            n
            for (key, r), ns in self._nodes.items()
            if r == role and _is_method(key, site)
            for n in ns
        ]

    def _reachable(self, starts: tuple[Node, ...], values: bool) -> dict[tuple[Node, Node], int]:
        """(start, end) -> in which ways the one reaches the other, for all ends."""
        out: dict[tuple[Node, Node], int] = {}
        for start in starts:
            waiting = [(start, _SAME_ROW)]
            while waiting:
                node, way = waiting.pop()
                for after, how in self._after.get(node, ()):
                    if values and how & CHOICE:
                        continue
                    turned = way
                    if how & CARRIED and self._loop(node) == self._loop(after):
                        turned = _EARLIER if how & BACKWARDS else _LATER
                    if not out.get((start, after), 0) & turned:
                        out[start, after] = out.get((start, after), 0) | turned
                        waiting.append((after, turned))
        return out

    def _reaches_row(
        self, start: Node, end: Node, ways: int, row: int | None, last: int | None
    ) -> bool:
        """Whether a row of a stack reaches a row of the same stack, or of another."""
        if row is None or last is None or self._loop(start) != self._loop(end):
            return True
        if row == last:
            return bool(ways & _SAME_ROW)
        return bool(ways & (_LATER if row < last else _EARLIER))

    def _row_before(self, node: Node, before: Node, how: int, row: int | None) -> Any:
        """The row that a value comes from: a number, None for no stack, `_NEVER`."""
        same = self._loop(node) == self._loop(before) and self._site(before) in self._stacks
        if row is None:
            return None
        if how & CARRIED:
            came = row + 1 if how & BACKWARDS else row - 1
            return _NEVER if came < 0 else came if same else None
        if (
            how & FIRST
        ):  # the number of the last row, where a loop that runs back begins, is unknown
            return None if row == 0 and not how & BACKWARDS else _NEVER
        return row if same else None

    def _site(self, node: Node) -> str:
        return self._sites[node[0]][self._values[node[0]][node[1]][0]]

    def _role(self, node: Node) -> Role:
        return Role(self._values[node[0]][node[1]][1])

    def _loop(self, node: Node) -> int:
        return self._values[node[0]][node[1]][2]


_NEVER = object()


def _site_and_row(key: str) -> tuple[str, int | None]:
    return layer_of(key) or (key, None)


def _is_method(key: str, path: str) -> bool:
    return key.startswith(f"{path}:")
