"""What watched passes have told: which pass is under way, and the summaries of each.

A pass begins when a program gets to the outermost call of the model; all that it does and tells
is settled then. Invariant: whatever arrives is kept under the number of its own pass, however
late, and passes that are not sampled keep nothing. Knows no jax.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from nnx_inspector.stats.bins import NAN_BIN
from nnx_inspector.stats.summary import Summary, merge

Arrived = dict[tuple[str, str], list[Summary]]
"""(site, quantity) -> a summary for each call, in the order in which they arrived."""


@dataclasses.dataclass(frozen=True)
class Begun:
    """The pass that is under way.

    Attributes:
        number: of passes that began before it.
        sampled: whether what it tells is kept.
        setting: what is done in it, from its beginning to its end.
    """

    number: int
    sampled: bool
    setting: Any


class Inbox:
    """The passes of one session; used by any thread.

    Attributes:
        every: passes 0, every, 2 every ... are sampled; 0 for none.
        late: how many summaries came after their pass was taken.
        next_begins: told, where it is there, of a sampled pass when the next one begins: what has
            arrived of it by then. It must not raise.
    """

    def __init__(self, setting: Any):
        self.every = 1
        self.late = 0
        self.next_begins: Callable[[Taken], None] | None = None
        self._lock = threading.Condition()
        self._count = 0
        self._now = Begun(-1, False, setting)
        self._turns: dict[Hashable, int] = {}
        self._arrived: dict[int, Arrived] = {}
        self._turns_of: dict[int, dict[tuple[str, str], list[int]]] = {}
        self._settings: dict[int, Any] = {}
        self._besides: dict[int, Besides] = {}

    def begin(self, setting: Any) -> Begun:
        """A pass begins, with what is set now."""
        with self._lock:
            before = self._now_arrived() if self.next_begins is not None else None
            number = self._count
            self._count += 1
            sampled = self.every > 0 and number % self.every == 0
            self._now = Begun(number, sampled, setting)
            self._turns = {}
            if sampled:
                self._arrived[number] = {}
                self._turns_of[number] = {}
                self._settings[number] = setting
                self._besides[number] = Besides()
                self._lock.notify_all()
            now, tell = self._now, self.next_begins
        if before is not None and tell is not None:
            tell(before)
        return now

    def _now_arrived(self) -> Taken | None:
        """What there is of the pass under way, where it is sampled; it stays here."""
        number = self._now.number
        if number not in self._arrived:
            return None
        arrived = {what: list(found) for what, found in self._arrived[number].items()}
        turns = {what: list(found) for what, found in self._turns_of[number].items()}
        return Taken(number, self._settings[number], arrived, turns)

    def restart(self, every: int) -> None:
        """Count passes from 0 again, and sample every `every`-th."""
        with self._lock:
            self.every, self._count = every, 0
            self._arrived, self._turns_of, self._settings = {}, {}, {}
            self._besides = {}

    def wait_for_more_than(self, number: int, over: Callable[[], bool]) -> bool:
        """Wait until more sampled passes than that have begun; False once it is over."""
        with self._lock:
            self._lock.wait_for(lambda: over() or len(self._arrived) > number)
            return not over()

    def wake(self) -> None:
        """Let those who wait look whether it is over."""
        with self._lock:
            self._lock.notify_all()

    def turn(self, of: Hashable) -> tuple[Begun, int]:
        """The pass under way, and how often it was asked for by this part of its program before."""
        with self._lock:
            before = self._turns.get(of, 0)
            self._turns[of] = before + 1
            return self._now, before

    def receive(
        self, number: int, site: str, quantity: str, summary: Summary, turn: int = 0
    ) -> None:
        """A summary of a pass has arrived, from this turn of the part that sends it."""
        with self._lock:
            arrived = self._arrived.get(number)
            if arrived is None:
                self.late += 1
                return
            arrived.setdefault((site, quantity), []).append(summary)
            self._turns_of[number].setdefault((site, quantity), []).append(turn)

    def receive_gauge(self, number: int, site: str, gauge: Any, turn: int = 0) -> None:
        """What a gauge of a site's output says in a pass, from this turn of its part."""
        with self._lock:
            if number in self._besides:
                self._besides[number].gauges.setdefault(site, []).append((turn, gauge))

    def receive_states(self, number: int, states: Mapping[str, Any], call: Any) -> None:
        """What a pass says of its parameters as it begins, and which call it is of."""
        with self._lock:
            if number in self._besides:
                self._besides[number].states.update(states)
                self._besides[number].calls.append(call)

    @property
    def count(self) -> int:
        """How many passes have begun."""
        return self._count

    def holds_nan(self) -> bool:
        """Whether a summary that has arrived, and was not taken, counts a NaN."""
        with self._lock:
            summaries = [s for of in self._arrived.values() for found in of.values() for s in found]
        return any(np.any(np.asarray(s.bins)[..., NAN_BIN]) for s in summaries)

    def take(self, *, besides: int = 0) -> list[Taken]:
        """The sampled passes, oldest first; the newest `besides` of them are left for later."""
        with self._lock:
            numbers = list(self._arrived)
            numbers = numbers[: max(0, len(numbers) - besides)]
            return [
                Taken(
                    n,
                    self._settings.pop(n),
                    self._arrived.pop(n),
                    self._turns_of.pop(n),
                    self._besides.pop(n),
                )
                for n in numbers
            ]


@dataclasses.dataclass
class Besides:
    """What a pass told besides summaries.

    Attributes:
        gauges: site -> the turn and the gauge of each call.
        states: parameter's path -> what was sent of it.
        calls: what the outermost calls looked like, None where that cannot be told.
    """

    gauges: dict[str, list[tuple[int, Any]]] = dataclasses.field(default_factory=lambda: {})
    states: dict[str, Any] = dataclasses.field(default_factory=lambda: {})
    calls: list[Any] = dataclasses.field(default_factory=lambda: [])


@dataclasses.dataclass(frozen=True)
class Taken:
    """One pass that was taken out of an inbox.

    Attributes:
        number: of passes that began before it.
        setting: what was done in it.
        arrived: its summaries.
        turns: for each of them the turn in which it was told.
        besides: what else it told.
    """

    number: int
    setting: Any
    arrived: Mapping[tuple[str, str], list[Summary]]
    turns: Mapping[tuple[str, str], list[int]]
    besides: Besides = dataclasses.field(default_factory=Besides)

    @property
    def perturbed(self) -> bool:
        """Whether something was perturbed in it."""
        return bool(self.setting.active)

    def told(self) -> dict[tuple[str, str], list[tuple[int, Summary]]]:
        """Its summaries with their turns."""
        return {
            what: list(zip(self.turns[what], found, strict=True))
            for what, found in self.arrived.items()
        }


def merged(passes: list[Taken], keys: tuple[str, ...] = ()) -> dict[str, dict[str, Summary]]:
    """Site -> quantity -> summary over all calls of some passes; `keys` come first."""
    parts: Arrived = {}
    for one in passes:
        for what, summaries in one.arrived.items():
            parts.setdefault(what, []).extend(summaries)
    out: dict[str, dict[str, Summary]] = {}
    for site in dict.fromkeys((*keys, *(site for site, _ in parts))):
        for quantity in ("output", "gradient"):
            if (site, quantity) in parts:
                out.setdefault(site, {})[quantity] = merge(parts[site, quantity])
    return out
