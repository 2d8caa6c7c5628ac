"""What is done at the marks of a traced function: what is measured, kept and perturbed.

Invariant: a plan holds functions and arrays, never a model, and equal plans share programs. Does
not run anything; `instrument` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from nnx_inspector._compat.configuration import internal_config
from nnx_inspector.errors import add_note
from nnx_inspector.program.marks import INPUT, OUTPUT
from nnx_inspector.program.structure import describe
from nnx_inspector.stats.array_stats import Sample
from nnx_inspector.stats.summarize import merge_in_trace
from nnx_inspector.stats.summary import Summary
from nnx_inspector.stats.units import MAX_UNITS, Units, measure_units, merge_units
from nnx_inspector.typing import Function, PyTree, Value

Reduce = Function
"""A function of an array that returns the arrays to keep."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeptArray:
    """What was kept of one array.

    Attributes:
        value: the array, or the result of a reduction; None if not wanted.
        units: figures for each unit of an axis; None if not wanted, or if the array has no such
            axis or more than `MAX_UNITS` units.
    """

    value: Value = None
    units: Units | None = None


@dataclasses.dataclass(frozen=True)
class Keep:
    """What to keep of marked arrays; false if nothing.

    Attributes:
        values: whether to keep the arrays, or a function of what to keep of each.
        units: the axis whose units are measured, or None.
        parts: the parts (of calls) whose marks are kept.
        sites: the sites whose marks are kept; None for all.
        counts: whether `values` is a function that also takes which positions count.
    """

    values: bool | Reduce = False
    units: int | None = None
    parts: tuple[str, ...] = (OUTPUT, INPUT)
    sites: tuple[str, ...] | None = None
    counts: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.units, bool) or not isinstance(self.units, int | np.integer | None):
            raise TypeError(
                f"units= takes the number of an axis, -1 for the last, got {self.units!r}."
            )
        if not (isinstance(self.values, bool | np.bool_) or callable(self.values)):
            raise TypeError(
                f"values= takes True, False or a function of one array, got {self.values!r}; "
                f"only= chooses the sites."
            )

    def __bool__(self) -> bool:
        return bool(self.values) or self.units is not None

    def keeps(self, site: str, part: str) -> bool:
        """Whether anything is kept of a mark."""
        return bool(self) and part in self.parts and (self.sites is None or site in self.sites)

    def without_values(self) -> Keep:
        """The same without values, which do not add up over iterations."""
        return dataclasses.replace(self, values=False)

    def of(
        self, x: jax.Array, where: jax.Array | None = None, *, site: str, mapped: int = 0
    ) -> KeptArray:
        """What is kept of an array whose first `mapped` axes come from vmaps, and whose positions
        count where `where` is True.
        """
        value: Value = None
        if callable(self.values):
            try:
                value = self.values(x, where) if self.counts else self.values(x)
            except Exception as error:
                add_note(error, f"in values= at site {site!r}, of {describe(x)}.")
                raise
        elif self.values:
            value = x
        return KeptArray(value, self._units(jax.lax.stop_gradient(x), where, mapped))

    def _units(self, x: jax.Array, where: object, mapped: int) -> Units | None:
        if self.units is None or not -(x.ndim - mapped) <= self.units < x.ndim - mapped:
            return None
        axis = self.units if self.units < 0 else self.units + mapped
        return measure_units(x, axis=axis, where=where) if x.shape[axis] <= MAX_UNITS else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observation:
    """What one mark saw: a summary for each array, how often it was passed, and what was kept.

    That of a gradient may have the ticket of the run whose values it belongs to.
    """

    summaries: list[Summary]
    ran: Value
    kept: list[KeptArray] = dataclasses.field(default_factory=lambda: list[KeptArray]())
    ticket: Value = None


@internal_config()
def merge_observations(a: object, b: object) -> PyTree:
    """The sum of two trees of `Observation` with equal structure."""

    def add(x: Value, y: Value) -> PyTree:
        if isinstance(x, Summary):
            return merge_in_trace(x, y)
        return merge_units([x, y]) if isinstance(x, Units) else x + y

    return jax.tree.map(add, a, b, is_leaf=lambda x: isinstance(x, (Summary, Units)))


KEEP_NOTHING = Keep()
"""Keeps nothing but summaries."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do at the marks.

    Attributes:
        summarise: whether values are reduced to summaries.
        perturb: `(mark, arrays, rows) -> arrays` for outputs and inputs, of what a survey says of a
            mark; it may close over arrays.
        positions: whether `perturb` also takes, as its last argument, for each array which of its
            positions count: a mask that broadcasts to the array with the axes of vmaps in front, or
            None for all.
        numbered: whether `perturb` depends on the number of the call at its site.
        keep: what to keep besides summaries.
        sample: see `summarize`.
        unmeasured: the sites that are only perturbed.
        choices: whether softmaxes that choose are measured, if values are summarised.
    """

    summarise: bool = True
    perturb: Callable[..., list[Value]] | None = None
    positions: bool = False
    numbered: bool = True
    keep: Keep = KEEP_NOTHING
    sample: Sample = "auto"
    unmeasured: tuple[str, ...] = ()
    choices: bool = True
