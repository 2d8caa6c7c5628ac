"""One pass of a recording: its summaries in compact form, and which they are; and the events of the
run between passes.

Invariant: a pass never changes, so that snapshots of a recording may share it. The times of events
are those of the writer's clock, for people; nothing is worked out from them. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np

from nnx_inspector.recordings.facts import PassStats
from nnx_inspector.recordings.tree_rows import QUANTITIES_NOT_OF_SITES, STATE, leaf_of
from nnx_inspector.stats.bins import NAN_BIN, NEGINF_BIN, POSINF_BIN
from nnx_inspector.stats.encoding import (
    HEAD_BYTES,
    Packed,
    Sparse,
    decode,
    decode_ranges,
    encode,
)
from nnx_inspector.stats.summary import STATISTICS, Summary
from nnx_inspector.stats.table import stats_of

UPDATE: Final = {"update_ratio": "update"} | {
    f"update_{name}": name for name in ("lost", "decayed", "clipped")
}
"""A parameter's figures of its update in tables and trackers -> their names in `OF_UPDATE`."""
NONFINITE: Final = {"nan": NAN_BIN, "posinf": POSINF_BIN, "neginf": NEGINF_BIN}
"""The bins of non-finite values, by kind, in the order of the kinds' numbers in a file."""


def make_pass(
    summaries: Mapping[str, Mapping[str, Summary | None]], *, step: int, **marks: Any
) -> Pass:
    """A pass with the summaries in site -> quantity -> Summary that are not None, each merged. The
    recording that it is added to numbers it; `marks` are the rest of `Pass`.

    Raises:
        ValueError: a quantity is not one of `QUANTITIES`, or the step is too large.
        TypeError: a value is not a Summary, or holds tracers, or the step is not an integer.
    """
    at = step_number(step)
    hosts: dict[tuple[str, str], Summary] = {}
    for site, quantities in summaries.items():
        for quantity, summary in quantities.items():
            if quantity not in QUANTITIES:
                check_quantity(quantity, site)
            if summary is None:
                continue
            if not isinstance(summary, Summary):
                raise TypeError(
                    f"The {quantity} of site {site!r} must be a Summary, got "
                    f"{type(summary).__name__}. Merge the summaries of a pytree into one with "
                    "nnx_inspector.stats.summary.merge first."
                )
            try:
                hosts[site, quantity] = summary.without_rows()  # waits for the device
            except TypeError as error:
                raise TypeError(f"The {quantity} of site {site!r}: {error}.") from error
    kinds = NONFINITE.items()
    found = {(q, kind) for (_, q), one in hosts.items() for kind, n in kinds if one.bins[n]}
    how: Any = {"number": 0, "news": False, "found": frozenset(found), **marks}
    packed = encode(list(hosts.values()))
    return Pass(step=at, layout=layout_of(tuple(hosts)), packed=packed, **how)


def nonfinite_in(keys: Sequence[tuple[str, str]], found: Sparse) -> set[tuple[str, str]]:
    """(quantity, kind) of each kind of non-finite value in these summaries."""
    return {
        (keys[row][1], kind)
        for kind, number in NONFINITE.items()
        for row in found.rows[found.bins == number].tolist()
    }


def step_number(step: int) -> int:
    """A step as an int.

    Raises:
        TypeError: the step is not an integer.
        ValueError: the step is too large to be drawn exactly.
    """
    number = operator.index(step)
    if not -(2**53) <= number <= 2**53:
        raise ValueError(f"A step must lie within 2**53 of 0, got {number}. Count from 0.")
    return number


Quantity = Literal["output", "gradient", "input", "parameter", "parameter_gradient", "state"]
"""What was measured at a site: its output, the gradient of its output, or its input; or, under the
path of a parameter, its value when the pass began, or its gradient; or an array of an optimizer
when the pass began."""

QUANTITIES: Final[tuple[str, ...]] = get_args(Quantity)


def check_site(site: str, sites: Sequence[str]) -> None:
    if site not in sites:
        close = difflib.get_close_matches(site, sites, n=3, cutoff=0.4) or sites[:3]
        near = ", ".join(map(repr, close)) or "none yet: append a pass first"
        raise KeyError(f"{site!r} is not in this recording. The closest sites are {near}.")


