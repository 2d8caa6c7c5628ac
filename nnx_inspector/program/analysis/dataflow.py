"""Which module's output reaches which module, followed through a program's values.

Every variable of a jaxpr has stems: the calls whose outputs (or received values) it is computed
from. Invariant: each inner jaxpr is processed once for each way in which it is entered, and a loop
until its stems stop changing, so the cost grows with the program, not with its nesting. A value
that only decides between branches (a predicate, a trip count) is not dataflow here.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

from nnx_inspector._compat import eqn_params, jaxprs
from nnx_inspector.program.analysis.equations import Body, bodies_of
from nnx_inspector.program.marks import BEGIN, INPUT, OUTPUT, mark
from nnx_inspector.typing import Atom, Equation, Jaxpr, OpenJaxpr, Owner


@dataclasses.dataclass(frozen=True)
class Edge:
    """A value that one module returns and another receives, possibly changed on the way.

    Unpacks as `(producer, consumer, shape)`.

    Attributes:
        producer, consumer: site keys.
        shape: dtype and shape as the consumer receives it, without the batch axis of a `vmap`.
        loop: whether the value passes from one iteration of a loop to a later one.
    """

    producer: str
    consumer: str
    shape: str
    loop: bool = False

    def __iter__(self) -> Iterator[str]:
        return iter((self.producer, self.consumer, self.shape))


@dataclasses.dataclass(frozen=True)
class Origin:
    """A value that another is computed from: one that a call returned or received.

    Attributes:
        stack: the site keys of the enclosing calls, outermost first, then of the call itself.
        received: whether the call received it; otherwise the call returned it.
        loop: whether it comes from an earlier iteration of a loop.
    """

    stack: tuple[str, ...]
    received: bool
    loop: bool


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A value that a call receives or returns, with its origins.

    Attributes:
        stack: as in `Origin`.
        received: whether the call receives it; otherwise the call returns it.
        shape: its dtype and shape, without the batch axis of a `vmap`.
        origins: what it is computed from, in a fixed order.
        value: a number; arrivals with the same number are the same value.
    """

    stack: tuple[str, ...]
    received: bool
    shape: str
    origins: tuple[Origin, ...]
    value: int


@dataclasses.dataclass(frozen=True)
class _Source:
    """A value's origin: what a call returned, or what it received."""

    site: str
    received: bool
    within: tuple[str, ...]  # the enclosing calls in the jaxpr being processed
    around: frozenset[int] = frozenset()  # the loops that carried it to a later iteration


_Stems = frozenset[Any]
"""`_Source`s, and the numbers of inputs of the jaxpr being processed."""

_NONE: _Stems = frozenset()


@dataclasses.dataclass(frozen=True)
class _StemsAt:
    """A value that a call receives or returns, with its stems."""

    site: str
    received: bool
    shape: str
    stems: _Stems
    value: int  # the same number means the same value
    around: tuple[str, ...]  # the enclosing calls in the same jaxpr
    inside: frozenset[str]  # the sites that were called inside it


@dataclasses.dataclass(frozen=True)
class _Flow:
    """The effect of a jaxpr on stems."""

    results: tuple[_Stems, ...]
    meetings: tuple[_StemsAt, ...]
    sites: frozenset[str]


def dataflow(
    jaxpr: Jaxpr, owner: object
) -> tuple[tuple[Edge, ...], tuple[Edge, ...], tuple[Arrival, ...]]:
    """The edges of a marked program, in its order: those between modules, those across their
    borders, and the arrivals that both are read from.

    An edge across a border joins a call with one nested in it. If the producer encloses the
    consumer, the producer received the value. If the consumer encloses the producer (or is the
    producer), the value is part of what the consumer returns.
    """
    bare, _ = jaxprs.open_jaxpr(jaxpr)
    flow = _Analysis(owner).flow(bare, (False,) * len(bare.invars))
    between: dict[Edge, None] = {}
    across: dict[Edge, None] = {}
    for meeting in flow.meetings:
        for source in sorted(meeting.stems, key=_in_order):
            edge = Edge(source.site, meeting.site, meeting.shape, bool(source.around))
            if meeting.received:
                enclosed = source.received and source.site in meeting.around
                (across if enclosed else between)[edge] = None
            elif source.received and source.site == meeting.site:
                if meeting.inside:  # bypasses the modules inside; trivial without any
                    across[edge] = None
            elif source.site in meeting.inside:
                across[edge] = None
            elif not (source.received and source.site in meeting.around):
                between[edge] = None
    return tuple(between), tuple(across), tuple(_arrivals(flow.meetings))


