"""Invented figures for the rules to judge."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from nnx_inspector.findings.findings import diagnose
from nnx_inspector.recordings.facts import Facts, Flow, ParameterFacts, PassStats, SiteFacts
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.stats.samples.parameter_stats import PARAMETER_STATS
from nnx_inspector.stats.samples.unit_stats import MASK_BYTES, MASKS, SITE_STATS, UNITS
from nnx_inspector.stats.summary import Summary

SITES = ("a", "b", "c", "d", "e", "f")


def chain(sites: Sequence[str]) -> Flow:
    """A flow in which each site feeds the next."""
    count = len(sites)
    edges = [(i, i + 1, 0) for i in range(count - 1)]
    return Flow.of(sites, [(i, 0, -1) for i in range(count)], edges)


def joined(edges: Sequence[str]) -> Flow:
    """A flow in which the first site of each pair feeds the second."""
    at = {site: i for i, site in enumerate(SITES)}
    return Flow.of(SITES, [(i, 0, -1) for i in at.values()], [(at[a], at[b], 0) for a, b in edges])


def of(scale: float = 1.0, n: int = 64) -> Summary:
    """A summary of n values with this root mean square; half of them are negative."""
    bins = np.zeros(4096, np.uint64)
    for sign in (1, -1):
        single = np.array([sign * scale], np.float32).view(np.uint32)[0] >> 20
        bins[single] += n // 2
    points = np.array([-scale, scale, 0.0])
    return Summary(bins=bins, points=points, sums=np.array([scale, 0.0, float(n)]))


def healthy(**other: float) -> dict[str, float]:
    known = {
        "examples": 64, "units": 32, "looked": 32, "positions": 1, "rank": 8, "rms": 1, "spread": 1,
        "flat": 0, "mean": 1, "limit": 128,
    }  # fmt: skip
    return {**dict.fromkeys(SITE_STATS, np.nan), **known, **other}


@dataclasses.dataclass
class Model:
    """A chain of layers, and the figures of each in one pass."""

    sites: dict[str, dict[str, float]] = dataclasses.field(
        default_factory=lambda: {s: healthy() for s in SITES}
    )
    facts: dict[str, dict[str, Any]] = dataclasses.field(
        default_factory=lambda: {s: {} for s in SITES}
    )
    parameters: dict[str, dict[str, Any]] = dataclasses.field(
        default_factory=lambda: {s: {} for s in SITES}
    )
    parameter_stats: dict[str, dict[str, float]] = dataclasses.field(
        default_factory=lambda: {s: {} for s in SITES}
    )
    masks: dict[tuple[str, str], float] = dataclasses.field(default_factory=lambda: {})
    outputs: dict[str, Summary] = dataclasses.field(
        default_factory=lambda: {s: of() for s in SITES}
    )
    gradients: dict[str, Summary | None] = dataclasses.field(
        default_factory=lambda: {s: of(0.01) for s in SITES}
    )
    kind: str = "step"
    varied: int = 1
    edges: Sequence[str] | None = None
    """Which site feeds which, `"ab"`; by default each feeds the next."""

    def known(self) -> Facts:
        return Facts(
            sites=tuple(
                SiteFacts(
                    **{
                        "site": s,
                        "type": "Linear",
                        "order": i,
                        "entering": "float32",
                        "leaving": "float32",
                        "examples": 64,
                        **self.facts[s],
                    }
                )
                for i, s in enumerate(SITES)
            ),
            parameters=tuple(
                ParameterFacts(
                    **{
                        "path": f"{s}/kernel",
                        "site": s,
                        "type": "Param",
                        "dtype": "float32",
                        "size": 1024,
                        "needed": 1,
                        "axes": 2,
                        **self.parameters[s],
                    }
                )
                for s in SITES
            ),
            flows=(chain(SITES) if self.edges is None else joined(self.edges),),
        )

    def figures(self) -> PassStats:
        rows = [[self.sites[s][name] for name in SITE_STATS] for s in SITES]
        bits = np.zeros((len(SITES), len(MASKS), UNITS), bool)
        for (site, mask), part in self.masks.items():
            count = round(part * self.sites[site]["looked"])
            bits[SITES.index(site), MASKS.index(mask), :count] = True
        state = dict.fromkeys(PARAMETER_STATS, np.nan)
        state |= {"norm": 0.1, "gradient": 0.1, "graded": 1.0, "nan": 0, "infinite": 0}
        if self.kind == "watch":
            state |= {"gradient": np.nan, "graded": np.nan, "change": 1e-3, "same": 0, "decay": 0}
        states = [[{**state, **self.parameter_stats[s]}[n] for n in PARAMETER_STATS] for s in SITES]
        assert np.packbits(bits, axis=2).shape[2] == MASK_BYTES
        return PassStats(
            sites=SITES,
            rows=np.array(rows, np.float32),
            masks=np.packbits(bits, axis=2),
            parameters=tuple(f"{s}/kernel" for s in SITES),
            parameter_rows=np.array(states, np.float32),
            varied=self.varied,
        )

    def recording(self, passes: int = 4, *, facts: bool = True, figures: bool = True) -> Recording:
        recording = Recording()
        if facts:
            recording.learn(self.known())
        for step in range(passes):
            summaries = {
                s: {"output": self.outputs[s], "gradient": self.gradients[s]} for s in SITES
            }
            recording.append(
                step, summaries, kind=self.kind, figures=self.figures() if figures else None
            )
        return recording

    def found(self, **options: Any) -> list[tuple[str, str, str]]:
        return [(f.rule, f.site, f.severity) for f in diagnose(self.recording(**options))]


def dead(part: float, site: str = "c", *, examples: int = 64, kind: str = "relu") -> Model:
    model = Model(masks={(site, "below" if kind else "dead"): part})
    model.facts[site] = {"activation": kind}
    model.sites[site]["examples"] = examples
    return model


def along(factor: float) -> Model:
    model = Model()
    for i, site in enumerate(reversed(SITES)):
        model.gradients[site] = of(1e-2 * factor**i)
    return model
