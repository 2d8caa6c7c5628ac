"""A mask for each selected site of a traced call, and for each layer of a stacked site.

Which masks are on is data, one array for each site, so a program can be vmapped over it (and
equal modules stay equal code, which XLA compiles once). Invariant: with one mask on the call is
that of `perturbed` with that site's perturbation; with none open it is the plain call. The
perturbation behind a mask that is off, even a NaN, affects nothing. Measures nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from nnx_inspector._compat import jit
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.globs import escape
from nnx_inspector.hooks.hook import TAP_OUTPUT, Context, Hook
from nnx_inspector.hooks.scope import Scope
from nnx_inspector.hooks.sites import Selection, parse_key, site_key
from nnx_inspector.perturbations.activations import Mean, Perturbation, Zero
from nnx_inspector.perturbations.perturbed import (
    Action,
    arrays_of,
    check_fits,
    perturb_at_marks,
    why_unseen,
)
from nnx_inspector.perturbations.places import require_perturbation
from nnx_inspector.program.analysis.equations import is_call
from nnx_inspector.program.editing.position_masks import Where, mask_hooks, mask_params
from nnx_inspector.program.marking import marking_hooks
from nnx_inspector.program.marks import OUTPUT, mark_tree
from nnx_inspector.program.stage import HooksOf, StagedCall
from nnx_inspector.program.survey import Mark, Survey, why_divided
from nnx_inspector.stats.summarize import type_text
from nnx_inspector.typing import Function, Kwargs, Owner, Params, PyTree, Value

NO_MASK = -1
"""The mask number that means no mask."""
RESULT = "result"
"""The part of the marks on what the model returns, after all perturbations."""
ActiveMasks = Mapping[str, Value]
"""For each site with masks, whether each is on: bool, shaped like the loops around the site, and
its units if they have masks."""


@dataclasses.dataclass(frozen=True)
class _MarkResult:
    """The hook that marks what the model itself returns."""

    owner: Owner

    def __call__(
        self, next_fun: Function, args: tuple[Value, ...], kwargs: Kwargs, context: Context
    ) -> PyTree:
        out = next_fun(*args, **kwargs)
        how: Params = {"owner": self.owner, "site": context.site, "part": RESULT}
        return mark_tree(out, **how, **mask_params(self.owner))


def sweep_hooks(selection: Selection, root: str, *, inputs: bool, where: Where | None) -> HooksOf:
    """The hooks that mark the selected sites and what the model returns, at the site `root`."""
    of_sites = marking_hooks(selection, inputs=inputs)

    def hooks(scope: Scope, owner: Owner) -> list[Hook]:
        result = Hook(_MarkResult(owner), TAP_OUTPUT, Selection(["", root]), scope)
        return [*mask_hooks(owner, where, scope), result, *of_sites(scope, owner)]

    return hooks


@dataclasses.dataclass(frozen=True)
class SweepMasks:
    """The masks of one traced call.

    Attributes:
        names: the site of each mask; `"blocks[1]"` for one layer of a stacked site.
        refused: the sites without a mask, each with the reason.
        part: the part (output or input) of the marks that the masks act on.
        first: for each site the number of its first mask, and the lengths of the scans around it
            (empty if the site has one mask for all its calls), and then the number of its units.
        axis: the axis of the units with a mask each; None if a mask is for all of them.
        units: the unit of each mask; empty without an axis.
    """

    names: tuple[str, ...]
    refused: Mapping[str, str]
    part: str
    first: Mapping[str, tuple[int, tuple[int, ...]]]
    axis: int | None = None
    units: tuple[int, ...] = ()

    def one_hot(self, numbers: np.ndarray) -> ActiveMasks:
        """For each number, along a leading axis: that mask on and all others off."""
        masks: Params = {}
        for site, (first, lengths) in self.first.items():
            own = first + np.arange(math.prod(lengths)).reshape(lengths)
            masks[site] = np.asarray(numbers).reshape(-1, *(1,) * len(lengths)) == own
        return masks

    def perturb(self, stage: StagedCall, one: Perturbation, masks: ActiveMasks) -> Value:
        """The function for `Plan.perturb` that applies `one` at the masks that are on."""

        def acts(mark: Mark) -> list[Action]:
            acts_here = mark.part == self.part and mark.site in self.first
            return [Action(one, on=masks[mark.site], axis=self.axis)] if acts_here else []

        return perturb_at_marks(stage.calls, acts, functools.partial(check_fits, stage=stage))

    def reached(self, found: Survey, seen: list[Value], masks: ActiveMasks) -> Value:
        """Whether the call passed a mask that is on, bool[]: a branch may not have been taken."""
        counts: Params = dict.fromkeys(self.first, 0)
        for mark, _, one in found.walk(seen):
            if one is not None and mark.part == self.part and mark.site in self.first:
                counts[mark.site] += one.ran if self._loops(mark.site) else one.ran.sum()
        is_on = {s: g if self.axis is None else g.any(-1) for s, g in masks.items()}
        through = [((n > 0) & is_on[site]).any() for site, n in counts.items()]
        return jnp.stack(through).any()

    def _loops(self, site: str) -> int:
        """The number of scans around a site whose iterations have a mask each."""
        return len(self.first[site][1]) - (self.axis is not None)


def check_sweep(perturbation: Any, chunk: Any) -> None:
    """Raise if a sweep cannot be made with this perturbation or chunk, or here."""
    one = require_perturbation(perturbation)
    name = one.kind_name
    if one.acts_on == "gradient":
        raise TypeError(
            f"{name} leaves every value as it is and changes only gradients, so it has no effect "
            f"on a loss. Pass a kind that changes values, such as nni.Zero()."
        )
    if one.acts_on == "parameter":
        raise TypeError(
            f"{name} acts on parameters, but sweep perturbs what modules return or receive. Use "
            f"nni.perturbed(loss_fn)({{path: {name}(...)}}, model, ...)."
        )
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk must be a number of passes, 1 or more, got {chunk!r}.")
    if jit.is_tracing():
        raise InspectorError(
            "sweep compiles and runs a program of its own and cannot be part of a traced function. "
            "Call it outside jit, grad and vmap."
        )


def masks_of(
    stage: StagedCall,
    terms: Sequence[object],
    one: Perturbation,
    *,
    layers: bool,
    units: int | None = None,
) -> SweepMasks:
    """The masks for the selected sites.

    Args:
        stage: the traced call, with the marks of the selected sites.
        terms: the terms of the selection; each glob must meet a site that the call reaches.
        layers: whether each layer of a stacked site, and each step of a scan, has a mask of its
            own.
        units: the axis whose units have a mask each, or None.

    Raises:
        TypeError, ValueError: `one` has no meaning at any of the sites, or none has the axis.
        ValueError: a glob meets no site that the call reaches.
    """
    depths = _scan_depths(stage.survey)
    here: dict[str, list[Mark]] = {}
    around: dict[str, list[tuple[int, ...]]] = {}
    divided: dict[str, str] = {}
    for mark, within in stage.survey.walk():
        if mark.part == one.at:
            here.setdefault(mark.site, []).append(mark)
            divided[mark.site] = divided.get(mark.site) or why_divided(mark, within)
            shared = mark.members and None in mark.member_axes
            lengths = () if shared else tuple(map(abs, mark.rows(within)))
            around.setdefault(mark.site, []).append(lengths)
    lost = {s: r for s, r in stage.survey.unseen.items() if s not in here}
    _require_reached(stage, terms, [*here, *lost])
    refused = {site: f"it cannot be perturbed here: {why}" for site, why in lost.items()}
    names: list[str] = []
    numbers: list[int] = []
    first: dict[str, tuple[int, tuple[int, ...]]] = {}
    error: Exception | None = None
    for site, found in here.items():
        try:
            for mark in found:
                check_fits(one, mark, stage)
            if units is not None and divided[site]:
                raise ValueError(
                    f"The units of {site!r} cannot be told apart: {divided[site]}. Leave out "
                    f"units=, or choose a module around the shard_map."
                )
            count = 1 if units is None else _unit_count(found, units)
        except (TypeError, ValueError) as why:
            refused[site] = str(why)
            error = error or why
            continue
        alike = layers and len(set(around[site])) == 1
        lengths = around[site][0] if alike else ()
        first[site] = (len(names), lengths if units is None else (*lengths, count))
        for layer in range(math.prod(lengths)):
            names += [_mask_name(site, layer, lengths, depths)] * count
            numbers += [] if units is None else range(count)
    if not names and error is not None:
        raise error
    if not names:
        raise ValueError(why_unseen(next(iter(lost)), stage))
    return SweepMasks(tuple(names), refused, one.at, first, units, tuple(numbers))


def _unit_count(found: Sequence[Mark], axis: int) -> int:
    """The number of units along an axis of the arrays of a site's calls."""
    arrays = [x for mark in found for x in arrays_of(mark)]
    counts = [x.shape[axis] for x in arrays if -x.ndim <= axis < x.ndim]
    if len(counts) < len(arrays) or len({*counts}) > 1:
        site, words = found[0].site, [type_text(x.dtype, x.shape) for x in arrays]
        if len({*words}) == 1:
            raise ValueError(f"{site!r} has no axis {axis} of units: it has {words[0]}.")
        raise ValueError(
            f"{site!r} has {', '.join(dict.fromkeys(words))}, which have no units in common along "
            f"axis {axis}. Choose a site that has one array, within it or after it, or leave out "
            f"units=."
        )
    return counts[0]


