"""A SummaryWriter of tensorboardX or torch.utils.tensorboard, or what has its methods.

TensorBoard groups names by what stands before the first slash. Without `add_histogram_raw` there
are no histograms, and without `add_text` no findings.
"""

from __future__ import annotations

from typing import Any

from nnx_inspector.trackers.scalars import Entry
from nnx_inspector.trackers.tracker import AllowedNames, Tracker, slash_joined

HISTOGRAM = "histogram"
"""The last part of a histogram's name, which no scalar has."""


class SummaryWriter(Tracker):
    """Writes to an object with `add_scalar`."""

    def __init__(self, to: Any):
        super().__init__(f"The {type(to).__name__} of {type(to).__module__}")
        self._to, self._names = to, AllowedNames(r"[^-/\w.]")
        missing = {"add_histogram_raw": "histograms", "add_text": "findings"}
        lacking = [f"{what} ({method})" for method, what in missing.items() if not _has(to, method)]
        self.lacks = f"{self.name} takes no {' and no '.join(lacking)}." if lacking else ""
        self.takes_histograms = _has(to, "add_histogram_raw")
        self.takes_findings = _has(to, "add_text")

    def log(self, entry: Entry) -> None:
        step, scalars, histograms, text = entry
        name = self._names.of
        for group, site, statistic, value in scalars:
            self._to.add_scalar(name(slash_joined(group, site, statistic)), value, step)
        for one in histograms:
            limits, counts = one.edges[1:].tolist(), one.counts.tolist()
            if one.low == one.high:  # TensorBoard has its buckets begin at the smallest value
                limits, counts = [one.high], [sum(counts)]
            self._to.add_histogram_raw(
                name(slash_joined(one.group, one.site, HISTOGRAM)),
                one.low,
                one.high,
                sum(counts),
                one.total,
                one.squares,
                limits,
                counts,
                step,
            )
        if text is not None:
            title, said = text
            self._to.add_text(name(title), said, step)

    def flush(self) -> None:
        if _has(self._to, "flush"):
            self._to.flush()


def _has(to: object, method: str) -> bool:
    return callable(getattr(to, method, None))
