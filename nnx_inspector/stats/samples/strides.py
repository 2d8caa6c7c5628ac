"""Which elements an evenly spaced sample has, and how it is taken where the array lies.

A sample is bounded, so its cost does not grow with the array. Invariant: which elements it has
depends on the shape only, never on the values or on how the array is divided among devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat.lowering.partition import Part
from nnx_inspector._compat.native import ShapeDtype
from nnx_inspector._compat.sharding import auto_sharded


def strides_within(shape: tuple[int, ...], limits: list[int]) -> tuple[int, ...]:
    """The steps that leave at most this many indices along each axis, including the first."""
    return tuple(-(-n // limit) for n, limit in zip(shape, limits, strict=True))


def split_limit(lengths: tuple[int, ...], most: int) -> list[int]:
    """How many indices of each axis to examine, with a product of at most `most`."""
    out = [1] * len(lengths)
    while True:
        grown = [
            (count / length, i)
            for i, (count, length) in enumerate(zip(out, lengths, strict=True))
            if count < length and np.prod(out) // count * min(2 * count, length) <= most
        ]
        if not grown:
            return out
        i = min(grown)[1]
        out[i] = min(2 * out[i], lengths[i])


def strided(x: jax.Array, steps: tuple[int, ...]) -> jax.Array:
    if all(step == 1 for step in steps):
        return x
    return jax.lax.slice(x, (0,) * x.ndim, x.shape, steps)


def strided_bits(x: jax.Array, part: Part, *, rows: int, steps: tuple[int, ...]) -> list[jax.Array]:
    """The bits of the values in the sample; zero where a value lies in another device's part."""
    # Each device fills in the values that it holds, and adding up the integers of all devices puts
    # the sample together: one addend of each sum is not 0. Sums of floats would turn -0 into 0, and
    # an exchange of integers can be the one that carries the counts of all other arrays.
    for axis, step in enumerate((*(1,) * rows, *steps)):
        if axis in part.divided:
            index = np.arange(0, part.shape[axis], step, dtype=np.int32) - part.starts[axis]
            inside = (index >= 0) & (index < x.shape[axis])
            x = jnp.take(x, index, axis=axis, mode="clip")
            x = jnp.where(jnp.expand_dims(inside, (*range(axis), *range(axis + 1, x.ndim))), x, 0)
        elif step > 1:
            x = jax.lax.slice_in_dim(x, 0, x.shape[axis], step, axis)
    return [jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)]


def without_gradient(
    f: Callable[..., Sequence[jax.Array]], *arrays: jax.Array, **how: object
) -> jax.Array:
    """The first result of `f` without rows, of arrays that XLA places."""
    measure = lambda arrays: f(*arrays, rows=0, **how)[0]  # noqa: E731
    return auto_sharded(measure, jax.lax.stop_gradient(arrays))


def as_c_dtype(x: jax.Array) -> jax.Array:
    """The array in a dtype that the functions in C read."""
    return x if x.dtype.name in ("float32", "float16", "bfloat16") else x.astype(jnp.float32)


def float_vector(length: int) -> Callable[..., list[ShapeDtype]]:
    """The type of what `native_primitive` makes: one float32 vector for each row."""
    return lambda *_: [ShapeDtype((length,), np.dtype(np.float32))]
