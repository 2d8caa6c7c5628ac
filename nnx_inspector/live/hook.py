"""The hook of a watched model: what its programs do at each call, and what they send to the host.

While it is open, every selected site is perturbed as the setting says, and its output is reduced to
a summary where it is computed. One message sends all summaries of a trace level to the host; the
cotangents follow in another. Each pass asks once, at its outermost call, for its number, whether it
is sampled, and its setting. Invariant: a callback never raises (its errors are counted), and equal
hooks share programs. A hook holds names and numbers alone: its session may be gone.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import ours
from nnx_inspector.hooks.layers import (
    Context,
    open_layers,
    opened,
)
from nnx_inspector.hooks.pytrees import rebuilt, with_arguments
from nnx_inspector.hooks.sites import site_key
from nnx_inspector.hooks.variables import contents
from nnx_inspector.live.cotangents import Collectors, beginning, beginning_if, measured_if
from nnx_inspector.live.inbox import Inbox
from nnx_inspector.perturbations.region import ROW, apply, rows_of
from nnx_inspector.perturbations.slots import CLEAN, Place, Setting, applied
from nnx_inspector.program.error_notes import note_site
from nnx_inspector.program.function import WatchedCall, call_in_shapes
from nnx_inspector.program.host import ask, tell, tied
from nnx_inspector.program.marks import INPUT, OUTPUT, is_observable, is_whole
from nnx_inspector.stats.gauges import VARIED
from nnx_inspector.stats.measure_gauges import is_sampled
from nnx_inspector.stats.packing import unpack
from nnx_inspector.stats.summary import Summary

GRADIENT = "gradient"

Reached = set[tuple[str, Place | None]]
"""The sites that a program calls, each with the place that acts there, None for a row."""

IN_A_WHILE_LOOP = (
    "it is called inside a while loop, from which a watched program cannot send without "
    "disturbing its differentiation; insp.run and nni.capture can see it"
)


# ------------------------------------------------------------- the host's side


class Listener(Protocol):
    """What a session is to the programs that are compiled with its hook."""

    inbox: Inbox
    setting: Setting
    errors: list[str]
    interrupted: bool
    ran: dict[int, Reached]
    unseen: dict[str, str]

    def receive(
        self, number: int, key: str, quantity: str, summary: Summary, turn: int = 0
    ) -> None: ...


listeners: weakref.WeakValueDictionary[int, Listener] = weakref.WeakValueDictionary()
"""The open sessions by their number."""


def _safely(number: int, what: Callable[[Listener], Any], otherwise: Callable[[], Any]) -> Any:
    """Call `what` with a session; no error may reach the user's training step."""
    found = listeners.get(number)
    if found is None:
        return otherwise()
    try:
        return what(found)
    except BaseException as error:  # noqa: BLE001 - counted and shown instead
        found.errors.append(f"{type(error).__name__}: {error}")
        found.interrupted |= isinstance(error, KeyboardInterrupt)
        return otherwise()


class _Asked:
    """Answers a program that asks, at one of its trace levels, for the numbers of a pass."""

    def __init__(self, watch: Watch, *, begins: bool):
        self._watch, self._begins = watch, begins
        self.reached: Reached = set()  # both are filled while the level is traced
        self.unseen: dict[str, str] = {}

    def __call__(self) -> tuple[Any, ...]:
        return _safely(
            self._watch.session, self._answer, lambda: self._numbers(-1, 0, False, CLEAN)
        )

    def _answer(self, session: Listener) -> tuple[Any, ...]:
        if self._begins:
            now, turn = session.inbox.begin(session.setting), 0
        else:
            now, turn = session.inbox.turn(id(self))
        if now.setting.active:
            session.ran[id(self.reached)] = self.reached
        session.unseen.update(self.unseen)  # the session may be later than the trace
        return self._numbers(now.number, turn, now.sampled, now.setting)

    def _numbers(self, number: int, turn: int, sampled: bool, setting: Setting) -> tuple[Any, ...]:
        keys, places = self._watch.keys, self._watch.places
        rows = rows_of(keys, setting.rows)
        found = [x for data in setting.at(places) for x in data]
        ticket = np.array([number % 2**31, turn % 2**31], np.int32)
        return ticket, np.array(sampled, np.bool_), rows, *found


