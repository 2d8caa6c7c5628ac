"""The primitives that a traced program holds: `mark` names a value, `seeded` marks its gradient.

Both are the identity, bitwise, under every transformation. `instrument`, which edits the program,
decides what they observe; `launch_input` is a value that it puts in. Invariant: a mark's parameters
hold no tracer and no model, only names and structure, so a traced function with marks may be
cached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.launching import launch
from nnx_inspector._compat.sharding import take_index
from nnx_inspector.hooks.hook import Context
from nnx_inspector.hooks.pytrees import with_arguments, with_leaves
from nnx_inspector.hooks.sites import parameter_names
from nnx_inspector.program.members import members_in
from nnx_inspector.program.structure import Structure, is_whole, structure_of
from nnx_inspector.stats.summarize import mask_shape
from nnx_inspector.typing import Array, Aval, Function, Jaxpr, Params, PyTree, Value

OUTPUT, INPUT, CHANGE, GRADIENT, BEGIN = "output", "input", "change", "gradient", "begin"
CHOICE, POSITIONS = "choice", "positions"
"""The part of a call that a mark observes: what the call returns, what it receives, a Variable
before and after the call (the first two operands), the gradient of an array that it returns, the
place where the call begins, a softmax that chooses (see `program.choices`), or which positions of
its arguments count (its mask)."""

PARAMETER = "(parameter)"
"""Stands for the name of an array in what says of which array a gradient is: of a parameter."""

# A primitive of our own, because jax keeps its equation, with its parameters, through every
# transformation and every inner jit, each of which asks a rule of ours what becomes of it.
# `jax.ad_checkpoint.checkpoint_name` names a value as well, but no gradient, and the user's remat
# policies read it. XLA never sees a mark: it is lowered to its operands.
mark = Primitive("nnx_inspector_mark")
mark.multiple_results = True
mark.def_abstract_eval(lambda *avals, **_: list(avals))
mlir.register_lowering(mark, lambda ctx, *xs, **_: list(xs))  # type: ignore[arg-type]


def equation_program(
    primitive: Primitive, params: tuple[tuple[str, Any], ...], avals: tuple[object, ...]
) -> Jaxpr:
    """A program that is one equation."""
    how = primitive.get_bind_params(dict(params))
    with internal_config():
        return jax.make_jaxpr(lambda *xs: primitive.bind(*xs, **how))(
            *map(jaxprs.aval_argument, avals)
        )


_cached_equation_program = functools.lru_cache(maxsize=4096)(equation_program)


def _run_intercepted(
    primitive: Primitive, xs: Sequence[object], params: Params
) -> list[Value] | None:
    """What this thread's choosers make of a program that is this equation alone; None if nothing.

    On arrays outside every program, a mark reports what it sees at once.
    """
    if not launch.is_intercepted():
        return None
    avals = tuple(map(jax.typeof, xs))
    program = _cached_equation_program(
        primitive, tuple(_without_call_number(params).items()), avals
    )
    return launch.run_equation(program, xs, params)


def _without_call_number(params: Params) -> Params:
    """The parameters without the number of the call that begins a pass, which is another each time,
    so that all calls share a program.
    """
    found = dict(params)
    if isinstance(found.get("call"), int | tuple):
        found["call"] = (0, found["call"][1]) if isinstance(found["call"], tuple) else 0
    if isinstance(found.get("of"), tuple) and isinstance(found["of"][0], tuple):
        (_, number), part = found["of"]
        found["of"] = (0, number), part
    if "begun" in found:
        found["begun"] = found["begun"].of_any_call
    return found


@mark.def_impl
def _run_mark(*xs: object, **params: object) -> list[Value]:
    if params["part"] != POSITIONS:  # which is for marks inside
        _run_intercepted(mark, xs, params)
    return list(xs)


def _linearize_mark(moves: Sequence[bool], *xs: Value, **params: Value) -> jaxprs.Linearized:
    # The derivative of a mark is the identity, which would leave no mark in the backward pass.
    # Where gradients are wanted, the tangent of each value goes through `_link` as well, and the
    # transpose of that marks the cotangent. The mark of where a call begins has no tangent, because
    # nothing computes with its results; it notes instead which of its operands have one.
    if params["part"] == GRADIENT:
        # of a gradient that the program differentiates once more: a penalty on gradients, say
        return mark.bind(*xs, **{**params, "inner": True}), moves, lambda *ts: list(ts)
    if params["part"] == BEGIN and "begun" in params:
        moved = {*params.get("moved", ()), *(i for i, does in enumerate(moves) if does)}
        out = mark.bind(*xs, **{**params, "moved": tuple(sorted(moved))})
        return out, [False] * len(out), lambda *_: list(map(jaxprs.zero_tangent, out))
    out = mark.bind(*xs, **params)
    if not params.get("gradients"):
        return out, moves, lambda *ts: list(ts)
    members, mapped = params.get("members"), params.get("mapped", ((),) * len(xs))
    count, masked = marked_count(params, xs), params.get("masked", False)
    links: dict[int, tuple[Function, tuple[Value, ...]]] = {}
    for i in range(count):
        if moves[i]:
            of_one = None if members is None else members.only(i)
            how = {"owner": params["owner"], "site": params["site"], "mapped": (mapped[i],)}
            part = params["structure"].parts[i]
            how |= {"of": (params["call"], part), "members": of_one, "masked": masked}
            masks = list(xs[count : count + masked])
            mask = _mask_beside(out[i], params, mapped[i])
            if mask is not None:
                how |= {"where": params["where"], "masked": True, "present": masked}
                masks = [combine_masks(mask, *masks)] if masks else [mask]
            others = *masks, _vmapped_zero.bind(out[i])
            links[i] = (
                functools.partial(_link.bind, how=tuple({**how, "axes": True}.items())),
                others,
            )

    def tangents(*ts: object) -> list[Value]:
        return [links[i][0](t, *links[i][1]) if i in links else t for i, t in enumerate(ts)]

    return out, moves, tangents


def mask_vmaps(where: tuple[int, ...], x: Value, mapped: Sequence[int]) -> tuple[int, ...] | None:
    """The lengths of the vmaps of a value that its mask of positions has axes for besides those of
    the call, outermost first: not those that map positions. None if the mask does not fit.
    """
    lengths = list(x.shape)
    sizes = tuple(lengths.pop(axis) for axis in reversed(mapped))
    for lead in reversed(range(len(sizes) + 1)):
        shape = (*sizes[lead:], *lengths)
        if mask_shape(where, jax.ShapeDtypeStruct(shape, x.dtype)) is not None:
            return sizes[:lead]
    return None


def _mask_beside(x: Array, params: Params, mapped: Sequence[int]) -> jax.Array | None:
    """What names the mask of positions of a mark, for one of its values; None if it has none."""
    sizes = mask_vmaps(params["where"], x, mapped) if "where" in params else None
    if sizes is None:
        return None
    kind = ShapedArray((*sizes, *params["where"]), jnp.dtype(jnp.bool_))
    return position_mask.bind(x, owner=params["owner"], kind=kind, mapped=len(sizes))


@internal_config()
def combine_masks(positions: jax.Array, present: jax.Array) -> jax.Array:
    return positions & present.reshape(*present.shape, *[1] * (positions.ndim - present.ndim))


def marked_count(params: Params, operands: Sequence[Value]) -> int:
    """How many of a mark's operands are marked: before its mask, if it has one, and its ties."""
    return len(operands) - params.get("ties", 0) - params.get("masked", False)


