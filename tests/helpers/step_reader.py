"""Reads a user's step after it was traced: what each call returned, and the gradients of that."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from nnx_inspector._compat import jit
from nnx_inspector.hooks.hook import TAP_OUTPUT, Context, Hook
from nnx_inspector.hooks.sites import Selection
from nnx_inspector.program.function import module_function
from nnx_inspector.program.instrument import instrument
from nnx_inspector.program.marks import OUTPUT, mark_tree
from nnx_inspector.program.members import member_scope
from nnx_inspector.program.plan import Observation, Plan
from nnx_inspector.program.stage import stage_call
from nnx_inspector.program.survey import Mark, survey
from nnx_inspector.stats.summary import Summary

_bound: list[tuple[Any, Any]] = []


@dataclasses.dataclass(frozen=True)
class MarkCalls:
    """Marks what a call returns, and ties to it what is called inside."""

    owner: Any

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        before = len(_bound)
        with member_scope(context.module):
            out = next_fun(*args, **kwargs)
            state, inside = jit.trace_state(), _bound[before:]
            ties = [x for of, x in inside if of == state and jit.is_tracer(x)]
            how = {"owner": self.owner, "site": context.site, "part": OUTPUT, "gradients": True}
            out = mark_tree(out, call=context.call, ties=ties, **how)
        del _bound[before:]
        _bound.extend((state, x) for x in jax.tree.leaves(out) if jit.is_tracer(x))
        return out


@dataclasses.dataclass(frozen=True)
class Read:
    """What was seen in a step, by site and part.

    Attributes:
        outputs: the results of the program that measures, and of the user's own.
    """

    seen: dict[tuple[str, str], list[tuple[Mark, Observation]]]
    unseen: dict[str, str]
    outputs: tuple[list[Any], list[Any]]

    def rows(self, site: str, part: str) -> list[Summary]:
        """A summary of each row of each call, in the order of the program."""
        found = [x for _, one in self.seen.get((site, part), []) for x in one.summaries]
        return [s for summary in found for s in rows_of(summary)]


def rows_of(summary: Summary) -> list[Summary]:
    if not summary.rows:
        return [summary]
    return [summary.row(index) for index in np.ndindex(*summary.rows)]


def read_step(step: Callable[..., Any], *args: Any, most_rows: int = 0) -> Read:
    """Trace a step, edit its program, and run that and the program itself."""

    def hooks(scope: Any, owner: Any) -> list[Hook]:
        return [Hook(MarkCalls(owner), TAP_OUTPUT, Selection(None), scope)]

    with stage_call(module_function(step, "step"), args, {}, hooks) as stage:
        before = stage.survey
        program = types.SimpleNamespace(jaxpr=before.jaxpr, consts=before.consts)
        found = survey(program, stage.owner, finished=True)
        edited = instrument(found, Plan(), most_rows=most_rows)
        out, seen = jax.jit(edited.run)(list(stage.inputs))
        own = jax.jit(instrument(found, Plan(summarise=False)).run)(list(stage.inputs))[0]
        by: dict[tuple[str, str], list[tuple[Mark, Observation]]] = {}
        for mark, _, one in found.walk(seen):
            if one is not None:
                by.setdefault((mark.site, mark.part), []).append((mark, one))
        return Read(by, dict(found.unseen), (out, own))
