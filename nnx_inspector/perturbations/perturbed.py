"""`perturbed`: turns a call into one that takes perturbations of its sites as an argument.

The call is traced once and its jaxpr is edited to have the perturbations at the marks (`rewrite`).
Strengths may be traced, vmapped, scanned over and differentiated. Invariant: every perturbation is
checked against shapes and dtypes before anything runs (in an eager call, before it is applied);
without perturbations the result is that of the plain call.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from nnx_inspector._compat.configuration import internal_config
from nnx_inspector.hooks.operations import kernels
from nnx_inspector.hooks.sites import Only, Selection, split_operation
from nnx_inspector.perturbations.activations import Mean
from nnx_inspector.perturbations.base import Kind, PartBase, Perturbation, is_random
from nnx_inspector.perturbations.parameters import ParameterPerturbation
from nnx_inspector.perturbations.perturbed_parameters import (
    ParameterRule,
    perturbed_parameters,
    with_own_parameters,
)
from nnx_inspector.perturbations.places import (
    apply_if,
    misfit_error,
    nan_if_out_of_bounds,
    no_array_error,
)
from nnx_inspector.program.function import module_function
from nnx_inspector.program.marking import marking_hooks
from nnx_inspector.program.marks import INPUT, OUTPUT, move_vmap_axes_first
from nnx_inspector.program.plan import Plan
from nnx_inspector.program.stage import StagedCall, stage_call
from nnx_inspector.program.survey import Mark
from nnx_inspector.records.donated import require_staged
from nnx_inspector.typing import Function, Value

Perturbations = Mapping[str, Value]
"""A glob over site keys (or parameter paths) -> a perturbation, or several in the order in which
they act. `[3]` after a segment chooses one layer of a stacked module."""

Rows = tuple[tuple[Any, int], ...]
"""For each enclosing scan, outermost first: the index of the iteration, and their number."""

_INDEX = re.compile(r"(?<!\\)\[(-?\d+)\]")


def without_layers(key: str) -> tuple[str, tuple[int, ...]]:
    """A key as a glob, and the layers that it chooses: `("layers", (3,))` for `"layers[3]"`."""
    called, operation = split_operation(key)
    return _INDEX.sub("", called) + operation, tuple(int(i) for i in _INDEX.findall(called))


def chosen_layer(only: Only) -> tuple[Only, tuple[int, ...]]:
    """A selection without its layer indices, and those indices: `("layers", (3,))` for
    `"layers[3]"`.

    Raises:
        ValueError: its terms choose different layers.
    """
    several = isinstance(only, (list, tuple, set, frozenset))
    terms: list[Value] = list(only) if several else [only]  # type: ignore[arg-type]
    apart = [without_layers(t) if isinstance(t, str) else (t, ()) for t in terms]
    rows = {of_term for _, of_term in apart}
    if len(rows) > 1:
        raise ValueError(
            f"{only!r} chooses different layers. Add a perturbation for each, such as in a loop."
        )
    bare = [term for term, _ in apart]
    return (bare if several else bare[0]), (rows.pop() if rows else ())


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The perturbations of the sites that one key selects."""

    key: str
    perturbations: tuple[Any, ...]

    @property
    def pattern(self) -> str:
        return without_layers(self.key)[0]

    @property
    def rows(self) -> tuple[int, ...]:
        return without_layers(self.key)[1]

    def of(self, part: str) -> list[Perturbation]:
        return [p for p in self.perturbations if isinstance(p, Perturbation) and p.at == part]

    @property
    def of_parameters(self) -> ParameterRule:
        of = tuple(p for p in self.perturbations if isinstance(p, ParameterPerturbation))
        return ParameterRule(self.key, self.pattern, self.rows, of)


def perturbed(f: object) -> Function:
    """Make a version of `f` that takes perturbations of values, gradients and parameters.

    Args:
        f: a module, a bound method of one, or a function whose arguments hold modules.

    Returns:
        A function `(perturbations, *args, **kwargs)` that returns what `f` returns.
        `perturbations` maps globs over site keys to a perturbation, or to a sequence of several,
        which act in that order. For `ParameterNoise` and `PruneMask` the globs are over parameter
        paths; a module's path means each `nnx.Param` in it. If several keys select one site, the
        alphabetically first key acts first (jax sorts the keys of a dict). `"layers[3]"` chooses
        one layer of a stacked module. The mapping is a pytree: trace it, vmap it, differentiate
        it. The call updates the model as the plain call does; the model keeps its own parameters.
        All positions of a value change; `nni.Mean(where=mask)` takes the mean of some.

    Raises:
        TypeError: a value is not a perturbation, or has no meaning for an array of the site.
        ValueError: a key selects nothing, or an array does not fit.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        >>> def norm(factor):
        ...     y = nni.perturbed(model)({"": nni.Scale(factor)}, jnp.ones((1, 2)))
        ...     return (y ** 2).sum()
        >>> jax.vmap(norm)(jnp.array([0.0, 1.0, 2.0])).shape
        (3,)
    """
    function = module_function(f, "perturbed")

    def call(perturbations: Perturbations, *args: object, **kwargs: object) -> Value:
        rules = _rules(perturbations)
        inputs = any(rule.of(INPUT) for rule in rules)
        patterns = [rule.pattern for rule in rules if rule.of(OUTPUT) or rule.of(INPUT)]
        hooks = marking_hooks(Selection(patterns or None), inputs=inputs)
        with stage_call(function, args, kwargs, hooks, may_run=True) as stage:
            require_staged(stage)
            if not stage.eager:
                _check(stage, rules)
            numbered = any(is_random(one) for rule in rules for one in rule.perturbations)
            check = functools.partial(check_fits, stage=stage)
            perturb = perturb_at_marks(stage.calls, _actions_of(rules), check)
            plan = Plan(summarise=False, perturb=perturb, numbered=numbered)
            replaced = perturbed_parameters(
                stage, [rule.of_parameters for rule in rules if rule.of_parameters.perturbations]
            )
            given = [replaced.get(i, x) for i, x in enumerate(stage.inputs)]
            out, _ = stage.evaluate(given, plan=plan)
            if stage.eager:
                _check(stage, rules)
            return stage.finish(with_own_parameters(stage, out, replaced), update=True)

    return call


