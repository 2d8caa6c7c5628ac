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
from jax.sharding import PartitionSpec

from nnx_inspector._compat import jaxprs, jit
from nnx_inspector._compat.configuration import ours
from nnx_inspector._compat.native import computed_once
from nnx_inspector._compat.sharding import a_row_each, counted_once, on_this_mesh, placed, zeros_of
from nnx_inspector.program.analysis.equations import bodies_of
from nnx_inspector.program.analysis.error_notes import note_equation
from nnx_inspector.program.changes import difference
from nnx_inspector.program.host.sinks import sink_like, sink_of_branch, sinks_apart
from nnx_inspector.program.marks import (
    CHANGE,
    INPUT,
    OUTPUT,
    mapped_first,
)
from nnx_inspector.program.plan import NOTHING, Keep, Kept, Plan, Seen, merge_seen
from nnx_inspector.program.rewrite import as_array
from nnx_inspector.program.survey import Around, Item, Marked, Survey
from nnx_inspector.stats.census import Sample
from nnx_inspector.stats.summarize import merge_rows, summarize
from nnx_inspector.stats.summary import Summary


@ours()
def sinks_for(found: Survey) -> list[Any]:
    """Zeros for every output that may receive a cotangent, nested like the survey."""

    def zeros(mark: Marked, around: Around) -> list[Any]:
        # reverse mode does not go through a while loop
        if mark.part != OUTPUT or any(item.kind == "while" for item in around):
            return []
        rows = tuple(map(abs, mark.rows(around)))
        pairs = zip(mark.avals, mark.differentiable, strict=True)
        return [sink_like(aval, rows) if able else None for aval, able in pairs]

    return found.nested(zeros)


def evaluate(
    found: Survey, args: Sequence[Any], *, plan: Plan, sinks: list[Any] | None = None
) -> tuple[list[Any], list[Any]]:
    """Run a surveyed jaxpr.

    Args:
        args: one array for each of the jaxpr's inputs.
        sinks: the result of `sinks_for`, or None to leave cotangents alone.

    Returns:
        The outputs, and what was seen: a `Seen` for each mark, nested like the survey, and nothing
        for the second pass of a remat.
    """
    env: dict[Any, Any] = {}
    memo: dict[int, tuple[Any, int | None, Summary]] = {}

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
    return [as_array(read(v)) for v in found.jaxpr.outvars], seen


def run_item(
    item: Item, equation: Any, values: list[Any], plan: Plan, sink: Any, memo: dict[int, Any]
) -> tuple[list[Any], Any]:
    """Run one equation that holds marks; returns its results, and what was seen.

    `sink` is its part of `sinks_for`, or None; `memo` holds the values, each with the axis of its
    members and its summary, by their ids.
    """
    return _RUN[item.kind](item, equation, values, plan, sink, memo)


@dataclasses.dataclass(frozen=True)
class _Summarise:
    """Reduces an array to its summary, or to one for each entry of its first axis."""

    sample: Sample
    rows: int = 0

    def __call__(self, x: jax.Array, *gate: Any) -> Summary:
        return summarize(x, *gate, batch_rank=self.rows, sample=self.sample)


@dataclasses.dataclass(frozen=True)
class _KeepOf:
    """Reduces an array to what is kept of it."""

    keep: Keep
    site: str
    mapped: tuple[int, ...]
    rows: int = 0

    def __call__(self, x: jax.Array, *gate: Any) -> Kept:
        one = lambda x: self._of(x, *gate)  # noqa: E731
        return jax.vmap(one)(x) if self.rows else one(x)

    def _of(self, x: jax.Array, *gate: Any) -> Kept:
        x, mapped = mapped_first(x, self.mapped), len(self.mapped)
        return self.keep.of(x, *gate, site=self.site, mapped=mapped)


def _run_mark(
    item: Item, equation: Any, values: list[Any], plan: Plan, sink: Any, memo: dict[int, Any]
) -> Any:
    marked = item.mark
    assert marked is not None
    values = list(map(as_array, values))
    if marked.part in (OUTPUT, INPUT) and plan.perturb is not None:
        values = _perturbed(plan.perturb, marked, values, plan.rows)
    measures = marked.site not in plan.unmeasured
    keeps = measures and plan.keep.keeps(marked.site, marked.part)
    summarises = measures and plan.summarise
    if marked.part == OUTPUT and (summarises or keeps):
        values = [v if memo.get(id(v), (None,))[0] is v else computed_once(v) for v in values]
    axes = marked.member_axes or (None,) * len(values)
    summaries: list[Summary] = []
    if summarises:
        changed = marked.part == CHANGE
        for value, axis in zip(
            [difference(*values[:2])] if changed else values, axes, strict=False
        ):
            known = memo.get(id(value))
            if known is None or known[0] is not value or known[1] != axis:
                read = _Summarise(plan.sample, rows=int(axis is not None))
                rows = value if axis is None else jnp.moveaxis(value, axis, 0)
                known = memo[id(value)] = (value, axis, plan.measured(read, rows))
            summaries.append(_for_each(marked, axis, known[2]))
    kept: list[Kept] = []
    if keeps:
        for value, mapped, axis in zip(values, marked.mapped, axes, strict=True):
            site = marked.site if plan.gate is None else ""
            keep = _KeepOf(plan.keep, site, mapped, rows=int(axis is not None))
            rows = value if axis is None else jnp.moveaxis(value, axis, 0)
            kept.append(_for_each(marked, axis, plan.measured(keep, rows)))
    if marked.part == OUTPUT and sink is not None:
        tapped = []
        for value, axis, one in zip(values, axes, sink, strict=True):
            new = value
            if one is not None:
                which = {"gate": plan.gate, "apart": plan.apart, "each": plan.each}
                gated = {} if plan.gate is None else which
                tap = functools.partial(plan.tap, sample=plan.sample, **gated)
                new = tap(value, one) if axis is None else _of_members(tap, axis)(value, one)
            if new is not value and id(value) in memo:
                memo[id(new)] = (new, *memo[id(value)][1:])
            tapped.append(new)
        values = tapped
    with ours():
        return values, Seen(summaries, jnp.ones(marked.rows(()), jnp.uint32), kept)


