"""One network as other people write it: how it is made, called and trained.

`networks_*.py` have functions that build a `Network` from scratch; `test_networks.py` runs the same
tests on each. Invariant: neither this file nor those files use nnx_inspector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def no_arguments() -> dict[str, Any]:
    return {}


@dataclasses.dataclass
class Network:
    """A model, its arguments, and its loss, called as `loss(model, *args, **kwargs)`.

    Attributes:
        loss: by default the mean square of everything that the call returns.
        wrt: the Variables to differentiate with respect to.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=no_arguments)
    loss: Callable[..., Any] | None = None
    wrt: Any = nnx.Param

    def call(self) -> Any:
        return self.model(*self.args, **self.kwargs)

    def objective(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return (
            squares(model(*args, **kwargs))
            if self.loss is None
            else self.loss(model, *args, **kwargs)
        )

    def optimizer(self) -> Any:
        return nnx.Optimizer(self.model, optax.sgd(0.01), wrt=self.wrt)

    def taken_apart(self) -> tuple[list[Any], Callable[[Any], Any]]:
        """The arguments that a jitted function accepts, and a function that restores the rest."""
        leaves, treedef = jax.tree.flatten((self.args, self.kwargs), is_leaf=is_node)
        own = [i for i, x in enumerate(leaves) if is_node(x) or isinstance(x, jax.Array)]

        def together(given: Any) -> Any:
            whole = list(leaves)
            for i, x in zip(own, given, strict=True):
                whole[i] = x
            return jax.tree.unflatten(treedef, whole)

        return [leaves[i] for i in own], together


def is_node(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def squares(tree: Any) -> Any:
    """The sum of the mean squares of all arrays of floats."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    inexact = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
    return sum((jnp.square(jnp.abs(x)).astype(jnp.float32).mean() for x in inexact), jnp.zeros(()))


def gauss(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def whole(*shape: int, below: int = 5, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, shape), jnp.int32)
