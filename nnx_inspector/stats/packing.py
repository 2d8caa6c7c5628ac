"""A summary as a flat vector of floats and back: how it leaves a backward pass, as a cotangent.

Invariant: unpacking restores every bit, and notices if several summaries were added up.
"""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnx_inspector._compat.configuration import ours
from nnx_inspector._compat.native import Type, by_rows
from nnx_inspector.stats.arithmetic import from_words, points_dtype
from nnx_inspector.stats.bins import BINS
from nnx_inspector.stats.summary import Summary

_LARGEST: Final = 2**32 - 1


def packed_size(dtype: Any) -> int:
    """The length of the packed summary of floats of this dtype.

    Example:
        >>> packed_size(jnp.bfloat16)
        8205
    """
    words = points_dtype(np.dtype(dtype)).itemsize // 4
    return 1 + 2 * (BINS + 6 * words)


@ours()
def pack(s: Summary) -> jax.Array:
    """A summary of floats, with any rows, as a vector of finite numbers, rows + (packed_size,).

    Every 32-bit word of the fields becomes two elements, its upper and its lower 16 bits, which
    float32 holds exactly. All zeros is the summary of nothing, and adding zeros changes nothing.
    The first element counts the payloads, so that `unpack` notices a sum of several.

    Raises:
        TypeError: the summary is one of 32- or 64-bit integers, which have no cotangents.

    Example:
        >>> from nnx_inspector.stats.summarize import summarize
        >>> pack(summarize(jnp.ones(3))).shape == (packed_size(jnp.float32),)
        True
    """
    if not jnp.issubdtype(s.points.dtype, jnp.floating):
        raise TypeError(f"only summaries of floats are packed, not of {s.points.dtype}")
    bins = jnp.asarray(s.bins).astype(jnp.uint32)
    return _packed(bins, jnp.asarray(s.points), jnp.asarray(s.sums), rows=bins.ndim - 1)[0]


@ours()
def unpack(vector: Any) -> Summary:
    """The summary that `pack` turned into a vector, rows + (packed_size,), bit for bit.

    If several packed summaries were added up (a sink reached more than once), counts and bins cover
    all their values, and moments, min and max are NaN, because they do not add.

    Raises:
        ValueError: the length is not a packed size.

    Example:
        >>> from nnx_inspector.stats.summarize import summarize
        >>> unpack(pack(summarize(jnp.ones(3)))).mean
        1.0
    """
    length = vector.shape[-1] if vector.ndim else 0
    if length not in _DTYPES:
        raise ValueError(f"a packed summary has {sorted(_DTYPES)} elements, not {length}")
    if isinstance(vector, np.ndarray):
        bins, points, sums = _fields_on_host(vector)
    else:
        bins, points, sums = _unpacked(vector, rows=vector.ndim - 1)
    return Summary(bins=bins, points=points, sums=sums)


_DTYPES: Final = {packed_size(dtype): dtype for dtype in (np.float32, np.float64)}


def _vector_of(bins: jax.Array, points: jax.Array, sums: jax.Array) -> list[jax.Array]:
    real = sums.dtype
    payloads = jnp.ones((*bins.shape[:-1], 1), real)  # to look at the bins would be a kernel more
    word = jnp.concatenate([bins, _words(points), _words(sums)], axis=-1)
    # side by side: where each word is used once, XLA makes it in the kernel that splits it
    halves = (word[..., None] >> np.array([16, 0], np.uint32)) & 0xFFFF
    return [jnp.concatenate([payloads, halves.reshape(*bins.shape[:-1], -1).astype(real)], axis=-1)]


def _fields_of(vector: jax.Array) -> list[Any]:
    length = vector.shape[-1]
    float_dtype = _DTYPES[length]
    halves = vector[..., 1:].reshape(*vector.shape[:-1], -1, 2).astype(np.uint32)
    upper, lower = halves[..., 0], halves[..., 1]
    carried = upper + (lower >> 16)  # the sum of several lower halves has more than 16 bits
    word = jnp.where(carried > 0xFFFF, jnp.uint32(_LARGEST), (carried << 16) | (lower & 0xFFFF))
    reals = from_words(word[..., BINS:], np.dtype(float_dtype))
    reals = jnp.where(vector[..., :1] > 1, float_dtype(np.nan), reals)
    return [word[..., :BINS], reals[..., :3], reals[..., 3:]]


def _fields_on_host(vector: np.ndarray) -> list[np.ndarray]:
    """`_fields_of` a NumPy array, without touching its zeros."""
    length = vector.shape[-1]
    float_dtype, words = _DTYPES[length], length // 2
    flat = vector.reshape(-1)
    place = np.flatnonzero(flat != 0)
    row, at = np.divmod(place, length)  # a row begins with the number of payloads
    half, of = flat[place].astype(np.uint64), row * words + (at - 1) // 2
    lower, upper = (at > 0) & (at % 2 == 0), at % 2 == 1
    word = np.zeros(vector.size // length * words, np.uint32)
    word[of[lower]] = half[lower]
    high = of[upper]
    word[high] = np.minimum((half[upper] << np.uint64(16)) + word[high], _LARGEST)
    word = word.reshape(*vector.shape[:-1], -1)
    reals = np.ascontiguousarray(word[..., BINS:]).view(float_dtype)
    reals = np.where(vector[..., :1] > 1, float_dtype(np.nan), reals)
    return [word[..., :BINS], reals[..., :3], reals[..., 3:]]


def _words(reals: Any) -> Any:
    """Floats [..., k] as the 32-bit words that they consist of, uint32[..., k * itemsize / 4]."""
    words = lax.bitcast_convert_type(jnp.asarray(reals), jnp.uint32)
    return words.reshape(*reals.shape[:-1], -1)


def _types_of_fields(vector: Type) -> list[Type]:
    real = np.dtype(_DTYPES[vector.shape[-1]])
    return [Type((BINS,), np.dtype(np.uint32)), Type((3,), real), Type((3,), real)]


_packed = by_rows(
    "nnx_inspector_pack",
    _vector_of,
    lambda bins, points, sums: [Type((packed_size(sums.dtype),), sums.dtype)],
)
_unpacked = by_rows("nnx_inspector_unpack", _fields_of, _types_of_fields)
