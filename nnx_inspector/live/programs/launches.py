"""An edited program that runs in place of the user's: its passes, its inputs and what comes out.

Passes are numbered in the order in which their programs are started. A gradient may come out of a
later program than the outputs of its pass, and a call that no program holds is one equation after
the other. Invariant: no error of ours reaches the user's training step; it is counted and shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import jax
from flax import nnx

from nnx_inspector._compat.configuration import internal_config
from nnx_inspector.errors import is_from_signal_handler
from nnx_inspector.hooks.hook import Hook
from nnx_inspector.live.hook import current_call
from nnx_inspector.live.inbox import CurrentPass, Message, PassData, WatchedPass
from nnx_inspector.live.pass_start import GRADIENT, OpenSession
from nnx_inspector.live.programs.fast_path import key_of
from nnx_inspector.live.programs.ownership import Ownership
from nnx_inspector.live.programs.process_group import ProcessGroup
from nnx_inspector.live.programs.program_marks import (
    Index,
    ProgramMark,
    differentiated,
    put_beginning,
    put_choice,
    put_gradient,
    put_values,
)
from nnx_inspector.live.programs.traced_program import EditedProgram, ProgramPass, TracedProgram
from nnx_inspector.live.programs.value_request import ValueRequest
from nnx_inspector.perturbations.places import CLEAN, Place, Setting, rows_of
from nnx_inspector.program.editing.context import WHERE
from nnx_inspector.program.editing.position_masks import last_mask
from nnx_inspector.program.editing.slots import read_slots
from nnx_inspector.program.marks import BEGIN, CHOICE, OUTPUT
from nnx_inspector.typing import Array, Params, Value

_Matcher = Callable[[ProgramMark], Index | None]
"""The iteration of a mark that belongs to a pass; None if none does."""

NOTHING_COUNTS = (
    "where= selects no position of a measured pass, so the figures of its sites are empty."
)
UNKNOWN_POSITIONS = (
    "Which positions count is not known in a backward pass that is a program of its own and "
    "computes values again (nnx.remat): the gradients there are measured at all positions. Jit the "
    "whole step."
)
CHOOSING = "choosing a program: "
"""How an error begins that comes before a program is launched."""
MOST_AWAITED = 64
"""How many passes wait for a gradient that another program computes."""


class WatchedSession(OpenSession, Protocol):
    """What a session is to the choice of its programs."""

    number: int
    executables: int
    model: nnx.Module
    ownership: Ownership
    group: ProcessGroup | None

    @property
    def value_request(self) -> ValueRequest | None: ...

    @property
    def is_steered(self) -> bool: ...

    def steers(self) -> bool: ...

    def is_mine(self, hook: Hook) -> bool: ...

    def count_other(self, type_name: str) -> None: ...

    def takes_part(self, arrays: object) -> bool: ...


@dataclasses.dataclass(frozen=True, eq=False)
class _StartedPass:
    """A pass that a program has begun, and its iteration there."""

    now: CurrentPass
    index: Index


@dataclasses.dataclass(eq=False)
class _AwaitedGradients:
    """Passes of one launch, or of several in one call, whose gradients another program computes.

    Attributes:
        launches: how many programs have had outputs of them.
        done: how often each program has had their gradients.
    """

    passes: list[_StartedPass]
    launches: int = 1
    done: Counter[int] = dataclasses.field(default_factory=lambda: Counter[int]())


class StartedPasses:
    """The passes that a session's programs have begun."""

    def __init__(self) -> None:
        self._now: CurrentPass | None = None  # the pass of the call that this thread is in
        self._number: int | None = None  # by which the marks of that call know it
        self._is_others = False
        self._later: dict[int, deque[_AwaitedGradients]] = {}

    def enter_foreign_call(self) -> None:
        """The call that this thread is in is not the model's."""
        self._now, self._number, self._is_others = None, None, True

    def are_due(self, found: TracedProgram, session: WatchedSession, alone: Params | None) -> bool:
        """Whether something that a program sees belongs to a pass that is measured."""
        inbox = session.inbox
        if found.begins:
            if not found.is_known:
                return inbox.every > 0
            return inbox.is_due(found.known_calls, session.setting)
        now = self._now
        if found.joins and now is not None and self._joins_current(session, found, alone):
            return now.sampled
        awaits = found.awaits
        if awaits and alone is not None:
            awaits = (alone["of"][0][0],)
        those = (x for n in awaits for x in self._later.get(n, ()))
        return any(one.now.sampled for x in those for one in x.passes)

    def _joins_current(
        self, session: WatchedSession, found: TracedProgram, alone: Params | None
    ) -> bool:
        """Whether calls belong to the pass under way. jax evaluates the forward half of a remat on
        arrays after the call has returned, so that only the number of the call says it there.
        """
        numbers = found.numbers if alone is None else (alone["call"][0],)
        return current_call(session.number) is not None or self._number in numbers

    def setting_of(
        self, found: TracedProgram, session: WatchedSession, alone: Params | None
    ) -> Setting:
        """The perturbations of the pass that a program belongs to: a backward pass computes again
        what the forward pass has computed.
        """
        if found.begins:
            return session.setting
        if current_call(session.number) is not None and not self._is_others:
            return session.setting if self._now is None else self._now.setting
        takes: Sequence[Value] = found.takes if alone is None else [alone.get("call")]
        known = (self._later[n][-1] for n in takes if self._later.get(n))
        other = CLEAN if self._is_others else session.setting
        return next((one.passes[0].now.setting for one in known), other)

    def begun(
        self,
        session: WatchedSession,
        found: TracedProgram,
        order: Sequence[ProgramPass],
        setting: Setting,
        alone: Params | None,
    ) -> list[_StartedPass]:
        """Begin the passes of a program that was started."""
        out: list[_StartedPass] = []
        later: dict[int, list[_StartedPass]] = {}
        for one, call in zip(order, found.calls(order), strict=True):
            mark = found.begins[one.number].mark
            if alone is not None:
                how = {"begun": alone["begun"], "of": alone["call"]}
                mark = dataclasses.replace(mark, **how, moved=alone.get("moved", ()))
            session.unseen.update(mark.begun.unseen)
            graded = one.number in found.graded
            awaits = [OUTPUT]
            if differentiated(mark) and not graded:
                awaits.append(GRADIENT)
            now = session.inbox.begin(setting, call=call, awaits=awaits)
            self._now, self._number, self._is_others = now, mark.of, False
            started = _StartedPass(now, one.index)
            out.append(started)
            if not graded:
                later.setdefault(mark.of, []).append(started)
        for number, those in later.items():
            self._remember(number, those)
        if setting.active and out:
            reached = found.reached if alone is None else alone["begun"].reached
            session.ran[id(reached)] = reached
        return out

    def join(
        self, session: WatchedSession, found: TracedProgram, alone: Params | None
    ) -> CurrentPass | None:
        """The pass under way, to which a program without one of its own belongs."""
        if self._now is not None:
            if self._now.setting.active:
                session.ran[id(found.reached)] = found.reached
            numbers = found.numbers if alone is None else (alone["call"][0],)
            for number in numbers:
                self._remember(number, [_StartedPass(self._now, ())])
        return self._now

    def graded(self, number: int, found: TracedProgram) -> list[_StartedPass]:
        """The passes whose gradients a program has computed: those that it has begun last."""
        for one in reversed(self._later.get(number, ())):
            # of single equations, each has one of many gradients of the same call
            if found.is_single or one.done[id(found)] < one.launches:
                one.done[id(found)] += 1
                return one.passes
        return []

    def _remember(self, number: int, those: list[_StartedPass]) -> None:
        known = self._later.setdefault(number, deque(maxlen=MOST_AWAITED))
        if known and known[-1].passes[0].now is those[0].now:
            known[-1].launches += 1
        else:
            known.append(_AwaitedGradients(those))
        if len(self._later) > MOST_AWAITED:
            self._later.pop(next(iter(self._later)))


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """An edited program that runs in place of the user's; see `launch.Launch`."""

    passes: StartedPasses
    session: WatchedSession
    found: TracedProgram
    edited: EditedProgram
    setting: Setting
    pass_on: Callable[[WatchedSession, int], None]
    alone: Params | None = None
    is_doubted: bool = False
    value_request: ValueRequest | None = None  # what its program keeps besides
    started: list[tuple[ProgramPass, _StartedPass]] = dataclasses.field(default_factory=lambda: [])

    def numbers(self) -> list[Value]:
        """The values of its additional inputs, on the host."""
        out: list[Value] = []
        for (kind, *rest), value in zip(self.edited.keys, self.edited.values, strict=True):
            if kind == "launch_input":
                value = _input_value(self.setting, *rest[0])
            elif kind == WHERE and (mask := last_mask(*rest)) is not None:
                value = mask
            elif kind == WHERE and UNKNOWN_POSITIONS not in self.session.notes:
                self.session.notes.append(UNKNOWN_POSITIONS)
            out.append(value)
        return out

    @property
    def key(self) -> int:
        """That of the programs that get these perturbations; see `fast_path`."""
        given = zip(self.edited.keys, self.numbers(), strict=True)
        active = self.setting.active
        return key_of([x for (kind, *_), x in given if kind == "launch_input"] if active else ())

    def _begin(self, order: Sequence[ProgramPass]) -> None:
        begun = self.passes.begun(self.session, self.found, order, self.setting, self.alone)
        self.started.extend(zip(order, begun, strict=True))
        if self.is_doubted:
            self.session.ownership.doubted += [one.now.number for one in begun]

    def inputs(self) -> list[Value]:
        with log_errors(self.session):
            if self.found.is_known:
                self._begin(self.found.known_passes)
        return on_device(self.numbers())

    def take(self, arrays: list[Array], /) -> None:
        with log_errors(self.session, programs=False):
            seen = functools.cache(functools.partial(self.edited.read, arrays))
            if not self.found.is_known:
                self._begin(self.found.passes(read_slots(self.edited.seen, jax.device_get(arrays))))
            for now, what, which in self._parts():
                message = Message(functools.partial(self._read, seen, which), arrays)
                if now.sampled:
                    self.session.inbox.receive(now.number, message, what)
                if self.value_request is not None and what != GRADIENT:
                    self.value_request.take(WatchedPass(now.number, now.setting, (message,)))
        if self.setting is self.session.setting:
            self.pass_on(self.session, self.key)

    def _parts(self) -> Iterator[tuple[CurrentPass, str, _Matcher]]:
        """The passes that something of the program belongs to, if they are sampled or kept for
        somebody: of each what it awaits, and which marks are its own.
        """
        found = self.found
        for one, begun in self.started:
            if begun.now.sampled or (self.value_request is not None and one.kept):
                yield begun.now, OUTPUT, functools.partial(_match_pass, one)
        if not found.begins and found.joins:
            now = self.passes.join(self.session, found, self.alone)
            if now is not None and (now.sampled or self.value_request is not None):
                yield now, "", _match_joining
        for number in found.awaits:
            mine = number if self.alone is None else self.alone["of"][0][0]
            for begun in self.passes.graded(mine, found):
                if begun.now.sampled:
                    which = functools.partial(_match_gradient, number, begun.index)
                    yield begun.now, GRADIENT, which

    def _read(self, seen: Callable[[], list[ProgramMark]], which: _Matcher, sent: PassData) -> None:
        """Put what was seen of a pass into `sent`."""
        if not self.edited.measures:
            return
        begun = None if self.alone is None else self.alone.get("begun")
        gradients: list[tuple[ProgramMark, Index]] = []
        with log_errors(self.session, programs=False):
            for one in seen():
                index = which(one)
                if index is None or one.seen is None:
                    continue
                at = tuple(loop.row(i) for loop, i in zip(one.loops, index, strict=False))
                if one.mark.part == BEGIN:
                    put_beginning(one, at, sent, known=begun)
                elif one.mark.part == GRADIENT:
                    gradients.append((one, at))
                elif one.mark.part == CHOICE:
                    put_choice(one, at, sent)
                else:
                    put_values(one, at, sent)
            # jax reverses the calls
            for one, at in sorted(gradients, key=lambda pair: pair[0].mark.of[0][1]):
                put_gradient(one, at, sent)
        notes = self.session.notes
        if sent.is_empty and NOTHING_COUNTS not in notes:
            notes.append(NOTHING_COUNTS)
        if self.found.misfit and self.found.misfit not in notes:
            notes.append(self.found.misfit)


