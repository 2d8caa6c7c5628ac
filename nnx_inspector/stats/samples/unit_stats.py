"""What a sample of units holds, and the statistics of a site that are made of it on the host.

A sample is a short vector: a head for the whole array, then statistics of at most 64 of its units.
Rules use it where a histogram of all values cannot help: for what each unit does over the batch.
Invariant: what was not measured is NaN, never a zero. Imports no jax; `sample_units` takes samples
on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

UNITS: Final = 64
"""The most units that are examined, evenly spaced among all."""
EXAMPLES: Final = 128
"""The most examples (indices of the first axis) that are examined, evenly spaced."""
POSITIONS: Final = 64
"""The most positions (of the axes between) that are examined, evenly spaced by an odd number."""

TANH_FLAT: Final = 2.65
"""Beyond it tanh is within 1 % of its limit and has 2 % of its slope, so the gradient is lost."""
SIGMOID_FLAT: Final = 4.6
"""The same for the logistic function: within 1 % of 0 or 1, a slope of 0.01 (at most 0.25)."""

HEAD: Final = ("measured", "examples", "units", "looked", "rank", "positions", "limit", "reserved")
"""measured: 1 if all examined values were finite. rank: the participation ratio of the units'
covariance. positions: examined values of a unit per example. limit: log2 of the dtype's maximum."""
PER_UNIT: Final = ("low", "high", "mean", "std", "spread", "tanh", "sigmoid", "ends", "top")
"""For each unit: minimum, maximum, mean, deviation over everything, deviation over the examples at
one position; the share of values beyond TANH_FLAT and SIGMOID_FLAT, near 0 or 1, near 1 or -1."""
LENGTH: Final = len(HEAD) + len(PER_UNIT) * UNITS


SITE_STATS: Final = (
    "examples", "units", "looked", "positions", "rank", "rms", "spread", "flat", "mean", "limit",
    "shifted", "scaled",
)  # fmt: skip
"""What a pass keeps of a site: counts; participation ratio; root mean square; deviation over the
examples at one position (root mean square over units); share of units constant over the examples;
largest ratio of a unit's mean to its deviation; log2 of the dtype's maximum; for a BatchNorm the
median distance of a unit's mean from its bias, and of its deviation from its scale as a ratio."""
OFF_AT: Final = {"relu": 0.0, "gelu": -5.0, "silu": -12.0}
"""Up to here an activation function lets nothing through: its value and slope are below 1e-4."""

MASKS: Final = ("dead", "below", "tanh", "sigmoid", "ends", "top", "above", "still")
"""Which units, one bit each: always exactly 0; never above 0; SATURATED_SHARE of their values
beyond TANH_FLAT, beyond SIGMOID_FLAT, near 0 or 1 (none outside), near 1 or -1 (none outside);
always > 0; a deviation over the examples below STILL_SHARE times the largest one of the examined
units. Older recordings lack the last two."""
MASK_BYTES: Final = UNITS // 8

SATURATED_SHARE: Final = 2 / 3
"""A unit with this share of saturated values is saturated. The input of a tanh then has a deviation
of 6 or more, six times that under Glorot's initialisation."""

STILL_SHARE: Final = 0.02
"""A unit with this part of another's deviation adds 1/2,500 as much to squared distances between
examples."""


def head_stat(vectors: np.ndarray, name: str) -> np.ndarray:
    """One statistic of the head of samples `[..., LENGTH]`."""
    return vectors[..., HEAD.index(name)]


def unit_stat(vectors: np.ndarray, name: str) -> np.ndarray:
    """One statistic of every unit: `[..., UNITS]`, NaN where there is no such unit."""
    start = len(HEAD) + PER_UNIT.index(name) * UNITS
    return vectors[..., start : start + UNITS]


@dataclasses.dataclass(frozen=True)
class UnitSamples:
    """The samples of all calls of one site in a pass.

    Attributes:
        vectors: each `[..., LENGTH]`; rows are further calls.
        scale, bias: of a BatchNorm, in a sample along its one axis; None for 1 and 0.
    """

    vectors: Sequence[np.ndarray]
    scale: Any = None
    bias: Any = None


