"""The hook of a watched model: what it names in the user's program, at each call.

The outermost call begins a pass, and what each call returns gets a mark, which also marks its
gradient. Where a perturbation may act, its numbers are a `launch_input`. Nothing is measured while
the user's step is traced: `programs` reads the finished program and edits it where it is launched.
Invariant: equal hooks share programs. A hook holds only names and numbers, because its session may
be gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import ShapedArray

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.launching.custom_rules import running_rule, track_rules
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.hook import Context, open_hooks, replace_hooks, restore_hooks
from nnx_inspector.hooks.sites import CALL, parse_key, site_key
from nnx_inspector.hooks.variables import contents
from nnx_inspector.live.parameter_samples import (
    ParameterSamples,
    arguments_of,
    parameters_of_call,
    path_in_model,
    variables_replaced,
)
from nnx_inspector.live.pass_start import PassStart, ReachedSite, open_sessions
from nnx_inspector.perturbations.apply_setting import parameter_rules
from nnx_inspector.perturbations.perturbed import restrict_to, takes_positions
from nnx_inspector.perturbations.perturbed_parameters import hold_perturbed
from nnx_inspector.perturbations.places import (
    PARAMETER,
    ROW,
    Place,
    apply_if,
    apply_row,
    misfit_clause,
    misfit_error,
)
from nnx_inspector.program.analysis.error_notes import note_site
from nnx_inspector.program.editing.position_masks import Where, mask_beside, mask_call, mask_params
from nnx_inspector.program.function import call_in_shapes
from nnx_inspector.program.marks import (
    BEGIN,
    INPUT,
    OUTPUT,
    Change,
    launch_input,
    mark,
    mark_arguments,
    mark_parameter,
    mark_tree,
)
from nnx_inspector.program.members import Ensemble, ensemble_of, member_scope
from nnx_inspector.program.structure import is_whole
from nnx_inspector.typing import Args, Array, Function, Kwargs, Params, PyTree, Value

_numbers = itertools.count(1)


@dataclasses.dataclass
class TracedCall:
    """A call of the outermost module that is under way in this thread.

    Attributes:
        number: by which the marks of its calls know it. A jitted function that is called again
            keeps the number that it had when it was traced.
        begun: what its program says of it.
        rows, data: the numbers of its perturbations, and for each place whether it is on, and its
            numbers.
        bound: what calls inside have returned that nothing has tied to the program yet, and first
            a value that ties the place where the pass begins.
        entered: whether the outermost module itself has been entered.
        counts: how often each site has been called, and received.
    """

    number: int
    begun: PassStart
    ensemble: Ensemble | None
    rows: Value = None
    data: list[tuple[Value, list[Value]]] = dataclasses.field(default_factory=lambda: [])
    bound: list[Value] = dataclasses.field(default_factory=lambda: [])
    entered: bool = False
    counts: dict[tuple[str, str], int] = dataclasses.field(default_factory=lambda: {})

    def count(self, site: str, part: str) -> int:
        found = self.counts.get((site, part), 0)
        self.counts[site, part] = found + 1
        return found


class _ThreadCalls(threading.local):
    def __init__(self) -> None:
        self.runs: dict[int, TracedCall] = {}


_thread_calls = _ThreadCalls()


def current_call(session: int) -> TracedCall | None:
    """The call of a session's model that this thread is in."""
    return _thread_calls.runs.get(session)


@contextlib.contextmanager
def _running(session: int, run: TracedCall) -> Iterator[None]:
    _thread_calls.runs[session] = run
    try:
        with track_rules():
            yield
    finally:
        del _thread_calls.runs[session]


