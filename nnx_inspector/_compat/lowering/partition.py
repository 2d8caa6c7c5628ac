"""Figures of an array that is spread over several devices, each of which reads what it holds.

What the devices find in their parts is added up over all of them, as integers. XLA makes one
exchange of all such sums in a program that do not wait for each other, and moves no array. How XLA
divides an array is known only while it compiles the program: it asks then. Invariant: of values
that several devices hold, one device's are counted. Does not know what is added up.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, sharding_impls
from jax._src.interpreters.mlir import build_mlir_module_helper, module_to_bytecode
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.native import has_functions, lowering_devices
from nnx_inspector.typing import Function, Value

_TARGET: Final = "nnx_inspector_parts"
_AXIS: Final = "devices"
_CACHE_SIZE: Final = 512


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of an array that a device holds.

    Attributes:
        number: its number among the parts.
        starts: its first index along each axis.
        divided: the axes along which there are several.
        shape: that of the whole array.
    """

    number: Value
    starts: tuple[Value, ...]
    divided: tuple[int, ...]
    shape: tuple[int, ...]


Static = tuple[tuple[str, Any], ...]
"""Keyword arguments that do not change while a program runs."""


PartFunction = Callable[..., Sequence[jax.Array]]
"""`f(x, part, rows=, **static)`, what is found in a part: arrays of uint32, whose shapes do not
depend on the part's."""


@dataclasses.dataclass(frozen=True)
class _PartitionRequest:
    """What XLA is to divide: the function and its arguments, for how many devices."""

    name: str
    static: Static
    rows: int
    apart: bool
    devices: int
    wide: bool
    platforms: tuple[str, ...]


_functions: dict[str, tuple[PartFunction, Callable[..., bool]]] = {}
_requests: dict[bytes, _PartitionRequest] = {}
"""By their names in a program; a program that jax has kept on disk has the names too."""


def partitioned(
    function: PartFunction, fits: Callable[..., bool] = lambda *_, **__: True
) -> Callable[..., list[Value]]:
    """`f(x, rows=, **static)`: what `function` finds in the parts of an array, added up over them
    modulo 2**32. The first axes of the array, `rows` of them, are those of each result too.

    Args:
        fits: for an axis, the length of a part along it, and `static`: whether the array may be
            divided so. Otherwise XLA gathers it along that axis.

    With `apart=True` it is not added up yet: only `sum_over_devices` may read that, in the same
    body of the program, because the devices' results differ, which XLA does not know.
    """
    name = f"{function.__module__}.{function.__name__}"
    _functions[name] = function, fits

    def run(x: object, *, apart: bool = False, rows: int = 0, **static: object) -> list[jax.Array]:
        how = tuple(sorted(static.items()))
        return _parts.bind(x, name=name, static=how, rows=rows, apart=apart)

    return run


