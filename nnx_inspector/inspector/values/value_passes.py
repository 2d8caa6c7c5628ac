"""An owned pass that keeps the values of one site: the outputs or inputs of its calls, or the
loss's gradient with respect to the outputs.

Each site and part has its own program, and the last few are kept; perturbations are arguments, as
in `passes/programs.py`. Invariant: the model does not change, and the values are those that the
pass on screen summarises, after perturbations. Does not choose the values to show.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import threading
from collections.abc import Hashable
from typing import Literal

import jax
import numpy as np

from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.sites import Selection, split_operation
from nnx_inspector.inspector.passes.call import Call
from nnx_inspector.inspector.passes.owned_passes import (
    Inputs,
    OwnedPasses,
    Program,
    pass_environment,
    program_inputs,
    stage_with_setting,
)
from nnx_inspector.perturbations.places import Setting
from nnx_inspector.program.analysis.cost import available_bytes
from nnx_inspector.program.eager import why_untraceable
from nnx_inspector.program.marks import INPUT, OUTPUT
from nnx_inspector.program.plan import Keep, Plan
from nnx_inspector.program.stage import StagedCall
from nnx_inspector.program.structure import Structure
from nnx_inspector.program.survey import Mark
from nnx_inspector.records.backward import backward_pass
from nnx_inspector.typing import Array, Function, PyTree, Value

GRADIENT = "gradient"
Part = Literal["output", "input", "gradient"]
MOST_PROGRAMS = 12
"""The most programs that are kept, the last used ones."""


@dataclasses.dataclass(frozen=True)
class CallArrays:
    """The kept values of one call of the site.

    Attributes:
        values: the values of each array of the structure, None if there are none. The first axes
            are those of the scans around the call, then that of the members of an ensemble, then
            those of the other vmaps.
        structure: the structure of the output, or of the input as `(args, kwargs)`.
        mapped: for each array, how many vmaps gave it an axis.
        loops: how many of these axes are of scans or members.
        members: whether the last of them is of members.
        ran: how often the call took place, with these axes.
    """

    values: list[Value]
    structure: Structure
    mapped: tuple[int, ...]
    loops: int
    members: bool
    ran: np.ndarray

    @property
    def took_place(self) -> bool:
        return bool(self.ran.any())

    def tree(self) -> PyTree:
        """The values as the module's own pytree."""
        return self.structure.unflatten(self.values)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _CallLayouts:
    """What a program found besides arrays: structure, vmaps, loops and members of each call."""

    calls: tuple[tuple[Structure, tuple[int, ...], int, bool], ...]


class ValuePasses:
    """The last PROGRAMS compiled passes that keep values."""

    def __init__(self) -> None:
        self._programs: collections.OrderedDict[Hashable, Program] = collections.OrderedDict()
        self._lock = threading.Lock()

    def run(
        self, call: Call, setting: Setting, *, site: str, part: Part, passes: OwnedPasses
    ) -> list[CallArrays]:
        """Make a pass, and keep the values of each call of a site.

        Args:
            call: the call to run; for gradients it needs a loss.

        Raises:
            InspectorError: the values need more memory than is free.
        """
        with pass_environment(call.configuration):
            known, parts, keys = passes.tracing(call), call.parts, passes.keys
            selection = passes.selection
            if split_operation(site)[1] and not selection.matches_key(site):
                known, selection = None, Selection((*selection.terms, site))
            key = (site, part, *parts.key, keys, setting.places, known)
            with self._lock:
                if key not in self._programs:
                    what = parts.structure, setting.places, keys, selection, known
                    received = [site] if part == INPUT else []
                    enter = functools.partial(stage_with_setting, *what, received)
                    made = self._program(enter, site, part)
                    self._programs[key] = made
                program = self._programs[key]
                self._programs.move_to_end(key)
                while len(self._programs) > MOST_PROGRAMS:
                    self._programs.popitem(last=False)
            inputs = program_inputs(parts, setting, keys)
            if not program.ran_eagerly:
                _check_memory(program, inputs, site, part)
            arrays, ran, forms = program(*inputs)
            ran = jax.device_get(ran)
        return [
            CallArrays(values, structure, mapped, loops, members, np.asarray(times))
            for values, times, (structure, mapped, loops, members) in zip(
                arrays, ran, forms.calls, strict=True
            )
        ]

    def _program(self, enter: Function, site: str, part: Part) -> Program:
        keep = Keep(values=True, parts=(part,), sites=(site,))

        def program(*given: object) -> PyTree:
            with enter(given) as (stage, inputs, plan, _):
                plan = dataclasses.replace(plan, summarise=False, keep=keep)
                if part == GRADIENT:
                    found = _gradients_of_calls(stage, inputs, plan, site)
                else:
                    found = _values_of_calls(stage, inputs, plan, site, part)
            calls = tuple(
                (mark.structure, tuple(map(len, mark.mapped)), ran.ndim, mark.members > 0)
                for mark, _, ran in found
            )
            return (
                [values for _, values, _ in found],
                [ran for *_, ran in found],
                _CallLayouts(calls),
            )

        return Program(program)


_MarkedValues = list[tuple[Mark, list[Value], Array]]
"""The mark of each call, its values, and how often it took place."""


def _values_of_calls(
    stage: StagedCall, inputs: list[Value], plan: Plan, site: str, part: Part
) -> _MarkedValues:
    _, seen = stage.evaluate(inputs, plan=plan)
    found: _MarkedValues = []
    entered: list[tuple[int, tuple[Mark, list[Value], Array]]] = []
    for mark, _, one in stage.survey.walk(seen):
        if one is None or mark.site != site:
            continue
        this = (mark, [kept.value for kept in one.kept] or [None] * len(mark.avals), one.ran)
        if part == OUTPUT and mark.part == OUTPUT:
            found.append(this)
        elif part == INPUT and mark.part == INPUT:
            entered.append((len(found), this))
        elif part == INPUT and mark.part == OUTPUT and entered:
            found.append(entered.pop()[1])  # calls have the order of their outputs
    return found


# ------------------------------------------------------------------ gradients


def _gradients_of_calls(
    stage: StagedCall, inputs: list[Value], plan: Plan, site: str
) -> _MarkedValues:
    of = lambda mark: mark.part == OUTPUT and mark.site == site  # noqa: E731
    _, seen, gradients, _ = backward_pass(stage, inputs, plan, of=of)
    found: _MarkedValues = []
    for mark, _, one, back in stage.survey.walk(seen, gradients):
        if one is not None and of(mark):
            every = back or [None] * len(mark.avals)
            values = [None if g is None or not g.kept else g.kept[0].value for g in every]
            found.append((mark, values, one.ran))
    return found


def _check_memory(program: Program, inputs: Inputs, site: str, part: str) -> None:
    """Raise an error if the values do not fit. The sizes of an eager call are not known before."""
    try:
        arrays = program.compiled.eval_shape(*inputs)[0]
    except Exception as error:
        if not why_untraceable(error):
            raise
        return
    needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
    there_is = available_bytes(jax.devices()[0])
    if needed > there_is:
        raise InspectorError(
            f"The values of the {part} of {site!r} need {needed:,} bytes, but {there_is:,} are "
            f"free on the device. Run a smaller example: insp.run(x[:1])."
        )
