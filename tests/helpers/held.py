"""A program that runs until the test lets it go."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_inspector._compat import native
from nnx_inspector.program.host.primitives import ask

PATIENCE = 60


class Held:
    """Returns its input, `MANY` values or more, once it is let go.

    Attributes:
        may_end: set at first; clear it to hold the programs that are started from then on.
    """

    MANY = (256, 256)
    """With fewer values, jax runs the program in the thread that starts it."""

    def __init__(self) -> None:
        if not native.serves_here():
            pytest.skip("no function in C calls Python here: such programs are waited for")
        self.may_end = threading.Event()
        self.may_end.set()
        self._program = jax.jit(self._waits)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self._program(x)

    def _waits(self, x: jax.Array) -> jax.Array:
        return x * ask(self._host, [jax.ShapeDtypeStruct((), jnp.float32)], after=[x])[0]

    def _host(self) -> tuple[Any, ...]:
        return (np.float32(self.may_end.wait(PATIENCE)),)