def _require_reached(stage: StagedCall, terms: Sequence[object], sites: Sequence[str]) -> None:
    for term in terms:
        selection = Selection(term)
        known = [s for s in sites if selection.matches_key(s)] if isinstance(term, str) else sites
        if not known:
            selection.require_match(stage.roots, [])
            words = term if isinstance(term, str) else getattr(term, "__name__", repr(term))
            raise ValueError(why_unseen(str(words), stage))


def _mask_name(
    site: str, layer: int, lengths: tuple[int, ...], depths: Mapping[tuple[str, ...], int]
) -> str:
    """The site with the layer's index after the stacked module, `"blocks[1]/attn"`."""
    indices: list[int] = []
    for length in reversed(lengths):
        indices.append(layer % length)
        layer //= length
    path, method = parse_key(site)
    segments = [escape(segment) for segment in path] or [""]
    places = [
        next((n for n in range(1, len(path)) if depths[path[:n]] > loop), len(segments))
        for loop in range(len(lengths))
    ]
    for place, index in zip(places, reversed(indices), strict=True):
        segments[place - 1] += f"[{index}]"
    return "/".join(segments) + site_key((), method)


def _scan_depths(found: Survey) -> dict[tuple[str, ...], int]:
    """For each path, the smallest number of scans around a call of it or of anything below it."""
    depths: dict[tuple[str, ...], int] = {}
    for mark, around in found.walk():
        (path, _), scans = parse_key(mark.site), len(mark.rows(around))
        for n in range(1, len(path) + 1):
            depths[path[:n]] = min(scans, depths.get(path[:n], scans))
    return depths


