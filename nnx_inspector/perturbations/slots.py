"""Where a program can be told to perturb: its places, and what is done at them in one pass.

A place is static (which sites, which kind, shapes of its numbers), so that programs are shared by
equal places; whether it is on, and its numbers, are data. Invariant: a place that is off leaves
the value as it is, and switching or tuning never changes the program. On one site the rows act
first, then the places in their order. Knows no program and no model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from nnx_inspector._compat import jaxprs, jit
from nnx_inspector.perturbations.parameters import ParameterPerturbation
from nnx_inspector.perturbations.values import Perturbation

PARAMETER = "parameter"
Data = tuple[np.ndarray, ...]
"""What a place reads in one pass: whether it is on, bool[], then its numbers and arrays."""


@dataclasses.dataclass(frozen=True)
class Place:
    """One perturbation that a program has room for. Equal places are the same code.

    Attributes:
        sites: the site keys that it acts on; of a parameter kind the parameters' keys.
        rows: the layer of a stacked site (of each scan around it, outermost first); () for all.
        treedef: of the perturbation, with what is static in it.
        avals: of its numbers and arrays.
        at: what it acts on.
    """

    sites: tuple[str, ...]
    rows: tuple[int, ...]
    treedef: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]
    at: Literal["output", "input", "parameter"]

    def nothing(self) -> Data:
        """The data of a place that is off and belongs to nobody."""
        return (np.zeros((), np.bool_), *(np.zeros(a.shape, a.dtype) for a in self.avals))

    def data(self, perturbation: Any, *, on: bool) -> Data:
        """The data that make this place do what `perturbation` does."""
        return (np.array(on, np.bool_), *data_of(perturbation))


def data_of(perturbation: Any) -> Data:
    """The numbers and arrays of a perturbation, in the dtypes that jax computes in."""
    # by NumPy alone: within a trace jnp.asarray makes a tracer of a number
    return tuple(
        np.asarray(x, jax.dtypes.canonicalize_dtype(jnp.result_type(x)))
        for x in jax.tree.leaves(perturbation)
    )


def place_of(perturbation: Any, sites: Sequence[str], rows: Sequence[int] = ()) -> Place:
    """The place that a perturbation needs.

    Args:
        perturbation: of values, gradients or parameters; its numbers are known.
        sites: the keys of the sites (parameters) that it acts on.
        rows: which layer of a stacked site, () for all.
    """
    avals = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in data_of(perturbation))
    return Place(
        tuple(sites), tuple(rows), jax.tree.structure(perturbation), avals, perturbation.at
    )


def applied(place: Place, on: Any, leaves: Sequence[Any], x: jax.Array, name: str) -> jax.Array:
    """`x` as a place changes it where `on` is true, else `x` itself; see `switched`.

    Args:
        place: what is done.
        on: bool[], traced or not; under vmap the same for every example.
        leaves: the numbers and arrays of the perturbation, as in `Setting.data` behind `on`.
        x: an array as the module sees it (under vmap one example).
        name: of the array, on which random numbers depend: `"site/call/number"`.

    Returns:
        An array of the same shape and dtype.
    """
    one: Perturbation | ParameterPerturbation = jax.tree.unflatten(place.treedef, leaves)

    def change(x: jax.Array) -> jax.Array:
        if isinstance(one, ParameterPerturbation):
            return one.apply(x, name)
        return one.apply_at(x, name)

    return switched(on, change, x)


def switched(on: Any, change: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`change(x)` where `on` is true, else `x` itself.

    Only the side that is taken is computed, forward and backward: what the other would make of the
    value (a NaN, say) reaches neither the value nor its gradient.

    Args:
        on: bool[], traced or not. Where a vmap makes it differ, both sides are computed.
        change: gives an array of the same shape and dtype.
        x: the array.
    """
    if not jit.is_tracer(on):  # lax.cond would compile anew in every eager call
        return change(x) if bool(on) else x

    def changed(x: jax.Array) -> jax.Array:
        y = change(x)
        # within shard_map both sides must differ between devices alike: zeros do not by themselves
        return jnp.where(jnp.ones_like(x, jnp.bool_), y, x) if jaxprs.varying_axes(x) else y

    return jax.lax.cond(on, changed, _as_it_is, x)


