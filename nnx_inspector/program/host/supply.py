"""Sinks that are drawn while a pass runs, and what they receive when it is differentiated.

A pass does not know beforehand how many cotangents it will measure. It has a supply, a zero that
depends on everything with respect to which the pass may be differentiated; each sink is drawn from
the supply. What a sink receives is kept while the backward pass is traced, and the supply, which is
transposed last, sends all of it to the host in one message. Invariant: bitwise the identity; where
nothing is differentiated, nothing is sent. Knows no sites.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from nnx_inspector._compat import jaxprs, jit
from nnx_inspector._compat.configuration import ours
from nnx_inspector._compat.sharding import first_along, zeros_of
from nnx_inspector.program.host.primitives import tell, tied


class Received:
    """What the sinks of one pass received.

    A program that is traced once may be transposed several times: leftovers of an abandoned
    backward pass are dropped.
    """

    def __init__(self) -> None:
        self._found: list[tuple[Any, int, Any]] = []

    def put(self, number: int, cotangent: Any) -> None:
        """Keep what a sink received, in the trace of its backward pass."""
        self._found.append((jit.trace_state(), number, cotangent))

    def take(self) -> dict[int, Any]:
        """What the sinks received in this trace, by their numbers."""
        state, found = jit.trace_state(), self._found
        self._found = [one for one in found if one[0] != state and not jit.trace_is_over(one[0])]
        return {number: cotangent for of, number, cotangent in found if of == state}


Send = Callable[[dict[int, Any]], tuple[Callable[..., None], Sequence[Any]]]
"""A function of what was received that returns the function for the host, and its arrays."""

Moved = Callable[[Sequence[bool]], None]

_supply = Primitive("nnx_inspector_supply")
_linear = Primitive("nnx_inspector_supply_linear")


def supply_of(
    values: Sequence[jax.Array],
    ticket: Any,
    gate: Any,
    *,
    received: Received,
    send: Send,
    moved: Moved,
    apart: bool = False,
) -> jax.Array:
    """A zero that sinks can be drawn from, float32[].

    Args:
        values: with respect to which the pass may be differentiated: floating or complex arrays.
        ticket: identifies the pass; the host gets it first.
        gate: bool[], whether to send the message.
        received: keeps what the sinks receive.
        send: makes the message. The host's function must not raise.
        moved: called with whether the pass is differentiated with respect to each of the values,
            where it is at all; also if no cotangent ever comes back.
        apart: whether the one vmap here maps the members of an ensemble, and each has its own zero.
            All examples of another vmap share one, and are measured together.
    """
    # within a shard_map it differs between devices if one of the values does
    like = max(map(jax.typeof, values), key=lambda aval: len(jaxprs.varying_axes(aval)))
    kind = _like(like, (), jnp.float32)
    how = {"kind": kind, "apart": apart, "received": received, "send": send, "moved": moved}
    return _supply.bind(*values, ticket, gate, **how)


def _zero(*_: Any, kind: Any, **how: Any) -> jax.Array:
    return jnp.zeros(kind.shape)


def _like(x: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    spec = PartitionSpec(*[None] * len(shape))
    where = NamedSharding(x.sharding.mesh, spec)
    return x.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=where)


def _supply_jvp(primals: Any, tangents: Any, *, of: Primitive, **params: Any) -> Any:
    out = of.bind(*primals, **params)
    nonzero = [type(t) is not ad.Zero for t in tangents[:-2]]
    if not any(nonzero):
        return out, jaxprs.no_tangent(out)
    if of is _supply:
        params["moved"](nonzero)
    moved = [t for t, is_nonzero in zip(tangents[:-2], nonzero, strict=True) if is_nonzero]
    return out, _linear.bind(*moved, *primals[-2:], **params)


@ours()
def _supply_transpose(ct: Any, *xs: Any, received: Received, send: Send, **_: Any) -> Any:
    *tangents, ticket, gate = xs
    out = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in xs]
    found = received.take()
    if found:
        host, arrays = send(found)
        zero = tell(host, gate, ticket, *arrays)
        wanted = [i for i, x in enumerate(tangents) if ad.is_undefined_primal(x)]
        # tied to the least of them, as a transform may drop what nothing depends on; x - 0 is x
        least = min(wanted, key=lambda i: tangents[i].aval.size)
        out[least] = tied(-zeros_of(tangents[least].aval), zero)
    return out


def _supply_batch(
    args: Any, dims: Any, *, of: Primitive, apart: bool, kind: Any, **params: Any
) -> Any:
    *values, ticket, gate = args
    if apart:
        size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
        kind = _like(kind, (size, *kind.shape), kind.dtype)
    numbers = map(first_along, (ticket, gate), dims[-2:])
    out = of.bind(*values, *numbers, apart=False, kind=kind, **params)
    return out, 0 if apart else None


for _primitive in (_supply, _linear):
    _primitive.def_impl(_zero)
    _primitive.def_abstract_eval(lambda *_, kind, **how: kind)
    mlir.register_lowering(_primitive, mlir.lower_fun(_zero, multiple_results=False))
    ad.primitive_jvps[_primitive] = functools.partial(_supply_jvp, of=_primitive)
    batching.primitive_batchers[_primitive] = functools.partial(_supply_batch, of=_primitive)
ad.primitive_transposes[_linear] = _supply_transpose

# --------------------------------------------------------------------- drawing

_draw = Primitive("nnx_inspector_draw")


def draw(supply: jax.Array, like: Any, *, number: int, received: Received) -> jax.Array:
    """A sink like `like`, of -0.0, which changes nothing that it is added to."""
    shape, dtype = tuple(like.shape), jnp.dtype(like.dtype)
    return _draw.bind(supply, shape=shape, dtype=dtype, number=number, received=received)


@ours()
def _drawn(supply: Any, *, shape: tuple[int, ...], dtype: Any, **_: Any) -> jax.Array:
    return jnp.full((*supply.shape, *shape), -0.0, dtype)


def _draw_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    out = _draw.bind(*primals, **params)
    moved = type(tangents[0]) is not ad.Zero
    return out, _draw.bind(*tangents, **params) if moved else jaxprs.no_tangent(out)


@ours()
def _draw_transpose(
    ct: Any, supply: Any, *, number: int, received: Received, **_: Any
) -> list[Any]:
    if type(ct) is ad.Zero:
        return [None]
    received.put(number, ct)
    return [zeros_of(supply.aval)]


def _draw_batch(args: Any, dims: Any, **params: Any) -> Any:
    return _draw.bind(jnp.moveaxis(args[0], dims[0], 0), **params), 0


_draw.def_impl(_drawn)
_draw.def_abstract_eval(
    lambda supply, *, shape, dtype, **_: _like(supply, (*supply.shape, *shape), dtype)
)
mlir.register_lowering(_draw, mlir.lower_fun(_drawn, multiple_results=False))
ad.primitive_jvps[_draw] = _draw_jvp
ad.primitive_transposes[_draw] = _draw_transpose
batching.primitive_batchers[_draw] = _draw_batch
