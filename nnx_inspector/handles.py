"""The perturbations of one inspector: what is on, where, and how strong.

Invariant: a handle's sites are fixed when it is made and its kind never changes, so that a program
with a place for it needs no second compilation. Does not run anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from nnx_inspector.errors import InspectorError
from nnx_inspector.perturbation import OFF, Live, combine, require_live


class Handle:
    """One perturbation of an inspector: switch it, tune it, remove it. Also a context manager.

    Attributes:
        id: its number within the inspector.
        site: the site key or pattern it was made with.
        sites: the keys it acts on.
    """

    def __init__(
        self,
        number: int,
        site: str,
        sites: Iterable[str],
        perturbation: Live,
        changed: Callable[[Handle], None],
    ):
        self.id = number
        self.site = site
        self.sites = tuple(sites)
        self._perturbation = require_live(perturbation)
        self._enabled = True
        self._removed = False
        self._changed = changed

    @property
    def enabled(self) -> bool:
        """Whether it is on. Setting it takes effect at the next pass and compiles nothing."""
        return self._enabled and not self._removed

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"enabled is True or False, got {value!r}.")
        self._require_live()
        if value != self._enabled:
            self._enabled = value
            self._changed(self)

    @property
    def perturbation(self) -> Live:
        """What is done. May be set to another strength of the same kind."""
        return self._perturbation

    @perturbation.setter
    def perturbation(self, value: Live) -> None:
        self._require_live()
        if type(require_live(value)) is not type(self._perturbation):
            raise TypeError(
                f"This handle is a {type(self._perturbation).__name__} on {self.site!r}; it takes "
                f"another strength, not a {type(value).__name__}. Remove it and add the other."
            )
        if value != self._perturbation:
            self._perturbation = value
            self._changed(self)

    @property
    def removed(self) -> bool:
        """Whether it has been taken away for good."""
        return self._removed

    def remove(self) -> None:
        """Take it away; twice is once."""
        if not self._removed:
            self._removed = True
            self._changed(self)

    def _require_live(self) -> None:
        if self._removed:
            raise InspectorError(
                f"This perturbation of {self.site!r} was removed. Add it again with insp.perturb."
            )

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "removed" if self._removed else "on" if self._enabled else "off"
        return f"Handle({self.site!r}, {self._perturbation!r}, {state})"


class Handles:
    """All perturbations of one inspector, in the order in which they were made."""

    def __init__(self, changed: Callable[[], None]):
        self._lock = threading.RLock()
        self._live: dict[int, Handle] = {}
        self._last = 0
        self._changed = changed

    def add(self, site: str, sites: Iterable[str], perturbation: Live) -> Handle:
        """A new perturbation, switched on."""
        with self._lock:
            self._last += 1
            handle = Handle(self._last, site, sites, perturbation, self._on_change)
            self._live[handle.id] = handle
        self._changed()
        return handle

    def _on_change(self, handle: Handle) -> None:
        if handle.removed:
            with self._lock:
                self._live.pop(handle.id, None)
        self._changed()

    def get(self, number: int) -> Handle:
        """The live handle with this number."""
        with self._lock:
            if number not in self._live:
                raise KeyError(
                    f"There is no perturbation with the number {number}; it was removed."
                )
            return self._live[number]

    def all(self) -> list[Handle]:
        """The live handles, oldest first."""
        with self._lock:
            return list(self._live.values())

    def rows(self) -> dict[str, tuple[float, float]]:
        """For each site with something switched on, its row (see `perturbation`)."""
        by_site: dict[str, list[Live]] = {}
        for handle in self.all():
            if handle.enabled:
                for site in handle.sites:
                    by_site.setdefault(site, []).append(handle.perturbation)
        combined = {site: combine(several) for site, several in by_site.items()}
        return {site: row for site, row in combined.items() if row[0] != OFF}
