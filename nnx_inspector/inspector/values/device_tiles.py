"""Arrays on a device seen through a window: their tiles, reduced where they are.

See `screen.values.blocks`, which puts the tiles together. Invariant: a tile leaves the device as
its figures alone. Knows no model and no screen.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnx_inspector._compat.sharding import with_auto_sharding
from nnx_inspector.screen.values.blocks import TILE, Component, Tile, to_tile_axes
from nnx_inspector.stats.arithmetic import real_values
from nnx_inspector.typing import Array, Float, Function, Num, Value

LINE = 64
"""Elements of a line that are added up in one stage."""
UNROLLED = 64
"""The most lines combined in one expression; more lines are first halved."""


class DeviceTiles:
    """Reduces tiles of jax's arrays, in the array's own precision; see `Tiles`."""

    def figures(self, x: jax.Array, starts: Value, *, tile: Tile) -> dict[str, jax.Array]:
        return _reduce_tile(x, starts, tile=tile)

    def fetch(self, figures: object) -> dict[str, np.ndarray]:
        return jax.device_get(figures)

    def part(self, x: jax.Array, starts: object, sizes: tuple[int, ...]) -> np.ndarray:
        host = np.asarray(_slice(x, starts, sizes=sizes))
        if host.dtype.kind not in "iu" and jnp.issubdtype(host.dtype, jnp.integer):
            return host.astype(np.int64)  # of fewer than 8 bits
        return host


DEVICE_TILES = DeviceTiles()


@functools.partial(jax.jit, static_argnames="tile")
@with_auto_sharding
def _reduce_tile(x: jax.Array, starts: Value, *, tile: Tile) -> dict[str, jax.Array]:
    """The figures of the fine blocks of one tile, or the values of the tile."""
    part = to_tile_axes(lax.dynamic_slice(x, list(starts), tile.sizes), tile.axes)
    value = _real_part(part, tile.component)
    if tile.fine is None:
        return {"value": value}
    return (_careful_statistics if tile.careful else _statistics)(value, tile.fine)


def _real_part(x: jax.Array, component: Component) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return real_values(x)
    return {"real": jnp.real, "imag": jnp.imag}.get(component, real_values)(x)


def _reduce_blocks(
    combine: Function, value: jax.Array, fill: object, fine: tuple[int, int]
) -> jax.Array:
    """A reduction of every fine block, `[tiles, rows, columns]`; `fill` completes the blocks at the
    ends.

    Rows are reduced first, then columns in two stages; each stage goes along whole lines. The
    barriers keep XLA from fusing the three into one slow reduction.
    """
    tiles, rows, columns = value.shape
    up, across = -(-rows // fine[0]), -(-columns // fine[1])
    ends = (0, up * fine[0] - rows, 0), (0, across * fine[1] - columns, 0)
    padded = lax.pad(value, jnp.asarray(fill, value.dtype), ((0, 0, 0), *ends))
    lines = _reduce_axis(combine, padded.reshape(tiles, up, fine[0], -1), 2)
    width = math.gcd(fine[1], LINE)
    parts = lax.optimization_barrier(lines).reshape(tiles, up, across, -1, width)
    return _reduce_axis(combine, lax.optimization_barrier(_reduce_axis(combine, parts, 3)), 3)


def _reduce_axis(combine: Function, value: jax.Array, axis: int) -> jax.Array:
    """A reduction along one axis, pair by pair; six times faster on a CPU than XLA's own."""
    while (length := value.shape[axis]) > UNROLLED:
        half = length // 2
        low, high, last = jnp.split(value, [half, 2 * half], axis)
        value = jnp.concatenate([combine(low, high), last], axis)
    parts = [lax.index_in_dim(value, i, axis, keepdims=False) for i in range(length)]
    while len(parts) > 1:
        paired = [combine(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = paired + parts[2 * len(paired) :]
    return parts[0]


def _statistics(value: jax.Array, fine: tuple[int, int]) -> dict[str, jax.Array]:
    """Figures whose sum is not finite if a float is not finite, or too large to be added up."""
    if jnp.issubdtype(value.dtype, jnp.floating):
        sums, least, most = value.dtype, -jnp.inf, jnp.inf
    else:
        sums = jnp.float64 if value.dtype.itemsize == 8 else jnp.float32
        least, most = jnp.iinfo(value.dtype).min, jnp.iinfo(value.dtype).max
    return {
        "sum": _reduce_blocks(jnp.add, value.astype(sums), 0, fine),
        "low": _reduce_blocks(jnp.minimum, value, most, fine),
        "high": _reduce_blocks(jnp.maximum, value, least, fine),
    }


def _careful_statistics(value: jax.Array, fine: tuple[int, int]) -> dict[str, jax.Array]:
    """Figures of the finite values, and counts of the others; `factor` keeps sums finite."""
    finite = jnp.isfinite(value)
    inside = jnp.where(finite, value, 0)
    limit = jnp.finfo(value.dtype)
    huge = jnp.max(jnp.abs(inside), initial=0) > limit.max * 2.0**-28
    factor = jnp.where(huge, 2.0**-14, 1).astype(value.dtype)  # exact: a power of two
    out = _statistics(inside * factor, fine)
    out["factor"] = factor
    out["low"] = _reduce_blocks(jnp.minimum, jnp.where(finite, value, jnp.inf), jnp.inf, fine)
    out["high"] = _reduce_blocks(jnp.maximum, jnp.where(finite, value, -jnp.inf), -jnp.inf, fine)
    for name, is_so in (
        ("nan", jnp.isnan(value)),
        ("posinf", value == jnp.inf),
        ("neginf", value == -jnp.inf),
    ):
        out[name] = _reduce_blocks(jnp.add, is_so.astype(jnp.int32), 0, fine).astype(jnp.uint16)
    return out


@functools.partial(jax.jit, static_argnames=("sizes",))
@with_auto_sharding
def _slice(x: jax.Array, starts: Value, *, sizes: tuple[int, ...]) -> jax.Array:
    return lax.dynamic_slice(x, list(starts), sizes)


# ---------------------------------------------------------------------- norms


def norms(x: Num[Array, "..."], axis: int) -> Float[Array, "..."]:
    """The Euclidean norms along an axis, on the device, float32 (float64 for 64-bit dtypes).

    NaN and Inf carry over; complex numbers count by their magnitudes.
    """
    along = next((n for n in range(x.ndim) if n != axis), None)
    per = x.size // x.shape[along] if along is not None and x.shape[along] else x.size
    step = max(1, TILE // max(1, per))
    if along is None or x.shape[along] <= step:
        return _norms(x, np.int32(0), axis=axis, along=None, step=0)
    starts = range(0, x.shape[along], step)
    parts = [
        _norms(x, np.int32(s), axis=axis, along=along, step=min(step, x.shape[along] - s))
        for s in starts
    ]
    return jnp.concatenate(parts, axis=along - (axis < along))


@functools.partial(jax.jit, static_argnames=("axis", "along", "step"))
@with_auto_sharding
def _norms(x: jax.Array, start: Value, *, axis: int, along: int | None, step: int) -> jax.Array:
    if along is not None:
        x = lax.dynamic_slice_in_dim(x, start, step, along)
    value = real_values(x)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        value = value.astype(jnp.float64 if value.dtype.itemsize == 8 else jnp.float32)
    size = jnp.max(jnp.abs(value), axis=axis, keepdims=True, initial=0)
    scale = jnp.where((size > 0) & jnp.isfinite(size), size, 1)
    return jnp.sqrt(jnp.sum((value / scale) ** 2, axis=axis)) * jnp.squeeze(scale, axis)
