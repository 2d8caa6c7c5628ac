"""A run of Weights & Biases. Its workspace groups names by what stands before the first slash.

A run has one counter of steps, which never goes back, and what is logged for an earlier step is
lost. So what is written is logged at the step of the loop or at the run's present one, whichever is
later; `nni/step` has the step of the loop and is the axis of all that is written here.
While the user's own code moves the counter, we never move it past the step of the loop, because
what the user logs for a step before would be lost; what has no place yet waits.
"""

from __future__ import annotations

import importlib
from collections import deque
from typing import Any, Final

from nnx_inspector.trackers.scalars import ALL_GROUPS, OWN_GROUP, Entry
from nnx_inspector.trackers.summary_writer import HISTOGRAM
from nnx_inspector.trackers.tracker import Tracker, slash_joined

STEP: Final = f"{OWN_GROUP}/step"
"""The name of the step of the loop."""


class WandbRun(Tracker):
    """Writes to what `wandb.init` returns."""

    def __init__(self, to: Any):
        super().__init__(f"The W&B run {getattr(to, 'name', None) or getattr(to, 'id', '')!r}")
        self._to = to
        self._waiting: deque[tuple[int, dict[str, object]]] = deque()
        self._at = self._step = -1  # what we have logged last: the run's step, that of the loop
        self._row: set[str] = set()  # and the names
        self._shared = False  # whether the user's code moves the counter too
        self._defined = False

    def log(self, entry: Entry) -> None:
        step, scalars, histograms, text = entry
        data: dict[str, object] = {
            slash_joined(group, site, statistic): value for group, site, statistic, value in scalars
        }
        if histograms:
            wandb = importlib.import_module("wandb")  # there already: the run is one of its
            for one in histograms:
                shown = wandb.Histogram(np_histogram=(one.counts, one.edges))
                data[slash_joined(one.group, one.site, HISTOGRAM)] = shown
        if text is not None:
            data[text[0]] = text[1]
        if not self._defined:
            self._defined = True
            self._to.define_metric(STEP, hidden=True)
            for group in ALL_GROUPS:
                self._to.define_metric(f"{group}/*", step_metric=STEP)
        if self._waiting and self._waiting[-1][0] == step:
            self._waiting[-1][1].update(data)
        else:
            self._waiting.append((step, {STEP: step, **data}))
        self._write()

    def flush(self) -> None:
        self._write(all_of_it=True)

    def _write(self, *, all_of_it: bool = False) -> None:
        while self._waiting:
            step, data = self._waiting[0]
            now = int(self._to.step)
            self._shared |= now > self._at >= 0
            at, names = max(now, step), data.keys() - {STEP}
            another = at > self._at or step != self._step or bool(names & self._row)
            if another and at <= self._at:
                if self._shared and not all_of_it:
                    return
                at = self._at + 1
            self._waiting.popleft()
            self._row = names if another else self._row | names
            self._at, self._step = at, step
            self._to.log(data, step=at)
