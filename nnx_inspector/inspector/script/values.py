"""Answers requests for a site's values, one after the other, each from one pass of the loop.

All of it is done by the thread that looks for requests. Invariant: nothing is asked of the loop
while there is no request, and the values are those of the pass that is named with them.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import jax
import numpy as np
from flax import nnx

from nnx_inspector.errors import InspectorError, reply_text
from nnx_inspector.hooks.operations.attention import is_pattern
from nnx_inspector.hooks.sites import closest_keys, module_sites, site_key, split_operation
from nnx_inspector.inspector.values.array_cache import SiteArray
from nnx_inspector.inspector.values.array_reader import (
    array_messages,
    has_convolutions,
    module_key,
    skipped_notes,
)
from nnx_inspector.inspector.values.axes import CallContext, names_of_value
from nnx_inspector.live.inbox import WatchedPass
from nnx_inspector.live.programs.value_request import MOST_MISSES, CallValues, ValueRequest
from nnx_inspector.live.session import Session
from nnx_inspector.perturbations.perturbed import without_layers
from nnx_inspector.program.function import WatchedCall
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.screen.control.folder import write_values
from nnx_inspector.screen.control.values import MOST_BYTES, pack_values
from nnx_inspector.typing import Value

MOST_WAITING: Final = 16
"""How many requests wait for the one under way."""
NOT_IN_JOB: Final = (
    "a job of several processes sends no values, because each process has only a part of them and "
    "all would have to run another program at the same step. Read them in the script, in every "
    "process: nni.capture."
)


class ValueAnswer(NamedTuple):
    """What became of a request: why it failed, or the step whose values were sent."""

    number: int
    why: str
    step: int
    text: str


class ValueRequests:
    """The requests for values to one run.

    Args:
        start: the number of the first step.
        learn: called with a pass before its values are described.
    """

    def __init__(
        self,
        session: Session,
        recording: Recording,
        *,
        start: int,
        learn: Callable[[WatchedPass], object],
    ):
        self._session, self._recording, self._start = session, recording, start
        self._learn = learn
        # as they are now: while a program of the loop ends, nnx takes the attributes of modules out
        self._modules = {
            site_key(one.path): _copy_of(one.module) for one in module_sites(session.model)
        }
        self._spatial = has_convolutions(self._modules.values())
        self._waiting = deque[protocol.ReadSite]()
        self._current: protocol.ReadSite | None = None

    def ask(self, message: protocol.ReadSite) -> None:
        """Take a request, which `advance` answers.

        Raises:
            ValueError: there is no such site or example.
            InspectorError: too many requests wait, or the run is a job of several processes.
        """
        if self._session.group is not None:
            raise InspectorError(NOT_IN_JOB)
        known = list(dict.fromkeys([*self._session.keys, *self._recording.sites]))
        if without_layers(message.site)[0] not in known:
            near = ", ".join(map(repr, closest_keys(message.site, known)))
            raise ValueError(f"this run measures no site {message.site!r}. The closest are {near}.")
        if message.example is not None and message.example < 0:
            raise ValueError(f"example must be 0 or more, got {message.example}.")
        if len(self._waiting) >= MOST_WAITING:
            raise InspectorError(f"{MOST_WAITING} requests for values wait already.")
        self._waiting.append(message)

    def advance(self, folder: str, run: str) -> ValueAnswer | None:
        """Do what can be done by now; returns what became of a request."""
        asked, now = self._session.value_request, self._current
        if self._session.group is not None:  # known with the first program, perhaps
            given = [*([] if now is None else [now]), *self._waiting]
            self._current, self._waiting = None, deque(given[1:])
            return ValueAnswer(given[0].id, NOT_IN_JOB, 0, "") if given else None
        if now is None or asked is None:
            self._begin()
            return None
        begun, found = self._session.inbox.count, asked.found
        if asked.is_searching and asked.since is not None and asked.is_missed(begun):
            first = self._start + asked.since
            steps = f"{first} to {first + MOST_MISSES - 1}"
            asked.problem = f"{asked.site!r} was not called in steps {steps}."
        if found is not None and begun <= found.number + 1:
            return None  # more of that pass may come
        if not asked.problem and (found is None or not all(m.is_here for m in found.messages)):
            return None
        self._current = self._session.value_request = None
        step, why = self._start + (0 if found is None else found.number), asked.problem
        if found is not None:
            try:
                write_values(folder, now.id, self._pack(now, found, run, step))
            except Exception as error:  # noqa: BLE001 - it is the answer
                why = reply_text(error)
        example = "" if now.example is None else f", example={now.example}"
        return ValueAnswer(now.id, why, step, f"run.values({now.site!r}{example})")

    def _begin(self) -> None:
        if self._waiting:
            self._current = now = self._waiting.popleft()
            site, _ = without_layers(now.site)
            self._session.value_request = ValueRequest(site, now.example, most=MOST_BYTES)

    # ---------------------------------------------------------------- in the file

    def _pack(self, now: protocol.ReadSite, one: WatchedPass, run: str, step: int) -> bytes:
        site, layers = without_layers(now.site)
        calls = [call for call in one.sent.values if np.any(_layer_of(call.ran, layers))]
        if not one.sent.values:
            raise InspectorError(f"the values of {now.site!r} could not be read.")
        if not calls:
            _require_layers(one.sent.values[0], layers, now.site)
            raise InspectorError(f"{now.site!r} is in a branch that step {step} did not take.")
        self._learn(one)
        batch = 1 if now.example is not None else _batch_of(one.sent.calls)
        held: list[SiteArray] = []
        for number, call in enumerate(calls):
            _require_layers(call, layers, now.site)
            for name, value, mapped in zip(call.names, call.values, call.mapped, strict=True):
                axes = self._axes(site, call, value, mapped, batch)[len(layers) :]
                held.append(SiteArray(len(held), number, name, value[layers], axes))
        notes = skipped_notes((n, _layer_of(call.ran, layers)) for n, call in enumerate(calls))
        alone = "" if now.example is None else f", example {now.example} alone"
        shown = protocol.Arrays(
            request=now.id,
            site=now.site,
            part="output",
            clean=False,
            parts=("output",),
            arrays=array_messages(held),
            perturbed=one.perturbed,
            source=f"Step {step} of the run{alone}.",
            notes=notes,
        )
        return pack_values(run, step, shown, [np.asarray(one.value) for one in held])

    def _axes(
        self, site: str, call: CallValues, value: Value, mapped: int, batch: int | None
    ) -> tuple[str, ...]:
        context = CallContext(
            module=self._modules.get(module_key(split_operation(site)[0])),
            loops=call.loops,
            members=call.members,
            mapped=mapped,
            stacked=site in self._session.stacks,
            batch=batch,
            spatial=self._spatial,
            attends=is_pattern(site),
        )
        return names_of_value(value.shape, value.dtype, context)


def _copy_of(module: nnx.Module) -> nnx.Module | None:
    """A shallow copy of a module; None if it cannot be copied."""
    try:
        return copy.copy(module)
    except Exception:  # noqa: BLE001 - a class of the user's: its axes have no names then
        return None


def _batch_of(calls: Sequence[WatchedCall | None]) -> int | None:
    """The length of the first axis of a pass's first array."""
    leaves = (
        x for call in calls if call is not None for x in jax.tree.leaves((call.args, call.kwargs))
    )
    return next((x.shape[0] for x in leaves if getattr(x, "shape", ())), None)


def _layer_of(ran: np.ndarray, layers: tuple[int, ...]) -> np.ndarray:
    rows = np.shape(ran)
    inside = len(layers) <= len(rows) and all(i < n for i, n in zip(layers, rows, strict=False))
    return np.asarray(ran)[layers] if inside else ran


def _require_layers(call: CallValues, layers: tuple[int, ...], site: str) -> None:
    rows = call.values[0].shape[: call.loops + call.members]
    if len(layers) > len(rows) or any(i >= n for i, n in zip(layers, rows, strict=False)):
        raise InspectorError(f"{site!r} is not a layer: the site has {list(rows)} of them here.")
