"""Redirects the calls of a function, for every holder of a reference to it, or replaces it.

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
import threading
import types
from collections.abc import Callable
from typing import Any

from nnx_inspector.typing import Function, Value

Reduce = Callable[[Value], Value]
AddUndo = Callable[[Callable[[], None]], object]
"""Gets what undoes a change before it is made, so that no interrupt comes between."""
_TARGET = "nnx_inspector's target"


def _template(*args: object, **kwargs: object) -> Any:
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
    target: Function,
    original: types.FunctionType,
    add_undo: AddUndo = lambda undo: None,
) -> Redirection:
    """Call `target` whenever `function` is called, until add_undo.

    Args:
        function: a Python function that `can_redirect`; it may have a closure and defaults.
        target: called with the same arguments. It must not call `function`.
        original: `copy_of(function)`, which `target` may call.
        add_undo: gets what undoes it.
    """
    code, annotated = function.__code__, "__wrapped__" in function.__dict__

    def undo() -> None:
        function.__code__ = code
        if not annotated:
            function.__dict__.pop("__wrapped__", None)

    add_undo(undo)
    # Python calls whatever code a function object has, so everyone who holds the function gets the
    # new one. The target is a constant of the code, not a global, so that the function's own
    # globals and closure stay. Without it, a method that a model kept before the hooks would go
    # unseen. It can go when flax calls modules through one place.
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


def patch(owner: Any, name: Any, function: object, add_undo: AddUndo) -> None:
    """Replace an attribute of an object, or an item of a dict. To undo it leaves what others have
    put there since.
    """
    is_dict = isinstance(owner, dict)
    before = owner[name] if is_dict else getattr(owner, name)

    def set_to(value: object) -> None:
        if is_dict:
            owner[name] = value
        else:
            setattr(owner, name, value)

    def undo() -> None:
        if (owner[name] if is_dict else getattr(owner, name)) is function:
            set_to(before)

    add_undo(undo)
    set_to(function)


class SharedPatch:
    """Replaces functions of jax or Python with ours for as long as anybody needs that.

    Whoever holds them may let go in any order and in any thread, also twice, and also after an
    interrupt at any line of either.

    Args:
        patch: puts them in place, and gives what undoes that to its argument, step by step.

    Attributes:
        holders: whoever needs the replacement now, oldest first.
    """

    def __init__(self, patch: Callable[[AddUndo], None]):
        self._patch = patch
        self._lock = threading.RLock()
        self.holders: tuple[Value, ...] = ()
        self._undo: list[Callable[[], None]] = []
        self._whole = False

    def acquire(self, holder: object) -> None:
        with self._lock:
            self.holders = (*self.holders, holder)
            if not self._whole:
                self._restore()  # what an interrupt has left
                self._patch(self._undo.append)
                self._whole = True

    def release(self, holder: object) -> None:
        with self._lock:
            self.holders = tuple(one for one in self.holders if one is not holder)
            if not self.holders:
                self._restore()

    def _restore(self) -> None:
        self._whole = False
        while self._undo:
            self._undo[-1]()
            self._undo.pop()


def pickler_classes() -> list[type]:
    """The classes of picklers that are loaded now and derive from those of Python."""
    found: dict[type, None] = {}
    # A pickler that takes classes along by value would take our wrappers too. Which ones exist is
    # not known: dill, cloudpickle and the copies of it in joblib, Ray and Dask. All derive from
    # these.
    stack: list[Value] = [_pickle.Pickler, vars(pickle)["_Pickler"]]
    while stack:
        new = [cls for cls in type.__subclasses__(stack.pop()) if cls not in found]
        found.update(dict.fromkeys(new))
        stack += new
    return list(found)


class ReducerOverrides:
    """Calls `instead(reduce, obj)` in place of `reduce(obj)`, the `reducer_override` of a pickler.

    Picklers that store functions and classes by value have one: cloudpickle and its copies. Only
    picklers that were already imported at the last call of `update` are affected.
    """

    def __init__(self, instead: Callable[[Reduce, Any], Any]):
        self._instead = instead
        self._undo: dict[types.FunctionType, Callable[[], None]] = {}

    def update(self) -> None:
        for cls in pickler_classes():
            function = vars(cls).get("reducer_override")
            if isinstance(function, types.FunctionType) and function not in self._undo:
                original = copy_of(function)
                target = self._target(original)
                note = functools.partial(self._undo.__setitem__, function)
                redirect(function, target, original, note)

    def _target(self, original: Function) -> Function:
        return lambda pickler, obj: self._instead(lambda one: original(pickler, one), obj)

    def undo(self) -> None:
        for one in self._undo.values():
            one()
        self._undo.clear()
