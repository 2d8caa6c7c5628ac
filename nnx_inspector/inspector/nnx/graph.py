"""A module as NNX sees it: nodes with their static attributes, Variables, and what is shared.

Names are NNX's own paths. Invariant: everything is read once, and nothing is written, computed or
fetched except the value of a scalar; every text is bounded. `snapshots` hold earlier values.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector.arrays import is_array, own_attribute
from nnx_inspector.hooks.pytrees import plain_key
from nnx_inspector.hooks.sites import Path, site_key
from nnx_inspector.hooks.variables import byte_count, is_node, node_kind
from nnx_inspector.program.analysis.describe import value_in_words
from nnx_inspector.screen import protocol
from nnx_inspector.typing import AnyArray, Kwargs, Value

_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True)
class Node:
    """A module, or another object or container that NNX takes apart.

    Attributes:
        value: the node itself.
        depth: how many nodes are around it.
        is_repeated: whether the same object was visited before; its content is not repeated.
        static: its static attributes.
    """

    path: Path
    value: Value
    depth: int
    is_repeated: bool
    static: tuple[tuple[str, Value], ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A Variable, or a plain array, under one of its paths.

    Attributes:
        value: its content at the time of the visit.
        module: the path of the innermost module around it.
    """

    path: Path
    owner: Value
    value: Value
    module: Path
    is_repeated: bool


def nodes_and_leaves(module: object, prefix: Path = ()) -> list[Node | Leaf]:
    """The content of a module in the order of NNX's graphdef, each object under all its paths."""
    found: list[Node | Leaf] = []
    _visit(module, prefix, prefix, 0, found, set())
    return found


def _visit(
    value: object, path: Path, module: Path, depth: int, found: list[Node | Leaf], seen: set[int]
) -> bool:
    """Add the content of a value; return False if NNX treats the value as static."""
    kind = "variable" if isinstance(value, nnx.Variable) else node_kind(type(value))
    if kind == "variable" or isinstance(value, _ARRAYS):
        is_repeated = kind == "variable" and id(value) in seen
        seen.add(id(value))
        held = value.get_raw_value() if isinstance(value, nnx.Variable) else value
        found.append(Leaf(path, value, held, module, is_repeated))
        return True
    if kind == "plain":
        return False
    if isinstance(value, nnx.Pytree):
        is_repeated = id(value) in seen
        seen.add(id(value))
        here = path if isinstance(value, nnx.Module) else module
        at = len(found)
        found.append(Node(path, value, depth, is_repeated, ()))
        if not is_repeated:
            static = tuple(
                (str(key), part)
                for key, part in _attributes(value)
                if not _visit(part, (*path, key), here, depth + 1, found, seen)
            )
            found[at] = Node(path, value, depth, False, static)
        return True
    return _visit_container(value, path, module, depth, found, seen)


def _visit_container(
    value: object, path: Path, module: Path, depth: int, found: list[Node | Leaf], seen: set[int]
) -> bool:
    inner: list[Node | Leaf] = []
    if isinstance(value, dict):
        parts = [((key,), part) for key, part in list(value.items())]
    elif isinstance(value, (list, tuple)) and own_attribute(value, "_fields") is None:
        parts = [((i,), part) for i, part in enumerate(list(value))]
    else:
        parts = list(_pytree_parts(value))
    static = [
        ("/".join(map(str, keys)), part)
        for keys, part in parts
        if not _visit(part, (*path, *keys), module, depth + 1, inner, seen)
    ]
    if inner:
        found.append(Node(path, value, depth, False, tuple(static)))
        found += inner
    return bool(inner)


def _attributes(node: object) -> list[tuple[str | int, Value]]:
    if isinstance(node, nnx.List):
        return list(enumerate(node))
    own = list(vars(node).items())  # at once: another thread may be setting one
    return sorted((kv for kv in own if not kv[0].startswith("_pytree__")), key=lambda kv: kv[0])


def _pytree_parts(value: object) -> Iterator[tuple[Path, Value]]:
    for inner, leaf in jax.tree_util.tree_flatten_with_path(value, is_leaf=is_node)[0]:
        if leaf is not value:
            yield tuple(map(plain_key, inner)), leaf


# -------------------------------------------------------------------- in words


class References:
    """The objects that have several paths.

    Args:
        found: the content of the module that is shown.
        model: the content of the whole model, which has the other paths.
    """

    def __init__(self, found: Sequence[Node | Leaf], model: Sequence[Node | Leaf]):
        self._paths: dict[int, list[Path]] = {}
        for one in found:
            self._paths.setdefault(_reference_key(one), []).append(one.path)
        here = {path for paths in self._paths.values() for path in paths}
        self._elsewhere: dict[int, list[Path]] = {}
        for one in model:
            if _reference_key(one) in self._paths and one.path not in here:
                self._elsewhere.setdefault(_reference_key(one), []).append(one.path)
        shared = (
            key for key, paths in self._paths.items() if len(paths) > 1 or key in self._elsewhere
        )
        self._numbers = dict(zip(shared, itertools.count(1), strict=False))

    def of(self, one: Node | Leaf) -> Kwargs:
        """`reference`, `first` and `also` of a protocol message."""
        key = _reference_key(one)
        others = self._elsewhere.get(key, [])
        return {
            "reference": self._numbers.get(key, 0),
            "first": short_text(site_key(self._paths[key][0])) if one.is_repeated else None,
            "also": tuple(short_text(site_key(p)) for p in others[: protocol.MOST_ALIASES]),
        }


