"""Whose call is it: the paths of one model's modules, through every copy that a transform makes.

A scope knows the objects of one model by identity, and the stand-ins that NNX builds inside
transforms by a tag that travels in graphdefs and treedefs. Invariant: a module whose path cannot
be known has none; a look-alike (a twin, a clone, an older graphdef) never gets the model's.
Holds no model and calls nothing.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

from flax import nnx

from nnx_inspector import _private
from nnx_inspector.sites import Path, iter_modules, require_module


class Scope:
    """One model whose modules' paths are known: the objects themselves and the transforms' copies.

    Two scopes over the same object are equal, so that entering the same hooks again is a jit
    cache hit.
    """

    def __init__(self, roots: dict[Path, nnx.Module], token: Any):
        self.token = token  # no model is kept: jit caches hold scopes as long as they live
        self._paths: dict[int, tuple[weakref.ref[Any], Path]] = {}
        self._copies: dict[int, tuple[weakref.ref[Any], Path]] = {}
        self._flattened: dict[Path, list[Any]] = {}
        self._arrived: dict[Path, tuple[Any, weakref.ref[Any]]] = {}
        self.types: set[type] = set()
        self._doubted: dict[int, weakref.ref[Any]] = {}
        self.unattributed: dict[str, int] = {}
        self.doubtful: dict[str, int] = {}
        for prefix, root in roots.items():
            for path, module in iter_modules(root):
                whole = cast(Path, (*prefix, *path))
                self._paths.setdefault(id(module), (weakref.ref(module), whole))
                self.types.add(type(module))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scope) and self.token == other.token

    def __hash__(self) -> int:
        return hash(self.token)

    def path_of(self, module: Any) -> Path | None:
        for known in (self._paths, self._copies):
            entry = known.get(id(module))
            if entry is not None and entry[0]() is module:
                return entry[1]
        return None

    def holds(self, path: Path) -> bool:
        """Whether one of the model's own modules is at `path`."""
        return any(known == path for _, known in self._paths.values())

    def doubts(self, module: Any) -> bool:
        """Whether a module may be a copy of one of the model's: nothing says where it is from."""
        known = self._doubted.get(id(module))
        return known is not None and known() is module

    def note_unattributed(self, module: Any) -> None:
        """Count a call of a module that looks like one of ours and is none.

        `unattributed` counts them all; `doubtful` those that may yet be the model's.
        """
        if type(module) in self.types and self.path_of(module) is None:
            name = type(module).__name__
            self.count_unattributed(name)
            if self.doubts(module):
                self.doubtful[name] = self.doubtful.get(name, 0) + 1

    def count_unattributed(self, name: str) -> None:
        """Count a call of a module of this type that is not the model's."""
        self.unattributed[name] = self.unattributed.get(name, 0) + 1

    def adopt(self, module: nnx.Module, owner: nnx.Module, below: Path) -> None:
        """Let a module that is made during a call stand below one of the model's own."""
        path = self.path_of(owner)
        if path is not None:
            for inner, part in iter_modules(module):
                self._copies[id(part)] = (weakref.ref(part), (*path, *below, *inner))
                self.types.add(type(part))

    def leaves_with_tag(self, module: Any) -> Path | None:
        """The path to put into a graphdef or treedef; notes at which trace it was put there."""
        path = self.path_of(module)
        if path is not None:
            trace = _private.trace_state()
            traces = self._flattened.get(path, [])
            if trace not in traces:
                alive = [t for t in traces if not _private.trace_is_over(t)]
                self._flattened[path] = [*alive, trace]
        return path

    def arrives_with_tag(self, module: Any, path: Path | None, *, moved: bool) -> None:
        """A module was filled from a graphdef or treedef that carries `path`.

        Within a trace in which it was taken apart it is a clone of the user's own, or what a
        transform returned: a second model. In another trace it is a transform's stand-in for the
        same module. A transform makes one stand-in a trace: a second is the user's own merge,
        which may be of another model's state. `moved` says that a transform replaced its own
        stand-in by this one. A path of None says that nobody knows (an older graphdef).
        """
        if self.path_of(module) is not None or type(module) not in self.types:
            return
        if path is None or not (moved or self._is_stand_in(path)):
            self._doubted[id(module)] = weakref.ref(module)
            return
        self._arrived[path] = (_private.trace_state(), weakref.ref(module))
        self._copies[id(module)] = (weakref.ref(module), path)

    def _is_stand_in(self, path: Path) -> bool:
        trace = _private.trace_state()
        if trace in self._flattened.get(path, ()):
            return False
        earlier = self._arrived.get(path)
        return earlier is None or earlier[0] != trace or earlier[1]() is None


def scope_of(model: nnx.Module, what: str = "model") -> Scope:
    """The scope of one model (or submodule: that instance only)."""
    return Scope({(): require_module(model, what)}, id(model))
