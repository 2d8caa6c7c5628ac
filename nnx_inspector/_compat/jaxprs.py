"""Jaxprs and their equations, for every supported version of jax."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.stages
import numpy as np
from jax.interpreters import ad

REMAT = frozenset(["remat2", "remat", "checkpoint"])
"""The names of jax's remat primitive."""
JITS = frozenset(["jit", "pjit"])
PLACING = frozenset(
    {"device_put", "layout_constraint", "mesh_cast", "pcast", "pvary", "reshard"}
    | {"sharding_constraint"}
)
"""The primitives that only say on which devices a value lies."""


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The pair (jaxpr, consts) of a Jaxpr or a ClosedJaxpr; jax 0.12 merged the two classes."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def sub_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs among an equation's parameters, in order."""

    def is_jaxpr(value: Any) -> bool:
        return hasattr(value, "eqns") and hasattr(value, "invars")

    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if is_jaxpr(item) or is_jaxpr(getattr(item, "jaxpr", None)):
                yield item


def with_jaxprs(params: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """An equation's parameters with changed jaxprs; the same object if `change` changes none."""
    new: dict[str, Any] = {}
    for name, value in params.items():
        several = value if isinstance(value, tuple) else (value,)
        if name != "cond_jaxpr" and any(hasattr(open_jaxpr(x)[0], "eqns") for x in several):
            changed = [change(x) for x in several]
            if any(a is not b for a, b in zip(changed, several, strict=True)):
                new[name] = tuple(changed) if isinstance(value, tuple) else changed[0]
    return {**params, **new} if new else params


def retraced(jaxpr: Any, run: Callable[..., Any]) -> Any:
    """A jaxpr of the same kind, traced from `run(*inputs)`; the same object if that fails."""
    bare, _ = open_jaxpr(jaxpr)
    if not is_simple(jaxpr):
        return jaxpr
    avals = [v.aval for v in bare.invars]

    def form(a: Any) -> jax.ShapeDtypeStruct:
        where = a.sharding if a.sharding.mesh.explicit_axes else None
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where, weak_type=a.weak_type)

    new = jax.make_jaxpr(run)(*map(form, avals))
    return new if type(new) is type(jaxpr) else new.jaxpr if not new.consts else jaxpr


def edited(
    jaxpr: Any, *, inputs: Sequence[Any] = (), equations: Sequence[Any], outputs: Sequence[Any]
) -> Any:
    """A jaxpr of the same kind with other equations and outputs, and with more inputs in front.

    Its effects are those of the jaxpr, except the ones that none of the equations has.
    """
    bare, _ = open_jaxpr(jaxpr)
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


def is_simple(jaxpr: Any) -> bool:
    """Whether a jaxpr's inputs are arrays: no references, and no types of hijax."""
    bare, _ = open_jaxpr(jaxpr)
    return all(type(v.aval).__name__ == "ShapedArray" for v in (*bare.constvars, *bare.invars))


def with_inputs(
    params: dict[str, Any], jaxpr: Any, inputs: int, *, outputs: int = 0
) -> dict[str, Any]:
    """A jit's parameters for a jaxpr that takes so many more inputs before the others, and returns
    so many more outputs after the others.
    """
    from jax._src.named_sharding import UNSPECIFIED

    return {
        **params,
        "jaxpr": jaxpr,
        "in_shardings": (UNSPECIFIED,) * inputs + tuple(params["in_shardings"]),
        "in_layouts": (None,) * inputs + tuple(params["in_layouts"]),
        "donated_invars": (False,) * inputs + tuple(params["donated_invars"]),
        "out_shardings": tuple(params["out_shardings"]) + (UNSPECIFIED,) * outputs,
        "out_layouts": tuple(params["out_layouts"]) + (None,) * outputs,
    }


def variable(aval: Any) -> Any:
    """A new variable of a type, for an input of a jaxpr or an output of an equation."""
    from jax._src import core

    return core.Var(aval)


class _Typed:
    """See `typed`."""

    def __init__(self, aval: Any):
        self.aval, self.shape, self.dtype = aval, aval.shape, aval.dtype


def typed(aval: Any) -> Any:
    """A type as an argument of `jax.make_jaxpr`.

    jax knows the type of an argument by the class of the argument. A `ShapeDtypeStruct`, its own
    stand-in for an array, cannot say all that is in a type (the memory space in jax 0.10). This one
    has the very type that a variable has, so that what is traced fits in where the variable is.
    """
    from jax._src import core

    core.pytype_aval_mappings.setdefault(_Typed, lambda x: x.aval)
    return _Typed(aval)


def closed_like(own: Any, bare: Any) -> Any:
    """A bare jaxpr as one of the same kind as `own`, with its constants."""
    return bare if open_jaxpr(own)[0] is own else own.replace(jaxpr=bare)


