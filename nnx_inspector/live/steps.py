"""A watched training loop: which steps are sampled, and what happens between two steps.

An iterator, or a region with `tick`, knows where steps begin: a step that is not sampled runs
exactly the user's own program, unless a perturbation is on. A plain region does not know, so its
programs count the passes of the model and send the sampled ones. Invariant: no way of leaving
(break, exception, interrupt) leaves a hook open. Does not measure anything itself.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import operator
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from types import TracebackType
from typing import NoReturn, ParamSpec, TypedDict, TypeVar, cast

import numpy as np

from nnx_inspector._compat.launching import programs
from nnx_inspector.background import Worker, weak_method
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.dispatch import installation
from nnx_inspector.hooks.sites import Only
from nnx_inspector.live.inbox import WatchedPass
from nnx_inspector.live.programs.launches import log_errors
from nnx_inspector.live.session import JobExchange, Session
from nnx_inspector.resources import Resource, close_all
from nnx_inspector.typing import Value

T = TypeVar("T")
Arguments = ParamSpec("Arguments")

UNFINISHED_PASSES = 2
"""How many passes may still lack gradients when later passes have begun."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that the user's thread has ended.

    Attributes:
        seconds: how long it took that thread.
        latest: the step's last program, if the next step is to be measured.
    """

    number: int
    sampled: bool
    perturbed: bool
    seconds: float
    latest: programs.LatestResults | None


class LoopCallbacks:
    """The object that begins a loop and receives its steps and passes; this one does nothing.

    Attributes:
        start: the number of the first step.
        shares: what the processes of a job say to each other before steps.
    """

    start = 0
    shares = JobExchange()

    def poll(self) -> None:
        """Let the browser's messages arrive, between two steps or passes; no lock is held."""

    def loop_begins(self, loop: object, total: int | None) -> int:
        """Begin a loop and return the number of its first step."""
        return self.start

    def first_step_is(self, step: int) -> int:
        """Let the first step have another number, which it returns."""
        return step

    def step_begins(self, session: Session) -> bool:
        """Take over the changes; return whether any perturbation is on."""
        return False

    def step_ends(self, session: Session, ended: Step) -> None: ...
    def step_left(self, session: Session, step: int, *, sampled: bool) -> None: ...
    def pass_ends(self, session: Session, step: int, one: WatchedPass, *, newest: bool) -> None: ...
    def pass_held(self, session: Session, step: int, one: WatchedPass) -> None: ...
    def loop_ends(self, loop: object, session: Session) -> None:
        """End a loop, unless that is done or it never began; called twice after an interrupt."""

    def loop_ended(self) -> None:
        """Warn of what is certain, when no error has left the loop: a filter may raise warnings."""


class WatchArgs(TypedDict, total=False):
    """How a loop is watched; see `Inspector.watch`."""

    every: int
    only: Only
    gradients: bool
    tree: int | None
    start: int | None
    to: object
    optimizer: object


def check_every(every: object) -> int:
    """Return `every`, any kind of integer, as an int, or raise a ValueError."""
    return _at_least(1, every, "every must be a number of steps, 1 or more")


def check_start(start: object) -> int:
    """Return `start`, any kind of integer, as an int, or raise a ValueError."""
    return _at_least(0, start, "start must be the number of a step, 0 or more")


def check_replica(number: object) -> int | None:
    """Return the user's `tree=` as an int or None, or raise a ValueError."""
    must = "tree must be the number of a tree in the order in which the program calls them, from 0"
    return None if number is None else _at_least(0, number, f"{must}, or None")


def _at_least(least: int, given: object, must: str) -> int:
    try:
        number = -1 if isinstance(given, (bool, np.bool_)) else operator.index(cast(int, given))
    except TypeError:
        number = -1
    if number < least:
        raise ValueError(f"{must}, got {given!r}.")
    return number


def batches_of(data: object) -> Iterable[Value] | None:
    """What Python's `for` would iterate over, up to its length if it has one; otherwise None.

    A data set may have `__getitem__` and `__len__` alone, and raise nothing behind its last item.
    """
    if isinstance(data, Iterable):
        return data
    if not hasattr(type(data), "__getitem__"):
        return None
    return _SequenceBatches(data) if isinstance(data, Sized) else iter(cast(Value, data))


class _SequenceBatches:
    def __init__(self, data: Value):
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Value]:
        return map(self._data.__getitem__, range(len(self)))


# ---------------------------------------------------------------------- steps