# ---------------------------------------------------------------------- chains


def default_kind(stage: StagedCall, sites: Collection[str], part: str) -> Perturbation:
    """The kind that distinguishes sites: Mean in a chain whose outputs have a batch to average."""
    here = [m for m in stage.survey.marks if m.part == OUTPUT and m.site in sites]
    averaged = all(
        all(m.differentiable) and not any(m.mapped) and all(x.shape[:1] > (1,) for x in m.avals)
        for m in here
    )
    return Mean() if averaged and _is_chain(stage, sites, part) else Zero()


def _is_chain(stage: StagedCall, sites: Collection[str], part: str) -> bool:
    """Whether everything that the result takes from the call's arrays passes through each of the
    sites.

    Zeros at any of them then leave the result equally little of the arrays. A body that is not
    simply called (a loop, a branch) counts as bypassing everything.

    Args:
        stage: the traced call, with the marks of the sites.
        sites: the sites, several.
        part: the part of the marks on the result; outputs of the call without such marks.
    """
    survey, all_sites = stage.survey, frozenset(sites)
    inputs = [frozenset[str]()] * len(survey.jaxpr.invars)
    if not stage.arrays or len(all_sites) < 2:
        return False
    inputs[-len(stage.arrays) :] = [all_sites] * len(stage.arrays)
    missed: list[frozenset[str]] = []
    outputs = _missed_sites(survey, inputs, part, missed)[: stage.outputs]
    return not frozenset().union(*(missed or outputs))


def _missed_sites(
    survey: Survey, inputs: Sequence[frozenset[str]], part: str, results: list[frozenset[str]]
) -> list[frozenset[str]]:
    """For each output (and mark, in `results`), the sites that some way to it misses."""
    found = dict(zip(survey.jaxpr.invars, inputs, strict=True))

    def of(variables: Sequence[Value]) -> list[frozenset[str]]:
        return [
            frozenset() if isinstance(v, Literal) else found.get(v, frozenset()) for v in variables
        ]

    for number, equation in enumerate(survey.jaxpr.eqns):
        item, given = survey.items.get(number), of(equation.invars)
        together = frozenset[str]().union(*given)
        made = [together] * len(equation.outvars)
        if item is not None and item.mark is not None:
            if item.mark.part == part:
                results.append(together)
            elif item.mark.part == OUTPUT and len(given) == len(made):
                made = [one - {item.mark.site} for one in given]
        elif item is not None and is_call(equation) and len(item.children) == 1:
            made = _missed_sites(item.children[0], given, part, results)
        found.update(zip(equation.outvars, made, strict=True))
    return of(survey.jaxpr.outvars)
