"""What a gauge on the device sends, and what is read from it on the host.

A gauge is a short vector: a head for the whole array, then figures for some of its units. Rules
use it where a histogram of all values cannot help: for what each unit does over the batch.
Invariant: what was not measured is NaN, never a zero. Imports no jax; `measure_gauges` does.
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
PARTS: Final = ("low", "high", "mean", "std", "spread", "tanh", "sigmoid", "ends", "top")
"""For each unit: minimum, maximum, mean, deviation over everything, deviation over the examples at
one position; the share of values beyond TANH_FLAT and SIGMOID_FLAT, near 0 or 1, near 1 or -1."""
LENGTH: Final = len(HEAD) + len(PARTS) * UNITS

SAMPLE: Final = 256
"""Elements of a parameter that are sent, evenly spaced along each axis."""
STATE_HEAD: Final = (
    "sum_low", "sum_high", "elements", "reserved", "unused", "nan", "infinite",
)  # fmt: skip
"""The sum of all bit patterns modulo 2**32 in two halves, which shows any change; the number of
elements in the sample; two NaN; how many of all elements are NaN, and how many are infinite
(rounded from 2**24 on)."""
STATE_LENGTH: Final = len(STATE_HEAD) + SAMPLE

SITE_FIGURES: Final = (
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
"""Which units, one bit each: always exactly 0; never above 0; MOSTLY of their values beyond
TANH_FLAT, beyond SIGMOID_FLAT, near 0 or 1 (none outside), near 1 or -1 (none outside); always >
0; a deviation over the examples below HARDLY times the largest one of the examined units. Older
recordings lack the last two."""
BYTES: Final = UNITS // 8

MOSTLY: Final = 2 / 3
"""A unit with this share of saturated values is saturated. The input of a tanh then has a deviation
of 6 or more, six times that under Glorot's initialisation."""

HARDLY: Final = 0.02
"""A unit with this part of another's deviation adds 1/2,500 as much to squared distances between
examples."""

OF_LOOP: Final = ("stuck", "larger", "differentiated")
"""Share of the sample that no pass of the loop has seen changed; the chance that such an element is
larger than one that did change (NaN unless there are both); 1 if the pass is differentiated with
respect to the parameter, even if no gradient comes back. Older recordings lack them."""
OF_IDS: Final = ("filled", "id", "distinct", "positions")
"""Of an embedding, what it receives in a requested pass: the share of the positions with the
commonest id; this id (NaN below 0); how many ids there are, and how many positions."""
COUNTED: Final = ("nan", "infinite")
"""How many of all elements of a parameter are NaN, and how many are infinite. Older recordings lack
them."""
OF_UPDATE: Final = ("update", "lost", "decayed", "clipped")
"""The norm of the change that the step made, relative to that of the value before: Inf if only that
was 0, NaN if no update was seen; of the elements to which something other than 0 was added, the
share that stayed what they were, because the dtype (of 16 bits) rounds that off; the norm of weight
decay, relative to that of what it is added to; the norm of what clipping takes from a gradient, or
from what is made of it, relative to that before. NaN if there are none, or if it is not known.
Older recordings lack the last ones, or all."""
PARAMETER_FIGURES: Final = (
    "norm", "gradient", "graded", "change", "same", "decay", *OF_LOOP, *OF_IDS, *COUNTED,
    *OF_UPDATE,
)  # fmt: skip
"""What a pass keeps of a parameter: root mean square, of the sample if no more was measured; the
gradient's norm and nonzero share; of the sample, the root mean square of the change since the pass
before, relative to the former value (NaN if that was 0); 1 if no bit changed; 1 if the change is
the value times one factor; `OF_LOOP`, `OF_IDS`, `COUNTED`, `OF_UPDATE`."""

IDS: Final = "(ids of) "
"""What comes before the path of an embedding's parameter for `OF_IDS`."""
VARIED: Final = "(what the model received)"
"""The name under which a watched pass says whether its arguments differ between examples."""


def head(vectors: np.ndarray, name: str) -> np.ndarray:
    """One figure of the head of gauges `[..., LENGTH]`."""
    return vectors[..., HEAD.index(name)]


def units(vectors: np.ndarray, name: str) -> np.ndarray:
    """One figure of every unit: `[..., UNITS]`, NaN where there is no such unit."""
    start = len(HEAD) + PARTS.index(name) * UNITS
    return vectors[..., start : start + UNITS]


@dataclasses.dataclass(frozen=True)
class Calls:
    """The gauges of all calls of one site in a pass.

    Attributes:
        vectors: each `[..., LENGTH]`; rows are further calls.
        scale, bias: of a BatchNorm, as `sampled` along its one axis; None for 1 and 0.
    """

    vectors: Sequence[np.ndarray]
    scale: Any = None
    bias: Any = None


