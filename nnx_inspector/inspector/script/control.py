"""Carries out what another process asks of a loop that `nni.watch` records.

A thread looks for requests, so that a step costs nothing. A perturbation acts from the next pass
on. Invariant: no request raises into the loop, each is answered in the recording, and what was done
to the run is in the recording too.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from nnx_inspector.errors import reply_text
from nnx_inspector.hooks.sites import Only, Selection, nothing_selected
from nnx_inspector.inspector.commands import perturbation_of
from nnx_inspector.inspector.handles import Handles
from nnx_inspector.inspector.script.values import ValueRequests
from nnx_inspector.live.inbox import Taken
from nnx_inspector.live.session import Session
from nnx_inspector.live.steps import check_every
from nnx_inspector.perturbations.parameters import ParameterPerturbation
from nnx_inspector.perturbations.perturbed import chosen_layer
from nnx_inspector.perturbations.places import Known, require_known
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.screen import protocol
from nnx_inspector.screen.control.answers import CONTROL, Controlled
from nnx_inspector.screen.control.folder import Path, made, taken, unmade
from nnx_inspector.screen.python_text import Showing, text_of

PAUSE = 0.5
"""Seconds between two looks for requests."""
MOST_ANSWERS = 64
"""How many answers the recording has, the newest ones."""
MOST_DONE = 1000
"""How many of the requests that were carried out the recording lists, the newest ones."""
NO_ROOM = (
    "the programs of this run have no place for it: only Zero and Scale on outputs have one "
    "everywhere. Declare the others in the script: nni.watch(model, save=path, "
    "control={site: perturbation})"
)


class Control:
    """What another process has asked of a run.

    Args:
        path: the file of the recording.
        declared: site -> a perturbation that can be switched on; all are off at first.
        every: every so many passes are measured.
        start: the number of the first step.
        failed: called with a sentence if no more requests can be read.
        learn: called with a pass before it is described.

    Raises:
        InspectorError: others may write into the folder of the requests.
        TypeError, ValueError: a declared perturbation is none, or its site is not there.
        OSError: the folder cannot be made.
    """

    def __init__(
        self,
        path: Path,
        session: Session,
        recording: Recording,
        *,
        declared: Mapping[str, Known],
        every: int,
        start: int,
        failed: Callable[[str], object],
        learn: Callable[[Taken], object],
    ):
        self._failed, self._start = failed, start
        self._session, self._recording = session, recording
        self._handles, self._showing = Handles(), Showing()
        for site, perturbation in declared.items():
            self._add(site, perturbation, enabled=False)
        self._once: int | None = None  # the step that is measured because somebody asked
        self._values = ValueRequests(session, recording, start=start, learn=learn)
        self._answers: dict[int, str] = {}
        self._done = deque[tuple[int, str]](maxlen=MOST_DONE)
        self._run, self._every = secrets.token_hex(8), every
        self._folder = made(path)
        session.perturb(self._handles.setting())
        session.make_room()
        self._say()
        self._closed, self._lock = threading.Event(), threading.RLock()
        thread = threading.Thread(
            target=self._keep_looking, name="nnx_inspector.control", daemon=True
        )
        thread.start()

    def measured(self, step: int) -> None:
        """A step was measured: after the one that was asked for, go on as before."""
        if self._once is not None and step >= self._once:
            self._once = None
            self._session.inbox.every = self._every

    def close(self) -> None:
        """Take no more requests; called again, it does nothing."""
        self._closed.set()
        with self._lock:
            if self._run:
                self._run, self._session.asked = "", None
                unmade(self._folder)
                self._say()

    def _look(self) -> None:
        """Carry out what was asked."""
        with self._lock:
            answers: dict[int, str] = {}
            for message in taken(self._folder, self._run):
                step = self._next
                try:
                    text = self._carry_out(message)
                except Exception as error:  # noqa: BLE001 - it is the answer
                    answers[message.id] = reply_text(error)
                else:
                    if text is not None:
                        answers[message.id] = ""
                        self._done.append((step, f"run.{text.removeprefix('insp.')}"))
            found = self._values.look(self._folder, self._run)
            if found is not None:
                answers[found.number] = found.why
                if not found.why:
                    self._done.append((found.step, found.text))
            if answers:
                newest = [*self._answers.items(), *answers.items()][-MOST_ANSWERS:]
                self._answers = dict(newest)
                self._session.perturb(self._handles.setting())
                self._say()

    @property
    def _next(self) -> int:
        """The step that begins next."""
        return self._start + self._session.inbox.count

    def _keep_looking(self) -> None:
        while not self._closed.wait(PAUSE):
            try:
                self._look()
            except OSError as error:
                self._failed(f"The run takes no more requests: {error}.")
                return

    def _say(self) -> None:
        said = Controlled(
            run=self._run,
            every=self._every,
            perturbations=self._showing.of(self._handles.all(), pending=False),
            answers=self._answers,
            done=tuple(self._done),
        )
        self._recording.keep_table(CONTROL, said.to_columns())

    def _carry_out(self, message: object) -> str | None:
        """Do what is asked; returns it as Python, None if it is answered later."""
        one = perturbation_of(message, self._handles)
        text = text_of(message, self._handles.all(), one)
        match message:
            case protocol.SetEvery():
                self._every = check_every(message.every)
                self._session.inbox.every = self._every
                text = f"every = {self._every}"
            case protocol.MeasureNext():
                self._once = self._next
                self._session.inbox.every = 1
                text = "measure_next()"
            case protocol.ReadSite():
                self._values.ask(message)
                return None
            case protocol.Perturb():
                self._add(message.site, one, enabled=True)
            case protocol.Adjust():
                handle = self._handles.get(message.perturbation)
                self._handles.change(handle, enabled=message.enabled, perturbation=one)
            case protocol.Remove():
                self._handles.get(message.perturbation).remove()
            case protocol.SwitchAll():
                self._handles.switch_all(message.enabled)
            case _:
                raise TypeError(f"A run takes no {type(message).__name__}.")
        return text

    def _add(self, site: str, perturbation: Known, *, enabled: bool) -> None:
        if isinstance(require_known(perturbation), ParameterPerturbation):
            raise TypeError(
                f"{type(perturbation).__name__} changes parameters, which needs nni.Inspector."
            )
        only, rows = chosen_layer(site)
        handle = self._handles.add(site, self._sites(only), perturbation, rows)
        try:
            handle.enabled = enabled
            wanted = self._handles.setting()
            if enabled and not set(wanted.places) <= set(self._session.places):
                raise ValueError(f"{site or '(root)'!r} is not perturbed: {NO_ROOM}.")
        except BaseException:
            handle.remove()
            raise

    def _sites(self, only: Only) -> Iterable[str]:
        selection, keys = Selection(only), self._session.keys
        sites = [key for key in keys if selection.matches_key(key)]
        if not sites:
            raise ValueError(nothing_selected(selection, keys))
        return sites