def _input_value(setting: Setting, owner: Value, key: Value, those: Value) -> Value:
    if key == "rows":
        return rows_of(those, setting.rows)
    number, part = key
    places: tuple[Place, ...] = those
    return setting.at(places)[number][part]


@contextlib.contextmanager
def log_errors(
    session: WatchedSession, doing: str = "", *, programs: bool = True
) -> Iterator[None]:
    """Note an error, which may not reach the user's training step: with `programs`, also one of a
    program, which its caller gets otherwise.
    """
    try:
        yield
    except Exception as error:
        if is_from_signal_handler(error):
            raise  # as a KeyboardInterrupt, which is no Exception
        text = f"{doing}{type(error).__name__}: {error}"
        is_theirs = isinstance(error, jax.errors.JaxRuntimeError) and not programs
        if not is_theirs and text not in session.errors:
            session.errors.append(text)


def _match_pass(one: ProgramPass, place: ProgramMark) -> Index | None:
    return one.index if place.begins == one.number and one.kept else None


def _match_joining(place: ProgramMark) -> Index | None:
    return () if place.begins is None and place.mark.part != GRADIENT else None


def _match_gradient(number: int, index: Index, place: ProgramMark) -> Index | None:
    later, mark = place.begins is None, place.mark
    return index if later and mark.part == GRADIENT and mark.of[0][0] == number else None


@internal_config()
def on_device(answers: list[Value]) -> list[jax.Array]:
    """The answers on the device; the user may forbid that jit puts them there."""
    return jax.device_put(answers)
