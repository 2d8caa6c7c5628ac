"""The perturbations of a job of several processes: every process applies those of process 0.

Process 0 describes its perturbations as a text, by name and numbers, and each process makes the
same setting of it. What a text cannot hold, an array or a function, each process must have added
itself before the loop. Invariant: equal texts give equal programs, whatever was switched before.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import jax

from nnx_inspector._compat.processes import spans_processes
from nnx_inspector.errors import InspectorError
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.handles import Handle, Handles
from nnx_inspector.inspector.passes.pass_request import PassRequest
from nnx_inspector.live.programs.process_group import form_process_group
from nnx_inspector.live.session import JobExchange, Session
from nnx_inspector.perturbations.places import AnyPerturbation, Setting, data_of
from nnx_inspector.screen.python_text import parse_perturbation

NOT_SENT = (
    "the other processes of this job do not have its array or function, which cannot be sent to "
    "them while the loop runs: add it before the loop in every process, and switch it then"
)

ONLY_PROCESS_0 = (
    "What this process has switched or added does not act: in a job, all processes perturb what "
    "process 0 does, from its next measured step on. Switch it there, or in all of them."
)


@dataclasses.dataclass(frozen=True)
class _SharedPerturbation:
    """A perturbation of all processes.

    Attributes:
        key: tells it apart from the others, in all processes.
        kind: the Python that makes it; or a description, where Python text cannot hold its array.
    """

    key: int
    site: str
    sites: tuple[str, ...]
    rows: tuple[int, ...]
    kind: str
    on: bool


class SharedPerturbations(JobExchange):
    """Makes the perturbations of one loop alike in all processes.

    Args:
        handles: the perturbations of this process.
        take_over: called with what all processes perturb from the coming step on.
        lock: held meanwhile.
        warns: called with what cannot act, and why.
    """

    def __init__(
        self,
        handles: Handles,
        take_over: Callable[[Session, Setting], object],
        *,
        lock: AbstractContextManager[object],
        warns: Callable[[str], object],
    ):
        self._handles, self._take_over = handles, take_over
        self._lock, self._warns = lock, warns
        self._keys: dict[int, int] = {}  # the key of a handle by its number
        self._at_start: dict[tuple[int, str], AnyPerturbation] = {}  # by key and kind
        self._wished: dict[tuple[int, str], AnyPerturbation] = {}
        self._agreed = ""
        self.unsent: set[int] = set()  # the numbers of handles that cannot act
        self._kinds: dict[int, tuple[AnyPerturbation, str]] = {}  # by the number of a handle

    def initial_wish(self) -> str:
        handles = self._handles.all()
        self._keys = {one.id: key for key, one in enumerate(handles)}
        self._at_start = {(self._keys[h.id], self._kind(h)): h.perturbation for h in handles}
        self._agreed = self.wish()
        return self._agreed

    def wish(self) -> str:
        found, unsent = list[_SharedPerturbation](), dict[int, str]()
        self._wished = {}
        for handle in self._handles.all():
            key = self._keys.setdefault(handle.id, max(self._keys.values(), default=-1) + 1)
            one, kind = handle.perturbation, self._kind(handle)
            if not one.python() and (key, kind) not in self._at_start:
                unsent[handle.id] = NOT_SENT
                if handle.id not in self.unsent:
                    self._warns(f"{one.kind_name} does not act: {NOT_SENT}.")
                continue
            self._wished[key, kind] = one
            found.append(
                _SharedPerturbation(
                    key, handle.site, handle.sites, handle.rows, kind, handle.enabled
                )
            )
        self._handles.set_idle(unsent)
        self.unsent = set(unsent)
        return json.dumps([dataclasses.astuple(one) for one in found])

    def _kind(self, handle: Handle) -> str:
        one = handle.perturbation
        if handle.id not in self._kinds or self._kinds[handle.id][0] is not one:
            self._kinds[handle.id] = one, one.python() or _fingerprint(one)
        return self._kinds[handle.id][1]

    def apply_wishes(self, session: Session, said: Mapping[int, str], /) -> None:
        """Take over what process 0 perturbs from the coming step on."""
        text = said[0]
        those = [
            _SharedPerturbation(key, site, tuple(sites), tuple(rows), kind, on)
            for key, site, sites, rows, kind, on in json.loads(text)
        ]
        made = Handles()
        for one in those:
            perturbation = self._perturbation(one)
            handle = made.add(one.site, one.sites, perturbation, one.rows)
            handle.enabled = one.on
        with self._lock:
            self._take_over(session, made.setting())
        if jax.process_index():
            if self.wish() not in (self._agreed, text):
                session.notes.append(ONLY_PROCESS_0)
            self._replace_own(those)
        self._agreed = text

    def _perturbation(self, one: _SharedPerturbation) -> AnyPerturbation:
        at = one.key, one.kind
        own = self._at_start if jax.process_index() else self._wished
        found = own.get(at, self._at_start.get(at))
        return parse_perturbation(one.kind) if found is None else found

    def _replace_own(self, those: list[_SharedPerturbation]) -> None:
        """Replace this process's own perturbations by those of process 0."""
        handles, numbers = self._handles, {key: n for n, key in self._keys.items()}
        own = {one.id: one for one in handles.all()}
        for one in those:
            handle = own.pop(numbers.get(one.key, -1), None)
            wanted = self._perturbation(one)
            if handle is not None and _must_be_replaced(handle, one, wanted):
                handle.remove()
                handle = None
            if handle is None:
                handle = handles.add(one.site, one.sites, wanted, one.rows)
                self._keys[handle.id] = one.key
            elif self._kind(handle) != one.kind:
                handle.perturbation = wanted
            handle.enabled = one.on
        for handle in own.values():
            handle.remove()


def agree_on(core: Core, request: PassRequest) -> None:
    """Let a pass that was asked for begin: in a job, if all processes ask for the same.

    Raises:
        InspectorError: they do not, or the arguments were donated to a step.
    """
    request.require_there()
    if jax.process_count() == 1:
        return
    call = request.call(core.model, core.modes.switches())
    with call.configuration.applied():
        if not spans_processes(call.arrays):
            return
    warns = functools.partial(core.notice, "warning")
    shared = SharedPerturbations(core.handles, lambda *_: None, lock=core.lock, warns=warns)
    opening = {"modes": str(call.switches), "perturbations": shared.initial_wish()}
    asks = f"insp.{request.kind}"
    group = form_process_group({"call": asks, **opening}, do=f"call {asks}", does="makes a pass")
    if group.disagreement:
        raise InspectorError(
            f"{group.disagreement}, so none makes it. Call insp.run and insp.step at the same "
            f"lines in every process of a job, with the same modes and perturbations."
        )


def _must_be_replaced(handle: Handle, one: _SharedPerturbation, wanted: AnyPerturbation) -> bool:
    """Whether a handle cannot be set to what it should be."""
    same = (handle.site, handle.sites, handle.rows) == (one.site, one.sites, one.rows)
    return not same or type(handle.perturbation) is not type(wanted)


def _fingerprint(one: AnyPerturbation) -> str:
    """What tells a perturbation from others whose numbers no text has."""
    numbers = hashlib.sha256()
    for array in data_of(one):
        numbers.update(array.tobytes())
    return f"{one.python(short=True)} {numbers.hexdigest()[:12]}"
