"""What is kept of a value besides its summary: the array, a reduction of it, figures a unit.

Invariant: what is kept of a value does not change it; the user may differentiate it. What cannot
be added up is not kept where a call runs a number of times that only the data knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from nnx_inspector.taps import INPUT, OUTPUT, describe
from nnx_inspector.units import MAX_UNITS, Units, measure_units

Reduce = Callable[[jax.Array], Any]
"""Of an array makes arrays: what to keep of it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """What was kept of one array.

    Attributes:
        value: the array, or what a reduction made of it; None where nothing was asked for.
        units: figures for each unit of an axis; None where nothing was asked for, or the array
            has no such axis.
    """

    value: Any = None
    units: Units | None = None


@dataclasses.dataclass(frozen=True)
class Keep:
    """What to keep. False where that is nothing.

    Attributes:
        values: whether to keep the arrays, or what to keep of each.
        units: the axis whose units are measured, or None.
        parts: of which marks.
        sites: of which sites; None for all.
    """

    values: bool | Reduce = False
    units: int | None = None
    parts: tuple[str, ...] = (OUTPUT, INPUT)
    sites: tuple[str, ...] | None = None

    def __bool__(self) -> bool:
        return bool(self.values) or self.units is not None

    def keeps(self, site: str, part: str) -> bool:
        """Whether anything is kept of a mark."""
        return bool(self) and part in self.parts and (self.sites is None or site in self.sites)

    def additive(self) -> Keep:
        """The same without what does not add up."""
        return dataclasses.replace(self, values=False)

    def of(self, x: jax.Array, *, site: str, mapped: int = 0) -> Kept:
        """What is kept of an array, whose first `mapped` axes are those of a vmap."""
        if self.sites is not None and site not in self.sites:
            return Kept()
        value: Any = None
        if callable(self.values):
            try:
                value = self.values(x)
            except Exception as error:
                error.add_note(f"nnx_inspector: in values= at site {site!r}, of {describe(x)}.")
                raise
        elif self.values:
            value = x
        return Kept(value, self._units(jax.lax.stop_gradient(x), mapped))

    def _units(self, x: jax.Array, mapped: int) -> Units | None:
        if self.units is None or not -(x.ndim - mapped) <= self.units < x.ndim - mapped:
            return None
        axis = self.units if self.units < 0 else self.units + mapped
        return measure_units(x, axis=axis) if x.shape[axis] <= MAX_UNITS else None


NOTHING = Keep()
"""Nothing besides summaries."""
