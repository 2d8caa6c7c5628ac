"""What a program that is being edited sees, before it has run: a tree of slots.

A slot says where a figure will be among the outputs of the body that computes it. Invariant: the
tree is nested like the survey, and reading it gives an `Observation` for each mark.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat.configuration import internal_config
from nnx_inspector.program.editing.packed import PackedSlot
from nnx_inspector.typing import AnyArray, PyTree, Value

MakeOnes = Callable[[tuple[int, ...]], AnyArray]
"""Makes an array of ones where the other arrays are: on the host, or on the device."""


@dataclasses.dataclass(frozen=True)
class Output:
    """A part of what was seen that a body returns: the number of its additional output."""

    number: int

    def read(self, arrays: Sequence[object], ones: MakeOnes) -> Value:
        return arrays[self.number]


@dataclasses.dataclass(frozen=True, eq=False)
class AlwaysRuns:
    """How often a call takes place that takes place once in each run, or in each of its rows."""

    shape: tuple[int, ...]

    def read(self, arrays: Sequence[object], ones: MakeOnes) -> AnyArray:
        return ones(self.shape)


Slot = Output | AlwaysRuns | PackedSlot


def read_slots(seen: object, arrays: Sequence[object]) -> PyTree:
    """What was seen, by its slots, from the additional outputs of the program."""
    # asked once: a program has hundreds of slots and of arrays
    xp: types.ModuleType = np if all(isinstance(x, np.ndarray) for x in arrays) else jnp

    @functools.cache
    def ones(shape: tuple[int, ...]) -> AnyArray:
        with internal_config():
            return xp.ones(shape, np.uint32)

    return jax.tree.map(lambda x: x.read(arrays, ones), seen, is_leaf=is_slot)


def is_slot(x: Value) -> bool:
    return isinstance(x, (Output, AlwaysRuns, PackedSlot))


def map_slots(change: Callable[[Slot], Slot], seen: object) -> PyTree:
    return jax.tree.map(change, seen, is_leaf=is_slot)
