"""How far a program moves the parameters of the calls that it makes.

A parameter's update is what goes in and what comes back out. In a loop that carries it, that is
sure: what an iteration returns takes the place of what it got. At the end of the program it is the
result that is the input with something added, as of every optimizer, and perhaps chosen by a mask,
clipped, or shrunk by a number near 1. If several results are, it is the one with its name. If none
is, as of a copy in float32 that the parameters are cast from, it is what nnx.jit gives back to the
Variable. What is added is the update that is meant, which the dtype may round to nothing.
Invariant: where that does not say which, or nothing moves, no update is seen. Changes no equation.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Final

from nnx_inspector._compat import jaxprs, jit
from nnx_inspector.program.analysis.equations import ROW, Body, bodies_of, kind_of
from nnx_inspector.program.analysis.identity import CASTS, Order, Values
from nnx_inspector.program.editing.input_sources import input_sources
from nnx_inspector.program.marks import BEGIN
from nnx_inspector.program.survey import Mark, Survey
from nnx_inspector.typing import Atom, Equation, OpenJaxpr

Carried = Mapping[int, bool]
"""The inputs that a value carries, each with whether it is unchanged."""

_SAME_VALUE: Final = CASTS | {"reshape"}
_WRITTEN: Final = {
    "sub", "dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter-sub",
    "scatter_sub",
}  # fmt: skip
_NEAR_ONE: Final = (0.5, 1.5)
"""A number between these keeps a parameter when it is multiplied by it, as 1 - rate * decay does.
What is multiplied by another one is a part of an average, of a gradient, or of a decay."""
_NOTHING: Final[Carried] = {}


class ScannedValues:
    """Which values of a program a scan takes by rows, in it or in the programs that it calls."""

    def __init__(self, bare: OpenJaxpr):
        self._values, self._found = Values(bare), set[tuple[Hashable, Order]]()
        for equation in bare.eqns:
            for body in bodies_of(equation):
                for operand in _taken_by_rows(equation, body):
                    if not jaxprs.is_literal(operand):
                        self._found.add(self._values.origin(operand))

    def holds(self, atom: Atom) -> bool:
        return not jaxprs.is_literal(atom) and self._values.origin(atom) in self._found


def _taken_by_rows(equation: Equation, body: Body) -> Iterator[Atom]:
    inner, bare = None, jaxprs.open_jaxpr(body.jaxpr)[0]
    for i, position in enumerate(body.operands or ()):
        if body.taken[i] == ROW:
            yield equation.invars[position]
        elif body.taken[i] is None and body.times == 1 and bare.invars[i].aval.shape:
            inner = inner or ScannedValues(bare)
            if inner.holds(bare.invars[i]):
                yield equation.invars[position]


def inputs_of_calls(found: Survey) -> Iterator[tuple[Mark, str, int]]:
    """Each parameter of a call that begins in a program, with the one input that it comes from."""
    count = len(found.jaxpr.invars)
    for mark, (_, *sources) in input_sources(found, BEGIN):
        for path, those in zip(mark.begun.paths, sources, strict=False):
            if path in mark.begun.weights and len(those) == 1 and 0 <= min(those) < count:
                yield mark, path, min(those)


def results_of(bare: OpenJaxpr, inputs: Sequence[int]) -> dict[int, Atom]:
    """For each of these inputs of a whole program, the result that takes its place, if one does."""
    carried, given_back = _CarriedInputs().of(bare), _nnx_results(bare)
    moves = any(not same for one in carried for n, same in one.items() if n in inputs)
    found: dict[int, Atom] = {}
    every = {n for one in carried for n in one}
    for n in inputs:
        if n not in every and n in given_back:
            found[n] = given_back[n]
    for n in inputs if moves else ():
        aval = bare.invars[n].aval
        those = [
            (i, v)
            for i, v in enumerate(bare.outvars)
            if n in carried[i] and (v.aval.shape, v.aval.dtype) == (aval.shape, aval.dtype)
        ]
        changed = [(i, v) for i, v in those if not carried[i][n]] or those
        if len(changed) > 1:  # a copy that follows it carries what it was before, too
            fewest = min(len(carried[i]) for i, _ in changed)
            changed = [(i, v) for i, v in changed if len(carried[i]) == fewest]
        if len(changed) > 1:
            named = _by_name(bare, n, [i for i, _ in changed])
            changed = [(i, v) for i, v in changed if i == named]
        if len(changed) == 1:
            found[n] = changed[0][1]
    return found


def added_to(bare: OpenJaxpr, results: Mapping[int, Atom]) -> dict[int, Atom]:
    """For inputs of a program and what takes their place, what is added to each (or subtracted), if
    that is all that makes one of the other: not if it is clipped, or chosen by a mask.
    """
    made = {v: equation for equation in bare.eqns for v in equation.outvars}
    carried = _CarriedInputs().each(bare)
    found: dict[int, Atom] = {}
    for n, atom in results.items():
        equation = made.get(atom)
        while equation is not None and equation.primitive.name in _SAME_VALUE:
            atom = equation.invars[equation.outvars.index(atom)]
            equation = None if jaxprs.is_literal(atom) else made.get(atom)
        if equation is None or equation.primitive.name not in ("add", "sub"):
            continue
        mine = [not jaxprs.is_literal(x) and n in carried.get(x, ()) for x in equation.invars]
        if mine[0] == mine[1] or (mine[1] and equation.primitive.name == "sub"):
            continue
        (other,) = (x for x, is_mine in zip(equation.invars, mine, strict=True) if not is_mine)
        if not jaxprs.is_literal(other) and other.aval.shape == bare.invars[n].aval.shape:
            found[n] = other
    return found


def _by_name(bare: OpenJaxpr, n: int, results: Sequence[int]) -> int | None:
    """The only one of some results whose name is that of an input: the longest common end, in the
    order of those that share it.
    """
    inputs, outputs = jit.input_names(bare)[1], jit.result_names(bare)
    if not inputs or not outputs:
        return None
    found: list[int] = []
    for i in results:
        most = max(_common(name, outputs[i]) for name in inputs)
        end = outputs[i][len(outputs[i]) - most :]
        mine = [k for k, name in enumerate(inputs) if most and name.endswith(end)]
        its = [k for k, name in enumerate(outputs) if most and name.endswith(end)]
        if n in mine and len(mine) == len(its) and mine.index(n) == its.index(i):
            found.append(i)
    return found[0] if len(found) == 1 else None


_OF_NNX: Final = re.compile(r"(.*)(\.states\[.*)")


def _nnx_results(bare: OpenJaxpr) -> dict[int, Atom]:
    """For inputs that nnx.jit took out of a module, the result that it puts back in its place.

    Its function returns its arguments first, in order, and the arrays of each are named alike.
    """
    inputs, results = jit.input_names(bare)[1], jit.result_names(bare)
    named = [(n, found) for n, name in enumerate(inputs) if (found := _OF_NNX.fullmatch(name))]
    pairs = zip(results, bare.outvars, strict=False)
    back = [(_OF_NNX.fullmatch(name), v) for name, v in pairs if re.match(r"result\[[01]\]", name)]
    after = {(found[1], found[2]): v for found, v in back if found}
    roots, again = (
        list(dict.fromkeys(r)) for r in ((f[1] for _, f in named), (r for r, _ in after))
    )
    if len(roots) != len(again):
        return {}
    at = dict(zip(roots, again, strict=True))
    of = {n: after.get((at[found[1]], found[2])) for n, found in named}
    found = {n: v for n, v in of.items() if v is not None}
    kinds = ((bare.invars[n].aval, v.aval) for n, v in found.items())
    return found if all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in kinds) else {}


def _common(a: str, b: str) -> int:
    """The length of the common end of two names, in whole parts: `['up']['kernel']`."""
    most = 0
    for i in range(1, min(len(a), len(b)) + 1):
        if a[-i] != b[-i]:
            break
        if a[-i] in ".[":
            most = i
    return most


class _CarriedInputs:
    """Which inputs the results of a program carry; each of its bodies is read once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[OpenJaxpr, list[Carried]]] = {}

    def of(self, bare: OpenJaxpr) -> list[Carried]:
        if id(bare) not in self._known:
            self._known[id(bare)] = bare, self._read(bare)
        return self._known[id(bare)][1]

    def _read(self, bare: OpenJaxpr) -> list[Carried]:
        known = self.each(bare)
        return [_NOTHING if jaxprs.is_literal(x) else known.get(x, _NOTHING) for x in bare.outvars]

    def each(self, bare: OpenJaxpr) -> dict[Atom, Carried]:
        """Which inputs each variable of a program carries."""
        known: dict[Atom, Carried] = {v: {n: True} for n, v in enumerate(bare.invars)}
        made: dict[Atom, Equation] = {}

        def read(atom: Atom) -> Carried:
            return _NOTHING if jaxprs.is_literal(atom) else known.get(atom, _NOTHING)

        for equation in bare.eqns:
            operands = list(map(read, equation.invars))
            made.update(dict.fromkeys(equation.outvars, equation))
            if any(operands):
                known.update(
                    zip(equation.outvars, self._through(equation, operands, made), strict=True)
                )
        return known

    def _through(
        self, equation: Equation, operands: Sequence[Carried], made: Mapping[Atom, Equation]
    ) -> list[Carried]:
        name, count = equation.primitive.name, len(equation.outvars)
        if name in _SAME_VALUE:
            return list(operands[:count])
        if name in ("add", "add_any", "max", "min", "clamp"):
            return [_changed(*operands)]
        if name in _WRITTEN:
            return [_changed(operands[0])]
        if name == "select_n":
            return [_carried_by_all(operands[1:])]
        if name in ("mul", "div"):
            x, y = operands
            by = equation.invars[1] if x else equation.invars[0]
            keeps = not (x and y) and (x or name == "mul") and _is_near_one(by, made)
            return [_changed(x or y)] if keeps else [_NOTHING]
        if kind_of(equation) or bodies_of(equation):
            return self._through_bodies(equation, operands)
        return [_NOTHING] * count

    def _through_bodies(self, equation: Equation, operands: Sequence[Carried]) -> list[Carried]:
        ways: list[list[Carried]] = [[] for _ in equation.outvars]
        for body in bodies_of(equation):
            inner = self.of(jaxprs.open_jaxpr(body.jaxpr)[0])
            for one, result in zip(inner, body.results or (), strict=False):
                if result is None or body.operands is None:
                    continue
                found: dict[int, bool] = {}
                for n, same in one.items():
                    if n < len(body.operands):
                        for of, before in operands[body.operands[n]].items():
                            found[of] = same and before and found.get(of, True)
                ways[result].append(found)
        return [_carried_by_all(of) if of else _NOTHING for of in ways]


def _changed(*those: Carried) -> Carried:
    return {n: False for one in those for n in one}


def _carried_by_all(those: Sequence[Carried]) -> Carried:
    """One of several values: an input is unchanged only if it is in all of them."""
    every = {n for one in those for n in one}
    return {n: all(one.get(n, False) for one in those) for n in every}


def _is_near_one(atom: Atom, made: Mapping[Atom, Equation]) -> bool:
    """Whether a value is a number near 1, or 1 minus or plus something that is computed."""
    while not jaxprs.is_literal(atom):
        equation = made.get(atom)
        if equation is None:
            return False
        name = equation.primitive.name
        if name in ("sub", "add") and any(
            jaxprs.real_number(x) == 1 for x in equation.invars[: 1 if name == "sub" else 2]
        ):
            return True
        if name not in ("broadcast_in_dim", "convert_element_type", "reshape", "copy"):
            return False
        atom = equation.invars[0]
    number = jaxprs.real_number(atom)
    return number is not None and _NEAR_ONE[0] < number < _NEAR_ONE[1]
