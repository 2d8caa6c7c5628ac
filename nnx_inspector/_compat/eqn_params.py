"""The parameters of equations that hold jaxprs, for every supported version of jax.

An equation of a jit, a scan, a while loop, a remat or a shard_map says in its parameters how its
operands and results belong to the inputs and outputs of its jaxpr. The functions here change both
together. Knows no marks, and what a jaxpr computes.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax._src import config, core
from jax._src.mesh import use_abstract_mesh
from jax._src.named_sharding import UNSPECIFIED

from nnx_inspector._compat import jaxprs
from nnx_inspector.typing import Equation, Jaxpr, OpenJaxpr, Params, Value


def jit_with(params: Params, jaxpr: object, inputs: int, *, outputs: int = 0) -> Params:
    """A jit's parameters for a jaxpr that takes so many more inputs before the others, and returns
    so many more outputs after the others.
    """
    # A jit has a sharding, a layout and a flag for donation for each input, and jax indexes them by
    # the number of the input. Without it, a parameter would get the sharding of its neighbour, or
    # be donated in its place. It can go when jax can change the signature of a traced function.
    return {
        **params,
        "jaxpr": jaxpr,
        "in_shardings": (UNSPECIFIED,) * inputs + tuple(params["in_shardings"]),
        "in_layouts": (None,) * inputs + tuple(params["in_layouts"]),
        "donated_invars": (False,) * inputs + tuple(params["donated_invars"]),
        "out_shardings": tuple(params["out_shardings"]) + (UNSPECIFIED,) * outputs,
        "out_layouts": tuple(params["out_layouts"]) + (None,) * outputs,
    }


def scan_with(
    params: Params, jaxpr: Jaxpr, *, consts: int = 0, carry: int = 0, outputs: int = 0
) -> Params:
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


def while_with(params: Params, jaxpr: Jaxpr, *, consts: int = 0, carry: int = 0) -> Params:
    """A while loop's parameters for a body with so many more constants and carried values.

    Operands: the test's constants, more constants of the body, its constants, carry, more carry.
    Inputs of the body: the same without the test's. Results, and outputs of the body: carry, more
    carry. The test does not read what is carried in addition.
    """
    inputs = jaxprs.open_jaxpr(jaxpr)[0].invars
    test, _ = jaxprs.open_jaxpr(params["cond_jaxpr"])
    more = [jaxprs.new_var(v.aval) for v in inputs[len(inputs) - carry :]]
    changed = jaxprs.closed_like(params["cond_jaxpr"], test.replace(invars=[*test.invars, *more]))
    return {
        **params,
        "body_jaxpr": jaxpr,
        "body_nconsts": params["body_nconsts"] + consts,
        "cond_jaxpr": changed,
    }


def remat_with(params: Params, jaxpr: Jaxpr, *, inputs: int = 0) -> Params:
    """A remat's parameters for a jaxpr that takes so many more inputs before the others. It may
    return more outputs after the others.
    """
    # With one flag for each operand and too few of them, the lowering raises, far from here.
    once = params["prevent_cse"]  # for all operands, or for each
    once = once if isinstance(once, bool) else ((False,) * inputs + tuple(once))
    return {**params, "jaxpr": jaxpr, "prevent_cse": once}


def shard_map_with(
    params: Params,
    jaxpr: Jaxpr,
    *,
    inputs: int = 0,
    outputs: int = 0,
    axes: tuple[str, ...] = (),
) -> tuple[Params, list[Value]]:
    """A shard_map's parameters for a jaxpr that takes so many more inputs before the others and
    returns so many more outputs after the others, and the types of these outside. To be called in
    the `context_of` the equation.

    Every device gets all of an additional input. It returns an additional output as its part of the
    first dimension, along these axes: a row, if that has length 1. On an explicit mesh, and where
    jax checks what varies between devices, the type inside is another than outside.
    """
    bare, _ = jaxprs.open_jaxpr(jaxpr)
    whole, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(axes)
    changed = {
        **params,
        "jaxpr": jaxpr,
        "in_specs": _join_specs((whole,) * inputs, params["in_specs"]),
        "out_specs": _join_specs(params["out_specs"], (rows,) * outputs),
    }
    # The type of a result outside is that inside with the manual axes multiplied in again; jax
    # computes it while it traces a shard_map, and nowhere else. It can go when a shard_map's jaxpr
    # can be changed by a public function.
    last = bare.outvars[len(bare.outvars) - outputs :]
    mesh, is_checked = params["mesh"], params["check_vma"]
    return changed, [core.unshard_aval(mesh, is_checked, rows, v.aval) for v in last]


@contextlib.contextmanager
def inside_shard_map(params: Params) -> Iterator[None]:
    """A context in which what is traced fits into the jaxpr of a shard_map with these parameters.

    jax traces the body like this: its axes have names, its mesh is manual along them, and types
    say along which axes a value varies if that is checked. The `context_of` an equation has only
    the mesh, and without the last one `pcast` makes a value that varies and has the wrong type.
    """
    mesh, manual = params["mesh"], params["newly_manual_axes"]
    known = manual | set(mesh.manual_axes)
    axes = [(name, size) for name, size in mesh.shape.items() if name in known]
    kinds = dict.fromkeys(manual, jax.sharding.AxisType.Manual)
    inner = mesh.abstract_mesh.update_axis_types(kinds)
    checked = config._check_vma(params["check_vma"])
    with core.extend_axis_env_nd(axes), use_abstract_mesh(inner), checked:
        yield


def _join_specs(*parts: Any) -> Value:
    """Specs of a shard_map in one: a tuple, or a tree if one of them is a tree of jax 0.12."""
    if all(isinstance(part, tuple) for part in parts):
        return tuple(x for part in parts for x in part)
    tree = _flattree()
    return tree.pack(tuple(tree.flatten_list(list(part)) for part in parts))


def _flattree() -> Value:
    """The module of the trees that jax 0.12 has in parameters."""
    return importlib.import_module("jax._src.flattree")


def scan_parts(
    params: Params, values: Sequence[object]
) -> tuple[list[Value], list[Value], list[Value]]:
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


def device_count(equation: Equation) -> int:
    """The number of devices (along the axes it makes manual) that run a shard_map's function."""
    mesh, axes = equation.params["mesh"], equation.params["newly_manual_axes"]
    return math.prod(mesh.shape[axis] for axis in axes)


