"""Turns a recording into protocol messages and their buffers.

Invariant: a figure in a message is the one that the Summary itself gives. If counts have stopped at
their largest value, only the extremes are known. Knows no jax, no widget and no model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nnx_inspector.errors import InspectorError
from nnx_inspector.findings.finding import Finding
from nnx_inspector.recordings.history import choices_over, evenly_spaced
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.recordings.tree_rows import STATE, name_below, site_of_parameter
from nnx_inspector.screen import protocol
from nnx_inspector.stats.choices.rows import ROUTER_ENTROPY, SHOWN, is_expert
from nnx_inspector.stats.encoding import HEAD_BYTES, Packed, decode
from nnx_inspector.stats.table import CASTS, casts_of, sparklines_of, stats_of

StepsMessage = protocol.History | protocol.Updates | protocol.Choices
"""A message with what a site did over the steps."""
MOST_MOVED = 5
"""How many of the parameters within a module are shown over the steps: there are as many dashes."""
CHOICE_COLUMNS, CHOICE_TABLES = 60, 16
"""In how many columns, and of how many attentions or routers of one site."""
MOST_SEARCHED = 20
"""In how many of the newest passes an update is looked for."""


def table_of(keys: Sequence[str], one: Pass | None) -> tuple[np.ndarray, np.ndarray]:
    """A frame's table, float64 [site, quantity, statistic], and its sparklines, uint8."""
    shape = (len(keys), len(protocol.QUANTITIES))
    table = np.full((*shape, len(protocol.STATISTICS)), np.nan, np.float64)
    sparks = np.zeros((*shape, protocol.SPARK), np.uint8)
    if one is None:
        return table, sparks
    rows = {key: i for i, key in enumerate(keys)}
    columns = {quantity: j for j, quantity in enumerate(protocol.QUANTITIES)} | {STATE: 0}
    at = [
        (i, rows[s], columns[q])
        for i, (s, q) in enumerate(one.layout.keys)
        if s in rows and q in columns
    ]
    part, row, column = np.array(at, int).reshape(-1, 3).T
    found = decode(one.packed)
    table[row, column] = stats_of(found)[part]
    sparks[row, column] = sparklines_of(found, protocol.SPARK)[part]
    return table, sparks


def summary_index(one: Pass, site: str, quantity: str) -> int | None:
    """Where a pass has what a row shows as a quantity: an optimizer's state in place of an output;
    None if it was not measured.
    """
    at = one.layout.at
    return at.get((site, quantity), at.get((site, STATE)) if quantity == "output" else None)


def parameters_of(keys: Sequence[str], paths: Iterable[str]) -> dict[int, list[str]]:
    """The parameters that each row itself holds, by its number."""
    rows, found = {key: i for i, key in enumerate(keys)}, dict[int, list[str]]()
    for path in paths:
        holder = site_of_parameter(path, rows)
        if holder is not None:
            found.setdefault(rows[holder], []).append(path)
    return found


@dataclasses.dataclass(frozen=True)
class ParameterTable:
    """What a pass has of the parameters of some rows.

    Attributes:
        measured: the pass.
        by_row: the parameters that each row itself holds, by its number.
        rows: `ROW_STATS` of each row, float64; NaN where there is nothing.
    """

    measured: Pass
    by_row: Mapping[int, Sequence[str]]
    rows: np.ndarray

    @staticmethod
    def of_pass(keys: Sequence[str], measured: Pass) -> ParameterTable:
        paths = [key for key, quantity in measured.keys if quantity == "parameter"]
        by_row = parameters_of(keys, paths)
        rows = np.full((len(keys), len(protocol.ROW_STATS)), np.nan)
        quantities = protocol.PARAMETER_QUANTITIES if by_row else ()
        sizes = [measured.norms(quantity) for quantity in quantities]
        updates = measured.updates("update"), measured.updates("lost")
        for row, mine in by_row.items():
            ratios = ([known[path] for path in mine if path in known] for known in updates)
            norms = ([known[path] for path in mine if path in known] for known in sizes)
            rows[row] = (
                *(max((x for x in some if not math.isnan(x)), default=math.nan) for some in ratios),
                *(math.hypot(*some) if some else math.nan for some in norms),
            )
        return ParameterTable(measured, by_row, rows)

    def figures(self, row: int) -> np.ndarray:
        """The statistics of the parameters of a row, float64 [parameter, quantity, statistic]."""
        paths = self.by_row.get(row, ())[: protocol.MOST_PARAMETERS]
        found = np.full((len(paths), *_PARAMETER_SHAPE), np.nan)
        for i, path in enumerate(paths):
            for j, quantity in enumerate(protocol.PARAMETER_QUANTITIES):
                piece = self.measured.piece(path, quantity)
                if piece is not None:
                    found[i, j] = stats_of(decode(Packed.of([piece])))[0]
        return found

    def headers(
        self, row: int, site: str
    ) -> tuple[tuple[protocol.FrameParameter, ...], list[bytes], int]:
        """The headers of these parameters, the bytes of their histograms, and how many were left
        out.
        """
        paths = self.by_row.get(row, ())
        found: list[protocol.FrameParameter] = []
        counts: list[bytes] = []
        for path in paths[: protocol.MOST_PARAMETERS]:
            pieces = [self.measured.piece(path, q) for q in protocol.PARAMETER_QUANTITIES]
            counts += [piece[HEAD_BYTES:] for piece in pieces if piece is not None]
            found.append(
                protocol.FrameParameter(
                    path=path,
                    name=name_below(path, site),
                    update_ratio=protocol.finite(self.measured.update_ratio(path)),
                    bytes=tuple(-1 if x is None else len(x) - HEAD_BYTES for x in pieces),
                )
            )
        return tuple(found), counts, len(paths) - len(found)


