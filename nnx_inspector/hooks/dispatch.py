"""Composes the open hooks around each call of a module, in order, if they select the call.

`wrapping` sends the calls here, `hook` knows the open hooks, and `Scope` knows the modules'
paths. Invariant: a call that cannot be attributed is counted and reported, never guessed. Does not
know what a hook does with a call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import types
import weakref
from collections.abc import Hashable, Iterator

import jax
from flax import nnx

from nnx_inspector import recursion_limit
from nnx_inspector._compat import jit
from nnx_inspector._compat.launching import programs
from nnx_inspector.arrays import shape_of
from nnx_inspector.hooks import linen, wrapping
from nnx_inspector.hooks.hook import (
    ALL_RANKS,
    PERTURBATION,
    TAP_INPUT,
    TAP_OUTPUT,
    AddedHooks,
    Context,
    Hook,
    open_hooks,
    replace_hooks,
    see_operations,
)
from nnx_inspector.hooks.operations import names as operations
from nnx_inspector.hooks.operations.attention import FIXED
from nnx_inspector.hooks.operations.named_scopes import CALL_SCOPE, scope_name
from nnx_inspector.hooks.scope import Scope
from nnx_inspector.hooks.sites import CALL, Path, Selection, methods, site_key
from nnx_inspector.hooks.variables import initial_weights
from nnx_inspector.resources import Resource, open_all
from nnx_inspector.typing import Args, Function, Kwargs, PyTree, Value


@dataclasses.dataclass
class _Frame:
    module: nnx.Module
    method: str
    function: object
    names: operations.OperationNames | None


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.outermost: Scope | None = None
        self.calls: dict[Hashable, int] = {}
        self.executables = 0
        self.tagging: list[Scope] = []  # another thread may take one out
        self.raised_by = 0  # by how much Python's recursion limit is raised
        self.enough_for = 0  # the number of frames for which that is enough


_thread = _ThreadState()
_hooks_of_executable: weakref.WeakKeyDictionary[object, tuple[Hook, ...]] = (
    weakref.WeakKeyDictionary()
)


def hook_resources(*hooks: Hook) -> tuple[Resource, ...]:
    """What opens hooks around every module call of this thread, inside those already open."""
    return (wrapping.Installation(_CALLBACKS), AddedHooks(hooks)) if hooks else ()


def add_hooks(*hooks: Hook) -> contextlib.AbstractContextManager[None]:
    """Open hooks around every module call of this thread, inside those already open."""
    return open_all(*hook_resources(*hooks))


def installation() -> Resource:
    """What keeps the wrappers on the classes, so that regions opened inside need not install them.

    Without an open region, the wrappers call straight through.
    """
    return wrapping.Installation(_CALLBACKS)


class ScopeTagging:
    """While it is open, this thread's modules are taken apart as if a hook of this scope were
    open, without opening one.

    What is jitted meanwhile gets the arguments that it will get under that hook.
    """

    def __init__(self, scope: Scope):
        self._scope = scope
        self._of: list[Scope] = []

    def open(self) -> None:
        self._of = _thread.tagging
        self._of.append(self._scope)

    def close(self) -> None:
        self._of[:] = [one for one in self._of if one is not self._scope]


def unseen_executables(*, reported: int = 0) -> int:
    """How many unseen calls of compiled executables this thread has made that no warning reported.

    Args:
        reported: how many of them a warning reports now.
    """
    _thread.executables -= reported
    return _thread.executables


# ------------------------------------------------------------------- calls


@dataclasses.dataclass(frozen=True)
class _HookedCall:
    """A call on its way through the hooks.

    `owner` is the module whose path is known; `below` is the rest of the path, () for a method of
    the owner. `selected` is the object or type that a filter by type examines.
    """

    owner: nnx.Module
    below: Path
    module: object
    method: str
    original: Function
    kind: str
    type_name: str
    selected: object


def _call_to_nnx(
    owner: nnx.bridge.ToNNX, original: Function, /, *args: object, **kwargs: object
) -> PyTree:
    """Call a ToNNX, and send the calls of its Linen modules through the hooks too."""
    paths = [(scope.token, scope.path_of(owner)) for scope in _open_scopes()]
    key = tuple((token, path) for token, path in paths if path is not None)
    with linen.listen(owner, linen.Listener(call_linen, _report_foreign, key)):
        return original(*args, **kwargs)


def _report_foreign(owner: nnx.Module, module: object) -> None:
    name = type(module).__name__
    for scope in _open_scopes():
        if scope.path_of(owner) is not None:
            scope.count_unattributed(name)
    for hook in open_hooks():
        report, scope = hook.unattributed, hook.scope
        if report is not None and scope is not None and scope.path_of(owner) is not None:
            report(name)


def call_linen(
    owner: nnx.Module,
    below: Path,
    module: Value,
    method: str,
    original: Function,
    args: tuple[object, ...],
    kwargs: Kwargs,
) -> PyTree:
    """Run a method of a Linen submodule through the hooks.

    Args:
        owner: the NNX module inside which it is called.
        below: the submodule's path relative to the owner's.
    """
    call = _HookedCall(
        owner, below, module, method, original, "linen", type(module).__name__, module
    )
    return _dispatch(method, original, module, args, kwargs, call)


def _dispatch_sown(
    module: nnx.Module, name: str, kind: str, variable_type: type | str, value: Value
) -> Value:
    """Run a value that the user's module passes to `sow` or `perturb` through the hooks."""
    if name in methods(type(module)):
        return value  # nnx.capture(method_outputs=...) sows method outputs, which are seen anyway
    below: Path = (name,)
    method = kind if any(_has_module(scope, module, name) for scope in _open_scopes()) else CALL
    type_name = variable_type if isinstance(variable_type, str) else variable_type.__name__
    call = _HookedCall(module, below, module, method, lambda: value, kind, type_name, variable_type)
    return _wrap_in_hooks(call, (TAP_OUTPUT, PERTURBATION, TAP_INPUT))()


