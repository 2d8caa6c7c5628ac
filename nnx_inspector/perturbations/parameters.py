"""Kinds that perturb parameters for one pass, while the user's model keeps its own.

Invariant: shape and dtype stay the same. Does not know models or programs.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from nnx_inspector.perturbations.activations import noise
from nnx_inspector.perturbations.base import (
    Form,
    Kind,
    Misfit,
    PartBase,
    UnitIndex,
    cast_like,
    check_numbers,
    first_misfit,
    kind,
    lists_as_arrays,
    static,
)
from nnx_inspector.typing import Value


class ParameterPerturbation(Kind):
    """The base of every kind that acts on a parameter."""

    at: ClassVar[Literal["parameter"]] = "parameter"
    acts_on = "parameter"
    arrays: ClassVar[tuple[str, ...]] = ()
    """The fields that may be a number or an array."""

    def apply(self, x: jax.Array, name: str) -> jax.Array:
        """The parameter called `name`, perturbed."""
        raise NotImplementedError

    def only(self, units: UnitIndex, *, axis: int = -1) -> ParameterPart:
        """The same perturbation of chosen units along an axis; see `Perturbation.only`."""
        return ParameterPart(self, units, axis=axis)

    def why_not(self, x: Value) -> Misfit | None:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return TypeError(f"{type(self).__name__} needs floating-point values")
        return first_misfit(self, self.arrays, x)


@kind(compared=True)
class ParameterNoise(ParameterPerturbation):
    """Adds Gaussian noise to parameters, the same in every pass with the same seed.

    Args:
        std: the standard deviation of the noise.
        seed: an integer. Each parameter gets different noise.

    Source: Plappert et al. 2018, "Parameter Space Noise for Exploration".
    """

    std: Value
    seed: Value = 0
    form: ClassVar[Form] = Form(strength_name="std", strength=0.1, high=1.0)
    arrays: ClassVar[tuple[str, ...]] = ("std",)

    def __post_init__(self) -> None:
        check_numbers(self, {"std": 0.0})

    def apply(self, x: jax.Array, name: str) -> jax.Array:
        return x + cast_like(self.std, x) * noise(self.seed, x.shape, x.dtype, name)


@kind()
class PruneMask(ParameterPerturbation):
    """Multiplies a parameter by a mask.

    Args:
        mask: an array that broadcasts to the parameter: 0 and 1, or booleans.
    """

    mask: Value
    arrays: ClassVar[tuple[str, ...]] = ("mask",)

    def __post_init__(self) -> None:
        lists_as_arrays(self, self.arrays)

    def apply(self, x: jax.Array, name: str) -> jax.Array:
        mask = jnp.asarray(self.mask)
        if mask.dtype == jnp.bool_:
            return jnp.where(mask, x, jnp.zeros_like(x))
        return x * mask.astype(x.dtype)


@kind()
class ParameterPart(PartBase, ParameterPerturbation):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A perturbation of a part of a parameter; see `Perturbation.only`."""

    whole: Value
    units: Value = None
    example: Value = None
    axis: int = static(-1)
    __repr__ = PartBase.__repr__

    def apply(self, x: jax.Array, name: str) -> jax.Array:
        return jnp.where(self.where(x.shape), self.whole.apply(x, name), x)

    def why_not(self, x: Value) -> Misfit | None:
        return self.whole.why_not(x) or self.misfit(x.shape)