def _reference_key(one: Node | Leaf) -> int:
    value = one.owner if isinstance(one, Leaf) else one.value
    shares = isinstance(value, nnx.Pytree | nnx.Variable)
    return id(value) if shares else id(one)  # arrays and containers are values, not references


def short_text(value: str) -> str:
    """Text of a user's model, cut if it is longer than a line or two."""
    longest = protocol.LONGEST_TEXT
    return value if len(value) <= longest else value[: longest - 2] + " …"


def node_row(node: Node, references: References) -> protocol.NnxNode:
    attributes = [
        protocol.NnxAttribute(name=short_text(name), text=short_text(_in_words(value)))
        for name, value in node.static[: protocol.MOST_ATTRIBUTES]
    ]
    key = site_key(node.path)
    return protocol.NnxNode(
        path=short_text(key),
        name=short_text(str(node.path[-1])) if node.path else "",
        type=short_text(type(node.value).__name__),
        depth=node.depth,
        module=key if isinstance(node.value, nnx.Module) else None,
        attributes=tuple(attributes),
        attributes_total=len(node.static),
        **references.of(node),
    )


def _in_words(value: object) -> str:
    return str(value) if isinstance(value, np.dtype) else value_in_words(value)


def variable_row(
    leaf: Leaf,
    references: References,
    change: protocol.NnxChange | None,
    passed: protocol.NnxChange | None,
) -> protocol.NnxVariable:
    value, held = leaf.value, content_kind(leaf.value)
    lone = is_array(value)
    return protocol.NnxVariable(
        path=short_text(site_key(leaf.path)),
        module=site_key(leaf.module),
        type=short_text(type_of(leaf)),
        shape=str(tuple(value.shape)) if lone else short_text(value_in_words(value)),
        dtype=str(value.dtype) if lone else "",
        bytes=byte_count(arrays_in(value)),
        sharding=short_text(_sharding(value)) if held == "array" else "",
        held=held,
        committed=_committed(value) if held == "array" else None,
        metadata=short_text(_metadata(leaf.owner)),
        value=scalar_text(value) if held == "array" else "",
        change=change,
        passed=passed,
        **references.of(leaf),
    )


def type_of(leaf: Leaf) -> str:
    """The type of a Variable, "" for a plain array."""
    return type(leaf.owner).__name__ if isinstance(leaf.owner, nnx.Variable) else ""


ContentKind = Literal["array", "traced", "deleted", "shape", "reference", "other"]


def content_kind(value: object) -> ContentKind:
    """The kind of a Variable's content, in one word."""
    if jit.is_tracer(value):
        return "traced"
    if isinstance(value, jax.Ref):
        return "reference"
    if isinstance(value, jax.Array):
        return "deleted" if value.is_deleted() else "array"
    if isinstance(value, np.ndarray):
        return "array"
    return "shape" if isinstance(value, jax.ShapeDtypeStruct) else "other"


def arrays_in(value: object) -> list[Value]:
    return [x for x in jax.tree.leaves(value) if is_array(x)]


def scalar_text(value: AnyArray) -> str:
    """The value of an array of one number, which is cheap to fetch; else ""."""
    whole = not isinstance(value, jax.Array) or value.is_fully_addressable
    if value.size != 1 or not whole or jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return ""
    try:
        return short_text(str(np.asarray(value).reshape(())[()]))
    except RuntimeError:  # donated to a running step a moment ago
        return ""


def _sharding(value: AnyArray) -> str:
    if isinstance(value, np.ndarray):
        return "host"
    sharding = value.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        return f"P{tuple(sharding.spec)} on mesh ({axes})"
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    if len(devices) == 1:
        return f"{devices[0].platform}:{devices[0].id}"
    return f"{type(sharding).__name__} on {len(devices)} devices"


def _committed(value: object) -> bool | None:
    committed = getattr(value, "committed", None)
    return committed if isinstance(committed, bool) else None


_DEFAULT_METADATA = {"hijax": False, "ref": False, "eager_sharding": True}


def _metadata(owner: object) -> str:
    if not isinstance(owner, nnx.Variable):
        return ""
    shown = {
        name: value
        for name, value in owner.get_metadata().items()
        if value is not None and _DEFAULT_METADATA.get(name, _in_words) is not value
    }
    return ", ".join(f"{name}={_in_words(value)}" for name, value in list(shown.items())[:8])


def variable_totals(leaves: Sequence[Leaf]) -> tuple[protocol.NnxKind, ...]:
    """The Variables by type, each shared one once; the type with the most bytes comes first."""
    found: dict[str, list[int]] = {}
    for leaf in leaves:
        if not leaf.is_repeated:
            sums = found.setdefault(type_of(leaf), [0, 0, 0])
            sums[0] += 1
            arrays = arrays_in(leaf.value)
            sums[1] += sum(math.prod(x.shape) for x in arrays)
            sums[2] += byte_count(arrays)
    return tuple(
        protocol.NnxKind(type=short_text(name), variables=sums[0], elements=sums[1], bytes=sums[2])
        for name, sums in sorted(found.items(), key=lambda kind: -kind[1][2])
    )