def _has_module(scope: Scope, module: nnx.Module, name: str) -> bool:
    path = scope.path_of(module)
    return path is not None and scope.has_module((*path, name))


def _dispatch(
    name: str,
    function: Value,
    module: nnx.Module,
    args: tuple[object, ...],
    kwargs: Kwargs,
    call: _HookedCall | None = None,
) -> PyTree:
    """Run a method through the hooks; `call` describes it if it is not an NNX module's own."""
    ranks = ALL_RANKS
    if call is None:
        programs.raise_kept_error()
        original = function.__get__(module, type(module))
        if _is_same_call(name, function, module):
            # super().name(...), or the function inside a decorated method
            names = _thread.frames[-1].names
            with contextlib.nullcontext() if names is None else names.name_operations():
                return _as_function(original)(*args, **kwargs)
        made_at = linen.made_by_to_linen(module)
        if made_at is not None:
            for scope in _open_scopes():
                scope.adopt(module, *made_at)
            # the call of the module that a ToLinen makes was counted as the ToLinen's own
            ranks = () if name == CALL else ALL_RANKS
        if isinstance(module, nnx.bridge.ToNNX) and name == CALL:
            original = functools.partial(_call_to_nnx, module, original)
        call = _HookedCall(
            module, (), module, name, original, "method", type(module).__name__, module
        )
    frames = _thread.frames
    outermost = not frames
    if outermost:
        for scope in _open_scopes():
            scope.renew()
        needs_scope = any(hook.scope is None for hook in open_hooks())
        _thread.outermost = Scope({(): call.owner}, _OUTERMOST) if needs_scope else None
        _thread.calls = {}
    names = outer = None
    if see_operations(open_hooks()):
        gates = operations.gate_names(call.module, call.method)
        closed = functools.partial(replace_hooks, ())
        names = operations.OperationNames(
            functools.partial(_dispatch_operation, call), gates, closed
        )
        outer = None if outermost else frames[-1].names
        if outer is not None:
            names.weights = outer.weights
            names.argument_trails = [outer.trails.of(x) for x in (*args, *kwargs.values())]
    frames.append(_Frame(module, name, function, names))
    try:
        if len(frames) > _thread.enough_for:
            _raise_recursion_limit(len(frames))
        if call.module is call.owner:
            scopes = [scope for scope in _open_scopes() if scope is not _thread.outermost]
            if all(scope.path_of(call.owner) is None for scope in scopes):
                for scope in scopes:
                    scope.note_call_without_path(call.owner)
        # another method that is no site of its own belongs to the call that calls it
        scope_of_call = (
            jax.named_scope(CALL_SCOPE) if call.method == CALL else contextlib.nullcontext()
        )
        if names is None:
            with scope_of_call:
                return _wrap_in_hooks(call, ranks)(*args, **kwargs)
        with operations.hide_operations(), scope_of_call:
            named = dataclasses.replace(call, original=_with_names(names, call))
            out = _wrap_in_hooks(named, ranks)(*args, **kwargs)
        if outer is not None:
            outer.trails.put(out, names.result_trail)
        return out
    finally:
        frames.pop()
        if outermost:
            _thread.outermost = None
            _thread.calls = {}
            _restore_recursion_limit()