def sum_over_devices(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Results that are apart, added up over all devices in one exchange."""
    return _sum.bind(*arrays) if arrays else []


def put_into_rows(found: jax.Array, part: Part, rows: int) -> jax.Array:
    """What was found in the rows of a part, the first axes of its array, among those of all."""
    if not any(axis < rows for axis in part.divided):
        return found
    inner = found.shape[rows:]
    zeros = jnp.zeros((*part.shape[:rows], *inner), found.dtype)
    return jax.lax.dynamic_update_slice(zeros, found, (*part.starts[:rows], *[0] * len(inner)))


# Two primitives, because what the devices find in several arrays is to be added up in one exchange:
# `_parts` finds it, and `_sum` adds it up, later. A function in their place would be lowered where
# it stands, before XLA has decided how the array is divided.
_parts = Primitive("nnx_inspector_parts")
_sum = Primitive("nnx_inspector_sum")
_parts.multiple_results = _sum.multiple_results = True


@_parts.def_abstract_eval
def _types(x: Value, *, name: str, static: Static, rows: int, apart: bool) -> list[Value]:
    del apart
    kinds, _ = _whole(name, static, rows, x.shape, x.dtype, _is_wide(x.dtype))
    return [_like(x, kind.shape) for kind in kinds]


@_sum.def_abstract_eval
def _types_of_sums(*arrays: Value) -> list[Value]:
    return [_like(x, x.shape) for x in arrays]


def _like(x: Value, shape: tuple[int, ...]) -> Value:
    sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    dtype = np.dtype(np.uint32)
    return x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _is_wide(dtype: np.dtype[np.generic]) -> bool:
    return dtype.itemsize >= 8 or jax.config.read("jax_enable_x64")


def _on_whole(name: str, static: Static, rows: int, x: jax.Array) -> Sequence[jax.Array]:
    part = Part(0, (0,) * x.ndim, (), x.shape)
    return _functions[name][0](x, part, rows=rows, **dict(static))


@functools.lru_cache(_CACHE_SIZE)
def _whole(
    name: str, static: Static, rows: int, shape: tuple[int, ...], dtype: object, wide: bool
) -> tuple[list[Value], str]:
    """The types of what is found in an array, and a text that stands for how."""
    function = functools.partial(_on_whole, name, static, rows)
    with internal_config(), jax.enable_x64(wide):
        traced = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, dtype))
    return list(traced.out_avals), hashlib.sha256(str(traced).encode()).hexdigest()[:16]


def _batched(
    args: Sequence[Value], dims: Sequence[int | None], *, rows: int, **how: object
) -> Value:
    x = jnp.moveaxis(args[0], dims[0] or 0, 0)
    found = _parts.bind(x, rows=rows + 1, **how)
    return found, [0] * len(found)


def _lower(ctx: Any, x: object, *, name: str, static: Static, rows: int, apart: bool) -> Value:
    (operand,), module = ctx.avals_in, ctx.module_context
    wide, devices = _is_wide(operand.dtype), lowering_devices(ctx)
    if devices < 2 or module.lowering_parameters.for_export:
        function = functools.partial(_on_whole, name, static, rows)
        with internal_config(), jax.enable_x64(wide):
            return mlir.lower_fun(function, multiple_results=True)(ctx, x)
    _, how = _whole(name, static, rows, operand.shape, operand.dtype, wide)
    asked = _PartitionRequest(name, static, rows, apart, devices, wide, tuple(module.platforms))
    return _call(ctx, [x], asked, how)


def _lower_sum(ctx: Any, *arrays: object) -> Value:
    module, devices = ctx.module_context, lowering_devices(ctx)
    if devices < 2 or module.lowering_parameters.for_export:
        return arrays
    asked = _PartitionRequest("", (), 0, False, devices, False, tuple(module.platforms))
    return _call(ctx, arrays, asked, "")


def _call(ctx: Any, operands: Sequence[object], asked: _PartitionRequest, how: str) -> Value:
    key = f"{asked} {how}"  # the same in each process, or jax's cache on disk would not be used
    _requests[key.encode()] = asked
    has_functions()  # registers those that a program calls which jax has kept on disk
    results = [jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in ctx.avals_out]
    call = jax.ffi.ffi_call(_TARGET, results, custom_call_api_version=2, legacy_backend_config=key)
    return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)


batching.primitive_batchers[_parts] = _batched
mlir.register_lowering(_parts, _lower)
mlir.register_lowering(_sum, _lower_sum)


# -------------------------------------------------------------- while XLA divides a program


def _partition(kinds: Any, shardings: Any, results: Value, _: object, key: bytes) -> Value:
    """The program of each device, and how its array and its results lie on them."""
    asked, everywhere = _requests[key], xla_client.HloSharding.replicate()
    result = everywhere
    if results.is_tuple():
        each = [everywhere] * len(results.tuple_shapes())
        result = everywhere.tuple_sharding(results, each)
    if not asked.name:
        shapes = tuple(tuple(kind.dimensions()) for kind in kinds)
        return _program_of_sum(asked, shapes), [everywhere] * len(kinds), result
    (kind,) = kinds
    shape = tuple(kind.dimensions())
    fits = functools.partial(_functions[asked.name][1], rows=asked.rows, **dict(asked.static))
    devices = _device_grid(shardings[0], shape, asked.devices, fits)
    program = _program(asked, shape, kind.numpy_dtype(), devices.shape, devices.tobytes())
    return program, [_sharding(devices)], result


def _device_grid(
    sharding: Value, shape: tuple[int, ...], devices: int, fits: Callable[[int, int], bool]
) -> np.ndarray:
    """The numbers of the devices: an axis for each of the array's, and one for equal parts."""
    count = len(shape)
    if not sharding.is_tiled():
        return np.arange(devices, dtype=np.int64).reshape(*[1] * count, devices)
    lengths = sharding.tile_assignment_dimensions()[:count]
    found = np.array(sharding.tile_assignment_devices(), np.int64).reshape(*lengths, -1)
    for axis, several in enumerate(lengths):
        if several > 1 and (shape[axis] % several or not fits(axis, shape[axis] // several)):
            found = np.moveaxis(found, axis, -1)
            found = np.expand_dims(found.reshape(*found.shape[:-2], -1), axis)
    return found


def _sharding(devices: np.ndarray) -> Value:
    if devices.shape[-1] == devices.size:
        return xla_client.HloSharding.replicate()
    found = xla_client.OpSharding()
    found.type = xla_client.OpSharding.Type.OTHER
    found.tile_assignment_dimensions = list(devices.shape)
    found.tile_assignment_devices = devices.reshape(-1).tolist()
    found.replicate_on_last_tile_dim = True
    return xla_client.HloSharding.from_proto(found)


@functools.lru_cache(_CACHE_SIZE)
def _program(
    asked: _PartitionRequest,
    shape: tuple[int, ...],
    dtype: object,
    grid: tuple[int, ...],
    devices: bytes,
) -> bytes:
    *tiles, copies = grid
    static = {**dict(asked.static), "rows": asked.rows}
    function = functools.partial(_functions[asked.name][0], **static)
    local = tuple(n // several for n, several in zip(shape, tiles, strict=True))
    divided = tuple(axis for axis, several in enumerate(tiles) if several > 1)
    numbers, copy = np.divmod(np.argsort(np.frombuffer(devices, np.int64)), copies)
    starts = np.stack(np.unravel_index(numbers, tiles), axis=-1) * np.array(local)

    def run(x: jax.Array) -> list[jax.Array]:
        here = jax.lax.axis_index(_AXIS)
        mine = lambda table: jnp.asarray(table, jnp.int32)[here]  # noqa: E731
        begins = (mine(starts[:, axis]) if axis in divided else 0 for axis in range(x.ndim))
        number = mine(numbers) if divided else 0
        found = list(function(x, Part(number, tuple(begins), divided, shape)))
        if copies > 1 and (divided or asked.apart):
            found = [jnp.where(mine(copy) == 0, one, jnp.zeros_like(one)) for one in found]
        return _psum(found) if divided and not asked.apart else found

    kind = jax.ShapeDtypeStruct(local, dtype)
    return _module(run, [kind], asked)


@functools.lru_cache(_CACHE_SIZE)
def _program_of_sum(asked: _PartitionRequest, shapes: tuple[tuple[int, ...], ...]) -> bytes:
    kinds = [jax.ShapeDtypeStruct(shape, np.uint32) for shape in shapes]
    return _module(lambda *arrays: _psum(arrays), kinds, asked)


def _psum(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The sums over all devices: as one array, because on CPUs each array is an exchange."""
    whole = jax.lax.psum(jnp.concatenate([x.reshape(-1) for x in arrays]), _AXIS)
    ends = np.cumsum([x.size for x in arrays])
    parts = jnp.split(whole, ends[:-1])
    return [part.reshape(x.shape) for part, x in zip(parts, arrays, strict=True)]


def _module(run: Function, kinds: Sequence[object], asked: _PartitionRequest) -> bytes:
    axes = [(_AXIS, asked.devices)]
    mesh = AbstractMesh((asked.devices,), (_AXIS,))
    context = sharding_impls.SPMDAxisContext(cast("Any", mesh), frozenset({_AXIS}))
    # XLA asks while the user's mesh may be set (`jax.set_mesh`). With explicit axes jax 0.12 then
    # places the arrays of this program on that mesh, by custom calls that nothing replaces, and the
    # program cannot be compiled. It can go when jax lowers these within a partitioner too.
    alone = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    with internal_config(), jax.enable_x64(asked.wide), alone:
        traced = jax.make_jaxpr(run, axis_env=axes)(*kinds)
        with core.extend_axis_env_nd(axes):
            module = build_mlir_module_helper(
                traced,
                name=_TARGET,
                platforms=asked.platforms,
                backend=None,
                axis_context=context,
            )
        return module_to_bytecode(module)


# XLA divides a program among devices after jax has lowered it, and asks the partitioner of a custom
# call how the call is to be divided. `jax.experimental.custom_partitioning` stands on the same
# function; it needs the mesh, which a program without explicit shardings does not name. Without it,
# XLA gathers every activation on every device. It can go when jax has a histogram that is divided.
xla_client.register_custom_call_partitioner(
    _TARGET,
    lambda sharding, *_: sharding,
    _partition,
    lambda *_: xla_client.HloSharding.replicate(),
    True,
)
