"""A window of an array as a message, in answer to the browser's request.

Invariant: a message holds at most MOST_BLOCKS blocks, whatever the request. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nnx_inspector.screen import protocol
from nnx_inspector.screen.values.blocks import HERE, Tiles, Window, exact_values, reduce_blocks

MOST_BLOCKS = 1 << 17
"""The most blocks in one message; three planes of float32 are 1.5 MB."""
WIDE = (np.float64, np.complex128)
"""The dtypes whose values float32 cannot hold; integers of 32 bits and more come on top."""


def window_of(
    request: protocol.ReadValues, array: Any, tiles: Tiles = HERE
) -> tuple[protocol.Values, bytes]:
    """The answer to a request for an array that `tiles` reads."""
    window = _window(request)
    if request.exact:
        return _exact(request, array, window, tiles)
    most = _bounded(request.most)
    found = reduce_blocks(array, window, most, request.component, tiles)
    wide = array.dtype.itemsize >= 4 if array.dtype.kind in "iu" else array.dtype in WIDE
    encoding = "float64" if wide else "float32"
    if found.exact:
        planes = {"value": found.mean}
    else:
        planes = {"mean": found.mean, "low": found.low, "high": found.high}
        counts = {"nan": found.nan, "posinf": found.posinf, "neginf": found.neginf}
        planes |= {name: of for name, of in counts.items() if of is not None}
    message = _message(
        request,
        starts=found.starts,
        ends=found.ends,
        block=found.block,
        counts=found.mean.shape,
        planes=tuple(planes),
        encoding=encoding,
    )
    return message, _buffer(list(planes.values()), encoding)


def _window(request: protocol.ReadValues) -> Window:
    of_three = (request.axes, request.starts, request.ends, request.most)
    if any(len(each) != 3 for each in of_three):
        raise ValueError("axes, starts, ends and most need three numbers: tiles, rows, columns.")
    axes: Any = tuple(None if axis == -1 else axis for axis in request.axes)
    spans: Any = tuple(zip(request.starts, request.ends, strict=True))
    return Window(axes=axes, spans=spans, index=request.index)


def _bounded(most: tuple[int, ...]) -> tuple[int, int, int]:
    """The requested numbers of blocks, limited to MOST_BLOCKS in all."""
    tiles, rows, columns = (min(max(1, n), MOST_BLOCKS) for n in most)
    columns = min(columns, 4096)
    rows = min(rows, max(1, MOST_BLOCKS // columns))
    return max(1, min(tiles, MOST_BLOCKS // (rows * columns))), rows, columns


def _exact(
    request: protocol.ReadValues, array: Any, window: Window, tiles: Tiles
) -> tuple[protocol.Values, bytes]:
    found = exact_values(array, window, tiles)
    starts, ends = zip(*window.within(array.shape).spans, strict=True)
    planes, encoding = {"value": found}, found.dtype.name
    if found.dtype == np.complex128:
        planes, encoding = {"real": np.real(found), "imag": np.imag(found)}, "float64"
    message = _message(
        request,
        starts=starts,
        ends=ends,
        block=(1, 1, 1),
        counts=found.shape,
        planes=tuple(planes),
        encoding=encoding,
    )
    return message, _buffer(list(planes.values()), encoding)


def _message(request: protocol.ReadValues, **fields: Any) -> protocol.Values:
    return protocol.Values(
        request=request.id,
        array=request.array,
        index=request.index,
        axes=request.axes,
        norm_over=request.norm_over,
        component=request.component,
        exact=request.exact,
        **fields,
    )


def _buffer(planes: Sequence[np.ndarray], encoding: str) -> bytes:
    """The buffer of a `Values`."""
    dtypes = {"float32": "<f4", "float64": "<f8", "int64": "<i8", "uint64": "<u8"}
    parts = [np.ascontiguousarray(p, dtypes[encoding]).tobytes() for p in planes]
    return b"".join(part + bytes(-len(part) % 8) for part in parts)
