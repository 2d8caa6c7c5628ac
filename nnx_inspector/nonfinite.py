"""Where a NaN arose that the user forbids (`jax_debug_nans`): a note for the error of theirs.

Where jax runs a program equation by equation, the place of the equation among the marks says the
module; where it cannot (a loop, a backward pass), the record of the same pass without the check.
Invariant: an error gets one such note, and is raised as it came.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax

from nnx_inspector.configuration import unchecked
from nnx_inspector.findings import diagnose
from nnx_inspector.record import Record
from nnx_inspector.recording import Recording
from nnx_inspector.survey import Survey
from nnx_inspector.taps import INPUT, OUTPUT

_BEGINNING = "nnx_inspector: raised in the call of "


def note_site(error: BaseException, site: str) -> None:
    """Say in which module's call an error was raised, if nobody has."""
    if not is_noted(error):
        error.add_note(f"{_BEGINNING}{site or '(root)'!r}.")


def is_noted(error: BaseException) -> bool:
    return any(note.startswith("nnx_inspector: ") for note in getattr(error, "__notes__", ()))


def note_equation(error: BaseException, found: Survey, number: int) -> None:
    """Say in which module's call an equation of a surveyed program lies, if the program knows."""
    item = found.items.get(number)
    if item is not None and item.kind in ("scan", "while", "cond", "remat", "shard_map"):
        return  # within it: the record knows
    depth = 0
    later = [found.items[n].mark for n in sorted(found.items) if n > number]
    for mark in (mark for mark in later if mark is not None):
        if mark.part == INPUT:
            depth += 1
        elif mark.part == OUTPUT and depth:
            depth -= 1
        elif mark.part == OUTPUT:
            return note_site(error, mark.site)


@contextlib.contextmanager
def noting_where(measure: Callable[[], Record | None]) -> Iterator[None]:
    """Around a pass under the user's checks: where it raises, `measure` records it without them
    (None of one that must not run twice).
    """
    try:
        yield
    except FloatingPointError as error:
        if not is_noted(error):
            with unchecked():
                record = measure()
            found = "" if record is None else where(record)
            if found:
                error.add_note(f"nnx_inspector: {found}")
        raise


def where(record: Record) -> str:
    """What the finding says of the first value of a pass that is not finite; "" of a finite one."""
    recording = Recording()
    recording.append(0, jax.device_get(record).merged())
    found = [one for one in diagnose(recording) if one.rule == "nonfinite"]
    return found[0].message.removeprefix("At step 0, ") if found else ""
