"""Facts about a model for the rules, from its modules and from one traced pass over it.

Nothing is computed: the pass is staged as for a record, and the facts are read from the equations
between its marks. Invariant: the model is not changed, and a fact that cannot be read is unknown.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_inspector._compat import eqn_params, jaxprs
from nnx_inspector._compat.configuration import Configuration
from nnx_inspector.hooks.hook import without_watching
from nnx_inspector.hooks.sites import (
    CALL,
    ModuleSite,
    Path,
    Selection,
    linen_parts,
    module_sites,
    site_key,
)
from nnx_inspector.hooks.variables import float_arrays, variables_by_path
from nnx_inspector.program.analysis.activations import (
    activation_after,
    activation_before,
    is_affine,
)
from nnx_inspector.program.analysis.dataflow import inputs_received
from nnx_inspector.program.analysis.equations import bodies_of
from nnx_inspector.program.analysis.reach import TooLargeError, flow_of
from nnx_inspector.program.analysis.trace import Trace, staged_for_trace, trace_of
from nnx_inspector.program.editing.position_masks import Where
from nnx_inspector.program.function import WatchedCall, module_function
from nnx_inspector.program.marks import CHANGE, INPUT, OUTPUT, mark
from nnx_inspector.program.stage import StagedCall, array_names
from nnx_inspector.recordings.facts import UNKNOWN, Facts, Flow, ParameterFacts, SiteFacts
from nnx_inspector.typing import Equation, Jaxpr, Value, Var

_DTYPE = re.compile(r"(float64|float32|float16|bfloat16|float8\w*)\[")


def facts_of_modules(model: nnx.Module) -> Facts:
    """The facts about a model that need no call of it."""
    sites = tuple(_site_of(site) for site in module_sites(model))
    return Facts(sites=sites, parameters=tuple(_parameters(model)))


def facts_of_stage(stage: StagedCall, *, is_loss: bool = False) -> Facts:
    """The facts about a model and a pass over it, whose outputs and inputs are all marked.

    `is_loss`: whether the function returns a loss, or `(loss, aux)`.
    """
    model, jaxpr, program = stage.roots[()], stage.survey.jaxpr, _ProgramWalk(stage.owner)
    if stage.eager:
        return facts_of_modules(model)
    program.enter(jaxpr)
    needed = _needed(stage, jaxprs.needed_inputs(jaxpr, stage.outputs, mark))
    of_loss = jaxprs.needed_inputs(jaxpr, 1, mark) if is_loss else None
    sites = {one.site: one for one in facts_of_modules(model).sites}
    for site, found in program.sites.items():
        sites[site] = _with_call_facts(sites.get(site, SiteFacts(site=site)), found)
    for site in _given_ids(stage, model):
        sites[site] = dataclasses.replace(sites[site], given=1)
    parameters = tuple(_parameters(model, needed, _needed(stage, of_loss)))
    return Facts(sites=tuple(sites.values()), parameters=parameters, flows=_flows(stage, model))


def _given_ids(stage: StagedCall, model: nnx.Module) -> set[str]:
    """The embeddings that receive an argument of the call as it is, of two axes or more."""
    every = [site.key for site in module_sites(model) if isinstance(site.module, nnx.Embed)]
    received = inputs_received(stage.survey.jaxpr, stage.owner, every) if every else {}
    return {
        site
        for number, of in received.items()
        for site, same in of.items()
        if same and len(shape := stage.inputs[number].shape) > 1 and shape[-1] > 1
    }


def _flows(stage: StagedCall, model: nnx.Module) -> tuple[Flow, ...]:
    """How data flows through the program; nothing if the program is too large."""
    holders = _holders(model)
    held = {
        number: _holder(path, holders)
        for path, variable in variables_by_path({(): model})
        if isinstance(variable, nnx.Param)
        for number in stage.spans.get(id(variable), ())
    }
    first = len(stage.inputs) - len(stage.arrays)
    received = range(first, len(stage.inputs))
    try:
        return (flow_of(stage.survey.jaxpr, stage.owner, received, held),)
    except TooLargeError:
        return ()


Shapes: TypeAlias = tuple[nnx.GraphDef[nnx.Module], Value]
"""A model's structure, and its state as shapes."""


def shapes_of(model: nnx.Module) -> Shapes:
    """A model as it is now, without its arrays, which a step may donate."""
    graphdef, state = nnx.split(model, graph=True)
    return graphdef, jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, state
    )