class Steps:
    """The steps of one loop. The session is open in the steps that need it."""

    def __init__(self, owner: LoopCallbacks, session: Session, every: int, step: int):
        self._owner, self._session, self._every, self._step = owner, session, every, step
        self._open: tuple[Resource, ...] = ()
        self._began: float | None = None
        self._sampled = self._perturbed = False
        self._path: programs.ProgramListener | None = None

    def begin(self) -> None:
        self._owner.poll()
        due = self._step % self._every == 0 and self._session.meet(self._owner.shares)
        self._perturbed = self._owner.step_begins(self._session)
        self._sampled = due and not self._session.runs_bare
        self._session.inbox.every = 1 if self._sampled else 0
        self._began = time.perf_counter()
        those: tuple[Resource, ...] = ()
        if self._sampled or self._perturbed:
            those = self._session.opening()
        elif due:
            those = self._session.log_bare_calls()
        before_due = not self._sampled and (self._step + 1) % self._every == 0
        self._path = programs.ProgramListener(latest=True) if before_due else None
        self._open = those if self._path is None else (*those, self._path)
        for one in self._open:
            one.open()

    def end(self) -> None:
        if self._began is None:
            return
        seconds = time.perf_counter() - self._began
        close_all(self._open)
        latest = None if self._path is None else self._path.latest
        ended = Step(self._step, self._sampled, self._perturbed, seconds, latest)
        self._began, self._path = None, None
        self._owner.step_ends(self._session, ended)
        self._step += 1
        programs.raise_kept_error()

    def leave(self) -> None:
        """Leave the loop, perhaps within a step: by a `break` or an error."""
        close_all(self._open)
        self._open, self._path = (), None
        if self._began is not None:
            self._owner.step_left(self._session, self._step, sampled=self._sampled)
            self._began = None


_loops: weakref.WeakSet[Generator[object, None, None] | Region] = weakref.WeakSet()
"""The loops that may be open, iterations and regions."""


def closed_at_exit(
    f: Callable[Arguments, Generator[T, None, None]],
) -> Callable[Arguments, Generator[T, None, None]]:
    """Let each generator of a function be closed when the interpreter ends, if it is open then."""

    @functools.wraps(f)
    def registered(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Generator[T, None, None]:
        loop = f(*args, **kwargs)
        _loops.add(loop)
        return loop

    return registered


@closed_at_exit
def iterate(
    owner: LoopCallbacks, session: Session, batches: Iterable[T], every: int
) -> Generator[T, None, None]:
    """Yield the batches, with the session open around the caller's work on some of them."""
    loop, broken = _Iteration(owner, session), False
    try:
        try:
            steps = loop.begin(_length_of(batches), every)
            for batch in batches:
                steps.begin()
                yield batch
                steps.end()
        finally:
            loop.close()
    except GeneratorExit:  # by a `break`, or an error of the user's code
        broken = True
    finally:
        loop.close()
    if not broken:
        programs.raise_kept_error()
    owner.loop_ended()


class _Iteration:
    """What a loop over batches has begun; `close` may be called again, as that of an `Resource`."""

    def __init__(self, owner: LoopCallbacks, session: Session):
        self._owner, self._session = owner, session
        self._keeping, self._installed = programs.SignalErrors(), installation()
        self._steps: Steps | None = None

    def begin(self, total: int | None, every: int) -> Steps:
        self._keeping.open()
        first = self._owner.loop_begins(self, total)
        self._session.begin()
        self._session.refresh()
        first = self._owner.first_step_is(self._session.agree(first, every, self._owner.shares))
        self._installed.open()
        self._steps = Steps(self._owner, self._session, every, first)
        return self._steps

    def close(self) -> None:
        try:
            if self._steps is not None:
                self._steps.leave()
        finally:
            self._installed.close()
            try:
                self._owner.loop_ends(self, self._session)
            finally:
                if self._steps is not None:
                    self._session.finish()
                self._keeping.close()


@atexit.register
def _close_loops() -> None:
    """Close what is open when the interpreter ends: later our modules are gone, and XLA's threads
    are under way.
    """
    for loop in list(_loops):
        with contextlib.suppress(ValueError):  # a daemon thread is within it
            loop.close()


def _length_of(batches: Iterable[object]) -> int | None:
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except Exception:  # noqa: BLE001 - the progress is shown without an end
        return None  # the `__len__` of an endless data set may raise


# --------------------------------------------------------------------- regions


class _Exit:
    """The `__exit__` of a region, which notices that it was not even begun to run.

    A `with` statement gets an object of its own, which it holds as long as it runs. An interrupt
    may come when that is called, before the first line of ours. Nothing else holds the object, so
    that it is gone then.
    """

    def __get__(self, region: Region | None, owner: type[Region]) -> Callable[..., None]:
        if region is None:
            return owner.leave
        leave = functools.partial(Region.leave, region)
        region.close_with(leave)
        return leave


class Region:
    """`with insp.watch(every=10):` around a loop that cannot iterate over `insp.watch(batches)`.

    Passes 0, `every`, 2 * `every` and so on of the model are measured; see `live.pass_boundaries`.
    A perturbation acts from the next pass on, even within a step. A `tick` in each step marks the
    steps.
    """

    def __init__(self, owner: LoopCallbacks, session: Session, every: int):
        self._owner, self._session, self._every = owner, session, every
        self._keeping, self._installed = programs.SignalErrors(), installation()
        self._open: tuple[Resource, ...] = ()
        self._steps: Steps | None = None
        self._receiver: _Receiver | None = None
        self._first = 0
        self._entered = self._closing = self._over = False
        self._held: weakref.ref[Callable[..., None]] | None = None
        _loops.add(self)

    def __enter__(self) -> Region:
        if self._entered:
            raise InspectorError(
                "This region was entered before. Make one for each loop: "
                "with insp.watch(every=10): ..."
            )
        self._entered = True
        try:
            try:
                self._begin()
            except BaseException:
                self.close()
                raise
        except BaseException:
            self.close()
            raise
        return self

    def _begin(self) -> None:
        self._keeping.open()
        self._first = self._owner.loop_begins(self, None)
        self._session.inbox.restart(self._every)
        self._session.begin()
        self._session.refresh()
        agreed = self._session.agree(self._first, self._every, self._owner.shares)
        self._first = self._owner.first_step_is(agreed)
        self._owner.step_begins(self._session)
        self._installed.open()
        self._open = self._session.opening()
        for one in self._open:
            one.open()
        self._receiver = _Receiver(self._owner, self._session, self._first)
        self._receiver.start()

    @property
    def ticks(self) -> bool:
        return self._steps is not None

    def tick(self) -> None:
        """End the step since the last `tick`, and begin the next."""
        if self._steps is None:
            self._end_plain()
            first = self._first + self._session.inbox.count  # after passes before the first tick
            self._steps = Steps(self._owner, self._session, self._every, first)
        self._steps.end()
        self._steps.begin()

    __exit__ = _Exit()

    def close_with(self, leave: Callable[..., None]) -> None:
        """Close, if it is not closed by then, when nothing holds `leave` any more."""
        self._held = weakref.ref(leave, lambda _: self.close())

    def leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            try:
                if self._steps is not None and error is None:
                    self._steps.end()
            finally:
                self.close()
        finally:
            self.close()
        if error is None:
            programs.raise_kept_error()
            self._owner.loop_ended()

    def close(self) -> None:
        """End the region; called again, it goes on where an interrupt came."""
        if self._over or not self._entered:
            return
        again, self._closing = self._closing, True
        try:
            if self._steps is None:
                self._end_plain()
            else:
                self._steps.leave()
        finally:
            self._installed.close()
            if self._receiver is None or again:  # else the passes that it has not handed on
                self._end()

    def _end(self) -> None:
        try:
            self._owner.loop_ends(self, self._session)
        finally:
            self._session.finish()
            self._keeping.close()
        self._over, self._held = True, None

    def _end_plain(self) -> None:
        close_all(self._open)
        self.deliver()

    def deliver(self) -> None:
        """Hand on the passes so far, and none of the later ones; with ticks, do nothing."""
        if self._receiver is not None:
            self._receiver.finish()
            self._receiver = None

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "insp.watch(every=...) without batches is a context: with insp.watch(every=10): "
            "train(). To iterate, pass the batches: insp.watch(batches, every=10)."
        )