jaxprs.register_linearization(mark, _linearize_mark)
# jax transposes only what is linear: a mark in `jax.linear_transpose`, or on a tangent. There it
# is the identity, and its cotangent passes unmarked, because it is the gradient of no activation.
ad.primitive_transposes[mark] = lambda cts, *xs, **_: [
    ct if ad.is_undefined_primal(x) else None for ct, x in zip(cts, xs, strict=True)
]


def _batch_mark(
    xs: Sequence[Value], dims: Sequence[int | None], **params: Value
) -> tuple[Value, Value]:
    # A vmap calls this with its axis in some of the operands. The mark stays one equation, and
    # `mapped` notes the axis of each operand, by which whoever reads the values tells the examples
    # apart, and the members of an ensemble from these. In two cases an operand without the axis
    # gets it: the values before and after a change are subtracted, so both have it or neither; and
    # a gradient that is the same for all examples counts for each of them.
    before = params.get("mapped", ((),) * len(xs))
    pair, alike = xs[:2], params.get("part") != CHANGE or not params["structure"].arrays
    if not alike and len(set(dims[:2])) > 1:
        size = next(x.shape[d] for x, d in zip(pair, dims, strict=False) if d is not None)
        pair = [
            jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(pair, dims, strict=False)
        ]
        xs, dims = [*pair, *xs[2:]], [0, 0, *dims[2:]]
    if params.get("masked"):
        xs, dims = _align_mask_axis(xs, dims, marked_count(params, xs), params)
    if params["part"] == GRADIENT and dims[0] is None and dims[-1] is not None:
        size = xs[-1].shape[dims[-1]]  # all examples have the same, and each one counts
        xs, dims = [jnp.broadcast_to(xs[0], (size, *xs[0].shape)), *xs[1:]], [0, *dims[1:]]
    params["mapped"] = tuple(
        mapped if d is None else (*mapped, d) for mapped, d in zip(before, dims, strict=True)
    )
    return mark.bind(*xs, **params), dims


