"""What picklers reduce that take functions and classes along by value: cloudpickle and its copies.

Such a pickler derives from one of Python's and has a `reducer_override`. Invariant: what a pickler
does with other objects stays as it is, and undoing restores each of them. Knows no module and no
hook.
"""

from __future__ import annotations

import _pickle
import pickle
import types
from collections.abc import Callable
from typing import Any

from nnx_inspector._compat.redirect import copy_of, redirect

Reduce = Callable[[Any], Any]


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

    It does so for the picklers that were loaded when `renew` was called last.
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
                self._undo[function] = redirect(function, target, original).undo

    def _target(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda pickler, obj: self._instead(lambda one: original(pickler, one), obj)

    def undo(self) -> None:
        for one in self._undo.values():
            one()
        self._undo.clear()
