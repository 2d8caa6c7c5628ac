"""Reading a model that a training step may take away meanwhile, by donating its arrays.

Between the call of such a step and its return the Variables refer to arrays that are deleted.
Invariant: what is read is whole, of one moment or another, or an error says why it cannot be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nnx_inspector.errors import InspectorError

T = TypeVar("T")
TRIES = 5


def undisturbed(read: Callable[[], T], what: str) -> T:
    """What `read` returns; it is called again where an array was deleted under it.

    Args:
        read: reads the model anew each time, and computes.
        what: that cannot be had, for the text of the error: "The parameters".

    Raises:
        InspectorError: the arrays were deleted each time.
    """
    last: RuntimeError | None = None
    for _ in range(TRIES):
        try:
            return read()
        except RuntimeError as error:
            if not _is_deleted(error):
                raise
            last = error
    raise InspectorError(
        f"{what} cannot be read now: a training step that still runs has taken the model's "
        f"arrays (it donates them). Ask again when the step has ended."
    ) from last


def _is_deleted(error: RuntimeError) -> bool:
    return "deleted" in str(error) or "donated" in str(error)
