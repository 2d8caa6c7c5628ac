"""Lets a running program ask the host for arrays (`ask`) and send it arrays (`tell`).

Both are primitives with an effect. Under remat a call happens once: its answer is saved, so forward
pass and recomputation agree. Under vmap there is one call for the whole batch. Invariant: nothing
here is differentiated, and neither primitive keeps a tracer. Knows no sites and no sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from nnx_inspector._compat import jaxprs, jit, started
from nnx_inspector._compat.configuration import ours
from nnx_inspector._compat.host_calls import EFFECT, call_host
from nnx_inspector._compat.sharding import first_along, left_to_the_compiler
from nnx_inspector.program.structure import is_observable

# ---------------------------------------------------------------------- asking

ASK = Primitive("nnx_inspector_ask")
ASK.multiple_results = True


@ours()
def ask(
    host: Callable[..., tuple[Any, ...]],
    avals: Sequence[jax.ShapeDtypeStruct],
    after: Sequence[Any] = (),
    *,
    once: bool = True,
    device: jax.Array | None = None,
) -> list[jax.Array]:
    """What `host()` returns when the program gets here: arrays like `avals`.

    Args:
        host: called on any thread; it must not raise.
        avals: the shapes and dtypes of the arrays it returns.
        after: pytrees; `host` is called once the first array of each is known. In a loop this makes
            a call for each iteration.
        once: whether to make exactly one call; otherwise there may be two. Within a while loop,
            exactly one would prevent the program from being differentiated.
        device: within a `shard_map`, the number of the device, which is then passed to `host`; all
            devices must get the same answer.
    """
    of = [] if device is None else [device]
    operands = [*of, *(x for tree in after for x in _first_element(tree))]
    if not once and jit.is_tracing():
        return _question(lambda *xs: host(*xs[: len(of)]), list(avals))(*operands)
    shapes = tuple((a.shape, jnp.dtype(a.dtype)) for a in avals)
    return ASK.bind(*operands, host=host, shapes=shapes, told=len(of))


def _question(host: Callable[..., Any], avals: list[Any]) -> Callable[..., list[jax.Array]]:
    """A call of the host that may be dropped or made twice, one for the whole batch of a vmap."""

    @jax.custom_batching.custom_vmap
    def asked(*operands: Any) -> list[jax.Array]:
        return list(jax.pure_callback(host, avals, *operands))

    @asked.def_vmap
    def _batch(size: int, batched: Any, *operands: Any) -> Any:
        one = [first_along(x) if mapped else x for x, mapped in zip(operands, batched, strict=True)]
        return asked(*one), [False] * len(avals)

    return asked


def _first_element(tree: Any) -> list[jax.Array]:
    """A list of one number of a tree, as float32, to depend on it; empty for an empty tree."""
    for leaf in jax.tree.leaves(tree):
        if is_observable(leaf) and leaf.size and jit.is_tracer(leaf):
            return [left_to_the_compiler(_first, jax.lax.stop_gradient(leaf))]
    return []


def _first(x: jax.Array) -> jax.Array:
    return jnp.real(jnp.ravel(x)[0]).astype(jnp.float32)


@ours()
def _ask_impl(*operands: Any, host: Any, shapes: Any, told: int) -> list[jax.Array]:
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return call_host(lambda *xs: host(*xs[:told]), avals, *operands)


def _ask_now(*operands: Any, host: Any, shapes: Any, told: int) -> list[jax.Array]:
    started.wait()  # programs started before must ask first
    return [jnp.asarray(x) for x in host(*operands[:told])]


ASK.def_impl(_ask_now)
ASK.def_effectful_abstract_eval(
    lambda *_, shapes, **how: ([ShapedArray(*s) for s in shapes], {EFFECT})
)
mlir.register_lowering(ASK, mlir.lower_fun(_ask_impl, multiple_results=True))


def _ask_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    out = ASK.bind(*primals, **params)
    return out, [jaxprs.no_tangent(x) for x in out]


def _ask_batch(args: Any, dims: Any, **params: Any) -> Any:
    out = ASK.bind(*map(first_along, args, dims), **params)
    return out, [None] * len(out)


ad.primitive_jvps[ASK] = _ask_jvp
batching.primitive_batchers[ASK] = _ask_batch

# --------------------------------------------------------------------- telling

TELL = Primitive("nnx_inspector_tell")


@ours()
def tell(host: Callable[..., None], gate: Any, *arrays: Any) -> jax.Array:
    """Call `host(*arrays)` when the program gets here, if `gate` is true then.

    Args:
        host: called on any thread, with NumPy arrays of its own; it must not raise.
        gate: bool[], under vmap the same for every example.
        arrays: the arrays to send; under vmap their first axis is the batch, except in a number
            that all examples share.

    Returns:
        A zero, to be `tied` to a value that the program needs: a transform of a loop may drop an
        equation that nothing depends on.
    """
    return TELL.bind(gate, *map(jax.lax.stop_gradient, arrays), host=host)


@ours()
def _tell_impl(gate: Any, *arrays: Any, host: Any) -> jax.Array:
    def taken(*arrays: Any) -> tuple[()]:
        host(*arrays)
        return ()

    def now(*arrays: Any) -> None:
        call_host(taken, (), *arrays)

    jax.lax.cond(gate, now, lambda *_: None, *arrays)
    return jnp.zeros((), jnp.float32)  # known at once: the program does not wait for the host


def _tell_now(gate: Any, *arrays: Any, host: Any) -> jax.Array:
    if bool(gate):
        host(*map(np.array, arrays))
    return jnp.zeros((), jnp.float32)


TELL.def_impl(_tell_now)
TELL.def_effectful_abstract_eval(
    lambda gate, *arrays, host: (ShapedArray((), jnp.dtype("float32")), {EFFECT})
)
mlir.register_lowering(TELL, mlir.lower_fun(_tell_impl, multiple_results=False))


def _tell_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    out = TELL.bind(*primals, **params)
    return out, jaxprs.no_tangent(out)


def _tell_batch(args: Any, dims: Any, *, host: Any) -> Any:
    (gate, *arrays), (gate_dim, *array_dims) = args, dims
    if gate_dim is not None:
        gate = jnp.any(gate)
    pairs = list(zip(arrays, array_dims, strict=True))
    mapped = [(x, d) for x, d in pairs if d is not None]
    of_all = any(d is None and jnp.ndim(x) for x, d in pairs)
    if of_all and all(jnp.ndim(x) == 1 for x, _ in mapped):
        # a cond for each example has mapped the number that they share, and nothing that is sent
        return TELL.bind(gate, *map(first_along, arrays, array_dims), host=host), None
    size = next((x.shape[d] for x, d in mapped), 1)

    def whole(x: Any, dim: int | None) -> Any:
        if dim is not None:
            return jnp.moveaxis(x, dim, 0)
        return jnp.broadcast_to(x, (size, *jnp.shape(x))) if jnp.ndim(x) else x

    return TELL.bind(gate, *map(whole, arrays, array_dims), host=host), None


ad.primitive_jvps[TELL] = _tell_jvp
batching.primitive_batchers[TELL] = _tell_batch

# ----------------------------------------------------------------------- tying

_tie = Primitive("nnx_inspector_tie")


def tied(x: Any, zero: jax.Array) -> Any:
    """`x`, in a form that every transform treats as dependent on `zero`."""
    return _tie.bind(x, zero)


def _tie_batch(args: Any, dims: Any) -> Any:
    (x, zero), (x_dim, zero_dim) = args, dims
    return _tie.bind(x, first_along(zero, zero_dim)), x_dim


def _tie_jvp(primals: Any, tangents: Any) -> Any:
    return _tie.bind(*primals), tangents[0]


_tie.def_impl(lambda x, zero: x)
_tie.def_abstract_eval(lambda x, zero: x)
mlir.register_lowering(_tie, lambda ctx, x, zero: [x])
ad.primitive_jvps[_tie] = _tie_jvp
ad.primitive_transposes[_tie] = lambda ct, x, zero: [ct, None]
batching.primitive_batchers[_tie] = _tie_batch
