"""The Variables of a module: found cheaply, and compared with their state before a call.

Names are NNX's own paths. Invariant: nothing is copied and no array is read; values are compared
by identity, so a Variable that was written to is never missed. Does not know whether the numbers
of a new value differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import sys
import threading
import types
from collections.abc import Collection, Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector.arrays import is_array, shape_of
from nnx_inspector.hooks.pytrees import plain_key
from nnx_inspector.hooks.sites import Path, linen_parts, site_key
from nnx_inspector.stats.summarize import is_number
from nnx_inspector.typing import Value, Variable

_PLAIN = (
    int, float, str, bytes, bool, complex, type, types.FunctionType, types.BuiltinFunctionType,
    types.NoneType, np.ndarray, np.dtype, jax.Array, jax.ShapeDtypeStruct,
)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def node_kind(cls: type) -> str:
    """How to walk a value of a type; cached, because NNX's own answers are slow."""
    kinds: list[tuple[str, type | tuple[type, ...]]] = [
        ("variable", nnx.Variable),
        ("list", nnx.List),
        ("object", nnx.Pytree),
        ("plain", _PLAIN),
        ("dict", dict),
        ("list", (list, tuple)),
    ]
    return next((kind for kind, base in kinds if issubclass(cls, base)), "pytree")


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a module at one moment; iterates over `(path, variable, value)`.

    They may be a slice of the contents of an outer module, so paths begin at `depth`. A shared
    Variable occurs once.

    Attributes:
        containers: a live view of the entries of each module, list or dict inside.
        sizes, entries: how many entries each container had, and the entries themselves.
        outer, start: the contents of the outer module, and where the slice begins in them.
    """

    variables: list[Variable]
    values: list[Value]
    paths: list[Path]
    depth: int
    containers: list[Collection[object]]
    sizes: list[int]
    entries: list[object]
    outer: Contents | None = None
    start: int = 0

    def __iter__(self) -> Iterator[tuple[Path, Variable, Value]]:
        for path, variable, value in zip(self.paths, self.variables, self.values, strict=True):
            yield path[self.depth :], variable, value

    def changed(self) -> Iterator[tuple[Path, Variable, Value]]:
        """The Variables that hold another value now, each with its former value."""
        is_other = map(operator.is_not, map(raw_value, self.variables), self.values)
        for number in itertools.compress(itertools.count(), list(is_other)):
            yield self.paths[number][self.depth :], self.variables[number], self.values[number]

    def is_complete(self) -> bool:
        """Whether all containers still have the same entries: no Variable was added or removed."""
        now = itertools.chain.from_iterable(self.containers)
        return list(map(len, self.containers)) == self.sizes and all(
            map(operator.is_, now, self.entries)
        )

    def parameter_sizes(self) -> tuple[int, int]:
        """Elements and bytes of the `nnx.Param`s, a shared one counted once."""
        before = (self.outer or self)._sizes
        ends = before[self.start], before[self.start + len(self.variables)]
        return ends[1][0] - ends[0][0], ends[1][1] - ends[0][1]

    @functools.cached_property
    def _sizes(self) -> list[tuple[int, int]]:
        """The elements and bytes of the parameters before each Variable, and of all of them."""
        found = [(0, 0)]
        for variable, value in zip(self.variables, self.values, strict=True):
            leaves = jax.tree.leaves(value) if isinstance(variable, nnx.Param) else ()
            arrays = [leaf for leaf in leaves if is_array(leaf)]
            size = sum(math.prod(a.shape) for a in arrays)
            found.append((found[-1][0] + size, found[-1][1] + byte_count(arrays)))
        return found


raw_value = operator.methodcaller("get_raw_value")


class Walk:
    """Everything in a module, in one order: the contents of an inner module are a slice of it.

    Invariant: `_parts` has a module only if a walk from that module would find exactly its slice.
    """

    def __init__(self, module: object):
        self._found = Contents([], [], [], 0, [], [], [])
        self._parts: dict[int, tuple[object, int, list[int], list[int]]] = {}
        self._numbers: dict[int, int] = {}
        self._count = itertools.count()
        self.collect(module, ())
        self._found.values.extend(map(raw_value, self._found.variables))

    def contents(self) -> Contents:
        return self._found

    def part(self, module: object) -> Contents | None:
        """The contents of an inner module now; None if it is not inside or has changed."""
        if id(module) not in self._parts:
            return None
        _, depth, start, ends = self._parts[id(module)]
        variables, containers, entries = map(slice, start, ends)
        every = self._found
        own = every.variables[variables]
        found = Contents(
            own,
            list(map(raw_value, own)),
            every.paths[variables],
            depth,
            every.containers[containers],
            every.sizes[containers],
            every.entries[entries],
            every,
            start[0],
        )
        return found if found.is_complete() else None

    def collect(self, node: Value, path: Path) -> int:
        """Collect everything in a node; returns the lowest number of a node that it met again."""
        kind = node_kind(type(node))
        if kind == "plain":
            return _NO_NODE
        if id(node) in self._numbers:
            return self._numbers[id(node)]
        if kind == "pytree" and not isinstance(node, nnx.Variable):
            # NNX can only tell from an instance whether it is a Variable
            return self._collect_pytree(node, path)
        number = self._numbers[id(node)] = next(self._count)
        every = self._found
        if kind in ("variable", "pytree"):
            every.variables.append(node)
            every.paths.append(path)
            return _NO_NODE
        start = self._ends()
        items, entries = _entries(node, kind)
        every.containers.append(entries)
        every.sizes.append(len(entries))
        every.entries.extend(entries)
        lowest = _NO_NODE
        for name, value in items:  # not a generator: it would take twice as much of the stack
            lowest = min(lowest, self.collect(value, (*path, name)))
        if kind != "object":  # numbered only to stop at cycles: several modules may share it
            del self._numbers[id(node)]
        if lowest >= number and isinstance(node, nnx.Pytree):  # an nnx.List is a module too
            self._parts[id(node)] = (node, len(path), start, self._ends())
        return lowest

    def _ends(self) -> list[int]:
        every = self._found
        return [len(every.variables), len(every.containers), len(every.entries)]

    def _collect_pytree(self, node: object, path: Path) -> int:
        leaves = jax.tree_util.tree_flatten_with_path(node, is_leaf=is_node)[0]
        found = [
            self.collect(leaf, (*path, *map(plain_key, inner)))
            for inner, leaf in leaves
            if leaf is not node
        ]
        return min(found, default=_NO_NODE)


def _entries(
    node: Value, kind: str
) -> tuple[Iterable[tuple[str | int, Value]], Collection[object]]:
    """The entries of a container to walk, with their names, and a live view of all its entries."""
    if kind == "object":
        held = vars(node)
        inside = [name for name in sorted(held) if not name.startswith("_pytree__")]
        return [(name, held[name]) for name in inside], held.values()
    if kind == "dict":
        return node.items(), node.values()
    # what an nnx.List holds are attributes, and its own iterator is slow
    return enumerate(node), vars(node).values() if isinstance(node, nnx.List) else node


VariableValue = tuple[Variable, Value]
_NO_NODE = sys.maxsize


class _OpenWalks(threading.local):
    walks: tuple[Walk, ...] = ()


_open_walks = _OpenWalks()


@contextlib.contextmanager
def shared_contents(module: object) -> Iterator[Contents]:
    """A module's contents now. Inside the context, those of its inner modules are parts of them."""
    outer, found = _open_walks.walks, _contents_in_walk(module)
    if found is None:
        walk = Walk(module)
        found, _open_walks.walks = walk.contents(), (walk, *outer)
    try:
        yield found
    finally:
        _open_walks.walks = outer


