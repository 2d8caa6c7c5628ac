"""A model that one test after the other inspects: what one of them compiles serves the next."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import nnx_inspector as nni


class ReusedModel:
    """A model, and an inspector that keeps what other inspectors of it compile.

    Each test makes an inspector of its own, with a recording and handles of its own.
    """

    def __init__(self, model: nnx.Module, *args: Any):
        self.model = model
        self._keeps = nni.Inspector(model, *args, display=False)
        self._attributes = [(one, dict(vars(one))) for _, one in nnx.iter_modules(model)]
        every = [one for _, one in nnx.iter_graph(model) if isinstance(one, nnx.Variable)]
        self._values = [(one, copied(one.get_raw_value())) for one in every]

    def reset(self) -> Any:
        """The model with the attributes and values that it had at first."""
        for one, attributes in self._attributes:
            vars(one).clear()
            vars(one).update(attributes)
        for variable, value in self._values:
            variable.set_raw_value(copied(value))
        return self.model

    def close(self) -> None:
        self._keeps.close()


def copied(value: Any) -> Any:
    """Arrays of its own, which a step may donate."""
    return jax.tree.map(jnp.copy, value)