def _with_names(names: operations.OperationNames, call: _HookedCall) -> Function:
    run = _as_function(call.original)

    def named(*args: object, **kwargs: object) -> PyTree:
        names.weights = initial_weights(call.owner, names.weights)
        for array in jax.tree.leaves([*names.weights.values()]):
            if shape_of(array):
                names.trails.put(array, FIXED)
        for value, trail in zip((*args, *kwargs.values()), names.argument_trails, strict=False):
            names.trails.put(value, trail)
        with names.name_operations():
            out = run(*args, **kwargs)
        names.result_trail = names.trails.of(out)
        return out

    return named


def _dispatch_operation(
    call: _HookedCall, name: str, primitive: str, run: Function
) -> Function | None:
    """An operation within a call, through the hooks that select it; None if none does."""
    method = f"{call.method if call.method != CALL else ''}@{name}"
    for scope in _open_scopes():
        path = scope.path_of(call.owner)
        if path is not None:
            scope.operations[site_key((*path, *call.below), method)] = primitive
    one = dataclasses.replace(
        call, method=method, original=run, kind="operation", type_name=primitive
    )
    chain = _wrap_in_hooks(one, ALL_RANKS)
    return None if chain is run else chain


_CALLS_AHEAD = 32  # the limit is raised for this many module calls at a time


def _raise_recursion_limit(depth: int) -> None:
    """Raise Python's recursion limit by the calls that the hooks add to the user's calls.

    A module call takes a few calls in `wrapping` and this file, and a few for each hook. The
    innermost call also needs room for what a hook does with its values.
    """
    ahead = _CALLS_AHEAD * (5 + 4 * len(open_hooks())) + (300 if depth == 1 else 0)
    recursion_limit.borrow(ahead)
    _thread.raised_by += ahead
    _thread.enough_for = depth - 1 + _CALLS_AHEAD


def _restore_recursion_limit() -> None:
    raised_by, _thread.raised_by, _thread.enough_for = _thread.raised_by, 0, 0
    if raised_by:
        recursion_limit.borrow(-raised_by)


def _is_same_call(name: str, function: object, module: nnx.Module) -> bool:
    """Whether the innermost call is of the same method by another function, hence one call."""
    if not _thread.frames or _thread.frames[-1].method != name:
        return False
    outer = _thread.frames[-1]
    if outer.function is function:
        return False  # a method that calls itself
    if outer.module is module:
        return True
    paths = [(scope.path_of(outer.module), scope.path_of(module)) for scope in _open_scopes()]
    return any(a is not None and a == b for a, b in paths)


def _wrap_in_hooks(call: _HookedCall, ranks: tuple[int, ...]) -> Function:
    hooks = open_hooks()
    chain = _as_function(call.original)
    # by rank; of equal ranks the context entered first is outermost
    for number in sorted(reversed(range(len(hooks))), key=lambda number: -hooks[number].rank):
        if hooks[number].rank in ranks:
            chain = _wrap_in_hook(number, hooks[number], chain, call)
    return chain


# A call of a bound method, or of an object with `__call__`, goes through C. Since 3.12
# Python counts C calls separately and limits them; `sys.setrecursionlimit` does not raise that
# limit. A deep model that runs without hooks would raise a RecursionError with them. So every
# function between two calls of modules is a Python function.
def _as_function(method: Function) -> Function:
    """A bound method as a function."""
    if not isinstance(method, types.MethodType):
        return method
    function, module = method.__func__, method.__self__

    def bound(*args: object, **kwargs: object) -> PyTree:
        return function(module, *args, **kwargs)

    return bound


