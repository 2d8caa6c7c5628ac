"""Edits a traced program once, so that it also returns what its marks see.

The jaxpr is edited, not run again: equations without marks stay the objects that they are (their
sharding, donation, contexts and source lines with them), marks vanish, and behind each marked value
stand the equations that reduce it. What a body sees leaves it as more outputs: a scan stacks them,
a while loop adds them up, the branches of a cond that are not taken give zeros, and each device of
a shard_map gives a row. What a perturbation closes over enters in front, as more inputs. Invariant:
without a perturbation, no equation that computes one of the program's own results is changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat import eqn_params, jaxprs, jit
from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.sharding import constrain_shardings
from nnx_inspector.program.analysis.error_notes import note_equation
from nnx_inspector.program.editing.context import PRESENT, SEED, WHERE, EditContext, Key
from nnx_inspector.program.editing.jaxpr_editor import JaxprEditor
from nnx_inspector.program.editing.packed import PackedArray, PackedLayout, pack
from nnx_inspector.program.editing.rules import EDIT_RULES, EditedName, measure_updates
from nnx_inspector.program.editing.slots import Output, is_slot, map_slots, read_slots
from nnx_inspector.program.editing.updates import results_of
from nnx_inspector.program.plan import Plan
from nnx_inspector.program.survey import Mark, Survey, scan_depths, survey
from nnx_inspector.stats.summary import Summary
from nnx_inspector.typing import Atom, Equation, Jaxpr, OpenJaxpr, Params, PyTree, Value


@dataclasses.dataclass(frozen=True, eq=False)
class InstrumentedProgram:
    """A program that also returns what its marks see.

    Attributes:
        found: the survey of the program as it was.
        jaxpr, consts: the edited program. Its inputs are `given`, then those of the program.
        given: the values that enter in front; None for those that are given at each run.
        keys: what they are.
        seeds: how many of them are seeds, see `marks.seeded`; they are the first.
        outputs: the number of the program's own outputs, which come first.
        outside: the sites without the layer that a value is given to.
        seen: a slot for each figure of what was seen, nested like the survey.
    """

    found: Survey
    jaxpr: OpenJaxpr
    consts: tuple[Value, ...]
    given: tuple[Value, ...]
    keys: tuple[Key, ...]
    seeds: int
    outputs: int
    outside: frozenset[str]
    seen: list[PyTree]
    _numbers: tuple[int, ...]

    def run(
        self, args: Sequence[object], *, given: Sequence[object] | None = None, apart: bool = False
    ) -> PyTree:
        """Run it with the program's own inputs; returns its own outputs, and what was seen.

        What was seen is an `Observation` for each mark, nested like the survey, and nothing for the
        second pass of a remat. `apart`: whether each equation becomes one of the trace's own.
        """
        values = [*(self.given if given is None else given), *args]
        if not apart and jit.outermost_program() is not None:
            out = eqn_params.bind_as_jit(self.jaxpr, self.consts, values)
        else:
            out = _evaluate_equations(self.jaxpr, self.consts, values, self._note)
        out = list(map(as_array, out))
        return out[: self.outputs], read_slots(self.seen, out[self.outputs :])

    def _note(self, error: FloatingPointError, number: int) -> None:
        note_equation(error, self.found, self._numbers[number])


def evaluate(
    found: Survey, args: Sequence[Value], *, plan: Plan
) -> tuple[list[Value], list[Value]]:
    """Run a surveyed program under a plan; returns what `InstrumentedProgram.run` does."""
    return instrument(found, plan).run(args)


def instrument(
    found: Survey,
    plan: Plan,
    *,
    seeds: Callable[[Mark], bool] | None = None,
    tickets: bool = False,
    most_rows: int = 0,
    join: bool = False,
    apart: bool = False,
) -> InstrumentedProgram:
    """The program of a survey under a plan.

    Args:
        seeds: of which marks the gradients are to be marked when the program is differentiated; see
            `marks.seeded`.
        tickets: whether these marks have the seed.
        most_rows: how many rows a scan gives at most, evenly spaced ones; 0 for all of them. A row
            of a summary has 16 KiB, and a scan over training steps has thousands.
        join: whether what is seen leaves the program as one array.
        apart: whether what several devices have found is added up at the end of each body, in one
            exchange.
    """
    how: Params = {"tickets": tickets, "most_rows": most_rows, "apart": apart}
    body = JaxprEditor(
        EditContext(plan, seeds, EDIT_RULES, depths=scan_depths(found), **how), found
    )
    body.edit()
    measure_updates(body, lambda inputs: results_of(found.jaxpr, inputs))
    body.finish(None)
    if join and body.fields:
        _join(body)
    keys = sorted(body.inputs, key=lambda key: key != SEED)
    given = [body.inputs[key] for key in keys]
    jaxpr = jaxprs.edit_jaxpr(
        found.jaxpr, inputs=[v for v, _ in given], equations=body.equations, outputs=body.outputs
    )
    return InstrumentedProgram(
        found,
        jaxprs.open_jaxpr(jaxpr)[0],
        found.consts,
        tuple(map(_default_value, keys, given)),
        tuple(keys),
        int(SEED in body.inputs),
        len(found.jaxpr.outvars),
        frozenset(body.of.outside),
        body.seen,
        tuple(body.numbers),
    )


def _default_value(key: Key, place: tuple[Atom, Value]) -> Value:
    """The value that enters in front: where no mask is known, all positions count."""
    return place[1] if key[0] != WHERE else np.ones(key[2], np.bool_)


def _join(body: JaxprEditor) -> None:
    """Join the additional outputs of a program: each array that leaves one costs the host time."""
    whole = jax.tree.leaves(body.seen, is_leaf=lambda x: is_slot(x) or isinstance(x, Summary))
    summaries = dict[tuple[int, ...], Summary]()
    for one in whole:
        if isinstance(one, Summary):
            numbers = tuple(slot.number for slot in jax.tree.leaves(one, is_leaf=is_slot))
            summaries.setdefault(numbers, one)
    taken = {number for numbers in summaries for number in numbers}
    others = [n for n in range(len(body.fields)) if n not in taken]
    layouts: list[PackedLayout] = []

    def join(*fields: object) -> list[Value]:
        parts = [
            jax.tree.map(lambda x: fields[x.number], one, is_leaf=is_slot)
            for one in summaries.values()
        ]
        layout, arrays = pack([*parts, *(PackedArray(fields[n]) for n in others)])
        layouts.append(layout)
        return arrays

    body.fields = body.insert(join, body.fields, None)
    order = [*(n for numbers in summaries for n in numbers), *others]
    places = (part for leaf in layouts[0].leaves for part in leaf.parts)
    at = dict(zip(order, places, strict=True))
    body.seen = map_slots(lambda x: at[x.number] if isinstance(x, Output) else x, body.seen)


def mark_presence(jaxpr: Jaxpr, present: Value) -> Value:
    """A jaxpr of the same kind with a variable more, in front: whether the marks inside count.

    For the branches and bodies that a vmap computes for all examples; see `_compat.launching`.
    """
    body = JaxprEditor(EditContext(Plan(), None, EDIT_RULES, presence=True), survey(jaxpr, None))
    body.known_inputs[PRESENT] = present
    body.edit()
    return jaxprs.edit_jaxpr(
        jaxpr, inputs=[present], equations=body.equations, outputs=body.outputs
    )


def _evaluate_equations(
    jaxpr: OpenJaxpr,
    consts: Sequence[object],
    values: Sequence[object],
    note: Callable[[FloatingPointError, int], None] | None,
) -> list[Value]:
    """Run a program equation by equation.

    Under a trace only the outermost equations are bound, each with its jaxprs as they are. Outside
    every trace a jit is entered: jax would compile the edited function anew at each call.
    """
    env: dict[Atom, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))

    def read(atom: Atom) -> Value:
        return atom.val if jaxprs.is_literal(atom) else env[atom]

    for number, equation in enumerate(jaxpr.eqns):
        operands = [read(v) for v in equation.invars]
        try:
            if _is_edited(equation) and not any(map(jit.is_tracer, operands)):
                out = _evaluate_jit(equation, operands)
            else:
                out = jaxprs.bind(equation, operands)
        except FloatingPointError as error:  # the user's `jax_debug_nans`
            if note is not None:
                note(error, number)
            raise
        env.update(zip(equation.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _is_edited(equation: Equation) -> bool:
    return isinstance(equation.params.get("name"), EditedName)


def _evaluate_jit(equation: Equation, operands: Sequence[object]) -> list[Value]:
    (inner,) = jaxprs.sub_jaxprs(equation)
    before, after = eqn_params.jit_shardings(equation)
    bare, consts = jaxprs.open_jaxpr(inner)
    with jaxprs.context_of(equation):
        return constrain_shardings(
            _evaluate_equations(bare, consts, constrain_shardings(operands, before), None), after
        )


def as_array(x: Value) -> Value:
    """A constant of the program, which jax holds in types of its own, as an array."""
    if isinstance(x, jax.Array) or type(x) is np.ndarray:
        return x
    with internal_config():
        return jnp.asarray(x)
