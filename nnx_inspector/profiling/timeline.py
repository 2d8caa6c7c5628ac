"""Who had the time between two moments, when operations overlap on several threads or streams.

Invariant: the shares and the idle time add up to the whole exactly. Each moment counts once: where
several operations run, each has an equal part of it. Knows nothing of programs and modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable


@dataclasses.dataclass(frozen=True)
class Event:
    """One run of an operation, in nanoseconds.

    Attributes:
        key: the operation.
        waits: whether it only waits for others, as a loop waits for its body. Then it counts where
            nothing else runs.
    """

    start: float
    end: float
    key: Hashable
    waits: bool = False


def shares(
    events: Iterable[Event], start: float, end: float
) -> tuple[dict[Hashable, float], float]:
    """By operation, its share of the time from `start` to `end`, and how long nothing ran."""
    changes: list[tuple[float, int, Event]] = []
    for event in events:
        a, b = max(event.start, start), min(event.end, end)
        if a < b:
            changes += [(a, 1, event), (b, -1, event)]
    changes.sort(key=lambda change: change[:2])
    running: dict[tuple[bool, Hashable], int] = {}
    found: dict[Hashable, float] = {}
    idle, at = 0.0, start
    for moment, step, event in changes:
        if moment > at:
            idle += _divide(running, moment - at, found)
            at = moment
        kind = (event.waits, event.key)
        running[kind] = running.get(kind, 0) + step
        if not running[kind]:
            del running[kind]
    return found, idle + (end - at)


def _divide(
    running: dict[tuple[bool, Hashable], int], time: float, found: dict[Hashable, float]
) -> float:
    """Give a moment to what runs in it; returns the part that nobody has."""
    working = {key: n for (waits, key), n in running.items() if not waits}
    working = working or {key: n for (_, key), n in running.items()}
    total = sum(working.values())
    for key, n in working.items():
        found[key] = found.get(key, 0.0) + time * n / total
    return 0.0 if working else time
