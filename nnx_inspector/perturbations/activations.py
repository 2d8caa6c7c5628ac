"""The kinds of perturbation that act on values, as pytrees.

Their data (a factor, a mask, a direction) may be traced, vmapped over and differentiated. The
screen's menu lists the kinds whose form says what they do, in the order of their definition here.
Invariant: the array's shape and dtype stay the same. Does not know sites, models or programs.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from nnx_inspector._compat.jit import is_tracer
from nnx_inspector._compat.sharding import keeping_sharding
from nnx_inspector.arrays import is_array
from nnx_inspector.perturbations.base import (
    At,
    Form,
    Misfit,
    Perturbation,
    broadcasts,
    cast_like,
    check_number,
    dtype_of,
    kind,
    one_number,
    static,
)
from nnx_inspector.typing import DTypeLike, Function, Params, Value


@kind(compared=True)
class Zero(Perturbation):
    """Replaces the value with zeros of its shape and dtype ("zero ablation").

    Example:
        >>> import nnx_inspector as nni
        >>> nni.Zero()
        Zero()
    """

    at: At = static("output")
    form: ClassVar[Form] = Form(does="replace it by zeros")
    floating_only: ClassVar[bool] = False

    def apply(self, x: jax.Array) -> jax.Array:
        return jnp.zeros_like(x)

    def __repr__(self) -> str:
        return "Zero()" if self.at == "output" else "Zero(at='input')"


@kind()
class Mean(Perturbation):
    """Replaces the value with a mean ("mean ablation").

    Args:
        value: the mean of a recorded pass (`record[site].units.mean`), a number or an array that
            broadcasts to the value. By default the mean of the value itself over `axis`.
        axis: axis or axes of the array as the module sees it; 0 is the batch.
        where: the positions whose mean it is, booleans; their axes are the first of the value's. By
            default those of the call that count, where an inspector, `sweep` or `watch` was given
            `where=`, and otherwise all. Where none counts along `axis`, it is the mean of all.
    """

    value: Value = None
    axis: int | tuple[int, ...] = static(0)
    at: At = static("output")
    where: Value = None
    form: ClassVar[Form] = Form(does="replace it by its mean over the batch")
    arrays: ClassVar[tuple[str, ...]] = ("value",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.axis, list):
            object.__setattr__(self, "axis", tuple(self.axis))
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        if not all(isinstance(axis, (int, np.integer)) for axis in axes):
            raise TypeError(f"Mean takes one axis or several, as integers, got {self.axis!r}.")
        if self.where is not None:
            object.__setattr__(self, "where", _position_mask(self.where))

    def apply(self, x: jax.Array) -> jax.Array:
        if self.value is not None:
            return jnp.broadcast_to(cast_like(self.value, x), x.shape)
        wide = x.dtype if x.dtype.itemsize >= 4 else jnp.float32
        counts = None
        if self.where is not None:
            counts = jnp.asarray(self.where)
            counts = counts.reshape(*counts.shape, *[1] * (x.ndim - counts.ndim))
            counts = jnp.broadcast_to(counts, x.shape)
            counts |= ~counts.any(self.axis, keepdims=True)
        mean = jnp.mean(x.astype(wide), self.axis, keepdims=True, where=counts).astype(x.dtype)
        return jnp.broadcast_to(mean, x.shape)

    def why_not(self, x: jax.ShapeDtypeStruct) -> Misfit | None:
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        ndim = len(x.shape)
        if self.where is not None:
            mask = jnp.shape(self.where)
            if len(mask) > ndim or any(
                n not in (1, m) for n, m in zip(mask, x.shape, strict=False)
            ):
                return ValueError(
                    f"where= of shape {mask} must be as long as its first axes, or of length 1"
                )
        if self.value is None:
            if any(not -ndim <= axis < ndim for axis in axes):
                return ValueError(f"it has no axis {self.axis}")
            if len({axis % ndim for axis in axes}) < len(axes):
                return ValueError(f"axis={self.axis} names one axis twice")
        return super().why_not(x)


def _position_mask(given: Value) -> Any:
    """The mask of a `Mean`; traced ones pass."""
    if isinstance(given, jax.ShapeDtypeStruct):
        return given
    array = given if is_array(given) else np.asarray(given)
    if array.dtype != np.bool_:
        what = type(given).__name__ if not is_array(given) else f"{array.dtype}{[*array.shape]}"
        raise TypeError(
            f"Mean takes where= as an array of booleans, got {what}. A function of the call's "
            f"arguments is where= of nni.Inspector, nni.sweep or nni.watch."
        )
    if not is_tracer(array) and not np.asarray(array).any():
        raise ValueError(f"where= is all False: no position of bool{[*array.shape]} counts.")
    return array


@kind(compared=True)
class Scale(Perturbation):
    """Multiplies the value by `factor`.

    Args:
        factor: a finite number. 1.0 leaves the value as it is; 0.0 zeroes only finite values (NaN
            and Inf times 0 are NaN; `Zero` removes them).

    Example:
        >>> import nnx_inspector as nni
        >>> nni.Scale(0.5)
        Scale(factor=0.5)
    """

    factor: Value
    at: At = static("output")
    form: ClassVar[Form] = Form(
        does="multiply it by the factor", strength_name="factor", strength=0.5, high=2.0
    )
    numbers: ClassVar[Mapping[str, float | None]] = {"factor": None}

    def apply(self, x: jax.Array) -> jax.Array:
        return x * cast_like(self.factor, x)

    def __repr__(self) -> str:
        return (
            f"Scale(factor={self.factor}{'' if self.at == 'output' else ', at=' + repr(self.at)})"
        )


@kind()
class Shift(Perturbation):
    """Adds `strength * offset`, where the offset is a number or a direction to steer in.

    Args:
        offset: a number, or an array that broadcasts to the value (`[features]`).
        strength: the factor on the offset.

    Source: activation addition, Turner et al. 2023, "Steering Language Models With Activation
    Engineering".
    """

    offset: Value
    strength: Value = 1.0
    at: At = static("output")
    form: ClassVar[Form] = Form(
        does="add the strength to every number",
        strength_name="strength",
        strength=1.0,
        low=-2.0,
        high=2.0,
        given={"offset": 1.0},
    )
    numbers: ClassVar[Mapping[str, float | None]] = {"strength": None}
    arrays: ClassVar[tuple[str, ...]] = ("offset",)

    def apply(self, x: jax.Array) -> jax.Array:
        return x + cast_like(self.strength, x) * cast_like(self.offset, x)


@kind()
class Noise(Perturbation):
    """Adds Gaussian noise, the same in every pass with the same seed.

    Args:
        std: the standard deviation of the noise.
        seed: an integer; another seed gives other noise. Two arrays of one site get different
            noise; the examples of a `vmap` and the layers of a `scan` share theirs.
    """

    std: Value
    seed: Value = 0
    at: At = static("output")
    form: ClassVar[Form] = Form(
        does="add Gaussian noise of this std",
        strength_name="std",
        strength=0.1,
        high=1.0,
        least=0.0,
    )
    numbers: ClassVar[Mapping[str, float | None]] = {"std": 0.0}

    def apply(self, x: jax.Array) -> jax.Array:
        return self.apply_at(x, "")

    def apply_at(self, x: jax.Array, name: str) -> jax.Array:
        return x + cast_like(self.std, x) * noise(self.seed, x.shape, x.dtype, name)


def noise(seed: Value, shape: tuple[int, ...], dtype: DTypeLike, name: str) -> jax.Array:
    """Standard normal numbers that depend only on a seed and a name."""
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
    wide = dtype if jnp.dtype(dtype).itemsize >= 4 else jnp.float32
    return jax.random.normal(key, shape, wide).astype(dtype)


@kind()
class Clamp(Perturbation):
    """Limits the value to `[low, high]`; either may be omitted. Use integers for integer values."""

    low: Value = None
    high: Value = None
    at: At = static("output")
    form: ClassVar[Form] = Form(
        does="cut it off at ± the limit", strength_name="limit", strength=1.0, high=4.0, least=0.0
    )
    floating_only: ClassVar[bool] = False
    arrays: ClassVar[tuple[str, ...]] = ("low", "high")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            raise ValueError("Clamp takes low=, high= or both.")
        bounds = (self.low, self.high)
        low, high = (None if x is None else check_number(x, "Clamp") for x in bounds)
        if isinstance(low, float) and isinstance(high, float) and low > high:
            raise ValueError(f"Clamp needs low= to be at most high=, got {low} and {high}.")

    @classmethod
    def clicked(cls, strength: float | None, at: At) -> Clamp:
        limit = cls.form.strength if strength is None else strength
        if limit is None or limit < 0:
            raise ValueError(f"Clamp takes a limit of at least 0.0, got {limit}.")
        return cls(-limit, limit, at=at)

    @property
    def tuned_to(self) -> float | None:
        low, high = one_number(self.low), one_number(self.high)
        return high if low is not None and high is not None and low == -high else None

    def _tuned(self, strength: float) -> Clamp:
        return self.clicked(strength, self.at)

    def apply(self, x: jax.Array) -> jax.Array:
        if self.low is not None:
            x = jnp.maximum(x, _cast_bound(self.low, x))
        return x if self.high is None else jnp.minimum(x, _cast_bound(self.high, x))

    def why_not(self, x: jax.ShapeDtypeStruct) -> Misfit | None:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return TypeError("complex numbers have no order")
        return super().why_not(x)


def _cast_bound(value: object, x: jax.Array) -> jax.Array:
    """A bound in the dtype of the array; a bound beyond an integer dtype's range is clipped."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return cast_like(value, x)
    value = jnp.asarray(value)
    own, of_x = jnp.iinfo(value.dtype), jnp.iinfo(x.dtype)
    low, high = max(own.min, of_x.min), min(own.max, of_x.max)
    return jnp.clip(value, low, high).astype(x.dtype)


