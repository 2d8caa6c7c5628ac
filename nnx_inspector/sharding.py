"""Work on arrays that lie on several devices, done where they lie.

Invariant: what is reduced keeps its shape, so that no device needs another's part of it. Which
array lies where is decided by the user and by XLA, never here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

T = TypeVar("T")


def left_to_the_compiler(f: Callable[[jax.Array], T], x: jax.Array) -> T:
    """`f(x)`, where mesh axes that are explicit in the type of `x` are the compiler's to handle.

    A histogram has no sharding rule that jax knows; XLA counts on each device and adds up.

    Args:
        f: a function of one array, of results that are small.
        x: a tracer.

    Returns:
        The results, whole on every device of the mesh if there is one.
    """
    mesh: Any = jax.typeof(x).sharding.mesh
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in types if kind == AxisType.Explicit)
    if not explicit:
        return f(x)
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.sharding.auto_axes(f, axes=explicit, out_sharding=whole)(x)
