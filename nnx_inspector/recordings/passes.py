"""One pass of a recording: which summaries it has, and those in their compact form.

Invariant: a pass never changes, so that snapshots of a recording may share it. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

from nnx_inspector.recordings.facts import Figures
from nnx_inspector.stats.bins import NAN_BIN, NEGINF_BIN, POSINF_BIN
from nnx_inspector.stats.encoding import Sparse, decoded, encoded
from nnx_inspector.stats.summary import Summary

NONFINITE: Final = {"nan": NAN_BIN, "posinf": POSINF_BIN, "neginf": NEGINF_BIN}
"""The bins of what is no number, by kind."""


class Measured(NamedTuple):
    """The summaries of a pass.

    Attributes:
        keys: (site, quantity) of each, in recorded order.
        packed: each as `compact.encoded` makes it.
        nonfinite: (quantity, kind) for each kind of value that is no number, where there is any.
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
        """The pass with these summaries; the layout has their keys. See `Pass` for the rest."""
        kinds = frozenset(kind_of_value for _, kind_of_value in self.nonfinite)
        return Pass(
            number, step, kind, perturbed, kinds, news, layout, self.packed, setting, figures
        )


def measured(summaries: Mapping[str, Mapping[str, Summary | None]]) -> Measured:
    """Of site -> quantity -> Summary what there is, each merged.

    Raises:
        ValueError: a quantity is none of those that there are.
        TypeError: a summary is none, or holds tracers.
    """
    merged = {
        (site, quantity): _on_host(site, quantity, summary)
        for site, quantities in summaries.items()
        for quantity, summary in quantities.items()
        if summary is not None
    }
    found = {
        (quantity, kind)
        for (_, quantity), summary in merged.items()
        for kind, number in NONFINITE.items()
        if summary.bins[number]
    }
    return Measured(tuple(merged), tuple(map(encoded, merged.values())), frozenset(found))


def _on_host(site: str, quantity: str, summary: object) -> Summary:
    """The summary merged, in NumPy; waits for the device."""
    check_quantity(quantity, site)
    if not isinstance(summary, Summary):
        raise TypeError(
            f"The {quantity} of site {site!r} must be a Summary, got {type(summary).__name__}. "
            "Merge the summaries of a pytree into one first, with "
            "nnx_inspector.stats.summary.merge."
        )
    try:
        return summary.merged()
    except TypeError as error:
        raise TypeError(f"The {quantity} of site {site!r}: {error}.") from error


def step_number(step: Any) -> int:
    """A step as an int.

    Raises:
        TypeError: it is no integer.
        ValueError: it is too large to be drawn exactly.
    """
    number = operator.index(step)
    if not -(2**53) <= number <= 2**53:
        raise ValueError(f"A step must lie within 2**53 of 0, got {number}. Count from 0.")
    return number


Quantity = Literal["output", "gradient", "input"]
"""What was measured at a site: its output, the gradient of its output, or its input."""

QUANTITIES: Final[tuple[str, ...]] = get_args(Quantity)


def check_quantity(quantity: str, site: str) -> None:
    """Raises ValueError where `quantity` is none of the three."""
    if quantity not in QUANTITIES:
        names = ", ".join(map(repr, QUANTITIES))
        raise ValueError(f"There is no quantity {quantity!r} at site {site!r}; use one of {names}.")


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Which summaries a pass has; shared by all passes that have the same."""

    keys: tuple[tuple[str, str], ...]
    at: Mapping[tuple[str, str], int]

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes."""
        return 256 + 184 * len(self.keys)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Pass:
    """One recorded pass; never changes.

    Attributes:
        number: running index among all passes that were appended, thinned ones included.
        step: the step it belongs to; several passes may share one.
        kind: where it came from, for instance "watch".
        perturbed: whether a perturbation was on.
        nonfinite: which of "nan", "posinf" and "neginf" any of its summaries counts.
        news: whether it has the recording's first NaN, +Inf or -Inf of a quantity, and so stays.
        layout: which summaries it has; shared with other passes.
        packed: its summaries, compressed, in the order of `keys`.
        setting: which perturbations were in force: passes with the same number had the same; 0
            where there were none, or it is not known which.
        figures: what rules need besides, None where it was not measured.
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
        """The summary of a site's quantity, None where it was not measured in this pass."""
        at = self.layout.at.get((site, quantity))
        return None if at is None else decoded(self.packed[at]).summary()

    def items(self) -> Iterator[tuple[str, str, Summary]]:
        """Site, quantity and summary of everything measured, in recorded order."""
        for (site, quantity), blob in zip(self.keys, self.packed, strict=True):
            yield site, quantity, decoded(blob).summary()

    def parts(self) -> dict[tuple[str, str], Sparse]:
        """Of each site and quantity what is kept of its summary, in recorded order."""
        return {key: decoded(blob) for key, blob in zip(self.keys, self.packed, strict=True)}

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes, apart from what it shares with other passes."""
        figures = 0 if self.figures is None else self.figures.nbytes
        return 460 + 8 * len(self.packed) + sum(sys.getsizeof(b) + 8 for b in self.packed) + figures
