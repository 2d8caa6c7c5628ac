"""Plotly figures of a recording: one site's distribution now and over the steps.

Each step has one column, that of its newest unperturbed pass. Perturbed passes alone do not change
a scale, and are marked. The colours suit a light and a dark page: the figure has no background.

Invariant: every number drawn comes from a Summary; nothing is smoothed, and a step that was not
measured is a gap. Does not measure anything and imports no jax.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from nnx_inspector.recordings.history import (
    HISTORY_QUANTILES,
    HistoryArrays,
    choices_over,
    evenly_spaced,
    history_of,
)
from nnx_inspector.recordings.passes import Pass, Quantity
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.bins import WITHIN, Scale
from nnx_inspector.stats.choices.rows import SHOWN, is_expert
from nnx_inspector.stats.summary import Summary
from nnx_inspector.typing import Float

if TYPE_CHECKING:
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]

_BINS: Final = 64
# those of the widget (js/src/ui/base.css), a little lighter than on white: readable on black too
_COLOURS: Final = {
    "output": "31, 130, 196",
    "gradient": "205, 100, 20",
    "input": "118, 131, 143",
    "parameter": "118, 131, 143",
    "parameter_gradient": "205, 100, 20",
    "state": "118, 131, 143",
}
_GRADIENT_OF: Final[dict[Quantity, Quantity]] = {
    "output": "gradient",
    "parameter": "parameter_gradient",
}
_BANDS: Final = ((0, 6), (1, 5), (2, 4))
_MEDIAN: Final = 3
_SYMLOG: Final = "value (symmetric log)"
_INK, _GRID = "#777777", "rgba(128, 128, 128, 0.25)"  # readable on white and on black
_COLUMNS: Final = 300
_TICKS: Final = 9


class _Steps(NamedTuple):
    """The history of a site with one column for each step."""

    history: HistoryArrays
    perturbed: npt.NDArray[np.bool_]

    @property
    def spanned(self) -> npt.NDArray[np.bool_]:
        """The columns that the scales span: the unperturbed ones, if there are any."""
        return ~self.perturbed if not self.perturbed.all() else self.perturbed


def figure(
    recording: Recording,
    site: str,
    *,
    quantity: Quantity | Literal["heads", "experts"] = "output",
    scale: Scale = "symlog",
) -> go.Figure:
    """Draw one site: a histogram of the newest pass, a heatmap and percentile bands over the steps.

    The output is drawn with a histogram of its gradient, if one was measured. The intervals of a
    histogram are equally wide on the chosen axis; the height is the number of elements. Over the
    steps, a triangle marks a step that was measured only with a perturbation, and a dotted line the
    step with which a restarted run went on. Percentiles are within 6.25 %; see `Summary.quantile`.

    Args:
        recording: the recording to draw.
        site: a site key, as in `recording.sites`, or the path of a parameter, as in
            `recording.parameters`, or an array of an optimizer, as in `recording.states`. One of
            `recording.heads_frame()` or `experts_frame()`, such as "attn@attention", is drawn as
            a line for each head or expert over the steps, a plot for each figure.
        quantity: "output" (of a parameter its value, of an optimizer its "state"), "gradient",
            "input" or "parameter_gradient"; "heads" or "experts" where the pattern of an attention
            is a recorded site too.
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
    if scale not in ("symlog", "linear"):
        raise ValueError(f"scale must be 'symlog' or 'linear', got {scale!r}.")
    if quantity == "output" and site not in recording.sites and _chooses(recording, site):
        quantity = "experts" if is_expert(site) else "heads"
    if quantity == "heads" or quantity == "experts":
        return _of_choices(recording, site, quantity)
    if quantity == "output" and site in recording.parameters and site not in recording.sites:
        quantity = "parameter"
    if quantity == "output" and site in recording.states and site not in recording.sites:
        quantity = "state"
    newest, other = _newest(recording, site, quantity), _GRADIENT_OF.get(quantity, quantity)
    gradient = _newest_or_none(recording, site, other) if other != quantity else None
    steps = _steps(recording, site, quantity)
    panels = [(quantity, *newest)] + ([(other, *gradient)] if gradient else [])
    titles = [_title(name, item, summary) for name, item, summary in panels]
    titles += [f"{quantity} over the steps", f"percentiles of the {quantity}"]

    drawn = _subplots(titles)
    for row, (name, _, summary) in enumerate(panels, 1):
        _histogram(drawn, row, name, summary, scale)
    _heatmap(drawn, len(panels) + 1, steps)
    _bands(drawn, len(panels) + 2, steps, quantity)
    for step in _seams(recording):
        for row in (len(panels) + 1, len(panels) + 2):
            drawn.add_vline(x=step, line={"color": _INK, "dash": "dot"}, row=row, col=1)  # pyright: ignore[reportArgumentType]
    label = site or "the model"
    return _styled(drawn, recording, f"{label}: {quantity}", rows=len(titles))


