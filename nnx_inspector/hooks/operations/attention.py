"""Finds the pattern of an attention among the operations of a call, whatever computes it.

A value is followed from the product of queries and keys (a `dot_general`) through a softmax, which
may be a function or written out, to the product with the values, where it is the pattern. Each
axis is identified by the product that made it: an axis of both operands is a batch or a head, an
axis of the keys alone is a key, and one of the queries alone is a query or a group of heads.
Invariant: an axis is never recognised by its length. A product with parameters in place of the keys
is not attention (a layer, a router), and one with parameters in place of the values only mixes its
heads. Runs and changes nothing: `Pattern` does, where the program is run.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jax import lax

from nnx_inspector._compat import jaxprs
from nnx_inspector.typing import Jaxpr, Params, Value

_RESHAPES = frozenset(["reshape", "squeeze", "expand_dims"])
_RESIZES = frozenset(["slice", "dynamic_slice", "dynamic_update_slice", "pad", "concatenate"])
_SAME_SHAPE = """
    abs add add_any and clamp convert_element_type copy copy_p cos custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr div exp exp2 integer_pow log log1p logistic max min mul name neg not
    optimization_barrier or pow reduce_precision select_n sin square stop_gradient sub tanh
"""
_ELEMENTWISE = jaxprs.PLACEMENTS.union(_SAME_SHAPE.split())
_WRITES = frozenset(["swap", "addupdate"])
_RANKS = ("joined", "fixed", "sum", "log", "scores", "exp", "log_pattern", "pattern")


PATTERN = "attention"
"""The name of a pattern among the operations of a call."""


def is_pattern(key: str) -> bool:
    return re.search(rf"(?<!\\)@{PATTERN}(\[\d+])?$", key) is not None


NO_PATTERN_HINT = (
    " A pattern is found where one call multiplies queries with keys, takes a softmax of the "
    "product, and multiplies it with values, or calls cuDNN's kernel. Pallas kernels have none."
)


class _AxisPart(NamedTuple):
    """An axis of queries, keys or both, or a part of one that a reshape has split."""

    of: str
    """"both", "left" or "right": the operands of the first product that have the axis."""
    places: tuple[int, int]
    """Its place in the left and in the right operand, as they were before axes were joined."""
    size: int
    number: tuple[int, ...] = ()


_Axis = tuple[_AxisPart, ...]
"""The parts that a reshape has joined in one axis; () for an axis of unknown origin."""
_Axes = tuple[_Axis, ...]


@dataclasses.dataclass(frozen=True)
class Trail:
    """What is known about a value.

    `kind` is one of `_RANKS`: "joined" if a reshape has joined axes, "fixed" if made of parameters
    alone, "sum" for the sum of an "exp", "log" for the logarithm of a sum.

    Attributes:
        axes: the parts in each axis.
        fixed: whether the operands of the first product were made of parameters alone.
        order: the parts of a pattern in the order in which the softmax had them.
        over: the parts over which the softmax took its sum.
    """

    kind: str
    axes: _Axes = ()
    fixed: tuple[bool, bool] = (False, False)
    order: _Axis = ()
    over: _Axis = ()


FIXED = Trail("fixed")


class Trails:
    """The trails of the values of a call, or of the variables of a jaxpr."""

    def __init__(self) -> None:
        self._known: dict[
            int, tuple[object, Trail]
        ] = {}  # with the value, so that its id stays its own

    def of(self, value: object) -> Trail | None:
        known = self._known.get(id(value))
        return None if known is None else known[1]

    def put(self, value: object, trail: Trail | None) -> None:
        if trail is None:
            self._known.pop(id(value), None)
        else:
            self._known[id(value)] = value, trail

    def follow(
        self, primitive: str, params: Params, values: Sequence[object], results: Sequence[object]
    ) -> None:
        """Note what is known about the results of a primitive."""
        known = [self.of(value) for value in values]
        arrays = [t for t, v in zip(known, values, strict=True) if t is not None or _shape(v)]
        if primitive in _WRITES:
            self.put(values[0], None)
        trails: list[Trail | None] = []
        if arrays and all(t is FIXED for t in arrays):
            trails = [FIXED] * len(results)
        elif primitive == "dot_general":
            trails = [_product_trail(params, values, known)]
        elif any(known) and results:
            trails = [_next_trail(primitive, params, known, _shape(results[0]))]
        elif primitive == "reshape":
            trails = [_reshape_trail(_shape(values[0]), _shape(results[0]))]
        trails += [None] * (len(results) - len(trails))
        for result, trail in zip(results, trails, strict=True):
            self.put(result, trail)

    def within(self, jaxpr: Jaxpr, values: Sequence[object]) -> list[Trail | None]:
        """What is known about the results of a function, given its operands."""
        bare, _ = jaxprs.open_jaxpr(jaxpr)
        for var, value in zip(bare.invars, values, strict=True):
            self.put(var, self.of(value))
        for equation in bare.eqns:
            inner = list(jaxprs.sub_jaxprs(equation))
            counts = [(len(b.invars), len(b.outvars)) for b, _ in map(jaxprs.open_jaxpr, inner)]
            if counts == [(len(equation.invars), len(equation.outvars))]:
                for result, trail in zip(
                    equation.outvars, self.within(inner[0], equation.invars), strict=True
                ):
                    self.put(result, trail)
            else:
                name, params = equation.primitive.name, equation.params
                self.follow(name, params, equation.invars, equation.outvars)
        return [self.of(atom) for atom in bare.outvars]


def _shape(value: object) -> tuple[int, ...]:
    """The shape of an array, or of a variable of a jaxpr; () if it is not an array."""
    known = getattr(value, "aval", value)
    return tuple(getattr(known, "shape", ()))


def _product_trail(
    params: Params, values: Sequence[object], known: Sequence[Trail | None]
) -> Trail:
    """The trail of a product: it mixes the heads of an operand's trail, or is the first product."""
    fixed = (known[0] is FIXED, known[1] is FIXED)
    for number in (0, 1):
        trail = known[number]
        if trail is not None and trail.kind in ("scores", "log_pattern", "pattern"):
            axes = _axes_of_mixed_heads(
                params, trail, number, _shape(values[1 - number]), fixed[1 - number]
            )
            if axes is not None:
                return dataclasses.replace(trail, axes=axes)
    return Trail("scores", _product_axes(params, values, known), fixed)