def check_quantity(quantity: str, site: str) -> None:
    """Raise ValueError unless `quantity` is one of `QUANTITIES`."""
    if quantity not in QUANTITIES:
        names = ", ".join(map(repr, QUANTITIES))
        raise ValueError(f"There is no quantity {quantity!r} at site {site!r}; use one of {names}.")


@dataclasses.dataclass(frozen=True, slots=True)
class PassLayout:
    """Which summaries a pass has, and where; passes with the same summaries share one.

    Attributes:
        keys: the key and quantity of each. Each array that a call returns has a key of its own.
        at: where each of them is.
        whole: the sites and layers of which any array was measured, with the quantity.
    """

    keys: tuple[tuple[str, str], ...]
    at: Mapping[tuple[str, str], int]
    whole: frozenset[tuple[str, str]]

    @property
    def nbytes(self) -> int:
        return 256 + 256 * len(self.keys)


@functools.lru_cache(maxsize=16)
def layout_of(keys: tuple[tuple[str, str], ...]) -> PassLayout:
    at = {key: i for i, key in enumerate(keys)}
    return PassLayout(keys, at, frozenset((leaf_of(key)[0], q) for key, q in keys))


@functools.lru_cache(maxsize=16)
def _layout_of_sites(keys: tuple[tuple[str, str], ...]) -> PassLayout:
    return layout_of(tuple(key for key in keys if key[1] not in QUANTITIES_NOT_OF_SITES))


