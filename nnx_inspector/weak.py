"""A bound method that keeps nothing alive: for registries and threads that outlive its object."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """Call a bound method for as long as its object lives; afterwards nothing."""
    of = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = of()
        if alive is not None:
            alive(*args)

    return call
