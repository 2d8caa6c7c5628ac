"""The output of a notebook's cell that holds the last state, for when there is no kernel any more.

It is put beside the widget, which hides it while it is alive, and replaced when things have come to
rest: some moments after the last change, and at the end of each cell. Invariant: nothing raises
into the notebook; a running loop is left alone. Knows no model and no jax.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

from nnx_inspector.weak import weakly

RESTS = 1.5
"""Seconds after a change until the output is replaced; what changes meanwhile is in it too."""


class SavedOutput:
    """One output, from `show` on.

    Args:
        make: its HTML at this moment; None where it should stay as it is.
        failed: told what making or sending it raised.
    """

    def __init__(self, make: Callable[[], str | None], failed: Callable[[Exception], object]):
        self._make, self._failed = make, failed
        self._lock = threading.Lock()
        self._id = uuid.uuid4().hex
        self._shell: Any = None
        self._timer: threading.Timer | None = None
        self._shown = ""
        self._at_end = weakly(self._cell_ended)

    def show(self, shell: Any) -> None:
        """Put it into the cell that runs, once."""
        if self._shell is not None:
            return
        self._shell = shell
        self._send(update=False)
        shell.events.register("post_run_cell", self._at_end)

    def moved(self) -> None:
        """Something has changed: replace it soon."""
        with self._lock:
            if self._shell is None or self._timer is not None:
                return
            self._timer = threading.Timer(RESTS, weakly(self._rested))
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Replace it for the last time."""
        if self._shell is None:
            return
        self._cell_ended()
        shell, self._shell = self._shell, None
        shell.events.unregister("post_run_cell", self._at_end)

    def _rested(self) -> None:
        with self._lock:
            self._timer = None
        self._send(update=True)

    def _cell_ended(self, _result: object = None) -> None:
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            self._send(update=True)

    def _send(self, *, update: bool) -> None:
        from IPython.display import display, update_display

        try:
            html = self._make()
            if html is None or (update and html == self._shown):
                return
            self._shown = html
            data = {"text/html": html, "text/plain": "The last state of the inspector."}
            (update_display if update else display)(data, raw=True, display_id=self._id)
        except Exception as error:  # noqa: BLE001 - a broken output must not stop a cell
            self._failed(error)
