"""One pass of a model that is traced once, and the values of chosen sites in it.

Invariant: the pass is that of the plain call, and the model does not change. Chooses no sites.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import unchecked_jit
from nnx_inspector.arrays import is_array, require_examples
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.hook import without_watching
from nnx_inspector.hooks.pytrees import plain_key
from nnx_inspector.hooks.sites import (
    Selection,
    iter_modules,
    linen_parts,
    parse_key,
    site_key,
    split_operation,
)
from nnx_inspector.lenses.residual_terms import ResidualSums
from nnx_inspector.program.analysis.dataflow import Arrival, Edge, dataflow
from nnx_inspector.program.eager import require_trace
from nnx_inspector.program.editing.position_masks import Where
from nnx_inspector.program.function import ModuleFunction, module_function, roots_of
from nnx_inspector.program.instrument import evaluate
from nnx_inspector.program.marking import marking_hooks
from nnx_inspector.program.marks import INPUT, OUTPUT
from nnx_inspector.program.plan import Keep, Plan
from nnx_inspector.program.stage import CachedTrace, StagedCall, stage_call
from nnx_inspector.program.survey import Mark, Survey, why_divided
from nnx_inspector.records.donated import require_staged
from nnx_inspector.typing import Kwargs, PyTree, Value

ALL_CALLS: tuple[Any, ...] = (None, "**:*")
"""The calls of all modules and their other methods, such as `attend` of an `nnx.Embed`."""


@dataclasses.dataclass(frozen=True)
class SiteCalls:
    """A site that a pass calls: how often, and what it receives and returns.

    Attributes:
        received, returned: the arrays of its last call, as the module sees them.
        count: the number of its calls in the program.
        rows: the lengths of the scans around its calls; () for none.
        last: the number of its last call among all calls, in the order in which they return.
    """

    site: str
    received: tuple[jax.ShapeDtypeStruct, ...]
    returned: tuple[jax.ShapeDtypeStruct, ...]
    count: int
    rows: tuple[int, ...]
    last: int


@dataclasses.dataclass(frozen=True)
class TracedPass:
    """A traced pass over one model.

    Attributes:
        model: the model.
        calls: by site, in the order in which the sites first return.
    """

    model: nnx.Module
    stage: StagedCall
    calls: Mapping[str, SiteCalls]

    @property
    def output_shapes(self) -> PyTree:
        """What the pass returns, with shapes in place of arrays."""
        atoms = self.stage.survey.jaxpr.outvars
        return self.result([jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in atoms])

    def result(self, out: Sequence[object]) -> PyTree:
        """What the pass returns, from the outputs of its program."""
        returned = self.stage.returned
        return returned.rebuild([None] * len(returned.nodes), out[: self.stage.outputs])

    def output_with(
        self, mark: Mark, change: Callable[[list[Value]], list[Value]], inputs: Sequence[Value]
    ) -> PyTree:
        """What the pass returns for some inputs if the values of one mark are changed."""
        found = self.stage.survey.only(lambda other: other is mark)
        plan = Plan(summarise=False, perturb=lambda mark, values, rows: change(values))
        return self.result(evaluate(found, inputs, plan=plan)[0])

    def marks_of(self, site: str, part: str) -> list[Mark]:
        """The marks of a part of a site's calls, in the order of the program."""
        return [m for m in self.stage.survey.marks if (m.site, m.part) == (site, part)]

    @functools.cached_property
    def flow(self) -> tuple[tuple[Edge, ...], tuple[Edge, ...], tuple[Arrival, ...]]:
        """The edges of the pass; see `dataflow`."""
        return dataflow(self.stage.survey.jaxpr, self.stage.owner)

    @functools.cached_property
    def residual_sums(self) -> ResidualSums:
        """What the sums of the pass are made of; see `ResidualSums`."""
        return ResidualSums(self.stage.survey.jaxpr, self.stage.owner)

    def require_calls(self) -> None:
        """Raise a ValueError if the pass calls no module."""
        if not self.calls:
            raise ValueError(
                "This call calls no module of the model, so there is nothing to read. Pass the "
                "model, or a function that calls it."
            )

    def is_norm(self, site: str) -> bool:
        """Whether a module is a norm: by its name or, in Linen, by a scale without a matrix."""
        calls, path = self.calls[site], parse_key(site)[0]
        if [x.shape for x in calls.received] != [x.shape for x in calls.returned]:
            return False
        module = module_at(self.model, path)
        if module is not None:
            name = type(module).__name__.lower()
            return "norm" in name or "rms" in name
        around = [path[:end] for end in range(len(path))]
        parts = [
            linen_parts(owner).get(path[len(at) :], {})
            for at in around
            if (owner := module_at(self.model, at)) is not None
        ]
        held = next(filter(None, parts), {})
        return "scale" in held and all(np.ndim(x) < 2 for x in jax.tree.leaves(held))

    def module_of(self, site: str) -> nnx.Module | None:
        """The module of a site; None within a Linen module."""
        return module_at(self.model, parse_key(site)[0])

    def has_no_params(self, site: str) -> bool:
        """Whether a module has no parameters, as a dropout and a soft cap."""
        module = self.module_of(site)
        return module is not None and not jax.tree.leaves(nnx.state(module, nnx.Param))

    def last_call(self, site: str) -> int:
        """The number of a site's last call, by which sites are sorted in the order of the pass."""
        return self.calls[site].last

    def ensemble_size(self, *sites: str) -> int:
        """How many models of an ensemble call one of the sites together; 0 for a single model."""
        marks = (mark for mark, _ in self.stage.survey.walk() if mark.site in sites)
        return max((mark.members for mark in marks), default=0)

    def run(
        self, wanted: Collection[tuple[str, str]]
    ) -> tuple[Any, dict[tuple[str, str], list[Value]]]:
        """The pass's result, and the arrays of each call of each `(site, part)`."""
        keep = Keep(values=True, parts=(OUTPUT, INPUT))
        found = self.stage.survey.only(lambda mark: (mark.site, mark.part) in wanted)
        require_whole(found)

        # the consts are arguments: jax would copy those of a closure into the program, and a model
        # that a function closes over is among them
        @jax.jit
        def program(inputs: Sequence[Value], consts: Sequence[Value]) -> PyTree:
            survey = dataclasses.replace(found, consts=tuple(consts))
            out, seen = evaluate(survey, inputs, plan=Plan(summarise=False, keep=keep))
            values: dict[tuple[str, str], list[Value]] = {}
            for mark, _, result in found.walk(seen):
                if result is not None:
                    arrays = [kept.value for kept in result.kept]
                    values.setdefault((mark.site, mark.part), []).append(arrays)
            return out[: self.stage.outputs], values

        out, values = program(self.stage.inputs, self.stage.survey.consts)
        return self.result(out), values


