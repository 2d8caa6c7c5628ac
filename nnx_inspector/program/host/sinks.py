"""Sinks: an identity whose transpose gives the cotangent's summary as the gradient of an array.

For calls that run as they stand, in a watched loop or because they cannot be traced; `rewrite`
marks gradients instead. Invariant: the identity, bitwise, under every transformation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.configuration import ours
from nnx_inspector._compat.native import computed_once
from nnx_inspector._compat.sharding import counted_once, first_along
from nnx_inspector.program.members import are_mapped
from nnx_inspector.stats.census import Sample
from nnx_inspector.stats.packing import pack, packed_size, unpack
from nnx_inspector.stats.summarize import merge_rows, summarize

_tap = Primitive("nnx_inspector_observe_cotangent")
_tap.def_impl(lambda x, *_, **how: x)
_tap.def_abstract_eval(lambda x, *_, **how: x)
mlir.register_lowering(_tap, lambda ctx, x, *_, **how: [x])

# linear in (tangent, sink) and equal to the tangent; we define its transpose
_tap_linear = Primitive("nnx_inspector_observe_cotangent_linear")
_tap_linear.def_impl(lambda t, *_, **how: t)
_tap_linear.def_abstract_eval(lambda t, *_, **how: t)
mlir.register_lowering(_tap_linear, lambda ctx, t, *_, **how: [t])


# has no elements: all that it tells is which vmaps map an array
_extent = Primitive("nnx_inspector_extent")


def _no_elements(x: Any, *, sizes: tuple[int, ...]) -> jax.Array:
    return jnp.zeros((*sizes, 0), jnp.float32)


def _extent_jvp(primals: Any, _: Any, **how: Any) -> Any:
    return (extent := _extent.bind(*primals, **how)), jaxprs.no_tangent(extent)


def _batch_extent(args: Any, dims: Any, *, sizes: tuple[int, ...]) -> Any:
    return _extent.bind(*args, sizes=(args[0].shape[dims[0]], *sizes)), 0


def observe_cotangent(
    x: jax.Array,
    sink: jax.Array,
    *,
    sample: Sample = "auto",
    gate: Any = None,
    always: bool = True,
    apart: bool = False,
    each: bool = False,
) -> jax.Array:
    """Returns `x`; the gradient with respect to `sink` is the packed summary of that of `x`.

    Args:
        x: a floating-point or complex array.
        sink: zeros, `[packed_size(x.dtype)]` of `sink_dtype(x.dtype)`.
        sample: see `summarize`.
        gate: bool[], whether it is measured, or None; see `measured_if`.
        always: whether to compute a cotangent even if the program would not, because the value does
            not depend on what is differentiated.
        apart, each: see `measured_if`.
    """
    gates = [] if gate is None else [gate]
    how = {"rows": 0, "sample": sample, "always": always, "apart": apart, "each": each}
    return _tap.bind(x, sink, *gates, **how)


@ours()
def sink_like(x: Any, rows: tuple[int, ...] = ()) -> jax.Array:
    """The zeros to pass to `observe_cotangent` as the sink of an array like `x`."""
    return jnp.zeros((*rows, packed_size(x.dtype)), sink_dtype(x.dtype))


def sink_dtype(dtype: Any) -> Any:
    return jnp.float64 if dtype in (jnp.float64, jnp.complex128) else jnp.float32


def _tap_jvp(primals: Any, tangents: Any, **how: Any) -> Any:
    x, _, *gates = primals
    rest = [*gates, *(_extent.bind(x, sizes=()) for _ in gates)]
    return _tap.bind(*primals, **how), _tapped_tangent(*tangents[:2], *rest, **how)


def _tap_linear_jvp(primals: Any, tangents: Any, **how: Any) -> Any:
    return _tap_linear.bind(*primals, **how), _tapped_tangent(*tangents[:2], *primals[2:], **how)


def _tapped_tangent(t: Any, t_sink: Any, *rest: Any, always: bool, **how: Any) -> Any:
    if type(t_sink) is ad.Zero or (type(t) is ad.Zero and not always):
        return t
    return _tap_linear.bind(ad.instantiate_zeros(t), t_sink, *rest, always=always, **how)


def _tap_transpose(
    ct: Any, t: Any, sink: Any, *gated: Any, rows: int, sample: Sample, always: bool, **which: bool
) -> Any:
    rest = [None for _ in gated]
    if type(ct) is ad.Zero:
        return None, None, *rest
    payload = None
    if ad.is_undefined_primal(sink):
        with ours():
            measure = _Packed(rows, sample)
            if gated:
                payload = measured_if(gated[0], measure, ct, gated[1], **which)
            else:
                payload = measure(ct)
            ct = computed_once(ct, after=[payload])
            payload = counted_once(payload, ct, jaxprs.varying_axes(sink))
    return (ct if ad.is_undefined_primal(t) else None), payload, *rest


def measured_if(
    gate: Any,
    measure: Callable[..., Any],
    x: jax.Array,
    extent: Any = (),
    *,
    apart: bool = False,
    each: bool = False,
) -> Any:
    """`measure(x, gate)`, which is zeros unless the gate is open.

    Under vmap it covers the whole batch at once; with `apart`, each entry of the one vmap here,
    which maps the members of an ensemble; with `each`, each entry of every vmap, also of a later
    one. Where a vmap maps `extent` and not `x` (a loss that sends the same to each example), each
    entry is an `x`. `measure` is hashable: equal functions share what is traced.
    """
    x = jax.lax.stop_gradient(x)
    apart = apart and are_mapped([x, *jax.tree.leaves(extent)])
    return _gated(measure, each or apart, each)(gate, x, extent)


@dataclasses.dataclass(frozen=True)
class _OfEach:
    """What a function measures of each entry of an array's first axis."""

    measure: Callable[..., Any]

    def __call__(self, x: jax.Array, gate: Any) -> Any:
        return jax.vmap(lambda x: self.measure(x, gate))(x)


