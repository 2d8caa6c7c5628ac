"""`capture` and `value_and_grad`: what a call does, and a record of what flowed through it.

Both trace the call once, take what is marked out of it (`harvest`) and hand back ordinary
outputs, so they work inside the user's own jit and change the model exactly as the plain call
does. Invariant: the call's results are those of the plain call. Never uses `nnx.capture`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_inspector.changes import mark_changes
from nnx_inspector.harvest import (
    UNATTRIBUTED,
    Marked,
    Plan,
    Seen,
    Survey,
    evaluate,
    marks,
    sinks_for,
)
from nnx_inspector.layers import TAP_INPUT, TAP_OUTPUT, Context, Layer
from nnx_inspector.packing import unpack
from nnx_inspector.record import Call, Record
from nnx_inspector.scope import Scope
from nnx_inspector.sites import Only, Selection
from nnx_inspector.staging import (
    Arguments,
    Function,
    LayersOf,
    Staged,
    as_function,
    name_of,
    plain_key,
    staged,
)
from nnx_inspector.summary import Summary
from nnx_inspector.taps import CHANGE, INPUT, OUTPUT, is_node, mark_arguments, mark_tree
from nnx_inspector.variables import contents


@dataclasses.dataclass(frozen=True)
class MarkOutput:
    """Marks what a call returns, after interceptors and perturbations, and the Variables that it
    changes, for one owner.
    """

    owner: Any

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        before = contents(context.module if context.kind == "method" else None)
        out = next_fun(*args, **kwargs)
        if context.kind == "method":
            out = mark_changes(out, before, context.module, owner=self.owner, site=context.site)
        return mark_tree(out, owner=self.owner, site=context.site, part=OUTPUT)


@dataclasses.dataclass(frozen=True)
class MarkUnattributed:
    """Leaves a mark where a call could not be attributed: it is told however the trace is kept."""

    owner: Any

    def __call__(self, type_name: str) -> None:
        mark_tree((), owner=self.owner, site=type_name, part=UNATTRIBUTED)


@dataclasses.dataclass(frozen=True)
class MarkInput:
    """Marks what a method receives, after interceptors, for one owner."""

    owner: Any

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        args, kwargs = mark_arguments(args, kwargs, owner=self.owner, site=context.site, part=INPUT)
        return next_fun(*args, **kwargs)


def marking_layers(selection: Selection, *, inputs: bool) -> LayersOf:
    """The layers that mark the outputs (and inputs) of the selected sites of a scope."""

    def layers(scope: Scope, owner: Any) -> Sequence[Layer]:
        unattributed = MarkUnattributed(owner)
        out = [Layer(MarkOutput(owner), TAP_OUTPUT, selection, scope, unattributed)]
        if inputs:
            out.append(Layer(MarkInput(owner), TAP_INPUT, selection, scope))
        return out

    return layers


def _check_selection(selection: Selection, stage: Staged) -> None:
    if selection.terms != (None,):
        called = [marked.site for marked in marks(stage.survey)]
        selection.require_match(stage.roots, [*called, *stage.survey.unseen])


def capture(
    f: Any, *, only: Only = None, inputs: bool = True, sample: int = 1
) -> Callable[..., tuple[Any, Record]]:
    """`f`, returning also a record of what its modules received and returned.

    The values are reduced to summaries where they are computed; nothing of an activation's size
    is kept. Called outside of jit, the forward pass runs equation by equation: wrap it in your
    own `nnx.jit` to make it fast. The model changes as by the plain call (BatchNorm, RNG counts).

    Args:
        f: a module, a bound method of one, or a function whose arguments hold modules.
        only: which sites; see `intercept_methods`. By default `__call__` of every module.
        inputs: whether to measure inputs too.
        sample: with 8, say, histograms, means and deviations are those of every eighth token (row,
            slice), in a third of the time; counts, min and max stay exact. For the error see
            `nnx_inspector.summarize.summarize`.

    Returns:
        A function that returns `(f's result, Record)`.

    Raises:
        TypeError: `f` is no module and none of its arguments holds one.
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
    function = as_function(f, "capture")
    selection = Selection(only)

    def captured(*args: Any, **kwargs: Any) -> tuple[Any, Record]:
        with staged(function, args, kwargs, marking_layers(selection, inputs=inputs)) as stage:
            _check_selection(selection, stage)
            out, seen = evaluate(stage.survey, stage.inputs, plan=Plan(sample=sample))
            return stage.finish(out, update=True), record_of(stage, seen)

    return _named(captured, function)


