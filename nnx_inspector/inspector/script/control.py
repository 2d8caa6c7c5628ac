"""Carries out what another process asks of a loop that `nni.watch` records.

A thread looks for requests, so that a step costs nothing. A perturbation acts from the next pass
on. Invariant: no request raises into the loop, each is answered in the recording, and what was done
to the run is in the recording too.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from nnx_inspector.errors import InspectorError, reply_text
from nnx_inspector.inspector.commands import perturbation_of
from nnx_inspector.inspector.script.steering import Steering
from nnx_inspector.inspector.script.values import ValueRequests
from nnx_inspector.live.inbox import WatchedPass
from nnx_inspector.live.session import Session
from nnx_inspector.live.steps import check_every
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.screen.control.folder import Path, create_folder, remove_folder, take_requests
from nnx_inspector.screen.control.state import CONTROL, ControlState
from nnx_inspector.screen.python_text import PerturbationMessages, text_of

PAUSE = 0.5
"""Seconds between two looks for requests."""
MOST_ANSWERS = 64
"""How many answers the recording has, the newest ones."""


class Control:
    """What another process has asked of a run.

    Args:
        path: the file of the recording.
        steering: what the run is steered by.
        start: the number of the first step.
        failed: called with a sentence if no more requests can be read.
        learn: called with a pass before it is described.

    Raises:
        InspectorError: others may write into the folder of the requests.
        OSError: the folder cannot be made.
    """

    def __init__(
        self,
        path: Path,
        session: Session,
        recording: Recording,
        *,
        steering: Steering,
        start: int,
        failed: Callable[[str], object],
        learn: Callable[[WatchedPass], object],
    ):
        self._failed, self._steering = failed, steering
        self._session, self._recording = session, recording
        self._showing = PerturbationMessages()
        self._published: ControlState | None = None
        self._values = ValueRequests(session, recording, start=start, learn=learn)
        self._answers: dict[int, str] = {}
        self._run = secrets.token_hex(8)
        self._folder = create_folder(path)
        self._publish()
        self._closed, self._lock = threading.Event(), threading.RLock()

    def start(self) -> None:
        """Take requests from now on."""
        thread = threading.Thread(target=self._poll, name="nnx_inspector.control", daemon=True)
        thread.start()

    def close(self) -> None:
        """Take no more requests; called again, it does nothing."""
        self._closed.set()
        with self._lock:
            if self._run:
                self._run, self._session.value_request = "", None
                remove_folder(self._folder)
                self._publish()

    def _handle_requests(self) -> None:
        """Carry out what was asked."""
        with self._lock:
            if not self._run:  # closed since, and the folder is gone
                return
            answers: dict[int, str] = {}
            steering = self._steering
            for message in take_requests(self._folder, self._run):
                try:
                    with steering.lock:
                        text = self._carry_out(message)
                        if text is not None:
                            answers[message.id] = ""
                            steering.apply(f"run.{text.removeprefix('insp.')}")
                except Exception as error:  # noqa: BLE001 - it is the answer
                    answers[message.id] = reply_text(error)
            found = self._values.advance(self._folder, self._run)
            if found is not None:
                answers[found.number] = found.why
                if not found.why:
                    steering.done.append((found.step, found.text))
            self._answers = dict([*self._answers.items(), *answers.items()][-MOST_ANSWERS:])
            self._publish()

    def _poll(self) -> None:
        while not self._closed.wait(PAUSE):
            try:
                self._handle_requests()
            except OSError as error:
                self._failed(f"The run takes no more requests: {error}.")
                self.close()  # a later request is then refused at once

    def _publish(self) -> None:
        steering = self._steering
        with steering.lock:
            apart, handles = self._session.disagreement, steering.handles.all()
            waits = bool(steering.waiting) and not apart
            steering.handles.set_idle({one.id: apart for one in handles} if apart else {})
            state = ControlState(
                run=self._run,
                every=steering.every,
                perturbations=self._showing.of(handles, pending=waits),
                answers=self._answers,
                done=tuple(steering.done),
            )
        if state != self._published:
            self._published = state
            self._recording.keep_table(CONTROL, state.to_columns())

    def _carry_out(self, message: object) -> str | None:
        """Do what is asked; returns it as Python, None if it is answered later."""
        steering, session, handles = self._steering, self._session, self._steering.handles
        if session.disagreement:
            raise InspectorError(
                f"{session.disagreement}: no process measures or perturbs it any more."
            )
        one = perturbation_of(message, handles)
        text = text_of(message, handles.all(), one)
        match message:
            case protocol.SetEvery():
                steering.every = check_every(message.every)
                text = f"every = {steering.every}"
            case protocol.MeasureNext():
                steering.measure_next()
                text = "measure_next()"
            case protocol.ReadSite():
                self._values.ask(message)
                return None
            case protocol.Perturb():
                steering.add(message.site, one, enabled=True)
            case protocol.Adjust():
                handle = handles.get(message.perturbation)
                handles.change(handle, enabled=message.enabled, perturbation=one)
            case protocol.Remove():
                handles.get(message.perturbation).remove()
            case protocol.SwitchAll():
                handles.switch_all(message.enabled)
            case _:
                raise TypeError(f"A run takes no {type(message).__name__}.")
        return text
