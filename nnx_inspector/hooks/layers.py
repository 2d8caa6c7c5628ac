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

from nnx_inspector._compat import started
from nnx_inspector._compat.configuration import hooks, replace_hooks
from nnx_inspector.hooks.inside.names import FunctionsNamed
from nnx_inspector.hooks.scope import Scope
from nnx_inspector.hooks.sites import CALL, Selection
from nnx_inspector.opening import Opening, held

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


class _Here:
    """The layers of one thread.

    Attributes:
        layers: those that are open.
        replaced: those before `replace_layers`, and what to call once they are open again.
        closed: those that another thread has closed since this one last looked.
    """

    def __init__(self) -> None:
        self.layers: tuple[Layer, ...] = ()
        self.replaced: tuple[tuple[Layer, ...], Callable[[], None]] | None = None
        self.closed: tuple[Layer, ...] = ()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.here = _Here()


_thread = _Thread()
_behind: weakref.WeakSet[_Here] = weakref.WeakSet()
"""The threads some of whose layers another thread has closed."""


def see_operations(layers: Sequence[Layer]) -> bool:
    return any(layer.only is not None and layer.only.inside for layer in layers)


def open_layers() -> tuple[Layer, ...]:
    """The layers that are open in this thread, in the order of opening."""
    here = _thread.here
    if here.closed:
        settle_layers()
    return here.layers


def settle_layers() -> None:
    """Let this thread go on without the layers that another thread has closed."""
    here = _thread.here
    closed = here.closed
    if closed:
        _close(here, closed)
        here.closed = tuple(one for one in here.closed if not _is_among(one, closed))
        if not here.closed:
            _behind.discard(here)


def any_thread_is_behind() -> bool:
    """Whether another thread has closed layers of a thread that has not settled that yet."""
    return bool(_behind)


started.closed_elsewhere.append(settle_layers)


@contextlib.contextmanager
def without(unwanted: Callable[[Layer], bool]) -> Iterator[None]:
    """Close some of the open layers for a while, for a pass of this package."""
    with opened(tuple(layer for layer in open_layers() if not unwanted(layer))):
        yield


def unwatched() -> contextlib.AbstractContextManager[None]:
    """Hide the calls inside from watched loops, which neither see nor perturb them."""
    return without(lambda layer: layer.watches)


class Added:
    """Opens these layers too. Of several each closes its own, in whatever order: the steps of two
    loops may overlap. Another thread may close them: the thread in which they are open lets them go
    when it next starts a program or calls a module, or jax traces one.
    """

    def __init__(self, layers: tuple[Layer, ...]):
        self._layers = layers
        self._here: _Here | None = None
        self._named = FunctionsNamed() if see_operations(layers) else None

    def open(self) -> None:
        restore_layers()
        self._here = _thread.here
        if self._named is not None:
            self._named.open()
        _set((*open_layers(), *self._layers))

    def close(self) -> None:
        here = self._here
        if here is None:
            return
        if here is _thread.here:
            _close(here, self._layers)
        elif any(_is_among(one, self._layers) for one in _all_of(here)):
            for layers in (here.layers, here.replaced[0] if here.replaced else ()):
                _retire(layers)
            here.closed = (*here.closed, *self._layers)
            _behind.add(here)
        if self._named is not None:
            self._named.close()


def _close(here: _Here, layers: tuple[Layer, ...]) -> None:
    restore_layers()
    _set(tuple(one for one in here.layers if not _is_among(one, layers)))


def _all_of(here: _Here) -> tuple[Layer, ...]:
    return here.layers if here.replaced is None else here.replaced[0]


def _is_among(one: Layer, layers: tuple[Layer, ...]) -> bool:
    return any(one is other for other in layers)


class _Opened:
    def __init__(self, layers: tuple[Layer, ...]):
        self._layers = layers
        self._outer: tuple[Layer, ...] | None = None
        self._key: Any = None
        self._named: Opening | None = None

    def open(self) -> None:
        here, layers = _thread.here, self._layers
        if here.replaced is not None:
            before = dict(zip(here.layers, here.replaced[0], strict=True))
            layers = tuple(before.get(layer, layer) for layer in layers)
            restore_layers()
        self._outer, self._key = open_layers(), hooks.value
        if see_operations(layers):
            self._named = FunctionsNamed()
            self._named.open()
        _set(layers)

    def close(self) -> None:
        if self._outer is not None:
            restore_layers()
            replace_hooks(self._key)  # within `ours()` it is not that of the layers
            _thread.here.layers = self._outer
            self._outer = None
        if self._named is not None:
            self._named.close()


@contextlib.contextmanager
def opened(layers: tuple[Layer, ...]) -> Iterator[None]:
    """Make these the open layers, in place of those open before: within a call, or a thread."""
    with held(_Opened(layers)):
        yield


def replace_layers(change: Callable[[Layer], Layer], restored: Callable[[], None]) -> None:
    """Change the layers that are open in this thread, until others are opened or these are closed.

    Args:
        change: returns the layer in place of one that is open.
        restored: called when the layers are again those before.
    """
    restore_layers()
    here, before = _thread.here, open_layers()
    here.replaced = before, restored
    _set(tuple(map(change, before)))


def restore_layers() -> None:
    """Undo `replace_layers` in this thread."""
    here = _thread.here
    if here.replaced is not None:
        layers, restored = here.replaced
        _set(layers)
        restored()
        here.replaced = None


def _set(layers: tuple[Layer, ...]) -> None:
    replace_hooks(_key_of(layers))
    _thread.here.layers = layers


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


def _retire(layers: tuple[Layer, ...]) -> None:
    """Give equal layers another key from now on: what a thread compiles under this one, after
    another thread has closed its layers, is the user's own program.
    """
    with _lock:
        _keys.pop(layers, None)
