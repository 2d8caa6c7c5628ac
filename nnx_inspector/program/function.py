"""The function over modules that is staged, and its arguments in parts.

A module or a bound method is a function of that module. Invariant: arguments that are rebuilt equal
the original ones, except for the modules and arrays that replace the old ones. Calls nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_inspector.arrays import own_attribute
from nnx_inspector.hooks.hook import Context
from nnx_inspector.hooks.pytrees import plain_key, with_arguments, with_leaves
from nnx_inspector.hooks.sites import Path, callable_hint, method_name, require_module
from nnx_inspector.hooks.variables import is_node
from nnx_inspector.program.structure import is_whole
from nnx_inspector.stats.summarize import is_number
from nnx_inspector.typing import Kwargs, PyTree, Treedef, Value


@dataclasses.dataclass(frozen=True)
class ModuleFunction:
    """The function to trace, called as `call(*args, **kwargs)`.

    For a module or a bound method `owner` is the module, which counts as an argument whose name is
    not part of the keys.
    """

    call: Callable[..., Any]
    owner: nnx.Module | None = None
    method: str | None = None

    def bind(self, owner: Any) -> Callable[..., Any]:
        if self.owner is None:
            return self.call
        return getattr(owner, self.method) if self.method else owner


def module_function(f: Any, what: str) -> ModuleFunction:
    """The function to stage: of a module, a module's bound method, or a function over modules."""
    if isinstance(f, nnx.Module):
        if not callable(f):
            raise TypeError(
                f"{what} got a {type(f).__name__}, which has no __call__. {callable_hint(f)}"
            )
        return ModuleFunction(f, f)
    owner, name = own_attribute(f, "__self__"), method_name(f)
    if isinstance(f, functools.partial) and len(f.args) == 1 and not f.keywords:
        # a bound method decorated by nnx.jit
        owner, name = f.args[0], own_attribute(f.func, "__name__", "")
        bound = own_attribute(owner, name)
        name = name if isinstance(bound, functools.partial) and bound.func is f.func else ""
    if isinstance(owner, nnx.bridge.ToNNX) and "method" in own_attribute(f, "keywords", ()):
        name = f.keywords["method"].__name__  # a method of its Linen module
    if isinstance(owner, nnx.Module) and name:
        return ModuleFunction(f, owner, name)
    if isinstance(f, type) or not callable(f):
        require_module(f, what)
    return ModuleFunction(f)


def roots_of(function: ModuleFunction, args: Sequence[object], kwargs: Kwargs) -> dict[Path, Any]:
    """The outermost modules of a call, each with the prefix of its keys.

    With one module the prefix is empty. With several it is the argument's name, followed by the
    path within the argument if that is a container.
    """
    if function.owner is not None:
        return {(): function.owner}
    found: dict[Path, nnx.Module] = {}
    named = [(argument_name(function.call, i), a) for i, a in enumerate(args)]
    for name, argument in [*named, *kwargs.items()]:
        for path, leaf in _nodes(argument):
            for inner, module in _outermost_modules(leaf):
                if not any(module is known for known in found.values()):
                    found[(name, *path, *inner)] = module
    if not found:
        raise TypeError(
            f"None of the arguments of {function_name(function.call)} holds an nnx.Module, so "
            f"there is nothing to inspect. Pass the model as an argument, not through a closure."
        )
    return {(): next(iter(found.values()))} if len(found) == 1 else found


def argument_name(fun: Callable[..., Any], index: int) -> str:
    """The name of a function's positional argument, or its number if it has no name."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return str(index)
    if index < len(parameters) and parameters[index].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        return parameters[index].name
    return str(index)


def function_name(call: object) -> str:
    return own_attribute(call, "__name__", type(call).__name__)


def _nodes(tree: PyTree) -> list[tuple[Path, PyTree]]:
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_node)[0]
    return [(tuple(plain_key(k) for k in path), leaf) for path, leaf in flat if is_node(leaf)]


def _outermost_modules(node: object) -> list[tuple[Path, nnx.Module]]:
    if isinstance(node, nnx.Module):
        return [((), node)]
    every: list[tuple[Any, Any]] = list(nnx.iter_graph(node, graph=True))
    found = [(tuple(p), m) for p, m in every if isinstance(m, nnx.Module)]
    paths = {p for p, _ in found}
    return [(p, m) for p, m in found if not any(p[:n] in paths for n in range(len(p)))]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a call, split into NNX objects, arrays and everything else.

    `numbered` is the tree with the numbers of its leaves: a treedef loses the order of a dict.
    """

    treedef: Treedef
    leaves: tuple[Value, ...]
    nodes: tuple[int, ...]
    arrays: tuple[int, ...]
    numbered: PyTree

    @staticmethod
    def of(tree: PyTree) -> Arguments:
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_whole)
        nodes = tuple(i for i, leaf in enumerate(leaves) if is_node(leaf))
        # a Variable has a shape and a dtype too
        arrays = tuple(i for i, leaf in enumerate(leaves) if i not in nodes and is_input(leaf))
        numbered = with_leaves(tree, range(len(leaves)), is_whole)
        return Arguments(treedef, tuple(leaves), nodes, arrays, numbered)

    def without_numpy(self) -> Arguments:
        """The same with NumPy arrays left out of `arrays`: as results they stay NumPy arrays."""
        arrays = tuple(i for i in self.arrays if isinstance(self.leaves[i], jax.Array))
        return dataclasses.replace(self, arrays=arrays)

    def take(self, which: tuple[int, ...]) -> tuple[Value, ...]:
        return tuple(self.leaves[i] for i in which)

    def rebuild(self, nodes: Sequence[object], arrays: Sequence[Value]) -> PyTree:
        leaves = list(self.leaves)
        for i, value in [
            *zip(self.nodes, nodes, strict=True),
            *zip(self.arrays, arrays, strict=True),
        ]:
            leaves[i] = value
        return with_leaves(self.numbered, leaves)


def is_input(leaf: object) -> bool:
    """Whether a leaf becomes an input of the program; other leaves reach the call unchanged."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return is_number(leaf.dtype)
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


@dataclasses.dataclass(frozen=True, eq=False)
class WatchedCall:
    """The outermost call of a pass when its program was traced, with shapes in place of arrays.

    `path` is the path of the module that was called. `dtypes` maps the path of each array in that
    module to its dtype in the call, because a step of mixed precision may have cast it before.
    """

    path: str
    method: str
    args: tuple[Value, ...]
    kwargs: Kwargs
    dtypes: Mapping[tuple[Hashable, ...], np.dtype[Any]]


def call_in_shapes(context: Context, args: tuple[Value, ...], kwargs: Kwargs) -> WatchedCall | None:
    """A call without its arrays; None if it holds more than arrays and plain Python values."""

    def shape_of(leaf: object) -> Value:
        is_array = isinstance(leaf, jax.Array | np.ndarray)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array else leaf

    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_whole)
    plain = (jax.Array, np.ndarray, bool, int, float, complex, str, type(None))
    if context.path is None or not all(isinstance(leaf, plain) for leaf in leaves):
        return None
    new = [shape_of(leaf) for leaf in leaves]
    args, kwargs = with_arguments(args, kwargs, new, is_whole)
    held = nnx.iter_graph(context.module, graph=True)
    values = {path: x.get_raw_value() for path, x in held if isinstance(x, nnx.Variable)}
    dtypes = dict[tuple[Hashable, ...], np.dtype[Any]]()
    dtypes.update((path, x.dtype) for path, x in values.items() if isinstance(x, jax.Array))
    return WatchedCall(context.path, context.method_name, args, kwargs, dtypes)
