"""Reports the calls of the Linen modules inside an `nnx.bridge.ToNNX`, with their paths.

This uses Linen's own interceptors, and a Linen module's path is its path below the ToNNX. The
wrapped module's call counts as the call of the ToNNX, and the call of a module made by a `ToLinen`
as the ToLinen's: each is reported once. Invariant: a Linen module that is applied by hand inside
(`Dense(3).apply(...)`) is never taken for a submodule. Does not know the hooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable, Hashable, Iterator

import jax
from flax import linen, nnx

from nnx_inspector._compat import flax_graphs
from nnx_inspector.arrays import is_array
from nnx_inspector.hooks.sites import CALL, Path
from nnx_inspector.typing import Args, Function, Kwargs, PyTree, Value


@dataclasses.dataclass(frozen=True)
class Listener:
    """The callbacks for the calls inside one ToNNX.

    Attributes:
        call: `(owner, below, module, method, original, args, kwargs) -> output`: the ToNNX, the
            path below it, the Linen module, its method's name, the method bound to it.
        foreign: `(owner, module)`: called for a Linen module that is not part of the ToNNX.
        key: a part of the cache key of programs compiled inside, in addition to Linen's own.
    """

    call: Function
    foreign: Callable[[nnx.Module, linen.Module], None]
    key: Hashable


@dataclasses.dataclass
class _Frame:
    """A call of a Linen module that is under way."""

    module: linen.Module
    method: str
    function: object
    below: Path
    made: nnx.Module | None = None


class _ToNNXCall:
    """One call of a ToNNX, and the calls of Linen modules that are under way in it."""

    def __init__(self, owner: nnx.bridge.ToNNX, listener: Listener):
        self.owner = owner
        self.listener = listener
        self.applies = flax_graphs.linen_depth() + 1
        self.frames: list[_Frame] = []
        self.ignores = False

    def call(self, next_fun: Function, args: Args, kwargs: Kwargs, context: Value) -> PyTree:
        module, name, function = context.module, context.method_name, context.orig_method.func
        if self.ignores or module.scope is None:
            return next_fun(*args, **kwargs)
        if not self._contains(module):
            if name != "setup" and not flax_graphs.is_linen_dry_run(module):
                self.listener.foreign(self.owner, module)
            self.ignores = True
            try:
                return next_fun(*args, **kwargs)
            finally:
                self.ignores = False
        inner = self.frames[-1] if self.frames else None
        if not _is_public_method(module, name, function) or (
            inner is not None
            and inner.module is module
            and inner.method == name
            and inner.function is not function  # super().name(...): the same call of the same site
        ):
            return next_fun(*args, **kwargs)
        frame = _Frame(module, name, function, _path_of(module))
        self.frames.append(frame)
        try:
            if inner is None and name == CALL and not frame.below:
                return next_fun(*args, **kwargs)  # the ToNNX's own call
            call = self.listener.call
            return call(self.owner, frame.below, module, name, next_fun, args, kwargs)
        finally:
            self.frames.pop()

    def _contains(self, module: linen.Module) -> bool:
        """Whether a Linen module is part of the ToNNX, and this call of it is not a dry run."""
        if flax_graphs.linen_depth() != self.applies or flax_graphs.is_linen_dry_run(module):
            return False
        root = module
        while isinstance(root.parent, linen.Module):
            root = root.parent
        # a lifted module is a root with a path; at path () its class is the one that was lifted
        return bool(root.path) or isinstance(self.owner.to_nnx__module, type(root))


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.inside: _ToNNXCall | None = None


_thread = _ThreadState()


@contextlib.contextmanager
def listen(owner: nnx.bridge.ToNNX, listener: Listener) -> Iterator[None]:
    """Report every call of a public method of a Linen module inside `owner` to the listener.

    The context spans one call of `owner`.
    """
    outer, _thread.inside = _thread.inside, _ToNNXCall(owner, listener)
    try:
        if outer is not None:  # the interceptor is installed and uses the innermost listener
            yield
            return
        with flax_graphs.outermost_linen_interceptor(_intercept):
            yield
    finally:
        _thread.inside = outer


def _intercept(next_fun: Function, args: Args, kwargs: Kwargs, context: object) -> PyTree:
    inside = _thread.inside
    if inside is None:
        return next_fun(*args, **kwargs)
    return inside.call(next_fun, args, kwargs, context)


def _is_public_method(module: linen.Module, name: str, function: Function) -> bool:
    # a lifted function (the body of an nn.scan) runs as a method of the module it is given
    if name == "setup" or (name != CALL and name.startswith("_")):
        return False
    own = (vars(cls)[name] for cls in type(module).__mro__ if name in vars(cls))
    return any(inspect.unwrap(method) is inspect.unwrap(function) for method in own)


def _path_of(module: linen.Module) -> Path:
    path: Path = tuple(module.path)
    if isinstance(module.parent, linen.Module) and module.name and path[-1:] != (module.name,):
        return (*path, module.name)  # nn.share_scope gave it its parent's path
    return path


def made_by_to_linen(module: nnx.Module) -> tuple[nnx.Module, Path] | None:
    """The ToNNX of the ToLinen whose call has just made `module`, and the ToLinen's path below it.

    None if no ToLinen made the module, or on a second call for the same module.
    """
    inside = _thread.inside
    frame = inside.frames[-1] if inside is not None and inside.frames else None
    if inside is None or frame is None or frame.made is not None:
        return None
    if inside.ignores or not isinstance(frame.module, nnx.bridge.ToLinen):
        return None
    made = frame.module.nnx_class
    if isinstance(made, type) and not isinstance(module, made):
        return None
    frame.made = module
    return inside.owner, frame.below


def program_key(module: linen.Module) -> Hashable:
    """A key that separates a program of `nn.jit` inside a ToNNX from that of an equal module.

    Linen compiles two modules with equal fields once, although their calls have different paths.
    """
    inside = _thread.inside
    if inside is None or module.scope is None:
        return None
    return inside.listener.key, _path_of(module)


def parameter_arrays(module: linen.Module) -> Iterator[Value]:
    """The parameters of a bound Linen module, sorted by name; in a lifted loop, one layer's."""
    held: PyTree = {} if module.scope is None else module.variables.get("params", {})
    return filter(is_array, jax.tree.leaves(held))
