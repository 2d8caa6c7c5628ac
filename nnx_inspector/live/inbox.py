"""The watched passes: which one is under way, and the summaries that arrived of each.

A pass begins with a call of the model (`live.pass_boundaries`); what it does and sends is fixed
from then on. Invariant: data is kept under the number of its own pass, however late it arrives, and
nothing is kept of a pass that is not sampled. Imports no jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nnx_inspector.live.pass_boundaries import MODEL_CALL, PassState, TopLevelCall
from nnx_inspector.stats.bins import NAN_BIN
from nnx_inspector.stats.summary import Summary
from nnx_inspector.typing import Value

if TYPE_CHECKING:
    from nnx_inspector.perturbations.places import Setting
    from nnx_inspector.program.function import WatchedCall

CallSummaries = dict[tuple[str, str], list[Summary]]
"""(site, quantity) -> a summary for each call, in order of arrival."""


@dataclasses.dataclass
class PassData:
    """What a pass has sent.

    Attributes:
        arrived: its summaries; their rows are the iterations of the scans around the site.
        unit_samples: site -> the sample of units of each call, `[..., LENGTH]`.
        choices: site of a softmax that chooses -> the rows of each call, `[..., n, LENGTH]`.
        states: parameter's path -> its state.
        moves: parameter's path -> what `Moved` finds of its update.
        differentiated: the paths of the parameters with respect to which it is differentiated.
        calls: the outermost calls in shapes, None for a call that cannot be described.
        members: how many members of an ensemble the pass runs; 0 for none.
        values: what each call of the site returned that somebody asked for.
        is_empty: whether no position counted of a value of which only some do.
    """

    arrived: CallSummaries = dataclasses.field(default_factory=lambda: defaultdict(list))
    unit_samples: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=lambda: {})
    choices: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=lambda: {})
    states: dict[str, np.ndarray] = dataclasses.field(default_factory=lambda: {})
    moves: dict[str, np.ndarray] = dataclasses.field(default_factory=lambda: {})
    differentiated: set[str] = dataclasses.field(default_factory=set[str])
    calls: list[WatchedCall | None] = dataclasses.field(default_factory=lambda: [])
    members: int = 0
    values: list[Value] = dataclasses.field(default_factory=lambda: [])
    is_empty: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Message:
    """What a program sends. Whoever needs it first reads it: the program does not wait for that.

    Attributes:
        read: adds its content to `PassData`.
        arrays: what it consists of. A program that is still running may compute them.
    """

    read: Callable[[PassData], None]
    arrays: Sequence[Value] = ()

    @property
    def is_here(self) -> bool:
        return all(x.is_ready() for x in self._pending)

    def wait(self) -> None:
        """Return when it is here, or its program has failed."""
        for x in self._pending:
            with contextlib.suppress(RuntimeError):  # who calls the program gets it
                x.block_until_ready()

    @property
    def _pending(self) -> list[Value]:
        return [x for x in self.arrays if hasattr(x, "block_until_ready")]


MOST_AWAITING = 32
"""The most sampled passes that wait for the messages of the oldest of them."""


@dataclasses.dataclass(frozen=True)
class CurrentPass:
    """The pass that is under way.

    Attributes:
        number: how many passes began before it.
        sampled: whether the data that it sends is kept.
        setting: the perturbations in force, from its beginning to its end.
    """

    number: int
    sampled: bool
    setting: Setting


class Inbox:
    """The passes of one session. Any thread may use it.

    Attributes:
        every: passes 0, `every`, 2 * `every` and so on are sampled; 0 samples none.
        late: how many messages arrived after their pass was taken.
        next_begins: called before a pass begins or is passed over; it must not raise.
        begins: called with the number of each sampled pass when it begins; it must not raise.
    """

    def __init__(self) -> None:
        self.every = 1
        self._later = deque[int]()
        self.late = 0
        self.before_pass: Callable[[], None] = lambda: None
        self.begins: Callable[[int], None] = lambda number: None
        self._lock = threading.RLock()  # an interrupt may leave a Condition with its lock
        self._changed = threading.Condition(self._lock)
        self._now = PassState()
        self._passes: dict[int, WatchedPass] = {}
        self._awaiting: dict[int, Counter[str]] = {}
        self._copied: set[int] = set()

    def begin(
        self, setting: Setting, *, call: TopLevelCall = MODEL_CALL, awaits: Iterable[str] = ()
    ) -> CurrentPass:
        """The pass of a call that begins now; a new one, or the one that the call joins.

        It awaits these messages, which may arrive after later passes begin.
        """
        self.before_pass()
        with self._lock:
            now = self._now.after(call, setting, self.every)
            number, sampled = now.begun - 1, now.measures(call, self.every)
            joins = now.begun == self._now.begun and number in self._passes
            if sampled:
                # the last lines count: an interrupt before them begins no pass, and after it the
                # next one has this number
                before = self._awaiting[number] if joins else Counter[str]()
                self._awaiting[number] = before + Counter(awaits)
                known = self._passes[number].messages if joins else ()
                self._passes[number] = WatchedPass(number, setting, known)
                self._changed.notify_all()
            self._now = now
            if sampled and not joins and self._later:
                self.every = self._later.popleft()
        if sampled and not joins:
            self.begins(number)
        return CurrentPass(number, sampled, setting)

    def sample(self, every: int, *later: int) -> None:
        """Sample every so many passes from now on. Of `later`, each number replaces the one before
        when a sampled pass has begun.
        """
        with self._lock:
            self.every, self._later = every, deque(later)

    def is_due(self, calls: Sequence[TopLevelCall], setting: object) -> bool:
        """Whether one of the next calls is sampled."""
        return self._now.may_measure(calls, setting, self.every)

    def pass_over(self, calls: Iterable[TopLevelCall], setting: object) -> None:
        """Count the passes, none of them sampled, of calls that nobody begins."""
        self.before_pass()
        with self._lock:
            for call in calls:
                self._now = self._now.after(call, setting, self.every)

    def end_pass(self) -> int:
        """Let the next call begin a pass; returns how many passes have begun."""
        with self._lock:
            self._now = self._now.ended()
            return self._now.begun

    def restart(self, every: int) -> None:
        """Count passes from 0 again, and sample every `every`-th one."""
        with self._lock:
            self._now = PassState()
            self.sample(every)
            self._passes, self._awaiting = {}, {}
            self._copied.clear()

    def wait_for_more_than(self, number: int, over: Callable[[], bool]) -> bool:
        """Wait until `take` has a pass besides `number`, or `completed` has one; return False if
        `over` first.
        """
        with self._lock:
            self._changed.wait_for(lambda: over() or self._ready(number) or self._complete())
            return not over()

    def completed(self) -> list[WatchedPass]:
        """The passes that are here as a whole, each once. They stay in the inbox."""
        with self._lock:
            every = [self._passes[number] for number in self._complete()]
            found = [one for one in every if all(m.is_here for m in one.messages)]
            self._copied.update(one.number for one in found)
            return found

    def wait_for_complete(self) -> None:
        """Wait until the passes are here of which no message is missing."""
        for message in self._messages_of(self._complete):
            message.wait()

    def waiting(self) -> list[Message]:
        """All messages that were not taken."""
        return self._messages_of(lambda: self._passes)

    def _messages_of(self, numbers: Callable[[], Iterable[int]]) -> list[Message]:
        with self._lock:
            return [message for n in numbers() for message in self._passes[n].messages]

    def _complete(self) -> list[int]:
        return [n for n in self._passes if n not in self._copied and not self._awaits(n)]

    def _awaits(self, number: int) -> bool:
        return any(count > 0 for count in self._awaiting[number].values())

    def wake(self) -> None:
        """Let waiting threads check whether it is over."""
        with self._lock:
            self._changed.notify_all()

    def receive(self, number: int, message: Message, what: str = "output") -> None:
        with self._lock:
            one = self._passes.get(number)
            if one is not None:
                messages = (*one.messages, message)
                self._passes[number] = dataclasses.replace(one, messages=messages)
                self._awaiting[number][what] -= 1
                self._changed.notify_all()
            else:
                self.late += 1

    @property
    def count(self) -> int:
        """How many passes have begun or were passed over."""
        return self._now.begun

    def holds_nan(self) -> bool:
        """Whether a summary that has arrived and was not yet taken counts a NaN."""
        with self._lock:
            waiting = list(self._passes.values())
        sent = PassData()
        for message in (m for one in waiting for m in one.messages if m.is_here):
            message.read(sent)
        summaries = [s for found in sent.arrived.values() for s in found]
        return any(np.any(np.asarray(s.bins)[..., NAN_BIN]) for s in summaries)

    def take(self, *, leave: int = 0, before: float = math.inf) -> list[WatchedPass]:
        """Take the sampled passes, oldest first, except the newest ones and those that await a
        message.

        Args:
            leave: how many of the newest to leave, with all from the first that awaits a message
                on; 0 leaves none.
            before: only passes with smaller numbers are taken.
        """
        with self._lock:
            numbers = [number for number in self._ready(leave) if number < before]
            found = [self._passes[number] for number in numbers]
            for number in numbers:
                self.drop(number)
            return found

    def waiting_passes(self) -> list[WatchedPass]:
        """All sampled passes, oldest first, which stay in the inbox."""
        with self._lock:
            return list(self._passes.values())

    def drop(self, number: int) -> bool:
        """Let go of a pass; returns whether it was still here."""
        with self._lock:
            here = self._passes.pop(number, None)  # first: what it has, the others have too
            self._awaiting.pop(number, None)
            self._copied.discard(number)
            return here is not None

    def _ready(self, leave: int) -> list[int]:
        numbers = list(self._passes)
        count = max(0, len(numbers) - leave)
        for index, number in enumerate(numbers[:count] if leave else ()):
            if self._awaits(number) and len(numbers) - index <= MOST_AWAITING:
                return numbers[:index]
        return numbers[:count]


@dataclasses.dataclass(frozen=True)
class WatchedPass:
    """One pass of an inbox, as far as its messages have arrived.

    Attributes:
        number: how many passes began before it.
        setting: the perturbations that were in force.
        messages: what arrived of it.
    """

    number: int
    setting: Setting
    messages: tuple[Message, ...]

    @functools.cached_property
    def sent(self) -> PassData:
        found = PassData()
        for message in self.messages:
            message.read(found)
        return found

    @property
    def perturbed(self) -> bool:
        return bool(self.setting.active)
