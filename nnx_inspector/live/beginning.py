"""What a pass sends about its beginning: samples of the parameters, and whether its arguments vary.

A pass shows what the update before it has made, so after the last update the parameters are read
once more. Invariant: it is measured once for a pass, whatever is mapped around it, and
differentiates nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import ours
from nnx_inspector._compat.sharding import first_along, on_one_device, zeros_of
from nnx_inspector.hooks.layers import Context
from nnx_inspector.hooks.sites import Path, site_key
from nnx_inspector.hooks.variables import contents
from nnx_inspector.program.structure import is_observable, is_whole
from nnx_inspector.recordings.facts import UNKNOWN, Facts, ParameterFacts
from nnx_inspector.stats.gauges import VARIED
from nnx_inspector.stats.measure_gauges import is_sampled, sampled, varied


@ours()
def beginning(gate: Any, args: Any, kwargs: Any, context: Context) -> tuple[tuple[str, ...], Any]:
    """The paths of the parameters of a call's module and `VARIED`, and a row for each."""
    held: dict[str, jax.Array] = {}
    for path, variable, value in contents(context.module):
        is_kept = isinstance(variable, (nnx.Param, nnx.BatchStat))
        if is_kept and isinstance(value, jax.Array) and is_sampled(value):
            held[path_within(context, path)] = value
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_whole)
    arrays = [jnp.asarray(x) for x in leaves if is_observable(x)]
    operands = jax.lax.stop_gradient((list(held.values()), arrays))
    # if nothing is traced, a cond would be compiled again for each call
    traced = any(map(jit.is_tracer, (gate, *jax.tree.leaves(operands))))
    return (*held, VARIED), sampled_if(gate, *operands) if traced else samples_of(*operands)


def path_within(context: Context, path: Path) -> str:
    """The path of a Variable in the model, by its path in the module that is called."""
    inner = site_key(path)
    return f"{context.path}/{inner}" if context.path else inner


@ours()
def samples_of(held: Any, arguments: Any) -> Any:
    """A sample of each parameter, and whether the arguments vary; float32[..., STATE_LENGTH]."""
    return jnp.stack(on_one_device([*map(sampled, held), varied(arguments)]))


@jax.custom_batching.custom_vmap
def sampled_if(gate: Any, held: Any, arguments: Any) -> Any:
    """`samples_of` if `gate` is true, else zeros; made once under vmap."""

    def nothing(held: Any, arguments: Any) -> Any:
        return zeros_of(jax.eval_shape(samples_of, held, arguments))

    return jax.lax.cond(gate, samples_of, nothing, held, arguments)


@sampled_if.def_vmap
def _sampled_batch(
    axis_size: int, in_batched: Any, gate: Any, held: Any, arguments: Any
) -> tuple[Any, Any]:
    _, of_held, of_arguments = in_batched
    held = [first_along(x) if batched else x for x, batched in zip(held, of_held, strict=True)]
    arguments = [
        x.reshape(-1, *x.shape[2:]) if batched else x
        for x, batched in zip(arguments, of_arguments, strict=True)
    ]
    return sampled_if(jnp.any(gate), held, arguments), False


@ours()
def ended(model: nnx.Module, facts: Facts | None, step: int) -> Facts:
    """The facts about the parameters that are not finite after the last step of a loop.

    Of a parameter whose array was donated, or lies partly on another host, nothing is said, and
    neither of one that is finite now and always was.
    """
    known = {one.path: one for one in (facts or Facts()).parameters}
    found: list[ParameterFacts] = []
    for path, variable, value in contents(model):
        is_kept = isinstance(variable, (nnx.Param, nnx.BatchStat)) and isinstance(value, jax.Array)
        one = known.get(site_key(path))
        if one is None or not is_kept or jit.is_tracer(value) or not is_sampled(value):
            continue
        if not value.is_fully_addressable or value.is_deleted():
            continue
        try:
            here = np.asarray(jax.device_get(value))  # a program would be compiled for each shape
        except jax.errors.JaxRuntimeError:  # the step has failed, and its caller has the error
            continue
        nan, infinite = 0, 0
        if not np.isfinite(here).all():
            nan, infinite = np.count_nonzero(np.isnan(here)), np.count_nonzero(np.isinf(here))
        if nan or infinite or one.ended != UNKNOWN:
            found.append(dataclasses.replace(one, ended=step, nan=nan, infinite=infinite))
    return Facts(parameters=tuple(found))
