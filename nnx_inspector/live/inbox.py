"""The watched passes: which one is under way, and the summaries that arrived of each.

A pass begins when a program reaches the outermost call of the model; what it does and sends is
fixed from then on. Invariant: data is kept under the number of its own pass, however late it
arrives, and nothing is kept of a pass that is not sampled. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nnx_inspector.stats.bins import NAN_BIN
from nnx_inspector.stats.summary import Summary, merge

Arrived = dict[tuple[str, str], list[Summary]]
"""(site, quantity) -> a summary for each call, in order of arrival."""


@dataclasses.dataclass(frozen=True)
class Begun:
    """The pass that is under way.

    Attributes:
        number: how many passes began before it.
        sampled: whether the data that it sends is kept.
        setting: the perturbations in force, from its beginning to its end.
    """

    number: int
    sampled: bool
    setting: Any


class Inbox:
    """The passes of one session. Any thread may use it.

    Attributes:
        every: passes 0, `every`, 2 * `every` and so on are sampled; 0 samples none.
        late: how many summaries arrived after their pass was taken.
        next_begins: if set, called when the pass after a sampled one begins, with what has arrived
            of the sampled pass. It must not raise.
    """

    def __init__(self, setting: Any):
        self.every = 1
        self.late = 0
        self.next_begins: Callable[[Taken], None] | None = None
        self._lock = threading.Condition()
        self._count = 0
        self._now = Begun(-1, False, setting)
        self._arrived: dict[int, Arrived] = {}
        self._settings: dict[int, Any] = {}
        self._besides: dict[int, Besides] = {}

    def begin(self, setting: Any) -> Begun:
        """Begin a pass, with this setting."""
        with self._lock:
            before = self._now_arrived() if self.next_begins is not None else None
            number = self._count
            self._count += 1
            sampled = self.every > 0 and number % self.every == 0
            self._now = Begun(number, sampled, setting)
            if sampled:
                self._arrived[number] = {}
                self._settings[number] = setting
                self._besides[number] = Besides()
                self._lock.notify_all()
            now, tell = self._now, self.next_begins
        if before is not None and tell is not None:
            tell(before)
        return now

    def _now_arrived(self) -> Taken | None:
        """A copy of what has arrived of the pass under way, or None if it is not sampled."""
        number = self._now.number
        if number not in self._arrived:
            return None
        arrived = {what: list(found) for what, found in self._arrived[number].items()}
        return Taken(number, self._settings[number], arrived)

    def restart(self, every: int) -> None:
        """Count passes from 0 again, and sample every `every`-th one."""
        with self._lock:
            self.every, self._count = every, 0
            self._arrived, self._settings, self._besides = {}, {}, {}

    def wait_for_more_than(self, number: int, over: Callable[[], bool]) -> bool:
        """Wait until more than `number` sampled passes have begun; return False if `over` first."""
        with self._lock:
            self._lock.wait_for(lambda: over() or len(self._arrived) > number)
            return not over()

    def wake(self) -> None:
        """Let waiting threads check whether it is over."""
        with self._lock:
            self._lock.notify_all()

    def receive(self, number: int, site: str, quantity: str, summary: Summary) -> None:
        """Take in a summary of a pass."""
        with self._lock:
            arrived = self._arrived.get(number)
            if arrived is None:
                self.late += 1
                return
            arrived.setdefault((site, quantity), []).append(summary)

    def receive_gauge(self, number: int, site: str, gauge: Any) -> None:
        """Take in the gauge of a call of a site."""
        with self._lock:
            if number in self._besides:
                self._besides[number].gauges.setdefault(site, []).append(gauge)

    def receive_states(self, number: int, states: Mapping[str, Any], call: Any) -> None:
        """Take in the parameters' states that a pass sends as it begins, and its outermost call."""
        with self._lock:
            if number in self._besides:
                self._besides[number].states.update(states)
                self._besides[number].calls.append(call)

    @property
    def count(self) -> int:
        """The number of passes that have begun."""
        return self._count

    def holds_nan(self) -> bool:
        """Whether a summary that has arrived and was not yet taken counts a NaN."""
        with self._lock:
            summaries = [s for of in self._arrived.values() for found in of.values() for s in found]
        return any(np.any(np.asarray(s.bins)[..., NAN_BIN]) for s in summaries)

    def take(self, *, besides: int = 0) -> list[Taken]:
        """Take the sampled passes, oldest first, and leave the newest `besides` for later."""
        with self._lock:
            numbers = list(self._arrived)
            numbers = numbers[: max(0, len(numbers) - besides)]
            return [
                Taken(
                    n,
                    self._settings.pop(n),
                    self._arrived.pop(n),
                    self._besides.pop(n),
                )
                for n in numbers
            ]


@dataclasses.dataclass
class Besides:
    """What a pass sent besides summaries.

    Attributes:
        gauges: site -> the gauge of each call, `[..., LENGTH]`.
        states: parameter's path -> its state.
        calls: the outermost calls in shapes, None for a call that cannot be described.
    """

    gauges: dict[str, list[Any]] = dataclasses.field(default_factory=lambda: {})
    states: dict[str, Any] = dataclasses.field(default_factory=lambda: {})
    calls: list[Any] = dataclasses.field(default_factory=lambda: [])


@dataclasses.dataclass(frozen=True)
class Taken:
    """One pass that was taken out of an inbox.

    Attributes:
        number: how many passes began before it.
        setting: the perturbations that were in force.
        arrived: its summaries; their rows are the iterations of the scans around the site.
        besides: what else it sent.
    """

    number: int
    setting: Any
    arrived: Mapping[tuple[str, str], list[Summary]]
    besides: Besides = dataclasses.field(default_factory=Besides)

    @property
    def perturbed(self) -> bool:
        """Whether a perturbation was on."""
        return bool(self.setting.active)


def merged(passes: list[Taken], keys: tuple[str, ...] = ()) -> dict[str, dict[str, Summary]]:
    """Site -> quantity -> the summary over all calls of some passes, with `keys` first."""
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