@functools.lru_cache(maxsize=600)  # the findings read the same ones after each pass
def _decoded_summary(piece: bytes) -> Sparse:
    return decode(Packed.of([piece]))


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Pass:
    """One recorded pass; never changes.

    Attributes:
        number: its index among all passes appended, thinned ones included.
        step: the step it belongs to; several passes may share one.
        kind: where it came from, for example "watch".
        perturbed: whether a perturbation was on.
        found: (quantity, kind) of each kind of non-finite value that occurs in its summaries.
        news: whether it has the recording's first NaN, +Inf or -Inf of a quantity and is
            therefore never thinned out.
        layout: which summaries it has; shared with other passes.
        packed: its summaries as bytes, in the order of `keys`.
        setting: equal numbers mean equal perturbations; 0 if there were none or they are unknown.
        figures: further figures that the rules need, or None if they were not measured.
    """

    number: int
    step: int
    kind: str
    perturbed: bool
    found: frozenset[tuple[str, str]]
    news: bool
    layout: PassLayout
    packed: Packed
    setting: int = 0
    figures: PassStats | None = None

    @property
    def nonfinite(self) -> frozenset[str]:
        """Those of "nan", "posinf" and "neginf" that occur in its summaries."""
        return frozenset(kind for _, kind in self.found)

    @property
    def firsts(self) -> frozenset[tuple[bool, str, str]]:
        """Whether it was perturbed, with the quantity and kind of its non-finite values."""
        return frozenset((self.perturbed, *which) for which in self.found)

    @property
    def keys(self) -> tuple[tuple[str, str], ...]:
        """(site, quantity) of every summary, in the order in which they were recorded."""
        return self.layout.keys

    def summary(self, site: str, quantity: Quantity = "output") -> Summary | None:
        """The summary of a site's quantity, or None if this pass did not measure it."""
        piece = self.piece(site, quantity)
        return None if piece is None else _decoded_summary(piece).summary(0)

    def piece(self, site: str, quantity: str) -> bytes | None:
        """The bytes of a summary."""
        at = self.layout.at.get((site, quantity))
        return None if at is None else self.packed.piece(at)

    @property
    def of_sites(self) -> Pass:
        """This pass without what was measured of parameters and optimizers."""
        layout = _layout_of_sites(self.keys)
        if len(layout.keys) == len(self.keys):
            return self
        if self.keys[: len(layout.keys)] == layout.keys:  # as a loop records them
            packed = self.packed.first(len(layout.keys))
        else:
            packed = Packed.of([self.packed.piece(self.layout.at[key]) for key in layout.keys])
        found = frozenset(one for one in self.found if one[0] not in QUANTITIES_NOT_OF_SITES)
        return dataclasses.replace(self, layout=layout, packed=packed, found=found)

    @property
    def states(self) -> dict[str, Summary]:
        """The arrays of optimizers when the pass began, by their keys."""
        found = decode(self.packed)
        return {key: found.summary(i) for i, (key, q) in enumerate(self.keys) if q == STATE}

    def update_ratio(self, path: str) -> float:
        """The norm of the change that the step made to a parameter, divided by the norm of its
        value before; NaN if no update was seen.
        """
        return float("nan") if self.figures is None else self.figures.parameter(path, "update")

    def updates(self, name: str) -> dict[str, float]:
        """One of `OF_UPDATE` of each parameter of which anything was measured."""
        return {} if self.figures is None else self.figures.of_parameters(name)

    def update_lost(self, path: str) -> float:
        """Of the elements of a parameter to which the step added something other than 0, the share
        that stayed what they were because the dtype rounds that off; NaN if there were none, if
        it was not seen what was added, or for a dtype other than float16 and bfloat16.
        """
        return float("nan") if self.figures is None else self.figures.parameter(path, "lost")

    def update_of(self, path: str) -> dict[str, float]:
        """`UPDATE` of a parameter, by name; NaN for what is not known."""
        return {
            name: float("nan") if self.figures is None else self.figures.parameter(path, figure)
            for name, figure in UPDATE.items()
        }

    def has_values(self, site: str) -> bool:
        """Whether it measured the output of a site, and that has any values."""
        piece = self.piece(site, "output")
        return piece is not None and len(piece) > HEAD_BYTES

    def sizes(self, quantity: Quantity) -> dict[str, float]:
        """Site -> a bound of the sizes of a quantity's finite values; NaN if there are none."""
        ends = np.abs(decode_ranges(self.packed)).max(axis=0).tolist()
        return {site: end for (site, q), end in zip(self.keys, ends, strict=True) if q == quantity}

    def norms(self, quantity: Quantity) -> dict[str, float]:
        """Site -> the L2 norm of a quantity; NaN where it is unknown."""
        norms = stats_of(decode(self.packed))[:, STATISTICS.index("norm")].tolist()
        return {
            site: norm for (site, q), norm in zip(self.keys, norms, strict=True) if q == quantity
        }

    def items(self) -> Iterator[tuple[str, str, Summary]]:
        """Site, quantity and summary of everything measured, in recorded order."""
        found = decode(self.packed)
        for row, (site, quantity) in enumerate(self.keys):
            yield site, quantity, found.summary(row)

    @property
    def nbytes(self) -> int:
        """The memory that it takes, in bytes, without the layout that it shares."""
        figures = 0 if self.figures is None else self.figures.nbytes
        return 640 + len(self.packed.data) + len(self.packed.ends) + figures


Event = Literal["begun", "resumed", "ended", "interrupted", "raised", "saved"]
EVENTS: Final[tuple[str, ...]] = get_args(Event)
"""In the order of their numbers in a file."""


class Mark(NamedTuple):
    """One event of a run.

    Attributes:
        event: "begun" or "resumed" while the run goes on; "saved" for a copy to which nothing is
            added; otherwise how it ended.
        number: how many passes the recording had been given, thinned ones included: a pass with
            this number or a higher one came after the event.
        time: seconds since 1970, by the clock of the process that wrote it.
        text: the error's type for "raised"; otherwise "".
    """

    event: Event
    number: int
    time: float
    text: str = ""

    @property
    def open(self) -> bool:
        """Whether the run goes on after it, or was killed before it could say that it ended."""
        return self.event in ("begun", "resumed")


def make_mark(event: Event, number: int, text: str = "") -> Mark:
    return Mark(event, number, time.time(), text)


def end_mark(error: BaseException | None, number: int) -> Mark:
    """The end of a run that this error has left, or None."""
    if isinstance(error, KeyboardInterrupt):
        return make_mark("interrupted", number)
    left = error is None or isinstance(error, GeneratorExit)
    if left or (isinstance(error, SystemExit) and not error.code):
        return make_mark("ended", number)
    return make_mark("raised", number, type(error).__name__)
