"""The probabilities of an attention and the logits that they are the softmax of.

The pattern is where the probabilities meet the values (`hooks.operations.attention`). From there
they are followed back, through dropout, casts and masks, to the softmax that makes them, and from
that to its operand. Invariant: logits are never taken for those of another softmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nnx_inspector._compat import jaxprs
from nnx_inspector.hooks.operations.attention import Pattern, Trail, Trails
from nnx_inspector.program.choices.frames import Frame, backwards
from nnx_inspector.stats.choices.measure import Heads
from nnx_inspector.typing import Atom, Equation, Var

Place = tuple[Frame, Atom]
"""A function, and a variable that it makes or receives."""

_MOVED = """
    convert_element_type copy copy_p expand_dims nnx_inspector_apply nnx_inspector_mark
    optimization_barrier reshape squeeze stop_gradient transpose
"""
_MOVES = jaxprs.PLACEMENTS.union(_MOVED.split())
"""What only moves elements, or rounds them."""
_SHIFTS = _MOVES | {"broadcast_in_dim", "max", "select_n", "pmax"}
"""What may be between the largest logit and where it is subtracted."""
_STEPS = 64


class Softmaxes:
    """Follows values back to the softmax that makes them."""

    def __init__(self, trails: Trails):
        self._trails = trails

    def kind(self, atom: object) -> str:
        trail = None if jaxprs.is_literal(atom) else self._trails.of(atom)
        return "" if trail is None else trail.kind

    def probabilities(self, frame: Frame, variable: Atom) -> Place | None:
        """Where the softmax is made whose probabilities become a pattern."""
        for _ in range(_STEPS):
            frame, variable = frame.origin(variable)
            found = frame.made.get(variable)
            if found is None or self.kind(variable) != "pattern":
                return None
            number, equation = found
            before = [v for v in equation.invars if self.kind(v) == "pattern"]
            if before:
                variable = before[0]
                continue
            within = frame.within(number, variable)
            if within is None:
                return None if frame.inner.get(number) else (frame, variable)
            frame, variable = within
        return None

    def logits(self, frame: Frame, variable: Atom) -> tuple[Frame, Atom, bool, float] | None:
        """What these probabilities are the softmax of, whether these are the logits themselves, and
        the logarithm of the base.
        """
        base = 1.0
        for _ in range(_STEPS):
            frame, variable = frame.origin(variable)
            kind, found = self.kind(variable), frame.made.get(variable)
            if kind == "scores":
                return *self._before_shift(frame, variable), base
            if found is None or kind not in ("pattern", "exp", "log_pattern"):
                return None
            number, equation = found
            within = frame.within(number, variable)
            if within is not None:
                frame, variable = within
                continue
            ranks = ("exp", "log_pattern", "scores")
            before = [v for v in equation.invars if self.kind(v) in ranks]
            if not before:
                return None
            if equation.primitive.name == "exp2":
                base = math.log(2)
            variable = min(before, key=lambda v: ranks.index(self.kind(v)))
        return None

    def _before_shift(self, frame: Frame, variable: Atom) -> tuple[Frame, Atom, bool]:
        """The logits from which their largest one was subtracted, and whether they are the logits:
        if something else is subtracted, they may be those less something.
        """
        found = frame.made.get(variable)
        if found is not None and found[1].primitive.name == "sub":
            logits, shift = found[1].invars
            if self.kind(logits) != "scores" or not self._is_largest(frame, shift, logits):
                return frame, variable, False
            return *frame.origin(logits), True
        return frame, variable, True

    def _is_largest(self, frame: Frame, shift: Var, logits: Var) -> bool:
        """Whether a value is the largest of these logits, or of those that a mask leaves."""
        for here, _, equation in backwards(frame, shift, _shifted):
            if equation is not None and equation.primitive.name == "reduce_max":
                return bool(_unmasked(frame, logits) & _unmasked(here, equation.invars[0]))
        return False


def _shifted(equation: Equation, _: object) -> Sequence[Atom]:
    return equation.invars if equation.primitive.name in _SHIFTS else ()


def _moved(equation: Equation, variable: Atom) -> Sequence[Atom]:
    if equation.primitive.name == "select_n":
        return equation.invars[1:]
    at = equation.outvars.index(variable)
    return equation.invars[at : at + 1] if equation.primitive.name in _MOVES else ()


def _unmasked(frame: Frame, variable: Atom) -> set[Place]:
    """The logits that a value is made of, where elements move, or a mask replaces some."""
    return {(here, one) for here, one, _ in backwards(frame, variable, _moved)}


def common_frame(one: Place, other: Place) -> tuple[Frame, Atom, Atom] | None:
    """A function that has both values, and its variables for them.

    Of the function of one value the other may be an operand, and what a function makes its caller
    has as a result.
    """
    for frame, variable in _returned_as(one):
        for theirs, other_variable in _returned_as(other):
            if frame is theirs and frame.enters:
                return frame, variable, other_variable
    return None


def _returned_as(place: Place) -> list[Place]:
    """A value, and what its function returns it as, in turn."""
    found, (frame, variable) = [place], place
    while frame.outer is not None and frame.body is not None:
        outvars = list(frame.bare.outvars)
        at = next((i for i, v in enumerate(outvars) if v is variable), None)
        if at is None or (frame.body.results or ())[at] is None or frame.body.given[at] is not None:
            break
        frame, variable = frame.outer, frame.equation.outvars[(frame.body.results or ())[at]]
        found.append((frame, variable))
    return found


def heads_of(pattern: Pattern, trail: Trail, base: float, *, exact: bool) -> Heads | None:
    """How to measure probabilities whose trail is known, by the roles in their pattern.

    None if a part of an axis has several roles, as after heads were mixed or split.
    """
    first, query, key = pattern.starts
    place = {n: i for i, n in enumerate(pattern.order)}
    roles: dict[Any, dict[tuple[int, ...], tuple[int, int]]] = {}
    for n, part in enumerate(pattern.parts):
        at = place.get(n, -1)
        role = (at >= first) + (at >= query) + (at >= key)
        roles.setdefault((part.of, part.places), {})[part.number] = role, at
    parts: list[Any] = []
    ranks: list[tuple[int, int]] = []
    for axis in trail.axes:
        for part in axis:
            known = roles.get((part.of, part.places))
            if known is None:
                if part.size > 1:
                    return None
                known = {(): (0, -1)}
            same = [x for number, x in known.items() if number[: len(part.number)] == part.number]
            same = same or list(known.values())
            if len({role for role, _ in same}) > 1:
                return None
            parts.append(part)
            ranks.append(min(same))
    order = sorted(range(len(parts)), key=lambda i: (ranks[i], parts[i].number))
    sizes, shape = tuple(part.size for part in parts), [1, 1, 1, 1]
    for size, (role, _) in zip(sizes, ranks, strict=True):
        shape[role] *= size
    return Heads(sizes, tuple(order), (shape[0], shape[1], shape[2], shape[3]), base, exact)
