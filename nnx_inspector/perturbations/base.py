"""What a kind of perturbation of values is: the base of all, and the checks that they share.

What a person drags or learns (a factor, a mask) is data of a pytree, what it means for code (an
axis, a dtype) is static. Invariant: what does not fit an array is told before anything runs. Does
not say what any kind does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from nnx_inspector._compat.configuration import ours

At = Literal["output", "input"]
T = TypeVar("T")
Refusal = TypeError | ValueError
"""Of a dtype that has no meaning for a kind, and of everything else that does not fit."""


@dataclass_transform(frozen_default=True)
def kind(*, compared: bool = False, checked: bool = False) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass and a pytree; compared by its numbers, or by identity.

    What it does to an array is our arithmetic, unless it is `checked`: a function of the user's.
    """

    def decorate(cls: type[T]) -> type[T]:
        for name in ("apply", "apply_at"):
            if name in vars(cls) and not checked:
                setattr(cls, name, ours()(vars(cls)[name]))
        return _as_pytree(dataclasses.dataclass(frozen=True, eq=compared)(cls))

    return decorate


def _as_pytree(cls: type[T]) -> type[T]:
    """Register a dataclass; anything may stand in place of its numbers.

    Not by `jax.tree_util.register_dataclass`: that calls `__init__` with whatever a `tree.map`
    made of the leaves (None, labels, shardings), which is not for the checks there.
    """
    fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]
    data = [f.name for f in fields if not f.metadata.get("static")]
    code = [f.name for f in fields if f.metadata.get("static")]

    def flatten(one: T) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(one, n) for n in data], tuple(getattr(one, n) for n in code)

    def flatten_with_keys(one: T) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        leaves, aux = flatten(one)
        return [(GetAttrKey(n), x) for n, x in zip(data, leaves, strict=True)], aux

    def unflatten(aux: tuple[Any, ...], leaves: Iterable[Any]) -> T:
        one = object.__new__(cls)
        for name, value in zip((*data, *code), (*leaves, *aux), strict=True):
            object.__setattr__(one, name, value)
        return one

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def static(default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


class Perturbation:
    """What every kind has. `at` says whether it acts on what a module returns or receives."""

    at: At
    floating_only: ClassVar[bool] = True
    numbers: ClassVar[Mapping[str, float | None]] = {}
    """The fields that are a number, each with the least it may be."""
    arrays: ClassVar[tuple[str, ...]] = ()
    """The fields that are a number or an array."""

    def __post_init__(self) -> None:
        if self.at not in ("output", "input"):
            raise ValueError(f"at= is 'output' or 'input', got {self.at!r}.")
        check_numbers(self, self.numbers)
        lists_as_arrays(self, self.arrays)

    def apply(self, x: jax.Array) -> jax.Array:
        """The array, perturbed. Of the same shape and dtype."""
        raise NotImplementedError

    def apply_at(self, x: jax.Array, name: str) -> jax.Array:
        """As `apply`, where the array has a name, on which random numbers depend."""
        return self.apply(x)

    def why_not(self, x: jax.ShapeDtypeStruct) -> Refusal | None:
        """Why it has no meaning for such an array (not to be raised as it is), or None."""
        if self.floating_only and not jnp.issubdtype(x.dtype, jnp.inexact):
            return TypeError(f"{type(self).__name__} needs floating-point values")
        return first_misfit(self, (*self.numbers, *self.arrays), x)


def is_random(one: Any) -> bool:
    """Whether what a perturbation does to an array depends on the array's name."""
    of = getattr(type(one), "apply_at", None)
    return of is not Perturbation.apply_at


def first_misfit(one: Any, names: Iterable[str], x: Any) -> Refusal | None:
    """Why the first of some fields that does not fit an array does not, or None."""
    for name in names:
        value = getattr(one, name)
        if value is None:
            continue
        if not broadcasts(jnp.shape(value), x.shape):
            return ValueError(f"{name}= of shape {jnp.shape(value)} does not broadcast to it")
        if _rank(dtype_of(value)) > _rank(x.dtype):
            return TypeError(f"{name}= of {dtype_of(value)} does not become {x.dtype}")
    return None


_RANKS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _rank(dtype: Any) -> int:
    """Of what kind a dtype's numbers are: those of a lower one are among those of a higher one."""
    return next(i for i, kind in enumerate(_RANKS) if jnp.issubdtype(dtype, kind))


def dtype_of(value: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(jnp.result_type(value))


def lists_as_arrays(one: Any, names: Iterable[str]) -> None:
    """Make arrays of the fields of a frozen object that are lists: a pytree would take a list for
    many numbers.
    """
    for name in names:
        if isinstance(value := getattr(one, name), (list, tuple)):
            object.__setattr__(one, name, np.asarray(value))


def check_numbers(one: Any, numbers: Mapping[str, float | None]) -> None:
    """Hold the named fields of a frozen object to be numbers, and make floats of them."""
    for name, low in numbers.items():
        number = check_number(getattr(one, name), type(one).__name__, low=low)
        object.__setattr__(one, name, number)


def check_number(value: Any, kind: str, *, low: float | None = None) -> Any:
    """A finite float32 number as a float; arrays and traced values pass: they may be vmapped."""
    if isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
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
