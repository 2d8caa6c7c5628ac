"""What the processes of a job agree on before they measure.

All processes of a job launch the same programs, or each waits for the others for good. So a loop is
measured in all of them, in the same way, or in none, and before each measured step they meet: a
process that has left the loop, or wants something else from this step on, says so there. Invariant:
nothing is waited for longer than `PATIENCE`, the job goes on as it would have, and devices exchange
nothing for it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping

import jax

from nnx_inspector._compat.processes import Coordinator, coordinator

PATIENCE = 60.0
"""How many seconds a process waits for the others."""

_FOLDER, _FAILED, _LEFT = "nnx_inspector", "nnx_inspector/failed", "left"
_FIRST = "first step"
_LONG = 120
"""The most characters of two values that differ; longer ones are only said to differ."""
MOST_MISSED = 3
"""See `ProcessGroup`."""


_meeting = threading.Lock()
_meetings = 0
"""How often the processes have waited for each other, as far as this one knows."""


class ProcessGroup:
    """The processes that watch one loop together.

    A text that a process says has the number of the meeting from which on it counts, because some
    read it when others have met again.

    Attributes:
        apart: why no process measures any more, as a sentence without a full stop; or "".
        first: the number of the loop's first step in process 0.
        most_missed: after so many measured steps in a row to which a process did not come, none is
            measured.
        leaves: whether this process takes no part from the next meeting on.
    """

    def __init__(self, job: Coordinator | None, name: str, apart: str, first: int = 0):
        self._job, self._name, self.disagreement, self.first = job, name, apart, first
        self._number = self._missed = 0  # the last meeting to which all have come
        self._said: list[tuple[str, str]] = []  # the names and texts of what this process has said
        self.leaves, self.most_missed = False, MOST_MISSED

    def meet(self, wish: str) -> dict[int, str] | None:
        """Wait until all processes are about to make the same step.

        Args:
            wish: what this process says from now on.

        Returns:
            What each process says; None if the step is not measured.
        """
        if self.disagreement or self._job is None:
            return None
        number, several = self._number + 1, jax.process_count()
        try:
            self._say(self._job, number, _LEFT if self.leaves else wish)
            met = self._job.wait_at_barrier(f"{self._name}/step", PATIENCE)
            said = self._heard(self._job, number)
        except jax.errors.JaxRuntimeError as error:
            self.disagreement = f"The coordinator of this job does not answer ({error})"
            return None
        gone = [process for process, text in said.items() if text == _LEFT]
        if gone:
            self.disagreement = f"{_processes(gone)} of {several} left this loop"
        elif not met:
            self._missed += 1
            if self._missed == self.most_missed:
                steps = "a measured step" if self._missed == 1 else f"{self._missed} measured steps"
                self.disagreement = f"Not all of {several} processes came to {steps}"
            return None
        self._number, self._missed = number, 0
        return None if gone else said

    def _say(self, job: Coordinator, number: int, text: str) -> None:
        if not self._said or self._said[-1][1] != text:
            name = f"{self._name}/said/{number}/{jax.process_index()}"
            job.put(name, text)
            self._said.append((name, text))
        elif len(self._said) > 1:  # all have read the last one by now
            job.forget(self._said.pop(0)[0])

    def _heard(self, job: Coordinator, number: int) -> dict[int, str]:
        found: dict[int, tuple[int, str]] = {}
        for name, text in job.texts(f"{self._name}/said").items():
            since, process = map(int, name.split("/"))
            if since <= number and found.get(process, (-1, ""))[0] < since:
                found[process] = since, text
        return {process: text for process, (_, text) in sorted(found.items())}

    def leave(self) -> None:
        """Take no part any more. A thread comes to the next meeting, so that nobody waits there."""
        job, self._job = self._job, None
        if self.disagreement or job is None:
            return

        def come() -> None:
            try:
                self._say(job, self._number + 1, _LEFT)
                job.wait_at_barrier(f"{self._name}/step", PATIENCE)
            except jax.errors.JaxRuntimeError:
                pass  # there is no job any more, so nobody waits

        threading.Thread(target=come, name="nnx_inspector.leaving", daemon=True).start()


def form_process_group(
    opening: Mapping[str, object], *, first: int = 0, do: str = "watch", does: str = "watches"
) -> ProcessGroup:
    """Wait until every process of the job opens the same.

    Args:
        opening: what this process opens, by the names of its arguments.
        first: the number of the first step here.
        do, does: what they do, in words.

    Returns:
        All of them. If they do not agree, it is apart, and each process gets the same kind of
        answer.
    """
    job = coordinator()
    if job is None:
        why = (
            "The processes of this job cannot agree on what is measured, because jax.distributed "
            "was not initialized"
        )
        return ProcessGroup(None, "", why)
    with _meeting:
        try:
            said = {_FIRST: str(first), **{name: str(value) for name, value in opening.items()}}
            return _meet_all(job, said, do, does)
        except jax.errors.JaxRuntimeError as error:
            return ProcessGroup(None, "", f"The coordinator of this job does not answer ({error})")


def _meet_all(job: Coordinator, opening: Mapping[str, str], do: str, does: str) -> ProcessGroup:
    global _meetings
    me, several = jax.process_index(), range(jax.process_count())
    # those that have failed were of loops that only others have watched
    failed = int(job.texts(_FAILED).get("number", 0))
    number = _meetings = max(_meetings, failed) + 1
    here = f"{_FOLDER}/{number}"
    job.put(f"{here}/{me}", json.dumps(opening))
    met = job.wait_at_barrier(here, PATIENCE)
    said = {int(name): json.loads(x) for name, x in job.texts(here).items() if name.isdecimal()}
    if number > 2:  # nobody reads those of the meeting before the last one
        job.forget(f"{_FOLDER}/{number - 2}/{me}")
    if met:
        return ProcessGroup(job, here, _difference(said, me, does), int(said[0][_FIRST]))
    job.put(f"{_FAILED}/number", str(number))
    missing = [n for n in several if n not in said]
    if not missing:
        return ProcessGroup(
            job, here, f"Process {me} came when others had waited {PATIENCE:g} seconds"
        )
    why = (
        f"{_processes(missing)} of {len(several)} did not {do} within {PATIENCE:g} seconds of "
        f"process {me}"
    )
    return ProcessGroup(job, here, why)


def _difference(said: Mapping[int, Mapping[str, str]], me: int, does: str) -> str:
    for other, opening in sorted(said.items()):
        for name, value in opening.items():
            mine = said[me].get(name)
            if value != mine and name != _FIRST:
                those = f"{name}={value}, and process {me} with {mine}"
                if len(those) > _LONG:
                    those = f"other {name} than process {me}"
                return f"Process {other} {does} with {those}"
    return ""


def _processes(numbers: list[int]) -> str:
    name = "Process" if len(numbers) == 1 else "Processes"
    return f"{name} {', '.join(map(str, numbers))}"
