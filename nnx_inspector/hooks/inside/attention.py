"""Finds the pattern of an attention among the operations of a call, whoever computes it.

A value is followed from the product of queries and keys (a `dot_general`) through a softmax, which
may be a function or written out, to the product with the values, where it is the pattern. Each of
its axes is known by the product that made it: an axis of both operands is a batch or a head, one of
the keys alone a key, one of the queries alone a query or a group of heads. Invariant: an axis is
never recognised by its length. A product with a Variable in place of the keys is not attention (a
layer, a router). Does not run or change anything: `Pattern` does, where the program is run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

_RESHAPES = frozenset(["reshape", "squeeze", "expand_dims"])
_MOVES = _RESHAPES | {"transpose", "broadcast_in_dim", "convert_element_type", "copy", "copy_p"}
_RESIZES = frozenset(["slice", "dynamic_slice", "dynamic_update_slice", "pad", "concatenate"])
_SAME_SHAPE = """
    abs add add_any and clamp convert_element_type copy copy_p cos custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr div exp exp2 integer_pow log log1p logistic max min mul name neg not
    optimization_barrier or pow pvary reduce_precision select_n sharding_constraint sin square
    stop_gradient sub tanh
"""
_ELEMENTWISE = frozenset(_SAME_SHAPE.split())
_RANKS = ("moved", "sum", "log", "scores", "exp", "log_pattern", "pattern")


NONE_FOUND = (
    " A pattern is found where one call multiplies queries with keys, takes a softmax of the "
    "product, and multiplies it with values; a kernel (cudnn, Pallas) has none."
)


class _Part(NamedTuple):
    """An axis of queries, keys or both, or a part of one that a reshape has split."""

    of: str
    """"both", "left" or "right": the operands of the first product that have the axis."""
    places: tuple[int, int]
    """Its place in the left and in the right operand."""
    size: int
    number: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Trail:
    """What is known of a value. `kind` is one of `_RANKS`: "moved" is `sources[0]` in another
    shape, "sum" the sum of an "exp", "log" the logarithm of that.

    Attributes:
        axes: the parts in each axis; () for an axis of unknown origin.
        sources: the operands of the first product, as they were before moves.
        order: the parts of a pattern in the order in which the softmax had them.
    """

    kind: str
    axes: tuple[tuple[_Part, ...], ...] = ()
    sources: tuple[Any, ...] = ()
    order: tuple[_Part, ...] = ()


class Trails:
    """The trails of the values of a call, or of the variables of a jaxpr."""

    def __init__(self) -> None:
        self._known: dict[
            int, tuple[Any, Trail]
        ] = {}  # with the value, so that its id stays its own

    def of(self, value: Any) -> Trail | None:
        known = self._known.get(id(value))
        return None if known is None else known[1]

    def through(self, value: Any) -> Trail:
        """What a function knows of its operand: that it is this value, if nothing else."""
        return self.of(value) or Trail("moved", sources=(value,))

    def put(self, value: Any, trail: Trail | None) -> None:
        if trail is None:
            self._known.pop(id(value), None)
        else:
            self._known[id(value)] = value, trail

    def follow(self, primitive: str, params: Any, name: str, values: Any, out: Any) -> None:
        """Note what is known of the result of a primitive. `name` is that of the function which it
        calls, if any.
        """
        known = [self.of(value) for value in values]
        trail = None
        if primitive == "dot_general":
            sources = tuple(_source(t, v) for t, v in zip(known, values, strict=True))
            trail = Trail("scores", _product(params, values), sources)
        elif any(known):
            trail = _followed(primitive, params, name, known, _shape(out))
        elif len(values) == 1 and primitive in _MOVES:
            trail = self.through(values[0])
        self.put(out, trail)


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of an array, or of a variable of a jaxpr."""
    return tuple(value.aval.shape) if hasattr(value, "aval") else np.shape(value)


def _source(trail: Trail | None, value: Any) -> Any:
    return trail.sources[0] if trail is not None and trail.kind == "moved" else value


