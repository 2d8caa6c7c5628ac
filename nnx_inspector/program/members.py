"""Distinguishes the members of a vmapped ensemble from the examples of a batch.

A `vmap` maps the parameters of the modules called inside only if these are an ensemble. A mark
within such a call notes which axis the members have. Invariant: an axis is that of members only if
the same `vmap` maps the parameters; what a cached trace holds (a module that is jitted by itself)
is not known, and its members are measured together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import ShapedArray

from nnx_inspector._compat import jaxprs, jit
from nnx_inspector.hooks.variables import contents, parameter_arrays
from nnx_inspector.typing import Array, Value


class _ThreadState(threading.local):
    ensemble: tuple[tuple[object, int], ...] = ()
    """The vmaps that map the parameters of the innermost call, each with its size."""


_here = _ThreadState()


@dataclasses.dataclass(frozen=True)
class Members:
    """The members in a mark's operands.

    Attributes:
        count: how many there are.
        levels: for each operand, how many of the vmaps that map it are inside the ensemble's; None
            if all members share the operand.
    """

    count: int
    levels: tuple[int | None, ...]

    def only(self, number: int) -> Members | None:
        """Those in one operand of a mark of outputs, where no operand is shared by all members."""
        return None if None in self.levels else Members(self.count, (self.levels[number],))


@contextlib.contextmanager
def member_scope(module: object) -> Iterator[None]:
    """Within the context, marks belong to a call of the module."""
    outer = _here.ensemble
    if isinstance(module, nnx.Module) and jit.current_vmaps():
        first = next(parameters_of(module), None)
        if first is not None:  # a module without parameters is a part of the one around it
            _here.ensemble = tuple(jit.vmaps_of(first))
    try:
        yield
    finally:
        _here.ensemble = outer


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """The ensemble that the calls here are members of, mapped by the one `vmap` around them.

    Attributes:
        count: how many members it has.
        number: the member's number, int32[], mapped by the vmap.
    """

    count: int
    number: jax.Array


def ensemble_of(module: object) -> Ensemble | None:
    """The ensemble whose member a module called here is; None if other vmaps are around it too."""
    here = jit.current_vmaps() if isinstance(module, nnx.Module) else []
    first = next(parameters_of(module), None) if len(here) == 1 else None
    by = jit.vmaps_of(first)
    if [vmap for vmap, _ in by] != here or not by:
        return None
    return Ensemble(by[0][1], _number.bind(jax.lax.stop_gradient(first)))


_number = jaxprs.nondifferentiable_primitive(
    "nnx_inspector_member",
    lambda _: jnp.int32(0),
    lambda _: ShapedArray((), jnp.dtype("int32")),
    lambda xs, dims: (jnp.arange(xs[0].shape[dims[0]], dtype=jnp.int32), 0),
)
"""The number of the ensemble's member whose parameter the operand is."""


def parameters_of(module: object) -> Iterator[Value]:
    return parameter_arrays(contents(module if isinstance(module, nnx.Module) else ()))


def members_in(operands: Sequence[Array], *, alike: bool = False) -> Members | None:
    """The members in the operands of a mark; None if there are none, or ensembles of ensembles.

    Args:
        alike: whether each vmap that maps one of them is to map them all.
    """
    here = jit.current_vmaps()
    if len(_here.ensemble) != 1 or (vmap := _here.ensemble[0][0]) not in here:
        return None
    by = [[vmap for vmap, _ in jit.vmaps_of(x)] for x in operands]
    if alike:
        by = [[vmap for vmap in here if any(vmap in own for own in by)]] * len(by)
    levels = tuple(own.index(vmap) if vmap in own else None for own in by)
    return Members(_here.ensemble[0][1], levels)
