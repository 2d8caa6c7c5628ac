"""Makes a saved page for the tests and reads it back, independently of the package."""

from __future__ import annotations

import base64
import gzip
import html.parser
import json
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnx_inspector.screen import protocol
from nnx_inspector.screen.export.replay import NO_HISTOGRAM, PageContent

PROGRESS = protocol.Progress(kind="watch", running=False, step=3, total=None, rate=None)


COST = protocol.Cost(
    plain_seconds=None, inspected_seconds=None, compilations=0, bytes_sent=0, frames_dropped=0,
    errors=0,
)  # fmt: skip


def content_for(keys: Sequence[str], **more: Any) -> PageContent:
    sites = tuple(
        protocol.Site(
            key=key, name=key, kind="Linear", parent=-1, depth=0, inputs="", output="",
            parameters=0, flops=None, calls=1, stacked=1, aliases=(), source="",
            perturbable=True, unseen="",
        )
        for key in keys
    )  # fmt: skip
    state = protocol.State(
        version=protocol.VERSION, seq=1, selected=keys[0], perturbations=(),
        training_perturbed=False, listening="after", compiling=0, effect=None, no_effect="",
        progress=PROGRESS, cost=COST, notices=(), python="", closed=False,
    )  # fmt: skip
    layout = protocol.Layout(version=protocol.VERSION, layout=1, model="Net", sites=sites)
    return PageContent(
        layout=layout, state=state, detailed=tuple(more.pop("detailed", keys)), **more
    )


class Unpacked:
    """A second reader of the format, independent of the package."""

    def __init__(self, data: bytes):
        (length,) = struct.unpack_from("<I", data)
        self.index = json.loads(data[4 : 4 + length])
        self._data = data[4 + length :]

    def numbers(self, place: Mapping[str, Any]) -> np.ndarray:
        dtype = np.dtype(f"<{place['type']}")
        size = place["count"] * dtype.itemsize
        part = np.frombuffer(self._data, "u1", size, place["at"])
        planes = part.reshape(dtype.itemsize, place["count"])
        return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)

    def buffer(self, packed: Mapping[str, Any]) -> bytes:
        kinds = ["u1" if p["type"] == "u1" else "<f8" for p in packed["buffer"]]
        parts = zip(packed["buffer"], kinds, strict=True)
        return b"".join(self.numbers(p).astype(kind).tobytes() for p, kind in parts)

    def frame(self, at: int, sites: int) -> tuple[np.ndarray, np.ndarray]:
        count = len(self.index["frames"])
        table = self.numbers(self.index["table"]).reshape(sites, 2, -1, count)[..., at]
        sparks = self.numbers(self.index["sparklines"]).reshape(sites, 2, count, -1)[:, :, at]
        return table, sparks

    def rows(self, at: int, sites: int) -> np.ndarray:
        shape = (sites, len(protocol.ROW_STATS), -1)
        return self.numbers(self.index["rows"]).reshape(shape)[..., at]

    def parameters(self, row: int, at: int) -> list[tuple[dict[str, Any], np.ndarray, list[Any]]]:
        """The header of each parameter of a row in a pass, its figures and its histograms."""
        count, before = len(self.index["frames"]), 2 * len(self.index["detailed"])
        figures = self.numbers(self.index["figures"]).reshape(-1, 2, 11, count)
        ratios = self.numbers(self.index["ratios"]).reshape(-1, count)
        found = list[tuple[dict[str, Any], np.ndarray, list[Any]]]()
        for i, one in enumerate(self.index["parameters"]):
            counts = [self.histogram(before + 2 * i + q, at) for q in range(2)]
            if one["site"] == row and counts[0] is not None:
                ratio = float(ratios[i, at]) if np.isfinite(ratios[i, at]) else None
                header = {"path": one["path"], "name": one["name"], "update_ratio": ratio}
                header["bytes"] = [-1 if x is None else len(x) for x in counts]
                found.append((header, figures[i, ..., at], counts))
        return found

    def histogram(self, pair: int, at: int) -> bytes | None:
        lengths = self.numbers(self.index["lengths"]).astype(int)
        i = pair * len(self.index["frames"]) + at
        if lengths[i] == NO_HISTOGRAM:
            return None
        start = lengths[:i][lengths[:i] != NO_HISTOGRAM].sum()
        here = slice(start, start + lengths[i])
        return self.numbers(self.index["counts"])[here].tobytes()


HOSTILE = (
    "<img src=x onerror=alert(1)>", "</table><script>alert(1)</script>", "<!--", "]]>", "&lt;b&gt;",
    '" onmouseover="alert(1)', "\u2028", "a\x00\x1b[31m", "\ud800", "javascript:alert(1)",
    "x" * 5000,
)  # fmt: skip


ELEMENTS = {"div", "p", "b", "i", "code", "table", "caption", "tbody", "tr", "th", "td"}


def read_page(text: str, *, attribute: str = 'id="nni-recording"', most: int = 1 << 30) -> Unpacked:
    """What the page replays, in at most so many characters of base64."""
    found = re.search(f"{attribute}>([^<]*)</script>", text)
    assert found
    assert len(found[1]) <= most
    return Unpacked(gzip.decompress(base64.b64decode(found[1])))


class Html(html.parser.HTMLParser):
    """The elements of a page with their attributes, the texts in each, and the cells of tables.

    Attributes:
        texts: by the name of an element, the texts in it that are not blank.
        tables: the text of each cell, by table and row.
    """

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._inside, self._in_cell = "", False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if data.strip():
            self.texts.setdefault(self._inside, []).append(data)
        if self._in_cell:
            self.tables[-1][-1][-1] += data
