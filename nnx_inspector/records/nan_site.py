"""Where a NaN arose that the user forbids (`jax_debug_nans`): a note for the error of theirs.

Where no equation names the module (a loop, a backward pass: see `error_notes`), the record of the
same pass without the check does. Invariant: an error is raised as it came.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax

from nnx_inspector._compat.configuration import unchecked
from nnx_inspector.findings.findings import diagnose
from nnx_inspector.program.error_notes import is_noted
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.records.record import Record


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
