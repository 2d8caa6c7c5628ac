"""Calls of Python functions from a compiled program, for which its caller need not wait.

jax runs a program with an `io_callback` to its end before it returns, if the program is for a CPU:
the Python of a training step then overlaps with nothing. Here such a program calls a function in C
(`stats/native/host.c`), which calls Python, and is started like any other. Elsewhere, and where
there is no library, `io_callback` serves. Invariant: a function lives as long as the programs that
call it. Does not know what is asked or sent.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
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

from nnx_inspector._compat import jaxprs, native
from nnx_inspector._compat.configuration import ours

EFFECT = jaxprs.effect("nnx_inspector")
"""The effect of every program that speaks with the host."""

Host = Callable[..., Sequence[Any]]
"""Takes arrays and returns arrays; it is called on any thread, and must not raise or run jax."""

NAME = "nnx_inspector_host"

_call = Primitive(NAME)
_call.multiple_results = True


def call_host(host: Host, out: Sequence[Any], *arrays: Any) -> list[jax.Array]:
    """What `host(*arrays)` returns when the program gets here: arrays of these shapes and dtypes.

    The arrays that `host` gets are its own. For the lowering of a primitive: it has no rule of
    differentiation.
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
            for i, array in zip(numbers, np.array(group), strict=True):  # its memory is XLA's
                whole[i] = array
        return tuple(host(*whole))

    # a few large operands, because each one costs the host time
    groups = [jnp.stack([arrays[i] for i in m]) for m in members.values()]
    return list(io_callback(apart, types, *groups))


class _Function:
    """A Python function that programs call by its number."""

    def __init__(self, host: Host, taken: Sequence[Any], returned: Sequence[Any]):
        self.number = next(_numbers)
        self._host = host
        self._taken = [(x.shape, np.dtype(x.dtype)) for x in taken]
        self._returned = [(x.shape, np.dtype(x.dtype)) for x in returned]

    def __call__(self, given: Any, wanted: Any) -> None:
        arrays = [_at(given[i], *kind).copy() for i, kind in enumerate(self._taken)]
        for i, x in enumerate(self._host(*arrays)):
            _at(wanted[i], *self._returned[i])[...] = x


class _Buffer(ctypes.Structure):
    """`Buffer` of `stats/native/xla.h`."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.c_void_p),
    )


def _at(buffer: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array that lies in memory of XLA's."""
    length = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if not length:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * length).from_address(buffer.contents.data)
    return np.ndarray(shape, dtype, memory)


_numbers = itertools.count()
_functions: weakref.WeakValueDictionary[int, _Function] = weakref.WeakValueDictionary()


def _answer(number: int, given: Any, wanted: Any) -> None:
    function = _functions.get(number)
    if function is not None:
        function(given, wanted)


_BUFFERS = ctypes.POINTER(ctypes.POINTER(_Buffer))
_ANSWER = ctypes.CFUNCTYPE(None, ctypes.c_int32, _BUFFERS, _BUFFERS)(_answer)


@functools.cache
def _serve() -> None:
    """Give the library the function that it calls."""
    native.library().nnx_inspector_answer_with(_ANSWER)


def _lower(ctx: Any, *operands: Any, host: Host, shapes: Any) -> Any:
    module = ctx.module_context
    if not native.serves_here() or module.lowering_parameters.for_export:
        return _lower_callback(ctx, *operands, host=host, shapes=shapes)
    _serve()
    function = _Function(host, ctx.avals_in, ctx.avals_out)
    _functions[function.number] = function
    module.add_keepalive(function)
    lower = jax.ffi.ffi_lowering(NAME, has_side_effect=True)
    return lower(ctx, *operands, number=np.int32(function.number))


_lower_callback = mlir.lower_fun(_by_callback, multiple_results=True)
mlir.register_lowering(_call, _lower_callback)
mlir.register_lowering(_call, _lower, platform="cpu")
