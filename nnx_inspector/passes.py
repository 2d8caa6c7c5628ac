"""One pass of a recording: which summaries it has, and those in their compact form.

Invariant: a pass never changes, so that snapshots of a recording may share it. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Final, Literal, get_args

from nnx_inspector.compact import Sparse, decoded
from nnx_inspector.observed import Figures
from nnx_inspector.summary import Summary

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
