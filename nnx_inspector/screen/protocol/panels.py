"""Messages to the browser for the panels of one site: parameters, units, code, a sweep, and what
is asked of a model beside its passes (lenses, attribution, the examples of a unit).

Each of these studies has one message, with what it found last; its `error` says why it found
nothing. It shows a few figures of one example, position or unit; the whole result stays in Python.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal


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
    """Figures for each unit along `axis` of a site's output, for a `Look`. Buffer: float64
    [UNIT_FIGURES, units], NaN if no finite value was seen. `each` is the number of values per unit
    in that pass, `source` names the pass, `more` counts the units left out, and `why` says why
    there are none. `axes` are all axes in words, () if they are unknown.
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
    axis: int = -1
    axes: tuple[str, ...] = ()


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LensCell:
    """What a layer says at a position: its likeliest words and their probabilities, and the
    probability and the rank of the answer.
    """

    words: tuple[str, ...]
    probabilities: tuple[float | None, ...]
    probability: float | None
    rank: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LensRow:
    """One layer of a lens."""

    site: str
    cells: tuple[LensCell, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lens:
    """The logit lens over one example. Buffer: none. `words` are those of the positions, or empty;
    `answers` are the words that are followed. `gap` is as in `nni.Lens`; `more` counts the
    positions left out.
    """

    type: ClassVar[str] = "lens"
    version: int
    running: bool
    error: str
    source: str
    example: int
    unembed: str
    norm: str
    words: tuple[str, ...]
    answers: tuple[str, ...]
    tokens: tuple[int, ...]
    gap: float | None
    rows: tuple[LensRow, ...]
    more: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitBar:
    """What a site adds to a logit."""

    site: str
    value: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logits:
    """What each site adds to the logit of a word at one position. Buffer: none."""

    type: ClassVar[str] = "logits"
    version: int
    running: bool
    error: str
    source: str
    example: int
    position: int
    token: int
    word: str
    logit: float | None
    bars: tuple[LogitBar, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attributed:
    """The attribution of an output to one example's input. Buffer: none. `scores` has the `shape`
    of the tokens or of the picture; `of` is the site or "" for an argument. `word` names the class
    or token; `difference` is output minus baseline, for integrated gradients.
    """

    type: ClassVar[str] = "attribution"
    version: int
    running: bool
    error: str
    source: str
    example: int
    of: str
    method: str
    word: str
    output: float | None
    difference: float | None
    shape: tuple[int, ...]
    blocks: int
    scores: tuple[float | None, ...]
    words: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExciteRow:
    """One example of a unit. `place` is where its value is; `words` is the text around it, whose
    word `at` is the place (-1: none).
    """

    which: Literal["most", "least", "random"]
    rank: int
    example: int
    place: tuple[int, ...]
    value: float | None
    words: tuple[str, ...]
    at: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitExamples:
    """The examples that excite one unit of a site. Buffer: none. `total` is 0 while it is unknown;
    `count` is the number of examples seen; `extent` holds the lengths of the axes of `place`;
    `of_batch` says that the examples are those of the batch on screen, not of other data;
    `constant` says that all have one value.
    """

    type: ClassVar[str] = "examples"
    version: int
    running: bool
    stopped: bool
    done: int
    total: int
    error: str
    source: str
    site: str
    axis: int
    unit: int
    units: int
    count: int
    nan: int
    constant: bool
    notes: tuple[str, ...]
    extent: tuple[int, ...]
    of_batch: bool
    rows: tuple[ExciteRow, ...]
