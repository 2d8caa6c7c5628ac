"""Records what is traced or compiled in a block: in which thread, and the programs' texts."""

import threading
from typing import Any, Self

from jax._src import compiler

from nnx_inspector._compat import jit


class Compilations:
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


class ProgramTexts:
    """The HLO of every program that is compiled inside the block.

    Attributes:
        of: the name of the jitted function -> the texts of its programs, in their order.
    """

    def __init__(self) -> None:
        self.of: dict[str, list[str]] = {}

    def __enter__(self) -> Self:
        self._before = compiler.compile_or_get_cached

        def noted(*args: Any, **kwargs: Any) -> Any:
            found = self._before(*args, **kwargs)
            for module in found.hlo_modules():
                text = module.to_string()
                name = text.split(maxsplit=2)[1].removeprefix("jit_").rstrip(",")
                self.of.setdefault(name, []).append(text)
            return found

        compiler.compile_or_get_cached = noted
        return self

    def __exit__(self, *_: object) -> None:
        compiler.compile_or_get_cached = self._before
