"""Messages to the browser for the panels of one site: units, code, a sweep, and what is asked of a
model beside its passes (lenses, attribution, the examples of a unit).

Each of these studies has one message, with what it found last. It shows a few figures of one
example, position or unit; the whole result stays in Python.
"""

from __future__ import annotations

from typing import Literal

from nnx_inspector.screen.protocol.headers import Struct, StudyMessage, ToBrowser
from nnx_inspector.screen.protocol.inputs import Pictures


class UnitStats(ToBrowser, type="units"):
    """Figures for each unit along `axis` of a site's output, for a `Look`. Buffer: float64
    [UNIT_STATS, units], NaN if no finite value was seen. `each` is the number of values per unit
    in that pass, `source` names the pass, `more` counts the units left out, and `why` says why
    there are none. `axes` are all axes in words, () if they are unknown. `behind` is the activation
    function that the values go into, as far as it decides which units are dead.
    """

    id: int
    site: str
    each: int
    source: str
    units: int
    more: int
    why: str
    axis: int = -1
    axes: tuple[str, ...] = ()
    behind: str = ""


class CompilationRow(Struct):
    """One compilation of a function of the user, with its lines; see `Compilation`. `step` is None
    outside a loop.
    """

    function: str
    defined: str
    called: str
    seconds: float
    step: int | None
    why: str


class Compilations(ToBrowser, type="compilations"):
    """What was compiled since the inspector was made, for a `Look`. Buffer: none. The rows are of
    functions of the user, newest first, `more` were left out. `operations` are those outside a
    jitted function, and `inspector` those that the inspector made for itself: how many, and their
    seconds.
    """

    id: int
    site: str
    rows: tuple[CompilationRow, ...]
    more: int
    operations: int
    operation_seconds: float
    inspector: int
    inspector_seconds: float


class CastRow(Struct):
    """What a pass measured: a site's output or gradient, or a parameter that the site holds, or its
    gradient, in words.
    """

    site: str
    name: str


class Casts(ToBrowser, type="casts"):
    """What lower precision would make of all that the newest pass measured, for a `Look`. Buffer:
    float64 [rows, CASTS, CAST_STATS], NaN if it is unknown. The rows are the first MOST_CASTS of
    `total`, those first that would lose most in any dtype.
    """

    id: int
    site: str
    step: int
    rows: tuple[CastRow, ...]
    total: int


class Excerpt(Struct):
    """Lines of a file from `first` on; `line` is the line of a call, in `function`."""

    file: str
    function: str
    first: int
    line: int
    text: str


class Code(ToBrowser, type="code"):
    """The calls of a module and the docstring of its type, for a `Look`. Buffer: none. `sown`
    lists the sites of the values that the module passes to `sow` or `perturb`.
    """

    id: int
    site: str
    kind: str
    documentation: str
    excerpts: tuple[Excerpt, ...]
    sown: tuple[str, ...]
    why: str


class SweepRow(Struct):
    """The effect of perturbing one site alone; `why_not` says why it could not be measured. None:
    the figure is not finite, or not among the `measures`.
    """

    site: str
    loss_change: float | None
    output_change: float | None
    kl: float | None
    top1_changed: float | None
    why_not: str


class Sweep(ToBrowser, type="sweep"):
    """The sweep that runs or ran last. Buffer: none.

    `sites` is the selection and `perturbation` the Python text of the perturbation; `source` names
    the pass. `total` is 0 until it is known; a program is compiled while `done` is 0. `measures`
    names the fields of `rows` that have figures. `rows` come at the end: the first MOST_RANKED of
    `measured`, largest change first. `error` says why the sweep failed.
    """

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


class LensCell(Struct):
    """A layer's likeliest words at a position, with probabilities, and the answer's rank."""

    words: tuple[str, ...]
    probabilities: tuple[float | None, ...]
    probability: float | None
    rank: int


class LensRow(Struct):
    """One layer of a lens."""

    site: str
    cells: tuple[LensCell, ...]


class Lens(StudyMessage, type="lens"):
    """The logit lens over one example. Buffer: none. `words` are those of the positions, or empty;
    `answers` are the words that are followed. `gap` is as in `nni.Lens`; `more` counts the
    positions left out.
    """

    example: int
    unembed: str
    norm: str
    words: tuple[str, ...]
    answers: tuple[str, ...]
    tokens: tuple[int, ...]
    gap: float | None
    rows: tuple[LensRow, ...]
    more: int


class LogitBar(Struct):
    """What a site adds to a logit."""

    site: str
    value: float | None


class Logits(StudyMessage, type="logits"):
    """What each site adds to the logit of a word at one position. Buffer: none."""

    example: int
    position: int
    token: int
    word: str
    logit: float | None
    bars: tuple[LogitBar, ...]


class Attributed(StudyMessage, type="attribution"):
    """The attribution of an output to one example's input. Buffer: none. `scores` has the `shape`
    of the tokens or of the picture; `of` is the site or "" for an argument. `word` names the class
    or token; `difference` is output minus baseline, for integrated gradients.
    """

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


class ExciteRow(Struct):
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


class UnitExamples(StudyMessage, type="examples"):
    """The examples that excite one unit of a site. Buffer: none. `total` is 0 while it is unknown;
    `count` is the number of examples seen; `extent` holds the lengths of the axes of `place`;
    `constant` says that all have one value. `pictures` has one for each of the rows, if they are of
    other data than a batch that the screen has.
    """

    stopped: bool
    done: int
    total: int
    site: str
    axis: int
    unit: int
    units: int
    count: int
    nan: int
    constant: bool
    notes: tuple[str, ...]
    extent: tuple[int, ...]
    rows: tuple[ExciteRow, ...]
    pictures: Pictures | None = None
