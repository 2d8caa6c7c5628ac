"""Jaxprs and their equations, for every supported version of jax."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.stages
import numpy as np
from jax._src import api_util, core, source_info_util
from jax._src.interpreters import ad as private
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir, partial_eval

from nnx_inspector.typing import (
    Array,
    Atom,
    Aval,
    Equation,
    Function,
    Jaxpr,
    OpenJaxpr,
    Params,
    Primitive,
    Value,
    Var,
)

REMAT = frozenset(["remat2", "remat", "checkpoint"])
"""The names of jax's remat primitive."""
JITS = frozenset(["jit", "pjit"])
PLACEMENTS = frozenset(
    {"device_put", "layout_constraint", "mesh_cast", "pcast", "pvary", "reshard"}
    | {"sharding_constraint"}
)
"""The primitives that only say on which devices a value lies."""
IDENTITIES = PLACEMENTS | {"copy", "copy_p", "optimization_barrier", "name"}
"""jax's primitives whose results are their operands."""


def open_jaxpr(jaxpr: object) -> tuple[OpenJaxpr, Sequence[Value]]:
    """The pair (jaxpr, consts) of a Jaxpr or a ClosedJaxpr; jax 0.12 merged the two classes."""
    bare: Any = getattr(jaxpr, "jaxpr", jaxpr)
    return bare, getattr(jaxpr, "consts", ())


def sub_jaxprs(equation: Equation) -> Iterator[Jaxpr]:
    """The jaxprs among an equation's parameters, in order."""
    return jaxprs_in(equation.params)


def jaxprs_in(params: Params) -> Iterator[Jaxpr]:
    """The jaxprs among some parameters, in order."""

    # jax.core.jaxprs_in_params does this for its own class of jaxprs. In jax 0.10 a jaxpr may be
    # closed or bare, also in a tuple, and both kinds stand in the parameters of the same equation.
    def is_jaxpr(value: object) -> bool:
        return hasattr(value, "eqns") and hasattr(value, "invars")

    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if is_jaxpr(item) or is_jaxpr(getattr(item, "jaxpr", None)):
                yield item


def map_jaxprs(params: Params, change: Callable[[Value], Value]) -> Params:
    """An equation's parameters with changed jaxprs; the same object if `change` changes none."""
    new: Params = {}
    for name, value in params.items():
        several = value if isinstance(value, tuple) else (value,)
        if name != "cond_jaxpr" and any(hasattr(open_jaxpr(x)[0], "eqns") for x in several):
            changed = [change(x) for x in several]
            if any(a is not b for a, b in zip(changed, several, strict=True)):
                new[name] = tuple(changed) if isinstance(value, tuple) else changed[0]
    return {**params, **new} if new else params


def retrace(jaxpr: Jaxpr, run: Function) -> Value:
    """A jaxpr of the same kind, traced from `run(*inputs)`; the same object if that fails."""
    bare, _ = open_jaxpr(jaxpr)
    if not has_array_inputs(jaxpr):
        return jaxpr
    avals = [v.aval for v in bare.invars]

    def form(a: Any) -> jax.ShapeDtypeStruct:
        where = a.sharding if a.sharding.mesh.explicit_axes else None
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where, weak_type=a.weak_type)

    # A jaxpr that jax evaluates must be of the class that its primitive expects, with the same
    # types of inputs. Tracing anew is the one public way to get both right in every version of jax.
    new = jax.make_jaxpr(run)(*map(form, avals))
    return new if type(new) is type(jaxpr) else new.jaxpr if not new.consts else jaxpr


