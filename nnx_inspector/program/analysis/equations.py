"""Equations that hold jaxprs: how values enter and leave each jaxpr, and how often it runs.

A new primitive with a body is one entry in `_FORMS`. Code that follows values, counts, or looks for
marks calls `bodies_of` and names no primitive. Invariant: for a primitive without an entry only the
jaxprs are known, not where its operands go or how often it runs. Changes nothing;
`program.editing` does, with a function for each `kind_of`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nnx_inspector._compat import eqn_params, jaxprs
from nnx_inspector.typing import Equation, Jaxpr, Value

ROW = "row"
"""The part of an array that one iteration of a scan gets: an entry along the first axis."""


@dataclasses.dataclass(frozen=True)
class Body:
    """One jaxpr of an equation.

    Attributes:
        jaxpr: the jaxpr, as the equation holds it.
        operands: for each input, the number of the operand that it is, wholly or in part; None if
            that is not known.
        results: for each output, the number of the result that it becomes, or None if it becomes
            none; None if that is not known.
        taken: for each input, the part of the operand that it gets: None for the whole, `ROW`, or
            the spec of a device's part.
        given: for each output, the part of the result that it gives, in the same form.
        consts: the number of inputs before the carried ones.
        carry: the number of inputs that an iteration gets from the first outputs of the one before.
        times: how often it runs; None if that is not known, and may be 0.
        backwards: whether its first iteration has the last row.
        tests: whether it decides if there is another iteration; its inputs are the carried values.
        conditional: whether only one of it and the equation's other bodies runs.
    """

    jaxpr: Jaxpr
    operands: tuple[int, ...] | None = None
    results: tuple[int | None, ...] | None = None
    taken: tuple[object, ...] = ()
    given: tuple[object, ...] = ()
    consts: int = 0
    carry: int = 0
    times: int | None = 1
    backwards: bool = False
    tests: bool = False
    conditional: bool = False


def bodies_of(equation: Equation) -> tuple[Body, ...]:
    """The bodies (jaxprs) of an equation, in the order of its parameters; empty if it has none."""
    _, bodies = _FORMS.get(equation.primitive.name, _UNKNOWN)
    return bodies(equation)


def kind_of(equation: Equation) -> str:
    """The kind of an equation with bodies, as `program.editing` enters it; "" if it cannot."""
    return _FORMS.get(equation.primitive.name, _UNKNOWN)[0]


def is_call(equation: Equation) -> bool:
    """Whether an equation only calls a function: its body computes its results."""
    return _FORMS.get(equation.primitive.name, _UNKNOWN)[1] is _call


def _unknown(equation: Equation) -> tuple[Body, ...]:
    return tuple(Body(jaxpr, times=None) for jaxpr in jaxprs.sub_jaxprs(equation))


def _counts(jaxpr: Jaxpr) -> tuple[int, int]:
    bare, _ = jaxprs.open_jaxpr(jaxpr)
    return len(bare.invars), len(bare.outvars)


def _whole(jaxpr: Jaxpr, first: int = 0, **fields: Value) -> Body:
    """A body whose inputs are the operands from `first` on, and whose outputs are the results."""
    inputs, outputs = _counts(jaxpr)
    operands = tuple(range(first, first + inputs))
    nothing = ((None,) * inputs, (None,) * outputs)
    return Body(jaxpr, operands, tuple(range(outputs)), *nothing, **fields)


def _call(equation: Equation) -> tuple[Body, ...]:
    return tuple(map(_whole, jaxprs.sub_jaxprs(equation)))


def _scan(equation: Equation) -> tuple[Body, ...]:
    (jaxpr,), length = jaxprs.sub_jaxprs(equation), equation.params["length"]
    inputs, outputs = _counts(jaxpr)
    consts, carry, xs = map(len, eqn_params.scan_parts(equation.params, range(inputs)))
    taken = (*(None,) * (consts + carry), *(ROW,) * xs)
    given = (*(None,) * carry, *(ROW,) * (outputs - carry))
    body = _whole(
        jaxpr, consts=consts, carry=carry, times=length, backwards=bool(equation.params["reverse"])
    )
    return (dataclasses.replace(body, taken=taken, given=given),)


def _while(equation: Equation) -> tuple[Body, ...]:
    params = equation.params
    of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
    body = _whole(params["body_jaxpr"], of_test, consts=of_body, times=None)
    body = dataclasses.replace(body, carry=len(body.taken) - of_body)
    test = _whole(params["cond_jaxpr"], consts=of_test, carry=body.carry, times=None, tests=True)
    first = of_test + of_body
    operands = (*range(of_test), *range(first, first + body.carry))
    return dataclasses.replace(test, operands=operands, results=(None,)), body


def _cond(equation: Equation) -> tuple[Body, ...]:
    return tuple(_whole(one, 1, conditional=True) for one in equation.params["branches"])


def _shard_map(equation: Equation) -> tuple[Body, ...]:
    (jaxpr,), params = jaxprs.sub_jaxprs(equation), equation.params
    body = _whole(jaxpr, times=eqn_params.device_count(equation))
    specs = tuple(params["in_specs"]), tuple(params["out_specs"])
    return (dataclasses.replace(body, taken=specs[0], given=specs[1]),)


_Form = tuple[str, Callable[[Equation], tuple[Body, ...]]]
_UNKNOWN: _Form = ("", _unknown)
CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call")
"""Calls with a rule of their own for derivatives or vmap, which need none once that is done."""
_CALLS = (*CUSTOM, "call", "composite", "custom_partitioning", "linear_call")
_FORMS: dict[str, _Form] = {
    "scan": ("scan", _scan),
    "while": ("while", _while),
    "cond": ("cond", _cond),
    "shard_map": ("shard_map", _shard_map),
    "jit": ("jit", _call),
    "pjit": ("jit", _call),
    **dict.fromkeys(jaxprs.REMAT, ("remat", _call)),
    **dict.fromkeys(["closed_call", "core_call"], ("inline", _call)),
    **dict.fromkeys(_CALLS, ("", _call)),
}
"""Name of a primitive -> its kind, and the function that gives its bodies."""
