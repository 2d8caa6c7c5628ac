"""A tree of summaries as one array: each array that leaves a program costs the host time.

Arrays are joined by their bits, and separated again when they are read. Invariant: what was joined
comes back bit for bit, with the leading axes that a vmap or a scan has added since. Does not know
what the summaries describe.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat import jaxprs, jit
from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.native import ShapeDtype, native_primitive
from nnx_inspector._compat.sharding import to_one_device
from nnx_inspector.stats.bins import BINS
from nnx_inspector.stats.summary import Summary
from nnx_inspector.typing import PyTree, Treedef, Value

_DTYPES: Final = ("uint32", "int32", "float32", "uint64", "int64", "float64")
_FIELDS: Final = ("bins", "points", "sums")
_GROUP: Final = 4
"""The summaries that one kernel of a GPU finishes and joins. With more, XLA makes some of their
figures in kernels of their own."""


@dataclasses.dataclass(frozen=True)
class PackedArray:
    """An array that is joined too, as a leaf of a tree; others are kept as they are."""

    array: Value


@dataclasses.dataclass(frozen=True)
class PackedSlot:
    """Where an array is among those that `pack` returns.

    Attributes:
        dtype, shape: its type.
        number: which of them has it.
        at: its first word, if that is the words.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    number: int = 0
    at: int = 0

    def read(self, arrays: Sequence[Value], _ones: object = None) -> PyTree:
        if self.number:
            return arrays[self.number]
        words, width = arrays[0], self.dtype.itemsize // 4
        lead = words.shape[:-1]
        if isinstance(words, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((*lead, *self.shape), self.dtype)
        piece = words[..., self.at : self.at + math.prod(self.shape) * width]
        if isinstance(words, np.ndarray):
            return np.ascontiguousarray(piece).view(self.dtype).reshape((*lead, *self.shape))
        piece = piece.reshape((*lead, *self.shape, *([width] if width > 1 else [])))
        with jax.enable_x64(width > 1 or jax.config.read("jax_enable_x64")):
            return jax.lax.bitcast_convert_type(piece, self.dtype)


@dataclasses.dataclass(frozen=True)
class _PackedLeaf:
    """What was a leaf of the tree, by its arrays."""

    kind: type
    parts: tuple[PackedSlot, ...]
    opaque: str = ""


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """How a tree was joined; hashable, and equal for equal trees."""

    structure: Treedef
    leaves: tuple[_PackedLeaf, ...]


def can_pack(tree: PyTree) -> bool:
    """Whether a tree can be joined: not where the devices of a shard_map differ."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_whole)
    arrays = [array for leaf in leaves for array in _arrays_of(leaf)]
    return not any(map(jaxprs.varying_axes, arrays))


@internal_config()
def pack(tree: PyTree) -> tuple[PackedLayout, list[Value]]:
    """A tree of arrays, summaries and `PackedArray` as a layout, and its arrays.

    Returns:
        The layout; the words, uint32, and the arrays that are not among them: no words if the tree
        is not joinable.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_whole)
    together = can_pack(tree)
    pieces: list[Value] = []
    others: list[Value] = []
    end = 0

    def placed(x: Value, whole: bool) -> PackedSlot:
        nonlocal end
        x = jnp.asarray(x)
        if not (whole and together) or x.dtype.name not in _DTYPES:
            others.append(x)
            return PackedSlot(x.dtype, x.shape, len(others))
        start, end = end, end + x.size * (x.dtype.itemsize // 4)
        pieces.append(x)
        return PackedSlot(x.dtype, x.shape, at=start)

    found: list[_PackedLeaf] = []
    for leaf in leaves:
        kind = type(leaf) if _is_whole(leaf) else object
        parts = tuple(placed(x, _is_whole(leaf)) for x in _arrays_of(leaf))
        found.append(_PackedLeaf(kind, parts, leaf.opaque if kind is Summary else ""))
    every = to_one_device([*pieces, *others])
    pieces, others = every[: len(pieces)], every[len(pieces) :]
    wide = any(x.dtype.itemsize > 4 for x in pieces)  # from a Python number, for example
    with jax.enable_x64(wide or jax.config.read("jax_enable_x64")):
        words = _concatenate(*pieces, rows=0)[0] if pieces else jnp.zeros(0, jnp.uint32)
    return PackedLayout(structure, tuple(found)), [words, *others]


@internal_config()
def unpack(layout: PackedLayout, arrays: Sequence[Value]) -> PyTree:
    words, leaves = arrays[0], list[Value]()
    if isinstance(words, jax.Array) and not jit.is_tracer(words):
        words = np.asarray(jax.device_get(words))  # explicit: jax may forbid implicit transfers
    for leaf in layout.leaves:
        parts = [x.read([words, *arrays[1:]]) for x in leaf.parts]
        if leaf.kind is Summary:
            leaves.append(Summary(**dict(zip(_FIELDS, parts, strict=True)), opaque=leaf.opaque))
        else:
            leaves.append(parts[0])
    return jax.tree.unflatten(layout.structure, leaves)


def without_packing(tree: PyTree) -> PyTree:
    """A tree that is not joined, with the array of each `PackedArray`."""
    return jax.tree.map(
        lambda x: x.array if isinstance(x, PackedArray) else x, tree, is_leaf=_is_whole
    )


def _is_whole(x: object) -> bool:
    return isinstance(x, (Summary, PackedArray))


def _arrays_of(leaf: object) -> list[Value]:
    if isinstance(leaf, Summary):
        return [getattr(leaf, name) for name in _FIELDS]
    return [leaf.array] if isinstance(leaf, PackedArray) else [leaf]


def _concatenated_words(*arrays: jax.Array) -> list[jax.Array]:
    words = [jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(-1) for x in arrays]
    groups: list[list[jax.Array]] = [[]]
    for piece in words:
        if piece.size >= BINS and sum(x.size >= BINS for x in groups[-1]) == _GROUP:
            groups.append([])
        groups[-1].append(piece)
    return [jnp.concatenate(jax.lax.optimization_barrier([*map(jnp.concatenate, groups)]))]


def _concatenated_type(*arrays: ShapeDtype) -> list[ShapeDtype]:
    words = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays) // 4
    return [ShapeDtype((words,), np.dtype(np.uint32))]


def _concatenated_in_parts(
    whole: Value, *arrays: jax.Array, devices: int, **how: object
) -> list[jax.Array]:
    del devices
    return whole(*arrays, **how)


_concatenate = native_primitive(
    "nnx_inspector_join", _concatenated_words, _concatenated_type, in_parts=_concatenated_in_parts
)
