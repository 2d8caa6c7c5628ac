"""`perturbed`: a call that takes what is done to its sites as an argument.

The call is traced once and its jaxpr run again with the perturbations at the marks (`harvest`), so
strengths may be traced, vmapped over, scanned over and differentiated by. Invariant: everything is
checked against shapes and dtypes before anything runs (of an eager call: before it is done); with
no perturbation it is the plain call.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnx_inspector._compat.configuration import ours
from nnx_inspector.hooks.sites import Selection
from nnx_inspector.perturbations.base import Kind, Perturbation, is_random
from nnx_inspector.perturbations.parameters import ParameterPerturbation
from nnx_inspector.perturbations.region import nothing_to_perturb, refusal
from nnx_inspector.perturbations.substitute import (
    ParameterRule,
    perturbed_parameters,
    with_own_parameters,
)
from nnx_inspector.program.function import as_function
from nnx_inspector.program.harvest import Plan
from nnx_inspector.program.mark_layers import marking_layers
from nnx_inspector.program.marks import INPUT, OUTPUT, mapped_first
from nnx_inspector.program.stage import Staged, staged
from nnx_inspector.program.survey import Marked

Perturbations = Mapping[str, Any]
"""A glob over site keys (parameter paths) -> a perturbation, or several in the order in which they
act. `[3]` behind a segment chooses one layer of a stacked module."""

_INDEX = re.compile(r"(?<!\\)\[(-?\d+)\]")


def without_layers(key: str) -> tuple[str, tuple[int, ...]]:
    """A key as a glob, and the layers that it chooses: `("layers", (3,))` of `"layers[3]"`."""
    return _INDEX.sub("", key), tuple(int(i) for i in _INDEX.findall(key))


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What is done at the sites that one key selects."""

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