def stacked(aval: Any, length: int) -> Any:
    """The type of what a scan of so many iterations makes of an output of each."""
    from jax._src import core

    return core.unmapped_aval(length, 0, aval)


def scan_with(
    params: dict[str, Any], jaxpr: Any, *, consts: int = 0, carry: int = 0, outputs: int = 0
) -> dict[str, Any]:
    """A scan's parameters for a jaxpr with so many more constants, carried values and outputs.

    Operands, and inputs of the jaxpr: more constants, constants, carry, more carry, rows. Results,
    and outputs of the jaxpr: carry, more carry, outputs, more outputs. jax 0.10 counts them, and
    jax 0.12 has them as the leaves of a tree.
    """
    if "num_consts" in params:
        consts, carry = params["num_consts"] + consts, params["num_carry"] + carry
        return {**params, "jaxpr": jaxpr, "num_consts": consts, "num_carry": carry}
    pack, more = _flattree().pack, _flattree().nones
    before, carried, rows = params["ft_in"].unpack()
    carried_out, ys = params["ft_out"].unpack()
    return {
        **params,
        "jaxpr": jaxpr,
        "ft_in": pack(((more(consts), before), (carried, more(carry)), rows)),
        "ft_out": pack(((carried_out, more(carry)), (ys, more(outputs)))),
    }


def while_with(
    params: dict[str, Any], jaxpr: Any, *, consts: int = 0, carry: int = 0
) -> dict[str, Any]:
    """A while loop's parameters for a body with so many more constants and carried values.

    Operands: the test's constants, more constants of the body, its constants, carry, more carry.
    Inputs of the body: the same without the test's. Results, and outputs of the body: carry, more
    carry. The test does not read what is carried in addition.
    """
    inputs = open_jaxpr(jaxpr)[0].invars
    test, _ = open_jaxpr(params["cond_jaxpr"])
    more = [variable(v.aval) for v in inputs[len(inputs) - carry :]]
    changed = closed_like(params["cond_jaxpr"], test.replace(invars=[*test.invars, *more]))
    return {
        **params,
        "body_jaxpr": jaxpr,
        "body_nconsts": params["body_nconsts"] + consts,
        "cond_jaxpr": changed,
    }


def remat_with(params: dict[str, Any], jaxpr: Any, *, inputs: int = 0) -> dict[str, Any]:
    """A remat's parameters for a jaxpr that takes so many more inputs before the others. It may
    return more outputs after the others.
    """
    once = params["prevent_cse"]  # for all operands, or for each
    once = once if isinstance(once, bool) else ((False,) * inputs + tuple(once))
    return {**params, "jaxpr": jaxpr, "prevent_cse": once}


def shard_map_with(
    params: dict[str, Any],
    jaxpr: Any,
    *,
    inputs: int = 0,
    outputs: int = 0,
    axes: tuple[str, ...] = (),
) -> tuple[dict[str, Any], list[Any]]:
    """A shard_map's parameters for a jaxpr that takes so many more inputs before the others and
    returns so many more outputs after the others, and the types of these outside. To be called in
    the `context_of` the equation.

    Every device gets all of an additional input. It returns an additional output as its part of the
    first dimension, along these axes: a row, if that has length 1. On an explicit mesh, and where
    jax checks what varies between devices, the type inside is another than outside.
    """
    from jax._src import core

    bare, _ = open_jaxpr(jaxpr)
    whole, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(axes)
    changed = {
        **params,
        "jaxpr": jaxpr,
        "in_specs": _joined((whole,) * inputs, params["in_specs"]),
        "out_specs": _joined(params["out_specs"], (rows,) * outputs),
    }
    last = bare.outvars[len(bare.outvars) - outputs :]
    mesh, is_checked = params["mesh"], params["check_vma"]
    return changed, [core.unshard_aval(mesh, is_checked, rows, v.aval) for v in last]


@contextlib.contextmanager
def inside_shard_map(params: dict[str, Any]) -> Iterator[None]:
    """A context in which what is traced fits into the jaxpr of a shard_map with these parameters.

    jax traces the body like this: its axes have names, its mesh is manual along them, and types
    say along which axes a value varies if that is checked. The `context_of` an equation has only
    the mesh, and without the last one `pcast` makes a value that varies and has the wrong type.
    """
    from jax._src import config, core
    from jax._src.mesh import use_abstract_mesh

    mesh, manual = params["mesh"], params["newly_manual_axes"]
    known = manual | set(mesh.manual_axes)
    axes = [(name, size) for name, size in mesh.shape.items() if name in known]
    kinds = dict.fromkeys(manual, jax.sharding.AxisType.Manual)
    inner = mesh.abstract_mesh.update_axis_types(kinds)
    checked = config._check_vma(params["check_vma"])
    with core.extend_axis_env_nd(axes), use_abstract_mesh(inner), checked:
        yield


