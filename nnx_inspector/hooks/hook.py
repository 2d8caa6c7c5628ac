"""The hooks around calls that are open in this thread, and their part in jit cache keys.

Invariant: a function that was jitted before honours the open hooks, because a key for them is
part of every jit cache key; equal hooks share one key. Does not run a hook.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nnx_inspector._compat.configuration import hooks_key, replace_hooks_key
from nnx_inspector._compat.launching import started
from nnx_inspector.hooks.inside.names import FunctionsNamed
from nnx_inspector.hooks.scope import Scope
from nnx_inspector.hooks.sites import CALL, Selection
from nnx_inspector.opening import Opening, held

TAP_OUTPUT, PERTURBATION, INTERCEPTOR, TAP_INPUT = range(4)
"""Where a hook sits around a call: smaller numbers are further out."""

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
            `"operation"` for an operation within a call. Internal hooks also see `"sow"` and
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
class Hook:
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
    """The hooks of one thread.

    Attributes:
        hooks: those that are open.
        replaced: those before `change_hooks`, and what to call once they are open again.
        closed: those that another thread has closed since this one last looked.
    """

    def __init__(self) -> None:
        self.hooks: tuple[Hook, ...] = ()
        self.replaced: tuple[tuple[Hook, ...], Callable[[], None]] | None = None
        self.closed: tuple[Hook, ...] = ()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.here = _Here()


_thread = _Thread()
_behind: weakref.WeakSet[_Here] = weakref.WeakSet()
"""The threads some of whose hooks another thread has closed."""


def see_operations(hooks: Sequence[Hook]) -> bool:
    return any(hook.only is not None and hook.only.inside for hook in hooks)


def open_hooks() -> tuple[Hook, ...]:
    """The hooks that are open in this thread, in the order of opening."""
    here = _thread.here
    if here.closed:
        settle_hooks()
    return here.hooks


def settle_hooks() -> None:
    """Let this thread go on without the hooks that another thread has closed."""
    here = _thread.here
    closed = here.closed
    if closed:
        _close(here, closed)
        here.closed = tuple(one for one in here.closed if not _is_among(one, closed))
        if not here.closed:
            _behind.discard(here)


def any_thread_is_behind() -> bool:
    """Whether another thread has closed hooks of a thread that has not settled that yet."""
    return bool(_behind)


started.closed_elsewhere.append(settle_hooks)


@contextlib.contextmanager
def without(unwanted: Callable[[Hook], bool]) -> Iterator[None]:
    """Close some of the open hooks for a while, for a pass of this package."""
    with opened(tuple(hook for hook in open_hooks() if not unwanted(hook))):
        yield


def unwatched() -> contextlib.AbstractContextManager[None]:
    """Hide the calls inside from watched loops, which neither see nor perturb them."""
    return without(lambda hook: hook.watches)


class Added:
    """Opens these hooks too. Of several each closes its own, in whatever order: the steps of two
    loops may overlap. Another thread may close them: the thread in which they are open lets them go
    when it next starts a program or calls a module, or jax traces one.
    """

    def __init__(self, hooks: tuple[Hook, ...]):
        self._hooks = hooks
        self._here: _Here | None = None
        self._named = FunctionsNamed() if see_operations(hooks) else None

    def open(self) -> None:
        restore_hooks()
        self._here = _thread.here
        if self._named is not None:
            self._named.open()
        _set((*open_hooks(), *self._hooks))

    def close(self) -> None:
        here = self._here
        if here is None:
            return
        if here is _thread.here:
            _close(here, self._hooks)
        elif any(_is_among(one, self._hooks) for one in _all_of(here)):
            for hooks in (here.hooks, here.replaced[0] if here.replaced else ()):
                _retire(hooks)
            here.closed = (*here.closed, *self._hooks)
            _behind.add(here)
        if self._named is not None:
            self._named.close()


def _close(here: _Here, hooks: tuple[Hook, ...]) -> None:
    restore_hooks()
    _set(tuple(one for one in here.hooks if not _is_among(one, hooks)))


def _all_of(here: _Here) -> tuple[Hook, ...]:
    return here.hooks if here.replaced is None else here.replaced[0]


def _is_among(one: Hook, hooks: tuple[Hook, ...]) -> bool:
    return any(one is other for other in hooks)


class _Opened:
    def __init__(self, hooks: tuple[Hook, ...]):
        self._hooks = hooks
        self._outer: tuple[Hook, ...] | None = None
        self._key: object = None
        self._named: Opening | None = None

    def open(self) -> None:
        here, hooks = _thread.here, self._hooks
        if here.replaced is not None:
            before = dict(zip(here.hooks, here.replaced[0], strict=True))
            hooks = tuple(before.get(hook, hook) for hook in hooks)
            restore_hooks()
        self._outer, self._key = open_hooks(), hooks_key.value
        if see_operations(hooks):
            self._named = FunctionsNamed()
            self._named.open()
        _set(hooks)

    def close(self) -> None:
        if self._outer is not None:
            restore_hooks()
            replace_hooks_key(self._key)  # within `internal_config()` it is not that of the hooks
            _thread.here.hooks = self._outer
            self._outer = None
        if self._named is not None:
            self._named.close()


@contextlib.contextmanager
def opened(hooks: tuple[Hook, ...]) -> Iterator[None]:
    """Make these the open hooks, in place of those open before: within a call, or a thread."""
    with held(_Opened(hooks)):
        yield


def change_hooks(change: Callable[[Hook], Hook], restored: Callable[[], None]) -> None:
    """Change the hooks that are open in this thread, until others are opened or these are closed.

    Args:
        change: returns the hook in place of one that is open.
        restored: called when the hooks are again those before.
    """
    restore_hooks()
    here, before = _thread.here, open_hooks()
    here.replaced = before, restored
    _set(tuple(map(change, before)))


def restore_hooks() -> None:
    """Undo `change_hooks` in this thread."""
    here = _thread.here
    if here.replaced is not None:
        hooks, restored = here.replaced
        _set(hooks)
        restored()
        here.replaced = None


def _set(hooks: tuple[Hook, ...]) -> None:
    replace_hooks_key(_key_of(hooks))
    _thread.here.hooks = hooks


class _Key:
    """Stands for hooks in jit cache keys: equal hooks, which act alike, share it while a cache
    holds it.
    """


_keys: weakref.WeakValueDictionary[tuple[Hook, ...], _Key] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _key_of(hooks: tuple[Hook, ...]) -> _Key | None:
    if not hooks:
        return None
    with _lock:
        key = _keys.get(hooks)
        if key is None:
            key = _keys[hooks] = _Key()
        return key


def _retire(hooks: tuple[Hook, ...]) -> None:
    """Give equal hooks another key from now on: what a thread compiles under this one, after
    another thread has closed its hooks, is the user's own program.
    """
    with _lock:
        _keys.pop(hooks, None)
