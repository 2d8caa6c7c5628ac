"""The arguments with respect to which a loss is differentiated, and its one backward pass.

Invariant: the gradients are those of `nnx.value_and_grad`, in the same structure, and those of the
activations come from the same backward pass. Does not decide what is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import filterlib

from nnx_inspector._compat import jaxprs
from nnx_inspector.hooks.variables import is_node
from nnx_inspector.program.eager import EagerPass
from nnx_inspector.program.function import Arguments, ModuleFunction, function_name
from nnx_inspector.program.instrument import instrument
from nnx_inspector.program.marks import GRADIENT
from nnx_inspector.program.plan import Plan
from nnx_inspector.program.stage import StagedCall, variables_of_state
from nnx_inspector.program.survey import Mark, survey
from nnx_inspector.typing import Array, PyTree, Value


def diff_state(argnum: int | nnx.DiffState) -> tuple[int, filterlib.Filter]:
    if isinstance(argnum, nnx.DiffState):
        return argnum.argnum, argnum.filter
    return argnum, nnx.Param


def numbers_as_arrays(argument: object) -> PyTree:
    return jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, (int, float, complex)) else x,
        argument,
        is_leaf=is_node,
    )


@dataclasses.dataclass(frozen=True)
class DifferentiatedArgument:
    """A differentiated argument: the input numbers of its leaves, and how to rebuild it."""

    inputs: tuple[int, ...]
    rebuild: Callable[[Sequence[Value]], PyTree]


def positional_arguments(function: ModuleFunction, args: Sequence[object]) -> tuple[PyTree, ...]:
    """The positional arguments as `argnums` counts them: a bound method's owner comes first."""
    return tuple(args) if function.owner is None else (function.owner, *args)


def argument_number(function: ModuleFunction, args: Sequence[object], argnum: int) -> int:
    """The number of an argument, counted from the front."""
    count = len(positional_arguments(function, args))
    if not -count <= argnum < count:
        raise ValueError(
            f"argnums selects argument {argnum}, but there are {count} positional arguments."
        )
    return argnum % count


def check_loss(stage: StagedCall, out: object, *, function: ModuleFunction, has_aux: bool) -> None:
    """Raise TypeError unless the function returns a loss, or `(loss, aux)` with `has_aux`."""
    structure, name = stage.returned.treedef, function_name(function.call)
    pair = jax.tree_util.treedef_children(structure)
    if has_aux and not (structure.node_data() == (tuple, None) and len(pair) == 2):
        raise TypeError(
            f"With has_aux=True the loss function must return (loss, aux), but "
            f"{name} returned {structure}."
        )
    loss = pair[0] if has_aux else structure
    if not jax.tree_util.treedef_is_leaf(loss):
        hint = "" if has_aux else " To return more than the loss, pass has_aux=True."
        raise TypeError(f"The loss must be one scalar array, but {name} returned {loss}.{hint}")
    if 0 not in stage.returned.arrays:
        raise TypeError(
            f"The loss must be one scalar array, but {name} returned a Python value, which "
            f"cannot be differentiated."
        )


def differentiated_argument(
    stage: StagedCall,
    function: ModuleFunction,
    args: Sequence[object],
    argnum: int,
    only: filterlib.Filter,
) -> DifferentiatedArgument:
    every = positional_arguments(function, args)
    argument = every[argnum]
    position = len(Arguments.of(every[:argnum]).arrays)
    leaves, treedef = jax.tree.flatten(argument, is_leaf=is_node)
    where: list[int] = []
    builders: list[tuple[int, PyTree]] = []
    for leaf in leaves:
        if is_node(leaf):
            diff = leaf if isinstance(leaf, nnx.Variable) else nnx.state(leaf, only, graph=True)
            span = [i for own, _ in variables_of_state(leaf, diff) for i in stage.spans[id(own)]]
            where.extend(span)
            builders.append((len(span), jax.tree.structure(diff)))
        else:
            where.append(stage.array_index(position, leaf))
            position += 1
            builders.append((1, None))

    def rebuild(grads: Sequence[object]) -> PyTree:
        rest = list(grads)
        out = []
        for count, structure in builders:
            mine, rest = rest[:count], rest[count:]
            out.append(mine[0] if structure is None else jax.tree.unflatten(structure, mine))
        return jax.tree.unflatten(treedef, out)

    return DifferentiatedArgument(tuple(where), rebuild)


