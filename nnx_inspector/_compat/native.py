"""The functions of `stats/census.c`, through XLA's C interface.

Invariant: where there is no library for this machine, or XLA refuses it, `has_functions` says so
and programs without it are used; nothing fails. Does not know what the functions compute.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

FUNCTIONS: Final = ("nnx_inspector_census", "nnx_inspector_pack", "nnx_inspector_unpack")
_SUFFIX: Final = {"linux": "linux.so", "darwin": "macos.dylib", "win32": "windows.dll"}
_MACHINE: Final = {"amd64": "x86_64", "arm64": "aarch64"}
_BUILT: Final = pathlib.Path(__file__).parents[1] / "static"


def library_path() -> pathlib.Path:
    """Where `js/hatch_build.py` puts the library for a machine like this one."""
    machine = platform.machine().lower()
    name = f"census-{_MACHINE.get(machine, machine)}-{_SUFFIX.get(sys.platform, sys.platform)}"
    return _BUILT / name


@functools.cache
def has_functions() -> bool:
    """Whether a program for a CPU can call the functions; registers them at the first call."""
    if not library_path().is_file():
        return False
    try:
        library = ctypes.CDLL(str(library_path()))
        for name in FUNCTIONS:
            function = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, function, platform="cpu")
    except (OSError, jax.errors.JaxRuntimeError):
        return False
    return True


def serves_here() -> bool:
    """Whether the functions may be called: XLA would gather a sharded array for them."""
    return jax.device_count() == 1 and has_functions()


def call(name: str, out: Sequence[Any], *args: Any, **how: Any) -> list[Any]:
    """Call a function on arrays, with results of these types; its attributes are NumPy values."""
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out]
    return list(jax.ffi.ffi_call(name, types)(*args, **how))


def by_rows(name: str, program: Callable[..., Sequence[jax.Array]]) -> Callable[..., list[Any]]:
    """`program`, which on a CPU is one of the functions.

    Args:
        name: the name of the function.
        program: what it computes, in jax: a function of arrays that returns several; all of them
            may have any number of leading axes, which it treats alike.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def types(*args: Any) -> list[Any]:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
        return [jax.typeof(x) for x in jax.eval_shape(program, *shapes)]

    def on_a_cpu(*args: Any) -> Sequence[jax.Array]:
        if not serves_here():
            return program(*args)
        return call(name, jax.eval_shape(program, *args), *args)

    def batched(args: Any, dims: Any) -> Any:
        size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
        rows = [
            jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(args, dims, strict=True)
        ]
        out = primitive.bind(*rows)
        return out, [0] * len(out)

    primitive.def_impl(jax.jit(program))
    primitive.def_abstract_eval(types)
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(primitive, mlir.lower_fun(program, multiple_results=True))
    on_cpu = mlir.lower_fun(on_a_cpu, multiple_results=True)
    mlir.register_lowering(primitive, on_cpu, platform="cpu")
    return primitive.bind
