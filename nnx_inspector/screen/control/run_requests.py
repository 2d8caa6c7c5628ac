"""What the browser's requests to a recorded run do: they look at it, or are sent to it.

Values that the run has sent stay here as long as they are on screen. Knows no model, and imports no
jax.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import ClassVar, Final, Protocol

import numpy as np

from nnx_inspector.errors import InspectorError
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.screen.control.folder import REQUESTS
from nnx_inspector.screen.control.values import SiteValues
from nnx_inspector.screen.frames import casts_message
from nnx_inspector.screen.presenter import Presenter
from nnx_inspector.screen.requests import Answer, RequestHandler
from nnx_inspector.screen.values.blocks import norms
from nnx_inspector.screen.values.message import values_message

NEEDS_MODEL: Final = (
    "this is a recorded run, and the model is not here. Make an nni.Inspector of the model."
)
OUTPUT_ONLY: Final = (
    "a run sends what its sites return in its own steps: there is only the output, with the "
    "perturbations that are on."
)


class FollowedRun(Protocol):
    """A recorded run."""

    @property
    def steers(self) -> bool: ...
    @property
    def recording(self) -> Recording: ...
    @property
    def selected(self) -> str: ...
    @selected.setter
    def selected(self, site: str) -> None: ...
    def ask(self, request: protocol.Request) -> int: ...
    def values(self, site: str) -> SiteValues: ...


class RunRequests(RequestHandler):
    """Carries out the requests to a recorded run."""

    refusal: ClassVar[str] = NEEDS_MODEL
    threads: ClassVar[Mapping[type, str]] = {
        protocol.Compare: "comparing",
        protocol.Look: "comparing",
        protocol.ShowValues: "values",
        protocol.ReadValues: "windows",
        **dict.fromkeys(REQUESTS, "steering"),
    }

    def __init__(self, run: FollowedRun, view: Presenter):
        super().__init__(view)
        self._run = run
        self._numbers = itertools.count(1)
        self._arrays: dict[int, np.ndarray] = {}  # those on screen, by their numbers

    def _look(self, message: protocol.Look, _: object) -> Answer:
        if message.what != "casts":
            raise InspectorError(NEEDS_MODEL)
        return casts_message(self._run.recording, self._view.keys, message)

    def _show_values(self, message: protocol.ShowValues, _: object) -> Answer:
        if not self._run.steers:
            raise InspectorError(NEEDS_MODEL)
        if message.part != "output" or message.clean:
            raise InspectorError(OUTPUT_ONLY)
        found = self._run.values(message.site)
        numbers = [next(self._numbers) for _ in found.arrays]
        self._arrays = dict(zip(numbers, found.arrays, strict=True))
        pairs = zip(numbers, found.shown.arrays, strict=True)
        held = tuple(dataclasses.replace(one, number=number) for number, one in pairs)
        return dataclasses.replace(found.shown, request=message.id, arrays=held), None

    def _read_values(self, message: protocol.ReadValues, _: object) -> Answer:
        array = self._arrays.get(message.array)
        if array is None:
            raise InspectorError("these values are no longer here. Read them again.")
        over = message.norm_over
        return values_message(message, array if over == -1 else norms(array, over))


RunRequests.table = {
    protocol.Select: lambda c, m, _: setattr(c._run, "selected", m.site),
    protocol.ShowPass: lambda c, m, _: c._view.show_pass(m.number, m.site),
    protocol.Compare: RunRequests.compare,
    protocol.Look: RunRequests._look,
    protocol.ShowValues: RunRequests._show_values,
    protocol.ReadValues: RunRequests._read_values,
    **dict.fromkeys(REQUESTS, lambda c, m, _: (c._run.ask(m), None)[1]),
}
