"""The base of all kinds of perturbation, and the checks that they share.

The numbers that a person drags or learns (a factor, a mask) are pytree data; the settings that
change the code (an axis, a dtype) are static. A kind's class is its whole definition: what it does
to an array, its form on the screen, and the Python text of an instance. Invariants: a misfit with
an array is reported before anything runs; a text that is not `short` is valid Python with every
digit, or "". `only`, a part of any kind, is the one way to leave the rest of an array unchanged.
Defines no other kind.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, ClassVar, Literal, Self, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.tree_util import GetAttrKey

from nnx_inspector._compat import jit
from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.sharding import keeping_sharding
from nnx_inspector.arrays import is_array, own_attribute, shape_of
from nnx_inspector.typing import DTypeLike, Params, Value

At = Literal["output", "input"]
T = TypeVar("T")
Misfit = TypeError | ValueError
"""TypeError if a kind has no meaning for a dtype, ValueError for any other misfit."""


@dataclass_transform(frozen_default=True)
def kind(*, compared: bool = False, checked: bool = False) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass and a pytree.

    `compared`: equal by field, not by identity. `checked`: the user's jax checks hold in `apply`.
    """

    def decorate(cls: type[T]) -> type[T]:
        for name in ("apply", "apply_at"):
            if name in vars(cls) and not checked:
                setattr(cls, name, internal_config()(vars(cls)[name]))
        return _as_pytree(dataclasses.dataclass(frozen=True, eq=compared)(cls))

    return decorate


