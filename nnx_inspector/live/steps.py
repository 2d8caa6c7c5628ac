"""A watched training loop: which steps are sampled, and what happens between two steps.

An iterator, or a region with `tick`, knows where steps begin: a step that is not sampled runs
exactly the user's own program, unless a perturbation is on. A plain region does not know, so its
programs count the passes of the model and send the sampled ones. Invariant: no way of leaving
(break, exception, interrupt) leaves a hook open. Does not measure anything itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sized
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np

from nnx_inspector._compat.started import Latest, following
from nnx_inspector.errors import InspectorError
from nnx_inspector.hooks.dispatch import installed
from nnx_inspector.live.inbox import Taken
from nnx_inspector.live.session import Session
from nnx_inspector.program.host.primitives import EFFECT

T = TypeVar("T")

KEPT_BACK = 2
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
    latest: Latest | None


class Owner(Protocol):
    """The object that begins a loop and receives its steps and passes."""

    def loop_begins(self, total: int | None) -> int: ...
    def step_begins(self, session: Session) -> bool: ...
    def step_ends(self, session: Session, ended: Step) -> None: ...
    def step_left(self, session: Session, step: int, *, sampled: bool) -> None: ...
    def pass_ends(self, session: Session, step: int, one: Taken, *, newest: bool) -> None: ...
    def pass_held(self, session: Session, step: int, one: Taken) -> None: ...
    def loop_ends(self, session: Session, *, failed: bool = False) -> None: ...


def check_every(every: Any) -> int:
    """Return `every`, any kind of integer, as an int, or raise a ValueError."""
    number = _whole_number(every)
    if number is None or number < 1:
        raise ValueError(f"every must be a number of steps, 1 or more, got {every!r}.")
    return number


def check_tree(tree: Any) -> int | None:
    """Return `tree`, or raise a ValueError."""
    number = _whole_number(tree)
    if tree is not None and (number is None or number < 0):
        raise ValueError(
            f"tree must be the number of a tree in the order in which the program calls them, from "
            f"0, or None, got {tree!r}."
        )
    return number


def _whole_number(given: Any) -> int | None:
    try:
        return None if isinstance(given, (bool, np.bool_)) else operator.index(given)
    except TypeError:
        return None


def batches_of(data: Any) -> Iterable[Any] | None:
    """What Python's `for` would iterate over, up to its length if it has one; otherwise None.

    A data set may have `__getitem__` and `__len__` alone, and raise nothing behind its last item.
    """
    if isinstance(data, Iterable):
        return data
    if not hasattr(type(data), "__getitem__"):
        return None
    return _Items(data) if isinstance(data, Sized) else iter(data)


class _Items:
    def __init__(self, data: Any):
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Any]:
        return map(self._data.__getitem__, range(len(self)))


# ---------------------------------------------------------------------- steps


class Steps:
    """The steps of one loop. The session is open in the steps that need it."""

    def __init__(self, owner: Owner, session: Session, every: int, step: int):
        self._owner, self._session, self._every, self._step = owner, session, every, step
        self._open = contextlib.ExitStack()
        self._began: float | None = None
        self._sampled = self._perturbed = False
        self._latest: Latest | None = None

    def begin(self) -> None:
        self._perturbed = self._owner.step_begins(self._session)
        due = self._step % self._every == 0
        self._sampled = due and not self._session.bare
        self._session.sample(1 if self._sampled else 0)
        self._began = time.perf_counter()
        if self._sampled or self._perturbed:
            self._open.enter_context(self._session.open())
        elif due:
            self._open.enter_context(self._session.note_bare())
        before_due = not self._sampled and (self._step + 1) % self._every == 0
        self._latest = self._open.enter_context(following(EFFECT)) if before_due else None

    def end(self) -> None:
        if self._began is None:
            return
        seconds, self._began = time.perf_counter() - self._began, None
        self._open.close()
        latest, self._latest = self._latest, None
        ended = Step(self._step, self._sampled, self._perturbed, seconds, latest)
        self._owner.step_ends(self._session, ended)
        self._step += 1
        raise_interrupt(self._session)

    def leave(self) -> None:
        """Leave the loop, perhaps within a step: by a `break` or an error."""
        began, self._began = self._began, None
        self._latest = None
        self._open.close()
        if began is not None:
            self._owner.step_left(self._session, self._step, sampled=self._sampled)


def raise_interrupt(session: Session) -> None:
    """Raise the KeyboardInterrupt that a callback caught while it received a summary."""
    interrupted, session.interrupted = session.interrupted, False
    if interrupted:
        raise KeyboardInterrupt


def watched(
    owner: Owner, session: Session, batches: Iterable[T], every: int
) -> Generator[T, Any, None]:
    """Yield the batches, with the session open around the caller's work on some of them."""
    steps = Steps(owner, session, every, owner.loop_begins(_how_many(batches)))
    try:
        session.begin()
        session.refresh()
        with installed():
            try:
                for batch in batches:
                    steps.begin()
                    yield batch
                    steps.end()
            finally:
                steps.leave()
    finally:
        owner.loop_ends(session)
        session.finish()


