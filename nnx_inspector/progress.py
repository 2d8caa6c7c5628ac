"""Progress of a long piece of work, and a way to stop it: in a notebook, a terminal, a function.

Invariant: the display never changes what is computed; a stop takes effect between two parts of the
work, when it reports its progress. Knows nothing of the work.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Report = Callable[[int, int], bool]
"""`(done, total) -> whether to stop`."""
MIN_INTERVAL = 0.1
"""The shortest time between two messages of progress to a screen, in seconds."""
Progress = bool | Callable[[int, int], Any]
"""True for a bar if there is a screen, or a function `(done, total)` that returns True to stop."""


@contextlib.contextmanager
def show_progress(progress: Progress, what: str) -> Iterator[Report]:
    """A context that shows the progress of the work in it, and yields the function to report by.

    Args:
        progress: see `Progress`; False shows nothing.
        what: the name of the work, in a word or two.
    """
    if callable(progress):
        yield lambda done, total: progress(done, total) is True
        return
    if progress and in_notebook():
        bar = Bar(what)
        bar.display()
        with contextlib.closing(bar):
            yield bar.report
        return
    if progress and sys.stderr is not None and sys.stderr.isatty():
        try:
            yield lambda done, total: _write(f"\r{what}: {done} of {total}")
        finally:
            _write("\n")
        return
    yield lambda done, total: False


def _write(text: str) -> bool:
    sys.stderr.write(text)
    sys.stderr.flush()
    return False


def in_notebook() -> bool:
    """Whether this runs in a notebook's kernel."""
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class Bar:
    """A progress bar with a Stop button.

    Where no subshell handles the button's messages, the kernel's listener does; modules of later
    rooms are named as text, because rooms that show progress come before them.
    """

    def __init__(self, what: str):
        import ipywidgets

        self._what = what
        self._stop = threading.Event()
        self._done, self._shown_at = (0, 1), 0.0
        self.bar = ipywidgets.IntProgress(min=0, max=1)
        self.text = ipywidgets.Label(f"{what}: preparing")
        self.button = ipywidgets.Button(description="Stop", tooltip=f"Stop the {what}")
        self.button.on_click(lambda _: self._stop.set())
        private = importlib.import_module("nnx_inspector._compat.ipykernel")
        private.disable_reply_subshell(self.button.comm)
        listening = importlib.import_module("nnx_inspector.screen.listener.listener")
        self._listener: Any = listening.listener()
        self._listener.listen(self.button.model_id or "", self._on_message)
        self._box = ipywidgets.HBox([self.bar, self.text, self.button])

    def display(self) -> None:
        from IPython.display import display

        display(self._box)

    def _on_message(self, content: Any, _buffers: object) -> None:
        if content.get("event") == "click":
            self._stop.set()

    def report(self, done: int, total: int) -> bool:
        """Show the progress now and then; see `Report`. A stop may come from any thread."""
        self._listener.poll()
        self._done = done, total
        if time.monotonic() - self._shown_at >= MIN_INTERVAL:
            self._show()
        return self._stop.is_set()

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        done, total = self._done
        self.bar.max, self.bar.value = max(total, 1), done
        stopped = self._stop.is_set() and done < total
        self.text.value = f"{self._what}: {done} of {total}{', stopped' if stopped else ''}"

    def close(self) -> None:
        """Leave the bar and the text on the page, and remove the button."""
        self._show()
        self._box.children = (self.bar, self.text)
        self._listener.forget(self.button.model_id or "")
        layout, style = self.button.layout, self.button.style
        self.button.close()
        layout.close()
        style.close()