def contents(module: object) -> Contents:
    """The Variables of a module and of its children, a shared one once."""
    found = _contents_in_walk(module)
    return Walk(module).contents() if found is None else found


def contents_at(
    modules: Mapping[str, nnx.Module], key: str
) -> list[tuple[Path, Variable, Value]] | None:
    """The Variables at a site by their paths below it: those of a module, or of a Linen module
    inside a ToNNX. None if there is neither.
    """
    if key in modules:
        return list(contents(modules[key]))
    for outer, module in modules.items():
        for inner in linen_parts(module):
            if key == "/".join(filter(None, (outer, site_key(inner)))):
                below = len(inner)
                return [
                    (path[below:], variable, value)
                    for path, variable, value in contents(module)
                    if path[:below] == inner
                ]
    return None


def _contents_in_walk(module: object) -> Contents | None:
    parts = (walk.part(module) for walk in _open_walks.walks)
    return next((part for part in parts if part is not None), None)


def child_nodes(module: object) -> Iterator[nnx.Pytree | Variable]:
    """The Variables and NNX objects in the attributes of an object, also within lists and dicts."""
    nodes = [module]
    while nodes:
        node = nodes.pop()
        for _, value in _entries(node, node_kind(type(node)))[0]:
            kind = node_kind(type(value))
            if kind in ("list", "dict"):
                nodes.append(value)
            elif kind == "pytree":
                leaves = jax.tree.leaves(value, is_leaf=is_node)
                yield from (leaf for leaf in leaves if is_node(leaf))
            elif kind != "plain":
                yield value