def require_scalar(stage: StagedCall, out: Sequence[Value]) -> None:
    """Raise TypeError unless the first output is a floating-point scalar."""
    if not stage.outputs or jnp.shape(out[0]) != ():
        shape = f"an array of shape {jnp.shape(out[0])}" if stage.outputs else "no array"
        raise TypeError(
            f"The loss function must return a scalar, or (scalar, aux); it returned {shape} first."
        )
    if not jnp.issubdtype(out[0].dtype, jnp.floating):
        raise TypeError(f"The loss must be a floating-point scalar, got {out[0].dtype}.")


CheckLoss: TypeAlias = Callable[[StagedCall, Sequence[Value]], None]
BackwardResult: TypeAlias = tuple[list[Value], PyTree, PyTree, dict[int, Value]]
"""What `backward_pass` returns."""


def backward_pass(
    stage: StagedCall,
    inputs: Sequence[Array],
    plan: Plan,
    numbers: Sequence[int] = (),
    *,
    of: Callable[[Mark], bool] = lambda _: True,
    check: CheckLoss = require_scalar,
) -> BackwardResult:
    """One forward and backward pass of a staged loss.

    The program is edited twice: as it is, so that it returns what its marks see and marks the
    gradients of their values, and once more when it has been differentiated.

    Args:
        inputs: replace the stage's own.
        numbers: the inputs with respect to which the loss is differentiated.
        of: of which marks the gradients are measured.
        check: called with the stage and the outputs; raises if the first is not a loss.

    Returns:
        The outputs; what was seen; of the gradient of each array, what was seen, or None if it has
        none, nested like the survey; and the gradient of each of those inputs.
    """
    if stage.eager:
        return _eager_backward_pass(stage, inputs, plan, numbers, of, check)
    wanted = lambda mark: mark.site not in plan.unmeasured and of(mark)  # noqa: E731
    first = instrument(stage.survey, plan, seeds=wanted)
    start, count = first.seeds, len(first.given)

    def both_ways(*values: object) -> PyTree:
        given, mine = list(values[:count]), list(values[count:])

        def loss_of(chosen: dict[int, Value], seeds: list[Array]) -> PyTree:
            full = [chosen.get(i, value) for i, value in enumerate(mine)]
            out, seen = first.run(full, given=[*seeds, *given[start:]], apart=True)
            check(stage, out)
            return out[0], (out, seen)

        transform = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
        (_, (out, seen)), grads = transform({i: mine[i] for i in numbers}, given[:start])
        return out, seen, grads

    avals = [*map(jax.typeof, first.given), *(v.aval for v in stage.survey.jaxpr.invars)]
    program, shapes = jax.make_jaxpr(both_ways, return_shape=True)(
        *map(jaxprs.aval_argument, avals)
    )
    found = survey(program, GRADIENT)
    second = instrument(found, dataclasses.replace(plan, perturb=None))
    flat, back = second.run([*first.given, *inputs])
    out, seen, (grads, _) = jax.tree.unflatten(jax.tree.structure(shapes), flat)
    received: dict[object, Value] = {}
    for mark, _, here in found.walk(back):
        assert mark.of not in received
        received[mark.of] = here
    gradients = stage.survey.map_marks(
        lambda mark, _: [received.get((id(mark), leaf)) for leaf in range(len(mark.avals))]
    )
    return out, seen, gradients, grads


def _eager_backward_pass(
    stage: StagedCall,
    inputs: Sequence[object],
    plan: Plan,
    numbers: Sequence[int],
    of: Callable[[Mark], bool],
    check: CheckLoss,
) -> BackwardResult:
    wanted = lambda mark: mark.site not in plan.unmeasured and of(mark)  # noqa: E731
    last = EagerPass(stage.owner, plan, with_gradient=wanted, calls=stage.calls)

    def loss_of(chosen: dict[int, Value], seed: object) -> PyTree:
        last.seed = seed
        out = stage.run_eagerly([chosen.get(i, x) for i, x in enumerate(inputs)], last)
        check(stage, out)
        return out[0], out

    transform = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
    with last.read_gradients():
        (_, out), (grads, _) = transform({i: inputs[i] for i in numbers}, jnp.float32(0.0))
    return out, last.seen, last.gradients(), grads
