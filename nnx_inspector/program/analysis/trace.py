"""`trace`: the calls of a forward pass, with shapes, parameters, FLOPs and dataflow, without a run.

The pass is traced abstractly with every call marked. The tree of calls, the operations between a
call's marks, and the flow of values between modules are read from the jaxpr. Invariant: nothing is
computed, no array is allocated, and the model does not change, even if the pass raises. A pass that
cannot be traced runs eagerly instead, and its calls are those that ran.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nnx_inspector._compat import sources
from nnx_inspector.errors import add_note, printable
from nnx_inspector.hooks.hook import TAP_INPUT, TAP_OUTPUT, Hook
from nnx_inspector.hooks.scope import Scope
from nnx_inspector.hooks.sites import (
    CALL,
    ModuleSite,
    Only,
    Path,
    Selection,
    linen_parts,
    module_sites,
    parse_key,
    site_key,
)
from nnx_inspector.hooks.variables import (
    is_weight,
    shared_contents,
    unseen_references,
    variables_by_path,
)
from nnx_inspector.program.analysis.calls import (
    CallHistory,
    MarkCalls,
    MarkInputs,
    ParameterSizes,
    TracedCall,
    calls_of,
    error_in_words,
)
from nnx_inspector.program.analysis.dataflow import Arrival, Edge, dataflow
from nnx_inspector.program.editing.position_masks import Where, mask_hooks
from nnx_inspector.program.function import ModuleFunction, module_function, roots_of
from nnx_inspector.program.marking import MarkUnattributed
from nnx_inspector.program.plan import Plan
from nnx_inspector.program.stage import CachedTrace, HooksOf, StagedCall, stage_call
from nnx_inspector.typing import Kwargs, Params

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True)
class Trace:
    """The result of `trace`. Its repr is a tree of the calls.

    Attributes:
        calls: the calls, in the order in which they begin.
        edges: the dataflow between modules: values that one returns and another receives.
        borders: the dataflow between a call and those nested in it. If the producer encloses the
            consumer, the value is one that the producer received. If the consumer encloses the
            producer, or is the producer, the value is part of what the consumer returns.
        modules: every module of the model, called or not.
        unseen: sites and Variables that could not be seen, each with the reason.
        error: what the pass raised, in words; `""` if it did not raise. A trace with an error ends
            at the call that raised, and has no edges and no FLOPs; it lists the calls inside a
            jitted function only once if the function is called twice with like arguments.
        eager: why the pass ran eagerly instead of being traced, in words; `""` if it was traced.
            The calls of an eager pass are those that ran; their FLOPs and the dataflow are not
            known.
        arrivals: the source of edges and borders: each value that a call receives or returns, with
            its origins.
    """

    calls: tuple[TracedCall, ...]
    edges: tuple[Edge, ...]
    borders: tuple[Edge, ...]
    modules: tuple[ModuleSite, ...]
    unseen: dict[str, str]
    error: str = ""
    arrivals: tuple[Arrival, ...] = ()
    eager: str = ""

    def to_frame(self) -> pd.DataFrame:
        """A tidy pandas DataFrame, with a row for each call.

        The columns are the fields of `TracedCall` but `arrays` and `counted`: `site, type, depth,
        parent, inputs, output, shape, dtype, parameters, parameter_bytes, output_bytes, flops,
        times, conditional, stacked, members, source, changed, error, attends`. `changed` is in
        words: `"mean (BatchStat), var (BatchStat)"`.
        """
        import pandas as pd

        known = (field.name for field in dataclasses.fields(TracedCall))
        columns = [name for name in known if name not in ("arrays", "counted")]
        rows = [[getattr(call, name) for name in columns] for call in self.calls]
        frame = pd.DataFrame(rows, columns=columns)
        frame["changed"] = [", ".join(map(str, call.changed or ())) for call in self.calls]
        return frame

    def __repr__(self) -> str:
        names = ("site", "type", "inputs", "output", "params", "flops", "changes")
        rows = [names, *(self._row(number) for number in range(len(self.calls)))]
        widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines += [f"{key} not seen: {why}" for key, why in self.unseen.items()]
        lines += [f"ran eagerly: {self.eager}"] * bool(self.eager)
        text = "\n".join([*lines, f"raised {self.error}"] if self.error else lines)
        return printable(text)

    def _row(self, number: int) -> tuple[str, ...]:
        call = self.calls[number]
        segments, method = parse_key(call.site)
        name = segments[-1] if segments else "(root)"
        if method != CALL:
            name = method if method[0] == "@" else f"{name}:{method}"
        if not self.error:
            name += " (while)" if call.times is None else f" x{call.times}" * (call.times != 1)
            name += " (cond)" * call.conditional
        flops = ("" if self.error else "?") if call.flops is None else _short_number(call.flops)
        raised = call.error.splitlines()[0][:60] if call.error else ""
        return (
            "  " * call.depth + name,
            call.type,
            call.inputs,
            call.output or (f"raised {raised}" if raised else "(did not return)"),
            _short_number(call.parameters) if call.parameters else "",
            flops,
            self._own_changes(number),
        )

    def _own_changes(self, number: int) -> str:
        """The Variables that a call changes itself, not through a nested call."""
        here, _ = parse_key(self.calls[number].site)
        below = {
            (*parse_key(call.site)[0][len(here) :], *parse_key(variable.name)[0])
            for call in self.calls
            if call.parent == number
            for variable in call.changed or ()
        }
        changed = self.calls[number].changed or ()
        own = [c.name for c in changed if parse_key(c.name)[0] not in below]
        return ", ".join(own if len(own) <= 3 else [*own[:3], f"... {len(own) - 3} more"])


def _short_number(number: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / limit * (10 if unit == 'k' else 1):.3g}{unit}"
    return f"{number:.0f}"


def trace(f: object, /, *args: object, only: Only = None, **kwargs: object) -> Trace:
    """List the calls that `f(*args, **kwargs)` makes, without running it.

    A function whose Python code reads the values of arrays cannot be traced. With concrete arrays
    as arguments it runs once, and the trace has the calls that ran; the model does not change.

    Args:
        f: a module, a bound method of one, or a function whose arguments hold modules.
        args: its arguments. Arrays may be `jax.ShapeDtypeStruct`, and the model may have been
            built with `nnx.eval_shape`: nothing is computed.
        only: which sites; see `intercept_methods`. By default `__call__` of every module.
        kwargs: its keyword arguments.

    Raises:
        TypeError: the arguments hold no module.
        ValueError: `only` names operations and none is found; the text names the closest.
        Exception: any exception of the forward pass, with a note that names the failing site and
            an attribute `partial_trace`: the `Trace` up to that point.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> nni.trace(model, jnp.ones((4, 2))).calls[0].output
        'float32[4,3]'
        >>> try:
        ...     trace = nni.trace(model, jnp.ones((4, 5)))
        ... except TypeError as error:
        ...     trace = error.partial_trace
        >>> trace.calls[0].inputs, trace.calls[0].error[:9]
        ('float32[4,5]', 'TypeError')
    """
    function = module_function(f, "trace")
    roots = roots_of(function, args, kwargs)
    selection = Selection(only)
    with staged_for_trace(function, args, kwargs, selection=selection, roots=roots) as stage:
        found = trace_of(stage)
        if selection.inside:
            called = [call.site for call in found.calls]
            selection.require_match(roots, called, stage.scope.operations)
        return found


def trace_of(stage: StagedCall) -> Trace:
    """The trace of a call that is staged with all marks; an eager one has run."""
    sites, modules = _modules_of(stage.roots)
    source, _ = sources.source_of_caller()
    unseen = {**stage.survey.unseen, **unseen_references(stage.roots)}
    for name, count in stage.survey.unattributed.items():
        calls = f"{count} unattributed call{'s' * (count > 1)}"
        unseen[f"({name})"] = f"{calls} of modules of this type"
    own = (v for _, v in variables_by_path(stage.roots) if is_weight(v))
    weights = {number for v in own for number in stage.spans.get(id(v), ())}
    how: Params = dict(known=not stage.eager, weights=weights)
    calls = calls_of(stage.survey.jaxpr, stage.owner, modules, source, **how)
    if stage.eager:  # the operands of operations are not known
        return Trace(calls, (), (), sites, unseen, eager=stage.eager)
    edges, borders, arrivals = dataflow(stage.survey.jaxpr, stage.owner)
    return Trace(calls, edges, borders, sites, unseen, arrivals=arrivals)


@contextlib.contextmanager
def staged_for_trace(
    function: ModuleFunction,
    args: Sequence[object],
    kwargs: Kwargs,
    *,
    selection: Selection,
    roots: dict[Path, Any],
    known: CachedTrace | None = None,
    runs: bool = True,
    where: Where | None = None,
) -> Iterator[StagedCall]:
    """Stage a call with all marks that a trace, a record or a perturbation needs.

    Args:
        runs: whether a call that cannot be traced runs now.
        where: which positions count, for the marks.

    Raises:
        Exception: any exception of the call, as of `trace`.
    """
    sites, modules = _modules_of(roots)
    history = CallHistory(modules)
    with contextlib.ExitStack() as stack:
        stack.callback(history.close)
        stack.enter_context(
            shared_contents(tuple(roots.values()))
        )  # the modules are asked one by one
        hooks = _hooks(selection, history, where)
        try:
            stage = stack.enter_context(
                stage_call(function, args, kwargs, hooks, roots=roots, may_run=True, known=known)
            )
            if stage.eager and runs:
                history.restart()
                stage.evaluate(stage.inputs, plan=Plan(summarise=False))
        except Exception as error:
            calls = (
                _calls_without_cache(function, args, kwargs, selection, modules, roots, error)
                or history.calls
            )
            partial = Trace(tuple(calls), (), (), sites, {}, error_in_words(error))
            vars(error)["partial_trace"] = partial
            add_note(error, "this exception's partial_trace holds the calls so far.")
            raise
        yield stage


def _modules_of(roots: dict[Path, Any]) -> tuple[tuple[ModuleSite, ...], ParameterSizes]:
    sites = tuple(s for prefix, root in roots.items() for s in module_sites(root, prefix))
    parts: Params = {site.key: site.module for site in sites}
    for site in sites:
        parts |= {
            site_key((*site.path, *path)): part for path, part in linen_parts(site.module).items()
        }
    return sites, ParameterSizes(parts)


def _hooks(
    selection: Selection, history: CallHistory, where: Where | None = None, again: object = None
) -> HooksOf:
    def hooks(scope: Scope, owner: object) -> Sequence[Hook]:
        owner = owner if again is None else (owner, again)
        return [
            *mask_hooks(owner, where, scope),
            Hook(MarkCalls(owner, history), TAP_OUTPUT, selection, scope, MarkUnattributed(owner)),
            Hook(MarkInputs(owner, history), TAP_INPUT, selection, scope),
        ]

    return hooks


def _calls_without_cache(
    function: ModuleFunction,
    args: Any,
    kwargs: Kwargs,
    selection: Selection,
    modules: ParameterSizes,
    roots: dict[Path, Any],
    error: Exception,
) -> list[TracedCall]:
    """The calls of a pass that raised, from a second pass without cached traces, which hide inner
    calls.

    Empty if the second pass does not raise the same type of error.
    """
    history = CallHistory(modules)
    try:
        hooks = _hooks(selection, history, again=object())
        with stage_call(function, args, kwargs, hooks, roots=roots, may_run=True) as stage:
            if stage.eager:
                history.restart()
                stage.evaluate(stage.inputs, plan=Plan(summarise=False))
            return []
    except Exception as second:  # noqa: BLE001 - the first error is raised
        return history.calls if type(second) is type(error) else []
    finally:
        history.close()
