"""What a program that is being edited sees, before it has run: a tree of slots.

A slot says where a figure will be among the outputs of the body that computes it. Invariant: the
tree is nested like the survey, and reading it gives a `Seen` for each mark.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat.configuration import ours


@dataclasses.dataclass(frozen=True)
class Output:
    """A part of what was seen that a body returns: the number of its additional output."""

    number: int

    def read(self, arrays: Sequence[Any]) -> Any:
        return arrays[self.number]


@dataclasses.dataclass(frozen=True, eq=False)
class Always:
    """How often a call takes place that takes place once in each run, or in each of its rows."""

    shape: tuple[int, ...]

    def read(self, arrays: Sequence[Any]) -> Any:
        if all(isinstance(x, np.ndarray) for x in arrays):
            return np.ones(self.shape, np.uint32)
        with ours():
            return jnp.ones(self.shape, jnp.uint32)


Slot = Output | Always


def is_slot(x: Any) -> bool:
    return isinstance(x, (Output, Always))


def each_slot(change: Callable[[Slot], Slot], seen: Any) -> Any:
    return jax.tree.map(change, seen, is_leaf=is_slot)