def require_whole(found: Survey) -> None:
    """Raise if a marked array is only part of one."""
    for mark, around in found.walk():
        if why := why_divided(mark, around):
            raise InspectorError(
                f"The values of {mark.site!r} cannot be read: {why}. Choose a module around the "
                f"shard_map."
            )


def with_operations(sites: object) -> tuple[Value, ...]:
    """`ALL_CALLS`, and the operations within calls that a selection names: `"blocks/*@add"`."""
    terms = sites if isinstance(sites, (list, tuple, set, frozenset)) else (sites,)
    return (
        *ALL_CALLS,
        *(term for term in terms if isinstance(term, str) and split_operation(term)[1]),
    )


@contextlib.contextmanager
def trace_pass(
    f: object,
    args: Sequence[object],
    kwargs: Kwargs,
    *,
    what: str,
    only: object = ALL_CALLS,
    known: CachedTrace | None = None,
    where: Where | None = None,
) -> Iterator[TracedPass]:
    """Trace `f(*args, **kwargs)` with the calls of all sites marked, unless an equal call was
    traced.

    Raises:
        TypeError: `f` is not a module, a method of one, or a function of exactly one.
        ValueError: the batch has no example.
        InspectorError: it is called within a traced function, or the call cannot be traced.
    """
    function = f if isinstance(f, ModuleFunction) else module_function(f, what)
    if jit.is_tracing():
        raise InspectorError(
            f"{what} runs a program of its own and cannot be part of a traced function. Call it "
            f"outside jit, grad and vmap."
        )
    model = model_of(function, args, kwargs, what)
    hooks = marking_hooks(Selection(only), inputs=True, where=where)
    with unchecked_jit(), without_watching():
        with (
            require_trace(lambda why: f"{what} cannot trace this call: {why}."),
            stage_call(function, args, kwargs, hooks, roots={(): model}, known=known) as stage,
        ):
            require_staged(stage)
            require_examples(stage.arrays, what)
            traced = TracedPass(model, stage, _calls_by_site(stage))
        yield traced


