"""Programs that get the host's answers when they are started, and do not ask while they run.

A program that asks has the host wait for the device, and the device for the host. If it asks a
known number of times, the answers can be inputs instead. Invariant: neither change touches an
equation that computes a result. Knows no sites and no sessions.
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


@dataclasses.dataclass(frozen=True, eq=False)
class Answered:
    """A program that takes what it would have asked for.

    Attributes:
        program: takes the answers, one host's after the other, and then the other inputs.
        hosts: the `host` of each call of `ask`, in order.
        types: the shapes and dtypes of the answers.
    """

    program: Any
    hosts: tuple[Callable[..., Any], ...]
    types: tuple[jax.ShapeDtypeStruct, ...]


def answered(program: Any) -> Answered | None:
    """The program with the answers as inputs, or None if how often it asks or tells the host is
    known only when it runs.
    """
    found = _answered(program)
    if found is None:
        return None
    new, hosts, variables = found
    types = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables)
    return Answered(new, tuple(hosts), types)


def _answered(program: Any) -> tuple[Any, list[Callable[..., Any]], list[Any]] | None:
    if not jaxprs.is_simple(program):
        return None
    bare, _ = jaxprs.open_jaxpr(program)
    hosts: list[Callable[..., Any]] = []
    inputs: list[Any] = []
    equations: list[Any] = []
    for one in bare.eqns:
        if one.primitive is ASK:
            hosts.append(one.params["host"])
            inputs += _all_kept(one.outvars)
        elif one.primitive is TELL or EFFECT not in one.effects:
            equations.append(one)
        else:
            within = _answered(one.params["jaxpr"]) if one.primitive.name in jaxprs.JITS else None
            if within is None:
                return None
            inner, found, variables = within
            given = [jaxprs.variable_like(v) for v in variables]
            params = jaxprs.with_inputs(one.params, inner, len(given))
            equations.append(_changed(one, [*given, *one.invars], params))
            hosts += found
            inputs += given
    return (
        jaxprs.edited(program, inputs=inputs, equations=equations, outputs=bare.outvars),
        hosts,
        inputs,
    )


def silenced(program: Any) -> Any:
    """A program of the same results that tells the host nothing, and computes nothing for that.

    It may tell the host in jitted functions, and nowhere else inside an equation.
    """
    return jaxprs.without_dead_code(_silenced(program))


def _silenced(program: Any) -> Any:
    bare, _ = jaxprs.open_jaxpr(program)
    zero = jaxprs.literal(np.zeros((), np.float32))
    instead: dict[Any, Any] = {}

    def read(operands: Sequence[Any]) -> list[Any]:
        return [x if jaxprs.is_literal(x) else instead.get(x, x) for x in operands]

    equations: list[Any] = []
    for one in bare.eqns:
        if one.primitive is TELL:
            instead |= dict.fromkeys(one.outvars, zero)
            continue
        if one.primitive is native.ONCE and one.invars[0].aval.dtype == np.float32:
            # nothing reads it twice now; a row that perturbs another dtype does
            instead[one.outvars[0]] = read(one.invars)[0]
            continue
        params = one.params
        if EFFECT in one.effects:
            params = {**params, "jaxpr": _silenced(params["jaxpr"])}
        equations.append(_changed(one, read(one.invars), params))
    return jaxprs.edited(program, equations=equations, outputs=read(bare.outvars))


def _changed(equation: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    effects = equation.effects
    if params is not equation.params:
        effects = jaxprs.open_jaxpr(params["jaxpr"])[0].effects
    return equation.replace(invars=list(operands), params=params, effects=effects)


def _all_kept(variables: Sequence[Any]) -> list[Any]:
    """The variables, and new ones for those that the program drops."""
    return [jaxprs.variable_like(v) if jaxprs.is_dropped(v) else v for v in variables]