def inputs_received(
    jaxpr: Jaxpr, owner: object, sites: Collection[str]
) -> dict[int, dict[str, bool]]:
    """The inputs of a marked program that reach one of the sites without passing another of them.

    Returns:
        Number -> site -> whether the value is surely the input itself.
    """
    bare, _ = jaxprs.open_jaxpr(jaxpr)
    found: dict[int, dict[str, bool]] = {}
    for meeting in _Analysis(owner, sites).flow(bare, (True,) * len(bare.invars)).meetings:
        for number in filter(lambda stem: isinstance(stem, int), meeting.stems):
            if meeting.received:
                of, same = found.setdefault(number, {}), meeting.value == id(bare.invars[number])
                of[meeting.site] = same and of.get(meeting.site, True)
    return found


def _in_order(source: _Source) -> Any:
    return source.site, source.received, len(source.around), source.within


def _arrivals(meetings: Iterable[_StemsAt]) -> Iterator[Arrival]:
    numbers: dict[int, int] = {}
    for meeting in meetings:
        yield Arrival(
            stack=(*meeting.around, meeting.site),
            received=meeting.received,
            shape=meeting.shape,
            origins=tuple(
                dict.fromkeys(
                    Origin((*source.within, source.site), source.received, bool(source.around))
                    for source in sorted(meeting.stems, key=_in_order)
                )
            ),
            value=numbers.setdefault(meeting.value, len(numbers)),
        )


class _Analysis:
    def __init__(self, owner: Owner, only: Collection[str] | None = None):
        self.owner, self.only = owner, only
        self.known: dict[Hashable, tuple[OpenJaxpr, _Flow]] = {}

    def flow(self, jaxpr: Jaxpr, fed: tuple[bool, ...]) -> _Flow:
        """The flow of a jaxpr, given which of its inputs have stems at all."""
        bare, _ = jaxprs.open_jaxpr(jaxpr)
        key = (id(bare), fed)
        if key not in self.known:  # keep the jaxpr too, so its id is not reused
            self.known[key] = (bare, self._go_through(bare, fed))
        return self.known[key][1]

    def _go_through(self, bare: OpenJaxpr, fed: tuple[bool, ...]) -> _Flow:
        entering = {v: frozenset([i]) for i, v in enumerate(bare.invars) if fed[i]}
        here = _JaxprState(entering)
        for equation in bare.eqns:
            stems = [here.read(v) for v in equation.invars]
            results = self._apply(equation, stems, here)
            here.stems.update(zip(equation.outvars, results, strict=True))
        results = tuple(here.read(v) for v in bare.outvars)
        return _Flow(results, tuple(here.meetings), frozenset(here.sites))

    def _apply(
        self, equation: Equation, stems: list[_Stems], here: _JaxprState
    ) -> Sequence[_Stems]:
        if equation.primitive is mark:
            params = equation.params
            own = params["owner"] == self.owner and params["part"] in (BEGIN, INPUT, OUTPUT)
            own = own and (self.only is None or params["site"] in self.only)
            results = here.mark(equation, stems) if own else stems
            here.rename(equation)
            return results
        everything = frozenset().union(*stems)
        bodies = () if eqn_params.is_recomputation(equation) else bodies_of(equation)
        if not any(body.results for body in bodies):  # it is not known how values come out
            through = [everything, *(s for b in bodies for s in self._enter(b, stems, here))]
            return [frozenset().union(*through)] * len(equation.outvars)
        results = [_NONE] * len(equation.outvars)
        for body in sorted(bodies, key=lambda body: body.tests):
            entering, start = [stems[i] for i in body.operands or ()], body.consts
            if body.tests:
                entering[start:] = results
            for number, out in zip(
                body.results or (), self._enter(body, entering, here), strict=True
            ):
                if number is not None:
                    results[number] |= out
            if not body.times:  # it may not run at all
                for i, had in enumerate(entering[start : start + body.carry]):
                    results[i] |= had
        return results

    def _enter(self, body: Body, stems: Sequence[_Stems], here: _JaxprState) -> list[_Stems]:
        bare, _ = jaxprs.open_jaxpr(body.jaxpr)
        if body.operands is None:  # not known how operands enter: all to all
            stems = [frozenset().union(*stems)] * len(bare.invars)
        if body.carry and not body.tests:
            return self._loop(bare, stems, body.consts, body.carry, here)
        flow = self.flow(bare, tuple(bool(s) for s in stems))
        here.take(flow, stems)
        return [_resolved(here.placed(out), stems) for out in flow.results]

    def _loop(
        self, body: Jaxpr, stems: Sequence[_Stems], consts: int, carry: int, here: _JaxprState
    ) -> list[_Stems]:
        start, end, number = consts, consts + carry, id(body)
        around = list(stems[start:end])
        while True:
            entering = [*stems[:start], *around, *stems[end:]]
            flow = self.flow(body, tuple(bool(s) for s in entering))
            out = [here.placed(one) for one in flow.results]
            results = [_resolved(one, entering) for one in out]
            next_around = [
                had | first | _resolved(_carried_by(number, one), entering)
                for had, first, one in zip(around, stems[start:end], out, strict=False)
            ]
            if next_around == around:
                here.take(flow, entering)
                return [frozenset(_without(s, number) for s in one) for one in results]
            around = next_around