def manual_axes(equation: Equation) -> tuple[str, ...]:
    """The axes that a shard_map makes manual, in the mesh's order."""
    mesh, manual = equation.params["mesh"], equation.params["newly_manual_axes"]
    return tuple(axis for axis in mesh.axis_names if axis in manual)


def jit_shardings(equation: Equation) -> tuple[list[Value], list[Value]]:
    """The shardings that a jit gives its operands and its results, each a Sharding or None."""

    def given(shardings: Any) -> list[Value]:
        return [s if isinstance(s, jax.sharding.Sharding) else None for s in shardings]

    return given(equation.params["in_shardings"]), given(equation.params["out_shardings"])


def is_inlined(params: Params) -> bool:
    """Whether jax dissolves a jitted function where it is called, so no equation has its name."""
    # A bool in jax 0.10, an enum in jax 0.12. `jax.nn.relu` and its kind are inlined, so their
    # names are in no program: they are found another way.
    return getattr(params["inline"], "value", params["inline"]) in (True, "jax_early")


def is_recomputation(equation: Equation) -> bool:
    """Whether an equation is the second pass of a remat, within a backward pass."""
    # jax sets this flag where the backward pass computes a remat anew. Without it, everything in
    # the block would count twice: once for each pass.
    return bool(equation.params.get("differentiated")) and equation.primitive.name in jaxprs.REMAT


def bind_as_jit(jaxpr: OpenJaxpr, consts: Sequence[Value], values: Sequence[Value]) -> list[Value]:
    """Run a jaxpr under a trace as one equation, a jit.

    To evaluate it would bind each equation anew, which takes as long as to trace them. jax has no
    public way to stage a jaxpr, so the parameters are copied from an empty jit made here.
    """
    # jax binds a jit by a primitive whose parameters (shardings, layouts, names, contexts) change
    # with its version. Those of an empty jit are right in whatever version runs.
    bare = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    (empty,) = jaxprs.open_jaxpr(jax.make_jaxpr(jax.jit(lambda: ()))())[0].eqns
    whole = jaxprs.closed_like(empty.params["jaxpr"], bare)
    params = jit_with(empty.params, whole, len(bare.invars), outputs=len(bare.outvars))
    return list(empty.primitive.bind(*consts, *values, **params))
