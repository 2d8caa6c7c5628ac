"""Traces a call over modules once, with our hooks open, as a pure function of arrays.

A call whose code reads the values of arrays cannot be traced; the same pure function then runs
eagerly at each `evaluate`. Invariant: what the call changes in the caller's modules (BatchNorm
statistics, RNG counters, new Variables) is an output of the function, and `finish` applies it only
on request. A call that raises changes nothing. Does not decide what is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.configuration import jit_enabled
from nnx_inspector._compat.flax_graphs import comparable_structure, graph_nodes
from nnx_inspector.errors import InspectorError, add_note
from nnx_inspector.hooks.dispatch import add_hooks
from nnx_inspector.hooks.hook import Hook, open_hooks, replace_hooks
from nnx_inspector.hooks.intercept import warn_of_doubtful_calls
from nnx_inspector.hooks.pytrees import plain_key
from nnx_inspector.hooks.scope import Scope
from nnx_inspector.hooks.sites import Path, site_key
from nnx_inspector.hooks.variables import is_weight
from nnx_inspector.program.choices.marking import mark_choices
from nnx_inspector.program.eager import (
    EagerPass,
    can_run,
    known_reason,
    remember_reason,
    why_untraceable,
)
from nnx_inspector.program.function import (
    Arguments,
    ModuleFunction,
    function_name,
    is_input,
    roots_of,
)
from nnx_inspector.program.instrument import evaluate
from nnx_inspector.program.marks import INPUT
from nnx_inspector.program.plan import Plan
from nnx_inspector.program.structure import describe
from nnx_inspector.program.survey import Survey, call_numbers, survey
from nnx_inspector.typing import GraphDef, Kwargs, Owner, Params, PyTree, Treedef, Value

_TAG = "nnx_inspector"


@dataclasses.dataclass(frozen=True, eq=False)
class CachedTrace:
    """The result of tracing a call, which serves every other call of an equal form. Holds no array
    of it.

    Attributes:
        survey, owner, calls: as in `StagedCall`.
        result: what the call returned and what it left behind, without arrays.
        written: to which kinds of references it writes.
    """

    survey: Survey
    owner: Owner
    calls: dict[int, int]
    result: Params
    written: set[str]

    def with_inputs_of(self, sites: Collection[str]) -> CachedTrace:
        """The same, with marks on received values only for these sites."""
        found = self.survey.only(lambda mark: mark.part != INPUT or mark.site in sites)
        return dataclasses.replace(self, survey=found)


@dataclasses.dataclass
class StagedCall:
    """A traced call.

    Attributes:
        survey: the jaxpr with its marks. Its inputs are `inputs`.
        inputs: the flat state of the modules, then the arrays among the arguments.
        outputs: the number of the call's own outputs; the other outputs are state.
        returned: what the call returned, without its arrays and modules.
        scope: the scope that gave modules their paths; it counts calls that it cannot attribute.
        owner: the owner of the marks in the survey.
        eager: why the call runs eagerly instead of being traced, in words; `""` if it is traced.
            The survey of an eager call is empty until the call has run.
        last: the last run of an eager call.
        calls: the number of each mark, see `survey.call_numbers`.
        spans: by the id of each Variable, the numbers of the inputs that hold its arrays.
        arrays: the arrays among the arguments, which are the last inputs.
        tracing: what an equal call can be staged with; None for an eager call.
    """

    survey: Survey
    inputs: list[Value]
    outputs: int
    returned: Arguments
    scope: Scope
    owner: Owner
    roots: dict[Path, nnx.Module]
    spans: dict[int, tuple[int, ...]]
    arrays: tuple[Value, ...]
    _finish: Callable[[Sequence[Value], bool], PyTree]
    _call: Callable[[Sequence[Value]], tuple[list[Value], Arguments]]
    tracing: CachedTrace | None = None
    eager: str = ""
    last: EagerPass | None = None
    calls: dict[int, int] = dataclasses.field(default_factory=lambda: dict[int, int]())

    def evaluate(self, inputs: Sequence[object], *, plan: Plan) -> tuple[list[Value], list[Value]]:
        """Run the call; returns its outputs, and what was seen. See `instrument.evaluate`."""
        if not self.eager:
            return evaluate(self.survey, inputs, plan=plan)
        last = EagerPass(self.owner, plan, calls=self.calls)
        return self.run_eagerly(inputs, last), last.seen

    def run_eagerly(self, inputs: Sequence[object], last: EagerPass) -> list[Value]:
        """Run the call as it stands; returns its outputs."""
        out, self.returned = last.run(lambda: self._call(inputs))
        self.last, self.survey, self.outputs = last, last.survey, len(self.returned.arrays)
        warn_of_doubtful_calls(self.scope, "They are listed as unseen.")
        return out

    def array_index(self, position: int, array: object) -> int:
        """The number of the input that holds the array at this position among the arguments'."""
        if position < len(self.arrays) and self.arrays[position] is array:
            return len(self.inputs) - len(self.arrays) + position
        raise TypeError(
            f"argnums names an argument that holds a {type(array).__name__}, which cannot be "
            f"differentiated. Name arguments that are modules or arrays."
        )

    def finish(self, out: Sequence[object], *, update: bool) -> PyTree:
        """The call's result from the jaxpr's outputs; `update` also changes the modules."""
        return self._finish(out, update)


