"""Measures a softmax that chooses, where a program computes it.

Figures are computed in float32 from the logits; the probabilities only say which of them a mask
leaves. Invariant: a masked key counts nowhere, and a query with one allowed key, which has nothing
to choose, is not looked at.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.sharding import auto_sharded
from nnx_inspector.stats.choices.rows import CHOICE_STATS, MASKED, MOST_EXAMPLES, MOST_QUERIES
from nnx_inspector.typing import Array, Float


@dataclasses.dataclass(frozen=True)
class Heads:
    """Measures each head of an attention: float32[heads, LENGTH] of probabilities and logits.

    Attributes:
        parts: the sizes of the parts of the axes, in order: an axis may hold several.
        order: the parts in the order of `shape`.
        shape: how many examples, heads, queries and keys there are.
        base: the natural logarithm of the base: of `exp2` that of 2.
        exact: whether the logits are known, and not only up to a number for each query.
    """

    parts: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, int, int, int]
    base: float = 1.0
    exact: bool = True

    @internal_config()
    def __call__(self, probabilities: jax.Array, logits: jax.Array) -> jax.Array:
        given = jax.lax.stop_gradient((probabilities, logits))
        return auto_sharded(self._measured, *given)

    def _measured(self, p: jax.Array, x: jax.Array) -> jax.Array:
        least = math.log(float(jnp.finfo(p.dtype).tiny)) + 1
        p, x = (self._turned(each) for each in (p, x))
        x = x.astype(jnp.float32) * self.base
        most = jnp.where(p > 0, x, -jnp.inf).max(axis=-1, keepdims=True)
        largest = most.max(axis=(0, 2, 3))
        p, x, most = (_sample(each) for each in (p, x, most))
        _, _, queries, keys = self.shape
        at = np.arange(queries - 1, -1, -_step(queries, MOST_QUERIES))[::-1]
        below = jnp.where(x > -jnp.inf, x - most, -jnp.inf)
        share = jnp.where(p > 0, jnp.exp(below), 0.0)
        total = share.sum(axis=-1)
        # a key whose probability is too small for a number is allowed too
        small = (below - jnp.log(total)[..., None] < least) & (below > -MASKED)
        allowed = (p > 0) | small
        apart = np.abs(at[:, None] - np.arange(keys)).astype(np.float32)
        # The sums are made together: on a GPU each reduction is a kernel, however small
        of_keys = [allowed.astype(jnp.float32), jnp.where(allowed, share * below, 0.0)]
        of_keys += [share * apart] if queries == keys else []
        count, product, *distance = jnp.stack(of_keys).sum(axis=-1)
        chooses = count > 1
        unit = jnp.where(chooses, total, 1.0)
        entropy = jnp.maximum(jnp.log(unit) - product / unit, 0.0)
        figures = {
            "entropy": entropy,
            "evenness": entropy / jnp.log(jnp.where(chooses, count, 2.0)),
            "first": share[..., 0] / unit,
            "keys": count,
        }
        if queries == keys:
            figures["distance"] = distance[0] / unit
        of_queries = [jnp.where(chooses, each, 0.0) for each in (1.0, *figures.values())]
        looked, *sums = jnp.stack(of_queries).sum(axis=(1, 3))
        means = {
            name: each / jnp.where(looked > 0, looked, 1)
            for name, each in zip(figures, sums, strict=True)
        }
        if self.exact:
            means["logit"] = largest
        return _rows(looked, means)

    def _turned(self, x: Float[Array, "..."]) -> Float[Array, "examples heads queries keys"]:
        return x.reshape(self.parts).transpose(self.order).reshape(self.shape)


Step = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A way to arrange the numbers of chosen experts anew; see `Kept`."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """Which choices an expert has room for, by the place of each in its expert.

    Attributes:
        steps: how the numbers of the chosen experts are arranged as the places are: "transpose" by
            an order, "reshape" to a shape, "broadcast" along axes to a shape, "hot" (-1 but where
            an axis has the number itself), and "max" over axes.
        least, most: the choices between them are kept; neither is a whole number.
    """

    steps: tuple[Step, ...]
    least: float
    most: float

    def dropped(self, chosen: jax.Array, places: jax.Array, many: int) -> jax.Array:
        """The share of the choices of each expert that it has no room for; NaN if there is none."""
        x = chosen.astype(jnp.int32)
        for name, numbers, shape in self.steps:
            if name == "broadcast":
                x = jax.lax.broadcast_in_dim(x, shape, numbers)
            elif name == "hot":
                own = jax.lax.broadcasted_iota(jnp.int32, x.shape, numbers[0])
                x = jnp.where(x == own, x, -1)
            elif name == "max":
                x = x.max(axis=numbers)
            else:
                x = x.reshape(numbers) if name == "reshape" else x.transpose(numbers)
        at = places.astype(jnp.float32).reshape(-1, 1)
        lost = (at < self.least) | (at > self.most)
        hits = x.reshape(-1, 1) == jnp.arange(many)
        count = hits.sum(axis=0).astype(jnp.float32)
        return (hits & lost).sum(axis=0).astype(jnp.float32) / jnp.where(count > 0, count, jnp.nan)


@dataclasses.dataclass(frozen=True)
class Experts:
    """Measures each expert of a router: float32[experts, LENGTH] of what the choice is made by, of
    the numbers of the chosen experts, and, with `kept`, of the place of each choice in its expert.

    Attributes:
        axis: that of the experts.
        of: what the choice is made by: "pattern" for probabilities, "scores" for logits, "" for
            something else, whose entropy is not known.
        kept: which choices an expert has room for; None if that is not known.
    """

    axis: int
    of: str
    kept: Kept | None = None

    @internal_config()
    def __call__(self, values: jax.Array, chosen: jax.Array, *places: jax.Array) -> jax.Array:
        given = jax.lax.stop_gradient((values, chosen, *places))
        return auto_sharded(self._measured, *given)

    def _measured(self, values: jax.Array, chosen: jax.Array, *places: jax.Array) -> jax.Array:
        many = values.shape[self.axis]
        x = jnp.moveaxis(values, self.axis, -1).reshape(-1, many).astype(jnp.float32)
        hits = chosen.reshape(-1, 1) == jnp.arange(many, dtype=chosen.dtype)
        looked = jnp.full(many, len(x), jnp.float32)
        figures = {
            "load": hits.sum(axis=0).astype(jnp.float32) / len(x),
            "keys": looked,
        }
        if self.kept is not None:
            figures["dropped"] = self.kept.dropped(chosen, places[0], many)
        if self.of == "scores":
            figures["logit"] = x.max(axis=0)
            share = jax.nn.softmax(x)
        else:
            share = x / x.sum(axis=-1, keepdims=True)
        if self.of:
            terms = jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1.0)), 0.0)
            entropy = jnp.maximum(-terms.sum(axis=-1), 0.0).mean()
            figures["entropy"] = jnp.full(many, entropy)
            figures["evenness"] = figures["entropy"] / math.log(many)
        return _rows(looked, figures)


def _step(length: int, most: int) -> int:
    return -(-length // most)


def _sample(
    x: Float[Array, "examples heads queries keys"],
) -> Float[Array, "some heads few keys"]:
    """Evenly spaced examples, and queries up to the last one."""
    examples, _, queries, _ = x.shape
    step = _step(queries, MOST_QUERIES)
    return x[:: _step(examples, MOST_EXAMPLES), :, (queries - 1) % step :: step]


def _rows(
    looked: Float[Array, " heads"], figures: dict[str, Float[Array, " heads"]]
) -> Float[Array, "heads figures"]:
    unknown = jnp.full(looked.shape, jnp.nan, jnp.float32)
    columns = [looked, *(figures.get(name, unknown) for name in CHOICE_STATS)]
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in columns], axis=-1)
