"""The passes and the metrics of a recording as tidy pandas frames.

Invariant: every number equals the one that the Summary itself gives. Imports pandas when called,
never jax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from nnx_inspector.recordings.history import HISTORY_QUANTILES, figures_of
from nnx_inspector.recordings.layers import layer_of
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.stats.summary import STATISTICS

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

_COUNTED: Final = ("size", "zeros", "nan", "posinf", "neginf", "seen")


def passes_frame(passes: Sequence[Pass], *, layers: bool) -> pd.DataFrame:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    chosen = [
        (p, key, p.packed.piece(at))
        for p in passes
        for at, key in enumerate(p.keys)
        if layers or layer_of(key[0]) is None
    ]
    heads = [(p.step, p.number, p.kind, p.perturbed, *key) for p, key, _ in chosen]
    figures = figures_of([blob for _, _, blob in chosen])
    rows = [(*head, *row) for head, row in zip(heads, figures, strict=True)]
    quantiles = [f"q{round(100 * q):02d}" for q in HISTORY_QUANTILES]
    names = ("step", "pass", "kind", "perturbed", "site", "quantity", *STATISTICS, *quantiles)
    types = dict.fromkeys(("step", "pass"), "int64") | {"perturbed": "bool"}
    types |= dict.fromkeys(_COUNTED, "Int64")
    types |= {n: "float64" for n in (*STATISTICS, *quantiles) if n not in _COUNTED}
    frame: Any = pd.DataFrame(rows, columns=list(names))
    return frame.astype(types)


def metrics_frame(curves: Mapping[str, npt.NDArray[np.float64]]) -> pd.DataFrame:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    points = [(step, name, value) for name, curve in curves.items() for step, value in curve]
    frame: Any = pd.DataFrame(points, columns=["step", "name", "value"])
    return frame.astype({"step": "int64", "value": "float64"})
