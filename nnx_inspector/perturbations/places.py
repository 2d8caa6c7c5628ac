"""The rows and places by which a program can be perturbed, and the setting of one pass.

For an Inspector, a site's `Zero` or `Scale` is one row of two numbers, (mode, strength), read by
`apply_row`: it is switched and tuned without compiling again. If a site has several, their factors
multiply, and Zero wins. A place is static (its sites, its kind, the shapes of its numbers), so
equal places share a program; whether it is on, and its numbers, are data. Invariant: a row of zeros
and a place that is off leave the value bitwise as it is, and switching or tuning never changes the
program. At a site the row acts first, then the places in their order. Knows no program, no model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from nnx_inspector._compat import jaxprs, jit
from nnx_inspector._compat.configuration import internal_config
from nnx_inspector._compat.native import (
    APPLY,
    call,
    can_call_everywhere,
    register_cpu_lowering,
    with_x64_of_operands,
)
from nnx_inspector._compat.sharding import keeping_sharding
from nnx_inspector.errors import InspectorError
from nnx_inspector.perturbations.activations import Apply, Scale, Zero
from nnx_inspector.perturbations.base import Misfit, PartBase, Perturbation
from nnx_inspector.perturbations.parameters import ParameterPerturbation
from nnx_inspector.program.marks import OUTPUT
from nnx_inspector.program.structure import describe, is_observable
from nnx_inspector.typing import Array, DTypeLike, Treedef, Value

T = TypeVar("T")
PARAMETER = "parameter"
Data = tuple[np.ndarray, ...]
"""The data of a place in one pass: whether it is on, bool[], then its numbers and arrays."""


@dataclasses.dataclass(frozen=True)
class Place:
    """One perturbation that a program has room for. Equal places are the same code.

    Attributes:
        sites: the site keys that it acts on; for a parameter kind, the keys of the parameters.
        rows: the layer of a stacked site (one for each scan, outermost first); () for all layers.
        treedef: the tree structure of the perturbation, with its static fields.
        avals: the shapes and dtypes of its numbers and arrays.
        at: what it acts on.
    """

    sites: tuple[str, ...]
    rows: tuple[int, ...]
    treedef: Treedef
    avals: tuple[jax.ShapeDtypeStruct, ...]
    at: Literal["output", "input", "parameter"]

    def off_data(self) -> Data:
        """Data that leave the place off: False, and zeros for its numbers."""
        return (np.zeros((), np.bool_), *(np.zeros(a.shape, a.dtype) for a in self.avals))

    def data(self, perturbation: object, *, on: bool) -> Data:
        """The data that make this place do what `perturbation` does."""
        return (np.array(on, np.bool_), *data_of(perturbation))


def data_of(perturbation: object) -> Data:
    """The numbers and arrays of a perturbation, in the dtypes that jax computes in."""
    # only NumPy: within a trace, jnp.asarray turns a number into a tracer
    return tuple(
        np.asarray(x, jax.dtypes.canonicalize_dtype(jnp.result_type(x)))
        for x in jax.tree.leaves(perturbation)
    )


def place_of(perturbation: Any, sites: Sequence[str], rows: Sequence[int] = ()) -> Place:
    """The place that a perturbation with known numbers needs at these sites (or parameters).

    `rows` is the layer of a stacked site, () for all layers.
    """
    avals = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in data_of(perturbation))
    return Place(
        tuple(sites), tuple(rows), jax.tree.structure(perturbation), avals, perturbation.at
    )


def apply_if(
    on: object, change: Callable[[jax.Array, T], jax.Array], x: jax.Array, one: T
) -> Value:
    """`change(x, one)`, of the same shape and dtype, if `on` is true, otherwise `x` itself.

    Only the chosen side is computed, forward and backward: the result of the other side (such as a
    NaN) reaches neither the value nor its gradient. If `on` differs between examples of a vmap,
    both are computed.

    Args:
        one: the perturbation, a pytree; `change` closes over none of its arrays.
    """
    if not jit.is_tracer(on):  # lax.cond would compile again in every eager call
        return apply_with_sharding(change, x, one) if bool(on) else x

    def chosen(x: jax.Array, on: object, one: T) -> jax.Array:
        def changed(x: jax.Array) -> jax.Array:
            y = change(x, one)
            # within shard_map both sides must vary over the same axes; zeros alone do not vary
            return jnp.where(jnp.ones_like(x, jnp.bool_), y, x) if jaxprs.varying_axes(x) else y

        return jax.lax.cond(on, changed, _identity, x)

    return chosen(x, on, one) if _runs_user_function(one) else keeping_sharding(chosen, x, on, one)


def apply_with_sharding(change: Callable[[jax.Array, T], jax.Array], x: jax.Array, one: T) -> Value:
    """`change(x, one)`, which lies on the devices as `x` does."""
    return change(x, one) if _runs_user_function(one) else keeping_sharding(change, x, one)


def _runs_user_function(one: object) -> bool:
    """Whether it runs a function of the user's, which may name explicit axes of a mesh."""
    while isinstance(one, PartBase):
        one = one.whole
    return isinstance(one, Apply)


