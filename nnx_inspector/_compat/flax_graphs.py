"""How NNX lists a module's nodes and compares trees of modules, and the state of Linen."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import dis
import functools
import os
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, cast

from flax.nnx import Module, Variable, extract, graphlib, pytreelib
from flax.nnx.graphlib import JAX_PYTREE_REGISTRY  # type: ignore[attr-defined]
from flax.nnx.variablelib import HijaxVariable
from flax.typing import HashableMapping

from nnx_inspector._compat.jit import is_tracer
from nnx_inspector._compat.redirect import copy_of, redirect
from nnx_inspector.typing import Function, GraphDef, Value

NODES = "_pytree__nodes"
"""The attribute of every NNX object that says which of its attributes are data."""


class TaggedNodes(HashableMapping):
    """Replaces an object's `_pytree__nodes` inside a graphdef or treedef, and carries a tag there.

    Where `strict()`, the tag counts when a cache compares keys, so a program traced for one model
    is never run for its twin. A comparison written in code (`treedef == other`, as jax compares
    what a loop's body returns) ignores the tag; so does every comparison elsewhere.
    """

    @staticmethod
    def strict() -> bool:
        """Whether the programs of this thread depend on tags."""
        return False

    def __init__(self, mapping: HashableMapping, tag: Hashable):
        super().__init__(mapping._mapping, copy=False)
        self.plain, self.tag = mapping, tag
        self._hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash

    def __eq__(self, other: object) -> bool:
        tag = other.tag if isinstance(other, TaggedNodes) else ()
        if self.tag != tag and TaggedNodes.strict() and not _compared_in_code(sys._getframe(1)):
            return False
        return super().__eq__(other)

    def __reduce__(self) -> Any:
        return HashableMapping, (dict(self),)  # a pickle can be read without this package

    def __deepcopy__(self, memo: dict[int, Any]) -> TaggedNodes:
        return _with_tag(copy.deepcopy(self.plain, memo), self.tag)  # `copy.deepcopy(module)`


_tagged_nodes: weakref.WeakValueDictionary[Any, TaggedNodes] = weakref.WeakValueDictionary()


def _with_tag(mapping: HashableMapping, tag: object) -> TaggedNodes:
    """The mapping with a tag: the same object each time, which caches compare at once."""
    key = id(mapping), tag  # the result keeps the mapping alive
    found = _tagged_nodes.get(key)
    if found is None:
        found = _tagged_nodes[key] = TaggedNodes(mapping, tag)
    return found


def graph_nodes(root: object) -> Iterator[tuple[tuple[Value, ...], Any, bool]]:
    """`(path, node, met before)` for `root` and every NNX object and Variable below, parents first.

    Like `nnx.iter_graph`, in half its time.
    """
    kinds: dict[type, bool] = {}
    met: set[int] = set()
    stack: list[tuple[tuple[Value, ...], Any]] = [((), root)]
    while stack:
        path, node = stack.pop()
        # This is what `nnx.iter_graph` uses, which also lists every array and attribute. It can go
        # when flax has an iterator over modules and Variables alone.
        found = graphlib.get_node_impl(node)
        if not isinstance(found, graphlib.PytreeNodeImpl):
            again = id(node) in met
            met.add(id(node))
            yield path, node, again
            if again or found is None:
                continue
        plain = _original_nodes.get(id(found), found)  # listing a model takes nothing apart
        for key, child in reversed(plain.node_dict(node).items()):
            kind = type(child)
            is_node = kinds.get(kind)
            if is_node is None:
                is_node = graphlib.is_node(child) or isinstance(child, Variable)
                if not (is_tracer(child) or isinstance(child, HijaxVariable)):  # each differs
                    kinds[kind] = is_node
            if is_node:
                stack.append(((*path, key), child))


def comparable_structure(graphdef: GraphDef) -> Any:
    """What graphdefs with the same structure have in common, to be compared with `==`.

    A tuple takes one and the same object for equal, as a NaN or a table is not to itself. From
    Python 3.13 on the `==` of a dataclass, which a graphdef is, does not.
    """
    attributes = [(key, getattr(one, "value", one)) for key, one in graphdef.attributes]
    return graphdef.nodes, attributes


@functools.lru_cache(maxsize=4096)
def _kind_of(cls: type) -> str:
    """What a value of this type may hold modules as: "module" or another "object" of NNX, "tree",
    or "" for none.
    """
    if issubclass(cls, pytreelib.Pytree):
        return "module" if issubclass(cls, Module) else "object"
    if issubclass(cls, (Variable, types.NoneType, pytreelib.PytreeState)):
        return ""
    registered = cls in JAX_PYTREE_REGISTRY or cls in graphlib.PYTREE_REGISTRY
    return "tree" if registered or issubclass(cls, tuple) else ""


def module_links(root: object) -> set[tuple[int, Any, int]] | None:
    """`(object, key, module within it)` of all modules of `root`, by their `id`; None if an object
    is only half there, because an interrupt came while flax wrote it back.

    Tells whether one was added, removed, replaced or moved, in a tenth of `graph_nodes`' time. A
    loop may replace other objects in each step: an `nnx.Rngs`.
    """
    links: set[tuple[int, Any, int]] = set()
    met = {id(root)}
    stack: list[tuple[int, tuple[Value, ...], Iterable[tuple[Any, Any]] | None]]
    stack = [(id(root), (), _data_attributes(root))]
    while stack:
        owner, within, values = stack.pop()
        if values is None:
            return None
        for key, value in values:
            kind = _kind_of(type(value))
            if kind == "module":
                links.add((owner, (*within, key), id(value)))
            if kind in ("module", "object"):
                if id(value) not in met:
                    met.add(id(value))
                    stack.append((id(value), (), _data_attributes(value)))
            elif kind:
                tree = cast(graphlib.NodeImpl[Any, Any, Any], graphlib.get_node_impl(value))
                stack.append((owner, (*within, key), tree.node_dict(value).items()))
    return links


def _data_attributes(node: Any) -> Iterable[tuple[Any, Any]] | None:
    values = vars(node)
    if not node._pytree__is_pytree:
        return values.items()
    if NODES not in values:
        return None
    every = values[NODES]._mapping.items()  # by the interface of a Mapping they take longer
    return [(key, values[key]) for key, data in every if data and key in values]


_original_nodes: dict[int, Any] = {}
"""The implementation of each class by that of `patch_graph_node` which replaces it now."""


def set_raw_value(variable: Variable[Any], value: object) -> None:
    """Let a Variable hold a value, also one that belongs to an enclosing trace.

    There flax refuses any change, since the value might outlast the trace: the caller puts the
    former value back.
    """
    if isinstance(variable, HijaxVariable):
        variable.set_raw_value(value)
    else:
        # Without it, a pass of ours could not lend a Variable the value of an enclosing trace: flax
        # raises TraceContextError. It can go when flax has a context for that.
        object.__setattr__(variable, "_raw_value", value)


AddUndo = Callable[[Callable[[], None]], object]


def patch_graph_node(
    cls: type,
    tag_of: Callable[[Value], Value],
    on_filled: Callable[[Any, Any], None],
    add_undo: AddUndo,
) -> None:
    """Let graph traversals carry a tag for each object of `cls`; `add_undo` gets what undoes it.

    `tag_of(node)` gives the tag to put into a graphdef (None for none; an empty tag equals none).
    `on_filled(node, tag)` is called when an object is filled from a graphdef. This affects only
    flax's graph traversal (split, merge, the transforms), not `jax.tree` functions over the model.
    The objects themselves stay as they are.
    """
    original = graphlib.GRAPH_REGISTRY.get(cls)
    if not isinstance(original, graphlib.GraphNodeImpl):
        return

    def flatten(node: object) -> Any:
        values, metadata = original.flatten(node)
        tag = tag_of(node)
        if tag is None:
            return values, metadata
        values = list(values)
        for i, (key, value) in enumerate(values):
            if key == NODES:
                values[i] = key, _tagged(value, tag)
                break
        return values, metadata

    def init(node: object, attributes: Value) -> None:
        attributes = list(attributes)
        tag = None
        for i, (key, value) in enumerate(attributes):
            if key == NODES:
                if isinstance(value, TaggedNodes):
                    tag, attributes[i] = value.tag, (key, value.plain)
                break
        original.init(node, attributes)
        on_filled(node, tag)

    patched = dataclasses.replace(original, flatten=flatten, init=init)

    def undo() -> None:
        _original_nodes.pop(id(patched), None)  # undoing it again has no effect
        if graphlib.GRAPH_REGISTRY.get(cls) is patched:
            graphlib.GRAPH_REGISTRY[cls] = original

    add_undo(undo)
    # flax takes a module apart by what is registered for its class, and has no hook there. A copy
    # that is merged within a transform is another object: the tag is how it is known as the module
    # that it was split from. Without it, modules within `nnx.scan`, `nnx.vmap` and `nnx.jit` would
    # have no path. It can go when a graphdef says which module it was made of.
    graphlib.GRAPH_REGISTRY[cls], _original_nodes[id(patched)] = patched, original


def _tagged(value: object, tag: object) -> Any:
    if isinstance(value, graphlib.StaticElem):
        return graphlib.StaticElem(_with_tag(value.value, tag))
    if isinstance(value, HashableMapping):  # nnx.Object: attributes are not wrapped
        return _with_tag(value, tag)
    return value


_JAX = os.path.dirname(sys.modules["jax"].__file__ or "") + os.sep
_TREE_UTIL = os.path.join(_JAX, "_src", "tree_util.py")
_TREE = os.path.join(_JAX, "_src", "tree.py")
_COMPARE = dis.opmap["COMPARE_OP"]


def _compared_in_code(frame: types.FrameType | None) -> bool:
    """Whether an equality is evaluated for a comparison in Python code, not for a cache's lookup.

    Caches compare inside a call (of a jitted or cached function). Tree functions that walk two
    trees at once (`jax.tree.map`) compare their arguments and cache nothing.
    """
    while frame is not None and frame.f_code.co_name in ("__eq__", "__ne__"):
        frame = frame.f_back
    if frame is None:
        return False
    code = frame.f_code
    if code.co_filename == _TREE_UTIL or "flatten_up_to" in code.co_names:
        return True
    # jax compares treedefs both to find a program in its caches, where copies of two models must
    # differ, and to check that a loop returns what it was given, where they must not. The
    # instruction that asks is the only difference. It can go when jax's caches get a key of their
    # own from a pytree.
    return code.co_code[frame.f_lasti] == _COMPARE


def _is_copy_of_transform(frame: types.FrameType | None) -> bool:
    """Whether flax is copying a module to the new object that replaces it in a transform.

    All other code that flattens one module and fills another within a trace makes a clone.
    """
    while frame is not None and frame.f_code.co_filename in (_TREE_UTIL, _TREE):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename != extract.__file__:
        return False
    return frame.f_code.co_name in ("wrapper", "snapshot")  # treemap_copy_args, snapshot


def patch_pytree_nodes(
    tag_of: Callable[[Value], Value], on_filled: Callable[[Any, Any, bool], None], add_undo: AddUndo
) -> None:
    """Let treedefs carry a tag for each module; `add_undo` gets what undoes it.

    Modules travel by treedef in tree mode (`graph=False`), and as arguments of `jax.jit` itself.
    `tag_of(module)` gives the tag (None for none; an empty tag equals none).
    `on_filled(module, tag, moved)` is called when a module is filled again.
    """
    cls = pytreelib.Pytree
    flattens = (cls._pytree__flatten, cls._pytree__flatten_with_paths)
    unflatten = cls._pytree__unflatten.__func__  # type: ignore[attr-defined]

    def flattening(original: Any) -> Function:
        def flatten(node: object) -> Any:
            children, (node_keys, static_keys, static) = original(node)
            tag = tag_of(node) if NODES in static_keys else None
            if tag is not None:
                at = static_keys.index(NODES)
                tagged = _with_tag(static[at], tag)
                static = (*static[:at], tagged, *static[at + 1 :])
            return children, (node_keys, static_keys, static)

        return flatten

    original_unflatten = copy_of(unflatten)

    def unflattened(cls: object, aux: Any, children: object) -> Any:
        node_keys, static_keys, static = aux
        tags = [value.tag for value in static if isinstance(value, TaggedNodes)]
        if tags:
            static = tuple(v.plain if isinstance(v, TaggedNodes) else v for v in static)
        node = original_unflatten(cls, (node_keys, static_keys, static), children)
        moved = bool(tags) and _is_copy_of_transform(sys._getframe(2))
        on_filled(node, tags[0] if tags else None, moved)
        return node

    # The same for a module as a pytree, which jax takes apart by these three functions. They are
    # registered with jax once for each class, and cannot be registered again: so their code is
    # redirected.
    redirect(unflatten, unflattened, original_unflatten, add_undo)
    for function in flattens:
        original = copy_of(function)
        redirect(function, flattening(original), original, add_undo)


# ------------------------------------------------------------------- linen


def linen_depth() -> int:
    """How many nested `apply` and `init` of Linen modules are under way in this thread."""
    from flax.linen import module

    return len(module._context.capture_stack)


def is_linen_dry_run(module: Any) -> bool:
    """Whether a Linen module runs without variables, only to check what its setup does."""
    from flax.linen.module import TestScope

    return isinstance(module.scope, TestScope)


@contextlib.contextmanager
def outermost_linen_interceptor(interceptor: Function) -> Iterator[None]:
    """As `linen.intercept_methods`, but around the open interceptors instead of inside them."""
    from flax.linen import module

    # Linen puts a new interceptor inside those that are open. The user's own would then see our
    # calls. It can go when `linen.intercept_methods` takes a position.
    stack = module._global_interceptor_stack._storage
    stack.insert(0, interceptor)
    try:
        yield
    finally:
        stack.remove(interceptor)


def patch_linen_jit_key(
    more: Callable[[Value], Value], add_undo: Callable[[Callable[[], None]], object]
) -> None:
    """Make `more(module)` part of the key of programs of `linen.jit`, unless it is None; `add_undo`
    gets what undoes it.
    """
    from flax.linen import transforms

    cls = transforms._HashableProxy
    original = vars(cls)["from_module"]

    def from_module(cls: type, module: object) -> Any:
        proxy, key = original.__func__(cls, module), more(module)
        return proxy if key is None else cls(proxy.module_ref, hash((proxy.hash_key, key)))

    def undo() -> None:
        cls.from_module = original

    add_undo(undo)
    # `linen.jit` keeps its programs by the module's hash, and would run one without our hooks. It
    # can go when it takes jax's user contexts into its key, as `jax.jit` does.
    cls.from_module = classmethod(from_module)  # type: ignore[assignment]
