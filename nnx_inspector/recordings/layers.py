"""The layers of stacked modules as sites of their own: `"blocks[3]"` is a layer of `"blocks"`.

Invariant: the figures of a scan's turns are assigned to layers only if turns and layers correspond
one to one; otherwise only the whole stack has figures, and a reason is given. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from nnx_inspector.stats.summary import Summary, merge

MOST_LAYERS: Final = 256
"""The most layers of one stack that have sites of their own, counted from the first."""
MOST_ROWS: Final = 2048
"""The most layers with sites of their own in all stacked sites of a model."""

NOT_TOLD_APART: Final = (
    "in the watched program the turns of its scan do not correspond one to one to its layers, so "
    "only the whole stack is measured; insp.run and insp.step measure each layer"
)

_LAYER: Final = re.compile(r"((?:[^\\]|\\.)*?)\[(\d+)\]", re.DOTALL)

Summaries = dict[str, dict[str, Summary]]
"""Site -> quantity -> summary."""


def layer_key(site: str, layer: int) -> str:
    """The key of one layer of a stacked site."""
    return f"{site}[{layer}]"


def layer_of(key: str) -> tuple[str, int] | None:
    """The stacked site and the layer's number in a layer's key; None for another site's key.

    Example:
        >>> layer_of("blocks/attn[3]"), layer_of("blocks")
        (('blocks/attn', 3), None)
    """
    found = _LAYER.fullmatch(key) if key.endswith("]") else None
    return None if found is None else (found[1], int(found[2]))


@dataclasses.dataclass(frozen=True)
class Stack:
    """How the layers of one site run.

    Attributes:
        layers: how many of them, counted from the first, have sites of their own.
        turns: the number of turns of each scan around the site, negative for a reverse scan. The
            first is the outermost scan, which is over the layers.
    """

    layers: int
    turns: tuple[int, ...]

    def layers_in(self, turns: Sequence[int]) -> list[int] | None:
        """The layer that each of these turns ran; None if that cannot be determined.

        Example:
            >>> Stack(3, (-3,)).layers_in([0, 1, 2]), Stack(2, (2, 2)).layers_in([0, 1])
            ([2, 1, 0], None)
        """
        within = math.prod(map(abs, self.turns[1:]))
        count = Counter(turns)
        if set(count) != set(range(abs(self.turns[0]) * within)) or len(set(count.values())) != 1:
            return None
        found = [turn // within for turn in turns]
        return found if self.turns[0] > 0 else [abs(self.turns[0]) - 1 - layer for layer in found]


Told = Iterable[Mapping[tuple[str, str], Sequence[tuple[int, Summary]]]]
"""For each pass: (site, quantity) -> the turns, each with what was measured in it."""


def told_apart(told: Told, stacks: Mapping[str, Stack]) -> tuple[Summaries, set[str]]:
    """The summaries of single layers, and the sites whose layers cannot be told apart."""
    parts: dict[tuple[str, str], list[Summary]] = {}
    unknown: set[str] = set()
    for one in told:
        for (site, quantity), pairs in one.items():
            stack = stacks.get(site)
            if stack is None:
                continue
            layers = stack.layers_in([turn for turn, _ in pairs])
            if layers is None:
                unknown.add(site)
                continue
            for layer, (_, summary) in zip(layers, pairs, strict=True):
                if layer < stack.layers:
                    parts.setdefault((layer_key(site, layer), quantity), []).append(summary)
    out: Summaries = {}
    for (key, quantity), summaries in sorted(parts.items(), key=lambda item: _rank(item[0][0])):
        site, _ = layer_of(key) or ("", 0)
        if site not in unknown:
            out.setdefault(key, {})[quantity] = one_of(summaries)
    return out, unknown


def one_of(summaries: Sequence[Summary]) -> Summary:
    """One summary of all. A single summary is returned as it is, with its rows unmerged."""
    return summaries[0] if len(summaries) == 1 else merge(summaries)


def _rank(key: str) -> tuple[str, int]:
    return layer_of(key) or (key, -1)
