"""The plotly figure of a `Propagation`.

By depth each width has a line, the median over the seeds, at the first step and at the last; by
width each site has one. The bands are what is healthy, and name their source. The colours suit a
light and a dark page. Invariant: every point is a figure of the result, and what has none is a gap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from nnx_inspector.records.propagation.limits import FLAT, HEALTHY, TOO_DEEP, hidden

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]

_INK, _GRID = "#777777", "rgba(128, 128, 128, 0.25)"  # readable on white and on black
_GREEN: Final = "rgba(60, 160, 90, 0.18)"
_LINES: Final = ("#1f82c4", "#cd6414", "#3c9c5a", "#a05cc4", "#b8860b", "#c43c5c", "#4c8c8c")
_BAND: Final = (
    "within 10 times the first layer, of gradients the last before the head (Glorot & Bengio 2010; "
    "constant: He et al. 2015)"
)
_LIMIT: Final = "20 times, too deep to train beyond (Schoenholz et al. 2017)"
_FLAT: Final = "flat under muP (Yang & Hu 2021)"

_Floats = npt.NDArray[np.float64]


class Propagated(Protocol):
    """What is drawn; see `Propagation`."""

    @property
    def sites(self) -> tuple[str, ...]: ...
    @property
    def widths(self) -> tuple[int | None, ...]: ...
    @property
    def steps(self) -> tuple[int, ...]: ...
    @property
    def forward(self) -> _Floats: ...
    @property
    def backward(self) -> _Floats: ...
    def medians(self, which: _Floats) -> _Floats: ...
    def slopes(self) -> pd.DataFrame: ...


def figure(found: Propagated) -> go.Figure:
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]
    from plotly.subplots import make_subplots  # pyright: ignore

    several = len(set(found.widths)) > 1
    shown = [t for t in dict.fromkeys((0, len(found.steps) - 1))]
    titles = [
        f"{what} by depth{_after(found.steps[t])}"
        for t in shown
        for what in ("deviation of activations", "deviation of gradients")
    ]
    titles += [f"activations by width{_after(found.steps[t])}: {_FLAT}" for t in shown * several]
    drawn: Any = make_subplots(
        rows=len(titles), cols=1, subplot_titles=titles, vertical_spacing=0.3 / len(titles)
    )
    row = 0
    for t in shown:
        for of, back in ((found.forward, False), (found.backward, True)):
            row += 1
            _by_depth(drawn, go, row, found, of[:, :, t], back=back)
    for t in shown * several:
        row += 1
        _by_width(drawn, go, row, found, t)
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


def _after(step: int) -> str:
    return " at initialisation" if step == 0 else f" after {step} step{'s' * (step > 1)}"


def _by_depth(drawn: Any, go: Any, row: int, found: Propagated, of: _Floats, *, back: bool) -> None:
    medians = found.medians(of[:, :, None, :])[:, 0]
    depth = np.arange(len(found.sites))
    first = medians[:, hidden(found.sites) - 1 if back else 0]
    base = float(np.median(first[first > 0])) if (first > 0).any() else 1.0
    for name, factor, dash in ((_BAND, HEALTHY, None), (_LIMIT, TOO_DEEP, "dot")):
        edges = np.concatenate(
            [np.full(len(depth), base * factor), np.full(len(depth), base / factor)]
        )
        how: dict[str, Any] = {"mode": "lines", "name": name, "legendgroup": name}
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
            y=_positive(medians[w]),
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


def _by_width(drawn: Any, go: Any, row: int, found: Propagated, t: int) -> None:
    medians, slopes = found.medians(found.forward)[:, t], found.slopes()
    flat = slopes[slopes["step"] == found.steps[t]]["forward"].tolist()
    for i, (site, slope) in enumerate(zip(found.sites, flat, strict=True)):
        rises = slope > FLAT
        trace = go.Scatter(
            x=list(found.widths),
            y=_positive(medians[:, i]),
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


def _positive(line: _Floats) -> _Floats:
    """A line on a logarithmic axis, which has no 0."""
    return np.where(line > 0, line, np.nan)
