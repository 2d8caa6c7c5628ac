"""Statistics of each unit of an array: of every channel, neuron or head along one axis.

Like a Summary, Units are made on the device (stable sums about a shift, exact counts), but have no
histogram: 44 bytes for each unit. Invariant: Units can be merged (`merge_units`), all zeros is the
neutral element, and a figure without finite values is NaN. Does not decide what is measured.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.sharding import auto_sharded, take_index
from nnx_inspector.stats.arithmetic import (
    EXACT_BINS,
    add,
    counters,
    from_counters,
    is_finite,
    is_floating,
    merge_about_mean,
    merge_counters,
    move_shift,
    points_dtype,
    real_values,
    scale_for,
    scaled_difference,
    sum_dtype,
)
from nnx_inspector.stats.moments import MAXIMUM, MINIMUM, SCALE, SHIFT, SUM1, SUM2
from nnx_inspector.stats.samples.unit_stats import OFF_AT
from nnx_inspector.stats.summarize import as_array, is_number, is_token, sum_saturating, type_text
from nnx_inspector.stats.summary import row_index
from nnx_inspector.typing import Array, Bool, DTypeLike, Num, Value

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

MAX_UNITS: Final = 65_536
"""The largest number of units that can be measured at once."""

ZEROS, NAN, POSINF, NEGINF, FINITE = range(5)
"""What the rows of `Units.counts` count; zeros are finite too."""

_LARGEST: Final = 2**32 - 1
_CHUNK: Final = 128
"""Sums are added in chunks of this many values: exact to 1e-6 in float32, and within the cache."""

_Floats = npt.NDArray[np.float64]
_Counts = npt.NDArray[np.int64]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("counts", "points", "sums"),
    meta_fields=("behind", "is_mask"),
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Units:
    """Statistics of each of k units, or a row of them for each index of the leading axes.

    The fields are NumPy arrays, jax arrays or tracers. The figures are NumPy arrays with one
    element for each unit, taken over the finite values and merged over all rows. Reading one waits
    for the device, and raises TypeError under jit.

    Attributes:
        counts: uint32, rows + (5, k): zeros, NaN, +Inf, -Inf and finite values.
        points: rows + (3, k): smallest and largest finite value, and the shift, as in a Summary.
        sums: float32 or float64, rows + (3, k): scale, and sums of d and d * d, as in a Summary.
        behind: the activation function that the values go into and nothing else, one of `OFF_AT`;
            "" for another, for none, or if it is not known.
        is_mask: whether the values are True and False.

    Example:
        >>> measure_units(jnp.array([[0.0, 3.0], [0.0, 4.0]])).dead.tolist()
        [True, False]
    """

    counts: Any
    points: Any
    sums: Any
    behind: str = ""
    is_mask: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of the row axes, () for one measurement. Also known under jit."""
        return tuple(self.counts.shape[:-2])

    def __len__(self) -> int:
        """The number of units. Also known under jit."""
        return int(self.counts.shape[-1])

    def row(self, index: int) -> Units:
        """One index of the first row axis.

        Raises:
            IndexError: there is no such row.
        """
        row_index(index, self.rows, "units")
        return jax.tree.map(lambda leaf: take_index(leaf, index), self)

    def merged(self) -> Units:
        """All rows merged into one. Works inside jit, where counts saturate at 2**32 - 1."""
        if not self.rows:
            return self
        if 0 in self.rows:
            return no_units(len(self), dtype=self.points.dtype)
        with _x64_for(self.points.dtype):
            return _merge_rows(self)

    @functools.cached_property
    def _host(self) -> tuple[_Counts, np.ndarray, np.ndarray]:
        one = self.merged()
        try:
            counts = np.asarray(one.counts)
        except TypeError as error:  # jax's TracerArrayConversionError is one
            raise TypeError(
                "Units inside jit cannot be read. Return them from the function and read them "
                "outside."
            ) from error
        if counts.size and counts.max() == _LARGEST:
            raise OverflowError(
                "A count of these units reached its maximum of 2**32 - 1, so their figures are "
                "unknown. Measure fewer values at once."
            )
        return counts.astype(np.int64), np.asarray(one.points), np.asarray(one.sums)

    def _count(self, kind: int) -> _Counts:
        return self._host[0][kind]

    @property
    def zeros(self) -> _Counts:
        """How many values of each unit are +0 or -0; subnormals do not count."""
        return self._count(ZEROS)

    @property
    def nan(self) -> _Counts:
        """How many values of each unit are NaN."""
        return self._count(NAN)

    @property
    def posinf(self) -> _Counts:
        """How many values of each unit are +Inf."""
        return self._count(POSINF)

    @property
    def neginf(self) -> _Counts:
        """How many values of each unit are -Inf."""
        return self._count(NEGINF)

    @property
    def finite(self) -> _Counts:
        """How many values of each unit are finite."""
        return self._count(FINITE)

    @property
    def size(self) -> _Counts:
        """How many values of every kind each unit has."""
        return self._host[0][NAN:].sum(axis=0)

    @property
    def dead(self) -> npt.NDArray[np.bool_]:
        """Which units pass nothing on: those always exactly 0, and those that the activation
        function `behind` them turns off for all values. False for a unit without values, and for
        what is no signal: masks, and integers of 32 bits or more, such as ids.
        """
        if self.is_mask or not np.issubdtype(self._host[1].dtype, np.floating):
            return np.zeros(len(self), bool)
        off = self.zeros == self.size
        if self.behind in OFF_AT:
            off |= (self.finite == self.size) & ~(self.max > OFF_AT[self.behind])
        return off & (self.size > 0)

    @property
    def zero_fraction(self) -> _Floats:
        """The fraction of zeros among all values of each unit, NaN for a unit without values."""
        return self._known(self.zeros / np.maximum(self.size, 1), self.size)

    @property
    def min(self) -> _Floats:
        """The smallest finite value of each unit."""
        return self._known(self._host[1][MINIMUM], self.finite)

    @property
    def max(self) -> _Floats:
        """The largest finite value of each unit."""
        return self._known(self._host[1][MAXIMUM], self.finite)

    @property
    def mean(self) -> _Floats:
        """The mean of the finite values of each unit."""
        _, points, sums = self._host
        mean = points[SHIFT] + sums[SCALE].astype(np.float64) * self._first()
        # Only rounding can put the mean outside.
        return self._known(np.clip(mean, points[MINIMUM], points[MAXIMUM]), self.finite)

    @property
    def std(self) -> _Floats:
        """The standard deviation of the finite values of each unit (divided by n)."""
        sums, n = self._host[2].astype(np.float64), np.maximum(self.finite, 1)
        variance = np.maximum(sums[SUM2] / n - self._first() ** 2, 0)
        return self._known(sums[SCALE] * np.sqrt(variance), self.finite)

    @property
    def norm(self) -> _Floats:
        """The L2 norm of the finite values of each unit."""
        with np.errstate(over="ignore"):  # it may be beyond float64
            return np.hypot(self.mean, self.std) * np.sqrt(self.finite)

    def _first(self) -> _Floats:
        return self._host[2][SUM1].astype(np.float64) / np.maximum(self.finite, 1)

    @staticmethod
    def _known(figure: Value, many: _Counts) -> _Floats:
        return np.where(many > 0, figure.astype(np.float64), np.nan)

    def to_frame(self) -> pd.DataFrame:
        """A pandas frame with a row for each unit and a column for each figure above."""
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        frame: Any = pd.DataFrame({name: getattr(self, name) for name in _STATS})
        return frame.rename_axis("unit")

    def __repr__(self) -> str:
        """One line; under jit only the number of units and rows is known."""
        rows = f", rows={self.rows}" if self.rows else ""
        try:
            nonfinite = int((self.nan + self.posinf + self.neginf > 0).sum())
            return f"Units({len(self)}{rows}, dead={int(self.dead.sum())}, nonfinite={nonfinite})"
        except (TypeError, OverflowError):
            return f"Units({len(self)}{rows})"


