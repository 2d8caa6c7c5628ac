"""Which calls begin a pass, where a loop does not mark its steps, and which passes are measured.

A pass lasts from one call of the model to the next. Where no program calls the model, it lasts from
one run of a program to the next: of the first program, the leader. Other calls join the pass under
way: an auxiliary loss on a layer, a second program, a module that a backward pass calls again. No
rule fits every loop. So a program that runs again and again within a pass becomes the leader, and a
call that no measured pass has is measured on its own. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

MODEL = ""


class Program(NamedTuple):
    """What tells the programs of a loop apart.

    The training steps of a generator and of a discriminator may call the same parts. They
    differentiate different ones. An evaluation differentiates none.

    Attributes:
        sites: what it calls, not within each other, in the order of its trace.
        graded: the sites whose gradients it computes too.
    """

    sites: tuple[str, ...]
    graded: frozenset[str] = frozenset()


Key = tuple[str, Program]
"""A site as one of a program's calls."""

MODEL_PROGRAM = Program((MODEL,))
"""Leads where the calls of the model are the passes, in whatever program."""


class TopLevelCall(NamedTuple):
    """A call of a module that is not within another one's.

    Attributes:
        site: the module that is called.
        program: the program that calls it.
        starts: whether it is the first call of a run of the program; None if that is not known.
    """

    site: str = MODEL
    program: Program = MODEL_PROGRAM
    starts: bool | None = None

    @property
    def key(self) -> Key:
        return self.site, self.program

    @property
    def leads(self) -> bool:
        """Whether the program calls the model, and this not after it."""
        sites = self.program.sites
        return MODEL in sites and sites.index(self.site) <= sites.index(MODEL)


MODEL_CALL = TopLevelCall()


RUNS_TO_LEAD = 4
"""With one run more than these in a pass, a program that has joined it leads. A program that has
led so many passes leads on when the model is called."""


_NO_RUNS: Mapping[Program, int] = {}
_NO_MISSES: Mapping[Key, int] = {}
_NO_KEYS: frozenset[Key] = frozenset()
_NO_SITES: frozenset[str] = frozenset()


class PassState(NamedTuple):
    """The pass under way. A tuple: an unmeasured step of a fast loop makes one.

    Attributes:
        begun: how many passes have begun.
        leader: the program whose runs are the passes, or `MODEL_PROGRAM`; None before the first
            call.
        led: how many passes it has begun.
        openers: the programs that run before the model is called.
        called: the calls of this pass; None if the next call begins another.
        sites: their sites.
        runs: how often each program has run in this pass.
        setting: the perturbations in force, from its beginning to its end.
        missed: how many passes have gone by with a call since it was measured.
        alone: the calls that are measured although the pass is not.
    """

    begun: int = 0
    leader: Program | None = None
    led: int = 0
    openers: frozenset[Program] = frozenset()
    called: frozenset[Key] | None = None
    sites: frozenset[str] = _NO_SITES
    runs: Mapping[Program, int] = _NO_RUNS
    setting: object = None
    missed: Mapping[Key, int] = _NO_MISSES
    alone: frozenset[Key] = _NO_KEYS

    def measures(self, call: TopLevelCall, every: int) -> bool:
        """Whether a call of this pass is measured: those of pass 0, `every`, 2 * `every` are."""
        return every > 0 and ((self.begun - 1) % every == 0 or call.key in self.alone)

    def may_measure(self, calls: Sequence[TopLevelCall], setting: object, every: int) -> bool:
        """Whether one of the next calls is measured."""
        if every < 1:
            return False
        most = len(calls)  # so many passes may begin
        soon = -(self.begun - 1) % every <= most or self.alone
        if not soon and max(self.missed.values(), default=0) + most < every:
            return False
        now = self
        for call in calls:
            now = now.after(call, setting, every)
            if now.measures(call, every):
                return True
        return False

    def after(self, call: TopLevelCall, setting: object, every: int) -> PassState:
        """The pass that this call belongs to: this one, or the next."""
        starts = self._starts(call)
        leader, led, openers = self._led(call, starts)
        count, called, sites, runs = self.begun, self.called, self.sites, self.runs
        missed, alone, key, program = self.missed, self.alone, call.key, call.program
        ends = setting is not self.setting or self._ends(call, starts, leader, openers)
        if called is None or ends:
            count, led = count + 1, led + 1
            called, sites, runs, alone = _NO_KEYS, _NO_SITES, _NO_RUNS, _NO_KEYS
        if starts:
            runs = {**runs, program: runs.get(program, 0) + 1}
        if key not in called:
            before = missed.get(key, 0)
            if before >= every:
                alone |= {key}
            measured = every > 0 and (key in alone or (count - 1) % every == 0)
            missed = {**missed, key: 0 if measured else before + 1}
            called, sites = called | {key}, sites | {call.site}
        return PassState(count, leader, led, openers, called, sites, runs, setting, missed, alone)

    def ended(self) -> PassState:
        """With the next call, another pass begins."""
        return self._replace(called=None, sites=_NO_SITES)

    def _starts(self, call: TopLevelCall) -> bool:
        """Whether a call is the first of a run of its program."""
        if call.starts is not None:
            return call.starts
        # the model may be in a branch that this run does not take
        first = next((site for site in call.program.sites if site != MODEL), MODEL)
        return call.site == first and (first in self.sites or call.program not in self.runs)

    def _led(self, call: TopLevelCall, starts: bool) -> tuple[Program, int, frozenset[Program]]:
        """The leader after a call, how many passes it has begun, and the openers."""
        leader, led, openers = self.leader, self.led, self.openers
        if leader is None:
            return (MODEL_PROGRAM if MODEL in call.program.sites else call.program), led, openers
        if call.site == MODEL and leader != MODEL_PROGRAM and led < RUNS_TO_LEAD:
            return MODEL_PROGRAM, led, openers | {leader}
        if starts and self.runs.get(call.program, 0) >= RUNS_TO_LEAD:
            of_models = MODEL in self.sites and MODEL in call.program.sites
            return (MODEL_PROGRAM if of_models else call.program), RUNS_TO_LEAD, openers
        return leader, led, openers

    def _ends(
        self, call: TopLevelCall, starts: bool, leader: Program, openers: frozenset[Program]
    ) -> bool:
        """Whether a call begins the next pass."""
        if leader != MODEL_PROGRAM:
            return starts and call.program == leader
        if MODEL not in self.sites:
            return False
        if call.program in openers:
            return starts
        # of calls without a known order, only one that the pass has already
        return call.leads and (call.starts is not None or call.site in self.sites)
