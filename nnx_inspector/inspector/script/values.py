"""Answers requests for a site's values, one after the other, each from one measured pass.

A pass hands its values over where it ends; what becomes of them is done by the thread that looks
for requests. Invariant: nothing is asked of the loop while there is no request, and the values are
those of the pass that is named with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from nnx_inspector.errors import InspectorError, reply_text
from nnx_inspector.hooks.inside.attention import is_pattern
from nnx_inspector.hooks.sites import closest, module_sites, of_operation, parse_key, site_key
from nnx_inspector.inspector.values.axes import Around, names_of_value
from nnx_inspector.inspector.values.opening import convolves
from nnx_inspector.live.inbox import Taken
from nnx_inspector.live.programs.asked import Asked, KeptCall
from nnx_inspector.live.session import Session
from nnx_inspector.perturbations.perturbed import without_layers
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.screen.control.folder import put_values
from nnx_inspector.screen.control.values import MOST_BYTES, packed

MOST_WAITING: Final = 16
"""How many requests wait for the one under way."""
SOUGHT_FOR: Final = 8
"""How many passes may go by without a program that calls the site."""


class Answered(NamedTuple):
    """What became of a request: why it failed, or the step whose values were sent."""

    number: int
    why: str
    step: int
    text: str


class ValueRequests:
    """The requests for values to one run.

    Args:
        start: the number of the first step.
        measure: called when the passes that are to be measured may be others than before.
        learn: called with a pass before its values are described.
    """

    def __init__(
        self,
        session: Session,
        recording: Recording,
        *,
        start: int,
        measure: Callable[[], None],
        learn: Callable[[Taken], object],
    ):
        self._session, self._recording, self._start = session, recording, start
        self._measure, self._learn = measure, learn
        self._waiting = deque[protocol.ReadSite]()
        self._now: protocol.ReadSite | None = None
        self._since = 0  # the first pass that has the values
        self._found: Taken | None = None

    @property
    def measures(self) -> bool:
        """Whether the next pass is to be measured for a request."""
        asked = self._session.asked
        return asked is not None and asked.is_ready and not asked.problem and self._found is None

    def ask(self, message: protocol.ReadSite) -> None:
        """Take a request, which `look` answers.

        Raises:
            ValueError: there is no such site or example.
            InspectorError: too many requests wait.
        """
        known = list(dict.fromkeys([*self._session.keys, *self._recording.sites]))
        if without_layers(message.site)[0] not in known:
            near = ", ".join(map(repr, closest(message.site, known)))
            raise ValueError(f"this run measures no site {message.site!r}. The closest are {near}.")
        if message.example is not None and message.example < 0:
            raise ValueError(f"example must be 0 or more, got {message.example}.")
        if len(self._waiting) >= MOST_WAITING:
            raise InspectorError(f"{MOST_WAITING} requests for values wait already.")
        self._waiting.append(message)

    def passed(self, one: Taken, *, ended: bool) -> None:
        """A measured pass, which may have the values; if it has `ended`, it has all that it will
        have.
        """
        asked = self._session.asked
        if asked is None or not self.measures or one.number < self._since:
            return
        if one.sent.values:
            self._found = one
        elif ended:
            asked.problem = f"{asked.site!r} was not called in step {self._start + one.number}."
        self._measure()

    def look(self, folder: str, run: str) -> Answered | None:
        """Do what can be done by now; returns what became of a request."""
        asked, now = self._session.asked, self._now
        if now is None or asked is None:
            self._begin()
            return None
        if asked.is_sought and self._session.inbox.count >= asked.since + SOUGHT_FOR:
            first = self._start + asked.since
            asked.problem = (
                f"{asked.site!r} was not called in steps {first} to {first + SOUGHT_FOR - 1}."
            )
        if not asked.problem and self._found is None:
            return None
        step = self._start + (0 if self._found is None else self._found.number)
        why = asked.problem
        if self._found is not None:
            try:
                put_values(folder, now.id, self._packed(now, self._found, run, step))
            except Exception as error:  # noqa: BLE001 - it is the answer
                why = reply_text(error)
        self._now = self._found = self._session.asked = None
        self._measure()
        example = "" if now.example is None else f", example={now.example}"
        return Answered(now.id, why, step, f"run.values({now.site!r}{example})")

    def _begin(self) -> None:
        if self._waiting:
            self._now = now = self._waiting.popleft()
            site, _ = without_layers(now.site)
            since, ready = self._session.inbox.count, self._ready
            how: Any = {"most": MOST_BYTES, "since": since, "ready": ready}
            self._session.asked = Asked(site, now.example, **how)

    def _ready(self) -> None:
        self._since = self._session.inbox.count
        self._measure()

    # ---------------------------------------------------------------- in the file

    def _packed(self, now: protocol.ReadSite, one: Taken, run: str, step: int) -> bytes:
        site, layers = without_layers(now.site)
        calls = [call for call in one.sent.values if np.any(call.ran)]
        if not calls:
            raise InspectorError(f"{site!r} is in a branch that step {step} did not take.")
        self._learn(one)
        batch = 1 if now.example is not None else _batch_of(one.sent.calls)
        held: list[protocol.HeldArray] = []
        arrays: list[Any] = []
        for number, call in enumerate(calls):
            names = zip(call.names, call.values, call.mapped, strict=True)
            for name, value, mapped in names:
                axes = self._axes(site, call, value, mapped, batch)
                value, axes = _layer(value, layers, now.site, call), axes[len(layers) :]
                arrays.append(value)
                held.append(
                    protocol.HeldArray(
                        number=len(held),
                        call=number,
                        name=name,
                        shape=value.shape,
                        dtype=value.dtype.name,
                        axes=axes,
                        bytes=value.nbytes,
                    )
                )
        notes = [
            f"Call {number} did not take place in some iterations, which show zeros."
            for number, call in enumerate(calls)
            if not np.all(call.ran)
        ]
        alone = "" if now.example is None else f", example {now.example} alone"
        shown = protocol.Arrays(
            request=now.id,
            site=now.site,
            part="output",
            clean=False,
            parts=("output",),
            arrays=tuple(held),
            perturbed=one.perturbed,
            source=f"Step {step} of the run{alone}.",
            notes=tuple(notes),
        )
        return packed(run, step, shown, arrays)

    def _axes(
        self, site: str, call: KeptCall, value: Any, mapped: int, batch: int | None
    ) -> tuple[str, ...]:
        model = self._session.model
        path = site_key(parse_key(of_operation(site)[0])[0])
        module = next((x.module for x in module_sites(model) if site_key(x.path) == path), None)
        around = Around(
            module=module,
            loops=call.loops,
            members=call.members,
            mapped=mapped,
            stacked=site in self._session.stacks,
            batch=batch,
            spatial=convolves(model),
            attends=is_pattern(site),
        )
        return names_of_value(value.shape, value.dtype, around)


def _batch_of(calls: Sequence[Any]) -> int | None:
    """The length of the first axis of a pass's first array."""
    leaves = (
        x for call in calls if call is not None for x in jax.tree.leaves((call.args, call.kwargs))
    )
    return next((x.shape[0] for x in leaves if getattr(x, "shape", ())), None)


def _layer(value: Any, layers: tuple[int, ...], site: str, call: KeptCall) -> Any:
    rows = value.shape[: call.loops + call.members]
    if len(layers) > len(rows) or any(i >= n for i, n in zip(layers, rows, strict=False)):
        raise InspectorError(f"{site!r} is not a layer: the site has {list(rows)} of them here.")
    return value[layers]
