"""Single layers and single arrays as sites of their own: `"blocks[3]"` is a layer of `"blocks"`.

Outputs of unlike kind stay apart. Of a call that returns several arrays one, the main array, has
the site's own key, so that whoever reads `"cell"` reads one array, whatever the module returns; see
`program.structure` for which. Each other one has a key with its name in the tree: `"cell(0.1)"`,
`"head(logits)"`, and with a layer `"blocks/attn[3](1)"`. Such a key is a site like any other: in a
pass, a file and a comparison, and as a row on screen. Paths escape the parentheses, so that no
module has such a key. Arrays that a method receives are named in the same way, by parameter. Calls
of unlike structure are merged by name.

Invariant: the figures of a scan's iterations are assigned to layers only if they correspond one to
one; otherwise only the whole stack has figures, and a reason is given. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from nnx_inspector.stats.summary import Summary, merge

MOST_LAYERS: Final = 256
"""The most layers of one stack that have sites of their own, counted from the first."""
MOST_ROWS: Final = 2048
"""The most layers with sites of their own in all stacked sites of a model."""

NOT_TOLD_APART: Final = (
    "in the watched program no scan runs over its layers within a call of the model, so "
    "only the whole stack is measured; insp.run and insp.step measure each layer"
)

_LEAF: Final = re.compile(r"((?:[^\\(]|\\.)*)\(((?:[^\\()]|\\.)+)\)", re.DOTALL)
_LAYER: Final = re.compile(r"((?:[^\\@]|\\.)*?)\[(\d+)\](@.*)?", re.DOTALL)
_RESERVED, _ESCAPED = r"([\\/:\[@()])", r"\\\1"
_OPERATION: Final = re.compile(r"((?:[^\\@]|\\.)*)(@.*)?", re.DOTALL)

Summaries = dict[str, dict[str, Summary]]
"""Site -> quantity -> summary."""


def leaf_key(site: str, leaf: str) -> str:
    """The key of one of several arrays; of the main one, whose name is "", the site's own."""
    return f"{site}({re.sub(_RESERVED, _ESCAPED, leaf)})" if leaf else site


def leaf_of(key: str) -> tuple[str, str]:
    """The site, or the layer, and the name of the array in a key; "" for the main one.

    Example:
        >>> leaf_of("cell(0.1)"), leaf_of("cell")
        (('cell', '0.1'), ('cell', ''))
    """
    found = _LEAF.fullmatch(key) if key.endswith(")") else None
    return (key, "") if found is None else (found[1], re.sub(r"\\(.)", r"\1", found[2]))


def layer_key(site: str, layer: int) -> str:
    """The key of one layer of a stacked site: `"blocks[3]"`, `"blocks[3]@softmax"`."""
    site, leaf = leaf_of(site)
    found = _OPERATION.fullmatch(site)
    key = f"{site}[{layer}]" if found is None else f"{found[1]}[{layer}]{found[2] or ''}"
    return leaf_key(key, leaf)


def layer_of(key: str) -> tuple[str, int] | None:
    """The stacked site and the layer's number in a layer's key; None for another site's key.

    Example:
        >>> layer_of("blocks/attn[3]"), layer_of("blocks")
        (('blocks/attn', 3), None)
    """
    site, leaf = leaf_of(key)
    found = _LAYER.fullmatch(site)
    if found is None:
        return None
    return leaf_key(found[1] + (found[3] or ""), leaf), int(found[2])


@dataclasses.dataclass(frozen=True)
class Stack:
    """The layers of one site, over which its outermost scan runs.

    Attributes:
        layers: how many of them, counted from the first, have sites of their own.
        length: the number of them all.
    """

    layers: int
    length: int

    def has_rows_in(self, shape: Sequence[int]) -> bool:
        """Whether something with these rows has one for each layer."""
        return tuple(shape[:1]) == (self.length,)


Told = Iterable[Mapping[tuple[str, str], Sequence[Summary]]]
"""For each pass: (site, quantity) -> the summaries of its calls, with a row for each iteration."""


def told_apart(told: Told, stacks: Mapping[str, Stack]) -> tuple[Summaries, set[str]]:
    """The summaries of single layers, and the sites whose layers cannot be told apart."""
    parts: dict[tuple[str, str], list[Summary]] = {}
    unknown: set[str] = set()
    for one in told:
        for (site, quantity), found in one.items():
            whole, _ = leaf_of(site)
            stack = stacks.get(whole)
            if stack is None:
                continue
            if not all(stack.has_rows_in(summary.rows) for summary in found):
                unknown.add(whole)
                continue
            for layer in range(stack.layers):
                rows = (summary.row(layer) for summary in found)
                # a layer that no cotangent reached has an empty row
                reached = [row for row in rows if quantity != "gradient" or np.any(row.bins)]
                parts.setdefault((layer_key(site, layer), quantity), []).extend(reached)
    out: Summaries = {}
    for (key, quantity), summaries in sorted(parts.items(), key=lambda item: _rank(item[0][0])):
        site, _ = layer_of(key) or ("", 0)
        if leaf_of(site)[0] not in unknown and summaries:
            out.setdefault(key, {})[quantity] = one_of(summaries)
    return out, unknown


def one_of(summaries: Sequence[Summary]) -> Summary:
    """One summary of all. A single summary is returned as it is, with its rows unmerged."""
    return summaries[0] if len(summaries) == 1 else merge(summaries)


def _rank(key: str) -> tuple[str, int]:
    return layer_of(key) or (key, -1)
