"""What a value goes into, or comes out of, in a program: an activation function, a product.

A function is recognised by its values, however it is written: the elementwise equations that follow
are evaluated on some numbers. A sinusoid has no fixed values, and is recognised by its equations.
Invariant: the answer is "" unless the function is one of `KINDS` for certain, and the value goes
nowhere else. Computes nothing on a device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nnx_inspector._compat import jaxprs
from nnx_inspector.program.analysis.equations import is_call
from nnx_inspector.program.marks import INPUT, mark
from nnx_inspector.typing import Atom, Equation, Function, Jaxpr, Value, Var

Floats = npt.NDArray[np.float64]

POINTS: Final[Floats] = np.array(
    [-30.0, -10.0, -7.0, -3.0, -1.5, -1.0, -0.5, -0.1, 0.0, 0.1, 0.5, 1.0, 1.5, 3.0, 5.0]
)
"""The inputs at which a function is evaluated; relu6 counts as a ReLU on them."""
TOLERANCE: Final = 1e-3
"""The two forms of GELU differ by 5e-4; other functions differ by more."""
MAX_STEPS: Final = 40
"""The most equations to evaluate; an activation function has fewer."""

_same: Function = lambda x: x  # noqa: E731
_erf: Function = np.vectorize(math.erf, otypes=[np.float64])
_IN_NUMPY: Final[dict[str, Function]] = {
    "convert_element_type": lambda x: np.asarray(x, np.float64),
    "copy": _same, "copy_p": _same, "optimization_barrier": _same, "stop_gradient": _same,
    "broadcast_in_dim": _same, "reshape": _same, "squeeze": _same,
    "max": np.maximum, "min": np.minimum, "add": np.add, "add_any": np.add, "sub": np.subtract,
    "mul": np.multiply, "div": np.divide, "neg": np.negative, "abs": np.abs, "sign": np.sign,
    "square": np.square, "sqrt": np.sqrt, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1,
    "log": np.log, "log1p": np.log1p, "tanh": np.tanh, "erf": _erf,
    "erfc": lambda x: 1 - _erf(x), "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal,
    "eq": np.equal, "ne": np.not_equal, "not": np.logical_not, "and": np.logical_and,
    "or": np.logical_or, "pow": np.power, "clamp": lambda low, x, high: np.clip(x, low, high),
    "select_n": lambda which, *of: np.where(which, of[1], of[0]) if len(of) == 2 else None,
    **dict.fromkeys(jaxprs.PLACEMENTS, _same),
}  # fmt: skip


def activation_after(
    variable: Var,
    uses: Mapping[Atom, Sequence[Equation]],
    made: Mapping[Atom, Equation],
    leaving: set[Atom],
) -> str:
    """The activation function that a value goes into; "" if it also goes elsewhere.

    `uses` maps a variable to the equations that take it, `made` to the one that makes it; the jaxpr
    returns the variables `leaving`.
    """
    known: dict[Atom, np.ndarray] = {variable: POINTS}
    waiting, ends, done = [variable], list[Atom](), set[int]()
    while waiting and len(known) < MAX_STEPS:
        one = waiting.pop(0)
        end = one in leaving or one not in uses
        for equation in uses.get(one, ()):
            found = _outputs(equation, known, made)
            if found is None and _has_known_operands(equation, known, made):
                end = True
            elif found is None:  # other inputs of the equation may become known later
                end = end or not _is_pending(equation, waiting)
            elif id(equation) not in done:
                done.add(id(equation))
                known.update(found)
                waiting.extend(found)
        if end:
            ends.append(one)
    kinds = {_kind_of(known[one]) for one in ends}
    if len(kinds) == 1 and kinds != {""}:
        return kinds.pop()
    return _on_every_path(variable, known, uses, leaving)


def _is_pending(equation: Equation, waiting: Sequence[Var]) -> bool:
    return any(v in waiting for v in equation.invars if not jaxprs.is_literal(v))


def _has_known_operands(
    equation: Equation, known: Mapping[Atom, np.ndarray], made: Mapping[Atom, Equation]
) -> bool:
    return all(_is_in(v, known) or _constant(v, made) is not None for v in equation.invars)


def _on_every_path(
    variable: Var,
    known: Mapping[Atom, np.ndarray],
    uses: Mapping[Atom, Sequence[Equation]],
    leaving: set[Atom],
) -> str:
    """The first function on each path from the variable, if it is the same on all of them."""
    kinds: set[str] = set()
    waiting, seen = [variable], {variable}
    while waiting:
        one = waiting.pop()
        if one is not variable and (kind := _kind_of(known[one])):
            kinds.add(kind)
            continue
        if one in leaving or one not in uses:
            return ""
        for equation in uses[one]:
            outs = [v for v in equation.outvars if v in known]
            if not outs:
                return ""
            waiting.extend(v for v in outs if v not in seen)
            seen.update(outs)
    return kinds.pop() if len(kinds) == 1 else ""


def activation_before(variable: Atom, made: Mapping[Atom, Equation]) -> str:
    """The function that a value comes out of, or ""."""
    if jaxprs.is_literal(variable):
        return ""
    near, waiting = list[Atom](), [variable]
    while waiting and len(near) < MAX_STEPS:
        one = waiting.pop(0)
        if one in near:
            continue
        near.append(one)
        equation = made.get(one)
        if equation is not None and _is_elementwise(equation):
            waiting.extend(v for v in equation.invars if not jaxprs.is_literal(v))
    for root in near[1:]:
        values = _value(variable, {root: POINTS}, made, near)
        if values is not None and (kind := _kind_of(values)):
            return kind
    return "sinusoid" if _is_sinusoid(variable, made) else ""


def _is_sinusoid(variable: Atom, made: Mapping[Atom, Equation]) -> bool:
    """Whether each element of a value is a product of sines, cosines and numbers."""
    passed = {*_UNCHANGED, *_SELECTIONS, "slice", "mul", "neg", mark.name}
    found = _sources(variable, _Caller(made), passed, numbers=False)
    return bool(found) and all(
        one is not None and one.primitive.name in ("sin", "cos") for one, _ in found
    )


_UNCHANGED: Final = {
    *("convert_element_type", "copy", "copy_p", "reshape", "squeeze", "transpose", "pad", "rev"),
    *("broadcast_in_dim", "expand_dims", "reduce_precision"),
    *jaxprs.PLACEMENTS,
}
"""Equations that change no value, only its place or precision, and zeros that are put around it."""
_SELECTIONS: Final = {
    "concatenate": slice(None), "stack": slice(None), "select_n": slice(1, None),
    "scatter": slice(0, None, 2), "dynamic_update_slice": slice(2),
}  # fmt: skip
"""Equations each element of which is one of several arrays', and which inputs these arrays are."""
_PRODUCTS: Final = frozenset(["dot_general", "conv_general_dilated"])


