"""Makes the marked values of a traced function ordinary outputs, through its control flow.

A jaxpr with marks is surveyed once and evaluated again. Summaries of the marked values come out (a
scan returns a row for each iteration, a while loop adds them up, an untaken branch contributes
nothing); perturbations, and sinks for cotangents, go in. jax.experimental.checkify and oryx's
harvest work this way. Invariant: equations without marks are evaluated unchanged; a mark that
cannot be taken out is in the survey with a reason, never a guess.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from nnx_inspector._compat import jaxprs, jit
from nnx_inspector._compat.configuration import ours
from nnx_inspector._compat.native import computed_once
from nnx_inspector._compat.sharding import a_row_each, counted_once, on_this_mesh, placed, zeros_of
from nnx_inspector.program.analysis.error_notes import note_equation
from nnx_inspector.program.changes import difference
from nnx_inspector.program.equations import bodies_of
from nnx_inspector.program.marks import (
    CHANGE,
    INPUT,
    OUTPUT,
    describe,
    mapped_first,
    observe_cotangent,
    only_if,
    sink_like,
    sinks_apart,
)
from nnx_inspector.program.survey import Around, Item, Marked, Survey, lengths_of
from nnx_inspector.stats.census import Sample
from nnx_inspector.stats.summarize import merge_in_trace, merge_rows, summarize
from nnx_inspector.stats.summary import Summary
from nnx_inspector.stats.units import MAX_UNITS, Units, measure_units, merge_units

Reduce = Callable[[jax.Array], Any]
"""A function of an array that returns the arrays to keep."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """What was kept of one array.

    Attributes:
        value: the array, or the result of a reduction; None if it was not asked for.
        units: figures for each unit of an axis; None if they were not asked for, or the array
            has no such axis or more than `MAX_UNITS` units.
    """

    value: Any = None
    units: Units | None = None


@dataclasses.dataclass(frozen=True)
class Keep:
    """What to keep of marked arrays; false if nothing.

    Attributes:
        values: whether to keep the arrays, or a function of what to keep of each.
        units: the axis whose units are measured, or None.
        parts: the parts (of calls) whose marks are kept.
        sites: the sites whose marks are kept; None for all.
    """

    values: bool | Reduce = False
    units: int | None = None
    parts: tuple[str, ...] = (OUTPUT, INPUT)
    sites: tuple[str, ...] | None = None

    def __bool__(self) -> bool:
        return bool(self.values) or self.units is not None

    def keeps(self, site: str, part: str) -> bool:
        """Whether anything is kept of a mark."""
        return bool(self) and part in self.parts and (self.sites is None or site in self.sites)

    def additive(self) -> Keep:
        """The same without values, which do not add up over iterations."""
        return dataclasses.replace(self, values=False)

    def of(self, x: jax.Array, *, site: str, mapped: int = 0) -> Kept:
        """What is kept of an array whose first `mapped` axes come from vmaps."""
        value: Any = None
        if callable(self.values):
            try:
                value = self.values(x)
            except Exception as error:
                error.add_note(f"nnx_inspector: in values= at site {site!r}, of {describe(x)}.")
                raise
        elif self.values:
            value = x
        return Kept(value, self._units(jax.lax.stop_gradient(x), mapped))

    def _units(self, x: jax.Array, mapped: int) -> Units | None:
        if self.units is None or not -(x.ndim - mapped) <= self.units < x.ndim - mapped:
            return None
        axis = self.units if self.units < 0 else self.units + mapped
        return measure_units(x, axis=axis) if x.shape[axis] <= MAX_UNITS else None


NOTHING = Keep()
"""Keeps nothing but summaries."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do at the marks.

    Attributes:
        summarise: whether values are reduced to summaries.
        perturb: `(mark, arrays, rows) -> arrays` for outputs and inputs; it may close over arrays.
            `rows` is the attribute below.
        numbered: whether `perturb` depends on the number of the call at its site.
        rows: for each enclosing scan, outermost first: the iteration's index and their number.
        keep: what to keep besides summaries.
        sample: distributions are of every `sample`-th slice of a value; see `summarize`.
        tap: the function that ties a value to its sink: `(value, sink, sample=) -> value`.
        unmeasured: the sites that are only perturbed.
        gate: bool[], whether anything is measured when the program runs; None if it is. Under a
            vmap around the call, what it gates is measured of the whole batch.
    """

    summarise: bool = True
    perturb: Callable[[Marked, list[Any], tuple[Any, ...]], list[Any]] | None = None
    numbered: bool = True
    rows: tuple[tuple[Any, int], ...] = ()
    keep: Keep = NOTHING
    sample: Sample = "auto"
    tap: Callable[..., Any] = observe_cotangent
    unmeasured: tuple[str, ...] = ()
    gate: Any = None

    def measured(self, measure: Callable[[jax.Array], Any], x: jax.Array) -> Any:
        """What a function measures of an array, if anything is measured."""
        return measure(x) if self.gate is None else only_if(self.gate, measure, x)


@ours()
def sinks_for(found: Survey) -> list[Any]:
    """Zeros for every output that may receive a cotangent, nested like the survey."""

    def zeros(mark: Marked, around: Around) -> list[Any]:
        # reverse mode does not go through a while loop
        if mark.part != OUTPUT or any(item.kind == "while" for item in around):
            return []
        rows = tuple(map(abs, lengths_of(around)))
        pairs = zip(mark.avals, mark.differentiable, strict=True)
        return [sink_like(aval, rows) if able else None for aval, able in pairs]

    return found.nested(zeros)


def evaluate(
    found: Survey, args: Sequence[Any], *, plan: Plan, sinks: list[Any] | None = None
) -> tuple[list[Any], list[Any]]:
    """Run a surveyed jaxpr.

    Args:
        found: the result of `survey`.
        args: one array for each of the jaxpr's inputs.
        plan: what to do at the marks.
        sinks: the result of `sinks_for`, or None to leave cotangents alone.

    Returns:
        The outputs, and what was seen: a `Seen` for each mark, nested like the survey, and nothing
        for the second pass of a remat.
    """
    env: dict[Any, Any] = {}
    memo: dict[int, tuple[Any, Summary]] = {}

    def read(atom: Any) -> Any:
        return atom.val if jaxprs.is_literal(atom) else env[atom]

    env.update(zip(found.jaxpr.constvars, found.consts, strict=True))
    env.update(zip(found.jaxpr.invars, args, strict=True))
    seen: list[Any] = []
    for number, equation in enumerate(found.jaxpr.eqns):
        values = [read(v) for v in equation.invars]
        item = found.items.get(number)
        try:
            if item is None:
                out = jaxprs.bind(equation, values)
            else:
                sink = None if sinks is None else sinks[len(seen)]
                with jaxprs.context_of(equation):
                    out, new = run_item(item, equation, values, plan, on_this_mesh(sink), memo)
                seen.append(on_this_mesh(new))
        except FloatingPointError as error:  # the user's `jax_debug_nans`
            note_equation(error, found, number)
            raise
        env.update(zip(equation.outvars, out, strict=True))
    return [_as_array(read(v)) for v in found.jaxpr.outvars], seen


def _as_array(x: Any) -> Any:
    """A constant of the program, which jax holds in types of its own, as an array. A NumPy array of
    the user's stays one.
    """
    if isinstance(x, jax.Array) or type(x) is np.ndarray:
        return x
    with ours():
        return jnp.asarray(x)


def run_item(
    item: Item, equation: Any, values: list[Any], plan: Plan, sink: Any, memo: dict[int, Any]
) -> tuple[list[Any], Any]:
    """Run one equation that holds marks; returns its results, and what was seen.

    Args:
        item: the equation's entry in the survey.
        equation: the equation, for its primitive's parameters.
        values: its operands.
        plan: what to do at the marks.
        sink: its part of `sinks_for`, or None.
        memo: the summaries of values, by the values' ids.
    """
    return _RUN[item.kind](item, equation, values, plan, sink, memo)


@dataclasses.dataclass(frozen=True)
class _Summarise:
    """Reduces an array to its summary."""

    sample: Sample

    def __call__(self, x: jax.Array) -> Summary:
        return summarize(x, sample=self.sample)


@dataclasses.dataclass(frozen=True)
class _KeepOf:
    """Reduces an array to what is kept of it."""

    keep: Keep
    site: str
    mapped: int

    def __call__(self, x: jax.Array) -> Kept:
        return self.keep.of(x, site=self.site, mapped=self.mapped)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seen:
    """What one mark saw: a summary for each array, how often the mark was passed, and what was kept
    of each array.
    """

    summaries: list[Summary]
    ran: jax.Array
    kept: list[Kept] = dataclasses.field(default_factory=lambda: list[Kept]())


def _run_mark(
    item: Item, equation: Any, values: list[Any], plan: Plan, sink: Any, memo: dict[int, Any]
) -> Any:
    marked = item.mark
    assert marked is not None
    values = list(map(_as_array, values))
    if marked.part in (OUTPUT, INPUT) and plan.perturb is not None:
        values = plan.perturb(marked, values, plan.rows)
    measures = marked.site not in plan.unmeasured
    keeps = measures and plan.keep.keeps(marked.site, marked.part)
    summarises = measures and plan.summarise
    if marked.part == OUTPUT and (summarises or keeps):
        values = [v if memo.get(id(v), (None,))[0] is v else computed_once(v) for v in values]
    summaries: list[Summary] = []
    if summarises:
        for value in [difference(*values[:2])] if marked.part == CHANGE else values:
            known = memo.get(id(value))
            if known is None or known[0] is not value:
                read = _Summarise(plan.sample)
                known = memo[id(value)] = (value, plan.measured(read, value))
            summaries.append(known[1])
    kept: list[Kept] = []
    if keeps:
        for value, mapped in zip(values, marked.mapped, strict=True):
            keep = _KeepOf(plan.keep, marked.site if plan.gate is None else "", len(mapped))
            kept.append(plan.measured(keep, mapped_first(value, mapped)))
    if marked.part == OUTPUT and sink is not None:
        tapped = []
        for value, one in zip(values, sink, strict=True):
            new = value
            if one is not None:
                gated = {} if plan.gate is None else {"gate": plan.gate}
                new = plan.tap(value, one, sample=plan.sample, **gated)
            if new is not value and id(value) in memo:
                memo[id(new)] = (new, memo[id(value)][1])
            tapped.append(new)
        values = tapped
    with ours():
        return values, Seen(summaries, jnp.uint32(1), kept)


def _run_scan(
    item: Item, equation: Any, values: list[Any], plan: Plan, sink: Any, memo: dict[int, Any]
) -> Any:
    (form,), child = bodies_of(equation), item.children[0]
    start = form.consts + form.carry
    consts, init, xs = values[: form.consts], values[form.consts : start], values[start:]

    def body(carry: Any, x: Any) -> Any:
        elements, one, row = x
        within = dataclasses.replace(plan, rows=(*plan.rows, (row, form.times)))
        out, seen = evaluate(child, [*consts, *carry, *elements], plan=within, sinks=one)
        return out[: len(init)], (out[len(init) :], seen)

    inner = None if sink is None else sink[0]
    rows = None if plan.perturb is None else jnp.arange(form.times)
    carry, (ys, seen) = jax.lax.scan(
        body,
        init,
        (xs, inner, rows),
        length=form.times,
        reverse=form.backwards,
        unroll=equation.params["unroll"],
    )
    return [*carry, *ys], [seen]


def _run_while(
    item: Item, equation: Any, values: list[Any], plan: Plan, sink: Any, memo: dict[int, Any]
) -> Any:
    test, body = item.children
    n_test, n_body = (form.consts for form in bodies_of(equation))
    test_consts, body_consts = values[:n_test], values[n_test : n_test + n_body]
    init = values[n_test + n_body :]
    plan = dataclasses.replace(plan, keep=plan.keep.additive())

    def step(carry: Any) -> Any:
        return evaluate(body, [*body_consts, *carry], plan=plan)

    nothing = _zeros(jax.eval_shape(step, init)[1])

    def advance(state: Any) -> Any:
        out, seen = step(state[0])
        return out, merge_seen(state[1], seen)

    def proceed(state: Any) -> Any:
        return evaluate(test, [*test_consts, *state[0]], plan=Plan(summarise=False))[0][0]

    out, seen = jax.lax.while_loop(proceed, advance, (init, nothing))
    return out, [[], seen]


@ours()
def merge_seen(a: Any, b: Any) -> Any:
    """The sum of two trees of `Seen` with equal structure."""

    def add(x: Any, y: Any) -> Any:
        if isinstance(x, Summary):
            return merge_in_trace(x, y)
        return merge_units([x, y]) if isinstance(x, Units) else x + y

    return jax.tree.map(add, a, b, is_leaf=lambda x: isinstance(x, (Summary, Units)))


def _run_cond(
    item: Item, equation: Any, values: list[Any], plan: Plan, sink: Any, memo: dict[int, Any]
) -> Any:
    index, *operands = values

    def branch(number: int, operands: Any) -> Any:
        one = None if sink is None else sink[number]
        return evaluate(item.children[number], operands, plan=plan, sinks=one)

    runs = [functools.partial(branch, n) for n in range(len(item.children))]
    nothing = [_zeros(jax.eval_shape(run, operands)[1]) for run in runs]

    def padded(number: int, operands: Any) -> Any:
        out, seen = runs[number](operands)
        return out, [seen if n == number else nothing[n] for n in range(len(runs))]

    branches = [functools.partial(padded, n) for n in range(len(runs))]
    return jax.lax.switch(index, branches, operands)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(zeros_of, shapes)


def _run_remat(
    item: Item, equation: Any, values: list[Any], plan: Plan, sink: Any, memo: dict[int, Any]
) -> Any:
    params = equation.params
    if item.again:
        plan = dataclasses.replace(plan, summarise=False, keep=NOTHING)

    def body(values: Any, sink: Any) -> Any:
        return evaluate(item.children[0], values, plan=plan, sinks=sink)

    again = jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=params["policy"])
    out, seen = again(values, None if sink is None else sink[0])
    return out, [] if item.again else [seen]


def _run_jit(
    item: Item, equation: Any, values: list[Any], plan: Plan, sink: Any, memo: dict[int, Any]
) -> Any:
    def body(values: Any, sink: Any) -> Any:
        return evaluate(item.children[0], values, plan=plan, sinks=sink)

    inner = None if sink is None else sink[0]
    before, after = jaxprs.jit_shardings(equation)
    if any(jit.is_tracer(v) for v in values):
        body.__name__ = equation.params.get("name", "jit")
        jitted = jax.jit(body, in_shardings=(before, None), out_shardings=(after, None))
        out, seen = jitted(values, inner)
    else:  # a new function would compile each time: run eager calls equation by equation
        out, seen = body(placed(values, before), inner)
        out = placed(out, after)
    return out, [seen]


def _run_shard_map(
    item: Item, equation: Any, values: list[Any], plan: Plan, sink: Any, memo: dict[int, Any]
) -> Any:
    """Each device measures its own part; the results and cotangents are merged outside."""
    axes, params = jaxprs.shard_map_parts(equation)
    count = math.prod(params["mesh"].shape[axis] for axis in axes)
    at = a_row_each(params["mesh"], axes)
    a_device_each = PartitionSpec(axes)
    plan = dataclasses.replace(plan, keep=NOTHING)  # a device may not see all units

    def body(values: Any, sinks: Any) -> Any:
        sinks = jax.tree.map(lambda s: s[0], sinks)
        out, seen = evaluate(item.children[0], values, plan=plan, sinks=sinks)
        once = functools.partial(_once, axes=axes if params["check_vma"] else ())
        return out, jax.tree.map(lambda x: x[None], _each_seen(once, seen))

    params["in_specs"] = (params["in_specs"], a_device_each)
    params["out_specs"] = (params["out_specs"], a_device_each)
    apart = lambda s: sinks_apart(s, count, at)  # noqa: E731
    inner = jax.tree.map(apart, None if sink is None else sink[0])
    run: Callable[..., Any] = jax.shard_map(body, **params)
    if not any(jit.is_tracer(v) for v in values):
        run = jax.jit(run)
    out, seen = run(values, inner)
    return out, [_each_seen(_of_all_devices, seen)]


def _each_seen(f: Callable[[Seen], Seen], seen: Any) -> Any:
    return jax.tree.map(f, seen, is_leaf=lambda x: isinstance(x, Seen))


def _once(seen: Seen, axes: tuple[str, ...]) -> Seen:
    def once(s: Summary) -> Summary:
        return jax.tree.map(functools.partial(counted_once, like=s.bins, axes=axes), s)

    return dataclasses.replace(seen, summaries=[once(s) for s in seen.summaries])


def _of_all_devices(seen: Seen) -> Seen:
    return Seen([merge_rows(s) for s in seen.summaries], seen.ran.max(axis=0))


def _run_inline(
    item: Item, equation: Any, values: list[Any], plan: Plan, sink: Any, memo: dict[int, Any]
) -> Any:
    inner = None if sink is None else sink[0]
    out, seen = evaluate(item.children[0], values, plan=plan, sinks=inner)
    return out, [seen]


_RUN: dict[str, Callable[..., Any]] = {
    "mark": _run_mark,
    "scan": _run_scan,
    "while": _run_while,
    "cond": _run_cond,
    "jit": _run_jit,
    "remat": _run_remat,
    "shard_map": _run_shard_map,
    "inline": _run_inline,
}
