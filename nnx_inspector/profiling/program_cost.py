"""What a traced program computes for each module, and what it keeps for the backward pass.

FLOPs are counted from shapes, as in `nni.trace`. What is kept are the values that the forward pass
computes and the backward pass reads: parameters and inputs, which exist anyway, count nothing.
Invariant: a value counts once, at the module that computes it. XLA may keep less: it computes a
cheap value again where that is faster. Runs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.sources import name_stack_of
from nnx_inspector.profiling.owners import phase_in
from nnx_inspector.profiling.scopes import path_in
from nnx_inspector.program.analysis.cost import bytes_of, equation_flops, is_arithmetic
from nnx_inspector.program.analysis.equations import ROW, Body, bodies_of, is_call, kind_of
from nnx_inspector.program.marks import mark
from nnx_inspector.typing import Atom, Equation, Value

_VIEWS: Final = frozenset(["reshape", "squeeze", "expand_dims", "copy_p", "name", mark.name])
"""Operations whose result has the memory of their operand."""

ModulePath = str | None
"""A module's path; None outside the model."""
_Producers = dict[Value, tuple[Equation, int]]
"""A variable -> the equation that computes it, and the number of the result."""


@dataclasses.dataclass
class ProgramCost:
    """What one run of a program does, by module.

    Attributes:
        flops: forward and backward; None if part of it is not known.
        kept: the bytes that each keeps for the backward pass.
        products: the FLOPs of matrix products, by the dtype of their operands.
        backward: whether it has a backward pass.
        forward: whether the forward pass of its backward pass is in it too.
    """

    flops: dict[ModulePath, float | None] = dataclasses.field(default_factory=lambda: {})
    kept: dict[ModulePath, int] = dataclasses.field(default_factory=lambda: {})
    products: dict[str, float] = dataclasses.field(default_factory=lambda: {})
    backward: bool = False
    forward: bool = False


def cost_of_program(program: object) -> ProgramCost:
    """Read a jaxpr."""
    found = ProgramCost()
    _add_flops(program, "", 1, found)
    for of, size in _kept_values(program, ""):
        found.kept[of] = found.kept.get(of, 0) + size
    return found


def _add_flops(jaxpr: object, around: str, times: int | None, found: ProgramCost) -> None:
    for equation in jaxprs.open_jaxpr(jaxpr)[0].eqns:
        names = f"{around}/{name_stack_of(equation)}"
        found.backward |= "transpose(" in names
        found.forward |= "jvp(" in names and "transpose(" not in names
        bodies = () if is_arithmetic(equation) else bodies_of(equation)
        if bodies:
            for body in _executed_bodies(bodies, names):
                within = None if times is None or body.times is None else times * body.times
                _add_flops(body.jaxpr, names, within, found)
            continue
        flops, of = equation_flops(equation), path_in(names)
        if (
            flops == 0 or phase_in(names) is None
        ):  # neither a module's nor the loss's: the update, say
            continue
        known = found.flops.get(of, 0.0)
        if flops is None or times is None or known is None:
            found.flops[of] = None
            continue
        found.flops[of] = known + flops * times
        if "dot" in equation.primitive.name:
            kind = equation.invars[0].aval.dtype.name
            found.products[kind] = found.products.get(kind, 0.0) + flops * times


def _executed_bodies(bodies: tuple[Body, ...], names: str) -> list[Body]:
    """The bodies of an equation; of those of which one runs, the one with most arithmetic."""
    every = [body for body in bodies if not body.conditional]
    branches: list[tuple[float, Body]] = []
    for body in bodies:
        if body.conditional:
            alone = ProgramCost()
            _add_flops(body.jaxpr, names, 1, alone)
            branches.append((sum(f or 0.0 for f in alone.flops.values()), body))
    return [*every, max(branches, key=lambda one: one[0])[1]] if branches else every


