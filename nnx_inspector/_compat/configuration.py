"""The settings of jax: those that our own arithmetic runs under, and the user's in our threads.

A person may forbid NaN, implicit promotion, transfers or compilation. That is said of their code:
ours makes NaN on purpose (what was not measured), and is jitted whatever they debug. Invariant:
what the settings mean for numbers (64 bits, matmul precision, random bits, mesh, device) is the
user's everywhere, and nothing is set beyond the `with`. Knows no model.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from nnx_inspector._compat import jit

_RESULTS: dict[str, tuple[Any, Any]] = {
    "jax_debug_nans": (jax.debug_nans, False),
    "jax_debug_infs": (jax.debug_infs, False),
}
_PROGRAMS: dict[str, tuple[Any, Any]] = {
    "jax_transfer_guard_host_to_device": (jax.transfer_guard_host_to_device, "allow"),
    "jax_transfer_guard_device_to_host": (jax.transfer_guard_device_to_host, "allow"),
    "jax_transfer_guard_device_to_device": (jax.transfer_guard_device_to_device, "allow"),
    "jax_disable_jit": (jax.disable_jit, False),
}
_PROMOTION: dict[str, tuple[Any, Any]] = {
    "jax_numpy_rank_promotion": (jax.numpy_rank_promotion, "allow"),
    "jax_numpy_dtype_promotion": (jax.numpy_dtype_promotion, "standard"),
}
_UNCHECKED = _RESULTS | _PROGRAMS
_OURS = _UNCHECKED | _PROMOTION


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Around a program of ours that holds the user's code: it is compiled, and its results are
    theirs and ours together. Whether theirs are finite has to be asked apart.
    """
    with _holding(_UNCHECKED):
        yield


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Around arithmetic that is ours alone; within a trace too. Also a decorator."""
    with _holding(_OURS):
        yield


@contextlib.contextmanager
def jitted() -> Iterator[None]:
    """Around a trace of the user's code that we made, and what is done with it: it is a program,
    and its constants may move to the device. What the user's equations make is checked.
    """
    with _holding(_PROGRAMS):
        yield


@contextlib.contextmanager
def _holding(wanted: dict[str, tuple[Any, Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, (setting, value) in wanted.items():
            # most often all is as it should be, and a context would cost each eager call some time
            if getattr(jax.config, name) not in (value, None):
                stack.enter_context(setting(value))
        yield


def forbids_nan() -> bool:
    """Whether the user wants an error where their code makes a NaN or an Inf."""
    return any(getattr(jax.config, name) for name in _RESULTS)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What the settings of one thread are beyond the global ones, to hold in another thread."""

    local: tuple[tuple[Any, Any], ...] = ()

    @staticmethod
    def here() -> Configuration:
        """That of this thread, now."""
        return Configuration(jit.local_settings())

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Around what is to run under it, in whatever thread."""
        return jit.with_local_settings(self.local)