def _reshape_trail(before: tuple[int, ...], after: tuple[int, ...]) -> Trail | None:
    """The trail after a reshape of a value without one."""
    axes = _reshape_axes([_AxisPart("both", (i, i), n) for i, n in enumerate(before)], after)
    return Trail("joined", axes) if axes and any(len(axis) > 1 for axis in axes) else None


def _product_axes(params: Params, values: Sequence[object], known: Sequence[Trail | None]) -> _Axes:
    """The axes of the first product: those of both operands, then of the left, then of the right.

    If both operands have joined the same axes (a batch and its heads), these are parts of one axis.
    """
    (left, right), (left_both, right_both) = params["dimension_numbers"]
    a, b = (_shape(value) for value in values)
    of_a, of_b = (_part_sizes(value, trail) for value, trail in zip(values, known, strict=True))
    place_a, place_b = ([sum(map(len, of[:i])) for i in range(len(of))] for of in (of_a, of_b))
    both = [
        tuple(
            _AxisPart("both", (place_a[i] + n, place_b[j] + n), size)
            for n, size in enumerate(_common_sizes(of_a[i], of_b[j]))
        )
        for i, j in zip(left_both, right_both, strict=True)
    ]
    alone = [i for i in range(len(a)) if i not in (*left, *left_both)]
    other = [i for i in range(len(b)) if i not in (*right, *right_both)]
    return (
        *both,
        *((_AxisPart("left", (place_a[i], place_a[i]), a[i]),) for i in alone),
        *((_AxisPart("right", (place_b[i], place_b[i]), b[i]),) for i in other),
    )


