"""The functions of `stats/native`, which are written in C, through XLA's C interface.

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
import numpy as np
from jax._src import sharding_impls
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.configuration import internal_config
from nnx_inspector.typing import Aval, Function, Value

ShapeDtype = jax.ShapeDtypeStruct
ARRAY_STATS: Final = "nnx_inspector_array_stats"
APPLY: Final = "nnx_inspector_apply"
FUNCTIONS: Final = (
    ARRAY_STATS,
    APPLY,
    "nnx_inspector_once",
    "nnx_inspector_join",
    "nnx_inspector_sample_units",
    "nnx_inspector_sample_parameter",
    "nnx_inspector_update",
)
_SUFFIX: Final = {"linux": "linux.so", "darwin": "macos.dylib", "win32": "windows.dll"}
_MACHINE: Final = {"amd64": "x86_64", "arm64": "aarch64"}
_FOLDER: Final = pathlib.Path(__file__).parents[1] / "static"


def library_path() -> pathlib.Path:
    """Where `js/hatch_build.py` puts the library for a machine like this one."""
    machine = platform.machine().lower()
    name = f"native-{_MACHINE.get(machine, machine)}-{_SUFFIX.get(sys.platform, sys.platform)}"
    return _FOLDER / name


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
    except (OSError, AttributeError, jax.errors.JaxRuntimeError):  # such as an older library
        return False
    return True


def can_call_on(devices: int) -> bool:
    """Whether a program for so many CPUs can call them: XLA would gather a sharded array first."""
    return devices == 1 and has_functions()


def can_call_everywhere() -> bool:
    """Whether every program of this process can call the functions, if it is one for CPUs."""
    return can_call_on(jax.device_count())


def lowering_devices(context: Any) -> int:
    """Among how many devices XLA divides a program that is being lowered: 1 where each device has a
    program of its own, as in a shard_map over all axes; 0 if it is not known.
    """
    # A C function gets one device's whole array, and XLA, which does not know what it does, would
    # gather a sharded array for it: on a mesh, gigabytes. jax knows the number of devices only
    # while it lowers a program. It can go when an ffi call can say how it may be divided.
    where = context.module_context.axis_context
    if isinstance(where, sharding_impls.SPMDAxisContext):
        return int(where.manual_axes == frozenset(where.mesh.axis_names))
    return getattr(where, "num_devices", 0)


def call(
    name: str, out: Sequence[Value], *args: Value, in_place: bool = False, **how: Value
) -> list[Value]:
    """Call a function on arrays, with results of these types, and numbers as its attributes.

    In place, its first result overwrites its first array, which XLA copies if it is still needed.
    """
    types = [ShapeDtype(x.shape, x.dtype) for x in out]
    attributes = {name: _attribute(value) for name, value in how.items()}
    aliases = {0: 0} if in_place else None
    return list(jax.ffi.ffi_call(name, types, input_output_aliases=aliases)(*args, **attributes))


def _attribute(value: float | tuple[int, ...]) -> Value:
    if isinstance(value, tuple):
        return np.array(value, np.int64)
    return np.float32(value) if isinstance(value, float) else np.int32(value)


def with_x64_of_operands(program: Function) -> Function:
    """`program` for a lowering, which may happen when 64 bits are off again."""

    def lowered(*args: Value, **how: Value) -> Value:
        wide = any(x.dtype.itemsize >= 8 for x in args) or jax.config.read("jax_enable_x64")
        with internal_config(), jax.enable_x64(wide):
            return program(*args, **how)

    return lowered


def register_cpu_lowering(
    primitive: Primitive,
    program: Function,
    in_c: Function,
    in_parts: Function | None = None,
) -> None:
    """Lower a primitive for a CPU as `in_c`, which calls the functions, where they can be called.

    `program` is lowered for several devices, without the library, and for `jax.export`, whose
    result goes to processes that do not know the functions. Where XLA divides a program among
    several devices, `in_parts` is lowered instead, which is told their number.
    """
    several = primitive.multiple_results
    with_c, without = (
        mlir.lower_fun(with_x64_of_operands(f), multiple_results=several) for f in (in_c, program)
    )

    def rule(ctx: Any, *args: object, **how: object) -> Value:
        module = ctx.module_context
        if module.lowering_parameters.for_export:
            return without(ctx, *args, **how)
        devices = lowering_devices(ctx)
        if devices > 1 and in_parts is not None:
            f = with_x64_of_operands(functools.partial(in_parts, devices=devices))
            return mlir.lower_fun(f, multiple_results=several)(ctx, *args, **how)
        return (with_c if can_call_on(devices) else without)(ctx, *args, **how)

    # A lowering by platform keeps one traced program for all of them: the choice is made where XLA
    # compiles it, also in a program that a CPU and a GPU share. `jax.lax.platform_dependent` would
    # trace both branches at each place, which doubles what is compiled.
    mlir.register_lowering(primitive, rule, platform="cpu")


def native_primitive(
    name: str,
    program: Callable[..., Sequence[jax.Array]],
    results: Callable[..., Sequence[ShapeDtype]],
    *,
    attributes: tuple[str, ...] = (),
    work: int = 0,
    in_parts: Function | None = None,
) -> Callable[..., list[Value]]:
    """`program`, which is one of the functions where it is lowered for a CPU.

    Args:
        name: the name of the function. Its attributes are those of the program and "rows", how many
            leading axes are rows, each of which it treats alike.
        program: what it computes, in jax and of one row: arrays and attributes -> several arrays.
        results: the shapes and dtypes of its results, from the shapes and dtypes of its arrays: to
            trace the program for them takes longer than to trace all else that is measured.
        attributes: their names: each is a number or a tuple of whole numbers.
        work: the words of memory that the function works in, as a last result.
        in_parts: what it computes where XLA divides a program among several CPUs: a function of
            the program for arrays that every device holds, the arrays, rows, attributes and the
            number of devices.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def of_all_rows(*args: object, rows: int = 0, **how: object) -> Sequence[jax.Array]:
        one = functools.partial(program, **how)
        for _ in range(rows):
            one = jax.vmap(one)
        return one(*args)

    def found(args: Sequence[Value], rows: int) -> list[ShapeDtype]:
        arrays = [ShapeDtype(x.shape[rows:], x.dtype) for x in args]
        leading = args[0].shape[:rows]
        return [ShapeDtype((*leading, *x.shape), x.dtype) for x in results(*arrays)]

    def in_c(*args: object, rows: int, **how: Value) -> Sequence[jax.Array]:
        out = found(args, rows)
        memory = [ShapeDtype((work,), np.dtype(np.uint32))] if work else []
        return call(name, [*out, *memory], *args, rows=rows, **how)[: len(out)]

    def types(*args: Value, rows: int, **_: Any) -> list[Aval]:
        like = max(args, key=lambda x: len(jaxprs.varying_axes(x)))  # within a shard_map
        return [
            like.update(
                shape=x.shape,
                dtype=x.dtype,
                weak_type=False,
                sharding=NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * len(x.shape))),
            )
            for x in found(args, rows)
        ]

    def batched(
        args: Sequence[Value], dims: Sequence[int | None], *, rows: int, **how: Value
    ) -> Value:
        pairs = list(zip(args, dims, strict=True))
        like = next((x, d) for x, d in pairs if d is not None)
        out = primitive.bind(*(_with_row_axis(x, d, *like) for x, d in pairs), rows=rows + 1, **how)
        return out, [0] * len(out)

    # Outside every program jax runs a primitive by its `impl`. This one compiles a program of the
    # one equation, for each type of the operands once, as jax does for its own primitives.
    primitive.def_impl(jax.jit(primitive.bind, static_argnames=("rows", *attributes)))
    primitive.def_abstract_eval(types)
    batching.primitive_batchers[primitive] = batched
    everywhere = mlir.lower_fun(with_x64_of_operands(of_all_rows), multiple_results=True)
    mlir.register_lowering(primitive, everywhere)

    def whole(*args: object, **how: Value) -> Sequence[jax.Array]:
        return (in_c if has_functions() else of_all_rows)(*args, **how)

    divided = None if in_parts is None else functools.partial(in_parts, whole)
    register_cpu_lowering(primitive, of_all_rows, in_c, divided)
    return primitive.bind