def is_affine(variable: Atom, made: Mapping[Atom, Equation], site: str) -> bool:
    """Whether a value is what a call of a site receives times something, plus something else."""
    products = _sources(variable, _Caller(made), {*_UNCHANGED, "add", "add_any", "sub"})
    return any(
        one is not None
        and one.primitive.name in _PRODUCTS
        and any(_is_input_of(v, around, site) for v in one.invars)
        for one, around in products
    )


def _is_input_of(variable: Var, around: _Caller, site: str) -> bool:
    return any(
        one is not None
        and one.primitive is mark
        and (one.params["part"], one.params["site"]) == (INPUT, site)
        for one, _ in _sources(variable, around, _UNCHANGED)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Caller:
    """The equation that makes each value of a jaxpr, and the call that the jaxpr is of."""

    made: Mapping[Atom, Equation]
    call: Any = None
    inputs: Sequence[Value] = ()
    outer: Any = None


def _sources(
    variable: Atom, around: _Caller, passed: Collection[str], *, numbers: bool = True
) -> list[tuple[Equation | None, _Caller]]:
    """The equations that a value comes from through calls and equations of these names; None for
    an input of the program, and for what lies too far away.

    Where `numbers` do not count, nor do arrays without axes.
    """
    waiting, out, left = ([(variable, around)], list[tuple[Equation | None, _Caller]](), MAX_STEPS)
    while waiting and left:
        left -= 1
        one, here = waiting.pop()
        if jaxprs.is_literal(one) or not (numbers or one.aval.shape):
            continue
        equation = here.made.get(one)
        if equation is None and one in here.inputs:
            waiting.append((here.call.invars[here.inputs.index(one)], here.outer))
        elif equation is not None and is_call(equation):
            inner, _ = jaxprs.open_jaxpr(next(jaxprs.sub_jaxprs(equation)))
            makers = {v: each for each in inner.eqns for v in each.outvars}
            result = inner.outvars[equation.outvars.index(one)]
            waiting.append((result, _Caller(makers, equation, inner.invars, here)))
        elif equation is not None and equation.primitive.name in passed:
            which = _SELECTIONS.get(equation.primitive.name, slice(None))
            waiting.extend((v, here) for v in equation.invars[which])
        else:
            out.append((equation, here))
    return [*out, *((None, here) for _, here in waiting)]


def _value(
    variable: Atom,
    known: dict[Atom, np.ndarray],
    made: Mapping[Atom, Equation],
    near: Collection[Atom],
) -> np.ndarray | None:
    if variable in known:
        return known[variable]
    equation = made.get(variable)
    if equation is None or variable not in near or not _is_elementwise(equation):
        return None
    for atom in equation.invars:
        if not jaxprs.is_literal(atom) and _value(atom, known, made, near) is None:
            return None
    found = _outputs(equation, known, made)
    known.update(found or {})
    return known.get(variable)


def _is_elementwise(equation: Equation) -> bool:
    name = equation.primitive.name
    return (
        equation.primitive is mark
        or name in _IN_NUMPY
        or is_call(equation)
        or name == "integer_pow"
    )


def _outputs(
    equation: Equation, known: Mapping[Atom, np.ndarray], made: Mapping[Atom, Equation]
) -> dict[Atom, np.ndarray] | None:
    """The outputs of an equation, if they follow from the known inputs; otherwise None."""
    values = [known[v] if _is_in(v, known) else _constant(v, made) for v in equation.invars]
    if any(value is None for value in values):
        return None
    found = _apply(equation, values)
    return None if found is None else dict(zip(equation.outvars, found, strict=True))


def _is_in(atom: Atom, known: Mapping[Atom, np.ndarray]) -> bool:
    return not jaxprs.is_literal(atom) and atom in known


def _constant(atom: Atom, made: Mapping[Atom, Equation]) -> np.ndarray | None:
    """The number that fills an array; None if it is not known, or takes many operations."""
    waiting, near = [atom], dict[Atom, Equation]()
    while waiting:
        one = waiting.pop()
        if jaxprs.is_literal(one) or one in near:
            continue
        equation = made.get(one)
        if equation is None or not _is_elementwise(equation) or len(near) == MAX_STEPS:
            return None
        near[one] = equation
        waiting.extend(equation.invars)
    return _evaluate_constant(atom, near, {})


def _evaluate_constant(
    atom: Atom, near: Mapping[Atom, Equation], known: dict[Atom, Value]
) -> np.ndarray | None:
    if jaxprs.is_literal(atom):
        value = np.asarray(atom.val)
        is_real = value.size == 1 and value.dtype.kind not in "cOSU"
        return value.astype(np.float64).reshape(()) if is_real else None
    if atom not in known:
        equation = near[atom]
        values = [_evaluate_constant(v, near, known) for v in equation.invars]
        found = None if any(value is None for value in values) else _apply(equation, values)
        known[atom] = None if found is None else found[equation.outvars.index(atom)]
    return known[atom]


def _apply(equation: Equation, values: list[Value]) -> list[Value] | None:
    name = equation.primitive.name
    if equation.primitive is mark:
        return values
    if is_call(equation):
        inner = next(jaxprs.sub_jaxprs(equation), None)
        return None if inner is None else _evaluate_program(inner, values)
    if any(getattr(v.aval, "dtype", np.dtype(int)).kind in "iu" for v in equation.outvars):
        return None  # a cast to integers is not an activation
    with np.errstate(all="ignore"):
        if name == "integer_pow":
            return [np.power(values[0], equation.params["y"])]
        found = None if name not in _IN_NUMPY else _IN_NUMPY[name](*values)
    return None if found is None else [found]


def _evaluate_program(program: Jaxpr, values: list[np.ndarray]) -> list[Value] | None:
    bare, constants = jaxprs.open_jaxpr(program)
    if len(bare.invars) != len(values) or len(bare.eqns) > MAX_STEPS or bare.constvars or constants:
        return None
    known = dict(zip(bare.invars, values, strict=True))
    made = {v: equation for equation in bare.eqns for v in equation.outvars}
    for equation in bare.eqns:
        found = _outputs(equation, known, made)
        if found is None:
            return None
        known.update(found)
    outs = [known.get(v) for v in bare.outvars if not jaxprs.is_literal(v)]
    whole = len(outs) == len(bare.outvars) and all(v is not None for v in outs)
    return outs if whole else None


def _kind_of(values: np.ndarray) -> str:
    """The activation function with these values at `POINTS`; "" if it is not one of `KINDS`."""
    found = np.asarray(values, np.float64)
    if found.shape != POINTS.shape or not np.isfinite(found).all():
        return ""
    below, above = found[POINTS <= 0], found[POINTS > 0]
    if (below == 0).all() and (np.diff(above) > 0).all() and above[0] > 0:
        return "relu"
    logistic = 1 / (1 + np.exp(-POINTS))
    shapes = {
        "tanh": np.tanh(POINTS),
        "sigmoid": logistic,
        "silu": POINTS * logistic,
        "gelu": POINTS * (1 + _erf(POINTS / math.sqrt(2))) / 2,
    }
    for kind, expected in shapes.items():
        if (np.abs(found - expected) <= TOLERANCE).all():
            return kind
    return ""
