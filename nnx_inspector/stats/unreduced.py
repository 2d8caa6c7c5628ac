"""What several devices have found in their parts of arrays, before an all-reduce adds it up.

On CPUs an exchange takes a millisecond or more, however little is exchanged, and a step that is
measured has a hundred arrays. Invariant: what is unreduced is only passed on, and reduced in the
body of a program in which it was found. Does not know what was found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax

from nnx_inspector._compat.lowering.partition import sum_over_devices
from nnx_inspector._compat.sharding import auto_sharded
from nnx_inspector.typing import Array, PyTree, UInt32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unreduced:
    """What each device has found.

    Attributes:
        words: integers that are to be added up.
        finish: makes the result of their sum; equal functions make equal results.
    """

    words: UInt32[Array, "*rows words"]
    finish: Callable[[UInt32[Array, "*rows words"]], PyTree] = dataclasses.field(
        metadata={"static": True}
    )


def has_several_cpus() -> bool:
    """Whether programs here may be divided among several CPUs: exchanges are slow there."""
    return jax.device_count() > 1 and jax.default_backend() == "cpu"


def is_unreduced(x: object) -> bool:
    return isinstance(x, Unreduced)


def reduce_all(parts: Sequence[Unreduced]) -> list[PyTree]:
    """What is made of all of them, after one exchange."""

    def reduce(words: list[jax.Array]) -> list[PyTree]:
        return [one.finish(x) for one, x in zip(parts, sum_over_devices(words), strict=True)]

    return auto_sharded(reduce, [one.words for one in parts])


def reduce_tree(tree: PyTree) -> PyTree:
    """A tree with what is unreduced in it reduced."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_unreduced)
    done = iter(reduce_all([x for x in leaves if is_unreduced(x)]))
    return jax.tree.unflatten(structure, [next(done) if is_unreduced(x) else x for x in leaves])
