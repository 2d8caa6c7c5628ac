"""Work on arrays that lie on several devices, done where they lie.

Invariant: what is reduced keeps its shape, so that no device needs another's part of it. Which
array lies where is decided by the user and by XLA, never here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from nnx_inspector._compat import jaxprs

T = TypeVar("T")


def left_to_the_compiler(f: Callable[[Any], T], x: Any) -> T:
    """`f(x)`, where mesh axes that are explicit in the type of `x` are the compiler's to handle.

    A histogram has no sharding rule that jax knows; XLA counts on each device and adds up.

    Args:
        f: a function with results that are small.
        x: a tracer, or a pytree of them on one mesh.

    Returns:
        The results, whole on every device of the mesh if there is one.
    """
    mesh: Any = jax.typeof(jax.tree.leaves(x)[0]).sharding.mesh
    explicit = _explicit(mesh)
    if not explicit:
        return f(x)
    whole = NamedSharding(mesh, PartitionSpec())
    automatic: Any = jax.sharding.auto_axes(f, axes=explicit, out_sharding=whole)
    return automatic(x)


def _explicit(mesh: Any) -> tuple[str, ...]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in types if kind == AxisType.Explicit)


def on_this_mesh(tree: Any) -> Any:
    """Small arrays, of the current mesh's type: within `jax.sharding.auto_axes` it is another."""
    current = jax.sharding.get_abstract_mesh()

    def moved(x: Any) -> Any:
        mesh = jax.typeof(x).sharding.mesh
        return x if mesh.empty or mesh == current else jax.sharding.reshard(x, PartitionSpec())

    return tree if current.empty else jax.tree.map(moved, tree)


def a_row_each(mesh: Any, axes: Sequence[str]) -> NamedSharding | None:
    """Where an array of one row for each device along mesh axes lies; None where types do not say,
    and a shard_map takes it as it comes.
    """
    explicit = tuple(axis for axis in axes if axis in _explicit(mesh))
    return NamedSharding(mesh.abstract_mesh, PartitionSpec(explicit)) if explicit else None


def zeros_of(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of a type as `jax.eval_shape` tells it, also within `jax.shard_map`."""
    zeros = jnp.zeros(shape.shape, shape.dtype)
    varying = tuple(jaxprs.varying_axes(shape))
    return jax.lax.pcast(zeros, varying, to="varying") if varying else zeros


def with_even_axes(x: jax.Array, filling: jax.Array) -> jax.Array:
    """`x` with its longer axes made a multiple of the number of devices, if there are several.

    XLA gathers the indices of a scatter which it cannot split evenly. By less than an eighth:
    axes that are not much longer than that number stay as they are.
    """
    devices = jax.device_count()
    more = [-n % devices if n > 8 * devices else 0 for n in x.shape]
    return jax.lax.pad(x, filling, [(0, n, 0) for n in more]) if any(more) else x


def placed(values: Sequence[Any], shardings: Sequence[Sharding | None]) -> list[Any]:
    """The values, each where its sharding says; where that is None it may lie anywhere."""
    return [
        x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)
        for x, sharding in zip(values, shardings, strict=True)
    ]


def counted_once(x: jax.Array, like: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`x`, but zero on the devices along `axes` that hold copies of what others hold of `like`.

    To be called within `jax.shard_map`; `axes` are manual. So that a sum over all of the devices
    is one over all values.
    """
    copied = sorted(set(axes) - jaxprs.varying_axes(like))
    if not copied:
        return x
    first = functools.reduce(jnp.logical_and, [jax.lax.axis_index(axis) == 0 for axis in copied])
    return jnp.where(first, x, jnp.zeros_like(x))