_PARAMETER_SHAPE = len(protocol.PARAMETER_QUANTITIES), len(protocol.STATISTICS)


def frame_of(
    one: Pass, *, keys: Sequence[str], selected: str, metrics: Mapping[str, float], **header: Any
) -> tuple[protocol.Frame, bytes]:
    """The frame of one pass, with full histograms for the selected site and its parameters.

    `header` are the other fields of the frame's header.
    """
    table, sparks = table_of(keys, one)
    weights = ParameterTable.of_pass(keys, one)
    headers: list[protocol.Histogram] = []
    counts: list[bytes] = []
    at = keys.index(selected) if selected in keys else -1
    for j, quantity in enumerate(protocol.QUANTITIES):
        place = summary_index(one, selected, quantity) if at >= 0 else None
        if place is not None and not np.isnan(table[at, j, protocol.STATISTICS.index("size")]):
            counts.append(one.packed.piece(place)[HEAD_BYTES:])
            headers.append(protocol.Histogram(site=at, quantity=j, bytes=len(counts[-1])))
    parameters, of_parameters, more = weights.headers(at, selected)
    frame = protocol.Frame(
        step=one.step,
        perturbed=one.perturbed,
        metrics={name: float(value) for name, value in metrics.items()},
        histograms=tuple(headers),
        parameters=parameters,
        more=more,
        number=one.number,
        **header,
    )
    parts = table, weights.rows, weights.figures(at), sparks
    return frame, protocol.buffer_of(*parts, *counts, *of_parameters)


def histories_of(
    recording: Recording, *, keys: Sequence[str], selected: str, layout: int, columns: int = 300
) -> list[tuple[StepsMessage, bytes]]:
    """The selected site over the steps, in at most `columns` columns, for each quantity of it and
    of its parameters, and for its heads or experts.
    """
    out: list[tuple[StepsMessage, bytes]] = []
    if selected not in keys:
        return out
    quantities = protocol.QUANTITIES if selected in recording.sites else ()
    for j, quantity in enumerate(quantities or (STATE,) * (selected in recording.states)):
        arrays = recording.history(selected, quantity, columns=columns)  # type: ignore[arg-type]
        if len(arrays.steps):
            message = protocol.History(
                layout=layout, site=list(keys).index(selected), quantity=j, steps=len(arrays.steps)
            )
            out.append((message, protocol.buffer_of(*arrays)))
    out += _histories_of_parameters(recording, keys, selected, layout, columns)
    return [*out, *_choices_of(recording, keys, selected, layout)]


def _choices_of(
    recording: Recording, keys: Sequence[str], selected: str, layout: int
) -> Iterator[tuple[protocol.Choices, bytes]]:
    """The heads and the experts of a site's own calls over the steps."""
    figures = [one.figures for one in recording.passes if one.figures]
    shared = {id(one.choices): one.choices for one in figures}  # most passes have the same
    found = dict.fromkeys(key for names in shared.values() for key in names)
    own = [key for key in found if key.rpartition("@")[0] == selected]
    for key in own[:CHOICE_TABLES]:
        experts = is_expert(key)
        steps, shown = choices_over(recording.passes, key, SHOWN[experts], columns=CHOICE_COLUMNS)
        count = max((len(x) for x in shown.values()), default=0)
        message = protocol.Choices(
            layout=layout,
            site=list(keys).index(selected),
            key=key,
            experts=experts,
            figures=tuple(ROUTER_ENTROPY if experts and n == "evenness" else n for n in shown),
            rows=min(count, protocol.MOST_CHOICES),
            steps=len(steps),
            more=max(count - protocol.MOST_CHOICES, 0),
        )
        rows = [x[: protocol.MOST_CHOICES] for x in shown.values()]
        yield message, protocol.buffer_of(steps, *rows)