@functools.lru_cache(maxsize=64)
def _gated(
    measure: Callable[..., Any], apart: bool, again: bool
) -> Callable[[Any, jax.Array, Any], Any]:
    @jax.custom_batching.custom_vmap
    def measured(gate: Any, x: Any, extent: Any) -> Any:
        return measure(x, gate)

    @measured.def_vmap
    def _batch(size: int, batched: Any, gate: Any, x: Any, extent: Any) -> Any:
        mapped = batched[1]
        if not mapped and any(jax.tree.leaves(batched[2])):
            mapped, x = True, jnp.broadcast_to(x, (size, *x.shape))
        apart_here = apart and mapped
        inner = _gated(_OfEach(measure) if apart_here else measure, again, again)
        found = inner(jnp.any(gate), x, extent)
        return found, jax.tree.map(lambda _: apart_here, found)

    return measured


@dataclasses.dataclass(frozen=True)
class _Packed:
    """The packed summary of an array, for each of its rows."""

    rows: int
    sample: Sample

    def __call__(self, x: jax.Array, *gate: Any) -> jax.Array:
        return pack(summarize(x, *gate, batch_rank=self.rows, sample=self.sample))


def _batcher(primitive: Primitive) -> Any:
    def batch(args: Any, dims: Any, *, rows: int, **how: Any) -> Any:
        (x, sink, *gates), (x_dim, sink_dim, *_) = args, dims
        if sink_dim is None:  # one sink for the whole batch: its summary covers all of it
            if rows and x_dim is not None:
                x = jnp.moveaxis(x, x_dim, -1)
                return primitive.bind(x, sink, *gates, rows=rows, **how), x.ndim - 1
            return primitive.bind(x, sink, *gates, rows=rows, **how), x_dim
        size = sink.shape[sink_dim]
        sink = jnp.moveaxis(sink, sink_dim, 0)
        whole = (size, *x.shape)
        x = jnp.broadcast_to(x, whole) if x_dim is None else jnp.moveaxis(x, x_dim, 0)
        return primitive.bind(x, sink, *gates, rows=rows + 1, **how), 0

    return batch


# one sink for each of several devices; their summaries are merged, not added
_apart = Primitive("nnx_inspector_sinks_apart")


def sinks_apart(sink: jax.Array, count: int, at: NamedSharding | None = None) -> jax.Array:
    """A sink for each of `count` devices, `[count, *sink.shape]`; `at` is its explicit sharding.

    The gradient with respect to `sink` is the packed summary of everything these sinks received.
    """
    return _apart.bind(sink, axis=0, count=count, at=at)


