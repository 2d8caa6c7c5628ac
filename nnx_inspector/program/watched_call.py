"""The outermost call of a watched pass, as it can be traced again: shapes in place of arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from nnx_inspector.hooks.layers import (
    Context,
)
from nnx_inspector.hooks.pytrees import with_arguments
from nnx_inspector.program.marks import is_whole


@dataclasses.dataclass(frozen=True, eq=False)
class WatchedCall:
    """The outermost call of a pass as a program was traced for it: shapes in place of arrays.

    Attributes:
        path: of the module that was called.
    """

    path: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_in_shapes(context: Context, args: Any, kwargs: Any) -> WatchedCall | None:
    """A call without its arrays; None where it holds more than arrays and plain Python values."""

    def shape_of(leaf: Any) -> Any:
        is_array = isinstance(leaf, jax.Array | np.ndarray)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array else leaf

    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_whole)
    plain = (jax.Array, np.ndarray, bool, int, float, complex, str, type(None))
    if context.path is None or not all(isinstance(leaf, plain) for leaf in leaves):
        return None
    new = [shape_of(leaf) for leaf in leaves]
    args, kwargs = with_arguments(args, kwargs, new, is_whole)
    return WatchedCall(context.path, context.method_name, args, kwargs)