def _histories_of_parameters(
    recording: Recording, keys: Sequence[str], selected: str, layout: int, columns: int
) -> Iterator[tuple[protocol.History | protocol.Updates, bytes]]:
    """The parameters of a site over the steps, and how far the steps moved them."""
    at = list(keys).index(selected)
    own = parameters_of(keys, recording.parameters).get(at, [])[: protocol.MOST_PARAMETERS]
    paths = own or _most_updated(recording, selected)
    if not paths:
        return
    for path in own:
        for j, quantity in enumerate(protocol.PARAMETER_QUANTITIES):
            arrays = recording.history(path, quantity, columns=columns)  # type: ignore[arg-type]
            if len(arrays.steps):
                of = {"layout": layout, "site": at, "quantity": j, "parameter": path}
                message = protocol.History(steps=len(arrays.steps), **of)
                yield message, protocol.buffer_of(*arrays)
    passes = evenly_spaced([p for p in recording.passes if p.piece(paths[0], "parameter")], columns)
    steps = np.array([p.step for p in passes], np.float64)
    ratios, lost = (
        np.array([[figure(p, path) for p in passes] for path in paths])
        for figure in (Pass.update_ratio, Pass.update_lost)
    )
    # a pass without any, such as one that was made again under a perturbation, is no step
    moved = ~np.isnan(ratios).all(axis=0)
    steps, ratios, lost = steps[moved], ratios[:, moved], lost[:, moved]
    of = {"layout": layout, "site": at, "parameters": tuple(paths), "inside": not own}
    updates = protocol.Updates(steps=len(steps), **of)
    yield updates, protocol.buffer_of(steps, np.where(np.isfinite(ratios), ratios, np.nan), lost)


def _most_updated(recording: Recording, site: str) -> list[str]:
    """The parameters within a site that the newest pass with updates moved most, in that order."""
    for one in reversed(recording.passes[-MOST_SEARCHED:]):
        inside = {
            path: ratio
            for path, ratio in one.updates("update").items()
            if math.isfinite(ratio) and (not site or path.startswith(f"{site}/"))
        }
        if inside:
            return sorted(inside, key=inside.__getitem__, reverse=True)[:MOST_MOVED]
    return []


_QUANTITY_WORDS = {
    "output": "activations", "gradient": "gradient", "input": "input", "parameter": "",
    "parameter_gradient": " gradient", STATE: "state",
}  # fmt: skip


def casts_message(
    recording: Recording, keys: Sequence[str], request: protocol.Look
) -> tuple[protocol.Casts, bytes]:
    """What lower precision would make of the newest pass.

    Raises:
        InspectorError: there is no pass.
    """
    if not len(recording):
        raise InspectorError("no pass was measured yet.")
    one, known = recording.passes[-1], set(keys)
    found = decode(one.packed)
    each = [
        np.concatenate([casts_of(found, x), casts_of(found, x, scaled=True)[:, :2]], axis=1)
        for x in CASTS.values()
    ]
    shares = np.stack(each, axis=1)
    lost = np.nan_to_num(shares[:, :, 0] + shares[:, :, 2], nan=-1.0).max(axis=1)
    order = np.argsort(-lost, kind="stable")[: protocol.MOST_CASTS]
    rows: list[protocol.CastRow] = []
    for key, quantity in (one.keys[i] for i in order.tolist()):
        of_parameter = quantity in protocol.PARAMETER_QUANTITIES
        site = (site_of_parameter(key, known) or "") if of_parameter else key
        name = name_below(key, site) if of_parameter else ""
        rows.append(protocol.CastRow(site=site, name=f"{name}{_QUANTITY_WORDS[quantity]}"))
    head: Any = {"id": request.id, "site": request.site, "step": one.step, "total": len(one.keys)}
    return protocol.Casts(rows=tuple(rows), **head), protocol.buffer_of(shares[order])


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