def model_of(
    function: ModuleFunction, args: Sequence[object], kwargs: Kwargs, what: str
) -> nnx.Module:
    roots = roots_of(function, args, kwargs)
    if len(roots) > 1:
        names = ", ".join(repr(site_key(path)) for path in roots)
        raise TypeError(f"{what} takes one model, and the arguments hold {len(roots)}: {names}.")
    return next(iter(roots.values()))


def copy_of(model: nnx.Module) -> Callable[[], nnx.Module]:
    """A function that makes a copy of a model's present state, which a program may change."""
    graphdef, state = nnx.split(model)
    return lambda: nnx.merge(graphdef, state, copy=True)


def module_at(model: nnx.Module, path: Sequence[str]) -> nnx.Module | None:
    """The module at a path of texts, or None."""
    found = {tuple(map(str, own)): module for own, module in iter_modules(model)}
    return found.get(tuple(path))


def _calls_by_site(stage: StagedCall) -> dict[str, SiteCalls]:
    found: dict[str, list[tuple[int, Mark, tuple[int, ...]]]] = {}
    received: dict[str, Mark] = {}
    for number, (mark, around) in enumerate(stage.survey.walk()):
        if mark.part == INPUT:
            received[mark.site] = mark
        elif mark.part == OUTPUT:
            rows = tuple(map(abs, mark.rows(around)))
            found.setdefault(mark.site, []).append((number, mark, rows))
    return {
        site: SiteCalls(
            site,
            arrays_of(received[site]) if site in received else (),
            arrays_of(calls[-1][1]),
            len(calls),
            calls[-1][2],
            calls[-1][0],
        )
        for site, calls in found.items()
    }


def arrays_of(mark: Mark) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arrays of a mark with the axes of vmaps, as its values hold them."""
    return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in mark.avals)


def arrays_in(tree: PyTree) -> list[Value]:
    """The arrays (or their shapes) in what a call returns."""
    return [x for x in jax.tree.leaves(tree) if is_array(x)]


def logits_in(out: object) -> PyTree:
    """The array of a model's output that could be logits: of several, that which is named
    `logits`, or else the first; None for none.
    """
    floats = [
        (path, x)
        for path, x in jax.tree.leaves_with_path(out)
        if is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) and len(x.shape) >= 2
    ]
    able = [(path, x) for path, x in floats if x.shape[-1] >= 2] or floats
    named = [(path, x) for path, x in able if path and plain_key(path[-1]) == "logits"]
    return next((x for _, x in named or able), None)


def rows_of(site: str, rows: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
    """The names and indices of a site's rows: one for each iteration of the scans around it."""
    indices = [tuple(int(i) for i in at) for at in np.ndindex(*rows)] if math.prod(rows) else []
    return [(site + "".join(f"[{i}]" for i in at), at) for at in indices]
