"""What was measured in one pass, checked and made compact, before a recording takes it.

Invariant: nothing is accepted in part. Waits for the device, and imports no jax.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from nnx_inspector.binning import NAN_BIN, NEGINF_BIN, POSINF_BIN
from nnx_inspector.compact import encoded
from nnx_inspector.observed import Figures
from nnx_inspector.passes import Layout, Pass, check_quantity
from nnx_inspector.summary import Summary

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
            "Merge the summaries of a pytree into one first, with nnx_inspector.summary.merge."
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
