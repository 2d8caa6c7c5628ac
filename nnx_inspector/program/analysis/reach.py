"""What each value that a call returns is computed from, as a graph that tells calls apart.

`dataflow` joins all calls of a site, and all arrays that one returns: enough to draw, but not to
say that one fault led to another. Here each array that each call returns is a value of its own, and
so is what the model receives, and the parameters of a module. An inner jaxpr is walked once for
each time it is entered, a loop until nothing changes. Invariant: a path from one value to another
is there if and only if the program computes the one from the other, except that all elements of an
array count as one.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final

from nnx_inspector._compat import eqn_params, jaxprs
from nnx_inspector.program.analysis.equations import Body, bodies_of
from nnx_inspector.program.marks import OUTPUT, mark
from nnx_inspector.recordings.facts import BACKWARDS, CARRIED, CHOICE, FIRST, INNER, Flow, Role
from nnx_inspector.typing import Atom, Equation, Jaxpr, OpenJaxpr, Owner

MOST_VALUES: Final = 8192
"""A program in which calls return more arrays has no graph: what is unknown explains nothing."""

_Stem = tuple[int, int]
"""The number of a value, and how it gets here: a sum of flags, such as `CHOICE`."""
_Stems = frozenset[_Stem]
_NONE: _Stems = frozenset()
_LOOPS: Final = CARRIED | BACKWARDS | FIRST


class TooLargeError(Exception):
    """The program has more than `MOST_VALUES` values."""


def flow_of(jaxpr: Jaxpr, owner: object, received: Iterable[int], held: Mapping[int, str]) -> Flow:
    """The graph of a marked program.

    Args:
        jaxpr: the program, with an owner's marks.
        received: the numbers of the inputs that are data.
        held: for the inputs that are parameters, the sites of the modules that hold them.

    Raises:
        TooLargeError: there are too many values.
    """
    bare, _ = jaxprs.open_jaxpr(jaxpr)
    walk = _Walk(owner)
    data = set(received)
    entering: list[_Stems] = []
    for number in range(len(bare.invars)):
        if number in data:
            entering.append(walk.stems("", "", Role.INPUT))
        elif number in held:
            entering.append(walk.stems(held[number], held[number], Role.PARAMETERS))
        else:
            entering.append(_NONE)
    walk.enter(bare, entering, (), _Position())
    return _reduced_graph(walk)


@dataclasses.dataclass(frozen=True)
class _Position:
    """Where a jaxpr is entered: in which outermost loop, and what decided that it runs."""

    loop: int = -1
    decided: _Stems = _NONE


class _Walk:
    def __init__(self, owner: Owner):
        self.owner = owner
        self.numbers: dict[Hashable, int] = {}
        self.values: list[tuple[str, Role, int]] = []
        self.edges: set[tuple[int, int, int]] = set()
        self.loops: dict[Hashable, int] = {}

    def stems(self, key: object, site: str, role: Role, loop: int = -1) -> _Stems:
        """The stems of a value that begins here, which gets a number when it is first seen."""
        number = self.numbers.setdefault((role, key), len(self.values))
        if number == len(self.values):
            if number == MOST_VALUES:
                raise TooLargeError
            self.values.append((site, role, loop))
        return frozenset([(number, 0)])

    def enter(
        self, bare: OpenJaxpr, entering: Sequence[_Stems], path: tuple[int, ...], where: _Position
    ) -> list[_Stems]:
        known = dict(zip(bare.invars, entering, strict=True))

        def read(atom: Atom) -> _Stems:
            return _NONE if jaxprs.is_literal(atom) else known.get(atom, _NONE)

        for number, equation in enumerate(bare.eqns):
            stems = [read(v) for v in equation.invars]
            if equation.primitive is mark or equation.primitive.name == "optimization_barrier":
                results = self._mark(equation, stems, (*path, number), where)
            else:
                results = self._apply(equation, stems, (*path, number), where)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(v) for v in bare.outvars]

    def _mark(
        self, equation: Equation, stems: list[_Stems], path: tuple[int, ...], where: _Position
    ) -> list[_Stems]:
        params = equation.params
        if params.get("part") != OUTPUT or params["owner"] != self.owner:
            return stems
        out: list[_Stems] = []
        first: dict[Atom, int] = {}  # an array that is returned twice is one value
        for i, (atom, stem) in enumerate(zip(equation.invars, stems, strict=True)):
            i = i if jaxprs.is_literal(atom) else first.setdefault(atom, i)
            own = self.stems((*path, i), params["site"], Role.OUTPUT, where.loop)
            ((number, _),) = own
            self.edges |= {(one, number, how) for one, how in stem | where.decided}
            out.append(own)
        return out

    def _apply(
        self, equation: Equation, stems: list[_Stems], path: tuple[int, ...], where: _Position
    ) -> list[_Stems]:
        everything = _NONE.union(*stems)
        bodies = () if eqn_params.is_recomputation(equation) else bodies_of(equation)
        if not bodies:
            floats = any(_is_float(v) for v in equation.invars)
            return [
                _with_flag(everything, CHOICE) if floats and not _is_float(v) else everything
                for v in equation.outvars
            ]
        if not any(body.results for body in bodies):  # it is not known how values come out
            inner = [s for b in bodies for s in self._enter(b, stems, path, where)]
            return [everything.union(*inner)] * len(equation.outvars)
        results = [_NONE] * len(equation.outvars)
        for number, body in enumerate(sorted(bodies, key=lambda body: body.tests)):
            chosen, here = _NONE, where
            if body.conditional:
                chosen = _with_flag(stems[0], CHOICE)
                here = dataclasses.replace(where, decided=where.decided | chosen)
            entering, start = [stems[i] for i in body.operands or ()], body.consts
            if body.tests:
                entering[start:] = results
            found = self._enter(body, entering, (*path, number), here)
            for result, out in zip(body.results or (), found, strict=True):
                if result is not None:
                    results[result] |= out | chosen
            if not body.times:  # it may not run at all
                for i, had in enumerate(entering[start : start + body.carry]):
                    results[i] |= had
        return results

    def _enter(
        self, body: Body, stems: Sequence[_Stems], path: tuple[int, ...], where: _Position
    ) -> list[_Stems]:
        bare, _ = jaxprs.open_jaxpr(body.jaxpr)
        if body.operands is None:  # not known how operands enter: all to all
            stems = [_NONE.union(*stems)] * len(bare.invars)
        if body.times == 1 or body.tests or body.conditional:
            return self.enter(bare, stems, path, where)
        return self._loop(body, bare, stems, path, where)

    def _loop(
        self,
        body: Body,
        bare: OpenJaxpr,
        stems: Sequence[_Stems],
        path: tuple[int, ...],
        where: _Position,
    ) -> list[_Stems]:
        start, end = body.consts, body.consts + body.carry
        outermost = where.loop < 0
        turned = BACKWARDS * body.backwards
        around = CARRIED | turned if outermost else INNER
        entering = list(stems)
        if outermost:
            where = dataclasses.replace(where, loop=self.loops.setdefault(path, len(self.loops)))
            entering[start:end] = [_with_flag(one, FIRST | turned) for one in stems[start:end]]
        while True:
            results = self.enter(bare, entering, path, where)
            again = [
                had | _with_flag(out, around)
                for had, out in zip(entering[start:end], results, strict=False)
            ]
            if again == entering[start:end]:
                left = _LOOPS if outermost else INNER
                return [frozenset((n, how & ~left) for n, how in one) for one in results]
            entering[start:end] = again


def _with_flag(stems: _Stems, flag: int) -> _Stems:
    return frozenset((number, how | flag) for number, how in stems)


def _is_float(variable: Atom) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and getattr(dtype, "kind", "V") not in "biu"


def _reduced_graph(walk: _Walk) -> Flow:
    """The graph without what it says twice: edges that other edges imply, and the parameters of
    modules that only these modules use.

    A skip connection would otherwise join each block with every later one.
    """
    into: list[list[_Stem]] = [[] for _ in walk.values]
    for one, number, how in sorted(walk.edges):
        into[number].append((one, how))
    direct, every = [0] * len(into), [0] * len(into)  # bits: what a value is computed from
    edges: list[tuple[int, int, int]] = []
    for number, stems in enumerate(into):
        plain = [one for one, how in stems if how == 0 and one < number]
        chosen = [one for one, how in stems if how & ~CHOICE == 0 and one < number]
        implied = _union(direct[one] for one in plain), _union(every[one] for one in chosen)
        direct[number] = implied[0] | _union(1 << one for one in plain)
        every[number] = implied[1] | _union(1 << one for one in chosen)
        for one, how in stems:
            known = implied[how] if one < number and how in (0, CHOICE) else 0
            if not known >> one & 1:
                edges.append((one, number, how))
    users: dict[int, set[str]] = {}
    for one, number, _ in edges:
        users.setdefault(one, set()).add(walk.values[number][0])
    kept = [
        n for n, (site, role, _) in enumerate(walk.values)
        if role != Role.PARAMETERS or users.get(n, {site}) != {site}
    ]  # fmt: skip
    names = {site: i for i, site in enumerate(dict.fromkeys(v[0] for v in walk.values))}
    place = {n: i for i, n in enumerate(kept)}
    values = [walk.values[n] for n in kept]
    return Flow.of(
        names,
        [(names[site], role, loop) for site, role, loop in values],
        [(place[a], place[b], how) for a, b, how in edges if a in place],
    )


def _union(bits: Iterable[int]) -> int:
    return functools.reduce(operator.or_, bits, 0)