_STATS: Final = (
    *("size", "finite", "mean", "std", "min", "max", "norm"),
    *("zeros", "zero_fraction", "nan", "posinf", "neginf", "dead"),
)


@internal_config()
def measure_units(x: Value, *, axis: int = -1, where: object = None) -> Units:
    """Measure the counts, moments and extremes of each unit along an axis, over all other axes.

    This takes two passes over `x` and stores sums of 128 values each, not a copy of `x`. As in
    `summarize`, XLA's CPU arithmetic treats subnormals as 0 in the moments (not in counts and
    extremes), complex values are measured by magnitude, and no gradient flows through.

    Args:
        x: an array of numbers with at least one axis, a tracer or a NumPy array.
        axis: the axis of the units, at most `MAX_UNITS` of them.
        where: which values count, as in `summarize`.

    Returns:
        Units without rows; vmap and scan add rows.

    Raises:
        TypeError: `x` does not hold numbers (but PRNG keys, tokens or strings).
        ValueError: `x` has no such axis, or too many units.

    Example:
        >>> measure_units(jnp.array([[1.0, 0.0], [3.0, jnp.nan]])).mean.tolist()
        [2.0, 0.0]
    """
    if is_token(x):
        raise TypeError("A token has no units. Measure an array of numbers.")
    x = as_array(x)
    if not is_number(x.dtype):
        raise TypeError(
            f"Cannot measure the units of {type_text(x.dtype, x.shape)}: it holds no numbers."
        )
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"An array of shape {x.shape} has no axis {axis} of units. Choose one of its {x.ndim} "
            f"axes."
        )
    axis %= x.ndim
    units = x.shape[axis]
    if units > MAX_UNITS:
        raise ValueError(
            f"Axis {axis} of an array of shape {x.shape} has {units} units, more than {MAX_UNITS}. "
            "Choose another axis."
        )
    if x.size == 0:
        return no_units(units, dtype=x.dtype)
    if isinstance(x, np.ndarray) and x.dtype.itemsize >= 8 and x.dtype != np.complex64:
        with jax.enable_x64(True):  # or jax would cut it to 32 bits
            return _measure(x, where, axis)
    return _measure(lax.stop_gradient(jnp.asarray(x)), where, axis)


