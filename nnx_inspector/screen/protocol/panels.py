"""Messages to the browser for the panels of one site: parameters, units, code, a sweep."""

from __future__ import annotations

import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a module: its path, and its dtype and shape in words. The buffer of
    `Parameters` holds `bins` pairs of its histogram.
    """

    path: str
    array: str
    bins: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """The present parameters of a module, for a `Look`. Buffer: float64 [parameters, statistic],
    then for each parameter float64 [bins, 2], as in a `Frame`. `more` counts the parameters left
    out; `why` says why there are none.
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
    """Figures for each unit of the last axis of a site's output, for a `Look`. Buffer: float64
    [UNIT_FIGURES, units], NaN if no finite value was seen. `each` is the number of values per unit
    in that pass, `source` names the pass, `more` counts the units left out, and `why` says why
    there are none.
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
    """Lines of a file from `first` on; `line` is the line of a call, in `function`."""

    file: str
    function: str
    first: int
    line: int
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Code:
    """The calls of a module and the docstring of its type, for a `Look`. Buffer: none. `sown`
    lists the sites of the values that the module passes to `sow` or `perturb`.
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
    """The effect of perturbing one site alone; `why_not` says why it could not be measured. None:
    the figure is not finite, or not among the `measures`.
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

    `sites` is the selection and `perturbation` the Python text of the perturbation; `source` names
    the pass. `total` is 0 until it is known; a program is compiled while `done` is 0. `measures`
    names the fields of `rows` that have figures. `rows` come at the end: the first MOST_ROWS of
    `measured`, largest change first. `error` says why the sweep failed.
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
