"""The last state of a screen as plain HTML, which a saved notebook shows without a kernel.

It is built as a tree of elements, so no text is markup. It has no scripts, style sheets or
pictures, so hosts that sanitise untrusted notebooks leave it whole. Invariants: figures are those
of the screen; the HTML stays below MOST_BYTES, whatever the model. Knows no jax and no widget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final
from xml.etree import ElementTree

import numpy as np

from nnx_inspector.recordings.passes import Pass, Quantity
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.recordings.tree_rows import STATE
from nnx_inspector.screen import protocol
from nnx_inspector.screen.export.text import one_line
from nnx_inspector.screen.frames import metrics_at, table_of
from nnx_inspector.stats.bins import WITHIN

MOST_BYTES: Final = 100_000
MOST_ROWS: Final = 120
LONGEST: Final = 80
"""The most characters of one text."""
_BARS: Final = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_MEASURED: Final[dict[Quantity, str]] = {
    "output": "activation",
    "gradient": "gradient",
    "state": "state",
}
_QUANTILES: Final = (0.01, 0.25, 0.5, 0.75, 0.99)

Element = ElementTree.Element
Child = Element | str


def snapshot(
    *,
    layout: protocol.Layout,
    state: protocol.State,
    recording: Recording,
    findings: Sequence[protocol.FindingRow],
    saved: str,
) -> str:
    """Return the last state as HTML.

    Args:
        recording: the recording, whose newest pass is shown.
        findings: the findings, worst first.
        saved: the time of the state, in words.
    """
    passes = recording.passes
    newest = passes[-1] if passes else None
    rows = MOST_ROWS
    while True:
        parts = [
            _heading(layout, state, newest, len(passes), saved),
            *_summary_lines(state, findings, recording, newest),
            _tree(layout, state.selected, newest, rows),
            *_detail(layout, state.selected, newest),
        ]
        root = _element("div", *parts, css="nni-snapshot")
        text = ElementTree.tostring(root, encoding="unicode", method="html")
        if len(text.encode()) <= MOST_BYTES or rows <= 1:
            return text
        rows //= 2


# ------------------------------------------------------------------------ parts


def _heading(
    layout: protocol.Layout, state: protocol.State, newest: Pass | None, passes: int, saved: str
) -> Element:
    run = state.progress
    where = [] if newest is None else [f"step {newest.step}", f"{passes} passes recorded"]
    if run.kind == "watch" and run.total is not None:
        where.insert(0, f"{run.step} of {run.total} steps done")
    return _element(
        "p",
        _element("b", layout.model),
        f": {', '.join(where)}. " if where else ". ",
        f"Counts only positions where {_cut(layout.where)}. " if layout.where else "",
        _element("i", f"The state at {saved}. Run the cell for the live view."),
    )


def _summary_lines(
    state: protocol.State,
    findings: Sequence[protocol.FindingRow],
    recording: Recording,
    newest: Pass | None,
) -> Iterable[Element]:
    if newest is not None:
        metrics = metrics_at(recording, newest.step)
        if metrics:
            said = ", ".join(f"{_cut(name)} {_real(x)}" for name, x in metrics.items())
            yield _element("p", f"Metrics: {said}")
    for one in state.perturbations[:20]:
        on = "on" if one.enabled else "off"
        code = _element("code", _cut(one.expression))
        yield _element("p", f"Perturbed ({on}): {one.site or '(root)'}: ", code)
    effect = state.effect
    if effect is not None and any(one.enabled for one in state.perturbations):
        changes = [
            f"{_cut(name)} {_real(effect.clean[name])} \N{RIGHTWARDS ARROW} {_real(value)}"
            for name, value in effect.perturbed.items()
            if name in effect.clean
        ]
        if effect.output_change is not None:
            changes.append(f"output changed by {100 * effect.output_change:.3g} %")
        yield _element("p", f"Effect on {effect.source}: {', '.join(changes) or 'not measured'}")
    for one in findings[:5]:
        effects = f" {len(one.effects)} more follow from it." if one.effects else ""
        over = "" if one.gone is None else f" It is gone since step {one.gone}."
        said = f"{one.site}: {one.what}: {one.advice}.{effects}{over}"
        yield _element("p", _element("b", f"{one.severity}: "), said)


def _tree(layout: protocol.Layout, selected: str, newest: Pass | None, most: int) -> Element:
    keys = [site.key for site in layout.sites]
    table, sparks = table_of(keys, newest)
    shown = _shown_rows(layout.sites, selected, most)
    names = ("mean", "std", "min", "max")
    heads = ("module", "type", "output", "activations", *names, "\N{DOUBLE VERTICAL LINE}gradient"
             "\N{DOUBLE VERTICAL LINE}", "NaN, Inf")  # fmt: skip
    rows = [_row(heads, "th", left=4)]
    figure = protocol.STATISTICS.index
    for i in shown:
        site, at = layout.sites[i], table[i, 0]
        name = "\N{NO-BREAK SPACE}" * 3 * site.depth + _cut(site.name or "(root)")
        bad = [table[i, :, figure(n)] for n in ("nan", "posinf", "neginf")]
        counted = np.nansum(bad) if np.isfinite(bad).any() else math.nan
        rows.append(
            _row(
                (
                    _element("b", name) if site.key == selected else name,
                    site.kind,
                    site.output,
                    bars(sparks[i, 0]),
                    *(_real(at[figure(one)]) for one in names),
                    _real(table[i, 1, figure("norm")]),
                    _count(counted),
                ),
                left=4,
            )
        )
    left_out = len(keys) - len(shown)
    caption = f"Modules; {left_out} more are left out" if left_out else "Modules"
    return _element("table", _element("caption", caption), _element("tbody", *rows))


def _detail(layout: protocol.Layout, selected: str, newest: Pass | None) -> Iterable[Element]:
    site = next((one for one in layout.sites if one.key == selected), None)
    if site is None:
        return
    facts = {
        "type": site.kind,
        "inputs": site.inputs,
        "output": site.output,
        "parameters": str(site.parameters),
        "source": site.source,
        "not seen": site.unseen,
    }
    said = "; ".join(f"{name}: {_cut(value)}" for name, value in facts.items() if value)
    yield _element("p", "Selected: ", _element("b", selected or "(root)"), f". {said}")
    table, sparks = table_of([selected], newest)
    heads = ["", *protocol.STATISTICS, *(f"q{round(100 * q):02d}" for q in _QUANTILES), ""]
    rows = [_row(heads, "th")]
    for quantity in _MEASURED:
        part = None if newest is None else newest.summary(selected, quantity)
        if part is None:
            continue
        at = protocol.QUANTITIES.index("output" if quantity == STATE else quantity)
        figures = [
            _count(x) if name in _COUNTS else _real(x)
            for name, x in zip(protocol.STATISTICS, table[0, at], strict=True)
        ]
        known = not part.saturated
        quantiles = part.quantile(_QUANTILES) if known else [math.nan] * len(_QUANTILES)
        rows.append(
            _row((_MEASURED[quantity], *figures, *map(_real, quantiles), bars(sparks[0, at], 1)))
        )
    if len(rows) > 1:
        yield _element("table", _element("tbody", *rows))
        yield _element("p", f"q01 to q99 are read from the histogram, within {WITHIN}.")


_COUNTS: Final = ("size", "zeros", "nan", "posinf", "neginf", "seen")


def _shown_rows(sites: Sequence[protocol.Site], selected: str, most: int) -> list[int]:
    """At most `most` rows in order: the selected row, its parents, then the topmost."""
    at = next((i for i, site in enumerate(sites) if site.key == selected), -1)
    kept: list[int] = []
    while at >= 0:
        kept.append(at)
        at = sites[at].parent
    kept += sorted(range(len(sites)), key=lambda i: (sites[i].depth, i))
    return sorted(list(dict.fromkeys(kept))[:most])


# --------------------------------------------------------------------- in words


def bars(heights: np.ndarray, together: int = 2) -> str:
    """A sparkline of block characters, each for `together` heights; "" if nothing is known.

    Example:
        >>> bars(np.array([0, 0, 255, 10], np.uint8))
        '\u2581\u2588'
    """
    if not heights.any():
        return ""
    highest = heights.reshape(-1, together).max(axis=1).astype(int)
    return "".join(_BARS[(7 * h + 127) // 255] if h else _BARS[0] for h in highest)


def _real(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "\N{EN DASH}"
    return f"{value:.4g}"


def _count(value: float) -> str:
    return "\N{EN DASH}" if math.isnan(value) else f"{int(value)}"


def _cut(text: str) -> str:
    """One line of text that HTML and UTF-8 can hold, shortened if it is long."""
    text = one_line(text, besides="\N{NO-BREAK SPACE}")
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 2]} \N{HORIZONTAL ELLIPSIS}"


def _element(name: str, *children: Child, css: str = "") -> Element:
    element = Element(name, {"class": css} if css else {})
    before: Element | None = None
    for child in children:
        if not isinstance(child, str):
            element.append(child)
            before = child
        elif before is None:
            element.text = (element.text or "") + _sentence(child)
        else:
            before.tail = (before.tail or "") + _sentence(child)
    return element


def _sentence(text: str) -> str:
    return one_line(text, besides="\N{NO-BREAK SPACE}")[:600]


def _row(cells: Sequence[Child], kind: str = "td", *, left: int = 1) -> Element:
    """A row of a table whose first cells are text; hosts align every cell like a number."""
    row = _element("tr")
    for i, cell in enumerate(cells):
        element = _element(kind, _cut(cell) if isinstance(cell, str) else cell)
        if i < left:
            element.set("style", "text-align: left")
        row.append(element)
    return row
