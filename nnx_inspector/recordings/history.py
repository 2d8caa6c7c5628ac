"""Many summaries side by side: one quantity over the steps, as the screen and the plots draw it,
and all passes and metrics as tidy pandas frames.

Invariant: every number equals the one that the Summary itself gives. Imports no jax, and pandas
only for a frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from nnx_inspector.recordings.passes import UPDATE, Pass
from nnx_inspector.recordings.tree_rows import layer_of
from nnx_inspector.stats import table
from nnx_inspector.stats.bins import (
    Binned,
    histogram_edges,
    quantiles,
    ragged,
    rebin,
    spread_unseen,
    tabulate,
)
from nnx_inspector.stats.choices.rows import (
    choice_stat,
    is_expert,
)
from nnx_inspector.stats.encoding import Packed, Sparse, decode, decode_ranges
from nnx_inspector.stats.summary import STATISTICS
from nnx_inspector.typing import Float

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

HISTORY_QUANTILES: Final = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""The quantiles of each pass that a history keeps."""

HISTORY_BINS: Final = 48
"""The bins of each pass that a history keeps."""

_COUNTED: Final = ("size", "zeros", "nan", "posinf", "neginf", "seen")
_Floats = npt.NDArray[np.float64]
T = TypeVar("T")
_BATCH: Final = 256  # summaries unpacked at a time: some megabytes


class HistoryArrays(NamedTuple):
    """One site's quantity over the steps; in the order of its message's buffer.

    Attributes:
        steps: the step of each column, in the order of the passes.
        quantiles: at `HISTORY_QUANTILES`, in the values' unit.
        edges: ascending, even on a symmetric-log axis, in the values' unit.
        fractions: each row adds up to 1. A row is NaN, here and in `quantiles`, if
            nothing finite was measured or the counts are unknown (saturated).
    """

    steps: Float[np.ndarray, " step"]
    quantiles: Float[np.ndarray, "step 7"]
    edges: Float[np.ndarray, " 49"]
    fractions: Float[np.ndarray, "step 48"]


def evenly_spaced(of: Sequence[T], most: int) -> Sequence[T]:
    """At most so many of a sequence, evenly spaced, with the first and the last.

    Raises:
        ValueError: `most` is below 2.
    """
    if most < 2:
        raise ValueError(f"history needs at least 2 columns, got columns={most}.")
    if len(of) <= most:
        return of
    return [of[round(i * (len(of) - 1) / (most - 1))] for i in range(most)]


def history_of(
    steps: Sequence[int], blobs: Sequence[bytes], spanned: Sequence[bytes]
) -> HistoryArrays:
    """The history of encoded summaries, on an axis that spans the finite values of `spanned`.

    Values outside the axis are counted in its outermost intervals.
    """
    rows, kept = _binned(decode(Packed.of(blobs))), set(spanned)
    lows, highs = decode_ranges(Packed.of(spanned))
    some = np.isfinite(lows) & np.isfinite(highs)
    low, high = (lows[some].min(), highs[some].max()) if some.any() else (0.0, 0.0)
    counts = rows.counts[[blob in kept for blob in blobs]].sum(axis=0, keepdims=True)
    together = Binned(rows.bins, counts, np.array([low]), np.array([high]))
    anything = len(rows.bins) > 0
    edges = histogram_edges(ragged(together), HISTORY_BINS, "symlog")[0] if anything else _no_axis()
    total = rows.counts.sum(axis=1, keepdims=True)
    return HistoryArrays(
        steps=np.array(steps, np.float64),
        quantiles=quantiles(rows, np.array(HISTORY_QUANTILES)),
        edges=edges,
        fractions=rebin(ragged(rows), edges) / np.where(total > 0, total, np.nan),
    )


def _no_axis() -> _Floats:
    """An arbitrary axis, for a history without any finite value."""
    return np.linspace(0.0, 1.0, HISTORY_BINS + 1)


def _binned(found: Sparse) -> Binned:
    """The finite values of all summaries, one in each row. Saturated (unknown) rows are zeros."""
    low, high, many = found.low, found.high, len(found.kinds)
    bins, counts = tabulate(*spread_unseen(found.rows, found.bins, found.counts, low, high), many)
    counts[found.saturated] = 0.0
    return Binned(bins, counts, low, high)


def decoded_stats(blobs: Sequence[bytes]) -> Float[np.ndarray, "summary figure"]:
    """`STATISTICS` and the quantiles of each encoded summary; NaN for an unknown."""
    rows = [np.zeros((0, len(STATISTICS) + len(HISTORY_QUANTILES)))]
    for start in range(0, len(blobs), _BATCH):
        found = decode(Packed.of(blobs[start : start + _BATCH]))
        of_each = quantiles(_binned(found), np.array(HISTORY_QUANTILES))
        rows.append(np.concatenate([table.stats_of(found), of_each], axis=1))
    return np.concatenate(rows)


