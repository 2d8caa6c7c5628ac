"""The paths of one model's modules, followed through every copy that a transform makes.

A scope recognises the objects of one model by identity, and the copies that NNX makes inside
transforms by a tag that travels in graphdefs and treedefs. Invariant: a module whose path is not
certain has none; a look-alike (a twin, a clone, an older graphdef) never gets a path of the model.
Does not keep the model alive and calls nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from typing import cast

from flax import nnx

from nnx_inspector._compat import jit
from nnx_inspector._compat.flax_graphs import graph_nodes, module_links
from nnx_inspector.hooks.merged_copies import MergedParameters, ModelParameters, counterparts
from nnx_inspector.hooks.sites import Path, iter_modules, require_module

CLONE: Path = ("", "clone")
"""Replaces the path of a copy that the user has made of one of the model's modules."""


class Scope:
    """The known paths of one model's modules: the objects themselves and the transforms' copies.

    Two scopes of the same object are equal, so that entering equal hooks again hits the jit cache.

    Args:
        roots: the model's modules, by the prefixes of their paths.
        token: identifies the model.
        candidates: whether a tree that a program merges and that may be the model's has its paths
            too: one from outside the program, with the model's graphdef or its structure. Whose it
            is is then decided where the program is launched; see `live.programs.ownership`.

    Attributes:
        readings: how often the model's modules were read: once more after each change of them.
    """

    def __init__(self, roots: dict[Path, nnx.Module], token: Hashable, *, candidates: bool = False):
        self._candidates = candidates
        self.token = token  # not the model: jit caches keep scopes alive
        self._copies: dict[int, tuple[weakref.ref[object], Path]] = {}
        self._flattened: dict[Path, list[Hashable]] = {}
        self._arrived: dict[Path, tuple[Hashable, weakref.ref[object]]] = {}
        self._parameters = ModelParameters()
        self.types: set[type] = set()
        self._roots = [(prefix, weakref.ref(root)) for prefix, root in roots.items()]
        self._root_ids = {id(root) for root in roots.values()}
        self._doubted: dict[int, tuple[weakref.ref[object], Path | None]] = {}
        self._no_views: dict[int, weakref.ref[object]] = {}
        self.unattributed: dict[str, int] = {}
        self.doubtful: dict[str, int] = {}
        self.operations: dict[str, str] = {}  # key -> primitive
        self.readings = 0
        self._links = self._current_links()
        self._read()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scope) and self.token == other.token

    def __hash__(self) -> int:
        return hash(self.token)

    def _read(self) -> None:
        paths: dict[int, tuple[weakref.ref[object], Path]] = {}
        for prefix, root in self._live_roots():
            for path, module in iter_modules(root):
                whole = cast(Path, (*prefix, *path))
                paths.setdefault(id(module), (weakref.ref(module), whole))
                self.types.add(type(module))
        self._paths = paths
        self._variables: dict[int, Path] | None = None
        self.readings += 1

    def _live_roots(self) -> list[tuple[Path, nnx.Module]]:
        """The roots that are still alive, by the prefixes of their paths."""
        roots = [(prefix, ref()) for prefix, ref in self._roots]
        return [(prefix, root) for prefix, root in roots if root is not None]

    def _current_links(self) -> list[set[tuple[int, object, int]] | None]:
        return [module_links(root) for _, root in self._live_roots()]

    def renew(self) -> None:
        """Read the model's modules again if one was added, removed, replaced or moved.

        The copies met before are forgotten: they may have the place of another module now.
        """
        links = self._current_links()
        if links != self._links:
            self._links = links
            self._copies, self._doubted, self._no_views = {}, {}, {}
            self._flattened, self._arrived = {}, {}
            self._read()

    def path_of(self, module: nnx.Module) -> Path | None:
        """The module's path. A view (`nnx.view`: the same Variables) has that of its original."""
        known = self._known_path(module)
        if known is not None or type(module) not in self.types:
            return known
        ref = self._no_views.get(id(module))
        if ref is not None and ref() is module:
            return None
        self._no_views[id(module)] = weakref.ref(module)
        path = self._path_of_view(module)
        return self._path_of_candidate(module) if path is None else path

    def _path_of_candidate(self, module: nnx.Module) -> Path | None:
        """The path of a module of unknown origin, if its tree may be the model."""
        known = self._doubted.get(id(module), (None, ()))[1]
        if not self._candidates or known is not None or not jit.is_tracing():
            return None
        own = self._roots[0][1]()
        doubted = [ref() for ref, path in self._doubted.values() if path is None]
        for tree in doubted:
            if own is None or tree is None or type(tree) is not type(own):
                continue
            if not any(part is module for _, part in iter_modules(tree)):
                continue
            for original, part in counterparts(own, tree):
                path = self._known_path(original)
                if path is not None:
                    self._copies[id(part)] = (weakref.ref(part), path)
        return self._known_path(module)

    def _known_path(self, module: object) -> Path | None:
        for known in (self._paths, self._copies):
            entry = known.get(id(module))
            if entry is not None and entry[0]() is module:
                return entry[1]
        return None

    def _path_of_view(self, module: nnx.Module) -> Path | None:
        mine = variables_of(module)
        path = self._possible_original(module, mine) if mine else None
        if path is None:
            return None
        entries = [*self._paths.values(), *self._copies.values()]
        shown = (ref() for ref, known in entries if known == path)
        alike = (s for s in shown if s is not None and type(s) is type(module))
        if not any(variables_of(s) == mine for s in alike):
            return None
        for inner, part in iter_modules(module):
            self._copies[id(part)] = (weakref.ref(part), (*path, *inner))
        return path

    def _possible_original(self, module: nnx.Module, mine: list[tuple[Path, int]]) -> Path | None:
        """The path of the module that this one may be a view of, by its tag or first Variable."""
        ref, tag = self._doubted.get(id(module), (None, None))
        if ref is not None and ref() is module and tag is not None and tag != CLONE:
            return tag
        if self._variables is None:  # only a hint, because it may be out of date
            self._variables = {
                number: (*prefix, *path)
                for prefix, root in self._live_roots()
                for path, number in variables_of(root)
            }
        below, first = mine[0]
        whole = self._variables.get(first)
        end = 0 if whole is None else len(whole) - len(below)
        return None if whole is None or whole[end:] != below else whole[:end]

    def has_module(self, path: Path) -> bool:
        """Whether the model itself has a module at `path`."""
        return any(known == path for _, known in self._paths.values())

    def is_doubted(self, module: object) -> bool:
        """Whether a module may be a copy of one of the model's, but its origin is unknown."""
        known = self._doubted.get(id(module))
        return known is not None and known[0]() is module

    def tag_of(self, module: nnx.Module) -> Path | None:
        """What a flattened module takes along: its path, `CLONE`, or None if unknown."""
        path = self.on_flatten(module)
        if path is None and self.is_doubted(module) and self._doubted[id(module)][1] is not None:
            return CLONE
        return path

    def note_call_without_path(self, module: nnx.Module) -> None:
        """Count a call of a module that looks like one of the model's but has no known path.

        `unattributed` counts all such calls, `doubtful` those that may be the model's after all.
        """
        if type(module) in self.types and self.path_of(module) is None:
            name = type(module).__name__
            self.count_unattributed(name)
            if self.is_doubted(module):
                self.doubtful[name] = self.doubtful.get(name, 0) + 1

    def count_unattributed(self, name: str) -> None:
        """Count a call of a module of this type that could not be attributed to the model."""
        self.unattributed[name] = self.unattributed.get(name, 0) + 1

    def forget(self) -> None:
        """Forget the copies met so far and the calls that could not be attributed."""
        for known in (self._copies, self._flattened, self._arrived, self._doubted, self._no_views):
            known.clear()
        self.unattributed.clear()
        self.doubtful.clear()

    def adopt(self, module: nnx.Module, owner: nnx.Module, below: Path) -> None:
        """Give a module that is made during a call a path below one of the model's modules."""
        path = self.path_of(owner)
        if path is not None:
            for inner, part in iter_modules(module):
                self._copies[id(part)] = (weakref.ref(part), (*path, *below, *inner))
                self.types.add(type(part))

    def copy_paths(self, own: Iterable[object], copy: Iterable[object]) -> None:
        """Give the copies of NNX objects, in the same order, the paths of their originals."""
        for module, stand_in in zip(own, copy, strict=True):
            path = self._known_path(module) if isinstance(module, nnx.Module) else None
            if path is not None:
                self._copies[id(stand_in)] = (weakref.ref(stand_in), path)

    def on_flatten(self, module: nnx.Module) -> Path | None:
        """The path to put into a graphdef or treedef; note in which trace it was put there."""
        if id(module) in self._root_ids:
            self.renew()
        path = self.path_of(module)
        if path is not None:
            trace = jit.trace_state()
            traces = self._flattened.get(path, [])
            if trace not in traces:
                alive = [t for t in traces if not jit.trace_is_over(t)]
                self._flattened[path] = [*alive, trace]
            self._parameters.note_flattened(module)
        return path

    def on_unflatten(self, module: nnx.Module, path: Path | None, *, moved: bool) -> None:
        """Handle a module that was filled from a graphdef or treedef carrying `path`.

        In the trace in which the original was flattened, the module is the user's own clone or the
        result of a transform: a second model. In another trace it is a transform's stand-in for the
        original, unless its parameters are not the model's: see `merged_copies`. With `candidates`,
        of one whose parameters are all given to the program that is left open. A transform makes
        one stand-in per trace; a second one is the user's own merge, perhaps of another model's
        state (unless it has the same Variables: a view). `moved` says that a transform replaced its
        own stand-in by this module. A `path` of None means an unknown origin (an older graphdef).
        """
        if self._known_path(module) is not None or type(module) not in self.types:
            return
        tree = (
            MergedParameters() if moved or path in (None, CLONE) else self._parameters.read(module)
        )
        if self._candidates and path is not None and tree.program is not None:
            for inner, part in iter_modules(module):  # also those without parameters
                whole = cast(Path, (*path, *inner))
                self._copies[id(part)] = (weakref.ref(part), whole)
                self._forget_arrival(part, whole)
            return
        if path in (None, CLONE) or not (moved or self._is_stand_in(path, tree)):
            if tree.fingerprint:
                self._forget_parts(module)
            # a program may have updated a tree of unknown origin, which may be the model
            if not (self.is_doubted(module) and self._doubted[id(module)][1] is None):
                self._doubted[id(module)] = (weakref.ref(module), path)
            return
        self._arrived[path] = (jit.trace_state(), weakref.ref(module))
        self._copies[id(module)] = (weakref.ref(module), path)

    def _forget_parts(self, module: nnx.Module) -> None:
        """Forget the paths of the parts of another tree that have no parameters to tell it by.

        A part with parameters has been judged by them: the tree may share it with the model.
        """
        for _, part in iter_modules(module):
            if id(part) in self._copies and not self._parameters.read(part).fingerprint:
                path = self._copies.pop(id(part))[1]
                self._doubted[id(part)] = (weakref.ref(part), path)
                self._forget_arrival(part, path)

    def _forget_arrival(self, module: nnx.Module, path: Path) -> None:
        if path in self._arrived and self._arrived[path][1]() is module:
            del self._arrived[path]

    def _is_stand_in(self, path: Path, tree: MergedParameters) -> bool:
        trace = jit.trace_state()
        if tree.of_another_model or trace in self._flattened.get(path, ()):
            return False
        if self._parameters.is_second_tree(tree, path):
            return False
        earlier = self._arrived.get(path)
        return earlier is None or earlier[0] != trace or earlier[1]() is None


def variables_of(module: nnx.Module) -> list[tuple[Path, int]]:
    """The path and `id` of each Variable within a module."""
    every = ((p, node) for p, node, again in graph_nodes(module) if not again)
    return [(p, id(node)) for p, node in every if isinstance(node, nnx.Variable)]


def scope_of(model: nnx.Module, *, candidates: bool = False) -> Scope:
    """The scope of a model, or of a submodule (that instance only)."""
    return Scope({(): require_module(model, "model")}, id(model), candidates=candidates)
