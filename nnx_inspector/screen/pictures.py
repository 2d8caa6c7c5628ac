"""The pictures of a batch as small thumbnails: which argument holds them, and how they are shown.

Invariants: a picture is found by its shape and range, or named by the user, and a message says how
its numbers became grey or colour; the thumbnails of one message are bounded in number and bytes.
An array that is not a picture gives none; if it was named as one, a sentence says why.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from nnx_inspector.screen import protocol
from nnx_inspector.typing import Value

MOST_SIDE: Final = 96
"""The most pixels along a side of a thumbnail."""
MOST_BYTES: Final = 1 << 18
"""The most bytes of all thumbnails of a message."""
LEAST_SIDE: Final = 8
"""Fewer rows or columns are probably features or heads, unless the user says otherwise."""
LARGEST_PIXEL: Final = 256.0
"""A larger number is probably a mask of infinities, not a pixel, unless the user says otherwise."""
DEVICE_BYTES: Final = 32 << 20
"""More bytes are reduced on the device."""
NOT_FINITE: Final = (214, 39, 150)
"""The colour of a pixel that is NaN or Inf, as for all values on screen."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array among the arguments of a pass.

    Attributes:
        path: its path, such as "tokens" or "batch/ids".
        place: the position of its argument in the call, None for a keyword.
        embedded: whether it is looked up in an embedding; None if that is unknown.
        changed: the site of that embedding, if it may receive something else, such as a part.
    """

    path: str
    place: int | None
    value: Value
    embedded: bool | None = None
    changed: str = ""


def pictures_in(
    arguments: Sequence[Argument], *, named: str = "", most: int = 64
) -> tuple[protocol.Pictures | None, str]:
    """The pictures among some arrays, or None, and a sentence if what `images=` names is not one.

    `named` is what the user said, in words, "" to find pictures; `arguments` are then those named.
    """
    able = [
        (one, last)
        for one in arguments
        if (last := _channels_last(one.value, bool(named))) is not None
    ]
    able = [(one, last) for one, last in able if named or _has_pixels(_examples(one.value, 8))]
    if not able:
        if not named:
            return None, ""
        if not arguments:
            return None, f"This pass has no argument {named}."
        x = arguments[0].value
        return None, (
            f"{named} is {x.dtype}{list(x.shape)}, which holds no pictures: they are "
            f"[batch, height, width, channel], [batch, channel, height, width] or "
            f"[batch, height, width]."
        )
    one, last = able[0]
    more = f"; the first of {len(able)} arguments with pictures" if len(able) > 1 else ""
    return _thumbnails(one, channels_last=last, most=most, more=more), ""


def may_be_pictures(x: object) -> bool:
    """Whether the shape of an array is that of pictures; reads no number."""
    return _channels_last(x, named=False) is not None


def _channels_last(x: Value, named: bool) -> bool | None:
    """Whether channels are last in an array of pictures, or absent; None for another shape."""
    shape, dtype = tuple(x.shape), x.dtype  # a key's dtype is none of NumPy's
    is_number = getattr(dtype, "kind", "O") in "biuf" or "float" in dtype.name
    if len(shape) not in (3, 4) or 0 in shape or not is_number or not hasattr(x, "__array__"):
        return None
    if hasattr(x, "is_deleted") and x.is_deleted():
        return None  # donated to a step meanwhile
    if dtype.kind == "b" and not named:
        return None  # rather a mask of attention
    least = 2 if named else LEAST_SIDE
    if len(shape) == 3:
        short, long = sorted(shape[1:])
        return True if short >= max(least, 5) and (named or 2 * short >= long) else None
    if shape[3] in (1, 3, 4) and min(shape[1:3]) >= least:
        return True
    if shape[1] in (1, 3, 4) and min(shape[2:]) >= least:
        return False
    return shape[3] <= shape[1] if named else None


def _has_pixels(x: np.ndarray) -> bool:
    """Whether the numbers of an array can be pixels.

    Without an axis of channels they must be in [0, 1] or bytes; otherwise they are probably
    features.
    """
    finite = x[np.isfinite(x)]
    if not finite.size:
        return False
    low, high = float(finite.min()), float(finite.max())
    if x.dtype.kind in "iu":
        return low >= 0 and high < LARGEST_PIXEL and high > 1
    if x.ndim == 3:
        return low >= 0 and (high <= 1 or (high < LARGEST_PIXEL and bool((finite % 1 == 0).all())))
    return max(-low, high) <= LARGEST_PIXEL


def _examples(x: Value, most: int) -> np.ndarray:
    """The first examples, on the host, as numbers that NumPy computes with."""
    # a slice of an array on a device is a program of its own, so a small array comes whole
    if x.nbytes > DEVICE_BYTES and not isinstance(x, np.ndarray):
        from nnx_inspector._compat.sharding import take_index  # only an array of jax's needs jax

        x = take_index(x, slice(most))
    found = np.asarray(x)[:most]
    return found.astype(np.float32) if found.dtype.kind in "Vf" else found


def _thumbnails(one: Argument, *, channels_last: bool, most: int, more: str) -> protocol.Pictures:
    x = _examples(one.value, most)
    x = x[..., None] if x.ndim == 3 else x if channels_last else np.moveaxis(x, 1, -1)
    rows, columns, channels = x.shape[1:]
    shown = 3 if channels in (3, 4) else 1
    words = "" if channels in (1, 3) else f"channels 0 to 2 of {channels}"
    words = f"channel 0 of {channels}" if shown == 1 < channels else words
    numbers, of_range = _as_bytes(x[..., :shown])
    bad: npt.NDArray[np.bool_] = ~np.all(np.isfinite(x[..., :shown]), axis=-1)
    if bad.any():
        numbers = np.broadcast_to(numbers, (*numbers.shape[:-1], 3)).copy()
        numbers[bad] = NOT_FINITE
        many = int(bad.sum())
        of_range += f"; {many:,} pixel{' is' if many == 1 else 's are'} NaN or Inf"
    count = min(len(x), MOST_BYTES // max(1, 24 * 24 * numbers.shape[-1]))
    room = math.isqrt(MOST_BYTES // (count * numbers.shape[-1]))
    small = _downsampled(numbers[:count], min(MOST_SIDE, room), bad[:count])
    return protocol.Pictures(
        path=one.path,
        count=count,
        rows=rows,
        columns=columns,
        height=small.shape[1],
        width=small.shape[2],
        channels=small.shape[3],
        shown="; ".join(filter(None, [words, of_range])) + more,
        pixels=base64.b64encode(small.tobytes()).decode(),
    )


def _as_bytes(x: np.ndarray) -> tuple[npt.NDArray[np.uint8], str]:
    """Pixels as bytes, and the range of numbers that became 0 to 255, in words."""
    finite = np.isfinite(x)
    numbers = np.where(finite, x, 0).astype(np.float64)
    low = float(np.min(numbers, where=finite, initial=np.inf))
    high = float(np.max(numbers, where=finite, initial=-np.inf))
    if not finite.any():
        lows, highs, words = 0.0, 1.0, "no finite pixel"
    elif x.dtype.kind == "b" or (low >= 0 and high <= 1 and x.dtype.kind == "f"):
        lows, highs, words = 0.0, 1.0, "0 … 1"
    elif low >= 0 and high <= 255 and (x.dtype.kind in "iu" or bool((numbers % 1 == 0).all())):
        lows, highs, words = 0.0, 255.0, "0 … 255"
    elif low >= -1 and high <= 1:
        lows, highs, words = -1.0, 1.0, "−1 … 1"
    else:
        # pixels normalised by a mean and a deviation of each channel
        axes = tuple(range(x.ndim - 1))
        lows = np.min(numbers, axis=axes, where=finite, initial=high)
        highs = np.max(numbers, axis=axes, where=finite, initial=low)
        words = f"stretched from {low:.3g} … {high:.3g}".replace("-", "−")
    span = np.where(np.subtract(highs, lows) > 0, np.subtract(highs, lows), 1)
    if low == high:
        words = f"all {low:.3g}, {words}".replace("-", "−")
    return np.rint((numbers - lows) / span * 255).clip(0, 255).astype(np.uint8), words


def _downsampled(
    x: npt.NDArray[np.uint8], most: int, bad: npt.NDArray[np.bool_]
) -> npt.NDArray[np.uint8]:
    """Pictures of at most `most` pixels a side, each the mean of an equal block."""
    step = -(-max(x.shape[1:3]) // most)
    if step <= 1:
        return np.ascontiguousarray(x)
    starts = [np.arange(0, n, step) for n in x.shape[1:3]]
    sums, sizes = x.astype(np.float64), np.ones(x.shape[1:3])
    marked = bad.astype(np.float64)
    for axis in (0, 1):
        sums = np.add.reduceat(sums, starts[axis], axis=axis + 1)
        marked = np.add.reduceat(marked, starts[axis], axis=axis + 1)
        sizes = np.add.reduceat(sizes, starts[axis], axis=axis)
    small = np.rint(sums / sizes[None, :, :, None]).astype(np.uint8)
    small[marked > 0] = NOT_FINITE if x.shape[-1] == 3 else 0
    return small
