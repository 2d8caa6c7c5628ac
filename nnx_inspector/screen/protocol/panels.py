"""Messages to the browser for the panels of one site: parameters, units, code, a sweep."""

from __future__ import annotations

import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a module: its path, and its dtype and shape in words. `bins` pairs of its
    histogram are in the buffer of `Parameters`.
    """

    path: str
    array: str
    bins: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """The parameters of a module as they are now, for a `Look`. Buffer: float64 [parameters,
    statistic], then for each of them float64 [bins, 2], as in a `Frame`. `more` counts those that
    are left out, `why` says why there are none.
    """

    type: ClassVar[str] = "parameters"
    version: int
    id: int
    site: str
    parameters: tuple[Parameter, ...]
    more: int
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitFigures:
    """Figures for each unit of the last axis of what a site returns, for a `Look`. Buffer:
    float64 [UNIT_FIGURES, units], NaN where nothing finite was seen. `each` is how many values a
    unit has in that pass, `source` which pass it was, `more` counts the units that are left out,
    `why` says why there are none.
    """

    type: ClassVar[str] = "units"
    version: int
    id: int
    site: str
    each: int
    source: str
    units: int
    more: int
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Excerpt:
    """Lines of a file from `first` on; `line` is the one that makes a call, in `function`."""

    file: str
    function: str
    first: int
    line: int
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Code:
    """Where a module is called and what its type says of itself, for a `Look`. Buffer: none.
    `sown` are the sites of the values that the module hands to `sow` or `perturb`.
    """

    type: ClassVar[str] = "code"
    version: int
    id: int
    site: str
    kind: str
    documentation: str
    excerpts: tuple[Excerpt, ...]
    sown: tuple[str, ...]
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRow:
    """What perturbing one site alone does; `why_not` says why it could not be measured. None
    where a figure is not finite, or not among the `measures`.
    """

    site: str
    loss_change: float | None
    output_change: float | None
    kl: float | None
    top1_changed: float | None
    why_not: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """The sweep that runs or ran last. Buffer: none.

    `sites` is the selection and `perturbation` the Python text of what is done at each; `source`
    names the pass. `total` is 0 until it is known; a program is compiled while `done` is 0.
    `measures` are the figures that there are, of the fields of `rows`. `rows` come at its end,
    the first MOST_ROWS of `measured`, largest change first. `error` says why it failed.
    """

    type: ClassVar[str] = "sweep"
    version: int
    running: bool
    stopped: bool
    done: int
    total: int
    sites: str
    perturbation: str
    source: str
    measures: tuple[str, ...]
    loss: float | None
    rows: tuple[SweepRow, ...]
    measured: int
    error: str
