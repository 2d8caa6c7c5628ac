"""Whether a watched loop calls the watched model, which of its perturbations act, and what it has
failed to record.

The first two are concluded only from measured steps whose programs have ended, and only after
several of them, because a model may be called now and then. Invariant: every statement was observed
in the steps that it names; an unknown is not stated. Does not record or show anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from nnx_inspector.hooks.sites import module_sites
from nnx_inspector.live.inbox import WatchedPass
from nnx_inspector.live.pass_start import GRADIENT, Reached
from nnx_inspector.live.programs.launches import CHOOSING
from nnx_inspector.live.programs.ownership import AMBIGUOUS, SPLIT_INSIDE
from nnx_inspector.live.session import Session
from nnx_inspector.perturbations.base import PartBase
from nnx_inspector.perturbations.places import AnyPerturbation, Place, misfit_clause, misfit_error
from nnx_inspector.recordings.facts import Uncalled

MEASURED = 3
"""A running loop is reported after this many measured steps without a call of the model."""
STEPS = 20
"""The steps that must have passed in all: another model, or an evaluation, may come first."""
NAMED = 5
"""How many sites a warning names; the others are counted."""


@dataclasses.dataclass(frozen=True)
class ExpectedPerturbation:
    """A perturbation that the steps should apply.

    Attributes:
        number: the number of its handle.
        perturbation: the perturbation, with the numbers that it has now.
        place: the place that it needs, unless it is a row.
        in_use: the place where it acts, None for a row.
        sites: the keys of its sites.
        of_gradient: whether it changes a gradient.
        compiling: whether the program with a place for it is not ready yet.
    """

    number: int
    perturbation: AnyPerturbation
    place: Place
    in_use: Place | None
    sites: tuple[str, ...]
    of_gradient: bool
    compiling: bool


@dataclasses.dataclass
class OtherCalls:
    """The other calls of the loop, counted while its programs are traced.

    Attributes:
        others: type -> calls of modules of the model's types that are not the model's.
        doubtful: type -> those of `others` that may be the model's after all.
        executables: calls of programs that were compiled ahead of time, or exported.
        twins: whether a program has two trees that may be the model.
        failure: why a program could not be read, in the words of the first error; "" if none.
    """

    others: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    doubtful: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    executables: int = 0
    twins: bool = False
    failure: str = ""

    def in_words(self, model: str, every: int) -> tuple[str, str]:
        """Two clauses: what was called instead of the model, and what to do about it."""
        if self.failure:
            return (
                f"the program could not be read ({self.failure})",
                "report this fault of nnx_inspector; the step itself ran as it is",
            )
        count = sum(self.others.values())
        them = f"{count} call{'s' * (count > 1)} of modules"
        if self.executables:
            return (
                "it calls a program that was exported or compiled ahead of time: no Python runs",
                "call the jitted function itself",
            )
        if self.twins:
            return AMBIGUOUS, SPLIT_INSIDE
        if model in self.doubtful:
            return (
                f"{them} of a {model} were seen that could not be attributed to it: their graphdef "
                f"was split before the loop, or they belong to a clone",
                f"split inside the watched loop (nnx.split in the step), or pass the {model} that "
                f"the step calls: insp.update(that), or nni.watch(model=that)",
            )
        if self.others:
            name = model if model in self.others else next(iter(self.others))
            return (
                f"{them} of another {name} were seen, which is a clone, a restored checkpoint or "
                f"a second model",
                "pass the object that the step calls: insp.update(that), or nni.watch(model=that)",
            )
        often = "" if every == 1 else f", or only in steps that are not measured (every={every})"
        return (
            "no call of any module of its types was seen",
            f"call it in the loop's own thread; it may be called in another one{often}",
        )


class Diagnostics:
    """What was seen in the measured steps (passes) of one loop.

    Args:
        before: how many passes the session had seen when the loop began.
        in_region: whether it is a region, which has steps only if `insp.tick` marks them.
    """

    def __init__(
        self, session: Session, every: int, first: int, *, before: int = 0, in_region: bool = False
    ):
        self._session, self._every, self._first = session, every, first
        self._model = type(session.model).__name__
        self._seen = OtherCalls()
        self._before, self._in_region = before, in_region
        self._steps = self._last = 0
        self._idle: dict[int, tuple[int, str]] = {}  # since when, and why
        self._acted: set[int] = set()
        self.misfits: dict[int, str] = {}  # why it did not fit a call
        self._now = False
        self.called = False

    def note(self, count: int) -> None:
        """Take over what the session saw, before it is cleared; `count` passes have begun."""
        session, seen = self._session, self._seen
        for found, into in ((session.unattributed, seen.others), (session.doubtful, seen.doubtful)):
            for name, calls in found.items():
                into[name] = into.get(name, 0) + calls
        session.doubtful.clear()
        failures = (text for text in session.errors if text.startswith(CHOOSING))
        seen.failure = seen.failure or next(failures, "")
        seen.executables += session.executables
        seen.twins |= any(why.startswith(AMBIGUOUS) for why in session.unseen.values())
        self._now = count > self._before
        self._before = count
        self.called |= self._now

    def step(self, step: int) -> None:
        """Count a measured step that has ended; `note` must have been called."""
        self._last = step
        self._steps += 1
        if self._now:  # start counting again: another object may be trained from here on
            self._steps, self._first, self._seen = 0, step + 1, OtherCalls()

    @property
    def _is_uncalled(self) -> bool:
        """Whether no call of the model has been seen, or none for some steps; unknown, and so not,
        in a loop that was left in its first step.
        """
        never = not self.called and (self._steps > 0 or self._in_region)
        return never or self._steps >= MEASURED

    @property
    def _strange(self) -> bool:
        seen = self._seen
        doubtful = self._model in seen.doubtful
        return bool(seen.executables or seen.twins or seen.failure or doubtful)

    def uncalled(self, *, over: bool) -> Uncalled | None:
        """The report if no measured step has called the model; None if one has, or if it is not
        certain yet.

        Args:
            over: whether the loop has ended.
        """
        if self._session.disagreement and not self.called:
            advice = "no process measures this loop, which runs as it is"
            return Uncalled(
                step=self._first,
                steps=self._steps,
                calls=0,
                what=self._session.disagreement,
                advice=advice,
            )
        long = self._steps >= MEASURED and (self._strange or self._last - self._first >= STEPS)
        if not (long or (over and not self.called)):
            return None
        if self._steps == 0 and not self._in_region:
            return None  # the loop was left in its first step
        seen = self._seen
        if not (seen.others or seen.executables or seen.twins or seen.failure):
            # nothing was called in the model's place: other steps may call the model
            few = self._steps < MEASURED and not (self._in_region and self._steps == 0)
            if self.called or few:
                return None
        since = f" since step {self._first - 1}" if self.called else ""
        so_far = "" if over or since else " so far"
        # a region counts its passes inside the program, so it counts all of them
        instead, advice = self._seen.in_words(self._model, self._every if self._steps else 1)
        of = {0: "Nothing in the watched region", 1: "No measured step"}
        which = of.get(self._steps, f"None of the {self._steps} measured steps{so_far}{since}")
        called = (
            f"called the {self._model} that is watched, so none of its passes was recorded there"
        )
        called = "could be measured" if seen.failure else called
        return Uncalled(
            step=self._first,
            steps=self._steps,
            calls=sum(self._seen.others.values()),
            what=f"{which} {called}; {instead}",
            advice=advice,
        )

    # ----------------------------------------------------------- perturbations

    def idle(
        self, expected: Iterable[ExpectedPerturbation], reached: Reached, passes: list[WatchedPass]
    ) -> dict[int, str]:
        """Number of a handle -> why its perturbation does not act, "" if it acts. Unknown ones are
        missing.

        `reached` is what the steps since the last call reached, `passes` are those of the last one.
        """
        found: dict[int, str] = {}
        for one in expected:
            fits = {
                why or _lacks(one.perturbation, site, seen)
                for site, at, why, seen in reached
                if at == one.in_use and site in one.sites
            }
            misfits = fits - {""}
            if misfits:
                self.misfits[one.number] = min(misfits)
            if "" in fits:
                found[one.number] = self._without_gradient(one, passes)
            elif misfits:
                found[one.number] = self.misfits[one.number]
            elif not one.compiling and (self._is_uncalled or reached):
                found[one.number] = self._why_not(one)
        return found

    def _why_not(self, one: ExpectedPerturbation) -> str:
        if self._is_uncalled:
            instead, advice = self._seen.in_words(self._model, self._every)
            if self._seen.failure:
                return f"{instead}; {advice}"
            return f"the loop does not call the inspected {self._model}: {instead}; {advice}"
        for site in one.sites:
            if site in self._session.unseen:
                return self._session.unseen[site]
        if one.place not in self._session.places and self._session.needs_places:
            return "the programs of this region have no room for it; enter insp.watch again"
        types = {name for name in self._seen.others if name in self._types_of(one)}
        if types:
            return (
                f"the steps call a {', '.join(sorted(types))} that could not be attributed to the "
                f"model (a clone, or a graphdef that was split before the loop)"
            )
        return "no call of its site was seen in the last measured steps"

    def _types_of(self, one: ExpectedPerturbation) -> set[str]:
        modules = {site.key: site.module for site in module_sites(self._session.model)}
        heads = [key.partition(":")[0] for key in one.sites]
        return {type(modules[key]).__name__ for key in heads if key in modules}

    def _without_gradient(self, one: ExpectedPerturbation, passes: list[WatchedPass]) -> str:
        """Why a perturbation has no gradient to act on, "" if it has one or may have one."""
        if not one.of_gradient or not self._session.gradients:
            return ""  # what has arrived is then not read on the loop's thread
        arrived = [key for p in passes for key in p.sent.arrived]
        measured = {site for site, _ in arrived}
        graded = {site for site, what in arrived if what == GRADIENT}
        if not measured:
            return ""
        if not graded:
            return "the step computes no gradients"
        dropped = measured.issuperset(one.sites) and graded.isdisjoint(one.sites)
        return "no gradient reaches its site in this step" if dropped else ""

    def certainly_idle(self, idle: Mapping[int, str], step: int, *, over: bool) -> dict[int, str]:
        """The handles that have not acted for long enough to say so, and why.

        `idle` is what the method returned since the last call.
        """
        self._acted |= {number for number, why in idle.items() if not why}
        for number, why in idle.items():
            # a step that was left halfway says nothing about a handle added just before it
            if number in self._idle or not over or self._is_uncalled:
                self._idle[number] = (self._idle.get(number, (step, ""))[0], why)
        strange = self._strange and self._steps >= MEASURED
        return {
            number: why
            for number, (since, why) in self._idle.items()
            if number not in self._acted and (over or strange or step - since >= STEPS)
        }


def _lacks(one: AnyPerturbation, site: str, seen: object) -> str:
    """Why what a site has does not have the part that a perturbation chooses by its numbers, which
    its program does not know; "" if it has.
    """
    return (
        misfit_clause(misfit_error(one, site, seen))
        if isinstance(one, PartBase) and seen is not None
        else ""
    )


# --------------------------------------------------------- what was not recorded


def dropped_warnings(session: Session, *, over: bool = True) -> Iterator[str]:
    """What of the model was not recorded since the last call, as warnings, each given once.

    Args:
        over: whether the loop has ended. Until then `Diagnostics` says that it calls two trees.
    """
    late, session.inbox.late = session.inbox.late, 0
    if late:
        yield (
            f"The gradients of {late} call{'s' * (late > 1)} arrived after their pass was recorded "
            f"and are not shown: they were computed after several later calls. Iterate over "
            f"insp.watch(batches), which knows where a step ends."
        )
    notes, session.notes = session.notes, []
    yield from notes
    now = {
        site: why for site, why in session.unseen.items() if over or not why.startswith(AMBIGUOUS)
    }
    new = {site: why for site, why in now.items() if site not in session.warned_of}
    session.warned_of |= set(new)
    for why in dict.fromkeys(new.values()):
        sites = [site or "(root)" for site, reason in new.items() if reason == why]
        more = f" and {len(sites) - NAMED} more" if len(sites) > NAMED else ""
        yield f"{', '.join(map(repr, sites[:NAMED]))}{more}: {why}."


def failure_warnings(session: Session) -> Iterator[str]:
    """Failures of our own since the last call, and calls that may not be the model's, as warnings.

    `insp.watch` shows these on the screen alone; `nni.watch`, which has none, warns of them.
    """
    errors, session.errors = session.errors, []
    for text in errors:
        yield f"A summary was lost on its way to the host: {text}"
    unattributed, session.unattributed = session.unattributed, {}
    for name, count in unattributed.items():
        yield (
            f"Not shown: {count} call{'s' * (count > 1)} of {name} in the traced programs, which "
            f"could not be attributed to this model (another model, a copy, or a graphdef made "
            f"before watching)."
        )
    executables, session.executables = session.executables, 0
    if executables:
        yield (
            "The loop calls a program that was compiled ahead of time or exported, so its modules "
            "cannot be seen. Call the jitted function itself."
        )
