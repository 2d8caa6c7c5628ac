"""Programs that speak with the host when they are started and when they have ended, not in between.

A program that asks has the host wait for the device, and one that asks or tells has the device wait
for the host: on a GPU that stops all kernels. If it does so a known number of times, the answers
can be inputs and the messages outputs. Invariant: no change touches an equation that computes a
result. Knows no sites and no sessions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from nnx_inspector._compat import jaxprs, native
from nnx_inspector._compat.host_calls import EFFECT
from nnx_inspector.program.host.primitives import ASK, TELL


@dataclasses.dataclass(frozen=True)
class Message:
    """What a program tells: each operand is the number of an answer, or of an output from -1 down,
    or a constant.

    Attributes:
        host: the `host` of the call of `tell`.
        gate: whether to send it.
        operands: the arrays that are sent.
    """

    host: Callable[..., None]
    gate: int | np.ndarray
    operands: tuple[int | np.ndarray, ...]

    def tell(self, answers: Sequence[Any], told: Sequence[Any]) -> None:
        """Tell the host, which gets arrays that may not be there yet."""

        def found(x: int | np.ndarray) -> Any:
            return x if not isinstance(x, int) else answers[x] if x >= 0 else told[-1 - x]

        if bool(found(self.gate)):
            self.host(*map(found, self.operands))


@dataclasses.dataclass(frozen=True, eq=False)
class Answered:
    """A program that takes what it would have asked for, and returns what it would have told.

    Attributes:
        program: takes the answers, one host's after the other, and then the other inputs; returns
            what it would have told after its results.
        hosts: the `host` of each call of `ask`, in order.
        types: the shapes and dtypes of the answers.
        messages: what the program tells the host.
        told: how many outputs follow the results.
    """

    program: Any
    hosts: tuple[Callable[..., Any], ...]
    types: tuple[jax.ShapeDtypeStruct, ...]
    messages: tuple[Message, ...]
    told: int

    def tell(self, answers: Sequence[Any], told: Sequence[Any]) -> None:
        """Send the messages of a program that was started with these answers."""
        for message in self.messages:
            message.tell(answers, told)


@dataclasses.dataclass(frozen=True)
class _Told:
    """A message by the variables of the program in which it is."""

    host: Callable[..., None]
    operands: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Changed:
    program: Any
    hosts: list[Callable[..., Any]]
    inputs: list[Any]
    messages: list[_Told]
    told: list[Any]


def answered(program: Any) -> Answered | None:
    """The program with the answers as inputs and the messages as outputs; None if how often it asks
    or tells is known only when it runs, or whether it tells.
    """
    found = _changed(program, within=False)
    if found is None:
        return None
    places: dict[Any, int] = {v: i for i, v in enumerate(found.inputs)}
    places |= {v: -1 - i for i, v in enumerate(found.told)}
    messages: list[Message] = []
    for one in found.messages:
        gate, *sent = (
            np.asarray(x.val) if jaxprs.is_literal(x) else places[x] for x in one.operands
        )
        if isinstance(gate, int) and gate < 0:
            return None
        messages.append(Message(one.host, gate, tuple(sent)))
    types = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in found.inputs)
    return Answered(found.program, tuple(found.hosts), types, tuple(messages), len(found.told))


def _changed(program: Any, *, within: bool) -> _Changed | None:
    """A program with answers as inputs and messages as outputs. Within another one, it does not
    return what it was given.
    """
    if not jaxprs.is_simple(program):
        return None
    bare, _ = jaxprs.open_jaxpr(program)
    zero = jaxprs.literal(np.zeros((), np.float32))
    instead: dict[Any, Any] = {}  # another name of the same value
    new = _Changed(None, [], [], [], [])
    equations: list[Any] = []
    for one in bare.eqns:
        operands = _read(one.invars, instead)
        if one.primitive is ASK:
            new.hosts.append(one.params["host"])
            new.inputs.extend(_all_kept(one.outvars))
        elif one.primitive is TELL:
            new.messages.append(_Told(one.params["host"], tuple(operands)))
            instead[one.outvars[0]] = zero
        elif one.primitive.name == "stop_gradient":  # nobody differentiates the program any more
            instead[one.outvars[0]] = operands[0]
        elif EFFECT not in one.effects:
            equations.append(_with_operands(one, operands))
        else:
            inner = (
                _changed(one.params["jaxpr"], within=True)
                if one.primitive.name in jaxprs.JITS
                else None
            )
            if inner is None:
                return None
            equations.append(_entered(one, operands, inner, new, instead))
    known = {*new.inputs, *(bare.invars if within else ())}
    sent = (x for m in new.messages for x in m.operands if not jaxprs.is_literal(x))
    new.told.extend(dict.fromkeys(x for x in sent if x not in known))
    outputs = [*_read(bare.outvars, instead), *new.told]
    changed = jaxprs.edited(program, inputs=new.inputs, equations=equations, outputs=outputs)
    return dataclasses.replace(new, program=changed)


def _entered(
    equation: Any, operands: Sequence[Any], inner: _Changed, new: _Changed, instead: dict[Any, Any]
) -> Any:
    """The equation of a jitted function that was changed; what it asks and tells goes into `new`,
    and what it returns as it was given into `instead`.
    """
    given = [jaxprs.variable(v.aval) for v in inner.inputs]
    told = [jaxprs.variable(v.aval) for v in inner.told]
    bare, _ = jaxprs.open_jaxpr(inner.program)
    outside = dict(zip((*bare.invars, *inner.told), (*given, *operands, *told), strict=True))
    new.hosts.extend(inner.hosts)
    new.inputs.extend(given)
    for message in inner.messages:
        new.messages.append(_Told(message.host, tuple(_read(message.operands, outside))))
    # not strict: the additional outputs follow the results
    for outer, result in zip(equation.outvars, bare.outvars, strict=False):
        if not jaxprs.is_literal(result) and result in bare.invars:
            instead[outer] = outside[result]
    params = jaxprs.with_inputs(equation.params, inner.program, len(given), outputs=len(told))
    return equation.replace(
        invars=[*given, *operands],
        outvars=[*equation.outvars, *told],
        params=params,
        effects=bare.effects,
    )


def silenced(program: Answered) -> Any:
    """The program without its messages, which computes nothing for them."""
    bare, _ = jaxprs.open_jaxpr(program.program)
    results = bare.outvars[: len(bare.outvars) - program.told]
    quiet = jaxprs.edited(program.program, equations=bare.eqns, outputs=results)
    return _without_once(jaxprs.without_dead_code(quiet))


def _without_once(program: Any) -> Any:
    """The program without what kept a measured value from being computed twice: nothing reads it
    twice now, except a row that perturbs another dtype than float32.
    """
    bare, _ = jaxprs.open_jaxpr(program)
    instead: dict[Any, Any] = {}
    equations: list[Any] = []
    for one in bare.eqns:
        operands = _read(one.invars, instead)
        if one.primitive is native.ONCE and one.invars[0].aval.dtype == np.float32:
            instead[one.outvars[0]] = operands[0]
            continue
        one = _with_operands(one, operands)
        if one.primitive.name in jaxprs.JITS:
            one = one.replace(params={**one.params, "jaxpr": _without_once(one.params["jaxpr"])})
        equations.append(one)
    return jaxprs.edited(program, equations=equations, outputs=_read(bare.outvars, instead))


def _read(operands: Sequence[Any], instead: dict[Any, Any]) -> list[Any]:
    return [x if jaxprs.is_literal(x) else instead.get(x, x) for x in operands]


def _with_operands(equation: Any, operands: list[Any]) -> Any:
    return equation if operands == equation.invars else equation.replace(invars=operands)


def _all_kept(variables: Sequence[Any]) -> list[Any]:
    """The variables, and new ones for those that the program drops."""
    return [jaxprs.variable(v.aval) if jaxprs.is_dropped(v) else v for v in variables]
