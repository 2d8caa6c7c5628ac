"""The perturbations of one inspector: which are on, their sites, strengths and places.

On one site the handles act in the order in which they were added. `Zero` and `Scale` on outputs
of whole sites are rows, for which every program has room, unless an older handle has a place on
such a site: rows act before places. Invariant: switching and tuning never change the places, and
a free place of equal code is used again. Does not run or compile anything.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from nnx_inspector.errors import InspectorError
from nnx_inspector.live.diagnostics import ExpectedPerturbation
from nnx_inspector.perturbations.places import (
    OFF,
    PARAMETER,
    AnyPerturbation,
    Data,
    Place,
    RowKind,
    Setting,
    combine_rows,
    data_of,
    fits_row,
    place_of,
    require_perturbation,
)


class Handle:
    """One perturbation of an inspector: switch it, tune it, remove it. Also a context manager.

    Attributes:
        id: its number within the inspector.
        site: the site key or pattern it was made with.
        sites: the keys it acts on.
        rows: the layer of stacked sites that it acts on, () for all layers.
        place: the place it needs, unless it is a row.
    """

    def __init__(
        self,
        number: int,
        site: str,
        sites: Iterable[str],
        perturbation: AnyPerturbation,
        owner: Handles,
        rows: tuple[int, ...] = (),
    ):
        self.id = number
        self.site = site
        self.sites = tuple(sites)
        self.rows = rows
        self._set_perturbation(require_perturbation(perturbation))
        self._enabled = True
        self._removed = False
        self._owner = owner

    @property
    def enabled(self) -> bool:
        """Whether it is on. Setting it takes effect at the next pass, in a loop that marks its
        steps at the next step, and compiles nothing.
        """
        return self._enabled and not self._removed

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"enabled must be True or False, got {value!r}.")
        self._owner.change(self, enabled=value)

    @property
    def perturbation(self) -> AnyPerturbation:
        """The perturbation; setting one of the same kind and shapes compiles nothing."""
        return self._perturbation

    @perturbation.setter
    def perturbation(self, value: AnyPerturbation) -> None:
        self._owner.change(self, perturbation=require_perturbation(value))

    @property
    def strength(self) -> float | None:
        """The number that a slider tunes, or None; setting it sets the perturbation."""
        return self._perturbation.tuned_to

    @strength.setter
    def strength(self, value: float) -> None:
        self.perturbation = self._perturbation.tuned(value)

    def _set_perturbation(self, value: AnyPerturbation) -> None:
        self._perturbation = value
        self.place = place_of(value, self.sites, self.rows)
        # read once: they may be on a device, and the user may later write to them
        self._numbers = tuple(np.array(a) for a in data_of(value))

    @property
    def data(self) -> Data:
        """The data that its place reads: whether it is on, and its numbers."""
        return (np.array(self.enabled), *self._numbers)

    @property
    def compiling(self) -> bool:
        """Whether a program with a place for it is still being compiled."""
        return self._owner.is_compiling(self)

    @property
    def not_acting(self) -> str:
        """Why it does nothing in the pass that runs or ran last; "" if it acts, is off, or is not
        known yet.

        Reasons are a call that does not take place or cannot be attributed to the model, a gradient
        that is not computed, and a kind that a loop has no place for. A perturbation that acts
        without changing anything, such as `Scale(1.0)`, has no reason: see `insp.effect`.
        """
        return self._owner.why_idle(self)

    @property
    def removed(self) -> bool:
        return self._removed

    def remove(self) -> None:
        """Remove it. A second call does nothing."""
        if not self._removed:
            self._owner.remove(self)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "removed" if self._removed else "on" if self._enabled else "off"
        if self.not_acting:
            state += f", not acting here: {self.not_acting}"
        return f"Handle({self.site!r}, {self._perturbation!r}, {state})"


@dataclasses.dataclass(frozen=True)
class _Need:
    """A handle, and the place that it needs in the last layout, None for a row."""

    handle: Handle
    place: Place | None


@dataclasses.dataclass(frozen=True)
class _Assignment:
    """The places of one program, and the handles that own them."""

    places: tuple[Place, ...] = ()
    owners: Mapping[int, int] = dataclasses.field(default_factory=dict[int, int])

    @property
    def order(self) -> list[int]:
        """The numbers of the places. Places of parameters come last, as in a setting."""
        return sorted(range(len(self.places)), key=lambda n: self.places[n].at == PARAMETER)

    @property
    def code(self) -> tuple[Place, ...]:
        """The places of its settings."""
        return tuple(self.places[n] for n in self.order)

    def reassigned(self, needs: Sequence[_Need]) -> _Assignment | None:
        """The same places for these handles, oldest first; None if they do not fit."""
        owners: dict[int, int] = {}
        wanted = [n for n in needs if n.place is not None]
        for one in wanted:  # a handle that has a place keeps it
            at = self.owners.get(one.handle.id)
            if at is not None and self.places[at] == one.place:
                owners[one.handle.id] = at
        for one in wanted:
            if one.handle.id not in owners:
                free = (
                    at
                    for at, place in enumerate(self.places)
                    if place == one.place and at not in owners.values()
                )
                fits = (at for at in free if self._in_order(at, one, wanted, owners))
                at = next(fits, None)
                if at is None:
                    return None
                owners[one.handle.id] = at
        return _Assignment(self.places, owners)

    def _in_order(
        self, at: int, one: _Need, wanted: Sequence[_Need], owners: Mapping[int, int]
    ) -> bool:
        for other in wanted:
            place, there = other.place, owners.get(other.handle.id)
            if there is None or place is None or one.place is None or other is one:
                continue
            if _overlap(place, one.place) and (there < at) != (other.handle.id < one.handle.id):
                return False
        return True


def _overlap(a: Place, b: Place) -> bool:
    """Whether the order of two places matters."""
    if a.at == b.at == PARAMETER:
        return True  # their keys are globs
    return a.at == b.at and not set(a.sites).isdisjoint(b.sites)


class Handles:
    """All perturbations of one inspector, in the order in which they were made.

    Attributes:
        on_change: called after each change.
        check: raises an error if a handle cannot have another value.
        elsewhere: whether the running loop's program for a handle is being compiled; None if no
            loop runs.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._live: dict[int, Handle] = {}
        self._last = 0
        self.on_change: Callable[[], object] = lambda: None
        self.check: Callable[[AnyPerturbation, Handle], object] = lambda value, handle: None
        self._with_place: set[int] = set()
        self._wanted = _Assignment()
        self._armed = _Assignment()
        self._given_up: tuple[Place, ...] | None = None
        self._why_given_up = ""
        self._idle: dict[int, str] = {}
        self.compiles_in_loop: Callable[[Handle], bool | None] = lambda handle: None

    def add(
        self,
        site: str,
        sites: Iterable[str],
        perturbation: AnyPerturbation,
        rows: tuple[int, ...] = (),
    ) -> Handle:
        with self._lock:
            self._last += 1
            handle = Handle(self._last, site, sites, perturbation, self, rows)
            self._live[handle.id] = handle
            self._give_places()
        self.on_change()
        return handle

    def change(
        self,
        handle: Handle,
        *,
        enabled: bool | None = None,
        perturbation: AnyPerturbation | None = None,
    ) -> None:
        """Switch a handle, give it another perturbation of its kind, or both in one change."""
        before = handle.perturbation
        if handle.removed:
            raise InspectorError(
                f"This perturbation of {handle.site!r} was removed. Add it again with insp.perturb."
            )
        if perturbation is not None:
            if type(perturbation) is not type(before):
                raise TypeError(
                    f"This handle is a {type(before).__name__} on {handle.site!r}; it cannot "
                    f"become a {type(perturbation).__name__}. Remove it and add the other."
                )
            self.check(perturbation, handle)
        new = before if perturbation is None else perturbation
        if new == before and enabled in (None, handle.enabled):
            return
        with self._lock:
            if new != before:
                handle._set_perturbation(new)
            if enabled is not None:
                handle._enabled = enabled
            if not handle.enabled:
                self._idle.pop(handle.id, None)  # unknown until the next pass
            self._give_places()
        self.on_change()

    def remove(self, handle: Handle) -> None:
        with self._lock:
            handle._removed = True
            for those in (self._idle, self._live):
                those.pop(handle.id, None)
            self._with_place.discard(handle.id)
            self._give_places()
        self.on_change()

    def undo_add(self, handle: Handle, layout: _Assignment) -> None:
        """Remove the handle that was added last, and have the places as they were before."""
        with self._lock:
            self.remove(handle)
            self._wanted = layout

    def switch_all(self, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"switch_all takes True or False, got {enabled!r}.")
        with self._lock:
            others = [h for h in self._live.values() if h.enabled != enabled]
            for handle in others:
                handle._enabled = enabled
                self._idle.pop(handle.id, None)
            self._give_places()
        if others:
            self.on_change()

    def place_in_use(self, handle: Handle) -> Place | None:
        """The place where a handle acts, None for a row."""
        with self._lock:
            return handle.place if handle.id in self._with_place else None

    def expected(self, handles: Iterable[Handle]) -> list[ExpectedPerturbation]:
        """What the current programs should apply of some handles."""
        return [
            ExpectedPerturbation(
                number=one.id,
                perturbation=one.perturbation,
                place=one.place,
                in_use=self.place_in_use(one),
                sites=tuple(one.sites),
                of_gradient=one.perturbation.acts_on == "gradient",
                compiling=one.compiling,
            )
            for one in handles
            if one.enabled
        ]

    def set_idle(self, idle: Mapping[int, str]) -> None:
        """Set handle number -> why it did nothing in the last pass, "" if it acted."""
        with self._lock:
            self._idle |= idle

    def why_idle(self, handle: Handle) -> str:
        """See `Handle.not_acting`."""
        with self._lock:
            if not handle.enabled:
                return ""
            if handle.id in self._with_place and self._given_up == self._wanted.places:
                return f"the program with a place for it cannot be compiled: {self._why_given_up}"
            return self._idle.get(handle.id, "")

    def get(self, number: int) -> Handle:
        with self._lock:
            if number not in self._live:
                raise KeyError(
                    f"There is no perturbation with the number {number}; it was removed."
                )
            return self._live[number]

    def all(self) -> list[Handle]:
        with self._lock:
            return list(self._live.values())

    # --------------------------------------------------------------- settings

    @property
    def layout(self) -> _Assignment:
        """Which places there are now, and whose they are; see `undo_add`."""
        return self._wanted

    def setting(self, *, armed: bool = False) -> Setting:
        """The active perturbations, and all places that they need.

        Args:
            armed: only the perturbations that the program of `arm` has places for.
        """
        with self._lock:
            return self._setting(self._armed if armed else self._wanted, self._needs())

    def settings_alone(self) -> tuple[Setting, dict[int, Setting]]:
        """The setting with all active perturbations, and by number those with one each."""
        with self._lock:
            needs = self._needs()
            alone = {
                one.handle.id: self._setting(self._wanted, [one])
                for one in needs
                if one.handle.enabled
            }
            return self._setting(self._wanted, needs), alone

    def _setting(self, layout: _Assignment, needs: Sequence[_Need]) -> Setting:
        """The setting of these handles, with the places of all."""
        data = [place.off_data() for place in layout.places]
        for one in needs:
            at = layout.owners.get(one.handle.id)
            if at is not None and layout.places[at] == one.place:
                data[at] = one.handle.data
        return Setting(self._rows(needs), layout.code, tuple(data[n] for n in layout.order))

    def arm(self, setting: Setting) -> None:
        """The program of this setting is now the running one."""
        with self._lock:
            if setting.places == self._wanted.code:
                self._armed = self._wanted

    def give_up(self, why: str) -> None:
        """The program with all wanted places cannot be compiled."""
        with self._lock:
            self._given_up, self._why_given_up = self._wanted.places, why

    def is_compiling(self, handle: Handle) -> bool:
        """Whether a handle is live and the running program has no place for it."""
        with self._lock:
            if handle.id not in self._with_place:
                return False
            in_loop = self.compiles_in_loop(handle)
            if in_loop is not None:
                return in_loop
            if self._given_up == self._wanted.places:
                return False
            at = self._armed.owners.get(handle.id)
            return at is None or self._armed.places[at] != handle.place

    def _rows(self, needs: Iterable[_Need]) -> dict[str, tuple[float, float]]:
        by_site: dict[str, list[RowKind]] = {}
        for one in needs:
            value = one.handle.perturbation
            if one.place is None and one.handle.enabled and fits_row(value):
                for site in one.handle.sites:
                    by_site.setdefault(site, []).append(value)
        combined = {site: combine_rows(several) for site, several in by_site.items()}
        return {site: row for site, row in combined.items() if row[0] != OFF}

    def _needs(self) -> list[_Need]:
        """The place that each handle needs, oldest first."""
        return [
            _Need(handle, handle.place if handle.id in self._with_place else None)
            for handle in self._live.values()
        ]

    def _give_places(self) -> None:
        taken: set[str] = set()  # sites where an older handle has a place on the output
        for handle in self._live.values():
            as_row = fits_row(handle.perturbation) and not handle.rows
            if not as_row or not taken.isdisjoint(handle.sites):
                self._with_place.add(handle.id)  # for good: going back would compile again
            if handle.id in self._with_place and handle.perturbation.at == "output":
                taken |= set(handle.sites)
        needs = self._needs()
        fitted = self._wanted.reassigned(needs)
        if fitted is None:
            places = tuple(one.place for one in needs if one.place is not None)
            owners = (one.handle.id for one in needs if one.place is not None)
            fitted = _Assignment(places, {number: at for at, number in enumerate(owners)})
        self._wanted = fitted
        # if the places are the same, the running program serves the new owners
        if self._armed.places == fitted.places:
            self._armed = fitted
