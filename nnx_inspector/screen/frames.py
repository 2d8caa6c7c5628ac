"""Turns a recording into protocol messages and their buffers.

Invariant: a figure in a message is the one that the Summary itself gives. If counts have stopped at
their largest value, only the extremes are known. Knows no jax, no widget and no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.stats.encoding import Sparse
from nnx_inspector.stats.table import figures_of, sparklines_of

Parts = Mapping[tuple[str, str], Sparse]
"""The kept parts of a pass's summaries, by site and quantity."""


def table_of(keys: Sequence[str], parts: Parts) -> tuple[np.ndarray, np.ndarray]:
    """A frame's table, float64 [site, quantity, statistic], and its sparklines, uint8."""
    rows = {key: i for i, key in enumerate(keys)}
    columns = {quantity: j for j, quantity in enumerate(protocol.QUANTITIES)}
    shown = [
        (rows[site], columns[quantity], part)
        for (site, quantity), part in parts.items()
        if site in rows and quantity in columns
    ]
    shape = (len(keys), len(protocol.QUANTITIES))
    table = np.full((*shape, len(protocol.STATISTICS)), np.nan, np.float64)
    sparks = np.zeros((*shape, protocol.SPARK), np.uint8)
    at = [i for i, _, _ in shown], [j for _, j, _ in shown]
    table[at] = figures_of([part for _, _, part in shown])
    sparks[at] = sparklines_of([part for _, _, part in shown], protocol.SPARK)
    return table, sparks


def frame_of(
    *,
    keys: Sequence[str],
    parts: Parts,
    selected: str,
    seq: int,
    layout: int,
    step: int,
    perturbed: bool,
    metrics: Mapping[str, float],
    progress: protocol.Progress,
    number: int,
    held: bool = False,
) -> tuple[protocol.Frame, bytes]:
    """The frame of one pass, with full histograms for the selected site."""
    table, sparks = table_of(keys, parts)
    headers: list[protocol.Histogram] = []
    bodies: list[np.ndarray] = []
    for j, quantity in enumerate(protocol.QUANTITIES):
        part = parts.get((selected, quantity))
        if part is not None and selected in keys and not part.saturated:
            bins = part.summary().nonzero_bins()
            headers.append(
                protocol.Histogram(site=keys.index(selected), quantity=j, bins=len(bins))
            )
            bodies.append(bins)
    frame = protocol.Frame(
        seq=seq,
        layout=layout,
        step=step,
        perturbed=perturbed,
        metrics={name: float(value) for name, value in metrics.items()},
        histograms=tuple(headers),
        progress=progress,
        number=number,
        held=held,
    )
    return frame, protocol.frame_buffer(table, bodies, sparks)


def histories_of(
    recording: Recording, *, keys: Sequence[str], selected: str, layout: int, columns: int = 300
) -> list[tuple[protocol.History, bytes]]:
    """The selected site over the steps, in at most `columns` columns, for each quantity."""
    out: list[tuple[protocol.History, bytes]] = []
    if selected not in recording.sites or selected not in keys:
        return out
    for j, quantity in enumerate(protocol.QUANTITIES):
        arrays = recording.history(selected, quantity, columns=columns)  # type: ignore[arg-type]
        if len(arrays.steps):
            message = protocol.History(
                layout=layout, site=list(keys).index(selected), quantity=j, steps=len(arrays.steps)
            )
            buffer = protocol.history_buffer(
                arrays.steps, arrays.quantiles, arrays.edges, arrays.fractions
            )
            out.append((message, buffer))
    return out


def curves_of(recording: Recording, *, points: int = 600) -> tuple[protocol.Curves, bytes]:
    """All metrics over the steps.

    A curve longer than `points` is divided into as many stretches. It has the first finite value of
    each and the first that is not finite, so that no gap and no value between two gaps is lost, and
    its end.
    """
    recorded = recording.curves()
    finite = {name: np.isfinite(curve[:, 1]) for name, curve in recorded.items()}
    shown: list[Any] = []
    for name, curve in recorded.items():
        some = np.arange(len(curve))
        if len(curve) > points:
            stretches = 2 * (some * points // len(curve)) + finite[name]
            some = np.union1d(np.unique(stretches, return_index=True)[1], some[-1:])
        shown.append(np.where(np.isfinite(curve[some]), curve[some], np.nan))
    message = protocol.Curves(
        names=tuple(recorded),
        points=tuple(len(curve) for curve in shown),
        recorded=tuple(len(curve) for curve in recorded.values()),
        not_finite=tuple(int((~one).sum()) for one in finite.values()),
    )
    return message, protocol.curves_buffer(shown)
