"""Warnings about what a watched loop failed to record."""

from __future__ import annotations

from collections.abc import Iterator

from nnx_inspector.live.programs.whose import TWINS
from nnx_inspector.live.session import Session

NAMED = 5
"""How many sites a warning names; the others are counted."""


def dropped_of(session: Session, *, over: bool = True) -> Iterator[str]:
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
    now = {site: why for site, why in session.unseen.items() if over or not why.startswith(TWINS)}
    new = {site: why for site, why in now.items() if site not in session.warned_of}
    session.warned_of |= set(new)
    for why in dict.fromkeys(new.values()):
        sites = [site or "(root)" for site, reason in new.items() if reason == why]
        more = f" and {len(sites) - NAMED} more" if len(sites) > NAMED else ""
        yield f"{', '.join(map(repr, sites[:NAMED]))}{more}: {why}."


def others_of(session: Session) -> Iterator[str]:
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
