"""From which inputs of a program the operands of its marks come.

An input is followed into every body, and through what keeps the size of an array: a cast, another
order of axes, an update. What a loop carries comes from what it began with. Invariant: two values
without a common source are computed apart. Changes nothing, and keeps no program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

from nnx_inspector._compat import jaxprs
from nnx_inspector.program.analysis.equations import bodies_of
from nnx_inspector.program.survey import Mark, Survey
from nnx_inspector.typing import Atom, Equation, OpenJaxpr, Var

Sources = frozenset[int]
"""The numbers of a program's inputs, its constants behind them; a negative number stands for a
value that has none of these."""


def input_sources(
    found: Survey, part: str, of_input: Callable[[int], Sources] = lambda n: frozenset([n])
) -> Iterator[tuple[Mark, list[Sources]]]:
    """The marks of one part of a call, in order, with the sources of each operand."""
    within = _JaxprSources(found.jaxpr, of_input)
    for number, item in found.items.items():
        equation = found.jaxpr.eqns[number]
        if item.mark is not None and item.mark.part == part:
            yield item.mark, list(map(within.sources, equation.invars))
        for body, child in zip(bodies_of(equation), item.children, strict=False):
            if child.items and not item.again:
                entering = [equation.invars[n] for n in body.operands or ()]
                yield from input_sources(
                    child, part, functools.partial(_of_operand, within, entering)
                )


def _of_operand(within: _JaxprSources, entering: list[Atom], n: int) -> Sources:
    known = n < len(entering)  # else it is a constant of the body
    return within.sources(entering[n]) if known else frozenset([_token(within, entering, n)])


class _JaxprSources:
    """The values of one jaxpr."""

    def __init__(self, bare: OpenJaxpr, of_input: Callable[[int], Sources]):
        self._made = {v: (e, i) for e in bare.eqns for i, v in enumerate(e.outvars)}
        self._inputs = {v: n for n, v in enumerate((*bare.invars, *bare.constvars))}
        self._of_input, self._bodies = of_input, dict[int, _JaxprSources]()

    def sources(self, value: Atom) -> Sources:
        found, met, ahead = set[int](), set[Atom](), [value]
        while ahead:
            value = ahead.pop()
            if jaxprs.is_literal(value) or value in met:
                continue
            met.add(value)
            if value in self._inputs:
                found |= self._of_input(self._inputs[value])
                continue
            before = self._before(*self._made[value])
            ahead += before
            found |= set[int]() if before else {_token(value)}
        return frozenset(n for n in found if n >= 0) or frozenset(found)

    def _before(self, equation: Equation, position: int) -> list[Var]:
        """The operands that a result comes from."""
        found, bodies = list[Atom](), bodies_of(equation)
        for body in bodies:
            bare, _ = jaxprs.open_jaxpr(body.jaxpr)
            if id(bare) not in self._bodies:
                self._bodies[id(bare)] = _JaxprSources(bare, lambda n: frozenset([n]))
            within, entering = self._bodies[id(bare)], body.operands or ()
            for value, result in zip(bare.outvars, body.results or (), strict=False):
                those = within.sources(value) if result == position else ()
                found += [equation.invars[entering[n]] for n in those if 0 <= n < len(entering)]
        if not bodies:
            result = equation.outvars[position]
            found += [v for v in equation.invars if _has_all_of(v, result)]
        return found


def _has_all_of(operand: Atom, result: Atom) -> bool:
    """Whether a result has a value for each of an operand's and no more, but for axes in front: a
    `vmap` gives what it does not map axes of length 1 there.
    """
    mine, its = (getattr(x.aval, "shape", None) for x in (operand, result))
    if mine is None or its is None:
        return False
    if math.prod(mine) == math.prod(its):
        return True
    mapped = next((i for i, n in enumerate(mine) if n != 1), len(mine))
    return len(mine) == len(its) and mine[mapped:] == its[mapped:]


def _token(*what: object) -> int:
    """Another negative number for each object, as long as all of them live."""
    return -1 - hash(tuple(map(id, what))) % 2**61