@kind()
class Cast(Perturbation):
    """Rounds the value to another precision and back, to show what that precision would lose.

    Args:
        dtype: a floating-point dtype, such as `jnp.bfloat16`.
    """

    dtype: Any = static()
    at: At = static("output")
    form: ClassVar[Form] = Form(does="round it to bfloat16 and back", given={"dtype": jnp.bfloat16})

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if not jnp.issubdtype(self.dtype, jnp.inexact):
            raise TypeError(f"Cast takes a floating-point dtype, got {self.dtype}.")

    def apply(self, x: jax.Array) -> jax.Array:
        # a barrier: XLA may remove a rounding that is undone at once
        rounded = jax.lax.optimization_barrier(x.astype(self.dtype))
        return rounded.astype(x.dtype)

    def why_not(self, x: jax.ShapeDtypeStruct) -> Misfit | None:
        complex_x, complex_d = (
            jnp.issubdtype(d, jnp.complexfloating) for d in (x.dtype, self.dtype)
        )
        if complex_x != complex_d:
            return TypeError(f"a cast to {self.dtype} would lose its imaginary part or invent one")
        return super().why_not(x)


@kind()
class Mask(Perturbation):
    """Multiplies the units (channels) along an axis by a mask.

    Args:
        mask: `[units]`, with numbers from 0 to 1 (such as a learned mask) or booleans; or an array
            over several axes from `axis` on, as `[height, width]`. A boolean False makes even a
            NaN 0.
        axis: the axis of the units in the array as the module sees it.

    Source: De Cao et al. 2020, "How do Decisions Emerge across Layers in Neural Models?"
    (DiffMask).
    """

    mask: Value
    axis: int = static(-1)
    at: At = static("output")
    floating_only: ClassVar[bool] = False
    arrays: ClassVar[tuple[str, ...]] = ("mask",)

    @classmethod
    def without(
        cls, off: Sequence[int], *, units: int | tuple[int, ...], axis: int = -1, at: At = "output"
    ) -> Mask:
        """A mask that switches some units off and leaves the others on.

        Args:
            off: the indices of the units to switch off.
            units: the number of units along the axis. If it is a shape, such as `(height, width)`,
                the mask has that shape, and `off` counts row by row.
            axis: see `Mask`.
            at: `"output"`, or `"input"` for what the module receives.

        Raises:
            IndexError: an index is not in `range(units)`.

        Example:
            >>> import nnx_inspector as nni
            >>> nni.Mask.without([2], units=3).mask.tolist()
            [True, True, False]
            >>> nni.Mask.without([2], units=(2, 2), axis=-3).mask.tolist()
            [[True, True], [False, True]]
        """
        mask = np.ones(units, np.bool_)
        for unit in off:
            if not 0 <= unit < mask.size:
                raise IndexError(f"There is no unit {unit} among {units}.")
            mask.flat[unit] = False
        return cls(mask, axis=axis, at=at)

    @property
    def switches(self) -> npt.NDArray[np.bool_] | None:
        mask = np.asarray(self.mask)
        return mask if mask.dtype == np.bool_ and mask.ndim in (1, 2) else None

    def python(self, *, short: bool = False) -> str:
        on = None if short else self.switches
        if on is None:
            return super().python(short=short)
        named: Params = {"units": on.shape if on.ndim > 1 else len(on)}
        named |= {} if self.axis == -1 else {"axis": self.axis}
        named |= {} if self.at == "output" else {"at": self.at}
        return self._written("Mask.without", [_list_text(np.flatnonzero(~on))], named, short=False)

    def _shape(self, ndim: int) -> tuple[int, ...]:
        shape, axis = jnp.shape(self.mask), self.axis % ndim
        return (*shape, *(1,) * (ndim - axis - len(shape)))

    def apply(self, x: jax.Array) -> jax.Array:
        mask = jnp.asarray(self.mask).reshape(self._shape(x.ndim))
        if mask.dtype == jnp.bool_:
            return jnp.where(mask, x, jnp.zeros_like(x))
        return x * mask.astype(x.dtype)

    def why_not(self, x: jax.ShapeDtypeStruct) -> Misfit | None:
        ndim = len(x.shape)
        if not -ndim <= self.axis < ndim:
            return ValueError(f"it has no axis {self.axis}")
        if not broadcasts(self._shape(ndim), x.shape):
            return ValueError(
                f"a mask of shape {jnp.shape(self.mask)} does not fit its axis {self.axis}"
            )
        if dtype_of(self.mask) != jnp.bool_ and not jnp.issubdtype(x.dtype, jnp.inexact):
            return TypeError("Mask needs floating-point values, or a boolean mask")
        return None


