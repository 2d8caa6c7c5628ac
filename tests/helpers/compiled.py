"""Records what is traced or compiled in a block, and in which thread."""

import threading
from typing import Self

from nnx_inspector._compat import jit


class Compiled:
    """Every tracing and compilation inside the block.

    Attributes:
        kinds: the kind of each event.
        threads: the names of the threads of these events.
    """

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.threads: list[str] = []

    def __enter__(self) -> Self:
        self._undo = jit.compilation_events(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()

    def _note(self, kind: str, *_: object) -> None:
        self.kinds.append(kind)
        self.threads.append(threading.current_thread().name)
