"""What a run is steered by: its perturbations, and which of its passes are measured.

In a job of several processes each has one of these, and all do what that of process 0 holds, from
the next measured step on: there they meet (see `live.programs.process_group`). Invariant: in a job
nothing changes but at a meeting. Does not read requests.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import jax

from nnx_inspector.hooks.sites import Only, Selection, no_match_text
from nnx_inspector.inspector.handles import Handles
from nnx_inspector.inspector.passes.shared_perturbations import SharedPerturbations
from nnx_inspector.live.session import JobExchange, Session
from nnx_inspector.perturbations.parameters import ParameterPerturbation
from nnx_inspector.perturbations.perturbed import chosen_layer
from nnx_inspector.perturbations.places import AnyPerturbation, has_room, require_perturbation

MOST_DONE: Final = 1000
"""How many of the things that were done are listed, the newest ones."""
NO_ROOM: Final = (
    "the programs of this run have no place for it: only Zero and Scale on outputs have one "
    "everywhere, unless another kind was added there before. Declare the others in the script: "
    "nni.watch(model, save=path, control={site: perturbation})"
)


class Steering(JobExchange):
    """The perturbations of a run, and which passes are measured.

    Args:
        declared: site -> a perturbation that can be switched on; all are off at first.
        every: every so many passes are measured.
        start: the number of the first step.
        warns: called with a sentence about what cannot act.

    Attributes:
        every: every so many passes are to be measured.
        done: what was done, as Python, each with the step from which on it acts.
        waiting: what a job does from its next measured step on.

    Raises:
        TypeError, ValueError: a declared perturbation is none, or its site is not there.
    """

    def __init__(
        self,
        session: Session,
        *,
        declared: Mapping[str, AnyPerturbation],
        every: int,
        start: int,
        warns: Callable[[str], object],
    ):
        self.handles, self.lock = Handles(), threading.RLock()
        self._session, self._start = session, start
        for site, perturbation in declared.items():
            self.add(site, perturbation, enabled=False)
        self.every, self._extra = every, 0  # the latter: how often the next pass was asked for
        self._sampled = every, 0  # what the session measures by now
        self.done, self.waiting = deque[tuple[int, str]](maxlen=MOST_DONE), list[str]()
        self._wished = 0  # how much of what waits is in the last wish
        perturb = Session.perturb
        self._shared = SharedPerturbations(self.handles, perturb, lock=self.lock, warns=warns)
        self._opens, self._perturbed = self._text(self._shared.initial_wish()), ""
        session.steering = self
        session.perturb(self.handles.setting())
        session.take_places()

    # ---------------------------------------------------------------- changing

    def add(self, site: str, perturbation: AnyPerturbation, *, enabled: bool) -> None:
        """Add a perturbation.

        Raises:
            TypeError, ValueError: it is none, its site is not there, or the run has no room for it.
        """
        if isinstance(require_perturbation(perturbation), ParameterPerturbation):
            raise TypeError(
                f"{type(perturbation).__name__} changes parameters, which needs nni.Inspector."
            )
        only, rows = chosen_layer(site)
        before = self.handles.layout
        handle = self.handles.add(site, self._sites(only), perturbation, rows)
        try:
            handle.enabled = enabled
            wanted = self.handles.setting()
            if enabled and not has_room(self._session.places, wanted.places):
                raise ValueError(f"{site or '(root)'!r} is not perturbed: {NO_ROOM}.")
        except BaseException:
            self.handles.undo_add(handle, before)  # or nothing would have room any more
            raise

    def _sites(self, only: Only) -> Iterable[str]:
        selection, keys = Selection(only), self._session.keys
        sites = [key for key in keys if selection.matches_key(key)]
        if not sites:
            raise ValueError(no_match_text(selection, keys))
        return sites

    def measure_next(self) -> None:
        """Let the next pass be measured too; in a job, the one after the next measured one."""
        self._extra += 1

    def apply(self, text: str) -> None:
        """Do what was changed, from now on or, in a job, later; `text` is the change as Python."""
        session = self._session
        if session.group is not None:
            self.waiting.append(text)
        else:
            self.done.append((self._next_step, text))
            session.perturb(self.handles.setting())
            self._sample(self.every, self._extra)

    @property
    def _next_step(self) -> int:
        """The step that begins next."""
        return self._start + self._session.inbox.count

    def _sample(self, every: int, extra: int, *now: int) -> None:
        """Change which passes are measured, `now` before all others."""
        if self._sampled != (every, extra):
            once = (1,) * (extra > self._sampled[1])
            self._session.inbox.sample(*now, *once, every)
            self._sampled = every, extra

    # ---------------------------------------------------------------- in a job

    def initial_wish(self) -> str:
        return self._opens

    def wish(self) -> str:
        with self.lock:
            self._wished = len(self.waiting)
            return self._text(self._shared.wish())

    def _text(self, perturbations: str) -> str:
        return json.dumps([self.every, self._extra, perturbations])

    def apply_wishes(self, session: Session, said: Mapping[int, str], /) -> None:
        """Do what process 0 wants. The pass that begins now is measured in any case."""
        every, extra, perturbations = json.loads(said[0])
        with self.lock:
            self.done.extend((self._next_step, text) for text in self.waiting[: self._wished])
            self.waiting, self._wished = self.waiting[self._wished :], 0
            if perturbations != self._perturbed:
                self._perturbed = perturbations
                self._shared.apply_wishes(session, {0: perturbations})
            self._sample(every, extra, session.inbox.every)
            if jax.process_index():
                self.every, self._extra = every, extra
