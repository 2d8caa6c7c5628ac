"""The masks of marks: which examples of a vmap are present, and which positions of a call count.

A mask has the axes of the vmaps that map a value, the outermost first, then those of positions.
Invariant: a value that a mask of positions does not fit is measured whole.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from nnx_inspector.program.marks import GRADIENT, move_vmap_axes_first
from nnx_inspector.program.plan import Keep, KeptArray
from nnx_inspector.program.survey import Mark
from nnx_inspector.stats.array_stats import Sample
from nnx_inspector.stats.summarize import mask_shape, merge_rows, summarize
from nnx_inspector.stats.summary import Summary
from nnx_inspector.typing import Params


@dataclasses.dataclass(frozen=True)
class MaskLayout:
    """How a mask lies beside a value.

    Attributes:
        mapped: the axes of vmaps in the value.
        member: the number of the vmap that maps the members, the outermost first; None for none.
        positions: how many axes of the mask are those of positions; None for none. The axes in
            front are those of vmaps.
        present: whether it says which examples are present.
    """

    mapped: tuple[int, ...]
    member: int | None = None
    positions: int | None = None
    present: bool = True

    @staticmethod
    def of(marked: Mark, params: Params, number: int, axis: int | None) -> MaskLayout:
        """That of one of a mark's values, whose members have this axis."""
        mapped, member = params["mapped"][number] if "mapped" in params else (), None
        if axis is not None:
            member = len(mapped) - 1 - params["members"].levels[number]
        counts = "where" in params and (marked.part == GRADIENT or marked.counted[number])
        masked = params.get("masked", False)
        positions = len(params["where"]) if counts else None
        return MaskLayout(mapped, member, positions, masked and params.get("present", True))

    def params(self, params: Params) -> Params:
        """Those of a mark that holds such a mask."""
        of_positions = {} if self.positions is None else {"where": params["where"]}
        return {"masked": True, "present": self.present, **of_positions}

    def align(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The value with the axes of vmaps in front, and its mask of positions if that fits; the
        axis of the members is the first of both.
        """
        x, own = move_vmap_axes_first(x, self.mapped), mask.ndim - (self.positions or 0)
        shape = None
        if self.positions is not None and own <= len(self.mapped):
            shape = mask_shape(mask.shape[own:], jax.ShapeDtypeStruct(x.shape[own:], x.dtype))
        if shape is not None:
            mask = mask.reshape(*mask.shape[:own], *shape)
        if self.member is not None:
            x = jnp.moveaxis(x, self.member, 0)
            mask = mask if shape is None else jnp.moveaxis(mask, self.member, 0)
        return x, None if shape is None else mask


def masked_summary(sample: Sample, how: MaskLayout, x: jax.Array, mask: jax.Array) -> Summary:
    """The summary of the positions that a mask selects, or of the entries of the outermost vmaps;
    or one for each member.
    """
    y, where = how.align(x, mask)
    if where is not None or not how.present:
        rank = int(how.member is not None)
        return summarize(y, batch_rank=rank, sample=sample, where=where)
    if how.positions:
        mask = mask.any(tuple(range(mask.ndim - how.positions, mask.ndim)))
    rank = max(mask.ndim, 0 if how.member is None else how.member + 1)
    mask = mask.reshape(*mask.shape, *[1] * (rank - mask.ndim))
    found = summarize(move_vmap_axes_first(x, how.mapped), batch_rank=rank, sample=sample)
    found = jax.tree.map(lambda field: jnp.where(mask[..., None], field, 0), found)
    if how.member is not None:
        last = functools.partial(jnp.moveaxis, source=how.member, destination=rank - 1)
        found = jax.tree.map(last, found)
    for _ in range(rank - (how.member is not None)):
        found = merge_rows(found)
    return found


def keep_masked(
    keep: Keep,
    site: str,
    mapped: tuple[int, ...],
    axis: int | None,
    how: MaskLayout | None,
    x: jax.Array,
    *mask: jax.Array,
) -> KeptArray:
    """What is kept of an array, or of each member."""
    if mask and how is not None:
        x, where = how.align(x, *mask)
    else:
        x = x if axis is None else jnp.moveaxis(x, axis, 0)
        each = functools.partial(move_vmap_axes_first, mapped=mapped)
        x, where = each(x) if axis is None else jax.vmap(each)(x), None
    of = functools.partial(keep.of, site=site, mapped=len(mapped))
    return of(x, where) if axis is None else jax.vmap(of)(x, where)


def broadcast_mask(shape: tuple[int, ...], mapped: int, mask: jax.Array) -> jax.Array:
    """A mask as that of a value, which other vmaps may map.

    Args:
        shape: that of the mask of the value, with the axes of its vmaps in front.
        mapped: how many these are.
    """
    own = mask.ndim - (len(shape) - mapped)  # the vmaps of the mask
    places = _subsequences(mask.shape[:own], shape[:mapped]) if own >= 0 else []
    if mask.shape[max(own, 0) :] != shape[mapped:] or len(places) != 1:
        return jnp.ones(shape, jnp.bool_)
    lead = [1] * mapped
    for at, n in zip(places[0], mask.shape[:own], strict=True):
        lead[at] = n
    return jnp.broadcast_to(mask.reshape(*lead, *mask.shape[own:]), shape)


def _subsequences(few: Sequence[int], many: Sequence[int], start: int = 0) -> list[tuple[int, ...]]:
    """The ways to find some lengths among others, in their order."""
    if not few:
        return [()]
    return [
        (at, *rest)
        for at in range(start, len(many))
        if many[at] == few[0]
        for rest in _subsequences(few[1:], many, at + 1)
    ]