def _as_it_is(x: jax.Array) -> jax.Array:
    return x


def _no_rows() -> Mapping[str, tuple[float, float]]:
    return MappingProxyType({})


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """What is done in one pass. Programs depend on `places` and `parameters` alone.

    Attributes:
        rows: for a site the (mode, strength) of its `Zero` and `Scale` on outputs, for which every
            program has room; see `perturbation.row_of`. They act before the site's places.
        places: what the program has room for besides, in the order in which they act.
        data: for each of them whether it is on, and its numbers.
        parameters: places of parameter kinds, apart: only a program of our own, which takes the
            model's state as an argument, can replace parameters for one pass.
        parameter_data: likewise.
    """

    rows: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=_no_rows)
    places: tuple[Place, ...] = ()
    data: tuple[Data, ...] = ()
    parameters: tuple[Place, ...] = ()
    parameter_data: tuple[Data, ...] = ()

    @property
    def active(self) -> bool:
        """Whether anything is on."""
        return bool(self.rows) or any(bool(d[0]) for d in (*self.data, *self.parameter_data))

    def at(self, places: Sequence[Place]) -> list[Data]:
        """The data for a program with these places: what it has no place for, it does not do."""
        rest = list(zip(self.places, self.data, strict=True))
        out: list[Data] = []
        for place in places:
            index = next((i for i, (known, _) in enumerate(rest) if known == place), None)
            out.append(place.nothing() if index is None else rest.pop(index)[1])
        return out

    @property
    def sites(self) -> set[str]:
        """The sites whose output is changed directly."""
        pairs = zip(self.places, self.data, strict=True)
        on = (place for place, data in pairs if bool(data[0]) and place.at == "output")
        return {*self.rows, *(site for place in on for site in place.sites)}

    @property
    def code(self) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
        """What a program is compiled for; hashable."""
        return self.places, self.parameters

    def clean(self) -> Setting:
        """The same places, everything off: the same program."""
        return dataclasses.replace(
            self,
            rows=_no_rows(),
            data=tuple(_off(d) for d in self.data),
            parameter_data=tuple(_off(d) for d in self.parameter_data),
        )

    def is_like(self, other: Setting) -> bool:
        """Whether the same is done, by the same program."""
        if self.code != other.code or dict(self.rows) != dict(other.rows):
            return False
        mine, others = (jax.tree.leaves((s.data, s.parameter_data)) for s in (self, other))
        return all(a is b or a.tobytes() == b.tobytes() for a, b in zip(mine, others, strict=True))

    def does_as(self, other: Setting) -> bool:
        """Whether the same is done, whatever else the two have places for."""
        return self._done().is_like(other._done())

    def _done(self) -> Setting:
        """Without the places at which nothing is done."""
        values = [(p, d) for p, d in zip(self.places, self.data, strict=True) if bool(d[0])]
        parameters = zip(self.parameters, self.parameter_data, strict=True)
        of_parameters = [(p, d) for p, d in parameters if bool(d[0])]
        return Setting(
            rows=self.rows,
            places=tuple(place for place, _ in values),
            data=tuple(data for _, data in values),
            parameters=tuple(place for place, _ in of_parameters),
            parameter_data=tuple(data for _, data in of_parameters),
        )

    def without_parameters(self) -> Setting:
        """What of it acts on values and gradients."""
        return dataclasses.replace(self, parameters=(), parameter_data=())


def has_room(places: Sequence[Place], wanted: Sequence[Place]) -> bool:
    """Whether a program with `places` can do all that is wanted, in its order."""
    rest = iter(places)
    return all(any(place == one for place in rest) for one in wanted)


def _off(data: Data) -> Data:
    return (np.zeros((), np.bool_), *data[1:])


CLEAN = Setting()
"""Nothing is done, and there is room for nothing but rows."""
