"""Work on arrays that are spread over several devices, without moving them.

Invariant: an array keeps its shape while it is reduced, so no device needs another's part of it.
The user and XLA decide where an array lies, never this module.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from nnx_inspector._compat import jaxprs, jit

T = TypeVar("T")


def left_to_the_compiler(f: Callable[[Any], T], x: Any) -> T:
    """`f(x)`, with mesh axes that are explicit in the type of `x` left to the compiler.

    jax has no sharding rule for a histogram; XLA counts on each device and adds up.

    Args:
        f: a function with small results.
        x: a tracer, or a pytree of tracers on one mesh.

    Returns:
        The results; if there is a mesh, each of its devices has a full copy.
    """
    mesh: Any = jax.typeof(jax.tree.leaves(x)[0]).sharding.mesh
    explicit = _explicit(mesh)
    if not explicit:
        return f(x)
    whole = NamedSharding(mesh, PartitionSpec())
    automatic: Any = jax.sharding.auto_axes(f, axes=explicit, out_sharding=whole)
    return automatic(x)


def first_along(x: Any, axis: int | None = 0) -> Any:
    """The first entry along an axis that a `vmap` added, and that may lie on several devices; `x`
    itself if it added none.
    """
    if axis is None:
        return x
    return left_to_the_compiler(functools.partial(jnp.take, indices=0, axis=axis), x)


def _explicit(mesh: Any) -> tuple[str, ...]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in types if kind == AxisType.Explicit)


def on_this_mesh(tree: Any) -> Any:
    """Small arrays on the current mesh, whose type differs within `jax.sharding.auto_axes`."""
    current = jax.sharding.get_abstract_mesh()

    def moved(x: Any) -> Any:
        mesh = jax.typeof(x).sharding.mesh
        return x if mesh.empty or mesh == current else jax.sharding.reshard(x, PartitionSpec())

    return tree if current.empty else jax.tree.map(moved, tree)


def on_one_device(arrays: list[Any]) -> list[Any]:
    """Small arrays, moved to one device if they lie on several: within no program, that is."""
    if any(map(jit.is_tracer, arrays)):
        return arrays
    places = {frozenset(x.devices()) for x in arrays}
    if len(places) < 2:
        return arrays
    first = min((device for place in places for device in place), key=lambda one: one.id)
    return [jax.device_put(x, first) for x in arrays]


def a_row_each(mesh: Any, axes: Sequence[str]) -> NamedSharding | None:
    """The sharding with one row per device along mesh axes; None if none of them is explicit."""
    explicit = tuple(axis for axis in axes if axis in _explicit(mesh))
    return NamedSharding(mesh.abstract_mesh, PartitionSpec(explicit)) if explicit else None


def zeros_of(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of a type returned by `jax.eval_shape`, also within `jax.shard_map`."""
    zeros = jnp.zeros(shape.shape, shape.dtype)
    varying = tuple(jaxprs.varying_axes(shape))
    return jax.lax.pcast(zeros, varying, to="varying") if varying else zeros


def with_even_axes(x: jax.Array, filling: jax.Array) -> jax.Array:
    """`x` with its long axes padded to a multiple of the number of devices, if there are several.

    XLA gathers the indices of a scatter that it cannot split evenly. The padding is less than an
    eighth: axes of at most 8 times the number of devices stay as they are.
    """
    devices = jax.device_count()
    more = [-n % devices if n > 8 * devices else 0 for n in x.shape]
    return jax.lax.pad(x, filling, [(0, n, 0) for n in more]) if any(more) else x


def placed(values: Sequence[Any], shardings: Sequence[Sharding | None]) -> list[Any]:
    """The values, each placed by its sharding; with None a value may lie anywhere."""
    return [
        x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)
        for x, sharding in zip(values, shardings, strict=True)
    ]


def counted_once(x: jax.Array, like: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`x`, or zero on the devices along `axes` that hold a copy of another device's part of `like`.

    A sum over all devices then counts each value once. For use within `jax.shard_map`.
    """
    copied = sorted(set(axes) - jaxprs.varying_axes(like))
    if not copied:
        return x
    first = functools.reduce(jnp.logical_and, [jax.lax.axis_index(axis) == 0 for axis in copied])
    return jnp.where(first, x, jnp.zeros_like(x))


def device_within() -> tuple[jax.Array | None, int]:
    """Within a `shard_map`, the device's number and how many of this process run it; or None, 1."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(mesh.manual_axes)
    if not axes:
        return None, 1
    devices = math.prod(mesh.shape[axis] for axis in axes)
    return jax.lax.axis_index(axes), min(devices, jax.local_device_count())


def counted_once_here(tree: T) -> T:
    """Arrays to add up over devices: zeros where another device of a `shard_map` has them."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)

    if not axes or not jaxprs.varying_axes(jax.lax.axis_index(axes)):
        return tree  # what differs is not known (`check_vma=False`)
    return jax.tree.map(lambda x: counted_once(x, x, axes), tree)
