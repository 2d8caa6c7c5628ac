"""The hook of a watched model: what its programs do at each call, and what they send to the host.

The outermost call begins a pass: it asks the host for its ticket, whether it is measured, and the
numbers of its perturbations. Then it runs as it stands, in the user's own trace, and its marks are
harvested as they run. One message sends all outputs to the host, and one all cotangents; both hold
the ticket. Invariant: a callback never raises (its errors are counted), and equal hooks share
programs. A hook holds only names and numbers, because its session may be gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import ours
from nnx_inspector._compat.interpreter import kept_apart
from nnx_inspector._compat.sharding import counted_once_here, device_within
from nnx_inspector.hooks.layers import Context, open_layers, opened
from nnx_inspector.hooks.pytrees import rebuilt
from nnx_inspector.hooks.sites import CALL, parse_key
from nnx_inspector.hooks.variables import contents
from nnx_inspector.live.beginning import beginning, path_within
from nnx_inspector.live.calls import Calls
from nnx_inspector.live.messages import GRADIENT, Asked, Cotangents, Outputs, Where, listeners
from nnx_inspector.perturbations.apply import parameter_rules
from nnx_inspector.perturbations.perturbed import Rows, as_seen
from nnx_inspector.perturbations.perturbed import applied as applied_at
from nnx_inspector.perturbations.region import ROW, apply
from nnx_inspector.perturbations.slots import PARAMETER, Place, misfit, refusal, switched
from nnx_inspector.perturbations.substitute import parameters_within
from nnx_inspector.program.analysis.error_notes import note_site
from nnx_inspector.program.eager import EagerPass
from nnx_inspector.program.function import call_in_shapes
from nnx_inspector.program.harvest import sinks_for
from nnx_inspector.program.host.primitives import ask, tell, tied
from nnx_inspector.program.host.sinks import observe_cotangent
from nnx_inspector.program.host.supply import supply_of
from nnx_inspector.program.marks import (
    INPUT,
    OUTPUT,
    mark_arguments,
    mark_tree,
)
from nnx_inspector.program.members import Ensemble, are_mapped, ensemble_of, parameters_of, within
from nnx_inspector.program.plan import Keep, Plan
from nnx_inspector.program.structure import is_observable, is_whole
from nnx_inspector.program.survey import Marked, Survey
from nnx_inspector.recordings.layers import leaf_key
from nnx_inspector.records.packed import Small, Sunk, joined
from nnx_inspector.stats.gauges import LENGTH
from nnx_inspector.stats.measure_gauges import gauge
from nnx_inspector.stats.summary import Summary

OUTSIDE = (
    "its layer cannot be identified here, outside a call of the model, so a perturbation of a "
    "single layer does not act"
)


class _Threads(threading.local):
    def __init__(self) -> None:
        self.asked: dict[int, Asked] = {}

    @contextlib.contextmanager
    def running(self, session: int, asked: Asked) -> Iterator[None]:
        """While inside, this thread runs a pass of the session."""
        self.asked[session] = asked
        try:
            yield
        finally:
            del self.asked[session]


_threads = _Threads()


@dataclasses.dataclass(frozen=True)
class Watch:
    """The hook of a session. It holds only names, numbers and places: equal hooks share programs.

    `inside` marks the hook for calls within a pass: a block that is jitted by itself has one
    program there, and another one where it is called directly, as a pass of its own. `aside` has no
    effect but another key for jit's caches; see `live.programs.passing`.
    """

    session: int
    keys: tuple[str, ...]
    unmeasured: tuple[str, ...]
    gradients: bool
    places: tuple[Place, ...]
    inside: bool = False
    aside: int = 0

    @property
    def _owner(self) -> Any:
        return "watch", self.session

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        if kept_apart():
            self._note_apart(context.site or "")
            return next_fun(*args, **kwargs)
        if self.inside:
            return self._marked(next_fun, args, kwargs, context)
        if self.aside:  # what follows opens other layers, and so undoes that
            return dataclasses.replace(self, aside=0)(next_fun, args, kwargs, context)
        with opened(()):  # see `EagerPass`
            device, devices = device_within()
            found = listeners.get(self.session)
            claim = None if found is None else found.lookalikes.claim_on(context.module)
            asked = Asked(
                self.session,
                self.keys,
                self.places,
                site=context.site or "",
                calls=_calls_here(self.session),
                claim=claim,
                devices=devices,
            )
            # a call after an update begins after it
            after = (args, kwargs), next(parameters_of(context.module), None)
            ticket, gate, rows, data = self._asks(asked, after, device)
        if not jit.is_tracer(gate) and not bool(gate) and not _acts(rows, data):
            with self._within(), _threads.running(self.session, asked):
                return self._marked(next_fun, args, kwargs, context)
        with opened(()):
            states, begun = self._sampled(gate, args, kwargs, context)
        call = call_in_shapes(context, args, kwargs) if context.kind == "method" else None
        drawn: dict[int, Where] = {}  # a program keeps it: nothing of this trace may be in it
        ensemble = ensemble_of(context.module)
        one = self._pass(asked, ticket, gate, rows, data, (args, kwargs), context, drawn, ensemble)
        parameters = self._parameters(data, asked, context)
        with self._within(), _threads.running(self.session, asked), parameters:
            out = one.run(lambda: self._marked(next_fun, args, kwargs, context))
        drawn |= _drawn(one)
        asked.unseen.update(one.survey.unseen)
        if found is not None:
            found.unseen.update(asked.unseen)
        with opened(()):
            where, measured = _measured(one)
            layout, arrays = joined((measured, Small(begun)))
            members = ensemble.count if ensemble and are_mapped(arrays) else 0
            what = layout, where, members, states, asked.differentiated
            host = Outputs(self.session, *what, call, devices > 1)
            return _tied(out, tell(host, gate, ticket, *arrays))

    def _marked(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        site, owner = context.site or "", self._owner
        if _takes_ids(context) or any(p.at == INPUT and site in p.sites for p in self.places):
            args, kwargs = mark_arguments(args, kwargs, context, owner=owner, site=site, part=INPUT)
        with within(context.module):
            try:
                out = next_fun(*args, **kwargs)
            except FloatingPointError as error:  # raised by the user's `jax_debug_nans`
                note_site(error, site)
                raise
            return mark_tree(out, owner=owner, site=site, part=OUTPUT)

    def _note_apart(self, site: str) -> None:
        """Note a call that is neither measured nor perturbed: nor may its second run be, in which a
        function with a derivative of its own computes it again for the gradient.
        """
        why = f"it is called inside a {kept_apart()} equation, which cannot be entered"
        one = _threads.asked.get(self.session) or listeners.get(self.session)
        if one is not None:
            one.unseen[site] = why

    def _within(self) -> Any:
        hook = dataclasses.replace(self, inside=True)
        layers = open_layers()
        inner = (dataclasses.replace(x, wrap=hook) if x.wrap == self else x for x in layers)
        return opened(tuple(inner))

    def _asks(
        self, asked: Asked, after: Sequence[Any], device: Any
    ) -> tuple[Any, Any, Any, list[Any]]:
        avals = [
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.bool_),
            jax.ShapeDtypeStruct((len(self.keys), ROW), jnp.float32),
        ]
        for place in self.places:
            avals += [jax.ShapeDtypeStruct((), jnp.bool_), *place.avals]
        once = not (jit.is_tracing() and jit.inside_while_loop())
        ticket, gate, rows, *data = ask(asked, avals, after, once=once, device=device)
        return ticket, gate, rows, data

    def _sampled(
        self, gate: Any, args: Any, kwargs: Any, context: Context
    ) -> tuple[tuple[str, ...], Any]:
        """The paths of the states of a pass, and their samples."""
        if context.kind != "method" or context.path is None:
            return (), jnp.zeros((0, 0))
        return beginning(gate, args, kwargs, context)

    def _pass(
        self,
        asked: Asked,
        ticket: Any,
        gate: Any,
        rows: Any,
        data: Sequence[Any],
        arguments: Any,
        context: Context,
        drawn: dict[int, Where],
        ensemble: Ensemble | None,
    ) -> EagerPass:
        """The pass that is to run; `drawn` gets the sites of its sinks."""
        open_gate = not jit.is_tracer(gate)
        wanted = not open_gate or bool(gate)
        calls: dict[int, int] = {}
        acts = _acts(rows, data)
        plan = Plan(
            summarise=wanted,
            perturb=self._perturb(rows, data, asked, calls, ensemble) if acts else None,
            keep=Keep(gauge, parts=(OUTPUT,)) if wanted else Keep(),
            unmeasured=self.unmeasured,
            tap=_tap,
            gate=None if open_gate else gate,
            apart=ensemble is not None,
        )
        one = EagerPass(self._owner, plan, calls=calls, sinks_of=self._sinks_of)
        paths, values = [], []
        if self.gradients and wanted:
            paths, values = _differentiable(context, arguments)
        if values:
            send = functools.partial(self._send, asked, drawn, ensemble.count if ensemble else 0)
            apart = ensemble is not None
            how = {"send": send, "moved": functools.partial(_note_moved, asked, paths)}
            one.seed = supply_of(values, ticket, gate, received=one.received, apart=apart, **how)
        return one

    def _sinks_of(self, found: Survey) -> list[Any]:
        sinks = sinks_for(found)
        for mark, _, here in found.walk(sinks):
            if here and mark.site in self.unmeasured:
                here[:] = [None] * len(here)
        return sinks

    def _send(
        self, asked: Asked, drawn: dict[int, Where], members: int, received: dict[int, Any]
    ) -> tuple[Callable[..., None], list[Any]]:
        """The message of the cotangents that a pass received."""
        asked.sends.add(GRADIENT)  # a traced program runs after this
        numbers = sorted(received)
        layout, arrays = joined([Sunk(received[i]) for i in numbers])
        where = tuple(drawn[i] for i in numbers)
        return Cotangents(self.session, layout, where, members), arrays

    # ------------------------------------------------------------- perturbations

    def _with_data(self, data: Sequence[Any]) -> Iterator[tuple[Place, Any, Sequence[Any]]]:
        """Each place, whether it is on, and its numbers."""
        for place in self.places:
            on, *numbers = data[: 1 + len(place.avals)]
            yield place, on, numbers
            data = data[1 + len(place.avals) :]

    @contextlib.contextmanager
    def _parameters(self, data: Sequence[Any], asked: Asked, context: Context) -> Iterator[None]:
        """Perturb the parameters of the module that is called, while it runs."""
        mine = [one for one in self._with_data(data) if one[0].at == PARAMETER]
        if not mine or not isinstance(context.module, nnx.Module) or context.path is None:
            yield
            return
        places = [place for place, *_ in mine]
        rules = parameter_rules(places, [(on, *numbers) for _, on, numbers in mine])
        with parameters_within(context.module, parse_key(context.path)[0], rules) as reached:
            asked.reached.update(
                (key, p, why, None) for p in places for key, why in reached if key in p.sites
            )
            yield

    def _perturb(
        self,
        rows: Any,
        data: Sequence[Any],
        asked: Asked,
        calls: dict[int, int],
        ensemble: Ensemble | None,
    ) -> Any:
        places = list(self._with_data(data))

        def perturb(mark: Marked, values: list[Any], around: Rows) -> list[Any]:
            site = mark.site
            if ensemble is not None and not around:
                around = ((ensemble.number, ensemble.count),)
            if mark.part == OUTPUT and site in self.keys:
                asked.reached.add((site, None, "", None))
                index = self.keys.index(site)
                values = [apply(x, rows, index) for x in values]
            for place, on, numbers in places:
                if place.at != mark.part or site not in place.sites:
                    continue
                if len(place.rows) > len(around):
                    asked.unseen[site] = OUTSIDE
                    continue
                one = jax.tree.unflatten(place.treedef, numbers)
                here, name = _in_layer(on, place.rows, around), f"{site}/{calls[id(mark)]}"
                for n, mapped in enumerate(mark.mapped):
                    seen = as_seen(values[n], mapped)
                    why = misfit(refusal(one, site, seen))
                    asked.reached.add((site, place, why, seen))
                    if not why:
                        how = {"mapped": mapped, "name": f"{name}/{n}"}
                        change = functools.partial(_acted, **how)
                        values[n] = switched(here, change, values[n], one)
            return values

        return perturb


def _acted(x: Any, one: Any, *, mapped: tuple[int, ...], name: str) -> Any:
    return applied_at(one.apply_at, x, mapped, name)


_calls: weakref.WeakKeyDictionary[Any, dict[int, Calls]] = weakref.WeakKeyDictionary()
"""The calls of each program that is being traced, by the numbers of the sessions."""


def _calls_here(session: int) -> Calls:
    trace = jit.outermost_trace()
    if trace is None:  # each call is a program of its own
        return Calls()
    return _calls.setdefault(trace, {}).setdefault(session, Calls())


def _tap(x: jax.Array, sink: jax.Array, **how: Any) -> jax.Array:
    """`x`; the user's program computes no cotangent for us."""
    return observe_cotangent(x, sink, always=False, **how)