def site_stats(
    sites: Sequence[UnitSamples],
) -> tuple[list[int], npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """The statistics and masks of sites in one pass, all at once.

    Returns:
        The numbers of the measured sites, float32[sites, SITE_STATS], and uint8[sites, MASKS,
        MASK_BYTES].
    """
    found = [[np.asarray(v).reshape(-1, LENGTH) for v in one.vectors] for one in sites]
    whole = np.concatenate([np.zeros((0, LENGTH)), *(v for of in found for v in of)])
    number = np.repeat(np.arange(len(sites)), [sum(map(len, of)) for of in found])
    used = head_stat(whole, "measured") == 1
    used &= _fit_last_call(whole, number, used)
    every, number = whole[used].astype(np.float64), number[used]
    start = np.flatnonzero(np.diff(number, prepend=-1))
    measured = number[start]
    if not len(measured):
        empty = (0, len(SITE_STATS)), (0, len(MASKS), MASK_BYTES)
        return [], np.zeros(empty[0], np.float32), np.zeros(empty[1], np.uint8)
    looked = head_stat(every, "looked")
    is_unit = np.arange(UNITS) < looked[:, None]

    def of(name: str) -> npt.NDArray[np.float64]:
        return np.where(is_unit, unit_stat(every, name), 0.0)

    def total(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, start, axis=0)

    def always(values: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        return np.logical_and.reduceat(values, start, axis=0)

    lows, highs, spread, mean, std = map(of, ("low", "high", "spread", "mean", "std"))
    low, high = np.minimum.reduceat(lows, start), np.maximum.reduceat(highs, start)
    flat = always((spread <= CONSTANT_BELOW * np.maximum(np.abs(lows), np.abs(highs))) | ~is_unit)
    rows, wanted = total(np.ones_like(looked)), looked[start]
    figures = {
        name: np.maximum.reduceat(head_stat(every, name), start)
        for name in ("examples", "units", "looked", "positions", "limit", "rank")
    }
    values = head_stat(every, "examples") * np.maximum(head_stat(every, "positions"), 1)
    lone = always(_is_one_outlier(lows, highs, mean, values[:, None]) | ~is_unit).all(axis=1)
    figures["rank"] = np.where(lone, np.nan, figures["rank"])
    with np.errstate(over="ignore"):  # the root mean square of huge float32 numbers is Inf
        figures["rms"] = np.sqrt(total((mean**2 + std**2).sum(axis=1)) / (rows * wanted))
        figures["spread"] = np.sqrt(total((spread**2).sum(axis=1)) / (rows * wanted))
    figures["flat"] = (flat & is_unit[start]).sum(axis=1) / wanted
    most = (np.abs(mean) / np.maximum(std, 1e-30)).max(axis=1)
    figures["mean"] = np.maximum.reduceat(most, start)
    for name in ("spread", "flat", "mean"):
        figures[name] = np.where(figures["examples"] > 1, figures[name], np.nan)
    figures["shifted"], figures["scaled"] = np.full((2, len(measured)), np.nan)
    for i, one in enumerate(measured):
        count, width = int(rows[i]), int(wanted[i])
        here = slice(start[i], start[i] + count), slice(width)
        affine = _batch_norm_stats(sites[one], mean[here], std[here])
        figures["shifted"][i], figures["scaled"][i] = affine
    positive, within = (low >= 0) & (high <= 1), (low >= -1) & (high <= 1)
    mostly = {
        name: always(of(name) >= SATURATED_SHARE) for name in ("tanh", "sigmoid", "ends", "top")
    }
    masks = {
        **mostly,
        "dead": (low == 0) & (high == 0),
        "below": high <= 0,
        "ends": mostly["ends"] & positive,
        "top": mostly["top"] & within,
        "above": low > 0,
        "still": always(spread < STILL_SHARE * spread.max(axis=1, keepdims=True)),
    }
    bits = np.stack([masks[name] & is_unit[start] for name in MASKS], axis=1)
    with np.errstate(over="ignore"):
        rows_of = np.stack([figures[name] for name in SITE_STATS], axis=1).astype(np.float32)
    return measured.tolist(), rows_of, np.packbits(bits, axis=2)


def _is_one_outlier(
    low: np.ndarray, high: np.ndarray, mean: np.ndarray, values: np.ndarray
) -> npt.NDArray[np.bool_]:
    """Whether all values of a unit but one are the same, or all are.

    The mean is then one n-th of the range away from an end; no other values are so near to it. So
    is what an expert returns that got one token of a batch: the rank of it says nothing.
    """
    range_of = high - low
    nearest = np.minimum(mean - low, high - mean)
    return nearest * values <= range_of * (1 + ROUNDING_OF_MEAN)


ROUNDING_OF_MEAN: Final = 1e-3
"""For the rounding of a mean in float32. With two values apart from the others, the mean is farther
from the end by the ratio of their distances from those: twice as far if both are alike."""


def _fit_last_call(
    every: np.ndarray, number: np.ndarray, used: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Which rows to use: if the calls of a site differ in shape, the last one stands for all."""
    counts = np.stack([head_stat(every, "units"), head_stat(every, "looked")], axis=1)
    out = np.ones(len(every), bool)
    for one in np.unique(number[used]):
        mine = np.flatnonzero(used & (number == one)) if (number == one).sum() > 1 else []
        if len(mine) > 1 and (counts[mine] != counts[mine[0]]).any():
            out[mine[:-1]] = False
    return out


def _batch_norm_stats(one: UnitSamples, mean: np.ndarray, std: np.ndarray) -> tuple[float, float]:
    """The statistics "shifted" and "scaled" of a BatchNorm; NaN for another module.

    Args:
        one: the site's calls.
        mean: of each unit, `[calls, units]`.
        std: its deviation, `[calls, units]`.
    """
    parts = [x for x in (one.scale, one.bias) if x is not None]
    if not parts or any(len(x) != mean.shape[1] for x in parts):
        return np.nan, np.nan
    mean, std = mean.mean(axis=0), std.mean(axis=0)
    around = 0.0 if one.bias is None else np.asarray(one.bias, np.float64)
    size = np.ones(len(mean)) if one.scale is None else np.abs(np.asarray(one.scale, np.float64))
    used = size > 1e-6
    if not used.any():
        return np.nan, np.nan
    off = np.abs(mean - around)[used] / size[used]
    return float(np.median(off)), float(np.median(std[used] / size[used]))


CONSTANT_BELOW: Final = 1e-6
"""A unit is constant where its deviation over the examples is below this part of its size:
differences from the first example are exact, so rounding of one value to float32 is all there is
(2**-24)."""


def padded_masks(masks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Masks as a recording keeps them; older recordings lack the last one or two."""
    missing = len(MASKS) - masks.shape[1]
    if masks.ndim == 3 and missing in (1, 2):
        return np.pad(masks, ((0, 0), (0, missing), (0, 0)))
    return masks


def unpack_mask(masks: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.bool_]:
    return np.unpackbits(masks[..., MASKS.index(name), :], axis=-1).astype(bool)
