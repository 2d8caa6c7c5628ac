"""A note on a user's error that names the module whose call raised it.

If jax runs a program equation by equation, the equation's place among the marks gives the module.
Invariant: an error gets one such note, and is otherwise unchanged.
"""

from __future__ import annotations

from nnx_inspector.errors import add_note, notes_of
from nnx_inspector.program.marks import INPUT, OUTPUT
from nnx_inspector.program.survey import Survey


def note_site(error: BaseException, site: str) -> None:
    """Add a note that names the module whose call raised an error, if there is none yet."""
    if not notes_of(error):
        add_note(error, f"raised in the call of {site or '(root)'!r}.")


def note_equation(error: BaseException, found: Survey, number: int) -> None:
    """Add a note that names the module whose call an equation of a survey lies in, if known."""
    item = found.items.get(number)
    if item is not None and item.kind in ("scan", "while", "cond", "remat", "shard_map"):
        return  # any call inside: see `nan_site`
    depth = 0
    later = [found.items[n].mark for n in sorted(found.items) if n > number]
    for mark in (mark for mark in later if mark is not None):
        if mark.part == INPUT:
            depth += 1
        elif mark.part == OUTPUT and depth:
            depth -= 1
        elif mark.part == OUTPUT:
            return note_site(error, mark.site)