@internal_config()
def no_units(count: int, *, dtype: DTypeLike = np.float32) -> Units:
    """`count` units without values: the neutral element of `merge_units`.

    Example:
        >>> no_units(3).size.tolist()
        [0, 0, 0]
    """
    exact = points_dtype(np.dtype(dtype))
    with _x64_for(exact):
        return Units(
            counts=jnp.zeros((5, count), jnp.uint32),
            points=jnp.zeros((3, count), exact),
            sums=jnp.zeros((3, count), sum_dtype(exact)),
            is_mask=np.dtype(dtype) == np.bool_,
        )


@internal_config()
def merge_units(parts: Sequence[Units]) -> Units:
    """Merge the units of all parts (one or more), row by row. Works inside jit, scan and while
    loops.

    Counts saturate at 2**32 - 1 instead of wrapping; the result can then not be read. It has the
    structure of the parts, so it can be the carry of a loop.

    Raises:
        ValueError: there are no parts, or they differ in rows, number of units or dtypes.

    Example:
        >>> merge_units([measure_units(jnp.ones((2, 3))), no_units(3)]).size.tolist()
        [2, 2, 2]
    """
    if not parts:
        raise ValueError("merge_units takes at least one part. For no units, use no_units(count).")
    kinds = {tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(p)) for p in parts}
    if len(kinds) > 1:
        found = " and ".join(
            dict.fromkeys(f"{type_text(p.points.dtype, p.rows)} of {len(p)}" for p in parts)
        )
        raise ValueError(
            f"Units with different rows, dtypes or sizes do not add up: {found}. Measure one axis."
        )
    if len(parts) == 1:
        return parts[0]
    with _x64_for(parts[0].points.dtype):
        return _merge_parts(list(parts))


def _x64_for(exact: Any) -> Any:
    return jax.enable_x64(exact.itemsize == 8 or jax.config.read("jax_enable_x64"))


@functools.partial(jax.jit, static_argnums=2)
def _measure(x: jax.Array, where: object, axis: int) -> Units:
    return auto_sharded(functools.partial(_measure_axis, axis=axis), x, where)


