"""A perturbation of a run that happens elsewhere, as Python handles it.

Each change is a request to the run, and returns when the run has made it. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Callable

from nnx_inspector.errors import InspectorError
from nnx_inspector.screen import protocol


class Steered:
    """A perturbation of a run that happens elsewhere: switch it, tune it, remove it.

    Attributes:
        site: the site key or pattern that it was made with.
        expression: the Python that makes it.
    """

    def __init__(
        self,
        shown: protocol.Perturbation,
        now: Callable[[int], protocol.Perturbation | None],
        ask: Callable[[protocol.Request], object],
    ):
        self._id, self._now, self._ask = shown.id, now, ask
        self.site, self.expression = shown.site, shown.expression

    @property
    def _current(self) -> protocol.Perturbation:
        if (shown := self._now(self._id)) is None:
            raise InspectorError(f"{self.expression} on {self.site!r} was removed.")
        return shown

    @property
    def enabled(self) -> bool:
        """Whether it is on; can be set."""
        return self._current.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._adjust(value, None)

    @property
    def strength(self) -> float | None:
        """The number that a slider tunes, or None; can be set."""
        return self._current.strength

    @strength.setter
    def strength(self, value: float) -> None:
        self._adjust(self.enabled, value)

    def remove(self) -> None:
        """Remove it from the run."""
        self._ask(protocol.Remove(id=0, perturbation=self._current.id))

    def _adjust(self, enabled: bool, strength: float | None) -> None:
        number = self._current.id
        self._ask(protocol.Adjust(id=0, perturbation=number, enabled=enabled, strength=strength))

    def __repr__(self) -> str:
        shown = self._now(self._id)
        state = "removed" if shown is None else "on" if shown.enabled else "off"
        return f"Steered({self.site!r}, {self.expression}, {state})"
