"""What a watched program asks the host, and what it reports to the host about a pass.

A program holds these objects and may outlive the session, so they hold only names and numbers and
find the session by its number. Invariant: no error of ours reaches the user's training step; it is
counted and shown instead. What a signal's handler of the user raises here is raised.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import Any, Protocol

import jax
import numpy as np

from nnx_inspector.errors import comes_from_a_handler
from nnx_inspector.hooks.lookalikes import Claim, Lookalikes
from nnx_inspector.live.calls import Call, Calls
from nnx_inspector.live.inbox import Inbox, Message, Sent
from nnx_inspector.perturbations.region import rows_of
from nnx_inspector.perturbations.slots import CLEAN, Place, Setting
from nnx_inspector.program.function import WatchedCall
from nnx_inspector.program.marks import OUTPUT
from nnx_inspector.recordings.layers import leaf_of
from nnx_inspector.records.packed import Layout, taken_apart
from nnx_inspector.stats.summary import Summary, merge

GRADIENT = "gradient"

Reached = Set[tuple[str, Place | None, str, Any]]
"""The sites that a program calls, each with the place that acts there, None for a row; why it does
not fit what the site has there ("" if it does, as far as the program knows); and the shape and
dtype of that, None for a row or a parameter."""


class Listener(Protocol):
    """What a session is to the programs that are compiled with its hook."""

    inbox: Inbox
    ends: deque[int]
    setting: Setting
    errors: list[str]
    ran: dict[int, Reached]
    unseen: dict[str, str]
    lookalikes: Lookalikes


listeners: weakref.WeakValueDictionary[int, Listener] = weakref.WeakValueDictionary()
"""The open sessions by their number."""


def _safely(number: int, what: Callable[[Listener], Any], otherwise: Callable[[], Any]) -> Any:
    """Call `what` with a session; no error of ours may reach the user's training step."""
    found = listeners.get(number)
    if found is None:
        return otherwise()
    try:
        return what(found)
    except Exception as error:
        if comes_from_a_handler(error):
            raise  # as a KeyboardInterrupt, which is no Exception
        found.errors.append(f"{type(error).__name__}: {error}")
        return otherwise()


class Asked:
    """Answers a program that asks for the numbers of a pass that begins.

    Within a `shard_map` each device asks: the passes of one number are one pass.

    Args:
        session: the number of the session.
        keys: the sites that have a row.
        places: the other places that the program has room for.
        site: the module that is called.
        calls: the calls of the program; this one is added.
        claim: the claim by which the called module is the model's; None if it certainly is.
        devices: how many devices ask for each pass.

    Attributes:
        session: the number of the session.
        reached: the sites that the program calls, and the places that act there; see `Reached`.
        sends: which messages the program sends in each measured pass.
        differentiated: the paths of the parameters with respect to which it is differentiated.
    """

    def __init__(
        self,
        session: int,
        keys: Sequence[str],
        places: Sequence[Place],
        *,
        site: str,
        calls: Calls,
        claim: Claim | None,
        devices: int,
    ):
        self.session, self._keys, self._places = session, keys, places
        self._site, self._calls = site, calls
        calls.add(site)
        self._claim, self._devices = claim, devices
        # both are filled while the call is traced
        self.reached: set[tuple[str, Place | None, str, Any]] = set()
        self.unseen: dict[str, str] = {}
        self.sends = {OUTPUT}
        self.differentiated: set[str] = set()
        self._asked: dict[int, int] = {}  # how often each device has asked
        self._begun: dict[int, list[tuple[Any, ...]]] = {}  # an answer for each of the others
        self._lock = threading.Lock()

    def call(self, *, starts: bool | None = None) -> Call:
        return self._calls.call(self._site, starts=starts)

    @property
    def certain(self) -> bool:
        """Whether a program begins a pass each time that it asks."""
        withdrawn = self._claim is not None and self._claim.withdrawn
        return self._devices == 1 and not withdrawn

    def __call__(self, device: Any = 0, *, call: Call | None = None) -> tuple[Any, ...]:
        """The numbers of the pass; `call` is this one, where its place in the run is known."""

        def answer(session: Listener) -> tuple[Any, ...]:
            with self._lock:
                return self._answer(session, int(device), call or self.call())

        return _safely(self.session, answer, lambda: self._numbers(-1, False, CLEAN))

    def _answer(self, session: Listener, device: int, call: Call) -> tuple[Any, ...]:
        number = self._asked.get(device, 0)
        self._asked[device] = number + 1
        if number in self._begun:
            found = self._begun[number].pop()
            if not self._begun[number]:
                del self._begun[number]
            return found
        if self._claim is not None and self._claim.withdrawn:
            session.unseen[""] = self._claim.withdrawn
            return self._numbers(-1, False, CLEAN)
        now = session.inbox.begin(session.setting, call=call, awaits=self.sends)
        if now.setting.active:
            session.ran[id(self.reached)] = self.reached
        session.unseen.update(self.unseen)  # the session may be later than the trace
        found = self._numbers(now.number, now.sampled, now.setting)
        if self._devices > 1:
            self._begun[number] = [found] * (self._devices - 1)
        return found

    def _numbers(self, number: int, sampled: bool, setting: Setting) -> tuple[Any, ...]:
        rows = rows_of(self._keys, setting.rows)
        found = [x for data in setting.at(self._places) for x in data]
        return np.array(number % 2**31, np.int32), np.array(sampled, np.bool_), rows, *found


