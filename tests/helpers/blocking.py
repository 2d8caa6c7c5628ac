"""A program that runs until the test lets it go."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import jax
import jax.numpy as jnp

PATIENCE = 60


class _Version(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("major", ctypes.c_int32),
        ("minor", ctypes.c_int32),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("version", _Version),
        ("traits", ctypes.c_uint32),
        ("state", ctypes.c_int64),
    )


class _Extension(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("type", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("data", ctypes.POINTER(ctypes.c_float)),
    )


class _Buffers(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("at", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )


class _Api(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("version", _Version),
    )


class _Frame(ctypes.Structure):
    """A call, as in `stats/native/xla.h`."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int32),
        ("given", _Buffers),
        ("out", _Buffers),
    )


_may_end: dict[int, threading.Event] = {}


def _called(frame: Any) -> int:
    """XLA calls it as a function in C: one that calls Python by jax's callbacks is waited for."""
    asks = frame.contents.extension
    if asks and asks.contents.type == 1:
        metadata = asks.contents.metadata.contents
        version = frame.contents.api.contents.version
        metadata.version.major, metadata.version.minor = 0, version.minor
        metadata.traits = metadata.state = 0
        return 0
    number = int(frame.contents.given.at[0].contents.data[0])
    frame.contents.out.at[0].contents.data[0] = _may_end[number].wait(PATIENCE)
    return 0


_TARGET = "nnx_inspector_test_held"
_function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))(_called)
jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_function), platform="cpu")


class Blocking:
    """Returns its input, `MANY` values or more, once it is let go.

    Attributes:
        may_end: set at first; clear it to hold the programs that are started from then on.
    """

    MANY = (256, 256)
    """With fewer values, jax runs the program in the thread that starts it."""

    def __init__(self) -> None:
        self._number = jnp.float32(len(_may_end))
        self.may_end = _may_end[len(_may_end)] = threading.Event()
        self.may_end.set()
        self._program = jax.jit(self._waits)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self._program(x, self._number)

    @staticmethod
    def _waits(x: jax.Array, number: jax.Array) -> jax.Array:
        one = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((), jnp.float32))
        return x * one(number + 0 * x[0, 0])
