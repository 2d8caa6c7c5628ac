"""Work on arrays that are spread over several devices, without moving them.

Invariant: an array keeps its shape while it is reduced, so no device needs another's part of it.
The user and XLA decide where an array lies, never this module.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from nnx_inspector._compat import jaxprs, jit
from nnx_inspector.typing import Array, PyTree, Value

T = TypeVar("T")


def auto_sharded(f: Callable[..., T], *operands: object) -> T:
    """`f(*operands)`, with mesh axes that are explicit in their types left to the compiler.

    jax has no sharding rule for a histogram, and none for most indexing; XLA needs none.

    Args:
        f: a function with small results. It may not close over arrays that lie on the mesh.
        operands: pytrees of tracers or arrays on one mesh; other leaves are passed on as they are.

    Returns:
        The results; if an axis is explicit, each device has a full copy.
    """
    mesh = _explicit_mesh(operands)
    return f(*operands) if mesh is None else _run_auto_sharded(f, operands, mesh, PartitionSpec())


def with_auto_sharding(f: Callable[..., T]) -> Callable[..., T]:
    """A version of `f` that is `auto_sharded`; keyword arguments are static."""

    @functools.wraps(f)
    def run(*operands: object, **static: object) -> T:
        return auto_sharded(functools.partial(f, **static), *operands)

    return run


def keeping_sharding(f: Callable[..., jax.Array], x: jax.Array, *others: object) -> jax.Array:
    """`f(x, *others)`, which lies on the devices as `x` does, as `auto_sharded`.

    In the type of an explicit mesh, zeros or a mean lie elsewhere than the array that they are to
    replace, which a `cond` or a `where` does not take.

    Args:
        f: a function that returns an array of the shape of `x`.
        others: pytrees; see `auto_sharded`.
    """
    sharding: Any = jax.typeof(x).sharding
    if not _explicit_axes(sharding.mesh):
        return f(x, *others)
    return _run_auto_sharded(f, (x, *others), sharding.mesh, sharding.spec)


def _run_auto_sharded(f: Callable[..., T], operands: object, mesh: Any, spec: PartitionSpec) -> T:
    leaves, treedef = jax.tree.flatten(operands)
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}

    def inner(arrays: dict[int, Any]) -> T:
        every = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        return f(*jax.tree.unflatten(treedef, every))

    where = NamedSharding(mesh, spec)
    # On an explicit mesh, every operation needs a rule that says how its result lies on the
    # devices; the ones we use most (a bincount, a gather at computed places) have none and raise a
    # ShardingTypeError in the user's step. `auto_axes` leaves the inner part to XLA, as a mesh
    # without explicit axes does. It can go when jax has these rules.
    run: Any = jax.sharding.auto_axes(inner, axes=_explicit_axes(mesh), out_sharding=where)
    with _mesh_context(arrays.values()):
        return run(arrays)


def _mesh_context(arrays: Iterable[Value]) -> contextlib.AbstractContextManager[Any]:
    """In an eager call without a current mesh, the context of the mesh of explicit arrays."""
    if jit.is_tracing() or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    places = (x.sharding for x in arrays if not jit.is_tracer(x))
    meshes = (x.mesh for x in places if isinstance(x, NamedSharding) and _explicit_axes(x.mesh))
    mesh = next(meshes, None)
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(cast("Any", mesh))


def _explicit_mesh(operands: object) -> Value:
    """The mesh with explicit axes on which one of some arrays lies; None if there is none."""
    leaves = (x for x in jax.tree.leaves(operands) if isinstance(x, jax.Array))
    meshes: Any = (jax.typeof(x).sharding.mesh for x in leaves)
    return next(filter(_explicit_axes, meshes), None)


def take_index(x: object, index: object) -> Value:
    """`x[index]`, a small array, where a row may lie on any device."""
    return auto_sharded(lambda x, index: x[index], x, index)


def _explicit_axes(mesh: Any) -> tuple[str, ...]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in types if kind == AxisType.Explicit)


def to_current_mesh(tree: PyTree) -> Value:
    """Small arrays on the current mesh, whose type differs within `jax.sharding.auto_axes`."""
    current = jax.sharding.get_abstract_mesh()

    def moved(x: object) -> Value:
        # Within `auto_axes` the types of arrays name a mesh whose axes are automatic, and jax
        # refuses to combine them with arrays that were made outside. Without it, the numbers of a
        # perturbation raise there. It can go when jax converts scalars by itself.
        mesh = jax.typeof(x).sharding.mesh
        return x if mesh.empty or mesh == current else jax.sharding.reshard(x, PartitionSpec())

    return tree if current.empty else jax.tree.map(moved, tree)


def to_one_device(arrays: list[Array]) -> list[Array]:
    """Small arrays, moved to one device if they lie on several: within no program, that is."""
    if any(map(jit.is_tracer, arrays)):
        return arrays
    places = {frozenset(x.devices()) for x in arrays}
    if len(places) < 2:
        return arrays
    first = min((device for place in places for device in place), key=lambda one: one.id)
    return [jax.device_put(x, first) for x in arrays]


def zeros_like_aval(shape: Value) -> jax.Array:
    """Zeros of a type, of `jax.eval_shape` or of a variable, also within `jax.shard_map`."""
    return pcast_varying(jnp.zeros(shape.shape, shape.dtype), tuple(jaxprs.varying_axes(shape)))


def pad_axes_evenly(x: jax.Array, filling: jax.Array) -> jax.Array:
    """`x` with its long axes padded to a multiple of the number of devices, if there are several.

    XLA gathers the indices of a scatter that it cannot split evenly. The padding is less than an
    eighth: axes of at most 8 times the number of devices stay as they are.
    """
    devices = jax.device_count()
    more = [-n % devices if n > 8 * devices else 0 for n in x.shape]
    return jax.lax.pad(x, filling, [(0, n, 0) for n in more]) if any(more) else x


def constrain_shardings(
    values: Sequence[object], shardings: Sequence[Sharding | None]
) -> list[Value]:
    """The values, each placed by its sharding; with None a value may lie anywhere."""
    return [
        x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)
        for x, sharding in zip(values, shardings, strict=True)
    ]


def zero_on_copies(x: jax.Array, like: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`x`, or zero on the devices along `axes` that hold a copy of another device's part of `like`.

    A sum over all devices then counts each value once. For use within `jax.shard_map`.
    """
    copied = sorted(set(axes) - jaxprs.varying_axes(like))
    if not copied:
        return x
    first = functools.reduce(jnp.logical_and, [jax.lax.axis_index(axis) == 0 for axis in copied])
    return jnp.where(first, x, jnp.zeros_like(x))


def pcast_varying(x: object, axes: Sequence[str]) -> Value:
    """An array of which jax takes each device's part along some axes to differ."""
    missing = tuple(axis for axis in axes if axis not in jaxprs.varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
