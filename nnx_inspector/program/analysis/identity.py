"""Which variables of a jaxpr hold the same value, read from the program alone.

A parameter that enters an inner jit, remat, scan or cond and comes out unchanged becomes another
variable of the jaxpr with the same value; this module follows it back. Invariant: values reported
as the same are the same in every run; others may still be equal by chance.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from nnx_inspector._compat import jaxprs
from nnx_inspector.program.analysis.equations import Body, bodies_of
from nnx_inspector.typing import Atom, Equation, Jaxpr, OpenJaxpr

Order = tuple[int, ...] | None
"""A permutation of axes, or None for none."""

IDENTITIES = jaxprs.IDENTITIES | {"nnx_inspector_mark", "nnx_inspector_parameter"}
"""The primitives whose results are their operands: jax's and ours."""
CASTS = IDENTITIES | {"convert_element_type", "reduce_precision"}
"""The same, and those that change nothing but the dtype."""
_IDENTITY_IF_SAME_TYPE = {"reshape", "convert_element_type", "broadcast_in_dim"}


class Values:
    """The values of one jaxpr, each with its origin."""

    def __init__(
        self,
        jaxpr: Jaxpr | Equation,
        known: dict[int, tuple[OpenJaxpr, list[tuple[int, Order] | None]]] | None = None,
    ):
        self._bare, _ = jaxprs.open_jaxpr(jaxpr)
        self._made: dict[Atom, tuple[Equation, int]] | None = None
        self._known = {} if known is None else known

    def same(self, a: Atom, b: Atom) -> bool:
        """Whether two of the jaxpr's variables (or literals) hold the same value."""
        return a is b or self.origin(a) == self.origin(b)

    def origin(self, atom: Atom) -> tuple[Hashable, Order]:
        """The earliest variable with this value, and the permutation of its axes that gives it."""
        if self._made is None:
            self._made = {v: (e, i) for e in self._bare.eqns for i, v in enumerate(e.outvars)}
        order: Order = None
        while True:
            if jaxprs.is_literal(atom):
                value = np.asarray(atom.val)
                return (str(atom.aval), value.tobytes()), order
            if atom not in self._made:
                return atom, order
            equation, position = self._made[atom]
            passed = self.passed_through(equation, position)
            if passed is None:
                return atom, order
            operand, first = passed
            atom, order = equation.invars[operand], _compose(order, first)

    def passed_through(self, equation: Equation, position: int) -> tuple[int, Order] | None:
        """The operand that an equation's result equals, with the order of axes, or None."""
        name, params = equation.primitive.name, equation.params
        if name in IDENTITIES:
            return position, None
        if name == "transpose":
            return 0, tuple(params["permutation"])
        if name in _IDENTITY_IF_SAME_TYPE:
            a, b = equation.invars[0].aval, equation.outvars[0].aval
            return (0, None) if (a.shape, a.dtype) == (b.shape, b.dtype) else None
        found = {
            self._handed_on(body, number)
            for body in bodies_of(equation)
            for number, result in enumerate(body.results or ())
            if result == position
        }
        return found.pop() if len(found) == 1 else None

    def _handed_on(self, body: Body, number: int) -> tuple[int, Order] | None:
        """The equation's operand that a body's output equals, with the order of axes, or None."""
        found = self._results(body.jaxpr)[number]
        if found is None or body.operands is None:
            return None
        i, order = found
        carried = number + body.consts if number < body.carry else None
        in_parts = body.taken[i] is not None or body.given[number] is not None
        if (
            body.taken[i] != body.given[number]
            or (in_parts and order is not None)
            or (carried is not None and found != (carried, None))
        ):
            return None
        return body.operands[i], order

    def _results(self, jaxpr: Jaxpr) -> Sequence[tuple[int, Order] | None]:
        """For each result of an inner jaxpr, the input that it equals, with the order of axes, or
        None.
        """
        bare, _ = jaxprs.open_jaxpr(jaxpr)
        if id(bare) not in self._known:
            values = Values(bare, self._known)
            numbers: dict[Hashable, int] = {v: i for i, v in enumerate(bare.invars)}
            found = []
            for atom in bare.outvars:
                origin, order = values.origin(atom)
                number = numbers.get(origin)
                found.append(None if number is None else (number, order))
            self._known[id(bare)] = (bare, found)  # the jaxpr too, so its id is not reused
        return self._known[id(bare)][1]


def forwarded_operands(equation: Equation) -> list[int | None]:
    """For each result of an equation, the number of the operand that it equals, or None."""
    values = Values(equation)
    found = [values.passed_through(equation, i) for i in range(len(equation.outvars))]
    return [None if one is None or one[1] is not None else one[0] for one in found]


def _compose(order: Order, first: Order) -> Order:
    """The order of axes after permuting first by `first`, then by `order`."""
    if first is None or order is None:
        whole = order if first is None else first
    else:
        whole = tuple(first[i] for i in order)
    return None if whole is None or whole == tuple(range(len(whole))) else whole