def _rules(perturbations: Perturbations) -> list[_Rule]:
    if not isinstance(perturbations, Mapping):
        raise TypeError(
            f"The perturbations must be a dict by site, such as {{'blocks/0': nni.Zero()}}, got "
            f"{type(perturbations).__name__}."
        )
    for key in perturbations:
        if not isinstance(key, str):
            raise TypeError(f"A key must be a site key or a glob, got {type(key).__name__}.")
    # a dict that passes through jit comes out sorted: the order must not depend on that
    return [_Rule(key, _as_perturbations(key, perturbations[key])) for key in sorted(perturbations)]


def _as_perturbations(key: str, value: object) -> tuple[Value, ...]:
    found = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for one in found:
        if not isinstance(one, Kind):
            name = one.__name__ if isinstance(one, type) else type(one).__name__
            raise TypeError(
                f"At {key!r} there must be a perturbation such as nni.Scale(0.5), or a list of "
                f"several, got {name}."
            )
    return found


# ----------------------------------------------------------------- values


def takes_positions(one: Value) -> bool:
    """Whether the effect of a perturbation depends on which positions of a call count."""
    while isinstance(one, PartBase):
        one = one.whole
    return isinstance(one, Mean) and one.value is None and one.where is None


def restrict_to(one: Value, where: Value) -> Value:
    """A perturbation that `takes_positions`, of those that a mask of a value's rank says."""
    if isinstance(one, PartBase):
        return dataclasses.replace(cast(Any, one), whole=restrict_to(one.whole, where))
    return dataclasses.replace(one, where=where)


@dataclasses.dataclass(frozen=True)
class Action:
    """One perturbation at a mark.

    Attributes:
        one: the perturbation.
        rows: the chosen layer of each enclosing stack, outermost first; () for all layers.
        on: whether it is active: bool[], or an array with an axis for each enclosing scan and an
            entry for each iteration.
        axis: the axis whose units it acts on alone; `on` then has a last axis with an entry for
            each unit.
    """

    one: Perturbation
    rows: tuple[int, ...] = ()
    on: Value = True
    axis: int | None = None


def perturb_at_marks(
    calls: Mapping[int, int],
    acts: Callable[[Mark], Iterable[Action]],
    check: Callable[[Perturbation, Mark], None],
) -> Callable[..., list[Value]]:
    """The function for `Plan.perturb` that does the acts of each mark, in their order.

    Args:
        calls: the number of each mark's call; an eager call counts them as it runs.
        acts: what is done at a mark.
        check: raises if a perturbation does not fit a mark.
    """

    def perturb(
        mark: Mark, values: list[Value], rows: Rows, wheres: Sequence[Value] = ()
    ) -> list[Value]:
        for act in acts(mark):
            check(act.one, mark)
            check_members(mark, act.rows)
            on, name = _is_on(act, mark.site, rows), f"{mark.site}/{calls[id(mark)]}"
            one = act.one if act.axis is None else act.one.only(on, axis=act.axis)
            on = on if act.axis is None else on.any()
            changes = [
                functools.partial(_change_array, mapped=mapped, name=f"{name}/{number}")
                for number, mapped in enumerate(mark.mapped)
            ]
            ones: list[Value] = [one] * len(values)
            if wheres and takes_positions(one):
                ones = [one if where is None else (one, where) for where in wheres]
            each = zip(changes, values, ones, strict=True)
            values = [apply_if(on, change, x, one) for change, x, one in each]
        return values

    return perturb


def _change_array(x: Value, one: Value, *, mapped: tuple[int, ...], name: str) -> Value:
    if not isinstance(one, tuple):
        return apply_mapped(lambda x: nan_if_out_of_bounds(one)(x, name), x, mapped)
    whole, where = one
    count = len(mapped)
    shape = (*move_vmap_axes_first(x, mapped).shape[:count], *where.shape[count:])
    act = lambda x, where: nan_if_out_of_bounds(restrict_to(whole, where))(x, name)  # noqa: E731
    return apply_mapped(act, x, mapped, jnp.broadcast_to(where, shape))