def _product(params: Any, values: Any) -> tuple[tuple[_Part, ...], ...]:
    """The axes of the first product: those of both, then of the left, then of the right."""
    (left, right), (left_both, right_both) = params["dimension_numbers"]
    a, b = (_shape(value) for value in values)
    both = [
        _Part("both", (int(i), int(j)), a[i]) for i, j in zip(left_both, right_both, strict=True)
    ]
    alone = [_Part("left", (i, i), a[i]) for i in range(len(a)) if i not in (*left, *left_both)]
    other = [_Part("right", (i, i), b[i]) for i in range(len(b)) if i not in (*right, *right_both)]
    return tuple((part,) for part in (*both, *alone, *other))


def _followed(
    primitive: str, params: Any, name: str, known: Sequence[Trail | None], shape: tuple[int, ...]
) -> Trail | None:
    best = max((t for t in known if t is not None), key=lambda t: _RANKS.index(t.kind))
    kinds = [t.kind if t is not None else "" for t in known]
    if best.kind == "moved":
        moves = len(known) == 1 and primitive in _MOVES
        return best if moves else None
    if primitive == "reduce_sum":
        return Trail("sum") if best.kind == "exp" else best if best.kind == "sum" else None
    if best.kind in ("sum", "log"):
        return Trail("log") if primitive in ("log", "log1p") else best
    axes = _moved(primitive, params, best.axes, shape)
    if axes is None:
        return None
    kind = best.kind
    if primitive in ("exp", "exp2"):
        kind = {"scores": "exp", "log_pattern": "pattern"}.get(kind, kind)
    elif primitive in ("div", "mul") and kind == "exp" and "sum" in kinds:
        kind = "pattern"
    elif primitive == "sub" and kind == "scores" and kinds[1:] == ["log"]:
        kind = "log_pattern"
    if kind in ("scores", "log_pattern") and "softmax" in name:
        kind = "log_pattern" if "log" in name else "pattern"
    order = best.order or (tuple(p for axis in axes for p in axis) if kind == "pattern" else ())
    return Trail(kind, axes, best.sources, order)


def _moved(
    primitive: str, params: Any, axes: tuple[tuple[_Part, ...], ...], shape: tuple[int, ...]
) -> tuple[tuple[_Part, ...], ...] | None:
    """The axes after a primitive; None if they are not known."""
    if primitive == "transpose":
        return tuple(axes[i] for i in params["permutation"])
    if primitive == "broadcast_in_dim":
        where = {int(to): axes[i] for i, to in enumerate(params["broadcast_dimensions"])}
        found = (where.get(i, ()) for i in range(len(shape)))
        return tuple(a if _size(a) == n else () for a, n in zip(found, shape, strict=True))
    if primitive in _RESHAPES:
        return _reshaped([part for axis in axes for part in axis], shape)
    if len(axes) != len(shape):
        return None
    if primitive in _RESIZES:
        return tuple(
            a if _size(a) == n else (a[0]._replace(size=n),) if len(a) == 1 else ()
            for a, n in zip(axes, shape, strict=True)
        )
    same = primitive in _ELEMENTWISE and all(map(_fits, axes, shape))
    return axes if same else None


def _size(parts: Sequence[_Part]) -> int:
    return math.prod(part.size for part in parts)


def _fits(parts: Sequence[_Part], length: int) -> bool:
    return not parts or _size(parts) == length