def is_node(x: object) -> bool:
    """Whether a value is a module or a Variable: flattening one would create other objects."""
    return isinstance(x, nnx.Variable | nnx.Pytree)


def variables_by_path(roots: Mapping[Path, object]) -> Iterator[tuple[Path, Variable]]:
    """The Variables of several modules with their full paths; a shared one once per module."""
    for prefix, root in roots.items():
        for path, variable, _ in contents(root):
            yield (*prefix, *path), variable


def unseen_references(roots: Mapping[Path, object]) -> dict[str, str]:
    """Path -> why changes go unseen, for each Variable that is a reference."""
    return {
        site_key(
            path
        ): "it is a Variable with ref=True or hijax=True, whose changes by a call are not seen"
        for path, variable in variables_by_path(roots)
        if variable.ref or variable.hijax
    }


def changed_variables(
    before: Contents, module: object
) -> Iterator[tuple[Path, VariableValue | None, VariableValue | None]]:
    """`(path, old, new)` for each replaced value: Variable and value, or None if missing."""
    if before.is_complete():
        for path, variable, value in before.changed():
            yield path, (variable, value), (variable, variable.get_raw_value())
        return
    olds, news = ({p: (x, value) for p, x, value in one} for one in (before, contents(module)))
    for path in dict.fromkeys([*olds, *news]):
        old, new = olds.get(path), news.get(path)
        if old is None or new is None or old[1] is not new[1]:
            yield path, old, new


def is_weight(variable: object) -> bool:
    """Whether a Variable's value belongs to the model: a cached key or RNG state does not."""
    return not isinstance(variable, nnx.Cache | nnx.RngState)


def initial_weights(module: object, outer: Mapping[int, object]) -> dict[int, Value]:
    """The values of a module's weights when a call begins, by the ids of their Variables.

    Args:
        outer: those of the enclosing call. What that call has computed since is not a weight,
            unless a `Param` holds it.
    """
    return {
        id(v): value if isinstance(v, nnx.Param) else outer.get(id(v), value)
        for _, v, value in contents(module)
        if is_weight(v)
    }


def float_arrays(variable: Variable) -> list[Value]:
    """Each array of a Variable, as in `stage.array_names`; None if it holds neither floats nor
    complex numbers.
    """
    leaves = [x for x in jax.tree.leaves(variable.get_raw_value()) if shape_of(x) is not None]
    # NumPy holds arrays that XLA does not take: texts, float6
    leaves = [x for x in leaves if not isinstance(x, np.ndarray) or is_number(x.dtype)]
    return [x if _holds_floats(x) else None for x in leaves]


def _holds_floats(x: object) -> bool:
    return isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct) and jnp.issubdtype(
        x.dtype, jnp.inexact
    )


def parameter_arrays(found: Contents) -> Iterator[Value]:
    """The arrays (or abstract arrays) of a module's `nnx.Param`s one by one, a shared one once."""
    for _, variable, value in found:
        if isinstance(variable, nnx.Param):
            yield from filter(is_array, jax.tree.leaves(value))


def byte_count(arrays: Iterable[Value]) -> int:
    """The size of some arrays (or abstract arrays) in bytes."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
