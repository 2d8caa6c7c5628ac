"""What a sample of a parameter holds, and the statistics of a parameter over the passes.

A sample is a short vector, a "state": a head for the whole array, then some of its elements. Rules
compare it with the one before, to see what an optimizer does. Invariant: what was not measured is
NaN, never a zero. Imports no jax; `sample_parameters` takes samples on the device.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

SAMPLE: Final = 256
"""Elements of a parameter that are sent, evenly spaced along each axis."""
STATE_HEAD: Final = (
    "sum_low", "sum_high", "elements", "reserved", "unused", "nan", "infinite",
)  # fmt: skip
"""The sum of all bit patterns modulo 2**32 in two halves, which shows any change; the number of
elements in the sample; two NaN; how many of all elements are NaN, and how many are infinite
(rounded from 2**24 on)."""
STATE_LENGTH: Final = len(STATE_HEAD) + SAMPLE


LOOP_STATS: Final = ("stuck", "larger", "differentiated")
"""Share of the sample that no pass of the loop has seen changed; the chance that such an element is
larger than one that did change (NaN unless there are both); 1 if the pass is differentiated with
respect to the parameter, even if no gradient comes back. Older recordings lack them."""
ID_STATS: Final = ("filled", "id", "distinct", "positions")
"""Of an embedding, what it receives in a requested pass: the share of the positions with the
commonest id; this id (NaN below 0); how many ids there are, and how many positions."""
NONFINITE_STATS: Final = ("nan", "infinite")
"""How many of all elements of a parameter are NaN, and how many are infinite. Older recordings lack
them."""
UPDATE_STATS: Final = ("update", "lost", "decayed", "clipped")
"""The norm of the change that the step made, relative to that of the value before: Inf if only that
was 0, NaN if no update was seen; of the elements to which something other than 0 was added, the
share that stayed what they were, because the dtype (of 16 bits) rounds that off; the norm of weight
decay, relative to that of what it is added to; the norm of what clipping takes from a gradient, or
from what is made of it, relative to that before. NaN if there are none, or if it is not known.
Older recordings lack the last ones, or all."""
PARAMETER_STATS: Final = (
    "norm", "gradient", "graded", "change", "same", "decay",
    *LOOP_STATS, *ID_STATS, *NONFINITE_STATS, *UPDATE_STATS,
)  # fmt: skip
"""What a pass keeps of a parameter: root mean square, of the sample if no more was measured; the
gradient's norm and nonzero share; of the sample, the root mean square of the change since the pass
before, relative to the former value (NaN if that was 0); 1 if no bit changed; 1 if the change is
the value times one factor; `LOOP_STATS`, `ID_STATS`, `NONFINITE_STATS`, `UPDATE_STATS`."""

IDS_PREFIX: Final = "(ids of) "
"""What comes before the path of an embedding's parameter for `ID_STATS`."""
EXAMPLES_VARY: Final = "(what the model received)"
"""The name under which a watched pass says whether its arguments differ between examples."""


def sampled_elements(state: np.ndarray) -> npt.NDArray[np.float64]:
    """The elements of a parameter that were sent."""
    flat = np.asarray(state, np.float64).reshape(-1)[:STATE_LENGTH]
    count = int(flat[STATE_HEAD.index("elements")])
    return flat[len(STATE_HEAD) : len(STATE_HEAD) + count]


def parameter_stats(states: np.ndarray, before: np.ndarray) -> npt.NDArray[np.float32]:
    """The statistics of parameters in one pass, float32[parameters, len(PARAMETER_STATS)].

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
            **{name: states[:, STATE_HEAD.index(name)] for name in NONFINITE_STATS},
        }
        unknown = np.full(len(states), np.nan)
        rows = np.stack([found.get(name, unknown) for name in PARAMETER_STATS], axis=1)
        return rows.astype(np.float32)


def parameter_stat(rows: np.ndarray, name: str) -> np.ndarray:
    """One figure of parameters, as a view of their rows."""
    return rows[:, PARAMETER_STATS.index(name)]


def probability_of_superiority(
    values: npt.NDArray[np.float64], still: npt.NDArray[np.bool_]
) -> float:
    """The chance that an element that is still is larger than one that is not; ties count half.

    Example:
        >>> still = np.array([False, True, False, True])
        >>> probability_of_superiority(np.array([1.0, -4.0, 2.0, 8.0]), still)
        1.0
    """
    sizes = np.abs(values)
    moved = np.sort(sizes[~still])
    if not len(moved) or not still.any():
        return np.nan
    below = [np.searchsorted(moved, sizes[still], side) for side in ("left", "right")]
    return float(np.mean(below) / len(moved))


def padded_parameter_stats(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Figures of parameters as a recording keeps them; older recordings lack the last ones."""
    missing = len(PARAMETER_STATS) - rows.shape[1]
    if (
        not 0
        < missing
        <= len(LOOP_STATS) + len(ID_STATS) + len(NONFINITE_STATS) + len(UPDATE_STATS)
    ):
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
