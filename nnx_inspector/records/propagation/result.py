"""What `propagation` returns: deviations by width, seed, step and site, what they say, a figure.

Invariant: a site without a gradient has NaN, and a verdict is about the median over the seeds.
In the figure every point is one of the result, and what has none is a gap; its colours suit a
light and a dark page. Measures nothing; imports no jax.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from nnx_inspector.typing import Float

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]

HEALTHY: Final = 10.0
"""Glorot and Bengio 2010, "Understanding the difficulty of training deep feedforward neural
networks", figures 6 and 7: with their initialisation activations and gradients of all layers stay
within an order of magnitude. He et al. 2015, "Delving deep into rectifiers", keep them constant."""
TOO_DEEP: Final = math.exp(3.0)
"""Schoenholz et al. 2017, "Deep information propagation": networks train down to about six depth
scales, over which a second moment changes by a factor of e**6, a deviation by e**3."""
FLAT: Final = 0.15
"""Yang and Hu 2021, "Tensor programs IV": in muP the size of activations does not depend on the
width, a slope of 0; in the standard parametrisation it grows like the root of the width (0.5) or
faster after a few steps. A few seeds and widths give slopes to about this error."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Propagation:
    """The deviations of activations and gradients in models that were just made; see `propagation`.

    Attributes:
        sites: the keys of the sites, in the order in which they are called: the depth.
        widths: the widths; None for a model without one.
        seeds: the seeds.
        steps: after how many training steps, 0 first.
        forward: the standard deviation of what the site returns.
        backward: the same of the gradient of that; NaN where there is none.
    """

    sites: tuple[str, ...]
    widths: tuple[int | None, ...]
    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    forward: Float[np.ndarray, "width seed step site"]
    backward: Float[np.ndarray, "width seed step site"]

    def frame(self) -> pd.DataFrame:
        """A pandas frame with a row for each width, seed, step and site: columns `width` (if there
        are widths), `seed`, `step`, `depth`, `site`, `forward` and `backward`.
        """
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        rows: list[tuple[object, ...]] = []
        for (w, s, t, depth), std in np.ndenumerate(self.forward):
            where = self.widths[w], self.seeds[s], self.steps[t], depth, self.sites[depth]
            rows.append((*where, float(std), float(self.backward[w, s, t, depth])))
        names = ["width", "seed", "step", "depth", "site", "forward", "backward"]
        return self._with_widths(pd.DataFrame(rows, columns=names))

    def _with_widths(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The frame, without the column of the widths if there are none."""
        return frame.drop(columns="width") if self.widths == (None,) else frame

    def medians(
        self, which: Float[np.ndarray, "width seed step site"]
    ) -> Float[np.ndarray, "width step site"]:
        """The medians over the seeds; NaN where no seed has a figure."""
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

        rows: list[dict[str, object]] = []
        out, back = self.medians(self.forward), self.medians(self.backward)
        count = _count_without_head(self.sites)
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
                        **{name: verdict(x) for name, x in factors.items()},
                        **{f"{name}_factor": x for name, x in factors.items()},
                        **{f"{name}_per_layer": x ** (1 / layers) for name, x in factors.items()},
                    }
                )
        return self._with_widths(pd.DataFrame(rows))

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
        rows: list[dict[str, object]] = []
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
        return _figure(self)

    def _repr_html_(self) -> str:
        return str(self.growth().to_html(index=False, float_format="{:.3g}".format))


def _factor(line: Float[np.ndarray, " site"]) -> float:
    """The last figure of a line that is known, relative to the first one."""
    known = line[~np.isnan(line)]
    if len(known) < 2:
        return math.nan
    first, last = known[0], known[-1]
    if first == 0:
        return 0.0 if last == 0 else math.inf
    return float(last / first)


def _slope(widths: Float[np.ndarray, " width"], stds: Float[np.ndarray, "width seed"]) -> float:
    """The slope of log deviation over log width; NaN unless all are known."""
    with np.errstate(divide="ignore"):
        logs = np.log(stds)
    if not np.isfinite(logs).all():
        return math.nan
    x = np.repeat(widths - widths.mean(), stds.shape[1])
    return float((x * logs.ravel()).sum() / (x**2).sum())


def _count_without_head(sites: Sequence[str]) -> int:
    """How many of the sites are judged by depth: all but the head."""
    return len(sites) - 1 if len(sites) > 2 else len(sites)


def verdict(factor: float) -> str:
    """What a change by this factor over all layers is called.

    Example:
        >>> [verdict(x) for x in (1.3, 0.07, 1e-9, 15.0, float("inf"))]
        ['steady', 'falls', 'vanishes', 'grows', 'explodes']
    """
    if math.isnan(factor):
        return "unknown"
    if factor > HEALTHY:
        return "explodes" if factor > TOO_DEEP else "grows"
    if factor < 1 / HEALTHY:
        return "vanishes" if factor < 1 / TOO_DEEP else "falls"
    return "steady"


# --------------------------------------------------------------------- the figure

_INK, _GRID = "#777777", "rgba(128, 128, 128, 0.25)"  # readable on white and on black
_GREEN: Final = "rgba(60, 160, 90, 0.18)"
_LINES: Final = ("#1f82c4", "#cd6414", "#3c9c5a", "#a05cc4", "#b8860b", "#c43c5c", "#4c8c8c")
_BAND: Final = (
    "within 10 times the first layer, of gradients the last before the head (Glorot & Bengio 2010; "
    "constant: He et al. 2015)"
)
_LIMIT: Final = "20 times, too deep to train beyond (Schoenholz et al. 2017)"
_FLAT: Final = "flat under muP (Yang & Hu 2021)"


def _figure(found: Propagation) -> go.Figure:
    from plotly.subplots import make_subplots  # pyright: ignore

    several = len(set(found.widths)) > 1
    shown = [t for t in dict.fromkeys((0, len(found.steps) - 1))]
    titles = [
        f"{what} by depth{_step_text(found.steps[t])}"
        for t in shown
        for what in ("deviation of activations", "deviation of gradients")
    ]
    titles += [
        f"activations by width{_step_text(found.steps[t])}: {_FLAT}" for t in shown * several
    ]
    drawn: go.Figure = make_subplots(
        rows=len(titles), cols=1, subplot_titles=titles, vertical_spacing=0.3 / len(titles)
    )
    row = 0
    for t in shown:
        for of, back in ((found.forward, False), (found.backward, True)):
            row += 1
            _draw_by_depth(drawn, row, found, of[:, :, t], back=back)
    for t in shown * several:
        row += 1
        _draw_by_width(drawn, row, found, t)
    drawn.update_layout(
        height=300 * len(titles) + 80,
        font={"color": _INK},
        paper_bgcolor="rgba(0, 0, 0, 0)",
        plot_bgcolor="rgba(0, 0, 0, 0)",
        legend={"orientation": "h", "y": -0.2 / len(titles), "yanchor": "top"},
    )
    for axes in (drawn.update_xaxes, drawn.update_yaxes):
        axes(gridcolor=_GRID, zeroline=False, linecolor=_GRID)
    return drawn


def _step_text(step: int) -> str:
    return " at initialisation" if step == 0 else f" after {step} step{'s' * (step > 1)}"


def _draw_by_depth(
    drawn: go.Figure,
    row: int,
    found: Propagation,
    of: Float[np.ndarray, "width seed site"],
    *,
    back: bool,
) -> None:
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]

    medians = found.medians(of[:, :, None, :])[:, 0]
    depth = np.arange(len(found.sites))
    first = medians[:, _count_without_head(found.sites) - 1 if back else 0]
    base = float(np.median(first[first > 0])) if (first > 0).any() else 1.0
    for name, factor, dash in ((_BAND, HEALTHY, None), (_LIMIT, TOO_DEEP, "dot")):
        edges = np.concatenate(
            [np.full(len(depth), base * factor), np.full(len(depth), base / factor)]
        )
        how: dict[str, object] = {"mode": "lines", "name": name, "legendgroup": name}
        how |= {"showlegend": row == 1, "hoverinfo": "skip"}
        if dash is None:
            how |= {"fill": "toself", "fillcolor": _GREEN, "line": {"width": 0}}
            drawn.add_trace(go.Scatter(x=np.append(depth, depth[::-1]), y=edges, **how), row, 1)
            continue
        how["line"] = {"color": _INK, "dash": dash, "width": 1}
        x = [*depth.tolist(), None, *depth.tolist()]
        y = [*edges[: len(depth)].tolist(), None, *edges[len(depth) :].tolist()]
        drawn.add_trace(go.Scatter(x=x, y=y, **how), row, 1)
    for w, width in enumerate(found.widths):
        name = "median over the seeds" if width is None else f"width {width}"
        low, high = (np.asarray(edge(of[w], axis=0)) for edge in (np.min, np.max))
        trace = go.Scatter(
            x=depth,
            y=_positive_or_nan(medians[w]),
            name=name,
            legendgroup=name,
            showlegend=row == 1,
            mode="lines+markers",
            line={"color": _LINES[w % len(_LINES)]},
            customdata=np.stack([np.array(found.sites, object), low, high], axis=1),
            hovertemplate="%{customdata[0]}: %{y:.3g} (seeds %{customdata[1]:.3g} to "
            "%{customdata[2]:.3g})<extra>" + name + "</extra>",
        )
        drawn.add_trace(trace, row, 1)
    drawn.update_yaxes(type="log", exponentformat="power", title_text="deviation", row=row, col=1)
    every = max(1, len(depth) // 12)
    title = "depth: sites in the order of their calls"
    drawn.update_xaxes(title_text=title, dtick=every, row=row, col=1)


def _draw_by_width(drawn: go.Figure, row: int, found: Propagation, t: int) -> None:
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]

    medians, slopes = found.medians(found.forward)[:, t], found.slopes()
    flat = slopes[slopes["step"] == found.steps[t]]["forward"].tolist()
    for i, (site, slope) in enumerate(zip(found.sites, flat, strict=True)):
        rises = slope > FLAT
        trace = go.Scatter(
            x=list(found.widths),
            y=_positive_or_nan(medians[:, i]),
            name=site or "(model)",
            showlegend=False,
            mode="lines+markers",
            line={"color": _LINES[1 if rises else 0], "width": 2.5 if rises else 1},
            hovertemplate=f"{site or '(model)'}, width %{{x}}: %{{y:.3g}}<br>slope {slope:.2f}"
            + ", grows with the width" * rises
            + "<extra></extra>",
        )
        drawn.add_trace(trace, row, 1)
    drawn.update_yaxes(type="log", exponentformat="power", title_text="deviation", row=row, col=1)
    drawn.update_xaxes(type="log", title_text="width", tickvals=list(found.widths), row=row, col=1)


def _positive_or_nan(line: Float[np.ndarray, " axis"]) -> Float[np.ndarray, " axis"]:
    """A line on a logarithmic axis, which has no 0."""
    return np.where(line > 0, line, np.nan)