def _how_many(batches: Iterable[Any]) -> int | None:
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except Exception:  # noqa: BLE001 - the progress is shown without an end
        return None  # the `__len__` of an endless data set may raise


# --------------------------------------------------------------------- regions


class Region:
    """`with insp.watch(every=10):` around a loop that cannot iterate over `insp.watch(batches)`.

    Passes 0, `every`, 2 * `every` and so on of the model are measured; see `live.calls`. A
    perturbation acts from the next pass on, even within a step. A `tick` in each step marks the
    steps.
    """

    def __init__(self, owner: Owner, session: Session, every: int):
        self._owner, self._session, self._every = owner, session, every
        self._stack = contextlib.ExitStack()
        self._steps: Steps | None = None
        self._receiver: _Receiver | None = None
        self._entered = False

    def __enter__(self) -> Region:
        if self._entered:
            raise InspectorError(
                "This region was entered before. Make one for each loop: "
                "with insp.watch(every=10): ..."
            )
        self._entered = True
        first = self._owner.loop_begins(None)
        try:
            self._session.inbox.restart(self._every)
            self._session.begin()
            self._session.refresh()
            self._owner.step_begins(self._session)
            self._stack.enter_context(installed())
            self._stack.enter_context(self._session.open())
            self._receiver = _Receiver(self._owner, self._session, first)
        except BaseException:
            self._stack.close()
            self._owner.loop_ends(self._session)
            raise
        self._first = first
        return self

    @property
    def ticks(self) -> bool:
        return self._steps is not None

    def tick(self) -> None:
        """End the step since the last `tick`, and begin the next."""
        if self._steps is None:
            self._end_plain()
            self._stack.enter_context(installed())
            first = self._first + self._session.inbox.count  # after passes before the first tick
            self._steps = Steps(self._owner, self._session, self._every, first)
        self._steps.end()
        self._steps.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            if self._steps is None:
                self._end_plain()
            elif error is None:
                self._steps.end()
        finally:
            if self._steps is not None:
                self._steps.leave()
            self._stack.close()
            self._owner.loop_ends(self._session, failed=error is not None)
            if error is None:
                self._session.finish()
        if error is None:
            raise_interrupt(self._session)

    def _end_plain(self) -> None:
        self._stack.close()
        self.hand_on()

    def hand_on(self) -> None:
        """Hand on the passes so far, and none of the later ones; with ticks, do nothing."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.finish()

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "insp.watch(every=...) without batches is a context: with insp.watch(every=10): "
            "train(). To iterate, pass the batches: insp.watch(batches, every=10)."
        )


class _Receiver:
    """Hands on complete passes, in a thread of its own."""

    def __init__(self, owner: Owner, session: Session, first: int):
        self._owner, self._session, self._first = owner, session, first
        self._over = False
        self._holding = threading.Lock()
        session.inbox.next_begins = self._hold_complete
        self._thread = threading.Thread(
            target=self._work, name="nnx_inspector.receiver", daemon=True
        )
        self._thread.start()

    def _work(self) -> None:
        inbox = self._session.inbox
        while inbox.wait_for_more_than(KEPT_BACK, lambda: self._over):
            inbox.wait_for_complete()  # not in `_hold_complete`, for which the user's step may wait
            self._hold_complete()
            self._hand_on(inbox.take(besides=KEPT_BACK))

    def _hand_on(self, passes: list[Taken]) -> None:
        for one in passes:
            _ = one.sent  # read before anybody takes a lock for it
            number, newest = self._first + one.number, one is passes[-1]
            self._owner.pass_ends(self._session, number, one, newest=newest)

    def _hold_complete(self) -> None:
        """Hand on the passes that have arrived, before the next begins: a killed process keeps
        them.
        """
        with self._holding:
            for one in self._session.inbox.completed():
                self._hold(one)

    def _hold(self, one: Taken) -> None:
        try:
            self._owner.pass_held(self._session, self._first + one.number, one)
        except Exception as error:  # noqa: BLE001 - within the user's step: counted and shown
            self._session.errors.append(f"saving a pass: {type(error).__name__}: {error}")

    def finish(self) -> None:
        """Hand on the remaining passes, once all have been made."""
        self._over = True
        self._session.inbox.wake()
        self._thread.join()
        rest = self._session.take_passes()
        self._session.inbox.next_begins = lambda: None
        self._hand_on(rest)
