"""An array seen through a window: reduced to blocks, or a few exact values of it.

Invariant: no copy or transfer has the array's size: its tiles are sliced and reduced, and their
figures combined in float64. Each element of the window is in exactly one block; blocks lie on a
grid that does not depend on the window; values that are not finite are counted, never averaged.
What reduces a tile depends on where the array is: NumPy here, a device elsewhere. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from nnx_inspector.typing import Int, Value

TILE = 1 << 20
"""The most elements that are sliced and reduced at once."""
FINE = 1 << 12
"""Elements that the device adds up in the array's own precision, before float64 is used."""
STEP = 16
"""Windows have a multiple of this many blocks, if possible: fewer sizes need fewer programs."""

Component = Literal["value", "real", "imag", "abs"]
"""The part of complex numbers that is shown; "value" is their magnitude."""
Span = tuple[int, int]
Triple = tuple[int, int, int]
"""Along tiles, rows and columns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """A box in an array: a span along up to three axes, and one index along each other axis.

    Attributes:
        axes: the axes of the tiles (pictures side by side), rows and columns; None for no axis.
        spans: start and end (exclusive) along each of the three.
        index: a number for every axis of the array; those of the shown axes are ignored.
    """

    axes: tuple[int | None, int | None, int | None]
    spans: tuple[Span, Span, Span]
    index: tuple[int, ...]

    def within(self, shape: Sequence[int]) -> Window:
        """The same window with its spans clipped to the array.

        Raises:
            ValueError: the window does not fit an array of this shape.
        """
        shown = [axis for axis in self.axes if axis is not None]
        if len(self.index) != len(shape) or len({*shown}) != len(shown):
            raise ValueError(
                f"A window on an array of shape {tuple(shape)} needs one index per axis and "
                f"distinct axes, got index {self.index} and axes {self.axes}."
            )
        for axis in shown:
            if not 0 <= axis < len(shape):
                raise ValueError(f"An array of shape {tuple(shape)} has no axis {axis}.")
        for axis, number in enumerate(self.index):
            if axis not in shown and not 0 <= number < max(1, shape[axis]):
                raise ValueError(
                    f"Index {number} is out of range for axis {axis}, which has length "
                    f"{shape[axis]}."
                )
        spans = [
            (0, 1) if axis is None else _clipped(span, shape[axis])
            for axis, span in zip(self.axes, self.spans, strict=True)
        ]
        return dataclasses.replace(self, spans=tuple(spans))


def _clipped(span: Span, length: int) -> Span:
    start = min(max(0, span[0]), max(0, length - 1))
    return start, max(start, min(span[1], length))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """The content of a window. Arrays are `[tiles, rows, columns]` of blocks.

    Attributes:
        starts: the index of the first block's first element, along tiles, rows and columns.
        block: a block's elements along each; blocks at the array's end may have fewer.
        ends: the index after the last block's last element.
        mean: the mean of the finite values, float64; NaN if a block has none. Blocks of one element
            have the values themselves, including NaN and Inf.
        low, high: the least and the greatest finite value, float64; NaN if a block has none. None
            for blocks of one element.
        nan, posinf, neginf: their counts, int64; None if the window has no such value.
        fetched: the bytes that came from the device.
    """

    starts: Triple
    block: Triple
    ends: Triple
    mean: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None
    nan: np.ndarray | None
    posinf: np.ndarray | None
    neginf: np.ndarray | None
    fetched: int

    @property
    def exact(self) -> bool:
        return self.low is None


class Tile(NamedTuple):
    """A part of an array that is reduced at once.

    Attributes:
        axes: as in `Window`.
        sizes: its elements along each axis of the array.
        fine: the rows and columns of its fine blocks, of which there are figures; None for values.
        careful: whether some value is not finite, or a sum: then the figures are asked for again.
    """

    axes: tuple[int | None, ...]
    sizes: tuple[int, ...]
    fine: tuple[int, int] | None
    component: Component
    careful: bool


def to_tile_axes(part: Value, axes: Sequence[int | None]) -> Value:
    """A part of an array, of one element along all axes but these, as [tiles, rows, columns]."""
    shown = [axis for axis in axes if axis is not None]
    others = [axis for axis in range(part.ndim) if axis not in shown]
    sizes = [1 if axis is None else part.shape[axis] for axis in axes]
    return part.transpose((*others, *shown)).reshape(sizes)


class Tiles(Protocol):
    """Reduces tiles of arrays. `figures` may return before it has: `fetch` waits for it."""

    def figures(
        self, x: Value, starts: Int[np.ndarray, " axis"], *, tile: Tile
    ) -> dict[str, Value]: ...

    def fetch(self, figures: dict[str, Value]) -> dict[str, np.ndarray]: ...

    def part(
        self, x: Value, starts: Int[np.ndarray, " axis"], sizes: tuple[int, ...]
    ) -> np.ndarray: ...


class NumpyTiles:
    """Reduces tiles of NumPy arrays, in float64."""

    def figures(
        self, x: np.ndarray, starts: Int[np.ndarray, " axis"], *, tile: Tile
    ) -> dict[str, Value]:
        part, fine = to_tile_axes(self.part(x, starts, tile.sizes), tile.axes), tile.fine
        if part.dtype.kind == "c":
            part = {"real": np.real, "imag": np.imag}.get(tile.component, _magnitudes)(part)
        value = part.astype(np.float64)
        if fine is None:
            return {"value": value}
        rows, columns = np.arange(0, value.shape[1], fine[0]), np.arange(0, value.shape[2], fine[1])

        def over(pair: np.ufunc, of: np.ndarray) -> np.ndarray:
            return pair.reduceat(pair.reduceat(of, rows, axis=1), columns, axis=2)

        finite = np.isfinite(value)
        inside = np.where(finite, value, 0)
        huge = np.abs(inside).max(initial=0) > np.finfo(np.float64).max * 2.0**-13
        factor = 2.0**-14 if huge else 1.0  # exact: a power of two
        return {
            "sum": over(np.add, inside * factor),
            "factor": np.float64(factor),
            "low": over(np.minimum, np.where(finite, value, np.inf)),
            "high": over(np.maximum, np.where(finite, value, -np.inf)),
            "nan": over(np.add, np.isnan(value).astype(np.int64)),
            "posinf": over(np.add, (value == np.inf).astype(np.int64)),
            "neginf": over(np.add, (value == -np.inf).astype(np.int64)),
        }

    def fetch(self, figures: dict[str, Value]) -> dict[str, np.ndarray]:
        return figures

    def part(
        self, x: np.ndarray, starts: Int[np.ndarray, " axis"], sizes: tuple[int, ...]
    ) -> np.ndarray:
        return x[tuple(slice(a, a + n) for a, n in zip(starts.tolist(), sizes, strict=True))]


NUMPY_TILES = NumpyTiles()


def _magnitudes(x: np.ndarray) -> np.ndarray:
    """Magnitudes; one beyond the dtype of the parts is not an Inf."""
    size = np.abs(x.astype(np.complex128))
    return np.where(np.isfinite(x), np.minimum(size, np.finfo(x.dtype).max), size)


def reduce_blocks(
    x: Value,
    window: Window,
    most: tuple[int, int, int],
    component: Component = "value",
    tiles: Tiles = NUMPY_TILES,
) -> Blocks:
    """Reduce the content of a window to at most `most` blocks.

    The elements of a block along rows and columns are the lowest sufficient power of two; a block
    is in one tile. The window is widened to whole blocks, and to a multiple of STEP of them.

    Args:
        x: an array of numbers.
        window: the window to show.
        most: the most tiles, rows and columns of blocks; the first tiles are taken.
        component: the part of complex numbers to show.
        tiles: what reduces the tiles of such arrays.

    Raises:
        ValueError: the window does not fit the array, or `most` is not positive.

    Example:
        >>> x = np.arange(16.0).reshape(4, 4)
        >>> window = Window(axes=(None, 0, 1), spans=((0, 1), (0, 4), (0, 4)), index=(0, 0))
        >>> reduce_blocks(x, window, (1, 2, 2)).mean[0].tolist()
        [[2.5, 4.5], [10.5, 12.5]]
    """
    if min(most) < 1:
        raise ValueError(f"most must be positive numbers of blocks, got {most}.")
    window = window.within(x.shape)
    lengths = [1 if axis is None else x.shape[axis] for axis in window.axes]
    first = (window.spans[0][0], min(window.spans[0][1], window.spans[0][0] + most[0]))
    spans, block = [first], [1]
    for span, length, count in zip(window.spans[1:], lengths[1:], most[1:], strict=True):
        aligned, size = _aligned(span, length, count)
        spans.append(aligned)
        block.append(size)
    of_tiles, of_rows, of_columns = (
        (a, b, s, -(-(b - a) // s)) for (a, b), s in zip(spans, block, strict=True)
    )
    starts, ends, sizes, counts = zip(of_tiles, of_rows, of_columns, strict=True)
    grid = _Grid(x, window, starts, ends, sizes, counts, component, tiles)
    return grid.reduced()


def _aligned(span: Span, length: int, most: int) -> tuple[Span, int]:
    """A span of whole blocks around the requested span, and the size of a block."""
    if span[1] <= span[0]:
        return (span[0], span[0]), 1
    size = 1
    while -(-span[1] // size) - span[0] // size > most:
        size *= 2
    first, last, every = span[0] // size, -(-span[1] // size), -(-length // size)
    wanted = min(-(-(last - first) // STEP) * STEP, every)
    if wanted <= most:
        first = min(first, every - wanted)
        last = first + wanted
    return (first * size, min(last * size, length)), size


@dataclasses.dataclass
class _Grid:
    """The blocks of one reduction, which its tiles add up to."""

    x: Value
    window: Window
    starts: Triple
    ends: Triple
    block: Triple
    counts: Triple
    component: Component
    of_tiles: Tiles

    def reduced(self) -> Blocks:
        fine = self._fine()
        tiles = [(at, sizes) for at, sizes in self._tiles(fine) if math.prod(sizes)]
        # all tiles start before the first result is fetched; the waiting results are small
        under_way = [self._start_tile(at, sizes, fine) for at, sizes in tiles]
        found: dict[str, np.ndarray] = {}
        fetched = 0
        for (at, sizes), figures in zip(tiles, under_way, strict=True):
            host = self.of_tiles.fetch(figures)
            fetched += _bytes(host)
            if "sum" in host and not np.isfinite(host["sum"]).all():
                host = self.of_tiles.fetch(self._start_tile(at, sizes, fine, careful=True))
                fetched += _bytes(host)
            self._add(found, host, at, sizes)
        return self._blocks(found, fetched)

    def _fine(self) -> tuple[int, int]:
        columns = min(self.block[2], FINE)
        return min(self.block[1], max(1, FINE // columns)), columns

    def _tiles(self, fine: tuple[int, int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """The start and sizes of each tile; a tile starts at a block, or lies within one."""
        spans = [b - a for a, b in zip(self.starts, self.ends, strict=True)]
        columns = _tile_size(spans[2], self.block[2], TILE // fine[0])
        rows = _tile_size(spans[1], self.block[1], TILE // max(columns, 1))
        steps = (max(1, TILE // max(rows * columns, 1)), max(rows, 1), max(columns, 1))
        ranges = [
            range(a, b, step) for a, b, step in zip(self.starts, self.ends, steps, strict=True)
        ]
        for at in itertools.product(*ranges):
            yield at, tuple(min(s, b - a) for a, b, s in zip(at, self.ends, steps, strict=True))

    def _start_tile(
        self,
        at: Sequence[int],
        sizes: Sequence[int],
        fine: tuple[int, int],
        *,
        careful: bool = False,
    ) -> dict[str, Value]:
        starts, lengths = list(self.window.index), [1] * self.x.ndim
        for axis, start, size in zip(self.window.axes, at, sizes, strict=True):
            if axis is not None:
                starts[axis], lengths[axis] = start, size
        figures = None if self.block[1] * self.block[2] == 1 else fine
        tile = Tile(self.window.axes, tuple(lengths), figures, self.component, careful)
        return self.of_tiles.figures(self.x, np.asarray(starts, np.int32), tile=tile)

    def _add(
        self,
        found: dict[str, np.ndarray],
        host: dict[str, np.ndarray],
        at: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        fine = self._fine()
        place = [
            # for every fine block, the number of the block around it
            (a + np.arange(-(-size // step)) * step - start) // block
            for a, size, step, start, block in zip(
                at, sizes, (1, *fine), self.starts, self.block, strict=True
            )
        ]
        where = np.ix_(*place)
        if "value" in host:
            self._accumulator(found, "value", np.nan)[where] = host["value"]
            return
        count = np.ones(self.counts)
        for i, of_axis in enumerate(self._block_sizes()):
            count *= np.expand_dims(of_axis, tuple(n for n in range(3) if n != i))
        # divided before adding up: sums of huge values overflow, their mean does not
        share = host["sum"].astype(np.float64) / count[where] / np.float64(host.get("factor", 1))
        np.add.at(self._accumulator(found, "sum", 0.0), where, share)
        for name, at_end, worst in (("low", np.minimum, np.inf), ("high", np.maximum, -np.inf)):
            at_end.at(self._accumulator(found, name, worst), where, host[name].astype(np.float64))
        for name in ("nan", "posinf", "neginf"):
            if name in host:
                np.add.at(self._accumulator(found, name, 0), where, host[name].astype(np.int64))

    def _accumulator(self, found: dict[str, np.ndarray], name: str, start: float) -> np.ndarray:
        if name not in found:
            dtype = np.float64 if isinstance(start, float) else np.int64
            found[name] = np.full(self.counts, start, dtype)
        return found[name]

    def _block_sizes(self) -> list[np.ndarray]:
        """The number of elements of each block along each axis."""
        return [
            np.minimum(block, end - start - np.arange(count) * block)
            for start, end, block, count in zip(
                self.starts, self.ends, self.block, self.counts, strict=True
            )
        ]

    def _blocks(self, found: dict[str, np.ndarray], fetched: int) -> Blocks:
        of: Any = functools.partial(
            Blocks, starts=self.starts, block=self.block, ends=self.ends, fetched=fetched
        )
        none = dict.fromkeys(("low", "high", "nan", "posinf", "neginf"))
        if "sum" not in found:
            return of(mean=self._accumulator(found, "value", np.nan), **none)
        tiles, rows, columns = self._block_sizes()
        size = tiles[:, None, None] * rows[:, None] * columns
        bad = {name: found[name] for name in ("nan", "posinf", "neginf") if name in found}
        finite = size - sum(bad.values(), np.zeros(self.counts, np.int64))
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.where(finite > 0, found["sum"] * (size / finite), np.nan)
        # rounding must not move a mean out of the range of its values
        low, high = (np.where(finite > 0, found[name], np.nan) for name in ("low", "high"))
        counts = {name: value for name, value in bad.items() if value.any()}
        if not counts:
            return of(mean=np.clip(mean, low, high), **{**none, "low": low, "high": high})
        return of(mean=np.clip(mean, low, high), low=low, high=high, **bad)


def _bytes(host: dict[str, np.ndarray]) -> int:
    return sum(np.asarray(value).nbytes for value in host.values())


def _tile_size(span: int, block: int, room: int) -> int:
    """Elements of a tile along one axis: whole blocks if they fit, else a fraction of a block."""
    if span <= room:
        return span
    if block <= room:
        return room // block * block
    return 1 << (room.bit_length() - 1)  # a power of two, like a block


# --------------------------------------------------------------- exact values


def exact_values(x: Value, window: Window, tiles: Tiles = NUMPY_TILES) -> np.ndarray:
    """The exact values of a small window, `[tiles, rows, columns]`.

    Returns:
        float64 for floats and bools, int64 or uint64 for integers, complex128 for complex numbers.

    Raises:
        ValueError: the window does not fit the array, or holds more than FINE values.
    """
    window = window.within(x.shape)
    count = math.prod(b - a for a, b in window.spans)
    if count > FINE:
        raise ValueError(f"At most {FINE} exact values can be read at once, not {count}.")
    starts, sizes = list(window.index), [1] * x.ndim
    for axis, (start, stop) in zip(window.axes, window.spans, strict=True):
        if axis is not None:
            starts[axis], sizes[axis] = start, stop - start
    if not count:
        host = np.zeros([b - a for a, b in window.spans], x.dtype)
    else:
        part = tiles.part(x, np.asarray(starts, np.int32), tuple(sizes))
        host = np.ascontiguousarray(to_tile_axes(part, window.axes))
    if host.dtype.kind == "c":
        return host.astype(np.complex128)
    if host.dtype.kind in "iu":
        return host.astype(np.uint64 if host.dtype == np.uint64 else np.int64)
    return host.astype(np.float64)


# ---------------------------------------------------------------------- norms


def norms(x: np.ndarray, axis: int) -> np.ndarray:
    """The Euclidean norms along an axis, float64. NaN and Inf carry over; complex numbers count by
    their magnitudes.
    """
    value = np.abs(x).astype(np.float64)
    size = value.max(axis=axis, keepdims=True, initial=0)
    scale = np.where((size > 0) & np.isfinite(size), size, 1)
    return np.sqrt(((value / scale) ** 2).sum(axis=axis)) * np.squeeze(scale, axis)