def _identity(x: jax.Array) -> jax.Array:
    return x


def misfit_error(one: Value, site: str, x: Value) -> Misfit | None:
    """The error to raise if a perturbation does not fit an array of a site, or a parameter."""
    why = one.why_not(jax.ShapeDtypeStruct(x.shape, x.dtype))
    if why is None:
        return None
    return type(why)(f"{one.kind_name} at {site or '(root)'!r}, {describe(x)}: {why}.")


def nan_if_out_of_bounds(
    one: Perturbation | ParameterPerturbation,
) -> Callable[[jax.Array, str], jax.Array]:
    """What a perturbation does to an array with a name. If a traced index is beyond its axis, which
    cannot raise, the array becomes NaN, as in `jnp.take`.
    """
    change = one.apply if isinstance(one, ParameterPerturbation) else one.apply_at

    def changed(x: jax.Array, name: str) -> jax.Array:
        y = change(x, name)
        lacking = one.is_out_of_bounds(x.shape) if isinstance(one, PartBase) else False
        return y if lacking is False else jnp.where(lacking, _fill_value(x.dtype), y)

    return changed


@internal_config()
def _fill_value(dtype: DTypeLike) -> jax.Array:
    """What jax fills in for an element that does not exist: NaN for floats."""
    return jnp.take(jnp.zeros(1, dtype), 1, mode="fill")


def misfit_clause(why: Misfit | None) -> str:
    """A refusal as a clause; "" if there is none."""
    return str(why or "").removesuffix(".")


def no_array_error(site: str, part: str) -> TypeError:
    """The error for a module that returns or receives no array."""
    verb = "returns" if part == OUTPUT else "receives"
    return TypeError(f"{site or '(root)'!r} {verb} no array, so there is nothing to perturb.")


