"""A bound method that keeps nothing alive: for registries and threads that outlive its object."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call a bound method for as long as its object lives; afterwards nothing."""
    of = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = of()
        return None if alive is None else alive(*args)

    return call
