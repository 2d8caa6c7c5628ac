"""The state of Linen: applies under way, interceptors, and jit keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def linen_applies() -> int:
    """How many nested `apply` and `init` of Linen modules are under way in this thread."""
    from flax.linen import module

    return len(module._context.capture_stack)


def linen_dry_run(module: Any) -> bool:
    """Whether a Linen module runs without variables, only to check what its setup does."""
    from flax.linen.module import TestScope

    return isinstance(module.scope, TestScope)


@contextlib.contextmanager
def outermost_linen_interceptor(interceptor: Callable[..., Any]) -> Iterator[None]:
    """As `linen.intercept_methods`, but around the open interceptors instead of inside them."""
    from flax.linen import module

    stack = module._global_interceptor_stack._storage
    stack.insert(0, interceptor)
    try:
        yield
    finally:
        stack.remove(interceptor)


def swap_linen_jit_key(
    more: Callable[[Any], Any], undone: Callable[[Callable[[], None]], object]
) -> None:
    """Make `more(module)` part of the key of programs of `linen.jit`; `undone` gets what undoes it.

    If `more(module)` is None, the key stays as it is.
    """
    from flax.linen import transforms

    cls = transforms._HashableProxy
    original = vars(cls)["from_module"]

    def from_module(cls: type, module: Any) -> Any:
        proxy, key = original.__func__(cls, module), more(module)
        return proxy if key is None else cls(proxy.module_ref, hash((proxy.hash_key, key)))

    def undo() -> None:
        cls.from_module = original

    undone(undo)
    cls.from_module = classmethod(from_module)  # type: ignore[assignment]