def _of_members(f: Callable[..., Any], axis: int) -> Callable[..., Any]:
    """A function of an array, applied to each member of an ensemble."""
    return lambda x, *others: jax.vmap(f, in_axes=(axis, *(0,) * len(others)), out_axes=axis)(
        x, *others
    )


def _for_each(marked: Marked, axis: int | None, found: Any) -> Any:
    """What was found in an array, for each member of an ensemble, even if all share the array."""
    if axis is not None or not marked.members:
        return found
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (marked.members, *x.shape)), found)


def _perturbed(
    perturb: Callable[..., list[Any]], marked: Marked, values: list[Any], rows: tuple[Any, ...]
) -> list[Any]:
    if not marked.members:
        return perturb(marked, values, rows)
    axes = list(marked.member_axes)

    def of_member(values: list[Any], number: Any) -> list[Any]:
        return perturb(marked, values, (*rows, (number, marked.members)))

    with ours():
        numbers = jnp.arange(marked.members)
    return jax.vmap(of_member, in_axes=(axes, 0), out_axes=axes)(values, numbers)


def _run_scan(
    item: Item, equation: Any, values: list[Any], plan: Plan, sink: Any, memo: dict[int, Any]
) -> Any:
    (form,), child = bodies_of(equation), item.children[0]
    start = form.consts + form.carry
    consts, init, xs = values[: form.consts], values[form.consts : start], values[start:]

    def body(carry: Any, x: Any) -> Any:
        elements, one, row = x
        around = (*plan.rows, (row, form.times))
        within = dataclasses.replace(plan, rows=around, each=plan.each or plan.apart)
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
    plan, merged = _each(dataclasses.replace(plan, keep=plan.keep.additive()))

    def step(carry: Any) -> Any:
        return evaluate(body, [*body_consts, *carry], plan=plan)

    nothing = _zeros(jax.eval_shape(step, init)[1])

    def advance(state: Any) -> Any:
        out, seen = step(state[0])
        return out, merge_seen(state[1], seen)

    def proceed(state: Any) -> Any:
        return evaluate(test, [*test_consts, *state[0]], plan=Plan(summarise=False))[0][0]

    out, seen = jax.lax.while_loop(proceed, advance, (init, nothing))
    return out, [[], merged(seen)]


def _run_cond(
    item: Item, equation: Any, values: list[Any], plan: Plan, sink: Any, memo: dict[int, Any]
) -> Any:
    index, *operands = values
    plan, merged = _each(plan)
    if plan.each and not plan.apart:
        sink = jax.tree.map(lambda one: sink_of_branch(one, index), sink)

    def branch(number: int, operands: Any) -> Any:
        one = None if sink is None else sink[number]
        return evaluate(item.children[number], operands, plan=plan, sinks=one)

    runs = [functools.partial(branch, n) for n in range(len(item.children))]
    nothing = [_zeros(jax.eval_shape(run, operands)[1]) for run in runs]

    def padded(number: int, operands: Any) -> Any:
        out, seen = runs[number](operands)
        return out, [seen if n == number else nothing[n] for n in range(len(runs))]

    branches = [functools.partial(padded, n) for n in range(len(runs))]
    out, seen = jax.lax.switch(index, branches, operands)
    return out, merged(seen)


def _each(plan: Plan) -> tuple[Plan, Callable[[Any], Any]]:
    """The plan within a cond or a while loop of a watched program, and what to do with what is seen
    there.

    Around them may be a vmap whose examples differ in which branch they take and how often they
    iterate. XLA computes everything for all of them, and drops what an example does not need: so
    each example is measured by itself, and the dropped ones are dropped too. The members of an
    ensemble stay apart.
    """
    if plan.gate is None or plan.each:
        return plan, lambda seen: seen
    return dataclasses.replace(plan, each=True), (lambda seen: seen) if plan.apart else together


def together(seen: Any) -> Any:
    """What was seen of each example of a vmap, as what was seen of all; a tree of `Seen`."""
    with ours():
        return _together(jax.lax.stop_gradient(seen))


@jax.custom_batching.custom_vmap
def _together(seen: Any) -> Any:
    return seen


@_together.def_vmap
def _batch_together(size: int, every: Any, seen: Any) -> Any:
    """Merge the examples; what is kept of them does not add up, and is zeros."""
    (batched,) = every

    def merged(one: Any, mapped: Any) -> Any:
        if not any(jax.tree.leaves(mapped)):
            return one
        whole = jax.tree.map(
            lambda x, there: x if there else jnp.broadcast_to(x, (size, *x.shape)), one, mapped
        )
        kept = jax.tree.map(lambda x: jnp.zeros_like(x[0]), whole.kept)
        return Seen([merge_rows(s) for s in whole.summaries], whole.ran.max(axis=0), kept)

    found = jax.tree.map(merged, seen, batched, is_leaf=lambda x: isinstance(x, Seen))
    with ours():
        found = _together(found)
    return found, jax.tree.map(lambda _: False, found)


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
