"""What rules look at: the passes of a recording, the facts, and sites in the order they ran.

Invariant: passes that were perturbed on purpose are no evidence against the model; one recording
gives every rule the same snapshot. Judges nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from nnx_inspector.recordings.facts import UNKNOWN, Facts, Figures, ParameterFacts, SiteFacts
from nnx_inspector.recordings.layers import layer_key, layer_of
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.stats.gauges import bits_of

LAST: Final = 5
"""So many of the last passes are looked at for what must hold in all of them."""

FEW: Final = 3
"""Likewise, for what one pass nearly proves."""


class Judged:
    """A snapshot of a recording.

    Attributes:
        passes: all of them.
        clean: those without a perturbation.
        facts: empty where nothing is known.
    """

    def __init__(self, passes: Sequence[Pass], facts: Facts | None):
        self.passes = tuple(passes)
        self.clean = tuple(p for p in passes if not p.perturbed)
        self.facts = facts or Facts()
        self._sites = {one.site: one for one in self.facts.sites}

    # ---------------------------------------------------------------- the model

    def site(self, key: str) -> SiteFacts:
        """The facts of a site; of one layer those of its stack."""
        layer = layer_of(key)
        known = self._sites.get(key) or self._sites.get(layer[0] if layer else key)
        return known or SiteFacts(site=key)

    @functools.cached_property
    def held(self) -> dict[str, list[ParameterFacts]]:
        """Site -> the parameters that its module holds itself."""
        out: dict[str, list[ParameterFacts]] = {}
        for one in self.facts.parameters:
            if one.type == "Param":
                out.setdefault(one.site, []).append(one)
        return out

    def parameters_of(self, key: str) -> list[ParameterFacts]:
        """The parameters that a site's module holds itself."""
        layer = layer_of(key)
        return self.held.get(layer[0] if layer else key.partition(":")[0], [])

    def parameters_in(self, key: str) -> list[ParameterFacts]:
        """The parameters of a site's module and of what is in it."""
        layer = layer_of(key)
        path = layer[0] if layer else key.partition(":")[0]
        return [p for s, ps in self.held.items() for p in ps if not path or _in(s, path)]

    @functools.cached_property
    def order(self) -> dict[str, tuple[int, int, int]]:
        """Where each site that was ever measured comes in the order of returning: a number, then
        within a stack the layer, then its place in a layer.
        """
        found = dict.fromkeys(site for one in self.passes for site, _ in one.keys)
        for one in self.passes:
            found.update(dict.fromkeys(one.figures.sites if one.figures else ()))
        place = {site: i for i, site in enumerate(found)}
        known = any(one.order != UNKNOWN for one in self.facts.sites)

        def rank(key: str) -> int:
            order = self.site(key).order
            return order if known and order != UNKNOWN else place[key]

        depth: dict[str, int] = {}  # of a stacked site how many layers
        for key in found:
            layer = layer_of(key)
            if layer is not None:
                depth[layer[0]] = max(depth.get(layer[0], 0), layer[1] + 1)
        first: dict[int, int] = {}  # of all sites of one stack the first
        for head, layers in depth.items():
            at = rank(head) if head in place else rank(layer_key(head, 0))
            first[layers] = min(first.get(layers, at), at)
        out: dict[str, tuple[int, int, int]] = {}
        for key in found:
            layer = layer_of(key)
            if layer is None:
                out[key] = (rank(key), 0, 0)
            else:
                own = rank(layer[0]) if layer[0] in place else rank(key)
                out[key] = (first[depth[layer[0]]], layer[1], own)
        return out

    def at(self, key: str) -> tuple[int, int, int]:
        """Where a site comes in the order of returning."""
        return self.order.get(key, (self.site(key).order, 0, 0))

    def in_order(self, sites: Iterable[str]) -> list[str]:
        """Sites as they returned; of a stack whose layers are told apart the layers."""
        keys = list(dict.fromkeys(sites))
        stacks = {layer[0] for key in keys if (layer := layer_of(key)) is not None}
        return sorted((key for key in keys if key not in stacks), key=self.at)

    @functools.cached_property
    def last_with_parameters(self) -> str | None:
        """The head: of the sites that hold parameters themselves the one that returns last."""
        called = [s for s in self.held if self.site(s).order != UNKNOWN]
        return max(called, key=lambda s: self.site(s).order) if called else None

    # ---------------------------------------------------------------- the mode

    @functools.cached_property
    def trains(self) -> bool:
        """Whether the model was trained meanwhile: a loop with gradients, which moves parameters.

        A pass of the inspector's own (`step`) has gradients, and moves nothing.
        """
        held = [p.path for ps in self.held.values() for p in ps]
        same = [
            x
            for p in self.graded
            if p.figures is not None
            for path in held
            if not math.isnan(x := p.figures.parameter(path, "same"))
        ]
        return 0 in same if same else any(p.kind == "watch" for p in self.graded)

    @functools.cached_property
    def evaluates(self) -> bool:
        """Whether the modules that have two modes are all set to that of evaluation."""
        modes = {one.running for one in self.facts.sites}
        modes |= {one.deterministic for one in self.facts.sites if one.rate > 0}
        return modes - {UNKNOWN} == {1}

    # ---------------------------------------------------------------- the passes

    def with_figures(self, site: str) -> list[tuple[Pass, Figures]]:
        """The last clean passes with figures of a site, oldest first."""
        found = [(p, f) for p in self.clean if (f := p.figures) is not None and site in f.sites]
        return found[-LAST:]

    @functools.cached_property
    def measured(self) -> list[str]:
        """The sites with figures, in order."""
        keys = {s: None for p in self.clean[-LAST:] if p.figures for s in p.figures.sites}
        return self.in_order(keys)

    def windows(self, passes: Sequence[Pass]) -> list[list[Pass]]:
        """The first of some passes, and the last few: what holds in all of either is a finding,
        for training may mend what a model began with.
        """
        passes = list(passes)
        return [w for w in (passes[:1], passes[-FEW:]) if w]

    @functools.cached_property
    def graded(self) -> list[Pass]:
        """The clean passes with a gradient of anything."""
        return [p for p in self.clean if any(q == "gradient" for _, q in p.keys)]

    def masked(self, site: str, mask: str) -> npt.NDArray[np.bool_]:
        """Which of the units that are looked at are so in all of the last passes."""
        found = self.with_figures(site)
        units = min(int(f.figure(site, "looked")) for _, f in found)
        each = [bits_of(f.masks[f.sites.index(site)], mask)[:units] for _, f in found]
        return np.logical_and.reduce(each)

    def part_of(self, figures: Figures, site: str, mask: str) -> float:
        """What part of the units that are looked at is so in one pass."""
        units = int(figures.figure(site, "looked"))
        return float(bits_of(figures.masks[figures.sites.index(site)], mask)[:units].mean())

    def samples(self, site: str) -> int:
        """How many different values of a unit were looked at in a pass: a batch may come again."""
        each = [
            (f.figure(site, "examples") if f.varied else 1) * f.figure(site, "positions")
            for _, f in self.with_figures(site)
        ]
        return int(max(each))

    def since(self, site: str, mask: str, part: float) -> int:
        """The step from which on so many units are masked in every pass, to the last one."""
        found = [(p, f) for p in self.clean if (f := p.figures) is not None and site in f.sites]
        step = found[-1][0].step
        for one, figures in reversed(found):
            if self.part_of(figures, site, mask) < part:
                break
            step = one.step
        return step

    def is_all_zero(self, site: str, figures: Figures, *, of: Callable[..., bool] = all) -> bool:
        """Whether all (or any) of what a site's module multiplies by is zeros in a pass."""
        held = self.parameters_of(site)
        most = max((p.axes for p in held), default=0)
        norms = [figures.parameter(p.path, "norm") for p in held if p.axes == most]
        return bool(norms) and of(norm == 0 for norm in norms)

    def gradients(self, one: Pass) -> dict[str, float]:
        """Site -> L2 norm of the gradient of its output, where it is finite and not 0; in order."""
        out: dict[str, float] = {}
        sites = [s for s, q in one.keys if q == "gradient"]
        for site in self.in_order(sites):
            summary = one.summary(site, "gradient")
            norm = math.nan if summary is None or summary.saturated else summary.norm
            if math.isfinite(norm) and norm > 0:
                out[site] = norm
        return out


def _in(site: str, path: str) -> bool:
    return site == path or site.startswith(f"{path}/")