class _Told:
    """Receives summaries of one quantity for the sites in `names`."""

    def __init__(self, session: int, names: list[str], quantity: str, begun: _Begun | None = None):
        self._session, self.names, self._quantity = session, names, quantity
        self._begun = begun

    def __call__(self, ticket: Any, *arrays: Any, used: tuple[int, ...] | None = None) -> None:
        def receive(session: Listener) -> None:
            number, turn = np.ravel(ticket)[:2].tolist()
            if self._quantity == GRADIENT:
                names = self.names if used is None else [self.names[i] for i in used]
                for name, vector in zip(names, arrays, strict=True):
                    session.receive(number, name, GRADIENT, unpack(np.asarray(vector)), turn)
                return
            found = [np.asarray(a) for a in arrays]
            if self._begun is not None:
                states = found.pop()
                rows = {name: states[..., i, :] for i, name in enumerate(self._begun.states)}
                session.inbox.receive_states(number, rows, self._begun.call)
            fields = zip(self.names, *(found[i::4] for i in range(4)), strict=True)
            for name, bins, points, sums, gauge in fields:
                summary = Summary(bins=bins, points=points, sums=sums)
                session.receive(number, name, OUTPUT, summary, turn)
                session.inbox.receive_gauge(number, name, gauge, turn)

        _safely(self._session, receive, lambda: None)


@dataclasses.dataclass(frozen=True)
class _Begun:
    """The extra data in an outermost call's message: the paths of its states, and the call."""

    states: tuple[str, ...]
    call: WatchedCall | None


# ------------------------------------------------------------------- the hook


class _Frame:
    """Gathers what the outermost call at one trace level of a session sends."""

    def __init__(
        self,
        watch: Watch,
        level: Any,
        numbers: Sequence[Any],
        asked: _Asked,
        *,
        begins: bool,
        seen: bool,
    ):
        self.begins, self.reached, self.unseen = begins, asked.reached, asked.unseen
        ticket, gate, rows, *data = numbers
        self.level, self.ticket, self.gate, self.rows, self.seen = level, ticket, gate, rows, seen
        self.data: list[list[Any]] = []
        for place in watch.places:
            self.data.append(data[: 1 + len(place.avals)])
            data = data[1 + len(place.avals) :]
        self.names: list[str] = []
        self.arrays: list[Any] = []
        self.begun: _Begun | None = None
        self.states: list[Any] = []
        told = lambda names: _Told(watch.session, names, GRADIENT)  # noqa: E731
        self.collectors = Collectors(gate, ticket, told)


class _Threads(threading.local):
    def __init__(self) -> None:
        self.frames: dict[int, list[_Frame]] = {}


_threads = _Threads()


def forget(session: int) -> None:
    """Let go of what the passes of this thread gathered for a session."""
    _threads.frames.pop(session, None)


def _frames_of(session: int) -> list[_Frame]:
    return _threads.frames.setdefault(session, [])