def passes_frame(
    passes: Sequence[Pass], *, layers: bool, seams: Sequence[int] = ()
) -> pd.DataFrame:
    """A row for each summary of these passes."""
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    chosen = [
        (p, key, p.packed.piece(at))
        for p in passes
        for at, key in enumerate(p.keys)
        if layers or layer_of(key[0]) is None
    ]
    heads = [(p.step, p.number, p.kind, p.perturbed, *key) for p, key, _ in chosen]
    figures = decoded_stats([blob for _, _, blob in chosen]).tolist()
    updates = [
        tuple(p.update_of(key[0]).values()) if key[1] == "parameter" else (np.nan,) * len(UPDATE)
        for p, key, _ in chosen
    ]
    rows = [(*h, *row, *update) for h, row, update in zip(heads, figures, updates, strict=True)]
    quantiles = [f"q{round(100 * q):02d}" for q in HISTORY_QUANTILES]
    heads_of = "step", "pass", "kind", "perturbed", "site", "quantity"
    names = (*heads_of, *STATISTICS, *quantiles, *UPDATE)
    types = dict.fromkeys(("step", "pass"), "int64") | {"perturbed": "bool"}
    types |= dict.fromkeys(_COUNTED, "Int64")
    types |= {n: "float64" for n in names[6:] if n not in _COUNTED}
    frame: Any = pd.DataFrame(rows, columns=list(names))
    frame = frame.astype(types)
    frame.attrs["seams"] = list(seams)
    return frame


def casts_frame(one: Pass | None) -> pd.DataFrame:
    """Rows for each summary of a pass: two for each dtype."""
    import pandas as pd

    columns = ["site", "quantity", "dtype", "scaled", "to_zero", "subnormal", "overflow"]
    if one is None:
        return pd.DataFrame(columns=columns)
    keys, found = one.keys, decode(one.packed)
    parts: list[Any] = []
    for name, cast in table.CASTS.items():
        for scaled in (False, True):
            shares: Any = pd.DataFrame(keys, columns=columns[:2])
            shares[columns[2:4]] = name, scaled
            shares[columns[4:]] = table.casts_of(found, cast, scaled=scaled)
            parts.append(shares)
    return pd.concat(parts, ignore_index=True)


def choices_frame(passes: Sequence[Pass], name: str, figures: Sequence[str]) -> pd.DataFrame:
    """A row for each head or expert of each of these passes; `name` says what they are called."""
    import pandas as pd

    rows = [
        (one.step, one.number, site, number, *row)
        for one in passes
        if one.figures is not None
        for site, own in one.figures.of_choices.items()
        if is_expert(site) == (name == "expert")
        for number, row in enumerate(np.stack([choice_stat(own, f) for f in figures], 1).tolist())
    ]
    frame: Any = pd.DataFrame(rows, columns=["step", "pass", "site", name, *figures])
    return frame.astype(dict.fromkeys(("step", "pass", name), "int64"))


def choices_over(
    passes: Sequence[Pass], key: str, figures: Sequence[str], *, columns: int = 300
) -> tuple[Float[np.ndarray, " step"], dict[str, Float[np.ndarray, "row step"]]]:
    """The heads or experts of one key: the steps, and each figure that is ever known over them, NaN
    where it is not finite.

    There are as many rows as in the newest pass, and at most so many columns.
    """
    found = [(one.step, one.figures.of_choices.get(key)) for one in passes if one.figures]
    known = [(step, rows) for step, rows in found if rows is not None]
    alike = evenly_spaced([one for one in known if len(one[1]) == len(known[-1][1])], columns)
    steps = np.array([step for step, _ in alike], np.float64)
    over = {
        name: np.array([choice_stat(rows, name) for _, rows in alike], np.float64).T
        for name in (figures if alike else ())
    }
    some = {name: np.where(np.isfinite(x), x, np.nan) for name, x in over.items()}
    return steps, {name: x for name, x in some.items() if not np.isnan(x).all()}


def metrics_frame(curves: Mapping[str, Float[np.ndarray, "point 2"]]) -> pd.DataFrame:
    """A row for each point."""
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    points = [(step, name, value) for name, curve in curves.items() for step, value in curve]
    frame: Any = pd.DataFrame(points, columns=["step", "name", "value"])
    return frame.astype({"step": "int64", "value": "float64"})
