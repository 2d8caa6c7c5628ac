"""The targets of a perturbation: the sites of a selection, and whether it can act there.

Invariant: a perturbation without meaning at a site of the pass on screen is refused before anything
changes. Applies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnx_inspector.hooks.sites import Only, Selection, methods, no_match_text, site_key
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.handles import Handle
from nnx_inspector.inspector.passes.operations import with_operation
from nnx_inspector.inspector.passes.rerun import Reruns
from nnx_inspector.perturbations.apply_setting import check_applies, parameter_keys
from nnx_inspector.perturbations.base import PartBase
from nnx_inspector.perturbations.parameters import ParameterPerturbation
from nnx_inspector.perturbations.perturbed import chosen_layer
from nnx_inspector.perturbations.places import (
    AnyPerturbation,
    fits_row,
    place_of,
    require_perturbation,
)


class Targets:
    """Adds perturbations, and checks their new values."""

    def __init__(self, core: Core, rerun: Reruns):
        self._core, self._rerun = core, rerun
        core.handles.check = self._check_value

    def perturb(self, only: Only, perturbation: AnyPerturbation) -> Handle:
        self._core.require_open()
        require_perturbation(perturbation)
        only, rows = chosen_layer(only)
        if isinstance(only, str):  # an operation that is perturbed is shown from then on
            self._rerun.show_sites(with_operation(self._core, only))
        if isinstance(perturbation, ParameterPerturbation):
            sites = parameter_keys(self._core.model, only)
        else:
            sites = self._called_sites(only)
        self._check(perturbation, sites, rows)
        name = only if isinstance(only, str) else ", ".join(sites)
        name += "".join(f"[{i}]" for i in rows)
        return self._core.handles.add(name, sites, perturbation, rows)

    def _called_sites(self, only: Only) -> list[str]:
        """The keys of the sites that are both selected and called."""
        selection, trace = Selection(only), self._core.trace
        called = dict.fromkeys(call.site for call in trace.calls)
        modules = {site.key: site for site in trace.modules}
        sites = [
            key
            for key in called
            if (  # a site that only a call reveals has no module here
                selection.matches(modules[key].path, "__call__", modules[key].module)
                if key in modules
                else selection.matches_key(key)
            )
        ]
        if not sites:
            missing = self._core.missing if only in self._core.user_selection.terms else ""
            text = no_match_text(selection, sorted(called)) + self._how_to_show(selection)
            raise ValueError(missing or text)
        return sites

    def _how_to_show(self, selection: Selection) -> str:
        """How to see a method that the inspector's own `only=` leaves out."""
        shown, model = self._core.selection, self._core.trace.modules
        for site in model:
            for name in methods(type(site.module)):
                at = site.path, name, site.module
                if selection.matches(*at) and not shown.matches(*at):
                    key = site_key(site.path, name)
                    return f" To see this method, make the Inspector with only=['**', {key!r}]."
        return ""

    def _check(self, one: AnyPerturbation, sites: Sequence[str], rows: tuple[int, ...]) -> None:
        """Raise an error if a perturbation has no meaning in the pass on screen."""
        if isinstance(one, ParameterPerturbation):
            self._rerun.perturbable_sites().check_parameters(one, sites, rows)
        elif fits_row(one) and not rows:
            outputs = {call.site: call.output for call in self._core.trace.calls}
            for site in sites:
                check_applies(one, site, outputs[site])
        else:
            self._rerun.perturbable_sites().check(one, sites, rows)

    def _check_value(self, value: AnyPerturbation, handle: Handle) -> None:
        same = place_of(value, handle.sites, handle.rows) == handle.place
        if not same or isinstance(value, PartBase):  # whose numbers may be beyond an axis
            self._check(value, handle.sites, handle.rows)
