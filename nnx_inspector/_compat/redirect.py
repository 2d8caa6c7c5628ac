"""Redirects the calls of a function, for every holder of a reference to it.

A bound method that a model keeps in an attribute, or one taken before the hooks, refers to the
function itself. Replacing the class attribute does not affect it; replacing the function's code
does. Invariant: the function object stays the same, its signature can still be read, and undoing
restores its original code object. Knows no module and no hook.
"""

from __future__ import annotations

import _pickle
import dataclasses
import functools
import inspect
import pickle
import types
from collections.abc import Callable
from typing import Any

Reduce = Callable[[Any], Any]
_TARGET = "nnx_inspector's target"


def _template(*args: Any, **kwargs: Any) -> Any:
    target: Any = "nnx_inspector's target"
    return target(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Redirection:
    """A function whose calls are redirected.

    Attributes:
        function: the function, which now has our code.
        original: another function that behaves as the function did before.
        undo: restores the function's code.
    """

    function: types.FunctionType
    original: types.FunctionType
    undo: Callable[[], None]


def copy_of(function: types.FunctionType) -> types.FunctionType:
    """A second function object with the same behaviour."""
    code, names = function.__code__, function.__globals__
    copy = types.FunctionType(
        code, names, function.__name__, function.__defaults__, function.__closure__
    )
    # Python 3.14 makes the annotations when they are asked for
    annotations = "__annotate__" if hasattr(function, "__annotate__") else "__annotations__"
    for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__", annotations):
        setattr(copy, name, getattr(function, name))
    copy.__dict__.update(function.__dict__)
    return copy


def can_redirect(function: types.FunctionType) -> bool:
    """Whether a function runs its code when it is called, as a generator or a coroutine does not.

    Python 3.13 warns where a function gets the code of another kind of function.
    """
    kinds = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return not function.__code__.co_flags & kinds


def redirect(
    function: types.FunctionType,
    target: Callable[..., Any],
    original: types.FunctionType,
    undone: Callable[[Callable[[], None]], object] = lambda undo: None,
) -> Redirection:
    """Call `target` whenever `function` is called, until undone.

    Args:
        function: a Python function that `can_redirect`; it may have a closure and defaults.
        target: called with the same arguments. It must not call `function`.
        original: `copy_of(function)`, which `target` may call.
        undone: gets what undoes it before anything is changed, so that no interrupt comes between.
    """
    code, annotated = function.__code__, "__wrapped__" in function.__dict__

    def undo() -> None:
        function.__code__ = code
        if not annotated:
            function.__dict__.pop("__wrapped__", None)

    undone(undo)
    function.__code__ = _template.__code__.replace(
        co_consts=tuple(target if c == _TARGET else c for c in _template.__code__.co_consts),
        co_freevars=code.co_freevars,  # as many as the function's closure has
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
    )
    if not annotated:
        function.__dict__["__wrapped__"] = original  # for inspect.signature
    return Redirection(function, original, undo)


def picklers() -> list[type]:
    """The classes of picklers that are loaded now and derive from those of Python."""
    found: dict[type, None] = {}
    stack: list[Any] = [_pickle.Pickler, vars(pickle)["_Pickler"]]
    while stack:
        new = [cls for cls in type.__subclasses__(stack.pop()) if cls not in found]
        found.update(dict.fromkeys(new))
        stack += new
    return list(found)


class Reductions:
    """Calls `instead(reduce, obj)` in place of `reduce(obj)`, the `reducer_override` of a pickler.

    Picklers that take functions and classes along by value have one: cloudpickle and its copies. It
    does so for those that were loaded when `renew` was called last.
    """

    def __init__(self, instead: Callable[[Reduce, Any], Any]):
        self._instead = instead
        self._undo: dict[types.FunctionType, Callable[[], None]] = {}

    def renew(self) -> None:
        for cls in picklers():
            function = vars(cls).get("reducer_override")
            if isinstance(function, types.FunctionType) and function not in self._undo:
                original = copy_of(function)
                target = self._target(original)
                note = functools.partial(self._undo.__setitem__, function)
                redirect(function, target, original, note)

    def _target(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda pickler, obj: self._instead(lambda one: original(pickler, one), obj)

    def undo(self) -> None:
        for one in self._undo.values():
            one()
        self._undo.clear()
