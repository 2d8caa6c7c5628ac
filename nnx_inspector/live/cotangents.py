"""Cotangents of many values, sent to the host in few messages.

Each watched value passes through a tap. A collector sits at one of the first taps, so that the
backward pass reaches it last. It hands out sinks, receives the summaries of the cotangents as the
sinks' gradients, and sends them all at once. A tap whose collector is not differentiated sends its
own. Invariant: bitwise the identity, forward and backward; every cotangent is sent once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from nnx_inspector._compat import jaxprs
from nnx_inspector._compat.configuration import ours
from nnx_inspector._compat.native import computed_once
from nnx_inspector._compat.sharding import zeros_of
from nnx_inspector.program.host import tell, tied
from nnx_inspector.stats.arithmetic import points_dtype
from nnx_inspector.stats.measure_gauges import gauge, sampled, varied
from nnx_inspector.stats.packing import pack, packed_size
from nnx_inspector.stats.summarize import summarize

SLOTS = 64
"""The number of sinks of a collector."""

SIZE = packed_size(jnp.float32)


@jax.custom_batching.custom_vmap
def measured_if(gate: Any, x: Any) -> Any:
    """The summary of `x` and its gauge if `gate` is true, else those of nothing. Under vmap they
    cover the whole batch.
    """
    return jax.lax.cond(gate, _measured, _nothing_of, x)


@ours()
def beginning(held: Any, arguments: Any) -> Any:
    """The data sent as a pass begins: samples of its parameters, and whether its arguments vary."""
    return jnp.stack([*map(sampled, held), varied(arguments)])


@jax.custom_batching.custom_vmap
def beginning_if(gate: Any, held: Any, arguments: Any) -> Any:
    """`beginning` if `gate` is true, else zeros. Under vmap it is made once, from all arguments of
    the batch and the first model's parameters.
    """

    def nothing(held: Any, arguments: Any) -> Any:
        return zeros_of(jax.eval_shape(beginning, held, arguments))

    return jax.lax.cond(gate, beginning, nothing, held, arguments)


@beginning_if.def_vmap
def _beginning_batch(
    axis_size: int, in_batched: Any, gate: Any, held: Any, arguments: Any
) -> tuple[Any, Any]:
    _, of_held, of_arguments = in_batched
    held = [x[0] if batched else x for x, batched in zip(held, of_held, strict=True)]
    arguments = [
        x.reshape(-1, *x.shape[2:]) if batched else x
        for x, batched in zip(arguments, of_arguments, strict=True)
    ]
    return beginning_if(jnp.any(gate), held, arguments), False


@jax.custom_batching.custom_vmap
def packed_if(gate: Any, x: Any) -> Any:
    """The packed summary of `x` if `gate` is true, else that of nothing."""
    return jax.lax.cond(gate, _packed, _nothing_packed, x)


def _packed(x: Any) -> Any:
    return pack(summarize(x))


def _measured(x: Any) -> Any:
    return summarize(x), gauge(x)


def _nothing_of(x: Any) -> Any:
    return jax.tree.map(zeros_of, jax.eval_shape(_measured, x))


def _nothing_packed(x: Any) -> Any:
    return zeros_of(jax.eval_shape(_packed, x))


@measured_if.def_vmap
def _measured_batch(axis_size: int, in_batched: Any, gate: Any, x: Any) -> tuple[Any, Any]:
    found = measured_if(jnp.any(gate), x)
    return found, jax.tree.map(lambda _: False, found)


@packed_if.def_vmap
def _packed_batch(axis_size: int, in_batched: Any, gate: Any, x: Any) -> tuple[Any, bool]:
    return packed_if(jnp.any(gate), x), False


class Collectors:
    """The collectors of one trace level; `tap` passes a value through.

    Args:
        gate: bool[], whether anything is sent.
        ticket: int32[...], sent with every message.
        told: `(names, rows) -> host`: called with the ticket and one packed summary for each name.
    """

    def __init__(self, gate: Any, ticket: Any, told: Callable[[list[Any]], Callable[..., None]]):
        self._gate, self._ticket, self._told = gate, ticket, told
        self._taps = 0
        self._open: list[_Collector] = []

    def tap(self, x: jax.Array, name: Any) -> jax.Array:
        """Return `x`, and send the summary of its cotangent under `name` in the backward pass."""
        sinks: list[Any] = []
        if points_dtype(x.dtype) == np.float32 and not jaxprs.varying_axes(x):
            self._open = [c for c in self._open if c.names_left()]
            if not self._open or self._taps & (self._taps + 1) == 0:
                # at taps 0, 1, 3, 7 ...: any of them may be the first that is differentiated
                x, collector = self._collector(x)
                self._open.append(collector)
            sinks = [collector.hand_out(name) for collector in self._open]
            self._taps += 1
        own = self._told([name])
        return _tap.bind(x, self._gate, self._ticket, *sinks, host=own)

    def _collector(self, x: jax.Array) -> tuple[jax.Array, _Collector]:
        collector = _Collector()
        host = self._told(collector.names)
        x, *sinks = _gather.bind(x, self._gate, self._ticket, host=host)
        collector.sinks = sinks
        return x, collector


class _Collector:
    def __init__(self) -> None:
        self.names: list[Any] = []
        self.sinks: list[Any] = []

    def names_left(self) -> bool:
        return len(self.names) < SLOTS

    def hand_out(self, name: Any) -> Any:
        self.names.append(name)
        return self.sinks[len(self.names) - 1]


# ----------------------------------------------------------------- the collector

_gather = Primitive("nnx_inspector_gather")
_gather_linear = Primitive("nnx_inspector_gather_linear")


def _gather_now(x: Any, *_: Any, host: Any) -> list[Any]:
    with ours():
        return [x, *[jnp.zeros(SIZE, jnp.float32)] * SLOTS]


for _primitive in (_gather, _gather_linear):
    _primitive.multiple_results = True
    _primitive.def_impl(_gather_now)
    _primitive.def_abstract_eval(
        lambda x, *_, host: [x, *[ShapedArray((SIZE,), jnp.dtype("float32"))] * SLOTS]
    )
    mlir.register_lowering(_primitive, mlir.lower_fun(_gather_now, multiple_results=True))


def _gather_jvp(primals: Any, tangents: Any, *, of: Primitive, host: Any) -> Any:
    out = of.bind(*primals, host=host)
    if type(tangents[0]) is ad.Zero:
        return out, [jaxprs.no_tangent(x) for x in out]
    return out, _gather_linear.bind(tangents[0], *primals[1:], host=host)


def _gather_transpose(cts: Any, t: Any, gate: Any, ticket: Any, *, host: Any) -> Any:
    ct, *sunk = cts
    if all(type(c) is ad.Zero for c in sunk):
        return ct, None, None
    ct = ad.instantiate_zeros(ct)
    used = [n for n, c in enumerate(sunk) if type(c) is not ad.Zero]
    zero = tell(_Some(host, tuple(used)), gate, ticket, *(sunk[n] for n in used))
    return tied(ct, zero), None, None


class _Some:
    """A host function that also receives the numbers of the sinks with a gradient."""

    def __init__(self, host: Callable[..., None], used: tuple[int, ...]):
        self._host, self._used = host, used

    def __call__(self, ticket: Any, *payloads: Any) -> None:
        self._host(ticket, *payloads, used=self._used)


def _gather_batch(args: Any, dims: Any, *, of: Primitive, host: Any) -> Any:
    out = of.bind(args[0], *_unbatched(args[1:], dims[1:]), host=host)
    return out, [dims[0], *[None] * SLOTS]


def _unbatched(args: Any, dims: Any) -> list[Any]:
    return [x if d is None else jnp.take(x, 0, axis=d) for x, d in zip(args, dims, strict=True)]


ad.primitive_transposes[_gather_linear] = _gather_transpose

# ----------------------------------------------------------------------- the tap

_tap = Primitive("nnx_inspector_tap")
_tap.def_impl(lambda x, *_, host: x)
_tap.def_abstract_eval(lambda x, *_, host: x)
mlir.register_lowering(_tap, lambda ctx, x, *_, host: [x])

_tap_linear = Primitive("nnx_inspector_tap_linear")
_tap_linear.def_impl(lambda t, *_, host: t)
_tap_linear.def_abstract_eval(lambda t, *_, host: t)
mlir.register_lowering(_tap_linear, lambda ctx, t, *_, host: [t])


def _tap_jvp(primals: Any, tangents: Any, *, host: Any) -> Any:
    out = _tap.bind(*primals, host=host)
    t, _, _, *t_sinks = tangents
    if type(t) is ad.Zero:
        return out, t
    live = [s for s in t_sinks if type(s) is not ad.Zero]
    return out, _tap_linear.bind(t, primals[1], primals[2], *live[:1], host=host)


def _tap_linear_jvp(primals: Any, tangents: Any, *, host: Any) -> Any:
    out = _tap_linear.bind(*primals, host=host)
    t = tangents[0]
    if type(t) is ad.Zero:
        return out, t
    live = [s for s in tangents[3:] if type(s) is not ad.Zero]
    return out, _tap_linear.bind(t, primals[1], primals[2], *live[:1], host=host)


def _tap_transpose(ct: Any, t: Any, gate: Any, ticket: Any, *sink: Any, host: Any) -> Any:
    if type(ct) is ad.Zero:
        return (ct if ad.is_undefined_primal(t) else None), None, None, *[None for _ in sink]
    with ours():
        ct = computed_once(ct)
        payload = packed_if(gate, jax.lax.stop_gradient(ct))
    if sink and ad.is_undefined_primal(sink[0]):
        return ct, None, None, payload
    return tied(ct, tell(host, gate, ticket, payload)), None, None, *[None for _ in sink]


def _tap_batch(args: Any, dims: Any, *, of: Primitive, host: Any) -> Any:
    x, *rest = args
    if dims[0] is None:
        size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
        x = jnp.broadcast_to(x, (size, *x.shape))
    rest = _unbatched(rest, dims[1:])
    return of.bind(x, *rest, host=host), dims[0] or 0


ad.primitive_jvps[_tap] = _tap_jvp
ad.primitive_jvps[_tap_linear] = _tap_linear_jvp
ad.primitive_transposes[_tap_linear] = _tap_transpose


def _register(rule: Callable[..., Any], table: Any, primitive: Primitive) -> None:
    table[primitive] = lambda *args, **params: rule(*args, of=primitive, **params)


for _primitive in (_gather, _gather_linear):
    _register(_gather_jvp, ad.primitive_jvps, _primitive)
    _register(_gather_batch, batching.primitive_batchers, _primitive)
for _primitive in (_tap, _tap_linear):
    _register(_tap_batch, batching.primitive_batchers, _primitive)