def _part_sizes(value: object, trail: Trail | None) -> list[list[int]]:
    """The sizes of the parts of each axis, if known."""
    shape = _shape(value)
    axes = trail.axes if trail is not None and len(trail.axes) == len(shape) else ((),) * len(shape)
    sizes = [[p.size for p in axis if p.size > 1] for axis in axes]
    return [s if s and math.prod(s) == n else [n] for s, n in zip(sizes, shape, strict=True)]


def _common_sizes(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """The sizes of parts at whose ends both lists end: `[2, 4]` for `[2, 4]` and `[2, 2, 2]`."""
    ends = {*itertools.accumulate(one, operator.mul)} & {*itertools.accumulate(other, operator.mul)}
    found = sorted(ends)
    return [after // before for before, after in itertools.pairwise([1, *found])]


def _axes_of_mixed_heads(
    params: Params, trail: Trail, number: int, other: tuple[int, ...], fixed: bool
) -> _Axes | None:
    """The axes after a product that sums over heads only; None for another product.

    Args:
        number: which operand the trail belongs to.
        other: the shape of the other operand.
        fixed: whether the other operand is made of parameters alone.
    """
    contracted, both = (tuple(map(tuple, dims)) for dims in params["dimension_numbers"])
    summed = [part for i in contracted[number] for part in trail.axes[i]]
    if not summed or not (fixed or trail.kind == "pattern"):
        return None
    if any(part.of != "both" for part in summed):
        # groups of heads that share their keys: the queries are the last axis of that operand
        alike = [p for axis in trail.axes for p in axis if p.of == summed[0].of]
        if not fixed or not set(summed) < set(alike) or alike[-1] in summed:
            return None
    gone, others = (
        (*contracted[number], *both[number]),
        (*contracted[1 - number], *both[1 - number]),
    )
    own = [axis for i, axis in enumerate(trail.axes) if i not in gone]
    rest = [n for i, n in enumerate(other) if i not in others]
    new = [*((summed[0]._replace(size=n),) for n in rest[:1]), *(() for _ in rest[1:])]
    free = [*own, *new] if number == 0 else [*new, *own]
    return (*(trail.axes[i] for i in both[number]), *free)


def _next_trail(
    primitive: str, params: Params, known: Sequence[Trail | None], shape: tuple[int, ...]
) -> Trail | None:
    # if two scores are added or joined, those made of parameters (positions) count less
    rank = lambda t: (_RANKS.index(t.kind), -sum(t.fixed))  # noqa: E731
    best = max((t for t in known if t is not None), key=rank)
    kinds = {t.kind: t for t in known if t is not None}
    if best is FIXED:
        return None
    if primitive == "reduce_sum":
        summed = tuple(p for i in params["axes"] for p in best.axes[i]) if best.axes else ()
        return Trail("sum", over=summed) if best.kind == "exp" else kinds.get("sum")
    if best.kind in ("sum", "log"):
        return dataclasses.replace(best, kind="log") if primitive in ("log", "log1p") else best
    axes = _next_axes(primitive, params, best.axes, shape)
    if axes is None:
        return None
    kind, over = best.kind, best.over
    if primitive in ("exp", "exp2"):
        kind = {"scores": "exp", "log_pattern": "pattern"}.get(kind, kind)
    elif primitive in ("div", "mul") and kind == "exp" and "sum" in kinds:
        kind, over = "pattern", kinds["sum"].over
    elif primitive == "sub" and kind == "scores" and "log" in kinds and known[1] is kinds["log"]:
        kind, over = "log_pattern", kinds["log"].over
    order = best.order or (tuple(p for axis in axes for p in axis) if kind == "pattern" else ())
    return Trail(kind, axes, best.fixed, order, over)


def _next_axes(primitive: str, params: Params, axes: _Axes, shape: tuple[int, ...]) -> _Axes | None:
    """The axes after a primitive; None if they are not known."""
    if primitive == "transpose":
        return tuple(axes[i] for i in params["permutation"])
    if primitive == "broadcast_in_dim":
        where = {int(to): axes[i] for i, to in enumerate(params["broadcast_dimensions"])}
        found = (where.get(i, ()) for i in range(len(shape)))
        return tuple(a if _size(a) == n else () for a, n in zip(found, shape, strict=True))
    if primitive in _RESHAPES:
        return _reshape_axes([part for axis in axes for part in axis], shape)
    if len(axes) != len(shape):
        return None
    if primitive in _RESIZES:
        return tuple(
            a if _size(a) == n else (_resize(a[0], n),) if len(a) == 1 else ()
            for a, n in zip(axes, shape, strict=True)
        )
    same = primitive in _ELEMENTWISE and all(map(_fits, axes, shape))
    return axes if same else None


def _resize(part: _AxisPart, size: int) -> _AxisPart:
    """A part of another size; one of size 1 is a numbered entry, and no axis if it stands alone."""
    return part._replace(size=size, number=(*part.number, 0) if size == 1 else part.number)


def _size(parts: Sequence[_AxisPart]) -> int:
    return math.prod(part.size for part in parts)


def _fits(parts: Sequence[_AxisPart], length: int) -> bool:
    return not parts or _size(parts) == length


def _reshape_axes(parts: list[_AxisPart], shape: tuple[int, ...]) -> _Axes | None:
    """The parts in each axis after a reshape: an axis may hold several, and a part may be split."""
    if not _size(parts) == math.prod(shape) > 0:
        return None
    found: list[_Axis] = []
    for length in shape:
        taken: list[_AxisPart] = []
        while parts and (_size(taken) < length or (length == 1 == parts[0].size and not taken)):
            part, needed = parts.pop(0), length // _size(taken)
            if part.size > needed:
                if needed < 2 or part.size % needed:
                    return None
                parts.insert(0, part._replace(size=part.size // needed, number=(*part.number, 1)))
                part = part._replace(size=needed, number=(*part.number, 0))
            taken.append(part)
        if _size(taken) != length:
            return None
        found.append(tuple(taken))
    if parts:
        found[-1:] = [(*(found[-1] if found else ()), *parts)]  # of size 1
    return tuple(found)


# ---------------------------------------------------------------- the pattern


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The operand of a product that is a pattern.

    Attributes:
        operand: the number of the operand.
        parts: the parts of its axes, in order.
        order: the number of the part in each place of `[batch ..., head, query, key]`.
        shape: the shape in that order.
        starts: the places in `order` at which the parts of heads, of queries and of keys begin.
    """

    operand: int
    parts: _Axis
    order: tuple[int, ...]
    shape: tuple[int, ...]
    starts: tuple[int, int, int] = (0, 0, 0)

    def replaced(self, values: Sequence[Value], run: Callable[[Value], Value]) -> list[Value]:
        """The operands, with `run(pattern)` for the pattern as `[batch ..., head, query, key]`."""
        given = values[self.operand]
        apart = lax.reshape(given, [part.size for part in self.parts])
        turned = lax.transpose(apart, self.order)
        out = lax.reshape(run(lax.reshape(turned, self.shape)), turned.shape)
        back = lax.transpose(out, [int(i) for i in np.argsort(self.order)])
        new = list(values)
        new[self.operand] = lax.reshape(back, given.shape)
        return new


def pattern_in(
    primitive: str, params: Params, values: Sequence[object], trails: Trails
) -> Pattern | None:
    """The pattern among a primitive's operands; None if it is not an attention's second product."""
    if primitive != "dot_general":
        return None
    contracted, both = params["dimension_numbers"]
    for operand in (0, 1):
        trail, shape = trails.of(values[operand]), _shape(values[operand])
        if (
            trail is None
            or trail.kind != "pattern"
            or not all(map(_is_complete, trail.axes, shape))
        ):
            continue
        if trails.of(values[1 - operand]) is FIXED:
            continue
        inner = [trail.axes[i] for i in contracted[operand]]
        free = [
            axis
            for i, axis in enumerate(trail.axes)
            if i not in (*contracted[operand], *both[operand])
        ]
        side = _side_of_keys([part for axis in inner for part in axis])
        # a softmax over the queries is one of slots that compete for keys, if both are computed
        places = {part.places for axis in inner for part in axis if part.of == side}
        competes = bool(trail.over) and not any(
            p.places in places and p.of == side for p in trail.over
        )
        if side and not (any(trail.fixed) if competes else trail.fixed[side == "right"]):
            pattern = _pattern_of(operand, trail, side, inner, free)
            if pattern is not None:
                return pattern
    return None


def _is_complete(parts: Sequence[_AxisPart], length: int) -> bool:
    return _size(parts) == length


def _side_of_keys(parts: Sequence[_AxisPart]) -> str:
    """The operand of the first product that holds the keys, over which the second sums; or ""."""
    long = {p.of for p in parts if p.size > 1}
    sides = long or {p.of for p in parts} - {"both"}
    return max(sides, default="") if len(long) < 2 and long != {"both"} else ""


def _pattern_of(
    operand: int, trail: Trail, side: str, inner: Sequence[_Axis], free: Sequence[_Axis]
) -> Pattern | None:
    if any(part.of == side and part.size > 1 for axis in free for part in axis):
        return None
    parts = tuple(part for axis in trail.axes for part in axis)
    of_queries = int(side == "left")
    by_place = lambda p: (p.places[of_queries], p.number)  # noqa: E731
    asking = [p for p in sorted(parts, key=_part_order(trail)) if p.of not in (side, "both")]
    keys = [p for axis in inner for p in axis if p.of == side]
    held = (*keys, *asking)
    both = sorted((p for p in parts if p not in held), key=by_place)
    groups, query = asking[:-1], asking[-1:]
    # a single axis of both is a batch, unless it follows the queries' axis: [n, head, d]
    single = len({p.places for p in both}) == 1
    is_head = bool(both) and not (single and all(by_place(p) > by_place(both[-1]) for p in asking))
    # beside heads alone, what the queries have before them is a batch that shares its keys
    rank = _part_order(trail)
    shares = [p for p in groups if single and is_head and all(rank(p) < rank(o) for o in both)]
    groups = [p for p in groups if p not in shares]
    # a single entry of a shared axis, as in p[:, 0], does not count as an axis
    entries = {p.places for p in both} - {p.places for p in both if p.size > 1 or not p.number}
    axes = [p for p in both if p.places not in entries] or both
    heads = [p for p in axes if is_head and p.places == axes[-1].places]
    lead = [*shares, *(p for p in both if p not in heads)]
    keys = sorted(keys, key=by_place)
    shape = [p.size for p in lead if p in axes or p in shares]
    shape += [_size([*heads, *groups])] if heads or groups else []
    order = [parts.index(p) for p in (*lead, *heads, *groups, *query, *keys)]
    starts = (len(lead), len(order) - len(keys) - len(query), len(order) - len(keys))
    return Pattern(operand, parts, tuple(order), (*shape, _size(query), _size(keys)), starts)


def _part_order(trail: Trail) -> Callable[[_AxisPart], tuple[int, tuple[int, ...]]]:
    """The position of a part in the softmax; of the whole, if it was split since."""
    places = {(p.of, p.places): i for i, p in reversed(list(enumerate(trail.order)))}
    return lambda part: (places.get((part.of, part.places), 0), part.number)
