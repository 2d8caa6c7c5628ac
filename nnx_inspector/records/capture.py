"""`capture` and `value_and_grad`: the result of a call, and a record of what flowed through it.

Both trace the call once, and edit its program to return what the marks see as well. They
therefore work inside the user's own jit and change the model exactly as the plain call does.
Invariant: the results are those of the plain call. Never uses `nnx.capture`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from flax import nnx

from nnx_inspector.errors import warn
from nnx_inspector.hooks.sites import Only, Selection
from nnx_inspector.hooks.variables import unseen_references
from nnx_inspector.program.editing.packed import PackedArray
from nnx_inspector.program.editing.position_masks import misfit_of, where_of
from nnx_inspector.program.function import ModuleFunction, function_name, module_function
from nnx_inspector.program.marking import marking_hooks
from nnx_inspector.program.marks import CHANGE, CHOICE, OUTPUT
from nnx_inspector.program.plan import Keep, Observation, Plan, Reduce
from nnx_inspector.program.stage import StagedCall, stage_call
from nnx_inspector.program.survey import Mark
from nnx_inspector.records.backward import (
    argument_number,
    backward_pass,
    check_loss,
    diff_state,
    differentiated_argument,
    numbers_as_arrays,
    positional_arguments,
)
from nnx_inspector.records.donated import require_staged
from nnx_inspector.records.nan_site import note_nan_site
from nnx_inspector.records.parameters import Parameter, measure_parameters, updates_of
from nnx_inspector.records.record import Call, Record
from nnx_inspector.stats.array_stats import Sample
from nnx_inspector.stats.summary import Summary
from nnx_inspector.typing import PyTree, Value

T = TypeVar("T", bound=Callable[..., object])


def _check_selection(selection: Selection, stage: StagedCall) -> None:
    known = not stage.eager or stage.last is not None
    if known and selection.terms != (None,):
        called = [*(marked.site for marked in stage.survey.marks), *stage.survey.unseen]
        selection.require_match(stage.roots, called, stage.scope.operations)


def capture(
    f: object,
    *,
    only: Only = None,
    inputs: bool = True,
    values: bool | Reduce = False,
    units: int | None = None,
    parameters: bool = False,
    sample: Sample = "auto",
    where: object = None,
) -> Callable[..., tuple[PyTree, Record]]:
    """Wrap `f` so that it also returns a record of what its modules received and returned.

    Each value is reduced to a summary where it is computed, and nothing of an activation's size
    is kept. Outside jit the forward pass runs equation by equation; wrap it in your own `nnx.jit`
    to make it fast. The call changes the model as usual (BatchNorm statistics, RNG counts).

    Args:
        f: a module, a bound method of one, or a function whose arguments hold modules.
        only: the sites to record, by default `__call__` of every module; see
            `intercept_methods`.
        inputs: whether to measure inputs too.
        values: True keeps the arrays themselves; a function of one array keeps what it returns
            for each. Read them as `record[site].values`. Under vmap they hold every example.
        units: an axis (-1 for the last) for whose units statistics are kept, up to 65,536 units,
            without keeping the array. Read them as `record[site].units`; None for an array
            without that axis, and within `jax.shard_map`.
        parameters: whether to measure the parameters too, in `record.parameters`.
        sample: "auto" makes the histogram of a large array from at least 65,536 evenly spaced
            values; 1 uses all values, 8 every eighth token (row, slice). All other figures are
            exact. `Summary.rank_error` bounds the error of quantiles;
            `nnx_inspector.stats.summarize.summarize` says what a sample can miss.
        where: which positions count: a function that gets what the outermost call of the model
            gets, without the model, and returns True for each position that counts, `lambda tokens,
            *_: tokens != 0`; or such an array of booleans. Its axes are the first of the values
            that it fits; the others are measured whole, and their `counted` is False.

    Returns:
        A function that returns `(f's result, Record)`.

    Raises:
        TypeError: `f` is not a module and none of its arguments holds one.
        ValueError: `only` matches no site.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
        >>> y, record = nni.capture(model)(jnp.ones((4, 2)))
        >>> record["layers/0"].output.size
        12
    """
    function, counting = module_function(f, "capture"), where_of(where)
    selection, plan = Selection(only), Plan(keep=Keep(values, units), sample=sample)

    def captured(*args: object, **kwargs: object) -> tuple[PyTree, Record]:
        hooks = marking_hooks(selection, inputs=inputs, where=counting)
        with stage_call(function, args, kwargs, hooks, may_run=True) as stage:
            require_staged(stage)
            _check_selection(selection, stage)
            run = functools.partial(stage.evaluate, stage.inputs, plan=plan)
            with note_nan_site(lambda: None if stage.eager else record_of(stage, run()[1])):
                out, seen = run()
            _check_selection(selection, stage)
            measured = measure_parameters(stage) if parameters else {}
            return stage.finish(out, update=True), record_of(stage, seen, parameters=measured)

    return _with_name(captured, function)


def value_and_grad(
    f: object,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    only: Only = None,
    inputs: bool = True,
    values: bool | Reduce = False,
    units: int | None = None,
    parameters: bool = False,
    optimizer: nnx.Optimizer[Any] | None = None,
    sample: Sample = "auto",
    where: object = None,
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Like `nnx.value_and_grad`, but also record every activation and its gradient.

    There is one ordinary backward pass: each site's output goes through an identity, whose
    transpose marks the cotangent. The gradients are those of `nnx.value_and_grad`.

    Args:
        f: the loss: a function whose arguments hold modules (or a module, or a bound method).
        argnums: the arguments to differentiate with respect to: an int, an `nnx.DiffState`, or
            several of them. For a module, its parameters (`nnx.Param`), unless a DiffState selects
            others.
        has_aux: whether `f` returns `(loss, aux)`.
        only: the sites to record; see `capture`, also for `inputs`, `values` and `units`.
        inputs: whether to measure inputs too.
        values: whether to keep the arrays themselves, or a function to reduce each of them.
        units: the axis for whose units statistics are kept, or None.
        parameters: whether to measure the parameters and their gradients, in `record.parameters`.
        optimizer: an `nnx.Optimizer` of the model. The record's parameters then include the
            updates that it would make, hence `update_ratio`. Neither the optimizer nor the model
            is changed by measuring them.
        sample: how many values the histograms count; see `capture`.
        where: which positions count, in values and gradients; see `capture`.

    Returns:
        A function that returns `((loss, record), grads)`, or `((loss, aux, record), grads)` with
        `has_aux`.

    Raises:
        TypeError: no argument holds a module; the loss is not a scalar; an argument named by
            `argnums` cannot be differentiated.
        ValueError: `only` matches no site, or `argnums` is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> def loss_fn(model, x):
        ...     return (model(x) ** 2).mean()
        >>> (loss, record), grads = nni.value_and_grad(loss_fn)(model, jnp.ones((4, 2)))
        >>> record[""].gradient.size
        12
    """
    function, counting = module_function(f, "value_and_grad"), where_of(where)
    selection, plan = Selection(only), Plan(keep=Keep(values, units), sample=sample)
    several = isinstance(argnums, Sequence)
    wanted = [diff_state(a) for a in (argnums if several else (argnums,))]

    def graded(*args: object, **kwargs: object) -> tuple[PyTree, PyTree]:
        parts_of = [(argument_number(function, args, n), only) for n, only in wanted]
        owned = 0 if function.owner is None else 1
        chosen = {n - owned for n, _ in parts_of}
        args = tuple(numbers_as_arrays(a) if i in chosen else a for i, a in enumerate(args))
        hooks = marking_hooks(selection, inputs=inputs, where=counting)
        with stage_call(function, args, kwargs, hooks, may_run=True) as stage:
            require_staged(stage)
            _check_selection(selection, stage)
            parts = [
                differentiated_argument(stage, function, args, n, only) for n, only in parts_of
            ]
            inputs_of_parts = sorted({i for part in parts for i in part.inputs})
            check = functools.partial(check_loss, function=function, has_aux=has_aux)
            run = functools.partial(
                backward_pass, stage, stage.inputs, plan, inputs_of_parts, check=check
            )
            with note_nan_site(lambda: None if stage.eager else record_of(stage, *run()[1:3])):
                out, seen, cotangents, flat = run()
            _check_selection(selection, stage)
            grads = [part.rebuild([flat[i] for i in part.inputs]) for part in parts]
            measured = {}
            if parameters or optimizer is not None:
                every = positional_arguments(function, args)
                of = [(every[n], grad) for (n, _), grad in zip(parts_of, grads, strict=True)]
                measured = measure_parameters(stage, flat, updates_of(optimizer, of))
            result = stage.finish(out, update=True)
            record = record_of(stage, seen, cotangents, parameters=measured)
        head = (out[0], result[1], record) if has_aux else (out[0], record)
        return head, (tuple(grads) if several else grads[0])

    return _with_name(graded, function)