@dataclasses.dataclass(frozen=True)
class Where:
    """Where something was measured.

    Attributes:
        site: the key of the array: see `recordings.layers`.
        rank: how many leading axes are rows, one for each scan around the site.
        apart: whether each member of the ensemble sends its own figures; otherwise all send the
            same.
        part: whether the site returned it or received it.
    """

    site: str
    rank: int
    apart: bool
    part: str = OUTPUT

    def rows(self, found: Any, members: int) -> Any:
        """The measured arrays, rows of scans and members first, then the examples of vmaps."""
        lead = found.rows if isinstance(found, Summary) else found.shape[:-1]
        if len(lead) == self.rank:
            return found
        return jax.tree.map(lambda x: self._rows_first(x, members), found)

    def _rows_first(self, x: Any, members: int) -> Any:
        extra = x.ndim - 1 - self.rank
        if members and extra and not self.apart:
            x, extra = np.take(x, 0, axis=extra - 1), extra - 1
        return np.moveaxis(x, range(extra), range(self.rank, self.rank + extra)) if extra else x

    def summary(self, found: Summary, members: int) -> Summary:
        """A summary with its rows; without scans and members it has none."""
        found = self.rows(found, members)
        of_members = self.apart and members and found.rows == (members,)
        return found if self.rank or of_members or not found.rows else merge([found])


@dataclasses.dataclass(frozen=True, eq=False)
class Outputs:
    """Receives what a pass measured of its outputs. A program holds it: it has no arrays.

    Attributes:
        layout: how `[(summary, gauge)]` and the states were joined.
        where: the site of each of them.
        members: how many members of an ensemble send it together; 0 for none.
        states: the paths of the parameters whose samples end the message.
        differentiated: as in `Asked`, which fills it.
        apart: whether several devices send a message each.
    """

    session: int
    layout: Layout
    where: tuple[Where, ...]
    members: int
    states: tuple[str, ...]
    differentiated: Set[str]
    call: WatchedCall | None
    apart: bool

    def __call__(self, ticket: Any, *arrays: Any) -> None:
        _receive(self.session, ticket, arrays, self._read)

    def _read(self, arrays: Arrays, sent: Sent) -> None:
        measured, states = taken_apart(self.layout, arrays)
        for i, name in enumerate(self.states):
            sent.states.setdefault(name, states[..., i, :])
        sent.calls.append(self.call)
        sent.differentiated.update(self.differentiated)
        sent.members = max(sent.members, self.members)
        for where, (summary, vector) in zip(self.where, measured, strict=True):
            if not self.apart or np.any(summary.bins):  # else another device sends it
                sent.add(where.site, where.part, where.summary(summary, self.members))
            # the figures of a site are those of its main array
            if where.part == OUTPUT and not leaf_of(where.site)[1]:
                sent.gauges.setdefault(where.site, []).append(where.rows(vector, self.members))


@dataclasses.dataclass(frozen=True, eq=False)
class Cotangents:
    """Receives what a pass measured of its cotangents; like `Outputs`."""

    session: int
    layout: Layout
    where: tuple[Where, ...]
    members: int

    def __call__(self, ticket: Any, *arrays: Any) -> None:
        _receive(self.session, ticket, arrays, self._read, GRADIENT)

    def _read(self, arrays: Arrays, sent: Sent) -> None:
        found = taken_apart(self.layout, arrays)
        for where, summary in zip(self.where, found, strict=True):
            if np.any(summary.bins):  # else no cotangent reached it
                sent.add(where.site, GRADIENT, where.summary(summary, self.members))


@dataclasses.dataclass(frozen=True)
class Ended:
    """Ends the pass under way when the programs started before have ended, and notes its number."""

    session: int

    def __call__(self) -> None:
        _safely(self.session, lambda found: found.ends.append(found.inbox.end_pass()), lambda: None)


Arrays = list[np.ndarray]


def _receive(
    session: int,
    ticket: Any,
    arrays: Sequence[Any],
    read: Callable[[Arrays, Sent], None],
    what: str = OUTPUT,
) -> None:
    """Keep a message, which is read later: a program may wait for this function, or still compute
    the arrays.
    """

    def read_it(sent: Sent) -> None:
        with suppress(jax.errors.JaxRuntimeError):  # the program has failed: who called it knows
            here = jax.device_get(list(arrays))
            _safely(session, lambda _: read(here, sent), lambda: None)

    number, message = int(np.ravel(ticket)[0]), Message(read_it, arrays)
    _safely(session, lambda found: found.inbox.receive(number, message, what), lambda: None)
