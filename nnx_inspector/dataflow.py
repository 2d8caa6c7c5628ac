"""Which module's output reaches which module, followed through a program's values.

Every variable of a jaxpr has its stems: the calls whose outputs (or received values) it is made
of. Invariant: each inner jaxpr is gone through once for each way in which it is entered, and a
loop until nothing new comes round, so the cost grows with the program, not with its nesting.
What decides between branches (a predicate, a trip count) is no dataflow here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from nnx_inspector import _private
from nnx_inspector.taps import BEGIN, INPUT, OUTPUT, mark


@dataclasses.dataclass(frozen=True)
class Edge:
    """A value that one module returns and another receives (perhaps changed on the way).

    Unpacks as `(producer, consumer, shape)`.

    Attributes:
        producer, consumer: site keys.
        shape: dtype and shape as the consumer receives it, without the batch axis of a `vmap`.
        loop: the value goes from one iteration of a loop to a later one.
    """

    producer: str
    consumer: str
    shape: str
    loop: bool = False

    def __iter__(self) -> Iterator[str]:
        return iter((self.producer, self.consumer, self.shape))


@dataclasses.dataclass(frozen=True)
class _Source:
    """A value's origin: what a call returned, or what it received."""

    site: str
    received: bool
    around: frozenset[int] = frozenset()  # the loops that carried it to a later iteration


_Stems = frozenset[Any]
"""`_Source`s, and the numbers of the inputs of the jaxpr that is gone through."""

_NONE: _Stems = frozenset()


@dataclasses.dataclass(frozen=True)
class _Meeting:
    """Stems that meet a call: what it receives, or what it returns."""

    site: str
    received: bool
    shape: str
    stems: _Stems
    around: tuple[str, ...]  # the calls that it is nested in, of the same jaxpr
    inside: frozenset[str]  # the sites that were called inside it


@dataclasses.dataclass(frozen=True)
class _Flow:
    """What a jaxpr does with stems."""

    results: tuple[_Stems, ...]
    meetings: tuple[_Meeting, ...]
    sites: frozenset[str]


def dataflow(jaxpr: Any, owner: Any) -> tuple[tuple[Edge, ...], tuple[Edge, ...]]:
    """The edges of a marked program, in its order: between modules, and across their borders.

    An edge across a border joins a call with one nested in it. Where the producer encloses the
    consumer, it is a value that the producer received; where the consumer encloses the producer
    (or is the producer), it is part of what the consumer returns.
    """
    bare, _ = _private.open_jaxpr(jaxpr)
    flow = _Follow(owner).flow(bare, (False,) * len(bare.invars))
    between: dict[Edge, None] = {}
    across: dict[Edge, None] = {}
    for meeting in flow.meetings:
        for source in sorted(meeting.stems, key=_in_order):
            edge = Edge(source.site, meeting.site, meeting.shape, bool(source.around))
            if meeting.received:
                enclosed = source.received and source.site in meeting.around
                (across if enclosed else between)[edge] = None
            elif source.received and source.site == meeting.site:
                if meeting.inside:  # past the modules inside: of one without any it says nothing
                    across[edge] = None
            elif source.site in meeting.inside:
                across[edge] = None
            elif not (source.received and source.site in meeting.around):
                between[edge] = None
    return tuple(between), tuple(across)


def _in_order(source: _Source) -> Any:
    return source.site, source.received, len(source.around)


