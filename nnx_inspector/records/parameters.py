"""The parameters of a pass: their values, gradients and the updates that an optimizer would make.

Invariant: neither the model nor the optimizer is changed, and a shared parameter is measured once.
Does not run the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from nnx_inspector.hooks.sites import site_key
from nnx_inspector.hooks.variables import variables_by_path
from nnx_inspector.program.stage import StagedCall, array_names, variables_of_state
from nnx_inspector.records.record import Parameter
from nnx_inspector.stats.samples.sample_parameters import is_sampled
from nnx_inspector.stats.summarize import summarize
from nnx_inspector.stats.summary import Summary
from nnx_inspector.typing import Array, PyTree, Value


def floats_of(stage: StagedCall) -> dict[str, tuple[int, bool]]:
    """Path -> (input's number, is a parameter) for each float array; shared Variables once."""
    found: dict[str, tuple[int, bool]] = {}
    seen: set[int] = set()
    for path, variable in variables_by_path(stage.roots):
        if id(variable) in seen or not isinstance(variable, (nnx.Param, nnx.BatchStat)):
            continue
        seen.add(id(variable))
        span = stage.spans.get(id(variable), ())
        for name, i in zip(array_names(variable), span, strict=True):
            if is_sampled(stage.inputs[i]):
                found[site_key(path) + name] = (i, isinstance(variable, nnx.Param))
    return found


def measure_parameters(
    stage: StagedCall,
    grads: Mapping[int, object] | None = None,
    updates: Mapping[int, Sequence[Array]] | None = None,
    inputs: Sequence[object] | None = None,
) -> dict[str, Parameter]:
    """The parameters of a staged call's modules, by path, before the call is finished.

    `inputs` replace the stage's own. `grads` maps an input's number to its gradient, `updates` a
    Variable's id to its arrays' updates.
    """
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    for path, variable in variables_by_path(stage.roots):
        span = stage.spans.get(id(variable), ())
        chosen = grads is not None and any(i in grads for i in span)
        if id(variable) in seen or not (chosen or isinstance(variable, nnx.Param)):
            continue
        seen.add(id(variable))
        change = (updates or {}).get(id(variable), [None] * len(span))
        for name, i, update in zip(array_names(variable), span, change, strict=True):
            found[site_key(path) + name] = Parameter(
                summarize((inputs or stage.inputs)[i]),
                _summary(None if grads is None else grads.get(i)),
                _summary(update),
            )
    return found


def _summary(x: Value) -> Summary | None:
    # an input that cannot be differentiated has a gradient of dtype float0
    if x is None or x.dtype == jax.dtypes.float0:
        return None
    return summarize(x)


def updates_of(
    optimizer: nnx.Optimizer[Any] | None, differentiated: Sequence[tuple[PyTree, PyTree]]
) -> dict[int, list[Array]]:
    """The updates that an optimizer would make: id of a Variable -> the update of each array.

    Args:
        optimizer: the optimizer of the one differentiated module, or None for no updates.
        differentiated: the differentiated arguments, each with its gradients.

    Raises:
        ValueError: the differentiated arguments do not contain exactly one module.
    """
    if optimizer is None:
        return {}
    modules = [(arg, grads) for arg, grads in differentiated if isinstance(arg, nnx.Module)]
    if len(modules) != 1:
        raise ValueError(
            f"optimizer= needs exactly one differentiated argument that is a module, got "
            f"{len(modules)}. Select one with argnums, and call once for each other module."
        )
    ((model, grads),) = modules
    # what Optimizer.update does, except that nothing is written
    params = nnx.state(model, optimizer.wrt, graph=True)
    updates, _ = optimizer.tx.update(
        nnx.as_pure(nnx.state(grads, optimizer.wrt, graph=True)),
        nnx.as_pure(optimizer.opt_state),
        nnx.as_pure(params),
    )
    flat = iter(jax.tree.leaves(updates, is_leaf=lambda x: x is None))
    return {
        id(own): [next(flat) for _ in jax.tree.leaves(value)]
        for own, value in variables_of_state(model, params)
    }
