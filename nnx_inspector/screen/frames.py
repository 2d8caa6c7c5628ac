"""Turns a recording into protocol messages and their buffers.

Invariant: a figure in a message is the one that the Summary itself gives. If counts have stopped at
their largest value, only the extremes are known. Knows no jax, no widget and no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnx_inspector.findings.finding import Finding
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.stats.encoding import HEAD_BYTES, decoded
from nnx_inspector.stats.table import figures_of, sparklines_of


def table_of(keys: Sequence[str], one: Pass | None) -> tuple[np.ndarray, np.ndarray]:
    """A frame's table, float64 [site, quantity, statistic], and its sparklines, uint8."""
    shape = (len(keys), len(protocol.QUANTITIES))
    table = np.full((*shape, len(protocol.STATISTICS)), np.nan, np.float64)
    sparks = np.zeros((*shape, protocol.SPARK), np.uint8)
    if one is None:
        return table, sparks
    rows = {key: i for i, key in enumerate(keys)}
    columns = {quantity: j for j, quantity in enumerate(protocol.QUANTITIES)}
    at = [
        (i, rows[s], columns[q])
        for i, (s, q) in enumerate(one.layout.keys)
        if s in rows and q in columns
    ]
    part, row, column = np.array(at, int).reshape(-1, 3).T
    found = decoded(one.packed)
    table[row, column] = figures_of(found)[part]
    sparks[row, column] = sparklines_of(found, protocol.SPARK)[part]
    return table, sparks


def frame_of(
    one: Pass, *, keys: Sequence[str], selected: str, metrics: Mapping[str, float], **header: Any
) -> tuple[protocol.Frame, bytes]:
    """The frame of one pass, with full histograms for the selected site.

    `header` are the other fields of the frame's header.
    """
    table, sparks = table_of(keys, one)
    headers: list[protocol.Histogram] = []
    counts: list[bytes] = []
    at = keys.index(selected) if selected in keys else -1
    for j, quantity in enumerate(protocol.QUANTITIES):
        piece = one.piece(selected, quantity) if at >= 0 else None
        if piece is not None and not np.isnan(table[at, j, protocol.STATISTICS.index("size")]):
            counts.append(piece[HEAD_BYTES:])
            headers.append(protocol.Histogram(site=at, quantity=j, bytes=len(counts[-1])))
    frame = protocol.Frame(
        step=one.step,
        perturbed=one.perturbed,
        metrics={name: float(value) for name, value in metrics.items()},
        histograms=tuple(headers),
        number=one.number,
        **header,
    )
    return frame, protocol.buffer_of(table, sparks, *counts)


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
            out.append((message, protocol.buffer_of(*arrays)))
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
    return message, protocol.buffer_of(*shown)


def passes_message(passes: Sequence[Pass], thinned: int) -> tuple[protocol.Passes, bytes]:
    """The message that lists these passes, oldest first; `thinned` others are gone."""
    kinds = tuple(dict.fromkeys(p.kind for p in passes))
    index = {kind: i for i, kind in enumerate(kinds)}
    rows = [(p.number, p.step, p.perturbed, index[p.kind], p.setting) for p in passes]
    message = protocol.Passes(passes=len(rows), kinds=kinds, thinned=thinned)
    return message, protocol.buffer_of(np.array(rows, "<f8").reshape(-1, 5))


def findings_message(found: Sequence[Finding]) -> protocol.Findings:
    """The message that lists findings, worst first."""
    rows = tuple(
        protocol.FindingRow(
            rule=one.rule,
            site=one.site,
            step=one.step,
            severity=one.severity,
            what=one.what,
            advice=one.advice,
            effects=tuple(effect.what for effect in one.effects),
            gone=one.gone,
        )
        for one in found[: protocol.MOST_FINDINGS]
    )
    return protocol.Findings(findings=rows, more=max(0, len(found) - len(rows)))


def pass_of(recording: Recording, number: int) -> Pass:
    """The pass with this number.

    Raises:
        KeyError: it was thinned out, or never existed.
    """
    for one in recording.passes:
        if one.number == number:
            return one
    raise KeyError(
        f"Pass {number} is not in the recording: older passes are thinned out to keep it small. "
        f"Choose one of the marked passes."
    )


def metrics_at(recording: Recording, step: int) -> dict[str, float]:
    """The last value of every metric at a step."""
    found: dict[str, float] = {}
    for name, curve in recording.curves().items():
        values = curve[curve[:, 0] == step, 1]
        if len(values):
            found[name] = float(values[-1])
    return found