def _with_name(wrapped: T, function: ModuleFunction) -> T:
    wrapped.__name__ = wrapped.__qualname__ = f"{wrapped.__name__}_{function_name(function.call)}"
    return wrapped


# -------------------------------------------------------------------- records


@dataclasses.dataclass
class _MarkResult:
    """One mark that the pass went through: its place in the program and its measurements."""

    mark: Mark
    seen: Observation
    gradients: list[Summary | None]


def record_of(
    stage: StagedCall,
    seen: PyTree,
    cotangents: PyTree = None,
    *,
    parameters: Mapping[str, Parameter] | None = None,
) -> Record:
    """The record of what `evaluate` saw, and of what `backward_pass` saw of the gradients."""
    calls: dict[str, list[Call]] = {}
    waiting: dict[str, list[_MarkResult]] = {}
    changes: dict[str, list[_MarkResult]] = {}
    choices: dict[str, list[Value]] = {}
    for mark, _, here, back in stage.survey.walk(seen, cotangents):
        if here is None:
            continue
        if mark.part == CHOICE:
            choices.setdefault(mark.site, []).extend(kept.value for kept in here.kept)
            continue
        every = back or [None] * len(mark.avals)
        gradients = [None if g is None or not g.summaries else g.summaries[0] for g in every]
        passed, site = _MarkResult(mark, here, gradients), mark.site
        if passed.mark.part != OUTPUT:
            kept = changes if passed.mark.part == CHANGE else waiting
            kept.setdefault(site, []).append(passed)
            continue
        entered = waiting[site].pop() if waiting.get(site) else None
        changed = [c for c in changes.pop(site, []) if c.seen.summaries]
        calls.setdefault(site, []).append(
            Call(
                outputs=passed.seen.summaries,
                inputs=None if entered is None else entered.seen.summaries,
                gradients=passed.gradients,
                ran=PackedArray(passed.seen.ran),
                structure=passed.mark.structure,
                input_structure=None if entered is None else entered.mark.structure,
                changed=[change.seen.summaries[0] for change in changed],
                variables=tuple(x.mark.variable for x in changed if x.mark.variable is not None),
                kept=passed.seen.kept,
                input_kept=[] if entered is None else entered.seen.kept,
                loops=passed.seen.ran.ndim,
                counted=passed.mark.counted,
            )
        )
    if why := misfit_of(stage.survey.marks):
        warn(why)
    unseen = {**stage.survey.unseen, **unseen_references(stage.roots)}
    for name, count in stage.survey.unattributed.items():
        unseen[f"({name})"] = (
            f"{count} unattributed call{'s' * (count > 1)} of modules of this type, which are not "
            f"part of the model that was passed, but copies of it, trees with other parameters, or "
            f"made during the call"
        )
    return Record(calls, unseen, parameters, choices, eager=stage.eager)
