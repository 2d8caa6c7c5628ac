"""What several devices have found in their parts of arrays, until one exchange adds all of it up.

On CPUs an exchange takes a millisecond or more, however little is exchanged, and a step that is
measured has a hundred arrays. Invariant: what is apart is only passed on, and finished in the body
of a program in which it was found. Does not know what was found.
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
class Apart:
    """What each device has found.

    Attributes:
        words: as integers, which are to be added up.
        finish: what makes a figure of their sum; equal functions for equal figures.
    """

    words: UInt32[Array, "*rows words"]
    finish: Callable[[UInt32[Array, "*rows words"]], PyTree] = dataclasses.field(
        metadata={"static": True}
    )


def pays_off() -> bool:
    """Whether programs here may be divided among several CPUs."""
    return jax.device_count() > 1 and jax.default_backend() == "cpu"


def is_apart(x: object) -> bool:
    return isinstance(x, Apart)


def finished(those: Sequence[Apart]) -> list[PyTree]:
    """The figures, after one exchange."""

    def finish(words: list[jax.Array]) -> list[PyTree]:
        return [one.finish(x) for one, x in zip(those, sum_over_devices(words), strict=True)]

    return auto_sharded(finish, [one.words for one in those])


def all_finished(tree: PyTree) -> PyTree:
    """A tree of figures with those that are apart finished."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_apart)
    done = iter(finished([x for x in leaves if is_apart(x)]))
    return jax.tree.unflatten(structure, [next(done) if is_apart(x) else x for x in leaves])
