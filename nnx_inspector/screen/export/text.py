"""The text that stands in for the screen where no widget is shown: a terminal, a bare notebook.

Invariant: at most ROWS rows of at most LONGEST characters, whatever the model, and all of them
printable. Knows no jax and no widget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nnx_inspector.recordings.tree_rows import Site

ROWS: Final = 40
"""The most rows of the tree."""
LONGEST: Final = 40
"""The most characters of one cell."""
WHY_NO_VIEW: Final = (
    "The live view needs a running kernel, and anywidget where the notebook's page is served: "
    "pip install anywidget in the environment of JupyterLab, then load the page again."
)


def tree_text(title: str, sites: Sequence[Site]) -> str:
    """A title, and the rows of a tree below it, indented by their depth."""
    rows = [("site", "type", "inputs", "output", "params"), *map(_row, sites[:ROWS])]
    lines = [one_line(title)]
    if sites:
        columns = [one for one in zip(*rows, strict=True) if any(one[1:])]
        widths = [max(map(len, column)) for column in columns]
        for row in zip(*columns, strict=True):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
    if len(sites) > ROWS:
        lines.append(f"... and {len(sites) - ROWS} more rows")
    return "\n".join(lines)


def _row(site: Site) -> tuple[str, ...]:
    name = "  " * min(site.depth, LONGEST // 4) + (site.name or "(root)")
    parameters = f"{site.parameters:,}" if site.parameters else ""
    return tuple(map(_cut, (name, site.kind, site.inputs, site.output, parameters)))


def _cut(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def one_line(text: str, *, besides: str = "") -> str:
    """Text in one line of valid UTF-8, without control characters but those `besides`."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(x if x.isprintable() or x in besides else " " for x in text)