def value_and_grad(
    f: Any,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    only: Only = None,
    inputs: bool = True,
    sample: int = 1,
) -> Callable[..., Any]:
    """`nnx.value_and_grad`, returning also a record of every activation and of its gradient.

    One ordinary backward pass: the summary of a site's cotangent is the transpose of a tap whose
    value is the identity. The gradients are those of `nnx.value_and_grad`.

    Args:
        f: the loss, a function whose arguments hold modules (or a module, or a bound method).
        argnums: which arguments to differentiate by; an int, an `nnx.DiffState`, or several.
            Modules are differentiated by their `nnx.Param`s unless a DiffState says otherwise.
        has_aux: `f` returns `(loss, aux)`.
        only: which sites; see `intercept_methods`. By default `__call__` of every module.
        inputs: whether to measure inputs too.
        sample: with 8, say, histograms, means and deviations are those of every eighth token (row,
            slice), in a third of the time; counts, min and max stay exact. For the error see
            `nnx_inspector.summarize.summarize`.

    Returns:
        A function that returns `((loss, record), grads)`, with `has_aux`
        `((loss, aux, record), grads)`.

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
    function = as_function(f, "value_and_grad")
    selection = Selection(only)
    several = not isinstance(argnums, (int, nnx.DiffState))
    wanted = [_diff_state(a) for a in (argnums if several else (argnums,))]

    def graded(*args: Any, **kwargs: Any) -> Any:
        parts_of = [(_argument(function, args, n), only) for n, only in wanted]
        owned = 0 if function.owner is None else 1
        chosen = {n - owned for n, _ in parts_of}
        args = tuple(_numbers_as_arrays(a) if i in chosen else a for i, a in enumerate(args))
        layers = marking_layers(selection, inputs=inputs)
        with staged(function, args, kwargs, layers) as stage:
            _check_selection(selection, stage)
            parts = [_differentiable(stage, function, args, n, only) for n, only in parts_of]
            _check_loss(stage, function, has_aux)
            value, out, seen, cotangents, grads = _run_backward(stage, parts, Plan(sample=sample))
            result = stage.finish(out, update=True)
            record = record_of(stage, seen, cotangents)
        head = (value, result[1], record) if has_aux else (value, record)
        return head, (tuple(grads) if several else grads[0])

    return _named(graded, function)


def _named(wrapped: Callable[..., Any], function: Function) -> Any:
    name = getattr(function.call, "__name__", type(function.call).__name__)
    wrapped.__name__ = wrapped.__qualname__ = f"{wrapped.__name__}_{name}"
    return wrapped


# ------------------------------------------------------------------ gradients


def _diff_state(argnum: Any) -> tuple[int, Any]:
    if isinstance(argnum, nnx.DiffState):
        return argnum.argnum, argnum.filter
    return argnum, nnx.Param


def _numbers_as_arrays(argument: Any) -> Any:
    return jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, (int, float, complex)) else x,
        argument,
        is_leaf=is_node,
    )


@dataclasses.dataclass(frozen=True)
class _Part:
    """One differentiated argument: where its leaves are among the inputs, how to put it back."""

    where: tuple[int, ...]
    rebuild: Callable[[Sequence[Any]], Any]


def _argument(function: Function, args: Sequence[Any], argnum: int) -> int:
    """The number of an argument from the front; the owner of a bound method is number 0."""
    count = len(args) + (0 if function.owner is None else 1)
    if not -count <= argnum < count:
        raise ValueError(
            f"argnums names argument {argnum}, but there are {count} positional arguments."
        )
    return argnum % count


def _check_loss(stage: Staged, function: Function, has_aux: bool) -> None:
    """Raise where what the function returns is no loss, or no `(loss, aux)`."""
    structure, name = stage.returned.treedef, name_of(function.call)
    pair = jax.tree_util.treedef_children(structure)
    if has_aux and not (structure.node_data() == (tuple, None) and len(pair) == 2):
        raise TypeError(
            f"With has_aux=True the loss function must return (loss, aux), "
            f"{name} returned {structure}."
        )
    loss = pair[0] if has_aux else structure
    if not jax.tree_util.treedef_is_leaf(loss):
        hint = "" if has_aux else " For a loss and something else pass has_aux=True."
        raise TypeError(f"The loss must be one scalar array, {name} returned {loss}.{hint}")
    if 0 not in stage.returned.arrays:
        raise TypeError(
            f"The loss must be one scalar array, {name} returned a Python value, so there is "
            f"nothing to differentiate."
        )


def _differentiable(
    stage: Staged, function: Function, args: Sequence[Any], argnum: int, only: Any
) -> _Part:
    every = args if function.owner is None else (function.owner, *args)
    argument = every[argnum]
    position = len(Arguments.of(every[:argnum]).arrays)
    leaves, treedef = jax.tree.flatten(argument, is_leaf=is_node)
    where: list[int] = []
    builders: list[tuple[int, Any]] = []
    for leaf in leaves:
        if is_node(leaf):
            variables = dict(nnx.iter_graph(leaf, graph=True))
            diff = leaf if isinstance(leaf, nnx.Variable) else nnx.state(leaf, only, graph=True)
            flat = jax.tree_util.tree_flatten_with_path(
                diff, is_leaf=lambda x: isinstance(x, nnx.Variable)
            )[0]
            count = 0
            for path, _ in flat:
                span = stage.spans[id(variables[tuple(plain_key(k) for k in path)])]
                where.extend(span)
                count += len(span)
            builders.append((count, jax.tree.structure(diff)))
        else:
            where.append(stage.array_index(position, leaf))
            position += 1
            builders.append((1, None))

    def rebuild(grads: Sequence[Any]) -> Any:
        rest = list(grads)
        out = []
        for count, structure in builders:
            mine, rest = rest[:count], rest[count:]
            out.append(mine[0] if structure is None else jax.tree.unflatten(structure, mine))
        return jax.tree.unflatten(treedef, out)

    return _Part(tuple(where), rebuild)


def _run_backward(stage: Staged, parts: Sequence[_Part], plan: Plan) -> Any:
    where = sorted({i for part in parts for i in part.where})

    def loss_of(chosen: dict[int, Any], sinks: Any) -> Any:
        full = [chosen.get(i, value) for i, value in enumerate(stage.inputs)]
        out, seen = evaluate(stage.survey, full, plan=plan, sinks=sinks)
        return out[0], (out, seen)

    transform = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
    (value, (out, seen)), (grads, cotangents) = transform(
        {i: stage.inputs[i] for i in where}, sinks_for(stage.survey)
    )
    return value, out, seen, cotangents, [p.rebuild([grads[i] for i in p.where]) for p in parts]


# -------------------------------------------------------------------- records


@dataclasses.dataclass
class _Passed:
    """One mark as it was passed: its place in the program, and what was measured there."""

    mark: Marked
    seen: Seen
    gradients: list[Summary | None]


def record_of(stage: Staged, seen: list[Any], cotangents: list[Any] | None = None) -> Record:
    """The record of what `evaluate` saw, and of the cotangents that reached the sinks."""
    calls: dict[str, list[Call]] = {}
    waiting: dict[str, list[_Passed]] = {}
    changes: dict[str, list[_Passed]] = {}
    for passed in _in_order(stage.survey, seen, cotangents):
        site = passed.mark.site
        if passed.mark.part != OUTPUT:
            kept = changes if passed.mark.part == CHANGE else waiting
            kept.setdefault(site, []).append(passed)
            continue
        entered = waiting[site].pop() if waiting.get(site) else None
        changed = changes.pop(site, [])
        calls.setdefault(site, []).append(
            Call(
                outputs=passed.seen.summaries,
                inputs=None if entered is None else entered.seen.summaries,
                gradients=passed.gradients,
                ran=passed.seen.ran,
                structure=passed.mark.structure,
                input_structure=None if entered is None else entered.mark.structure,
                changed=[change.seen.summaries[0] for change in changed],
                variables=tuple(change.mark.variable for change in changed),
            )
        )
    unseen = dict(stage.survey.unseen)
    for name, count in stage.survey.unattributed.items():
        unseen[f"({name})"] = (
            f"{count} calls of modules of this type are unattributed: they are not part of the "
            f"model that was passed, but copies of it or modules made during the call"
        )
    return Record(calls, unseen)


def _in_order(found: Survey, seen: list[Any], cotangents: list[Any] | None) -> list[_Passed]:
    out: list[_Passed] = []
    for number, item in enumerate(found.items.values()):
        back = None if cotangents is None else cotangents[number]
        if item.mark is not None:
            count = len(item.mark.avals)
            gradients = back if back else [None] * count
            out.append(
                _Passed(
                    item.mark, seen[number], [None if g is None else unpack(g) for g in gradients]
                )
            )
        elif item.again:
            continue  # of the first pass
        elif item.kind == "while":
            out.extend(_in_order(item.children[1], seen[number][0], None))
        else:
            for i, child in enumerate(item.children):
                out.extend(_in_order(child, seen[number][i], None if not back else back[i]))
    return out
