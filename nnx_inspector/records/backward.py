"""The arguments with respect to which a loss is differentiated, and its one backward pass.

Invariant: the gradients are those of `nnx.value_and_grad`, in the same structure, and the sinks'
cotangents come from the same backward pass. Does not decide what is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_inspector.program.eager import SinksOf
from nnx_inspector.program.function import Arguments, Function, name_of
from nnx_inspector.program.harvest import sinks_for
from nnx_inspector.program.plan import Plan
from nnx_inspector.program.stage import Staged, variables_of_state
from nnx_inspector.program.structure import is_node


def diff_state(argnum: Any) -> tuple[int, Any]:
    if isinstance(argnum, nnx.DiffState):
        return argnum.argnum, argnum.filter
    return argnum, nnx.Param


def numbers_as_arrays(argument: Any) -> Any:
    return jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, (int, float, complex)) else x,
        argument,
        is_leaf=is_node,
    )


@dataclasses.dataclass(frozen=True)
class Part:
    """A differentiated argument: the input numbers of its leaves, and how to rebuild it."""

    where: tuple[int, ...]
    rebuild: Callable[[Sequence[Any]], Any]


def every_argument(function: Function, args: Sequence[Any]) -> tuple[Any, ...]:
    """The positional arguments as `argnums` counts them: a bound method's owner comes first."""
    return tuple(args) if function.owner is None else (function.owner, *args)


def argument_number(function: Function, args: Sequence[Any], argnum: int) -> int:
    """The number of an argument, counted from the front."""
    count = len(every_argument(function, args))
    if not -count <= argnum < count:
        raise ValueError(
            f"argnums selects argument {argnum}, but there are {count} positional arguments."
        )
    return argnum % count


def check_loss(stage: Staged, out: Any, *, function: Function, has_aux: bool) -> None:
    """Raise TypeError unless the function returns a loss, or `(loss, aux)` with `has_aux`."""
    structure, name = stage.returned.treedef, name_of(function.call)
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


def differentiable(
    stage: Staged, function: Function, args: Sequence[Any], argnum: int, only: Any
) -> Part:
    every = every_argument(function, args)
    argument = every[argnum]
    position = len(Arguments.of(every[:argnum]).arrays)
    leaves, treedef = jax.tree.flatten(argument, is_leaf=is_node)
    where: list[int] = []
    builders: list[tuple[int, Any]] = []
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

    def rebuild(grads: Sequence[Any]) -> Any:
        rest = list(grads)
        out = []
        for count, structure in builders:
            mine, rest = rest[:count], rest[count:]
            out.append(mine[0] if structure is None else jax.tree.unflatten(structure, mine))
        return jax.tree.unflatten(treedef, out)

    return Part(tuple(where), rebuild)


def require_scalar(stage: Staged, out: Sequence[Any]) -> None:
    """Raise TypeError unless the first output is a floating-point scalar."""
    if not stage.outputs or jnp.shape(out[0]) != ():
        shape = f"an array of shape {jnp.shape(out[0])}" if stage.outputs else "no array"
        raise TypeError(
            f"The loss function must return a scalar, or (scalar, aux); it returned {shape} first."
        )
    if not jnp.issubdtype(out[0].dtype, jnp.floating):
        raise TypeError(f"The loss must be a floating-point scalar, got {out[0].dtype}.")


def backward_pass(
    stage: Staged,
    inputs: Sequence[Any],
    plan: Plan,
    numbers: Sequence[int] = (),
    *,
    sinks_of: SinksOf = sinks_for,
    check: Callable[[Staged, Sequence[Any]], None] = require_scalar,
) -> tuple[list[Any], list[Any], Any, dict[int, Any]]:
    """One forward and backward pass of a staged loss.

    Args:
        inputs: replace the stage's own.
        numbers: the inputs with respect to which the loss is differentiated.
        sinks_of: makes the sinks of a survey.
        check: called with the stage and the outputs; raises if the first is not a loss.

    Returns:
        The outputs, what was seen, the sinks' cotangents, and the gradient of each of those inputs.
    """
    sinks = None if stage.eager else sinks_of(stage.survey)
    seed = jnp.float32(0.0) if stage.eager else None

    def loss_of(chosen: dict[int, Any], sinks: Any, seed: Any) -> Any:
        full = [chosen.get(i, value) for i, value in enumerate(inputs)]
        out, seen = stage.evaluate(full, plan=plan, sinks=sinks, seed=seed, sinks_of=sinks_of)
        check(stage, out)
        return out[0], (out, seen)

    transform = jax.value_and_grad(loss_of, argnums=(0, 1, 2), has_aux=True)
    (_, (out, seen)), (grads, cotangents, _) = transform(
        {i: inputs[i] for i in numbers}, sinks, seed
    )
    return out, seen, cotangents if stage.last is None else stage.last.cotangents(), grads
