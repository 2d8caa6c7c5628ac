"""The only file that changes classes: it sends the method calls of all modules to a dispatcher.

While at least one hooked region is open, in any thread, every public method of every `nnx.Module`
class is wrapped, `sow` and `perturb` are observed, and the modules that NNX takes apart and
rebuilds carry a tag. Invariant: when the last region closes, classes, functions and registries are
as before. Does not know hooks, or what happens to a call.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import SupportsIndex

from flax import nnx

from nnx_inspector._compat import flax_graphs
from nnx_inspector._compat.launching import jit_calls
from nnx_inspector._compat.redirect import Reduce, ReducerOverrides, can_redirect, copy_of, redirect
from nnx_inspector.hooks import linen
from nnx_inspector.hooks.sites import methods
from nnx_inspector.typing import Args, Function, Kwargs, PyTree, Value


@dataclasses.dataclass(frozen=True)
class Callbacks:
    """The callbacks of wrapped classes.

    Attributes:
        is_active: whether this thread has an open region; if not, no other callback is called.
        call: `(name, function, module, args, kwargs) -> output`: runs the method of this name;
            `function` is the original, to be bound to the module.
        on_sow: `(module, name, kind, variable_type, value) -> value`: called with each value that
            the user's code gives to `sow` or gets from `perturb`.
        tag_of, on_unflatten: see `flax_graphs.patch_graph_node` and `patch_pytree_nodes`.
        on_compile, on_execute: called when an executable is compiled ahead of time, and when it
            runs.
    """

    is_active: Callable[[], bool]
    call: Callable[[str, Function, nnx.Module, Args, Kwargs], PyTree]
    on_sow: Callable[[nnx.Module, str, str, type | str, Value], Value]
    tag_of: Callable[[nnx.Module], object]
    on_unflatten: Function
    on_compile: Callable[[object], None]
    on_execute: Callable[[object], None]


_lock = threading.RLock()
_installations: tuple[object, ...] = ()
_shared_is_wrapped = False  # "shared": all that is wrapped besides module classes
_wrapped: set[type] = set()
_undo: list[Callable[[], None]] = []
_redirected: dict[types.FunctionType, types.FunctionType] = {}
_originals: weakref.WeakKeyDictionary[object, Function] = weakref.WeakKeyDictionary()
_inherited: weakref.WeakSet[Function] = weakref.WeakSet()
"""The wrappers of methods that the class itself does not have."""


class Installation:
    """Keeps the wrappers in place while it is open; regions opened then do not install them again.

    All threads must pass the same callbacks.
    """

    def __init__(self, callbacks: Callbacks):
        self._callbacks = callbacks

    def open(self) -> None:
        global _installations, _shared_is_wrapped
        with _lock:
            _installations = (*_installations, self)
            if not _shared_is_wrapped:
                _unwrap_all()  # what an interrupt has left
                _wrap_shared(self._callbacks)
                _shared_is_wrapped = True
            for cls in module_classes():
                if cls not in _wrapped:  # a class may have been defined since
                    _wrap_class(cls, self._callbacks)

    def close(self) -> None:
        global _installations
        with _lock:
            _installations = tuple(one for one in _installations if one is not self)
            if not _installations:
                _unwrap_all()


def module_classes() -> list[type]:
    found: dict[type, None] = {}
    stack: list[type] = [nnx.Module]
    while stack:
        cls = stack.pop()
        for sub in type.__subclasses__(cls):
            if sub not in found:
                found[sub] = None
                stack.append(sub)
    return list(found)


def _wrap_shared(callbacks: Callbacks) -> None:
    nodes, lenient = flax_graphs.TaggedNodes, flax_graphs.TaggedNodes.strict
    # what undoes a change is noted before the change: an interrupt may come between
    _undo.append(functools.partial(setattr, nodes, "strict", staticmethod(lenient)))
    nodes.strict = staticmethod(callbacks.is_active)
    flax_graphs.patch_pytree_nodes(callbacks.tag_of, callbacks.on_unflatten, _undo.append)
    jit_calls.patch_executables(callbacks.on_compile, callbacks.on_execute, _undo.append)
    flax_graphs.patch_linen_jit_key(linen.program_key, _undo.append)
    reductions = ReducerOverrides(_reduce_without_wrappers)
    _undo.append(reductions.undo)
    reductions.update()

    def renewing(original: Function, _: Callbacks) -> Function:
        # a pickler may have been loaded since; it asks a module for its state before its class
        return lambda *args: (reductions.update(), original(*args))[1]

    for function, observed in (
        (nnx.Module.__getstate__, renewing),
        (nnx.Module.sow, _wrap_sow),
        (nnx.Module.perturb, _wrap_perturb),
    ):
        original = copy_of(function)
        redirect(function, observed(original, callbacks), original, _undo.append)


# Python looks up `model(x)` on the class, and nnx has no place through which all calls of modules
# go (Linen has: `nn.intercept_methods`). So each module class gets a wrapper for each public
# method, inherited ones included: a call of a subclass must not look like a call of its base.
# `type.__setattr__` is used because a metaclass may seal its classes. It can go when nnx has
# interceptors of its own.
def _wrap_class(cls: type, callbacks: Callbacks) -> None:
    for name, raw in methods(cls).items():
        while isinstance(raw, (types.FunctionType, _DecoratedMethod)) and raw in _originals:
            raw = _originals[raw]  # a base class was wrapped before this one
        own = name in vars(cls)
        previous = vars(cls).get(name)
        wrapper = _wrap_method(cls, name, raw, callbacks)
        if not own:
            _inherited.add(wrapper)
        _undo.append(functools.partial(_restore_method, cls, name, wrapper, own, previous))
        type.__setattr__(cls, name, wrapper)  # a sealed metaclass may refuse setattr
    flax_graphs.patch_graph_node(
        cls,
        callbacks.tag_of,
        lambda node, tag: callbacks.on_unflatten(node, tag, False),
        _undo.append,
    )
    _wrapped.add(cls)


def _restore_method(cls: type, name: str, wrapper: object, own: bool, previous: object) -> None:
    if vars(cls).get(name) is not wrapper:
        return  # other code has replaced the wrapper: keep its method
    if own:
        type.__setattr__(cls, name, previous)
    else:
        type.__delattr__(cls, name)


def _unwrap_all() -> None:
    global _shared_is_wrapped, _wrapped, _redirected
    _shared_is_wrapped = False
    while _undo:  # the first line that is interrupted is run again
        _undo[-1]()
        _undo.pop()
    _wrapped.clear()
    _wrapped, _redirected = set(), {}


# ---------------------------------------------------------------- one method


def _wrap_method(cls: type, name: str, raw: Function, callbacks: Callbacks) -> Function:
    installed = _wrapped  # emptied on release: a wrapper that is still referenced is inert
    function = _redirect_references(cls, name, raw, callbacks)
    plain = isinstance(function, types.FunctionType)

    def call(self: nnx.Module, /, *args: object, **kwargs: object) -> PyTree:
        if cls not in installed or not callbacks.is_active():
            if plain:  # a bound call would go through C, whose stack is small
                return function(self, *args, **kwargs)
            return function.__get__(self, type(self))(*args, **kwargs)
        return callbacks.call(name, function, self, args, kwargs)

    functools.update_wrapper(call, raw, updated=())
    call.__dict__["__wrapped__"] = function
    wrapper = call if isinstance(raw, types.FunctionType) else _DecoratedMethod(call, raw)
    _originals[wrapper] = raw
    return wrapper


def _redirect_references(cls: type, name: str, raw: Function, callbacks: Callbacks) -> Function:
    """The original function of a method; calls of the method's own function are redirected too.

    They bypass the class: a model may hold a bound method in an attribute, and a decorated method
    holds the function that it decorates.
    """
    function = (
        raw
        if isinstance(raw, types.FunctionType)
        else inspect.unwrap(raw, stop=lambda f: f in _redirected)
    )
    if not isinstance(function, types.FunctionType) or not can_redirect(function):
        return raw
    if function not in _redirected:
        original = copy_of(function)
        # with an alias (forward = __call__), a reference counts as the function's own name
        known = function.__name__ if function.__name__ in methods(cls) else name

        def target(*args: object, **kwargs: object) -> PyTree:
            if not args or not isinstance(args[0], nnx.Module) or not callbacks.is_active():
                return original(*args, **kwargs)
            return callbacks.call(known, original, args[0], args[1:], kwargs)

        redirect(function, target, original, _undo.append)
        _redirected[function] = original
    return _redirected[function] if raw is function else raw


class _DecoratedMethod:
    """Stands in for a method that a transform decorates, and forwards its other attributes."""

    def __init__(self, call: Function, raw: Function):
        self._call, self._raw = call, raw
        functools.update_wrapper(self, raw, updated=())

    def __call__(self, *args: object, **kwargs: object) -> PyTree:
        return self._call(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Function:
        return self if instance is None else self._call.__get__(instance, owner)

    def __getattr__(self, name: str) -> Value:
        return getattr(self._raw, name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | Args:
        return self._raw.__reduce_ex__(protocol)


# -------------------------------------------------------------------- pickling


def _reduce_without_wrappers(reduce: Reduce, obj: object) -> Value:
    """What `reduce` returns for a class or a function as it is without wrappers."""
    if isinstance(obj, type) and obj in _wrapped:
        found = reduce(obj)
        if isinstance(found, tuple):  # by value
            contents = found[2][0]
            for name, value in list(contents.items()):
                if not _is_wrapper(value):
                    continue
                if value in _inherited:
                    del contents[name]
                else:
                    contents[name] = _originals[value]
        return found
    if not isinstance(obj, types.FunctionType):
        return reduce(obj)
    raw = _originals.get(obj, obj)
    plain = _redirected.get(raw, raw)
    if plain is obj:
        return reduce(obj)
    owner, _, name = raw.__qualname__.rpartition(".")
    try:
        cls = operator.attrgetter(owner)(sys.modules[raw.__module__])
        found = getattr(cls, name)
    except (KeyError, AttributeError):
        return reduce(plain)
    if (
        not _is_wrapper(found)
        or _originals[found] is not raw
        or reduce(found) is not NotImplemented
    ):
        return reduce(plain)
    return NotImplemented if found is obj else (getattr, (cls, name))  # by its name


def _is_wrapper(value: object) -> bool:
    return isinstance(value, (types.FunctionType, _DecoratedMethod)) and value in _originals


# ------------------------------------------------------------ sow and perturb


def _wrap_sow(original: Function, callbacks: Callbacks) -> Function:
    def sow(
        self: nnx.Module,
        variable_type: type | str,
        name: str,
        value: object,
        *args: object,
        **kwargs: object,
    ) -> object:
        if callbacks.is_active():
            value = callbacks.on_sow(self, name, "sow", variable_type, value)
        return original(self, variable_type, name, value, *args, **kwargs)

    return sow


def _wrap_perturb(original: Function, callbacks: Callbacks) -> Function:
    def perturb(self: nnx.Module, name: str, value: object, *args: Value, **kwargs: Value) -> Value:
        out = original(self, name, value, *args, **kwargs)
        if not callbacks.is_active():
            return out
        variable_type = args[0] if args else kwargs.get("variable_type", nnx.Perturbation)
        return callbacks.on_sow(self, name, "perturb", variable_type, out)

    return perturb