@dataclasses.dataclass(frozen=True)
class WatchHook:
    """The hook of a session. It holds only names, numbers and places: equal hooks share programs.

    `inside` marks the hook for calls within a pass: a block that is jitted by itself has one
    program there, and another one where it is called directly, as a pass of its own. `salt` has no
    effect but another key for jit's caches; see `live.programs.fast_path`.
    """

    session: int
    keys: tuple[str, ...]
    unmeasured: tuple[str, ...]
    gradients: bool
    places: tuple[Place, ...]
    parameters: bool | frozenset[str] = True
    inside: bool = False
    salt: int = 0
    where: Where | None = None

    @staticmethod
    def owner_of(session: int) -> tuple[str, int]:
        return "watch", session

    @property
    def owner(self) -> tuple[str, int]:
        return self.owner_of(self.session)

    def __call__(self, next_fun: Function, args: Args, kwargs: Kwargs, context: Context) -> PyTree:
        site = context.site or ""
        if running_rule():
            self._note_unseen(site)
            return next_fun(*args, **kwargs)
        run = current_call(self.session) if self.inside else None
        if run is None:
            if self.salt:  # jax was to start the next program, and this call is none
                restore_hooks()
                return dataclasses.replace(self, salt=0)(next_fun, args, kwargs, context)
            inside = dataclasses.replace(self, inside=True)
            with self._replaced_by(inside):
                with replace_hooks(()):
                    those = parameters_of_call(context)
                run = self._begin(those, args, kwargs, context)
                named = functools.partial(self._mark_parameter, run)
                # a set has another order in each process of a job, and all make one program
                mine = {path: one for path, one in those.items() if path in run.begun.weights}
                perturbed = self._parameters(run, context)
                whole = self._count_positions(args, kwargs, context)
                with (
                    _running(self.session, run),
                    variables_replaced(mine, named),
                    perturbed,
                    whole as of,
                ):
                    return inside(next_fun, of[0], of[1], context)
        how: Kwargs = {"owner": self.owner, "site": site, **mask_params(self.owner)}
        start, run.entered = len(run.bound) if run.entered else 0, True
        if _takes_ids(context) or any(p.at == INPUT and site in p.sites for p in self.places):
            number = run.count(site, INPUT)
            how |= {"call": (run.number, number)}
            change = self._perturbation_at(run, site, INPUT, number)
            args, kwargs = mark_arguments(args, kwargs, context, part=INPUT, change=change, **how)
        with member_scope(context.module):
            try:
                out = next_fun(*args, **kwargs)
            except FloatingPointError as error:  # raised by the user's `jax_debug_nans`
                note_site(error, site)
                raise
            number = run.count(site, OUTPUT)
            ties = [x for x in run.bound[start:] if jit.is_current_tracer(x)]
            how |= {"call": (run.number, number), "gradients": self.gradients}
            change = self._perturbation_at(run, site, OUTPUT, number)
            out = mark_tree(out, part=OUTPUT, ties=ties, change=change, **how)
        del run.bound[start:]
        run.bound.extend(filter(jit.is_tracer, jax.tree.leaves(out, is_leaf=is_whole)))
        return out

    def _count_positions(
        self, args: Args, kwargs: Kwargs, context: Context
    ) -> AbstractContextManager[tuple[Args, Kwargs]]:
        """The context of a call that begins, in which it is known which of its positions count; it
        gives the call's arguments.
        """
        if self.where is None:
            return contextlib.nullcontext((args, kwargs))
        try:
            mask = self.where.mask(args, kwargs, context)
        except InspectorError as error:
            found, mask = open_sessions.get(self.session), None
            if found is not None and not context.path:
                found.notes.append(f"{error} All positions are measured.")
        return mask_call(mask, self.owner, args, kwargs, context)

    def _measures_parameter(self, path: str) -> bool:
        """Whether a parameter is measured: all, none, or those of some modules."""
        some = self.parameters
        return some if isinstance(some, bool) else path.rpartition("/")[0] in some

    def _mark_parameter(self, run: TracedCall, path: str, value: jax.Array) -> jax.Array:
        """A parameter, whose gradient is marked."""
        if not self.gradients or not jit.is_tracer(value):
            return value
        return mark_parameter(value, site=path, call=run.number, owner=self.owner)

    def _begin(
        self, those: ParameterSamples, args: tuple[Value, ...], kwargs: Kwargs, context: Context
    ) -> TracedCall:
        """Name the place where a pass begins.

        Its operands are the parameters and the arguments, of which a measured pass takes samples.
        """
        number = next(_numbers)
        with replace_hooks(()):
            values = {path: value for path, (_, value) in those.items()}
            mine = (path for path, (v, _) in those.items() if isinstance(v, nnx.Param))
            weights = filter(self._measures_parameter, mine)
            begun = PassStart(
                session=self.session,
                site=context.site or "",
                paths=tuple(values),
                parameters=_differentiable(context, values),
                weights=frozenset(weights),
                call=call_in_shapes(context, args, kwargs) if context.kind == "method" else None,
                type_name=context.type_name,
            )
            # A mark is an identity: it returns its operands, and jax drops it from a program where
            # nothing uses one. So the first is a constant whose copy is an operand of the marks of
            # what the call returns: as long as one of those stays, this one does, and before them.
            operands = [np.float32(0), *values.values(), *arguments_of(args, kwargs)]
        how = {"owner": self.owner, "site": begun.site, "part": BEGIN, "call": number}
        token, *_ = mark.bind(*operands, structure=None, begun=begun, **how)
        run = TracedCall(number, begun, ensemble_of(context.module), bound=[token])
        run.rows = self._row_inputs(run)
        run.data = [self._place_inputs(run, i) for i in range(len(self.places))]
        return run

    def _row_inputs(self, run: TracedCall) -> Value:
        """The rows of the sites: named anew in each trace, so that none holds another's tracer."""
        if not self.keys:
            return None
        if run.rows is not None and not jit.is_tracer(run.rows):
            return run.rows
        kind = jax.ShapeDtypeStruct((len(self.keys), ROW), np.float32)
        return self._given("rows", kind, self.keys, call=run.number)

    def _place_inputs(self, run: TracedCall, number: int) -> tuple[Value, list[Value]]:
        """Whether a place is on, and its numbers."""
        if run.data and not jit.is_tracer(run.data[number][0]):
            return run.data[number]
        kinds = [jax.ShapeDtypeStruct((), np.bool_), *self.places[number].avals]
        on, *numbers = (
            self._given((number, j), kind, self.places, call=run.number)
            for j, kind in enumerate(kinds)
        )
        return on, numbers

    def _given(
        self, key: object, kind: jax.ShapeDtypeStruct, those: object, *ties: object, **how: object
    ) -> Value:
        aval = ShapedArray(kind.shape, kind.dtype)
        return launch_input.bind(*ties, place=(self.owner, key, those), kind=aval, **how)

    def _note_unseen(self, site: str) -> None:
        """Note a call that is neither measured nor perturbed: nor may its second run be, in which a
        function with a derivative of its own computes it again for the gradient.
        """
        why = f"it is called inside a {running_rule()} equation, which cannot be entered"
        run, found = current_call(self.session), open_sessions.get(self.session)
        if run is not None:
            run.begun.unseen[site] = why
        if found is not None:
            found.unseen[site] = why

    def _replaced_by(self, hook: WatchHook) -> AbstractContextManager[None]:
        every = open_hooks()
        inner = (dataclasses.replace(x, wrap=hook) if x.wrap == self else x for x in every)
        return replace_hooks(tuple(inner))

    # ------------------------------------------------------------- perturbations

    @contextlib.contextmanager
    def _parameters(self, run: TracedCall, context: Context) -> Iterator[None]:
        """Perturb the parameters of the module that is called, while it runs."""
        pairs = zip(self.places, run.data, strict=True)
        mine = [(place, (on, *numbers)) for place, (on, numbers) in pairs if place.at == PARAMETER]
        if not mine or not isinstance(context.module, nnx.Module) or context.path is None:
            yield
            return
        places = [place for place, _ in mine]
        rules = parameter_rules(places, [data for _, data in mine])
        with hold_perturbed(context.module, parse_key(context.path)[0], rules) as reached:
            run.begun.reached.update(
                (key, p, why, None) for p in places for key, why in reached if key in p.sites
            )
            yield

    def _perturbation_at(self, run: TracedCall, site: str, part: str, number: int) -> Change | None:
        """What perturbs the values of a site; the mark says what it has reached."""
        row = part == OUTPUT and site in self.keys and _any_row_acts(run.rows)
        mine = [
            (i, place)
            for i, place in enumerate(self.places)
            if place.at == part and site in place.sites
        ]
        if not row and not mine:
            return None

        def change(values: list[Value]) -> tuple[list[Value], Params]:
            reached = set[ReachedSite]()
            if row:
                index, rows = self.keys.index(site), self._row_inputs(run)
                values = [apply_row(x, rows, index) for x in values]
            for i, place in mine:
                on, numbers = self._place_inputs(run, i)
                one = jax.tree.unflatten(place.treedef, numbers)
                here = self._on_in_layer(run, site, i, place, on, values)
                for n, x in enumerate(values):
                    why = misfit_clause(misfit_error(one, site, x))
                    seen = jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x))
                    reached.add((site, place, why, seen))
                    if not why:
                        act = functools.partial(_perturbed, name=f"{site}/{number}/{n}")
                        where = mask_beside(self.owner, x) if takes_positions(one) else None
                        values[n] = apply_if(
                            here, act, x, one if where is None else restrict_to(one, where)
                        )
            return values, {"reached": frozenset(reached)}

        return change

    def _on_in_layer(
        self,
        run: TracedCall,
        site: str,
        number: int,
        place: Place,
        on: Array,
        values: Sequence[object],
    ) -> Value:
        if not place.rows:
            return on
        if run.ensemble is not None and jit.is_current_tracer(run.ensemble.number):
            return _is_on_in_member(on, place.rows, run.ensemble.number, run.ensemble.count)
        how = {"rows": place.rows, "call": run.number, "site": site}
        kind = jax.ShapeDtypeStruct((), np.bool_)
        return self._given((number, 0), kind, self.places, *values, **how)


