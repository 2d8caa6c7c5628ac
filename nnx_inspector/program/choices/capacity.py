"""Where a traced program says which choices of a router exceed the capacity of an expert.

A choice is followed on: it becomes a one-hot mask, whose cumulative sum over the tokens is the
place of each choice in its expert; and that is compared with a number, or becomes a one-hot vector
of as many slots. Invariant: rather none than a false one; whatever else happens to a choice ends
the search there.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from nnx_inspector._compat import jaxprs
from nnx_inspector.program.choices.attentions import common_frame
from nnx_inspector.program.choices.frames import Frame, backwards
from nnx_inspector.stats.choices.measure import Kept, Step
from nnx_inspector.typing import Atom, Equation, Value

_SAME_NAMES = """
    convert_element_type copy copy_p nnx_inspector_apply nnx_inspector_parameter nnx_inspector_link
    nnx_inspector_mark nnx_inspector_seeded optimization_barrier stop_gradient
"""
_UNCHANGED = jaxprs.PLACEMENTS.union(_SAME_NAMES.split())
_SPREAD = frozenset(["broadcast_in_dim", "convert_element_type", "expand_dims", "reshape"])
"""What may be between a constant, or the numbers of slots, and where these are compared."""
_MOVES = frozenset(["broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose"])
_ORDERS = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
"""Each comparison, and the same with its operands exchanged."""


@dataclasses.dataclass(frozen=True)
class _Derived:
    """What is known about a value that was made of a choice.

    Attributes:
        kind: "index" of an expert, "mask" of zeros and ones, or "place" in an expert.
        ranks: the axis of the several choices of a token, -1 if there is none.
        experts: the axis of the experts, -1 if there is none.
        steps: how the choice is arranged as this value is; see `Kept`.
        masked: of places, whether those of experts that are not chosen are 0 (2), or at least less
            than the others (1).
        moved: the function and the value whose elements this one has, as they are or repeated, and
            what is known about that.
        along: the axis along which they are repeated, -1 if they are not.
    """

    kind: str
    ranks: int
    experts: int = -1
    steps: tuple[Step, ...] = ()
    masked: int = 0
    moved: _Place | None = None
    along: int = -1


_Place = tuple[Frame, Atom, _Derived]


class Place(NamedTuple):
    """Where a mark may be put: the equation behind which it is, the value, and how to read it."""

    equation: Equation
    value: Value
    kept: Kept


_Traces = dict[Atom, _Derived]
_Known = Sequence[_Derived | None]
_Found = tuple[_Place, float, float]
"""A place, and between which numbers it is kept."""


def place_in_expert(frame: Frame, equation: Equation, many: int) -> Place | None:
    """The place of each choice in its expert, where a program compares it with a capacity.

    Args:
        frame: the function that chooses.
        equation: the `top_k` or `argmax`.
        many: the number of experts.
    """
    choice = equation.outvars[-1]
    ranks = len(choice.aval.shape) - 1 if equation.primitive.name == "top_k" else -1
    found = _follow(frame, {choice: _Derived("index", ranks)}, many)
    if found is None:
        return None
    place, *ends = found
    while place is not None:  # of the same elements, one that is known where the choice is made
        here, value, trace = place
        both = common_frame((frame, choice), here.origin(value))
        maker = frame.made.get(both[2]) if both is not None and both[0] is frame else None
        if both is not None and maker is not None:
            return Place(maker[1], both[2], Kept(trace.steps, *ends))
        place = trace.moved
    return None


def _follow(frame: Frame, known: _Traces, many: int) -> _Found | None:
    """The first comparison with a capacity; `known` gains what is known on the way."""
    waiting = sorted(n for v in known for n in frame.users.get(v, ()))
    done = -1
    while waiting:
        number = heapq.heappop(waiting)
        if number == done:
            continue
        done, equation = number, frame.bare.eqns[number]
        traces = [None if jaxprs.is_literal(v) else known.get(v) for v in equation.invars]
        inner = frame.inner.get(number, [])
        if inner:
            found = _entered(inner[0], traces, known, many) if len(inner) == 1 else None
        elif equation.primitive.name in _UNCHANGED:
            known.update((v, x) for v, x in zip(equation.outvars, traces, strict=False) if x)
            found = None
        else:
            found = _compared(frame, equation, traces)
            made = None if found else _made(frame, equation, traces, many)
            if made is not None:
                known[equation.outvars[0]] = made
        if found is not None:
            return found
        for v in equation.outvars:
            for user in frame.users.get(v, ()) if v in known else ():
                heapq.heappush(waiting, user)
    return None


def _entered(frame: Frame, traces: _Known, known: _Traces, many: int) -> _Found | None:
    """The same within a function, whose results are known then."""
    body = frame.body
    assert body is not None
    assert body.operands is not None
    within: _Traces = {}
    for v, number, part in zip(frame.bare.invars, body.operands, body.taken, strict=True):
        trace = traces[number]
        if trace is not None and part is None:
            within[v] = trace
    found = _follow(frame, within, many)
    for atom, number, part in zip(frame.bare.outvars, body.results or (), body.given, strict=True):
        trace = None if jaxprs.is_literal(atom) else within.get(atom)
        if number is not None and part is None and trace is not None:
            known[frame.equation.outvars[number]] = trace
    return found


def _compared(frame: Frame, equation: Equation, traces: _Known) -> _Found | None:
    """The comparison of places with a capacity, or with the numbers of slots, that this is."""
    if len(traces) != 2 or None not in traces:
        return None
    at = 0 if traces[0] is not None else 1
    trace, value, other = traces[at], equation.invars[at], equation.invars[1 - at]
    if trace is None or trace.kind != "place":
        return None
    name = equation.primitive.name
    if name == "eq":
        trace, slots = _repeated(frame, equation, at, trace), _numbers(frame, other)
        if trace is None or slots is None or trace.moved is None or trace.along != slots[0]:
            return None
        return trace.moved, -0.5, slots[1] - 0.5
    order = name if at == 0 else _ORDERS.get(name, "")
    limit = _constant(frame, other) if order in _ORDERS else None
    # a place above 0 says that an expert is chosen, not that it is full
    if limit is None or limit < (2 if order == "ge" else 1):
        return None
    most = math.ceil(limit) - 0.5 if order in ("lt", "ge") else math.floor(limit) + 0.5
    return (frame, value, trace), -math.inf, most


def _made(frame: Frame, equation: Equation, traces: _Known, many: int) -> _Derived | None:
    """What is known about the result of an equation."""
    name, params, first = equation.primitive.name, equation.params, traces[0]
    if name == "eq":
        return _one_hot(frame, equation, traces, many)
    if name in ("add", "sub", "mul", "select_n"):
        return _combined(frame, equation, traces)
    if first is None:
        return None
    if name in ("gt", "ne"):
        is_set = first.kind == "mask" and _constant(frame, equation.invars[1]) == 0
        return first if is_set else None
    if name == "cumsum":
        along = first.kind == "mask" and params["axis"] not in (first.experts, first.ranks)
        place = _Derived("place", first.ranks, first.experts, first.steps)
        return place if along and not params["reverse"] else None
    if name in ("reduce_sum", "reduce_max"):
        return _reduced(first, name, params["axes"])
    return _moved(frame, equation, first) if name in _MOVES else None


def _one_hot(frame: Frame, equation: Equation, traces: _Known, many: int) -> _Derived | None:
    """The mask that an index becomes where it is compared with the number of each expert."""
    at = 0 if traces[0] is not None else 1
    trace, numbers = traces[at], _numbers(frame, equation.invars[1 - at])
    if trace is None or trace.kind != "index" or numbers is None:
        return None
    trace = _repeated(frame, equation, at, trace)
    axis, count = numbers
    if trace is None or count != many or trace.along != axis:
        return None
    return _Derived("mask", trace.ranks, axis, (*trace.steps, ("hot", (axis,), ())))


def _combined(frame: Frame, equation: Equation, traces: _Known) -> _Derived | None:
    """A place that something is added to, or that a mask of the same arrangement is laid over."""
    name = equation.primitive.name
    places = [one for one in traces if one is not None and one.kind == "place"]
    masks = [one for one in traces if one is not None and one.kind == "mask"]
    if len(places) != 1 or any(one.steps != places[0].steps for one in masks):
        return None
    place = dataclasses.replace(places[0], moved=None, along=-1)
    if name in ("add", "sub"):
        if name == "sub" and traces[0] is not places[0]:
            return None
        other = equation.invars[1 - traces.index(places[0])]
        shifted = 1 if _constant(frame, other) is not None else 0
        return dataclasses.replace(
            place, masked=place.masked if masks else min(place.masked, shifted)
        )
    if name == "mul" and masks:
        return dataclasses.replace(place, masked=2)
    if name == "select_n" and traces[0] in masks and traces[-1] is places[0]:
        zero = _constant(frame, equation.invars[1]) == 0
        return dataclasses.replace(place, masked=2 if zero else 0)
    return None


def _reduced(trace: _Derived, name: str, axes: Sequence[int]) -> _Derived | None:
    """Places of all experts, or places and masks of all choices of a token, in one."""
    if trace.kind == "index" or any(axis not in (trace.experts, trace.ranks) for axis in axes):
        return None
    if trace.kind == "mask" and trace.experts in axes:
        return None
    if trace.kind == "place" and trace.masked < (2 if name == "reduce_sum" else 1):
        return None

    def moved(axis: int) -> int:
        return -1 if axis in axes or axis < 0 else axis - sum(one < axis for one in axes)

    steps = *trace.steps, ("max", tuple(axes), ())
    ranks, experts = moved(trace.ranks), moved(trace.experts)
    return _Derived(trace.kind, ranks, experts, steps, trace.masked)


def _moved(frame: Frame, equation: Equation, trace: _Derived) -> _Derived | None:
    """What is arranged in another way, or repeated along one axis."""
    operand, (result,) = equation.invars[0], equation.outvars
    before, after, params = operand.aval.shape, tuple(result.aval.shape), equation.params
    along = -1
    if equation.primitive.name == "transpose":
        order = tuple(params["permutation"])
        step: Step = ("transpose", order, ())
        places = [order.index(axis) for axis in range(len(before))]
    elif equation.primitive.name == "broadcast_in_dim":
        to = tuple(params["broadcast_dimensions"])
        step, places = ("broadcast", to, after), to
        grown = _grown(before, to, after)
        if len(grown) > 1 or (grown and trace.kind == "mask"):
            return None
        along = grown[0] if grown else -1
    else:
        step = ("reshape", after, ())
        ahead = {(math.prod(after[:axis]), n): axis for axis, n in enumerate(after)}
        places = [ahead.get((math.prod(before[:a]), n), -1) for a, n in enumerate(before)]
    ranks, experts = (places[a] if a >= 0 else -1 for a in (trace.ranks, trace.experts))
    if trace.experts >= 0 and experts < 0:
        return None
    steps = (*trace.steps, step)
    return _Derived(trace.kind, ranks, experts, steps, trace.masked, (frame, operand, trace), along)


def _grown(before: Sequence[int], to: Sequence[int], after: Sequence[int]) -> list[int]:
    """The axes along which a value is repeated whose axes become these."""
    sizes = dict(zip(to, before, strict=True))
    return [axis for axis, n in enumerate(after) if sizes.get(axis, 1) != n]


def _repeated(frame: Frame, equation: Equation, at: int, trace: _Derived) -> _Derived | None:
    """An operand as an operation takes it, which may repeat it along an axis of length 1."""
    operand, after = equation.invars[at], tuple(equation.outvars[0].aval.shape)
    axes = tuple(range(len(after)))
    if len(operand.aval.shape) != len(after):
        return None
    grown = _grown(operand.aval.shape, axes, after)
    if not grown:
        return trace
    steps = (*trace.steps, ("broadcast", axes, after))
    if len(grown) > 1:
        return None
    return dataclasses.replace(trace, steps=steps, moved=(frame, operand, trace), along=grown[0])


def _maker(frame: Frame, atom: Atom) -> tuple[Frame, Atom, Equation | None]:
    """The function that makes a value, the value there, and its equation, None if it is given."""
    return next(backwards(frame, atom, lambda *_: ()), (frame, atom, None))


def _constant(frame: Frame, atom: Atom) -> float | None:
    """The number that a value is everywhere."""
    while not jaxprs.is_literal(atom):
        frame, atom, equation = _maker(frame, atom)
        if equation is not None and equation.primitive.name in _SPREAD:
            atom = equation.invars[0]
        elif equation is None and frame.outer and (given := frame.operand(atom)) is not None:
            frame, atom = frame.outer, given
        else:
            return None
    return jaxprs.real_number(atom)


def _numbers(frame: Frame, atom: Atom) -> tuple[int, int] | None:
    """The axis along which a value counts from 0, and how far."""
    frame, variable, equation = _maker(frame, atom)
    if equation is None:
        return None
    name, params, shape = equation.primitive.name, equation.params, variable.aval.shape
    if name == "iota":
        return params["dimension"], shape[params["dimension"]]
    within = _numbers(frame, equation.invars[0]) if name in _SPREAD else None
    if within is None:
        return None
    axis, many = within
    if name == "broadcast_in_dim":
        axis = params["broadcast_dimensions"][axis]
    elif name != "convert_element_type":
        if math.prod(shape) != many:
            return None
        axis = shape.index(many)
    return (axis, many) if shape[axis] == many else None
