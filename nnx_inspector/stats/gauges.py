"""What a gauge on the device sends, and what is read from it on the host.

A gauge is a short vector: a head for the whole array, then figures for some of its units. Rules
rest on it where a histogram of all values cannot tell: what each unit does over the batch.
Invariant: what was not measured is NaN, never a zero. Imports no jax; `gauging` makes the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

UNITS: Final = 64
"""Units that are looked at, evenly spaced among all."""
EXAMPLES: Final = 128
"""Examples (indices of the first axis) that are looked at, evenly spaced."""
POSITIONS: Final = 64
"""Positions (of the axes between) that are looked at, evenly spaced."""

TANH_FLAT: Final = 2.65
"""Beyond it tanh is within 1 % of its end and has 2 % of its slope: its gradient is lost."""
SIGMOID_FLAT: Final = 4.6
"""Likewise for the logistic function: within 1 % of 0 or 1, a slope of 0.01 (at most 0.25)."""

HEAD: Final = ("measured", "examples", "units", "looked", "rank", "positions", "limit", "reserved")
"""measured: 1 where all values that were looked at were finite. rank: participation ratio of
the covariance of the units. positions: values of a unit for each example that were looked at.
limit: log2 of the largest number of the dtype."""
PARTS: Final = ("low", "high", "mean", "std", "spread", "tanh", "sigmoid", "ends", "top")
"""For each unit: smallest, largest, mean, deviation over everything; deviation over the examples
at one position; then the part of values beyond TANH_FLAT and SIGMOID_FLAT in size, within 0.01 of
0 or 1, and of 1 or -1."""
LENGTH: Final = len(HEAD) + len(PARTS) * UNITS

SAMPLE: Final = 256
"""Elements of a parameter that are sent, evenly spaced along each axis."""
STATE_HEAD: Final = ("sum_low", "sum_high", "elements", "gradient", "graded")
"""The sum of all bit patterns modulo 2**32 in halves of 16 bits, which tells whether anything has
changed; how many elements follow; the norm of the gradient (NaN where there is none), and how
large a part of it is not 0."""
STATE_LENGTH: Final = len(STATE_HEAD) + SAMPLE

SITE_FIGURES: Final = (
    "examples", "units", "looked", "positions", "rank", "rms", "spread", "flat", "mean", "limit",
    "shifted", "scaled",
)  # fmt: skip
"""What a pass keeps of a site: counts; the participation ratio; root mean square; deviation over
the examples at one position (root mean square over units); the part of units that are constant over
the examples; largest size of a unit's mean in deviations of its own; log2 of the dtype's largest
number; for a BatchNorm the median distance of a unit's mean from its bias, and the median ratio of
its deviation to its scale."""
MASKS: Final = ("dead", "below", "tanh", "sigmoid", "ends", "top", "above")
"""Which units, one bit each: always exactly 0; never above 0; MOSTLY of their values
beyond TANH_FLAT, beyond SIGMOID_FLAT, near 0 or 1 (and within), near 1 or -1 (and within); always
above 0."""
BYTES: Final = UNITS // 8

MOSTLY: Final = 2 / 3
"""A unit is saturated where so many of its values are: what goes into a tanh has then a deviation
of 6 at least, six times that of what a layer under Glorot's initialisation returns."""

PARAMETER_FIGURES: Final = ("norm", "gradient", "graded", "change", "same", "decay")
"""What a pass keeps of a parameter: the root mean square of the sample; the gradient's norm and
the part of it that is not 0; root mean square of its change since the pass before, relative to
what it was then (NaN where that was 0); 1 where no bit changed; 1 where the change is the value
times one factor."""

VARIED: Final = "(what the model received)"
"""The name under which a watched pass says whether its arguments differ between examples."""

Vector = npt.NDArray[np.float32]