def _list_text(numbers: np.ndarray) -> str:
    """A list of rising numbers as Python text, with four or more in a row as a range."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    texts = [
        f"*range({run[0]}, {run[-1] + 1})" if len(run) > 3 else ", ".join(map(str, run))
        for run in runs
    ]
    return f"[{', '.join(texts)}]"


@kind()
class Patch(Perturbation):
    """Replaces the value with that of another pass ("activation patching").

    Args:
        value: an array that broadcasts to the value, such as `record[site].values`.
        where: True where to replace it (a token's position); broadcasts. By default everywhere.

    Source: Meng et al. 2022, "Locating and Editing Factual Associations in GPT" (causal tracing).
    """

    value: Value
    where: Value = None
    at: At = static("output")
    floating_only: ClassVar[bool] = False
    arrays: ClassVar[tuple[str, ...]] = ("value", "where")

    def apply(self, x: jax.Array) -> jax.Array:
        value = jnp.broadcast_to(cast_like(self.value, x), x.shape)
        return value if self.where is None else jnp.where(jnp.asarray(self.where), value, x)


@kind(checked=True)
class Apply(Perturbation):
    """Replaces the value with `fn(value, *args)`.

    Args:
        fn: any traceable function that keeps shape and dtype. Programs are cached by function
            object: a new lambda compiles again, and jax keeps its program. In a loop, define
            the function once.
        args: arrays that may change without compiling again.
    """

    fn: Function = static()
    args: tuple[Value, ...] = ()
    at: At = static("output")
    floating_only: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.fn):
            raise TypeError(f"Apply takes a function of an array, got {type(self.fn).__name__}.")

    def apply(self, x: jax.Array) -> jax.Array:
        return keeping_sharding(lambda _, y: y, x, self.fn(x, *self.args))

    def why_not(self, x: jax.ShapeDtypeStruct) -> Misfit | None:
        made = jax.eval_shape(self.fn, x, *self.args)
        if not is_array(made) or made.shape != x.shape or made.dtype != x.dtype:
            return ValueError(f"the function returns {made}, but it must keep shape and dtype")
        return None
