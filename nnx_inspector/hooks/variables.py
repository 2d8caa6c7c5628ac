"""The Variables of a module: found cheaply, and held against what they were before a call.

Names are NNX's own paths. Invariant: nothing is copied and no array is touched; a value that
another replaced is found by its object, so a Variable that was written to is never missed.
Whether the new value is another number is for others to say.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector.arrays import is_array, shape_of
from nnx_inspector.hooks.pytrees import plain_key
from nnx_inspector.hooks.sites import Path, site_key

_PLAIN = (
    int, float, str, bytes, bool, complex, type, types.FunctionType, types.BuiltinFunctionType,
    types.NoneType, np.ndarray, np.dtype, jax.Array, jax.ShapeDtypeStruct,
)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def kind_of(cls: type) -> str:
    """How a value of a type is looked into; asked once a type, NNX's own answers are slow."""
    kinds: list[tuple[str, Any]] = [
        ("variable", nnx.Variable),
        ("list", nnx.List),
        ("object", nnx.Pytree),
        ("plain", _PLAIN),
        ("dict", dict),
        ("list", (list, tuple)),
    ]
    return next((kind for kind, base in kinds if issubclass(cls, base)), "pytree")


@dataclasses.dataclass
class Contents:
    """What a module holds at one moment.

    Attributes:
        variables: each Variable under its path, with its value.
        containers: each module, list or dict inside, with its entries.
    """

    variables: dict[Path, tuple[nnx.Variable[Any], Any]]
    containers: list[tuple[Any, tuple[Any, ...]]]


def contents(module: Any) -> Contents:
    """The Variables in a module, those of its children included, a shared one once."""
    found = Contents({}, [])
    _collect(module, (), found, set())
    return found


def _collect(node: Any, path: Path, found: Contents, seen: set[int]) -> None:
    kind = kind_of(type(node))
    if kind == "plain" or id(node) in seen:
        return
    if kind in ("variable", "object", "list"):
        seen.add(id(node))
    if kind == "variable":
        found.variables[path] = (node, node.get_raw_value())
    elif kind == "object":
        attributes = vars(node)
        found.containers.append((attributes, tuple(attributes.values())))
        for name in sorted(attributes):
            if kind_of(type(attributes[name])) != "plain" and not name.startswith("_pytree__"):
                _collect(attributes[name], (*path, name), found, seen)
    elif kind == "list":
        entries = tuple(node)
        found.containers.append((node, entries))
        for i, value in enumerate(entries):
            _collect(value, (*path, i), found, seen)
    elif kind == "dict":
        found.containers.append((node, tuple(node.values())))
        for name, value in node.items():
            _collect(value, (*path, name), found, seen)
    else:
        _collect_pytree(node, path, found, seen)


def _collect_pytree(node: Any, path: Path, found: Contents, seen: set[int]) -> None:
    is_node = lambda x: isinstance(x, nnx.Variable | nnx.Pytree)  # noqa: E731
    if isinstance(node, nnx.Variable):  # by NNX's own answer, which it gives for an instance only
        seen.add(id(node))
        found.variables[path] = (node, node.get_raw_value())
        return
    for inner, leaf in jax.tree_util.tree_flatten_with_path(node, is_leaf=is_node)[0]:
        if leaf is not node:
            _collect(leaf, (*path, *map(plain_key, inner)), found, seen)


def variables_by_path(roots: Mapping[Path, Any]) -> Iterator[tuple[Path, nnx.Variable[Any]]]:
    """The Variables of several modules, each under its whole path; a shared one for each module."""
    for prefix, root in roots.items():
        for path, (variable, _) in contents(root).variables.items():
            yield (*prefix, *path), variable


def unseen_references(roots: Mapping[Path, Any]) -> dict[str, str]:
    """The Variables that are references, by path, with why changes of them are not seen: writing
    to one makes no new value.
    """
    return {
        site_key(
            path
        ): "it is a Variable with ref=True or hijax=True: whether a call changes it is not told"
        for path, variable in variables_by_path(roots)
        if variable.ref or variable.hijax
    }


def differences(before: Contents, module: Any) -> Iterator[tuple[Path, Any, Any]]:
    """Each Variable whose value is another object than before: `(path, old, new)`, where each is
    the Variable and its value, or None for one that was not there.
    """
    if all(_as_before(*one) for one in before.containers):
        for path, (variable, value) in before.variables.items():
            new = variable.get_raw_value()
            if new is not value:
                yield path, (variable, value), (variable, new)
        return
    after = contents(module).variables
    for path in dict.fromkeys([*before.variables, *after]):
        old, new = before.variables.get(path), after.get(path)
        if old is None or new is None or old[1] is not new[1]:
            yield path, old, new


def _as_before(container: Any, entries: tuple[Any, ...]) -> bool:
    now = container.values() if isinstance(container, dict) else container
    return len(now) == len(entries) and all(map(operator.is_, now, entries))


def float_arrays(variable: Any) -> list[Any]:
    """For each array of a Variable, as `staging.array_names` tells them apart, itself where it
    holds real floats (or would: an abstract one), else None.
    """
    leaves = jax.tree.leaves(variable.get_raw_value())
    return [x if _holds_floats(x) else None for x in leaves if _is_array(x)]


def _is_array(x: Any) -> bool:
    return shape_of(x) is not None


def _holds_floats(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct) and jnp.issubdtype(
        x.dtype, jnp.floating
    )


def parameter_arrays(module: nnx.Module) -> list[Any]:
    """The arrays (or abstract arrays) of the module's `nnx.Param`s, a shared one once."""
    values = [v for p, v in contents(module).variables.values() if isinstance(p, nnx.Param)]
    return [leaf for leaf in jax.tree.leaves(values) if is_array(leaf)]


def parameter_count(module: nnx.Module) -> int:
    """Elements of the module's `nnx.Param`s, children included, a shared one counted once."""
    return sum(math.prod(leaf.shape) for leaf in parameter_arrays(module))


def byte_count(arrays: Any) -> int:
    """Bytes of some arrays (or abstract arrays)."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
