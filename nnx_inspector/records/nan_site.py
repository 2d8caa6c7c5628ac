"""Adds to the error of `jax_debug_nans` a note that names the module where the NaN arose.

If no equation names the module (a loop, a backward pass: see `error_notes`), the pass is recorded
again without the check, and the record names it. Invariant: the original error is raised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax

from nnx_inspector._compat.configuration import unchecked_jit
from nnx_inspector.errors import add_note, notes_of
from nnx_inspector.findings.findings import diagnose
from nnx_inspector.recordings.recording import Recording
from nnx_inspector.records.record import Record


@contextlib.contextmanager
def note_nan_site(measure: Callable[[], Record | None]) -> Iterator[None]:
    """Surround a pass under the user's NaN checks; if it raises, `measure` records it without them.

    `measure` returns None for a pass that must not run twice.
    """
    try:
        yield
    except FloatingPointError as error:
        if not notes_of(error):
            with unchecked_jit():
                record = measure()
            found = "" if record is None else nan_site_text(record)
            if found:
                add_note(error, found)
        raise


def nan_site_text(record: Record) -> str:
    """The message of the finding on the first non-finite value of a pass; "" if all are finite."""
    recording = Recording()
    recording.append(0, jax.device_get(record).merged())
    found = [one for one in diagnose(recording) if one.rule == "nonfinite"]
    return found[0].message.removeprefix("At step 0, ") if found else ""
