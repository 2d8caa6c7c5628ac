"""A window of an array as a message, in answer to the browser's request.

Invariant: a message holds at most MOST_BLOCKS blocks, whatever the request. Imports no jax.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from nnx_inspector.screen import protocol
from nnx_inspector.screen.values.blocks import (
    NUMPY_TILES,
    Tiles,
    Window,
    exact_values,
    reduce_blocks,
)
from nnx_inspector.typing import Value

MOST_BLOCKS = 1 << 17
"""The most blocks in one message; three planes of float32 are 1.5 MB."""
DOUBLES = (np.float64, np.complex128)
"""The dtypes whose values float32 cannot hold; integers of 32 bits and more come on top."""


def values_message(
    request: protocol.ReadValues, array: Value, tiles: Tiles = NUMPY_TILES
) -> tuple[protocol.Values, bytes]:
    """The answer to a request for an array that `tiles` reads."""
    window = _window(request)
    encoding: Literal["float32", "float64", "int64", "uint64"]
    if request.exact:
        values, block = exact_values(array, window, tiles), (1, 1, 1)
        starts, ends = zip(*window.within(array.shape).spans, strict=True)
        planes = {"value": values}
        if values.dtype == np.complex128:
            planes = {"real": np.real(values), "imag": np.imag(values)}
        encoding = next(iter(planes.values())).dtype.name  # pyright: ignore[reportAssignmentType]
    else:
        found = reduce_blocks(array, window, _limited(request.most), request.component, tiles)
        starts, ends, block = found.starts, found.ends, found.block
        figures = {
            "value" if found.exact else "mean": found.mean,
            "low": found.low, "high": found.high,
            "nan": found.nan, "posinf": found.posinf, "neginf": found.neginf,
        }  # fmt: skip
        planes = {name: of for name, of in figures.items() if of is not None}
        wide = array.dtype.itemsize >= 4 if array.dtype.kind in "iu" else array.dtype in DOUBLES
        encoding = "float64" if wide else "float32"
    message = protocol.Values(
        request=request.id,
        array=request.array,
        index=request.index,
        axes=request.axes,
        norm_over=request.norm_over,
        component=request.component,
        exact=request.exact,
        starts=starts,
        ends=ends,
        block=block,
        counts=next(iter(planes.values())).shape,
        planes=tuple(planes),
        encoding=encoding,
    )
    stored = np.dtype(encoding).newbyteorder("<")
    parts = [np.ascontiguousarray(plane, stored).tobytes() for plane in planes.values()]
    return message, b"".join(part + bytes(-len(part) % 8) for part in parts)


def _window(request: protocol.ReadValues) -> Window:
    of_three = (request.axes, request.starts, request.ends, request.most)
    if any(len(each) != 3 for each in of_three):
        raise ValueError("axes, starts, ends and most need three numbers: tiles, rows, columns.")
    tiles, rows, columns = (None if axis == -1 else axis for axis in request.axes)
    of_tiles, of_rows, of_columns = zip(request.starts, request.ends, strict=True)
    return Window(
        axes=(tiles, rows, columns), spans=(of_tiles, of_rows, of_columns), index=request.index
    )


def _limited(most: tuple[int, ...]) -> tuple[int, int, int]:
    """The requested numbers of blocks, limited to MOST_BLOCKS in all."""
    tiles, rows, columns = (min(max(1, n), MOST_BLOCKS) for n in most)
    columns = min(columns, 4096)
    rows = min(rows, max(1, MOST_BLOCKS // columns))
    return max(1, min(tiles, MOST_BLOCKS // (rows * columns))), rows, columns
