"""A run of MLflow, which groups names by their slashes. It has no histograms.

Findings are text files among the run's artifacts. The run is known by its id: which run is active
depends on the thread.
"""

from __future__ import annotations

import importlib
import time
from typing import Any, Final

from nnx_inspector.trackers.scalars import Entry
from nnx_inspector.trackers.tracker import AllowedNames, Tracker, slash_joined

MOST_PER_BATCH: Final = 1000
"""The most metrics that MLflow takes at a time."""


class MlflowRun(Tracker):
    """Writes to an MLflow run, given its id."""

    takes_histograms = False

    def __init__(self, run_id: str):
        super().__init__(f"The MLflow run {run_id!r}")
        self.lacks = f"{self.name} takes no histograms, because MLflow has none."
        self._run = run_id
        self._names = AllowedNames(r"[^-/\w. ]")
        self._mlflow: Any = importlib.import_module("mlflow")  # there already: a run is one of its
        self._client = self._mlflow.MlflowClient()

    def log(self, entry: Entry) -> None:
        step, scalars, _, text = entry
        now, of = int(1000 * time.time()), self._mlflow.entities.Metric
        found = [
            of(self._names.of(slash_joined(group, site, statistic)), value, now, step)
            for group, site, statistic, value in scalars
        ]
        for start in range(0, len(found), MOST_PER_BATCH):
            self._client.log_batch(self._run, metrics=found[start : start + MOST_PER_BATCH])
        if text is not None:
            title, said = text
            self._client.log_text(self._run, said, f"{self._names.of(title)}.txt")
