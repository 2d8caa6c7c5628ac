"""The layers around calls that are open in this thread, and their part in jit cache keys.

Invariant: a function that was jitted before honours the open layers, because a key for them is
part of every jit cache key; equal layers share one key. Does not run a layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nnx_inspector._compat.configuration import hooks, replace_hooks
from nnx_inspector.hooks.inside.names import functions_named
from nnx_inspector.hooks.scope import Scope
from nnx_inspector.hooks.sites import CALL, Selection

TAP_OUTPUT, PERTURBATION, INTERCEPTOR, TAP_INPUT = range(4)
"""Where a layer sits around a call: smaller numbers are further out."""

EVERY = (TAP_OUTPUT, PERTURBATION, INTERCEPTOR, TAP_INPUT)


@dataclasses.dataclass(frozen=True)
class Context:
    """What an interceptor knows about a call, like Linen's `InterceptorContext`.

    Attributes:
        module: the module that is called; inside a transform, NNX's copy of it.
        method_name: `"__call__"` or another public method.
        orig_method: the bound method itself; calling it bypasses the remaining interceptors.
        path: the module's path, `"blocks/0/attn"`, or None if it cannot be known.
        call: the number of earlier calls of this site within the outermost call. Under jit calls
            are counted while tracing.
        kind: `"method"`; `"linen"` for a method of a Linen module inside `nnx.bridge.ToNNX`;
            `"operation"` for an operation within a call. Internal layers also see `"sow"` and
            `"perturb"`, for a value that the user's module passes to NNX, under its Variable's
            path.
        type_name: the class name of the module, or the type name of the sown Variable.
    """

    module: Any
    method_name: str
    orig_method: Callable[..., Any]
    path: str | None
    call: int
    kind: str = "method"
    type_name: str = ""

    @property
    def site(self) -> str | None:
        """The site's key: the path, and the method unless it is `__call__`."""
        if self.path is None or self.method_name == CALL:
            return self.path
        return self.path + ":" * (self.method_name[0] != "@") + self.method_name


Interceptor = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], Context], Any]


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one open context adds to the calls that it selects.

    Attributes:
        wrap: `(next_fun, args, kwargs, context) -> output`. Equal `wrap`s must act alike, because
            they share compiled programs.
        rank: where it sits around a call.
        only: the selected sites; None for all.
        scope: the model that paths are relative to; None for the outermost module called.
        unattributed: called with the type of a module that only looks like one of the scope's.
        watches: whether it watches the user's own loop, which excludes this package's passes.
    """

    wrap: Interceptor
    rank: int = INTERCEPTOR
    only: Selection | None = None
    scope: Scope | None = None
    unattributed: Callable[[str], None] | None = None
    watches: bool = False
    matched: set[str] = dataclasses.field(default_factory=lambda: set[str](), compare=False)


class _Thread(threading.local):
    layers: tuple[Layer, ...] = ()
    replaced: tuple[Layer, ...] | None = None  # those that `replace_layers` has replaced
    restored: Callable[[], None]


_thread = _Thread()


def see_operations(layers: Sequence[Layer]) -> bool:
    return any(layer.only is not None and layer.only.inside for layer in layers)


def open_layers() -> tuple[Layer, ...]:
    """The layers that are open in this thread, in the order of opening."""
    return _thread.layers


@contextlib.contextmanager
def without(unwanted: Callable[[Layer], bool]) -> Iterator[None]:
    """Close some of the open layers for a while, for a pass of this package."""
    with opened(tuple(layer for layer in _thread.layers if not unwanted(layer))):
        yield


def unwatched() -> contextlib.AbstractContextManager[None]:
    """Hide the calls inside from watched loops, which neither see nor perturb them."""
    return without(lambda layer: layer.watches)


@contextlib.contextmanager
def added(layers: tuple[Layer, ...]) -> Iterator[None]:
    """Open these layers too. Of several such contexts each closes its own, in whatever order they
    are left: the steps of two loops may overlap.
    """
    restore_layers()
    with functions_named() if see_operations(layers) else contextlib.nullcontext():
        _set((*_thread.layers, *layers))
        try:
            yield
        finally:
            restore_layers()
            _set(tuple(one for one in _thread.layers if not any(one is own for own in layers)))


@contextlib.contextmanager
def opened(layers: tuple[Layer, ...]) -> Iterator[None]:
    """Make these the open layers, in place of those open before: within a call, or a thread."""
    if _thread.replaced is not None:
        before = dict(zip(_thread.layers, _thread.replaced, strict=True))
        layers = tuple(before.get(layer, layer) for layer in layers)
        restore_layers()
    outer = _thread.layers
    named = functions_named() if see_operations(layers) else contextlib.nullcontext()
    with hooks(_key_of(layers)), named:
        _thread.layers = layers
        try:
            yield
        finally:
            restore_layers()
            _thread.layers = outer


def replace_layers(change: Callable[[Layer], Layer], restored: Callable[[], None]) -> None:
    """Change the layers that are open in this thread, until others are opened or these are closed.

    Args:
        change: returns the layer in place of one that is open.
        restored: called when the layers are again those before.
    """
    restore_layers()
    before = _thread.layers
    _set(tuple(map(change, before)))
    _thread.replaced, _thread.restored = before, restored


def restore_layers() -> None:
    """Undo `replace_layers` in this thread."""
    if _thread.replaced is not None:
        _set(_thread.replaced)
        _thread.replaced = None
        _thread.restored()


def _set(layers: tuple[Layer, ...]) -> None:
    replace_hooks(_key_of(layers))
    _thread.layers = layers


class _Key:
    """Stands for layers in jit cache keys: equal layers, which act alike, share it while a cache
    holds it.
    """


_keys: weakref.WeakValueDictionary[tuple[Layer, ...], _Key] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _key_of(layers: tuple[Layer, ...]) -> _Key | None:
    if not layers:
        return None
    with _lock:
        key = _keys.get(layers)
        if key is None:
            key = _keys[layers] = _Key()
        return key