def read(
    sites: Sequence[Calls],
) -> tuple[list[int], npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """The figures and masks of sites in one pass, all at once.

    Returns:
        The numbers of the measured sites, float32[sites, SITE_FIGURES], and uint8[sites, MASKS,
        BYTES].
    """
    found = [[np.asarray(v).reshape(-1, LENGTH) for v in one.vectors] for one in sites]
    whole = np.concatenate([np.zeros((0, LENGTH)), *(v for of in found for v in of)])
    number = np.repeat(np.arange(len(sites)), [sum(map(len, of)) for of in found])
    used = head(whole, "measured") == 1
    used &= _alike(whole, number, used)
    every, number = whole[used].astype(np.float64), number[used]
    start = np.flatnonzero(np.diff(number, prepend=-1))
    measured = number[start]
    if not len(measured):
        empty = (0, len(SITE_FIGURES)), (0, len(MASKS), BYTES)
        return [], np.zeros(empty[0], np.float32), np.zeros(empty[1], np.uint8)
    looked = head(every, "looked")
    is_unit = np.arange(UNITS) < looked[:, None]

    def of(name: str) -> npt.NDArray[np.float64]:
        return np.where(is_unit, units(every, name), 0.0)

    def total(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, start, axis=0)

    def always(values: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        return np.logical_and.reduceat(values, start, axis=0)

    lows, highs, spread, mean, std = map(of, ("low", "high", "spread", "mean", "std"))
    low, high = np.minimum.reduceat(lows, start), np.maximum.reduceat(highs, start)
    flat = always((spread <= FLAT * np.maximum(np.abs(lows), np.abs(highs))) | ~is_unit)
    rows, wanted = total(np.ones_like(looked)), looked[start]
    figures = {
        name: np.maximum.reduceat(head(every, name), start)
        for name in ("examples", "units", "looked", "positions", "limit", "rank")
    }
    values = head(every, "examples") * np.maximum(head(every, "positions"), 1)
    lone = always(_is_lone(lows, highs, mean, values[:, None]) | ~is_unit).all(axis=1)
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
        affine = _from_affine(sites[one], mean[here], std[here])
        figures["shifted"][i], figures["scaled"][i] = affine
    positive, within = (low >= 0) & (high <= 1), (low >= -1) & (high <= 1)
    mostly = {name: always(of(name) >= MOSTLY) for name in ("tanh", "sigmoid", "ends", "top")}
    masks = {
        **mostly,
        "dead": (low == 0) & (high == 0),
        "below": high <= 0,
        "ends": mostly["ends"] & positive,
        "top": mostly["top"] & within,
        "above": low > 0,
        "still": always(spread < HARDLY * spread.max(axis=1, keepdims=True)),
    }
    bits = np.stack([masks[name] & is_unit[start] for name in MASKS], axis=1)
    with np.errstate(over="ignore"):
        rows_of = np.stack([figures[name] for name in SITE_FIGURES], axis=1).astype(np.float32)
    return measured.tolist(), rows_of, np.packbits(bits, axis=2)


def _is_lone(
    low: np.ndarray, high: np.ndarray, mean: np.ndarray, values: np.ndarray
) -> npt.NDArray[np.bool_]:
    """Whether all values of a unit but one are the same, or all are.

    The mean is then one n-th of the range away from an end; no other values are so near to it. So
    is what an expert returns that got one token of a batch: the rank of it says nothing.
    """
    range_of = high - low
    nearest = np.minimum(mean - low, high - mean)
    return nearest * values <= range_of * (1 + LONE)


LONE: Final = 1e-3
"""For the rounding of a mean in float32. With two values apart from the others, the mean is farther
from the end by the ratio of their distances from those: twice as far if both are alike."""


def _alike(
    every: np.ndarray, number: np.ndarray, used: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Which rows count: if the calls of a site differ in shape, the last one stands for all."""
    counts = np.stack([head(every, "units"), head(every, "looked")], axis=1)
    out = np.ones(len(every), bool)
    for one in np.unique(number[used]):
        mine = np.flatnonzero(used & (number == one)) if (number == one).sum() > 1 else []
        if len(mine) > 1 and (counts[mine] != counts[mine[0]]).any():
            out[mine[:-1]] = False
    return out


def _from_affine(one: Calls, mean: np.ndarray, std: np.ndarray) -> tuple[float, float]:
    """The figures "shifted" and "scaled" of a BatchNorm; NaN for another module.

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


FLAT: Final = 1e-6
"""A unit is constant where its deviation over the examples is below this part of its size:
differences from the first example are exact, so rounding of one value to float32 is all there is
(2**-24)."""


def all_masks(masks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Masks as a recording keeps them; older recordings lack the last one or two."""
    missing = len(MASKS) - masks.shape[1]
    if masks.ndim == 3 and missing in (1, 2):
        return np.pad(masks, ((0, 0), (0, missing), (0, 0)))
    return masks


def bits_of(masks: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.bool_]:
    return np.unpackbits(masks[..., MASKS.index(name), :], axis=-1).astype(bool)


def sample_of(state: np.ndarray) -> npt.NDArray[np.float64]:
    """The elements of a parameter that were sent."""
    flat = np.asarray(state, np.float64).reshape(-1)[:STATE_LENGTH]
    count = int(flat[STATE_HEAD.index("elements")])
    return flat[len(STATE_HEAD) : len(STATE_HEAD) + count]


def compared(states: np.ndarray, before: np.ndarray) -> npt.NDArray[np.float32]:
    """The figures of parameters in one pass, float32[parameters, len(PARAMETER_FIGURES)].

    Both arguments are `[parameters, STATE_LENGTH]`; a row of NaN in `before` has no earlier state.
    """
    states, before = np.asarray(states, np.float64), np.asarray(before, np.float64)
    elements, first = STATE_HEAD.index("elements"), len(STATE_HEAD)
    count, known = states[:, elements], ~np.isnan(before[:, elements])
    sent = np.arange(SAMPLE) < count[:, None]
    now, past = (np.where(sent, x[:, first:STATE_LENGTH], 0.0) for x in (states, before))
    finite = np.isfinite(now).all(axis=1) & (count > 0)
    follows = known & finite & (before[:, elements] == count) & np.isfinite(past).all(axis=1)
    same = (states[:, :elements] == before[:, :elements]).all(axis=1)
    same &= (before[:, elements] == count) & (now == past).all(axis=1)
    n = np.maximum(count, 1)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        change = now - past
        size = np.sqrt((past**2).sum(axis=1) / n)
        moved = np.sqrt((change**2).sum(axis=1) / n) / size
        found = {
            "norm": np.where(finite, np.sqrt((now**2).sum(axis=1) / n), np.nan),
            "change": np.where(follows & (size > 0), moved, np.nan),
            "same": np.where(known, same, np.nan),
            "decay": np.where(follows, _is_decay(past, change, count), np.nan),
            **{name: states[:, STATE_HEAD.index(name)] for name in COUNTED},
        }
        unknown = np.full(len(states), np.nan)
        rows = np.stack([found.get(name, unknown) for name in PARAMETER_FIGURES], axis=1)
        return rows.astype(np.float32)


def figure_of(rows: np.ndarray, name: str) -> np.ndarray:
    """One figure of parameters, as a view of their rows."""
    return rows[:, PARAMETER_FIGURES.index(name)]


def part_larger(values: npt.NDArray[np.float64], still: npt.NDArray[np.bool_]) -> float:
    """The chance that an element that is still is larger than one that is not; ties count half.

    Example:
        >>> part_larger(np.array([1.0, -4.0, 2.0, 8.0]), np.array([False, True, False, True]))
        1.0
    """
    sizes = np.abs(values)
    moved = np.sort(sizes[~still])
    if not len(moved) or not still.any():
        return np.nan
    below = [np.searchsorted(moved, sizes[still], side) for side in ("left", "right")]
    return float(np.mean(below) / len(moved))


def all_parameter_figures(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Figures of parameters as a recording keeps them; older recordings lack the last ones."""
    missing = len(PARAMETER_FIGURES) - rows.shape[1]
    if not 0 < missing <= len(OF_LOOP) + len(OF_IDS) + len(COUNTED) + len(OF_UPDATE):
        return rows
    return np.pad(rows, ((0, 0), (0, missing)), constant_values=np.nan)


def _is_decay(past: np.ndarray, change: np.ndarray, count: np.ndarray) -> npt.NDArray[np.bool_]:
    """Whether a change is the value times one negative factor, to float32's rounding."""
    square = (past**2).sum(axis=1)
    factor = (past * change).sum(axis=1) / np.where(square > 0, square, 1.0)
    size = np.abs(past)
    rounding = 4 * 2**-24 * size + 1e-3 * np.abs(factor)[:, None] * size
    fits = (np.abs(change - factor[:, None] * past) <= rounding).all(axis=1)
    return fits & (factor < 0) & (square > 0) & (count >= 4)
