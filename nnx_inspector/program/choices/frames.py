"""The functions of a traced program, each with what is known where it is called.

A value can be followed from a function into the one that calls it, and marks can be put beside the
equation that makes it. Invariant: where a mark cannot be taken out again, none is put.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nnx_inspector._compat import eqn_params, jaxprs
from nnx_inspector._compat.sources import named_scopes_of
from nnx_inspector.program.analysis.equations import CUSTOM, Body, bodies_of, kind_of
from nnx_inspector.typing import Atom, Equation, Jaxpr

_ENTERED = ("jit", "remat", "inline", "scan", "cond")


@dataclasses.dataclass(eq=False)
class Frame:
    """A function of a program.

    Attributes:
        jaxpr: the function, as its equation holds it.
        enters: whether marks in it can be taken out, each value as it is.
        scopes: the names of the scopes around its equation, outermost first.
        outer: the function that calls it, by which equation, and how values enter and leave.
        inner: the functions that it calls, by the number of the equation.
        more: equations to be put behind others, by the number of those.
    """

    jaxpr: Jaxpr
    enters: bool = True
    scopes: tuple[str, ...] = ()
    outer: Frame | None = None
    equation: Any = None
    body: Body | None = None
    inner: dict[int, list[Frame]] = dataclasses.field(default_factory=lambda: {})
    more: dict[int, list[Equation]] = dataclasses.field(default_factory=lambda: {})

    def __post_init__(self) -> None:
        self.bare, _ = jaxprs.open_jaxpr(self.jaxpr)
        # the number of the equation that makes each value here, and the equation
        self.made = {v: (n, e) for n, e in enumerate(self.bare.eqns) for v in e.outvars}

    @functools.cached_property
    def users(self) -> dict[Atom, list[int]]:
        """The numbers of the equations that take each value, in order."""
        found: dict[Atom, list[int]] = {}
        for number, equation in enumerate(self.bare.eqns):
            for v in dict.fromkeys(v for v in equation.invars if not jaxprs.is_literal(v)):
                found.setdefault(v, []).append(number)
        return found

    def functions(self, number: int, equation: Equation, *, finished: bool) -> list[Frame]:
        """The functions that an equation calls in a forward pass, which become `inner`."""
        if eqn_params.is_recomputation(equation):
            return []
        kind, name = kind_of(equation), equation.primitive.name
        enters = kind in _ENTERED or (finished and name in CUSTOM)
        scopes = (*self.scopes, *named_scopes_of(equation))
        found = [
            Frame(body.jaxpr, self.enters and enters, scopes, self, equation, body)
            for body in bodies_of(equation)
            if not body.tests and body.operands is not None and body.results is not None
        ]
        if found:
            self.inner[number] = found
        return found

    def origin(self, variable: Atom) -> tuple[Frame, Atom]:
        """The function in which a value is made, and its variable there."""
        frame = self
        while frame.outer is not None:
            operand = frame.operand(variable)
            if operand is None or jaxprs.is_literal(operand):
                break
            frame, variable = frame.outer, operand
        return frame, variable

    def operand(self, variable: Atom) -> Atom | None:
        """What the caller gives as an input, as it is; None if the value is no such input."""
        body, inputs = self.body, list(self.bare.invars)
        if body is None or variable in self.made or variable not in inputs:
            return None
        number = inputs.index(variable)
        carried = body.consts <= number < body.consts + body.carry
        if carried or body.taken[number] is not None or body.operands is None:
            return None
        return self.equation.invars[body.operands[number]]

    def within(self, number: int, variable: Atom) -> tuple[Frame, Atom] | None:
        """The function that makes a result of one of this one's equations, and its variable there;
        None if there is no such one.
        """
        found = self.inner.get(number, [])
        _, equation = self.made[variable]
        if len(found) != 1 or found[0].body is None:
            return None
        (inner,), at = found, equation.outvars.index(variable)
        results, given = found[0].body.results or (), found[0].body.given
        for atom, result, part in zip(inner.bare.outvars, results, given, strict=True):
            if result == at and part is None and not jaxprs.is_literal(atom):
                return inner, atom
        return None

    def rebuilt(self) -> Jaxpr:
        """The function with the equations that were added; the same object if there are none."""
        equations: list[Equation] = []
        changed = bool(self.more)
        for number, equation in enumerate(self.bare.eqns):
            inner = self.inner.get(number, [])
            new = {id(one.jaxpr): made for one in inner if (made := one.rebuilt()) is not one.jaxpr}
            if new:
                changed = True
                params = jaxprs.map_jaxprs(
                    equation.params, lambda jaxpr, new=new: new.get(id(jaxpr), jaxpr)
                )
                equation = equation.replace(params=params)
            equations += [equation, *self.more.get(number, ())]
        if not changed:
            return self.jaxpr
        return jaxprs.edit_jaxpr(self.jaxpr, equations=equations, outputs=self.bare.outvars)


def backwards(
    frame: Frame, variable: Atom, made_of: Callable[[Equation, Atom], Sequence[Atom]]
) -> Iterator[tuple[Frame, Atom, Equation | None]]:
    """The values that a value is made of, itself included, each with its function, and with the
    equation that makes it there (None if it is an input). Literals are left out.

    Args:
        made_of: the operands that are followed further, of an equation and the value it makes.
    """
    waiting, seen = [(frame, variable)], set[tuple[Frame, Atom]]()
    while waiting:
        here, one = waiting.pop()
        if jaxprs.is_literal(one):
            continue
        here, one = here.origin(one)
        if (here, one) in seen:
            continue
        seen.add((here, one))
        number, equation = here.made.get(one) or (-1, None)
        within = None if equation is None else here.within(number, one)
        if within is not None:
            waiting.append(within)
            continue
        yield here, one, equation
        if equation is not None:
            waiting += [(here, v) for v in made_of(equation, one)]
