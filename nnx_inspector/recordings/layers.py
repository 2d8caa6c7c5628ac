"""The layers of stacked modules as sites of their own: `"blocks[3]"` of `"blocks"`.

Invariant: what was told in turns is given to layers only where turns and layers are one to one;
where they are not, the whole stack's figures stand and a reason is given. Imports no jax.
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
"""Layers of one stack that have sites of their own: the first."""
MOST_ROWS: Final = 2048
"""Layers of all stacked sites of a model that have sites of their own."""

NOT_TOLD_APART: Final = (
    "in the watched program its turns are not one to one with the layers, so that only the whole "
    "stack is measured; insp.run and insp.step measure each"
)

_LAYER: Final = re.compile(r"((?:[^\\]|\\.)*?)\[(\d+)\]", re.DOTALL)

Summaries = dict[str, dict[str, Summary]]
"""Site -> quantity -> summary."""


def layer_key(site: str, layer: int) -> str:
    """The key of one layer of a stacked site."""
    return f"{site}[{layer}]"


def layer_of(key: str) -> tuple[str, int] | None:
    """The stacked site and the number of a layer, None where a key is that of a whole site.

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
        layers: how many of them have sites of their own, the first ones.
        turns: how many turns each scan around the site has, outermost first, which is the one over
            the layers; negative where it goes backwards.
    """

    layers: int
    turns: tuple[int, ...]

    def layers_in(self, turns: Sequence[int]) -> list[int] | None:
        """The layer that each of these turns was in; None where that cannot be told.

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
"""For each pass, site and quantity the turns, and what was measured in them."""


def told_apart(told: Told, stacks: Mapping[str, Stack]) -> tuple[Summaries, set[str]]:
    """The summaries of single layers, and the stacked sites whose layers cannot be told apart."""
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
    """All of them as one; a lone one is itself: whoever keeps it merges its rows."""
    return summaries[0] if len(summaries) == 1 else merge(summaries)


def _rank(key: str) -> tuple[str, int]:
    return layer_of(key) or (key, -1)