def _styled(drawn: go.Figure, recording: Recording, title: str, *, rows: int) -> go.Figure:
    """The figure with its title, and with colours for a light and a dark page."""
    gone = f" ({recording.thinned} older passes thinned out)" if recording.thinned else ""
    drawn.update_layout(
        title={"text": f"{title}{gone}"},
        height=260 * rows + 80,
        bargap=0,
        showlegend=False,
        font={"color": _INK},
        paper_bgcolor="rgba(0, 0, 0, 0)",
        plot_bgcolor="rgba(0, 0, 0, 0)",
    )
    for axes in (drawn.update_xaxes, drawn.update_yaxes):
        axes(gridcolor=_GRID, zeroline=False, linecolor=_GRID)
    return drawn


_WORDS: Final = {
    "evenness": "entropy, as a share of the most that it can be",
    "distance": "distance between query and key",
    "first": "probability of the first key",
    "logit": "greatest logit",
    "load": "share of the tokens",
    "dropped": "share of these that is dropped",
}


def _chooses(recording: Recording, key: str) -> bool:
    """Whether a pass has figures of heads or experts under this key."""
    return any(one.figures and key in one.figures.of_choices for one in recording.passes)


def _of_choices(recording: Recording, key: str, which: str) -> go.Figure:
    """A line for each head or expert over the steps, a plot for each figure."""
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]

    steps, shown = choices_over(recording.passes, key, SHOWN[is_expert(key)])
    if is_expert(key) != (which == "experts") or not shown:
        every = (one.figures.of_choices for one in recording.passes if one.figures)
        known = dict.fromkeys(k for one in every for k in one)
        has = [repr(k) for k in known if is_expert(k) == (which == "experts")]
        raise ValueError(
            f"There is nothing to draw: no pass kept has {which} of {key!r}. "
            f"Those that have are {', '.join(has) or 'none'}."
        )
    router = {"evenness": "entropy of the router, as a share of the most that it can be"}
    words = _WORDS | (router if which == "experts" else {})
    drawn = _subplots([words[name] for name in shown])
    for row, (name, rows) in enumerate(shown.items(), 1):
        whole = which == "experts" and name == "evenness"
        for number, values in enumerate(rows[:1] if whole else rows):
            label = "router" if whole else f"{which[:-1]} {number}"
            hue = f"hsl({360 * number / len(rows):.0f}, 60%, 50%)"  # evenly spaced
            trace = go.Scatter(
                x=steps,
                y=values,
                mode="lines+markers",
                marker={"size": 3},
                connectgaps=False,
                line={"color": _INK if whole else hue},
                hovertemplate="step %{x}: %{y:.4g}",
                name=label,
                legendgroup=label,
                showlegend=row == 1 or whole,
            )
            drawn.add_trace(trace, row, 1)
    drawn.update_xaxes(title_text="step", row=len(shown), col=1)
    _styled(drawn, recording, f"{key}: {which}", rows=len(shown))
    return drawn.update_layout(showlegend=True)


def _steps(recording: Recording, site: str, quantity: Quantity) -> _Steps:
    """The newest unperturbed pass of each step, or the newest if all of them were perturbed."""
    found: dict[int, tuple[bool, bytes]] = {}
    for item in recording.passes:
        piece = item.piece(site, quantity)
        if piece is not None and (not item.perturbed or found.get(item.step, (True,))[0]):
            found[item.step] = item.perturbed, piece
    every = sorted(found)
    spanned = [found[step][1] for step in every if not found[step][0]]
    spanned = spanned or [found[step][1] for step in every]
    shown = evenly_spaced(every, _COLUMNS)
    history = history_of(shown, [found[step][1] for step in shown], spanned)
    return _Steps(history, np.array([found[step][0] for step in shown]))


