"""The values that the screen has shown, kept for a page without a kernel.

Invariant: at most MOST_BYTES are kept, the latest ones; what was dropped to make room is counted;
an answer is the one that the screen got. Reads no array.
"""

from __future__ import annotations

import json
from typing import Final

from nnx_inspector.screen import protocol
from nnx_inspector.screen.export.replay import SavedAnswer
from nnx_inspector.typing import Value

MOST_BYTES: Final = 2_000_000
"""The most bytes of values that a page keeps."""


def answer_key(request: protocol.ShowValues | protocol.ReadValues) -> str:
    """The key by which a page finds an answer: JSON without spaces, as a browser writes it."""
    if isinstance(request, protocol.ShowValues):
        parts: list[object] = [request.site, request.part, request.clean]
    else:
        index = [0 if axis in request.axes else n for axis, n in enumerate(request.index)]
        parts = [request.array, index, request.axes, request.norm_over, request.component]
    return json.dumps(parts, separators=(",", ":"), ensure_ascii=False)


class PageValues:
    """The arrays that were opened, and the last window that was read of each slice."""

    def __init__(self) -> None:
        self._arrays: dict[str, tuple[protocol.Arrays, None]] = {}
        self._windows: dict[str, tuple[protocol.Values, bytes]] = {}
        self._dropped: dict[str, int] = {}  # the number of the array of each

    def keep(self, request: protocol.ShowValues | protocol.ReadValues, answer: Value) -> None:
        """Keep the answer to a request; exact figures of single elements are left out."""
        key = answer_key(request)
        if isinstance(request, protocol.ShowValues):
            self._arrays.pop(key, None)  # the one that was opened last comes last
            self._arrays[key] = answer
        elif not request.exact:
            self._windows.pop(key, None)
            self._dropped.pop(key, None)
            self._windows[key] = answer
            while sum(len(values) for _, values in self._windows.values()) > MOST_BYTES:
                oldest = next(iter(self._windows))
                self._dropped[oldest] = self._windows.pop(oldest)[0].array

    def answers(self) -> dict[str, SavedAnswer]:
        """The answers by key, without windows of arrays that were opened again since."""
        opened, windows, numbers = dict(self._arrays), dict(self._windows), self._numbers()
        kept: dict[str, SavedAnswer] = {**opened}
        kept |= {key: one for key, one in windows.items() if one[0].array in numbers}
        return kept

    def left_out(self) -> int:
        """How many slices were dropped to make room for later ones."""
        numbers = self._numbers()
        return sum(array in numbers for array in [*self._dropped.values()])

    def _numbers(self) -> set[int]:
        arrays = [*self._arrays.values()]
        return {array.number for message, _ in arrays for array in message.arrays}
