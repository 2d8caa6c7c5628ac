"""Pytrees rebuilt with other leaves, as the user made them.

`jax.tree.unflatten` sorts the entries of a dict, so code that iterates over the dict would compute
something else. Invariant: a rebuilt tree equals the original in everything but the leaves, also in
the order and the types of its containers; the user's containers are copied, never written to.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import jax

from nnx_inspector.typing import Args, Kwargs, PyTree, Value

_IsLeaf = Callable[[PyTree], bool] | None


def with_leaves(tree: PyTree, leaves: Iterable[object], is_leaf: _IsLeaf = None) -> PyTree:
    """`tree` with new leaves, one for each of `jax.tree.leaves(tree, is_leaf)`, in that order."""
    rest = iter(leaves)
    if is_leaf is not None and is_leaf(tree):
        return next(rest)
    children, kind = jax.tree.flatten(tree, is_leaf=lambda child: child is not tree)
    if len(children) == 1 and children[0] is tree:
        return next(rest)
    new = jax.tree.unflatten(kind, [with_leaves(child, rest, is_leaf) for child in children])
    if type(tree) is dict:
        return {key: new[key] for key in tree}
    if type(tree) is collections.defaultdict:
        return collections.defaultdict(tree.default_factory, {key: new[key] for key in tree})
    return new


def plain_key(entry: object) -> Value:
    """The name or index in one entry of a jax key path."""
    match entry:
        case jax.tree_util.DictKey() | jax.tree_util.FlattenedIndexKey():
            return entry.key
        case jax.tree_util.SequenceKey():
            return entry.idx
        case jax.tree_util.GetAttrKey():
            return entry.name
        case _:
            return entry  # a class may register its own kind of entry


def path_name(path: Sequence[object], parameters: Sequence[str] | None = None) -> str:
    """A key path as a name: `"logits"`, `"0.1"`.

    `parameters` are the names of the parameters, if it is a path in `(args, kwargs)`.
    """
    keys = list(map(plain_key, path))
    if parameters is not None:
        keys = keys[1:]
        if plain_key(path[0]) == 0 and keys:
            known = keys[0] < len(parameters)
            keys[0] = parameters[keys[0]] if known else f"argument {keys[0]}"
    return ".".join(map(str, keys))


def dict_orders(tree: PyTree | None) -> tuple[tuple[Hashable, ...], ...]:
    """The order of the entries of every dict in a tree, which a treedef lacks. Hashable."""
    children = jax.tree.leaves(tree, is_leaf=lambda child: child is not tree)
    if len(children) == 1 and children[0] is tree:
        return ()
    own = (tuple(tree),) if isinstance(tree, dict) else ()
    return (*own, *(order for child in children for order in dict_orders(child)))


def with_arguments(
    args: Args, kwargs: Kwargs, leaves: Iterable[object], is_leaf: _IsLeaf = None
) -> tuple[Args, Kwargs]:
    """The arguments of a call with new leaves, one for each leaf of `(args, kwargs)`.

    Leaves are replaced in tuples only: any other container stays the caller's own object with its
    old leaves, so that a method can write to a list or dict that it receives.
    """
    rest = iter(leaves)
    new_args = tuple(_replace_in_tuples(arg, rest, is_leaf) for arg in args)
    by_name = {key: _replace_in_tuples(kwargs[key], rest, is_leaf) for key in sorted(kwargs)}
    return new_args, {key: by_name[key] for key in kwargs}


def _replace_in_tuples(node: object, leaves: Iterator[Value], is_leaf: _IsLeaf) -> PyTree:
    if isinstance(node, tuple) and not (is_leaf is not None and is_leaf(node)):
        children, kind = jax.tree.flatten(node, is_leaf=lambda child: child is not node)
        if not (len(children) == 1 and children[0] is node):
            return jax.tree.unflatten(
                kind, [_replace_in_tuples(c, leaves, is_leaf) for c in children]
            )
    own = jax.tree.leaves(node, is_leaf=is_leaf)
    new = [next(leaves) for _ in own]
    return new[0] if len(own) == 1 and own[0] is node else node