def _joined(*parts: Any) -> Any:
    """Specs of a shard_map in one: a tuple, or a tree if one of them is a tree of jax 0.12."""
    if all(isinstance(part, tuple) for part in parts):
        return tuple(x for part in parts for x in part)
    tree = _flattree()
    return tree.pack(tuple(tree.flatten_list(list(part)) for part in parts))


def _flattree() -> Any:
    """The module of the trees that jax 0.12 has in parameters."""
    return importlib.import_module("jax._src.flattree")


def closed_call(jaxpr: Any) -> tuple[Any, dict[str, Any]]:
    """The primitive and the parameters that run a jaxpr where it stands.

    For a call with a rule of its own for derivatives or vmap whose jaxpr was changed: the rule was
    made for the inputs and outputs that it had, and nobody asks for it any more. Operands are the
    inputs of the jaxpr, and results its outputs.
    """
    from jax._src import core

    if not hasattr(jaxpr, "jaxpr"):  # of jax 0.10, without constants
        jaxpr = core.ClosedJaxpr(jaxpr, ())
    return core.closed_call_p, {"call_jaxpr": jaxpr}


def bind_whole(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Run a jaxpr under a trace as one equation, a jit.

    To evaluate it would bind each equation anew, which takes as long as to trace them. jax has no
    public way to stage a jaxpr, so the parameters are copied from an empty jit made here.
    """
    bare = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    (empty,) = open_jaxpr(jax.make_jaxpr(jax.jit(lambda: ()))())[0].eqns
    whole = closed_like(empty.params["jaxpr"], bare)
    params = with_inputs(empty.params, whole, len(bare.invars), outputs=len(bare.outvars))
    return list(empty.primitive.bind(*consts, *values, **params))


def is_dropped(variable: Any) -> bool:
    """Whether an output of an equation has no name, because nothing uses it."""
    from jax._src import core

    return isinstance(variable, core.DropVar)


def literal(value: np.ndarray | np.generic) -> Any:
    """A constant as an equation's operand."""
    from jax._src import core

    return core.Literal(value, core.typeof(value))


def scopes() -> tuple[str, ...]:
    """The names of the `jax.named_scope`s that are open in this trace, outermost first."""
    from jax._src import source_info_util

    stack = source_info_util.current_name_stack().stack
    return tuple(one.name for one in stack if isinstance(one, source_info_util.Scope))


def writes(jaxpr: Any) -> set[str]:
    """The kinds of state that a jaxpr writes to, including its inner jaxprs.

    "ref": a `jax.Ref`. "hijax": a Variable that is a single value for jax (flax 0.12.8 traces it
    and then loses the written value; later versions raise).
    """
    found: set[str] = set()
    for equation in open_jaxpr(jaxpr)[0].eqns:
        name = equation.primitive.name
        if name in ("swap", "addupdate"):
            found.add("ref")
        elif name == "set_variable":
            found.add("hijax")
        for inner in sub_jaxprs(equation):
            found |= writes(inner)
    return found


def is_inlined(params: dict[str, Any]) -> bool:
    """Whether jax dissolves a jitted function where it is called, so no equation has its name."""
    return getattr(params["inline"], "value", params["inline"]) in (True, "jax_early")


def is_recomputation(equation: Any) -> bool:
    """Whether an equation is the second pass of a remat, within a backward pass."""
    return bool(equation.params.get("differentiated")) and equation.primitive.name in REMAT


def needed_inputs(jaxpr: Any, outputs: int, each_its_own: Any) -> list[bool]:
    """For each input of a jaxpr, whether any of its first `outputs` outputs depends on it. Each
    output of the primitive `each_its_own` depends only on the input at the same position.
    """
    from jax.interpreters import partial_eval

    bare, _ = open_jaxpr(jaxpr)
    equations: list[Any] = []
    for one in bare.eqns:
        if one.primitive is not each_its_own or len(one.invars) != len(one.outvars):
            equations.append(one)
            continue
        for i, o in zip(one.invars, one.outvars, strict=True):
            equations.append(one.replace(invars=[i], outvars=[o]))
    bare = bare.replace(eqns=equations)
    wanted = [i < outputs for i in range(len(bare.outvars))]
    _, used = partial_eval.dce_jaxpr(bare, wanted)
    return list(used)


def devices_of(equation: Any) -> int:
    """The number of devices (along the axes it makes manual) that run a shard_map's function."""
    mesh, axes = equation.params["mesh"], equation.params["newly_manual_axes"]
    return math.prod(mesh.shape[axis] for axis in axes)


def jit_shardings(equation: Any) -> tuple[list[Any], list[Any]]:
    """The shardings that a jit gives its operands and its results, each a Sharding or None."""

    def given(shardings: Any) -> list[Any]:
        return [s if isinstance(s, jax.sharding.Sharding) else None for s in shardings]

    return given(equation.params["in_shardings"]), given(equation.params["out_shardings"])


def manual_axes(equation: Any) -> tuple[str, ...]:
    """The axes that a shard_map makes manual, in the mesh's order."""
    mesh, manual = equation.params["mesh"], equation.params["newly_manual_axes"]
    return tuple(axis for axis in mesh.axis_names if axis in manual)


def varying_axes(x: Any) -> frozenset[str]:
    """The manual axes along which an array differs between devices; none without `check_vma`."""
    if isinstance(x, (np.ndarray, np.generic)):
        return frozenset()
    kind = getattr(x, "aval", x).manual_axis_type
    return frozenset() if kind is None else kind.varying


def is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def bind(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Run an equation's primitive under its own name stack, source line and context."""
    from jax._src import api_util, source_info_util

    params = equation.primitive.get_bind_params(equation.params)
    stack = source_info_util.current_name_stack() + equation.source_info.name_stack
    traceback = equation.source_info.traceback
    with source_info_util.user_context(traceback, name_stack=stack), equation.ctx.manager:
        try:
            out = equation.primitive.bind(*values, **params)
        except api_util.InternalFloatingPointError as error:  # jax's own jit would handle it
            _bind_apart(equation, values)
            raise FloatingPointError(
                f"invalid value ({error.ty}) encountered in {equation.primitive}"
            ) from None
    return list(out) if equation.primitive.multiple_results else [out]


def _bind_apart(equation: Any, values: Sequence[Any]) -> None:
    """Run a jit's inner equations one by one, as jax does to find the one that makes a NaN."""
    for jaxpr in sub_jaxprs(equation) if equation.primitive.name in JITS else ():
        inner, consts = open_jaxpr(jaxpr)
        env = dict(zip((*inner.constvars, *inner.invars), (*consts, *values), strict=True))
        for each in inner.eqns:
            read = [v.val if is_literal(v) else env[v] for v in each.invars]
            env.update(zip(each.outvars, bind(each, read), strict=True))


def as_function(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """A jaxpr as a function of its inputs, which returns the list of its outputs."""
    from jax.core import eval_jaxpr

    return lambda *values: eval_jaxpr(jaxpr, consts, *values)


def context_of(equation: Any) -> contextlib.AbstractContextManager[None]:
    """The settings an equation was traced under, such as the mesh, as a context manager."""
    return equation.ctx.manager


def scan_parts(
    params: dict[str, Any], values: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """A scan's operands as (consts, carry, xs): jax 0.10 has counts for them, jax 0.12 a tree."""
    if "num_consts" in params:
        consts, carry = params["num_consts"], params["num_carry"]
        return (
            list(values[:consts]),
            list(values[consts : consts + carry]),
            list(values[consts + carry :]),
        )
    parts = params["ft_in"].update(list(values)).unpack()
    consts, carry, xs = (list(part) for part in parts)
    return consts, carry, xs


def no_tangent(x: Any) -> Any:
    """The tangent of a value that nothing differentiates."""
    aval: Any = jax.typeof(x)
    return ad.Zero(aval.to_tangent_aval())


Linearized = tuple[Any, Any, Callable[..., Any]]
"""The outputs of an equation (one, or a list), whether each has a tangent that is not 0, and the
function from the operands' tangents to those of the outputs; an `ad.Zero` stands for 0.
"""


def register_linearization(primitive: Any, linearize: Callable[..., Linearized]) -> None:
    """Differentiate a primitive by `linearize(moves, *operands, **params)`, forward and backward;
    `moves` says which operands have a tangent.

    `jax.grad` linearizes. For a primitive that has only a rule for `jvp`, jax traces that rule into
    a jaxpr of its own, which took a tenth of a second for the 250 marks and places of a model of 12
    layers. Its table of linearizations is not public, and the form of a rule has changed: from jax
    0.11 on, a rule also returns residuals that keep their structure, of which ours has none. It can
    go when jax makes `deflinear` accept a rule with parameters, or the table is public.
    """
    from jax._src.interpreters import ad as private

    fields = private.LinearizeTrace.process_primitive.__code__.co_names
    structured = "structured_residuals" in fields

    def jvp(operands: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        moves = [type(t) is not ad.Zero for t in tangents]
        out, _, tangent = linearize(moves, *operands, **params)
        return out, tangent(*tangents)

    def rule(_: bool, moves: Sequence[bool], *operands: Any, **params: Any) -> Any:
        out, move, tangent = linearize(moves, *operands, **params)
        if structured:
            return out, move, None, None, lambda _, __, *tangents: tangent(*tangents)
        return out, move, None, lambda _, *tangents: tangent(*tangents)

    ad.primitive_jvps[primitive] = jvp
    private.primitive_linearizations[primitive] = rule
