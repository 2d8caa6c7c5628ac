"""Where a model turns its residual stream into logits: the last norm and the unembedding after it.

Both are proposed from the traced pass or chosen by the user, and applied to any other value of the
stream by calling the model's own modules. Invariant: what is used is named; a model in which they
cannot be found raises an error that says what was found. Measures nothing.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector.hooks.sites import (
    CALL,
    closest_keys,
    parse_key,
    site_key,
    split_operation,
)
from nnx_inspector.lenses.traced_pass import (
    SiteCalls,
    TracedPass,
    arrays_in,
    copy_of,
    logits_in,
    module_at,
)
from nnx_inspector.stats.summarize import type_text
from nnx_inspector.typing import Array, Float, PyTree, Value

Unembed = str | Callable[[jax.Array], jax.Array] | None
"""A site, a function of the normalised stream, or None for a proposal."""
Norm = str | Callable[[jax.Array], jax.Array] | Literal[False] | None
"""The same for the norm; False for none."""
FUNCTION = "(function)"
NO_LOGITS_ADVICE = (
    "If the model makes no logits over words or classes, a lens has nothing to read. Otherwise "
    "pass unembed= the site that makes them, or a function of the final residual stream, such as "
    "lambda x: x @ model.embed.embedding[...].T, and norm= the norm before it, or False."
)


@dataclasses.dataclass(frozen=True)
class Unembedding:
    """How logits are read from the residual stream.

    Attributes:
        unembed, norm: the site of each; `"(function)"` for a user's function, `""` for no norm, or
            for an unembedding that is not a module.
        stream: the shape of what the norm (or the unembedding, without a norm) receives in the
            pass; () if unknown.
        proposed: whether both are proposals, not the user's choice.
    """

    model: nnx.Module
    unembed: str
    norm: str
    stream: tuple[int, ...]
    _unembed: Any
    _norm: Any
    proposed: bool = False

    @property
    def first_site(self) -> str:
        """The site that receives the stream: the norm or, without one, the unembedding."""
        return self.norm or self.unembed

    def normalised(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return x if not self._norm else self._call(self._norm, x)

    def logits(self, normalised: Float[Array, "*batch d"]) -> Float[Array, "*batch vocabulary"]:
        return self._call(self._unembed, normalised)

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch vocabulary"]:
        return self.logits(self.normalised(x))

    def _call(self, site: Any, x: jax.Array) -> PyTree:
        if callable(site):
            return site(x)
        path, method = parse_key(site)
        module: Any = module_at(copy_of(self.model)(), path)
        return module(x) if method == CALL else getattr(module, method)(x)


def unembedding_of(traced: TracedPass, unembed: Unembed, norm: Norm) -> Unembedding:
    """The reading of a pass, by the chosen unembedding and norm, or by proposals for None.

    Raises:
        ValueError: no module is called, a chosen site is not, or nothing in the pass makes logits.
    """
    traced.require_calls()
    proposed = unembed is None and norm is None
    if unembed is None:
        unembed = _proposed_unembed(traced)
        if unembed is None and norm is not None:
            raise ValueError(no_matrix_text(traced))
    last = None if unembed is None else _chosen_site(traced, unembed, "unembed")
    if norm is None:
        known = proposed or last is not None
        norm = _last_norm(traced, _last_calls(traced, last and last.site)) if known else False
    first = _chosen_site(traced, norm, "norm") if norm else None
    receiver = first or last
    members = traced.ensemble_size(*(calls.site for calls in (first, last) if calls is not None))
    if members:
        raise ValueError(
            f"{receiver.site if receiver else ''!r} belongs to an ensemble of {members} models "
            f"that one call runs together. Pass a function that calls one of them."
        )
    received = () if receiver is None else receiver.received
    return Unembedding(
        traced.model,
        "" if unembed is None else FUNCTION if last is None else last.site,
        "" if not norm else FUNCTION if first is None else first.site,
        tuple(received[0].shape) if received else (),
        unembed,
        norm,
        proposed,
    )


def _chosen_site(traced: TracedPass, given: object, what: str) -> SiteCalls | None:
    """The chosen site; None for a function."""
    if callable(given):
        return None
    if not isinstance(given, str):
        raise TypeError(
            f"{what}= takes the key of a site, a function of an array or None, got {given!r}."
        )
    called = traced.calls
    if given not in called:
        near = ", ".join(map(repr, closest_keys(given, list(called))))
        raise ValueError(
            f"{what}={given!r} is not a site of this call. The closest are {near}. Pass "
            f"{what}=None to have it proposed."
        )
    if traced.module_of(given) is None:
        raise ValueError(
            f"{what}={given!r} is a Linen module inside an nnx.bridge.ToNNX and cannot be called "
            f"by itself. Pass {what}= a function of an array that does the same."
        )
    return called[given]


def _proposed_unembed(traced: TracedPass) -> str | None:
    """The last module whose matrix makes as many classes as the model's output has, if any."""
    own = logits_in(traced.output_shapes)
    if own is None or own.shape[-1] < 2:
        out = arrays_in(traced.output_shapes)
        found = ", ".join(type_text(x.dtype, x.shape) for x in out) or "no array"
        raise ValueError(
            f"This model returns no logits, which are floating-point numbers [..., classes]: it "
            f"returns {found}. {NO_LOGITS_ADVICE}"
        )
    if any(x.shape == own.shape and _is_reconstructed(x) for x in traced.stage.arrays):
        raise ValueError(
            f"The model's output, {type_text(own.dtype, own.shape)}, has the shape of its input, "
            f"so it is no choice among classes. {NO_LOGITS_ADVICE}"
        )
    made = [s for s in _last_calls(traced) if _makes_classes(traced, s, own.shape[-1])]
    return max(made, key=traced.last_call) if made else None