def _align_mask_axis(
    xs: Sequence[Value], dims: Sequence[Any], count: int, params: Params
) -> tuple[Value, Value]:
    """The operands of a masked mark, with a vmap's axis in the mask and in each value, or in none.

    The axes of the mask are those of the outermost vmaps, in the same order as in the values. If it
    only says which positions count, and not which examples are present, values stay as they are.
    """
    among = range(count + 1)
    if all(dims[i] is None for i in among):
        return xs, dims
    present = params.get("present", True)
    if params.get("part") == POSITIONS and dims[count] is None:
        return xs, dims
    size = next(xs[i].shape[dims[i]] for i in among if dims[i] is not None)
    xs, dims = list(xs), list(dims)
    for i in among if present else [count]:
        if dims[i] is None:
            xs[i], dims[i] = jnp.broadcast_to(xs[i], (size, *xs[i].shape)), 0
    xs[count], dims[count] = jnp.moveaxis(xs[count], dims[count], 0), 0
    return xs, dims


batching.primitive_batchers[mark] = _batch_mark


Change = Callable[[list[Value]], tuple[list[Value], Params]]
"""Changes the values of a mark, and gives it more parameters."""


def move_vmap_axes_first(x: jax.Array, mapped: Sequence[int]) -> jax.Array:
    """A marked array with the axes that `vmap` added moved to the front, the outermost first.

    `mapped` is the position of each vmap's axis, the innermost vmap first, from `Mark.mapped`.
    """
    for position, axis in enumerate(reversed(mapped)):
        x = jnp.moveaxis(x, position + axis, position)
    return x


