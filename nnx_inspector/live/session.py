"""Watching the user's own step: what its programs measure, pass by pass.

A session has one `hook` for each set of places, which names values while the step is traced. The
programs are edited where they are launched (`programs/`), and the session gathers what they return
until it is taken. Invariant: while a program with room for a new perturbation is compiled, the old
program goes on.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import cast

import jax
import numpy as np
from flax import nnx

from nnx_inspector._compat.launching.programs import ProgramListener
from nnx_inspector._compat.processes import spans_processes
from nnx_inspector.background import Worker, weak_method
from nnx_inspector.hooks.dispatch import ScopeTagging, hook_resources
from nnx_inspector.hooks.hook import TAP_OUTPUT, Hook
from nnx_inspector.hooks.scope import Scope, scope_of
from nnx_inspector.hooks.sites import CALL, Only, Selection, methods, module_sites, site_key
from nnx_inspector.live.hook import WatchHook, parameters_of
from nnx_inspector.live.inbox import CallSummaries, Inbox, Message, WatchedPass
from nnx_inspector.live.pass_start import Reached, open_sessions
from nnx_inspector.live.pass_stats import (
    PassStatsBuilder,
    Summaries,
    unit_samples_with_layers,
    updates_of,
)
from nnx_inspector.live.programs.launches import log_errors
from nnx_inspector.live.programs.ownership import Ownership
from nnx_inspector.live.programs.process_group import ProcessGroup, form_process_group
from nnx_inspector.live.programs.recompile import CallLog, CallLogging
from nnx_inspector.live.programs.value_request import ValueRequest
from nnx_inspector.live.programs.variants import VariantChooser, Variants
from nnx_inspector.perturbations.places import CLEAN, Place, Setting, has_room
from nnx_inspector.program.editing.position_masks import Where
from nnx_inspector.recordings.facts import PassStats
from nnx_inspector.recordings.passes import QUANTITIES
from nnx_inspector.recordings.tree_rows import (
    STATE,
    Stack,
    layers_of_stacks,
    leaf_of,
    merged_summary,
)
from nnx_inspector.resources import Resource, open_all
from nnx_inspector.stats.summary import Summary

_numbers = itertools.count(1)
_free: dict[int, dict[int | None, list[int]]] = {}


def _free_numbers(model: nnx.Module, replica: int | None) -> list[int]:
    """The numbers of this model's finished loops: the next loop uses their programs again."""
    if id(model) not in _free:
        _free[id(model)] = {}
        weakref.finalize(model, _free.pop, id(model), None)  # by identity: it may have no hash
    return _free[id(model)].setdefault(replica, [])


def _take_number(free: list[int], wanted: int) -> int:
    try:
        free.remove(wanted)
    except ValueError:
        try:
            return free.pop()
        except IndexError:  # not checked beforehand: another thread may take the last number
            return next(_numbers)
    return wanted


class JobExchange:
    """What the owner of a loop says to the other processes of a job, and takes from them: nothing,
    unless a subclass does.
    """

    def initial_wish(self) -> str:
        """What this process begins the loop with; the loop is measured if all begin alike."""
        return ""

    def wish(self) -> str:
        """What this process has now."""
        return ""

    def apply_wishes(self, session: Session, said: Mapping[int, str], /) -> None:
        """Take over what the processes have said, for the coming step."""


class _ScopeReport:
    """Tells a session what was called while it was open."""

    def __init__(self, session: Session, scope: Scope):
        self._session, self._scope = session, scope
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self._session.note(self._scope)
            self._is_open = False


@dataclasses.dataclass(frozen=True)
class StepEnd:
    """The end of a step whose programs may still run.

    Attributes:
        count: how many passes had begun by then.
        last: here when the step's passes have ended.
    """

    count: int
    last: Sequence[Message]

    def ended(self) -> Callable[[], None] | None:
        """What returns when the step's passes have ended, None if they have."""
        return None if all(message.is_here for message in self.last) else self.wait

    def wait(self) -> None:
        """Return when the step's passes have ended, even if in an error."""
        for message in self.last:
            message.wait()


