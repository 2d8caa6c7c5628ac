"""Enters the equations that hold jaxprs: how what is seen inside comes out of each.

A scan stacks it, a while loop adds it up, the branches of a cond that are not taken give zeros, and
each device of a shard_map gives a row. A new primitive is one function here and one entry of
`EDIT_RULES`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat import eqn_params, jaxprs
from nnx_inspector._compat.launching.presence import with_one_condition
from nnx_inspector.program.analysis.equations import Body as Form
from nnx_inspector.program.analysis.equations import bodies_of
from nnx_inspector.program.analysis.identity import Values
from nnx_inspector.program.editing.context import GATE, WHERE, EditRule
from nnx_inspector.program.editing.functions import (
    NARROW,
    Partial,
    is_multiple,
    merge_device_rows,
    merge_fields,
    next_number,
    put_in_ring,
    put_in_rows,
    row_number,
    update_stats,
    zeros,
)
from nnx_inspector.program.editing.gradient_transforms import GradientTransforms
from nnx_inspector.program.editing.jaxpr_editor import JaxprEditor
from nnx_inspector.program.editing.slots import AlwaysRuns, Output, Slot, map_slots
from nnx_inspector.program.editing.updates import added_to, inputs_of_calls
from nnx_inspector.program.marks import GRADIENT
from nnx_inspector.program.plan import KEEP_NOTHING, KeptArray, Observation
from nnx_inspector.program.survey import Item, row_stride
from nnx_inspector.typing import Atom, Equation, Jaxpr, PyTree, Value, Var

RING_PASSES = 64
"""How many of the last passes that begin in a while loop are kept apart. How often it runs is known
only afterwards."""


class EditedName(str):
    """The name of a jitted function that was edited. It reads as before, but jax keeps the object
    when it differentiates the function, so that what comes of it is known as edited too.
    """


def _jaxpr(inner: JaxprEditor, own: Jaxpr, outputs: Sequence[Var] | None = None) -> Jaxpr:
    """A body as a jaxpr of the same kind as its own."""
    inputs = [v for v, _ in inner.inputs.values()]
    outputs = inner.outputs if outputs is None else outputs
    return jaxprs.edit_jaxpr(own, inputs=inputs, equations=inner.equations, outputs=outputs)


def _effects(*every: object) -> frozenset[object]:
    return frozenset().union(*(jaxprs.open_jaxpr(one)[0].effects for one in every))


def _outer_slots(inner: JaxprEditor, slots: Sequence[Slot]) -> PyTree:
    """What a body saw, with the outer slots of its fields."""
    return map_slots(lambda x: slots[x.number] if isinstance(x, Output) else x, inner.seen)


def _launch_input(
    self: JaxprEditor, item: Item, equation: Equation, operands: list[Value]
) -> PyTree:
    (result,) = equation.outvars
    self.replace(result, self.launch_input(equation))
    return []


def _choice(self: JaxprEditor, item: Item, equation: Equation, operands: list[Var]) -> PyTree:
    """A softmax that chooses: its figures are those of each head, or of each expert."""
    marked, plan = item.mark, self.of.plan
    assert marked is not None
    assert marked.choice is not None
    for result, operand in zip(equation.outvars, operands, strict=True):
        self.replace(result, operand)
    is_measured = plan.summarise and plan.choices and not self.of.again
    if not is_measured or marked.site.rpartition("@")[0] in plan.unmeasured:
        return Observation([], AlwaysRuns(()))
    return Observation(
        [], AlwaysRuns(()), [KeptArray(self.slot(self.measure(marked.choice, operands, equation)))]
    )


def _positions(self: JaxprEditor, item: Item, equation: Equation, operands: list[Value]) -> PyTree:
    """From here on, the mask is that of a call that begins."""
    if self.of.presence:
        self.add(equation.replace(invars=operands))
        return []
    for variable, atom in zip(equation.outvars, operands, strict=True):
        self.replace(variable, atom)
    key = WHERE, equation.params["owner"]
    self.known_inputs = {one: atom for one, atom in self.known_inputs.items() if one[:2] != key}
    self.known_inputs[key] = operands[-1]
    return []


def _position_mask(
    self: JaxprEditor, item: Item, equation: Equation, operands: list[Value]
) -> PyTree:
    params, (result,) = equation.params, equation.outvars
    if self.of.presence:
        self.add(equation.replace(invars=operands))
    else:
        key = WHERE, params["owner"], params["kind"].shape, params["mapped"]
        self.replace(result, self.add_input(key, result.aval))
    return []


def _add_equation(
    self: JaxprEditor, equation: Equation, operands: list[Value], inner: JaxprEditor, new: Jaxpr
) -> PyTree:
    """Add an equation of which a body is all, so that what it saw leaves it as it is."""
    given = [*self.operands_for(inner), *operands]
    avals = [atom.aval for atom in inner.fields]
    slots = self.add_outputs(equation, given, equation.params, avals, _effects(new))
    return _outer_slots(inner, slots)


def _jit(self: JaxprEditor, item: Item, equation: Equation, operands: list[Var]) -> PyTree:
    # The name is an `EditedName`, so that a program that is run equation by equation enters this
    # jit: jax would take an edited function for a new one, and compile it at each call.
    inner = self.body(item.children[0], equation)
    new = _jaxpr(inner, equation.params["jaxpr"])
    params = eqn_params.jit_with(equation.params, new, len(inner.inputs), outputs=len(inner.fields))
    params["name"] = EditedName(params["name"])
    return [_add_equation(self, equation.replace(params=params), operands, inner, new)]


def _remat(self: JaxprEditor, item: Item, equation: Equation, operands: list[Atom]) -> PyTree:
    # jax computes a remat twice in a differentiated program: forwards, and once more in the
    # backward pass. What the second pass computes was seen in the first, so its marks are taken
    # out without being read, except those of gradients, which are nowhere else.
    before = self.of.again
    self.of.again = before or item.again
    inner = self.body(item.children[0], equation)
    self.of.again = before
    new = _jaxpr(inner, equation.params["jaxpr"])
    params = eqn_params.remat_with(equation.params, new, inputs=len(inner.inputs))
    seen = _add_equation(self, equation.replace(params=params), operands, inner, new)
    backward = any(mark.part == GRADIENT for mark in item.children[0].marks)
    return [seen] if backward or not item.again else []


def _inline(self: JaxprEditor, item: Item, equation: Equation, operands: list[Value]) -> PyTree:
    inner = self.body(item.children[0], equation)
    (own,) = jaxprs.sub_jaxprs(equation)
    new = _jaxpr(inner, own)
    params = jaxprs.map_jaxprs(equation.params, lambda _: new)
    return [_add_equation(self, equation.replace(params=params), operands, inner, new)]


def _custom(self: JaxprEditor, item: Item, equation: Equation, operands: list[Value]) -> PyTree:
    """A call with a rule of its own for derivatives, for which nobody asks any more."""
    # Its rule is about the inputs and outputs that it had. In a finished program jax asks for no
    # rule any more, so the function becomes a plain call, whose signature may change.
    inner = self.body(item.children[0], equation)
    new = _jaxpr(inner, next(iter(jaxprs.sub_jaxprs(equation))))
    primitive, params = jaxprs.closed_call(new)
    plain = equation.replace(primitive=primitive, params=params)
    return [_add_equation(self, plain, operands, inner, new)]


def _scan(self: JaxprEditor, item: Item, equation: Equation, operands: list[Var]) -> PyTree:
    # What an iteration sees leaves it as outputs, which a scan stacks: a row for each iteration. A
    # counter is carried where something depends on the number of the iteration. Of a long scan only
    # every so many iterations are measured. Its rows are then carried as whole arrays, each written
    # in its turn, because a scan cannot leave out a row of a stacked output.
    (form,) = bodies_of(equation)
    of, length, key = self.of, form.times or 0, ("row", next(self.of.counted))
    every = 1
    if of.plan.summarise and not of.gated:
        every = row_stride(item, of.depths, len(self.around), of.most_rows)
    thins = every > 1
    count = -(-length // every)  # of the rows that are kept
    counts = thins or of.plan.perturb is not None or item.children[0].takes_rows
    around = (*self.around, (key, length))
    inner = JaxprEditor(of, item.children[0], around, home=equation)
    number = self.type_of(np.int32, equation)
    counter = jaxprs.new_var(number)
    if counts:
        row = Partial(row_number, form.backwards, length)
        inner.known_inputs[key] = inner.insert(row, [counter], equation)
    if thins:
        gate = Partial(is_multiple, every)
        inner.known_inputs[GATE] = inner.insert(gate, [inner.known_inputs[key]], equation)
    of.gated |= thins
    inner.edit()
    measure_updates(inner, lambda inputs: _carried(inner, form, inputs))
    inner.finish(equation)
    of.gated &= not thins
    carried, ys = inner.outputs[: form.carry], inner.outputs[form.carry :]
    fields = [atom.aval for atom in inner.fields]
    more: list[tuple[Atom, Atom, Atom]] = []  # input, output and first value of what is carried too
    if counts:
        after = inner.insert(Partial(next_number), [counter], equation)
        more.append((counter, after, jaxprs.literal(np.int32(0))))
    if thins:
        ys = ys[: len(ys) - len(fields)]
        rows = [jaxprs.stacked_aval(aval, count) for aval in fields]
        nothing = self.insert(Partial(zeros, tuple(rows)), [], equation)
        before = list(map(jaxprs.new_var, rows))
        put = [inner.known_inputs[GATE], inner.known_inputs[key], *before, *inner.fields]
        after = inner.insert(Partial(put_in_rows, every, len(rows)), put, equation)
        more += zip(before, after, nothing, strict=True)
    new = _jaxpr(inner, equation.params["jaxpr"], [*carried, *(x for _, x, _ in more), *ys])
    start = len(inner.inputs) + form.consts + form.carry
    bare, _ = jaxprs.open_jaxpr(new)
    inputs = [*bare.invars[:start], *(x for x, _, _ in more), *bare.invars[start:]]
    new = jaxprs.closed_like(new, bare.replace(invars=inputs))
    more_of = {"consts": len(inner.inputs), "carry": len(more)}
    more_of["outputs"] = 0 if thins else len(fields)
    params = eqn_params.scan_with(equation.params, new, **more_of)
    first, results = form.consts + form.carry, equation.outvars
    passed = [jaxprs.new_var(x.aval) for x, _, _ in more]
    stacked = passed[1:]
    if not thins:
        stacked = [jaxprs.new_var(jaxprs.stacked_aval(aval, length)) for aval in fields]
    taken = [*operands[:first], *(x for _, _, x in more), *operands[first:]]
    outputs = [*results[: form.carry], *passed, *results[form.carry :], *(() if thins else stacked)]
    self.add(
        equation.replace(
            invars=[*self.operands_for(inner), *taken],
            outvars=outputs,
            params=params,
            effects=_effects(new),
        )
    )
    slots = list(map(self.slot, self.to_own_mesh(stacked, equation)))

    def each(x: Slot) -> Slot:
        return slots[x.number] if isinstance(x, Output) else AlwaysRuns((count, *x.shape))

    return [map_slots(each, inner.seen)]


def measure_updates(
    self: JaxprEditor, result_of: Callable[[list[int]], Mapping[int, Atom]]
) -> None:
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
    done = GradientTransforms(self.found.jaxpr) if after else None
    for path, n in here:
        if done is not None and n in after and path not in seen:
            ends = [self.found.jaxpr.invars[n], after[n]]
            meant = [added[n]] if n in added else []
            decay, clipped = done.of(*ends)
            found = [one for one in (decay, clipped) if one is not None]
            measure = Partial(
                update_stats,
                int(path in self.of.stacked),
                bool(meant),
                None if decay is None else decay.how,
                None if clipped is None else clipped.how,
            )
            atoms = [*ends, *meant, *(x for one in found for x in one.atoms)]
            seen[path] = self.slot(self.measure(measure, self.read(atoms), self.home))
    self.of.moved |= {(id(mark), p) for mark, p, _ in every if p in seen}
    if seen:
        self.seen.append(seen)


def _carried(inner: JaxprEditor, form: Form, inputs: Sequence[int]) -> dict[int, Atom]:
    """What an iteration returns in the place of what it got, unless that is the same."""
    bare = inner.found.jaxpr
    same = Values(bare).same
    among = range(form.consts, form.consts + form.carry)
    pairs = ((n, bare.outvars[n - form.consts]) for n in inputs if n in among)
    return {n: v for n, v in pairs if not same(bare.invars[n], v)}


def _count_runs(inner: JaxprEditor, like: Equation) -> None:
    """Let a body that may not run return how often it runs, like all else that it sees."""
    known: dict[tuple[int, ...], Slot] = {}

    def once(x: Slot) -> Slot:
        if isinstance(x, Output):
            return x
        if x.shape not in known:
            ones = Partial(jnp.ones, x.shape, jnp.uint32)
            known[x.shape] = inner.slot(inner.measure(ones, [], like))
        return known[x.shape]

    inner.seen = map_slots(once, inner.seen)


def _while(self: JaxprEditor, item: Item, equation: Equation, operands: list[Value]) -> PyTree:
    # XLA does not know how often a while loop runs, so nothing can be stacked: what iterations see
    # is carried and added up. Kept values and heads do not add up, and are left out. In a loop over
    # passes each of these is worth a row: the last ones are kept in a ring of fixed length. Nothing
    # inside is seeded, because jax does not differentiate a while loop backwards.
    test, form = bodies_of(equation)
    of, plan = self.of, self.of.plan
    passes = plan.summarise and not of.gated and item.children[1].begins
    if not passes:
        of.plan = dataclasses.replace(plan, keep=plan.keep.without_values(), choices=False)
    seeds, of.seeds = of.seeds, None  # reverse mode does not go through a while loop
    inner = self.body(item.children[1], equation)
    measure_updates(inner, lambda inputs: _carried(inner, form, inputs))
    of.plan, of.seeds = plan, seeds
    inner.finish(equation)
    _count_runs(inner, equation)
    found = [atom.aval for atom in inner.fields]
    results = inner.outputs[: len(inner.outputs) - len(found)]
    if passes:
        kept = [jaxprs.stacked_aval(aval, RING_PASSES) for aval in found]
        number = self.type_of(np.int32, equation)
        carried = [jaxprs.new_var(aval) for aval in (number, *kept)]
        after = [inner.insert(Partial(next_number), carried[:1], equation)]
        put = [*carried, *inner.fields]
        after += inner.insert(Partial(put_in_ring, RING_PASSES, len(found)), put, equation)
    else:
        carried, after = [jaxprs.new_var(aval) for aval in found], list[Atom]()
        if carried:
            both = [*carried, *inner.fields]
            add = functools.partial(merge_fields, inner.seen, len(found))
            after = inner.insert(add, both, equation)
    own = equation.params["body_jaxpr"]
    new = _jaxpr(inner, own, [*results, *after])
    bare, _ = jaxprs.open_jaxpr(new)
    bare = bare.replace(invars=[*bare.invars, *carried])
    new = jaxprs.closed_like(new, bare)
    avals = [v.aval for v in carried]
    params = eqn_params.while_with(equation.params, new, consts=len(inner.inputs), carry=len(avals))
    nothing = self.insert(Partial(zeros, tuple(avals)), [], equation)
    before, rest = operands[: test.consts], operands[test.consts :]
    given = [*before, *self.operands_for(inner), *rest, *nothing]
    effects = _effects(new, equation.params["cond_jaxpr"])
    with jaxprs.context_of(equation):
        params, given = with_one_condition(params, given, more=len(avals))
    slots = self.add_outputs(equation, given, params, avals, effects)
    if passes:
        return [slots[:1], _outer_slots(inner, slots[1:])]
    return [[], _outer_slots(inner, slots)]


def _cond(self: JaxprEditor, item: Item, equation: Equation, operands: list[Value]) -> PyTree:
    # All branches of a cond take the same operands and return the same types. So each of them gets
    # the additional inputs of all, and returns zeros for what another one sees. A count, which is
    # zero as well where the branch was not taken, tells these from figures.
    inner = [self.body(child, equation) for child in item.children]
    for body in inner:
        body.finish(equation)
        _count_runs(body, equation)
    inputs = {key: one for body in inner for key, one in body.inputs.items()}
    avals = [atom.aval for body in inner for atom in body.fields]
    branches, start = list[Jaxpr](), 0
    for body, own in zip(inner, equation.params["branches"], strict=True):
        for key, (v, value) in inputs.items():
            body.add_input(key, v.aval, value)
        body.inputs = {key: body.inputs[key] for key in inputs}
        end = start + len(body.fields)
        others = [*avals[:start], *avals[end:]]
        nothing = body.insert(Partial(zeros, tuple(others)), [], equation)
        fields = [*nothing[:start], *body.fields, *nothing[start:]]
        results = body.outputs[: len(body.outputs) - len(body.fields)]
        branches.append(_jaxpr(body, own, [*results, *fields]))
        start = end
    params = {**equation.params, "branches": tuple(branches)}
    index, *rest = operands
    shared = [self.add_input(key, v.aval, value) for key, (v, value) in inputs.items()]
    given, start, seen = [index, *shared, *rest], 0, []
    slots = self.add_outputs(equation, given, params, avals, _effects(*branches))
    for body in inner:
        seen.append(_outer_slots(body, slots[start : start + len(body.fields)]))
        start += len(body.fields)
    return seen


def _shard_map(self: JaxprEditor, item: Item, equation: Equation, operands: list[Value]) -> PyTree:
    """Each device measures its own part; the rows of the devices are merged outside."""
    # A shard_map returns an array whose parts are those of the devices, so that each of them puts
    # its figures into a row. jax checks along which axes values differ between devices, and a value
    # of which several devices hold a copy counts once (`row_of_device`).
    axes, of = eqn_params.manual_axes(equation), self.of
    before = of.axes, of.inside, of.plan
    of.axes, of.inside = (*of.axes, *axes), equation.params
    # a device may not see all units
    of.plan = dataclasses.replace(of.plan, keep=KEEP_NOTHING, choices=False)
    inner = self.body(item.children[0], equation)
    of.axes, of.inside, of.plan = before
    new = _jaxpr(inner, equation.params["jaxpr"])
    given, count = self.operands_for(inner), len(inner.fields)
    with jaxprs.context_of(equation):
        params, avals = eqn_params.shard_map_with(
            equation.params, new, inputs=len(given), outputs=count, axes=axes
        )
    rows = list(map(jaxprs.new_var, avals))
    self.add(
        equation.replace(
            invars=[*given, *operands],
            outvars=[*equation.outvars, *rows],
            params=params,
            effects=_effects(new),
        )
    )
    found = self.insert(functools.partial(merge_device_rows, inner.seen, count), rows, equation)
    return [_outer_slots(inner, list(map(self.slot, self.to_own_mesh(found, equation))))]


EDIT_RULES: Mapping[str, EditRule] = {
    "mark": JaxprEditor.mark,
    "choice": _choice,
    "launch_input": _launch_input,
    "positions": _positions,
    "position_mask": _position_mask,
    "jit": _jit,
    "remat": _remat,
    "inline": _inline,
    "custom": _custom,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