def _seams(recording: Recording) -> list[int]:
    """The first steps of a restarted run that are kept."""
    passes, found = recording.passes, list[int]()
    for number in recording.seams:
        found += [p.step for p in passes if p.number >= number][:1]
    return found


def _newest(recording: Recording, site: str, quantity: Quantity) -> tuple[Pass, Summary]:
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
) -> tuple[Pass, Summary] | None:
    for item in reversed(recording.passes):
        summary = item.summary(site, quantity)
        if summary is not None:
            return item, summary
    return None


def _title(name: str, item: Pass, summary: Summary) -> str:
    when = f"{name} at step {item.step}{', perturbed' if item.perturbed else ''}"
    if summary.saturated:
        return f"{when}: unknown, a count stopped at its largest value"
    apart = {"NaN": summary.nan, "+Inf": summary.posinf, "-Inf": summary.neginf}
    extra = "".join(f", {count:,} {kind}" for kind, count in apart.items() if count)
    if not summary.finite:
        return f"{when}: nothing finite among {summary.size:,} elements{extra}"
    return f"{when}: {summary.finite:,} finite elements{extra}"


def _subplots(titles: list[str]) -> go.Figure:
    from plotly.subplots import make_subplots  # pyright: ignore

    return make_subplots(rows=len(titles), cols=1, subplot_titles=titles, vertical_spacing=0.09)


def _histogram(drawn: go.Figure, row: int, name: str, summary: Summary, scale: Scale) -> None:
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]

    edges, counts, total = np.zeros(1), np.zeros(0), 1
    if not summary.saturated and summary.finite:
        edges, counts = summary.histogram(_BINS, scale=scale)
        total = summary.finite
    # Plotly has no symmetric-log axis: draw the intervals side by side, and label them by value.
    places = edges if scale == "linear" else np.arange(len(edges)) - 0.5
    trace = go.Bar(
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
    )
    drawn.add_trace(trace, row, 1)
    ticks = {} if scale == "linear" else _value_ticks(edges)
    title = "value" if scale == "linear" else _SYMLOG
    drawn.update_xaxes(title_text=title, row=row, col=1, **ticks)
    drawn.update_yaxes(title_text="elements", row=row, col=1)


def _heatmap(drawn: go.Figure, row: int, steps: _Steps) -> None:
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]

    history = steps.history
    shape = history.fractions.T.shape
    lower = np.broadcast_to(history.edges[:-1, None], shape)
    upper = np.broadcast_to(history.edges[1:, None], shape)
    clean = history.fractions[steps.spanned]
    trace = go.Heatmap(
        x=history.steps,
        y=np.arange(shape[0]),
        z=history.fractions.T,
        zmin=0,
        zmax=1 if np.isnan(clean).all() else np.nanmax(clean),
        customdata=np.stack([lower, upper], axis=2),
        hovertemplate=(
            "step %{x}<br>%{customdata[0]:.4g} to %{customdata[1]:.4g}<br>"
            "%{z:.2%} of the finite elements<extra></extra>"
        ),
        colorscale="Viridis",
        colorbar={"title": {"text": "fraction of<br>elements"}, "len": 0.25, "nticks": 5},
        hoverongaps=False,
        name="fractions",
    )
    drawn.add_trace(trace, row, 1)
    at = history.steps[steps.perturbed]
    if len(at):
        trace = go.Scatter(
            x=at,
            y=np.full(len(at), -2.0),
            mode="markers",
            marker={"symbol": "triangle-up", "color": _INK},
            hovertemplate="step %{x}: perturbed<extra></extra>",
            name="perturbed",
        )
        drawn.add_trace(trace, row, 1)
    drawn.update_yaxes(title_text=_SYMLOG, row=row, col=1, **_value_ticks(history.edges))
    drawn.update_xaxes(title_text="step", row=row, col=1)