def _stacked(sink: jax.Array, *, axis: int, count: int, at: NamedSharding | None) -> jax.Array:
    sinks = jnp.stack([sink] * count, axis)
    return sinks if at is None else jax.sharding.reshard(sinks, _behind(at, axis))


def _behind(at: NamedSharding, axis: int) -> NamedSharding:
    return NamedSharding(at.mesh, PartitionSpec(*[None] * axis, *at.spec))


def _apart_aval(sink: Any, *, axis: int, count: int, at: NamedSharding | None) -> Any:
    shape = (*sink.shape[:axis], count, *sink.shape[axis:])
    spec = PartitionSpec(*[None] * len(shape)) if at is None else _behind(at, axis).spec
    mesh = sink.sharding.mesh if at is None else at.mesh
    return sink.update(shape=shape, sharding=NamedSharding(mesh, spec))


def _batch_apart(args: Any, dims: Any, *, axis: int, **params: Any) -> Any:
    return _apart.bind(jnp.moveaxis(args[0], dims[0], 0), axis=axis + 1, **params), 0


def _transpose_apart(ct: Any, _: Any, *, axis: int, **params: Any) -> Any:
    return [pack(merge_rows(unpack(ct), axis=axis))]


# a sink within a branch of a cond: each example of a batched vmap has one, which only counts if the
# example takes the branch
_branch = Primitive("nnx_inspector_sink_of_branch")
_merged = Primitive("nnx_inspector_sink_merged")


def sink_of_branch(sink: jax.Array, index: jax.Array) -> jax.Array:
    """`sink`, for a branch of a cond that `index` chooses, perhaps for each example of a batch."""
    return _branch.bind(sink, index)


def _batch_branch(args: Any, dims: Any) -> Any:
    (sink, index), (sink_dim, index_dim) = args, dims
    if sink_dim is None:
        sink, sink_dim = _apart.bind(sink, axis=0, count=index.shape[index_dim], at=None), 0
    one = first_along(index, index_dim)
    return _branch.bind(sink, one), sink_dim  # a vmap further out has its examples too


def _branch_jvp(primals: Any, tangents: Any) -> Any:
    t, index = tangents[0], primals[1]
    return _branch.bind(*primals), t if type(t) is ad.Zero else _branch.bind(t, index)


def _batch_merged(args: Any, dims: Any) -> Any:
    (ct,), (dim,) = args, dims
    return _merged.bind(pack(merge_rows(unpack(jnp.moveaxis(ct, dim, 0))))), None


_branch.def_impl(lambda sink, index: sink)
_branch.def_abstract_eval(lambda sink, index: sink)
mlir.register_lowering(_branch, lambda ctx, sink, index: [sink])
ad.primitive_jvps[_branch] = _branch_jvp
ad.primitive_transposes[_branch] = lambda ct, sink, index: [
    ct if type(ct) is ad.Zero else _merged.bind(ct),
    None,
]
batching.primitive_batchers[_branch] = _batch_branch
_merged.def_impl(lambda ct: ct)
_merged.def_abstract_eval(lambda ct: ct)
mlir.register_lowering(_merged, lambda ctx, ct: [ct])
batching.primitive_batchers[_merged] = _batch_merged

_extent.def_impl(_no_elements)
_extent.def_abstract_eval(lambda x, *, sizes: ShapedArray((*sizes, 0), np.dtype(np.float32)))
mlir.register_lowering(_extent, mlir.lower_fun(_no_elements, multiple_results=False))
ad.primitive_jvps[_extent] = _extent_jvp
batching.primitive_batchers[_extent] = _batch_extent

_apart.def_impl(jax.jit(_stacked, static_argnames=("axis", "count", "at")))
_apart.def_abstract_eval(_apart_aval)
mlir.register_lowering(_apart, mlir.lower_fun(_stacked, multiple_results=False))
ad.deflinear2(_apart, _transpose_apart)
batching.primitive_batchers[_apart] = _batch_apart

ad.primitive_jvps[_tap] = _tap_jvp
ad.primitive_jvps[_tap_linear] = _tap_linear_jvp
ad.primitive_transposes[_tap_linear] = _tap_transpose
batching.primitive_batchers[_tap] = _batcher(_tap)
batching.primitive_batchers[_tap_linear] = _batcher(_tap_linear)