def perturbed(f: Any) -> Callable[..., Any]:
    """`f`, taking also what to do to what its modules receive, compute and hold.

    Args:
        f: a module, a bound method of one, or a function whose arguments hold modules.

    Returns:
        A function `(perturbations, *args, **kwargs)` of the result of `f`. `perturbations` maps a
        glob over site keys (for `ParameterNoise` and `PruneMask` over parameter paths; a module's
        path means each `nnx.Param` of it) to a perturbation, or to a sequence of several, which act
        in that order; where several keys select one site, those of the alphabetically first key
        act first (jax keeps no other order of a dict). `"layers[3]"` chooses one layer of a
        stacked module. It is a pytree: trace it, vmap over it, differentiate by it. The model
        changes as by the plain call, and its parameters stay its own.

    Raises:
        TypeError: not a perturbation, or one that has no meaning for an array of the site.
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
    function = as_function(f, "perturbed")

    def call(perturbations: Perturbations, *args: Any, **kwargs: Any) -> Any:
        rules = _rules(perturbations)
        inputs = any(rule.of(INPUT) for rule in rules)
        patterns = [rule.pattern for rule in rules if rule.of(OUTPUT) or rule.of(INPUT)]
        layers = marking_layers(Selection(patterns or None), inputs=inputs)
        with staged(function, args, kwargs, layers, may_run=True) as stage:
            if not stage.eager:
                _check(stage, rules)
            numbered = any(is_random(one) for rule in rules for one in rule.perturbations)
            plan = Plan(summarise=False, perturb=_at_marks(stage, rules), numbered=numbered)
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
    for key in perturbations:
        if not isinstance(key, str):
            raise TypeError(f"A key is a site key or a glob over them, got {type(key).__name__}.")
    # a dict that goes through jit comes out sorted: the order must not depend on whether it did
    return [_Rule(key, _several(key, perturbations[key])) for key in sorted(perturbations)]


def _several(key: str, value: Any) -> tuple[Any, ...]:
    found = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for one in found:
        if not isinstance(one, Kind):
            name = one.__name__ if isinstance(one, type) else type(one).__name__
            raise TypeError(
                f"At {key!r} there must be a perturbation such as nni.Scale(0.5), or several, "
                f"got {name}."
            )
    return found


# ----------------------------------------------------------------- values


def _at_marks(stage: Staged, rules: Sequence[_Rule]) -> Callable[..., list[Any]]:
    """What to do at each mark."""
    calls, at = stage.calls, dict[tuple[str, str], list[tuple[tuple[int, ...], Perturbation]]]()

    def rules_at(mark: Marked) -> list[tuple[tuple[int, ...], Perturbation]]:
        found = at.get((mark.site, mark.part))
        if found is None:
            here = [r for r in rules if Selection(r.pattern).matches_key(mark.site)]
            found = [(rule.rows, one) for rule in here for one in rule.of(mark.part)]
            at[mark.site, mark.part] = found
        return found

    def perturb(mark: Marked, values: list[Any], rows: tuple[tuple[Any, int], ...]) -> list[Any]:
        for wanted, one in rules_at(mark):
            check_fits(one, mark)
            name = f"{mark.site}/{calls[id(mark)]}"
            change = functools.partial(_all_applied, one, mapped=mark.mapped, name=name)
            values = _in_rows(mark.site, wanted, rows, change, values)
        return values

    return perturb


def _check(stage: Staged, rules: Sequence[_Rule]) -> None:
    """Raise where a rule meets no call, or what it does has no meaning there. Of an eager call the
    first is known once it has run; the second is then said at the mark.
    """
    found = stage.survey.marks
    for rule in rules:
        selection = Selection(rule.pattern)
        for part in (OUTPUT, INPUT):
            wanted = rule.of(part)
            here = [m for m in found if m.part == part and selection.matches_key(m.site)]
            if wanted and not here:
                selection.require_match(stage.roots, [])
                raise ValueError(why_unseen(rule.pattern, stage))
            for mark in here:
                for one in wanted:
                    check_fits(one, mark)


def why_unseen(pattern: str, stage: Staged) -> str:
    """The text of the error for a glob whose sites the call does not show."""
    selection = Selection(pattern)
    reasons = {r for site, r in stage.survey.unseen.items() if selection.matches_key(site)}
    why = "; ".join(sorted(reasons)) or "the call does not reach it"
    return f"{pattern!r} cannot be perturbed here: {why}."


def _in_rows(
    site: str,
    wanted: tuple[int, ...],
    rows: tuple[tuple[Any, int], ...],
    change: Callable[[list[Any]], list[Any]],
    values: list[Any],
) -> list[Any]:
    if not wanted:
        return change(values)
    check_layers(site, wanted, tuple(length for _, length in rows))
    # not `where`: a NaN in the gradient of a layer that is left alone would come through
    return jax.lax.cond(is_chosen(wanted, rows), change, lambda values: values, values)


def check_layers(site: str, wanted: Sequence[int], lengths: Sequence[int]) -> None:
    """Raise where a layer is chosen that the scans around a site, of these lengths, have not."""
    if len(wanted) > len(lengths):
        raise ValueError(
            f"{site!r} is called within {len(lengths)} scans, so "
            f"{''.join(f'[{i}]' for i in wanted)} chooses none of its calls."
        )
    for index, length in zip(wanted, lengths, strict=False):
        if not -length <= index < length:
            raise ValueError(f"{site!r} has {length} layers, there is no layer {index}.")


@ours()
def is_chosen(wanted: Sequence[int], rows: Sequence[tuple[Any, int]]) -> Any:
    """Whether this turn of the scans around, `Plan.rows`, is that of the chosen layer."""
    pairs = zip(wanted, rows, strict=False)
    return jnp.all(jnp.array([row == index % length for index, (row, length) in pairs]))


def _all_applied(
    one: Perturbation, values: list[Any], *, mapped: Sequence[tuple[int, ...]], name: str
) -> list[Any]:
    pairs = enumerate(zip(values, mapped, strict=True))
    return [applied(one, x, axes, f"{name}/{number}") for number, (x, axes) in pairs]


def applied(one: Perturbation, x: Any, mapped: tuple[int, ...], name: str) -> Any:
    """A marked array perturbed, each example of a vmap on its own."""
    apply: Callable[[Any], Any] = functools.partial(one.apply_at, name=name)
    if not mapped:
        return apply(x)
    for _ in mapped:
        apply = jax.vmap(apply)
    y = apply(mapped_first(x, mapped))
    for position, axis in reversed(list(enumerate(reversed(mapped)))):
        y = jnp.moveaxis(y, position, position + axis)
    return y


def check_fits(one: Perturbation, mark: Marked) -> None:
    """Raise where a perturbation has no meaning for what a module returns or receives."""
    if not mark.avals:
        raise nothing_to_perturb(mark.site, mark.part)
    for aval, mapped in zip(mark.avals, mark.mapped, strict=True):
        shape = list(aval.shape)
        for axis in reversed(mapped):
            del shape[axis]
        x = jax.ShapeDtypeStruct(tuple(shape), aval.dtype)
        why = one.why_not(x)
        if why is not None:
            raise refusal(one, mark.site, x, why)