def no_matrix_text(traced: TracedPass) -> str:
    """The error text for a model in which no matrix makes logits."""
    own = logits_in(traced.output_shapes)
    last = max(_last_calls(traced) or traced.calls, key=traced.last_call)
    module = traced.module_of(last)
    linen = any(
        isinstance(m, nnx.bridge.ToNNX) for _, m in nnx.iter_modules(traced.model, graph=True)
    )
    what = "a Linen module" if module is None or linen else f"a {type(module).__name__}"
    what += " over several positions" if _mixes_positions(module) else ""
    return (
        f"No module's matrix makes the model's output, {type_text(own.dtype, own.shape)}: it comes "
        f"from {last!r}, {what}. {NO_LOGITS_ADVICE}"
    )


def _is_reconstructed(x: Value) -> bool:
    """Whether an input is what a model of its shape restores: not words as one-hot rows."""
    whole = jnp.issubdtype(x.dtype, jnp.floating)
    return whole and not bool(((x >= 0) & (jnp.abs(x.sum(-1, keepdims=True) - 1) < 1e-3)).all())


def _mixes_positions(module: nnx.Module | None) -> bool:
    """Whether a module is a convolution over more than one position."""
    convolves = isinstance(module, (nnx.Conv, nnx.ConvTranspose))
    return convolves and math.prod(np.atleast_1d(module.kernel_size).tolist()) > 1


def _last_calls(traced: TracedPass, after: str | None = None) -> list[str]:
    """The innermost calls from which a site (by default the model's result) receives something.

    Modules without parameters (a dropout, a soft cap) are passed over.
    """
    edges, borders, _ = traced.flow
    before: dict[str, set[str]] = {}
    for edge in (*borders, *edges):
        before.setdefault(edge.consumer, set()).add(edge.producer)
    root = max(traced.calls, key=traced.last_call)
    found: list[str] = []
    known, waiting = {after}, [root] if after is None else list(before.get(after, ()))
    while waiting:
        site = waiting.pop()
        if site in known or site not in traced.calls:
            continue
        known.add(site)
        path = parse_key(site)[0]
        producers = before.get(site, set()) - {site}
        within = [p for p in producers if _is_within(p, path)]
        if within:
            waiting += within
        elif split_operation(site)[1] or (traced.has_no_params(site) and not traced.is_norm(site)):
            waiting += producers
        else:
            found.append(site)
    return found


def _is_within(site: str, path: Sequence[str]) -> bool:
    return not split_operation(site)[1] and parse_key(site)[0][: len(path)] == tuple(path)


def _makes_classes(traced: TracedPass, site: str, classes: int) -> bool:
    """Whether a site's module has a matrix and returns an array of this many classes."""
    returned, received = traced.calls[site].returned, traced.calls[site].received
    module = traced.module_of(site)
    single = len(returned) == len(received) == 1
    if module is None or not single or _mixes_positions(module):
        return False
    params = jax.tree.leaves(nnx.state(module, nnx.Param))
    shape = returned[0].shape
    return (
        len(shape) > 0
        and shape[-1] == classes
        and any(np.ndim(x) >= 2 for x in params)
        and jnp.issubdtype(received[0].dtype, jnp.floating)
    )


def _last_norm(traced: TracedPass, ends: Sequence[str]) -> str | Literal[False]:
    """The last norm among sites; False if there is none, or if it belongs to a repeated block."""
    norms = [site for site in ends if traced.is_norm(site) and traced.module_of(site)]
    last = max(norms, key=traced.last_call) if norms else None
    return last if last is not None and not _is_in_repeated_block(traced, last) else False


def _is_in_repeated_block(traced: TracedPass, site: str) -> bool:
    """Whether a site is within one of several blocks that receive what they return."""
    path = parse_key(site)[0]
    around = {site_key(path[:end]) for end in range(1, len(path))} & set(traced.calls)
    groups = {
        block_list_key(block) for block in around if _returns_received_shape(traced.calls[block])
    }
    blocks = [c for other, c in traced.calls.items() if block_list_key(other) in groups]
    return any(c.rows or c.count > 1 for c in blocks) or len(blocks) > len(groups)


def _returns_received_shape(calls: SiteCalls) -> bool:
    shapes = {x.shape for x in calls.returned}
    return any(x.shape in shapes for x in calls.received)


def block_list_key(site: str) -> str:
    """A key that the blocks of a list share, and so do attributes with a number in their names."""
    return re.sub(r"\d+", "#", site)
