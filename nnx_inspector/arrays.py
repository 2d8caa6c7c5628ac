"""Classify the values of a user's program without reading their attributes.

An object may answer to any attribute: an `nnx.Rngs` makes a stream named `shape` when it is asked
for one, a proxy forwards the lookup, a lazy object raises. Invariant: these functions look at
types, never run a user's `__getattr__`, and import jax only for values that are not NumPy's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np


def is_array(x: object) -> bool:
    """Whether a value has a shape and a dtype: a jax or NumPy array, a NumPy scalar, a tracer, a
    reference to an array, or an abstract array (a shape and dtype without numbers).

    Example:
        >>> is_array(np.float32(1)), is_array(1.0)
        (True, False)
    """
    if isinstance(x, (np.ndarray, np.generic)):
        return True
    return isinstance(x, _jax_array_types())


@functools.cache
def _jax_array_types() -> tuple[type, ...]:
    import jax
    import jax.core as jcore

    return jax.Array, jax.ShapeDtypeStruct, jax.Ref, jcore.ShapedArray


def shape_of(x: Any) -> tuple[int, ...] | None:
    """The shape of an array, () for a Python number, None for anything else."""
    if isinstance(x, (bool, int, float, complex)):
        return ()
    return tuple(x.shape) if is_array(x) else None


def own_attribute(x: object, name: str, default: object = None) -> Any:
    """An attribute that an object or its class really has, ignoring its `__getattr__`.

    Example:
        >>> own_attribute(len, "__name__"), own_attribute(1, "__name__")
        ('len', None)
    """
    look_up: Any = type(x).__getattribute__
    try:
        return look_up(x, name)
    except AttributeError:
        return default


def require_examples(arrays: Sequence[Any], what: str) -> None:
    """Raise if a batch is empty, before its examples are studied.

    The batch is the first of the arguments' arrays that has an axis, or all of them of two or more
    axes: a cache, say, may be empty in a batch that is not.

    Raises:
        ValueError: there is no example.
    """
    shapes = [shape for shape in map(shape_of, arrays) if shape]
    wide = [shape for shape in shapes if len(shape) > 1]
    if shapes and (0 in shapes[0] or (wide and all(0 in shape for shape in wide))):
        empty = next(x for x in arrays if 0 in (shape_of(x) or ()))
        raise ValueError(
            f"{what} needs an example, and the batch has none: it is "
            f"{empty.dtype}[{','.join(map(str, empty.shape))}]. Pass a batch with one or more."
        )