def edit_jaxpr(
    jaxpr: Jaxpr,
    *,
    inputs: Sequence[object] = (),
    equations: Sequence[Equation],
    outputs: Sequence[Var],
) -> Jaxpr:
    """A jaxpr of the same kind with other equations and outputs, and with more inputs in front.

    Its effects are those of the jaxpr, except the ones that none of the equations has.
    """
    bare, _ = open_jaxpr(jaxpr)
    # `Jaxpr.replace` is what jax's own passes use. An effect that no equation has is an error in
    # some of them, and debug names of the wrong number are one in all. It can go when jax has a
    # public builder of jaxprs.
    effects = {e for e in bare.effects if any(e in one.effects for one in equations)}
    about, names = bare.debug_info.with_unknown_names(), bare.debug_info.arg_names
    if names is not None:
        about = about._replace(arg_names=(*("",) * len(inputs), *names))
    new = bare.replace(
        invars=[*inputs, *bare.invars],
        outvars=list(outputs),
        eqns=list(equations),
        effects=effects,
        debug_info=about,
    )
    return closed_like(jaxpr, new)


def has_array_inputs(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr's inputs are arrays: no references, and no types of hijax."""
    bare, _ = open_jaxpr(jaxpr)
    return all(type(v.aval).__name__ == "ShapedArray" for v in (*bare.constvars, *bare.invars))


def new_var(aval: Aval) -> Var:
    """A new variable of a type, for an input of a jaxpr or an output of an equation."""
    # Variables are compared by identity, so new ones never meet those of a program. jax.extend.core
    # has the class without a public way to make one.
    found: Any = core.Var(aval)
    return found


class _AvalArgument:
    """See `aval_argument`."""

    def __init__(self, aval: Any):
        self.aval, self.shape, self.dtype = aval, aval.shape, aval.dtype


def aval_argument(aval: object) -> Value:
    """A type as an argument of `jax.make_jaxpr`.

    jax knows the type of an argument by the class of the argument. A `ShapeDtypeStruct`, its own
    stand-in for an array, cannot say all that is in a type (the memory space in jax 0.10). This one
    has the very type that a variable has, so that what is traced fits in where the variable is.
    """
    core.pytype_aval_mappings.setdefault(_AvalArgument, lambda x: x.aval)
    return _AvalArgument(aval)


def closed_like(own: Any, bare: OpenJaxpr) -> Value:
    """A bare jaxpr as one of the same kind as `own`, with its constants."""
    return bare if open_jaxpr(own)[0] is own else own.replace(jaxpr=bare)


def stacked_aval(aval: Aval, length: int) -> Value:
    """The type of what a scan of so many iterations makes of an output of each."""
    # On an explicit mesh the type also says how the new axis lies on the devices, which is more
    # than a shape and a dtype.
    return core.unmapped_aval(length, 0, aval)


def closed_call(jaxpr: Jaxpr) -> tuple[Primitive, Params]:
    """The primitive and the parameters that run a jaxpr where it stands.

    For a call with a rule of its own for derivatives or vmap whose jaxpr was changed: the rule was
    made for the inputs and outputs that it had, and nobody asks for it any more. Operands are the
    inputs of the jaxpr, and results its outputs.
    """
    # A changed custom_jvp_call or remat under its own name would be differentiated by the rule of
    # the old jaxpr. `closed_call` has no rule of its own: jax goes through its equations.
    if not hasattr(jaxpr, "jaxpr"):  # of jax 0.10, without constants
        closed: Any = core
        jaxpr = closed.ClosedJaxpr(jaxpr, ())
    return core.closed_call_p, {"call_jaxpr": jaxpr}


def is_dropped(variable: Var) -> bool:
    """Whether an output of an equation has no name, because nothing uses it."""
    return isinstance(variable, core.DropVar)


def literal(value: np.ndarray | np.generic) -> Atom:
    """A constant as an equation's operand."""
    # A constant of a jaxpr is either this or one more input. An input would be a new argument of
    # each program around it.
    found: Any = core.Literal(value, core.typeof(value))
    return found


def current_named_scopes() -> tuple[str, ...]:
    """The names of the `jax.named_scope`s that are open in this trace, outermost first."""
    # The name stack is what XProf shows. jax writes it into each equation, and has no public way to
    # read it. Without it, an operation within a `jax.named_scope` would lose that part of its name.
    stack = source_info_util.current_name_stack().stack
    return tuple(one.name for one in stack if isinstance(one, source_info_util.Scope))


def state_writes(jaxpr: Jaxpr) -> set[str]:
    """The kinds of state that a jaxpr writes to, including its inner jaxprs.

    "ref": a `jax.Ref`. "hijax": a Variable that is a single value for jax (flax 0.12.8 traces it
    and then loses the written value; later versions raise).
    """
    found: set[str] = set()
    for equation in open_jaxpr(jaxpr)[0].eqns:
        name = equation.primitive.name
        # jax keeps these as effects, but does not say whether they are reads or writes. A program
        # that only reads may run twice; one that writes may not.
        if name in ("swap", "addupdate"):
            found.add("ref")
        elif name == "set_variable":
            found.add("hijax")
        for inner in sub_jaxprs(equation):
            found |= state_writes(inner)
    return found


def needed_inputs(jaxpr: Jaxpr, outputs: int, each_its_own: Primitive) -> list[bool]:
    """For each input of a jaxpr, whether any of its first `outputs` outputs depends on it. Each
    output of the primitive `each_its_own` depends only on the input at the same position.
    """
    bare, _ = open_jaxpr(jaxpr)
    equations: list[Equation] = []
    for one in bare.eqns:
        if one.primitive is not each_its_own or len(one.invars) != len(one.outvars):
            equations.append(one)
            continue
        for i, o in zip(one.invars, one.outvars, strict=True):
            equations.append(one.replace(invars=[i], outvars=[o]))
    cut: Any = bare.replace(eqns=equations)
    wanted = [i < outputs for i in range(len(bare.outvars))]
    # jax's own removal of dead code, also through scans and branches. It takes a primitive of
    # several results as one, and a mark has one for each leaf: so the marks are cut into single
    # ones first. Otherwise each input that is marked would seem to be needed.
    _, used = partial_eval.dce_jaxpr(cut, wanted)
    return list(used)


def varying_axes(x: Value) -> frozenset[str]:
    """The manual axes along which an array differs between devices; none without `check_vma`."""
    if isinstance(x, (np.ndarray, np.generic)):
        return frozenset()
    # Within a shard_map, the type says along which axes devices hold different values, and jax
    # refuses a scan or a cond whose carry changes that. What we add to a carry must therefore have
    # the very same type.
    kind = getattr(x, "aval", x).manual_axis_type
    return frozenset() if kind is None else kind.varying


def is_literal(atom: object) -> bool:
    return hasattr(atom, "val")


def real_number(atom: object) -> float | None:
    """The value of a literal that is one real number, None of anything else."""
    value = np.asarray(getattr(atom, "val", None))
    return float(value) if value.ndim == 0 and value.dtype.kind not in "cO" else None


def bind(equation: Equation, values: Sequence[object]) -> list[Array]:
    """Run an equation's primitive under its own name stack, source line and context."""
    params = equation.primitive.get_bind_params(equation.params)
    stack = source_info_util.current_name_stack() + equation.source_info.name_stack
    traceback = equation.source_info.traceback
    # `eval_jaxpr` does the same for a whole jaxpr. Without it, an error in the user's model would
    # point at this file, and profiles and `jax_debug_nans` would name our function.
    with source_info_util.user_context(traceback, name_stack=stack), equation.ctx.manager:
        try:
            out = equation.primitive.bind(*values, **params)
        except api_util.InternalFloatingPointError as error:  # jax's own jit would handle it
            _bind_one_by_one(equation, values)
            raise FloatingPointError(
                f"invalid value ({error.ty}) encountered in {equation.primitive}"
            ) from None
    return list(out) if equation.primitive.multiple_results else [out]


def _bind_one_by_one(equation: Equation, values: Sequence[object]) -> None:
    """Run a jit's inner equations one by one, as jax does to find the one that makes a NaN."""
    for jaxpr in sub_jaxprs(equation) if equation.primitive.name in JITS else ():
        inner, consts = open_jaxpr(jaxpr)
        env = dict(zip((*inner.constvars, *inner.invars), (*consts, *values), strict=True))
        for each in inner.eqns:
            read = [v.val if is_literal(v) else env[v] for v in each.invars]
            env.update(zip(each.outvars, bind(each, read), strict=True))


def jaxpr_as_fun(jaxpr: Any, consts: Sequence[object]) -> Value:
    """A jaxpr as a function of its inputs, which returns the list of its outputs."""
    return lambda *values: jax.core.eval_jaxpr(jaxpr, consts, *values)


def context_of(equation: Equation) -> contextlib.AbstractContextManager[None]:
    """The settings an equation was traced under, such as the mesh, as a context manager."""
    return equation.ctx.manager


def zero_tangent(x: object) -> Value:
    """The tangent of a value that nothing differentiates."""
    aval: Aval = jax.typeof(x)
    return ad.Zero(aval.to_tangent_aval())


def identity_primitive(name: str) -> Primitive:
    """A primitive that returns its first operand as it is, whatever the others and its parameters;
    it has no rule for derivatives and for vmap yet.
    """
    primitive = jex.Primitive(name)
    primitive.def_impl(lambda x, *_, **how: x)
    primitive.def_abstract_eval(lambda x, *_, **how: x)
    mlir.register_lowering(primitive, lambda ctx, x, *_, **how: [x])
    return primitive


def nondifferentiable_primitive(
    name: str,
    value: Callable[..., jax.Array],
    kind: Callable[..., Aval],
    batch: Callable[..., tuple[Value, int | None]],
) -> Primitive:
    """A primitive that nothing differentiates.

    Args:
        value: what it computes, of its operands and parameters.
        kind: the type of that.
        batch: what a vmap makes of it, of the operands, their mapped axes and the parameters.
    """
    primitive = jex.Primitive(name)
    primitive.def_impl(value)
    primitive.def_abstract_eval(kind)
    mlir.register_lowering(primitive, mlir.lower_fun(value, multiple_results=False))

    def jvp(operands: Sequence[object], _: object, **params: object) -> tuple[Value, Value]:
        out = primitive.bind(*operands, **params)
        return out, zero_tangent(out)

    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    return primitive


Linearized = tuple[Any, Any, Function]
"""The outputs of an equation (one, or a list), whether each has a tangent that is not 0, and the
function from the operands' tangents to those of the outputs; an `ad.Zero` stands for 0.
"""


def register_linearization(primitive: Primitive, linearize: Callable[..., Linearized]) -> None:
    """Differentiate a primitive by `linearize(moves, *operands, **params)`, forward and backward;
    `moves` says which operands have a tangent.

    `jax.grad` linearizes. For a primitive that has only a rule for `jvp`, jax traces that rule into
    a jaxpr of its own, which took a tenth of a second for the 250 marks and places of a model of 12
    layers. Its table of linearizations is not public, and the form of a rule has changed: from jax
    0.11 on, a rule also returns residuals that keep their structure, of which ours has none. It can
    go when jax makes `deflinear` accept a rule with parameters, or the table is public.
    """
    # There is no version to ask for: the change came within a release. The names that jax's code
    # uses tell which form of a rule it will call.
    fields = private.LinearizeTrace.process_primitive.__code__.co_names
    structured = "structured_residuals" in fields

    def jvp(operands: Sequence[object], tangents: Sequence[object], **params: object) -> Value:
        moves = [type(t) is not ad.Zero for t in tangents]
        out, _, tangent = linearize(moves, *operands, **params)
        return out, tangent(*tangents)

    def rule(_: bool, moves: Sequence[bool], *operands: object, **params: object) -> Value:
        out, move, tangent = linearize(moves, *operands, **params)
        if structured:
            return out, move, None, None, lambda _, __, *tangents: tangent(*tangents)
        return out, move, None, lambda _, *tangents: tangent(*tangents)

    ad.primitive_jvps[primitive] = jvp
    private.primitive_linearizations[primitive] = rule