def _value_ticks(edges: Float[np.ndarray, " edge"]) -> dict[str, Any]:
    """Ticks at round values, on an axis on which the intervals stand side by side.

    Those that come first in `_round_values` stay, where two would be too close.
    """
    places, apart = np.arange(len(edges)) - 0.5, len(edges) / _TICKS
    kept: dict[float, float] = {}
    for value in _round_values(float(edges[0]), float(edges[-1])):
        place = float(np.interp(value, edges, places))
        if all(abs(place - other) >= apart for other in kept.values()):
            kept[value] = place
    shown = sorted(kept)
    return {"tickvals": [kept[v] for v in shown], "ticktext": [f"{v:.12g}" for v in shown]}


def _round_values(low: float, high: float) -> list[float]:
    """Values from low to high that make good ticks, the best first: 0, powers of ten, even steps.

    Example:
        >>> _round_values(-0.2, 3.0)[:6]
        [0.0, 1.0, 0.1, -0.1, 0.01, -0.01]
    """
    top = max(abs(low), abs(high))
    if not 0 < top < math.inf:
        return [low]
    first = math.floor(math.log10(top))
    powers = [10.0**k for k in range(first, max(first - 12, -307), -1)]
    step = 10.0 ** math.floor(math.log10(max((high - low) / 2, top * 1e-9)))
    start = math.ceil(low / step)
    even = [float(f"{(start + i) * step:.12g}") for i in range(int((high - low) / step) + 1)]
    signed = [sign * power for power in powers for sign in (1, -1)]
    return [value for value in [0.0, *signed, *even] if low <= value <= high]


def _bands(drawn: go.Figure, row: int, steps: _Steps, quantity: str) -> None:
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]

    history = steps.history
    names = [f"{100 * q:g} %" for q in HISTORY_QUANTILES]
    colour = _COLOURS[quantity]
    for low, high in _BANDS:
        x, y = _outline(history.steps, history.quantiles[:, low], history.quantiles[:, high])
        trace = go.Scatter(
            x=x,
            y=y,
            mode="lines",
            fill="toself",
            fillcolor=f"rgba({colour}, 0.2)",
            line={"color": f"rgba({colour}, 0.4)", "width": 0.5},
            hoverinfo="skip",
            name=f"{names[low]} to {names[high]}",
        )
        drawn.add_trace(trace, row, 1)
    figures = "".join(f"<br>{name}: %{{customdata[{i}]:.4g}}" for i, name in enumerate(names))
    trace = go.Scatter(
        x=history.steps,
        y=history.quantiles[:, _MEDIAN],
        mode="lines+markers",
        marker={"size": 3},
        connectgaps=False,
        line={"color": f"rgb({colour})", "width": 2},
        customdata=history.quantiles,
        hovertemplate=f"step %{{x}}, percentiles within {WITHIN}{figures}<extra></extra>",
        name="median",
    )
    drawn.add_trace(trace, row, 1)
    clean = history.quantiles[steps.spanned]
    drawn.update_yaxes(title_text="value", row=row, col=1)
    if steps.perturbed.any() and not np.isnan(clean).all():
        low, high = np.nanmin(clean), np.nanmax(clean)
        margin = (high - low) / 20 or abs(high) / 20 or 1.0
        drawn.update_yaxes(range=[low - margin, high + margin], row=row, col=1)
    drawn.update_xaxes(title_text="step", row=row, col=1)


def _outline(
    x: Float[np.ndarray, " step"], low: Float[np.ndarray, " step"], high: Float[np.ndarray, " step"]
) -> tuple[Float[np.ndarray, " point"], Float[np.ndarray, " point"]]:
    """Closed outlines of the stretches that were measured, with NaN between them.

    Plotly's fill between two curves would bridge the gaps as if they had values.
    """
    parts: list[np.ndarray] = []
    for stretch in np.split(np.arange(len(x)), np.flatnonzero(np.diff(np.isnan(low))) + 1):
        if len(stretch) and not np.isnan(low[stretch[0]]):
            there, back = stretch, stretch[::-1]
            parts.append(
                np.stack([np.append(x[there], x[back]), np.append(low[there], high[back])])
            )
            parts.append(np.full((2, 1), np.nan))
    joined = np.concatenate([np.zeros((2, 0)), *parts], axis=1)
    return joined[0], joined[1]
