"""What is done to a gradient on its way into a parameter: weight decay is added, or it is clipped.

Both are read from the equations that make a parameter's new value, back to where its gradient is
marked, so that no name counts. Weight decay is the parameter itself times a number, added. Clipping
is one of three forms: a bound on each element that is the same above and below 0; a choice between
a gradient and the same times what is computed from it; a factor computed from it that is at most 1.
The first of each that a walk back meets is taken. Invariant: what a branch makes (`lax.cond`), or a
number within a function that the program calls, is not found, and nothing is said of it. Changes no
equation.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from nnx_inspector._compat import jaxprs
from nnx_inspector.program.analysis.equations import bodies_of, is_call
from nnx_inspector.program.analysis.identity import CASTS
from nnx_inspector.program.editing.functions import Divides
from nnx_inspector.program.marks import GRADIENT
from nnx_inspector.typing import Atom, Aval, Equation, Jaxpr, OpenJaxpr, Params, Var

_OF_NUMBERS: Final = {"broadcast_in_dim", "reshape", "squeeze"}
_SUMS: Final = {"add", "sub", "add_any"}
_COMPARED: Final = {"lt", "le", "gt", "ge"}


class Factor(NamedTuple):
    """A product of numbers of a program.

    Attributes:
        numbers: them.
        divides: of each, whether it divides.
    """

    numbers: tuple[Atom, ...] = ()
    divides: tuple[bool, ...] = ()

    def times(self, number: Atom, *, divides: bool) -> Factor:
        return Factor((*self.numbers, number), (*self.divides, divides))


@dataclasses.dataclass(frozen=True)
class Decay:
    """Weight decay: a parameter times a factor, added to the rest of its update.

    Attributes:
        rest: what it is added to.
        factor: the factor.
        keeps: whether the sum is the new value, so that the factor is 1 without decay.
    """

    rest: Atom
    factor: Factor
    keeps: bool

    @property
    def atoms(self) -> tuple[Atom, ...]:
        return (self.rest, *self.factor.numbers)

    @property
    def how(self) -> tuple[Divides, bool]:
        """As `update_stats` takes it."""
        return self.factor.divides, self.keeps


@dataclasses.dataclass(frozen=True)
class Clipping:
    """Clipping of a gradient, or of what an optimizer has made of it.

    Attributes:
        arrays: it before and after; () if all of it is multiplied by a factor.
        factor: the factor.
        when: the comparison by which it is used, if there is one.
        on: whether it is used where that is true.
    """

    arrays: tuple[Atom, ...] = ()
    factor: Factor | None = None
    when: Atom | None = None
    on: bool = True

    @property
    def atoms(self) -> tuple[Atom, ...]:
        numbers = () if self.factor is None else self.factor.numbers
        return (*self.arrays, *numbers, *(() if self.when is None else (self.when,)))

    @property
    def how(self) -> tuple[Divides | None, bool, bool]:
        """As `update_stats` takes it."""
        divides = None if self.factor is None else self.factor.divides
        return divides, self.when is not None, self.on


class _Step(NamedTuple):
    """What makes one value: an equation of the program, or of a function that it calls."""

    name: str
    params: Params
    operands: list[Atom]
    position: int


def _shape(atom: Atom) -> tuple[int, ...]:
    aval: Aval = atom.aval
    return aval.shape


def _are_like(a: Atom, b: Atom) -> bool:
    """Whether two values have one shape, and the first is no literal."""
    return not jaxprs.is_literal(a) and _shape(a) == _shape(b)


class GradientTransforms:
    """Finds the weight decay and the clipping of a program's parameters."""

    def __init__(self, bare: OpenJaxpr):
        self._here = {*bare.invars, *bare.constvars}
        self._made: dict[Var, tuple[Equation, int]] = {}
        self._steps: dict[Atom, _Step] = {}
        self._computed_from: dict[Atom, set[Atom]] = {}
        for equation in bare.eqns:
            for i, v in enumerate(equation.outvars):
                self._made[v] = equation, i
                self._here.add(v)

    def of(self, parameter: Atom, result: Atom) -> tuple[Decay | None, Clipping | None]:
        """What is done on the way into a parameter, whose new value is the result."""
        decay: Decay | None = None
        clipping: Clipping | None = None
        if not _shape(parameter):
            return None, None  # a number: nothing tells it from a factor
        for x, step, inside in self._way(result, parameter):
            decay = decay or self._decay(step, parameter, inside)
            clipping = clipping or self._clipping(x, step, parameter)
        return decay, clipping

    # ------------------------------------------------------------------ the equations

    def _step(self, atom: Atom) -> _Step | None:
        """What makes a value; None for an input of the program."""
        if jaxprs.is_literal(atom) or atom in self._steps or atom not in self._made:
            return None if jaxprs.is_literal(atom) else self._steps.get(atom)
        equation, position = self._made[atom]
        bodies = bodies_of(equation) if is_call(equation) else ()
        if len(bodies) != 1:
            name = equation.primitive.name
            self._steps[atom] = _Step(name, equation.params, list(equation.invars), position)
            return self._steps[atom]
        self._enter(bodies[0].jaxpr, list(equation.invars), list(equation.outvars))
        return self._steps.get(atom)

    def _enter(self, jaxpr: Jaxpr, operands: Sequence[Atom], results: Sequence[Atom]) -> None:
        """Read a function that is called, with variables of this call's own."""
        bare, _ = jaxprs.open_jaxpr(jaxpr)
        names: dict[Atom, Atom] = dict(zip(bare.invars, operands, strict=True))
        inner = {v for equation in bare.eqns for v in equation.outvars}

        def own(x: Atom) -> Atom:
            return x if jaxprs.is_literal(x) else names.get(x) or x

        for v, result in zip(bare.outvars, results, strict=True):
            if not jaxprs.is_literal(v) and v in inner and v not in names:
                names[v] = result
            else:
                self._steps[result] = _Step("copy", {}, [own(v)], 0)
        for equation in bare.eqns:
            given = list(map(own, equation.invars))
            made = [names.setdefault(v, jaxprs.new_var(v.aval)) for v in equation.outvars]
            bodies = bodies_of(equation) if is_call(equation) else ()
            if len(bodies) == 1:
                self._enter(bodies[0].jaxpr, given, made)
                continue
            for i, v in enumerate(made):
                self._steps[v] = _Step(equation.primitive.name, equation.params, given, i)

    def _origin(self, atom: Atom) -> Atom:
        """The earliest variable, or literal, with this value but for its dtype."""
        while (step := self._step(atom)) is not None and step.name in CASTS:
            if step.params.get("part") == GRADIENT:
                break
            atom = step.operands[step.position]
        return atom

    def _number(self, atom: Atom) -> Atom | None:
        """The number that an array consists of, or None."""
        while _shape(atom):
            step = self._step(self._origin(atom))
            if step is None or step.name not in _OF_NUMBERS:
                return None
            atom = step.operands[0]
        return atom if self._is_here(atom) else self._origin(atom)

    def _value(self, atom: Atom) -> float | None:
        """The value of a real number that the program holds as a literal, or None."""
        number = self._number(atom)
        return None if number is None else jaxprs.real_number(self._origin(number))

    def _alike(self, a: Atom, b: Atom) -> bool:
        value = self._value(a)
        if value is not None:
            return value == self._value(b)
        a, b = (self._number(x) or x for x in (a, b))
        return self._origin(a) is self._origin(b)

    def _is_here(self, *atoms: Atom) -> bool:
        """Whether these are values of the program itself, and not of a function that it calls."""
        return all(jaxprs.is_literal(x) or x in self._here for x in atoms)

    # ------------------------------------------------------------------ the way of a gradient

    def _way(self, result: Atom, parameter: Atom) -> Iterator[tuple[Atom, _Step, bool]]:
        """The values between a parameter's gradient and its new value, the last one first; of each
        whether it is added to the value before, so that none of it is that.
        """
        waiting, seen = deque([(result, False)]), set[Atom]()
        while waiting:
            x, inside = waiting.popleft()
            step = None if jaxprs.is_literal(x) or x in seen else self._step(x)
            if step is None:
                continue
            seen.add(x)
            yield x, step, inside
            if step.name in _SUMS and any(self._origin(y) is parameter for y in step.operands):
                inside = True
            for y in self._before(step):
                if _are_like(y, parameter):
                    waiting.append((y, inside))

    @staticmethod
    def _before(step: _Step) -> Sequence[Atom]:
        """The operands that a value is a sum, a multiple or a choice of."""
        name, operands = step.name, step.operands
        if name in CASTS:
            return () if step.params.get("part") == GRADIENT else [operands[step.position]]
        if name == "mul":
            return operands if operands[0] is not operands[1] else ()
        if name == "div" or (name == "integer_pow" and step.params["y"] == 1):
            return operands[:1]
        if name in (*_SUMS, "neg", "sign", "max", "min", "clamp"):
            return operands
        return operands[1:] if name == "select_n" else ()

    def _multiples(self, atom: Atom) -> Iterator[tuple[Atom, Factor]]:
        """The values that a value is a multiple of, with the factor (without its sign)."""
        factor = Factor()
        while True:
            yield atom, factor
            step = self._step(atom)
            if step is None or step.params.get("part") == GRADIENT:
                return
            name, operands = step.name, step.operands
            if name in CASTS:
                atom = operands[step.position]
            elif name == "neg" or (name == "integer_pow" and step.params["y"] == 1):
                atom = operands[0]
            elif name in ("mul", "div"):
                number, other = self._number(operands[1]), operands[0]
                if number is None and name == "mul":
                    number, other = self._number(operands[0]), operands[1]
                if number is None:
                    return
                atom, factor = other, factor.times(number, divides=name == "div")
            else:
                return

    def _factor_of(self, atom: Atom, of: Atom) -> Factor | None:
        """By what another value is multiplied to make a value, or None."""
        of = self._origin(of)
        each = self._multiples(atom)
        found = next((factor for x, factor in each if self._origin(x) is of), None)
        return found if found is not None and found.numbers else None

    # ------------------------------------------------------------------ decay

    def _decay(self, step: _Step, parameter: Atom, inside: bool) -> Decay | None:
        if step.name not in _SUMS:
            return None
        for x, rest in (step.operands, step.operands[::-1]):
            factor = self._factor_of(x, parameter)
            if factor is None or not self._is_array(rest, parameter):
                continue
            if any(parameter in self._sources(number) for number in factor.numbers):
                continue  # a norm of the parameter's own, as in spectral normalisation
            keeps = not inside
            if keeps and (more := self._added_to(rest, parameter)) is not None:
                rest, keeps = more, False
            found = Decay(rest, factor, keeps)
            if self._factor_of(rest, parameter) is None and self._is_here(*found.atoms):
                return found
        return None

    def _is_array(self, atom: Atom, parameter: Atom) -> bool:
        return _are_like(atom, parameter) and self._origin(atom) is not parameter

    def _added_to(self, atom: Atom, parameter: Atom) -> Atom | None:
        """What is added to a parameter to make a value, or None."""
        step = self._step(self._origin(atom))
        if step is None or step.name not in _SUMS:
            return None
        others = [x for x in step.operands if self._origin(x) is not parameter]
        return others[0] if len(others) == 1 and self._is_array(others[0], parameter) else None

    # ------------------------------------------------------------------ clipping

    def _clipping(self, x: Atom, step: _Step, parameter: Atom) -> Clipping | None:
        find = {
            "clamp": self._bounded, "min": self._bounded, "max": self._bounded,
            "select_n": self._chosen, "mul": self._shortened, "div": self._shortened,
        }.get(step.name)  # fmt: skip
        found = find(x, step, parameter) if find is not None else None
        return found if found is not None and self._is_here(*found.atoms) else None

    def _bounded(self, x: Atom, step: _Step, parameter: Atom) -> Clipping | None:
        """A bound on each element."""
        if step.name == "clamp":
            low, before, high = step.operands
        else:
            outer, inner = self._with_bound(step), None
            if outer is not None:
                inner = self._with_bound(self._step(self._origin(outer[0])))
            names = step.name, None if inner is None else inner[2]
            if outer is None or inner is None or sorted(map(str, names)) != ["max", "min"]:
                return None
            before, (low, high) = inner[0], (outer[1], inner[1])
        is_even = _are_like(before, parameter) and self._are_opposite(low, high)
        return Clipping((before, x)) if is_even else None

    def _with_bound(self, step: _Step | None) -> tuple[Atom, Atom, str] | None:
        """The value and the bound of a minimum or maximum."""
        if step is None or step.name not in ("max", "min"):
            return None
        for bound, x in (step.operands, step.operands[::-1]):
            if self._number(bound) is not None and self._number(x) is None:
                return x, bound, step.name
        return None

    def _are_opposite(self, a: Atom, b: Atom) -> bool:
        values = self._value(a), self._value(b)
        if values[0] is not None and values[1] is not None:
            return values[0] == -values[1]
        pairs = (self._number(a), self._number(b)), (self._number(b), self._number(a))
        return any(
            x is not None
            and y is not None
            and (step := self._step(self._origin(x))) is not None
            and step.name == "neg"
            and self._alike(step.operands[0], y)
            for x, y in pairs
        )

    def _chosen(self, x: Atom, step: _Step, parameter: Atom) -> Clipping | None:
        """A choice between a value and the same times what is computed from it."""
        which, *cases = step.operands
        if len(cases) != 2 or not self._is_compared(which):
            return None
        for on, (cut, whole) in enumerate((cases, cases[::-1])):
            when, factor = self._number(which), self._factor_of(cut, whole)
            if when is not None and factor is not None:
                of_it = any(self._is_from(one, whole, parameter) for one in factor.numbers)
                return Clipping((), factor, when, bool(on)) if of_it else None
            by = self._step(self._origin(cut))
            if when is None and by is not None and by.name in ("mul", "div"):
                origins = [self._origin(y) is self._origin(whole) for y in by.operands]
                if any(origins) and not all(origins):
                    other = by.operands[origins.index(False)]
                    if self._is_from(other, whole, parameter):
                        return Clipping((whole, x))
        return None

    def _is_compared(self, atom: Atom) -> bool:
        step = self._step(self._origin(atom))
        while step is not None and step.name in _OF_NUMBERS:
            step = self._step(self._origin(step.operands[0]))
        return step is not None and step.name in _COMPARED

    def _shortened(self, x: Atom, step: _Step, parameter: Atom) -> Clipping | None:
        """A factor that is at most 1, computed from what it multiplies."""
        ways = [(step.operands[0], step.operands[1])]
        ways += [(step.operands[1], step.operands[0])] if step.name == "mul" else []
        for whole, by in ways:
            divides = step.name == "div"
            if jaxprs.is_literal(by) or not _are_like(whole, parameter):
                continue
            first = Factor()
            if divides and (most := self._common(whole, by)) is not None:
                whole, first = most
            elif not (self._is_at_least_one(by) if divides else self._is_at_most_one(by)):
                continue
            if self._is_from(by, whole, parameter):
                number = self._number(by)
                if number is None:
                    return Clipping((whole, x))
                return Clipping((), first.times(number, divides=divides))
        return None

    def _common(self, numerator: Atom, denominator: Atom) -> tuple[Atom, Factor] | None:
        """As in `g * c / max(norm, c)`: g, and the factor c."""
        step = self._step(self._of_number(denominator))
        if step is None or step.name != "max":
            return None
        for x, factor in self._multiples(numerator):
            if len(factor.numbers) == 1 and not factor.divides[0]:
                is_bound = any(self._alike(factor.numbers[0], y) for y in step.operands)
                return (x, factor) if is_bound else None
        return None

    def _of_number(self, atom: Atom) -> Atom:
        number = self._number(atom)
        return self._origin(atom if number is None else number)

    def _is_at_most_one(self, atom: Atom) -> bool:
        step = self._step(self._of_number(atom))
        if step is None:
            return False
        name, operands = step.name, step.operands
        if name in ("min", "max", "clamp"):  # also as in jnp.clip(c / norm, 0, 1)
            ends = operands[2:] if name == "clamp" else operands
            is_one = [self._value(y) == 1 or self._is_at_most_one(y) for y in ends]
            if name != "max":
                return any(is_one)
            return any(is_one) and all(
                x or self._value(y) == 0 for x, y in zip(is_one, ends, strict=True)
            )
        if name == "select_n":
            is_one = [self._value(y) == 1 for y in operands[1:]]
            return sum(is_one) == 1 and self._is_compared(operands[0])
        if name != "div":
            return False
        over, under = (self._step(self._of_number(y)) for y in operands)
        if under is not None and under.name == "max":  # c / max(norm, c)
            return any(self._alike(operands[0], y) for y in under.operands)
        if over is None or over.name != "min":
            return False
        return any(self._alike(operands[1], y) for y in over.operands)  # min(norm, c) / norm

    def _is_at_least_one(self, atom: Atom) -> bool:
        step = self._step(self._of_number(atom))
        return step is not None and step.name == "max" and 1 in map(self._value, step.operands)

    def _is_from(self, atom: Atom, whole: Atom, parameter: Atom) -> bool:
        """Whether a factor is computed from what it multiplies, or from what that is made of."""
        way = [whole]
        for _, step, _ in self._way(whole, parameter):
            way += self._before(step)
        made_of = {x for x in map(self._origin, way) if not jaxprs.is_literal(x)}
        return not made_of.isdisjoint(self._sources(atom))

    def _sources(self, atom: Atom) -> set[Atom]:
        """All that a value is computed from, back to gradients; kept, because a norm of all
        gradients is asked about once for each of them.
        """
        if jaxprs.is_literal(atom := self._origin(atom)):
            return set()  # and it has no hash
        if atom not in self._computed_from:
            waiting, found = deque([atom]), set[Atom]()
            while waiting:
                x = self._origin(waiting.popleft())
                if jaxprs.is_literal(x) or x in found:
                    continue
                found.add(x)
                step = self._step(x)
                if step is not None and step.params.get("part") != GRADIENT:
                    waiting.extend(step.operands)
            self._computed_from[atom] = found
        return self._computed_from[atom]
