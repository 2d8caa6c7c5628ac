"""Plotly figures of a recording: one site's distribution now and over the steps.

Invariant: every number drawn comes from a Summary or the recording's history; nothing is smoothed,
and a pass that did not measure is a gap. Does not measure anything and imports no jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from nnx_inspector.recordings.history import HISTORY_QUANTILES, HistoryArrays
from nnx_inspector.recordings.passes import Quantity
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.bins import Scale
from nnx_inspector.stats.summary import Summary

if TYPE_CHECKING:
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]

_BINS: Final = 64
_COLOURS: Final = {"output": "31, 119, 180", "gradient": "214, 39, 40", "input": "44, 160, 44"}
_BANDS: Final = ((0, 6), (1, 5), (2, 4))
_MEDIAN: Final = 3
_SYMLOG: Final = "value (symmetric log)"

_Floats = npt.NDArray[np.float64]


def figure(
    recording: Recording, site: str, *, quantity: Quantity = "output", scale: Scale = "symlog"
) -> go.Figure:
    """Draw one site: a histogram of the newest pass, a heatmap and percentile bands over the steps.

    The output is drawn with a histogram of its gradient, if one was measured. The intervals of a
    histogram are equally wide on the chosen axis; the height is the number of elements.

    Args:
        recording: the recording to draw.
        site: a site key, as in `recording.sites`.
        quantity: "output", "gradient" or "input".
        scale: the axis of the histograms: "symlog" (as in the heatmap: equal steps of the
            logarithm, linear around zero) or "linear".

    Returns:
        A plotly figure; call `figure.show()`, or leave it as the last line of a cell.

    Raises:
        ValueError: the quantity of the site was not recorded, or the quantity or the scale does
            not exist.

    Example:
        >>> figure(Recording(), "blocks/0")
        Traceback (most recent call last):
        ...
        ValueError: There is nothing to draw: the recording is empty. Run a pass first.
    """
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]

    if scale not in ("symlog", "linear"):
        raise ValueError(f"scale must be 'symlog' or 'linear', got {scale!r}.")
    newest = _newest(recording, site, quantity)
    gradient = _newest_or_none(recording, site, "gradient") if quantity == "output" else None
    history = recording.history(site, quantity)
    panels = [(quantity, *newest)] + ([("gradient", *gradient)] if gradient else [])
    titles = [_title(name, step, summary) for name, step, summary in panels]
    titles += [f"{quantity} over the steps", f"percentiles of the {quantity}"]

    drawn = _subplots(titles)
    for row, (name, _, summary) in enumerate(panels, 1):
        _histogram(drawn, go, row, name, summary, scale)
    _heatmap(drawn, go, len(panels) + 1, history)
    _bands(drawn, go, len(panels) + 2, history, quantity)
    label = site or "the model"
    gone = f" ({recording.thinned} older passes thinned out)" if recording.thinned else ""
    drawn.update_layout(
        title={"text": f"{label}: {quantity}{gone}"},
        height=260 * len(titles) + 80,
        bargap=0,
        showlegend=False,
    )
    return drawn


def _newest(recording: Recording, site: str, quantity: Quantity) -> tuple[int, Summary]:
    if not len(recording):
        raise ValueError("There is nothing to draw: the recording is empty. Run a pass first.")
    try:
        recording.summary(site, quantity)
    except KeyError as error:
        raise ValueError(f"There is nothing to draw: {error.args[0]}") from error
    found = _newest_or_none(recording, site, quantity)
    if found is None:
        has = dict.fromkeys(q for p in recording.passes for s, q in p.keys if s == site)
        names = ", ".join(map(repr, has)) or "nothing"
        raise ValueError(
            f"There is nothing to draw: the passes kept did not measure the {quantity} of "
            f"{site!r}, but {names}. Choose with quantity=, or run a backward pass for gradients."
        )
    return found


def _newest_or_none(
    recording: Recording, site: str, quantity: Quantity
) -> tuple[int, Summary] | None:
    for item in reversed(recording.passes):
        summary = item.summary(site, quantity)
        if summary is not None:
            return item.step, summary
    return None


def _title(name: str, step: int, summary: Summary) -> str:
    if summary.saturated:
        return f"{name} at step {step}: unknown, a count stopped at its largest value"
    apart = {"NaN": summary.nan, "+Inf": summary.posinf, "-Inf": summary.neginf}
    extra = "".join(f", {count:,} {kind}" for kind, count in apart.items() if count)
    if not summary.finite:
        return f"{name} at step {step}: nothing finite among {summary.size:,} elements{extra}"
    return f"{name} at step {step}: {summary.finite:,} finite elements{extra}"


def _subplots(titles: list[str]) -> Any:
    from plotly.subplots import make_subplots  # pyright: ignore

    return make_subplots(rows=len(titles), cols=1, subplot_titles=titles, vertical_spacing=0.09)


def _histogram(drawn: Any, go: Any, row: int, name: str, summary: Summary, scale: Scale) -> None:
    edges, counts, total = np.zeros(1), np.zeros(0), 1
    if not summary.saturated and summary.finite:
        edges, counts = summary.histogram(_BINS, scale=scale)
        total = summary.finite
    # Plotly has no symmetric-log axis: draw the intervals side by side, and label them by value.
    places = edges if scale == "linear" else np.arange(len(edges)) - 0.5
    drawn.add_trace(
        go.Bar(
            x=places[:-1] / 2 + places[1:] / 2,
            y=counts,
            width=np.diff(places),
            customdata=np.stack([edges[:-1], edges[1:], counts / total], axis=1),
            hovertemplate=(
                "%{customdata[0]:.4g} to %{customdata[1]:.4g}<br>%{y:.4~s} elements "
                "(%{customdata[2]:.2%})<extra></extra>"
            ),
            marker={"color": f"rgb({_COLOURS[name]})", "line": {"width": 0}},
            name=name,
        ),
        row=row,
        col=1,
    )
    ticks = {} if scale == "linear" else _value_ticks(edges)
    title = "value" if scale == "linear" else _SYMLOG
    drawn.update_xaxes(title_text=title, row=row, col=1, **ticks)
    drawn.update_yaxes(title_text="elements", row=row, col=1)


def _heatmap(drawn: Any, go: Any, row: int, history: HistoryArrays) -> None:
    shape = history.fractions.T.shape
    lower = np.broadcast_to(history.edges[:-1, None], shape)
    upper = np.broadcast_to(history.edges[1:, None], shape)
    drawn.add_trace(
        go.Heatmap(
            x=np.arange(shape[1]),
            y=np.arange(shape[0]),
            z=history.fractions.T,
            customdata=np.stack([np.broadcast_to(history.steps, shape), lower, upper], axis=2),
            hovertemplate=(
                "step %{customdata[0]:.0f}<br>%{customdata[1]:.4g} to %{customdata[2]:.4g}<br>"
                "%{z:.2%} of the finite elements<extra></extra>"
            ),
            colorscale="Viridis",
            colorbar={"title": {"text": "fraction of<br>elements"}, "len": 0.25},
            hoverongaps=False,
            name="fractions",
        ),
        row=row,
        col=1,
    )
    drawn.update_yaxes(title_text=_SYMLOG, row=row, col=1, **_value_ticks(history.edges))
    _step_axis(drawn, row, history)


def _value_ticks(edges: _Floats) -> dict[str, Any]:
    """Ticks at some of the edges, on an axis on which the intervals stand side by side."""
    shown = np.unique(np.linspace(0, len(edges) - 1, 7).round().astype(int))
    return {"tickvals": shown - 0.5, "ticktext": [f"{edges[i]:.3g}" for i in shown]}


def _step_axis(drawn: Any, row: int, history: HistoryArrays) -> None:
    """Label the columns, which stand side by side, with steps: several passes may share a step."""
    last = len(history.steps) - 1
    shown = np.unique(np.linspace(0, last, 7).round().astype(int))
    drawn.update_xaxes(
        title_text="step",
        range=[-0.5, last + 0.5],
        tickvals=shown,
        ticktext=[f"{history.steps[i]:.0f}" for i in shown],
        row=row,
        col=1,
    )


def _bands(drawn: Any, go: Any, row: int, history: HistoryArrays, quantity: str) -> None:
    names = [f"{100 * q:g} %" for q in HISTORY_QUANTILES]
    colour, columns = _COLOURS[quantity], np.arange(len(history.steps), dtype=np.float64)
    for low, high in _BANDS:
        x, y = _outline(columns, history.quantiles[:, low], history.quantiles[:, high])
        drawn.add_trace(
            go.Scatter(
                x=x,
                y=y,
                mode="lines",
                fill="toself",
                fillcolor=f"rgba({colour}, 0.2)",
                line={"color": f"rgba({colour}, 0.4)", "width": 0.5},
                hoverinfo="skip",
                name=f"{names[low]} to {names[high]}",
            ),
            row=row,
            col=1,
        )
    figures = "".join(f"<br>{name}: %{{customdata[{i + 1}]:.4g}}" for i, name in enumerate(names))
    drawn.add_trace(
        go.Scatter(
            x=columns,
            y=history.quantiles[:, _MEDIAN],
            mode="lines+markers",
            marker={"size": 3},
            connectgaps=False,
            line={"color": f"rgb({colour})", "width": 2},
            customdata=np.column_stack([history.steps, history.quantiles]),
            hovertemplate=f"step %{{customdata[0]:.0f}}{figures}<extra></extra>",
            name="median",
        ),
        row=row,
        col=1,
    )
    drawn.update_yaxes(title_text="value", row=row, col=1)
    _step_axis(drawn, row, history)


def _outline(x: _Floats, low: _Floats, high: _Floats) -> tuple[_Floats, _Floats]:
    """Closed outlines of the stretches that were measured, with NaN between them.

    Plotly's fill between two curves would bridge the gaps as if they had values.
    """
    parts: list[_Floats] = []
    for stretch in np.split(np.arange(len(x)), np.flatnonzero(np.diff(np.isnan(low))) + 1):
        if len(stretch) and not np.isnan(low[stretch[0]]):
            there, back = stretch, stretch[::-1]
            parts.append(
                np.stack([np.append(x[there], x[back]), np.append(low[there], high[back])])
            )
            parts.append(np.full((2, 1), np.nan))
    joined = np.concatenate([np.zeros((2, 0)), *parts], axis=1)
    return joined[0], joined[1]
