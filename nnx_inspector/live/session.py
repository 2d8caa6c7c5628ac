"""Watching the user's own step: summaries leave a program that we do not own by host callbacks.

A session has one hook for each set of places. While it is open, every selected site is perturbed
as the setting says, and its output is reduced to a summary where it is computed. One message sends
all summaries of a trace level to the host; the cotangents follow in another. Each pass asks once,
at its outermost call, for its number, whether it is sampled, and its setting. Invariant: a callback
never raises (its errors are counted), and equal hooks share programs.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import ours
from nnx_inspector.background import Worker, weakly
from nnx_inspector.hooks.dispatch import executables_called, hooked
from nnx_inspector.hooks.layers import (
    TAP_OUTPUT,
    Context,
    Layer,
    open_layers,
    opened,
)
from nnx_inspector.hooks.pytrees import rebuilt, with_arguments
from nnx_inspector.hooks.scope import Scope, scope_of
from nnx_inspector.hooks.sites import Only, Selection, methods, module_sites, site_key
from nnx_inspector.hooks.variables import contents
from nnx_inspector.live.cotangents import Collectors, beginning, beginning_if, measured_if
from nnx_inspector.live.figures import Observer, told_gauges
from nnx_inspector.live.inbox import Inbox, Taken, merged
from nnx_inspector.live.recompile import JitCalls
from nnx_inspector.perturbations.region import ROW, apply, rows_of
from nnx_inspector.perturbations.slots import CLEAN, Place, Setting, applied, has_room
from nnx_inspector.program.error_notes import note_site
from nnx_inspector.program.host import ask, tell, tied
from nnx_inspector.program.marks import INPUT, OUTPUT, is_observable, is_whole
from nnx_inspector.program.watched_call import WatchedCall, call_in_shapes
from nnx_inspector.recordings.facts import Figures
from nnx_inspector.recordings.layers import Stack, told_apart
from nnx_inspector.stats.gauges import VARIED
from nnx_inspector.stats.measure_gauges import is_sampled
from nnx_inspector.stats.packing import unpack
from nnx_inspector.stats.summary import Summary

_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)

GRADIENT = "gradient"

Reached = set[tuple[str, Place | None]]
"""The sites that a program calls, each with the place that acts there, None for a row."""

IN_A_WHILE_LOOP = (
    "it is called inside a while loop, where a watched program cannot send from without "
    "disturbing its differentiation; insp.run and nni.capture can see it"
)


class Session:
    """The watched passes of one model.

    Args:
        model: the watched model; `refresh` reads its structure again.
        only: the selected sites.
        gradients: whether cotangents are measured.
        besides: sites that only a call reveals (a sown value, a Linen submodule) and that may be
            perturbed; other such sites are measured too.
        measured: the selected sites that are measured; the others can only be perturbed.
        number: the number of a finished session of this model, of which no program is running. Its
            programs are used again if the hooks are equal.

    Attributes:
        turns: site within scans -> the number of turns of each scan, outermost first, negative for
            a reverse scan; they distinguish the layers of a stack.
        blurred: the stacks whose layers could not be told apart.
        stacks: sites whose layers are also measured separately, if they can be.
        places: the places that programs have room for, from the next `open` on.
    """

    def __init__(
        self,
        model: nnx.Module,
        *,
        only: Only = None,
        gradients: bool = True,
        besides: Sequence[str] = (),
        measured: Only = None,
        number: int | None = None,
    ):
        self.number = next(_numbers) if number is None else number
        self.model = model
        self.selection = Selection(only)
        self.selection.require_match(model)
        self.gradients = gradients
        self.besides = tuple(besides)
        self.measured = None if measured is None else Selection(measured)
        if self.measured is not None:
            self.measured.require_match(model)
        self.turns: dict[str, tuple[int, ...]] = {}
        self.stacks: Mapping[str, Stack] = {}
        self.keys: list[str] = []
        self._unmeasured: tuple[str, ...] = ()
        self.errors: list[str] = []
        self.interrupted = False
        self.unattributed: dict[str, int] = {}
        self.doubtful: dict[str, int] = {}
        self.executables = 0
        self._ran: dict[int, Reached] = {}
        self.unseen: dict[str, str] = {}
        self.told: set[str] = set()  # of these, those that a warning has named
        self.blurred: set[str] = set()
        self.setting = CLEAN
        self.places: tuple[Place, ...] = ()
        self.inbox = Inbox(CLEAN)
        self.on_armed: Callable[[], None] = lambda: None
        self._wanted: tuple[Place, ...] = ()
        self._observer = Observer()
        self._calls = JitCalls(weakly(self._is_mine))
        self._arming = Worker("nnx_inspector.arming", weakly(self._not_armed), weakly(self._armed))
        _sessions[self.number] = self
        self.refresh()

    def refresh(self) -> None:
        """Read the model's modules again: one may have been added or removed."""
        self._scope = scope_of(self.model)
        # sorted: an NNX transform reorders the attributes of the objects that it updates
        self.keys = sorted({*self.besides, *self._selected(self.selection)})
        only = self.measured
        if only is not None:
            wanted = self._selected(only)
            self._unmeasured = tuple(
                key for key in self.keys if key not in wanted and not only.matches_key(key)
            )

    def _selected(self, only: Selection) -> set[str]:
        return {
            site_key(site.path, name)
            for site in module_sites(self.model)
            for name in methods(type(site.module))
            if only.matches(site.path, name, site.module)
        }

    def perturb(self, setting: Setting | Mapping[str, tuple[float, float]]) -> None:
        """Set the perturbations of the next pass and later ones: a setting, or its rows alone."""
        self.setting = setting if isinstance(setting, Setting) else Setting(rows=dict(setting))

    def hook(self, places: tuple[Place, ...]) -> Layer:
        """The watching layer, with room for these places."""
        rows = sorted({site for place in places if place.rows for site in place.sites})
        turns = tuple((site, self.turns[site]) for site in rows if site in self.turns)
        keys = tuple(self.keys)
        watch = _Watch(self.number, keys, self._unmeasured, self.gradients, places, turns)
        return Layer(watch, TAP_OUTPUT, self.selection, self._scope, watches=True)

    @property
    def lacks_room(self) -> bool:
        """Whether the setting needs a place that the programs have no room for yet."""
        return not has_room(self.places, self.setting.places)

    @property
    def compiling(self) -> bool:
        """Whether programs with room for the setting are being compiled."""
        return self.lacks_room and self._arming.busy

    def make_room(self) -> None:
        """Make room for the setting; the next step compiles the programs that are missing."""
        if self.lacks_room:
            self.places = self.setting.places

    def arm(self) -> bool:
        """Make room for the setting: at once if no program is compiled yet, else in a thread.

        Returns:
            Whether something is being compiled. The old programs run until that is done, and the
            first `open` afterwards has room.
        """
        places = self.setting.places
        if not self.lacks_room:
            return False
        if places == self._wanted and self._arming.busy:
            return True
        self._wanted, hook = places, self.hook(places)

        def instead(layer: Layer) -> Layer:
            if not self._is_mine(layer):
                return layer
            inside = cast(_Watch, layer.wrap).inside
            wrap = dataclasses.replace(cast(_Watch, hook.wrap), inside=inside)
            return dataclasses.replace(hook, wrap=wrap)

        calls = self._calls.all()
        if not calls:
            self.places = places
            return False

        def compile_all() -> None:
            for call in calls:
                if not self._arming.closed:
                    call.compile(instead)
            self.places = places

        self._arming.do_instead(compile_all)
        return True

    def _armed(self) -> None:
        self.on_armed()

    def _not_armed(self, error: Exception) -> None:
        # the user's own call will compile it in its own thread, or raise a better error
        self.places = self._wanted
        self.errors.append(f"compiling ahead: {type(error).__name__}: {error}")
        self.on_armed()

    def _is_mine(self, layer: Layer) -> bool:
        return isinstance(layer.wrap, _Watch) and layer.wrap.session == self.number

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch every pass that this thread makes inside, with room for the armed places."""
        scope = self._scope
        executables_called()
        try:
            with hooked(self.hook(self.places)), self._calls.listening():
                yield
        finally:
            _threads.frames.pop(self.number, None)
            self._note(scope)
            self.executables += executables_called()

    def _note(self, scope: Scope) -> None:
        for name, count in scope.unattributed.items():
            self.unattributed[name] = self.unattributed.get(name, 0) + count
        for name, count in scope.doubtful.items():
            self.doubtful[name] = self.doubtful.get(name, 0) + count
        scope.unattributed.clear()
        scope.doubtful.clear()

    def reached(self) -> Reached:
        """The sites and places that perturbed passes have reached since the last call.

        Waits until started programs have finished.
        """
        jax.effects_barrier()
        ran, self._ran = self._ran, {}
        return {one for sites in ran.values() for one in sites}

    def take(self) -> dict[str, dict[str, Summary]]:
        """The passes since the last `take`: site -> quantity -> summary over all calls.

        Waits until started programs have finished.
        """
        return self.measured_in(self.take_passes())

    def measured_in(self, passes: list[Taken]) -> dict[str, dict[str, Summary]]:
        """Site -> quantity -> summary of some passes, including single layers of stacks."""
        found, unknown = self.summaries_in(passes)
        self.blurred |= unknown
        return found

    def summaries_in(self, passes: list[Taken]) -> tuple[dict[str, dict[str, Summary]], set[str]]:
        """`measured_in` and the stacks whose layers cannot be told apart. Changes nothing."""
        layers, unknown = told_apart([one.told() for one in passes], self.stacks)
        return {**merged(passes, tuple(self.keys)), **layers}, unknown

    def figures_in(self, passes: list[Taken]) -> Figures:
        """The figures of some passes that the rules need."""
        gauges: dict[str, list[Any]] = {}
        states: dict[str, Any] = {}
        for one in passes:
            states = {**one.besides.states, **states}  # those of the first pass take precedence
            for site, vectors in told_gauges(one.besides.gauges, self.stacks).items():
                gauges.setdefault(site, []).extend(vectors)
        return self._observer.figures(gauges, states)

    def take_passes(self) -> list[Taken]:
        """Like `take`, but each pass separately."""
        jax.effects_barrier()
        return self.inbox.take()

    def receive(
        self, number: int, key: str, quantity: str, summary: Summary, turn: int = 0
    ) -> None:
        """Called on any thread when a summary arrives."""
        self.inbox.receive(number, key, quantity, summary, turn)

    def close(self) -> None:
        """Close the session; what programs compiled with its hook still send is ignored."""
        self._arming.close()
        _sessions.pop(self.number, None)


# ------------------------------------------------------------- the host's side


def _safely(number: int, what: Callable[[Session], Any], otherwise: Callable[[], Any]) -> Any:
    """Call `what` with a session; no error may reach the user's training step."""
    found = _sessions.get(number)
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

    def __init__(self, watch: _Watch, *, begins: bool):
        self._watch, self._begins = watch, begins
        self.reached: Reached = set()  # filled while the level is traced

    def __call__(self) -> tuple[Any, ...]:
        return _safely(
            self._watch.session, self._answer, lambda: self._numbers(-1, 0, False, CLEAN)
        )

    def _answer(self, session: Session) -> tuple[Any, ...]:
        if self._begins:
            now, turn = session.inbox.begin(session.setting), 0
        else:
            now, turn = session.inbox.turn(id(self))
        if now.setting.active:
            session._ran[id(self.reached)] = self.reached
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
        def receive(session: Session) -> None:
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
        watch: _Watch,
        level: Any,
        numbers: Sequence[Any],
        reached: Reached,
        *,
        begins: bool,
        seen: bool,
    ):
        self.begins, self.reached = begins, reached
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


def _frames_of(session: int) -> list[_Frame]:
    return _threads.frames.setdefault(session, [])


@dataclasses.dataclass(frozen=True)
class _Watch:
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
        frame = _Frame(self, level, numbers, asked.reached, begins=begins, seen=not loops)
        return frame, args, kwargs

    @ours()
    def _sample(self, frame: _Frame, args: Any, kwargs: Any, context: Context) -> None:
        """Sample the parameters and arguments of a pass as it begins, if it is measured."""
        idle = not jit.is_tracer(frame.gate) and not bool(frame.gate)
        if idle or context.kind != "method" or context.path is None:
            return
        held: dict[str, jax.Array] = {}
        for path, (variable, value) in contents(context.module).variables.items():
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
            with ours():
                row = frame.rows[self.keys.index(key)]
                leaves = [apply(x, row) for x in leaves]
            frame.reached.add((key, None))
        leaves = self._at_places(frame, leaves, OUTPUT, context)
        assert key is not None
        if frame.seen:
            leaves = [self._leaf(frame, key, leaf) for leaf in leaves]
        else:
            self._unseen(key, IN_A_WHILE_LOOP)
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

    def _unseen(self, site: str, why: str) -> None:
        found = _sessions.get(self.session)
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
