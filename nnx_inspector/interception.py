"""The only file that touches a class: wraps methods, finds a call's path, composes what is hooked.

While at least one hooked region is open, every public method of every `nnx.Module` class goes
through `_dispatch`. What is active lives in a `jax.make_user_context` value: thread-local, and
part of every jit cache key, so functions that were jitted before honour it and drop it on exit.
Inside transforms NNX rebuilds modules; a tag in the graphdef says which module a copy stands for.
Invariant: on exit, also after an exception, classes, objects and graphdefs are as before. Does
not know what a layer does with a call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
from flax import nnx

from nnx_inspector import _private
from nnx_inspector.sites import (
    CALL,
    Only,
    Path,
    Selection,
    methods,
    nothing_selected,
    require_module,
    site_key,
    site_keys,
)

TAP_OUTPUT, PERTURBATION, INTERCEPTOR, TAP_INPUT = range(4)
"""Where a layer sits around a call: the smaller is the further out."""

_layers = jax.make_user_context(default_value=())


@dataclasses.dataclass(frozen=True)
class Context:
    """What an interceptor is told about a call, as Linen's `InterceptorContext`.

    Attributes:
        module: the module that is called (inside a transform: NNX's copy of it).
        method_name: `"__call__"` or another public method.
        orig_method: the bound method itself; calling it bypasses the remaining interceptors.
        path: the module's path, `"blocks/0/attn"`; `None` where it cannot be known.
        call: how often this site was called before within the outermost call, 0 for the first.
            Under jit that is counted while tracing.
    """

    module: nnx.Module
    method_name: str
    orig_method: Callable[..., Any]
    path: str | None
    call: int

    @property
    def site(self) -> str | None:
        """The site's key: the path, and the method unless it is `__call__`."""
        if self.path is None or self.method_name == CALL:
            return self.path
        return f"{self.path}:{self.method_name}"


Interceptor = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], Context], Any]


class Scope:
    """One model whose modules' paths are known: the objects themselves and the transforms' copies.

    Two scopes over the same object are equal, so that entering the same hooks again is a jit
    cache hit.
    """

    def __init__(self, roots: dict[Path, nnx.Module], token: Any):
        self.token = token  # no model is kept: jit caches hold scopes as long as they live
        self._paths: dict[int, tuple[weakref.ref[Any], Path]] = {}
        self._copies: dict[int, tuple[weakref.ref[Any], Path]] = {}
        self._flattened: dict[Path, Any] = {}
        self._arrived: dict[Path, tuple[Any, weakref.ref[Any]]] = {}
        self.types: set[type] = set()
        self.unattributed: dict[str, int] = {}
        for prefix, root in roots.items():
            for path, module in nnx.iter_modules(root):
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

    def note_unattributed(self, module: Any) -> None:
        """Count a call of a module that looks like one of ours and is none."""
        if type(module) in self.types and self.path_of(module) is None:
            name = type(module).__name__
            self.unattributed[name] = self.unattributed.get(name, 0) + 1

    def leaves_in_graphdef(self, module: Any) -> Path | None:
        """The path to put into a graphdef; notes at which trace it was put there."""
        path = self.path_of(module)
        if path is not None:
            self._flattened[path] = _private.trace_state()
        return path

    def arrives_from_graphdef(self, module: Any, path: Path) -> None:
        """A module was filled from a graphdef that carries `path`.

        Within the trace in which it was split it is a clone of the user's own, a second model;
        in another trace it is a transform's stand-in for the same module. A transform makes one
        stand-in a trace: a second is the user's own merge, which may be of another model's state.
        """
        trace = _private.trace_state()
        if self.path_of(module) is not None or self._flattened.get(path) == trace:
            return
        earlier = self._arrived.get(path)
        if earlier is not None and earlier[0] == trace and earlier[1]() is not None:
            return
        self._arrived[path] = (trace, weakref.ref(module))
        self._copies[id(module)] = (weakref.ref(module), path)


_OUTERMOST = "outermost"


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one open context adds to the calls it selects.

    Attributes:
        wrap: `(next_fun, args, kwargs, context) -> output`. Equal `wrap`s must act alike: they
            share compiled programs.
        rank: where it sits around a call.
        only: which sites; None for all that `wrap` is asked about.
        scope: the model that paths are relative to; None for the outermost module called.
    """

    wrap: Interceptor
    rank: int = INTERCEPTOR
    only: Selection | None = None
    scope: Scope | None = None
    matched: set[str] = dataclasses.field(default_factory=lambda: set[str](), compare=False)


@dataclasses.dataclass
class _Frame:
    module: nnx.Module
    method: str


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.outermost: Scope | None = None
        self.calls: dict[tuple[int, Any, str], int] = {}


_thread = _Thread()


@contextlib.contextmanager
def hooked(*layers: Layer) -> Iterator[None]:
    """Open layers around every module call of this thread, inside those already open."""
    if not layers:
        yield
        return
    with installed(), _layers((*_layers.value, *layers)):
        yield


def open_layers() -> int:
    """How many layers are open in this thread."""
    return len(_layers.value)


# ----------------------------------------------------------------- classes

_lock = threading.RLock()
_open_regions = 0
_wrapped: set[type] = set()
_undo: list[Callable[[], None]] = []
_originals: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Keep the wrappers on the classes; regions opened inside need not put them there again.

    Without a region open they call straight through.
    """
    global _open_regions
    with _lock:
        _open_regions += 1
        _private.TaggedNodes.strict = True
        try:
            for cls in _module_classes():
                if cls not in _wrapped:  # another thread's region may be open: classes made since
                    _wrap_class(cls)
        except BaseException:
            _open_regions -= 1
            if _open_regions == 0:
                _unwrap_classes()
            raise
    try:
        yield
    finally:
        with _lock:
            _open_regions -= 1
            if _open_regions == 0:
                _unwrap_classes()


