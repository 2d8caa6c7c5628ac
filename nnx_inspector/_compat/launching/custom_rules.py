"""Functions with a derivative of their own that a call of the model calls: whether one runs here.

jax runs the rules of such a function when it differentiates, the backward one long after the call.
A layer that a memory-saving function calls again in its backward rule is not called by the user's
step. Invariant: no result changes. A call of arrays runs the function alone.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax

from nnx_inspector._compat.jit import is_tracer
from nnx_inspector._compat.redirect import AddUndo, patch
from nnx_inspector.typing import Function, PyTree, Value


class _Thread(threading.local):
    within = False
    here = ""


_thread = _Thread()


def running_rule() -> str:
    """The name of the primitive whose function or rule runs here, or ""."""
    return _thread.here


@contextlib.contextmanager
def track_rules() -> Iterator[None]:
    """Within the context, functions with rules are known that this thread calls."""
    before, _thread.within = _thread.within, True
    try:
        yield
    finally:
        _thread.within = before


def _tracked(function: Function, name: str) -> Any:
    if function is None:
        return None

    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> PyTree:
        before, _thread.here = _thread.here, name
        try:
            return function(*args, **kwargs)
        finally:
            _thread.here = before

    return run


def patch_custom_rules(add_undo: AddUndo) -> None:
    """Let `running_rule` know the rules of the functions called within `track_rules`."""
    # Nothing of jax's tells whose rule it runs. The object that holds the rules is copied for one
    # call, with rules that say so. It can go when jax passes a rule the name of its function.
    every = ((jax.custom_vjp, ("fun", "fwd", "bwd")), (jax.custom_jvp, ("fun", "jvp")))
    for cls, attributes in every:
        patch(cls, "__call__", _tracking_call(cls, attributes, cls.__call__), add_undo)


def _tracking_call(cls: Any, attributes: tuple[str, ...], call: Function) -> Any:
    @functools.wraps(call)
    def noted(self: object, *args: object, **kwargs: object) -> Value:
        if not _thread.within or not any(map(is_tracer, jax.tree.leaves((args, kwargs)))):
            return call(self, *args, **kwargs)
        mine = object.__new__(cls)  # jax has given the class no way to copy
        vars(mine).update(vars(self))
        for name in attributes:
            setattr(mine, name, _tracked(getattr(self, name), f"{cls.__name__}_call"))
        return call(mine, *args, **kwargs)

    return noted