def _acts(rows: Any, data: Sequence[Any]) -> bool:
    if jit.is_tracer(rows):
        return True
    return bool(np.any(np.asarray(rows))) or any(
        np.ndim(x) == 0 and np.asarray(x).dtype == np.bool_ and bool(x) for x in data
    )


@ours()
def _in_layer(on: Any, wanted: tuple[int, ...], around: Rows) -> Any:
    """Whether a place acts in this iteration of the scans around it."""
    for index, (row, length) in zip(wanted, around, strict=False):
        on = on & (row == index % length)
    return on


def _takes_ids(context: Context) -> bool:
    """Whether a call looks up ids in a table: one out of range gives NaN, and the id tells why."""
    return isinstance(context.module, nnx.Embed) and parse_key(context.site or "")[1] == CALL


def _measured(one: EagerPass) -> tuple[tuple[Where, ...], list[Any]]:
    """The sites that a pass has measured, and of each the summary and the gauge.

    Of what a call receives only whole numbers are sent: the ids of an embedding.
    """
    where: list[Where] = []
    measured: list[Any] = []
    with ours():
        for mark, around, here in one.survey.walk(one.seen):
            found: Sequence[Summary] = here.summaries if here else ()
            if mark.part == INPUT:
                found = [s for s in found if jnp.issubdtype(s.points.dtype, jnp.integer)]
            for i, summary in enumerate(found if mark.part in (OUTPUT, INPUT) else ()):
                vector = here.kept[i].value if here.kept else None
                if vector is None:  # of a while loop, or of ids
                    vector = jnp.zeros((*summary.bins.shape[:-1], LENGTH), jnp.float32)
                apart = are_mapped([summary.bins])
                part = mark.structure.parts[i] if mark.part == OUTPUT else ""
                key = leaf_key(mark.site, part)
                where.append(Where(key, len(mark.rows(around)), apart, mark.part))
                measured.append((counted_once_here(summary), Small(vector)))
    return tuple(where), measured


