"""The routers of experts in a traced program: which of a layer's results is chosen.

A router is a `top_k` or an `argmax` over the outputs of a layer, or over their softmax, whose
result says which of several experts a token goes to. Invariant: rather none than a false one. There
are as many experts as outputs: parameters that are stacked so often, or modules in a list; and the
choice becomes a one-hot vector, or an index into an array. So an `argmax` over classes is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nnx_inspector._compat import jaxprs
from nnx_inspector.hooks.operations.attention import Trail
from nnx_inspector.program.choices.frames import Frame, backwards
from nnx_inspector.stats.choices.measure import Experts
from nnx_inspector.typing import Atom, Equation

CHOOSES = ("top_k", "argmax")
_USES = frozenset(["gather", "scatter-add", "scatter_add", "scatter", "sort", "ragged_dot"])
_PASSED_NAMES = """
    add broadcast_in_dim concatenate convert_element_type copy expand_dims max min mul
    nnx_inspector_apply reshape select_n slice squeeze sub transpose
"""
_PASSED = frozenset(_PASSED_NAMES.split())
_LINEAR_NAMES = """
    add add_any broadcast_in_dim convert_element_type copy div expand_dims mul
    nnx_inspector_apply nnx_inspector_mark optimization_barrier reshape select_n squeeze
    stop_gradient sub transpose
"""
_LINEAR = frozenset(_LINEAR_NAMES.split())
_ENDS = frozenset(["dot_general", "iota", "random_bits", "erf_inv", "gt", "ge", "lt", "le"])
"""Products, and what random numbers and masks are made by."""
_STEPS = 64


def router_at(
    frame: Frame, equation: Equation, site: str, shapes: Mapping[str, Sequence[int]], trail: Trail
) -> Experts | None:
    """How to measure the router that an equation is; None if it is none.

    Args:
        site: the site whose call it is in.
        shapes: the path of each parameter -> its shape.
        trail: what is known about what the choice is made by.
    """
    (operand,) = equation.invars
    if trail.kind not in ("scores", "pattern"):
        return None
    rank = len(operand.aval.shape)
    axis = rank - 1
    if equation.primitive.name == "argmax":
        (axis,) = equation.params["axes"]
    many = operand.aval.shape[axis]
    if not _is_of_layer(trail, axis, rank) or not _has_experts(site, many, shapes):
        return None
    if not _is_routing(frame, equation.outvars[-1], many):
        return None
    entropy = trail.kind
    if entropy == "scores" and not _is_linear(frame, operand):
        entropy = ""
    return Experts(axis, entropy)


def _is_of_layer(trail: Trail, axis: int, rank: int) -> bool:
    """Whether an axis is that of the outputs of a layer."""
    parts = trail.axes[axis] if len(trail.axes) == rank else ()
    sides = {part.of for part in parts if part.size > 1}
    if sides not in ({"left"}, {"right"}) or sum(trail.fixed) != 1:
        return False
    return trail.fixed[sides == {"right"}]


def _has_experts(site: str, many: int, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether the module of a site, or the one that holds it, has so many experts."""
    module = site.partition("@")[0].partition(":")[0]
    return many > 1 and any(
        _stacked(within, many) or _listed(within, many)
        for within in (module, *([module.rpartition("/")[0]] if module else []))
        for within in [_shapes_below(within, shapes)]
    )


def _shapes_below(module: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    start = f"{module}/" if module else ""
    return {path[len(start) :]: x for path, x in shapes.items() if path.startswith(start)}


def _stacked(shapes: Mapping[str, Sequence[int]], many: int) -> bool:
    """Whether a matrix is there so many times: of a scan over layers, for each of them."""
    return any(
        (len(x) > 2 and x[0] == many) or (len(x) > 3 and x[1] == many) for x in shapes.values()
    )


def _listed(shapes: Mapping[str, Sequence[int]], many: int) -> bool:
    """Whether a list has so many modules of equal parameters."""
    lists: dict[str, dict[int, set[Any]]] = {}
    for path, shape in shapes.items():
        head, *rest = path.split("/")
        if rest and rest[0].isdigit():
            own = lists.setdefault(head, {}).setdefault(int(rest[0]), set())
            own.add(("/".join(rest[1:]), tuple(shape)))
    return any(
        len(found) == many and len(set(map(frozenset, found.values()))) == 1
        for found in lists.values()
    )


def _is_routing(frame: Frame, choice: Atom, many: int) -> bool:
    """Whether a choice becomes a one-hot vector, or an index."""
    known, waiting = {choice}, [(frame, choice)]
    for _ in range(_STEPS):
        if not waiting:
            return False
        here, one = waiting.pop()
        for number in here.users.get(one, ()):
            equation = here.bare.eqns[number]
            name, results = equation.primitive.name, equation.outvars
            if name in _USES:
                return True
            if name == "eq" and (
                many in results[0].aval.shape or any(map(jaxprs.is_literal, equation.invars))
            ):
                return True
            for body in here.inner.get(number, []):
                operands = body.body.operands if body.body is not None else None
                for v, n in zip(body.bare.invars, operands or (), strict=False):
                    if equation.invars[n] is one and v not in known:
                        known.add(v)
                        waiting.append((body, v))
            if name in _PASSED:
                new = [v for v in results if v not in known]
                known.update(new)
                waiting += [(here, v) for v in new]
    return False


def _is_linear(frame: Frame, variable: Atom) -> bool:
    """Whether a value is what a product gives, but for what is added, scaled, masked or random."""
    return all(
        equation is None or equation.primitive.name in _LINEAR | _ENDS
        for _, _, equation in backwards(frame, variable, _added)
    )


def _added(equation: Equation, _: object) -> Sequence[Atom]:
    return equation.invars if equation.primitive.name in _LINEAR else ()
