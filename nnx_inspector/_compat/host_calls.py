"""Calls of Python functions from a compiled program, for which its caller need not wait.

jax runs a program with an `io_callback` to its end before it returns, if the program is for a CPU:
the Python of a training step then overlaps with nothing. Here such a program calls a function in C
(`stats/native/host.c`), which calls Python, and is started like any other. Elsewhere, and where
there is no library, `io_callback` serves. Invariant: a function lives as long as the programs that
call it. Does not know what is asked or sent.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import mlir

from nnx_inspector._compat import jaxprs, native, started
from nnx_inspector._compat.configuration import ours

EFFECT = jaxprs.effect("nnx_inspector")
"""The effect of every program that speaks with the host."""

Host = Callable[..., Sequence[Any]]
"""Takes arrays and returns arrays; it is called on any thread, and must not raise or run jax. What
a signal's handler raises in it is kept; see `started.keep`."""

_call = Primitive(native.HOST)
_call.multiple_results = True


def call_host(host: Host, out: Sequence[Any], *arrays: Any) -> list[jax.Array]:
    """What `host(*arrays)` returns when the program gets here: arrays of these shapes and dtypes.

    `host` gets arrays of its own. This has no rule of differentiation: it serves lowerings only.
    """
    shapes = tuple((x.shape, jnp.dtype(x.dtype)) for x in out)
    return _call.bind(*arrays, host=host, shapes=shapes)


_call.def_effectful_abstract_eval(
    lambda *_, host, shapes: ([ShapedArray(*x) for x in shapes], {EFFECT})
)


@ours()
def _by_callback(*arrays: Any, host: Host, shapes: Any) -> list[jax.Array]:
    types = [jax.ShapeDtypeStruct(*x) for x in shapes]
    kinds = [(x.shape, x.dtype) for x in arrays]
    members = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in kinds}

    def apart(*groups: Any) -> tuple[Any, ...]:
        whole: list[Any] = [None] * len(kinds)
        for group, numbers in zip(groups, members.values(), strict=True):
            for i, array in zip(numbers, np.array(group), strict=True):  # copied from XLA's memory
                whole[i] = array
        try:
            return tuple(host(*whole))
        except BaseException as error:  # noqa: BLE001 - of a handler: this thread raises it later
            started.keep(error)
            return tuple(np.zeros(t.shape, t.dtype) for t in types)

    # a few large operands, because each one costs the host time
    groups = [jnp.stack([arrays[i] for i in m]) for m in members.values()]
    return list(io_callback(apart, types, *groups))


class _Lowered:
    """Lives as long as Python has a program, lowered or compiled."""


class _Function:
    """A Python function that programs call by its number."""

    def __init__(self, host: Host, taken: Sequence[Any], returned: Sequence[Any], lowered: Any):
        self._host = host
        self._taken = [np.dtype(x.dtype) for x in taken]
        self._returned = [np.dtype(x.dtype) for x in returned]
        self._lowered = weakref.ref(lowered)

    def __call__(self, given: Any, wanted: Any) -> None:
        arrays = [_at(given[i], dtype).copy() for i, dtype in enumerate(self._taken)]
        for i, x in enumerate(self._host(*arrays)):
            _at(wanted[i], self._returned[i])[...] = x

    def is_needed(self, number: int) -> bool:
        """Whether a program may still call it: jax runs programs of which Python has no trace."""
        return self._lowered() is not None or native.library().nnx_inspector_calls_of(number) > 0


class _Buffer(ctypes.Structure):
    """`Buffer` of `stats/native/xla.h`."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


def _at(pointer: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """An array in XLA's memory."""
    buffer = pointer.contents
    shape = buffer.dims[: buffer.rank]
    length = dtype.itemsize * math.prod(shape)
    if not length:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * length).from_address(buffer.data)
    return np.ndarray(shape, dtype, memory)


_functions: dict[int, _Function] = {}
_lock = threading.Lock()


def _answer(number: int, given: Any, wanted: Any) -> None:
    function = _functions.get(number)
    if function is not None:
        function(given, wanted)


_BUFFERS = ctypes.POINTER(ctypes.POINTER(_Buffer))
_ANSWER = ctypes.CFUNCTYPE(None, ctypes.c_int32, _BUFFERS, _BUFFERS)(_answer)


@functools.cache
def _most() -> int:
    """How many functions there may be; gives the library what it calls."""
    atexit.register(_leave)
    return native.library().nnx_inspector_answer_with(_ANSWER)


def _leave() -> None:
    """Let the programs under way ask; later ones read zeros, as Python has ended by then."""
    started.wait()
    native.library().nnx_inspector_answer_with(None)
    while native.library().nnx_inspector_calls_inside():  # of other threads
        time.sleep(0.001)


def _keep(function: _Function) -> int | None:
    """A free number for a function, if there is one; functions no longer needed are let go."""
    with _lock:
        for number in [n for n, x in _functions.items() if not x.is_needed(n)]:
            del _functions[number]
        number = next((n for n in range(_most()) if n not in _functions), None)
        if number is not None:
            _functions[number] = function
        return number


def _lower(ctx: Any, *operands: Any, host: Host, shapes: Any) -> Any:
    module = ctx.module_context
    if native.serves_here() and not module.lowering_parameters.for_export:
        lowered = _Lowered()
        number = _keep(_Function(host, ctx.avals_in, ctx.avals_out, lowered))
        if number is not None:
            module.add_keepalive(lowered)
            lower = jax.ffi.ffi_lowering(native.HOST, has_side_effect=True)
            return lower(ctx, *operands, number=np.int32(number))
    return _lower_callback(ctx, *operands, host=host, shapes=shapes)


_lower_callback = mlir.lower_fun(_by_callback, multiple_results=True)
mlir.register_lowering(_call, _lower_callback)
mlir.register_lowering(_call, _lower, platform="cpu")