def _module_classes() -> list[type]:
    found: dict[type, None] = {}
    stack: list[type] = [nnx.Module]
    while stack:
        cls = stack.pop()
        for sub in type.__subclasses__(cls):
            if sub not in found:
                found[sub] = None
                stack.append(sub)
    return list(found)


def _wrap_class(cls: type) -> None:
    _wrapped.add(cls)
    for name, raw in methods(cls).items():
        while isinstance(raw, types.FunctionType) and raw in _originals:
            raw = _originals[raw]  # a base class was wrapped before this one
        own = name in vars(cls)
        previous = vars(cls).get(name)
        wrapper = _wrapper(cls, name, raw)
        type.__setattr__(cls, name, wrapper)  # a sealed metaclass may refuse setattr
        _undo.append(functools.partial(_restore, cls, name, wrapper, own, previous))
    _undo.append(_private.swap_graph_node(cls, _tag_of, _arrived))


def _restore(cls: type, name: str, wrapper: Any, own: bool, previous: Any) -> None:
    if vars(cls).get(name) is not wrapper:
        return  # somebody patched over it since: theirs stays
    if own:
        type.__setattr__(cls, name, previous)
    else:
        type.__delattr__(cls, name)


def _unwrap_classes() -> None:
    _private.TaggedNodes.strict = False
    global _wrapped
    while _undo:
        _undo.pop()()
    _wrapped.clear()
    _wrapped = set()


def _wrapper(cls: type, name: str, raw: Any) -> Any:
    installed = _wrapped  # emptied on release: a wrapper that somebody kept does nothing then

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        layers = _layers.value
        if not layers or cls not in installed:
            return raw.__get__(self, type(self))(*args, **kwargs)
        return _dispatch(cls, name, raw, layers, self, args, kwargs)

    functools.update_wrapper(call, raw, updated=())
    _originals[call] = raw
    return call


# ------------------------------------------------------------------- calls


