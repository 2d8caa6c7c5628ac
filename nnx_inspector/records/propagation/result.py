"""What `propagation` returns: deviations by width, seed, step and site, and what they say.

Invariant: a site without a gradient has NaN, and a verdict is about the median over the seeds.
Measures nothing; imports no jax.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nnx_inspector.records.propagation.figure import figure
from nnx_inspector.records.propagation.limits import FLAT, hidden, in_words

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]

_Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Propagation:
    """The deviations of activations and gradients in models that were just made; see `propagation`.

    Attributes:
        sites: the keys of the sites, in the order in which they are called: the depth.
        widths: the widths; None for a model without one.
        seeds: the seeds.
        steps: after how many training steps, 0 first.
        forward: float64[width, seed, step, site]: the standard deviation of what the site returns.
        backward: the same of the gradient of that; NaN where there is none.
    """

    sites: tuple[str, ...]
    widths: tuple[int | None, ...]
    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    forward: _Floats
    backward: _Floats

    def frame(self) -> pd.DataFrame:
        """A pandas frame with a row for each width, seed, step and site: columns `width` (if there
        are widths), `seed`, `step`, `depth`, `site`, `forward` and `backward`.
        """
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        rows: list[tuple[Any, ...]] = []
        for (w, s, t, depth), std in np.ndenumerate(self.forward):
            where = self.widths[w], self.seeds[s], self.steps[t], depth, self.sites[depth]
            rows.append((*where, float(std), float(self.backward[w, s, t, depth])))
        names = ["width", "seed", "step", "depth", "site", "forward", "backward"]
        frame: Any = pd.DataFrame(rows, columns=names)
        return frame.drop(columns="width") if self.widths == (None,) else frame

    def medians(self, which: _Floats) -> _Floats:
        """The medians over the seeds, [width, step, site]; NaN where no seed has a figure."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of a site without any gradient
            return np.asarray(np.nanmedian(which, axis=1), np.float64)

    def growth(self) -> pd.DataFrame:
        """How the deviation changes from the first site to the last, and that of the gradient on
        its way back from the last to the first, at each width and step.

        Of three sites or more the last is left out: a head with few outputs makes gradients smaller
        by the root of outputs / inputs, and in muP its output is small at first, both by design.

        Columns: `width` (if there are widths), `step`, `forward` and `backward` (in words: steady,
        falls, grows, vanishes, explodes), `forward_factor` and `backward_factor` (over all layers),
        `forward_per_layer` and `backward_per_layer` (their geometric means).
        """
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        rows: list[dict[str, Any]] = []
        out, back = self.medians(self.forward), self.medians(self.backward)
        count = hidden(self.sites)
        out, back, layers = out[..., :count], back[..., :count], max(count - 1, 1)
        for w, width in enumerate(self.widths):
            for t, step in enumerate(self.steps):
                factors = {
                    "forward": _factor(out[w, t]),
                    "backward": _factor(back[w, t][::-1]),
                }
                rows.append(
                    {
                        "width": width,
                        "step": step,
                        **{name: in_words(x) for name, x in factors.items()},
                        **{f"{name}_factor": x for name, x in factors.items()},
                        **{f"{name}_per_layer": x ** (1 / layers) for name, x in factors.items()},
                    }
                )
        frame: Any = pd.DataFrame(rows)
        return frame.drop(columns="width") if self.widths == (None,) else frame

    def slopes(self) -> pd.DataFrame:
        """How the deviations grow with the width: the coordinate check of muP.

        A pandas frame with columns `step`, `site`, `forward` and `backward`: the slope of log
        deviation over log width, by least squares over all seeds; and `flat`, whether the forward
        slope is at most 0.15 (a slope below 0, as that of a head in muP at first, is no fault).

        Raises:
            ValueError: there are fewer than two widths.
        """
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        if len(set(self.widths)) < 2:
            raise ValueError(
                "A slope needs two widths or more: propagation(..., widths=(64, 256))."
            )
        widths = np.log(np.array(self.widths, np.float64))
        rows: list[dict[str, Any]] = []
        for t, step in enumerate(self.steps):
            for i, site in enumerate(self.sites):
                slopes = [_slope(widths, of[:, :, t, i]) for of in (self.forward, self.backward)]
                named = dict(zip(("forward", "backward"), slopes, strict=True))
                rows.append({"step": step, "site": site, **named, "flat": slopes[0] <= FLAT})
        return pd.DataFrame(rows)

    def figure(self) -> go.Figure:
        """A plotly figure: the deviations by depth, with what is healthy; with several widths also
        by width, step by step.
        """
        return figure(self)

    def _repr_html_(self) -> str:
        found: Any = self.growth()
        return str(found.to_html(index=False, float_format="{:.3g}".format))


def _factor(line: _Floats) -> float:
    """The last figure of a line that is known, relative to the first one."""
    known = line[~np.isnan(line)]
    if len(known) < 2:
        return math.nan
    first, last = known[0], known[-1]
    if first == 0:
        return 0.0 if last == 0 else math.inf
    return float(last / first)


def _slope(widths: _Floats, stds: _Floats) -> float:
    """The slope of log deviation [width, seed] over log width; NaN unless all are known."""
    with np.errstate(divide="ignore"):
        logs = np.log(stds)
    if not np.isfinite(logs).all():
        return math.nan
    x = np.repeat(widths - widths.mean(), stds.shape[1])
    return float((x * logs.ravel()).sum() / (x**2).sum())
