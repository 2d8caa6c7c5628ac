"""What the processes of a job agree on before they measure.

All processes of a job launch the same programs, or each waits for the others for good. So a loop is
measured in all of them, in the same way, or in none. Invariant: nothing is waited for longer than
`PATIENCE`, and the job goes on as it would have.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping

import jax

from nnx_inspector._compat.processes import Coordinator, coordinator

PATIENCE = 60.0
"""How many seconds a process waits for the others."""

_FOLDER, _FAILED = "nnx_inspector", "failed"


class _Meetings:
    """How often the processes have waited for each other, as far as this one knows."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0


_meetings = _Meetings()


def disagreement(opening: Mapping[str, object]) -> str:
    """Wait until every process of the job opens the same, if there are several.

    Args:
        opening: what this process opens, by the names of its arguments.

    Returns:
        "" if all processes agree, otherwise why not, as a sentence without a full stop. Every
        process gets an answer of the same kind.
    """
    if jax.process_count() == 1:
        return ""
    job = coordinator()
    if job is None:
        return (
            "The processes of this job cannot agree on what is measured, because jax.distributed "
            "was not initialized"
        )
    with _meetings.lock:
        return _disagreement(job, {name: str(value) for name, value in opening.items()})


def _disagreement(job: Coordinator, opening: Mapping[str, str]) -> str:
    me, several = jax.process_index(), range(jax.process_count())
    # those that have failed were of loops that only others have watched
    failed = int(job.texts(_FOLDER).get(_FAILED, 0))
    number = _meetings.count = max(_meetings.count, failed) + 1
    here = f"{_FOLDER}/{number}"
    job.put(f"{here}/{me}", json.dumps(opening))
    met = job.meet(here, PATIENCE)
    said = {int(name): json.loads(text) for name, text in job.texts(here).items()}
    if number > 2:  # nobody reads those of the meeting before the last one
        job.forget(f"{_FOLDER}/{number - 2}/{me}")
    if met:
        return _difference(said, me)
    job.put(f"{_FOLDER}/{_FAILED}", str(number))
    missing = [n for n in several if n not in said]
    if not missing:
        return f"Process {me} came when the others had waited for {PATIENCE:g} seconds"
    return (
        f"{_processes(missing)} of {len(several)} did not watch within {PATIENCE:g} seconds of "
        f"process {me}"
    )


def _difference(said: Mapping[int, Mapping[str, str]], me: int) -> str:
    for other, opening in sorted(said.items()):
        for name, value in opening.items():
            mine = said[me].get(name)
            if value != mine:
                return f"Process {other} watches with {name}={value}, and process {me} with {mine}"
    return ""


def _processes(numbers: list[int]) -> str:
    name = "Process" if len(numbers) == 1 else "Processes"
    return f"{name} {', '.join(map(str, numbers))}"