def head(vectors: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """One figure of the head of gauges `[..., LENGTH]`."""
    return vectors[..., HEAD.index(name)]


def units(vectors: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """One figure of every unit: `[..., UNITS]`, NaN where there is no such unit."""
    start = len(HEAD) + PARTS.index(name) * UNITS
    return vectors[..., start : start + UNITS]


def read(
    vectors: Sequence[npt.NDArray[Any]], scale: Any = None, bias: Any = None
) -> tuple[Vector, npt.NDArray[np.uint8]] | None:
    """The figures and masks of a site in one pass, from the gauges of all its calls.

    Args:
        vectors: each `[..., LENGTH]`, rows are further calls of the same site.
        scale, bias: of a BatchNorm, as `sampled` along its one axis; None for 1 and 0.

    Returns:
        float32[len(SITE_FIGURES)] and uint8[len(MASKS), BYTES]; None where nothing was measured.
    """
    rows = [np.asarray(v, np.float64).reshape(-1, LENGTH) for v in vectors]
    every = np.concatenate(rows) if rows else np.zeros((0, LENGTH))
    every = every[head(every, "measured") == 1]
    if not len(every):
        return None
    counts = {tuple(r) for r in every[:, [HEAD.index("units"), HEAD.index("looked")]]}
    if len(counts) > 1:  # calls of unlike shapes: the last stands for all
        every = every[-1:]
    of = lambda name: units(every, name)[:, : int(head(every, "looked")[0])]  # noqa: E731
    low, high = of("low").min(axis=0), of("high").max(axis=0)
    spread, mean, std = of("spread"), of("mean"), of("std")
    size = np.maximum(np.abs(of("low")), np.abs(of("high")))
    rms = float(np.sqrt(np.mean(mean**2 + std**2)))
    flat = (spread <= FLAT * size).all(axis=0)
    figures = dict.fromkeys(SITE_FIGURES, np.nan)
    for name in ("examples", "units", "looked", "positions", "limit"):
        figures[name] = float(head(every, name).max())
    rank = head(every, "rank")
    figures["rank"] = float(rank.max()) if np.isfinite(rank).any() else np.nan
    figures["rms"] = rms
    if figures["examples"] > 1:
        figures["spread"] = float(np.sqrt(np.mean(spread**2)))
        figures["flat"] = float(flat.mean())
        figures["mean"] = float(np.max(np.abs(mean) / np.maximum(std, 1e-30)))
    wanted = len(low)
    fits = all(x is None or len(x) == wanted for x in (scale, bias))
    if fits and (scale is not None or bias is not None):
        around = np.zeros(wanted) if bias is None else np.asarray(bias, np.float64)
        size_of = np.ones(wanted) if scale is None else np.abs(np.asarray(scale, np.float64))
        used = size_of > 1e-6
        if used.any():
            off = np.abs(mean.mean(axis=0) - around)[used] / size_of[used]
            wide = std.mean(axis=0)[used] / size_of[used]
            figures["shifted"], figures["scaled"] = float(np.median(off)), float(np.median(wide))
    within = (low >= -1) & (high <= 1)
    positive = (low >= 0) & (high <= 1)
    masks = {
        "dead": (low == 0) & (high == 0),
        "below": high <= 0,
        "tanh": (of("tanh") >= MOSTLY).all(axis=0),
        "sigmoid": (of("sigmoid") >= MOSTLY).all(axis=0),
        "ends": (of("ends") >= MOSTLY).all(axis=0) & positive,
        "top": (of("top") >= MOSTLY).all(axis=0) & within,
        "above": low > 0,
    }
    bits = np.zeros((len(MASKS), UNITS), bool)
    for number, name in enumerate(MASKS):
        bits[number, :wanted] = masks[name]
    with np.errstate(over="ignore"):  # of float32's largest numbers the root mean square is Inf
        row = np.array([figures[name] for name in SITE_FIGURES], np.float32)
    return row, np.packbits(bits, axis=1)


FLAT: Final = 1e-6
"""A unit is constant where its deviation over the examples is below this part of its size:
differences from the first example are exact, so rounding of one value to float32 is all there is
(2**-24)."""


def all_masks(masks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Masks as a recording keeps them; one that was saved before there was "above" lacks it."""
    missing = len(MASKS) - masks.shape[1]
    if masks.ndim == 3 and missing == 1:
        return np.pad(masks, ((0, 0), (0, missing), (0, 0)))
    return masks


def bits_of(masks: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.bool_]:
    """One mask as bool[..., UNITS]."""
    return np.unpackbits(masks[..., MASKS.index(name), :], axis=-1).astype(bool)


def sample_of(state: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The elements of a parameter that were sent."""
    flat = np.asarray(state, np.float64).reshape(-1)[:STATE_LENGTH]
    count = int(flat[STATE_HEAD.index("elements")])
    return flat[len(STATE_HEAD) : len(STATE_HEAD) + count]


def compared(state: npt.NDArray[Any], before: npt.NDArray[Any] | None) -> Vector:
    """The figures of a parameter in one pass, given what it was in the pass before.

    Args:
        state: `[STATE_LENGTH]`.
        before: likewise, or None.
    """
    now = sample_of(state)
    flat = np.asarray(state, np.float64).reshape(-1)[:STATE_LENGTH]
    found = dict.fromkeys(PARAMETER_FIGURES, np.nan)
    finite = bool(np.isfinite(now).all()) and len(now) > 0
    found["norm"] = float(np.sqrt(np.mean(now**2))) if finite else np.nan
    found["gradient"] = float(flat[STATE_HEAD.index("gradient")])
    found["graded"] = float(flat[STATE_HEAD.index("graded")])
    if before is not None:
        past, old = sample_of(before), np.asarray(before, np.float64).reshape(-1)[:STATE_LENGTH]
        sums = [STATE_HEAD.index(name) for name in ("sum_low", "sum_high")]
        found["same"] = float((flat[sums] == old[sums]).all() and np.array_equal(now, past))
        if finite and len(past) == len(now) and np.isfinite(past).all():
            change = now - past
            size = float(np.sqrt(np.mean(past**2)))
            if size > 0:
                found["change"] = float(np.sqrt(np.mean(change**2))) / size
            found["decay"] = float(_is_decay(past, change))
    return np.array([found[name] for name in PARAMETER_FIGURES], np.float32)


def _is_decay(past: npt.NDArray[np.float64], change: npt.NDArray[np.float64]) -> bool:
    """Whether a change is the value times one negative factor, to float32's rounding."""
    square = float((past**2).sum())
    if len(past) < 4 or square == 0:
        return False
    factor = float((past * change).sum()) / square
    if not factor < 0:
        return False
    rounding = 4 * 2**-24 * np.abs(past) + 1e-3 * abs(factor) * np.abs(past)
    return bool((np.abs(change - factor * past) <= rounding).all())
