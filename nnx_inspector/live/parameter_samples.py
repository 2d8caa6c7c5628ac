"""What a pass sends about its beginning: samples of the parameters, and whether its arguments vary.

A pass shows what the update before it has made, so after the last update the parameters are read
once more. Invariant: it is measured once for a pass, whatever is mapped around it, and
differentiates nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.flax_graphs import set_raw_value
from nnx_inspector.hooks.hook import Context
from nnx_inspector.hooks.sites import Path, site_key
from nnx_inspector.hooks.variables import contents
from nnx_inspector.program.structure import is_observable, is_whole
from nnx_inspector.recordings.facts import UNKNOWN, Facts, ParameterFacts
from nnx_inspector.stats.samples.sample_parameters import is_sampled
from nnx_inspector.typing import Variable

ParameterSamples = dict[str, tuple[Variable, jax.Array]]
"""Path -> a Variable and its array."""


def parameters_of_call(context: Context) -> ParameterSamples:
    """The sampled parameters of a call's module, by their paths."""
    held: ParameterSamples = {}
    if context.kind != "method" or context.path is None:
        return held
    for path, variable, value in contents(context.module):
        is_kept = isinstance(variable, (nnx.Param, nnx.BatchStat))
        if is_kept and isinstance(value, jax.Array) and is_sampled(value):
            held[path_in_model(context, path)] = variable, value
    return held


@contextlib.contextmanager
def variables_replaced(
    held: ParameterSamples, named: Callable[[str, jax.Array], jax.Array]
) -> Iterator[None]:
    """A context in which Variables hold other names of their arrays, for a call that reads them.
    Afterwards they have their own again, unless the call has written to them.
    """
    new = [(variable, value, named(path, value)) for path, (variable, value) in held.items()]
    try:
        for variable, _, named_value in new:
            set_raw_value(variable, named_value)
        yield
    finally:
        for variable, value, named_value in new:
            if variable.get_raw_value() is named_value:
                set_raw_value(variable, value)


def arguments_of(args: object, kwargs: object) -> list[jax.Array]:
    """The arrays that a call receives."""
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_whole)
    return [jnp.asarray(x) for x in leaves if is_observable(x)]


def path_in_model(context: Context, path: Path) -> str:
    """The path of a Variable in the model, by its path in the module that is called."""
    inner = site_key(path)
    return f"{context.path}/{inner}" if context.path else inner


@internal_config()
def nonfinite_parameters(model: nnx.Module, facts: Facts | None, step: int) -> Facts:
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
