"""A few figures of an array and of a parameter, made on the device beside the summary.

Looks at a bounded number of values, evenly spaced, so that it costs little whatever the size.
Invariant: nothing is differentiated, and an array that has no units or holds no finite numbers
says so in its head. What the figures mean is in `gauges`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector.gauges import (
    EXAMPLES,
    HEAD,
    LENGTH,
    PARTS,
    POSITIONS,
    SAMPLE,
    SIGMOID_FLAT,
    STATE_HEAD,
    STATE_LENGTH,
    TANH_FLAT,
    UNITS,
)
from nnx_inspector.sharding import left_to_the_compiler
from nnx_inspector.summarize import is_number


def _at_once(f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Compiled, so that an eager call is one program; where the array lies is the compiler's."""
    return jax.jit(functools.wraps(f)(lambda x: left_to_the_compiler(f, x)))


def is_gauged(x: Any) -> bool:
    """Whether an array has units and a batch: real floats with at least two axes."""
    return x.ndim >= 2 and x.size > 0 and jnp.issubdtype(x.dtype, jnp.floating)


def gauge(x: jax.Array) -> jax.Array:
    """The gauge of an array: its last axis has the units, its first the examples.

    Args:
        x: any array. Under vmap it would be one example: move the batch to the front first.

    Returns:
        float32[LENGTH]; all zeros, which says "not measured", of what `is_gauged` is false.
    """
    if not is_gauged(x):
        return jnp.zeros(LENGTH, jnp.float32)
    return _gauged(jax.lax.stop_gradient(x))


def _thinned(x: jax.Array, limits: list[int]) -> jax.Array:
    """At most so many indices along each axis, evenly spaced from the first."""
    steps = [-(-n // limit) for n, limit in zip(x.shape, limits, strict=True)]
    if all(step == 1 for step in steps):
        return x
    return jax.lax.slice(x, (0,) * x.ndim, x.shape, steps)


def _shares(lengths: tuple[int, ...], most: int) -> list[int]:
    """How many indices of each axis to look at, so that their product is at most `most`."""
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


@_at_once
def _gauged(x: jax.Array) -> jax.Array:
    units, examples = x.shape[-1], x.shape[0]
    limits = [EXAMPLES, *_shares(x.shape[1:-1], POSITIONS), UNITS]
    y = _thinned(x, limits).astype(jnp.float32)
    looked, positions = y.shape[-1], int(np.prod(y.shape[1:-1]))
    y = y.reshape(y.shape[0], positions, looked)
    finite = jnp.isfinite(y).all()
    y = jnp.where(finite, y, 0.0)
    # Sums of squares must not overflow: everything is measured in units of the largest value.
    largest = jnp.max(jnp.abs(y))
    unit = jnp.where(largest > 0, largest, 1.0)
    z = y / unit
    away = z - z[:1]
    off = away.mean(axis=0, keepdims=True)
    spread = jnp.sqrt(jnp.square(away - off).mean(axis=(0, 1)))
    mean = z.mean(axis=(0, 1))
    centred = z - mean
    std = jnp.sqrt(jnp.square(centred).mean(axis=(0, 1)))
    flat = centred.reshape(-1, looked)
    covariance = jnp.matmul(flat.T, flat, precision=jax.lax.Precision.HIGHEST)
    trace = jnp.trace(covariance)
    square = jnp.square(covariance).sum()
    rank = jnp.where(square > 0, trace * trace / jnp.where(square > 0, square, 1.0), jnp.nan)
    size = jnp.abs(y)
    part = lambda x: x.mean(axis=(0, 1), dtype=jnp.float32)  # noqa: E731
    near_zero, near_one = size <= 0.01, jnp.abs(size - 1) <= 0.01
    figures = {
        "low": y.min(axis=(0, 1)),
        "high": y.max(axis=(0, 1)),
        "mean": mean * unit,
        "std": std * unit,
        "spread": spread * unit,
        "tanh": part(size > TANH_FLAT),
        "sigmoid": part(size > SIGMOID_FLAT),
        "ends": part(near_zero | near_one),
        "top": part(near_one),
    }
    heads = {
        "measured": finite.astype(jnp.float32),
        "examples": examples,
        "units": units,
        "looked": looked,
        "rank": rank if min(flat.shape) > 1 else jnp.nan,
        "positions": positions,
        "limit": float(np.log2(float(jnp.finfo(x.dtype).max))),
        "reserved": 0.0,
    }
    first = jnp.stack([jnp.asarray(heads[name], jnp.float32) for name in HEAD])
    rest = [jnp.pad(figures[name], (0, UNITS - looked), constant_values=jnp.nan) for name in PARTS]
    return jnp.concatenate([first, *rest])


def is_sampled(x: Any) -> bool:
    """Whether a parameter's array is looked at: real floats, and not empty."""
    return x.size > 0 and jnp.issubdtype(x.dtype, jnp.floating)


def sampled(x: jax.Array, gradient: jax.Array | None = None) -> jax.Array:
    """What is sent of a parameter (a floating-point array), and of its gradient.

    Returns:
        float32[STATE_LENGTH].
    """
    x = jnp.asarray(x)
    state = _sampled(jax.lax.stop_gradient(x))
    if gradient is None:
        return state
    return state.at[STATE_HEAD.index("gradient") : STATE_HEAD.index("graded") + 1].set(
        _norm_of(jax.lax.stop_gradient(gradient))
    )


@_at_once
def _sampled(x: jax.Array) -> jax.Array:
    if x.dtype.itemsize == 8:
        x = x.astype(jnp.float32)
    word = {4: jnp.uint32, 2: jnp.uint16, 1: jnp.uint8}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32).sum(dtype=jnp.uint32)
    if x.ndim == 0:
        x = x[None]
    y = _thinned(x, [*_shares(x.shape[:-1], SAMPLE // UNITS), UNITS]).astype(jnp.float32)
    y = y.reshape(-1)
    first = jnp.stack([
        (bits & 0xFFFF).astype(jnp.float32),
        (bits >> 16).astype(jnp.float32),
        jnp.float32(y.size),
        jnp.float32(jnp.nan),
        jnp.float32(jnp.nan),
    ])  # fmt: skip
    return jnp.concatenate([first, jnp.pad(y, (0, STATE_LENGTH - len(STATE_HEAD) - y.size))])


@_at_once
def _norm_of(gradient: jax.Array) -> jax.Array:
    g = gradient.astype(jnp.float32)
    largest = jnp.max(jnp.abs(g))
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
    norm = jnp.sqrt(jnp.square(g / unit).sum()) * unit
    return jnp.stack([norm, (g != 0).mean(dtype=jnp.float32)])


def varied(tree: Any, *, each: bool = False) -> jax.Array:
    """Whether any array of a pytree (or each) differs along its first axis; as `sampled`'s first.

    Arrays without examples, of which there are not two along that axis, do not count.
    """
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "shape") and hasattr(x, "dtype")]
    leaves = [x for x in leaves if x.ndim and x.shape[0] > 1 and x.size and is_number(x.dtype)]
    found = [_differs(jax.lax.stop_gradient(jnp.asarray(x))) for x in leaves]
    of = jnp.all if each else jnp.any
    differ = of(jnp.stack(found)) if found else jnp.zeros((), bool)
    state = jnp.zeros(STATE_LENGTH, jnp.float32)
    state = state.at[STATE_HEAD.index("elements")].set(1.0)
    return state.at[len(STATE_HEAD)].set(differ.astype(jnp.float32))


@_at_once
def _differs(x: jax.Array) -> jax.Array:
    return jnp.any(x != x[:1])
