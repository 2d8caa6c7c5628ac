"""The scalars and histograms of a pass, as trackers take them.

Invariant: each number is that of `Recording.to_frame`, each histogram that of `Summary.histogram`,
and what is not known is left out. Imports no jax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nnx_inspector.recordings.passes import Pass
from nnx_inspector.stats.choices.rows import ROUTER_ENTROPY, SHOWN, choice_stat, is_expert
from nnx_inspector.stats.encoding import decode
from nnx_inspector.stats.summary import STATISTICS
from nnx_inspector.stats.table import histograms_of, stats_of

GROUPS: Final = {
    "output": "outputs",
    "gradient": "gradients",
    "input": "inputs",
    "parameter": "parameters",
    "parameter_gradient": "parameter_gradients",
    "state": "states",
}
"""Quantity -> the group of its names, which is the first part of them."""
HEADS, EXPERTS = "heads", "experts"
"""The groups of heads and experts, which have numbers: `"heads/attn@attention/3/first"`."""
METRICS, FINDINGS, OWN_GROUP = "metrics", "findings", "nni"
"""The other groups: the user's metrics, findings, and what writing costs."""
NUMBERED: Final = {HEADS: "head", EXPERTS: "expert"}
ALL_GROUPS: Final = (*GROUPS.values(), HEADS, EXPERTS, METRICS, FINDINGS, OWN_GROUP)
ROOT: Final = "(root)"
"""How the model itself is called."""
BINS: Final = 64
STATISTICS_OF: Final = {
    "outputs": ("mean", "std", "max_abs", "zeros"),
    "gradients": ("norm", "std", "max_abs", "zeros"),
    "inputs": ("mean", "std", "max_abs", "zeros"),
    "parameters": ("mean", "std", "max_abs"),
    "parameter_gradients": ("norm", "std", "max_abs", "zeros"),
    "states": ("mean", "std", "max_abs", "zeros"),
}
"""What is written of a group, beside counts of NaN and Inf. A tracker takes longer to write one
number than we to compute all, so no two of them tell the same.
"""
_Floats = npt.NDArray[np.float64]


class Scalar(NamedTuple):
    """One number, by group, site (path of a parameter, name of a metric) and statistic; a metric
    has no statistic.
    """

    group: str
    site: str
    statistic: str
    value: float


class Histogram(NamedTuple):
    """The finite values of a site, parameter or gradient.

    Attributes:
        group, site: as in `Scalar`.
        edges: float64[65], even.
        counts: int64[64].
        low, high: the smallest and the largest value.
        total, squares: the sum of the values, and of their squares.
    """

    group: str
    site: str
    edges: _Floats
    counts: npt.NDArray[np.int64]
    low: float
    high: float
    total: float
    squares: float


class Entry(NamedTuple):
    """What a tracker gets at a step; `text` is a title and a text."""

    step: int
    scalars: Sequence[Scalar] = ()
    histograms: Sequence[Histogram] = ()
    text: tuple[str, str] | None = None


class PassReader:
    """Reads the passes of one recording."""

    def __init__(self) -> None:
        self._flawed: set[tuple[str, str]] = set()  # what has had a NaN or Inf

    def scalars(self, item: Pass) -> list[Scalar]:
        """The figures of a pass. Counts of NaN and Inf are there from the first one on."""
        table = stats_of(decode(item.packed))
        figure = {name: table[:, i] for i, name in enumerate(STATISTICS)}
        with np.errstate(invalid="ignore", divide="ignore"):
            columns = {name: figure[name] for name in ("mean", "std", "norm", "nan")} | {
                "max_abs": np.maximum(np.abs(figure["min"]), np.abs(figure["max"])),
                "zeros": figure["zeros"] / figure["size"],
                "inf": figure["posinf"] + figure["neginf"],
            }
        rows = np.stack([*columns.values()], axis=1).tolist()
        found: list[Scalar] = []
        for key, row in zip(item.keys, rows, strict=True):
            site, quantity = key
            group, at = GROUPS[quantity], site or ROOT
            of = dict(zip(columns, row, strict=True))
            if of["nan"] or of["inf"]:
                self._flawed.add(key)
            for name in (*STATISTICS_OF[group], *("nan", "inf") * (key in self._flawed)):
                if not math.isnan(of[name]):
                    found.append(Scalar(group, at, name, of[name]))
            if quantity == "parameter":
                seen = {name: x for name, x in item.update_of(site).items() if math.isfinite(x)}
                found += [Scalar(group, at, name, x) for name, x in seen.items()]
        return [*found, *_choice_scalars(item)]

    def histograms(self, item: Pass) -> list[Histogram]:
        """The histograms of a pass, of what has any finite value."""
        sparse = decode(item.packed)
        known, edges, counts = histograms_of(sparse, BINS)
        figures = stats_of(sparse)[known]
        mean, norm, low, high = (
            figures[:, STATISTICS.index(name)].tolist() for name in ("mean", "norm", "min", "max")
        )
        many = counts.sum(axis=1).tolist()
        found: list[Histogram] = []
        for i, row in enumerate(known.tolist()):
            site, quantity = item.keys[row]
            moments = (low[i], high[i], mean[i] * many[i], norm[i] ** 2)
            if all(map(math.isfinite, moments)):
                where = GROUPS[quantity], site or ROOT
                found.append(Histogram(*where, edges[i], counts[i], *moments))
        return found


def _choice_scalars(item: Pass) -> Iterator[Scalar]:
    """The figures of each head and expert, and the entropy of each router."""
    for key, rows in (item.figures.of_choices if item.figures else {}).items():
        group = EXPERTS if is_expert(key) else HEADS
        for name in SHOWN[is_expert(key)]:
            values = choice_stat(rows, name).tolist()
            of_router = group == EXPERTS and name == "evenness"
            for number, value in enumerate(values[:1] if of_router else values):
                if math.isfinite(value):
                    at = (key, ROUTER_ENTROPY) if of_router else (f"{key}/{number}", name)
                    yield Scalar(group, *at, value)