def _kept_values(jaxpr: object, around: str) -> Iterator[tuple[ModulePath, int]]:
    """The values of a jaxpr, and of those inside it, that its backward pass reads: the module that
    computes each, and its bytes.
    """
    bare, _ = jaxprs.open_jaxpr(jaxpr)
    producers: _Producers = {}
    counted: set[Value] = set()
    for equation in bare.eqns:
        names = f"{around}/{name_stack_of(equation)}"
        if phase_in(names) != "backward":
            producers.update((v, (equation, i)) for i, v in enumerate(equation.outvars))
            if not is_arithmetic(equation):
                for body in bodies_of(equation):
                    yield from _kept_values(body.jaxpr, names)
            continue
        for atom in equation.invars:
            if jaxprs.is_literal(atom):
                continue
            value = _aliased_value(atom, producers)
            if value not in producers or value in counted:
                continue
            counted.add(value)
            producer, number = producers[value]
            of, _, inside = _producer(producer, number, f"{around}/{name_stack_of(producer)}")
            if phase_in(inside) == "forward":
                yield of, bytes_of(value.aval)


@dataclasses.dataclass(frozen=True)
class LargestArray:
    """The largest array that a program computes, with its shape in words."""

    of: ModulePath
    primitive: str
    shape: str
    size: int


def largest_array(jaxpr: object, around: str = "") -> LargestArray | None:
    """The largest array that a jaxpr computes; of several the first."""
    found: list[LargestArray] = []
    for equation in jaxprs.open_jaxpr(jaxpr)[0].eqns:
        names = f"{around}/{name_stack_of(equation)}"
        if not is_arithmetic(equation):
            inner = [largest_array(body.jaxpr, names) for body in bodies_of(equation)]
            found += [one for one in inner if one is not None]
        for number, out in enumerate(equation.outvars):
            if size := bytes_of(out.aval):
                of, primitive, _ = _producer(equation, number, names)
                found.append(LargestArray(of, primitive, out.aval.str_short(), size))
    return max(found, key=lambda one: one.size, default=None)


def _aliased_value(value: Value, producers: _Producers) -> Value:
    """The value that has the memory of this one."""
    while value in producers:
        equation, number = producers[value]
        if equation.primitive.name in _VIEWS and not jaxprs.is_literal(equation.invars[number]):
            value = equation.invars[number]
            continue
        forwarded = _forwarded_operand(equation, number)
        if forwarded is None or jaxprs.is_literal(forwarded):
            return value
        value = forwarded
    return value


def _forwarded_operand(equation: Equation, number: int) -> Atom | None:
    """The operand that a function hands on as this result, or None."""
    if is_arithmetic(equation) or not (is_call(equation) or kind_of(equation) == "jit"):
        return None
    for body in bodies_of(equation):
        bare, _ = jaxprs.open_jaxpr(body.jaxpr)
        out = bare.outvars[number]
        if body.operands is not None and not jaxprs.is_literal(out) and out in bare.invars:
            return equation.invars[body.operands[bare.invars.index(out)]]
    return None


def _producer(equation: Equation, number: int, names: str) -> tuple[ModulePath, str, str]:
    """The module and the primitive that compute a result of an equation, within it if it holds
    jaxprs; and all names around that.
    """
    for body in () if is_arithmetic(equation) else bodies_of(equation):
        bare, _ = jaxprs.open_jaxpr(body.jaxpr)
        if body.results is None or number not in body.results:
            continue
        out = bare.outvars[body.results.index(number)]
        if not jaxprs.is_literal(out) and out in bare.invars and body.carry:
            carried = bare.invars.index(out) - body.consts
            if 0 <= carried < body.carry and body.given[body.results.index(number)] == ROW:
                out = bare.outvars[carried]  # the iteration before has computed it
        inside = {v: (one, i) for one in bare.eqns for i, v in enumerate(one.outvars)}
        if not jaxprs.is_literal(out) and out in inside:
            one, i = inside[out]
            return _producer(one, i, f"{names}/{name_stack_of(one)}")
    return path_in(names), equation.primitive.name, names