def _with_row_axis(x: Value, axis: int | None, other: Value, its_axis: int) -> Value:
    """`x` with a first axis of rows: its own, or one like the axis of another array."""
    if axis is not None:
        return jnp.moveaxis(x, axis, 0)
    mine, its = jax.typeof(x).sharding, jax.typeof(other).sharding
    rows = its.spec[its_axis]
    at = None if rows is None else NamedSharding(its.mesh, PartitionSpec(rows, *mine.spec))
    return jax.lax.broadcast(x, (other.shape[its_axis],), out_sharding=at)


BARRIER = Primitive("nnx_inspector_once")


def fusion_barrier(x: jax.Array, *after: jax.Array) -> jax.Array:
    """`x`, for a value that is both measured and passed on.

    XLA for a CPU copies the elementwise operations that make a value into each of its uses, so that
    a chain of n measured values becomes n**2 operations. Nothing is copied across a call. (XLA
    removes an `optimization_barrier` before it fuses.) `after` is computed first: if nothing else
    reads `x`, the result may then be changed in place.
    """
    return BARRIER.bind(x, *after)


def _first(x: object, *_: object) -> Value:
    return x


BARRIER.def_impl(_first)
BARRIER.def_abstract_eval(_first)
mlir.register_lowering(BARRIER, lambda ctx, x, *_: [x])
register_cpu_lowering(
    BARRIER, _first, lambda *x: call("nnx_inspector_once", x[:1], *x, in_place=True)[0]
)
ad.primitive_jvps[BARRIER] = lambda primals, tangents: (BARRIER.bind(*primals), tangents[0])
batching.primitive_batchers[BARRIER] = lambda args, dims: (BARRIER.bind(*args), dims[0])