def _measure_axis(x: jax.Array, where: Bool[Array, "..."] | None, *, axis: int) -> Units:
    value = real_values(x)
    real, floating = sum_dtype(value.dtype), is_floating(value)
    n = x.size // x.shape[axis]
    # First the counts, the extremes, and the mean of the finite values, which is the shift. Each
    # value is divided by a power of two that is at least n, because their sum could overflow; the
    # first integer is subtracted from integers, whose differences are exact.
    share = math.ldexp(1.0, -max(n - 1, 1).bit_length())
    first = value[tuple(slice(None) if a == axis else 0 for a in range(x.ndim))]
    origin = jnp.zeros_like(first) if floating else first
    finite, (kinds, initial) = is_finite(value), counters(value)
    shares = scaled_difference(value, _expand(origin, axis, x.ndim), jnp.asarray(share, real))
    nothing, most = np.zeros((), real), np.uint32(min(n, _LARGEST))
    if where is not None:
        where = jnp.broadcast_to(where, x.shape)
        kinds = [jnp.where(where, x, none) for x, none in zip(kinds, initial, strict=True)]
        finite &= where
        most = where.sum([a for a in range(x.ndim) if a != axis], dtype=jnp.uint32)
    operands, initial = [*kinds, jnp.where(finite, shares, 0)], [*initial, nothing]
    *found, total = _reduce_to_units(operands, initial, merge_counters, axis)
    low, high, apart = from_counters(value, found)
    none = jnp.zeros_like(apart[EXACT_BINS[0]])
    zeros, negative, *others = (apart.get(kind, none) for kind in EXACT_BINS)
    counts = [zeros + negative, *others, most - others[0] - others[1] - others[2]]
    many = counts[FINITE].astype(real)
    shift = move_shift(origin, total * (1 / (share * jnp.maximum(many, 1))), low, high)
    scale, factor = scale_for(
        scaled_difference(high, shift, 0.5), scaled_difference(low, shift, 0.5)
    )
    # Then the sums about the shift, in units of a power of two (see `scale_for`).
    about, unit = (_expand(v, axis, x.ndim) for v in (shift, factor))
    d = jnp.where(finite, scaled_difference(value, about, unit), 0)
    ones, twos = _reduce_to_units([d, d * d], [nothing] * 2, add, axis)
    return Units(
        counts=jnp.stack(counts),
        points=jnp.stack([low, high, shift]),
        sums=jnp.stack([scale, ones, twos]),
        is_mask=x.dtype == jnp.bool_,
    )


def _expand(figure: Num[Array, " units"], axis: int, rank: int) -> Num[Array, "..."]:
    """A figure of each unit in the shape of the array."""
    return lax.expand_dims(figure, [a for a in range(rank) if a != axis])


def _reduce_to_units(
    values: Sequence[jax.Array],
    initial: Sequence[object],
    combine: Callable[..., tuple[Array, ...]],
    axis: int,
) -> list[jax.Array]:
    """All values reduced to their units together, as by `lax.reduce`.

    The axes are reduced one by one, because a sharded array could not be flattened in place.
    """
    for other in reversed([a for a in range(values[0].ndim) if a != axis]):
        values = _reduce_axis(values, initial, combine, other)
    return list(values)


def _reduce_axis(
    values: Sequence[jax.Array],
    initial: Sequence[object],
    combine: Callable[..., tuple[Array, ...]],
    axis: int,
) -> list[jax.Array]:
    """The values reduced over one axis: in chunks, whose results are reduced in the same way."""

    def reduce(values: Sequence[jax.Array], axis: int) -> list[jax.Array]:
        return list(lax.reduce(tuple(values), tuple(initial), combine, (axis,)))

    length = values[0].shape[axis]
    if length <= 2 * _CHUNK:
        return reduce(values, axis)
    many = length // _CHUNK
    whole = [
        lax.slice_in_dim(v, 0, many * _CHUNK, axis=axis).reshape(
            *v.shape[:axis], many, _CHUNK, *v.shape[axis + 1 :]
        )
        for v in values
    ]
    parts = reduce(whole, axis + 1)
    if many * _CHUNK < length:
        rest = reduce([lax.slice_in_dim(v, many * _CHUNK, length, axis=axis) for v in values], axis)
        joined = zip(parts, rest, strict=True)
        parts = [jnp.concatenate([a, jnp.expand_dims(b, axis)], axis=axis) for a, b in joined]
    return _reduce_axis(parts, initial, combine, axis)


@jax.jit
def _merge_rows(s: Units) -> Units:
    """Merge all row axes."""

    def flat(s: Units) -> Units:
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[-2:]), s)

    return auto_sharded(lambda s: _merge_first_axis(flat(s)), s)


@jax.jit
def _merge_parts(parts: list[Units]) -> Units:
    def stacked(parts: list[Units]) -> Units:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)

    return auto_sharded(lambda parts: _merge_first_axis(stacked(parts)), parts)


def _merge_first_axis(s: Units) -> Units:
    """Merge the first row axis."""
    finite = s.counts[..., FINITE, :].astype(s.sums.dtype)
    points, sums = (jnp.moveaxis(field, -2, 0) for field in (s.points, s.sums))
    points, sums = merge_about_mean(points, sums, finite, axis=0)
    return dataclasses.replace(
        s,
        counts=sum_saturating(s.counts),
        points=jnp.stack(points, axis=-2),
        sums=jnp.stack(sums, axis=-2),
    )