HooksOf = Callable[[Scope, Owner], Sequence[Hook]]
"""A function of a scope and an owner of marks that returns the hooks to open."""


@contextlib.contextmanager
def stage_call(
    function: ModuleFunction,
    args: Sequence[object],
    kwargs: Kwargs,
    hooks: HooksOf,
    *,
    roots: dict[Path, Any] | None = None,
    may_run: bool = False,
    known: CachedTrace | None = None,
) -> Iterator[StagedCall]:
    """Trace `function(*args, **kwargs)` with `hooks(scope, owner)` open, unless an equal call was
    traced.

    Nothing runs on a device. Within the context `finish` may update the modules. `roots` are the
    modules that paths are relative to, by default those among the arguments. With `may_run`, a call
    that cannot be traced runs eagerly when it is evaluated, if its arguments are concrete.
    """
    roots = roots_of(function, args, kwargs) if roots is None else roots
    arguments = Arguments.of((function.owner, tuple(args), kwargs))
    token = (_TAG, *sorted((str(p), id(m)) for p, m in roots.items()))
    scope = Scope(roots, token)
    outer = open_hooks()
    owner = (token, len(outer))  # differs from an enclosing one, even of the same model
    result: Params = {} if known is None else known.result
    wanted = hooks(scope, owner) if known is None else ()

    with jit_enabled(), nnx.update_context(_TAG), add_hooks(*wanted):
        with nnx.split_context(_TAG) as splitting:
            graphdef, state = splitting.split(arguments.take(arguments.nodes))
        held, state_leaves = StateStructure.of(state)
        state_leaves = _dereferenced(state_leaves)
        own = _nodes_of(arguments.take(arguments.nodes))
        references, spans = _references(own), _spans(own, state)

        def pure(state_leaves: Sequence[Value], arrays: Sequence[Value]) -> PyTree:
            with nnx.merge_context(_TAG, True) as merging:
                inner = merging.merge(graphdef, held.with_arrays(state_leaves))
            nodes = _nodes_of(inner)
            if stage is not None:
                scope.copy_paths(own.values(), nodes.values())
            before, inner_references = _contents(inner), _references(nodes)
            owner, inner_args, inner_kwargs = arguments.rebuild(inner, arrays)
            out = function.bind(owner)(*inner_args, **inner_kwargs)
            returned = Arguments.of(out).without_numpy()
            with nnx.split_context(_TAG) as splitting:
                graphdef_out, state_out = splitting.split((inner, returned.take(returned.nodes)))
            held_out, leaves_out = StateStructure.of(state_out)
            leaves_out = _dereferenced(leaves_out)
            result.update(
                changed=_differ(before, _contents(inner)),
                returned=dataclasses.replace(returned, leaves=_leaves_without_arrays(returned)),
                graphdef=graphdef_out,
                held=held_out,
            )
            left = [reference[...] for reference in inner_references]
            return returned.take(returned.arrays), left, leaves_out

        arrays = arguments.take(arguments.arrays)
        stage: StagedCall | None = None
        runs = known is None and may_run and can_run((*state_leaves, *arrays))
        key = _call_hash(function, graphdef, arguments, state_leaves) if runs else None
        why = known_reason(key)
        if known is None and not why:
            try:
                jaxpr = jax.make_jaxpr(pure)(state_leaves, list(arrays))
            except Exception as error:
                why = why_untraceable(error) if runs else ""
                if not why:
                    _note_untraceable(error, may_run)
                    raise
                remember_reason(key, why)
                scope.forget()
            else:
                marked = mark_choices(jaxpr, owner, **_weights(own, spans))
                found = survey(marked, owner)
                numbers, written = call_numbers(found.marks), jaxprs.state_writes(jaxpr)
                known = CachedTrace(found, owner, numbers, result, written)
                warn_of_doubtful_calls(scope, "They are listed as unseen.")

        def call(inputs: Sequence[object]) -> tuple[list[Value], Arguments]:
            count = len(state_leaves)
            mine, left, state_out = pure(list(inputs[:count]), list(inputs[count:]))
            return [*mine, *left, *state_out], result["returned"]

        def finish(out: Sequence[object], update: bool) -> PyTree:
            returned: Arguments = result["returned"]
            mine, rest = out[: len(returned.arrays)], out[len(returned.arrays) :]
            left, state_out = rest[: len(references)], rest[len(references) :]
            nodes: Any = ()
            written: set[str] = set() if known is None else known.written
            if update and "hijax" in written:
                raise InspectorError(
                    f"{function_name(function.call)} writes to a Variable with hijax=True, which "
                    f"NNX's own transforms cannot update either. Make that Variable with ref=True."
                )
            if update and ("ref" in written or why):
                for reference, value in zip(references, left, strict=True):
                    reference[...] = value
            new_state = result["held"].with_arrays(state_out)
            if returned.nodes and not update:  # a copy, of what is the model's too
                _, nodes = nnx.merge(result["graphdef"], new_state)
            # without a change nothing is written: a model of an outer trace cannot be written to
            elif (update and result["changed"]) or returned.nodes:
                mine_before = arguments.take(arguments.nodes)
                with _unchanged_on_error(mine_before), nnx.merge_context(_TAG, False) as merging:
                    _, nodes = merging.merge(result["graphdef"], new_state)
            return returned.rebuild(nodes, mine)

        returned = Arguments.of(()) if known is None else result["returned"]
        stage = StagedCall(
            EagerPass(owner, Plan()).survey if known is None else known.survey,
            [*state_leaves, *arrays],
            len(returned.arrays),
            returned,
            scope,
            owner if known is None else known.owner,
            roots,
            spans,
            arrays,
            finish,
            call,
            known,
            why,
            calls={} if known is None else known.calls,
        )
        # jax caches traces by the open hooks, and these belong to this call alone: it would trace
        # and cache each jnp function used for measuring again for every model.
        with contextlib.nullcontext() if known is None else replace_hooks(outer):
            yield stage


