"""The output of a notebook's cell that holds the last state, for when there is no kernel any more.

It is put beside the widget, which hides it while it is alive, and replaced when things have come to
rest: some moments after a change, and after each cell. A page that was loaded anew knows nothing of
that output any more: the next cell in which something changes gets another. Invariant: nothing
raises into the notebook; a running loop is left alone. Knows no model and no jax.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from nnx_inspector.background import weakly

RESTS = 1.5
"""Seconds after a change until the output is replaced; what changes meanwhile is in it too."""
SHARE = 20
"""It rests for so many times the processor time that making it took the last time."""


class Saved(Protocol):
    """What there is to be saved at one moment."""

    def key(self) -> object: ...
    def html(self, stop: Callable[[], bool], /) -> str | None: ...


class SavedOutput:
    """One output, from `show` on.

    Args:
        last: the last state; None where the output should stay as it is.
        failed: told what making or sending it raised.
        seen: whether a browser has ever asked for anything; without, what cannot be sent before
            the cell ends is lost (notebooks that run by themselves).
    """

    def __init__(
        self,
        last: Callable[[], Saved | None],
        failed: Callable[[Exception], object],
        seen: Callable[[], bool],
    ):
        self._last, self._failed, self._seen = last, failed, seen
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._id = uuid.uuid4().hex
        self._shell: Any = None
        self._timer: threading.Timer | None = None
        self._sent: object = None
        self._took = 0.0
        self._moved = False  # since it was sent
        self._page = ""
        self._lost = False  # the page does not know of it
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
        self._moved = True
        self._soon(max(RESTS, SHARE * self._took))

    def greeted(self, page: str) -> None:
        """A view says that it is there, on a page of this name.

        Another page than the first has loaded the notebook anew.
        """
        with self._lock:
            self._lost |= self._page not in ("", page)
            self._page = page

    def close(self) -> None:
        """Replace it for the last time."""
        if self._shell is None:
            return
        self._stop_timer()
        if self._moved:
            self._send(update=not self._lost)
        shell, self._shell = self._shell, None
        shell.events.unregister("post_run_cell", self._at_end)

    def _soon(self, seconds: float) -> None:
        with self._lock:
            if self._shell is None or self._timer is not None:
                return
            self._timer = threading.Timer(seconds, weakly(self._rested))
            self._timer.daemon = True
            self._timer.start()

    def _stop_timer(self) -> None:
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _rested(self) -> None:
        with self._lock:
            self._timer = None
        if not self._lost:
            self._send(update=True)

    def _cell_ended(self, _result: object = None) -> None:
        self._stop_timer()
        if not self._moved:
            return
        if self._lost or not self._seen():
            self._send(update=not self._lost)
        else:
            self._soon(0)

    def _send(self, *, update: bool) -> None:
        from IPython.display import display, update_display

        try:
            with self._making:
                began = time.thread_time()
                self._moved = False
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
