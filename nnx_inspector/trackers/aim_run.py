"""A run of Aim, which groups by context: a statistic is a metric, and its site is the context; of a
head or an expert, its number too.
"""

from __future__ import annotations

import importlib
from typing import Any

from nnx_inspector.trackers.scalars import FINDINGS, METRICS, NUMBERED, Entry
from nnx_inspector.trackers.tracker import Tracker, slash_joined


class AimRun(Tracker):
    """Writes to an `aim.Run`."""

    def __init__(self, to: Any):
        super().__init__(f"The Aim run {getattr(to, 'hash', '')!r}")
        self._to = to

    def log(self, entry: Entry) -> None:
        step, scalars, histograms, text = entry
        track = self._to.track
        for group, site, statistic, value in scalars:
            if group == METRICS:
                track(value, name=slash_joined(group, site), step=step)
            else:
                context, (key, _, number) = {"site": site}, site.rpartition("/")
                if group in NUMBERED and number.isdigit():
                    context = {"site": key, NUMBERED[group]: number}
                track(value, name=slash_joined(group, statistic), step=step, context=context)
        if not histograms and text is None:
            return
        aim = importlib.import_module("aim")  # there already: the run is one of its
        for one in histograms:
            ends = (float(one.edges[0]), float(one.edges[-1]))
            shown = aim.Distribution(hist=one.counts, bin_range=ends)
            track(shown, name=one.group, step=step, context={"site": one.site})
        if text is not None:
            title, said = text
            where = {"finding": title.removeprefix(f"{FINDINGS}/")}
            track(aim.Text(said), name=FINDINGS, step=step, context=where)