def _as_pytree(cls: type[T]) -> type[T]:
    """Register a dataclass as a pytree whose leaves may be anything.

    `jax.tree_util.register_dataclass` does not serve: it calls `__init__`, whose checks would
    reject what a `tree.map` may put in place of the numbers (None, labels, shardings).
    """
    fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]
    data = [f.name for f in fields if not f.metadata.get("static")]
    code = [f.name for f in fields if f.metadata.get("static")]

    def flatten(one: T) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(one, n) for n in data], tuple(getattr(one, n) for n in code)

    def flatten_with_keys(one: T) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        leaves, aux = flatten(one)
        return [(GetAttrKey(n), x) for n, x in zip(data, leaves, strict=True)], aux

    def unflatten(aux: tuple[object, ...], leaves: Iterable[Value]) -> T:
        one = object.__new__(cls)
        for name, value in zip((*data, *code), (*leaves, *aux), strict=True):
            object.__setattr__(one, name, value)
        return one

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def static(default: object = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How the screen offers a kind, and what its slider sets.

    Attributes:
        does: the end of the sentence "This will ..."; "" if the kind is not on the menu.
        strength_name: the field that the slider sets, "" for none.
        strength: its value when a click adds the kind.
        low, high: the slider's ends.
        least: the smallest value allowed.
        given: the other arguments when a click adds the kind.
    """

    does: str = ""
    strength_name: str = ""
    strength: float | None = None
    low: float = 0.0
    high: float = 0.0
    least: float | None = None
    given: Mapping[str, Any] = dataclasses.field(default_factory=Params)


class Kind:
    """The base of every kind, for values, gradients and parameters alike."""

    acts_on: ClassVar[Literal["value", "gradient", "parameter"]]
    form: ClassVar[Form] = Form()

    @property
    def kind_name(self) -> str:
        """The name of its kind; for a part, the name of the whole's kind."""
        return type(self).__name__

    @classmethod
    def clicked(cls, strength: float | None, at: At) -> Self:
        """The perturbation that a click adds; `strength` defaults to that of the form."""
        form = cls.form
        given: Params = {**form.given, "at": at}
        if form.strength_name:
            given[form.strength_name] = form.strength if strength is None else strength
        return cls(**given)

    @property
    def tuned_to(self) -> float | None:
        """The number that the slider sets; None if it is not a single number."""
        name = self.form.strength_name
        return one_number(getattr(self, name)) if name else None

    def tuned(self, strength: float) -> Self:
        """A copy that differs only in the number that the slider sets.

        Raises:
            ValueError: the strength is not one number, or `strength` is below the least allowed.
        """
        if self.tuned_to is None:
            text = self.python(short=True)
            raise ValueError(f"{text} has no strength that is one number.")
        return self._tuned(strength)

    def _tuned(self, strength: float) -> Self:
        return dataclasses.replace(self, **{self.form.strength_name: strength})  # type: ignore[type-var]

    @property
    def switches(self) -> npt.NDArray[np.bool_] | None:
        """For a kind that switches units: which stay on, bool[units] or bool[rows, columns]."""
        return None

    def python(self, *, short: bool = False) -> str:
        """Python text that makes an equal perturbation, or "" if there is none.

        Args:
            short: write a text for reading instead: numbers are rounded, and an array or a
                function is named.

        Example:
            >>> import nnx_inspector as nni
            >>> nni.Mask([0.5, 1.0]).python(), nni.Mask([0.5, 1.0]).python(short=True)
            ('', 'nni.Mask(mask=float64[2])')
        """
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        values = {field: getattr(self, field.name) for field in fields}
        changed = {f.name: v for f, v in values.items() if not _is_default(v, f.default)}
        return self._written(type(self).__name__, [], changed, short=short)

    def _written(
        self, name: str, first: list[str], named: Mapping[str, object], *, short: bool
    ) -> str:
        ours = type(self).__module__.startswith("nnx_inspector")
        texts = {key: _argument_text(value, short) for key, value in named.items()}
        if not short and (not ours or "" in texts.values()):
            return ""
        parts = [*first, *(f"{key}={text}" for key, text in texts.items())]
        return f"{'nni.' * ours}{name}({', '.join(parts)})"


class Perturbation(Kind):
    """A kind that acts on a value: what a module returns or, with `at="input"`, receives."""

    at: At
    acts_on = "value"
    floating_only: ClassVar[bool] = True
    numbers: ClassVar[Mapping[str, float | None]] = {}
    """The fields that are a number, each with the smallest value allowed."""
    arrays: ClassVar[tuple[str, ...]] = ()
    """The fields that may be a number or an array."""

    def __post_init__(self) -> None:
        if self.at not in ("output", "input"):
            raise ValueError(f"at= must be 'output' or 'input', got {self.at!r}.")
        check_numbers(self, self.numbers)
        lists_as_arrays(self, self.arrays)

    def apply(self, x: jax.Array) -> jax.Array:
        """The perturbed array, of the same shape and dtype."""
        raise NotImplementedError

    def apply_at(self, x: jax.Array, name: str) -> jax.Array:
        """As `apply`, for an array with a name, on which random numbers depend."""
        return self.apply(x)

    def only(self, units: UnitIndex = None, *, axis: int = -1, example: int | None = None) -> Part:
        """The same perturbation of chosen units, or of one example; the rest stays as it is.

        Other units, or another example, compile nothing. With both, the units of that example
        change. `.only([0], axis=1).only([2], axis=-2)` chooses along two axes.

        Args:
            units: the indices of units, features, channels or heads, or a boolean for each.
            axis: the axis of the units in the array as the module sees it; -2 for the heads of the
                query, key and value of an `nnx.MultiHeadAttention`.
            example: an index along axis 0. Under a vmap over examples a module sees no such axis.

        Example:
            >>> import nnx_inspector as nni
            >>> nni.Zero().only([3], axis=-2)
            Zero().only(units=[3], axis=-2)
        """
        return Part(self, units, example, axis)

    def why_not(self, x: jax.ShapeDtypeStruct) -> Misfit | None:
        """Why it does not fit such an array, or None; `places.misfit_error` is what is raised."""
        if self.floating_only and not jnp.issubdtype(x.dtype, jnp.inexact):
            return TypeError(f"{type(self).__name__} needs floating-point values")
        return first_misfit(self, (*self.numbers, *self.arrays), x)


UnitIndex = int | Sequence[int] | Sequence[bool] | npt.NDArray[Any] | jax.Array | None
"""Units along an axis: one index, several, or a boolean for each unit."""


class PartBase(Kind):
    """What the part of a value and that of a parameter share."""

    whole: Value
    units: Value
    example: Value
    axis: int

    def __post_init__(self) -> None:
        if self.units is None and self.example is None:
            raise ValueError("only() takes units=, example= or both.")
        if isinstance(self.axis, bool) or not isinstance(self.axis, (int, np.integer)):
            raise TypeError(f"axis= must be an integer, got {self.axis!r}.")
        for name, rank in (("units", 1), ("example", 0)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _indices(value, name, rank))

    @property
    def kind_name(self) -> str:
        return self.whole.kind_name

    @property
    def form(self) -> Form:  # type: ignore[override]
        return self.whole.form

    @property
    def tuned_to(self) -> float | None:
        return self.whole.tuned_to

    def _tuned(self, strength: float) -> Self:
        return dataclasses.replace(self, whole=self.whole.tuned(strength))  # type: ignore[type-var]

    def python(self, *, short: bool = False) -> str:
        whole = self.whole.python(short=short)
        return f"{whole}{self._chosen()}" if whole else ""

    def __repr__(self) -> str:
        return f"{self.whole!r}{self._chosen()}"

    def _chosen(self) -> str:
        named: Params = {}
        if self.units is not None:
            units = np.asarray(self.units)
            named["units"] = (np.flatnonzero(units) if units.dtype == np.bool_ else units).tolist()
            named |= {} if self.axis == -1 else {"axis": self.axis}
        named |= {} if self.example is None else {"example": int(self.example)}
        return f".only({', '.join(f'{name}={value}' for name, value in named.items())})"

    @internal_config()
    def where(self, shape: tuple[int, ...]) -> jax.Array:
        """True where an array of this shape is perturbed; it broadcasts to the shape."""
        on = jnp.ones((1,) * len(shape), jnp.bool_)
        if self.units is not None:
            on &= _mask_along(self.units, shape, self.axis)
        return on if self.example is None else on & _mask_along(self.example, shape, 0)

    def misfit(self, shape: tuple[int, ...]) -> Misfit | None:
        """Why an array has no such part, as far as the numbers of all its parts are known."""
        if isinstance(self.whole, PartBase) and (why := self.whole.misfit(shape)) is not None:
            return why
        for value, axis, what in ((self.units, self.axis, "unit"), (self.example, 0, "example")):
            if value is None:
                continue
            if not -len(shape) <= axis < len(shape):
                return ValueError(f"it has no axis {axis} of {what}s")
            count = shape[axis]
            if value.dtype == np.bool_:
                if value.shape != (count,):
                    return ValueError(
                        f"a mask of shape {value.shape} does not fit the {count} {what}s along its "
                        f"axis {axis}"
                    )
            elif (known := _known(value)) is not None:
                beyond = [int(i) for i in known if not -count <= i < count]
                if beyond:
                    return ValueError(
                        f"it has {count} {what}s along axis {axis}, so there is no {what} "
                        f"{beyond[0]}"
                    )
        return None

    def is_out_of_bounds(self, shape: tuple[int, ...]) -> Any:
        """Whether an array has no such part, bool[]; False if `misfit` knows."""
        found = self.whole.is_out_of_bounds(shape) if isinstance(self.whole, PartBase) else False
        for value, axis in ((self.units, self.axis), (self.example, 0)):
            if jit.is_tracer(value) and value.dtype != jnp.bool_ and _known(value) is None:
                count = shape[axis]
                found = found | jnp.any((value < -count) | (value >= count))
        return found


def _known(numbers: object) -> list[Value] | None:
    """The numbers, where `vmap` or `grad` maps arrays and not those of a program; None if not."""
    if isinstance(numbers, jax.ShapeDtypeStruct):
        return None
    origin = jit.outer_value(numbers)
    return None if origin.program is not None else np.ravel(origin.value).tolist()


@kind(checked=True)
class Part(PartBase, Perturbation):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A perturbation of a part of a value; see `Perturbation.only`, which makes it."""

    whole: Value
    units: Value = None
    example: Value = None
    axis: int = static(-1)
    __repr__ = PartBase.__repr__

    @property
    def at(self) -> At:  # type: ignore[override]
        return self.whole.at

    @property
    def acts_on(self) -> Any:  # type: ignore[override]
        return self.whole.acts_on

    def apply(self, x: jax.Array) -> jax.Array:
        return self.apply_at(x, "")

    def apply_at(self, x: jax.Array, name: str) -> jax.Array:
        y = self.whole.apply_at(x, name)
        return keeping_sharding(lambda x, y, one: jnp.where(one.where(x.shape), y, x), x, y, self)

    def why_not(self, x: jax.ShapeDtypeStruct) -> Misfit | None:
        return self.whole.why_not(x) or self.misfit(x.shape)


def _indices(value: object, name: str, rank: int) -> Value:
    """Indices (or booleans) as one array; traced ones pass."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    several = isinstance(value, (list, tuple))
    traced = any(isinstance(one, jax.Array) for one in (value if several else (value,)))
    array: Value = jnp.asarray(value) if traced else np.asarray(value)
    array = array.reshape(1) if rank == 1 and array.ndim == 0 else array
    fits = array.dtype.kind in ("iu" if rank == 0 else "iub") and array.ndim == rank
    if not fits or not array.size:
        what = "indices, or a boolean for each unit" if rank else "one index"
        raise TypeError(f"{name}= takes {what}, got {value!r}.")
    return array if traced or array.dtype == np.bool_ else array.astype(np.int32)


def _mask_along(chosen: object, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Whether each place along an axis is chosen. A traced index beyond it chooses nothing."""
    count = shape[axis]
    on = jnp.asarray(chosen)
    if on.dtype != jnp.bool_:
        wanted = jnp.where(on < 0, on + count, on).reshape(-1, 1)
        on = (wanted == jnp.arange(count, dtype=on.dtype).reshape(1, -1)).any(0)
    return on.reshape([count if i == axis % len(shape) else 1 for i in range(len(shape))])


def is_random(one: object) -> bool:
    """Whether the effect of a perturbation on an array depends on the array's name."""
    if isinstance(one, PartBase):
        return is_random(one.whole)
    of = getattr(type(one), "apply_at", None)
    return of is not Perturbation.apply_at


def first_misfit(one: object, names: Iterable[str], x: Value) -> Misfit | None:
    """Why one of the named fields, the first that fails, does not fit an array; or None."""
    for name in names:
        value = getattr(one, name)
        if value is None:
            continue
        if not broadcasts(jnp.shape(value), x.shape):
            return ValueError(f"{name}= of shape {jnp.shape(value)} does not broadcast to it")
        if _dtype_rank(dtype_of(value)) > _dtype_rank(x.dtype):
            return TypeError(f"{name}= of {dtype_of(value)} cannot be cast to {x.dtype}")
    return None


_DTYPE_RANKS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _dtype_rank(dtype: DTypeLike) -> int:
    """The rank of a dtype's kind of number; each kind includes those of lower rank."""
    return next(i for i, kind in enumerate(_DTYPE_RANKS) if jnp.issubdtype(dtype, kind))


def dtype_of(value: object) -> Any:
    return jax.dtypes.canonicalize_dtype(jnp.result_type(value))


def lists_as_arrays(one: object, names: Iterable[str]) -> None:
    """Turn the named fields of a frozen object from lists into arrays: a list has many leaves."""
    for name in names:
        if isinstance(value := getattr(one, name), (list, tuple)):
            object.__setattr__(one, name, np.asarray(value))


def check_numbers(one: object, numbers: Mapping[str, float | None]) -> None:
    """Require the named fields of a frozen object to be numbers, and convert them to floats."""
    for name, low in numbers.items():
        number = check_number(getattr(one, name), type(one).__name__, low=low)
        object.__setattr__(one, name, number)


def check_number(value: Value, kind: str, *, low: float | None = None) -> Any:
    """A finite float32 number as a float. Arrays and traced values, which may be vmapped, pass."""
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


def cast_like(value: object, x: jax.Array) -> jax.Array:
    return jnp.asarray(value).astype(x.dtype)


def one_number(value: float) -> float | None:
    """The value as a float if it is one real number, otherwise None."""
    if isinstance(value, bool) or shape_of(value) != ():
        return None
    if isinstance(value, (int, float)):
        return float(value)
    return float(value) if is_array(value) and value.dtype.kind in "fiu" else None


def _is_default(value: object, default: object) -> bool:
    plain = isinstance(value, (str, int, tuple, NoneType))  # a strength is always written
    return plain and type(value) is type(default) and value == default


def _argument_text(value: Value, short: bool) -> str:
    """A value as Python text; without `short`, "" if there is none."""
    if isinstance(value, (bool, int, NoneType)):
        return repr(value)
    if isinstance(value, float):
        return _rounded_text(value) if short else repr(value) if math.isfinite(value) else ""
    if isinstance(value, str):
        return repr(value) if short else json.dumps(value)
    if isinstance(value, np.dtype):
        return value.name if short else json.dumps(value.name)
    if isinstance(value, tuple):
        inner = [_argument_text(one, short) for one in value]
        return "" if "" in inner else f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    if is_array(value) and value.shape == () and value.dtype.kind in "fiub":
        return _argument_text(value.item(), short)
    if not short:
        return ""
    if is_array(value):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    name = own_attribute(value, "__name__") or own_attribute(value, "name")
    return name if isinstance(name, str) else type(value).__name__


def _rounded_text(number: float) -> str:
    text = f"{number:.6g}"
    return text if text != f"{number:.0f}" else f"{number:.1f}"
