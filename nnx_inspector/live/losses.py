"""What a watched loop could not show, in words."""

from __future__ import annotations

from collections.abc import Iterator

from nnx_inspector.live.session import Session

NAMED = 5
"""How many sites a warning names; the others are counted."""


def losses_of(session: Session) -> Iterator[str]:
    """What was lost since this was last asked; each is told once."""
    errors, session.errors = session.errors, []
    for text in errors:
        yield f"A summary was lost on its way: {text}"
    late, session.inbox.late = session.inbox.late, 0
    if late:
        yield (
            f"{late} summaries came after their pass was recorded and are not shown: gradients of "
            f"several calls that are computed after the last of these. Iterate over "
            f"insp.watch(batches), which knows where a step ends."
        )
    unattributed, session.unattributed = session.unattributed, {}
    for name, count in unattributed.items():
        yield (
            f"{count} calls of {name} could not be attributed to this model (another model, "
            f"a copy, or a graphdef made before watching) and are not shown."
        )
    new = {site: why for site, why in session.unseen.items() if site not in session.told}
    session.told |= set(new)
    for why in dict.fromkeys(new.values()):
        sites = [site or "(root)" for site, reason in new.items() if reason == why]
        more = f" and {len(sites) - NAMED} more" if len(sites) > NAMED else ""
        yield f"{', '.join(map(repr, sites[:NAMED]))}{more}: {why}."
    executables, session.executables = session.executables, 0
    if executables:
        yield (
            "The step is an executable that was compiled ahead of time, before watching: what "
            "runs inside it cannot be seen. Watch the jitted function itself."
        )