class _Follow:
    def __init__(self, owner: Any):
        self.owner = owner
        self.known: dict[Any, tuple[Any, _Flow]] = {}

    def flow(self, jaxpr: Any, fed: tuple[bool, ...]) -> _Flow:
        """What a jaxpr does, given which of its inputs have stems at all."""
        bare, _ = _private.open_jaxpr(jaxpr)
        key = (id(bare), fed)
        if key not in self.known:  # the jaxpr is kept too, so that its id stays its own
            self.known[key] = (bare, self._go_through(bare, fed))
        return self.known[key][1]

    def _go_through(self, bare: Any, fed: tuple[bool, ...]) -> _Flow:
        stems_of: dict[Any, _Stems] = {
            v: frozenset([i])
            for i, (v, some) in enumerate(zip(bare.invars, fed, strict=True))
            if some
        }
        read = lambda v: _NONE if _private.is_literal(v) else stems_of.get(v, _NONE)  # noqa: E731
        here = _Here()
        for equation in bare.eqns:
            stems = [read(v) for v in equation.invars]
            for variable, out in zip(
                equation.outvars, self._apply(equation, stems, here), strict=True
            ):
                if out:
                    stems_of[variable] = out
        return _Flow(
            tuple(read(v) for v in bare.outvars), tuple(here.meetings), frozenset(here.sites)
        )

    def _apply(self, equation: Any, stems: list[_Stems], here: _Here) -> Sequence[_Stems]:
        if equation.primitive is mark:
            params = equation.params
            own = params["owner"] == self.owner and params["part"] in (BEGIN, INPUT, OUTPUT)
            return here.mark(equation, stems) if own else stems
        inner = list(_private.sub_jaxprs(equation))
        everything = frozenset().union(*stems)
        if not inner or _private.is_recomputation(equation):
            return [everything] * len(equation.outvars)
        name = equation.primitive.name
        if name == "scan":
            consts, carry, _ = _private.scan_parts(equation, stems)
            return self._loop(inner[0], stems, len(consts), len(carry), here)
        if name == "while":
            test, body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
            rest = stems[test:]
            out = self._loop(equation.params["body_jaxpr"], rest, body, len(rest) - body, here)
            carried = [
                a | b for a, b in zip(rest[body:], out, strict=True)
            ]  # it may not run at all
            self._enter(equation.params["cond_jaxpr"], [*stems[:test], *carried], here)
            return carried
        if name == "cond":
            branches = [self._enter(branch, stems[1:], here) for branch in inner]
            return [frozenset().union(*column) for column in zip(*branches, strict=True)]
        results = [self._enter(jaxpr, stems, here) for jaxpr in inner]
        if len(inner) == 1 and len(results[0]) == len(equation.outvars):
            return results[0]
        return [everything.union(*(s for out in results for s in out))] * len(equation.outvars)

    def _enter(self, jaxpr: Any, stems: Sequence[_Stems], here: _Here) -> list[_Stems]:
        bare, _ = _private.open_jaxpr(jaxpr)
        if len(bare.invars) != len(stems):  # how the operands go in is not known: all of them do
            stems = [frozenset().union(*stems)] * len(bare.invars)
        flow = self.flow(bare, tuple(bool(s) for s in stems))
        here.take(flow, stems)
        return [_resolved(out, stems) for out in flow.results]

    def _loop(
        self, body: Any, stems: Sequence[_Stems], consts: int, carry: int, here: _Here
    ) -> list[_Stems]:
        start, end, number = consts, consts + carry, id(body)
        around = list(stems[start:end])
        while True:
            entering = [*stems[:start], *around, *stems[end:]]
            flow = self.flow(body, tuple(bool(s) for s in entering))
            results = [_resolved(out, entering) for out in flow.results]
            next_around = [
                had | first | _resolved(_carried_by(number, out), entering)
                for had, first, out in zip(around, stems[start:end], flow.results, strict=False)
            ]
            if next_around == around:
                here.take(flow, entering)
                return [frozenset(_without(s, number) for s in out) for out in results]
            around = next_around


def _carried_by(number: int, out: _Stems) -> _Stems:
    """Stems of a loop's result, its own calls among them as carried to a later iteration."""
    return frozenset(
        s if isinstance(s, int) else dataclasses.replace(s, around=s.around | {number}) for s in out
    )


def _without(source: Any, number: int) -> Any:
    if isinstance(source, int) or number not in source.around:
        return source
    return dataclasses.replace(source, around=source.around - {number})


def _resolved(stems: _Stems, entering: Sequence[_Stems]) -> _Stems:
    """Stems with the numbers of inputs replaced by what enters there."""
    if not any(isinstance(s, int) for s in stems):
        return stems
    return frozenset().union(*(entering[s] if isinstance(s, int) else {s} for s in stems))


class _Here:
    """The calls that are open in the jaxpr that is gone through, and what met them."""

    def __init__(self) -> None:
        self.meetings: list[_Meeting] = []
        self.sites: set[str] = set()
        self.open: list[tuple[str, set[str]]] = []

    def mark(self, equation: Any, stems: list[_Stems]) -> Sequence[_Stems]:
        params, part = equation.params, equation.params["part"]
        site, inside = params["site"], set[str]()
        if part == BEGIN or (part == INPUT and not (self.open and self.open[-1][0] == site)):
            self.open.append((site, set()))
        if part == INPUT:
            around = tuple(s for s, _ in self.open[:-1])
        elif part != BEGIN:
            while any(site == s for s, _ in self.open):
                found, inside = self.open.pop()
                if found == site:
                    break
            around = tuple(s for s, _ in self.open)
            self.add([site, *inside])
        else:
            return stems
        structure = params["structure"]
        for stem, leaf in zip(stems, structure.arrays, strict=True):
            if stem:
                shape, within = structure.leaves[leaf], frozenset(inside)
                self.meetings.append(_Meeting(site, part == INPUT, shape, stem, around, within))
        return [frozenset([_Source(site, part == INPUT)])] * len(stems)

    def add(self, sites: Any) -> None:
        self.sites.update(sites)
        for _, inside in self.open:
            inside.update(sites)

    def take(self, flow: _Flow, stems: Sequence[_Stems]) -> None:
        """The meetings of an inner jaxpr, as seen from here."""
        around = tuple(s for s, _ in self.open)
        for meeting in flow.meetings:
            self.meetings.append(
                dataclasses.replace(
                    meeting,
                    stems=_resolved(meeting.stems, stems),
                    around=(*around, *meeting.around),
                )
            )
        self.add(flow.sites)
