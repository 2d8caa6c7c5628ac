"""The jax settings under which our own arithmetic runs, and the user's settings in our threads.

A user may forbid NaN, implicit promotion, transfers or compilation in their code. Our code makes
NaN on purpose (for an unknown number), and is always jitted. Invariant: settings that determine
numbers (64 bits, matmul precision, random bits, mesh, device) are the user's everywhere, and no
setting outlasts its `with` block. Knows no model.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from nnx_inspector._compat import jit

_NAN_CHECKS: dict[str, tuple[Any, Any]] = {
    "jax_debug_nans": (jax.debug_nans, False),
    "jax_debug_infs": (jax.debug_infs, False),
}
_JIT_AND_TRANSFERS: dict[str, tuple[Any, Any]] = {
    "jax_transfer_guard_host_to_device": (jax.transfer_guard_host_to_device, "allow"),
    "jax_transfer_guard_device_to_host": (jax.transfer_guard_device_to_host, "allow"),
    "jax_transfer_guard_device_to_device": (jax.transfer_guard_device_to_device, "allow"),
    "jax_disable_jit": (jax.disable_jit, False),
}
_PROMOTION: dict[str, tuple[Any, Any]] = {
    "jax_numpy_rank_promotion": (jax.numpy_rank_promotion, "allow"),
    "jax_numpy_dtype_promotion": (jax.numpy_dtype_promotion, "standard"),
}
_UNCHECKED_JIT = _NAN_CHECKS | _JIT_AND_TRANSFERS
_INTERNAL = _UNCHECKED_JIT | _PROMOTION


# A jitted function that was traced before the hooks were opened would otherwise run its old
# program, without them. A user context is the only public part of jit's cache keys: with another
# value, jax looks for another program, and finds the old one again when the value is back.
hooks_key = jax.make_user_context(default_value=None)
"""The part of every jit cache key that says which hooks are open. It is compared by identity:
jaxlib crashes if several threads use a cache whose keys compare in Python.
"""


def replace_hooks_key(key: object) -> None:
    """Give `hooks_key` another value in this thread, until the context ends that has set it."""
    # A context that is left in another order than it was entered would put back a value that is out
    # of date. So the hooks keep one context, the first, and only change the value in it.
    hooks_key(key).__enter__()  # the end of that context undoes this one too


def unchecked_jit() -> contextlib.AbstractContextManager[None]:
    """For our programs that contain the user's code: compiled, and their results go unchecked."""
    return _set(_UNCHECKED_JIT)


def without_nan_checks() -> contextlib.AbstractContextManager[None]:
    """For a program that also returns numbers of our own, which may be NaN on purpose."""
    return _set(_NAN_CHECKS)


@contextlib.contextmanager
def internal_config() -> Iterator[None]:
    """For arithmetic of our own, also within a trace: traced once, whatever hooks are open."""
    with _set(_INTERNAL), contextlib.nullcontext() if hooks_key.value is None else hooks_key(None):
        yield


def jit_enabled() -> contextlib.AbstractContextManager[None]:
    """For our trace of the user's code, and its evaluation: compiled, with checked results."""
    return _set(_JIT_AND_TRANSFERS)


@contextlib.contextmanager
def _set(wanted: dict[str, tuple[Any, Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, (setting, value) in wanted.items():
            # usually the setting is right already; a context would slow down each eager call
            if getattr(jax.config, name) not in (value, None):
                stack.enter_context(setting(value))
        yield


@contextlib.contextmanager
def names_in_cache_key() -> Iterator[None]:
    """For programs whose names are read: a cache on disk gives no program with other names."""
    from jax._src import config

    # jax has no public context for it, and the setting itself would be that of every thread
    with config.compilation_cache_include_metadata_in_key(True):
        yield


def forbids_nan() -> bool:
    """Whether the user wants an error if their code produces a NaN or an Inf."""
    return any(getattr(jax.config, name) for name in _NAN_CHECKS)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The settings of one thread that differ from the global ones, for use in another thread."""

    local: tuple[tuple[Any, Any], ...] = ()

    @staticmethod
    def current() -> Configuration:
        """The current settings of this thread."""
        return Configuration(jit.local_settings())

    def applied(self) -> contextlib.AbstractContextManager[None]:
        """A context under which code runs with these settings, in any thread."""
        return jit.with_local_settings(self.local)