class _Receiver:
    """Hands on complete passes, in a thread of its own."""

    def __init__(self, owner: LoopCallbacks, session: Session, first: int):
        self._owner, self._session, self._first = owner, session, first
        self._over = False
        self._holding = threading.Lock()
        self._worker = Worker("nnx_inspector.receiver", weak_method(self._failed))

    def start(self) -> None:
        self._session.inbox.before_pass = self._save_complete
        self._worker.submit(self._work)

    def _failed(self, error: Exception) -> None:
        self._session.errors.append(f"recording a pass: {type(error).__name__}: {error}")

    def _work(self) -> None:
        inbox = self._session.inbox
        while inbox.wait_for_more_than(UNFINISHED_PASSES, lambda: self._over):
            inbox.wait_for_complete()  # not in `_save_complete`, for which the user's step may wait
            self._save_complete()
            passes = inbox.take(leave=UNFINISHED_PASSES)
            for one in passes:
                self._deliver(one, newest=one is passes[-1])

    def _deliver(self, one: WatchedPass, *, newest: bool) -> None:
        _ = one.sent  # read before anybody takes a lock for it
        self._owner.pass_ends(self._session, self._first + one.number, one, newest=newest)

    def _save_complete(self) -> None:
        """Hand on the passes that have arrived, before the next begins: a killed process keeps
        them.
        """
        self._owner.poll()
        with self._holding:
            for one in self._session.inbox.completed():
                with log_errors(self._session, "saving a pass: "):  # within the user's step
                    self._owner.pass_held(self._session, self._first + one.number, one)

    def finish(self) -> None:
        """Hand on the remaining passes, once all have been made."""
        self._over = True
        self._session.inbox.wake()
        self._worker.wait()
        self._session.inbox.before_pass = lambda: None
        rest = self._session.passes()
        for one in rest:
            self._deliver(one, newest=one is rest[-1])
            self._session.inbox.drop(one.number)  # an interrupt loses none of the others
