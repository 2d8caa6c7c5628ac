"""Perturb the parameters of a traced call, for that call only; the model keeps its own.

A module's path means its `nnx.Param`s; a path that names a Variable itself means that Variable,
whatever its type. One layer of a stack can be chosen only if the program shows that the layers lie
along the first axis, because a scan runs over it. Invariant: a shared parameter is perturbed once
by each perturbation. Does not trace or run the call.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.flax_graphs import set_raw_value
from nnx_inspector._compat.sharding import keeping_sharding
from nnx_inspector.hooks.globs import glob_matches, split_escaped
from nnx_inspector.hooks.sites import Path, Selection, no_match_text, site_key
from nnx_inspector.hooks.variables import contents, variables_by_path
from nnx_inspector.perturbations.base import Misfit
from nnx_inspector.perturbations.parameters import ParameterPerturbation
from nnx_inspector.perturbations.places import misfit_clause, misfit_error, nan_if_out_of_bounds
from nnx_inspector.program.analysis.equations import ROW, bodies_of
from nnx_inspector.program.analysis.identity import Values
from nnx_inspector.program.stage import StagedCall, array_names
from nnx_inspector.program.structure import describe
from nnx_inspector.typing import Jaxpr, Value


@dataclasses.dataclass(frozen=True)
class ParameterRule:
    """The perturbations of the parameters that one key selects.

    Attributes:
        key: the key as the user wrote it.
        pattern: the key as a glob.
        layer: the chosen layer of each enclosing stack, outermost first; empty for all layers.
    """

    key: str
    pattern: str
    layer: tuple[int, ...]
    perturbations: tuple[ParameterPerturbation, ...]


@dataclasses.dataclass(frozen=True)
class _Array:
    """One array of a Variable: its name, and the number of the input that holds it."""

    name: str
    path: Path
    number: int
    is_parameter: bool

    def is_selected_by(self, pattern: str) -> bool:
        if self.is_parameter:
            return any(glob_matches(pattern, self.path[:n]) for n in range(len(self.path) + 1))
        named = "*" not in split_escaped(pattern, "/")[-1]
        return named and glob_matches(pattern, self.path)


def perturbed_parameters(stage: StagedCall, rules: Sequence[ParameterRule]) -> dict[int, Value]:
    """The perturbed parameters, by the number of the stage's input that holds each.

    Raises:
        TypeError: a perturbation has no meaning for a parameter's dtype.
        ValueError: a key selects nothing, an array does not fit, or it is not known which part of
            a parameter belongs to a layer.
    """
    replaced: dict[int, Value] = {}
    every = _arrays(stage) if rules else []
    for rule in rules:
        chosen: dict[int, _Array] = {}
        for array in every:
            if array.is_selected_by(rule.pattern):
                chosen.setdefault(array.number, array)
        if not chosen:
            raise ValueError(no_match_text(Selection(rule.pattern), [a.name for a in every]))
        for one in rule.perturbations:
            for number, array in chosen.items():
                value = replaced.get(number, stage.inputs[number])
                layer = _layer_of(array, value, rule, stage)
                replaced[number], why = _perturb_array(one, value, array.name, layer)
                if why is not None:
                    raise why
    return replaced


def _arrays(stage: StagedCall) -> list[_Array]:
    return [
        _Array(site_key(path) + name, path, number, isinstance(variable, nnx.Param))
        for path, variable in variables_by_path(stage.roots)
        if id(variable) in stage.spans
        for name, number in zip(array_names(variable), stage.spans[id(variable)], strict=True)
    ]


def _perturb_array(
    one: ParameterPerturbation, value: Value, name: str, layer: tuple[int, ...]
) -> tuple[Any, Misfit | None]:
    """The perturbed parameter; or the parameter itself, and why the perturbation does not fit."""
    part = jax.ShapeDtypeStruct(value.shape[len(layer) :], value.dtype)
    name += "".join(f"[{index}]" for index in layer)
    why = misfit_error(one, name, part)
    if why is not None:
        return value, why

    def changed(value: jax.Array, one: ParameterPerturbation) -> jax.Array:
        new = nan_if_out_of_bounds(one)(value[layer] if layer else value, name)
        return value.at[layer].set(new) if layer else new

    return keeping_sharding(changed, value, one), None


@contextlib.contextmanager
def hold_perturbed(
    module: nnx.Module, prefix: Path, rules: Sequence[ParameterRule]
) -> Iterator[set[tuple[str, str]]]:
    """A context in which a module's Variables hold perturbed values, for a call in the user's
    program.

    Afterwards a parameter (`nnx.Param`) has its own value again, and so has another Variable unless
    the call has written to it.

    Args:
        rules: the perturbations. If one chooses a layer, the layers are known to lie along the
            first axis.

    Returns:
        The patterns of the rules that select something; with each, why the perturbation does not
        fit an array, which it then leaves as it is ("" if it fits one).
    """
    changed: list[tuple[nnx.Variable[Any], Any, Any]] = []
    reached: set[tuple[str, str]] = set()
    try:
        for path, variable, value in contents(module) if rules else ():
            if isinstance(value, jax.Ref):
                continue
            new = _perturbed_value(variable, value, (*prefix, *path), rules, reached)
            if new is not value:
                changed.append((variable, value, new))
                set_raw_value(variable, new)
        yield reached
    finally:
        for variable, value, new in changed:
            if isinstance(variable, nnx.Param) or variable.get_raw_value() is new:
                set_raw_value(variable, value)


def _perturbed_value(
    variable: object,
    value: object,
    path: Path,
    rules: Sequence[ParameterRule],
    reached: set[tuple[str, str]],
) -> Value:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(value)
    new = [leaf for _, leaf in leaves]
    for i, (below, leaf) in enumerate(leaves):
        name = site_key(path) + jax.tree_util.keystr(below)
        array = _Array(name, path, i, isinstance(variable, nnx.Param))
        for rule in rules:
            if isinstance(leaf, jax.Array) and array.is_selected_by(rule.pattern):
                for one in rule.perturbations:
                    new[i], why = _perturb_array(one, new[i], name, rule.layer)
                    reached.add((rule.pattern, misfit_clause(why)))
    same = all(a is b for a, (_, b) in zip(new, leaves, strict=True))
    return value if same else jax.tree.unflatten(treedef, new)


# ----------------------------------------------------------------- layers


def _layer_of(
    array: _Array, value: object, rule: ParameterRule, stage: StagedCall
) -> tuple[int, ...]:
    """The chosen layer as an index into the parameter."""
    if not rule.layer:
        return ()
    lengths = _stack_lengths(stage.survey.jaxpr, array.number)
    if len(lengths) < len(rule.layer):
        raise ValueError(
            f"{rule.key!r} chooses one layer, but it is not known which part of {array.name!r}, "
            f"{describe(value)}, belongs to it: {len(lengths)} scans run over its first axes. Pass "
            f"an array with an entry for each layer instead, such as a mask of ones elsewhere."
        )
    for index, length in zip(rule.layer, lengths, strict=False):
        if not -length <= index < length:
            raise ValueError(f"{array.name!r} has {length} layers; there is no layer {index}.")
    return tuple(i % length for i, length in zip(rule.layer, lengths, strict=False))


def _stack_lengths(jaxpr: Jaxpr, number: int) -> tuple[int, ...]:
    """The number of layers along each first axis of an input over which nested scans run."""
    bare, _ = jaxprs.open_jaxpr(jaxpr)
    values, var = Values(bare), bare.invars[number]
    found: tuple[int, ...] = ()
    for equation in bare.eqns:
        entered = [
            (body, inside, position)
            for body in bodies_of(equation)
            for inside, position in enumerate(body.operands or ())
        ]
        for body, inside, position in entered:
            operand = equation.invars[position]
            if not jaxprs.is_literal(operand) and values.same(operand, var):
                rows = () if body.taken[inside] != ROW else (body.times or 0,)
                found = max(found, (*rows, *_stack_lengths(body.jaxpr, inside)), key=len)
    return found


def with_own_parameters(
    stage: StagedCall, out: Sequence[object], replaced: Mapping[int, object]
) -> list[Value]:
    """The outputs, with the model's own array for each parameter that the call leaves as it is."""
    if not replaced:
        return list(out)
    if stage.eager:
        own = {id(value): stage.inputs[i] for i, value in replaced.items()}
        return [own.get(id(value), value) for value in out]
    jaxpr = stage.survey.jaxpr
    same = Values(jaxpr).same
    own = {i: jaxpr.invars[i] for i in replaced}
    return [
        next((stage.inputs[i] for i, v in own.items() if same(atom, v)), value)
        for atom, value in zip(jaxpr.outvars, out, strict=True)
    ]