def _dispatch(
    cls: type,
    name: str,
    raw: Any,
    layers: tuple[Layer, ...],
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    original = raw.__get__(module, type(module))
    frames = _thread.frames
    if cls is not type(module) and name in vars(type(module)) and _is_within(name, module):
        return original(*args, **kwargs)  # super().name(...): one call of one site

    outermost = not frames
    if outermost:
        needs_scope = any(layer.scope is None for layer in layers)
        _thread.outermost = Scope({(): module}, _OUTERMOST) if needs_scope else None
        _thread.calls = {}
    frames.append(_Frame(module, name))
    try:
        for scope in _scopes():
            scope.note_unattributed(module)
        chain = original
        for number in _outermost_last(layers):
            chain = _around(number, layers[number], chain, module, name, original)
        return chain(*args, **kwargs)
    finally:
        frames.pop()
        if outermost:
            _thread.outermost = None
            _thread.calls = {}


def _is_within(name: str, module: Any) -> bool:
    """Whether the innermost call is of this method of this module, or of what it stands in for."""
    if not _thread.frames or _thread.frames[-1].method != name:
        return False
    outer = _thread.frames[-1].module
    if outer is module:
        return True
    paths = [(scope.path_of(outer), scope.path_of(module)) for scope in _scopes()]
    return any(a is not None and a == b for a, b in paths)


def _outermost_last(layers: tuple[Layer, ...]) -> list[int]:
    # by rank, and among equals the context entered first is outermost
    return sorted(reversed(range(len(layers))), key=lambda number: -layers[number].rank)


def _around(
    number: int,
    layer: Layer,
    inner: Callable[..., Any],
    module: Any,
    name: str,
    original: Callable[..., Any],
) -> Callable[..., Any]:
    scope = layer.scope if layer.scope is not None else _thread.outermost
    path = scope.path_of(module) if scope is not None else None
    if layer.scope is not None and path is None:
        return inner
    if layer.only is not None and not layer.only.matches(path, name, module):
        return inner
    layer.matched.add(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        counter = (number, path if path is not None else id(module), name)
        before = _thread.calls.get(counter, 0)
        _thread.calls[counter] = before + 1
        key = None if path is None else site_key(path)
        context = Context(module, name, original, key, before)
        return layer.wrap(inner, args, kwargs, context)

    return call


# ---------------------------------------------------------- copies of modules


def _scopes() -> Iterator[Scope]:
    seen: set[int] = set()
    for layer in _layers.value:
        if layer.scope is not None and id(layer.scope) not in seen:
            seen.add(id(layer.scope))
            yield layer.scope
    if _thread.outermost is not None:
        yield _thread.outermost


def _tag_of(module: Any) -> Any:
    if not _layers.value:
        return None
    tag = {}
    for scope in _scopes():
        path = scope.leaves_in_graphdef(module)
        if path is not None:
            tag[scope.token] = path
    return tuple(tag.items()) or None


def _arrived(module: Any, tag: Any) -> None:
    paths = dict(tag)
    for scope in _scopes():
        if scope.token in paths:
            scope.arrives_from_graphdef(module, paths[scope.token])


# ------------------------------------------------------------------ public


def scope_of(model: nnx.Module, what: str = "model") -> Scope:
    """The scope of one model (or submodule: that instance only)."""
    return Scope({(): require_module(model, what)}, id(model))


@contextlib.contextmanager
def intercept_methods(
    interceptor: Interceptor, *, only: Only = None, model: nnx.Module | None = None
) -> Iterator[None]:
    """Run `interceptor` around every call of a public module method, as Linen's
    `nn.intercept_methods` does.

    `interceptor(next_fun, args, kwargs, context)` returns what the call returns;
    `next_fun(*args, **kwargs)` goes on inward. It may change the arguments or the result, skip
    the call, or call it twice. Of nested contexts the one entered first is outermost. Functions
    that were jitted before are traced once more inside the context and go back to their old
    program outside it; under jit the interceptor's Python runs once a trace. Holds for this
    thread.

    Args:
        interceptor: see above; `context` is a `Context`.
        only: a glob over site keys (`"blocks/*/attn"`, `"**:encode"`), a module type, a predicate
            `(path, module) -> bool`, or a sequence of these. Without it: every public method that
            is not `nnx.Module`'s own.
        model: paths are relative to it, and only calls of its modules are intercepted; without
            it they are relative to the outermost module that is called.

    Raises:
        TypeError: `interceptor` is not callable, or `model` is not an `nnx.Module`.
        ValueError: `only` matches no site (of `model`, else of what was called inside).

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import nnx_inspector as nni
        >>> model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.relu)
        >>> def double(next_fun, args, kwargs, context):
        ...     return 2 * next_fun(*args, **kwargs)
        >>> with nni.intercept_methods(double, only="layers/0"):
        ...     y = model(jnp.ones((1, 2)))
    """
    if not callable(interceptor):
        raise TypeError(
            f"interceptor must be callable as (next_fun, args, kwargs, context), "
            f"got {type(interceptor).__name__}."
        )
    scope = None if model is None else scope_of(model)
    selection = None if only is None else Selection(only, default_methods="*")
    if selection is not None and model is not None:
        selection.require_match(model)
    wrap = interceptor if _is_hashable(interceptor) else _Unhashable(interceptor)
    layer = Layer(wrap, INTERCEPTOR, selection, scope)
    with open_layer(layer):
        yield


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


class _Unhashable:
    """An interceptor without a hash, which is itself and equal to nothing else."""

    def __init__(self, interceptor: Interceptor):
        self.interceptor = interceptor

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        return self.interceptor(next_fun, args, kwargs, context)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unhashable) and self.interceptor is other.interceptor

    def __hash__(self) -> int:
        return id(self.interceptor)


@contextlib.contextmanager
def open_layer(layer: Layer) -> Iterator[None]:
    """Open one layer; where its paths are relative to what is called, check on leaving that its
    selection matched something.
    """
    called: list[_Called] = []
    if layer.only is None or layer.scope is not None:
        with hooked(layer):
            yield
        return
    with hooked(Layer(_Remember(layer.only, called), TAP_OUTPUT), layer):
        yield
    if layer.matched:
        _matched.add(hash(layer))  # later its calls may sit in cached programs, unseen from here
    elif called and not any(one.matches for one in called) and hash(layer) not in _matched:
        raise ValueError(nothing_selected(layer.only, called[0].keys))


_matched: set[int] = set()
"""Hashes of layers that matched something once; an equal layer never is a misspelled one."""


@dataclasses.dataclass(frozen=True)
class _Called:
    """A model that was called: its sites, and whether the selection names one of them."""

    keys: list[str]
    matches: bool


@dataclasses.dataclass(frozen=True)
class _Remember:
    """Keeps the sites of the first model that is called, for the text of an error.

    What is selected may sit in a jitted function that is cached, where no call is seen: the
    selection is held against the model itself too.
    """

    only: Selection
    called: list[_Called] = dataclasses.field(compare=False)

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Context) -> Any:
        if context.path == "" and not self.called:
            module = context.module
            self.called.append(_Called(site_keys(module), self.only.matches_any(module)))
        return next_fun(*args, **kwargs)
