"""Which examples of a vmap run what is inside a condition or a loop.

A vmap maps a `cond` whose branch each example chooses to a select: XLA computes every branch for
all examples. A `while` that ends at another time for each example runs for all of them until the
last one ends. What is observed inside would count examples that never took the branch, or had left
the loop. Here such a branch or body gets one more operand before it is mapped: whether the example
is there. What is then done with it is left to the function that adds it. Invariant: no result
changes, and what holds nothing of interest is mapped as it would have been.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax._src.interpreters import batching
from jax._src.lax.control_flow import conditionals, loops

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.redirect import AddUndo, patch
from nnx_inspector.typing import Jaxpr, Params, Value

Presence = Callable[[Value, Value], Value]
"""Returns, for a jaxpr and a new variable, a bool, a jaxpr that has it as another input in front:
whether the example is there. None if the jaxpr is of no interest."""


def patch_batching_rules(presence: Presence, add_undo: AddUndo) -> None:
    """Ask `presence` where a vmap maps a condition or a loop; `add_undo` gets what undoes it."""
    # jax looks up in this dict what a vmap makes of a primitive. A rule sees the branches before
    # they are mapped, with the index or the condition that each example has; afterwards the two are
    # one select among others. There is no public way to wrap a rule. Without this, marks in the
    # branch that an example does not take count for it. It can go when a cond that is mapped keeps
    # its branches, as a primitive of its own.
    rules = batching.fancy_primitive_batchers
    for primitive, batch in ((conditionals.cond_p, _cond), (loops.while_p, _while)):
        patch(rules, primitive, batch(rules[primitive], presence), add_undo)


def _cond(rule: Any, presence: Presence) -> Value:
    def batch(
        axis_data: Any,
        args: Sequence[Value],
        dims: Sequence[int | None],
        *,
        branches: Any,
        **params: object,
    ) -> Value:
        # jax asks the platform anew where branches are of platforms: no example chooses
        if dims[0] is None or "branches_platforms" in params:
            return rule(axis_data, args, dims, branches=branches, **params)
        index, at = args[0], dims[0]
        # with the mesh that is in types: jax maps it as it maps the index
        number = core.mapped_aval(axis_data.size, at, jax.typeof(index))
        aval = number.update(dtype=np.dtype(bool), weak_type=False)
        inputs = [jaxprs.new_var(aval) for _ in branches]
        present = [presence(one, v) for one, v in zip(branches, inputs, strict=True)]
        if all(one is None for one in present):
            return rule(axis_data, args, dims, branches=branches, **params)
        with internal_config():
            theirs = [jax.lax.eq(index, jax.lax.full_like(index, n)) for n in range(len(branches))]
        new = tuple(
            _add_presence_inputs(inputs, one, branch)
            for one, branch in zip(present, branches, strict=True)
        )
        args = [index, *theirs, *args[1:]]
        dims = [at, *[at] * len(theirs), *dims[1:]]
        return rule(axis_data, args, dims, branches=new, **params)

    return batch


def _add_presence_inputs(inputs: Sequence[object], present: Value, branch: Value) -> Value:
    """A branch whose first operands are, for each branch, whether an example takes it."""
    whole = branch if present is None else present
    bare, _ = jaxprs.open_jaxpr(whole)
    own = bare.invars if present is None else bare.invars[1:]
    new = bare.replace(invars=[*inputs, *own])
    return new if bare is whole else whole.replace(jaxpr=new)


def _while(rule: Any, presence: Presence) -> Value:
    def batch(
        axis_data: Any, args: Sequence[Value], dims: Sequence[int | None], **params: Value
    ) -> Value:
        test, tests = params["cond_jaxpr"], params["cond_nconsts"]
        test_bare, _ = jaxprs.open_jaxpr(test)
        present = jaxprs.new_var(test_bare.outvars[0].aval)
        apart = _has_batched_condition(dims, params)
        inside = presence(params["body_jaxpr"], present) if apart else None
        if inside is None:
            return rule(axis_data, args, dims, **params)
        # the loop's own condition, of the values that the body gets, is computed once more inside:
        # there it is mapped as they are
        _, *own = jaxprs.open_jaxpr(inside)[0].invars
        consts = [jaxprs.new_var(v.aval) for v in test_bare.invars[:tests]]
        carry = own[params["body_nconsts"] :]
        asked = _call_equation(test, [*consts, *carry], [present])
        bare, _ = jaxprs.open_jaxpr(inside)
        new = bare.replace(invars=[*consts, *own], eqns=[asked, *bare.eqns])
        changed = {
            **params,
            "body_jaxpr": new if bare is inside else inside.replace(jaxpr=new),
            "body_nconsts": params["body_nconsts"] + tests,
        }
        args = [*args[:tests], *args[:tests], *args[tests:]]
        dims = [*dims[:tests], *dims[:tests], *dims[tests:]]
        return rule(axis_data, args, dims, **changed)

    return batch


def _call_equation(jaxpr: Jaxpr, operands: Sequence[object], results: Sequence[object]) -> Value:
    """An equation that runs a jaxpr without effects."""
    primitive, params = jaxprs.closed_call(jaxpr)
    return core.new_jaxpr_eqn(list(operands), list(results), primitive, params, core.no_effects)


def with_one_condition(
    params: Params, operands: Sequence[object], *, more: int
) -> tuple[Params, list[Value]]:
    """The parameters and operands of a while loop that carries so many more values, last, than one
    that had a condition for each example of a vmap. The new one has a condition for all of them. To
    be called in the `context_of` the equation; any other loop stays as it is.

    jax keeps, of each carried value, the entries of the examples whose condition no longer holds,
    and so each must have an entry for each example. That is left to XLA. Here the loop does the
    same itself, with the values that it had, and what it carries in addition is carried as it is.
    """
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    condition = jaxprs.open_jaxpr(test)[0].outvars[0].aval
    if not condition.shape:
        return params, list(operands)
    tests = params["cond_nconsts"]
    bare, _ = jaxprs.open_jaxpr(body)
    carry = bare.invars[params["body_nconsts"] :]
    own = carry[: len(carry) - more]

    def of_all(*values: object) -> Value:
        return jnp.any(_evaluated(test, values))

    def kept(here: Value, *values: Value) -> Value:
        before, after = values[: len(own)], values[len(own) :]
        wider = lambda x: jax.lax.broadcast_in_dim(here, x.shape, range(here.ndim))  # noqa: E731
        return [jax.lax.select(wider(x), new, x) for x, new in zip(before, after, strict=True)]

    consts = [jaxprs.new_var(v.aval) for v in jaxprs.open_jaxpr(test)[0].invars[:tests]]
    here = jaxprs.new_var(condition)
    with internal_config():
        selects = jax.make_jaxpr(kept)(*[jaxprs.aval_argument(v.aval) for v in (here, *own, *own)])
        last = jax.make_jaxpr(of_all)(*[jaxprs.aval_argument(v.aval) for v in (*consts, *carry)])
    results = bare.outvars[: len(own)]
    chosen = [jaxprs.new_var(v.aval) for v in own]
    new = bare.replace(
        invars=[*consts, *bare.invars],
        eqns=[
            _call_equation(test, [*consts, *carry], [here]),
            *bare.eqns,
            _call_equation(selects, [here, *own, *results], chosen),
        ],
        outvars=[*chosen, *bare.outvars[len(own) :]],
    )
    changed = {
        **params,
        "cond_jaxpr": last,
        "body_jaxpr": new if bare is body else body.replace(jaxpr=new),
        "body_nconsts": params["body_nconsts"] + tests,
    }
    return changed, [*operands[:tests], *operands]


def _evaluated(jaxpr: Jaxpr, values: Sequence[object]) -> Value:
    (found,) = jaxprs.jaxpr_as_fun(*jaxprs.open_jaxpr(jaxpr))(*values)
    return found


def _has_batched_condition(dims: Sequence[Value], params: Params) -> bool:
    """Whether a loop may end at another iteration for each example of a vmap. If its condition has
    one result for each example already, its body was changed when it got them.
    """
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    bare, _ = jaxprs.open_jaxpr(test)
    if bare.outvars[0].aval.shape or bare.effects:
        return False
    tests, bodies = params["cond_nconsts"], params["body_nconsts"]
    mapped = [d is not None for d in dims]
    of_test, of_body = mapped[:tests], mapped[tests : tests + bodies]
    carry = mapped[tests + bodies :]
    while True:
        after = list(map(operator.or_, carry, _depends_on(body, [*of_body, *carry])))
        if after == carry:
            return _depends_on(test, [*of_test, *carry])[0]
        carry = after


def _depends_on(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """For each output of a jaxpr, whether it may depend on one of these inputs."""
    bare, _ = jaxprs.open_jaxpr(jaxpr)
    known = {v for v, wanted in zip(bare.invars, inputs, strict=True) if wanted}
    for one in bare.eqns:
        if any(not jaxprs.is_literal(v) and v in known for v in one.invars):
            known.update(one.outvars)
    return [not jaxprs.is_literal(v) and v in known for v in bare.outvars]