def _carried_by(number: int, out: _Stems) -> _Stems:
    """A loop result's stems, with the loop's own calls marked as carried to a later iteration."""
    return frozenset(
        s if isinstance(s, int) else dataclasses.replace(s, around=s.around | {number}) for s in out
    )


def _without(source: Any, number: int) -> Any:
    if isinstance(source, int) or number not in source.around:
        return source
    return dataclasses.replace(source, around=source.around - {number})


def _resolved(stems: _Stems, entering: Sequence[_Stems]) -> _Stems:
    """Stems with the numbers of inputs replaced by the stems that enter there."""
    if not any(isinstance(s, int) for s in stems):
        return stems
    return frozenset().union(*(entering[s] if isinstance(s, int) else {s} for s in stems))


@dataclasses.dataclass
class _OpenCall:
    """An open call: the sites called inside it, and the stems of its inputs outside it."""

    site: str
    inside: set[str] = dataclasses.field(default_factory=lambda: set[str]())
    outside: dict[Atom, _Stems] = dataclasses.field(default_factory=lambda: dict[Atom, _Stems]())


_site_of = operator.attrgetter("site")


class _JaxprState:
    """The state of the jaxpr being processed: stems of its variables, open calls, and meetings."""

    def __init__(self, stems: dict[Atom, _Stems]) -> None:
        self.stems = stems
        self.meetings: list[_StemsAt] = []
        self.sites: set[str] = set()
        self.open: list[_OpenCall] = []
        self.first: dict[Atom, int] = {}

    def read(self, atom: Atom) -> _Stems:
        return _NONE if jaxprs.is_literal(atom) else self.stems.get(atom, _NONE)

    def mark(self, equation: Equation, stems: list[_Stems]) -> Sequence[_Stems]:
        params, part = equation.params, equation.params["part"]
        site, inside = params["site"], set[str]()
        if part == BEGIN or (part == INPUT and not (self.open and self.open[-1].site == site)):
            self.open.append(_OpenCall(site))
        if part == BEGIN:
            return stems
        around = self.stack()[:-1]
        if part == OUTPUT:
            inside = self._close(site)
            around = self.stack()
            self.add([site, *inside])
        result = frozenset([_Source(site, part == INPUT, around)])
        if part == INPUT:
            for atom, stem in zip(equation.invars, stems, strict=True):
                if not jaxprs.is_literal(atom):  # inside, its origin is the call
                    self.open[-1].outside.setdefault(atom, stem)
                    self.stems[atom] = result
        structure = params["structure"]
        leaves = zip(equation.invars, stems, structure.arrays, strict=True)
        for atom, stem, leaf in leaves:
            if stem:
                shape, within = structure.leaves[leaf], frozenset(inside)
                value = self.value(atom)
                meeting = _StemsAt(site, part == INPUT, shape, stem, value, around, within)
                self.meetings.append(meeting)
        return [result] * len(stems)

    def rename(self, equation: Equation) -> None:
        """Identify the results of a mark with its operands."""
        for atom, out in zip(equation.invars, equation.outvars, strict=True):
            self.first[out] = self.value(atom)

    def value(self, atom: Atom) -> int:
        """A number that identifies a value; one that enters a jit gets another number there."""
        return id(atom) if jaxprs.is_literal(atom) else self.first.get(atom, id(atom))

    def stack(self) -> tuple[str, ...]:
        """The calls that are open, outermost first."""
        return tuple(map(_site_of, self.open))

    def placed(self, stems: _Stems) -> _Stems:
        """Stems of an inner jaxpr, as seen from here: nested in the open calls."""
        around = self.stack()
        if not around or not stems:
            return stems
        return frozenset(
            s if isinstance(s, int) else dataclasses.replace(s, within=(*around, *s.within))
            for s in stems
        )

    def _close(self, site: str) -> set[str]:
        """End the innermost call of a site, and every call still open in it."""
        inside: set[str] = set()
        while any(one.site == site for one in reversed(self.open)):
            closed = self.open.pop()
            self.stems.update(closed.outside)
            inside = closed.inside
            self.add(inside)
            if closed.site == site:
                break
        return inside

    def add(self, sites: Iterable[str]) -> None:
        self.sites.update(sites)
        if self.open:  # what is around it learns them when it closes
            self.open[-1].inside.update(sites)

    def take(self, flow: _Flow, stems: Sequence[_Stems]) -> None:
        """Add the meetings of an inner jaxpr, as seen from here."""
        around = self.stack()
        for meeting in flow.meetings:
            self.meetings.append(
                dataclasses.replace(
                    meeting,
                    stems=_resolved(self.placed(meeting.stems), stems),
                    around=(*around, *meeting.around),
                )
            )
        self.add(flow.sites)
