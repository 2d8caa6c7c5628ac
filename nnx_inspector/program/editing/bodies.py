"""Enters the equations that hold jaxprs: how what is seen inside comes out of each.

A scan stacks it, a while loop adds it up, the branches of a cond that are not taken give zeros, and
each device of a shard_map gives a row. A new primitive is one function here and one entry of
`ENTER`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat import eqn_params, jaxprs
from nnx_inspector._compat.launching.batched import ends_together
from nnx_inspector.program.analysis.equations import Body as Form
from nnx_inspector.program.analysis.equations import bodies_of
from nnx_inspector.program.analysis.identity import Values
from nnx_inspector.program.editing.body import Body
from nnx_inspector.program.editing.editor import GATE, WHERE, Enter
from nnx_inspector.program.editing.functions import (
    NARROW,
    Partial,
    is_multiple,
    merged,
    merged_rows,
    next_number,
    put_in_ring,
    put_in_rows,
    row_of,
    update_of,
    zeros,
)
from nnx_inspector.program.editing.slots import Always, Output, Slot, each_slot
from nnx_inspector.program.editing.transformations import Transformations
from nnx_inspector.program.editing.updates import added_to, inputs_of_calls
from nnx_inspector.program.marks import GRADIENT
from nnx_inspector.program.plan import NOTHING, Kept, Seen
from nnx_inspector.program.survey import Item, stride_of
from nnx_inspector.typing import Atom, Equation, Jaxpr, PyTree, Value, Var

PASSES = 64
"""How many of the last passes that begin in a while loop are kept apart. How often it runs is known
only afterwards."""


class Edited(str):
    """The name of a jitted function that was edited. It reads as before, but jax keeps the object
    when it differentiates the function, so that what comes of it is known as edited too.
    """


def _jaxpr(inner: Body, own: Jaxpr, outputs: Sequence[Var] | None = None) -> Jaxpr:
    """A body as a jaxpr of the same kind as its own."""
    inputs = [v for v, _ in inner.places.values()]
    outputs = inner.outputs if outputs is None else outputs
    return jaxprs.edited(own, inputs=inputs, equations=inner.equations, outputs=outputs)


def _effects(*every: object) -> frozenset[object]:
    return frozenset().union(*(jaxprs.open_jaxpr(one)[0].effects for one in every))


def _moved(inner: Body, slots: Sequence[Slot]) -> PyTree:
    """What a body saw, with the outer slots of its fields."""
    return each_slot(lambda x: slots[x.number] if isinstance(x, Output) else x, inner.seen)


def _given(self: Body, item: Item, equation: Equation, operands: list[Value]) -> PyTree:
    (result,) = equation.outvars
    self.put(result, self.given(equation))
    return []


def _choice(self: Body, item: Item, equation: Equation, operands: list[Var]) -> PyTree:
    """A softmax that chooses: its figures are those of each head, or of each expert."""
    marked, plan = item.mark, self.of.plan
    assert marked is not None
    assert marked.choice is not None
    for result, operand in zip(equation.outvars, operands, strict=True):
        self.put(result, operand)
    is_measured = plan.summarise and plan.choices and not self.of.again
    if not is_measured or marked.site.rpartition("@")[0] in plan.unmeasured:
        return Seen([], Always(()))
    return Seen([], Always(()), [Kept(self.slot(self.measured(marked.choice, operands, equation)))])


def _positions(self: Body, item: Item, equation: Equation, operands: list[Value]) -> PyTree:
    """From here on, the mask is that of a call that begins."""
    if self.of.presence:
        self.add(equation.replace(invars=operands))
        return []
    for variable, atom in zip(equation.outvars, operands, strict=True):
        self.put(variable, atom)
    key = WHERE, equation.params["owner"]
    self.own = {one: atom for one, atom in self.own.items() if one[:2] != key}
    self.own[key] = operands[-1]
    return []


def _counts(self: Body, item: Item, equation: Equation, operands: list[Value]) -> PyTree:
    params, (result,) = equation.params, equation.outvars
    if self.of.presence:
        self.add(equation.replace(invars=operands))
    else:
        key = WHERE, params["owner"], params["kind"].shape, params["mapped"]
        self.put(result, self.place(key, result.aval))
    return []


def _whole(
    self: Body, equation: Equation, operands: list[Value], inner: Body, new: Jaxpr
) -> PyTree:
    """Add an equation of which a body is all, so that what it saw leaves it as it is."""
    given = [*self.given_to(inner), *operands]
    avals = [atom.aval for atom in inner.fields]
    return _moved(inner, self.take(equation, given, equation.params, avals, _effects(new)))


def _jit(self: Body, item: Item, equation: Equation, operands: list[Var]) -> PyTree:
    inner = self.body(item.children[0], equation)
    new = _jaxpr(inner, equation.params["jaxpr"])
    params = eqn_params.with_inputs(
        equation.params, new, len(inner.places), outputs=len(inner.fields)
    )
    params["name"] = Edited(params["name"])
    return [_whole(self, equation.replace(params=params), operands, inner, new)]


def _remat(self: Body, item: Item, equation: Equation, operands: list[Atom]) -> PyTree:
    before = self.of.again
    self.of.again = before or item.again
    inner = self.body(item.children[0], equation)
    self.of.again = before
    new = _jaxpr(inner, equation.params["jaxpr"])
    params = eqn_params.remat_with(equation.params, new, inputs=len(inner.places))
    seen = _whole(self, equation.replace(params=params), operands, inner, new)
    backward = any(mark.part == GRADIENT for mark in item.children[0].marks)
    return [seen] if backward or not item.again else []


def _inline(self: Body, item: Item, equation: Equation, operands: list[Value]) -> PyTree:
    inner = self.body(item.children[0], equation)
    (own,) = jaxprs.sub_jaxprs(equation)
    new = _jaxpr(inner, own)
    params = jaxprs.with_jaxprs(equation.params, lambda _: new)
    return [_whole(self, equation.replace(params=params), operands, inner, new)]


def _custom(self: Body, item: Item, equation: Equation, operands: list[Value]) -> PyTree:
    """A call with a rule of its own for derivatives, for which nobody asks any more."""
    inner = self.body(item.children[0], equation)
    new = _jaxpr(inner, next(iter(jaxprs.sub_jaxprs(equation))))
    primitive, params = jaxprs.closed_call(new)
    plain = equation.replace(primitive=primitive, params=params)
    return [_whole(self, plain, operands, inner, new)]


def _scan(self: Body, item: Item, equation: Equation, operands: list[Var]) -> PyTree:
    (form,) = bodies_of(equation)
    of, length, key = self.of, form.times or 0, ("row", next(self.of.counted))
    every = 1
    if of.plan.summarise and not of.gated:
        every = stride_of(item, of.depths, len(self.around), of.most_rows)
    thins = every > 1
    count = -(-length // every)  # of the rows that are kept
    counts = thins or of.plan.perturb is not None or item.children[0].takes_rows
    around = (*self.around, (key, length))
    inner = Body(of, item.children[0], around, home=equation)
    number = self.type_of(np.int32, equation)
    counter = jaxprs.variable(number)
    if counts:
        inner.own[key] = inner.traced(Partial(row_of, form.backwards, length), [counter], equation)[
            0
        ][0]
    if thins:
        inner.own[GATE] = inner.traced(Partial(is_multiple, every), [inner.own[key]], equation)[0][
            0
        ]
    of.gated |= thins
    inner.edit()
    see_moves(inner, lambda inputs: _carried(inner, form, inputs))
    inner.finish(equation)
    of.gated &= not thins
    carried, ys = inner.outputs[: form.carry], inner.outputs[form.carry :]
    fields = [atom.aval for atom in inner.fields]
    more: list[tuple[Atom, Atom, Atom]] = []  # input, output and first value of what is carried too
    if counts:
        after, _ = inner.traced(Partial(next_number), [counter], equation)
        more.append((counter, after[0], jaxprs.literal(np.int32(0))))
    if thins:
        ys = ys[: len(ys) - len(fields)]
        rows = [jaxprs.stacked(aval, count) for aval in fields]
        nothing, _ = self.traced(Partial(zeros, tuple(rows)), [], equation)
        before = list(map(jaxprs.variable, rows))
        put = [inner.own[GATE], inner.own[key], *before, *inner.fields]
        after, _ = inner.traced(Partial(put_in_rows, every, len(rows)), put, equation)
        more += zip(before, after, nothing, strict=True)
    new = _jaxpr(inner, equation.params["jaxpr"], [*carried, *(x for _, x, _ in more), *ys])
    start = len(inner.places) + form.consts + form.carry
    bare, _ = jaxprs.open_jaxpr(new)
    inputs = [*bare.invars[:start], *(x for x, _, _ in more), *bare.invars[start:]]
    new = jaxprs.closed_like(new, bare.replace(invars=inputs))
    more_of = {"consts": len(inner.places), "carry": len(more)}
    more_of["outputs"] = 0 if thins else len(fields)
    params = eqn_params.scan_with(equation.params, new, **more_of)
    first, results = form.consts + form.carry, equation.outvars
    passed = [jaxprs.variable(x.aval) for x, _, _ in more]
    stacked = passed[1:]
    if not thins:
        stacked = [jaxprs.variable(jaxprs.stacked(aval, length)) for aval in fields]
    taken = [*operands[:first], *(x for _, _, x in more), *operands[first:]]
    outputs = [*results[: form.carry], *passed, *results[form.carry :], *(() if thins else stacked)]
    self.add(
        equation.replace(
            invars=[*self.given_to(inner), *taken],
            outvars=outputs,
            params=params,
            effects=_effects(new),
        )
    )
    slots = list(map(self.slot, self.at_home(stacked, equation)))

    def each(x: Slot) -> Slot:
        return slots[x.number] if isinstance(x, Output) else Always((count, *x.shape))

    return [each_slot(each, inner.seen)]


def see_moves(self: Body, result_of: Callable[[list[int]], Mapping[int, Atom]]) -> None:
    """See how far the parameters of the calls inside are moved: from the input that each comes from
    to what `result_of` says takes its place; how much of what is added to those of 16 bits is
    lost; and how much of it weight decay and clipping make.
    """
    if not self.of.plan.summarise or self.of.presence:
        return
    every = list(inputs_of_calls(self.found))
    here = [(p, n) for mark, p, n in every if (id(mark), p) not in self.of.moved]
    after = result_of(sorted({n for _, n in here})) if here else {}
    narrow = {n: v for n, v in after.items() if v.aval.dtype.name in NARROW}
    added = added_to(self.found.jaxpr, narrow) if narrow else {}
    seen: dict[str, Slot] = {}
    done = Transformations(self.found.jaxpr) if after else None
    for path, n in here:
        if done is not None and n in after and path not in seen:
            ends = [self.found.jaxpr.invars[n], after[n]]
            meant = [added[n]] if n in added else []
            decay, clipped = done.of(*ends)
            found = [one for one in (decay, clipped) if one is not None]
            measure = Partial(
                update_of,
                int(path in self.of.stacked),
                bool(meant),
                None if decay is None else decay.how,
                None if clipped is None else clipped.how,
            )
            atoms = [*ends, *meant, *(x for one in found for x in one.atoms)]
            seen[path] = self.slot(self.measured(measure, self.read(atoms), self.home))
    self.of.moved |= {(id(mark), p) for mark, p, _ in every if p in seen}
    if seen:
        self.seen.append(seen)


def _carried(inner: Body, form: Form, inputs: Sequence[int]) -> dict[int, Atom]:
    """What an iteration returns in the place of what it got, unless that is the same."""
    bare = inner.found.jaxpr
    same = Values(bare).same
    among = range(form.consts, form.consts + form.carry)
    pairs = ((n, bare.outvars[n - form.consts]) for n in inputs if n in among)
    return {n: v for n, v in pairs if not same(bare.invars[n], v)}


def _dynamic(inner: Body, like: Equation) -> None:
    """Let a body that may not run return how often it runs, like all else that it sees."""
    known: dict[tuple[int, ...], Slot] = {}

    def once(x: Slot) -> Slot:
        if isinstance(x, Output):
            return x
        if x.shape not in known:
            ones = Partial(jnp.ones, x.shape, jnp.uint32)
            known[x.shape] = inner.slot(inner.measured(ones, [], like))
        return known[x.shape]

    inner.seen = each_slot(once, inner.seen)


def _while(self: Body, item: Item, equation: Equation, operands: list[Value]) -> PyTree:
    test, form = bodies_of(equation)
    of, plan = self.of, self.of.plan
    passes = plan.summarise and not of.gated and item.children[1].begins
    if not passes:
        of.plan = dataclasses.replace(plan, keep=plan.keep.additive(), choices=False)
    seeds, of.seeds = of.seeds, None  # reverse mode does not go through a while loop
    inner = self.body(item.children[1], equation)
    see_moves(inner, lambda inputs: _carried(inner, form, inputs))
    of.plan, of.seeds = plan, seeds
    inner.finish(equation)
    _dynamic(inner, equation)
    found = [atom.aval for atom in inner.fields]
    results = inner.outputs[: len(inner.outputs) - len(found)]
    if passes:
        kept = [jaxprs.stacked(aval, PASSES) for aval in found]
        number = self.type_of(np.int32, equation)
        carried = [jaxprs.variable(aval) for aval in (number, *kept)]
        after, _ = inner.traced(Partial(next_number), carried[:1], equation)
        put = [*carried, *inner.fields]
        after += inner.traced(Partial(put_in_ring, PASSES, len(found)), put, equation)[0]
    else:
        carried, after = [jaxprs.variable(aval) for aval in found], list[Atom]()
        if carried:
            both = [*carried, *inner.fields]
            add = functools.partial(merged, inner.seen, len(found))
            after = inner.traced(add, both, equation)[0]
    own = equation.params["body_jaxpr"]
    new = _jaxpr(inner, own, [*results, *after])
    bare, _ = jaxprs.open_jaxpr(new)
    bare = bare.replace(invars=[*bare.invars, *carried])
    new = jaxprs.closed_like(new, bare)
    avals = [v.aval for v in carried]
    params = eqn_params.while_with(equation.params, new, consts=len(inner.places), carry=len(avals))
    nothing, _ = self.traced(Partial(zeros, tuple(avals)), [], equation)
    given = [*operands[: test.consts], *self.given_to(inner), *operands[test.consts :], *nothing]
    effects = _effects(new, equation.params["cond_jaxpr"])
    with jaxprs.context_of(equation):
        params, given = ends_together(params, given, more=len(avals))
    slots = self.take(equation, given, params, avals, effects)
    if passes:
        return [slots[:1], _moved(inner, slots[1:])]
    return [[], _moved(inner, slots)]


def _cond(self: Body, item: Item, equation: Equation, operands: list[Value]) -> PyTree:
    inner = [self.body(child, equation) for child in item.children]
    for body in inner:
        body.finish(equation)
        _dynamic(body, equation)
    places = {key: place for body in inner for key, place in body.places.items()}
    avals = [atom.aval for body in inner for atom in body.fields]
    branches, start = list[Jaxpr](), 0
    for body, own in zip(inner, equation.params["branches"], strict=True):
        for key, (v, value) in places.items():
            body.place(key, v.aval, value)
        body.places = {key: body.places[key] for key in places}
        end = start + len(body.fields)
        others = [*avals[:start], *avals[end:]]
        nothing, _ = body.traced(Partial(zeros, tuple(others)), [], equation)
        fields = [*nothing[:start], *body.fields, *nothing[start:]]
        results = body.outputs[: len(body.outputs) - len(body.fields)]
        branches.append(_jaxpr(body, own, [*results, *fields]))
        start = end
    params = {**equation.params, "branches": tuple(branches)}
    index, *rest = operands
    given = [index, *(self.place(key, v.aval, value) for key, (v, value) in places.items()), *rest]
    slots, start, seen = self.take(equation, given, params, avals, _effects(*branches)), 0, []
    for body in inner:
        seen.append(_moved(body, slots[start : start + len(body.fields)]))
        start += len(body.fields)
    return seen


def _shard_map(self: Body, item: Item, equation: Equation, operands: list[Value]) -> PyTree:
    """Each device measures its own part; the rows of the devices are merged outside."""
    axes, of = eqn_params.manual_axes(equation), self.of
    before = of.axes, of.inside, of.plan
    of.axes, of.inside = (*of.axes, *axes), equation.params
    # a device may not see all units
    of.plan = dataclasses.replace(of.plan, keep=NOTHING, choices=False)
    inner = self.body(item.children[0], equation)
    of.axes, of.inside, of.plan = before
    new = _jaxpr(inner, equation.params["jaxpr"])
    given, count = self.given_to(inner), len(inner.fields)
    with jaxprs.context_of(equation):
        params, avals = eqn_params.shard_map_with(
            equation.params, new, inputs=len(given), outputs=count, axes=axes
        )
    rows = list(map(jaxprs.variable, avals))
    self.add(
        equation.replace(
            invars=[*given, *operands],
            outvars=[*equation.outvars, *rows],
            params=params,
            effects=_effects(new),
        )
    )
    found, _ = self.traced(functools.partial(merged_rows, inner.seen, count), rows, equation)
    return [_moved(inner, list(map(self.slot, self.at_home(found, equation))))]


ENTER: Mapping[str, Enter] = {
    "mark": Body.mark,
    "choice": _choice,
    "given": _given,
    "positions": _positions,
    "counts": _counts,
    "jit": _jit,
    "remat": _remat,
    "inline": _inline,
    "custom": _custom,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
