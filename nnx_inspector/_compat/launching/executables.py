"""The executables that jax has compiled programs to, noted where it first runs them.

Invariant: a program runs as it would have run. What is noted keeps no program alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from jax._src import compiler, pjit
from jax._src.interpreters.mlir import sanitize_name

from nnx_inspector._compat.redirect import AddUndo, SharedPatch, patch
from nnx_inspector.typing import Value


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """A program that ran.

    Attributes:
        name: that of its module, as a trace has it.
    """

    name: str
    _compiled: Any

    def text(self) -> str:
        """The program as XLA has compiled it."""
        return self._compiled.as_text()

    @functools.cached_property
    def number(self) -> int | None:
        """The number of its module, which the events of a trace have as `program_id`."""
        # XLA numbers the modules of a process. The number is in the serialized module only, as
        # field 5 (`int64 id`) of `HloModuleProto`. Without it, nothing in a trace distinguishes two
        # programs of one function that is called with two shapes. It can go when jaxlib's HloModule
        # has its `unique_id`.
        for module in self._compiled.runtime_executable().hlo_modules():
            return _varint(module.as_serialized_hlo_module_proto(), 5)
        return None

    def memory(self) -> Any:
        """XLA's account of its memory; None where the platform has none."""
        return self._compiled.memory_analysis()


def _varint(message: bytes, wanted: int) -> int | None:
    """The number in a field of a protocol buffer; None if the message has no such field."""
    at = 0

    def number() -> int:
        nonlocal at
        found = shift = 0
        while True:
            byte = message[at]
            at, found, shift = at + 1, found | (byte & 127) << shift, shift + 7
            if byte < 128:
                return found

    while at < len(message):
        field, kind = divmod(number(), 8)
        if kind == 0:  # a number
            value = number()
            if field == wanted:
                return value
        else:  # bytes behind their length, or 4 or 8 bytes
            size = {1: 8, 5: 4}[kind] if kind != 2 else number()
            at += size
    return None


class _Thread(threading.local):
    last_started: Any = None
    compiles_anew: bool = False


_thread = _Thread()


def last_started_jaxpr() -> Any:
    """The jaxpr of the program that this thread has started last within `record_executables`; it
    may have failed. None if it is gone, or if there was none.
    """
    return None if _thread.last_started is None else _thread.last_started()


executables: weakref.WeakKeyDictionary[Any, Executable] = weakref.WeakKeyDictionary()
"""jaxpr -> its executable, of programs that ran while `record_executables`; the newest last."""


def _patch_calls(add_undo: AddUndo) -> None:
    # Both ways in which jax runs a program for the first time lead here: a jitted call, and the
    # `impl` of the jit primitive. There is no public way from a call to the executable that it
    # runs: `jit(f).lower().compile()` would compile it once more. It can go when there is one.
    original = pjit._pjit_call_impl_python

    def noted(*args: object, **params: Value) -> Any:
        _thread.last_started = weakref.ref(params["jaxpr"])
        found = original(*args, **params)
        executables[params["jaxpr"]] = Executable(_module_name(params["name"]), found[1])
        return found

    patch(pjit, "_pjit_call_impl_python", noted, add_undo)


_calls_patch = SharedPatch(_patch_calls)


def _patch_cache_read(add_undo: AddUndo) -> None:
    # A trace names a program by the number that its module had in the process that compiled it. A
    # program from jax's cache on disk gets a new module number when it is loaded, and the trace
    # still shows the old one. Without this, profile confuses two programs of the same name. jax
    # decides only once per process whether to use that cache, so the function that reads it is
    # patched. It can go when a trace names programs by their fingerprint.
    original = compiler._cache_read

    def read(*args: Any, **more: Any) -> Any:
        return (None, None) if _thread.compiles_anew else original(*args, **more)

    patch(compiler, "_cache_read", read, add_undo)


_cache_read_patch = SharedPatch(_patch_cache_read)


@contextlib.contextmanager
def without_disk_cache() -> Iterator[None]:
    """Compile in this process what this thread compiles, so that `Executable.number` is right."""
    holder, before = object(), _thread.compiles_anew
    try:
        _cache_read_patch.acquire(holder)
        _thread.compiles_anew = True
        yield
    finally:
        _thread.compiles_anew = before
        _cache_read_patch.release(holder)


def _module_name(function: str) -> str:
    """The name that XLA gives the module of a jitted function."""
    return sanitize_name(f"jit_{function}").rstrip("_")


@contextlib.contextmanager
def record_executables() -> Iterator[None]:
    """Note the programs that run meanwhile, in any thread, and were not in jax's fast path yet."""
    holder = object()
    try:
        _calls_patch.acquire(holder)
        yield
    finally:
        _calls_patch.release(holder)
