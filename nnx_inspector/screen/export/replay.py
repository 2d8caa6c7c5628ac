"""The data that a saved page replays: all messages of a recording, packed into one block of bytes.

A small front end of its own (`js/src/page`) answers the screen from them, as a kernel would.
Invariant: every message equals the kernel's bit for bit, apart from the shades of a heatmap, which
have 9 bits; whatever is left out to stay within a size is counted, and the page says so. Writes no
file, knows no jax, no widget and no model.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from nnx_inspector.recordings.passes import Pass
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.recordings.tree_rows import name_below
from nnx_inspector.screen import protocol
from nnx_inspector.screen.frames import (
    ParameterTable,
    curves_of,
    histories_of,
    metrics_at,
    parameters_of,
    passes_message,
    summary_index,
    table_of,
)
from nnx_inspector.stats.encoding import HEAD_BYTES

NO_HISTOGRAM: Final = 0xFFFF
"""Stands for a number of bytes if nothing was measured or the counts are unknown."""
COLUMNS: Final = 150
"""The most steps in a history."""
POINTS: Final = 600
"""The most points of a curve."""

MOST_DETAILED: Final = 300
"""The most sites whose histograms, histories, flows, units, code and state are kept."""

SavedAnswer = tuple[protocol.Message, bytes | None] | str
"""A message and its buffer, or why there is none."""
ArraySlot = dict[str, int | str]
"""Where an array lies, and its kind of numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageContent:
    """The content of a page besides the passes.

    Attributes:
        layout: the rows.
        state: the state shown at first.
        kept: further messages without a buffer, shown from the beginning.
        answers: "flow", "code", "units" or "nnx" -> site key -> answer; "casts" -> "" -> answer;
            "values" -> a key, see `inspector.values.page_values`; "compare" -> two passes' numbers.
        detailed: the sites whose histograms and histories are kept.
        missing: the kinds of answers that the page lacks ("units", "nnx", "values").
        library: the script that lays out a flow.
        note: the page's text about itself; `{passes}` is replaced by the number of passes.
    """

    layout: protocol.Layout
    state: protocol.State
    kept: tuple[protocol.Message, ...] = ()
    answers: Mapping[str, Mapping[str, SavedAnswer]] = dataclasses.field(default_factory=dict)
    detailed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    library: bytes = b""
    note: str = ""


def detailed_sites(layout: protocol.Layout, selected: str) -> tuple[str, ...]:
    """The sites that are kept in detail: the selected one, then those nearest to the root."""
    keys = [site.key for site in sorted(layout.sites, key=lambda site: site.depth)]
    first = [selected] if selected in keys else []
    return tuple(dict.fromkeys([*first, *keys]))[:MOST_DETAILED]