def _no_rows() -> Mapping[str, tuple[float, float]]:
    return MappingProxyType({})


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """All perturbations of one pass. Programs depend only on `places`.

    Attributes:
        rows: for a site, the (mode, strength) of its `Zero` and `Scale` on outputs, for which every
            program has room; see `row_of`. They act before the site's places.
        places, data: the other places, in the order in which they act, and whether each is on, with
            its numbers.
    """

    rows: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=_no_rows)
    places: tuple[Place, ...] = ()
    data: tuple[Data, ...] = ()

    @property
    def active(self) -> bool:
        return bool(self.rows) or any(bool(d[0]) for d in self.data)

    def at(self, places: Sequence[Place]) -> list[Data]:
        """The data for a program with these places; perturbations without a place are left out."""
        rest = list(zip(self.places, self.data, strict=True))
        out: list[Data] = []
        for place in places:
            index = next((i for i, (known, _) in enumerate(rest) if known == place), None)
            out.append(place.off_data() if index is None else rest.pop(index)[1])
        return out

    @property
    def sites(self) -> set[str]:
        """The sites whose output is changed directly."""
        pairs = zip(self.places, self.data, strict=True)
        on = (place for place, data in pairs if bool(data[0]) and place.at == "output")
        return {*self.rows, *(site for place in on for site in place.sites)}

    def clean(self) -> Setting:
        """The same places, everything off: the same program."""
        off = tuple((np.zeros((), np.bool_), *numbers) for _, *numbers in self.data)
        return Setting(places=self.places, data=off)

    def is_equivalent(self, other: Setting) -> bool:
        """Whether two settings have the same effect and the same program."""
        if self.places != other.places or dict(self.rows) != dict(other.rows):
            return False
        mine, others = (jax.tree.leaves(s.data) for s in (self, other))
        return all(a is b or a.tobytes() == b.tobytes() for a, b in zip(mine, others, strict=True))

    def has_same_effect(self, other: Setting) -> bool:
        """Whether two settings have the same effect, ignoring places that are off."""
        return self._without_off_places().is_equivalent(other._without_off_places())

    def _without_off_places(self) -> Setting:
        """The setting without the places that are off."""
        pairs = zip(self.places, self.data, strict=True)
        on = [(place, data) for place, data in pairs if bool(data[0])]
        return Setting(self.rows, tuple(p for p, _ in on), tuple(d for _, d in on))


def has_room(places: Sequence[Place], wanted: Sequence[Place]) -> bool:
    """Whether a program with `places` can do all that is `wanted`, in the same order."""
    rest = iter(places)
    return all(any(place == one for place in rest) for one in wanted)


CLEAN = Setting()
"""No perturbation, and room for rows only."""


# --------------------------------------------------------------------- rows

OFF, ZERO, SCALE = range(3)
ROW = 2
"""The number of entries of a row: mode and strength."""

RowKind = Zero | Scale
"""The kinds that fit a row; on outputs, every program has a row for every site."""


AnyPerturbation = Perturbation | ParameterPerturbation
"""Any kind, its numbers known on the host."""


def require_perturbation(value: object) -> AnyPerturbation:
    """Return `value`; raise if it is not a perturbation with known numbers."""
    if isinstance(value, type) and issubclass(value, AnyPerturbation):
        one = value.clicked(None, OUTPUT).python(short=True) if value.form.does else ""
        raise TypeError(f"Pass an instance: {one or f'nni.{value.__name__}(...)'}.")
    if not isinstance(value, AnyPerturbation):
        raise TypeError(
            f"A perturbation must be nni.Zero(), nni.Scale(factor) or another kind, "
            f"got {type(value).__name__}."
        )
    if any(map(jit.is_tracer, jax.tree.leaves(value))):
        raise InspectorError(
            f"{type(value).__name__} got a traced value, but its numbers are read on the host. "
            f"Use it outside jit (other numbers compile nothing), or pass the perturbation as an "
            f"argument: nni.perturbed(f)(perturbations, ...)."
        )
    return value


def fits_row(value: object) -> TypeGuard[RowKind]:
    """Whether a value is a perturbation that fits a row."""
    if isinstance(value, Scale):
        return value.at == OUTPUT and isinstance(value.factor, float)
    return isinstance(value, Zero) and value.at == OUTPUT


def row_of(perturbation: RowKind) -> tuple[float, float]:
    if isinstance(perturbation, Zero):
        return (ZERO, 0.0)
    return (SCALE, float(perturbation.factor))


def rows_of(keys: Sequence[str], rows: Mapping[str, tuple[float, float]]) -> np.ndarray:
    """The rows of some sites as programs read them, float32[sites, ROW]; OFF for sites without."""
    found = np.zeros((len(keys), ROW), np.float32)
    for index, key in enumerate(keys):
        found[index] = rows.get(key, (OFF, 0.0))
    return found