def parameters_of(keys: Sequence[str], unmeasured: Sequence[str]) -> frozenset[str]:
    """The modules whose parameters are measured if only these sites are."""
    measured = (key for key in keys if key not in unmeasured)
    return frozenset(site_key(parse_key(key)[0]) for key in measured)


def _perturbed(x: Value, one: Value, *, name: str) -> Value:
    return one.apply_at(x, name)


@internal_config()
def _is_on_in_member(on: Array, rows: Sequence[int], number: Array, count: int) -> Array:
    return on & (number == rows[0] % count)


def _any_row_acts(rows: Array) -> bool:
    return rows is not None and (jit.is_tracer(rows) or bool(np.any(np.asarray(rows))))


def _takes_ids(context: Context) -> bool:
    """Whether a call looks up ids in a table: one out of range gives NaN, and the id tells why."""
    return isinstance(context.module, nnx.Embed) and parse_key(context.site or "")[1] == CALL


def _differentiable(context: Context, held: Mapping[str, object]) -> frozenset[str]:
    """Those of some paths that are parameters, which a step may be differentiated by."""
    module = context.module
    if not isinstance(module, nnx.Module) or context.path is None:
        return frozenset()
    mine = (
        path_in_model(context, path)
        for path, variable, value in contents(module)
        if isinstance(variable, nnx.Param) and not jit.in_forward_mode(value)
    )
    return frozenset(path for path in mine if path in held)
