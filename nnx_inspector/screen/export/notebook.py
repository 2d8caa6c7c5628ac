"""The output of a notebook's cell that holds the last state, for a notebook without a kernel.

The output stands beside the widget, which hides it while it is alive. It is replaced when changes
have come to rest: some moments after a change, and after each cell. A reloaded page can no longer
update the output, so the next cell with a change gets a new one. Invariant: nothing raises into
the notebook; a running loop is left alone. Knows no model and no jax.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from nnx_inspector.background import weak_method
from nnx_inspector.screen.export.last_state import LastState

REST_SECONDS = 1.5
"""Seconds from a change until the output is replaced; later changes do not extend them."""
SHARE = 20
"""The pause before a replacement is at least this many times the CPU time of the last one."""


class SavedOutput:
    """One output, from `show` on.

    Args:
        last: returns the last state, or None if the output should stay as it is.
        failed: called with the error of making or sending the output.
        has_view: whether a browser has ever sent anything. Without one (a notebook that runs by
            itself), an output that is not sent before the cell ends is lost.
    """

    def __init__(
        self,
        last: Callable[[], LastState | None],
        failed: Callable[[Exception], object],
        has_view: Callable[[], bool],
    ):
        self._last, self._failed, self._has_view = last, failed, has_view
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._id = uuid.uuid4().hex
        self._shell: Any = None
        self._timer: threading.Timer | None = None
        self._sent: object = None
        self._took = 0.0
        self._has_changed = False  # whether something changed since it was sent
        self._page = ""
        self._lost = False  # whether the page can no longer update it
        self._at_end = weak_method(self._cell_ended)

    def show(self, shell: Any) -> None:
        """Put it into the running cell, once."""
        if self._shell is not None:
            return
        self._shell = shell
        self._send(update=False)
        shell.events.register("post_run_cell", self._at_end)

    def changed(self) -> None:
        """Replace the output soon, because something has changed."""
        self._has_changed = True
        self._soon(max(REST_SECONDS, SHARE * self._took))

    def view_opened(self, page: str) -> None:
        """A view has opened on a page with this name; another name means that the notebook was
        reloaded.
        """
        with self._lock:
            self._lost |= self._page not in ("", page)
            self._page = page

    def close(self) -> None:
        """Replace the output for the last time."""
        if self._shell is None:
            return
        self._stop_timer()
        if self._has_changed:
            self._send(update=not self._lost)
        shell, self._shell = self._shell, None
        shell.events.unregister("post_run_cell", self._at_end)

    def _soon(self, seconds: float) -> None:
        with self._lock:
            if self._shell is None or self._timer is not None:
                return
            self._timer = threading.Timer(seconds, weak_method(self._on_timer))
            self._timer.daemon = True
            self._timer.start()

    def _stop_timer(self) -> None:
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _on_timer(self) -> None:
        with self._lock:
            self._timer = None
        if not self._lost:
            self._send(update=True)

    def _cell_ended(self, _result: object = None) -> None:
        self._stop_timer()
        if not self._has_changed:
            return
        if self._lost or not self._has_view():
            self._send(update=not self._lost)
        else:
            self._soon(0)

    def _send(self, *, update: bool) -> None:
        from IPython.display import display, update_display

        try:
            with self._making:
                began = time.thread_time()
                self._has_changed = False
                last = self._last()
                if last is None:
                    return
                key = last.key()
                if update and key == self._sent:
                    return
                html = last.html(lambda: self._last() is None)
                if html is None:
                    return
                self._sent = key
                self._lost = self._lost and update
                data = {"text/html": html, "text/plain": "The last state of the inspector."}
                (update_display if update else display)(data, raw=True, display_id=self._id)
                self._took = time.thread_time() - began
        except Exception as error:  # noqa: BLE001 - a broken output must not stop a cell
            self._failed(error)
