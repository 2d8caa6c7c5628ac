"""What all trackers have in common, and names that they accept.

Invariant: two names of ours never become one. Knows no tracker's package.
"""

from __future__ import annotations

import re

from nnx_inspector.findings.finding import Finding
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.trackers.scalars import (
    FINDINGS,
    METRICS,
    OWN_GROUP,
    ROOT,
    Entry,
    PassReader,
    Scalar,
)


class Tracker:
    """Where passes, metrics and findings are written.

    Args:
        name: the tracker, as a sentence begins with it.

    Attributes:
        lacks: what it does not take, as a sentence; or "".
        takes_histograms, takes_findings: whether these are read for it.
    """

    lacks = ""
    takes_histograms = takes_findings = True

    def __init__(self, name: str):
        self.name = name
        self._reader = PassReader()

    def write_pass(self, item: Pass, cost: float | None) -> None:
        """Write a pass; `cost` is what writing one has cost so far, in CPU seconds."""
        scalars = self._reader.scalars(item)
        if cost is not None:
            scalars.append(Scalar(OWN_GROUP, "tracker", "cpu_seconds", cost))
        histograms = self._reader.histograms(item) if self.takes_histograms else ()
        self.log(Entry(item.step, scalars, histograms))

    def write_metrics(self, step: int, values: dict[str, float]) -> None:
        """Write metrics of the user."""
        scalars = [Scalar(METRICS, name, "", value) for name, value in values.items()]
        self.log(Entry(step, scalars))

    def write_finding(self, finding: Finding) -> None:
        """Write a finding, at the step at which it was first seen."""
        title = slash_joined(FINDINGS, finding.rule, finding.site or ROOT)
        self.log(Entry(finding.step, text=(title, str(finding))))

    def log(self, entry: Entry) -> None:
        """Write what belongs to a step."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write what is not written yet."""


def slash_joined(*parts: str) -> str:
    """A name whose parts are separated by slashes, by which trackers group.

    Example:
        >>> slash_joined("metrics", "loss", "")
        'metrics/loss'
    """
    return "/".join(filter(None, parts))


class AllowedNames:
    r"""Names in the characters that a tracker accepts; two names stay two.

    Args:
        refused: a pattern of what is replaced.

    Example:
        >>> names = AllowedNames(r"[^-/\w.]")
        >>> names.of("outputs/layers[3]"), names.of("outputs/layers(3)")
        ('outputs/layers_3_', 'outputs/layers_3_.2')
    """

    def __init__(self, refused: str):
        self._refused = re.compile(refused)
        self._known: dict[str, str] = {}
        self._used: set[str] = set()

    def of(self, name: str) -> str:
        """The name as it is written."""
        if name not in self._known:
            plain = written = self._refused.sub("_", name)
            number = 1
            while written in self._used:
                number += 1
                written = f"{plain}.{number}"
            self._used.add(written)
            self._known[name] = written
        return self._known[name]