@internal_config()
def _is_on(act: Action, site: str, rows: Rows) -> Value:
    """Whether an act is active in this iteration of the enclosing scans."""
    on = act.on[tuple(row for row, _ in rows)] if jnp.ndim(act.on) else act.on
    if not act.rows:
        return on
    check_layers(site, act.rows, [length for _, length in rows])
    pairs = zip(act.rows, rows, strict=False)
    chosen = [row == index % length for index, (row, length) in pairs]
    return jnp.all(jnp.array([on, *chosen]))


def _actions_of(rules: Sequence[_Rule]) -> Callable[[Mark], list[Action]]:
    at: dict[tuple[str, str], list[Action]] = {}

    def acts(mark: Mark) -> list[Action]:
        found = at.get((mark.site, mark.part))
        if found is None:
            here = [r for r in rules if Selection(r.pattern).matches_key(mark.site)]
            found = [Action(one, rule.rows) for rule in here for one in rule.of(mark.part)]
            at[mark.site, mark.part] = found
        return found

    return acts


def _check(stage: StagedCall, rules: Sequence[_Rule]) -> None:
    """Raise if a rule meets no call, or a perturbation has no meaning at its site.

    In an eager call the former is known only after the run; the latter is raised at the mark.
    """
    found = stage.survey.marks
    for rule in rules:
        selection = Selection(rule.pattern)
        for part in (OUTPUT, INPUT):
            wanted = rule.of(part)
            here = [m for m in found if m.part == part and selection.matches_key(m.site)]
            if wanted and not here:
                selection.require_match(stage.roots, [], stage.scope.operations)
                raise ValueError(why_unseen(rule.pattern, stage))
            for mark in here:
                for one in wanted:
                    check_fits(one, mark, stage)


def why_unseen(pattern: str, stage: StagedCall) -> str:
    """The error text for a glob whose sites have no marks in the call."""
    selection = Selection(pattern)
    reasons = {r for site, r in stage.survey.unseen.items() if selection.matches_key(site)}
    why = "; ".join(sorted(reasons)) or "the call does not reach it"
    return f"{pattern!r} cannot be perturbed here: {why}."


def check_members(mark: Mark, rows: Sequence[int]) -> None:
    """Raise if one member of an ensemble is chosen where all members share an array."""
    if rows and mark.members and None in mark.member_axes:
        raise ValueError(
            f"The {mark.members} members of {mark.site!r} receive the same array, so what member "
            f"{rows[-1]} receives cannot be perturbed alone. Perturb what it returns."
        )


def check_layers(site: str, wanted: Sequence[int], lengths: Sequence[int]) -> None:
    """Raise if a chosen layer does not exist, given the lengths of the scans around a site."""
    chosen = "".join(f"[{i}]" for i in wanted)
    if not lengths:
        raise ValueError(
            f"{site!r} is not a stacked module (no scan runs over its layers, and no vmap over "
            f"members), so {chosen} chooses "
            f"none of its calls. Leave it out, or name the module of a list by its path."
        )
    if len(wanted) > len(lengths):
        raise ValueError(
            f"{site!r} is called within {len(lengths)} scans, so {chosen} chooses none of its "
            f"calls."
        )
    for index, length in zip(wanted, lengths, strict=False):
        if not -length <= index < length:
            raise ValueError(f"{site!r} has {length} layers; there is no layer {index}.")


def apply_mapped(
    apply: Callable[..., jax.Array], x: Value, mapped: tuple[int, ...], *others: jax.Array
) -> Value:
    """A marked array, perturbed; each example of a vmap separately. `others` have the axes of the
    vmaps in front.
    """
    if not mapped:
        return apply(x, *others)
    for _ in mapped:
        apply = jax.vmap(apply)
    y = apply(move_vmap_axes_first(x, mapped), *others)
    for position, axis in reversed(list(enumerate(reversed(mapped)))):
        y = jnp.moveaxis(y, position, position + axis)
    return y


def check_fits(one: Perturbation, mark: Mark, stage: StagedCall) -> None:
    """Raise if a perturbation has no meaning for what a module returns or receives."""
    if stage.scope.operations.get(mark.site) == kernels.KERNEL:
        raise ValueError(kernels.NO_PATTERN.format(site=mark.site))
    if not mark.avals:
        raise no_array_error(mark.site, mark.part)
    for x in arrays_of(mark):
        why = misfit_error(one, mark.site, x)
        if why is not None:
            raise why


def arrays_of(mark: Mark) -> Iterator[jax.ShapeDtypeStruct]:
    """The arrays of a mark as the module sees them, without the axes of vmaps."""
    return map(without_mapped_axes, mark.avals, mark.mapped)


def without_mapped_axes(x: Value, mapped: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """An array, or its aval, as the module sees it, without the axes of vmaps."""
    shape = list(x.shape)
    for axis in reversed(mapped):
        del shape[axis]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)
