"""Apply a setting to a traced call: at its marks, and to its parameters.

Invariant: every perturbation is checked against the shapes and dtypes that the modules see before
anything runs; random numbers equal those of `nni.perturbed` at the same arrays. At a site the row
acts first, then the places in their order. Does not trace or compile the call.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_inspector.hooks.hook import Hook
from nnx_inspector.hooks.scope import Scope
from nnx_inspector.hooks.sites import CALL, Only, Selection, module_sites
from nnx_inspector.perturbations import perturbed
from nnx_inspector.perturbations.activations import Perturbation, Scale
from nnx_inspector.perturbations.base import PartBase, is_random
from nnx_inspector.perturbations.parameters import ParameterPerturbation
from nnx_inspector.perturbations.perturbed import (
    Action,
    Rows,
    check_fits,
    check_layers,
    check_members,
    takes_positions,
    why_unseen,
)
from nnx_inspector.perturbations.perturbed_parameters import ParameterRule, perturbed_parameters
from nnx_inspector.perturbations.places import (
    PARAMETER,
    Place,
    RowKind,
    Setting,
    apply_if,
    apply_row,
    misfit_error,
    no_array_error,
)
from nnx_inspector.program.editing.position_masks import Where
from nnx_inspector.program.marking import marking_hooks
from nnx_inspector.program.marks import OUTPUT
from nnx_inspector.program.stage import HooksOf, StagedCall
from nnx_inspector.program.survey import Mark, Survey
from nnx_inspector.typing import Value


def marking_hooks_for(
    selection: Selection, received: Iterable[str], where: Where | None = None
) -> HooksOf:
    """The hooks that mark the selected outputs, and the inputs of the given sites."""
    sites = list(dict.fromkeys(received))
    inputs = Selection(sites) if sites else None

    def hooks(scope: Scope, owner: object) -> Sequence[Hook]:
        of_outputs = marking_hooks(selection, inputs=False, where=where)(scope, owner)
        if inputs is None:
            return of_outputs
        _, of_inputs = marking_hooks(inputs, inputs=True)(scope, owner)
        return [*of_outputs, of_inputs]

    return hooks


def setting_at_marks(
    stage: StagedCall,
    keys: Sequence[str],
    numbers: object,
    places: Sequence[Place],
    data: Sequence[Value],
) -> Callable[[Mark, list[Value], Rows], list[Value]]:
    """The function for `Plan.perturb` that applies rows and places at each mark of a stage.

    `keys` are the sites that have a row of `numbers`, float32 `[keys, ROW]`; `data` is as in
    `Setting.data`.
    """
    index = {key: i for i, key in enumerate(keys)}
    acting: dict[tuple[str, str], list[Action]] = {}
    for place, (on, *leaves) in zip(places, data, strict=True):
        act = Action(jax.tree.unflatten(place.treedef, leaves), place.rows, on)
        for site in place.sites:
            acting.setdefault((site, place.at), []).append(act)
    at_places = perturbed.perturb_at_marks(
        stage.calls,
        lambda mark: acting.get((mark.site, mark.part), ()),
        functools.partial(check_fits, stage=stage),
    )

    def perturb(mark: Mark, values: list[Value], rows: Rows, *wheres: Value) -> list[Value]:
        if mark.part == OUTPUT and mark.site in index:
            values = [apply_row(value, numbers, index[mark.site]) for value in values]
        return at_places(mark, values, rows, *wheres)

    return perturb


def are_random(places: Sequence[Place]) -> bool:
    """Whether the effect of any place depends on the number of the call at its site."""
    return any(map(is_random, _value_perturbations(places)))


def take_positions(places: Sequence[Place]) -> bool:
    """Whether the effect of any place depends on which positions count."""
    return any(map(takes_positions, _value_perturbations(places)))


def _value_perturbations(places: Sequence[Place]) -> list[Perturbation]:
    trees = [place.treedef for place in places if place.at != PARAMETER]
    return [jax.tree.unflatten(tree, [0] * tree.num_leaves) for tree in trees]


# ----------------------------------------------------------------- selections


def parameter_keys(model: nnx.Module, only: Only) -> list[str]:
    """A selection as globs over parameter paths; a module stands for all its parameters."""
    several = isinstance(only, (list, tuple, set, frozenset))
    terms: list[Value] = list(only) if several else [only]  # type: ignore[arg-type]
    found: dict[str, None] = {}
    for term in terms:
        if isinstance(term, str):
            found[term] = None
            continue
        selection = Selection(term)
        selection.require_match(model)
        for site in module_sites(model):
            if selection.matches(site.path, CALL, site.module):
                found[site.key] = None
    return list(found)


# -------------------------------------------------------------------- checks

_ARRAYS = re.compile(r"[\w<>]+\[[\d,]*\]")


def check_applies(perturbation: RowKind, site: str, output: str) -> None:
    """Raise a TypeError if a perturbation has no meaning for a site's output.

    Args:
        output: the description of its output (`"(float32[8], {mask: bool[4]})"`).
    """
    arrays = _ARRAYS.findall(output)
    if not arrays:
        raise no_array_error(site, OUTPUT)
    if isinstance(perturbation, Scale):
        for text in arrays:
            if not text.startswith(("float", "bfloat", "complex")):
                raise TypeError(
                    f"Scale needs floating-point values, but {site or '(root)'!r} returns {text}. "
                    f"Zero works on every dtype."
                )


class PerturbableSites:
    """What can be perturbed in one traced call. Holds no array.

    Args:
        stage: the call, with the outputs and inputs of all its sites marked.
    """

    def __init__(self, stage: StagedCall):
        shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in stage.inputs]
        self._stage = dataclasses.replace(stage, inputs=list(shapes), arrays=(), last=None)
        self._marks: dict[tuple[str, str], list[tuple[Mark, tuple[int, ...]]]] = {}
        for mark, around in stage.survey.walk():
            here = (mark, mark.rows(around))
            self._marks.setdefault((mark.site, mark.part), []).append(here)

    def check(self, one: Perturbation, sites: Iterable[str], rows: tuple[int, ...]) -> None:
        """Raise if a perturbation has no meaning for what one of the sites returns or receives.

        Raises:
            TypeError: its kind has no meaning for the dtype, or there is no array.
            ValueError: an array does not fit, a layer does not exist, or a site has no mark.
        """
        for site in sites:
            found = self._marks.get((site, one.at), [])
            if not found:
                if (site, OUTPUT) in self._marks:
                    raise no_array_error(site, one.at)
                raise ValueError(why_unseen(site, self._stage))
            for mark, lengths in found:
                check_fits(one, mark, self._stage)
                check_members(mark, rows)
                if rows:
                    check_layers(site, rows, tuple(map(abs, lengths)))

    def scan_lengths(self, site: str) -> tuple[int, ...]:
        """The iterations of each scan around a site, outermost first; negative in reverse."""
        found = self._marks.get((site, OUTPUT), [])
        return found[0][1] if found else ()

    def check_parameters(
        self, one: ParameterPerturbation, keys: Iterable[str], rows: tuple[int, ...]
    ) -> None:
        """Raise if a key names no parameter, or one that the perturbation does not fit."""
        rules = [parameter_rule(key, rows, one) for key in keys]

        def replaced(inputs: list[Value]) -> Value:
            stage = dataclasses.replace(self._stage, inputs=inputs)
            return list(perturbed_parameters(stage, rules).values())

        jax.eval_shape(replaced, self._stage.inputs)


def check_parts(found: Survey, setting: Setting) -> None:
    """Raise if a unit or an example that a perturbation chooses by its numbers, which are data of
    the program, does not exist in a call.

    Raises:
        ValueError: there is no such unit or example at a site.
    """
    for place, (on, *leaves) in zip(setting.places, setting.data, strict=True):
        one = jax.tree.unflatten(place.treedef, leaves)
        if not on or not isinstance(one, PartBase):
            continue
        for mark, *_ in found.walk():
            if mark.part == place.at and mark.site in place.sites:
                for x in perturbed.arrays_of(mark):
                    why = misfit_error(one, mark.site, x)
                    if why is not None:
                        raise why


# -------------------------------------------------------------------- places


@dataclasses.dataclass(frozen=True)
class _SwitchedKind(ParameterPerturbation):
    """A perturbation of parameters that acts where `on` is true."""

    one: ParameterPerturbation
    on: Value

    @property
    def kind_name(self) -> str:
        return self.one.kind_name

    def apply(self, x: jax.Array, name: str) -> jax.Array:
        return apply_if(self.on, lambda x, one: one.apply(x, name), x, self.one)

    def why_not(self, x: object) -> Value:
        return self.one.why_not(x)


def parameter_rule(key: str, rows: tuple[int, ...], one: ParameterPerturbation) -> ParameterRule:
    return ParameterRule(key + "".join(f"[{i}]" for i in rows), key, rows, (one,))


def parameter_rules(places: Sequence[Place], data: Sequence[Value]) -> list[ParameterRule]:
    """The places of parameter kinds, each with its data, as rules."""
    return [
        parameter_rule(
            key, place.rows, _SwitchedKind(jax.tree.unflatten(place.treedef, leaves), on)
        )
        for place, (on, *leaves) in zip(places, data, strict=True)
        for key in place.sites
        if place.at == PARAMETER
    ]
