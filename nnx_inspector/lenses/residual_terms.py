"""Which sites' outputs are added, and only added, to make a value: read from the traced program.

A residual stream is a sum of the embedding and of what each block adds. The walk goes back from the
value through additions, changes of dtype, inner jits and the carries of scans. A site whose output
contains the stream that it received (a block) is entered; any other is an addend. Whatever else the
walk ends at, such as a bias or a product that no module returns, is not named. Computes nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from nnx_inspector._compat import jaxprs
from nnx_inspector.hooks.sites import parse_key, split_operation
from nnx_inspector.program.analysis.equations import bodies_of
from nnx_inspector.program.choices.frames import Frame
from nnx_inspector.program.marks import INPUT, OUTPUT, mark
from nnx_inspector.typing import Atom, Equation, Jaxpr, Owner

_IDENTITIES = jaxprs.IDENTITIES | {"convert_element_type", "broadcast_in_dim"}
"""Primitives whose result is their operand; a broadcast, for an embedding of the positions."""


ResidualTerm = tuple[str, int]
"""A site, and the number of the array among those that it returns."""


@dataclasses.dataclass(frozen=True)
class _Sum:
    """The addends, the carries of loops, the sites that receive a part, and whether a block was
    entered.
    """

    addends: tuple[ResidualTerm, ...] = ()
    carries: tuple[tuple[int, int], ...] = ()
    residual: bool = False
    received: frozenset[str] = frozenset()

    def __add__(self, other: _Sum) -> _Sum:
        return _Sum(
            self.addends + other.addends,
            self.carries + other.carries,
            self.residual or other.residual,
            self.received | other.received,
        )


@dataclasses.dataclass
class ResidualSums:
    """A walk through one marked program."""

    jaxpr: Jaxpr
    owner: Owner

    def terms_of(self, site: str, part: str, array: int) -> tuple[ResidualTerm, ...]:
        """The addends of an array that a site's last call receives or returns."""
        return self._sum_of(site, part, array).addends

    def is_sum(self, site: str, part: str, array: int) -> bool:
        """Whether such an array is a sum, if only of one, and not computed from it."""
        found = self._sum_of(site, part, array)
        return bool(found.addends or found.carries)

    def _sum_of(self, site: str, part: str, array: int) -> _Sum:
        found = self._find_mark(Frame(self.jaxpr), site, part)
        return _Sum() if found is None else self._sum_at(found[0], found[1].invars[array])

    def _find_mark(self, frame: Frame, site: str, part: str) -> tuple[Frame, Any] | None:
        for equation in reversed(frame.bare.eqns):
            if self._is_mark(equation, part) and equation.params["site"] == site:
                return frame, equation
            for body in bodies_of(equation):
                inner = Frame(body.jaxpr, outer=frame, equation=equation, body=body)
                found = self._find_mark(inner, site, part)
                if found is not None:
                    return found
        return None

    def _is_mark(self, equation: Equation, part: str) -> bool:
        if equation.primitive is not mark or equation.params["owner"] != self.owner:
            return False
        return equation.params["part"] == part

    def _sum_at(self, frame: Frame, atom: Atom) -> _Sum:
        while True:
            if jaxprs.is_literal(atom):
                return _Sum()
            if atom not in frame.made:
                origin = self._origin(frame, atom)
                if not isinstance(origin, tuple):
                    return origin
                frame, atom = origin
                continue
            _, equation = frame.made[atom]
            position = equation.outvars.index(atom)
            name = equation.primitive.name
            if name in ("add", "add_any"):
                first, second = equation.invars
                return self._sum_at(frame, first) + self._sum_at(frame, second)
            if name == "sub":  # what is subtracted is not added
                atom = equation.invars[0]
                continue
            if self._is_mark(equation, INPUT):
                inner = self._sum_at(frame, equation.invars[position])
                return inner + _Sum(received=frozenset([equation.params["site"]]))
            if self._is_mark(equation, OUTPUT):
                return self._sum_at_site(frame, equation, position)
            if name in _IDENTITIES or equation.primitive is mark:
                atom = equation.invars[position if equation.primitive is mark else 0]
                continue
            return self._sum_of_body(frame, equation, position)

    def _sum_at_site(self, frame: Frame, equation: Equation, position: int) -> _Sum:
        site = equation.params["site"]
        path, _ = parse_key(site)
        inner = self._sum_at(frame, equation.invars[position])
        if split_operation(site)[1]:  # it is a sum, or it is an addend
            a_sum = any(not s.startswith(f"{site}.") for s, _ in inner.addends)
            return inner if a_sum or inner.carries else _Sum(((site, position),))
        outside = any(parse_key(s)[0][: len(path)] != path for s, _ in inner.addends)
        if outside or inner.carries or inner.residual or site in inner.received:
            return dataclasses.replace(inner, residual=True)
        return _Sum(((site, position),))

    def _origin(self, frame: Frame, atom: Atom) -> _Sum | tuple[Frame, Any]:
        """Where an input of an inner jaxpr comes from."""
        if frame.outer is None or frame.body is None or frame.body.operands is None:
            return _Sum()
        try:
            number = frame.bare.invars.index(atom)
        except ValueError:  # a constant
            return _Sum()
        carried = number - frame.body.consts
        if frame.body.carry:
            is_carry = 0 <= carried < frame.body.carry
            return _Sum(carries=((id(frame.equation), carried),)) if is_carry else _Sum()
        if frame.body.taken[number] is not None:
            return _Sum()
        return frame.outer, frame.equation.invars[frame.body.operands[number]]

    def _sum_of_body(self, frame: Frame, equation: Equation, position: int) -> _Sum:
        """The sum that an equation with one jaxpr returns."""
        bodies = bodies_of(equation)
        if len(bodies) != 1 or bodies[0].results is None or position not in bodies[0].results:
            return _Sum()
        body = bodies[0]
        results = body.results or ()
        number = results.index(position)
        inner = Frame(body.jaxpr, outer=frame, equation=equation, body=body)
        atom = inner.bare.outvars[number]
        if not body.carry:
            return _Sum() if body.given[number] is not None else self._sum_at(inner, atom)
        if number >= body.carry or body.times is None or body.operands is None:
            return _Sum()
        found = self._sum_at(inner, atom)
        if [c for c in found.carries if c[0] == id(equation)] != [(id(equation), number)]:
            return _Sum()  # it is not the old value plus something
        around = tuple(c for c in found.carries if c[0] != id(equation))
        start = equation.invars[body.operands[body.consts + number]]
        rest = dataclasses.replace(found, carries=around)
        return self._sum_at(frame, start) + rest
