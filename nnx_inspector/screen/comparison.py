"""Comparing the pass on screen with a pass of another run, or the weights of two models.

The other run's pass has the number OTHER. Invariant: each figure is that of `nni.compare`; unknown
figures and figures without a unit are marked as such. Works on the host, knows no widget.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from nnx_inspector.recordings.compare import Difference, differences, matching_names, pass_of_run
from nnx_inspector.recordings.passes import Pass, layout_of
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.screen.protocol import ComparedRow
from nnx_inspector.stats.summary import Summary

_WHERE = {"both": "both", "a": "pinned", "b": "here"}


A_RECORD = "a record"
"""The name of a recording of one pass, which has no step."""
_Summaries = Mapping[tuple[str, str], Summary]
StepPair = int | tuple[int | None, int | None] | None
"""A step of both runs, or one of each; None is the newest."""


def recording_of(summaries: Mapping[str, Mapping[str, Summary | None]]) -> Recording:
    """A recording of one pass, from its summaries by site and quantity."""
    recording = Recording()
    recording.append(0, summaries)
    recording.name = A_RECORD
    return recording


def other_pass(of: Recording, step: int | None, *, sites: Collection[str]) -> Pass:
    """The pass of another run to compare with, numbered OTHER, with sites named as in `sites`.

    Raises:
        ValueError: there is no such pass.
    """
    one = pass_of_run(of, step, "a")
    names = matching_names(sites, {site for site, _ in one.keys})
    keys = tuple((names.get(site, site), quantity) for site, quantity in one.keys)
    layout = layout_of(keys)
    return dataclasses.replace(one, number=protocol.OTHER, layout=layout)


def clean_pass(one: Pass, summaries: Mapping[str, Mapping[str, Summary | None]]) -> Pass:
    """The pass of these summaries, as `one` without its perturbations."""
    found = recording_of(summaries).passes[-1]
    return dataclasses.replace(found, number=protocol.CLEAN - one.number, step=one.step)


def comparison_message(request: protocol.Compare, shown: Pass, pinned: Pass) -> protocol.Compared:
    """The comparison of two passes by site, the largest difference first."""
    before, here = _summaries(pinned), _summaries(shown)
    rows = differences(before, here)
    return protocol.Compared(
        id=request.id,
        number=shown.number,
        pinned=pinned.number,
        rows=tuple(_row(row, before, here) for row in rows[: protocol.MOST_RANKED]),
        total=len(rows),
    )


def weights_message(
    name: str, rows: Sequence[tuple[Mapping[str, Any], Summary | None]]
) -> protocol.Weights:
    shown = tuple(
        protocol.WeightRow(
            parameter=row["parameter"],
            array=row["array"],
            where=_WHERE[row["in"]],  # pyright: ignore[reportArgumentType]
            distance=protocol.finite(row["distance"]),
            relative_change=protocol.finite(row["relative_change"]),
            total_variation=protocol.finite(row["total_variation"]),
            change="" if change is None else _sparkline_hex(change),
        )
        for row, change in rows[: protocol.MOST_RANKED]
    )
    return protocol.Weights(name=name, rows=shown, total=len(rows))


def _sparkline_hex(change: Summary) -> str:
    """The linear histogram of a change, on which a bell curve looks like one."""
    _, counts = change.histogram(protocol.SPARK, scale="linear")
    return bytes(math.ceil(n * 255 / max(counts.max(), 1)) for n in counts.tolist()).hex()


def _summaries(one: Pass) -> _Summaries:
    """The summaries of the quantities that the screen shows."""
    shown = protocol.QUANTITIES
    return {(site, q): summary for site, q, summary in one.items() if q in shown}


def _histogram_shapes(here: Summary, before: Summary) -> str:
    """The linear histograms of two summaries, on an axis that holds both."""
    fine = 8 * protocol.SPARK
    both = [one.histogram(fine, scale="linear") for one in (here, before) if one.finite]
    if not both:
        return ""
    ends = min(one.edges[0] for one in both), max(one.edges[-1] for one in both)
    axis = np.linspace(*ends, protocol.SPARK + 1)
    heights = np.zeros((2, protocol.SPARK))
    for i, one in enumerate((here, before)):
        if one.finite:
            edges, counts = one.histogram(fine, scale="linear")
            below = np.concatenate([[0.0], np.cumsum(counts)]) / counts.sum()
            heights[i] = np.diff(np.interp(axis, edges, below))
    return np.ceil(heights * (255 / heights.max())).astype(np.uint8).tobytes().hex()


def _row(row: Difference, before: _Summaries, here: _Summaries) -> ComparedRow:
    key = row.site, row.quantity
    both = row.where == "both" and not math.isnan(row.total_variation)
    return ComparedRow(
        site=row.site,
        quantity=row.quantity,
        where=_WHERE[row.where],  # pyright: ignore[reportArgumentType]
        total_variation=protocol.finite(row.total_variation),
        quantile_distance=protocol.finite(row.quantile_distance),
        constant=math.isinf(row.quantile_distance),
        mean_difference=protocol.finite(row.mean_difference),
        std_difference=protocol.finite(row.std_difference),
        rms_difference=protocol.finite(row.rms_difference),
        nan=row.nan_b,
        nan_pinned=row.nan_a,
        shapes=_histogram_shapes(here[key], before[key]) if both else "",
    )
