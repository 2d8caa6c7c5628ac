"""The hooks that mark the values passing through the selected sites of a model.

Invariant: a mark is the identity; marking changes no value. Does not decide what happens at one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nnx_inspector.hooks.hook import TAP_INPUT, TAP_OUTPUT, Context, Hook
from nnx_inspector.hooks.scope import Scope
from nnx_inspector.hooks.sites import Selection
from nnx_inspector.hooks.variables import shared_contents
from nnx_inspector.program.changes import mark_changes
from nnx_inspector.program.editing.position_masks import Where, mask_hooks, mask_params
from nnx_inspector.program.marks import INPUT, OUTPUT, mark_arguments, mark_tree
from nnx_inspector.program.members import member_scope
from nnx_inspector.program.stage import HooksOf
from nnx_inspector.program.survey import UNATTRIBUTED
from nnx_inspector.typing import Function, Kwargs, Owner, Params, PyTree, Value


@dataclasses.dataclass(frozen=True)
class MarkOutput:
    """Marks what a call returns, after all changes, and which Variables it changes."""

    owner: Owner

    def __call__(
        self, next_fun: Function, args: tuple[Value, ...], kwargs: Kwargs, context: Context
    ) -> PyTree:
        with (
            shared_contents(context.module if context.kind == "method" else None) as before,
            member_scope(context.module),
        ):
            out = next_fun(*args, **kwargs)
            if context.kind == "method":
                out = mark_changes(out, before, context.module, owner=self.owner, site=context.site)
            how: Params = {"owner": self.owner, "site": context.site, "part": OUTPUT}
            return mark_tree(out, **how, **mask_params(self.owner))


@dataclasses.dataclass(frozen=True)
class MarkUnattributed:
    """Marks a call that could not be attributed; a cached trace keeps the mark."""

    owner: Owner

    def __call__(self, type_name: str) -> None:
        mark_tree((), owner=self.owner, site=type_name, part=UNATTRIBUTED)


@dataclasses.dataclass(frozen=True)
class MarkInput:
    """Marks, for one owner, what a method receives (after interceptors)."""

    owner: Owner

    def __call__(
        self, next_fun: Function, args: tuple[Value, ...], kwargs: Kwargs, context: Context
    ) -> PyTree:
        params = {"owner": self.owner, "site": context.site, "part": INPUT}
        params |= mask_params(self.owner)
        args, kwargs = mark_arguments(args, kwargs, context, **params)
        return next_fun(*args, **kwargs)


def marking_hooks(selection: Selection, *, inputs: bool, where: Where | None = None) -> HooksOf:
    """The hooks that mark the outputs (and inputs) of the selected sites of a scope, with which of
    their positions count.
    """

    def hooks(scope: Scope, owner: object) -> Sequence[Hook]:
        unattributed = MarkUnattributed(owner)
        marks = Hook(MarkOutput(owner), TAP_OUTPUT, selection, scope, unattributed)
        out = [*mask_hooks(owner, where, scope), marks]
        if inputs:
            out.append(Hook(MarkInput(owner), TAP_INPUT, selection, scope))
        return out

    return hooks
