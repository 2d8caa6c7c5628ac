"""The parts of an inspector that have no public name, for tests of what only a browser or a thread
sees. This is the one place that knows where they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from nnx_inspector import Inspector
from nnx_inspector.background import Worker
from nnx_inspector.inspector.commands import Commands
from nnx_inspector.inspector.core import Core
from nnx_inspector.inspector.diagnosis import Diagnosis
from nnx_inspector.inspector.loops import Loops
from nnx_inspector.inspector.nnx.page import Pages
from nnx_inspector.inspector.passes.rerun import Reruns
from nnx_inspector.inspector.passes.sweeps import Sweeps
from nnx_inspector.inspector.studies.studies import Studies
from nnx_inspector.inspector.values.array_reader import ArrayReader
from nnx_inspector.live.session import Session
from nnx_inspector.screen import protocol
from nnx_inspector.screen.comm import Screen
from nnx_inspector.screen.presenter import Presenter
from nnx_inspector.screen.run import Run


class inside:
    """The parts of one inspector. Made where it is used: a kept one keeps the parts alive."""

    def __init__(self, insp: Inspector):
        self.core: Core = insp._core
        self.rerun: Reruns = insp._rerun  # begins the first pass, as the display in a notebook does
        self.loops: Loops = insp._loops
        self.commands: Commands = insp._commands  # answers what a click sends
        # each answers in a thread of its own, for which a test waits
        self.sweeps: Sweeps = insp._sweeps
        self.studies: Studies = insp._studies
        self.diagnosis: Diagnosis = insp._diagnosis
        self.pages: Pages = insp._pages

    @property
    def view(self) -> Presenter:
        """What the browser was told last."""
        return self.core.view

    @property
    def array_reader(self) -> ArrayReader:
        """Reads what is opened, an array or a slice of it."""
        return self.core.array_reader

    @property
    def notices(self) -> list[str]:
        """The texts that stand on screen, without those that always stand there."""
        return [one.text for one in self.view._notices]

    @property
    def state(self) -> protocol.State:
        """The small state as the next message will have it, while a loop runs too."""
        state = self.view._state()
        assert state is not None
        return state

    @property
    def waiting(self) -> list[str]:
        """What the screen says that it waits for."""
        return [one.what for one in self.core._snapshot()["waiting"]]

    @property
    def arming(self) -> Worker:
        """The thread that compiles ahead."""
        return self.rerun._compiler

    @property
    def session(self) -> Session:
        """The watched loop that runs."""
        session = self.loops._session
        assert session is not None
        return session


def receive(screen: Screen, message: Any) -> None:
    """A message, or whatever else a page may send as a header, comes from the browser."""
    header = protocol.to_header(message) if dataclasses.is_dataclass(message) else message
    screen._on_message(None, header, [])


def last_sent(screen: Screen) -> int:
    """The number of the last message that the browser has to acknowledge."""
    return screen._seq


def acknowledge(screen: Screen) -> None:
    """The browser has painted all that it was sent."""
    receive(screen, {"type": "ack", "seq": last_sent(screen)})


def shown_of(run: Run) -> Presenter:
    """What the browser was told last of a saved or followed run."""
    return run._view


def clicks_of(run: Run) -> Any:
    """What answers a click on it."""
    return run._requests


def snapshot_of(run: Run) -> dict[str, Any]:
    """What the next small state is made of."""
    return run._snapshot()