def mark_tree(
    tree: PyTree,
    *pair: object,
    structure: Structure | None = None,
    ties: Sequence[object] = (),
    change: Change | None = None,
    parameters: Sequence[str] | None = None,
    mask: object = None,
    **params: object,
) -> PyTree:
    """`tree`, with its arrays marked; `params` are the mark's parameters (hashable).

    A `pair` of values becomes the mark's first operands. The arrays then tie it to the program: a
    transform may drop values that nothing uses. `structure` defaults to that of the tree. `ties`
    are other values that the mark keeps in the program: jax drops from a differentiated scan what
    nothing reads, as the output of a BatchNorm that is called for its statistics. `change` is done
    to the arrays before they are marked. `parameters` are the names of the parameters, if the tree
    is `(args, kwargs)`. `mask` is what a mark of positions holds besides; see `position_masks`.
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_whole)
    own = structure_of(tree, leaves, merged=parameters is None, parameters=parameters)
    # a value without arrays still gets a mark, so the call is seen
    values = [leaves[i] for i in own.arrays]
    if change is not None:
        values, more = change(values)
        params |= more
    if ties:
        params["ties"] = len(ties)
    operands = [*pair, *values]
    members = members_in(operands, alike=params["part"] == CHANGE)
    if members is not None:
        params["members"] = members
    masks = [] if mask is None else [mask]
    if masks:
        params |= {"masked": True, "present": False}
    marked = mark.bind(*operands, *masks, *ties, structure=structure or own, **params)
    for i, value in zip(own.arrays, marked[len(pair) : len(operands)], strict=True):
        if isinstance(leaves[i], jax.Array):  # NumPy arrays stay NumPy for the user's code
            leaves[i] = value
    for i, same in own.copies:
        leaves[i] = leaves[same]
    if parameters is None:
        return with_leaves(tree, leaves, is_whole)
    args, kwargs = tree
    return with_arguments(args, kwargs, leaves, is_whole)


def mark_arguments(
    args: object, kwargs: object, context: Context, **params: Value
) -> tuple[PyTree, PyTree]:
    """The arguments of a call, with their arrays marked; see `mark_tree`.

    Arrays in the caller's own lists and dicts are observed but not replaced: the method may write
    to such a list. They are named by the parameters of the called method.
    """
    names = parameter_names(context.orig_method) if context.kind == "method" else ()
    return mark_tree((args, kwargs), parameters=names, **params)


# --------------------------------------------------------------- gradients

_seeded, _link, _parameter = (
    jaxprs.identity_primitive(f"nnx_inspector_{name}") for name in ("seeded", "link", "parameter")
)
_zero_cotangent = jaxprs.nondifferentiable_primitive(
    "nnx_inspector_zero_cotangent",
    lambda _, *, kind: jnp.zeros((), kind.dtype),
    lambda _, *, kind: kind,
    lambda xs, _, **how: (_zero_cotangent.bind(*xs, **how), None),
)
_vmapped_zero = jaxprs.nondifferentiable_primitive(
    "nnx_inspector_vmapped_zero",
    lambda _: jnp.zeros((), jnp.float32),
    lambda _: ShapedArray((), jnp.dtype("float32")),
    lambda xs, dims: _batch_vmapped_zero(*xs, *dims),
)
"""A zero, mapped by each vmap that maps its operand: so a gradient that is the same for all
examples, as that of a sum, is counted for each."""


def _batch_vmapped_zero(x: jax.Array, axis: int) -> tuple[jax.Array, int]:
    one = _vmapped_zero.bind(take_index(jnp.moveaxis(x, axis, 0), 0))
    return jnp.broadcast_to(one, (x.shape[axis],)), 0


def seeded(x: jax.Array, seed: jax.Array, *mask: jax.Array, **how: object) -> jax.Array:
    """`x`, whose gradient gets a mark when the program is differentiated with respect to `seed`.

    A mark of a gradient needs no memory and no sink: the tangent of `x` goes through a linear
    identity, and the transpose of that binds the mark on the cotangent. As the tangent also depends
    on that of the seed, a cotangent is computed although the program itself would need none.

    Args:
        x: a floating-point or complex array.
        seed: any number. Its own gradient is 0.
        *mask: that of the mark, if it is `masked`.
        **how: the parameters of the mark, besides its part. With `ticket` the mark also has the
            seed, a number by which the runs of one program are told apart.
    """
    return _seeded.bind(x, *mask, seed, how=tuple(how.items()))


def _seeded_jvp(
    primals: Sequence[Value], tangents: Sequence[Value], *, how: Params
) -> tuple[Value, Value]:
    # The tangent of the value goes through `_link` together with that of the seed. jax leaves out
    # of a backward pass what no derivative was asked for: only because the seed is differentiated,
    # the cotangent of an activation is computed even if none of its inputs is.
    (t, *_, t_seed), out = tangents, _seeded.bind(*primals, how=how)
    if type(t_seed) is ad.Zero:
        return out, t
    _, *mask, seed = primals
    ticket = [seed] if dict(how).get("ticket") else []
    return out, _link.bind(ad.instantiate_zeros(t), *mask, *ticket, t_seed, how=how)


def _link_jvp(
    primals: Sequence[Value], tangents: Sequence[Value], *, how: object
) -> tuple[Value, Value]:
    # Of a program that is differentiated twice, or forward over reverse: a tangent of the tangent
    # goes the same way, so the backward pass of either derivative has its marks.
    t, out = tangents[0], _link.bind(*primals, how=how)
    return out, t if type(t) is ad.Zero else _link.bind(t, *primals[1:], how=how)


def _link_transpose(ct: object, t: Value, *others: Value, how: Params) -> list[Value]:
    # Reverse mode runs the equations of the tangents backwards, by their transposes. That of the
    # identity hands the cotangent on, and this one marks it on its way: it is the gradient of the
    # loss with respect to the value that the link stands for.
    if type(ct) is ad.Zero:
        return [None, *(None for _ in others)]
    params = dict(how)
    masked, axes = params.get("masked", False), params.pop("axes", False)
    ties = axes + params.get("ticket", False)
    masks, seeds = others[: masked + ties], others[masked + ties :]
    params["mapped"] = (params["mapped"][0], *[()] * len(masks))
    ct, *_ = mark.bind(ct, *masks, part=GRADIENT, structure=None, ties=ties, **params)
    # jax drops what nothing reads, also from a transposed scan: the seed's gradient reads the mark
    nothing = [
        _zero_cotangent.bind(ct, kind=seed.aval) if ad.is_undefined_primal(seed) else None
        for seed in seeds
    ]
    return [ct if ad.is_undefined_primal(t) else None, *(None for _ in masks), *nothing]


def _batch_seeded(
    primitive: Primitive, args: Sequence[Value], dims: Sequence[int | None], *, how: Params
) -> tuple[Value, Value]:
    # As `_batch_mark`: the axis of the vmap is noted for the mark that comes of it later.
    params = dict(how)
    if params.get("masked"):
        args, dims = _align_mask_axis(args, dims, 1, params)
    if dims[0] is not None:
        params["mapped"] = ((*params["mapped"][0], dims[0]),)
    return primitive.bind(*args, how=tuple(params.items())), dims[0]


def _linearize_parameter(moves: Sequence[bool], x: Array, *, how: object) -> jaxprs.Linearized:
    linked = functools.partial(_link.bind, how=how) if moves[0] else lambda t: t
    return _parameter.bind(x, how=how), moves[0], linked


def mark_parameter(x: jax.Array, *, site: str, call: int, owner: object) -> jax.Array:
    """A parameter as a call reads it, whose gradient gets a mark: the cotangent of all that the
    call makes of it. `site` is its path. It is the only operand: together with others it would
    depend on them, and leave a loop over microbatches no constant of that loop.
    """
    of = (call, -1), PARAMETER
    members = members_in([x])
    how = {"owner": owner, "site": site, "of": of, "mapped": ((),), "members": members}
    return _parameter.bind(x, how=tuple(how.items()))


for _identity in (_seeded, _link, _parameter):
    batching.primitive_batchers[_identity] = functools.partial(_batch_seeded, _identity)
ad.primitive_jvps[_seeded] = _seeded_jvp
ad.primitive_jvps[_link] = _link_jvp
jaxprs.register_linearization(_parameter, _linearize_parameter)
ad.primitive_transposes[_link] = _link_transpose


def _batch_position_mask(
    xs: Sequence[jax.Array], dims: Sequence[int], *, kind: Aval, mapped: int, owner: object
) -> tuple[jax.Array, int]:
    kind = ShapedArray((xs[0].shape[dims[0]], *kind.shape), kind.dtype)
    return position_mask.bind(*xs, kind=kind, mapped=mapped + 1, owner=owner), 0


position_mask = jaxprs.nondifferentiable_primitive(
    "nnx_inspector_position_mask",
    lambda _, *, kind, **how: jnp.ones(kind.shape, jnp.bool_),
    lambda _, *, kind, **how: kind,
    _batch_position_mask,
)
"""The mask of positions of the call around, with an axis in front for each vmap that maps the
operand, which only ties it there. `instrument` puts it in: a tracer of the mask could not enter a
function that is jitted by itself. All positions count in a program that nobody edits."""

# ------------------------------------------------------------- launch inputs


def _default_input(
    *_: object, kind: Aval, otherwise: Callable[[], np.ndarray] | None = None, **how: object
) -> jax.Array:
    if otherwise is not None:
        return jax.pure_callback(otherwise, jax.ShapeDtypeStruct(kind.shape, kind.dtype))
    return jnp.zeros(kind.shape, kind.dtype)


launch_input = jaxprs.nondifferentiable_primitive(
    "nnx_inspector_launch_input",
    _default_input,
    lambda *_, kind, **how: kind,
    lambda xs, _, **how: (launch_input.bind(*xs, **how), None),
)
"""A value that becomes an input where the program is launched: the numbers of a
perturbation. Whatever transforms a program goes through, they are the same for all of it. Operands
only tie it to a loop: jax moves what depends on nothing out of a scan that is differentiated. In a
program that nobody edits, as one that was compiled ahead of time, it is `otherwise()`, which the
host is asked for, or zeros without that."""


@launch_input.def_impl
def _run_launch_input(*xs: Value, **params: Value) -> jax.Array:
    found = _run_intercepted(launch_input, xs, params)
    return _default_input(**params) if found is None else found[0]