class ArrayPacker:
    """Arrays of numbers one after another, each at a place that JSON can name.

    Bytes of equal significance lie side by side, which halves their deflated size.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._at = 0

    def add(self, array: object, kind: str) -> ArraySlot:
        """Add an array as "u1", "u2", "f4" or "f8" and return its place."""
        numbers = np.ascontiguousarray(array, f"<{kind}").reshape(-1)
        part = numbers.view(np.uint8).reshape(-1, numbers.itemsize).T.tobytes()
        place = {"at": self._at, "count": len(numbers), "type": kind}
        self._parts.append(part)
        self._at += len(part)
        return place

    def message(
        self, message: protocol.Message, buffer: bytes | None, *, shades: int = 0
    ) -> dict[str, object]:
        """Add a message and its buffer, as float64 and what is left; or with as many numbers at its
        end that are shades.
        """
        places = []
        if buffer is not None:
            numbers, rest = np.frombuffer(buffer, "<f8", len(buffer) // 8), len(buffer) % 8
            exact = len(numbers) - shades
            places.append(self.add(numbers[:exact], "f8"))
            if shades:
                places.append(self.add(round_shades(numbers[exact:]), "f4"))
            if rest:
                places.append(self.add(np.frombuffer(buffer[-rest:], "u1"), "u1"))
        return {"header": protocol.to_header(message), "buffer": places}

    def packed(self, index: Mapping[str, object]) -> bytes:
        """The length of the index, the index as JSON, and all arrays."""
        text = json.dumps(index, allow_nan=False, ensure_ascii=True).encode()
        return b"".join([struct.pack("<I", len(text)), text, *self._parts])


def pack_replay(
    recording: Recording,
    passes: Sequence[Pass],
    content: PageContent,
    *,
    left_out: int = 0,
    columns: int = COLUMNS,
    points: int = POINTS,
) -> bytes:
    """A recording and the rest of a page, in the form that the page reads.

    `recording` gives the curves and histories, `passes` the passes shown; `left_out` counts the
    others.
    """
    packing = ArrayPacker()
    keys = tuple(site.key for site in content.layout.sites)
    index = {
        "version": protocol.VERSION,
        "note": _note(content, _passes_in_words(len(passes), left_out)),
        "layout": protocol.to_header(content.layout),
        "state": protocol.to_header(content.state),
        "kept": [protocol.to_header(message) for message in content.kept],
        "curves": packing.message(*curves_of(recording, points=points)),
        "passes": packing.message(*passes_message(passes, recording.thinned + left_out)),
        "library": packing.add(np.frombuffer(content.library, "u1"), "u1"),
        "histories": list(_histories(recording, keys, content, packing, columns)),
        "answers": {
            what: [
                [site, {"error": one} if isinstance(one, str) else packing.message(*one)]
                for site, one in by_site.items()
            ]
            for what, by_site in content.answers.items()
        },
        "missing": list(content.missing),
        **_frames(recording, passes, keys, content.detailed, packing),
    }
    return packing.packed(index)


def pack_passes(
    recording: Recording,
    content: PageContent,
    most: int,
    *,
    columns: int = COLUMNS,
    points: int = POINTS,
) -> tuple[str, int, int]:
    """A recording with at most `most` of its passes, as text in the form that the page reads.

    Returns:
        The text, the number of its bytes once unpacked, and the number of passes.
    """
    chosen = thin_passes(recording.passes, most)
    left_out = len(recording.passes) - len(chosen)
    raw = pack_replay(recording, chosen, content, left_out=left_out, columns=columns, points=points)
    return deflated_text(raw), len(raw), len(chosen)


def deflated_text(data: bytes, *, level: int = 6) -> str:
    """Bytes as text for a page: deflated, in base64."""
    return base64.b64encode(gzip.compress(data, level, mtime=0)).decode()


def round_shades(fractions: np.ndarray) -> np.ndarray:
    """Round numbers to 9 significant bits, as float32: off by less than 1 part in 500.

    Example:
        >>> round_shades(np.array([1 / 3, 0.0, np.nan])).tolist()
        [0.3330078125, 0.0, nan]
    """
    mantissa, exponent = np.frexp(fractions)
    return np.ldexp(np.rint(mantissa * 2**9) / 2**9, exponent).astype(np.float32)


def thin_passes(passes: Sequence[Pass], most: int) -> list[Pass]:
    """At most `most` passes, evenly spaced. The first, the newest and those with news stay."""
    if len(passes) <= most:
        return list(passes)
    most = max(most, 2)
    ends = {0, len(passes) - 1}
    news = [i for i, one in enumerate(passes) if one.news and i not in ends]
    kept = ends | set(news[: most - 2])
    free = [i for i in range(len(passes)) if i not in kept]
    count = most - len(kept)
    kept |= {free[round((i + 0.5) * len(free) / count - 0.5)] for i in range(count)}
    return [passes[i] for i in sorted(kept)]


def _passes_in_words(shown: int, left_out: int) -> str:
    if not left_out:
        return "1 pass" if shown == 1 else f"all {shown} passes"
    return f"{shown} of {shown + left_out} passes, spaced evenly"


def _note(content: PageContent, passes: str) -> str:
    sites, kept = len(content.layout.sites), len(content.detailed)
    details = f" The details of {kept} of {sites} modules are kept." if kept < sites else ""
    return content.note.replace("{passes}", passes) + details


def _histories(
    recording: Recording,
    keys: Sequence[str],
    content: PageContent,
    packing: ArrayPacker,
    columns: int,
) -> Iterable[dict[str, object]]:
    for site in content.detailed:
        for message, buffer in histories_of(
            recording, keys=keys, selected=site, layout=content.layout.layout, columns=columns
        ):
            heat = isinstance(message, protocol.History)
            shades = message.steps * protocol.HISTORY_BINS if heat else 0
            yield packing.message(message, buffer, shades=shades)


def _frames(
    recording: Recording,
    passes: Sequence[Pass],
    keys: Sequence[str],
    detailed: Sequence[str],
    packing: ArrayPacker,
) -> dict[str, object]:
    shape = (len(keys), len(protocol.QUANTITIES))
    tables = np.empty((len(passes), *shape, len(protocol.STATISTICS)))
    sparks = np.empty((len(passes), *shape, protocol.SPARK), np.uint8)
    rows, size = {key: i for i, key in enumerate(keys)}, protocol.STATISTICS.index("size")
    every_of = parameters_of(keys, recording.parameters)
    of = {rows[site]: every_of.get(rows[site], ()) for site in detailed}
    listed = [
        (row, path) for row, paths in of.items() for path in paths[: protocol.MOST_PARAMETERS]
    ]
    places = {path: i for i, (_, path) in enumerate(listed)}
    weights = np.full((len(passes), len(keys), len(protocol.ROW_STATS)), np.nan)
    ratios = np.full((len(passes), len(listed)), np.nan)
    quantities = protocol.PARAMETER_QUANTITIES
    figures = np.full((len(passes), len(listed), len(quantities), len(protocol.STATISTICS)), np.nan)
    pairs = [(site, quantity) for site in detailed for quantity in protocol.QUANTITIES]
    pairs += [(path, quantity) for _, path in listed for quantity in quantities]
    lengths = np.full((len(pairs), len(passes)), NO_HISTOGRAM, np.uint16)
    counts: list[list[bytes]] = [[] for _ in pairs]
    for at, one in enumerate(passes):
        tables[at], sparks[at] = table_of(keys, one)
        held = ParameterTable.of_pass(keys, one)
        weights[at] = held.rows
        for row in of:
            here = [places[path] for path in held.by_row.get(row, ()) if path in places]
            figures[at, here] = held.figures(row)[: len(here)]
        for path, i in places.items():
            ratios[at, i] = one.update_ratio(path)
        for i, (site, quantity) in enumerate(pairs):
            place, known = summary_index(one, site, quantity), True
            if quantity in protocol.QUANTITIES:
                column = protocol.QUANTITIES.index(quantity)
                known = not np.isnan(tables[at, rows[site], column, size])
            if place is not None and known:
                counts[i].append(one.packed.piece(place)[HEAD_BYTES:])
                lengths[i, at] = len(counts[i][-1])
    every = b"".join(one for of_pair in counts for one in of_pair)
    return {
        "frames": [
            {
                "number": one.number,
                "step": one.step,
                "perturbed": one.perturbed,
                "metrics": {
                    name: protocol.finite(x) for name, x in metrics_at(recording, one.step).items()
                },
            }
            for one in passes
        ],
        # passes are adjacent: a figure changes little from one to the next
        "table": packing.add(np.moveaxis(tables, 0, -1), "f8"),
        "sparklines": packing.add(np.moveaxis(sparks, 0, -2), "u1"),
        "rows": packing.add(np.moveaxis(weights, 0, -1), "f8"),
        "parameters": [
            {"site": row, "path": path, "name": name_below(path, keys[row])} for row, path in listed
        ],
        "figures": packing.add(np.moveaxis(figures, 0, -1), "f8"),
        "ratios": packing.add(ratios.T, "f8"),
        "detailed": [rows[site] for site in detailed],
        "more": [max(0, len(paths) - protocol.MOST_PARAMETERS) for paths in of.values()],
        "lengths": packing.add(lengths, "u2"),
        "counts": packing.add(np.frombuffer(every, "u1"), "u1"),
    }
