"""`compare_weights`: the weights of two models or checkpoints, one array at a time.

Invariant: arrays are aligned by path alone; an array that only one side has is reported; an unknown
figure is NaN. Runs no model and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_inspector.arrays import is_array
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.sites import site_key
from nnx_inspector.recordings.compare import differences
from nnx_inspector.records.donated import donated_text, is_deleted
from nnx_inspector.stats.summarize import summarize, type_text
from nnx_inspector.stats.summary import Summary
from nnx_inspector.typing import Array, DTypeLike, PyTree

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

_COMPARISON_COLUMNS: Final = (
    "total_variation",
    "quantile_distance",
    "mean_difference",
    "std_difference",
)
"""Columns that mean the same as those of `compare`."""


Row = dict[str, Any]
ComparedArray = tuple[Row, Summary | None]
"""A row of `compare_weights`, and the summary of b - a."""


def compare_weights(a: object, b: object) -> pd.DataFrame:
    """Measure how far apart the weights of two models or checkpoints are, largest change first.

    Args:
        a: a module, a state of one (`nnx.state(model)`), or nested dictionaries of arrays
            (`nnx.to_pure_dict`): the weights before.
        b: the weights after.

    Returns:
        A pandas frame with a row for each array of floats, or of the small integers of a quantised
        model (of 16 bits or fewer, as they are stored), ordered by `relative_change`. An array
        that began at 0, as a bias does, has an infinite one; its place is that of its distance
        divided by the norm of all weights. Arrays that only one side has come last. Columns:

        - `parameter`: its path; `type`: that of its Variable; `in`: "both", "a" or "b".
        - `array`: its dtype and shape, those of both sides if they differ.
        - `distance`: the norm of b - a; NaN if the shapes differ.
        - `relative_change`: `distance` divided by the norm of a.
        - `total_variation`, `quantile_distance`, `mean_difference`, `std_difference`: of the
          histograms of the two arrays, as in `nni.compare`.

    Raises:
        TypeError: `a` or `b` is none of these.
        InspectorError: a training step has taken the arrays of a model.

    Example:
        >>> model = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
        >>> after = nnx.clone(model)
        >>> after.kernel[...] *= 1.5
        >>> compare_weights(model, after)[["parameter", "relative_change"]].round(3).values.tolist()
        [['kernel', 0.5]]
    """
    return frame_of(weight_differences(a, b))


def frame_of(found: Sequence[ComparedArray]) -> pd.DataFrame:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    rows = [row for row, _ in found]
    return pd.DataFrame(
        rows, columns=[*_TEXT_COLUMNS, "distance", "relative_change", *_COMPARISON_COLUMNS]
    )


def weight_differences(a: object, b: object) -> list[ComparedArray]:
    """The rows of `compare_weights`, each with the summary of b - a, None if there is none."""
    of_a, of_b = _weights(a, "a"), _weights(b, "b")
    rows: list[ComparedArray] = []
    for path in dict.fromkeys((*of_a, *of_b)):
        pair = [side.get(path) for side in (of_a, of_b)]
        here = [one for one in pair if one is not None]
        figures, change = _statistics(*(None if one is None else one[1] for one in pair))
        row = {
            "parameter": path,
            "type": here[0][0],
            "in": "both" if len(here) == 2 else "a" if pair[0] is not None else "b",
            "array": " and ".join(dict.fromkeys(type_text(x.dtype, x.shape) for _, x in here)),
            **figures,
        }
        rows.append((row, change))
    whole = math.hypot(*(row["norm"] for row, _ in rows if math.isfinite(row["norm"])))
    return sorted(rows, key=lambda one: _sort_key(one[0], whole or 1.0))


def _sort_key(row: Row, whole: float) -> tuple[bool, bool, float]:
    relative = row["relative_change"]
    unknown = math.isnan(relative)
    share = row["distance"] / whole if row["norm"] == 0 else relative
    return row["in"] != "both", unknown, 0.0 if unknown else -share


_TEXT_COLUMNS: Final = ("parameter", "type", "in", "array")


def _weights(of: object, name: str) -> dict[str, tuple[str, Array]]:
    """Path -> the type of the Variable and the array, for each array that is compared."""
    if isinstance(of, nnx.Pytree):
        of = nnx.state(of, graph=True)
    if not isinstance(of, Mapping):
        raise TypeError(
            f"compare_weights takes two modules, states or dictionaries of arrays, got "
            f"{type(of).__name__} for {name}."
        )
    found: dict[str, tuple[str, Array]] = {}
    flat: PyTree = nnx.to_flat_state(of if isinstance(of, nnx.State) else nnx.State(of))
    for path, leaf in flat:
        is_variable = isinstance(leaf, nnx.Variable)
        value = leaf.get_value() if is_variable else leaf
        for inner, x in jax.tree_util.tree_flatten_with_path(value)[0]:
            if is_array(x) and _is_compared(x.dtype):
                kind = type(leaf).__name__ if is_variable else "array"
                found[site_key(path) + jax.tree_util.keystr(inner)] = (kind, x)
    gone = [path for path, (_, x) in found.items() if is_deleted(x)]
    if gone:
        raise InspectorError(donated_text("The weights", gone))
    return found


def _is_compared(dtype: DTypeLike) -> bool:
    """Whether numbers of this type are weights: 32 bits of integers are counts, ids or keys."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits <= 16
    return jnp.issubdtype(dtype, jnp.inexact)


def _statistics(a: object, b: object) -> tuple[dict[str, float], Summary | None]:
    nan = float("nan")
    if a is None or b is None:
        return dict.fromkeys(
            ("norm", "distance", "relative_change", *_COMPARISON_COLUMNS), nan
        ), None
    before, after, change = _measure(a, b)
    (row,) = differences({("", ""): before.merged()}, {("", ""): after.merged()})
    apart = None if change is None else change.merged()
    distance = nan if apart is None else apart.norm
    size = before.merged().norm
    relative = distance / size if size else 0.0 if distance == 0 else distance * math.inf
    shared = {name: getattr(row, name) for name in _COMPARISON_COLUMNS}
    return {"norm": size, "distance": distance, "relative_change": relative, **shared}, apart


@jax.jit
def _measure(a: jax.Array, b: jax.Array) -> tuple[Summary, Summary, Summary | None]:
    """The summaries of both, and of their difference in at least float32."""
    apart = summarize(_widen(b) - _widen(a)) if a.shape == b.shape else None
    return summarize(a), summarize(b), apart


def _widen(x: jax.Array) -> jax.Array:
    """At least float32, to which jax promotes no float of 8 bits."""
    wide = jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize >= 4
    return x if wide else x.astype(jnp.float32)
