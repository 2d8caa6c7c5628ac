"""The structure of what a call receives or returns, without its arrays: a parameter of marks.

Of several arrays each has a name, and one stands for the whole: the main array. Invariant:
hashable, equal for equal trees, and made without building an object of the user's anew.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector.arrays import is_array
from nnx_inspector.hooks.pytrees import path_name
from nnx_inspector.hooks.variables import is_node
from nnx_inspector.stats.summarize import is_number, is_opaque, is_token, type_text
from nnx_inspector.stats.summary import opaque
from nnx_inspector.typing import PyTree, Treedef, Value


@dataclasses.dataclass(frozen=True)
class Structure:
    """The structure of a pytree without its arrays; hashable, to be a primitive's parameter.

    Attributes:
        treedef: the tree structure of the whole value.
        leaves: a text for each leaf: `"float32[8,10]"`, or the type's name if it is not an array.
        arrays: the indices of the leaves that are observed arrays. An array that a call returns
            several times (the state of an LSTM is also its output) is observed once.
        opaque: index and size of each leaf with a shape but no figures (a PRNG key, a token).
        copies: for each leaf that is the same array as an observed one, its index and the index of
            that leaf.
        names: the name of each observed array; empty if there is only one.
        main: which of the observed arrays stands for the whole: of the floating-point ones, the
            first of those least deep in the tree; one without axes (a loss) only if no other is.
    """

    treedef: Treedef
    leaves: tuple[str, ...]
    arrays: tuple[int, ...]
    opaque: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    names: tuple[str, ...] = ()
    main: int = 0

    @property
    def parts(self) -> tuple[str, ...]:
        """The name of each observed array, "" for the main one; see `recordings.tree_rows`."""
        return tuple("" if i == self.main else name for i, name in enumerate(self.names)) or ("",)

    def named_arrays(self) -> list[tuple[str, str]]:
        """Name and type of each observed array, the main one first; empty if there is only one."""
        found = [(n, self.leaves[i]) for n, i in zip(self.names, self.arrays, strict=False)]
        return found and [found[self.main], *found[: self.main], *found[self.main + 1 :]]

    def summaries(self, values: Sequence[object]) -> PyTree:
        """As `unflatten`, with a Summary of only dtype and shape for each opaque leaf."""
        return self._filled(values, {i: opaque(self.leaves[i], size) for i, size in self.opaque})

    def unflatten(self, values: Sequence[Value]) -> PyTree:
        """The tree with one value for each observed array, None for every other leaf."""
        return self._filled(values, {})

    def _filled(self, values: Sequence[object], others: Mapping[int, object]) -> PyTree:
        filled = [others.get(index) for index in range(len(self.leaves))]
        for index, value in zip(self.arrays, values, strict=True):
            filled[index] = value
        for index, same in self.copies:
            filled[index] = filled[same]
        return jax.tree.unflatten(self.treedef, filled)

    def __str__(self) -> str:
        if len(self.leaves) == 1 and jax.tree_util.treedef_is_leaf(self.treedef):
            return self.leaves[0]
        return ", ".join(self.leaves) if self.leaves else "nothing"


def describe(leaf: Value) -> str:
    """One leaf in words: dtype and shape of an array, otherwise the type's name."""
    if is_token(leaf):
        return "token"
    value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
    return type_text(value.dtype, value.shape) if is_array(value) else type(leaf).__name__


def is_observable(leaf: object) -> bool:
    """Whether a leaf is an array of numbers; keys and Python scalars are not."""
    return isinstance(leaf, jax.Array | np.ndarray) and is_number(leaf.dtype)


def _opaque_size(leaf: object) -> int | None:
    """The number of elements of an array that holds no numbers (0 for a token); otherwise None."""
    if isinstance(leaf, jax.Array | np.ndarray) and is_opaque(leaf.dtype):
        return leaf.size
    return 0 if is_token(leaf) else None


def is_whole(x: object) -> bool:
    """Whether a value is not flattened: an NNX object, or a generator, which can be read once."""
    return is_node(x) or isinstance(x, types.GeneratorType)


def structure_of(
    tree: PyTree,
    leaves: Sequence[object],
    *,
    merged: bool = False,
    parameters: Sequence[str] | None = None,
) -> Structure:
    """The structure of a tree with these leaves.

    `merged`: whether an array that occurs several times is observed once. `parameters`: the names
    of the parameters, if the tree is `(args, kwargs)`.
    """
    first: dict[int, int] = {}
    copies: dict[int, int] = {}
    arrays = [i for i, leaf in enumerate(leaves) if is_observable(leaf)]
    for i in arrays if merged else ():
        same = first.setdefault(id(leaves[i]), i)
        if same != i:
            copies[i] = same
    paths: list[Any] = []
    if len(arrays) - len(copies) > 1:
        paths = [p for p, _ in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_whole)[0]]
        for i, same in copies.items():  # the shortest name
            paths[same] = min(paths[same], paths[i], key=len)
    arrays = [i for i in arrays if i not in copies]
    names, main = list[str](), 0
    if paths:
        names = [path_name(paths[i], parameters) for i in arrays]
        if len(set(names)) < len(names):  # two kinds of keys that read alike
            names = [f"{name}#{i}" for i, name in enumerate(names)]
        main = min(range(len(arrays)), key=lambda n: _rank(leaves[arrays[n]], paths[arrays[n]]))
    sizes = [(i, _opaque_size(leaf)) for i, leaf in enumerate(leaves)]
    return Structure(
        jax.tree.structure(tree, is_leaf=is_whole),
        tuple(describe(leaf) for leaf in leaves),
        tuple(arrays),
        tuple((i, size) for i, size in sizes if size is not None),
        tuple(copies.items()),
        tuple(names),
        main,
    )


def _rank(array: Value, path: Sequence[object]) -> tuple[bool, bool, int]:
    """Sorts first what stands for a whole tree; see `Structure.main`."""
    discrete = not jnp.issubdtype(array.dtype, jnp.inexact)
    return discrete, not (array.ndim and array.size), len(path)
