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

from nnx_inspector.recordings.layers import STATE, layer_of
from nnx_inspector.recordings.passes import Pass, Quantity
from nnx_inspector.stats import table
from nnx_inspector.stats.bins import (
    Binned,
    axes,
    quantiles,
    ragged,
    rebinned,
    spread,
    tabulated,
)
from nnx_inspector.stats.choices.rows import (
    EXPERT_FIGURES,
    HEAD_FIGURES,
    choice_figure,
    is_expert,
)
from nnx_inspector.stats.encoding import Packed, Sparse, decoded, ranges
from nnx_inspector.stats.summary import STATISTICS, Summary

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
        steps: float64[T], the step of each column, in the order of the passes.
        quantiles: float64[T, 7], at `HISTORY_QUANTILES`, in the values' unit.
        edges: float64[49], ascending, even on a symmetric-log axis, in the values' unit.
        fractions: float64[T, 48]; each row adds up to 1. A row is NaN, here and in `quantiles`, if
            nothing finite was measured or the counts are unknown (saturated).
    """

    steps: _Floats
    quantiles: _Floats
    edges: _Floats
    fractions: _Floats


def evenly(of: Sequence[T], most: int) -> Sequence[T]:
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
    rows, kept = _binned(decoded(Packed.of(blobs))), set(spanned)
    lows, highs = ranges(Packed.of(spanned))
    some = np.isfinite(lows) & np.isfinite(highs)
    low, high = (lows[some].min(), highs[some].max()) if some.any() else (0.0, 0.0)
    counts = rows.counts[[blob in kept for blob in blobs]].sum(axis=0, keepdims=True)
    together = Binned(rows.bins, counts, np.array([low]), np.array([high]))
    anything = len(rows.bins) > 0
    edges = axes(ragged(together), HISTORY_BINS, "symlog")[0] if anything else _no_axis()
    total = rows.counts.sum(axis=1, keepdims=True)
    return HistoryArrays(
        steps=np.array(steps, np.float64),
        quantiles=quantiles(rows, np.array(HISTORY_QUANTILES)),
        edges=edges,
        fractions=rebinned(ragged(rows), edges) / np.where(total > 0, total, np.nan),
    )


def _no_axis() -> _Floats:
    """An arbitrary axis, for a history without any finite value."""
    return np.linspace(0.0, 1.0, HISTORY_BINS + 1)


def _binned(found: Sparse) -> Binned:
    """The finite values of all summaries, one in each row. Saturated (unknown) rows are zeros."""
    low, high, many = found.low, found.high, len(found.kinds)
    bins, counts = tabulated(*spread(found.rows, found.bins, found.counts, low, high), many)
    counts[found.saturated] = 0.0
    return Binned(bins, counts, low, high)


def figures_of(blobs: Sequence[bytes]) -> _Floats:
    """`STATISTICS` and the quantiles of each encoded summary; NaN for an unknown."""
    rows = [np.zeros((0, len(STATISTICS) + len(HISTORY_QUANTILES)))]
    for start in range(0, len(blobs), _BATCH):
        found = decoded(Packed.of(blobs[start : start + _BATCH]))
        of_each = quantiles(_binned(found), np.array(HISTORY_QUANTILES))
        rows.append(np.concatenate([table.figures_of(found), of_each], axis=1))
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
    figures = figures_of([blob for _, _, blob in chosen]).tolist()
    updates = [
        (p.update_ratio(key[0]), p.update_lost(key[0])) if key[1] == "parameter" else (np.nan,) * 2
        for p, key, _ in chosen
    ]
    rows = [(*h, *row, *update) for h, row, update in zip(heads, figures, updates, strict=True)]
    quantiles = [f"q{round(100 * q):02d}" for q in HISTORY_QUANTILES]
    heads_of = "step", "pass", "kind", "perturbed", "site", "quantity"
    names = (*heads_of, *STATISTICS, *quantiles, "update_ratio", "update_lost")
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
    keys, found = one.keys, decoded(one.packed)
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
        for number, row in enumerate(np.stack([choice_figure(own, f) for f in figures], 1).tolist())
    ]
    frame: Any = pd.DataFrame(rows, columns=["step", "pass", "site", name, *figures])
    return frame.astype(dict.fromkeys(("step", "pass", name), "int64"))


def choices_over(
    passes: Sequence[Pass], key: str, figures: Sequence[str], *, columns: int = 300
) -> tuple[_Floats, dict[str, _Floats]]:
    """The heads or experts of one key over the steps: float64[steps], and of each figure that is
    ever known float64[rows, steps], NaN where it is not finite.

    There are as many rows as in the newest pass, and at most so many columns.
    """
    found = [(one.step, one.figures.of_choices.get(key)) for one in passes if one.figures]
    known = [(step, rows) for step, rows in found if rows is not None]
    alike = evenly([one for one in known if len(one[1]) == len(known[-1][1])], columns)
    steps = np.array([step for step, _ in alike], np.float64)
    over = {
        name: np.array([choice_figure(rows, name) for _, rows in alike], np.float64).T
        for name in (figures if alike else ())
    }
    some = {name: np.where(np.isfinite(x), x, np.nan) for name, x in over.items()}
    return steps, {name: x for name, x in some.items() if not np.isnan(x).all()}


def table_frame(columns: Mapping[str, npt.NDArray[Any]]) -> pd.DataFrame:
    """A table as a pandas frame."""
    import pandas as pd

    return pd.DataFrame(dict(columns))


def metrics_frame(curves: Mapping[str, npt.NDArray[np.float64]]) -> pd.DataFrame:
    """A row for each point."""
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    points = [(step, name, value) for name, curve in curves.items() for step, value in curve]
    frame: Any = pd.DataFrame(points, columns=["step", "name", "value"])
    return frame.astype({"step": "int64", "value": "float64"})


class Series:
    """What a recording tells of many passes at once."""

    if TYPE_CHECKING:  # what a recording has

        @property
        def passes(self) -> tuple[Pass, ...]: ...
        @property
        def seams(self) -> tuple[int, ...]: ...
        def curves(self) -> dict[str, _Floats]: ...
        def _check(self, site: str, quantity: str) -> None: ...

    @property
    def states(self) -> tuple[str, ...]:
        """The keys of the arrays of optimizers in its passes: `"optimizer/mu/head/kernel"`."""
        layouts = {id(one.layout): one.layout for one in self.passes}.values()
        keys = (key for one in layouts for key, quantity in one.keys if quantity == STATE)
        return tuple(dict.fromkeys(keys))

    def series(self, site: str, quantity: Quantity = "output") -> tuple[list[int], list[Summary]]:
        """The steps and summaries of all passes that measured this, oldest first."""
        steps, blobs = self._series(site, quantity)
        found = decoded(Packed.of(blobs))
        return steps, [found.summary(row) for row in range(len(steps))]

    def history(
        self, site: str, quantity: Quantity = "output", *, columns: int = 300
    ) -> HistoryArrays:
        """A site's quantity over the steps, as the screen draws it.

        The axis spans the finite values of all passes kept. A pass that did not measure this has
        no column.

        Args:
            site, quantity: as for `summary`.
            columns: the most columns, at least 2. If there are more passes, this many are picked
                evenly, including the first and the newest.

        Raises:
            ValueError: `columns` is below 2.
        """
        steps, every = self._series(site, quantity)
        return history_of(evenly(steps, columns), evenly(every, columns), every)

    def _series(self, site: str, quantity: str) -> tuple[list[int], list[bytes]]:
        self._check(site, quantity)
        found = [(p.step, blob) for p in self.passes if (blob := p.piece(site, quantity))]
        return [step for step, _ in found], [blob for _, blob in found]

    def to_frame(self, *, layers: bool = False) -> pd.DataFrame:
        """A tidy pandas frame: a row for each pass, site (array, parameter) and quantity.

        Columns: `step, pass, kind, perturbed, site, quantity`, statistics (counts as Int64; the
        unknown is missing), quantiles within 6.25 %, `q01, q05, q25, q50, q75, q95, q99`, and of a
        "parameter" `update_ratio`, the norm of the step's change divided by that of the value, and
        `update_lost`: of the elements to which the step added something other than 0, the share
        that stayed what they were, because the parameter's dtype rounds that off (both NaN: not
        seen). `attrs["seams"]` has the numbers (`pass`) with which a restarted run went on.

        Args:
            layers: whether to add rows for single layers of stacked modules (`"blocks[3]"`). The
                row of the stack covers the same values: do not add both up.
        """
        return passes_frame(self.passes, layers=layers, seams=self.seams)

    def casts_frame(self, *, step: int | None = None) -> pd.DataFrame:
        """What would become of all that was measured in lower precision, as a tidy pandas frame.

        Columns: `site, quantity, dtype, scaled`, and three shares of the finite values. `to_zero`
        are the nonzero values that would be rounded to 0. `subnormal` are those that would lose
        precision because they are too small. `overflow` are those that are too large. The dtypes
        are bfloat16, float16, float8_e4m3fn and float8_e5m2. Each has a row as it is, and a row
        with the array scaled so that its largest value is the largest of the dtype. All shares come
        from the histogram, so they are estimates where it counts a sample, or where a limit falls
        within one of its bins.

        Args:
            step: that of the pass; by default the newest one.

        Raises:
            KeyError: no pass has this step.

        Example:
            >>> from nnx_inspector.recordings.recording import Recording
            >>> from nnx_inspector.stats.summarize import summarize
            >>> recording = Recording()
            >>> recording.append(0, {"head": {"output": summarize(np.array([1e-9, 1e-6, 1.0]))}})
            >>> frame = recording.casts_frame()
            >>> float(frame[frame["dtype"] == "float16"]["to_zero"].iloc[0])
            0.3333333333333333
        """
        passes = [one for one in self.passes if step is None or one.step == step]
        if step is not None and not passes:
            steps = [one.step for one in self.passes]
            said = f"It has {len(steps)} passes, of the steps {steps[0]} to {steps[-1]}" * bool(
                steps
            )
            raise KeyError(f"No pass of step {step} is in the recording. {said or 'It is empty'}.")
        return casts_frame(passes[-1] if passes else None)

    def heads_frame(self) -> pd.DataFrame:
        """What each head of each attention did in each pass, as a tidy pandas frame.

        Columns: `step, pass, site, head`, and the following. All but `logit` are means over queries
        with at least two keys that no mask excludes; of many, over 64 evenly spaced queries of 16
        examples.

        - `entropy` of the probabilities in nats, before a dropout.
        - `evenness`, the entropy as a share of the logarithm of the number of allowed keys, which
          is the most that it can be: 1 if a head looks at all keys alike, 0 if at one key.
        - `distance` between a query and its keys in positions, weighted by probability; NaN if
          there are not as many queries as keys.
        - `first`, the probability of the first key.
        - `logit`, the greatest of all logits that enter the softmax, of keys that no mask excludes.
        - `keys`, the number of allowed keys.

        A site is the call that computes the attention, `"attn@attention"`. Attention that a fused
        kernel computes, or a while loop, has no rows, nor has a call of a loop that nothing jits.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import nnx_inspector as nni
            >>> attn = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
            >>> insp = nni.Inspector(attn, jnp.ones((1, 4, 8)), display=False)
            >>> y = insp.run()
            >>> insp.recording.heads_frame()[["site", "head", "evenness", "keys"]].round(2)
                     site  head  evenness  keys
            0  @attention     0       1.0   4.0
            1  @attention     1       1.0   4.0
        """
        return choices_frame(self.passes, "head", HEAD_FIGURES)

    def experts_frame(self) -> pd.DataFrame:
        """What each expert of each router was given in each pass, as a tidy pandas frame.

        Columns: `step, pass, site, expert`, and the following.

        - `load`, the share of the tokens that choose the expert; of all experts together, as many
          as a token chooses.
        - `dropped`, the share of these choices that the capacity of the expert leaves out. It is
          known where the choice becomes a one-hot mask, whose cumulative sum over the tokens is
          compared with the capacity, or becomes a one-hot vector of as many slots; NaN elsewhere (a
          sort, a scatter that drops, a kernel), where the program says it in no form that is
          recognised, and for an expert that nothing chooses.
        - `entropy` of the router's softmax over all experts in nats, the mean over tokens; NaN if
          it has none.
        - `evenness`, the same as a share of the logarithm of the number of experts.
        - `logit`, the greatest that the expert got; NaN if the choice is made by probabilities.

        A site is the call that chooses, `"moe@experts"`.
        """
        return choices_frame(self.passes, "expert", EXPERT_FIGURES)

    def metrics_frame(self) -> pd.DataFrame:
        """The metrics as a tidy pandas frame: columns `step, name, value`, name by name."""
        return metrics_frame(self.curves())