def combine_rows(perturbations: Iterable[RowKind]) -> tuple[float, float]:
    """One row for several perturbations of one site: Zero wins, factors multiply."""
    mode, strength = float(OFF), 1.0
    for one in perturbations:
        kind, factor = row_of(one)
        if kind == ZERO or mode == ZERO:
            mode, strength = float(ZERO), 0.0
        else:
            mode, strength = float(SCALE), strength * factor
    return (mode, strength) if mode != OFF else (float(OFF), 0.0)


@internal_config()
def apply_row(x: Array, rows: Value, index: int) -> Array:
    """`x` perturbed by one of some rows, float32[..., 2]; keeps shape and dtype.

    A scaled integer is rounded towards zero, like a cast. The rows may be traced.
    """
    if not is_observable(x):
        return x
    x = jnp.asarray(x)
    if x.dtype == np.float32 and can_call_everywhere():
        return _apply_row_p.bind(x, jnp.asarray(rows), index=index)
    return _scaled_by_row(x, rows, index=index)


def _scaled_by_row(x: jax.Array, rows: jax.Array, *, index: int) -> jax.Array:
    mode, strength = rows[index]
    if jnp.issubdtype(x.dtype, jnp.inexact):
        scaled = x * strength.astype(x.dtype)
    else:
        # jax promotes no integers of four bits or fewer
        scaled = (x.astype(strength.dtype) * strength).astype(x.dtype)
    # The outer choice is between two arrays, so XLA computes the result once. A choice between an
    # array and a number would be repeated, and compiled, in every kernel that reads it.
    return jnp.where(mode == OFF, x, jnp.where(mode == ZERO, jnp.zeros_like(x), scaled))


# A primitive, so that the platform chooses its program: on a CPU it is a function in C, which
# changes the array where it lies, or leaves it alone. It is linear in the array, so its tangent and
# its cotangent go through itself; only a derivative by a strength is that of the formula in jax.
_apply_row_p = Primitive("nnx_inspector_apply")
_apply_row_p.def_impl(jax.jit(_scaled_by_row, static_argnames="index"))
_apply_row_p.def_abstract_eval(lambda x, rows, *, index: x)
mlir.register_lowering(
    _apply_row_p, mlir.lower_fun(with_x64_of_operands(_scaled_by_row), multiple_results=False)
)
register_cpu_lowering(
    _apply_row_p,
    _scaled_by_row,
    lambda x, rows, **how: call(APPLY, [x], x, rows, in_place=True, **how)[0],
)


def _linearize_apply(
    moves: Sequence[bool], x: Array, rows: Array, *, index: int
) -> jaxprs.Linearized:
    if moves[1]:  # differentiated by a strength
        out, tangent = jax.linearize(functools.partial(_scaled_by_row, index=index), x, rows)
        return out, True, lambda *ts: tangent(*map(ad.instantiate_zeros, ts))
    out = _apply_row_p.bind(x, rows, index=index)
    return out, moves[0], lambda t, _: _apply_row_p.bind(t, rows, index=index) if moves[0] else t


def _apply_transpose(ct: Array, x: object, rows: Array, *, index: int) -> Value:
    return ct if type(ct) is ad.Zero else _apply_row_p.bind(ct, rows, index=index), None


def _apply_batch(args: Sequence[Value], dims: Sequence[int | None], *, index: int) -> Value:
    if dims[1] is None:
        return _apply_row_p.bind(*args, index=index), dims[0]
    return jax.vmap(functools.partial(_scaled_by_row, index=index), in_axes=dims)(*args), 0


jaxprs.register_linearization(_apply_row_p, _linearize_apply)
ad.primitive_transposes[_apply_row_p] = _apply_transpose
batching.primitive_batchers[_apply_row_p] = _apply_batch
