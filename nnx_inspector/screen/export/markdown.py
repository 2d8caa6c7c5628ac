"""A recording as one page of Markdown, for a colleague, an issue, or a program that reads.

Invariant: each number is that of `Recording.to_frame` or `Recording.tallies`, and the page is
shorter than 64 kB whatever the names and however many sites; it says what it leaves out. Imports no
jax.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from nnx_inspector.findings.finding import Finding, Findings, markdown_cell, markdown_list
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.recordings.tree_rows import Site, layer_of, leaf_of
from nnx_inspector.stats.encoding import decode
from nnx_inspector.stats.summary import STATISTICS
from nnx_inspector.stats.table import stats_of

ROWS: Final = 30
"""The rows of each table, unless more are asked for."""
MOST_ROWS: Final = 60
_PACKAGES: Final = ("nnx_inspector", "flax", "jax", "jaxlib", "numpy", "optax")
_SITE: Final = ("mean", "std", "min", "max", "zeros %", "NaN", "Inf", "gradient norm")
_OF_UPDATE: Final = ("update ÷ value", "update lost %")
_Statistics = Mapping[tuple[str, str], Mapping[Any, float]]


def report(
    recording: Recording,
    findings: Sequence[Finding],
    *,
    title: str,
    sites: Sequence[Site] = (),
    rows: int = ROWS,
    about: Iterable[str] = (),
    tables: Mapping[str, Sequence[Sequence[str]]] | None = None,
) -> str:
    """A page with what was run, what is wrong, and the figures of the newest pass.

    Args:
        sites: the rows of the tree, the root first.
        rows: the most rows of each table.
        about: more lines of what was run.
        tables: title -> more tables, each with its heads as the first row.

    Raises:
        ValueError: `rows` is not from 1 to 60.
    """
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"report takes 1 to {MOST_ROWS} rows for each table, got rows={rows!r}.")
    newest = recording.passes[-1] if len(recording) else None
    known = {row.key: row for row in sites}
    figures = {} if newest is None else _statistics(newest)
    named = {one.site for found in findings for one in (found, *found.effects)}
    parts = [
        f"# {markdown_cell(title)}",
        markdown_list([*_run(recording, known.get("")), *about, f"written with {_versions()}"]),
        "## Findings",
        Findings(findings).to_markdown(),
    ]
    every = {"Metrics": _metrics(recording)}
    if newest is not None:
        every[f"Sites in step {newest.step}"] = _sites(figures, known, named)
        every[f"Parameters in step {newest.step}"] = _parameters(newest, figures)
    for name, table in {**every, **(tables or {})}.items():
        if len(table) > 1:
            parts += [f"## {name}", _table(table, rows)]
    return "\n\n".join(parts) + "\n"


def _run(recording: Recording, root: Site | None) -> list[str]:
    passes, steps = recording.passes, recording.steps
    kind = "" if root is None else root.kind
    said = [f"model: {markdown_cell(kind) or 'not known'}"]
    if root is not None and root.output:
        said[0] += f", {root.parameters:,} parameters, output {markdown_cell(root.output)}"
    if steps:
        said.append(f"measured: {len(steps)} passes, of the steps {steps[0]} to {steps[-1]}")
        if recording.thinned:
            said[-1] += f" ({recording.thinned} more were left out of the recording)"
        if count := sum(recording.perturbed):
            too = ", the newest included" * passes[-1].perturbed
            said.append(f"perturbed: {count} of these passes{too}")
    else:
        said.append("measured: nothing")
    if recording.where:
        said.append(
            f"counts only positions where {markdown_cell(recording.where)}, in values that have "
            "them"
        )
    if seams := len(recording.seams):
        said.append(f"restarted: {seams} time{'s' * (seams > 1)}")
    if recording.marks:
        last = recording.marks[-1]
        event = "has not said that it ended" if last.open else last.event
        said.append(f"the run: {event}{f', {markdown_cell(last.text)}' * bool(last.text)}")
    return said


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        if name in sys.modules:
            try:
                found.append(f"{name} {importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                continue
    return ", ".join(found)


def _statistics(one: Pass) -> _Statistics:
    table = stats_of(decode(one.packed)).tolist()
    rows = (dict(zip(STATISTICS, row, strict=True)) for row in table)
    return dict(zip(one.keys, rows, strict=True))


def _metrics(recording: Recording) -> list[list[str]]:
    tallies = recording.tallies()
    rows = [["metric", "points", "first", "last", "least", "greatest", "not finite"]]
    for name, points in recording.curves().items():
        values, tally = points[:, 1], tallies[name]
        finite = values[np.isfinite(values)]
        bad = tally.nan + tally.infinite
        rows.append([
            name,
            str(tally.points),
            _number(values[0]),
            _number(values[-1]),
            *([_number(finite.min()), _number(finite.max())] if len(finite) else ["", ""]),
            f"{bad}, first at step {tally.first}" if bad else "0",
        ])  # fmt: skip
    return rows


def _sites(figures: _Statistics, known: Mapping[str, Site], named: set[str]) -> list[list[str]]:
    """The sites that a finding names first; single layers only if it does."""
    sites = [site for site, quantity in figures if quantity == "output"]
    sites = [site for site in sites if site in named or layer_of(site) is None]
    order = {site: i for i, site in enumerate(known)}
    sites.sort(key=lambda site: (site not in named, order.get(site, len(order))))
    rows = [["site", "type", "output", *_SITE]]
    for site in sites:
        of, row = figures[site, "output"], known.get(site)
        size = of["size"]
        gradient = figures.get((site, "gradient"), {})
        rows.append([
            site or "(the model)",
            "" if row is None else row.kind,
            "" if row is None or leaf_of(site)[1] else row.output,
            *(_number(of[name]) for name in ("mean", "std", "min", "max")),
            _number(100 * of["zeros"] / size) if size else "",
            _number(of["nan"]),
            _number(of["posinf"] + of["neginf"]),
            _number(gradient.get("norm", math.nan)),
        ])  # fmt: skip
    return rows


def _parameters(one: Pass, figures: _Statistics) -> list[list[str]]:
    """Those that the step moved most first."""
    ratios = one.updates("update")
    paths = [path for path, quantity in figures if quantity == "parameter"]
    paths = [path for path in paths if layer_of(path) is None]
    known = {path: ratios.get(path, math.nan) for path in paths}
    paths.sort(key=lambda path: -known[path] if known[path] == known[path] else math.inf)
    rows = [["parameter", "values", "mean", "std", "norm", "gradient norm", *_OF_UPDATE]]
    for path in paths:
        of, gradient = figures[path, "parameter"], figures.get((path, "parameter_gradient"), {})
        values = [_number(of[name]) for name in ("size", "mean", "std", "norm")]
        last = gradient.get("norm", math.nan), known[path], 100 * one.update_lost(path)
        rows.append([path, *values, *map(_number, last)])
    return rows


def _number(x: float) -> str:
    """Four digits, whole numbers as they are; "" if it is not known."""
    if math.isnan(x):
        return ""
    return f"{x:.0f}" if float(x).is_integer() and abs(x) < 1e9 else f"{x:.4g}"


def _table(rows: Sequence[Sequence[str]], most: int) -> str:
    heads, *body = rows
    lines = [heads, ["---"] * len(heads), *body[:most]]
    text = "\n".join("| " + " | ".join(map(markdown_cell, line)) + " |" for line in lines)
    more = len(body) - most
    return text if more <= 0 else f"{text}\n\n{more} more are left out; `recording` has all."
