"""The passes of a recording for the screen's time strip, and the steps at which perturbations
changed.

Invariant: two passes share a setting's number only if the same perturbations were on in both.
Knows no jax and no widget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from nnx_inspector.recordings.passes import Pass
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol


class Comparable(Protocol):
    """A setting of perturbations."""

    @property
    def active(self) -> bool: ...
    def is_like(self, other: Any, /) -> bool: ...


class Settings:
    """Numbers the settings in force, pass after pass."""

    def __init__(self) -> None:
        self._last: Comparable | None = None
        self._number = 0

    @property
    def latest(self) -> int:
        """The number of the last pass with a perturbation on."""
        return self._number

    def number_of(self, setting: Comparable) -> int:
        """The number of a pass's setting: 0 if all is off, else the last or a new one."""
        last, self._last = self._last, setting
        if not setting.active:
            return 0
        if last is None or not last.active or not setting.is_like(last):
            self._number += 1
        return self._number


def passes_of(recording: Recording) -> tuple[protocol.Passes, bytes]:
    return passes_message(recording.passes, recording.thinned)


def passes_message(passes: Sequence[Pass], thinned: int) -> tuple[protocol.Passes, bytes]:
    """The message that lists these passes, oldest first; `thinned` others are gone."""
    kinds = tuple(dict.fromkeys(p.kind for p in passes))
    index = {kind: i for i, kind in enumerate(kinds)}
    rows = [(p.number, p.step, p.perturbed, index[p.kind], p.setting) for p in passes]
    message = protocol.Passes(passes=len(rows), kinds=kinds, thinned=thinned)
    return message, protocol.passes_buffer(rows)


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
