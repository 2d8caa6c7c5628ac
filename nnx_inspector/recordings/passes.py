"""One pass of a recording: its summaries in compact form, and which they are.

Invariant: a pass never changes, so that snapshots of a recording may share it. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np

from nnx_inspector.recordings.facts import Figures
from nnx_inspector.recordings.layers import leaf_of
from nnx_inspector.stats.bins import NAN_BIN, NEGINF_BIN, POSINF_BIN
from nnx_inspector.stats.encoding import Sparse, decoded, encoded_all, ranges
from nnx_inspector.stats.summary import STATISTICS, Summary
from nnx_inspector.stats.table import figures_of

NONFINITE: Final = {"nan": NAN_BIN, "posinf": POSINF_BIN, "neginf": NEGINF_BIN}
"""The bins of non-finite values, by kind."""


class Measured(NamedTuple):
    """The summaries of a pass.

    Attributes:
        keys: (site, quantity) of each, in recorded order.
        packed: each as bytes, made by `stats.encoding.encoded_all`.
        nonfinite: (quantity, kind) of each kind of non-finite value that occurs.
    """

    keys: tuple[tuple[str, str], ...]
    packed: tuple[bytes, ...]
    nonfinite: frozenset[tuple[str, str]]

    def as_pass(
        self,
        number: int,
        step: int,
        layout: Layout,
        *,
        kind: str,
        perturbed: bool,
        setting: int,
        news: bool = False,
        figures: Figures | None = None,
    ) -> Pass:
        """The pass with these summaries, whose keys `layout` has; for the rest see `Pass`."""
        kinds = frozenset(kind_of_value for _, kind_of_value in self.nonfinite)
        return Pass(
            number, step, kind, perturbed, kinds, news, layout, self.packed, setting, figures
        )


def measured(summaries: Mapping[str, Mapping[str, Summary | None]]) -> Measured:
    """The summaries in site -> quantity -> Summary that are not None, each merged.

    Raises:
        ValueError: a quantity is not one of `QUANTITIES`.
        TypeError: a value is not a Summary, or holds tracers.
    """
    hosts = {
        (site, quantity): _on_host(site, quantity, summary)
        for site, quantities in summaries.items()
        for quantity, summary in quantities.items()
        if summary is not None
    }
    found = {
        (quantity, kind)
        for (_, quantity), summary in hosts.items()
        for kind, number in NONFINITE.items()
        if summary.bins[number]
    }
    return Measured(tuple(hosts), tuple(encoded_all(list(hosts.values()))), frozenset(found))


def _on_host(site: str, quantity: str, summary: object) -> Summary:
    """The summary in NumPy, merged if it has rows; waits for the device."""
    check_quantity(quantity, site)
    if not isinstance(summary, Summary):
        raise TypeError(
            f"The {quantity} of site {site!r} must be a Summary, got {type(summary).__name__}. "
            "Merge the summaries of a pytree into one with nnx_inspector.stats.summary.merge "
            "first."
        )
    try:
        return summary.without_rows()
    except TypeError as error:
        raise TypeError(f"The {quantity} of site {site!r}: {error}.") from error


def step_number(step: Any) -> int:
    """A step as an int.

    Raises:
        TypeError: the step is not an integer.
        ValueError: the step is too large to be drawn exactly.
    """
    number = operator.index(step)
    if not -(2**53) <= number <= 2**53:
        raise ValueError(f"A step must lie within 2**53 of 0, got {number}. Count from 0.")
    return number


Quantity = Literal["output", "gradient", "input"]
"""What was measured at a site: its output, the gradient of its output, or its input."""

QUANTITIES: Final[tuple[str, ...]] = get_args(Quantity)


def check_quantity(quantity: str, site: str) -> None:
    """Raise ValueError unless `quantity` is one of `QUANTITIES`."""
    if quantity not in QUANTITIES:
        names = ", ".join(map(repr, QUANTITIES))
        raise ValueError(f"There is no quantity {quantity!r} at site {site!r}; use one of {names}.")


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Which summaries a pass has, and where; passes with the same summaries share one.

    Attributes:
        keys: the key and quantity of each. Each array that a call returns has a key of its own.
        at: where each of them is.
        whole: the sites and layers of which any array was measured, with the quantity.
    """

    keys: tuple[tuple[str, str], ...]
    at: Mapping[tuple[str, str], int]
    whole: frozenset[tuple[str, str]]

    @staticmethod
    def of(keys: tuple[tuple[str, str], ...]) -> Layout:
        at = {key: i for i, key in enumerate(keys)}
        return Layout(keys, at, frozenset((leaf_of(key)[0], q) for key, q in keys))

    @property
    def nbytes(self) -> int:
        return 256 + 256 * len(self.keys)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Pass:
    """One recorded pass; never changes.

    Attributes:
        number: its index among all passes appended, thinned ones included.
        step: the step it belongs to; several passes may share one.
        kind: where it came from, for example "watch".
        perturbed: whether a perturbation was on.
        nonfinite: those of "nan", "posinf" and "neginf" that occur in its summaries.
        news: whether it has the recording's first NaN, +Inf or -Inf of a quantity and is
            therefore never thinned out.
        layout: which summaries it has; shared with other passes.
        packed: its summaries, compressed, in the order of `keys`.
        setting: equal numbers mean equal perturbations; 0 if there were none or they are unknown.
        figures: further figures that the rules need, or None if they were not measured.
    """

    number: int
    step: int
    kind: str
    perturbed: bool
    nonfinite: frozenset[str]
    news: bool
    layout: Layout
    packed: tuple[bytes, ...]
    setting: int = 0
    figures: Figures | None = None

    @property
    def keys(self) -> tuple[tuple[str, str], ...]:
        """(site, quantity) of every summary, in the order in which they were recorded."""
        return self.layout.keys

    def summary(self, site: str, quantity: Quantity = "output") -> Summary | None:
        """The summary of a site's quantity, or None if this pass did not measure it."""
        at = self.layout.at.get((site, quantity))
        return None if at is None else decoded(self.packed[at]).summary()

    def sizes(self, quantity: Quantity) -> dict[str, float]:
        """Site -> a bound of the sizes of a quantity's finite values; NaN if there are none."""
        of = [site for site, what in self.keys if what == quantity]
        ends = ranges([self.packed[self.layout.at[site, quantity]] for site in of])
        return dict(zip(of, np.abs(ends).max(axis=1).tolist(), strict=True))

    def norms(self, quantity: Quantity) -> dict[str, float]:
        """Site -> the L2 norm of a quantity; NaN where it is unknown."""
        of = [site for site, what in self.keys if what == quantity]
        table = figures_of([decoded(self.packed[self.layout.at[site, quantity]]) for site in of])
        return dict(zip(of, table[:, STATISTICS.index("norm")].tolist(), strict=True))

    def items(self) -> Iterator[tuple[str, str, Summary]]:
        """Site, quantity and summary of everything measured, in recorded order."""
        for (site, quantity), blob in zip(self.keys, self.packed, strict=True):
            yield site, quantity, decoded(blob).summary()

    def parts(self) -> dict[tuple[str, str], Sparse]:
        """The unpacked bytes of each summary by site and quantity, in recorded order."""
        return {key: decoded(blob) for key, blob in zip(self.keys, self.packed, strict=True)}

    @property
    def nbytes(self) -> int:
        """The memory that it takes, in bytes, without the layout that it shares."""
        figures = 0 if self.figures is None else self.figures.nbytes
        return 460 + 8 * len(self.packed) + sum(sys.getsizeof(b) + 8 for b in self.packed) + figures
