"""`compare`: two runs, checkpoints or models, site by site, by the summaries of one pass of each.

Invariant: sites are aligned by name and quantity alone (layer 3 of a scanned stack is aligned with
layer 3 of an unrolled one); a site that only one side has is reported; an unknown figure is NaN.
Works on the host and without jax: a Record hands over its own summaries.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from nnx_inspector.recordings.passes import Pass
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.recordings.tree_rows import layer_of
from nnx_inspector.stats.bins import (
    MINUS_ZERO_BIN,
    RANK_OF_BIN,
    VALUE_ORDER,
    ZERO_BIN,
    clipped_edges,
)
from nnx_inspector.stats.summary import Summary

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

_Floats = npt.NDArray[np.float64]
_Summaries = Mapping[tuple[str, str], Summary]


@runtime_checkable
class HasSummaries(Protocol):
    """One pass that is not in a recording: a Record."""

    def merged(self) -> Mapping[str, Mapping[str, Summary]]:
        """The summaries of each site, by quantity."""
        ...


class Difference(NamedTuple):
    """One row of the frame of `compare`; `where` is its column "in"."""

    site: str
    quantity: str
    where: str
    total_variation: float
    quantile_distance: float
    mean_difference: float
    std_difference: float
    rms_difference: float
    nan_a: int | None
    nan_b: int | None


_COLUMNS: Final = tuple("in" if name == "where" else name for name in Difference._fields)


def compare(
    a: Recording | HasSummaries,
    b: Recording | HasSummaries,
    *,
    at: int | tuple[int | None, int | None] | None = None,
) -> pd.DataFrame:
    """Measure how far apart the activations and gradients of two runs are, farthest site first.

    One pass of each recording is compared: the newest unperturbed one, or the one at step `at`.
    Sites are aligned by their keys. If only one of the two has stacked layers, its layer
    `"blocks/attn[3]"` is aligned with `"blocks/3/attn"` of the other and named as in `a`. Each side
    has the positions that its own `where=` chose (`Recording.where`).

    Args:
        a: a Recording (of a run, or loaded from a file), or a Record of `capture`.
        b: the Recording or Record to compare with `a`.
        at: a step of both recordings, or a pair of steps; None for the newest. If a step has
            several passes, the newest unperturbed one is compared, or else the newest.

    Returns:
        A pandas frame with a row for each site and quantity, ordered by `total_variation`, then
        `quantile_distance`, largest first. Rows that only one side has come last. Columns:

        - `site`, `quantity`; `in`: "both", or "a" or "b" for a row that only that side has and
          that has no figures.
        - `total_variation`, 0 to 1: half the sum over all bins of `|p_a - p_b|`, where p is the
          fraction of the values in each of the 4080 log bins and of the bins for zeros, NaN, +Inf
          and -Inf. It is the fraction of the values that are distributed differently.
        - `quantile_distance`: the integral over u from 0 to 1 of `|Q_a(u) - Q_b(u)|`, where Q is
          the quantile function of the finite values (Wasserstein's distance of order 1: Vallender
          1974, "Calculation of the Wasserstein distance between probability distributions on the
          line"), with each bin spread evenly, divided by sqrt((std_a**2 + std_b**2) / 2). It
          differs from the distance of the values themselves by at most the mean width of their
          bins. Inf if both are constant and differ.
        - `mean_difference`, `std_difference`, `rms_difference`: b's figure minus a's, in the unit
          of the values; rms is the root mean square.
        - `nan_a`, `nan_b`: the number of NaNs.

    Raises:
        TypeError: `a` or `b` is neither a Recording nor a Record.
        ValueError: a recording has no such pass.

    Example:
        >>> from nnx_inspector.stats.summary import empty
        >>> recording = Recording()
        >>> recording.append(0, {"encoder": {"output": empty()}})
        >>> compare(recording, recording)["site"].tolist()
        ['encoder']
    """
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    steps = at if isinstance(at, tuple) else (at, at)
    of_a, of_b = _summaries(a, steps[0], "a"), _summaries(b, steps[1], "b")
    names = matching_names({site for site, _ in of_a}, {site for site, _ in of_b})
    of_b = {(names.get(site, site), quantity): one for (site, quantity), one in of_b.items()}
    rows = differences(of_a, of_b)
    types = {name: "float64" for name in _COLUMNS[3:8]} | dict.fromkeys(_COLUMNS[8:], "Int64")
    frame: Any = pd.DataFrame(rows, columns=list(_COLUMNS))
    return frame.astype(types)


def matching_names(a: Collection[str], b: Collection[str]) -> dict[str, str]:
    """Layer of `b` -> its name in `a`, for layers that are stacked in only one of the two."""
    names: dict[str, str] = {}
    for here, there, turned in ((a, b, False), (b, a, True)):
        for site in set(here) - set(there):
            found = [one for one in _unrolled(site) if one in there and one not in here]
            if len(found) == 1:
                names |= {site: found[0]} if turned else {found[0]: site}
    return names


def _unrolled(site: str) -> list[str]:
    """The possible names of a stacked layer in a model whose layers are separate modules."""
    layer = layer_of(site)
    if layer is None:
        return []
    parts = re.split(r"(?<!\\)/", layer[0])
    return ["/".join([*parts[:i], str(layer[1]), *parts[i:]]) for i in range(1, len(parts) + 1)]


def differences(a: _Summaries, b: _Summaries) -> list[Difference]:
    """The rows of `compare`, in its order, for the summaries of two passes."""
    rows = [
        Difference(*key, *_statistics(a.get(key), b.get(key))) for key in dict.fromkeys((*a, *b))
    ]
    return sorted(rows, key=_rank)


def _rank(row: Difference) -> tuple[float, ...]:
    """Sorts the farthest apart first, then unknown distances, then rows that one side lacks."""
    if row.where != "both":
        return (2.0, 2.0)
    figures = row.total_variation, row.quantile_distance
    return tuple(1.0 if math.isnan(figure) else -figure for figure in figures)


def _summaries(of: object, step: int | None, name: str) -> _Summaries:
    if isinstance(of, Recording):
        one = pass_of_run(of, step, name)
        return {(site, quantity): summary for site, quantity, summary in one.of_sites.items()}
    if not isinstance(of, HasSummaries):
        raise TypeError(
            f"compare takes two Recordings or Records, got {type(of).__name__} for {name}. Read a "
            "recording with nni.load, or restore a checkpoint and pass its weights."
        )
    found = of.merged()
    return {(site, q): summary for site, each in found.items() for q, summary in each.items()}


def pass_of_run(recording: Recording, step: int | None, name: str) -> Pass:
    """The pass of a recording to compare; see `compare`. Errors call the recording `name`.

    Raises:
        ValueError: there is no such pass.
    """
    passes = recording.passes
    clean = [p for p in passes if not p.perturbed]
    if step is not None:
        here = [p for p in passes if p.step == step]
        clean = [p for p in here if not p.perturbed] or here
    if clean:
        return clean[-1]
    if step is None:
        raise ValueError(
            f"Recording {name} has no unperturbed pass. Choose one of its .steps with at=: "
            f"{_last_steps(recording.steps)}."
        )
    near = sorted(dict.fromkeys(recording.steps), key=lambda s: abs(s - step))[:3]
    raise ValueError(
        f"Recording {name} has no pass at step {step}, or no longer has it. The closest steps are "
        f"{_last_steps(sorted(near))}."
    )


def _last_steps(steps: list[int]) -> str:
    return ", ".join(map(str, steps[-3:])) or "none: nothing was recorded"


def _statistics(a: Summary | None, b: Summary | None) -> tuple[Any, ...]:
    nan = float("nan")
    if a is None or b is None:
        counts = [None if one is None or one.saturated else one.nan for one in (a, b)]
        return ("a" if b is None else "b", *5 * (nan,), *counts)
    if a.saturated or b.saturated:  # its counts, and hence its figures, are unknown
        return ("both", *5 * (nan,), *(None if one.saturated else one.nan for one in (a, b)))
    unit = math.hypot(a.std, b.std) / math.sqrt(2.0)
    distance = _wasserstein(_distribution(a), _distribution(b))
    if distance != 0.0:
        distance = distance / unit if unit else math.copysign(math.inf, distance)
    differences = (b.mean - a.mean, b.std - a.std, _rms(b) - _rms(a))
    return ("both", _total_variation(a, b), distance, *differences, a.nan, b.nan)


def _rms(summary: Summary) -> float:
    return math.hypot(summary.mean, summary.std)


def _total_variation(a: Summary, b: Summary) -> float:
    if not a.size or not b.size:
        return 0.0 if a.size == b.size else math.nan
    fractions: list[_Floats] = []
    for one in (a, b):
        bins = one.whole_bins()
        bins[ZERO_BIN] += bins[MINUS_ZERO_BIN]  # the same number
        bins[MINUS_ZERO_BIN] = 0.0
        fractions.append(bins / bins.sum())
    return min(0.5 * float(np.abs(fractions[0] - fractions[1]).sum()), 1.0)


class _Distribution(NamedTuple):
    """Finite values, spread evenly over k ascending intervals; each array is [k]."""

    lower: _Floats
    upper: _Floats
    mass: _Floats


def _distribution(summary: Summary) -> _Distribution:
    bins = summary.whole_bins()
    used = np.flatnonzero((bins > 0) & (RANK_OF_BIN >= 0))
    ranks, where = np.unique(RANK_OF_BIN[used], return_inverse=True)
    mass = np.bincount(where, bins[used], len(ranks)).astype(np.float64)
    index = VALUE_ORDER[ranks]
    low, high = summary.min, summary.max
    if math.isnan(low):  # moments unknown
        low, high = -math.inf, math.inf
    lower, upper = clipped_edges(index, np.float64(low), np.float64(high))  # pyright: ignore[reportArgumentType]
    return _Distribution(lower, upper, mass / mass.sum() if len(mass) else mass)


def _wasserstein(a: _Distribution, b: _Distribution) -> float:
    """The exact integral of |F_a - F_b|: both are linear between neighbouring interval ends."""
    if not len(a.mass) or not len(b.mass):
        return 0.0 if len(a.mass) == len(b.mass) else math.nan
    grid = np.unique(np.concatenate([a.lower, a.upper, b.lower, b.upper]))
    first = _mass_below(a, grid[:-1], "right") - _mass_below(b, grid[:-1], "right")
    last = _mass_below(a, grid[1:], "left") - _mass_below(b, grid[1:], "left")
    both = np.abs(first) + np.abs(last)
    crossing = first * last < 0.0
    squares = np.where(crossing, first**2 + last**2, both**2)
    height = np.divide(squares, 2.0 * both, out=np.zeros_like(both), where=both > 0)
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sum(height * np.diff(grid), where=height > 0))


def _mass_below(of: _Distribution, x: _Floats, side: Literal["left", "right"]) -> _Floats:
    """The mass below each x, including the mass at x itself ("right") or not ("left")."""
    before = np.searchsorted(of.upper, x, side=side)
    reached = np.concatenate([[0.0], np.cumsum(of.mass)])[before]
    at = np.minimum(before, len(of.mass) - 1)
    width = of.upper[at] - of.lower[at]
    part = np.divide(x - of.lower[at], width, out=np.zeros_like(x), where=width > 0)
    inside = (before < len(of.mass)) & (x > of.lower[at])
    return np.where(inside, reached + of.mass[at] * np.clip(part, 0.0, 1.0), reached)