def reader_of(
    model: Shapes, call: WatchedCall, selection: Selection, where: Where | None = None
) -> Callable[[], tuple[Facts, Trace]]:
    """What reads, at any time, the facts about a model as it was and about a watched program's call
    of it, and the trace of this call. It raises whatever the traced call raises.
    """
    graphdef, shapes = model
    configuration = Configuration.current()

    def read() -> tuple[Facts, Trace]:
        copy: Any = nnx.merge(graphdef, shapes)
        modules = {site.key: site.module for site in module_sites(copy)}
        module = modules[call.path]
        own = {one.path: one.dtype for one in facts_of_modules(copy).parameters}
        for path, x in nnx.iter_graph(module, graph=True):
            shape = x.get_raw_value() if isinstance(x, nnx.Variable) else None
            if isinstance(shape, jax.ShapeDtypeStruct) and path in call.dtypes:
                x.set_raw_value(jax.ShapeDtypeStruct(shape.shape, call.dtypes[path]))
        bound = module if call.method == CALL else getattr(module, call.method)
        how: Any = {"selection": selection, "roots": {(): copy}, "where": where}
        function = module_function(bound, "watch")
        with (
            configuration.applied(),
            without_watching(),
            staged_for_trace(function, call.args, call.kwargs, **how) as stage,
        ):
            facts = facts_of_stage(stage)
            held = [
                dataclasses.replace(p, dtype=own.get(p.path, p.dtype)) for p in facts.parameters
            ]
            return dataclasses.replace(facts, parameters=tuple(held)), trace_of(stage)

    return read


# ------------------------------------------------------------------- the modules


def _site_of(site: ModuleSite) -> SiteFacts:
    module: Any = site.module
    rate = getattr(module, "rate", UNKNOWN) if isinstance(module, nnx.Dropout) else UNKNOWN
    own = vars(module)
    return SiteFacts(
        site=site.key,
        type=type(module).__name__,
        declared=_declared(own.get("dtype")),
        running=_flag(own.get("use_running_average")),
        deterministic=_flag(own.get("deterministic")) if rate != UNKNOWN else UNKNOWN,
        rate=float(rate if isinstance(rate, (int, float)) else UNKNOWN),
        embeddings=module.num_embeddings if isinstance(module, nnx.Embed) else UNKNOWN,
    )


def _flag(value: bool | None) -> int:
    return int(value) if isinstance(value, bool) else UNKNOWN


def _declared(dtype: Any) -> str:
    try:
        return "" if dtype is None else str(jnp.dtype(dtype))
    except TypeError:
        return ""


def _parameters(
    model: nnx.Module,
    needed: Mapping[int, bool] | None = None,
    of_loss: Mapping[int, bool] | None = None,
) -> list[ParameterFacts]:
    out: list[ParameterFacts] = []
    seen: set[int] = set()
    held = _holders(model)
    for path, variable in variables_by_path({(): model}):
        kind = "Param" if isinstance(variable, nnx.Param) else type(variable).__name__
        if id(variable) in seen or not isinstance(variable, (nnx.Param, nnx.BatchStat)):
            continue
        seen.add(id(variable))
        use, in_loss = (
            UNKNOWN if of is None else int(of.get(id(variable), True)) for of in (needed, of_loss)
        )
        for name, leaf in zip(array_names(variable), float_arrays(variable), strict=True):
            if leaf is not None:
                out.append(
                    ParameterFacts(
                        path=site_key(path) + name,
                        site=_holder(path, held),
                        type=kind,
                        dtype=str(leaf.dtype),
                        size=math.prod(leaf.shape),
                        needed=use,
                        axes=len(leaf.shape),
                        in_loss=in_loss,
                    )
                )
    return out


def _holders(model: nnx.Module) -> dict[Path, str]:
    """Path -> key of every module, by each of its paths."""
    return {
        path: site_key((*site.path, *inner))
        for site in module_sites(model)
        for around in (site.path, *site.aliases)
        for path, inner in ((around, ()), *(((*around, *i), i) for i in linen_parts(site.module)))
    }


def _holder(path: Path, held: Mapping[Path, str]) -> str:
    for end in range(len(path) - 1, -1, -1):
        if path[:end] in held:
            return held[path[:end]]
    return ""


def _needed(stage: StagedCall, used: Sequence[bool] | None) -> dict[int, bool] | None:
    """Id of a Variable -> whether the results of the pass depend on it."""
    if used is None:
        return None
    return {of: any(used[i] for i in span) for of, span in stage.spans.items() if span}