def _wrap_function(hook: Hook) -> tuple[Function, Args]:
    """The function that a hook's `wrap` runs, and its leading arguments."""
    wrap = hook.wrap
    if isinstance(wrap, types.FunctionType):
        return wrap, ()
    if isinstance(wrap, types.MethodType):
        return wrap.__func__, (wrap.__self__,)
    function = type(wrap).__call__
    return (function, (wrap,)) if isinstance(function, types.FunctionType) else (wrap, ())


def _wrap_in_hook(number: int, hook: Hook, inner: Function, call: _HookedCall) -> Function:
    if call.kind == "operation" and not see_operations((hook,)):
        return inner
    scope = hook.scope if hook.scope is not None else _thread.outermost
    path = scope.path_of(call.owner) if scope is not None else None
    if hook.scope is not None and path is None:
        looks_alike = type(call.owner) in hook.scope.types and call.module is call.owner
        if hook.unattributed is not None and looks_alike:
            hook.unattributed(type(call.owner).__name__)
        return inner
    if path is not None:
        path = (*path, *call.below)
    if hook.only is not None and not _selects(hook.only, path, call):
        return inner
    hook.matched.add(call.method)
    wrap, first = _wrap_function(hook)
    marks = hook.rank == TAP_OUTPUT and call.kind in ("method", "linen")
    owner = getattr(hook.wrap, "owner", None) if marks else None

    def run(*args: object, **kwargs: object) -> PyTree:
        counter = (number, path if path is not None else id(call.module), call.method)
        before = _thread.calls.get(counter, 0)
        _thread.calls[counter] = before + 1
        key = None if path is None else site_key(path)
        context = Context(
            call.module, call.method, call.original, key, before, call.kind, call.type_name
        )
        if owner is None or key is None:
            return wrap(*first, inner, args, kwargs, context)
        with jax.named_scope(scope_name(owner, context.site or "")):
            return wrap(*first, inner, args, kwargs, context)

    return run


def _selects(only: Selection, path: Path | None, call: _HookedCall) -> bool:
    if only.matches(path, call.method, call.selected):
        return True
    # a sown value belongs to no method, so the default method selects it too
    return call.kind in ("sow", "perturb") and only.matches(path, CALL, call.selected)


# ---------------------------------------------------------- copies of modules


_OUTERMOST = "outermost"
Tag = tuple[tuple[Hashable, Path | None], ...]
"""By the token of a scope, the path that a module has there."""


def _open_scopes() -> Iterator[Scope]:
    seen: set[int] = set()
    for hook in open_hooks():
        if hook.scope is not None and id(hook.scope) not in seen:
            seen.add(id(hook.scope))
            yield hook.scope
    if _thread.outermost is not None:
        yield _thread.outermost


def _tag_of(module: nnx.Module) -> Tag | None:
    tagging = _thread.tagging
    own = tagging[-1] if tagging and not jit.is_tracing() else None
    if own is None and not open_hooks():
        return None
    tag: dict[Hashable, Path | None] = {}
    for scope in _open_scopes() if own is None else (own, *_open_scopes()):
        path = scope.tag_of(module)
        if path is not None or scope.is_doubted(module):
            tag[scope.token] = path
    return tuple(tag.items())  # empty: certainly a module of another model


def _on_unflatten(module: nnx.Module, tag: Tag | None, moved: bool) -> None:
    if not open_hooks():
        return
    paths = None if tag is None else dict(tag)
    for scope in _open_scopes():
        if paths is None:  # flattened before the hooks were open
            scope.on_unflatten(module, None, moved=False)
        elif scope.token in paths:
            scope.on_unflatten(module, paths[scope.token], moved=moved)


def _on_compile(executable: object) -> None:
    if open_hooks():
        _hooks_of_executable[executable] = open_hooks()


def _on_execute(executable: object) -> None:
    if open_hooks() and _hooks_of_executable.get(executable) != open_hooks():
        _thread.executables += 1


_CALLBACKS = wrapping.Callbacks(
    is_active=lambda: bool(open_hooks()),
    call=_dispatch,
    on_sow=_dispatch_sown,
    tag_of=_tag_of,
    on_unflatten=_on_unflatten,
    on_compile=_on_compile,
    on_execute=_on_execute,
)