def _weights(nodes: Mapping[Path, Any], spans: Mapping[int, tuple[int, ...]]) -> Params:
    """The numbers of the inputs that are parameters, and the shape of each by its path."""
    own = {path: v for path, v in nodes.items() if isinstance(v, nnx.Variable) and is_weight(v)}
    numbers = {number for v in own.values() for number in spans.get(id(v), ())}
    values = ((path, v.get_raw_value()) for path, v in own.items())
    shapes = {site_key(path[1:]): x.shape for path, x in values if isinstance(x, jax.Array)}
    return {"weights": numbers, "shapes": shapes}


def _call_hash(
    function: ModuleFunction, graphdef: GraphDef, arguments: Arguments, leaves: Sequence[object]
) -> int | None:
    """A hash of a call's code, structure, shapes and dtypes; None if they cannot be hashed."""
    of = function.method or getattr(function.call, "__code__", type(function.call))
    avals = [describe(x) for x in (*leaves, *arguments.take(arguments.arrays))]
    dynamic = {*arguments.nodes, *arguments.arrays}
    others = [(type(x), x) for i, x in enumerate(arguments.leaves) if i not in dynamic]
    try:
        return hash((of, graphdef, arguments.treedef, tuple(avals), tuple(others)))
    except TypeError:
        return None


@dataclasses.dataclass(frozen=True)
class StateStructure:
    """A state without its arrays; other values of its Variables (such as sown texts) stay."""

    treedef: Treedef
    others: dict[int, Value]

    @staticmethod
    def of(state: object) -> tuple[StateStructure, list[Value]]:
        leaves, treedef = jax.tree.flatten(state)
        others = {i: leaf for i, leaf in enumerate(leaves) if not _can_be_traced(leaf)}
        arrays = [x for i, x in enumerate(leaves) if i not in others]
        return StateStructure(treedef, others), arrays

    def with_arrays(self, arrays: Sequence[Value]) -> PyTree:
        rest = iter(arrays)
        count = len(self.others) + len(arrays)
        leaves = [self.others[i] if i in self.others else next(rest) for i in range(count)]
        return jax.tree.unflatten(self.treedef, leaves)