# ------------------------------------------------------------------- the program


@dataclasses.dataclass
class _CallFacts:
    order: int = UNKNOWN
    activations: set[str] = dataclasses.field(default_factory=lambda: set[str]())
    makers: set[str] = dataclasses.field(default_factory=lambda: set[str]())
    entering: set[str] = dataclasses.field(default_factory=lambda: set[str]())
    leaving: set[str] = dataclasses.field(default_factory=lambda: set[str]())
    examples: int = UNKNOWN
    changed: set[str] = dataclasses.field(default_factory=lambda: set[str]())
    affine: set[bool] = dataclasses.field(default_factory=lambda: set[bool]())
    conditional: set[bool] = dataclasses.field(default_factory=lambda: set[bool]())


def _with_call_facts(base: SiteFacts, found: _CallFacts) -> SiteFacts:
    only = lambda names: next(iter(names)) if len(names) == 1 else ""  # noqa: E731
    running, deterministic = base.running, base.deterministic
    if base.running != UNKNOWN:  # a call's changes show which mode it ran in
        running = 0 if "BatchStat" in found.changed else 1
    if base.deterministic != UNKNOWN or base.rate >= 0:
        deterministic = 0 if "RngCount" in found.changed else 1
    return dataclasses.replace(
        base,
        order=found.order,
        activation=only(found.activations),
        made_by=only(found.makers),
        entering=only(found.entering),
        leaving=only(found.leaving),
        examples=found.examples,
        running=running,
        deterministic=deterministic,
        affine=int(found.affine == {True}) if found.affine else UNKNOWN,
        conditional=int(found.conditional == {True}) if found.conditional else UNKNOWN,
    )


class _ProgramWalk:
    """Walks a marked program once and collects the facts about its sites."""

    def __init__(self, owner: Any):
        self.owner = owner
        self.sites: dict[str, _CallFacts] = {}
        self._count = 0

    def enter(self, jaxpr: Jaxpr, *, conditional: bool = False) -> None:
        bare, _ = jaxprs.open_jaxpr(jaxpr)
        uses: dict[Var, list[Equation]] = {}
        for equation in bare.eqns:
            for atom in equation.invars:
                if not jaxprs.is_literal(atom):
                    uses.setdefault(atom, []).append(equation)
        made = {v: equation for equation in bare.eqns for v in equation.outvars}
        leaving = {v for v in bare.outvars if not jaxprs.is_literal(v)}
        for equation in bare.eqns:
            if equation.primitive is mark:
                if equation.params["owner"] == self.owner:
                    self._mark(equation, uses, leaving, made, conditional)
                continue
            if not eqn_params.is_recomputation(equation):
                for body in bodies_of(equation):
                    self.enter(body.jaxpr, conditional=conditional or body.conditional)

    def _mark(
        self,
        equation: Equation,
        uses: Mapping[Var, list[Equation]],
        leaving: set[Var],
        made: Mapping[Var, Equation],
        conditional: bool,
    ) -> None:
        params, part = equation.params, equation.params["part"]
        if part not in (INPUT, OUTPUT, CHANGE):
            return
        seen = self.sites.setdefault(params["site"], _CallFacts())
        if part == CHANGE:
            variable = params["variable"]
            if "/" not in variable.name or variable.type == "RngCount":
                seen.changed.add(variable.type)
            return
        dtypes = {m[1] for leaf in params["structure"].leaves if (m := _DTYPE.match(leaf))}
        if part == INPUT:
            seen.entering |= dtypes
            return
        seen.leaving |= dtypes
        seen.conditional.add(conditional)
        if seen.order == UNKNOWN:
            seen.order = self._count
            self._count += 1
        avals: list[Value] = [v.aval for v in equation.invars]
        seen.affine.add(len(avals) == 1 and is_affine(equation.invars[0], made, params["site"]))
        if len(avals) == 1 and avals[0].ndim:
            count = math.prod(avals[0].shape[:-1])
            seen.examples = count if seen.examples == UNKNOWN else min(seen.examples, count)
            seen.activations.add(activation_after(equation.outvars[0], uses, made, leaving))
            seen.makers.add(activation_before(equation.invars[0], made))
        else:
            seen.activations.add("")
            each = zip(equation.invars, avals, strict=True)
            arrays = [v for v, aval in each if jnp.issubdtype(aval.dtype, jnp.inexact)]
            seen.makers |= {activation_before(v, made) for v in arrays} or {""}
