"""What may be done to an array: the kinds of perturbations of values, as pytrees.

What a person drags or learns (a factor, a mask, a direction) is data: it may be traced, vmapped
over and differentiated; what it means for code (an axis, a dtype, a function) is static.
Invariant: shape and dtype of the array stay. Does not know sites, models or programs.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

At = Literal["output", "input"]
T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def kind(*, compared: bool = False) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass and a pytree; compared by its numbers, or by identity."""

    def decorate(cls: type[T]) -> type[T]:
        made = dataclasses.dataclass(frozen=True, eq=compared)(cls)
        return jax.tree_util.register_dataclass(made)

    return decorate


def static(default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


class Perturbation:
    """What every kind has. `at` says whether it acts on what a module returns or receives."""

    at: At
    floating_only: ClassVar[bool] = True
    numbers: ClassVar[Mapping[str, float | None]] = {}
    """The fields that are a number, each with the least it may be."""

    def __post_init__(self) -> None:
        if self.at not in ("output", "input"):
            raise ValueError(f"at= is 'output' or 'input', got {self.at!r}.")
        check_numbers(self, self.numbers)

    def apply(self, x: jax.Array) -> jax.Array:
        """The array, perturbed. Of the same shape and dtype."""
        raise NotImplementedError

    def apply_at(self, x: jax.Array, name: str) -> jax.Array:
        """As `apply`, where the array has a name, on which random numbers depend."""
        return self.apply(x)

    def why_not(self, x: jax.ShapeDtypeStruct) -> str | None:
        """Why it has no meaning for such an array, or None."""
        if self.floating_only and not jnp.issubdtype(x.dtype, jnp.inexact):
            return f"{type(self).__name__} needs floating-point values"
        return None


def check_numbers(one: Any, numbers: Mapping[str, float | None]) -> None:
    """Hold the named fields of a frozen object to be numbers, and make floats of them."""
    for name, low in numbers.items():
        number = check_number(getattr(one, name), type(one).__name__, low=low)
        object.__setattr__(one, name, number)


def check_number(value: Any, kind: str, *, low: float | None = None) -> Any:
    """A finite float32 number as a float; arrays and traced values pass, for they may be vmapped,
    and so does what jax puts into a pytree in place of a leaf.
    """
    arrays = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    if value is None or type(value) is object or isinstance(value, arrays):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{kind} takes a number, got {value!r}.") from error
    if not np.isfinite(number) or abs(number) > float(np.finfo(np.float32).max):
        raise ValueError(f"{kind} takes a finite float32 number, got {number}.")
    if low is not None and number < low:
        raise ValueError(f"{kind} takes a number of at least {low}, got {number}.")
    return number


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(
        a in (1, b) for a, b in zip(shape[::-1], to[::-1], strict=False)
    )


def like(value: Any, x: jax.Array) -> jax.Array:
    return jnp.asarray(value).astype(x.dtype)


# -------------------------------------------------------------------- elementwise


@kind(compared=True)
class Zero(Perturbation):
    """Replaces the value by zeros of its shape and dtype ("zero ablation").

    Example:
        >>> import nnx_inspector as nni
        >>> nni.Zero()
        Zero()
    """

    at: At = static("output")
    floating_only: ClassVar[bool] = False

    def apply(self, x: jax.Array) -> jax.Array:
        return jnp.zeros_like(x)

    def __repr__(self) -> str:
        return "Zero()" if self.at == "output" else "Zero(at='input')"


@kind(compared=True)
class Scale(Perturbation):
    """Multiplies the value by `factor`.

    Args:
        factor: a finite number; 1.0 leaves the value as it is, 0.0 zeroes what is finite (NaN
            and Inf times 0 are NaN; `Zero` removes them).

    Example:
        >>> import nnx_inspector as nni
        >>> nni.Scale(0.5)
        Scale(factor=0.5)
    """

    factor: Any
    at: At = static("output")
    numbers: ClassVar[Mapping[str, float | None]] = {"factor": None}

    def apply(self, x: jax.Array) -> jax.Array:
        return x * like(self.factor, x)

    def __repr__(self) -> str:
        return (
            f"Scale(factor={self.factor}{'' if self.at == 'output' else ', at=' + repr(self.at)})"
        )


@kind()
class Shift(Perturbation):
    """Adds `strength * offset`: a number, or a direction to steer by.

    Args:
        offset: a number, or an array that broadcasts to the value (`[features]`).
        strength: how much of it.

    Source: activation addition, Turner et al. 2023, "Steering Language Models With Activation
    Engineering".
    """

    offset: Any
    strength: Any = 1.0
    at: At = static("output")
    numbers: ClassVar[Mapping[str, float | None]] = {"strength": None}

    def apply(self, x: jax.Array) -> jax.Array:
        return x + like(self.strength, x) * like(self.offset, x)

    def why_not(self, x: jax.ShapeDtypeStruct) -> str | None:
        if not broadcasts(jnp.shape(self.offset), x.shape):
            return f"an offset of shape {jnp.shape(self.offset)} does not broadcast to it"
        return super().why_not(x)


@kind()
class Noise(Perturbation):
    """Adds Gaussian noise, the same in every pass with the same seed.

    Args:
        std: its standard deviation.
        seed: a whole number; another one makes other noise. The noise of two arrays of one site
            differs; examples of a `vmap` and layers of a `scan` share it.
    """

    std: Any
    seed: Any = 0
    at: At = static("output")
    numbers: ClassVar[Mapping[str, float | None]] = {"std": 0.0}

    def apply(self, x: jax.Array) -> jax.Array:
        return self.apply_at(x, "")

    def apply_at(self, x: jax.Array, name: str) -> jax.Array:
        return x + like(self.std, x) * noise(self.seed, x.shape, x.dtype, name)


def noise(seed: Any, shape: tuple[int, ...], dtype: Any, name: str) -> jax.Array:
    """Standard normal numbers that depend on a seed and a name alone."""
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
    wide = dtype if jnp.dtype(dtype).itemsize >= 4 else jnp.float32
    return jax.random.normal(key, shape, wide).astype(dtype)


@kind()
class Clamp(Perturbation):
    """Limits the value to `[low, high]`; either may be left out."""

    low: Any = None
    high: Any = None
    at: At = static("output")
    floating_only: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            raise ValueError("Clamp takes low=, high= or both.")

    def apply(self, x: jax.Array) -> jax.Array:
        if self.low is not None:
            x = jnp.maximum(x, like(self.low, x))
        return x if self.high is None else jnp.minimum(x, like(self.high, x))

    def why_not(self, x: jax.ShapeDtypeStruct) -> str | None:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return "complex numbers have no order"
        return super().why_not(x)


@kind()
class Cast(Perturbation):
    """Rounds the value to another precision and back, as if the module computed in it.

    Args:
        dtype: a floating-point dtype, `jnp.bfloat16`.
    """

    dtype: Any = static()
    at: At = static("output")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if not jnp.issubdtype(self.dtype, jnp.inexact):
            raise TypeError(f"Cast takes a floating-point dtype, got {self.dtype}.")

    def apply(self, x: jax.Array) -> jax.Array:
        # a barrier: XLA may leave out a rounding that is undone at once
        rounded = jax.lax.optimization_barrier(x.astype(self.dtype))
        return rounded.astype(x.dtype)

    def why_not(self, x: jax.ShapeDtypeStruct) -> str | None:
        complex_x, complex_d = (
            jnp.issubdtype(d, jnp.complexfloating) for d in (x.dtype, self.dtype)
        )
        if complex_x != complex_d:
            return f"a cast to {self.dtype} would lose its imaginary part or invent one"
        return super().why_not(x)


# ------------------------------------------------------------- of units and passes


@kind()
class Mean(Perturbation):
    """Replaces the value by a mean ("mean ablation").

    Args:
        value: the mean of a recorded pass, a number or an array that broadcasts to the value
            (`record[site].units.mean`); by default the mean of the value itself over `axis`.
        axis: of the array as the module sees it, 0 for the batch.
    """

    value: Any = None
    axis: int | tuple[int, ...] = static(0)
    at: At = static("output")

    def apply(self, x: jax.Array) -> jax.Array:
        if self.value is not None:
            return jnp.broadcast_to(like(self.value, x), x.shape)
        wide = x.dtype if x.dtype.itemsize >= 4 else jnp.float32
        mean = jnp.mean(x.astype(wide), self.axis, keepdims=True).astype(x.dtype)
        return jnp.broadcast_to(mean, x.shape)

    def why_not(self, x: jax.ShapeDtypeStruct) -> str | None:
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        if self.value is None:
            if any(not -len(x.shape) <= axis < len(x.shape) for axis in axes):
                return f"it has no axis {self.axis}"
        elif not broadcasts(jnp.shape(self.value), x.shape):
            return f"a mean of shape {jnp.shape(self.value)} does not broadcast to it"
        return super().why_not(x)


@kind()
class Mask(Perturbation):
    """Multiplies the units (channels) along an axis by a mask.

    Args:
        mask: `[units]`, of 0 and 1, or anything between (a learned mask); or of the value's shape
            from `axis` on. Where a boolean mask is False the value is 0, NaN or not.
        axis: the units' axis of the array as the module sees it.

    Source: De Cao et al. 2020, "How do Decisions Emerge across Layers in Neural Models?"
    (DiffMask).
    """

    mask: Any
    axis: int = static(-1)
    at: At = static("output")
    floating_only: ClassVar[bool] = False

    def _shape(self, ndim: int) -> tuple[int, ...]:
        shape, axis = jnp.shape(self.mask), self.axis % ndim
        if len(shape) > 1:
            return shape
        return (*shape, *(1,) * (ndim - axis - 1))

    def apply(self, x: jax.Array) -> jax.Array:
        mask = jnp.asarray(self.mask).reshape(self._shape(x.ndim))
        if mask.dtype == jnp.bool_:
            return jnp.where(mask, x, jnp.zeros_like(x))
        return x * mask.astype(x.dtype)

    def why_not(self, x: jax.ShapeDtypeStruct) -> str | None:
        ndim = len(x.shape)
        if not -ndim <= self.axis < ndim:
            return f"it has no axis {self.axis}"
        if not broadcasts(self._shape(ndim), x.shape):
            return f"a mask of shape {jnp.shape(self.mask)} does not fit its axis {self.axis}"
        if _dtype(self.mask) != jnp.bool_ and not jnp.issubdtype(x.dtype, jnp.inexact):
            return "Mask needs floating-point values, or a boolean mask"
        return None


@kind()
class Patch(Perturbation):
    """Replaces the value by that of another pass ("activation patching").

    Args:
        value: an array that broadcasts to the value: `record[site].values` of another pass.
        where: True where to replace it (a token's position), broadcasting; by default everywhere.

    Source: Meng et al. 2022, "Locating and Editing Factual Associations in GPT" (causal tracing).
    """

    value: Any
    where: Any = None
    at: At = static("output")
    floating_only: ClassVar[bool] = False

    def apply(self, x: jax.Array) -> jax.Array:
        value = jnp.broadcast_to(like(self.value, x), x.shape)
        return value if self.where is None else jnp.where(jnp.asarray(self.where), value, x)

    def why_not(self, x: jax.ShapeDtypeStruct) -> str | None:
        for what, part in (("a value", self.value), ("where=", self.where)):
            if part is not None and not broadcasts(jnp.shape(part), x.shape):
                return f"{what} of shape {jnp.shape(part)} does not broadcast to it"
        if not jnp.can_cast(_dtype(self.value), x.dtype, "same_kind"):
            return f"a value of {_dtype(self.value)} does not become {x.dtype}"
        return None


def _dtype(value: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(jnp.result_type(value))


@kind()
class Apply(Perturbation):
    """Replaces the value by `fn(value, *args)`.

    Args:
        fn: any traceable function that keeps shape and dtype. The same function object is the
            same program: a new lambda compiles again.
        args: arrays that may change without compiling again.
    """

    fn: Callable[..., Any] = static()
    args: tuple[Any, ...] = ()
    at: At = static("output")
    floating_only: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.fn):
            raise TypeError(f"Apply takes a function of an array, got {type(self.fn).__name__}.")

    def apply(self, x: jax.Array) -> jax.Array:
        return self.fn(x, *self.args)

    def why_not(self, x: jax.ShapeDtypeStruct) -> str | None:
        made = jax.eval_shape(self.fn, x, *self.args)
        if jnp.shape(made) != x.shape or getattr(made, "dtype", None) != x.dtype:
            return f"the function makes {made} of it, and must keep shape and dtype"
        return None
