"""What the rules examine: the passes of a recording, the facts, and sites in the order of running.

Invariant: passes that were perturbed on purpose are not evidence against the model, and all rules
see the same snapshot of a recording. Does not judge anything.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from nnx_inspector.findings.finding import site_text
from nnx_inspector.findings.paths import Paths
from nnx_inspector.recordings.curves import Tally
from nnx_inspector.recordings.facts import UNKNOWN, Facts, ParameterFacts, PassStats, SiteFacts
from nnx_inspector.recordings.passes import Pass
from nnx_inspector.recordings.tree_rows import layer_key, layer_of, leaf_of
from nnx_inspector.stats.samples.parameter_stats import NONFINITE_STATS, parameter_stat
from nnx_inspector.stats.samples.unit_stats import EXAMPLES, unpack_mask

LAST_PASSES: Final = 5
"""How many of the last passes are examined for what must hold in all of them."""

FEW_PASSES: Final = 3
"""How many are examined for what a single pass nearly proves."""


class RuleContext:
    """A snapshot of a recording.

    Attributes:
        passes: all passes, without what was measured of parameters.
        clean: the passes without a perturbation whose batch was not empty.
        is_empty: whether the batch was empty in all passes.
        facts: what is known about the model; empty if nothing is.
        metrics: what was counted of each metric.
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        facts: Facts | None,
        metrics: Mapping[str, Tally] | None = None,
    ):
        self.passes = tuple(one.of_sites for one in passes)
        self._whole = {one.number: one for one in passes}
        self.facts = facts or Facts()
        self.metrics = metrics or {}
        self._sites = {one.site: one for one in self.facts.sites}
        some = [p for p in self.passes if not self._is_empty(p)]
        self.clean = tuple(p for p in some if not p.perturbed)
        self.is_empty = bool(passes) and not some
        self._gradients: dict[int, dict[str, float]] = {}  # of the passes by number

    # ---------------------------------------------------------------- the model

    def site(self, key: str) -> SiteFacts:
        """The facts about a site, which are also those about its stack and its arrays."""
        key, _ = leaf_of(key)
        layer = layer_of(key)
        known = self._sites.get(key) or self._sites.get(layer[0] if layer else key)
        return known or SiteFacts(site=key)

    def _is_empty(self, one: Pass) -> bool:
        """Whether a pass had no examples, so what the model returns has no values, or is a number
        and what the modules in it return has none.

        Those of a branch return none either if it was not chosen.
        """
        outputs = [key for key, quantity in one.keys if quantity == "output"]
        whole = [key for key in outputs if not leaf_of(key)[0]]
        size = _size_of(one, whole)
        if size > len(whole):
            return False
        inner = [s for s in outputs if leaf_of(s)[0] and self.site(s).conditional != 1]
        return (whole != [] and size == 0) or (inner != [] and not _size_of(one, inner))

    @property
    def first_step(self) -> int:
        return self.passes[0].step if self.passes else 0

    @functools.cached_property
    def parameters_by_site(self) -> dict[str, list[ParameterFacts]]:
        """Site -> the parameters that its module holds itself."""
        out: dict[str, list[ParameterFacts]] = {}
        for one in self.facts.parameters:
            if one.type == "Param":
                out.setdefault(one.site, []).append(one)
        return out

    @functools.cached_property
    def paths(self) -> Paths:
        """Which site's values reach which other site."""
        stacks = {layer[0] for key in self.order if (layer := layer_of(key)) is not None}
        return Paths(self.facts.flows, stacks)

    @functools.cached_property
    def weights(self) -> list[ParameterFacts]:
        """All that `parameters_by_site` has."""
        return [p for held in self.parameters_by_site.values() for p in held]

    def parameter(self, path: str) -> ParameterFacts:
        """The facts about a parameter."""
        known = next((one for one in self.facts.parameters if one.path == path), None)
        return known or ParameterFacts(path=path, site=path.rpartition("/")[0])

    def parameters_of(self, key: str) -> list[ParameterFacts]:
        """The parameters that a site's module holds itself."""
        key, _ = leaf_of(key)
        layer = layer_of(key)
        return self.parameters_by_site.get(layer[0] if layer else key.partition(":")[0], [])

    def parameters_in(self, key: str) -> list[ParameterFacts]:
        """The parameters of a site's module and of the modules in it."""
        key, _ = leaf_of(key)
        layer = layer_of(key)
        return self._held_within.get(layer[0] if layer else key.partition(":")[0], [])

    @functools.cached_property
    def _held_within(self) -> dict[str, list[ParameterFacts]]:
        """Path of a module -> what it and the modules in it hold."""
        out: dict[str, list[ParameterFacts]] = {}
        for site, held in self.parameters_by_site.items():
            around = (site[:end] for end, letter in enumerate(site) if letter == "/")
            for path in dict.fromkeys(("", *around, site)):
                out.setdefault(path, []).extend(held)
        return out

    def arrays_read_in(self, key: str) -> list[ParameterFacts]:
        """What a site's module and the modules in it compute with: their parameters, and the
        running statistics of a norm that uses these in place of the batch's.
        """
        path = leaf_of(key)[0].partition(":")[0]
        statistics = [p for p in self.facts.parameters if p.type == "BatchStat"]
        used = [p for p in statistics if is_within(p.site, path) and self.site(p.site).running == 1]
        return [*self.parameters_in(key), *used]

    @functools.cached_property
    def order(self) -> dict[str, tuple[int, int, int]]:
        """A site's place in the order of returning: number, layer of a stack, place in it."""
        found = dict.fromkeys(site for one in self.passes for site, _ in one.keys)
        for one in self.passes:
            found.update(dict.fromkeys(one.figures.sites if one.figures else ()))
        place = {site: i for i, site in enumerate(found)}
        known = any(one.order != UNKNOWN for one in self.facts.sites)

        def rank(key: str) -> int:
            order = self.site(key).order
            return order if known and order != UNKNOWN else place[key]

        depth: dict[str, int] = {}  # stacked site -> number of layers
        for key in found:
            layer = layer_of(key)
            if layer is not None:
                depth[layer[0]] = max(depth.get(layer[0], 0), layer[1] + 1)
        first: dict[int, int] = {}  # number of layers -> the first place of its stack's sites
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

    def order_of(self, key: str) -> tuple[int, int, int]:
        """The place of a site in the order of returning."""
        return self.order.get(key, (self.site(key).order, 0, 0))

    def sort(self, sites: Iterable[str]) -> list[str]:
        """Sites in the order of returning; a stack whose layers are known is replaced by them."""
        keys = list(dict.fromkeys(sites))
        stacks = {layer[0] for key in keys if (layer := layer_of(key)) is not None}
        return sorted((key for key in keys if key not in stacks), key=self.order_of)

    def comes_before(self, one: str, other: str) -> bool:
        """Whether a site's values enter another's; where the flow is unknown, whether it returns
        first. A site comes before itself.
        """
        if self.paths.knows(one) and self.paths.knows(other):
            return self.paths.reaches(one, other)
        return self.order_of(one) <= self.order_of(other)

    @functools.cached_property
    def last_with_parameters(self) -> str | None:
        """The head: the last site to return whose module holds parameters itself."""
        called = [s for s in self.parameters_by_site if self.site(s).order != UNKNOWN]
        return max(called, key=lambda s: self.site(s).order) if called else None

    # ---------------------------------------------------------------- the mode

    @functools.cached_property
    def is_trained(self) -> bool:
        """Whether the model was trained: a loop with gradients that changed its parameters.

        A pass of the inspector itself (`step`) has gradients but changes nothing.
        """
        same = [
            x
            for p in self.gradient_passes
            if p.figures is not None
            for one in self.weights
            if not math.isnan(x := p.figures.parameter(one.path, "same"))
        ]
        return 0 in same if same else any(p.kind == "watch" for p in self.gradient_passes)

    @functools.cached_property
    def is_evaluated(self) -> bool:
        """Whether all modules with a training and an evaluation mode are set to evaluation."""
        modes = {one.running for one in self.facts.sites}
        modes |= {one.deterministic for one in self.facts.sites if one.rate > 0}
        return modes - {UNKNOWN} == {1}

    # ---------------------------------------------------------------- the passes

    def with_stats(self, site: str) -> list[tuple[Pass, PassStats]]:
        """The last clean passes with figures of a site, oldest first."""
        return self._all_with_stats(site)[-LAST_PASSES:]

    def _all_with_stats(self, site: str) -> list[tuple[Pass, PassStats]]:
        return [(p, f) for p in self.clean if (f := p.figures) is not None and site in f.row_of]

    @functools.cached_property
    def measured_sites(self) -> list[str]:
        """The sites with figures, in order."""
        keys = {s: None for p in self.clean[-LAST_PASSES:] if p.figures for s in p.figures.sites}
        return self.sort(keys)

    @functools.cached_property
    def entrances(self) -> list[str]:
        """The sites with figures that no other site feeds, in order."""
        return [site for site in self.measured_sites if not self.paths.feeds(site)]

    def windows(self, passes: Sequence[Pass]) -> list[list[Pass]]:
        """The first pass, and the last few: training may fix what a model began with."""
        passes = list(passes)
        return [w for w in (passes[:1], passes[-FEW_PASSES:]) if w]

    @functools.cached_property
    def gradient_passes(self) -> list[Pass]:
        """The clean passes with any gradient."""
        return [p for p in self.clean if any(q == "gradient" for _, q in p.keys)]

    def mask_in_all(self, site: str, mask: str) -> npt.NDArray[np.bool_]:
        """Which of the examined units have this mask set in all of the last passes."""
        found = self.with_stats(site)
        units = min(int(f.figure(site, "looked")) for _, f in found)
        each = [unpack_mask(f.masks[f.row_of[site]], mask)[:units] for _, f in found]
        return np.logical_and.reduce(each)

    def masked_part(self, figures: PassStats, site: str, mask: str) -> float:
        """The fraction of the examined units that have this mask set in one pass."""
        units = int(figures.figure(site, "looked"))
        return float(unpack_mask(figures.masks[figures.row_of[site]], mask)[:units].mean())

    def part_text(self, site: str, part: float) -> str:
        """`"50% of the 64 units of 'a'"`; if not all were examined, it counts those that were."""
        units = units_text(self.with_stats(site)[-1][1], site)
        return f"{part:.0%} of the {units} of {site_text(site)}"

    def values_text(self, site: str, passes: Sequence[PassStats] = ()) -> str:
        """How many values of each unit these passes, or all, examine: `"64 values examined"`."""
        each = {
            examined_count(f.figure(site, "examples")) * int(f.figure(site, "positions"))
            for f in passes or [f for _, f in self.with_stats(site)]
        }
        often = " in each call" if self.paths.calls(site) > 1 else ""
        return " to ".join(map(str, sorted({min(each), max(each)}))) + " values examined" + often

    def sample_count(self, site: str) -> int:
        """The most values of a unit examined in one pass, not over passes: batches may repeat."""
        each = [
            (f.figure(site, "examples") if f.varied else 1) * f.figure(site, "positions")
            for _, f in self.with_stats(site)
        ]
        return int(max(each))

    def first_step_masked(self, site: str, mask: str, part: float) -> int:
        """The first step from which on this fraction of the units is masked in every pass."""
        found = self._all_with_stats(site)
        step = found[-1][0].step
        for one, figures in reversed(found):
            if self.masked_part(figures, site, mask) < part:
                break
            step = one.step
        return step

    def has_zero_weights(
        self, site: str, figures: PassStats, *, of: Callable[..., bool] = all, own: bool = True
    ) -> bool:
        """Whether all (or any) weights that a site's module multiplies by are zeros in a pass.

        Without `own`, all parameters count: any may be a factor of what another module returns.
        """
        held = self.parameters_of(site)
        most = max((p.axes for p in held), default=0)
        norms = [figures.parameter(p.path, "norm") for p in held if p.axes == most or not own]
        return bool(norms) and of(norm == 0 for norm in norms)

    def differentiated_parameters(self, figures: PassStats) -> list[ParameterFacts]:
        """The parameters with respect to which a pass is differentiated."""
        return [p for p in self.weights if figures.parameter(p.path, "differentiated") == 1]

    def learns(self, path: str) -> bool:
        """Whether a parameter ever changes otherwise than by a factor (weight decay)."""
        each = [p.figures for p in self.clean if p.figures is not None]
        return any(f.parameter(path, "same") == 0 and f.parameter(path, "decay") != 1 for f in each)

    @functools.cached_property
    def any_changed(self) -> bool:
        """Whether a parameter has changed between two passes with gradients."""
        figures = [p.figures for p in self.gradient_passes if p.figures is not None]
        return any(f.parameter(p.path, "same") == 0 for f in figures for p in self.weights)

    def with_parameters(self, one: Pass) -> Pass:
        """A pass with what was measured of parameters."""
        return self._whole[one.number]

    @staticmethod
    def all_finite(one: Pass) -> bool:
        """Whether the parameters of a pass were counted, and all of them are finite."""
        if one.figures is None or not one.figures.parameters:
            return False
        rows = one.figures.parameter_rows
        return all((parameter_stat(rows, name) == 0).all() for name in NONFINITE_STATS)

    def any_values(self, passes: Sequence[Pass], site: str) -> bool:
        """Whether a pass has values of a site; if it is a branch, none may have chosen it."""
        return any(one.has_values(site) for one in passes)

    def gradient_norms(self, one: Pass) -> dict[str, float]:
        """Site -> L2 norm of its output's gradient, if finite and not 0, in order of returning.

        Of a call that returns several arrays, the norm of all of them together.
        """
        if one.number not in self._gradients:
            norms: dict[str, float] = {}
            for key, norm in one.norms("gradient").items():
                site, _ = leaf_of(key)
                norms[site] = math.hypot(norms.get(site, 0.0), norm)
            order = [s for s in self.sort(norms) if math.isfinite(norms[s]) and norms[s] > 0]
            self._gradients[one.number] = {site: norms[site] for site in order}
        return self._gradients[one.number]


def _size_of(one: Pass, outputs: Sequence[str]) -> int:
    """How many values these sites return; of more than can be counted, at least how many."""
    found = [summary for key in outputs if (summary := one.summary(key)) is not None]
    return sum(2**32 if summary.saturated else summary.size for summary in found)


def units_text(figures: PassStats, site: str) -> str:
    """`"64 units"`, or `"64 examined units (of 128)"`."""
    units, looked = (int(figures.figure(site, name)) for name in ("units", "looked"))
    return f"{units} units" if looked == units else f"{looked} examined units (of {units})"


def examined_count(count: float) -> int:
    """How many of these examples are examined."""
    return math.ceil(count / math.ceil(count / EXAMPLES))


def is_within(site: str, path: str) -> bool:
    """Whether a site's module is the module of a path, or lies inside it."""
    return not path or site == path or site.startswith(f"{path}/")