class Session:
    """The watched passes of one model.

    Args:
        model: the watched model; `refresh` reads its structure again.
        only: the selected sites.
        gradients: whether cotangents are measured.
        measured: the selected sites that are measured; the others can only be perturbed.
        parameters: whether parameters, their gradients and updates are measured.
        replica: which of several trees of the model's structure is the model; see `Ownership`.
        where: which positions of a pass count.

    Attributes:
        extra_sites: sites that only a call reveals (a sown value, a Linen submodule) and that may
            be perturbed, from the next `refresh` on; other such sites are measured too.
        merged_stacks: the stacks whose layers cannot be told apart.
        runs_bare: whether the next step runs bare although it should be measured, because the
            program that measures it is still being compiled.
        stacks: sites whose layers are also measured separately, if they can be.
        places: the places that programs have room for, from the next `open` on.
    """

    def __init__(
        self,
        model: nnx.Module,
        *,
        only: Only = None,
        gradients: bool = True,
        measured: Only = None,
        parameters: bool = True,
        replica: int | None = None,
        where: Where | None = None,
    ):
        self.number, self._replica = 0, replica
        self._has_number, self._may_share = False, True  # its programs with other sessions
        self.model = model
        self.selection = Selection(only)
        self.selection.require_match(model)
        self.measured = None if measured is None else Selection(measured)
        _ = self.measured and self.measured.require_match(model)
        if not self.selection.matches((), CALL, model):  # but a pass is the model's call
            self.measured = self.measured or self.selection
            self.selection = Selection((*self.selection.terms, ""))
        self.gradients, self.parameters, self.where = gradients, parameters, where
        self.extra_sites: tuple[str, ...] = ()
        self.stacks: Mapping[str, Stack] = {}
        self.keys: list[str] = []
        self._unmeasured: tuple[str, ...] = ()
        self.errors: list[str] = []
        self.unattributed: dict[str, int] = {}
        self.doubtful: dict[str, int] = {}
        self.executables = 0
        self.ran: dict[int, Reached] = {}
        self.unseen: dict[str, str] = {}
        self.warned_of: set[str] = set()  # of these, those that a warning has named
        self.merged_stacks: set[str] = set()
        self.setting = CLEAN
        self.places: tuple[Place, ...] = ()
        self.inbox = Inbox()
        self.on_compiled: Callable[[], None] = lambda: None
        self._wanted: tuple[Place, ...] = ()
        self._stats_builder = PassStatsBuilder()
        self.runs_bare = False
        self._value_request: ValueRequest | None = None
        self.group: ProcessGroup | None = None  # the processes of a job that measure together
        self.steering: JobExchange | None = None  # asked before each measured pass
        self.notes: list[str] = []  # warnings of what became of it
        self._open: Callable[[], None] | None = None
        self._calls, self._bare_calls = self._no_calls(), CallLog(None)
        self._arming = Worker(
            "nnx_inspector.arming", weak_method(self._not_armed), weak_method(self._armed)
        )
        self.variants = Variants(self)
        self._scope = scope_of(model, candidates=True)
        self.ownership = Ownership(model, self._scope, replica)
        self.begin()
        self.refresh()

    def _no_calls(self) -> CallLog:
        return CallLog(weak_method(self.is_mine))

    def begin(self) -> None:
        """Take a free number for a loop, if possible the last: its programs are kept."""
        if not self._has_number:
            number = _take_number(_free_numbers(self.model, self._replica), self.number)
            if number != self.number:
                self.number, self._calls = number, self._no_calls()
        self._has_number = True
        self.ownership.begin()
        open_sessions[self.number] = self

    def agree(self, first: int, every: int, shares: JobExchange) -> int:
        """Wait for the other processes of a job that this loop trains in: all measure, or none.

        If the model's own arrays lie in this process, the first program decides whether it does.

        Returns:
            The number of the first step: of process 0, whose count all of them take.
        """
        self.group, self._open = None, None
        if jax.process_count() == 1:
            return first
        model = type(self.model).__name__
        opening = {"every": every, "gradients": self.gradients, "model": model}
        opening["control"] = self.is_steered

        def begin() -> None:
            said = shares.initial_wish()
            compared = {**opening, "sites": len(self.keys), "perturbations": said}
            self.group = found = form_process_group(compared, first=first)
            if self.is_steered:  # a pass that is due is measured, and there is no other
                found.most_missed = 1
            if not found.disagreement:
                shares.apply_wishes(self, {0: said})

        self._open = begin
        self.takes_part(nnx.state(self.model))
        return first if self.group is None else self.group.first

    def takes_part(self, arrays: object) -> bool:
        """Whether a program on these arrays may be another than the user's own."""
        if self._open is not None and spans_processes(arrays):
            begin, self._open = self._open, None
            begin()
        return not self.disagreement

    @property
    def disagreement(self) -> str:
        """Why the processes of the job do not measure; "" if they do, or if there is one alone."""
        return "" if self.group is None else self.group.disagreement

    def meet(self, shares: JobExchange) -> bool:
        """Whether a step that is due is measured: in a job, if all are about to make it."""
        if self.group is None:
            return True
        before, said = self.disagreement, self.group.meet(shares.wish())
        if self.disagreement != before:
            text = f"{self.disagreement}: no process measures it any more, and it goes on."
            self.notes.append(text)
        if said is None:
            return False
        granted = False
        with log_errors(self, "changing perturbations: "):
            shares.apply_wishes(self, said)
            granted = True
        self.group.leaves |= not granted  # no process measures the next step
        return True

    @property
    def is_steered(self) -> bool:
        """Whether somebody elsewhere may change what its passes do."""
        return self.steering is not None

    def steers(self) -> bool:
        """Like `meet`, before a pass that is due."""
        return self.steering is None or self.meet(self.steering)

    @property
    def value_request(self) -> ValueRequest | None:
        """Whose values the next pass keeps; in a job nobody's, for others would not keep them."""
        return self._value_request if self.group is None else None

    @value_request.setter
    def value_request(self, request: ValueRequest | None) -> None:
        self._value_request = request

    def finish(self) -> None:
        """End a loop. None of its programs may be running; what later programs send is ignored."""
        open_sessions.pop(self.number, None)
        if self.group is not None:
            self.group.leave()
        # other calls, of a twin say, are seen in a new trace alone: other sessions must trace again
        if self._has_number and self._may_share:
            self._has_number = False
            _free_numbers(self.model, self._replica).append(self.number)

    def refresh(self) -> None:
        """Forget the copies of the model's modules, and read which sites it has now."""
        self._scope = self.ownership.scope = scope_of(self.model, candidates=True)
        self._read_keys()

    def _read_keys(self) -> None:
        self._readings = self._scope.readings
        # sorted: an NNX transform reorders the attributes of the objects that it updates
        self.keys = sorted({*self.extra_sites, *self._selected(self.selection)})
        only = self.measured
        if only is not None:
            wanted = self._selected(only)
            others = (key for key in self.keys if key not in wanted)
            self._unmeasured = tuple(key for key in others if not only.matches_key(key))

    def _selected(self, only: Selection) -> set[str]:
        return {
            site_key(site.path, name)
            for site in module_sites(self.model)
            for name in methods(type(site.module))
            if only.matches(site.path, name, site.module)
        }

    def perturb(self, setting: Setting | Mapping[str, tuple[float, float]]) -> None:
        """Set the perturbations of the next pass and later ones: a setting, or its rows alone."""
        self.variants.leave_fast_path()
        self.setting = setting if isinstance(setting, Setting) else Setting(rows=dict(setting))

    def hook(self, places: tuple[Place, ...]) -> Hook:
        """The watching hook, with room for these places."""
        self._scope.renew()
        if self._scope.readings != self._readings:
            self._read_keys()
        keys = tuple(self.keys)
        some = self.measured is not None or self.selection.terms != (None,)
        those = self.parameters and (parameters_of(keys, self._unmeasured) if some else True)
        of = self.number, keys, self._unmeasured, self.gradients, places, those
        watch = WatchHook(*of, where=self.where)
        return Hook(watch, TAP_OUTPUT, self.selection, self._scope, watches=True)

    @property
    def needs_places(self) -> bool:
        """Whether the setting needs a place that the programs have no room for yet."""
        return not has_room(self.places, self.setting.places)

    @property
    def compiling(self) -> bool:
        """Whether programs with room for the setting are being compiled."""
        return self.needs_places and self._arming.busy

    def take_places(self) -> None:
        """Make room for the setting; the next step compiles the programs that are missing."""
        if self.needs_places:
            self.places = self.setting.places

    def arm(self) -> bool:
        """Make room for the setting: at once if no program is compiled yet, or in a job of several
        processes, else in a thread.

        Returns:
            Whether something is being compiled. The old programs run until that is done, and the
            first `open` afterwards has room.
        """
        places = self.setting.places
        if not self.needs_places:
            return False
        if places == self._wanted and self._arming.busy:
            return True
        self._wanted, hook = places, self.hook(places)

        def instead(old: Hook) -> Hook:
            if not self.is_mine(old):
                return old
            inside = cast(WatchHook, old.wrap).inside
            wrap = dataclasses.replace(cast(WatchHook, hook.wrap), inside=inside)
            return dataclasses.replace(hook, wrap=wrap)

        calls = self._calls.logged()
        if not calls or self.group is not None:  # all change their programs at the same step
            self.places = places
            return False

        def compile_all() -> None:
            for call in calls:
                if not self._arming.closed:
                    call.compile(instead, change=self.variants.ahead)
            self.places = places

        self._arming.submit_instead(compile_all)
        return True

    def log_bare_calls(self) -> tuple[Resource, ...]:
        """While these are open, nothing is measured, and what this thread jits is noted for
        `compile_ahead`.
        """
        return (
            () if self.disagreement else (ScopeTagging(self._scope), CallLogging(self._bare_calls))
        )

    def compile_ahead(self) -> bool:
        """Compile in a thread what a measured step calls; returns whether there is any."""
        calls, hook = self._bare_calls.logged(), self.hook(self.places)

        def compile_all() -> None:
            for call in calls:
                if not self._arming.closed:
                    call.compile(inside=(hook,), change=self.variants.ahead)

        return bool(calls) and self._arming.submit(compile_all)

    def wait(self) -> None:
        self._arming.wait()

    @property
    def arming(self) -> bool:
        return self._arming.busy

    def _armed(self) -> None:
        self.on_compiled()

    def _not_armed(self, error: Exception) -> None:
        # the user's own call will compile it in its own thread, or raise a better error
        self.places = self._wanted
        self.errors.append(f"compiling ahead: {type(error).__name__}: {error}")
        self.on_compiled()

    def is_mine(self, hook: Hook) -> bool:
        return isinstance(hook.wrap, WatchHook) and hook.wrap.session == self.number

    def opening(self) -> tuple[Resource, ...]:
        """While these are open, every pass is watched that this thread makes, with room for the
        armed places.
        """
        if self.disagreement:
            return ()
        hooks = hook_resources(self.hook(self.places))
        listening, fast = CallLogging(self._calls), ProgramListener()
        return (
            _ScopeReport(self, self._scope),
            listening,
            *hooks,
            fast,
            VariantChooser(self.variants),
        )

    def open(self) -> AbstractContextManager[None]:
        """Watch every pass that this thread makes inside; see `resources`."""
        return open_all(*self.opening())

    def note(self, scope: Scope) -> None:
        """Take over what a scope has seen."""
        self._may_share &= not scope.unattributed
        for name, count in scope.unattributed.items():
            self.unattributed[name] = self.unattributed.get(name, 0) + count
        for name, count in scope.doubtful.items():
            self.doubtful[name] = self.doubtful.get(name, 0) + count
        scope.unattributed.clear()
        scope.doubtful.clear()

    def count_other(self, type_name: str) -> None:
        """Count a call of a module of this type that is not the model's."""
        self.unattributed[type_name] = self.unattributed.get(type_name, 0) + 1

    def reached(self) -> Reached:
        """The sites and places that perturbed passes have reached since the last call."""
        ran, self.ran = self.ran, {}
        return {one for sites in list(ran.values()) for one in sites}  # a pass may begin meanwhile

    def take(self) -> dict[str, dict[str, Summary]]:
        """The passes since the last `take`: site -> quantity -> summary over all calls.

        Waits until started programs have finished.
        """
        return self.summaries_of(self.take_passes())

    def summaries_of(
        self, passes: list[WatchedPass], *, ended: bool = True
    ) -> dict[str, dict[str, Summary]]:
        """Site -> quantity -> the summary over all calls of some passes, the session's sites first,
        then single layers of stacks. Of passes that have not ended, which stacks cannot be told
        apart is not noted.
        """
        parts: CallSummaries = {}
        for one in passes:
            for what, summaries in one.sent.arrived.items():
                if what[1] in ("parameter", STATE):  # as the first call read it
                    parts.setdefault(what, summaries[:1])
                else:
                    parts.setdefault(what, []).extend(summaries)
        layers, unknown = layers_of_stacks(parts, self.stacks)
        if ended:
            self.merged_stacks |= unknown
        found: dict[str, dict[str, None]] = {site: {} for site in self.keys}
        for key, _ in parts:  # the arrays of a site after each other, the main one first
            found.setdefault(leaf_of(key)[0], {}).setdefault(key)
        out: dict[str, dict[str, Summary]] = {}
        for site, own in found.items():
            for key in dict.fromkeys((site, *own)):
                for quantity in ("input", *QUANTITIES):
                    if (key, quantity) in parts:
                        out.setdefault(key, {})[quantity] = merged_summary(parts[key, quantity])
        return {**out, **layers}

    def stats_of(self, passes: list[WatchedPass], measured: Summaries) -> PassStats:
        """The figures of some passes that the rules need, with what was measured in them."""
        sent = [one.sent for one in passes]
        unit_samples = unit_samples_with_layers(
            [one.unit_samples for one in sent], self.stacks, axes=1
        )
        choices = unit_samples_with_layers([one.choices for one in sent], self.stacks, axes=2)
        states: dict[str, np.ndarray] = {}
        differentiated = {path for one in passes for path in one.sent.differentiated}
        for one in passes:
            states = {**one.sent.states, **states}  # the first pass takes precedence
        moves = {path: sums for one in reversed(passes) for path, sums in one.sent.moves.items()}
        return self._stats_builder.build(
            unit_samples,
            states,
            choices,
            differentiated=differentiated,
            updates=updates_of(moves, self.stacks),
            measured=measured,
        )

    def take_passes(self) -> list[WatchedPass]:
        """Like `take`, but each pass separately."""
        passes = self.passes()
        for one in passes:
            self.inbox.drop(one.number)
        return passes

    def passes(self) -> list[WatchedPass]:
        """The passes since the last `take`, which stay there until they are dropped."""
        self.inbox.end_pass()
        return self.inbox.waiting_passes()

    def step_ends(self) -> StepEnd:
        """What separates this thread's passes so far from later ones."""
        return StepEnd(self.inbox.end_pass(), self.inbox.waiting())

    def close(self) -> None:
        """Close the session, even in a loop: what its programs still send is ignored."""
        self._may_share = False
        self._arming.close()
        self.variants.close()
        open_sessions.pop(self.number, None)
