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
from nnx_inspector._compat.launching import programs
from nnx_inspector.hooks.operations.names import FunctionNaming
from nnx_inspector.hooks.scope import Scope
from nnx_inspector.hooks.sites import CALL, Selection
from nnx_inspector.resources import Resource, open_all

TAP_OUTPUT, PERTURBATION, INTERCEPTOR, TAP_INPUT = range(4)
"""Where a hook sits around a call: smaller numbers are further out."""

ALL_RANKS = (TAP_OUTPUT, PERTURBATION, INTERCEPTOR, TAP_INPUT)


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


class _ThreadHooks:
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


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.current = _ThreadHooks()


_thread = _ThreadState()
_unsettled: weakref.WeakSet[_ThreadHooks] = weakref.WeakSet()
"""The threads some of whose hooks another thread has closed."""


def see_operations(hooks: Sequence[Hook]) -> bool:
    return any(hook.only is not None and hook.only.inside for hook in hooks)


def open_hooks() -> tuple[Hook, ...]:
    """The hooks that are open in this thread, in the order of opening."""
    current = _thread.current
    if current.closed:
        drop_closed_hooks()
    return current.hooks


def drop_closed_hooks() -> None:
    """Let this thread go on without the hooks that another thread has closed."""
    current = _thread.current
    closed = current.closed
    if closed:
        _remove_hooks(current, closed)
        current.closed = tuple(one for one in current.closed if not _contains(one, closed))
        if not current.closed:
            _unsettled.discard(current)


def any_closed_elsewhere() -> bool:
    """Whether another thread has closed hooks of a thread that has not settled that yet."""
    return bool(_unsettled)


programs.on_foreign_close.append(drop_closed_hooks)


@contextlib.contextmanager
def without_hooks(unwanted: Callable[[Hook], bool]) -> Iterator[None]:
    """Close some of the open hooks for a while, for a pass of this package."""
    with replace_hooks(tuple(hook for hook in open_hooks() if not unwanted(hook))):
        yield


def without_watching() -> contextlib.AbstractContextManager[None]:
    """Hide the calls inside from watched loops, which neither see nor perturb them."""
    return without_hooks(lambda hook: hook.watches)


class AddedHooks:
    """Opens these hooks too. Of several each closes its own, in whatever order: the steps of two
    loops may overlap. Another thread may close them: the thread in which they are open lets them go
    when it next starts a program or calls a module, or jax traces one.
    """

    def __init__(self, hooks: tuple[Hook, ...]):
        self._hooks = hooks
        self._current: _ThreadHooks | None = None
        self._named = FunctionNaming() if see_operations(hooks) else None

    def open(self) -> None:
        restore_hooks()
        self._current = _thread.current
        if self._named is not None:
            self._named.open()
        _set_hooks((*open_hooks(), *self._hooks))

    def close(self) -> None:
        current = self._current
        if current is None:
            return
        if current is _thread.current:
            _remove_hooks(current, self._hooks)
        elif any(_contains(one, self._hooks) for one in _unchanged_hooks(current)):
            for hooks in (current.hooks, current.replaced[0] if current.replaced else ()):
                _retire_key(hooks)
            current.closed = (*current.closed, *self._hooks)
            _unsettled.add(current)
        if self._named is not None:
            self._named.close()


def _remove_hooks(current: _ThreadHooks, hooks: tuple[Hook, ...]) -> None:
    restore_hooks()
    _set_hooks(tuple(one for one in current.hooks if not _contains(one, hooks)))


def _unchanged_hooks(current: _ThreadHooks) -> tuple[Hook, ...]:
    return current.hooks if current.replaced is None else current.replaced[0]


def _contains(one: Hook, hooks: tuple[Hook, ...]) -> bool:
    return any(one is other for other in hooks)


class _ReplacedHooks:
    def __init__(self, hooks: tuple[Hook, ...]):
        self._hooks = hooks
        self._outer: tuple[Hook, ...] | None = None
        self._key: object = None
        self._named: Resource | None = None

    def open(self) -> None:
        current, hooks = _thread.current, self._hooks
        if current.replaced is not None:
            before = dict(zip(current.hooks, current.replaced[0], strict=True))
            hooks = tuple(before.get(hook, hook) for hook in hooks)
            restore_hooks()
        self._outer, self._key = open_hooks(), hooks_key.value
        if see_operations(hooks):
            self._named = FunctionNaming()
            self._named.open()
        _set_hooks(hooks)

    def close(self) -> None:
        if self._outer is not None:
            restore_hooks()
            replace_hooks_key(self._key)  # within `internal_config()` it is not that of the hooks
            _thread.current.hooks = self._outer
            self._outer = None
        if self._named is not None:
            self._named.close()


def replace_hooks(hooks: tuple[Hook, ...]) -> contextlib.AbstractContextManager[None]:
    """Make these the open hooks, in place of those open before: within a call, or a thread."""
    return open_all(_ReplacedHooks(hooks))


def change_hooks(change: Callable[[Hook], Hook], restored: Callable[[], None]) -> None:
    """Change the hooks that are open in this thread, until others are opened or these are closed.

    Args:
        change: returns the hook in place of one that is open.
        restored: called when the hooks are again those before.
    """
    restore_hooks()
    current, before = _thread.current, open_hooks()
    current.replaced = before, restored
    _set_hooks(tuple(map(change, before)))


def restore_hooks() -> None:
    """Undo `change_hooks` in this thread."""
    current = _thread.current
    if current.replaced is not None:
        hooks, restored = current.replaced
        _set_hooks(hooks)
        restored()
        current.replaced = None


def _set_hooks(hooks: tuple[Hook, ...]) -> None:
    replace_hooks_key(_key_of(hooks))
    _thread.current.hooks = hooks


class _HooksKey:
    """Stands for hooks in jit cache keys: equal hooks, which act alike, share it while a cache
    holds it.
    """


_keys: weakref.WeakValueDictionary[tuple[Hook, ...], _HooksKey] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _key_of(hooks: tuple[Hook, ...]) -> _HooksKey | None:
    if not hooks:
        return None
    with _lock:
        key = _keys.get(hooks)
        if key is None:
            key = _keys[hooks] = _HooksKey()
        return key


def _retire_key(hooks: tuple[Hook, ...]) -> None:
    """Give equal hooks another key from now on: what a thread compiles under this one, after
    another thread has closed its hooks, is the user's own program.
    """
    with _lock:
        _keys.pop(hooks, None)
