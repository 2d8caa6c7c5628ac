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
    """All metrics over the steps. A longer curve has `points` evenly spaced points and its end."""
    curves: dict[str, Any] = {}
    for name, curve in recording.curves().items():
        if len(curve) > points:
            curve = curve[np.linspace(0, len(curve) - 1, points).round().astype(int)]
        curve = np.where(np.isfinite(curve), curve, np.nan)
        curves[name] = curve
    message = protocol.Curves(names=tuple(curves), points=tuple(len(c) for c in curves.values()))
    return message, protocol.curves_buffer(list(curves.values()))