def _drawn(one: EagerPass) -> dict[int, Where]:
    """The site of each sink that a pass has drawn."""
    return {
        number: Where(leaf_key(mark.site, part), len(mark.rows(around)), True)
        for mark, around, here in one.survey.walk(one.sinks)
        for number, part in zip(here or (), mark.structure.parts, strict=False)
        if number is not None
    }


def _differentiable(context: Context, arguments: Any) -> tuple[list[str], list[Any]]:
    """What a call may be differentiated with respect to: tracers in its module and arguments.

    Returns:
        The paths of those that are parameters, "" for others, and the tracers.
    """
    module, found = context.module, list[tuple[str, Any]]()
    for path, variable, value in contents(module) if isinstance(module, nnx.Module) else ():
        reverse = isinstance(variable, nnx.Param) and not jit.in_forward_mode(value)
        named = reverse and context.path is not None
        found.append((path_within(context, path) if named else "", value))
    found += [("", x) for x in jax.tree.leaves(arguments)]
    found = [
        (path, x)
        for path, x in found
        if jit.is_tracer(x) and is_observable(x) and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return [path for path, _ in found], [x for _, x in found]


def _note_moved(asked: Asked, paths: Sequence[str], moved: Sequence[bool]) -> None:
    found = (path for path, is_moved in zip(paths, moved, strict=False) if is_moved and path)
    asked.differentiated.update(found)


def _tied(out: Any, zero: jax.Array) -> Any:
    """What a call returns, made dependent on a message."""
    leaves = list(jax.tree.leaves(out, is_leaf=is_whole))
    for index, leaf in enumerate(leaves):
        if is_observable(leaf) and isinstance(leaf, jax.Array):
            leaves[index] = tied(leaf, zero)
            break
    return rebuilt(out, leaves, is_whole)
