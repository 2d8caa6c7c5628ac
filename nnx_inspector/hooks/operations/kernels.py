"""The pattern of an attention that one kernel computes, from the operands of its call.

The kernel (cudnn's, which `jax.nn.dot_product_attention` calls) never holds the pattern, so the
pattern is computed beside the kernel if it is selected. Invariant: nothing goes back into the
kernel, and a call with operands that are not understood (pages, packed segments, a custom score)
has no pattern. Does not know the hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from nnx_inspector._compat import jaxprs
from nnx_inspector.typing import Array, Params, Value

FUNCTION = "_dot_product_attention"
"""The function with its own derivative in which jax calls the kernel."""

KERNEL = "dot_product_attention_fwd_wrapper"
"""The primitive that is the kernel; also the type of its pattern."""

NO_PATTERN = (
    "{site!r} cannot be changed: a fused kernel computes this attention and never holds the "
    'pattern. Call it with implementation="xla" to perturb the pattern.'
)


_CAUSAL, _PADDED = {"CAUSAL", "PADDING_CAUSAL"}, {"PADDING", "PADDING_CAUSAL"}
_MASKS = {"NO_MASK"} | _CAUSAL | _PADDED


def kernel_pattern(body: object, values: Sequence[object]) -> Callable[[], jax.Array] | None:
    """A function that computes the pattern of the kernel that a function calls; None without a
    kernel.
    """
    bare, _ = jaxprs.open_jaxpr(body)
    env = dict(zip(bare.invars, values, strict=True))
    for one in bare.eqns:
        if is_known_kernel(one) and all(v in env for v in one.invars):
            given = [env[v] for v in one.invars]
            return functools.partial(_pattern, one.params, *given[:2], *given[3:6])
    return None


def is_known_kernel(equation: Value) -> bool:
    """Whether an equation is a kernel's call whose operands determine the pattern."""
    if equation.primitive.name != KERNEL:
        return False
    params, parts = equation.params, equation.invars[6:]  # segments and pages; [0] without them
    own = params.get("score_mod") is not None or any(v.aval.size for v in parts)
    return not own and params["mask_type"].name in _MASKS


def _pattern(
    params: Params, q: Array, k: Array, bias: Array, q_length: Array, k_length: Array
) -> jax.Array:
    """`[batch, head, query, key]`, zero for a query without keys."""
    if not params["layout"]:  # [batch, position, head, feature]
        q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    k = jnp.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
    scores = scores * params["scale"] + (bias if bias.size else 0)
    at, to = (jnp.arange(n) for n in scores.shape[2:])
    seen, window = jnp.ones((at.size, to.size), bool), params["sliding_window_length"]
    if params["mask_type"].name in _CAUSAL:
        seen &= to <= at[:, None]
    if window is not None:
        seen &= at[:, None] - to < window
    if params["mask_type"].name in _PADDED:
        inside = (at < q_length[:, None])[..., None] & (to < k_length[:, None])[:, None]
        seen = seen & inside[:, None]
    return jax.nn.softmax(scores, where=seen).astype(q.dtype)