@dataclasses.dataclass(frozen=True)
class Watch:
    """The hook of a session. It has only names, numbers and places: equal hooks share programs.

    `inside` marks the hook for calls within a pass: a block that is jitted by itself has one
    program there and another one where it is called directly, as a pass of its own.
    """

    session: int
    keys: tuple[str, ...]
    unmeasured: tuple[str, ...]
    gradients: bool
    places: tuple[Place, ...]
    turns: tuple[tuple[str, tuple[int, ...]], ...]
    inside: bool = False

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        key = context.site
        assert key is not None
        frames, level = _frames_of(self.session), jit.trace_state()
        depth = len(frames)
        if not frames or frames[-1].level != level:
            frame, args, kwargs = self._begin(level, args, kwargs)
            if frame.begins and frame.seen:
                self._sample(frame, args, kwargs, context)
            frames.append(frame)
        frame = frames[-1]
        try:
            args, kwargs = self._perturbed_arguments(frame, args, kwargs, context)
            try:
                with self._within():
                    out = next_fun(*args, **kwargs)
            except FloatingPointError as error:  # of the user's `jax_debug_nans`
                note_site(error, key)
                raise
            out = self._observed(frame, out, context)
            return self._tell(frame, out) if len(frames) > depth else out
        finally:
            del frames[depth:]

    def _within(self) -> AbstractContextManager[None]:
        if self.inside:
            return nullcontext()
        hook = dataclasses.replace(self, inside=True)
        layers = open_layers()
        inner = (dataclasses.replace(x, wrap=hook) if x.wrap == self else x for x in layers)
        return opened(tuple(inner))

    def _begin(self, level: Any, args: Any, kwargs: Any) -> tuple[_Frame, Any, Any]:
        loops = jit.is_tracing() and jit.inside_while_loop()
        begins = not self.inside
        avals = [
            jax.ShapeDtypeStruct((2,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.bool_),
            jax.ShapeDtypeStruct((len(self.keys), ROW), jnp.float32),
        ]
        for place in self.places:
            avals += [jax.ShapeDtypeStruct((), jnp.bool_), *place.avals]
        asked = _Asked(self, begins=begins)
        numbers = ask(asked, avals, (args, kwargs), once=not loops)
        if begins and not loops:
            args, kwargs = _after(numbers[0], args, kwargs)
        frame = _Frame(self, level, numbers, asked, begins=begins, seen=not loops)
        return frame, args, kwargs

    @ours()
    def _sample(self, frame: _Frame, args: Any, kwargs: Any, context: Context) -> None:
        """Sample the parameters and arguments of a pass as it begins, if it is measured."""
        idle = not jit.is_tracer(frame.gate) and not bool(frame.gate)
        if idle or context.kind != "method" or context.path is None:
            return
        held: dict[str, jax.Array] = {}
        for path, variable, value in contents(context.module):
            is_kept = isinstance(variable, (nnx.Param, nnx.BatchStat))
            if is_kept and isinstance(value, jax.Array) and is_sampled(value):
                inner = site_key(path)
                held[f"{context.path}/{inner}" if context.path else inner] = value

        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_whole)
        arrays = [jnp.asarray(x) for x in leaves if is_observable(x)]
        operands = jax.lax.stop_gradient((list(held.values()), arrays))
        if any(map(jit.is_tracer, (frame.gate, *jax.tree.leaves(operands)))):
            states = beginning_if(frame.gate, *operands)
        else:  # nothing is traced, and a cond would be compiled anew for each call
            states = beginning(*operands)
        frame.begun = _Begun((*held, VARIED), call_in_shapes(context, args, kwargs))
        frame.states = [states]

    def _perturbed_arguments(
        self, frame: _Frame, args: Any, kwargs: Any, context: Context
    ) -> tuple[Any, Any]:
        if not any(p.at == INPUT and context.site in p.sites for p in self.places):
            return args, kwargs
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_whole)
        new = self._at_places(frame, leaves, INPUT, context)
        return with_arguments(args, kwargs, new, is_whole)

    def _observed(self, frame: _Frame, out: Any, context: Context) -> Any:
        key = context.site
        leaves = list(jax.tree.leaves(out, is_leaf=is_whole))
        if key in self.keys:
            index = self.keys.index(key)
            leaves = [apply(x, frame.rows, index) for x in leaves]
            frame.reached.add((key, None))
        leaves = self._at_places(frame, leaves, OUTPUT, context)
        assert key is not None
        if frame.seen:
            leaves = [self._leaf(frame, key, leaf) for leaf in leaves]
        else:
            self._unseen(frame, key, IN_A_WHILE_LOOP)
        return rebuilt(out, leaves, is_whole)

    def _at_places(
        self, frame: _Frame, leaves: Sequence[Any], part: str, context: Context
    ) -> list[Any]:
        leaves = list(leaves)
        for place, (on, *numbers) in zip(self.places, frame.data, strict=True):
            if place.at != part or context.site not in place.sites:
                continue
            on, count = self._in_this_turn(place, on, frame, context.site), 0
            if not self._in_no_turn(place, frame, context.site):
                frame.reached.add((context.site, place))
            for index, leaf in enumerate(leaves):
                if is_observable(leaf):
                    name = f"{context.site}/{context.call}/{count}"
                    leaves[index] = applied(place, on, numbers, jnp.asarray(leaf), name)
                    count += 1
        return leaves

    @ours()
    def _in_this_turn(self, place: Place, on: Any, frame: _Frame, site: str | None) -> Any:
        """Whether a place acts in this turn of the scans around its site."""
        lengths = dict(self.turns).get(site or "")
        if not place.rows or not lengths:
            return on
        if self._in_no_turn(place, frame, site):
            self._unseen(
                frame,
                site or "",
                "its layer cannot be identified here, outside a call of the model, so a "
                "perturbation of a single layer does not act",
            )
            return jnp.zeros((), jnp.bool_)
        turn = frame.ticket[1]
        wanted = (*place.rows, *(None for _ in lengths[len(place.rows) :]))
        for length, row in zip(reversed(lengths), reversed(wanted), strict=True):
            size = abs(length)
            if row is not None:
                at = row % size
                on = on & (turn % size == (at if length > 0 else size - 1 - at))
            turn = turn // size
        return on

    def _in_no_turn(self, place: Place, frame: _Frame, site: str | None) -> bool:
        # a scan, if there is one, is around the pass, and nothing counts its turns
        return frame.begins and bool(place.rows and dict(self.turns).get(site or ""))

    def _unseen(self, frame: _Frame, site: str, why: str) -> None:
        frame.unseen[site] = why
        found = listeners.get(self.session)
        if found is not None:
            found.unseen[site] = why

    def _leaf(self, frame: _Frame, key: str, leaf: Any) -> Any:
        idle = not jit.is_tracer(frame.gate) and not bool(frame.gate)
        if idle or not is_observable(leaf) or key in self.unmeasured:
            return leaf
        with ours():
            summary, gauge = measured_if(frame.gate, jax.lax.stop_gradient(jnp.asarray(leaf)))
        frame.names.append(key)
        frame.arrays += [summary.bins, summary.points, summary.sums, gauge]
        if (
            self.gradients
            and isinstance(leaf, jax.Array)
            and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ):
            return frame.collectors.tap(leaf, key)
        return leaf

    def _tell(self, frame: _Frame, out: Any) -> Any:
        if not frame.names and frame.begun is None:
            return out
        host = _Told(self.session, frame.names, OUTPUT, frame.begun)
        zero = tell(host, frame.gate, frame.ticket, *frame.arrays, *frame.states)
        leaves = list(jax.tree.leaves(out, is_leaf=is_whole))
        for index, leaf in enumerate(leaves):
            if is_observable(leaf) and isinstance(leaf, jax.Array):
                leaves[index] = tied(leaf, zero)
                break
        return rebuilt(out, leaves, is_whole)


def _after(ticket: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments, made to depend on the ticket, so that a pass begins with it."""
    leaves = list(jax.tree.leaves((args, kwargs), is_leaf=is_whole))
    arrays = [i for i, x in enumerate(leaves) if is_observable(x) and jit.is_tracer(x)]
    if arrays and jit.is_tracer(ticket):
        _, *new = jax.lax.optimization_barrier((ticket, *(leaves[i] for i in arrays)))
        for i, x in zip(arrays, new, strict=True):
            leaves[i] = x
    return with_arguments(args, kwargs, leaves, is_whole)