def _dereferenced(leaves: Sequence[object]) -> list[Value]:
    """The values of references; NNX makes new references, ours, from them when it merges."""
    return [leaf[...] if isinstance(leaf, jax.Ref) else leaf for leaf in leaves]


def _can_be_traced(leaf: object) -> bool:
    """Whether a leaf of a state is an array, a reference to one, or a number (made an array)."""
    return is_input(leaf) or isinstance(leaf, (bool, int, float, complex, jax.Ref))


def _nodes_of(nodes: object) -> dict[Path, Any]:
    """The NNX objects and Variables below some objects, by their paths, a shared one once."""
    return {path: node for path, node, again in graph_nodes(nodes) if not again}


def _references(nodes: Mapping[Path, Any]) -> list[jax.Ref]:
    """The references of the Variables with `ref=True`, in the order of the graph."""
    found = [v.get_raw_value() for v in nodes.values() if isinstance(v, nnx.Variable)]
    return [value for value in found if isinstance(value, jax.Ref)]


@contextlib.contextmanager
def _unchanged_on_error(nodes: object) -> Iterator[None]:
    """Restore the objects if writing to them fails: NNX empties an object before it fills it."""
    every: list[Value] = [node for _, node in nnx.iter_graph(nodes, graph=True)]
    values = [(v, v.get_raw_value()) for v in every if isinstance(v, nnx.Variable)]
    attributes = [(node, dict(vars(node))) for node in every if isinstance(node, nnx.Pytree)]
    try:
        yield
    except BaseException:
        for node, names in attributes:
            vars(node).clear()
            vars(node).update(names)
        for variable, value in values:
            if variable.get_raw_value() is not value:
                variable.set_raw_value(value)
        raise


def _contents(nodes: object) -> tuple[Any, list[Value]]:
    graphdef, state = nnx.split(nodes, graph=True)
    # read now: a State holds the Variables themselves
    return comparable_structure(graphdef), jax.tree.leaves(state)


def _differ(before: tuple[Any, list[Value]], after: tuple[Any, list[Value]]) -> bool:
    """Whether two contents differ in structure, or in the identity of any array."""
    if before[0] != after[0] or len(before[1]) != len(after[1]):
        return True
    return any(a is not b for a, b in zip(before[1], after[1], strict=True))


def _note_untraceable(error: Exception, may_run: bool) -> None:
    place = why_untraceable(error)
    if place:
        eagerly = "Call it with arrays, outside jit and vmap, and it runs eagerly; or use"
        add_note(
            error,
            f"the call is traced, as by jax.jit, so its code cannot read the value "
            f"of an array: {place}. {eagerly if may_run else 'Use'} jax.lax.cond or "
            f"jnp.where, or pass what it branches on as a Python value.",
        )


def _spans(nodes: Mapping[Path, Any], state: object) -> dict[int, tuple[int, ...]]:
    """By the id of each Variable, the numbers of its leaves in the flat state."""
    spans: dict[int, tuple[int, ...]] = {}
    start = 0
    for own, value in _pair_with_state(nodes, state):
        count = sum(_can_be_traced(leaf) for leaf in jax.tree.leaves(value))
        spans[id(own)] = tuple(range(start, start + count))
        start += count
    return spans


def array_names(variable: nnx.Variable[Any]) -> list[str]:
    """A suffix for each array of a Variable, in order; `""` for a single array."""
    leaves = jax.tree_util.tree_flatten_with_path(variable.get_raw_value())[0]
    return [jax.tree_util.keystr(path) for path, leaf in leaves if _can_be_traced(leaf)]


def variables_of_state(nodes: object, state: object) -> Iterator[tuple[Any, Any]]:
    """The Variables (and plain arrays) that a state of NNX objects holds, and their parts."""
    return _pair_with_state(_nodes_of(nodes), state)


def _pair_with_state(variables: Mapping[Path, Any], state: object) -> Iterator[tuple[Any, Any]]:
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    for path, value in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)[0]:
        # an attribute that is an array stands in the state by itself
        yield variables.get(tuple(plain_key(k) for k in path), value), value


def _leaves_without_arrays(returned: Arguments) -> tuple[Value, ...]:
    # no tracer may outlive the trace; nodes and arrays are filled in from the outputs
    dynamic = {*returned.nodes, *returned.arrays}
    return tuple(None if i in dynamic else leaf for i, leaf in enumerate(returned.leaves))