def _reshaped(parts: list[_Part], shape: tuple[int, ...]) -> tuple[tuple[_Part, ...], ...] | None:
    """The parts in each axis after a reshape: an axis may hold several, and a part may be split."""
    if _size(parts) != math.prod(shape):
        return None
    found: list[tuple[_Part, ...]] = []
    for length in shape:
        taken: list[_Part] = []
        while parts and (_size(taken) < length or (length == 1 == parts[0].size and not taken)):
            part, needed = parts.pop(0), length // _size(taken)
            if part.size > needed:
                if not needed or part.size % needed:
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
    """The pattern that an operand of a product is.

    Attributes:
        operand: the number of the operand.
        parts: the parts of its axes, in order.
        order: the number of the part in each place of `[batch ..., head, query, key]`.
        shape: the shape in that order.
    """

    operand: int
    parts: tuple[_Part, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def replaced(self, values: Sequence[Any], run: Callable[[Any], Any]) -> list[Any]:
        """The operands of the product; `run` gets the pattern as `[batch ..., head, query, key]`
        and returns that with which the program goes on.
        """
        given = values[self.operand]
        apart = lax.reshape(given, [part.size for part in self.parts])
        turned = lax.transpose(apart, self.order)
        out = lax.reshape(run(lax.reshape(turned, self.shape)), turned.shape)
        back = lax.transpose(out, [int(i) for i in np.argsort(self.order)])
        new = list(values)
        new[self.operand] = lax.reshape(back, given.shape)
        return new


def pattern_in(
    primitive: str,
    params: Any,
    values: Sequence[Any],
    trails: Trails,
    is_fixed: Callable[[Any], bool],
) -> Pattern | None:
    """The pattern among the operands of a primitive; None if it is not the product of an attention.

    Args:
        is_fixed: whether a value is a Variable of the module.
    """
    if primitive != "dot_general":
        return None
    contracted, both = params["dimension_numbers"]
    for operand in (0, 1):
        trail, shape = trails.of(values[operand]), _shape(values[operand])
        if trail is None or trail.kind != "pattern" or not all(map(_known, trail.axes, shape)):
            continue
        inner = [trail.axes[i] for i in contracted[operand]]
        free = [
            axis
            for i, axis in enumerate(trail.axes)
            if i not in (*contracted[operand], *both[operand])
        ]
        side = _side_of_keys([part for axis in inner for part in axis])
        if side and not is_fixed(trail.sources[side == "right"]):
            pattern = _pattern(operand, trail, side, inner, free)
            if pattern is not None:
                return pattern
    return None


def _known(parts: Sequence[_Part], length: int) -> bool:
    return _size(parts) == length


def _side_of_keys(parts: Sequence[_Part]) -> str:
    """The operand of the first product that the keys were, by the axes of which the second takes
    the sum; "" if they were none.
    """
    long = {p.of for p in parts if p.size > 1}
    sides = long or {p.of for p in parts} - {"both"}
    return max(sides, default="") if len(long) < 2 and long != {"both"} else ""


def _pattern(
    operand: int, trail: Trail, side: str, inner: Sequence[Any], free: Sequence[Any]
) -> Pattern | None:
    if any(part.of == side and part.size > 1 for axis in free for part in axis):
        return None
    parts = tuple(part for axis in trail.axes for part in axis)
    of_queries = int(side == "left")
    by_place = lambda p: (p.places[of_queries], p.number)  # noqa: E731
    asking = [p for p in sorted(parts, key=_order_in(trail)) if p.of not in (side, "both")]
    keys = [p for axis in inner for p in axis if p.of == side]
    held = (*keys, *asking)
    both = sorted((p for p in parts if p not in held), key=by_place)
    groups, query = asking[:-1], asking[-1:]
    # a single axis of both is a batch, unless it comes after that of the queries: [n, head, d]
    single = len({p.places for p in both}) == 1
    is_head = bool(both) and not (single and all(by_place(p) > by_place(both[-1]) for p in asking))
    heads = [p for p in both if is_head and p.places == both[-1].places]
    lead = [p for p in both if p not in heads]
    keys = sorted(keys, key=by_place)
    shape = [*(p.size for p in lead), *([_size([*heads, *groups])] if heads or groups else [])]
    order = [parts.index(p) for p in (*lead, *heads, *groups, *query, *keys)]
    return Pattern(operand, parts, tuple(order), (*shape, _size(query), _size(keys)))


def _order_in(trail: Trail) -> Callable[[_Part], tuple[int, tuple[int, ...]]]:
    """Where the softmax had a part; of one split since, the whole."""
    places = {(p.of, p.places): i for i, p in reversed(list(enumerate(trail.order)))}
    return lambda part: (places.get((part.of, part.places), 0), part.number)
